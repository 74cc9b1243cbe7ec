"""The common parts that Python can reach: exact math, SIMD level and backend choice, and what bad settings say."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import numpy as np
import pytest

from samplex_cuda import _native

LEVELS = ["scalar", "avx2", "avx512"]


def run(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    """`code` in a separate process: these variables are read once."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("SAMPLEX_")}
    return subprocess.run([sys.executable, "-c", code], env=inherited | env, capture_output=True, text=True)


# ------------------------------------------------------------------------------------------------ numeric.h
def ulps(found: np.ndarray, wanted: list[float]) -> float:
    w = np.array(wanted)
    return float(np.max(np.abs(found - w) / np.maximum(np.abs(w), np.finfo(float).tiny)) / 4e-16)


def test_exact_exp_is_within_its_bound():
    x = np.concatenate([np.linspace(-700, 700, 20001), np.linspace(-1, 1, 20001), [0.0, -0.0, 1e-300]])
    assert ulps(_native.exact_math("exp", x), [math.exp(v) for v in x]) <= 1.0


def test_exact_log_is_within_its_bound():
    x = np.concatenate([np.logspace(-300, 300, 20001), np.linspace(0.5, 2.0, 20001), 1.0 + np.logspace(-15, -1, 200)])
    assert ulps(_native.exact_math("log", x), [math.log(v) for v in x]) <= 1.0


def test_exact_log1p_is_within_its_bound():
    x = np.concatenate([np.logspace(-300, 15, 20001), np.linspace(0.0, 2.0, 20001)])
    assert ulps(_native.exact_math("log1p", x), [math.log1p(v) for v in x]) <= 1.0


def test_exact_math_knows_three_functions():
    with pytest.raises(ValueError, match="exact_math: name must be exp, log or log1p, got sin"):
        _native.exact_math("sin", np.zeros(1))


# ------------------------------------------------------------------------------------------------ SIMD level
def test_level_in_use_can_be_set_and_read(simd_level):
    assert _native.simd_level() == _native.build_info()["simd_level"] == simd_level


def test_detected_level_is_the_start():
    found = run("from samplex_cuda import _native; print(_native.simd_level())")
    assert found.stdout.strip() == _native.build_info()["simd_detected"]


@pytest.mark.parametrize("level", LEVELS)
def test_level_from_the_environment(level):
    found = run("from samplex_cuda import _native; print(_native.simd_level())", SAMPLEX_SIMD_LEVEL=level)
    detected = _native.build_info()["simd_detected"]
    if LEVELS.index(level) <= LEVELS.index(detected):
        assert found.stdout.strip() == level
    else:
        assert found.returncode != 0
        assert f"SAMPLEX_SIMD_LEVEL: SIMD level must be at most '{detected}'" in found.stderr


def test_an_unknown_level_names_the_choices():
    with pytest.raises(RuntimeError, match="SIMD level must be 'scalar', 'avx2' or 'avx512', got 'neon'"):
        _native.set_simd_level("neon")
    found = run("from samplex_cuda import _native; _native.simd_level()", SAMPLEX_SIMD_LEVEL="neon")
    assert found.returncode != 0
    assert "SIMD level must be 'scalar', 'avx2' or 'avx512', got 'neon'" in found.stderr


def test_an_unknown_level_stops_an_op_too():
    code = """
import torch
from samplex_cuda.ops.row_reduce import row_reduce
row_reduce(torch.zeros(1, 1, dtype=torch.int64), None, torch.ones(1, 1), 3)
"""
    found = run(code, SAMPLEX_SIMD_LEVEL="AVX2")
    assert found.returncode == 1  # an exception, not a crash
    assert "SIMD level must be 'scalar', 'avx2' or 'avx512', got 'AVX2'" in found.stderr


# ------------------------------------------------------------------------------------------------ backend
def test_backend_from_the_environment():
    found = run("from samplex_cuda import _native; print(_native.cpu_backend())", SAMPLEX_CPU_BACKEND="cpu")
    assert found.stdout.strip() == "cpu"
    found = run("from samplex_cuda import _native; print(_native.cpu_backend())", SAMPLEX_CPU_BACKEND="")
    assert found.stdout.strip() == "cpu"


def test_simt_is_there_in_test_builds_only():
    found = run("from samplex_cuda import _native; print(_native.cpu_backend())", SAMPLEX_CPU_BACKEND="simt")
    if _native.build_info()["test_backends"]:
        assert found.stdout.strip() == "simt"
    else:
        assert found.returncode != 0
        assert "SAMPLEX_CPU_BACKEND must be one of 'cpu' in this build, got 'simt'" in found.stderr


def test_an_unknown_backend_names_the_choices():
    found = run("from samplex_cuda import _native; _native.cpu_backend()", SAMPLEX_CPU_BACKEND="tpu")
    assert found.returncode == 1
    assert "SAMPLEX_CPU_BACKEND must be one of 'cpu'" in found.stderr
    assert "in this build, got 'tpu'" in found.stderr
    before = _native.cpu_backend()
    with pytest.raises(RuntimeError, match=r"set_cpu_backend: name must be one of 'cpu'.* in this build, got 'tpu'"):
        _native.set_cpu_backend("tpu")
    assert _native.cpu_backend() == before
