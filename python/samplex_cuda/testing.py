"""Tolerance helpers: how far from a float64 reference a result may lie.

A fixed tolerance is either too loose for small shapes or too tight for large ones. The budget here comes from torch
itself: compute the same thing three times, in float64 (the truth), by torch in the dtype under test, and by us. Our
error may be twice torch's own, plus a floor of a few ulps for the cases where torch happens to be exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["assert_close", "error_budget", "max_error"]


def _finite_max(x: Tensor) -> float:
    finite = x[x.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def max_error(actual: Tensor, expected: Tensor) -> float:
    """Largest |actual - expected| in float64; inf where nan or inf of one does not meet the same in the other.

    Args:
        actual: any shape and floating dtype.
        expected: same shape.

    Example:
        >>> import torch
        >>> from samplex_cuda.testing import max_error
        >>> x, y = torch.tensor([1.0, float("nan")]), torch.tensor([1.5, float("nan")])
        >>> max_error(x, y), max_error(x, torch.zeros(2))
        (0.5, inf)
    """
    if actual.shape != expected.shape:
        raise ValueError(f"max_error: actual must be {list(expected.shape)} like expected, got {list(actual.shape)}")
    if actual.numel() == 0:
        return 0.0
    a, e = actual.detach().cpu().double(), expected.detach().cpu().double()
    same = (a == e) | (a.isnan() & e.isnan())
    difference = torch.where(same, 0.0, (a - e).abs())
    return float(torch.where(difference.isnan(), float("inf"), difference).max())


def error_budget(
    expected: Tensor, same_dtype: Tensor, *, dtype: torch.dtype | None = None, magnitude: float = 0.0, ulps: float = 4.0
) -> float:
    """Allowed error against a float64 reference: twice torch's own error, plus `ulps` units in the last place.

    Args:
        expected: the reference in float64, any shape.
        same_dtype: what torch computes in the dtype under test, same shape.
        dtype: of the result under test; that of `same_dtype` by default. Its eps makes the floor.
        magnitude: largest number the computation passes through, where that is more than the result shows (a loss near
            0 is the difference of two logits): the floor is relative to it.
        ulps: height of the floor.

    Example:
        >>> import torch
        >>> from samplex_cuda.testing import error_budget
        >>> x = torch.tensor([1.0], dtype=torch.float64)
        >>> error_budget(x, (x + 0.25).float(), ulps=0.0)
        0.5
    """
    torchs_own = max_error(same_dtype, expected)
    if torchs_own == float("inf"):
        # Torch overflowed where float64 did not: its error says nothing. Only the floor is left.
        torchs_own = 0.0
    eps = torch.finfo(dtype or same_dtype.dtype).eps
    return 2.0 * torchs_own + ulps * eps * max(_finite_max(expected), magnitude)


def assert_close(
    name: str, actual: Tensor, expected: Tensor, same_dtype: Tensor, *, magnitude: float = 0.0, ulps: float = 4.0
) -> None:
    """Fail, naming what and by how much, unless `actual` is within `error_budget` of the float64 reference.

    nan must meet nan and inf the same inf. The dtype of `actual` must be that of `same_dtype`.

    Example:
        >>> import torch
        >>> from samplex_cuda.testing import assert_close
        >>> x = torch.rand(8, dtype=torch.float64)
        >>> assert_close("exp", x.float().exp(), x.float().double().exp(), x.float().exp())
    """
    if actual.dtype != same_dtype.dtype:
        raise AssertionError(f"{name}: dtype must be {same_dtype.dtype}, got {actual.dtype}")
    if actual.shape != expected.shape:
        raise AssertionError(f"{name}: shape must be {list(expected.shape)}, got {list(actual.shape)}")
    error = max_error(actual, expected)
    budget = error_budget(expected, same_dtype, magnitude=magnitude, ulps=ulps)
    if not error <= budget:
        raise AssertionError(
            f"{name}: error {error:.3g} against float64 is over the budget {budget:.3g} "
            f"(torch's own error {max_error(same_dtype, expected):.3g}; largest value {_finite_max(expected):.3g})"
        )
