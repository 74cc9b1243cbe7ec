"""The examples that need another library run in a small size, and print the lines that their docstring shows."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from test_examples import NUMBER, ROOT, expected

SMALL = {
    "hf_large_vocabulary.py": (
        "transformers",
        ["--vocabulary", "5000", "--steps", "2", "--batch", "2", "--length", "8"],
    ),
    "lightning_classifier.py": ("lightning", ["--epochs", "1"]),
    "sentence_pairs.py": ("sentence_transformers", ["--steps", "2", "--batch", "8"]),
}


@pytest.mark.parametrize("name", SMALL)
def test_examples_run_in_a_small_size(name, tmp_path):
    library, options = SMALL[name]
    pytest.importorskip(library)
    path = ROOT / "examples" / name
    done = subprocess.run(
        [sys.executable, str(path), *options],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [" ".join(line.split()) for line in done.stdout.splitlines() if line.strip()]
    wanted = [" ".join(line.split()) for line in expected(path)]
    assert [NUMBER.sub("#", line) for line in lines] == [NUMBER.sub("#", line) for line in wanted]


def test_the_bench_of_transformers_runs(tmp_path):
    pytest.importorskip("transformers")
    command = [sys.executable, str(ROOT / "bench" / "bench_hf.py"), "--quick", "--threads", "1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "peak memory with all logits / sampled" in done.stdout
    assert "stored" not in done.stdout
