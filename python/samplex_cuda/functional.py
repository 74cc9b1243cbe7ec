"""Losses as functions. They take what a sampler drew, `Draw(ids, log_q)`, and never guess its probabilities."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from samplex_cuda.ops.sampled_softmax import REDUCTIONS, keep_coalesced
from samplex_cuda.ops.sampled_softmax import sampled_softmax as _sampled_softmax

__all__ = ["sampled_softmax"]

_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _shape(lead: tuple[int, ...], last: str) -> str:
    return "[" + ", ".join([*map(str, lead), last]) + "]"


def _got(t: object) -> str:
    if isinstance(t, Tensor):
        return f"{list(t.shape)} {_name(t.dtype)} on {t.device}"
    return f"{type(t).__name__}"


def _check_tensor(op: str, name: str, t: object, wanted: str) -> None:
    if not isinstance(t, Tensor):
        raise TypeError(f"{op}: {name} must be a tensor {wanted}, got {_got(t)}")


def _check_ids(op: str, name: str, t: Tensor, device: torch.device) -> None:
    if t.dtype != torch.int64:
        raise TypeError(f"{op}: {name} must be int64, got {_got(t)}")
    if t.device != device:
        raise ValueError(f"{op}: {name} must be on {device} like weight, got {_got(t)}")


def _flatten(op: str, h: Tensor, weight: Tensor, target: Tensor, ids: Tensor, log_q: Tensor) -> tuple[Tensor, ...]:
    """Leading dimensions [*, d] -> [B, d]; target [*] or [*, P] -> [B, P]; draws [*, m] -> [B, m], or [m]."""
    lead = h.shape[:-1]
    batch = math.prod(lead)  # not -1: ambiguous where the last dimension is 0
    if target.shape == lead:
        target = target.reshape(batch, 1)
    elif target.dim() == len(lead) + 1 and target.shape[:-1] == lead:
        target = target.reshape(batch, target.shape[-1])
    else:
        raise ValueError(
            f"{op}: target must be {list(lead)} or {_shape(lead, 'P')} to fit h {list(h.shape)}, got {_got(target)}"
        )
    if ids.shape != log_q.shape:
        raise ValueError(f"{op}: log_q must have the shape of ids {list(ids.shape)}, got {_got(log_q)}")
    if ids.dim() != 1 or (len(lead) == 0):
        if ids.shape[:-1] != lead or ids.dim() == 0:
            raise ValueError(
                f"{op}: ids must be {_shape(lead, 'm')} (per row) or [m] (shared) to fit h {list(h.shape)}, "
                f"got {_got(ids)}"
            )
        ids, log_q = ids.reshape(batch, ids.shape[-1]), log_q.reshape(batch, ids.shape[-1])
    return h.reshape(batch, h.shape[-1]), target, ids, log_q


def sampled_softmax(
    h: Tensor,
    weight: Tensor,
    target: Tensor,
    ids: Tensor,
    log_q: Tensor,
    bias: Tensor | None = None,
    *,
    scale: float = 1.0,
    reduction: str = "mean",
    absolute: bool = False,
    label_smoothing: float = 0.0,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    positives: tuple[Tensor, Tensor] | None = None,
    sparse: bool = True,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Cross-entropy over the target and a sample of the other classes, corrected for how they were drawn.

    With logits :math:`s_k = \text{scale}\,(h \cdot w_k + b_k)`, the target keeps :math:`s_y` and a draw enters as
    :math:`s_k - \log q_k - \log m` (Blanc & Rendle 2018), so that the sampled normaliser estimates the full one. A draw
    that equals a target of its row, or one of its known `positives`, takes no part.

    One pass over the gathered rows, forward and backward: no [B, m, d] and no [C, d] tensor is made. Gradients of
    `weight` and `bias` are coalesced sparse COO tensors, good for `torch.optim.SGD`, `Adagrad` and `SparseAdam`.

    Args:
        h: [*, d] hidden vectors. Under autocast they are cast to the dtype of `weight`, which keeps its own.
        weight: [C, d] in float32, float64, float16 or bfloat16; sums run in float32 (float64 for float64).
        target: int64 [*], or [*, P] for several targets a row, padded with -100. With several, the loss is lse over all
            of them and the draws, minus the mean target logit.
        ids: int64 [*, m] drawn classes of each row, or [m] shared by all rows.
        log_q: log-probability of each draw, shape of `ids`. A row with nan or inf here (or in h) has loss nan.
        bias: [C] or None, in the dtype of `weight` or float32.
        scale: multiplies the logit (1 / temperature), before the correction.
        reduction: "mean" (over the rows that count, weighted as in `F.cross_entropy`; 0 if none), "sum" or "none".
        absolute: use \|s\| as logit: the absolute softmax, for samplers with a symmetric kernel.
        label_smoothing: share of the target spread evenly over targets and unmasked draws, on the uncorrected logits.
        class_weight: [C] float32 weights of the classes, as `weight` of `F.cross_entropy`.
        ignore_index: a target of this value is skipped; a row without targets has loss 0 and is not in the mean.
        positives: known positives of each row as CSR (offsets int64 [B + 1], ids int64 [n]): masked where drawn.
        sparse: False gives dense gradients of `weight` and `bias`, which costs O(C d).
        return_lse: also return the log-normaliser of each row ([*], differentiable).

    Returns:
        The loss in float32 (float64 for float64): a scalar, or [*] for "none"; with `return_lse`, (loss, lse).
        A row whose draws are all masked (so also m = 0) has loss 0 and no gradient.

    Example:
        >>> import torch, samplex_cuda as sx
        >>> h, weight = torch.randn(4, 16), torch.randn(1000, 16, requires_grad=True)
        >>> target = torch.tensor([1, 2, 3, 4])
        >>> draw = sx.samplers.LogUniform(1000).sample(h, 20, exclude=target)
        >>> loss = sx.functional.sampled_softmax(h, weight, target, draw.ids, draw.log_q)
        >>> loss.backward()
        >>> weight.grad.is_coalesced(), weight.grad.shape
        (True, torch.Size([1000, 16]))
    """
    op = "sampled_softmax"
    lead = None
    offsets, known = None, None
    # What the op takes as it is goes straight to it: it checks everything once more, in C++. Python's checks are for
    # the rest, and for a better message; they cost as much as scoring a thousand classes.
    if not _plain(h, weight, target, ids, log_q, bias, class_weight, reduction, positives):
        lead, h, target, ids, log_q = _prepare(
            op, h, weight, target, ids, log_q, bias, class_weight, reduction, label_smoothing
        )
        weight = weight.contiguous()
        bias = None if bias is None else bias.contiguous()
        class_weight = None if class_weight is None else class_weight.detach().contiguous()
        offsets, known = _csr(op, positives, h.shape[0], weight.device)
    needs_grad = torch.is_grad_enabled() and (
        h.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    )
    if needs_grad and sparse and not torch.compiler.is_compiling():
        keep_coalesced(weight)
        if bias is not None:
            keep_coalesced(bias)
    rest = (
        target,
        ids,
        log_q,
        class_weight,
        offsets,
        known,
        float(scale),
        float(label_smoothing),
        int(ignore_index),
        REDUCTIONS[reduction],
        bool(absolute),
        needs_grad,
        bool(return_lse),
        bool(sparse),
    )
    if torch.compiler.is_compiling():
        loss, lse = _sampled_softmax(h, weight, bias, rest, need_grad=needs_grad, with_lse=return_lse)
    else:
        try:
            loss, lse = _sampled_softmax(h, weight, bias, rest, need_grad=needs_grad, with_lse=return_lse)
        except RuntimeError as error:
            raise _as_python(error) from None
    if lead is not None and reduction == "none":
        loss = loss.reshape(lead)
    if return_lse:
        assert lse is not None
        return loss, lse if lead is None else lse.reshape(lead)
    return loss


