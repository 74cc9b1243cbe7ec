"""Exact samplers and mixtures over sharded class tables: one distribution for all ranks, that of one process."""

from __future__ import annotations

import pytest
import torch
from rank_exact_cases import DRAWS, make_sampler
from rank_sampler_cases import excluded, queries

CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def test_scores_are_those_of_one_process(ranks):
    for world in (1, 2, 3, 4):
        found = ranks.run(world, "rank_exact_cases:draws")
        for number, (kind, classes, _, without) in enumerate(DRAWS):
            sampler, out = make_sampler(kind, classes), excluded(without, classes, 10)
            h = queries().to(torch.float64 if kind == "absolute" else torch.float32)
            given = torch.arange(classes).expand(10, -1)
            one = found[0][number]
            for rank in found:
                for name, value in rank[number].items():
                    assert torch.equal(value, one[name]), (kind, name)
            torch.testing.assert_close(one["all"], sampler.log_prob_all(h).expand(10, -1), **CLOSE)
            torch.testing.assert_close(one["left"], sampler.log_prob(h, given, exclude=out), **CLOSE)
            torch.testing.assert_close(one["log_q"], one["again"], **CLOSE)
            torch.testing.assert_close(one["log_q"], one["left"].gather(1, one["ids"]), **CLOSE)
            torch.testing.assert_close(one["shared_q"], sampler.log_prob_shared(h, one["shared"]), **CLOSE)
            if classes > 1 and out is not None:
                dropped = (one["ids"].unsqueeze(2) == out.reshape(10, 1, -1)).any(2)
                alive = (one["left"] > -torch.inf).sum(1) > 1
                assert not bool(dropped[alive].any())


def test_draws_have_the_distribution_that_they_report(ranks):
    count = 20_000
    found = ranks.run(3, "rank_exact_cases:draws", count)[1]
    for number, (_, classes, _, _) in enumerate(DRAWS):
        p, ids = found[number]["left"].double().exp(), found[number]["ids"]
        hits = torch.zeros(10, classes).double().scatter_add_(1, ids, torch.ones_like(ids).double())
        assert (hits[p == 0] == 0).all()
        often = p * count >= 5  # the others count as one class
        terms = torch.where(often, (hits - p * count).square() / (p * count).clamp_min(5), 0.0).sum(1)
        rare, seen = (torch.where(often, 0.0, t).sum(1) for t in (p * count, hits))
        chi = terms + torch.where(rare >= 5, (seen - rare).square() / rare.clamp_min(5), 0.0)
        assert ((seen - rare).abs() < 5 * rare.clamp_min(1).sqrt() + 5).all()
        freedom = (often.sum(1).double() - 1 + (rare >= 5)).clamp_min(1)
        assert ((chi - freedom) / (2 * freedom).sqrt()).max() < 5


@pytest.mark.parametrize("kind", ["read", "copied", "mixture"])
def test_a_sampler_keeps_up_with_the_sharded_table(ranks, kind):
    """With the distribution of the model itself any draw gives the exact loss (Blanc & Rendle 2018, Theorem 1)."""
    of = {world: ranks.run(world, "rank_exact_cases:train", kind, kind != "copied") for world in (1, 3, 4)}
    for found in of.values():
        for rank in found:
            assert torch.equal(rank["log_q"], found[0]["log_q"])
            assert rank["losses"] == found[0]["losses"]
            assert rank["losses"][0][1] == pytest.approx(of[1][0]["losses"][0][1], abs=1e-5)  # later draws differ
            if kind != "mixture":
                for sampled, exact in rank["losses"]:
                    assert sampled == pytest.approx(exact, abs=1e-5)
    if kind == "mixture":
        torch.testing.assert_close(of[3][0]["log_q"], of[1][0]["log_q"], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("kind", ["copied", "mixture"])
def test_a_checkpoint_has_the_sampler(ranks, kind, tmp_path):
    for before, after, _ in ranks.run(3, "rank_exact_cases:resumed", kind, str(tmp_path / "c")):
        assert torch.equal(before, after)
