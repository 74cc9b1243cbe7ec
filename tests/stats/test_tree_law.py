"""Draws of the tree against their distribution: chi-square over the classes, with and without an excluded class."""

from __future__ import annotations

import pytest
import torch
from scipy import stats

import samplex_cuda as sx
from samplex_cuda.samplers import Tree

CLASSES, DRAWS = 12, 60_000


def tree_of_twelve() -> Tree:
    """16 leaves, the last 4 padding: the right child of the right child of the root."""
    g = torch.Generator().manual_seed(0)
    weights, bias = torch.randn(16, 3, generator=g), torch.randn(16, generator=g) * 0.5
    leaf_class = torch.cat([torch.randperm(CLASSES, generator=g), torch.full((4,), -1)])
    weights[3], bias[3] = 0.0, -float("inf")
    for node in (7, 14, 15):
        weights[node], bias[node] = 0.0, 0.0
    return Tree(weights, bias, leaf_class)


@pytest.mark.parametrize("excluded", [[], [4], [0, 7, 9]])
def test_chi_square(excluded):
    tree, x = tree_of_twelve(), torch.randn(3, 3, generator=torch.Generator().manual_seed(1))
    exclude = torch.tensor([excluded] * 3) if excluded else None
    draw = tree.sample(x, DRAWS, key=sx.Key(7), exclude=exclude)
    p = tree.log_prob(x, torch.arange(CLASSES).expand(3, -1), exclude=exclude).double().exp()
    for row in range(3):
        counts = torch.bincount(draw.ids[row], minlength=CLASSES)
        possible = p[row] > 0
        assert counts[~possible].sum() == 0
        expected = p[row][possible] / p[row][possible].sum() * DRAWS
        assert stats.chisquare(counts[possible].numpy(), expected.numpy()).pvalue > 1e-3


def test_rows_and_draws_are_independent():
    """Neighbouring draws and neighboring rows share Philox blocks in no way: their agreement is that of chance."""
    tree, x = tree_of_twelve(), torch.zeros(2, 3)
    draw = tree.sample(x, DRAWS, key=sx.Key(8)).ids
    p = tree.log_prob_all(x)[0].double().exp()
    chance = float((p * p).sum())
    spread = 4 * (chance * (1 - chance) / DRAWS) ** 0.5
    assert abs(float((draw[0, 1:] == draw[0, :-1]).double().mean()) - chance) < spread
    assert abs(float((draw[0] == draw[1]).double().mean()) - chance) < spread
