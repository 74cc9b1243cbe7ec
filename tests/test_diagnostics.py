"""Diagnostics against enumeration of all draws, against direct formulas, and on made-up tables."""

from __future__ import annotations

import json
import math
import warnings

import pytest
import torch

import samplex_cuda as sx
from samplex_cuda.diagnostics import Diagnosis, Law, Point, advice, diagnose, laws

C, D, B = 6, 3, 5


def make(sampler=None, *, classes: int = C, samples: int = 4, seed: int = 3, spread: float = 1.2, **options):
    torch.manual_seed(seed)
    head = sx.SampledClassifier(D, classes, sampler or sx.samplers.Uniform(classes), num_samples=samples, **options)
    with torch.no_grad():
        head.weight.copy_(spread * torch.randn(classes, D))
        if head.bias is not None:
            head.bias.copy_(0.3 * torch.randn(classes))
    return head, torch.randn(B, D), torch.randint(classes, (B,))


def exact_logits(head, h):
    o = head.scale * (h.double() @ head.weight.detach().double().T)
    if head.bias is not None:
        o += head.scale * head.bias.detach().double()
    return o.abs() if head.loss.absolute else o


SAMPLERS = {
    "uniform": lambda head: sx.samplers.Uniform(head.num_classes),
    "log_uniform": lambda head: sx.samplers.LogUniform(head.num_classes),
    "unigram": lambda head: sx.samplers.Unigram([5, 1, 9, 2, 3, 4]),
    "holes": lambda head: sx.samplers.Unigram([5, 0, 9, 2, 0, 4]),  # two classes are never drawn
    "quadratic": lambda head: sx.samplers.Quadratic(head.weight.detach(), 2.0, head.bias.detach()),
    "softmax": lambda head: sx.samplers.Softmax(
        head.weight, head.bias, scale=head.scale, absolute=head.loss.absolute, copy=False
    ),
}


def compositions(m: int, k: int) -> torch.Tensor:
    """All ways to draw m classes out of k, as counts [n, k]."""
    bars = torch.combinations(torch.arange(m + k - 1), k - 1) if k > 1 else torch.zeros(1, 0, dtype=torch.int64)
    edges = torch.nn.functional.pad(bars, (1, 0), value=-1)
    edges = torch.nn.functional.pad(edges, (0, 1), value=m + k - 1)
    return (edges.diff(dim=1) - 1).double()


def gradient_moments(o, q, t, m):
    """Mean and total variance of the sampled gradient in the logits over all draws of m, and the full gradient."""
    can = (q > 0).nonzero()[:, 0]
    some = compositions(m, len(can))
    counts = torch.zeros(len(some), len(o), dtype=torch.float64)
    counts[:, can] = some
    log_p = math.lgamma(m + 1) - torch.lgamma(counts + 1).sum(1) + torch.xlogy(counts, q).sum(1)
    probability = log_p.exp()
    assert float(probability.sum()) == pytest.approx(1, rel=1e-6)  # q has the digits of float32
    entries = counts * torch.where(q > 0, o.exp() / (m * q.clamp_min(1e-300)), 0.0)
    entries[:, t] = o[t].exp()  # a draw of the target is masked
    gradient = entries / entries.sum(1, keepdim=True)
    gradient[:, t] -= 1
    mean = probability @ gradient
    full = o.softmax(0)
    full[t] -= 1
    return mean, float(probability @ gradient.square().sum(1) - mean.square().sum()), full


def conditional(sampler, h, t, shared):
    q = sampler.log_prob_all(h).double().exp().expand(h.shape[0], -1).clone()
    if not shared:
        q[torch.arange(len(t)), t] = 0
        q /= q.sum(1, keepdim=True)
    return q


