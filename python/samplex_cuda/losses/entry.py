"""The losses that are sums over entries: negative sampling, NCE, one-vs-each, augment-and-reduce."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from samplex_cuda import _device
from samplex_cuda._checks import check_int, check_number
from samplex_cuda.losses.base import ExampleState, Loss, Needs
from samplex_cuda.ops.entry_loss import augment_reduce_static_, entry_loss, entry_loss_static, ratio_of
from samplex_cuda.ops.loss_types import ENTRY_KINDS, Form, Forward, Inputs, StaticForward, StaticInputs

__all__ = ["NCE", "AugmentReduce", "NegativeSampling", "OneVsEach"]


class _EntryLoss(Loss):
    """What the four share: one op."""

    reg: float = 0.0

    def forward(self, x: Inputs, form: Form, need_grad: bool, need_hidden: bool) -> Forward:
        """See `Loss.forward`."""
        loss, saved = entry_loss(
            x.hidden, x.weight, x.target, x.ids, x.log_q, x.target_log_q, x.row_value, x.bias, x.class_weight,
            x.known_offsets, x.known_ids, ENTRY_KINDS[self.name], form.scale, self.reg, form.ignore_index,
            form.reduction, need_grad, form.sparse,
        )  # fmt: skip
        return Forward(loss, saved, ratio=ratio_of(saved, x.hidden) if self.needs.example_index else None)

    def draws_static(self, shared: bool) -> bool:
        """See `Loss.draws_static`."""
        return True

    def static_options(self, form: Form) -> tuple[Any, ...]:
        """See `Loss.static_options`."""
        return ENTRY_KINDS[self.name], form.scale, self.reg, form.ignore_index, form.reduction

    def forward_static(
        self, x: StaticInputs, options: tuple[Any, ...], need_grad: bool, need_hidden: bool
    ) -> StaticForward:
        """See `Loss.forward_static`."""
        law = x.law
        loss, ids, saved = entry_loss_static(
            x.hidden, x.weight, x.target, x.key, law.number, x.num_samples, x.shared, law.table, law.prefix, x.bias,
            x.class_weight, *options, need_grad,
        )  # fmt: skip
        return StaticForward(loss, saved, ids)


@dataclasses.dataclass(frozen=True, repr=False)
class NegativeSampling(_EntryLoss):
    """Logistic regression of the target against draws of noise (Bamler & Mandt 2020, Eq. 2 and 6).

    Scores are learned relative to the sampler's distribution p_n, so evaluation and prediction add log p_n(y|x) back
    (Eq. 5), and the sampler must stay fixed.

    Args:
        reg: lambda of Eq. 6; pulls the corrected scores to zero.

    Example:
        >>> import samplex_cuda as sx
        >>> sx.losses.NegativeSampling(reg=1e-3).needs.target_log_q
        True
    """

    name: ClassVar[str] = "negative_sampling"
    reg: float = 0.0

    def __post_init__(self) -> None:
        """Checks the options."""
        check_number(type(self).__name__, "reg", self.reg, 0.0)

    @property
    def needs(self) -> Needs:
        """See `Loss.needs`."""
        return Needs(
            excludes_target=False, weighted_draws=False, mergeable=False, target_log_q=self.reg != 0.0, prior=True
        )


@dataclasses.dataclass(frozen=True, repr=False)
class NCE(_EntryLoss):
    """Noise contrastive estimation (Gutmann & Hyvarinen 2010): is a class the target, or one of m draws of noise?

    Example:
        >>> import samplex_cuda as sx
        >>> sx.losses.NCE().needs.excludes_target
        False
    """

    name: ClassVar[str] = "nce"

    @property
    def needs(self) -> Needs:
        """See `Loss.needs`."""
        return Needs(excludes_target=False, weighted_draws=False, mergeable=False, target_log_q=True)


@dataclasses.dataclass(frozen=True, repr=False)
class OneVsEach(_EntryLoss):
    """The one-vs-each bound of the softmax (Titsias 2016), its sum over the other classes estimated by the draws.

    Example:
        >>> import samplex_cuda as sx
        >>> sx.losses.OneVsEach().needs.weighted_draws
        True
    """

    name: ClassVar[str] = "one_vs_each"


@dataclasses.dataclass(frozen=True, repr=False)
class AugmentReduce(_EntryLoss):
    """The bound of augment and reduce (Ruiz et al. 2018), with one eta per training example.

    The head keeps log eta of each example in `log_eta` [num_examples], at least fp32, in its `state_dict()`, and
    `forward` needs the examples' `index`. All start at C, the sum where all scores are equal. An example that occurs
    twice in a batch keeps the larger result.

    Args:
        num_examples: how many training examples there are.
        rate: rho in (0, 1]; a training forward moves the eta it has used to `(1 - rho) * eta + rho * R`, where R is the
            estimated sum of the example.

    Example:
        >>> import torch, samplex_cuda as sx
        >>> loss = sx.losses.AugmentReduce(num_examples=50)
        >>> head = sx.SampledClassifier(8, 100, sx.samplers.Uniform(100), num_samples=5, loss=loss)
        >>> _ = head(torch.randn(4, 8), torch.arange(4), index=torch.tensor([7, 3, 49, 0]))
        >>> head.log_eta.shape
        torch.Size([50])
    """

    name: ClassVar[str] = "augment_reduce"
    num_examples: int | None = None
    rate: float = 0.5

    def __post_init__(self) -> None:
        """Checks the options."""
        check_int(type(self).__name__, "num_examples", self.num_examples)
        check_number(type(self).__name__, "rate", self.rate, 0.0, 1.0, open_low=True)

    @property
    def needs(self) -> Needs:
        """See `Loss.needs`."""
        return Needs(example_index=True)

    def example_state(self, num_classes: int) -> ExampleState:
        """See `Loss.example_state`."""
        assert self.num_examples is not None
        return ExampleState("log_eta", self.num_examples, math.log(num_classes))

    def moves_state(self, like: Tensor) -> bool:
        """See `Loss.moves_state`: on a GPU, where each of the operations of `update_state` would be a launch."""
        return _device.host_waits(like)

    def static_options(self, form: Form) -> tuple[Any, ...]:
        """See `Loss.static_options`."""
        return self.rate, form.scale, form.ignore_index, form.reduction

    def forward_static(
        self, x: StaticInputs, options: tuple[Any, ...], need_grad: bool, need_hidden: bool
    ) -> StaticForward:
        """See `Loss.forward_static`."""
        law, state, index = x.law, x.example_state, x.example_index
        assert state is not None
        assert index is not None
        loss, ids, saved = augment_reduce_static_(
            x.hidden, x.weight, x.target, x.key, law.number, x.num_samples, x.shared, law.table, law.prefix, x.bias,
            x.class_weight, state, index, *options, need_grad,
        )  # fmt: skip
        return StaticForward(loss, saved, ids)

    @torch.no_grad()
    def update_state(self, state: Tensor, index: Tensor, used: Tensor, extra: Tensor) -> None:
        """See `Loss.update_state`; `extra` is R / eta."""
        keep = math.log1p(-self.rate) if self.rate < 1.0 else -math.inf
        # A sum that overflowed counts as the largest that does not; NaN leaves eta unchanged; R is never below 1.
        log_sum = torch.minimum(used + extra.log(), used + 88.0)
        moved = torch.logaddexp(used + keep, log_sum + math.log(self.rate))
        moved = torch.where(log_sum.isnan(), used, moved).clamp_min(0.0)
        # The larger one where an index occurs twice: that does not depend on the order.
        state.scatter_reduce_(0, index, moved, "amax", include_self=False)
