"""Build the extension in a separate environment beside the current one, and run tests there.

    python scripts/side_build.py sanitize [pytest arguments]
    python scripts/side_build.py sanitize --run SCRIPT [its arguments]
    python scripts/side_build.py emulated --ptxrun DIR [--cuda-torch PYTHON] [pytest arguments]

sanitize   AddressSanitizer and UndefinedBehaviorSanitizer over the op suite (CPU kernels and SIMT harness)
emulated   nvcc's own code, linked with the shared CUDA runtime, on CPU tensors under an emulated runtime (ptxrun); with
           --cuda-torch on CUDA tensors, by the interpreter of an environment that has a CUDA build of torch
           and the packages of the extra `test`

The side environment (build/side/NAME) sees the packages of the current one (torch, pytest) through a .pth file, but not
its editable install of this project.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]


def site_packages(python: Path) -> str:
    """Where the environment of `python` has its packages."""
    ask = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    return subprocess.run(ask, check=True, capture_output=True, text=True).stdout.strip()


def side_environment(directory: Path) -> Path:
    """Create the environment if it is not there; returns its interpreter.

    A plain path in a .pth file extends sys.path but does not run the .pth files it finds there, so the editable
    install of the parent stays out of sight.
    """
    python = directory / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(directory)], check=True)
    # Also the folders that .pth files of the current environment add, which nobody would follow from the new one.
    packages = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    parents = dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *packages])
    (Path(site_packages(python)) / "parent.pth").write_text("\n".join(parents) + "\n")
    return python


def install(python: Path, source: Path, *, build_dir: str | None = None, defines: dict[str, str] | None = None) -> None:
    """Install `source` (this tree or a wheel) into the environment of `python`, without touching dependencies."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "--python", str(python)]
    command += ["install", "--no-deps", "--no-build-isolation", "--force-reinstall", str(source)]
    if build_dir is not None:
        command.append(f"--config-settings=build-dir={build_dir}")
    command += [f"--config-settings=cmake.define.{name}={value}" for name, value in (defines or {}).items()]
    subprocess.run(command, check=True, cwd=ROOT)


def sanitizer_runtime(name: str) -> str:
    """Path of gcc's libasan or libubsan: it must be in the process before Python is."""
    compiler = os.environ.get("CXX", "g++")
    path = subprocess.run(
        [compiler, f"-print-file-name={name}"], check=True, capture_output=True, text=True
    ).stdout.strip()
    if not Path(path).is_absolute():
        raise SystemExit(f"side_build.py: {compiler} has no {name}; install the compiler's sanitizer libraries")
    return str(Path(path).resolve())


def run_tests(python: Path, arguments: list[str], environment: dict[str, str], by: Sequence[str] = ()) -> int:
    """Run pytest, or the script behind `--run`, by an interpreter (and a script `by`); returns its exit status."""
    script = arguments[:1] == ["--run"]
    command = [str(python), *by, *(arguments[1:] if script else ["-m", "pytest", "-p", "no:cacheprovider"])]
    command += [] if script else arguments
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, check=False).returncode


def sanitize(python: Path, arguments: list[str]) -> int:
    """Op suite under ASan and UBSan."""
    # No CUDA: the sanitizers do not see device code, and the harness runs the same source.
    defines = {
        "SAMPLEX_SANITIZE": "address;undefined",
        "SAMPLEX_TEST_BACKENDS": "ON",
        "SAMPLEX_CUDA": "OFF",
        "CMAKE_BUILD_TYPE": "RelWithDebInfo",
    }
    install(python, ROOT, build_dir="build/sanitize-{wheel_tag}", defines=defines)
    environment = {
        # libstdc++ too: ASan must find the real __cxa_throw when it starts, and Python itself does not link it.
        "LD_PRELOAD": " ".join(sanitizer_runtime(f"lib{name}.so") for name in ("asan", "ubsan", "stdc++")),
        # Leaks: Python keeps memory until exit. Fibers of the harness swap stacks: no use-after-return bookkeeping. A
        # tensor too large for the machine is torch's error and not a finding.
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0:abort_on_error=0:exitcode=99:"
        "allocator_may_return_null=1:max_allocation_size_mb=8192",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
    }
    return run_tests(python, arguments or ["tests/ops", "-m", "not slow", "-q"], environment)


def build_emulated(python: Path) -> None:
    """Install nvcc's own code with the shared CUDA runtime and embedded PTX."""
    defines = {
        "SAMPLEX_TEST_BACKENDS": "ON",
        "SAMPLEX_CUDA": "ON",
        "SAMPLEX_CUDA_ARCHS": "80-virtual",
        "SAMPLEX_CUDART": "shared",
    }
    install(python, ROOT, build_dir="build/emulated-{wheel_tag}", defines=defines)


class Emulation(NamedTuple):
    """How tests are started under ptxrun, with race detection, a random schedule and checks of shared memory."""

    python: Path
    environment: dict[str, str]
    by: list[str]  # script that runs the tests, before their arguments


def emulation(python: Path, ptxrun: Path, cuda_torch: Path | None) -> Emulation:
    """Of the side environment of `python`, or with `cuda_torch` of CUDA tensors."""
    preload = ptxrun / "libptxrun_preload.so"
    if not preload.exists():
        raise SystemExit(f"side_build.py: --ptxrun must name a directory with libptxrun_preload.so, got '{ptxrun}'")
    environment = {"SAMPLEX_PTXRUN": str(ptxrun)}
    for name in ("PTXRUN_RACE", "PTXRUN_UNINIT", "PTXRUN_RANDOM", "PTXRUN_SEED"):
        environment[name] = os.environ.get(name, "1")
    if cuda_torch is not None:
        # One binary serves both builds of torch. ptxtorch.py starts the interpreter again under the emulated runtime.
        environment["PYTHONPATH"] = site_packages(python)
        return Emulation(cuda_torch, environment, [str(ptxrun / "ptxtorch.py")])
    environment |= {
        "SAMPLEX_CPU_BACKEND": "cuda",
        "LD_LIBRARY_PATH": str(ptxrun / "shim"),
        "LD_PRELOAD": str(preload),
    }
    return Emulation(python, environment, [])


def emulated(python: Path, ptxrun: Path, cuda_torch: Path | None, arguments: list[str]) -> int:
    """Op suite on nvcc's code under ptxrun, with race detection; then the counters of tests/emulated."""
    run = emulation(python, ptxrun, cuda_torch)
    build_emulated(python)
    default = ["tests/ops", "tests/emulated"]
    if cuda_torch is not None:
        default = ["tests/ops", "tests/emulated/test_cuda_tensors.py", "tests/test_training_cuda.py", "-k", "cuda"]
    return run_tests(run.python, arguments or [*default, "-m", "not slow", "-q"], run.environment, run.by)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["sanitize", "emulated"])
    parser.add_argument("--ptxrun", type=Path, default=Path(), help="directory of the emulated CUDA runtime")
    parser.add_argument("--cuda-torch", type=Path, help="interpreter of an environment with a CUDA build of torch")
    args, rest = parser.parse_known_args()
    python = side_environment(ROOT / "build" / "side" / args.kind)
    if args.kind == "sanitize":
        return sanitize(python, rest)
    return emulated(python, args.ptxrun.resolve(), args.cuda_torch, rest)


if __name__ == "__main__":
    sys.exit(main())