@pytest.mark.parametrize("options", [{}, {"scale": 1.7}, {"absolute": True}, {"shared": True}, {"bias": False}])
@pytest.mark.parametrize("name", [name for name in SAMPLERS if name != "holes"])
def test_law_against_direct_formulas(name, options):
    if options == {"bias": False} and name == "quadratic":
        pytest.skip("has a bias")
    head, h, y = make(**options)
    sampler = SAMPLERS[name](head)
    rows = laws.Rows(head, h, y)
    law = laws.enumerate_law(sampler, rows, h, None, shared=head.shared)
    o = exact_logits(head, h)
    torch.testing.assert_close(rows.lse, o.logsumexp(1))
    each = torch.arange(B)
    pi = o.softmax(1)
    pi[each, y] = 0
    pi /= pi.sum(1, keepdim=True)
    used = conditional(sampler, h, y, head.shared)
    alone = conditional(sampler, h, y, False)
    others = torch.ones(B, C, dtype=torch.bool)
    others[each, y] = False
    pick = lambda x: x[others].view(B, C - 1)  # noqa: E731
    pi_, used_, alone_, o_ = pick(pi), pick(used), pick(alone), pick(o)
    close = {"rtol": 2e-5, "atol": 2e-6}
    torch.testing.assert_close(law.kl, (pi_ * (pi_ / alone_).log()).sum(1), **close)
    torch.testing.assert_close(law.tv, 0.5 * (pi_ - alone_).abs().sum(1), **close)
    torch.testing.assert_close(law.second, (pi_**2 / used_).sum(1), **close)
    torch.testing.assert_close(law.log_q_min, used_.log().amin(1), **close)
    torch.testing.assert_close(law.log_q_max, used_.log().amax(1), **close)
    torch.testing.assert_close(law.log_ratio, (o_ - used_.log()).amax(1), **close)
    whole = sampler.log_prob_all(h).double().exp().expand(B, -1)[each, y]
    torch.testing.assert_close(law.target_q, whole, **close)
    # Var V of A6, over Z^2.
    p = o.softmax(1)
    s = pick(p).sum(1)
    torch.testing.assert_close(law.v, (pick(p) ** 2 / used_).sum(1) - s**2, **close)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", list(SAMPLERS))
def test_leading_terms_against_enumeration(name, shared):
    """m * bias and m * variance, over all outcomes of m draws, tend to the formulas; the distance falls like 1/m."""
    head, h, _ = make(classes=4, spread=0.6, shared=shared)
    sampler = sx.samplers.Unigram([5, 1, 9, 2]) if name == "unigram" else SAMPLERS[name](head)
    sampler = sx.samplers.Unigram([5, 0, 9, 2]) if name == "holes" else sampler
    row, target = h[:1], torch.tensor([2])
    law = laws.enumerate_law(sampler, laws.Rows(head, row, target), row, None, shared=shared)
    o, q = exact_logits(head, row)[0], conditional(sampler, row, target, shared)[0]
    off, off_spread = [], []
    for m in (1, 2, 10, 40):
        mean, variance, full = gradient_moments(o, q, 2, m)
        bias = float((mean - full).norm())
        off.append(m * abs(bias - math.sqrt(float(law.bias_squared(m)))))
        off_spread.append(abs(m * variance - float(law.spread)))
    if name == "softmax" and not shared:
        assert max(off) < 1e-6  # without bias at every m
    else:
        assert off[3] < 0.4 * off[2]
        assert off[3] < 0.1 * 40 * bias
    assert off_spread[3] < max(0.6 * off_spread[2], 1e-6)
    assert off_spread[3] < 0.08 * float(law.spread)
    if name == "holes":
        p = o.softmax(0)
        rest = p.clone()
        rest[1] = 0
        assert math.sqrt(float(law.constant)) == pytest.approx(float((rest / rest.sum() - p).norm()), rel=1e-6)
        assert float(law.constant) > 1e-4
    else:
        assert float(law.constant) < 1e-12


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", ["uniform", "holes", "softmax"])
def test_measured_bias_and_variance_against_enumeration(name, shared):
    """The pool of draws, cut into samples of m = 2, finds what enumeration says."""
    head, h, y = make(spread=1.5, shared=shared)
    sampler = SAMPLERS[name](head)
    rows = laws.Rows(head, h, y)
    law = laws.enumerate_law(sampler, rows, h, None, shared=shared)
    draws = laws.Draws(sampler, rows, h, None, count=B, each=60_000, shared=shared, key=torch.tensor([5, 0]))
    seen = laws.measure(draws, rows, law.squares, 2)
    for row in range(B):
        o, q = exact_logits(head, h)[row], conditional(sampler, h, y, shared)[row]
        mean, variance, full = gradient_moments(o, q, int(y[row]), 2)
        noise = 6 * math.sqrt(variance / 30_000)
        assert math.sqrt(max(0.0, float(seen.bias_squared[row]))) == pytest.approx(
            float((mean - full).norm()), abs=noise + 1e-3
        )
        assert float(seen.variance[row]) == pytest.approx(variance, rel=0.05, abs=1e-6)
    assert laws.measure(draws, rows, law.squares, 40_000) is None


