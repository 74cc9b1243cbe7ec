"""The route "online softmax": each rank sums up the exponentials of its own classes, and three numbers per row travel.

For more draws than columns: the logits of a row stay where they were made.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from samplex_cuda.distributed.collectives import Everyone, Exchange
from samplex_cuda.distributed.step import Coefficients
from samplex_cuda.ops.loss_types import Form
from samplex_cuda.prediction import mean_weight, valid_targets

__all__ = ["online_softmax"]


def online_softmax(
    exchange: Exchange,
    everyone: Everyone,
    form: Form,
    absolute: bool,
    logits: Tensor,
    target: Tensor,
    ids: Tensor,
    log_q: Tensor,
    local_target: Tensor,
    local_ids: Tensor,
    class_weight: Tensor | None,
    weights: Tensor | None,
    reduction: str,
) -> Coefficients:
    """Sampled softmax of partial logits: loss of all rows, and derivatives by the products of this rank's entries.

    Args:
        exchange: the collectives.
        everyone: the batch.
        form: scale and what is ignored.
        absolute: whether the logit is |s|.
        logits: [R, P + m], products of this rank's entries.
        target: int64 [R, P], classes.
        ids: int64 [R, m] or [m].
        log_q: the shape of ids.
        local_target: int64 [R, P], -1 where another rank has the row.
        local_ids: the shape of ids.
        class_weight: [C].
        weights: [R], of the rows.
        reduction: "mean": the loss is divided by the sum of the weights; "sum"; "none": [R], a number for each row.
    """
    acc, targets = logits.dtype, target.shape[1]
    draws = logits.shape[1] - targets
    valid = valid_targets(target, form.ignore_index)
    # The same masks on every rank: targets and draws are known to all of them.
    drawn = ids.expand(target.shape[0], -1) if ids.dim() == 1 else ids
    masked = drawn == torch.where(valid[:, :1], target[:, :1], -1)
    for column in range(1, targets):
        masked |= drawn == torch.where(valid[:, column : column + 1], target[:, column : column + 1], -1)
    live = valid.any(1) & ~masked.all(1)
    here = torch.cat([(local_target >= 0) & valid, (local_ids >= 0) & ~masked], 1)
    scores = logits * form.scale
    slope = torch.full_like(scores, form.scale)
    if absolute:
        slope, scores = slope * scores.sign(), scores.abs()
    own = scores.clone()
    own[:, targets:] -= (log_q + math.log(max(draws, 1))).to(acc)
    own.masked_fill_(~here, -torch.inf)
    # What each target counts: its class weight over the number of targets of the row.
    share = valid.to(acc) / valid.sum(1, keepdim=True).clamp(min=1)
    if class_weight is not None:
        share = share * class_weight[target.clamp(0, class_weight.shape[0] - 1)].to(acc)
    most = own.amax(1)
    shift = torch.where(most == -torch.inf, 0.0, most)
    total = (own - shift.unsqueeze(1)).exp().sum(1)
    aimed = torch.where(here[:, :targets], scores[:, :targets] * share, 0.0).sum(1)
    parts = exchange.to_home(torch.stack([most, total, aimed], 1), everyone.place, everyone.rows)  # [world, B, 3]
    most = parts[:, :, 0].amax(0)
    shift = torch.where(most == -torch.inf, 0.0, most)
    total = (parts[:, :, 1] * (parts[:, :, 0] - shift).exp()).sum(0)
    lse, aimed = shift + total.log(), parts[:, :, 2].sum(0)
    counts = mean_weight(target, valid, class_weight).to(acc)  # [R]
    of_row = counts if weights is None else counts * weights.to(acc)
    mine = exchange.own(torch.stack([counts, live.to(acc)], 1), everyone.place, everyone.rows)
    rows = torch.where(mine[:, 1] > 0, mine[:, 0] * lse - aimed, 0.0)
    if weights is not None:
        rows = rows * exchange.own(weights.to(acc), everyone.place, everyone.rows)
    if reduction == "none":
        lse_all, loss = exchange.gather(everyone, [lse, rows], [0.0, 0.0])
    else:
        (lse_all,) = exchange.gather(everyone, [lse], [0.0])
        loss = exchange.stack(rows.sum()).sum()
    factor = loss.new_ones(())
    if reduction == "mean":
        size = of_row.sum()
        factor = torch.where(size == 0, 0.0, 1.0 / torch.where(size == 0, 1.0, size))
    coefs = (own - lse_all.unsqueeze(1)).exp() * counts.unsqueeze(1)
    coefs[:, :targets] -= torch.where(here[:, :targets], share, 0.0)
    scale = torch.where(live, factor if weights is None else factor * weights.to(acc), 0.0).unsqueeze(1)
    coefs = torch.where(here & live.unsqueeze(1), coefs * slope * scale, 0.0)
    return Coefficients(loss * factor, coefs[:, :targets].contiguous(), coefs[:, targets:].contiguous(), None)
