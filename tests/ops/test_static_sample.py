"""The static samplers as ops and modules: reference, determinism, exclusion, corner cases, errors, compile, opcheck.

tests/stats/test_static_samplers.py holds the distributions.
"""

from __future__ import annotations

import doctest
import importlib

import numpy as np
import pytest
import torch
from static_cases import COUNTS, KEY, LAWS, key_on, make

import samplex_cuda as sx
from samplex_cuda import _native
from samplex_cuda.ops import static_sample as ops
from samplex_cuda.reference import static_sample as reference


def weights_of(law, sampler):
    if law == "uniform":
        return np.ones(sampler.num_classes)
    if law == "log_uniform":
        return reference.log_uniform_weights(sampler.num_classes)
    return reference.alias_weights(sampler.prefix.cpu().numpy())


def move(exclude, device):
    if isinstance(exclude, tuple):
        return tuple(t.to(device) for t in exclude)
    return None if exclude is None else exclude.to(device)


# Three rows each, in every accepted form; duplicates, pads, heads that hold most of the mass (so that rejection
# gives up and the inversion works), everything excluded, all but one, everything that has weight.
EXCLUDES = {
    "none": (None, None),
    "target": (torch.tensor([6, 0, 12]), [[6], [0], [12]]),
    "padded": (
        torch.tensor([[6, -1, 0, 6, 5], [-1, -1, -1, -1, -1], [11, 2, 2, 7, 12]]),
        [[6, 0, 6, 5], [], [11, 2, 2, 7, 12]],
    ),
    "csr": (
        (torch.tensor([0, 4, 4, 7]), torch.tensor([12, 6, 6, 3, 0, -1, 1])),
        [[12, 6, 6, 3], [], [0, -1, 1]],
    ),
    "heavy": (
        torch.tensor(
            [[0, 1, 2, 3, 4, 5, 6, 7, 8, 11, 12], [6, 5, 11, 0, 7, 1, 4, 8, 12, 2, 3], [12, 11, 6] + [-1] * 8]
        ),
        [[0, 1, 2, 3, 4, 5, 6, 7, 8, 11, 12], [6, 5, 11, 0, 7, 1, 4, 8, 12, 2, 3], [12, 11, 6]],
    ),
    "nearly_all": (
        (
            torch.tensor([0, 13, 25, 33]),
            torch.tensor([*range(12, -1, -1), *range(10), 11, 12, 0, 2, 3, 5, 6, 7, 9, 10, 11][: 13 + 12 + 8]),
        ),
        [list(range(13)), [*range(10), 11, 12], [0, 2, 3, 5, 6, 7, 9, 10]],
    ),
    "all_with_weight": (
        torch.tensor([[0, 2, 3, 5, 6, 7, 9, 10, 11]] * 3),
        [[0, 2, 3, 5, 6, 7, 9, 10, 11]] * 3,
    ),
    "empty_width": (torch.zeros(3, 0, dtype=torch.int64), [[], [], []]),
}


# ------------------------------------------------------------------------------------------------ reference
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("form", EXCLUDES)
def test_equals_reference(backend, law, form):
    """Every id is the reference's; log_q is that of the exact distribution."""
    sampler = make(law, device=backend.device)
    exclude, rows = EXCLUDES[form]
    draw = sampler.sample(None, 40, batch_size=3, key=key_on(backend.device), exclude=move(exclude, backend.device))
    table = sampler.table.cpu().numpy() if law == "alias" else None
    ids, log_q = reference.sample(law, weights_of(law, sampler), KEY, 3, 40, rows, table)
    assert draw.ids.dtype == torch.int64
    assert draw.log_q.dtype == torch.float32
    assert draw.independent
    np.testing.assert_array_equal(draw.ids.cpu().numpy(), ids)
    np.testing.assert_allclose(draw.log_q.cpu().numpy(), log_q, rtol=3e-7, atol=1e-15)


