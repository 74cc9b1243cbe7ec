"""The probabilistic decision tree: `samplex::tree_sample`, `tree_log_prob`, `tree_log_prob_all`, `tree_topk`.

Nodes in heap order (root 1, children 2i and 2i + 1, leaf j at 2^depth + j); a row with projected features x goes right
at node i with probability sigmoid(w_i . x + b_i).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from samplex_cuda._library import register_fake
from samplex_cuda.tables import empty_table

__all__ = [
    "pack_nodes",
    "tree_log_prob",
    "tree_log_prob_all",
    "tree_project",
    "tree_sample",
    "tree_sample_and_score",
    "tree_topk",
    "unpack_nodes",
]

_ROW_BYTES = 32  # a node's row is a multiple of this: whole sectors of GPU memory


def pack_nodes(weights: Tensor, bias: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Weights and bias of every node as one aligned row each.

    Args:
        weights: [2^depth, k], row i for node i; row 0 is not used.
        bias: [2^depth]; +inf sends every row right, -inf left.
        dtype: float32 or bfloat16.

    Returns:
        [2^depth, stride]: k weights, the bias, zeros.

    Example:
        >>> import torch
        >>> from samplex_cuda.ops.tree import pack_nodes
        >>> pack_nodes(torch.zeros(4, 16), torch.zeros(4)).shape
        torch.Size([4, 24])
    """
    leaves, dim = weights.shape
    item = torch.empty(0, dtype=dtype).element_size()
    stride = -(-(dim + 1) * item // _ROW_BYTES) * _ROW_BYTES // item
    nodes = empty_table(leaves, stride, dtype=dtype, device=weights.device).zero_()
    nodes[:, :dim] = weights.to(dtype)
    nodes[:, dim] = bias.to(dtype)
    return nodes


def unpack_nodes(nodes: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Weights [2^depth, k] and bias [2^depth] of packed nodes, float32.

    Example:
        >>> import torch
        >>> from samplex_cuda.ops.tree import pack_nodes, unpack_nodes
        >>> weights, bias = unpack_nodes(pack_nodes(torch.ones(2, 3), torch.zeros(2)), 3)
        >>> weights.shape, bias
        (torch.Size([2, 3]), tensor([0., 0.]))
    """
    return nodes[:, :dim].float(), nodes[:, dim].float()


def tree_project(features: Tensor, mean: Tensor, projection: Tensor) -> Tensor:
    """(features - mean) @ projection, with the same bits on every backend and any number of threads.

    Args:
        features: [B, K] float32.
        mean: [K] float32.
        projection: [K, k] float32.

    Returns:
        [B, k] float32.

    Example:
        >>> import torch
        >>> from samplex_cuda.ops.tree import tree_project
        >>> tree_project(torch.tensor([[3.0, 5.0]]), torch.ones(2), torch.tensor([[1.0], [10.0]]))
        tensor([[42.]])
    """
    return torch.ops.samplex.tree_project(features, mean, projection)


def tree_sample_and_score(
    key: Tensor,
    features: Tensor,
    mean: Tensor,
    projection: Tensor,
    nodes: Tensor,
    leaf_class: Tensor,
    class_leaf: Tensor,
    num_samples: int,
    ids: Tensor,
    base_table: Tensor | None = None,
    base_prefix: Tensor | None = None,
    base_weight: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """`tree_project`, then `tree_sample` and `tree_log_prob` of given classes [B] or [B, n] on it, in one call.

    Returns:
        draws [B, m] int64, their log_q [B, m] float32, and the log-probability of `ids` in their shape, float32.

    Example:
        >>> import torch
        >>> from samplex_cuda.ops.tree import pack_nodes, tree_sample_and_score
        >>> nodes, leaves = pack_nodes(torch.zeros(2, 4), torch.zeros(2)), torch.tensor([0, 1])
        >>> key, ids = torch.tensor([0, 0]), torch.tensor([0, 1, 1])
        >>> args = (torch.randn(3, 6), torch.zeros(6), torch.randn(6, 4))
        >>> draws, log_q, scores = tree_sample_and_score(key, *args, nodes, leaves, leaves, 5, ids)
        >>> draws.shape, scores[0].exp()
        (torch.Size([3, 5]), tensor(0.5000))
    """
    return torch.ops.samplex.tree_sample_and_score(
        key, features, mean, projection, nodes, leaf_class, class_leaf, num_samples, ids, base_table, base_prefix,
        base_weight,
    )  # fmt: skip


def tree_sample(
    key: Tensor,
    x: Tensor,
    nodes: Tensor,
    leaf_class: Tensor,
    class_leaf: Tensor,
    num_samples: int,
    exclude: Tensor | None = None,
    exclude_offsets: Tensor | None = None,
    base_table: Tensor | None = None,
    base_prefix: Tensor | None = None,
    base_weight: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Draws from p_n(. | x), or from it without the excluded leaves of each row. The same bits on every backend.

    Args:
        key: [2] int64 (seed, offset).
        x: [B, k] float32 projected features.
        nodes: [2^depth, stride], from `pack_nodes`.
        leaf_class: [2^depth] int64, -1 for padding.
        class_leaf: [C] int64.
        num_samples: m.
        exclude: [B, P] int64 leaves, each row ascending, -1 first for "none"; or [nnz] with `exclude_offsets`.
        exclude_offsets: [B + 1] int64.
        base_table, base_prefix: [2^depth, 4] and [2^depth + 1] int64, an alias table over the leaves, from
            `build_alias` of their weights: a fixed law that is mixed in; None: none.
        base_weight: its share, in (0, 1]; 1 leaves the tree out.

    Returns:
        ids [B, m] int64 and log_q [B, m] float32.

    Example:
        >>> import torch
        >>> from samplex_cuda.ops.tree import pack_nodes, tree_sample
        >>> nodes = pack_nodes(torch.zeros(2, 4), torch.tensor([0.0, 0.0]))
        >>> leaves = torch.tensor([0, 1])
        >>> ids, log_q = tree_sample(torch.tensor([0, 0]), torch.randn(3, 4), nodes, leaves, leaves, 5)
        >>> ids.shape, log_q[0, 0].exp()
        (torch.Size([3, 5]), tensor(0.5000))
    """
    return torch.ops.samplex.tree_sample(
        key, x, nodes, leaf_class, class_leaf, num_samples, exclude, exclude_offsets, base_table, base_prefix,
        base_weight,
    )  # fmt: skip


def tree_log_prob(
    x: Tensor,
    ids: Tensor,
    nodes: Tensor,
    leaf_class: Tensor,
    class_leaf: Tensor,
    exclude: Tensor | None = None,
    exclude_offsets: Tensor | None = None,
    base_table: Tensor | None = None,
    base_prefix: Tensor | None = None,
    base_weight: float = 0.0,
) -> Tensor:
    """Log-probability [B, n] float32 of classes [B, n] as drawn by `tree_sample`: bit-identical to its log_q.

    Example:
        >>> import torch
        >>> from samplex_cuda.ops.tree import pack_nodes, tree_log_prob
        >>> nodes = pack_nodes(torch.zeros(2, 4), torch.tensor([0.0, 0.0]))
        >>> leaves = torch.tensor([0, 1])
        >>> tree_log_prob(torch.randn(1, 4), torch.tensor([[0, 1]]), nodes, leaves, leaves).exp()
        tensor([[0.5000, 0.5000]])
    """
    return torch.ops.samplex.tree_log_prob(
        x, ids, nodes, leaf_class, class_leaf, exclude, exclude_offsets, base_table, base_prefix, base_weight
    )


def tree_log_prob_all(
    x: Tensor,
    nodes: Tensor,
    leaf_class: Tensor,
    class_leaf: Tensor,
    base_table: Tensor | None = None,
    base_prefix: Tensor | None = None,
    base_weight: float = 0.0,
) -> Tensor:
    """Log-probability of every class, [B, C] float32.

    Example:
        >>> import torch
        >>> from samplex_cuda.ops.tree import pack_nodes, tree_log_prob_all
        >>> nodes = pack_nodes(torch.zeros(2, 4), torch.tensor([0.0, 0.0]))
        >>> leaves = torch.tensor([0, 1])
        >>> tree_log_prob_all(torch.randn(1, 4), nodes, leaves, leaves).exp()
        tensor([[0.5000, 0.5000]])
    """
    return torch.ops.samplex.tree_log_prob_all(x, nodes, leaf_class, class_leaf, base_table, base_prefix, base_weight)


def tree_topk(
    x: Tensor, nodes: Tensor, leaf_class: Tensor, class_leaf: Tensor, k: int, beam: int
) -> tuple[Tensor, Tensor]:
    """The k most probable classes that a beam search finds; exact where `beam` is at least the number of leaves.

    Args:
        x: [B, d] float32.
        nodes, leaf_class, class_leaf: the tree.
        k: how many, at most `beam`.
        beam: nodes kept at each level, at most 512.

    Returns:
        log_p [B, k] float32, descending, and ids [B, k] int64; equal ones by class; -inf and -1 where fewer were found.

    Example:
        >>> import torch
        >>> from samplex_cuda.ops.tree import pack_nodes, tree_topk
        >>> nodes = pack_nodes(torch.zeros(2, 4), torch.tensor([0.0, 1.0]))
        >>> leaves = torch.tensor([0, 1])
        >>> tree_topk(torch.randn(1, 4), nodes, leaves, leaves, 2, 2)[1]
        tensor([[1, 0]])
    """
    return torch.ops.samplex.tree_topk(x, nodes, leaf_class, class_leaf, k, beam)


@register_fake("samplex::tree_project")
def _(features: Tensor, mean: Tensor, projection: Tensor) -> Tensor:
    return features.new_empty((features.shape[0], projection.shape[1]))


@register_fake("samplex::tree_sample_and_score")
def _(
    key: Tensor,
    features: Tensor,
    mean: Tensor,
    projection: Tensor,
    nodes: Tensor,
    leaf_class: Tensor,
    class_leaf: Tensor,
    num_samples: int,
    ids: Tensor,
    *base: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    shape = (features.shape[0], num_samples)
    draws, log_q = features.new_empty(shape, dtype=torch.int64), features.new_empty(shape)
    return draws, log_q, features.new_empty(ids.shape)


@register_fake("samplex::tree_sample")
def _(
    key: Tensor, x: Tensor, nodes: Tensor, leaf_class: Tensor, class_leaf: Tensor, num_samples: int, *exclude: Any
) -> tuple[Tensor, Tensor]:
    shape = (x.shape[0], num_samples)
    return x.new_empty(shape, dtype=torch.int64), x.new_empty(shape, dtype=torch.float32)


@register_fake("samplex::tree_log_prob")
def _(x: Tensor, ids: Tensor, *tree: Any) -> Tensor:
    return x.new_empty(ids.shape, dtype=torch.float32)


@register_fake("samplex::tree_log_prob_all")
def _(x: Tensor, nodes: Tensor, leaf_class: Tensor, class_leaf: Tensor, *base: Any) -> Tensor:
    return x.new_empty((x.shape[0], class_leaf.shape[0]), dtype=torch.float32)


@register_fake("samplex::tree_topk")
def _(x: Tensor, nodes: Tensor, leaf_class: Tensor, class_leaf: Tensor, k: int, beam: int) -> tuple[Tensor, Tensor]:
    shape = (x.shape[0], k)
    return x.new_empty(shape, dtype=torch.float32), x.new_empty(shape, dtype=torch.int64)
