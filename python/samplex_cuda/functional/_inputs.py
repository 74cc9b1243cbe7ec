"""From a caller's arguments to the form the ops take: every check of a functional loss, once."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from samplex_cuda._checks import FLOATS, check_int, check_number, check_tensor, describe, dtype_name, shape_text
from samplex_cuda.losses.base import reduction_code
from samplex_cuda.ops.loss_types import Form, Inputs, acc_dtype

__all__ = ["form_of", "known_positives", "prepare", "reduction_code", "row_values", "target_weights"]


def _check_ids(op: str, name: str, t: Tensor, device: torch.device) -> None:
    if t.dtype is not torch.int64:
        raise TypeError(f"{op}: {name} must be int64, got {describe(t)}")
    if t.device != device:
        raise ValueError(f"{op}: {name} must be on {device} like weight, got {describe(t)}")


def prepare(
    op: str,
    h: Tensor,
    weight: Tensor,
    target: Tensor,
    ids: Tensor,
    log_q: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    positives: tuple[Tensor, Tensor] | None = None,
) -> tuple[torch.Size | None, Inputs]:
    """Checks every argument and flattens leading dimensions.

    Args:
        op: name for error messages.
        h: [*, d].
        weight: [C, d].
        target: int64 [*] or [*, P].
        ids: int64 [*, m], or [m] shared.
        log_q: the shape of `ids`.
        bias: [C] or None.
        class_weight: [C] or None.
        positives: CSR pair or None.

    Returns:
        The leading shape that a result per row has (None if it is [B] already), and the inputs.
    """
    for name, t, wanted in (
        ("h", h, "[*, d]"),
        ("weight", weight, "[C, d]"),
        ("target", target, "[*] int64"),
        ("ids", ids, "[*, m] or [m] int64"),
        ("log_q", log_q, "of the shape of ids"),
    ):
        if not isinstance(t, Tensor) or t.layout is not torch.strided:
            check_tensor(op, name, t, wanted)
    dtype, device, size = weight.dtype, weight.device, weight.shape
    if len(size) != 2 or dtype not in FLOATS:
        raise ValueError(f"{op}: weight must be [C, d] float32, float64, float16 or bfloat16, got {describe(weight)}")
    shape = h.shape
    if len(shape) == 0 or shape[-1] != size[1]:
        raise ValueError(f"{op}: h must be [*, {size[1]}] to fit weight {list(size)}, got {describe(h)}")
    if h.device != device:
        raise ValueError(f"{op}: h must be on {device} like weight, got {describe(h)}")
    if h.dtype is not dtype:
        if not (h.dtype in FLOATS and torch.is_autocast_enabled(device.type)):
            raise TypeError(f"{op}: h must be {dtype} like weight (or run under autocast), got {describe(h)}")
        h = h.to(dtype)
    _check_ids(op, "target", target, device)
    _check_ids(op, "ids", ids, device)
    if not log_q.is_floating_point():
        raise TypeError(f"{op}: log_q must be floating point, got {describe(log_q)}")
    if log_q.device != device:
        raise ValueError(f"{op}: log_q must be on {device} like weight, got {describe(log_q)}")
    acc = acc_dtype(dtype)
    if bias is not None:
        bias = _table(op, "bias", bias, weight, acc)
    if class_weight is not None:
        class_weight = _table(op, "class_weight", class_weight, weight, acc).detach()
    if log_q.shape != ids.shape:
        raise ValueError(f"{op}: log_q must have the shape of ids {list(ids.shape)}, got {describe(log_q)}")
    lead = shape[:-1]
    if (
        len(lead) != 1
        or target.shape != lead
        or (ids.dim() == 2 and ids.shape[0] != lead[0])
        or ids.dim() not in (1, 2)
    ):
        h, target, ids = _flatten(op, h, target, ids, lead)
        log_q = log_q.reshape(ids.shape)
    if log_q.requires_grad:
        log_q = log_q.detach()
    if log_q.dtype is not acc:
        log_q = log_q.to(acc)
    offsets, known = (None, None) if positives is None else known_positives(op, positives, h.shape[0], device)
    inputs = Inputs(
        h.contiguous(),
        weight if weight.is_contiguous() else weight.contiguous(),
        bias,
        target.contiguous(),
        ids.contiguous(),
        log_q.contiguous(),
        class_weight,
        offsets,
        known,
    )
    return None if len(lead) == 1 else lead, inputs


def form_of(op: str, scale: Any, ignore_index: Any, reduction: str, sparse: Any, with_lse: bool = False) -> Form:
    """The options that every loss shares, checked.

    Args:
        op: name for error messages.
        scale: a finite number.
        ignore_index: an int.
        reduction: "none", "mean" or "sum".
        sparse: whether the gradient of weight is.
        with_lse: whether lse is wanted too.
    """
    scale = check_number(op, "scale", scale, -math.inf)
    ignored = check_int(op, "ignore_index", ignore_index, -(1 << 63), (1 << 63) - 1)
    return Form(scale, ignored, reduction_code(op, reduction), bool(sparse), bool(with_lse))


def _table(op: str, name: str, table: Tensor, weight: Tensor, acc: torch.dtype) -> Tensor:
    """A number per class: bias or class weights."""
    check_tensor(op, name, table, "[C]")
    if table.shape != weight.shape[:1] or table.dtype not in (weight.dtype, acc) or table.device != weight.device:
        wanted = " or ".join(sorted({dtype_name(weight.dtype), dtype_name(acc)}))
        raise ValueError(f"{op}: {name} must be [{weight.shape[0]}] {wanted} on {weight.device}, got {describe(table)}")
    return table.contiguous()


def _flatten(op: str, h: Tensor, target: Tensor, ids: Tensor, lead: torch.Size) -> tuple[Tensor, Tensor, Tensor]:
    """[*, d] -> [B, d]; target [*] -> [B], [*, P] -> [B, P]; draws [*, m] -> [B, m]; [m] stays."""
    batch = math.prod(lead)  # not -1: ambiguous where the last dimension is 0
    if target.shape == lead:
        target = target.reshape(batch)
    elif target.dim() == len(lead) + 1 and target.shape[:-1] == lead:
        target = target.reshape(batch, target.shape[-1])
    else:
        raise ValueError(
            f"{op}: target must be {list(lead)} or {shape_text(lead, 'P')} to fit h {list(h.shape)}, "
            f"got {describe(target)}"
        )
    if ids.dim() != 1 or len(lead) == 0:
        if ids.dim() == 0 or ids.shape[:-1] != lead:
            raise ValueError(
                f"{op}: ids must be {shape_text(lead, 'm')} (per row) or [m] (shared) to fit h {list(h.shape)}, "
                f"got {describe(ids)}"
            )
        ids = ids.reshape(batch, ids.shape[-1])
    return h.reshape(batch, h.shape[-1]), target, ids


def row_values(
    op: str, name: str, t: Tensor | None, shapes: list[Any], needed: bool, why: str, weight: Tensor
) -> Tensor | None:
    """Numbers that go with the rows or their targets, in the dtype the op takes.

    Args:
        op: name for error messages.
        name: of the argument.
        t: the numbers, or None.
        shapes: allowed shapes, the usual one first.
        needed: whether None is an error.
        why: what follows the wanted shape in that error.
        weight: whose device and dtype count.
    """
    wanted = list(shapes[0])
    if t is None:
        if needed:
            raise ValueError(f"{op}: {name} must be {wanted}{why}, got None")
        return None
    check_tensor(op, name, t, f"{wanted} floating point")
    if all(t.shape != shape for shape in shapes) or not t.is_floating_point() or t.device != weight.device:
        raise ValueError(f"{op}: {name} must be {wanted} floating point on {weight.device}, got {describe(t)}")
    return t.detach().to(acc_dtype(weight.dtype)).contiguous()


def target_weights(op: str, given: Tensor | None, target: Tensor, flat: Tensor, weight: Tensor) -> Tensor | None:
    """What targets weigh, in the dtype and the shape the ops take; None if they all weigh the same.

    Args:
        op: name for error messages.
        given: the caller's, the shape of `target`.
        target: the caller's.
        flat: the same targets, [B] or [B, P].
        weight: whose device and dtype count.
    """
    found = row_values(op, "target_weight", given, [target.shape], False, "", weight)
    return None if found is None else found.reshape(flat.shape)


def known_positives(
    op: str, rows: tuple[Tensor, Tensor], batch: int, device: torch.device, arg: str = "positives"
) -> tuple[Tensor, Tensor]:
    """Known positives of each row as CSR, checked.

    Args:
        op: name for error messages.
        rows: offsets int64 [B + 1], ids int64 [n].
        batch: B.
        device: where they must be.
        arg: name of the argument, for error messages.
    """
    if not (isinstance(rows, tuple) and len(rows) == 2):
        raise TypeError(f"{op}: {arg} must be a tuple (offsets [B + 1], ids [n]), got {describe(rows)}")
    offsets, ids = rows
    for name, t in ((f"{arg} offsets", offsets), (f"{arg} ids", ids)):
        _check_ids(op, name, check_tensor(op, name, t, "int64"), device)
    if offsets.shape != (batch + 1,) or ids.dim() != 1:
        raise ValueError(
            f"{op}: {arg} must be (offsets [{batch + 1}], ids [n]), got offsets {describe(offsets)}, "
            f"ids {describe(ids)}"
        )
    return offsets.contiguous(), ids.contiguous()
