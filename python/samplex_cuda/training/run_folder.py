"""The files of a run folder besides its checkpoints: metrics, learning curves, bad batches, the lock."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from samplex_cuda.training import checkpoint
from samplex_cuda.training import config as configs
from samplex_cuda.training.config import Config

__all__ = [
    "RunError",
    "append_record",
    "begin",
    "check_links",
    "clean",
    "keep_batch",
    "lock",
    "newest",
    "open_board",
    "plot_curves",
    "read_metrics",
    "replace_config",
    "set_aside",
    "sync_metrics",
    "trim_metrics",
    "unwritable",
    "write_board",
]


class RunError(RuntimeError):
    """A run folder that cannot be used as asked; the message says why and what to do.

    Example:
        >>> from samplex_cuda.training import RunError, Trainer
        >>> try:
        ...     Trainer.resume("no/such/run")
        ... except RunError as error:
        ...     print(error)
        trainer: no/such/run: has no config.toml, so there is no run to resume
    """


def unwritable(run_dir: Path, error: OSError) -> RunError:
    """What is raised where a file of a run folder cannot be written."""
    return RunError(f"trainer: {run_dir}: cannot be written to ({error.strerror})")


FOLDERS = ("checkpoints", "best", "plots", "nan", "tensorboard", "damaged")
VOCABULARY = "vocabulary.txt"  # of text: a word per line, in the order of their ids
FILES = (".lock", "config.toml", "environment.json", "metrics.jsonl", "diagnosis.json", VOCABULARY)


def check_links(run_dir: Path) -> None:
    """Refuses a run folder with links that lead out of it, under the names that are written to or read from."""
    checkpoint.check_inside(run_dir, *FOLDERS, *FILES)


def begin(run_dir: Path, config: Config, surroundings: Callable[[], dict[str, Any]], first: Callable[[], None]) -> None:
    """Makes a run folder, with the configuration and what it runs on; RunError if there is a run in it.

    Args:
        run_dir: the folder.
        config: written last: a folder that has it is a run.
        surroundings: what the run runs on.
        first: writes what the run needs besides.
    """
    check_links(run_dir)
    if (run_dir / "config.toml").exists() or checkpoint.list_checkpoints(run_dir):
        raise RunError(
            f"trainer: {run_dir}: already contains a run; resume it with Trainer.resume({str(run_dir)!r}), or use "
            "another folder"
        )
    try:
        for name in ("checkpoints", "plots"):
            (run_dir / name).mkdir(parents=True, exist_ok=True)
        checkpoint.write_file(run_dir / "environment.json", json.dumps(surroundings(), indent=1))
        first()
        checkpoint.write_file(run_dir / "config.toml", configs.dumps(config))
    except OSError as error:
        raise unwritable(run_dir, error) from None


def replace_config(run_dir: Path, old: Config, new: Config, step: int) -> None:
    """Writes a configuration that has changed, and keeps the old one beside it."""
    if new != old:
        checkpoint.write_file(run_dir / f"config.before-{step:08d}.toml", configs.dumps(old))
        checkpoint.write_file(run_dir / "config.toml", configs.dumps(new))


def clean(run_dir: Path) -> list[Path]:
    """Removes what a killed process left half-written anywhere in a run folder; what was removed."""
    check_links(run_dir)
    return [path for folder in ("", *FOLDERS) for path in checkpoint.clean(run_dir / folder)]


def newest(run_dir: Path, restart: bool) -> tuple[Path | None, list[tuple[Path, str]]]:
    """The newest whole checkpoint, and the newer ones that are damaged, each with the reason.

    RunError if every checkpoint is damaged, unless `restart`; (None, []) if there are no checkpoints.
    """
    for name in ("checkpoints", "plots"):
        (run_dir / name).mkdir(exist_ok=True)
    checkpoint.put_back(run_dir / "checkpoints")
    refused: list[tuple[Path, str]] = []
    found = checkpoint.latest(run_dir, on_refused=lambda path, reason: refused.append((path, reason)))
    if found is None and refused and not restart:
        listed = "".join(f"\n  {reason}" for _, reason in refused)
        raise RunError(
            f"trainer: {run_dir}: no checkpoint is complete, so there is nothing to resume from; nothing was changed."
            f"{listed}\nRestore a good copy, or start again from step 0 with --restart (in Python restart=True), which "
            "moves them to damaged/"
        )
    return found, refused


def set_aside(run_dir: Path, path: Path) -> Path:
    """Moves a damaged checkpoint to `damaged/`; where it is now."""
    folder = run_dir / "damaged"
    folder.mkdir(exist_ok=True)
    target, number = folder / path.name, 1
    while target.exists() or target.is_symlink():
        number += 1
        target = folder / f"{path.name}.{number}"
    os.rename(path, target)
    return target


@contextlib.contextmanager
def lock(run_dir: Path) -> Iterator[None]:
    """One process a run folder; the system lets go of the lock when a process is killed."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    check_links(run_dir)
    try:
        file = (run_dir / ".lock").open("a")
    except OSError as error:
        raise unwritable(run_dir, error) from None
    with file:
        # Some network file systems have no locks; training there is not forbidden.
        with contextlib.suppress(OSError):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RunError(f"trainer: {run_dir}: another process is training in it") from None
        yield


