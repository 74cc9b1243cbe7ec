"""The kernel tree in plain torch and float64: the readable specification, and the oracle of the tests.

Classes 0 .. n-1 lie in buckets ("leaves") of `leaf_size` consecutive ones; the leaves, filled up to a power of two with
empty ones, are the leaves of a heap (root 1, children 2i and 2i + 1). Node i keeps z_i, the sum of phi(c) over its
classes. A query h goes from the root to a leaf, with v_i = <phi(h), z_i>:

    v+ = max(v, floor * classes below)          floor = 1 for the quadratic kernel, else 0
    v+ = 0                                      where no class is below
    P(child | node) = v+_child / (v+_left + v+_right); where both are 0, by the number of classes below

and in the leaf takes class c with probability K(h, c) / sum of K(h, .), by the closed form of the kernel. That is
q_tree; the sampler's distribution is q = (1 - epsilon) q_tree + epsilon / n.

Kernels: "gaussian" exp(-scale |c - h|^2 / 2), "exponential" exp(scale c . h), "quadratic" scale <h, c>^2 + 1.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from samplex_cuda.reference.static_sample import philox_bits

__all__ = ["conditional", "leaf_scores", "node_sums", "sample", "tree_law", "tree_shape"]


def tree_shape(num_classes: int, leaf_size: int) -> tuple[int, int]:
    """(depth, leaves): leaves is the power of two that holds all buckets.

    Example:
        >>> from samplex_cuda.reference.kernel_tree import tree_shape
        >>> tree_shape(17, 4)
        (3, 8)
    """
    buckets = -(-num_classes // leaf_size)
    depth = (buckets - 1).bit_length()
    return depth, 1 << depth


def node_sums(phi: Tensor, leaf_size: int) -> Tensor:
    """z of every node, [2 * leaves, F] float64, from the features [n, F] of the classes; row 0 is not used.

    Example:
        >>> import torch
        >>> from samplex_cuda.reference.kernel_tree import node_sums
        >>> node_sums(torch.ones(3, 1), 1).flatten()
        tensor([0., 3., 2., 1., 1., 1., 1., 0.], dtype=torch.float64)
    """
    num_classes, width = phi.shape
    _, leaves = tree_shape(num_classes, leaf_size)
    sums = torch.zeros(2 * leaves, width, dtype=torch.float64)
    padded = torch.zeros(leaves * leaf_size, width, dtype=torch.float64)
    padded[:num_classes] = phi.double()
    sums[leaves:] = padded.view(leaves, leaf_size, width).sum(1)
    for node in range(leaves - 1, 0, -1):
        sums[node] = sums[2 * node] + sums[2 * node + 1]
    return sums


def leaf_scores(h: Tensor, rows: Tensor, kernel: str, scale: float) -> Tensor:
    """log K(h, c), [B, n] float64.

    Example:
        >>> import torch
        >>> from samplex_cuda.reference.kernel_tree import leaf_scores
        >>> leaf_scores(torch.ones(1, 2), torch.ones(1, 2), "quadratic", 2.0).exp()
        tensor([[9.0000]], dtype=torch.float64)
    """
    h, rows = h.double(), rows.double()
    if kernel == "gaussian":
        return -0.5 * scale * ((h[:, None, :] - rows[None, :, :]) ** 2).sum(2)
    dots = h @ rows.T
    return scale * dots if kernel == "exponential" else torch.log(scale * dots * dots + 1.0)


def _branches(values: Tensor, num_classes: int, leaf_size: int, kernel: str) -> Tensor:
    """P(node | parent) of every node, [B, 2 * leaves], from v of every node."""
    leaves = values.shape[1] // 2
    depth = leaves.bit_length() - 1
    p = torch.ones_like(values)
    floor = 1.0 if kernel == "quadratic" else 0.0
    for level in range(1, depth + 1):
        first = 1 << level
        span = leaf_size << (depth - level)
        begin = torch.arange(first, dtype=torch.float64) * span
        count = (num_classes - begin).clamp(0, span)
        v = values[:, first : 2 * first]
        plus = torch.where(v < floor * count, floor * count, v)
        plus = torch.where(count == 0, 0.0, plus).view(len(v), -1, 2)
        total = plus.sum(2, keepdim=True)
        plus = torch.where(total == 0, count.view(-1, 2), plus)
        p[:, first : 2 * first] = (plus / plus.sum(2, keepdim=True)).flatten(1)
        # Below a node without classes nothing is asked; 0 / 0 there is no probability.
        p[:, first : 2 * first] = torch.where(count == 0, 0.0, p[:, first : 2 * first])
    return p


def tree_law(h: Tensor, phi: Tensor, rows: Tensor, sums: Tensor, leaf_size: int, kernel: str, scale: float) -> Tensor:
    """log q_tree of every class, [B, n] float64: the product of the path and the leaf.

    Args:
        h: [B, d] queries.
        phi: [B, F] their features.
        rows: [n, d] class rows.
        sums: [2 * leaves, F].
        leaf_size: classes per leaf.
        kernel: of the leaf.
        scale: of the kernel.

    Example:
        >>> import torch
        >>> from samplex_cuda.reference.kernel_tree import node_sums, tree_law
        >>> one = torch.ones(3, 1)
        >>> tree_law(one[:1], one[:1], one, node_sums(one, 1), 1, "exponential", 1.0).exp()
        tensor([[0.3333, 0.3333, 0.3333]], dtype=torch.float64)
    """
    num_classes, leaves = rows.shape[0], sums.shape[0] // 2
    p = _branches(phi.double() @ sums.double().T, num_classes, leaf_size, kernel)
    log_path = torch.zeros(h.shape[0], 1, dtype=torch.float64)
    first = 2
    while first <= leaves:
        log_path = log_path.repeat_interleave(2, 1) + p[:, first : 2 * first].log()
        first *= 2
    scores = leaf_scores(h, rows, kernel, scale)
    padded = torch.full((h.shape[0], leaves * leaf_size), -math.inf, dtype=torch.float64)
    padded[:, :num_classes] = scores
    padded = padded.view(h.shape[0], leaves, leaf_size)
    inside = padded - torch.logsumexp(padded, 2, keepdim=True)
    return (log_path.unsqueeze(2) + inside).flatten(1)[:, :num_classes]


def conditional(log_tree: Tensor, epsilon: float, excluded: list[list[int]] | None = None) -> Tensor:
    """log q of every class, [B, n] float64: the mixture with uniform, given that no class is excluded.

    Example:
        >>> import torch
        >>> from samplex_cuda.reference.kernel_tree import conditional
        >>> conditional(torch.log(torch.tensor([[0.5, 0.25, 0.25]])), 0.0, [[0]]).exp()
        tensor([[0.0000, 0.5000, 0.5000]], dtype=torch.float64)
    """
    q = (1.0 - epsilon) * log_tree.double().exp() + epsilon / log_tree.shape[1]
    for row, ids in enumerate(excluded or []):
        q[row, ids] = 0.0
    return q.log() - q.sum(1, keepdim=True).log()


def sample(
    seed: int,
    offset: int,
    log_tree: Tensor,
    leaf_size: int,
    epsilon: float,
    num_samples: int,
    excluded: list[list[int]] | None = None,
    band: float = 1e-5,
) -> Tensor:
    """Classes drawn with the op's own random numbers, [B, m]; a choice within `band` of its threshold gives -1 instead.

    Philox block 255 of a draw chooses the component (first half) and the class of the uniform one (second half). The
    number of level l is half l % 2 of block l // 2: the right child is taken if u < P(right | node, nothing excluded);
    the number of level `depth` chooses in the leaf, classes in order.
    """
    batch, num_classes = log_tree.shape
    depth, leaves = tree_shape(num_classes, leaf_size)
    p = torch.zeros(batch, leaves * leaf_size, dtype=torch.float64)
    p[:, :num_classes] = log_tree.exp()
    drawn = torch.empty(batch, num_samples, dtype=torch.int64)
    for b in range(batch):
        out = sorted(set(excluded[b])) if excluded else []
        p[b, out] = 0.0
        on_tree, on_uniform = (1.0 - epsilon) * float(p[b].sum()), epsilon * (num_classes - len(out)) / num_classes
        for draw in range(num_samples):
            component, pick = philox_bits(seed, offset, b, draw, 255)
            share = on_uniform / (on_tree + on_uniform)
            u = (component >> 11) * 2.0**-53
            sure = abs(u - share) > band or share in (0.0, 1.0)
            if u < share:
                kept = [c for c in range(num_classes) if c not in out]
                drawn[b, draw] = kept[pick * len(kept) >> 64] if sure else -1
                continue
            low, high = 0, leaves * leaf_size
            for level in range(depth):
                u = (philox_bits(seed, offset, b, draw, level // 2)[level % 2] >> 11) * 2.0**-53
                middle = (low + high) // 2
                on_left, on_right = float(p[b, low:middle].sum()), float(p[b, middle:high].sum())
                right = on_right / (on_left + on_right)
                sure &= abs(u - right) > band or right in (0.0, 1.0)
                low, high = (middle, high) if u < right else (low, middle)
            u = (philox_bits(seed, offset, b, draw, depth // 2)[depth % 2] >> 11) * 2.0**-53
            inside = p[b, low:high].cumsum(0) / p[b, low:high].sum()
            sure &= bool(((u - inside).abs() > band).logical_or(inside >= 1.0 - 1e-15).all())
            drawn[b, draw] = low + int((inside <= u).sum()) if sure else -1
    return drawn
