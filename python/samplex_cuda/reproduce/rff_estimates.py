"""Random features on unit rows, measured: estimates, ratios, bias of the gradient, and the bounds on it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

import samplex_cuda as sx

__all__ = ["Sphere", "bounds", "estimates", "gradient_bias", "law", "lemma_three", "phi"]

EPSILON = 0.01  # share of the uniform distribution in what is drawn from


class Sphere:
    """Unit class rows [C, d], unit queries [n, d], their targets [n] and the inverse temperature tau."""

    def __init__(self, rows: Tensor, queries: Tensor, targets: Tensor, tau: float) -> None:
        self.rows, self.queries, self.targets, self.tau = rows, queries, targets, tau
        self.cosine = queries.double() @ rows.double().T  # [n, C]
        self.log_z = (tau * self.cosine).logsumexp(1)

    @property
    def others(self) -> Tensor:
        """bool [n, C]: everything but the target."""
        mask = torch.ones_like(self.cosine, dtype=torch.bool)
        return mask.scatter_(1, self.targets[:, None], False)


def estimates(s: Sphere, kind: str, num_features: int, nu: float, seed: int) -> Tensor:
    """phi(c) . phi(h) fp64 [n, C]: estimates of exp(-nu |c - h|^2 / 2); positive ones have a common factor.

    Example:
        >>> import torch
        >>> from samplex_cuda.reproduce.rff_estimates import Sphere, estimates
        >>> rows = torch.nn.functional.normalize(torch.randn(20, 4), dim=1)
        >>> s = Sphere(rows, rows[:3], torch.arange(3), 5.0)
        >>> estimates(s, "rff", 64, 1.0, seed=0).shape
        torch.Size([3, 20])
    """
    omega = sx.rff.frequencies(s.rows.shape[1], num_features, nu=nu, kind=kind, key=sx.Key(seed))
    extra: dict[str, Any] = {"nu": nu, "gaussian": True} if kind == "positive" else {}
    left = sx.rff.features(s.queries, omega, kind=kind, **extra).double()
    # Some classes at a time: all features of many classes would be gigabytes.
    parts = s.rows.split(max(1, 2**24 // left.shape[1]))
    return torch.cat([left @ sx.rff.features(x, omega, kind=kind, **extra).double().T for x in parts], dim=1)


def law(s: Sphere, values: Tensor) -> Tensor:
    """q fp64 [n, C] on the negatives that is drawn from: negative estimates count as 0, one percent is uniform."""
    kept = values.clamp_min(0.0) * s.others
    flat = s.others / s.others.sum(1, keepdim=True)
    total = kept.sum(1, keepdim=True)
    return torch.where(total > 0, (1 - EPSILON) * kept / total.clamp_min(1e-300) + EPSILON * flat, flat)


def gradient_bias(s: Sphere, q: Tensor, m: int, samples: int, seed: int) -> tuple[float, float]:
    """(bias, noise of its measurement) of the gradient in h of sampled softmax, relative to the full gradient.

    Root mean squares over the queries; the noise of the mean is taken out of the first.
    """
    generator = torch.Generator().manual_seed(seed)
    bias = noise = 0.0
    for i in range(len(s.targets)):
        target = int(s.targets[i])
        e = (s.tau * s.cosine[i] - s.log_z[i]).exp()  # sums to 1
        rows = s.tau * s.rows.double()
        full = e @ rows - rows[target]
        halves = []
        for _ in range(2):
            ids = torch.multinomial(q[i], samples // 2 * m, replacement=True, generator=generator).view(-1, m)
            weight = e[ids] / (m * q[i][ids])
            total = e[target] + weight.sum(1, keepdim=True)
            mean = torch.zeros_like(e).index_add_(0, ids.flatten(), (weight / total).flatten())
            mean[target] += (e[target] / total).sum()
            halves.append(mean / ids.shape[0] @ rows - rows[target] - full)
        # Two independent means: their product has no noise of its own on average.
        bias += float(halves[0] @ halves[1] / full.square().sum())
        noise += float((halves[0] - halves[1]).square().sum() / 4 / full.square().sum())
    count = len(s.targets)
    return math.sqrt(max(0.0, bias / count)), math.sqrt(noise / count)


def phi(x: Tensor) -> Tensor:
    """The normal distribution function."""
    return 0.5 * torch.erfc(-x / math.sqrt(2.0))


def bounds(instances: int, seed: int, *, signs: str) -> dict[str, float]:
    """How often Theorem 1's bounds on the bias fail at order 1/m, as printed and corrected, on random instances.

    The bias times m tends to -sum e r grad / Z^2 + g Var / Z^3, r = e / q - S. Returns shares of the instances.
    `signs` of the gradients of the logits: "random", "at least 0", or "worst", which is +-1 so that the first term is
    as low (for the lower bounds) or as high (for the upper ones) as it can be.

    Example:
        >>> from samplex_cuda.reproduce.rff_estimates import bounds
        >>> found = bounds(1000, 0, signs="worst")
        >>> found["lower, corrected"], found["upper, corrected"]
        (0.0, 0.0)
    """
    generator = torch.Generator().manual_seed(seed)
    n = 8

    def normal() -> Tensor:
        return torch.randn(instances, n, generator=generator, dtype=torch.float64)

    e_target = normal()[:, :1].exp()
    e, slope, slope_target = normal().exp(), normal(), normal()[:, :1]
    if signs == "at least 0":
        slope, slope_target = slope.abs(), slope_target.abs()
    q = (1.5 * normal()).softmax(1)
    s, square = e.sum(1, keepdim=True), (e.square() / q).sum(1, keepdim=True)
    z, r = e_target + s, e / q - s
    variance = square - s**2
    spread = (e / q).amax(1, keepdim=True) - (e / q).amin(1, keepdim=True)

    def share(side: str, factor: float, below: Tensor) -> float:
        grad, grad_target = slope, slope_target
        if signs == "worst":
            grad, grad_target = (r.sign() if side == "lower" else -r.sign()), -torch.ones_like(slope_target)
        g = (e * grad).sum(1, keepdim=True) + e_target * grad_target
        most = torch.cat([grad, grad_target], 1).abs().amax(1, keepdim=True)
        bias = -(e * r * grad).sum(1, keepdim=True) / z**2 + g * variance / z**3
        if side == "lower":
            fails = bias < -factor * most * (e * r.abs()).sum(1, keepdim=True) / below - 1e-9
        else:
            fails = bias > g * variance / z**3 + factor * most * spread * s / below + 1e-9
        return float(fails.double().mean())

    return {
        "lower, printed": share("lower", 1.0, z**2),
        "upper, printed": share("upper", 2.0, z**2 + square),
        "lower, corrected": share("lower", 2.0, z**2),
        "upper, corrected": share("upper", 2.0, z**2),
    }


def lemma_three(m: int, samples: int, seed: int) -> dict[str, float]:
    """E[1/W], W = (e_t + S_{m-1}/m)^2, by drawing; beside 1/Z^2 and what Lemma 3 prints."""
    generator = torch.Generator().manual_seed(seed)
    e = torch.randn(8, generator=generator, dtype=torch.float64).exp()
    q = torch.randn(8, generator=generator, dtype=torch.float64).softmax(0)
    ids = torch.multinomial(q, samples * (m - 1), replacement=True, generator=generator).view(samples, m - 1)
    w = (1.0 + (e / q)[ids].sum(1) / m).square()
    z = 1.0 + e.sum()
    return {
        "measured": float((1 / w).mean()),
        "1/Z^2": float(1 / z**2),
        "printed": float(1 / (z**2 + (e.square() / q).sum())),
    }
