"""Chunk sizes by device: one function, asked by every loop over classes."""

from __future__ import annotations

import contextlib

import pytest
import torch
from gpu_calls import Calls

import samplex_cuda as sx
from samplex_cuda import chunking, prediction
from samplex_cuda.ops.predict import MOST_K
from samplex_cuda.ops.sphere import project_rows_

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


@pytest.mark.parametrize(("classes", "chunk_size"), [(50_257, None), (50_257, 1001), (17, None), (1, None)])
def test_rows_of_logits_are_aligned_on_a_gpu(classes, chunk_size):
    """At 50,257 classes three rows of four would begin beside 16 bytes, and GEMMs have an odd leading dimension."""
    h, weight = torch.empty(64, 32, device=GPU), torch.empty(classes, 32, device=GPU)
    kept = chunking.KeptLogits(GPU)
    for keep in (None, kept):
        for c in chunking.logit_chunks(h, weight, None, 1.0, False, None, chunk_size, keep=keep):
            assert c.dots.shape[1] == min(classes - c.first, chunk_size or classes)
            assert c.dots.stride(1) == 1
            assert c.dots.stride(0) % 16 == 0
            assert c.dots.storage_offset() % 16 == 0
    host = next(chunking.logit_chunks(torch.empty(2, 3), torch.empty(50_257, 3), None, 1.0, False))
    assert host.dots.is_contiguous()


def test_sphere_gradients_on_a_gpu_take_one_pass():
    """The part of each row along its class row: of a step's 66,560 rows at a time."""
    rows, ids = torch.empty(66_560, 128, device=GPU), torch.empty(66_560, dtype=torch.int64, device=GPU)
    weight = torch.empty(10**6, 128, device=GPU)
    with Calls() as calls:
        project_rows_(rows, ids, weight)
    assert calls.made["addcmul_"] == 1
    assert sum(calls.made.values()) <= 14, calls.made


def test_sizes():
    cpu, kinds = torch.device("cpu"), ("logits", "features", "changed features", "rows", "probabilities")
    assert [chunking.chunk_bytes(cpu, kind) >> 20 for kind in kinds] == [2, 8, 2, 2, 32]
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
    asked.clear()
    project_rows_(torch.randn(3, 8), torch.tensor([1, 0, 5]), weight)
    assert asked == {"rows"}
    asked.clear()
    sx.samplers.Quadratic(weight).log_prob_shared(h, torch.tensor([1, 2]))
    assert "probabilities" in asked
