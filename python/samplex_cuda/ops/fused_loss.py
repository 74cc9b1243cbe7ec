"""The one step of every fused loss: forward, backward, and where its row gradients go.

A loss forward gives the loss and `saved`, the unit gradients in one tensor. Backward scales them and passes a
`LossGrad`
to a sink, which decides the form of the weight gradient: `RowSink` makes coalesced COO (or dense) tensors for autograd,
`samplex_cuda.optim.fusion.Fusion` updates the rows at once.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from samplex_cuda._checks import describe, op_error
from samplex_cuda._library import register_fake
from samplex_cuda.ops.transforms import differentiated_twice, refuse_forward_mode, transformed

if TYPE_CHECKING:
    from samplex_cuda.losses.base import Loss

__all__ = [
    "REDUCTIONS",
    "Entries",
    "Form",
    "Forward",
    "Inputs",
    "LossGrad",
    "Plan",
    "RowSink",
    "Sink",
    "StaticInputs",
    "StaticLaw",
    "TableGradient",
    "acc_dtype",
    "differentiate",
    "fake_gradients",
    "pack_saved",
    "rows_to_coo",
    "run_loss",
]

REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}

_below_autograd = torch._C._AutoDispatchBelowAutograd
_is_compiling = torch.compiler.is_compiling
_coo_unsafe = torch.ops.aten._sparse_coo_tensor_unsafe.default


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


class Forward(NamedTuple):
    """What a loss forward returns."""

    loss: Tensor  # [] or [B]
    saved: Tensor  # unit gradients and what the reduction needs, laid out as in loss/fused
    extra: Tensor | None = None  # [B]: lse where asked for, or the ratio of augment_reduce


class Plan(NamedTuple):
    """What a backward needs to know besides tensors."""

    op: str
    num_classes: int
    weight_dtype: torch.dtype
    bias_dtype: torch.dtype | None
    reduction: int
    with_lse: bool = False  # whether `saved` holds the gradients of lse too
    with_ratio: bool = False  # whether `saved` ends with a ratio per row


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


class Entries(NamedTuple):
    """Weight gradients before they are summed by class: ids [S, k] or [S], coefficients [S, k], rows [S, d], twice."""

    ids_a: Tensor
    coef_a: Tensor
    rows_a: Tensor
    ids_b: Tensor
    coef_b: Tensor | None
    rows_b: Tensor
    bias_b: Tensor | None

    def clone(self) -> Entries:
        """Copies of every tensor."""
        copies: Any = [None if t is None else t.clone() for t in self]
        return Entries(*copies)

    def unscaled(self, scale: Tensor, found_inf: Tensor) -> Entries:
        """The gradient divided by a loss scale; `found_inf`, fp32 [], becomes 1 if it holds an inf or nan."""
        parts = [t for t in (self.coef_a, self.coef_b, self.bias_b) if t is not None]
        rows = self.rows_b if self.coef_b is None else None  # sums of gradients rather than queries
        finite = torch.stack([t.isfinite().all() for t in (*parts, self.rows_a, self.rows_b)]).all()
        torch.maximum(found_inf, 1.0 - finite.to(found_inf.dtype), out=found_inf)
        inverse = scale.reciprocal().to(self.coef_a.dtype)
        return self._replace(
            coef_a=self.coef_a * inverse,
            coef_b=None if self.coef_b is None else self.coef_b * inverse,
            rows_b=self.rows_b if rows is None else rows * inverse,
            bias_b=None if self.bias_b is None else self.bias_b * inverse,
        )


class Sink(Protocol):
    """Takes the gradient of a class table."""

    def deliver(
        self, grad: LossGrad, need: tuple[bool, bool, bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Gradients of hidden, weight and bias for autograd; None where the sink has used them up."""
        ...


