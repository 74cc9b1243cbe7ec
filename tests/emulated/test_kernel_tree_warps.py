"""The longest warp of kernel tree draws where all draws of a row end in one leaf: they choose together, a lane each."""

from __future__ import annotations

import torch

import samplex_cuda as sx
from samplex_cuda import _native

DIM, M = 32, 64
MOST = 0.35  # 0.48 when the draws of a leaf chose one after the other


def longest(ptxshim, classes: int) -> int:
    """Instructions of the longest warp of draws."""
    torch.manual_seed(0)
    weight = torch.nn.functional.normalize(torch.randn(classes, DIM), dim=1)
    h = torch.nn.functional.normalize(torch.randn(4, DIM), dim=1)
    _native.set_cpu_backend("cpu")
    sampler = sx.samplers.RandomFourier(weight, 64, 1.0, key=sx.Key(1))
    _native.set_cpu_backend("cuda")
    ptxshim.launches(reset=True)
    sampler.sample(h, M, key=sx.Key(2))
    found = [x["max_warp_instr"] for x in ptxshim.launches() if "kernel_tree_sample" in x["kernel"]]
    assert found
    return max(found)


def test_draws_of_few_leaves(ptxshim):
    """Few leaves take all draws of a row, many leaves some each: the work of a warp does not add up."""
    few, many = longest(ptxshim, 16), longest(ptxshim, 4096)
    print(f"{few} instructions with 16 classes, {many} with 4,096")
    assert few <= MOST * many
