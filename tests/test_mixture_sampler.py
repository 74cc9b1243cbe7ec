"""Mixture: the distribution, exclusion without cancellation, shared draws, keys, state, errors."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

import samplex_cuda as sx
from samplex_cuda.rng import fold_in

C = 40
COUNTS = [(k * 7) % 11 for k in range(C)]


@functools.cache
def tree():
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(400, 5, generator=g), torch.randint(C, (400,), generator=g)
    return sx.samplers.Tree.fit(x, y, num_classes=C, dim=4, progress=False)


def make(kind):
    g = torch.Generator().manual_seed(1)
    weight = torch.randn(C, 5, generator=g)
    return {
        "static": lambda: sx.samplers.Mixture(
            [(sx.samplers.Uniform(C), 1), (sx.samplers.Unigram(COUNTS), 2), (sx.samplers.LogUniform(C), 1)]
        ),
        "queries": lambda: sx.samplers.Mixture(
            [(sx.samplers.Uniform(C), 0.1), (sx.samplers.Softmax(weight), 0.5), (tree(), 0.4)]
        ),
        "context": lambda: sx.samplers.Mixture(
            [(sx.samplers.Bigram.from_tokens([0, 1, 2, 0, 1, 3, 0, 1], C), 0.7), (sx.samplers.Uniform(C), 0.3)]
        ),
        "nested": lambda: sx.samplers.Mixture([(make("static"), 1), (sx.samplers.Uniform(C), 1)]),
    }[kind]()


KINDS = ["static", "queries", "context", "nested"]
H = torch.randn(3, 5, generator=torch.Generator().manual_seed(2))
CONTEXT = torch.tensor([0, 1, 39])
EXCLUDES = {
    "none": (None, [[], [], []]),
    "target": (torch.tensor([0, 7, 39]), [[0], [7], [39]]),
    "padded": (torch.tensor([[1, -1, 2], [-1, -1, -1], [5, 5, 6]]), [[1, 2], [], [5, 6]]),
    "csr": ((torch.tensor([0, 2, 2, 3]), torch.tensor([9, 3, 1])), [[9, 3], [], [1]]),
}


def law(sampler, rows):
    """[B, C] float64: the mixture of the components' own distributions, conditioned afterwards."""
    if isinstance(sampler, sx.samplers.Mixture):
        parts = [law(part, [[]] * 3) for part in sampler.samplers]
        q = sum(w * p for w, p in zip(sampler.weights.tolist(), parts, strict=True))
    elif isinstance(sampler, sx.samplers.Bigram):
        q = sampler.log_prob_all(context=CONTEXT).double().exp().numpy()
    else:
        q = sampler.log_prob_all(H).double().exp().numpy()
    q = np.array(q)
    for row, ids in enumerate(rows):
        q[row, ids] = 0
    return q / q.sum(1, keepdims=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", EXCLUDES)
def test_log_prob_is_that_of_the_mixture(kind, form):
    sampler = make(kind)
    exclude, rows = EXCLUDES[form]
    wanted = law(sampler, rows)
    every = torch.arange(C).expand(3, -1)
    got = sampler.log_prob(H, every, exclude=exclude, context=CONTEXT)
    assert got.dtype == torch.float32
    np.testing.assert_allclose(got.double().exp(), wanted, rtol=2e-5)
    draw = sampler.sample(H, 60, key=sx.Key(4), exclude=exclude, context=CONTEXT)
    assert torch.equal(draw.log_q, sampler.log_prob(H, draw.ids, exclude=exclude, context=CONTEXT))
    np.testing.assert_allclose(draw.log_q.double().exp(), np.take_along_axis(wanted, draw.ids.numpy(), 1), rtol=2e-5)
    for row in range(3):
        assert not set(draw.ids[row].tolist()) & set(rows[row])
    if exclude is None:
        torch.testing.assert_close(sampler.log_prob_all(H, context=CONTEXT), got)


@pytest.mark.stat
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["none", "target"])
def test_draws_follow_the_law(kind, form):
    sampler, n = make(kind), 8_000 if kind == "queries" else 30_000
    exclude, rows = EXCLUDES[form]
    ids = sampler.sample(H, n, key=sx.Key(6), exclude=exclude, context=CONTEXT).ids.numpy()
    for row, p in enumerate(law(sampler, rows)):
        seen = np.bincount(ids[row], minlength=C)
        assert seen[p == 0].sum() == 0
        common = n * p > 5
        chi2 = ((seen - n * p)[common] ** 2 / (n * p)[common]).sum()
        dof = common.sum() - 1
        assert chi2 < dof + 5 * np.sqrt(2 * dof), (row, chi2, dof)


