"""Data sets as the trainer sees them: rows in, tensors out.

A `Dataset` answers `batch(rows)` with a dict of tensors and nothing else: no hidden position, no randomness. So the
order of a run is a function of (seed, epoch) alone (`Batches`), and a run resumes at any batch without reading the ones
before. The arrays behind a data set may be memory-mapped files: a batch reads the rows it needs.
"""

from __future__ import annotations

import hashlib
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from samplex_cuda._checks import check_int, describe

__all__ = ["PAD", "Dataset"]

Array: TypeAlias = np.ndarray

PAD = -100  # what fills a row of targets: the ignore_index of the losses
LABEL_RULES = ("all", "first", "smallest")

_CHUNK = 1 << 16  # rows that a pass over a whole data set holds at once
_HASH_WHOLE = 1 << 28  # bytes of an array that a fingerprint reads completely
_HASH_PIECE = 1 << 20


# ------------------------------------------------------------------------------------------------ helpers
def _as_array(where: str, name: str, a: Any, dims: tuple[int, ...], kinds: str) -> Array:
    """`a` as a numpy array that shares its memory; kinds: letters of `dtype.kind`."""
    if isinstance(a, Tensor):
        a = a.detach().cpu().numpy()
    elif not isinstance(a, np.ndarray):
        a = np.asarray(a)
    if a.ndim not in dims or a.dtype.kind not in kinds:
        shape = " or ".join(f"{n}-dimensional" for n in dims)
        what = "integers" if kinds == "iu" else "numbers"
        raise ValueError(f"{where}: {name} must be a {shape} array of {what}, got {describe(a)}")
    return a


