"""In-batch negatives, alone or together with draws of another sampler."""

from __future__ import annotations

import copy
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from samplex_cuda import _device
from samplex_cuda._checks import check_int, describe
from samplex_cuda.draw import Draw
from samplex_cuda.rng import Key
from samplex_cuda.samplers.base import Exclude, Sampler, check_int64
from samplex_cuda.samplers.frequency import StreamingFrequency, gather_ids

__all__ = ["InBatch", "TowerKeys"]


class TowerKeys(NamedTuple):
    """Which items a tower has to encode for one step, and how each of them takes part in the loss.

    `InBatch.tower_keys` makes it, `sx.functional.contrastive(queries, tower(keys.ids), negatives=keys)` takes it.

    Attributes:
        ids: int64 [n + u], items to encode: the B targets, the draws, then u mined ones.
        log_q: [n] of the targets and draws, for a loss that divides by n.
        hard: int64 [B, k], rows of `ids`: mined items of each query, which enter with their plain score; None: none.

    Example:
        >>> import torch, samplex_cuda as sx
        >>> sampler = sx.samplers.InBatch(100, extra=sx.samplers.Uniform(100))
        >>> items, mined = torch.tensor([3, 5]), torch.tensor([[7, 9], [9, 8]])
        >>> keys = sampler.tower_keys(items, 4, hard=mined)
        >>> keys.ids.shape, keys.log_q.shape, keys.ids[keys.hard].tolist()  # 2 targets, 4 draws, 3 mined ones
        (torch.Size([9]), torch.Size([6]), [[7, 9], [9, 8]])
    """

    ids: Tensor
    log_q: Tensor
    hard: Tensor | None = None


