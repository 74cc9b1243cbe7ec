"""What docs/losses.md says of the losses, checked with the ops by exact enumeration in float64.

Scores are tabular: h = [1], weight [C, 1] holds the scores. One batch row for every outcome of target and draws, so
that an expectation is a weighted sum of the op's rows, without any sampling noise.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from samplex_cuda import functional

pytestmark = pytest.mark.stat
C = 4


def law(seed: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.softmax(torch.randn(C, generator=g, dtype=torch.float64), 0)


DATA, NOISE = law(1), law(2).flip(0)  # the noise likes other classes than the scores below
SCORES = 1.5 * torch.randn(C, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def outcomes(draws: int, noise: torch.Tensor, *, exclude: bool) -> tuple[torch.Tensor, ...]:
    """Every (y, k_1 .. k_m): target [n], ids [n, m], log_q [n, m], and the probability of the draws given y [n]."""
    rows = torch.tensor(list(itertools.product(range(C), repeat=draws + 1)))
    target, ids = rows[:, 0], rows[:, 1:]
    q = noise.expand(C, C).clone()
    if exclude:
        q.fill_diagonal_(0.0)
        q = q / q.sum(1, keepdim=True)
        keep = (ids != target[:, None]).all(1)
        target, ids = target[keep], ids[keep]
    log_q = q[target[:, None], ids].log()
    return target, ids, log_q, log_q.sum(1).exp()


class Expectation:
    """Expected loss of each target, [C], and its gradient by the scores, [C, C], over all draws."""

    def __init__(self, loss, device, scores, draws=2, noise=NOISE, exclude=False, **options):
        target, ids, log_q, probability = outcomes(draws, noise, exclude=exclude)
        h = torch.ones(len(target), 1, dtype=torch.float64, device=device)
        leaf = scores.to(device)[:, None].clone().requires_grad_()
        log_p = noise.log()
        between = {
            "nce": lambda: (log_p[target].to(device),),
            "negative_sampling": lambda: (log_p[target].to(device),),
            "augment_reduce": lambda: (options.pop("log_eta")[target].to(device),),
        }.get(loss, tuple)()
        rows = getattr(functional, loss)(
            h, leaf, target.to(device), ids.to(device), log_q.to(device), *between, reduction="none", sparse=False,
            **options,
        )  # fmt: skip
        rows = rows * probability.to(device)
        sums = [rows[target == y].sum() for y in range(C)]
        self.loss = torch.stack(sums).detach().cpu()
        self.gradient = torch.stack([torch.autograd.grad(s, leaf, retain_graph=True)[0][:, 0] for s in sums]).cpu()

    def over(self, data: torch.Tensor) -> torch.Tensor:
        """Gradient of the expected loss where targets come from `data`: [C]."""
        return data @ self.gradient


def exact(loss, scores):
    """The sums that the draws estimate, per target, and their gradients: [C], [C, C]."""
    s = scores.clone().requires_grad_()
    others = ~torch.eye(C, dtype=torch.bool)
    above = s[None, :] - s[:, None]  # s_k - s_y of [y, k]
    rows = {
        "one_vs_each": lambda: torch.where(others, F.softplus(above, threshold=100.0), 0.0).sum(1),
        "softmax": lambda: -s.log_softmax(0),
    }[loss]()
    gradient = torch.stack([torch.autograd.grad(r, s, retain_graph=True)[0] for r in rows])
    return rows.detach(), gradient


# ------------------------------------------------------------------------------------------------ minimizers
@pytest.mark.parametrize("draws", [1, 2])
def test_nce_has_its_minimum_at_log_p_of_the_data(backend, draws):
    at = Expectation("nce", backend.device, DATA.log(), draws)
    assert at.over(DATA).abs().max() < 1e-14
    # Not up to a constant: the scores normalize themselves. And not where hits of the target are left out.
    assert Expectation("nce", backend.device, DATA.log() + 0.1, draws).over(DATA).abs().max() > 1e-3
    assert Expectation("nce", backend.device, DATA.log(), draws, exclude=True).over(DATA).abs().max() > 1e-3


def test_negative_sampling_has_its_minimum_at_the_log_ratio(backend):
    scores = DATA.log() - NOISE.log()  # prediction adds log p_n back
    assert Expectation("negative_sampling", backend.device, scores).over(DATA).abs().max() < 1e-14
    assert Expectation("negative_sampling", backend.device, DATA.log()).over(DATA).abs().max() > 1e-3


@pytest.mark.parametrize("exclude", [True, False])
def test_one_vs_each_has_its_minimum_at_the_softmax(backend, exclude):
    # Its bound is not tight, but p_y sigma(s_k - s_y) = p_k sigma(s_y - s_k) for every pair where s = log p + constant.
    at = Expectation("one_vs_each", backend.device, DATA.log() + 0.7, exclude=exclude)
    assert at.over(DATA).abs().max() < 1e-14
    assert Expectation("one_vs_each", backend.device, SCORES, exclude=exclude).over(DATA).abs().max() > 1e-3


@pytest.mark.parametrize("exclude", [True, False])
def test_augment_reduce_with_the_best_eta_has_its_minimum_at_the_softmax(backend, exclude):
    log_p = DATA.log()
    at = Expectation("augment_reduce", backend.device, log_p + 0.7, exclude=exclude, log_eta=-log_p)
    assert at.over(DATA).abs().max() < 1e-14
    # A stale eta moves it.
    stale = Expectation("augment_reduce", backend.device, log_p, exclude=exclude, log_eta=-log_p + torch.arange(C) / 4)
    assert stale.over(DATA).abs().max() > 1e-3


# ------------------------------------------------------------------------------------------------ unbiased, biased
@pytest.mark.parametrize("exclude", [True, False])
@pytest.mark.parametrize("draws", [1, 2])
def test_one_vs_each_is_unbiased(backend, exclude, draws):
    found = Expectation("one_vs_each", backend.device, SCORES, draws, exclude=exclude)
    loss, gradient = exact("one_vs_each", SCORES)
    torch.testing.assert_close(found.loss, loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(found.gradient, gradient, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("exclude", [True, False])
@pytest.mark.parametrize("draws", [1, 2])
def test_augment_reduce_is_unbiased_for_its_bound(backend, exclude, draws):
    log_eta = torch.linspace(0.3, 2.0, C, dtype=torch.float64)
    found = Expectation("augment_reduce", backend.device, SCORES, draws, exclude=exclude, log_eta=log_eta)
    nll, gradient = exact("softmax", SCORES)
    ratio = (nll - log_eta).exp()  # R / eta
    torch.testing.assert_close(found.loss, log_eta - 1 + ratio, rtol=1e-12, atol=0)
    # The gradient of the softmax, R / eta times as long.
    torch.testing.assert_close(found.gradient, ratio[:, None] * gradient, rtol=1e-11, atol=1e-13)


def test_sampled_softmax_is_biased_unless_it_draws_from_the_softmax(backend):
    nll, gradient = exact("softmax", SCORES)
    found = Expectation("sampled_softmax", backend.device, SCORES, exclude=True)
    assert (found.loss - nll).abs().max() > 1e-2
    assert (found.gradient - gradient).abs().max() > 1e-2
    perfect = Expectation("sampled_softmax", backend.device, SCORES, noise=SCORES.softmax(0), exclude=True)
    torch.testing.assert_close(perfect.gradient, gradient, rtol=0, atol=1e-13)


# ------------------------------------------------------------------------------------------------ bounds, variance
def all_classes(loss, device, scores, *between):
    """The loss of every target with each class drawn once, 1 / (m q) = 1: nothing is estimated."""
    h = torch.ones(C, 1, dtype=torch.float64, device=device)
    every = torch.arange(C, device=device)
    log_q = torch.full((C,), -math.log(C), dtype=torch.float64, device=device)
    weight = scores[:, None].to(device)
    return getattr(functional, loss)(h, weight, every, every, log_q, *between, reduction="none").cpu()


def test_the_bounds_are_bounds_and_augment_reduce_is_tight_at_the_best_eta(backend):
    nll, _ = exact("softmax", SCORES)
    assert (all_classes("one_vs_each", backend.device, SCORES) > nll).all()
    tight = all_classes("augment_reduce", backend.device, SCORES, nll.to(backend.device))
    torch.testing.assert_close(tight, nll, rtol=1e-13, atol=1e-14)
    for off in (-1.0, -0.1, 0.1, 1.0):
        assert (all_classes("augment_reduce", backend.device, SCORES, (nll + off).to(backend.device)) > nll).all()


def test_one_vs_each_has_no_variance_where_the_draws_follow_its_terms(backend):
    # q proportional to softplus(s_k - s_y): every draw gives the whole sum. Target 0, every other class drawn once.
    terms = F.softplus(SCORES[1:] - SCORES[0])
    ids = torch.arange(1, C, device=backend.device)[:, None]
    log_q = (terms / terms.sum()).log()[:, None].to(backend.device)
    h, target = torch.ones(C - 1, 1).double(), torch.zeros(C - 1, dtype=torch.int64)
    rows = functional.one_vs_each(
        h.to(backend.device), SCORES[:, None].to(backend.device), target.to(backend.device), ids, log_q,
        reduction="none",
    ).cpu()  # fmt: skip
    torch.testing.assert_close(rows, terms.sum().expand(C - 1), rtol=1e-13, atol=0)


def test_augment_reduce_with_its_own_sum_as_eta_has_the_gradient_of_sampled_softmax(backend):
    # eta_rate = 1 after a first look: eta = the estimate itself.
    g = torch.Generator().manual_seed(0)
    h, weight = torch.randn(6, 4, generator=g).double(), torch.randn(20, 4, generator=g).double()
    target, ids = torch.randint(20, (6,), generator=g), torch.randint(20, (6, 7), generator=g)
    log_q = torch.full((6, 7), -math.log(20.0)).double()
    args = [t.to(backend.device) for t in (h, weight, target, ids, log_q)]
    args[0].requires_grad_()
    start = torch.zeros(6, dtype=torch.float64, device=backend.device)
    _, log_sum = functional.augment_reduce(*args, start, reduction="none", return_log_sum=True)
    found = functional.augment_reduce(*args, log_sum, reduction="none")
    wanted = functional.sampled_softmax(*args, reduction="none")
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-13)
    grads = [torch.autograd.grad(x.sum(), args[0])[0] for x in (found, wanted)]
    torch.testing.assert_close(*grads, rtol=1e-11, atol=1e-13)
