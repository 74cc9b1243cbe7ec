"""Parts of a data set, and the batches of an epoch in an order that is a function of (seed, epoch)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from samplex_cuda._checks import check_int
from samplex_cuda.data.base import Dataset, _long, _mix, _permute
from samplex_cuda.data.interactions import Interactions

__all__ = ["Batches", "Subset", "split"]

_MAX_IN_MEMORY = 1 << 24  # rows of an epoch whose order is a table; more are permuted number by number


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
        self.notes, self.columns_said = base.notes, base.columns_said
        self._used: np.ndarray | None = None  # rows of the base that are in this part

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

    def known(self, rows: Tensor) -> tuple[Tensor, Tensor] | None:
        """See `Dataset.known`. Items that only rows outside of this part predict stay unknown: they are what a
        validation part asks for."""
        inner, base = self._inner(rows), self.base
        while isinstance(base, Subset):
            inner, base = base._inner(inner), base.base
        if not isinstance(base, Interactions):
            return base.known(inner)
        if self._used is None:
            self._used = np.zeros(len(base), dtype=bool)
            every, level = self.rows, self.base
            while isinstance(level, Subset):
                every, level = level.rows[every], level.base
            self._used[every.numpy()] = True
        return base._known_but(inner, self._used)

    def negatives(self, rows: Tensor) -> tuple[Tensor, Tensor] | None:
        """See `Dataset.negatives`."""
        return self.base.negatives(self._inner(rows))

    def negatives_log_q(self, rows: Tensor) -> Tensor | None:
        """See `Dataset.negatives_log_q`."""
        return self.base.negatives_log_q(self._inner(rows))

    def set_negatives(self, negatives: Any, log_q: Any = None) -> None:
        """Refused: the whole data set has them."""
        raise ValueError("set_negatives: a part of a data set must get its negatives from the whole, got a Subset")

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
        self.batch_size = check_int("Batches", "batch_size", batch_size, 1)
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
