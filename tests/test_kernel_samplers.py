"""`Quadratic` and `RandomFourier` as modules: the distribution they promise, updates, state, warnings, bad input."""

# ruff: noqa: E501  (tables of messages)

from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch
from torch.nn.functional import normalize

import samplex_cuda as sx
from samplex_cuda import rff
from samplex_cuda.reference import kernel_tree as reference
from samplex_cuda.samplers import Quadratic, RandomFourier

SAMPLERS = {
    "quadratic": lambda w, **more: Quadratic(w, alpha=20.0, **more),
    "rff": lambda w, **more: RandomFourier(w, 64, 0.5, "rff", key=sx.Key(1), **more),
    "orf": lambda w, **more: RandomFourier(w, 64, 0.5, "orf", key=sx.Key(1), **more),
    "positive": lambda w, **more: RandomFourier(w, 64, 0.5, "positive", key=sx.Key(1), **more),
}


def rows_of(classes: int, dim: int, seed: int = 0) -> torch.Tensor:
    return normalize(torch.randn(classes, dim, generator=torch.Generator().manual_seed(seed)), dim=1)


def law(sampler, h, weight, bias=None, excluded=None):
    """The specification on float64 features of the same frequencies."""
    if bias is not None:
        weight, h = torch.cat([weight, bias[:, None]], 1), torch.nn.functional.pad(h, (0, 1), value=1.0)
    w = None if sampler.omega is None else sampler.omega.double()
    options = {"kind": sampler.kind, "nu": sampler.scale, "alpha": sampler.scale}
    phi_rows, phi = rff.features(weight.double(), w, **options), rff.features(h.double(), w, **options)
    sums = reference.node_sums(phi_rows, sampler.leaf_size)
    tree = reference.tree_law(h, phi, weight, sums, sampler.leaf_size, sampler.kernel, sampler.scale)
    return reference.conditional(tree, sampler.epsilon, excluded)


# ------------------------------------------------------------------------------------------------ the distribution
@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize(("classes", "dim"), [(3, 8), (100, 5), (1000, 16)])
def test_log_prob_all_is_the_law(backend, name, classes, dim):
    if backend.emulated:
        classes = min(classes, 120)
    weight, h = rows_of(classes, dim), rows_of(4, dim, 1)
    sampler = SAMPLERS[name](weight).to(backend.device)
    want = law(sampler.cpu(), h, weight)
    got = sampler.to(backend.device).log_prob_all(h.to(backend.device)).cpu().double()
    torch.testing.assert_close(got, want, rtol=3e-4, atol=3e-4)
    assert torch.allclose(got.exp().sum(1), torch.ones(4, dtype=torch.float64), atol=1e-5)
    draw = sampler.sample(h.to(backend.device), 30, key=sx.Key(5))
    assert torch.equal(draw.log_q, sampler.log_prob(h.to(backend.device), draw.ids))
    assert torch.equal(draw.log_q, sampler.log_prob_all(h.to(backend.device)).gather(1, draw.ids))


@pytest.mark.parametrize("name", SAMPLERS)
def test_bias_is_one_more_column(name):
    weight, h, bias = rows_of(200, 7), rows_of(3, 7, 1), torch.linspace(-1, 1, 200)
    sampler = SAMPLERS[name](weight, bias=bias)
    got = sampler.log_prob_all(h).double()
    torch.testing.assert_close(got, law(sampler, h, weight, bias), rtol=3e-4, atol=3e-4)
    ids = torch.tensor([5, 90])
    new = rows_of(2, 7, 3)
    sampler.update(ids, new, torch.tensor([0.5, -0.5]))
    weight[ids], bias[ids] = new, torch.tensor([0.5, -0.5])
    torch.testing.assert_close(sampler.log_prob_all(h).double(), law(sampler, h, weight, bias), rtol=3e-4, atol=3e-4)


def test_quadratic_is_exact():
    """q is the kernel itself, whatever the tree: no estimate, no clipping."""
    weight, h = torch.randn(500, 6), torch.randn(5, 6)
    kernel = 100.0 * (h.double() @ weight.double().T) ** 2 + 1.0
    got = Quadratic(weight).log_prob_all(h).double()
    torch.testing.assert_close(got, (kernel / kernel.sum(1, keepdim=True)).log(), rtol=1e-4, atol=1e-4)


