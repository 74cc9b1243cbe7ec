"""`python -m samplex_cuda.info` and its functions."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from samplex_cuda import _driver, _native, info

ROOT = Path(__file__).resolve().parents[1]


def test_says_what_the_native_module_says():
    gathered = info.gather_info()
    native = _native.build_info()
    assert gathered["build"]["version"] == native["version"]
    assert gathered["build"]["commit"] == native["commit"]
    assert gathered["machine"]["simd_detected"] == native["simd_detected"]
    assert gathered["runtime"]["torch"] == torch.__version__
    assert gathered["runtime"]["threads"] == torch.get_num_threads()
    assert bool(gathered["build"]["cuda_archs"]) == native["cuda"]


def test_follows_a_changed_simd_level(simd_level):
    gathered = info.gather_info()
    assert gathered["runtime"]["simd_level"] == simd_level
    shown = [line for line in info.format_info(gathered).splitlines() if line.strip().startswith("SIMD")]
    assert len(shown) == 1
    assert shown[0].split()[1] == simd_level
    assert ("this machine has" in shown[0]) == (simd_level != gathered["machine"]["simd_detected"])


def test_lists_registered_ops():
    ops = info.gather_info()["runtime"]["ops"]
    assert ops == sorted(ops)
    for name in ops:
        assert hasattr(torch.ops.samplex, name)


def test_command_prints_json_in_another_process():
    environment = {**os.environ, "SAMPLEX_SIMD_LEVEL": "scalar"}
    command = [sys.executable, "-m", "samplex_cuda.info"]
    as_json = subprocess.run([*command, "--json"], env=environment, check=True, capture_output=True, text=True)
    assert json.loads(as_json.stdout)["runtime"]["simd_level"] == "scalar"
    as_text = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    assert as_text.stdout.startswith(f"samplex-cuda {_native.build_info()['version']}\n")


def test_a_wrong_simd_level_names_the_choices():
    environment = {**os.environ, "SAMPLEX_SIMD_LEVEL": "sse9"}
    done = subprocess.run(
        [sys.executable, "-m", "samplex_cuda.info"], env=environment, check=False, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "SIMD level must be 'scalar', 'avx2' or 'avx512', got 'sse9'" in done.stderr


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("always [madvise] never\n", "madvise"), ("[always] madvise never\n", "always"), ("nonsense\n", "unknown")],
)
def test_huge_page_setting(tmp_path, text, wanted):
    setting = tmp_path / "enabled"
    setting.write_text(text)
    assert info._huge_pages(setting) == wanted
    assert info._huge_pages(tmp_path / "missing") == "unknown"


def shown(field: str, *, build=None, runtime=None, machine=None) -> str:
    """A line of the text, with faked values."""
    changed = copy.deepcopy(info.gather_info())
    changed["build"].update({"cuda": True, "cuda_version": "13.0.88", "cuda_archs": ["80-real"], "needed_driver": 580})
    changed["build"].update(build or {})
    changed["runtime"].update({"torch_cuda": "13.0", **(runtime or {})})
    changed["machine"].update(
        {"driver": "580.65.06", "driver_cuda": "13.0", "cuda_devices": [DEVICE], **(machine or {})}
    )
    lines = info.format_info(changed).splitlines()
    place = next(i for i, line in enumerate(lines) if line.strip().startswith(field))
    return lines[place + 1].strip() if field == "cuda:0" else lines[place].strip().removeprefix(field).strip()


DEVICE = {"name": "Some GPU", "capability": "8.0", "memory": 2**34, "kernels": "machine code", "kernels_arch": "sm_80"}


def test_says_why_cuda_does_not_run_here():
    assert shown("CUDA here") == "yes"
    assert shown("CUDA here", build={"cuda": False}).startswith("no: built without")
    assert shown("CUDA here", runtime={"torch_cuda": None}).startswith("no: this torch is a CPU build")
    assert shown("CUDA here", machine={"cuda_devices": []}) == "no: torch sees no CUDA device"
    without = {"cuda_devices": [], "driver": None, "driver_cuda": None}
    assert shown("CUDA here", machine=without).endswith("there is no NVIDIA driver")
    old = shown("CUDA here", machine={"driver": "570.86.10", "cuda_devices": []})
    assert old.startswith("no: driver 570.86.10 is too old for kernels of CUDA 13.0.88")
    assert "580 or newer" in old
    none = {**DEVICE, "kernels": "none", "kernels_arch": None}
    assert "rebuild" in shown("CUDA here", machine={"cuda_devices": [none]})
    assert shown("CUDA here", machine={"cuda_devices": [none, DEVICE]}) == "yes"


def test_says_which_driver_is_here_and_which_is_needed():
    assert shown("driver") == "580.65.06 (CUDA 13.0); CUDA 13.0.88 needs R580 or newer"
    assert shown("driver", machine={"driver": None}).startswith("none found; CUDA 13.0.88 needs R580")
    assert shown("driver", build={"cuda": False, "needed_driver": None}) == "580.65.06 (CUDA 13.0)"


def test_says_machine_code_or_ptx():
    def said(kernels: str, arch: str | None, **machine) -> str:
        device = {**DEVICE, "kernels": kernels, "kernels_arch": arch}
        return shown("cuda:0", machine={"cuda_devices": [device], **machine})

    assert said("machine code", "sm_80") == "machine code for sm_80"
    ptx = said("PTX", "compute_75")
    assert ptx.startswith("PTX of compute_75, which the driver compiles at first use")
    assert "make build" in ptx
    assert "cannot take" not in ptx
    assert "up to CUDA 12.8 and cannot take that of CUDA 13.0" in said("PTX", "compute_75", driver_cuda="12.8")
    assert "rebuild" in said("none", None)
    assert said("unknown", None) == "built for 80-real"


WHEEL = ["75-real", "80-real", "86-real", "89-real", "90-real", "100-real", "120"]


@pytest.mark.parametrize(
    ("capability", "archs", "wanted"),
    [
        ("8.0", WHEEL, ("machine code", "sm_80")),
        ("8.7", WHEEL, ("machine code", "sm_86")),  # same major version, later minor one
        ("10.3", WHEEL, ("machine code", "sm_100")),
        ("12.1", WHEEL, ("machine code", "sm_120")),
        ("13.0", WHEEL, ("PTX", "compute_120")),
        ("7.0", WHEEL, ("none", None)),
        ("11.0", WHEEL, ("none", None)),  # Thor: neither 10.x code nor PTX of 12.0
        ("9.0", ["75-virtual"], ("PTX", "compute_75")),
        ("8.0", ["86-real"], ("none", None)),
        ("8.0", ["native"], ("unknown", None)),
        ("8.0", [], ("none", None)),
    ],
)
def test_what_a_device_takes_from_a_build(capability, archs, wanted):
    assert _driver.kernels_for(capability, archs) == wanted


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27 2025\nGCC 13.3.0",
            "580.65.06",
        ),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124  Release Build", "570.124"),
        ("nothing of the kind", None),
    ],
)
def test_driver_version(tmp_path, text, wanted):
    module = tmp_path / "version"
    module.write_text(text)
    assert _driver.driver_version(module) == wanted


def test_driver_version_from_nvidia_smi(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert _driver.driver_version(tmp_path / "missing") is None
    fake_command(tmp_path / "nvidia-smi", "echo 580.82.07")
    assert _driver.driver_version(tmp_path / "missing") == "580.82.07"
    fake_command(tmp_path / "nvidia-smi", "echo 'failed because it could not talk to 999.99'; exit 9")
    assert _driver.driver_version(tmp_path / "missing") is None


def fake_command(path: Path, body: str) -> None:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def test_driver_of_a_machine_without_one():
    assert _driver.driver_cuda("no-such-libcuda.so") is None
    assert _driver.driver_cuda("libc.so.6") is None  # a library without that function


@pytest.mark.parametrize(
    ("version", "than", "wanted"),
    [
        ("579.9", 580, True),
        ("580.65.06", 580, False),
        ("13.0", "13.1", True),
        ("13.10", "13.9", False),
        (None, 580, False),
    ],
)
def test_is_older(version, than, wanted):
    assert _driver.is_older(version, than) is wanted
    assert not _driver.is_older(version, None)


def test_needed_driver():
    assert [_driver.needed_driver(v) for v in ("13.0.88", "12.8", None, "99.0")] == [580, 525, None, None]


def test_make_builds_for_the_gpus_that_are_here(tmp_path):
    def archs(**variables: str) -> str:
        environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", **variables}
        environment.pop("MAKEFLAGS", None)
        command = ["make", "-pn", "help", f"PYTHON={sys.executable}"]
        done = subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True)
        return next(
            line.split("=", 1)[1].strip() for line in done.stdout.splitlines() if line.startswith("CUDA_ARCHS ")
        )

    fake_command(tmp_path / "nvidia-smi", "exit 9")
    assert archs() == "75-virtual"
    fake_command(tmp_path / "nvidia-smi", "printf '9.0\\n8.9\\n9.0\\n'")
    assert archs() == "89-real;90-real"
    assert archs(CUDA_ARCHS="80-virtual") == "80-virtual"
    fake_command(tmp_path / "nvidia-smi", "printf '6.1\\n[N/A]\\n'")
    assert archs() == "75-virtual"
