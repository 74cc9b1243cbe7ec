"""EURLex-4K: processor time to a test accuracy, full softmax against sampled classes, each written for speed.

Data and rule as in `study_eurlex.py` (C = 3,687, 512 principal components, linear with bias, rows start at 0). The
full softmax is `F.linear` + `F.cross_entropy` with torch's fused Adagrad; the sampled ones update their rows inside
backward. Rates fall linearly to a tenth of their start. Settings were chosen by hand on the validation part, one
seed: 32 were tried with the tree, 5 with the full softmax; m = 64, frequency and uniform were not tuned. The
first 16 features are the first principal components, so the tree takes these as they are. Times have the fit of the
tree, and for the kernel samplers their updates; one step before the clock starts loads what torch loads late.

  python bench/study_eurlex_time.py [--data DIR]   bench/results/study_eurlex_time.json and docs/images/
  python bench/study_eurlex_time.py --quick        one seed and a tenth of the steps, nothing stored
"""

from __future__ import annotations

import sys
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from _harness import print_table
from _study import COLOURS, Clock, Point, axes_of, mean, parser, save_plot, store, stored
from study_adversarial import Data, built_in, eurlex_features

import samplex_cuda as sx
from samplex_cuda import tree as fitting

NAME = "study_eurlex_time"
PAPER = 0.336  # test accuracy of the paper's full softmax
SEEDS = 3
# loss, sampler, batch, draws, rate, epochs
METHODS: dict[str, dict[str, Any]] = {
    "full softmax": {"batch": 128, "rate": 0.03, "epochs": 5},
    "full softmax, batches of 32": {"batch": 32, "rate": 0.02, "epochs": 2},
    "tree, negative sampling": {"loss": "negative_sampling", "batch": 64, "draws": 8, "rate": 0.02, "epochs": 6},
    "tree, sampled softmax": {"loss": "sampled_softmax", "batch": 64, "draws": 16, "rate": 0.02, "epochs": 5},
    "tree, sampled softmax, m = 64": {"loss": "sampled_softmax", "batch": 64, "draws": 64, "rate": 0.02, "epochs": 6},
    "frequency, sampled softmax": {"loss": "sampled_softmax", "batch": 64, "draws": 32, "rate": 0.02, "epochs": 5},
    "uniform, sampled softmax": {"loss": "sampled_softmax", "batch": 64, "draws": 32, "rate": 0.02, "epochs": 5},
    "rff, sampled softmax": {"loss": "sampled_softmax", "batch": 64, "draws": 16, "rate": 0.02, "epochs": 2},
    "quadratic, sampled softmax": {"loss": "sampled_softmax", "batch": 64, "draws": 8, "rate": 0.02, "epochs": 1},
}
TREE_DIM, TREE_REG, NS_REG, FALL = 16, 5.0, 3e-3, 0.1


def make_sampler(name: str, parts: Data, weight: torch.Tensor, bias: torch.Tensor) -> tuple[Any, int | None]:
    """The sampler, and every how many steps it follows the class table."""
    x, y = parts.train
    if name.startswith("tree"):
        fitted = fitting.fit_tree(x[:, :TREE_DIM].contiguous(), y, parts.num_classes, reg=TREE_REG, progress=False)
        first = torch.eye(x.shape[1])[:, :TREE_DIM].contiguous()
        mean_ = torch.zeros(x.shape[1])
        return sx.samplers.Tree(fitted.weights, fitted.bias, fitted.leaf_class, mean=mean_, projection=first), None
    if name.startswith("frequency"):
        return sx.samplers.Unigram(torch.bincount(y, minlength=parts.num_classes) + 1), None
    if name.startswith("rff"):
        made = sx.samplers.RandomFourier(weight, 256, 1.0, bias=bias, normalize=True, key=sx.Key(0))
        return made, 25
    if name.startswith("quadratic"):
        return sx.samplers.Quadratic(weight, bias=bias), 25
    return sx.samplers.Uniform(parts.num_classes), None


