"""Gradient clipping over sparse and dense gradients together."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from samplex_cuda._checks import check_number, describe
from samplex_cuda.ops.loss_types import acc_dtype
from samplex_cuda.optim.fusion import fusion_of
from samplex_cuda.optim.row_gradient import RowGradient

__all__ = ["clip_grad_norm_"]


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_` for sparse and dense gradients together, without making a dense one.

    Args:
        parameters: whose gradients are clipped, in place, by the norm of all of them. A sparse gradient is coalesced
            first.
        max_norm: the largest norm allowed.
        norm_type: p of the norm; `inf` for the largest entry.
        error_if_nonfinite: raise where the norm is nan or infinite, before anything is changed.

    Returns:
        The norm before clipping, a scalar.

    Example:
        >>> import torch, samplex_cuda as sx
        >>> weight = torch.zeros(3, 2, requires_grad=True)
        >>> (3 * torch.nn.functional.embedding(torch.tensor([1, 1]), weight, sparse=True)).sum().backward()
        >>> norm = sx.optim.clip_grad_norm_([weight], max_norm=1.0)
        >>> round(float(norm), 4), round(float(weight.grad.to_dense().norm()), 4)
        (8.4853, 1.0)
    """
    max_norm = check_number("clip_grad_norm_", "max_norm", max_norm, 0.0, infinite=True)
    kind = check_number("clip_grad_norm_", "norm_type", norm_type, 0.0, infinite=True)
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    for p in parameters:
        if fusion_of(p) is not None:
            raise ValueError(
                "clip_grad_norm_: a parameter must not belong to a head with a fused optimizer, whose gradient is used "
                f"up inside backward before there is a global norm (leave the head unfused, e.g. with "
                f"sx.optim.Combined); got {describe(p)}"
            )
    values = []
    for p in parameters:
        if p.grad is None:
            continue
        if isinstance(p.grad, RowGradient):
            values.append(p.grad.touched()[1])
        elif p.grad.is_sparse:
            p.grad = p.grad.coalesce()
            values.append(p.grad._values())
        else:
            values.append(p.grad)
    if not values:
        return torch.tensor(0.0)
    home = values[0].device
    norms = [torch.linalg.vector_norm(v, kind, dtype=acc_dtype(v.dtype)) for v in values if v.numel()]
    if not norms:
        return torch.zeros((), device=home)
    total = torch.linalg.vector_norm(torch.stack([norm.to(home) for norm in norms]), kind)
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError(f"clip_grad_norm_: the norm of the gradients must be finite, got {float(total)}")
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for v in values:
        v.mul_(factor.to(device=v.device, dtype=v.dtype))
    return total