@pytest.mark.stat
def test_draws_of_a_row_are_independent():
    """Neighbouring draws of one key: as often equal as the distribution says, also with a mixture inside a mixture."""
    sampler, n = make("nested"), 40_000
    ids = sampler.sample(None, n, batch_size=1, key=sx.Key(8)).ids[0]
    p = law(sampler, [[]] * 3)[0]
    equal = (ids[1:] == ids[:-1]).double().mean().item()
    wanted = (p**2).sum()
    assert abs(equal - wanted) < 5 * np.sqrt(wanted / n) * 1.5


def test_the_mass_left_does_not_cancel():
    """One component has all but 1e-30 of its mass on the excluded class: it must hardly ever be chosen."""
    weight = torch.zeros(C, 1)
    weight[7] = 70.0
    peaked = sx.samplers.Softmax(weight)
    rare = sx.samplers.Unigram([1e18 if k == 7 else 1.0 for k in range(C)])
    h, exclude = torch.ones(1, 1), torch.tensor([7])
    wanted = np.log(39) - 70
    np.testing.assert_allclose(peaked._log_left(h, exclude, None, 1).item(), wanted, rtol=1e-6)
    np.testing.assert_allclose(sx.samplers.Sampler._log_left(peaked, h, exclude, None, 1).item(), wanted, rtol=1e-6)
    np.testing.assert_allclose(rare._log_left(None, exclude, None, 1).item(), np.log(39 / 1e18), rtol=1e-5)
    assert sx.samplers.Unigram([0, 3])._log_left(None, torch.tensor([1]), None, 1).item() == -np.inf
    mixture = sx.samplers.Mixture([(peaked, 0.5), (sx.samplers.LogUniform(C), 0.5)])
    got = mixture.log_prob(h, torch.arange(C)[None], exclude=exclude)
    alone = sx.samplers.LogUniform(C).log_prob(None, torch.arange(C)[None], exclude=exclude)
    torch.testing.assert_close(got, alone, rtol=1e-6, atol=1e-6)


def test_mass_left_of_every_form():
    sampler = sx.samplers.Unigram(COUNTS)
    p = np.array(COUNTS) / sum(COUNTS)
    for exclude, rows in list(EXCLUDES.values())[1:]:
        wanted = [np.log(1 - p[sorted(set(row))].sum()) for row in rows]
        np.testing.assert_allclose(sampler._log_left(None, exclude, None, 3), wanted, atol=2e-6)


def test_components_without_a_class_left():
    one, two = sx.samplers.Unigram([0, 0, 4, 0]), sx.samplers.Unigram([0, 1, 1, 0])
    mixture = sx.samplers.Mixture([(one, 0.9), (two, 0.1)])
    exclude = torch.tensor([[2, -1], [2, 1]])
    draw = mixture.sample(None, 20, exclude=exclude, key=sx.Key(0))
    assert draw.ids[0].eq(1).all()  # only the second component has a class left
    assert draw.ids[1].eq(1).all()  # nothing is left: the first excluded id
    torch.testing.assert_close(draw.log_q, torch.zeros(2, 20), atol=1e-6, rtol=0)
    got = mixture.log_prob(None, torch.arange(4).expand(2, -1), exclude=exclude).exp()
    torch.testing.assert_close(got, torch.tensor([[0.0, 1, 0, 0]] * 2), atol=1e-6, rtol=0)


# ------------------------------------------------------------------------------------------------ shared, keys
def test_shared_draws():
    sampler = make("static")
    draw = sampler.sample(None, 200, shared=True, key=sx.Key(1))
    assert draw.ids.shape == draw.log_q.shape == (200,)
    every = sampler.log_prob_all()[0]
    torch.testing.assert_close(draw.log_q, every[draw.ids])
    with_h = sampler.sample(H, 200, shared=True, key=sx.Key(1))
    assert torch.equal(draw.ids, with_h.ids)
    assert sampler.sample(None, 0, shared=True).ids.shape == (0,)
    seen = np.bincount(sampler.sample(None, 50_000, shared=True, key=sx.Key(3)).ids, minlength=C)
    p = law(sampler, [[]] * 3)[0]
    chi2 = ((seen - 50_000 * p) ** 2 / (50_000 * p)).sum()
    assert chi2 < C - 1 + 5 * np.sqrt(2 * (C - 1))
    assert make("queries").sample(H, 5, shared=True).ids.shape == (5,)
    with pytest.raises(ValueError, match="mixture: exclude must be None with shared=True"):
        sampler.sample(None, 5, shared=True, exclude=torch.tensor([0]))


