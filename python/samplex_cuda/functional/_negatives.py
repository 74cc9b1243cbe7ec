"""Negatives of the caller in the form the ops take: checked, flat, each row of equal length."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from samplex_cuda._checks import check_tensor, describe, shape_text
from samplex_cuda.draw import Draw, Negatives
from samplex_cuda.prediction import valid_targets

__all__ = ["flat_negatives", "pad_ragged"]


def flat_negatives(
    op: str,
    given: Any,
    target: Tensor,
    lead: tuple[int, ...] | torch.Size,
    ignore_index: int,
    acc: torch.dtype,
    width: int = 0,
) -> Draw:
    """A `Draw` that the ops take, from a `Draw` or `Negatives` of the caller; every check but the range of the ids.

    Args:
        op: name for error messages.
        given: what the caller passed.
        target: int64 [B] or [B, P], flat; its device is the one wanted.
        lead: leading dimensions of the batch, whose product is B.
        ignore_index: targets of this value are ignored.
        acc: dtype of log_q.
        width: the least number of columns of rows of different lengths.

    Returns:
        ids [B, m] or [m] and their log_q, contiguous.
    """
    if not isinstance(given, Draw | Negatives):
        raise TypeError(f"{op}: negatives must be a Draw or sx.Negatives(ids, log_q), got {describe(given)}")
    ids, log_q = given.ids, given.log_q
    if isinstance(ids, tuple):
        return pad_ragged(op, ids, log_q, target, ignore_index, acc, width=width)
    check_tensor(op, "negatives.ids", ids, f"{shape_text(lead, 'm')} or [m] int64")
    _check_ids(op, "negatives.ids", ids, target)
    shared = ids.dim() == 1
    if not shared and (ids.dim() != len(lead) + 1 or ids.shape[:-1] != torch.Size(lead)):
        raise ValueError(
            f"{op}: negatives.ids must be {shape_text(lead, 'm')} (per row), [m] (shared) or a CSR pair "
            f"(offsets [{target.shape[0] + 1}], ids [n]), got {describe(ids)}"
        )
    log_q = _check_log_q(op, log_q, ids)
    flat = ids if shared else ids.reshape(target.shape[0], ids.shape[-1])
    if log_q is None:  # what the op subtracts for the number of draws, added back
        log_q = torch.full(flat.shape, -math.log(max(flat.shape[-1], 1)), dtype=acc, device=flat.device)
    return Draw(flat.contiguous(), log_q.reshape(flat.shape).to(acc).contiguous(), False)


def pad_ragged(
    op: str,
    pair: tuple[Any, ...],
    log_q: Tensor | None,
    target: Tensor,
    ignore_index: int,
    acc: torch.dtype,
    name: str = "negatives",
    width: int = 0,
) -> Draw:
    """Rows of different lengths as [B, longest]: the end of a row is its own target, which the losses mask.

    On a GPU this waits for the device, which knows the longest row.

    Args:
        op: name for error messages.
        pair: (offsets int64 [B + 1], ids int64 [n]).
        log_q: [n], or None: uncorrected.
        target: int64 [B] or [B, P].
        ignore_index: targets of this value are ignored.
        acc: dtype of log_q.
        name: of the argument, for error messages.
        width: columns of the result at least.
    """
    batch = target.shape[0]
    if len(pair) != 2:
        raise ValueError(f"{op}: {name} must be a CSR pair (offsets [{batch + 1}], ids [n]), got {len(pair)} parts")
    offsets, ids = pair
    for part, t in ((f"{name} offsets", offsets), (f"{name} ids", ids)):
        _check_ids(op, part, check_tensor(op, part, t, "int64"), target)
    if offsets.shape != (batch + 1,) or ids.dim() != 1:
        raise ValueError(
            f"{op}: {name} must be a CSR pair (offsets [{batch + 1}], ids [n]), got offsets {describe(offsets)}, ids "
            f"{describe(ids)}"
        )
    log_q = _check_log_q(op, log_q, ids)
    lengths = offsets.diff()
    ends = torch.stack([offsets[0], offsets[-1], *(lengths.aminmax() if batch else (offsets[0], offsets[0]))])
    first, last, least, most = (int(n) for n in ends.tolist())
    if first != 0 or last != ids.shape[0] or least < 0:
        raise ValueError(
            f"{op}: {name} offsets must begin with 0, not decrease and end with {ids.shape[0]}, got {first} ... {last}"
            + (", decreasing" if least < 0 else "")
        )
    most = max(most, width)
    columns = torch.arange(most, device=ids.device)
    inside = columns < lengths[:, None]
    at = (offsets[:-1, None] + columns).clamp_(max=max(ids.shape[0] - 1, 0))
    valid = valid_targets(target, ignore_index)
    own = torch.where(valid, target, -1)
    own = own if own.dim() == 2 else own.unsqueeze(1)
    fill = own.amax(1, keepdim=True).clamp_(min=0)  # a row without a target has no loss, whatever is in it
    if ids.shape[0] == 0:
        return Draw(fill.repeat(1, most), torch.zeros(batch, most, dtype=acc, device=ids.device), False)
    padded = torch.where(inside, ids[at], fill)
    # The op divides by the longest row's number of draws; a row's own number is meant, or none where uncorrected.
    if log_q is None:
        rows = torch.full(padded.shape, -math.log(most), dtype=acc, device=ids.device)
    else:
        own_count = (lengths.clamp(min=1).double().log() - math.log(most)).to(acc)
        rows = torch.where(inside, log_q.to(acc)[at], 0.0) + own_count[:, None]
    return Draw(padded.contiguous(), rows.contiguous(), False)


def _check_ids(op: str, name: str, t: Tensor, target: Tensor) -> None:
    if t.dtype is not torch.int64:
        raise TypeError(f"{op}: {name} must be int64, got {describe(t)}")
    if t.device != target.device:
        raise ValueError(f"{op}: {name} must be on {target.device} like the targets, got {describe(t)}")


def _check_log_q(op: str, log_q: Any, ids: Tensor) -> Tensor | None:
    if log_q is None:
        return None
    check_tensor(op, "log_q", log_q, f"{list(ids.shape)} floating point, or None")
    if log_q.shape != ids.shape or not log_q.is_floating_point() or log_q.device != ids.device:
        raise ValueError(
            f"{op}: log_q must be {list(ids.shape)} floating point on {ids.device} like the ids, or None "
            f"(uncorrected), got {describe(log_q)}"
        )
    return log_q.detach()
