"""How a sampler that depends on the class table follows it: which rows were touched, and when it is updated."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from samplex_cuda import _device
from samplex_cuda._checks import describe
from samplex_cuda.optim.writes import version_of, watch
from samplex_cuda.samplers.base import Sampler, distinct_ids, mark_ids

__all__ = ["Staleness", "TableFollower"]


class Staleness(NamedTuple):
    """How far a sampler that follows the class table lags behind it.

    Attributes:
        steps: training forwards since the sampler was last brought up to date.
        rows: class rows that may have changed since then; -1 if that is not known (all of them may have).

    Example:
        >>> import torch, samplex_cuda as sx
        >>> head = sx.SampledClassifier(8, 100, sx.samplers.Uniform(100), num_samples=5)
        >>> head.staleness()
        Staleness(steps=0, rows=0)
    """

    steps: int
    rows: int


class TableFollower:
    """Records the rows of a class table that training touches, and updates the sampler by a policy.

    Args:
        policy: "step", an int k, "epoch", or None: nothing is recorded.
        num_classes: rows of the table; recorded ids outside of it are dropped. None: unknown.
        auto: nobody asked for this policy; the sampler may choose another one when it sees the first batch.

    Example:
        >>> import torch
        >>> from samplex_cuda.heads.follow import TableFollower
        >>> follower = TableFollower("step")
        >>> follower.touch(torch.tensor([3, 4, 3]))
        >>> follower.staleness()
        Staleness(steps=1, rows=-1)
    """

    def __init__(self, policy: str | int | None, num_classes: int | None = None, auto: bool = False) -> None:
        self.policy = policy
        self.auto = auto
        self.num_classes = num_classes
        self.active = policy is not None
        self.touched: list[Tensor] = []  # ids since the sampler was brought up to date
        self._seen: Tensor | None = None  # bool [C], further ones, once many were recorded on a CPU
        self._recorded = 0  # how many ids `touched` was given since then
        self.steps = 0  # training forwards since then
        self.stale = policy is not None  # whether rows may have changed that nobody recorded
        self._buffer: Tensor | None = None  # ids of the last step on a device
        self._known: dict[str, int] = {}  # versions of weight and bias after the last write that is accounted for
        self._tables: dict[str, Any] = {}  # weak references to them

    # -------------------------------------------------------------------------------------------- writes
    def look(self, weight: Tensor, bias: Tensor | None) -> None:
        """Notices writes to the table that no optimizer made: `stale` then, because all rows may have changed."""
        if self.policy == "epoch":
            return  # all rows count as changed until the next epoch anyway
        for name, t in (("weight", weight), ("bias", bias)):
            if t is None:
                continue
            before, version = self._tables.get(name), version_of(t)
            if before is None or before() is not t:
                self._tables[name] = weakref.ref(t)
                watch(t, self)
                self.stale = self.stale or before is not None
            elif self._known.get(name) != version:
                self.stale = True
            self._known[name] = version

    def accept(self) -> None:
        """Takes the table as it is: code that wrote to it says which rows."""
        for name, reference in self._tables.items():
            if (t := reference()) is not None:
                self._known[name] = version_of(t)

    def before_write(self, parameter: Tensor) -> None:
        """An optimizer is about to write to rows with a gradient, which are recorded."""
        for name, reference in self._tables.items():
            if reference() is parameter and self._known.get(name) != version_of(parameter):
                self.stale = True

    def after_write(self, parameter: Tensor) -> None:
        """It has written."""
        for name, reference in self._tables.items():
            if reference() is parameter:
                self._known[name] = version_of(parameter)

    def __deepcopy__(self, memo: dict[int, Any]) -> TableFollower:
        """A copy belongs to another table."""
        other = TableFollower(self.policy, self.num_classes, self.auto)
        other.touched, other.steps, other.stale = [t.clone() for t in self.recorded()], self.steps, self.stale
        return other

    def __reduce__(self) -> tuple[Any, ...]:
        """The same for pickles."""
        return _remade, (self.policy, self.num_classes, self.recorded(), self.steps, self.stale, self.auto)

    # -------------------------------------------------------------------------------------------- the policy
    def settle(self, sampler: Any, batch: int, num_samples: int, shared: bool) -> None:
        """Lets the sampler choose how often it follows, by the sizes of the first batch, unless the user has."""
        if self.auto and self.policy == "step":
            every = sampler.follow_interval(batch, num_samples, shared) if isinstance(sampler, Sampler) else 1
            self.policy = "step" if every == 1 else every
        self.auto = False

    def due(self) -> bool:
        """Whether the sampler must be brought up to date before the next training forward."""
        if self.stale:
            return True
        if self.touched and _device.captured(self.touched[0].device):
            return True  # a graph repeats this step: it must hold the update
        return self.steps >= (1 if self.policy == "step" else self.policy) if self.policy != "epoch" else False  # type: ignore[operator]

    def touch(self, *ids: Tensor) -> None:
        """Counts a training forward that touched these rows; ids outside of the table are dropped later."""
        self.steps += 1
        if self.policy == "epoch":
            return
        if not _device.host_waits(ids[0]):
            self._record(ids)
            return
        # Of one size and in one place in every step, so that a CUDA graph of a step leaves its ids to the next one.
        size, spare = sum(i.numel() for i in ids), self._buffer
        fits = spare is not None and spare.numel() == size and spare.device == ids[0].device
        if not fits or any(t is spare for t in self.touched):
            spare = ids[0].new_empty(size)
        self._buffer = torch.cat(ids, out=spare)
        self.touched.append(self._buffer)

    def mark(self, ids: list[Tensor] | None = None) -> None:
        """Rows that changed outside of a training forward; None: any of them may have."""
        if self.policy is None:
            return
        if ids is None:
            self.stale = True
        else:
            self.accept()
            if self.policy != "epoch":
                self._record(ids)

    def _record(self, ids: Sequence[Tensor]) -> None:
        """Adds to the touched rows. On a CPU a mark for each class replaces lists longer than C."""
        self.touched += ids
        if self.num_classes is None or not ids or _device.host_waits(ids[0]):
            return
        self._recorded += sum(i.numel() for i in ids)
        if self._recorded >= self.num_classes:
            if self._seen is None:
                self._seen = torch.zeros(self.num_classes, dtype=torch.bool)
            mark_ids(self._seen, torch.cat(self.touched))
            self.touched, self._recorded = [], 0

    def recorded(self) -> list[Tensor]:
        """The rows touched since the sampler was brought up to date, with copies; changes nothing."""
        return self.touched if self._seen is None else [*self.touched, self._seen.nonzero().view(-1)]

    def end_epoch(self) -> None:
        """The head goes from evaluation to training."""
        if self.policy == "epoch" and self.steps:
            self.stale = True

    def staleness(self) -> Staleness:
        """How far the sampler lags behind."""
        if self.policy is None:
            return Staleness(0, 0)
        if self.stale or (self.policy == "epoch" and self.steps):
            return Staleness(self.steps, -1)
        return Staleness(self.steps, self.changed().numel() if self.recorded() else 0)

    def changed(self) -> Tensor:
        """Distinct recorded rows of the table, ascending; at least one list must have been recorded.

        A loss on a GPU does not raise on an id out of range, and a checkpoint may hold one: these are dropped here.
        """
        return distinct_ids(torch.cat(self.recorded()), self.num_classes)

    @torch.no_grad()
    def flush(self, sampler: Any, weight: Tensor, bias: Tensor | None) -> None:
        """Brings the sampler up to date: the rows touched since the last time, or all of them."""
        with_bias = getattr(sampler, "has_bias", False) and bias is not None
        lists = self.recorded()
        if self.stale or self.policy is None or (self.policy == "epoch" and self.steps):
            sampler.rebuild(weight, bias) if with_bias else sampler.rebuild(weight)
        elif lists and isinstance(sampler, Sampler):
            sampler.follow(lists[0] if len(lists) == 1 else torch.cat(lists), weight, bias if with_bias else None)
        elif lists:
            ids = self.changed()
            rows = weight[ids]
            sampler.update(ids, rows, bias[ids]) if with_bias and bias is not None else sampler.update(ids, rows)
        self.reset()
        self.look(weight, bias if with_bias else None)
        self.stale = False

    def reset(self, *, stale: bool = False) -> None:
        """Forgets what was recorded."""
        self.touched, self._seen, self._recorded, self.steps, self.stale = [], None, 0, 0, stale

    # -------------------------------------------------------------------------------------------- checkpoints
    def lag(self) -> Tensor | None:
        """What a checkpoint must hold besides the sampler: int64 [2 + n] of steps, stale, touched ids; or None."""
        lists = self.recorded()
        if self.policy is None or not (self.steps or lists or self.stale):
            return None
        ids = self.changed().cpu() if lists else torch.empty(0, dtype=torch.int64)
        return torch.cat([torch.tensor([self.steps, int(self.stale)]), ids])

    def restore(self, lag: Tensor | None, device: torch.device) -> None:
        """The state that `lag` described; None: the sampler was up to date."""
        self.reset()
        if lag is None or self.policy is None:
            return
        dense = isinstance(lag, Tensor) and lag.layout is torch.strided
        if not dense or lag.dtype != torch.int64 or lag.dim() != 1 or lag.shape[0] < 2:
            raise ValueError(f"SampledClassifier: sampler_lag must be int64 [2 + n], got {describe(lag)}")
        self.steps, self.stale = max(0, int(lag[0])), bool(lag[1])
        if lag.shape[0] > 2:
            self.touched = [lag[2:].to(device)]


def _remade(
    policy: str | int | None,
    num_classes: int | None,
    touched: list[Tensor],
    steps: int,
    stale: bool,
    auto: bool = False,
) -> TableFollower:
    made = TableFollower(policy, num_classes, auto)
    made.touched, made.steps, made.stale = touched, steps, stale
    return made
