"""Trains in child processes and kills them with SIGKILL: at random moments, and in the middle of writing a checkpoint.

    python training_kill.py FOLDER KILLS SEED KIND

KIND is what is killed:
  quadratic   training with a sampler that follows the table
  tree        training with a tree that is fitted again every few steps, so that kills fall into a fit
  evaluation  training that evaluates after every step
  conversion  reading a file into its cache (see `kill_conversions`)

One process imports torch, trains a few steps to load the rest, and forks a child for each start, so that a start costs
milliseconds. Prints a JSON report.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from training_cases import case

from samplex_cuda import data
from samplex_cuda.data import cache as data_cache
from samplex_cuda.training import Trainer, checkpoint, read_metrics, safe_files

EVERY = 3  # steps between two checkpoints
FURTHEST = 9  # steps that a start does, about, before its kill
CALLS = ("write", "fsync", "rename", "replace")  # what puts a checkpoint onto the disk


KINDS = {  # sampler, settings
    "quadratic": ("quadratic", ["training.eval_every=8"]),
    "tree": ("tree", ["training.eval_every=8", "sampler.refit_steps=2", "sampler.features=hidden"]),
    "evaluation": ("uniform", ["training.eval_every=1"]),
}
kind = "quadratic"  # of this process


def trainer_of(folder: Path, steps: int) -> Trainer:
    """A new run, or the one in the folder from its newest checkpoint on."""
    sampler, settings = KINDS[kind]
    run, data, valid = case(
        "mlp",
        sampler,
        f"training.steps={steps}",
        "training.epochs=100000",
        f"training.checkpoint_every={EVERY}",
        "training.log_every=7",
        "training.keep=2",
        *settings,
    )
    if (folder / "config.toml").exists():
        return Trainer.resume(folder, data, valid)
    return Trainer(run, data, valid, folder)


def train(folder: Path, steps: int, suicide: int, report: int) -> None:
    """What a child does: train to the end, or until the kill. `suicide`: the call of CALLS in which it kills itself."""
    tell = os.write
    trainer = trainer_of(folder, steps)
    tell(report, f"{trainer.progress.step}\n".encode())
    safe_files._CHUNK = 1024  # many writes, so that a kill finds one
    count = 0

    def deadly(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count == suicide:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **options)

        return call

    for name in CALLS:
        setattr(os, name, deadly(getattr(os, name)))
    trainer.on_event = lambda event: tell(report, b"\n") if event["event"] == "progress" else None
    trainer.fit()


def start(folder: Path, steps: int, *, suicide: int = 0, after: int = 0, delay: float = 0.0) -> tuple[int, int, int]:
    """Trains in a child; (its exit status, the step it began with, the last step it did).

    It ends by itself, by its own hand (`suicide`), or is killed `delay` seconds after it did `after` steps.
    """
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(read)
            train(folder, steps, suicide, write)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    os.close(write)
    with os.fdopen(read) as file:
        begin = int(file.readline() or -1)
        done = begin
        for _ in range(after):
            done += len(file.readline())
        if after:
            time.sleep(delay)
            os.kill(pid, signal.SIGKILL)
        done += len(file.read())  # to the end, so that a full pipe does not hold the child up
    return os.waitpid(pid, 0)[1], begin, done


def half_written(parts: Path) -> list[str]:
    """Checkpoints, of `checkpoints` and of `best`, that were begun and are not whole."""
    found = []
    for path in [*parts.glob("checkpoints/.tmp-*"), *parts.glob("best/.tmp-*")]:
        try:
            checkpoint.verify(path)
        except checkpoint.CheckpointError:
            found.append(path.name)
    return found


def train_with_kills(folder: str, kills: int, seed: int) -> dict[str, Any]:
    """A run that is killed again and again, beside one that is not."""
    torch.set_num_threads(1)
    steps = FURTHEST * kills + 60
    trainer_of(Path(folder, "warm"), 2).fit()
    rng = random.Random(seed)
    whole, parts = Path(folder, "whole"), Path(folder, "parts")
    assert start(whole, steps) == (0, 0, steps)
    report: dict[str, Any] = {"kills": [], "every": EVERY}
    for number in range(kills):
        before = checkpoint.latest(parts)
        inside = number % 2 == 0  # while it writes; else whenever it is
        how = {"suicide": rng.randrange(1, 90)} if inside else {"after": rng.randrange(1, FURTHEST)}
        status, begin, done = start(parts, steps, delay=rng.uniform(0.0, 0.01), **how)
        report["kills"].append({
            "killed": os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL,
            "inside": inside,
            "begin": begin,
            "done": done,
            "newest": int(before.name.split("-")[1]) if before else 0,
            "half_written": half_written(parts),
        })  # fmt: skip
    status, report["last"], _ = start(parts, steps)
    assert status == 0
    (a, meta_a), (b, meta_b) = (checkpoint.load(checkpoint.latest(p)) for p in (whole, parts))
    report |= {
        "steps": [meta_a["progress"]["step"], meta_b["progress"]["step"]],
        "names": [sorted(a), sorted(b)],
        "different": [name for name in a if name in b and not torch.equal(a[name], b[name])],
        "records": [[{k: v for k, v in r.items() if k != "seconds"} for r in read_metrics(p)] for p in (whole, parts)],
        "left_at_the_end": [str(p) for p in parts.rglob(".tmp-*")] + [str(p) for p in parts.rglob(".old-*")],
    }
    return report


# ------------------------------------------------------------------------------------------------ conversions
CONVERSION_CALLS = ("fsync", "rename", "mkdir", "unlink")  # and each append to an array


def convert(source: Path, cache: Path) -> dict[str, Any]:
    """The arrays of a ratings table, from its cache or converted now."""
    found = data.interactions_file(source, cache_dir=cache)
    return {"items": found.items.tolist(), "indptr": found.indptr.tolist()}


def kill_conversions(folder: str, kills: int, seed: int) -> dict[str, Any]:
    """Converts a file in children that die on the way; at the end once more, to the end."""
    rng = random.Random(seed)
    source, cache = Path(folder, "ratings.tsv"), Path(folder, "cache")
    lines = (f"{rng.randrange(200)}\t{rng.randrange(500)}\t{n}\n" for n in range(3000))
    source.write_text("user\titem\ttimestamp\n" + "".join(lines))
    whole = convert(source, Path(folder, "whole"))
    report: dict[str, Any] = {"killed": 0, "left_between": 0, "kills": kills}
    for number in range(kills):
        for path in cache.glob("*.sxcache"):
            shutil.rmtree(path)
        fatal = rng.randrange(1, 40) if number % 2 == 0 else 0
        pid = os.fork()
        if pid == 0:
            count = 0

            def deadly(real: Callable[..., Any], fatal: int = fatal) -> Callable[..., Any]:
                def call(*args: Any, **options: Any) -> Any:
                    nonlocal count
                    count += 1
                    if count == fatal:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return real(*args, **options)

                return call

            for name in CONVERSION_CALLS:
                setattr(os, name, deadly(getattr(os, name)))
            data_cache.ArrayWriter.append = deadly(data_cache.ArrayWriter.append)  # type: ignore[method-assign]
            try:
                convert(source, cache)
            finally:
                os._exit(0)
        if not fatal:
            time.sleep(rng.uniform(0.0, 0.03))
            os.kill(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
        report["killed"] += os.WIFSIGNALED(status)
        report["left_between"] += any(cache.glob(".*")) if cache.exists() else 0
    for path in cache.glob("*.sxcache"):
        shutil.rmtree(path)
    report["same"] = convert(source, cache) == whole and convert(source, cache) == whole
    report["left_at_the_end"] = sorted(str(p.relative_to(cache)) for p in cache.rglob(".*"))
    return report


def main(folder: str, kills: int, seed: int, what: str) -> None:
    global kind
    if what == "conversion":
        report = kill_conversions(folder, kills, seed)
    else:
        kind = what
        report = train_with_kills(folder, kills, seed)
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] if len(sys.argv) > 4 else "quadratic")
