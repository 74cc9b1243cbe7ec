"""The longest warp of the update where all entries belong to one class: a tree, not one long walk."""

from __future__ import annotations

import pytest
import torch

from samplex_cuda.ops.row_rules import row_update_
from samplex_cuda.optim import rules

BATCH, M, CLASSES = 1024, 64, 100_000
MOST = 4.0


def longest(ptxshim, ids: torch.Tensor, dim: int) -> int:
    """Instructions of the longest warp of an Adagrad update with the entries `ids` [B, m]."""
    weight, total = torch.zeros(CLASSES, dim), torch.ones(CLASSES, dim)
    bias, bias_total = torch.zeros(CLASSES), torch.ones(CLASSES)
    coef, rows = torch.ones(ids.shape), torch.ones(ids.shape[0], dim)
    rule = rules.adagrad(0.1, 1e-6, 0.0, False)
    none = (ids.new_empty((0, 1)), None, rows[:0])
    ptxshim.launches(reset=True)
    row_update_(weight, total, None, bias, bias_total, None, *none, ids, coef, rows, None, None, rule, rule)
    assert torch.equal(weight[:, 0].nonzero().flatten(), ids.unique())
    assert total.sum().isfinite()
    found = [x["max_warp_instr"] for x in ptxshim.launches() if "row_rules_entries" in x["kernel"]]
    assert len(found) == 1
    return found[0]


@pytest.mark.parametrize("dim", [32, 128])
def test_all_entries_of_one_class(ptxshim, dim):
    distinct = longest(ptxshim, torch.randperm(CLASSES)[: BATCH * M].view(BATCH, M), dim)
    one = longest(ptxshim, torch.full((BATCH, M), 7), dim)
    print(f"d = {dim}: {one} of {distinct} instructions, {one / distinct:.1f} times")
    assert one <= MOST * distinct
