"""The symmetric softmax of a batch: fakes and autograd of the op, and the three products around it.

One matrix of products serves both directions: softmaxes over its rows and its columns, then one matrix of gradients.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from samplex_cuda import _device
from samplex_cuda._checks import op_error
from samplex_cuda._library import register_fake
from samplex_cuda.ops.loss_types import acc_dtype
from samplex_cuda.ops.transforms import differentiated_twice, refuse_forward_mode, transformed
from samplex_cuda.products import product

__all__ = ["MOST_ROWS", "PairMasks", "symmetric_softmax"]

_NAME = "symmetric_softmax"
MOST_ROWS = 65535

_forward = torch.ops.samplex.symmetric_softmax.default
_bwd = torch.ops.samplex.symmetric_softmax_bwd.default


class PairMasks(NamedTuple):
    """Which pairs take no part, and what is added to the scores of the others; contiguous, or None."""

    labels: Tensor | None = None  # int64 [B]
    known_offsets: Tensor | None = None  # int64 [B + 1]
    known_ids: Tensor | None = None  # int64 [n], labels
    key_shift: Tensor | None = None  # [B] like the products
    query_shift: Tensor | None = None  # [B]


@register_fake("samplex::symmetric_softmax")
def _(
    dots: Tensor,
    labels: Tensor | None,
    known_offsets: Tensor | None,
    known_ids: Tensor | None,
    key_shift: Tensor | None,
    query_shift: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    batch = dots.shape[0]
    return dots.new_empty((batch,)), dots.new_empty((batch,)), dots.new_empty((batch,))


@register_fake("samplex::symmetric_softmax_bwd")
def _(
    grad: Tensor,
    dots: Tensor,
    labels: Tensor | None,
    known_offsets: Tensor | None,
    known_ids: Tensor | None,
    key_shift: Tensor | None,
    query_shift: Tensor | None,
    row_lse: Tensor,
    column_lse: Tensor,
    scale: float,
) -> Tensor:
    return torch.empty_like(dots)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    dots, *masks, scale = inputs
    ctx.scale = scale
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(dots, *masks, *output[1:])


def _backward(ctx: Any, grad: Tensor | None, *others: Tensor | None) -> Any:
    if grad is None:
        return (None,) * 7
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(f"{_NAME}: double backward (create_graph=True) is not supported")
    return _bwd(grad.contiguous(), *ctx.saved_tensors, ctx.scale), None, None, None, None, None, None


torch.library.register_autograd("samplex::symmetric_softmax", _backward, setup_context=_setup_context)


class _Step(torch.autograd.Function):
    """Products, softmaxes and, backward, both gradients from one matrix."""

    @staticmethod
    def forward(queries: Tensor, keys: Tensor, masks: PairMasks, scale: float) -> tuple[Tensor, ...]:
        dots = _products(queries, keys)
        return (*_forward(dots, *masks, scale), dots)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        queries, keys, masks, scale = inputs
        _, row_lse, column_lse, dots = output
        ctx.scale = scale
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(row_lse, column_lse, dots)
        ctx.save_for_backward(queries, keys, dots, *masks, row_lse, column_lse)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *others: Tensor | None) -> Any:
        if grad is None:
            return None, None, None, None
        queries, keys, *rest = ctx.saved_tensors
        if differentiated_twice(queries) or differentiated_twice(keys):
            raise RuntimeError(f"{_NAME}: double backward (torch.func.grad of a gradient) is not supported")
        if torch.is_grad_enabled() and not transformed():
            raise RuntimeError(f"{_NAME}: double backward (create_graph=True) is not supported")
        need = ctx.needs_input_grad
        with torch.no_grad():
            coefs = _bwd(grad.contiguous(), *rest, ctx.scale)
            d_queries = _rows(coefs, keys) if need[0] else None
            return d_queries, _rows(coefs.t(), queries) if need[1] else None, None, None


def _products(queries: Tensor, keys: Tensor) -> Tensor:
    acc = acc_dtype(keys.dtype)
    out = torch.empty(queries.shape[0], keys.shape[0], dtype=acc, device=keys.device)
    if queries.dtype == acc or not _device.multiplies_narrow(keys):
        queries, keys = queries.to(acc), keys.to(acc)
    return product(queries, keys.t(), out)


def _rows(coefs: Tensor, rows: Tensor) -> Tensor:
    """coefs @ rows in the dtype of rows; sums in that of coefs."""
    out = torch.empty(coefs.shape[0], rows.shape[1], dtype=coefs.dtype, device=rows.device)
    return product(coefs, rows.to(coefs.dtype), out).to(rows.dtype)


def symmetric_softmax(queries: Tensor, keys: Tensor, masks: PairMasks, scale: float) -> Tensor:
    """The losses [B] of each query against the keys and each key against the queries, half of each.

    Args:
        queries: [B, d], contiguous.
        keys: [B, d] of the same dtype, contiguous; row i belongs to query i.
        masks: see `PairMasks`.
        scale: of the products.

    Returns:
        [B] in float32 (float64 for float64), differentiable in queries and keys.

    Example:
        >>> import torch
        >>> from samplex_cuda.ops.symmetric_softmax import PairMasks, symmetric_softmax
        >>> symmetric_softmax(torch.zeros(2, 3), torch.zeros(2, 3), PairMasks(), 1.0).exp()
        tensor([2., 2.])
    """
    if torch.compiler.is_compiling():
        acc = acc_dtype(keys.dtype)
        with torch.autocast(keys.device.type, enabled=False):
            dots = queries.to(acc) @ keys.to(acc).t()
        loss: Tensor = torch.ops.samplex.symmetric_softmax(dots, *masks, scale)[0]
        return loss
    refuse_forward_mode(_NAME, queries, keys)
    try:
        return _Step.apply(queries, keys, masks, scale)[0]
    except RuntimeError as error:
        raise op_error(error) from None
