"""Kinds of negatives, with and without their correction: recall@20 after equal time of one core.

Gowalla: LightGCN's split, items that a user has in the training file left out of his ranking; h is the mean of the
embeddings of (up to 100 of) the user's other items, d = 64, C = 40,981, a table of items with a bias. B = 512, Adagrad;
sampled negatives are 512 for the batch.
Two views: built-in data (`HierarchicalZipf`, 10,000 items with Zipf frequencies); an item seen through noise is to find
its clean features, both through encoders (two towers). B = 256, Adam. "Rare" is the recall of pairs of the rarer half
of the pairs' items.

Every method of a data set gets the same seconds of processor time in training (draws, batches, mining included), one
rate for all, and two seeds. Gowalla is judged on the first 10,240 users of the test file.

  python bench/study_negatives.py [--data DIR] [--seconds S]   bench/results/study_negatives.json
  python bench/study_negatives.py --quick                      a second each, nothing stored
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from _harness import print_table, progress
from _study import find, parser, settings, store, stored
from study_gowalla import Uncorrected

import samplex_cuda as sx
from samplex_cuda import data, metrics
from samplex_cuda.functional import contrastive
from samplex_cuda.prediction import exact_topk
from samplex_cuda.reproduce.contrastive_practice import TwoViewTask
from samplex_cuda.training import build, models

NAME, SAMPLES, BATCH, MINED, QUEUE, SEEDS = "study_negatives", 512, 512, 8, 2048, 2
USERS = 10_240  # of the test file, the first ones
RATE = 0.1  # of Gowalla; what study_gowalla chooses for draws with the correction


class InBatchUncorrected(sx.samplers.InBatch):
    """In-batch negatives with their plain scores."""

    def sample(self, *args: Any, **options: Any) -> Any:
        draw = super().sample(*args, **options)
        return draw._replace(log_q=torch.full_like(draw.log_q, -torch.tensor(float(len(draw.ids))).log()))


def gowalla_laws(counts: torch.Tensor) -> dict[str, Callable[[], Any]]:
    classes = counts.numel()
    unigram, uniform = lambda: sx.samplers.Unigram(counts + 1), lambda: sx.samplers.Uniform(classes)
    stream = lambda: sx.samplers.StreamingFrequency(classes)  # noqa: E731
    return {
        "uniform, log Q": uniform,
        "unigram, log Q": unigram,
        "unigram, without": lambda: Uncorrected(counts + 1),
        "unigram, distinct, log Q": unigram,
        "unigram, log Q, and 8 mined": unigram,
        "in-batch, without": lambda: InBatchUncorrected(classes, stream()),
        "in-batch, streaming log Q": lambda: sx.samplers.InBatch(classes, stream()),
        "in-batch + uniform, log Q of both": lambda: sx.samplers.InBatch(classes, stream(), extra=uniform()),
    }


def gowalla(name: str, make: Callable[[], Any], train: Any, test: Any, seconds: float, seed: int) -> dict[str, Any]:
    run = settings(
        "model.name=sequence", "model.pooling=mean", "model.layers=0", "model.dim=64",
        f"training.batch_size={BATCH}", "sampler.name=uniform", f"head.num_samples={SAMPLES}", "head.shared=true",
        f"optimizer.lr={RATE}", f"training.seed={seed}",
    )  # fmt: skip
    encoder, head = build(run, train)
    head.set_sampler(make(), num_samples=SAMPLES)
    head.unique = "distinct" in name
    optimizers = models.optimizers(run, encoder, head)
    head.fuse_optimizer(optimizers["head"])  # type: ignore[arg-type]
    miner = sx.HardNegatives(head, MINED, "pool", pool=2048) if "mined" in name else None
    key, steps, epoch = sx.Key(seed), 0, 0
    used, batches = 0.0, iter(())
    while used < seconds:
        begin = time.process_time()
        batch = next(batches, None)
        if batch is None:
            batches, epoch = iter(data.Batches(train, BATCH, seed=seed, epoch=epoch)), epoch + 1
            batch = next(batches)
        h, _ = encoder.encode(batch)
        hard = None if miner is None else miner.mine(h, batch["y"], key=key)
        head(h, batch["y"], hard=hard, key=key).backward()
        for which, optimizer in optimizers.items():
            if which != "head":
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        steps += 1
        used += time.process_time() - begin
    found = metrics.evaluate(encoder, head, test, 512, k=(20,), exclude_history=True, nll=False, max_rows=USERS)
    return {"recall@20": found["recall@20"], "steps": steps}


class Views(TwoViewTask):
    """The two towers with the ways of in-batch negatives."""

    def begin(self, name: str, seed: int) -> None:
        self.start("in-batch, without log Q", 1e-3, seed, True)  # encoders, optimizer and batches
        self.name = name
        self.frequency = sx.samplers.StreamingFrequency(self.num_items)
        self.queue = sx.samplers.KeyQueue(QUEUE, self.dim) if "queue" in name else None

    def train(self) -> None:
        x, y = next(self.stream)
        query, key = self.encoders
        keys, ids, log_q = key(self.features[y]), y, None
        if "streaming" in self.name:
            self.frequency.update(y)
            log_q = self.frequency.log_q(y)
        elif "true" in self.name:
            log_q = self.log_q[y]
        if "uniform" in self.name:
            more = self.uniform.sample(None, self.samples, shared=True, key=self.key).ids
            ids = torch.cat([y, more])
            keys = torch.cat([keys, key(self.features[more])])
            n, share = len(ids) - 1, torch.tensor([self.batch - 1.0, float(len(more))])
            law = self.frequency.log_q(ids).double()
            flat = torch.full_like(law, 1.0 / self.num_items).log()
            log_q = torch.logaddexp(law + (share[0] / n).log(), flat + (share[1] / n).log()).float()
        mask = None if "unmasked" in self.name else ids
        loss = contrastive(query(x), keys, key_ids=mask, log_q=log_q, queue=self.queue)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        if self.queue is not None:
            self.queue.push(keys, ids, log_q)

    @torch.no_grad()
    def judge(self) -> dict[str, float]:
        x, y = self.parts["test"]
        query, key = self.encoders
        top = exact_topk(query(x), key(self.features), 20)[1]
        hit = (top == y[:, None]).any(1).double()
        rare = self.log_q[y] <= self.log_q[y].median()
        return {"recall@20": float(hit.mean()), "rare": float(hit[rare].mean())}


VIEWS = (
    "in-batch, without",
    "in-batch, without, copies unmasked",
    "in-batch, streaming log Q",
    "in-batch, true log Q",
    "in-batch, streaming log Q, and a queue",
    "in-batch + uniform, streaming log Q of both",
)


def views(task: Views, name: str, seconds: float, seed: int) -> dict[str, Any]:
    task.begin(name, seed)
    used, steps = 0.0, 0
    while used < seconds:
        begin = time.process_time()
        task.train()
        used, steps = used + time.process_time() - begin, steps + 1
    return {**task.judge(), "steps": steps}


def mean(found: list[dict[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {name: sum(one[name] for one in found) / len(found) for name in found[0]}
    out["seeds"] = [one["recall@20"] for one in found]
    return out


def report(methods: dict[str, Any]) -> None:
    rows = [
        [name, f"{m['recall@20']:.4f}", f"{m['rare']:.4f}" if "rare" in m else "",
         " ".join(f"{s:.4f}" for s in m["seeds"]), f"{m['steps']:,.0f}", f"{m['seconds']:g}"]
        for name, m in methods.items()
    ]  # fmt: skip
    print_table(["negatives", "recall@20", "rare", "by seed", "steps", "seconds"], rows)


def main() -> int:
    made = parser(__doc__, "gowalla")
    made.add_argument("--seconds", type=float, default=6.0, help="of processor time, of each run")
    options = made.parse_args()
    if options.again:
        report(stored(NAME)["methods"])
        return 0
    torch.set_num_threads(options.threads)
    seconds, seeds = (1.0, 1) if options.quick else (options.seconds, SEEDS)
    found: dict[str, Any] = {}

    def add(name: str, one: Callable[[int], dict[str, Any]]) -> None:
        if options.only and name not in options.only:
            return
        found[name] = mean([one(seed) for seed in range(seeds)]) | {"seconds": seconds}
        progress("")
        print(name, found[name], flush=True)
        if not (options.quick or options.no_store):
            store(NAME, {name: found[name]}, samples=SAMPLES)

    task = Views(dim=32, width=128)
    for name in VIEWS:
        add(f"two views: {name}", lambda seed, name=name: views(task, name, seconds, seed))
    reading: dict[str, Any] = {"order": "none", "history": 100, "cache_dir": options.cache}
    train = data.interactions_file(find(options.data, "train"), **reading)
    test = data.interactions_file(find(options.data, "test"), known=train, **reading)
    for name, make in gowalla_laws(train.class_counts().double()).items():
        add(f"Gowalla: {name}", lambda seed, name=name, make=make: gowalla(name, make, train, test, seconds, seed))
    report(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
