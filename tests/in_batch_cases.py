"""What the tests of in-batch negatives run on every rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import samplex_cuda as sx


def frequencies(group: Any) -> tuple[Tensor, Tensor]:
    """The arrays of an estimator that counts the ids of all ranks, some of which are fill."""
    g = torch.Generator().manual_seed(0)
    frequency = sx.samplers.StreamingFrequency(50)
    for _ in range(5):
        ids = torch.randint(50, (3, 8), generator=g)[dist.get_rank(group)]
        ids[6:] = -1
        frequency.update(ids[: 8 - dist.get_rank(group)], group=group)
    return frequency.last, frequency.gap


def gathered(group: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Loss and gradients of this rank's half of a batch of 12."""
    from test_in_batch import tower

    queries, keys, ids, log_q = tower(12, b=12)
    rows = slice(6 * dist.get_rank(group), 6 * dist.get_rank(group) + 6)
    q, k = (t.detach()[rows].clone().requires_grad_() for t in (queries, keys))
    loss = sx.functional.contrastive(q, k, key_ids=ids[rows], log_q=log_q[rows], group=group)
    return (loss.detach(), *torch.autograd.grad(loss, (q, k)))
