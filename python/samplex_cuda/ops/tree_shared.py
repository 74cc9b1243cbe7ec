"""Draws from a tree that a whole batch shares: `samplex::tree_sample_shared`, `tree_log_prob_shared`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from samplex_cuda._library import register_fake

__all__ = ["tree_log_prob_shared", "tree_sample_shared"]


def tree_sample_shared(
    key: Tensor,
    x: Tensor,
    nodes: Tensor,
    leaf_class: Tensor,
    class_leaf: Tensor,
    num_samples: int,
    stratified: bool = False,
    base_table: Tensor | None = None,
    base_prefix: Tensor | None = None,
    base_weight: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Draws from the mean over the rows of p_n(. | x_b). The same bits on every backend and number of threads.

    The mean of tree distributions is a tree distribution: a node is scored once for all rows and all draws that pass
    it.

    Args:
        key: [2] int64 (seed, offset).
        x: [B, k] float32 projected features; a row with a nan or inf has no part in the distribution.
        nodes: [2^depth, stride], from `pack_nodes`.
        leaf_class: [2^depth] int64, -1 for padding.
        class_leaf: [C] int64.
        num_samples: m.
        stratified: one draw from each m-th part of the distribution, in the order of the leaves, instead of m
        independent ones. base_table, base_prefix, base_weight: a fixed distribution that is mixed in, as in
        `tree_sample`.

    Returns:
        ids [m] int64 and log_q [m] float32, of the same distribution either way. Without a row that has a distribution
        (B = 0) log_q is nan.

    Example:
        >>> import torch
        >>> from samplex_cuda.ops.tree import pack_nodes
        >>> from samplex_cuda.ops.tree_shared import tree_sample_shared
        >>> nodes, leaves = pack_nodes(torch.ones(2, 1), torch.zeros(2)), torch.tensor([0, 1])
        >>> rows = torch.tensor([[3.0], [-3.0]])  # one row nearly always right, one nearly always left
        >>> ids, log_q = tree_sample_shared(torch.tensor([0, 0]), rows, nodes, leaves, leaves, 5)
        >>> ids.shape, log_q[0].exp()
        (torch.Size([5]), tensor(0.5000))
    """
    return torch.ops.samplex.tree_sample_shared(
        key, x, nodes, leaf_class, class_leaf, num_samples, stratified, base_table, base_prefix, base_weight
    )


def tree_log_prob_shared(
    x: Tensor,
    ids: Tensor,
    nodes: Tensor,
    leaf_class: Tensor,
    class_leaf: Tensor,
    base_table: Tensor | None = None,
    base_prefix: Tensor | None = None,
    base_weight: float = 0.0,
) -> Tensor:
    """Log-probability [n] float32 of classes [n] as drawn by `tree_sample_shared`: bit-identical to its log_q.

    Example:
        >>> import torch
        >>> from samplex_cuda.ops.tree import pack_nodes
        >>> from samplex_cuda.ops.tree_shared import tree_log_prob_shared
        >>> nodes, leaves = pack_nodes(torch.ones(2, 1), torch.zeros(2)), torch.tensor([0, 1])
        >>> tree_log_prob_shared(torch.tensor([[3.0], [-3.0]]), torch.tensor([0, 1]), nodes, leaves, leaves).exp()
        tensor([0.5000, 0.5000])
    """
    return torch.ops.samplex.tree_log_prob_shared(
        x, ids, nodes, leaf_class, class_leaf, base_table, base_prefix, base_weight
    )


@register_fake("samplex::tree_sample_shared")
def _(
    key: Tensor,
    x: Tensor,
    nodes: Tensor,
    leaf_class: Tensor,
    class_leaf: Tensor,
    num_samples: int,
    stratified: bool = False,
    *base: Any,
) -> tuple[Tensor, Tensor]:
    return x.new_empty((num_samples,), dtype=torch.int64), x.new_empty((num_samples,))


@register_fake("samplex::tree_log_prob_shared")
def _(x: Tensor, ids: Tensor, nodes: Tensor, leaf_class: Tensor, class_leaf: Tensor, *base: Any) -> Tensor:
    return x.new_empty(ids.shape)
