"""The full softmax loss in chunks of classes: `samplex::full_softmax` and `full_softmax_bwd`, forward and backward.

The loop over chunks is that of `samplex_cuda.chunking`; a chunk is a GEMM and one fused pass of
`samplex_cuda.ops.predict`. In eager mode the forward pass keeps the logits of as many chunks as fit
`chunking.kept_bytes` and the backward pass computes the others a second time: one GEMM more instead of a [B, C].
The ops, which a compiled graph holds, keep none.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from samplex_cuda import _device, chunking
from samplex_cuda._checks import check_int, check_number, check_tensor, describe
from samplex_cuda.chunking import KeptLogits, cut, logit_chunks, row_blocks
from samplex_cuda.ops.loss_types import acc_dtype
from samplex_cuda.ops.predict import predict_buffer, predict_grad, predict_lse
from samplex_cuda.ops.transforms import refuse_forward_mode, refuse_functional
from samplex_cuda.prediction import flat_targets, mean_weight, softmax_sums, valid_targets
from samplex_cuda.products import add_product, product, splits_coefficients

__all__ = ["full_softmax"]


class _Options(NamedTuple):
    """The arguments of the op that are not tensors."""

    scale: float
    label_smoothing: float
    ignore_index: int
    absolute: bool
    chunk_size: int


def _bias_dtype(weight: Tensor, bias: Tensor | None) -> torch.dtype:
    return acc_dtype(weight.dtype) if bias is None else bias.dtype


def _shares(
    target: Tensor,
    valid: Tensor,
    class_weight: Tensor | None,
    label_smoothing: float,
    num_classes: int,
    target_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row: what its targets weigh [B, P], what any class weighs [B], and the sum of both over all classes [B].

    Targets are those of `flat_targets`; one out of range weighs nan.
    With them the loss is `sum * lse - sum of target share * logit - class share * sum of class_weight * logit`. All in
    fp64.
    """
    count = valid.sum(1, keepdim=True)
    own = 1.0 / count.clamp(min=1).double() if target_weight is None else target_weight.double()
    share = torch.where(valid, (1.0 - label_smoothing) * own, 0.0)
    every = (count.squeeze(1) > 0).double() * (label_smoothing / num_classes)  # torch.where would round to float32
    if class_weight is None:
        mass: float | Tensor = float(num_classes)
    else:
        class_weight = class_weight.double()
        share = share * class_weight[target.clamp(0, num_classes - 1)]
        mass = class_weight.sum()
    if _device.host_waits(target):  # a target out of range has not been refused: loss and gradient are nan
        share = torch.where(target == num_classes, torch.nan, share)
    return share, every, share.sum(1) + every * mass


class _Weights(NamedTuple):
    """What a row and its targets weigh in the loss; see `_shares`."""

    counts: Tensor  # bool [B]: the row has a target
    share: Tensor  # [B, P]
    every: Tensor  # [B]
    whole: Tensor  # [B]


def _check_op(
    op: str,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    options: _Options,
    target_weight: Tensor | None = None,
) -> None:
    """The checks of the op itself; the functional layer makes its own, with the names of its arguments."""
    acc = (torch.float32, torch.float64)
    check_tensor(op, "weight", weight, "[C, d]")
    if weight.dim() != 2 or weight.shape[0] < 1 or not weight.is_floating_point():
        raise ValueError(f"{op}: weight must be [C, d] floating point with C >= 1, got {describe(weight)}")
    check_tensor(op, "hidden", hidden, "[B, d]")
    if hidden.dim() != 2 or hidden.shape[1] != weight.shape[1] or hidden.dtype != weight.dtype:
        raise ValueError(f"{op}: hidden must be [B, {weight.shape[1]}] {weight.dtype}, got {describe(hidden)}")
    check_tensor(op, "target", target, "[B, P] int64")
    if target.dim() != 2 or target.shape[0] != hidden.shape[0] or target.dtype != torch.int64:
        raise ValueError(f"{op}: target must be [{hidden.shape[0]}, P] int64, got {describe(target)}")
    if target_weight is not None:
        check_tensor(op, "target_weight", target_weight, "[B, P]")
        if target_weight.shape != target.shape or not target_weight.is_floating_point():
            raise ValueError(
                f"{op}: target_weight must be {list(target.shape)} floating point, got {describe(target_weight)}"
            )
    for name, table in (("bias", bias), ("class_weight", class_weight)):
        if table is None:
            continue
        if check_tensor(op, name, table, "[C]").shape != weight.shape[:1] or table.dtype not in (weight.dtype, *acc):
            raise ValueError(f"{op}: {name} must be [{weight.shape[0]}] floating point, got {describe(table)}")
    check_number(op, "scale", options.scale, -math.inf)
    check_number(op, "label_smoothing", options.label_smoothing, 0.0, 1.0)
    check_int(op, "chunk_size", options.chunk_size, 0)


