"""Draws of the kernel trees against exact q: chi-square with fixed keys, independence, the bound that epsilon gives."""

from __future__ import annotations

import warnings

import pytest
import torch
from scipy import stats
from torch.nn.functional import normalize

import samplex_cuda as sx

CLASSES, DRAWS = 60, 40_000


def make(name: str) -> sx.samplers.KernelSampler:
    weight = normalize(torch.randn(CLASSES, 6, generator=torch.Generator().manual_seed(0)), dim=1)
    if name == "quadratic":
        return sx.samplers.Quadratic(weight)
    features, nu = (24, 4.0) if name == "clipped" else (64, 1.0)
    kind = "rff" if name == "clipped" else name
    return sx.samplers.RandomFourier(weight, features, nu, kind, epsilon=0.05, key=sx.Key(2))


@pytest.mark.parametrize("excluded", [[], [4], [0, 7, 9, 10, 11, 58]])
@pytest.mark.parametrize("name", ["quadratic", "rff", "orf", "positive", "clipped"])
def test_chi_square(name, excluded):
    sampler = make(name)
    h = normalize(torch.randn(3, 6, generator=torch.Generator().manual_seed(1)), dim=1)
    exclude = torch.tensor([excluded] * 3) if excluded else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        draw = sampler.sample(h, DRAWS, key=sx.Key(7), exclude=exclude)
    p = sampler.log_prob(h, torch.arange(CLASSES).expand(3, -1), exclude=exclude).double().exp()
    assert torch.allclose(p.sum(1), torch.ones(3, dtype=torch.float64), atol=1e-6)
    for row in range(3):
        counts = torch.bincount(draw.ids[row], minlength=CLASSES)
        possible = p[row] > 0
        assert counts[~possible].sum() == 0
        expected = p[row][possible] / p[row][possible].sum() * DRAWS
        assert stats.chisquare(counts[possible].numpy(), expected.numpy()).pvalue > 1e-3


def test_rows_and_draws_are_independent():
    sampler, h = make("rff"), torch.zeros(2, 6)
    draw = sampler.sample(h, DRAWS, key=sx.Key(8)).ids
    p = sampler.log_prob_all(h)[0].double().exp()
    chance = float((p * p).sum())
    spread = 4 * (chance * (1 - chance) / DRAWS) ** 0.5
    assert abs(float((draw[0, 1:] == draw[0, :-1]).double().mean()) - chance) < spread
    assert abs(float((draw[0] == draw[1]).double().mean()) - chance) < spread


def test_the_estimate_of_the_normaliser_is_unbiased():
    """E[sum exp o'] = sum of exp o over all classes, with clipped estimates and a uniform part."""
    sampler = make("clipped")
    h = normalize(torch.randn(1, 6, generator=torch.Generator().manual_seed(3)), dim=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        draw = sampler.sample(h, DRAWS, key=sx.Key(9))
    o = 4.0 * (h @ sampler.rows[:, :6].T).double()
    weight = (o.gather(1, draw.ids) - draw.log_q.double()).exp()
    error = float(weight.std() / DRAWS**0.5)
    assert abs(float(weight.mean() - o.exp().sum())) < 4 * error


def test_epsilon_bounds_the_weights():
    """q >= epsilon / n, so exp(o) / q is at most n exp(max o) / epsilon, however bad the estimates are."""
    sampler = make("clipped")
    h = normalize(torch.randn(20, 6, generator=torch.Generator().manual_seed(4)), dim=1)
    q = sampler.log_prob_all(h).double().exp()
    assert q.min() >= 0.05 / CLASSES * (1 - 1e-6)
    assert q.min() < 0.06 / CLASSES  # there are clipped classes
