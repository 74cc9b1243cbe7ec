"""What a loss forward keeps, in Python: the layout of `saved`, and shapes for the fakes of the ops."""

from __future__ import annotations

import torch
from torch import Tensor

from samplex_cuda._checks import describe
from samplex_cuda.ops.loss_types import REDUCTIONS, Form, Forward, acc_dtype

__all__ = ["fake_gradients", "fake_sizes", "pack_saved", "saved_numbers"]


def fake_sizes(op: str, hidden: Tensor) -> tuple[int, int]:
    """B and d, where no kernel checks the shape."""
    if hidden.dim() != 2:
        raise ValueError(f"{op}: hidden must be [B, d], got {describe(hidden)}")
    return hidden.shape[0], hidden.shape[1]


def fake_gradients(
    hidden: Tensor, target: Tensor, ids: Tensor, num_classes: int, need_rows: bool, with_bias: bool
) -> tuple[Tensor, ...]:
    """Empty tensors of the shapes a loss's backward op gives."""
    acc = acc_dtype(hidden.dtype)
    count = target.numel() + ids.numel()
    capacity = torch.sym_min(count, num_classes) if need_rows else 0
    return (
        torch.empty_like(hidden),
        hidden.new_empty((capacity,), dtype=torch.int64),
        hidden.new_empty((capacity, hidden.shape[1]), dtype=acc),
        hidden.new_empty((capacity if with_bias else 0,), dtype=acc),
        hidden.new_empty((1,), dtype=torch.int64),
    )


def pack_saved(
    row_loss: Tensor,
    denom: Tensor,
    coef: Tensor | None,
    d_loss: Tensor | None,
    form: Form,
    num_shared: int | None = None,
) -> Forward:
    """A `Forward` from the parts of a loss written in torch; the layout is that of `SavedLoss` in loss/fused.

    Args:
        row_loss: [B].
        denom: [B], what each row counts in a mean.
        coef: [B, P + m], derivative of each row's loss by the products h @ w of targets and draws; None without need.
        d_loss: [B, d], derivative of each row's loss by its hidden vector.
        form: of the call.
        num_shared: m where the draws are shared by the batch, otherwise None.
    """
    parts = [] if coef is None or d_loss is None else _pack_gradients(coef, d_loss, num_shared)
    if form.reduction == REDUCTIONS["none"]:
        return Forward(row_loss, torch.cat([*parts, denom]))
    total = denom.sum()
    factor = torch.ones_like(total)
    if form.reduction == REDUCTIONS["mean"]:
        factor = torch.where(total == 0, 0.0, 1.0 / torch.where(total == 0, 1.0, total))
    loss = torch.where(total == 0, 0.0, row_loss.sum() * factor)
    return Forward(loss, torch.cat([*parts, row_loss, denom, factor.reshape(1)]))


_ALIGN = 16  # numbers; of the coefficients of shared draws


def _coef_row(targets: int, entries: int) -> tuple[int, int]:
    """Of a row of coefficients with shared draws: the numbers left free before it, and all numbers."""
    gap = -targets % _ALIGN
    return gap, gap + entries + -(gap + entries) % _ALIGN


def _pack_gradients(coef: Tensor, d_loss: Tensor, num_shared: int | None) -> list[Tensor]:
    if num_shared is None:
        return [d_loss.reshape(-1), coef.reshape(-1)]
    entries = coef.shape[1]
    gap, stride = _coef_row(entries - num_shared, entries)
    rows = torch.nn.functional.pad(coef, (gap, stride - gap - entries))
    return [rows.reshape(-1), d_loss.reshape(-1), torch.zeros_like(d_loss).reshape(-1)]


def saved_numbers(
    hidden: Tensor, target: Tensor, draws: int, shared: bool, reduction: int, need_grad: bool,
    with_lse: bool = False, with_ratio: bool = False,
) -> int:  # fmt: skip
    """How many numbers `saved` holds; as `SavedLoss` in loss/fused."""
    batch, dim = hidden.shape
    targets = 1 if target.dim() == 1 else target.shape[1]
    entries, kept = targets + draws, 0
    if need_grad and not shared:
        kept = (dim + entries) * batch * (1 + with_lse)
    elif need_grad:
        kept = (2 * dim + _coef_row(targets, entries)[1]) * batch * (1 + with_lse)
    kept += batch if reduction == REDUCTIONS["none"] else 2 * batch + 1
    return kept + (batch if with_ratio else 0)
