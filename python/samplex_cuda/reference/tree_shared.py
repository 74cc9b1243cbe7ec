"""Shared draws from a tree in plain torch and float64: the readable specification, and the oracle of the tests."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from samplex_cuda.reference.static_sample import philox_bits
from samplex_cuda.reference.tree import _leaf_log_prob, log_prob_all

__all__ = ["log_prob_shared", "sample_shared", "sample_strata"]


def log_prob_shared(x: Tensor, weights: Tensor, bias: Tensor, leaf_class: Tensor) -> Tensor:
    """log of the mean over the rows of p(class | x_b), [C] float64; rows with nan or inf are left out.

    Args:
        x: [B, k].
        weights: [2^depth, k].
        bias: [2^depth].
        leaf_class: [2^depth] int64.

    Example:
        >>> import torch
        >>> from samplex_cuda.reference.tree_shared import log_prob_shared
        >>> rows = torch.tensor([[3.0], [-3.0]])
        >>> log_prob_shared(rows, torch.ones(2, 1), torch.zeros(2), torch.tensor([1, 0])).exp()
        tensor([0.5000, 0.5000], dtype=torch.float64)
    """
    rows = x[x.isfinite().all(1)]
    return log_prob_all(rows, weights, bias, leaf_class).logsumexp(0) - math.log(max(1, len(rows)))


def sample_shared(
    seed: int, offset: int, x: Tensor, weights: Tensor, bias: Tensor, leaf_class: Tensor, num_samples: int
) -> Tensor:
    """Classes drawn with the op's own random numbers, [m]; a branch within 1e-6 of its threshold gives -1 instead.

    At each level the right child is taken if u < P(right | node) under the mean distribution. Two levels share a Philox
    block, of row 0.
    """
    leaves = weights.shape[0]
    rows = x[x.isfinite().all(1)]
    p = _leaf_log_prob(rows, weights, bias).exp().mean(0)
    drawn = torch.empty(num_samples, dtype=torch.int64)
    for draw in range(num_samples):
        low, high, sure = 0, leaves, True
        for level in range(leaves.bit_length() - 1):
            u = (philox_bits(seed, offset, 0, draw, level // 2)[level % 2] >> 11) * 2.0**-53
            middle = (low + high) // 2
            on_left, on_right = float(p[low:middle].sum()), float(p[middle:high].sum())
            right = on_right / (on_left + on_right)
            sure &= abs(u - right) > 1e-6 or right in (0.0, 1.0)
            low, high = (middle, high) if u < right else (low, middle)
        drawn[draw] = leaf_class[low] if sure else -1
    return drawn


def sample_strata(
    seed: int, offset: int, x: Tensor, weights: Tensor, bias: Tensor, leaf_class: Tensor, num_samples: int
) -> Tensor:
    """Stratified draws with the op's own random numbers, [m]; one within 1e-6 of the edge of an interval gives -1.

    Draw i is the class whose interval holds (i + u_i) / m, where the intervals of the classes are adjacent in the
    order of the leaves, each as long as its probability. u_i is the first number of the draw's first Philox block.
    """
    rows = x[x.isfinite().all(1)]
    ends = _leaf_log_prob(rows, weights, bias).exp().mean(0).double().cumsum(0)
    drawn = torch.empty(num_samples, dtype=torch.int64)
    for draw in range(num_samples):
        u = (philox_bits(seed, offset, 0, draw, 0)[0] >> 11) * 2.0**-53
        place = (draw + u) / num_samples
        leaf = min(int((ends <= place).sum()), len(ends) - 1)
        sure = float((ends - place).abs().min()) > 1e-6
        drawn[draw] = leaf_class[leaf] if sure else -1
    return drawn
