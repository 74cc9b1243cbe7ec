"""A tree with a base: bits on every backend, exclusion, shared and stratified draws, state."""

from __future__ import annotations

import copy

import pytest
import torch
from test_tree import make_parameters, make_tree

import samplex_cuda as sx
from samplex_cuda import _native
from samplex_cuda._checks import op_error
from samplex_cuda.samplers import Mixture, Tree, Unigram

C = 37


def counts_of(classes: int, zeros: int = 0) -> torch.Tensor:
    counts = torch.randint(1, 50, (classes,), generator=torch.Generator().manual_seed(classes)).double()
    counts[:zeros] = 0
    return counts


def make(classes: int = C, device="cpu", *, weight: float = 0.4, zeros: int = 0, dim: int = 6, spread: float = 3.0):
    tree = make_tree(classes, dim, device, seed=classes, spread=spread)
    tree.set_base(Unigram(counts_of(classes, zeros)), weight)
    return tree


def truth(tree: Tree, x: torch.Tensor) -> torch.Tensor:
    """log q of every class in float64."""
    bare = copy.deepcopy(tree)
    bare.set_base(None)
    share, units = float(tree.base_share), tree.base_units.double().cpu()
    return ((1 - share) * bare.log_prob_all(x).double().cpu().exp() + share * units / units.sum()).log()


def without(log_q: torch.Tensor, rows: list[list[int]]) -> torch.Tensor:
    out = log_q.clone()
    for row, ids in zip(out, rows, strict=True):
        row[ids] = -torch.inf
    return out - out.logsumexp(1, keepdim=True)


# ------------------------------------------------------------------------------------------------ the distribution
@pytest.mark.parametrize("zeros", [0, 2])
@pytest.mark.parametrize("classes", [3, 37, 64])
def test_log_prob_is_that_of_the_mixture(backend, classes, zeros):
    tree = make(classes, backend.device, zeros=zeros)
    x = torch.randn(4, 6, device=backend.device)
    got = tree.log_prob_all(x)
    torch.testing.assert_close(got.cpu().double(), truth(tree, x), rtol=3e-6, atol=3e-6)
    every = torch.arange(classes, device=backend.device).expand(4, -1)
    assert torch.equal(tree.log_prob(x, every), got)
    draw = tree.sample(x, 50, key=sx.Key(3))
    assert torch.equal(draw.log_q, got.gather(1, draw.ids))  # the very bits


@pytest.mark.parametrize("width", [1, 3, 36, 37])
@pytest.mark.parametrize("zeros", [0, 5])
def test_excluding_is_exact(backend, width, zeros):
    tree = make(C, backend.device, zeros=zeros)
    x = torch.randn(5, 6, device=backend.device)
    g = torch.Generator().manual_seed(width)
    exclude = torch.stack([torch.randperm(C, generator=g)[:width] for _ in range(5)]).to(backend.device)
    every = torch.arange(C, device=backend.device).expand(5, -1)
    got = tree.log_prob(x, every, exclude=exclude).cpu()
    if width < C:
        want = without(truth(tree, x), exclude.tolist())
        torch.testing.assert_close(got.double(), want, rtol=5e-6, atol=5e-6)
    draw = tree.sample(x, 40, key=sx.Key(5), exclude=exclude)
    assert torch.equal(draw.log_q.cpu(), got.gather(1, draw.ids.cpu()))
    if width < C:
        assert bool((draw.ids[:, :, None] != exclude[:, None, :]).all())
    else:
        assert bool((draw.log_q == 0).all())


def chi_square(counts: torch.Tensor, p: torch.Tensor) -> float:
    """z of the statistic over cells with five expected draws or more, the rest in one."""
    want = p * counts.sum()
    large = want >= 5
    seen = torch.cat([counts[large], counts[~large].sum()[None]]).double()
    want = torch.cat([want[large], want[~large].sum()[None]])
    seen, want = seen[want > 0], want[want > 0]
    free = len(want) - 1
    return float((((seen - want) ** 2 / want).sum() - free) / (2 * free) ** 0.5)