def test_measured_bias_has_no_bias_itself():
    """From two gradients of a row alone, in the mean over many equal rows: the noise of the mean is taken out."""
    head, h, _ = make(spread=1.5)
    many, y = h[:1].expand(8000, -1).contiguous(), torch.full((8000,), 2)
    rows = laws.Rows(head, many, y)
    draws = laws.Draws(head.sampler, rows, many, None, count=8000, each=4, shared=False, key=torch.tensor([5, 0]))
    p = exact_logits(head, h)[0].softmax(0)
    p[2] = 0
    seen = laws.measure(draws, rows, p.square().sum().expand(8000), 2)
    q = conditional(head.sampler, h[:1], y[:1], False)[0]
    mean, variance, full = gradient_moments(exact_logits(head, h)[0], q, 2, 2)
    for found, want in ((seen.bias_squared, float((mean - full).square().sum())), (seen.variance, variance)):
        assert abs(float(found.mean()) - want) < 5 * float(found.std()) / math.sqrt(8000)
    assert float(seen.bias_squared.std()) / math.sqrt(8000) < 0.25 * float(seen.bias_squared.mean())  # it can tell


@pytest.mark.parametrize("shared", [False, True])
def test_estimates_from_draws_tend_to_the_law(shared):
    head, h, y = make(shared=shared)
    sampler = sx.samplers.Unigram([5, 1, 9, 2, 3, 4])
    rows = laws.Rows(head, h, y)
    exact = laws.enumerate_law(sampler, rows, h, None, shared=shared)
    draws = laws.Draws(sampler, rows, h, None, count=B, each=200_000, shared=shared, key=torch.tensor([1, 1]))
    guess = laws.estimate_law(sampler, rows, h, None, draws)
    assert exact.exact
    assert not guess.exact
    names = ("kl", "tv", "second", "target_q", "log_q_min", "log_q_max", "log_ratio", "v", "squares")
    for name in names:
        torch.testing.assert_close(getattr(guess, name), getattr(exact, name), rtol=0.03, atol=2e-3, msg=name)
    for name in ("leading", "spread"):  # differences of large numbers
        torch.testing.assert_close(getattr(guess, name), getattr(exact, name), rtol=0.12, atol=1e-2, msg=name)


def test_softmax_sampler_is_perfect():
    head, _, _ = make(classes=300)
    h = torch.randn(40, D)
    oracle = sx.samplers.Softmax(head.weight, head.bias, copy=False)
    found = diagnose(head, h, candidates={"Softmax": oracle}, num_samples=(1, 32), timed=False)
    assert [law.name for law in found.laws] == ["Uniform", "Softmax"]
    law = found.laws[1]
    assert law.tv < 1e-5
    assert law.kl < 1e-9
    for point in law.points:
        assert point.ess == pytest.approx(point.num_samples, rel=1e-5)
        assert found.relative(point.bias) < 1e-4
        assert point.measured == 0
        assert point.std > 0
    assert found.laws[0].tv > 0.1
    assert found.laws[0].points[0].ess < 1


def test_hit_rate():
    head, h, _ = make(classes=50)
    found = diagnose(head, h, num_samples=(10,), candidates=[sx.samplers.Uniform(50)], timed=False)
    assert found.laws[0].points[0].hit_rate == pytest.approx(1 - 0.98**10, rel=1e-5)


def test_small_m_is_measured_and_bounded():
    """Where the leading term is of no use (it passes all bounds) the measured bias takes its place."""
    head, _, _ = make(classes=2000, spread=3.0)
    h = torch.randn(64, D)
    found = diagnose(head, h, candidates=[sx.samplers.Uniform(2000)], num_samples=(2, 8), timed=False)
    for point in found.laws[0].points:
        assert point.measured > 0.5
        assert point.bias_leading > 3
        assert point.bias < 1.5
        assert point.bias_error > 0


def test_same_seed_same_numbers():
    head, _, _ = make(classes=400, spread=2.0)
    h = torch.randn(40, D)
    torch.manual_seed(1)
    one = diagnose(head, h, num_samples=(4, 16), timed=False, seed=7).as_dict()
    torch.manual_seed(2)
    assert diagnose(head, h, num_samples=(4, 16), timed=False, seed=7).as_dict() == one
    assert diagnose(head, h, num_samples=(4, 16), timed=False, seed=8).as_dict() != one


def test_the_head_stays_as_it_was():
    torch.manual_seed(0)
    sampler = sx.samplers.Quadratic(torch.randn(200, D))
    head = sx.SampledClassifier(D, 200, sampler, num_samples=4, bias=False)
    optimizer = sx.optim.RowAdagrad(head.parameters(), lr=0.1)
    head.fuse_optimizer(optimizer)
    head(torch.randn(8, D), torch.arange(8)).backward()
    before = {name: t.clone() for name, t in head.state_dict().items()}  # brings the sampler up to date
    mode, stale = head.training, head.staleness()
    found = diagnose(head, torch.randn(40, D), num_samples=(4,))
    assert all(torch.equal(t, before[name]) for name, t in head.state_dict().items())
    assert head.training == mode
    assert head.staleness() == stale
    assert head.weight.grad is None
    for law in found.laws:
        for point in law.points:
            assert point.step_ms > 0
            assert (point.update_ms is not None) == law.follows
    assert found.full_ms > 0