def _log_q_of(where: str, log_q: Any, indptr: Array, there: Array | None) -> Array:
    """log q of each negative, [n], from one in the shape of the negatives."""
    if isinstance(log_q, tuple):
        offsets, log_q = _as_array(where, "offsets of log_q", log_q[0], (1,), "iu"), log_q[1]
        if not np.array_equal(offsets, indptr):
            row = int(np.argmax(offsets != indptr)) - 1 if offsets.shape == indptr.shape else len(indptr) - 1
            raise ValueError(
                f"{where}: log_q must have one number per negative, got a different number of them in row {row}"
            )
    values = _as_array(where, "log_q", log_q, (1, 2), "f")
    if there is not None and values.shape in (there.shape, there.shape[:1]):
        values = values.reshape(there.shape)[there] if values.size == there.size else values
    if values.shape != (int(indptr[-1]),):
        shape = [int(indptr[-1])] if there is None else list(there.shape)
        raise ValueError(f"{where}: log_q must be {shape} like the negatives, got {describe(values)}")
    if len(values) and not (np.isfinite(values).all() and values.max() <= 1e-3):
        wrong = values[~(np.isfinite(values) & (values <= 1e-3))][0]
        raise ValueError(f"{where}: log_q must be log-probabilities, finite and at most 0, got {wrong}")
    return values.astype(np.float32)


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
        columns_said: what each column of a table was taken for, as text; empty if the data has no columns.

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
    _negatives: tuple[Array, Array] | None = None  # CSR of the stored rows
    _log_q: Array | None = None  # of each of their ids

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.columns_said = ""
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

    def known(self, rows: Tensor) -> tuple[Tensor, Tensor] | None:
        """Positives of each row besides its target: labels that the rule left out, other items of the user.

        What `head.mask_known` keeps out of the negatives.

        Args:
            rows: int64 [B], in [0, len).

        Returns:
            CSR pair (offsets int64 [B + 1], ids int64); None for data that have no such positives.

        Example:
            >>> import torch
            >>> from samplex_cuda import data
            >>> y = torch.tensor([[2, 0], [1, -100]])
            >>> data.Dense(torch.eye(2), y, label_rule="smallest").known(torch.tensor([0, 1]))
            (tensor([0, 1, 1]), tensor([2]))
            >>> data.Dense(torch.eye(2), y).known(torch.tensor([0])) is None  # every label is a target
            True
        """
        return None

    def negatives(self, rows: Tensor) -> tuple[Tensor, Tensor] | None:
        """The negatives that the data name for each row, such as items that were shown and not chosen.

        Args:
            rows: int64 [B], in [0, len).

        Returns:
            CSR pair (offsets int64 [B + 1], ids int64), what `sx.Negatives` takes; None for data without any.

        Example:
            >>> import torch
            >>> from samplex_cuda import data
            >>> train = data.Dense(torch.eye(3), torch.tensor([2, 1, 0]))
            >>> train.set_negatives([[0, 1], [2, -100], [-100, -100]])
            >>> train.negatives(torch.tensor([1, 0]))
            (tensor([0, 1, 3]), tensor([2, 0, 1]))
        """
        if self._negatives is None:
            return None
        offsets, place = self._named(rows)
        return offsets, _long(np.asarray(self._negatives[1][place], dtype=np.int64))

    def negatives_log_q(self, rows: Tensor) -> Tensor | None:
        """The log-probability of each id of `negatives(rows)` under the distribution it was drawn from.

        Args:
            rows: int64 [B], in [0, len).

        Returns:
            float32 [n]; None for negatives that are uncorrected.

        Example:
            >>> import torch
            >>> from samplex_cuda import data
            >>> train = data.Dense(torch.eye(3), torch.tensor([2, 1, 0]))
            >>> train.set_negatives([[0, 1], [2, 0], [1, 2]], log_q=[[-1.0, -1.0], [-0.5, -2.0], [-1.0, -1.0]])
            >>> train.negatives_log_q(torch.tensor([1]))
            tensor([-0.5000, -2.0000])
        """
        if self._log_q is None:
            return None
        return torch.from_numpy(np.asarray(self._log_q[self._named(rows)[1]], dtype=np.float32))

    def _named(self, rows: Tensor) -> tuple[Tensor, Array]:
        """Offsets of the negatives of rows, and their places among all of them."""
        assert self._negatives is not None
        indptr = self._negatives[0]
        stored = self._stored_rows(self._rows(rows))
        starts = np.asarray(indptr[stored], dtype=np.int64)
        lengths = np.asarray(indptr[stored + 1], dtype=np.int64) - starts
        return _long(np.concatenate([[0], np.cumsum(lengths)])), _gather(starts, lengths)

    def set_negatives(self, negatives: Any, log_q: Any = None) -> None:
        """Name the negatives of every row.

        Args:
            negatives: integers [N] or [N, m] padded with -100, or a CSR pair (offsets [N + 1], ids [n]); N counts the
                rows of the file, also those that a label rule drops.
            log_q: the log-probability of each of them, in the shape of `negatives` (with anything where that is
                padded), or [n]; with a CSR pair also such a pair, with the same offsets. None: uncorrected.
        """
        where, rows = "set_negatives", self._stored_count()
        if isinstance(negatives, tuple):
            indptr = _as_array(where, "offsets", negatives[0], (1,), "iu")
            ids = _as_array(where, "ids", negatives[1], (1,), "iu")
            _check_indptr(where, "offsets", indptr, len(ids))
            there = None
        else:
            table = _as_array(where, "negatives", negatives, (1, 2), "iu")
            table = table[:, None] if table.ndim == 1 else table
            there = table != PAD
            indptr, ids = np.concatenate([[0], np.cumsum(there.sum(1))]), table[there]
        if len(indptr) != rows + 1:
            raise ValueError(f"{where}: negatives must have {rows} rows like the data, got {len(indptr) - 1}")
        if len(ids) and not (ids.min() >= 0 and ids.max() < self.num_classes):
            wrong = ids[(ids < 0) | (ids >= self.num_classes)][0]
            raise ValueError(f"{where}: negatives must be in [0, {self.num_classes}), got {wrong}")
        values = None if log_q is None else _log_q_of(where, log_q, indptr, there)
        self._negatives, self._log_q, self._fingerprint = (indptr, ids), values, None

    def _stored_rows(self, rows: Array) -> Array:
        """Rows of the file, of rows of the data set."""
        return rows

    def _stored_count(self) -> int:
        return len(self)

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
            if self._negatives is not None:
                for name, part in zip(("negative_indptr", "negatives"), self._negatives, strict=True):
                    _hash_array(digest, name, np.ascontiguousarray(part))
            if self._log_q is not None:
                _hash_array(digest, "negatives_log_q", np.ascontiguousarray(self._log_q))
            self._fingerprint = digest.hexdigest()
        return self._fingerprint

    def _parts(self) -> dict[str, Any]:
        """What the fingerprint is of: arrays and settings by name."""
        raise NotImplementedError

    def _rows(self, rows: Tensor) -> Array:
        """Checked row numbers as int64 numpy [B]."""
        where = f"{type(self).__name__}.batch"
        if not isinstance(rows, Tensor) or rows.dtype != torch.int64 or rows.dim() != 1:
            raise ValueError(f"{where}: rows must be [B] int64, got {describe(rows)}")
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
        """Largest target under the rule (-1 for an empty set); a label outside [0, num_classes) is an error."""
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

    def others(self, stored: Array) -> tuple[Tensor, Tensor] | None:
        """Labels of each row besides the one that the rule picks, CSR; None if there can be none."""
        if self.several or (self.table is not None and self.table.ndim == 1):
            return None
        if self.table is not None:
            table = np.asarray(self.table[stored], dtype=np.int64)
            row, column = np.nonzero(table != PAD)
            values = table[row, column]
        else:
            assert self.indptr is not None
            assert self.ids is not None
            starts = np.asarray(self.indptr[stored], dtype=np.int64)
            lengths = np.asarray(self.indptr[stored + 1], dtype=np.int64) - starts
            values = np.asarray(self.ids[_gather(starts, lengths)], dtype=np.int64)
            row = np.repeat(np.arange(len(stored)), lengths)
        keep = values != self.get(stored)[row] if len(row) else np.zeros(0, dtype=bool)
        offsets = np.concatenate([[0], np.cumsum(np.bincount(row[keep], minlength=len(stored)))])
        return _long(offsets), _long(values[keep])

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
            raise ValueError(f"{where}: label_indptr must be [{rows + 1}], got {describe(indptr)}")
        _check_indptr(where, "label_indptr", indptr, len(ids))
        return _Labels(where, rule, indptr=indptr, ids=ids)
    table = _as_array(where, name, y, (1, 2), "iu")
    if len(table) != rows or (table.ndim == 2 and table.shape[1] == 0):
        raise ValueError(f"{where}: {name} must be [{rows}] or [{rows}, P], got {describe(table)}")
    return _Labels(where, rule, table=table)


def _classes(where: str, labels: _Labels, num_classes: int | None) -> int:
    if num_classes is not None:
        check_int(where, "num_classes", num_classes, 1)
    most = labels.largest(num_classes)
    if num_classes is None and most < 0:
        raise ValueError(f"{where}: num_classes must be given if there is no label, got None")
    return most + 1 if num_classes is None else int(num_classes)
