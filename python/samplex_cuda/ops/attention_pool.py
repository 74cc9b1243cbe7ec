"""Attention pooling: fakes and autograd of `torch.ops.samplex.attention_pool` and its backward.

The ops take what the kernels need and check it; `samplex_cuda.functional.attention_pool` is the public function.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from samplex_cuda._library import register_fake
from samplex_cuda.ops.loss_types import acc_dtype
from samplex_cuda.ops.row_gradients import TableGradient
from samplex_cuda.ops.transforms import refuse_forward_mode, refuse_functional

__all__ = ["attention_pool"]

_NAME = "attention_pool"


@register_fake("samplex::attention_pool")
def _(
    ids: Tensor, table: Tensor, query: Tensor, value: Tensor, need_grad: bool, need_vectors: bool, sparse: bool
) -> tuple[Tensor, Tensor, Tensor]:
    batch, length = ids.shape
    acc = acc_dtype(table.dtype)
    return (
        table.new_empty((batch,), dtype=acc),
        table.new_empty((batch if need_grad else 0, length, 2), dtype=acc),
        table.new_empty((batch if need_vectors else 0, 2, table.shape[1]), dtype=acc),
    )


@register_fake("samplex::attention_pool_bwd")
def _(
    grad: Tensor,
    ids: Tensor,
    query: Tensor,
    value: Tensor,
    coefs: Tensor,
    sums: Tensor,
    num_rows: int,
    need_rows: bool,
    need_vectors: bool,
) -> tuple[Tensor, ...]:
    dim = query.shape[0]
    capacity = torch.sym_min(ids.numel(), num_rows) if need_rows else 0
    return (
        query.new_empty((capacity,), dtype=torch.int64),
        query.new_empty((capacity, dim)),
        query.new_empty((1,), dtype=torch.int64),
        query.new_empty((dim if need_vectors else 0,)),
        query.new_empty((dim if need_vectors else 0,)),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ids, table, query, value, need_grad, _, sparse = inputs
    _, coefs, sums = output
    ctx.size, ctx.dtype, ctx.need_grad = table.shape, table.dtype, need_grad
    ctx.gradient = TableGradient(sparse, None if torch.compiler.is_compiling() else table)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(coefs, sums)
    ctx.save_for_backward(ids, query, value, coefs, sums)


def _backward(ctx: Any, grad: Tensor | None, grad_coefs: Tensor | None, grad_sums: Tensor | None) -> Any:
    if grad_coefs is not None or grad_sums is not None:
        raise RuntimeError("attention_pool: only pooled is differentiable")
    if grad is None:
        return (None,) * 7
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(f"{_NAME}: double backward (create_graph=True) is not supported")
    if not ctx.need_grad:
        raise RuntimeError(f"{_NAME}: backward needs need_grad=True in the forward call, got False")
    ids, query, value, coefs, sums = ctx.saved_tensors
    _, need_table, need_query, need_value, *_ = ctx.needs_input_grad
    need_vectors = need_query or need_value
    if need_vectors and sums.shape[0] != ids.shape[0]:
        raise RuntimeError(
            "attention_pool: gradients of query and value need need_vectors=True in the forward, got False"
        )
    row_ids, rows, count, d_query, d_value = torch.ops.samplex.attention_pool_bwd(
        grad.contiguous(), ids, query, value, coefs, sums, ctx.size[0], need_table, need_vectors
    )
    d_table = ctx.gradient(row_ids, rows, count, tuple(ctx.size), ctx.dtype) if need_table else None
    return None, d_table, d_query if need_query else None, d_value if need_value else None, None, None, None


torch.library.register_autograd("samplex::attention_pool", _backward, setup_context=_setup_context)


def attention_pool(ids: Tensor, table: Tensor, query: Tensor, value: Tensor, *, sparse: bool = True) -> Tensor:
    """softmax(E p) . (E v) over the table rows E of each list of ids; see `samplex_cuda.functional.attention_pool`.

    Args:
        ids: int64 [B, T], contiguous; -1 and -100 are padding.
        table: [S, d] in float32, float64, float16 or bfloat16, contiguous.
        query: p, [d] in float32 (float64 for float64).
        value: v, [d], the same.
        sparse: the form of the table's gradient.

    Returns:
        [B] in the dtype of query.

    Example:
        >>> import torch
        >>> from samplex_cuda.ops.attention_pool import attention_pool
        >>> table = torch.tensor([[0.0, 2.0], [0.0, 4.0]])
        >>> attention_pool(torch.tensor([[0, 1], [1, -1]]), table, torch.zeros(2), torch.tensor([0.0, 1.0])).tolist()
        [3.0, 4.0]
    """
    grad = torch.is_grad_enabled()
    if not torch.compiler.is_compiling():
        refuse_forward_mode(_NAME, table, query, value)
        if grad and (table.requires_grad or query.requires_grad or value.requires_grad):
            refuse_functional(_NAME)
    need_vectors = grad and (query.requires_grad or value.requires_grad)
    need_grad = need_vectors or (grad and table.requires_grad)
    if torch.compiler.is_compiling() and grad and sparse and table.requires_grad:
        from samplex_cuda._eager import captures_scalars, eager_attention_pool

        if not captures_scalars():  # as in `run_loss`
            return eager_attention_pool(ids, table, query, value)
    pooled, _, _ = torch.ops.samplex.attention_pool(ids, table, query, value, need_grad, need_vectors, sparse)
    return pooled
