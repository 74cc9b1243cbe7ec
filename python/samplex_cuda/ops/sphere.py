"""Rows on the unit sphere: w / |w|, and gradients through the norm.

A row of zeros stays one, and has no gradient: there is no direction to take. The gradient of w / |w| is what is left of
the gradient g by the unit row, over |w|, once the part along the row is taken out: (g - u (u . g)) / |w|.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from samplex_cuda.ops.loss_types import acc_dtype

__all__ = ["inverse_norms", "project_rows_", "unit_rows"]


def inverse_norms(rows: Tensor) -> Tensor:
    """1 / |w| of rows [n, d], fp32 or fp64 [n]; 0 for a row of zeros.

    Example:
        >>> import torch
        >>> from samplex_cuda.ops.sphere import inverse_norms
        >>> inverse_norms(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
        tensor([0.2000, 0.0000])
    """
    norms = torch.linalg.vector_norm(rows, dim=-1, dtype=acc_dtype(rows.dtype))
    return torch.where(norms > 0, norms.reciprocal(), torch.where(norms == 0, 0.0, norms))


class _UnitRows(torch.autograd.Function):
    @staticmethod
    def forward(rows: Tensor) -> tuple[Tensor, Tensor]:
        inverse = inverse_norms(rows)
        return (rows * inverse.unsqueeze(-1)).to(rows.dtype), inverse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> Tensor:
        unit, inverse = ctx.saved_tensors
        wide = grad.to(inverse.dtype)
        along = (wide * unit).sum(-1, keepdim=True)
        return ((wide - along * unit) * inverse.unsqueeze(-1)).to(grad.dtype)

    @staticmethod
    def vmap(info: Any, in_dims: Any, rows: Tensor) -> Any:
        return _UnitRows.apply(rows.movedim(in_dims[0], 0)), (0, 0)


def unit_rows(rows: Tensor) -> Tensor:
    """Rows [*, d] over their length, differentiable; a row of zeros stays one, with gradient 0.

    Example:
        >>> import torch
        >>> from samplex_cuda.ops.sphere import unit_rows
        >>> unit_rows(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
        tensor([[0.6000, 0.8000],
                [0.0000, 0.0000]])
    """
    return _UnitRows.apply(rows)[0]


def project_rows_(rows: Tensor, row_ids: Tensor, weight: Tensor) -> None:
    """Takes the part along its class row out of each gradient row, in place.

    Args:
        rows: [n, d].
        row_ids: int64 [n]; rows of an id below 0 are not used by anyone.
        weight: [C, d].

    Example:
        >>> import torch
        >>> from samplex_cuda.ops.sphere import project_rows_
        >>> rows = torch.tensor([[1.0, 2.0]])
        >>> project_rows_(rows, torch.tensor([1]), torch.tensor([[0.0, 0.0], [4.0, 0.0]]))
        >>> rows
        tensor([[0., 2.]])
    """
    from samplex_cuda import chunking  # which takes `inverse_norms` from here

    size = max(rows.shape[0], 1) if torch.compiler.is_compiling() else chunking.rows_at_once(rows)
    for begin in range(0, rows.shape[0], size):
        part = rows[begin : begin + size]
        w = weight.detach()[row_ids[begin : begin + size].clamp(min=0)].to(rows.dtype)
        norm = (w * w).sum(1)
        along = torch.where(norm > 0, (part * w).sum(1) / torch.where(norm > 0, norm, 1.0), 0.0)
        part.addcmul_(w, along.unsqueeze(1), value=-1.0)
