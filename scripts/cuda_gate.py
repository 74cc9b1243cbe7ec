"""Compile every kernel with nvcc for every listed architecture; fail on a warning, a spill or a missing block size.

    python scripts/cuda_gate.py [--archs 75 80 86 89 90 100 120] [--jobs 2] [--output docs/cuda_resources.md]

Where nvdisasm is found (extra `gate`), the machine code is read too: local memory fails the gate, and so does a
memory-bound kernel that keeps too few bytes in flight on sm_90 or has no 16-byte load.

Writes a table of registers, shared memory, theoretical occupancy and loads per kernel. The whole list of architectures
goes to docs/cuda_resources.md, which is committed; a shorter list, or a table without the machine code, to
build/cuda_resources.md.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import sass  # noqa: E402

ARCHS = (75, 80, 86, 89, 90, 100, 120)
# A kernel that prints (the id check behind SAMPLEX_DEBUG) keeps printf's arguments on the stack; nothing else may.
PRINT_STACK_BYTES = 64

# Bytes that one multiprocessor of sm_90 must have asked for to keep its share of 3.35 TB/s busy, at some 800 ns latency
# under load. Kernels that are bound by memory have to reach it; those of the second table do not yet, for the reason
# given, and the gate says when they do. By the beginning of the short name; each must match a kernel.
FLIGHT_ARCH, FLIGHT_BYTES = 90, 40 * 1024
_ROW_TYPES = r"(?:float, 4|Half, 8|BFloat16, 8),"
MEMORY_BOUND = {
    "forward": rf"sampled_softmax_kernel<{_ROW_TYPES}",
    "entry losses": rf"entry_loss_kernel<{_ROW_TYPES}",
    "update": r"row_rules_entries_kernel<(?:float, 4|Half, 8|BFloat16, 8)>",
    "row reduction": r"row_reduce_rows_kernel<float, 4",
    "log-sum-exp": r"predict_lse_kernel<float",
    "top-k": r"predict_topk_kernel<float",
    "attention pool": rf"attention_pool_kernel<{_ROW_TYPES}",
    "rows of a shard": r"shard_(?:logits|hidden)_kernel<(?:float, 4|Half, 8|BFloat16, 8)>",
}
FLIGHT_WAITING: dict[str, str] = {}


# ------------------------------------------------------------------------------------------------ occupancy
@dataclasses.dataclass(frozen=True)
class SmLimits:
    """What one multiprocessor offers (CUDA C++ Programming Guide, table of technical specifications)."""

    warps: int
    blocks: int
    shared: int  # bytes
    reserved: int  # bytes of shared memory the system takes per block
    shared_unit: int  # bytes, allocation granularity
    registers: int = 65536
    register_unit: int = 256  # registers, allocation granularity per warp


_KIB = 1024
LIMITS = {
    75: SmLimits(warps=32, blocks=16, shared=64 * _KIB, reserved=0, shared_unit=256),
    80: SmLimits(warps=64, blocks=32, shared=164 * _KIB, reserved=_KIB, shared_unit=128),
    86: SmLimits(warps=48, blocks=16, shared=100 * _KIB, reserved=_KIB, shared_unit=128),
    89: SmLimits(warps=48, blocks=24, shared=100 * _KIB, reserved=_KIB, shared_unit=128),
    90: SmLimits(warps=64, blocks=32, shared=228 * _KIB, reserved=_KIB, shared_unit=128),
    100: SmLimits(warps=64, blocks=32, shared=228 * _KIB, reserved=_KIB, shared_unit=128),
    120: SmLimits(warps=48, blocks=24, shared=100 * _KIB, reserved=_KIB, shared_unit=128),
}


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def resident_blocks(limits: SmLimits, threads: int, registers: int, shared: int) -> int:
    """Blocks of `threads` threads that fit one multiprocessor; `registers` per thread, `shared` bytes per block."""
    warps = _round_up(threads, 32) // 32
    by_warps = limits.warps // warps
    # Registers are handed out by warp, and a multiprocessor's four quarters each serve every fourth warp.
    warps_by_registers = limits.registers // _round_up(max(registers, 1) * 32, limits.register_unit) // 4 * 4
    by_registers = warps_by_registers // warps
    per_block = _round_up(shared + limits.reserved, limits.shared_unit)
    by_shared = limits.shared // per_block if per_block else limits.blocks
    return min(by_warps, by_registers, by_shared, limits.blocks)


def occupancy(limits: SmLimits, threads: int, registers: int, shared: int) -> float:
    """Resident warps / most resident warps."""
    warps = _round_up(threads, 32) // 32
    return resident_blocks(limits, threads, registers, shared) * warps / limits.warps


def spare_shared(limits: SmLimits, threads: int, registers: int, shared: int) -> int:
    """Bytes of dynamic shared memory a block may ask for at the same occupancy; SX_LAUNCH allows 48 KiB at most."""
    blocks = resident_blocks(limits, threads, registers, shared)
    if blocks == 0:
        return 0
    per_block = limits.shared // blocks // limits.shared_unit * limits.shared_unit - limits.reserved
    return max(0, min(per_block, 48 * _KIB) - shared)


# ------------------------------------------------------------------------------------------------ compile
@dataclasses.dataclass
class Kernel:
    """One entry function on one architecture."""

    source: str
    arch: int
    mangled: str
    registers: int = 0
    shared: int = 0
    stack: int = 0
    spill_stores: int = 0
    spill_loads: int = 0
    threads: int | None = None
    prints: bool = False
    machine: sass.Figures | None = None

    def faults(self) -> list[str]:
        """Why the gate refuses this kernel."""
        found = []
        if self.spill_stores or self.spill_loads:
            found.append(f"spills {self.spill_stores} bytes stored, {self.spill_loads} loaded")
        if self.stack > (PRINT_STACK_BYTES if self.prints else 0):
            found.append(f"stack frame of {self.stack} bytes (a local array that is indexed at run time?)")
        if self.threads is None:
            found.append("no __launch_bounds__: occupancy cannot be known")
        if self.machine is not None and self.machine.local and not self.prints:
            found.append(f"{self.machine.local} accesses of local memory in the machine code")
        return found

    @property
    def flight(self) -> int | None:
        """Bytes of loads in flight per multiprocessor, all resident warps at their best point; None if not known."""
        if self.machine is None or self.threads is None:
            return None
        resident = resident_blocks(LIMITS[self.arch], self.threads, self.registers, self.shared)
        return self.machine.bytes_in_flight * resident * _round_up(self.threads, 32)


def flight_faults(kernels: list[Kernel], names: dict[str, str]) -> list[str]:
    """Memory-bound kernels on sm_90 with too few bytes in flight or no 16-byte load; tables that no longer hold."""
    found = []
    mine = [kernel for kernel in kernels if kernel.arch == FLIGHT_ARCH and kernel.flight is not None]
    for what, pattern in MEMORY_BOUND.items():
        chosen = [kernel for kernel in mine if re.match(pattern, names[kernel.mangled])]
        if not chosen:
            found.append(f"MEMORY_BOUND['{what}'] of cuda_gate.py matches no kernel: '{pattern}'")
        missed = []
        for kernel in chosen:
            if (kernel.flight or 0) < FLIGHT_BYTES:
                missed.append(f"{names[kernel.mangled]}: {kernel.flight} bytes in flight, wanted {FLIGHT_BYTES}")
            if kernel.machine is not None and 16 not in kernel.machine.loads:
                missed.append(f"{names[kernel.mangled]}: no 16-byte load")
        if what not in FLIGHT_WAITING:
            found += [f"{what}, sm_{FLIGHT_ARCH}: {text}" for text in missed]
        elif chosen and not missed:
            found.append(f"{what}: enough bytes in flight now; take it out of FLIGHT_WAITING in cuda_gate.py")
    return found


_ENTRY = re.compile(r"Compiling entry function '(\S+)' for 'sm_(\d+)\w*'")
_PROPERTIES = re.compile(r"Function properties for (\S+)")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


def parse_ptxas(text: str, source: str, arch: int) -> list[Kernel]:
    """Kernels in what `ptxas -v` wrote. Functions that were not inlined count towards the kernel named before them."""
    kernels: list[Kernel] = []
    for line in text.splitlines():
        if match := _ENTRY.search(line):
            kernels.append(Kernel(source, arch, match.group(1)))
        elif kernels and (match := _STACK.search(line)):
            stack, stores, loads = (int(number) for number in match.groups())
            kernels[-1].stack = max(kernels[-1].stack, stack)
            kernels[-1].spill_stores += stores
            kernels[-1].spill_loads += loads
        elif kernels and (match := _USED.search(line)):
            kernels[-1].registers = int(match.group(1))
            shared = _SHARED.search(line)
            kernels[-1].shared = int(shared.group(1)) if shared else 0
    return kernels


_PTX_ENTRY = re.compile(r"\.entry\s+(\S+?)\((.*?)\n\}", re.DOTALL)
_MAXNTID = re.compile(r"\.maxntid\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?")


def parse_ptx(text: str) -> dict[str, tuple[int | None, bool]]:
    """For each entry: threads of a block by __launch_bounds__ (None without), and whether it calls printf."""
    found: dict[str, tuple[int | None, bool]] = {}
    for name, body in _PTX_ENTRY.findall(text):
        bounds = _MAXNTID.search(body)
        threads = None
        if bounds:
            threads = 1
            for size in bounds.groups():
                threads *= int(size or 1)
        found[name] = (threads, "vprintf" in body)
    return found


def nvcc_command(source: Path, arch: int, directory: Path, torch_include: Path, host: bool = True) -> list[str]:
    """The flags of cmake/cuda.cmake, one real architecture, with ptxas' report and the intermediate PTX kept.

    `host`: compile the host code too. It is the same for every architecture, and takes half of the time.
    """
    kind, made = ("-c", "kernel.o") if host else ("-cubin", "kernel.cubin")
    command = ["nvcc", kind, str(source), "-o", str(directory / made), "-std=c++20", "-O3", "-DNDEBUG"]
    command += ["-lineinfo", "--expt-relaxed-constexpr", "-Xcompiler=-fvisibility=hidden,-fPIC"]
    command += ["-Icsrc", "-isystem", str(torch_include)]
    if source.parts[:2] == ("csrc", "sampler"):
        command.append("-fmad=false")
    command += ["-gencode", f"arch=compute_{arch},code=sm_{arch}", "-Xptxas=-v", "-Werror", "all-warnings"]
    return [*command, "--keep", "--keep-dir", str(directory)]


def compile_one(
    source: Path, arch: int, torch_include: Path, nvdisasm: str | None, host: bool = True
) -> tuple[list[Kernel], str]:
    """Kernels of one source on one architecture, and nvcc's text if it failed; `host` as in `nvcc_command`."""
    with tempfile.TemporaryDirectory(prefix="samplex-gate-") as name:
        directory = Path(name)
        command = nvcc_command(source, arch, directory, torch_include, host)
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            return [], done.stdout + done.stderr
        kernels = parse_ptxas(done.stdout + done.stderr, str(source), arch)
        entries: dict[str, tuple[int | None, bool]] = {}
        for ptx in directory.glob("*.ptx"):
            entries.update(parse_ptx(ptx.read_text()))
        machine: dict[str, sass.Figures] = {}
        for cubin in directory.glob("*.cubin") if nvdisasm else ():
            machine.update(sass.read_cubin(nvdisasm or "", cubin))
    for kernel in kernels:
        kernel.threads, kernel.prints = entries.get(kernel.mangled, (None, False))
        kernel.machine = machine.get(kernel.mangled)
    return kernels, ""


