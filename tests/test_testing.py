"""The tolerance helpers themselves: a budget that cannot fail would make every suite that uses it worthless."""

from __future__ import annotations

import math

import pytest
import torch

from samplex_cuda.testing import assert_close, error_budget, max_error

NAN, INF = float("nan"), float("inf")


def test_error_is_the_largest_difference():
    assert max_error(torch.tensor([1.0, -2.0]), torch.tensor([1.5, -4.0])) == 2.0
    assert max_error(torch.empty(0, 3), torch.empty(0, 3)) == 0.0


@pytest.mark.parametrize(("actual", "expected", "error"), [
    (NAN, NAN, 0.0), (INF, INF, 0.0),
    (NAN, 0.0, INF), (0.0, NAN, INF), (INF, 0.0, INF), (INF, -INF, INF), (NAN, INF, INF),
])  # fmt: skip
def test_bad_numbers_meet_only_themselves(actual, expected, error):
    assert max_error(torch.tensor([actual, 1.0]), torch.tensor([expected, 1.0])) == error


def test_shapes_must_agree():
    with pytest.raises(ValueError, match=r"max_error: actual must be \[2\] like expected, got \[3\]"):
        max_error(torch.zeros(3), torch.zeros(2))


def test_budget_is_twice_torchs_error_plus_a_floor():
    truth = torch.tensor([3.0, -8.0], dtype=torch.float64)
    torchs = (truth + torch.tensor([0.5, 0.0])).float()
    floor = 4 * torch.finfo(torch.float32).eps * 8
    assert error_budget(truth, torchs) == 1.0 + floor
    assert error_budget(truth, truth.float()) == floor
    assert error_budget(truth, truth.float(), magnitude=80.0) == 10 * floor
    assert error_budget(truth, truth.bfloat16()) == 4 * torch.finfo(torch.bfloat16).eps * 8


def test_an_overflow_of_torch_opens_nothing():
    truth = torch.tensor([1.0, 2.0], dtype=torch.float64)
    assert error_budget(truth, torch.tensor([INF, 2.0])) < 1e-5


def test_assert_close_accepts_within_and_rejects_beyond():
    truth = torch.tensor([1.0, 2.0], dtype=torch.float64)
    torchs = truth.float() + torch.tensor([0.0, 0.01])
    assert_close("x", truth.float() + 0.019, truth, torchs)
    with pytest.raises(AssertionError, match=r"x: error 0\.021 .* over the budget 0\.02"):
        assert_close("x", truth.float() + 0.021, truth, torchs)
    with pytest.raises(AssertionError, match="error inf"):
        assert_close("x", torch.tensor([1.0, math.nan]), truth, torchs)


def test_assert_close_checks_dtype_and_shape():
    truth = torch.ones(2, dtype=torch.float64)
    with pytest.raises(AssertionError, match=r"dtype must be torch\.float32, got torch\.float64"):
        assert_close("x", truth, truth, truth.float())
    with pytest.raises(AssertionError, match=r"shape must be \[2\], got \[1, 2\]"):
        assert_close("x", truth.float()[None], truth, truth.float())