def test_a_class_orthogonal_to_long_queries_keeps_its_one():
    """Values of alpha |h|^2 |c|^2 = 1e10 lose the + 1 in float32; the floor keeps it."""
    weight = torch.zeros(64, 8)
    weight[:, 0] = 100.0
    h = torch.zeros(1, 8)
    h[0, 1] = 100.0
    weight[:, 1] = 1e-9
    got = Quadratic(weight).log_prob_all(h)
    torch.testing.assert_close(got.exp(), torch.full((1, 64), 1 / 64))


@pytest.mark.parametrize("kind", ["rff", "orf", "positive"])
def test_more_features_come_closer_to_the_kernel(kind):
    weight, h = rows_of(400, 8), rows_of(8, 8, 1)
    target = torch.log_softmax(2.0 * h @ weight.T, 1).exp()
    distance = []
    for features in (16, 256, 4096):
        sampler = RandomFourier(weight, features, 2.0, kind, epsilon=0.0, key=sx.Key(3))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            distance.append(float(0.5 * (sampler.log_prob_all(h).exp() - target).abs().sum(1).mean()))
    assert distance[1] < 0.6 * distance[0]
    assert distance[2] < 0.6 * distance[1]
    assert distance[2] < 0.1


def test_normalize_makes_length_irrelevant():
    weight, h = torch.randn(100, 6), torch.randn(4, 6)
    weight[3], h[1] = 0.0, 0.0
    a = RandomFourier(weight, 64, 1.0, normalize=True, key=sx.Key(2))
    b = RandomFourier(normalize(weight, dim=1), 64, 1.0, key=sx.Key(2))
    torch.testing.assert_close(a.log_prob_all(3.0 * h), b.log_prob_all(normalize(h, dim=1)), rtol=1e-4, atol=1e-4)
    assert a.log_prob_all(h).isfinite().all()
    a.update(torch.tensor([3]), torch.full((1, 6), 2.0))
    assert a.rows[3].norm().item() == pytest.approx(1.0)


def test_zero_and_long_rows_have_a_law():
    weight, h = torch.randn(300, 6), torch.randn(4, 6) * 5.0
    weight[:50] = 0.0
    weight[50:60] *= 100.0
    h[0] = 0.0
    for name in SAMPLERS:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sampler = SAMPLERS[name](weight)
            got = sampler.log_prob_all(h)
            draw = sampler.sample(h, 50)
        assert torch.allclose(got.exp().sum(1), torch.ones(4), atol=1e-4), name
        assert draw.log_q.isfinite().all(), name


def test_positive_features_of_long_rows_do_not_vanish():
    """nu |c|^2 / 2 = 128: without a common factor every feature would be 0 in float32, and the tree uniform."""
    weight = rows_of(200, 16) * 16.0
    sampler = RandomFourier(weight, 256, 1.0, "positive", key=sx.Key(1))
    assert sampler._shift in (112.0, 128.0)
    assert sampler.sums.isfinite().all()
    assert (sampler.sums[1] > 1e-6).float().mean() > 0.5
    assert torch.allclose(sampler.log_prob_all(weight[:4] / 16.0).exp().sum(1), torch.ones(4), atol=1e-5)
    other = copy.deepcopy(sampler)
    other._shift = 0.0
    other.load_state_dict(sampler.state_dict())
    assert other._shift == sampler._shift
    # Rows that become much shorter would overflow under this factor: they ask for another.
    sampler.update(torch.tensor([5]), torch.zeros(1, 16))
    assert sampler._shift == 0.0
    assert sampler.log_prob_all(torch.zeros(1, 16)).isfinite().all()


# ------------------------------------------------------------------------------------------------ exclusion, shapes
@pytest.mark.parametrize("name", SAMPLERS)
def test_exclusion_in_every_form(name):
    weight, h = rows_of(300, 8), rows_of(3, 8, 1)
    sampler = SAMPLERS[name](weight)
    for exclude, rows in (
        (torch.tensor([5, 6, 7]), [[5], [6], [7]]),
        (torch.tensor([[9, 2], [-1, 4], [3, 3]]), [[9, 2], [4], [3]]),
        ((torch.tensor([0, 0, 2, 3]), torch.tensor([8, 1, 299])), [[], [8, 1], [299]]),
    ):
        want = law(sampler, h, weight, excluded=rows)
        got = sampler.log_prob(h, torch.arange(300), exclude=exclude)
        torch.testing.assert_close(got.double(), want, rtol=3e-4, atol=3e-4)
        draw = sampler.sample(h, 40, exclude=exclude)
        assert torch.equal(draw.log_q, got.gather(1, draw.ids))