def test_staleness_is_seen_and_told():
    torch.manual_seed(0)
    sampler = sx.samplers.Quadratic(torch.randn(200, D))
    head = sx.SampledClassifier(D, 200, sampler, num_samples=4, bias=False, sampler_update=None)
    sampler.rebuild(head.weight)
    h = torch.randn(40, D)
    fresh = diagnose(head, h, num_samples=(4,), timed=False)
    law = next(law for law in fresh.laws if law.own)
    assert (law.stale_rows, law.drift) == (0.0, 0.0)
    assert not any("stale" in text for text in fresh.warnings)
    with torch.no_grad():
        head.weight[:50] += 1.0
    stale = diagnose(head, h, num_samples=(4,), timed=False)
    law = next(law for law in stale.laws if law.own)
    assert law.stale_rows == 0.25
    moved = head.weight.detach() - sampler.rows[:, :D]
    assert law.drift == pytest.approx(float(moved.norm() / head.weight.detach().norm()), rel=1e-5)
    assert any("Quadratic: stale" in text and "25 % of its class rows" in text for text in stale.warnings)
    mixed = sx.samplers.Mixture([(sampler, 0.5), (sx.samplers.Uniform(200), 0.5)])
    found = diagnose(head, h, candidates={"mix": mixed}, num_samples=(4,), timed=False)
    assert found.laws[1].drift == law.drift
    copied = sx.samplers.Softmax(torch.randn(200, D))
    found = diagnose(head, h, candidates={"copy": copied}, num_samples=(4,), timed=False)
    assert found.laws[1].stale_rows == 1.0


def test_trees_get_the_features_and_bigrams_the_context():
    torch.manual_seed(0)
    x, y = torch.randn(400, 7), torch.randint(30, (400,))
    tree = sx.samplers.Tree.fit(x, y, num_classes=30, dim=3, progress=False)
    bigram = sx.samplers.Bigram.from_tokens(torch.randint(30, (500,)), 30)
    head = sx.SampledClassifier(D, 30, sx.samplers.Uniform(30), num_samples=4)
    mixed = sx.samplers.Mixture([(tree, 0.9), (sx.samplers.Uniform(30), 0.1)])
    found = diagnose(
        head, torch.randn(40, D), y=y[:40], features=x[:40], context=y[40:80],
        candidates={"Tree": tree, "Mixture": mixed, "Bigram": bigram}, num_samples=(4,),
    )  # fmt: skip
    assert [law.name for law in found.laws] == ["Uniform", "Tree", "Mixture", "Bigram"]
    with pytest.raises(ValueError, match=r"diagnose: context must be int64 \[\*\] for Bigram, got None"):
        diagnose(head, torch.randn(40, D), candidates=[bigram])


def test_negative_sampling_scores_get_the_noise_back():
    sampler = sx.samplers.Unigram(torch.arange(1.0, 31.0))
    torch.manual_seed(0)
    head = sx.SampledClassifier(D, 30, sampler, num_samples=4, loss="negative_sampling")
    h, y = torch.randn(40, D), torch.randint(30, (40,))
    rows = laws.Rows(head, h, y)
    want = head.scores(h).double().logsumexp(1)
    torch.testing.assert_close(rows.lse, want, rtol=1e-5, atol=1e-5)
    found = diagnose(head, h, y=y, num_samples=(4,), timed=False)
    assert any("trains with negative_sampling" in text for text in found.warnings)


def test_default_candidates():
    head, h, _ = make(sx.samplers.LogUniform(50), classes=50)
    found = diagnose(head, h, class_counts=torch.arange(50), num_samples=(8,), timed=False)
    assert [law.name for law in found.laws] == ["Uniform", "LogUniform", "Unigram", "Quadratic", "RandomFourier"]
    assert [law.own for law in found.laws] == [False, True, False, False, False]
    assert all(law.missing == 0 for law in found.laws)
    assert [point.num_samples for point in found.laws[1].points] == [4, 8]  # the head's own m, too
    assert [point.num_samples for point in found.laws[0].points] == [8]
    head, h, _ = make(classes=50, loss=sx.losses.SampledSoftmax(absolute=True))
    assert [law.name for law in diagnose(head, h, timed=False).laws] == ["Uniform", "Quadratic"]
    plain = sx.SampledClassifier(D, 50, loss="full_softmax")
    assert diagnose(plain, h, num_samples=(8,), timed=False).laws[0].name == "Uniform"


