"""Bigram as op and module: reference, distribution, determinism, exclusion, back-off, corner cases, errors, opcheck."""

from __future__ import annotations

import doctest
import importlib

import numpy as np
import pytest
import torch

import samplex_cuda as sx
from samplex_cuda import _native
from samplex_cuda.ops import bigram_sample as ops
from samplex_cuda.reference import bigram_sample as reference

KEY = (0x1234_5678_9ABC, 77)
C, N = 13, 6
UNIGRAM = [5, 0, 1, 2, 0, 7, 100, 3, 0, 1, 1, 9, 4]
# Contexts: common; one class; none; a class of unigram count 0 (1, 4); everything; one class with nearly all the mass.
PAIRS = [
    [(6, 10), (0, 3), (2, 1), (11, 6)],
    [(5, 2)],
    [],
    [(1, 4), (4, 1), (6, 2)],
    [(k, 1 + (k * 7) % 5) for k in range(C)],
    [(3, 10**12), (7, 1), (8, 1), (9, 2)],
]
BACKOFF = [0.1, 0.5, 0.3, 0.0, 1.0, 0.01]
CONTEXT = torch.tensor([0, 1, 2, 3, 4, 5, -1, 0])


def make(device="cpu", backoff=BACKOFF):
    offsets = np.r_[0, np.cumsum([len(row) for row in PAIRS])]
    flat = [pair for row in PAIRS for pair in row]
    return sx.samplers.Bigram(
        offsets, [k for k, _ in flat], [c for _, c in flat], UNIGRAM, backoff=np.array(backoff)
    ).to(device)


def integers(sampler):
    """Unigram and pair weights as the tables hold them."""
    offsets = sampler.offsets.cpu().numpy()
    prefix = sampler.pair_prefix.cpu().numpy()
    parts = [np.diff(prefix[offsets[c] + c : offsets[c + 1] + c + 1]) for c in range(len(offsets) - 1)]
    return np.diff(sampler.prefix.cpu().numpy()), np.concatenate(parts)


def laws(sampler, context):
    unigram, weights = integers(sampler)
    parts = [t.cpu().numpy() for t in (sampler.offsets, sampler.pair_ids)]
    return [reference.law(unigram, *parts, weights, sampler.backoff.cpu().numpy(), int(c)) for c in context]


def key_on(device, key=KEY):
    return torch.tensor(key, dtype=torch.int64, device=device)


def move(exclude, device):
    if isinstance(exclude, tuple):
        return tuple(t.to(device) for t in exclude)
    return None if exclude is None else exclude.to(device)


HEAVY = [0, 2, 3, 5, 6, 11]
EXCLUDES = {
    "none": (None, None),
    "target": (torch.tensor([6, 5, 6, 6, 0, 3, 6, 1]), [[6], [5], [6], [6], [0], [3], [6], [1]]),
    "padded": (
        torch.tensor([[6, -1, 0, 6]] * 4 + [[-1] * 4] * 2 + [[12, 3, 2, 2]] * 2),
        [[6, 0, 6]] * 4 + [[]] * 2 + [[12, 3, 2]] * 2,
    ),
    "csr": (
        (torch.tensor([0, 2, 2, 2, 5, 5, 6, 6, 7]), torch.tensor([11, 6, 6, 1, 1, 3, 0])),
        [[11, 6], [], [], [6, 1], [], [3], [], [0]],
    ),
    "heavy": (torch.tensor([HEAVY] * 8), [HEAVY] * 8),
    # Nothing is left of some contexts' pairs (0, 1, 3), and of the unigram distribution in the last two rows.
    "pairs_gone": (
        torch.tensor([[0, 2, 6, 11] + [-1] * 9, [5] + [-1] * 12, [6] + [-1] * 12, [1, 4, 6] + [-1] * 10]
                     + [[6] + [-1] * 12] * 2 + [list(range(13)), [k for k in range(13) if UNIGRAM[k]] + [-1] * 3]),
        [[0, 2, 6, 11], [5], [6], [1, 4, 6], [6], [6], list(range(13)), [k for k in range(13) if UNIGRAM[k]]],
    ),
    "empty_width": (torch.zeros(8, 0, dtype=torch.int64), [[]] * 8),
}  # fmt: skip


def reference_draw(sampler, m, rows, context=CONTEXT):
    unigram, weights = integers(sampler)
    tables = [t.cpu().numpy() for t in (sampler.table, sampler.offsets, sampler.pair_ids)]
    pair_table, backoff = sampler.pair_table.cpu().numpy(), sampler.backoff.cpu().numpy()
    return reference.sample(unigram, *tables, weights, pair_table, backoff, KEY, context.tolist(), m, rows)


