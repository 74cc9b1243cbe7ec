"""Sampled softmax."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from torch import Tensor

from samplex_cuda._checks import check_number
from samplex_cuda.losses.base import Loss, Needs
from samplex_cuda.ops.loss_types import Form, Forward, Inputs, StaticInputs
from samplex_cuda.ops.sampled_softmax import sampled_softmax, sampled_softmax_static

__all__ = ["SampledSoftmax"]


@dataclasses.dataclass(frozen=True, repr=False)
class SampledSoftmax(Loss):
    """Cross-entropy over the target and the draws, corrected for how they were drawn (Blanc & Rendle 2018).

    Args:
        label_smoothing: as in `F.cross_entropy`, over the target and the draws; training only.
        absolute: the logit is `|scale * (h @ w + b)|`, for samplers that favor large absolute logits.

    Example:
        >>> import torch, samplex_cuda as sx
        >>> loss = sx.losses.SampledSoftmax(label_smoothing=0.1)
        >>> head = sx.SampledClassifier(8, 100, sx.samplers.Uniform(100), num_samples=5, loss=loss)
        >>> head(torch.randn(4, 8), torch.arange(4)).shape
        torch.Size([])
    """

    name: ClassVar[str] = "sampled_softmax"
    draws_static: ClassVar[bool] = True
    label_smoothing: float = 0.0
    absolute: bool = False

    def __post_init__(self) -> None:
        """Checks the options."""
        check_number(type(self).__name__, "label_smoothing", self.label_smoothing, 0.0, 1.0)

    @property
    def needs(self) -> Needs:
        """See `Loss.needs`. Smoothing spreads evenly over the draws, so that copies of a class count each."""
        return _SMOOTHED if self.label_smoothing else _PLAIN

    def forward(self, x: Inputs, form: Form, need_grad: bool, need_hidden: bool) -> Forward:
        """See `Loss.forward`."""
        loss, lse, saved = sampled_softmax(
            x.hidden, x.weight, x.target, x.ids, x.log_q, x.bias, x.class_weight, x.known_offsets, x.known_ids,
            form.scale, self.label_smoothing, form.ignore_index, form.reduction, self.absolute, need_grad,
            form.with_lse, form.sparse, need_hidden,
        )  # fmt: skip
        return Forward(loss, saved, lse if form.with_lse else None)

    def forward_static(self, x: StaticInputs, form: Form, need_grad: bool, need_hidden: bool) -> tuple[Forward, Tensor]:
        """See `Loss.forward_static`."""
        law = x.law
        loss, ids, saved, unit_hidden = sampled_softmax_static(
            x.hidden, x.weight, x.target, x.key, law.number, x.num_samples, x.shared, law.table, law.prefix, x.bias,
            x.class_weight, form.scale, self.label_smoothing, form.ignore_index, form.reduction, self.absolute,
            need_grad, need_hidden, x.unit_hidden,
        )  # fmt: skip
        return Forward(loss, saved, None, unit_hidden if x.unit_hidden and unit_hidden.dim() == 2 else None), ids


_PLAIN, _SMOOTHED = Needs(), Needs(mergeable=False)
