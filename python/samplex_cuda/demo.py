"""`python -m samplex_cuda.demo`: full softmax and sampled softmax, side by side, on the built-in data.

Both runs start from the same initial values, see the same batches in the same order, use Adagrad with the same rate and
are given the same training time. The sampled head has `RowAdagrad` fused into its backward. The clock of a run counts
its steps (forward, backward, optimizer) and stands still while data are made and while accuracy is measured. Results: a
table, `curves.png` and `results.json`.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samplex_cuda.data import HierarchicalZipf
from samplex_cuda.heads import SampledClassifier
from samplex_cuda.optim import RowAdagrad
from samplex_cuda.prediction import exact_topk
from samplex_cuda.samplers import LogUniform

__all__ = ["Run", "compare", "main", "train"]

FULL = "full softmax"
SAMPLED = "sampled softmax"
# Accuracy is measured at training times that grow by this factor, from the first one on.
_EVAL_FIRST = 0.1
_EVAL_GROWTH = 1.25


@dataclass
class Run:
    """What one training run did.

    `seconds`, `accuracy` and `step` are the points of the learning curve; `peak_bytes` is the memory of training above
    what the process held before (parameters and optimizer state included), None if the system does not tell.
    `encoder_milliseconds` is the part of a step that the network below the head takes: forward, backward, update.
    """

    name: str
    seconds: list[float] = field(default_factory=list)
    accuracy: list[float] = field(default_factory=list)
    step: list[int] = field(default_factory=list)
    step_milliseconds: float = 0.0
    encoder_milliseconds: float = 0.0
    peak_bytes: int | None = None

    def time_to(self, accuracy: float) -> float | None:
        """Training seconds at the first measurement of at least `accuracy`, None if there is none.

        Example:
            >>> from samplex_cuda.demo import Run
            >>> Run("example", seconds=[1.0, 2.0, 4.0], accuracy=[0.1, 0.3, 0.5]).time_to(0.2)
            2.0
        """
        return next((t for t, a in zip(self.seconds, self.accuracy, strict=True) if a >= accuracy), None)


class _PeakMemory:
    """Peak memory of the stretches between `start` and `stop`, above what was held at construction."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        elif sys.platform == "linux":
            # Give freed memory back first, so that it does not hide what is allocated next.
            with contextlib.suppress(OSError, AttributeError):
                ctypes.CDLL(None).malloc_trim(0)
        self.base = self._read("VmRSS")
        self.peak = 0 if self.base is not None else None

    def _read(self, name: str) -> int | None:
        if self.device.type == "cuda":
            ask = torch.cuda.memory_allocated if name == "VmRSS" else torch.cuda.max_memory_allocated
            return int(ask(self.device))
        try:
            for line in Path("/proc/self/status").read_text().splitlines():
                if line.startswith(f"{name}:"):
                    return int(line.split()[1]) * 1024
        except OSError:
            pass
        return None

    def start(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        try:
            Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        except OSError:
            self.peak = None

    def stop(self) -> None:
        high = self._read("VmHWM")
        if self.peak is not None and self.base is not None and high is not None:
            self.peak = max(self.peak, high - self.base)


def train(
    name: str,
    data: HierarchicalZipf,
    *,
    width: int,
    batch_size: int,
    num_samples: int,
    seconds: float,
    steps: int | None = None,
    lr: float = 0.1,
    seed: int = 0,
    device: torch.device | str = "cpu",
    progress: Callable[[int, float, float], None] | None = None,
) -> Run:
    """Trains a two-layer network with one of the two losses and records its learning curve.

    Args:
        name: "full softmax" or "sampled softmax".
        data: where batches come from.
        width: d, the width of the hidden layer and of the class vectors.
        batch_size: B.
        num_samples: draws per row of the sampled softmax.
        seconds: training time, evaluation and data excluded.
        steps: stop after this many steps if that comes first.
        lr: learning rate of Adagrad.
        seed: of the initial values and the draws.
        device: where to train.
        progress: called with (step, training seconds, accuracy).

    Returns:
        The learning curve and its costs.

    Example:
        >>> from samplex_cuda import demo
        >>> from samplex_cuda.data import HierarchicalZipf
        >>> data = HierarchicalZipf(num_classes=200, dim=8, num_examples=10_000, num_valid=100)
        >>> run = demo.train("sampled softmax", data, width=8, batch_size=32, num_samples=10, seconds=5, steps=3)
        >>> run.step[-1]
        3
    """
    if name not in (FULL, SAMPLED):
        raise ValueError(f"demo.train: name must be {FULL!r} or {SAMPLED!r}, got {name!r}")
    device = torch.device(device)
    memory = _PeakMemory(device)
    torch.manual_seed(seed)
    body = nn.Sequential(nn.Linear(data.dim, width), nn.ReLU(), nn.Linear(width, width), nn.LayerNorm(width)).to(device)
    head: nn.Linear | SampledClassifier
    if name == FULL:
        head = nn.Linear(width, data.num_classes, device=device)
    else:
        sampler = LogUniform(data.num_classes)
        head = SampledClassifier(width, data.num_classes, sampler, num_samples, device=device).to(device)
    optimizers = [torch.optim.Adagrad(body.parameters(), lr=lr)]
    if isinstance(head, SampledClassifier):
        head.fuse_optimizer(RowAdagrad(head.parameters(), lr=lr))  # its rows are updated inside backward
    else:
        optimizers.append(torch.optim.Adagrad(head.parameters(), lr=lr))
    valid_x, valid_y = (part.to(device) for part in data.split("valid"))

    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def now() -> float:
        synchronize()
        return time.perf_counter()

    def take_step(x: Tensor, y: Tensor) -> tuple[float, float]:
        """Seconds of the step, and of what it does in the body: from x to hidden, and from there back to its update."""
        marks = [now()]
        for optimizer in optimizers:
            optimizer.zero_grad()
        hidden = body(x)
        marks.append(now())
        hidden.register_hook(lambda _: marks.append(now()))
        loss = head(hidden, y) if isinstance(head, SampledClassifier) else F.cross_entropy(head(hidden), y)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            marks.append(now())
        begin, forward, backward, updated = marks[:4]
        return marks[-1] - begin, forward - begin + updated - backward

    @torch.no_grad()
    def measure() -> float:
        _, ids = exact_topk(body(valid_x), head.weight, 1, head.bias)
        return (ids.squeeze(1) == valid_y).double().mean().item()

    run = Run(name, seconds=[0.0], accuracy=[measure()], step=[0])
    clock, of_body, next_eval = 0.0, 0.0, _EVAL_FIRST
    memory.start()
    for step, (x, y) in enumerate(data.batches("train", batch_size, epochs=None, drop_last=True, device=device), 1):
        took, in_body = take_step(x, y)
        clock += took
        of_body += in_body
        last = clock >= seconds or step == steps
        if clock >= next_eval or last:
            memory.stop()
            run.seconds.append(clock)
            run.accuracy.append(measure())
            run.step.append(step)
            next_eval = max(clock, next_eval) * _EVAL_GROWTH
            memory.start()
        if progress is not None:
            progress(step, clock, run.accuracy[-1])
        if last:
            break
    run.step_milliseconds = 1e3 * clock / max(run.step[-1], 1)
    run.peak_bytes = memory.peak
    run.encoder_milliseconds = 1e3 * of_body / max(run.step[-1], 1)
    return run


def compare(full: Run, sampled: Run) -> dict[str, float | None]:
    """The accuracy both runs reached, as a whole percentage, and when each of them did.

    Args:
        full: run of the full softmax.
        sampled: run of the sampled softmax.

    Returns:
        `accuracy`, `full_seconds`, `sampled_seconds` and `speedup` (None if a time is 0 or missing).

    Example:
        >>> from samplex_cuda.demo import Run, compare
        >>> full = Run("full softmax", seconds=[0.0, 10.0, 20.0], accuracy=[0.0, 0.3, 0.401])
        >>> compare(full, Run("sampled softmax", seconds=[0.0, 1.0, 2.0], accuracy=[0.0, 0.2, 0.6]))
        {'accuracy': 0.4, 'full_seconds': 20.0, 'sampled_seconds': 2.0, 'speedup': 10.0}
    """
    reached = min(max(full.accuracy), max(sampled.accuracy))
    target = int(reached * 100 + 1e-9) / 100
    full_seconds, sampled_seconds = full.time_to(target), sampled.time_to(target)
    speedup = full_seconds / sampled_seconds if full_seconds and sampled_seconds else None
    return {
        "accuracy": target,
        "full_seconds": full_seconds,
        "sampled_seconds": sampled_seconds,
        "speedup": speedup,
    }


def _sentence(result: dict[str, Any]) -> str:
    percent = f"{100 * result['accuracy']:.0f} %"
    if result["speedup"] is None:
        return "Too short a run to compare: give it more --seconds."
    ours, theirs = result["sampled_seconds"], result["full_seconds"]
    if ours <= theirs:
        return f"Sampled softmax reached {percent} accuracy in {ours:.2g} s instead of {theirs:.2g} s."
    return f"Sampled softmax took {ours:.2g} s to reach {percent} accuracy, full softmax {theirs:.2g} s."


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    """A reader never sees half a file: write beside it, then rename."""
    temporary = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _plot(path: Path, full: Run, sampled: Run, result: dict[str, Any], title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FuncFormatter, PercentFormatter

    ink, grey = "#1f2933", "#9aa5b1"
    style: Any = {
        "font.size": 11,
        "text.color": ink,
        "axes.labelcolor": ink,
        "axes.edgecolor": grey,
        "xtick.color": ink,
        "ytick.color": ink,
    }
    with plt.rc_context(style):
        figure, axes = plt.subplots(figsize=(8.4, 4.9), dpi=160, layout="constrained")
        # Curves that end close together: the upper label goes up, the lower one down.
        apart = 16 if abs(full.accuracy[-1] - sampled.accuracy[-1]) < 0.1 else 0
        for run, colour in ((full, "#d1495b"), (sampled, "#00798c")):
            other = sampled if run is full else full
            up = run.accuracy[-1] > other.accuracy[-1] or (run is sampled and run.accuracy[-1] == other.accuracy[-1])
            axes.plot(run.seconds[1:], run.accuracy[1:], color=colour, lw=2.2, marker="o", ms=3.8, label=run.name)
            axes.annotate(
                f"{run.name}\n{_milliseconds(run.step_milliseconds)} per step",
                (run.seconds[-1], run.accuracy[-1]),
                xytext=(9, apart if up else -apart),
                textcoords="offset points",
                color=colour,
                va="center",
                fontweight="bold",
                fontsize=10,
                annotation_clip=False,
            )
        axes.set_xscale("log")
        if result["speedup"] is not None:
            level, ours, theirs = result["accuracy"], result["sampled_seconds"], result["full_seconds"]
            axes.annotate(
                "", (ours, level), (theirs, level), arrowprops={"arrowstyle": "->", "color": ink, "lw": 1.3}, zorder=4
            )
            if ours < theirs:
                axes.annotate(
                    f"{level:.0%}: {theirs / ours:.{0 if theirs >= 10 * ours else 1}f}x sooner",
                    (theirs, level),
                    xytext=(0, 6),
                    textcoords="offset points",
                    ha="right",  # a short arrow at the end of the curves has their labels to its right
                    va="bottom",
                    fontsize=11,
                    bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1.5},
                )
        axes.set_ylim(0, min(1.0, 1.12 * max(*full.accuracy, *sampled.accuracy, 0.01)))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set_xlabel("training time in seconds (data and evaluation excluded)")
        axes.set_ylabel("validation accuracy")
        axes.set_title(title, loc="left", fontsize=12, fontweight="bold", pad=12)
        axes.grid(which="major", color="#e4e7eb", lw=0.9)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        _replace(path, lambda temporary: figure.savefig(temporary))
        plt.close(figure)


def _megabytes(count: int | None) -> str:
    return "not known" if count is None else f"{count / 1e6:,.0f} MB"


def _milliseconds(value: float) -> str:
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.3g} ms"