class Fit:
    """A classifier in training; `advance` takes it to a step."""

    def __init__(self, name: str, parts: Data, seed: int) -> None:
        self.name, self.parts, self.seed, self.clock, self.done = name, parts, seed, Clock(), 0
        self.about, self.priors = METHODS[name], dict[str, torch.Tensor]()
        self.full = "draws" not in self.about
        x, y = parts.train
        self.clock.start()
        self.weight = torch.zeros(parts.num_classes, x.shape[1], requires_grad=True)
        self.bias = torch.zeros(parts.num_classes, requires_grad=True)
        rate = self.about["rate"]
        if self.full:
            self.optimizer: Any = torch.optim.Adagrad([self.weight, self.bias], lr=rate, fused=True)
        else:
            sampler, update = make_sampler(name, parts, self.weight.detach(), self.bias.detach())
            loss = self.about["loss"]
            reg = NS_REG if loss == "negative_sampling" else 0.0
            self.head = sx.SampledClassifier(
                x.shape[1], parts.num_classes, sampler, self.about["draws"], loss, reg=reg, sampler_update=update
            )
            with torch.no_grad():
                self.head.weight.zero_()
                self.head.bias.zero_()
            self.optimizer = sx.optim.RowAdagrad(self.head.parameters(), lr=rate)
            self.head.fuse_optimizer(self.optimizer)
        self.clock.stop()
        self.setup_seconds = self.clock.seconds
        self.epoch = -(-len(y) // self.about["batch"])
        self.generator = torch.Generator().manual_seed(seed)

    def advance(self, step: int, total: int) -> None:
        x, y = self.parts.train
        size, rate = self.about["batch"], self.about["rate"]
        self.clock.start()
        while self.done < step:
            number = self.done % self.epoch
            if number == 0:
                self.order = torch.randperm(len(y), generator=self.generator)
            rows = self.order[number * size : (number + 1) * size]
            self.optimizer.param_groups[0]["lr"] = rate * (1 - (1 - FALL) * self.done / total)
            if self.full:
                F.cross_entropy(F.linear(x[rows], self.weight, self.bias), y[rows]).backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
            else:
                self.head(x[rows], y[rows], key=sx.Key(self.seed, self.done)).backward()
            self.done += 1
        self.clock.stop()

    @torch.no_grad()
    def accuracy(self, part: str) -> float:
        x, y = getattr(self.parts, part)
        weight, bias = (self.weight, self.bias) if self.full else (self.head.weight, self.head.bias)
        scores = F.linear(x, weight, bias)
        if not self.full and self.head.loss == "negative_sampling":
            if part not in self.priors:  # the tree rests, so log p_n (Eq. 5) stays what it is
                self.priors[part] = self.head.sampler.log_prob_all(x)
            scores += self.priors[part]
        return float((scores.argmax(1) == y).double().mean())

    def curve(self, quick: bool) -> list[Point]:
        """Points twice an epoch."""
        total = round(self.about["epochs"] * self.epoch * (0.1 if quick else 1))
        marks = sorted({max(1, min(total, self.epoch * n // 2)) for n in range(1, 2 * self.about["epochs"] + 1)})
        points = []
        for step in marks:
            self.advance(step, total)
            valid, test = self.accuracy("valid"), self.accuracy("test")
            points.append({"step": step, "seconds": self.clock.seconds, "valid": valid, "accuracy": test})
        return points


def study(name: str, parts: Data, quick: bool) -> dict[str, Any]:
    runs = []
    for seed in range(1 if quick else SEEDS):
        fit = Fit(name, parts, seed)
        runs.append((fit.curve(quick), fit.setup_seconds))
    curve = [{key: mean(r[0][i][key] for r in runs) for key in runs[0][0][0]} for i in range(len(runs[0][0]))]
    ends = torch.tensor([r[0][-1]["accuracy"] for r in runs], dtype=torch.float64)
    found = {
        "settings": METHODS[name],
        "seeds": len(runs),
        "setup_seconds": mean(r[1] for r in runs),
        "curve": curve,
        "test_accuracy_sd": float(ends.std()) if len(runs) > 1 else 0.0,
    }
    print(name, {key: round(value, 4) for key, value in curve[-1].items()}, flush=True)
    return found


def reach(curve: list[Point], accuracy: float) -> float | None:
    """When a curve, straight between its points, first has a test accuracy; None: never, or before its first point."""
    for left, right in pairwise(curve):
        if left["accuracy"] < accuracy <= right["accuracy"]:
            part = (accuracy - left["accuracy"]) / (right["accuracy"] - left["accuracy"])
            return left["seconds"] + part * (right["seconds"] - left["seconds"])
    return None


def report(methods: dict[str, Any]) -> dict[str, Any]:
    fulls = {name: m for name, m in methods.items() if name.startswith("full")}
    best = max(m["curve"][-1]["accuracy"] for m in fulls.values())
    verdicts: dict[str, Any] = {"full_softmax": best}
    lines = []
    for name, m in methods.items():
        end = m["curve"][-1]
        near = reach(m["curve"], best - 0.01)
        times = [t for f in fulls.values() if (t := reach(f["curve"], end["accuracy"])) is not None]
        same = "" if name in fulls or not times else f"{min(times):.2f} s = {min(times) / end['seconds']:.1f}x"
        verdicts[name] = {"seconds": end["seconds"], "within_1_point_seconds": near}
        verdicts[name] |= {"full_softmax_seconds": min(times)} if same else {}
        lines.append(
            [
                name,
                f"{100 * end['accuracy']:.2f} ± {100 * m['test_accuracy_sd']:.2f} %",
                f"{end['seconds']:.2f} s",
                "never" if near is None else f"{near:.2f} s",
                same,
            ]
        )
    head = ["method", "test at the end", "time", f"to {100 * (best - 0.01):.1f} %", "full softmax to its accuracy"]
    print_table(head, lines)
    return verdicts


def plot(methods: dict[str, Any]) -> None:
    figure, (axes,) = axes_of()
    for (name, m), colour in zip(methods.items(), COLOURS, strict=False):
        x, y = [p["seconds"] for p in m["curve"]], [100 * p["accuracy"] for p in m["curve"]]
        axes.plot(x, y, color=colour, label=name, marker="o", ms=2.5, lw=1.5)
    axes.axhline(100 * PAPER, color="#9ca3af", lw=1, ls=":")
    axes.set_xscale("log")
    axes.set_ylim(bottom=25)
    axes.set_xlabel("processor seconds of one thread, with what the sampler needs before")
    axes.set_ylabel("test accuracy, %")
    axes.set_title("EURLex-4K, C = 3,687, mean of 3 seeds (dotted: paper's full softmax)", loc="left", fontsize=9)
    axes.legend(frameon=False, fontsize=7)
    save_plot(figure, NAME)


def main() -> int:
    options = parser(__doc__, "eurlex4k").parse_args()
    torch.set_num_threads(options.threads)
    if not options.again:
        if options.quick and not options.data.is_dir():
            parts = built_in(2000, 14_000, 64, 0.7)
        else:
            parts = eurlex_features(options.data)
        found = {}
        for name in options.only or METHODS:
            Fit(name, parts, 0).advance(1, 2)
            found[name] = study(name, parts, options.quick)
            if not (options.quick or options.no_store):
                store(NAME, {name: found[name]})
        if options.quick or options.no_store:
            return 0
    methods = {name: one for name in METHODS if (one := stored(NAME)["methods"].get(name))}
    store(NAME, {}, verdicts=report(methods))
    plot(methods)
    return 0


if __name__ == "__main__":
    sys.exit(main())