def test_shapes_of_ids_and_h():
    sampler = SAMPLERS["rff"](rows_of(50, 4))
    h = rows_of(6, 4, 1)
    assert sampler.sample(h.view(2, 3, 4), 7).ids.shape == (6, 7)
    assert sampler.log_prob(h, torch.arange(6)).shape == (6,)
    assert sampler.log_prob(h, torch.arange(9)).shape == (6, 9)
    assert sampler.log_prob(h, torch.zeros(6, 3, dtype=torch.int64)).shape == (6, 3)
    assert sampler.sample(h.to(torch.bfloat16), 2).log_q.dtype == torch.float32
    assert sampler.sample(h, 4, key=sx.Key(1)).ids.tolist() == sampler.sample(h, 4, key=sx.Key(1)).ids.tolist()


def test_smaller_than_one_leaf():
    """All classes in one leaf: no tree, the closed form alone."""
    weight, h = rows_of(5, 4), rows_of(2, 4, 1)
    sampler = RandomFourier(weight, 1024, 3.0, epsilon=0.0)
    assert sampler.depth == 0
    assert sampler.leaf_size == 5
    want = torch.log_softmax(3.0 * h @ weight.T, 1)
    torch.testing.assert_close(sampler.log_prob_all(h), want, rtol=1e-5, atol=1e-5)
    assert sampler.sample(h, 9, exclude=torch.tensor([0, 4])).ids.shape == (2, 9)
    assert RandomFourier(weight[:1], 4, 1.0).sample(h, 3).ids.tolist() == [[0] * 3] * 2


