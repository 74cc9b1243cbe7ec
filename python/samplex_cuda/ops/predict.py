"""Exact logits: `samplex::predict_lse`, `predict_grad`, `predict_topk` pass over a chunk; `predict_dots` is for a few.

A pass takes the products `dots` [B, n] of a batch with the class rows [first, first + n), and works in place on state
that the caller keeps from chunk to chunk, so that no [B, C] is ever made. The logit of a product is
`s = scale * (dot + bias)`, or its absolute value. `samplex_cuda.prediction` holds the loops.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from samplex_cuda._library import register_fake

__all__ = ["MOST_K", "predict_buffer", "predict_dots", "predict_grad", "predict_lse", "predict_product", "predict_topk"]

MOST_K = 1024  # of predict_topk

# The overloads themselves: looking them up costs as much as a call, and there is one of each per chunk.
_predict_buffer = torch.ops.samplex.predict_buffer.default
_predict_grad = torch.ops.samplex.predict_grad.default
_predict_product = torch.ops.samplex.predict_product.default
_predict_lse = torch.ops.samplex.predict_lse.default
_predict_topk = torch.ops.samplex.predict_topk.default


def predict_product(a: Tensor, b: Tensor, out: Tensor, add: bool = False) -> None:
    """out = a @ b, or out += a @ b with `add`, on the CPU: sums of 128 terms in order, on any number of threads.

    Args:
        a: [n, k] float32 of any strides, k >= 1.
        b: [k, p] float32, one of its strides 1.
        out: [n, p] float32, written; rows of numbers side by side.
        add: add to what `out` holds.

    Example:
        >>> import torch
        >>> from samplex_cuda.ops.predict import predict_product
        >>> out = torch.ones(1, 1)
        >>> predict_product(torch.ones(1, 3), torch.ones(3, 1), out, add=True)
        >>> out
        tensor([[4.]])
    """
    _predict_product(a, b, out, add)


@register_fake("samplex::predict_product")
def _(a: Tensor, b: Tensor, out: Tensor, add: bool = False) -> None:
    return None


def predict_lse(
    dots: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    first: int,
    scale: float,
    absolute: bool,
    lse: Tensor,
    positive: Tensor,
    total: Tensor | None = None,
    by_class: bool = False,
) -> None:
    """Adds a chunk to the running normalizer, and picks the target logits that lie in it.

    Args:
        dots: [B, n] float32 or float64.
        bias: [n] like dots.
        target: int64 [B, P]; an entry outside [0, C) is none.
        class_weight: [n] like dots, for `total`.
        first: class of the first column.
        scale: inverse temperature.
        absolute: the logit is the absolute value.
        lse: [B] float64, updated; -inf before the first chunk.
        positive: [B, P] like dots, written where the target lies in the chunk.
        total: [B] float64, updated: the sum of class_weight * logit.
        by_class: dots are [n, B]. On the CPU alone.

    Example:
        >>> import torch
        >>> from samplex_cuda.ops.predict import predict_lse
        >>> lse, positive = torch.full((1,), -torch.inf, dtype=torch.float64), torch.zeros(1, 1)
        >>> for first, dots in ((0, torch.zeros(1, 3)), (3, torch.zeros(1, 1))):
        ...     predict_lse(dots, None, torch.tensor([[2]]), None, first, 1.0, False, lse, positive)
        >>> round(lse.exp().item(), 6)
        4.0
    """
    _predict_lse(dots, bias, target, class_weight, first, scale, absolute, lse, positive, total, by_class)


def predict_grad(
    dots: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    first: int,
    scale: float,
    absolute: bool,
    lse: Tensor,
    coef: Tensor,
    target_coef: Tensor,
    smooth: Tensor | None = None,
    parts: Tensor | None = None,
    by_class: bool = False,
) -> None:
    """Turns the products of a chunk into the gradient with respect to them.

    The loss of a row is `coef * lse - sum of target_coef * target logits - smooth * sum of class_weight * logits`. A
    row whose `coef` and `smooth` are 0 gets zeros whatever it holds.

    Args:
        dots: [B, n] float32 or float64, overwritten unless `parts` is given.
        bias: [n] like dots.
        target: int64 [B, P].
        class_weight: [n] like dots.
        first: class of the first column.
        scale: inverse temperature.
        absolute: the logit is the absolute value.
        lse: [B] float64, over all classes.
        coef: [B] like dots.
        target_coef: [B, P] like dots.
        smooth: [B] like dots.
        parts: bfloat16 [2 B, at least n], not on the CPU: gets the gradient as a factor of 16 bits. Rows [0, B) hold
            the rounded numbers, rows [B, 2 B) what rounding left of them, rounded; columns from n on are not written.
        by_class: dots are [n, B]. On the CPU alone.

    Example:
        >>> import torch
        >>> from samplex_cuda.ops.predict import predict_grad
        >>> dots, one = torch.zeros(1, 4), torch.ones(1)
        >>> lse = torch.tensor([4.0], dtype=torch.float64).log()
        >>> predict_grad(dots, None, torch.tensor([[2]]), None, 0, 1.0, False, lse, one, one.view(1, 1))
        >>> dots
        tensor([[ 0.2500,  0.2500, -0.7500,  0.2500]])
    """
    _predict_grad(
        dots, bias, target, class_weight, first, scale, absolute, lse, coef, target_coef, smooth, parts, by_class
    )


def predict_topk(
    dots: Tensor, bias: Tensor | None, first: int, scale: float, absolute: bool, values: Tensor, ids: Tensor
) -> None:
    """Merges a chunk into the k largest logits so far; chunks must come in ascending order of classes.

    Args:
        dots: [B, n] float32 or float64.
        bias: [n] like dots.
        first: class of the first column; min(k, first) entries are held already.
        scale: inverse temperature.
        absolute: the logit is the absolute value.
        values: [B, k] like dots, updated: descending, equal ones by id; a nan counts as the largest. k <= 1024.
        ids: int64 [B, k], updated.

    Example:
        >>> import torch
        >>> from samplex_cuda.ops.predict import predict_topk
        >>> values, ids = torch.empty(1, 2), torch.empty(1, 2, dtype=torch.int64)
        >>> predict_topk(torch.tensor([[1.0, 3.0, 2.0]]), None, 0, 1.0, False, values, ids)
        >>> predict_topk(torch.tensor([[3.0, 2.5]]), None, 3, 1.0, False, values, ids)
        >>> values, ids
        (tensor([[3., 3.]]), tensor([[1, 3]]))
    """
    _predict_topk(dots, bias, first, scale, absolute, values, ids)


def predict_dots(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """Products of each row with the class rows of its own candidates; each is read once, nothing is gathered.

    Args:
        hidden: [B, d] like weight.
        weight: [C, d] float32, float64, float16 or bfloat16.
        ids: int64 [B, n]; outside [0, C): none.

    Returns:
        [B, n] float32 (float64 for float64); -inf for none.

    Example:
        >>> import torch
        >>> from samplex_cuda.ops.predict import predict_dots
        >>> predict_dots(torch.ones(1, 2), torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1, -1, 0]]))
        tensor([[7., -inf, 3.]])
    """
    return torch.ops.samplex.predict_dots(hidden, weight, ids)


@register_fake("samplex::predict_dots")
def _(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    return weight.new_empty(ids.shape, dtype=torch.float64 if weight.dtype == torch.float64 else torch.float32)


def predict_buffer(like: Tensor, rows: int, columns: int) -> Tensor:
    """Uninitialised memory for a loop over chunks or its result.

    On the CPU it comes from the pool of `samplex_cuda.release_memory`, and goes back to it with the tensor: fresh pages
    would cost more than the passes over them.

    Args:
        like: gives device and dtype.
        rows: at least 0.
        columns: at least 0.

    Returns:
        [rows, columns], contiguous.

    Example:
        >>> import torch
        >>> from samplex_cuda.ops.predict import predict_buffer
        >>> predict_buffer(torch.zeros(0), 3, 4).shape
        torch.Size([3, 4])
    """
    return _predict_buffer(like, rows, columns)


@register_fake("samplex::predict_buffer")
def _(like: Tensor, rows: int, columns: int) -> Tensor:
    return like.new_empty((rows, columns))


# They only write into what they are given.
for _name in ("predict_lse", "predict_grad", "predict_topk"):

    @register_fake(f"samplex::{_name}")
    def _(*arguments: Any) -> None:
        return None
