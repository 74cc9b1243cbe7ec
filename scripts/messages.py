"""Writes docs/messages.md, every error and warning of the package in one list: python scripts/messages.py [--check]

Collected from the source: `raise` and `warnings.warn` of python/, and the checks and throws of csrc/. Values that are
filled in at run time are shown as {name}. With --check nothing is written; the exit code says whether the file is up to
date.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "messages.md"
HEAD = """\
# Error messages

<!-- Written by scripts/messages.py; do not edit by hand. -->

Every error and warning of the package, by source file, so that they can be read in a row. A value in braces is filled
in at run time. Messages have the form `function: argument must be ..., got ...`, then what to do if it is not obvious.
"""
LONGEST = 40  # of an expression in braces


# ------------------------------------------------------------------------------------------------ Python
def _text(node: ast.expr) -> str | None:
    """The text of a string expression, with {expression} for what is filled in; None if it is not a string."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) or "" for part in node.values)
    if isinstance(node, ast.FormattedValue):
        inside = ast.unparse(node.value)
        return "{" + (inside if len(inside) <= LONGEST else "...") + "}"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _text(node.left), _text(node.right)
        if left is None and right is None:
            return None
        return (left if left is not None else "{...}") + (right if right is not None else "{...}")
    return None


def python_messages(source: str) -> Iterator[tuple[str, str]]:
    """(kind, text) of each message of a Python file, in its order."""
    for node in sorted(ast.walk(ast.parse(source)), key=lambda node: getattr(node, "lineno", 0)):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            kind, first = ast.unparse(node.exc.func), node.exc.args[0]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "warnings.warn" and node.args:
            kind, first = "warning", node.args[0]
        else:
            continue
        text = _text(first)
        if text:
            yield kind, text


# ------------------------------------------------------------------------------------------------ C++
CALL = re.compile(r"\b(check_index|check_type|check_value|fail|throw std::runtime_error)\s*\(")
KINDS = {"check_index": "IndexError", "check_type": "TypeError", "check_value": "ValueError"}


def _arguments(source: str, start: int) -> list[str]:
    """The arguments of a call whose opening bracket is before `start`."""
    parts, depth, begin, at = [], 1, start, start
    while at < len(source) and depth:
        c = source[at]
        if c == '"':
            at = re.compile(r'"(?:[^"\\]|\\.)*"').match(source, at).end()
            continue
        if c == "'" and source[at + 2 : at + 3] == "'":
            at += 3
            continue
        depth += (c in "([{") - (c in ")]}")
        if (c == "," and depth == 1) or depth == 0:
            parts.append(source[begin:at])
            begin = at + 1
        at += 1
    return parts


def cpp_messages(source: str) -> Iterator[tuple[str, str]]:
    """(kind, text) of each message of a C++ file, in its order."""
    source = re.sub(r"^\s*(//|#).*$", "", source, flags=re.MULTILINE)
    for found in CALL.finditer(source):
        before = source[: found.start()].rsplit("\n", 1)[-1]
        if re.search(r"\b(void|inline)\b", before):
            continue  # the definition of a check
        parts = _arguments(source, found.end())
        name = found.group(1)
        if name.startswith("check"):
            parts = parts[1:]
        text = ""
        for part in parts:
            strings = re.findall(r'"((?:[^"\\]|\\.)*)"', part)
            rest = re.sub(r'"(?:[^"\\]|\\.)*"', "", part)
            if not strings:
                text += "{" + " ".join(part.split())[:LONGEST] + "}"
            elif re.search(r"\w", rest.replace("std::string", "")) and "+" in rest:
                text += "{...}".join(strings)
            elif "?" in rest:
                text += "{" + " or ".join(strings) + "}"
            else:
                text += "".join(strings)
        text = text.replace('\\"', '"').replace("\\n", " ")
        if text.startswith(":"):
            text = "{op}" + text
        kind = KINDS.get(name, "RuntimeError")
        typed = re.match(r"(\w+Error): ", text)
        if typed:
            kind, text = typed[1], text[typed.end() :]
        if re.search(r"[a-z]{3}", re.sub(r"\{[^}]*\}", "", text)):
            yield kind, text


# ------------------------------------------------------------------------------------------------ page
def page() -> str:
    """The whole of docs/messages.md."""
    parts = [HEAD]
    python = sorted((ROOT / "python" / "samplex_cuda").rglob("*.py"))
    cpp = sorted(path for path in (ROOT / "csrc").rglob("*") if path.suffix in (".cpp", ".h"))
    for paths, messages in ((python, python_messages), (cpp, cpp_messages)):
        for path in paths:
            found = list(dict.fromkeys(messages(path.read_text(encoding="utf-8"))))
            if found:
                parts += [f"## {path.relative_to(ROOT).as_posix()}", "", "```text"]
                parts += [f"{kind}: {' '.join(text.split())}" for kind, text in found]
                parts += ["```", ""]
    return "\n".join(parts)


def main(check: bool) -> int:
    """Write the page, or compare it."""
    fresh = page()
    name = PAGE.relative_to(ROOT).as_posix()
    if PAGE.exists() and PAGE.read_text(encoding="utf-8") == fresh:
        print(f"messages: {name} is up to date")
        return 0
    if check:
        print(f"messages: {name} differs from the source; run: python scripts/messages.py")
        return 1
    PAGE.write_text(fresh, encoding="utf-8")
    print(f"messages: {name} written")
    return 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
