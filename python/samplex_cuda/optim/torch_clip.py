"""What `torch.nn.utils` says where it clips the gradients of class tables.

Inside `torch.nn.utils.clip_grad_norm_` a parameter without a gradient is left out without a word, and the table of a
fused head has none: it warns. The sparse gradient of an unfused head has no norm there: the error names the way out.
Torch offers no hook, so its functions are wrapped when the first head is fused or made.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = ["watch_sparse_norm", "watch_torch_clip"]

_state = {"watched": False, "warned": False, "names_sparse": False}


def watch_sparse_norm() -> None:
    """Has torch's gradient norm name the way out where it is given a sparse gradient, which it cannot take."""
    if _state["names_sparse"]:
        return
    _state["names_sparse"] = True
    module: Any = torch.nn.utils.clip_grad
    if hasattr(module, "_get_total_norm"):
        _put_inside(module, "_get_total_norm", _naming_sparse)


def _naming_sparse(norm: Any) -> Any:
    @functools.wraps(norm)
    def named(tensors: Tensor | Iterable[Tensor], *args: Any, **kwargs: Any) -> Any:
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        for grad in tensors:
            if grad.layout is torch.sparse_coo:
                raise TypeError(
                    f"torch.nn.utils.clip_grad_norm_: gradients must be dense, got a sparse one {list(grad.shape)} (of "
                    "a class table or an embedding): make one optimizer of the model, sx.optim.Combined(dense=..., "
                    "rows=...), whose row gradients torch clips, or call sx.optim.clip_grad_norm_"
                )
        return norm(tensors, *args, **kwargs)

    return named


def watch_torch_clip(is_fused: Callable[[Tensor], bool]) -> None:
    """Has torch's clipping warn once per process where it is given a parameter of a fused head.

    Args:
        is_fused: whether a parameter belongs to one.
    """
    if _state["watched"]:
        return
    _state["watched"] = True
    module: Any = torch.nn.utils.clip_grad
    # `clip_grad_norm_` ends in the first of them, which is `torch.nn.utils.clip_grads_with_norm_` too.
    for name, said in (("_clip_grads_with_norm_", "clip_grad_norm_"), ("clip_grad_value_", "clip_grad_value_")):
        if hasattr(module, name):
            _put_inside(module, name, functools.partial(_watching, name=said, is_fused=is_fused))


def _put_inside(module: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    """Wraps a function of torch for everybody who has imported it, by whatever name.

    Torch's functions are decorated: what the decorator calls is exchanged. Without a decorator, the name is.
    """
    found = getattr(module, name)
    inside = getattr(found, "__wrapped__", None)
    for cell in getattr(found, "__closure__", None) or ():
        if inside is not None and cell.cell_contents is inside:
            cell.cell_contents = wrap(inside)
            return
    watched = wrap(found)
    for owner in (module, torch.nn.utils):
        for other in (name, name.lstrip("_")):
            if getattr(owner, other, None) is found:
                setattr(owner, other, watched)


def _watching(clip: Any, name: str, is_fused: Callable[[Tensor], bool]) -> Any:
    @functools.wraps(clip)
    def watched(parameters: Tensor | Iterable[Tensor], *args: Any, **kwargs: Any) -> Any:
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        most = args[0] if args else next(iter(kwargs.values()), 0.0)
        # With a norm of inf nothing is clipped: somebody measures, e.g. the Trainer of transformers.
        if not _state["warned"] and most != math.inf and any(is_fused(p) for p in parameters):
            _state["warned"] = True
            warnings.warn(
                f"torch.nn.utils.{name}: parameters must not belong to a head with a fused optimizer: its class rows "
                "were updated inside backward and are not clipped. Leave the head unfused, and clip with "
                "sx.optim.Combined (its row gradients are clipped by torch too) or sx.optim.clip_grad_norm_",
                UserWarning,
                stacklevel=4,
            )
        return clip(parameters, *args, **kwargs)

    return watched
