"""Samplers over some of the classes, for those that cannot leave out retired ones themselves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from samplex_cuda import _device
from samplex_cuda._checks import describe
from samplex_cuda.draw import Draw
from samplex_cuda.rng import Key
from samplex_cuda.samplers.base import Exclude, Sampler, check_int64, distinct_ids
from samplex_cuda.samplers.midx import MIDX
from samplex_cuda.samplers.stored import shape_error

__all__ = ["LiveClasses", "over_rows"]


def over_rows(sampler: Sampler, place: Tensor, live: Tensor | None) -> Sampler:
    """A sampler that keeps rows of the class table, over other classes.

    Args:
        sampler: with `_taken`.
        place: int64 [C], the class of `sampler` that each new class is; -1: it is new.
        live: bool [C], the classes that are drawn; None: all.

    Returns:
        A sampler of the same kind if all classes are drawn, else `LiveClasses` of one over the live classes.
    """
    if live is None or bool(live.all()):
        return sampler._taken(place)
    ids = live.to(place.device).nonzero().squeeze(1)
    return LiveClasses(sampler._taken(place[ids]), ids, place.shape[0])


class LiveClasses(Sampler):
    """A sampler over some of the classes: the others are never drawn and have probability 0.

    `head.retire_classes` makes one of samplers that follow the class table; `over(C)` gives the plain sampler back.

    Args:
        sampler: over the n live classes, numbered from 0.
        ids: int64 [n], their ids, ascending.
        num_classes: C.

    Example:
        >>> import torch
        >>> import samplex_cuda as sx
        >>> from samplex_cuda.samplers.live import LiveClasses
        >>> sampler = LiveClasses(sx.samplers.Uniform(2), torch.tensor([0, 2]), 3)
        >>> sampler.log_prob_all().exp()
        tensor([[0.5000, 0.0000, 0.5000]])
    """

    _op = "live_classes"
    ids: Tensor
    place: Tensor

    def __init__(self, sampler: Sampler, ids: Tensor, num_classes: int) -> None:
        super().__init__()
        check_int64(self._op, "ids", ids)
        good = ids.dim() == 1 and ids.shape[0] == sampler.num_classes and bool((ids.diff() > 0).all())
        if not good or int(ids[0]) < 0 or int(ids[-1]) >= num_classes:
            raise ValueError(
                f"{self._op}: ids must be {sampler.num_classes} ascending classes of [0, {num_classes}), got "
                f"{describe(ids)}"
            )
        self.sampler = sampler
        self.num_classes = num_classes
        self.register_buffer("ids", ids.clone())
        self.register_buffer("place", _places(ids, num_classes))

    @property
    def conditional(self) -> bool:  # type: ignore[override]
        """See `Sampler`: that of the sampler inside."""
        return self.sampler.conditional

    @property
    def follows_rows(self) -> bool:  # type: ignore[override]
        """See `Sampler`: that of the sampler inside."""
        return self.sampler.follows_rows

    @property
    def has_bias(self) -> bool:  # type: ignore[override]
        """See `Sampler`: that of the sampler inside."""
        return self.sampler.has_bias

    @property
    def stratifies(self) -> bool:  # type: ignore[override]
        """See `Sampler`: that of the sampler inside."""
        return self.sampler.stratifies

    @property
    def _needs_context(self) -> bool:  # type: ignore[override]
        return self.sampler._needs_context

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
        stratified: bool = False,
    ) -> Draw:
        """Draw `num_samples` live classes; see `Sampler.sample`."""
        inside: dict[str, Any] = {"stratified": True} if stratified else {}
        draw = self.sampler.sample(
            h, num_samples, shared=shared, key=key, exclude=self._left_out(exclude), context=context,
            batch_size=batch_size, **inside,
        )  # fmt: skip
        return draw._replace(ids=self.ids[draw.ids])

    def log_prob(
        self, h: Tensor | None, ids: Tensor, *, exclude: Exclude | None = None, context: Tensor | None = None
    ) -> Tensor:
        """Log-probability of given ids, -inf for retired ones; see `Sampler.log_prob`."""
        place = self._inside("ids", ids, 0)
        found = self.sampler.log_prob(h, place.clamp(min=0), exclude=self._left_out(exclude), context=context)
        return torch.where(place < 0, -torch.inf, found)

    def log_prob_shared(self, h: Tensor | None, ids: Tensor, *, context: Tensor | None = None) -> Tensor:
        """The same under the distribution of shared draws; see `Sampler.log_prob_shared`."""
        place = self._inside("ids", ids, 0)
        found = self.sampler.log_prob_shared(h, place.clamp(min=0), context=context)
        return torch.where(place < 0, -torch.inf, found)

    def log_prob_all(self, h: Tensor | None = None) -> Tensor:
        """Log-probability of every class, [B, C] float32."""
        found = self.sampler.log_prob_all(h)
        out = torch.full((found.shape[0], self.num_classes), -torch.inf, device=found.device)
        out[:, self.ids] = found
        return out

    def collision(self) -> float | None:
        """See `Sampler.collision`."""
        return self.sampler.collision()

    def update(self, ids: Tensor, rows: Tensor, bias: Tensor | None = None) -> None:
        """Passes changed rows of live classes to the sampler; see `Sampler.update`."""
        place = self._inside("ids", ids, 0)
        there = place >= 0
        part: Any = self.sampler.update
        if self.has_bias:
            part(place[there], rows[there], None if bias is None else bias[there])
        else:
            part(place[there], rows[there])

    def rebuild(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Builds the sampler again from the live rows of the whole class table [C, d] (and bias [C])."""
        self._read_table(self.sampler.rebuild, weight, bias)

    def _read_table(self, part: Any, weight: Tensor, bias: Tensor | None) -> None:
        if self.has_bias:
            part(weight[self.ids], None if bias is None else bias[self.ids])
        else:
            part(weight[self.ids])
        if isinstance(self.sampler, MIDX):
            self.sampler.forget_table()  # a copy of the rows

    @torch.no_grad()
    def follow(self, ids: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
        """These rows of the class table may have changed; see `Sampler.follow`."""
        some = distinct_ids(ids, self.num_classes)
        some = some[self.place[some] >= 0]
        if isinstance(self.sampler, MIDX) and self.sampler.wants_refresh(some.shape[0]):
            self._read_table(self.sampler.refresh, weight, bias)
        else:
            self.update(some, weight[some], bias[some] if self.has_bias and bias is not None else None)

    def follow_interval(self, batch: int, num_samples: int, shared: bool) -> int:
        """See `Sampler.follow_interval`."""
        return self.sampler.follow_interval(batch, num_samples, shared)

    def over(self, num_classes: int, live: Tensor | None = None) -> Sampler:
        """See `Sampler.over`: the plain sampler again if every class is drawn."""
        self._check_size(num_classes, live)
        place = torch.full((num_classes,), -1, dtype=torch.int64, device=self.place.device)
        kept = min(num_classes, self.num_classes)
        place[:kept] = self.place[:kept]
        return over_rows(self.sampler, place, live)

    def _inside(self, name: str, ids: Tensor, least: int) -> Tensor:
        """Numbers of the sampler inside; -1 for retired classes and for -1."""
        check_int64(self._op, name, ids)
        if not _device.host_waits(ids):
            wrong = (ids < least) | (ids >= self.num_classes)
            if bool(wrong.any()):
                also = "" if least == 0 else "-1 or "
                raise IndexError(
                    f"{self._op}: {name} must be {also}in [0, {self.num_classes}), got {int(ids[wrong][0])}"
                )
        return torch.where(ids < 0, -1, self.place[ids.clamp(0, self.num_classes - 1)])

    def _left_out(self, exclude: Exclude | None) -> Exclude | None:
        if isinstance(exclude, Tensor):
            return self._inside("exclude", exclude, -1)
        if isinstance(exclude, tuple | list) and len(exclude) == 2 and isinstance(exclude[1], Tensor):
            return exclude[0], self._inside("exclude", exclude[1], -1)
        return exclude  # None, or the sampler inside says what is wrong

    def _stored_error(self, found: dict[str, Any]) -> str | None:
        ids, place, size = found["ids"], found["place"], self.sampler.num_classes
        for name, t, wanted in (("ids", ids, size), ("place", place, self.num_classes)):
            if wrong := shape_error(name, t, (wanted,), torch.int64, f"[{wanted}]"):
                return f"{wrong}; retire the same classes first"
        inside = bool((ids.diff() > 0).all()) and int(ids[0]) >= 0 and int(ids[-1]) < self.num_classes
        if not inside or not torch.equal(place, _places(ids, self.num_classes)):
            return "ids must be ascending classes, and place their numbers"
        return None

    def extra_repr(self) -> str:
        """How many of how many classes."""
        return f"{self.ids.shape[0]} of {self.num_classes}"


def _places(ids: Tensor, num_classes: int) -> Tensor:
    """The place of each class among ids [n], -1 for others: int64 [C]."""
    place = torch.full((num_classes,), -1, dtype=torch.int64, device=ids.device)
    place[ids] = torch.arange(ids.shape[0], device=ids.device)
    return place
