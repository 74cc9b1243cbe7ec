"""What a checkpoint of a run holds, and the way back: model, optimizers, progress, what data and machine were."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from samplex_cuda._checks import check_int
from samplex_cuda.data import Dataset
from samplex_cuda.heads import SampledClassifier
from samplex_cuda.samplers.kernel_base import KernelSampler
from samplex_cuda.training import checkpoint, models
from samplex_cuda.training import config as configs
from samplex_cuda.training.checkpoint import CheckpointError
from samplex_cuda.training.config import Config, ConfigError
from samplex_cuda.training.config.checks import MODELS
from samplex_cuda.training.config.tables import Training
from samplex_cuda.training.run_folder import RunError, check_links

__all__ = [
    "Described",
    "Progress",
    "about",
    "check_meta",
    "environment",
    "is_sharded",
    "load_model",
    "load_state",
    "put_model",
    "put_optimizers",
    "read_meta",
    "take_model",
    "take_optimizers",
    "upgrade",
]


# What modules, optimizers and samplers raise for state that is not theirs.
UNFIT = (RuntimeError, KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError)

_LOWER_IS_BETTER = ("nll", "perplexity", "loss")


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

    def judge(self, metrics: dict[str, float], training: Training) -> bool:
        """Whether these metrics are the best so far; counts the evaluations that were not.

        Args:
            metrics: of an evaluation at `step`.
            training: what is monitored, and which way.

        Example:
            >>> from samplex_cuda.training import Config, Progress
            >>> progress = Progress()
            >>> [progress.judge({"nll": nll}, Config().training) for nll in (3.0, 2.0, 2.5)], progress.bad
            ([True, True, False], 1)
        """
        if training.monitor not in metrics:
            return False
        value, best = metrics[training.monitor], self.best
        lower = training.monitor_mode == "min"
        if training.monitor_mode == "auto":
            lower = training.monitor in _LOWER_IS_BETTER
        gain = math.inf if best is None else (best - value if lower else value - best)
        better = math.isfinite(value) and gain > (0.0 if best is None else training.min_delta)
        self.bad = 0 if better else self.bad + 1
        if better:
            self.best, self.best_step = value, self.step
        return better


class Described(Dataset):
    """What a checkpoint says of the training data: sizes without examples."""

    def __init__(self, about: dict[str, Any]) -> None:
        super().__init__()
        if about["kind"] not in ("dense", "sparse", "text", "interactions"):
            raise ValueError(f"meta.json: data.kind must be that of a data set, got {about['kind']!r}")
        self.kind = about["kind"]
        self._length = check_int("meta.json", "data.length", about["length"], 0)
        self.num_classes = check_int("meta.json", "data.num_classes", about["num_classes"], 1)
        self.num_features = check_int("meta.json", "data.num_features", about["num_features"], 0)
        self.ordered, self.multi_label = bool(about["ordered"]), bool(about["multi_label"])
        for name in ("window", "columns", "history", "index_base"):
            if about.get(name) is not None:
                setattr(
                    self, name, check_int("meta.json", f"data.{name}", about[name], 0 if name == "index_base" else 1)
                )

    def __len__(self) -> int:
        """Number of examples that there were."""
        return self._length


def about(dataset: Dataset) -> dict[str, Any]:
    """Kind, sizes and fingerprint of a data set: what `Described` is made from."""
    found: dict[str, Any] = {"length": len(dataset), "fingerprint": dataset.fingerprint()}
    for name in ("kind", "num_classes", "num_features", "ordered", "multi_label"):
        found[name] = getattr(dataset, name)
    for name in ("window", "columns", "history", "index_base"):
        value = getattr(dataset, name, None)
        found[name] = value if isinstance(value, int) else None
    return found


def environment(device: torch.device) -> dict[str, Any]:
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


def check_meta(
    path: Path, meta: dict[str, Any], config: Config, train: Dataset, device: torch.device, grow: bool = False
) -> str:
    """Rejects a checkpoint that a run with this configuration and data cannot continue from; `grow`: allows other data.

    Returns what is another now of that which the last bits depend on; empty: nothing.
    """
    read_meta(path, meta)
    wanted = meta["data"].get("fingerprint")
    parts = [meta.get("environment"), meta.get("optimizers"), meta["config"].get("optimizer"), meta.get("metrics")]
    tables = [part for part in parts if isinstance(part, dict)]
    if len(tables) < len(parts) or not isinstance(wanted, str) or not {"name", "encoder"} <= set(tables[2]):
        raise _not_a_run(path)
    old, optimizers, used, _ = tables
    where = f"trainer: {path.parent.parent}"
    got = train.fingerprint()
    if got != wanted and not grow:
        raise RunError(
            f"{where}: the training data must be those of the run (fingerprint {wanted[:12]}), got others "
            f"({got[:12]}); for data with more examples or classes but the same ids, pass --grow (in Python grow=True)"
        )
    for key, owner in (("name", "head"), ("encoder", "encoder")):
        asked = getattr(config.optimizer, key)
        if owner in optimizers and used[key] != asked:
            raise RunError(
                f"{where}: optimizer.{key} must be that of the run, {used[key]}, whose state is in {path.name}, got "
                f"{asked}; a different one requires a new run"
            )
    now = environment(device)
    return ", ".join(f"{name} {old.get(name)} is {now[name]} now" for name in now if old.get(name) != now[name])


def put_model(tensors: dict[str, Tensor], encoder: nn.Module, head: SampledClassifier) -> None:
    """The parameters and buffers of a model, by name, as they are: nothing is brought up to date, nothing copied."""
    tied = {name for name, p in encoder.named_parameters() if p is head.weight}
    tensors.update({f"head.{name}": t for name, t in head.state_dict().items()})
    tensors.update({f"encoder.{name}": t for name, t in encoder.state_dict().items() if name not in tied})


def take_model(tensors: dict[str, Tensor], encoder: nn.Module, head: SampledClassifier) -> None:
    """Puts back what `put_model` gave."""

    def part(prefix: str) -> dict[str, Tensor]:
        return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}

    of_head = part("head.")
    for path, module in head.named_modules():
        if isinstance(module, KernelSampler):
            module.complete(of_head, f"{path}.")
    head.load_state_dict(of_head)
    tied = {name: head.weight for name, p in encoder.named_parameters() if p is head.weight}
    encoder.load_state_dict({**part("encoder."), **tied})


def upgrade(tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
    """Converts an older checkpoint: how far the sampler lags behind the class table is part of the head's state now."""
    before = meta.get("sampler")
    if before is None:
        return
    touched = tensors.pop("sampler.touched", torch.empty(0, dtype=torch.int64))
    if before["steps"] or before["stale"] or touched.numel():
        tensors["head.sampler_lag"] = torch.cat([torch.tensor([before["steps"], int(before["stale"])]), touched.cpu()])