class InBatch(Sampler):
    """The targets of a batch as negatives of its other rows, and `num_samples` draws of a second sampler with them.

    The B - 1 targets of the other rows are draws from the distribution of the data, which `frequency` estimates. With
    `extra`, m draws of that sampler join them in one normalizer: a class c counts as a draw of the mixture

        Q(c) = ((B - 1) q_data(c) + m q_extra(c)) / (B - 1 + m)

    whichever of the two it came from. In-batch negatives alone never show a rare class as a negative; a few draws of
    `Uniform` do. A target that occurs again in the batch is not a negative of its own rows, and B - 1 stays the
    divisor. log_q is an estimate unless `frequency` is the true distribution of the targets.

    A head draws with it by itself: `SampledClassifier(d, C, sx.samplers.InBatch(...), num_samples=m, shared=True)`; the
    estimator learns from every training batch and is in the head's `state_dict()`. For towers whose keys come from an
    encoder see `tower_keys`.

    Args:
        num_classes: C.
        frequency: how often each class is a target: a `StreamingFrequency`, or a sampler such as `Unigram(counts)`;
            None: `StreamingFrequency(num_classes)`, at most 2^26 buckets.
        extra: a sampler over the same classes, or None.
        group: a process group: the batch is that of all its ranks, which must all call `sample` at the same time.
            For your own training loop: a sharded or replicated head takes the targets of all ranks and needs None.

    Example:
        >>> import torch, samplex_cuda as sx
        >>> sampler = sx.samplers.InBatch(100, extra=sx.samplers.Uniform(100))
        >>> head = sx.SampledClassifier(8, 100, sampler, num_samples=16, shared=True)
        >>> head(torch.randn(32, 8), torch.randint(100, (32,))).shape
        torch.Size([])
        >>> draw = sampler.sample(None, 16, targets=torch.randint(100, (32,)))
        >>> draw.ids.shape  # 32 targets and 16 draws
        torch.Size([48])
    """

    _op = "in_batch"
    conditional = False
    takes_targets = True  # `sample` is given the targets of the batch

    def __init__(
        self,
        num_classes: int,
        frequency: StreamingFrequency | Sampler | None = None,
        *,
        extra: Sampler | None = None,
        group: Any = None,
    ) -> None:
        super().__init__()
        self.num_classes = check_int(self._op, "num_classes", num_classes, 1, 1 << 52)
        if frequency is None:
            frequency = StreamingFrequency(min(num_classes, 1 << 26))
        for name, part in (("frequency", frequency), ("extra", extra)):
            if isinstance(part, Sampler):
                if part.num_classes != num_classes:
                    raise ValueError(f"in_batch: {name} must have num_classes = {num_classes}, got {part.num_classes}")
                if name == "frequency" and part.conditional:
                    raise ValueError(
                        f"in_batch: frequency must not depend on the query, got {type(part).__name__}: targets come "
                        "from one distribution, that of the data"
                    )
            elif part is not None and not (name == "frequency" and isinstance(part, StreamingFrequency)):
                kinds = "a StreamingFrequency or a sampler" if name == "frequency" else "a sampler or None"
                raise TypeError(f"in_batch: {name} must be {kinds}, got {describe(part)}")
        self.frequency = frequency
        self.extra = extra
        self.group = group

    @property
    def follows_rows(self) -> bool:  # type: ignore[override]
        """Whether the second sampler depends on the class table."""
        return self.extra is not None and self.extra.follows_rows

    @property
    def has_bias(self) -> bool:  # type: ignore[override]
        """Whether the second sampler takes the bias of the class table."""
        return self.extra is not None and self.extra.has_bias

    @property
    def _needs_context(self) -> bool:  # type: ignore[override]
        return self.extra is not None and self.extra._needs_context

    @torch.no_grad()
    def sample(  # type: ignore[override]
        self,
        h: Tensor | None,
        num_samples: int,
        *,
        targets: Tensor,
        shared: bool = True,
        key: Key | Tensor | None = None,
        exclude: Exclude | None = None,
        context: Tensor | None = None,
        update: bool = True,
    ) -> Draw:
        """The negatives of a batch, shared by its rows.

        Args:
            h: [B, d], where the second sampler looks at it.
            num_samples: m, draws of the second sampler; ignored without one.
            targets: int64 [B]; negative values are ignored.
            shared: must be True.
            key: of the second sampler's draws.
            exclude: must be None: losses mask shared draws.
            context: of the second sampler.
            update: whether a `StreamingFrequency` learns from these targets, before it is asked for their log q.

        Returns:
            ids [B + m] and log_q, `independent` False; the loss divides by B + m, which log_q takes into account.
        """
        self._check_shared(exclude)
        check_int64(self._op, "targets", targets)
        if targets.dim() != 1:
            raise ValueError(f"in_batch: targets must be [B], one per row, got {describe(targets)}")
        if not shared:
            raise ValueError("in_batch: shared must be True: the batch shares its targets, got False")
        if targets.numel() and not _device.host_waits(targets) and int(targets.max()) >= self.num_classes:
            raise IndexError(f"in_batch: targets must be below {self.num_classes}, got {int(targets.max())}")
        batch = targets if self.group is None else gather_ids(targets.clamp(min=-1), self.group)
        if isinstance(self.frequency, StreamingFrequency) and update:
            self.frequency.update(batch)
        there = batch >= 0
        in_batch = torch.where(there, batch, 0)
        count = 0 if self.extra is None else self._check_count(num_samples)
        ids = in_batch
        if self.extra is not None and count:
            drawn = self.extra.sample(h, count, shared=True, key=key, context=context, **_rows(h, targets))
            ids = torch.cat([in_batch, drawn.ids.to(in_batch.device)])
        # Weight of a draw: 1 / ((B - 1) q_data + m q_extra); the loss takes exp(-log_q) / entries.
        others = (there.sum().to(torch.float64) - 1.0).clamp_(min=1.0)
        expected = self._log_frequency(ids) + others.log()
        if self.extra is not None and count:
            of_extra = self.extra.log_prob_shared(h, ids, context=context).to(torch.float64)
            expected = torch.logaddexp(expected, of_extra + math.log(count))
        log_q = expected - math.log(max(ids.shape[0], 1))
        if batch.shape[0]:
            # A row without a target is not a draw: its entry has no weight.
            log_q[: batch.shape[0]] = torch.where(there, log_q[: batch.shape[0]], _NO_WEIGHT)
        return Draw(ids, log_q.to(torch.float32), independent=False)

    @torch.no_grad()
    def tower_keys(
        self,
        targets: Tensor,
        num_samples: int = 0,
        *,
        hard: Tensor | None = None,
        h: Tensor | None = None,
        key: Key | Tensor | None = None,
        context: Tensor | None = None,
        update: bool = True,
    ) -> TowerKeys:
        """The items a tower encodes for one step: targets of the batch, draws of the second sampler, and mined ones.

        Args:
            targets: int64 [B] in [0, C), the item of each query.
            num_samples: m, draws of the second sampler; ignored without one.
            hard: int64 [B, k] in [0, C), mined items of each query, such as the best ones of an index: they join the
                others in one normalizer, uncorrected; the own item takes no part. Each is encoded once. On a GPU this
                waits for the device, which knows how many there are.
            h: [B, d], where the second sampler looks at it.
            key: of the second sampler's draws.
            context: of the second sampler.
            update: as in `sample`.
        """
        check_int64(self._op, "targets", targets)
        if self.group is not None:
            raise ValueError("in_batch: group must be None for tower_keys: each rank encodes the items of its batch")
        for name, t in (("targets", targets), ("hard", hard)):
            if t is None:
                continue
            check_int64(self._op, name, t)
            if t.device != targets.device:
                raise ValueError(f"in_batch: {name} must be on {targets.device} like targets, got {describe(t)}")
            if t.numel() and not _device.host_waits(t):
                least, most = (int(x) for x in t.aminmax())
                if least < 0 or most >= self.num_classes:
                    wrong = least if least < 0 else most
                    raise IndexError(f"in_batch: {name} must be in [0, {self.num_classes}), got {wrong}")
        if targets.dim() != 1:
            raise ValueError(f"in_batch: targets must be [B], got {describe(targets)}")
        if hard is not None and (hard.dim() != 2 or hard.shape[:1] != targets.shape):
            raise ValueError(f"in_batch: hard must be [{targets.shape[0]}, k] to fit targets, got {describe(hard)}")
        ids, log_q, _ = self.sample(h, num_samples, targets=targets, key=key, context=context, update=update)
        if hard is None:
            return TowerKeys(ids, log_q)
        distinct, place = torch.unique(hard, return_inverse=True)
        return TowerKeys(torch.cat([ids, distinct]), log_q, place + ids.shape[0])

    def log_prob(
        self, h: Tensor | None, ids: Tensor, *, exclude: Exclude | None = None, context: Tensor | None = None
    ) -> Tensor:
        """Log-probability of given ids under the distribution of the targets, an estimate; see `Sampler.log_prob`."""
        check_int64(self._op, "ids", ids)
        self._check_shared(exclude)
        found = self._log_frequency(ids).to(torch.float32)
        if h is None or ids.dim() == 2 or ids.shape[0] == self._rows_of(h):
            return found
        return found.expand(self._rows_of(h), -1)

    def log_prob_shared(self, h: Tensor | None, ids: Tensor, *, context: Tensor | None = None) -> Tensor:
        """The same for ids of any shape."""
        return self._log_frequency(ids).to(torch.float32)

    def log_prob_all(self, h: Tensor | None = None) -> Tensor:
        """The estimate for every class, [B, C]; its sum is one only where the estimate is right."""
        device = next(self.buffers()).device
        found = self._log_frequency(torch.arange(self.num_classes, device=device)).to(torch.float32)
        return found.expand(1 if h is None else self._rows_of(h), -1)

    def over(self, num_classes: int, live: Tensor | None = None) -> InBatch:
        """See `Sampler.over`. A `StreamingFrequency` with a bucket per class forgets classes that are not live."""
        self._check_size(num_classes, live)
        frequency: StreamingFrequency | Sampler
        if isinstance(self.frequency, Sampler):
            frequency = self.frequency.over(num_classes, live)
        else:
            frequency = copy.deepcopy(self.frequency)
            if frequency.num_buckets == self.num_classes and frequency.kind == "gap":
                frequency.resize(num_classes, live)
        extra = None if self.extra is None else self.extra.over(num_classes, live)
        return InBatch(num_classes, frequency, extra=extra, group=self.group)

    def _log_frequency(self, ids: Tensor) -> Tensor:
        if isinstance(self.frequency, StreamingFrequency):
            return self.frequency.log_q(ids).to(torch.float64)
        return self.frequency.log_prob_shared(None, ids).to(torch.float64)

    def update(self, ids: Tensor, rows: Tensor, bias: Tensor | None = None) -> None:
        """Passes changed rows to the second sampler."""
        if self.extra is not None and self.extra.follows_rows:
            of_extra: Any = self.extra.update
            of_extra(ids, rows, bias) if self.extra.has_bias else of_extra(ids, rows)

    def follow(self, ids: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
        """Passes recorded ids to the second sampler."""
        if self.extra is not None and self.extra.follows_rows:
            self.extra.follow(ids, weight, bias if self.extra.has_bias else None)

    def rebuild(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Passes the class table to the second sampler."""
        if self.extra is not None and self.extra.follows_rows:
            of_extra: Any = self.extra.rebuild
            of_extra(weight, bias) if self.extra.has_bias else of_extra(weight)


_NO_WEIGHT = 300.0  # log q of an entry that is not a draw: exp(-300) of its score


def _rows(h: Tensor | None, targets: Tensor) -> dict[str, Any]:
    return {} if h is not None else {"batch_size": targets.shape[0]}
