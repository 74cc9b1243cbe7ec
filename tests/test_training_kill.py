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


pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def report_of(folder: Path, number: int, seed: int, kind: str) -> dict:
    command = [sys.executable, str(HERE / "training_kill.py"), str(folder), str(number), str(seed), kind]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def check_training(report: dict, number: int, half_written: int) -> None:
    kills = report["kills"]
    assert [kill["killed"] for kill in kills] == [True] * number
    # Half of them come by the clock; of the others most leave a checkpoint that was begun and is not whole.
    assert sum(kill["inside"] for kill in kills) == number // 2
    assert sum(bool(kill["half_written"]) for kill in kills if kill["inside"]) >= half_written, kills
    # Every start continues from the newest whole checkpoint, which is not older than the last one that was due.
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


def test_killed_runs_end_with_the_same_bits(tmp_path):
    check_training(report_of(tmp_path, 20, 2, "quadratic"), 20, 5)


def check_conversion(report: dict, number: int) -> None:
    assert number // 4 <= report["killed"] <= number  # one that dies by its own hand may be done before
    assert report["left_between"] > 0
    assert report["same"]
    assert report["left_at_the_end"] == []


def test_killed_conversions_leave_nothing_behind(tmp_path):
    check_conversion(report_of(tmp_path, 30, 1, "conversion"), 30)


# 500 kills in total, with those of the training: `make test-slow ARGS="-k kill"`.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "number", "half_written"),
    [("quadratic", 140, 35), ("tree", 140, 35), ("evaluation", 100, 2)],  # most of the last fall into an evaluation
)
def test_many_killed_runs(tmp_path, kind, number, half_written):
    check_training(report_of(tmp_path, number, 3, kind), number, half_written)


@pytest.mark.slow
def test_many_killed_conversions(tmp_path):
    check_conversion(report_of(tmp_path, 200, 2, "conversion"), 200)
