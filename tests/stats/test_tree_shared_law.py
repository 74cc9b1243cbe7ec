"""Shared draws of the tree against their distribution: chi-square over the classes, and draws that are independent."""

from __future__ import annotations

import pytest
import torch
from scipy import stats

from samplex_cuda.ops.tree import pack_nodes
from samplex_cuda.ops.tree_shared import tree_log_prob_shared, tree_sample_shared
from samplex_cuda.reference.tree_shared import log_prob_shared

CLASSES, DRAWS = 12, 60_000


def tree_of_twelve() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """16 leaves, the last 4 padding: the right child of the right child of the root."""
    g = torch.Generator().manual_seed(0)
    weights, bias = torch.randn(16, 3, generator=g) * 2, torch.randn(16, generator=g) * 0.5
    leaf_class = torch.cat([torch.randperm(CLASSES, generator=g), torch.full((4,), -1)])
    weights[3], bias[3] = 0.0, -float("inf")
    return weights, bias, leaf_class


def ops_tables(weights: torch.Tensor, bias: torch.Tensor, leaf_class: torch.Tensor) -> tuple[torch.Tensor, ...]:
    class_leaf = torch.empty(CLASSES, dtype=torch.int64)
    class_leaf[leaf_class[leaf_class >= 0]] = (leaf_class >= 0).nonzero().flatten()
    return pack_nodes(weights, bias), leaf_class, class_leaf


def rows(batch: int) -> torch.Tensor:
    return torch.randn(batch, 3, generator=torch.Generator().manual_seed(batch))


@pytest.mark.parametrize("batch", [1, 2, 5, 70])
def test_chi_square(batch):
    parameters, x = tree_of_twelve(), rows(batch)
    ids, _ = tree_sample_shared(torch.tensor([7, 0]), x, *ops_tables(*parameters), DRAWS)
    p = log_prob_shared(x, *parameters).exp()
    counts = torch.bincount(ids, minlength=CLASSES)
    assert stats.chisquare(counts.numpy(), (p / p.sum() * DRAWS).numpy()).pvalue > 1e-3


def test_chi_square_without_the_rows_that_have_no_law():
    parameters, x = tree_of_twelve(), rows(9)
    x[[1, 4, 8], [0, 1, 2]] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    ids, _ = tree_sample_shared(torch.tensor([8, 0]), x, *ops_tables(*parameters), DRAWS)
    p = log_prob_shared(x[[0, 2, 3, 5, 6, 7]], *parameters).exp()
    counts = torch.bincount(ids, minlength=CLASSES)
    assert stats.chisquare(counts.numpy(), (p * DRAWS).numpy()).pvalue > 1e-3


def test_weights_of_draws_average_to_one():
    """E[1 / q] over the draws is the number of classes: log_q is of the distribution that is drawn from."""
    parameters, x = tree_of_twelve(), rows(5)
    tables = ops_tables(*parameters)
    _, log_q = tree_sample_shared(torch.tensor([9, 0]), x, *tables, DRAWS)
    q = tree_log_prob_shared(x, torch.arange(CLASSES), *tables).double().exp()
    spread = float((1 / q).sum() - CLASSES**2) ** 0.5 / DRAWS**0.5
    assert abs(float((-log_q.double()).exp().mean()) - CLASSES) < 4 * spread


def test_draws_and_keys_are_independent():
    """Neighbouring draws, and the draws of two keys, agree as often as chance has it."""
    parameters, x = tree_of_twelve(), rows(2)
    tables = ops_tables(*parameters)
    one, _ = tree_sample_shared(torch.tensor([8, 0]), x, *tables, DRAWS)
    two, _ = tree_sample_shared(torch.tensor([8, 1]), x, *tables, DRAWS)
    chance = float((log_prob_shared(x, *parameters).exp() ** 2).sum())
    spread = 4 * (chance * (1 - chance) / DRAWS) ** 0.5
    assert abs(float((one[1:] == one[:-1]).double().mean()) - chance) < spread
    assert abs(float((one == two).double().mean()) - chance) < spread


@pytest.mark.parametrize("m", [1, 5, 30])
def test_strata_have_the_law_in_expectation(m):
    """Each class comes m q times on average over the keys, one that is rarer than a stratum too."""
    parameters, x = tree_of_twelve(), rows(4)
    tables, keys = ops_tables(*parameters), 4000
    counts = torch.zeros(keys, CLASSES, dtype=torch.float64)
    for number in range(keys):
        ids, _ = tree_sample_shared(torch.tensor([3, number]), x, *tables, m, True)
        counts[number] = ids.bincount(minlength=CLASSES)
    want = m * log_prob_shared(x, *parameters).exp()
    often = want * keys > 50  # others are too rare for a spread of their own; theirs is that of independent draws
    assert int(often.sum()) >= 4
    independent = want * (1 - want / m)
    error = (torch.where(often, counts.var(0), independent) / keys).sqrt()
    assert bool(((counts.mean(0) - want).abs() <= 4.5 * error + 1e-9).all())
    # Strata never vary more than independent draws: m q (1 - q).
    assert bool((counts.var(0)[often] <= 1.25 * independent[often]).all())
    if m == 30:
        assert float(counts.var(0).sum()) < 0.35 * float(independent.sum())