def test_targets():
    """None: from the softmax; several: the first; rows without one are left out."""
    head, h, y = make(classes=50)
    one = diagnose(head, h, y=y, num_samples=(4,), timed=False)
    several = torch.stack([torch.full_like(y, -100), y, (y + 1) % 50], 1)
    assert diagnose(head, h, y=several, num_samples=(4,), timed=False).laws == one.laws
    y = y.clone()
    y[0] = -100
    assert diagnose(head, h, y=y, num_samples=(4,), timed=False).rows == B - 1
    assert diagnose(head, h.view(1, B, D), y=y.view(1, B), num_samples=(4,), timed=False).rows == B - 1


def test_estimates_where_classes_are_too_many(monkeypatch):
    head, _, _ = make(classes=500)
    h = torch.randn(40, D)
    found = diagnose(head, h, num_samples=(16,), timed=False, exact=False)
    sure = diagnose(head, h, num_samples=(16,), timed=False)
    assert not any(law.exact for law in found.laws)
    assert "draws" in found.table()
    assert any("estimated from draws" in text for text in found.warnings)
    for guess, law in zip(found.laws, sure.laws, strict=True):
        assert guess.tv == pytest.approx(law.tv, rel=0.1)
    assert found.gradient_norm == pytest.approx(sure.gradient_norm, rel=0.02)
    monkeypatch.setattr(sx.diagnostics.run, "ENUMERATE_UP_TO", 40 * 500 - 1)
    assert not diagnose(head, h, num_samples=(16,), timed=False).laws[0].exact


def test_memory_is_bounded(monkeypatch):
    """With few numbers at a time the same comes out."""
    head, _, _ = make(classes=700)
    h = torch.randn(30, D)
    whole = diagnose(head, h, num_samples=(4,), timed=False)
    monkeypatch.setattr(laws, "ELEMENTS", 6000)
    parts = diagnose(head, h, num_samples=(4,), timed=False)
    for a, b in zip(whole.laws, parts.laws, strict=True):
        assert a.points[0].bias == pytest.approx(b.points[0].bias, rel=1e-5)
        assert a.kl == pytest.approx(b.kl, rel=1e-5)


def test_one_class_and_sure_rows():
    head = sx.SampledClassifier(D, 1, sx.samplers.Uniform(1), num_samples=2)
    with torch.no_grad():
        head.weight.fill_(1.0)
    found = diagnose(head, torch.randn(4, D), num_samples=(2,), timed=False)
    assert found.laws[0].points[0].bias == 0
    json.dumps(found.as_dict(), allow_nan=False)
    head, h, _ = make(classes=20)
    with torch.no_grad():
        head.weight.mul_(1e4)  # the target has all of the probability
    found = diagnose(head, h, num_samples=(2,), timed=False)
    assert all(math.isfinite(point.bias) for law in found.laws for point in law.points)
    assert [law.name for law in found.laws] == ["Uniform", "Quadratic"]
    assert found.warnings[0] == "RandomFourier: its law is not a number on these rows; it was left out."
    json.dumps(found.as_dict(), allow_nan=False)


# ------------------------------------------------------------------------------------------------ errors
def test_errors():
    head, h, y = make(classes=50)
    with pytest.raises(ValueError, match=r"diagnose: h must be \[\*, 3\] floating point, got \[5, 4\] float32"):
        diagnose(head, torch.randn(5, 4))
    with pytest.raises(ValueError, match=r"diagnose: h must have at least one row with a target, got \[0, 3\] float32"):
        diagnose(head, torch.randn(0, D))
    with pytest.raises(ValueError, match="at least one row"):
        diagnose(head, h, y=torch.full_like(y, -100))
    with pytest.raises(ValueError, match=r"num_classes = 50 as the head, got 51 for 'Uniform'"):
        diagnose(head, h, candidates=[sx.samplers.Uniform(51)])
    with pytest.raises(TypeError, match="candidates must be samplers, got int for 'x'"):
        diagnose(head, h, candidates={"x": 3})
    for wrong in ((), (0,), (True,), (2.5,)):
        with pytest.raises(ValueError, match="num_samples must be ints of at least 1"):
            diagnose(head, h, num_samples=wrong)
    with pytest.raises(ValueError, match=r"y must be \[5\] or \[5, 'P'\] int64 to fit h, got \[4\] int64"):
        diagnose(head, h, y=y[:4])
    with pytest.raises(IndexError, match=r"y must be in \[0, 50\), got 50"):
        diagnose(head, h, y=torch.full_like(y, 50))
    with pytest.raises(ValueError, match=r"features must be \[5, 'f'\] to fit h"):
        diagnose(head, h, features=torch.randn(4, 2))
    with pytest.raises(ValueError, match=r"class_counts must be \[50\]"):
        diagnose(head, h, class_counts=torch.ones(49))
    with torch.no_grad():
        head.weight[3] = math.nan
    with pytest.raises(ValueError, match="logits of the head must be finite"):
        diagnose(head, h, y=y, candidates=[sx.samplers.Uniform(50)])


