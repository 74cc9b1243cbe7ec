"""Chunk sizes by device: one function, asked by every loop over classes."""

from __future__ import annotations

import contextlib

import pytest
import torch
from gpu_calls import Calls

import samplex_cuda as sx
from samplex_cuda import chunking, prediction
from samplex_cuda.ops.predict import MOST_K

# A device that is no CPU and needs none: shapes are worked out, nothing is computed.
GPU = torch.device("meta")


@pytest.fixture
def no_autocast(monkeypatch):
    """`torch.autocast` knows no device that computes nothing."""
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())


@pytest.mark.parametrize(("rows", "chunks"), [(64, 1), (1024, 15)])
def test_a_million_classes_on_a_gpu_take_few_chunks(no_autocast, rows, chunks):
    # A chunk is one product and one call of predict_topk, of one kernel with 1,024 rows and of two with fewer: 3 and 30
    # launches.
    h, weight, bias = (torch.empty(*size, device=GPU) for size in ((rows, 128), (10**6, 128), (10**6,)))
    with Calls() as calls:
        prediction.exact_topk(h, weight, 10, bias)
    assert calls.made == {"mm": chunks, "predict_topk": chunks}
    with Calls() as calls:
        prediction.exact_topk(h, weight, MOST_K, bias)
    assert calls.made == {"mm": chunks, "predict_topk": chunks}


@pytest.mark.parametrize(("rows", "chunks", "fewer"), [(64, 1, 1), (1024, 15, 8)])
def test_tables_of_16_bits_take_no_more_launches(no_autocast, rows, chunks, fewer):
    """Rows of the same type multiply as they are. Float32 rows take a copy of the class rows, so chunks are larger."""
    weight, bias = torch.empty(10**6, 128, device=GPU, dtype=torch.bfloat16), torch.empty(10**6, device=GPU)
    with Calls() as calls:
        prediction.exact_topk(torch.empty(rows, 128, device=GPU, dtype=torch.bfloat16), weight, 10, bias)
    assert calls.made == {"mm": chunks, "predict_topk": chunks}
    with Calls() as calls:
        prediction.exact_topk(torch.empty(rows, 128, device=GPU), weight, 10, bias)
    parts = {"sub": 1, "nan_to_num_": 1, "sub_": 1} if rows > 64 else {}
    assert calls.made == {"mm": fewer, "predict_topk": fewer, "copy_": fewer + len(parts), **parts}
    assert sum(calls.made.values()) <= 32


TYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("bias_dtype", TYPES)
@pytest.mark.parametrize("weight_dtype", TYPES)
@pytest.mark.parametrize("h_dtype", TYPES)
def test_conversions_fit_the_budget(no_autocast, h_dtype, weight_dtype, bias_dtype):
    """An encoder under autocast before a float32 head, a head of 16 bits with its bias, and all others."""
    h, weight = (
        torch.empty(1024, 128, device=GPU, dtype=h_dtype),
        torch.empty(10**6, 128, device=GPU, dtype=weight_dtype),
    )
    with Calls() as calls:
        prediction.exact_topk(h, weight, 10, torch.empty(10**6, device=GPU, dtype=bias_dtype))
    assert sum(calls.made.values()) <= 32, calls.made


def test_sizes():
    cpu, kinds = torch.device("cpu"), ("logits", "features", "changed features")
    assert [chunking.chunk_bytes(cpu, kind) >> 20 for kind in kinds] == [2, 8, 2]
    assert {64 << 20 <= chunking.chunk_bytes(torch.device("cuda"), kind) <= 256 << 20 for kind in kinds} == {True}


def test_every_loop_asks(monkeypatch):
    """Replaced here, replaced everywhere; and the size of a chunk is nothing but a size."""
    weight, h = torch.randn(2000, 8), torch.randn(3, 8)
    asked = set()

    def work():
        exact, kernel = sx.samplers.Quartic(weight), sx.samplers.Quadratic(weight)
        key = sx.Key(1)
        kernel.update(torch.arange(50), weight[:50] + 1)
        draws = [sampler.sample(h, 7, key=key) for sampler in (exact, kernel)]
        return [*(d.ids for d in draws), *(d.log_q for d in draws), kernel.log_prob_all(h), kernel.sums.clone()]

    plain = work()
    real = chunking.chunk_bytes
    monkeypatch.setattr(chunking, "chunk_bytes", lambda device, of="logits": asked.add(of) or real(GPU, of))
    for mine, theirs in zip(work(), plain, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert asked == {"logits", "features", "changed features"}
    asked.clear()
    prediction.exact_lse(h, weight)
    assert asked == {"logits"}
