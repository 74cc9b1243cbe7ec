"""Data sets as the trainer sees them: rows in, tensors out.

A `Dataset` answers `batch(rows)` with a dict of tensors and nothing else: no hidden position, no randomness. So the
order of a run is a function of (seed, epoch) alone (`Batches`), and a run resumes at any batch without reading the ones
before. The arrays behind a data set may be memory-mapped files: a batch reads the rows it needs.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from samplex_cuda.datasets import HierarchicalZipf

__all__ = [
    "PAD",
    "Batches",
    "BuiltIn",
    "Dataset",
    "Dense",
    "Interactions",
    "Sparse",
    "Subset",
    "Tokens",
    "split",
]

Array: TypeAlias = np.ndarray

PAD = -100  # what fills a row of targets: the ignore_index of the losses
LABEL_RULES = ("all", "first", "smallest")

_CHUNK = 1 << 16  # rows that a pass over a whole data set holds at once
_MAX_IN_MEMORY = 1 << 24  # rows of an epoch whose order is a table; more are permuted number by number
_HASH_WHOLE = 1 << 28  # bytes of an array that a fingerprint reads completely
_HASH_PIECE = 1 << 20


# ------------------------------------------------------------------------------------------------ helpers
def _describe(a: Any) -> str:
    """Shape and dtype as error messages print them."""
    if isinstance(a, np.ndarray | Tensor):
        return f"{list(a.shape)} {str(a.dtype).removeprefix('torch.')}"
    return type(a).__name__


def _as_array(where: str, name: str, a: Any, dims: tuple[int, ...], kinds: str) -> Array:
    """`a` as a numpy array that shares its memory; kinds: letters of `dtype.kind`."""
    if isinstance(a, Tensor):
        a = a.detach().cpu().numpy()
    elif not isinstance(a, np.ndarray):
        a = np.asarray(a)
    if a.ndim not in dims or a.dtype.kind not in kinds:
        shape = " or ".join(f"{n}-dimensional" for n in dims)
        what = "integers" if kinds == "iu" else "numbers"
        raise ValueError(f"{where}: {name} must be a {shape} array of {what}, got {_describe(a)}")
    return a


def _check_int(where: str, name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ValueError(f"{where}: {name} must be an int of at least {least}, got {value!r}")
    return int(value)


def _check_rule(where: str, rule: str) -> str:
    if rule not in LABEL_RULES:
        raise ValueError(f"{where}: label_rule must be one of {', '.join(LABEL_RULES)}, got {rule!r}")
    return rule


def _check_indptr(where: str, name: str, indptr: Array, total: int) -> None:
    if len(indptr) < 1 or int(indptr[0]) != 0 or int(indptr[-1]) != total:
        ends = f"{indptr[0]} ... {indptr[-1]}" if len(indptr) else "nothing"
        raise ValueError(f"{where}: {name} must begin with 0 and end with {total}, got {ends}")
    for begin in range(0, len(indptr) - 1, _CHUNK):
        part = np.asarray(indptr[begin : begin + _CHUNK + 1])
        if (np.diff(part.astype(np.int64)) < 0).any():
            at = begin + int(np.argmax(np.diff(part.astype(np.int64)) < 0))
            raise ValueError(f"{where}: {name} must not decrease, got {indptr[at]} then {indptr[at + 1]} at {at}")


def _gather(starts: Array, lengths: Array) -> Array:
    """The numbers starts[i], starts[i] + 1, ... of each range, one after the other, int64."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(total, dtype=np.int64)


def _pad(values: Array, lengths: Array, fill: int, width: int, *, front: bool = False) -> Array:
    """Ranges of `values` as the rows of a table [B, width], the rest of a row filled; int64."""
    table = np.full((len(lengths), width), fill, dtype=np.int64)
    place = np.arange(width)
    mask = place >= width - lengths[:, None] if front else place < lengths[:, None]
    table[mask] = values
    return table


def _long(a: Array) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(a, dtype=np.int64))


def _hash_array(digest: Any, name: str, a: Array) -> None:
    """Shape, dtype and content of an array; of one above 256 MiB, 256 pieces of 1 MiB spread over it."""
    digest.update(f"{name}:{a.dtype.str}:{a.shape};".encode())
    if a.nbytes == 0:
        return
    if not a.flags.c_contiguous:
        for begin in range(0, len(a), _CHUNK):
            digest.update(np.ascontiguousarray(a[begin : begin + _CHUNK]).tobytes())
        return
    flat = a.reshape(-1).view(np.uint8)
    if a.nbytes <= _HASH_WHOLE:
        for begin in range(0, a.nbytes, 1 << 24):
            digest.update(flat[begin : begin + (1 << 24)].tobytes())
        return
    last = a.nbytes - _HASH_PIECE
    for i in range(_HASH_WHOLE // _HASH_PIECE):
        begin = last * i // (_HASH_WHOLE // _HASH_PIECE - 1)
        digest.update(flat[begin : begin + _HASH_PIECE].tobytes())


def _mix(*numbers: int) -> int:
    """One 63-bit seed from several numbers, by the mixing steps of SplitMix64."""
    state = 0
    for number in numbers:
        state = (state ^ (number % 2**64)) + 0x9E3779B97F4A7C15
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) % 2**64
        state ^= state >> 31
    return state % 2**63


