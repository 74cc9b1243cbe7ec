"""Row updates: fakes of `torch.ops.samplex.row_sgd_`, `row_adagrad_`, `row_adam_`, and of `row_update_`, which updates
inside a loss backward from what `loss_entries` returns.

The public API is `samplex_cuda.optim` and `SampledClassifier.fuse_optimizer`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from samplex_cuda import _library  # noqa: F401  registers the ops

__all__ = ["RULE_KINDS", "Rule", "row_update_"]

RULE_KINDS = {"sgd": 0, "momentum": 1, "adagrad": 2, "row_adagrad": 3, "adam": 4}

Rule = list[float]
"""kind, nesterov, lr, weight_decay, keep, eps, beta1, beta2, second: `RowRule` of row_rules_params.h."""


@torch.library.register_fake("samplex::row_sgd_")
def _(weight: Tensor, momentum_buffer: Tensor | None, row_ids: Tensor | None, rows: Tensor, *rest: object) -> None:
    return None


@torch.library.register_fake("samplex::row_adagrad_")
def _(weight: Tensor, sum: Tensor, row_ids: Tensor | None, rows: Tensor, *rest: object) -> None:
    return None


@torch.library.register_fake("samplex::row_adam_")
def _(weight: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, row_ids: Tensor | None, *rest: object) -> None:
    return None


@torch.library.register_fake("samplex::row_update_")
def _(weight: Tensor, *rest: object) -> None:
    return None


row_update_ = torch.ops.samplex.row_update_.default
