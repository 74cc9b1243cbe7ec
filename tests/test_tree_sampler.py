"""The tree as a person uses it: fitted to data, drawn from, trained with, refitted."""

from __future__ import annotations

import math

import pytest
import torch

import samplex_cuda as sx
from samplex_cuda.data import HierarchicalZipf
from samplex_cuda.samplers import Tree

CLASSES, WIDTH, EXAMPLES = 120, 24, 4000


@pytest.fixture(scope="module")
def data():
    made = HierarchicalZipf(num_classes=CLASSES, dim=WIDTH, num_examples=EXAMPLES, seed=3, num_valid=1000)
    x, y = (torch.cat(part) for part in zip(*made.batches("train", batch_size=1000), strict=True))
    held_x, held_y = (torch.cat(part) for part in zip(*made.batches("valid", batch_size=1000), strict=True))
    return x, y, held_x, held_y


@pytest.fixture(scope="module")
def tree(data):
    return Tree.fit(data[0], data[1], num_classes=CLASSES, dim=8, progress=False)


def test_a_fitted_tree_knows_more_than_frequencies(data, tree):
    _, y, held_x, held_y = data
    frequency = ((torch.bincount(y, minlength=CLASSES) + 1.0) / (len(y) + CLASSES)).log()
    got = tree.log_prob(held_x, held_y).mean()
    assert got > frequency[held_y].mean() + 1.0
    assert torch.allclose(tree.log_prob_all(held_x[:50]).exp().sum(1), torch.ones(50), atol=1e-5)


def test_what_the_fit_says_is_what_the_sampler_gives(data, tree):
    """The report's mean log p_n is that of the packed, projected, sampled tree."""
    x, y, _, _ = data
    said = next(
        line for line in tree.describe().splitlines() if line.split()[:1] == ["tree"] and len(line.split()) == 2
    )
    assert abs(float(tree.log_prob(x, y).double().mean()) - float(said.split()[1])) < 2e-4


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_sparse_features_give_the_same_tree(data):
    x, y = data[0].clone(), data[1]
    x[x.abs() < 0.1] = 0.0
    dense = Tree.fit(x, y, num_classes=CLASSES, dim=6, progress=False)
    sparse = Tree.fit(x.to_sparse_csr(), y, num_classes=CLASSES, dim=6, progress=False)
    a, b = dense.log_prob(x, y), sparse.log_prob(x, y)
    assert abs(float(a.mean() - b.mean())) < 1e-2
    assert torch.allclose(dense.mean, sparse.mean, atol=1e-5)


def test_same_seed_same_tree(data, tree):
    again = Tree.fit(data[0], data[1], num_classes=CLASSES, dim=8, progress=False)
    assert all(torch.equal(a, b) for a, b in zip(tree.state_dict().values(), again.state_dict().values(), strict=True))


def test_refit_replaces_the_tree_or_nothing(data):
    x, y, _, _ = data
    tree = Tree.fit(x[:500], y[:500], num_classes=CLASSES, dim=4, reg=0.3, progress=False)
    before = {name: value.clone() for name, value in tree.state_dict().items()}
    with pytest.raises(ValueError, match="x must be"):
        tree.refit(x[:, :5], y, progress=False)
    with pytest.raises(IndexError):
        tree.refit(x, y + CLASSES, progress=False)
    assert all(torch.equal(before[name], value) for name, value in tree.state_dict().items())
    few = float(tree.log_prob(x, y).mean())
    assert tree.refit(x, y, progress=False) is tree
    assert float(tree.log_prob(x, y).mean()) > few
    assert "reg 0.3" in tree.describe()


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of torch's Adagrad
def test_training_with_the_tree(data, tree):
    x, y, held_x, held_y = data
    torch.manual_seed(0)
    head = sx.SampledClassifier(WIDTH, CLASSES, tree, num_samples=2, loss=sx.losses.NegativeSampling(1e-3))
    torch.nn.init.zeros_(head.weight)
    torch.nn.init.zeros_(head.bias)
    optimizer = torch.optim.Adagrad(head.parameters(), lr=0.3)
    for _ in range(150):
        rows = torch.randint(len(y), (128,))
        optimizer.zero_grad()
        head(x[rows], y[rows]).backward()
        optimizer.step()
    head.eval()
    raw, corrected = head.scores(held_x, corrected=False), head.scores(held_x)
    torch.testing.assert_close(corrected - raw, tree.log_prob_all(held_x), atol=1e-4, rtol=1e-4)
    right = float((head.predict(held_x) == held_y).float().mean())
    tree_alone = float((tree.topk(held_x, 1)[1].squeeze(1) == held_y).float().mean())
    assert right > float((raw.argmax(1) == held_y).float().mean())
    assert right > tree_alone


