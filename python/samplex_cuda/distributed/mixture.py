"""`Mixture` over a sharded class table: its components are spread over the ranks where they depend on the table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from samplex_cuda.distributed.layout import Layout
from samplex_cuda.distributed.samplers import ShardedSampler
from samplex_cuda.samplers.in_batch import InBatch
from samplex_cuda.samplers.mixture import Mixture

__all__ = ["ShardedMixture"]


class ShardedMixture(Mixture):
    """A mixture with components that are spread over ranks, and others that every rank has.

    All ranks have the same key and the same rows, so that they choose the same component for each draw.

    Args:
        parts: the components, spread over the ranks or replicated.
        weights: fp64 [K], of the components.
        layout: which rank holds which class.
    """

    collective = True

    def __init__(self, parts: list[Any], weights: Tensor, layout: Layout) -> None:
        super().__init__([(part, 1.0) for part in parts])
        self.weights.copy_(weights)
        self.layout = layout

    def local_prior(self, h: Tensor) -> Callable[[slice], Tensor]:
        """See `ShardedSampler.local_prior`."""
        classes = self.layout.classes(h.device)

        def term(part: Any) -> Callable[[slice], Tensor]:
            if hasattr(part, "local_prior"):
                return part.local_prior(h)
            return lambda rows: part.log_prob_all(h[rows])[..., classes]

        terms = [term(part) for part in self._parts()]

        def of_rows(rows: slice) -> Tensor:
            found = [of_part(rows).expand(h[rows].shape[0], -1).double() for of_part in terms]
            return (torch.stack(found, -1) + self.weights.log()).logsumexp(-1).float()

        return of_rows

    def follow(self, ids: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
        """Classes [n] that may have changed, and this rank's tables [rows, d] and [rows]; every rank must call it."""
        for part in self._parts():
            if part.follows_rows:
                part.follow(ids, weight, bias if part.has_bias else None)

    def rebuild(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Rebuilds all rows from this rank's tables; every rank must call it."""
        for part in self._parts():
            if part.follows_rows:
                part.rebuild(weight, bias if part.has_bias else None)

    @property
    def unfilled(self) -> bool:
        """Whether a component has no numbers yet."""
        return any(getattr(part, "unfilled", False) for part in self._parts())

    def attach(self, whole: tuple[Tensor, Tensor | None], weight: Tensor, bias: Tensor | None) -> None:
        """See `ShardedExact.attach`."""
        for part in self._parts():
            if hasattr(part, "attach"):
                part.attach(whole, weight, bias)

    def adopt(self, state_dict: dict[str, Any], prefix: str) -> None:
        """See `ShardedSampler.adopt`; a tree with a base becomes its parts."""
        units = state_dict.get(f"{prefix}base_units")
        if isinstance(units, Tensor) and units.numel():
            self._adopt_tree(state_dict, prefix)
        for number, part in enumerate(self._parts()):
            if isinstance(part, ShardedSampler):
                part.adopt(state_dict, f"{prefix}samplers.{number}.")

    def _adopt_tree(self, state_dict: dict[str, Any], prefix: str) -> None:
        share = state_dict.pop(f"{prefix}base_share")
        last = len(self._parts()) - 1  # a tree of no share is left out
        for name in ("nodes", "leaf_class", "class_leaf", "mean", "projection", "fit_options"):
            value = state_dict.pop(f"{prefix}{name}", None)
            if last and value is not None:
                state_dict[f"{prefix}samplers.0.{name}"] = value
        state_dict[f"{prefix}samplers.{last}.weights"] = state_dict.pop(f"{prefix}base_units")
        state_dict[f"{prefix}weights"] = torch.stack([1.0 - share, share])[-last - 1 :]


class ShardedInBatch(InBatch):
    """In-batch negatives whose second sampler is spread over ranks; the head gives it the targets of all of them.

    Args:
        sampler: of the unsharded head.
        extra: its second sampler, spread over the ranks.
    """

    collective = True

    def __init__(self, sampler: InBatch, extra: Any) -> None:
        super().__init__(sampler.num_classes, sampler.frequency)
        self.extra = extra

    @property
    def unfilled(self) -> bool:
        """Whether the second sampler has no numbers yet."""
        return getattr(self.extra, "unfilled", False)

    def attach(self, whole: tuple[Tensor, Tensor | None], weight: Tensor, bias: Tensor | None) -> None:
        """See `ShardedExact.attach`."""
        extra: Any = self.extra
        if hasattr(extra, "attach"):
            extra.attach(whole, weight, bias)

    def adopt(self, state_dict: dict[str, Any], prefix: str) -> None:
        """See `ShardedSampler.adopt`."""
        extra: Any = self.extra
        extra.adopt(state_dict, f"{prefix}extra.")
