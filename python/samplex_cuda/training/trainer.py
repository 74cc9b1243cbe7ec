"""The trainer: from a configuration and data to a model, and back from a kill to the same bits.

Every random number of a run is a function of the seed and a counter that the checkpoint holds: draws of classes come
from the key (seed, step), the order of the data from (seed, epoch), dropout from torch's generator, whose state is
saved. A checkpoint is a step boundary. So a run that was stopped at any moment and resumed ends with the parameters of
one that was not. docs/training.md says what is needed for that.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from samplex_cuda import optim
from samplex_cuda.data import Batches, Dataset
from samplex_cuda.heads import SampledClassifier
from samplex_cuda.rng import fold_in
from samplex_cuda.training import checkpoint, models
from samplex_cuda.training import config as configs
from samplex_cuda.training.checkpoint import CheckpointError
from samplex_cuda.training.config import Config, ConfigError
from samplex_cuda.training.data import open_data

__all__ = [
    "NonFiniteLossError",
    "Progress",
    "Result",
    "RunError",
    "Trainer",
    "evaluate",
    "load_model",
    "plot_curves",
    "read_metrics",
]

_DRAWS = 0x5A3D_0000_0000_0000  # keys of draws meet those of nothing else under the same seed
_LOWER_IS_BETTER = ("nll", "perplexity", "loss")


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


class NonFiniteLossError(RuntimeError):
    """A loss that is nan or infinite; the message names the step and the file with the batch.

    Example:
        >>> from samplex_cuda.training import NonFiniteLossError
        >>> issubclass(NonFiniteLossError, RuntimeError)
        True
    """


class _InterruptedError(Exception):
    """A signal came while something was under way that will be done again."""


@dataclasses.dataclass
class Progress:
    """Where a run is; all of it is in a checkpoint.

    Attributes:
        step: optimizer steps done (skipped ones count).
        epoch: the epoch that the next batch belongs to.
        batch: batches of it that were used.
        status: "running", "finished" or "early_stop".
        best: the best value of the monitored metric, at `best_step`; `bad` evaluations since.

    Example:
        >>> from samplex_cuda.training import Progress
        >>> Progress().step
        0
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0
    status: str = "running"
    last_log: int = 0
    last_eval: int = 0
    loss_sum: float = 0.0
    loss_count: int = 0
    best: float | None = None
    best_step: int = 0
    bad: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    averaged: int = 0
    seconds: float = 0.0


@dataclasses.dataclass
class Result:
    """What `Trainer.fit` did.

    Attributes:
        status: "finished", "early_stop" or "interrupted".
        step: steps done.
        metrics: of the last evaluation.
        best: the best value of the monitored metric, None without evaluation.
        best_step: when that was.
        message: for a person; after an interruption it says how to go on.
        signal: number of the signal that interrupted it; 0: none.

    Example:
        >>> from samplex_cuda.training import Result
        >>> Result("finished", 10, {"nll": 1.0}, 1.0, 10, "").status
        'finished'
    """

    status: str
    step: int
    metrics: dict[str, float]
    best: float | None
    best_step: int
    message: str
    signal: int = 0


# ---------------------------------------------------------------------------------------------------- evaluation
@torch.no_grad()
def evaluate(
    encoder: models.Encoder,
    head: SampledClassifier,
    dataset: Dataset,
    *,
    batch_size: int = 256,
    metrics: Iterable[str] = ("nll", "accuracy"),
    rows: int = 0,
    exclude_history: bool = False,
    propensities: Tensor | None = None,
    on_batch: Callable[[int, int], None] | None = None,
) -> dict[str, float]:
    """Exact metrics over a data set; encoder and head are left as they were, a carried state included.

    Args:
        encoder: gives h.
        head: the classifier.
        dataset: what to measure on, in its own order.
        batch_size: examples at a time; text has its own.
        metrics: "nll" (exact, over all classes), "perplexity", "accuracy" (the best class is one of the targets), and
            those of `samplex_cuda.metrics`: "precision@5", "recall@20", "ndcg@10", "psp@3", "mrr" (over the largest k
            that is asked for, or 10).
        rows: only so many first examples, in whole batches; 0: all.
        exclude_history: interactions: items that a user knows are no answers.
        propensities: [C], for "psp@k".
        on_batch: called with (batches done, batches in all).

    Example:
        >>> import torch
        >>> from samplex_cuda import data
        >>> from samplex_cuda.training import Config, build, evaluate
        >>> train = data.Dense(torch.randn(20, 6), torch.randint(0, 9, (20,)))
        >>> sorted(evaluate(*build(Config(), train), train, metrics=["nll", "recall@3"]))
        ['nll', 'recall@3']
    """
    from samplex_cuda.metrics import Evaluator, _topk_without

    names = list(metrics)
    ks = sorted({min(k, head.num_classes) for k in _check_metrics("evaluate: metrics", names)} or {1})
    if "mrr" in names and ks == [1]:
        ks = [min(10, head.num_classes)]
    ranked = any(name not in ("nll", "perplexity") for name in names)
    evaluator = Evaluator(ks, propensities)
    if exclude_history and dataset.kind != "interactions":
        raise ValueError(f"evaluate: exclude_history must be off for {dataset.kind} data, got True")
    size = int(getattr(dataset, "columns", batch_size)) if dataset.ordered else batch_size
    batches = Batches(dataset, size, shuffle=False)
    count = len(batches) if not rows else min(len(batches), math.ceil(rows / size))
    device = head.weight.device
    training, carried, reduction = (encoder.training, head.training), encoder.carried(), head.reduction
    try:
        encoder.eval()
        nn.Module.train(head, False)  # not head.eval(): going back would count as a new epoch for its sampler
        head.reduction = "none"
        encoder.carry({})
        for number in range(count):
            chosen = batches.rows(number)
            batch = {name: t.to(device) for name, t in dataset.batch(chosen).items()}
            h, features = encoder.encode(batch)
            y = batch["y"]
            several = y.dim() == h.dim()
            h = h.to(head.weight.dtype).reshape(-1, h.shape[-1])
            y = y.reshape(-1, y.shape[-1]) if several else y.reshape(-1)
            features = None if features is None else features.reshape(-1, features.shape[-1])
            valid = (y >= 0).any(1) if several else y >= 0
            if not exclude_history and not bool(valid.all()):  # the rest of a last window, rows without labels
                h, y, features = h[valid], y[valid], None if features is None else features[valid]
            if len(h):
                loss = h.new_zeros(len(h))
                if "nll" in names or "perplexity" in names:
                    loss = head(h, y, features=features)
                ids = torch.zeros(len(h), ks[-1], dtype=torch.int64, device=device)
                if ranked and exclude_history:
                    source: Any = dataset
                    ids = _topk_without(head, h, features, ks[-1], *source.seen(chosen))
                elif ranked:
                    ids = head.topk(h, ks[-1], features=features)[1]
                evaluator.update(ids, y, loss)
            if on_batch is not None:
                on_batch(number + 1, count)
    finally:
        encoder.train(training[0])
        nn.Module.train(head, training[1])
        head.reduction = reduction
        encoder.carry(carried)
    found = evaluator.compute()
    missing = [name for name in names if _bounded(name, head.num_classes) not in found]
    if missing:
        needs = "needs propensities" if missing[0].startswith("psp") else "needs an example with a target"
        raise ValueError(f"evaluate: metrics: {missing[0]} {needs}")
    return {name: found[_bounded(name, head.num_classes)] for name in names}


