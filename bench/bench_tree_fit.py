"""The fit of the adversarial tree: time, memory, growth with N and C, and what the discrete step is worth.

  fit_zipf, fit_flat      seconds for N = 500,000, C = 200,000, k = 16 after PCA, Zipf or equal class frequencies
  memory                  (features + peak memory of the fit above its start) / features, fp32, the larger of the two
  scale_zipf, scale_flat  time at 2 N and 2 C / time at N and C
  gain_*                  held-out mean log p_n minus that of the same code without the discrete step (median split
                          along the first eigenvector, then only Newton)

Features come from the built-in data (64 columns), projected to 16. Each fit runs in a separate process.
EURLex-4K is used where --eurlex (or SAMPLEX_EURLEX) names a folder with its train and test file in the format of the
Extreme Classification repository, packed (.xz, .gz) or not: smallest label of each row, unlabelled rows dropped, C is
the largest of those labels + 1, held out is the test file. Its features are taken unchanged, and scaled to rows of
length 1, both whitened; the latter with the paper's reg of 0.1 and with one chosen by cross-validation for each side.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _eurlex import eurlex, unit_rows
from _harness import Report, Row, common_options, progress, set_up, wanted, write_readme

from samplex_cuda.data import HierarchicalZipf
from samplex_cuda.reference.tree_fit import log_prob_all
from samplex_cuda.tree_fit import FittedTree, cross_validate_reg, describe_fit, fit_pca, fit_tree, project

N, CLASSES, WIDTH, DIM = 500_000, 200_000, 64, 16


# ----------------------------------------------------------------------------------------------------- data
def builtin(n: int, classes: int, exponent: float, held_out: int = 20_000) -> HierarchicalZipf:
    return HierarchicalZipf(classes, WIDTH, n, seed=1, num_valid=held_out, exponent=exponent)


# ----------------------------------------------------------------------------------------------------- one fit
def peak_kib(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1])
    return 0


def refcheck(tree: FittedTree, z: torch.Tensor, y: torch.Tensor) -> str:
    """Every class once; gradients; likelihoods of the levels add up; probabilities of all classes sum to 1."""
    real = tree.leaf_class[tree.leaf_class >= 0]
    if not torch.equal(real.sort().values, torch.arange(tree.num_classes)):
        raise AssertionError("refcheck tree_fit: leaves do not hold every class once")
    gradient = max(level["gradient_ratio"] for level in tree.levels)
    if not gradient <= 1e-8:
        raise AssertionError(f"refcheck tree_fit: |g| / max(1, sum|x|) = {gradient:.1e}, allowed 1e-8")
    off = abs(tree.mean_log_prob(z, y) - tree.train_log_prob)
    if not off <= 1e-5:
        raise AssertionError(f"refcheck tree_fit: mean log p_n differs by {off:.1e} from the sum of the levels")
    total = log_prob_all(tree.weights, tree.bias, tree.leaf_class, z[:8]).exp().sum(1)
    worst = float((total - 1).abs().max())
    if not worst <= 1e-6:
        raise AssertionError(f"refcheck tree_fit: probabilities of all classes sum to 1 except for {worst:.1e}")
    return f"classes once; |g| <= {gradient:.1e} max(1, sum|x|); sum of p_n - 1: {worst:.1e}; log p_n: {off:.1e}"


def child(folder: Path, classes: int, threads: int) -> None:
    """Times one fit and prints the figures as JSON."""
    torch.set_num_threads(threads)
    z, y = torch.from_numpy(np.load(folder / "z.npy")), torch.from_numpy(np.load(folder / "y.npy"))
    torch.ones(64, 64) @ torch.ones(64, 64)  # the thread pool stands before memory is measured
    before = peak_kib("VmRSS")
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # reset the high-water mark
    begin, cpu = time.perf_counter(), time.process_time()
    tree = fit_tree(z, y, classes, progress=False)
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    memory = (z.nbytes + 1024 * max(0, peak_kib("VmHWM") - before)) / z.nbytes
    print(json.dumps({"seconds": seconds, "cpu": cpu, "memory": memory, "refcheck": refcheck(tree, z, y)}))


def timed(n: int, classes: int, exponent: float, threads: int) -> dict[str, Any]:
    progress(f"N = {n:,}, C = {classes:,}, exponent {exponent:g}")
    x, y = builtin(n, classes, exponent).split("train")
    z = project(x, *fit_pca(x, DIM))
    del x
    with tempfile.TemporaryDirectory() as scratch:
        np.save(Path(scratch) / "z.npy", z.numpy())
        np.save(Path(scratch) / "y.npy", y.numpy())
        argv = [sys.executable, __file__, "--child", scratch, str(classes), "--threads", str(threads)]
        done = subprocess.run(argv, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise SystemExit(f"bench_tree_fit: the fit of N = {n:,} ended with {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def gain(
    report: Report,
    row_id: str,
    what: str,
    parts: tuple[Any, ...],
    classes: int,
    *,
    whiten: bool = False,
    choose_reg: bool = False,
    target: float | None = 0.0,
) -> None:
    """Adds the row of one data set, and keeps the text of the report."""
    x, y, held_x, held_y = parts
    mean, projection = fit_pca(x, DIM, whiten=whiten)
    z, held_z = project(x, mean, projection), project(held_x, mean, projection)
    trees, regs, scores = [], [], []
    for discrete in (True, False):
        progress(f"{row_id}: {'with' if discrete else 'without'} the discrete step")
        options: dict[str, Any] = {"discrete": discrete, "progress": False}
        reg = cross_validate_reg(z, y, classes, **options).reg if choose_reg else 0.1
        trees.append(fit_tree(z, y, classes, reg=reg, **options))
        regs.append(reg)
        scores.append(trees[-1].mean_log_prob(held_z, held_y))
    text = describe_fit(trees[0], held_z, held_y)
    config = {"N": len(y), "C": classes, "k": DIM, "whiten": whiten, "reg": regs, "log_p": scores}
    report.add(
        Row(
            row_id,
            f"held-out log p_n gained by the discrete step, {what}",
            scores[0] - scores[1],
            "nats",
            refcheck(trees[0], z, y),
            target=target,
            config=config,
            note=f"{scores[0]:.4f} with it (reg {regs[0]:g}), {scores[1]:.4f} without (reg {regs[1]:g})",
        )
    )
    report.extra[row_id] = text.splitlines()


def main() -> int:
    parser = common_options(__doc__)
    parser.add_argument("--eurlex", type=Path, default=os.environ.get("SAMPLEX_EURLEX"), metavar="DIR")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(Path(options.child[0]), int(options.child[1]), options.threads)
        return 0
    device = set_up(options)
    report = Report("tree_fit", device, store=not (options.quick or options.no_store))
    n, classes = (N // 10, CLASSES // 10) if options.quick else (N, CLASSES)
    fits: dict[str, dict[str, Any]] = {}
    for name, exponent in (("zipf", 1.0), ("flat", 0.0)):
        if not any(wanted(options, row) for row in (f"fit_{name}", f"scale_{name}", "memory")):
            continue
        fits[name] = once = timed(n, classes, exponent, options.threads)
        config = {"N": n, "C": classes, "k": DIM, "exponent": exponent, "cpu_seconds": once["cpu"]}
        what = f"N = {n:,}, C = {classes:,}, k = {DIM}, {'Zipf' if exponent else 'equal'} frequencies"
        if wanted(options, f"fit_{name}"):
            report.add(Row(f"fit_{name}", what, once["seconds"], "s", once["refcheck"], "<=", 60.0, config=config))
        if wanted(options, f"scale_{name}"):
            twice = timed(2 * n, 2 * classes, exponent, options.threads)
            report.add(
                Row(
                    f"scale_{name}",
                    f"time at 2 N, 2 C / time at N, C, {'Zipf' if exponent else 'equal'} frequencies",
                    twice["seconds"] / once["seconds"],
                    "ratio",
                    twice["refcheck"],
                    "<=",
                    2.4,
                    config=config,
                    note="; ".join(f"{f['seconds']:.1f} s ({f['cpu']:.1f} s CPU)" for f in (once, twice)),
                )
            )
    if fits and wanted(options, "memory") and not options.quick:  # a small fit measures the thread pool
        worst = max(fits.values(), key=lambda figures: figures["memory"])
        config = {"N": n, "C": classes, "k": DIM}
        report.add(
            Row(
                "memory",
                "memory / projected features",
                worst["memory"],
                "ratio",
                worst["refcheck"],
                "<=",
                3.0,
                config=config,
            )
        )
    for size, rows in ((1_000, 20_000), (20_000, 200_000)):
        row_id = f"gain_builtin_{size // 1000}k"
        if wanted(options, row_id) and not (options.quick and size > 1_000):
            data = builtin(rows, size, 1.0)
            gain(report, row_id, f"built-in data, C = {size:,}", (*data.split("train"), *data.split("valid")), size)
    if options.eurlex and wanted(options, "gain_eurlex"):
        x, y, held_x, held_y = eurlex(Path(options.eurlex))
        most = int(max(y.max(), held_y.max())) + 1
        what = f"EURLex-4K, C = {most:,}"
        gain(report, "gain_eurlex", what, (x, y, held_x, held_y), most, whiten=True)
        unit = (unit_rows(x), y, unit_rows(held_x), held_y)
        gain(report, "gain_eurlex_unit_cv", f"{what}, unit rows", unit, most, whiten=True, choose_reg=True)
        gain(report, "gain_eurlex_unit", f"{what}, unit rows, reg 0.1", unit, most, whiten=True, target=None)
    code = report.finish(fail=not options.no_fail)
    write_readme(report, options)
    return code


if __name__ == "__main__":
    sys.exit(main())
