"""Diagnostics against enumeration of all draws and against direct formulas."""

from __future__ import annotations

import json
import math

import pytest
import torch
from diagnostics_cases import B, C, D, exact_logits, make

import samplex_cuda as sx
from samplex_cuda.diagnostics import diagnose, gradient_error

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


@pytest.mark.parametrize(
    "options",
    [{}, {"scale": 1.7}, {"loss": sx.losses.SampledSoftmax(absolute=True)}, {"shared": True}, {"bias": False}],
)
@pytest.mark.parametrize("name", [name for name in SAMPLERS if name != "holes"])
def test_law_against_direct_formulas(name, options):
    if options == {"bias": False} and name == "quadratic":
        pytest.skip("has a bias")
    head, h, y = make(**options)
    sampler = SAMPLERS[name](head)
    rows = gradient_error.Rows(head, h, y)
    law = gradient_error.enumerate_law(sampler, rows, h, None, shared=head.shared)
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
    law = gradient_error.enumerate_law(sampler, gradient_error.Rows(head, row, target), row, None, shared=shared)
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
    rows = gradient_error.Rows(head, h, y)
    law = gradient_error.enumerate_law(sampler, rows, h, None, shared=shared)
    draws = gradient_error.Draws(sampler, rows, h, None, count=B, each=60_000, shared=shared, key=torch.tensor([5, 0]))
    seen = gradient_error.measure(draws, rows, law.squares, 2)
    for row in range(B):
        o, q = exact_logits(head, h)[row], conditional(sampler, h, y, shared)[row]
        mean, variance, full = gradient_moments(o, q, int(y[row]), 2)
        noise = 6 * math.sqrt(variance / 30_000)
        assert math.sqrt(max(0.0, float(seen.bias_squared[row]))) == pytest.approx(
            float((mean - full).norm()), abs=noise + 1e-3
        )
        assert float(seen.variance[row]) == pytest.approx(variance, rel=0.05, abs=1e-6)
    assert gradient_error.measure(draws, rows, law.squares, 40_000) is None


def test_measured_bias_has_no_bias_itself():
    """From two gradients of a row alone, in the mean over many equal rows: the noise of the mean is taken out."""
    head, h, _ = make(spread=1.5)
    many, y = h[:1].expand(8000, -1).contiguous(), torch.full((8000,), 2)
    rows = gradient_error.Rows(head, many, y)
    draws = gradient_error.Draws(
        head.sampler, rows, many, None, count=8000, each=4, shared=False, key=torch.tensor([5, 0])
    )
    p = exact_logits(head, h)[0].softmax(0)
    p[2] = 0
    seen = gradient_error.measure(draws, rows, p.square().sum().expand(8000), 2)
    q = conditional(head.sampler, h[:1], y[:1], False)[0]
    mean, variance, full = gradient_moments(exact_logits(head, h)[0], q, 2, 2)
    for found, want in ((seen.bias_squared, float((mean - full).square().sum())), (seen.variance, variance)):
        assert abs(float(found.mean()) - want) < 5 * float(found.std()) / math.sqrt(8000)
    assert float(seen.bias_squared.std()) / math.sqrt(8000) < 0.25 * float(seen.bias_squared.mean())  # it can tell


@pytest.mark.parametrize("shared", [False, True])
def test_estimates_from_draws_tend_to_the_law(shared):
    head, h, y = make(shared=shared)
    sampler = sx.samplers.Unigram([5, 1, 9, 2, 3, 4])
    rows = gradient_error.Rows(head, h, y)
    exact = gradient_error.enumerate_law(sampler, rows, h, None, shared=shared)
    draws = gradient_error.Draws(sampler, rows, h, None, count=B, each=200_000, shared=shared, key=torch.tensor([1, 1]))
    guess = gradient_error.estimate_law(sampler, rows, h, None, draws)
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
    assert [law.name for law in found.samplers] == ["Uniform", "Softmax"]
    law = found.samplers[1]
    assert law.tv < 1e-5
    assert law.kl < 1e-9
    for point in law.points:
        assert point.ess == pytest.approx(point.num_samples, rel=1e-5)
        assert found.relative(point.bias) < 1e-4
        assert point.measured == 0
        assert point.std > 0
    assert found.samplers[0].tv > 0.1
    assert found.samplers[0].points[0].ess < 1


def test_hit_rate():
    head, h, _ = make(classes=50)
    found = diagnose(head, h, num_samples=(10,), candidates=[sx.samplers.Uniform(50)], timed=False)
    assert found.samplers[0].points[0].hit_rate == pytest.approx(1 - 0.98**10, rel=1e-5)


def test_small_m_is_measured_and_bounded():
    """Where the leading term is of no use (it passes all bounds) the measured bias takes its place."""
    head, _, _ = make(classes=2000, spread=3.0)
    h = torch.randn(64, D)
    found = diagnose(head, h, candidates=[sx.samplers.Uniform(2000)], num_samples=(2, 8), timed=False)
    for point in found.samplers[0].points:
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
    for law in found.samplers:
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
    law = next(law for law in fresh.samplers if law.own)
    assert (law.stale_rows, law.drift) == (0.0, 0.0)
    assert not any("stale" in text for text in fresh.warnings)
    with torch.no_grad():
        head.weight[:50] += 1.0
    stale = diagnose(head, h, num_samples=(4,), timed=False)
    law = next(law for law in stale.samplers if law.own)
    assert law.stale_rows == 0.25
    moved = head.weight.detach() - sampler.rows[:, :D]
    assert law.drift == pytest.approx(float(moved.norm() / head.weight.detach().norm()), rel=1e-5)
    assert any("Quadratic: stale" in text and "25 % of its class rows" in text for text in stale.warnings)
    mixed = sx.samplers.Mixture([(sampler, 0.5), (sx.samplers.Uniform(200), 0.5)])
    found = diagnose(head, h, candidates={"mix": mixed}, num_samples=(4,), timed=False)
    assert found.samplers[1].drift == law.drift
    copied = sx.samplers.Softmax(torch.randn(200, D))
    found = diagnose(head, h, candidates={"copy": copied}, num_samples=(4,), timed=False)
    assert found.samplers[1].stale_rows == 1.0


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
    assert [law.name for law in found.samplers] == ["Uniform", "Tree", "Mixture", "Bigram"]
    with pytest.raises(ValueError, match=r"diagnose: context must be int64 \[\*\] for Bigram, got None"):
        diagnose(head, torch.randn(40, D), candidates=[bigram])


