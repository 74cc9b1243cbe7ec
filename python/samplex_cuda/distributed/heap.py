"""Which nodes of a heap over all slots a rank holds, and which every rank holds.

Leaves of `leaf_size` slots each, filled up to a power of two; node i of level l covers the slots [i * span, (i + 1) *
span). A node with slots of several ranks is *common*. Its children, and the rows of a common leaf, are on every rank;
below them each rank has the nodes above its own slots. The heap, and so the distribution, is the same for any number of
ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from samplex_cuda import _device
from samplex_cuda.distributed.layout import Layout

__all__ = ["Heap"]


class Heap:
    """The heap of one rank. Its node table has the levels one after another, each with common rows first.

    Args:
        layout: which rank holds which slots.
        leaf_size: slots per leaf.
        device: where indices are kept.

    Attributes:
        depth: levels below the root.
        size: rows of the node table of this rank.
        send: int64 [k] table rows that the ranks must tell each other; the same nodes on every rank.
        send_from: int64 [k] the own rows that these come from; -1: nothing of this rank.
        common_slots: int64 [n] slots of common leaves; C and above for none.
    """

    def __init__(self, layout: Layout, leaf_size: int, device: torch.device) -> None:
        self.layout, self.leaf_size = layout, leaf_size
        classes, start, stop = layout.num_classes, layout.start, layout.stop
        self.depth = (-(-classes // leaf_size) - 1).bit_length()
        bounds = {layout.range_of(rank)[0] for rank in range(layout.world)} - {0, classes}
        self._common: list[list[int]] = []  # of each level, ascending
        self._offset: list[int] = []  # first row of each level in the table
        self._above: list[int] = []  # common rows of each level
        self._first: list[int] = []  # first own node of each level
        self._width: list[int] = []  # own nodes of each level
        self.size = 0
        for level in range(self.depth + 1):
            span = self.span(level)
            self._common.append(sorted({bound // span for bound in bounds if bound % span}))
            self._offset.append(self.size)
            self._above.append(2 * len(self._common[level - 1]) if level else 1)
            first, last = (start // span, (stop - 1) // span + 1) if stop > start else (0, 0)
            if level:  # whole pairs
                first, last = first & ~1, last + (last & 1)
            self._first.append(first)
            self._width.append(last - first)
            self.size += self._above[level] + last - first
        self._common_nodes = [torch.tensor(nodes, dtype=torch.int64, device=device) for nodes in self._common]
        self._plan(device)
        leaves = self._common_nodes[self.depth]
        self.common_slots = (leaves.unsqueeze(1) * leaf_size + torch.arange(leaf_size, device=device)).reshape(-1)

    def span(self, level: int) -> int:
        """Slots of a node of this level."""
        return self.leaf_size << (self.depth - level)

    def _plan(self, device: torch.device) -> None:
        """Common rows whose sums come from the ranks; those of common inner nodes are sums of their children."""
        send, source = [], []
        for level in range(self.depth + 1):
            parents = self._common[level - 1] if level else []
            nodes = [child for parent in parents for child in (2 * parent, 2 * parent + 1)] if level else [0]
            for at, node in enumerate(nodes):
                if level < self.depth and node in self._common[level]:
                    continue
                send.append(self._offset[level] + at)
                own = self._first[level] <= node < self._first[level] + self._width[level]
                source.append(self._own_row(level, node) if own else -1)
        self.send = torch.tensor(send, dtype=torch.int64, device=device)
        self.send_from = torch.tensor(source, dtype=torch.int64, device=device)

    def _own_row(self, level: int, node: int) -> int:
        return self._offset[level] + self._above[level] + node - self._first[level]

    def own_rows(self, level: int, nodes: Tensor) -> Tensor:
        """Table rows of own nodes of a level; nodes that are not own give other rows."""
        return nodes + (self._offset[level] + self._above[level] - self._first[level])

    def own_level(self, level: int) -> slice:
        """Table rows of all own nodes of a level: whole pairs, below the root."""
        begin = self._offset[level] + self._above[level]
        return slice(begin, begin + self._width[level])

    def first_own(self, level: int) -> int:
        """The first own node of a level."""
        return self._first[level]

    def own_leaves(self) -> tuple[int, int]:
        """The first leaf that holds own slots, and the one behind the last."""
        start, stop = self.layout.start, self.layout.stop
        return (start // self.leaf_size, (stop - 1) // self.leaf_size + 1) if stop > start else (0, 0)

    def common(self, level: int, nodes: Tensor) -> tuple[Tensor, Tensor]:
        """(bool, int64) of nodes: whether they are common, and their places among the common nodes of the level."""
        known = self._common_nodes[level]
        if not known.numel():
            return torch.zeros_like(nodes, dtype=torch.bool), torch.zeros_like(nodes)
        at = torch.searchsorted(known, nodes).clamp_max(known.shape[0] - 1)
        return known[at] == nodes, at

    def is_own(self, level: int, nodes: Tensor) -> Tensor:
        """Whether the first slot of a node is this rank's: a node that is not common is then all its own."""
        begin = nodes * self.span(level)
        return (begin >= self.layout.start) & (begin < self.layout.stop)

    def children(self, level: int, nodes: Tensor) -> tuple[Tensor, Tensor]:
        """Table rows of the left children of nodes of `level`; the right ones follow. And: are the nodes common.

        -1 where this rank does not have them.
        """
        common, at = self.common(level, nodes)
        below = level + 1
        own = torch.where(self.is_own(level, nodes), self.own_rows(below, 2 * nodes), -1)
        return torch.where(common, 2 * at + self._offset[below], own), common

    def classes_below(self, level: int, nodes: Tensor) -> Tensor:
        """How many slots of [0, C) lie below nodes of a level, fp64."""
        span = self.span(level)
        return (self.layout.num_classes - nodes * span).clamp(0, span).double()

    def sum_common(self, table: Tensor) -> None:
        """Rows of common inner nodes from those of their children, bottom up, in place."""
        for level in range(self.depth - 1, -1, -1):
            nodes = self._common[level]
            if not nodes:
                continue
            below = self._offset[level + 1]
            sums = table[below : below + 2 * len(nodes)].view(len(nodes), 2, -1).sum(1)
            if not level:
                table[0] = sums[0]
                continue
            pairs = self._common[level - 1]
            for at, node in enumerate(nodes):
                table[self._offset[level] + 2 * pairs.index(node // 2) + node % 2] = sums[at]

    def sum_own(self, table: Tensor) -> None:
        """Rows of all own inner nodes from those of their children, bottom up, in place."""
        for level in range(self.depth - 1, -1, -1):
            self._sum_level(table, level)

    def _sum_level(self, table: Tensor, level: int) -> None:
        pairs = table[self.own_level(level + 1)].view(-1, 2, table.shape[1])
        at = self._own_row(level, self._first[level + 1] // 2)
        torch.add(pairs[:, 0], pairs[:, 1], out=table[at : at + pairs.shape[0]])

    def sum_above(self, table: Tensor, leaves: Tensor) -> None:
        """Rows of the own nodes above some own leaves, bottom up, in place; a leaf may be named twice.

        On a CPU the leaves must ascend: a node with several of them is then summed once.
        """
        nodes = leaves
        for level in range(self.depth - 1, -1, -1):
            nodes = nodes >> 1
            if not _device.host_waits(nodes):
                nodes = nodes.unique_consecutive()
                if 2 * nodes.shape[0] >= self._width[level + 1] // 2:  # most of them: all, without an index
                    self._sum_level(table, level)
                    continue
            pairs = table[self.own_level(level + 1)].view(-1, 2, table.shape[1])
            both = pairs.index_select(0, nodes - self._first[level + 1] // 2)
            table.index_copy_(0, self.own_rows(level, nodes), both[:, 0] + both[:, 1])
