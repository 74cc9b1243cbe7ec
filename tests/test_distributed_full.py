"""The full softmax and `reduction="none"` of sharded heads, against a head of one process."""

from __future__ import annotations

import pytest
import torch
from rank_cases import BATCH, DIM
from rank_full_cases import CASES, make, steps

CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(scope="module")
def found(ranks):
    """What each rank of 1, 2, 3 and 4 found, by case."""
    return {world: ranks.run(world, "rank_full_cases:run") for world in (1, 2, 3, 4)}


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_those_of_one_process(found, name):
    head = make(name)
    weight, bias = found[1][0][name]["start"]
    with torch.no_grad():
        head.weight.copy_(weight)
        if head.bias is not None:
            head.bias.copy_(bias)
    wanted = steps(head, name, 1, 0)
    for world, of_ranks in found.items():
        for number, want in enumerate(wanted):
            grad = torch.zeros(BATCH, DIM, dtype=head.weight.dtype)
            for rank in of_ranks:
                step = rank[name]["steps"][number]
                assert step["loss"].shape == want["loss"].shape
                torch.testing.assert_close(step["loss"], want["loss"], **CLOSE)
                if want["scale"] is not None:
                    assert abs(float(want["scale"] - wanted[0]["scale"])) > 1e-4 or number == 0  # it learns
                    torch.testing.assert_close(step["scale"], want["scale"], **CLOSE)
                if step["grad"] is not None:
                    grad[step["rows"]] = step["grad"]
            if want["grad"] is not None:
                assert bool(want["grad"].abs().sum() > 0)
                torch.testing.assert_close(grad, want["grad"], msg=lambda m, w=world: f"{w} ranks: {m}", **CLOSE)
        for rank in of_ranks:
            for mine, other in zip(rank[name]["tables"], (head.weight, head.bias), strict=True):
                if other is not None:
                    assert not torch.equal(mine, weight if mine.dim() == 2 else bias)
                    torch.testing.assert_close(mine, other.detach(), **CLOSE)


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("none") and name != "none online"])
def test_sampled_losses_by_row_have_the_same_bits_on_any_number_of_ranks(found, name):
    one = found[1][0][name]
    for world in (2, 3, 4):
        for rank in found[world]:
            for mine, other in zip(rank[name]["steps"][:-1], one["steps"], strict=False):
                assert torch.equal(mine["loss"], other["loss"])
            for mine, other in zip(rank[name]["tables"], one["tables"], strict=True):
                assert (mine is None) == (other is None)
                assert mine is None or torch.equal(mine, other)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_an_averaging_encoder_gets_the_gradient_of_the_loss(ranks, reduction):
    (alone,) = ranks.run(1, "rank_full_cases:averaged", reduction)
    for grad in ranks.run(3, "rank_full_cases:averaged", reduction):
        torch.testing.assert_close(grad, alone, **CLOSE)


def test_routes_that_do_not_fit(ranks):
    for full, rows in ranks.run(2, "rank_full_cases:refusals"):
        assert 'with route="online_softmax" loss must sample classes' in full
        assert 'with route="rows_to_queries" reduction must be "mean" or "sum", got "none"' in rows
