"""Passes over a chunk of exact logits in plain torch: the specification of `samplex_cuda.ops.predict`."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["predict_dots", "predict_grad", "predict_lse", "predict_topk"]


def _logits(dots: Tensor, bias: Tensor | None, scale: float, absolute: bool) -> Tensor:
    s = scale * (dots if bias is None else dots + bias)
    return s.abs() if absolute else s


def predict_lse(
    dots: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    first: int,
    scale: float,
    absolute: bool,
    lse: Tensor,
    positive: Tensor,
    total: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The new lse [B], positive [B, P] and total [B].

    Example:
        >>> import torch
        >>> from samplex_cuda.reference.predict import predict_lse
        >>> lse, positive = torch.full((1,), -torch.inf, dtype=torch.float64), torch.zeros(1, 1)
        >>> target = torch.tensor([[2]])
        >>> predict_lse(torch.zeros(1, 4), None, target, None, 0, 1.0, False, lse, positive)[0].exp()
        tensor([4.], dtype=torch.float64)
    """
    s = _logits(dots, bias, scale, absolute)
    column = target - first
    here = (column >= 0) & (column < s.shape[1])
    positive = torch.where(here, s.gather(1, column.clamp(0, s.shape[1] - 1)), positive)
    if total is not None:
        total = total + (s if class_weight is None else s * class_weight).double().sum(1)
    return torch.logaddexp(lse, s.double().logsumexp(1)), positive, total


def predict_grad(
    dots: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    first: int,
    scale: float,
    absolute: bool,
    lse: Tensor,
    coef: Tensor,
    target_coef: Tensor,
    smooth: Tensor | None = None,
) -> Tensor:
    """The gradient [B, n] with respect to dots.

    Example:
        >>> import torch
        >>> from samplex_cuda.reference.predict import predict_grad
        >>> one, lse = torch.ones(1), torch.tensor([4.0]).log()
        >>> predict_grad(torch.zeros(1, 4), None, torch.tensor([[2]]), None, 0, 1.0, False, lse, one, one.view(1, 1))
        tensor([[ 0.2500,  0.2500, -0.7500,  0.2500]])
    """
    s = _logits(dots, bias, scale, absolute)
    slope = scale * (torch.sign(scale * (dots if bias is None else dots + bias)) if absolute else torch.ones_like(s))
    grad = coef.unsqueeze(1) * (s - lse.unsqueeze(1)).exp().to(s.dtype)
    if smooth is not None:
        grad = grad - smooth.unsqueeze(1) * (1.0 if class_weight is None else class_weight)
        ignored = (coef == 0) & (smooth == 0)
    else:
        ignored = coef == 0
    grad = torch.where(ignored.unsqueeze(1), 0.0, grad * slope)
    classes = torch.arange(first, first + s.shape[1], device=s.device)
    hit = target.unsqueeze(2) == classes  # [B, P, n]
    return grad - (torch.where(hit, target_coef.unsqueeze(2), 0.0)).sum(1) * slope


def predict_topk(
    dots: Tensor, bias: Tensor | None, first: int, scale: float, absolute: bool, values: Tensor, ids: Tensor
) -> tuple[Tensor, Tensor]:
    """The new values [B, k'] and ids [B, k'], k' = min(k, first + n).

    Example:
        >>> import torch
        >>> from samplex_cuda.reference.predict import predict_topk
        >>> values, ids = torch.empty(1, 2), torch.empty(1, 2, dtype=torch.int64)
        >>> predict_topk(torch.tensor([[1.0, 3.0, 2.0]]), None, 0, 1.0, False, values, ids)
        (tensor([[3., 2.]]), tensor([[1, 2]]))
    """
    k, held = values.shape[1], min(values.shape[1], first)
    s = _logits(dots, bias, scale, absolute)
    new = torch.arange(first, first + s.shape[1], device=s.device).expand(s.shape[0], -1)
    # What is held comes first and has the lower ids, so a stable order keeps ties ascending.
    merged, order = torch.cat([values[:, :held], s], 1).sort(dim=1, descending=True, stable=True)
    return merged[:, :k], torch.cat([ids[:, :held], new], 1).gather(1, order)[:, :k]


def predict_dots(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """Products [B, n] of each row with its candidates, -inf for ids outside [0, C).

    Example:
        >>> import torch
        >>> from samplex_cuda.reference.predict import predict_dots
        >>> predict_dots(torch.ones(1, 2), torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1, -1, 0]]))
        tensor([[7., -inf, 3.]])
    """
    known = (ids >= 0) & (ids < weight.shape[0])
    rows = weight[torch.where(known, ids, 0)]
    return torch.where(known, torch.einsum("bd,bnd->bn", hidden, rows), -torch.inf)
