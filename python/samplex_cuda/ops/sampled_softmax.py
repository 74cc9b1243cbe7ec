"""Fused sampled softmax: fakes and autograd of `torch.ops.samplex.sampled_softmax` and its backward.

The ops take what the kernels need and check it; `samplex_cuda.functional.sampled_softmax` is the door for people.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from samplex_cuda import _library  # noqa: F401  registers the ops
from samplex_cuda.ops.fused_loss import REDUCTIONS, LossPlan, acc_dtype, fake_gradients, fusion_of, loss_gradients

__all__ = ["sampled_softmax"]


_NAME = "sampled_softmax"


def _targets_per_row(target: Tensor) -> int:
    return 1 if target.dim() == 1 else target.shape[1]


@torch.library.register_fake("samplex::sampled_softmax")
def _(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    ids: Tensor,
    log_q: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    known_offsets: Tensor | None,
    known_ids: Tensor | None,
    scale: float,
    label_smoothing: float,
    ignore_index: int,
    reduction: int,
    absolute: bool,
    need_grad: bool,
    with_lse: bool,
    sparse: bool,
    need_hidden: bool = True,
) -> tuple[Tensor, ...]:
    batch, dim = hidden.shape
    entries = _targets_per_row(target) + ids.shape[-1]
    # As `Saved` of sampled_softmax_op.cpp: gradients, then a row loss, a denominator and a factor.
    saved = (dim + entries) * batch * (1 + with_lse) if need_grad else 0
    saved += batch if reduction == REDUCTIONS["none"] else 2 * batch + 1
    shapes = [(batch,) if reduction == REDUCTIONS["none"] else (), (batch,), (saved,)]
    return tuple(hidden.new_empty(shape, dtype=acc_dtype(hidden.dtype)) for shape in shapes)


@torch.library.register_fake("samplex::sampled_softmax_bwd")
def _(
    grad_loss: Tensor,
    grad_lse: Tensor | None,
    hidden: Tensor,
    target: Tensor,
    ids: Tensor,
    saved: Tensor,
    num_classes: int,
    reduction: int,
    with_lse: bool,
    need_rows: bool,
    with_bias: bool,
) -> tuple[Tensor, ...]:
    return fake_gradients(hidden, target, ids, num_classes, need_rows, with_bias)


def _gradients(
    plan: LossPlan,
    need: tuple[bool, bool, bool],
    tensors: tuple[Tensor, ...],
    with_lse: bool,
    grad_loss: Tensor | None,
    grad_lse: Tensor | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of hidden, weight and bias, as far as `need` says. `tensors` are hidden, target, ids and saved."""
    if grad_loss is None:
        if grad_lse is None:
            return None, None, None
        grad_loss = grad_lse.new_zeros(() if plan.reduction else grad_lse.shape)
    upstream, upstream_lse = grad_loss.contiguous(), None if grad_lse is None else grad_lse.contiguous()
    return loss_gradients(
        plan,
        need,
        tensors,
        upstream,
        lambda rows, with_bias: _bwd_op(
            upstream, upstream_lse, *tensors, plan.weight_shape[0], plan.reduction, with_lse, rows, with_bias
        ),
        with_lse=with_lse,
        grad_lse=upstream_lse,
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, target, ids, _, bias = inputs[:6]
    reduction, _, need_grad, with_lse, sparse = inputs[12:17]
    bias_dtype = None if bias is None else bias.dtype
    ctx.plan = LossPlan(_NAME, weight.shape, weight.dtype, bias_dtype, reduction, need_grad, sparse)
    ctx.with_lse = with_lse
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[2 if with_lse else 1 :])
    ctx.save_for_backward(hidden, target, ids, output[2])


def _backward(ctx: Any, grad_loss: Tensor | None, grad_lse: Tensor | None, grad_saved: Tensor | None) -> Any:
    if grad_saved is not None:
        raise RuntimeError("sampled_softmax: only loss and lse are differentiable")
    need = ctx.needs_input_grad
    d_hidden, d_weight, d_bias = _gradients(
        ctx.plan, (need[0], need[1], need[5]), ctx.saved_tensors, ctx.with_lse, grad_loss, grad_lse
    )
    return (d_hidden, d_weight, None, None, None, d_bias) + (None,) * 12


torch.library.register_autograd("samplex::sampled_softmax", _backward, setup_context=_setup_context)


_op = torch.ops.samplex.sampled_softmax.default
_bwd_op = torch.ops.samplex.sampled_softmax_bwd.default


class _Eager(torch.autograd.Function):
    """The same formula for eager mode, by the shortest way.

    `register_autograd`, `Function.setup_context` and calling the op through its own autograd key each cost 0.05 ms of
    Python a call, and every argument and output its share: together they would be a third of a step.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, rest: tuple[Any, ...]) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            loss, lse, saved = _op(hidden, weight, *rest[:3], bias, *rest[3:], ctx.needs_input_grad[0])
        reduction, _, need_grad, with_lse, sparse = rest[9:]
        bias_dtype = None if bias is None else bias.dtype
        ctx.plan = LossPlan(
            _NAME, weight.shape, weight.dtype, bias_dtype, reduction, need_grad, sparse, *fusion_of(weight)
        )
        ctx.with_lse = with_lse
        ctx.saved = saved
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, rest[0], rest[1])
        return (loss, lse) if with_lse else loss

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor | None, grad_lse: Tensor | None = None) -> Any:
        tensors = (*ctx.saved_tensors, ctx.saved)
        return (*_gradients(ctx.plan, ctx.needs_input_grad[:3], tensors, ctx.with_lse, grad_loss, grad_lse), None)


def sampled_softmax(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, rest: tuple[Any, ...], *, need_grad: bool, with_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """`torch.ops.samplex.sampled_softmax` by the shortest way: the op itself under compile, a plain Function else.

    Args:
        hidden: [B, d].
        weight: [C, d].
        bias: [C] or None.
        rest: the op's other arguments in its order.
        need_grad: whether any of the three needs a gradient; also in `rest`.
        with_lse: whether lse is asked for; also in `rest`.

    Returns:
        loss, and lse (None where it was not asked for).
    """
    if torch.compiler.is_compiling():
        loss, lse, _ = torch.ops.samplex.sampled_softmax(hidden, weight, *rest[:3], bias, *rest[3:])
        return loss, lse
    if not need_grad:
        with torch._C._AutoDispatchBelowAutograd():
            loss, lse, _ = _op(hidden, weight, *rest[:3], bias, *rest[3:])
        return loss, lse
    output = _Eager.apply(hidden, weight, bias, rest)
    return output if with_lse else (output, None)