def _hash64(x: Array) -> Array:
    """The mixing step of SplitMix64 on uint64 numbers."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _permute(x: Array, size: int, seed: int) -> Array:
    """A permutation of [0, size) at the places x, int64 [n]: six Feistel rounds, walked until inside.

    The network permutes [0, 4^half) with 4^half < 4 * size; a number that lands outside goes through it again.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    keys = [np.uint64(_mix(seed, number)) for number in range(6)]

    def network(v: Array) -> Array:
        left, right = v >> shift, v & mask
        for key in keys:
            left, right = right, left ^ (_hash64(right ^ key) & mask)
        return (left << shift) | right

    out = network(x.astype(np.uint64))
    while True:
        outside = out >= np.uint64(size)
        if not outside.any():
            return out.astype(np.int64)
        out[outside] = network(out[outside])


# ------------------------------------------------------------------------------------------------ data sets
class Dataset:
    """What all data sets have; not for use by itself.

    Attributes:
        kind: "dense", "sparse", "text" or "interactions": which tensors a batch holds.
        num_classes: C.
        num_features: width of x; the vocabulary for text; the number of items for interactions.
        ordered: whether consecutive batches continue each other (text), so that rows are not shuffled.
        multi_label: whether y is [B, P] padded with -100 instead of [B].
        notes: what a reader had to say, e.g. how many bad lines it skipped.

    Example:
        >>> import torch
        >>> from samplex_cuda import data
        >>> isinstance(data.Dense(torch.randn(4, 3), torch.tensor([0, 1, 2, 0])), data.Dataset)
        True
    """

    kind: str
    num_classes: int
    num_features: int
    ordered = False
    multi_label = False
    _counts: Tensor | None = None
    _fingerprint: str | None = None

    def __init__(self) -> None:
        self.notes: list[str] = []
        self._known: dict[str, str] = {}  # checksums of arrays that a cache has

    def __len__(self) -> int:
        """Number of examples."""
        raise NotImplementedError

    def batch(self, rows: Tensor) -> dict[str, Tensor]:
        """The tensors of the given rows, always the same for the same rows.

        Args:
            rows: int64 [B], in [0, len).

        Returns:
            "index" int64 [B] (the rows), "y" int64 [B] or [B, P] padded with -100, and what `kind` says.

        Example:
            >>> import torch
            >>> from samplex_cuda import data
            >>> data.Dense(torch.eye(3), torch.tensor([2, 1, 0])).batch(torch.tensor([1]))
            {'index': tensor([1]), 'y': tensor([1]), 'x': tensor([[0., 1., 0.]])}
        """
        raise NotImplementedError

    def targets(self, rows: Tensor) -> Tensor:
        """The "y" of `batch(rows)` alone.

        Args:
            rows: int64 [B], in [0, len).

        Returns:
            int64 [B] or [B, P], padded with -100.

        Example:
            >>> import torch
            >>> from samplex_cuda import data
            >>> data.Dense(torch.eye(3), torch.tensor([2, 1, 0])).targets(torch.tensor([0, 2]))
            tensor([2, 0])
        """
        raise NotImplementedError

    def class_counts(self) -> Tensor:
        """How often each class is a target, int64 [C]. Read once, in chunks, and kept.

        Example:
            >>> import torch
            >>> from samplex_cuda import data
            >>> data.Dense(torch.eye(3), torch.tensor([2, 0, 0]), num_classes=4).class_counts()
            tensor([2, 0, 1, 0])
        """
        if self._counts is None:
            counts = torch.zeros(self.num_classes, dtype=torch.int64)
            for begin in range(0, len(self), _CHUNK):
                y = self.targets(torch.arange(begin, min(begin + _CHUNK, len(self)))).reshape(-1)
                y = y[y >= 0]
                counts.scatter_add_(0, y, torch.ones_like(y))
            self._counts = counts
        return self._counts.clone()

    def fingerprint(self) -> str:
        """A hex digest of what the data are: the same data give the same digest, on any machine.

        Arrays of a converted file count by their checksum. Of others, those above 256 MiB count by their shape and 256
        pieces of 1 MiB, the rest completely.

        Example:
            >>> import torch
            >>> from samplex_cuda import data
            >>> one, two = (data.Dense(torch.eye(3), torch.tensor([2, 1, 0])) for _ in range(2))
            >>> one.fingerprint() == two.fingerprint()
            True
        """
        if self._fingerprint is None:
            digest = hashlib.sha256(f"{type(self).__name__}:{self.num_classes}:{self.num_features};".encode())
            for name, part in self._parts().items():
                if name in self._known:
                    digest.update(f"{name}:{self._known[name]};".encode())
                elif isinstance(part, np.ndarray):
                    _hash_array(digest, name, part)
                else:
                    digest.update(f"{name}={part};".encode())
            self._fingerprint = digest.hexdigest()
        return self._fingerprint

    def _parts(self) -> dict[str, Any]:
        """What the fingerprint is of: arrays and settings by name."""
        raise NotImplementedError

    def _rows(self, rows: Tensor) -> Array:
        """Checked row numbers as int64 numpy [B]."""
        where = f"{type(self).__name__}.batch"
        if not isinstance(rows, Tensor) or rows.dtype != torch.int64 or rows.dim() != 1:
            raise ValueError(f"{where}: rows must be [B] int64, got {_describe(rows)}")
        found = rows.cpu().numpy()
        if len(found) and not (found.min() >= 0 and found.max() < len(self)):
            wrong = found[(found < 0) | (found >= len(self))][0]
            raise IndexError(f"{where}: rows must be in [0, {len(self)}), got {wrong}")
        return found

    def __repr__(self) -> str:
        """Kind and sizes."""
        return (
            f"{type(self).__name__}({len(self)} examples, num_classes={self.num_classes}, "
            f"num_features={self.num_features})"
        )


