"""Random feature maps: phi(c) . phi(h) estimates a kernel of c and h without bias.

kind         phi(u)                                                            phi(c) . phi(h)
"rff"        D^(-1/2) [cos(w_k . u), sin(w_k . u)], w ~ N(0, nu I)             exp(-nu |c - h|^2 / 2) on average
"orf"        the same, w orthogonal in blocks of d                             the same, with less variance
"positive"   D^(-1/2) exp(w_k . u - nu |u|^2 / 2) >= 0, w as in "orf"          exp(nu c . h) on average
"quadratic"  [sqrt(alpha) u_i^2, sqrt(2 alpha) u_i u_j for i < j, 1]           alpha (c . h)^2 + 1 exactly
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from samplex_cuda._checks import check_dense, check_int, check_number, check_tensor, describe
from samplex_cuda.ops import rff as _rff
from samplex_cuda.rng import Key, key_tensor

__all__ = ["KINDS", "features", "frequencies", "num_numbers"]

KINDS = tuple(_rff.KINDS)

_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def _check_kind(op: str, kind: str) -> None:
    if kind not in KINDS:
        raise ValueError(f"{op}: kind must be one of {', '.join(map(repr, KINDS))}, got {kind!r}")


def _check_size(op: str, name: str, value: int) -> None:
    check_int(op, name, value, 1, (1 << 31) - 1)


def _check_positive(op: str, name: str, value: float) -> None:
    check_number(op, name, value, 0.0, 1e30, open_low=True, open_high=True)


def num_numbers(kind: str, dim: int, num_features: int = 0) -> int:
    """How many numbers phi(u) has: 2 D for "rff" and "orf", D for "positive", d (d + 1) / 2 + 1 for "quadratic".

    Args:
        kind: "rff", "orf", "positive" or "quadratic".
        dim: d, the width of a row.
        num_features: D, the number of frequencies; not used by "quadratic".

    Example:
        >>> import samplex_cuda as sx
        >>> sx.rff.num_numbers("rff", 64, 1024), sx.rff.num_numbers("quadratic", 64)
        (2048, 2081)
    """
    _check_kind("rff.num_numbers", kind)
    _check_size("rff.num_numbers", "dim", dim)
    if kind != "quadratic":
        _check_size("rff.num_numbers", "num_features", num_features)
    return _rff.num_numbers(_rff.KINDS[kind], dim, num_features)


def frequencies(
    dim: int,
    num_features: int,
    *,
    nu: float,
    kind: str = "rff",
    key: Key | Tensor | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Frequencies w_k of a random feature map, each N(0, nu I).

    For "orf" and "positive" they are orthogonal in blocks of d: directions from a Haar-distributed basis, lengths those
    of independent normal vectors. Each w_k alone is still N(0, nu I), so the estimate keeps its mean, and its variance
    falls. Drawn in float64 on the CPU, so that a key gives the same numbers on every device.

    Args:
        dim: d.
        num_features: D.
        nu: variance of each component.
        kind: "rff", "orf" or "positive".
        key: a `Key`, an int64 [2] tensor, or None for torch's default generator.
        device: of the result.
        dtype: of the result.

    Returns:
        [D, d].

    Example:
        >>> import samplex_cuda as sx
        >>> w = sx.rff.frequencies(4, 4, nu=2.0, kind="orf", key=sx.Key(0))
        >>> (w @ w.T).fill_diagonal_(0).abs().max() < 1e-5
        tensor(True)
    """
    op = "rff.frequencies"
    _check_kind(op, kind)
    if kind == "quadratic":
        raise ValueError(f"{op}: kind must be 'rff', 'orf' or 'positive', got 'quadratic', which has no frequencies")
    _check_size(op, "dim", dim)
    _check_size(op, "num_features", num_features)
    _check_positive(op, "nu", nu)
    seed, offset = key_tensor(op, key, key.device if isinstance(key, Tensor) else torch.device("cpu")).tolist()
    # Odd multipliers: pairs that differ in one part only never meet.
    mixed = (seed * 0x9E3779B97F4A7C15 + offset * 0xD1B54A32D192ED03) % (1 << 63)
    generator = torch.Generator("cpu").manual_seed(mixed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu")

    if kind == "rff":
        omega = normal(num_features, dim)
    else:
        blocks = -(-num_features // dim)
        q, r = torch.linalg.qr(normal(blocks, dim, dim))
        # The sign makes the basis Haar-distributed: QR alone prefers some.
        q = q * r.diagonal(dim1=1, dim2=2).sign().unsqueeze(1)
        omega = q.mT.reshape(blocks * dim, dim)[:num_features] * normal(num_features, dim).norm(dim=1, keepdim=True)
    return (omega * math.sqrt(nu)).to(device=device, dtype=dtype)


def features(
    x: Tensor,
    omega: Tensor | None = None,
    *,
    kind: str = "rff",
    nu: float | None = None,
    alpha: float = 100.0,
    gaussian: bool = False,
    shift: float = 0.0,
) -> Tensor:
    """phi of every row: the product with the frequencies and the cos, sin or exp in one pass.

    A nan or inf in a row makes nan in the features of that row only. Gradients reach x and omega; there is no double
    backward.

    Args:
        x: [*, d] float32, float64, float16 or bfloat16; any length, also 0.
        omega: [D, d] from `frequencies`; None for "quadratic".
        kind: "rff", "orf" (the same map with other frequencies), "positive" or "quadratic".
        nu: variance of the frequencies; needed by "positive", where it weighs |u|^2; else not used.
        alpha: factor of the square; "quadratic" only.
        gaussian: "positive" only: exp(w . u - nu |u|^2) instead, whose products are exp(-nu |c - h|^2 / 2) on average.
        shift: "positive" only: added to every exponent, a factor e^shift of all features. It keeps long rows, whose
            exponents are about -nu |u|^2 / 2, above the smallest float32; the same for c and h, or known to the caller.

    Returns:
        [*, F] float32 (float64 for float64 x), F as `num_numbers`.

    Example:
        >>> import torch, samplex_cuda as sx
        >>> w = sx.rff.frequencies(3, 4096, nu=1.0, key=sx.Key(0))
        >>> phi = sx.rff.features(torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]), w)
        >>> phi.shape, round(float(phi[0] @ phi[0]), 3), abs(float(phi[0] @ phi[1]) - 0.368) < 0.05
        (torch.Size([2, 8192]), 1.0, True)
        >>> phi = sx.rff.features(torch.tensor([[1.0, 2.0], [3.0, 1.0]]), kind="quadratic", alpha=2.0)
        >>> round(float(phi[0] @ phi[1]), 3)  # 2 (1 * 3 + 2 * 1)^2 + 1
        51.0
    """
    op = "rff.features"
    _check_kind(op, kind)
    check_dense(op, "x", check_tensor(op, "x", x, "[*, d]"))
    if x.dtype not in _FLOATS or x.dim() < 1 or x.shape[-1] < 1:
        raise ValueError(f"{op}: x must be [*, d] float32, float64, float16 or bfloat16, got {describe(x)}")
    acc = torch.float64 if x.dtype == torch.float64 else torch.float32
    if kind == "quadratic":
        if omega is not None:
            raise ValueError(f"{op}: omega must be None for kind 'quadratic', got {describe(omega)}")
        _check_positive(op, "alpha", alpha)
    else:
        omega = check_dense(op, "omega", check_tensor(op, "omega", omega, f"[D, {x.shape[-1]}]"))
        good = omega.dim() == 2 and omega.shape[0] >= 1 and omega.shape[1] == x.shape[-1]
        if not good or omega.dtype not in _FLOATS or omega.device != x.device:
            raise ValueError(
                f"{op}: omega must be [D, {x.shape[-1]}] floating with D >= 1 on {x.device}, got {describe(omega)}"
            )
        if omega.dtype is not acc:
            omega = omega.to(acc)
        if not omega.is_contiguous():
            omega = omega.contiguous()
    if kind == "positive" and nu is None:
        raise ValueError(f"{op}: nu must be given for kind 'positive', got None")
    shift = check_number(op, "shift", shift, -math.inf)
    alpha = check_number(op, "alpha", alpha, -math.inf)
    if nu is not None:
        _check_positive(op, "nu", nu)
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    result = _rff.rff(rows, omega, _rff.KINDS[kind], 1.0 if nu is None else float(nu), alpha, bool(gaussian), shift)
    return result if x.dim() == 2 else result.view(*x.shape[:-1], result.shape[-1])
