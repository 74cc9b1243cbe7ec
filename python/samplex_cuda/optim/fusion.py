"""An optimizer inside backward: the update happens where the gradient arises, and no gradient is kept.

A fused loss knows its weight gradient as (ids, coefficients, h) until rows are asked for. `Fusion` is the sink of
these:
it passes them to the optimizer's rule as soon as autograd is done with the weight, when every use of it in the graph
has had its turn. So two losses of one backward make one update of their sum, and a gradient from somewhere else (a tied
weight) is noticed before anything has changed.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from samplex_cuda._checks import check_int
from samplex_cuda.ops.loss_types import REDUCTIONS, Entries, LossGrad, Table
from samplex_cuda.ops.row_gradients import entries, loss_update_
from samplex_cuda.ops.row_rules import row_update_
from samplex_cuda.optim.base import RowOptimizer, RowStep
from samplex_cuda.optim.combined import Combined
from samplex_cuda.optim.torch_clip import watch_torch_clip
from samplex_cuda.optim.writes import writing, written

__all__ = ["Fusion", "fusion_of"]

_NAME = "fuse_optimizer"
_MEAN = REDUCTIONS["mean"]
_NO_BIAS = RowStep((), None, None, None)
_NOTHING: tuple[int, list[Any]] = (0, [])

_below_autograd = torch._C._AutoDispatchBelowAutograd
_task_id = torch._C._current_graph_task_id
_fusions: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # parameter -> weak reference to its Fusion


def fusion_of(parameter: Tensor) -> Fusion | None:
    """The fusion that updates this parameter, or None.

    Example:
        >>> import torch
        >>> from samplex_cuda.optim.fusion import fusion_of
        >>> fusion_of(torch.zeros(3)) is None
        True
    """
    if torch.compiler.is_compiling():
        return None
    found = _fusions.get(parameter) if len(_fusions) else None
    return None if found is None else found()


# The entries of one loss, or what `loss_update_` makes them from; the CUDA stream that makes them (None on a CPU); and
# whether the part along the class rows is left out of the sums.
_Arrived = tuple[Entries | LossGrad, Any, bool]


def _stream_of(t: Tensor) -> Any:
    """The stream that work on `t` goes to now."""
    return torch.cuda.current_stream(t.device) if t.is_cuda else None


def _ordered(arrived: list[_Arrived], now: Any) -> list[Any]:
    """The entries, ready for use on stream `now`. Autograd orders streams only for the gradients it returns."""
    if now is not None:
        for found, stream, _ in arrived:
            if stream != now:
                now.wait_stream(stream)  # an event recorded there, waited for here
                for t in found if isinstance(found, Entries) else ():
                    if t is not None:
                        t.record_stream(now)  # its memory is not reused before
    return [found for found, _, _ in arrived]


class Fusion:
    """The gradient sink that updates a class table inside backward; made by `SampledClassifier.fuse_optimizer`.

    Args:
        weight: [C, d], the class table.
        bias: [C] or None.
        optimizer: a row optimizer that owns them and nothing else; or a `Combined`, whose row optimizer owns them: its
            `step` updates the rest.
        accumulate: how many backwards make one update.
        grad_scaler: whose scale the loss was multiplied by.
        on_late_update: called with the ids of an update that also changed rows of earlier backwards.

    Example:
        >>> import torch, samplex_cuda as sx
        >>> head = sx.SampledClassifier(8, 100, sx.samplers.Uniform(100), num_samples=5)
        >>> head.fuse_optimizer(sx.optim.RowAdagrad(head.parameters(), lr=0.1))
        >>> head(torch.randn(4, 8), torch.arange(4)).backward()  # the update is done
        >>> head.weight.grad is None
        True
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        optimizer: RowOptimizer | Combined,
        accumulate: int = 1,
        grad_scaler: Any = None,
        on_late_update: Callable[[list[Tensor]], None] | None = None,
    ) -> None:
        others_too = isinstance(optimizer, Combined)  # its step() updates them
        if isinstance(optimizer, Combined):
            optimizer = optimizer.rows
        if not isinstance(optimizer, RowOptimizer):
            raise TypeError(f"{_NAME}: optimizer must be one of samplex_cuda.optim, got {type(optimizer).__name__}")
        check_int(_NAME, "accumulate", accumulate)
        if grad_scaler is not None and not (hasattr(grad_scaler, "scale") and hasattr(grad_scaler, "is_enabled")):
            raise TypeError(f"{_NAME}: grad_scaler must be a GradScaler or None, got {type(grad_scaler).__name__}")
        if not weight.requires_grad:
            raise ValueError(f"{_NAME}: head.weight must require a gradient, got requires_grad=False")
        bias = bias if bias is not None and bias.requires_grad else None
        wanted = {"weight": weight} | ({} if bias is None else {"bias": bias})
        owned = [p for group in optimizer.param_groups for p in group["params"]]
        for name, p in wanted.items():
            if not any(p is q for q in owned):
                raise ValueError(f"{_NAME}: optimizer must own head.{name}, got one without it")
        others = [q for q in owned if not any(q is p for p in wanted.values())]
        if others and not others_too:
            raise ValueError(
                f"{_NAME}: optimizer must own head.weight and head.bias alone (give the rest of the model its own "
                f"optimizer), got {len(others)} other parameters, the first {list(others[0].shape)}"
            )
        if bias is not None and bias.dtype not in (
            weight.dtype,
            torch.float32 if bias.dtype != torch.float64 else None,
        ):
            raise ValueError(f"{_NAME}: head.bias must be {weight.dtype} or float32, got {bias.dtype}")
        for p in wanted.values():
            if p.grad is not None:
                raise ValueError(f"{_NAME}: gradients must be None when the optimizer is fused; call zero_grad() first")
        self.weight, self.bias = weight, bias
        self._tables = list(wanted.values())
        self.optimizer, self.grad_scaler = optimizer, grad_scaler
        self.accumulate = accumulate
        self.on_late_update = on_late_update
        if grad_scaler is not None:
            optimizer.count_on_device()
        # Of each running backward, by its number: the version of the weight, and what its losses gave.
        self._arrived: dict[int, tuple[int, list[_Arrived]]] = {}
        self._lock = threading.RLock()  # of everything below: backwards may run in several threads
        self._kept: list[_Arrived] = []  # of earlier ones, with accumulate
        self._backwards = 0  # since the last update
        self._found_inf: Tensor | None = None  # under a GradScaler: not 0 if one of them held an inf or nan
        self._hooks = [weight.register_hook(self._on_weight)]
        if bias is not None:
            self._hooks.append(bias.register_hook(self._on_bias))
        for p in wanted.values():
            _fusions[p] = weakref.ref(self)
        watch_torch_clip(lambda p: fusion_of(p) is not None)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of a fused head is not fused: the optimizer stays with the original."""
        return type(None), ()

    def remove(self) -> None:
        """Undo it; what was accumulated and not yet applied is dropped."""
        for hook in self._hooks:
            hook.remove()
        for p in (self.weight, self.bias):
            if p is not None and fusion_of(p) is self:
                del _fusions[p]
        self._arrived, self._kept, self._found_inf = {}, [], None

    @property
    def accumulate(self) -> int:
        """How many backwards make one update; may be set at any time.

        Example:
            >>> import samplex_cuda as sx
            >>> head = sx.SampledClassifier(8, 100, sx.samplers.Uniform(100), num_samples=5)
            >>> head.fuse_optimizer(sx.optim.RowSGD(head.parameters(), lr=0.1))
            >>> head.fused.accumulate = 4
            >>> head.fused.accumulate, head.fused.at_once
            (4, False)
        """
        return self._accumulate

    @accumulate.setter
    def accumulate(self, value: int) -> None:
        self._accumulate = check_int(_NAME, "accumulate", value)
        # Whether one op may make the update from what a forward kept. It looks at the upstream gradient on the host.
        on_host = not any(group.get("capturable", False) for group in self.optimizer.param_groups)
        self.at_once = value == 1 and self.grad_scaler is None and on_host

    @property
    def pending(self) -> int:
        """Backwards since the last update, with `accumulate`."""
        return self._backwards

    # -------------------------------------------------------------------------------------------- inside backward
    def deliver(self, grad: LossGrad, need: tuple[bool, bool, bool]) -> tuple[Tensor | None, None, None]:
        """See `Sink.deliver`: the gradient of hidden; those of weight and bias are stored until the weight's hook."""
        need_hidden, need_weight, _ = need
        version = grad.version
        if version != self.weight._version:
            self._refuse_version()
        unit = grad.unit_hidden
        if unit and need_weight and self.at_once and grad.grad_loss.item() == 1.0:
            self._take(grad, version)  # the forward has made the gradient of h, and one op makes the rest
            return unit.pop(), None, None
        scale = found_inf = None
        if self.grad_scaler is not None and need_weight and self.grad_scaler.is_enabled():
            scale, found_inf = self._scaling()
        d_hidden, found = entries(grad, self.bias is not None, scale, found_inf, need_weight and self.accumulate == 1)
        if need_weight:
            self._take(found, version, grad.plan.normalize)
        return d_hidden if need_hidden else None, None, None

    def deliver_entries(self, found: Entries, table: Table, need: tuple[bool, bool]) -> tuple[None, None]:
        """See `TableSink.deliver_entries`."""
        if table.version != self.weight._version:
            self._refuse_version()
        if self.grad_scaler is not None and self.grad_scaler.is_enabled():
            scale, found_inf = self._scaling()
            found = found.unscaled(scale, found_inf)
        self._take(found, table.version, table.on_sphere is not None)
        return None, None

    def deliver_rows(
        self, ids: Tensor, rows: Tensor, of_bias: Tensor, table: Table, need: tuple[bool, bool]
    ) -> tuple[None, None]:
        """See `TableSink.deliver_rows`."""
        coef = rows.new_ones((ids.shape[0], 1))
        none = ids[:0].unsqueeze(1), coef[:0], rows[:0]
        return self.deliver_entries(
            Entries(*none, ids, coef, rows, None if self.bias is None else of_bias), table, need
        )

    def _take(self, found: Entries | LossGrad, version: int, project: bool = False) -> None:
        task = _task_id()
        mine = self._arrived.get(task)
        if mine is None:
            mine = self._begin(task, version)
        mine[1].append((found, _stream_of(self.weight), project))

    def _begin(self, task: int, version: int) -> tuple[int, list[_Arrived]]:
        with self._lock:
            if self._arrived:
                # Another backward runs beside this one, or never came to the weight (torch.autograd.grad of h alone):
                # what this one may leave behind is dropped at its end.
                torch.autograd.Variable._execution_engine.queue_callback(functools.partial(self._forget, task))
            mine: tuple[int, list[_Arrived]] = (version, [])
            self._arrived[task] = mine
        return mine

    def _forget(self, task: int) -> None:
        self._arrived.pop(task, None)

    def _refuse_version(self) -> None:
        raise RuntimeError(
            f"{_NAME}: the weight was changed after this loss was computed, by another backward's update or in "
            "place, so its gradient is out of date: call backward once after each forward, add the losses before "
            "one backward, or use accumulate=k to sum k backwards"
        )

    def _scaling(self) -> tuple[Tensor, Tensor]:
        """Scale and found_inf of the loss scale, on the weight's device: nothing here waits for it.

        The scaler learns of found_inf as it does of those of other optimizers: its `update` reads them all.
        """
        scaler, device = self.grad_scaler, self.weight.device
        scale = getattr(scaler, "_scale", None)
        if scale is None:  # not used yet, or another class
            scale = scaler.scale(torch.ones((), device=device))
        with self._lock:
            if self._found_inf is None:
                self._found_inf = torch.zeros((), device=device)
            found_inf = self._found_inf
        states = getattr(scaler, "_per_optimizer_states", None)
        if states is not None:
            states[id(self.optimizer)]["found_inf_per_device"][device] = found_inf
        return scale.to(device, non_blocking=True), found_inf

    def _on_bias(self, grad: Tensor | None) -> None:
        if grad is not None:
            self._refuse("bias")

    def _refuse(self, name: str) -> None:
        self._arrived.pop(_task_id(), None)
        raise RuntimeError(
            f"{_NAME}: head.{name} got a gradient that is not from the head's sampled loss (a tied weight, a "
            "penalty, a loss without row gradients); a fused optimizer cannot add them: do not fuse, or untie it"
        )

    def _on_weight(self, grad: Tensor | None) -> None:
        """Autograd calls this when all gradients of the weight have arrived; None is what the losses gave."""
        version, arrived = self._arrived.pop(_task_id(), _NOTHING)
        if grad is not None:
            self._refuse("weight")
        if not arrived:
            return
        with self._lock:
            if version != self.weight._version:
                self._refuse_version()
            writing(self._tables)
            self._count(arrived, _stream_of(self.weight))
            written(self._tables)

    def _count(self, arrived: list[_Arrived], now: Any) -> None:
        """Takes the entries of one backward; updates the rows with every `accumulate`-th, on stream `now`."""
        if self.at_once and len(arrived) == 1 and now is None:  # the usual step on a CPU
            self._apply([arrived[0][0]], None, arrived[0][2])
            return
        self._backwards += 1
        if self._backwards < self.accumulate:
            # Own copies: h and the ids belong to the caller again once backward is over.
            self._kept += [(e.clone(), now, a[2]) for e, a in zip(_ordered(arrived, now), arrived, strict=True)]
            return
        self._finish(arrived, now)

    def flush(self) -> None:
        """The update of fewer than `accumulate` backwards, as at the end of an epoch; without any it does nothing.

        Example:
            >>> import torch, samplex_cuda as sx
            >>> head = sx.SampledClassifier(8, 100, sx.samplers.Uniform(100), num_samples=5)
            >>> head.fuse_optimizer(sx.optim.RowAdagrad(head.parameters(), lr=0.1), accumulate=4)
            >>> head(torch.randn(4, 8), torch.arange(4)).backward()
            >>> before = head.weight.detach().clone()
            >>> head.fused.flush()
            >>> head.fused.pending, torch.equal(head.weight, before)
            (0, False)
        """
        with self._lock, torch.no_grad():
            if self._kept:
                writing(self._tables)
                self._finish([], _stream_of(self.weight))
                written(self._tables)

    def _finish(self, arrived: list[_Arrived], now: Any) -> None:
        """Updates the rows with what was kept and with `arrived`."""
        if self._kept:
            arrived, self._kept = self._kept + arrived, []
        found_inf, self._found_inf, self._backwards = self._found_inf, None, 0
        project = arrived[0][2]
        if any(a[2] is not project for a in arrived):
            raise RuntimeError(f"{_NAME}: losses of one update must all have normalize=True, or none; got both")
        self._apply(_ordered(arrived, now), found_inf, project)

    def _apply(self, arrived: list[Any], found_inf: Tensor | None, project: bool) -> None:
        weight, bias, optimizer = self.weight, self.bias, self.optimizer
        e = arrived[0]
        if len(arrived) > 1:
            e = _joined([entries(g, bias is not None)[1] if isinstance(g, LossGrad) else g for g in arrived])
        w = optimizer.begin(weight)
        b = _NO_BIAS if bias is None else optimizer.begin(bias)
        # Below autograd: backward has gradients off, except for create_graph, which the loss refuses.
        with _below_autograd():
            if isinstance(e, LossGrad):
                plan = e.plan
                given = (weight, e.grad_loss, e.hidden, e.target, e.ids, e.saved, w.rule, w.state0, w.state1)
                if plan.reduction == _MEAN and not plan.with_ratio and w.key is b.key is w.step is None:
                    loss_update_(*given, bias, b.rule, b.state0, b.state1)
                else:
                    loss_update_(
                        *given, bias, b.rule, b.state0, b.state1, plan.reduction, plan.with_ratio,
                        b.key if w.key is None else w.key, w.lr, w.step, b.lr, b.step, w.first_row or b.first_row,
                    )  # fmt: skip
            else:
                row_update_(
                    weight, w.state0, w.state1, bias, b.state0, b.state1, *e[:-1],
                    b.key if w.key is None else w.key, w.rule, b.rule, w.lr, w.step, b.lr, b.step,
                    found_inf, e.keys, w.first_row or b.first_row, project,
                )  # fmt: skip
        torch._C._increment_version(self._tables)
        # A step was made, though not by step(): schedulers ask.
        optimizer._opt_called = True  # type: ignore[attr-defined]
        if len(arrived) > 1 and self.on_late_update is not None:
            self.on_late_update([e.ids_a, e.ids_b])


