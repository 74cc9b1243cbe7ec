"""Bias and variance of the gradient of sampled softmax against the number of samples, for every sampler.

A softmax over C = 10,000 classes on the sphere (logit = scale * cos, scale = 1 / 0.3^2 as in Rawat et al. 2019) is
first trained in full on built-in Zipf data. For some held-out queries each sampler then draws 2^17 negatives; cut into
samples of m they give many gradients of the sampled loss in h, whose mean is held against that of the full loss.

  bias        |mean - full| / |full|, root mean square over the queries; the noise of the mean is taken out
  predicted   the leading term of the bias, from the sampler's own log_prob: (-sum e r grad / Z^2 + g Var / Z^3) / m
  std         root of the total variance of one gradient / |full|

  python bench/study_bias.py

Prints a table, draws docs/images/study_bias.png, stores bench/results/study_bias.json. Minutes; not in `make bench`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from _harness import IMAGES, RESULTS, commit, machine, print_table, progress

import samplex_cuda as sx
from samplex_cuda.data import HierarchicalZipf

STYLES = {
    "uniform": ("#888888", "-"),
    "uniform, absolute": ("#888888", ":"),
    "log-uniform": ("#b08d57", "-"),
    "unigram": ("#c27b2b", "-"),
    "tree": ("#3b8f5a", "-"),
    "tree, 10 % uniform": ("#3b8f5a", "--"),
    "quadratic": ("#2b6cb0", "-"),
    "quadratic, absolute": ("#2b6cb0", ":"),
    "quartic": ("#6b46c1", "-"),
    "quartic, absolute": ("#6b46c1", ":"),
    "rff": ("#c0392b", "-"),
    "orf": ("#c0392b", "-."),
    "positive": ("#d35fb7", "-"),
    "positive, nu = scale": ("#d35fb7", "--"),
    "softmax": ("#111111", "-"),
}


def train(x: torch.Tensor, y: torch.Tensor, classes: int, scale: float, steps: int) -> torch.Tensor:
    """Class rows of unit length, after some steps of the full softmax."""
    weight = torch.nn.Parameter(torch.randn(classes, x.shape[1]))
    optimizer = torch.optim.Adam([weight], lr=0.03)
    order = torch.Generator().manual_seed(1)
    for step in range(steps):
        rows = torch.randint(x.shape[0], (512,), generator=order)
        loss = F.cross_entropy(scale * x[rows] @ F.normalize(weight).T, y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        progress(f"training step {step + 1}/{steps}: loss {float(loss.detach()):.3f}")
    progress("")
    print(f"trained: loss {float(loss.detach()):.3f} after {steps} steps (ln C = {math.log(classes):.3f})")
    return F.normalize(weight.detach()).contiguous()


def make_samplers(
    weight: torch.Tensor, x: torch.Tensor, y: torch.Tensor, scale: float, features: int, nu: float
) -> dict[str, tuple[Any, bool]]:
    """name -> (sampler, whether the loss is the absolute softmax)."""
    classes = weight.shape[0]
    counts = torch.bincount(y, minlength=classes) + 1
    quartic = sx.samplers.Quartic(weight, scale=scale)
    tree = sx.samplers.Tree.fit(x, y, num_classes=classes, dim=16, progress=False)
    found: dict[str, tuple[Any, bool]] = {
        "uniform": (sx.samplers.Uniform(classes), False),
        "uniform, absolute": (sx.samplers.Uniform(classes), True),
        "log-uniform": (sx.samplers.LogUniform(classes), False),
        "unigram": (sx.samplers.Unigram(counts), False),
        "tree": (tree, False),
        "tree, 10 % uniform": (sx.samplers.Mixture([(tree, 0.9), (sx.samplers.Uniform(classes), 0.1)]), False),
        "quartic": (quartic, False),
        "quartic, absolute": (quartic, True),
    }
    if hasattr(sx.samplers, "Quadratic"):
        quadratic = sx.samplers.Quadratic(weight, alpha=100.0 * scale**2)  # 100 o^2 + 1 with o the logit
        found |= {"quadratic": (quadratic, False), "quadratic, absolute": (quadratic, True)}
    if hasattr(sx.samplers, "RandomFourier"):
        for kind in ("rff", "orf", "positive"):
            sampler = sx.samplers.RandomFourier(weight, num_features=features, nu=nu, kind=kind, key=sx.Key(0))
            found[kind] = (sampler, False)
        sharp = sx.samplers.RandomFourier(weight, num_features=features, nu=scale, kind="positive", key=sx.Key(0))
        found["positive, nu = scale"] = (sharp, False)
    found["softmax"] = (sx.samplers.Softmax(weight, scale=scale), False)
    return found


class Query:
    """One query with its target: everything about the full softmax, float64."""

    def __init__(self, h: torch.Tensor, target: int, weight: torch.Tensor, scale: float, absolute: bool) -> None:
        s = scale * weight.double() @ h.double()
        rows = scale * weight.double()
        if absolute:
            rows, s = rows * s.sign()[:, None], s.abs()
        self.rows, self.log_z = rows, s.logsumexp(0)
        self.p = (s - self.log_z).exp()
        self.target = target
        self.full = self.p @ rows - rows[target]

    def predicted(self, log_q: torch.Tensor) -> torch.Tensor:
        """m * bias in the limit, from the distribution on the negatives; everything divided by Z."""
        others = torch.arange(self.p.shape[0]) != self.target
        p, q, rows = self.p[others], log_q.double().exp()[others], self.rows[others]
        r = torch.where(q > 0, p / q.clamp_min(1e-300), 0.0) - p.sum()
        return -(p * r) @ rows + (self.p @ self.rows) * (q * r**2).sum()


def study(
    sampler: Any, queries: list[Query], h: torch.Tensor, y: torch.Tensor, weight: torch.Tensor,
    counts: list[int], draws: int, scale: float, absolute: bool,
) -> list[dict[str, float]]:  # fmt: skip
    """bias, its standard error, predicted bias and std for each m."""
    sums = {m: torch.zeros(4, dtype=torch.float64) for m in counts}  # bias^2, its variance, predicted^2, variance
    for number, query in enumerate(queries):
        one, target = h[number : number + 1], y[number : number + 1]
        drawn = sampler.sample(one, draws, exclude=target, key=sx.Key(number))
        every = torch.arange(weight.shape[0])[None]
        limit = query.predicted(sampler.log_prob(one, every, exclude=target)[0])
        size = query.full.norm()
        for m in counts:
            n = draws // m
            ids, log_q = (t[0, : n * m].view(n, m) for t in (drawn.ids, drawn.log_q))
            hidden = one.expand(n, -1).clone().requires_grad_()
            sx.functional.sampled_softmax(
                hidden, weight, target.expand(n), ids, log_q, scale=scale, absolute=absolute, reduction="sum"
            ).backward()
            assert hidden.grad is not None
            gradient = hidden.grad.double()
            mean = gradient.mean(0)
            centred = gradient - mean
            variance = centred.square().sum() / (n - 1)
            off = mean - query.full
            # |off|^2 holds the noise of the mean; its own spread is about 2 |noise along off| |off|.
            along = (centred @ (off / off.norm().clamp_min(1e-300))).square().sum() / (n - 1) / n
            squared = (off.square().sum() - variance / n) / size**2
            spread = 4 * along * off.square().sum() / size**4 + 2 * (variance / n) ** 2 / off.numel() / size**4
            sums[m] += torch.stack([squared, spread, (limit / m).square().sum() / size**2, variance / size**2])
        progress(f"query {number + 1}/{len(queries)}")
    progress("")
    rows = []
    for m in counts:
        squared, spread, predicted, variance = (sums[m] / len(queries)).tolist()
        # Where noise has the upper hand the squared bias may come out negative: 0, with an error bar that says so.
        error = math.sqrt(spread / len(queries))
        bias = math.sqrt(max(0.0, squared))
        rows.append(
            {
                "m": m,
                "bias": bias,
                "below": math.sqrt(max(0.0, squared) + 2 * error),  # two standard errors above
                "predicted": math.sqrt(predicted),
                "std": math.sqrt(variance),
            }
        )
    return rows


def plot(curves: dict[str, list[dict[str, float]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 4.4), layout="constrained")
    for name, curve in curves.items():
        colour, line = STYLES[name]
        m = [point["m"] for point in curve]
        clear = [seen(point) for point in curve]
        left.plot(
            [k for k, ok in zip(m, clear, strict=True) if ok],
            [100 * point["bias"] for point, ok in zip(curve, clear, strict=True) if ok],
            color=colour, linestyle=line, marker="o", markersize=3, label=name,
        )  # fmt: skip
        hidden = [(k, point["below"]) for k, point, ok in zip(m, curve, clear, strict=True) if not ok]
        left.plot([k for k, _ in hidden], [100 * v for _, v in hidden], "v", color=colour, markersize=4, alpha=0.5)
        right.plot(m, [100 * point["std"] for point in curve], color=colour, linestyle=line)
    for axes, label in ((left, "bias of the gradient, % of its norm"), (right, "standard deviation, % of the norm")):
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("samples m")
        axes.set_ylabel(label)
    left.set_title("triangle: below this, not told from 0", fontsize=8)
    figure.legend(*left.get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".tmp.png")
    figure.savefig(scratch, dpi=150)
    os.replace(scratch, path)
    print(f"plot: {path.relative_to(path.parents[2])}")


def seen(point: dict[str, float]) -> bool:
    """Whether the bias is clear of the noise."""
    return point["bias"] > 0.5 * point["below"]


def text(point: dict[str, float]) -> str:
    if seen(point):
        return f"{100 * point['bias']:.3g} %"
    return f"< {100 * point['below']:.2g} %"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", type=int, default=10_000)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--steps", type=int, default=400, help="of the full softmax")
    parser.add_argument("--queries", type=int, default=8)
    parser.add_argument("--draws", type=int, default=2**17, help="per query and sampler")
    parser.add_argument("--samples", type=int, nargs="+", default=[10, 20, 40, 80, 160, 320, 640, 1280])
    parser.add_argument("--features", type=int, default=1024, help="D of the random features")
    parser.add_argument("--nu", type=float, default=4.0)
    parser.add_argument("--only", nargs="+", default=[], help="samplers")
    parser.add_argument("--no-store", action="store_true", help="print only")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(2)
    scale = 1 / 0.3**2
    data = HierarchicalZipf(
        num_classes=options.classes, dim=options.width, num_examples=100_000, seed=0, num_valid=4096, noise=0.7
    )
    x, y = (torch.cat(part) for part in zip(*data.batches("train", batch_size=4096), strict=True))
    vx, vy = (torch.cat(part) for part in zip(*data.batches("valid", batch_size=4096), strict=True))
    x, vx = F.normalize(x), F.normalize(vx)
    weight = train(x, y, options.classes, scale, options.steps)
    h, target = vx[: options.queries].contiguous(), vy[: options.queries]
    curves = {}
    for name, (sampler, absolute) in make_samplers(weight, x, y, scale, options.features, options.nu).items():
        if options.only and name not in options.only:
            continue
        queries = [Query(row, int(t), weight, scale, absolute) for row, t in zip(h, target, strict=True)]
        curves[name] = study(sampler, queries, h, target, weight, options.samples, options.draws, scale, absolute)
        print(f"{name}: " + ", ".join(f"m = {p['m']}: {text(p)}" for p in curves[name]), flush=True)
    print("\nbias of the gradient, % of the norm of the full gradient (< : two standard errors, not told from 0)")
    print_table(
        ["sampler", *(f"m = {m}" for m in options.samples)],
        [[name, *(text(point) for point in curve)] for name, curve in curves.items()],
    )
    print("\nleading term of the bias, from log_prob (holds where it is small)")
    print_table(
        ["sampler", *(f"m = {m}" for m in options.samples)],
        [[name, *(f"{100 * point['predicted']:.3g} %" for point in curve)] for name, curve in curves.items()],
    )
    print("\nstandard deviation of the gradient, % of the norm of the full gradient")
    print_table(
        ["sampler", *(f"m = {m}" for m in options.samples)],
        [[name, *(f"{100 * point['std']:.3g} %" for point in curve)] for name, curve in curves.items()],
    )
    ok = True
    if {"softmax", "uniform"} <= set(curves):
        flat = all(point["bias"] <= 0.5 * point["below"] or point["bias"] < 2e-3 for point in curves["softmax"])
        print(f"\nsoftmax has no bias at any m: {flat}")
        ok = flat
        for name, curve in curves.items():
            other = curves.get("uniform, absolute" if "absolute" in name else "uniform")
            if other and name not in ("softmax", "tree") and not name.startswith("uniform"):
                measured = [(u["bias"], c["bias"]) for u, c in zip(other, curve, strict=True) if seen(c)]
                ratios = ", ".join(f"{u / c:.2g}" for u, c in measured)
                lead = other[0]["predicted"] / max(1e-12, curve[0]["predicted"])
                print(f"{name}: below uniform {lead:.3g} times to leading order; measured, by m: {ratios}")
    if not options.no_store and not options.only:
        RESULTS.mkdir(parents=True, exist_ok=True)
        path = RESULTS / "study_bias.json"
        stored = {
            "commit": commit(),
            "machine": machine(torch.device("cpu")),
            "settings": {k: v for k, v in vars(options).items() if k not in ("only", "no_store")} | {"scale": scale},
            "curves": curves,
        }
        scratch = path.with_suffix(".json.tmp")
        scratch.write_text(json.dumps(stored, indent=1) + "\n")
        os.replace(scratch, path)
        plot(curves, IMAGES / "study_bias.png")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
