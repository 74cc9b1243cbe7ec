"""`python -m samplex_cuda.info` and its functions."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys

import pytest
import torch

from samplex_cuda import _native, info


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


def test_says_why_cuda_does_not_run_here():
    base = info.gather_info()

    def status(cuda: bool, torch_cuda: str | None, devices: list[dict[str, object]]) -> str:
        changed = copy.deepcopy(base)
        changed["build"].update(cuda=cuda, cuda_version="13.0", cuda_archs=["80-real"])
        changed["runtime"]["torch_cuda"] = torch_cuda
        changed["machine"]["cuda_devices"] = devices
        shown = info.format_info(changed)
        return next(line for line in shown.splitlines() if line.strip().startswith("CUDA here")).split(maxsplit=2)[2]

    device = {"name": "Some GPU", "capability": "8.0", "memory": 2**34}
    assert status(False, "13.0", [device]).startswith("no: built without")
    assert status(True, None, []).startswith("no: this torch is a CPU build")
    assert status(True, "13.0", []).startswith("no: torch sees no CUDA device")
    assert status(True, "13.0", [device]) == "yes"