# ------------------------------------------------------------------------------------------------ reference
@pytest.mark.parametrize("form", EXCLUDES)
def test_equals_reference(backend, form):
    """Every id is the reference's; log_q is that of the exact distribution."""
    sampler = make(backend.device)
    exclude, rows = EXCLUDES[form]
    draw = sampler.sample(
        None, 40, context=CONTEXT.to(backend.device), key=key_on(backend.device), exclude=move(exclude, backend.device)
    )
    ids, log_q = reference_draw(sampler, 40, rows)
    assert draw.ids.dtype == torch.int64
    assert draw.log_q.dtype == torch.float32
    np.testing.assert_array_equal(draw.ids.cpu().numpy(), ids)
    np.testing.assert_allclose(draw.log_q.cpu().numpy(), log_q, rtol=3e-7, atol=1e-7)
    assert draw.log_q.isfinite().all()


@pytest.mark.parametrize("form", EXCLUDES)
def test_log_prob_equals_the_law_and_log_q(backend, form):
    sampler = make(backend.device)
    exclude, rows = EXCLUDES[form]
    exclude, context = move(exclude, backend.device), CONTEXT.to(backend.device)
    every = torch.arange(C, device=backend.device).expand(8, -1)
    got = sampler.log_prob(None, every, context=context, exclude=exclude).cpu().numpy()
    from samplex_cuda.reference.static_sample import conditional

    with np.errstate(divide="ignore"):
        wanted = np.log([conditional(q, row) for q, row in zip(laws(sampler, CONTEXT), rows or [[]] * 8, strict=True)])
    np.testing.assert_allclose(got, wanted, rtol=3e-7, atol=1e-7)
    draw = sampler.sample(None, 50, context=context, key=key_on(backend.device), exclude=exclude)
    assert torch.equal(sampler.log_prob(None, draw.ids, context=context, exclude=exclude), draw.log_q)
    if exclude is None:
        assert torch.equal(sampler.log_prob_all(context=context).cpu(), torch.from_numpy(got))


def test_exclusion_does_not_cancel(backend):
    """Class 3 has all but 4e-12 of context 5's mass, without back-off: 1 - p has lost its digits."""
    sampler = make(backend.device, backoff=[0.0] * N)
    got = sampler.log_prob(
        None, torch.tensor([[7, 8, 9]], device=backend.device), context=torch.tensor([5], device=backend.device),
        exclude=torch.tensor([3], device=backend.device),
    )  # fmt: skip
    np.testing.assert_allclose(got.exp().cpu().numpy(), [[0.25, 0.25, 0.5]], rtol=1e-6)


def test_one_class_left_has_log_q_exactly_zero(backend):
    sampler = make(backend.device)
    exclude = torch.tensor([[k for k in range(C) if k != 6]] * 3, device=backend.device)
    draw = sampler.sample(None, 5, context=torch.tensor([0, 2, 4], device=backend.device), exclude=exclude)
    assert draw.ids.eq(6).all()
    assert draw.log_q.eq(0).all()


# ------------------------------------------------------------------------------------------------ distribution
@pytest.mark.stat
@pytest.mark.parametrize("excluding", [False, True])
def test_draws_follow_the_law(excluding):
    """Chi-square with a fixed key, each context."""
    sampler, n = make(), 50_000
    rows = [[6], [5], [6], [6], [0], [3], [6], [1]]
    exclude = torch.tensor(rows)[:, 0] if excluding else None
    ids = sampler.sample(None, n, context=CONTEXT, key=sx.Key(2), exclude=exclude).ids.numpy()
    from samplex_cuda.reference.static_sample import conditional

    for row, q in enumerate(laws(sampler, CONTEXT)):
        p = conditional(q, rows[row]) if excluding else q
        seen = np.bincount(ids[row], minlength=C)
        assert seen[p == 0].sum() == 0
        common = n * p > 5
        chi2 = ((seen - n * p)[common] ** 2 / (n * p)[common]).sum()
        dof = max(1, common.sum() - 1)
        assert chi2 < dof + 5 * np.sqrt(2 * dof), (row, chi2, dof)


def test_context_without_counts_has_the_unigram_law(backend):
    sampler = make(backend.device)
    got = sampler.log_prob_all(context=torch.tensor([2, -1], device=backend.device))
    wanted = sx.samplers.Unigram(UNIGRAM).to(backend.device).log_prob_all()
    torch.testing.assert_close(got, wanted.expand(2, -1), rtol=1e-6, atol=1e-6)


