"""The routes on which each rank computes the loss of its own rows: class rows travel, queries stay.

"rows_to_queries": a rank fetches the rows of its targets and draws. "shared_rows": the rows of shared draws are summed
over the ranks, each of which has some of them, and only the rows of targets are fetched.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from samplex_cuda.distributed.collectives import Everyone
from samplex_cuda.distributed.fetch import fetch, give_back
from samplex_cuda.distributed.rows import key_of_rows
from samplex_cuda.distributed.step import StepResult, loss_of_logits, times
from samplex_cuda.heads.classifier import LossSpec
from samplex_cuda.ops.loss_types import Entries, Inputs, LossGrad, Plan, acc_dtype
from samplex_cuda.ops.row_gradients import row_gradients
from samplex_cuda.prediction import mean_weight

if TYPE_CHECKING:
    from samplex_cuda.distributed.head import ShardedClassifier

__all__ = ["OWN_ROWS", "own_rows_step"]

OWN_ROWS = ("rows_to_queries", "shared_rows")  # the routes of this file


def own_rows_step(head: ShardedClassifier, spec: LossSpec, everyone: Everyone, batch: dict[str, Tensor]) -> StepResult:
    """One step of a head whose route is "rows_to_queries" or "shared_rows".

    Args:
        head: the head.
        spec: of its loss.
        everyone: of the batch.
        batch: this rank's h [B, d], y [B, P], and what else there is.
    """
    run = _rows_to_queries if head.route == "rows_to_queries" else _shared_rows
    return run(head, spec, everyone, batch)


def _totals(
    head: ShardedClassifier, losses: Tensor, target: Tensor, weights: Tensor, overflow: Tensor
) -> tuple[Tensor, Tensor]:
    """The loss of all ranks, and what gradients of the sum are multiplied by."""
    flat = target.squeeze(1) if target.shape[1] == 1 else target
    counts = mean_weight(flat, head._valid(flat), head.class_weight).to(losses.dtype) * weights
    total = head.exchange.stack(torch.stack([(losses * weights).sum(), counts.sum(), overflow.to(losses.dtype)])).sum(0)
    scale = torch.ones_like(total[0])
    if head.reduction == "mean":
        scale = torch.where(total[1] == 0, 0.0, 1.0 / torch.where(total[1] == 0, 1.0, total[1]))
    loss = total[0] * scale
    # More rows than there is room for: a loss that nobody overlooks, and no update.
    lost = total[2] > 0
    return torch.where(lost, torch.nan, loss), torch.where(lost, 0.0, scale)


def _draw(
    head: ShardedClassifier, spec: LossSpec, batch: dict[str, Tensor], key: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    h, target = batch["h"], batch["y"]
    flat = target[:, 0] if target.shape[1] == 1 else target
    draw, target_log_q = head._draw(spec, h, flat, batch.get("features"), batch.get("context"), key)
    log_q = draw.log_q.double() if head.weight.dtype is torch.float64 else draw.log_q
    return draw.ids, log_q, target_log_q


def _encoded(head: ShardedClassifier, d_hidden: Tensor, scale: Tensor) -> Tensor:
    return d_hidden.to(scale.dtype) * (scale * head.exchange.world if head.encoder == "average" else scale)


def _rows_to_queries(
    head: ShardedClassifier, spec: LossSpec, everyone: Everyone, batch: dict[str, Tensor]
) -> StepResult:
    weight, bias, exchange = head.weight.detach(), head.bias, head.exchange
    h, target = batch["h"], batch["y"]
    ids, log_q, target_log_q = _draw(head, spec, batch, key_of_rows(head.sampler, everyone, exchange.rank))
    valid = head._valid(target)
    classes = torch.cat([torch.where(valid, target, -1).reshape(-1), ids.reshape(-1)])
    found = fetch(exchange, head.layout, weight, None if bias is None else bias.detach(), classes,
                  target.shape[1] + ids.shape[1])  # fmt: skip
    # The loss as it is, on the table of the rows that came.
    at_target = torch.where(valid, found.place[: target.numel()].view(target.shape), -100)
    share = None
    if head.class_weight is not None:
        share = head.class_weight.new_zeros(max(1, found.rows.shape[0]) + 1)
        to = torch.where(classes >= 0, found.place, share.shape[0] - 1)  # the last place is cut off
        share = share.index_copy_(0, to, head.class_weight[classes.clamp_min(0)])[:-1]
    single = target.shape[1] == 1
    table = found.rows if found.rows.shape[0] else found.rows.new_zeros(1, weight.shape[1])
    of_rows = found.bias if found.bias is None or found.bias.shape[0] else found.bias.new_zeros(1)
    x = Inputs(
        h.contiguous(), table, of_rows, (at_target[:, 0] if single else at_target).contiguous(),
        found.place[target.numel() :].view(ids.shape), log_q, share, None, None, target_log_q, None,
    )  # fmt: skip
    form = spec.rows._replace(ignore_index=-100)
    made = spec.loss.forward(x, form, True, True)
    weights = batch.get("sample_weight", torch.ones_like(made.loss)).to(made.loss.dtype)
    loss, scale = _totals(head, made.loss, target, weights, found.overflow)
    dtype = None if of_rows is None else of_rows.dtype
    plan = Plan(spec.loss.name, table.shape[0], weight.dtype, dtype, form.reduction)
    with_bias = bias is not None
    rows = row_gradients(LossGrad(plan, x.hidden, x.target, x.ids, made.saved, weights, None), True, with_bias)
    # [n, d] with what the bias gets behind it, in the places of the rows that came.
    grads = rows.row_grads.new_zeros(table.shape[0] + 1, weight.shape[1] + with_bias)
    values = torch.cat([rows.row_grads, rows.row_bias.unsqueeze(1)], 1) if with_bias else rows.row_grads
    grads.index_copy_(0, torch.where(rows.row_ids < 0, table.shape[0], rows.row_ids), values)
    mine = give_back(exchange, found, grads[: found.rows.shape[0]])
    whole = _entries(mine, found.asked, scale, weight.shape[1], with_bias)
    return StepResult(loss, partial(times, whole), _encoded(head, rows.d_hidden, scale))


def _entries(mine: Tensor, asked: Tensor, scale: Tensor, dim: int, with_bias: bool) -> Entries:
    """Gradients [S, d (+ 1)] of rows of this rank."""
    empty = mine[:0, :dim]
    bias = (mine[:, -1] * scale).contiguous() if with_bias else None
    coef = torch.ones_like(mine[:, :1]) * scale
    return Entries(asked[:0].unsqueeze(1), empty[:, :1], empty, asked, coef, mine[:, :dim].contiguous(), bias)


def _shared_rows(head: ShardedClassifier, spec: LossSpec, everyone: Everyone, batch: dict[str, Tensor]) -> StepResult:
    weight, exchange, layout = head.weight.detach(), head.exchange, head.layout
    bias: Any = None if head.bias is None else head.bias.detach()
    h, target = batch["h"], batch["y"]
    acc, dim, with_bias = acc_dtype(weight.dtype), weight.shape[1], bias is not None
    ids, log_q, target_log_q = _draw(head, spec, batch, everyone.key)  # the same ids on every rank
    local = layout.local(ids)
    shared = torch.zeros(ids.shape[0], dim + with_bias, dtype=acc, device=weight.device)
    if weight.shape[0]:
        safe = local.clamp_min(0)
        own = weight[safe].to(acc)
        own = torch.cat([own, bias[safe].to(acc).unsqueeze(1)], 1) if with_bias else own
        shared = torch.where(local.unsqueeze(1) >= 0, own, 0.0)
    exchange.sum_(shared)
    valid = head._valid(target)
    found = fetch(exchange, layout, weight, bias, torch.where(valid, target, -1).reshape(-1), target.shape[1])
    wide, place = h.to(acc), found.place.view(target.shape)
    rows = found.rows if found.rows.shape[0] else found.rows.new_zeros(1, dim)
    at_draws = torch.mm(wide, shared[:, :dim].t())
    at_target = torch.stack([(wide * rows[place[:, j]].to(acc)).sum(1) for j in range(target.shape[1])], 1)
    if with_bias:
        of_rows = found.bias if found.bias is not None and found.bias.shape[0] else bias.new_zeros(1)
        at_draws, at_target = at_draws + shared[:, -1], at_target + of_rows[place].to(acc)
    at_target = torch.where(valid, at_target, 0.0)
    coefs = loss_of_logits(
        spec.loss, spec.rows, torch.cat([at_target, at_draws], 1), target, ids, log_q, head.class_weight,
        None if target_log_q is None else target_log_q.reshape(target.shape), None, True,
    )  # fmt: skip
    weights = batch.get("sample_weight", torch.ones_like(coefs.loss)).to(coefs.loss.dtype)
    loss, scale = _totals(head, coefs.loss, target, weights, found.overflow)
    of_target, of_draws = coefs.target * weights.unsqueeze(1), coefs.draws * weights.unsqueeze(1)
    of_target = torch.where(valid, of_target, 0.0)
    d_hidden = torch.mm(of_draws, shared[:, :dim])
    grads = wide.new_zeros(rows.shape[0], dim + with_bias)
    for j in range(target.shape[1]):
        d_hidden += of_target[:, j : j + 1] * rows[place[:, j]].to(acc)
        term = of_target[:, j : j + 1] * wide
        term = torch.cat([term, of_target[:, j : j + 1]], 1) if with_bias else term
        grads.index_add_(0, place[:, j], term)
    mine = give_back(exchange, found, grads[: found.rows.shape[0]])
    sums = torch.mm(of_draws.t(), wide)
    sums = exchange.sum_(torch.cat([sums, of_draws.sum(0).unsqueeze(1)], 1) if with_bias else sums)
    both, asked = torch.cat([mine, sums]), torch.cat([found.asked, local])
    whole = _entries(both, asked, scale, dim, with_bias)
    return StepResult(loss, partial(times, whole), _encoded(head, d_hidden, scale))
