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


def random_known(rows: int, ids: int, generator: torch.Generator | None = None, most: int = 4) -> tuple[Tensor, Tensor]:
    """Known positives as CSR: up to `most` ids below `ids` for each row, repeated ones among them."""
    g = torch.Generator().manual_seed(3) if generator is None else generator
    lengths = torch.randint(most + 1, (rows,), generator=g)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return offsets, torch.randint(ids, (int(offsets[-1]),), generator=g)


def gathered_known(group: Any) -> Tensor:
    """Loss of this rank's half of a batch of 12 whose queries know some of the ids."""
    from test_tower_negatives import make

    queries, keys, ids = make(12, b=12)
    rank = dist.get_rank(group)
    rows = slice(6 * rank, 6 * rank + 6)
    offsets, known = random_known(12, 9)
    mine = offsets[6 * rank : 6 * rank + 7]
    known = known[mine[0] : mine[-1]]
    q, k = queries.detach()[rows], keys.detach()[rows]
    return sx.functional.contrastive(
        q, k, key_ids=ids[rows], group=group, known_positives=(mine - mine[0], known)
    ).detach()


def gathered_symmetric(group: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Symmetric loss and gradients of this rank's half of a batch of 12."""
    from test_in_batch import tower

    queries, keys, ids, log_q = tower(12, b=12)
    rows = slice(6 * dist.get_rank(group), 6 * dist.get_rank(group) + 6)
    q, k = (t.detach()[rows].clone().requires_grad_() for t in (queries, keys))
    loss = sx.functional.contrastive(
        q, k, key_ids=ids[rows], log_q=log_q[rows], query_log_q=log_q[rows] + 1, symmetric=True, group=group
    )
    return (loss.detach(), *torch.autograd.grad(loss, (q, k)))
