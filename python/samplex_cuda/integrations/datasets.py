"""Hugging Face `datasets` as data of the trainer: vectors, tokens, and interactions of users.

Vectors are read from the Arrow files when a batch asks for them; tokens and interactions are read once.
"""

from __future__ import annotations

from typing import Any

import datasets
import numpy as np
import torch
from torch import Tensor

from samplex_cuda.data import PAD, Dataset, Interactions, Tokens

__all__ = ["Columns", "interactions", "token_stream"]

_ROWS = 4096  # rows that are read at a time


def _check_source(where: str, source: Any, columns: dict[str, str | None]) -> None:
    """Whether a source is a data set with random access, has rows and has the columns."""
    if not isinstance(source, datasets.Dataset):
        raise TypeError(f"{where}: source must be a datasets.Dataset, got {type(source).__name__}")
    for name, column in columns.items():
        if column is not None and column not in source.column_names:
            raise ValueError(f"{where}: {name} must be one of {', '.join(source.column_names)}, got {column!r}")
    if len(source) == 0:
        raise ValueError(f"{where}: source must have at least one row, got 0")


def _read(where: str, source: datasets.Dataset, column: str) -> tuple[np.ndarray, np.ndarray]:
    """A column of integers or of lists of integers, one after the other: (offsets [N + 1], values [n])."""
    parts, lengths = [np.zeros(0, dtype=np.int64)], []
    for found in source.select_columns([column]).with_format("numpy").iter(_ROWS):
        for row in found[column]:
            row = np.atleast_1d(np.asarray(row))
            if row.ndim != 1 or (row.size and row.dtype.kind not in "iu"):
                raise ValueError(
                    f"{where}: column {column} must hold integers or lists of integers, got {row.dtype} "
                    f"{list(row.shape)}"
                )
            lengths.append(row.size)
            parts.append(row.astype(np.int64))
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64), np.concatenate(parts)


def token_stream(
    source: datasets.Dataset,
    vocabulary_size: int,
    column: str = "input_ids",
    *,
    window: int = 35,
    columns: int = 20,
    end: int | None = None,
) -> Tokens:
    """A column of token ids as one stream for a language model of `sx.training.Trainer`; it is held in memory.

    Args:
        source: with random access; its rows follow each other.
        vocabulary_size: C, e.g. `len(tokenizer)`.
        column: lists of integers, as a tokenizer makes them; without padding.
        window: T of `sx.data.Tokens`.
        columns: of `sx.data.Tokens`.
        end: a token that is put behind every row.

    Example:
        >>> import datasets, samplex_cuda as sx
        >>> source = datasets.Dataset.from_dict({"input_ids": [[3, 1], [2, 2, 1]]})
        >>> stream = sx.integrations.datasets.token_stream(source, 5, window=2, columns=1, end=0)
        >>> stream.tokens.tolist()
        [3, 1, 0, 2, 2, 1, 0]
    """
    _check_source("token_stream", source, {"column": column})
    offsets, tokens = _read("token_stream", source, column)
    if end is not None:
        tokens = np.insert(tokens, offsets[1:], end)
    narrow = tokens.astype(np.int32) if vocabulary_size < 1 << 31 and tokens.max(initial=0) < 1 << 31 else tokens
    return Tokens(narrow, vocabulary_size, window, columns)


def interactions(
    source: datasets.Dataset, user: str = "user", item: str = "item", *, num_items: int | None = None, **options: Any
) -> Interactions:
    """Two columns, users and items, as data of `sx.training.Trainer`; they are held in memory.

    Args:
        source: a row per interaction. Those of a user are in the order of the rows: sort them by time before.
        user: numbers or names.
        item: ids in [0, num_items).
        num_items: C; by default the largest item and one.
        options: of `sx.data.Interactions`, e.g. `history`.

    Example:
        >>> import datasets, torch, samplex_cuda as sx
        >>> source = datasets.Dataset.from_dict({"user": ["a", "b", "a"], "item": [4, 1, 2]})
        >>> made = sx.integrations.datasets.interactions(source, history=1)
        >>> made.batch(torch.arange(len(made)))["history"].tolist(), made.num_users
        ([[4]], 2)
    """
    _check_source("interactions", source, {"user": user, "item": item})
    offsets, items = _read("interactions", source, item)
    if len(items) != len(source) or bool((np.diff(offsets) != 1).any()):
        raise ValueError(f"interactions: item must be a column of integers, got lists in {item!r}")
    names, users = np.unique(np.asarray(source[user][:]), return_inverse=True)
    order = np.argsort(users.reshape(-1), kind="stable")
    indptr = np.concatenate([[0], np.cumsum(np.bincount(users.reshape(-1), minlength=len(names)))])
    return Interactions(indptr, items[order], num_items or 1 + int(items.max()), **options)


