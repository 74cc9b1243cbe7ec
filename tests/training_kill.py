"""Trains in child processes and kills them with SIGKILL: at random moments, and in the middle of writing a checkpoint.

    python training_kill.py FOLDER KILLS SEED

One process imports torch and forks a child for each start, so that a start costs milliseconds. Prints a JSON report.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path

import torch
from training_cases import case

from samplex_cuda.training import Trainer, checkpoint, read_metrics

STEPS = int(sys.argv[2]) * 20 + 100 if len(sys.argv) > 2 else 500
SETTINGS = (
    f"training.steps={STEPS}",
    "training.epochs=1000",
    "training.checkpoint_every=5",
    "training.eval_every=50",
    "training.log_every=7",
    "training.keep=2",
)


def train(folder: Path, slow: float, suicide: int, report: int) -> None:
    """What a child does: train to the end, or until the kill. `suicide`: the write during which it kills itself."""
    run, data, valid = case("mlp", "quadratic", *SETTINGS)
    started = (folder / "config.toml").exists()
    trainer = Trainer.resume(folder, data, valid) if started else Trainer(run, data, valid, folder)
    os.write(report, f"{trainer.progress.step}\n".encode())
    checkpoint._CHUNK = 1024  # many writes, so that a kill finds one
    real, count = os.write, 0

    def write(handle: int, piece: object) -> int:
        nonlocal count
        count += 1
        if count == suicide:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(handle, piece)

    os.write = write
    trainer.on_event = lambda event: time.sleep(slow) if event["event"] == "progress" else None
    trainer.fit()


def start(folder: Path, slow: float = 0.0, suicide: int = 0) -> tuple[int, int]:
    """Forks a child; (pid, step it begins with)."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(read)
            train(folder, slow, suicide, write)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    os.close(write)
    with os.fdopen(read) as file:
        first = file.readline()
    return pid, int(first) if first else -1


def main(folder: str, kills: int, seed: int) -> None:
    torch.set_num_threads(1)
    rng = random.Random(seed)
    whole, parts = Path(folder, "whole"), Path(folder, "parts")
    pid, _ = start(whole)
    assert os.waitpid(pid, 0)[1] == 0
    begins, left, killed = [], 0, 0
    for number in range(kills):
        inside = number % 2 == 0
        before = checkpoint.latest(parts)
        pid, begin = start(parts, slow=0.002, suicide=rng.randrange(1, 120) if inside else 0)
        begins.append([begin, int(before.name.split("-")[1]) if before else 0])
        if not inside:
            time.sleep(rng.uniform(0.0, 0.15))
            os.kill(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
        killed += os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        folders = [p for p in (parts / "checkpoints", parts / "best", parts) if p.is_dir()]
        left += any(path.name.startswith(".tmp-") for p in folders for path in p.iterdir())
    pid, last = start(parts)
    assert os.waitpid(pid, 0)[1] == 0
    (a, meta_a), (b, meta_b) = (checkpoint.load(checkpoint.latest(p)) for p in (whole, parts))
    report = {
        "killed": killed,
        "left": left,
        "begins": begins,
        "last": last,
        "steps": [meta_a["progress"]["step"], meta_b["progress"]["step"]],
        "names": [sorted(a), sorted(b)],
        "different": [name for name in a if name in b and not torch.equal(a[name], b[name])],
        "records": [[{k: v for k, v in r.items() if k != "seconds"} for r in read_metrics(p)] for p in (whole, parts)],
        "left_at_the_end": [str(p) for p in parts.rglob(".tmp-*")] + [str(p) for p in parts.rglob(".old-*")],
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
