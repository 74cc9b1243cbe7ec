"""Sparse input embeddings of a replicated model: inside backward their row gradients become those of all ranks.

DistributedDataParallel would reduce them as dense ones, or not at all where the table is that of a head as well.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from samplex_cuda.distributed.collectives import Exchange

__all__ = ["share_embeddings", "sparse_embeddings"]

_MARK = "_samplex_of_all_ranks"  # attribute of an embedding: the handles of its hooks


def sparse_embeddings(module: nn.Module) -> list[nn.Embedding | nn.EmbeddingBag]:
    """Modules with row gradients besides heads: `nn.Embedding` and `nn.EmbeddingBag` with `sparse=True`.

    Args:
        module: that holds them.

    Example:
        >>> from torch import nn
        >>> from samplex_cuda.distributed.embeddings import sparse_embeddings
        >>> sparse_embeddings(nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 2)))
        [Embedding(9, 4, sparse=True)]
    """
    return [
        m
        for m in module.modules()
        if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse and m.weight.requires_grad
    ]


def share_embeddings(found: list[nn.Embedding | nn.EmbeddingBag], group: dist.ProcessGroup, encoder: str) -> None:
    """Has the row gradients of embeddings be those of all ranks, exchanged in the backward of every training step.

    Args:
        found: from `sparse_embeddings`; those of the first rank give the others their numbers.
        group: the process group.
        encoder: "average" or "sum", as in `replicate`.
    """
    if not found:
        return
    for table in {id(m.weight): m.weight for m in found}.values():
        dist.broadcast(table.detach(), dist.get_global_rank(group, 0), group=group)
    shared = _Shared(Exchange(group), 1.0 / dist.get_world_size(group) if encoder == "average" else 1.0)
    for m in found:
        for handle in m.__dict__.pop(_MARK, ()):
            handle.remove()
        m.__dict__[_MARK] = (
            m.register_forward_pre_hook(shared.before),
            m.register_forward_hook(shared.after, always_call=True),
        )


class _Shared:
    """Hooks that put `_OfAllRanks` between a table and the forward of an embedding."""

    def __init__(self, exchange: Exchange | None = None, factor: float = 1.0) -> None:
        self.exchange, self.factor = exchange, factor

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of a model is not replicated."""
        return type(self), ()

    def before(self, module: nn.Module, args: Any) -> None:
        if self.exchange is not None and module.training and torch.is_grad_enabled():
            # In front of the parameter of this name; `after` takes it away.
            module.__dict__["weight"] = _OfAllRanks.apply(module.weight, self.exchange, self.factor)

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        module.__dict__.pop("weight", None)


class _OfAllRanks(torch.autograd.Function):
    """A table as it is; its sparse gradient [C, d] is the sum over the ranks, times a factor."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, exchange: Exchange, factor: float) -> Tensor:
        ctx.exchange, ctx.factor = exchange, factor
        return table.view_as(table)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        exchange: Exchange = ctx.exchange
        own = grad.coalesce()
        ids, rows = own.indices()[0], own.values()
        counts = exchange.stack(ids.new_tensor([ids.shape[0]])).reshape(-1).tolist()
        most = max(counts)
        wide = ids.new_zeros(most), rows.new_zeros(most, rows.shape[1])
        wide[0][: len(ids)], wide[1][: len(ids)] = ids, rows
        all_ids, all_rows = (exchange.stack(t) for t in wide)
        ids = torch.cat([all_ids[rank, :n] for rank, n in enumerate(counts)])
        rows = torch.cat([all_rows[rank, :n] for rank, n in enumerate(counts)]) * ctx.factor
        return torch.sparse_coo_tensor(ids.unsqueeze(0), rows, grad.shape, check_invariants=False), None, None
