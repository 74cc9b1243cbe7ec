"""The losses that are sums over entries in plain torch: the readable specification, and the oracle of the tests.

Everything here materialises [B, m, d].
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["augment_reduce", "nce", "negative_sampling", "one_vs_each"]


class _Entries(NamedTuple):
    pos: Tensor  # [B, P] scores of the targets
    neg: Tensor  # [B, m] scores of the draws
    log_q: Tensor  # [B, m]
    share: Tensor  # [B, P]: class weight / number of targets; 0 for a padded one
    valid: Tensor  # [B, P]: which targets are classes
    masked: Tensor  # [B, m]: which draws take no part

    @property
    def weight(self) -> Tensor:
        """[B, 1]: the mean class weight of the targets; 0 for a row without any."""
        return self.share.sum(1, keepdim=True)

    def over_targets(self, terms: Tensor) -> Tensor:
        """sum_y a_y term_y, [B], of terms [B, P]."""
        return torch.where(self.valid, self.share * terms, 0.0).sum(1)

    def over_draws(self, terms: Tensor) -> Tensor:
        """a sum_k term_k, [B], of terms [B, m]."""
        return (self.weight * torch.where(self.masked, 0.0, terms)).sum(1)

    def counted(self, loss: Tensor) -> tuple[Tensor, Tensor]:
        """Loss and denominator, 0 for a row without targets."""
        ignored = ~self.valid.any(1)
        return torch.where(ignored, 0.0, loss), self.weight.squeeze(1)


def _entries(
    h: Tensor,
    weight: Tensor,
    target: Tensor,
    ids: Tensor,
    log_q: Tensor,
    bias: Tensor | None,
    scale: float,
    class_weight: Tensor | None,
    ignore_index: int,
    positives: tuple[Tensor, Tensor] | None,
    mask_targets: bool,
) -> _Entries:
    batch = h.shape[0]
    target = target.unsqueeze(1) if target.dim() == 1 else target
    ids = ids.expand(batch, -1) if ids.dim() == 1 else ids
    log_q = log_q.expand(batch, -1) if log_q.dim() == 1 else log_q
    padded = target == ignore_index
    if target.shape[1] > 1:
        padded |= target == -100

    def scores(classes: Tensor) -> Tensor:  # [B, n] -> [B, n]
        s = torch.einsum("bd,bnd->bn", h, weight[classes])
        return scale * (s if bias is None else s + bias[classes])

    masked = torch.zeros_like(ids, dtype=torch.bool)
    if mask_targets:
        masked |= (ids.unsqueeze(2) == target.masked_fill(padded, -1).unsqueeze(1)).any(2)
    if positives is not None:
        offsets, known = positives
        for b in range(batch):
            masked[b] |= torch.isin(ids[b], known[offsets[b] : offsets[b + 1]])
    safe = target.masked_fill(padded, 0)
    pos = scores(safe)
    share = torch.ones_like(pos) if class_weight is None else class_weight[safe].to(pos)
    share = share.masked_fill(padded, 0.0) / (~padded).sum(1, keepdim=True).clamp_min(1)
    return _Entries(pos, scores(ids), log_q, share, ~padded, masked)


def _log_weight(log_q: Tensor) -> Tensor:
    """log of 1 / (m q); nan where log_q is not finite."""
    return -torch.where(log_q.isfinite(), log_q, float("nan")) - math.log(max(log_q.shape[-1], 1))


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
    positives: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Loss and mean denominator of every row: Eq. 2 and 6 of Bamler & Mandt 2020, the m draws averaged.

    Args:
        h: [B, d].
        weight: [C, d].
        target: int64 [B] or [B, P].
        ids: int64 [B, m] or [m].
        log_q: shape of ids.
        target_log_q: shape of target; None if reg is 0.
        bias: [C] or None.
        scale, reg, class_weight, ignore_index, positives: as in `samplex_cuda.functional`.

    Returns:
        loss [B], denom [B].

    Example:
        >>> import torch
        >>> from samplex_cuda.reference.entry_loss import negative_sampling
        >>> loss, _ = negative_sampling(torch.zeros(1, 2), torch.zeros(3, 2), torch.tensor([0]),
        ...                             torch.tensor([[1, 2]]), torch.full((1, 2), 0.5).log())
        >>> round(loss.exp().item(), 6)
        4.0
    """
    e = _entries(h, weight, target, ids, log_q, bias, scale, class_weight, ignore_index, positives, False)
    positive, negative = -F.logsigmoid(e.pos), -F.logsigmoid(-e.neg)
    if reg != 0:
        assert target_log_q is not None
        positive = positive + reg * (e.pos + target_log_q.reshape(e.pos.shape)) ** 2
        negative = negative + reg * (e.neg + e.log_q) ** 2
    return e.counted(e.over_targets(positive) + e.over_draws(negative) / max(e.neg.shape[1], 1))