# ------------------------------------------------------------------------------------------------ words
def point(m, bias, ms=None, **more):
    return Point(m, ess=1.0, hit_rate=0.0, bias=bias, bias_leading=bias, std=1.0, step_ms=ms, **more)


def table(*found, norm=1.0, samples=0, full=None, **more):
    return Diagnosis(10**5, 64, 256, "sampled_softmax", False, 0, norm, samples, list(found), full, **more)


def test_recommendation_names_the_cheapest_of_equal_bias():
    uniform = Law("Uniform", "Uniform", points=[point(32, 0.8, 1.0), point(2000, 0.04, 50.0)])
    tree = Law("Tree", "Tree", points=[point(32, 0.04, 5.0), point(2000, 0.001, 70.0)])
    assert advice.recommend(table(uniform, tree)) == (
        "Tree with m = 32 gives the bias of Uniform with m = 2,000 (4 % of the gradient) at a tenth of the time "
        "(5 against 50 ms a step)."
    )
    # Half the norm, twice the share.
    assert "(8 % of the gradient)" in advice.recommend(table(uniform, tree, norm=0.5))


def test_recommendation_holds_against_what_the_head_does():
    own = Law("Unigram", "Unigram", own=True, points=[point(64, 0.05, 9.0), point(128, 0.02, 20.0)])
    uniform = Law("Uniform", "Uniform", points=[point(64, 0.5, 8.0), point(128, 0.25, 19.0)])
    assert advice.recommend(table(uniform, own, samples=64)) == (
        "Keep Unigram with m = 64: bias 5 % of the gradient; nothing that was tried gets there in less time."
    )
    better = Law("Tree", "Tree", points=[point(16, 0.02, 3.0)])
    text = advice.recommend(table(uniform, own, better, samples=64))
    assert text.startswith(
        "Tree with m = 16 has 0.40 of the bias of Unigram with m = 64 (2 % of the gradient against 5 %)"
    )
    assert "at a third of the time (3 against 9 ms a step)." in text
    assert text.endswith("Uniform would take about m = 1,600 for it.")


def test_recommendation_names_what_is_better_for_the_same_cost():
    uniform = Law("Uniform", "Uniform", points=[point(16, 0.5, 2.0), point(64, 0.4, 4.0)])
    tree = Law("Tree", "Tree", points=[point(16, 0.35, 3.0), point(64, 0.1, 4.5), point(256, 0.01, 9.0)])
    text = advice.recommend(table(uniform, tree))
    assert text.startswith("Tree with m = 16 gives the bias of Uniform with m = 64 (35 % of the gradient)")
    assert "About as cheap as Uniform with m = 64, Tree with m = 64 (4.5 ms) has a bias of 10 %." in text


def test_recommendation_without_times_counts_samples_and_leaves_oracles_out():
    uniform = Law("Uniform", "Uniform", points=[point(16, 0.5), point(64, 0.125)])
    oracle = Law("Softmax", "Softmax", points=[point(16, 0.0)])
    tree = Law("Tree", "Tree", points=[point(16, 0.12)])
    assert "Keep Uniform with m = 64" in advice.recommend(table(uniform, oracle))
    assert (
        "Tree with m = 16 gives the bias of Uniform with m = 64 (12 % of the gradient) with a quarter of the samples"
        in (advice.recommend(table(uniform, oracle, tree)))
    )


def test_recommendation_full_softmax_and_large_bias():
    uniform = Law("Uniform", "Uniform", points=[point(16, 0.5, 2.0), point(64, 0.4, 4.0)])
    text = advice.recommend(table(uniform, full=1.5))
    assert text.startswith("The full softmax takes 1.5 ms a step here")
    assert "full softmax" not in advice.recommend(table(uniform, full=40.0))
    assert "The bias is still large; the lowest that was tried is 40 %, Uniform with m = 64." in text


def test_a_noisy_bias_is_no_recommendation():
    uniform = Law("Uniform", "Uniform", points=[point(64, 0.05, 4.0)])
    lucky = Law("Tree", "Tree", points=[point(8, 0.0, 1.0, bias_error=0.01, measured=1.0)])
    assert "Keep Uniform" in advice.recommend(table(uniform, lucky))
    assert advice.recommend(table()) == "Nothing was measured."


