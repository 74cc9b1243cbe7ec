"""An optimizer inside backward: the update happens where the gradient arises, and no gradient is kept.

A fused loss knows its weight gradient as (ids, coefficients, h) until rows are asked for. `Fusion` takes these from the
backward of the loss, and gives them to the optimizer's rule as soon as autograd is done with the weight: when every use
of it in the graph has had its turn. So two losses of one backward make one update of their sum, and a gradient from
somewhere else (a tied weight) is noticed before anything has changed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from samplex_cuda.functional import as_python
from samplex_cuda.ops.fused_loss import REDUCTIONS, loss_entries
from samplex_cuda.ops.row_rules import row_update_
from samplex_cuda.optim import RowOptimizer
from samplex_cuda.rng import key_tensor
from samplex_cuda.samplers.static import StaticSampler
from samplex_cuda.samplers.tree import Tree

if TYPE_CHECKING:
    from samplex_cuda.heads import SampledClassifier

__all__ = ["Fusion"]

_NAME = "fuse_optimizer"


class _Entries(NamedTuple):
    """Sources of row gradients, as `row_update_` takes them: ids [S, k], coefficients [S, k], rows [S, d], twice."""

    ids_a: Tensor
    coef_a: Tensor
    rows_a: Tensor
    ids_b: Tensor
    coef_b: Tensor | None
    rows_b: Tensor
    bias_b: Tensor | None

    def clone(self) -> _Entries:
        """Copies of every tensor."""
        copies: Any = [None if t is None else t.clone() for t in self]
        return _Entries(*copies)


_loss_op = torch.ops.samplex.sampled_softmax.default


class _PlainLoss(torch.autograd.Function):
    """Sampled softmax of a fused weight in its usual form; what is general about it is left out (`plain_loss`)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        fusion: Fusion,
        draw: tuple[Tensor, Tensor, Tensor],
        options: tuple[float, int, int],
    ) -> Tensor:
        scale, ignore_index, reduction = options
        with torch._C._AutoDispatchBelowAutograd():
            loss, _, saved = _loss_op(
                hidden, weight, *draw, bias, None, None, None, scale, 0.0, ignore_index, reduction,
                False, True, False, True, ctx.needs_input_grad[0],
            )  # fmt: skip
        ctx.fusion, ctx.kept = fusion, (saved, reduction, weight._version)
        ctx.save_for_backward(hidden, draw[0], draw[1])
        return loss

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError("sampled_softmax: double backward (create_graph=True) is not supported")
        saved, reduction, version = ctx.kept
        tensors = (*ctx.saved_tensors, saved)
        d_hidden = ctx.fusion.take(version, reduction, tensors, False, grad_loss.contiguous(), None)
        return d_hidden if ctx.needs_input_grad[0] else None, None, None, None, None, None


# Past `torch.autograd.Function.apply`, which looks for functorch wrappers in every argument; `plain_loss` has asked
# whether there can be any.
_plain_apply = super(torch.autograd.Function, _PlainLoss).apply


