"""Leak: the share of a model's softmax on classes that its draws cannot push down (docs/correction.md)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from samplex_cuda._checks import check_dense, check_int, describe
from samplex_cuda.heads.checks import refuse_sphere
from samplex_cuda.prediction import valid_targets

__all__ = ["LEAK", "leak", "leaks"]

LEAK = 0.2  # from here on it is worth a warning
_NUMBERS = 1 << 22  # rows x classes at a time
_NAME = "leak"


@torch.no_grad()
def leak(
    head: Any,
    h: Tensor,
    y: Tensor | None = None,
    *,
    sampler: Any = None,
    num_samples: int | None = None,
    shared: bool | None = None,
    features: Tensor | None = None,
    context: Tensor | None = None,
) -> Tensor:
    """Sum over the classes of max(0, p(c) - m q(c)) of each row: p the softmax of the head, q what it draws from.

    A class comes among m draws with a probability of at most m q, and only then is its logit pushed down. What the
    softmax has above that stays where it is, or is driven up: training with a large leak ends in a model that is far
    worse than its sampled loss says. Every class is examined, so a few dozen rows are enough and C d work each; memory
    is that of some ten tensors of 2^22 numbers.

    Args:
        head: a `SampledClassifier`, trained or in training.
        h: [*, d] floating point.
        y: int64 [*], or [*, P] padded with `head.ignore_index`: targets, which their rows push up and do not draw. They
            are no part of the sum, and q of draws per row is the distribution without them. None: every class counts.
        sampler: another one than the head's.
        num_samples: m; by default the head's.
        shared: whether the batch shares its draws; by default as the head. The rows given count as the batch.
        features: [*, f], what the sampler looks at where that is not h.
        context: int64 [*], for samplers that need one.

    Returns:
        [*] float64 between 0 and 1.

    Example:
        >>> import torch, samplex_cuda as sx
        >>> head = sx.SampledClassifier(2, 4, sx.samplers.Unigram([1, 1, 1, 7]), num_samples=2, bias=False)
        >>> with torch.no_grad():
        ...     _ = head.weight.copy_(torch.tensor([[3.0, 0], [2, 0], [0, 0], [0, 0]]))
        >>> sx.diagnostics.leak(head, torch.ones(1, 2))  # softmax .68, .25, .03, .03 beside 2 q = .2, .2, .2, 1.4
        tensor([0.5321], dtype=torch.float64)
        >>> sx.diagnostics.leak(head, torch.ones(1, 2), torch.tensor([0]))  # 0 is the target; 2 q(1) = 2/9
        tensor([0.0285], dtype=torch.float64)
    """
    refuse_sphere(head, _NAME)
    sampler = head.sampler if sampler is None else sampler
    if sampler is None:
        raise ValueError(f"{_NAME}: sampler must be given for a head without one, got None")
    if sampler.num_classes != head.num_classes:
        raise ValueError(f"{_NAME}: sampler must have num_classes = {head.num_classes}, got {sampler.num_classes}")
    count = head.num_samples if num_samples is None else num_samples
    check_int(_NAME, "num_samples", count)
    width = head.in_features
    if not isinstance(h, Tensor) or h.dim() < 1 or h.shape[-1] != width or not h.is_floating_point():
        raise ValueError(f"{_NAME}: h must be [*, {width}] floating point, got {describe(h)}")
    if h.device != head.weight.device:
        raise ValueError(f"{_NAME}: h must be on {head.weight.device}, where the head is, got {describe(h)}")
    lead = h.shape[:-1]
    if y is not None:
        if not isinstance(y, Tensor) or y.dtype != torch.int64 or y.shape[: len(lead)] != lead or y.dim() > h.dim():
            raise ValueError(f"{_NAME}: y must be {list(lead)} or {[*lead, 'P']} int64 to fit h, got {describe(y)}")
        if y.device != h.device:
            raise ValueError(f"{_NAME}: y must be on {h.device} as h, got {describe(y)}")
    if features is not None and (
        not isinstance(features, Tensor) or features.shape[:-1] != lead or features.dim() != h.dim()
    ):
        raise ValueError(f"{_NAME}: features must be {[*lead, 'f']} to fit h, got {describe(features)}")
    if context is not None and (not isinstance(context, Tensor) or context.shape != lead):
        raise ValueError(f"{_NAME}: context must be {list(lead)} int64 to fit h, got {describe(context)}")
    if sampler._needs_context and context is None:
        raise ValueError(f"{_NAME}: context must be int64 {list(lead)} for this sampler, got None")
    h = check_dense(_NAME, "h", h)
    y = None if y is None else check_dense(_NAME, "y", y)
    features = None if features is None else check_dense(_NAME, "features", features)
    context = None if context is None else check_dense(_NAME, "context", context)
    flat = h.detach().reshape(-1, width)
    target = None if y is None else _targets(head, y.reshape(flat.shape[0], y.shape[-1] if y.dim() == h.dim() else 1))
    look = flat if features is None else features.detach().reshape(flat.shape[0], features.shape[-1])
    given = None if context is None else context.reshape(-1)
    by_shared = bool(head.shared) if shared is None else bool(shared)
    return leaks(head, flat, target, [(sampler, look, by_shared, [count])], given)[0][:, 0].reshape(lead)


def _targets(head: Any, several: Tensor) -> Tensor:
    """Targets [B, P], padded with -1."""
    valid = valid_targets(several, head.ignore_index)
    bad = several[valid & ((several < 0) | (several >= head.num_classes))]
    if bad.numel():
        raise IndexError(f"{_NAME}: y must be in [0, {head.num_classes}) or {head.ignore_index}, got {int(bad[0])}")
    return torch.where(valid, several, -1)


@torch.no_grad()
def leaks(
    head: Any,
    h: Tensor,
    target: Tensor | None,
    laws: Sequence[tuple[Any, Tensor, bool, Sequence[int]]],
    context: Tensor | None = None,
) -> list[Tensor]:
    """`leak` of several samplers at once; logits are made once for all.

    Args:
        head: a `SampledClassifier`.
        h: [B, d].
        target: int64 [B, P] with -1 for none, or None.
        laws: of each sampler: itself, what it looks at [B, f], whether draws are shared, and numbers of draws.
        context: [B] or None.

    Returns:
        for each sampler [B, numbers of draws] float64.

    Example:
        >>> import torch, samplex_cuda as sx
        >>> from samplex_cuda.heads.leak import leaks
        >>> h, flat = torch.randn(3, 8), sx.samplers.Uniform(100)
        >>> head = sx.SampledClassifier(8, 100, flat, num_samples=5)
        >>> leaks(head, h, None, [(flat, h, False, (5, 100))])[0].shape
        torch.Size([3, 2])
    """
    rows, classes = h.shape[0], head.num_classes
    out = [torch.zeros(rows, len(sizes), dtype=torch.float64, device=h.device) for *_, sizes in laws]
    wide = min(classes, _NUMBERS)
    many = max(1, _NUMBERS // classes)
    fixed = [_mean_law(law, slice(0, classes), context) if wide == classes and _is_mean(law) else None for law in laws]
    for first in range(0, rows, many):
        part = slice(first, min(first + many, rows))
        own = None if target is None else target[part]
        given = None if context is None else context[part]
        seen = [look[part] for _, look, _, _ in laws]
        pieces = [slice(begin, min(begin + wide, classes)) for begin in range(0, classes, wide)]
        whole = len(pieces) == 1
        parts = [_logits(head, h[part], seen, laws, piece, given) for piece in pieces] if whole else None
        lse = torch.full((part.stop - first,), -torch.inf, device=h.device, dtype=torch.float64)
        for piece in pieces:
            logits = parts[0] if parts else _logits(head, h[part], seen, laws, piece, given)
            lse = torch.logaddexp(lse, logits.logsumexp(1).double())
        left = [_log_left(law, look, own, given) for law, look in zip(laws, seen, strict=True)]
        for piece in pieces:
            logits = parts[0] if parts else _logits(head, h[part], seen, laws, piece, given)
            p = (logits - lse[:, None].to(logits.dtype)).exp_()
            for row, column in _inside(own, piece):
                p[row, column] = 0.0
            for number, (law, look) in enumerate(zip(laws, seen, strict=True)):
                fast = fixed[number]
                log_q = _law(law, look, piece, given, context, whole) if fast is None else fast
                if left[number] is not None:
                    log_q = log_q - left[number][:, None].to(log_q.dtype)  # type: ignore[index]
                q = log_q.exp()
                for place, count in enumerate(law[3]):
                    over = torch.sub(p, q, alpha=float(count)).clamp_(min=0)
                    out[number][part, place] += over.sum(1, dtype=torch.float64)
    return out


def _logits(head: Any, h: Tensor, seen: list[Tensor], laws: Any, piece: slice, context: Tensor | None) -> Tensor:
    """[b, n] in the precision of the loss."""
    acc = torch.float64 if torch.float64 in (h.dtype, head.weight.dtype) else torch.float32
    out = h.to(acc) @ head.weight.detach()[piece].to(acc).T
    if head.bias is not None:
        out += head.bias.detach()[piece].to(acc)
    out *= head.scale
    if head.loss.absolute:
        out = out.abs_()
    if head.loss.needs.prior:  # its scores are relative to the distribution of the head's sampler
        look = next((x for x, law in zip(seen, laws, strict=True) if law[0] is head.sampler), h)
        ids = torch.arange(piece.start, piece.stop, device=h.device).expand(h.shape[0], -1).contiguous()
        out = out + head.sampler.log_prob(look, ids, context=context).to(acc)
    return out


def _inside(target: Tensor | None, piece: slice) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows and columns of the targets that a piece of the classes holds."""
    if target is not None:
        row, column = ((target >= piece.start) & (target < piece.stop)).nonzero(as_tuple=True)
        yield row, target[row, column] - piece.start


