"""`RowSGD`, `RowAdagrad`, `RowAdam`: what the optimizers of `torch.optim` do, on the touched rows alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from samplex_cuda.optim import rules
from samplex_cuda.optim.base import RowOptimizer
from samplex_cuda.optim.rules import Rule
from samplex_cuda.rng import Key

__all__ = ["RowAdagrad", "RowAdam", "RowSGD"]


# As numbers: rules are kept for equal ones, and a tensor's may change.
def _sgd(lr: float, group: dict[str, Any]) -> Rule:
    return rules.sgd(lr, float(group["momentum"]), float(group["weight_decay"]), bool(group["nesterov"]))


def _adagrad(lr: float, group: dict[str, Any]) -> Rule:
    return rules.adagrad(lr, float(group["eps"]), float(group["weight_decay"]), bool(group["rowwise"]))


class RowSGD(RowOptimizer):
    """`torch.optim.SGD` on the touched rows, with momentum and weight decay for sparse gradients too.

    Args:
        params: parameters [C, d] or [C], or groups of them.
        lr: learning rate, above 0: a number, or a tensor of one.
        momentum: of the buffer; a row's buffer stays unchanged while the row is not touched.
        weight_decay: added to the gradient of a touched row, times the row.
        nesterov: look ahead; needs momentum.
        stochastic_rounding: round bf16 and fp16 weights up or down at random, so that updates below half a step are
            right on average; otherwise to nearest, and such updates vanish.
        key: where that randomness comes from; by default torch's generator.
        capturable: keep rate and step count in tensors on the device, for CUDA graphs: see docs/cuda_graphs.md.

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
        lr: float | Tensor = 1e-2,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        stochastic_rounding: bool = False,
        key: Key | None = None,
        capturable: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "stochastic_rounding": stochastic_rounding,
            "capturable": capturable,
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

    def _tables(self, p: Tensor, group: dict[str, Any], state: dict[str, Any]) -> list[Tensor]:
        if group["momentum"] and "momentum_buffer" not in state:  # a schedule turned the momentum on
            state["momentum_buffer"] = self._new_table(p, p.shape, 0.0, "momentum_buffer")
        return [state["momentum_buffer"]] if group["momentum"] else []

    def _rule(self, group: dict[str, Any], step: int) -> Rule:
        return _sgd(float(group["lr"]), group)

    def _constants(self, group: dict[str, Any], lr: float) -> tuple[float, ...]:
        return rules.constants(_sgd(lr, group))


class RowAdagrad(RowOptimizer):
    """`torch.optim.Adagrad` on the touched rows, with weight decay for sparse gradients too; or one sum per row.

    Args:
        params: parameters [C, d] or [C], or groups of them.
        lr: learning rate, above 0: a number, or a tensor of one.
        lr_decay: the rate of step t is `lr / (1 + (t - 1) * lr_decay)`.
        weight_decay: added to the gradient of a touched row, times the row.
        initial_accumulator_value: first value of the sums of squares.
        eps: added to the root.
        rowwise: keep one sum per row, of the mean square of its gradient: 1 / d of the state.
        stochastic_rounding: see `RowSGD`.
        key: see `RowSGD`.
        capturable: see `RowSGD`.

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
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        rowwise: bool = False,
        stochastic_rounding: bool = False,
        key: Key | None = None,
        capturable: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "lr_decay": lr_decay,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
            "eps": eps,
            "rowwise": rowwise,
            "stochastic_rounding": stochastic_rounding,
            "capturable": capturable,
        }
        self._check_group(defaults)
        super().__init__(params, defaults, key)

    def _check_group(self, group: dict[str, Any]) -> None:
        self._check_number(group, "lr", open=True)
        for name in ("lr_decay", "weight_decay", "initial_accumulator_value", "eps"):
            self._check_number(group, name)

    def _tables(self, p: Tensor, group: dict[str, Any], state: dict[str, Any]) -> list[Tensor]:
        return [state["sum"]]

    def _state_shapes(self, p: Tensor, group: dict[str, Any]) -> dict[str, tuple[torch.Size, float]]:
        shape = p.shape[:1] if group["rowwise"] else p.shape
        return {"sum": (shape, float(group["initial_accumulator_value"]))}

    def _rule(self, group: dict[str, Any], step: int) -> Rule:
        rate, decay = float(group["lr"]), group["lr_decay"]
        if decay:
            rate /= 1.0 + (step - 1) * float(decay)
        return _adagrad(rate, group)

    def _constants(self, group: dict[str, Any], lr: float) -> tuple[float, ...]:
        return rules.constants(_adagrad(lr, group), lr_decay=group["lr_decay"])


class RowAdam(RowOptimizer):
    """`torch.optim.Adam` on the touched rows: what `torch.optim.SparseAdam` does, with weight decay, and dense too.

    Args:
        params: parameters [C, d] or [C], or groups of them.
        lr: learning rate, above 0: a number, or a tensor of one.
        betas: of the averages of the gradient and its square; a row's averages stay unchanged while it is not
        touched.
        eps: added to the root after bias correction, as `torch.optim.Adam` does.
        weight_decay: added to the gradient of a touched row, times the row.
        decoupled_weight_decay: shrink a touched row instead, as `torch.optim.AdamW` does.
        stochastic_rounding: see `RowSGD`.
        key: see `RowSGD`.
        capturable: see `RowSGD`.

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
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        decoupled_weight_decay: bool = False,
        stochastic_rounding: bool = False,
        key: Key | None = None,
        capturable: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "decoupled_weight_decay": decoupled_weight_decay,
            "stochastic_rounding": stochastic_rounding,
            "capturable": capturable,
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

    def _rule(self, group: dict[str, Any], step: int) -> Rule:
        decoupled = group["decoupled_weight_decay"]
        return rules.adam(float(group["lr"]), group["betas"], group["eps"], group["weight_decay"], decoupled, step)

    def _constants(self, group: dict[str, Any], lr: float) -> tuple[float, ...]:
        decay, decoupled = group["weight_decay"], group["decoupled_weight_decay"]
        rule = rules.adam(lr, group["betas"], group["eps"], decay, decoupled, 1)
        return rules.constants(rule._replace(lr=lr), decoupled_weight_decay=decay if decoupled else 0.0)
