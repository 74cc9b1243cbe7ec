"""The one step of every fused loss: forward, backward, and where its row gradients go.

A loss forward gives the loss and `saved`, the unit gradients in one tensor. Backward scales them and passes a
`LossGrad` to a sink, which decides the form of the weight gradient: `RowSink` makes coalesced COO (or dense) tensors
for autograd, `samplex_cuda.optim.fusion.Fusion` updates the rows at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from samplex_cuda._checks import op_error
from samplex_cuda.ops.loss_types import Form, Inputs, LossGrad, Plan, Sink, StaticInputs
from samplex_cuda.ops.row_gradients import RowSink
from samplex_cuda.ops.transforms import differentiated_twice, refuse_forward_mode, transformed

if TYPE_CHECKING:
    from samplex_cuda.losses.base import Loss

__all__ = ["OpCall", "Step", "differentiate", "fits", "run_loss", "run_static_loss", "static_loss", "static_step"]

_below_autograd = torch._C._AutoDispatchBelowAutograd
_is_compiling = torch.compiler.is_compiling


def _grad(
    plan: Plan,
    hidden: Tensor,
    target: Tensor,
    ids: Tensor,
    saved: Tensor,
    grad_loss: Tensor | None,
    grad_lse: Tensor | None,
    version: int = 0,
    weight: Tensor | None = None,
    unit_hidden: list[Tensor] | None = None,
) -> LossGrad | None:
    if torch.is_grad_enabled() and not _is_compiling():
        raise RuntimeError(f"{plan.op}: double backward (create_graph=True) is not supported")
    if grad_loss is None:
        if grad_lse is None:
            return None
        grad_loss = grad_lse.new_zeros(() if plan.reduction else grad_lse.shape)
    upstream = None if grad_lse is None else grad_lse.contiguous()
    return LossGrad(plan, hidden, target, ids, saved, grad_loss.contiguous(), upstream, version, weight, unit_hidden)


def _plan(loss: Loss, weight: Tensor, bias: Tensor | None, form: Form, with_ratio: bool) -> Plan:
    """What the backward of this loss needs to know; `with_ratio`: whether the forward has saved a ratio per row."""
    bias_dtype = None if bias is None else bias.dtype
    return Plan(
        loss.name, weight.shape[0], weight.dtype, bias_dtype, form.reduction, form.with_lse, with_ratio, form.normalize
    )


class Step(NamedTuple):
    """What is the same in every step of a configuration, so that a head makes it once."""

    loss: Loss
    form: Form
    sink: Sink | None  # by default rows for autograd
    plan: Plan | None = None  # where it is known before the forward
    unit_hidden: bool = False  # `StaticInputs.unit_hidden`
    options: tuple[Any, ...] = ()  # `Loss.static_options`


def static_step(loss: Loss, weight: Tensor, bias: Tensor | None, form: Form, sink: Sink) -> Step:
    """The `Step` of a loss that draws by itself.

    Args:
        loss: it must have `draws_static`.
        weight: [C, d].
        bias: [C] or None.
        form: what every loss shares.
        sink: where the weight gradient goes.
    """
    plan = _plan(loss, weight, bias, form, loss.needs.example_index)
    # On the sphere the update also leaves out what is along a row, which the op that makes it at once does not.
    return Step(loss, form, sink, plan, sink.at_once and not form.normalize, loss.static_options(form))


def fits(step: Step, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether `static_step` would give this step for these tables, as far as they decide.

    Args:
        step: made by `static_step`.
        weight: [C, d].
        bias: [C] or None.
    """
    plan: Any = step.plan
    return (
        plan.weight_dtype is weight.dtype
        and plan.num_classes == weight.size(0)
        and plan.bias_dtype is (None if bias is None else bias.dtype)
    )


