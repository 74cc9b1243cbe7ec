"""docs/tutorial.md runs from top to bottom, and docs/cli.md names every command and option."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("rich")

import typer

from samplex_cuda import cli
from samplex_cuda.cli.app import app

DOCS = Path(__file__).parent.parent / "docs"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def commands(block: str) -> list[list[str]]:
    """The commands of a block, `\\` at the end of a line continues it."""
    return [shlex.split(line) for line in block.replace("\\\n", " ").splitlines() if line.strip()]


def test_every_block_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = (DOCS / "tutorial.md").read_text()
    names: dict[str, object] = {"__name__": "tutorial"}
    run = 0
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the models are small, and other tests run beside this one
    try:
        for found in BLOCK.finditer(text):
            kind, block = found.groups()
            if kind == "toml":
                Path("run.toml").write_text(block)
            elif kind == "python":
                line = text[: found.start(2)].count("\n")
                exec(compile("\n" * line + block, "docs/tutorial.md", "exec"), names)
            elif kind == "sh" and not block.startswith("pip install"):
                for words in commands(block):
                    assert words[0] == "samplex"
                    assert cli.main(words[1:]) == 0, capsys.readouterr()
                    run += 1
    finally:
        torch.set_num_threads(threads)
    # All of them: a command within a sentence would not have run. `samplex COMMAND --help` stands for any.
    assert run == len(re.findall(r"^samplex ", text, re.MULTILINE)) >= 16
    assert set(re.findall(r"`(samplex [^`]+)`", text)) == {"samplex info", "samplex COMMAND --help"}
    # What the page promises.
    assert (tmp_path / "runs/first/plots/curves.png").exists()
    assert (tmp_path / "runs/first/plots/diagnosis.png").exists()
    top = [json.loads(line) for line in (tmp_path / "top.jsonl").read_text().splitlines()]
    assert len(top) == 100
    assert all(len(record["ids"]) == 3 for record in top)
    assert names["result"].status == "finished"


def test_every_command_and_option_is_in_the_reference():
    text = (DOCS / "cli.md").read_text()
    group = typer.main.get_command(app)
    for name, command in group.commands.items():
        part = re.search(rf"^### `samplex {name}.*?(?=^##|\Z)", text, re.MULTILINE | re.DOTALL)
        assert part is not None, name
        for parameter in command.params:
            for option in parameter.opts:
                if option.startswith("-") and option not in ("--help", "-h", "--json"):
                    assert f"`{option}" in part.group(0), f"{name}: {option}"


@pytest.mark.parametrize("page", ["tutorial.md", "cli.md"])
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", (DOCS / page).read_text()):
        if "://" not in target:
            assert (DOCS / target).exists(), target
