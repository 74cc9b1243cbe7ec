"""Products with class rows: the one place that knows in which type factors are multiplied.

On a CPU both factors have the type of the result, float32 or float64; float32 factors are multiplied by our own kernels
where these are faster than torch's (`_native.panels_beat_blas`). On a GPU factors of 16 bits are not up-cast, and
sums run in float32, so that tensor cores do the work:

- h in the type of the table: as it is. Products of 16-bit numbers are exact in float32.
- float32 h and a bfloat16 table: h as the sum of three bfloat16 numbers, which is exact, and the class rows three
  times; with few rows both in float32, since the copies would take longer than the products.
- float32 coefficients and a bfloat16 table: as the sum of two bfloat16 numbers, which keeps 16 of their 24 digits.
- float16 has too small a range for parts: where a factor is float32, both are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from samplex_cuda import _device, _native
from samplex_cuda.ops.predict import predict_product

__all__ = ["add_product", "class_factor", "needs_copy", "product", "row_factor", "splits_coefficients", "wide_dtype"]

_PARTS = 3  # of 8 digits: as many as float32 has
_LEAST_WORK = 1 << 18  # multiplications for which our kernels are worth packing a factor
_LEAST_ROWS = 128  # that are worth three copies of the class rows instead of one


def wide_dtype(h: Tensor, weight: Tensor) -> torch.dtype:
    """What the products of rows h with class rows are summed in: at least float32."""
    return torch.promote_types(torch.promote_types(h.dtype, weight.dtype), torch.float32)


def row_factor(h: Tensor, weight: Tensor) -> Tensor:
    """Rows h [B, d] as the left factor of products with the rows of weight [C, d]; see `class_factor`.

    Example:
        >>> import torch
        >>> from samplex_cuda.products import row_factor
        >>> row_factor(torch.ones(2, 3), torch.ones(4, 3, dtype=torch.bfloat16)).dtype
        torch.float32
    """
    wide = wide_dtype(h, weight)
    if wide == torch.float64 or weight.dtype == wide or not _device.multiplies_narrow(h):
        return h.to(wide)
    if h.dtype == weight.dtype:
        return h
    return _in_parts(h.float()) if weight.dtype == torch.bfloat16 and h.shape[0] >= _LEAST_ROWS else h.to(wide)


def _in_parts(h: Tensor) -> Tensor:
    """[B, 3 d] bfloat16 whose three parts add up to h [B, d] float32."""
    parts = torch.empty(h.shape[0], _PARTS, h.shape[1], dtype=torch.bfloat16, device=h.device)
    rest = h
    for i in range(_PARTS):
        parts[:, i].copy_(rest)
        if i == 0:
            rest = (rest - parts[:, 0]).nan_to_num_(0.0)  # inf - inf: nothing is left of an infinity
        elif i + 1 < _PARTS:
            rest.sub_(parts[:, i])
    return parts.view(h.shape[0], -1)


def class_factor(rows: Tensor, factor: Tensor, memory: Tensor | None) -> Tensor:
    """Class rows [n, d] to be multiplied, transposed, with what `row_factor` made.

    Args:
        rows: [n, d].
        factor: [B, d], or [B, 3 d] in parts.
        memory: [at least n, columns of factor] like factor, for a copy; not needed where rows are like factor.

    Example:
        >>> import torch
        >>> from samplex_cuda.products import class_factor
        >>> rows = torch.ones(4, 3, dtype=torch.bfloat16)
        >>> class_factor(rows, torch.ones(2, 3), torch.empty(9, 3)).shape
        torch.Size([4, 3])
    """
    if memory is None:
        return rows
    copy, (count, dim) = memory[: rows.shape[0]], rows.shape
    if copy.shape[1] == dim:
        return copy.copy_(rows)
    copy.view(count, -1, dim).copy_(rows.unsqueeze(1))
    return copy


def needs_copy(weight: Tensor, factor: Tensor) -> bool:
    """Whether `class_factor` copies the rows of weight [C, d]."""
    return weight.dtype != factor.dtype or weight.shape[1] != factor.shape[1]


def splits_coefficients(weight: Tensor) -> bool:
    """Whether coefficients of these class rows multiply in two parts, `parts` of `ops.predict.predict_grad`."""
    return weight.dtype == torch.bfloat16 and _device.multiplies_narrow(weight)


def _by_panels(a: Tensor, b: Tensor, out: Tensor) -> bool:
    """Whether our kernels multiply these matrices of the type of `out`."""
    if out.dtype is not torch.float32 or not out.is_cpu or torch.compiler.is_compiling():
        return False  # a compiled graph holds torch's own product: sizes may be open there
    if not _native.panels_beat_blas():
        return False
    (rows, depth), columns = a.shape, b.shape[1]
    return (
        min(rows, columns) >= 8
        and rows * depth * columns >= _LEAST_WORK
        and out.stride(1) == 1
        and out.stride(0) >= columns
        and 1 in b.stride()
    )


def product(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """out = a @ b in the type of out, float32 or float64; a and b have that type, or the same one of 16 bits.

    Not `@`: under autocast that would answer in half precision, and in new memory.

    Example:
        >>> import torch
        >>> from samplex_cuda.products import product
        >>> a = torch.full((2, 300), 1.0, dtype=torch.bfloat16)
        >>> product(a, a.t(), torch.empty(2, 2))[0, 0]
        tensor(300.)
    """
    if a.dtype == out.dtype:
        if _by_panels(a, b, out):
            predict_product(a, b, out)
            return out
        return torch.mm(a, b, out=out)
    if a.device.type == "cpu":  # torch has no such product for CPU tensors, which come here in tests
        return torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)
    return torch.ops.aten.mm.dtype_out(a, b, out.dtype, out=out)


def add_product(a: Tensor, b: Tensor, out: Tensor, again: bool) -> Tensor:
    """out = a @ b as in `product`, added to what out holds if `again`.

    Example:
        >>> import torch
        >>> from samplex_cuda.products import add_product
        >>> add_product(torch.ones(1, 2), torch.ones(2, 1), torch.ones(1, 1), again=True)
        tensor([[3.]])
    """
    if a.dtype == out.dtype and _by_panels(a, b, out):
        predict_product(a, b, out, again)
        return out
    if a.dtype == out.dtype:  # what out held before is left out by beta = 0, a nan too
        return torch.addmm(out, a, b, beta=int(again), out=out)
    return out.add_(product(a, b, torch.empty_like(out))) if again else product(a, b, out)
