"""How often each id comes in a stream of batches, estimated as the stream goes by."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from samplex_cuda._checks import check_choice, check_int, check_number, describe
from samplex_cuda.samplers.base import check_int64, check_live, restore_dtypes

__all__ = ["StreamingFrequency", "gather_ids"]

_OP = "StreamingFrequency"
_GROWTH = 20.0  # log of the growth of a sketch's increments before it is scaled back


class StreamingFrequency(nn.Module):
    """An estimate of log q for negatives that come from the stream of training examples itself (in-batch negatives).

    The distribution is unknown for such negatives; this module estimates it. Its numbers are never exact: they lag
    behind a stream that changes, and ids that share a bucket are counted together.

    `kind="gap"` keeps two arrays (Yi et al. 2019): when an id last came, and the mean number of *examples* between two
    of its occurrences, a moving average with weight `rate`; q is one over that gap. Several copies in one batch are one
    update with the gap divided by their number, and with the weight of as many observations, 1 - (1 - rate)^c: the mean
    is then one over the frequency for any batch size. Gaps in steps could not tell frequencies above one per batch
    apart. Ids below `num_buckets` never share a bucket.

    `kind="sketch"` is a count-min sketch of `depth` rows whose counts decay by exp(-rate / num_buckets) per example; q
    is the smallest share, which collisions can only raise.

    `update` runs on the device of the ids without waiting for it. The arrays are in `state_dict()`, so that a resumed
    run continues with the same numbers; with `group`, every rank makes the update of all ranks' ids and stays equal.

    Args:
        num_buckets: size of each array; the number of classes, where memory allows.
        kind: "gap" or "sketch".
        rate: weight of the newest observation, in (0, 1].
        depth: rows of the sketch.

    Example:
        >>> import torch, samplex_cuda as sx
        >>> frequency = sx.samplers.StreamingFrequency(1000)
        >>> for _ in range(400):
        ...     frequency.update(torch.multinomial(torch.tensor([0.5, 0.3, 0.2]), 64, replacement=True))
        >>> bool((frequency.log_q(torch.arange(3)).exp() - torch.tensor([0.5, 0.3, 0.2])).abs().max() < 0.05)
        True
    """

    clock: Tensor
    last: Tensor
    gap: Tensor
    counts: Tensor
    total: Tensor
    growth: Tensor

    def __init__(self, num_buckets: int, *, kind: str = "gap", rate: float = 0.02, depth: int = 4) -> None:
        super().__init__()
        check_int(_OP, "num_buckets", num_buckets, 1, 1 << 40)
        check_choice(_OP, "kind", kind, ("gap", "sketch"))
        check_number(_OP, "rate", rate, 0.0, 1.0, open_low=True)
        check_int(_OP, "depth", depth, 1, 64)
        self.num_buckets, self.kind, self.rate, self.depth = num_buckets, kind, float(rate), depth
        self.register_buffer("clock", torch.zeros((), dtype=torch.int64))  # examples seen
        if kind == "gap":  # one more bucket, for ids that do not count
            self.register_buffer("last", torch.zeros(num_buckets + 1, dtype=torch.int64))
            self.register_buffer("gap", torch.zeros(num_buckets + 1, dtype=torch.float32))
        else:
            self.register_buffer("counts", torch.zeros(depth, num_buckets + 1, dtype=torch.float64))
            self.register_buffer("total", torch.zeros((), dtype=torch.float64))
            self.register_buffer("growth", torch.zeros((), dtype=torch.float64))  # log of what an example adds
            self._grown = 0.0  # the same as a number, at most

    def update(self, ids: Tensor, *, group: Any = None) -> None:
        """Count a batch of ids.

        Args:
            ids: int64 of any shape; negative ones do not count.
            group: a process group: the ids of all its ranks are counted, on each of them. Every rank must call it.
        """
        flat = self._check(ids)
        if group is not None:
            flat = gather_ids(flat, group)
        if flat.shape[0] == 0:
            return
        with torch.no_grad():
            if self.kind == "gap":
                self._update_gap(flat)
            else:
                self._update_sketch(flat)

    def log_q(self, ids: Tensor) -> Tensor:
        """An estimate of the log-probability that an example of the stream is this id.

        An id that never came counts as if it were the next one to come.

        Args:
            ids: int64 of any shape, not negative.

        Returns:
            float32, the shape of `ids`; finite and at most 0.
        """
        flat = self._check(ids)
        with torch.no_grad():
            never = self.clock.to(torch.float64) + 1.0
            if self.kind == "gap":
                gap = self.gap[self._bucket(flat)].to(torch.float64)
                gap = torch.where(gap > 0, gap, never).clamp_(min=1.0)
            else:
                share = torch.stack([row[self._hash(flat, k)] for k, row in enumerate(self.counts)]).amin(0)
                gap = torch.where(share > 0, self.total / share, never).clamp_(min=1.0)
            return -gap.log().to(torch.float32).reshape(ids.shape)

    def resize(self, num_buckets: int, live: Tensor | None = None) -> None:
        """Another number of buckets, for ids that have always been below the smaller number. Not for a sketch.

        Args:
            num_buckets: the new size of the arrays; new buckets count as never seen.
            live: bool [num_buckets]; None: all. What others were is forgotten.

        Example:
            >>> import torch, samplex_cuda as sx
            >>> frequency = sx.samplers.StreamingFrequency(10)
            >>> frequency.update(torch.tensor([3, 3, 5]))
            >>> frequency.resize(12)
            >>> frequency.num_buckets, float(frequency.log_q(torch.tensor([3])).exp())
            (12, 0.6666666865348816)
        """
        check_int(_OP, "num_buckets", num_buckets, 1, 1 << 40)
        check_live(_OP, num_buckets, live)
        if self.kind != "gap":
            raise ValueError(
                f"{_OP}: kind must be 'gap' to resize, got {self.kind!r}, whose buckets are shared by several ids"
            )
        kept = min(num_buckets, self.num_buckets)
        for name in ("last", "gap"):
            old = self.get_buffer(name)
            made = old.new_zeros(num_buckets + 1)
            made[:kept] = old[:kept]
            if live is not None:
                made[:-1].masked_fill_(~live.to(made.device), 0)
            setattr(self, name, made)
        self.num_buckets = num_buckets

    # ---------------------------------------------------------------------------------------------- two arrays
    def _bucket(self, flat: Tensor) -> Tensor:
        return torch.where(flat < 0, self.num_buckets, flat.remainder(self.num_buckets))

    def _update_gap(self, flat: Tensor) -> None:
        order = self._bucket(flat).sort().values
        first = torch.ones_like(order, dtype=torch.bool)
        first[1:] = order[1:] != order[:-1]
        group = first.cumsum(0) - 1
        copies = torch.zeros_like(order).index_add_(0, group, torch.ones_like(order))[group]
        self.clock += (flat >= 0).sum()
        last, gap = self.last[order], self.gap[order]
        passed = (self.clock - last).to(torch.float64) / copies
        weight = -torch.expm1(copies * math.log1p(-self.rate)) if self.rate < 1.0 else 1.0
        mean = torch.where(last == 0, passed, gap + weight * (passed - gap)).to(torch.float32)
        # Copies of a bucket write the same number, so that their order does not matter.
        self.gap.scatter_(0, order, mean)
        self.last.scatter_(0, order, self.clock.expand_as(order))

    # ---------------------------------------------------------------------------------------------- sketch
    def _hash(self, flat: Tensor, row: int) -> Tensor:
        """A bucket for each id, another function in every row of the sketch (the mixing steps of SplitMix64)."""
        x = flat + _mixed((row + 1) * 0x9E3779B97F4A7C15)
        x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _mixed(0xBF58476D1CE4E5B9)
        x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _mixed(0x94D049BB133111EB)
        x = x ^ ((x >> 31) & 0x1FFFFFFFF)
        return torch.where(flat < 0, self.num_buckets, x.remainder(self.num_buckets))

    def _update_sketch(self, flat: Tensor) -> None:
        decay = self.rate / self.num_buckets * flat.shape[0]
        if self._grown + decay > _GROWTH:  # rare: O(num_buckets)
            self._scale_back()
        self._grown += decay
        counts = (flat >= 0).sum()
        self.clock += counts
        self.growth += decay  # new examples weigh more: the same as old ones that weigh less, without touching them
        weight = self.growth.exp()
        for k in range(self.depth):
            self.counts[k].index_add_(0, self._hash(flat, k), weight.expand(flat.shape[0]))
        self.total += weight * counts

    def _scale_back(self) -> None:
        shrink = (-self.growth).exp()
        self.counts *= shrink
        self.total *= shrink
        self.growth.zero_()
        self._grown = 0.0

    # ---------------------------------------------------------------------------------------------- the rest
    def _check(self, ids: Tensor) -> Tensor:
        check_int64(_OP, "ids", ids)
        if ids.device != self.clock.device:
            raise ValueError(
                f"{_OP}: ids must be on {self.clock.device}, where the arrays are, got {describe(ids)}; move the "
                "estimator with .to(device)"
            )
        return ids.reshape(-1)

    def _apply(self, fn: Any, recurse: bool = True) -> StreamingFrequency:
        kept = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)
        restore_dtypes(self, kept)  # `.half()` of a model is not about counts
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        if self.kind == "sketch":
            self._scale_back()

    def extra_repr(self) -> str:
        """Sizes and options."""
        more = f", depth={self.depth}" if self.kind == "sketch" else ""
        return f"{self.num_buckets}, kind={self.kind!r}, rate={self.rate}{more}"


def _mixed(number: int) -> int:
    """The low 64 bits of a number as an int64."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def gather_ids(ids: Tensor, group: Any) -> Tensor:
    """Ids [n] of all ranks of a process group in the order of the ranks; n may differ.

    Args:
        ids: int64 [n], not below -1.
        group: a process group; every rank must call it. The host waits for the number of ids of every rank.

    Returns:
        int64 [world * most], filled up with -1.
    """
    import torch.distributed as dist

    world = dist.get_world_size(group)
    sizes = [ids.new_zeros(1) for _ in range(world)]
    dist.all_gather(sizes, ids.new_full((1,), ids.shape[0]), group=group)
    most = int(torch.cat(sizes).max())
    padded = torch.cat([ids, ids.new_full((most - ids.shape[0],), -1)])
    parts = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(parts, padded, group=group)
    return torch.cat(parts)
