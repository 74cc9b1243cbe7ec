"""Run the op suite under an emulated CUDA runtime (ptxrun) file by file, for several seeds; go on where it stopped.

    python scripts/emulated_sweep.py --ptxrun DIR [--seeds 1 2 3] [--fresh] [--no-build] [files]
    python scripts/emulated_sweep.py --ptxrun DIR --cuda-torch PYTHON [...]

The whole sweep takes hours. Every file has a separate process, whose output goes to a log in build/emulated_sweep.
Results are kept in results.json of that folder. A file that passed is not run again, unless the library or the file has
changed since; --fresh runs everything again. All files run with the first seed before any runs with the next one, short
files first.

The table (summary.md of that folder) says for each file and seed how many tests passed and how many findings there are:
races, accesses out of bounds or misaligned, and reads of uninitialised shared memory. ptxrun only warns of the last, on
standard error, where pytest would hide it: the sweep counts the warnings, and one of them fails the file. The exit
status is 1 if a file failed.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import side_build  # noqa: E402

FOLDER = ROOT / "build" / "emulated_sweep"
# These have CUDA tensors alone. Elsewhere `cuda` is one backend of several, and only its tests are of interest.
CUDA_FILES = ("tests/emulated/test_cuda_tensors.py", "tests/test_training_cuda.py")
_TAKES_BACKEND = re.compile(r"def test\w*\([^)]*\bbackend\b")
PASSED, NO_TESTS = 0, 5  # exit status of pytest
_COUNTS = re.compile(r"(\d+) (passed|failed|error|errors|skipped|xfailed|deselected)\b")
_FINDING = re.compile(r"(?:WARNING: |ERROR: |RACE \()")  # ptxrun's, also behind pytest's dots


@dataclasses.dataclass
class Result:
    """One file with one seed."""

    source: str  # digest of library and test file
    status: int  # of pytest
    passed: int
    failed: int
    findings: int
    seconds: float
    log: str

    @property
    def good(self) -> bool:
        """Whether every test passed and nothing was found."""
        return self.status in (PASSED, NO_TESTS) and self.findings == 0

    def cell(self) -> str:
        """As the table shows it."""
        text = f"{self.passed} passed" if self.status != NO_TESTS else "no tests"
        if self.failed:
            text += f", {self.failed} failed"
        elif self.status not in (PASSED, NO_TESTS):
            text += f", exit status {self.status}"
        if self.findings:
            text += f", {self.findings} findings"
        return f"{text} ({self.seconds:.0f} s)"


def digest(*paths: Path) -> str:
    """Of the contents of files."""
    found = hashlib.sha256()
    for path in paths:
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


def read_log(text: str) -> tuple[int, int, int]:
    """Tests passed, tests failed, findings of the runtime, from what pytest and ptxrun wrote."""
    last = text.rstrip().splitlines()[-1:] or [""]
    counts = {name.rstrip("s") if name == "errors" else name: int(n) for n, name in _COUNTS.findall(last[0])}
    return counts.get("passed", 0), counts.get("failed", 0) + counts.get("error", 0), len(_FINDING.findall(text))


def summary(results: dict[str, Result], files: list[str], seeds: list[int]) -> str:
    """The table in Markdown."""
    lines = ["| file | " + " | ".join(f"seed {seed}" for seed in seeds) + " |", "|---|" + "---|" * len(seeds)]
    for file in files:
        cells = [results[key].cell() if (key := f"{file} {seed}") in results else "not run" for seed in seeds]
        lines.append(f"| {file} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def default_files(on_cuda: bool) -> list[str]:
    """The op suite; on CUDA tensors every file with tests of several backends."""
    paths = sorted(ROOT.glob("tests/**/test_*.py" if on_cuda else "tests/ops/test_*.py"))
    files = [str(path.relative_to(ROOT)) for path in paths if not on_cuda or _TAKES_BACKEND.search(path.read_text())]
    return [*CUDA_FILES, *files] if on_cuda else files


def run_file(run: side_build.Emulation, file: str, seed: int, arguments: list[str], source: str, log: Path) -> Result:
    """Run one file in a separate process."""
    # sys and not fd: what the runtime writes on standard error has to reach the log when the test passes, too.
    command = [str(run.python), *run.by, "-m", "pytest", "-p", "no:cacheprovider", "--capture=sys", "-q"]
    command += ["--durations=3", "-m", "not slow", *arguments, file]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **run.environment, "PTXRUN_SEED": str(seed)}
    started = time.monotonic()
    with log.open("w") as out:
        status = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT, check=False
        ).returncode
    counts = read_log(log.read_text(errors="replace"))
    return Result(source, status, *counts, round(time.monotonic() - started, 1), str(log.relative_to(ROOT)))


def sweep(run: side_build.Emulation, library: Path, files: list[str], seeds: list[int], on_cuda: bool) -> bool:
    """Run what is not done yet; True if all that was asked for is good."""
    folder = FOLDER / ("cuda" if on_cuda else "cpu")
    folder.mkdir(parents=True, exist_ok=True)
    store = folder / "results.json"
    kept = json.loads(store.read_text()) if store.exists() else {}
    results = {key: Result(**value) for key, value in kept.items()}
    built = digest(library)
    for seed in seeds:
        spent = {file: min((results[f"{file} {s}"].seconds for s in seeds if f"{file} {s}" in results), default=None)
                 for file in files}  # fmt: skip
        for file in sorted(files, key=lambda name: spent[name] or (ROOT / name).stat().st_size / 100):
            source = built + digest(ROOT / file)
            key = f"{file} {seed}"
            if key in results and results[key].source == source and results[key].good:
                continue
            name = file.removeprefix("tests/").removesuffix(".py").replace("/", "-")
            only = ["-k", "cuda"] if on_cuda and file not in CUDA_FILES else []
            results[key] = run_file(run, file, seed, only, source, folder / f"{name}-{seed}.log")
            print(f"seed {seed} {file}: {results[key].cell()}", flush=True)
            store.write_text(json.dumps({k: dataclasses.asdict(v) for k, v in results.items()}, indent=1) + "\n")
            (folder / "summary.md").write_text(summary(results, files, seeds))
    table = summary(results, files, seeds)
    (folder / "summary.md").write_text(table)
    print(table)
    return all(results[f"{file} {seed}"].good for file in files for seed in seeds)


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
