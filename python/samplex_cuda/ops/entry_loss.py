"""The entry losses: fakes and autograd of `torch.ops.samplex.entry_loss` and its backward.

One op serves `negative_sampling`, `nce`, `one_vs_each` and `augment_reduce`; its `kind` says which. The op takes what
the kernels need and checks it; the functions of `samplex_cuda.functional` are the doors for people.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from samplex_cuda import _library  # noqa: F401  registers the ops
from samplex_cuda.ops.fused_loss import REDUCTIONS, LossPlan, acc_dtype, fake_gradients, fusion_of, loss_gradients

__all__ = ["KINDS", "entry_loss"]

KINDS = {"negative_sampling": 0, "nce": 1, "one_vs_each": 2, "augment_reduce": 3}
_NAMES = tuple(KINDS)
_WITH_RATIO = KINDS["augment_reduce"]


@torch.library.register_fake("samplex::entry_loss")
def _(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    ids: Tensor,
    log_q: Tensor,
    target_log_q: Tensor | None,
    log_eta: Tensor | None,
    bias: Tensor | None,
    class_weight: Tensor | None,
    known_offsets: Tensor | None,
    known_ids: Tensor | None,
    kind: int,
    scale: float,
    reg: float,
    ignore_index: int,
    reduction: int,
    need_grad: bool,
    sparse: bool,
) -> tuple[Tensor, ...]:
    batch, dim = hidden.shape
    none = reduction == REDUCTIONS["none"]
    targets = 1 if target.dim() == 1 else target.shape[1]
    # As `SavedLoss` of fused_loss_op.h: gradients, then a row loss, a denominator, a factor and a ratio.
    saved = (dim + targets + ids.shape[-1]) * batch if need_grad else 0
    saved += batch if none else 2 * batch + 1
    saved += batch if kind == _WITH_RATIO else 0
    shapes = [(batch,) if none else (), (saved,)]
    return tuple(hidden.new_empty(shape, dtype=acc_dtype(hidden.dtype)) for shape in shapes)


@torch.library.register_fake("samplex::entry_loss_bwd")
def _(
    grad_loss: Tensor,
    hidden: Tensor,
    target: Tensor,
    ids: Tensor,
    saved: Tensor,
    kind: int,
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
    upstream, kind, classes = grad_loss.contiguous(), KINDS[plan.op], plan.weight_shape[0]
    return loss_gradients(
        plan,
        need,
        tensors,
        upstream,
        lambda rows, with_bias: _bwd_op(upstream, *tensors, kind, classes, plan.reduction, rows, with_bias),
        with_ratio=kind == _WITH_RATIO,
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, target, ids = inputs[:4]
    bias_dtype = None if inputs[7] is None else inputs[7].dtype
    ctx.plan = LossPlan(_NAMES[inputs[11]], weight.shape, weight.dtype, bias_dtype, *inputs[15:18])
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(hidden, target, ids, output[1])


def _backward(ctx: Any, grad_loss: Tensor | None, grad_saved: Tensor | None) -> Any:
    if grad_saved is not None:
        raise RuntimeError(f"{ctx.plan.op}: only loss is differentiable")
    need = ctx.needs_input_grad
    d_hidden, d_weight, d_bias = _gradients(ctx.plan, (need[0], need[1], need[7]), ctx.saved_tensors, grad_loss)
    return (d_hidden, d_weight, None, None, None, None, None, d_bias) + (None,) * 10


torch.library.register_autograd("samplex::entry_loss", _backward, setup_context=_setup_context)


_op = torch.ops.samplex.entry_loss.default
_bwd_op = torch.ops.samplex.entry_loss_bwd.default


class _Eager(torch.autograd.Function):
    """The same formula for eager mode, by the shortest way: see `sampled_softmax`."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, rest: tuple[Any, ...]) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            loss, saved = _op(hidden, weight, *rest[:5], bias, *rest[5:])
        bias_dtype = None if bias is None else bias.dtype
        name, options = _NAMES[rest[8]], (*rest[12:], *fusion_of(weight))
        ctx.plan = LossPlan(name, weight.shape, weight.dtype, bias_dtype, *options)
        ctx.saved = saved
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, rest[0], rest[1])
        if rest[8] != _WITH_RATIO:
            return loss
        ratio = _ratio(saved, hidden)
        ctx.mark_non_differentiable(ratio)
        return loss, ratio

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor | None, *others: Tensor | None) -> Any:
        tensors = (*ctx.saved_tensors, ctx.saved)
        return (*_gradients(ctx.plan, ctx.needs_input_grad[:3], tensors, grad_loss), None)


def _ratio(saved: Tensor, hidden: Tensor) -> Tensor:
    # A copy: the few numbers a caller keeps shall not keep all gradients of the step alive.
    return saved[saved.shape[0] - hidden.shape[0] :].clone()


def entry_loss(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, rest: tuple[Any, ...], *, need_grad: bool
) -> tuple[Tensor, Tensor | None]:
    """`torch.ops.samplex.entry_loss` by the shortest way: the op itself under compile, a plain Function else.

    Args:
        hidden: [B, d].
        weight: [C, d].
        bias: [C] or None.
        rest: the op's other arguments in its order.
        need_grad: whether any of the three needs a gradient; also in `rest`.

    Returns:
        The loss, and for augment_reduce the ratio of each row, [B]: the estimate of its sum divided by eta.
    """
    with_ratio = rest[8] == _WITH_RATIO
    if torch.compiler.is_compiling():
        loss, saved = torch.ops.samplex.entry_loss(hidden, weight, *rest[:5], bias, *rest[5:])
    elif not need_grad:
        with torch._C._AutoDispatchBelowAutograd():
            loss, saved = _op(hidden, weight, *rest[:5], bias, *rest[5:])
    else:
        made = _Eager.apply(hidden, weight, bias, rest)
        return made if with_ratio else (made, None)
    return loss, _ratio(saved, hidden) if with_ratio else None