def nce(
    h: Tensor,
    weight: Tensor,
    target: Tensor,
    ids: Tensor,
    log_q: Tensor,
    target_log_q: Tensor,
    bias: Tensor | None = None,
    *,
    scale: float = 1.0,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    positives: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Loss and mean denominator of every row: noise contrastive estimation, the draws summed.

    Arguments and results as in `negative_sampling`.

    Example:
        >>> import torch
        >>> from samplex_cuda.reference.entry_loss import nce
        >>> half = torch.tensor(0.5).log()
        >>> loss, _ = nce(torch.zeros(1, 2), torch.zeros(3, 2), torch.tensor([0]), torch.tensor([[1, 2]]),
        ...               half.expand(1, 2), half.expand(1))
        >>> round(loss.exp().item(), 6)
        8.0
    """
    e = _entries(h, weight, target, ids, log_q, bias, scale, class_weight, ignore_index, positives, False)
    log_m = math.log(max(e.neg.shape[1], 1))
    corrected = e.pos - log_m - torch.where(target_log_q.isfinite(), target_log_q, float("nan")).reshape(e.pos.shape)
    return e.counted(
        e.over_targets(-F.logsigmoid(corrected)) + e.over_draws(-F.logsigmoid(-e.neg - _log_weight(e.log_q)))
    )


def one_vs_each(
    h: Tensor,
    weight: Tensor,
    target: Tensor,
    ids: Tensor,
    log_q: Tensor,
    bias: Tensor | None = None,
    *,
    scale: float = 1.0,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    positives: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Loss and mean denominator of every row: the one-vs-each bound of Titsias 2016, its sum estimated by the draws.

    Arguments and results as in `negative_sampling`.

    Example:
        >>> import torch
        >>> from samplex_cuda.reference.entry_loss import one_vs_each
        >>> loss, _ = one_vs_each(torch.zeros(1, 2), torch.zeros(3, 2), torch.tensor([0]), torch.tensor([[1, 2]]),
        ...                       torch.full((1, 2), 0.5).log())
        >>> round(loss.exp().item(), 6)  # two other classes, log 2 each
        4.0
    """
    e = _entries(h, weight, target, ids, log_q, bias, scale, class_weight, ignore_index, positives, True)
    terms = _log_weight(e.log_q).exp().unsqueeze(1) * -F.logsigmoid(
        e.pos.unsqueeze(2) - e.neg.unsqueeze(1)
    )  # [B, P, m]
    return e.counted(e.over_targets(torch.where(e.masked.unsqueeze(1), 0.0, terms).sum(2)))


def augment_reduce(
    h: Tensor,
    weight: Tensor,
    target: Tensor,
    ids: Tensor,
    log_q: Tensor,
    log_eta: Tensor,
    bias: Tensor | None = None,
    *,
    scale: float = 1.0,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    positives: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, mean denominator and ratio of every row: the bound of Ruiz et al. 2018 for the softmax.

    Arguments as in `negative_sampling`; log_eta is [B].

    Returns:
        loss [B], denom [B], ratio [B]: the estimated sum divided by eta, 1 for a row without targets.

    Example:
        >>> import torch
        >>> from samplex_cuda.reference.entry_loss import augment_reduce
        >>> log_q, log_eta = torch.full((1, 2), 0.5).log(), torch.tensor([3.0]).log()
        >>> loss, _, _ = augment_reduce(torch.zeros(1, 2), torch.zeros(3, 2), torch.tensor([0]),
        ...                             torch.tensor([[1, 2]]), log_q, log_eta)
        >>> round(loss.exp().item(), 6)  # at the best eta it is the softmax
        3.0
    """
    e = _entries(h, weight, target, ids, log_q, bias, scale, class_weight, ignore_index, positives, True)
    mean = torch.where(e.weight == 0, e.valid.to(e.share), e.share)
    mean = mean / mean.sum(1, keepdim=True).clamp_min(torch.finfo(mean.dtype).tiny)
    level = torch.where(e.valid, mean * e.pos, 0.0).sum(1, keepdim=True) + log_eta.unsqueeze(1)
    above = torch.where(e.masked, -float("inf"), e.neg + _log_weight(e.log_q) - level).exp()
    ratio = torch.where(e.valid, (e.pos - level).exp(), 0.0).sum(1) + above.sum(1)
    loss, denom = e.counted(e.weight.squeeze(1) * (log_eta - 1.0 + ratio))
    return loss, denom, torch.where(e.valid.any(1), ratio, 1.0).detach()
