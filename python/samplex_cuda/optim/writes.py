"""Who wrote to a parameter: an optimizer, whose rows are known, or somebody else.

The version counter of a tensor moves with every write in place. An optimizer reports its writes here, before and after;
a watcher that finds the counter moved otherwise knows that rows have changed that nobody recorded.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["Watcher", "version_of", "watch", "writing", "written"]

_watched: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # parameter -> weak reference to its watcher
_hooks: list[Any] = []


class Watcher(Protocol):
    """Wants to know of writes to a parameter."""

    def before_write(self, parameter: Tensor) -> None:
        """An optimizer is about to write."""

    def after_write(self, parameter: Tensor) -> None:
        """It has written."""


def version_of(t: Tensor) -> int:
    """The version counter of a tensor; 0 where it has none (made in inference mode).

    Example:
        >>> import torch
        >>> from samplex_cuda.optim.writes import version_of
        >>> t = torch.zeros(3)
        >>> before = version_of(t)
        >>> version_of(t.add_(1)) - before
        1
    """
    return 0 if t.is_inference() else t._version


def watch(parameter: Tensor, watcher: Watcher) -> None:
    """Tells `watcher` of every write of an optimizer to `parameter`; held weakly, the last one counts.

    Args:
        parameter: a leaf.
        watcher: told before and after each step of a `torch.optim.Optimizer` that owns it, and by a fused optimizer.
    """
    found = _watched.get(parameter)
    if found is None or found() is not watcher:
        _watched[parameter] = weakref.ref(watcher)
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(lambda optimizer, *_: _tell(optimizer, writing)))
        _hooks.append(register_optimizer_step_post_hook(lambda optimizer, *_: _tell(optimizer, written)))


def _tell(optimizer: torch.optim.Optimizer, what: Any) -> None:
    for group in optimizer.param_groups:
        what(group["params"])


def _watcher(parameter: Tensor) -> Watcher | None:
    found = _watched.get(parameter)
    return None if found is None else found()


def writing(parameters: Sequence[Tensor]) -> None:
    """A known write to `parameters` begins."""
    if _watched.data:  # `len` would take as long as the rest
        for p in parameters:
            if (watcher := _watcher(p)) is not None:
                watcher.before_write(p)


def written(parameters: Sequence[Tensor]) -> None:
    """A known write to `parameters` is done."""
    if _watched.data:
        for p in parameters:
            if (watcher := _watcher(p)) is not None:
                watcher.after_write(p)
