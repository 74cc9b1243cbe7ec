"""CUDA kernels under the profile of an emulated CUDA runtime (ptxrun): figures without a GPU.

Needs PTXRUN=<directory of a built ptxrun> and nvcc; without them it says so and exits with 0.

Builds the library as a test build with shared cudart and compiles the kernels to PTX with the flags of that build. A
child process runs the op on CPU tensors with SAMPLEX_CPU_BACKEND=cuda, so the launcher itself chooses grid, block and
shared memory; a hook hands each launch to a ptxrun module that counts. sampled_softmax with per-row draws, m = 64, and
tree_sample, C = 2^17, k = 16, m = 64; rff and its backward, with the tile of small and of large batches; the kernel
tree, n = 2^15, d = 64, D = 128, with draws, an update of 512 rows and the nodes above them:

  sectors        32-byte sectors loaded / fewest possible: every input byte touched, once (ids all different, no bias);
                 for the tree, sectors loaded per draw and level; for rff, whose blocks are tiles of a product, every
                 input byte of a tile once; for draws from the kernel tree, the sums of two children once for each row
                 that has draws at their parent, the rows of a leaf likewise
  active lanes   mean share of the 32 lanes that take part in an executed instruction
  bank           extra shared-memory passes beyond the fewest
  instructions   thread instructions / gathered elements B (m + 1) d

These are counts of PTX instructions and of requests before any cache: they do not depend on this machine, and they are
not a time.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from _harness import ROOT, Report, Row, progress
from _profile_child import (
    BATCH,
    CLASSES,
    DEPTH,
    FEATURES,
    KERNEL_TREE_CLASSES,
    KERNEL_TREE_DIM,
    KERNEL_TREE_FEATURES,
    KERNEL_TREE_KERNELS,
    LIMITS,
    RFF_CASES,
    RFF_TILE_COLUMNS,
    TREE_SECTORS,
    M,
    child,
)

# Sources, with what their build adds to the common flags.
SOURCES = {
    **{
        name: (ROOT / "csrc" / "sampler" / name / f"{name}_cuda.cu", ["-fmad=false"])
        for name in (
            "static_sample",
            "bigram_sample",
            "subset_sample",
            "tree",
            "tree_shared",
            "kernel_tree",
            "midx_sample",
            "exact_sample",
        )
    },
    "sampled_softmax": (ROOT / "csrc" / "loss" / "sampled_softmax" / "sampled_softmax_cuda.cu", []),
    "rff": (ROOT / "csrc" / "features" / "rff" / "rff_cuda.cu", []),
    "row_rules": (ROOT / "csrc" / "update" / "row_rules" / "row_rules_cuda.cu", []),
}


# ----------------------------------------------------------------------------------------------------- build
def search_path() -> str:
    """The environment's own cmake and ninja before the system's, as in the build of the package."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def run(argv: list[str]) -> None:
    argv = [shutil.which(argv[0], path=search_path()) or argv[0], *argv[1:]]
    done = subprocess.run(argv, capture_output=True, text=True, env={**os.environ, "PATH": search_path()})
    if done.returncode != 0:
        said = (done.stdout + done.stderr)[-4000:]
        raise SystemExit(f"profile_cuda: {Path(argv[0]).name} {' '.join(argv[1:3])} ... failed\n{said}")


def build_site(work: Path) -> Path:
    """A test build with shared cudart; returns the directory to put on PYTHONPATH."""
    import pybind11

    progress("building the library with shared cudart")
    build, site = work / "build", work / "site"
    configure = ["cmake", "-S", str(ROOT), "-B", str(build), f"-DPython_EXECUTABLE={sys.executable}"]
    configure += [f"-Dpybind11_DIR={pybind11.get_cmake_dir()}", "-DCMAKE_BUILD_TYPE=Release", "-DSAMPLEX_CUDA=ON"]
    configure += ["-DSAMPLEX_CUDART=shared", "-DSAMPLEX_CUDA_ARCHS=80-virtual", "-DSAMPLEX_TEST_BACKENDS=ON"]
    configure += ["-G", "Ninja"] if shutil.which("ninja", path=search_path()) else []
    run(configure)
    run(["cmake", "--build", str(build), "--parallel", "2"])
    shutil.rmtree(site, ignore_errors=True)
    shutil.copytree(
        ROOT / "python" / "samplex_cuda", site / "samplex_cuda", ignore=shutil.ignore_patterns("*.so", "__pycache__")
    )
    run(["cmake", "--install", str(build), "--prefix", str(site)])
    progress("")
    return site


