"""The fuzzer inside the suite: 20,000 calls without a finding, and planted faults that it must find."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from samplex_fuzz import registry

ROOT = Path(__file__).resolve().parents[2]


def fuzz(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tests" / "fuzz"), *arguments]
    return subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=900, check=False)


def test_every_op_has_a_generator():
    assert registry.missing() == []


def test_every_public_function_has_a_generator():
    assert registry.missing_public() == []


def test_an_op_without_a_generator_is_noticed(monkeypatch):
    monkeypatch.delitem(registry.GENERATORS, "row_reduce")
    assert registry.missing() == ["row_reduce"]


def test_twenty_thousand_calls():
    found = fuzz("--calls", "20000")
    assert found.returncode == 0, found.stdout[-6000:] + found.stderr[-2000:]


@pytest.mark.parametrize(
    ("fault", "verdict", "said"),
    [
        ("crash", "crash", "SIGSEGV"),
        ("wrong", "silent", "sum must be"),
        ("bare", "bare", "bad argument"),
        ("writes", "silent", "x changed"),
        ("noise", "bare", "text on stderr"),
    ],
)
def test_a_planted_fault_is_found_and_reproduced(fault, verdict, said):
    found = fuzz("--calls", "60", "--jobs", "1", "--names", "planted,uniform_log_prob", "--plant", fault, "--seed", "3")
    assert found.returncode == 1, found.stdout + found.stderr
    assert re.search(rf"^{verdict} in planted: .*{said}", found.stdout, re.MULTILINE), found.stdout
    # The calls behind the fault ran too.
    done = re.search(r"^(\d+) calls in", found.stdout, re.MULTILINE)
    assert done is not None
    assert int(done[1]) == 60
    number = re.search(rf"{verdict} in planted:.*\n  python tests/fuzz --only 3:(\d+)", found.stdout)
    assert number is not None
    again = fuzz("--only", f"3:{number[1]}", "--names", "planted,uniform_log_prob", "--plant", fault)
    assert again.returncode != 0
    assert "x = [5, 3] float32" in again.stdout


def test_a_hang_is_a_crash(monkeypatch):
    from samplex_fuzz import pool

    monkeypatch.setattr(pool, "HANG", 1.5)
    counts, findings = pool.fuzz(3, 25, 1, ["planted"], only=["planted"], plant="hang", simd=None, limit_memory=True)
    assert counts["planted"]["crash"] == len(findings) >= 1
    assert "no answer in 1.5 s" in findings[0][3]
