"""Optimizers for class tables: `RowSGD`, `RowAdagrad`, `RowAdam` change the rows that have a gradient and no others.

They take the sparse gradients of the losses here (or any COO gradient over the first dimension) and dense ones, and do
on the touched rows what the optimizers of `torch.optim` do. Nothing happens to the rest: no decay, no momentum, no
moment moves while a row is not touched ("lazy", as in `torch.optim.SparseAdam`); the step that bias correction and
`lr_decay` count is the parameter's, not the row's. docs/optim.md says what follows from that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from samplex_cuda.ops.fused_loss import acc_dtype
from samplex_cuda.ops.row_rules import RULE_KINDS, Rule
from samplex_cuda.rng import Key, key_tensor
from samplex_cuda.tables import empty_table

__all__ = ["RowAdagrad", "RowAdam", "RowOptimizer", "RowSGD", "clip_grad_norm_"]

_row_sgd = torch.ops.samplex.row_sgd_.default
_row_adagrad = torch.ops.samplex.row_adagrad_.default
_row_adam = torch.ops.samplex.row_adam_.default


def _describe(t: Tensor) -> str:
    return f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')}"


class RowOptimizer(Optimizer):
    """What the row optimizers share; not for use by itself.

    A parameter is [C, d] or [C], floating point, contiguous and a leaf. State is kept in fp32 (fp64 for fp64
    parameters) whatever the parameter's dtype, and allocated when the parameter is added: C * d numbers a state table.

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

    def _update(
        self, p: Tensor, group: dict[str, Any], state: dict[str, Any], row_ids: Tensor | None, rows: Tensor
    ) -> None:
        """One step; `row_ids` None for all rows."""
        raise NotImplementedError

    def _rule(self, p: Tensor, group: dict[str, Any], state: dict[str, Any]) -> tuple[Rule, list[Tensor]]:
        """The same step as numbers and state tables, for a fused backward."""
        raise NotImplementedError

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

    def _check_parameter(self, p: Any) -> None:
        if not isinstance(p, Tensor):
            raise TypeError(f"{type(self).__name__}: a parameter must be a Tensor, got {type(p).__name__}")
        if not p.is_floating_point() or p.dim() not in (1, 2):
            self._fail("a parameter", "[C] or [C, d] floating point", _describe(p))
        if not p.is_leaf:
            self._fail("a parameter", "a leaf", f"{_describe(p)}, the result of an operation")
        if p.is_sparse or not p.is_contiguous():
            self._fail("a parameter", "dense and contiguous", _describe(p))

    def _init_state(self, p: Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        state["step"] = 0
        for name, (shape, value) in self._state_shapes(p, group).items():
            state[name] = self._new_table(p, shape, value)

    @staticmethod
    def _new_table(p: Tensor, shape: torch.Size, value: float) -> Tensor:
        width = shape[1] if len(shape) == 2 else 1
        # Laid out as the head's weight: its rows are gathered with the weight's.
        table = empty_table(shape[0], width, device=p.device, dtype=acc_dtype(p.dtype)).view(shape)
        return table.fill_(value)

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

        All of it is checked before anything changes. The values are copied into this optimizer's own tables, in their
        dtype: fp32 state of bf16 parameters stays fp32.

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
        merged = [{**old, **{k: v for k, v in new.items() if k != "params"}} for old, new in
                  zip(self.param_groups, groups, strict=True)]  # fmt: skip
        found: list[tuple[Tensor, dict[str, Any], dict[str, Any]]] = []
        for own, group, new in zip(self.param_groups, merged, groups, strict=True):
            self._check_group(group)
            for p, number in zip(own["params"], new["params"], strict=True):
                saved = state_dict["state"].get(number, {})
                for table, (shape, _) in self._state_shapes(p, group).items() if saved else ():
                    value = saved.get(table)
                    if not isinstance(value, Tensor) or value.shape != shape:
                        got = _describe(value) if isinstance(value, Tensor) else repr(value)
                        raise ValueError(f"{name}: {table} of parameter {number} must be {list(shape)}, got {got}")
                found.append((p, group, saved))
        key = Key(**state_dict["key"]) if "key" in state_dict else None
        tables = dict(self.state)
        super().load_state_dict(
            {"state": {}, "param_groups": [{**g, "params": n["params"]} for g, n in zip(merged, groups, strict=True)]}
        )
        for p, group, saved in found:
            state, old = self.state[p], tables.get(p, {})
            state["step"] = int(saved.get("step", 0))
            for table, (shape, value) in self._state_shapes(p, group).items():
                kept = old.get(table)
                if kept is None or kept.shape != shape or kept.device != p.device:
                    kept = self._new_table(p, shape, value)
                elif not saved:
                    kept.fill_(value)
                state[table] = kept.copy_(saved[table]) if saved else kept
        if key is not None:
            self.key = key

    # -------------------------------------------------------------------------------------------- a step
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the rows of every parameter that has a gradient.

        Args:
            closure: computes the loss anew and returns it; optional.

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
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._check_rate(group)
            for p in group["params"]:
                grad = p.grad
                if grad is None:
                    continue
                row_ids = None
                if grad.is_sparse:
                    if grad.sparse_dim() != 1:
                        self._fail("a sparse gradient", "sparse in the first dimension alone", f"{grad.sparse_dim()}")
                    grad = grad.coalesce()
                    row_ids, grad = grad._indices()[0].contiguous(), grad._values()
                state = self.state[p]
                state["step"] += 1
                self._update(p, group, state, row_ids, grad.contiguous())
                torch.autograd.graph.increment_version(p)
        return loss

    def _check_rate(self, group: dict[str, Any]) -> None:
        # A schedule may end at 0; a negative or undefined rate is a mistake.
        if not 0.0 <= float(group["lr"]) < math.inf:
            self._fail("lr", "finite and at least 0 in a step", repr(group["lr"]))

    def _noise(self, p: Tensor, group: dict[str, Any]) -> Tensor | None:
        """The key of this step where weights are rounded by chance."""
        if not group["stochastic_rounding"] or p.dtype not in (torch.float16, torch.bfloat16):
            return None
        return key_tensor(type(self).__name__, self.key, p.device)

    def _begin(self, p: Tensor) -> tuple[Rule, list[Tensor], Tensor | None]:
        """Counts a step of `p` and gives what a fused update of its rows needs: rule, states, key."""
        group = next(g for g in self.param_groups if any(p is q for q in g["params"]))
        self._check_rate(group)
        state = self.state[p]
        state["step"] += 1
        return (*self._rule(p, group, state), self._noise(p, group))


class RowSGD(RowOptimizer):
    """`torch.optim.SGD` on the touched rows, with momentum and weight decay for sparse gradients too.

    Args:
        params: parameters [C, d] or [C], or groups of them.
        lr: learning rate, above 0.
        momentum: of the buffer; a row's buffer rests while the row is not touched.
        weight_decay: added to the gradient of a touched row, times the row.
        nesterov: look ahead; needs momentum.
        stochastic_rounding: round bf16 and fp16 weights up or down by chance, so that updates below half a step are
            right on average; otherwise to nearest, and such updates vanish.
        key: where that chance comes from; by default torch's generator.

    Example:
        >>> import torch, samplex_cuda as sx
        >>> head = sx.SampledClassifier(8, 100, sx.samplers.Uniform(100), num_samples=5)
        >>> optimizer = sx.optim.RowSGD(head.parameters(), lr=0.1, momentum=0.9)
        >>> head(torch.randn(4, 8), torch.arange(4)).backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        stochastic_rounding: bool = False,
        key: Key | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "stochastic_rounding": stochastic_rounding,
        }
        self._check_group(defaults)
        super().__init__(params, defaults, key)

    def _check_group(self, group: dict[str, Any]) -> None:
        self._check_number(group, "lr", open=True)
        self._check_number(group, "momentum")
        self._check_number(group, "weight_decay")
        if group["nesterov"] and not group["momentum"]:
            self._fail("momentum", "above 0 with nesterov", repr(group["momentum"]))

    def _state_shapes(self, p: Tensor, group: dict[str, Any]) -> dict[str, tuple[torch.Size, float]]:
        return {"momentum_buffer": (p.shape, 0.0)} if group["momentum"] else {}

    def _buffer(self, p: Tensor, group: dict[str, Any], state: dict[str, Any]) -> Tensor | None:
        if not group["momentum"]:
            return None
        if "momentum_buffer" not in state:  # a schedule turned the momentum on
            state["momentum_buffer"] = self._new_table(p, p.shape, 0.0)
        return state["momentum_buffer"]

    def _update(
        self, p: Tensor, group: dict[str, Any], state: dict[str, Any], row_ids: Tensor | None, rows: Tensor
    ) -> None:
        _row_sgd(
            p,
            self._buffer(p, group, state),
            row_ids,
            rows,
            None,
            self._noise(p, group),
            float(group["lr"]),
            float(group["momentum"]),
            float(group["weight_decay"]),
            bool(group["nesterov"]),
        )

    def _rule(self, p: Tensor, group: dict[str, Any], state: dict[str, Any]) -> tuple[Rule, list[Tensor]]:
        buffer = self._buffer(p, group, state)
        kind = RULE_KINDS["sgd" if buffer is None else "momentum"]
        numbers = [kind, group["nesterov"], group["lr"], group["weight_decay"], 1.0, 0.0, group["momentum"], 0.0, 0.0]
        return [float(x) for x in numbers], [] if buffer is None else [buffer]


class RowAdagrad(RowOptimizer):
    """`torch.optim.Adagrad` on the touched rows, with weight decay for sparse gradients too; or one sum a row.

    Args:
        params: parameters [C, d] or [C], or groups of them.
        lr: learning rate, above 0.
        lr_decay: the rate of step t is `lr / (1 + (t - 1) * lr_decay)`.
        weight_decay: added to the gradient of a touched row, times the row.
        initial_accumulator_value: first value of the sums of squares.
        eps: added to the root.
        rowwise: keep one sum a row, of the mean square of its gradient: 1 / d of the state.
        stochastic_rounding: see `RowSGD`.
        key: see `RowSGD`.

    Example:
        >>> import torch, samplex_cuda as sx
        >>> head = sx.SampledClassifier(8, 100, sx.samplers.Uniform(100), num_samples=5)
        >>> optimizer = sx.optim.RowAdagrad(head.parameters(), lr=0.1, rowwise=True)
        >>> head(torch.randn(4, 8), torch.arange(4)).backward()
        >>> optimizer.step()
        >>> optimizer.state[head.weight]["sum"].shape
        torch.Size([100])
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        rowwise: bool = False,
        stochastic_rounding: bool = False,
        key: Key | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "lr_decay": lr_decay,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
            "eps": eps,
            "rowwise": rowwise,
            "stochastic_rounding": stochastic_rounding,
        }
        self._check_group(defaults)
        super().__init__(params, defaults, key)

    def _check_group(self, group: dict[str, Any]) -> None:
        self._check_number(group, "lr", open=True)
        for name in ("lr_decay", "weight_decay", "initial_accumulator_value", "eps"):
            self._check_number(group, name)

    def _state_shapes(self, p: Tensor, group: dict[str, Any]) -> dict[str, tuple[torch.Size, float]]:
        shape = p.shape[:1] if group["rowwise"] else p.shape
        return {"sum": (shape, float(group["initial_accumulator_value"]))}

    @staticmethod
    def _rate(group: dict[str, Any], state: dict[str, Any]) -> float:
        return float(group["lr"]) / (1.0 + (state["step"] - 1) * float(group["lr_decay"]))

    def _update(
        self, p: Tensor, group: dict[str, Any], state: dict[str, Any], row_ids: Tensor | None, rows: Tensor
    ) -> None:
        _row_adagrad(
            p,
            state["sum"],
            row_ids,
            rows,
            None,
            self._noise(p, group),
            self._rate(group, state),
            float(group["eps"]),
            float(group["weight_decay"]),
        )

    def _rule(self, p: Tensor, group: dict[str, Any], state: dict[str, Any]) -> tuple[Rule, list[Tensor]]:
        kind = RULE_KINDS["row_adagrad" if group["rowwise"] else "adagrad"]
        rate, decay, eps = self._rate(group, state), float(group["weight_decay"]), float(group["eps"])
        return [float(kind), 0.0, rate, decay, 1.0, eps, 0.0, 0.0, 0.0], [state["sum"]]