@pytest.mark.parametrize("law", LAWS)
def test_inversion_equals_reference(backend, law):
    """Several far gaps with almost no mass are left: nearly every draw of a row exhausts its attempts."""
    C, left = 1000, [500, 501, 700, 900, 901, 902, 903, 999]
    counts = np.full(C, 10**6)
    counts[left] = [1, 2, 3, 0, 5, 6, 7, 8]
    sampler = sx.samplers.Unigram(counts).to(backend.device) if law == "alias" else make(law, C, backend.device)
    excluded = [k for k in range(C) if k not in left]
    exclude = torch.tensor([excluded, excluded[::-1]], device=backend.device)
    draw = sampler.sample(None, 60, exclude=exclude, key=key_on(backend.device))
    table = sampler.table.cpu().numpy() if law == "alias" else None
    ids, log_q = reference.sample(law, weights_of(law, sampler), KEY, 2, 60, [excluded] * 2, table)
    assert len(np.unique(ids)) >= 7
    np.testing.assert_array_equal(draw.ids.cpu().numpy(), ids)
    np.testing.assert_allclose(draw.log_q.cpu().numpy(), log_q, rtol=3e-7, atol=1e-15)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("form", EXCLUDES)
def test_log_prob_equals_the_law_and_log_q(backend, law, form):
    sampler = make(law, device=backend.device)
    exclude, rows = EXCLUDES[form]
    exclude = move(exclude, backend.device)
    every = torch.arange(13, device=backend.device).expand(3, -1)
    got = sampler.log_prob(None, every, exclude=exclude).cpu().numpy()
    with np.errstate(divide="ignore"):
        wanted = np.log([reference.conditional(weights_of(law, sampler), row) for row in rows or [[]] * 3])
    np.testing.assert_allclose(got, wanted, rtol=3e-7, atol=1e-15)
    draw = sampler.sample(None, 50, batch_size=3, key=key_on(backend.device), exclude=exclude)
    assert torch.equal(sampler.log_prob(None, draw.ids, exclude=exclude), draw.log_q)


@pytest.mark.parametrize("law", LAWS)
def test_one_class_left_has_log_q_exactly_zero(backend, law):
    sampler = make(law, 5, backend.device)
    exclude = torch.tensor([[1, 2, 3, 4], [0, 2, 3, 4], [0, 1, 3, 4], [0, 1, 2, 4], [0, 1, 2, 3]])
    draw = sampler.sample(None, 6, exclude=exclude.to(backend.device))
    assert draw.ids.cpu().equal(torch.arange(5)[:, None].expand(5, 6))
    assert draw.log_q.eq(0).all()


# ------------------------------------------------------------------------------------------------ bit equality
def _everything(device, B, m, C):
    """Draws of all distributions with and without exclusion, as CPU tensors."""
    target = (torch.arange(B) * 37 % C).to(device)
    some = torch.stack([target, target * 0, target * 0 + min(1, C - 1)], 1)
    results = []
    for law in LAWS:
        sampler = make(law, C, device)
        for exclude in (None, target, some):
            results.extend(sampler.sample(None, m, batch_size=B, key=key_on(device), exclude=exclude)[:2])
    return [t.cpu() for t in results]


def _assert_same(got, wanted):
    for a, b in zip(got, wanted, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("B", "m", "C"), [(7, 33, 1000), (1, 1, 3), (300, 5, 50)])
def test_every_backend_gives_the_bits_of_scalar_code(backend, B, m, C):
    got = _everything(backend.device, B, m, C)
    before, level = _native.cpu_backend(), _native.simd_level()
    _native.set_cpu_backend("cpu")
    _native.set_simd_level("scalar")
    try:
        wanted = _everything("cpu", B, m, C)
    finally:
        _native.set_cpu_backend(before)
        _native.set_simd_level(level)
    _assert_same(got, wanted)


@pytest.mark.parametrize("m", [1, 3, 4, 5, 7, 8, 9, 64, 127, 128, 129, 200])
def test_simd_levels_agree(simd_level, m):
    got = _everything("cpu", 9, m, 5000)
    _native.set_simd_level("scalar")
    _assert_same(got, _everything("cpu", 9, m, 5000))


@pytest.mark.parametrize("law", LAWS)
def test_simd_levels_agree_on_many_draws(simd_level, law):
    sampler = make(law, 100_000)
    got = sampler.sample(None, 1000, batch_size=100, key=key_on("cpu"))
    _native.set_simd_level("scalar")
    _assert_same(got[:2], sampler.sample(None, 1000, batch_size=100, key=key_on("cpu"))[:2])


def test_thread_counts_agree():
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(_everything("cpu", 257, 65, 1000))
    finally:
        torch.set_num_threads(before)
    _assert_same(*results)


