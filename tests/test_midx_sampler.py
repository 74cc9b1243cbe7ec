"""MIDX as a sampler: k-means, updates, following a head, state, mixtures, and errors that public code has."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from host_syncs import no_host_sync
from scipy import stats

import samplex_cuda as sx
from samplex_cuda import _device
from samplex_cuda.samplers import MIDX, Mixture, Uniform
from samplex_cuda.samplers.kmeans import assign, kmeans

C, D = 120, 6
EVERY = torch.arange(C)


def rows_of(classes=C, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(classes, D, generator=g)


def make(**options):
    given = {"bias": torch.linspace(-1, 1, C), "counts": torch.arange(C).double(), "key": sx.Key(3)} | options
    return MIDX(rows_of(), given.pop("num_codes", 9), **given)


def inertia(rows, codes):
    return float((rows - codes[assign(rows, codes)]).double().square().sum())


# ------------------------------------------------------------------------------------------------ k-means
@pytest.mark.parametrize("data", ["blobs", "normal"])
def test_kmeans_is_as_good_as_that_of_scikit_learn(data):
    """The mean of five starts each: single ones differ by up to 10 % on blobs, there and here."""
    cluster = pytest.importorskip("sklearn.cluster")
    g = torch.Generator().manual_seed(1)
    rows = torch.randn(4000, 12, generator=g)
    if data == "blobs":
        rows = rows * 0.3 + 2.0 * torch.randn(50, 12, generator=g)[torch.randint(50, (4000,), generator=g)]
    wanted = sum(cluster.KMeans(32, random_state=start).fit(rows.numpy()).inertia_ for start in range(5))
    found = sum(inertia(rows, kmeans(rows, 32, torch.tensor([start, 0]))) for start in range(5))
    assert found < 1.05 * wanted


def test_kmeans_is_a_function_of_its_key_and_looks_at_few_rows(monkeypatch):
    rows = rows_of(4000)
    one, same, other = (kmeans(rows, 8, torch.tensor([seed, 1])) for seed in (0, 0, 5))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    seen = []
    step = sx.samplers.kmeans._step
    monkeypatch.setattr(
        sx.samplers.kmeans, "_step", lambda rows, codes: seen.append(rows.shape[0]) or step(rows, codes)
    )
    kmeans(rows, 8, torch.tensor([0, 1]))
    assert set(seen) == {256 * 8}


def test_kmeans_with_fewer_different_rows_than_codes():
    rows = torch.tensor([[0.0], [1.0]]).repeat(50, 1)
    codes = kmeans(rows, 5, torch.tensor([0, 0]))
    assert codes.isfinite().all()
    assert inertia(rows, codes) == 0.0


def test_kmeans_on_a_device_gives_the_same_codes(monkeypatch):
    """The path without `index_add_` and without a look at the inertia."""
    rows = rows_of(1000)
    here = kmeans(rows, 16, torch.tensor([0, 0]))
    monkeypatch.setattr(_device, "host_waits", lambda t: True)
    with no_host_sync():
        there = kmeans(rows, 16, torch.tensor([0, 0]))
    assert inertia(rows, there) <= 1.01 * inertia(rows, here)


# ------------------------------------------------------------------------------------------------ the distribution
@pytest.mark.parametrize("kind", ["residual", "product"])
def test_the_distribution_is_that_of_the_formula(kind):
    """log q = s1[k1] + s2[k2] + log omega - log Z, with the uniform part."""
    sampler, h = make(kind=kind, scale=1.5, epsilon=0.2), torch.randn(4, D)
    codes, cell = sampler.codes.double(), sampler.cell.long()
    s1, s2 = (1.5 * h.double() @ codes[i].T for i in range(2))
    log_omega = (1.5 * sampler.bias.double()) + sampler.counts.log()
    log_w = s1[:, cell // 9] + s2[:, cell % 9] + log_omega
    want = 0.8 * log_w.softmax(1) + 0.2 / C
    got = sampler.log_prob_all(h).double().exp()
    torch.testing.assert_close(got, want, rtol=2e-5, atol=1e-9)
    torch.testing.assert_close(got.sum(1), torch.ones(4, dtype=torch.float64), rtol=0, atol=1e-6)
    rest = want.clone()
    rest[:, [5, 7]] = 0.0
    got = sampler.log_prob(h, EVERY.expand(4, -1), exclude=torch.tensor([[5, 7, -1]] * 4)).double().exp()
    torch.testing.assert_close(got, rest / rest.sum(1, keepdim=True), rtol=2e-5, atol=1e-9)


@pytest.mark.stat
@pytest.mark.parametrize("excluded", [[], [4], [0, 7, 9, 110]])
@pytest.mark.parametrize("options", [{}, {"bias": None, "counts": None}, {"kind": "product", "epsilon": 0.0}])
def test_chi_square(options, excluded):
    sampler, h, n = make(**options), torch.randn(3, D, generator=torch.Generator().manual_seed(1)), 40_000
    exclude = torch.tensor([excluded] * 3) if excluded else None
    p = sampler.log_prob(h, EVERY.expand(3, -1), exclude=exclude).double().exp()
    draw = sampler.sample(h, n, key=sx.Key(7), exclude=exclude)
    assert torch.equal(draw.log_q, sampler.log_prob(h, draw.ids, exclude=exclude))
    for row in range(3):
        counts = torch.bincount(draw.ids[row], minlength=C)
        assert counts[p[row] == 0].sum() == 0
        common = n * p[row] > 5
        seen = torch.cat([counts[common], counts[~common].sum()[None]]).double()
        want = torch.cat([p[row][common], p[row][~common].sum()[None]])
        keep = want > 0
        want = want[keep] / want[keep].sum() * n
        assert stats.chisquare(seen[keep].numpy(), want.numpy()).pvalue > 1e-3


@pytest.mark.stat
def test_stratified_shared_draws():
    sampler, h, m = make(), torch.randn(5, D), 400
    q = sampler.log_prob_all(h).double().exp().mean(0)
    total = torch.zeros(C, dtype=torch.float64)
    for seed in range(200):
        draw = sampler.sample(h, m, shared=True, stratified=True, key=sx.Key(seed))
        assert not draw.independent
        seen = torch.bincount(draw.ids, minlength=C)
        assert float((seen - m * q).abs().max()) < 4.0  # a class has two parts of [0, 1): uniform and index
        total += seen
    torch.testing.assert_close(total / (200 * m), q, rtol=0.05, atol=2e-4)
    assert torch.equal(draw.log_q, sampler.log_prob_shared(h, draw.ids))


def test_far_scores_stay_finite():
    """The best codes of both books have no class in common: their product has no mass."""
    weight = torch.tensor([[1.0, -1.0], [-1.0, 1.0]]) * 300.0
    sampler = MIDX(weight, 2, kind="product", epsilon=0.0, key=sx.Key(0))
    draw = sampler.sample(torch.tensor([[1.0, 0.9], [0.9, 1.0]]), 20, exclude=torch.tensor([1, 0]), key=sx.Key(0))
    assert draw.ids.tolist() == [[0] * 20, [1] * 20]
    assert draw.log_q.eq(0).all()
    assert sampler.sample(torch.full((1, 2), 1e3), 5).log_q.isfinite().all()


# ------------------------------------------------------------------------------------------------ known errors
@pytest.mark.stat
def test_log_q_is_normalised_so_that_the_estimate_of_the_normaliser_is_right():
    """Public code takes s1 + s2 + log omega for log q: the sampled normalizer is then off by a factor Z."""
    weight, h = rows_of(), torch.randn(1, D, generator=torch.Generator().manual_seed(4))
    sampler = MIDX(weight, 9, key=sx.Key(1))
    o = (h @ weight.T).double()
    y = torch.tensor([17])
    n = 40_000
    draw = sampler.sample(h, n, exclude=y, key=sx.Key(2))
    estimate = (o.gather(1, draw.ids) - draw.log_q.double()).exp()
    want = o.exp().sum() - o[0, 17].exp()
    assert abs(float(estimate.mean() - want)) < 4 * float(estimate.std()) / n**0.5
    law = sampler._law(h)
    z = float((law[0][0, 0].double() * law[1][0].double()).sum())
    assert abs(z - 1.0) > 0.5  # so that a missing log Z would be seen


def test_the_positive_is_not_corrected():
    """Public code subtracts log q from the positive's logit as well."""
    sampler = MIDX(rows_of(), 9, key=sx.Key(1))
    head = sx.SampledClassifier(D, C, sampler, num_samples=7, bias=False, sampler_update=None)
    with torch.no_grad():
        head.weight.copy_(rows_of())
    h, y = torch.randn(5, D), torch.randint(C, (5,))
    draw = head.sampler.sample(h, 7, exclude=y, key=sx.Key(5))
    o = h @ head.weight.T
    negative = o.gather(1, draw.ids) - draw.log_q - torch.tensor(7.0).log()
    positive = o.gather(1, y[:, None])
    want = (torch.cat([positive, negative], 1).logsumexp(1) - positive[:, 0]).mean().detach()
    torch.testing.assert_close(head(h, y, key=sx.Key(5)).detach(), want)
    wrong = positive - sampler.log_prob(h, y)[:, None]
    wrong = (torch.cat([wrong, negative], 1).logsumexp(1) - wrong[:, 0]).mean()
    assert abs(float(wrong.detach() - want)) > 0.1


