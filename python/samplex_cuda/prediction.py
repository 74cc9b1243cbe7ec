"""Exact answers over all classes, in chunks: normaliser, NLL, log-probabilities and top-k of a linear classifier.

Everything here costs O(C) per row and belongs to evaluation, not to a training step. Logits are
`s = scale * (h @ weight.T + bias)` (`|s|` with `absolute=True`), computed in fp32 whatever the storage dtype (in fp64
where an input is fp64), one block of rows and one chunk of classes at a time, so that no [B, C] exists unless it is
asked for. No function here records gradients.

`prior(rows)`, where it is given, is added to the logits: [n, C] for the rows of a slice, e.g. log p_n(y|x) of the noise
that negative sampling learned against. It is asked for a block of rows at a time, each small enough that the block
holds at most 2^25 elements (one row, where C is larger).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

import torch
from torch import Tensor

__all__ = ["Prior", "exact_log_prob", "exact_lse", "exact_nll", "exact_scores", "exact_topk"]

Prior: TypeAlias = Callable[[slice], Tensor]

# A block of logits holds at most this many elements (16 MB in fp32), and so does an up-cast chunk of weight rows.
_BLOCK_ELEMENTS = 1 << 22
# Beyond this many rows a GEMM gains nothing from more of them.
_BLOCK_ROWS = 1024
# A block of rows of a prior holds at most this many elements: it is [rows, C] at once.
_PRIOR_ELEMENTS = 1 << 25


def _describe(x: object) -> str:
    """What an error says it got: `[3, 32] float16`."""
    if not isinstance(x, Tensor):
        return repr(x)
    return f"{list(x.shape)} {str(x.dtype).removeprefix('torch.')}"


def _check(op: str, h: Tensor, weight: Tensor, bias: Tensor | None, chunk_size: int | None) -> None:
    if not (isinstance(weight, Tensor) and weight.dim() == 2 and weight.is_floating_point()):
        raise ValueError(f"{op}: weight must be [C, d] floating point, got {_describe(weight)}")
    if not (isinstance(h, Tensor) and h.dim() == 2 and h.shape[1] == weight.shape[1] and h.is_floating_point()):
        raise ValueError(f"{op}: h must be [B, {weight.shape[1]}] floating point, got {_describe(h)}")
    if bias is not None and (bias.dim() != 1 or bias.shape[0] != weight.shape[0] or not bias.is_floating_point()):
        raise ValueError(f"{op}: bias must be [{weight.shape[0]}] floating point, got {_describe(bias)}")
    if h.device != weight.device:
        raise ValueError(f"{op}: h must be on {weight.device} as weight is, got {h.device}")
    if weight.shape[0] < 1:
        raise ValueError(f"{op}: weight must have at least one class, got {_describe(weight)}")
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"{op}: chunk_size must be at least 1, got {chunk_size}")


def _wide(h: Tensor, weight: Tensor) -> torch.dtype:
    """What logits are computed in: at least fp32."""
    return torch.promote_types(torch.promote_types(h.dtype, weight.dtype), torch.float32)


def _row_blocks(h: Tensor, weight: Tensor, prior: Prior | None) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
    """Blocks of rows of `h`, up-cast to the dtype the logits are computed in, and their prior."""
    wide = _wide(h, weight)
    size = _BLOCK_ROWS if prior is None else max(1, min(_BLOCK_ROWS, _PRIOR_ELEMENTS // weight.shape[0]))
    for begin in range(0, h.shape[0], size):
        rows = slice(begin, min(begin + size, h.shape[0]))
        yield rows, h[rows].to(wide), None if prior is None else prior(rows)


def _logit_chunks(
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: float,
    absolute: bool,
    prior: Tensor | None,
    chunk_size: int | None,
) -> Iterator[tuple[int, Tensor]]:
    """Yields (first class, logits [rows, chunk]) for one block of rows; the logits are the caller's to overwrite."""
    num_classes, dim = weight.shape
    if chunk_size is None:
        chunk_size = max(256, min(_BLOCK_ELEMENTS // max(h.shape[0], 1), _BLOCK_ELEMENTS // max(dim, 1)))
    for begin in range(0, num_classes, chunk_size):
        end = min(begin + chunk_size, num_classes)
        logits = h @ weight[begin:end].to(h.dtype).t()
        if bias is not None:
            logits += bias[begin:end].to(h.dtype)
        if scale != 1.0:
            logits *= scale
        if absolute:
            logits.abs_()
        if prior is not None:
            logits += prior[:, begin:end].to(h.dtype)
        yield begin, logits


def _merge_lse(running: Tensor, logits: Tensor) -> Tensor:
    # In fp64, so that thousands of chunks add no rounding of their own.
    return torch.logaddexp(running, logits.logsumexp(1).double())


def _no_mass(h: Tensor) -> Tensor:
    return torch.full((h.shape[0],), -torch.inf, dtype=torch.float64, device=h.device)


@torch.no_grad()
def exact_lse(
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    scale: float = 1.0,
    absolute: bool = False,
    prior: Prior | None = None,
    chunk_size: int | None = None,
) -> Tensor:
    """Log of the softmax normaliser of each row.

    Args:
        h: [B, d].
        weight: [C, d].
        bias: [C].
        scale: inverse temperature, applied to `h @ weight.T + bias`.
        absolute: the logit is the absolute value.
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
    wide = _wide(h, weight)
    out = torch.empty(h.shape[0], dtype=wide, device=h.device)
    with torch.autocast(h.device.type, enabled=False):
        for rows, block, added in _row_blocks(h, weight, prior):
            lse = _no_mass(block)
            for _, logits in _logit_chunks(block, weight, bias, scale, absolute, added, chunk_size):
                lse = _merge_lse(lse, logits)
            out[rows] = lse.to(wide)
    return out


def valid_targets(target: Tensor, ignore_index: int) -> Tensor:
    """Which entries of target [B] or [B, P] are classes: not `ignore_index`, and with several a row not -100 either."""
    valid = target != ignore_index
    return valid & (target != -100) if target.dim() == 2 and target.shape[1] > 1 else valid


@torch.no_grad()
def exact_nll(
    h: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    scale: float = 1.0,
    absolute: bool = False,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
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
        class_weight: [C], multiplies the term of each target, as in `F.cross_entropy` with `reduction="none"`.
        ignore_index: targets of this value are skipped; a row with no other has the value 0.
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
        raise ValueError(f"exact_nll: target must be [{b}] or [{b}, P] int64, got {_describe(target)}")
    target = target.unsqueeze(1) if target.dim() == 1 else target
    valid = valid_targets(target, ignore_index)
    outside = valid & ((target < 0) | (target >= weight.shape[0]))
    if bool(outside.any()):
        got = int(target[outside][0])
        raise IndexError(f"exact_nll: target must be in [0, {weight.shape[0]}) or {ignore_index}, got {got}")
    wide = _wide(h, weight)
    out = torch.empty(h.shape[0], dtype=wide, device=h.device)
    with torch.autocast(h.device.type, enabled=False):
        for rows, block, added in _row_blocks(h, weight, prior):
            lse = _no_mass(block)
            positive = torch.zeros(target[rows].shape, dtype=wide, device=h.device)
            for begin, logits in _logit_chunks(block, weight, bias, scale, absolute, added, chunk_size):
                lse = _merge_lse(lse, logits)
                # Taken from the same product as the normaliser, so that the NLL is not below zero by rounding.
                local = target[rows] - begin
                here = valid[rows] & (local >= 0) & (local < logits.shape[1])
                positive = torch.where(here, logits.gather(1, local.clamp(0, logits.shape[1] - 1)), positive)
            terms = torch.where(valid[rows], lse.unsqueeze(1) - positive, 0.0)
            if class_weight is not None:
                terms *= class_weight[target[rows].clamp(0, weight.shape[0] - 1)]
            out[rows] = (terms.sum(1) / valid[rows].sum(1).clamp(min=1)).to(wide)
    return out


def _all_classes(
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: float,
    absolute: bool,
    prior: Prior | None,
    chunk_size: int | None,
    *,
    normalised: bool,
) -> Tensor:
    """Logits [B, C], or their log_softmax."""
    wide = _wide(h, weight)
    out = torch.empty(h.shape[0], weight.shape[0], dtype=wide, device=h.device)
    with torch.autocast(h.device.type, enabled=False):
        for rows, block, added in _row_blocks(h, weight, prior):
            lse = _no_mass(block)
            for begin, logits in _logit_chunks(block, weight, bias, scale, absolute, added, chunk_size):
                out[rows, begin : begin + logits.shape[1]] = logits
                if normalised:
                    lse = _merge_lse(lse, logits)
            if normalised:
                out[rows] -= lse.to(wide).unsqueeze(1)
    return out


@torch.no_grad()
def exact_scores(
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    scale: float = 1.0,
    absolute: bool = False,
    prior: Prior | None = None,
    chunk_size: int | None = None,
) -> Tensor:
    """Logits of all classes, not normalised.

    Args:
        h: [B, d].
        weight: [C, d].
        bias: [C].
        scale: inverse temperature.
        absolute: the logit is the absolute value.
        prior: added to the logits; see the module.
        chunk_size: classes per chunk; chosen from the shapes when not given.

    Returns:
        [B, C] fp32, or fp64 where `h` or `weight` is.

    Example:
        >>> import torch
        >>> from samplex_cuda.prediction import exact_scores
        >>> h, weight = torch.randn(3, 8), torch.randn(100, 8)
        >>> torch.allclose(exact_scores(h, weight, chunk_size=32), h @ weight.T, atol=1e-5)
        True
    """
    _check("exact_scores", h, weight, bias, chunk_size)
    return _all_classes(h, weight, bias, scale, absolute, prior, chunk_size, normalised=False)


@torch.no_grad()
def exact_log_prob(
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    scale: float = 1.0,
    absolute: bool = False,
    prior: Prior | None = None,
    chunk_size: int | None = None,
) -> Tensor:
    """Log-probabilities of all classes under the full softmax.

    The result is [B, C] by definition; beyond it only one chunk is held.

    Args:
        h: [B, d].
        weight: [C, d].
        bias: [C].
        scale: inverse temperature.
        absolute: the logit is the absolute value.
        prior: added to the logits; see the module.
        chunk_size: classes per chunk; chosen from the shapes when not given.

    Returns:
        [B, C] fp32, or fp64 where `h` or `weight` is.

    Example:
        >>> import torch
        >>> from samplex_cuda.prediction import exact_log_prob
        >>> log_p = exact_log_prob(torch.randn(3, 8), torch.randn(100, 8))
        >>> log_p.shape, torch.allclose(log_p.exp().sum(1), torch.ones(3))
        (torch.Size([3, 100]), True)
    """
    _check("exact_log_prob", h, weight, bias, chunk_size)
    return _all_classes(h, weight, bias, scale, absolute, prior, chunk_size, normalised=True)


def _stable_topk(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Top k of each row in descending order, equal values in ascending column order; nan counts as largest."""
    if k == 1:
        return logits.max(1, keepdim=True)  # the first maximal column, says torch
    if k == logits.shape[1]:
        return logits.sort(dim=1, descending=True, stable=True)
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
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= weight.shape[0]:
        raise ValueError(f"exact_topk: k must be an int in [1, {weight.shape[0]}], got {k!r}")
    wide = _wide(h, weight)
    out_logits = torch.empty(h.shape[0], k, dtype=wide, device=h.device)
    out_ids = torch.empty(h.shape[0], k, dtype=torch.int64, device=h.device)
    with torch.autocast(h.device.type, enabled=False):
        for rows, block, added in _row_blocks(h, weight, prior):
            best = torch.empty(block.shape[0], 0, dtype=wide, device=h.device)
            ids = torch.empty(block.shape[0], 0, dtype=torch.int64, device=h.device)
            for begin, logits in _logit_chunks(block, weight, bias, scale, absolute, added, chunk_size):
                values, columns = _stable_topk(logits, min(k, logits.shape[1]))
                # What is held comes first and has the lower ids, so a stable order keeps ties ascending.
                values, order = torch.cat([best, values], 1).sort(dim=1, descending=True, stable=True)
                ids = torch.cat([ids, columns + begin], 1).gather(1, order)[:, :k]
                best = values[:, :k]
            out_logits[rows], out_ids[rows] = best, ids
    return out_logits, out_ids
