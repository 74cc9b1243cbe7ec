"""The data of a configuration."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from samplex_cuda import data
from samplex_cuda.data import Dataset
from samplex_cuda.data.opening import _READERS, guess_format
from samplex_cuda.training.config import Config, ConfigError

__all__ = ["open_data"]


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
    train = _open(d.path, d.format, d.options, config, None)
    if d.valid:
        return train, _open(d.valid, d.format, d.options, config, train)
    if not d.valid_fraction:
        return train, None
    first, second = data.split(train, (1.0 - d.valid_fraction, d.valid_fraction), seed=d.seed)
    if not len(first) or not len(second):
        raise ConfigError(
            f"config: [data] valid_fraction must leave examples on both sides of {len(train)}, got {d.valid_fraction}"
        )
    return first, second


def _open(path: str, form: str, options: dict[str, Any], config: Config, train: Dataset | None) -> Dataset:
    options = dict(options)
    name = form or None
    if not (form == "builtin" or path == "builtin" or path.startswith("builtin:")):
        name = name or guess_format(Path(path))
        reader = _READERS.get(name)
        known = inspect.signature(reader).parameters if reader is not None else {}
        if "columns" in known:
            options.setdefault("columns", config.training.batch_size)
        if train is not None:
            given: dict[str, Any] = {"num_classes": train.num_classes, "num_features": train.num_features}
            if train.kind == "text":
                given = {"vocabulary": train}
            elif train.kind == "interactions":
                given = {"known": train}
            options.update({key: value for key, value in given.items() if key in known})
            base = getattr(train, "index_base", None)
            if "index_base" in known and base is not None and options.get("index_base") is None:
                options["index_base"] = base  # features count as in training, whichever of them this file has
    return data.open(path, format=name, **options)
