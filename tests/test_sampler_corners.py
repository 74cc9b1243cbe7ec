"""Samplers with nothing to draw for, and made where tensors have no numbers."""

from __future__ import annotations

import pytest
import torch

import samplex_cuda as sx
from samplex_cuda.samplers import (
    MIDX,
    Bigram,
    LogUniform,
    Mixture,
    Quadratic,
    RandomFourier,
    Softmax,
    Tree,
    Uniform,
    Unigram,
)

C, D = 10, 4
WEIGHT = torch.randn(C, D, generator=torch.Generator().manual_seed(1))
TOKENS = [0, 1, 0, 2, -1, 1, 9]


def tree() -> Tree:
    g = torch.Generator("cpu").manual_seed(2)
    x, y = torch.randn(50, D, generator=g, device="cpu"), torch.randint(0, C, (50,), generator=g, device="cpu")
    return Tree.fit(x, y, num_classes=C, dim=2, progress=False)


SAMPLERS = {
    "uniform": lambda: Uniform(C),
    "log_uniform": lambda: LogUniform(C),
    "unigram": lambda: Unigram([1.0] * C),
    "bigram": lambda: Bigram.from_tokens(TOKENS, C),
    "tree": tree,
    "quadratic": lambda: Quadratic(WEIGHT),
    "fourier": lambda: RandomFourier(WEIGHT, 8, 0.5, key=sx.Key(1)),
    "midx": lambda: MIDX(WEIGHT, 4, key=sx.Key(1)),
    "softmax": lambda: Softmax(WEIGHT),
    "static mixture": lambda: Mixture([(Uniform(C), 1), (Unigram([1.0] * C), 1)]),
    "mixture": lambda: Mixture([(Uniform(C), 1), (Quadratic(WEIGHT), 1), (tree(), 1)]),
}
NONE = torch.empty(0, dtype=torch.int64)
EXCLUDES = {
    "one": NONE,
    "several": NONE.reshape(0, 3),
    "no column": NONE.reshape(0, 0),
    "csr": (torch.zeros(1, dtype=torch.int64), NONE),
    "none": None,
}


@pytest.mark.parametrize("exclude", EXCLUDES)
@pytest.mark.parametrize("name", SAMPLERS)
def test_an_empty_batch(name, exclude):
    sampler, h = SAMPLERS[name](), torch.empty(0, D)
    context = {"context": NONE} if name == "bigram" else {}
    for count in (0, 5):
        draw = sampler.sample(h, count, exclude=EXCLUDES[exclude], **context)
        assert draw.ids.shape == draw.log_q.shape == (0, count)
    found = sampler.log_prob(h, NONE.reshape(0, 3), exclude=EXCLUDES[exclude], **context)
    assert found.shape == (0, 3)


@pytest.mark.parametrize("name", SAMPLERS)
def test_samplers_of_given_numbers_ignore_the_default_device(name):
    """`with torch.device("meta")` is for parameters that are loaded later; counts and rows are there already."""
    here = SAMPLERS[name]()
    with torch.device("meta"):
        sampler = SAMPLERS[name]()
    if name in ("uniform", "log_uniform"):
        return  # no numbers at all
    assert all(not t.is_meta for t in sampler.state_dict().values())
    context = {"context": torch.tensor([0, 1])} if name == "bigram" else {}
    h = torch.ones(2, D)
    a, b = (s.sample(h, 6, key=sx.Key(3), **context) for s in (here, sampler))
    assert torch.equal(a.ids, b.ids)


def test_a_head_on_meta_is_materialized_and_loaded():
    torch.manual_seed(1)
    saved = sx.SampledClassifier(D, C, Unigram([1.0] * C), num_samples=3)
    with torch.device("meta"):
        head = sx.SampledClassifier(D, C, Unigram([1.0] * C), num_samples=3)
    assert head.weight.is_meta
    head.load_state_dict(saved.state_dict(), assign=True)
    h, y = torch.randn(2, D), torch.tensor([1, 2])
    assert torch.equal(head(h, y, key=sx.Key(1)), saved(h, y, key=sx.Key(1)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Unigram(torch.ones(C)), "unigram: counts must have values"),
        (lambda: Quadratic(torch.ones(C, D)), "quadratic: weight must have values"),
        (lambda: Tree(torch.zeros(2, 1), torch.zeros(2), torch.tensor([0, 1])), "tree: weights must have values"),
    ],
)
def test_tables_without_numbers_are_refused(make, message):
    with torch.device("meta"), pytest.raises(ValueError, match=rf"{message}, got .* on meta; create it outside"):
        make()