def _log_left(law: Any, look: Tensor, target: Tensor | None, context: Tensor | None) -> Tensor | None:
    """log of what the targets leave of a distribution that is drawn from without them, [b]; None for the whole one.

    A row with nothing left has no other class to push down: any number does.
    """
    sampler, _, shared, _ = law
    if shared or target is None:
        return None
    return sampler._log_left(look, target, context, look.shape[0]).nan_to_num(neginf=0.0)


def _is_mean(law: Any) -> bool:
    """Whether draws come from the mean of the rows' distributions."""
    return bool(law[2] and getattr(law[0], "conditional", False))


def _mean_law(law: Any, piece: slice, context: Tensor | None) -> Tensor:
    """log q of shared draws for a piece of the classes, [1, n]."""
    ids = torch.arange(piece.start, piece.stop, device=law[1].device)
    return law[0].log_prob_shared(law[1], ids, context=context)[None]


def _law(law: Any, look: Tensor, piece: slice, given: Tensor | None, context: Tensor | None, whole: bool) -> Tensor:
    """log q of a piece of the classes, [b, n] or [1, n]; `given` is the part of `context` for these rows."""
    sampler = law[0]
    if _is_mean(law):
        return _mean_law(law, piece, context)
    if whole:
        return sampler.log_prob_all(look, context=given) if sampler._needs_context else sampler.log_prob_all(look)
    ids = torch.arange(piece.start, piece.stop, device=look.device).expand(look.shape[0], -1).contiguous()
    return sampler.log_prob(look, ids, context=given)
