"""Rows that several warps of the GPU kernels share, in the losses that are sums over entries."""

from __future__ import annotations

import pytest
import torch
from entry_cases import LOSSES, make_case
from loss_cases import check_case

CASES = [
    {"dim": 1028, "samples": 40, "bias": "own"},
    {"dim": 2048, "targets": 3, "class_weight": True, "ignore": "padding"},
    {"dim": 4096, "rows": 2},
    {"dim": 4100, "rows": 2},
    {"dim": 1032, "dtype": torch.bfloat16, "targets": 2},
    {"dim": 4096, "dtype": torch.float16, "rows": 2, "positives": True},
    {"dim": 257, "targets": 2, "positives": True},
    {"dim": 1025, "dtype": torch.bfloat16},
]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("options", CASES, ids=str)
def test_against_the_reference(options, loss, backend):
    check_case(make_case(loss=loss, **options), backend)