# ------------------------------------------------------------------------------------------------ changes
def same(a, b, h):
    return torch.equal(a.log_prob_all(h), b.log_prob_all(h))


@pytest.mark.parametrize("device", [False, True])
def test_update_is_a_new_assignment_with_the_old_codes(device, monkeypatch):
    sampler, h = make(), torch.randn(4, D)
    codes, before = sampler.codes.clone(), sampler.cell.clone()
    ids, rows, bias = torch.tensor([3, 50, 3]), rows_of(3, seed=9), torch.tensor([9.0, 0.5, 1.0])
    if device:
        monkeypatch.setattr(_device, "host_waits", lambda t: True)
        with no_host_sync():
            sampler.update(ids, rows, bias)
    else:
        sampler.update(ids, rows, bias)
    assert torch.equal(sampler.codes, codes)
    first = assign(rows, codes[0])
    want = first * 9 + assign(rows - codes[0][first], codes[1])
    assert sampler.cell[[50, 3]].tolist() == want[[1, 2]].tolist()  # of equal ids the last
    assert sampler.bias[[50, 3]].tolist() == [0.5, 1.0]
    kept = torch.ones(C, dtype=torch.bool)
    kept[[3, 50]] = False
    assert torch.equal(sampler.cell[kept], before[kept])
    total = sampler.log_prob_all(h).exp().sum(1)
    torch.testing.assert_close(total, torch.ones(4), rtol=0, atol=1e-5)


