"""Static samplers: chi-square at small C, exact moments at large C, and defects others have had.

Keys are fixed, so a test either always passes or never does. The bound on a p-value is 1e-4: a wrong distribution
misses it by hundreds of orders of magnitude, a right one with another key would miss it once in 10,000.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

import samplex_cuda as sx
from samplex_cuda.reference import static_sample as reference

pytestmark = pytest.mark.stat

COUNTS = [5, 0, 1, 2, 0, 7, 100, 3, 0, 1, 1, 9]
SAMPLERS = {
    "uniform": (lambda: sx.samplers.Uniform(12), np.ones(12)),
    "log_uniform": (lambda: sx.samplers.LogUniform(12), reference.log_uniform_weights(12)),
    "unigram": (lambda: sx.samplers.Unigram(COUNTS), np.array(COUNTS, dtype=float)),
    "unigram_power": (lambda: sx.samplers.Unigram(COUNTS, power=0.5), np.sqrt(COUNTS)),
}
EXCLUDED = {
    "nothing": [[], [], []],
    "target": [[6], [0], [11]],
    "some": [[6, 0, 5], [2, 2, 3], [11, 0, 1]],
    # Rejection gives up now and then. test_chi_square_of_the_inversion is about that path alone.
    "heavy": [[0, 1, 5, 6, 7, 11], [0, 1, 2, 3, 4, 5, 6, 7, 8, 11], [6, 0, 11, 5, 7, 3, 3]],
}
FORMS = ["padded", "csr"]


def as_exclude(rows, form):
    if form == "csr":
        offsets = np.cumsum([0, *map(len, rows)])
        return torch.tensor(offsets), torch.tensor([k for row in rows for k in row], dtype=torch.int64)
    width = max(map(len, rows))
    return torch.tensor([row + [-1] * (width - len(row)) for row in rows], dtype=torch.int64).view(len(rows), width)


def chi_square(ids, probability):
    """p-value of the draws; impossible classes must not occur at all."""
    seen = np.bincount(ids.numpy().ravel(), minlength=len(probability))
    assert seen[probability == 0].sum() == 0
    possible = probability > 0
    if possible.sum() == 1:
        return 1.0
    return stats.chisquare(seen[possible], probability[possible] * seen.sum()).pvalue


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("excluded", EXCLUDED)
@pytest.mark.parametrize("form", FORMS)
def test_chi_square(name, excluded, form):
    make, weights = SAMPLERS[name]
    rows = EXCLUDED[excluded]
    exclude = None if excluded == "nothing" else as_exclude(rows, form)
    draw = make().sample(None, 50_000, batch_size=3, key=sx.Key(11), exclude=exclude)
    for b, row in enumerate(rows):
        assert chi_square(draw.ids[b], reference.conditional(weights, row)) > 1e-4


@pytest.mark.parametrize("law", ["uniform", "log_uniform", "unigram"])
def test_chi_square_of_the_inversion(law):
    """Several far gaps with almost no mass are left: nearly every draw exhausts its attempts and is inverted."""
    C, left = 1000, [500, 501, 700, 900, 901, 902, 903, 999]
    counts = np.full(C, 1e6)
    counts[left] = [1, 2, 3, 0, 5, 6, 7, 8]
    sampler, weights = {
        "uniform": (sx.samplers.Uniform(C), np.ones(C)),
        "log_uniform": (sx.samplers.LogUniform(C), reference.log_uniform_weights(C)),
        "unigram": (sx.samplers.Unigram(counts), counts),
    }[law]
    excluded = [k for k in range(C) if k not in left]
    draw = sampler.sample(None, 100_000, exclude=torch.tensor([excluded]), key=sx.Key(21))
    assert chi_square(draw.ids, reference.conditional(weights, excluded)) > 1e-4


def test_chi_square_notices_a_wrong_law():
    """The measure itself: two probabilities off by 0.02."""
    weights = np.array(COUNTS, dtype=float)
    draw = sx.samplers.Unigram(COUNTS).sample(None, 50_000, batch_size=1, key=sx.Key(11))
    wrong = reference.conditional(weights)
    wrong[[2, 6]] += [0.02, -0.02]
    assert chi_square(draw.ids, wrong) < 1e-20


@pytest.mark.parametrize("name", SAMPLERS)
def test_draws_are_independent(name):
    """Pairs of neighboring draws, of neighboring rows and of successive keys have the product distribution."""
    make, weights = SAMPLERS[name]
    p = reference.conditional(weights)
    key = sx.Key(5)
    first, second = (make().sample(None, 200, batch_size=400, key=key).ids for _ in range(2))
    product = np.outer(p, p).ravel()
    for a, b in ((first[:, :-1:2], first[:, 1::2]), (first[:-1:2], first[1::2]), (first, second)):
        pairs = a * len(p) + b
        # Few-count cells would spoil the approximation: pool them.
        rare = product * pairs.numel() < 8
        seen = np.bincount(pairs.numpy().ravel(), minlength=len(product))
        assert seen[product == 0].sum() == 0
        observed = np.append(seen[~rare], seen[rare].sum())
        expected = np.append(product[~rare], product[rare].sum()) * pairs.numel()
        observed, expected = observed[expected > 0], expected[expected > 0]
        assert stats.chisquare(observed, expected).pvalue > 1e-4


def test_shared_draws_have_the_law():
    for make, weights in SAMPLERS.values():
        ids = make().sample(None, 100_000, shared=True, key=sx.Key(3)).ids
        assert chi_square(ids, reference.conditional(weights)) > 1e-4


# ------------------------------------------------------------------------------------------------ large C
def z_score(values, mean, variance):
    return abs(values.mean() - mean) / np.sqrt(variance / values.size)


@pytest.mark.parametrize("C", [10**9, 10**12, 2**52])
def test_log_uniform_large(C):
    """log(k+1) has distribution function log(k+2)/log(C+1) at k: compare on a grid and by the mean of the log."""
    draw = sx.samplers.LogUniform(C).sample(None, 1000, batch_size=400, key=sx.Key(1))
    ids = draw.ids.numpy().ravel()
    assert ids.min() >= 0
    assert ids.max() < C
    edges = np.unique(np.logspace(0, np.log10(C), 40, base=10.0).astype(np.int64))  # id < edge
    edges[-1] = C
    law = np.diff(np.concatenate([[0.0], np.log1p(edges.astype(float)) / np.log1p(float(C))]))
    seen = np.diff(np.concatenate([[0], np.searchsorted(np.sort(ids), edges)]))
    assert stats.chisquare(seen, law * ids.size).pvalue > 1e-4
    n = ids.astype(np.longdouble) + 1
    wanted = np.log(np.log1p(1 / n)) - np.log(np.log1p(np.longdouble(C)))
    np.testing.assert_allclose(draw.log_q.numpy().ravel(), wanted.astype(np.float64), rtol=1.2e-7)


def test_log_uniform_importance_weights():
    """The mean of 1/q over draws is C, if log_q is that of the draws. 1/q is bounded by C log(C+1)/log 2."""
    C = 10**6
    draw = sx.samplers.LogUniform(C).sample(None, 1000, batch_size=1000, key=sx.Key(2))
    weight = np.exp(-draw.log_q.double().numpy().ravel())
    q = reference.log_uniform_weights(C) / np.log1p(C)
    variance = (1 / q).sum() - float(C) ** 2
    assert z_score(weight, C, variance) < 4


def test_uniform_large():
    C = (1 << 52) - 12345
    draw = sx.samplers.Uniform(C).sample(None, 1000, batch_size=400, key=sx.Key(3))
    ids = draw.ids.numpy().ravel()
    assert stats.kstest((ids + 0.5) / C, "uniform").pvalue > 1e-4
    assert draw.log_q.unique().item() == np.float32(-np.log(C))
    # Low bits too: 53-bit floating point would leave them uneven.
    assert stats.chisquare(np.bincount(ids % 16, minlength=16)).pvalue > 1e-4


def test_uniform_skips_a_long_list():
    C = 10**9
    rng = np.random.default_rng(0)
    excluded = torch.from_numpy(rng.integers(0, C, (2, 3000)))
    excluded[1, :1500] = torch.arange(1500)  # with or without duplicates in row 0, and a dense run in row 1
    excluded[0, :100] = excluded[0, 100:200]
    draw = sx.samplers.Uniform(C).sample(None, 100_000, exclude=excluded, key=sx.Key(4))
    for b in range(2):
        assert not np.isin(draw.ids[b].numpy(), excluded[b].numpy()).any()
        left = C - len(np.unique(excluded[b].numpy()))
        assert draw.log_q[b].unique().item() == np.float32(-np.log(left))
        assert stats.kstest(draw.ids[b].numpy() / C, "uniform").pvalue > 1e-4


@pytest.fixture(scope="module")
def large_unigram():
    C = 17_000_000  # > 2^24 = 16,777,216
    counts = (np.arange(C) * 2654435761 % 1000).astype(np.float64)
    counts[: C // 2] = 0
    return counts, sx.samplers.Unigram(counts)


def test_unigram_beyond_2_24(large_unigram):
    counts, sampler = large_unigram
    C, total = len(counts), counts.sum()
    draw = sampler.sample(None, 1000, batch_size=500, key=sx.Key(6), exclude=torch.full((500,), C - 1))
    ids = draw.ids.numpy().ravel()
    assert counts[ids].min() > 0
    np.testing.assert_allclose(draw.log_q.numpy().ravel(), np.log(counts[ids] / (total - counts[C - 1])), rtol=1.2e-7)
    # The distribution of the counts drawn, and where they lie.
    values = np.bincount(counts.astype(np.int64), minlength=1000) * np.arange(1000.0) / total
    seen = np.bincount(counts[ids].astype(np.int64), minlength=1000)
    assert stats.chisquare(seen[1:], values[1:] * ids.size, ddof=0).pvalue > 1e-4
    assert stats.kstest((ids - C / 2) / (C / 2), "uniform").pvalue > 1e-4
    assert (ids > 2**24).mean() == pytest.approx(counts[2**24 + 1 :].sum() / total, rel=0.05)
    assert (ids % 2 == 1).any()
    assert np.unique(ids[ids > 2**24] % 4).tolist() == [0, 1, 2, 3]  # float32 would leave even ids only


def test_unigram_beyond_2_24_inverts(large_unigram):
    """Nearly all mass excluded through a head added to the same counts: the inversion finds single classes."""
    counts, sampler = large_unigram
    heavy = np.array([1e15, 1.0, 2.0, 0.0, 1e15, 5.0])
    draw = sx.samplers.Unigram(heavy).sample(None, 80_000, exclude=torch.tensor([[0, 4]]), key=sx.Key(8))
    assert chi_square(draw.ids, np.array([0, 1, 2, 0, 0, 5]) / 8) > 1e-4
    # 1 - p would have left 8 / 2e15 with an error of 5 %.
    np.testing.assert_allclose(draw.log_q.exp().double().numpy(), heavy[draw.ids.numpy()] / 8, rtol=1e-6)
    last = len(counts) - 1
    assert sampler.log_prob(None, torch.tensor([last])).item() == pytest.approx(np.log(counts[last] / counts.sum()))


# ------------------------------------------------------------------------------------------------ defects of others
def test_tail_ids_are_not_cut_off():
    """`unique()[:n]` sorts by id and drops the tail: ids above 30,000 of 100,000 were never drawn."""
    C = 100_000
    draw = sx.samplers.LogUniform(C).sample(None, 160, batch_size=2000, key=sx.Key(9))
    ids = draw.ids.numpy().ravel()
    for low, high in ((1000, 10_000), (10_000, 30_000), (30_000, C)):
        p = np.log((high + 1) / (low + 1)) / np.log(C + 1)
        assert abs(((ids >= low) & (ids < high)).mean() - p) < 4 * np.sqrt(p * (1 - p) / ids.size)


def test_no_class_collapses_to_probability_zero():
    """fp32 log(i+1) - log(i) is exactly 0 for 66 % of the classes at C = 1e7."""
    C = 10**7
    sampler = sx.samplers.LogUniform(C)
    log_p = sampler.log_prob_all()[0].double().numpy()
    assert np.isfinite(log_p).all()
    exact = np.log(reference.log_uniform_weights(C)) - np.log(np.log1p(C))
    np.testing.assert_allclose(log_p, exact, rtol=1.2e-7)
    assert np.exp(log_p).sum() == pytest.approx(1.0, rel=1e-6)
    ids = sampler.sample(None, 1000, batch_size=1000, key=sx.Key(10)).ids.numpy().ravel()
    tail = ids >= 5 * 10**6
    p = np.log((C + 1) / (5 * 10**6 + 1)) / np.log(C + 1)
    assert abs(tail.mean() - p) < 4 * np.sqrt(p * (1 - p) / ids.size)
    assert len(np.unique(ids[tail] % 64)) == 64


def test_small_probabilities_are_not_clipped():
    """A floor of 1e-6 under p moves log_q by up to 5 nats at C = 1e7 under Zipf's law."""
    C = 10**6
    zipf = 1 / np.arange(1.0, C + 1)
    sampler = sx.samplers.Unigram(zipf)
    got = sampler.log_prob_all()[0].double().numpy()
    np.testing.assert_allclose(got, np.log(zipf / zipf.sum()), rtol=1.2e-7)
    assert got.min() < np.log(1e-7)


def test_ids_beyond_float32_keep_their_value():
    """16777217 through float32 is 16777216; 99999999 is 100000000."""
    for target in (16_777_217, 99_999_999):
        sampler = sx.samplers.Uniform(target + 1)
        ids = sampler.sample(None, 1000, batch_size=200, key=sx.Key(12)).ids
        assert (ids % 2 == 1).float().mean().item() == pytest.approx(0.5, abs=0.01)
        assert sampler.log_prob(None, torch.tensor([target]), exclude=torch.tensor([target])).item() == -np.inf
        assert np.isfinite(sampler.log_prob(None, torch.tensor([target - 1]), exclude=torch.tensor([target])).item())


def test_zero_count_classes_never_come():
    counts = torch.zeros(5000)
    counts[::7] = torch.rand(715, generator=torch.Generator().manual_seed(0)) + 1e-3
    sampler = sx.samplers.Unigram(counts)
    exclude = torch.arange(0, 5000, 7)[torch.arange(1000) % 715]
    ids = sampler.sample(None, 1000, exclude=exclude, key=sx.Key(13)).ids
    assert (ids % 7 == 0).all()
    assert not (ids == exclude[:, None]).any()
    assert ids.unique().numel() == 715
