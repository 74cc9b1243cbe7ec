"""An error that another call left behind: the next op reports it, once, and does not clear it in silence."""

from __future__ import annotations

import pytest
import torch

from samplex_cuda import functional


def loss() -> torch.Tensor:
    g = torch.Generator().manual_seed(0)
    h, weight = torch.randn(2, 8, generator=g), torch.randn(9, 8, generator=g)
    return functional.sampled_softmax(h, weight, torch.tensor([1, 2]), torch.tensor([[3, 4]] * 2), torch.zeros(2, 2))


def test_an_earlier_error_is_reported_once(ptxshim):
    want = loss()
    assert ptxshim.lib().cudaSetDevice(99) != 0
    with pytest.raises(RuntimeError, match="sampled_softmax: an earlier CUDA call failed, not one of this op: "):
        loss()
    assert torch.equal(loss(), want)
