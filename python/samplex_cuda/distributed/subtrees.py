"""`Tree` by subtrees: the top levels on every rank, each subtree below them on one.

The walk is that of csrc/sampler/tree/tree_math.h in torch ops, with the same roundings in the same order: draws and
log_q have the bits of the replicated tree on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from samplex_cuda import chunking
from samplex_cuda._checks import call, check_dense, describe
from samplex_cuda.distributed.collectives import Exchange
from samplex_cuda.distributed.exact import exact_log, tree_exp
from samplex_cuda.distributed.layout import Layout
from samplex_cuda.distributed.samplers import ShardedSampler, as_dtensor, kept_at
from samplex_cuda.ops.tree import tree_project
from samplex_cuda.rng import philox_bits, uniform53
from samplex_cuda.samplers.tree import Tree

__all__ = ["ShardedTree"]

_LANES = 16  # partial sums of a product, see tree_math.h
_NOTHING = 1e-290  # smaller probabilities count as 0
_MOVED = 1 << 18  # rows that ranks tell each other at once, for a state dict


class Way(NamedTuple):
    """What a walk to leaves [B, k] has met."""

    leaves: Tensor  # int64 [B, k]; -1 where another rank knows
    minor: Tensor  # fp64 [B, k], sum of |z| where the less likely child was taken
    product: Tensor  # fp64 [B, k], of 1 + exp(-|z|)
    logits: Tensor  # fp32 [depth, B, k]

    def log_p(self) -> Tensor:
        """log p of the leaves, fp64."""
        return (-self.minor - exact_log(self.product)) + 0.0 * self.product


class ShardedTree(ShardedSampler):
    """A `Tree` whose subtrees are spread over the ranks; 2^levels nodes at the top are on each of them.

    Args:
        tree: the whole tree, on every rank while this is made.
        layout: which rank holds which class; it keeps the leaf of each.
        exchange: the collectives of the head.
    """

    _op = "tree"
    nodes: Tensor
    leaf_class: Tensor
    class_leaf: Tensor
    mean: Tensor
    projection: Tensor

    def __init__(self, tree: Tree, layout: Layout, exchange: Exchange) -> None:
        super().__init__(layout, exchange)
        self.depth, self.dim, self._identity = tree.depth, tree.dim, tree._identity
        world, rank = exchange.world, exchange.rank
        self.levels = min(self.depth, (world - 1).bit_length() + 2 if world > 1 else 0)
        roots = 1 << self.levels
        self._first, self._last = rank * roots // world, (rank + 1) * roots // world  # own subtrees
        self._offset = [0] * self.levels  # first row of each level in the table
        rows = roots
        for level in range(self.levels, self.depth):
            self._offset.append(rows)
            rows += (self._last - self._first) << (level - self.levels)
        self._leaf_span = 1 << (self.depth - self.levels)
        device, kept = tree.nodes.device, (self._last - self._first) * self._leaf_span
        new: dict[str, Any] = {"dtype": torch.int64, "device": device}
        self.register_buffer("nodes", tree.nodes.new_zeros(rows, tree.nodes.shape[1]), persistent=False)
        self.register_buffer("leaf_class", torch.full((kept,), -1, **new), persistent=False)
        self.register_buffer("class_leaf", torch.zeros(layout.rows, **new), persistent=False)
        self.register_buffer("mean", tree.mean.clone())
        self.register_buffer("projection", tree.projection.clone())
        for part in self._heap():
            self._take(part, tree.nodes[part], tree.leaf_class[part])

    def _place(self) -> torch.device:
        return self.nodes.device

    def memory(self) -> dict[str, int]:
        """Bytes of this rank's nodes, of its maps between leaves and classes, and of all."""
        parts = {"nodes": self.nodes.nbytes, "maps": self.leaf_class.nbytes + self.class_leaf.nbytes}
        parts["total"] = sum(parts.values())
        return parts

    # -------------------------------------------------------------------------------------------- walks
    def _rows_of_nodes(self, level: int, nodes: Tensor) -> Tensor:
        """Table rows of nodes of a level, counted from its left end; -1 where another rank has them."""
        if level < self.levels:
            return nodes + (1 << level)
        below = level - self.levels
        mine = (nodes >= self._first << below) & (nodes < self._last << below)
        return torch.where(mine, nodes + (self._offset[level] - (self._first << below)), -1)

    def _own_leaf(self, leaves: Tensor) -> Tensor:
        """The place of each leaf among this rank's leaves; -1 where another rank has it."""
        at = leaves - self._first * self._leaf_span
        return torch.where((leaves >= 0) & (at >= 0) & (at < self.leaf_class.shape[0]), at, -1)

    def _logit(self, rows: Tensor, x: Tensor) -> Tensor:
        """w . x + b of table rows [B, k] for x [B, dim], in the order of the kernels."""
        nodes = self.nodes[rows.clamp_min(0)].float()
        product = nodes[..., : self.dim] * x.unsqueeze(1)
        lanes = torch.zeros(*rows.shape, _LANES, device=x.device)
        for begin in range(0, self.dim, _LANES):
            some = product[..., begin : begin + _LANES]
            lanes[..., : some.shape[-1]] = lanes[..., : some.shape[-1]] + some
        step = _LANES // 2
        while step:
            lanes = lanes[..., :step] + lanes[..., step : 2 * step]
            step //= 2
        return lanes[..., 0] + nodes[..., self.dim]

    def _parts(self, batch: int, count: int) -> Iterator[slice]:
        most = chunking.probabilities_at_once(self.nodes.device)  # numbers of gathered nodes
        some = max(1, most // max(1, count * self.nodes.shape[1]))
        return (slice(begin, min(begin + some, batch)) for begin in range(0, batch, some))

    def _walk(
        self, x: Tensor, given: Tensor, pair: Tensor | None, first: int, excluded: tuple[Tensor, Tensor] | None
    ) -> Way:
        """Down to given leaves [B, k], or where these are -1 to leaves drawn with the key; no collective.

        Args:
            x: [B, dim].
            given: int64 [B, k].
            pair: the key; None: everything is given.
            first: number of the first row in the batch.
            excluded: (leaves [B, E], P(nothing excluded | node) [depth + 1, B, E]).
        """
        node, there = torch.zeros_like(given), torch.ones_like(given, dtype=torch.bool)
        minor = torch.zeros(given.shape, dtype=torch.float64, device=x.device)
        product, logits = torch.ones_like(minor), []
        bits: tuple[Tensor, Tensor] | None = None
        for level in range(self.depth):
            rows = self._rows_of_nodes(level, node)
            there = there & (rows >= 0)
            z = self._logit(rows, x)
            size = torch.where(z < 0, -z, z)
            e = tree_exp(size).double()
            right = (given >> (self.depth - 1 - level)) & 1 == 1
            if pair is not None:
                if level % 2 == 0:
                    bits = philox_bits(pair, given.shape[0], given.shape[1], level // 2, first)
                assert bits is not None
                on_right, on_left = torch.where(z >= 0, 1.0, e), torch.where(z >= 0, e, 1.0)
                if excluded is not None:
                    kept = self._kept(excluded, level, node)
                    on_right, on_left = on_right * kept[..., 1], on_left * kept[..., 0]
                drawn = uniform53(bits[level % 2]) * (on_right + on_left) < on_right
                right = torch.where(given >= 0, right, drawn)
            minor = minor + torch.where(right != (z >= 0), size.double(), 0.0)
            product = product * (1.0 + e)
            logits.append(z)
            node = 2 * node + right.long()
        found = torch.where(there & (self._own_leaf(node) >= 0), node, -1)
        return Way(found, minor, product, torch.stack(logits) if logits else x.new_zeros(0, *given.shape))

    # -------------------------------------------------------------------------------------------- exclusion
    def _kept(self, excluded: tuple[Tensor, Tensor], level: int, node: Tensor) -> Tensor:
        """P(nothing excluded | child) of both children of nodes [B, k] of a level, [B, k, 2]."""
        leaves, kept = excluded
        child = torch.stack([2 * node, 2 * node + 1], -1)
        return kept_at(child, leaves >> (self.depth - level - 1), leaves, kept[level + 1])

    def _exclude(self, x: Tensor, leaves: Tensor) -> tuple[Tensor, Tensor]:
        """Bottom up as in tree_math.h: inside the subtrees first, whose owners tell the others, then above them."""
        parts = [self._walk(x[part], leaves[part], None, 0, None) for part in self._parts(*leaves.shape)]
        empty = x.new_zeros(self.depth, *leaves.shape)
        logits = torch.cat([part.logits for part in parts], 1) if parts else empty
        kept = [torch.zeros(leaves.shape, dtype=torch.float64, device=x.device)]
        for level in range(self.depth, -1, -1):
            if level < self.depth:
                z = logits[level]
                e = tree_exp(torch.where(z < 0, -z, z)).double()
                child = (leaves >> (self.depth - level - 1)) & ~1
                both = kept_at(
                    torch.stack([child, child + 1], -1), leaves >> (self.depth - level - 1), leaves, kept[-1]
                )
                on_right, on_left = torch.where(z >= 0, 1.0, e), torch.where(z >= 0, e, 1.0)
                left = (on_right * both[..., 1] + on_left * both[..., 0]) / (1.0 + e)
                kept.append(torch.where(left < _NOTHING, 0.0, left))
            if level == self.levels:
                (kept[-1],) = self.exchange.from_owners(self._own_leaf(leaves) >= 0, kept[-1])
        return leaves, torch.stack(kept[::-1])

    def _leaves_of(self, slots: Tensor) -> Tensor:
        """The leaf of each slot, -1 for -1, on every rank."""
        local = slots - self.layout.start
        mine = (slots >= 0) & (local >= 0) & (local < self.layout.rows)
        known = self.class_leaf[torch.where(mine, local, 0)] if self.layout.rows else torch.zeros_like(slots)
        (leaves,) = self.exchange.from_owners(mine, known)
        return torch.where(slots >= 0, leaves, -1)

    def _left(self, excluded: tuple[Tensor, Tensor]) -> Tensor:
        """P(nothing excluded), [B, 1]."""
        leaves, kept = excluded
        return torch.where(leaves[:, -1:] >= 0, kept[0][:, -1:], 1.0)

    # -------------------------------------------------------------------------------------------- draws and scores
    def project(self, h: Tensor | None) -> Tensor:
        """Features [*, K] to [B, k] float32, what the nodes see."""
        width = self.projection.shape[0]
        if not isinstance(h, Tensor) or h.dim() < 1 or not h.is_floating_point() or h.shape[-1] != width:
            raise ValueError(f"tree: h must be [*, {width}] floating point, got {describe(h)}")
        x = check_dense(self._op, "h", h).detach().reshape(-1, width).to(torch.float32).contiguous()
        return x if self._identity else call(tree_project, x, self.mean, self.projection)

    def _draw_slots(
        self, h: Tensor | None, batch: int, count: int, pair: Tensor, excluded: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        x = self.project(h)
        without = None if excluded is None else self._exclude(x, self._leaves_of(excluded).sort(1).values)
        ids = torch.empty(batch, count, dtype=torch.int64, device=x.device)
        log_q = torch.empty(batch, count, device=x.device)
        for part in self._parts(batch, count):
            some = None if without is None else (without[0][part], without[1][:, part])
            given = torch.full((part.stop - part.start, count), -1, dtype=torch.int64, device=x.device)
            if some is not None:  # nothing left: the first excluded class stands in
                least = torch.where(some[0] >= 0, some[0], 1 << self.depth).amin(1, keepdim=True)
                given = torch.where(self._left(some) == 0.0, least, given)
            way = self._walk(x[part], given, pair, part.start, some)
            log_p = way.log_p()
            if some is not None:
                left = self._left(some)
                log_p = torch.where(left == 0.0, 0.0, torch.where(left == 1.0, log_p, log_p - exact_log(left)))
            at = self._own_leaf(way.leaves)
            classes = self.leaf_class[at.clamp_min(0)] if self.leaf_class.shape[0] else torch.zeros_like(at)
            # A row with a nan goes anywhere, padding too: the id stays a class, the nan is in log_q.
            log_q[part] = torch.where(classes < 0, torch.nan, log_p).float()
            ids[part] = torch.where(at >= 0, classes.clamp_min(0), -1)
        ids, log_q = self._from_owners(ids, log_q)
        return self.layout.slot(ids), log_q

    def _score_slots(self, h: Tensor | None, slots: Tensor, excluded: Tensor | None) -> Tensor:
        x, leaves = self.project(h), self._leaves_of(slots)
        out = torch.empty(slots.shape, device=x.device)
        without = None if excluded is None else self._exclude(x, self._leaves_of(excluded).sort(1).values)
        for part in self._parts(*slots.shape):
            log_p = self._walk(x[part], leaves[part], None, 0, None).log_p()
            if without is not None:
                left = self._left((without[0][part], without[1][:, part]))
                log_p = torch.where(left == 1.0, log_p, log_p - exact_log(left))
            out[part] = log_p.float()
        (out,) = self.exchange.from_owners(self._own_leaf(leaves) >= 0, out)
        if without is None:
            return out
        for e in range(without[0].shape[1]):
            out = torch.where(leaves == without[0][:, e : e + 1], -torch.inf, out)
        least = torch.where(without[0] >= 0, without[0], 1 << self.depth).amin(1, keepdim=True)
        nothing = self._left(without) == 0.0
        return torch.where(nothing, torch.where(leaves == least, 0.0, -torch.inf), out)

    # -------------------------------------------------------------------------------------------- state
    def _heap(self) -> Iterator[Tensor]:
        """Heap numbers of all nodes, or leaves, in parts."""
        return iter(torch.arange(1 << self.depth, device=self.nodes.device).split(_MOVED))

    def _table_rows(self, heap: Tensor) -> Tensor:
        """Table rows of nodes by their heap numbers; -1 where another rank has them."""
        starts = torch.tensor([1 << level for level in range(self.depth)], device=heap.device)
        level = torch.searchsorted(starts, heap, right=True) - 1
        rows = torch.full_like(heap, -1)
        for number in range(self.depth):
            rows = torch.where(level == number, self._rows_of_nodes(number, heap - (1 << number)), rows)
        return rows

    def _take(self, heap: Tensor, nodes: Tensor, classes: Tensor) -> None:
        """Keeps what belongs to this rank of some nodes, by heap number, and of the classes of as many leaves."""
        rows = self._table_rows(heap)
        self.nodes[rows[rows >= 0]] = nodes[rows >= 0]
        at = self._own_leaf(heap)
        self.leaf_class[at[at >= 0]] = classes[at >= 0]
        local = self.layout.local(classes)
        self.class_leaf[local[local >= 0]] = heap[local >= 0]

    def _chunks(self, give: Callable[[Tensor], tuple[Tensor, Tensor, Tensor, Tensor]]) -> Iterator[Any]:
        """(heap numbers, nodes, classes) part by part on every rank, from the ranks that have them."""
        for heap in self._heap():
            has_node, nodes, has_leaf, classes = give(heap)
            (told,) = self.exchange.from_owners(has_node.unsqueeze(1), nodes.float())
            yield heap, told.to(nodes.dtype), self.exchange.from_owners(has_leaf, classes)[0]

    def _own_part(self, heap: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        rows, at = self._table_rows(heap), self._own_leaf(heap)
        common = heap < 1 << self.levels
        tells = (rows >= 0) & (~common | (self.exchange.rank == 0))
        classes = self.leaf_class[at.clamp_min(0)] if self.leaf_class.shape[0] else torch.zeros_like(at)
        return tells, self.nodes[rows.clamp_min(0)], at >= 0, classes

    def _range(self) -> tuple[int, int]:
        """This rank's part of a table by heap numbers in the ranges of `torch.chunk`."""
        chunk = -(-(1 << self.depth) // self.exchange.world)
        first = min(self.exchange.rank * chunk, 1 << self.depth)
        return first, min(first + chunk, 1 << self.depth)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Nodes and leaves by heap number, as DTensors: independent of the number of ranks. A collective."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        first, last = self._range()
        nodes = self.nodes.new_empty(last - first, self.nodes.shape[1])
        classes = self.leaf_class.new_empty(last - first)
        for heap, some, of_leaf in self._chunks(self._own_part):
            inside = (heap >= first) & (heap < last)
            nodes[heap[inside] - first], classes[heap[inside] - first] = some[inside], of_leaf[inside]
        mesh = DeviceMesh.from_group(self.exchange.group, nodes.device.type)
        destination[f"{prefix}nodes"] = as_dtensor(nodes, 1 << self.depth, mesh)
        destination[f"{prefix}leaf_class"] = as_dtensor(classes, 1 << self.depth, mesh)

    def adopt(self, state_dict: dict[str, Any], prefix: str) -> None:
        """See `ShardedSampler.adopt`."""
        names = ["class_leaf", "fit_options"]
        units = state_dict.get(f"{prefix}base_units")
        if isinstance(units, Tensor) and units.numel() == 0:  # a tree with a base is another sampler
            names += ["base_units", "base_share"]
        for name in names:
            state_dict.pop(f"{prefix}{name}", None)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        nodes, classes = (state_dict.pop(f"{prefix}{name}", None) for name in ("nodes", "leaf_class"))
        super()._load_from_state_dict(state_dict, prefix, *args)
        size = (1 << self.depth, self.nodes.shape[1])
        if not isinstance(nodes, Tensor) or not isinstance(classes, Tensor):
            args[-3].append(f"{prefix}nodes")
            return
        if nodes.shape != size or nodes.dtype != self.nodes.dtype or classes.shape != size[:1]:
            args[-1].append(f"{self._op}: nodes must be {list(size)} {self.nodes.dtype}, got {describe(nodes)}")
            return
        if not isinstance(nodes, DTensor) or not isinstance(classes, DTensor):
            for heap in self._heap():
                self._take(heap, nodes[heap.to(nodes.device)], classes[heap.to(classes.device)])
            return
        mesh = DeviceMesh.from_group(self.exchange.group, self.nodes.device.type)
        own, own_classes = (t.redistribute(mesh, [Shard(0)]).to_local() for t in (nodes, classes))
        first, last = self._range()

        def give(heap: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            inside = (heap >= first) & (heap < last)
            at = torch.where(inside, heap - first, 0)
            if last == first:
                return inside, self.nodes.new_zeros(heap.shape[0], size[1]), inside, torch.zeros_like(heap)
            return inside, own[at], inside, own_classes[at]

        for heap, some, of_leaf in self._chunks(give):
            self._take(heap, some, of_leaf)

    def extra_repr(self) -> str:
        """Sizes, and what this rank holds."""
        return (
            f"num_classes={self.num_classes}, dim={self.dim}, depth={self.depth}, common_levels={self.levels}, "
            f"rows={self.nodes.shape[0]}"
        )