def acc_dtype(dtype: torch.dtype) -> torch.dtype:
    """Sums of this storage type run in float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# ------------------------------------------------------------------------------------------------ row gradients
_rows_op = torch.ops.samplex.sampled_softmax_bwd.default
_rows_with_ratio_op = torch.ops.samplex.entry_loss_bwd.default
_entries_op = torch.ops.samplex.loss_entries.default
_RATIO_KIND = 3  # augment_reduce


class RowGradients(NamedTuple):
    """Gradients summed by class, of a fixed size: no host synchronization until the rows are counted."""

    d_hidden: Tensor  # [B, d]
    row_ids: Tensor  # int64 [n], the first `number` ascending and distinct
    row_grads: Tensor  # [n, d]
    row_bias: Tensor  # [n] or [0]
    number: Tensor  # int64 [1], how many of the n rows are used


def row_gradients(g: LossGrad, need_rows: bool, with_bias: bool) -> RowGradients:
    """The gradients of a loss with its weight gradient summed by class."""
    p = g.plan
    tensors = (g.hidden, g.target, g.ids, g.saved)
    if p.with_ratio:
        found = _rows_with_ratio_op(
            g.grad_loss, *tensors, _RATIO_KIND, p.num_classes, p.reduction, need_rows, with_bias
        )
    else:
        found = _rows_op(
            g.grad_loss, g.grad_lse, *tensors, p.num_classes, p.reduction, p.with_lse, need_rows, with_bias
        )
    return RowGradients(*found)


def entries(
    g: LossGrad, with_bias: bool, grad_scale: Tensor | None = None, found_inf: Tensor | None = None
) -> tuple[Tensor, Entries]:
    """The gradient of hidden, and the weight gradient before it is summed by class.

    Args:
        g: of the loss.
        with_bias: whether there is a bias to update.
        grad_scale: fp32 [], divides the weight gradient; that of hidden stays scaled.
        found_inf: fp32 [], becomes 1 where the weight gradient holds an inf or nan, or numbers near it.
    """
    p = g.plan
    with _below_autograd():
        d_hidden, coef_a, coef_b, rows_b, bias_b = _entries_op(
            g.grad_loss, g.grad_lse, g.hidden, g.target, g.ids, g.saved, p.reduction, p.with_lse, with_bias,
            p.with_ratio, grad_scale, found_inf,
        )  # fmt: skip
    if g.ids.dim() == 2:
        return d_hidden, Entries(g.target, coef_a, g.hidden, g.ids, coef_b, g.hidden, None)
    ids_b = g.ids if rows_b.shape[0] == g.ids.shape[0] else g.ids[:0]  # no rows of an empty batch
    return d_hidden, Entries(g.target, coef_a, g.hidden, ids_b, None, rows_b, bias_b if with_bias else None)


@register_fake("samplex::loss_entries")
def _(
    grad_loss: Tensor,
    grad_lse: Tensor | None,
    hidden: Tensor,
    target: Tensor,
    ids: Tensor,
    saved: Tensor,
    reduction: int,
    with_lse: bool,
    with_bias: bool,
    with_ratio: bool = False,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> tuple[Tensor, ...]:
    batch, dim = fake_sizes("loss_entries", hidden)
    shared, m = ids.dim() == 1, ids.shape[-1]
    targets = 1 if target.dim() == 1 else target.shape[1]
    summed = m if shared and batch > 0 else 0
    acc = acc_dtype(hidden.dtype)
    return (
        torch.empty_like(hidden),
        hidden.new_empty((batch, targets), dtype=acc),
        hidden.new_empty((0 if shared else batch, m), dtype=acc),
        hidden.new_empty((summed, dim), dtype=acc),
        hidden.new_empty((summed if with_bias else 0,), dtype=acc),
    )


def rows_to_coo(
    row_ids: Tensor, rows: Tensor, count: Tensor, size: tuple[int, ...], dtype: torch.dtype | None
) -> Tensor:
    """Fixed-size row gradients as a coalesced sparse COO tensor. The only part of a backward that waits for the device.

    Args:
        row_ids: int64 [n], the first `count` ascending and distinct.
        rows: [n, ...], one gradient row each.
        count: int64 [1].
        size: shape of the whole (dense) gradient.
        dtype: of the result.

    Example:
        >>> import torch
        >>> from samplex_cuda.ops.fused_loss import rows_to_coo
        >>> ids, rows = torch.tensor([1, 4, -1]), torch.tensor([[1.0], [2.0], [0.0]])
        >>> rows_to_coo(ids, rows, torch.tensor([2]), (6, 1), torch.float32).to_dense().flatten().tolist()
        [0.0, 1.0, 0.0, 0.0, 2.0, 0.0]
    """
    n = count.item()
    if torch.compiler.is_compiling():
        torch._check(n >= 0)
        torch._check(n <= row_ids.shape[0])
    values = rows[:n]
    if dtype is not rows.dtype:
        values = values.to(dtype)
    if torch.compiler.is_compiling():
        return torch.sparse_coo_tensor(
            row_ids[:n].unsqueeze(0), values, size, check_invariants=False, is_coalesced=True
        )
    # The same without the argument parsing of the public function, which takes as long as a small backward.
    return _coo_unsafe(row_ids[:n].unsqueeze(0), values, size, is_coalesced=True)


def _rows_to_dense(
    row_ids: Tensor, rows: Tensor, count: Tensor, size: tuple[int, ...], dtype: torch.dtype | None
) -> Tensor:
    # Rows past `count` have id -1 and unspecified values; all of them go to one extra row that is cut off.
    dense = rows.new_zeros((size[0] + 1, *size[1:]))
    dense.index_copy_(0, torch.where(row_ids < 0, size[0], row_ids), rows)
    return dense[: size[0]].to(dtype)


class _CoalescedFlag:
    """Restores the coalesced flag of a parameter's gradient.

    Autograd's accumulation makes a shallow copy of a sparse gradient and drops the flag, so every optimizer would sort
    and sum the rows again. This hook runs after the accumulation and sets the flag again, if the gradient still has the
    very indices that the sink delivered: a sum of two gradients has others, and is left alone. Backwards may run in
    several threads, so what was delivered is kept by the number of the backward.
    """

    def __init__(self) -> None:
        self.indices: dict[int, Tensor] = {}

    def deliver(self, indices: Tensor) -> None:
        """Remembers the indices of a gradient until autograd has accumulated it."""
        if len(self.indices) >= _MOST_BACKWARDS:  # those of backwards that never accumulate (torch.autograd.grad)
            for task in list(self.indices)[: -_MOST_BACKWARDS // 2]:
                self.indices.pop(task, None)
        self.indices[_task_id()] = indices

    def __call__(self, parameter: Tensor) -> None:
        given = self.indices.pop(_task_id(), None)
        grad = parameter.grad
        if given is None or grad is None or not grad.is_sparse or grad.is_coalesced():
            return
        if grad._indices().is_set_to(given):
            grad._coalesced_(True)


_MOST_BACKWARDS = 16  # at a time that keep the flag
_task_id = torch._C._current_graph_task_id
_flags: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # parameter -> its _CoalescedFlag
_flags_lock = threading.Lock()


class TableGradient:
    """The gradient of one table from its row gradients: a coalesced COO tensor, or a dense one at O(C d).

    Args:
        sparse: which of the two.
        parameter: the leaf whose gradient keeps its coalesced flag; None where autograd is traced.
    """

    def __init__(self, sparse: bool, parameter: Tensor | None = None) -> None:
        self.sparse = sparse
        self.flag: _CoalescedFlag | None = None
        if sparse and parameter is not None and parameter.requires_grad and parameter.is_leaf:
            self.flag = _flags.get(parameter)
            if self.flag is None:
                with _flags_lock:  # a second hook, registered while the first runs, would break another's backward
                    self.flag = _flags.get(parameter)
                    if self.flag is None:
                        self.flag = _CoalescedFlag()
                        parameter.register_post_accumulate_grad_hook(self.flag)
                        _flags[parameter] = self.flag

    def __call__(
        self, row_ids: Tensor, rows: Tensor, count: Tensor, size: tuple[int, ...], dtype: torch.dtype | None
    ) -> Tensor:
        """Arguments as in `rows_to_coo`."""
        if not self.sparse:
            return _rows_to_dense(row_ids, rows, count, size, dtype)
        made = rows_to_coo(row_ids, rows, count, size, dtype)
        if self.flag is not None:
            self.flag.deliver(made._indices())
        return made


class RowSink:
    """Gives autograd the weight gradient as a coalesced COO tensor (`sparse`), or as a dense one at O(C d).

    Args:
        sparse: which of the two.
        weight: whose gradient keeps its coalesced flag; None where autograd is traced.
        bias: the same.
    """

    def __init__(self, sparse: bool, weight: Tensor | None = None, bias: Tensor | None = None) -> None:
        self.sparse = sparse
        self.weight, self.bias = TableGradient(sparse, weight), TableGradient(sparse, bias)
        self._of = tuple(None if t is None else weakref.ref(t) for t in (weight, bias))

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy belongs to other parameters: it is made anew."""
        return type(None), ()

    def serves(self, weight: Tensor, bias: Tensor | None) -> bool:
        """Whether the sink was made for these tensors, with the gradients they need now."""
        of_weight, of_bias = self._of
        if of_weight is None or of_weight() is not weight or (bias is None) != (of_bias is None):
            return False
        return of_bias is None or of_bias() is bias

    def deliver(
        self, grad: LossGrad, need: tuple[bool, bool, bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """See `Sink.deliver`."""
        need_hidden, need_weight, need_bias = need
        p = grad.plan
        rows = row_gradients(grad, need_weight or need_bias, need_bias)
        size = (p.num_classes, grad.hidden.shape[1])
        dtypes = (p.weight_dtype if need_weight else None, p.bias_dtype if need_bias else None)
        return (rows.d_hidden if need_hidden else None, *self._tables(rows[1:], size, *dtypes))

    def deliver_entries(
        self, found: Entries, size: tuple[int, int], weight_dtype: torch.dtype | None, bias_dtype: torch.dtype | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Gradients of weight [C, d] and bias from a weight gradient that is at hand; None where no dtype is given."""
        summed = torch.ops.samplex.row_reduce(*found[:6], size[0], bias_dtype is not None, found.bias_b)
        return self._tables(summed, size, weight_dtype, bias_dtype)

    def _tables(
        self, summed: Any, size: tuple[int, int], weight_dtype: torch.dtype | None, bias_dtype: torch.dtype | None
    ) -> tuple[Tensor | None, Tensor | None]:
        row_ids, row_grads, row_bias, number = summed
        d_weight = d_bias = None
        if weight_dtype is not None:
            d_weight = self.weight(row_ids, row_grads, number, size, weight_dtype)
        if bias_dtype is not None:
            d_bias = self.bias(row_ids, row_bias, number, size[:1], bias_dtype)
        return d_weight, d_bias


# ------------------------------------------------------------------------------------------------ the step
def _grad(
    plan: Plan,
    hidden: Tensor,
    target: Tensor,
    ids: Tensor,
    saved: Tensor,
    grad_loss: Tensor | None,
    grad_lse: Tensor | None,
    version: int = 0,
) -> LossGrad | None:
    if torch.is_grad_enabled() and not _is_compiling():
        raise RuntimeError(f"{plan.op}: double backward (create_graph=True) is not supported")
    if grad_loss is None:
        if grad_lse is None:
            return None
        grad_loss = grad_lse.new_zeros(() if plan.reduction else grad_lse.shape)
    upstream = None if grad_lse is None else grad_lse.contiguous()
    return LossGrad(plan, hidden, target, ids, saved, grad_loss.contiguous(), upstream, version)


def _plan(loss: Loss, weight: Tensor, bias: Tensor | None, form: Form, extra: bool) -> Plan:
    """What the backward of this loss needs to know; `extra`: whether the forward returned more than the loss."""
    bias_dtype = None if bias is None else bias.dtype
    with_ratio = extra and not form.with_lse
    return Plan(loss.name, weight.shape[0], weight.dtype, bias_dtype, form.reduction, form.with_lse, with_ratio)


class _FusedLoss(torch.autograd.Function):
    """Eager autograd of every fused loss.

    `register_autograd`, `Function.setup_context` and calling the op through its own autograd key each cost 0.05 ms of
    Python per call: together they would be a third of a step. They serve compiled graphs (`differentiate`), by the same
    backward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        loss: Loss,
        x: Inputs | StaticInputs,
        form: Form,
        sink: Sink | None,
    ) -> Any:
        if isinstance(x, StaticInputs):
            with _below_autograd():
                made, ids = loss.forward_static(x, form, True, ctx.needs_input_grad[0])
        elif loss.below_autograd:
            with _below_autograd():
                made, ids = loss.forward(x, form, True, ctx.needs_input_grad[0]), x.ids
        else:
            made, ids = loss.forward(x, form, True, ctx.needs_input_grad[0]), x.ids
        extra = made.extra
        ctx.plan = _plan(loss, weight, bias, form, extra is not None)
        ctx.version = weight._version
        ctx.sink = RowSink(form.sparse, weight, bias) if sink is None else sink
        ctx.saved = made.saved
        ctx.save_for_backward(hidden, x.target, ids)
        if extra is None:
            return made.loss
        ctx.set_materialize_grads(False)
        if not form.with_lse:
            ctx.mark_non_differentiable(extra)
        return made.loss, extra

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor | None, grad_extra: Tensor | None = None) -> Any:
        plan: Plan = ctx.plan
        hidden, target, ids = ctx.saved_tensors
        grad = _grad(
            plan, hidden, target, ids, ctx.saved, grad_loss, grad_extra if plan.with_lse else None, ctx.version
        )
        if grad is None:
            return None, None, None, None, None, None, None
        return (*ctx.sink.deliver(grad, ctx.needs_input_grad[:3]), None, None, None, None)


class _FunctionalLoss(torch.autograd.Function):
    """The same for `torch.func.grad`, `vjp` and `jacrev`, with dense gradients of weight and bias."""

    @staticmethod
    def forward(
        hidden: Tensor, weight: Tensor, bias: Tensor | None, loss: Loss, x: Inputs, form: Form
    ) -> tuple[Tensor, ...]:
        x = x._replace(hidden=hidden, weight=weight, bias=bias)
        made = loss.forward(x, form, True, True)
        return (made.loss, made.saved) if made.extra is None else (made.loss, made.saved, made.extra)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        hidden, weight, bias, loss, x, form = inputs
        extra = len(output) > 2
        ctx.plan = _plan(loss, weight, bias, form, extra)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(output[1], *(output[2:] if extra and not form.with_lse else ()))
        ctx.save_for_backward(weight, bias, hidden, x.target, x.ids, output[1])

    @staticmethod
    def vmap(info: Any, in_dims: Any, hidden: Tensor, weight: Tensor, bias: Any, loss: Loss, *rest: Any) -> Any:
        raise RuntimeError(
            f"{loss.name}: torch.func.vmap of a gradient (per-sample gradients, jacfwd, hessian) is not supported; use "
            'reduction="none" and one backward() per row'
        )

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise RuntimeError(f"{ctx.plan.op}: forward-mode differentiation of a gradient (hessian) is not supported")

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor | None, grad_saved: Any, grad_extra: Tensor | None = None) -> Any:
        plan = ctx.plan
        weight, bias, hidden, target, ids, saved = ctx.saved_tensors
        if any(differentiated_twice(t) for t in (weight, bias, hidden, grad_loss, grad_extra)):
            raise RuntimeError(f"{plan.op}: double backward (torch.func.grad of a gradient) is not supported")
        if grad_loss is None and grad_extra is None:
            return None, None, None, None, None, None
        upstream = grad_extra if plan.with_lse else None
        if grad_loss is None:
            assert upstream is not None
            grad_loss = upstream.new_zeros(() if plan.reduction else upstream.shape)
        lse = None if upstream is None else upstream.contiguous()
        grad = LossGrad(plan, hidden, target, ids, saved, grad_loss.contiguous(), lse)
        with torch.no_grad():
            return (*RowSink(False).deliver(grad, ctx.needs_input_grad[:3]), None, None, None)


