"""The HTTP example is short, answers what it says, and answers under load."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

for name in ("fastapi", "uvicorn", "httpx"):
    pytest.importorskip(name)

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_serve_under_load():
    command = [sys.executable, str(EXAMPLES / "serve_load.py"), "--requests", "100", "--at-once", "80"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr[-2000:]
    assert re.search(r"\d+ requests/s, p50 [\d.]+ ms, p90 [\d.]+ ms, p99 [\d.]+ ms", found.stdout), found.stdout


def test_serve_is_short_and_answers_what_it_says(monkeypatch):
    text = (EXAMPLES / "serve.py").read_text()
    assert len(text.splitlines()) <= 60
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import serve

    said = json.loads("".join(line.strip() for line in re.findall(r"^    .*[\[\]].*[,}]$", text, re.MULTILINE)[:2]))
    [found] = serve.answer([[float(i) for i in range(16)]])
    assert found["ids"] == said["ids"]
    assert found["logits"] == pytest.approx(said["logits"], abs=2e-3)
