"""How a kernel tree follows its class table on a GPU: all on the device, fixed sizes, the host never waits.

The CPU looks at what it is given and raises. A device cannot raise, so a row that is refused there keeps its old
numbers, and the device sends a notice; once that has arrived, the next `follow` builds the tree again on the host,
which repairs the sums or raises what the CPU would have raised.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from samplex_cuda import _device
from samplex_cuda._device import Mailbox
from samplex_cuda.ops import kernel_tree as ops
from samplex_cuda.samplers.kernel_rows import KernelRows, longest_query

__all__ = ["DeviceFollowing", "packed_ids"]

LOST = 64.0  # a leaf that was so many times larger is summed again: the rest of a difference has few digits
_MENDED = 1024  # classes of leaves that are summed again in a step, the worst leaves first
# A data-center GPU, for the ratio of two times: bytes and float32 operations per microsecond, microseconds per launch.
_BYTES, _FLOPS, _LAUNCH = 3.0e6, 5.0e7, 4.0
_MOST_STEPS = 16  # that share an update by default
_TOP_LEVELS = 7  # whose values come from one product for the whole batch


def packed_ids(ids: Tensor, num_classes: int) -> Tensor:
    """The distinct ids of [0, num_classes), ascending, behind as many -1 as it takes to keep the size of `ids`.

    Example:
        >>> import torch
        >>> from samplex_cuda.samplers.kernel_follow import packed_ids
        >>> packed_ids(torch.tensor([7, 3, -1, 3, 90]), 10)
        tensor([-1, -1, -1,  3,  7])
    """
    count = ids.shape[0]
    key = torch.where((ids >= 0) & (ids < num_classes), ids, -1)
    if num_classes < 1 << 31:
        key = key.to(torch.int32)  # half the passes of a radix sort
    key = key.sort().values
    first = key >= 0
    first[1:] &= key[1:] != key[:-1]
    rank = first.cumsum(0)
    place = torch.where(first, rank + (count - rank[-1:]), 0)  # in [1, count]; 0 is for what is dropped
    return ids.new_full((count + 1,), -1).scatter_(0, place, key.long())[1:]


class DeviceFollowing(KernelRows):
    """`follow` of a kernel sampler; the tree itself belongs to `KernelSampler`."""

    _mixed: bool

    def _held(self) -> AbstractContextManager[None]:
        raise NotImplementedError

    def __init__(self) -> None:
        super().__init__()
        self._mail: Mailbox | None = None  # what the device sends: share of clipped mass, number of notices
        self._notices: Tensor | None = None  # on the device: rows that were refused, or that ask for another shift
        # [2, leaves + 1] largest sum of each leaf, now and ever since it was summed again
        self._peaks: Tensor | None = None

    def _post(self) -> Mailbox:
        if self._mail is None:
            self._mail = Mailbox(2, self.rows.device)
        return self._mail

    def _chunks(self, count: int, changed: bool = False) -> Iterator[slice]:
        """Rows whose features are made at once: whole leaves."""
        leaf = max(1, self._rows_at_a_time(changed) // self.leaf_size) * self.leaf_size
        return (slice(begin, min(begin + leaf, count)) for begin in range(0, count, leaf))

    # -------------------------------------------------------------------------------------------- follow
    @torch.no_grad()
    def follow(self, ids: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
        """These rows of the class table may have changed; see `Sampler.follow`.

        On a GPU the host does not wait. A row that `update` would refuse keeps its old numbers there; a later call
        then rebuilds the tree, and raises as `rebuild` does if the row is still bad.
        """
        if not _device.host_waits(self.rows):
            super().follow(ids, weight, bias)
            return
        if self._mail is not None and self._mail[1] > 0.0:
            rebuild: Any = self.rebuild
            rebuild(weight, bias)
            return
        if ids.shape[0] == 0:
            return
        with self._held():
            if self._notices is None:
                self._notices = torch.zeros((), device=self.rows.device)
            self._mixed = True
            # New and old features of some rows, or new ones of all.
            if 2 * ids.shape[0] >= self.num_classes:
                self._follow_all(weight, bias)
            else:
                self._follow_some(packed_ids(ids, self.num_classes), weight, bias)
            if self.kind == "quadratic":
                self._longest = longest_query(self.sums[1].abs().amax().double(), self.num_numbers, self.scale)
            self._mixed = False
            self._post().send(1, self._notices)

    def _follow_some(self, ids: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        """Rows of ids [n], ascending, -1 first: new minus old features are added to their leaves."""
        width, peaks = self.dim + self.has_bias, self._leaf_peaks()
        for part in self._chunks(ids.shape[0]):
            some = ids[part]
            at = some.clamp_min(0)
            new, old = self._own(weight, bias, at), self._features(self.rows[at, :width], self._shift)
            phi = self._features(new, self._shift)
            taken = self._fits(new, phi) & (some >= 0)
            self._notice((some >= 0) & ~taken)
            if self.kind == "positive":
                self._notice(taken & (self._decays(new) + 32.0 < self._shift))
            fresh = ops.pad_columns(new, ops.ROW_ALIGN)
            ops.kernel_tree_update(
                self.sums, phi, old, some, self.leaf_size, taken=taken, rows=self.rows, fresh=fresh, peaks=peaks
            )
        mended = None if peaks is None else self._mend(peaks)
        ops.kernel_tree_parents(self.sums, ids // self.leaf_size)
        if mended is not None:
            ops.kernel_tree_parents(self.sums, mended)

    def _follow_all(self, weight: Tensor, bias: Tensor | None) -> None:
        """All sums again. What a refused row had in them is missing until the rebuild that its notice asks for."""
        width, self._peaks = self.dim + self.has_bias, None
        nearest = None
        for part in self._chunks(self.num_classes):
            new, old = self._own(weight, bias, part), self.rows[part, :width]
            fine = self._fits(new, None)
            new = torch.where(fine[:, None], new, old)
            phi = self._features(new, self._shift)
            if self.kind == "positive":
                fine = fine & self._fits(new, phi)
                phi, new = torch.where(fine[:, None], phi, 0.0), torch.where(fine[:, None], new, old)
                decay = self._decays(new).amin()
                nearest = decay if nearest is None else torch.minimum(nearest, decay)
            self._notice(~fine)
            ops.kernel_tree_build(self.sums, phi, part.start, self.leaf_size)
            self.rows[part, :width] = new
        ops.kernel_tree_parents(self.sums)
        if nearest is not None:
            self._notice((nearest - self._shift).abs() > 32.0)

    def _notice(self, which: Tensor) -> None:
        assert self._notices is not None
        self._notices += which.sum()

    def _forget_notices(self) -> None:
        if self._notices is not None:
            self._notices.zero_()
        if self._mail is not None:
            self._mail.clear(1)

    # -------------------------------------------------------------------------------------------- lost digits
    def _leaf_peaks(self) -> Tensor | None:
        if self.kind in ("rff", "orf"):
            return None  # all features are of one size
        if self._peaks is None:
            now = torch.linalg.vector_norm(self.sums[self.sums.shape[0] // 2 :], math.inf, 1)
            self._peaks = torch.nn.functional.pad(now, (0, 1), value=1.0).repeat(2, 1)
        return self._peaks

    def _mend(self, peaks: Tensor) -> Tensor:
        """Sums the worst of the leaves again that were much larger before; their numbers, ascending, -1 for none first.

        (others + large) - large has lost the digits of the others. A leaf that has to wait for its turn keeps its
        place, for `peaks` is over all leaves.
        """
        leaves, width = self.sums.shape[0] // 2, self.dim + self.has_bias
        now, peak = peaks[0, :leaves], peaks[1, :leaves]
        score = torch.where(peak > LOST * now, peak / now.clamp_min(1e-30), 0.0)
        worst, leaf = score.topk(max(1, min(leaves, _MENDED // self.leaf_size)))
        leaf = torch.where(worst > 0, leaf, -1).sort().values
        found = leaf >= 0
        classes = leaf[:, None] * self.leaf_size + torch.arange(self.leaf_size, device=leaf.device)
        there = (found[:, None] & (classes < self.num_classes)).reshape(-1)
        own = self.rows[torch.where(there, classes.reshape(-1), 0), :width]
        phi = torch.where(there[:, None], self._features(own, self._shift), 0.0)
        total = phi.view(leaf.shape[0], self.leaf_size, -1).sum(1)
        # Row 0 of the sums and the last of the peaks belong to no leaf: there the others write zeros and ones.
        self.sums.index_copy_(0, torch.where(found, leaves + leaf, 0), total)
        size = torch.where(found, torch.linalg.vector_norm(total, math.inf, 1), 1.0)
        peaks.index_copy_(1, torch.where(found, leaf, leaves), size.expand(2, -1))
        return leaf

    # -------------------------------------------------------------------------------------------- how often
    def follow_interval(self, batch: int, num_samples: int, shared: bool) -> int:
        """Steps that share one `follow` by default: 1 on the CPU; on a GPU, until it costs no more than the draws.

        log_q is that of the tree as it is, so a tree some steps old costs variance, never a bias.
        """
        if not _device.host_waits(self.rows):
            return 1
        touched = batch + num_samples if shared else batch * (num_samples + 1)
        draw = self._draw_time(batch, num_samples)
        steps = range(1, _MOST_STEPS + 1)
        return next((k for k in steps if self._follow_time(k * touched) <= k * draw), _MOST_STEPS)

    def _row_time(self) -> float:
        """Microseconds of the features of one row: made, written, read."""
        products = 2 * (self.dim + self.has_bias) * self.num_numbers / (2 if self.kind in ("rff", "orf") else 1)
        flops = self.num_numbers if self.kind == "quadratic" else products
        return flops / _FLOPS + 8 * self.sums.shape[1] / _BYTES

    def _follow_time(self, touched: int) -> float:
        everything = 2 * touched >= self.num_classes
        rows = self.num_classes if everything else 2 * touched
        leaves = min(rows, 1 << self.depth)
        nodes = leaves + sum(min(leaves, 1 << level) for level in range(self.depth))
        return (40 + self.depth) * _LAUNCH + rows * self._row_time() + nodes * 12 * self.sums.shape[1] / _BYTES

    def _draw_time(self, batch: int, num_samples: int) -> float:
        below = sum(min(num_samples, 1 << level) for level in range(min(_TOP_LEVELS, self.depth), self.depth))
        scored = min(num_samples, 1 << self.depth) * self.leaf_size * self.rows.shape[1]
        numbers = batch * (2 * below * self.sums.shape[1] + scored)
        top = 2.0 * batch * (2 << min(_TOP_LEVELS, self.depth)) * self.sums.shape[1]
        return 10 * _LAUNCH + 4 * numbers / _BYTES + top / _FLOPS + batch * self._row_time()