def put_optimizers(tensors: dict[str, Tensor], optimizers: dict[str, torch.optim.Optimizer]) -> dict[str, Any]:
    """The state of optimizers: its tensors by name, the rest as what JSON can hold."""
    numbers: dict[str, Any] = {}
    for which, optimizer in optimizers.items():
        state = optimizer.state_dict()
        kept: dict[str, Any] = {}
        for index, values in state["state"].items():
            for name, value in values.items():
                if isinstance(value, Tensor):
                    tensors[f"optimizer.{which}.{index}.{name}"] = value
                else:
                    kept.setdefault(str(index), {})[name] = value
        numbers[which] = {"state": kept, "key": state.get("key")}
    return numbers


def take_optimizers(
    tensors: dict[str, Tensor], numbers: dict[str, Any], optimizers: dict[str, torch.optim.Optimizer]
) -> None:
    """Puts back what `put_optimizers` gave; the settings of the optimizers, such as rates, stay unchanged."""
    for which, optimizer in optimizers.items():
        rest = numbers.get(which, {"state": {}, "key": None})
        state: dict[int, dict[str, Any]] = {int(i): dict(v) for i, v in rest["state"].items()}
        prefix = f"optimizer.{which}."
        for name, t in tensors.items():
            if name.startswith(prefix):
                index, _, what = name.removeprefix(prefix).partition(".")
                state.setdefault(int(index), {})[what] = t
        given: dict[str, Any] = {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}
        if rest["key"] is not None:
            given["key"] = rest["key"]
        optimizer.load_state_dict(given)


def is_sharded(path: Path) -> bool:
    """Whether a checkpoint was written by several ranks, or by one of them (`training.shard`)."""
    return not (path / checkpoint.TENSORS).exists()


