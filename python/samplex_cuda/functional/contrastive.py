"""The contrastive loss: a query against its own key and negatives, with gradients to queries and keys."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from samplex_cuda import _device
from samplex_cuda._checks import check_number, describe, op_error
from samplex_cuda.functional._contrastive_checks import (
    check_known,
    check_log_q,
    check_negatives,
    check_pair_log_q,
    check_queue,
    check_tensors,
    check_tower,
    way_of,
)
from samplex_cuda.functional._join import join_losses
from samplex_cuda.losses import SampledSoftmax
from samplex_cuda.ops.fused_loss import run_loss
from samplex_cuda.ops.loss_types import REDUCTIONS, Form, Inputs, LossGrad, Sink, acc_dtype
from samplex_cuda.ops.row_gradients import entries
from samplex_cuda.ops.subset_sample import subset_sample
from samplex_cuda.ops.symmetric_softmax import MOST_ROWS, PairMasks, symmetric_softmax
from samplex_cuda.optim.fusion import fusion_of
from samplex_cuda.rng import Key, key_tensor
from samplex_cuda.samplers.in_batch import TowerKeys
from samplex_cuda.samplers.queue import KeyQueue

__all__ = ["contrastive"]

_OP = "contrastive"
_LOSS = SampledSoftmax()
_NO_ID = -(1 << 63)  # no positive is skipped
EXACT_LIMIT = 1 << 26  # numbers that `exact` keeps for its backward: half a gigabyte of float64


def contrastive(
    queries: Tensor,
    keys: Tensor,
    positives: Tensor | None = None,
    negatives: Tensor | TowerKeys | None = None,
    log_q: Tensor | None = None,
    *,
    num_negatives: int | None = None,
    sampler: Any = None,
    key: Key | Tensor | None = None,
    key_ids: Tensor | None = None,
    known_positives: tuple[Tensor, Tensor] | None = None,
    query_log_q: Tensor | None = None,
    exact: bool = False,
    scale: float = 1.0,
    symmetric: bool = False,
    group: Any = None,
    queue: KeyQueue | None = None,
    reduction: str = "mean",
    sparse: bool | None = None,
) -> Tensor:
    r"""Contrastive loss (InfoNCE): each query is to find its own key among negatives.

    With :math:`s_{ij} = \text{scale}\; q_i \cdot k_j` the loss of query i with its key p and negatives :math:`N_i` is

    .. math::
        -\log \frac{\exp s_{ip}}{\exp s_{ip} + \sum_{j \in N_i} \exp(s_{ij} - \log q_{ij} - \log |N_i|)}

    if `log_q` is given, and the same without the correction (Wen 2020, Eq. 3.1) otherwise. With the
    correction the sum estimates that over all other keys, whatever distribution the negatives have; without it keys
    that are drawn often are pushed away more often than they should be.

    **Keys and positives.** A memory bank: `keys` [n, d] and `positives` [B], the row of each query's key. In-batch:
    `keys` [n, d] without `positives`, one for each query: row i is the key of query i. Rows from B on (of a second
    sampler, a queue, mined ones) are further negatives of every query; `key_ids` must then say what each key is.

    **Negatives**, in one of these ways:

    =============================  =================================================================  ============
    given                          negatives of a query                                               correction
    =============================  =================================================================  ============
    `negatives`                    those                                                              if `log_q`
    `num_negatives`                a uniform subset of the other keys, without replacement            none
    `num_negatives` and `sampler`  draws of the sampler, which leaves the positive out                its log_q
    `num_negatives` and `exact`    the expectation over *all* such subsets (Eq. 3.2); small n only    none
    nothing, in-batch              all other keys of the batch                                        if `log_q`
    `InBatch.tower_keys`           the batch, draws of any sampler, and mined keys of each query      its log_q
    =============================  =================================================================  ============

    One pass over the gathered keys, forward and backward, by the kernels of `sampled_softmax`: no [B, k, d] tensor.

    Args:
        queries: [B, d]. Under autocast they are cast to the dtype of `keys`.
        keys: [n, d] in float32, float64, float16 or bfloat16: a parameter, a buffer, or the output of an encoder; sums
            run in float32 (float64 for float64).
        positives: int64 [B] rows of `keys`, or None: in-batch.
        negatives: int64 [B, k] rows of `keys` for each query, or [k] for all. One that is the query's positive takes no
            part. In-batch: the `TowerKeys` whose ids `keys` encodes; see `sx.samplers.InBatch.tower_keys`.
        log_q: log-probability of the negatives under the distribution they were drawn from, shape of `negatives`.
            In-batch [n]: of each key as a draw, such as the log of how often it is some query's positive
            (`sx.samplers.StreamingFrequency`). The divisor is n - 1, also where copies are masked.
        num_negatives: k.
        sampler: a sampler over the n keys, such as `sx.samplers.Unigram`; it sees the queries.
        key: randomness of the draw; see `samplex_cuda.Key`. None: torch's default generator.
        key_ids: int64 [n]: what each key is. A key of the same id as the query's own is not a negative; not with
            `exact`. Draws are masked after they were drawn, so that their log_q and the divisor stay right.
        known_positives: every known id of each query as CSR (offsets int64 [B + 1], ids int64 [m]): keys of these ids
            are not negatives of that query. Without `key_ids`, of a bank, these are rows of `keys`. Not with `exact`.
        query_log_q: [B], with `symmetric`: log-probability of each query as a draw, for the other direction.
        exact: the expectation over all subsets of `num_negatives` other keys, enumerated; O(B C(n-1, k) k).
        scale: multiplies the scores (1 / temperature), before the correction.
        symmetric: in-batch with n = B, the mean of this loss and that of the keys against the queries, from one matrix
            of scores; with `log_q` it also needs `query_log_q`. With `group` or `queue` these take two.
        group: in-batch: a process group whose ranks put their keys (with `key_ids` and `log_q`) together, each with the
            same number of queries. The loss is the mean over this rank's queries, and gradients of the keys are summed
            over the ranks: right if the gradients of the encoders are then averaged, as DistributedDataParallel
            does. Every rank must call it. With `symmetric`, the queries are put together, too.
        queue: in-batch with `key_ids`: a `sx.samplers.KeyQueue`, whose keys are further negatives; where there is a
            `log_q`, with theirs. It is not changed: push this batch afterwards.
        reduction: "mean" over the queries (0 for none), "sum" or "none".
        sparse: whether the gradient of `keys` is a coalesced sparse COO tensor (touched rows only) or dense. None:
            sparse for a bank that is a leaf, dense for what an encoder made and in-batch.

    Returns:
        The loss in float32 (float64 for float64): a scalar, or [B] for "none".

    Example:
        >>> import torch, samplex_cuda as sx
        >>> queries, bank = torch.randn(8, 16), torch.randn(1000, 16, requires_grad=True)
        >>> own = torch.arange(8)
        >>> loss = sx.functional.contrastive(queries, bank, own, num_negatives=64, scale=0.5)
        >>> loss.backward()
        >>> bank.grad.is_coalesced(), bank.grad.shape
        (True, torch.Size([1000, 16]))
        >>> views = torch.randn(8, 16)  # in-batch: row i is the key of query i
        >>> torch.allclose(
        ...     sx.functional.contrastive(queries, views),
        ...     torch.nn.functional.cross_entropy(queries @ views.T, torch.arange(8)), rtol=1e-4
        ... )
        True
    """
    tower, rows = (negatives, None) if isinstance(negatives, TowerKeys) else (None, negatives)
    if tower is not None:
        check_tower(tower, queries, keys, positives, log_q, key_ids, num_negatives, group, queue, symmetric)
        log_q, key_ids = tower.log_q, tower.ids
    in_batch = positives is None
    queries = check_tensors(queries, keys, positives, key_ids, reduction)
    scale = check_number("contrastive", "scale", scale, -math.inf)
    if not (sampler is None or hasattr(sampler, "sample")):
        raise TypeError(
            f"contrastive: sampler must be a sampler of samplex_cuda.samplers or None, got {describe(sampler)}"
        )
    how = way_of(
        in_batch, rows, log_q, num_negatives, sampler, key, key_ids, known_positives, exact, symmetric,
        query_log_q, group,
    )  # fmt: skip
    check_queue(queue, how, keys, key_ids)
    batch, first = queries.shape[0], 0
    known = None if known_positives is None else check_known(known_positives, batch, in_batch, key_ids, keys.device)
    if in_batch and how == "given" and keys.shape[0] != batch:
        raise ValueError(f"{_OP}: positives must be [{batch}] int64 with given negatives of a bank, got None")
    if symmetric:
        if keys.shape[0] != batch:
            raise ValueError(f"{_OP}: symmetric must be False if there are more keys than queries, got True")
        check_pair_log_q(log_q, query_log_q, queries, keys)
        if group is None and queue is None and batch <= MOST_ROWS:
            return _reduce(_symmetric(queries, keys, key_ids, known, log_q, query_log_q, scale), reduction)
        if known is not None:
            raise ValueError(
                f"{_OP}: known_positives must be None with symmetric=True and a group, a queue or more than "
                f"{MOST_ROWS} queries, got {describe(known_positives)}"
            )
        to = contrastive(
            queries, keys, log_q=log_q, key_ids=key_ids, scale=scale, group=group, queue=queue, reduction=reduction
        )
        back = contrastive(
            keys, queries, log_q=query_log_q, key_ids=key_ids, scale=scale, group=group, reduction=reduction
        )
        return (to + back) / 2
    if how == "batch":
        if log_q is not None and tower is None:
            log_q = check_log_q(log_q, keys[:, 0], "[n]")
        if group is not None:
            keys, key_ids, log_q, first = _gather(keys, key_ids, log_q, batch, group)
        if queue is not None and len(queue):
            held = queue.held()
            assert key_ids is not None
            keys, key_ids = torch.cat([keys, held.keys]), torch.cat([key_ids, held.ids])
            log_q = None if log_q is None else torch.cat([log_q.to(held.log_q.dtype), held.log_q])
    n = keys.shape[0]
    if in_batch:
        positives = _range(first, first + batch, keys.device)
    assert positives is not None
    if how == "exact":
        assert num_negatives is not None
        return _reduce(_exact(queries, keys, positives.contiguous(), num_negatives, scale), reduction)
    if tower is not None:
        return _tower_loss(queries, keys, tower, positives, known, scale, reduction)
    sink: Sink | None = None
    if how == "batch":
        # Shared by all rows; the loss leaves each row's own out.
        rows = positives if n == batch else _range(0, n, keys.device)
        if log_q is not None:
            # The loss divides by its n entries, of which one is the positive: n - 1 are draws.
            log_q = log_q + (math.log((n - 1) / n) if n > 1 else 0.0)
        sink = _BatchSink(first)
    elif how == "sampler":
        draw = sampler.sample(queries.detach(), num_negatives, exclude=positives, key=key)
        rows, log_q = draw.ids, draw.log_q
    elif how == "subset":
        rows = _subset(positives, num_negatives, n, key)
    assert rows is not None
    check_negatives(rows, queries, keys)
    if how == "given" and log_q is not None:
        log_q = check_log_q(log_q, rows, "the shape of negatives")
    if sparse is None:
        sparse = not in_batch and keys.is_leaf
    sparse, labels = bool(sparse), None
    if key_ids is not None or known is not None:
        own = key_ids if how == "batch" and n == batch and key_ids is not None else _names(key_ids, positives)
        if rows.dim() == 1:
            labels = (key_ids if how == "batch" and key_ids is not None else _names(key_ids, rows)), own
        else:
            rows = _without(rows, _names(key_ids, rows), own, known, positives)
            known = None
    return _loss(
        queries, keys, positives, rows, log_q, labels, known, scale, reduction, sparse, None if sparse else sink
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------ masks
def _names(key_ids: Tensor | None, rows: Tensor) -> Tensor:
    """What keys are. Rows out of range, of which the loss complains, read none."""
    return rows if key_ids is None else key_ids[rows.clamp(0, max(key_ids.shape[0] - 1, 0))]


def _without(
    negatives: Tensor, names: Tensor, own: Tensor, known: tuple[Tensor, Tensor] | None, positives: Tensor
) -> Tensor:
    """Negatives [B, k] where those that the query knows are its positive: the loss masks draws that are."""
    hit = names == own[:, None]
    if known is not None:
        hit = hit | is_known(names, known)
    return torch.where(hit, positives[:, None], negatives)


def is_known(ids: Tensor, known: tuple[Tensor, Tensor]) -> Tensor:
    """Whether ids [B, k] are among those of their row, bool [B, k]; no wait for a device.

    Args:
        ids: int64 [B, k].
        known: CSR pair, offsets int64 [B + 1] and ids int64 [n].

    Example:
        >>> import torch
        >>> from samplex_cuda.functional.contrastive import is_known
        >>> is_known(torch.tensor([[5, 7], [5, 7]]), (torch.tensor([0, 1, 3]), torch.tensor([7, 8, 5])))
        tensor([[False,  True],
                [ True, False]])
    """
    offsets, listed = known
    n = listed.shape[0]
    if n == 0 or ids.numel() == 0:
        return torch.zeros_like(ids, dtype=torch.bool)
    # An id by its rank among all listed ones, so that (row, id) fits one number.
    values = listed.sort().values
    rows = torch.searchsorted(offsets[1:].contiguous(), torch.arange(n, device=ids.device), right=True)
    pairs = (rows * n + torch.searchsorted(values, listed)).sort().values
    rank = torch.searchsorted(values, ids).clamp_(max=n - 1)
    wanted = torch.arange(ids.shape[0], device=ids.device)[:, None] * n + rank
    place = torch.searchsorted(pairs, wanted).clamp_(max=n - 1)
    return (values[rank] == ids) & (pairs[place] == wanted)


def _present(known: tuple[Tensor, Tensor], labels: Tensor) -> tuple[Tensor, Tensor]:
    """The known ids that are among the labels: a row compares each draw with all of its list."""
    offsets, ids = known
    if _device.host_waits(ids):
        return known
    kept = torch.isin(ids, labels)
    return torch.nn.functional.pad(kept.cumsum(0), (1, 0))[offsets], ids[kept]


# ------------------------------------------------------------------------------------------------ negatives
def _subset(positives: Tensor, num_negatives: int | None, n: int, key: Key | Tensor | None) -> Tensor:
    assert num_negatives is not None
    if positives.shape[0] > 0 and num_negatives > n - 1:
        raise ValueError(
            f"{_OP}: num_negatives must be at most {n - 1}, the keys besides the positive, got {num_negatives}"
        )
    if positives.shape[0] == 0:
        return positives.new_empty((0, num_negatives))
    pair = key_tensor(_OP, key, positives.device)
    try:
        return subset_sample(pair, positives.shape[0], num_negatives, n, positives.contiguous())
    except RuntimeError as error:
        raise _renamed(op_error(error)) from None


@functools.lru_cache(maxsize=8)
def _kept_range(first: int, end: int, device: torch.device) -> Tensor:
    return torch.arange(first, end, device=device)


def _range(first: int, end: int, device: torch.device) -> Tensor:
    if _is_kept(end, device):
        return _kept_range(first, end, device)
    return torch.arange(first, end, device=device)


@functools.lru_cache(maxsize=8)
def _kept_uncorrected(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((n,), -math.log(max(n, 1)), dtype=dtype, device=device)


def _uncorrected(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What the op adds for the number of draws, taken back."""
    if len(shape) == 1 and _is_kept(shape[0], device):
        return _kept_uncorrected(shape[0], dtype, device)
    return torch.full(shape, -math.log(max(shape[-1], 1)), dtype=dtype, device=device)


