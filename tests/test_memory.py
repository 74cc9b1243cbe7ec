"""Memory that outlives a step: pooled gradient buffers, and the coalesced flag of gradients that reach a parameter."""

from __future__ import annotations

import os

import pytest
import torch

import samplex_cuda as sx
from samplex_cuda import _native

pytestmark = pytest.mark.skipif(
    os.environ.get("SAMPLEX_CPU_BACKEND", "cpu") != "cpu", reason="the pool serves the CPU kernels only"
)

C, D, B, M = 20_000, 64, 128, 64


def _step(weight, bias, *, seed):
    generator = torch.Generator().manual_seed(seed)
    h = torch.randn(B, D, generator=generator)
    target = torch.randint(C, (B,), generator=generator)
    ids = torch.randint(C, (B, M), generator=generator)
    log_q = torch.full((B, M), -9.9)
    sx.functional.sampled_softmax(h, weight, target, ids, log_q, bias).backward()


@pytest.fixture
def parameters():
    return torch.randn(C, D, requires_grad=True), torch.zeros(C, requires_grad=True)


def test_a_gradient_buffer_is_used_again(parameters):
    weight, bias = parameters
    sx.release_memory()
    addresses = set()
    for seed in range(3):
        weight.grad = bias.grad = None
        _step(weight, bias, seed=seed)
        addresses.add(weight.grad._values().data_ptr())
    assert len(addresses) == 1
    assert _native.cached_memory() == 0  # the only block is behind weight.grad
    weight.grad = None
    assert _native.cached_memory() >= B * (M + 1) * D * 4
    assert sx.release_memory() > 0
    assert _native.cached_memory() == 0


def test_two_live_gradients_have_two_buffers(parameters):
    weight, bias = parameters
    _step(weight, bias, seed=0)
    first = weight.grad
    kept = first.to_dense()
    weight.grad = bias.grad = None
    _step(weight, bias, seed=1)
    assert weight.grad._values().data_ptr() != first._values().data_ptr()
    assert torch.equal(first.to_dense(), kept)


def test_gradients_arrive_coalesced(parameters):
    weight, bias = parameters
    _step(weight, bias, seed=0)
    for grad in (weight.grad, bias.grad):
        assert grad.is_coalesced()
        assert (grad.indices()[0].diff() > 0).all()


def test_a_sum_of_two_gradients_tells_the_truth(parameters):
    weight, bias = parameters
    _step(weight, bias, seed=0)
    once = weight.grad.to_dense()
    _step(weight, bias, seed=1)
    # Both steps touch some rows in common: the flag must say whether these are summed already.
    assert weight.grad.is_coalesced() == bool((weight.grad._indices()[0].diff() > 0).all())
    weight_two = weight.grad.to_dense()
    weight.grad = bias.grad = None
    _step(weight, bias, seed=1)
    torch.testing.assert_close(weight_two, once + weight.grad.to_dense())


def test_another_sparse_gradient_is_not_called_coalesced(parameters):
    weight, bias = parameters
    _step(weight, bias, seed=0)  # registers the hook
    weight.grad = None
    ids = torch.tensor([5, 3, 5])
    torch.nn.functional.embedding(ids, weight, sparse=True).sum().backward()
    assert not weight.grad.is_coalesced()
    assert weight.grad.to_dense()[5, 0] == 2
