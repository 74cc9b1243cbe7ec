"""Feature maps in plain torch: the oracle of `torch.ops.samplex.rff`."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def rff(
    x: Tensor,
    omega: Tensor | None,
    kind: str = "rff",
    *,
    nu: float = 1.0,
    alpha: float = 1.0,
    gaussian: bool = False,
    shift: float = 0.0,
) -> Tensor:
    """phi(x) of every row.

    Args:
        x: [B, d].
        omega: [D, d] frequencies; None for "quadratic".
        kind: "rff", "orf", "positive" or "quadratic".
        nu: variance of the frequencies ("positive").
        alpha: factor of the square ("quadratic").
        gaussian: "positive": the Gaussian kernel instead of exp(nu c.h).
        shift: "positive": added to the exponents.

    Returns:
        [B, 2 D] ("rff", "orf"), [B, D] ("positive") or [B, d (d + 1) / 2 + 1] ("quadratic").

    Example:
        >>> import torch
        >>> from samplex_cuda.reference.rff import rff
        >>> rff(torch.tensor([[0.0, 0.0]]), torch.ones(1, 2)).tolist()
        [[1.0, 0.0]]
        >>> rff(torch.tensor([[1.0, 2.0, 3.0]]), None, "quadratic", alpha=2.0).square().round().tolist()
        [[2.0, 32.0, 162.0, 16.0, 36.0, 144.0, 1.0]]
    """
    if kind == "quadratic":
        first, second = torch.triu_indices(x.shape[1], x.shape[1], offset=1)
        pairs = math.sqrt(2 * alpha) * x[:, first] * x[:, second]
        return torch.cat([math.sqrt(alpha) * x * x, pairs, torch.ones_like(x[:, :1])], 1)
    assert omega is not None
    dots, scale = x @ omega.T, omega.shape[0] ** -0.5
    if kind == "positive":
        decay = nu if gaussian else nu / 2
        return scale * torch.exp(dots - decay * x.square().sum(1, keepdim=True) + shift)
    return scale * torch.cat([dots.cos(), dots.sin()], 1)


def kernel(c: Tensor, h: Tensor, kind: str = "rff", *, nu: float = 1.0, alpha: float = 1.0) -> Tensor:
    """What phi(c) . phi(h) estimates, for every pair of rows.

    Args:
        c: [n, d].
        h: [B, d].
        kind: "rff", "orf" (the Gaussian kernel), "positive" or "quadratic".
        nu: variance of the frequencies.
        alpha: factor of the square.

    Returns:
        [n, B].

    Example:
        >>> import torch
        >>> from samplex_cuda.reference.rff import kernel
        >>> kernel(torch.ones(1, 2), torch.ones(1, 2), "quadratic", alpha=3.0)
        tensor([[13.]])
    """
    if kind == "quadratic":
        return alpha * (c @ h.T).square() + 1
    if kind == "positive":
        return torch.exp(nu * (c @ h.T))
    return torch.exp(-0.5 * nu * torch.cdist(c, h).square())