def test_warnings():
    uniform = Law("Uniform", "Uniform", points=[point(16, 0.4), point(64, 0.2)])
    bad = Law("Tree", "Tree", points=[point(16, 0.5), point(64, 0.45)])
    assert advice.warn(table(uniform, bad)) == [
        "Tree: worse than Uniform at every m (bias 45 % of the gradient against 20 % at m = 64)."
    ]
    late = Law("Tree", "Tree", points=[point(16, 0.1), point(64, 0.45)])
    assert "at m = 64 (" in advice.warn(table(uniform, late))[0]
    good = Law("Tree", "Tree", points=[point(16, 0.1), point(64, 0.05)])
    assert advice.warn(table(uniform, good)) == []
    gaps = Law("Unigram", "Unigram", missing=0.125, points=[])
    assert "12 % of the softmax is on classes that it never draws" in advice.warn(table(uniform, gaps))[0]
    old = Law("Quadratic", "Quadratic", own=True, drift=0.2, stale_rows=0.5, stale_steps=7)
    assert "stale, 7 training steps behind: 50 % of its class rows" in advice.warn(table(uniform, old))[0]
    assert "head.update_sampler()" in advice.warn(table(uniform, old))[0]
    few = table(uniform)
    few.rows = 8
    assert advice.warn(few) == ["Only 8 rows: take some hundreds for numbers to rely on."]