@pytest.mark.parametrize("law", LAWS)
def test_draws_do_not_depend_on_batch_or_count(backend, law):
    """Position decides, so a row of a larger batch or a prefix of more draws is the same draw."""
    sampler = make(law, device=backend.device)
    large = sampler.sample(None, 20, batch_size=6, key=key_on(backend.device))
    small = sampler.sample(None, 7, batch_size=4, key=key_on(backend.device))
    assert torch.equal(large.ids[:4, :7], small.ids)
    shared = sampler.sample(None, 20, shared=True, key=key_on(backend.device))
    assert torch.equal(shared.ids, large.ids[0])
    assert torch.equal(shared.log_q, large.log_q[0])


@pytest.mark.parametrize("law", LAWS)
def test_keys(backend, law):
    sampler = make(law, 1000, backend.device)

    def ids(key):
        return sampler.sample(None, 50, batch_size=2, key=key).ids

    assert torch.equal(ids(sx.Key(1)), ids(sx.Key(1)))
    assert not torch.equal(ids(sx.Key(1)), ids(sx.Key(2)))
    key = sx.Key(1)
    first, second = ids(key), ids(key)
    assert not torch.equal(first, second)
    assert torch.equal(second, ids(sx.Key(1, 1)))
    assert torch.equal(second, ids(torch.tensor([1, 1], device=backend.device)))
    assert not torch.equal(first[0], first[1])
    torch.manual_seed(9)
    unkeyed = ids(None)
    assert not torch.equal(unkeyed, ids(None))
    torch.manual_seed(9)
    assert torch.equal(unkeyed, ids(None))


# ------------------------------------------------------------------------------------------------ corner cases
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize(("B", "m"), [(0, 5), (4, 0), (0, 0)])
@pytest.mark.parametrize("excluding", [False, True])
def test_empty(backend, law, B, m, excluding):
    sampler = make(law, device=backend.device)
    exclude = torch.zeros(B, dtype=torch.int64, device=backend.device) if excluding else None
    draw = sampler.sample(torch.zeros(B, 3, device=backend.device), m, exclude=exclude)
    assert draw.ids.shape == draw.log_q.shape == (B, m)
    assert sampler.sample(None, m, shared=True).ids.shape == (m,)
    assert sampler.log_prob(None, draw.ids, exclude=exclude).shape == (B, m)


@pytest.mark.parametrize("law", LAWS)
def test_one_class(backend, law):
    sampler = make(law, 1, backend.device)
    zeros = torch.zeros(2, 3, dtype=torch.int64, device=backend.device)
    for exclude in (None, torch.zeros(2, dtype=torch.int64, device=backend.device)):
        draw = sampler.sample(None, 3, batch_size=2, exclude=exclude)
        assert torch.equal(draw.ids, zeros)
        assert draw.log_q.eq(0).all()


def test_stand_in_is_the_first_excluded_id():
    """Only classes of weight zero are left: the smallest excluded id with log_q = 0, as for everything excluded."""
    sampler = sx.samplers.Unigram([0, 0, 4, 0, 2])
    draw = sampler.sample(None, 3, exclude=torch.tensor([[4, 2, -1]]))
    assert draw.ids.eq(2).all()
    assert draw.log_q.eq(0).all()
    assert sampler.log_prob(None, torch.arange(5)[None], exclude=torch.tensor([[4, 2, -1]])).exp().tolist() == [
        [0, 0, 1, 0, 0]
    ]


@pytest.mark.parametrize("law", LAWS)
def test_h_only_counts_rows(backend, law):
    sampler = make(law, device=backend.device)
    h = torch.full((2, 3, 4), float("nan"), device=backend.device)
    draw = sampler.sample(h, 5, key=sx.Key(0), context=h)
    assert torch.equal(draw.ids, sampler.sample(None, 5, batch_size=6, key=sx.Key(0)).ids)


def test_noncontiguous_inputs(backend):
    sampler = make("alias", device=backend.device)
    exclude = torch.tensor([[6, 0, 12], [5, 3, 1]], device=backend.device)
    key = torch.tensor([[1, 9], [2, 9]], device=backend.device)[:, 0]
    assert not key.is_contiguous()
    a = sampler.sample(None, 9, exclude=exclude.t(), key=key)
    b = sampler.sample(None, 9, exclude=exclude.t().contiguous(), key=key.contiguous())
    assert torch.equal(a.ids, b.ids)
    ids = exclude.t()
    assert torch.equal(sampler.log_prob(None, ids), sampler.log_prob(None, ids.contiguous()))


