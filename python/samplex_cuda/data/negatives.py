"""Negatives from a column of the data: items that were shown and not chosen, or that a search found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from samplex_cuda._checks import describe
from samplex_cuda.data.array_files import members, read_member
from samplex_cuda.data.base import PAD
from samplex_cuda.data.parquet import parquet_lists

__all__ = ["read_negatives"]


def read_negatives(path: Path | str, column: str, *, log_q: bool = False) -> Any:
    """The negatives of each row, or their log-probabilities, as `Dataset.set_negatives` takes them.

    Args:
        path: the data: a parquet file or folder, an npz file, or anything else.
        column: of a parquet file, a column of whole numbers or of lists of them; of an npz file, an array; otherwise
            the name of an npy file, [N] or [N, m] padded with -100.
        log_q: the column holds floating-point numbers, the log-probability of each negative, in the same layout.

    Example:
        >>> import tempfile, numpy as np
        >>> from pathlib import Path
        >>> from samplex_cuda.data import read_negatives
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = Path(folder) / "skipped.npy"
        ...     np.save(file, [[3, 4], [5, -100]])
        ...     read_negatives("train.svm", str(file)).tolist()
        [[3, 4], [5, -100]]
    """
    given, where = Path(path), "read_negatives"
    if not column.endswith(".npy"):
        if given.suffix == ".npz" and given.is_file():
            found = read_member(where, given, column)
            return _whole(where, f"{given}: {column}", found, log_q)
        if given.suffix == ".parquet" or (given.is_dir() and any(given.glob("*.parquet"))):
            return parquet_lists(where, given, column, whole=not log_q)
        names = f", one of {', '.join(members(where, given))}" if given.suffix == ".npz" and given.is_file() else ""
        raise ValueError(
            f"{where}: negatives must be a column of a parquet or npz file, or the name of an npy file with a row for "
            f"each example of {path}, got {column!r}{names}"
        )
    file = Path(column)
    if not file.is_file():
        raise FileNotFoundError(f"{where}: {file}: there is no such file")
    try:
        table = np.load(file, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{where}: {file}: it is not an npy array ({error})") from error
    return _whole(where, str(file), table, log_q)


def _whole(where: str, what: str, table: np.ndarray, log_q: bool) -> np.ndarray:
    if table.ndim not in (1, 2) or table.dtype.kind not in ("f" if log_q else "iu"):
        kind = "floating point" if log_q else "whole numbers"
        raise ValueError(f"{where}: {what} must be {kind} [N] or [N, m], padded with {PAD}, got {describe(table)}")
    return table
