"""`Quadratic` and `RandomFourier` over a sharded class table: one tree over all slots, of which a rank has its part.

The rules are those of `samplex_cuda.reference.kernel_tree`, with slots in the place of classes. A draw goes down the
common nodes on every rank alike, then down the nodes of the one rank that holds them; `Heap` says which are which.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from samplex_cuda import _device, chunking
from samplex_cuda._checks import describe
from samplex_cuda.distributed.collectives import Exchange
from samplex_cuda.distributed.heap import Heap
from samplex_cuda.distributed.layout import Layout
from samplex_cuda.distributed.samplers import ShardedSampler, kept_at
from samplex_cuda.ops import kernel_tree as ops
from samplex_cuda.ops.predict import predict_dots
from samplex_cuda.rng import below, philox_bits, uniform53
from samplex_cuda.samplers.kernel_base import KernelSampler
from samplex_cuda.samplers.kernel_rows import MOST_QUERY, MOST_SUM, KernelRows, longest_query
from samplex_cuda.tables import empty_table

__all__ = ["ShardedKernel"]

_DENSE = 128  # own nodes of a level that are scored for the whole batch by one product
_NOTHING = 1e-290  # smaller probabilities count as 0
_UNIFORM_BLOCK = 255  # Philox block that chooses between tree and uniform distribution


class Walk(NamedTuple):
    """What a walk down the tree found."""

    slots: Tensor  # int64 [B, k]; -1 where another rank knows
    log_tree: Tensor  # fp64 [B, k], log q_tree
    left: Tensor  # fp64 [depth, B, k], P(left child) at each node passed
    right: Tensor
    common: Tensor  # bool [depth + 1, B, k], whether the node of each level is common
    kept: Tensor  # fp64 [B, k], P(nothing excluded | leaf)


class Excluded(NamedTuple):
    """The excluded slots of each row."""

    slots: Tensor  # int64 [B, E], ascending, -1 for none
    kept: Tensor  # fp64 [depth + 1, B, E], P(nothing excluded | node) of the nodes above them
    distinct: Tensor  # int64 [B, 1], how many

    def rows(self, part: slice) -> Excluded:
        """Those of some rows of the batch."""
        return Excluded(self.slots[part], self.kept[:, part], self.distinct[part])


class ShardedKernel(ShardedSampler, KernelRows):
    """A kernel tree over a sharded table: a rank keeps its class rows and the sums of the nodes above them.

    The distribution is that of the same sampler with all rows in the order of slots; with `order="class"` that of the
    unsharded head. Products are summed in another order, so ids may differ where a random number is within rounding of
    a branch probability. The sums of the nodes that ranks have in common, 2 (P - 1) log2(C) rows at most, are on every
    rank and are exchanged when the sampler follows the table.

    Args:
        sampler: the options and frequencies of the tree; it may be on the meta device.
        layout: which rank holds which class.
        exchange: the collectives of the head.
        device: of the tables.
    """

    squares: Tensor
    shift: Tensor

    def __init__(self, sampler: KernelSampler, layout: Layout, exchange: Exchange, device: torch.device) -> None:
        super().__init__(layout, exchange)
        self._op = sampler._op
        self.dim, self.kind, self.kernel, self.scale = sampler.dim, sampler.kind, sampler.kernel, sampler.scale
        self.epsilon, self.normalize, self.has_bias = sampler.epsilon, sampler.normalize, sampler.has_bias
        self.leaf_size, self.num_numbers = sampler.leaf_size, sampler.num_numbers
        self._longest: float | Tensor = MOST_QUERY
        self._shift = 0.0
        self._refused = 0  # rows that the last update left as they were
        width = ops.padded(self.dim + self.has_bias, ops.ROW_ALIGN)
        self.heap = Heap(layout, self.leaf_size, device)
        self._shared_rows = self.heap.common_slots.shape[0]
        omega = None
        if sampler.omega is not None:  # that of rank 0: without a key each rank drew its own
            omega = exchange.stack(sampler.omega.to(device))[0].clone()
        self.register_buffer("omega", omega)
        self.register_buffer("shift", torch.zeros((), dtype=torch.float64, device=device))
        held = max(1, self._shared_rows + layout.rows)  # never empty, so that any index has a row
        rows = empty_table(held, width, device=device).zero_()
        sums = empty_table(self.heap.size, ops.padded(self.num_numbers, ops.FEATURE_ALIGN), device=device).zero_()
        self.register_buffer("rows", rows, persistent=False)  # of the common leaves, then this rank's own
        self.register_buffer("sums", sums, persistent=False)
        self.register_buffer("squares", torch.zeros(rows.shape[0], device=device), persistent=False)  # |row|^2 / 2
        self.unfilled = sampler.rows.is_meta  # no numbers yet
        if not self.unfilled:
            self.own_rows().copy_(sampler.rows[layout.classes(sampler.rows.device)])
            self._sum_up()

    def own_rows(self) -> Tensor:
        """The rows of this rank's classes, [rows, width]."""
        return self.rows[self._shared_rows : self._shared_rows + self.layout.rows]

    def memory(self) -> dict[str, int]:
        """Bytes of this rank's copy of its class rows, of the node sums, of the frequencies, and of all."""
        parts = {"rows": self.rows.nbytes + self.squares.nbytes, "sums": self.sums.nbytes}
        parts["omega"] = 0 if self.omega is None else self.omega.nbytes
        parts["total"] = sum(parts.values())
        return parts

    def _place(self) -> torch.device:
        return self.rows.device

    # -------------------------------------------------------------------------------------------- walks
    def _parts(self, batch: int, count: int) -> Iterator[slice]:
        """Rows of a batch whose walks are held at once."""
        most = chunking.probabilities_at_once(self._place())  # numbers of a walk
        some = max(1, most // max(1, count * max(self.leaf_size, 2 * self.heap.depth)))
        return (slice(begin, min(begin + some, batch)) for begin in range(0, batch, some))

    def _values(self, phi: Tensor, level: int, rows: Tensor, common: Tensor) -> Tensor:
        """<phi, sums> of both children of nodes, [B, k, 2]; `rows` are those of the left ones."""
        both = torch.stack([rows, rows + 1], -1).flatten(1)
        own = self.heap.own_level(level + 1)
        if own.stop - own.start > _DENSE:
            both = torch.where(rows.repeat_interleave(2, 1) >= 0, both, -1)
            return predict_dots(phi, self.sums, both).view(*rows.shape, 2)
        # Few own nodes: one product for the batch. Common ones must have the same bits on every rank.
        shared = predict_dots(phi, self.sums, torch.where(common.repeat_interleave(2, 1), both, -1))
        if own.stop == own.start:
            return shared.view(*rows.shape, 2)
        dense = torch.mm(phi, self.sums[own].t())
        found = dense.gather(1, (both - own.start).clamp(0, own.stop - own.start - 1))
        return torch.where(common.repeat_interleave(2, 1), shared, found).view(*rows.shape, 2)

    def _walk(
        self, query: Tensor, phi: Tensor, given: Tensor, pair: Tensor | None, first: int, excluded: Excluded | None
    ) -> Walk:
        """Down the tree to given slots [B, k], or where these are -1 to slots drawn with the key; no collective.

        Args:
            query: [B, width].
            phi: [B, stride].
            given: int64 [B, k].
            pair: the key; None: everything is given.
            first: number of the first row in the batch.
            excluded: what draws must not come to.
        """
        heap, (batch, count) = self.heap, given.shape
        floor = 1.0 if self.kernel == "quadratic" else 0.0
        node, there = torch.zeros_like(given), torch.ones_like(given, dtype=torch.bool)
        log_p = torch.zeros(batch, count, dtype=torch.float64, device=given.device)
        lefts, rights, commons = [], [], []
        uniform: list[Tensor] = []  # of each level, and of the leaf
        if pair is not None:
            blocks = torch.arange(heap.depth // 2 + 1, device=given.device).view(-1, 1, 1)
            both = torch.stack(philox_bits(pair, batch, count, blocks, first), 1)  # two levels of each block
            uniform = list(uniform53(both).flatten(0, 1).unbind(0))
        for level in range(heap.depth):
            rows, common = heap.children(level, node)
            there = there & (rows >= 0)
            value = self._values(phi, level, rows, common).double()
            below_it = heap.classes_below(level + 1, torch.stack([2 * node, 2 * node + 1], -1))
            weight = torch.where(value < floor * below_it, floor * below_it, value)
            weight = torch.where(below_it == 0, 0.0, weight)
            total = weight[..., :1] + weight[..., 1:]  # torch's sum over two numbers takes ten times as long
            weight = torch.where(total == 0, below_it, weight)
            p = weight / (weight[..., :1] + weight[..., 1:])
            span = heap.span(level + 1)
            right = (given // span) % 2 == 1
            if pair is not None:
                mass = p if excluded is None else p * self._kept_below(excluded, level, node)
                drawn = uniform[level] * (mass[..., 0] + mass[..., 1]) < mass[..., 1]
                right = torch.where(given >= 0, right, drawn)
            log_p += torch.where(right, p[..., 1], p[..., 0]).log()
            lefts.append(p[..., 0])
            rights.append(p[..., 1])
            commons.append(common)
            node = 2 * node + right.long()
        in_leaf = None if pair is None else uniform[heap.depth]
        slots, log_leaf, kept, common = self._in_leaf(query, node, given, in_leaf, excluded)
        commons.append(common)
        nothing = log_p.new_zeros(0, batch, count)
        return Walk(
            torch.where(there, slots, -1),
            log_p + log_leaf,
            torch.stack(lefts) if lefts else nothing,
            torch.stack(rights) if rights else nothing,
            torch.stack(commons),
            kept,
        )

    def _in_leaf(
        self, query: Tensor, leaf: Tensor, given: Tensor, uniform: Tensor | None, excluded: Excluded | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The choice in leaves [B, k]: slots, log P(slot | leaf), P(nothing excluded | leaf), whether they are common.

        A slot is -1 where this rank does not have the leaf.
        """
        size, layout = self.leaf_size, self.layout
        common, at = self.heap.common(self.heap.depth, leaf)
        slots = leaf.unsqueeze(-1) * size + torch.arange(size, device=leaf.device)
        own = (slots >= layout.start) & (slots < layout.stop)
        rows = torch.where(own, slots - layout.start + self._shared_rows, -1)
        in_common = at.unsqueeze(-1) * size + torch.arange(size, device=leaf.device)
        rows = torch.where(common.unsqueeze(-1), in_common, rows)
        rows = torch.where(slots < layout.num_classes, rows, -1)
        score = predict_dots(query, self.rows, rows.flatten(1)).view(rows.shape).double()
        if self.kernel == "quadratic":
            weight = torch.where(rows >= 0, self.scale * score.square() + 1.0, 0.0)
            log_weight = weight.log()
        else:
            # A factor that is common to a leaf, here exp(-scale |h|^2 / 2), changes nothing.
            half = self.squares[rows.clamp_min(0)].double() if self.kernel == "gaussian" else 0.0
            log_weight = torch.where(rows >= 0, self.scale * (score - half), -torch.inf)
            log_weight = log_weight - log_weight.amax(-1, keepdim=True)
            weight = log_weight.exp()
        total = weight.sum(-1)
        left = weight
        if excluded is not None:
            for e in range(excluded.slots.shape[1]):
                left = torch.where(slots == excluded.slots[:, e, None, None], 0.0, left)
        kept = left.sum(-1) / total
        which = (given - leaf * size).clamp(0, size - 1)
        if uniform is not None:
            running = left.cumsum(-1)
            drawn = (running <= (uniform * running[..., -1]).unsqueeze(-1)).sum(-1)
            last = size - 1 - (left > 0).flip(-1).to(torch.int8).argmax(-1)
            which = torch.where(given >= 0, which, torch.minimum(drawn, last))
        chosen = slots.gather(-1, which.unsqueeze(-1)).squeeze(-1)
        log_leaf = log_weight.gather(-1, which.unsqueeze(-1)).squeeze(-1) - total.log()
        return torch.where(common | own.any(-1), chosen.clamp_max(layout.num_classes - 1), -1), log_leaf, kept, common

    # -------------------------------------------------------------------------------------------- exclusion
    def _kept_below(self, excluded: Excluded, level: int, node: Tensor) -> Tensor:
        """P(nothing excluded | child) of both children of nodes [B, k] of a level, [B, k, 2]."""
        child = torch.stack([2 * node, 2 * node + 1], -1)
        return kept_at(child, excluded.slots // self.heap.span(level + 1), excluded.slots, excluded.kept[level + 1])

    def _exclude(self, query: Tensor, phi: Tensor, slots: Tensor) -> Excluded:
        """Bottom up, p_left kept_left + p_right kept_right, never 1 - p: first inside the rank, then above."""
        depth = self.heap.depth
        copy = torch.zeros_like(slots, dtype=torch.bool)
        copy[:, 1:] = slots[:, 1:] == slots[:, :-1]
        distinct = ((slots >= 0) & ~copy).sum(1, keepdim=True)
        blank = Excluded(slots, torch.empty(0), distinct)
        parts = [
            self._walk(query[part], phi[part], slots[part], None, 0, Excluded(slots[part], torch.empty(0), distinct))
            for part in self._parts(*slots.shape)
        ]
        if not parts:
            return blank._replace(kept=torch.ones(depth + 1, *slots.shape, dtype=torch.float64, device=slots.device))
        left, right, common = (torch.cat([p[i] for p in parts], 1) for i in (2, 3, 4))
        leaf = torch.cat([p.kept for p in parts])
        alone = self._bottom_up(slots, left, right, leaf, None, None)
        # The first node of a way that is not common: its owner tells the others. A common leaf has none.
        entry = common.sum(0)
        at = entry.clamp_max(depth)
        mine = self._holds(slots) & (entry <= depth)
        (told,) = self.exchange.from_owners(mine, alone.gather(0, at.unsqueeze(0)).squeeze(0))
        return blank._replace(kept=self._bottom_up(slots, left, right, leaf, entry, told))

    def _bottom_up(
        self, slots: Tensor, left: Tensor, right: Tensor, leaf: Tensor, entry: Tensor | None, told: Tensor | None
    ) -> Tensor:
        """P(nothing excluded | node), [depth + 1, B, E], where the level `entry` of each way has the number `told`."""
        found = [leaf]
        for level in range(self.heap.depth, -1, -1):
            if level < self.heap.depth:
                span = self.heap.span(level + 1)
                child = (slots // span) & ~1
                both = kept_at(torch.stack([child, child + 1], -1), slots // span, slots, found[-1])
                kept = left[level] * both[..., 0] + right[level] * both[..., 1]
                found.append(torch.where(kept < _NOTHING, 0.0, kept))
            if entry is not None and told is not None:
                found[-1] = torch.where(entry == level, told, found[-1])
        return torch.stack(found[::-1])

    def _holds(self, slots: Tensor) -> Tensor:
        return (slots >= self.layout.start) & (slots < self.layout.stop)

    def _masses(self, excluded: Excluded | None) -> tuple[Tensor | float, Tensor | float]:
        """(what is left of q, [B, 1], and of it the uniform part)."""
        if excluded is None:
            return 1.0, self.epsilon
        classes = self.num_classes
        uniform = self.epsilon * ((classes - excluded.distinct).double() / classes)
        # All excluded slots of a row are below the root; without any, nothing is gone.
        kept = torch.where(excluded.slots[:, -1:] >= 0, excluded.kept[0][:, -1:], 1.0)
        return torch.where(excluded.distinct == classes, 0.0, (1.0 - self.epsilon) * kept + uniform), uniform

    # -------------------------------------------------------------------------------------------- draws and scores
    def _draw_slots(
        self, h: Tensor | None, batch: int, count: int, pair: Tensor, excluded: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        query, phi = self._query(h)
        without = None if excluded is None else self._exclude(query, phi, excluded)
        total, uniform = self._masses(without)
        slots = torch.empty(batch, count, dtype=torch.int64, device=query.device)
        log_q = torch.empty(batch, count, device=query.device)
        for part in self._parts(batch, count):
            rows = part.stop - part.start
            given = torch.full((rows, count), -1, dtype=torch.int64, device=query.device)
            some = None if without is None else without.rows(part)
            mass, even = (t[part] if isinstance(t, Tensor) else t for t in (total, uniform))
            if self.epsilon > 0.0:
                first, second = philox_bits(pair, rows, count, _UNIFORM_BLOCK, part.start)
                left = self.num_classes if some is None else self.num_classes - some.distinct
                given = torch.where(uniform53(first) * mass < even, self._kth_left(below(second, left), some), given)
            walk = self._walk(query[part], phi[part], given, pair, part.start, some)
            slots[part], log_q[part] = walk.slots, self._log_q(walk.log_tree, mass)
        claimed = torch.where(self._holds(slots), slots, -1)
        nothing = total == 0.0 if isinstance(total, Tensor) else None
        if nothing is not None and excluded is not None:
            least = torch.where(excluded >= 0, excluded, self.num_classes).amin(1, keepdim=True)
            claimed = torch.where(nothing, torch.where(self._holds(least), least, -1), claimed)
            log_q = torch.where(nothing, 0.0, log_q)
        return self._from_owners(claimed, log_q)  # type: ignore[return-value]

    def _kth_left(self, number: Tensor, excluded: Excluded | None) -> Tensor:
        """The slot of that number among those that are not excluded."""
        if excluded is None:
            return number
        for e in range(excluded.slots.shape[1]):
            slot = excluded.slots[:, e : e + 1]
            counts = (slot >= 0) if e == 0 else (slot >= 0) & (slot != excluded.slots[:, e - 1 : e])
            number = number + (counts & (slot <= number))
        return number

    def _log_q(self, log_tree: Tensor, total: Tensor | float) -> Tensor:
        if self.epsilon > 0.0:
            log_tree = ((1.0 - self.epsilon) * log_tree.exp() + self.epsilon / self.num_classes).log()
        return (log_tree - (total.log() if isinstance(total, Tensor) else 0.0)).float()

    def _scored(self, query: Tensor, phi: Tensor, slots: Tensor, excluded: Excluded | None) -> Tensor:
        """log q of slots [B, n] as far as this rank knows it."""
        total, _ = self._masses(excluded)
        out = torch.empty(slots.shape, device=query.device)
        for part in self._parts(*slots.shape):
            walk = self._walk(query[part], phi[part], slots[part], None, 0, None)
            out[part] = self._log_q(walk.log_tree, total[part] if isinstance(total, Tensor) else total)
        return out

    def _score_slots(self, h: Tensor | None, slots: Tensor, excluded: Tensor | None) -> Tensor:
        query, phi = self._query(h)
        without = None if excluded is None else self._exclude(query, phi, excluded)
        (out,) = self.exchange.from_owners(self._holds(slots), self._scored(query, phi, slots, without))
        if excluded is None or without is None:
            return out
        for e in range(excluded.shape[1]):
            out = torch.where(slots == excluded[:, e : e + 1], -torch.inf, out)
        nothing: Any = self._masses(without)[0] == 0.0
        least = torch.where(excluded >= 0, excluded, self.num_classes).amin(1, keepdim=True)
        return torch.where(nothing & (slots == least), 0.0, out)

    def log_prob_local(self, h: Tensor) -> Tensor:
        """See `ShardedSampler.log_prob_local`."""
        query, phi = self._query(h)
        slots = torch.arange(self.layout.start, self.layout.stop, device=query.device)
        some = max(1, chunking.probabilities_at_once(query.device) // max(1, query.shape[0]))
        parts = [self._scored(query, phi, part.expand(query.shape[0], -1), None) for part in slots.split(some)]
        return torch.cat(parts, 1) if parts else torch.empty(query.shape[0], 0, device=query.device)

    # -------------------------------------------------------------------------------------------- changes
    @torch.no_grad()
    def follow(self, ids: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
        """Rows of classes that may have changed, on any rank; every rank must call it.

        Args:
            ids: int64 [n], classes in any order, repeats and those of other ranks among them.
            weight: [rows, d], this rank's table.
            bias: [rows].
        """
        local = self.layout.local(ids)
        if self.layout.rows and ids.shape[0]:
            # Of a fixed size on a device: what is not here counts as row 0, whose numbers are then fresh.
            at = local.clamp_min(0) if _device.host_waits(ids) else local[local >= 0].unique()
            self._change(at, weight, bias)
        self._exchange()

    def _change(self, at: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        """New rows at `at`, and the sums above them. A row that does not fit keeps its old numbers."""
        if not at.shape[0]:
            return
        width, size = self.dim + self.has_bias, self.leaf_size
        for some in at.split(self._rows_at_a_time()):
            new, old = self._own(weight, bias, some), self.own_rows()[some, :width]
            fits = self._fits(new, self._features(new, self._shift) if self.kind == "positive" else None)
            self._count_refused(fits)
            self.own_rows()[some, :width] = torch.where(fits.unsqueeze(1), new, old)
            self._measure_rows(some + self._shared_rows)
        leaves = (at + self.layout.start) // size
        if not _device.host_waits(at):
            leaves = leaves.unique()
        for some in leaves.split(max(1, self._rows_at_a_time() // size)):
            self._sum_leaves(some)
        self.heap.sum_above(self.sums, leaves)

    def _measure_rows(self, which: slice | Tensor) -> None:
        """Half the squared lengths of some rows."""
        if self.kernel == "gaussian":
            self.squares[which] = 0.5 * self.rows[which].square().sum(1)

    def _count_refused(self, fits: Tensor) -> None:
        if not _device.host_waits(fits):
            self._refused += int((~fits).sum())

    def _sum_leaves(self, leaves: Tensor) -> None:
        """Sums of some own leaves from their rows."""
        size, width = self.leaf_size, self.dim + self.has_bias
        slots = (leaves.unsqueeze(1) * size + torch.arange(size, device=leaves.device)).reshape(-1)
        mine = self._holds(slots)
        rows = self.own_rows()[torch.where(mine, slots - self.layout.start, 0), :width].contiguous()
        phi = self._features(rows, self._shift)
        if _device.host_waits(mine) or not bool(mine.all()):
            phi = torch.where(mine.unsqueeze(1), phi, 0.0)
        total = phi.view(leaves.shape[0], size, -1).sum(1)
        self.sums.index_copy_(0, self.heap.own_rows(self.heap.depth, leaves), total)

    @torch.no_grad()
    def rebuild(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Rebuilds all rows from this rank's table [rows, d] (and bias [rows]); every rank must call it."""
        width = self.dim + self.has_bias
        for part in torch.arange(self.layout.rows, device=self.rows.device).split(self._rows_at_a_time()):
            new, old = self._own(weight, bias, part), self.own_rows()[part, :width]
            fits = self._fits(new, None)
            self._count_refused(fits)
            self.own_rows()[part, :width] = torch.where(fits.unsqueeze(1), new, old)
        self._sum_up()

    @torch.no_grad()
    def _sum_up(self) -> None:
        """All sums from the rows; a collective."""
        if self.kind == "positive":
            self._settle_shift()
        for part in torch.arange(self.rows.shape[0], device=self.rows.device).split(self._rows_at_a_time()):
            self._measure_rows(part)
        first, last = self.heap.own_leaves()
        if last > first:
            some = max(1, self._rows_at_a_time() // self.leaf_size)
            for leaves in torch.arange(first, last, device=self.rows.device).split(some):
                self._sum_leaves(leaves)
            self.heap.sum_own(self.sums)
        self._exchange()

    def _settle_shift(self) -> None:
        """A common factor of all features, as in `KernelSampler`: it keeps the exponents of long rows in range."""
        width = self.dim + self.has_bias
        least = torch.full((1,), torch.inf, dtype=torch.float64, device=self.rows.device)
        for rows in self.own_rows()[:, :width].split(self._rows_at_a_time()):
            if rows.shape[0]:
                least = torch.minimum(least, self._decays(rows).amin().double())
        dist.all_reduce(least, dist.ReduceOp.MIN, group=self.exchange.group)
        self.shift.copy_((16.0 * (least / 16.0).floor()).clamp(0.0, MOST_SUM).squeeze(0))
        self._shift = float(self.shift)

    @torch.no_grad()
    def _exchange(self) -> None:
        """Common sums and rows to every rank; an error on all of them if one has refused rows."""
        heap = self.heap
        mine = (heap.send_from >= 0).unsqueeze(1)
        sums = torch.where(mine, self.sums[heap.send_from.clamp_min(0)], 0.0)
        slots = heap.common_slots
        rows = sums.new_zeros(slots.shape[0], self.rows.shape[1])
        if self.layout.rows and slots.shape[0]:
            own = self.own_rows()[torch.where(self._holds(slots), slots - self.layout.start, 0)]
            rows = torch.where(self._holds(slots).unsqueeze(1), own, 0.0)
        refused = sums.new_full((1,), float(self._refused))
        told = self.exchange.sum_(torch.cat([sums.reshape(-1), rows.reshape(-1), refused]))
        sums, rows, refused = told.split([sums.numel(), rows.numel(), 1])
        self.sums.index_copy_(0, heap.send, sums.view(heap.send.shape[0], -1))
        heap.sum_common(self.sums)
        self.rows[: slots.shape[0]] = rows.view(slots.shape[0], self.rows.shape[1])
        self._measure_rows(slice(0, slots.shape[0]))
        if self.kind == "quadratic":
            most = self.sums[0].abs().amax().double()
            known = most if _device.host_waits(most) else float(most)
            self._longest = longest_query(known, self.num_numbers, self.scale)
        self._refused, own_part = 0, self._refused
        if not _device.host_waits(refused) and float(refused):
            where = f"{own_part} of them on this rank" if own_part else "none of them on this rank"
            raise ValueError(
                f"{self._op}: class rows must be finite, and sums of their features must fit in float32, got "
                f"{int(refused)} invalid rows, {where}; the sampler keeps their old values"
            )

    # -------------------------------------------------------------------------------------------- state
    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}rows"] = self._dtensor(self.own_rows())

    def adopt(self, state_dict: dict[str, Any], prefix: str) -> None:
        """See `ShardedSampler.adopt`: the sums are made from the rows."""
        state_dict.pop(f"{prefix}sums", None)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        rows = state_dict.pop(f"{prefix}rows", None)
        super()._load_from_state_dict(state_dict, prefix, *args)
        if not isinstance(rows, Tensor):
            args[-3].append(f"{prefix}rows")
            return
        if rows.shape != (self.num_classes, self.rows.shape[1]):
            wanted = [self.num_classes, self.rows.shape[1]]
            args[-1].append(f"{self._op}: rows must be {wanted} float32, got {describe(rows)}")
            return
        whole = rows if isinstance(rows, DTensor) else rows.to(self.rows.device)
        self.own_rows().copy_(self._local_rows(whole))
        self._sum_up()

    def extra_repr(self) -> str:
        """Sizes and what this rank holds."""
        return (
            f"num_classes={self.num_classes}, rows={self.layout.rows}, leaf_size={self.leaf_size}, "
            f"depth={self.heap.depth}, epsilon={self.epsilon:g}, memory={self.memory()['total'] / 1e6:.1f} MB"
        )
