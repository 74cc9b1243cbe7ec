"""Fused negative sampling: fakes and autograd of `torch.ops.samplex.negative_sampling` and its backward.

The ops take what the kernels need and check it; `samplex_cuda.functional.negative_sampling` is the door for people.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from samplex_cuda import _library  # noqa: F401  registers the ops
from samplex_cuda.ops.fused_loss import REDUCTIONS, LossPlan, acc_dtype, fake_gradients, fusion_of, loss_gradients

__all__ = ["negative_sampling"]

_NAME = "negative_sampling"


@torch.library.register_fake("samplex::negative_sampling")
def _(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    ids: Tensor,
    log_q: Tensor,
    target_log_q: Tensor | None,
    bias: Tensor | None,
    class_weight: Tensor | None,
    scale: float,
    reg: float,
    ignore_index: int,
    reduction: int,
    need_grad: bool,
    sparse: bool,
) -> tuple[Tensor, ...]:
    batch, dim = hidden.shape
    none = reduction == REDUCTIONS["none"]
    # As `SavedLoss` of fused_loss_op.h: gradients, then a row loss, a denominator and a factor.
    saved = (dim + 1 + ids.shape[-1]) * batch if need_grad else 0
    saved += batch if none else 2 * batch + 1
    shapes = [(batch,) if none else (), (saved,)]
    return tuple(hidden.new_empty(shape, dtype=acc_dtype(hidden.dtype)) for shape in shapes)


@torch.library.register_fake("samplex::negative_sampling_bwd")
def _(
    grad_loss: Tensor,
    hidden: Tensor,
    target: Tensor,
    ids: Tensor,
    saved: Tensor,
    num_classes: int,
    reduction: int,
    need_rows: bool,
    with_bias: bool,
) -> tuple[Tensor, ...]:
    return fake_gradients(hidden, target, ids, num_classes, need_rows, with_bias)


def _gradients(
    plan: LossPlan, need: tuple[bool, bool, bool], tensors: tuple[Tensor, ...], grad_loss: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of hidden, weight and bias, as far as `need` says. `tensors` are hidden, target, ids and saved."""
    if grad_loss is None:
        return None, None, None
    upstream = grad_loss.contiguous()
    return loss_gradients(
        plan,
        need,
        tensors,
        upstream,
        lambda rows, with_bias: _bwd_op(upstream, *tensors, plan.weight_shape[0], plan.reduction, rows, with_bias),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, target, ids, _, _, bias = inputs[:7]
    bias_dtype = None if bias is None else bias.dtype
    ctx.plan = LossPlan(_NAME, weight.shape, weight.dtype, bias_dtype, *inputs[11:14])
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(hidden, target, ids, output[1])


def _backward(ctx: Any, grad_loss: Tensor | None, grad_saved: Tensor | None) -> Any:
    if grad_saved is not None:
        raise RuntimeError("negative_sampling: only loss is differentiable")
    need = ctx.needs_input_grad
    d_hidden, d_weight, d_bias = _gradients(ctx.plan, (need[0], need[1], need[6]), ctx.saved_tensors, grad_loss)
    return (d_hidden, d_weight, None, None, None, None, d_bias) + (None,) * 7


torch.library.register_autograd("samplex::negative_sampling", _backward, setup_context=_setup_context)


_op = torch.ops.samplex.negative_sampling.default
_bwd_op = torch.ops.samplex.negative_sampling_bwd.default


class _Eager(torch.autograd.Function):
    """The same formula for eager mode, by the shortest way: see `sampled_softmax`."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, rest: tuple[Any, ...]) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            loss, saved = _op(hidden, weight, *rest[:4], bias, *rest[4:])
        reduction, need_grad, sparse = rest[8:]
        bias_dtype = None if bias is None else bias.dtype
        ctx.plan = LossPlan(
            _NAME, weight.shape, weight.dtype, bias_dtype, reduction, need_grad, sparse, *fusion_of(weight)
        )
        ctx.saved = saved
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, rest[0], rest[1])
        return loss

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor | None) -> Any:
        tensors = (*ctx.saved_tensors, ctx.saved)
        return (*_gradients(ctx.plan, ctx.needs_input_grad[:3], tensors, grad_loss), None)


def negative_sampling(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, rest: tuple[Any, ...], *, need_grad: bool
) -> Tensor:
    """`torch.ops.samplex.negative_sampling` by the shortest way: the op itself under compile, a plain Function else.

    Args:
        hidden: [B, d].
        weight: [C, d].
        bias: [C] or None.
        rest: the op's other arguments in its order.
        need_grad: whether any of the three needs a gradient; also in `rest`.

    Returns:
        The loss.
    """
    if torch.compiler.is_compiling():
        return torch.ops.samplex.negative_sampling(hidden, weight, *rest[:4], bias, *rest[4:])[0]
    if not need_grad:
        with torch._C._AutoDispatchBelowAutograd():
            return _op(hidden, weight, *rest[:4], bias, *rest[4:])[0]
    return _Eager.apply(hidden, weight, bias, rest)
