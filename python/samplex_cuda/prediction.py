"""Exact answers over all classes, in chunks: normalizer, NLL, log-probabilities and top-k of a linear classifier.

Everything here costs O(C) per row and belongs to evaluation, not to a training step. Logits are
`s = scale * (h @ weight.T + bias)` (`|s|` with `absolute=True`), summed in fp32 whatever the storage dtype (in fp64
where an input is fp64), one block of rows and one chunk of classes at a time, so that no [B, C] exists unless it is
asked for. How factors of 16 bits multiply is decided in `samplex_cuda.products`. No function here records gradients.

`prior(rows)`, where it is given, is added to the logits: [n, C] for the rows of a slice, e.g. log p_n(y|x) of the noise
that negative sampling learned against. It is asked for a block of rows at a time, each small enough that the block
holds at most 2^25 elements (one row, where C is larger).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

import torch
from torch import Tensor

from samplex_cuda import _device, chunking
from samplex_cuda._checks import check_int, describe
from samplex_cuda.chunking import KeptLogits, Prior, cut, logit_chunks, row_blocks
from samplex_cuda.ops.predict import MOST_K, predict_dots, predict_lse, predict_topk
from samplex_cuda.ops.sphere import inverse_norms
from samplex_cuda.products import wide_dtype

if TYPE_CHECKING:
    from typing_extensions import Unpack  # typing has it from Python 3.11 on

__all__ = ["Prior", "exact_log_prob", "exact_lse", "exact_nll", "exact_scores", "exact_topk", "rerank"]

# The op of the CPU inserts entries one by one: where logits rise from class to class, each of them costs k steps.
_MOST_K_CPU = 256
_EXPORTED_CLASSES = 1 << 15  # per chunk of an exported program, for any number of rows


def _check(op: str, h: Tensor, weight: Tensor, bias: Tensor | None, chunk_size: int | None) -> None:
    if not (isinstance(weight, Tensor) and weight.dim() == 2 and weight.is_floating_point()):
        raise ValueError(f"{op}: weight must be [C, d] floating point, got {describe(weight)}")
    if not (isinstance(h, Tensor) and h.dim() == 2 and h.shape[1] == weight.shape[1] and h.is_floating_point()):
        raise ValueError(f"{op}: h must be [B, {weight.shape[1]}] floating point, got {describe(h)}")
    if bias is not None and (bias.dim() != 1 or bias.shape[0] != weight.shape[0] or not bias.is_floating_point()):
        raise ValueError(f"{op}: bias must be [{weight.shape[0]}] floating point, got {describe(bias)}")
    if h.device != weight.device:
        raise ValueError(f"{op}: h must be on {weight.device} as weight is, got {h.device}")
    if weight.shape[0] < 1:
        raise ValueError(f"{op}: weight must have at least one class, got {describe(weight)}")
    if chunk_size is not None:
        check_int(op, "chunk_size", chunk_size)


def _no_mass(h: Tensor) -> Tensor:
    # In fp64, so that thousands of chunks add no rounding of their own.
    return torch.full((h.shape[0],), -torch.inf, dtype=torch.float64, device=h.device)


def _no_target(h: Tensor) -> Tensor:
    return torch.empty(h.shape[0], 0, dtype=torch.int64, device=h.device)


def _no_logit(h: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(h.shape[0], 0, dtype=dtype, device=h.device)


@torch.no_grad()
def exact_lse(
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    scale: float = 1.0,
    absolute: bool = False,
    normalize: bool = False,
    prior: Prior | None = None,
    chunk_size: int | None = None,
) -> Tensor:
    """Log of the softmax normalizer of each row.

    Args:
        h: [B, d].
        weight: [C, d].
        bias: [C].
        scale: inverse temperature, applied to `h @ weight.T + bias`.
        absolute: the logit is the absolute value.
        normalize: divide by the length of the class rows; a row of zeros has product 0.
        prior: added to the logits; see the module.
        chunk_size: classes per chunk; chosen from the shapes when not given.

    Returns:
        [B] fp32, or fp64 where `h` or `weight` is.

    Example:
        >>> import torch
        >>> from samplex_cuda.prediction import exact_lse
        >>> h, weight = torch.randn(3, 8), torch.randn(100, 8)
        >>> torch.allclose(exact_lse(h, weight, chunk_size=32), (h @ weight.T).logsumexp(1), atol=1e-5)
        True
    """
    _check("exact_lse", h, weight, bias, chunk_size)
    wide = wide_dtype(h, weight)
    out = torch.empty(h.shape[0], dtype=wide, device=h.device)
    with torch.autocast(h.device.type, enabled=False):
        for rows, block, added in row_blocks(h, weight, prior):
            lse, none = _no_mass(block), _no_target(block)
            for c in logit_chunks(block, weight, bias, scale, absolute, added, chunk_size, normalize=normalize):
                predict_lse(c.dots, c.bias, none, None, c.first, c.scale, c.absolute, lse, _no_logit(block, wide))
            out[rows] = lse.to(wide)
    return out


def valid_targets(target: Tensor, ignore_index: int) -> Tensor:
    """Which entries of target [B] or [B, P] are classes: not `ignore_index`, and with several a row not -100 either."""
    valid = target != ignore_index
    return valid & (target != -100) if target.dim() == 2 and target.shape[1] > 1 else valid


def mean_weight(target: Tensor, valid: Tensor, class_weight: Tensor | None) -> Tensor:
    """What a row counts in a mean, [B]: the mean class weight of its targets [B] or [B, P]; 0 for an ignored row."""
    if class_weight is None:
        return (valid if valid.dim() == 1 else valid.any(1)).to(torch.float32)
    weight = torch.where(valid, class_weight[target.clamp(0, class_weight.shape[0] - 1)], 0.0)
    return weight if valid.dim() == 1 else weight.sum(1) / valid.sum(1).clamp(min=1)


def flat_targets(op: str, target: Tensor, ignore_index: int, num_classes: int) -> tuple[Tensor, Tensor]:
    """Targets [B, P] with -1 in place of what is ignored, and which are not.

    An id out of range is an IndexError; on a device, where the host does not look, it becomes `num_classes`, whose
    logit is nan in `softmax_sums`.
    """
    valid = valid_targets(target, ignore_index)
    outside = valid & ((target < 0) | (target >= num_classes))
    if _device.host_waits(target):
        target = torch.where(outside, num_classes, target)
    elif bool(outside.any()):
        got = int(target[outside][0])
        raise IndexError(f"{op}: target must be in [0, {num_classes}) or {ignore_index}, got {got}")
    target = torch.where(valid, target, -1)
    return (target, valid) if target.dim() == 2 else (target.unsqueeze(1), valid.unsqueeze(1))


@torch.no_grad()
def softmax_sums(
    h: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    scale: float = 1.0,
    absolute: bool = False,
    *,
    normalize: bool = False,
    class_weight: Tensor | None = None,
    with_total: bool = False,
    prior: Prior | None = None,
    chunk_size: int | None = None,
    keep: KeptLogits | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """What a loss needs of the full softmax: the evaluator and `functional.full_softmax` both use it.

    Args:
        h: [B, d].
        weight: [C, d].
        target: int64 [B, P], -1 for none.
        bias: [C].
        scale: inverse temperature.
        absolute: the logit is the absolute value.
        normalize: divide by the length of the class rows; a row of zeros has product 0.
        class_weight: [C], for the total.
        with_total: whether the total is asked for.
        prior: added to the logits; see the module.
        chunk_size: classes per chunk; chosen from the shapes when not given.
        keep: where to leave products for a backward pass. Not with `prior`.

    Returns:
        lse [B] fp64; target logits [B, P] in fp32 or fp64, from the same product as lse, so that an NLL is not below
        zero by rounding; and the sum of class_weight * logit over all classes [B] fp64, or None.
    """
    wide = wide_dtype(h, weight)
    lse = _no_mass(h)
    # nan: what a target out of range keeps; it has not been checked on a device.
    positive = torch.full(target.shape, torch.nan, dtype=wide, device=h.device)
    total = torch.zeros_like(lse) if with_total else None
    target = target.contiguous()
    if class_weight is not None:
        class_weight = class_weight.to(wide)
    # No product here is one that autocast would change: `out=` is not its business.
    for rows, block, added in row_blocks(h, weight, prior):
        state = (cut(lse, rows), cut(positive, rows), None if total is None else cut(total, rows))
        wanted = cut(target, rows)
        chunks = logit_chunks(
            block, weight, bias, scale, absolute, added, chunk_size, row=rows.start, keep=keep,
            classes_first=prior is None, normalize=normalize,
        )  # fmt: skip
        for c in chunks:
            cw = None if class_weight is None or total is None else class_weight[c.first : c.first + len(c.rows)]
            predict_lse(c.dots, c.bias, wanted, cw, c.first, c.scale, c.absolute, *state, c.by_class)
    return lse, positive, total


@torch.no_grad()
def exact_nll(
    h: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    scale: float = 1.0,
    absolute: bool = False,
    normalize: bool = False,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    target_weight: Tensor | None = None,
    prior: Prior | None = None,
    chunk_size: int | None = None,
) -> Tensor:
    """Negative log-likelihood of each row under the full softmax, the mean over its targets where it has several.

    Args:
        h: [B, d].
        weight: [C, d].
        target: int64 [B], or [B, P] padded with -100.
        bias: [C].
        scale: inverse temperature.
        absolute: the logit is the absolute value.
        normalize: divide by the length of the class rows; a row of zeros has product 0.
        class_weight: [C], multiplies the term of each target, as in `F.cross_entropy` with `reduction="none"`.
        ignore_index: targets of this value are skipped; a row with no other has the value 0.
        target_weight: the shape of target, what the term of each target weighs; by default 1 over their number.
        prior: added to the logits; see the module.
        chunk_size: classes per chunk; chosen from the shapes when not given.

    Returns:
        [B] fp32, or fp64 where `h` or `weight` is.

    Example:
        >>> import torch, torch.nn.functional as F
        >>> from samplex_cuda.prediction import exact_nll
        >>> h, weight, y = torch.randn(3, 8), torch.randn(100, 8), torch.tensor([5, 99, 0])
        >>> expected = F.cross_entropy(h @ weight.T, y, reduction="none")
        >>> torch.allclose(exact_nll(h, weight, y, chunk_size=32), expected, atol=1e-5)
        True
    """
    _check("exact_nll", h, weight, bias, chunk_size)
    if target.dtype != torch.int64 or target.dim() not in (1, 2) or target.shape[0] != h.shape[0]:
        b = h.shape[0]
        raise ValueError(f"exact_nll: target must be [{b}] or [{b}, P] int64, got {describe(target)}")
    target, valid = flat_targets("exact_nll", target, ignore_index, weight.shape[0])
    lse, positive, _ = softmax_sums(
        h, weight, target, bias, scale, absolute, normalize=normalize, prior=prior, chunk_size=chunk_size
    )
    terms = torch.where(valid, lse.unsqueeze(1) - positive, 0.0)
    if class_weight is not None:
        terms *= class_weight[target.clamp(0, weight.shape[0] - 1)]
    if target_weight is not None:
        return torch.where(valid, terms * target_weight.reshape(terms.shape), 0.0).sum(1).to(positive.dtype)
    return (terms.sum(1) / valid.sum(1).clamp(min=1)).to(positive.dtype)


class _Options(TypedDict, total=False):
    """Keyword arguments of `exact_scores`."""

    scale: float
    absolute: bool
    normalize: bool
    prior: Prior | None
    chunk_size: int | None


def _all_classes(
    op: str,
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    normalised: bool,
    scale: float = 1.0,
    absolute: bool = False,
    normalize: bool = False,
    prior: Prior | None = None,
    chunk_size: int | None = None,
) -> Tensor:
    """Logits [B, C], or their log_softmax."""
    _check(op, h, weight, bias, chunk_size)
    wide = wide_dtype(h, weight)
    out = torch.empty(h.shape[0], weight.shape[0], dtype=wide, device=h.device)
    with torch.autocast(h.device.type, enabled=False):
        for rows, block, added in row_blocks(h, weight, prior):
            lse, none = _no_mass(block), _no_target(block)
            for c in logit_chunks(block, weight, bias, scale, absolute, added, chunk_size, normalize=normalize):
                logits = c.logits()
                out[rows, c.first : c.first + logits.shape[1]] = logits
                if normalised:
                    predict_lse(logits, None, none, None, c.first, 1.0, False, lse, _no_logit(block, wide))
            if normalised:
                out[rows] -= lse.to(wide).unsqueeze(1)
    return out


@torch.no_grad()
def exact_scores(h: Tensor, weight: Tensor, bias: Tensor | None = None, **options: Unpack[_Options]) -> Tensor:
    """Logits of all classes, not normalized.

    Args:
        h: [B, d].
        weight: [C, d].
        bias: [C].
        options: `scale`, the inverse temperature (1.0); `absolute`, whether the logit is the absolute value (False);
            `normalize`, whether products are divided by the length of the class row (False); `prior`, added to the
            logits, see the module; `chunk_size`, classes per chunk, chosen from the shapes when not given.

    Returns:
        [B, C] fp32, or fp64 where `h` or `weight` is.

    Example:
        >>> import torch
        >>> from samplex_cuda.prediction import exact_scores
        >>> h, weight = torch.randn(3, 8), torch.randn(100, 8)
        >>> torch.allclose(exact_scores(h, weight, chunk_size=32), h @ weight.T, atol=1e-5)
        True
    """
    return _all_classes("exact_scores", h, weight, bias, normalised=False, **options)


@torch.no_grad()
def exact_log_prob(h: Tensor, weight: Tensor, bias: Tensor | None = None, **options: Unpack[_Options]) -> Tensor:
    """Log-probabilities of all classes under the full softmax: `exact_scores` less the normalizer of each row.

    The result is [B, C] by definition; beyond it only one chunk is held.

    Args:
        h: [B, d].
        weight: [C, d].
        bias: [C].
        options: as in `exact_scores`.

    Returns:
        [B, C] fp32, or fp64 where `h` or `weight` is.

    Example:
        >>> import torch
        >>> from samplex_cuda.prediction import exact_log_prob
        >>> log_p = exact_log_prob(torch.randn(3, 8), torch.randn(100, 8))
        >>> log_p.shape, torch.allclose(log_p.exp().sum(1), torch.ones(3))
        (torch.Size([3, 100]), True)
    """
    return _all_classes("exact_log_prob", h, weight, bias, normalised=True, **options)


def _stable_topk(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Top k of each row in descending order, equal values in ascending column order; nan counts as largest."""
    if k == 1:
        return logits.max(1, keepdim=True)  # the first maximal column, says torch
    if k == logits.shape[1]:
        return logits.sort(dim=1, descending=True, stable=True)
    if _device.host_waits(logits):  # what follows would wait for the rows that need a sort
        values, columns = logits.sort(dim=1, descending=True, stable=True)
        return values[:, :k], columns[:, :k]
    values, columns = logits.topk(k, dim=1, sorted=True)
    # torch.topk may take any of the columns that tie at the border: where there are more of them than places, sort.
    crowded = ((logits < values[:, -1:]).sum(1) < logits.shape[1] - k).nonzero().squeeze(1)
    if crowded.numel():
        columns[crowded] = logits[crowded].sort(dim=1, descending=True, stable=True)[1][:, :k]
    columns = columns.sort(dim=1)[0]
    values, order = logits.gather(1, columns).sort(dim=1, descending=True, stable=True)
    return values, columns.gather(1, order)