def read_metrics(run_dir: str | Path) -> list[dict[str, Any]]:
    """The records of `metrics.jsonl`; a line that a kill cut off is left out.

    Example:
        >>> from samplex_cuda.training import read_metrics
        >>> read_metrics("no/such/run")
        []
    """
    try:
        text = (Path(run_dir) / "metrics.jsonl").read_text(errors="replace")
    except FileNotFoundError:
        return []
    found = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            record = json.loads(line)
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                found.append(record)
    return found


def trim_metrics(run_dir: Path, last_log: int, last_eval: int) -> None:
    """Forgets records that the checkpoint which training continues from does not know of: they will come again."""
    path = run_dir / "metrics.jsonl"
    if path.exists():
        known = {"train": last_log, "eval": last_eval}
        kept = [json.dumps(r) for r in read_metrics(run_dir) if r["step"] <= known.get(r.get("kind", ""), last_log)]
        checkpoint.write_file(path, "".join(line + "\n" for line in kept))


def append_record(run_dir: Path, record: dict[str, Any]) -> None:
    """A line at the end of `metrics.jsonl`, as a whole or, with an OSError, not at all."""
    line = memoryview((json.dumps(record) + "\n").encode())
    handle = os.open(run_dir / "metrics.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        size = os.fstat(handle).st_size
        try:
            while len(line):
                line = line[os.write(handle, line) :]
        except OSError:
            os.ftruncate(handle, size)
            raise
    finally:
        os.close(handle)


def sync_metrics(run_dir: Path) -> None:
    """Records of steps that a checkpoint holds must be there after a power failure too."""
    path = run_dir / "metrics.jsonl"
    if path.exists():
        with path.open("a") as file:
            os.fsync(file.fileno())


def plot_curves(run_dir: str | Path) -> Path:
    """Draws the learning curves of a run to `plots/curves.png`; needs matplotlib (extra `cli`).

    Example:
        >>> from samplex_cuda.training import plot_curves
        >>> plot_curves("runs/mine")  # doctest: +SKIP
        PosixPath('runs/mine/plots/curves.png')
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("plot_curves: needs matplotlib: pip install samplex-cuda[cli]") from None
    run_dir = Path(run_dir)
    check_links(run_dir)
    records = read_metrics(run_dir)
    train = [(r["step"], r["loss"]) for r in records if r["kind"] == "train" and r.get("loss") is not None]
    curves = {
        name: [(r["step"], r[name]) for r in records if r["kind"] == "eval" and r.get(name) is not None]
        for name in dict.fromkeys(k for r in records if r["kind"] == "eval" for k in r)
        if name not in ("step", "epoch", "kind", "seconds", "best")
    }
    panels = [("training loss", train, "#d1495b"), *((name, curve, "#00798c") for name, curve in curves.items())]
    figure = Figure(figsize=(1.2 + 3.9 * len(panels), 3.6), dpi=140, layout="constrained")
    for axes, (name, curve, colour) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        axes.plot([s for s, _ in curve], [v for _, v in curve], color=colour, lw=1.8, marker="o", ms=3)
        axes.set_title(name if name == "training loss" else f"validation {name}", loc="left", fontsize=10)
        axes.set_xlabel("step")
        axes.grid(color="#e4e7eb", lw=0.8)
        axes.spines[["top", "right"]].set_visible(False)
    path = run_dir / "plots" / "curves.png"
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_name(f".tmp-{os.getpid()}.png")
    temporary.unlink(missing_ok=True)
    try:
        FigureCanvasAgg(figure).print_png(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def keep_batch(run_dir: Path, tensors: dict[str, Tensor], about: dict[str, Any], rank: int | None = None) -> Path:
    """Puts a batch whose loss is not finite into `nan/`, with what is known of it; the file with its tensors.

    `rank`: whose part of the batch it is, where there are several.
    """
    folder = run_dir / "nan"
    folder.mkdir(exist_ok=True)
    part = "" if rank is None else f"-rank-{rank}"
    path = folder / f"step-{about['step']:08d}{part}.safetensors"
    checkpoint.write_tensors(path, tensors)
    checkpoint.write_file(path.with_suffix(".json"), json.dumps(about, indent=1))
    return path


def open_board(run_dir: Path, step: int) -> Any:
    """A writer of TensorBoard files that goes on after `step`."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ImportError(
            "trainer: training.tensorboard needs tensorboard: pip install samplex-cuda[tensorboard]"
        ) from None
    return SummaryWriter(run_dir / "tensorboard", purge_step=step + 1)


def write_board(board: Any, record: dict[str, Any]) -> None:
    """The numbers of a record as scalars of TensorBoard."""
    for name, value in record.items():
        if name not in ("step", "epoch", "kind") and isinstance(value, int | float):
            board.add_scalar(f"{record['kind']}/{name}", value, record["step"])
