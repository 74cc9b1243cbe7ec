"""Row reduction in plain torch: the oracle of `torch.ops.samplex.row_reduce`."""

from __future__ import annotations

import torch
from torch import Tensor


def row_reduce(ids: Tensor, coef: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Distinct ids ascending, sum of `coef[s, j] * rows[s]` by id, and sum of `coef` by id.

    Args:
        ids: int64 [S, k]; negative entries are left out.
        coef: [S, k]; zero entries are left out.
        rows: [S, d].

    Returns:
        row_ids int64 [n], row_grads [n, d], row_bias [n].

    Example:
        >>> import torch
        >>> from samplex_cuda.reference.row_reduce import row_reduce
        >>> row_reduce(torch.tensor([[3, 3]]), torch.ones(1, 2), torch.ones(1, 1))[1].tolist()
        [[2.0]]
    """
    keep = (ids >= 0) & (coef != 0)
    row_ids, inverse = torch.unique(ids[keep], return_inverse=True)
    terms = (coef.unsqueeze(2) * rows.unsqueeze(1))[keep]
    grads = torch.zeros(len(row_ids), rows.shape[1], dtype=terms.dtype).index_add_(0, inverse, terms)
    bias = torch.zeros(len(row_ids), dtype=coef.dtype).index_add_(0, inverse, coef[keep])
    return row_ids, grads, bias
