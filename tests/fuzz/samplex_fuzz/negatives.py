"""Generators of negatives that come from the data: frequencies of a stream, targets of a batch, keys of past ones."""

from __future__ import annotations

from typing import Any

import torch

import samplex_cuda as sx
from samplex_fuzz.call import Args, Call, Dice, generator
from samplex_fuzz.oracle import expect, is_meta


@generator("samplers.StreamingFrequency.update", 0.3)
def _frequency(d: Dice) -> Call:
    buckets = d.int(1, 9)
    estimator = sx.samplers.StreamingFrequency(buckets, kind=d.pick(("gap", "sketch")), rate=d.pick((0.05, 0.9)))
    args = {"ids": d.ids(20, d.int(0, 12))}

    def run(a: Args) -> Any:
        estimator.update(a.ids)
        return estimator.log_q(torch.arange(20))

    def check(a: Args, out: Any, after: Args, changed: set[str]) -> None:
        expect(bool(out.isfinite().all()) and bool((out <= 0).all()), f"log_q must be at most 0, got {out.tolist()}")

    return Call(Args(args), run, check, words=("group",))


@generator("samplers.InBatch.sample", 0.3)
def _in_batch(d: Dice) -> Call:
    classes, batch = d.int(2, 12), d.int(1, 6)
    extra = sx.samplers.Uniform(classes) if d.maybe(0.5) else None
    sampler = sx.samplers.InBatch(classes, sx.samplers.Unigram(torch.arange(1, classes + 1)), extra=extra)
    args = {"num_samples": d.int(0, 5), "targets": d.ids(classes, batch), "key": d.key()}

    def run(a: Args) -> Any:
        return sampler.sample(None, a.num_samples, targets=a.targets, key=a.key)

    def check(a: Args, out: Any, after: Args, changed: set[str]) -> None:
        if is_meta(*a.values(), out.ids):
            return
        expect(torch.equal(out.ids[: a.targets.shape[0]], a.targets.clamp(min=0)), "the targets must come first")
        expect(bool(((out.ids >= 0) & (out.ids < classes)).all()), f"ids must be classes, got {out.ids.tolist()}")

    return Call(Args(args), run, check, words=("extra", "batch", "num_classes", "in_batch", "exclude"))


@generator("samplers.KeyQueue.push", 0.3)
def _queue(d: Dice) -> Call:
    size, dim, n = d.int(1, 8), d.int(1, 5), d.int(0, 12)
    queue = sx.samplers.KeyQueue(size, dim)
    args = {"keys": d.normal(n, dim), "ids": d.ids(50, n), "log_q": d.normal(n) if d.maybe(0.5) else None}

    def run(a: Args) -> Any:
        queue.push(**a)
        return queue.held()

    def check(a: Args, out: Any, after: Args, changed: set[str]) -> None:
        if is_meta(a["keys"]):
            return
        kept = min(size, a["keys"].shape[0])
        expect(out.keys.shape == (kept, dim), f"the queue must hold {kept} keys, got {tuple(out.keys.shape)}")
        expect(sorted(out.ids.tolist()) == sorted(a.ids[a.ids.shape[0] - kept :].tolist()), "the last ids must be held")

    return Call(Args(args), run, check, words=("queue", "dim"))


@generator("samplers.TowerKeys", 0.3)
def _tower_keys(d: Dice) -> Call:
    classes, batch, dim = d.int(2, 12), d.int(1, 6), d.int(1, 5)
    extra = sx.samplers.Uniform(classes) if d.maybe(0.5) else None
    sampler = sx.samplers.InBatch(classes, sx.samplers.Unigram(torch.arange(1, classes + 1)), extra=extra)
    items, queries = d.normal(classes, dim), d.normal(batch, dim)
    args = {
        "targets": d.ids(classes, batch), "num_samples": d.int(0, 5),
        "hard": d.ids(classes, batch, 3) if d.maybe(0.5) else None, "key": d.key(),
    }  # fmt: skip

    def run(a: Args) -> Any:
        keys = sampler.tower_keys(a.targets, a.num_samples, hard=a.hard, key=a.key)
        return keys, sx.functional.contrastive(queries, items[keys.ids], negatives=keys)

    def check(a: Args, out: Any, after: Args, changed: set[str]) -> None:
        keys, loss = out
        if is_meta(*a.values(), keys.ids, loss):
            return
        count = a.targets.shape[0]
        expect(torch.equal(keys.ids[:count], a.targets), "the targets must come first")
        expect(a.hard is None or torch.equal(keys.ids[keys.hard], a.hard), "hard must be rows of the mined items")
        expect(count != batch or bool(loss.isfinite()), f"the loss must be finite, got {loss}")

    return Call(
        Args(args), run, check, words=("extra", "batch", "num_classes", "in_batch", "queries", "targets", "TowerKeys")
    )
