"""What a loss is: an object that carries its own options and declares what it needs.

A head resolves its loss once; everything else (which draws, which masks, which inputs) follows from `Loss.needs`, so no
other file keeps a list of loss names. A new loss is a subclass of `Loss` with its own op, or of `ScoreLoss` with
one function in plain torch.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from samplex_cuda.ops.loss_types import REDUCTIONS, Form, Forward, Inputs, StaticForward, StaticInputs, acc_dtype
from samplex_cuda.ops.predict import predict_dots
from samplex_cuda.ops.saved_loss import pack_saved
from samplex_cuda.prediction import valid_targets

__all__ = ["ExampleState", "Loss", "Needs", "ScoreLoss"]


class Needs(NamedTuple):
    """What a loss asks of the step around it.

    Attributes:
        draws: whether it samples classes at all; the full softmax does not.
        excludes_target: whether the target never counts as its own negative. Per-row draws then exclude it, shared
            draws are masked, and known positives may be masked too. False: draws are unconditional noise, hits
            included.
        weighted_draws: whether the loss is a sum over draws that weigh 1 / (m q) each, so that draws can be stratified.
        mergeable: whether copies of a class can be merged into one draw of a larger weight.
        target_log_q: whether it reads the log-probability of the targets.
        example_index: whether it keeps a number per training example and needs their index.
        prior: whether scores are learned relative to the sampler's distribution, so that prediction adds log p_n back
            and the sampler must stay fixed.
    """

    draws: bool = True
    excludes_target: bool = True
    weighted_draws: bool = True
    mergeable: bool = True
    target_log_q: bool = False
    example_index: bool = False
    prior: bool = False


class ExampleState(NamedTuple):
    """A number per training example that a head keeps for its loss, as a buffer in its `state_dict()`."""

    name: str
    size: int
    value: float


class Loss:
    """Base class of the losses in `sx.losses`.

    Subclasses set `name`, and give `needs` and `forward`.

    Example:
        >>> import samplex_cuda as sx
        >>> loss = sx.losses.SampledSoftmax(label_smoothing=0.1)
        >>> loss, loss.needs.excludes_target
        (SampledSoftmax(label_smoothing=0.1), True)
    """

    name: ClassVar[str] = "loss"
    absolute: bool = False
    """Whether the logit is |s|; evaluation and prediction follow."""
    below_autograd: ClassVar[bool] = True
    """Whether `forward` calls only ops and needs no autograd inside."""
    normalizes: ClassVar[bool] = False
    """Whether the loss can take class rows on the unit sphere."""
    compares_angles: ClassVar[bool] = False
    """Whether this loss makes sense for rows on the unit sphere alone."""
    takes_target_weight: ClassVar[bool] = False
    """Whether targets can have weights."""
    joins: ClassVar[bool] = False
    """Whether a row's loss is a log-sum-exp minus the target's logit: parts of the classes can then be joined, hard
    negatives counted on top, and the value compared with the exact NLL."""

    def __repr__(self) -> str:
        """The class and the options that are not at their defaults."""
        fields: tuple[dataclasses.Field[Any], ...] = dataclasses.fields(self) if dataclasses.is_dataclass(self) else ()
        shown = [f"{f.name}={getattr(self, f.name)!r}" for f in fields if getattr(self, f.name) != f.default]
        return f"{type(self).__name__}({', '.join(shown)})"

    @property
    def needs(self) -> Needs:
        """What the loss asks of the step around it."""
        return Needs()

    @classmethod
    def options(cls) -> tuple[str, ...]:
        """Names of the constructor's arguments.

        Example:
            >>> import samplex_cuda as sx
            >>> sx.losses.NegativeSampling.options()
            ('reg',)
        """
        return tuple(field.name for field in dataclasses.fields(cls)) if dataclasses.is_dataclass(cls) else ()

    def forward(self, x: Inputs, form: Form, need_grad: bool, need_hidden: bool) -> Forward:
        """Loss and unit gradients of checked inputs; runs below autograd.

        Args:
            x: tensors in the form the ops take.
            form: scale, reduction and what else every loss shares.
            need_grad: whether `saved` must hold gradients.
            need_hidden: whether it must hold that of `hidden`.
        """
        raise NotImplementedError

    def draws_static(self, shared: bool) -> bool:
        """Whether there is a `forward_static`, for draws that the batch shares or for draws per row.

        Example:
            >>> import samplex_cuda as sx
            >>> sx.losses.NCE().draws_static(shared=False), sx.losses.FullSoftmax().draws_static(shared=False)
            (True, False)
        """
        return False

    def static_options(self, form: Form) -> tuple[Any, ...]:
        """What `forward_static` passes to its op besides tensors, made once per configuration; () for the defaults.

        Args:
            form: scale, reduction and what else every loss shares.
        """
        return ()

    def forward_static(
        self, x: StaticInputs, options: tuple[Any, ...], need_grad: bool, need_hidden: bool
    ) -> StaticForward:
        """`forward` with the draw in the same op, where `draws_static`: the same numbers for less overhead.

        Args:
            x: tensors in the form the ops take, and the distribution to draw from.
            options: what `static_options` gave.
            need_grad: as in `forward`.
            need_hidden: as in `forward`.
        """
        raise NotImplementedError

    def example_state(self, num_classes: int) -> ExampleState | None:
        """The number per training example that the head keeps, where `needs.example_index`."""
        return None

    def moves_state(self, like: Tensor) -> bool:
        """Whether `forward_static` also does what `update_state` does, with tensors on the device of `like`.

        Example:
            >>> import torch, samplex_cuda as sx
            >>> sx.losses.AugmentReduce(num_examples=9).moves_state(torch.zeros(1))
            False
        """
        return False

    def update_state(self, state: Tensor, index: Tensor, used: Tensor, extra: Tensor) -> None:
        """Moves `state[index]` after a training forward.

        Args:
            state: [num_examples], changed in place.
            index: int64 [B].
            used: [B], the values that the forward read.
            extra: [B], what the forward returned beside the loss.
        """
        raise NotImplementedError


class ScoreLoss(Loss):
    """A loss written as one function of the scores, in plain torch; the library does the rest.

    Subclasses give `row_loss`. Scores are gathered by the library's kernels, their gradients by autograd, and the rows
    of the class table get sparse gradients or a fused update like those of any other loss. No [B, m, d] tensor is made.

    Example:
        >>> import torch, samplex_cuda as sx
        >>> class Hinge(sx.losses.ScoreLoss):
        ...     name = "hinge"
        ...     def row_loss(self, target, draws, x):
        ...         return torch.relu(1 + draws - target[:, :1]).nan_to_num(0.0).mean(1)
        >>> head = sx.SampledClassifier(8, 100, sx.samplers.Uniform(100), num_samples=5, loss=Hinge())
        >>> head(torch.randn(4, 8), torch.arange(4)).backward()
        >>> head.weight.grad.is_sparse
        True
    """

    below_autograd = False

    def row_loss(self, target: Tensor, draws: Tensor, x: Inputs) -> Tensor:
        """Loss of each row.

        Args:
            target: [B, P] scores `scale * (h @ w + b)` of the targets; nan where a target is ignored.
            draws: [B, m] scores of the draws; -inf where a draw is masked (it equals a target or a known positive), if
                `needs.excludes_target`.
            x: the inputs; `x.log_q` is [B, m] or [m].

        Returns:
            [B], differentiable in the scores.
        """
        raise NotImplementedError

    def forward(self, x: Inputs, form: Form, need_grad: bool, need_hidden: bool) -> Forward:
        """See `Loss.forward`."""
        acc = acc_dtype(x.weight.dtype)
        target = x.target if x.target.dim() == 2 else x.target.unsqueeze(1)
        wanted = valid_targets(target, form.ignore_index)
        valid = wanted & (target >= 0) & (target < x.weight.shape[0])
        outside = wanted & ~valid
        # On a GPU a look at the numbers would wait for the device: there such a row gets the loss NaN and no gradient.
        if target.is_cpu and not torch.compiler.is_compiling() and bool(outside.any()):
            got, classes = int(target[outside][0]), x.weight.shape[0]
            raise IndexError(f"{self.name}: target must be in [0, {classes}) or ignore_index, got {got}")
        counts, wrong = wanted.any(1), outside.any(1)
        safe = torch.where(valid, target, 0)
        shared = x.ids.dim() == 1
        rows = x.weight[x.ids].to(acc) if shared else None
        hidden = x.hidden.to(acc)
        at_target = predict_dots(x.hidden, x.weight, safe)
        at_draws = predict_dots(x.hidden, x.weight, x.ids) if rows is None else torch.mm(hidden, rows.t())
        if x.bias is not None:
            at_target, at_draws = at_target + x.bias[safe].to(acc), at_draws + x.bias[x.ids].to(acc)
        at_target = torch.where(valid, at_target * form.scale, torch.nan)
        at_draws = at_draws * form.scale
        masked = self._masked(x, target, valid) if self.needs.excludes_target else None
        if masked is not None:
            at_draws = at_draws.masked_fill(masked, -torch.inf)
        denom = counts.to(acc)
        if x.class_weight is not None:
            share = torch.where(valid, x.class_weight[safe].to(acc), 0.0)
            denom = share.sum(1) / valid.sum(1).clamp(min=1)
        with torch.enable_grad():
            at_target.requires_grad_(need_grad), at_draws.requires_grad_(need_grad)
            row = self.row_loss(at_target, at_draws, x).to(acc)
            weighted = torch.where(counts, row * (denom if x.class_weight is not None else 1.0), 0.0)
            weighted = torch.where(wrong, torch.nan, weighted)
            total = weighted.sum()
        coef = d_loss = None
        if need_grad:
            found = torch.autograd.grad(total, (at_target, at_draws), allow_unused=True)
            coef_target, coef_draws = (
                torch.zeros_like(s) if g is None else g * form.scale
                for g, s in zip(found, (at_target, at_draws), strict=True)
            )
            coef_target = torch.where(valid, coef_target, 0.0)
            # The derivative at a nan of an ignored row is 0 * nan.
            coef_draws = torch.where(counts.unsqueeze(1), coef_draws, 0.0)
            if masked is not None:
                coef_draws = coef_draws.masked_fill(masked, 0.0)
            coef = torch.cat([coef_target, coef_draws], 1)
            d_loss = weighted_rows(x.weight, safe, coef_target, acc)
            d_loss += weighted_rows(x.weight, x.ids, coef_draws, acc) if rows is None else coef_draws @ rows
        return pack_saved(weighted.detach(), denom, coef, d_loss, form, x.ids.shape[0] if x.ids.dim() == 1 else None)

    @staticmethod
    def _masked(x: Inputs, target: Tensor, valid: Tensor) -> Tensor:
        ids = x.ids.expand(target.shape[0], -1) if x.ids.dim() == 1 else x.ids
        hit = ((ids.unsqueeze(2) == target.unsqueeze(1)) & valid.unsqueeze(1)).any(2)
        if x.known_offsets is not None and x.known_ids is not None:
            counts = x.known_offsets.diff()
            width = int(counts.max()) if counts.numel() else 0
            at = x.known_offsets[:-1, None] + torch.arange(width, device=ids.device)
            inside = torch.arange(width, device=ids.device) < counts[:, None]
            known = torch.where(inside, x.known_ids[at.clamp(max=max(x.known_ids.shape[0] - 1, 0))], -1)
            hit |= (ids.unsqueeze(2) == known.unsqueeze(1)).any(2)
        return hit


def weighted_rows(weight: Tensor, ids: Tensor, coef: Tensor, acc: torch.dtype) -> Tensor:
    """Sum over j of coef[b, j] * weight[ids[b, j]], [B, d], without a [B, n, d]."""
    if weight.dtype == acc:
        bag = torch.nn.functional.embedding_bag
        return bag(ids, weight.detach(), mode="sum", per_sample_weights=coef.to(weight.dtype))
    total = coef.new_zeros(ids.shape[0], weight.shape[1])
    for column in range(ids.shape[1]):
        total.addcmul_(weight[ids[:, column]].to(acc), coef[:, column : column + 1])
    return total


def reduction_code(op: str, reduction: str) -> int:
    """The number by which the ops know a reduction."""
    try:
        return REDUCTIONS[reduction]
    except (KeyError, TypeError):
        raise ValueError(f"{op}: reduction must be one of {', '.join(REDUCTIONS)}, got {reduction!r}") from None
