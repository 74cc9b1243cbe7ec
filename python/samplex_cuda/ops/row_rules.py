"""Row updates: fakes of `torch.ops.samplex.row_apply_`, one step on given gradient rows, and of `row_update_`, which
updates inside a loss backward.

`samplex_cuda.optim` and `SampledClassifier.fuse_optimizer` are the public API.
"""

from __future__ import annotations

import torch
from torch import Tensor

from samplex_cuda._library import register_fake

__all__ = ["row_apply_", "row_update_"]


@register_fake("samplex::row_apply_")
def _(weight: Tensor, *rest: object) -> None:
    return None


@register_fake("samplex::row_update_")
def _(weight: Tensor, *rest: object) -> None:
    return None


row_apply_ = torch.ops.samplex.row_apply_.default
row_update_ = torch.ops.samplex.row_update_.default._op  # eager only: past a call in Python
