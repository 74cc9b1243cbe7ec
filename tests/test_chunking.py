"""Chunk sizes by device: one function, asked by every loop over classes."""

from __future__ import annotations

import collections
import contextlib

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import samplex_cuda as sx
from samplex_cuda import chunking, prediction
from samplex_cuda.ops.predict import MOST_K

# A device that is no CPU and needs none: shapes are worked out, nothing is computed.
GPU = torch.device("meta")


NO_KERNEL = ("aten::empty", "aten::promote_types", "samplex::predict_buffer")


class _Calls(TorchDispatchMode):
    """Calls that are kernels on a GPU: not those that only make a view or memory."""

    def __init__(self):
        super().__init__()
        self.made = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view and func._schema.name not in NO_KERNEL:
            self.made[func._schema.name.split("::")[1]] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def no_autocast(monkeypatch):
    """`torch.autocast` knows no device that computes nothing."""
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())


@pytest.mark.parametrize(("rows", "chunks"), [(64, 1), (1024, 16)])
def test_a_million_classes_on_a_gpu_take_few_chunks(no_autocast, rows, chunks):
    # A chunk is one product and one call of predict_topk, of one kernel with 1,024 rows and of two with fewer: 3 and 32
    # launches.
    h, weight, bias = (torch.empty(*size, device=GPU) for size in ((rows, 128), (10**6, 128), (10**6,)))
    with _Calls() as calls:
        prediction.exact_topk(h, weight, 10, bias)
    assert calls.made == {"mm": chunks, "predict_topk": chunks}
    with _Calls() as calls:
        prediction.exact_topk(h, weight, MOST_K, bias)
    assert calls.made == {"mm": chunks, "predict_topk": chunks}


def test_sizes():
    cpu, kinds = torch.device("cpu"), ("logits", "features")
    assert [chunking.chunk_bytes(cpu, kind) >> 20 for kind in kinds] == [2, 8]
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
    assert asked == {"logits", "features"}
    asked.clear()
    prediction.exact_lse(h, weight)
    assert asked == {"logits"}