def _seconds(value: float | None) -> str:
    return "not reached" if value is None else f"{value:.3g} s"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m samplex_cuda.demo",
        description="Train on built-in data with full softmax and with sampled softmax and compare the two.",
    )
    add = parser.add_argument
    add("--classes", type=int, help="number of classes (default 50,000, with --quick 5,000)")
    add("--dim", type=int, default=64, help="width of the data and of the hidden layer (default %(default)s)")
    add("--batch-size", type=int, default=256, help="rows per step (default %(default)s)")
    add("--num-samples", type=int, default=64, help="draws per row (default %(default)s)")
    add("--seconds", type=float, help="training time of each run (default 40, with --quick 2)")
    add("--steps", type=int, default=None, help="stop a run after so many steps, if that comes first")
    add("--lr", type=float, default=0.1, help="learning rate of Adagrad (default %(default)s)")
    add("--seed", type=int, default=0, help="of data, initial values and draws (default %(default)s)")
    add("--device", default="cpu", help="cpu or cuda (default %(default)s)")
    add(
        "--out", type=Path, default=Path("runs/demo"), help="where the picture and the figures go (default %(default)s)"
    )
    add("--quick", action="store_true", help="a few seconds only: 5,000 classes, 2 s per run")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs the demo; returns the exit code.

    Args:
        argv: command line, `sys.argv[1:]` by default.
    """
    parser = _parser()
    options = parser.parse_args(argv)
    if options.classes is None:
        options.classes = 5_000 if options.quick else 50_000
    if options.seconds is None:
        options.seconds = 2.0 if options.quick else 40.0
    for name in ("classes", "dim", "batch_size", "num_samples", "seconds"):
        if not getattr(options, name) > 0:
            parser.error(f"--{name.replace('_', '-')} must be above 0, got {getattr(options, name)}")
    if options.steps is not None and options.steps < 1:
        parser.error(f"--steps must be at least 1, got {options.steps}")
    try:
        import matplotlib  # noqa: F401
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.table import Table
    except ImportError as error:
        print(f"samplex_cuda.demo needs {error.name}: pip install 'samplex-cuda[demo]'", file=sys.stderr)
        return 1

    console = Console()
    options.out.mkdir(parents=True, exist_ok=True)
    data = HierarchicalZipf(options.classes, options.dim, num_examples=10_000_000, seed=options.seed, num_valid=2048)
    console.print(
        f"[bold]{options.classes:,} classes[/bold], batch {options.batch_size}, width {options.dim}, Adagrad: "
        f"full softmax against {options.num_samples} draws per row, {options.seconds:g} s of training each."
    )
    runs: dict[str, Run] = {}
    columns = (
        TextColumn("{task.description:<15}"),
        BarColumn(bar_width=32),
        TextColumn("{task.completed:6.1f} s  step {task.fields[step]:>7,}  accuracy {task.fields[accuracy]:6.1%}"),
    )
    try:
        with Progress(*columns, console=console) as bars:
            tasks = {name: bars.add_task(name, total=options.seconds, step=0, accuracy=0.0) for name in (FULL, SAMPLED)}
            for name, task in tasks.items():

                def show(step: int, clock: float, accuracy: float, task: Any = task) -> None:
                    bars.update(task, completed=clock, step=step, accuracy=accuracy)

                runs[name] = train(
                    name,
                    data,
                    width=options.dim,
                    batch_size=options.batch_size,
                    num_samples=options.num_samples,
                    seconds=options.seconds,
                    steps=options.steps,
                    lr=options.lr,
                    seed=options.seed,
                    device=options.device,
                    progress=show,
                )
    except KeyboardInterrupt:
        console.print("Stopped.")
        return 130

    full, sampled = runs[FULL], runs[SAMPLED]
    result = compare(full, sampled)
    table = Table(caption="Data and evaluation are on neither clock. Memory includes parameters and optimizer state.")
    table.add_column("")
    table.add_column("time per step", justify="right")
    table.add_column("of it encoder", justify="right")
    table.add_column(f"time to {result['accuracy']:.0%} accuracy", justify="right")
    table.add_column("peak memory", justify="right", no_wrap=True)
    table.add_column("steps", justify="right")
    table.add_column("final accuracy", justify="right")
    for run, reached in ((full, result["full_seconds"]), (sampled, result["sampled_seconds"])):
        table.add_row(
            run.name,
            _milliseconds(run.step_milliseconds),
            _milliseconds(run.encoder_milliseconds),
            _seconds(reached),
            _megabytes(run.peak_bytes),
            f"{run.step[-1]:,}",
            f"{run.accuracy[-1]:.1%}",
        )
    console.print(table)

    picture, figures = options.out / "curves.png", options.out / "results.json"
    _plot(picture, full, sampled, result, f"{options.classes:,} classes: accuracy against training time")
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()}
    report = {
        "settings": settings,
        "data": repr(data),
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
        },
        "same_accuracy": result,
        "runs": [asdict(full), asdict(sampled)],
    }
    _replace(figures, lambda temporary: temporary.write_text(json.dumps(report, indent=2) + "\n"))
    console.print(f"[bold]{_sentence(result)}[/bold]")
    console.print(f"Curves: {picture}   Figures: {figures}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
