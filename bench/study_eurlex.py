"""EURLex-4K: test accuracy and time of the full softmax and of sampled classes, each tuned on validation and for speed.

The rule is that of Bamler & Mandt 2020, appendix A.2: smallest label of each document, C = 3,687, 512 principal
components, linear model with bias, Adagrad; a tenth of the training file is held out. Class rows start at 0, rates fall
linearly to a tenth over the epochs of a run. The full softmax is `F.linear` + `F.cross_entropy` with torch's fused
Adagrad, the quickest one there is here; the sampled ones update their rows inside backward. The first features are the
first principal components, so the tree takes these as they are.

Every setting of a method's grid is run (two seeds; kernel samplers: one) and judged on the held-out tenth. The best one
there, and the best one of each batch size, number of epochs and number of draws, are run with other seeds on the test
file: five for the full softmax and the tree, three for the rest. So what moves time against accuracy is tried in full,
and the rest is tuned; a method's time to an accuracy is the shortest of its curves. Times have the fit of the tree, and
for kernel samplers their updates.

  python bench/study_eurlex.py [--data DIR]   bench/results/study_eurlex.json, docs/images/study_eurlex.png; an hour
  python bench/study_eurlex.py --measure      the test runs again, with the settings that are stored; minutes
  python bench/study_eurlex.py --quick        a setting or two, one seed, few steps, nothing stored
"""

from __future__ import annotations

import sys
from itertools import pairwise, product
from typing import Any

import torch
import torch.nn.functional as F
from _harness import print_table, progress
from _study import COLOURS, Clock, Point, axes_of, mean, parser, save_plot, store, stored
from study_adversarial import Data, built_in, eurlex_features

import samplex_cuda as sx
from samplex_cuda import tree_fit as fitting

NAME = "study_eurlex"
FULL, TREE, INDEPENDENT = "full softmax", "tree", "tree, independent draws"
PAPER = 0.336  # test accuracy of the paper's full softmax
LEVELS = (-0.01, -0.0075, -0.005, -0.0025, 0.0)  # accuracies to the full softmax's at which times are compared
FALL = 0.1  # of the rate over a run
# Features of a tree, where a setting does not say. The mean of the rows' distributions asks for fewer than the
# distribution of a row: with 4, 8 and 16 validation is the same within its noise.
TREE_DIM, TREE_REG = 16, 5.0
TUNE_SEEDS, TEST_SEEDS = (0, 1), (10, 11, 12, 13, 14)
Setting = dict[str, Any]

# What is tried, all combinations.
METHODS: dict[str, dict[str, tuple[Any, ...]]] = {
    FULL: {"rate": (0.02, 0.03, 0.045, 0.07), "batch": (128, 256), "epochs": (2, 3, 4, 5)},
    "full softmax, classes with examples": {
        "rate": (0.02, 0.03, 0.045, 0.07), "batch": (128, 256), "epochs": (2, 3, 4, 5),
    },
    TREE: {
        "rate": (0.02, 0.03, 0.04, 0.055), "batch": (128, 256), "epochs": (2, 3, 4, 5), "draws": (512, 1024, 2048),
        "shared": (True,), "stratified": (True,), "dim": (8,),
    },
    INDEPENDENT: {
        "rate": (0.02, 0.03, 0.04, 0.055), "batch": (128, 256), "epochs": (2, 3, 4, 5), "draws": (1024, 2048, 4096),
        "shared": (True,),
    },
    "tree, all classes": {
        "rate": (0.03, 0.04), "batch": (128, 256), "epochs": (2, 3, 4, 5), "draws": (1024, 2048), "shared": (True,),
        "stratified": (True,),
    },
    "tree, draws of each row": {
        "rate": (0.01, 0.02, 0.03), "batch": (64,), "epochs": (3, 5), "draws": (16, 64), "shared": (False,),
    },
    "tree, negative sampling": {
        "rate": (0.01, 0.02, 0.03), "batch": (64,), "epochs": (4, 6), "draws": (8, 32), "shared": (False,),
        "reg": (1e-3, 3e-3),
    },
    "frequency": {
        "rate": (0.02, 0.03, 0.045), "batch": (128, 256), "epochs": (2, 3, 5), "draws": (1024, 2048),
        "shared": (True,), "smoothing": (0, 1),
    },
    "uniform": {
        "rate": (0.02, 0.03, 0.045), "batch": (128, 256), "epochs": (3, 5), "draws": (1024, 4096), "shared": (True,),
    },
    "rff": {
        "rate": (0.02, 0.03, 0.045), "batch": (128,), "epochs": (3,), "draws": (512, 1024), "shared": (True,),
        "nu": (1.0, 4.0),
    },
    "quadratic": {"rate": (0.02, 0.045), "batch": (128,), "epochs": (2,), "draws": (64,), "shared": (True,)},
}  # fmt: skip
ONE_SEED = ("rff", "quadratic")  # tuned with one seed: an epoch takes them 5 and 17 s
UPDATE = 10  # steps after which a kernel sampler follows the class table


