"""What the quality studies share: a training loop with a clock of its own, stored results, a plot.

The clock counts the processor time of the process in training alone: batches, draws, forward, backward, update, and
before the first step what a sampler needs (a tree is fitted, counts are made). Evaluation is not counted. With one
thread that is the wall time on a core that nobody else uses, and other work on the machine changes little of it.
"""

from __future__ import annotations

import argparse
import datetime
import fcntl
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from _harness import IMAGES, RESULTS, commit, machine, progress

from samplex_cuda import data, optim
from samplex_cuda.rng import Key
from samplex_cuda.training import Config, build, config, models

SHARED = Path(__file__).resolve().parent.parent.parent / "shared" / "data"
COLOURS = ("#6e7781", "#c2710c", "#0f766e", "#7c3aed", "#be123c", "#2563eb", "#65a30d", "#a16207")
Point = dict[str, float]
Judge = Callable[[Any, Any], Point]


class Clock:
    """Processor time between `start` and `stop`, summed."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._begin: float | None = None

    def start(self) -> None:
        self._begin = time.process_time()

    def stop(self) -> None:
        assert self._begin is not None
        self.seconds += time.process_time() - self._begin
        self._begin = None


def settings(*keys: str) -> Config:
    """A configuration of the defaults and `keys`, each "table.key=value"."""
    return config.override(Config(), list(keys))


class Run:
    """A model in training: `advance` takes it to a step, `clock.seconds` is what that took.

    Args:
        run: the configuration; `training.epochs` does not matter here.
        train: the data.
        zero: class rows and biases start at 0 and not as `nn.Linear`'s.
        change: called with encoder and head before the optimizer is made.
    """

    def __init__(
        self, run: Config, train: data.Dataset, *, zero: bool = False, change: Callable[[Any, Any], None] | None = None
    ) -> None:
        self.config, self.train, self.clock = run, train, Clock()
        self.clock.start()
        self.encoder, self.head = build(run, train)
        if zero:
            for p in self.head.parameters():
                torch.nn.init.zeros_(p)
            self.head.mark_changed()
        if change is not None:
            change(self.encoder, self.head)
        self.optimizers = models.optimizers(run, self.encoder, self.head)
        self.fused = run.fused
        if self.fused:
            self.head.fuse_optimizer(self.optimizers["head"])  # type: ignore[arg-type]
        self.clock.stop()
        self.setup_seconds = self.clock.seconds
        self.key, self.done = Key(run.training.seed), 0
        size = int(getattr(train, "columns", 0)) if train.ordered else run.training.batch_size
        self.batch_size = size
        self.epoch_steps = len(data.Batches(train, size))
        self._batches: Any = None

    def _next(self) -> dict[str, torch.Tensor]:
        epoch, number = divmod(self.done, self.epoch_steps)
        if number == 0 or self._batches is None:
            self._batches = data.Batches(self.train, self.batch_size, seed=self.config.training.seed, epoch=epoch)
            self.encoder.carry({})
        return self.train.batch(self._batches.rows(number))

    def advance(self, step: int, total: int) -> float:
        """Trains up to `step` of `total` (for the schedule) and returns the mean training loss on the way."""
        loss_sum, first = torch.zeros(()), self.done
        clip = self.config.training.clip_norm
        rates = {name: [g["lr"] for g in o.param_groups] for name, o in self.optimizers.items()}
        self.clock.start()
        while self.done < step:
            factor = self.config.schedule.factor(self.done, total)
            for name, optimizer in self.optimizers.items():
                for group, rate in zip(optimizer.param_groups, rates[name], strict=True):
                    group["lr"] = rate * factor
            every = self.config.sampler.refit_steps
            if every and self.done and self.done % every == 0:
                models.refit_tree(self.config, self.train, self.encoder, self.head)
            batch = self._next()
            h, features = self.encoder.encode(batch)
            loss = self.head(h, batch["y"], features=features, context=models.context_of(batch), key=self.key)
            loss.backward()
            if clip:
                optim.clip_grad_norm_([p for p in self.encoder.parameters() if p.grad is not None], clip)
            for name, optimizer in self.optimizers.items():
                if not (self.fused and name == "head"):
                    optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            loss_sum += loss.detach()
            self.done += 1
        self.clock.stop()
        for name, optimizer in self.optimizers.items():
            for group, rate in zip(optimizer.param_groups, rates[name], strict=True):
                group["lr"] = rate
        return float(loss_sum) / max(1, self.done - first)

    def curve(
        self,
        steps: Sequence[int],
        judge: Judge,
        name: str = "",
        *,
        patience: int = 0,
        by: str = "",
        save: Callable[[list[Point]], None] | None = None,
    ) -> list[Point]:
        """Points at the given steps; with `patience` it ends after so many without a better value of `by`.

        `save` gets the points so far after each of them: a run that is cut short leaves what it has.
        """
        points: list[Point] = []
        for step in steps:
            loss = self.advance(step, steps[-1])
            points.append({"step": step, "seconds": self.clock.seconds, "loss": loss, **judge(self.encoder, self.head)})
            progress(f"{name}: step {step}: " + ", ".join(f"{k} {v:.4g}" for k, v in points[-1].items() if k != "step"))
            if save is not None:
                save(points)
            if patience and len(points) - 1 - max(range(len(points)), key=lambda i: points[i][by]) >= patience:
                break
        progress("")
        return points


def parser(text: str | None, folder: str | None) -> argparse.ArgumentParser:
    """The options that every study has."""
    made = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    if folder is not None:
        made.add_argument("--data", type=Path, default=SHARED / folder, help="folder with the files")
        cache = Path(tempfile.gettempdir()) / "samplex-studies"
        made.add_argument("--cache", type=Path, default=cache, help="where converted files go")
    made.add_argument("--quick", action="store_true", help="a small version, to see that it runs; stores nothing")
    made.add_argument("--no-store", action="store_true", help="print only")
    made.add_argument("--again", action="store_true", help="tables and plot from the stored results")
    made.add_argument("--only", nargs="+", help="only these methods; the others keep their stored results")
    made.add_argument("--threads", type=int, default=1)
    return made


def find(folder: Path, part: str) -> Path:
    """The file of a folder with `part` in its name."""
    found = sorted(p for p in folder.iterdir() if part in p.name and p.is_file()) if folder.is_dir() else []
    if not found:
        raise SystemExit(f"study: --data must name a folder with a {part} file, got {folder}")
    return found[0]


def stored(name: str) -> dict[str, Any]:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def store(name: str, methods: dict[str, Any], **rest: Any) -> None:
    """Writes `bench/results/<name>.json`; methods that were not run now stay, each with its own date and commit."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    with (RESULTS / f".{name}.lock").open("w") as lock:  # two runs of a study may store their methods side by side
        fcntl.flock(lock, fcntl.LOCK_EX)
        _store(name, methods, rest)


