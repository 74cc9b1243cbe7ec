"""Which sampler a sharded head gets, and how it follows the table: the same decisions on every rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from samplex_cuda._checks import check_choice
from samplex_cuda.distributed.collectives import Exchange
from samplex_cuda.distributed.kernel import ShardedKernel
from samplex_cuda.distributed.layout import Layout
from samplex_cuda.distributed.midx import ShardedMIDX
from samplex_cuda.distributed.mixture import ShardedInBatch, ShardedMixture
from samplex_cuda.distributed.samplers import ShardedUnigram
from samplex_cuda.distributed.softmax import ShardedExact
from samplex_cuda.distributed.subtrees import ShardedTree
from samplex_cuda.heads.follow import TableFollower
from samplex_cuda.samplers.exact import ExactSampler
from samplex_cuda.samplers.in_batch import InBatch
from samplex_cuda.samplers.kernel_base import KernelSampler
from samplex_cuda.samplers.midx import MIDX
from samplex_cuda.samplers.mixture import Mixture
from samplex_cuda.samplers.static import DeferredUnigram, Unigram
from samplex_cuda.samplers.tree import Tree

__all__ = ["REPLICATED", "SAMPLERS", "due_state", "follow_table", "shard_sampler"]

_NAME = "SampledClassifier.shard"
SAMPLERS = ("auto", "replicate", "shard")
REPLICATED = 10_000_000  # classes up to which `sampler="auto"` replicates what does not depend on the table


def shard_sampler(
    sampler: Any,
    how: str,
    layout: Layout,
    exchange: Exchange,
    device: torch.device,
    whole: bool = False,
    unique: bool = False,
) -> Any:
    """The sampler of a sharded head: spread over the ranks, or as it is on each of them.

    Args:
        sampler: of the unsharded head.
        how: "auto", "replicate" or "shard".
        layout: which rank holds which class.
        exchange: the collectives of the head.
        device: of the class rows.
        whole: whether the head asks a tree for more than draws: log q of every class, or stratified draws.
        unique: whether the head draws distinct classes, of a sampler that is replicated.
    """
    check_choice(_NAME, "sampler", how, SAMPLERS)
    if isinstance(sampler, KernelSampler):
        return ShardedKernel(sampler, layout, exchange, device)
    if isinstance(sampler, ExactSampler):
        return ShardedExact(sampler, layout, exchange, device)
    if isinstance(sampler, Mixture):
        spread_out = [
            shard_sampler(part, how if _can_choose(part) else "auto", layout, exchange, device, whole, unique)
            for part in sampler._parts()
        ]
        if any(getattr(part, "collective", False) for part in spread_out):
            return ShardedMixture(spread_out, sampler.weights, layout).to(device)
        return sampler
    if isinstance(sampler, InBatch):
        return _shard_in_batch(sampler, how, layout, exchange, device)
    if isinstance(sampler, MIDX):
        return ShardedMIDX(sampler, layout, exchange, device)
    if getattr(sampler, "follows_rows", False):
        raise NotImplementedError(
            f"{_NAME}: a sampler that depends on the class table must be Quadratic, RandomFourier, Softmax, Quartic, "
            f"MIDX or a Mixture of them, got {type(sampler).__name__}, which needs the whole table on one rank"
        )
    if isinstance(sampler, DeferredUnigram):
        if how == "replicate" or unique:
            raise ValueError(
                f'{_NAME}: a deferred Unigram must be sharded and without unique draws, got sampler="{how}" and '
                f"unique={unique}; make Unigram(counts) to replicate it"
            )
        return ShardedUnigram.of_counts(sampler, layout, exchange, device)
    spread = how == "shard" or (how == "auto" and layout.num_classes > REPLICATED)
    if spread and type(sampler) is Unigram and not unique:
        return ShardedUnigram.of(sampler, layout, exchange)
    if spread and type(sampler) is Tree and not whole and sampler.has_base:
        return shard_sampler(sampler.as_mixture(), how, layout, exchange, device, whole)
    if spread and type(sampler) is Tree and not whole:
        return ShardedTree(sampler, layout, exchange)
    if how == "shard":
        raise ValueError(
            f'{_NAME}: sampler="shard" requires a Unigram without unique draws, Quadratic, RandomFourier, or a Tree '
            "without stratified draws and without a loss whose predictions need log q of every class, got "
            f"{type(sampler).__name__}"
        )
    return sampler


def _can_choose(sampler: Any) -> bool:
    """Whether a part of another sampler can be spread or replicated; others are what they are, whatever is asked."""
    return type(sampler) in (Unigram, Tree)


def _shard_in_batch(sampler: InBatch, how: str, layout: Layout, exchange: Exchange, device: torch.device) -> InBatch:
    """The same sampler: the head gives it the targets of all ranks. A second sampler may be spread over them."""
    if sampler.group is not None:
        raise ValueError(
            f"{_NAME}: group must be None in an InBatch sampler of a head on several ranks, which uses the targets of "
            "all ranks anyway, got a process group"
        )
    extra = None
    if sampler.extra is not None:
        extra = shard_sampler(sampler.extra, how if _can_choose(sampler.extra) else "auto", layout, exchange, device)
    if extra is sampler.extra:
        return sampler
    return ShardedInBatch(sampler, extra)


def due_state(follower: TableFollower, sampler: Any, weight: Tensor, bias: Tensor | None) -> int:
    """0: the sampler is up to date, 1: touched rows are due, 2: all rows are. Must be equal on all ranks."""
    if not follower.active:
        return 0
    follower.look(weight, bias if getattr(sampler, "has_bias", False) else None)
    return 2 if follower.stale else int(follower.due())


@torch.no_grad()
def follow_table(follower: TableFollower, sampler: Any, weight: Tensor, bias: Tensor | None) -> None:
    """Brings the sampler up to date with the tables of all ranks: touched rows, or all of them. A collective.

    Args:
        follower: what was touched, in classes.
        sampler: of the sharded head; nothing happens if it does not depend on the table.
        weight: [rows, d], this rank's table.
        bias: [rows].
    """
    if not getattr(sampler, "follows_rows", False):
        return
    known = bias if sampler.has_bias else None
    if follower.stale or follower.policy is None or (follower.policy == "epoch" and follower.steps):
        sampler.rebuild(weight, known)
    else:
        # After a load, ranks whose rows were not touched have no list: they take part all the same.
        none = torch.empty(0, dtype=torch.int64, device=weight.device)
        sampler.follow(torch.cat([none, *follower.recorded()]), weight, known)
    follower.reset()
    follower.look(weight, known)
    follower.stale = False
