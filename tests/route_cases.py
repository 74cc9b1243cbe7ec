"""What the tests of the routes of a sharded step run on every rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from rank_cases import BATCH, batches, make_head

import samplex_cuda as sx


def sent(group: Any, route: str, shared: bool, classes: int, dim: int, draws: int, batch: int) -> tuple[int, float]:
    """Bytes that this rank sends in a step with a full batch, and the share of its entries that name a new class."""
    rank = dist.get_rank(group)
    sampler = sx.samplers.LogUniform(classes)
    head: Any = sx.SampledClassifier(dim, classes, sampler, draws, bias=False, shared=shared, device="meta").shard(
        group, encoder="sum", batch_capacity=batch, order="spread", key=sx.Key(3), route=route
    )
    g = torch.Generator().manual_seed(rank)
    h, y = torch.randn(batch, dim, generator=g, requires_grad=True), torch.randint(classes, (batch,), generator=g)
    head(h, y, key=sx.Key(4)).backward()
    head.exchange.sent = 0
    head(h, y, key=sx.Key(5)).backward()
    return head.exchange.sent, head.exchange.unique


def message(group: Any, options: dict[str, Any], given: dict[str, Any]) -> str:
    """The error of a head with these options, called with these arguments; then whether the group still works."""
    try:
        head: Any = make_head(options.pop("name", "plain"), "meta")
        head = head.shard(group, encoder="sum", key=sx.Key(5), batch_capacity=BATCH, **options)
        h, y = batches(1)[0]
        head(h, y, **given)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