# Past `torch.autograd.Function.apply`, which looks for functorch wrappers in every argument.
_apply = super(torch.autograd.Function, _FusedLoss).apply


def run_loss(
    loss: Loss, x: Inputs | StaticInputs, form: Form, sink: Sink | None = None
) -> tuple[Tensor, Tensor | None]:
    """The loss of checked inputs, differentiable in hidden, weight and bias.

    Args:
        loss: which loss, with its options.
        x: tensors in the form the ops take; `StaticInputs` for a loss with `draws_static`, outside of a compiled graph.
        form: what every loss shares.
        sink: where the weight gradient goes; by default to autograd.

    Returns:
        The loss, and what the loss returns besides: lse with `form.with_lse`, the ratio of augment_reduce.
    """
    bias = x.bias
    need_grad = torch.is_grad_enabled() and (
        x.hidden.requires_grad or x.weight.requires_grad or (bias is not None and bias.requires_grad)
    )
    if torch.compiler.is_compiling():
        assert isinstance(x, Inputs)
        if need_grad and form.sparse and (x.weight.requires_grad or (bias is not None and bias.requires_grad)):
            from samplex_cuda._eager import captures_scalars, eager_run_loss

            if not captures_scalars():  # the number of gradient rows would break the graph inside the compiler
                return eager_run_loss(loss, x, form)
        made = loss.forward(x, form, need_grad, True)
        return made.loss, made.extra
    refuse_forward_mode(loss.name, x.hidden, x.weight, bias)
    try:
        if not need_grad:
            with _below_autograd():
                if isinstance(x, StaticInputs):
                    made, _ = loss.forward_static(x, form, False, False)
                else:
                    made = loss.forward(x, form, False, False)
            return made.loss, made.extra
        if transformed():
            found = _FunctionalLoss.apply(x.hidden, x.weight, bias, loss, x, form)
            return found[0], found[2] if len(found) > 2 else None
        output = _apply(x.hidden, x.weight, bias, loss, x, form, sink)
    except RuntimeError as error:
        raise op_error(error) from None
    return output if isinstance(output, tuple) else (output, None)


