"""One training step of a sharded head: partial logits, the loss of their sum, partial gradients.

Each rank computes the logits of the classes it holds and zeros elsewhere; their sum over the ranks has the same bits on
any number of ranks. The fused losses then run unchanged, on a table of one column that holds these logits: entry j of
row b is class b * (P + m) + j of that table, and a draw that must not count gets the class of its row's first target,
which every loss masks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from samplex_cuda import _device
from samplex_cuda.distributed.collectives import Exchange
from samplex_cuda.distributed.layout import Layout
from samplex_cuda.losses import Loss
from samplex_cuda.ops.loss_types import Entries, Form, Inputs, LossGrad, Plan, Table, TableSink
from samplex_cuda.ops.row_gradients import entries
from samplex_cuda.ops.shard_rows import shard_hidden, shard_logits

__all__ = [
    "Coefficients",
    "StepResult",
    "entries_of",
    "logits_of",
    "loss_of_logits",
    "partial_hidden",
    "row_scaled",
    "run_step",
    "scaled",
    "slope_of_scale",
    "times",
]


_TILE, _TILES = 32, 16  # draws of a product at least, and products that all shared draws take at most, about


def logits_of(
    h: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, ids: Tensor, layout: Layout
) -> tuple[Tensor, Tensor, Tensor]:
    """Products h . w + b of targets and draws, 0 where another rank has the row.

    Args:
        h: [R, d].
        weight: [n, d], this rank's table.
        bias: [n].
        target: int64 [R, P], classes.
        ids: int64 [R, m], or [m] for all rows of h.
        layout: which classes the rows are.

    Returns:
        The products [R, P + m] in the accumulation type, and the local rows of target and ids, -1 for none.
    """
    if ids.dim() == 2:
        return shard_logits(h, weight, bias, target, ids, layout.num_classes, layout.step, layout.start)
    own, rows, _ = shard_logits(h, weight, bias, target, target[:, :0], layout.num_classes, layout.step, layout.start)
    local = layout.local(ids)
    if weight.shape[0] == 0:
        return torch.cat([own, own.new_zeros(h.shape[0], ids.shape[0])], 1), rows, local
    wide = h.to(own.dtype)
    if _in_tiles(wide, ids):
        found = own.new_zeros(h.shape[0], target.shape[1] + ids.shape[0])
        found[:, : target.shape[1]] = own
        for at, some in own_tiles(local):
            dots = torch.mm(wide, weight[some].to(own.dtype).t())
            if bias is not None:
                dots += bias[some].to(own.dtype)
            found.index_copy_(1, at + target.shape[1], dots[:, : at.shape[0]])
        return found, rows, local
    safe = local.clamp_min(0)
    dots = torch.mm(wide, weight[safe].to(own.dtype).t())
    if bias is not None:
        dots = dots + bias[safe].to(own.dtype)
    return torch.cat([own, torch.where(local >= 0, dots, 0.0)], 1), rows, local


def _tile(ids: Tensor) -> int:
    return max(_TILE, 1 << max(0, ids.shape[0] // _TILES - 1).bit_length())


def _in_tiles(wide: Tensor, ids: Tensor) -> bool:
    """Whether the products of queries [R, d] with shared draws [m] leave out the rows of other ranks."""
    if _device.host_waits(ids):
        return False  # how many rows are here is not known to the host
    return _keep_bits(*wide.shape, _tile(ids), wide.dtype, torch.get_num_threads())


@functools.lru_cache(maxsize=1024)
def _keep_bits(rows: int, dim: int, tile: int, dtype: torch.dtype, threads: int) -> bool:
    """Whether a row of a product has the same bits wherever it is in its tile: a matter of the BLAS library.

    A draw has another place among those of its rank on another number of ranks. Where this changes bits, whole products
    are made. Found out once for each shape.
    """
    g = torch.Generator().manual_seed(0)
    h, some, coefs = (torch.randn(n, k, generator=g, dtype=dtype) for n, k in ((rows, dim), (tile, dim), (rows, tile)))
    order = torch.randperm(tile, generator=g)
    logits, grads = torch.mm(h, some.t()), torch.mm(coefs.t(), h)
    moved = torch.mm(h, some[order].t()), torch.mm(coefs[:, order].contiguous().t(), h)
    return torch.equal(logits[:, order], moved[0]) and torch.equal(grads[order], moved[1])


def own_tiles(local: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The shared draws whose rows are here, in tiles of one size, which depends on the number of all draws alone.

    A product of a tile has then the same shape on any number of ranks, and so its columns have the same bits.

    Args:
        local: int64 [m], rows or -1.

    Returns:
        For each tile the places [k] of its draws, and rows [tile], of which those behind the first k fill up.
    """
    tile = _tile(local)
    for at in (local >= 0).nonzero().squeeze(1).split(tile):
        some = local[at]
        yield at, torch.nn.functional.pad(some, (0, tile - some.shape[0]))