# ------------------------------------------------------------------------------------------------ report
def demangle(names: list[str]) -> dict[str, str]:
    """Short readable names: no return type, no parameter list, no namespaces."""
    if not names:
        return {}
    text = "\n".join(names)
    if shutil.which("c++filt"):
        text = subprocess.run(["c++filt"], input=text, check=True, capture_output=True, text=True).stdout.strip()
    return dict(zip(names, map(short_name, text.split("\n")), strict=True))


def short_name(demangled: str) -> str:
    """`void samplex::cuda::k<float, 4>(Params)` -> `k<float, 4>`."""
    text = demangled.replace("(anonymous namespace)::", "").replace("{unnamed}::", "")
    text = re.sub(r"\((?:int|bool|unsigned int|long)\)(-?\d+)", r"\1", text)
    depth, end = 0, len(text)
    for position, letter in enumerate(text):
        depth += (letter == "<") - (letter == ">")
        if letter == "(" and depth == 0:
            end = position
            break
    text = text[:end].removeprefix("void ").replace("c10::", "")
    return re.sub(r"\b(?:samplex|cuda|baseline|detail)::", "", text)


def machine_cells(kernel: Kernel | None) -> str:
    """Loads, bytes in flight and fp64 of one kernel as cells of the table."""
    if kernel is None or kernel.machine is None or kernel.flight is None:
        return "- | - | -"
    figures = kernel.machine
    loads = ", ".join(f"{count} x {width} B" for width, count in figures.loads.items()) or "none"
    fp64 = f"{figures.fp64} of {figures.instructions}" if figures.fp64 else "0"
    return f"{loads} | {kernel.flight / _KIB:.1f} KiB | {fp64}"


