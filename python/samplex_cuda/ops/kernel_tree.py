"""The kernel tree: `samplex::kernel_tree_sample`, `kernel_tree_log_prob`, `_build`, `_update`, `_parents`.

Classes lie in order in leaves of `leaf_size`; leaves are those of a heap (root 1, children 2i and 2i + 1), filled up to
a power of two. Row i of `sums` is the sum of the features of the classes below node i. A query with features phi goes
down by <phi, sums of the children>, negative values counting as 0, and chooses in the leaf by the closed form of the
kernel; see `samplex_cuda.reference.kernel_tree` for the rules in plain torch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from samplex_cuda._library import register_fake

__all__ = [
    "FEATURE_ALIGN",
    "KERNELS",
    "ROW_ALIGN",
    "kernel_tree_build",
    "kernel_tree_log_prob",
    "kernel_tree_parents",
    "kernel_tree_sample",
    "kernel_tree_update",
    "pad_columns",
    "padded",
]

KERNELS = {"gaussian": 0, "exponential": 1, "quadratic": 2}
FEATURE_ALIGN = 16  # columns of `sums` and `phi` are a multiple of this
ROW_ALIGN = 8  # columns of `rows` and `h`


def padded(width: int, align: int) -> int:
    """`width` rounded up to a multiple of `align`.

    Example:
        >>> from samplex_cuda.ops.kernel_tree import padded
        >>> padded(100, 16), padded(128, 16)
        (112, 128)
    """
    return -(-width // align) * align


def pad_columns(x: Tensor, align: int) -> Tensor:
    """[n, width] with zero columns up to a multiple of `align`, contiguous; `x` itself where nothing is missing.

    Example:
        >>> import torch
        >>> from samplex_cuda.ops.kernel_tree import pad_columns
        >>> pad_columns(torch.ones(2, 5), 8).shape
        torch.Size([2, 8])
    """
    more = -x.shape[1] % align
    return torch.nn.functional.pad(x, (0, more)) if more else x.contiguous()


def kernel_tree_sample(
    key: Tensor,
    h: Tensor,
    phi: Tensor,
    rows: Tensor,
    sums: Tensor,
    leaf_size: int,
    kernel: str,
    scale: float,
    epsilon: float,
    num_samples: int,
    exclude: Tensor | None = None,
    exclude_offsets: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Draws from q(. | h) = (1 - epsilon) q_tree + epsilon / n, or from it without the excluded classes of each row.

    Args:
        key: [2] int64 (seed, offset).
        h: [B, dim] float32 queries, zeros behind their true width; dim is a multiple of 8.
        phi: [B, stride] float32 their features, zeros behind the true number; stride is a multiple of 16.
        rows: [n, dim] float32 class rows.
        sums: [2 * leaves, stride] float32.
        leaf_size: classes per leaf.
        kernel: "gaussian" exp(-scale |c - h|^2 / 2), "exponential" exp(scale c . h) or "quadratic" scale <h, c>^2 + 1.
        scale: of the kernel.
        epsilon: share of the uniform distribution, in [0, 1).
        num_samples: m.
        exclude: [B, P] int64 classes, each row ascending, -1 first for "none"; or [nnz] with `exclude_offsets`.
        exclude_offsets: [B + 1] int64.

    Returns:
        ids [B, m] int64, log_q [B, m] float32, and clipped [B] float32: the share of |value| that lay below zero at the
        nodes the row's draws passed.

    Example:
        >>> import torch
        >>> from samplex_cuda.ops.kernel_tree import kernel_tree_build, kernel_tree_parents, kernel_tree_sample
        >>> rows, phi, sums = torch.zeros(4, 8), torch.ones(4, 16), torch.zeros(8, 16)
        >>> kernel_tree_build(sums, phi, 0, 1)
        >>> kernel_tree_parents(sums)
        >>> key, h = torch.tensor([0, 0]), torch.zeros(2, 8)
        >>> ids, log_q, _ = kernel_tree_sample(key, h, phi[:2], rows, sums, 1, "gaussian", 1.0, 0.0, 5)
        >>> ids.shape, log_q[0, 0].exp()
        (torch.Size([2, 5]), tensor(0.2500))
    """
    return torch.ops.samplex.kernel_tree_sample(
        key, h, phi, rows, sums, leaf_size, KERNELS[kernel], scale, epsilon, num_samples, exclude, exclude_offsets
    )


def kernel_tree_log_prob(
    h: Tensor,
    phi: Tensor,
    ids: Tensor,
    rows: Tensor,
    sums: Tensor,
    leaf_size: int,
    kernel: str,
    scale: float,
    epsilon: float,
    exclude: Tensor | None = None,
    exclude_offsets: Tensor | None = None,
) -> Tensor:
    """Log-probability [B, n] float32 of classes [B, n] as drawn by `kernel_tree_sample`; an excluded one has -inf.

    For the same queries on the same device these are the bits of a draw's log_q.

    Example:
        >>> import torch
        >>> from samplex_cuda.ops.kernel_tree import kernel_tree_build, kernel_tree_log_prob, kernel_tree_parents
        >>> rows, phi, sums = torch.zeros(4, 8), torch.ones(4, 16), torch.zeros(8, 16)
        >>> kernel_tree_build(sums, phi, 0, 1)
        >>> kernel_tree_parents(sums)
        >>> ids = torch.tensor([[0, 3]])
        >>> kernel_tree_log_prob(torch.zeros(1, 8), phi[:1], ids, rows, sums, 1, "gaussian", 1.0, 0.0).exp()
        tensor([[0.2500, 0.2500]])
    """
    return torch.ops.samplex.kernel_tree_log_prob(
        h, phi, ids, rows, sums, leaf_size, KERNELS[kernel], scale, epsilon, exclude, exclude_offsets
    )


