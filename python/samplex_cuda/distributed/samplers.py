"""Samplers of a sharded head that are spread over its ranks themselves.

Every rank calls them with the rows of all ranks and the same key, and gets the same draw: what one rank knows of it
reaches the others as a sum over the ranks. Classes are counted in the order of slots (`Layout`), so that draws do not
depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from samplex_cuda import _device, chunking
from samplex_cuda._checks import describe
from samplex_cuda.distributed.collectives import Exchange
from samplex_cuda.distributed.exact import exact_log
from samplex_cuda.distributed.layout import Layout
from samplex_cuda.draw import Draw
from samplex_cuda.rng import Key, below, key_tensor, philox_bits
from samplex_cuda.samplers.base import Exclude, Sampler, check_int64
from samplex_cuda.samplers.static import DeferredUnigram, Unigram

__all__ = ["ShardedSampler", "ShardedUnigram"]

_COUNTED = 1 << 53  # added to a slot by each rank that claims it


def as_dtensor(rows: Tensor, num_classes: int, mesh: DeviceMesh) -> DTensor:
    """Rows [n, ...] of this rank as their part of a [C, ...] DTensor, in the order of slots; nothing is copied."""
    shape = torch.Size([num_classes, *rows.shape[1:]])
    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(rows, mesh, [Shard(0)], run_check=False, shape=shape, stride=strides)


def kept_at(nodes: Tensor, of_excluded: Tensor, slots: Tensor, kept: Tensor) -> Tensor:
    """P(nothing excluded | node) of nodes [B, k, 2]: 1, or `kept` [B, E] of an excluded slot below the node."""
    found = torch.ones(nodes.shape, dtype=torch.float64, device=nodes.device)
    for e in range(slots.shape[1]):
        hit = (nodes == of_excluded[:, e, None, None]) & (slots[:, e, None, None] >= 0)
        found = torch.where(hit, kept[:, e, None, None], found)
    return found


class ShardedSampler(Sampler):
    """What the samplers of a sharded head share. Every method that draws or scores must be called by every rank.

    Args:
        layout: which rank holds which class.
        exchange: the collectives of the head.
    """

    collective = True  # whether draws need every rank

    def __init__(self, layout: Layout, exchange: Exchange) -> None:
        super().__init__()
        self.layout, self.exchange = layout, exchange
        self.num_classes = layout.num_classes
        self._mesh: DeviceMesh | None = None

    # -------------------------------------------------------------------------------------------- for subclasses
    def _place(self) -> torch.device:
        """Where its tables are."""
        raise NotImplementedError

    def _draw_slots(
        self, h: Tensor | None, batch: int, count: int, pair: Tensor, excluded: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """(slots [B, m], log_q [B, m] float32); excluded: int64 [B, E] slots, rows ascending, -1 for none."""
        raise NotImplementedError

    def _score_slots(self, h: Tensor | None, slots: Tensor, excluded: Tensor | None) -> Tensor:
        """log q [B, n] float32 of slots [B, n]; -1 is not a class."""
        raise NotImplementedError

    def log_prob_local(self, h: Tensor) -> Tensor:
        """log q of the classes of this rank, [B, rows] float32; the one method that a rank may call alone.

        Args:
            h: [B, d].
        """
        raise NotImplementedError

    def local_prior(self, h: Tensor) -> Callable[[slice], Tensor]:
        """`log_prob_local` of some rows of h [B, d] at a time. Every rank must call it; a rank may call the result."""
        return lambda rows: self.log_prob_local(h[rows])

    # -------------------------------------------------------------------------------------------- draws
    def sample(
        self,
        h: Tensor | None,
        num_samples: int,
        *,
        shared: bool = False,
        key: Key | Tensor | None = None,
        exclude: Exclude | None = None,
        context: Tensor | None = None,
        batch_size: int | None = None,
    ) -> Draw:
        """Draw classes for each row, or once for the batch; see `Sampler.sample`. `exclude` must be a tensor."""
        count = self._check_count(num_samples)
        if shared:
            return self._sample_shared(h, count, key, exclude, context, batch_size)
        batch = self._check_batch(h, batch_size, exclude)
        excluded = self._excluded_slots(exclude, batch)
        pair = key_tensor(self._op, key, self._place())
        slots, log_q = self._draw_slots(h, batch, count, pair, excluded)
        return Draw(self.layout.class_at(slots), log_q)

    def log_prob(
        self, h: Tensor | None, ids: Tensor, *, exclude: Exclude | None = None, context: Tensor | None = None
    ) -> Tensor:
        """Log-probability of given ids; see `Sampler.log_prob`."""
        check_int64(self._op, "ids", ids)
        batch = ids.shape[0] if h is None and exclude is None else self._check_batch(h, None, exclude)
        wanted, one = self._wanted(ids, batch)
        out = self._score_slots(h, self.layout.slot(wanted), self._excluded_slots(exclude, batch))
        return out.squeeze(1) if one else out

    def log_prob_all(self, h: Tensor | None = None) -> Tensor:
        """Log-probability of every class, [B, C] float32: for tests and small C."""
        batch = 1 if h is None else self._rows_of(h)
        ids = torch.arange(self.num_classes, device=self._place())
        size = max(1, chunking.probabilities_at_once(ids.device) // max(1, batch))
        parts = [self.log_prob(h, some.expand(batch, -1)) for some in ids.split(size)]
        return torch.cat(parts, 1)

    def _excluded_slots(self, exclude: Exclude | None, batch: int) -> Tensor | None:
        if exclude is None:
            return None
        if not isinstance(exclude, Tensor):
            raise TypeError(
                f"{self._op}: exclude must be an int64 tensor [B] or [B, P] for a sharded sampler, got "
                f"{type(exclude).__name__}"
            )
        self._check_exclude(exclude, self._place(), batch)
        slots = self.layout.slot(exclude if exclude.dim() == 2 else exclude.unsqueeze(1))
        return slots if slots.shape[1] == 1 else slots.sort(1).values

    def _from_owners(self, slots: Tensor, *fields: Tensor) -> tuple[Tensor, ...]:
        """Slots [...] that each rank claims (-1: none), and its numbers for them, on every rank.

        Ranks that round differently could disagree on who owns a draw. The number of claims goes with the slot, so
        that this does not pass in silence: an error on the CPU, slot 0 and numbers of no meaning elsewhere.
        """
        found, *rest = self.exchange.from_owners(slots >= 0, slots + _COUNTED, *fields)
        claims = found >> 53
        if not _device.host_waits(slots) and bool((claims != 1).any()):
            raise RuntimeError(
                f"{self._op}: each draw must belong to one rank, got {int((claims != 1).sum())} that do not: the ranks "
                "compute different numbers; use the same kind of processor, build and number of threads on all"
            )
        return torch.where(claims == 1, found & (_COUNTED - 1), 0), *rest

    # -------------------------------------------------------------------------------------------- state
    def _dtensor(self, rows: Tensor) -> DTensor:
        if self._mesh is None:
            self._mesh = DeviceMesh.from_group(self.exchange.group, rows.device.type)
        return as_dtensor(rows, self.num_classes, self._mesh)

    def _local_rows(self, value: Tensor) -> Tensor:
        """This rank's rows of a stored table, a DTensor by slots or whole by classes."""
        if isinstance(value, DTensor):
            assert self._mesh is not None or self._dtensor(torch.empty(self.layout.rows)) is not None
            return value.redistribute(self._mesh, [Shard(0)]).to_local()
        return value[self.layout.classes(value.device)]

    def adopt(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Entries of the sampler of a plain head become those of this one, before anything is loaded."""

    def update(self, ids: Tensor, rows: Tensor) -> None:
        """Nothing to do, unless the sampler depends on the class table."""

    def rebuild(self, weight: Tensor) -> None:
        """Nothing to do, unless the sampler depends on the class table."""


class ShardedUnigram(ShardedSampler):
    """`Unigram` with 8 bytes for each class of the rank: running sums of the integer weights, in the order of slots.

    A draw is a number below the sum of all weights; the rank whose range holds it finds the class. Ids and log_q are
    the same bits on any number of ranks. They are other draws than those of a `Unigram`, of the same distribution.

    Args:
        layout: which rank holds which class.
        exchange: the collectives of the head.
        weights: int64 [rows], of this rank's classes; their sum over all ranks must be below 2^62.
    """

    _op = "unigram"
    conditional = False
    prefix: Tensor
    total: Tensor

    def __init__(self, layout: Layout, exchange: Exchange, weights: Tensor) -> None:
        super().__init__(layout, exchange)
        self.register_buffer("prefix", torch.zeros(layout.rows + 1, dtype=torch.int64), persistent=False)
        self.register_buffer("total", torch.zeros((), dtype=torch.int64), persistent=False)
        self._fill(weights)

    @classmethod
    def of(cls, sampler: Unigram, layout: Layout, exchange: Exchange) -> ShardedUnigram:
        """The part of a `Unigram` that this rank holds."""
        return cls(layout, exchange, sampler.prefix.diff()[layout.classes(sampler.prefix.device)])

    @classmethod
    def of_counts(
        cls, sampler: DeferredUnigram, layout: Layout, exchange: Exchange, device: torch.device
    ) -> ShardedUnigram:
        """A `Unigram` of which this rank asks for its own classes alone. Every rank must call it.

        Integer counts are the weights. Others are multiplied by a power of two over the largest of all, which does not
        depend on the number of ranks; a positive count weighs 1 at least.
        """
        parts = [sampler.counts(some) for some in layout.classes(device).split(chunking.probabilities_at_once(device))]
        counts = torch.cat(parts) if parts else torch.zeros(0, device=device)
        wrong = (~counts.isfinite() | (counts < 0)).sum().reshape(1)
        kinds = exchange.stack(torch.stack([wrong[0], torch.tensor(int(counts.is_floating_point()), device=device)]))
        if int(kinds[:, 0].sum()):
            raise ValueError(
                f"unigram: counts must be finite and not negative, got {int(kinds[:, 0].sum())} that are not, "
                f"{int(wrong)} of them on this rank"
            )
        exact = not bool(kinds[:, 1].any())
        values = counts.double()
        sums = exchange.stack(torch.stack([values.sum(), values.amax() if len(values) else values.sum()]))
        most = sums[:, 1].max()
        if not float(most):
            raise ValueError("unigram: counts must have a positive sum, got all zero")
        if exact and float(sums[:, 0].sum()) < 2.0**61:
            return cls(layout, exchange, counts.to(torch.int64))
        weights = (values / most * 2.0 ** (60 - layout.num_classes.bit_length())).round().to(torch.int64)
        return cls(layout, exchange, torch.where(values > 0, weights.clamp_min(1), 0))

    def _fill(self, weights: Tensor) -> None:
        mass = self.exchange.stack(weights.sum().reshape(1)).reshape(-1)
        before = mass[: self.exchange.rank].sum()
        self.total = mass.sum()
        self.prefix = torch.cat([before.reshape(1), before + weights.cumsum(0)])
        share = (weights.double() / self.total.double()).square().sum().reshape(1)
        self._collision = float(self.exchange.stack(share).sum())

    def _place(self) -> torch.device:
        return self.prefix.device

    def collision(self) -> float:
        """The probability that two draws are of one class."""
        return self._collision

    def _sample_shared(
        self, h: Tensor | None, count: int, key: Any, exclude: Any, context: Any, batch_size: int | None
    ) -> Draw:
        self._check_shared(exclude)
        pair = key_tensor(self._op, key, self._place())
        slots, log_q = self._draw_slots(None, 1, count, pair, None)
        return Draw(self.layout.class_at(slots[0]), log_q[0])

    def log_prob_shared(self, h: Tensor | None, ids: Tensor, *, context: Tensor | None = None) -> Tensor:
        """Log-probability of ids of any shape under the distribution of shared draws, which is that of every row."""
        check_int64(self._op, "ids", ids)
        return self._score_slots(None, self.layout.slot(ids).reshape(1, -1), None).reshape(ids.shape)

    def log_prob_local(self, h: Tensor) -> Tensor:
        """See `ShardedSampler.log_prob_local`."""
        return self._log_share(self.prefix.diff(), self.total).expand(self._rows_of(h), -1)

    def _weights_of(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """(first number, weight) of slots, 0 for -1, on every rank."""
        local = slots - self.layout.start
        mine = (local >= 0) & (local < self.layout.rows) & (slots >= 0)
        at = torch.where(mine, local, 0)
        if not self.layout.rows:
            nothing = torch.zeros_like(slots)
            return self.exchange.from_owners(mine, nothing, nothing)  # type: ignore[return-value]
        first = self.prefix[at]
        return self.exchange.from_owners(mine, first, self.prefix[at + 1] - first)  # type: ignore[return-value]

    def _left(self, excluded: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Sum of the weights left, [B, 1] or []; first numbers and weights [B, E] of the excluded, copies weigh 0."""
        if excluded is None:
            return self.total, None, None
        first, weight = self._weights_of(excluded)
        weight[:, 1:] = torch.where(excluded[:, 1:] == excluded[:, :-1], 0, weight[:, 1:])
        return self.total - weight.sum(1, keepdim=True), first, weight

    @staticmethod
    def _log_share(weight: Tensor, total: Tensor) -> Tensor:
        share = exact_log(weight.clamp_min(1).double()) - exact_log(total.clamp_min(1).double())
        return torch.where(weight > 0, share, -torch.inf).float()

    def _draw_slots(
        self, h: Tensor | None, batch: int, count: int, pair: Tensor, excluded: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        left, first, weight = self._left(excluded)
        number = below(philox_bits(pair, batch, count, 0)[0], left)
        if first is not None and weight is not None:
            for e in range(first.shape[1]):  # ascending: each moves what lies at or behind it
                number = number + torch.where(number >= first[:, e : e + 1], weight[:, e : e + 1], 0)
        nothing = left == 0
        mine = (number >= self.prefix[0]) & (number < self.prefix[-1]) & ~nothing
        local = torch.searchsorted(self.prefix, number, right=True) - 1
        local = torch.where(mine, local, 0)
        of_draw = self.prefix[(local + 1).clamp_max(self.layout.rows)] - self.prefix[local]
        stand_in = self._stand_in(excluded, nothing, number)
        claimed = torch.where(mine, self.layout.start + local, stand_in)
        slots, of_draw = self._from_owners(claimed, of_draw)
        return slots, torch.where(nothing, 0.0, self._log_share(of_draw, left))

    def _stand_in(self, excluded: Tensor | None, nothing: Tensor, like: Tensor) -> Tensor:
        """The first excluded slot where nothing is left and this is the first rank; -1 elsewhere."""
        if excluded is None or self.exchange.rank:
            return torch.full_like(like, -1)
        least = torch.where(excluded >= 0, excluded, self.num_classes).amin(1, keepdim=True)
        return torch.where(nothing, least, -1).expand(like.shape)

    def _score_slots(self, h: Tensor | None, slots: Tensor, excluded: Tensor | None) -> Tensor:
        left, _, _ = self._left(excluded)
        out = self._log_share(self._weights_of(slots)[1], left)
        if excluded is None:
            return out
        least = torch.where(excluded >= 0, excluded, self.num_classes).amin(1, keepdim=True)
        for e in range(excluded.shape[1]):
            out = torch.where(slots == excluded[:, e : e + 1], -torch.inf, out)
        return torch.where((left == 0) & (slots == least), 0.0, out)

    # -------------------------------------------------------------------------------------------- state
    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weights"] = self._dtensor(self.prefix.diff())

    def adopt(self, state_dict: dict[str, Any], prefix: str) -> None:
        """See `ShardedSampler.adopt`."""
        state_dict.pop(f"{prefix}table", None)
        sums = state_dict.pop(f"{prefix}prefix", None)
        if isinstance(sums, Tensor):
            state_dict[f"{prefix}weights"] = sums.diff()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        value = state_dict.pop(f"{prefix}weights", None)
        super()._load_from_state_dict(state_dict, prefix, *args)
        if not isinstance(value, Tensor):
            args[-3].append(f"{prefix}weights")  # missing
            return
        if value.shape != (self.num_classes,) or value.dtype != torch.int64:
            args[-1].append(f"{self._op}: weights must be [{self.num_classes}] int64, got {describe(value)}")
            return
        self._fill(self._local_rows(value).to(self.prefix.device))

    def extra_repr(self) -> str:
        """The number of classes, and how many of them this rank holds."""
        return f"{self.num_classes}, rows={self.layout.rows}"