def _bounded(name: str, num_classes: int) -> str:
    """A metric at a k above C is that at C."""
    kind, at, k = name.partition("@")
    return f"{kind}@{min(int(k), num_classes)}" if at else name


def _check_metrics(where: str, names: Iterable[str]) -> list[int]:
    """The k's of metrics by name; ValueError for a name that is none."""
    ks = []
    for name in names:
        match = re.fullmatch(r"(?:precision|recall|ndcg|psp|psp_raw)@([1-9]\d*)", name)
        if match:
            ks.append(int(match.group(1)))
        elif name not in ("nll", "perplexity", "accuracy", "mrr"):
            wanted = "nll, perplexity, accuracy, mrr, precision@k, recall@k, ndcg@k, psp@k or psp_raw@k"
            raise ValueError(f"{where} must be {wanted}, got {name!r}")
    return ks


# ---------------------------------------------------------------------------------------------------- run folder
def read_metrics(run_dir: str | Path) -> list[dict[str, Any]]:
    """The records of `metrics.jsonl`; a line that a kill cut off is left out.

    Example:
        >>> from samplex_cuda.training import read_metrics
        >>> read_metrics("no/such/run")
        []
    """
    try:
        text = (Path(run_dir) / "metrics.jsonl").read_text()
    except FileNotFoundError:
        return []
    found = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            record = json.loads(line)
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                found.append(record)
    return found


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
    try:
        FigureCanvasAgg(figure).print_png(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


class _Described(Dataset):
    """What a checkpoint says of the training data: sizes without examples."""

    def __init__(self, about: dict[str, Any]) -> None:
        super().__init__()
        self._length = int(about["length"])
        for name in ("kind", "num_classes", "num_features", "ordered", "multi_label"):
            setattr(self, name, about[name])
        for name in ("window", "columns", "history"):
            if about.get(name) is not None:
                setattr(self, name, about[name])

    def __len__(self) -> int:
        return self._length


def _about(dataset: Dataset) -> dict[str, Any]:
    found: dict[str, Any] = {"length": len(dataset), "fingerprint": dataset.fingerprint()}
    for name in ("kind", "num_classes", "num_features", "ordered", "multi_label"):
        found[name] = getattr(dataset, name)
    for name in ("window", "columns", "history"):
        value = getattr(dataset, name, None)
        found[name] = value if isinstance(value, int) else None
    return found


def _environment(device: torch.device) -> dict[str, Any]:
    """What the bits of a run depend on besides its configuration and data."""
    import samplex_cuda
    from samplex_cuda._library import _native

    found = {
        "samplex_cuda": samplex_cuda.__version__,
        "torch": str(torch.__version__),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "simd": _native.build_info()["simd_level"],
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }
    return found


def _put_model(tensors: dict[str, Tensor], encoder: nn.Module, head: SampledClassifier) -> None:
    """The parameters and buffers of a model, by name, as they are: nothing is brought up to date, nothing copied."""
    tied = {name for name, p in encoder.named_parameters() if p is head.weight}
    # state_dict() of the head brings its sampler up to date first, which would make a checkpoint change the run.
    policy, head.sampler_update = head.sampler_update, None
    try:
        state = head.state_dict()
    finally:
        head.sampler_update = policy
    tensors.update({f"head.{name}": t for name, t in state.items()})
    tensors.update({f"encoder.{name}": t for name, t in encoder.state_dict().items() if name not in tied})


def _take_model(tensors: dict[str, Tensor], encoder: nn.Module, head: SampledClassifier) -> None:
    def part(prefix: str) -> dict[str, Tensor]:
        return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}

    head.load_state_dict(part("head."))
    tied = {name: head.weight for name, p in encoder.named_parameters() if p is head.weight}
    encoder.load_state_dict({**part("encoder."), **tied})


