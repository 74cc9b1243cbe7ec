"""The code of docs/data.md and docs/metrics.md runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[1] / "docs"


@pytest.mark.parametrize("name", ["data.md", "metrics.md"])
def test_page_runs(name, tmp_path, monkeypatch, capsys):
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / name).read_text(), re.MULTILINE | re.DOTALL)
    assert blocks
    monkeypatch.chdir(tmp_path)
    exec(compile("\n".join(blocks), name, "exec"), {})
    if name == "data.md":
        printed = capsys.readouterr().out
        assert "xc_file: bad.txt:3: label 99 is outside [0, 9)" in printed
        assert "skipped 1 bad line of bad.txt (line 3: label 99 is outside [0, 9))" in printed