@pytest.mark.parametrize("excluded", [0, 1, 4])
def test_draws_follow_the_mixture(excluded):
    tree, n = make(C), 200_000
    x = torch.randn(1, 6, generator=torch.Generator().manual_seed(1))
    likely = tree.log_prob_all(x)[0].topk(max(1, excluded)).indices
    exclude = likely[None, :excluded] if excluded else None
    draw = tree.sample(x, n, key=sx.Key(9), exclude=exclude)
    p = truth(tree, x) if exclude is None else without(truth(tree, x), exclude.tolist())
    assert chi_square(torch.bincount(draw.ids[0], minlength=C), p[0].exp()) < 5


@pytest.mark.parametrize("stratified", [False, True])
def test_shared_draws_follow_the_mean_of_the_mixtures(backend, stratified):
    tree, n = make(C, backend.device), 300 if backend.emulated else 100_000
    x = torch.randn(6, 6, generator=torch.Generator().manual_seed(2)).to(backend.device)
    q = truth(tree, x).exp().mean(0)
    every = torch.arange(C, device=backend.device)
    got = tree.log_prob_shared(x, every)
    torch.testing.assert_close(got.cpu().double(), q.log(), rtol=3e-6, atol=3e-6)
    draw = tree.sample(x, n, shared=True, key=sx.Key(4), stratified=stratified)
    assert torch.equal(draw.log_q, got[draw.ids])
    counts = torch.bincount(draw.ids.cpu(), minlength=C)
    if stratified:
        assert float((counts - n * q).abs().max()) < 2.0  # what strata promise
    else:
        assert chi_square(counts, q) < 5


# ------------------------------------------------------------------------------------------------ bits
def everything(tree: Tree, x: torch.Tensor, exclude: torch.Tensor):
    one = exclude[:, :1]
    return [
        *tree.sample(x, 70, key=sx.Key(1))[:2], *tree.sample(x, 70, key=sx.Key(1), exclude=one)[:2],
        *tree.sample(x, 9, key=sx.Key(2), exclude=exclude)[:2], tree.log_prob_all(x),
        tree.log_prob(x, exclude, exclude=one), *tree.sample(x, 40, shared=True, key=sx.Key(3))[:2],
        *tree.sample(x, 40, shared=True, key=sx.Key(3), stratified=True)[:2],
        *tree.sample_and_score(x, 12, exclude[:, 0], key=sx.Key(4))[0][:2],
    ]  # fmt: skip


def problem():
    tree = make(100, dim=16)
    g = torch.Generator().manual_seed(7)
    return tree, torch.randn(9, 16, generator=g), torch.randint(0, 100, (9, 3), generator=g)


def test_every_backend_and_level_draws_the_same_bits(backend):
    tree, x, exclude = problem()
    before = _native.cpu_backend()
    _native.set_cpu_backend("cpu")
    want = everything(tree, x, exclude)
    _native.set_cpu_backend(before)
    got = everything(tree.to(backend.device), x.to(backend.device), exclude.to(backend.device))
    assert all(torch.equal(a.cpu(), b) for a, b in zip(got, want, strict=True))


def test_simd_levels_and_threads_draw_the_same_bits(simd_level):
    found = everything(*problem())
    threads = torch.get_num_threads()
    _native.set_simd_level("scalar")
    torch.set_num_threads(1)
    try:
        want = everything(*problem())
    finally:
        torch.set_num_threads(threads)
        _native.set_simd_level(simd_level)
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


def test_no_base_draws_as_before():
    tree = make(C)
    bare = make_tree(C, 6, seed=C, spread=3.0)
    tree.set_base(None)
    x, exclude = torch.randn(4, 6), torch.randint(0, C, (4, 2))
    for a, b in zip(everything(tree, x, exclude), everything(bare, x, exclude), strict=True):
        assert torch.equal(a, b)


