"""Fused sampled softmax: fakes and autograd of `torch.ops.samplex.sampled_softmax` and its backward.

The ops take what the kernels need and check it; `samplex_cuda.functional.sampled_softmax` is the door for people.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import torch
from torch import Tensor

from samplex_cuda import _library  # noqa: F401  registers the ops

__all__ = ["REDUCTIONS", "keep_coalesced", "rows_to_coo", "sampled_softmax"]

REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}

# Row ids of the last gradients made here. Holding them keeps their memory from being used again, so that a gradient
# whose indices lie at the same address is one of ours. A few, for weight and bias of a few heads.
_delivered: deque[Tensor] = deque(maxlen=8)


def _mark_coalesced(parameter: Tensor) -> None:
    grad = parameter.grad
    if grad is None or not grad.is_sparse or grad.is_coalesced():
        return
    address = grad._indices().data_ptr()
    if any(address == row_ids.data_ptr() and grad._nnz() <= row_ids.numel() for row_ids in _delivered):
        grad._coalesced_(True)


def keep_coalesced(parameter: Tensor) -> None:
    """Let `parameter.grad` say that it is coalesced when it is.

    Autograd's accumulation makes a shallow copy of a sparse gradient and forgets the flag on the way, so every
    optimizer would sort and sum the rows once more. A hook after the accumulation puts the flag back, where the
    gradient is one of ours alone; a sum of two gradients is left as it is. Registered once per parameter; what is not a
    leaf, or needs no gradient, is left alone.

    Example:
        >>> import torch
        >>> from samplex_cuda.ops.sampled_softmax import keep_coalesced
        >>> keep_coalesced(torch.zeros(3, 2, requires_grad=True))
    """
    if getattr(parameter, "_samplex_keeps_coalesced", False):
        return
    if parameter.is_leaf and parameter.requires_grad:
        parameter.register_post_accumulate_grad_hook(_mark_coalesced)
        parameter._samplex_keeps_coalesced = True  # type: ignore[attr-defined]


def _acc(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


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
) -> tuple[Tensor, ...]:
    batch, dim = hidden.shape
    entries = _targets_per_row(target) + ids.shape[-1]
    # As `Saved` of sampled_softmax_op.cpp: gradients, then a row loss, a denominator and a factor.
    saved = (dim + entries) * batch * (1 + with_lse) if need_grad else 0
    saved += batch if reduction == REDUCTIONS["none"] else 2 * batch + 1
    shapes = [(batch,) if reduction == REDUCTIONS["none"] else (), (batch,), (saved,)]
    return tuple(hidden.new_empty(shape, dtype=_acc(hidden.dtype)) for shape in shapes)


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
    acc = _acc(hidden.dtype)
    entries = target.numel() + ids.numel()
    capacity = torch.sym_min(entries, num_classes) if need_rows else 0
    return (
        torch.empty_like(hidden),
        hidden.new_empty((capacity,), dtype=torch.int64),
        hidden.new_empty((capacity, hidden.shape[1]), dtype=acc),
        hidden.new_empty((capacity if with_bias else 0,), dtype=acc),
        hidden.new_empty((1,), dtype=torch.int64),
    )


def rows_to_coo(
    row_ids: Tensor, rows: Tensor, count: Tensor, size: tuple[int, ...], dtype: torch.dtype | None
) -> Tensor:
    """Fixed-size row gradients as a coalesced sparse COO tensor. The only step of a backward that waits for the device.

    Args:
        row_ids: int64 [n], the first `count` ascending and distinct.
        rows: [n, ...], one gradient row each.
        count: int64 [1].
        size: shape of the whole (dense) gradient.
        dtype: of the result.

    Example:
        >>> import torch
        >>> from samplex_cuda.ops.sampled_softmax import rows_to_coo
        >>> ids, rows = torch.tensor([1, 4, -1]), torch.tensor([[1.0], [2.0], [0.0]])
        >>> rows_to_coo(ids, rows, torch.tensor([2]), (6, 1), torch.float32).to_dense().flatten().tolist()
        [0.0, 1.0, 0.0, 0.0, 2.0, 0.0]
    """
    n = count.item()
    if torch.compiler.is_compiling():
        torch._check(n >= 0)
        torch._check(n <= row_ids.shape[0])
    else:
        _delivered.append(row_ids)
    values = rows[:n]
    if dtype is not rows.dtype:
        values = values.to(dtype)
    return torch.sparse_coo_tensor(row_ids[:n].unsqueeze(0), values, size, check_invariants=False, is_coalesced=True)


class _Plan(NamedTuple):
    """What the backward needs to know besides tensors."""

    weight_shape: torch.Size
    weight_dtype: torch.dtype
    bias_dtype: torch.dtype | None
    reduction: int
    need_grad: bool
    with_lse: bool
    sparse: bool


def _gradients(
    plan: _Plan,
    need: tuple[bool, bool, bool],
    tensors: tuple[Tensor, ...],
    grad_loss: Tensor | None,
    grad_lse: Tensor | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of hidden, weight and bias, as far as `need` says. `tensors` are hidden, target, ids and saved."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError("sampled_softmax: double backward (create_graph=True) is not supported")
    if grad_loss is None:
        if grad_lse is None:
            return None, None, None
        grad_loss = grad_lse.new_zeros(() if plan.reduction else grad_lse.shape)
    if not plan.need_grad:
        raise RuntimeError("sampled_softmax: backward needs need_grad=True in the forward call, got False")
    need_hidden, need_weight, need_bias = need
    d_hidden, row_ids, row_grads, row_bias, count = _bwd_op(
        grad_loss.contiguous(),
        None if grad_lse is None else grad_lse.contiguous(),
        *tensors,
        plan.weight_shape[0],
        plan.reduction,
        plan.with_lse,
        need_weight or need_bias,
        need_bias,
    )
    deliver = rows_to_coo if plan.sparse else _rows_to_dense
    return (
        d_hidden if need_hidden else None,
        deliver(row_ids, row_grads, count, plan.weight_shape, plan.weight_dtype) if need_weight else None,
        deliver(row_ids, row_bias, count, plan.weight_shape[:1], plan.bias_dtype) if need_bias else None,
    )


def _rows_to_dense(
    row_ids: Tensor, rows: Tensor, count: Tensor, size: tuple[int, ...], dtype: torch.dtype | None
) -> Tensor:
    # Rows behind `count` carry id -1 and unspecified numbers; they all go to one row that is cut off.
    dense = rows.new_zeros((size[0] + 1, *size[1:]))
    dense.index_copy_(0, torch.where(row_ids < 0, size[0], row_ids), rows)
    return dense[: size[0]].to(dtype)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, target, ids, _, bias = inputs[:6]
    reduction, _, need_grad, with_lse, sparse = inputs[12:17]
    bias_dtype = None if bias is None else bias.dtype
    ctx.plan = _Plan(weight.shape, weight.dtype, bias_dtype, reduction, need_grad, with_lse, sparse)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[2 if with_lse else 1 :])
    ctx.save_for_backward(hidden, target, ids, output[2])


def _backward(ctx: Any, grad_loss: Tensor | None, grad_lse: Tensor | None, grad_saved: Tensor | None) -> Any:
    if grad_saved is not None:
        raise RuntimeError("sampled_softmax: only loss and lse are differentiable")
    need = ctx.needs_input_grad
    d_hidden, d_weight, d_bias = _gradients(
        ctx.plan, (need[0], need[1], need[5]), ctx.saved_tensors, grad_loss, grad_lse
    )
    return (d_hidden, d_weight, None, None, None, d_bias) + (None,) * 11


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
            loss, lse, saved = _op(hidden, weight, *rest[:3], bias, *rest[3:])
        reduction, _, need_grad, with_lse, sparse = rest[9:]
        bias_dtype = None if bias is None else bias.dtype
        ctx.plan = _Plan(weight.shape, weight.dtype, bias_dtype, reduction, need_grad, with_lse, sparse)
        ctx.saved = saved
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, rest[0], rest[1])
        return (loss, lse) if with_lse else loss

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor | None, grad_lse: Tensor | None = None) -> Any:
        tensors = (*ctx.saved_tensors, ctx.saved)
        return (*_gradients(ctx.plan, ctx.needs_input_grad[:3], tensors, grad_loss, grad_lse), None)


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
