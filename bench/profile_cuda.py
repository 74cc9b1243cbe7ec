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
import ctypes
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

# Sources, with what their build adds to the common flags.
SOURCES = {
    "sampled_softmax": (ROOT / "csrc" / "loss" / "sampled_softmax" / "sampled_softmax_cuda.cu", []),
    "tree": (ROOT / "csrc" / "sampler" / "tree" / "tree_cuda.cu", ["-fmad=false"]),
    "rff": (ROOT / "csrc" / "features" / "rff" / "rff_cuda.cu", []),
    "kernel_tree": (ROOT / "csrc" / "sampler" / "kernel_tree" / "kernel_tree_cuda.cu", ["-fmad=false"]),
    "row_rules": (ROOT / "csrc" / "update" / "row_rules" / "row_rules_cuda.cu", []),
}
BATCH, M, CLASSES = 32, 64, 20_000
LIMITS = {128: 6.0, 512: 4.0}  # thread instructions per gathered element
DEPTH, FEATURES = 17, 16
TREE_SECTORS = {"float32": 3.3, "bfloat16": 2.2}  # sectors loaded per draw and level
# B, d, D: whole tiles in every direction; D = 0 is the quadratic map.
RFF_CASES = {"rff_narrow": (64, 128, 512), "rff_wide": (256, 32, 4096), "rff_quadratic": (32, 64, 0)}
RFF_TILE_COLUMNS = 128
KERNEL_TREE_CLASSES, KERNEL_TREE_DIM, KERNEL_TREE_FEATURES, KERNEL_TREE_CHANGED = 1 << 15, 64, 128, 512
KERNEL_TREE_KERNELS = {"draw": "sample", "update": "leaves", "parents": "parents"}


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


# ----------------------------------------------------------------------------------------------------- the child
def child(ptxrun_dir: str, ptx: str, case: str) -> None:
    """Runs an op under the hook and prints the counters of each launch as JSON. `case`: a width d, or a dtype."""
    sys.path.insert(0, ptxrun_dir)
    import ptxrun

    import samplex_cuda  # noqa: F401  loads the library before the hook is asked for

    module = ptxrun.Module(Path(ptx).read_text())
    unsupported = module.unsupported()
    if unsupported:
        raise SystemExit(f"profile_cuda: the emulator cannot execute:\n{unsupported[:2000]}")
    ptxrun.option(profile=1, random=0, race=0, threads=1)
    launches: list[dict[str, Any]] = []

    callback_type = ctypes.CFUNCTYPE(
        ctypes.c_int,
        ctypes.c_char_p,
        ctypes.POINTER(ctypes.c_uint),
        ctypes.POINTER(ctypes.c_uint),
        ctypes.c_uint,
        ctypes.c_void_p,
    )

    @callback_type
    def on_launch(name: bytes, grid: Any, block: Any, smem: int, args: int) -> int:
        index = ptxrun.lib().ptxrun_find(module.h, name)
        if index < 0:
            return 1
        module.counters(reset=True)
        code = ptxrun.lib().ptxrun_launch(module.h, index, grid, block, smem, args)
        if code != 0:
            print(ptxrun.lib().ptxrun_log().decode(), file=sys.stderr)
            return 719
        rows = [r for r in module.counters(reset=True) if r["exec"]]
        loads = [r for r in rows if r["kind"] == 1 and r["sectors"]]
        launches.append(
            {
                "kernel": demangled(module, name.decode()),
                "grid": list(grid[:3]),
                "block": list(block[:3]),
                "smem": smem,
                "sectors": sum(r["sectors"] for r in loads),
                "thread_instructions": sum(r["lanes"] for r in rows),
                "warp_instructions": sum(r["exec"] for r in rows),
                "bank_extra": sum(r["ways"] - r["groups"] for r in rows if r["groups"] > 0),
                "hot": hot_lines(rows),
                "opcodes": opcodes(rows),
            }
        )
        return 0

    ctypes.CDLL(None).samplex_hook(on_launch)
    torch.manual_seed(0)
    if case == "kernel_tree":
        result = run_kernel_tree(launches)
    elif case == "row_rules":
        result = run_optim(launches)
    elif case in RFF_CASES:
        result = run_rff(case, launches)
    else:
        result = run_tree(case, launches) if case in TREE_SECTORS else run_sampled_softmax(int(case), launches)
    print("RESULT " + json.dumps(result))