def test_a_sampler_worse_than_uniform_is_told():
    """End to end: a law that avoids what the softmax likes, and one that never draws it."""
    head, _, _ = make(classes=200, bias=True)
    with torch.no_grad():
        head.weight.mul_(0.1)
        head.bias.copy_(torch.linspace(3, -3, 200))
    h = torch.randn(64, D)
    wrong = sx.samplers.Unigram(head.bias.detach().neg().exp())
    never = sx.samplers.Unigram(torch.arange(200).clamp(max=20) // 20)
    found = diagnose(head, h, candidates={"wrong": wrong, "never": never}, num_samples=(64, 256), timed=False)
    text = "\n".join(found.warnings)
    assert "wrong: worse than Uniform at every m" in text
    assert "never: " in text
    assert "of the softmax is on classes that it never draws" in text
    assert math.isinf(found.laws[2].kl)
    assert "warning: wrong" in found.table()


def test_noise_is_not_worse_than_uniform():
    """The same law under another name, where the bias is measured: the two differ by noise alone, and often by 5 %."""
    different, twin = 0, {"twin": sx.samplers.Unigram(torch.ones(2000))}
    for seed in range(3):
        torch.manual_seed(seed)
        head = sx.SampledClassifier(8, 2000, sx.samplers.Uniform(2000), num_samples=32)
        with torch.no_grad():
            head.weight.mul_(8)
        found = diagnose(head, torch.randn(128, 8), candidates=twin, num_samples=(256, 1024), timed=False, seed=seed)
        for a, b in zip(found.laws[1].points, found.laws[0].points, strict=True):
            assert a.measured > 0.2
            assert abs(a.excess) < 4 * a.excess_error
            different += a.bias > 1.05 * b.bias
        assert not any("worse" in text for text in found.warnings), found.warnings
    assert different > 0


def test_excess_is_the_bias_beyond_uniform_in_the_same_rows():
    head, _, _ = make(classes=200, spread=0.7)
    other = {"other": sx.samplers.LogUniform(200), "Uniform": sx.samplers.Uniform(200)}
    found = diagnose(head, torch.randn(48, D), candidates=other, num_samples=(2048, 4096), timed=False)
    for a, b in zip(found.laws[0].points, found.laws[1].points, strict=True):
        assert (a.measured, b.measured) == (0, 0)
        assert a.excess == pytest.approx(a.bias**2 - b.bias**2, rel=1e-9)
        assert a.excess_error == 0
        assert b.excess is None


def test_strata_are_told():
    flat = Law("Uniform", "Uniform", points=[point(16, 0.4)])
    tree = Law("Tree", "Tree", stratified=True, points=[point(16, 0.3)])
    assert advice.warn(table(flat, tree)) == [
        "Tree: the head draws in strata; bias and std are of independent draws, which vary more."
    ]


def test_a_head_that_draws_in_strata():
    torch.manual_seed(0)
    x, y = torch.randn(300, D), torch.randint(40, (300,))
    tree = sx.samplers.Tree.fit(x, y, num_classes=40, dim=3, progress=False)
    calls = []
    sample = tree.sample
    tree.sample = lambda *a, **k: calls.append((k.get("shared", False), k.get("stratified", False))) or sample(*a, **k)
    head = sx.SampledClassifier(D, 40, tree, 8, shared=True, stratified=True)
    found = diagnose(head, x[:40], y=y[:40], num_samples=(8,))
    assert [(law.name, law.stratified) for law in found.laws[:2]] == [("Uniform", False), ("Tree", True)]
    assert (True, True) in calls  # what is timed is what the head does
    assert any(text.startswith("Tree: the head draws in strata") for text in found.warnings)
    head.stratified = False
    calls.clear()
    assert not any(law.stratified for law in diagnose(head, x[:40], y=y[:40], num_samples=(8,)).laws)
    assert (True, True) not in calls


def test_the_clock_leaves_the_first_run_out(monkeypatch):
    """Also a long one: what torch does once in a process is no part of a step."""
    now, runs = [0.0], []
    monkeypatch.setattr(sx.diagnostics.run.time, "perf_counter", lambda: now[0])

    def clock(*seconds):
        runs.clear()

        def one():
            now[0] += seconds[min(len(runs), len(seconds) - 1)]
            runs.append(1)

        return sx.diagnostics.run._clock(one, torch.device("cpu")), len(runs)

    assert clock(9.0, 0.02, 0.01, 0.02) == (pytest.approx(10), 7)  # until 0.1 s
    assert clock(9.0, 3.0) == (pytest.approx(3000), 2)  # one is enough where it is long


def test_warnings_of_samplers_are_kept():
    head, _, _ = make(classes=300, spread=2.0, bias=False)
    sharp = sx.samplers.RandomFourier(head.weight.detach(), num_features=16, nu=4.0, key=sx.Key(0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = diagnose(head, torch.randn(40, D), candidates=[sharp], num_samples=(4,), timed=False)
    assert any("kernel mass is negative" in text for text in found.warnings)


# ------------------------------------------------------------------------------------------------ output
def test_json_round_trip(tmp_path):
    head, h, _ = make(classes=60)
    never = sx.samplers.Unigram(torch.arange(60) // 20)  # an infinite KL
    found = diagnose(head, h, candidates=[never], num_samples=(4, 8))
    text = json.dumps(found.as_dict(), allow_nan=False)
    again = Diagnosis.from_dict(json.loads(text))
    assert again == found
    assert math.isinf(again.laws[1].kl)
    found.save(tmp_path / "d.json")
    assert Diagnosis.load(tmp_path / "d.json") == found
    assert [path.name for path in tmp_path.iterdir()] == ["d.json"]


def test_table_and_show(capsys, monkeypatch):
    head, h, _ = make(classes=60)
    found = diagnose(head, h, num_samples=(4, 8), timed=False)
    text = found.table()
    assert text.startswith("60 classes, 3 features, 5 rows; targets excluded")
    for name in ("Uniform (head)", "Quadratic", "RandomFourier", "bias %", "KL", found.recommendation):
        assert name in text
    assert "step ms" not in text
    assert max(len(line) for line in text.splitlines()[:12]) < 120
    found.show()
    assert "Quadratic" in capsys.readouterr().out
    monkeypatch.setitem(__import__("sys").modules, "rich.console", None)
    found.show()
    assert capsys.readouterr().out == text + "\n"


def test_plot(tmp_path, monkeypatch):
    head, h, _ = make(classes=60)
    for timed in (False, True):
        found = diagnose(head, h, num_samples=(4, 8), timed=timed)
        path = tmp_path / f"{timed}.png"
        found.plot(path)
        assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["False.png", "True.png"]
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"matplotlib must be installed, e.g. pip install 'samplex-cuda\[demo\]'"):
        found.plot(tmp_path / "x.png")


def test_labels_of_the_plot_are_numbers():
    label = sx.diagnostics.report._between
    assert [label(30)(value, None) for value in (0.2, 30.0, 50.0)] == ["0.2", "", "50"]
    assert [label(3)(value, None) for value in (0.2, 30.0)] == ["0.2", "30"]
    assert label(1000)(20.0, None) == ""


def test_progress_is_told():
    head, h, _ = make(classes=60)
    lines = []
    diagnose(head, h, num_samples=(4,), on_progress=lines.append)
    assert lines[0] == "softmax of 5 rows over 60 classes"
    assert "Quadratic: time" in lines


def test_logits_of_thousands_stay_numbers():
    """The target and all draws of a row have probability 0 in float64; their shares are still defined."""
    torch.manual_seed(0)
    head = sx.SampledClassifier(8, 50, sx.samplers.Uniform(50), num_samples=4)
    h, y = 3 * torch.randn(32, 8), torch.arange(32)
    with torch.no_grad():
        head.weight.mul_(1000.0)
    found = diagnose(head, h, y=y, num_samples=(4,), timed=False)
    for law in found.laws:
        for point in law.points:
            assert math.isfinite(point.std), law.name
            assert math.isfinite(point.bias_error), law.name
    json.dumps(found.as_dict(), allow_nan=False)