class Columns(Dataset):
    """A column of vectors and a column of labels of a `datasets.Dataset`, for `sx.training.Trainer`.

    Args:
        source: with random access: not an `IterableDataset`.
        x: column of vectors of one width.
        y: column of labels: integers, or lists of integers (several per example).
        num_classes: C; by default the number of names of a `ClassLabel`, otherwise the largest label and one.
        negatives: column of integers or of lists of them: classes that are negatives of each row, as for
            `Dataset.set_negatives`; read once.
        negatives_log_q: column with the log-probability of each of them; None: uncorrected.

    Example:
        >>> import torch, datasets, samplex_cuda as sx
        >>> source = datasets.Dataset.from_dict({"x": [[1.0, 2.0], [3.0, 4.0]], "label": [1, 0]})
        >>> data = sx.integrations.datasets.Columns(source)
        >>> data.batch(torch.tensor([1]))
        {'index': tensor([1]), 'y': tensor([0]), 'x': tensor([[3., 4.]])}
    """

    kind = "dense"

    def __init__(
        self,
        source: datasets.Dataset,
        x: str = "x",
        y: str = "label",
        *,
        num_classes: int | None = None,
        negatives: str | None = None,
        negatives_log_q: str | None = None,
    ) -> None:
        super().__init__()
        given = {"x": x, "y": y, "negatives": negatives, "negatives_log_q": negatives_log_q}
        _check_source("Columns", source, given)
        if negatives is None and negatives_log_q is not None:
            raise ValueError(f"Columns: negatives_log_q must be None without negatives, got {negatives_log_q!r}")
        self.source, self.x, self.y = source.select_columns([x, y]).with_format("numpy"), x, y
        first = self.source[:1]
        width = np.asarray(first[x][0]).shape
        if len(width) != 1 or np.asarray(first[x][0]).dtype.kind not in "fiu":
            raise ValueError(f"Columns: x must be a column of vectors, got values of shape {list(width)}")
        self.num_features = width[0]
        self.multi_label = np.ndim(first[y][0]) > 0
        names = getattr(source.features[y], "names", None)
        self.num_classes = num_classes or (len(names) if names else 1 + self._largest())
        if negatives is not None:
            log_q = None
            if negatives_log_q is not None:
                rows = [np.atleast_1d(np.asarray(row, dtype=np.float32)) for row in source[negatives_log_q]]
                ends = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
                log_q = (ends, np.concatenate(rows))
            self.set_negatives(_read("Columns", source, negatives), log_q)

    def _largest(self) -> int:
        return max(
            int(self.targets(torch.arange(b, min(b + _ROWS, len(self)))).max()) for b in range(0, len(self), _ROWS)
        )

    def __len__(self) -> int:
        """Number of examples."""
        return len(self.source)

    def _labels(self, values: Any) -> Tensor:
        if not self.multi_label:
            return torch.from_numpy(np.asarray(values, dtype=np.int64))
        rows = [np.asarray(row, dtype=np.int64) for row in values]
        table = np.full((len(rows), max((len(r) for r in rows), default=0) or 1), PAD, dtype=np.int64)
        for place, row in enumerate(rows):
            table[place, : len(row)] = row
        return torch.from_numpy(table)

    def targets(self, rows: Tensor) -> Tensor:
        """Labels int64 [B], or [B, P] padded with -100."""
        return self._labels(self.source.select_columns([self.y])[self._rows(rows)][self.y])

    def batch(self, rows: Tensor) -> dict[str, Tensor]:
        """Vectors "x" fp32 [B, d], labels "y" and "index" of the given rows."""
        found = self.source[self._rows(rows)]
        x = np.stack([np.asarray(v, dtype=np.float32) for v in found[self.x]]) if len(rows) else np.zeros((0,))
        x = x.reshape(len(rows), self.num_features).astype(np.float32)
        return {"index": rows, "y": self._labels(found[self.y]), "x": torch.from_numpy(x)}

    def _parts(self) -> dict[str, Any]:
        return {"source": self.source._fingerprint, "x": self.x, "y": self.y}