def _store(name: str, methods: dict[str, Any], rest: dict[str, Any]) -> None:
    here = machine(torch.device("cpu"))
    now = {
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "threads": torch.get_num_threads(),
        "simd": here["simd"],
    }
    old = stored(name)
    kept = old.get("methods", {})
    for key, found in methods.items():
        kept[key] = found | {"run": now}
    path = RESULTS / f"{name}.json"
    scratch = path.with_suffix(".json.tmp")
    whole = old | rest | {"machine": here, "methods": kept}
    scratch.write_text(json.dumps(whole, indent=1) + "\n")
    os.replace(scratch, path)


def axes_of(count: int = 1) -> tuple[Any, list[Any]]:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, count, figsize=(6.4 * count, 4.0), layout="constrained", squeeze=False)
    for one in axes[0]:
        one.grid(True, color="#e6e8eb", lw=0.8)
        one.spines[["top", "right"]].set_visible(False)
    return figure, list(axes[0])


def save_plot(figure: Any, name: str) -> None:
    IMAGES.mkdir(parents=True, exist_ok=True)
    scratch = IMAGES / f"{name}.tmp.png"
    figure.savefig(scratch, dpi=150, metadata={"Software": None})
    os.replace(scratch, IMAGES / f"{name}.png")
    print(f"plot: docs/images/{name}.png")


def mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)


def first_reach(curve: list[Point], by: str, value: float, *, low: bool = False) -> Point | None:
    """The first point of a curve that is as good as `value`."""
    return next((p for p in curve if (p[by] <= value if low else p[by] >= value)), None)
