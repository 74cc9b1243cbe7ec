"""A training step of a head: from a batch to the loss, draws included."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn

from samplex_cuda import _device
from samplex_cuda._checks import check_dense, check_tensor, describe, op_error, shape_text
from samplex_cuda.draw import COPIES, Draw, Negatives
from samplex_cuda.functional._inputs import known_positives
from samplex_cuda.functional._negatives import flat_negatives
from samplex_cuda.functional.full import full_softmax
from samplex_cuda.heads.checks import like_weight, refuse_parametrized, refuse_replicas
from samplex_cuda.heads.classes import ClassesOfHead
from samplex_cuda.losses import Loss, Needs
from samplex_cuda.ops.fused_loss import Step, fits, run_loss, run_static_loss, static_loss, static_step
from samplex_cuda.ops.loss_types import Form, Inputs, StaticInputs
from samplex_cuda.ops.row_gradients import RowSink
from samplex_cuda.ops.sphere import unit_rows
from samplex_cuda.ops.transforms import transformed
from samplex_cuda.prediction import mean_weight, valid_targets
from samplex_cuda.rng import Key, passing_key

if TYPE_CHECKING:
    from samplex_cuda.heads.follow import TableFollower

__all__ = ["LossSpec", "StepOfHead"]

_NAME = "SampledClassifier"
_is_compiling = torch.compiler.is_compiling
_ddp = nn.parallel.DistributedDataParallel


class LossSpec(NamedTuple):
    """What a head resolves once, when it is made or changed: how its training step draws and what its loss needs.

    Example:
        >>> import samplex_cuda as sx
        >>> head = sx.SampledClassifier(4, 50, sx.samplers.Uniform(50), num_samples=10, shared=True)
        >>> head.spec().excludes, head.spec().sampling
        (False, {'shared': True})
    """

    loss: Loss
    needs: Needs
    form: Form
    rows: Form  # the same without a reduction, where rows are weighted afterwards
    excludes: bool  # draws exclude the targets of their row
    merges: bool  # copies of a shared draw may be merged
    sampling: dict[str, Any]  # constant arguments of `sampler.sample`
    draws_static: bool  # the op of the loss draws by itself, from the sampler's `law()`
    plain: bool  # it also takes h and the class table as they are


def _read_state(state: Tensor, index: Tensor) -> Tensor:
    """`state[index]`; nan where the index is out of range, on a device, where the host does not look."""
    if not _device.host_waits(index):
        return state[index]
    last = state.shape[0] - 1
    return torch.where((index < 0) | (index > last), torch.nan, state[index.clamp(0, last)])


def _update_state(loss: Loss, state: Tensor, index: Tensor, used: Tensor, extra: Tensor) -> None:
    """`loss.update_state`. On a device a row whose index is out of range repeats the first one that is not."""
    if _device.host_waits(index) and index.numel():
        last = state.shape[0] - 1
        inside = (index >= 0) & (index <= last)
        rows = torch.where(inside, torch.arange(index.shape[0], device=index.device), inside.byte().argmax())
        index = index[rows].clamp(0, last)
        # Where no index is in range, nan: it leaves a number as it is.
        used, extra = state[index], torch.where(inside[rows], extra[rows], torch.nan)
    loss.update_state(state, index, used, extra)


class StepOfHead(ClassesOfHead):
    """The training step of `SampledClassifier`."""

    loss: Loss
    num_samples: int
    shared: bool
    sparse: bool
    reduction: str
    ignore_index: int
    follower: TableFollower
    _sink: RowSink | None
    _made_step: Step | None
    _state_name: str | None

    def _plain_loss(self, spec: LossSpec, h: Tensor, y: Tensor, key: Key | Tensor | None) -> Tensor | None:
        """The loss of a batch that the op takes as it is; None for any other batch, which the general path takes.

        The checks of the op are the only ones: those in Python run when it refuses, to say what is wrong.
        """
        own: Any = self._parameters
        weight, bias = own.get("weight"), own.get("bias", self)
        if (
            weight is None
            or bias is self  # parametrized
            or type(h) is not Tensor
            or type(y) is not Tensor
            or h.dtype is not weight.dtype
            or not ((h.is_cpu and y.is_cpu and weight.is_cpu) or h.device == weight.device == y.device)
            or self.follower.active
            or _names_row(key)
            or _ddp._active_ddp_module is not None
            or transformed()
            or forward_ad._current_level >= 0
        ):
            return None
        rows, target = h, y
        if h.dim() != 2:
            if h.dim() == 0 or y.shape != h.shape[:-1] or not spec.form.reduction:
                return None
            rows, target = h.reshape(-1, h.shape[-1]), y.reshape(-1)
        elif y.dim() != 1:
            return None
        if not (rows.is_contiguous() and target.is_contiguous()):
            return None
        step = self._static_step(spec, weight, bias)
        try:
            return static_loss(step, self._static_inputs(step, rows, weight, bias, target, key))
        except RuntimeError as error:
            self._check_batch(h, y, None, None, None)
            self._refuse_targets(target)
            raise op_error(error) from None

    def _static_inputs(
        self, step: Step, rows: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, key: Key | Tensor | None,
        state: Tensor | None = None, index: Tensor | None = None,
    ) -> StaticInputs:  # fmt: skip
        """What the op of a loss takes that draws by itself; reserves the key of this step."""
        sampler: Any = self._modules["sampler"]
        return StaticInputs(
            rows, weight, bias, target, self._buffers["class_weight"], passing_key(sampler._op, key, weight),
            self.num_samples, self.shared, sampler.law(), step.unit_hidden, state,
            None if index is None else index.contiguous(),
        )  # fmt: skip

    def _static_step(self, spec: LossSpec, weight: Tensor, bias: Tensor | None) -> Step:
        """The constants of a step whose loss draws by itself, made again when the head, a table or the sink changed."""
        made, sink = self._made_step, self._fusion or self._rows_of(weight, bias)
        if (
            made is None
            or made.form is not spec.form
            or made.loss is not spec.loss
            or made.sink is not sink
            or made.unit_hidden is not sink.at_once
            or not fits(made, weight, bias)
        ):
            made = self._made_step = static_step(spec.loss, weight, bias, spec.form, sink)
        return made

    def _check_batch(
        self,
        h: Tensor,
        y: Tensor,
        features: Tensor | None,
        sample_weight: Tensor | None,
        positives: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, Tensor, torch.Size]:
        """Rows [B, d] and targets [B] or [B, P] of a batch that fits this head, and its leading dimensions."""
        lead = self._check_h("forward", h)
        flat = len(lead) == 1
        dense = isinstance(y, Tensor) and y.layout is torch.strided and y.dtype is torch.int64
        shape = y.shape if dense else torch.Size()
        if not dense or (shape != lead and shape[:-1] != lead):
            raise ValueError(
                f"{_NAME}: y must be {shape_text(lead)} or {shape_text(lead, 'P')} int64 to fit h, got {describe(y)}"
            )
        if y.device != h.device:  # an op with a meta tensor among its arguments computes nothing
            raise ValueError(f"{_NAME}: y must be on {h.device} as h, got {describe(y)}")
        if len(shape) > len(lead) and shape[-1] == 0:
            raise ValueError(f"{_NAME}: y must have at least one target per row, got {describe(y)}")
        if features is not None:
            self._check_features("forward", features, lead)
        if sample_weight is not None:
            check_dense(_NAME, "sample_weight", check_tensor(_NAME, "sample_weight", sample_weight, str(list(lead))))
            if sample_weight.shape != lead or not sample_weight.is_floating_point():
                raise ValueError(
                    f"{_NAME}: sample_weight must be {list(lead)} floating point, got {describe(sample_weight)}"
                )
        # A reshape to the same shape would be a view, and one more node for autograd to visit.
        rows = h if flat else h.reshape(-1, self.in_features)
        target = y if flat else y.reshape(rows.shape[0], *y.shape[len(lead) :])
        if positives is not None and not self.loss.needs.excludes_target:
            raise ValueError(
                f"{_NAME}: positives must be None with {self.loss!r}, which uses every draw, got "
                f"{type(positives).__name__}"
            )
        return rows, target, lead

    def _reduced(
        self, loss: Tensor, target: Tensor, sample_weight: Tensor | None, lead: torch.Size, weighted: bool = False
    ) -> Tensor:
        """Losses of rows, [B], weighted and reduced; rows whose targets are `weighted` count 1 each."""
        row_weight = mean_weight(target, self._valid(target), None if weighted else self.class_weight)
        if sample_weight is not None:
            flat = sample_weight.reshape(-1).to(loss.dtype)
            loss, row_weight = loss * flat, row_weight * flat
        if self.reduction == "none":
            return loss.reshape(lead)
        if self.reduction == "sum":
            return loss.sum()
        total = row_weight.sum().to(loss.dtype)
        return loss.sum() / torch.where(total == 0, 1.0, total)

    def _full_loss(self, h: Tensor, target: Tensor, by_row: bool, target_weight: Tensor | None) -> Tensor:
        loss: Any = self.loss
        if h.dtype is not self.weight.dtype or h.device != self.weight.device:
            h = like_weight(h, self.weight)
        return full_softmax(
            self._query(h),
            unit_rows(self.weight) if self.normalize else self.weight,
            target,
            self._live_bias(),
            scale=self.scale,
            reduction="none" if by_row else self.reduction,
            absolute=loss.absolute,
            label_smoothing=loss.label_smoothing,
            target_weight=target_weight,
            class_weight=self.class_weight,
            ignore_index=self.ignore_index,
        )

    def _sampled_loss(
        self,
        spec: LossSpec,
        form: Form,
        h: Tensor,
        target: Tensor,
        features: Tensor | None,
        index: Tensor | None,
        context: Any,
        positives: tuple[Tensor, Tensor] | None,
        key: Key | Tensor | None,
        negatives: Draw | None = None,
        target_weight: Tensor | None = None,
    ) -> Tensor:
        """One training step's loss: draw, then the fused loss; `h` is [B, d], `target` [B] or [B, P]."""
        # Past `nn.Module.__getattr__`, which takes a microsecond; a parametrized weight is not in the dictionary.
        own: Any = self._parameters
        weight, bias = (own["weight"], own["bias"]) if "weight" in own and "bias" in own else (self.weight, self.bias)
        compiling = _is_compiling()
        if form.sparse or self._fusion is not None:
            refuse_replicas(self)
            if "parametrizations" in self._modules and not compiling:
                refuse_parametrized(self)
        if h.dtype is not weight.dtype or h.device != weight.device:
            h = like_weight(h, weight)
        query = self._query(h)
        follower = self.follower
        alone = positives is None and negatives is None and target.dim() == 1 and target_weight is None
        alone = alone and not _names_row(key)
        state = None
        if index is not None and self._state_name is not None:
            state = self.get_buffer(self._state_name)
            alone = alone and spec.loss.moves_state(weight)
        if spec.draws_static and alone and not follower.active and not compiling and not transformed():
            step = static_step(spec.loss, weight, bias, form, self._fusion or self._rows_of(weight, bias))
            given = self._static_inputs(step, query.contiguous(), weight, bias, target.contiguous(), key, state, index)
            try:
                return run_static_loss(step, given)
            except IndexError:
                self._refuse_targets(target)
                raise
        # Inside torch.func the tables are not the head's own: the sampler stays unchanged.
        following = follower.active and not transformed()
        with torch.no_grad():
            if following:
                self._follow(weight, bias, h.shape[0])
            try:
                if negatives is not None:
                    draw, target_log_q = negatives, None
                else:
                    draw, target_log_q = self._draw(spec, h, target, features, context, key)
            except IndexError:
                self._refuse_targets(target)  # the sampler was given them by another name
                raise
        offsets, known = (None, None)
        if positives is not None:
            offsets, known = known_positives(spec.loss.name, positives, h.shape[0], weight.device)
        used = None if state is None or index is None else _read_state(state, index)
        log_q = draw.log_q if weight.dtype is not torch.float64 else draw.log_q.double()
        x = Inputs(
            query if query.is_contiguous() else query.contiguous(),
            weight,
            bias,
            target if target.is_contiguous() else target.contiguous(),
            draw.ids,
            log_q,
            self.class_weight,
            offsets,
            known,
            target_log_q,
            used,
            target_weight=target_weight,
        )
        sink = self._fusion or (None if compiling else self._rows_of(weight, bias))
        loss, extra = run_loss(spec.loss, x, form, sink)
        if following:  # after the loss has accepted the ids: a refused batch leaves no trace
            follower.touch(torch.where(self._valid(target), target, -1).reshape(-1), draw.ids.reshape(-1))
        if state is not None and index is not None and used is not None and extra is not None:
            _update_state(spec.loss, state, index, used, extra.detach())
        return loss

    def _own_negatives(self, spec: LossSpec, given: Any, target: Tensor, lead: torch.Size, width: int = 0) -> Draw:
        """The caller's negatives in the form the ops take; `width` columns at least where rows have several lengths."""
        needs = spec.needs
        if not (needs.draws and needs.excludes_target) or needs.target_log_q or needs.prior:
            raise ValueError(
                f"{_NAME}: negatives must be None with {spec.loss!r}, which does not support them, got "
                f"{type(given).__name__}; sampled_softmax and one_vs_each do"
            )
        acc = torch.float64 if self.weight.dtype is torch.float64 else torch.float32
        draw = flat_negatives(_NAME, given, target, lead, self.ignore_index, acc, width)
        live = self.live
        if live is None:
            return draw
        wrong = ~live.to(draw.ids.device)[draw.ids.clamp(0, self.num_classes - 1)]
        if draw.ids.dim() == 2:  # a row that has no target may be filled with anything
            wrong &= self._valid(target).reshape(target.shape[0], -1).any(1, keepdim=True)
        if draw.ids.is_cpu and not torch.compiler.is_compiling():
            if bool(wrong.any()):
                raise IndexError(f"{_NAME}: negatives must not be retired classes, got {int(draw.ids[wrong][0])}")
            return draw
        return draw._replace(ids=torch.where(wrong, self.num_classes, draw.ids))

    def _hard_negatives(self, spec: LossSpec, hard: Any, target: Tensor, lead: torch.Size) -> Draw:
        """Hard negatives in the form the ops take."""
        plain = spec.loss.joins
        if not plain or target.dim() != 1 or self.class_weight is not None:
            raise ValueError(
                f"{_NAME}: hard must be None unless the loss is sampled_softmax without smoothing, with one target per "
                f"row and no class weights, got {spec.loss!r} and y {list(target.shape)}"
            )
        if not isinstance(hard, Tensor) or hard.dim() != len(lead) + 1:
            raise ValueError(f"{_NAME}: hard must be {shape_text(lead, 'k')} int64, got {describe(hard)}")
        return self._own_negatives(spec, Negatives(hard), target, lead)

    def _follow(self, weight: Tensor, bias: Tensor | None, rows: int) -> None:
        """Brings a sampler that depends on the class table up to date, where that is due."""
        follower = self.follower
        if follower.auto:
            follower.settle(self.sampler, rows, self.num_samples, self.shared)
        follower.look(weight, bias if getattr(self.sampler, "has_bias", False) else None)
        if follower.due():
            self.update_sampler()

    def _draw(
        self, spec: LossSpec, h: Tensor, target: Tensor, features: Tensor | None, context: Any, key: Key | Tensor | None
    ) -> tuple[Draw, Tensor | None]:
        """Negatives of a batch, and log q of its targets if the loss reads it."""
        sampler: Any = self.sampler
        seen = h.detach() if features is None else self._seen(h, features)
        if spec.needs.target_log_q:
            # A negative target that is not ignored is an error of the loss.
            known = target.clamp_min(0) if self.ignore_index < 0 else torch.where(self._valid(target), target, 0)
            draw, log_q = sampler.sample_and_score(
                seen, self.num_samples, known, key=key, context=context, **spec.sampling
            )
            return draw, log_q.double() if self.weight.dtype is torch.float64 else log_q
        if getattr(sampler, "takes_targets", False):
            if target.dim() != 1:
                raise ValueError(
                    f"{_NAME}: y must be {list(target.shape[:1])}, one per row, with an InBatch sampler, "
                    f"got {list(target.shape)}"
                )
            known = torch.where(self._valid(target), target, -1)
            draw = sampler.sample(seen, self.num_samples, key=key, context=context, targets=known)
            return draw.merged() if spec.merges and self._repeats(draw) else draw, None
        exclude = None
        if spec.excludes:
            # A negative target that is not ignored is an error of the loss.
            exclude = target.clamp_min(-1) if self.ignore_index < 0 else torch.where(self._valid(target), target, -1)
        draw = sampler.sample(seen, self.num_samples, key=key, exclude=exclude, context=context, **spec.sampling)
        return draw.merged() if spec.merges and self._repeats(draw) else draw, None

    def _refuse_targets(self, target: Tensor) -> None:
        """IndexError if a target is out of range."""
        wrong = self._valid(target) & ((target < 0) | (target >= self.num_classes))
        if bool(wrong.any()):
            got = int(target[wrong].flatten()[0])
            raise IndexError(
                f"{_NAME}: y must be in [0, {self.num_classes}) or ignore_index={self.ignore_index}, got {got}"
            ) from None

    def _repeats(self, draw: Draw) -> bool:
        """Whether shared draws hold enough copies for `Draw.merged` to pay."""
        if torch.compiler.is_compiling():
            return False
        collision = getattr(self.sampler, "collision", None)
        chance = None if collision is None else collision()
        if chance is None:
            return draw.repeats()
        return not _device.host_waits(draw.ids) and chance * draw.ids.shape[0] > COPIES

    def _rows_of(self, weight: Tensor, bias: Tensor | None) -> RowSink:
        """The sink of unfused gradients; made again when a parameter was replaced."""
        sink = self._sink
        if sink is None or sink.sparse is not self.sparse or not sink.serves(weight, bias):
            sink = self._sink = RowSink(self.sparse, weight, bias)
        return sink

    def _valid(self, target: Tensor) -> Tensor:
        return valid_targets(target, self.ignore_index)

    def _check_index(self, index: Tensor | None, lead: torch.Size) -> Tensor:
        assert self._state_name is not None
        return self._check_numbers(index, lead, self.get_buffer(self._state_name).shape[0])

    def _check_numbers(self, index: Tensor | None, lead: torch.Size, examples: int) -> Tensor:
        if not isinstance(index, Tensor) or index.dtype != torch.int64 or index.shape != lead:
            raise ValueError(f"{_NAME}: index must be {list(lead)} int64 with {self.loss!r}, got {describe(index)}")
        if index.device != self.weight.device:
            raise ValueError(f"{_NAME}: index must be on {self.weight.device}, got {index.device}")
        # On a GPU a look at the numbers would wait for the device: there the row is nan, see `_read_state`.
        if not _device.host_waits(index) and index.numel() and not torch.compiler.is_compiling():
            low, high = (int(t) for t in index.aminmax())
            if low < 0 or high >= examples:
                raise IndexError(f"{_NAME}: index must be in [0, {examples}), got {low if low < 0 else high}")
        return index.reshape(-1)


def _names_row(key: Key | Tensor | None) -> bool:
    """Whether a key has a third number, that of the first row in a larger batch: the ops that also draw take two."""
    return key is not None and type(key) is Tensor and key.numel() == 3
