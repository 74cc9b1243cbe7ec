"""`kernel_tree_parents` on trees beyond the caches, where the CPU writes past them: the same bits."""

from __future__ import annotations

import pytest
import torch

from samplex_cuda.ops import kernel_tree as ops
from samplex_cuda.tables import empty_table

LEAVES, STRIDE = 1 << 12, 1024


def by_levels(sums: torch.Tensor, leaves: torch.Tensor) -> torch.Tensor:
    want, node = sums.clone(), leaves + sums.shape[0] // 2
    while int(node[0]) > 1:
        node = (node >> 1).unique()
        want[node] = want[2 * node] + want[2 * node + 1]
    return want


@pytest.mark.parametrize("touched", ["some", "runs", "all", "none first"])
def test_sums_beyond_the_caches(backend, touched):
    if backend.name != "cpu":
        pytest.skip("the way past the caches is that of the CPU kernel")
    generator = torch.Generator().manual_seed(3)
    sums = empty_table(2 * LEAVES, STRIDE, device=torch.device("cpu"))
    sums.normal_(generator=generator)
    if touched == "all":
        leaves = torch.arange(LEAVES)
    elif touched == "runs":  # whole subtrees, single leaves, and the ends
        leaves = torch.cat([torch.tensor([0, 3]), torch.arange(64, 2200), torch.tensor([2201, 2300, LEAVES - 1])])
    else:
        leaves = torch.randint(LEAVES, (3 * LEAVES,), generator=generator)[: LEAVES + 500].sort().values
    want = by_levels(sums, leaves.unique())
    if touched == "none first":
        leaves = torch.cat([torch.tensor([-1, -1]), leaves])
    ops.kernel_tree_parents(sums, leaves)
    assert torch.equal(sums, want)


def test_a_table_that_is_not_aligned_has_the_same_sums():
    storage = torch.randn(2 * LEAVES * STRIDE + 16)
    start = next(i for i in range(16) if (storage.data_ptr() + 4 * i) % 64 == 16)
    sums = storage[start : start + 2 * LEAVES * STRIDE].view(2 * LEAVES, STRIDE)
    leaves = torch.arange(0, LEAVES, 2)
    want = by_levels(sums, leaves)
    ops.kernel_tree_parents(sums, leaves)
    assert torch.equal(sums, want)
