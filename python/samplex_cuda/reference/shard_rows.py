"""What `samplex::shard_logits` and `samplex::shard_hidden` compute, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["shard_hidden", "shard_logits"]


def shard_logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ids: Tensor,
    num_classes: int,
    step: int = 1,
    start: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [B, P + m] of the classes in slots [start, start + n), 0 for others; local rows of targets and draws.

    Example:
        >>> import torch
        >>> from samplex_cuda.reference.shard_rows import shard_logits
        >>> h, rows = torch.ones(1, 2), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> shard_logits(h, rows, None, torch.tensor([[3]]), torch.tensor([[0, 2]]), 6, start=2)
        (tensor([[7., 0., 3.]]), tensor([[1]]), tensor([[-1,  0]]))
    """
    classes = torch.cat([target, ids], 1)
    inside = (classes >= 0) & (classes < num_classes)
    row = torch.where(inside, classes, 0) * step % num_classes - start
    local = inside & (row >= 0) & (row < weight.shape[0])
    row = torch.where(local, row, -1)
    found = torch.zeros(row.shape, dtype=hidden.dtype, device=hidden.device)
    if weight.shape[0]:
        safe = row.clamp_min(0)
        found = torch.einsum("bd,bnd->bn", hidden, weight[safe])
        if bias is not None:
            found = found + bias[safe].to(found.dtype)
    return torch.where(local, found, 0.0), row[:, : target.shape[1]], row[:, target.shape[1] :]


def shard_hidden(weight: Tensor, target_coef: Tensor, id_coef: Tensor, target_rows: Tensor, id_rows: Tensor) -> Tensor:
    """Sum over local entries of coefficient * row, [B, d].

    Example:
        >>> import torch
        >>> from samplex_cuda.reference.shard_rows import shard_hidden
        >>> rows, one = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.ones(1, 1)
        >>> shard_hidden(rows, -one, one.repeat(1, 2), torch.tensor([[1]]), torch.tensor([[-1, 0]]))
        tensor([[-2., -2.]])
    """
    row, coef = torch.cat([target_rows, id_rows], 1), torch.cat([target_coef, id_coef], 1)
    used = (row >= 0) & (row < weight.shape[0]) & (coef != 0)
    if weight.shape[0] == 0:
        return coef.new_zeros(row.shape[0], weight.shape[1])
    terms = coef.unsqueeze(2) * weight[torch.where(used, row, 0)].to(coef.dtype)
    return torch.where(used.unsqueeze(2), terms, 0.0).sum(1)