class Fusion:
    """What ties a head to the optimizer that updates it inside backward; made by `SampledClassifier.fuse_optimizer`.

    Args:
        head: whose weight and bias are updated.
        optimizer: a row optimizer that owns them and nothing else.
        accumulate: how many backwards make one update.
        grad_scaler: whose scale the loss was multiplied by.

    Example:
        >>> import torch, samplex_cuda as sx
        >>> head = sx.SampledClassifier(8, 100, sx.samplers.Uniform(100), num_samples=5)
        >>> head.fuse_optimizer(sx.optim.RowAdagrad(head.parameters(), lr=0.1))
        >>> head(torch.randn(4, 8), torch.arange(4)).backward()  # the update is done
        >>> head.weight.grad is None
        True
    """

    def __init__(
        self, head: SampledClassifier, optimizer: RowOptimizer, accumulate: int = 1, grad_scaler: Any = None
    ) -> None:
        if not isinstance(optimizer, RowOptimizer):
            raise TypeError(f"{_NAME}: optimizer must be one of samplex_cuda.optim, got {type(optimizer).__name__}")
        if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
            raise ValueError(f"{_NAME}: accumulate must be an int of at least 1, got {accumulate!r}")
        if grad_scaler is not None and not (hasattr(grad_scaler, "get_scale") and hasattr(grad_scaler, "is_enabled")):
            raise TypeError(f"{_NAME}: grad_scaler must be a GradScaler or None, got {type(grad_scaler).__name__}")
        if not head.weight.requires_grad:
            raise ValueError(f"{_NAME}: head.weight must require a gradient, got requires_grad=False")
        weight, bias = head.weight, head.bias if head.bias is not None and head.bias.requires_grad else None
        wanted = {"weight": weight} | ({} if bias is None else {"bias": bias})
        owned = [p for group in optimizer.param_groups for p in group["params"]]
        for name, p in wanted.items():
            if not any(p is q for q in owned):
                raise ValueError(f"{_NAME}: optimizer must own head.{name}, got one without it")
        others = [q for q in owned if not any(q is p for p in wanted.values())]
        if others:
            raise ValueError(
                f"{_NAME}: optimizer must own head.weight and head.bias alone (give the rest of the model one of its "
                f"own), got {len(others)} other parameters, the first {list(others[0].shape)}"
            )
        if bias is not None and bias.dtype not in (
            weight.dtype,
            torch.float32 if bias.dtype != torch.float64 else None,
        ):
            raise ValueError(f"{_NAME}: head.bias must be {weight.dtype} or float32, got {bias.dtype}")
        self.head, self.weight, self.bias = head, weight, bias
        self.optimizer, self.accumulate, self.grad_scaler = optimizer, accumulate, grad_scaler
        self._arrived: list[_Entries] = []  # of the running backward
        self._task = -1  # its number
        self._kept: list[_Entries] = []  # of earlier ones, with accumulate
        self._backwards = 0  # since the last update
        self._overflow = False  # one of them held an inf or nan, under a GradScaler
        for p in wanted.values():
            if p.grad is not None:
                raise ValueError(f"{_NAME}: gradients must be None when the optimizer is fused; call zero_grad() first")
        self._hooks = [weight.register_hook(self._on_weight)]
        if bias is not None:
            self._hooks.append(bias.register_hook(self._on_bias))
        weight._samplex_fusion = self  # type: ignore[attr-defined]
        if bias is not None:
            bias._samplex_fusion = self  # type: ignore[attr-defined]

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of a fused head is not fused: the optimizer stays with the original."""
        return type(None), ()

    def remove(self) -> None:
        """Undo it; what was accumulated and not yet applied is dropped."""
        for hook in self._hooks:
            hook.remove()
        for p in (self.weight, self.bias):
            if p is not None:
                p._samplex_fusion = None  # type: ignore[attr-defined]
        self._arrived, self._kept = [], []

    # -------------------------------------------------------------------------------------------- inside backward
    def plain_loss(self, h: Tensor, y: Tensor, key: Any) -> Tensor | None:
        """The loss of a step in its usual form, or None: then the head goes its general way, which gives the same bits.

        The usual form is fp32 sampled softmax of [B, d] with one target a row, drawn by a static law, or shared by the
        batch from a tree. A step's Python runs with cold caches, since the step itself streams tens of megabytes: the
        general way through sampler, functional and ops takes 0.3 ms more there than one function does.

        Args:
            h: [B, d].
            y: int64 [B].
            key: of the draw, as in `SampledClassifier.forward`.
        """
        head, weight = self.head, self.weight
        # Straight from the module's tables: its __getattr__ is a function of Python, four times a step.
        sampler: Any = head._modules.get("sampler")
        bias = head._parameters.get("bias")
        if not (
            head.loss == "sampled_softmax"
            # Not one whose `sample` somebody has replaced.
            and (
                (drawn := getattr(type(sampler), "sample", None)) is StaticSampler.sample
                or (head.shared and drawn is Tree.sample)
            )
            and "sample" not in sampler.__dict__
            and not (head.absolute or head.label_smoothing)
            and head.sampler_update is None
            and head.class_weight is None
            and head.ignore_index < 0
            and isinstance(y, Tensor)
            and h.dim() == 2
            and y.dim() == 1
            and h.dtype is weight.dtype is torch.float32
            and y.dtype is torch.int64
            and h.shape[0] == y.shape[0] > 0
            and h.shape[1] == weight.shape[1]
            and h.device == y.device == weight.device
            and h.is_contiguous()
            and y.is_contiguous()
            and head._parameters.get("weight") is weight
            and (bias is None or (self.bias is bias and bias.dtype is torch.float32))
            and torch.is_grad_enabled()
            and not torch._C._are_functorch_transforms_active()
        ):
            return None
        options = (float(head.scale), head.ignore_index, REDUCTIONS[head.reduction])
        if head.shared:
            with torch._C._AutoDispatchBelowAutograd():
                draw = head._draw_shared(h.detach(), key)
            try:
                shared: Tensor = _plain_apply(h, weight, bias, self, (y, draw.ids, draw.log_q), options)
            except RuntimeError as error:  # a target out of range
                raise as_python(error) from None
            return shared
        with torch._C._AutoDispatchBelowAutograd():
            pair = key_tensor(sampler._op, key, h.device)
            exclude = y.unsqueeze(1)
            try:
                ids, log_q = sampler._sample_op(pair, y.shape[0], head.num_samples, exclude, None)
            except RuntimeError:
                # A target of ignore_index, which counts as nothing excluded, or one out of range. For that the general
                # way has the words; the key it draws with does not matter.
                try:
                    ids, log_q = sampler._sample_op(pair, y.shape[0], head.num_samples, exclude.clamp_min(-1), None)
                except RuntimeError:
                    return None
        loss: Tensor = _plain_apply(h, weight, bias, self, (y, ids, log_q), options)
        return loss

    def take(
        self,
        version: int,
        reduction: int,
        tensors: tuple[Tensor, ...],
        with_lse: bool,
        grad_loss: Tensor,
        grad_lse: Tensor | None,
        with_ratio: bool = False,
    ) -> Tensor:
        """The gradient of hidden; those of weight and bias are stored as (ids, coefficients, h).

        Args:
            version: of the weight in the forward.
            reduction: of the loss, as the ops write it.
            tensors: hidden [B, d], target [B] or [B, P], ids [B, m] or [m], saved.
            with_lse: whether the forward kept the parts of a second output.
            grad_loss: upstream gradient.
            grad_lse: that of the second output.
            with_ratio: whether the forward kept the ratio of each row.
        """
        if version != self.weight._version:
            raise RuntimeError(
                f"{_NAME}: the weight was changed after this loss was computed, by another backward's update or in "
                "place, so its gradient is out of date: call backward once after each forward, add the losses before "
                "one backward, or use accumulate=k to sum k backwards"
            )
        hidden, target, ids, saved = tensors
        with_bias = self.bias is not None
        d_hidden, coef_a, coef_b, rows_b, bias_b = loss_entries(
            grad_loss, grad_lse, hidden, target, ids, saved, reduction, with_lse, with_bias, with_ratio
        )
        ids_a = target.unsqueeze(1) if target.dim() == 1 else target
        if ids.dim() == 1:
            found = _Entries(
                ids_a, coef_a, hidden, ids[: rows_b.shape[0]].unsqueeze(1), None, rows_b, bias_b if with_bias else None
            )
        else:
            found = _Entries(ids_a, coef_a, hidden, ids, coef_b, hidden, None)
        if self.grad_scaler is not None and self.grad_scaler.is_enabled():
            found = self._unscaled(found)
        # A backward that never came to the weight (torch.autograd.grad of h alone) leaves entries behind.
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._arrived, self._task = [], task
        self._arrived.append(found)
        return d_hidden

    def _unscaled(self, e: _Entries) -> _Entries:
        inverse = 1.0 / self.grad_scaler.get_scale()
        coef_a, coef_b = e.coef_a * inverse, None if e.coef_b is None else e.coef_b * inverse
        rows_b, bias_b = e.rows_b if e.coef_b is not None else e.rows_b * inverse, e.bias_b
        unscaled = e._replace(
            coef_a=coef_a, coef_b=coef_b, rows_b=rows_b, bias_b=None if bias_b is None else bias_b * inverse
        )
        # A bound of every number of every row: finite, and so are they; nan and inf come through.
        for ids, coef, rows in ((e.ids_a, coef_a, e.rows_a), (e.ids_b, coef_b, rows_b)):
            if rows.numel() == 0 or ids.numel() == 0:
                continue
            most = rows.abs().amax().to(torch.float32) * ids.numel()
            if coef is not None:
                most = most * coef.abs().amax().to(torch.float32)
            self._overflow = self._overflow or not bool(most.isfinite())
        return unscaled

    def _on_bias(self, grad: Tensor | None) -> None:
        if grad is not None:
            self._refuse("bias")

    def _refuse(self, name: str) -> None:
        self._arrived = []
        raise RuntimeError(
            f"{_NAME}: head.{name} got a gradient from elsewhere than the head's sampled loss (a tied weight, a "
            "penalty, a loss without row gradients); a fused optimizer cannot join them: do not fuse, or untie it"
        )

    def _on_weight(self, grad: Tensor | None) -> None:
        """Autograd calls this when all gradients of the weight are there; None is what the losses gave."""
        arrived, self._arrived = self._arrived, []
        if grad is not None:
            self._refuse("weight")
        if not arrived or self._task != torch._C._current_graph_task_id():
            return
        self._backwards += 1
        if self.accumulate > 1:
            # Own copies: h and the ids belong to the caller again once backward is over.
            own = self._backwards < self.accumulate
            self._kept += [e.clone() for e in arrived] if own else arrived
            if own:
                return
            arrived, self._kept = self._kept, []
        overflow, self._overflow, self._backwards = self._overflow, False, 0
        if not overflow:
            self._apply(arrived)

    def _apply(self, arrived: list[_Entries]) -> None:
        e = arrived[0] if len(arrived) == 1 else _joined(arrived)
        rule, states, key = self.optimizer._begin(self.weight)
        weight_states = [*states, None, None][:2]
        bias, bias_rule = None, rule
        bias_states: list[Tensor | None] = [None, None]
        if self.bias is not None:
            bias = self.bias.detach()
            bias_rule, states, bias_key = self.optimizer._begin(self.bias)
            bias_states = [*states, None, None][:2]
            key = bias_key if key is None else key
        # Below autograd: backward has gradients off, but for create_graph, which the loss refuses.
        with torch._C._AutoDispatchBelowAutograd():
            row_update_(self.weight.detach(), *weight_states, bias, *bias_states, *e, key, rule, bias_rule)
        torch.autograd.graph.increment_version([self.weight] if self.bias is None else [self.weight, self.bias])
        # A step was made, though not by step(): schedulers ask.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        if len(arrived) > 1:
            self.head._note_changed([e.ids_a, e.ids_b])


def _joined(several: list[_Entries]) -> _Entries:
    """One set of entries of several; narrower ones are filled up with ids of -1, which count for nothing."""

    def ids_of(tensors: list[Tensor]) -> Tensor:
        width = max(t.shape[1] for t in tensors)
        return torch.cat([torch.nn.functional.pad(t, (0, width - t.shape[1]), value=-1) for t in tensors])

    def coef_of(tensors: list[Tensor]) -> Tensor:
        width = max(t.shape[1] for t in tensors)
        return torch.cat([torch.nn.functional.pad(t, (0, width - t.shape[1])) for t in tensors])

    coef_b = [e.coef_b for e in several if e.coef_b is not None]
    bias_b = [e.bias_b for e in several if e.bias_b is not None]
    if len(coef_b) not in (0, len(several)):
        raise RuntimeError(f"{_NAME}: losses of one update must all have shared draws, or none; got both")
    return _Entries(
        ids_of([e.ids_a for e in several]),
        coef_of([e.coef_a for e in several]),
        torch.cat([e.rows_a for e in several]),
        ids_of([e.ids_b for e in several]),
        coef_of(coef_b) if coef_b else None,
        torch.cat([e.rows_b for e in several]),
        torch.cat(bias_b) if bias_b else None,
    )