def load_state(path: Path, prefixes: tuple[str, ...] = ("",)) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and meta of a checkpoint that is whole, under the names of a run of one process.

    Args:
        path: of the checkpoint.
        prefixes: of a checkpoint of ranks, names that are read begin with one of these.
    """
    if not is_sharded(path):
        return checkpoint.load(path, check=False)
    from samplex_cuda.distributed import CheckpointError as ShardsError
    from samplex_cuda.distributed import read_checkpoint

    try:
        stored, manifest = read_checkpoint(path, prefixes)
    except ShardsError as error:
        raise CheckpointError(f"checkpoint: {path}: {error}") from None
    tensors = {}
    for name, t in stored.items():
        kind, _, rest = name.partition(".")
        tensors[f"optimizer.{rest}" if kind == "optimizers" else rest] = t
    unseen = tensors.pop("head.sampler_unseen", None)
    if (
        unseen is not None
    ):  # of ranks, a mark for each class row that the sampler has not seen; of one process their ids
        tensors["head.sampler_lag"] = torch.cat([tensors["head.sampler_lag"][:2], unseen.nonzero().squeeze(1)])
    numbers: dict[str, Any] = {}
    for which, told in manifest["optimizers"].items():
        state: dict[str, Any] = {}
        for name, value in told["numbers"].items():
            index, _, what = name.partition(".")
            state.setdefault(index, {})[what] = value
        numbers[which] = {"state": state, "key": told["key"]}
    return tensors, manifest["extra"] | {"optimizers": numbers}


def read_meta(path: Path, meta: Any) -> tuple[Config, Described]:
    """Configuration and sizes of the data of a checkpoint; CheckpointError where its meta.json lacks a part."""
    if not isinstance(meta, dict) or any(not isinstance(meta.get(part), dict) for part in ("config", "data")):
        raise _not_a_run(path)
    progress = meta.get("progress")
    if not isinstance(progress, dict) or not _is_progress(progress):
        raise _not_a_run(path)
    try:
        return configs.files.stored(meta["config"], str(path)), Described(meta["data"])
    except ConfigError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise _not_a_run(path) from error


def _not_a_run(path: Path) -> CheckpointError:
    return CheckpointError(f"checkpoint: {path}: meta.json is not that of a training run")


def _is_progress(found: dict[str, Any]) -> bool:
    """Whether the fields of a `Progress` have values of their types; none may be missing or too many."""
    for field in dataclasses.fields(Progress):
        value = found.get(field.name, field.default)
        kinds = {"int": int, "str": str, "float": int | float, "float | None": int | float | None}[str(field.type)]
        if isinstance(value, bool) or not isinstance(value, kinds):
            return False
        if isinstance(value, int | float) and field.name != "best" and not value >= 0 and field.name != "loss_sum":
            return False
    return set(found) <= {field.name for field in dataclasses.fields(Progress)}


def _check_model(run_dir: Path, config: Config, trust_model: str | None) -> None:
    """A model by import path must be trusted, and be the one that the reader of `config.toml` sees."""
    models.check_trusted(config.model.name, trust_model)
    if config.model.name in MODELS:
        return
    path = run_dir / "config.toml"
    told = configs.load(path, of_run=True).model
    if (told.name, told.options) != (config.model.name, config.model.options):
        raise RunError(
            f"load_model: {run_dir}: the model of the checkpoint must be that of {path.name}, {told.name!r} with "
            f"options {told.options}, got {config.model.name!r} with {config.model.options}; nothing was imported"
        )


def load_model(
    run_dir: str | Path,
    which: str = "best",
    *,
    device: str | torch.device = "cpu",
    trust_model: str | None = None,
) -> tuple[models.Encoder, SampledClassifier, Config, dict[str, Any]]:
    """The model of a run, ready for evaluation; no data are needed.

    Args:
        run_dir: of the run.
        which: "best" (by the monitored metric; the averaged weights where there is an average), or "latest". Where
            there is no best one, the latest is taken.
        device: where to put it.
        trust_model: `model.name` of `config.toml`, where that is an import path: its module is imported and its class
            called, so name only code that you know (docs/security.md). A run with a built-in model runs no code of
            its folder.

    Returns:
        (encoder, head, config, meta), both modules in eval mode. `meta["data"]` says what data it was trained on.

    Example:
        >>> from samplex_cuda.training import load_model
        >>> encoder, head, config, meta = load_model("runs/mine")  # doctest: +SKIP
    """
    run_dir = Path(run_dir)
    if which not in ("best", "latest"):
        raise ValueError(f"load_model: which must be 'best' or 'latest', got {which!r}")
    check_links(run_dir)
    found = checkpoint.latest(run_dir / "best") if which == "best" else None
    found = found or checkpoint.latest(run_dir)
    if found is None:
        raise RunError(f"load_model: {run_dir}: has no checkpoint")
    tensors, meta = load_state(found, ("modules.", "tensors.average."))
    config, described = read_meta(found, meta)
    _check_model(run_dir, config, trust_model)
    config.training.device = str(device)
    try:
        upgrade(tensors, meta)
        encoder, head = models.build(config, described, fit=False, trust_model=trust_model)
        take_model(tensors, encoder, head)
        for name, average in tensors.items():
            if name.startswith("average."):
                owner, _, rest = name.removeprefix("average.").partition(".")
                with torch.no_grad():
                    (encoder if owner == "encoder" else head).get_parameter(rest).copy_(average)
    except ConfigError:
        raise
    except UNFIT as error:
        raise CheckpointError(f"checkpoint: {found}: does not fit its own configuration: {error}") from error
    return encoder.eval(), head.eval(), config, meta
