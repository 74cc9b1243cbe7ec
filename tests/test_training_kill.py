"""kill -9 at random moments, some while a checkpoint is written: the run ends as if nothing had been."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_runs_end_with_the_same_bits(tmp_path):
    number, seed = 20, 2
    command = [sys.executable, str(HERE / "training_kill.py"), str(tmp_path), str(number), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    kills = report["kills"]
    assert [kill["killed"] for kill in kills] == [True] * number
    # Half of them come by the clock; of the others most leave a checkpoint that was begun and is not whole.
    assert sum(kill["inside"] for kill in kills) == number // 2
    assert sum(bool(kill["half_written"]) for kill in kills if kill["inside"]) >= number // 4, kills
    # Every start goes on from the newest whole checkpoint, which is not older than the last one that was due.
    assert all(kill["begin"] == kill["newest"] for kill in kills)
    begins = [*(kill["begin"] for kill in kills), report["last"]]
    for kill, (begin, following) in zip(kills, pairwise(begins), strict=True):
        due = (kill["done"] - 1) // report["every"] * report["every"]  # on the disk before the next step was done
        assert following >= max(begin, due), kills
    assert 0 < report["last"] < report["steps"][0]
    assert report["steps"][0] == report["steps"][1]
    assert report["names"][0] == report["names"][1]
    assert report["different"] == []
    assert report["records"][0] == report["records"][1]
    assert report["left_at_the_end"] == []
