"""Row reduction: weighted source rows summed by class id. Fake of `torch.ops.samplex.row_reduce` and its wrapper."""

from __future__ import annotations

import torch
from torch import Tensor

from samplex_cuda._library import register_fake

__all__ = ["row_reduce"]


@register_fake("samplex::row_reduce")
def _(
    ids_a: Tensor,
    coef_a: Tensor | None,
    rows_a: Tensor,
    ids_b: Tensor,
    coef_b: Tensor | None,
    rows_b: Tensor,
    num_rows: int,
    with_bias: bool,
    bias_b: Tensor | None = None,
    check_ids: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    acc = torch.float64 if rows_a.dtype == torch.float64 else torch.float32
    capacity = torch.sym_min(ids_a.numel() + ids_b.numel(), num_rows)
    return (
        rows_a.new_empty((capacity,), dtype=torch.int64),
        rows_a.new_empty((capacity, rows_a.shape[1]), dtype=acc),
        rows_a.new_empty((capacity if with_bias else 0,), dtype=acc),
        rows_a.new_empty((1,), dtype=torch.int64),
    )


def row_reduce(
    ids: Tensor, coef: Tensor | None, rows: Tensor, num_rows: int, *, with_bias: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sum `coef[s, j] * rows[s]` over all (s, j) with the same id.

    On CUDA the ids are sorted by torch's radix sort, which makes a pass per 8 bits of the key: the keys are int32, 4
    passes, and int64, 8 passes, only where `num_rows` is 2^31 or more. An id with more than 8 entries is summed in
    pieces, whose sums are added as a tree: the order depends on the entries alone.

    Args:
        ids: int64 [S, k] in [0, num_rows); an entry with a negative id is left out.
        coef: [S, k] float32 (float64 for float64 rows), or None for 1; an entry of exactly 0 is left out.
        rows: [S, d].
        num_rows: number of classes the ids point into; only an upper bound, nothing of this size is allocated.
        with_bias: also sum the coefficients by id.

    Returns:
        row_ids int64 [n], row_grads [n, d], row_bias [n] or [0], count int64 [1], with n = min(S * k, num_rows) fixed.
        The first `count` row_ids ascend; the rest are -1, and their rows unspecified. No host sync.

    Example:
        >>> import torch
        >>> from samplex_cuda.ops.row_reduce import row_reduce
        >>> ids = torch.tensor([[7, 2], [7, -1]])
        >>> row_ids, rows, _, count = row_reduce(ids, torch.ones(2, 2), torch.tensor([[1.0], [10.0]]), 9)
        >>> row_ids[:count].tolist(), rows[:count, 0].tolist()
        ([2, 7], [1.0, 11.0])
    """
    none = ids.new_empty((0, 1))
    return torch.ops.samplex.row_reduce(ids, coef, rows, none, None, rows[:0], num_rows, with_bias)