def _rows(
    op: str,
    target: Tensor,
    class_weight: Tensor | None,
    options: _Options,
    num_classes: int,
    target_weight: Tensor | None = None,
) -> tuple[Tensor, _Weights | None]:
    """Targets [B, P] with -1 for none, and the weights; None if every row has one target and weighs 1."""
    if (
        class_weight is None
        and target_weight is None
        and options.label_smoothing == 0.0
        and not _device.host_waits(target)
        and target.numel() == target.shape[0] > 0
    ):
        low, high = (int(bound) for bound in target.aminmax())
        if low >= 0 and high < num_classes and not low <= options.ignore_index <= high:
            return target.view(-1, 1), None
    target, valid = flat_targets(op, target, options.ignore_index, num_classes)
    shares = _shares(target, valid, class_weight, options.label_smoothing, num_classes, target_weight)
    return target.contiguous(), _Weights(valid.any(1), *shares)


def _total(target: Tensor, class_weight: Tensor | None, ignore_index: int, dtype: torch.dtype) -> Tensor:
    """What the loss of a batch is divided by in a mean; class_weight is None if targets have weights."""
    total = mean_weight(target, valid_targets(target, ignore_index), class_weight).sum().to(dtype)
    return torch.where(total == 0, 1.0, total)


def _forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    target: Tensor,
    weights: _Weights | None,
    options: _Options,
    keep: KeptLogits | None = None,
) -> tuple[Tensor, Tensor]:
    """Loss [B] and lse [B] fp64."""
    lse, positive, total = softmax_sums(
        hidden,
        weight,
        target,
        bias,
        options.scale,
        options.absolute,
        class_weight=class_weight,
        with_total=options.label_smoothing > 0.0,
        chunk_size=options.chunk_size or None,
        keep=keep,
    )
    return _row_losses(lse, positive, total, weights).to(acc_dtype(weight.dtype)), lse


def _row_losses(lse: Tensor, positive: Tensor, total: Tensor | None, weights: _Weights | None) -> Tensor:
    """Loss [B] from what `softmax_sums` gives."""
    if weights is None:
        return lse - positive.squeeze(1)
    # A difference of each target, not of the sums: at a confident row both are large and the loss is not.
    loss = torch.where(weights.share != 0, weights.share * (lse.unsqueeze(1) - positive), 0.0).sum(1)
    if total is not None:
        loss += (weights.whole - weights.share.sum(1)) * lse - weights.every * total
        loss = torch.where(weights.counts, loss, 0.0)
    return loss