class Coefficients(NamedTuple):
    """The loss of a step, and its derivatives by the products h . w of targets [R, P] and draws [R, m]."""

    loss: Tensor  # [] or [R]
    target: Tensor
    draws: Tensor
    extra: Tensor | None  # [R], what the loss returns besides


def loss_of_logits(
    loss: Loss,
    form: Form,
    logits: Tensor,
    target: Tensor,
    ids: Tensor,
    log_q: Tensor,
    class_weight: Tensor | None,
    target_log_q: Tensor | None,
    row_value: Tensor | None,
    need_grad: bool,
    target_weight: Tensor | None = None,
) -> Coefficients:
    """The loss of given products.

    Args:
        loss: which one.
        form: scale, reduction, what is ignored.
        logits: [R, P + m], `h . w + b` of targets and draws; -inf for a draw that must not count.
        target: int64 [R, P].
        ids: int64 [R, m] or [m].
        log_q: the shape of ids.
        class_weight: [C].
        target_log_q: [R, P].
        row_value: [R].
        need_grad: whether the derivatives are wanted.
        target_weight: [R, P], what each target weighs.
    """
    rows, entries_of = logits.shape
    targets = target.shape[1]
    draws = entries_of - targets
    device = logits.device
    number = torch.arange(rows * entries_of, device=device).view(rows, entries_of)
    valid = target != form.ignore_index
    if targets > 1:
        valid &= target != -100
    own = torch.where(valid, number[:, :targets], target)
    drawn = ids.expand(rows, draws) if ids.dim() == 1 else ids
    column = number[:, targets:]
    if loss.needs.excludes_target:
        # The class of the first target that counts stands for every draw that equals a target or is a known positive.
        hit = drawn == torch.where(valid[:, :1], target[:, :1], -1)  # draws are not negative
        first, any_valid = own, valid
        if targets > 1:
            first = own.gather(1, valid.to(torch.int8).argmax(1, keepdim=True))
            any_valid = valid.any(1, keepdim=True)
            hit |= ((drawn.unsqueeze(2) == target[:, 1:].unsqueeze(1)) & valid[:, 1:].unsqueeze(1)).any(2)
        masked = logits == -torch.inf
        masked[:, :targets] = False
        hit |= masked[:, targets:] & any_valid
        column = torch.where(hit, first, column)
        logits = logits.masked_fill(masked, 0.0)
    share = None
    if class_weight is not None:
        known = torch.cat([torch.where(valid, target, 0), drawn], 1)
        share = class_weight[known].reshape(-1)
    one = torch.ones(rows, 1, dtype=logits.dtype, device=device)
    table = logits.reshape(-1, 1)
    x = Inputs(
        one,
        table,
        None,
        own[:, 0].contiguous() if targets == 1 else own.contiguous(),
        column.contiguous(),
        (log_q.expand(rows, draws) if log_q.dim() == 1 else log_q).contiguous(),
        share,
        None,
        None,
        None if target_log_q is None else (target_log_q[:, 0] if targets == 1 else target_log_q).contiguous(),
        row_value,
        target_weight=None if target_weight is None else target_weight.reshape(own.shape if targets > 1 else -1),
    )
    made = loss.forward(x, form, need_grad, False)
    nothing = logits.new_empty(0)
    if not need_grad:
        return Coefficients(made.loss, nothing, nothing, made.ratio)
    plan = Plan(loss.name, table.shape[0], table.dtype, None, form.reduction, False, made.ratio is not None)
    upstream = torch.ones_like(made.loss)
    found = entries(LossGrad(plan, one, x.target, x.ids, made.saved, upstream, None), False)[1]
    return Coefficients(made.loss, found.coef_a, found.coef_b, made.ratio)


