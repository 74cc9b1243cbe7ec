"""Negative sampling in plain torch: the readable specification, and the oracle of the tests. Materialises [B, m, d]."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def negative_sampling(
    h: Tensor,
    weight: Tensor,
    target: Tensor,
    ids: Tensor,
    log_q: Tensor,
    target_log_q: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    scale: float = 1.0,
    reg: float = 0.0,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
) -> tuple[Tensor, Tensor]:
    """Loss and mean denominator of every row: Eq. 2 and 6 of Bamler & Mandt 2020, the m draws averaged.

    Args:
        h: [B, d].
        weight: [C, d].
        target: int64 [B].
        ids: int64 [B, m] or [m].
        log_q: shape of ids.
        target_log_q: [B]; None where reg is 0.
        bias: [C] or None.
        scale, reg, class_weight, ignore_index: as in `samplex_cuda.functional`.

    Returns:
        loss [B], denom [B].

    Example:
        >>> import torch
        >>> from samplex_cuda.reference.negative_sampling import negative_sampling
        >>> loss, _ = negative_sampling(torch.zeros(1, 2), torch.zeros(3, 2), torch.tensor([0]),
        ...                             torch.tensor([[1, 2]]), torch.full((1, 2), 0.5).log())
        >>> round(loss.exp().item(), 6)
        4.0
    """
    ids = ids.expand(h.shape[0], -1) if ids.dim() == 1 else ids
    log_q = log_q.expand(h.shape[0], -1) if log_q.dim() == 1 else log_q
    ignored = target == ignore_index
    safe = target.masked_fill(ignored, 0)

    def scores(classes: Tensor) -> Tensor:  # [B, n] -> [B, n]
        s = torch.einsum("bd,bnd->bn", h, weight[classes])
        return scale * (s if bias is None else s + bias[classes])

    xi_pos, xi_neg = scores(safe.unsqueeze(1)).squeeze(1), scores(ids)
    positive, negative = -F.logsigmoid(xi_pos), -F.logsigmoid(-xi_neg)
    if reg != 0:
        assert target_log_q is not None
        positive = positive + reg * (xi_pos + target_log_q) ** 2
        negative = negative + reg * (xi_neg + log_q) ** 2
    row_weight = torch.ones_like(xi_pos) if class_weight is None else class_weight[safe].to(xi_pos)
    loss = row_weight * (positive + negative.sum(1) / max(ids.shape[1], 1))
    return torch.where(ignored, 0.0, loss), row_weight.masked_fill(ignored, 0.0)
