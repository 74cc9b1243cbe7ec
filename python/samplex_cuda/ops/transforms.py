"""Transforms of torch that the kernels have no formula for: they must say so and not answer 0."""

from __future__ import annotations

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

__all__ = ["differentiated_twice", "refuse_forward_mode", "refuse_functional", "transformed"]

transformed = torch._C._are_functorch_transforms_active
"""Whether a transform of `torch.func` is active."""


def refuse_forward_mode(op: str, *tensors: Tensor | None) -> None:
    """RuntimeError if one of the tensors carries a tangent: `torch.func.jvp`, `jacfwd`, `hessian`, dual numbers.

    Args:
        op: name for the message.
        tensors: what the op would differentiate.

    Example:
        >>> import torch
        >>> from samplex_cuda.ops.transforms import refuse_forward_mode
        >>> refuse_forward_mode("nce", torch.zeros(3), None)
    """
    if forward_ad._current_level < 0:
        return
    for t in tensors:
        if t is not None and t.is_floating_point() and forward_ad.unpack_dual(t).tangent is not None:
            raise RuntimeError(
                f"{op}: forward-mode differentiation (torch.func.jvp, jacfwd, hessian, forward_ad) is not supported; "
                "use backward(), torch.autograd.grad or torch.func.grad"
            )


def differentiated_twice(t: Tensor | None) -> bool:
    """Whether a second `torch.func.grad`, around the innermost one, follows this tensor.

    Args:
        t: as a backward formula sees it; None counts as not followed.
    """
    functorch = torch._C._functorch
    if t is None or not functorch.is_gradtrackingtensor(t):
        return False
    inner = functorch.get_unwrapped(t)
    return functorch.is_gradtrackingtensor(inner) and inner.requires_grad


def refuse_functional(op: str) -> None:
    """RuntimeError inside `torch.func.grad` and its relatives.

    Args:
        op: name for the message.
    """
    if transformed():
        raise RuntimeError(f"{op}: torch.func.grad is not supported; use backward() or torch.autograd.grad")