def test_negative_sampling_scores_get_the_noise_back():
    sampler = sx.samplers.Unigram(torch.arange(1.0, 31.0))
    torch.manual_seed(0)
    head = sx.SampledClassifier(D, 30, sampler, num_samples=4, loss="negative_sampling")
    h, y = torch.randn(40, D), torch.randint(30, (40,))
    rows = gradient_error.Rows(head, h, y)
    want = head.scores(h).double().logsumexp(1)
    torch.testing.assert_close(rows.lse, want, rtol=1e-5, atol=1e-5)
    found = diagnose(head, h, y=y, num_samples=(4,), timed=False)
    assert any("trains with negative_sampling" in text for text in found.warnings)


def test_default_candidates():
    head, h, _ = make(sx.samplers.LogUniform(50), classes=50)
    found = diagnose(head, h, class_counts=torch.arange(50), num_samples=(8,), timed=False)
    names = ["Uniform", "LogUniform", "Unigram", "Quadratic", "RandomFourier", "MIDX"]
    names += ["LogUniform, shared", "Unigram, shared"]
    assert [law.name for law in found.samplers] == names
    assert [law.own for law in found.samplers] == [False, True, False, False, False, False, False, False]
    assert all(law.missing == 0 for law in found.samplers)
    assert [point.num_samples for point in found.samplers[1].points] == [4, 8]  # the head's own m, too
    assert [point.num_samples for point in found.samplers[0].points] == [8]
    head, h, _ = make(classes=50, loss=sx.losses.SampledSoftmax(absolute=True))
    assert [law.name for law in diagnose(head, h, timed=False).samplers] == ["Uniform", "Quadratic"]
    plain = sx.SampledClassifier(D, 50, loss="full_softmax")
    assert diagnose(plain, h, num_samples=(8,), timed=False).samplers[0].name == "Uniform"


def test_targets():
    """None: from the softmax; several: the first; rows without one are left out."""
    head, h, y = make(classes=50)
    one = diagnose(head, h, y=y, num_samples=(4,), timed=False)
    several = torch.stack([torch.full_like(y, -100), y, (y + 1) % 50], 1)
    assert diagnose(head, h, y=several, num_samples=(4,), timed=False).samplers == one.samplers
    y = y.clone()
    y[0] = -100
    assert diagnose(head, h, y=y, num_samples=(4,), timed=False).rows == B - 1
    assert diagnose(head, h.view(1, B, D), y=y.view(1, B), num_samples=(4,), timed=False).rows == B - 1


def test_estimates_where_classes_are_too_many(monkeypatch):
    head, _, _ = make(classes=500)
    h = torch.randn(40, D)
    found = diagnose(head, h, num_samples=(16,), timed=False, exact=False)
    sure = diagnose(head, h, num_samples=(16,), timed=False)
    assert not any(law.exact for law in found.samplers)
    assert "draws" in found.table()
    assert any("estimated from draws" in text for text in found.warnings)
    for guess, law in zip(found.samplers, sure.samplers, strict=True):
        assert guess.tv == pytest.approx(law.tv, rel=0.1)
    assert found.gradient_norm == pytest.approx(sure.gradient_norm, rel=0.02)
    monkeypatch.setattr(sx.diagnostics.run, "ENUMERATE_UP_TO", 40 * 500 - 1)
    assert not diagnose(head, h, num_samples=(16,), timed=False).samplers[0].exact


def test_memory_is_bounded(monkeypatch):
    """With few numbers at a time the same comes out."""
    head, _, _ = make(classes=700)
    h = torch.randn(30, D)
    whole = diagnose(head, h, num_samples=(4,), timed=False)
    monkeypatch.setattr(gradient_error, "ELEMENTS", 6000)
    parts = diagnose(head, h, num_samples=(4,), timed=False)
    for a, b in zip(whole.samplers, parts.samplers, strict=True):
        assert a.points[0].bias == pytest.approx(b.points[0].bias, rel=1e-5)
        assert a.kl == pytest.approx(b.kl, rel=1e-5)


def test_one_class_and_sure_rows():
    head = sx.SampledClassifier(D, 1, sx.samplers.Uniform(1), num_samples=2)
    with torch.no_grad():
        head.weight.fill_(1.0)
    found = diagnose(head, torch.randn(4, D), num_samples=(2,), timed=False)
    assert found.samplers[0].points[0].bias == 0
    json.dumps(found.as_dict(), allow_nan=False)
    head, h, _ = make(classes=20)
    with torch.no_grad():
        head.weight.mul_(1e4)  # the target has all of the probability
    found = diagnose(head, h, num_samples=(2,), timed=False)
    assert all(math.isfinite(point.bias) for law in found.samplers for point in law.points)
    assert [law.name for law in found.samplers] == ["Uniform", "Quadratic", "MIDX"]
    assert "RandomFourier" not in sx.diagnostics.default_candidates(head)  # its features leave float32
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
        with pytest.raises(ValueError, match=r"num_samples must be (one or more ints|an int of at least 1)"):
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
