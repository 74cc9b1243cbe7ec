"""A decision tree over the classes after some of them came or went."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["changed_tree"]


def changed_tree(
    weights: Tensor, bias: Tensor, leaf_class: Tensor, num_classes: int, live: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The nodes and leaves of a `Tree` over another number of classes, of which only some are drawn.

    New classes take leaves without a class, spread over all of them; if there are too few, the tree becomes the left
    half of one that is a level deeper. A node splits by the numbers of live classes on its sides if it had been closed,
    or if a new class is below it and it does not look at the features.

    Args:
        weights: [2^depth, k], row i for node i of the heap.
        bias: [2^depth].
        leaf_class: int64 [2^depth], -1 for leaves without a class.
        num_classes: the new C.
        live: bool [C], the classes that are drawn; None: all.

    Returns:
        weights, bias and leaf_class of the new tree.

    Example:
        >>> import torch
        >>> from samplex_cuda.samplers.tree_change import changed_tree
        >>> weights, bias, leaf_class = changed_tree(torch.ones(2, 1), torch.zeros(2), torch.tensor([1, 0]), 3, None)
        >>> leaf_class.tolist(), bias[1].exp().item()  # one class of three on the right
        ([1, 0, 2, -1], 0.5)
    """
    weights, bias = weights.clone(), bias.clone()
    before = int(leaf_class.max()) + 1
    leaf_class = torch.where(leaf_class < num_classes, leaf_class, -1)
    while leaf_class.shape[0] < num_classes:
        weights, bias = _below_new_root(weights), _below_new_root(bias)
        leaf_class = torch.cat([leaf_class, torch.full_like(leaf_class, -1)])
    device = leaf_class.device
    new = torch.arange(before, max(before, num_classes), device=device)
    free = (leaf_class < 0).nonzero().squeeze(1)
    if len(new):
        leaf_class[free[torch.arange(len(new), device=device) * len(free) // len(new)]] = new
    there = leaf_class >= 0
    if live is not None:
        there &= live.to(device)[leaf_class.clamp(min=0)]
    number, fresh = there.long(), leaf_class >= before
    while number.shape[0] > 1:
        half = number.shape[0] // 2
        left, right = number[0::2], number[1::2]
        fresh = fresh[0::2] | fresh[1::2]
        own, numbers = slice(half, 2 * half), weights[half : 2 * half]
        blind = fresh & (numbers == 0).all(1)
        by_number = (left > 0) & (right > 0) & (blind | bias[own].isinf())
        numbers.masked_fill_(by_number[:, None], 0.0)
        split = (right.double() / left).log().to(bias.dtype)
        bias[own] = torch.where(by_number, split, bias[own])
        bias[own].masked_fill_((left == 0) & (right > 0), torch.inf).masked_fill_((left > 0) & (right == 0), -torch.inf)
        number = left + right
    return weights, bias, leaf_class


def _below_new_root(heap: Tensor) -> Tensor:
    """The heap as the left half of one that is a level deeper; the other nodes are 0."""
    size = heap.shape[0]
    made = heap.new_zeros((2 * size, *heap.shape[1:]))
    node = torch.arange(1, size, device=heap.device)
    level = 2 ** node.double().log2().floor().long()  # the first node of the level
    made[node + level] = heap[1:]
    return made