def _joined(several: list[Entries]) -> Entries:
    """One set of entries of several; narrower ones are padded with ids of -1, which are skipped."""

    def ids_of(tensors: list[Tensor]) -> Tensor:
        tensors = [t.unsqueeze(1) if t.dim() == 1 else t for t in tensors]
        width = max(t.shape[1] for t in tensors)
        return torch.cat([torch.nn.functional.pad(t, (0, width - t.shape[1]), value=-1) for t in tensors])

    def coef_of(tensors: list[Tensor]) -> Tensor:
        width = max(t.shape[1] for t in tensors)
        return torch.cat([torch.nn.functional.pad(t, (0, width - t.shape[1])) for t in tensors])

    bias_b = [e.bias_b for e in several if e.bias_b is not None]
    first = [(e.ids_a, e.coef_a, e.rows_a) for e in several]
    second = several
    if len({e.ids_b.dim() for e in several}) > 1:  # draws per row join the targets: shared ones come with a bias
        first += [(e.ids_b, e.coef_b, e.rows_b) for e in several if e.ids_b.dim() == 2]
        second = [e for e in several if e.ids_b.dim() == 1]
    return Entries(
        ids_of([ids for ids, _, _ in first]),
        coef_of([coef for _, coef, _ in first]),
        torch.cat([rows.to(first[0][2].dtype) for _, _, rows in first]),
        ids_of([e.ids_b for e in second]),
        coef_of([e.coef_b for e in second]),
        torch.cat([e.rows_b for e in second]),
        torch.cat(bias_b) if bias_b else None,
    )
