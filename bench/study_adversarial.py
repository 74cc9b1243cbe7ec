"""Negative sampling with uniform, frequency and adversarial (tree) noise at equal steps (Bamler & Mandt 2020).

For each noise: accuracy on held-out examples of scores with log p_n added back (Eq. 5) and of the raw scores, at a few
numbers of steps. Everything else is equal: linear model on all features, row-wise Adagrad, one negative an example.

  python bench/study_adversarial.py                      built-in hierarchical data
  python bench/study_adversarial.py --eurlex DIR         EURLex-4K (XC format files, .txt or .txt.xz), PCA-512 features

Prints a table, draws a plot, and stores bench/results/study_adversarial.json. Some minutes; not part of `make bench`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from _eurlex import eurlex, unit_rows
from _harness import IMAGES, RESULTS, commit, machine, print_table, progress

import samplex_cuda as sx
from samplex_cuda.datasets import HierarchicalZipf
from samplex_cuda.tree import fit_pca, project

BATCH = 256
Data = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int]  # x, y, held-out x, held-out y, C


def built_in(classes: int, examples: int, width: int) -> Data:
    data = HierarchicalZipf(num_classes=classes, dim=width, num_examples=examples, seed=0, num_valid=4096, noise=0.7)
    x, y = (torch.cat(part) for part in zip(*data.batches("train", batch_size=4096), strict=True))
    vx, vy = (torch.cat(part) for part in zip(*data.batches("valid", batch_size=4096), strict=True))
    return x, y, vx, vy, classes


def eurlex_features(directory: Path, width: int = 512) -> Data:
    """Smallest label of each example, unlabelled ones dropped; unit rows, PCA fitted on the training part."""
    x, y, vx, vy = eurlex(directory)
    x, vx = unit_rows(x), unit_rows(vx)
    mean, projection = fit_pca(x, width, seed=0)
    train, test = project(x, mean, projection), project(vx, mean, projection)
    scale = train.std()
    return train / scale, y, test / scale, vy, int(max(y.max(), vy.max())) + 1


def samplers(x: torch.Tensor, y: torch.Tensor, classes: int, dim: int, reg: float) -> dict[str, Any]:
    begin = time.perf_counter()
    tree = sx.samplers.Tree.fit(x, y, num_classes=classes, dim=dim, reg=reg, whiten=True, progress=False)
    print(f"tree fitted in {time.perf_counter() - begin:.1f} s")
    print(tree.describe())
    counts = torch.bincount(y, minlength=classes) + 1  # a class that was never seen may still be asked for
    return {"uniform": sx.samplers.Uniform(classes), "frequency": sx.samplers.Unigram(counts), "adversarial": tree}


def accuracy(head: sx.SampledClassifier, x: torch.Tensor, y: torch.Tensor, corrected: bool) -> float:
    right = 0
    with torch.no_grad():
        for begin in range(0, x.shape[0], 512):
            rows = x[begin : begin + 512]
            right += int((head.scores(rows, corrected=corrected).argmax(1) == y[begin : begin + 512]).sum())
    return right / x.shape[0]


def train(sampler: Any, data: Data, steps: list[int], lr: float, reg: float, negatives: int) -> list[dict[str, float]]:
    x, y, vx, vy, classes = data
    torch.manual_seed(0)
    head = sx.SampledClassifier(x.shape[1], classes, sampler, num_samples=negatives, loss="negative_sampling", reg=reg)
    torch.nn.init.zeros_(head.weight)
    torch.nn.init.zeros_(head.bias)
    optimizer = torch.optim.Adagrad(head.parameters(), lr=lr, initial_accumulator_value=1e-8)
    curve = []
    order = torch.Generator().manual_seed(1)
    for step in range(1, steps[-1] + 1):
        rows = torch.randint(x.shape[0], (BATCH,), generator=order)
        optimizer.zero_grad(set_to_none=True)
        head(x[rows], y[rows]).backward()
        optimizer.step()
        if step in steps:
            head.eval()
            curve.append(
                {
                    "step": step,
                    "corrected": accuracy(head, vx, vy, True),
                    "raw": accuracy(head, vx, vy, False),
                }
            )
            head.train()
            progress(f"step {step}: {curve[-1]}")
    progress("")
    return curve


def plot(curves: dict[str, list[dict[str, float]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 4.0), layout="constrained")
    for (name, curve), colour in zip(curves.items(), ("#888888", "#c27b2b", "#2b6cb0"), strict=True):
        step = [point["step"] for point in curve]
        axes.plot(step, [100 * point["corrected"] for point in curve], color=colour, label=name)
        axes.plot(step, [100 * point["raw"] for point in curve], color=colour, linestyle=":")
    axes.set_xscale("log")
    axes.set_xlabel("steps")
    axes.set_ylabel("held-out accuracy, % (dotted: without Eq. 5)")
    axes.legend(title="noise", frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".tmp.png")
    figure.savefig(scratch, dpi=150)
    os.replace(scratch, path)
    print(f"plot: {path.relative_to(path.parents[2])}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", type=int, default=2000)
    parser.add_argument("--examples", type=int, default=100_000)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--dim", type=int, default=16, help="features the tree looks at")
    parser.add_argument("--tree-reg", type=float, default=0.1)
    parser.add_argument("--steps", type=int, nargs="+", default=[100, 200, 400, 800, 1600, 3200])
    parser.add_argument("--lr", type=float, default=0.03)
    parser.add_argument("--reg", type=float, default=1e-3, help="lambda of Eq. 6")
    parser.add_argument("--negatives", type=int, default=1)
    parser.add_argument("--eurlex", type=Path, help="directory with the EURLex-4K files; instead of built-in data")
    parser.add_argument("--no-store", action="store_true", help="print only")
    options = parser.parse_args()
    torch.set_num_threads(2)
    name = "eurlex4k" if options.eurlex else "built_in"
    data = (
        eurlex_features(options.eurlex)
        if options.eurlex
        else built_in(options.classes, options.examples, options.width)
    )
    print(f"{name}: {data[0].shape[0]:,} examples, {data[4]:,} classes, {data[0].shape[1]} features")
    noises = samplers(data[0], data[1], data[4], options.dim, options.tree_reg)
    curves = {
        noise: train(sampler, data, options.steps, options.lr, options.reg, options.negatives)
        for noise, sampler in noises.items()
    }
    lines = [
        [noise, f"{point['step']:,}", f"{100 * point['corrected']:.2f} %", f"{100 * point['raw']:.2f} %"]
        for noise, curve in curves.items()
        for point in curve
    ]
    print_table(["noise", "steps", "accuracy", "without Eq. 5"], lines)
    last = {noise: curve[-1] for noise, curve in curves.items()}
    ordered = last["adversarial"]["corrected"] > last["frequency"]["corrected"] > last["uniform"]["corrected"]
    helped = last["adversarial"]["corrected"] > last["adversarial"]["raw"]
    print(f"adversarial > frequency > uniform: {ordered}; adding log p_n back helps: {helped}")
    if not options.no_store:
        RESULTS.mkdir(parents=True, exist_ok=True)
        path = RESULTS / "study_adversarial.json"
        stored = json.loads(path.read_text()) if path.exists() else {}
        settings = {k: v for k, v in vars(options).items() if k not in ("eurlex", "no_store")}
        stored[name] = {
            "commit": commit(),
            "machine": machine(torch.device("cpu")),
            "settings": settings,
            "curves": curves,
            "ordered": ordered,
            "bias_removal_helps": helped,
        }
        scratch = path.with_suffix(".json.tmp")
        scratch.write_text(json.dumps(stored, indent=1) + "\n")
        os.replace(scratch, path)
        plot(curves, IMAGES / f"study_adversarial_{name}.png")
    return 0 if ordered and helped else 1


if __name__ == "__main__":
    sys.exit(main())
