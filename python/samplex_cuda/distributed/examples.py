"""A number per training example (`log_eta` of augment and reduce), spread over the ranks by example."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from samplex_cuda.distributed.collectives import Exchange
from samplex_cuda.distributed.layout import Layout
from samplex_cuda.losses import Loss
from samplex_cuda.losses.base import ExampleState

__all__ = ["ExampleShard"]


class ExampleShard:
    """Where the numbers of the examples are: rank r holds those of the range that `torch.chunk` would give it.

    The tensor of a rank has one number more than its examples: what is written for examples of other ranks goes there,
    so that a step has fixed sizes and never looks at an index on the host.

    Args:
        state: name, number of examples and first value.
        exchange: the ranks.
    """

    def __init__(self, state: ExampleState, exchange: Exchange) -> None:
        self.state, self.exchange = state, exchange
        self.layout = Layout(state.size, exchange.world, exchange.rank)

    def make(self, given: Tensor | None, device: torch.device, dtype: torch.dtype) -> Tensor:
        """The tensor of this rank, [n + 1]; `given` [N] holds the numbers of all examples, None: the first value."""
        made = torch.full((self.layout.rows + 1,), self.state.value, device=device, dtype=dtype)
        if given is not None:
            self.take(made, given)
        return made

    def take(self, kept: Tensor, given: Tensor) -> None:
        """Copies this rank's part of the numbers of all examples [N], a DTensor or whole, into its tensor."""
        if isinstance(given, DTensor):
            part = given.redistribute(given.device_mesh, [Shard(0)]).to_local()
        else:
            part = given[self.layout.start : self.layout.stop]
        kept[:-1].copy_(part)

    def fetch(self, kept: Tensor, index: Tensor) -> Tensor:
        """The numbers of examples [R], the same on every rank; one all-reduce of [R].

        Args:
            kept: [n + 1], of this rank.
            index: int64 [R], the same on every rank; -1: no example, which gives 0.
        """
        local = self.layout.local(index)
        # One rank has the number and the others have 0: the sum has its bits.
        return self.exchange.sum_(torch.where(local >= 0, kept[local.clamp_min(0)], 0.0))

    def move(self, loss: Loss, kept: Tensor, index: Tensor, used: Tensor, extra: Tensor) -> None:
        """`loss.update_state` for the examples of this rank; nothing is sent: every rank knows all of it."""
        local = self.layout.local(index)
        loss.update_state(kept, torch.where(local >= 0, local, kept.shape[0] - 1), used, extra)

    def as_dtensor(self, kept: Tensor, mesh: Any) -> DTensor:
        """The numbers of all examples, [N]; nothing is copied."""
        size = torch.Size([self.state.size])
        return DTensor.from_local(kept[:-1], mesh, [Shard(0)], run_check=False, shape=size, stride=(1,))
