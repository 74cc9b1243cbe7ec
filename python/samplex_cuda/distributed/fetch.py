"""Class rows that travel to the rank whose queries name them, and their gradients back to the ranks that hold them."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from samplex_cuda import _device
from samplex_cuda.distributed.collectives import Exchange
from samplex_cuda.distributed.layout import Layout

__all__ = ["Fetched", "fetch", "give_back", "pair_capacity"]


def pair_capacity(entries: int, world: int, chunk: int) -> int:
    """Rows that a rank asks of another at most, where sizes must be fixed: the mean and six standard deviations.

    Args:
        entries: classes that a rank names in a step.
        world: ranks.
        chunk: rows of a rank.

    Example:
        >>> from samplex_cuda.distributed.fetch import pair_capacity
        >>> pair_capacity(256 * 65, 64, 10**6)
        365
    """
    mean = entries / world
    return max(1, min(entries, chunk, math.ceil(mean + 6 * math.sqrt(mean)) + 8))


class Fetched(NamedTuple):
    """Rows of all ranks that this rank has named, each once."""

    rows: Tensor  # [n, d]
    bias: Tensor | None  # [n]
    place: Tensor  # int64 [k], where the row of each given class is among `rows`; 0 for ids outside of [0, C)
    asked: Tensor  # int64 [S], this rank's rows that others have named; -1 for none
    counts: tuple[list[int], list[int]] | None  # rows to and from each rank; None: the same number of each
    overflow: Tensor  # bool [], whether a rank was asked for more rows than there is room for


def fetch(
    exchange: Exchange, layout: Layout, weight: Tensor, bias: Tensor | None, classes: Tensor, each: int
) -> Fetched:
    """The rows of some classes, from the ranks that hold them. Every rank must call it.

    On a CPU as many rows travel as are named. Where the host may not look at numbers, each pair of ranks exchanges
    `pair_capacity` rows; what does not fit sets `overflow`.

    Args:
        exchange: the collectives.
        layout: who holds what.
        weight: [rows, d], this rank's table.
        bias: [rows].
        classes: int64 [k]; outside of [0, C): none.
        each: how many of them a row of the batch has; a rank that brings fewer rows than others has as much room.
    """
    slot = layout.slot(classes)
    fixed = _device.host_waits(slot)
    counts: tuple[list[int], list[int]] | None = None
    overflow = torch.zeros((), dtype=torch.bool, device=slot.device)
    if fixed:
        wanted, place, overflow = _in_fixed_room(exchange, layout, slot, each)
    else:
        named = slot >= 0
        wanted, found = slot[named].unique(return_inverse=True)
        place = torch.zeros_like(slot)
        place[named] = found
        give = torch.bincount(wanted // layout.chunk, minlength=exchange.world)
        take = exchange.swap(give, None)
        counts = give.tolist(), take.tolist()
        exchange.unique = wanted.shape[0] / max(1, slot.shape[0])
    asked = exchange.swap(wanted, counts)
    asked = torch.where(asked >= 0, asked - layout.start, -1)
    back = None if counts is None else (counts[1], counts[0])
    safe = asked.clamp_min(0)
    table = weight if weight.shape[0] else weight.new_zeros(1, weight.shape[1])  # a rank without rows sends padding
    rows = exchange.swap(table[safe], back)
    of_rows = None
    if bias is not None:
        of_rows = exchange.swap((bias if bias.shape[0] else bias.new_zeros(1))[safe], back)
    return Fetched(rows, of_rows, place, asked, counts, overflow)


def _in_fixed_room(exchange: Exchange, layout: Layout, slot: Tensor, each: int) -> tuple[Tensor, Tensor, Tensor]:
    """Slots to ask for, [world * room], -1 for none; where each entry finds its row; whether there were too many."""
    world, device = exchange.world, slot.device
    room = pair_capacity((exchange.capacity or 1) * each, world, layout.chunk)
    ordered, order = slot.sort()
    before = torch.cat([ordered.new_full((1,), -1), ordered[:-1]])
    first = (ordered != before).to(torch.int64)  # slots of -1 come first and count as none
    number = first.cumsum(0)  # how many slots there are up to here
    owner = torch.div(ordered, layout.chunk, rounding_mode="floor")
    begin = torch.searchsorted(ordered, torch.arange(world, device=device) * layout.chunk)
    earlier = torch.cat([number.new_zeros(1), number])[begin]  # slots of the ranks before
    within = number - 1 - earlier[owner.clamp_min(0)]
    fits = (ordered >= 0) & (within < room)
    to = torch.where(fits, owner * room + within, world * room)  # the last place is cut off
    wanted = slot.new_full((world * room + 1,), -1).scatter_(0, to, ordered)[:-1]
    place = torch.empty_like(slot).scatter_(0, order, torch.where(fits, to, 0))
    exchange.unique = world * room / max(1, slot.shape[0])
    return wanted, place, ((ordered >= 0) & ~fits).any()


def give_back(exchange: Exchange, fetched: Fetched, grads: Tensor) -> Tensor:
    """Gradients [n, ...] of the rows that were fetched -> those [S, ...] of the rows that others have named."""
    return exchange.swap(grads, fetched.counts)
