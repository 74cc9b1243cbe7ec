"""Rows of a sampler's own copy of the class table, replaced without the host waiting for the device."""

from __future__ import annotations

import torch
from torch import Tensor

from samplex_cuda._checks import check_dense, describe

__all__ = ["check_changes", "check_table", "last_of_equal", "replace_rows", "taken_rows"]


def check_table(op: str, weight: Tensor, bias: Tensor | None) -> None:
    """ValueError unless `weight` [C, d], C >= 1, and `bias` [C] are floating point.

    Example:
        >>> import torch
        >>> from samplex_cuda.samplers.table_rows import check_table
        >>> check_table("softmax", torch.zeros(3, 2), torch.zeros(2))
        Traceback (most recent call last):
            ...
        ValueError: softmax: bias must be [3] floating point, got [2] float32 on cpu
    """
    if not isinstance(weight, Tensor) or weight.dim() != 2 or not weight.is_floating_point():
        raise ValueError(f"{op}: weight must be [C, d] floating point, got {describe(weight)}")
    if weight.shape[0] < 1:
        raise ValueError(f"{op}: weight must have at least one class, got {describe(weight)}")
    if bias is not None and (
        not isinstance(bias, Tensor) or bias.shape != weight.shape[:1] or not bias.is_floating_point()
    ):
        raise ValueError(f"{op}: bias must be [{weight.shape[0]}] floating point, got {describe(bias)}")


def check_changes(op: str, ids: Tensor, rows: Tensor, bias: Tensor | None, dim: int, has_bias: bool) -> None:
    """ValueError unless int64 ids [n], rows [n, dim] and bias [n] or None are what `update` takes.

    Example:
        >>> import torch
        >>> from samplex_cuda.samplers.table_rows import check_changes
        >>> check_changes("midx", torch.tensor([1, 2]), torch.zeros(2, 4), None, 3, False)
        Traceback (most recent call last):
            ...
        ValueError: midx: rows must be [2, 3] floating point, got [2, 4] float32 on cpu
    """
    if ids.dim() != 1:
        raise ValueError(f"{op}: ids must be [n], got {describe(ids)}")
    if not isinstance(rows, Tensor) or rows.shape != (ids.shape[0], dim) or not rows.is_floating_point():
        raise ValueError(f"{op}: rows must be [{ids.shape[0]}, {dim}] floating point, got {describe(rows)}")
    check_dense(op, "rows", rows)
    if bias is None:
        return
    if not has_bias or not isinstance(bias, Tensor) or bias.shape != ids.shape or not bias.is_floating_point():
        wanted = f"[{ids.shape[0]}] floating point" if has_bias else "None"
        raise ValueError(f"{op}: bias must be {wanted}, got {describe(bias)}")
    check_dense(op, "bias", bias)


def last_of_equal(ids: Tensor) -> Tensor:
    """Positions that keep of equal ids the last: assignment by index leaves their order open. The CPU's way.

    Example:
        >>> import torch
        >>> from samplex_cuda.samplers.table_rows import last_of_equal
        >>> last_of_equal(torch.tensor([5, 2, 5]))
        tensor([1, 2])
    """
    order = ids.argsort(stable=True)
    ordered = ids[order]
    last = torch.ones_like(ordered, dtype=torch.bool)
    last[:-1] = ordered[1:] != ordered[:-1]
    return order[last]


def replace_rows(ids: Tensor, changes: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Writes new rows into tables, of equal ids the last. All sizes are those of the arguments: nothing waits.

    An id that is not a class is passed over. Where a number of a class's new rows is not finite, the class keeps its
    rows in all tables.

    Args:
        ids: int64 [n], n >= 1.
        changes: (table [C, ...], new rows [n, ...]).

    Returns:
        Two bool [n]: which ids are not classes; which of the others have new rows that are not finite.

    Example:
        >>> import torch
        >>> from samplex_cuda.samplers.table_rows import replace_rows
        >>> table = torch.zeros(4, 1)
        >>> replace_rows(torch.tensor([2, 9, 2, 0]), [(table, torch.tensor([[1.0], [2.0], [3.0], [torch.inf]]))])
        (tensor([False,  True, False, False]), tensor([False, False, False,  True]))
        >>> table.flatten()
        tensor([0., 0., 3., 0.])
    """
    count, classes = ids.shape[0], changes[0][0].shape[0]
    outside, unfit = (ids < 0) | (ids >= classes), torch.zeros_like(ids, dtype=torch.bool)
    for _, rows in changes:
        unfit |= ~rows.reshape(count, -1).isfinite().all(1)
    key = torch.where(outside, -1, ids)
    if classes < 1 << 31:
        key = key.to(torch.int32)  # half the passes of a radix sort
    ordered, order = key.sort(stable=True)
    # Entries that write to one class all write the row of the last of them. One that is not a class does what the entry
    # of the largest id does; if there is no class at all, class 0 gets the row it has.
    last = torch.where(ordered < 0, count - 1, torch.searchsorted(ordered, ordered, right=True) - 1)
    at, source = ordered[last].clamp_min(0).long(), order[last]
    taken = (ordered[-1:] >= 0) & ~unfit[source]
    for table, rows in changes:
        mask = taken.view(-1, *(1,) * (table.dim() - 1))
        table.index_copy_(0, at, torch.where(mask, rows[source].to(table.dtype), table[at]))
    return outside, unfit & ~outside


def taken_rows(table: Tensor, place: Tensor, value: float = 0.0) -> Tensor:
    """Rows of a table in another order, and new ones.

    Args:
        table: [C, ...].
        place: int64 [n], a row of the table each; -1: a new one.
        value: what new rows hold.

    Example:
        >>> import torch
        >>> from samplex_cuda.samplers.table_rows import taken_rows
        >>> taken_rows(torch.tensor([1.0, 2.0]), torch.tensor([1, -1, 0]))
        tensor([2., 0., 1.])
    """
    made = table.detach()[place.clamp(min=0)]
    made[place < 0] = value
    return made