class _Labels:
    """Targets of N rows, as an array [N] or [N, P], or as CSR; with the rule that picks among several."""

    def __init__(
        self,
        where: str,
        rule: str,
        *,
        table: Array | None = None,
        indptr: Array | None = None,
        ids: Array | None = None,
    ) -> None:
        self.table, self.indptr, self.ids, self.rule = table, indptr, ids, _check_rule(where, rule)
        self.where = where
        rows = len(table) if table is not None else len(indptr) - 1 if indptr is not None else 0
        if table is not None:
            self.several = table.ndim == 2 and rule == "all"
            single = table.ndim == 1
        else:
            # One label in every row: [B], as of a data set that knows no other.
            single = self._one_each()
            self.several = rule == "all" and not single
        self.kept: Array | None = None  # rows that have a label, where the rule drops the others
        if rule != "all" and not single:
            self.kept = self._labelled(rows)
            if len(self.kept) == rows:
                self.kept = None
        self.rows = rows if self.kept is None else len(self.kept)

    def _one_each(self) -> bool:
        assert self.indptr is not None
        for begin in range(0, len(self.indptr) - 1, _CHUNK):
            if (np.diff(self.indptr[begin : begin + _CHUNK + 1]) != 1).any():
                return False
        return True

    def _labelled(self, rows: int) -> Array:
        parts = [np.empty(0, dtype=np.int64)]
        for begin in range(0, rows, _CHUNK):
            end = min(begin + _CHUNK, rows)
            if self.table is not None:
                has = (self.table[begin:end] != PAD).any(1)
            else:
                assert self.indptr is not None
                has = np.diff(self.indptr[begin : end + 1]) > 0
            parts.append(np.flatnonzero(has) + begin)
        return np.concatenate(parts)

    def largest(self, num_classes: int | None) -> int:
        """Largest target under the rule (-1 where there is none); a label outside [0, num_classes) is an error."""
        most = -1
        for begin in range(0, self.rows, _CHUNK):
            y = self.get(self.stored(np.arange(begin, min(begin + _CHUNK, self.rows))))
            wrong = (y < 0) & (y != PAD)
            if num_classes is not None:
                wrong |= y >= num_classes
            if wrong.any():
                row = begin + int(np.argmax(wrong.reshape(len(y), -1).any(1)))
                got = int(y[wrong][0])
                span = f"[0, {num_classes})" if num_classes is not None else "0 and above"
                raise ValueError(f"{self.where}: labels must be in {span}, got {got} in row {row}")
            most = max(most, int(y.max(initial=-1)))
        return most

    def stored(self, rows: Array) -> Array:
        """Numbers in the file of the rows of the data set."""
        return rows if self.kept is None else self.kept[rows]

    def get(self, stored: Array) -> Array:
        """int64 [B] or [B, P]."""
        if self.table is not None:
            y = np.asarray(self.table[stored], dtype=np.int64)
            if y.ndim == 1 or self.rule == "all":
                return y
            if self.rule == "first":
                return y[np.arange(len(y)), np.argmax(y != PAD, 1)]
            return np.where(y == PAD, np.iinfo(np.int64).max, y).min(1)
        assert self.indptr is not None
        assert self.ids is not None
        starts = np.asarray(self.indptr[stored], dtype=np.int64)
        if not self.several and self.rule != "smallest":  # one each, or the first of each
            return np.asarray(self.ids[starts], dtype=np.int64)
        lengths = np.asarray(self.indptr[stored + 1], dtype=np.int64) - starts
        values = np.asarray(self.ids[_gather(starts, lengths)], dtype=np.int64)
        if not self.several:
            ends = np.cumsum(lengths)
            return np.minimum.reduceat(values, ends - lengths) if len(values) else values
        return _pad(values, lengths, PAD, max(1, int(lengths.max(initial=0))))

    def parts(self) -> dict[str, Any]:
        found: dict[str, Any] = {"rule": self.rule}
        for name, array in (("y", self.table), ("label_indptr", self.indptr), ("labels", self.ids)):
            if array is not None:
                found[name] = array
        return found