def _even(count: int) -> int:
    """Columns of a 16-bit factor whose rows begin at multiples of 16 bytes, as cuBLAS wants them."""
    return -(-count // 8) * 8


def _parts_memory(weight: Tensor, rows: int, count: int) -> Tensor:
    """Memory for the coefficients of a chunk in two parts of 16 bits."""
    return predict_buffer(weight, 2 * rows, _even(count)).view(-1)


def _gradients(
    grad: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    lse: Tensor,
    target: Tensor,
    weights: _Weights | None,
    options: _Options,
    asked: tuple[bool, bool, bool],
    kept: KeptLogits | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of hidden, weight and bias, None for those not asked for; `grad` is [B]."""
    need_hidden, need_weight, need_bias = asked
    num_classes, dim = weight.shape
    batch, acc = hidden.shape[0], acc_dtype(weight.dtype)
    h, smooth = hidden, None
    if weights is None:
        coef = grad.to(acc).contiguous()
        target_coef = coef.unsqueeze(1)
    else:
        # A row that does not count adds nothing, whatever its gradient is.
        grad = torch.where(weights.counts, grad.to(acc), 0.0)
        coef, target_coef = grad * weights.whole.to(acc), (grad.unsqueeze(1) * weights.share.to(acc)).contiguous()
        if _device.host_waits(grad):  # a row whose loss nobody uses stays out of it, even one of weight nan
            coef = torch.where(grad == 0, 0.0, coef)
            target_coef = torch.where(grad.unsqueeze(1) == 0, 0.0, target_coef)
        if options.label_smoothing > 0.0:
            smooth = grad * weights.every.to(acc)
        # Nor must the nan of an ignored row reach every row of the weight gradient by way of 0 * nan.
        h = torch.where(weights.counts.unsqueeze(1), h, 0.0)
    class_weight = None if class_weight is None or smooth is None else class_weight.to(acc)

    blocks = list(row_blocks(h, weight))
    # Where the gradient is of a narrow type, a chunk of it is summed in `acc` first, over several blocks of rows all.
    wide, split, like = weight.dtype == acc, splits_coefficients(weight), h.new_empty(0, dtype=acc)
    d_hidden = torch.empty(batch, dim, dtype=acc, device=h.device) if need_hidden else None
    d_weight = predict_buffer(weight, num_classes, dim) if need_weight else None
    sums = predict_buffer(like, num_classes, dim) if need_weight and not wide and len(blocks) > 1 else d_weight
    d_bias = torch.empty(num_classes, dtype=acc, device=h.device) if need_bias else None
    if batch == 0:
        for table in (d_weight, sums, d_bias):
            if table is not None:
                table.zero_()
    for part, block, _ in blocks:
        mine = (cut(lse, part), cut(coef, part), cut(target_coef, part), None if smooth is None else cut(smooth, part))
        wanted, rows = cut(target, part), block.shape[0]
        d_block = None if d_hidden is None else cut(d_hidden, part)
        if split:  # the coefficients are two parts, one below the other
            factor, total = torch.cat((block, block)), None if d_block is None else d_block.new_empty(2 * rows, dim)
        else:
            factor, total = block.to(acc), d_block
        ones = None if d_bias is None else factor.new_ones(factor.shape[0])
        again = part.start > 0
        narrow: Tensor | None = None
        memory: Tensor | None = None
        for c in logit_chunks(
            block,
            weight,
            bias,
            options.scale,
            options.absolute,
            chunk_size=options.chunk_size or None,
            row=part.start,
            kept=kept,
            classes_first=True,
        ):
            count = len(c.rows)
            classes = slice(c.first, c.first + count)
            cw = None if class_weight is None else cut(class_weight, classes)
            coefs, parts = c.dots.t() if c.by_class else c.dots, None
            if split:
                memory = _parts_memory(weight, rows, count) if memory is None else memory
                parts = memory[: 2 * rows * _even(count)].view(2 * rows, -1)
                coefs = parts[:, :count]
            predict_grad(c.dots, c.bias, wanted, cw, c.first, c.scale, c.absolute, *mine, parts, c.by_class)
            if total is not None:
                add_product(coefs, c.rows.to(coefs.dtype), total, again=c.first > 0)
            if sums is not None:
                to = cut(sums, classes)
                if sums.dtype == acc:
                    add_product(coefs.t(), factor, to, again)
                else:
                    if narrow is None:
                        narrow = predict_buffer(like, count, dim)
                    to.copy_(product(coefs.t(), factor, narrow[:count]))
            if d_bias is not None and ones is not None:
                to = cut(d_bias, classes)
                if split:
                    add_product(ones.unsqueeze(0), coefs, to.unsqueeze(0), again)
                else:
                    torch.addmv(to, coefs.t(), ones, beta=int(again), out=to)
        if split and d_block is not None and total is not None:
            torch.add(total[:rows], total[rows:], out=d_block)
    if d_weight is not None and sums is not None and sums is not d_weight:
        d_weight.copy_(sums)
    return (
        None if d_hidden is None else d_hidden.to(hidden.dtype),
        d_weight,
        None if d_bias is None or bias is None else d_bias.to(bias.dtype),
    )


@torch.library.custom_op("samplex::full_softmax", mutates_args=())
def _op(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    scale: float,
    label_smoothing: float,
    ignore_index: int,
    absolute: bool,
    chunk_size: int,
    target_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    options = _Options(scale, label_smoothing, ignore_index, absolute, chunk_size)
    _check_op("full_softmax", hidden, weight, target, bias, class_weight, options, target_weight)
    target, weights = _rows("full_softmax", target, class_weight, options, weight.shape[0], target_weight)
    return _forward(hidden, weight, bias, class_weight, target, weights, options)


@torch.library.custom_op("samplex::full_softmax_bwd", mutates_args=())
def _bwd_op(
    grad: Tensor,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    lse: Tensor,
    scale: float,
    label_smoothing: float,
    ignore_index: int,
    absolute: bool,
    chunk_size: int,
    need_hidden: bool,
    need_weight: bool,
    need_bias: bool,
    target_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    options = _Options(scale, label_smoothing, ignore_index, absolute, chunk_size)
    _check_op("full_softmax_bwd", hidden, weight, target, bias, class_weight, options, target_weight)
    for name, t, dtype in (("grad", grad, acc_dtype(weight.dtype)), ("lse", lse, torch.float64)):
        if check_tensor("full_softmax_bwd", name, t, "[B]").shape != hidden.shape[:1] or t.dtype != dtype:
            raise ValueError(f"full_softmax_bwd: {name} must be [{hidden.shape[0]}] {dtype}, got {describe(t)}")
    target, weights = _rows("full_softmax_bwd", target, class_weight, options, weight.shape[0], target_weight)
    d_hidden, d_weight, d_bias = _gradients(
        grad, hidden, weight, bias, class_weight, lse, target, weights, options, (need_hidden, need_weight, need_bias)
    )
    return (
        hidden.new_empty(0, hidden.shape[1]) if d_hidden is None else d_hidden,
        weight.new_empty(0, weight.shape[1]) if d_weight is None else d_weight,
        weight.new_empty(0, dtype=_bias_dtype(weight, bias)) if d_bias is None else d_bias,
    )


@_op.register_fake
def _(hidden: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    rows = (hidden.shape[0],)
    return hidden.new_empty(rows, dtype=acc_dtype(weight.dtype)), hidden.new_empty(rows, dtype=torch.float64)


@_bwd_op.register_fake
def _(
    grad: Tensor,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    lse: Tensor,
    scale: float,
    label_smoothing: float,
    ignore_index: int,
    absolute: bool,
    chunk_size: int,
    need_hidden: bool,
    need_weight: bool,
    need_bias: bool,
    target_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        hidden.new_empty((hidden.shape[0] if need_hidden else 0, hidden.shape[1])),
        weight.new_empty((weight.shape[0] if need_weight else 0, weight.shape[1])),
        weight.new_empty((weight.shape[0] if need_bias else 0,), dtype=_bias_dtype(weight, bias)),
    )


class _Call(NamedTuple):
    """The arguments of the op."""

    hidden: Tensor
    weight: Tensor
    target: Tensor
    bias: Tensor | None
    class_weight: Tensor | None
    scale: float
    label_smoothing: float
    ignore_index: int
    absolute: bool
    chunk_size: int
    target_weight: Tensor | None = None

    @property
    def options(self) -> _Options:
        """Those that are not tensors."""
        return _Options(self.scale, self.label_smoothing, self.ignore_index, self.absolute, self.chunk_size)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    c, lse = _Call(*inputs), output[1]
    ctx.options, ctx.arguments = c.options, len(inputs)
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(c.hidden, c.weight, c.target, c.bias, c.class_weight, lse, c.target_weight)


def _no_double_backward() -> None:
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError("full_softmax: double backward (create_graph=True) is not supported")


def _backward(ctx: Any, grad: Tensor, _: Any) -> Any:
    _no_double_backward()
    hidden, weight, target, bias, class_weight, lse, target_weight = ctx.saved_tensors
    need = _Call(*ctx.needs_input_grad)
    asked = (need.hidden, need.weight, need.bias)
    found = _bwd_op(grad, hidden, weight, target, bias, class_weight, lse, *ctx.options, *asked, target_weight)
    d_hidden, d_weight, d_bias = (value if wanted else None for value, wanted in zip(found, asked, strict=True))
    return (d_hidden, d_weight, None, d_bias) + (None,) * (ctx.arguments - 4)


_op.register_autograd(_backward, setup_context=_setup_context)


class _OneChunk(NamedTuple):
    """A loss whose logits are one small chunk, kept from forward to backward: no loops around four products.

    At a thousand classes the loops take as long as a product does.
    """

    dots: Tensor  # [C, B]
    lse: Tensor  # [B] fp64

    @staticmethod
    def serves(hidden: Tensor, weight: Tensor, bias: Tensor | None, options: _Options) -> bool:
        """Whether it can be done so; for rows that all have one target and weigh 1."""
        rows, like = hidden.shape[0], torch.float32
        return (
            weight.dtype == hidden.dtype == like
            and (bias is None or (bias.dtype == like and bias.is_contiguous()))
            and options.chunk_size == 0
            and 4 * rows * weight.shape[0] <= chunking.chunk_bytes(hidden.device, "logits by class")
            and chunking.by_class(hidden)
        )

    @classmethod
    def forward(
        cls, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, options: _Options, total: int
    ) -> tuple[Tensor, _OneChunk]:
        """The summed loss / total, and what backward needs."""
        rows = hidden.shape[0]
        dots = product(weight, hidden.t(), predict_buffer(weight, weight.shape[0], rows))
        lse = torch.full((rows,), -math.inf, dtype=torch.float64)
        positive = hidden.new_empty(rows, 1)
        predict_lse(dots, bias, target, None, 0, options.scale, options.absolute, lse, positive, None, True)
        return ((lse - positive.view(-1)).sum() / total).to(hidden.dtype), cls(dots, lse)

    def backward(
        self,
        coef: float,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        options: _Options,
        asked: tuple[bool, bool, bool],
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """As `_gradients`, once: it overwrites the logits."""
        dots, coefs = self.dots, hidden.new_full(hidden.shape[:1], coef)
        predict_grad(
            dots, bias, target, None, 0, options.scale, options.absolute, self.lse, coefs, coefs.view(-1, 1),
            None, None, True,
        )  # fmt: skip
        return (
            product(dots.t(), weight, torch.empty_like(hidden)) if asked[0] else None,
            product(dots, hidden, predict_buffer(weight, *weight.shape)) if asked[1] else None,
            dots.sum(1) if asked[2] else None,
        )


class _Eager(torch.autograd.Function):
    """The same for eager mode: it may keep logits, reduces the loss, and has not the Python cost of a custom op."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        class_weight: Tensor | None,
        options: _Options,
        reduction: str,
        target_weight: Tensor | None,
    ) -> Tensor:
        ctx.target, ctx.weights = _rows("full_softmax", target, class_weight, options, weight.shape[0], target_weight)
        ctx.total = None
        if reduction == "mean":
            plain = ctx.weights is None
            acc = acc_dtype(weight.dtype)
            of_row = class_weight if target_weight is None else None
            ctx.total = len(target) if plain else _total(target, of_row, options.ignore_index, acc)
        ctx.kept = KeptLogits(hidden.device)
        ctx.options, ctx.one = options, None
        ctx.save_for_backward(hidden, weight, bias, class_weight)
        if ctx.weights is None and reduction != "none" and _OneChunk.serves(hidden, weight, bias, options):
            loss, ctx.one = _OneChunk.forward(hidden, weight, bias, ctx.target, options, ctx.total or 1)
            ctx.lse = ctx.one.lse
            return loss
        loss, ctx.lse = _forward(hidden, weight, bias, class_weight, ctx.target, ctx.weights, options, ctx.kept)
        return _reduced(loss, reduction, ctx.total)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        _no_double_backward()
        hidden, weight, bias, class_weight = ctx.saved_tensors
        one, ctx.one = ctx.one, None
        if one is not None:
            asked = ctx.needs_input_grad[:3]
            coef = float(grad) / (ctx.total or 1)
            found = one.backward(coef, hidden, weight, bias, ctx.target, ctx.options, asked)
            return (*found, None, None, None, None, None)
        if ctx.total is not None:
            grad = grad / ctx.total
        if grad.dim() == 0:
            grad = grad.expand(hidden.shape[0])
        asked = ctx.needs_input_grad[:3]
        rows = (ctx.lse, ctx.target, ctx.weights)
        found = _gradients(grad, hidden, weight, bias, class_weight, *rows, ctx.options, asked, ctx.kept)
        return (*found, None, None, None, None, None)


def _reduced(loss: Tensor, reduction: str, total: Tensor | int | None) -> Tensor:
    if total is not None:
        return loss.sum() / total
    return loss.sum() if reduction == "sum" else loss


def full_softmax(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    scale: float,
    label_smoothing: float,
    ignore_index: int,
    absolute: bool,
    chunk_size: int,
    reduction: str = "none",
    target_weight: Tensor | None = None,
) -> Tensor:
    """The loss, [B] or reduced; the arguments are those of `samplex_cuda.functional.full_softmax`, flat.

    Example:
        >>> import torch
        >>> from samplex_cuda.ops.full_softmax import full_softmax
        >>> h, weight, target = torch.zeros(1, 2), torch.zeros(4, 2), torch.tensor([[1]])
        >>> full_softmax(h, weight, target, None, None, 1.0, 0.0, -100, False, 0).exp()
        tensor([4.])
    """
    options = _Options(scale, label_smoothing, ignore_index, absolute, chunk_size)
    if not torch.compiler.is_compiling():
        refuse_forward_mode("full_softmax", hidden, weight, bias)
        needed = hidden.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
        if needed and torch.is_grad_enabled():
            refuse_functional("full_softmax")
            return _Eager.apply(hidden, weight, bias, target, class_weight, options, reduction, target_weight)
    loss = _op(hidden, weight, target, bias, class_weight, *options, target_weight)[0]
    of_row = class_weight if target_weight is None else None
    total = _total(target, of_row, ignore_index, loss.dtype) if reduction == "mean" else None
    return _reduced(loss, reduction, total)
