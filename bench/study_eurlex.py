"""EURLex-4K: how well and how fast a linear classifier learns with the full softmax and with sampled classes.

The rule is that of Bamler & Mandt 2020, appendix A.2: smallest label of each document, C = 3,687, 512 principal
components, linear model with bias, Adagrad; a tenth of the training file is held out. Rate, batch size, draws, decay
(or lambda of Eq. 6) and the number of steps of each method are chosen by accuracy on that tenth, one after the other,
from a small grid; then three other seeds are measured on the test file. Class rows start at 0.

  python bench/study_eurlex.py [--data DIR]   bench/results/study_eurlex.json, docs/images/study_eurlex.png; minutes
  python bench/study_eurlex.py --quick        fewer settings, steps and seeds, nothing stored
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from _harness import print_table
from _study import (
    COLOURS,
    Point,
    Run,
    axes_of,
    first_reach,
    mean,
    parser,
    save_plot,
    settings,
    store,
    stored,
)
from study_adversarial import Data, built_in, eurlex_features

from samplex_cuda import data
from samplex_cuda.training import evaluate

NAME = "study_eurlex"
PAPER = 0.336  # test accuracy of the paper's full softmax
RATES = (0.01, 0.03, 0.1)
SOFTMAX: dict[str, tuple[Any, ...]] = {
    "optimizer.lr": RATES,
    "head.num_samples": (8, 32, 128),
    "training.batch_size": (64, 256),
    "optimizer.weight_decay": (0.0, 1e-4),
}
START = {"optimizer.lr": 0.01, "head.num_samples": 32, "training.batch_size": 256, "head.reg": 3e-3}
# What stays, and what is tried for each key in turn, from the values of START or the first.
METHODS: dict[str, tuple[list[str], dict[str, tuple[Any, ...]]]] = {
    "full softmax": (
        ["head.loss=full_softmax"],
        {
            "optimizer.lr": RATES,
            "training.batch_size": (64, 256, 1024),
            "optimizer.weight_decay": (0.0, 1e-4),
        },
    ),
    "uniform": (["sampler.name=uniform"], SOFTMAX),
    "frequency": (["sampler.name=unigram", "sampler.smoothing=1"], SOFTMAX),
    "tree": (["sampler.name=tree", "sampler.dim=16"], SOFTMAX),
    "tree, negative sampling": (
        ["sampler.name=tree", "sampler.dim=16", "head.loss=negative_sampling"],
        {
            "optimizer.lr": RATES,
            "sampler.reg": (0.1, 1.0, 5.0, 20.0),
            "head.reg": (1e-3, 3e-3),
            "head.num_samples": (1, 8, 32),
            "sampler.dim": (16, 32),
        },
    ),
    "rff": (
        ["sampler.name=rff", "sampler.num_features=256", "sampler.normalize=true", "sampler.update=10"],
        {"optimizer.lr": RATES, "head.num_samples": (8, 32), "sampler.nu": (1.0, 4.0)},
    ),
    "quadratic": (
        ["sampler.name=quadratic", "sampler.update=25", "head.num_samples=8"],
        {"optimizer.lr": (0.03,)},
    ),
}
EPOCHS = {"quadratic": 3, "rff": 6, "tree, negative sampling": 18}
MOST_EPOCHS = 12  # of training; early stopping ends most runs before
PATIENCE = 4


def keys(fixed: list[str], chosen: dict[str, Any]) -> list[str]:
    return [
        *fixed,
        *(f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}" for key, value in chosen.items()),
    ]


def steps_of(rows: int, batch: int, epochs: float) -> list[int]:
    """Twice an epoch at first, then every epoch."""
    epoch = -(-rows // batch)
    marks = {max(1, round(epoch * part)) for part in (0.5, 1, 1.5, 2, 2.5, 3)}
    return sorted(marks | {epoch * n for n in range(4, int(epochs) + 1)})


class Search:
    """One key after the other, from the grid of a method, by the best accuracy on the validation part."""

    def __init__(self, name: str, parts: Data, epochs: float, small: bool) -> None:
        self.fixed, self.grid = METHODS[name]
        self.name, self.parts, self.epochs, self.small = name, parts, epochs, small
        self.tried: list[dict[str, Any]] = []

    def run(self, chosen: dict[str, Any]) -> dict[str, Any]:
        for known in self.tried:
            if known["chosen"] == chosen:
                return known
        train = data.Dense(*self.parts.train, num_classes=self.parts.num_classes)
        curve, setup = fit(self, chosen, train, self.parts.valid, seed=0, patience=PATIENCE)
        best = max(curve, key=lambda p: (p["accuracy"], -p["step"]))
        self.tried.append({"chosen": chosen, "best": best, "curve": curve, "setup_seconds": setup})
        text = ", ".join(f"{k.split('.')[1]} {v:g}" for k, v in chosen.items())
        print(
            f"  {self.name}: {text}: {100 * best['accuracy']:.2f} % at {best['step']:.0f}, {best['seconds']:.1f} s",
            flush=True,
        )
        return self.tried[-1]

    def choose(self) -> dict[str, Any]:
        now = {key: START.get(key, values[0]) for key, values in self.grid.items()}
        best = self.run(now)
        for key, values in self.grid.items():
            for value in values if not self.small else ():
                found = self.run(best["chosen"] | {key: value})
                if found["best"]["accuracy"] > best["best"]["accuracy"]:
                    best = found
        return best


def fit(
    search: Search, chosen: dict[str, Any], train: data.Dataset, part: tuple[torch.Tensor, torch.Tensor], *, seed: int,
    patience: int = 0, last: int = 0,
) -> tuple[list[Point], float]:  # fmt: skip
    run = Run(settings(*keys(search.fixed, chosen), f"training.seed={seed}"), train, zero=True)
    judged = data.Dense(*part, num_classes=train.num_classes)
    steps = steps_of(len(train), run.batch_size, search.epochs)
    if last:
        steps = [step for step in steps if step <= last]
    curve = run.curve(
        steps,
        lambda encoder, head: evaluate(encoder, head, judged, batch_size=1024, metrics=("accuracy", "nll")),
        search.name,
        patience=patience,
        by="accuracy",
    )
    return curve, run.setup_seconds


def study(name: str, parts: Data, seeds: int, epochs: float, small: bool) -> dict[str, Any]:
    search = Search(name, parts, min(epochs, EPOCHS.get(name, epochs)), small)
    best = search.choose()
    train = data.Dense(*parts.train, num_classes=parts.num_classes)
    # The full softmax goes on to its last epoch: the time at which it is as good as another method may come later.
    last = 0 if name == "full softmax" else int(best["best"]["step"])
    runs = [fit(search, best["chosen"], train, parts.test, seed=1 + seed, last=last) for seed in range(seeds)]
    curves = [
        {key: mean(run[0][i][key] for run in runs) for key in runs[0][0][0]}
        for i in range(min(len(r[0]) for r in runs))
    ]
    end = next(p for p in curves if p["step"] == best["best"]["step"])
    at_end = [next(p for p in run[0] if p["step"] == end["step"])["accuracy"] for run in runs]
    spread = float(torch.tensor(at_end, dtype=torch.float64).std()) if seeds > 1 else float("nan")
    print(f"{name}: test {100 * end['accuracy']:.2f} ± {100 * spread:.2f} % in {end['seconds']:.2f} s", flush=True)
    return {
        "chosen": best["chosen"],
        "fixed": search.fixed,
        "valid_accuracy": best["best"]["accuracy"],
        "step": end["step"],
        "seconds": end["seconds"],
        "setup_seconds": mean(run[1] for run in runs),
        "test_accuracy": end["accuracy"],
        "test_accuracy_sd": spread,
        "test_nll": end["nll"],
        "curve": curves,
        "seeds": seeds,
        "tried": search.tried,
    }


def report(methods: dict[str, Any]) -> dict[str, Any]:
    """Prints the table and the verdicts, and returns these."""
    full = methods["full softmax"]
    lines, reach = [], {}
    for name, found in methods.items():
        point = first_reach(full["curve"], "accuracy", found["test_accuracy"])
        # Also the quickest of all settings that were tried for the full softmax, on the validation part.
        others = [first_reach(one["curve"], "accuracy", found["valid_accuracy"]) for one in full["tried"]]
        quick = min((p["seconds"] for p in others if p), default=None)
        reach[name] = {"full_softmax_seconds": point and point["seconds"], "quickest_full_softmax_valid_seconds": quick}
        text = "never" if point is None else f"{point['seconds']:.1f} s = {point['seconds'] / found['seconds']:.1f}x"
        other = "never" if quick is None else f"{quick:.1f} s = {quick / valid_seconds(found):.1f}x"
        chosen = ", ".join(f"{k.split('.')[1]} {v:g}" for k, v in found["chosen"].items())
        lines.append(
            [
                name,
                f"{100 * found['valid_accuracy']:.2f} %",
                f"{100 * found['test_accuracy']:.2f} ± {100 * found['test_accuracy_sd']:.2f} %",
                f"{found['seconds']:.2f} s",
                "" if name == "full softmax" else text,
                "" if name == "full softmax" else other,
                chosen,
            ]
        )
    head = ["method", "validation", "test", "time", "full softmax to that", "quickest setting of it", "settings"]
    print_table(head, lines)
    verdicts: dict[str, Any] = {"reach": reach}
    for name in (n for n in methods if n.startswith("tree")):
        found, point = methods[name], reach[name]["full_softmax_seconds"]
        verdicts[f"{name}: at least {100 * PAPER:.1f} % on test"] = found["test_accuracy"] >= PAPER
        verdicts[f"{name}: within 1 point of full softmax"] = found["test_accuracy"] >= full["test_accuracy"] - 0.01
        verdicts[f"{name}: at most a fifth of its time to that accuracy"] = (
            point is None or found["seconds"] <= point / 5.0
        )
    for text, holds in verdicts.items():
        if isinstance(holds, bool):
            print(f"{text}: {'yes' if holds else 'no'}")
    return verdicts


def valid_seconds(found: dict[str, Any]) -> float:
    """Time of the run on the validation part that was chosen."""
    return next(one["best"]["seconds"] for one in found["tried"] if one["chosen"] == found["chosen"])


def plot(methods: dict[str, Any]) -> None:
    figure, (axes,) = axes_of()
    for (name, found), colour in zip(methods.items(), COLOURS, strict=False):
        x, y = [p["seconds"] for p in found["curve"]], [100 * p["accuracy"] for p in found["curve"]]
        axes.plot(x, y, color=colour, label=name, marker="o", ms=2.5, lw=1.5)
    axes.axhline(100 * PAPER, color="#9ca3af", lw=1, ls=":")
    axes.set_xscale("log")
    axes.set_ylim(bottom=25)
    axes.set_xlabel("seconds of one core, with what the sampler needs before")
    axes.set_ylabel("test accuracy, %")
    axes.set_title(
        "EURLex-4K, C = 3,687, linear, mean of 3 seeds (dotted: paper's full softmax)", loc="left", fontsize=9
    )
    axes.legend(frameon=False, fontsize=8)
    save_plot(figure, NAME)


def main() -> int:
    options = parser(__doc__, "eurlex4k").parse_args()
    torch.set_num_threads(options.threads)
    if options.again:
        found = stored(NAME)
        store(NAME, {}, verdicts=report(found["methods"]))
        plot(found["methods"])
        return 0
    if options.quick and not options.data.is_dir():
        parts = built_in(2000, 14_000, 64, 0.7)
    else:
        parts = eurlex_features(options.data)
    title = f"{len(parts.train[1]):,} examples, C = {parts.num_classes:,}, {parts.train[0].shape[1]} features"
    print(title, flush=True)
    names = options.only or [n for n in METHODS if not (options.quick and n in ("quadratic", "rff"))]
    found: dict[str, Any] = {}
    for name in names:
        one = study(name, parts, 1 if options.quick else 3, 2 if options.quick else MOST_EPOCHS, options.quick)
        found[name] = one
        if not (options.quick or options.no_store):
            store(NAME, {name: one}, data=title)
    if options.quick or options.no_store:
        if "full softmax" in found:
            report(found)
        return 0
    methods = {name: one for name in METHODS if (one := stored(NAME)["methods"].get(name))}
    if "full softmax" in methods:
        store(NAME, {}, verdicts=report(methods))
        plot(methods)
    return 0


if __name__ == "__main__":
    sys.exit(main())
