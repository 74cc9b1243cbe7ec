"""Sampled softmax in plain torch: the readable specification, and the oracle of the tests. Materialises [B, m, d]."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def sampled_softmax(
    h: Tensor,
    weight: Tensor,
    target: Tensor,
    ids: Tensor,
    log_q: Tensor,
    bias: Tensor | None = None,
    *,
    scale: float = 1.0,
    absolute: bool = False,
    label_smoothing: float = 0.0,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    positives: tuple[Tensor, Tensor] | None = None,
    target_weight: Tensor | None = None,
    normalize: bool = False,
    margin: tuple[float, ...] = (),
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, lse and mean denominator of every row.

    Args:
        h: [B, d].
        weight: [C, d].
        target: int64 [B] or [B, P].
        ids: int64 [B, m] or [m].
        log_q: shape of ids.
        bias: [C] or None.
        scale, absolute, label_smoothing, class_weight, ignore_index, positives: as in `samplex_cuda.functional`.
        target_weight: shape of target, or None.
        normalize: class rows on the sphere; h is used unchanged.
        margin: (m1, m2, m3) of the targets, or ().

    Returns:
        loss [B], lse [B], denom [B].

    Example:
        >>> import torch
        >>> from samplex_cuda.reference.sampled_softmax import sampled_softmax
        >>> loss, _, _ = sampled_softmax(torch.zeros(1, 2), torch.zeros(3, 2), torch.tensor([0]),
        ...                              torch.tensor([[1, 2]]), torch.full((1, 2), 0.5).log())
        >>> round(loss.exp().item(), 6)
        3.0
    """
    batch = h.shape[0]
    target = target.unsqueeze(1) if target.dim() == 1 else target
    ids = ids.expand(batch, -1) if ids.dim() == 1 else ids
    log_q = log_q.expand(batch, -1) if log_q.dim() == 1 else log_q
    num_samples = ids.shape[1]
    padded = target == ignore_index
    if target.shape[1] > 1:
        padded |= target == -100

    def scores(classes: Tensor, margin: tuple[float, ...] = ()) -> Tensor:  # [B, n] -> [B, n]
        rows = weight[classes]
        if normalize:
            length = rows.norm(dim=2, keepdim=True)
            rows = torch.where(length > 0, rows / torch.where(length > 0, length, 1.0), 0.0)
        s = torch.einsum("bd,bnd->bn", h, rows)
        if margin:
            size = h.norm(dim=1, keepdim=True)
            angle = margin[0] * torch.acos(s / size) + margin[1]
            turns = torch.floor(angle.detach() / math.pi)
            s = size * (torch.cos(angle) * (1 - 2 * (turns % 2)) - 2 * turns - margin[2])
        if bias is not None:
            s = s + bias[classes]
        s = scale * s
        return s.abs() if absolute else s

    masked = (ids.unsqueeze(2) == target.masked_fill(padded, -1).unsqueeze(1)).any(2)  # [B, m]
    if positives is not None:
        offsets, known = positives
        for b in range(batch):
            masked[b] |= torch.isin(ids[b], known[offsets[b] : offsets[b + 1]])

    safe = target.masked_fill(padded, 0)
    s_pos, s_neg = scores(safe, margin), scores(ids)
    inf = float("inf")
    o_pos = s_pos.masked_fill(padded, -inf)
    correction = torch.where(log_q.isfinite(), log_q, float("nan")) + math.log(max(num_samples, 1))
    o_neg = (s_neg - correction).masked_fill(masked, -inf)

    num_targets = (~padded).sum(1, keepdim=True).to(s_pos)
    num_entries = num_targets + (~masked).sum(1, keepdim=True)
    ignored = num_targets.squeeze(1) == 0
    nothing_drawn = masked.all(1)
    cw_pos = torch.ones_like(s_pos) if class_weight is None else class_weight[safe].to(s_pos)
    cw_neg = torch.ones_like(s_neg) if class_weight is None else class_weight[ids].to(s_neg)
    own = 1 / num_targets.clamp_min(1) if target_weight is None else target_weight.reshape(s_pos.shape)
    a_pos = (1 - label_smoothing) * own + label_smoothing / num_entries.clamp_min(1)
    a_neg = (label_smoothing / num_entries.clamp_min(1)).expand_as(s_neg)
    a_pos = (a_pos * cw_pos).masked_fill(padded, 0.0)
    a_neg = (a_neg * cw_neg).masked_fill(masked, 0.0)

    o = torch.cat([o_pos, o_neg], 1)
    o = torch.where(ignored.unsqueeze(1), torch.zeros_like(o), o)  # keeps the gradient of an ignored row finite
    lse = torch.logsumexp(o, 1)
    pulled = torch.where(a_pos != 0, a_pos * s_pos, 0.0).sum(1) + torch.where(a_neg != 0, a_neg * s_neg, 0.0).sum(1)
    loss = (a_pos.sum(1) + a_neg.sum(1)) * lse - pulled
    loss = torch.where(ignored | nothing_drawn, 0.0, loss)
    if target_weight is not None:
        return loss, torch.where(ignored, 0.0, lse), (~ignored).to(loss)
    denom = (cw_pos.masked_fill(padded, 0.0).sum(1) / num_targets.squeeze(1).clamp_min(1)).masked_fill(ignored, 0.0)
    return loss, torch.where(ignored, 0.0, lse), denom
