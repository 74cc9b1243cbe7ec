"""The data of a configuration, and whether the two fit each other."""

from __future__ import annotations

from pathlib import Path

import torch

from samplex_cuda import data
from samplex_cuda.data import Dataset
from samplex_cuda.training.config import Config, ConfigError
from samplex_cuda.training.config.tables import Training
from samplex_cuda.training.evaluation import check_metrics

__all__ = ["check_fit", "check_monitor", "from_anywhere", "open_data"]


def open_data(config: Config) -> tuple[Dataset, Dataset | None]:
    """Training and validation data of `config.data`; the latter None with `valid_fraction = 0` and no `valid`.

    A validation file is read with the options of the training file, and with its vocabulary (text), its histories
    (interactions) and its number of classes. Text gets `training.batch_size` columns.

    Example:
        >>> from samplex_cuda.training import Config, config, open_data
        >>> run = config.override(Config(), ["data.path=builtin:classes=50,dim=4,examples=200"])
        >>> [len(part) for part in open_data(run)]
        [180, 20]
    """
    d = config.data
    if not d.path:
        raise ConfigError("config: [data] path must be a file, a folder or builtin:..., got nothing")
    form, columns = d.format or None, config.training.batch_size
    train = data.open_like(d.path, format=form, default_columns=columns, **d.options)
    if d.negatives:
        log_q = data.read_negatives(d.path, d.negatives_log_q, log_q=True) if d.negatives_log_q else None
        train.set_negatives(data.read_negatives(d.path, d.negatives), log_q)
    if d.valid:
        return train, data.open_like(d.valid, train, format=form, default_columns=columns, **d.options)
    if not d.valid_fraction:
        return train, None
    first, second = data.split(train, (1.0 - d.valid_fraction, d.valid_fraction), seed=d.seed)
    if not len(first) or not len(second):
        raise ConfigError(
            f"config: [data] valid_fraction must leave examples for training and validation, got {d.valid_fraction} of "
            f"{len(train)}"
        )
    return first, second


def check_monitor(training: Training) -> None:
    """ConfigError for a metric that there is not, or a monitored one that is not computed."""
    if training.monitor not in training.metrics and (training.patience or training.monitor != "nll"):
        raise ConfigError(
            f"config: [training] monitor must be one of metrics {training.metrics}, got {training.monitor!r}"
        )
    try:
        check_metrics("config: [training] metrics", training.metrics)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def from_anywhere(config: Config) -> None:
    """Makes the data paths absolute: the run folder must be good from any working directory."""
    for name in ("path", "valid", "negatives", "negatives_log_q"):
        path = getattr(config.data, name)
        file = not name.startswith("negatives") or path.endswith(".npy")  # else a column
        if path and file and Path(path).exists():
            setattr(config.data, name, str(Path(path).absolute()))


def check_fit(config: Config, train: Dataset, valid: Dataset | None) -> None:
    """ConfigError where configuration, training and validation data do not fit; makes the sampler's path absolute."""
    if config.sampler.path and Path(config.sampler.path).exists():
        config.sampler.path = str(Path(config.sampler.path).absolute())
    if config.head.mask_known and train.known(torch.empty(0, dtype=torch.int64)) is None:
        raise ConfigError(
            f"config: [head] mask_known must be false for these {train.kind} data: no example has positives "
            "besides its targets; got true"
        )
    if config.data.negatives and train.negatives(torch.empty(0, dtype=torch.int64)) is None:
        raise ConfigError(
            "config: [data] negatives must be empty for data without a column of negatives (call set_negatives on "
            f"a data set that was not opened by the trainer), got {config.data.negatives!r}"
        )
    if valid is not None:
        _check_valid(train, valid)


def _check_valid(train: Dataset, valid: Dataset) -> None:
    """ConfigError if a model of `train` cannot be measured on `valid`: known before the first step, not after an epoch.

    Labels are read only if `valid` claims more classes than `train` has.
    """
    if valid.kind != train.kind:
        raise ConfigError(f"config: [data] valid must be {train.kind} data like the training data, got {valid.kind}")
    wide = valid.num_features > train.num_features
    if (wide and train.kind == "sparse") or (train.kind == "dense" and valid.num_features != train.num_features):
        raise ConfigError(
            f"config: [data] valid must have {train.num_features} features like the training data, got "
            f"{valid.num_features}"
        )
    if valid.num_classes > train.num_classes:
        beyond = valid.class_counts()[train.num_classes :].nonzero()
        if len(beyond):
            raise ConfigError(
                f"config: [data] valid must have labels in [0, {train.num_classes}) like the training data, got "
                f"{train.num_classes + int(beyond[0])}; if the training data lack its last classes, give the number of "
                "classes to its reader (data.options.num_classes)"
            )
