"""The full softmax loss in chunks of classes: `samplex::full_softmax` and `full_softmax_bwd`, forward and backward.

The loop over chunks is that of `samplex_cuda.prediction`; a chunk is a GEMM and one fused pass of
`samplex_cuda.ops.predict`. The backward makes the logits a second time instead of keeping them: one more GEMM for a
[B, C] less.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from samplex_cuda.ops.fused_loss import acc_dtype
from samplex_cuda.ops.predict import predict_grad
from samplex_cuda.prediction import flat_targets, logit_chunks, row_blocks, softmax_sums
from samplex_cuda.tables import empty_table

__all__ = ["full_softmax"]


def _shares(
    target: Tensor, class_weight: Tensor | None, label_smoothing: float, num_classes: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row: what its targets weigh [B, P], what any class weighs [B], and the sum of both over all classes [B].

    With them the loss is `sum * lse - sum of target share * logit - class share * sum of class_weight * logit`.
    """
    valid = target >= 0
    count = valid.sum(1, keepdim=True)
    share = torch.where(valid, (1.0 - label_smoothing) / count.clamp(min=1), 0.0).to(dtype)
    every = torch.where(count.squeeze(1) > 0, label_smoothing / num_classes, 0.0).to(dtype)
    if class_weight is None:
        mass: float | Tensor = float(num_classes)
    else:
        share = share * class_weight.to(dtype)[target.clamp(min=0)]
        mass = class_weight.to(dtype).sum()
    return share, every, share.sum(1) + every * mass


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
) -> tuple[Tensor, Tensor]:
    num_classes = weight.shape[0]
    target, valid = flat_targets("full_softmax", target, ignore_index, num_classes)
    lse, positive, total = softmax_sums(
        hidden,
        weight,
        target,
        bias,
        scale,
        absolute,
        class_weight=class_weight,
        with_total=label_smoothing > 0.0,
        chunk_size=chunk_size or None,
    )
    share, every, whole = _shares(target, class_weight, label_smoothing, num_classes, torch.float64)
    # A difference of each target, not of the sums: at a confident row both are large and the loss is not.
    loss = torch.where(share != 0, share * (lse.unsqueeze(1) - positive), 0.0).sum(1)
    if total is not None:
        loss += (whole - share.sum(1)) * lse - every * total
    return torch.where(valid.any(1), loss, 0.0).to(acc_dtype(weight.dtype)), lse


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
) -> tuple[Tensor, Tensor, Tensor]:
    num_classes, dim = weight.shape
    batch, acc = hidden.shape[0], acc_dtype(weight.dtype)
    target, valid = flat_targets("full_softmax_bwd", target, ignore_index, num_classes)
    share, every, whole = _shares(target, class_weight, label_smoothing, num_classes, acc)
    # A row that does not count adds nothing, whatever its gradient is.
    grad = torch.where(valid.any(1), grad.to(acc), 0.0)
    coef, target_coef = grad * whole, grad.unsqueeze(1) * share
    smooth = grad * every if label_smoothing > 0.0 else None
    if class_weight is not None:
        class_weight = class_weight.to(acc)
    # Nor must the nan of an ignored row reach every row of the weight gradient by way of 0 * nan.
    h = torch.where(valid.any(1, keepdim=True), hidden, 0.0).to(acc)

    d_hidden = torch.zeros(batch if need_hidden else 0, dim, dtype=acc, device=hidden.device)
    d_weight = empty_table(
        num_classes if need_weight else 0, dim, device=hidden.device, dtype=weight.dtype, shared=False
    )
    bias_dtype = acc if bias is None else bias.dtype
    d_bias = torch.zeros(num_classes if need_bias else 0, dtype=acc, device=hidden.device)
    blocks = list(row_blocks(h, weight))
    # Over several blocks of rows the sums need a table of their own where the gradient is of a narrow type.
    several = len(blocks) > 1
    sums = torch.zeros(num_classes, dim, dtype=acc, device=hidden.device) if several and need_weight else None
    with torch.autocast(hidden.device.type, enabled=False):
        for rows, block, _ in blocks:
            for c in logit_chunks(block, weight, bias, scale, absolute, chunk_size=chunk_size or None):
                classes = slice(c.first, c.first + len(c.rows))
                predict_grad(
                    c.dots,
                    c.bias,
                    target[rows],
                    None if class_weight is None else class_weight[classes],
                    c.first,
                    c.scale,
                    c.absolute,
                    lse[rows],
                    coef[rows],
                    target_coef[rows],
                    None if smooth is None else smooth[rows],
                )
                if need_hidden:
                    d_hidden[rows].addmm_(c.dots, c.rows)
                if sums is not None:
                    sums[classes].addmm_(c.dots.t(), block)
                elif need_weight and weight.dtype == acc:
                    torch.mm(c.dots.t(), block, out=d_weight[classes])
                elif need_weight:
                    d_weight[classes] = c.dots.t() @ block
                if need_bias:
                    d_bias[classes] += c.dots.sum(0)
    if sums is not None:
        d_weight = sums.to(weight.dtype)
    elif batch == 0:
        d_weight.zero_()
    return d_hidden.to(hidden.dtype), d_weight, d_bias.to(bias_dtype)


@_op.register_fake
def _(hidden: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    rows = (hidden.shape[0],)
    return hidden.new_empty(rows, dtype=acc_dtype(weight.dtype)), hidden.new_empty(rows, dtype=torch.float64)


@_bwd_op.register_fake
def _(grad: Tensor, hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, *rest: Any) -> Any:
    need_hidden, need_weight, need_bias = rest[-3:]
    bias_dtype = acc_dtype(weight.dtype) if bias is None else bias.dtype
    return (
        hidden.new_empty((hidden.shape[0] if need_hidden else 0, hidden.shape[1])),
        weight.new_empty((weight.shape[0] if need_weight else 0, weight.shape[1])),
        weight.new_empty((weight.shape[0] if need_bias else 0,), dtype=bias_dtype),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    hidden, weight, target, bias, class_weight, *ctx.options = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(hidden, weight, target, bias, class_weight, output[1])


def _backward(ctx: Any, grad: Tensor, _: Any) -> Any:
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError("full_softmax: double backward (create_graph=True) is not supported")
    hidden, weight, target, bias, class_weight, lse = ctx.saved_tensors
    need = ctx.needs_input_grad
    asked = (need[0], need[1], need[3])
    found = _bwd_op(grad, hidden, weight, target, bias, class_weight, lse, *ctx.options, *asked)
    d_hidden, d_weight, d_bias = (value if wanted else None for value, wanted in zip(found, asked, strict=True))
    return (d_hidden, d_weight, None, d_bias) + (None,) * 6


_op.register_autograd(_backward, setup_context=_setup_context)


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
) -> Tensor:
    """Loss of each row, [B]; the arguments are those of `samplex_cuda.functional.full_softmax`, flat.

    Example:
        >>> import torch
        >>> from samplex_cuda.ops.full_softmax import full_softmax
        >>> h, weight, target = torch.zeros(1, 2), torch.zeros(4, 2), torch.tensor([[1]])
        >>> full_softmax(h, weight, target, None, None, 1.0, 0.0, -100, False, 0).exp()
        tensor([4.])
    """
    return _op(hidden, weight, target, bias, class_weight, scale, label_smoothing, ignore_index, absolute, chunk_size)[
        0
    ]
