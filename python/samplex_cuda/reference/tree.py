"""The probabilistic decision tree in plain torch and float64: the readable specification, and the oracle of the tests.

Every function takes weights [2^depth, k], bias [2^depth] and leaf_class [2^depth] (-1: padding), nodes in heap order.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from samplex_cuda.reference.static_sample import philox_bits

__all__ = ["conditional_log_prob", "log_prob_all", "project", "sample", "topk"]


def project(x: Tensor, mean: Tensor, projection: Tensor) -> Tensor:
    """(x - mean) @ projection, [B, k] float64, of x [B, K], mean [K] and projection [K, k]."""
    return (x.double() - mean.double()) @ projection.double()


def _leaf_log_prob(x: Tensor, weights: Tensor, bias: Tensor) -> Tensor:
    """[B, 2^depth]: log-sigmoids summed along each path."""
    leaves = weights.shape[0]
    z = x.double() @ weights.double().T
    z = torch.where(bias.isinf(), bias.double(), z + bias.double())  # nan features stay nan where the bias is finite
    log_p = torch.zeros(x.shape[0], 1, dtype=torch.float64)
    first = 1
    while first < leaves:
        here = z[:, first : 2 * first]
        both = torch.stack([torch.nn.functional.logsigmoid(-here), torch.nn.functional.logsigmoid(here)], 2)
        log_p = (log_p.unsqueeze(2) + both).flatten(1)
        first *= 2
    return log_p


def log_prob_all(x: Tensor, weights: Tensor, bias: Tensor, leaf_class: Tensor) -> Tensor:
    """log p(class | x), [B, C] float64.

    Args:
        x: [B, k].
        weights: [2^depth, k].
        bias: [2^depth].
        leaf_class: [2^depth] int64.

    Example:
        >>> import torch
        >>> from samplex_cuda.reference.tree import log_prob_all
        >>> log_prob_all(torch.zeros(1, 2), torch.zeros(2, 2), torch.tensor([0.0, 0.0]), torch.tensor([1, 0])).exp()
        tensor([[0.5000, 0.5000]], dtype=torch.float64)
    """
    log_p = _leaf_log_prob(x, weights, bias)
    real = leaf_class >= 0
    out = torch.empty(x.shape[0], int(real.sum()), dtype=torch.float64)
    out[:, leaf_class[real]] = log_p[:, real]
    return out


def conditional_log_prob(log_p: Tensor, excluded: list[list[int]]) -> Tensor:
    """log p(class | x, class not excluded), [B, C] float64: what is left, normalized."""
    log_p = log_p.clone()
    for row, ids in enumerate(excluded):
        log_p[row, ids] = -math.inf
    return log_p - torch.logsumexp(log_p, 1, keepdim=True)


def sample(
    seed: int,
    offset: int,
    x: Tensor,
    weights: Tensor,
    bias: Tensor,
    leaf_class: Tensor,
    num_samples: int,
    excluded: list[list[int]] | None = None,
    first: int = 0,
) -> Tensor:
    """Classes drawn with the op's own random numbers, [B, m]; a branch within 1e-6 of its threshold gives -1 instead.

    At each level the right child is taken if u < P(right | node, no excluded class). Two levels share a Philox block.
    Row b is number `first` + b.
    """
    leaves = weights.shape[0]
    depth = leaves.bit_length() - 1
    p = _leaf_log_prob(x, weights, bias).exp()
    for row, ids in enumerate(excluded or []):
        for leaf in range(leaves):
            if int(leaf_class[leaf]) in ids:
                p[row, leaf] = 0.0
    drawn = torch.empty(x.shape[0], num_samples, dtype=torch.int64)
    for b in range(x.shape[0]):
        for draw in range(num_samples):
            low, high, sure = 0, leaves, True
            for level in range(depth):
                u = (philox_bits(seed, offset, first + b, draw, level // 2)[level % 2] >> 11) * 2.0**-53
                middle = (low + high) // 2
                on_left, on_right = float(p[b, low:middle].sum()), float(p[b, middle:high].sum())
                right = on_right / (on_left + on_right)
                sure &= abs(u - right) > 1e-6 or right in (0.0, 1.0)
                low, high = (middle, high) if u < right else (low, middle)
            drawn[b, draw] = leaf_class[low] if sure else -1
    return drawn


def topk(log_p: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k most probable classes of [B, C], equal ones by class."""
    order = torch.argsort(log_p, dim=1, descending=True, stable=True)[:, :k]
    return log_p.gather(1, order), order
