"""The numbers of one optimizer step, as the kernels take them: rates, decay, bias correction.

Where rate and step count live on the device, the kernel computes the numbers from `constants`, by the same operations
(`live_rule` in csrc/update/row_rules/row_rules_math.h).
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

__all__ = ["Rule", "adagrad", "adam", "constants", "sgd"]

# RowRuleKind of csrc/update
_SGD, _MOMENTUM, _ADAGRAD, _ROW_ADAGRAD, _ADAM = range(5)


class Rule(NamedTuple):
    """`RowRule` of csrc/update, field by field."""

    kind: float
    nesterov: float = 0.0
    lr: float = 0.0  # with Adam, divided by its first bias correction
    weight_decay: float = 0.0  # times the row, added to its gradient
    keep: float = 1.0  # the row is multiplied by this: decoupled weight decay
    eps: float = 0.0
    beta1: float = 0.0  # or the momentum
    beta2: float = 0.0
    second: float = 0.0  # factor of the root: Adam's second bias correction


@functools.lru_cache(maxsize=16)
def sgd(lr: float, momentum: float, weight_decay: float, nesterov: bool) -> Rule:
    """SGD, with a momentum buffer if `momentum` is not 0."""
    kind = _MOMENTUM if momentum else _SGD
    return Rule(float(kind), float(nesterov), float(lr), float(weight_decay), beta1=float(momentum))


@functools.lru_cache(maxsize=16)  # the same in every step, unless a scheduler moves the rate
def adagrad(lr: float, eps: float, weight_decay: float, rowwise: bool) -> Rule:
    """Adagrad, with one sum per number or per row."""
    kind = float(_ROW_ADAGRAD if rowwise else _ADAGRAD)
    return Rule(kind, 0.0, float(lr), float(weight_decay), 1.0, float(eps), 0.0, 0.0, 0.0)


def adam(lr: float, betas: tuple[float, float], eps: float, weight_decay: float, decoupled: bool, step: int) -> Rule:
    """Adam at step `step`, counted from 1; AdamW if `decoupled`."""
    lr, decay, first, second = float(lr), float(weight_decay), float(betas[0]), float(betas[1])
    return Rule(
        kind=float(_ADAM),
        lr=lr / (1.0 - first**step),
        weight_decay=0.0 if decoupled else decay,
        keep=1.0 - lr * decay if decoupled else 1.0,
        eps=float(eps),
        beta1=first,
        beta2=second,
        second=1.0 / math.sqrt(1.0 - second**step),
    )


def constants(rule: Rule, decoupled_weight_decay: float = 0.0, lr_decay: float = 0.0) -> tuple[float, ...]:
    """What a step takes whose rate and count are tensors.

    Args:
        rule: a rule of step 1; of its `lr`, `keep` and `second` the kernel makes those of the step.
        decoupled_weight_decay: of AdamW.
        lr_decay: of Adagrad.
    """
    return (*rule, float(decoupled_weight_decay), float(lr_decay))
