"""Run the test suite as on other processors: other instruction sets of torch, of MKL and of this library.

    python scripts/settings_sweep.py [--settings NAME ...] [--fresh] [files]

A test can hold on one processor only, by the order in which its products add up. Each setting below lowers something
else, and every value of every variable occurs in one of them. file_sweep.py says what is kept, in build/settings_sweep:
a file that passed is not run again unless the library, the package or the file has changed. Without --settings the
sweep takes about as long as `make test` for each of them. The exit status is 1 if a file failed.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import file_sweep  # noqa: E402

FOLDER = ROOT / "build" / "settings_sweep"
SETTINGS = {
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "SAMPLEX_SIMD_LEVEL": "avx2"},
    "scalar": {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "SAMPLEX_SIMD_LEVEL": "scalar"},
    "compatible": {"MKL_CBWR": "COMPATIBLE"},
}


def run_file(file: str, setting: str, source: str, log: Path) -> file_sweep.Result:
    """Run one file in one setting."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-m", "not slow", file]
    return file_sweep.run_logged(command, ROOT, {**os.environ, **SETTINGS[setting]}, source, log)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS), help="default: all")
    parser.add_argument("--fresh", action="store_true", help="forget what is done")
    parser.add_argument("files", nargs="*", help="test files; default: all")
    args = parser.parse_args()
    import samplex_cuda

    package = Path(samplex_cuda._native.__file__).parent
    code = file_sweep.digest([package / "libsamplex.so", *sorted((ROOT / "python").rglob("*.py"))])
    files = args.files or sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("tests/**/test_*.py"))
    if args.fresh:
        (FOLDER / "results.json").unlink(missing_ok=True)
    good = file_sweep.sweep(
        FOLDER,
        files,
        args.settings,
        source_of=lambda file: code + file_sweep.digest([ROOT / file]),
        run_file=run_file,
        size_of=lambda file: (ROOT / file).stat().st_size / 1000,
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
