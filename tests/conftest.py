"""One suite, every backend: the `backend` fixture says what serves the tensors of a test.

cpu   the CPU kernels
simt  the CUDA source compiled by g++ under tests/simt (test builds)
cuda  a real CUDA device, where there is one; or, with SAMPLEX_CPU_BACKEND=cuda, the nvcc-compiled launchers on CPU
      tensors under an emulated CUDA runtime
"""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from samplex_cuda import _native

if "ptxtorch" in sys.modules:
    import emulated_products  # noqa: F401

if "ATEN_CPU_CAPABILITY" in os.environ:
    # torch's compiler would take code for another instruction set from its cache.
    own = f"torchinductor-{os.environ['ATEN_CPU_CAPABILITY']}"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(tempfile.gettempdir(), own))


@dataclasses.dataclass(frozen=True)
class Backend:
    """Where a test's tensors live (`device`) and what serves them (`name`)."""

    name: str
    device: torch.device

    @property
    def emulated(self) -> bool:
        """Whether a CPU executes CUDA code here: keep the shapes small."""
        return self.name != "cpu" and self.device.type == "cpu"


def _backends() -> list[Backend]:
    cpu = torch.device("cpu")
    chosen = os.environ.get("SAMPLEX_CPU_BACKEND")
    if chosen:
        return [Backend(chosen, cpu)]
    found = [Backend("cpu", cpu)]
    if _native.build_info()["test_backends"]:
        found.append(Backend("simt", cpu))
    if torch.cuda.is_available() and _native.build_info()["cuda"]:
        found.append(Backend("cuda", torch.device("cuda")))
    return found


@pytest.fixture(params=_backends(), ids=lambda b: b.name)
def backend(request):
    """Serve CPU tensors by the backend of this run; put the old one back afterwards."""
    chosen: Backend = request.param
    before = _native.cpu_backend()
    _native.set_cpu_backend(chosen.name if chosen.device.type == "cpu" else "cpu")
    yield chosen
    _native.set_cpu_backend(before)


@pytest.fixture
def cpu():
    """The CPU kernels alone, for tests of what only they have."""
    before = _native.cpu_backend()
    _native.set_cpu_backend("cpu")
    yield Backend("cpu", torch.device("cpu"))
    _native.set_cpu_backend(before)


def _simd_levels() -> list[str]:
    levels = ["scalar", "avx2", "avx512"]
    return levels[: levels.index(_native.build_info()["simd_detected"]) + 1]


@pytest.fixture(params=_simd_levels())
def simd_level(request, cpu):
    """Each SIMD level this machine has, of the CPU kernels."""
    before = _native.simd_level()
    _native.set_simd_level(request.param)
    yield request.param
    _native.set_simd_level(before)


@pytest.fixture(scope="session")
def ranks():
    """Four gloo ranks for the tests of sharded heads; see rank_pool.py."""
    from rank_pool import RankPool

    pool = RankPool()
    yield pool
    pool.close()


def pytest_collection_modifyitems(items):
    """Tests in tests/integrations need other libraries: `make test` leaves them out."""
    folder = Path(__file__).parent / "integrations"
    for item in items:
        if folder in item.path.parents:
            item.add_marker("integrations")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
