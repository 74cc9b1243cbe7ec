"""A warning where `torch.nn.utils` clips gradients that a fused head has used up.

Inside `torch.nn.utils.clip_grad_norm_` a parameter without a gradient is left out without a word, and the table of a
fused head has none. Torch offers no hook there, so its function is wrapped when the first head is fused.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = ["watch_torch_clip"]

_state = {"watched": False, "warned": False}


def watch_torch_clip(is_fused: Callable[[Tensor], bool]) -> None:
    """Has torch's clipping warn once per process where it is given a parameter of a fused head.

    Args:
        is_fused: whether a parameter belongs to one.
    """
    if _state["watched"]:
        return
    _state["watched"] = True
    module: Any = torch.nn.utils.clip_grad
    # `clip_grad_norm_` looks this up at each call, also where somebody imported it by name before.
    if hasattr(module, "_clip_grads_with_norm_"):
        module._clip_grads_with_norm_ = _watching(module._clip_grads_with_norm_, "clip_grad_norm_", is_fused)
    module.clip_grad_value_ = _watching(module.clip_grad_value_, "clip_grad_value_", is_fused)
    torch.nn.utils.clip_grad_value_ = module.clip_grad_value_


def _watching(clip: Any, name: str, is_fused: Callable[[Tensor], bool]) -> Any:
    @functools.wraps(clip)
    def watched(parameters: Tensor | Iterable[Tensor], *args: Any, **kwargs: Any) -> Any:
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if not _state["warned"] and any(is_fused(p) for p in parameters):
            _state["warned"] = True
            warnings.warn(
                f"torch.nn.utils.{name}: parameters must not belong to a head with a fused optimizer: its class rows "
                "were updated inside backward and are not clipped. Leave the head unfused, and clip with "
                "sx.optim.Combined (its row gradients are clipped by torch too) or sx.optim.clip_grad_norm_",
                UserWarning,
                stacklevel=3,
            )
        return clip(parameters, *args, **kwargs)

    return watched