def report(kernels: list[Kernel], archs: list[int], nvcc: str) -> str:
    """The Markdown page."""
    names = demangle(sorted({kernel.mangled for kernel in kernels}))
    lines = [
        "# CUDA resources per kernel",
        "",
        f"Made by `make cuda-gate` with nvcc {nvcc} for sm_{', sm_'.join(map(str, archs))}.",
        "Not measured on a GPU: registers and static shared memory are what ptxas reports, occupancy is computed from",
        "the published limits of one multiprocessor.",
        "",
        "A cell reads *registers · occupancy*. Threads is the block size of `__launch_bounds__`. Spare is the dynamic",
        "shared memory a block may ask for at that occupancy, on the tightest of the architectures. A spill fails the",
        "gate, so there is no column for spills.",
        "",
        f"From the machine code for sm_{FLIGHT_ARCH}: *loads* counts the load instructions of global memory by bytes",
        "per thread; *fp64* counts instructions of the fp64 unit among all instructions; *in flight* is what one",
        "multiprocessor can have asked of memory at once: bytes per thread that nothing has waited for yet, at the",
        "best point of a loop, times the resident threads. It is an upper bound: every lane active, every warp there.",
        f"Kernels bound by memory must reach {FLIGHT_BYTES // _KIB} KiB.",
    ]
    sources = sorted({kernel.source for kernel in kernels})
    for source in sources:
        lines += ["", f"## {source}", ""]
        lines.append(
            "| kernel | threads | static shared | "
            + " | ".join(f"sm_{arch}" for arch in archs)
            + " | spare | loads | in flight | fp64 |"
        )
        lines.append("|---|---|---|" + "---|" * (len(archs) + 4))
        own = [kernel for kernel in kernels if kernel.source == source]
        for mangled in sorted({kernel.mangled for kernel in own}, key=lambda name: (names[name], name)):
            by_arch = {kernel.arch: kernel for kernel in own if kernel.mangled == mangled}
            cells, spares = [], []
            for arch in archs:
                kernel = by_arch.get(arch)
                if kernel is None or kernel.threads is None:
                    cells.append("-" if kernel is None else f"{kernel.registers} · ?")
                    continue
                use = (LIMITS[arch], kernel.threads, kernel.registers, kernel.shared)
                cells.append(f"{kernel.registers} · {occupancy(*use):.0%}")
                spares.append(spare_shared(*use))
            threads = sorted({str(kernel.threads or "?") for kernel in by_arch.values()})
            shared = max(kernel.shared for kernel in by_arch.values())
            spare = f"{min(spares) / _KIB:.1f} KiB" if spares else "?"
            lines.append(
                f"| `{names[mangled]}` | {'/'.join(threads)} | {shared} B | "
                + " | ".join(cells)
                + f" | {spare} | {machine_cells(by_arch.get(FLIGHT_ARCH))} |"
            )
    return "\n".join(lines) + "\n"