class RowAdam(RowOptimizer):
    """`torch.optim.Adam` on the touched rows: what `torch.optim.SparseAdam` does, with weight decay, and dense too.

    Args:
        params: parameters [C, d] or [C], or groups of them.
        lr: learning rate, above 0.
        betas: of the averages of the gradient and its square; a row's averages rest while it is not touched.
        eps: added to the root after bias correction, as `torch.optim.Adam` does.
        weight_decay: added to the gradient of a touched row, times the row.
        decoupled_weight_decay: shrink a touched row instead, as `torch.optim.AdamW` does.
        stochastic_rounding: see `RowSGD`.
        key: see `RowSGD`.

    Example:
        >>> import torch, samplex_cuda as sx
        >>> head = sx.SampledClassifier(8, 100, sx.samplers.Uniform(100), num_samples=5)
        >>> optimizer = sx.optim.RowAdam(head.parameters(), lr=0.1)
        >>> head(torch.randn(4, 8), torch.arange(4)).backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        decoupled_weight_decay: bool = False,
        stochastic_rounding: bool = False,
        key: Key | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "decoupled_weight_decay": decoupled_weight_decay,
            "stochastic_rounding": stochastic_rounding,
        }
        self._check_group(defaults)
        super().__init__(params, defaults, key)

    def _check_group(self, group: dict[str, Any]) -> None:
        self._check_number(group, "lr", open=True)
        self._check_number(group, "eps")
        self._check_number(group, "weight_decay")
        betas = group["betas"]
        if not isinstance(betas, tuple | list) or len(betas) != 2 or not all(0.0 <= float(b) < 1.0 for b in betas):
            self._fail("betas", "two numbers in [0, 1)", repr(betas))

    def _state_shapes(self, p: Tensor, group: dict[str, Any]) -> dict[str, tuple[torch.Size, float]]:
        return {"exp_avg": (p.shape, 0.0), "exp_avg_sq": (p.shape, 0.0)}

    def _update(
        self, p: Tensor, group: dict[str, Any], state: dict[str, Any], row_ids: Tensor | None, rows: Tensor
    ) -> None:
        _row_adam(
            p,
            state["exp_avg"],
            state["exp_avg_sq"],
            row_ids,
            rows,
            None,
            self._noise(p, group),
            float(group["lr"]),
            *(float(b) for b in group["betas"]),
            float(group["eps"]),
            float(group["weight_decay"]),
            bool(group["decoupled_weight_decay"]),
            state["step"],
        )

    def _rule(self, p: Tensor, group: dict[str, Any], state: dict[str, Any]) -> tuple[Rule, list[Tensor]]:
        lr, decay, step = float(group["lr"]), float(group["weight_decay"]), state["step"]
        first, second = (float(b) for b in group["betas"])
        apart = bool(group["decoupled_weight_decay"])
        rule = [
            float(RULE_KINDS["adam"]),
            0.0,
            lr / (1.0 - first**step),
            0.0 if apart else decay,
            1.0 - lr * decay if apart else 1.0,
            float(group["eps"]),
            first,
            second,
            1.0 / math.sqrt(1.0 - second**step),
        ]
        return rule, [state["exp_avg"], state["exp_avg_sq"]]


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_` for sparse and dense gradients together, without making a dense one.

    Args:
        parameters: whose gradients are clipped, in place, by the norm of all of them. A sparse gradient is coalesced
            first.
        max_norm: the largest norm allowed.
        norm_type: p of the norm; `inf` for the largest entry.
        error_if_nonfinite: raise where the norm is nan or infinite, before anything is changed.

    Returns:
        The norm before clipping, a scalar.

    Example:
        >>> import torch, samplex_cuda as sx
        >>> weight = torch.zeros(3, 2, requires_grad=True)
        >>> (3 * torch.nn.functional.embedding(torch.tensor([1, 1]), weight, sparse=True)).sum().backward()
        >>> norm = sx.optim.clip_grad_norm_([weight], max_norm=1.0)
        >>> round(float(norm), 4), round(float(weight.grad.to_dense().norm()), 4)
        (8.4853, 1.0)
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    for p in parameters:
        if getattr(p, "_samplex_fusion", None) is not None:
            raise ValueError(
                "clip_grad_norm_: a parameter must not belong to a head with a fused optimizer, whose gradient is used "
                f"up inside backward before there is a global norm; got {_describe(p)}"
            )
    values = []
    for p in parameters:
        if p.grad is None:
            continue
        if p.grad.is_sparse:
            p.grad = p.grad.coalesce()
            values.append(p.grad._values())
        else:
            values.append(p.grad)
    if not values:
        return torch.tensor(0.0)
    home = values[0].device
    kind = float(norm_type)
    norms = [torch.linalg.vector_norm(v, kind, dtype=acc_dtype(v.dtype)) for v in values if v.numel()]
    if not norms:
        return torch.zeros((), device=home)
    total = torch.linalg.vector_norm(torch.stack([norm.to(home) for norm in norms]), kind)
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError(f"clip_grad_norm_: the norm of the gradients must be finite, got {float(total)}")
    factor = torch.clamp(float(max_norm) / (total + 1e-6), max=1.0)
    for v in values:
        v.mul_(factor.to(device=v.device, dtype=v.dtype))
    return total
