"""Draws without replacement: `samplex::subset_sample`."""

from __future__ import annotations

import torch
from torch import Tensor

from samplex_cuda._library import register_fake

__all__ = ["subset_sample"]


def subset_sample(key: Tensor, batch: int, num_samples: int, num_classes: int, exclude: Tensor | None = None) -> Tensor:
    """For each row k distinct classes of [0, n) without the row's excluded one, every k-subset equally likely.

    Floyd's algorithm: k random numbers and k look-ups a row, whatever n is. The same bits on every backend and thread
    count. The order of the ids in a row means nothing.

    Args:
        key: [2] int64 (seed, offset); its device is the op's.
        batch: B.
        num_samples: k, at most n, or n - 1 with `exclude`.
        num_classes: n.
        exclude: [B] int64, or None; -1 excludes nothing in that row.

    Returns:
        ids [B, k] int64.

    Example:
        >>> import torch
        >>> from samplex_cuda.ops.subset_sample import subset_sample
        >>> ids = subset_sample(torch.tensor([0, 0]), 2, 3, 4, torch.tensor([1, 3]))
        >>> ids.sort(1).values
        tensor([[0, 2, 3],
                [0, 1, 2]])
    """
    return torch.ops.samplex.subset_sample(key, batch, num_samples, num_classes, exclude)


@register_fake("samplex::subset_sample")
def _(key: Tensor, batch: int, num_samples: int, num_classes: int, exclude: Tensor | None = None) -> Tensor:
    return key.new_empty((batch, num_samples), dtype=torch.int64)
