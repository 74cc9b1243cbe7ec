"""Steps of nvcc's code that a CUDA graph can hold: nothing that ends a capture, and replays that are the same steps."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from graph_cases import OPTIMIZERS, Model, batch, graphs_on_cpu, run  # noqa: F401
from step_recorder import SyncGuard

import samplex_cuda as sx
from samplex_cuda import graphs

STEPS = [
    ("adagrad", {"capturable": False}),
    ("adam", {"capturable": False}),
    ("adam", {"capturable": True}),
    ("adam", {"capturable": True, "scaler": True}),
    ("adagrad", {"capturable": False, "scaler": True}),
]


def kernels(counters):
    return {name: found["launches"] for name, found in counters["kernels"].items()}


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("name", "options"), STEPS)
def test_a_step_breaks_no_capture(ptxshim, name, options, shared):
    model = Model(name, shared=shared, **options)
    model.step(*batch(0), key=sx.Key(1))
    ptxshim.reset()
    with SyncGuard() as guard, ptxshim.capture() as captured:
        model.step(*batch(1), key=sx.Key(2))
    counters = ptxshim.counters()
    assert not captured.violations, captured
    assert guard.found == []
    assert counters["sync_total"] == 0
    assert counters["cuda_mallocs"] == 0
    assert any("row_rules_entries" in kernel for kernel in kernels(counters))


def test_device_numbers_cost_one_launch_and_a_loss_scale_none(ptxshim):
    counts = []
    for options in ({"capturable": False}, {"capturable": True}, {"capturable": True, "scaler": True}):
        model = Model("adam", **options)
        model.step(*batch(0), key=sx.Key(1))
        ptxshim.reset()
        model.step(*batch(1), key=sx.Key(2))
        counts.append(ptxshim.counters()["kernel_launches"])
    assert counts[1] - counts[0] == 1
    assert counts[2] == counts[1]


@pytest.mark.parametrize("scaler", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_replays_are_the_steps_of_a_run_without_a_graph(ptxshim, graphs_on_cpu, name, scaler):  # noqa: F811
    """As in tests/test_graphs.py, with rates and corrections that nvcc's code makes on both sides."""
    plain, captured = (Model(name, capturable=True, scaler=scaler) for _ in range(2))
    key, bad = sx.Key(7), 5 if scaler else None
    run(plain, lambda x, y: plain.step(x, y, key=key), bad=bad)
    step = graphs.capture_step(captured.step, key=sx.Key(7), warmup=2)
    run(captured, step, bad=bad)
    assert step.captured
    assert ptxshim.counters()["kernel_launches"] > 0
    assert all(torch.equal(a.double(), b.double()) for a, b in zip(captured.tensors(), plain.tensors(), strict=True))
