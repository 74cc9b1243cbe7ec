"""Full softmax: exact, over all classes."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from samplex_cuda._checks import check_number
from samplex_cuda.losses.base import Loss, Needs

__all__ = ["FullSoftmax"]


@dataclasses.dataclass(frozen=True, repr=False)
class FullSoftmax(Loss):
    """Cross-entropy over all classes: exact, O(C) per row, dense gradients; `sx.functional.full_softmax`.

    Args:
        label_smoothing: as in `F.cross_entropy`; training only.
        absolute: the logit is `|scale * (h @ w + b)|`.

    Example:
        >>> import torch, samplex_cuda as sx
        >>> head = sx.SampledClassifier(8, 100, loss=sx.losses.FullSoftmax(label_smoothing=0.1))
        >>> head(torch.randn(4, 8), torch.arange(4)).shape
        torch.Size([])
    """

    name: ClassVar[str] = "full_softmax"
    normalizes: ClassVar[bool] = True
    takes_target_weight: ClassVar[bool] = True
    label_smoothing: float = 0.0
    absolute: bool = False

    def __post_init__(self) -> None:
        """Checks the options."""
        check_number(type(self).__name__, "label_smoothing", self.label_smoothing, 0.0, 1.0)

    @property
    def needs(self) -> Needs:
        """See `Loss.needs`."""
        return Needs(draws=False, weighted_draws=False, mergeable=False)
