"""Two sets of negatives in one normalizer."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["join_losses"]


def join_losses(first: Tensor, second: Tensor) -> Tensor:
    """The loss of two sets of negatives in one normalizer, from the losses of each: log(e^a + e^b - 1).

    Each loss is log(1 + S) with S the sum over its negatives relative to the target.

    Args:
        first: [B], not negative.
        second: [B].

    Example:
        >>> import torch
        >>> from samplex_cuda.functional._join import join_losses
        >>> join_losses(torch.tensor([3.0]).log1p(), torch.tensor([4.0]).log1p()).expm1()
        tensor([7.])
    """
    top = torch.maximum(first, second).detach()
    small = torch.log1p(first.clamp(max=1.0).expm1() + second.clamp(max=1.0).expm1())
    large = top + torch.log((first - top).exp() + (second - top).exp() - (-top).exp().clamp(max=0.9))
    return torch.where(top < 1.0, small, large)