class _FusedLoss(torch.autograd.Function):
    """Autograd of every fused loss.

    `register_autograd` and calling the op through its own autograd key each cost 0.05 ms of Python per call: together
    they would be a third of a step. They serve compiled graphs (`differentiate`), by the same backward.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, step: Step, x: Inputs | StaticInputs
    ) -> Any:
        loss, form, sink, plan, _, options = step
        need_hidden = ctx.needs_input_grad[0]
        if plan is not None:  # the op draws, too
            with _below_autograd():
                out, saved, ids, unit = loss.forward_static(x, options, True, need_hidden)  # type: ignore[arg-type]
            ctx.kept = plan, sink, saved, weight._version, None if unit is None else [unit]
            if form.normalize:
                ctx.save_for_backward(hidden, x.target, ids, weight)
            else:
                ctx.save_for_backward(hidden, x.target, ids)
            return out
        if loss.below_autograd:
            with _below_autograd():
                made = loss.forward(x, form, True, need_hidden)  # type: ignore[arg-type]
        else:
            made = loss.forward(x, form, True, need_hidden)  # type: ignore[arg-type]
        extra = made.lse if form.with_lse else made.ratio
        plan = _plan(loss, weight, bias, form, made.ratio is not None)
        if sink is None:
            sink = RowSink(form.sparse, weight, bias)
        ctx.kept = plan, sink, made.saved, weight._version, None
        ctx.save_for_backward(hidden, x.target, x.ids, weight if form.normalize else None)  # type: ignore[union-attr]
        if extra is None:
            return made.loss
        ctx.set_materialize_grads(False)
        if not form.with_lse:
            ctx.mark_non_differentiable(extra)
        return made.loss, extra

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor | None, grad_extra: Tensor | None = None) -> Any:
        plan, sink, saved, version, unit_hidden = ctx.kept
        hidden, target, ids, *others = ctx.saved_tensors
        if sink is _dense and torch.is_grad_enabled():  # torch.func always enables it
            if any(differentiated_twice(t) for t in (hidden, grad_loss, grad_extra, *others)):
                raise RuntimeError(f"{plan.op}: double backward (torch.func.grad of a gradient) is not supported")
            with torch.no_grad():
                return _FusedLoss.backward(ctx, grad_loss, grad_extra)
        grad_lse = grad_extra if plan.with_lse else None
        weight = others[0] if others else None
        grad = _grad(plan, hidden, target, ids, saved, grad_loss, grad_lse, version, weight, unit_hidden)
        if grad is None:
            return None, None, None, None, None
        d_hidden, d_weight, d_bias = sink.deliver(grad, ctx.needs_input_grad[:3])
        return d_hidden, d_weight, d_bias, None, None


class _Recorded:
    """Takes the part of the context in a forward under `torch.func`, which calls `setup_context` afterwards."""

    needs_input_grad = (True, True, True)

    def __init__(self) -> None:
        self.kept: tuple[Any, ...] = ()
        self.ids: Tensor | None = None

    def save_for_backward(self, hidden: Tensor, target: Tensor, ids: Tensor, weight: Tensor | None) -> None:
        self.ids = ids

    def set_materialize_grads(self, value: bool) -> None:
        """`setup_context` makes this call, and the next, of the context."""

    def mark_non_differentiable(self, *outputs: Tensor) -> None: ...


class _TransformedLoss(_FusedLoss):
    """`_FusedLoss` for `torch.func.grad`, `vjp` and `jacrev`, which want `setup_context`: 1 to 2 us more per step."""

    @staticmethod
    def forward(  # type: ignore[override]
        hidden: Tensor, weight: Tensor, bias: Tensor | None, step: Step, x: Inputs, recorded: _Recorded
    ) -> Any:
        return _FusedLoss.forward(recorded, hidden, weight, bias, step, x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        hidden, weight, bias, step, x, recorded = inputs
        ctx.kept = recorded.kept
        ctx.save_for_backward(hidden, x.target, recorded.ids, weight, bias)
        if isinstance(output, tuple):
            ctx.set_materialize_grads(False)
            if not step.form.with_lse:
                ctx.mark_non_differentiable(output[1])

    @staticmethod
    def vmap(info: Any, in_dims: Any, hidden: Tensor, weight: Tensor, bias: Any, step: Step, *rest: Any) -> Any:
        raise RuntimeError(
            f"{step.loss.name}: torch.func.vmap of a gradient (per-sample gradients, jacfwd, hessian) is not "
            'supported; use reduction="none" and one backward() per row'
        )

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise RuntimeError(f"{ctx.kept[0].op}: forward-mode differentiation of a gradient (hessian) is not supported")

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor | None, grad_extra: Tensor | None = None) -> Any:
        return (*_FusedLoss.backward(ctx, grad_loss, grad_extra), None)


_dense = RowSink(False)  # gradients are dense under torch.func

# Past `torch.autograd.Function.apply`, which looks for functorch wrappers in every argument.
_apply = super(torch.autograd.Function, _FusedLoss).apply


def _needs_grad(x: Inputs | StaticInputs) -> bool:
    return torch.is_grad_enabled() and (
        x.hidden.requires_grad or x.weight.requires_grad or (x.bias is not None and x.bias.requires_grad)
    )


def _refuse_division(loss: Loss, weight: Tensor, form: Form) -> None:
    """ValueError for rows that were divided outside, where autograd would fail on the sparse gradient."""
    made_by = weight.grad_fn
    if made_by is not None and form.sparse and made_by.name() == "DivBackward0":
        raise ValueError(
            f"{loss.name}: weight must be the class table itself if its gradient is sparse, got the result of a "
            "division (F.normalize?); use normalize=True, which takes the rows on the sphere inside the loss, or "
            "sparse=False"
        )


def run_static_loss(step: Step, x: StaticInputs) -> Tensor:
    """`run_loss` for a loss that draws by itself, outside of compiled graphs and of `torch.func`.

    Args:
        step: made by `static_step`.
        x: tensors in the form the ops take.
    """
    refuse_forward_mode(step.loss.name, x.hidden, x.weight, x.bias)
    _refuse_division(step.loss, x.weight, step.form)
    try:
        return static_loss(step, x)
    except RuntimeError as error:
        raise op_error(error) from None


def static_loss(step: Step, x: StaticInputs) -> Tensor:
    """`run_static_loss` without its checks, and with the errors of the op as they are."""
    if _needs_grad(x):
        return _apply(x.hidden, x.weight, x.bias, step, x)
    with _below_autograd():
        return step.loss.forward_static(x, step.options, False, False)[0]


def run_loss(loss: Loss, x: Inputs, form: Form, sink: Sink | None = None) -> tuple[Tensor, Tensor | None]:
    """The loss of checked inputs, differentiable in hidden, weight and bias.

    Args:
        loss: which loss, with its options.
        x: tensors in the form the ops take.
        form: what every loss shares.
        sink: where the weight gradient goes; by default to autograd.

    Returns:
        The loss, and what the loss returns besides: lse with `form.with_lse`, the ratio of augment_reduce.
    """
    bias = x.bias
    need_grad = _needs_grad(x)
    if _is_compiling():
        if need_grad and form.sparse and (x.weight.requires_grad or (bias is not None and bias.requires_grad)):
            from samplex_cuda._eager import captures_scalars, eager_run_loss

            if not captures_scalars():  # the number of gradient rows would break the graph inside the compiler
                return eager_run_loss(loss, x, form)
        made = loss.forward(x, form, need_grad, True)
        return made.loss, made.lse if form.with_lse else made.ratio
    refuse_forward_mode(loss.name, x.hidden, x.weight, bias)
    _refuse_division(loss, x.weight, form)
    try:
        if not need_grad:
            with _below_autograd():
                made = loss.forward(x, form, False, False)
            return made.loss, made.lse if form.with_lse else made.ratio
        if transformed():
            step = Step(loss, form, _dense)
            output = _TransformedLoss.apply(x.hidden, x.weight, bias, step, x, _Recorded())
        else:
            output = _apply(x.hidden, x.weight, bias, Step(loss, form, sink), x)
    except RuntimeError as error:
        raise op_error(error) from None
    return output if isinstance(output, tuple) else (output, None)


def differentiate(op: str, read: Any) -> None:
    """Registers the backward of a loss op for compiled graphs, and for code that calls the op itself.

    Args:
        op: e.g. "samplex::nce".
        read: makes an `OpCall` of the op's inputs and outputs.
    """

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.call = call = read(inputs, output)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[1 + call.plan.with_lse :])
        weight = inputs[call.places[1]] if call.plan.normalize else None
        ctx.save_for_backward(call.hidden, call.target, call.ids, call.saved, weight)
        ctx.call = call._replace(hidden=None, target=None, ids=None, saved=None)

    def backward(ctx: Any, grad_loss: Tensor | None, *others: Tensor | None) -> Any:
        call: OpCall = ctx.call
        plan = call.plan
        grad_lse = others[0] if plan.with_lse else None
        if any(other is not None for other in others[plan.with_lse :]):
            raise RuntimeError(f"{plan.op}: only the loss{' and lse' if plan.with_lse else ''} can be differentiated")
        if not call.need_grad:
            raise RuntimeError(f"{plan.op}: backward needs need_grad=True in the forward call, got False")
        gradients: list[Tensor | None] = [None] * call.arguments
        hidden, target, ids, saved, weight = ctx.saved_tensors
        grad = _grad(plan, hidden, target, ids, saved, grad_loss, grad_lse, weight=weight)
        if grad is not None:
            need = tuple(ctx.needs_input_grad[place] for place in call.places)
            for place, value in zip(call.places, RowSink(call.sparse).deliver(grad, need), strict=True):
                gradients[place] = value
        return tuple(gradients)

    torch.library.register_autograd(op, backward, setup_context=setup_context)


class OpCall(NamedTuple):
    """What `differentiate` reads of a call of a loss op."""

    plan: Plan
    places: tuple[int, int, int]  # of hidden, weight and bias among the arguments
    arguments: int
    need_grad: bool
    sparse: bool
    hidden: Tensor | None
    target: Tensor | None
    ids: Tensor | None
    saved: Tensor | None
