"""The longest warp of the kernels that sum rows, where all entries belong to one class: a tree, not one long walk."""

from __future__ import annotations

import pytest
import torch

BATCH, M, CLASSES = 1024, 64, 100_000
MOST = 4.0


def longest(ptxshim, ids: torch.Tensor, dim: int) -> int:
    """Instructions of the longest warp of the launch that sums `ids` [B, m]."""
    coef, rows = torch.ones(ids.shape), torch.ones(ids.shape[0], dim)
    none = ids.new_empty((0, 1))
    ptxshim.launches(reset=True)
    *_, count = torch.ops.samplex.row_reduce(ids, coef, rows, none, None, rows[:0], CLASSES, False)
    assert int(count) == ids.unique().numel()
    found = [x["max_warp_instr"] for x in ptxshim.launches() if "row_reduce_rows" in x["kernel"]]
    assert len(found) == 1
    return found[0]


@pytest.mark.parametrize("dim", [32, 128])
def test_all_entries_of_one_class(ptxshim, dim):
    distinct = longest(ptxshim, torch.randperm(CLASSES)[: BATCH * M].view(BATCH, M), dim)
    one = longest(ptxshim, torch.full((BATCH, M), 7), dim)
    print(f"d = {dim}: {one} of {distinct} instructions, {one / distinct:.1f} times")
    assert one <= MOST * distinct
