"""Row updates in plain torch: the oracle of `torch.ops.samplex.row_sgd_`, `row_adagrad_` and `row_adam_`.

Each function changes rows `row_ids` of `weight` and of its state in place, as `torch.optim` would change a parameter
whose only rows they were.
"""

from __future__ import annotations

from torch import Tensor

__all__ = ["row_adagrad", "row_adam", "row_sgd"]


def row_sgd(
    weight: Tensor,
    momentum_buffer: Tensor | None,
    row_ids: Tensor,
    rows: Tensor,
    *,
    lr: float,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
) -> None:
    """Stochastic gradient descent.

    Args:
        weight: [C, d] or [C].
        momentum_buffer: of the weight's shape, or None for no momentum.
        row_ids: int64 [n], distinct.
        rows: [n, d] or [n], their gradients.
        lr: learning rate.
        momentum: factor of the buffer.
        weight_decay: added to the gradient, times the weight.
        nesterov: look ahead.

    Example:
        >>> import torch
        >>> from samplex_cuda.reference.row_rules import row_sgd
        >>> weight = torch.zeros(3, 2)
        >>> row_sgd(weight, None, torch.tensor([1]), torch.ones(1, 2), lr=0.5)
        >>> weight.tolist()
        [[0.0, 0.0], [-0.5, -0.5], [0.0, 0.0]]
    """
    w = weight[row_ids]
    g = rows.to(w.dtype) + weight_decay * w
    if momentum_buffer is not None:
        buffer = momentum * momentum_buffer[row_ids] + g
        momentum_buffer[row_ids] = buffer
        g = g + momentum * buffer if nesterov else buffer
    weight[row_ids] = w - lr * g


def row_adagrad(
    weight: Tensor,
    sum: Tensor,
    row_ids: Tensor,
    rows: Tensor,
    *,
    lr: float,
    eps: float = 1e-10,
    weight_decay: float = 0.0,
) -> None:
    """Adagrad; row-wise where `sum` is [C] and `weight` [C, d]: it grows by the mean square of a row's gradient.

    Args:
        weight: [C, d] or [C].
        sum: of the weight's shape, or [C].
        row_ids: int64 [n], distinct.
        rows: [n, d] or [n], their gradients.
        lr: learning rate, after its decay.
        eps: added to the root.
        weight_decay: added to the gradient, times the weight.

    Example:
        >>> import torch
        >>> from samplex_cuda.reference.row_rules import row_adagrad
        >>> weight, total = torch.zeros(3, 2), torch.zeros(3)
        >>> row_adagrad(weight, total, torch.tensor([1]), torch.ones(1, 2), lr=0.5)
        >>> weight[1].tolist(), total.tolist()
        ([-0.5, -0.5], [0.0, 1.0, 0.0])
    """
    w = weight[row_ids]
    g = rows.to(w.dtype) + weight_decay * w
    by_row = sum.dim() < weight.dim()
    squares = (g * g).mean(1) if by_row else g * g
    sum[row_ids] += squares
    root = sum[row_ids].sqrt() + eps
    weight[row_ids] = w - lr * g / (root.unsqueeze(1) if by_row else root)


def row_adam(
    weight: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    row_ids: Tensor,
    rows: Tensor,
    *,
    lr: float,
    step: int,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decoupled_weight_decay: bool = False,
) -> None:
    """Adam.

    Args:
        weight: [C, d] or [C].
        exp_avg: of the weight's shape.
        exp_avg_sq: of the weight's shape.
        row_ids: int64 [n], distinct.
        rows: [n, d] or [n], their gradients.
        lr: learning rate.
        step: number of this update, from 1.
        betas: of the two averages.
        eps: added to the root.
        weight_decay: added to the gradient, times the weight.
        decoupled_weight_decay: shrink the weight instead, as AdamW does.

    Example:
        >>> import torch
        >>> from samplex_cuda.reference.row_rules import row_adam
        >>> weight, first, second = torch.zeros(3, 2), torch.zeros(3, 2), torch.zeros(3, 2)
        >>> row_adam(weight, first, second, torch.tensor([1]), torch.ones(1, 2), lr=0.5, step=1)
        >>> weight[1].round(decimals=5).tolist()
        [-0.5, -0.5]
    """
    w = weight[row_ids]
    g = rows.to(w.dtype)
    if decoupled_weight_decay:
        w = w * (1 - lr * weight_decay)
    else:
        g = g + weight_decay * w
    exp_avg[row_ids] = betas[0] * exp_avg[row_ids] + (1 - betas[0]) * g
    exp_avg_sq[row_ids] = betas[1] * exp_avg_sq[row_ids] + (1 - betas[1]) * g * g
    root = (exp_avg_sq[row_ids] / (1 - betas[1] ** step)).sqrt() + eps
    weight[row_ids] = w - lr / (1 - betas[0] ** step) * exp_avg[row_ids] / root