def partial_hidden(weight: Tensor, coefs: Coefficients, target: Tensor, ids: Tensor) -> Tensor:
    """What the local rows add to the gradient of h, [R, d] in the accumulation type.

    Args:
        weight: [n, d], this rank's table.
        coefs: of the step.
        target: int64 [R, P], local rows or -1.
        ids: int64 [R, m] or [m], local rows or -1.
    """
    if ids.dim() == 2:
        return shard_hidden(weight, coefs.target, coefs.draws, target, ids)
    total = shard_hidden(weight, coefs.target, coefs.draws[:, :0], target, target[:, :0])
    if weight.shape[0] == 0:
        return total
    if not _device.host_waits(ids):
        mine = (ids >= 0).nonzero().squeeze(1)
        return total.addmm_(coefs.draws[:, mine], weight[ids[mine]].to(total.dtype))
    local = torch.where(ids >= 0, coefs.draws, 0.0)
    return total.addmm_(local, weight[ids.clamp_min(0)].to(total.dtype))


def entries_of(coefs: Coefficients, hidden: Tensor, target: Tensor, ids: Tensor, with_bias: bool) -> Entries:
    """The gradient of this rank's rows, before it is summed by row.

    Args:
        coefs: of the step.
        hidden: [R, d], of all ranks.
        target: int64 [R, P], local rows or -1.
        ids: int64 [R, m] or [m], local rows or -1.
        with_bias: whether there is a bias to update.
    """
    if ids.dim() == 2:
        return Entries(target, coefs.target, hidden, ids, coefs.draws, hidden, None)
    bias, wide = coefs.draws.sum(0) if with_bias else None, hidden.to(coefs.draws.dtype)
    if _in_tiles(wide, ids):
        rows = wide.new_empty(int((ids >= 0).sum()), wide.shape[1])
        begin = 0
        for at, some in own_tiles(ids):
            of_draws = coefs.draws.new_zeros(coefs.draws.shape[0], some.shape[0])
            of_draws[:, : at.shape[0]] = coefs.draws[:, at]
            rows[begin : begin + at.shape[0]] = torch.mm(of_draws.t(), wide)[: at.shape[0]]
            begin += at.shape[0]
        mine = ids >= 0
        ids, bias = ids[mine], None if bias is None else bias[mine]
    else:
        rows = torch.mm(coefs.draws.t(), wide)
    return Entries(target, coefs.target, hidden, ids, torch.ones_like(rows[:, :1]), rows, bias)


def scaled(
    coefs: Coefficients, hidden: Tensor, target: Tensor, ids: Tensor, with_bias: bool
) -> Callable[[Tensor], Entries]:
    """`entries_of`, times the gradient [] of the loss."""
    return partial(times, entries_of(coefs, hidden, target, ids, with_bias))


def times(e: Entries, grad: Tensor) -> Entries:
    """The gradient of a table times a number []."""
    bias = None if e.bias_b is None else e.bias_b * grad
    return e._replace(coef_a=e.coef_a * grad, coef_b=e.coef_b * grad, bias_b=bias)


def row_scaled(
    coefs: Coefficients, hidden: Tensor, target: Tensor, ids: Tensor, with_bias: bool
) -> Callable[[Tensor], Entries]:
    """`entries_of` with every row times the gradient [R] of its loss."""

    def of_rows(grad: Tensor) -> Entries:
        rows = grad.unsqueeze(1)
        mine = coefs._replace(target=coefs.target * rows, draws=coefs.draws * rows)
        return entries_of(mine, hidden, target, ids, with_bias)

    return of_rows