def run_sampled_softmax(dim: int, launches: list[dict[str, Any]]) -> dict[str, Any]:
    """Forward, training and no_grad."""
    from samplex_cuda import functional as sxf

    # All ids different: then no row is shared and the fewest possible sectors are known exactly.
    perm = torch.randperm(CLASSES)[: BATCH * (M + 1)]
    target, ids = perm[:BATCH].clone(), perm[BATCH:].view(BATCH, M).clone()
    h = torch.randn(BATCH, dim)
    weight = torch.randn(CLASSES, dim) * dim**-0.5
    log_q = torch.full((BATCH, M), -math.log(CLASSES))
    logits = torch.einsum("bmd,bd->bm", weight[ids].double(), h.double()) + math.log(CLASSES) - math.log(M)
    positive = (weight[target].double() * h.double()).sum(1)
    want = (torch.logsumexp(torch.cat([positive[:, None], logits], 1), 1) - positive).mean()
    result: dict[str, Any] = {}
    for mode in ("training", "no_grad"):
        launches.clear()
        trains = mode == "training"
        with torch.set_grad_enabled(trains):
            loss = sxf.sampled_softmax(
                h.clone().requires_grad_(trains), weight.clone().requires_grad_(trains), target, ids, log_q
            )
        error = float((loss.detach().double() - want).abs() / want.abs())
        if not error <= 1e-5:
            raise SystemExit(f"profile_cuda: refcheck: the loss is off by {error:.1e} ({mode}, d = {dim})")
        result[mode] = {"launches": list(launches), "error": error}
    return result


def run_tree(dtype: str, launches: list[dict[str, Any]]) -> dict[str, Any]:
    """Draws without exclusion."""
    import samplex_cuda as sx

    leaves = 1 << DEPTH
    tree = sx.samplers.Tree(
        torch.randn(leaves, FEATURES) * 0.5,
        torch.randn(leaves) * 0.3,
        torch.randperm(leaves),
        dtype=getattr(torch, dtype),
    )
    x = torch.randn(BATCH, FEATURES)
    draw = tree.sample(x, M, key=sx.Key(1))
    weights, bias = (t.double() for t in tree.parameters_of_nodes())
    leaf, want = tree.class_leaf[draw.ids] + leaves, torch.zeros(BATCH, M, dtype=torch.float64)
    for level in range(DEPTH):
        node, right = leaf >> (DEPTH - level), (leaf >> (DEPTH - level - 1)) & 1
        z = torch.einsum("bmk,bk->bm", weights[node], x.double()) + bias[node]
        want += torch.nn.functional.logsigmoid(torch.where(right == 1, z, -z))
    error = float(((draw.log_q.double() - want).abs() / want.abs()).max())
    if not error <= 1e-5:
        raise SystemExit(f"profile_cuda: refcheck: log_q is off by {error:.1e} ({dtype})")
    return {"draw": {"launches": list(launches), "error": error}}


def run_rff(case: str, launches: list[dict[str, Any]]) -> dict[str, Any]:
    """Features of unit rows, and the gradient of the rows."""
    import samplex_cuda as sx
    from samplex_cuda.reference.rff import rff as reference

    batch, dim, num_features = RFF_CASES[case]
    x = torch.nn.functional.normalize(torch.randn(batch, dim), dim=1).requires_grad_()
    omega = sx.rff.frequencies(dim, num_features, nu=4.0, key=sx.Key(1)) if num_features else None
    kind = "rff" if num_features else "quadratic"
    exact = x.detach().double().requires_grad_()
    want = reference(exact, None if omega is None else omega.double(), kind, alpha=100.0)
    grad = torch.randn(want.shape)
    want.backward(grad.double())
    features = sx.rff.features(x, omega, kind=kind, alpha=100.0)
    result = {"forward": {"launches": list(launches), "error": relative(features, want)}}
    launches.clear()
    features.backward(grad)
    result["backward"] = {"launches": list(launches), "error": relative(x.grad, exact.grad)}
    for mode, got in result.items():
        if not got["error"] <= 1e-5:
            raise SystemExit(f"profile_cuda: refcheck: the {mode} is off by {got['error']:.1e} ({case})")
    return result