def build_ptx(work: Path, name: str) -> Path:
    progress(f"compiling {name} to PTX")
    out = work / f"{name}.ptx"
    source, more = SOURCES[name]
    torch_include = Path(torch.__file__).parent / "include"
    flags = ["-std=c++20", "-O3", "-arch=compute_80", "-lineinfo", "--expt-relaxed-constexpr", "-DNDEBUG"]
    includes = [f"-I{ROOT / 'csrc'}", "-isystem", str(torch_include)]
    run(["nvcc", "-ptx", *flags, *more, *includes, str(source), "-o", str(out)])
    progress("")
    return out


def build_hook(work: Path) -> Path:
    out = work / "liblaunch_hook.so"
    source = ROOT / "bench" / "_launch_hook.c"
    run([os.environ.get("CC", "cc"), "-O2", "-shared", "-fPIC", str(source), "-o", str(out), "-ldl"])
    return out


# ----------------------------------------------------------------------------------------------------- the parent
def fewest_sectors(dim: int, dtype: str = "float32") -> int:
    """Rows, hidden, ids, log_q, target: each byte once."""
    size = getattr(torch, dtype).itemsize
    inputs = BATCH * (M + 1) * dim * size, BATCH * dim * size, BATCH * M * 8, BATCH * M * 4, BATCH * 8
    return sum(math.ceil(n / 32) for n in inputs)


def profile(ptxrun_dir: Path, site: Path, ptx: Path, hook: Path, case: str) -> dict[str, Any]:
    progress(f"running {case}")
    env = {k: v for k, v in os.environ.items() if not k.startswith("PTXRUN")}
    paths = [str(site), str(ROOT / "bench")]
    # The hook first, so that it sees each launch; the runtime also preloaded, so that the hook can pass calls on to it.
    preload = [hook, ptxrun_dir / "libptxrun_preload.so", ptxrun_dir / "shim" / "libcudart.so.13"]
    env.update(
        PYTHONPATH=os.pathsep.join(paths),
        SAMPLEX_CPU_BACKEND="cuda",
        LD_LIBRARY_PATH=os.pathsep.join([str(ptxrun_dir / "shim"), env.get("LD_LIBRARY_PATH", "")]).rstrip(os.pathsep),
        LD_PRELOAD=" ".join(str(path) for path in preload),
    )
    argv = [sys.executable, __file__, "--child", str(ptxrun_dir), str(ptx), case]
    done = subprocess.run(argv, env=env, capture_output=True, text=True)
    progress("")
    found = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode != 0 or not found:
        raise SystemExit(f"profile_cuda: the child process failed\n{(done.stdout + done.stderr)[-4000:]}")
    return json.loads(found[0].removeprefix("RESULT "))


