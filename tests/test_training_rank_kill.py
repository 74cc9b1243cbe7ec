"""SIGKILL of ranks under torchrun, at random moments and inside saves: the run ends as if nothing had been."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rank_kill import settings

from samplex_cuda.training import checkpoint
from samplex_cuda.training.state import load_state

HERE = Path(__file__).parent


def check(ranks, folder, encoder, steps, kills, seconds):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--max-restarts", str(kills),
               "--monitor-interval", "0.1", "--standalone", str(HERE / "rank_kill.py"), str(folder), encoder,
               str(steps), str(kills), "3"]  # fmt: skip
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=seconds,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    died = [json.loads(line) for line in (folder / "kills").read_text().splitlines()]
    assert len(died) == kills, f"an attempt ended by itself:\n{done.stderr[-6000:]}"
    assert all(kill["began_at"] > 0 for kill in died[1:])  # each attempt went on with a checkpoint
    ranks.run(2, "run_trainer", str(folder / "whole"), "mlp", "tree", settings(encoder, steps))
    (a, meta_a), (b, meta_b) = (load_state(checkpoint.latest(folder / name)) for name in ("whole", "run"))
    assert meta_a["progress"]["step"] == meta_b["progress"]["step"] == steps
    assert set(a) == set(b)
    for name in a:
        if encoder == "fsdp":
            assert torch.equal(a[name], b[name]), name
        else:
            torch.testing.assert_close(a[name], b[name], rtol=1e-6, atol=1e-6)
    assert not [*folder.rglob(".tmp-*"), *folder.rglob(".old-*")]


def test_a_killed_rank_is_started_again(ranks, tmp_path):
    check(ranks, tmp_path, "fsdp", 24, 2, 300)


@pytest.mark.slow
@pytest.mark.parametrize(("encoder", "kills"), [("fsdp", 20), ("ddp", 20)])
def test_kill_storm(ranks, tmp_path, encoder, kills):
    check(ranks, tmp_path, encoder, 10 * kills + 20, kills, 1800)