@torch.no_grad()
def exact_topk(
    h: Tensor,
    weight: Tensor,
    k: int,
    bias: Tensor | None = None,
    *,
    scale: float = 1.0,
    absolute: bool = False,
    normalize: bool = False,
    prior: Prior | None = None,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The k classes of the largest logits of each row, by a running top-k over chunks of classes.

    Args:
        h: [B, d].
        weight: [C, d].
        k: how many, 1 to C.
        bias: [C].
        scale: inverse temperature.
        absolute: the logit is the absolute value.
        normalize: divide by the length of the class rows; a row of zeros has product 0.
        prior: added to the logits; see the module.
        chunk_size: classes per chunk; chosen from the shapes when not given.

    Returns:
        (logits [B, k] fp32 or fp64, ids [B, k] int64), largest first, equal logits in ascending id order. A nan counts
        as the largest value, as in `torch.topk`.

    Example:
        >>> import torch
        >>> from samplex_cuda.prediction import exact_topk
        >>> weight = torch.tensor([[1.0], [3.0], [2.0], [3.0]])
        >>> exact_topk(torch.ones(1, 1), weight, 3, chunk_size=2)
        (tensor([[3., 3., 2.]]), tensor([[1, 3, 2]]))
    """
    _check("exact_topk", h, weight, bias, chunk_size)
    check_int("exact_topk", "k", k, 1, weight.shape[0])
    if torch.compiler.is_exporting():
        return _exported_topk(h, weight, k, bias, scale, absolute, prior, chunk_size)
    wide = wide_dtype(h, weight)
    out_logits = torch.empty(h.shape[0], k, dtype=wide, device=h.device)
    out_ids = torch.empty(h.shape[0], k, dtype=torch.int64, device=h.device)
    most = _MOST_K_CPU if h.device.type == "cpu" else MOST_K
    with torch.autocast(h.device.type, enabled=False):
        for rows, block, added in row_blocks(h, weight, prior):
            if k <= most:
                for c in logit_chunks(block, weight, bias, scale, absolute, added, chunk_size, normalize=normalize):
                    predict_topk(c.dots, c.bias, c.first, c.scale, c.absolute, out_logits[rows], out_ids[rows])
                continue
            best = torch.empty(block.shape[0], 0, dtype=wide, device=h.device)
            ids = torch.empty(block.shape[0], 0, dtype=torch.int64, device=h.device)
            for c in logit_chunks(block, weight, bias, scale, absolute, added, chunk_size, normalize=normalize):
                logits = c.logits()
                values, columns = _stable_topk(logits, min(k, logits.shape[1]))
                # What is held comes first and has the lower ids, so a stable order keeps ties ascending.
                values, order = torch.cat([best, values], 1).sort(dim=1, descending=True, stable=True)
                ids = torch.cat([ids, columns + c.first], 1).gather(1, order)[:, :k]
                best = values[:, :k]
            out_logits[rows], out_ids[rows] = best, ids
    return out_logits, out_ids


def _exported_topk(
    h: Tensor,
    weight: Tensor,
    k: int,
    bias: Tensor | None,
    scale: float,
    absolute: bool,
    prior: Prior | None,
    chunk_size: int | None,
) -> tuple[Tensor, Tensor]:
    """`exact_topk` for `torch.export`: blocks and chunks must not depend on the number of rows, which stays open."""
    if prior is not None:
        raise NotImplementedError(
            "exact_topk: for torch.export, prior must be None, got a loss with one; export with candidates='tree'"
        )
    if k > MOST_K:
        raise NotImplementedError(f"exact_topk: k must be at most {MOST_K} for torch.export, got {k}")
    wide = wide_dtype(h, weight)
    batch, classes = h.shape[0], weight.shape[0]
    values = h.new_empty((batch, k), dtype=wide)
    ids = h.new_empty((batch, k), dtype=torch.int64)
    size = max(_EXPORTED_CLASSES, k) if chunk_size is None else chunk_size
    rows = h.to(wide)
    for first in range(0, classes, size):
        part = slice(first, min(first + size, classes))
        dots = rows @ weight[part].to(wide).t()
        predict_topk(
            dots, None if bias is None else bias[part].to(wide).contiguous(), first, scale, absolute, values, ids
        )
    return values, ids


def _inverse_norms_at(weight: Tensor, ids: Tensor, unseen: bool) -> Tensor:
    """1 / |w| of the class rows `ids` [B, n]. `unseen`: without a look at how many different ones there are."""
    if not unseen:
        classes, places = ids.unique(return_inverse=True)
        return inverse_norms(weight[classes])[places]
    parts = [inverse_norms(weight[part]) for part in ids.reshape(-1).split(chunking.rows_at_once(weight))]
    return torch.cat(parts).view(ids.shape)


@torch.no_grad()
def rerank(
    h: Tensor,
    weight: Tensor,
    ids: Tensor,
    k: int,
    bias: Tensor | None = None,
    *,
    scale: float = 1.0,
    absolute: bool = False,
    normalize: bool = False,
    added: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The k candidates of the largest exact logits of each row.

    Args:
        h: [B, d].
        weight: [C, d].
        ids: int64 [B, n], the candidates of each row, no class twice; -1 for none. An id out of range is an IndexError
            on the CPU; on a GPU, where the host does not look, its logit is nan, which counts as the largest.
        k: how many, 1 to n.
        bias: [C].
        scale: inverse temperature.
        absolute: the logit is the absolute value.
        normalize: divide by the length of the class rows; a row of zeros has product 0.
        added: [B, n], added to the logits.

    Returns:
        (logits [B, k] fp32 or fp64, ids [B, k] int64), largest first, equal logits in ascending id order; -inf and -1
        where a row has fewer candidates.

    Example:
        >>> import torch
        >>> from samplex_cuda.prediction import rerank
        >>> weight = torch.tensor([[1.0], [3.0], [2.0], [3.0]])
        >>> rerank(torch.ones(1, 1), weight, torch.tensor([[3, 0, -1, 1]]), 3)
        (tensor([[3., 3., 1.]]), tensor([[1, 3, 0]]))
    """
    _check("rerank", h, weight, bias, None)
    batch, count = h.shape[0], ids.shape[-1]
    if ids.dtype != torch.int64 or ids.shape != (batch, count):
        raise ValueError(f"rerank: ids must be [{batch}, n] int64, got {describe(ids)}")
    check_int("rerank", "k", k, 1, count)
    # A program has no numbers to look at, and those of a device are not looked at.
    unseen = torch.compiler.is_exporting() or _device.host_waits(ids)
    outside = (ids < -1) | (ids >= weight.shape[0])
    if not unseen and bool(outside.any()):
        got = int(ids[outside][0])
        raise IndexError(f"rerank: ids must be -1 or in [0, {weight.shape[0]}), got {got}")
    wide = wide_dtype(h, weight)
    # By id first: a stable order by logit then keeps ties ascending. Those that are none stand in front.
    some, order = ids.sort(dim=1)
    rows = some.clamp(0, weight.shape[0] - 1)
    with torch.autocast(h.device.type, enabled=False):
        if h.dtype == weight.dtype:
            logits = predict_dots(h.contiguous(), weight.contiguous(), some)
        else:  # a query of another type, e.g. float64 against rows of float32
            logits = torch.bmm(weight[rows].to(wide), h.to(wide).unsqueeze(2)).squeeze(2)
        if normalize:
            logits *= _inverse_norms_at(weight, rows, unseen)
        if bias is not None:
            logits += bias[rows]
        if scale != 1.0:
            logits *= scale
        if absolute:
            logits.abs_()
        if added is not None:
            logits += added.gather(1, order)
    logits = torch.where(some < 0, -torch.inf, logits)
    if unseen:
        logits = torch.where(outside.gather(1, order), torch.nan, logits)
    logits, order = logits.sort(dim=1, descending=True, stable=True)
    found = some.gather(1, order)
    if unseen or bool((some < 0).any()):  # behind every candidate, also one whose logit is -inf
        last = (found == -1).to(torch.int8).sort(dim=1, stable=True).indices
        logits, found = logits.gather(1, last), found.gather(1, last)
    return logits[:, :k].contiguous(), found[:, :k].contiguous()
