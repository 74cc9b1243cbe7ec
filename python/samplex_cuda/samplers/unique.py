"""Distinct draws of distributions that stay, with the probability that each is among them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from samplex_cuda.draw import Draw
from samplex_cuda.ops.static_sample import uniform_sample
from samplex_cuda.rng import fold_in

__all__ = ["DrawSource", "UniqueDraw", "draw_unique", "excluded_of", "log_inclusion"]

_BITS = 52
_MOST = 1 << 24  # tries of a batch before the classes that are left are examined one by one


class UniqueDraw(NamedTuple):
    """Distinct draws, and how far the process of drawing went.

    Attributes:
        draw: ids [B, m] or [m] without repeats in a row, and log_q = log(inclusion probability) - log m, so that a loss
            that divides by m q weighs a class by one over its inclusion probability.
        level: float64 [B] or []: tau, the time at which the (m + 1)-th distinct class came (inf if there is none),
            or with mode "tf" the number of tries.

    Example:
        >>> import samplex_cuda as sx
        >>> found = sx.samplers.LogUniform(1000).unique(5, shared=True, mode="tf")
        >>> found.draw.ids.unique().shape, bool(found.level >= 5)
        (torch.Size([5]), True)
    """

    draw: Draw
    level: Tensor


class DrawSource(NamedTuple):
    """Where distinct draws come from: independent draws, and the whole distribution of a row."""

    op: str  # for error messages
    num_classes: int
    draw: Callable[[Tensor, int], tuple[Tensor, Tensor]]  # (key, n) -> ids and log-probabilities [B, n]
    law: Callable[[int], Tensor]  # row -> log-probability of every class [C]


def excluded_of(flat: Tensor | None, offsets: Tensor | None, row: int) -> Tensor | None:
    """The excluded classes of one row, [1, P], from those of a batch in the form of the ops."""
    if flat is None:
        return None
    return (flat[row : row + 1] if offsets is None else flat[offsets[row] : offsets[row + 1]]).reshape(1, -1)


def log_inclusion(log_p: Tensor, level: Tensor, mode: str) -> Tensor:
    """Log of the probability that a class is among the distinct draws, float64.

    Args:
        log_p: log-probability of one draw, [..., n].
        level: as in `UniqueDraw`, of the leading shape.
        mode: "inclusion": 1 - exp(-p tau); "tf": 1 - (1 - p)^tries.
    """
    p = log_p.double().exp()
    if mode == "tf":
        return torch.log(-torch.expm1(level[..., None] * torch.log1p(-p)))
    mass = torch.where(p > 0, p * level[..., None], 0.0)
    return torch.log(-torch.expm1(-mass))


def draw_unique(source: DrawSource, pair: Tensor, batch: int, count: int, mode: str) -> UniqueDraw:
    """Draws each row until it has enough distinct classes; the host waits for the device after every round.

    Args:
        source: independent draws, excluded classes left out.
        pair: int64 [2], a reserved key.
        batch: B.
        count: m.
        mode: "inclusion" or "tf".
    """
    wanted = count + (mode == "inclusion")  # the one after the last says how likely the others were
    device = pair.device
    ids = torch.empty(batch, 0, dtype=torch.int64, device=device)
    log_p = torch.empty(batch, 0, device=device)
    tries, rounds = 2 * wanted + 16, 0
    while True:
        drawn = source.draw(fold_in(pair, 2 * rounds), tries - ids.shape[1])
        ids, log_p = torch.cat([ids, drawn[0]], 1), torch.cat([log_p, drawn[1]], 1)
        order, place = ids.sort(dim=1, stable=True)
        fresh = torch.ones_like(order, dtype=torch.bool)
        fresh[:, 1:] = order[:, 1:] != order[:, :-1]
        first = torch.empty_like(fresh).scatter_(1, place, fresh)  # the first of its class in the row
        distinct = first.cumsum(1)
        rounds += 1
        done = distinct[:, -1] >= wanted
        if bool(done.all()) or 2 * tries * max(batch, 1) > _MOST or tries > 64 * (wanted + source.num_classes):
            break
        tries *= 2
    # A row's m distinct classes in the order in which they came.
    keep = first & (distinct <= count)
    column = torch.where(keep, distinct - 1, count)
    found = torch.zeros(batch, count + 1, dtype=torch.int64, device=device).scatter_(1, column, ids)[:, :count]
    chance = torch.zeros(batch, count + 1, device=device).scatter_(1, column, log_p)[:, :count]
    last = (distinct < wanted).sum(1)  # tries before the one that ends the row
    if mode == "tf":
        level = last.double() + 1.0
    else:
        bits = uniform_sample(fold_in(pair, 1), batch, tries, 1 << _BITS)[0]
        waits = -bits.double().add_(0.5).mul_(2.0**-_BITS).log_()  # between two tries, at rate 1
        times = waits.cumsum(1)
        level = times.gather(1, last.clamp(max=tries - 1)[:, None])[:, 0]
    if not bool(done.all()):
        found, chance, level = _finish(source, pair, ids, first, times if mode != "tf" else None, done, found, chance,
                                       level, count, wanted, mode)  # fmt: skip
    log_q = log_inclusion(chance, level, mode) - math.log(max(count, 1))
    return UniqueDraw(Draw(found.contiguous(), log_q.float(), independent=False), level)


def _finish(
    source: DrawSource, pair: Tensor, ids: Tensor, first: Tensor, times: Tensor | None, done: Tensor, found: Tensor,
    chance: Tensor, level: Tensor, count: int, wanted: int, mode: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Rows that are short of classes after very many tries: O(C) each.

    What is left of the process does not remember the past: a class that has not come yet comes after a further
    exponential time of rate p.
    """
    op = source.op
    for row in torch.nonzero(~done)[:, 0].tolist():
        log_p = source.law(row).double()
        there = log_p > -torch.inf
        seen = ids[row][first[row]][:count]
        left = int(there.sum())
        if left < count:
            raise ValueError(
                f"{op}: with unique, num_samples must be at most {left}, the remaining classes, got {count}"
            )
        if mode == "tf" and left > seen.shape[0] and seen.shape[0] < count:
            raise ValueError(
                f"{op}: unique='tf' must find {count} distinct classes in {ids.shape[1]} tries, got {seen.shape[0]}: "
                "the distribution is too skewed; use unique=True"
            )
        chance[row, : seen.shape[0]] = log_p[seen].to(chance.dtype)
        if times is None:
            continue
        there[seen] = False
        rest = torch.nonzero(there)[:, 0]
        bits = uniform_sample(fold_in(pair, 2 * row + 3), 1, max(rest.shape[0], 1), 1 << _BITS)[0][0][: rest.shape[0]]
        waits = -bits.double().add_(0.5).mul_(2.0**-_BITS).log_() / log_p[rest].exp()
        least = waits.topk(min(wanted - seen.shape[0], rest.shape[0]), largest=False)
        more = rest[least.indices][: count - seen.shape[0]]
        found[row, seen.shape[0] :] = more
        chance[row, seen.shape[0] :] = log_p[more].to(chance.dtype)
        whole = wanted - seen.shape[0] > rest.shape[0]  # nothing is left: every class was certain to come
        level[row] = math.inf if whole else times[row, -1] + least.values[-1]
    return found, chance, level
