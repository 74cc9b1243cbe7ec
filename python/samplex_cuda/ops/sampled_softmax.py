"""Fused sampled softmax: fakes and autograd of `torch.ops.samplex.sampled_softmax` and its backward.

The ops take what the kernels need and check it; `samplex_cuda.functional.sampled_softmax` is the door for people.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

from samplex_cuda import _library  # noqa: F401  registers the ops

__all__ = ["keep_coalesced", "rows_to_coo", "sampled_softmax"]

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
    gradient is one of ours alone; a sum of two gradients is left as it is. Registered once per parameter.

    Example:
        >>> import torch
        >>> from samplex_cuda.ops.sampled_softmax import keep_coalesced
        >>> keep_coalesced(torch.zeros(3, 2, requires_grad=True))
    """
    if not getattr(parameter, "_samplex_keeps_coalesced", False):
        parameter.register_post_accumulate_grad_hook(_mark_coalesced)
        parameter._samplex_keeps_coalesced = True  # type: ignore[attr-defined]


def _acc(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


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
    absolute: bool,
    need_grad: bool,
    sparse: bool,
) -> tuple[Tensor, ...]:
    batch, dim = hidden.shape
    entries = target.shape[1] + ids.shape[-1]
    rows = batch if need_grad else 0
    pull = entries if label_smoothing > 0 else target.shape[1]
    shapes = [(batch,), (batch,), (batch,), (rows,), (rows, entries), (rows, pull), (rows, dim), (rows, dim)]
    return tuple(hidden.new_empty(shape, dtype=_acc(hidden.dtype)) for shape in shapes)


@torch.library.register_fake("samplex::sampled_softmax_bwd")
def _(
    grad_loss: Tensor,
    grad_lse: Tensor | None,
    hidden: Tensor,
    target: Tensor,
    ids: Tensor,
    total: Tensor,
    push: Tensor,
    pull: Tensor,
    d_push: Tensor,
    d_pull: Tensor,
    num_classes: int,
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


def rows_to_coo(row_ids: Tensor, rows: Tensor, count: Tensor, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
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
    torch._check(n >= 0)
    torch._check(n <= row_ids.shape[0])
    values = rows[:n].to(dtype)
    if not torch.compiler.is_compiling():
        _delivered.append(row_ids)
    return torch.sparse_coo_tensor(row_ids[:n].unsqueeze(0), values, size, check_invariants=False, is_coalesced=True)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, target, ids = inputs[:4]
    ctx.bias_dtype = None if inputs[5] is None else inputs[5].dtype
    ctx.weight_shape, ctx.weight_dtype = tuple(weight.shape), weight.dtype
    ctx.need_grad, ctx.sparse = inputs[13], inputs[14]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[2:])
    ctx.save_for_backward(hidden, target, ids, *output[3:])


def _backward(ctx: Any, grad_loss: Tensor | None, grad_lse: Tensor | None, *rest: Tensor | None) -> tuple[Any, ...]:
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError("sampled_softmax: double backward (create_graph=True) is not supported")
    if any(grad is not None for grad in rest):
        raise RuntimeError("sampled_softmax: only loss and lse are differentiable")
    hidden, target, ids, total, push, pull, d_push, d_pull = ctx.saved_tensors
    none: list[Any] = [None] * 15
    if grad_loss is None and grad_lse is None:
        return tuple(none)
    if not ctx.need_grad:
        raise RuntimeError("sampled_softmax: backward needs need_grad=True in the forward call, got False")
    if grad_loss is None:
        assert grad_lse is not None
        grad_loss = torch.zeros_like(grad_lse)
    need_hidden, need_weight = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
    need_bias = ctx.needs_input_grad[5]
    d_hidden, row_ids, row_grads, row_bias, count = torch.ops.samplex.sampled_softmax_bwd(
        grad_loss.contiguous(),
        None if grad_lse is None else grad_lse.contiguous(),
        hidden,
        target,
        ids,
        total,
        push,
        pull,
        d_push,
        d_pull,
        ctx.weight_shape[0],
        need_weight or need_bias,
        need_bias,
    )
    grads = none
    if need_hidden:
        grads[0] = d_hidden
    if need_weight:
        grads[1] = _deliver(ctx, row_ids, row_grads, count, ctx.weight_shape, ctx.weight_dtype)
    if need_bias:
        grads[5] = _deliver(ctx, row_ids, row_bias, count, ctx.weight_shape[:1], ctx.bias_dtype)
    return tuple(grads)


def _deliver(
    ctx: Any, row_ids: Tensor, rows: Tensor, count: Tensor, size: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    if ctx.sparse:
        return rows_to_coo(row_ids, rows, count, size, dtype)
    # Dense on request. Rows behind `count` carry id -1 and unspecified numbers; they all go to one row that is cut off.
    dense = rows.new_zeros((size[0] + 1, *size[1:]))
    dense.index_copy_(0, torch.where(row_ids < 0, size[0], row_ids), rows)
    return dense[: size[0]].to(dtype)


torch.library.register_autograd("samplex::sampled_softmax", _backward, setup_context=_setup_context)


class _Eager(torch.autograd.Function):
    """The same formula for eager mode: `register_autograd` costs 0.1 ms a call in Python, a tenth of a whole step."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        return torch.ops.samplex.sampled_softmax(*args)

    setup_context = staticmethod(_setup_context)
    backward = staticmethod(_backward)


def sampled_softmax(*args: Any) -> tuple[Tensor, ...]:
    """`torch.ops.samplex.sampled_softmax` by the shortest way: the op itself under compile, a plain Function else."""
    if torch.compiler.is_compiling():
        return torch.ops.samplex.sampled_softmax(*args)
    return _Eager.apply(*args)
