"""Trees over random rows, with what the specification says of them."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from samplex_cuda.ops import kernel_tree as ops
from samplex_cuda.ops.static_sample import sort_exclude
from samplex_cuda.reference import kernel_tree as reference


@dataclasses.dataclass
class Case:
    """A tree over random rows with features of any sign, and what the specification says of it."""

    h: Tensor
    phi: Tensor
    rows: Tensor
    sums: Tensor
    leaf_size: int
    kernel: str
    scale: float
    epsilon: float
    log_tree: Tensor

    def tables(self, device: torch.device) -> tuple:
        return (
            self.rows.to(device),
            self.sums.to(device),
            self.leaf_size,
            self.kernel,
            self.scale,
            self.epsilon,
        )

    def sample(self, device, count, exclude=None, key=(3, 2**40)):
        flat, offsets = sort_exclude(None if exclude is None else move(exclude, device))
        pair = torch.tensor(key, device=device)
        return ops.kernel_tree_sample(
            pair, self.h.to(device), self.phi.to(device), *self.tables(device), count, flat, offsets
        )

    def log_prob(self, device, ids=None, exclude=None):
        flat, offsets = sort_exclude(None if exclude is None else move(exclude, device))
        if ids is None:
            ids = torch.arange(self.rows.shape[0]).expand(self.h.shape[0], -1).contiguous()
        return ops.kernel_tree_log_prob(
            self.h.to(device), self.phi.to(device), ids.to(device), *self.tables(device), flat, offsets
        )


def move(exclude, device):
    return exclude.to(device) if isinstance(exclude, Tensor) else tuple(t.to(device) for t in exclude)


def make(
    classes, leaf_size, *, dim=8, width=16, batch=4, kernel="gaussian", scale=1.0, epsilon=0.0, mean=1.0, seed=0
) -> Case:
    """Features around `mean`: at 1 nothing is negative, at 0.1 many estimates are."""
    g = torch.Generator().manual_seed(seed + 100 * classes + leaf_size)
    h, rows = torch.randn(batch, dim, generator=g), torch.randn(classes, dim, generator=g) * 0.7
    if kernel == "quadratic":  # the floor of 1 a class would hide small values
        mean = 3 * mean
    phi_rows = mean + 0.3 * torch.randn(classes, width, generator=g)
    phi = mean + 0.3 * torch.randn(batch, width, generator=g)
    sums = reference.node_sums(phi_rows, leaf_size).float()
    log_tree = reference.tree_law(h, phi, rows, sums, leaf_size, kernel, scale)
    return Case(h, phi, rows, sums, leaf_size, kernel, scale, epsilon, log_tree)


SHAPES = [(1, 1), (2, 1), (3, 3), (5, 2), (37, 1), (37, 4), (130, 1), (300, 7), (520, 1)]
