"""The data of a configuration."""

from __future__ import annotations

from samplex_cuda import data
from samplex_cuda.data import Dataset
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
            f"config: [data] valid_fraction must leave examples on both sides of {len(train)}, got {d.valid_fraction}"
        )
    return first, second
