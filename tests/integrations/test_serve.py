"""The HTTP example answers under load."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_serve_under_load():
    for name in ("fastapi", "uvicorn", "httpx"):
        pytest.importorskip(name)
    found = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "serve.py"), "--load", "40"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert found.returncode == 0, found.stderr[-2000:]
    assert re.search(r"\d+ requests/s, p50 [\d.]+ ms, p90 [\d.]+ ms, p99 [\d.]+ ms", found.stdout), found.stdout