def test_from_tokens():
    tokens = torch.randint(20, (5000,), generator=torch.Generator().manual_seed(1))
    tokens[100] = -1
    sampler = sx.samplers.Bigram.from_tokens(tokens, 25, backoff=0.25, smoothing=1.0)
    counts = np.zeros((25, 25))
    for a, b in zip(tokens[:-1].tolist(), tokens[1:].tolist(), strict=True):
        if a >= 0 and b >= 0:
            counts[a, b] += 1
    unigram = np.bincount(tokens[tokens >= 0], minlength=25) + 1.0
    got = sampler.log_prob_all(context=torch.arange(25)).double().exp().numpy()
    rows = counts.sum(1, keepdims=True)
    after = counts / np.maximum(rows, 1)
    wanted = np.where(rows > 0, 0.75 * after, 0) + np.where(rows > 0, 0.25, 1.0) * unigram / unigram.sum()
    np.testing.assert_allclose(got, wanted, rtol=2e-6)


def test_pairs_are_merged_sorted_and_raised():
    a = sx.samplers.Bigram([0, 4], [2, 0, 2, 1], [1, 4, 3, 0], [1, 1, 1, 1], backoff=0.5, power=0.5)
    assert a.pair_ids.tolist() == [0, 2]
    got = a.log_prob_all(context=torch.tensor([0])).exp()[0]
    np.testing.assert_allclose(got, 0.5 * np.array([0.5, 0, 0.5, 0]) + 0.125, rtol=1e-6)


def test_alias_rows_equal_alias_tables():
    from samplex_cuda.ops.static_sample import build_alias

    weights = np.random.default_rng(0).random(20)
    offsets = torch.tensor([0, 3, 3, 4, 20])
    table, prefix = ops.build_alias_rows(weights, offsets)
    for c in range(4):
        begin, end = int(offsets[c]), int(offsets[c + 1])
        if begin == end:
            assert prefix[begin + c] == 0
            continue
        one, sums = build_alias(weights[begin:end])
        assert torch.equal(table[begin:end], one)
        assert torch.equal(prefix[begin + c : end + c + 1], sums)


# ------------------------------------------------------------------------------------------------ bit equality
def _everything(device, B, m):
    g = torch.Generator().manual_seed(0)
    tokens = torch.randint(300, (4000,), generator=g) * torch.randint(2, (4000,), generator=g)
    sampler = sx.samplers.Bigram.from_tokens(tokens, 400).to(device)
    context = torch.randint(-1, 400, (B,), generator=g).to(device)
    target = torch.zeros(B, dtype=torch.int64, device=device)
    results = []
    for exclude in (None, target, torch.stack([target, target + 1, target + 7], 1)):
        results.extend(sampler.sample(None, m, context=context, key=key_on(device), exclude=exclude)[:2])
    return [t.cpu() for t in results]


@pytest.mark.parametrize(("B", "m"), [(7, 33), (1, 1), (300, 5)])
def test_every_backend_gives_the_same_bits(backend, B, m):
    got = _everything(backend.device, B, m)
    before = _native.cpu_backend()
    _native.set_cpu_backend("cpu")
    try:
        wanted = _everything("cpu", B, m)
    finally:
        _native.set_cpu_backend(before)
    for a, b in zip(got, wanted, strict=True):
        assert torch.equal(a, b)


def test_simd_levels_and_threads_agree(simd_level):
    before, level = torch.get_num_threads(), _native.simd_level()
    results = []
    try:
        for threads, isa in ((1, "scalar"), (2, level)):
            torch.set_num_threads(threads)
            _native.set_simd_level(isa)
            results.append(_everything("cpu", 257, 65))
    finally:
        torch.set_num_threads(before)
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_draws_do_not_depend_on_batch_or_count(backend):
    sampler, context = make(backend.device), CONTEXT.to(backend.device)
    large = sampler.sample(None, 70, context=context, key=key_on(backend.device))
    small = sampler.sample(None, 7, context=context[:4], key=key_on(backend.device))
    assert torch.equal(large.ids[:4, :7], small.ids)
    assert not torch.equal(large.ids[0], large.ids[7])  # the same context in another row


# ------------------------------------------------------------------------------------------------ corner cases
@pytest.mark.parametrize(("B", "m"), [(0, 5), (4, 0), (0, 0)])
@pytest.mark.parametrize("excluding", [False, True])
def test_empty(backend, B, m, excluding):
    sampler = make(backend.device)
    context = torch.zeros(B, dtype=torch.int64, device=backend.device)
    draw = sampler.sample(None, m, context=context, exclude=context if excluding else None)
    assert draw.ids.shape == draw.log_q.shape == (B, m)
    assert sampler.log_prob(None, draw.ids, context=context).shape == (B, m)