def main() -> int:
    if len(sys.argv) > 1 and sys.argv[1] == "--child":
        child(sys.argv[2], sys.argv[3], sys.argv[4])
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--site", type=Path, help="a test build with shared cudart that exists already (default: build one)"
    )
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "profile", help="where to build")
    parser.add_argument(
        "--lines", action="store_true", help="also show source lines and opcodes with the most instructions"
    )
    parser.add_argument("--no-fail", action="store_true", help="exit with 0 even where a target is missed")
    parser.add_argument("--no-store", action="store_true", help="print only, leave bench/results alone")
    options = parser.parse_args()
    asked = os.environ.get("PTXRUN", "")
    if not asked or not (Path(asked) / "libptxrun.so").exists():
        print("profile_cuda: skipped: set PTXRUN to the directory of a built ptxrun (an emulated CUDA runtime)")
        return 0
    if shutil.which("nvcc") is None:
        print("profile_cuda: skipped: no nvcc on PATH")
        return 0
    ptxrun_dir = Path(asked).resolve()
    options.work.mkdir(parents=True, exist_ok=True)
    site = options.site or build_site(options.work)
    hook = build_hook(options.work)
    report = Report("profile_cuda", torch.device("cpu"), store=not options.no_store, timed=False)

    def launches_of(name: str, ptx: Path, case: str, elements: int) -> Iterator[tuple[str, dict[str, Any], float]]:
        """The heaviest launch of each mode of a case."""
        for mode, got in profile(ptxrun_dir, site, ptx, hook, case).items():
            mine = [launch for launch in got["launches"] if name in launch["kernel"]]
            if not mine:
                raise SystemExit(
                    f"profile_cuda: no launch of {name} was seen ({case}); is cudart shared in this build?"
                )
            yield mode, max(mine, key=lambda launch: launch["sectors"]), got["error"]
            for launch in got["launches"]:
                print(f"    {launch['kernel']} <<<{launch['grid']}, {launch['block']}, {launch['smem']}>>>")
                if options.lines:
                    print_hot(launch, elements)

    ptx = build_ptx(options.work, "sampled_softmax")
    for dim, limit in LIMITS.items():
        for mode, launch, error in launches_of("sampled_softmax", ptx, str(dim), BATCH * (M + 1) * dim):
            add_rows(report, dim, mode, limit, launch, error)
    ptx = build_ptx(options.work, "tree")
    for dtype, limit in TREE_SECTORS.items():
        for _, launch, error in launches_of("tree_sample", ptx, dtype, BATCH * M * DEPTH):
            add_tree_rows(report, dtype, limit, launch, error)
    ptx = build_ptx(options.work, "rff")
    for name, (batch, dim, num_features) in RFF_CASES.items():
        for mode, launch, error in launches_of("rff_", ptx, name, batch * dim * max(num_features, 1)):
            add_rff_rows(report, name, mode, launch, error)
    ptx = build_ptx(options.work, "kernel_tree")
    for mode, got in profile(ptxrun_dir, site, ptx, hook, "kernel_tree").items():
        mine = [launch for launch in got["launches"] if KERNEL_TREE_KERNELS[mode] in launch["kernel"]]
        if not mine:
            raise SystemExit(f"profile_cuda: no launch was seen (kernel tree, {mode}); is cudart shared in this build?")
        launch = max(mine, key=lambda launch: launch["sectors"])
        print(f"    {launch['kernel']} <<<{launch['grid']}, {launch['block']}, {launch['smem']}>>>")
        if options.lines:
            print_hot(launch, BATCH * M)
        add_kernel_tree_rows(report, mode, launch, got["fewest"], got["error"])
    ptx = build_ptx(options.work, "row_rules")
    for mode, got in profile(ptxrun_dir, site, ptx, hook, "row_rules").items():
        mine = [launch for launch in got["launches"] if f"row_rules_{mode}" in launch["kernel"]]
        if not mine:
            raise SystemExit(f"profile_cuda: no launch was seen (row update, {mode}); is cudart shared in this build?")
        print(f"    {mine[0]['kernel']} <<<{mine[0]['grid']}, {mine[0]['block']}, {mine[0]['smem']}>>>")
        if options.lines:
            print_hot(mine[0], BATCH * (M + 1) * 128)
        add_optim_rows(report, mode, mine[0], got["fewest"], got["error"])
    return report.finish(fail=not options.no_fail)


def add_optim_rows(report: Report, mode: str, got: dict[str, Any], fewest: float, error: float) -> None:
    config = {
        "C": CLASSES,
        "d": 128,
        "n": BATCH * (M + 1),
        **{k: v for k, v in got.items() if k not in ("hot", "opcodes")},
    }
    lanes = 100 * got["thread_instructions"] / (32 * got["warp_instructions"])
    for key, what, value, unit, sense, target in (
        ("sectors", "sectors loaded / fewest possible", got["sectors"] / fewest, "ratio", "<=", 1.2),
        ("lanes", "active lanes", lanes, "%", ">=", 90.0),
    ):
        report.add(
            Row(
                f"optim_{mode}_{key}",
                f"Adagrad update of {'given rows' if mode == 'rows' else 'summed entries'}, d = 128: {what}",
                value,
                unit,
                f"weight and sums vs fp64: {error:.1e}",
                sense=sense,
                target=target,
                config=config,
            )
        )


def add_kernel_tree_rows(report: Report, mode: str, got: dict[str, Any], fewest: float, error: float) -> None:
    config = {
        "n": KERNEL_TREE_CLASSES,
        "d": KERNEL_TREE_DIM,
        "D": KERNEL_TREE_FEATURES,
        "m": M,
        "B": BATCH,
        **{k: v for k, v in got.items() if k not in ("hot", "opcodes")},
    }
    lanes = 100 * got["thread_instructions"] / (32 * got["warp_instructions"])
    for key, what, value, unit, sense, target in (
        ("sectors", "sectors loaded / fewest possible", got["sectors"] / fewest, "ratio", "<=", 1.2),
        ("lanes", "active lanes", lanes, "%", ">=", 90.0),
        ("bank", "extra bank-conflict cycles", float(got["bank_extra"]), "ratio", "<=", 0.0),
    ):
        report.add(
            Row(
                f"kernel_tree_{mode}_{key}",
                f"kernel tree, {mode}, n = 2^15, d = 64, D = 128: {what}",
                value,
                unit,
                f"vs fp64: {error:.1e}",
                sense=sense,
                target=target,
                config=config,
            )
        )


