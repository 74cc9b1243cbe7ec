"""The CUDA kernel of sampled_softmax under the profile of an emulated CUDA runtime (ptxrun): figures without a GPU.

Needs PTXRUN=<directory of a built ptxrun> and nvcc; without them it says so and exits with 0.

Builds the library as a test build with shared cudart and compiles csrc/loss/sampled_softmax_cuda.cu to PTX with the
flags of that build. A child process runs the op on CPU tensors with SAMPLEX_CPU_BACKEND=cuda, so the launcher itself
chooses grid, block and shared memory; a hook hands each launch to a ptxrun module that counts. Per-row draws, m = 64:

  sectors        32-byte sectors loaded / fewest possible: every input byte touched, once (ids all different, no bias)
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
from pathlib import Path
from typing import Any

import torch
from _harness import ROOT, Report, Row, progress

SOURCE = ROOT / "csrc" / "loss" / "sampled_softmax_cuda.cu"
KERNEL = "sampled_softmax"
BATCH, M, CLASSES = 32, 64, 20_000
LIMITS = {128: 6.0, 512: 4.0}  # thread instructions per gathered element


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


def build_ptx(work: Path) -> Path:
    progress("compiling the kernel to PTX")
    out = work / "sampled_softmax.ptx"
    torch_include = Path(torch.__file__).parent / "include"
    flags = ["-std=c++20", "-O3", "-arch=compute_80", "-lineinfo", "--expt-relaxed-constexpr", "-DNDEBUG"]
    includes = [f"-I{ROOT / 'csrc'}", "-isystem", str(torch_include)]
    run(["nvcc", "-ptx", *flags, *includes, str(SOURCE), "-o", str(out)])
    progress("")
    return out


def build_hook(work: Path) -> Path:
    out = work / "liblaunch_hook.so"
    source = ROOT / "bench" / "_launch_hook.c"
    run([os.environ.get("CC", "cc"), "-O2", "-shared", "-fPIC", str(source), "-o", str(out), "-ldl"])
    return out


# ----------------------------------------------------------------------------------------------------- the child
def child(ptxrun_dir: str, ptx: str, dim: int) -> None:
    """Runs the op forward, training and no_grad, under the hook; prints the counters of each launch as JSON."""
    sys.path.insert(0, ptxrun_dir)
    import ptxrun

    from samplex_cuda import functional as sxf

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
    print("RESULT " + json.dumps(result))


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


def profile(ptxrun_dir: Path, site: Path, ptx: Path, hook: Path, dim: int) -> dict[str, Any]:
    progress(f"running d = {dim}")
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
    argv = [sys.executable, __file__, "--child", str(ptxrun_dir), str(ptx), str(dim)]
    done = subprocess.run(argv, env=env, capture_output=True, text=True)
    progress("")
    found = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode != 0 or not found:
        raise SystemExit(f"profile_cuda: the child process failed\n{(done.stdout + done.stderr)[-4000:]}")
    return json.loads(found[0].removeprefix("RESULT "))


def main() -> int:
    if len(sys.argv) > 1 and sys.argv[1] == "--child":
        child(sys.argv[2], sys.argv[3], int(sys.argv[4]))
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
    if not SOURCE.exists():
        print(f"profile_cuda: skipped: there is no {SOURCE.relative_to(ROOT)}")
        return 0
    ptxrun_dir = Path(asked).resolve()
    options.work.mkdir(parents=True, exist_ok=True)
    site = options.site or build_site(options.work)
    ptx, hook = build_ptx(options.work), build_hook(options.work)
    report = Report("profile_cuda", torch.device("cpu"), store=not options.no_store, timed=False)
    for dim, limit in LIMITS.items():
        result = profile(ptxrun_dir, site, ptx, hook, dim)
        for mode, got in result.items():
            mine = [launch for launch in got["launches"] if KERNEL in launch["kernel"]]
            if not mine:
                raise SystemExit(
                    f"profile_cuda: no launch of {KERNEL} was seen (d = {dim}, {mode}); is cudart shared in this build?"
                )
            add_rows(report, dim, mode, limit, max(mine, key=lambda launch: launch["sectors"]), got["error"])
            for launch in got["launches"]:
                print(f"    {launch['kernel']} <<<{launch['grid']}, {launch['block']}, {launch['smem']}>>>")
                if options.lines:
                    print_hot(launch, BATCH * (M + 1) * dim)
    return report.finish(fail=not options.no_fail)


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