def _is_kept(size: int, device: torch.device) -> bool:
    """Whether a tensor that depends on its size alone is made once: a small step is as long as a few calls of torch."""
    return not (
        device.type != "cpu" or size > 1 << 20 or torch.compiler.is_compiling() or torch.is_inference_mode_enabled()
    )


class _BatchSink:
    """The dense gradient of in-batch keys, every one of which is a negative: no sort, no sum by row.

    Args:
        first: the row of the first query's key.
    """

    at_once = False

    def __init__(self, first: int) -> None:
        self.first = first

    def deliver(
        self, grad: LossGrad, need: tuple[bool, bool, bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """See `Sink.deliver`."""
        d_hidden, found = entries(grad, False)
        d_keys = None
        if need[1]:
            p, rows = grad.plan, found.rows_b
            if rows.shape[0] == 0:
                rows = rows.new_zeros(p.num_classes, grad.hidden.shape[1])
            elif not (rows.is_cpu and found.coef_b[0].item() == 1.0):  # one number for all; a CPU has it in the rows
                rows = rows * found.coef_b
            hidden = grad.hidden
            batch = hidden.shape[0]
            own = rows if rows.shape[0] == batch else rows.narrow(0, self.first, batch)
            own.addcmul_(found.coef_a, hidden if hidden.dtype is rows.dtype else hidden.to(rows.dtype))
            d_keys = rows if rows.dtype is p.weight_dtype else rows.to(p.weight_dtype)
        return (d_hidden if need[0] else None), d_keys, None


def _gather(
    keys: Tensor, key_ids: Tensor | None, log_q: Tensor | None, batch: int, group: Any
) -> tuple[Tensor, Tensor | None, Tensor | None, int]:
    """Keys, ids and log_q of all ranks in the order of the ranks, and where this rank's begin."""
    import torch.distributed as dist
    import torch.distributed.nn.functional as dist_nn

    world, rank = dist.get_world_size(group), dist.get_rank(group)
    mine = torch.tensor([*keys.shape, batch, key_ids is not None, log_q is not None], device=keys.device)
    every = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(every, mine, group=group)
    if any(other.tolist() != mine.tolist() for other in every):
        raise ValueError(
            f"{_OP}: keys, queries, key_ids and log_q must have the same shapes on every rank of group, got (n, d, B, "
            f"key_ids, log_q) = {[other.tolist() for other in every]}"
        )

    def plain(t: Tensor | None) -> Tensor | None:
        if t is None:
            return None
        parts = [torch.empty_like(t) for _ in range(world)]
        dist.all_gather(parts, t.contiguous(), group=group)
        return torch.cat(parts)

    together = torch.cat(dist_nn.all_gather(keys.contiguous(), group=group))
    return together, plain(key_ids), plain(log_q), rank * keys.shape[0]


# ------------------------------------------------------------------------------------------------ losses
def _loss(
    queries: Tensor,
    keys: Tensor,
    positives: Tensor,
    negatives: Tensor,
    log_q: Tensor | None,
    labels: tuple[Tensor, Tensor] | None,
    known: tuple[Tensor, Tensor] | None,
    scale: float,
    reduction: str,
    sparse: bool,
    sink: Sink | None = None,
) -> Tensor:
    """The fused op. It checks shapes and ids once more; what it says is put into the words of this function."""
    acc = acc_dtype(keys.dtype)
    if log_q is None:
        log_q = _uncorrected(negatives.shape, acc, keys.device)
    draw_labels, row_labels = (None, None) if labels is None else labels
    known_offsets, known_ids = (None, None) if known is None else known
    if known is not None and draw_labels is not None:
        known_offsets, known_ids = _present(known, draw_labels)
    x = Inputs(
        queries.contiguous(),
        keys.contiguous(),
        None,
        positives.contiguous(),
        negatives.contiguous(),
        log_q.to(acc).contiguous(),
        known_offsets=known_offsets,
        known_ids=known_ids,
        draw_labels=None if draw_labels is None else draw_labels.contiguous(),
        row_labels=None if row_labels is None else row_labels.contiguous(),
    )
    form = Form(scale, _NO_ID, REDUCTIONS[reduction], sparse)
    if torch.compiler.is_compiling():
        return run_loss(_LOSS, x, form)[0]
    try:
        return run_loss(_LOSS, x, form, fusion_of(keys) or sink)[0]
    except IndexError as error:
        raise _renamed(error) from None


def _symmetric(
    queries: Tensor,
    keys: Tensor,
    key_ids: Tensor | None,
    known: tuple[Tensor, Tensor] | None,
    log_q: Tensor | None,
    query_log_q: Tensor | None,
    scale: float,
) -> Tensor:
    """[B]: both directions from one matrix of scores."""
    acc, others = acc_dtype(keys.dtype), max(queries.shape[0] - 1, 1)

    def shift(q: Tensor | None) -> Tensor | None:
        # 0 * inf is nan: a bad log_q must show.
        return None if q is None else (-q.detach() - math.log(others) + 0.0 * q.detach()).to(acc).contiguous()

    if known is not None:
        assert key_ids is not None
        known = _present(known, key_ids)
    offsets, ids = (None, None) if known is None else (known[0].contiguous(), known[1].contiguous())
    labels = None if key_ids is None else key_ids.contiguous()
    masks = PairMasks(labels, offsets, ids, shift(log_q), shift(query_log_q))
    return symmetric_softmax(queries.contiguous(), keys.contiguous(), masks, scale)


def _tower_loss(
    queries: Tensor,
    keys: Tensor,
    tower: TowerKeys,
    positives: Tensor,
    known: tuple[Tensor, Tensor] | None,
    scale: float,
    reduction: str,
) -> Tensor:
    """The loss over a batch's own keys and draws, which are shared, and the mined ones of each query."""
    ids, log_q, hard = tower
    n, batch = log_q.shape[0], queries.shape[0]
    own = ids[:batch]
    drawn = keys if n == keys.shape[0] else keys[:n]
    each = reduction if hard is None else "none"
    labels = ids[:n], own
    loss = _loss(
        queries, drawn, positives, _range(0, n, keys.device), log_q, labels, known, scale, each, False, _BatchSink(0)
    )
    if hard is None:
        return loss
    hard = _without(hard, _names(ids, hard), own, known, positives)
    return _reduce(
        join_losses(loss, _loss(queries, keys, positives, hard, None, None, None, scale, each, False)), reduction
    )


def _renamed(error: Exception) -> Exception:
    """The op's complaint about an id, with the name of the argument the caller knows."""
    text = str(error)
    for old, new in (
        ("sampled_softmax: ids ", "negatives "),
        ("sampled_softmax: target ", "positives "),
        ("subset_sample: exclude must be -1 or ", "positives must be "),
    ):
        if text.startswith(old):
            return IndexError(f"{_OP}: {new}{text[len(old) :]}".replace(" or ignore_index", ""))
    return error


def _reduce(loss: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return loss
    return loss.sum() / max(loss.shape[0], 1) if reduction == "mean" else loss.sum()


@functools.lru_cache(maxsize=2)  # a training loop asks for the same ones at every step
def _subsets(n: int, k: int) -> Tensor:
    """[C(n, k), k] int64: all k-subsets of 0 .. n-1. Not torch.combinations, which makes an n^k mask on the way."""
    flat = itertools.chain.from_iterable(itertools.combinations(range(n), k))
    return torch.from_numpy(np.fromiter(flat, dtype=np.int64, count=math.comb(n, k) * k).reshape(-1, k))


def _exact(queries: Tensor, keys: Tensor, positives: Tensor, k: int, scale: float) -> Tensor:
    """[B]: the mean of the loss over all k-subsets of the other keys."""
    batch, n = queries.shape[0], keys.shape[0]
    if batch > 0 and k > n - 1:
        raise ValueError(f"{_OP}: num_negatives must be at most {n - 1}, the keys besides the positive, got {k}")
    subsets = math.comb(max(n - 1, 0), k)
    if batch * subsets * (k + 1) > EXACT_LIMIT:
        raise ValueError(
            f"{_OP}: exact=True must have at most 2^26 terms, B C(n-1, k) (k+1); got {batch} x {subsets} x {k + 1} for "
            f"n = {n}, k = {k}: draw negatives instead (exact=False)"
        )
    if batch > 0 and bool(((positives < 0) | (positives >= n)).any()):
        bad = positives[(positives < 0) | (positives >= n)][0]
        raise IndexError(f"{_OP}: positives must be in [0, {n}), got {int(bad)}")
    acc = acc_dtype(keys.dtype)
    with torch.autocast(keys.device.type, enabled=False):
        scores = scale * (queries.to(acc) @ keys.to(acc).T)
    if k == 0 or batch == 0:
        return scores.sum(1) * 0.0
    rank = torch.arange(n - 1, device=keys.device)
    other = rank + (rank >= positives[:, None])  # [B, n - 1]
    gaps = scores.gather(1, other) - scores.gather(1, positives[:, None])
    gaps = gaps[:, _subsets(n - 1, k).to(keys.device)]  # [B, C(n-1, k), k]
    return torch.nn.functional.pad(gaps, (1, 0)).logsumexp(2).mean(1)
