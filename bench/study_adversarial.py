"""Negative sampling with uniform, frequency and adversarial (tree) noise at equal steps (Bamler & Mandt 2020).

The protocol is that of the paper's section 5 and appendix A.2: a linear model with bias on K features, Adagrad, one
negative per example, weights that start at zero. Learning rate and lambda (Eq. 6) are chosen for each noise by itself,
by the corrected accuracy on a validation part after the last step: from the middle of a grid to the best neighbor,
until none is better. With these, runs of other seeds are measured on a test part that no choice has seen, after several
numbers of steps, with log p_n added back (Eq. 5) and without. The tree's regularizer is chosen by its log p_n on the
validation part.

  python bench/study_adversarial.py                      built-in hierarchical data, C = 20,000
  python bench/study_adversarial.py --classes 2000 --examples 100000 --width 64 --steps 100 200 400 800 1600
                                                         fewer classes; stored beside it, and so is the next
  python bench/study_adversarial.py --data-noise 1.5     with classes that overlap
  python bench/study_adversarial.py --eurlex DIR         EURLex-4K (XC format files, .txt, .gz or .xz), PCA-512 features
  python bench/study_adversarial.py --quick              fewer steps, examples, settings, one seed: under a minute

Prints a table and a verdict on each statement; a whole run also draws docs/images/study_adversarial_*.png and stores
bench/results/study_adversarial.json. Some minutes; not part of `make bench`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from _harness import IMAGES, RESULTS, commit, machine, print_table, progress

import samplex_cuda as sx
from samplex_cuda.reproduce.adversarial_data import Data, Part, built_in, eurlex_features

BATCH = 256
NOISES = ("uniform", "frequency", "adversarial")
RATES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
REGS = (1e-5, 1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
START = (0.1, 3e-3)
TREE_REGS = (0.1, 0.3, 1.0, 3.0)  # by log p_n of the validation part
Point = dict[str, float]


def make_sampler(noise: str, data: Data, dim: int) -> Any:
    x, y = data.train
    if noise == "uniform":
        return sx.samplers.Uniform(data.num_classes)
    if noise == "frequency":
        # One more for each class: one that was never seen may still be asked for.
        return sx.samplers.Unigram(torch.bincount(y, minlength=data.num_classes) + 1)
    trees = {}
    for reg in TREE_REGS:
        begin = time.perf_counter()
        tree = sx.samplers.Tree.fit(x, y, num_classes=data.num_classes, dim=dim, reg=reg, whiten=True, progress=False)
        trees[reg] = float(tree.log_prob(*data.valid).mean()), tree
        print(
            f"tree, reg {reg:g}: {time.perf_counter() - begin:.1f} s, held-out log p_n {trees[reg][0]:.3f}", flush=True
        )
    return max(trees.values(), key=lambda found: found[0])[1]


@dataclasses.dataclass
class Noise:
    """A sampler, and log p_n of the examples it is judged on: it stays fixed, so they are computed once."""

    sampler: Any
    valid_log_q: torch.Tensor
    test_log_q: torch.Tensor

    @classmethod
    def of(cls, sampler: Any, data: Data) -> Noise:
        def log_q(x: torch.Tensor) -> torch.Tensor:
            return sampler.log_prob_all(x).expand(x.shape[0], data.num_classes)

        return cls(sampler, log_q(data.valid[0]), log_q(data.test[0]))


def judge(head: sx.SampledClassifier, part: Part, log_q: torch.Tensor) -> Point:
    x, y = part
    raw = head.scores(x, corrected=False)
    point = {"raw": float((raw.argmax(1) == y).float().mean())}
    raw += log_q
    point["corrected"] = float((raw.argmax(1) == y).float().mean())
    point["log_p"] = float((raw.gather(1, y[:, None]).squeeze(1) - raw.logsumexp(1)).mean())
    return point


def train(noise: Noise, data: Data, steps: list[int], rate: float, reg: float, seed: int, *, test: bool) -> list[Point]:
    """Points of one run at the given steps, on the test or the validation part."""
    x, y = data.train
    head = sx.SampledClassifier(
        x.shape[1], data.num_classes, noise.sampler, num_samples=1, loss=sx.losses.NegativeSampling(reg)
    )
    torch.nn.init.zeros_(head.weight)
    torch.nn.init.zeros_(head.bias)
    # The first sum of squares keeps the root away from 0; nothing else is added to it.
    optimizer = sx.optim.RowAdagrad(head.parameters(), lr=rate, initial_accumulator_value=1e-8, eps=0.0)
    head.fuse_optimizer(optimizer)
    order, key = torch.Generator().manual_seed(seed), sx.Key(seed)
    curve = []
    for step in range(1, steps[-1] + 1):
        rows = torch.randint(x.shape[0], (BATCH,), generator=order)
        head(x[rows], y[rows], key=key).backward()
        if step in steps:
            part, log_q = (data.test, noise.test_log_q) if test else (data.valid, noise.valid_log_q)
            curve.append({"step": step, **judge(head, part, log_q)})
            progress(f"rate {rate:g}, lambda {reg:g}, step {step}: {100 * curve[-1]['corrected']:.2f} %")
    progress("")
    return curve


class Settings:
    """Rate and lambda of the best accuracy on the validation part after the last step; runs serve every measure."""

    def __init__(self, noise: Noise, data: Data, steps: int) -> None:
        self.noise, self.data, self.steps = noise, data, steps
        self.tried: dict[tuple[int, int], Point] = {}

    def choose(self, measure: str, most: int) -> dict[str, float]:
        """By "corrected" or "raw" accuracy, with at most `most` new runs."""
        most += len(self.tried)

        def score(at: tuple[int, int]) -> float:
            i, j = at
            if at not in self.tried and len(self.tried) < most and 0 <= i < len(RATES) and 0 <= j < len(REGS):
                self.tried[at] = train(self.noise, self.data, [self.steps], RATES[i], REGS[j], 0, test=False)[-1]
            return self.tried[at][measure] if at in self.tried else 0.0

        best = max(self.tried or [(RATES.index(START[0]), REGS.index(START[1]))], key=score)
        while True:
            around = [best, *((best[0] + dx, best[1] + dy) for dx, dy in ((0, 1), (-1, 0), (0, -1), (1, 0)))]
            found = max(around, key=score)
            if found == best:
                return {"rate": RATES[best[0]], "reg": REGS[best[1]], "valid": self.tried[best][measure]}
            best = found

    def listed(self) -> list[Point]:
        return [
            {"rate": RATES[i], "reg": REGS[j]} | {name: point[name] for name in ("corrected", "raw", "log_p")}
            for (i, j), point in self.tried.items()
        ]


def spread(curves: list[list[Point]]) -> list[Point]:
    """Mean and standard deviation over the seeds, of every measure at every step."""
    points = []
    for at in zip(*curves, strict=True):
        point: Point = {"step": at[0]["step"]}
        for name in ("corrected", "raw", "log_p"):
            values = torch.tensor([run[name] for run in at], dtype=torch.float64)
            point[name] = float(values.mean())
            point[f"{name}_sd"] = float(values.std()) if len(at) > 1 else math.nan
        points.append(point)
    return points


def verdicts(curves: dict[str, list[Point]]) -> dict[str, list[bool]]:
    """Each statement at each number of steps, by the means over the seeds."""

    def more(measure: str, first: str, second: str, other: str | None = None) -> list[bool]:
        both = zip(curves[first], curves[second], strict=True)
        return [a[measure] > b[other or measure] for a, b in both]

    held = {}
    for measure, of in (("corrected", "accuracy"), ("log_p", "log p")):
        for first, second in (("adversarial", "frequency"), ("frequency", "uniform"), ("adversarial", "uniform")):
            held[f"{of}: {first} > {second}"] = more(measure, first, second)
    for kind in ("adversarial", "frequency"):
        held[f"bias removal helps, {kind}"] = more("corrected", kind, kind, "raw")
        if f"{kind}, for raw scores" in curves:
            named = f"bias removal helps, {kind}, each with settings of its own"
            held[named] = more("corrected", kind, f"{kind}, for raw scores", "raw")
    return held


def report(curves: dict[str, list[Point]]) -> dict[str, list[bool]]:
    """Prints the table and the verdicts, and returns these."""

    def share(point: Point, measure: str) -> str:
        return f"{100 * point[measure]:.2f} ± {100 * point[measure + '_sd']:.2f} %"

    lines = [
        [kind, f"{point['step']:,.0f}", share(point, "corrected"), share(point, "raw"), f"{point['log_p']:.3f}"]
        for kind, curve in curves.items()
        for point in curve
    ]
    print_table(["noise", "steps", "test accuracy", "without Eq. 5", "log p"], lines)
    judged = verdicts(curves)
    steps = [f"{point['step']:.0f}" for point in curves["uniform"]]
    for statement, holds in judged.items():
        at = [step for step, yes in zip(steps, holds, strict=True) if yes]
        print(f"{statement}: " + ("at every step" if all(holds) else f"at {', '.join(at)}" if at else "nowhere"))
    return judged


def store(name: str, found: dict[str, Any]) -> None:
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / "study_adversarial.json"
    stored = json.loads(path.read_text()) if path.exists() else {}
    stored[name] = found
    scratch = path.with_suffix(".json.tmp")
    scratch.write_text(json.dumps(stored, indent=1) + "\n")
    os.replace(scratch, path)
    plot(found["curves"], found["data"], IMAGES / f"study_adversarial_{name}.png")


def again() -> int:
    """Table, verdicts and plots from the stored curves."""
    for name, found in json.loads((RESULTS / "study_adversarial.json").read_text()).items():
        print(found["data"])
        store(name, found | {"verdicts": report(found["curves"])})
    return 0


def plot(curves: dict[str, list[Point]], title: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 4.0), layout="constrained")
    for noise, colour in zip(NOISES, ("#6e7781", "#c2710c", "#0f766e"), strict=True):
        step = [point["step"] for point in curves[noise]]
        shown = [("corrected", "-", noise, noise), ("raw", ":", None, f"{noise}, for raw scores")]
        for measure, style, label, which in shown:
            if which not in curves:
                continue
            curve = curves[which]
            values = [100 * point[measure] for point in curve]
            errors = [100 * point[f"{measure}_sd"] for point in curve]
            axes.errorbar(step, values, errors, color=colour, linestyle=style, label=label, marker="o", ms=3, capsize=2)
    axes.set_xscale("log")
    axes.set_xticks(step, [f"{n:,}" for n in step])
    axes.minorticks_off()
    axes.set_xlabel("steps")
    axes.set_ylabel("test accuracy, % (dotted: raw scores)")
    axes.set_title(title, loc="left", fontsize=10)
    axes.grid(True, color="#e6e8eb", lw=0.8)
    axes.legend(title="noise", frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(path.stem + ".tmp.png")
    figure.savefig(scratch, dpi=150, metadata={"Software": None})
    os.replace(scratch, path)
    print(f"plot: docs/images/{path.name}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", type=int, default=20_000)
    parser.add_argument("--examples", type=int, default=400_000)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--data-noise", type=float, default=0.7, help="length of the noise in the built-in data")
    parser.add_argument("--dim", type=int, default=16, help="features the tree looks at")
    parser.add_argument("--steps", type=int, nargs="+", default=[200, 400, 800, 1600, 3200])
    parser.add_argument("--runs", type=int, default=12, help="the most to choose rate and lambda of a noise by")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--eurlex", type=Path, help="directory with the EURLex-4K files; instead of built-in data")
    parser.add_argument("--quick", action="store_true", help="a small version of the built-in study; stores nothing")
    parser.add_argument("--no-store", action="store_true", help="print only")
    parser.add_argument("--again", action="store_true", help="table, verdicts and plots from the stored curves")
    options = parser.parse_args()
    if options.again:
        return again()
    if options.quick:
        options.classes, options.examples, options.width = 2000, 40_000, 64
        options.steps, options.runs, options.seeds = [100, 400], 5, 1
    options.steps = sorted(options.steps)
    # A step is a millisecond of small pieces: threads would spend more on waiting for each other.
    torch.set_num_threads(1)
    name = "eurlex4k" if options.eurlex else "built_in"
    if not options.eurlex and options.classes != parser.get_default("classes"):
        name += f"_{options.classes}"
    if not options.eurlex and options.data_noise != parser.get_default("data_noise"):
        name += f"_noise_{options.data_noise:g}"
    if options.eurlex:
        data = eurlex_features(options.eurlex)
    else:
        data = built_in(options.classes, options.examples, options.width, options.data_noise)
    title = f"{name}: {len(data.train[1]):,} examples, {data.num_classes:,} classes, {data.train[0].shape[1]} features"
    print(title)
    chosen: dict[str, Any] = {}
    tried: dict[str, list[Point]] = {}
    curves: dict[str, list[Point]] = {}
    for kind in NOISES:
        begin = time.perf_counter()
        noise = Noise.of(make_sampler(kind, data, options.dim), data)
        settings = Settings(noise, data, options.steps[-1])
        # Raw scores get settings of their own: a model that is good with Eq. 5 need not be the best one without.
        for measure, name_of in (("corrected", kind), ("raw", f"{kind}, for raw scores")):
            if measure == "raw" and (kind == "uniform" or options.quick):
                continue
            best = chosen[name_of] = settings.choose(measure, options.runs)
            runs = [
                train(noise, data, options.steps, best["rate"], best["reg"], 1 + seed, test=True)
                for seed in range(options.seeds)
            ]
            curves[name_of] = spread(runs)
            took = time.perf_counter() - begin
            print(f"{name_of}: rate {best['rate']:g}, lambda {best['reg']:g}; {took:.0f} s", flush=True)
        tried[kind] = settings.listed()

    judged = report(curves)
    if not (options.no_store or options.quick):
        left_out = {"eurlex", "no_store", "quick", "again"}
        if options.eurlex:
            left_out |= {"classes", "examples", "width", "data_noise"}
        found = {
            "data": title,
            "commit": commit(),
            "machine": machine(torch.device("cpu")),
            "settings": {k: v for k, v in vars(options).items() if k not in left_out},
            "chosen": chosen,
            "tried": tried,
            "curves": curves,
            "verdicts": judged,
        }
        store(name, found)
    return 0 if all(holds[-1] for holds in judged.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
