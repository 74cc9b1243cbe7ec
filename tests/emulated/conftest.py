"""Counters of the emulated CUDA runtime (ptxrun) for the tests of this folder: nvcc's code, CPU tensors, no GPU.

`make test-emulated PTXRUN=dir` runs them. Elsewhere they are skipped: the project does not depend on ptxrun.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Counts are wanted, not findings: one schedule that keeps each warp together, no checks (large class tables are mapped
# by the library itself, so the runtime does not know their bounds). Option: value while counting, ptxrun's default.
_COUNTING = {"profile": (1, 0), "random": (0, 0), "race": (0, 0), "uninit": (0, 0), "bounds": (0, 1)}


def _shim_is_loaded(folder: Path) -> bool:
    maps = Path("/proc/self/maps")
    return maps.exists() and str((folder / "shim" / "libcudart.so").resolve()) in maps.read_text()


def _set(shim, name: str, value: int) -> None:
    if shim.lib().ptxrun_option(name.encode(), value) != 0:
        raise RuntimeError(f"tests/emulated: this ptxrun has no option '{name}'")


def _folder() -> Path:
    named = os.environ.get("SAMPLEX_PTXRUN")
    if not named:
        pytest.skip("SAMPLEX_PTXRUN does not name a folder: make test-emulated PTXRUN=dir")
    return Path(named).resolve()


@pytest.fixture
def ptxshim():
    """The module `ptxshim` with all counters at 0 and the profile on: `reset`, `counters`, `launches`, `capture`.

    `opcount` and `ptxrun` of the same folder can be imported while a test has this fixture.
    """
    folder = _folder()
    if os.environ.get("SAMPLEX_CPU_BACKEND") != "cuda" or not _shim_is_loaded(folder):
        # Not skipped: somebody asked for the counters, and a gate that is silently left out is no gate.
        pytest.fail(f"SAMPLEX_PTXRUN is '{folder}', but this process does not run nvcc's code under its CUDA runtime")
    sys.path.insert(0, str(folder))
    try:
        shim = importlib.import_module("ptxshim")
        for name, (value, _) in _COUNTING.items():
            _set(shim, name, value)
        shim.reset()
        shim.launches(reset=True)
        yield shim
        shim.launches(reset=True)
        for name, (_, default) in _COUNTING.items():
            _set(shim, name, int(os.environ.get(f"PTXRUN_{name.upper()}", default)))
    finally:
        sys.path.remove(str(folder))


@pytest.fixture(scope="session")
def profile_cuda(tmp_path_factory):
    """Profiles of single kernels: `run(source, case)` of bench/profile_cuda.py on the library of this process.

    Returns what the case of bench/_profile_child.py returns: counts of each launch, by PTX instruction.
    """
    import samplex_cuda

    folder, work = _folder(), tmp_path_factory.mktemp("profile")
    sys.path.insert(0, str(ROOT / "bench"))
    try:
        bench = importlib.import_module("profile_cuda")
        draws = importlib.import_module("_profile_child").DRAWS
    finally:
        sys.path.remove(str(ROOT / "bench"))
    hook, site = bench.build_hook(work), Path(samplex_cuda.__file__).parents[1]
    compiled: dict[str, Path] = {}

    def run(source: str, case: str):
        if source not in compiled:
            compiled[source] = bench.build_ptx(work, source)
        return bench.profile(folder, site, compiled[source], hook, case)

    return SimpleNamespace(run=run, fewest_sectors=bench.fewest_sectors, DRAWS=draws)