def test_sampled_softmax_with_the_tree_as_proposal(data):
    """The sampled loss with many draws from a tree comes near the exact one: log_q is conditional.

    A strong regularizer keeps the tree flat; a sharp one would need far more draws to see what it deems unlikely.
    """
    x, y, _, _ = data
    tree = Tree.fit(x, y, num_classes=CLASSES, dim=4, reg=200.0, progress=False)
    assert float(tree.log_prob_all(x[:32]).std()) > 0.3  # still far from uniform
    torch.manual_seed(1)
    head = sx.SampledClassifier(WIDTH, CLASSES, tree, num_samples=4000)
    sampled = head(x[:32], y[:32]).detach()
    head.eval()
    assert abs(float(sampled - head(x[:32], y[:32]))) < 0.03


def test_features_may_differ_from_h(data, tree):
    x, y, _, _ = data
    head = sx.SampledClassifier(5, CLASSES, tree, num_samples=3, loss="negative_sampling")
    h = torch.randn(7, 5)
    draw, of_target = tree.sample_and_score(x[:7], 3, y[:7], key=sx.Key(1))
    want = sx.functional.negative_sampling(h, head.weight, y[:7], draw.ids, draw.log_q, of_target, head.bias)
    torch.testing.assert_close(head(h, y[:7], features=x[:7], key=sx.Key(1)), want)
    assert head.eval().topk(h, 2, features=x[:7])[1].shape == (7, 2)


ERRORS = {
    "labels": (lambda x, y: (x, y + 1), {}, IndexError, "y must be in [0, 3)"),
    "lengths": (lambda x, y: (x, y[:-1]), {}, ValueError, "must have the same length, got 6 and 5"),
    "dim": (lambda x, y: (x, y), {"dim": 9}, ValueError, "dim"),
    "no rows": (lambda x, y: (x[:0], y[:0]), {}, ValueError, "x must"),
    "nan": (lambda x, y: (x * math.nan, y), {}, ValueError, "x must be finite"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_bad_input(name):
    change, options, kind, text = ERRORS[name]
    x, y = change(torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2]))
    with pytest.raises(kind) as caught:
        Tree.fit(x, y, **{"num_classes": 3, "dim": 2, "progress": False} | options)
    assert text in str(caught.value)


def test_sample_and_score_is_sample_and_log_prob():
    x, y = torch.randn(200, 6), torch.randint(0, 10, (200,))
    tree = sx.samplers.Tree.fit(x, y, num_classes=10, dim=3, progress=False)
    h, target = torch.randn(2, 4, 6), torch.randint(0, 10, (8,))
    draw, log_p = tree.sample_and_score(h, 5, target, key=sx.Key(3))
    alone = tree.sample(h, 5, key=sx.Key(3))
    assert torch.equal(draw.ids, alone.ids)
    assert torch.equal(draw.log_q, alone.log_q)
    assert torch.equal(log_p, tree.log_prob(h, target))
    assert tree.sample_and_score(h, 5, target.view(4, 2).repeat(2, 1))[1].shape == (8, 2)
    static = sx.samplers.Unigram(torch.arange(1.0, 11.0))
    draw, log_p = static.sample_and_score(h, 5, target, key=sx.Key(3))
    assert torch.equal(draw.ids, static.sample(h, 5, key=sx.Key(3)).ids)
    assert torch.equal(log_p, static.log_prob(h, target))
    draw, log_p = tree.sample_and_score(h, 5, target, shared=True, key=sx.Key(3))
    assert torch.equal(draw.ids, tree.sample(h, 5, shared=True, key=sx.Key(3)).ids)
    assert torch.equal(log_p, tree.log_prob_shared(h, target))
    with pytest.raises(IndexError, match=r"ids must be in \[0, 10\)"):
        tree.sample_and_score(h, 5, target + 10)
