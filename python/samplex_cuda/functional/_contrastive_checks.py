"""What `contrastive` checks of its arguments, and which way to negatives they mean."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from samplex_cuda import _device
from samplex_cuda._checks import FLOATS, check_choice, check_dense, check_int, describe
from samplex_cuda.functional._inputs import known_positives as _known_csr
from samplex_cuda.ops.loss_types import REDUCTIONS
from samplex_cuda.samplers.base import MAX_SAMPLES
from samplex_cuda.samplers.in_batch import TowerKeys
from samplex_cuda.samplers.queue import KeyQueue

__all__ = [
    "check_known",
    "check_log_q",
    "check_negatives",
    "check_pair_log_q",
    "check_queue",
    "check_tensors",
    "check_tower",
    "way_of",
]

_OP = "contrastive"


def check_ids(name: str, t: object, device: torch.device, wanted: str) -> None:
    if not isinstance(t, Tensor) or t.dtype != torch.int64:
        raise TypeError(f"{_OP}: {name} must be an int64 tensor {wanted}, got {describe(t)}")
    check_dense(_OP, name, t)
    if t.device != device:
        raise ValueError(f"{_OP}: {name} must be on {device} like keys, got {describe(t)}")


def check_tensors(
    queries: Tensor, keys: Tensor, positives: Tensor | None, key_ids: Tensor | None, reduction: str
) -> Tensor:
    """Checks the tensors every way has; queries in the dtype of keys."""
    for name, t, wanted in (("queries", queries, "[B, d]"), ("keys", keys, "[n, d]")):
        if not isinstance(t, Tensor):
            raise TypeError(f"{_OP}: {name} must be a tensor {wanted}, got {describe(t)}")
        check_dense(_OP, name, t)
    if keys.dim() != 2 or keys.dtype not in FLOATS:
        raise ValueError(f"{_OP}: keys must be [n, d] float32, float64, float16 or bfloat16, got {describe(keys)}")
    if queries.dim() != 2 or queries.shape[1] != keys.shape[1]:
        raise ValueError(
            f"{_OP}: queries must be [B, {keys.shape[1]}] to fit keys {list(keys.shape)}, got {describe(queries)}"
        )
    if queries.device != keys.device:
        raise ValueError(f"{_OP}: queries must be on {keys.device} like keys, got {describe(queries)}")
    if queries.dtype != keys.dtype:
        if not (queries.dtype in FLOATS and torch.is_autocast_enabled(keys.device.type)):
            raise TypeError(
                f"{_OP}: queries must be {keys.dtype} like keys (or run under autocast), got {describe(queries)}"
            )
        queries = queries.to(keys.dtype)
    batch = queries.shape[0]
    if positives is None:
        if keys.shape[0] < batch or (keys.shape[0] > batch and key_ids is None):
            raise ValueError(
                f"{_OP}: positives must be [{batch}] int64 unless there is one key per query, got None with keys "
                f"{describe(keys)}; more keys than queries require key_ids"
            )
    else:
        check_ids("positives", positives, keys.device, "[B]")
        if positives.shape != (batch,):
            raise ValueError(f"{_OP}: positives must be [{batch}] to fit queries, got {describe(positives)}")
    if key_ids is not None:
        check_ids("key_ids", key_ids, keys.device, "[n]")
        if key_ids.shape != keys.shape[:1]:
            raise ValueError(f"{_OP}: key_ids must be [{keys.shape[0]}] to fit keys, got {describe(key_ids)}")
    check_choice(_OP, "reduction", reduction, tuple(REDUCTIONS))
    return queries


def way_of(
    in_batch: bool,
    negatives: Tensor | None,
    log_q: Tensor | None,
    num_negatives: int | None,
    sampler: Any,
    key: Any,
    key_ids: Tensor | None,
    known_positives: object,
    exact: bool,
    symmetric: bool,
    query_log_q: Tensor | None,
    group: Any,
) -> str:
    """Which row of the table is meant: "given", "subset", "sampler", "exact" or "batch"; refuses what fits none."""
    if num_negatives is not None:
        check_int(_OP, "num_negatives", num_negatives, 0, MAX_SAMPLES)
        if negatives is not None:
            raise ValueError(f"{_OP}: num_negatives must be None if negatives are given, got {num_negatives}")
        how = "exact" if exact else "subset" if sampler is None else "sampler"
    elif negatives is not None:
        how = "given"
    elif in_batch:
        how = "batch"
    else:
        raise ValueError(f"{_OP}: negatives or num_negatives must be given with a bank (positives), got neither")
    for name, value, ways in (
        ("log_q", log_q, ("given", "batch")),
        ("sampler", sampler, ("sampler",)),
        ("key", key, ("subset", "sampler")),
        ("key_ids", key_ids, ("batch", "given", "sampler", "subset")),
        ("known_positives", known_positives, ("batch", "given", "sampler", "subset")),
        ("group", group, ("batch",)),
        ("exact", exact or None, ("exact",)),
        ("symmetric", symmetric or None, ("batch",)),
    ):
        if value is not None and how not in ways:
            raise ValueError(f"{_OP}: {name} cannot be combined with {_WAYS[how]}, got {describe(value)}")
    if symmetric and (log_q is None) != (query_log_q is None):
        raise ValueError(
            f"{_OP}: symmetric must be False with log_q alone, which does not correct the queries, got True; pass "
            "query_log_q, or neither"
        )
    if query_log_q is not None and not symmetric:
        raise ValueError(f"{_OP}: query_log_q must be None without symmetric=True, got {describe(query_log_q)}")
    return how


def check_known(
    known: Any, batch: int, in_batch: bool, key_ids: Tensor | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Known positives of each query as CSR."""
    if in_batch and key_ids is None:
        raise ValueError(f"{_OP}: known_positives must be None in-batch without key_ids, got {describe(known)}")
    offsets, ids = _known_csr(_OP, known, batch, device, "known_positives")
    if not _device.host_waits(offsets):
        lengths, total = offsets.diff(), ids.shape[0]
        if offsets[0] != 0 or offsets[-1] != total or bool((lengths < 0).any()):
            raise ValueError(
                f"{_OP}: known_positives offsets must ascend from 0 to {total}, the number of ids, got "
                f"{int(offsets[0])} ... {int(offsets[-1])}"
            )
    return offsets, ids