def load_model(
    run_dir: str | Path, which: str = "best", *, device: str | torch.device = "cpu"
) -> tuple[models.Encoder, SampledClassifier, Config, dict[str, Any]]:
    """The model of a run, ready for evaluation; no data are needed.

    Args:
        run_dir: of the run.
        which: "best" (by the monitored metric; the averaged weights where there is an average), or "latest". Where
            there is no best one, the latest is taken.
        device: where to put it.

    Returns:
        (encoder, head, config, meta), both modules in eval mode. `meta["data"]` says what data it was trained on.

    Example:
        >>> from samplex_cuda.training import load_model
        >>> encoder, head, config, meta = load_model("runs/mine")  # doctest: +SKIP
    """
    run_dir = Path(run_dir)
    if which not in ("best", "latest"):
        raise ValueError(f"load_model: which must be 'best' or 'latest', got {which!r}")
    found = checkpoint.latest(run_dir / "best") if which == "best" else None
    found = found or checkpoint.latest(run_dir)
    if found is None:
        raise RunError(f"load_model: {run_dir}: has no checkpoint")
    tensors, meta = checkpoint.load(found, check=False)
    config = configs.from_dict(meta["config"], str(found))
    config.training.device = str(device)
    encoder, head = models.build(config, _Described(meta["data"]), fit=False)
    _take_model(tensors, encoder, head)
    for name, average in tensors.items():
        if name.startswith("average."):
            owner, _, rest = name.removeprefix("average.").partition(".")
            with torch.no_grad():
                (encoder if owner == "encoder" else head).get_parameter(rest).copy_(average)
    return encoder.eval(), head.eval(), config, meta


