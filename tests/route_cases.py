"""What the tests of the routes of a sharded step run on every rank."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from rank_cases import BATCH, batches, make_head

import samplex_cuda as sx


def sent(group: Any, route: str, shared: bool, classes: int, dim: int, draws: int, batch: int) -> tuple[int, float]:
    """Bytes that this rank sends in a step with a full batch, and the share of its entries that name a new class."""
    rank = dist.get_rank(group)
    # Copies of a shared draw are merged, and fewer than m rows travel: a uniform distribution has few.
    sampler = sx.samplers.Uniform(classes) if shared else sx.samplers.LogUniform(classes)
    head: Any = sx.SampledClassifier(dim, classes, sampler, draws, bias=False, shared=shared, device="meta").shard(
        group, encoder="sum", batch_capacity=batch, order="spread", key=sx.Key(3), route=route
    )
    g = torch.Generator().manual_seed(rank)
    h, y = torch.randn(batch, dim, generator=g, requires_grad=True), torch.randint(classes, (batch,), generator=g)
    head(h, y, key=sx.Key(4)).backward()
    head.exchange.sent = 0
    head(h, y, key=sx.Key(5)).backward()
    return head.exchange.sent, head.exchange.unique


def _few_steps(group: Any, route: str, name: str) -> list[torch.Tensor]:
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    head: Any = make_head(name, "meta").shard(
        group, encoder="sum", key=sx.Key(5), batch_capacity=BATCH, order="spread", route=route
    )
    head.fuse_optimizer(sx.optim.RowAdagrad(head.parameters(), lr=0.2))
    key, losses = sx.Key(9), []
    for h, y in batches(3):
        rows = torch.arange(BATCH).tensor_split(world)[rank]
        mine = h[rows].requires_grad_()
        loss = head(mine, y[rows], key=key)
        loss.backward()
        losses += [loss.detach(), mine.grad]
    return [*losses, head.weight.detach().clone(), head.bias.detach().clone()]


def fixed_and_counted(group: Any, route: str, name: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """A few steps as on a CPU, and the same steps with the sizes of a GPU."""
    counted = _few_steps(group, route, name)
    with mock.patch("samplex_cuda._device.host_waits", return_value=True):
        return counted, _few_steps(group, route, name)


def overflowing(group: Any) -> tuple[torch.Tensor, bool]:
    """A step with room for fewer rows than are named: its loss, and whether the table is as before."""
    head: Any = make_head("plain", "meta").shard(
        group, encoder="sum", key=sx.Key(5), batch_capacity=BATCH, order="spread", route="rows_to_queries"
    )
    head.fuse_optimizer(sx.optim.RowAdagrad(head.parameters(), lr=0.2))
    before = head.weight.detach().clone()
    with (
        mock.patch("samplex_cuda._device.host_waits", return_value=True),
        mock.patch("samplex_cuda.distributed.fetch.pair_capacity", return_value=2),
    ):
        loss = head(*batches(1)[0], key=sx.Key(9))
        loss.backward()
    return loss.detach(), torch.equal(before, head.weight)


def message(group: Any, options: dict[str, Any], given: dict[str, Any]) -> str:
    """The error of a head with these options, called with these arguments or given another loss."""
    try:
        head: Any = make_head(options.pop("name", "plain"), "meta")
        head = head.shard(group, encoder="sum", key=sx.Key(5), batch_capacity=BATCH, **options)
        if "loss" in given:
            head.loss = given.pop("loss")
        h, y = batches(1)[0]
        head(h, y, **given)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