def test_keys_and_positions():
    sampler = make("queries")
    ids = sampler.sample(H, 30, key=sx.Key(1)).ids
    assert torch.equal(ids, sampler.sample(H, 30, key=sx.Key(1)).ids)
    assert not torch.equal(ids, sampler.sample(H, 30, key=sx.Key(2)).ids)
    assert torch.equal(ids[:2, :9], sampler.sample(H[:2], 9, key=sx.Key(1)).ids)
    key = sx.Key(5)
    sampler.sample(H, 3, key=key)
    assert key == sx.Key(5, 1)


def test_folded_keys_differ():
    pair = torch.tensor([7, 3])
    once = [int(fold_in(pair, k)[0]) for k in range(20)]
    twice = [int(fold_in(fold_in(pair, k), j)[0]) for k in range(20) for j in range(20)]
    assert len(set(once + twice + [7])) == 421
    assert fold_in(pair, 0).dtype == torch.int64
    # SplitMix64 of seed 0: the first number of the published generator.
    assert int(fold_in(torch.tensor([0, 0]), 0)[0]) % 2**64 == 0xE220A8397B1DCDAF


# ------------------------------------------------------------------------------------------------ module
def test_state_dict_and_conversions():
    sampler = sx.samplers.Mixture([(sx.samplers.Unigram(COUNTS), 2), (sx.samplers.Uniform(C), 1)])
    other = sx.samplers.Mixture([(sx.samplers.Unigram([1] * C), 1), (sx.samplers.Uniform(C), 1)])
    assert sorted(sampler.state_dict()) == ["samplers.0.prefix", "samplers.0.table", "weights"]
    other.load_state_dict(sampler.state_dict())
    assert torch.equal(other.log_prob_all(), sampler.log_prob_all())
    assert sampler.half().weights.dtype == torch.float64
    assert sampler.to("meta").samplers[0].table.device.type == "meta"
    assert repr(other).startswith("Mixture(\n  weights=[0.6667, 0.3333]")


def test_update_and_rebuild_reach_the_components():
    softmax = sx.samplers.Softmax(torch.zeros(C, 5))
    sampler = sx.samplers.Mixture([(softmax, 1), (sx.samplers.Uniform(C), 1)])
    sampler.update(torch.tensor([3]), torch.ones(1, 5))
    assert softmax.weight[3].eq(1).all()
    sampler.rebuild(torch.full((C, 5), 2.0))
    assert softmax.weight.eq(2).all()
    assert (sampler.follows_rows, sampler.has_bias) == (True, False)
    with_bias = sx.samplers.Softmax(torch.zeros(C, 5), torch.zeros(C))
    both = sx.samplers.Mixture([(sampler, 1), (with_bias, 1)])
    assert (both.follows_rows, both.has_bias) == (True, True)
    both.update(torch.tensor([3]), torch.ones(1, 5), torch.ones(1))
    assert softmax.weight[3].eq(1).all()
    assert with_bias.bias[3] == 1
    assert not make("static").follows_rows


def test_the_head_keeps_components_up_to_date():
    weight = torch.zeros(C, 5)
    sampler = sx.samplers.Mixture([(sx.samplers.Softmax(weight), 0.9), (sx.samplers.Uniform(C), 0.1)])
    head = sx.SampledClassifier(5, C, sampler, num_samples=8)
    assert head.sampler_update == "step"
    optimizer = torch.optim.SGD(head.parameters(), lr=1.0)
    for _ in range(3):
        optimizer.zero_grad()
        head(H, torch.tensor([0, 3, 39])).backward()
        optimizer.step()
    head.update_sampler()
    assert torch.equal(sampler.samplers[0].weight, head.weight)


