"""Row updates: fakes of `torch.ops.samplex.row_apply_`, and of the pair `loss_entries`, `row_update_` that updates
inside a loss backward.

`samplex_cuda.optim` and `SampledClassifier.fuse_optimizer` are the public API.
"""

from __future__ import annotations

import torch
from torch import Tensor

from samplex_cuda import _library  # noqa: F401  registers the ops
from samplex_cuda.ops.fused_loss import acc_dtype

__all__ = ["loss_entries", "row_apply_", "row_update_"]


@torch.library.register_fake("samplex::row_apply_")
def _(weight: Tensor, *rest: object) -> None:
    return None


@torch.library.register_fake("samplex::row_update_")
def _(weight: Tensor, *rest: object) -> None:
    return None


@torch.library.register_fake("samplex::loss_entries")
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
) -> tuple[Tensor, ...]:
    batch, dim = hidden.shape
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


loss_entries = torch.ops.samplex.loss_entries.default
row_apply_ = torch.ops.samplex.row_apply_.default
row_update_ = torch.ops.samplex.row_update_.default
