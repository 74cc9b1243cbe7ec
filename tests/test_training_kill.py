"""kill -9 at random moments, some while a checkpoint is written: the run ends as if nothing had been."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_runs_end_with_the_same_bits(tmp_path):
    kills, seed = 20, 2
    command = [sys.executable, str(HERE / "training_kill.py"), str(tmp_path), str(kills), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["killed"] == kills
    assert report["left"] >= 1, "at least one kill must fall into the writing of a checkpoint"
    # Every start goes on from the newest checkpoint, and no kill takes one away.
    assert all(begin == newest for begin, newest in report["begins"])
    steps = [begin for begin, _ in report["begins"]]
    assert steps == sorted(steps)
    assert steps[-1] > 0
    assert 0 < report["last"] < report["steps"][0]
    assert report["steps"][0] == report["steps"][1]
    assert report["names"][0] == report["names"][1]
    assert report["different"] == []
    assert report["records"][0] == report["records"][1]
    assert report["left_at_the_end"] == []