# ------------------------------------------------------------------------------------------------ changes
@pytest.mark.parametrize("name", SAMPLERS)
def test_update_is_a_rebuild(backend, name):
    weight = rows_of(80, 8)
    sampler = SAMPLERS[name](weight).to(backend.device)
    ids, new = torch.randperm(80)[:30], rows_of(30, 8, 3)
    sampler.update(ids.to(backend.device), new.to(backend.device))
    weight[ids] = new
    fresh = SAMPLERS[name](weight)
    scale = fresh.sums.abs().max()
    assert ((sampler.sums.cpu() - fresh.sums).abs().max() / scale) < 1e-6
    assert torch.equal(sampler.rows.cpu(), fresh.rows)
    sampler.rebuild(weight.to(backend.device))
    assert torch.allclose(sampler.sums.cpu(), fresh.sums, rtol=1e-5, atol=1e-6)
    # Most rows at once are built again.
    many = torch.arange(60)
    sampler.update(many.to(backend.device), rows_of(60, 8, 4).to(backend.device))
    weight[many] = rows_of(60, 8, 4)
    assert torch.allclose(sampler.sums.cpu(), SAMPLERS[name](weight).sums, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", SAMPLERS)
def test_drift_over_many_updates_is_small(name):
    weight, h = rows_of(200, 8), rows_of(4, 8, 1)
    sampler = SAMPLERS[name](weight)
    g = torch.Generator().manual_seed(0)
    for step in range(100):
        ids = torch.randperm(200, generator=g)[:20]
        weight[ids] = rows_of(20, 8, 10 + step)
        sampler.update(ids, weight[ids])
    fresh = SAMPLERS[name](weight)
    assert ((sampler.sums - fresh.sums).abs().max() / fresh.sums.abs().max()) < 2e-6
    torch.testing.assert_close(sampler.log_prob_all(h), fresh.log_prob_all(h), rtol=1e-3, atol=1e-3)


def test_the_sampler_owns_its_rows():
    weight = torch.nn.Parameter(rows_of(50, 4))
    sampler = RandomFourier(weight, 16, 1.0)
    h = rows_of(2, 4, 1)
    before = sampler.log_prob_all(h)
    with torch.no_grad():
        weight.add_(1.0)
    assert torch.equal(sampler.log_prob_all(h), before)
    assert not sampler.rows.requires_grad


@pytest.mark.parametrize("name", SAMPLERS)
def test_state_dict_round_trip(backend, name):
    weight, h = rows_of(90, 8), rows_of(3, 8, 1).to(backend.device)
    sampler = SAMPLERS[name](weight).to(backend.device)
    ids = torch.arange(0, 90, 7)
    sampler.update(ids.to(backend.device), rows_of(len(ids), 8, 5).to(backend.device))
    other = SAMPLERS[name](torch.zeros(90, 8)).to(backend.device)
    other.load_state_dict(copy.deepcopy(sampler.state_dict()))
    a, b = sampler.sample(h, 20, key=sx.Key(4)), other.sample(h, 20, key=sx.Key(4))
    assert torch.equal(a.ids, b.ids)
    assert torch.equal(a.log_q, b.log_q)


def test_memory_and_repr():
    sampler = RandomFourier(rows_of(1000, 64), 128, 1.0)
    assert sampler.leaf_size == 2
    memory = sampler.memory()
    assert memory["rows"] == 1000 * 64 * 4
    assert memory["sums"] == 2 * 512 * 256 * 4
    assert memory["total"] == memory["rows"] + memory["sums"] + 128 * 64 * 4
    assert "leaf_size=2, depth=9" in repr(sampler)
    assert "MB" in repr(sampler)
    # O(n d), whatever the number of features is: leaves grow with them.
    many = RandomFourier(rows_of(1000, 64), 1024, 1.0)
    assert many.memory()["sums"] <= 1.01 * memory["sums"]


def test_casting_a_model_does_not_change_the_law():
    sampler = RandomFourier(rows_of(50, 4), 16, 1.0)
    h = rows_of(2, 4, 1)
    before = sampler.log_prob_all(h)
    sampler.to(torch.bfloat16)
    assert sampler.sums.dtype == torch.float32
    assert torch.equal(sampler.log_prob_all(h), before)


# ------------------------------------------------------------------------------------------------ warning
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_warns_about_negative_estimates_of_an_earlier_call_on_cuda():
    sampler, h = RandomFourier(rows_of(300, 16).cuda(), 16, 8.0, key=sx.Key(0)), rows_of(8, 16, 1).cuda()
    sampler.sample(h, 20)  # sends its share
    torch.cuda.synchronize()
    with pytest.warns(UserWarning, match="of the estimated kernel mass is negative"):
        sampler.sample(h, 20)


def test_warns_once_about_negative_estimates():
    sampler = RandomFourier(rows_of(300, 16), 16, 8.0, key=sx.Key(0))
    h = rows_of(8, 16, 1)
    with pytest.warns(UserWarning, match=r"of the estimated kernel mass is negative .* kind='positive'"):
        sampler.sample(h, 20)
    sampler.sample(h, 20)  # an error if it warned again
    RandomFourier(rows_of(300, 16), 16, 8.0, "positive").sample(h, 20)
    RandomFourier(rows_of(300, 16), 256, 0.5).sample(h, 20)
    Quadratic(rows_of(300, 16)).sample(h, 20)


# ------------------------------------------------------------------------------------------------ bad input
ERRORS = {
    "no features": (lambda w, s: RandomFourier(w, 0), ValueError, "num_features must be an int of at least 1, got 0"),
    "nu": (lambda w, s: RandomFourier(w, 4, 0.0), ValueError, "nu must be in (0, 1e+30), got 0.0"),
    "nu nan": (lambda w, s: RandomFourier(w, 4, math.nan), ValueError, "nu must be in (0, 1e+30), got nan"),
    "kind": (lambda w, s: RandomFourier(w, 4, 1.0, "cosine"), ValueError, "kind must be one of rff, orf, positive, got 'cosine'"),
    "alpha": (lambda w, s: Quadratic(w, -1.0), ValueError, "quadratic: alpha must be in (0, 1e+30), got -1.0"),
    "epsilon": (lambda w, s: RandomFourier(w, 4, epsilon=1.0), ValueError, "epsilon must be in [0, 1), got 1.0"),
    "weight": (lambda w, s: Quadratic(w[0]), ValueError, "weight must be [C, d] floating point, got [4] float32"),
    "no class": (lambda w, s: Quadratic(w[:0]), ValueError, "weight must be [C, d] floating point, got [0, 4] float32"),
    "ints": (lambda w, s: Quadratic(w.long()), ValueError, "weight must be [C, d] floating point, got [20, 4] int64"),
    "list": (lambda w, s: Quadratic([[1.0]]), TypeError, "weight must be a [C, d] tensor, got list"),
    "nan": (lambda w, s: Quadratic(w * math.nan), ValueError, "weight must be finite, got nan or inf in row 0"),
    "bias": (lambda w, s: Quadratic(w, bias=w[:, 0][:3]), ValueError, "bias must be [20] floating point, got [3] float32"),
    "h": (lambda w, s: s.sample(torch.zeros(3, 5), 2), ValueError, "h must be [*, 4] floating point, got [3, 5] float32"),
    "no h": (lambda w, s: s.sample(None, 2), ValueError, "h must be [*, 4] floating point, got NoneType"),
    "shared": (lambda w, s: s.sample(w[:3], 2, shared=True, exclude=torch.arange(3)), ValueError, "exclude must be None with shared=True"),
    "samples": (lambda w, s: s.sample(w[:3], -1), ValueError, "num_samples must be an int in [0, 2^24], got -1"),
    "exclude": (lambda w, s: s.sample(w[:3], 2, exclude=torch.tensor([0, 1, 20])), IndexError, "exclude must be -1 or in [0, 20), got 20"),
    "ids": (lambda w, s: s.log_prob(w[:3], torch.tensor([0, 1, 99])), IndexError, "ids must be in [0, 20), got 99"),
    "ids shape": (lambda w, s: s.log_prob(w[:3], torch.zeros(2, 2, dtype=torch.int64)), ValueError, "ids must be [B], [B, n] or [n] with B = 3"),
    "update ids": (lambda w, s: s.update(torch.tensor([0, 20]), w[:2]), IndexError, "ids must be in [0, 20), got 20"),
    "update low": (lambda w, s: s.update(torch.tensor([-1, 2]), w[:2]), IndexError, "ids must be in [0, 20), got -1"),
    "update twice": (lambda w, s: s.update(torch.tensor([4, 2, 4]), w[:3]), ValueError, "ids must be unique, got 4 twice"),
    "update type": (lambda w, s: s.update(torch.tensor([4.0]), w[:1]), TypeError, "ids must be int64"),
    "update width": (lambda w, s: s.update(torch.tensor([4]), torch.zeros(1, 5)), ValueError, "rows must be [1, 4] floating point, got [1, 5] float32"),
    "update count": (lambda w, s: s.update(torch.tensor([4, 5]), w[:1]), ValueError, "rows must be [2, 4] floating point, got [1, 4] float32"),
    "update nan": (lambda w, s: s.update(torch.tensor([4, 5]), torch.tensor([[0.0] * 4, [math.inf] * 4])), ValueError, "rows must be finite, got nan or inf in row 1"),
    "update bias": (lambda w, s: s.update(torch.tensor([4]), w[:1], w[:1, 0]), ValueError, "bias must be None, the sampler has no bias"),
    "rebuild": (lambda w, s: s.rebuild(w[:5]), ValueError, "weight must be [20, 4] floating point, got [5, 4] float32"),
    "update fp16": (lambda w, s: s.update(torch.tensor([4, 5]), torch.tensor([[0.0] * 4, [1.0, math.inf, 1.0, 1.0]]).half()), ValueError, "rows must be finite, got nan or inf in row 1"),
    "rebuild nan": (lambda w, s: s.rebuild(w * math.nan), ValueError, "weight must be finite"),
    "no bias": (lambda w, s: Quadratic(w, bias=w[:, 0]).rebuild(w), ValueError, "bias must be [20], the sampler has a bias, got None"),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_bad_input(name):
    call, kind, text = ERRORS[name]
    weight = rows_of(20, 4)
    sampler = RandomFourier(weight, 16, 1.0)
    before = sampler.rows.clone(), sampler.sums.clone()
    with pytest.raises(kind) as caught:
        call(weight, sampler)
    assert text in str(caught.value)
    # Refused before anything changed.
    assert torch.equal(sampler.rows, before[0])
    assert torch.equal(sampler.sums, before[1])


# ------------------------------------------------------------------------------------------------ the head's policy
def make_head(policy="auto", bias=False, **more):
    zero = torch.zeros(120) if bias else None
    sampler = RandomFourier(torch.zeros(120, 8), 32, 0.5, "positive", key=sx.Key(3), bias=zero)
    return sx.SampledClassifier(8, 120, sampler, num_samples=6, bias=bias, sampler_update=policy, **more)


def train_step(head, optimizer, step):
    g = torch.Generator().manual_seed(step)
    optimizer.zero_grad()
    head(torch.randn(5, 8, generator=g), torch.randint(120, (5,), generator=g), key=sx.Key(step)).backward()
    optimizer.step()


@pytest.mark.parametrize("bias", [False, True])
def test_the_sampler_follows_every_step(bias):
    head = make_head(bias=bias)
    assert head.sampler_update == "step"
    optimizer = torch.optim.SGD(head.parameters(), lr=0.5)
    assert head.staleness() == (0, -1)
    for step in range(4):
        train_step(head, optimizer, step)
        stale = head.staleness()
        assert stale.steps == 1
        assert 5 <= stale.rows <= 35
    head.update_sampler()
    assert head.staleness() == (0, 0)
    rows = torch.cat([head.weight, head.bias[:, None]], 1) if bias else head.weight
    assert torch.equal(head.sampler.rows[:, : rows.shape[1]], rows)
    fresh = copy.deepcopy(head.sampler)
    fresh.rebuild(head.weight, head.bias if bias else None)
    assert ((fresh.sums - head.sampler.sums).abs().max() / fresh.sums.abs().max()) < 1e-6


def test_the_sampler_follows_every_third_step():
    head = make_head(3)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.5)
    seen = []
    for step in range(8):
        train_step(head, optimizer, step)
        seen.append(head.staleness().steps)
    assert seen == [1, 2, 3, 1, 2, 3, 1, 2]


def test_the_sampler_is_rebuilt_each_epoch():
    head = make_head("epoch")
    optimizer = torch.optim.SGD(head.parameters(), lr=0.5)
    for step in range(3):
        train_step(head, optimizer, step)
    assert head.staleness() == (3, -1)
    assert not torch.equal(head.sampler.rows, head.weight)
    head.eval()
    head.train()
    before = head.weight.detach().clone()
    train_step(head, optimizer, 9)
    assert torch.equal(head.sampler.rows, before)
    assert head.staleness() == (1, -1)


def test_without_a_policy_nothing_follows():
    head = make_head(None)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.5)
    before = head.sampler.rows.clone()
    train_step(head, optimizer, 0)
    assert torch.equal(head.sampler.rows, before)
    assert head.staleness() == (0, 0)
    head.update_sampler()
    assert torch.equal(head.sampler.rows, head.weight)
    assert sx.SampledClassifier(8, 120, sx.samplers.Uniform(120), 6).sampler_update is None


