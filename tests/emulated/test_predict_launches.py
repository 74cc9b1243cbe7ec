"""Launches and longest warps of the passes over a chunk of logits, on nvcc's code."""

from __future__ import annotations

import contextlib

import pytest
import torch
from gpu_calls import Calls

from samplex_cuda import chunking, prediction
from samplex_cuda.ops import predict as ops


def topk(rows: int, columns: int, k: int = 10) -> None:
    """One chunk, the first."""
    values, ids = torch.empty(rows, k), torch.empty(rows, k, dtype=torch.int64)
    ops.predict_topk(torch.randn(rows, columns), None, 0, 1.0, False, values, ids)


def lse(rows: int, columns: int) -> None:
    """One chunk, the first, with a target."""
    sums, target = torch.full((rows,), -torch.inf, dtype=torch.float64), torch.zeros(rows, 1, dtype=torch.int64)
    ops.predict_lse(torch.randn(rows, columns), None, target, None, 0, 1.0, False, sums, torch.zeros(rows, 1))


@pytest.mark.parametrize(("rows", "most"), [(64, 8), (1024, 32)])
@pytest.mark.parametrize("work", [topk, lse])
def test_launches_over_a_million_classes(ptxshim, work, rows, most):
    """A product a chunk, and what the op launches: as many kernels for a few columns as for all of a chunk."""
    chunk = chunking._classes_per_chunk(rows, 10**6, torch.empty(0, device="meta"))
    work(rows, min(chunk, 2_000_000 // rows))
    assert -(-(10**6) // chunk) * (1 + ptxshim.counters()["kernel_launches"]) <= most


@pytest.mark.parametrize(("rows", "most"), [(64, 8), (1024, 32)])
@pytest.mark.parametrize("h_dtype", [torch.bfloat16, torch.float32])
def test_launches_of_top_10_with_a_16_bit_table(ptxshim, monkeypatch, h_dtype, rows, most):
    """All ops of torch at the real shapes, on a device that computes nothing, and what each call of ours launches."""
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())
    gpu = torch.device("meta")
    h, weight = (torch.empty(n, 128, dtype=t, device=gpu) for n, t in ((rows, h_dtype), (10**6, torch.bfloat16)))
    with Calls() as calls:
        prediction.exact_topk(h, weight, 10, torch.empty(10**6, device=gpu))
    ours = calls.made.pop("predict_topk")
    topk(rows, 2_000_000 // rows)
    assert sum(calls.made.values()) + ours * ptxshim.counters()["kernel_launches"] <= most


@pytest.mark.parametrize(("work", "least"), [(topk, 8192), (lse, 16384)])
def test_a_long_row_has_no_long_warp(ptxshim, work, least):
    """Sixteen times the classes go to sixteen times the blocks."""
    longest = []
    for columns in (least, 16 * least):
        work(1, columns)
        longest.append(max(launch["max_warp_instr"] for launch in ptxshim.launches(reset=True)))
    assert longest[1] < 1.5 * longest[0], longest


def test_a_long_list_has_no_long_warp(ptxshim):
    """The merge of 1,024 entries of each block, too."""
    longest = []
    for columns in (32768, 8 * 32768):
        topk(1, columns, ops.MOST_K)
        longest.append(max(launch["max_warp_instr"] for launch in ptxshim.launches(reset=True)))
    assert longest[1] < 2 * longest[0], longest
