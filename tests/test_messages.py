"""docs/messages.md lists every error message of the package, and the messages follow their form."""

from __future__ import annotations

import re

from test_packaging import script

PYTHON = """
def f(x):
    if x:
        raise ValueError(f"f: x must be 0, got {x}")
    raise self.error("f: " + name + " is missing")
    raise NotImplementedError
    raise KeyError(x)
def g():
    warnings.warn("g: slow", stacklevel=2)
"""
CPP = """
inline void check_value(bool ok, const Parts&... parts) {
// check_value(false, "not this");
check_value(a(b, c) == 1, op, ": x must be [", d, ", 2], got ", describe(x));
fail(wide ? "ValueError: " : "TypeError: ", op, ": x must be given");
throw std::runtime_error(std::string(op) + ": level must be at most '" + name + "'");
"""


def test_messages_are_collected_from_python():
    assert list(script("messages").python_messages(PYTHON)) == [
        ("ValueError", "f: x must be 0, got {x}"),
        ("self.error", "f: {...} is missing"),
        ("warning", "g: slow"),
    ]


def test_messages_are_collected_from_cpp():
    assert list(script("messages").cpp_messages(CPP)) == [
        ("ValueError", "{op}: x must be [{d}, 2], got {describe(x)}"),
        ("RuntimeError", "{ValueError:  or TypeError: }{op}: x must be given"),
        ("RuntimeError", "{op}: level must be at most '{...}'"),
    ]


def test_the_page_is_up_to_date():
    messages = script("messages")
    assert messages.main(check=True) == 0, "run: python scripts/messages.py"


def test_no_message_has_a_phrase_that_needs_translating():
    text = re.sub(r"\{[^}]*\}", "", script("messages").PAGE.read_text(encoding="utf-8"))
    assert (
        re.findall(r"^.*(?:\bbut with\b|\bbut for\b|\bby chance\b|\bis none\b|\bstrata\b).*$", text, re.MULTILINE) == []
    )