def test_no_pairs_and_no_contexts(backend):
    context = torch.tensor([-1, -1], device=backend.device)
    for offsets in ([0], [0, 0, 0]):
        sampler = sx.samplers.Bigram(offsets, [], [], [1, 0, 3]).to(backend.device)
        draw = sampler.sample(None, 50, context=context, key=sx.Key(0))
        assert set(draw.ids.flatten().tolist()) == {0, 2}
        np.testing.assert_allclose(sampler.log_prob_all(context=context).exp()[0].cpu(), [0.25, 0, 0.75])


def test_h_counts_rows_and_shapes(backend):
    sampler = make(backend.device)
    h = torch.zeros(2, 4, 3, device=backend.device)
    context = CONTEXT.to(backend.device).reshape(2, 4)
    draw = sampler.sample(h, 5, context=context, key=sx.Key(0), batch_size=8)
    assert torch.equal(draw.ids, sampler.sample(None, 5, context=context.flatten(), key=sx.Key(0)).ids)
    every = sampler.log_prob_all(h, context=context)
    ids = torch.tensor([0, 3, 6], device=backend.device)
    assert torch.equal(sampler.log_prob(h, ids, context=context), every[:, ids])
    eight = torch.arange(8, device=backend.device)
    assert torch.equal(sampler.log_prob(h, eight, context=context), every[eight, eight])


def test_in_the_head():
    sampler = make()
    head = sx.SampledClassifier(4, C, sampler, num_samples=5)
    h, y, context = torch.randn(2, 4, 4), torch.randint(C, (2, 4)), CONTEXT.reshape(2, 4)
    loss = head(h, y, context=context, key=sx.Key(1))
    loss.backward()
    draw = sampler.sample(None, 5, context=CONTEXT, exclude=y.flatten(), key=sx.Key(1))
    want = sx.functional.sampled_softmax(h.flatten(0, 1), head.weight, y.flatten(), draw.ids, draw.log_q, head.bias)
    torch.testing.assert_close(loss, want)
    with pytest.raises(ValueError, match="bigram: context must be int64"):
        head(h, y)


# ------------------------------------------------------------------------------------------------ module
def test_state_dict_round_trip_of_another_size():
    sampler, other = make(), sx.samplers.Bigram([0, 1], [0], [1], [1, 1])
    other.load_state_dict(sampler.state_dict())
    assert (other.num_classes, other.num_contexts) == (C, N)
    a, b = (s.sample(None, 100, context=CONTEXT, key=sx.Key(0)) for s in (sampler, other))
    assert torch.equal(a.ids, b.ids)
    assert torch.equal(a.log_q, b.log_q)


def test_dtype_conversions_leave_the_law_alone():
    sampler = make()
    wanted = sampler.log_prob_all(context=CONTEXT)
    assert sampler.half().backoff.dtype == torch.float64
    assert torch.equal(sampler.log_prob_all(context=CONTEXT), wanted)
    sampler.update(torch.tensor([0]), torch.ones(1, 2))
    sampler.rebuild(torch.ones(C, 2))
    assert torch.equal(sampler.log_prob_all(context=CONTEXT), wanted)


def test_opcheck(backend):
    sampler = make(backend.device)
    context, key = CONTEXT.to(backend.device), key_on(backend.device)
    exclude = EXCLUDES["target"][0].to(backend.device)[:, None]
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(
        torch.ops.samplex.bigram_sample, (key, context, 5, *sampler._tables(), exclude), test_utils=tests
    )
    torch.library.opcheck(torch.ops.samplex.bigram_log_prob, (exclude, context, *sampler._tables()), test_utils=tests)