def _labels_of(where: str, name: str, y: Any, rows: int, rule: str) -> _Labels:
    """Targets of `rows` rows from a table [N] or [N, P], or a CSR pair."""
    if isinstance(y, tuple):
        indptr = _as_array(where, "label_indptr", y[0], (1,), "iu")
        ids = _as_array(where, name, y[1], (1,), "iu")
        if len(indptr) != rows + 1:
            raise ValueError(f"{where}: label_indptr must be [{rows + 1}], got {_describe(indptr)}")
        _check_indptr(where, "label_indptr", indptr, len(ids))
        return _Labels(where, rule, indptr=indptr, ids=ids)
    table = _as_array(where, name, y, (1, 2), "iu")
    if len(table) != rows or (table.ndim == 2 and table.shape[1] == 0):
        raise ValueError(f"{where}: {name} must be [{rows}] or [{rows}, P], got {_describe(table)}")
    return _Labels(where, rule, table=table)


def _classes(where: str, labels: _Labels, num_classes: int | None) -> int:
    if num_classes is not None:
        _check_int(where, "num_classes", num_classes, 1)
    most = labels.largest(num_classes)
    if num_classes is None and most < 0:
        raise ValueError(f"{where}: num_classes must be given where there is no label, got None")
    return most + 1 if num_classes is None else int(num_classes)


class Dense(Dataset):
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
        self._labels = _labels_of("Dense", "y", y, len(self.x), label_rule)
        self.multi_label = self._labels.several
        self.num_features = int(self.x.shape[1])
        self.num_classes = _classes("Dense", self._labels, num_classes)

    def __len__(self) -> int:
        """Number of rows, without the ones that the rule drops."""
        return self._labels.rows

    def targets(self, rows: Tensor) -> Tensor:
        """See `Dataset.targets`."""
        return _long(self._labels.get(self._labels.stored(self._rows(rows))))

    def batch(self, rows: Tensor) -> dict[str, Tensor]:
        """See `Dataset.batch`."""
        stored = self._labels.stored(self._rows(rows))
        x = np.ascontiguousarray(self.x[stored], dtype=np.float32)
        return {"index": rows, "y": _long(self._labels.get(stored)), "x": torch.from_numpy(x)}

    def _parts(self) -> dict[str, Any]:
        return {"x": self.x, **self._labels.parts()}


class Sparse(Dataset):
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
                f"Sparse: values must be [{len(self.indices)}] to fit indices, got {_describe(self.values)}"
            )
        y = labels if label_indptr is None else (label_indptr, labels)
        self._labels = _labels_of("Sparse", "labels", y, len(self.indptr) - 1, label_rule)
        self.multi_label = self._labels.several
        self.num_features = _check_int("Sparse", "num_features", num_features, 1)
        self.num_classes = _classes("Sparse", self._labels, num_classes)

    def __len__(self) -> int:
        """Number of rows, without the ones that the rule drops."""
        return self._labels.rows

    def targets(self, rows: Tensor) -> Tensor:
        """See `Dataset.targets`."""
        return _long(self._labels.get(self._labels.stored(self._rows(rows))))

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
        self.num_classes = self.num_features = _check_int("Tokens", "vocabulary_size", vocabulary_size, 1)
        self.window = _check_int("Tokens", "window", window, 1)
        self.columns = _check_int("Tokens", "columns", columns, 1)
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


