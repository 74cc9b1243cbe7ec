"""Sampled softmax."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import torch

from samplex_cuda._checks import check_number
from samplex_cuda.losses.base import Loss, Needs
from samplex_cuda.losses.margin import Margin
from samplex_cuda.ops.loss_types import Form, Forward, Inputs, StaticForward, StaticInputs
from samplex_cuda.ops.sampled_softmax import sampled_softmax, sampled_softmax_static

__all__ = ["SampledSoftmax"]


@dataclasses.dataclass(frozen=True, repr=False)
class SampledSoftmax(Loss):
    """Cross-entropy over the target and the draws, corrected for how they were drawn (Blanc & Rendle 2018).

    Args:
        label_smoothing: as in `F.cross_entropy`, over the target and the draws; training only.
        absolute: the logit is `|scale * (h @ w + b)|`, for samplers that favor large absolute logits.
        margin: a `Margin` on the positive, `ArcFace(0.5)` or `CosFace(0.35)`; training only. Requires a head with
            `normalize=True`. See docs/faces.md.
        corrected: False leaves log q out, so that draws count as they are, as in Partial FC: the loss is then no
            estimate of the full softmax, for any number of draws.

    Example:
        >>> import torch, samplex_cuda as sx
        >>> loss = sx.losses.SampledSoftmax(label_smoothing=0.1)
        >>> head = sx.SampledClassifier(8, 100, sx.samplers.Uniform(100), num_samples=5, loss=loss)
        >>> head(torch.randn(4, 8), torch.arange(4)).shape
        torch.Size([])
    """

    name: ClassVar[str] = "sampled_softmax"
    normalizes: ClassVar[bool] = True
    takes_target_weight: ClassVar[bool] = True
    label_smoothing: float = 0.0
    absolute: bool = False
    margin: Margin | None = None
    corrected: bool = True

    def __post_init__(self) -> None:
        """Checks the options."""
        op = type(self).__name__
        check_number(op, "label_smoothing", self.label_smoothing, 0.0, 1.0)
        if self.margin is not None and not isinstance(self.margin, Margin):
            raise TypeError(f"{op}: margin must be a Margin of samplex_cuda.losses or None, got {self.margin!r}")
        if self.margin is not None and self.absolute:
            raise ValueError(f"{op}: absolute must be False with a margin, got True")

    @property
    def compares_angles(self) -> bool:  # type: ignore[override]
        """See `Loss.compares_angles`: a margin is one of angles."""
        return self.margin is not None

    @property
    def joins(self) -> bool:  # type: ignore[override]
        """See `Loss.joins`: smoothing adds the logits of all draws."""
        return not self.label_smoothing

    @property
    def _margin(self) -> tuple[float, ...]:
        return () if self.margin is None else self.margin.numbers()

    @property
    def needs(self) -> Needs:
        """See `Loss.needs`. Smoothing, and draws without log q, count each copy of a class."""
        return _PLAIN if self.corrected and not self.label_smoothing else _BY_COPY

    def forward(self, x: Inputs, form: Form, need_grad: bool, need_hidden: bool) -> Forward:
        """See `Loss.forward`."""
        log_q = x.log_q
        if not self.corrected:  # what the op adds to each draw, -log_q - log m, becomes 0
            log_q = torch.full_like(log_q, -math.log(max(x.ids.shape[-1], 1)))
        loss, lse, saved = sampled_softmax(
            x.hidden, x.weight, x.target, x.ids, log_q, x.bias, x.class_weight, x.known_offsets, x.known_ids,
            form.scale, self.label_smoothing, form.ignore_index, form.reduction, self.absolute, need_grad,
            form.with_lse, form.sparse, need_hidden, x.draw_labels, x.row_labels, x.target_weight, form.normalize,
            self._margin,
        )  # fmt: skip
        return Forward(loss, saved, lse if form.with_lse else None)

    def draws_static(self, shared: bool) -> bool:
        """See `Loss.draws_static`."""
        return self.corrected

    def static_options(self, form: Form) -> tuple[Any, ...]:
        """See `Loss.static_options`."""
        options = (
            form.scale, self.label_smoothing, form.ignore_index, form.reduction, self.absolute, form.normalize,
            self._margin,
        )  # fmt: skip
        return () if options == _DEFAULTS else options

    def forward_static(
        self, x: StaticInputs, options: tuple[Any, ...], need_grad: bool, need_hidden: bool
    ) -> StaticForward:
        """See `Loss.forward_static`."""
        hidden, weight, bias, target, class_weight, key, num_samples, shared, law, unit_hidden, _state, _index = x
        number, table, prefix = law
        if options or table is not None or class_weight is not None or not (need_grad and need_hidden):
            loss, ids, saved, unit = sampled_softmax_static(
                hidden, weight, target, key, num_samples, number, shared, bias, unit_hidden, table, prefix,
                class_weight, *(options or _DEFAULTS), need_grad, need_hidden,
            )  # fmt: skip
        else:  # the op takes its defaults faster than values from here
            loss, ids, saved, unit = sampled_softmax_static(
                hidden, weight, target, key, num_samples, number, shared, bias, unit_hidden
            )
        return StaticForward(loss, saved, ids, unit if unit.dim() == 2 else None)


_DEFAULTS = (1.0, 0.0, -100, 1, False, False, ())  # of the op's options
_PLAIN, _BY_COPY = Needs(), Needs(mergeable=False)
