"""Generators of the static samplers, the bigram sampler and the draws without replacement."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from samplex_cuda.ops.bigram_sample import build_alias_rows
from samplex_cuda.ops.static_sample import build_alias
from samplex_cuda.reference import bigram_sample as bigram
from samplex_cuda.reference import static_sample as static
from samplex_cuda.reference.subset_sample import subset_sample
from samplex_fuzz.call import Args, Call, Dice, generator, op_call
from samplex_fuzz.oracle import MANY, drawn, excluded, expect, has_form, is_meta, make_exclude, near

_TOLERANCE = 2e-5
_WORDS = ("exclude", "offsets", "draws", "batch")


def key_of(a: Args) -> tuple[int, int]:
    """The key as two unsigned numbers."""
    seed, offset, *_ = a.key.tolist()
    return seed % 2**64, offset % 2**64


def row_of(a: Args) -> int:
    """The number of the first row, the third number of a key that has one."""
    return int(a.key[2]) if a.key.shape[0] == 3 else 0


def weights_of(law: str, classes: int, prefix: Tensor | None) -> np.ndarray:
    """What the probabilities are proportional to."""
    if law == "uniform":
        return np.ones(classes)
    return static.log_uniform_weights(classes) if law == "log_uniform" else static.alias_weights(prefix.numpy())


def alias_counts(d: Dice, classes: int) -> list[float]:
    """Weights with zeros among them, never all zero."""
    counts = [0.0 if d.maybe(0.2) else d.r.random() * d.pick((1, 1, 100)) for _ in range(classes)]
    counts[d.int(0, classes - 1)] = 1.0
    return counts


def _classes(a: Args) -> int:
    return a.num_classes if "num_classes" in a else a.table.shape[0]


def _intact(changed: set[str]) -> bool:
    return not changed & {"table", "prefix"}


def _sample(law: str) -> Any:
    def make(d: Dice) -> Call:
        batch, m, classes = d.size(), d.int(0, 6), d.int(1, 30)
        args: dict[str, Any] = {"key": d.key(), "batch": batch, "num_samples": m}
        if law == "alias":
            args["table"], args["prefix"] = build_alias(alias_counts(d, classes))
        else:
            args["num_classes"] = d.pick((classes, classes, classes, 10**9, 2**31 + 7))
        args["exclude"], args["exclude_offsets"] = make_exclude(d, batch, classes)
        exact = d.maybe(0.5)

        def check(a: Args, out: Any, after: Args, changed: set[str]) -> None:
            if is_meta(*a.values(), *out):
                return
            ids, log_q = out
            shape, classes = (a.batch, a.num_samples), _classes(a)
            if a.batch > MANY:
                return
            lists = excluded(a.exclude, a.exclude_offsets, a.batch)
            if not _intact(changed) or lists is None:
                drawn(ids, None, shape, classes)
                return
            drawn(ids, log_q, shape, classes)
            if classes > MANY:
                return
            weights = weights_of(law, classes, a.get("prefix"))
            for b, row in enumerate(lists):
                p = static.conditional(weights, row)
                with np.errstate(divide="ignore"):
                    near("log_q", log_q[b], torch.from_numpy(np.log(p))[ids[b]], _TOLERANCE)
            if exact:
                table = a.table.numpy() if law == "alias" else None
                want, _ = static.sample(
                    law, weights, key_of(a), int(a.batch), int(a.num_samples), lists, table, row_of(a)
                )
                expect(bool((ids.numpy() == want).all()), f"ids must be {want.tolist()}, got {ids.tolist()}")

        return op_call(f"{law}_sample", args, check, words=_WORDS)

    return make


def _log_prob(law: str) -> Any:
    def make(d: Dice) -> Call:
        batch, classes = d.size(), d.int(1, 30)
        args: dict[str, Any] = {"ids": d.ids(classes, batch, d.int(0, 6))}
        if law == "alias":
            args["table"], args["prefix"] = build_alias(alias_counts(d, classes))
        else:
            args["num_classes"] = d.pick((classes, classes, classes, 10**9, 2**31 + 7))
        args["exclude"], args["exclude_offsets"] = make_exclude(d, batch, classes)

        def check(a: Args, out: Any, after: Args, changed: set[str]) -> None:
            if is_meta(*a.values(), out):
                return
            has_form("log_prob", out, a.ids.shape, torch.float32)
            classes = _classes(a)
            lists = excluded(a.exclude, a.exclude_offsets, a.ids.shape[0])
            if not _intact(changed) or lists is None or classes > MANY:
                return
            weights = weights_of(law, classes, a.get("prefix"))
            for b, row in enumerate(lists):
                with np.errstate(divide="ignore"):
                    want = np.log(static.conditional(weights, row))
                near("log_prob", out[b], torch.from_numpy(want)[a.ids[b]], _TOLERANCE)

        return op_call(f"{law}_log_prob", args, check, words=_WORDS)

    return make


for _law in ("uniform", "log_uniform", "alias"):
    generator(f"{_law}_sample")(_sample(_law))
    generator(f"{_law}_log_prob")(_log_prob(_law))


@generator("subset_sample")
def _subset(d: Dice) -> Call:
    batch, n = d.size(), d.int(2, 12)
    exclude = None
    if d.maybe(0.5):
        exclude = d.ids(n, batch)
        exclude[d.uniform(batch) < 0.3] = -1
    args = {"key": d.key(), "batch": batch, "num_samples": d.int(0, n - 1), "num_classes": n, "exclude": exclude}

    def check(a: Args, out: Any, after: Args, changed: set[str]) -> None:
        if is_meta(*a.values(), out):
            return
        if a.batch > MANY:
            return
        drawn(out, None, (a.batch, a.num_samples), a.num_classes)
        for row in out.tolist():
            expect(len(set(row)) == len(row), f"ids of a row must be distinct, got {row}")
        if a.num_classes <= 100:
            skip = None if a.exclude is None else a.exclude.tolist()
            want = subset_sample(key_of(a), int(a.batch), int(a.num_samples), a.num_classes, skip)
            expect(bool((out.numpy() == want).all()), f"ids must be {want.tolist()}, got {out.tolist()}")

    return op_call("subset_sample", args, check, words=_WORDS)


def bigram_tables(d: Dice, classes: int) -> dict[str, Tensor]:
    """The tables of a bigram distribution over `classes`."""
    table, prefix = build_alias(alias_counts(d, classes))
    rows = [sorted({d.int(0, classes - 1) for _ in range(d.int(0, 4))}) for _ in range(d.int(1, 4))]
    offsets = torch.tensor([0, *np.cumsum([len(row) for row in rows]).tolist()])
    pair_ids = torch.tensor([k for row in rows for k in row], dtype=torch.int64)
    pair_table, pair_prefix = build_alias_rows(d.uniform(len(pair_ids), low=0.1, high=3.0).tolist(), offsets)
    backoff = d.uniform(len(rows), dtype=torch.float64)
    backoff[d.uniform(len(rows)) < 0.2] = d.pick((0.0, 1.0))
    return {
        "table": table, "prefix": prefix, "offsets": offsets, "pair_ids": pair_ids, "pair_table": pair_table,
        "pair_prefix": pair_prefix, "backoff": backoff,
    }  # fmt: skip


_BIGRAM = {"table", "prefix", "offsets", "pair_ids", "pair_table", "pair_prefix", "backoff"}


def _pair_weights(a: Args) -> np.ndarray:
    at, prefix = a.offsets.tolist(), a.pair_prefix.numpy()
    parts = [np.diff(prefix[x + c : y + c + 1]) for c, (x, y) in enumerate(itertools.pairwise(at))]
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


@generator("bigram_sample")
def _bigram_sample(d: Dice) -> Call:
    batch, classes = d.size(), d.int(1, 20)
    tables = bigram_tables(d, classes)
    context = d.ids(len(tables["backoff"]) + 1, batch) - 1
    exclude, offsets = make_exclude(d, batch, classes)
    exact = d.maybe(0.5)

    def check(a: Args, out: Any, after: Args, changed: set[str]) -> None:
        if is_meta(*a.values(), *out):
            return
        ids, log_q = out
        shape = (a.context.shape[0], a.num_samples)
        lists = excluded(a.exclude, a.exclude_offsets, shape[0])
        if changed & _BIGRAM or lists is None:
            drawn(ids, None, shape, a.table.shape[0])
            return
        drawn(ids, log_q, shape, a.table.shape[0])
        unigram, weights = np.diff(a.prefix.numpy()), _pair_weights(a)
        arrays = (a.offsets.numpy(), a.pair_ids.numpy(), weights)
        for b, c in enumerate(a.context.tolist()):
            p = static.conditional(bigram.law(unigram, *arrays, a.backoff.numpy(), c), lists[b])
            with np.errstate(divide="ignore"):
                near("log_q", log_q[b], torch.from_numpy(np.log(p))[ids[b]], _TOLERANCE)
        if exact:
            want, _ = bigram.sample(
                unigram, a.table.numpy(), *arrays, a.pair_table.numpy(), a.backoff.numpy(), key_of(a),
                a.context.tolist(), a.num_samples, lists,
            )  # fmt: skip
            expect(bool((ids.numpy() == want).all()), f"ids must be {want.tolist()}, got {ids.tolist()}")

    args = {"key": d.key(), "context": context, "num_samples": d.int(0, 5), **tables}
    return op_call("bigram_sample", {**args, "exclude": exclude, "exclude_offsets": offsets}, check, words=_WORDS)


@generator("bigram_log_prob")
def _bigram_log_prob(d: Dice) -> Call:
    batch, classes = d.size(), d.int(1, 20)
    tables = bigram_tables(d, classes)
    context = d.ids(len(tables["backoff"]) + 1, batch) - 1
    exclude, offsets = make_exclude(d, batch, classes)

    def check(a: Args, out: Any, after: Args, changed: set[str]) -> None:
        if is_meta(*a.values(), out):
            return
        has_form("log_prob", out, a.ids.shape, torch.float32)
        lists = excluded(a.exclude, a.exclude_offsets, a.ids.shape[0])
        if changed & _BIGRAM or lists is None:
            return
        arrays = (np.diff(a.prefix.numpy()), a.offsets.numpy(), a.pair_ids.numpy(), _pair_weights(a))
        for b, c in enumerate(a.context.tolist()):
            p = static.conditional(bigram.law(*arrays, a.backoff.numpy(), c), lists[b])
            with np.errstate(divide="ignore"):
                near("log_prob", out[b], torch.from_numpy(np.log(p))[a.ids[b]], _TOLERANCE)

    args = {"ids": d.ids(classes, batch, d.int(0, 6)), "context": context, **tables}
    return op_call("bigram_log_prob", {**args, "exclude": exclude, "exclude_offsets": offsets}, check, words=_WORDS)
