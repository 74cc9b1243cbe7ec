"""Which rank holds the row of which class."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from samplex_cuda._checks import check_choice, check_int

__all__ = ["ORDERS", "Layout"]

ORDERS = ("class", "spread")
_MOST_SPREAD = 1 << 31  # classes: products of two slots must fit 63 bits


class Layout:
    """Classes in slots, slots in the ranges of `torch.chunk`: rank r holds n = ceil(C / world) slots from r * n on.

    With `order="class"` slot and class are the same, and a rank holds a range of classes. With "spread" class c is in
    slot (a * c) mod C, where a is near C times the golden section: neighboring classes, and so the frequent ones where
    ids are sorted by frequency, lie far apart. C need not be a multiple of the world size; the last ranks may hold
    fewer rows than the others, or none.

    Args:
        num_classes: C.
        world: how many ranks there are.
        rank: this one.
        order: "class" or "spread".

    Example:
        >>> import torch
        >>> from samplex_cuda.distributed import Layout
        >>> layout = Layout(10, world=4, rank=1)
        >>> layout.start, layout.stop, layout.local(torch.tensor([2, 3, 5, 6, -100])).tolist()
        (3, 6, [-1, 0, 2, -1, -1])
    """

    def __init__(self, num_classes: int, world: int, rank: int, order: str = "class") -> None:
        check_int("Layout", "num_classes", num_classes, 1, 1 << 52)
        check_int("Layout", "world", world, 1)
        check_int("Layout", "rank", rank, 0, world - 1)
        check_choice("Layout", "order", order, ORDERS)
        if order == "spread" and num_classes > _MOST_SPREAD:
            raise ValueError(
                f'Layout: order must be "class" above {_MOST_SPREAD} classes, got "spread" with {num_classes}'
            )
        self.num_classes, self.world, self.rank, self.order = num_classes, world, rank, order
        self.chunk = -(-num_classes // world)
        self.start, self.stop = self.range_of(rank)
        self.step = _coprime_near(num_classes, num_classes * (math.sqrt(5) - 1) / 2) if order == "spread" else 1
        self._back = pow(self.step, -1, num_classes) if num_classes > 1 else 0

    @property
    def rows(self) -> int:
        """How many rows this rank holds."""
        return self.stop - self.start

    def range_of(self, rank: int) -> tuple[int, int]:
        """First slot of a rank, and the one behind its last."""
        return min(rank * self.chunk, self.num_classes), min((rank + 1) * self.chunk, self.num_classes)

    def slot(self, ids: Tensor) -> Tensor:
        """The slot of each class; ids outside of [0, C) give -1."""
        inside = (ids >= 0) & (ids < self.num_classes)
        found = ids if self.step == 1 else torch.where(inside, ids, 0) * self.step % self.num_classes
        return torch.where(inside, found, -1)

    def local(self, ids: Tensor) -> Tensor:
        """The row of each class in this rank's table; -1 where another rank has it, or none.

        Args:
            ids: int64 of any shape.
        """
        slot = self.slot(ids)
        return torch.where((slot >= self.start) & (slot < self.stop), slot - self.start, -1)

    def classes(self, device: torch.device | str | None = None, begin: int = 0, end: int | None = None) -> Tensor:
        """The class of each row of this rank's table, int64; of rows [begin, end) where these are given.

        Example:
            >>> from samplex_cuda.distributed import Layout
            >>> sorted(c for rank in range(3) for c in Layout(7, 3, rank, "spread").classes().tolist())
            [0, 1, 2, 3, 4, 5, 6]
        """
        last = self.rows if end is None else min(end, self.rows)
        return self.class_at(torch.arange(self.start + begin, self.start + max(last, begin), device=device))

    def class_at(self, slots: Tensor) -> Tensor:
        """The class of each slot, int64 of any shape in [0, C)."""
        return slots if self.step == 1 else slots * self._back % self.num_classes

    def __repr__(self) -> str:
        """What `print(layout)` shows."""
        return f'Layout({self.num_classes}, world={self.world}, rank={self.rank}, order="{self.order}")'


def _coprime_near(number: int, near: float) -> int:
    """The number closest to `near` that has no factor in common with `number`."""
    middle = max(1, round(near))
    for away in range(number):
        for candidate in (middle + away, middle - away):
            if 0 < candidate < max(number, 2) and math.gcd(candidate, number) == 1:
                return candidate
    return 1
