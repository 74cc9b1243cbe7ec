"""Shared draws from samplers with a distribution for each row; copies of a class merged; classes without examples."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import chisquare

import samplex_cuda as sx
from samplex_cuda.draw import Draw
from samplex_cuda.samplers import (
    MIDX,
    Bigram,
    Mixture,
    Quadratic,
    Quartic,
    RandomFourier,
    Softmax,
    Tree,
    Uniform,
    Unigram,
)
from samplex_cuda.tree_fit import fit_tree

C, D = 23, 6


def make_tree(*, unseen: bool = True, seed: int = 0) -> Tree:
    g = torch.Generator().manual_seed(seed)
    x, y = torch.randn(300, D, generator=g), torch.randint(0, C - 3, (300,), generator=g)  # the last 3 do not occur
    fitted = fit_tree(x, y, C, reg=0.5, unseen=unseen, progress=False)
    return Tree(fitted.weights, fitted.bias, fitted.leaf_class)


def make(name: str) -> tuple[sx.samplers.Sampler, torch.Tensor | None]:
    """A sampler with a distribution for each row, and the context of 7 rows where it needs one."""
    g = torch.Generator().manual_seed(3)
    weight = torch.randn(C, D, generator=g)
    tokens = torch.randint(0, C, (400,), generator=g)
    context = torch.randint(0, C, (7,), generator=g)
    bigram = Bigram.from_tokens(tokens, num_classes=C, backoff=0.2)
    if name == "bigram":
        return bigram, context
    if name == "mixture":
        return Mixture([(make_tree(), 2), (bigram, 1), (Uniform(C), 1)]), context
    made = {
        "tree": make_tree,
        "quadratic": lambda: Quadratic(weight),
        "rff": lambda: RandomFourier(weight, 64, 0.5, kind="positive", key=sx.Key(1)),
        "midx": lambda: MIDX(weight, 5, bias=torch.randn(C, generator=g), key=sx.Key(1)),
        "softmax": lambda: Softmax(weight),
        "quartic": lambda: Quartic(weight),
    }
    return made[name](), None


NAMES = ["tree", "bigram", "quadratic", "rff", "midx", "softmax", "quartic", "mixture"]


def rows(seed: int = 5, count: int = 7) -> torch.Tensor:
    return torch.randn(count, D, generator=torch.Generator().manual_seed(seed))


def mean_law(sampler: sx.samplers.Sampler, h: torch.Tensor, context: torch.Tensor | None) -> torch.Tensor:
    """The mean of the rows' distributions, [C] float64, from the rows' own log_prob."""
    every = torch.arange(C).expand(h.shape[0], -1)
    return sampler.log_prob(h, every, context=context).double().exp().mean(0)


@pytest.mark.parametrize("name", NAMES)
def test_shared_draws_follow_the_mean_of_the_laws(name):
    sampler, context = make(name)
    h = rows()
    want = mean_law(sampler, h, context)
    draw = sampler.sample(h, 20_000, shared=True, key=sx.Key(1), context=context)
    assert draw.ids.shape == draw.log_q.shape == (20_000,)
    assert draw.independent
    torch.testing.assert_close(draw.log_q.double().exp(), want[draw.ids], rtol=5e-6, atol=1e-12)
    assert chisquare(draw.ids.bincount(minlength=C).numpy(), (want * 20_000).numpy() / float(want.sum())).pvalue > 1e-4
    every = sampler.log_prob_shared(h, torch.arange(C), context=context)
    assert torch.equal(draw.log_q, every[draw.ids])
    assert abs(float(every.double().exp().sum()) - 1.0) < 1e-5
    assert torch.equal(
        every[:4].reshape(2, 2), sampler.log_prob_shared(h, torch.arange(4).reshape(2, 2), context=context)
    )
    again = sampler.sample(h, 20_000, shared=True, key=sx.Key(1), context=context)
    assert torch.equal(draw.ids, again.ids)
    other = sampler.sample(h, 20_000, shared=True, key=sx.Key(2), context=context)
    assert not torch.equal(draw.ids, other.ids)
    assert sampler.conditional


@pytest.mark.parametrize("name", NAMES)
def test_shared_draws_leave_bad_rows_out(name):
    sampler, context = make(name)
    h = rows()
    good = mean_law(sampler, h[:5], None if context is None else context[:5])
    h[5, 2], h[6, 0] = math.nan, math.inf
    draw = sampler.sample(h, 500, shared=True, key=sx.Key(1), context=context)
    torch.testing.assert_close(draw.log_q.double().exp(), good[draw.ids], rtol=5e-6, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_shared_draws_of_nothing(name):
    sampler, context = make(name)
    none = None if context is None else context[:0]
    draw = sampler.sample(torch.empty(0, D), 3, shared=True, key=sx.Key(1), context=none)
    assert draw.ids.shape == draw.log_q.shape == (3,)
    assert bool(((draw.ids >= 0) & (draw.ids < C)).all())
    assert sampler.sample(rows(), 0, shared=True, context=context).ids.shape == (0,)


@pytest.mark.parametrize("name", [*NAMES, "uniform"])
def test_shared_draws_exclude_nothing(name):
    sampler, context = (Uniform(C), None) if name == "uniform" else make(name)
    with pytest.raises(ValueError, match="exclude must be None with shared=True"):
        sampler.sample(rows(), 5, shared=True, exclude=torch.arange(7), context=context)


def test_scores_beside_shared_draws_are_of_the_shared_law():
    sampler, _ = make("tree")
    h, target = rows(), torch.arange(7)
    draw, scores = sampler.sample_and_score(h, 9, target, shared=True, key=sx.Key(4))
    assert draw.ids.shape == (9,)
    torch.testing.assert_close(scores.double().exp(), mean_law(sampler, h, None)[target], rtol=5e-6, atol=1e-12)
    static = Unigram(torch.arange(C) + 1.0)
    _, scores = static.sample_and_score(h, 9, target, shared=True, key=sx.Key(4))
    assert torch.equal(scores, static.log_prob(h, target))
    assert torch.equal(static.log_prob_shared(h, target), scores)
    assert not static.conditional
    assert not Mixture([(static, 1), (Uniform(C), 1)]).conditional


@pytest.mark.parametrize("stratified", [False, True])
def test_the_normaliser_is_right_in_expectation(stratified):
    """E[sum of exp(o')] over shared draws of the tree is the sum over the other classes (the target is masked)."""
    g = torch.Generator().manual_seed(0)
    weight, h, target = 0.3 * torch.randn(C, D, generator=g), rows(), torch.arange(7)
    tree = make_tree()
    exact = (h @ weight.T).double().exp()
    want = exact.sum(1) - exact[torch.arange(7), target]
    sums = torch.zeros(7, dtype=torch.float64)
    squares = torch.zeros(7, dtype=torch.float64)
    count = 400
    for number in range(count):
        ids, log_q, _ = tree.sample(h, 64, shared=True, key=sx.Key(9, number), stratified=stratified)
        _, lse = sx.functional.sampled_softmax(h, weight, target, ids, log_q, return_lse=True, reduction="none")
        found = lse.double().exp() - exact[torch.arange(7), target]
        sums += found
        squares += found.square()
    mean, variance = sums / count, squares / count - (sums / count).square()
    assert bool(((mean - want).abs() < 4.5 * (variance / count).sqrt()).all())
    # What independent draws have, exactly: (sum of e^2 / q - S^2) / m. Strata never vary more.
    others = exact.clone()
    others[torch.arange(7), target] = 0.0
    independent = ((others.square() / mean_law(tree, h, None)).sum(1) - others.sum(1).square()) / 64
    ratio = variance / independent
    assert bool((ratio < (0.9 if stratified else 1.5)).all())
    if not stratified:
        assert bool((ratio > 0.6).all())


# ------------------------------------------------------------------------------------------------ strata
@pytest.mark.parametrize("loss", ["sampled_softmax", "one_vs_each", "augment_reduce"])
def test_a_head_draws_in_strata(loss):
    of_head = sx.losses.AugmentReduce(7) if loss == "augment_reduce" else loss
    head = head_of(make_tree(), of_head, m=40, stratified=True)
    index = torch.arange(7)
    got = head(rows(), torch.arange(7), key=sx.Key(3), index=index)
    drawn = head.sampler.sample(rows(), 40, shared=True, stratified=True, key=sx.Key(3))
    assert not drawn.independent
    weight, target = head.weight, torch.arange(7)
    if loss == "augment_reduce":
        log_eta = torch.full((7,), math.log(C))
        want = sx.functional.augment_reduce(rows(), weight, target, *drawn[:2], log_eta, bias=head.bias)
    else:
        want = getattr(sx.functional, loss)(rows(), weight, target, *drawn[:2], bias=head.bias)
    torch.testing.assert_close(got, want)
    assert "stratified=True" in repr(head)


def test_draws_in_strata_merge_in_their_order():
    draw = make_tree().sample(rows(), 200, shared=True, stratified=True, key=sx.Key(1))
    merged, sorted_ = draw.merged(), Draw(draw.ids, draw.log_q).merged()
    assert merged.ids.shape[0] < 200
    assert torch.equal(merged.ids, draw.ids.unique_consecutive())
    order = merged.ids.argsort()
    assert torch.equal(merged.ids[order], sorted_.ids)
    assert torch.equal(merged.log_q[order], sorted_.log_q)


def test_strata_are_for_shared_draws_of_a_tree():
    with pytest.raises(ValueError, match="stratified must be False without shared=True, got True"):
        make_tree().sample(rows(), 5, stratified=True)
    message = "stratified requires shared=True, a Tree or a MIDX and a loss that weights its draws"
    for sampler, loss in ((Uniform(C), "sampled_softmax"), (make_tree(), "nce")):
        with pytest.raises(ValueError, match=message):
            head_of(sampler, loss, stratified=True)
    with pytest.raises(ValueError, match=f"{message}, got shared=False, Tree and SampledSoftmax"):
        sx.SampledClassifier(D, C, make_tree(), num_samples=5, stratified=True)


# ------------------------------------------------------------------------------------------------ merged draws
def losses_of(loss: str, draw: Draw, h: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if loss == "augment_reduce":
        return sx.functional.augment_reduce(h, weight, target, draw.ids, draw.log_q, torch.zeros(h.shape[0]).double())
    return getattr(sx.functional, loss)(h, weight, target, draw.ids, draw.log_q)


@pytest.mark.parametrize("loss", ["sampled_softmax", "one_vs_each", "augment_reduce"])
def test_merged_draws_have_the_same_loss(loss):
    g = torch.Generator().manual_seed(1)
    h, target = rows().double(), torch.arange(7)
    draw = Unigram(torch.tensor([9.0, 5, 3] + [1] * (C - 3))).sample(None, 200, shared=True, key=sx.Key(3))
    draw = Draw(draw.ids, draw.log_q.double())
    merged = draw.merged()
    assert merged.ids.shape[0] == draw.ids.unique().numel() < 200
    assert not merged.independent
    found = []
    for one in (draw, merged):
        weight = torch.randn(C, D, generator=g.manual_seed(2), dtype=torch.float64).requires_grad_()
        query = h.clone().requires_grad_()
        value = losses_of(loss, one, query, weight, target)
        value.backward()
        found.append((value, weight.grad.to_dense(), query.grad))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_draws_without_copies_stay():
    draw = Draw(torch.tensor([4, 1, 7]), torch.zeros(3))
    assert draw.merged() is draw
    with pytest.raises(ValueError, match=r"ids must be \[m\]"):
        Draw(torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3)).merged()
    assert not Draw(torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3)).repeats()


def head_of(sampler, loss="sampled_softmax", m=300, **options) -> sx.SampledClassifier:
    torch.manual_seed(0)
    return sx.SampledClassifier(D, C, sampler, num_samples=m, loss=loss, shared=True, **options)


@pytest.mark.parametrize(
    ("loss", "merges"),
    [
        (sx.losses.SampledSoftmax(), True),
        (sx.losses.OneVsEach(), True),
        (sx.losses.SampledSoftmax(label_smoothing=0.1), False),
        (sx.losses.NCE(), False),
    ],
)
def test_a_head_merges_where_that_is_the_same(monkeypatch, loss, merges):
    seen = []
    inner = type(loss).forward

    def spy(self, x, *args):
        seen.append(x.ids.shape[0])
        return inner(self, x, *args)

    monkeypatch.setattr(type(loss), "forward", spy)
    head_of(make_tree(), loss)(rows(), torch.arange(7), key=sx.Key(0)).backward()
    assert (seen[0] <= C) if merges else seen == [300]


def test_a_head_with_few_copies_does_not_look_for_them(monkeypatch):
    monkeypatch.setattr(Draw, "merged", lambda self: pytest.fail("merged"))
    head = sx.SampledClassifier(D, 100_000, Uniform(100_000), num_samples=64, shared=True)
    head(rows(), torch.arange(7))


@pytest.mark.parametrize("stratified", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_a_head_learns_from_shared_draws_of_a_tree(fused, stratified):
    g = torch.Generator().manual_seed(0)
    centres = torch.randn(C, D, generator=g) * 3
    y = torch.randint(0, C, (2000,), generator=g)
    x = centres[y] + 0.3 * torch.randn(2000, D, generator=g)
    head = head_of(Tree.fit(x, y, num_classes=C, dim=4, progress=False), m=64, stratified=stratified)
    optimizer = sx.optim.RowAdagrad(head.parameters(), lr=0.5)
    if fused:
        head.fuse_optimizer(optimizer)
    for step in range(150):
        part = slice(step * 64 % 1920, step * 64 % 1920 + 64)
        head(x[part], y[part], key=sx.Key(1, step)).backward()
        if not fused:
            optimizer.step()
            optimizer.zero_grad()
    assert float((head.predict(x) == y).float().mean()) > 0.9


def test_negative_sampling_needs_the_law_of_a_row():
    with pytest.raises(ValueError, match=r"shared must be False with NegativeSampling\(\)"):
        head_of(make_tree(), loss="negative_sampling")
    head_of(Uniform(C), loss="negative_sampling")  # one distribution for all: fine


@pytest.mark.parametrize("weighted", [False, True])
def test_the_gradient_of_h_is_left_out_where_nobody_asks(weighted):
    """Without a gradient of h the class rows get the same one; with it, it is the right one (against fp64)."""
    draw = make_tree().sample(rows(), 40, shared=True, key=sx.Key(0))
    weight = torch.randn(C, D, generator=torch.Generator().manual_seed(0))
    class_weight = torch.rand(C) if weighted else None
    found = []
    for need in (False, True):
        w, h = weight.clone().requires_grad_(), rows().requires_grad_(need)
        sx.functional.sampled_softmax(h, w, torch.arange(7), *draw[:2], class_weight=class_weight).backward()
        found.append((w.grad.to_dense(), h.grad))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] is None
    h = rows().double().requires_grad_()
    weights = None if class_weight is None else class_weight.double()
    args = (weight.double(), torch.arange(7), draw.ids, draw.log_q.double())
    sx.functional.sampled_softmax(h, *args, class_weight=weights).backward()
    torch.testing.assert_close(found[1][1].double(), h.grad, rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------------------------------ unseen classes
def test_unseen_classes_have_probability_zero():
    open_tree, closed = make_tree(), make_tree(unseen=False)
    h = rows(count=50)
    p = closed.log_prob_all(h).double().exp()
    assert bool((p[:, C - 3 :] == 0).all())
    assert bool((p[:, : C - 3] > 0).all())
    torch.testing.assert_close(p.sum(1), torch.ones(50, dtype=torch.float64), rtol=1e-6, atol=0)
    assert bool((open_tree.log_prob_all(h) > -math.inf).all())
    for shared in (False, True):
        assert int(closed.sample(h, 400, shared=shared, key=sx.Key(1)).ids.max()) < C - 3


def test_closing_unseen_classes_keeps_the_rest_of_the_tree():
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(200, 4, generator=g), torch.randint(0, 6, (200,), generator=g)
    whole = [fit_tree(x, y, 6, unseen=unseen, progress=False) for unseen in (True, False)]
    assert torch.equal(whole[0].bias[1:], whole[1].bias[1:])  # nothing to close
    wide = [fit_tree(x, y, 40, unseen=unseen, progress=False) for unseen in (True, False)]
    assert torch.equal(wide[0].leaf_class, wide[1].leaf_class)
    assert wide[1].train_log_prob > wide[0].train_log_prob  # what the others had goes to classes that occur
    assert abs(wide[1].train_log_prob - wide[1].mean_log_prob(x, y)) < 1e-9
