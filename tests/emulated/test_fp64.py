"""How much of each draw is fp64, which consumer GPUs do at 1:64: the counts behind docs/gpu_model.md."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


def counted_draws() -> dict[str, tuple[float, float]]:
    sys.path.insert(0, str(BENCH))
    try:
        return importlib.import_module("gpu_model").DRAWS
    finally:
        sys.path.remove(str(BENCH))


@pytest.mark.parametrize("name", counted_draws())
def test_the_page_has_the_counts_of_this_build(profile_cuda, name):
    assert set(counted_draws()) == set(profile_cuda.DRAWS)
    found = profile_cuda.run(profile_cuda.DRAWS[name], f"draw:{name}")["draw"]
    assert found["launches"], "no launch was seen"
    per_draw = [sum(launch[key] for launch in found["launches"]) / found["draws"] for key in FIELDS]
    print(f'    "{name}": ({per_draw[0]:.2f}, {per_draw[1]:.2f}),')
    assert per_draw == pytest.approx(counted_draws()[name], rel=0.05, abs=0.005)


FIELDS = ("warp_instructions", "fp64")