def check_tower(
    tower: TowerKeys,
    queries: Tensor,
    keys: Tensor,
    positives: Any,
    log_q: Any,
    key_ids: Any,
    num_negatives: Any,
    group: Any,
    queue: Any,
    symmetric: bool,
) -> None:
    """Whether keys are those of `tower`, which says what each is and how it was drawn."""
    for name, value in (
        ("positives", positives),
        ("log_q", log_q),
        ("key_ids", key_ids),
        ("num_negatives", num_negatives),
        ("group", group),
        ("queue", queue),
        ("symmetric", symmetric or None),
    ):
        if value is not None:
            raise ValueError(f"{_OP}: {name} cannot be combined with TowerKeys, got {describe(value)}")
    for name, t in (("queries", queries), ("keys", keys)):
        if not isinstance(t, Tensor) or t.dim() != 2:
            raise TypeError(f"{_OP}: {name} must be a tensor [n, d], got {describe(t)}")
    n = tower.ids.shape[0]
    if keys.shape[0] != n:
        raise ValueError(f"{_OP}: keys must be [{n}, d], one for each id of the TowerKeys, got {describe(keys)}")
    if tower.hard is not None and tower.hard.shape[:-1] != queries.shape[:1]:
        raise ValueError(
            f"{_OP}: queries must be [{tower.hard.shape[0]}, d] like the mined keys of TowerKeys, got "
            f"{describe(queries)}"
        )
    drawn = tower.log_q.shape[0]
    if queries.shape[0] > drawn:
        raise ValueError(
            f"{_OP}: queries must be at most {drawn}, one for each target of the TowerKeys, got {describe(queries)}"
        )


def check_pair_log_q(log_q: Tensor | None, query_log_q: Tensor | None, queries: Tensor, keys: Tensor) -> None:
    if log_q is not None:
        check_log_q(log_q, keys[:, 0], "[n]")
    if query_log_q is not None:
        check_log_q(query_log_q, queries[:, 0], "[B]", "query_log_q")


def check_negatives(negatives: Tensor, queries: Tensor, keys: Tensor) -> None:
    check_ids("negatives", negatives, keys.device, "[B, k] or [k]")
    if negatives.dim() == 0 or negatives.dim() > 2 or (negatives.dim() == 2 and negatives.shape[0] != queries.shape[0]):
        raise ValueError(f"{_OP}: negatives must be [{queries.shape[0]}, k] or [k], got {describe(negatives)}")


def check_queue(queue: Any, how: str, keys: Tensor, key_ids: Tensor | None) -> None:
    if queue is None:
        return
    if not isinstance(queue, KeyQueue):
        raise TypeError(f"{_OP}: queue must be a sx.samplers.KeyQueue, got {describe(queue)}")
    if how != "batch" or key_ids is None:
        raise ValueError(f"{_OP}: queue must be None unless in-batch, with key_ids, got a KeyQueue")
    queue.check(keys, _OP)


_WAYS = {
    "given": "given negatives",
    "subset": "a uniform subset (num_negatives without sampler)",
    "sampler": "a sampler",
    "exact": "exact=True",
    "batch": "the whole batch as negatives",
}


def check_log_q(log_q: Tensor, negatives: Tensor, shape: str, name: str = "log_q") -> Tensor:
    if not isinstance(log_q, Tensor) or not log_q.is_floating_point():
        raise TypeError(
            f"{_OP}: {name} must be floating point of {shape} {list(negatives.shape)}, got {describe(log_q)}"
        )
    if log_q.shape != negatives.shape or log_q.device != negatives.device:
        raise ValueError(
            f"{_OP}: {name} must be {shape} {list(negatives.shape)} on {negatives.device}, got {describe(log_q)}"
        )
    return log_q.detach()
