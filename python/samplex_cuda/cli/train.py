"""`samplex train`."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn

from samplex_cuda.cli.common import (
    INTERRUPTED,
    NOT_FINITE,
    OK,
    Output,
    Stop,
    UserError,
    check_device,
    checked,
    read_config,
    resume_command,
)
from samplex_cuda.training import NonFiniteLossError, Result, Trainer
from samplex_cuda.training import config as configs
from samplex_cuda.training.ranks import launched

__all__ = ["Display", "new_run_dir", "settings_of", "train"]

_REDRAW = 0.1  # seconds between two pictures
_WINDOW = 5.0  # seconds over which steps/s is measured


def _duration(seconds: float | None) -> str:
    if seconds is None or seconds != seconds:
        return "-"
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"
    return f"{whole // 60}:{whole % 60:02d}"


def _number(value: Any) -> str:
    if not isinstance(value, int | float):
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"


class Display:
    """Draws the events of a trainer: a live line on a terminal, plain lines elsewhere.

    Args:
        out: where to.

    Example:
        >>> from samplex_cuda.cli.common import Output
        >>> from samplex_cuda.cli.train import Display
        >>> with Display(Output(False)) as display:
        ...     display({"event": "start", "step": 0, "steps": 20, "epochs": 2, "run_dir": "runs/a", "fused": True})
        ...     display({"event": "eval", "step": 20, "nll": 2.5, "accuracy": 0.25, "seconds": 1.0, "best": True})
        training: 20 steps, 2 epochs
        step 20/20  valid: nll 2.5  accuracy 0.25  (best so far)
    """

    def __init__(self, out: Output) -> None:
        self.out = out
        self.steps, self.epochs, self.loss, self.stale = 0, 0, None, "fixed distribution"
        self.follows = False  # whether the sampler follows the class table
        self.name = ""
        self._drawn = 0.0
        self._marks: deque[tuple[float, int]] = deque()
        self._bar: Progress | None = None
        self._task: Any = None

    def __enter__(self) -> Display:
        """Nothing is drawn before the first event."""
        return self

    def __exit__(self, *what: object) -> None:
        """Ends the live line."""
        self._stop()

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.refresh()
            self._bar.stop()
            self._bar = None

    # ------------------------------------------------------------------------------------------ numbers
    def _rate(self, step: int) -> float | None:
        """Steps per second over the last seconds."""
        now = time.monotonic()
        self._marks.append((now, step))
        while len(self._marks) > 2 and now - self._marks[0][0] > _WINDOW:
            self._marks.popleft()
        then, before = self._marks[0]
        return (step - before) / (now - then) if now > then and step > before else None

    def _staleness(self, steps: int, rows: int | None = None) -> str:
        if not self.follows:
            return "fixed distribution"
        text = f"{steps} step{'' if steps == 1 else 's'} old"
        return text if not rows else f"{text}, {rows:,} rows"

    # ------------------------------------------------------------------------------------------ events
    def __call__(self, event: dict[str, Any]) -> None:
        """Takes an event of `Trainer`."""
        handle = getattr(self, f"_on_{event['event']}", None)
        if handle is not None:
            handle(event)

    def _on_fit(self, event: dict[str, Any]) -> None:
        if event["sampler"] in ("tree", "bigram", "mixture"):
            self.out.say(f"fitting the sampler {event['sampler']} to the data")

    def _on_resumed(self, event: dict[str, Any]) -> None:
        self.out.say(f"resumed at step {event['step']:,} from {event['path']}")

    def _on_start(self, event: dict[str, Any]) -> None:
        self.steps, self.epochs = event["steps"], event["epochs"]
        self.out.say(f"training: {self.steps:,} steps, {self.epochs} epochs")
        if self.out.live:
            columns = (
                TextColumn("epoch {task.fields[epoch]}"),
                BarColumn(bar_width=24),
                TextColumn("step {task.completed:,.0f}/{task.total:,.0f}"),
                TextColumn("loss {task.fields[loss]}"),
                TextColumn("{task.fields[rate]} steps/s"),
                TextColumn("ETA {task.fields[eta]}"),
                TextColumn("{task.fields[what]}"),
            )
            self._bar = Progress(*columns, console=self.out.console, auto_refresh=False, transient=True)
            self._bar.start()
            self._task = self._bar.add_task(
                "", total=self.steps, completed=event["step"], epoch="-", loss="-", rate="-", eta="-", what=""
            )

    def _on_progress(self, event: dict[str, Any]) -> None:
        if event["loss"] is not None:
            # A mean that forgets: one batch says little.
            self.loss = event["loss"] if self.loss is None else 0.95 * self.loss + 0.05 * event["loss"]
        now = time.monotonic()
        if self._bar is None or now - self._drawn < _REDRAW:
            return
        self._drawn = now
        step, rate = event["step"], self._rate(event["step"])
        self._bar.update(
            self._task,
            completed=step,
            epoch=f"{event['epoch'] + 1}/{self.epochs}",
            loss=_number(self.loss),
            rate=_number(rate),
            eta=_duration(None if rate is None else (self.steps - step) / rate),
            what=f"{self.name} {self._staleness(event['stale'])}",
        )
        self._bar.refresh()

    def _on_eval_progress(self, event: dict[str, Any]) -> None:
        now = time.monotonic()
        if self._bar is not None and now - self._drawn >= _REDRAW:
            self._drawn = now
            self._bar.update(self._task, what=f"evaluating {event['done']}/{event['count']}")
            self._bar.refresh()

    def _on_train(self, event: dict[str, Any]) -> None:
        if self._bar is not None:
            return
        stale = self._staleness(event.get("stale_steps", 0), event.get("stale_rows"))
        rate = event["steps_per_second"]
        self.out.say(
            f"step {event['step']:,}/{self.steps:,}  epoch {min(event['epoch'] + 1, self.epochs)}/{self.epochs}  "
            f"loss {_number(event['loss'])}  {_number(rate)} steps/s  ETA {_duration(event['eta'])}  sampler {stale}"
        )

    def _on_eval(self, event: dict[str, Any]) -> None:
        hidden = ("event", "kind", "step", "epoch", "seconds", "best", "eval_seconds", "worse_than_equal")
        values = "  ".join(f"{name} {_number(event[name])}" for name in event if name not in hidden)
        best = "  (best so far)" if event["best"] else ""
        if event.get("worse_than_equal"):
            best = "  (worse than equal probabilities)"
        self.out.say(f"step {event['step']:,}/{self.steps:,}  valid: {values}{best}")

    def _on_choice(self, event: dict[str, Any]) -> None:
        self.out.say(f"step {event['step']:,}/{self.steps:,}  {event['message']}")

    def _on_refused(self, event: dict[str, Any]) -> None:
        self.out.warn(f"{event['reason']}; {event['instead']}")

    def _on_damaged(self, event: dict[str, Any]) -> None:
        self.out.say(f"the damaged checkpoint is kept as {event['path']}")

    def _on_checkpoint_failed(self, event: dict[str, Any]) -> None:
        self.out.warn(f"step {event['step']:,}: {event['reason']}")

    def _on_nan(self, event: dict[str, Any]) -> None:
        if event["action"] == "skip":
            self.out.warn(f"step {event['step']:,} is left out: {event['message']}")

    def _on_warning(self, event: dict[str, Any]) -> None:
        self.out.warn(event["message"])


def settings_of(**given: str | int | None) -> list[str]:
    """`table.key=value` of the options that are given; `table__key` names them.

    Example:
        >>> from samplex_cuda.cli.train import settings_of
        >>> settings_of(data__path="train.txt", model__name=None, data__options__skip_bad=3)
        ['data.path=train.txt', 'data.options.skip_bad=3']
    """
    return [f"{name.replace('__', '.')}={value}" for name, value in given.items() if value is not None]


def new_run_dir(parent: Path = Path("runs")) -> Path:
    """The first of runs/run-001, runs/run-002, ... that is not there.

    Example:
        >>> from pathlib import Path
        >>> from samplex_cuda.cli.train import new_run_dir
        >>> new_run_dir(Path("no/such")).name
        'run-001'
    """
    number = 1
    while (parent / f"run-{number:03d}").exists():
        number += 1
    return parent / f"run-{number:03d}"


def train(
    out: Output,
    *,
    config: Path | None,
    settings: list[str],
    run_dir: Path | None,
    resume: Path | None,
    restart: bool = False,
    grow: bool = False,
    trust_model: str | None = None,
) -> tuple[dict[str, Any], int]:
    """Trains; returns the JSON object and the exit code.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from samplex_cuda.cli.common import Output
        >>> from samplex_cuda.cli.train import train
        >>> settings = ["data.path=builtin:classes=50,dim=8,examples=200", "training.epochs=1"]
        >>> with tempfile.TemporaryDirectory() as folder:  # doctest: +ELLIPSIS
        ...     found, code = train(
        ...         Output(False), config=None, settings=settings, run_dir=Path(folder, "a"), resume=None
        ...     )
        reading the data...
        >>> code, found["status"]
        (0, 'finished')
    """
    begin = time.perf_counter()
    # A name on this command line is the user's own word; one in a file is not.
    named = [setting.partition("=")[2].strip() for setting in settings if setting.startswith("model.name=")]
    trust_model = trust_model or (named[-1] if named and ":" in named[-1] else None)
    if _goes_on(config, settings, run_dir, resume):
        resume, settings = run_dir, []
    with Display(out) as display:
        if resume is not None:
            folder = resume
            if (folder / "config.toml").is_file():  # else the trainer says so
                check_device(configs.override(read_config(folder), settings).training.device)
            with _hint(out, folder, trust_model), checked(), out.busy(f"resuming {folder}"):
                trainer = Trainer.resume(
                    folder, settings=settings, trust_model=trust_model, restart=restart, grow=grow, on_event=display
                )
        else:
            chosen = configs.load(config) if config is not None else configs.Config()
            chosen = configs.override(chosen, settings)
            check_device(chosen.training.device)
            folder = new_run_dir() if run_dir is None else run_dir
            if (folder / "config.toml").exists():
                raise UserError(
                    f"{folder}: already contains a run; resume it with: {resume_command(folder)}, or give another --out"
                )
            with (
                _hint(out, folder, trust_model),
                checked(),
                out.busy(f"reading the data of {chosen.data.path or '(no data.path)'}"),
            ):
                trainer = Trainer(chosen, run_dir=folder, trust_model=trust_model, on_event=display)
        display.follows = trainer.head.sampler_update is not None
        display.name = trainer.config.sampler.name if trainer.head.loss.needs.draws else "full softmax"
        _introduce(out, trainer)
        if trainer.ranks.sharded:
            kind, count = trainer.config.training.shard_encoder, trainer.head.weight.shape[0]
            out.say(f"ranks: {trainer.ranks.world}, {count:,} class rows on the first; encoder in {kind}")
        started = trainer.progress.step
        try:
            result = trainer.fit()
        except KeyboardInterrupt:  # the second Ctrl-C: it did not wait for the checkpoint
            result = Result("interrupted", trainer.progress.step, {}, None, 0, "not saved", signal.SIGINT)
        except NonFiniteLossError as error:
            display._stop()
            return _not_finite(out, folder, error, trust_model)
    found = _report(out, trainer, result, started, time.perf_counter() - begin)
    trainer.ranks.close()
    return found


def _goes_on(config: Path | None, settings: list[str], run_dir: Path | None, resume: Path | None) -> bool:
    """Whether this is a restart by torchrun, whose attempt before has begun the run; refuses ranks that do not fit."""
    world = launched()[1]
    if resume is not None:
        chosen = read_config(resume) if resume.is_dir() else configs.Config()
    else:
        chosen = configs.load(config) if config is not None else configs.Config()
    if configs.override(chosen, settings).training.shard == "none":
        if world > 1:
            raise UserError(f"--shard classes must be given for {world} ranks: without --shard use one process")
        return False
    if world > 1 and run_dir is None and resume is None:
        raise UserError(
            "--out must be given with --shard: all ranks, also after a restart, must use the same run folder"
        )
    again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    return again and run_dir is not None and (run_dir / "config.toml").exists()


@contextlib.contextmanager
def _hint(out: Output, folder: Path, trust_model: str | None) -> Iterator[None]:
    """Ctrl-C while data are read or a sampler is fitted."""
    try:
        yield
    except KeyboardInterrupt:
        payload = {"status": "interrupted", "step": 0}
        if (folder / "config.toml").exists():
            payload |= {"run_dir": str(folder), "resume": resume_command(folder, trust_model)}
            out.say(f"Stopped before the first step. Go on with:\n  {resume_command(folder, trust_model)}")
        else:
            out.say("Stopped while the data were read; nothing was written.")
        raise Stop(payload, INTERRUPTED) from None


def _introduce(out: Output, trainer: Trainer) -> None:
    data, c = trainer.train, trainer.config
    if data.columns_said:
        out.say(data.columns_said)
    if trainer.valid is not None and trainer.valid.columns_said not in ("", data.columns_said):
        out.say(f"validation {trainer.valid.columns_said}")
    for note in data.notes:
        out.warn(note)
    valid = "no validation data" if trainer.valid is None else f"{len(trainer.valid):,} for validation"
    out.say(f"data: {len(data):,} {data.kind} examples, {data.num_classes:,} classes; {valid}")
    draws = _draws(c) if trainer.head.loss.needs.draws else "all classes"
    out.say(
        f"model: {c.model.name}, d = {trainer.head.in_features}; {c.head.loss}, {draws}; run folder {trainer.run_dir}"
    )


def _draws(c: configs.Config) -> str:
    s = c.sampler
    name = " + ".join(s.components) if s.components else s.name
    if s.base != "none":
        name = f"{1 - s.base_weight:g} {name} + {s.base_weight:g} {s.base}"
    return f"sampler {name}, {c.head.num_samples:,} draws {'shared by the batch' if c.head.shared else 'per row'}"


def _files(run_dir: Path) -> dict[str, str]:
    found = {}
    for name, path in (
        ("metrics", run_dir / "metrics.jsonl"),
        ("curves", run_dir / "plots" / "curves.png"),
        ("checkpoints", run_dir / "checkpoints"),
        ("best", run_dir / "best"),
        ("config", run_dir / "config.toml"),
        ("tensorboard", run_dir / "tensorboard"),
    ):
        if path.exists():
            found[name] = str(path)
    return found


def _not_finite(
    out: Output, folder: Path, error: NonFiniteLossError, trust_model: str | None
) -> tuple[dict[str, Any], int]:
    out.console.print(str(error), markup=False, soft_wrap=True, style="red")
    resume = resume_command(folder, trust_model)
    command = f"{resume} --set optimizer.lr=... (or training.clip_norm=1, training.on_nan=skip)"
    out.say(f"To continue from the last checkpoint: {command}")
    payload = {"status": "nan", "error": str(error), "run_dir": str(folder), "resume": resume}
    return payload, NOT_FINITE


def _report(out: Output, trainer: Trainer, result: Result, started: int, wall: float) -> tuple[dict[str, Any], int]:
    folder, c = trainer.run_dir, trainer.config
    files, done = _files(folder), trainer.progress
    rate = done.step / done.seconds if done.seconds > 0 else None
    payload: dict[str, Any] = {
        "status": result.status,
        "run_dir": str(folder),
        "step": result.step,
        "steps": trainer.total_steps,
        "started_at": started,
        "epochs": done.epoch,
        "seconds": round(done.seconds, 3),
        "wall_seconds": round(wall, 3),
        "steps_per_second": rate,
        "num_classes": trainer.train.num_classes,
        "examples": len(trainer.train),
        "metrics": result.metrics,
        "monitor": c.training.monitor,
        "best": result.best,
        "best_step": result.best_step if result.best is not None else None,
        "skipped": done.skipped,
        "files": files,
        "message": result.message,
    }
    if result.status == "interrupted":
        payload["resume"] = resume_command(folder, trainer.trust_model)
        saved = "the steps since the last checkpoint are lost" if result.message == "not saved" else "it is saved"
        out.say(f"Stopped at step {result.step:,} of {trainer.total_steps:,}; {saved}. Go on with:")
        out.say(f"  {payload['resume']}")
        return payload, 128 + result.signal if result.signal else INTERRUPTED
    rows = [
        ("status", result.status + (f": {result.message}" if result.message else "")),
        ("steps", f"{result.step:,} ({done.epoch} epochs)"),
        ("time", f"{_duration(done.seconds)} of training ({_number(rate)} steps/s), {_duration(wall)} in total"),
    ]
    if result.best is not None:
        limit = math.log(trainer.train.num_classes)
        useless = c.training.monitor == "nll" and result.best > limit
        note = f", worse than equal probabilities ({_number(limit)})" if useless else ""
        rows.append((f"best valid {c.training.monitor}", f"{_number(result.best)} at step {result.best_step:,}{note}"))
    rows += [(f"last valid {name}", _number(value)) for name, value in result.metrics.items()]
    if done.skipped:
        rows.append(("steps left out", f"{done.skipped:,} (loss not finite; batches in {folder / 'nan'})"))
    rows += [("warning", message) for message in result.warnings]
    rows += list(files.items())
    out.table(rows)
    if result.step == started:
        out.say("There was nothing left to do; more epochs: --set training.epochs=N")
    out.say(f"Next: samplex evaluate {folder}   samplex diagnose {folder}")
    return payload, OK
