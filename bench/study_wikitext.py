"""WikiText-2: perplexity of an LSTM language model trained with the full softmax and with sampled classes.

One LSTM layer of 200 units, embeddings of 200, untied; C = 33,278; windows of 35 tokens of 20 columns; Adam for the
LSTM, Adagrad for both tables; `--epochs` passes over the first `--part` of the training tokens. m draws a token
(per row, m <= 200). The rate of the tables is chosen for each method by a short run. Perplexity is exact, by the
chunked softmax over all classes, on the first half of each column of the validation file (`--valid-part 1`: all of it);
the state goes on from window to window.

  python bench/study_wikitext.py [--data DIR]  bench/results/study_wikitext.json, docs/images/study_wikitext.png
  python bench/study_wikitext.py --part 1      a whole epoch: more than half an hour of one core for the full softmax
  python bench/study_wikitext.py --quick       a few steps, nothing stored
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from _harness import print_table
from _study import COLOURS, Point, Run, axes_of, find, parser, save_plot, settings, store, stored

from samplex_cuda import data
from samplex_cuda.training import evaluate

NAME = "study_wikitext"
COMMON = ["model.name=lstm", "model.dim=200", "optimizer.encoder_lr=0.002", "training.clip_norm=1"]
# A class that is not among the training tokens must be drawn now and then too, or it keeps its first logits: smoothing.
METHODS: dict[str, list[str]] = {
    "full softmax": ["head.loss=full_softmax"],
    "uniform, m = 200": ["sampler.name=uniform", "head.num_samples=200"],
    "log-uniform, m = 200": ["sampler.name=log_uniform", "head.num_samples=200"],
    "unigram, m = 200": ["sampler.name=unigram", "sampler.smoothing=1", "head.num_samples=200"],
    "bigram, m = 200": ["sampler.name=bigram", "sampler.smoothing=1", "sampler.backoff=0.3", "head.num_samples=200"],
    "rff + unigram, m = 100": [
        "sampler.name=mixture",
        'sampler.components=["rff", "unigram"]',
        "sampler.weights=[0.5, 0.5]",
        "sampler.num_features=256",
        "sampler.nu=1",
        "sampler.normalize=true",
        "sampler.update=20",
        "sampler.smoothing=1",
        "head.num_samples=100",
    ],
}
RATES = (0.1, 0.2)


def cut(whole: data.Tokens, part: float) -> data.Tokens:
    """The first part of the tokens."""
    count = max(36 * whole.columns, round(len(whole.tokens) * part))
    return data.Tokens(whole.tokens[:count], whole.num_classes, window=whole.window, columns=whole.columns)


def fit(
    name: str, train: data.Tokens, valid: data.Tokens, rate: float, steps: list[int], rows: int, most: int, last: int
) -> tuple[list[Point], float]:
    run = Run(settings(*COMMON, *METHODS[name], f"optimizer.lr={rate:g}"), train)

    def judge(encoder: Any, head: Any) -> Point:
        # Between, a small part of the file is enough.
        return evaluate(encoder, head, valid, metrics=("nll", "perplexity"), rows=rows if run.done < last else most)

    return run.curve(steps, judge, f"{name}, rate {rate:g}"), run.setup_seconds


def report(methods: dict[str, Any]) -> dict[str, Any]:
    full = methods.get("full softmax")
    lines = []
    for name, m in methods.items():
        end = m["curve"][-1]
        against = ["", ""]
        if full is not None and full["part"] == m["part"]:
            other = full["curve"][-1]
            against = [
                f"{100 * (end['perplexity'] / other['perplexity'] - 1):+.1f} %",
                f"{end['seconds'] / other['seconds']:.3f}",
            ]
        cost = f"{1e3 * (end['seconds'] - m['setup_seconds']) / end['step']:.0f} ms"
        lines.append(
            [
                name,
                f"{m['rate']:g}",
                f"{end['perplexity']:.1f}",
                against[0],
                f"{end['seconds']:.0f} s",
                against[1],
                cost,
            ]
        )
    head = ["method", "rate", "valid perplexity", "to full softmax", "time", "share of its time", "a step"]
    print_table(head, lines)
    if full is None:
        return {}
    others = {n: m for n, m in methods.items() if n != "full softmax" and m["part"] == full["part"]}
    if not others:
        return {}
    best = min(others, key=lambda n: others[n]["curve"][-1]["perplexity"])
    ratio = others[best]["curve"][-1]["perplexity"] / full["curve"][-1]["perplexity"]
    share = others[best]["curve"][-1]["seconds"] / full["curve"][-1]["seconds"]
    verdicts = {"best": best, "ratio": ratio, "share_of_time": share, "within 3 %": ratio <= 1.03}
    print(
        f"best: {best}: {100 * (ratio - 1):+.1f} % perplexity at {share:.3f} of the time; within 3 %: {ratio <= 1.03}"
    )
    return verdicts


def plot(methods: dict[str, Any]) -> None:
    figure, (axes,) = axes_of()
    for (name, found), colour in zip(methods.items(), COLOURS, strict=False):
        x, y = [p["seconds"] for p in found["curve"]], [p["perplexity"] for p in found["curve"]]
        axes.plot(x, y, color=colour, label=name, marker="o", ms=3, lw=1.5)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("seconds of one core, in training alone")
    axes.set_ylabel("validation perplexity")
    part = next(iter(methods.values()))["part"]
    text = "the training file" if part == 1 else f"the first {100 * part:g} % of the training file"
    axes.set_title(f"WikiText-2, LSTM 200, C = 33,278: one pass over {text}", loc="left", fontsize=9)
    axes.legend(frameon=False, fontsize=8)
    save_plot(figure, NAME)


def main() -> int:
    made = parser(__doc__, "wikitext2")
    made.add_argument("--part", type=float, default=0.15, help="of the training tokens")
    made.add_argument("--valid-part", type=float, default=0.5, help="of the windows of the validation file")
    made.add_argument("--epochs", type=int, default=1)
    made.add_argument("--rate", type=float, help="of the tables, for all methods: no choice")
    options = made.parse_args()
    torch.set_num_threads(options.threads)
    if options.again:
        found = stored(NAME)["methods"]
        store(NAME, {}, verdicts=report(found))
        plot(found)
        return 0
    reading: dict[str, Any] = {"window": 35, "columns": 20, "cache_dir": options.cache}
    whole = data.text_file(find(options.data, "train"), **reading)
    valid = data.text_file(find(options.data, "valid"), vocabulary=whole, **reading)
    train = cut(whole, 0.005 if options.quick else options.part)
    total = options.epochs * -(-len(train) // train.columns)
    print(f"{len(train.tokens):,} tokens, C = {train.num_classes:,}, {total:,} steps", flush=True)
    marks = sorted({max(1, total // 2), total})
    few, most = 300, round(len(valid) * options.valid_part)
    found: dict[str, Any] = {}
    for name in options.only or METHODS:
        rate, tried = options.rate or RATES[0], {}
        if options.rate is None and not options.quick:
            short = [min(total, 100)]
            tried = {r: fit(name, train, valid, r, short, few, few, total + 1)[0][-1]["nll"] for r in RATES}
            rate = min(tried, key=lambda r: tried[r])
            print(name, {f"{r:g}": round(v, 4) for r, v in tried.items()}, flush=True)
        curve, setup = fit(name, train, valid, rate, marks, few, few if options.quick else most, total)
        found[name] = {
            "rate": rate,
            "tried": {f"{r:g}": v for r, v in tried.items()},
            "part": options.part,
            "valid_part": options.valid_part,
            "epochs": options.epochs,
            "setup_seconds": setup,
            "curve": curve,
            "settings": [*COMMON, *METHODS[name]],
        }
        print(name, curve[-1], flush=True)
        if not (options.quick or options.no_store):
            store(NAME, {name: found[name]})
    if options.quick or options.no_store:
        report(found)
        return 0
    methods = {name: one for name in METHODS if (one := stored(NAME)["methods"].get(name))}
    store(NAME, {}, verdicts=report(methods))
    plot(methods)
    return 0


if __name__ == "__main__":
    sys.exit(main())
