"""What the row optimizers share: parameter checks, state tables, `step`, and the update of a fused backward."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.autograd.profiler as profiler
import torch.optim.optimizer as torch_optimizer
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from samplex_cuda._checks import describe
from samplex_cuda.ops.loss_types import acc_dtype
from samplex_cuda.ops.row_rules import row_apply_
from samplex_cuda.optim.row_gradient import RowGradient
from samplex_cuda.optim.rules import Rule
from samplex_cuda.rng import Key, is_capturing, key_tensor
from samplex_cuda.tables import empty_table, mapped_table, table_file

__all__ = ["RowOptimizer", "RowStep", "first_row_of", "set_first_row"]

_first_rows: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def set_first_row(p: Tensor, row: int) -> None:
    """Says that `p` holds the rows from `row` on of a larger table: stochastic rounding goes by the row of that.

    Args:
        p: a parameter.
        row: at least 0.

    Example:
        >>> import torch
        >>> from samplex_cuda.optim.base import first_row_of, set_first_row
        >>> weight = torch.zeros(3, 2)
        >>> set_first_row(weight, 30)
        >>> first_row_of(weight), first_row_of(torch.zeros(3, 2))
        (30, 0)
    """
    _first_rows[p] = row


def first_row_of(p: Tensor) -> int:
    """What `set_first_row` was told of `p`, otherwise 0."""
    return _first_rows.get(p, 0)


class RowStep(NamedTuple):
    """What the update of one parameter takes besides gradients."""

    rule: tuple[float, ...]  # numbers of the step, or constants where `step` is a tensor
    state0: Tensor | None
    state1: Tensor | None
    key: Tensor | None  # of stochastic rounding
    lr: Tensor | None = None  # read on the device, with `step`
    step: Tensor | None = None  # fp32, counted on the device
    first_row: int = 0  # of a table spread over ranks, where weights are rounded stochastically


class RowOptimizer(Optimizer):
    """What the row optimizers share; not for use by itself.

    A parameter is [C, d] or [C], floating point, contiguous and a leaf. State is kept in fp32 (fp64 for fp64
    parameters) whatever the parameter's dtype, and allocated when the parameter is added: C * d numbers a state table.

    With `capturable=True` the step count is an fp32 tensor on the parameter's device, as in `torch.optim.Adam`, and the
    rate one in the group: kernels read both, so that a captured CUDA graph replays with the current ones. A rate given
    as a number becomes an fp64 tensor. Write new rates in place, as the schedulers of torch do.

    Example:
        >>> import torch, samplex_cuda as sx
        >>> isinstance(sx.optim.RowSGD([torch.zeros(3, 2, requires_grad=True)], lr=0.1), sx.optim.RowOptimizer)
        True
    """

    def __init__(self, params: Any, defaults: dict[str, Any], key: Key | None) -> None:
        if key is not None and not isinstance(key, Key):
            raise TypeError(f"{type(self).__name__}: key must be a Key or None, got {type(key).__name__}")
        self.key = key
        super().__init__(params, defaults)

    # -------------------------------------------------------------------------------------------- what a rule says
    def _check_group(self, group: dict[str, Any]) -> None:
        """Raises for numbers that make no sense."""
        raise NotImplementedError

    def _state_shapes(self, p: Tensor, group: dict[str, Any]) -> dict[str, tuple[torch.Size, float]]:
        """Shape and first value of each state table."""
        raise NotImplementedError

    def _rule(self, group: dict[str, Any], step: int) -> Rule:
        """The numbers of step `step`, counted from 1."""
        raise NotImplementedError

    def _constants(self, group: dict[str, Any], lr: float) -> tuple[float, ...]:
        """What `_rule` computes its numbers from, for the kernel to do it: see `rules.constants`."""
        raise NotImplementedError

    def _tables(self, p: Tensor, group: dict[str, Any], state: dict[str, Any]) -> list[Tensor]:
        """The state tables that the rule changes, at most two."""
        return [value for name, value in state.items() if name != "step"]

    # -------------------------------------------------------------------------------------------- groups and state
    def _fail(self, what: str, wanted: str, got: Any) -> None:
        raise ValueError(f"{type(self).__name__}: {what} must be {wanted}, got {got}")

    def _check_number(
        self, group: dict[str, Any], name: str, low: float = 0.0, high: float = math.inf, *, open: bool = False
    ) -> None:
        value = group[name]
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        inside = low < number < high if open else low <= number < high
        if not inside:
            end = f"in {'(' if open else '['}{low:g}, {high:g})" if high < math.inf else "finite"
            above = "" if high < math.inf else (f" and above {low:g}" if open else f" and at least {low:g}")
            self._fail(name, end + above, repr(value))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in `torch.optim.Optimizer`; checks the parameters and allocates their state.

        Args:
            param_group: "params" and whatever is to differ from the defaults.

        Example:
            >>> import torch, samplex_cuda as sx
            >>> weight, bias = torch.zeros(3, 2, requires_grad=True), torch.zeros(3, requires_grad=True)
            >>> optimizer = sx.optim.RowAdagrad([weight], lr=0.1)
            >>> optimizer.add_param_group({"params": [bias], "lr": 0.2})
            >>> len(optimizer.param_groups)
            2
        """
        if isinstance(param_group, dict):
            given = param_group.get("params", [])
            params = [given] if isinstance(given, Tensor) else list(given)
            param_group["params"] = params
            for entry in params:
                self._check_parameter(entry[1] if isinstance(entry, tuple) else entry)
            self._check_group({**self.defaults, **param_group})
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for p in group["params"]:
            self._init_state(p, group)
        if group.get("capturable", False) and group["params"]:
            self._rate_on_device(group)

    def _check_parameter(self, p: Any) -> None:
        if not isinstance(p, Tensor):
            raise TypeError(f"{type(self).__name__}: a parameter must be a Tensor, got {type(p).__name__}")
        if not p.is_floating_point() or p.dim() not in (1, 2):
            self._fail("a parameter", "[C] or [C, d] floating point", describe(p))
        if not p.is_leaf:
            self._fail("a parameter", "a leaf", f"{describe(p)}, the result of an operation")
        if p.is_sparse or not p.is_contiguous():
            self._fail("a parameter", "dense and contiguous", describe(p))

    def _init_state(self, p: Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        state["step"] = 0
        if group.get("capturable", False):
            self._count_on_device(p)
        for name, (shape, value) in self._state_shapes(p, group).items():
            state[name] = self._new_table(p, shape, value, name)

    @staticmethod
    def _new_table(p: Tensor, shape: torch.Size, value: float, name: str) -> Tensor:
        width = shape[1] if len(shape) == 2 else 1
        file = table_file(p)
        if file is not None and p.is_cpu:
            made = mapped_table(f"{file}.{name}", *shape, dtype=acc_dtype(p.dtype), overwrite=True)
            return made.fill_(value) if value else made
        # Laid out as the head's weight: its rows are gathered with the weight's.
        table = empty_table(shape[0], width, device=p.device, dtype=acc_dtype(p.dtype)).view(shape)
        return table.fill_(value)

    def _count_on_device(self, p: Tensor) -> None:
        state = self.state[p]
        if not isinstance(state["step"], Tensor):
            state["step"] = torch.full((), float(state["step"]), dtype=torch.float32, device=p.device)

    def count_on_device(self) -> None:
        """Keep step counts in tensors from now on: a GradScaler's found_inf is known on the device alone."""
        for group in self.param_groups:
            for p in group["params"]:
                self._count_on_device(p)

    @staticmethod
    def _rate_on_device(group: dict[str, Any]) -> None:
        lr, device = group["lr"], group["params"][0].device
        if not isinstance(lr, Tensor):
            group["lr"] = torch.full((), float(lr), dtype=torch.float64, device=device)
        elif lr.device != device:
            group["lr"] = lr.to(device)

    def state_dict(self) -> dict[str, Any]:
        """As in `torch.optim.Optimizer`; with the key, where there is one.

        Example:
            >>> import torch, samplex_cuda as sx
            >>> optimizer = sx.optim.RowAdagrad([torch.zeros(3, 2, requires_grad=True)])
            >>> sorted(optimizer.state_dict()["state"][0])
            ['step', 'sum']
        """
        found = super().state_dict()
        if self.key is not None:
            found["key"] = self.key.state_dict()
        return found

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over what `state_dict` of this class gave, or of its counterpart in `torch.optim`.

        All of it is checked before anything changes. The values are copied into this optimizer's own tensors, in their
        dtype: fp32 state of bf16 parameters stays fp32, and a captured CUDA graph goes on with what was loaded.
        `capturable` stays unchanged here, and with it whether rate and step count are tensors.

        Args:
            state_dict: "state" and "param_groups"; "key" where there is one.

        Example:
            >>> import torch, samplex_cuda as sx
            >>> weight = torch.zeros(3, 2, requires_grad=True)
            >>> state = sx.optim.RowAdagrad([weight], initial_accumulator_value=2.0).state_dict()
            >>> optimizer = sx.optim.RowAdagrad([weight])
            >>> optimizer.load_state_dict(state)
            >>> optimizer.state[weight]["sum"][0].tolist()
            [2.0, 2.0]
        """
        name = f"{type(self).__name__}.load_state_dict"
        groups = state_dict["param_groups"]
        have, given = [len(g["params"]) for g in self.param_groups], [len(g["params"]) for g in groups]
        if have != given:
            raise ValueError(f"{name}: parameters by group must be {have}, got {given}")
        own = {"params", "capturable"}
        merged = [{**old, **{k: v for k, v in new.items() if k not in own}} for old, new in
                  zip(self.param_groups, groups, strict=True)]  # fmt: skip
        rates = [group["lr"] for group in self.param_groups]
        found: list[tuple[Tensor, dict[str, Any], dict[str, Any]]] = []
        for mine, group, new in zip(self.param_groups, merged, groups, strict=True):
            self._check_group(group)
            for p, number in zip(mine["params"], new["params"], strict=True):
                saved = state_dict["state"].get(number, {})
                for table, (shape, _) in self._state_shapes(p, group).items() if saved else ():
                    value = saved.get(table)
                    if not isinstance(value, Tensor) or value.shape != shape:
                        got = describe(value) if isinstance(value, Tensor) else repr(value)
                        raise ValueError(f"{name}: {table} of parameter {number} must be {list(shape)}, got {got}")
                found.append((p, group, saved))
        key = Key(**state_dict["key"]) if "key" in state_dict else None
        tables = dict(self.state)
        super().load_state_dict(
            {"state": {}, "param_groups": [{**g, "params": n["params"]} for g, n in zip(merged, groups, strict=True)]}
        )
        for group, rate in zip(self.param_groups, rates, strict=True):
            lr = float(group["lr"])
            group["lr"] = rate.fill_(lr) if isinstance(rate, Tensor) else lr
        for p, group, saved in found:
            state, old = self.state[p], tables.get(p, {})
            state["step"] = count = int(saved.get("step", 0))
            if isinstance(old.get("step"), Tensor):
                if old["step"].device == p.device:
                    state["step"] = old["step"].fill_(count)
                else:
                    self._count_on_device(p)
            for table, (shape, value) in self._state_shapes(p, group).items():
                kept = old.get(table)
                if kept is None or kept.shape != shape or kept.device != p.device:
                    kept = self._new_table(p, shape, value, table)
                elif not saved:
                    kept.fill_(value)
                state[table] = kept.copy_(saved[table]) if saved else kept
        if key is not None:
            self.key = key

    # -------------------------------------------------------------------------------------------- a step
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the rows of every parameter that has a gradient.

        Args:
            closure: computes the loss again and returns it; optional.

        Returns:
            What the closure returned, or None.

        Example:
            >>> import torch, samplex_cuda as sx
            >>> weight = torch.zeros(3, 2, requires_grad=True)
            >>> optimizer = sx.optim.RowSGD([weight], lr=0.5)
            >>> torch.nn.functional.embedding(torch.tensor([1]), weight, sparse=True).sum().backward()
            >>> optimizer.step()
            >>> weight.tolist()
            [[0.0, 0.0], [-0.5, -0.5], [0.0, 0.0]]
        """
        if self._is_observed():
            return _observed_step(self, closure)
        return self._step(closure)

    step.hooked = True  # type: ignore[attr-defined]  # or torch puts its wrapper around every call

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in `torch.optim.Optimizer`.

        Args:
            set_to_none: drop the gradients instead of filling them with zeros.

        Example:
            >>> import torch, samplex_cuda as sx
            >>> weight = torch.zeros(3, 2, requires_grad=True)
            >>> optimizer = sx.optim.RowSGD([weight], lr=0.5)
            >>> weight.sum().backward()
            >>> optimizer.zero_grad()
            >>> weight.grad is None
            True
        """
        if not set_to_none or profiler._is_profiler_enabled:
            super().zero_grad(set_to_none)
            return
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None

    def _is_observed(self) -> bool:
        """Whether a hook or a profiler wants to know of a step. Torch's wrapper takes longer than a small update."""
        return bool(
            self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
            or torch_optimizer._global_optimizer_pre_hooks
            or torch_optimizer._global_optimizer_post_hooks
            or profiler._is_profiler_enabled
        )

    def _step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # As torch.no_grad() does it, whose decorator takes longer than the rest of a small step.
        before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        try:
            for group in self.param_groups:
                self._check_rate(group)
                for p in group["params"]:
                    if p.grad is not None:
                        self._apply(p, p.grad, group)
        finally:
            torch._C._set_grad_enabled(before)
        return loss

    def _apply(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        row_ids = None
        if isinstance(grad, RowGradient):
            row_ids, grad = grad.touched()
        elif grad.is_sparse:
            if grad.sparse_dim() != 1:
                self._fail("a sparse gradient", "sparse in the first dimension alone", f"{grad.sparse_dim()}")
            grad = grad.coalesce()
            row_ids, grad = grad._indices().contiguous().view(-1), grad._values()
        s = self._begin(p, group)
        given = (p, s.state0, s.state1, row_ids, grad.contiguous(), None, s.key, s.rule)
        if s.key is None and s.step is None:  # the rest is at its default
            row_apply_(*given)
        else:
            row_apply_(*given, s.lr, s.step, None, s.first_row)
        torch._C._increment_version([p])

    def _check_rate(self, group: dict[str, Any]) -> None:
        # A schedule may end at 0; a negative or undefined rate is a mistake. To look into a tensor is to wait for it.
        if group.get("capturable", False) and isinstance(group["lr"], Tensor):
            return
        if not 0.0 <= float(group["lr"]) < math.inf:
            self._fail("lr", "finite and at least 0 in a step", repr(group["lr"]))

    def _noise(self, p: Tensor, group: dict[str, Any]) -> Tensor | None:
        """The key of a step with stochastic rounding; None for weights that are not rounded."""
        if p.dtype not in (torch.float16, torch.bfloat16):
            return None
        return key_tensor(type(self).__name__, self.key, p.device)

    def begin(self, p: Tensor) -> RowStep:
        """Counts a step of `p` and returns what a fused update of its rows needs."""
        group = self.group_of(p)
        lr = group["lr"]
        if type(lr) is not float or not 0.0 <= lr < math.inf:
            self._check_rate(group)
        return self._begin(p, group)

    def _begin(self, p: Tensor, group: dict[str, Any]) -> RowStep:
        state = self.state[p]
        if p.is_cuda and is_capturing(p.device):
            self._check_capture(group, state)
        lr = count = None
        steps = state["step"]
        if isinstance(steps, Tensor):  # the kernel counts
            count, given = steps, group["lr"]
            lr = given if isinstance(given, Tensor) and given.device == p.device else None
            rule: tuple[float, ...] = self._constants(group, float(given) if lr is None else 0.0)
        else:
            state["step"] = steps = steps + 1
            rule = self._rule(group, steps)
        tables = self._tables(p, group, state)
        first = tables[0] if tables else None
        second = tables[1] if len(tables) > 1 else None
        # As a plain tuple: torch looks at every number of another one.
        if not group["stochastic_rounding"]:
            return RowStep(tuple(rule), first, second, None, lr, count)
        noise = self._noise(p, group)
        return RowStep(tuple(rule), first, second, noise, lr, count, 0 if noise is None else first_row_of(p))

    def _check_capture(self, group: dict[str, Any], state: dict[str, Any]) -> None:
        """Raises for host numbers that a CUDA graph would repeat in every replay."""
        name = type(self).__name__
        if not isinstance(state["step"], Tensor):
            raise RuntimeError(
                f"{name}: capturable must be True to capture a step in a CUDA graph, got False; every replay would use "
                "the rate and the step count of the capture"
            )
        if not isinstance(group["lr"], Tensor):
            raise RuntimeError(
                f"{name}: lr must be a tensor to capture a step in a CUDA graph, got {group['lr']!r}; capturable=True "
                "makes it one; write new rates in place: group['lr'].fill_(rate)"
            )

    def group_of(self, p: Tensor) -> dict[str, Any]:
        """The parameter group of `p`."""
        for group in self.param_groups:
            for q in group["params"]:
                if p is q:
                    return group
        raise KeyError(f"{type(self).__name__}: no group has a parameter of shape {list(p.shape)}")


_observed_step = Optimizer.profile_hook_step(RowOptimizer._step)