def test_a_share_of_one_is_the_base_alone(backend):
    tree = make(C, backend.device, weight=1.0, zeros=3)
    base = Unigram(counts_of(C, 3))
    x = torch.randn(4, 6, device=backend.device)
    torch.testing.assert_close(tree.log_prob_all(x).cpu(), base.log_prob_all().expand(4, -1), rtol=1e-6, atol=1e-6)
    draw = tree.sample(x, 200, key=sx.Key(1), exclude=torch.full((4, 1), 5, device=backend.device))
    assert int(draw.ids.min()) >= 3
    assert not bool((draw.ids == 5).any())
    shared = tree.sample(x, 50, shared=True, key=sx.Key(1))
    assert int(shared.ids.min()) >= 3


def test_it_is_the_law_of_the_mixture_in_python():
    tree = make(C)
    other = tree.as_mixture()
    assert isinstance(other, Mixture)
    x, exclude = torch.randn(4, 6), torch.randint(0, C, (4, 2))
    every = torch.arange(C).expand(4, -1)
    for options in ({}, {"exclude": exclude}):
        torch.testing.assert_close(tree.log_prob(x, every, **options), other.log_prob(x, every, **options))


def test_a_row_with_nan_has_nan(backend):
    tree = make(C, backend.device)
    x = torch.randn(3, 6, device=backend.device)
    x[1, 2] = torch.nan
    for exclude in (None, torch.tensor([[1], [2], [3]], device=backend.device)):
        draw = tree.sample(x, 20, key=sx.Key(0), exclude=exclude)
        assert draw.log_q[1].isnan().all()
        assert draw.log_q[0::2].isfinite().all()
        assert bool(((draw.ids >= 0) & (draw.ids < C)).all())


# ------------------------------------------------------------------------------------------------ state
def test_state_dict_keeps_the_base_and_takes_an_old_mixture():
    tree, x = make(C), torch.randn(3, 6)
    want = tree.sample(x, 20, key=sx.Key(0))
    fresh = Tree(*make_parameters(C, 6, seed=5))
    fresh.load_state_dict(tree.state_dict())
    assert torch.equal(fresh.sample(x, 20, key=sx.Key(0)).log_q, want.log_q)
    old = {k: v for k, v in make_tree(C, 6, seed=1).state_dict().items() if not k.startswith("base")}
    fresh.load_state_dict(old)  # from before there was a base: none
    assert not fresh.has_base
    fresh.load_state_dict(tree.as_mixture().state_dict())
    torch.testing.assert_close(fresh.log_prob_all(x), tree.log_prob_all(x))
    bad = tree.state_dict() | {"base_units": -tree.base_units}
    with pytest.raises(RuntimeError, match="base_units must not be negative"):
        fresh.load_state_dict(bad)


def test_a_refit_keeps_the_base():
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(300, 5, generator=g), torch.randint(0, 20, (300,), generator=g)
    base = Unigram(torch.bincount(y, minlength=20) + 1)
    tree = Tree.fit(x, y, num_classes=20, dim=3, progress=False, base=base, base_weight=0.3)
    tree.refit(x[100:] * 2, y[100:], progress=False)
    torch.testing.assert_close(tree.log_prob_all(x[:4]).double(), truth(tree, x[:4]), rtol=1e-5, atol=1e-5)
    assert float(tree.base_share) == 0.3


def test_what_is_refused():
    tree = make_tree(C, 6)
    with pytest.raises(TypeError, match="base must be a Unigram"):
        tree.set_base(sx.samplers.Uniform(C))
    with pytest.raises(ValueError, match="num_classes = 37, got 36"):
        tree.set_base(Unigram(counts_of(36)))
    for weight in (0.0, 1.5, float("nan")):
        with pytest.raises(ValueError, match="base_weight"):
            tree.set_base(Unigram(counts_of(C)), weight)
    assert not tree.has_base
    full = make(C)
    args = torch.zeros(2, dtype=torch.int64), torch.randn(2, 6), full.nodes, full.leaf_class, full.class_leaf, 3
    op = torch.ops.samplex.tree_sample
    for base, said in (
        ((full.base_table, None, 0.5), "given together"),
        ((full.base_table[:5], full.base_prefix, 0.5), "base_table must be"),
        ((full.base_table, full.base_prefix, 0.0), "base_weight must be"),
    ):
        with pytest.raises(Exception, match=said) as error:
            op(*args, None, None, *base)
        assert isinstance(op_error(error.value), ValueError | TypeError)