def nvcc_version() -> str:
    """`13.0`, or SystemExit where there is no nvcc."""
    if shutil.which("nvcc") is None:
        raise SystemExit("cuda_gate.py: nvcc is not on PATH")
    text = subprocess.run(["nvcc", "--version"], check=True, capture_output=True, text=True).stdout
    match = re.search(r"release (\d+\.\d+)", text)
    return match.group(1) if match else "unknown"


def main() -> int:
    """Command line; the exit status says whether every kernel passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--archs", type=int, nargs="+", default=list(ARCHS), choices=ARCHS)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--output", type=Path, help="where the table goes")
    parser.add_argument("sources", nargs="*", type=Path, help="only these .cu files")
    args = parser.parse_args()
    version = nvcc_version()
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise SystemExit("cuda_gate.py: torch must be installed here, for its headers")
    torch_include = Path(spec.origin).parent / "include"
    sources = args.sources or sorted(path.relative_to(ROOT) for path in ROOT.glob("csrc/**/*_cuda.cu"))
    if not sources:
        raise SystemExit("cuda_gate.py: no csrc/**/*_cuda.cu found")
    archs = sorted(set(args.archs))
    nvdisasm = sass.find_nvdisasm()
    whole = archs == sorted(ARCHS) and not args.sources and nvdisasm is not None
    output = args.output or ROOT / ("docs" if whole else "build") / "cuda_resources.md"

    jobs = [(source, arch) for source in sources for arch in archs]
    print(f"cuda gate: nvcc {version}, {len(sources)} sources x sm_{', sm_'.join(map(str, archs))}", flush=True)
    if nvdisasm is None:
        print("cuda gate: no nvdisasm, so the machine code is not read: pip install nvidia-cuda-nvdisasm", flush=True)
    kernels: list[Kernel] = []
    faults: list[str] = []
    started = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        running = {pool.submit(compile_one, *job, torch_include, nvdisasm, job[1] == archs[0]): job for job in jobs}
        for done, future in enumerate(concurrent.futures.as_completed(running), 1):
            source, arch = running[future]
            found, error = future.result()
            kernels += found
            if error:
                faults.append(f"{source} for sm_{arch} does not compile:\n{error.rstrip()}")
            elif not found:
                faults.append(f"{source} for sm_{arch} holds no kernel")
            seconds = time.monotonic() - started
            print(
                f"  [{done:>3}/{len(jobs)}] {seconds:5.0f} s  {source.name} sm_{arch}: {len(found)} kernels", flush=True
            )
    kernels.sort(key=lambda kernel: (kernel.source, kernel.mangled, kernel.arch))
    names = demangle(sorted({kernel.mangled for kernel in kernels}))
    for kernel in kernels:
        faults += [f"{kernel.source}: {names[kernel.mangled]} sm_{kernel.arch}: {fault}" for fault in kernel.faults()]
    if nvdisasm is not None and FLIGHT_ARCH in archs and not args.sources:
        faults += flight_faults(kernels, names)
    if faults:
        print("\n".join(faults), file=sys.stderr)
        print(f"cuda gate: FAILED, {len(faults)} faults", file=sys.stderr)
        return 1
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(report(kernels, archs, version), encoding="utf-8")
    shown = output.relative_to(ROOT) if output.is_relative_to(ROOT) else output
    print(f"cuda gate: passed, {len(kernels)} kernels (one per instance and architecture), no spills; table in {shown}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