def differentiate(op: str, read: Any) -> None:
    """Registers the backward of a loss op for compiled graphs, and for whoever calls the op itself.

    Args:
        op: e.g. "samplex::nce".
        read: makes an `OpCall` of the op's inputs and outputs.
    """

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.call = call = read(inputs, output)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[1 + call.plan.with_lse :])
        ctx.save_for_backward(call.hidden, call.target, call.ids, call.saved)
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
        hidden, target, ids, saved = ctx.saved_tensors
        grad = _grad(plan, hidden, target, ids, saved, grad_loss, grad_lse)
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


def fake_sizes(op: str, hidden: Tensor) -> tuple[int, int]:
    """B and d, where no kernel checks the shape."""
    if hidden.dim() != 2:
        raise ValueError(f"{op}: hidden must be [B, d], got {describe(hidden)}")
    return hidden.shape[0], hidden.shape[1]


def fake_gradients(
    hidden: Tensor, target: Tensor, ids: Tensor, num_classes: int, need_rows: bool, with_bias: bool
) -> tuple[Tensor, ...]:
    """Empty tensors of the shapes a loss's backward op gives."""
    acc = acc_dtype(hidden.dtype)
    count = target.numel() + ids.numel()
    capacity = torch.sym_min(count, num_classes) if need_rows else 0
    return (
        torch.empty_like(hidden),
        hidden.new_empty((capacity,), dtype=torch.int64),
        hidden.new_empty((capacity, hidden.shape[1]), dtype=acc),
        hidden.new_empty((capacity if with_bias else 0,), dtype=acc),
        hidden.new_empty((1,), dtype=torch.int64),
    )