def make_sampler(name: str, setting: Setting, parts: Data, weight: torch.Tensor, bias: torch.Tensor) -> Any:
    x, y = parts.train
    if name.startswith(TREE):
        unseen = name not in (TREE, INDEPENDENT)  # these give probability 0 to classes without an example
        dim = setting.get("dim", TREE_DIM)
        z = x[:, :dim].contiguous()
        fitted = fitting.fit_tree(z, y, parts.num_classes, reg=TREE_REG, unseen=unseen, progress=False)
        first, mean_ = torch.eye(x.shape[1])[:, :dim].contiguous(), torch.zeros(x.shape[1])
        return sx.samplers.Tree(fitted.weights, fitted.bias, fitted.leaf_class, mean=mean_, projection=first)
    if name == "frequency":
        return sx.samplers.Unigram(torch.bincount(y, minlength=parts.num_classes) + setting["smoothing"])
    if name == "rff":
        return sx.samplers.RandomFourier(weight, 256, setting["nu"], bias=bias, normalize=True, key=sx.Key(0))
    if name == "quadratic":
        return sx.samplers.Quadratic(weight, bias=bias)
    return sx.samplers.Uniform(parts.num_classes)


class Fit:
    """A classifier in training; `advance` takes it to a step."""

    def __init__(self, name: str, setting: Setting, parts: Data, seed: int) -> None:
        self.name, self.setting, self.parts, self.seed = name, setting, parts, seed
        self.clock, self.done, self.priors = Clock(), 0, dict[str, torch.Tensor]()
        x, y = parts.train
        self.full = name.startswith(FULL)
        self.epoch = -(-len(y) // setting["batch"])
        self.total = round(setting["epochs"] * self.epoch)
        self.generator = torch.Generator().manual_seed(seed)
        self.clock.start()
        self.classes, self.target = torch.arange(parts.num_classes), y
        if self.full and name != FULL:
            self.classes, self.target = y.unique(return_inverse=True)
        rows = len(self.classes)
        if self.full:
            self.weight = torch.zeros(rows, x.shape[1], requires_grad=True)
            self.bias = torch.zeros(rows, requires_grad=True)
            self.optimizer: Any = torch.optim.Adagrad([self.weight, self.bias], lr=setting["rate"], fused=True)
        else:
            blank = torch.zeros(rows, x.shape[1]), torch.zeros(rows)
            sampler = make_sampler(name, setting, parts, *blank)
            self.head = sx.SampledClassifier(
                x.shape[1], rows, sampler, setting["draws"],
                sx.losses.NegativeSampling(setting["reg"]) if "reg" in setting else "sampled_softmax",
                shared=setting["shared"], stratified=setting.get("stratified", False),
                sampler_update=UPDATE if sampler.follows_rows else None,
            )  # fmt: skip
            for p in self.head.parameters():
                torch.nn.init.zeros_(p)
            self.weight, self.bias = self.head.weight, self.head.bias
            self.optimizer = sx.optim.RowAdagrad(self.head.parameters(), lr=setting["rate"])
            self.head.fuse_optimizer(self.optimizer)
        self.clock.stop()
        self.setup_seconds = self.clock.seconds

    def advance(self, step: int) -> None:
        x, y, size = self.parts.train[0], self.target, self.setting["batch"]
        self.clock.start()
        while self.done < step:
            number = self.done % self.epoch
            if number == 0:
                self.order = torch.randperm(len(y), generator=self.generator)
            rows = self.order[number * size : (number + 1) * size]
            self.optimizer.param_groups[0]["lr"] = self.setting["rate"] * (1 - (1 - FALL) * self.done / self.total)
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
        scores = F.linear(x, self.weight, self.bias)
        if "reg" in self.setting:
            if part not in self.priors:  # the tree rests, so log p_n (Eq. 5) stays what it is
                self.priors[part] = self.head.sampler.log_prob_all(x)
            scores += self.priors[part]
        return float((self.classes[scores.argmax(1)] == y).double().mean())

    def curve(self, part: str) -> list[Point]:
        """Points twice an epoch."""
        half = [self.epoch * n // 2 for n in range(1, 2 * self.setting["epochs"])]
        points = []
        for step in [*half, self.total]:
            self.advance(step)
            points.append({"step": step, "seconds": self.clock.seconds, "accuracy": self.accuracy(part)})
        return points


def tune(name: str, parts: Data, seeds: tuple[int, ...], some: int = 0) -> list[dict[str, Any]]:
    """Every setting of the grid with its accuracy on validation and its time, means over the seeds."""
    grid = METHODS[name]
    settings = [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]
    tried = []
    for number, setting in enumerate(settings[: some or None]):
        fits = [Fit(name, setting, parts, seed) for seed in seeds]
        for fit in fits:
            fit.advance(fit.total)
        found = {"valid": mean(f.accuracy("valid") for f in fits), "seconds": mean(f.clock.seconds for f in fits)}
        tried.append({"setting": setting} | found)
        progress(f"{name}: setting {number + 1} of {len(settings)}: {100 * found['valid']:.2f} %")
    progress("")
    return tried


def chosen_of(tried: list[dict[str, Any]]) -> list[Setting]:
    """What is measured: the best on validation, and the best of each batch size, number of epochs and of draws."""

    def size(one: dict[str, Any]) -> tuple[int, int, int]:
        setting = one["setting"]
        return setting["batch"], setting["epochs"], setting.get("draws", 0)

    best = [max((t for t in tried if size(t) == s), key=lambda t: t["valid"]) for s in sorted(set(map(size, tried)))]
    first = max(best, key=lambda t: (t["valid"], -t["seconds"]))
    return [first["setting"], *(t["setting"] for t in best if t is not first)]


def measure(chosen: dict[str, list[Setting]], parts: Data, seeds: tuple[int, ...]) -> dict[str, list[dict[str, Any]]]:
    """Test curves of every setting of every method, means over the seeds.

    All settings of all methods have their turn with a seed before the next one begins: what the machine does from
    minute to minute comes to all of them.
    """
    runs: dict[str, list[list[tuple[list[Point], float]]]] = {n: [[] for _ in some] for n, some in chosen.items()}
    for name, settings in chosen.items():
        Fit(name, settings[0], parts, 0).advance(3)  # loads what torch loads late
    for number, seed in enumerate(seeds):
        for name, settings in chosen.items():
            some = seeds[: None if name in (FULL, TREE) else 3]
            for place, setting in enumerate(settings if seed in some else []):
                progress(f"seed {number + 1} of {len(seeds)}: {name}, setting {place + 1} of {len(settings)}")
                fit = Fit(name, setting, parts, seed)
                runs[name][place].append((fit.curve("test"), fit.setup_seconds))
    progress("")
    return {
        name: [summary(name, setting, found) for setting, found in zip(settings, runs[name], strict=True)]
        for name, settings in chosen.items()
    }


def summary(name: str, setting: Setting, runs: list[tuple[list[Point], float]]) -> dict[str, Any]:
    curve = [{key: mean(r[0][i][key] for r in runs) for key in runs[0][0][0]} for i in range(len(runs[0][0]))]
    ends = torch.tensor([r[0][-1]["accuracy"] for r in runs], dtype=torch.float64)
    print(f"{name}: {setting}: {100 * curve[-1]['accuracy']:.2f} % in {curve[-1]['seconds']:.2f} s", flush=True)
    return {
        "setting": setting,
        "curve": curve,
        "accuracy": curve[-1]["accuracy"],
        "accuracy_sd": float(ends.std()) if len(runs) > 1 else 0.0,
        "seconds": curve[-1]["seconds"],
        "setup_seconds": mean(r[1] for r in runs),
        "seeds": len(runs),
    }


def reach(curve: list[Point], accuracy: float) -> float | None:
    """When a curve, straight between its points, first has a test accuracy; its first point where that is enough."""
    if curve[0]["accuracy"] >= accuracy:
        return curve[0]["seconds"]
    for left, right in pairwise(curve):
        if left["accuracy"] < accuracy <= right["accuracy"]:
            part = (accuracy - left["accuracy"]) / (right["accuracy"] - left["accuracy"])
            return left["seconds"] + part * (right["seconds"] - left["seconds"])
    return None


def soonest(found: dict[str, Any], accuracy: float) -> float | None:
    """The shortest time to an accuracy of all curves of a method."""
    return min((t for one in found["measured"] if (t := reach(one["curve"], accuracy)) is not None), default=None)


def report(methods: dict[str, Any]) -> dict[str, Any]:
    """Prints the tables and the verdicts, and returns these."""
    full = methods[FULL]
    best = full["measured"][0]["accuracy"]
    lines = []
    for name, found in methods.items():
        one = found["measured"][0]
        same = soonest(full, one["accuracy"])
        text = "never" if same is None else f"{same:.2f} s = {same / one['seconds']:.1f}x"
        lines.append(
            [
                name,
                f"{100 * next(t['valid'] for t in found['tried'] if t['setting'] == one['setting']):.2f} %",
                f"{100 * one['accuracy']:.2f} ± {100 * one['accuracy_sd']:.2f} %",
                f"{one['seconds']:.2f} s",
                "" if name == FULL else text,
                ", ".join(f"{k} {v:g}" for k, v in one["setting"].items() if k not in ("shared", "stratified", "dim")),
                str(len(found["tried"])),
            ]
        )
    print_table(["method", "validation", "test", "time", "full softmax to that", "setting", "tried"], lines)
    print()
    times: dict[str, dict[str, float | None]] = {}
    for name, found in methods.items():
        times[name] = {f"{100 * (best + level):.2f} %": soonest(found, best + level) for level in LEVELS}
    head = ["time to a test accuracy of", *times[FULL]]
    print_table(
        head, [[name, *("never" if t is None else f"{t:.2f} s" for t in row.values())] for name, row in times.items()]
    )
    verdicts: dict[str, Any] = {"times": times, "full_softmax": best}
    if TREE in methods:
        tree = methods[TREE]["measured"][0]
        ratios = {
            level: theirs / ours
            for level, ours in times[TREE].items()
            if ours is not None and (theirs := times[FULL][level]) is not None
        }
        print("full softmax / tree: " + ", ".join(f"{level}: {ratio:.1f}x" for level, ratio in ratios.items()))
        verdicts |= {
            "ratios": ratios,
            f"tree: at least {100 * PAPER:.1f} % on test": tree["accuracy"] >= PAPER,
            "tree: within 1 point of the full softmax": tree["accuracy"] >= best - 0.01,
            "tree: at most a fifth of its time to an accuracy within 1 point": max(ratios.values(), default=0.0) >= 5.0,
            "the same at every level": len(ratios) == len(LEVELS) and min(ratios.values()) >= 5.0,
        }
    for text, holds in verdicts.items():
        if isinstance(holds, bool):
            print(f"{text}: {'yes' if holds else 'no'}")
    return verdicts


def plot(methods: dict[str, Any]) -> None:
    figure, (axes,) = axes_of()
    for (name, found), colour in zip(methods.items(), (*COLOURS, "#0891b2", "#db2777", "#111827"), strict=False):
        one = found["measured"][0]
        x, y = [p["seconds"] for p in one["curve"]], [100 * p["accuracy"] for p in one["curve"]]
        axes.plot(x, y, color=colour, label=name, marker="o", ms=2.5, lw=2.2 if name in (FULL, TREE) else 1.2)
    axes.axhline(100 * PAPER, color="#9ca3af", lw=1, ls=":")
    axes.set_xscale("log")
    axes.set_xticks([0.2, 0.5, 1, 2, 5, 10, 20, 50], labels=["0.2", "0.5", "1", "2", "5", "10", "20", "50"])
    axes.minorticks_off()
    axes.set_ylim(bottom=28)
    axes.set_xlabel("processor seconds of one thread, with what the sampler needs before")
    axes.set_ylabel("test accuracy, %")
    axes.set_title("EURLex-4K, C = 3,687, means over seeds (dotted: paper's full softmax)", loc="left", fontsize=9)
    axes.legend(frameon=False, fontsize=7, ncols=3, loc="lower center")
    save_plot(figure, NAME)


def main() -> int:
    made = parser(__doc__, "eurlex4k")
    made.add_argument("--measure", action="store_true", help="the test runs again, with the stored settings")
    options = made.parse_args()
    torch.set_num_threads(options.threads)
    if not options.again:
        if options.quick and not options.data.is_dir():
            parts = built_in(2000, 14_000, 64, 0.7)
        else:
            parts = eurlex_features(options.data)
        tried: dict[str, list[dict[str, Any]]] = {}
        for name in options.only or METHODS:
            before = stored(NAME).get("methods", {}).get(name)
            if options.measure and before:
                tried[name] = before["tried"]
            else:
                seeds = TUNE_SEEDS[: 1 if options.quick or name in ONE_SEED else None]
                tried[name] = tune(name, parts, seeds, some=1 if options.quick else 0)
        chosen = {name: chosen_of(some) for name, some in tried.items()}
        measured = measure(chosen, parts, TEST_SEEDS[: 1 if options.quick else None])
        if not (options.quick or options.no_store):
            store(NAME, {name: {"tried": tried[name], "measured": measured[name]} for name in tried})
        if options.quick or options.no_store:
            return 0
    methods = {name: one for name in METHODS if (one := stored(NAME)["methods"].get(name))}
    store(NAME, {}, verdicts=report(methods))
    plot(methods)
    return 0


if __name__ == "__main__":
    sys.exit(main())