def test_a_checkpoint_resumes_the_draws():
    head = make_head()
    optimizer = torch.optim.SGD(head.parameters(), lr=0.5)
    for step in range(3):
        train_step(head, optimizer, step)
    state = copy.deepcopy(head.state_dict())
    assert head.staleness().steps == 1  # making a checkpoint changes nothing; it holds how far the sampler lags
    assert state["sampler_lag"].shape[0] == 2 + head.staleness().rows
    other = make_head()
    other.load_state_dict(state)
    for resumed in (head, other):
        train_step(resumed, torch.optim.SGD(resumed.parameters(), lr=0.5), 7)
    assert torch.equal(head.weight, other.weight)
    # A checkpoint of nn.Linear brings rows that the sampler has not seen.
    other.load_state_dict({"weight": head.weight.detach()})
    assert other.staleness() == (0, -1)
    other(torch.randn(2, 8), torch.tensor([0, 1]))
    assert torch.equal(other.sampler.rows, other.weight)


def test_bad_policies():
    for policy in ("always", 0, -1, True, 1.5):
        with pytest.raises(ValueError, match="sampler_update must be 'auto', 'step', an int of at least 1"):
            make_head(policy)
    with pytest.raises(ValueError, match="sampler_update must be None with NegativeSampling"):
        make_head("step", loss="negative_sampling")
    assert make_head("auto", loss="negative_sampling").sampler_update is None
    sampler = Quadratic(torch.zeros(10, 4), bias=torch.zeros(10))
    with pytest.raises(ValueError, match="bias must be True with a sampler that has a bias"):
        sx.SampledClassifier(4, 10, sampler, 3, bias=False)


def test_training_with_a_kernel_sampler_learns():
    """Classes on the sphere: after some steps the sampled loss has found them, and the distribution has followed."""
    torch.manual_seed(0)
    centres = rows_of(200, 8, 5)
    sampler = RandomFourier(torch.zeros(200, 8), 128, 2.0, key=sx.Key(1))
    head = sx.SampledClassifier(8, 200, sampler, num_samples=10, bias=False, scale=4.0)
    optimizer = torch.optim.SGD(head.parameters(), lr=20.0)
    first = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(150):
            y = torch.randint(200, (64,))
            optimizer.zero_grad()
            loss = head(centres[y], y, key=sx.Key(step))
            loss.backward()
            optimizer.step()
            first = float(loss) if first is None else first
    head.eval()
    assert float(head(centres, torch.arange(200))) < 0.7 * first
