"""What the ops of the kernel tree refuse."""

# ruff: noqa: E501  (tables of messages)

from __future__ import annotations

import math

import pytest
import torch
from kernel_tree_cases import make

from samplex_cuda.ops import kernel_tree as ops


def update_with(ids=None, **options):
    ids = torch.tensor([1, 2]) if ids is None else ids
    ops.kernel_tree_update(torch.zeros(8, 16), torch.zeros(2, 16), torch.zeros(2, 16), ids, 2, **options)


def sample_with(**changes):
    case = make(10, 2)
    arguments = {
        "key": torch.tensor([0, 0]),
        "h": case.h,
        "phi": case.phi,
        "rows": case.rows,
        "sums": case.sums,
        "leaf_size": 2,
        "kernel": "gaussian",
        "scale": 1.0,
        "epsilon": 0.0,
        "num_samples": 3,
        "exclude": None,
        "exclude_offsets": None,
    }
    return lambda: ops.kernel_tree_sample(**{**arguments, **changes})


ERRORS = {
    "h": (sample_with(h=torch.zeros(4, 16)), "kernel_tree_sample: h must be [B, dim] = [*, 8] float32"),
    "phi": (sample_with(phi=torch.zeros(3, 16)), "phi must be [B, stride] = [4, 16] float32"),
    "rows": (sample_with(rows=torch.zeros(10, 6)), "rows must be [n, dim] with n >= 1 and dim a multiple of 8, got [10, 6]"),
    "no class": (sample_with(rows=torch.zeros(0, 8)), "rows must be [n, dim] with n >= 1"),
    "sums": (sample_with(sums=torch.zeros(12, 16)), "sums must be [2 * leaves, stride] with leaves a power of two"),
    "stride": (sample_with(sums=torch.zeros(16, 17)), "stride a multiple of 16, got [16, 17]"),
    "size": (sample_with(sums=torch.zeros(32, 16)), "sums must be [2 * leaves, stride] with the power of two that holds 5 leaves of 2 classes"),
    "dtype": (sample_with(sums=torch.zeros(16, 16, dtype=torch.float64)), "sums must be [2 * leaves, stride] = [*, *] float32"),
    "leaf": (sample_with(leaf_size=11), "leaf_size must be in [1, n] = [1, 10], got 11"),
    "scale": (sample_with(scale=0.0), "scale must be finite and positive, got 0"),
    "nan scale": (sample_with(scale=math.nan), "scale must be finite and positive, got nan"),
    "epsilon": (sample_with(epsilon=1.0), "epsilon must be in [0, 1), got 1"),
    "samples": (sample_with(num_samples=-1), "num_samples must be in [0, 2^24], got -1"),
    "key": (sample_with(key=torch.zeros(3, dtype=torch.int64)), "key must be [2] = [2] int64"),
    "exclude": (sample_with(exclude=torch.tensor([[10]] * 4)), "exclude must be -1 or in [0, 10), got 10 in row 0"),
    "order": (sample_with(exclude=torch.tensor([[3, 1]] * 4)), "exclude must ascend in each row, got 3 before 1 in row 0"),
    "shape": (sample_with(exclude=torch.tensor([[3]])), "exclude must be [B, P] = [4, *] int64"),
    "offsets": (sample_with(exclude=torch.tensor([3]), exclude_offsets=torch.tensor([0, 1, 1, 1, 2])), "exclude_offsets must ascend from 0 to 1"),
    "alone": (sample_with(exclude_offsets=torch.tensor([0, 0, 0, 0, 0])), "exclude_offsets needs exclude"),
    "ids": (lambda: make(10, 2).log_prob(torch.device("cpu"), torch.tensor([[10]] * 4)), "kernel_tree_log_prob: ids must be in [0, 10), got 10"),
    "ids shape": (lambda: make(10, 2).log_prob(torch.device("cpu"), torch.tensor([[1]])), "ids must be [B, n] = [4, *] int64"),
    "first": (lambda: ops.kernel_tree_build(torch.zeros(8, 16), torch.zeros(2, 16), 3, 2), "kernel_tree_build: first must be a multiple of leaf_size 2"),
    "room": (lambda: ops.kernel_tree_build(torch.zeros(8, 16), torch.zeros(3, 16), 6, 2), "must lie in 4 leaves, got 6"),
    "build phi": (lambda: ops.kernel_tree_build(torch.zeros(8, 16), torch.zeros(3, 15), 6, 2), "phi must be [n, stride] = [*, 16] float32"),
    "twice": (lambda: ops.kernel_tree_update(torch.zeros(8, 16), torch.zeros(2, 16), torch.zeros(2, 16), torch.tensor([1, 1]), 2), "kernel_tree_update: ids must ascend without repeats"),
    "outside": (lambda: ops.kernel_tree_update(torch.zeros(8, 16), torch.zeros(2, 16), torch.zeros(2, 16), torch.tensor([1, 8]), 2), "lie in 4 leaves of 2 classes, got 8 at position 1"),
    "old": (lambda: ops.kernel_tree_update(torch.zeros(8, 16), torch.zeros(2, 16), torch.zeros(1, 16), torch.tensor([1, 2]), 2), "old must be [n, stride] = [2, 16]"),
    "leaves": (lambda: ops.kernel_tree_parents(torch.zeros(8, 16), torch.tensor([4])), "kernel_tree_parents: leaves must ascend in [0, 4), after leading -1 for no leaf, got 4 at position 0"),
    "none last": (lambda: update_with(ids=torch.tensor([1, -1])), "ids must ascend without repeats, after leading -1 for no id"),
    "taken": (lambda: update_with(taken=torch.ones(3, dtype=torch.bool)), "taken must be [n] = [2] bool"),
    "rows alone": (lambda: update_with(rows=torch.zeros(8, 8)), "rows and fresh must be given together"),
    "fresh": (lambda: update_with(rows=torch.zeros(8, 8), fresh=torch.zeros(1, 8)), "fresh must be [n, dim] = [2, 8]"),
    "few rows": (lambda: update_with(rows=torch.zeros(2, 8), fresh=torch.zeros(2, 8)), "ids must be below the number of rows, 2, got 2"),
    "row width": (lambda: update_with(rows=torch.zeros(8, 6), fresh=torch.zeros(2, 6)), "rows must have columns in a multiple of 8"),
    "row place": (lambda: update_with(rows=torch.zeros(65)[1:].view(8, 8), fresh=torch.zeros(2, 8)), "rows must be aligned to 16 bytes"),
    "peaks": (lambda: update_with(peaks=torch.zeros(2, 4)), "peaks must be [2, leaves + 1] = [2, 5]"),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_bad_input(name):
    call, text = ERRORS[name]
    with pytest.raises(RuntimeError) as caught:
        call()
    assert text in str(caught.value)