def test_rows_that_are_not_finite_keep_their_cells_on_a_device(monkeypatch):
    sampler, before = make(), None
    before = sampler.cell.clone()
    monkeypatch.setattr(_device, "host_waits", lambda t: True)
    sampler.update(torch.tensor([3, 500, -1]), torch.full((3, D), torch.nan), torch.zeros(3))
    assert torch.equal(sampler.cell, before)


@pytest.mark.parametrize("device", [False, True])
def test_refresh_follows_the_table(device, monkeypatch):
    weight = rows_of()
    sampler, h = MIDX(weight, 9, key=sx.Key(0)), torch.randn(50, D)
    weight.add_(rows_of(seed=5))
    want = (h @ weight.T).softmax(1)

    def off():
        return float((sampler.log_prob_all(h).exp() - want).abs().sum(1).mean())

    stale = off()
    if device:
        monkeypatch.setattr(_device, "host_waits", lambda t: True)
        with no_host_sync():
            sampler.refresh()
    else:
        sampler.refresh()
    assert off() < 0.9 * stale
    anew = MIDX(weight, 9, key=sx.Key(0))
    refreshed = off()
    sampler.rebuild(weight)
    assert same(sampler, anew, h)
    assert refreshed < 1.2 * off()
    copied = copy.deepcopy(sampler)
    with pytest.raises(ValueError, match="midx: weight must be given after the sampler was copied"):
        copied.refresh()
    copied.refresh(weight)


def test_a_head_follows_by_itself_and_makes_new_codes_now_and_then():
    torch.manual_seed(0)
    head = sx.SampledClassifier(D, C, MIDX(torch.zeros(C, D), 9, bias=torch.zeros(C), key=sx.Key(0)), num_samples=5)
    head.fuse_optimizer(sx.optim.RowAdagrad(head.parameters(), lr=0.1))
    head.follower.auto = False
    codes, ages, touched = [], [], []
    for step in range(40):
        head(torch.randn(16, D), torch.randint(C, (16,)), key=sx.Key(step)).backward()
        codes.append(head.sampler.codes.clone())
        ages.append(head.sampler._age)
        touched.append(head.staleness().rows)  # distinct rows, which the next forward tells the sampler
    assert max(ages) < 4 * C
    found = [not torch.equal(a, b) for a, b in zip(codes[1:], codes, strict=False)]
    wanted, age = [], 0
    for rows in touched[:-1]:  # the first forward rebuilds
        wanted.append(age + rows >= 4 * C)
        age = 0 if wanted[-1] else age + rows
    assert sum(wanted) >= 3
    assert found == wanted
    head.update_sampler()
    assert torch.equal(head.sampler.cell, head.sampler._cells_of(head.weight.detach()))
    assert torch.equal(head.sampler.bias, head.bias.detach())
    assert head.staleness().rows == 0


