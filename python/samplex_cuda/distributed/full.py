"""The full softmax over a sharded table: each rank sums over its own classes, three numbers per row are exchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from samplex_cuda.distributed.collectives import Everyone
from samplex_cuda.distributed.rows import fixed_query
from samplex_cuda.ops.full_softmax import _gradients, _Options, _row_losses, _shares, _Weights
from samplex_cuda.ops.loss_types import acc_dtype
from samplex_cuda.ops.sphere import unit_rows
from samplex_cuda.prediction import softmax_sums

if TYPE_CHECKING:
    from samplex_cuda.distributed.head import ShardedClassifier

__all__ = ["full_step"]

Tables = tuple[Tensor | None, Tensor | None]


class _FullStep(NamedTuple):
    """What the backward of a step needs: everything has been exchanged before."""

    loss: Tensor  # [] or [R], of all ranks
    d_hidden: Tensor  # [B, d], of this rank's rows, for a gradient of 1
    own: Callable[[Tensor], Tensor]  # this rank's rows among those of everyone
    tables: Callable[[Tensor, tuple[bool, bool]], Tables]  # gradients of this rank's tables from that of the loss
    of_scale: Tensor | None = None  # [R], derivatives by the logarithm of a learned scale


class _ExchangedFull(torch.autograd.Function):
    """The loss of all ranks, differentiable in this rank's rows and table. Backward exchanges nothing."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, log_scale: Tensor | None, step: _FullStep
    ) -> Tensor:
        ctx.step, ctx.dtype = step, hidden.dtype
        return step.loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError("full_softmax: double backward (create_graph=True) is not supported")
        step: _FullStep = ctx.step
        rows = step.own(grad).unsqueeze(1) if grad.dim() else grad
        need_hidden, need_weight, need_bias, need_scale = ctx.needs_input_grad[:4]
        d_hidden = (step.d_hidden * rows).to(ctx.dtype) if need_hidden else None
        d_scale = (step.of_scale * grad).sum() if need_scale and step.of_scale is not None else None
        return d_hidden, *step.tables(grad, (need_weight, need_bias)), d_scale, None


@torch.no_grad()
def _exchanged(
    head: ShardedClassifier,
    weight: Tensor,
    everyone: Everyone,
    batch: dict[str, Tensor],
    asked: tuple[bool, bool],
    grad: bool,
) -> _FullStep:
    loss_of: Any = head.loss
    weight, exchange, layout = weight.detach(), head.exchange, head.layout
    bias = None if head.bias is None else head.bias.detach()
    h, target, acc = head._query(batch["h"]), batch["y"], acc_dtype(weight.dtype)
    by_target = batch.get("target_weight")
    smoothing = float(loss_of.label_smoothing)
    options = _Options(head.scale, smoothing, head.ignore_index, head.loss.absolute, 0)
    valid = head._valid(target)
    outside = (valid & ((target < 0) | (target >= head.num_classes))).any(1)  # nobody looks at numbers on a GPU
    known = torch.where(valid, target.clamp(0, head.num_classes - 1), -1)
    local = layout.local(known).contiguous()
    counts = _Weights(valid.any(1), *_shares(known, valid, head.class_weight, smoothing, head.num_classes, by_target))
    of_class = None if head.class_weight is None else head.class_weight[layout.classes(h.device)]
    lse = torch.full((h.shape[0],), -torch.inf, dtype=torch.float64, device=h.device)
    positive, total = torch.zeros(local.shape, dtype=acc, device=h.device), None
    if layout.rows:
        lse, positive, total = softmax_sums(
            h, weight, local, bias, head.scale, head.loss.absolute, class_weight=of_class, with_total=smoothing > 0.0
        )
    parts = [torch.where(local >= 0, positive, 0.0).double()]
    if smoothing > 0.0:
        parts.append((torch.zeros_like(lse) if total is None else total).unsqueeze(1))
    sums = exchange.sum_(torch.cat(parts, 1))
    lse = exchange.stack(lse).logsumexp(0)
    found = _row_losses(lse, sums[:, : local.shape[1]], sums[:, -1] if smoothing > 0.0 else None, counts)
    found = torch.where(outside, torch.nan, found).to(acc)
    factor = batch.get("sample_weight", torch.ones_like(found)).to(acc)
    lost = everyone.lost
    if lost is not None:  # a loss that nobody overlooks, and gradients of 0
        found = torch.where(lost, torch.nan, found)
    losses, loss = found * factor, (found * factor).sum()
    if head.reduction == "none":
        loss = losses
    elif head.reduction == "mean":
        size = (head._row_weight(target, by_target is not None).to(acc) * factor).sum()
        size = torch.where(size == 0, 1.0, size)
        loss, factor = loss / size, factor / size
    if lost is not None:
        factor = torch.where(lost, 0.0, factor)

    def gradients(of_rows: Tensor, wanted: tuple[bool, bool, bool]) -> Any:
        if layout.rows:
            return _gradients(of_rows, h, weight, bias, of_class, lse, local, counts, options, wanted)
        made = (torch.zeros_like(h), torch.zeros_like(weight), None if bias is None else torch.zeros_like(bias))
        return tuple(t if want else None for t, want in zip(made, wanted, strict=True))

    if not grad:
        return _FullStep(loss, h[:0], torch.Tensor.clone, lambda grad, wanted: (None, None))
    # With one gradient for the whole loss a single pass gives all three; otherwise the tables wait for their rows'.
    one = head.reduction != "none"
    d_hidden, d_weight, d_bias = gradients(factor, (True, one and asked[0], one and asked[1]))
    of_scale = None
    if head.log_scale is not None:  # a rank knows what its classes add, of all rows
        of_scale = exchange.sum_((d_hidden.to(acc) * h.to(acc)).sum(1))
    d_hidden = exchange.send_home(d_hidden.to(acc), everyone.place, everyone.rows)
    if head.encoder == "average":
        d_hidden *= exchange.world

    def tables(upstream: Tensor, wanted: tuple[bool, bool]) -> Tables:
        if not one:
            return gradients(factor * upstream, (False, *wanted))[1:]
        scaled = [t * upstream.to(t.dtype) if t is not None else None for t in (d_weight, d_bias)]
        return tuple(t if want else None for t, want in zip(scaled, wanted, strict=True))  # type: ignore[return-value]

    return _FullStep(loss, d_hidden, lambda t: exchange.own(t, everyone.place, everyone.rows), tables, of_scale)


def full_step(
    head: ShardedClassifier, everyone: Everyone, batch: dict[str, Tensor], rows: Tensor, grad: bool
) -> Tensor:
    """The full softmax loss of the rows of all ranks: [], or [R] with `reduction="none"`.

    Args:
        head: the head.
        everyone: of the batch.
        batch: h [R, d] and y [R, P] of all ranks, and what else there is.
        rows: [B, d], this rank's rows.
        grad: whether gradients are wanted.
    """
    weight, bias = unit_rows(head.weight) if head.normalize else head.weight, head.bias
    asked = (weight.requires_grad, bias is not None and bias.requires_grad)
    step = _exchanged(head, weight, everyone, batch, asked, grad)
    return _ExchangedFull.apply(fixed_query(head, rows), weight, bias, head.log_scale, step) if grad else step.loss