# ---------------------------------------------------------------------------------------------------- trainer
class Trainer:
    """Trains what a configuration says and keeps a run folder.

        run/
            config.toml        the configuration, every key
            environment.json   versions, machine, what was built
            metrics.jsonl      a record every `log_every` steps and for each evaluation
            checkpoints/       the last `keep`
            best/              the weights of the best evaluation
            plots/curves.png   learning curves
            nan/               batches whose loss was not finite

    Args:
        config: the configuration.
        train: the training data; None: opened from `config.data`.
        valid: the validation data; None with `train` given: no evaluation.
        run_dir: the run folder; must not hold a run yet (`Trainer.resume` goes on with one).
        on_event: called with a dict for everything that happens: event = "start", "progress" (each step), "train" (a
            record), "eval", "eval_progress", "checkpoint", "checkpoint_failed", "refused" (a damaged checkpoint),
            "cleaned", "nan", "best", "epoch", "fit", "warning", "interrupted", "end".

    Example:
        >>> import tempfile, torch
        >>> from samplex_cuda import data
        >>> from samplex_cuda.training import Config, Trainer, config
        >>> train = data.Dense(torch.randn(64, 6), torch.randint(0, 9, (64,)))
        >>> run = config.override(Config(), ["training.epochs=2", "training.batch_size=16", "head.num_samples=4"])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     result = Trainer(run, train, train, f"{folder}/run").fit()
        >>> result.status, result.step
        ('finished', 8)
    """

    def __init__(
        self,
        config: Config,
        train: Dataset | None = None,
        valid: Dataset | None = None,
        run_dir: str | Path = "run",
        *,
        on_event: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self._prepare(config, train, valid, run_dir, on_event)
        if (self.run_dir / "config.toml").exists() or checkpoint.list_checkpoints(self.run_dir):
            raise RunError(
                f"trainer: {self.run_dir}: holds a run already; go on with Trainer.resume({str(self.run_dir)!r}), or "
                "take another folder"
            )
        try:
            for name in ("checkpoints", "plots"):
                (self.run_dir / name).mkdir(parents=True, exist_ok=True)
            checkpoint.write_file(self.run_dir / "environment.json", json.dumps(self._surroundings(), indent=1))
            checkpoint.write_file(self.run_dir / "config.toml", configs.dumps(config))
        except OSError as error:
            raise RunError(f"trainer: {self.run_dir}: cannot be written to ({error.strerror})") from None
        self._make(fit=True)

    @classmethod
    def resume(
        cls,
        run_dir: str | Path,
        train: Dataset | None = None,
        valid: Dataset | None = None,
        *,
        settings: Iterable[str] = (),
        on_event: Callable[[dict[str, Any]], None] | None = None,
    ) -> Trainer:
        """A trainer that goes on where the newest whole checkpoint of a run is; from the start where there is none.

        Args:
            run_dir: the run folder.
            train: the training data of before; None: opened from the configuration.
            valid: the validation data of before.
            settings: keys to change, as in `config.override`: e.g. `training.epochs=20`. The old configuration is kept
                beside the new one.
            on_event: as in the class.

        Example:
            >>> from samplex_cuda.training import Trainer
            >>> Trainer.resume("runs/mine").fit()  # doctest: +SKIP
        """
        run_dir = Path(run_dir)
        path = run_dir / "config.toml"
        if not path.exists():
            raise RunError(f"trainer: {run_dir}: has no config.toml, so there is no run to resume")
        old = configs.load(path)
        config = configs.override(old, settings)
        self = cls.__new__(cls)
        self._prepare(config, train, valid, run_dir, on_event)
        for name in ("checkpoints", "plots"):
            (run_dir / name).mkdir(exist_ok=True)
        with self._locked():
            for folder in (run_dir, run_dir / "checkpoints", run_dir / "best"):
                for removed in checkpoint.clean(folder):
                    self._event("cleaned", path=str(removed))
            found = checkpoint.latest(run_dir, on_refused=self._refused)
            meta: dict[str, Any] = {}
            if found is not None:
                tensors, meta = checkpoint.load(found, check=False)
            step = meta["progress"]["step"] if meta else 0
            if config != old:
                checkpoint.write_file(run_dir / f"config.before-{step:08d}.toml", configs.dumps(old))
                checkpoint.write_file(path, configs.dumps(config))
            self._trim_metrics(step)
        if found is None:
            self._make(fit=True)
            return self
        self._check_meta(found, meta)
        self._make(fit=False)
        self._restore(tensors, meta)
        self._event("resumed", step=step, path=str(found))
        return self

    # ------------------------------------------------------------------------------------------ making
    def _prepare(
        self,
        config: Config,
        train: Dataset | None,
        valid: Dataset | None,
        run_dir: str | Path,
        on_event: Callable[[dict[str, Any]], None] | None,
    ) -> None:
        config.check()
        t = config.training
        if t.monitor not in t.metrics and (t.patience or t.monitor != "nll"):
            raise ConfigError(f"config: [training] monitor must be one of metrics {t.metrics}, got {t.monitor!r}")
        self.config, self.run_dir, self.on_event = config, Path(run_dir), on_event
        try:
            _check_metrics("config: [training] metrics", t.metrics)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        if train is None:
            train, valid = open_data(config)
            # The run folder must be good from anywhere.
            for name in ("path", "valid"):
                path = getattr(config.data, name)
                if path and Path(path).exists():
                    setattr(config.data, name, str(Path(path).absolute()))
        if len(train) < 1:
            raise ValueError("trainer: train must have at least 1 example, got none")
        self.train, self.valid = train, valid
        if config.sampler.path and Path(config.sampler.path).exists():
            config.sampler.path = str(Path(config.sampler.path).absolute())
        if config.head.mask_known and train.known(torch.empty(0, dtype=torch.int64)) is None:
            raise ConfigError(
                f"config: [head] mask_known must be false for these {train.kind} data: no example has positives "
                "besides its targets; got true"
            )
        if t.threads:
            torch.set_num_threads(t.threads)
        self.device = torch.device(t.device)
        self.progress = Progress()
        self.metrics: dict[str, float] = {}
        self.average: dict[str, Tensor] = {}
        self._rng: dict[str, Tensor] | None = None
        self._signal = 0
        self._board: Any = None
        self._batches: tuple[int, Batches] | None = None
        self._watch = time.perf_counter()
        size = int(getattr(train, "columns", t.batch_size)) if train.ordered else t.batch_size
        self._epoch_batches = len(Batches(train, size))
        self.batch_size = size
        self.steps_per_epoch = math.ceil(self._epoch_batches / t.accumulate)
        self.total_steps = t.epochs * self.steps_per_epoch
        if t.steps:
            self.total_steps = min(self.total_steps, t.steps)
        self.keys = torch.tensor([t.seed ^ _DRAWS, 0], dtype=torch.int64)

    def _make(self, fit: bool) -> None:
        if fit:
            self._event("fit", sampler=self.config.sampler.name)
        self.encoder, self.head = models.build(self.config, self.train, fit=fit)
        self.optimizers = models.optimizers(self.config, self.encoder, self.head)
        self._rates = {name: [g["lr"] for g in o.param_groups] for name, o in self.optimizers.items()}
        if self.config.fused:
            row_optimizer: Any = self.optimizers["head"]
            self.head.fuse_optimizer(row_optimizer, self.config.training.accumulate)
        if fit:
            generator = torch.Generator().manual_seed(self.config.training.seed + 0xD409)
            self._rng = {"cpu": generator.get_state()}

    def _surroundings(self) -> dict[str, Any]:
        from samplex_cuda.info import gather_info

        return {**gather_info(), "bits": _environment(self.device), "data": _about(self.train)}

    def _event(self, event: str, **fields: Any) -> None:
        if self.on_event is not None:
            self.on_event({"event": event, **fields})

    def _refused(self, path: Path, reason: str) -> None:
        self._event("refused", path=str(path), reason=reason)
        if self.on_event is None:
            import warnings

            warnings.warn(f"{reason}; using the one before", stacklevel=3)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """One process a run folder; the system lets go of the lock when a process is killed."""
        try:
            import fcntl
        except ImportError:
            yield
            return
        with (self.run_dir / ".lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise RunError(f"trainer: {self.run_dir}: another process is training in it") from None
            yield

    # ------------------------------------------------------------------------------------------ state
    def _state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything that the rest of the run depends on."""
        tensors: dict[str, Tensor] = {}
        _put_model(tensors, self.encoder, self.head)
        numbers: dict[str, Any] = {}
        for which, optimizer in self.optimizers.items():
            state = optimizer.state_dict()
            kept: dict[str, Any] = {}
            for index, values in state["state"].items():
                for name, value in values.items():
                    if isinstance(value, Tensor):
                        tensors[f"optimizer.{which}.{index}.{name}"] = value
                    else:
                        kept.setdefault(str(index), {})[name] = value
            numbers[which] = {"state": kept, "key": state.get("key")}
        tensors.update({f"average.{name}": t for name, t in self.average.items()})
        tensors.update({f"carried.{name}": t for name, t in self.encoder.carried().items()})
        rng = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            rng["cuda"] = torch.cuda.get_rng_state(self.device)
        tensors.update({f"rng.{name}": t for name, t in rng.items()})
        if self.head._touched:
            tensors["sampler.touched"] = torch.cat(self.head._touched).unique()
        meta = {
            "progress": dataclasses.asdict(self.progress),
            "optimizers": numbers,
            "sampler": {"steps": self.head._steps, "stale": self.head._stale},
            "metrics": self.metrics,
            "config": self.config.as_dict(),
            "data": _about(self.train),
            "environment": _environment(self.device),
        }
        return tensors, meta

    def _check_meta(self, path: Path, meta: dict[str, Any]) -> None:
        try:
            wanted = meta["data"]["fingerprint"]
            old = meta["environment"]
        except (KeyError, TypeError):
            raise CheckpointError(f"checkpoint: {path}: meta.json is not that of a training run") from None
        got = self.train.fingerprint()
        if got != wanted:
            raise RunError(
                f"trainer: {self.run_dir}: the training data must be those of the run (fingerprint {wanted[:12]}), got "
                f"others ({got[:12]})"
            )
        now = _environment(self.device)
        other = [f"{name} {old.get(name)} is {now[name]} now" for name in now if old.get(name) != now[name]]
        if other:
            self._event("warning", message=f"the rest of the run may differ in the last bits: {', '.join(other)}")

    def _restore(self, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
        _take_model(tensors, self.encoder, self.head)
        for which, optimizer in self.optimizers.items():
            numbers = meta["optimizers"].get(which, {"state": {}, "key": None})
            state: dict[int, dict[str, Any]] = {int(i): dict(v) for i, v in numbers["state"].items()}
            prefix = f"optimizer.{which}."
            for name, t in tensors.items():
                if name.startswith(prefix):
                    index, _, what = name.removeprefix(prefix).partition(".")
                    state.setdefault(int(index), {})[what] = t
            given: dict[str, Any] = {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}
            if numbers["key"] is not None:
                given["key"] = numbers["key"]
            optimizer.load_state_dict(given)
        self.progress = Progress(**meta["progress"])
        self.metrics = meta["metrics"]
        self.average = {
            name.removeprefix("average."): t.to(self.device)
            for name, t in tensors.items()
            if name.startswith("average.")
        }
        self.encoder.carry(
            {n.removeprefix("carried."): t.to(self.device) for n, t in tensors.items() if n.startswith("carried.")}
        )
        self.head._steps, self.head._stale = meta["sampler"]["steps"], meta["sampler"]["stale"]
        self.head._touched = [tensors["sampler.touched"].to(self.device)] if "sampler.touched" in tensors else []
        self._rng = {n.removeprefix("rng."): t for n, t in tensors.items() if n.startswith("rng.")}
        if self.progress.status == "finished" and self.progress.step < self.total_steps:
            self.progress.status = "running"  # more epochs than before

    # ------------------------------------------------------------------------------------------ files
    def _trim_metrics(self, step: int) -> None:
        """Forget records after the checkpoint that training goes on from: they will come again."""
        path = self.run_dir / "metrics.jsonl"
        if path.exists():
            kept = [json.dumps(r) for r in read_metrics(self.run_dir) if r["step"] <= step]
            checkpoint.write_file(path, "".join(line + "\n" for line in kept))

    def _record(self, record: dict[str, Any]) -> None:
        with (self.run_dir / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")
        if self._board is not None:
            for name, value in record.items():
                if name not in ("step", "epoch", "kind") and isinstance(value, int | float):
                    self._board.add_scalar(f"{record['kind']}/{name}", value, record["step"])

    def save(self) -> Path | None:
        """Writes a checkpoint now; None where that failed and `on_save_error` is "continue"."""
        p = self.progress
        path = self.run_dir / "checkpoints" / checkpoint.directory_name(p.step)
        begin = time.perf_counter()
        self._count_time()
        try:
            metrics = self.run_dir / "metrics.jsonl"
            if metrics.exists():  # records of steps that the checkpoint holds must be there after a crash too
                with metrics.open("a") as file:
                    os.fsync(file.fileno())
            checkpoint.save(path, *self._state(), keep=self.config.training.keep)
        except CheckpointError as error:
            self._event("checkpoint_failed", step=p.step, reason=str(error))
            if self.config.training.on_save_error == "stop":
                raise
            return None
        self._event("checkpoint", step=p.step, path=str(path), seconds=time.perf_counter() - begin)
        self._watch = time.perf_counter()
        return path

    def _save_best(self) -> None:
        tensors: dict[str, Tensor] = {}
        with self._averaged():
            _put_model(tensors, self.encoder, self.head)
            meta = {
                "kind": "best",
                "progress": dataclasses.asdict(self.progress),
                "metrics": self.metrics,
                "config": self.config.as_dict(),
                "data": _about(self.train),
            }
            folder = self.run_dir / "best"
            try:
                folder.mkdir(exist_ok=True)
                checkpoint.save(folder / checkpoint.directory_name(self.progress.step), tensors, meta, keep=1)
            except (CheckpointError, OSError) as error:
                self._event("checkpoint_failed", step=self.progress.step, reason=str(error))
                if self.config.training.on_save_error == "stop":
                    raise
                return
        self._event("best", step=self.progress.step, value=self.progress.best)

    def _count_time(self) -> None:
        now = time.perf_counter()
        self.progress.seconds += now - self._watch
        self._watch = now

    # ------------------------------------------------------------------------------------------ averages
    def _averaged_parameters(self) -> dict[str, nn.Parameter]:
        found = {f"encoder.{n}": p for n, p in self.encoder.named_parameters() if p is not self.head.weight}
        if self.config.training.average_head:
            found.update({f"head.{n}": p for n, p in self.head.named_parameters()})
        return found

    @torch.no_grad()
    def _update_average(self) -> None:
        t, p = self.config.training, self.progress
        if t.average == "none" or p.step < t.average_start or p.step % t.average_every:
            return
        for name, parameter in self._averaged_parameters().items():
            if p.averaged == 0:
                self.average[name] = parameter.detach().clone()
            else:
                weight = 1.0 / (p.averaged + 1) if t.average == "swa" else 1.0 - t.average_decay**t.average_every
                self.average[name].lerp_(parameter, weight)
        p.averaged += 1

    @contextlib.contextmanager
    def _averaged(self) -> Iterator[None]:
        """The averaged weights in place of the current ones: the memory is swapped, nothing is copied."""
        if not self.average:
            yield
            return
        parameters = self._averaged_parameters()

        def swap() -> None:
            for name, parameter in parameters.items():
                parameter.data, self.average[name] = self.average[name], parameter.data

        swap()
        try:
            yield
        finally:
            swap()

    # ------------------------------------------------------------------------------------------ a step
    def _next_batches(self) -> list[dict[str, Tensor]]:
        p, t = self.progress, self.config.training
        if self._batches is None or self._batches[0] != p.epoch:
            self._batches = (p.epoch, Batches(self.train, self.batch_size, seed=t.seed, epoch=p.epoch))
        batches = self._batches[1]
        end = min(p.batch + t.accumulate, self._epoch_batches)
        found = [self.train.batch(batches.rows(number)) for number in range(p.batch, end)]
        return [{name: value.to(self.device) for name, value in batch.items()} for batch in found]

    def _begin_epoch(self) -> None:
        """What happens before the first batch of an epoch; a checkpoint between two epochs is before it."""
        p, s = self.progress, self.config.sampler
        self.encoder.carry({})
        if self.head.sampler_update == "epoch" and p.step:
            self.head._stale = True
        if s.refit_every and p.epoch and p.epoch % s.refit_every == 0:
            self._refit()
        self._event("epoch", epoch=p.epoch, step=p.step)

    def _refit(self) -> None:
        self._event("fit", sampler=self.config.sampler.name, step=self.progress.step)
        with torch.random.fork_rng(devices=[]):
            models.refit_tree(self.config, self.train, self.encoder, self.head)

    def _set_rates(self) -> float:
        factor = self.config.schedule.factor(self.progress.step, self.total_steps)
        for name, optimizer in self.optimizers.items():
            for group, rate in zip(optimizer.param_groups, self._rates[name], strict=True):
                group["lr"] = rate * factor
        return self.config.optimizer.lr * factor

    def _take_step(self) -> None:
        p, t, head = self.progress, self.config.training, self.head
        if p.batch == 0:
            self._begin_epoch()
        every = self.config.sampler.refit_steps
        if every and p.step and p.step % every == 0:  # a checkpoint of this step is before it
            self._refit()
        carried = self.encoder.carried()
        batches = self._next_batches()
        self._set_rates()
        counts = [_count_targets(batch["y"], "tokens" in batch) for batch in batches]
        total = max(1, sum(counts))
        fusion = head._fusion
        if fusion is not None:
            fusion.accumulate = len(batches)  # the last step of an epoch may have fewer
        key = self.keys.clone()
        key[1] = p.step
        loss_value, problem = 0.0, ""
        for number, batch in enumerate(batches):
            pair = (key if number == 0 else fold_in(key, number - 1)).to(self.device)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=t.precision == "bfloat16"):
                h, features = self.encoder.encode(batch)
            h = h.to(head.weight.dtype)
            value = math.nan
            if bool(h.detach().isfinite().all()):
                loss = head(
                    h,
                    batch["y"],
                    features=features,
                    index=models.index_of(batch) if head.loss == "augment_reduce" else None,
                    context=models.context_of(batch),
                    positives=self._known(batch),
                    key=pair,
                )
                value = float(loss.detach())
            if not math.isfinite(value):
                problem = self._keep_batch(batch, h, number, value)
                break
            (loss * (counts[number] / total)).backward()
            loss_value += value * (counts[number] / total)
        if not problem:
            problem = self._finish_step()
        if problem:
            self._drop_step(carried, problem)
        else:
            p.loss_sum += loss_value
            p.loss_count += 1
            p.skipped_in_a_row = 0
        p.step += 1
        p.batch += len(batches)
        if p.batch >= self._epoch_batches:
            p.epoch, p.batch = p.epoch + 1, 0
        if not problem:
            self._update_average()
        self._event(
            "progress",
            step=p.step,
            steps=self.total_steps,
            epoch=p.epoch if p.batch else p.epoch - 1,
            loss=None if problem else loss_value,
            stale=head._steps,
        )

    def _known(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor] | None:
        """Positives of each row besides its target, CSR, where the configuration asks for them."""
        if not self.config.head.mask_known:
            return None
        found = self.train.known(batch["index"].cpu())
        assert found is not None
        return found[0].to(self.device), found[1].to(self.device)

    def _finish_step(self) -> str:
        """Clips and updates; what is wrong with the gradient, if anything."""
        t, head = self.config.training, self.head
        if t.clip_norm:
            chosen = [p for p in self.encoder.parameters() if p is not head.weight]
            if not self.config.fused and t.clip_head:
                chosen += list(head.parameters())
            norm = float(optim.clip_grad_norm_(chosen, t.clip_norm))
            if not math.isfinite(norm):
                return f"the norm of the gradient is {norm}"
        # A table may change in rows that the last forward did not touch: by earlier batches of the step, or, where it
        # is tied, by the embedding. A sampler that follows the rows is told.
        follows = head.sampler_update is not None and (t.accumulate > 1 or self.config.model.tied)
        if follows and not self.config.fused and head.weight.grad is not None:
            if head.weight.grad.is_sparse:
                head._note_changed([head.weight.grad.coalesce().indices()[0]])
            else:
                head._stale = True
        for name, optimizer in self.optimizers.items():
            if name != "head" or not self.config.fused:
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return ""

    def _drop_step(self, carried: dict[str, Tensor], problem: str) -> None:
        """Nothing of the step stays: no gradient, no half-accumulated update, no state."""
        p, t = self.progress, self.config.training
        for optimizer in self.optimizers.values():
            optimizer.zero_grad(set_to_none=True)
        fusion = self.head._fusion
        if fusion is not None:
            fusion._arrived, fusion._kept, fusion._backwards = [], [], 0
        self.encoder.carry(carried)
        p.skipped += 1
        p.skipped_in_a_row += 1
        self._event("nan", step=p.step, message=problem, action=t.on_nan)
        advice = (
            f"Go on from the last checkpoint with Trainer.resume({str(self.run_dir)!r}, settings=...): a smaller "
            "optimizer.lr, training.clip_norm=1, or training.on_nan=skip"
        )
        if t.on_nan == "stop":
            raise NonFiniteLossError(f"trainer: step {p.step}: {problem}. {advice}")
        if p.skipped_in_a_row > t.max_skipped:
            raise NonFiniteLossError(
                f"trainer: step {p.step}: {problem}, after {t.max_skipped} steps in a row that were left out for the "
                f"same reason: the weights themselves are no longer good. {advice}"
            )

    def _keep_batch(self, batch: dict[str, Tensor], h: Tensor, number: int, value: float) -> str:
        p = self.progress
        folder = self.run_dir / "nan"
        name = f"step-{p.step:08d}"
        what = f"the loss is {value}" if bool(h.isfinite().all()) else "h, the output of the encoder, is not finite"
        try:
            folder.mkdir(exist_ok=True)
            checkpoint.write_tensors(folder / f"{name}.safetensors", {**batch, "h": h.detach()})
            about = {"step": p.step, "epoch": p.epoch, "batch": p.batch + number, "problem": what}
            about["key"] = [int(self.keys[0]), p.step]
            checkpoint.write_file(folder / f"{name}.json", json.dumps(about, indent=1))
        except OSError as error:
            return f"{what} (and the batch could not be saved: {error.strerror})"
        return f"{what}; the batch is in {folder / name}.safetensors"

    # ------------------------------------------------------------------------------------------ between steps
    def _log(self) -> None:
        p, t = self.progress, self.config.training
        if p.last_log == p.step or not (p.step % t.log_every == 0 or self._done()):
            return
        self._count_time()
        stale = self.head.staleness()
        record: dict[str, Any] = {
            "kind": "train",
            "step": p.step,
            "epoch": p.epoch,
            "loss": p.loss_sum / p.loss_count if p.loss_count else None,
            "lr": self.config.optimizer.lr * self.config.schedule.factor(p.step - 1, self.total_steps),
            "seconds": round(p.seconds, 3),
        }
        if self.head.sampler_update is not None:
            record["stale_steps"], record["stale_rows"] = stale.steps, stale.rows
        if p.skipped:
            record["skipped"] = p.skipped
        self._record(record)
        p.loss_sum, p.loss_count, p.last_log = 0.0, 0, p.step
        rate = self._rate()
        self._event("train", **record, steps_per_second=rate, eta=(self.total_steps - p.step) / rate if rate else None)

    def _rate(self) -> float:
        return self.progress.step / self.progress.seconds if self.progress.seconds > 0 else 0.0

    def _done(self) -> bool:
        return self.progress.step >= self.total_steps or self.progress.status == "early_stop"

    def _due(self, every: int) -> bool:
        p = self.progress
        return p.step > 0 and (p.step % every == 0 if every else p.batch == 0)

    def evaluate(self, dataset: Dataset | None = None) -> dict[str, float]:
        """Metrics on the validation data (or others), with the averaged weights where there is an average."""
        t = self.config.training
        dataset = self.valid if dataset is None else dataset
        if dataset is None:
            raise ValueError("Trainer.evaluate: dataset must be given where there are no validation data, got None")

        def on_batch(done: int, count: int) -> None:
            self._event("eval_progress", done=done, count=count)
            if self._signal:
                raise _InterruptedError

        with self._averaged(), torch.random.fork_rng(devices=[]):
            return evaluate(
                self.encoder,
                self.head,
                dataset,
                batch_size=t.eval_batch_size or self.batch_size,
                metrics=t.metrics,
                rows=t.eval_rows,
                exclude_history=t.exclude_history,
                propensities=self._propensities(),
                on_batch=on_batch,
            )

    def _propensities(self) -> Tensor | None:
        """Of the training data, where a metric asks for them."""
        if not any(name.startswith("psp") for name in self.config.training.metrics):
            return None
        from samplex_cuda.metrics import propensities

        return propensities(self.train.class_counts(), len(self.train))

    def _evaluate(self) -> None:
        p, t = self.progress, self.config.training
        if self.valid is None or p.last_eval == p.step or not (self._due(t.eval_every) or self._done()):
            return
        self._count_time()
        begin = time.perf_counter()
        self.metrics = self.evaluate()
        seconds = time.perf_counter() - begin
        self._watch = time.perf_counter()
        p.last_eval = p.step
        better = False
        if t.monitor in self.metrics:
            value = self.metrics[t.monitor]
            lower = t.monitor_mode == "min" or (t.monitor_mode == "auto" and t.monitor in _LOWER_IS_BETTER)
            gain = math.inf if p.best is None else (p.best - value if lower else value - p.best)
            better = math.isfinite(value) and gain > (0.0 if p.best is None else t.min_delta)
            p.bad = 0 if better else p.bad + 1
            if better:
                p.best, p.best_step = value, p.step
        record = {"kind": "eval", "step": p.step, "epoch": p.epoch, **self.metrics, "seconds": round(p.seconds, 3)}
        self._record(record)
        self._event("eval", **record, best=better, eval_seconds=seconds)
        if better and t.keep_best:
            self._save_best()
        if t.patience and p.bad >= t.patience:
            p.status = "early_stop"

    # ------------------------------------------------------------------------------------------ the run
    def fit(self) -> Result:
        """Trains to the end, to early stopping, or until SIGINT (Ctrl-C) or SIGTERM comes: then a checkpoint is saved.

        A second signal ends it at once. Signals are handled only where this is the main thread.
        """
        with self._locked(), self._signals(), self._generators():
            self._open_board()
            self._event(
                "start",
                step=self.progress.step,
                steps=self.total_steps,
                epochs=self.config.training.epochs,
                run_dir=str(self.run_dir),
                fused=self.config.fused,
            )
            try:
                return self._loop()
            finally:
                if self._board is not None:
                    self._board.close()
                    self._board = None

    def _loop(self) -> Result:
        p, t = self.progress, self.config.training
        if p.status != "running":
            return self._result(p.status)
        self.encoder.train()
        nn.Module.train(self.head, True)
        self._watch = time.perf_counter()
        fresh = True  # whether this step's checkpoint is what we started from
        while True:
            try:
                self._log()
                self._evaluate()
            except _InterruptedError:
                return self._interrupted()
            if self._done():
                break
            if not fresh and self._due(t.checkpoint_every):
                self.save()
            if self._signal:
                return self._interrupted()
            fresh = False
            self._take_step()
        if p.status == "running":
            p.status = "finished"
        self.save()
        return self._result(p.status)

    def _interrupted(self) -> Result:
        self.save()
        step = self.progress.step
        message = f"step {step} is saved; go on with samplex_cuda.training.Trainer.resume({str(self.run_dir)!r}).fit()"
        self._event("interrupted", step=step, signal=self._signal, message=message)
        result = self._result("interrupted", message)
        result.signal = self._signal
        return result

    def _result(self, status: str, message: str = "") -> Result:
        p = self.progress
        if self.config.training.plot:
            try:
                plot_curves(self.run_dir)
            except (ImportError, OSError) as error:
                self._event("warning", message=f"no learning curves: {error}")
        if status == "early_stop":
            message = (
                f"no better {self.config.training.monitor} in {p.bad} evaluations; the best was at step {p.best_step}"
            )
        self._event("end", status=status, step=p.step, metrics=self.metrics, best=p.best, best_step=p.best_step)
        return Result(status, p.step, dict(self.metrics), p.best, p.best_step, message)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        self._signal = 0
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def note(number: int, frame: FrameType | None) -> None:
            if self._signal:  # the second time: at once
                signal.signal(number, before[number])
                raise KeyboardInterrupt
            self._signal = number

        before: dict[int, Any] = {n: signal.signal(n, note) for n in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextlib.contextmanager
    def _generators(self) -> Iterator[None]:
        """torch's generators in the state of the run; those of the caller come back afterwards."""
        cuda = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=cuda):
            if self._rng is not None:
                torch.set_rng_state(self._rng["cpu"])
                if "cuda" in self._rng:
                    torch.cuda.set_rng_state(self._rng["cuda"], self.device)
                elif cuda:
                    torch.cuda.manual_seed(self.config.training.seed)
            try:
                yield
            finally:
                self._rng = {"cpu": torch.get_rng_state()}
                if cuda:
                    self._rng["cuda"] = torch.cuda.get_rng_state(self.device)

    def _open_board(self) -> None:
        if not self.config.training.tensorboard:
            return
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ImportError(
                "trainer: training.tensorboard needs tensorboard: pip install samplex-cuda[tensorboard]"
            ) from None
        self._board = SummaryWriter(self.run_dir / "tensorboard", purge_step=self.progress.step + 1)


def _count_targets(y: Tensor, tokens: bool) -> int:
    valid = y >= 0
    return int(valid.sum() if tokens or y.dim() == 1 else valid.any(-1).sum())