@pytest.mark.parametrize("bias", [True, False])
def test_following_many_rows_is_an_update_of_them(bias, monkeypatch):
    weight, moved = rows_of(seed=3), rows_of(seed=4)
    biases = torch.randn(2, C) if bias else [None, None]
    sampler, other = (MIDX(weight, 9, bias=biases[0], key=sx.Key(0)) for _ in range(2))
    monkeypatch.setattr("samplex_cuda.samplers.midx._ROWS_AT_ONCE", 7)
    ids = torch.randint(-3, C + 3, (2 * C,))
    inside = ids[(ids >= 0) & (ids < C)].unique()
    assert 7 < inside.shape[0] < C
    sampler.follow(ids, moved, biases[1])
    other.update(inside, moved[inside], biases[1][inside] if bias else None)
    assert not torch.equal(other.cell, MIDX(weight, 9, bias=biases[0], key=sx.Key(0)).cell)
    for name, table in other.named_buffers():
        assert torch.equal(table, sampler.get_buffer(name)), name
    before = {name: table.clone() for name, table in sampler.named_buffers()}
    broken = weight.clone()
    broken[inside[-1], 0] = torch.nan
    with pytest.raises(ValueError, match="midx: rows must be finite, got nan or inf"):
        sampler.follow(inside, broken, biases[0])
    assert all(torch.equal(table, sampler.get_buffer(name)) for name, table in before.items())


def test_how_often_a_head_follows():
    large = MIDX(torch.randn(2000, 64), 256, key=sx.Key(0))
    assert large.follow_interval(256, 64, False) >= 1
    large.num_classes = 1_000_000  # what the formula looks at
    assert large.follow_interval(256, 64, False) >= 512
    head = sx.SampledClassifier(D, C, make(), num_samples=5)
    head(torch.randn(16, D), torch.randint(C, (16,)))
    assert isinstance(head.sampler_update, int | str)


def test_diagnose_tells_how_many_classes_would_get_other_codes():
    sampler = MIDX(torch.zeros(C, D), 9, bias=torch.zeros(C), key=sx.Key(0))
    head = sx.SampledClassifier(D, C, sampler, num_samples=4, sampler_update=None)
    sampler.rebuild(head.weight, head.bias)
    h = torch.randn(20, D)

    def law():
        found = sx.diagnostics.diagnose(head, h, num_samples=(4,), timed=False)
        return next(one for one in found.samplers if one.own), found.warnings

    assert (law()[0].stale_rows, law()[0].drift) == (0.0, 0.0)
    with torch.no_grad():
        head.weight[:30] += 1.0
    own, warnings = law()
    assert 0.1 < own.stale_rows <= 0.25
    assert own.drift > 0.05
    assert any("MIDX: stale" in text for text in warnings)


# ------------------------------------------------------------------------------------------------ module
def test_state_dict_round_trip():
    sampler, h = make(), torch.randn(4, D)
    sampler.update(torch.arange(7), rows_of(7, seed=3), torch.randn(7))
    other = MIDX(torch.zeros(C, D), 9, bias=torch.zeros(C), counts=torch.ones(C))
    assert not same(sampler, other, h)
    memory = io.BytesIO()
    torch.save(sampler.state_dict(), memory)
    memory.seek(0)
    other.load_state_dict(torch.load(memory, weights_only=True))
    assert same(sampler, other, h)
    assert other._age == 7
    for again in (sampler, other):
        again.refresh(rows_of(seed=8), torch.zeros(C))
    assert same(sampler, other, h)
    with pytest.raises(RuntimeError, match=r"midx: codes must be \[2, 4, 6\] float32, got \[2, 9, 6\]"):
        make(num_codes=4).load_state_dict(sampler.state_dict())


def test_conversions_leave_the_distribution_alone():
    sampler, h = make(), torch.randn(4, D)
    want = sampler.log_prob_all(h)
    assert torch.equal(sampler.half().log_prob_all(h), want)
    assert torch.equal(copy.deepcopy(sampler).log_prob_all(h.double()), want)
    assert sampler.memory()["total"] > sampler.memory()["codes"]