def kernel_tree_build(sums: Tensor, phi: Tensor, first: int, leaf_size: int) -> None:
    """Leaf sums of classes [first, first + n) from their features, in place; the leaves' old sums are dropped.

    Args:
        sums: [2 * leaves, stride] float32.
        phi: [n, stride] float32.
        first: a multiple of `leaf_size`.
        leaf_size: classes per leaf.

    Example:
        >>> import torch
        >>> from samplex_cuda.ops.kernel_tree import kernel_tree_build
        >>> sums = torch.zeros(4, 16)
        >>> kernel_tree_build(sums, torch.ones(3, 16), 0, 2)
        >>> sums[:, 0]
        tensor([0., 0., 2., 1.])
    """
    torch.ops.samplex.kernel_tree_build(sums, phi, first, leaf_size)


def kernel_tree_update(
    sums: Tensor,
    phi: Tensor,
    old: Tensor,
    ids: Tensor,
    leaf_size: int,
    *,
    taken: Tensor | None = None,
    rows: Tensor | None = None,
    fresh: Tensor | None = None,
    peaks: Tensor | None = None,
) -> None:
    """Leaf sums of some classes grow by `phi - old`, in place; `kernel_tree_parents` does the rest.

    Args:
        sums: [2 * leaves, stride] float32.
        phi: [n, stride] float32 new features of the classes.
        old: [n, stride] float32 the features their leaves hold now.
        ids: [n] int64, ascending, without repeats; -1, which is skipped, comes first.
        leaf_size: classes per leaf.
        taken: [n] bool; entries that are False are skipped.
        rows: [C, dim] float32, class rows to change as well, with `fresh`.
        fresh: [n, dim] float32, the new rows of the classes.
        peaks: [2, leaves + 1] float32: the largest |number| of each changed leaf is written to the first row and raises
            the second. The last column is not used.

    Example:
        >>> import torch
        >>> from samplex_cuda.ops.kernel_tree import kernel_tree_update
        >>> sums = torch.zeros(4, 16)
        >>> kernel_tree_update(sums, torch.ones(1, 16), torch.zeros(1, 16), torch.tensor([2]), 2)
        >>> sums[:, 0]
        tensor([0., 0., 0., 1.])
    """
    torch.ops.samplex.kernel_tree_update(sums, phi, old, ids, leaf_size, taken, rows, fresh, peaks)


def kernel_tree_parents(sums: Tensor, leaves: Tensor | None = None) -> None:
    """Sums of inner nodes from those of their children, in place, bottom up: of all, or of those above some leaves.

    Args:
        sums: [2 * leaves, stride] float32.
        leaves: [k] int64 ascending leaf numbers, -1 (skipped) first; None: all.

    Example:
        >>> import torch
        >>> from samplex_cuda.ops.kernel_tree import kernel_tree_parents
        >>> sums = torch.zeros(4, 16)
        >>> sums[2:] = 1.0
        >>> kernel_tree_parents(sums)
        >>> sums[:, 0]
        tensor([0., 2., 1., 1.])
    """
    torch.ops.samplex.kernel_tree_parents(sums, leaves)


@register_fake("samplex::kernel_tree_sample")
def _(
    key: Tensor,
    h: Tensor,
    phi: Tensor,
    rows: Tensor,
    sums: Tensor,
    leaf_size: int,
    kernel: int,
    scale: float,
    epsilon: float,
    num_samples: int,
    exclude: Tensor | None = None,
    exclude_offsets: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    shape = (h.shape[0], num_samples)
    return (
        h.new_empty(shape, dtype=torch.int64),
        h.new_empty(shape, dtype=torch.float32),
        h.new_empty(h.shape[0], dtype=torch.float32),
    )


@register_fake("samplex::kernel_tree_log_prob")
def _(
    h: Tensor,
    phi: Tensor,
    ids: Tensor,
    rows: Tensor,
    sums: Tensor,
    leaf_size: int,
    kernel: int,
    scale: float,
    epsilon: float,
    exclude: Tensor | None = None,
    exclude_offsets: Tensor | None = None,
) -> Tensor:
    return h.new_empty(ids.shape, dtype=torch.float32)


@register_fake("samplex::kernel_tree_build")
def _(sums: Tensor, phi: Tensor, first: int, leaf_size: int) -> None:
    return None


@register_fake("samplex::kernel_tree_update")
def _(
    sums: Tensor,
    phi: Tensor,
    old: Tensor,
    ids: Tensor,
    leaf_size: int,
    taken: Tensor | None = None,
    rows: Tensor | None = None,
    fresh: Tensor | None = None,
    peaks: Tensor | None = None,
) -> None:
    return None


@register_fake("samplex::kernel_tree_parents")
def _(sums: Tensor, leaves: Tensor | None = None) -> None:
    return None