def run_kernel_tree(launches: list[dict[str, Any]]) -> dict[str, Any]:
    """Draws, then an update: leaves and the nodes above them. The fewest sectors go with each."""
    from bench_kernel_tree import log_q_by_path, unit_rows

    import samplex_cuda as sx
    from samplex_cuda import _native

    cpu = torch.device("cpu")
    weight, h = unit_rows(KERNEL_TREE_CLASSES, KERNEL_TREE_DIM, cpu), unit_rows(BATCH, KERNEL_TREE_DIM, cpu, 1)
    _native.set_cpu_backend("cpu")
    tree = sx.samplers.RandomFourier(weight, KERNEL_TREE_FEATURES, 1.0, key=sx.Key(1))
    _native.set_cpu_backend("cuda")
    draw = tree.sample(h, M, key=sx.Key(1))
    error = relative(draw.log_q, log_q_by_path(tree, h, draw.ids))
    leaf, depth, stride = draw.ids // tree.leaf_size, tree.depth, tree.sums.shape[1]
    pairs = sum(len(set(row)) for level in range(7, depth) for row in (leaf >> (depth - level)).tolist())
    leaves = sum(len(set(row)) for row in leaf.tolist())
    numbers = pairs * 2 * stride + leaves * tree.leaf_size * tree.dim + BATCH * (stride + tree.dim)
    result = {"draw": {"launches": list(launches), "error": error, "fewest": numbers / 8}}
    launches.clear()
    ids = torch.randperm(KERNEL_TREE_CLASSES)[:KERNEL_TREE_CHANGED].sort().values
    weight[ids] = unit_rows(KERNEL_TREE_CHANGED, KERNEL_TREE_DIM, cpu, 2)
    tree.update(ids, weight[ids])
    changed = tree.sums.clone()
    found = list(launches)
    _native.set_cpu_backend("cpu")
    tree.rebuild(weight)
    error = relative(changed, tree.sums)
    touched = torch.unique(ids // tree.leaf_size)
    above = torch.unique(touched // 2).numel()
    numbers = (2 * KERNEL_TREE_CHANGED + touched.numel()) * stride + 2 * KERNEL_TREE_CHANGED
    result["update"] = {"launches": found, "error": error, "fewest": numbers / 8}
    result["parents"] = {
        "launches": found,
        "error": error,
        "fewest": (2 * above * stride + 2 * KERNEL_TREE_CHANGED) / 8,
    }
    for mode, got in result.items():
        if not got["error"] <= 2e-4:
            raise SystemExit(f"profile_cuda: refcheck: kernel tree, {mode}: off by {got['error']:.1e}")
    return result


def run_optim(launches: list[dict[str, Any]]) -> dict[str, Any]:
    """Adagrad on given rows, and on a loss's entries, each of a row of its own. The fewest sectors go with each."""
    from samplex_cuda.ops.row_rules import RULE_KINDS, row_update_
    from samplex_cuda.reference.row_rules import row_adagrad

    dim, n = 128, BATCH * (M + 1)
    ids = torch.randperm(CLASSES)[:n]
    h, coef = torch.randn(BATCH, dim), torch.randn(BATCH, M + 1)
    weight, total = torch.randn(CLASSES, dim), torch.rand(CLASSES, dim)
    rows = (coef.unsqueeze(2) * h.unsqueeze(1)).reshape(n, dim)
    exact, sums = weight.double(), total.double()
    row_adagrad(exact, sums, ids, rows.double(), lr=0.1)
    rule = [float(RULE_KINDS["adagrad"]), 0.0, 0.1, 0.0, 1.0, 1e-10, 0.0, 0.0, 0.0]
    by_row = ids.view(BATCH, M + 1)
    parts = [t.contiguous() for t in (by_row[:, :1], coef[:, :1], h, by_row[:, 1:], coef[:, 1:], h)]
    result = {}
    for mode in ("rows", "entries"):
        launches.clear()
        w, s = weight.clone(), total.clone()
        if mode == "rows":
            torch.ops.samplex.row_adagrad_(w, s, ids, rows, None, None, 0.1, 1e-10, 0.0)
        else:
            row_update_(w, s, None, None, None, None, *parts, None, None, rule, rule)
        error = max(relative(w, exact), relative(s, sums))
        # Weight, sum and gradient (or h) of every row, and its id; of an entry also its place and its coefficient.
        fewest = n * (3 * dim / 8 + (8 if mode == "rows" else 20) / 32)
        result[mode] = {"launches": list(launches), "error": error, "fewest": fewest}
        if not error <= 1e-5:
            raise SystemExit(f"profile_cuda: refcheck: row update, {mode}: off by {error:.1e}")
    return result


def relative(got: Any, want: Any) -> float:
    return float((got.detach().double() - want.detach()).abs().max() / want.detach().abs().max())


def demangled(module: Any, name: str) -> str:
    mangled = module.kernels(demangle=False)
    text = module.kernels()[mangled.index(name)] if name in mangled else name
    return text.split("(")[0].removeprefix("void ")


def hot_lines(rows: list[dict[str, Any]], most: int = 20) -> list[list[Any]]:
    """Source lines with the most thread instructions: [file:line, thread instructions, sectors loaded]."""
    by_line: dict[str, list[int]] = {}
    for r in rows:
        place, _, line = r["src"].rpartition(":")
        entry = by_line.setdefault(f"{Path(place).name}:{line}", [0, 0])
        entry[0] += r["lanes"]
        entry[1] += r["sectors"] if r["kind"] == 1 else 0
    ranked = sorted(by_line.items(), key=lambda item: -item[1][0])[:most]
    return [[place, *counts] for place, counts in ranked]


def opcodes(rows: list[dict[str, Any]], most: int = 16) -> dict[str, int]:
    """Thread instructions by PTX opcode, the most frequent first."""
    counts: dict[str, int] = {}
    for r in rows:
        words = r["text"].split()
        if words and words[0].startswith("@"):  # a predicate
            words = words[1:]
        name = words[0].rstrip(";") if words else "?"
        counts[name] = counts.get(name, 0) + r["lanes"]
    return dict(sorted(counts.items(), key=lambda item: -item[1])[:most])


# ----------------------------------------------------------------------------------------------------- the parent
def fewest_sectors(dim: int) -> int:
    """Rows, hidden, ids, log_q, target: each byte once."""
    inputs = BATCH * (M + 1) * dim * 4, BATCH * dim * 4, BATCH * M * 8, BATCH * M * 4, BATCH * 8
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