def pack_saved(
    row_loss: Tensor,
    denom: Tensor,
    coef: Tensor | None,
    d_loss: Tensor | None,
    form: Form,
    num_shared: int | None = None,
) -> Forward:
    """A `Forward` from the parts of a loss written in torch; the layout is that of `SavedLoss` in loss/fused.

    Args:
        row_loss: [B].
        denom: [B], what each row counts in a mean.
        coef: [B, P + m], derivative of each row's loss by the products h @ w of targets and draws; None without need.
        d_loss: [B, d], derivative of each row's loss by its hidden vector.
        form: of the call.
        num_shared: m where the draws are shared by the batch, otherwise None.
    """
    parts = [] if coef is None or d_loss is None else _pack_gradients(coef, d_loss, num_shared)
    if form.reduction == REDUCTIONS["none"]:
        return Forward(row_loss, torch.cat([*parts, denom]))
    total = denom.sum()
    factor = torch.ones_like(total)
    if form.reduction == REDUCTIONS["mean"]:
        factor = torch.where(total == 0, 0.0, 1.0 / torch.where(total == 0, 1.0, total))
    loss = torch.where(total == 0, 0.0, row_loss.sum() * factor)
    return Forward(loss, torch.cat([*parts, row_loss, denom, factor.reshape(1)]))


