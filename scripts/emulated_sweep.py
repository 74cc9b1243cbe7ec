"""Run the op suite under an emulated CUDA runtime (ptxrun) file by file, for several seeds; go on where it stopped.

    python scripts/emulated_sweep.py --ptxrun DIR [--seeds 1 2 3] [--fresh] [--no-build] [files]
    python scripts/emulated_sweep.py --ptxrun DIR --cuda-torch PYTHON [...]

The whole sweep takes hours. file_sweep.py says what it keeps, in build/emulated_sweep: a file that passed is not run
again, unless the library or the file has changed since; --fresh runs everything again. All files run with the first
seed before any runs with the next one, short files first.

The table says for each file and seed how many tests passed and how many findings there are: races, accesses out of
bounds or misaligned, and reads of uninitialised shared memory. ptxrun only warns of the last, on standard error, where
pytest would hide it: the sweep counts the warnings, and one of them fails the file. The exit status is 1 if a file
failed.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import file_sweep  # noqa: E402
import side_build  # noqa: E402
from file_sweep import Result  # noqa: E402

FOLDER = ROOT / "build" / "emulated_sweep"
# These have CUDA tensors alone. Elsewhere `cuda` is one backend of several, and only its tests are of interest.
CUDA_FILES = ("tests/emulated/test_cuda_tensors.py", "tests/test_training_cuda.py")
_TAKES_BACKEND = re.compile(r"def test\w*\([^)]*\bbackend\b")


def default_files(on_cuda: bool) -> list[str]:
    """The op suite; on CUDA tensors every file with tests of several backends."""
    paths = sorted(ROOT.glob("tests/**/test_*.py" if on_cuda else "tests/ops/test_*.py"))
    files = [str(path.relative_to(ROOT)) for path in paths if not on_cuda or _TAKES_BACKEND.search(path.read_text())]
    return [*CUDA_FILES, *files] if on_cuda else files


def run_file(run: side_build.Emulation, file: str, setting: str, source: str, log: Path, on_cuda: bool) -> Result:
    """Run one file with the seed that `setting` ends with."""
    # sys and not fd: what the runtime writes on standard error has to reach the log when the test passes, too.
    command = [str(run.python), *run.by, "-m", "pytest", "-p", "no:cacheprovider", "--capture=sys", "-q"]
    command += ["--durations=3", "-m", "not slow"]
    command += ["-k", "cuda", file] if on_cuda and file not in CUDA_FILES else [file]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **run.environment, "PTXRUN_SEED": setting.split()[-1]}
    return file_sweep.run_logged(command, ROOT, environment, source, log)


def sweep(run: side_build.Emulation, library: Path, files: list[str], seeds: list[int], on_cuda: bool) -> bool:
    """Run what is not done yet; True if all that was asked for is good."""
    return file_sweep.sweep(
        FOLDER / ("cuda" if on_cuda else "cpu"),
        files,
        [f"seed {seed}" for seed in seeds],
        source_of=lambda file: file_sweep.digest([library, ROOT / file]),
        run_file=lambda file, setting, source, log: run_file(run, file, setting, source, log, on_cuda),
        size_of=lambda file: (ROOT / file).stat().st_size / 100,
    )


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ptxrun", type=Path, required=True, help="directory of the emulated CUDA runtime")
    parser.add_argument("--cuda-torch", type=Path, help="interpreter of an environment with a CUDA build of torch")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="of the random schedules")
    parser.add_argument("--fresh", action="store_true", help="forget what is done")
    parser.add_argument("--no-build", action="store_true", help="take the library that is in build/side/emulated")
    parser.add_argument("files", nargs="*", help="test files; default: tests/ops, with --cuda-torch all with a backend")
    args = parser.parse_args()
    python = side_build.side_environment(ROOT / "build" / "side" / "emulated")
    run = side_build.emulation(python, args.ptxrun.resolve(), args.cuda_torch)
    if not args.no_build:
        side_build.build_emulated(python)
    library = next(Path(side_build.site_packages(python)).glob("samplex_cuda/libsamplex.so"), None)
    if library is None:
        raise SystemExit("emulated_sweep.py: build/side/emulated has no library; run without --no-build")
    files = args.files or default_files(args.cuda_torch is not None)
    if args.fresh:
        (FOLDER / ("cuda" if args.cuda_torch else "cpu") / "results.json").unlink(missing_ok=True)
    return 0 if sweep(run, library, files, args.seeds, args.cuda_torch is not None) else 1


if __name__ == "__main__":
    sys.exit(main())
