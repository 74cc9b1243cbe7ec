"""Gowalla: recall@20 of sampled softmax with the log-Q correction, without it, and of the full softmax.

The split is LightGCN's; items that a user has in the training file are left out of his ranking. h is the mean of the
embeddings of (up to 100 of) the user's other items, d = 64, C = 40,981; the head has a bias per item. Every method
makes the same number of steps of 512 examples with Adagrad; its rate is chosen by recall@20 on a tenth of each user's
training items. "Without" takes the logits of the drawn items as they are: log q is the same number for all.

  python bench/study_gowalla.py [--data DIR]   bench/results/study_gowalla.json, docs/images/study_gowalla.png
  python bench/study_gowalla.py --quick        few steps, nothing stored
"""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import torch
from _harness import print_table
from _study import COLOURS, Point, Run, axes_of, find, parser, save_plot, settings, store, stored

import samplex_cuda as sx
from samplex_cuda import data, metrics

NAME = "study_gowalla"
SAMPLES = 256
COMMON = [
    "model.name=sequence",
    "model.pooling=mean",
    "model.layers=0",
    "model.dim=64",
    "training.batch_size=512",
    f"head.num_samples={SAMPLES}",
]
METHODS: dict[str, list[str]] = {
    "full softmax": ["head.loss=full_softmax"],
    "unigram, with log Q": ["sampler.name=unigram", "sampler.smoothing=1"],
    "unigram, without log Q": ["sampler.name=unigram", "sampler.smoothing=1"],
    "uniform, with log Q": ["sampler.name=uniform"],
}
RATES = (0.1, 0.3)


class Uncorrected(sx.samplers.Unigram):
    """Draws by frequency, and says that every class was as likely: what a loss without the correction takes."""

    def sample(self, h: Any, num_samples: int, **options: Any) -> Any:
        draw = super().sample(h, num_samples, **options)
        return draw._replace(log_q=torch.full_like(draw.log_q, -math.log(num_samples)))


def hold_out(whole: data.Interactions, share: float, seed: int) -> tuple[data.Interactions, data.Interactions]:
    """A part of each user's items for training, and the rest as targets."""
    draw = np.random.default_rng(seed).random(len(whole.items))
    held = draw < share
    user = np.repeat(np.arange(whole.num_users), np.diff(whole.indptr))

    def part(mask: Any) -> data.Interactions:
        ends = np.concatenate([[0], np.cumsum(np.bincount(user[mask], minlength=whole.num_users))])
        return data.Interactions(ends, np.asarray(whole.items)[mask], whole.num_classes, whole.history, order="none")

    train = part(~held)
    return train, train.with_targets(part(held))


def fit(
    name: str, train: data.Dataset, judged: data.Dataset, rate: float, steps: list[int], rows: int, last: float
) -> list[Point]:
    def change(encoder: Any, head: Any) -> None:
        if "without" in name:
            head.sampler = Uncorrected(train.class_counts().double() + 1)

    run = Run(settings(*COMMON, *METHODS[name], f"optimizer.lr={rate:g}"), train, change=change)

    def judge(encoder: Any, head: Any) -> Point:
        part = rows if run.done < last else None  # between, some users are enough
        found = metrics.evaluate(encoder, head, judged, 512, k=(20,), exclude_history=True, nll=False, max_rows=part)
        return {"recall@20": found["recall@20"], "ndcg@20": found["ndcg@20"]}

    return run.curve(steps, judge, f"{name}, rate {rate:g}")


def popularity(train: data.Interactions, test: data.Dataset) -> float:
    """recall@20 of the most frequent items, the same for everybody except for those a user has: to compare with."""
    head = sx.SampledClassifier(1, train.num_classes, loss="full_softmax")
    with torch.no_grad():
        head.weight.zero_()
        head.bias.copy_(train.class_counts().float())
    found = metrics.evaluate(
        lambda batch: torch.zeros(len(batch["index"]), 1), head, test, 512, k=(20,), exclude_history=True, nll=False
    )
    return found["recall@20"]


def report(methods: dict[str, Any]) -> dict[str, bool]:
    lines = [
        [
            name,
            f"{m['rate']:g}",
            f"{m['valid']:.4f}",
            f"{m['curve'][-1]['recall@20']:.4f}",
            f"{m['curve'][-1]['ndcg@20']:.4f}",
            f"{m['curve'][-1]['seconds']:.0f} s",
        ]
        for name, m in methods.items()
    ]
    print_table(["method", "rate", "validation", "test recall@20", "test nDCG@20", "time"], lines)
    end = {name: m["curve"][-1]["recall@20"] for name, m in methods.items()}
    verdicts = {}
    if "unigram, with log Q" in end and "unigram, without log Q" in end:
        verdicts["the correction helps"] = end["unigram, with log Q"] > end["unigram, without log Q"]
    for text, holds in verdicts.items():
        print(f"{text}: {'yes' if holds else 'no'}")
    return verdicts


def plot(methods: dict[str, Any]) -> None:
    figure, (axes,) = axes_of()
    for (name, found), colour in zip(methods.items(), COLOURS, strict=False):
        x, y = [p["seconds"] for p in found["curve"]], [p["recall@20"] for p in found["curve"]]
        axes.plot(x, y, color=colour, label=name, marker="o", ms=3, lw=1.5)
    axes.set_xscale("log")
    axes.set_xlabel("seconds of one core, in training alone")
    axes.set_ylabel("test recall@20")
    axes.set_title("Gowalla, C = 40,981: the same steps for all", loc="left", fontsize=10)
    axes.legend(frameon=False, fontsize=8)
    save_plot(figure, NAME)


def main() -> int:
    made = parser(__doc__, "gowalla")
    made.add_argument("--steps", type=int, default=800, help="of 512 examples; an epoch has 1,583")
    options = made.parse_args()
    torch.set_num_threads(options.threads)
    if options.again:
        found = stored(NAME)["methods"]
        store(NAME, {}, verdicts=report(found))
        plot(found)
        return 0
    reading: dict[str, Any] = {"order": "none", "history": 100, "cache_dir": options.cache}
    train = data.interactions_file(find(options.data, "train"), **reading)
    test = data.interactions_file(find(options.data, "test"), known=train, **reading)
    part, valid = hold_out(train, 0.1, seed=0)
    steps = [20] if options.quick else [options.steps // 4, options.steps // 2, options.steps]
    few = 1024
    found: dict[str, Any] = {}
    for name in options.only or METHODS:
        # The full softmax takes the rates that are tried over a quarter of the steps, the others too.
        short = steps[:1]
        tried = {
            rate: fit(name, part, valid, rate, short, few, math.inf)[-1]["recall@20"]
            for rate in RATES[: 1 if options.quick else 2]
        }
        rate = max(tried, key=lambda r: tried[r])
        print(name, {f"{r:g}": round(v, 4) for r, v in tried.items()}, flush=True)
        curve = fit(name, train, test, rate, steps, few, math.inf if options.quick else steps[-1])
        found[name] = {
            "rate": rate,
            "valid": tried[rate],
            "tried": {f"{r:g}": v for r, v in tried.items()},
            "curve": curve,
        }
        print(name, curve[-1], flush=True)
        if not (options.quick or options.no_store):
            store(NAME, {name: found[name]}, steps=steps[-1], num_samples=SAMPLES)
    if options.quick or options.no_store:
        report(found)
        return 0
    methods = {name: one for name in METHODS if (one := stored(NAME)["methods"].get(name))}
    store(NAME, {}, verdicts=report(methods), popularity=popularity(train, test))
    plot(methods)
    return 0


if __name__ == "__main__":
    sys.exit(main())
