"""Data sets over arrays, in memory or memory-mapped: dense rows, sparse rows, text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from samplex_cuda._checks import check_int, describe
from samplex_cuda.data.base import (
    PAD,
    Array,
    Dataset,
    _as_array,
    _check_indptr,
    _classes,
    _gather,
    _labels_of,
    _long,
)

__all__ = ["Dense", "Sparse", "Tokens"]


class _Labelled(Dataset):
    """Rows with labels; `label_rule` says which of them count."""

    def _take_labels(self, name: str, argument: str, y: Any, rows: int, num_classes: int | None, rule: str) -> None:
        self._labels = _labels_of(name, argument, y, rows, rule)
        self.multi_label = self._labels.several
        self.num_classes = _classes(name, self._labels, num_classes)

    def __len__(self) -> int:
        """Number of rows, without the ones that the rule drops."""
        return self._labels.rows

    def targets(self, rows: Tensor) -> Tensor:
        """See `Dataset.targets`."""
        return _long(self._labels.get(self._labels.stored(self._rows(rows))))

    def _stored_rows(self, rows: Array) -> Array:
        return self._labels.stored(rows)

    def _stored_count(self) -> int:
        labels = self._labels
        return len(labels.table) if labels.table is not None else len(labels.indptr) - 1  # type: ignore[arg-type]

    def known(self, rows: Tensor) -> tuple[Tensor, Tensor] | None:
        """See `Dataset.known`."""
        return self._labels.others(self._labels.stored(self._rows(rows)))


class Dense(_Labelled):
    """Rows of numbers with one or several labels each.

    Batches hold "x" float32 [B, K] and "y".

    Args:
        x: [N, K], numpy (a memmap is read row by row) or torch, any real dtype.
        y: integers [N], or [N, P] padded with -100; or a CSR pair (offsets [N + 1], ids).
        num_classes: C; by default the largest label + 1.
        label_rule: what to take of several labels. "all": all of them; "first": the first of the row; "smallest": the
            smallest id. The last two drop rows without a label.

    Example:
        >>> import numpy as np, torch
        >>> from samplex_cuda import data
        >>> set_ = data.Dense(np.ones((3, 2)), np.array([[4, 1], [3, -100], [-100, -100]]))
        >>> set_.num_classes, set_.batch(torch.arange(3))["y"].tolist()
        (5, [[4, 1], [3, -100], [-100, -100]])
        >>> first = data.Dense(np.ones((3, 2)), np.array([[4, 1], [3, -100], [-100, -100]]), label_rule="first")
        >>> len(first), first.batch(torch.arange(2))["y"].tolist()
        (2, [4, 3])
    """

    kind = "dense"

    def __init__(self, x: Any, y: Any, num_classes: int | None = None, *, label_rule: str = "all") -> None:
        super().__init__()
        self.x = _as_array("Dense", "x", x, (2,), "fiub")
        self.num_features = int(self.x.shape[1])
        self._take_labels("Dense", "y", y, len(self.x), num_classes, label_rule)

    def batch(self, rows: Tensor) -> dict[str, Tensor]:
        """See `Dataset.batch`."""
        stored = self._labels.stored(self._rows(rows))
        x = np.ascontiguousarray(self.x[stored], dtype=np.float32)
        return {"index": rows, "y": _long(self._labels.get(stored)), "x": torch.from_numpy(x)}

    def _parts(self) -> dict[str, Any]:
        return {"x": self.x, **self._labels.parts()}


class Sparse(_Labelled):
    """Sparse rows (CSR) with any number of labels each: bags of words, tags.

    Batches hold "ids" int64 [nnz], "offsets" int64 [B + 1] (with the end: `include_last_offset=True` of
    `nn.EmbeddingBag`), "values" float32 [nnz], and "y": [B] where every row has one label, else [B, P].

    Args:
        indptr: [N + 1], where the entries of each row begin.
        indices: [nnz], features.
        values: [nnz]; None: all 1.
        label_indptr: [N + 1], where the labels of each row begin; None: labels is a table.
        labels: class ids; without label_indptr [N], or [N, P] padded with -100.
        num_features: width of a row.
        num_classes: C; None: the largest label + 1.
        label_rule: as in `Dense`.

    Example:
        >>> import numpy as np, torch
        >>> from samplex_cuda import data
        >>> set_ = data.Sparse(np.array([0, 2, 3]), np.array([0, 4, 1]), np.ones(3), np.array([0, 2, 3]),
        ...                    np.array([7, 5, 6]), num_features=5, num_classes=8)
        >>> batch = set_.batch(torch.tensor([1, 0]))
        >>> batch["ids"].tolist(), batch["offsets"].tolist(), batch["y"].tolist()
        ([1, 0, 4], [0, 1, 3], [[6, -100], [7, 5]])
    """

    kind = "sparse"
    index_base: int | None = None  # what the file that it was read from calls the first feature, where that varies

    def __init__(
        self,
        indptr: Any,
        indices: Any,
        values: Any,
        label_indptr: Any,
        labels: Any,
        num_features: int,
        num_classes: int | None = None,
        *,
        label_rule: str = "all",
    ) -> None:
        super().__init__()
        self.indptr = _as_array("Sparse", "indptr", indptr, (1,), "iu")
        self.indices = _as_array("Sparse", "indices", indices, (1,), "iu")
        self.values = None if values is None else _as_array("Sparse", "values", values, (1,), "fiub")
        _check_indptr("Sparse", "indptr", self.indptr, len(self.indices))
        if self.values is not None and len(self.values) != len(self.indices):
            raise ValueError(
                f"Sparse: values must be [{len(self.indices)}] to fit indices, got {describe(self.values)}"
            )
        y = labels if label_indptr is None else (label_indptr, labels)
        self.num_features = check_int("Sparse", "num_features", num_features, 1)
        self._take_labels("Sparse", "labels", y, len(self.indptr) - 1, num_classes, label_rule)

    def batch(self, rows: Tensor) -> dict[str, Tensor]:
        """See `Dataset.batch`."""
        stored = self._labels.stored(self._rows(rows))
        starts = np.asarray(self.indptr[stored], dtype=np.int64)
        lengths = np.asarray(self.indptr[stored + 1], dtype=np.int64) - starts
        where = _gather(starts, lengths)
        ids = np.asarray(self.indices[where], dtype=np.int64)
        if len(ids) and not (ids.min() >= 0 and ids.max() < self.num_features):
            wrong = ids[(ids < 0) | (ids >= self.num_features)][0]
            raise IndexError(f"Sparse.batch: indices must be in [0, {self.num_features}), got {wrong}")
        values = np.ones(len(ids), np.float32) if self.values is None else self.values[where]
        offsets = np.zeros(len(stored) + 1, dtype=np.int64)
        np.cumsum(lengths, out=offsets[1:])
        return {
            "index": rows,
            "y": _long(self._labels.get(stored)),
            "ids": _long(ids),
            "offsets": _long(offsets),
            "values": torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)),
        }

    def _parts(self) -> dict[str, Any]:
        values = {} if self.values is None else {"values": self.values}
        return {"indptr": self.indptr, "indices": self.indices, **values, **self._labels.parts()}


class Tokens(Dataset):
    """A stream of tokens for a language model: windows and the tokens that follow.

    The stream is cut into `columns` contiguous parts of equal length. Row r is window r // columns of column
    r % columns: batches of `columns` rows in order continue each other, so a model may carry its state from one to the
    next. `Batches` therefore does not shuffle, and its batch_size is `columns`.

    Batches hold "tokens" int64 [B, T] and "y" int64 [B, T], the next tokens. Every token but the first is a target
    once; up to columns - 1 at the end are left out (none with columns=1). The last window of a column may be short: its
    rest is filled with token 0 and target -100.

    Args:
        tokens: integers [n] (a memmap is read window by window).
        vocabulary_size: C.
        window: T.
        columns: how many streams run side by side.
        vocabulary: the word of each token, if there are words.

    Example:
        >>> import torch
        >>> from samplex_cuda import data
        >>> stream = data.Tokens(torch.arange(9), vocabulary_size=9, window=3, columns=2)
        >>> [batch["tokens"].tolist() for batch in data.Batches(stream, 2)]
        [[[0, 1, 2], [4, 5, 6]], [[3, 0, 0], [7, 0, 0]]]
        >>> [batch["y"].tolist() for batch in data.Batches(stream, 2)]
        [[[1, 2, 3], [5, 6, 7]], [[4, -100, -100], [8, -100, -100]]]
    """

    kind = "text"
    ordered = True

    def __init__(
        self,
        tokens: Any,
        vocabulary_size: int,
        window: int = 35,
        columns: int = 20,
        *,
        vocabulary: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        self.tokens = _as_array("Tokens", "tokens", tokens, (1,), "iu")
        self.num_classes = self.num_features = check_int("Tokens", "vocabulary_size", vocabulary_size, 1)
        self.window = check_int("Tokens", "window", window, 1)
        self.columns = check_int("Tokens", "columns", columns, 1)
        if len(self.tokens) < self.columns + 1:
            raise ValueError(f"Tokens: tokens must be at least columns + 1 = {columns + 1}, got {len(self.tokens)}")
        self.vocabulary = None if vocabulary is None else list(vocabulary)
        for begin in range(0, len(self.tokens), 1 << 22):
            part = self.tokens[begin : begin + (1 << 22)]
            if not (int(part.min()) >= 0 and int(part.max()) < vocabulary_size):
                wrong = part[(part < 0) | (part >= vocabulary_size)][0]
                raise ValueError(f"Tokens: tokens must be in [0, {vocabulary_size}), got {wrong}")
        self.length = (len(self.tokens) - 1) // self.columns  # targets of a column

    def __len__(self) -> int:
        """Number of windows, over all columns."""
        return self.columns * math.ceil(self.length / self.window)

    def _take(self, rows: Tensor) -> tuple[Array, Array]:
        found = self._rows(rows)
        place = (found // self.columns * self.window)[:, None] + np.arange(self.window)
        return (found % self.columns)[:, None] * self.length + place, place < self.length

    def targets(self, rows: Tensor) -> Tensor:
        """See `Dataset.targets`; [B, T]."""
        where, inside = self._take(rows)
        return _long(np.where(inside, self.tokens[np.where(inside, where + 1, 0)], PAD))

    def batch(self, rows: Tensor) -> dict[str, Tensor]:
        """See `Dataset.batch`."""
        where, inside = self._take(rows)
        tokens = np.where(inside, self.tokens[np.where(inside, where, 0)], 0)
        y = np.where(inside, np.asarray(self.tokens[np.where(inside, where + 1, 0)], dtype=np.int64), PAD)
        return {"index": rows, "y": _long(y), "tokens": _long(tokens)}

    def _parts(self) -> dict[str, Any]:
        return {"tokens": self.tokens, "window": self.window, "columns": self.columns}
