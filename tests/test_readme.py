"""README.md is short, its example runs, its links and figures are right; docs/benchmarks.md is up to date."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MOST_WORDS = 900
MOST_ROWS = 8
MOST_LINES = 12


def prose(text: str) -> str:
    """The text without code blocks, tables, comments, images and the targets of links."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"^\|.*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)


def test_prose_counts_words_and_nothing_else():
    text = "# One two\n\n```sh\nmake it\n```\n| a | b |\n|---|---|\n[three four](docs/x.md) ![no](y.png)\n<!-- no -->\n"
    assert prose(text).split() == ["#", "One", "two", "three", "four"]


def test_readme_is_short():
    words = [word for word in prose(README).split() if re.search(r"\w", word)]
    assert len(words) <= MOST_WORDS, f"README.md has {len(words)} words of prose; move some to docs/"


def test_table_of_figures_has_few_rows():
    rows = README.split("<!-- bench:begin -->")[1].split("<!-- bench:end -->")[0].strip().splitlines()[2:]
    assert 1 <= len(rows) <= MOST_ROWS
    for row in rows:
        where = row.split("|")[-2]
        assert re.search(r"AVX|no SIMD", where), row
        assert re.search(r"\b[0-9a-f]{7}\b", where), row
    assert "target" not in README.split("## How fast")[1].split("## Samplers")[0].split("|")[1]


def test_generated_figures_are_up_to_date():
    done = subprocess.run(
        [sys.executable, str(ROOT / "bench" / "update_readme.py"), "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_table_of_the_benchmarks_page_has_its_own_origin():
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    sections = page.split("\n## ")[1:]
    assert len(sections) > 15
    for section in sections:
        tables = len(re.findall(r"^\|--", section, re.MULTILINE))
        origins = re.findall(r"^\*.+ cores, .+, torch .+; commit [0-9a-f, +]+; 20\d\d-.*\*$", section, re.MULTILINE)
        assert tables == len(origins) >= 1, section.splitlines()[0]
    assert "| target |" not in page


def test_figures_of_another_processor_are_kept(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import _harness

    monkeypatch.setattr(_harness, "RESULTS", tmp_path)

    def store(cpu, simd, value):
        report = object.__new__(_harness.Report)
        report.name, report.date, report.commit, report.load, report.extra = "step", "2026-01-01", "abc", 0.0, {}
        report.machine = {"cpu": cpu, "simd": simd}
        report.rows = [_harness.Row("one", "one", value, "x", "checked")]
        report._write()

    def stored():
        found = {path.name: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
        return {name: (kept["machine"]["cpu"], kept["rows"][0]["value"]) for name, kept in found.items()}

    store("A(R) Chip", "avx2", 1.0)
    store("B", "avx512", 2.0)
    assert stored() == {"step.json": ("B", 2.0), "step.a-r-chip-avx2.json": ("A(R) Chip", 1.0)}
    store("A(R) Chip", "avx2", 3.0)
    assert stored() == {"step.json": ("A(R) Chip", 3.0), "step.b-avx512.json": ("B", 2.0)}


def test_the_example_runs_and_is_short(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    [example] = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert len([line for line in example.splitlines() if line.strip()]) <= MOST_LINES
    assert example.count("1_000_000") == 1
    exec(compile(example.replace("1_000_000", "10_000"), "README.md", "exec"), {})


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "SECURITY.md"])
def test_links_lead_somewhere(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        assert "://" in target or (ROOT / target).exists(), f"{name}: {target}"


def test_nothing_promises_an_index():
    """`pip install samplex-cuda` works only for extras of what is installed already; docs/install.md explains that."""
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for found in re.finditer(r"pip install ['\"]?samplex-cuda(\S*)", page.read_text(encoding="utf-8")):
            extra = found.group(1).startswith("[")
            assert extra, f"{page.relative_to(ROOT)}: {found.group(0)}"
