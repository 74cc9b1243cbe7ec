"""Every python block of these pages runs, page by page, top to bottom."""

from __future__ import annotations

import importlib.util
import io
import re
import shlex
import tokenize
from pathlib import Path

import pytest
import torch
import typer

from samplex_cuda.cli.app import app as cli

DOCS = Path(__file__).parent.parent / "docs"
# Pages whose blocks another test runs, or that only show a piece of code.
ELSEWHERE = {
    "architecture.md": "the walk of one step names h and y only",
    "cli.md": "reads a file of `samplex fit-tree`",
    "data.md": "tests/test_data_docs.py",
    "metrics.md": "tests/test_data_docs.py",
    "training.md": "reads run.toml; tests/test_tutorial.py runs the same calls",
    "tutorial.md": "tests/test_tutorial.py",
}
ALL = sorted(DOCS.rglob("*.md"))
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def runs_here(page: Path) -> bool:
    """Whether this test runs its blocks; tests/integrations/test_pages.py runs those that need other libraries."""
    name = page.relative_to(DOCS)
    return "\n```python\n" in page.read_text() and str(name) not in ELSEWHERE and name.parts[0] != "integrations"


PAGES = [page for page in ALL if runs_here(page)]


def blocks(page: Path) -> list[tuple[int, str]]:
    """(line of the file, source) of each block."""
    text = page.read_text()
    return [(text[: found.start(1)].count("\n"), found.group(1)) for found in BLOCK.finditer(text)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # what a page writes
    found = blocks(page)
    assert found, f"{page.name} has no example"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the examples are small, and other work may run beside them
    names: dict[str, object] = {"__name__": page.stem}
    try:
        for line, source in found:
            # Errors name the line of the page.
            exec(compile("\n" * line + source, str(page), "exec"), names)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("page", ALL, ids=lambda page: str(page.relative_to(DOCS)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_most_pages_have_blocks_that_run():
    assert len(PAGES) > 30
    assert all((DOCS / name).exists() for name in ELSEWHERE)


def test_command_lines_of_the_pages_parse():
    """Every line that begins with `samplex`, against the options the command really has."""
    main = typer.main.get_command(cli)
    count = 0
    for page in [DOCS.parent / "README.md", *ALL]:
        text = page.read_text().replace("\\\n", " ")
        for line in re.findall(r"^ *(?:torchrun .*--no-python )?samplex ([a-z].*)$", text, re.MULTILINE):
            name, *words = [word for word in shlex.split(line, comments=True) if word != "..."]
            command = main.commands[name]
            given = command.make_parser(command.make_context(name, [], resilient_parsing=True)).parse_args(words)[0]
            config = given.get("config")
            assert config is None or config.endswith(".toml"), f"{page.name}: samplex {line}"
            count += 1
    assert count > 25


def test_every_page_is_in_the_contents_of_the_site():
    listed = set(re.findall(r"^[\w/]+$", (DOCS / "index.md").read_text() + "index\n", re.MULTILINE))
    reference = re.findall(r"^\w+$", (DOCS / "reference" / "index.md").read_text(), re.MULTILINE)
    listed |= {f"reference/{name}" for name in reference}
    assert {str(page.relative_to(DOCS).with_suffix("")) for page in ALL} <= listed


# What PyTorch's documentation would not say, and what it says instead.
PHRASES = {
    r"\blaws?\b(?<!Zipf's law)": "distribution",
    r"\bin strata\b": "stratified",
    r"\bby chance\b": "random",
    r"\bbut (for|with)\b": "except, unless",
    r"\b(hands? over|puts? by)\b": "passes, stores",
    r"\b(is|are) told\b": "receives",
    r"\banew\b": "again",
    r"\b(draws|samples|classes) a row\b": "per row",
    r"normalis(?!ed)|regularis|behaviour|neighbour": "American spelling",
}
# More of them, for the pages alone.
PAGE_PHRASES = {
    **PHRASES,
    r"(uninitial|random)is": "American spelling",
    r"\b(bytes|numbers?|sums?|state|negatives?|sequence|ids?|[KMG]B|examples?) an? "
    r"(row|bucket|pair|class|node|user|process|batch|step|epoch|draw|example|query|level|line|sampler|word)\b": "per",
    r"\bgo(es)? on\b(?! (a|the|your|cpu|cuda)\b)": "continues",
    r"\bsome (\d[\d,.]*|hundreds|tens|ten|thousands)\b": "about",
    r"\bin silence\b": "without an error",
    r"\b(by|is) arithmetic\b(?<!or by arithmetic)": "estimated",
    r"\bfalling frequency\b": "decreasing frequency",
    r"\b(takes?|have|has|had) (no )?part\b(?! of)": "is used, is ignored",
    r"\bnext to no(ne)?\b": "almost no",
    r"\b(whatever|whoever) (m|C|n|k|D|K|q|it|the|this)\b": "independent of, for any",
    r"\b(is|are) none\b": "what it is instead",
    r"\b[Nn]obody\b|\b[Nn]o GPU has run\b": "has not been run",
    r"\b(is|are|be|was) worth\b": "improves, costs",
    r"\bof (its|your|their|our|his) own\b": "a separate, your own",
    r"\bsays? nothing\b": "does not show",
    r"\bspeaks? against\b": "unless",
    r"\bgives? back\b|\bgiven back\b": "returns",
    r"\bput in place\b": "written",
    r"\bnothing that was tried\b|\bgets there\b": "no other setting reaches",
    r"\bthat stays for\b|\bpush(es)? with\b|\bthe mean push\b": "the gradient is",
    r"\b(as good as|practically) (certain|never happen)": "almost always, rarely",
}
GENERATED = {
    "messages.md": "scripts/messages.py",
    "benchmarks.md": "bench/update_readme.py",
    "gpu_model.md": "bench/gpu_model.py",
}
PROJECT = [
    DOCS.parent / name
    for name in (
        "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "bench/README.md", "csrc/README.md",
        "tests/simt/README.md",
    )
]  # fmt: skip


def page_prose(text: str) -> str:
    """A page without code, quoted names and rows of tables that begin with one. Messages are read as prose."""
    text = re.sub(r"^```text$|^```$(?=\n\n## |\s*\Z)", "", text, flags=re.MULTILINE) if MESSAGES in text else text
    text = re.sub(r"^ValueError: .*\blaw must be.*$", "", text, flags=re.MULTILINE)  # the name of an argument
    return re.sub(r"^```.*?^```|^    .*?$|`[^`\n]+`|^\| `.*?$|\{[^}\n]*\}", "", text, flags=re.MULTILINE | re.DOTALL)


MESSAGES = "<!-- Written by scripts/messages.py"


@pytest.mark.parametrize("page", [*PROJECT, *ALL], ids=lambda page: str(page.relative_to(DOCS.parent)))
def test_pages_are_in_plain_english(page):
    found = [
        f"{match[0]!r}: write {instead!r}"
        for phrase, instead in PAGE_PHRASES.items()
        for match in re.finditer(phrase, page_prose(page.read_text()))
    ]
    assert found == [], f"{page.name}, written by {GENERATED.get(page.name, 'hand')}"


def test_phrases_in_pages_are_found():
    text = "12 bytes a bucket, whatever C is; nothing that was tried gets there.\n```python\nlaw = 1\n```\n| `law` |\n"
    assert [match[0] for phrase in PAGE_PHRASES for match in re.finditer(phrase, page_prose(text))] == [
        "bytes a bucket", "whatever C", "nothing that was tried", "gets there",
    ]  # fmt: skip
    assert "anew" in page_prose(f"{MESSAGES} -->\n\n```text\nValueError: f: x must be made anew, got {{x}}\n```\n")


# Sources, in which comments, docstrings, strings and messages are read. Names in code are not prose.
SOURCES = [
    path
    for folder in ("python", "csrc", "bench", "tests", "scripts", "examples", "cmake")
    for path in sorted((DOCS.parent / folder).rglob("*"))
    if path.suffix in {".py", ".h", ".cpp", ".cu", ".cuh", ".cmake"} and path.name != "test_docs.py"
]
SOURCE_PHRASES = {
    **{phrase: better for phrase, better in PHRASES.items() if "law" not in phrase and "but (for" not in phrase},
    r"(?<![\w.`'])a law of its own\b": "its own distribution",
    r"\b(the|whose|uniform|unigram|conditional|tree) laws?\b(?! of)(?!\s*[=(,:)\]])": "distribution",
    r"\bbut for (the|a|an|one|rounding)\b": "except for",
    r"(?<!there )\bis no (class|target|negative|leaf|number|tensor|function)\b": "is not a",
    r"\bnobody has looked\b": "has not been checked",
    r"\bat hand\b": "available",
    r"\bby the shortest way\b": "fast path",
    r"\b(mends|mended)\b(?! [=i])": "repairs",
    r"\bnullptr where\b": "nullptr if",
}


def prose(path: Path) -> str:
    """Comments, and in Python also docstrings and strings of several words, one per line; without quoted code."""
    text = path.read_text()
    if path.suffix != ".py":
        found = re.findall(
            r"//(.*)$|\"([^\"\n]* [^\"\n]* [^\"\n]*)\"" if path.suffix != ".cmake" else r"#(.*)$()", text, re.MULTILINE
        )
        parts = ["".join(pair) for pair in found]
    else:
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        parts = [
            token.string
            for token in tokens
            if token.type == tokenize.COMMENT or (token.type in STRINGS and token.string.count(" ") >= 2)
        ]
    return re.sub(r"`[^`\n]+`|^\s*(>>>|\.\.\.).*$", "", "\n".join(parts), flags=re.MULTILINE)


STRINGS = {tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}


@pytest.mark.parametrize("folder", ["python", "csrc", "bench", "tests", "scripts", "examples", "cmake"])
def test_sources_are_in_plain_english(folder):
    found = [
        f"{path.relative_to(DOCS.parent)}: {match[0]!r}: write {instead!r}"
        for path in SOURCES
        if path.relative_to(DOCS.parent).parts[0] == folder
        for text in [prose(path)]
        for phrase, instead in SOURCE_PHRASES.items()
        for match in re.finditer(phrase, text)
    ]
    assert found == []


def test_phrases_in_sources_are_found(tmp_path):
    file = tmp_path / "x.py"
    file.write_text(
        'def f():\n    """Draws in strata; 0 but for the tree."""\n    law = 1  # a row by chance\n    return law\n'
    )
    text = prose(file)
    assert [phrase for phrase in SOURCE_PHRASES if re.search(phrase, text)] == [
        r"\bin strata\b", r"\bby chance\b", r"\bbut for (the|a|an|one|rounding)\b"
    ]  # fmt: skip
    file = tmp_path / "x.cu"
    file.write_text('int at_hand;  // the only block is at hand\ncheck(x, "this is told nobody");\n')
    assert [phrase for phrase in SOURCE_PHRASES if re.search(phrase, prose(file))] == [
        r"\b(is|are) told\b", r"\bat hand\b"
    ]  # fmt: skip


def test_every_public_module_is_in_the_reference():
    import samplex_cuda as sx

    pages = "\n".join(page.read_text() for page in (DOCS / "reference").glob("*.md"))
    for name in sx.__all__:
        if not name.startswith("_"):
            assert re.search(rf"^\.\. auto\w+:: samplex_cuda\.{name}$", pages, re.MULTILINE), name


@pytest.mark.parametrize(("page", "name"), [("heads", "SampledClassifier"), ("distributed", "ShardedClassifier")])
def test_the_reference_of_heads_has_their_inherited_methods(page, name):
    """A head is made of several classes that the reference does not name: topk, predict, set_sampler are theirs."""
    import samplex_cuda as sx

    kind = getattr(sx, name, None) or getattr(sx.distributed, name)
    bases = [base for base in kind.__mro__[1:] if base.__module__.startswith("samplex_cuda")]
    assert {"topk", "predict", "log_prob"} <= {method for base in bases for method in vars(base)}
    text = (DOCS / "reference" / f"{page}.md").read_text()
    options = re.search(r"^\.\. auto\w+:: samplex_cuda\.(?:SampledC\w+|distributed)\n((?:   :.*\n)+)", text, re.M)[1]
    last = re.search(r":inherited-members: (.*)", options)[1].split(", ")
    assert "Module" in last
    assert not [base.__name__ for base in bases if base.__name__ in last]


def test_a_letter_and_a_period_are_no_list():
    """As in "num_classes: C."; reStructuredText would begin a list with C."""
    spec = importlib.util.spec_from_file_location("site_settings", DOCS / "conf.py")
    conf = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(conf)
    lines = ["What it is for.", "", "Args:", "    num_classes: C.", "    x: [B, d], of E. coli.", "    y: C. elegans"]
    found = conf.as_restructured_text(lines)
    assert found[3:6] == [r"    num_classes: C\.", "    x: [B, d], of E. coli.", "    y: C. elegans"]


def test_every_sampler_has_a_page():
    import samplex_cuda as sx

    text = "\n".join(page.read_text() for page in sorted((DOCS / "samplers").glob("*.md")))
    index = (DOCS / "samplers.md").read_text()
    for page in (DOCS / "samplers").glob("*.md"):
        assert f"(samplers/{page.name})" in index
    for name in sx.samplers.__all__:
        if name not in ("Sampler", "Exclude", "ExactSampler", "KernelSampler", "StaticSampler"):
            assert f"sx.samplers.{name}" in text, name


def test_files_that_the_architecture_page_names_exist():
    text = (DOCS / "architecture.md").read_text()
    named = re.findall(r"`((?:python|csrc|tests|docs|bench)/[\w./]*)`", text)
    assert len(named) > 30
    assert [name for name in named if not (DOCS.parent / name).exists()] == []
    bare = re.findall(r"`[\w]+\.(?:py|h|cpp|cuh|cu)`", text)
    assert bare == [], "name files from the root"