_ALIGN = 16  # numbers; of the coefficients of shared draws


def _coef_row(targets: int, entries: int) -> tuple[int, int]:
    """Of a row of coefficients with shared draws: the numbers left free before it, and all numbers."""
    gap = -targets % _ALIGN
    return gap, gap + entries + -(gap + entries) % _ALIGN


def _pack_gradients(coef: Tensor, d_loss: Tensor, num_shared: int | None) -> list[Tensor]:
    if num_shared is None:
        return [d_loss.reshape(-1), coef.reshape(-1)]
    entries = coef.shape[1]
    gap, stride = _coef_row(entries - num_shared, entries)
    rows = torch.nn.functional.pad(coef, (gap, stride - gap - entries))
    return [rows.reshape(-1), d_loss.reshape(-1), torch.zeros_like(d_loss).reshape(-1)]


def saved_numbers(
    hidden: Tensor, target: Tensor, draws: int, shared: bool, reduction: int, need_grad: bool,
    with_lse: bool = False, with_ratio: bool = False,
) -> int:  # fmt: skip
    """How many numbers `saved` holds; as `SavedLoss` in loss/fused."""
    batch, dim = hidden.shape
    targets = 1 if target.dim() == 1 else target.shape[1]
    entries, kept = targets + draws, 0
    if need_grad and not shared:
        kept = (dim + entries) * batch * (1 + with_lse)
    elif need_grad:
        kept = (2 * dim + _coef_row(targets, entries)[1]) * batch * (1 + with_lse)
    kept += batch if reduction == REDUCTIONS["none"] else 2 * batch + 1
    return kept + (batch if with_ratio else 0)
