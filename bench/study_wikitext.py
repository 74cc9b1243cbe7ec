"""WikiText-2: perplexity of an LSTM language model trained with the full softmax and with sampled classes.

One LSTM layer of 200 units, embeddings of 200, untied; C = 33,278; windows of 35 tokens of 20 columns; Adam for the
LSTM, Adagrad for both tables (`--rate`; a method may have its own, and first sums of squares); `--epochs` passes
over the first `--part` of the training tokens. m draws per token (per row, m <= 200). Perplexity is exact, by the
chunked softmax over all classes, at eight points on the way on the first quarter of each column of the validation file
(`--valid-part`), and at the end on all of it too; the state continues from window to window. Points are stored at once.

  python bench/study_wikitext.py [--data DIR]  bench/results/study_wikitext.json, docs/images/study_wikitext.png; about
                                               half an hour of one core for the full softmax, minutes for the others
  python bench/study_wikitext.py --only "full softmax" "unigram, m = 200"
  python bench/study_wikitext.py --quick       a few steps, nothing stored
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from _harness import print_table
from _study import COLOURS, Point, Run, axes_of, find, parser, save_plot, settings, store, stored

from samplex_cuda import data
from samplex_cuda.training import evaluate

NAME = "study_wikitext"
COMMON = ["model.name=lstm", "model.dim=200", "optimizer.encoder_lr=0.002", "training.clip_norm=1"]
# A class that is not among the training tokens must be drawn now and then too, or it keeps its first logits: smoothing.
COUNTS = ["sampler.smoothing=1", "sampler.backoff=0.3"]
# First sums: the better of two settings after 200 steps; rate: of 0.2 and 0.4 after 448.
BIGRAM_RATE = ["optimizer.initial_accumulator=1e-6", "optimizer.lr=0.4"]
TREE = ["sampler.features=hidden", "sampler.refit_steps=370"]
METHODS: dict[str, list[str]] = {
    "full softmax": ["head.loss=full_softmax"],
    "uniform, m = 200": ["sampler.name=uniform", "head.num_samples=200"],
    "log-uniform, m = 200": ["sampler.name=log_uniform", "head.num_samples=200"],
    "unigram, m = 200": ["sampler.name=unigram", *COUNTS, "head.num_samples=200"],
    "bigram, m = 200": ["sampler.name=bigram", *COUNTS, "head.num_samples=200", *BIGRAM_RATE],
    "tree + unigram, m = 200": [
        "sampler.name=mixture",
        'sampler.components=["tree", "unigram"]',
        "sampler.weights=[0.5, 0.5]",
        *COUNTS,
        *TREE,
        "head.num_samples=200",
    ],
    "tree + bigram, m = 200": [
        "sampler.name=mixture",
        'sampler.components=["tree", "bigram"]',
        "sampler.weights=[0.3, 0.7]",
        *COUNTS,
        *TREE,
        "head.num_samples=200",
        *BIGRAM_RATE,
    ],
    "rff + unigram, m = 100": [
        "sampler.name=mixture",
        'sampler.components=["rff", "unigram"]',
        "sampler.weights=[0.5, 0.5]",
        "sampler.num_features=256",
        "sampler.nu=1",
        "sampler.normalize=true",
        "sampler.update=20",
        *COUNTS,
        "head.num_samples=100",
    ],
}
RATE = 0.1
MARKS = 8


def cut(whole: data.Tokens, part: float) -> data.Tokens:
    """The first part of the tokens."""
    count = max(36 * whole.columns, round(len(whole.tokens) * part))
    return data.Tokens(whole.tokens[:count], whole.num_classes, window=whole.window, columns=whole.columns)


def fit(
    name: str,
    train: data.Tokens,
    valid: data.Tokens,
    rate: float,
    steps: list[int],
    rows: int,
    save: Callable[[list[Point], float], None],
) -> None:
    run = Run(settings(*COMMON, f"optimizer.lr={rate:g}", *METHODS[name]), train)

    def judge(encoder: Any, head: Any) -> Point:
        found = evaluate(encoder, head, valid, metrics=("nll", "perplexity"), rows=rows)
        if run.done == steps[-1] and len(steps) > 1:
            found["whole_perplexity"] = evaluate(encoder, head, valid, metrics=("perplexity",))["perplexity"]
        return found

    run.curve(steps, judge, name, save=lambda points: save(points, run.setup_seconds))


def compared(found: dict[str, Any], full: dict[str, Any]) -> tuple[Point, Point] | None:
    """The last points of two runs over the same tokens that have the same number of steps."""
    if any(found[key] != full[key] for key in ("part", "valid_part")):
        return None
    steps = {p["step"]: p for p in full["curve"]}
    return next(((p, steps[p["step"]]) for p in reversed(found["curve"]) if p["step"] in steps), None)


def report(methods: dict[str, Any]) -> dict[str, Any]:
    full = methods.get("full softmax")
    lines, verdicts = [], {}
    for name, m in methods.items():
        end = m["curve"][-1]
        against, whole = ["", "", ""], end.get("whole_perplexity")
        pair = None if full is None or name == "full softmax" else compared(m, full)
        if pair is not None:
            ratio, share = (pair[0][key] / pair[1][key] for key in ("perplexity", "seconds"))
            against = [f"{pair[0]['step']:.0f}", f"{100 * (ratio - 1):+.1f} %", f"1/{1 / share:.1f}"]
            verdicts[name] = {"step": pair[0]["step"], "ratio": ratio, "share_of_time": share}
        cost = f"{1e3 * (end['seconds'] - m['setup_seconds']) / end['step']:.0f} ms"
        lines.append(
            [
                name,
                f"{m['rate']:g}",
                f"{end['step']:.0f}",
                f"{end['perplexity']:.1f}",
                "" if whole is None else f"{whole:.1f}",
                f"{end['seconds']:.0f} s",
                cost,
                *against,
            ]
        )
    head = ["method", "rate", "steps", "perplexity", "on the whole file", "time", "a step"]
    print_table([*head, "at step", "to full softmax", "of its time"], lines)
    if verdicts:
        best = min(verdicts, key=lambda n: verdicts[n]["ratio"])
        ratio, share = verdicts[best]["ratio"], verdicts[best]["share_of_time"]
        print(
            f"best: {best}: {100 * (ratio - 1):+.1f} % perplexity at 1/{1 / share:.1f} of the time; within 3 %: "
            f"{'yes' if ratio <= 1.03 else 'no'}"
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
    made.add_argument("--part", type=float, default=1.0, help="of the training tokens")
    made.add_argument("--valid-part", type=float, default=0.25, help="of the validation file, on the way")
    made.add_argument("--epochs", type=int, default=1)
    made.add_argument("--rate", type=float, default=RATE, help="of the tables")
    options = made.parse_args()
    torch.set_num_threads(options.threads)
    if options.again:
        found = in_order(stored(NAME)["methods"])
        store(NAME, {}, verdicts=report(found))
        plot(found)
        return 0
    reading: dict[str, Any] = {"window": 35, "columns": 20, "cache_dir": options.cache}
    whole = data.text_file(find(options.data, "train"), **reading)
    valid = data.text_file(find(options.data, "valid"), vocabulary=whole, **reading)
    train = cut(whole, 0.005 if options.quick else options.part)
    total = options.epochs * -(-len(train) // train.columns)
    print(f"{len(train.tokens):,} tokens, C = {train.num_classes:,}, {total:,} steps", flush=True)
    marks = [total] if options.quick else sorted({max(1, total * n // MARKS) for n in range(1, MARKS + 1)})
    rows = 200 if options.quick else round(len(valid) * options.valid_part)
    found: dict[str, Any] = {}
    for name in options.only or METHODS:
        about = {
            "rate": settings(f"optimizer.lr={options.rate:g}", *METHODS[name]).optimizer.lr,
            "part": options.part,
            "valid_part": options.valid_part,
            "epochs": options.epochs,
            "settings": [*COMMON, *METHODS[name]],
        }

        def save(curve: list[Point], setup: float, name: str = name, about: dict[str, Any] = about) -> None:
            found[name] = about | {"setup_seconds": setup, "curve": curve}
            print(name, {key: round(value, 4) for key, value in curve[-1].items()}, flush=True)
            if not (options.quick or options.no_store):
                store(NAME, {name: found[name]})

        fit(name, train, valid, options.rate, marks, rows, save)
    if options.quick or options.no_store:
        report(found)
        return 0
    methods = in_order(stored(NAME)["methods"])
    store(NAME, {}, verdicts=report(methods))
    plot(methods)
    return 0


def in_order(methods: dict[str, Any]) -> dict[str, Any]:
    return {name: one for name in METHODS if (one := methods.get(name))}


if __name__ == "__main__":
    sys.exit(main())