def add_rff_rows(report: Report, case: str, mode: str, got: dict[str, Any], error: float) -> None:
    batch, dim, num_features = RFF_CASES[case]
    blocks = math.prod(got["grid"])
    rows = batch // got["grid"][0]
    if num_features == 0:  # the row; its gradient
        inputs = dim if mode == "forward" else dim + dim * (dim + 1) // 2
    elif mode == "forward":  # rows and frequencies
        inputs = (rows + RFF_TILE_COLUMNS) * dim
    else:  # cos and sin of gradient and features; the table's columns
        inputs = 4 * rows * num_features + min(dim, RFF_TILE_COLUMNS) * num_features
    config = {
        "B": batch,
        "d": dim,
        "D": num_features,
        "mode": mode,
        **{k: v for k, v in got.items() if k not in ("hot", "opcodes")},
    }
    lanes = 100 * got["thread_instructions"] / (32 * got["warp_instructions"])
    products = batch * dim * (num_features or (dim + 1) // 2)
    what = f"rff {mode}, {rows} rows x {RFF_TILE_COLUMNS} a block, d = {dim}"
    if num_features == 0:
        what = f"rff quadratic {mode}, d = {dim}"
    for key, text, value, unit, sense, target in (
        ("sectors", "sectors loaded / fewest of its tiles", got["sectors"] / (blocks * inputs / 8), "ratio", "<=", 1.2),
        ("lanes", "active lanes", lanes, "%", ">=", 90.0),
        ("bank", "extra bank-conflict cycles", float(got["bank_extra"]), "ratio", "<=", 0.0),
        ("instructions", "thread instructions per product", got["thread_instructions"] / products, "ratio", "<=", None),
    ):
        report.add(
            Row(
                f"{case}_{mode}_{key}",
                f"{what}: {text}",
                value,
                unit,
                f"vs fp64: {error:.1e}",
                sense=sense,
                target=target,
                config=config,
            )
        )


def add_tree_rows(report: Report, dtype: str, limit: float, got: dict[str, Any], error: float) -> None:
    config = {
        "C": 1 << DEPTH,
        "k": FEATURES,
        "m": M,
        "B": BATCH,
        "nodes": dtype,
        **{k: v for k, v in got.items() if k not in ("hot", "opcodes")},
    }
    lanes = 100 * got["thread_instructions"] / (32 * got["warp_instructions"])
    for key, what, value, unit, sense, target in (
        ("sectors", "sectors loaded per draw and level", got["sectors"] / (BATCH * M * DEPTH), "ratio", "<=", limit),
        ("lanes", "active lanes", lanes, "%", ">=", 90.0),
    ):
        report.add(
            Row(
                f"tree_{dtype}_{key}",
                f"tree_sample, C = 2^{DEPTH}, k = {FEATURES}, m = {M}, {dtype}: {what}",
                value,
                unit,
                f"log_q vs fp64: {error:.1e}",
                sense=sense,
                target=target,
                config=config,
            )
        )


def print_hot(launch: dict[str, Any], elements: int) -> None:
    print("      thread instructions per gathered element, by source line (and sectors loaded), then by opcode")
    for place, instructions, sectors in launch["hot"]:
        print(f"      {place:<40} {instructions / elements:8.3f}  {sectors:>8}")
    print("      " + ", ".join(f"{name} {n / elements:.3f}" for name, n in launch["opcodes"].items()))


def add_rows(report: Report, dim: int, mode: str, limit: float, got: dict[str, Any], error: float) -> None:
    judged = mode == "training"  # the targets are for the training forward, which does all of the work
    checked = f"loss vs fp64: {error:.1e}"
    config = {
        "d": dim,
        "m": M,
        "B": BATCH,
        "mode": mode,
        **{k: v for k, v in got.items() if k not in ("hot", "opcodes")},
    }
    name = "training forward" if judged else "no_grad forward"
    figures = [
        ("sectors", "sectors loaded / fewest possible", got["sectors"] / fewest_sectors(dim), "ratio", "<=", 1.15),
        ("lanes", "active lanes", 100 * got["thread_instructions"] / (32 * got["warp_instructions"]), "%", ">=", 90.0),
        ("bank", "extra bank-conflict cycles", float(got["bank_extra"]), "ratio", "<=", 0.0),
        (
            "instructions",
            "thread instructions per gathered element",
            got["thread_instructions"] / (BATCH * (M + 1) * dim),
            "ratio",
            "<=",
            limit,
        ),
    ]
    for key, what, value, unit, sense, target in figures:
        row_id = f"d{dim}_{key}" + ("" if judged else "_no_grad")
        report.add(
            Row(
                row_id,
                f"{name}, d = {dim}, m = {M}: {what}",
                value,
                unit,
                checked,
                sense=sense,
                target=target if judged else None,
                config=config,
            )
        )


if __name__ == "__main__":
    sys.exit(main())