class Interactions(Dataset):
    """Which items each user took, in order: predict an item from the ones before it.

    Row r is one interaction of one user: "y" int64 [B] is the item, "history" int64 [B, T] the items before it, most
    recent last, padded with -1 at the front, "user" int64 [B]. The first `min_history` items of a user are no targets.

    With `targets` (a test set) a row is a user who has some: "history" ends with the last known item, and "y" is
    [B, P], padded with -100.

    Args:
        indptr: [U + 1], where the items of each user begin.
        items: item ids.
        num_items: C.
        history: T, how many items back a row looks.
        min_history: how many items a user must have before a target; 0 keeps rows without a history.
        order: "time": the history of an item is what came before it. "none": the items of a user are a set; the history
            of an item is the other ones (of more than T, the T that follow it in the list, going round).
        targets: (indptr [U + 1], items): what is to be predicted for each user.

    Example:
        >>> import numpy as np, torch
        >>> from samplex_cuda import data
        >>> set_ = data.Interactions(np.array([0, 3, 5]), np.array([4, 2, 7, 1, 3]), num_items=8, history=2)
        >>> batch = set_.batch(torch.arange(len(set_)))
        >>> batch["history"].tolist(), batch["y"].tolist(), batch["user"].tolist()
        ([[-1, 4], [4, 2], [-1, 1]], [2, 7, 3], [0, 0, 1])
    """

    kind = "interactions"

    def __init__(
        self,
        indptr: Any,
        items: Any,
        num_items: int,
        history: int = 50,
        *,
        min_history: int = 1,
        order: str = "time",
        targets: tuple[Any, Any] | None = None,
    ) -> None:
        super().__init__()
        where = "Interactions"
        self.indptr = _as_array(where, "indptr", indptr, (1,), "iu")
        self.items = _as_array(where, "items", items, (1,), "iu")
        self.num_classes = self.num_features = _check_int(where, "num_items", num_items, 1)
        self.history = _check_int(where, "history", history, 1)
        self.min_history = _check_int(where, "min_history", min_history, 0)
        if order not in ("time", "none"):
            raise ValueError(f"{where}: order must be 'time' or 'none', got {order!r}")
        self.order = order
        _check_indptr(where, "indptr", self.indptr, len(self.items))
        self._check_items("items", self.items)
        self.num_users = len(self.indptr) - 1
        self._targets: _Labels | None = None
        if targets is None:
            lengths = np.diff(np.asarray(self.indptr, dtype=np.int64))
            # In a set no place is before another: every item is a target where the others are enough.
            self._skip = self.min_history if order == "time" else 0
            self._ends = np.cumsum(np.where(lengths > self.min_history, lengths - self._skip, 0))  # rows up to a user
            return
        ends = _as_array(where, "targets", targets[0], (1,), "iu")
        ids = _as_array(where, "targets", targets[1], (1,), "iu")
        if len(ends) != self.num_users + 1:
            raise ValueError(f"{where}: targets must have {self.num_users + 1} offsets to fit indptr, got {len(ends)}")
        _check_indptr(where, "targets", ends, len(ids))
        self._check_items("targets", ids)
        self._targets = _Labels(where, "all", indptr=ends, ids=ids)
        self._users = np.flatnonzero(np.diff(ends) > 0)
        self.multi_label = True

    def with_targets(self, test: Interactions) -> Interactions:
        """A data set for evaluation: what `test` has of each user is to be predicted from what is known here.

        Args:
            test: interactions of the same users with the same items; it may know fewer or more users.

        Returns:
            `Interactions` with `targets`: a row for each user who has some.

        Example:
            >>> import numpy as np, torch
            >>> from samplex_cuda import data
            >>> train = data.Interactions(np.array([0, 3, 5]), np.array([4, 2, 7, 1, 3]), num_items=8, history=2)
            >>> test = data.Interactions(np.array([0, 0, 2]), np.array([6, 5]), num_items=8)
            >>> batch = train.with_targets(test).batch(torch.tensor([0]))
            >>> batch["user"].tolist(), batch["history"].tolist(), batch["y"].tolist()
            ([1], [[1, 3]], [[6, 5]])
        """
        if test.num_classes > self.num_classes:
            want = f"at most {self.num_classes}"
            raise ValueError(f"Interactions.with_targets: test must have {want} items, got {test.num_classes}")
        users = max(self.num_users, test.num_users)
        known, asked = (
            np.concatenate([a, np.full(users + 1 - len(a), a[-1])]) if len(a) <= users else a
            for a in (np.asarray(self.indptr), np.asarray(test.indptr))
        )
        found = Interactions(
            known,
            self.items,
            self.num_classes,
            self.history,
            min_history=self.min_history,
            order=self.order,
            targets=(asked, test.items),
        )
        found.notes = [*self.notes, *test.notes]
        return found

    def _check_items(self, name: str, items: Array) -> None:
        for begin in range(0, len(items), 1 << 22):
            part = items[begin : begin + (1 << 22)]
            if not (int(part.min()) >= 0 and int(part.max()) < self.num_classes):
                wrong = part[(part < 0) | (part >= self.num_classes)][0]
                raise ValueError(f"Interactions: {name} must be in [0, {self.num_classes}), got {wrong}")

    @property
    def num_interactions(self) -> int:
        """How many (user, item) pairs there are."""
        return len(self.items)

    def __len__(self) -> int:
        """Number of targets; with `targets`, of users who have some."""
        if self._targets is not None:
            return len(self._users)
        return int(self._ends[-1]) if len(self._ends) else 0

    def _place(self, found: Array) -> tuple[Array, Array]:
        """User, and place of the target among the items."""
        user = np.searchsorted(self._ends, found, side="right")
        before = np.where(user > 0, self._ends[user - 1], 0)
        return user, np.asarray(self.indptr[user], dtype=np.int64) + self._skip + (found - before)

    def users(self, rows: Tensor) -> Tensor:
        """The user of each row.

        Args:
            rows: int64 [B], in [0, len).

        Returns:
            int64 [B].

        Example:
            >>> import numpy as np, torch
            >>> from samplex_cuda import data
            >>> set_ = data.Interactions(np.array([0, 3, 5]), np.array([4, 2, 7, 1, 3]), num_items=8)
            >>> set_.users(torch.tensor([0, 2]))
            tensor([0, 1])
        """
        found = self._rows(rows)
        return _long(self._users[found] if self._targets is not None else self._place(found)[0])

    def seen(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Every known item that is no target of each row, however long ago: what a recommendation leaves out.

        With `targets`: all items of the user. Else: the items before the target (order="none": all the others).

        Args:
            rows: int64 [B], in [0, len).

        Returns:
            CSR pair (offsets int64 [B + 1], ids int64).

        Example:
            >>> import numpy as np, torch
            >>> from samplex_cuda import data
            >>> set_ = data.Interactions(np.array([0, 3, 5]), np.array([4, 2, 7, 1, 3]), num_items=8, history=1)
            >>> set_.seen(torch.tensor([1, 2]))
            (tensor([0, 2, 3]), tensor([4, 2, 1]))
        """
        found = self._rows(rows)
        if self._targets is not None:
            user, place = self._users[found], None
        else:
            user, place = self._place(found)
        starts = np.asarray(self.indptr[user], dtype=np.int64)
        ends = np.asarray(self.indptr[user + 1], dtype=np.int64)
        if place is not None and self.order == "time":
            ends = place
        where = _gather(starts, ends - starts)
        keep = np.ones(len(where), dtype=bool)
        lengths = ends - starts
        if place is not None and self.order == "none":
            keep = where != np.repeat(place, lengths)
            lengths = lengths - 1
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        return _long(offsets), _long(self.items[where[keep]])

    def targets(self, rows: Tensor) -> Tensor:
        """See `Dataset.targets`."""
        found = self._rows(rows)
        if self._targets is not None:
            y = self._targets.get(self._users[found])
            return _long(y if y.ndim == 2 else y[:, None])
        return _long(self.items[self._place(found)[1]])

    def batch(self, rows: Tensor) -> dict[str, Tensor]:
        """See `Dataset.batch`."""
        found = self._rows(rows)
        if self._targets is not None:
            user = self._users[found]
            end = np.asarray(self.indptr[user + 1], dtype=np.int64)
        else:
            user, end = self._place(found)
        start = np.asarray(self.indptr[user], dtype=np.int64)
        if self.order == "none" and self._targets is None:
            size = np.asarray(self.indptr[user + 1], dtype=np.int64) - start
            lengths = np.minimum(size - 1, self.history)
            step = _gather(np.ones_like(lengths), lengths)  # 1, 2, ... beyond the target
            where = np.repeat(start, lengths) + (np.repeat(end - start, lengths) + step) % np.repeat(size, lengths)
        else:
            lengths = np.minimum(end - start, self.history)
            where = _gather(end - lengths, lengths)
        history = _pad(self.items[where], lengths, -1, self.history, front=True)
        return {"index": rows, "y": self.targets(rows), "history": _long(history), "user": _long(user)}

    def _parts(self) -> dict[str, Any]:
        found: dict[str, Any] = {"indptr": self.indptr, "items": self.items, "history": self.history}
        found |= {"min_history": self.min_history, "order": self.order}
        return found if self._targets is None else found | self._targets.parts()


class BuiltIn(Dataset):
    """The built-in data: hierarchical Zipf classes at any C, made when a batch asks for them.

    Classes, centres and law are those of `samplex_cuda.datasets.HierarchicalZipf` with the same settings. Row i is a
    function of (seed, split, i) alone, so rows come in any order at the same cost and N x K is never held.

    Args:
        num_classes: C.
        dim: width of x.
        num_examples: N of this split.
        seed: everything follows from it.
        split: "train", "valid" or "test": the same classes, other examples.
        exponent: Zipf exponent.
        depth: levels of super-classes above the classes.
        branching: children of each inner node.
        noise: length of the noise vector relative to the centre's.

    Example:
        >>> import torch
        >>> from samplex_cuda import data
        >>> train = data.BuiltIn(1_000_000, dim=16, num_examples=1000, seed=0)
        >>> train.batch(torch.tensor([3, 999]))["x"].shape
        torch.Size([2, 16])
    """

    kind = "dense"
    _SPLITS = ("train", "valid", "test")

    def __init__(
        self,
        num_classes: int,
        dim: int,
        num_examples: int,
        seed: int = 0,
        *,
        split: str = "train",
        exponent: float = 1.0,
        depth: int = 2,
        branching: int | None = None,
        noise: float = 0.6,
    ) -> None:
        super().__init__()
        if split not in self._SPLITS:
            raise ValueError(f"BuiltIn: split must be one of {', '.join(self._SPLITS)}, got {split!r}")
        self.law = HierarchicalZipf(
            num_classes, dim, num_examples, seed, exponent=exponent, depth=depth, branching=branching, noise=noise
        )
        self.num_classes, self.num_features = num_classes, dim
        self.split = split
        self._base = np.uint64(_mix(seed, self._SPLITS.index(split), 0x5A1F))

    def __len__(self) -> int:
        """Number of examples of this split."""
        return self.law.num_examples

    def _bits(self, rows: Array, first: int, count: int) -> Array:
        """53 random bits for columns [first, first + count) of each row as numbers in (0, 1), float64 [B, count]."""
        row = _hash64(rows.astype(np.uint64) ^ self._base)
        columns = np.arange(first, first + count, dtype=np.uint64) * np.uint64(0xD1342543DE82EF95)
        bits = _hash64(row[:, None] + columns)
        return ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53

    def targets(self, rows: Tensor) -> Tensor:
        """See `Dataset.targets`."""
        uniform = torch.from_numpy(self._bits(self._rows(rows), 0, 1)[:, 0])
        return torch.searchsorted(self.law._cumulative, uniform, right=True).clamp_(max=self.num_classes - 1)

    def batch(self, rows: Tensor) -> dict[str, Tensor]:
        """See `Dataset.batch`."""
        y = self.targets(rows)
        half = (self.num_features + 1) // 2
        uniform = self._bits(self._rows(rows), 1, 2 * half)
        # Box and Muller: two normal numbers from two uniform ones.
        radius, angle = np.sqrt(-2.0 * np.log(uniform[:, :half])), 2.0 * np.pi * uniform[:, half:]
        normal = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)], 1)[:, : self.num_features]
        x = torch.from_numpy((normal * (self.law.noise / math.sqrt(self.num_features))).astype(np.float32))
        return {"index": rows, "y": y, "x": x.add_(self.law.centres(y))}

    def _parts(self) -> dict[str, Any]:
        law = self.law
        names = ("num_examples", "seed", "exponent", "depth", "branching", "noise")
        return {"split": self.split, "version": 1, **{name: getattr(law, name) for name in names}}


class Subset(Dataset):
    """Some rows of a data set. The "index" of its batches counts within the subset.

    Args:
        base: the data set.
        rows: int64 [n], rows of `base`, in the order they shall have.

    Example:
        >>> import torch
        >>> from samplex_cuda import data
        >>> whole = data.Dense(torch.eye(3), torch.tensor([2, 1, 0]))
        >>> data.Subset(whole, torch.tensor([2, 0])).batch(torch.tensor([0]))["y"]
        tensor([0])
    """

    def __init__(self, base: Dataset, rows: Tensor) -> None:
        super().__init__()
        base._rows(rows)
        self.base, self.rows = base, rows
        self.kind, self.ordered, self.multi_label = base.kind, base.ordered, base.multi_label
        self.num_classes, self.num_features = base.num_classes, base.num_features
        self.notes = base.notes

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.rows)

    def _inner(self, rows: Tensor) -> Tensor:
        self._rows(rows)
        return self.rows[rows]

    def targets(self, rows: Tensor) -> Tensor:
        """See `Dataset.targets`."""
        return self.base.targets(self._inner(rows))

    def batch(self, rows: Tensor) -> dict[str, Tensor]:
        """See `Dataset.batch`."""
        return {**self.base.batch(self._inner(rows)), "index": rows}

    def seen(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """See `Interactions.seen`."""
        base: Any = self.base
        return base.seen(self._inner(rows))

    def __getattr__(self, name: str) -> Any:
        """What else the data set has (`columns`, `window`, `num_users`, `vocabulary`, ...) is its base's."""
        if name.startswith("_") or name in ("base", "rows"):
            raise AttributeError(name)
        return getattr(self.base, name)

    def _parts(self) -> dict[str, Any]:
        return {"base": self.base.fingerprint(), "rows": self.rows.numpy()}


def split(dataset: Dataset, fractions: Sequence[float] = (0.9, 0.1), seed: int = 0) -> list[Subset]:
    """Cut a data set into parts at random; the parts are a function of its length and the seed.

    Part i has round(N * sum of the fractions up to it) rows less those before it; where the fractions sum to less than
    1, rows are left out. Rows of a part keep their order. Text is cut into contiguous stretches of windows instead, so
    that batches still continue each other; the seed has no effect on it.

    Args:
        dataset: what to cut.
        fractions: shares, each above 0, with a sum of at most 1.
        seed: which rows go where.

    Returns:
        One `Subset` for each fraction; no row is in two of them.

    Example:
        >>> import torch
        >>> from samplex_cuda import data
        >>> whole = data.Dense(torch.randn(10, 3), torch.arange(10))
        >>> train, valid = data.split(whole, (0.8, 0.2), seed=1)
        >>> len(train), len(valid)
        (8, 2)
    """
    if not fractions or not all(f > 0 for f in fractions) or sum(fractions) > 1 + 1e-9:
        raise ValueError(f"split: fractions must be above 0 with a sum of at most 1, got {tuple(fractions)}")
    unit = dataset.columns if dataset.ordered else 1  # type: ignore[attr-defined]
    total = len(dataset) // unit
    ends = [min(total, round(total * sum(fractions[: i + 1]))) for i in range(len(fractions))]
    if dataset.ordered:
        order = torch.arange(total)
    else:
        order = torch.randperm(total, generator=torch.Generator().manual_seed(_mix(seed, 0x5917)))
    parts = []
    for begin, end in zip([0, *ends], ends, strict=False):
        rows = order[begin:end].sort()[0]
        if unit > 1:
            rows = (rows[:, None] * unit + torch.arange(unit)).reshape(-1)
        parts.append(Subset(dataset, rows))
    return parts


class Batches:
    """The batches of one epoch, in an order that is a function of (seed, epoch).

    Args:
        dataset: where rows come from.
        batch_size: rows per batch; for text it must be the number of columns.
        seed: of the order.
        epoch: another order for each.
        drop_last: leave out a last, smaller batch.
        shuffle: False for the order of the data; None: shuffle what is not `ordered`.

    Example:
        >>> import torch
        >>> from samplex_cuda import data
        >>> whole = data.Dense(torch.randn(10, 3), torch.arange(10))
        >>> batches = data.Batches(whole, 4, seed=0, epoch=2)
        >>> [len(batch["y"]) for batch in batches]
        [4, 4, 2]
        >>> all(torch.equal(a["y"], b["y"]) for a, b in zip(batches.iterate(1), list(batches)[1:]))
        True
    """

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int,
        *,
        seed: int = 0,
        epoch: int = 0,
        drop_last: bool = False,
        shuffle: bool | None = None,
    ) -> None:
        self.batch_size = _check_int("Batches", "batch_size", batch_size, 1)
        if dataset.ordered:
            columns: int = dataset.columns  # type: ignore[attr-defined]
            if batch_size != columns:
                raise ValueError(f"Batches: batch_size must be the {columns} columns of the text, got {batch_size}")
            if shuffle:
                raise ValueError("Batches: shuffle must be off for text, whose batches continue each other, got True")
        self.dataset = dataset
        self.seed, self.epoch, self.drop_last = seed, epoch, drop_last
        self.shuffle = not dataset.ordered if shuffle is None else shuffle
        self._order: Tensor | None = None

    def __len__(self) -> int:
        """Number of batches."""
        total = len(self.dataset)
        return total // self.batch_size if self.drop_last else math.ceil(total / self.batch_size)

    def rows(self, number: int) -> Tensor:
        """The rows of batch `number`, int64 [B].

        Example:
            >>> import torch
            >>> from samplex_cuda import data
            >>> whole = data.Dense(torch.randn(10, 3), torch.arange(10))
            >>> data.Batches(whole, 4, shuffle=False).rows(2)
            tensor([8, 9])
        """
        if not 0 <= number < len(self):
            raise IndexError(f"Batches.rows: number must be in [0, {len(self)}), got {number}")
        total = len(self.dataset)
        begin, end = number * self.batch_size, min((number + 1) * self.batch_size, total)
        if not self.shuffle:
            return torch.arange(begin, end)
        mixed = _mix(self.seed, self.epoch, 0xBA7C)
        if total > _MAX_IN_MEMORY:
            return _long(_permute(np.arange(begin, end), total, mixed))
        if self._order is None:
            self._order = torch.randperm(total, generator=torch.Generator().manual_seed(mixed))
        return self._order[begin:end]

    def iterate(self, start: int = 0) -> Iterator[dict[str, Tensor]]:
        """Batches from number `start` on; the ones before are not read.

        Args:
            start: 0 to the number of batches.

        Yields:
            What `Dataset.batch` gives.

        Example:
            >>> import torch
            >>> from samplex_cuda import data
            >>> whole = data.Dense(torch.randn(10, 3), torch.arange(10))
            >>> len(list(data.Batches(whole, 4).iterate(2)))
            1
        """
        if not 0 <= start <= len(self):
            raise ValueError(f"Batches.iterate: start must be in [0, {len(self)}], got {start}")
        return (self.dataset.batch(self.rows(number)) for number in range(start, len(self)))

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """All batches."""
        return self.iterate(0)
