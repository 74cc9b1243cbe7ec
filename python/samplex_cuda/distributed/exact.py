"""Logarithm and exponential of the samplers' kernels in torch ops, with their bits: see csrc/common/numeric.h.

Each step is one rounding, as in the kernels, which are compiled without fused multiply-add.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["exact_log", "tree_exp"]

_MANTISSA, _ONE = 0x000FFFFFFFFFFFFF, 0x3FF0000000000000


def exact_log(x: Tensor) -> Tensor:
    """log of positive normal fp64 numbers; what it gives for others is not defined.

    Example:
        >>> import torch
        >>> from samplex_cuda.distributed.exact import exact_log
        >>> exact_log(torch.tensor([1.0, 8.0], dtype=torch.float64))
        tensor([0.0000, 2.0794], dtype=torch.float64)
    """
    bits = x.view(torch.int64)
    m = ((bits & _MANTISSA) | _ONE).view(torch.float64)
    large = m > 1.4142135623730951
    m = torch.where(large, m * 0.5, m)
    k = (((bits >> 52) & 0xFFF) - 1023 + large).double()
    f = m - 1.0
    s = f / (2.0 + f)
    z = s * s
    p = torch.full_like(z, 2.0 / 23.0)
    for odd in range(21, 1, -2):
        p = p * z + 2.0 / odd
    return k * 6.93147180369123816490e-01 + ((2.0 * s + s * (z * p)) + k * 1.90821492927058770002e-10)


def tree_exp(a: Tensor) -> Tensor:
    """exp(-a) of fp32 numbers a >= 0 as the nodes of a `Tree` compute it; 0 from 87 on, nan for nan.

    Example:
        >>> import torch
        >>> from samplex_cuda.distributed.exact import tree_exp
        >>> tree_exp(torch.tensor([0.0, 1.0, 90.0]))
        tensor([1.0000, 0.3679, 0.0000])
    """
    t = torch.where(a < 87.0, a, 87.0)
    n = (t * 1.44269504 + 12582912.0) - 12582912.0
    r = n * 0.693359375 - t
    r = r + n * -2.12194440e-4
    p = torch.full_like(r, 1.9875691500e-4)
    for factor in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = p * r + factor
    p = (p * (r * r) + r) + 1.0
    power = ((127 - n.int()) << 23).view(torch.float32)
    return torch.where(a < 87.0, p * power, torch.where(a == a, 0.0, a))