def slope_of_scale(coefs: Coefficients, logits: Tensor) -> Tensor:
    """The derivative of the loss of each row [R] by the logarithm of the scale that all its products have.

    Args:
        coefs: of the step, by these products.
        logits: [R, P + m], of all ranks, without a bias.
    """
    all_coefs = torch.cat([coefs.target, coefs.draws], 1)
    return torch.where(all_coefs == 0.0, 0.0, all_coefs * logits).sum(1)  # a masked draw may be -inf


class StepResult(NamedTuple):
    """What the backward of a step needs: everything has been exchanged before."""

    loss: Tensor  # [] or [R], of all ranks
    entries: Callable[[Tensor], Entries]  # the gradient of this rank's table, from that of the loss
    d_hidden: Tensor  # [B, d], of this rank's rows
    exchange: Exchange | None = None  # for a loss of [R]
    place: Tensor | None = None  # of each row of everyone, see `Everyone`
    project: bool = False  # whether class rows are on the unit sphere: gradients along them are left out
    of_scale: Tensor | None = None  # [R], or [] with a loss of []: derivatives by the logarithm of a learned scale

    def unless(self, lost: Tensor | None) -> StepResult:
        """This step, or where `lost` bool [] a step that nobody overlooks: the loss is nan, and no row is updated."""
        if lost is None:
            return self
        make = self.entries

        def of_no_row(grad: Tensor) -> Entries:
            e = make(grad)
            return e._replace(ids_a=torch.where(lost, -1, e.ids_a), ids_b=torch.where(lost, -1, e.ids_b))

        of_scale = None if self.of_scale is None else torch.where(lost, 0.0, self.of_scale)
        hidden = torch.where(lost, 0.0, self.d_hidden)
        loss = torch.where(lost, torch.nan, self.loss)
        return self._replace(loss=loss, entries=of_no_row, d_hidden=hidden, of_scale=of_scale)

    def hidden(self, grad: Tensor) -> Tensor:
        """The gradient of this rank's rows from that of the loss, [] or [R]."""
        if grad.dim() and self.exchange is not None:
            grad = self.exchange.own(grad, self.place, self.d_hidden.shape[0]).unsqueeze(1)
        return self.d_hidden * grad


class _ExchangedLoss(torch.autograd.Function):
    """The loss of all ranks, differentiable in this rank's rows and table. Backward exchanges nothing."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        log_scale: Tensor | None,
        step: StepResult,
        sink: Any,
        name: str,
    ) -> Tensor:
        ctx.step, ctx.sink, ctx.name, ctx.version = step, sink, name, weight._version
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        ctx.size = tuple(weight.shape)
        ctx.save_for_backward(weight if step.project else None)
        return step.loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(f"{ctx.name}: double backward (create_graph=True) is not supported")
        step: StepResult = ctx.step
        need_hidden, need_weight, need_bias, need_scale = ctx.needs_input_grad[:4]
        of_hidden, of_weight, of_bias = ctx.dtypes
        d_scale = (step.of_scale * grad).sum() if need_scale and step.of_scale is not None else None
        d_hidden = step.hidden(grad).to(of_hidden) if need_hidden else None
        d_weight = d_bias = None
        if need_weight or need_bias:
            found = step.entries(grad)
            (on_sphere,) = ctx.saved_tensors
            table = Table(ctx.size, of_weight, of_bias, ctx.version, on_sphere)
            d_weight, d_bias = ctx.sink.deliver_entries(found, table, (need_weight, need_bias))
        return d_hidden, d_weight, d_bias, d_scale, None, None, None


def run_step(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    step: StepResult,
    sink: TableSink,
    name: str,
    log_scale: Tensor | None = None,
) -> Tensor:
    """The loss with its backward; `hidden` are this rank's rows, `log_scale` [] is that of a learned scale."""
    return _ExchangedLoss.apply(hidden, weight, bias, log_scale, step, sink, name)
