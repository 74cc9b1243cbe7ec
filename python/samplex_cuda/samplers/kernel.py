"""`Quadratic` and `RandomFourier`: the kernels of Blanc & Rendle (2018) and Rawat et al. (2019)."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from samplex_cuda._checks import check_int, check_number
from samplex_cuda.rng import Key
from samplex_cuda.samplers.kernel_base import KernelSampler
from samplex_cuda.samplers.stored import finite_error

__all__ = ["KernelSampler", "Quadratic", "RandomFourier"]

_KINDS = ("rff", "orf", "positive")


class Quadratic(KernelSampler):
    """q(c | h) proportional to alpha <h, c>^2 + 1 (Blanc & Rendle 2018): many draws where |<h, c>| is large.

    Exact: all features of the kernel are kept, d (d + 1) / 2 + 1 numbers per node, so a draw costs O(d^2 log C).
    Nothing is clipped and every class has a positive probability. The kernel is even, so it suits `absolute=True` best.

    Args:
        weight: [C, d] class rows, floating point; copied.
        alpha: factor of the square.
        bias: [C]; the rows are then [c, b] and the queries [h, 1].
        epsilon: share of the uniform distribution; 0, for the + 1 is one already.
        progress: show a progress bar on a terminal while building.

    Example:
        >>> import torch, samplex_cuda as sx
        >>> sampler = sx.samplers.Quadratic(torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]]), alpha=8.0)
        >>> sampler.log_prob_all(torch.tensor([[0.0, 0.5]])).exp()  # 1 : 3 : 2.28
        tensor([[0.1592, 0.4777, 0.3631]])
    """

    _op = "quadratic"

    def __init__(
        self,
        weight: Tensor,
        alpha: float = 100.0,
        bias: Tensor | None = None,
        *,
        epsilon: float = 0.0,
        progress: bool = False,
    ) -> None:
        check_number("quadratic", "alpha", alpha, 0.0, 1e30, open_low=True, open_high=True)
        super().__init__(
            weight,
            bias,
            kind="quadratic",
            kernel="quadratic",
            scale=alpha,
            epsilon=epsilon,
            normalize=False,
            num_features=1,
            key=None,
            progress=progress,
        )
        self.alpha = float(alpha)

    def _taken(self, place: Tensor) -> Quadratic:
        return self._over_rows(place, alpha=self.alpha)

    def extra_repr(self) -> str:
        """The kernel, sizes and memory."""
        return f"alpha={self.alpha:g}, {super().extra_repr()}"


class RandomFourier(KernelSampler):
    """q(c | h) about proportional to a Gaussian or exponential kernel, by random features (Rawat et al. 2019).

    "rff" and "orf" estimate exp(-nu |c - h|^2 / 2), which on rows of length 1 is proportional to exp(nu c . h);
    "positive" estimates exp(nu c . h) itself, for rows of any length. Softmax over logits tau c . h is best matched by
    nu = tau, if num_features allows: the estimates of "rff" and "orf" scatter around their mean, and where they fall
    below zero they count as 0. `epsilon` keeps every class possible. log_q is that of the distribution that was really
    drawn from, for any estimates.

    Args:
        weight: [C, d] class rows, floating point; copied.
        num_features: D, the number of frequencies ("rff" and "orf" keep 2 D numbers per node, "positive" D).
        nu: sharpness of the kernel.
        kind: "rff", "orf" (orthogonal frequencies: less scatter) or "positive".
        epsilon: share of the uniform distribution: bounds exp(logit) / q.
        bias: [C]; the rows are then [c, b] and the queries [h, 1].
        normalize: scale rows and queries (not the bias) to length 1; zero rows stay zero.
        key: where the frequencies come from; None: torch's default generator.
        progress: show a progress bar on a terminal while building.

    Example:
        >>> import torch, samplex_cuda as sx
        >>> weight = torch.randn(1000, 16)
        >>> sampler = sx.samplers.RandomFourier(weight, num_features=512, nu=1.0, normalize=True)
        >>> draw = sampler.sample(torch.randn(4, 16), 20)
        >>> torch.equal(draw.log_q, sampler.log_prob(torch.randn(4, 16), draw.ids))  # another query, another law
        False
    """

    _op = "random_fourier"

    def __init__(
        self,
        weight: Tensor,
        num_features: int = 1024,
        nu: float = 4.0,
        kind: str = "rff",
        *,
        epsilon: float = 0.01,
        bias: Tensor | None = None,
        normalize: bool = False,
        key: Key | Tensor | None = None,
        progress: bool = False,
    ) -> None:
        if kind not in _KINDS:
            raise ValueError(f"random_fourier: kind must be one of {', '.join(_KINDS)}, got {kind!r}")
        check_int("random_fourier", "num_features", num_features)
        check_number("random_fourier", "nu", nu, 0.0, 1e30, open_low=True, open_high=True)
        super().__init__(
            weight,
            bias,
            kind=kind,
            kernel="exponential" if kind == "positive" else "gaussian",
            scale=nu,
            epsilon=epsilon,
            normalize=normalize,
            num_features=num_features,
            key=key,
            progress=progress,
        )
        self.num_features, self.nu = num_features, float(nu)

    def _taken(self, place: Tensor) -> RandomFourier:
        return self._over_rows(
            place, num_features=self.num_features, nu=self.nu, kind=self.kind, normalize=self.normalize, key=Key(0)
        )

    def _stored_error(self, found: dict[str, Any]) -> str | None:
        # Frequencies are normal with variance nu, their lengths at most about sqrt(nu d): far above, exp overflows.
        largest = math.sqrt(self.nu) * (math.sqrt(self.dim) + 20.0)
        return super()._stored_error(found) or finite_error("omega", found["omega"], largest)

    def extra_repr(self) -> str:
        """The kernel, sizes and memory."""
        return f"kind={self.kind}, num_features={self.num_features}, nu={self.nu:g}, {super().extra_repr()}"