def _plain(
    h: Tensor,
    weight: Tensor,
    target: Tensor,
    ids: Tensor,
    log_q: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    reduction: str,
    positives: tuple[Tensor, Tensor] | None,
) -> bool:
    """Whether the arguments are [B, d], [C, d], [B], draws and fp32, all contiguous: the form the op itself takes."""
    try:
        return (
            bias is None
            and class_weight is None
            and positives is None
            and h.dim() == 2
            and target.dim() == 1
            and h.dtype is torch.float32
            and weight.dtype is torch.float32
            and log_q.dtype is torch.float32
            and ids.shape == log_q.shape
            and target.shape[0] == h.shape[0]
            and h.shape[1] == weight.shape[1]
            and target.dtype is ids.dtype is torch.int64
            and h.device == weight.device == target.device == ids.device == log_q.device
            and (ids.dim() == 1 or (ids.dim() == 2 and ids.shape[0] == h.shape[0]))
            and h.is_contiguous()
            and weight.is_contiguous()
            and target.is_contiguous()
            and ids.is_contiguous()
            and log_q.is_contiguous()
            and not log_q.requires_grad
            and reduction in REDUCTIONS
        )
    except (AttributeError, IndexError, TypeError):  # not tensors, or not of these ranks: `_prepare` says which
        return False