@pytest.mark.parametrize("law", LAWS)
def test_log_prob_shapes(backend, law):
    sampler = make(law, device=backend.device)
    h = torch.zeros(4, 2, device=backend.device)
    ids = torch.tensor([0, 3, 6], device=backend.device)
    every = sampler.log_prob_all(h)
    assert every.shape == (4, 13)
    np.testing.assert_allclose(every.double().exp().sum(1).cpu(), 1.0, rtol=1e-6)
    assert torch.equal(sampler.log_prob(h, ids), every[:, ids])
    assert torch.equal(sampler.log_prob(h[:3], ids), every[0, ids])
    assert torch.equal(sampler.log_prob(None, ids), every[0, ids])
    assert torch.equal(sampler.log_prob(h[:1], ids[None]), every[:1, ids])
    exclude = torch.tensor([6, 0, 3, 1], device=backend.device)
    shared = sampler.log_prob(h, ids, exclude=exclude)
    assert torch.equal(shared, sampler.log_prob(h, ids.expand(4, 3), exclude=exclude))
    assert shared[0, 2] == -torch.inf
    single = sampler.log_prob(h, torch.tensor([0, 6, 0, 6], device=backend.device), exclude=exclude)
    assert torch.equal(single, sampler.log_prob_all()[0, 0] * 0 + shared[[0, 1, 2, 3], [0, 2, 0, 2]])


# ------------------------------------------------------------------------------------------------ alias tables
def _table_law(counts):
    """The class probabilities a table implies, by exact fractions."""
    from fractions import Fraction

    table, prefix = (t.numpy() for t in ops.build_alias(counts))
    C = len(counts)
    law = [Fraction(0)] * C
    for column, (threshold, alias, *_) in enumerate(table.tolist()):
        own = Fraction(threshold % 2**64, 2**64)
        law[column] += own / C
        law[alias] += (1 - own) / C
    return law, prefix


@pytest.mark.parametrize(
    "counts",
    [
        [1],
        [3, 1],
        [0, 5, 0, 0],
        COUNTS,
        [1e-300, 1e-300, 2e-300],
        [1e300, 1e300, 0.5e300],
        [1] * 7 + [10**12],
        [2.0**-k for k in range(70)],
        [(k * 7919) % 101 for k in range(997)],
    ],
    ids=lambda c: f"C={len(c)}",
)
def test_alias_table_has_the_law(counts):
    from fractions import Fraction

    law, prefix = _table_law(counts)
    total = sum(Fraction(c) for c in counts)
    assert 2**59 < prefix[-1] < 2**62
    for k, p in enumerate(law):
        wanted = Fraction(counts[k]) / total
        assert (p == 0) == (counts[k] == 0)
        assert Fraction(int(prefix[k + 1] - prefix[k]), int(prefix[-1])) == pytest.approx(wanted, rel=1e-15, abs=2**-60)
        # A threshold is cut to 64 bits; a class may own many columns' rests.
        assert abs(p - wanted) <= Fraction(len(counts), 2**60)


def test_integer_counts_keep_their_ratios():
    counts = np.array([3, 0, 10**9, 7, 1])
    weights = np.diff(ops.build_alias(counts)[1].numpy())
    unit = int(weights[4])
    assert weights.tolist() == [int(c) * unit for c in counts]


def test_full_columns_do_not_leak():
    """Equal weights fill every column exactly: no column points elsewhere."""
    table, _ = ops.build_alias(np.full(1000, 3.0))
    assert table[:, 1].tolist() == list(range(1000))


@pytest.mark.parametrize(
    "counts",
    [
        COUNTS,
        tuple(COUNTS),
        torch.tensor(COUNTS),
        torch.tensor(COUNTS, dtype=torch.float32),
        torch.tensor(COUNTS, dtype=torch.float64),
        torch.tensor(COUNTS, dtype=torch.bfloat16),
        np.array(COUNTS, dtype=np.int32),
        np.array(COUNTS, dtype=np.float64)[::1],
    ],
    ids=lambda c: f"{type(c).__name__}-{getattr(c, 'dtype', '')}",
)
def test_counts_of_any_kind(counts):
    assert torch.equal(sx.samplers.Unigram(counts).table, make("alias").table)


@pytest.mark.parametrize("power", [0, 0.5, 0.75, 2])
def test_power(power):
    weights = np.array([c**power if c else 0.0 for c in COUNTS])
    got = sx.samplers.Unigram(COUNTS, power).log_prob_all()[0].double().exp().numpy()
    np.testing.assert_allclose(got, weights / weights.sum(), rtol=3e-6)


