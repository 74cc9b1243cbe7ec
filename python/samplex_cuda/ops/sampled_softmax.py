"""Fused sampled softmax: fakes and autograd of `torch.ops.samplex.sampled_softmax` and its backward.

The ops take what the kernels need and check it; `samplex_cuda.functional.sampled_softmax` is the door for people.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

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


def rows_to_coo(row_ids: Tensor, rows: Tensor, count: Tensor, size: Sequence[int], dtype: torch.dtype) -> Tensor:
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


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, target, ids, _, bias = inputs[:6]
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.weight_shape, ctx.weight_dtype = weight.shape, weight.dtype
    ctx.reduction, _, ctx.need_grad, ctx.with_lse, ctx.sparse = inputs[12:17]
    ctx.set_materialize_grads(False)
    if ctx.with_lse:
        ctx.mark_non_differentiable(output[2])
    else:
        ctx.mark_non_differentiable(output[1], output[2])
    ctx.save_for_backward(hidden, target, ids, output[2])


def _backward(ctx: Any, grad_loss: Tensor | None, grad_lse: Tensor | None, grad_saved: Tensor | None) -> Any:
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError("sampled_softmax: double backward (create_graph=True) is not supported")
    if grad_saved is not None:
        raise RuntimeError("sampled_softmax: only loss and lse are differentiable")
    if grad_loss is None and grad_lse is None:
        return (None,) * 17
    if not ctx.need_grad:
        raise RuntimeError("sampled_softmax: backward needs need_grad=True in the forward call, got False")
    hidden, target, ids, saved = ctx.saved_tensors
    if grad_loss is None:
        assert grad_lse is not None
        grad_loss = grad_lse.new_zeros(() if ctx.reduction else grad_lse.shape)
    need = ctx.needs_input_grad
    need_weight, need_bias = need[1], need[5]
    d_hidden, row_ids, row_grads, row_bias, count = _bwd_op(
        grad_loss.contiguous(),
        None if grad_lse is None else grad_lse.contiguous(),
        hidden,
        target,
        ids,
        saved,
        ctx.weight_shape[0],
        ctx.reduction,
        ctx.with_lse,
        need_weight or need_bias,
        need_bias,
    )
    d_weight = _deliver(ctx, row_ids, row_grads, count, ctx.weight_shape, ctx.weight_dtype) if need_weight else None
    d_bias = _deliver(ctx, row_ids, row_bias, count, ctx.weight_shape[:1], ctx.bias_dtype) if need_bias else None
    return (d_hidden if need[0] else None, d_weight, None, None, None, d_bias) + (None,) * 11


def _deliver(
    ctx: Any, row_ids: Tensor, rows: Tensor, count: Tensor, size: Sequence[int], dtype: torch.dtype
) -> Tensor:
    if ctx.sparse:
        return rows_to_coo(row_ids, rows, count, size, dtype)
    # Dense on request. Rows behind `count` carry id -1 and unspecified numbers; they all go to one row that is cut off.
    dense = rows.new_zeros((size[0] + 1, *size[1:]))
    dense.index_copy_(0, torch.where(row_ids < 0, size[0], row_ids), rows)
    return dense[: size[0]].to(dtype)


torch.library.register_autograd("samplex::sampled_softmax", _backward, setup_context=_setup_context)


_op = torch.ops.samplex.sampled_softmax.default
_bwd_op = torch.ops.samplex.sampled_softmax_bwd.default


class _Eager(torch.autograd.Function):
    """The same formula for eager mode, by the shortest way.

    `register_autograd` and `Function.setup_context` each cost 0.05 ms a call in Python, and calling the op under its
    own autograd key as much again: together a fifth of a step.
    """

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        with torch._C._AutoDispatchBelowAutograd():
            output = _op(*args)
        _setup_context(ctx, args, output)
        return output

    backward = staticmethod(_backward)


def sampled_softmax(*args: Any) -> tuple[Tensor, ...]:
    """`torch.ops.samplex.sampled_softmax` by the shortest way: the op itself under compile, a plain Function else."""
    if torch.compiler.is_compiling():
        return torch.ops.samplex.sampled_softmax(*args)
    if not args[14]:  # need_grad
        with torch._C._AutoDispatchBelowAutograd():
            return _op(*args)
    return _Eager.apply(*args)