@pytest.mark.parametrize(("kind", "shared"), [("queries", False), ("static", True)])
def test_in_the_head(kind, shared):
    """Loss and gradients of the head are those of plain torch over the mixture's own draw."""
    sampler, y, m = make(kind), torch.tensor([0, 3, 39]), 8
    head = sx.SampledClassifier(5, C, sampler, num_samples=m, shared=shared, sampler_update=None)
    h = H.clone().requires_grad_()
    head(h, y, key=sx.Key(11)).backward()
    draw = sampler.sample(H, m, key=sx.Key(11), shared=shared, exclude=None if shared else y)
    ids, log_q = draw.ids.expand(3, m), draw.log_q.expand(3, m)
    x, weight, bias = (t.detach().double().requires_grad_() for t in (h, head.weight, head.bias))
    scores = x @ weight.T + bias
    negatives = scores.gather(1, ids) - log_q - np.log(m)
    negatives = negatives.masked_fill(ids == y[:, None], -np.inf)
    positive = scores.gather(1, y[:, None])
    (torch.cat([positive, negatives], 1).logsumexp(1) - positive[:, 0]).mean().backward()
    assert float(x.grad.abs().max()) > 0.01
    torch.testing.assert_close(h.grad, x.grad.float())
    torch.testing.assert_close(head.weight.grad.to_dense(), weight.grad.float())
    torch.testing.assert_close(head.bias.grad.to_dense(), bias.grad.float())


def test_shapes():
    sampler = make("static")
    every = sampler.log_prob_all(H)
    ids = torch.tensor([0, 3, 6, 9])
    torch.testing.assert_close(sampler.log_prob(H, ids), every[:, ids])
    torch.testing.assert_close(sampler.log_prob(None, ids), every[0, ids])
    torch.testing.assert_close(sampler.log_prob(H, ids[:3]), every[0, ids[:3]])
    assert sampler.sample(None, 0, batch_size=3).ids.shape == (3, 0)
    assert sampler.sample(None, 4, batch_size=0).ids.shape == (0, 4)
    assert make("context").sample(None, 4, context=CONTEXT).ids.shape == (3, 4)


def test_errors():
    M, uniform = sx.samplers.Mixture, sx.samplers.Uniform(C)
    for call, error, text in [
        (lambda: M([]), ValueError, "mixture: components must have at least one pair"),
        (lambda: M([uniform]), TypeError, r"mixture: components must be pairs \(sampler, weight\), got Uniform"),
        (lambda: M([(3, 1.0)]), TypeError, "mixture: components must hold samplers, got int"),
        (lambda: M([(uniform, 0)]), ValueError, "mixture: weight must be finite and above 0, got 0"),
        (lambda: M([(uniform, float("nan"))]), ValueError, "mixture: weight must be finite and above 0"),
        (
            lambda: M([(uniform, 1), (sx.samplers.Uniform(3), 1)]),
            ValueError,
            "mixture: samplers must have num_classes = 40, got 3",
        ),
        (lambda: make("static").sample(None, 3), ValueError, "mixture: batch_size must be given if h is None"),
        (lambda: make("static").sample(None, -3, batch_size=1), ValueError, "mixture: num_samples must be an int in"),
        (
            lambda: make("static").sample(None, 3, exclude="ab"),
            TypeError,
            "mixture: exclude must be a tensor or a pair",
        ),
        (lambda: make("context").sample(H, 3), ValueError, "bigram: context must be int64"),
        (
            lambda: make("static").log_prob(H, torch.zeros(2, 2, dtype=torch.int64)),
            ValueError,
            r"mixture: ids must be \[B\], \[B, n\] or \[n\] with B = 3, got \[2, 2\] int64",
        ),
        (lambda: make("static").log_prob(H, torch.tensor([0.0])), TypeError, "mixture: ids must be int64"),
        (lambda: make("static").log_prob(H, torch.tensor([C])), IndexError, r"ids must be in \[0, 40\)"),
    ]:
        with pytest.raises(error, match=text):
            call()


def test_offsets_of_no_batch_are_refused():
    sampler = sx.samplers.Mixture([(sx.samplers.Uniform(9), 1.0), (sx.samplers.LogUniform(9), 1.0)])
    offsets, ids = torch.empty(0, dtype=torch.int64), torch.tensor([2, 1])
    with pytest.raises(ValueError, match=r"^mixture: exclude must be \[B\], \[B, P\] or \(offsets \[B \+ 1\], ids"):
        sampler.sample(None, 4, exclude=(offsets, ids))