def test_power_of_huge_counts_does_not_overflow():
    got = sx.samplers.Unigram([1e200, 2e200, 0], power=3.0).log_prob_all()[0].exp()
    np.testing.assert_allclose(got, [1 / 9, 8 / 9, 0], rtol=1e-6)


# ------------------------------------------------------------------------------------------------ module
@pytest.mark.parametrize("law", LAWS)
def test_state_dict_round_trip(law):
    sampler = make(law)
    state = sampler.state_dict()
    assert sorted(state) == (["prefix", "table"] if law == "alias" else [])
    other = sx.samplers.Unigram([1] * 13) if law == "alias" else make(law)
    other.load_state_dict(state)
    a, b = (s.sample(None, 100, batch_size=1, key=sx.Key(0)) for s in (sampler, other))
    assert torch.equal(a.ids, b.ids)
    assert torch.equal(a.log_q, b.log_q)


def test_dtype_conversions_leave_the_tables_alone():
    sampler = make("alias").half()
    assert sampler.table.dtype == sampler.prefix.dtype == torch.int64
    assert sampler.sample(None, 3, batch_size=1).log_q.dtype == torch.float32


@pytest.mark.parametrize("law", LAWS)
def test_static_laws_ignore_the_class_table(law):
    sampler = make(law)
    before = sampler.log_prob_all().clone()
    sampler.update(torch.tensor([0]), torch.ones(1, 4))
    sampler.rebuild(torch.ones(13, 4))
    assert torch.equal(sampler.log_prob_all(), before)


def test_repr():
    assert repr(sx.samplers.Uniform(5)) == "Uniform(5)"
    assert repr(sx.samplers.Unigram([1, 2], power=0.75)) == "Unigram(2, power=0.75)"


# ------------------------------------------------------------------------------------------------ torch integration
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("form", ["none", "padded", "csr"])
def test_opcheck(backend, law, form):
    flat, offsets = ops.sort_exclude(move(EXCLUDES[form][0], backend.device))
    sampler = make(law, device=backend.device)
    tables = (sampler.table, sampler.prefix) if law == "alias" else (13,)
    key = key_on(backend.device)
    torch.library.opcheck(getattr(torch.ops.samplex, f"{law}_sample").default, (key, 3, 5, *tables, flat, offsets))
    ids = torch.tensor([[1, 2], [6, 6], [0, 12]], device=backend.device)
    torch.library.opcheck(getattr(torch.ops.samplex, f"{law}_log_prob").default, (ids, *tables, flat, offsets))


# One distribution goes through the code generator; the others stop at the traced graph, which is where distributions
# can differ.
@pytest.mark.parametrize(("law", "compiler"), [(law, "aot_eager") for law in LAWS] + [("alias", "inductor")])
def test_compile_fullgraph_with_dynamic_batch(law, compiler):
    sampler = make(law, 1000)

    def step(h, target, key):
        draw = sampler.sample(h, 8, key=key, exclude=target)
        return draw.ids, draw.log_q, sampler.log_prob(h, target)

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=compiler)
    for B in (4, 7, 12):
        h, target, key = torch.randn(B, 3), torch.randint(0, 1000, (B,)), torch.tensor([1, B])
        _assert_same(compiled(h, target, key), step(h, target, key))


def test_compile_without_a_key_draws_anew():
    sampler = make("log_uniform", 1000)
    torch._dynamo.reset()
    compiled = torch.compile(lambda h: sampler.sample(h, 16).ids, fullgraph=True, dynamic=True)
    first, second = compiled(torch.randn(4, 3)), compiled(torch.randn(4, 3))
    assert first.shape == (4, 16)
    assert not torch.equal(first, second)


def test_compile_with_csr_and_padded_exclude():
    sampler = make("alias")
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda e, k: sampler.sample(None, 8, key=k, exclude=e)[:2], fullgraph=True, backend="aot_eager"
    )
    for form in ("padded", "csr"):
        exclude = EXCLUDES[form][0]
        _assert_same(compiled(exclude, key_on("cpu")), sampler.sample(None, 8, key=key_on("cpu"), exclude=exclude)[:2])


# ------------------------------------------------------------------------------------------------ documentation
@pytest.mark.parametrize(
    "module", ["draw", "rng", "ops.static_sample", "samplers.static", "samplers.base", "reference.static_sample"]
)
def test_examples(module):
    result = doctest.testmod(importlib.import_module(f"samplex_cuda.{module}"))
    assert result.failed == 0
    assert result.attempted > 0 or module == "samplers.base"
