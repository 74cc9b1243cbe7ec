"""Rows that several warps of the GPU kernels share: d above 512, whatever its alignment, and wider than that."""

from __future__ import annotations

import pytest
import torch
from loss_cases import check_case, run_ours
from softmax_cases import make_case

HALF, BF16, DOUBLE = torch.float16, torch.bfloat16, torch.float64
# Both sides of each kernel's limit, columns that fill no whole chunk, and the general form of the loss.
CASES = [
    {"dim": 516, "samples": 20},
    {"dim": 640, "bias": "own", "class_weight": True},
    {"dim": 1024, "targets": 3, "smoothing": 0.1, "ignore": "padding"},
    {"dim": 1024, "samples": 150, "rows": 2},
    {"dim": 1028, "absolute": True, "positives": True},
    {"dim": 2048, "samples": 0},
    {"dim": 2052, "scale": 2.0, "bias": "own"},
    {"dim": 4096, "targets": 2, "rows": 2},
    {"dim": 4100, "class_weight": True, "smoothing": 0.2},
    {"dim": 520, "dtype": BF16, "samples": 20},
    {"dim": 1024, "dtype": BF16, "ignore": "class"},
    {"dim": 4096, "dtype": BF16, "rows": 2, "samples": 17},
    {"dim": 1032, "dtype": HALF, "smoothing": 0.1},
    {"dim": 2056, "dtype": HALF, "absolute": True},
    {"dim": 4104, "dtype": HALF, "rows": 2},
    {"dim": 257, "samples": 20},
    {"dim": 1023, "dtype": BF16, "targets": 2},
    {"dim": 1025, "class_weight": True},
    {"dim": 4095, "dtype": HALF, "rows": 2},
    {"dim": 4097, "rows": 2},
    {"dim": 516, "shared": True, "targets": 2},
    {"dim": 1024, "dtype": BF16, "shared": True},
    {"dim": 516, "dtype": DOUBLE},
]


@pytest.mark.parametrize("options", CASES, ids=str)
def test_against_the_reference(options, backend):
    check_case(make_case(**options), backend)


@pytest.mark.parametrize(("dim", "dtype"), [(1024, torch.float32), (2052, torch.float32), (4096, BF16), (1025, HALF)])
def test_the_loss_is_the_same_without_gradients(dim, dtype, backend):
    case = make_case(dim=dim, dtype=dtype, samples=21, rows=3)
    with torch.no_grad():
        loss = case.to(backend.device).call(reduction="none").cpu()
    assert torch.equal(loss, run_ours(case, backend.device)["loss"])


def test_a_bad_row_stays_alone(backend):
    case = make_case(dim=1028, samples=20)
    case.h[1, 1027] = torch.nan
    case.weight[case.ids[3, 5], 0] = torch.inf
    ours = run_ours(case, backend.device)
    hit = (case.ids == case.ids[3, 5]).any(1) | (case.target == case.ids[3, 5])
    hit[1] = True
    assert ours["loss"][1].isnan()
    assert ours["loss"][~hit].isfinite().all()
    assert ours["d_h"][~hit].isfinite().all()
