"""What the parts of a fused loss pass to each other: inputs, options, what a forward keeps, what a backward gives."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

__all__ = [
    "ENTRY_KINDS",
    "REDUCTIONS",
    "Entries",
    "Form",
    "Forward",
    "Inputs",
    "LossGrad",
    "Plan",
    "Sink",
    "StaticForward",
    "StaticInputs",
    "StaticLaw",
    "Table",
    "TableSink",
    "acc_dtype",
]

REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}
# The losses that one op serves, and the numbers by which it knows them.
ENTRY_KINDS = {"negative_sampling": 0, "nce": 1, "one_vs_each": 2, "augment_reduce": 3}


class Inputs(NamedTuple):
    """The tensors of a loss in the form the ops take: checked, flat, contiguous, on one device."""

    hidden: Tensor  # [B, d], the dtype of weight
    weight: Tensor  # [C, d]
    bias: Tensor | None  # [C]
    target: Tensor  # int64 [B] or [B, P]
    ids: Tensor  # int64 [B, m], or [m] shared by the batch
    log_q: Tensor  # the shape of ids, float32 (float64 for float64 weights)
    class_weight: Tensor | None = None  # [C]
    known_offsets: Tensor | None = None  # int64 [B + 1], known positives as CSR
    known_ids: Tensor | None = None  # int64 [n]
    target_log_q: Tensor | None = None  # the shape of target
    row_value: Tensor | None = None  # [B], what the loss keeps per example
    draw_labels: Tensor | None = None  # int64 [m], shared draws of `SampledSoftmax`: what each is, instead of its id
    row_labels: Tensor | None = None  # int64 [B]: draws of this label are masked in the row
    target_weight: Tensor | None = None  # the shape of target, what each target weighs


class StaticInputs(NamedTuple):
    """The tensors of a loss whose op draws by itself, from a distribution that is the same for every row."""

    hidden: Tensor  # [B, d], the dtype of weight
    weight: Tensor  # [C, d]
    bias: Tensor | None  # [C]
    target: Tensor  # int64 [B]
    class_weight: Tensor | None  # [C]
    key: Tensor  # int64 [2]
    num_samples: int
    shared: bool  # one draw for the batch; otherwise per row, excluding the target
    law: StaticLaw
    unit_hidden: bool = False  # whether the sink wants the gradient of hidden for an upstream gradient of 1
    example_state: Tensor | None = None  # [N], a number per example, which the op moves
    example_index: Tensor | None = None  # int64 [B], the examples of the batch


class StaticLaw(NamedTuple):
    """A static distribution in the form the ops take."""

    number: int  # StaticLaw of csrc/sampler/static_sample
    table: Tensor | None = None  # of an alias table
    prefix: Tensor | None = None


class Form(NamedTuple):
    """The options that every loss shares; resolved once per head."""

    scale: float = 1.0
    ignore_index: int = -100
    reduction: int = REDUCTIONS["mean"]
    sparse: bool = True
    with_lse: bool = False
    normalize: bool = False  # class rows on the unit sphere; `hidden` is there already


class Forward(NamedTuple):
    """What a loss forward returns."""

    loss: Tensor  # [] or [B]
    saved: Tensor  # unit gradients and what the reduction needs, laid out as in loss/fused
    lse: Tensor | None = None  # [B], with `Form.with_lse`
    ratio: Tensor | None = None  # [B], what `Loss.update_state` needs; `saved` ends with it


class StaticForward(NamedTuple):
    """What the forward of a loss that draws returns."""

    loss: Tensor  # [] or [B]
    saved: Tensor  # as in `Forward`
    ids: Tensor  # int64 [B, m] or [m], the draws
    unit_hidden: Tensor | None = None  # [B, d], the gradient of hidden if that of the loss is 1; CPU, if asked for


class Plan(NamedTuple):
    """What a backward needs to know besides tensors."""

    op: str
    num_classes: int
    weight_dtype: torch.dtype
    bias_dtype: torch.dtype | None
    reduction: int
    with_lse: bool = False  # whether `saved` holds the gradients of lse too
    with_ratio: bool = False  # whether `saved` ends with a ratio per row
    normalize: bool = False  # whether class rows were taken on the sphere: gradients along them are left out


class LossGrad(NamedTuple):
    """What the backward of a loss passes to its sink."""

    plan: Plan
    hidden: Tensor
    target: Tensor
    ids: Tensor
    saved: Tensor
    grad_loss: Tensor  # contiguous, [] or [B]
    grad_lse: Tensor | None  # contiguous, [B]
    version: int = 0  # of the weight in the forward
    weight: Tensor | None = None  # with plan.normalize
    unit_hidden: list[Tensor] | None = None  # of `StaticForward`, for the first who takes it out of the list


class Entries(NamedTuple):
    """Weight gradients before they are summed by class: ids [S, k] or [S], coefficients [S, k], rows [S, d], twice."""

    ids_a: Tensor
    coef_a: Tensor
    rows_a: Tensor
    ids_b: Tensor
    coef_b: Tensor
    rows_b: Tensor
    bias_b: Tensor | None
    keys: Tensor | None = None  # sort keys of the ids, where a kernel made them on its way; for one update

    def clone(self) -> Entries:
        """Copies of every tensor but the keys."""
        copies: Any = [None if t is None else t.clone() for t in self[:-1]]
        return Entries(*copies)

    def unscaled(self, scale: Tensor, found_inf: Tensor) -> Entries:
        """The gradient divided by a loss scale; `found_inf`, fp32 [], becomes 1 if it holds an inf or nan."""
        parts = [t for t in (self.coef_a, self.coef_b, self.bias_b, self.rows_a, self.rows_b) if t is not None]
        finite = torch.stack([t.isfinite().all() for t in parts]).all()
        torch.maximum(found_inf, 1.0 - finite.to(found_inf.dtype), out=found_inf)
        inverse = scale.reciprocal().to(self.coef_a.dtype)
        bias = None if self.bias_b is None else self.bias_b * inverse
        return self._replace(coef_a=self.coef_a * inverse, coef_b=self.coef_b * inverse, bias_b=bias)


class Table(NamedTuple):
    """What a sink needs to know of a class table whose gradient is available."""

    size: tuple[int, int]  # C, d
    weight_dtype: torch.dtype
    bias_dtype: torch.dtype | None
    version: int  # of the weight in the forward
    on_sphere: Tensor | None = None  # the weight, if its rows were taken on the unit sphere


class Sink(Protocol):
    """Takes the gradient of a class table."""

    at_once: bool
    """Whether one op may make the update from what a forward kept, so that the forward makes the gradient of hidden."""

    def deliver(
        self, grad: LossGrad, need: tuple[bool, bool, bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Gradients of hidden, weight and bias for autograd; None if the sink has used them up."""
        ...


class TableSink(Sink, Protocol):
    """Also takes the gradient of a class table where that of `hidden` goes another way."""

    def deliver_entries(
        self, found: Entries, table: Table, need: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        """Gradients of weight and bias for autograd, or None, from a weight gradient before it is summed by class."""
        ...

    def deliver_rows(
        self, ids: Tensor, rows: Tensor, of_bias: Tensor, table: Table, need: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        """The same from gradient rows [n, d], and [n] of the bias, of distinct classes `ids`, int64 [n] ascending."""
        ...


def acc_dtype(dtype: torch.dtype) -> torch.dtype:
    """Sums of this storage type run in float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32