def _prepare(
    op: str,
    h: Tensor,
    weight: Tensor,
    target: Tensor,
    ids: Tensor,
    log_q: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    reduction: str,
    label_smoothing: float,
) -> tuple[torch.Size, Tensor, Tensor, Tensor, Tensor]:
    """Checks every argument and brings them into the op's form: leading shape, h, target, ids, log_q."""
    for name, t, wanted in (
        ("h", h, "[*, d]"),
        ("weight", weight, "[C, d]"),
        ("target", target, "[*] int64"),
        ("ids", ids, "[*, m] or [m] int64"),
        ("log_q", log_q, "of the shape of ids"),
    ):
        _check_tensor(op, name, t, wanted)
    if weight.dim() != 2 or weight.dtype not in _FLOATS:
        raise ValueError(f"{op}: weight must be [C, d] float32, float64, float16 or bfloat16, got {_got(weight)}")
    if h.dim() == 0 or h.shape[-1] != weight.shape[1]:
        raise ValueError(f"{op}: h must be [*, {weight.shape[1]}] to fit weight {list(weight.shape)}, got {_got(h)}")
    if h.device != weight.device:
        raise ValueError(f"{op}: h must be on {weight.device} like weight, got {_got(h)}")
    if h.dtype != weight.dtype:
        if not (h.dtype in _FLOATS and torch.is_autocast_enabled(h.device.type)):
            raise TypeError(f"{op}: h must be {weight.dtype} like weight (or run under autocast), got {_got(h)}")
        h = h.to(weight.dtype)
    _check_ids(op, "target", target, weight.device)
    _check_ids(op, "ids", ids, weight.device)
    if not log_q.is_floating_point():
        raise TypeError(f"{op}: log_q must be floating point, got {_got(log_q)}")
    if log_q.device != weight.device:
        raise ValueError(f"{op}: log_q must be on {weight.device} like weight, got {_got(log_q)}")
    if reduction not in REDUCTIONS:
        raise ValueError(f"{op}: reduction must be one of {', '.join(REDUCTIONS)}, got {reduction!r}")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"{op}: label_smoothing must be in [0, 1], got {label_smoothing}")
    acc = torch.float64 if weight.dtype == torch.float64 else torch.float32
    for name, table in (("bias", bias), ("class_weight", class_weight)):
        if table is None:
            continue
        _check_tensor(op, name, table, "[C]")
        wanted = " or ".join(sorted({_name(weight.dtype), _name(acc)}))
        if table.shape != weight.shape[:1] or table.dtype not in (weight.dtype, acc) or table.device != weight.device:
            raise ValueError(f"{op}: {name} must be [{weight.shape[0]}] {wanted} on {weight.device}, got {_got(table)}")
    lead = h.shape[:-1]
    h, target, ids, log_q = _flatten(op, h, weight, target, ids, log_q)
    log_q = log_q.detach().to(acc).contiguous()
    return lead, h.contiguous(), target.contiguous(), ids.contiguous(), log_q


def _csr(
    op: str, rows: tuple[Tensor, Tensor] | None, batch: int, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    if rows is None:
        return None, None
    if not (isinstance(rows, tuple) and len(rows) == 2):
        raise TypeError(f"{op}: positives must be a tuple (offsets [B + 1], ids [n]), got {_got(rows)}")
    offsets, ids = rows
    for name, t in (("positives offsets", offsets), ("positives ids", ids)):
        _check_tensor(op, name, t, "int64")
        _check_ids(op, name, t, device)
    if offsets.shape != (batch + 1,) or ids.dim() != 1:
        raise ValueError(
            f"{op}: positives must be (offsets [{batch + 1}], ids [n]), got offsets {_got(offsets)}, ids {_got(ids)}"
        )
    return offsets.contiguous(), ids.contiguous()


def _as_python(error: RuntimeError) -> Exception:
    """The stable ABI knows only RuntimeError; an id out of range is an IndexError to Python people."""
    text = str(error)
    if "must be in [0, " in text and ", got " in text:
        kind = ValueError if "label_smoothing" in text else IndexError
        return kind(text.splitlines()[0])
    if "offsets must ascend" in text:
        return ValueError(text.splitlines()[0])
    return error
