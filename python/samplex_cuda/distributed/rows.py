"""What a sharded step adds for class rows on the unit sphere, a learned scale, and negatives of the caller."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from samplex_cuda import _device, chunking
from samplex_cuda.draw import Draw, Negatives
from samplex_cuda.functional._inputs import target_weights
from samplex_cuda.losses import Loss
from samplex_cuda.ops.loss_types import acc_dtype
from samplex_cuda.ops.sphere import inverse_norms, unit_rows
from samplex_cuda.prediction import valid_targets
from samplex_cuda.rng import fold_in
from samplex_cuda.samplers.mixture import Mixture
from samplex_cuda.samplers.static import LogUniform, Uniform, Unigram
from samplex_cuda.samplers.tree import Tree

if TYPE_CHECKING:
    from samplex_cuda.distributed.collectives import Everyone
    from samplex_cuda.heads.classifier import SampledClassifier

__all__ = [
    "fixed_query",
    "inverse_at",
    "joined",
    "key_of_rows",
    "own_draw",
    "refuse_head",
    "target_shares",
    "widened",
    "with_margin",
    "without_rows",
]

_NAME = "SampledClassifier"


def inverse_at(weight: Tensor, rows: Tensor) -> Tensor:
    """1 / |w| of some rows, in the accumulation type; 0 for a row of zeros and for -1.

    Args:
        weight: [n, d].
        rows: int64 of any shape, -1 for none.

    Example:
        >>> import torch
        >>> from samplex_cuda.distributed.rows import inverse_at
        >>> inverse_at(torch.tensor([[3.0, 4.0], [0.0, 0.0]]), torch.tensor([-1, 0, 1]))
        tensor([0.0000, 0.2000, 0.0000])
    """
    flat = rows.reshape(-1)
    found = torch.zeros(flat.shape, dtype=acc_dtype(weight.dtype), device=weight.device)
    if not weight.shape[0]:
        return found.view(rows.shape)
    size = chunking.rows_at_once(weight)
    if _device.host_waits(flat):
        parts = [inverse_norms(weight[some.clamp_min(0)]) for some in flat.split(size)]
        return torch.where(flat >= 0, torch.cat(parts) if parts else found, 0.0).view(rows.shape)
    for at in (flat >= 0).nonzero().squeeze(1).split(size):
        found[at] = inverse_norms(weight[flat[at]])
    return found.view(rows.shape)


def fixed_query(head: SampledClassifier, h: Tensor) -> Tensor:
    """`head._query(h)` without a gradient of a learned scale: a step on several ranks has that of all rows already.

    Args:
        head: with its scale.
        h: [B, d].
    """
    h = unit_rows(h) if head.normalize else h
    return h if head.log_scale is None else h * head.log_scale.detach().exp().to(h.dtype)


def joined(ids: Tensor, log_q: Tensor, hard: Tensor) -> tuple[Tensor, Tensor]:
    """Draws behind hard negatives of each row, in one normalizer: losses divide by the number of both.

    Args:
        ids: int64 [R, m], or [m] for all rows.
        log_q: the shape of ids.
        hard: int64 [R, k]; with k = 0 nothing changes.

    Returns:
        int64 [R, k + m] and their log_q.

    Example:
        >>> import torch
        >>> from samplex_cuda.distributed.rows import joined
        >>> ids, log_q = joined(torch.tensor([5]), torch.tensor([0.5]).log(), torch.tensor([[7]]))
        >>> ids.tolist(), (-log_q - torch.tensor(2.0).log()).exp()  # what counts for each in the sum of exponentials
        ([[7, 5]], tensor([[1., 2.]]))
    """
    if not hard.shape[1]:
        return ids, log_q
    rows, count = hard.shape[0], ids.shape[-1]
    total = math.log(count + hard.shape[1])
    wide = (log_q + (math.log(max(count, 1)) - total)).expand(rows, -1)
    plain = torch.full(hard.shape, -total, dtype=log_q.dtype, device=log_q.device)
    return torch.cat([hard, ids.expand(rows, -1)], 1), torch.cat([plain, wide], 1)


def with_margin(loss: Loss, cosine: Tensor, length: float | Tensor = 1.0) -> tuple[Loss, Tensor, Tensor | None]:
    """The cosines of targets with the margin of the loss on them; the loss without it, and the slope of the margin.

    The function is that of `Margin`, as in csrc/loss/sampled_softmax/sampled_softmax_math.h.

    Args:
        loss: any loss.
        cosine: of targets, any shape, times `length`.
        length: of the queries, a learned scale; the result has it, too.

    Example:
        >>> import torch, samplex_cuda as sx
        >>> from samplex_cuda.distributed.rows import with_margin
        >>> loss = sx.losses.SampledSoftmax(margin=sx.losses.CosFace(0.25))
        >>> with_margin(loss, torch.tensor([0.5]))
        (SampledSoftmax(), tensor([0.2500]), tensor([1.]))
    """
    margin = getattr(loss, "margin", None)
    if margin is None:
        return loss, cosine, None
    plain: Any = dataclasses.replace(loss, margin=None)  # type: ignore[type-var]
    if margin.m1 == 1.0 and margin.m2 == 0.0:
        return plain, cosine - margin.m3 * length, torch.ones_like(cosine)
    c = (cosine / length).clamp(-1.0, 1.0)
    least = 1e-7 if c.dtype is torch.float32 else 1e-14
    sine = ((1.0 - c) * (1.0 + c)).clamp_min(least).sqrt()
    angle = (margin.m1 * c.acos() + margin.m2) / math.pi
    turns = angle.floor()
    rest = (angle - turns) * math.pi
    return plain, (rest.cos() - 2.0 * turns - margin.m3) * length, margin.m1 * rest.sin() / sine


def own_draw(head: SampledClassifier, given: Any, target: Tensor, lead: torch.Size, hard: bool = False) -> Draw:
    """The caller's negatives of this rank's rows, [B, w], checked.

    Negatives [m] for all rows of a rank become rows: another rank may bring others.

    Args:
        head: with the loss that is to take them.
        given: a `Draw` or `Negatives`; or hard negatives, int64 [*, k].
        target: int64 [B] or [B, P].
        lead: leading dimensions of the batch.
        hard: whether they are hard negatives.
    """
    draw = (head._hard_negatives if hard else head._own_negatives)(head.spec(), given, target, lead)
    ids, log_q = draw.ids, draw.log_q
    outside = (ids < 0) | (ids >= head.num_classes)
    if _device.host_waits(ids):
        log_q = torch.where(outside, torch.nan, log_q)  # nobody looks at numbers: the loss becomes nan
    elif bool(outside.any()):
        got, what = int(ids[outside][0]), "hard" if hard else "negatives.ids"
        raise IndexError(f"{_NAME}: {what} must be in [0, {head.num_classes}), got {got}")
    rows = (target.shape[0], ids.shape[-1])
    return Draw(ids.expand(rows).contiguous(), log_q.expand(rows).contiguous(), False)


def widened(head: SampledClassifier, draw: Draw, given: Any, width: int, target: Tensor, lead: torch.Size) -> Draw:
    """Negatives [B, w] as [B, width], those of the rank with the most: the end of a row is its own target, masked.

    Args:
        head: as in `own_draw`.
        draw: from it.
        given: what it was made from.
        width: at least w.
        target: int64 [B, P].
        lead: leading dimensions of the batch.
    """
    rows, own = draw.ids.shape
    if own == width:
        return draw
    if isinstance(given.ids, tuple):  # log q rounded once, as with all rows in one batch
        return head._own_negatives(head.spec(), given, target, lead, width)
    fill = torch.where(valid_targets(target, head.ignore_index), target, -1).amax(1, keepdim=True).clamp_min(0)
    ids = torch.cat([draw.ids, fill.expand(rows, width - own)], 1)
    # The losses divide by the number of columns; a row's own number is meant.
    log_q = torch.nn.functional.pad(draw.log_q, (0, width - own)) + (math.log(max(own, 1)) - math.log(width))
    return Draw(ids, log_q, False)


def target_shares(head: SampledClassifier, given: Tensor | None, y: Tensor, target: Tensor) -> Tensor | None:
    """What targets weigh, the shape of `target`, or None; checked.

    Args:
        head: with the loss that is to take them.
        given: the caller's.
        y: the caller's targets.
        target: the same, [B] or [B, P].
    """
    if given is not None and not head.loss.takes_target_weight:
        raise ValueError(f"{_NAME}: target_weight must be None with {head.loss!r}, got {type(given).__name__}")
    return target_weights(_NAME, given, y, target, head.weight)


def without_rows(
    head: SampledClassifier, h: Any, y: Any, more: dict[str, Any]
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """The arguments of a call with 0 rows instead of this rank's rows: the same sizes are sent.

    For a rank on a GPU that refuses its batch, while the others go on.

    Args:
        head: with its width.
        h: of the call, whatever it is.
        y: of the call.
        more: its further arguments by name.
    """
    device = head.weight.device
    rows = torch.empty(0, head.in_features, dtype=head.weight.dtype, device=device)
    several = isinstance(y, Tensor) and isinstance(h, Tensor) and y.dim() == h.dim()
    lead = h.dim() - 1 if isinstance(h, Tensor) else 1
    target = torch.empty((0, y.shape[-1]) if several else (0,), dtype=torch.int64, device=device)
    none = torch.empty(0, dtype=torch.int64, device=device)
    made: dict[str, Any] = dict.fromkeys(more)
    made["key"] = more["key"]
    made["index"] = None if more["index"] is None else none
    for name, like in (("sample_weight", none), ("target_weight", target)):
        made[name] = None if more[name] is None else like.to(torch.float32)
    for name, kept in (("features", -1), ("context", lead)):
        t = more[name]
        if isinstance(t, Tensor) and t.dim():
            made[name] = t.new_empty(0, *t.shape[kept:])
    hard, ids = more["hard"], getattr(more["negatives"], "ids", None)
    if isinstance(hard, Tensor) and hard.dim():
        made["hard"] = none.view(0, 1).expand(0, hard.shape[-1])
    if ids is not None:
        width = int(ids[0].diff().max()) if isinstance(ids, tuple) else ids.shape[-1]
        made["negatives"] = Negatives(none.view(0, 1).expand(0, width))
    return rows, target, made


def key_of_rows(sampler: Any, everyone: Everyone, rank: int) -> Tensor:
    """The key from which a rank draws for its own rows alone.

    Static samplers and trees number the rows through all ranks: their draws are those of one process that has all rows.
    Others draw from a key of the rank.

    Args:
        sampler: of the head.
        everyone: of the batch.
        rank: this one.
    """
    if _draws_by_row(sampler):
        return torch.cat([everyone.key, everyone.first.reshape(1)])
    return fold_in(everyone.key, rank)


def _draws_by_row(sampler: Any) -> bool:
    if type(sampler) is Mixture:
        return all(_draws_by_row(part) for part in sampler._parts())
    return type(sampler) in (Uniform, LogUniform, Unigram, Tree)


def refuse_head(head: SampledClassifier, op: str) -> None:
    """ValueError for a head that several ranks cannot train.

    Args:
        head: that is to be sharded or replicated.
        op: name for error messages.
    """
    if head.live is not None:
        raise ValueError(
            f"{op}: no class may be retired, got {head.num_classes - head.num_live} of {head.num_classes}: train this "
            "head in one process"
        )
