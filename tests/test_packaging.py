"""A wheel, built the way a user builds it, works in another environment; and the gate's arithmetic is right."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def script(name: str):
    """A module of scripts/, which is no package."""
    folder = str(ROOT / "scripts")
    if folder not in sys.path:
        sys.path.append(folder)  # scripts import each other
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_wheel_works_in_another_environment(tmp_path):
    make_wheel = script("make_wheel")
    # Without CUDA: what is tested is the wheel, not nvcc. A separate build directory, as a fresh clone has.
    command = [sys.executable, "-m", "pip", "wheel", str(ROOT), "--no-build-isolation", "--no-deps", "-qq"]
    command += ["--wheel-dir", str(tmp_path), f"--config-settings=build-dir={tmp_path / 'build'}"]
    command += ["--config-settings=cmake.define.SAMPLEX_CUDA=OFF", "--config-settings=wheel.build-tag=0cpu"]
    subprocess.run(command, check=True)
    [wheel] = tmp_path.glob("samplex_cuda-*-0cpu-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "samplex_cuda/py.typed" in names
    assert any(name.startswith("samplex_cuda/_native.") for name in names)
    make_wheel.check_contents(wheel, cuda=False)
    with pytest.raises(SystemExit, match="must match its tag, got no device code"):
        make_wheel.check_contents(wheel, cuda=True)
    assert make_wheel.use(wheel, None).startswith("torch ")


def test_source_distribution_has_what_a_build_reads(tmp_path, monkeypatch):
    make_wheel = script("make_wheel")
    monkeypatch.setattr(make_wheel, "DIST", tmp_path / "dist")
    tree = make_wheel.make_sdist(tmp_path)
    [archive] = (tmp_path / "dist").iterdir()
    assert archive.name == f"{tree.name}.tar.gz"
    assert f"\nVersion: {tree.name.rsplit('-', 1)[1]}\n" in (tree / "PKG-INFO").read_text()
    have = {path.relative_to(tree) for path in tree.rglob("*") if path.is_file()}
    for folder in ("csrc", "cmake", "python", "scripts"):
        want = {path.relative_to(ROOT) for path in (ROOT / folder).rglob("*") if path.is_file()}
        want = {path for path in want if "__pycache__" not in path.parts and path.suffix != ".so"}
        assert want <= have, sorted(want - have)[:5]
    assert {Path(name) for name in ("CMakeLists.txt", "pyproject.toml", "LICENSE", "README.md", "Makefile")} <= have
    assert not [path for path in have if path.suffix in (".so", ".whl", ".pyc") or path.parts[0] in ("build", ".venv")]


def test_extras_are_read_from_pyproject():
    extra = script("extra")
    text = '[project.optional-dependencies]\nlint = ["ruff>=0.6", "mypy"]\n\n[tool.x]\ndocs = ["no"]\n'
    assert extra.requirements(text, "lint") == ["ruff>=0.6", "mypy"]
    with pytest.raises(SystemExit, match="no extra 'docs'"):
        extra.requirements(text, "docs")
    for name in ("lint", "docs", "test", "demo", "bench", "gate"):
        assert extra.requirements((ROOT / "pyproject.toml").read_text(), name)


# Expected values worked out by hand from the limits of one multiprocessor.
@pytest.mark.parametrize(
    ("arch", "threads", "registers", "shared", "wanted"),
    [
        (80, 256, 32, 0, 1.0),  # 8 blocks of 8 warps
        (80, 256, 64, 0, 0.5),  # 65536 / (64 * 32) = 32 warps
        (80, 256, 255, 0, 0.125),  # 256 registers per thread allocated: 8 warps, one block
        (80, 32, 16, 0, 0.5),  # 32 blocks of one warp
        (75, 256, 64, 0, 1.0),  # 32 warps is all sm_75 has
        (75, 128, 32, 32 * 1024, 0.25),  # two blocks of 4 warps share 64 KiB
        (86, 128, 32, 49 * 1024, 8 / 48),  # 50 KiB with the reserved one: two blocks in 100 KiB
        (120, 1024, 40, 0, 32 / 48),  # one block of 32 warps
    ],
)
def test_occupancy(arch, threads, registers, shared, wanted):
    gate = script("cuda_gate")
    assert gate.occupancy(gate.LIMITS[arch], threads, registers, shared) == pytest.approx(wanted)


def test_spare_shared_memory_keeps_the_occupancy():
    gate = script("cuda_gate")
    for limits in gate.LIMITS.values():
        for threads, registers, shared in [(128, 40, 512), (256, 64, 0), (1024, 32, 4096)]:
            spare = gate.spare_shared(limits, threads, registers, shared)
            blocks = gate.resident_blocks(limits, threads, registers, shared)
            assert gate.resident_blocks(limits, threads, registers, shared + spare) == blocks
            if shared + spare < 48 * 1024:
                more = shared + spare + limits.shared_unit
                assert gate.resident_blocks(limits, threads, registers, more) < blocks


PTXAS = """
ptxas info    : 9 bytes gmem
ptxas info    : Compiling entry function '_Z1aPf' for 'sm_80'
ptxas info    : Function properties for _Z1aPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 24 registers, used 1 barriers, 1024 bytes smem, 368 bytes cmem[0]
ptxas info    : Compiling entry function '_Z1bPf' for 'sm_80'
ptxas info    : Function properties for _Z1bPf
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 255 registers, 368 bytes cmem[0]
"""
PTX = """
.visible .entry _Z1aPf(
\t.param .u64 p
)
.maxntid 128, 2, 1
{
\tret;
}
.visible .entry _Z1bPf(
\t.param .u64 p
)
{
\tcall.uni (retval0), vprintf, (a, b);
\tret;
}
"""


def test_gate_reads_ptxas_and_ptx():
    gate = script("cuda_gate")
    a, b = gate.parse_ptxas(PTXAS, "x.cu", 80)
    assert (a.registers, a.shared, a.stack, a.spill_stores) == (24, 1024, 0, 0)
    assert (b.registers, b.shared, b.stack, b.spill_stores, b.spill_loads) == (255, 0, 16, 8, 12)
    entries = gate.parse_ptx(PTX)
    assert entries == {"_Z1aPf": (256, False), "_Z1bPf": (None, True)}
    a.threads, a.prints = entries["_Z1aPf"]
    b.threads, b.prints = entries["_Z1bPf"]
    assert a.faults() == []
    assert [fault.split()[0] for fault in b.faults()] == ["spills", "no"]
    a.stack = 8
    assert [fault.split()[0] for fault in a.faults()] == ["stack"]


def test_gate_uses_the_flags_of_the_build():
    gate = script("cuda_gate")
    cmake = (ROOT / "cmake" / "cuda.cmake").read_text()
    loss = gate.nvcc_command(Path("csrc/loss/x_cuda.cu"), 80, Path("d"), Path("t"))
    sampler = gate.nvcc_command(Path("csrc/sampler/x_cuda.cu"), 80, Path("d"), Path("t"))
    assert "-fmad=false" in sampler
    assert "-fmad=false" not in loss
    for flag in ("-lineinfo", "--expt-relaxed-constexpr", "-fmad=false"):
        assert flag in cmake
        assert flag in sampler


def test_gate_names_are_short():
    gate = script("cuda_gate")
    name = "void samplex::cuda::(anonymous namespace)::fwd<float, (int)4, true>(samplex::Params)"
    assert gate.short_name(name) == "fwd<float, 4, true>"
    assert gate.short_name("plain(float*)") == "plain"


def test_integrations_are_a_group_of_their_own():
    """`make test` leaves tests/integrations out; `make test-integrations` and CI run them; pip is quiet."""

    def make(*words: str) -> str:
        command = ["make", "--dry-run", "--always-make", "--no-print-directory", *words]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    assert '-m pytest -m "not slow and not integrations"' in make("test")
    printed = make("test-integrations")
    assert ".venv-integrations/bin/python -m pytest -m integrations tests/integrations" in printed
    installs = [line for line in printed.splitlines() if "-m pip" in line and " install " in line]
    installs = [line for line in installs if " -v " not in line]  # the extension, whose output is a progress bar
    assert any("scripts/extra.py integrations" in line or "torch==$(" in line for line in installs)
    assert all("--quiet --quiet" in line for line in installs), installs
    assert ".ci/run integrations" in (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "tests/integrations/test_pages.py"]
    command += ["-m", "not integrations"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 5, found.stdout[-500:]  # nothing is left
