"""subset_sample: bit for bit the reference on every backend, distinct ids, corner cases, errors, compile."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import stats

import samplex_cuda as sx
from samplex_cuda.ops.subset_sample import subset_sample
from samplex_cuda.reference import subset_sample as reference

KEY = (0x1234_5678_9ABC, 77)


def key_on(device, key=KEY):
    return torch.tensor(key, dtype=torch.int64, device=device)


# (B, k, n, exclude): a row below, at and above the 32 steps of a warp; everything taken; nothing excluded; -1.
CASES = [
    (3, 5, 9, [2, -1, 8]),
    (2, 32, 50, [49, 0]),
    (2, 33, 34, [33, 0]),
    (2, 40, 41, [0, 40]),
    (2, 70, 100, None),
    (5, 100, 300, [5, 6, 7, 8, 9]),
    (4, 20, 2**50, [0, 1, 2**49, 2**50 - 1]),
    (1, 1, 1, None),
    (2, 1, 2, [0, 1]),
]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_equals_reference(backend, case):
    batch, k, n, exclude = CASES[case]
    excluded = None if exclude is None else torch.tensor(exclude, device=backend.device)
    ids = subset_sample(key_on(backend.device), batch, k, n, excluded)
    assert ids.dtype == torch.int64
    if n < 10**6:  # the reference lists the classes
        np.testing.assert_array_equal(ids.cpu().numpy(), reference.subset_sample(KEY, batch, k, n, exclude))
    ids = ids.cpu()
    assert all(len(set(row)) == k for row in ids.tolist())
    assert int(ids.min()) >= 0
    assert int(ids.max()) < n
    if exclude is not None:
        assert not bool((ids == torch.tensor(exclude)[:, None]).any())


def test_more_rows_than_warps(backend):
    """The GPU kernels stride: what a row leaves in its table must not reach the next."""
    ids = subset_sample(key_on(backend.device), 4100, 34, 40)
    want = torch.cat([subset_sample(key_on("cpu"), 4100, 34, 40)])
    assert bool((ids.cpu() == want).all())
    for b in (0, 4095, 4096, 4099):
        assert len(set(ids[b].tolist())) == 34
    few = reference.subset_sample(KEY, 3, 34, 40)
    np.testing.assert_array_equal(ids[:3].cpu().numpy(), few)


@pytest.mark.parametrize(
    ("batch", "k", "n"), [(60, 64, 5000), (40, 7, 30), (8, 63, 90_000), (2, 512, 4000), (2, 513, 600)]
)
def test_simd_levels(simd_level, batch, k, n):
    """Rows whose offers all differ are made at once, those with a repetition step by step."""
    exclude = [b % n for b in range(batch)]
    ids = subset_sample(key_on("cpu"), batch, k, n, torch.tensor(exclude))
    want = reference.subset_sample(KEY, batch, k, n, exclude)
    np.testing.assert_array_equal(ids.numpy(), want)


def test_same_bits_for_every_thread_count():
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = subset_sample(key_on("cpu"), 300, 70, 1000)
        torch.set_num_threads(2)
        two = subset_sample(key_on("cpu"), 300, 70, 1000)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(one, two)
    assert not torch.equal(one, subset_sample(key_on("cpu", (KEY[0], 78)), 300, 70, 1000))
    assert not torch.equal(one[0], one[1])


def test_empty(backend):
    key = key_on(backend.device)
    assert subset_sample(key, 0, 3, 5).shape == (0, 3)
    assert subset_sample(key, 2, 0, 5).shape == (2, 0)
    assert subset_sample(key, 2, 0, 1, torch.zeros(2, dtype=torch.int64, device=backend.device)).shape == (2, 0)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda k: subset_sample(k, 2, 6, 5), r"num_samples must be in \[0, 5\]"),
        (lambda k: subset_sample(k, 2, 5, 5, torch.zeros(2, dtype=torch.int64)), r"num_samples must be in \[0, 4\]"),
        (lambda k: subset_sample(k, 2, -1, 5), "num_samples must be in"),
        (lambda k: subset_sample(k, -1, 1, 5), "batch must be in"),
        (lambda k: subset_sample(k, 1, 0, 0), "num_classes must be at least 1"),
        (
            lambda k: subset_sample(k, 2, 1, 5, torch.tensor([1, 5])),
            r"exclude must be -1 or in \[0, 5\), got 5",
        ),
        (lambda k: subset_sample(k, 2, 1, 5, torch.tensor([1])), r"exclude must be \[B\]"),
        (lambda k: subset_sample(k.float(), 2, 1, 5), "key must be"),
    ],
)
def test_errors(call, error):
    with pytest.raises(RuntimeError, match=f"subset_sample: {error}"):
        call(key_on("cpu"))


def test_opcheck(backend):
    exclude = torch.tensor([1, -1], device=backend.device)
    torch.library.opcheck(torch.ops.samplex.subset_sample.default, (key_on(backend.device), 2, 3, 9, exclude))


# ------------------------------------------------------------------------------------------------ the distribution
@pytest.mark.stat
@pytest.mark.parametrize(("n", "k", "excluded"), [(7, 3, 4), (6, 5, 0), (8, 1, 7), (6, 2, None), (6, 4, None)])
def test_every_subset_is_equally_likely(n, k, excluded):
    """Chi-square over whole subsets, not over ids: those alone would not see draws that avoid each other."""
    rows = 30_000
    exclude = None if excluded is None else torch.full((rows,), excluded)
    ids = subset_sample(key_on("cpu"), rows, k, n, exclude).sort(1).values
    left = [c for c in range(n) if c != excluded]
    subsets = list(itertools.combinations(left, k))
    place = {s: i for i, s in enumerate(subsets)}
    seen = np.bincount([place[tuple(row)] for row in ids.tolist()], minlength=len(subsets))
    assert len(subsets) == math.comb(len(left), k)
    if len(subsets) > 1:
        assert stats.chisquare(seen).pvalue > 1e-4


@pytest.mark.stat
def test_large_subsets_hold_every_class_equally_often():
    """Through the table: 300 of 1,000 classes, in pairs of classes too."""
    ids = subset_sample(key_on("cpu"), 4000, 300, 1000)
    seen = torch.bincount(ids.flatten(), minlength=1000).double()
    expected, variance = 4000 * 0.3, 4000 * 0.3 * 0.7
    # Counts of a fixed total: n/(n-1) times the squared z-scores is chi-square with n-1 degrees of freedom.
    statistic = float(((seen - expected) ** 2 / variance).sum()) * 999 / 1000
    assert 1e-4 < stats.chi2(999).sf(statistic) < 1 - 1e-4
    inside = torch.zeros(4000, 1000, dtype=torch.float64).scatter_(1, ids, 1.0)
    together = float((inside[:, 0::2] * inside[:, 1::2]).mean())
    wanted = 300 * 299 / (1000 * 999)
    assert abs(together - wanted) < 5 * math.sqrt(wanted * (1 - wanted) / (4000 * 500))


# ------------------------------------------------------------------------------------------------ the sampler's method
def test_subset_of_a_sampler():
    sampler = sx.samplers.Uniform(10)
    target = torch.tensor([0, 9, -1])
    draw = sampler.subset(4, exclude=target, key=sx.Key(*KEY))
    assert torch.equal(draw.ids, subset_sample(key_on("cpu"), 3, 4, 10, target))
    assert not draw.independent
    torch.testing.assert_close(draw.log_q.exp(), torch.tensor([[1 / 9], [1 / 9], [1 / 10]]).expand(3, 4))
    assert sampler.subset(10, batch_size=2).ids.sort(1).values.tolist() == [list(range(10))] * 2
    torch.manual_seed(3)
    first = sampler.subset(4, batch_size=5).ids
    torch.manual_seed(3)
    assert torch.equal(first, sampler.subset(4, batch_size=5).ids)


@pytest.mark.parametrize(
    ("call", "kind", "error"),
    [
        (lambda s: s.subset(11, batch_size=1), ValueError, "num_samples must be at most 10"),
        (lambda s: s.subset(10, exclude=torch.tensor([1])), ValueError, "num_samples must be at most 9"),
        (lambda s: s.subset(2), ValueError, "batch_size must be given"),
        (lambda s: s.subset(2, exclude=torch.tensor([[1]])), ValueError, r"exclude must be \[B\]"),
        (lambda s: s.subset(2, exclude=torch.tensor([10])), IndexError, "exclude must be -1 or in"),
        (lambda s: s.subset(2.0, batch_size=1), TypeError, "num_samples must be an int"),
    ],
)
def test_errors_of_the_sampler(call, kind, error):
    with pytest.raises(kind, match=error):
        call(sx.samplers.Uniform(10))
