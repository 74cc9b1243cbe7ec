"""Each example is short, runs, and prints what its docstring says; notebooks print what they store."""

from __future__ import annotations

import ast
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from test_packaging import script

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
# Under torchrun in tests/test_demo.py; with other libraries in tests/integrations.
ELSEWHERE = {
    "train_sharded.py",
    "hf_large_vocabulary.py",
    "lightning_classifier.py",
    "serve.py",
    "serve_load.py",
    "sentence_pairs.py",
}
MOST_LINES = 120
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


def expected(path: Path) -> list[str]:
    """The lines of the docstring after "Expected output"."""
    text = ast.get_docstring(ast.parse(path.read_text()))
    assert "xpected output" in text, f"{path.name}: the docstring must have the expected output"
    return [line.strip() for line in text.split("xpected output")[1].split("\n\n", 1)[1].splitlines() if line.strip()]


@pytest.fixture(autouse=True)
def one_thread():
    """The sizes are small, and results must not depend on the machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_are_short_and_say_what_to_expect(path):
    assert len(path.read_text().splitlines()) <= MOST_LINES
    assert len(expected(path)) >= 2


@pytest.mark.parametrize("path", [path for path in EXAMPLES if path.name not in ELSEWHERE], ids=lambda path: path.name)
def test_examples_print_what_their_docstring_says(path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(path)])
    runpy.run_path(str(path), run_name="__main__")
    lines = [line.strip() for line in capsys.readouterr().out.splitlines() if line.strip()]
    wanted = expected(path)
    if torch.cuda.is_available():
        wanted = [line.replace("on cpu, captured: False", "on cuda, captured: True") for line in wanted]
    assert [NUMBER.sub("#", line) for line in lines] == [NUMBER.sub("#", line) for line in wanted]
    for line, want in zip(lines, wanted, strict=True):
        if " ms " not in line:
            got, right = (
                [float(n.replace(",", "")) for n in NUMBER.findall(text)] for text in (line, want)
            )  # the last digits differ between machines
            assert got == pytest.approx(right, rel=0.1, abs=0.05), line


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebooks_print_what_they_store(path, tmp_path, monkeypatch):
    """`python scripts/notebooks.py` stores the outputs; the last digits differ between machines."""
    monkeypatch.chdir(tmp_path)
    notebooks = script("notebooks")
    printed, stored = notebooks.run(path), notebooks.stored(path)
    assert len(printed) >= 4
    assert any(stored)
    for got, want in zip(printed, stored, strict=True):
        assert re.sub(r" +|-{2,}", " ", NUMBER.sub("#", got)) == re.sub(r" +|-{2,}", " ", NUMBER.sub("#", want))
        numbers = [[float(n.replace(",", "")) for n in NUMBER.findall(text)] for text in (got, want)]
        assert numbers[0] == pytest.approx(numbers[1], rel=0.2, abs=0.5)


def test_there_are_two_notebooks():
    assert [path.stem for path in NOTEBOOKS] == ["choose_a_sampler", "from_linear_to_a_sampled_head"]