# ------------------------------------------------------------------------------------------------ errors
def test_errors():
    B = sx.samplers.Bigram
    sampler = make()
    ids = torch.zeros(8, 1, dtype=torch.int64)
    for call, error, text in [
        (lambda: B([0, 1], [3], [1], [1, 1]), IndexError, r"bigram: ids must be in \[0, 2\), got 3"),
        (lambda: B([0, 2], [1], [1], [1, 1]), ValueError, r"bigram: offsets must be .* from 0 to 1, got \[0, 2\]"),
        (lambda: B([], [], [], [1, 1]), ValueError, r"bigram: offsets must be \[N \+ 1\]"),
        (lambda: B([0, 1], [1], [1, 2], [1, 1]), ValueError, r"bigram: counts must be \[1\] as ids, got \[2\]"),
        (lambda: B([0, 1], [1], [-1], [1, 1]), ValueError, "bigram: counts must be finite and not negative, got -1"),
        (lambda: B([0, 1], [1], [1], [0, 0]), ValueError, r"bigram: unigram must be \[C\] with a positive sum"),
        (lambda: B([0, 1], [1.5], [1], [1, 1]), TypeError, "bigram: ids must be integers"),
        (lambda: B([0, 1], [1], ["a"], [1, 1]), TypeError, "bigram: counts must be numbers"),
        (lambda: B([0, 1], [1], [1], [1, 1], backoff=1.5), ValueError, r"bigram: backoff must be 0 or in \[1e-12, 1\]"),
        (lambda: B([0, 1], [1], [1], [1, 1], backoff=1e-20), ValueError, "bigram: backoff must be 0 or in"),
        (lambda: B([0, 1], [1], [1], [1, 1], power=-1), ValueError, "bigram: power must be finite and at least 0"),
        (lambda: B.from_tokens([0, 5], 5), IndexError, r"bigram: tokens must be -1 or in \[0, 5\), got 5"),
        (lambda: B.from_tokens([0, 1], 0), ValueError, "bigram: num_classes must be an int of at least 1, got 0"),
        (lambda: B.from_tokens([0, 1], 2, smoothing=-1), ValueError, "bigram: smoothing must be finite"),
        (lambda: sampler.sample(None, 3), ValueError, r"bigram: context must be int64 \[\*\], .* got None"),
        (lambda: sampler.sample(None, 3, context=CONTEXT.int()), TypeError, "bigram: context must be int64"),
        (lambda: sampler.sample(torch.zeros(7, 2), 3, context=CONTEXT), ValueError, "bigram: context must have 7 ids"),
        (
            lambda: sampler.sample(None, 3, shared=True),
            ValueError,
            r"bigram: context must be int64 \[\*\], .* got None",
        ),
        (lambda: sampler.sample(torch.zeros(7, 2), 3, context=CONTEXT, shared=True), ValueError, "must have 7 ids"),
        (
            lambda: sampler.sample(None, 3, context=torch.tensor([0, 6])),
            IndexError,
            r"bigram_sample: context must be -1 or in \[0, 6\), got 6 in row 1",
        ),
        (lambda: sampler.sample(None, -1, context=CONTEXT), ValueError, "bigram: num_samples must be an int in"),
        (
            lambda: sampler.sample(None, 1, context=CONTEXT, exclude=torch.full((8,), 13)),
            IndexError,
            r"bigram_sample: exclude must be -1 or in \[0, 13\), got 13 in row 0",
        ),
        (
            lambda: sampler.log_prob(None, ids + 13, context=CONTEXT),
            IndexError,
            r"bigram_log_prob: ids must be in \[0, 13\), got 13 in row 0",
        ),
        (lambda: sampler.log_prob(None, ids[:3], context=CONTEXT), ValueError, r"bigram: ids must be \[B\], \[B, n\]"),
        (
            lambda: torch.ops.samplex.bigram_sample(key_on("cpu").float(), CONTEXT, 1, *sampler._tables()),
            RuntimeError,
            r"bigram_sample: key must be \[2\] = \[2\] int64 contiguous",
        ),
        (
            lambda: torch.ops.samplex.bigram_log_prob(ids[:3], CONTEXT, *sampler._tables()),
            RuntimeError,
            r"bigram_log_prob: ids must be \[B, n\] with B = 8, got \[3, 1\] int64",
        ),
        (
            lambda: torch.ops.samplex.bigram_sample(key_on("cpu"), CONTEXT, 2**24 + 1, *sampler._tables()),
            RuntimeError,
            r"bigram_sample: num_samples must be in \[0, 2\^24\], got 16777217",
        ),
        (
            lambda: torch.ops.samplex.bigram_sample(
                key_on("cpu"), CONTEXT, 1, *sampler._tables()[:-1], sampler.backoff.float()
            ),
            RuntimeError,
            r"bigram_sample: backoff must be \[N\] = \[6\] float64",
        ),
    ]:
        with pytest.raises(error, match=text):
            call()


@pytest.mark.parametrize("module", ["ops.bigram_sample", "samplers.bigram", "reference.bigram_sample"])
def test_examples(module):
    result = doctest.testmod(importlib.import_module(f"samplex_cuda.{module}"))
    assert result.failed == 0
    assert result.attempted > 0