def test_in_a_mixture():
    mixture, h = Mixture([(make(), 3), (Uniform(C), 1)]), torch.randn(4, D)
    want = 0.75 * mixture.samplers[0].log_prob_all(h).exp() + 0.25 / C
    torch.testing.assert_close(mixture.log_prob_all(h).exp(), want)
    y = torch.arange(4)
    draw = mixture.sample(h, 30, exclude=y, key=sx.Key(1))
    assert not bool((draw.ids == y[:, None]).any())
    rest = want.scatter(1, y[:, None], 0.0)
    rest = rest / rest.sum(1, keepdim=True)
    torch.testing.assert_close(draw.log_q.exp(), rest.gather(1, draw.ids), rtol=1e-5, atol=1e-7)
    assert mixture.follow_interval(8, 8, False) == mixture.samplers[0].follow_interval(8, 8, False)


def test_a_bfloat16_table_and_float64_queries():
    sampler, h = MIDX(rows_of().bfloat16(), 9, key=sx.Key(0)), torch.randn(4, D, dtype=torch.float64)
    assert torch.equal(sampler.log_prob_all(h), sampler.log_prob_all(h.float()))


def test_errors():
    weight, sampler, h = rows_of(), make(), torch.zeros(2, D)
    ids = torch.tensor([1, 2])
    for call, error, text in [
        (lambda: MIDX(torch.zeros(3)), ValueError, r"midx: weight must be \[C, d\] floating point, got \[3\]"),
        (lambda: MIDX(weight, 0), ValueError, r"midx: num_codes must be an int in \[1, 2048\], got 0"),
        (lambda: MIDX(weight, 4096), ValueError, r"midx: num_codes must be an int in \[1, 2048\], got 4096"),
        (lambda: MIDX(weight, kind="pq"), ValueError, "midx: kind must be one of residual, product, got 'pq'"),
        (lambda: MIDX(weight[:, :1], kind="product"), ValueError, "midx: weight must have at least 2 columns"),
        (lambda: MIDX(weight, scale=float("nan")), ValueError, "midx: scale must be finite, got nan"),
        (lambda: MIDX(weight, epsilon=1.0), ValueError, r"midx: epsilon must be in \[0, 1\), got 1.0"),
        (
            lambda: MIDX(weight, bias=torch.zeros(3)),
            ValueError,
            r"midx: bias must be \[120\] floating point, got \[3\]",
        ),
        (lambda: MIDX(weight, counts=torch.zeros(3)), ValueError, r"midx: counts must be \[120\], got \[3\]"),
        (lambda: MIDX(weight, counts=torch.zeros(C)), ValueError, "midx: counts must be finite, not negative and not"),
        (lambda: MIDX(weight / 0), ValueError, "midx: weight must be finite, got nan or inf"),
        (lambda: sampler.sample(None, 3), ValueError, r"midx: h must be \[\*, 6\], got None"),
        (lambda: sampler.sample(h[:, :2], 3), ValueError, r"midx: h must be \[\*, 6\], got \[2, 2\]"),
        (lambda: sampler.sample(h.long(), 3), TypeError, "midx: h must be floating point"),
        (lambda: sampler.sample(h, 3, stratified=True), ValueError, "midx: stratified must be False without shared"),
        (lambda: sampler.sample(h, 3, shared=True, exclude=ids), ValueError, "midx: exclude must be None with shared"),
        (
            lambda: sampler.sample(h, 3, exclude=ids + C),
            IndexError,
            r"midx_sample: exclude must be -1 or in \[0, 120\)",
        ),
        (lambda: sampler.log_prob(h, ids + C), IndexError, r"midx_log_prob: ids must be in \[0, 120\), got 121"),
        (lambda: sampler.log_prob(h, ids[None]), ValueError, r"midx: ids must be \[B\], \[B, n\] or \[n\] with B = 2"),
        (lambda: sampler.update(ids, h[:1]), ValueError, r"midx: rows must be \[2, 6\] floating point, got \[1, 6\]"),
        (lambda: sampler.update(ids + C, h), IndexError, r"midx: ids must be in \[0, 120\), got 122"),
        (lambda: sampler.update(ids, h / 0), ValueError, "midx: rows must be finite, got nan or inf"),
        (
            lambda: sampler.update(ids, h, torch.zeros(3)),
            ValueError,
            r"midx: bias must be \[2\] floating point, got \[3\]",
        ),
        (lambda: sampler.rebuild(weight[:5]), ValueError, r"midx: weight must be \[120, 6\], got \[5, 6\]"),
        (lambda: MIDX(weight, 4).rebuild(weight, weight[:, 0]), ValueError, r"midx: bias must be None, got \[120\]"),
    ]:
        with pytest.raises(error, match=text):
            call()
