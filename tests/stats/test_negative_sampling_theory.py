"""What Bamler & Mandt (2020) prove of negative sampling, checked with the op by exact enumeration in float64.

Scores are tabular: h is a one-hot row that picks an x, `weight` [C, X] holds xi_y(x). One batch row per (x, y, y'), so
that the expected loss is a weighted sum of the op's rows, without any sampling noise.
"""

from __future__ import annotations

import pytest
import torch

from samplex_cuda import functional

pytestmark = pytest.mark.stat
CLASSES, POINTS = 6, 3


class Tabular:
    """p_D(y|x) and p_n(y|x) [X, C], and every (x, y, y') as a batch row with its probability."""

    def __init__(self, *, points=POINTS, noise="random", seed=2):
        g = torch.Generator().manual_seed(seed)
        random = lambda: torch.softmax(torch.randn(points, CLASSES, generator=g, dtype=torch.float64), 1)  # noqa: E731
        self.data = random()
        uniform = torch.full_like(self.data, 1.0 / CLASSES)
        self.noise = {"random": random(), "uniform": uniform, "adversarial": self.data}[noise]
        grid = torch.meshgrid(torch.arange(points), torch.arange(CLASSES), torch.arange(CLASSES), indexing="ij")
        self.x, self.y, self.other = (t.reshape(-1) for t in grid)
        self.probability = self.data[self.x, self.y] * self.noise[self.x, self.other]
        self.points = points

    def rows(self, xi, device, *, reg=0.0):
        """The op's loss of each (x, y, y'); xi [X, C]."""
        h = torch.eye(self.points, dtype=torch.float64)[self.x].to(device)
        log_p = self.noise.log()
        return functional.negative_sampling(
            h, xi.t().contiguous(), self.y.to(device), self.other[:, None].to(device),
            log_p[self.x, self.other][:, None].to(device), log_p[self.x, self.y].to(device),
            reg=reg, reduction="none", sparse=False,
        )  # fmt: skip

    def expected(self, xi, device, *, reg=0.0):
        """The loss that SGD minimizes, (A1): a sum over x of expectations."""
        return (self.rows(xi, device, reg=reg) * self.probability.to(device)).sum()

    def minimum(self):
        return self.data.log() - self.noise.log()

    def sample_gradients(self, xi, device):
        """d loss / d xi of every (x, y, y'): [n, X, C]."""
        gradients = []
        leaf = xi.to(device, copy=True).requires_grad_()
        rows = self.rows(leaf, device)
        for row in rows:
            gradients.append(torch.autograd.grad(row, leaf, retain_graph=True)[0])
        return torch.stack(gradients).cpu()


def minimise(problem, device, reg=0.0):
    """Newton by autograd on the op's own gradient: the Hessian is diagonal, so its diagonal is a finite difference."""
    xi = torch.zeros(problem.points, CLASSES, dtype=torch.float64)

    def gradient(at):
        leaf = at.to(device, copy=True).requires_grad_()
        return torch.autograd.grad(problem.expected(leaf, device, reg=reg), leaf)[0].cpu()

    for _ in range(60):
        g = gradient(xi)
        if g.abs().max() < 1e-13:
            break
        curvature = (gradient(xi + 1e-5) - gradient(xi - 1e-5)) / 2e-5
        xi = xi - (g / curvature).clamp(-1, 1)
    assert gradient(xi).abs().max() < 1e-12
    return xi


def alpha(problem):
    """Eq. 13: p_n sigma(xi*)."""
    return problem.noise * torch.sigmoid(problem.minimum())


def inverse_snr(problem, hessian=None, covariance=None):
    """1 / eta of Eq. 12 for one x, with N = 1: the trace of Cov H^-1."""
    a = alpha(problem)[0]
    hessian = torch.diag(a) if hessian is None else hessian
    covariance = torch.diag(a) - 2 * torch.outer(a, a) if covariance is None else covariance
    return torch.trace(covariance @ torch.linalg.inv(hessian))


# ------------------------------------------------------------------------------------------------ D1, D2: the minimizer
def test_d1_scores_plus_log_noise_are_those_of_the_softmax(backend):
    # Eq. 11 and Eq. 5: xi* = log p_D - log p_n, and xi* + log p_n - log p_D does not depend on y.
    problem = Tabular()
    xi = minimise(problem, backend.device)
    torch.testing.assert_close(xi, problem.minimum(), rtol=0, atol=1e-10)
    constant = xi + problem.noise.log() - problem.data.log()
    assert (constant - constant[:, :1]).abs().max() < 1e-10
    torch.testing.assert_close((xi + problem.noise.log()).softmax(1), problem.data, rtol=0, atol=1e-10)


def test_d1_fails_where_hits_are_left_out(backend):
    # Why nothing is excluded: without the pairs y' = y the minimizer is another one.
    problem = Tabular()
    problem.probability = torch.where(problem.y == problem.other, 0.0, problem.probability)
    xi = minimise(problem, backend.device)
    assert ((xi + problem.noise.log()).softmax(1) - problem.data).abs().max() > 0.01


def test_d2_uniform_noise_gives_softmax_scores_without_a_correction(backend):
    problem = Tabular(noise="uniform")
    xi = minimise(problem, backend.device)
    torch.testing.assert_close(xi.softmax(1), problem.data, rtol=0, atol=1e-10)


def test_more_draws_leave_the_expected_loss_as_it_is(backend):
    # m = 2 averaged: every (y'_1, y'_2) with its probability against m = 1.
    problem = Tabular(points=1)
    xi = torch.randn(1, CLASSES, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(backend.device)
    first, second, y = (t.reshape(-1) for t in torch.meshgrid(*[torch.arange(CLASSES)] * 3, indexing="ij"))
    probability = problem.data[0, y] * problem.noise[0, first] * problem.noise[0, second]
    ids = torch.stack([first, second], 1)
    log_p = problem.noise[0].log()
    rows = functional.negative_sampling(
        torch.ones(len(y), 1, dtype=torch.float64, device=backend.device), xi.t().contiguous(), y.to(backend.device),
        ids.to(backend.device), log_p[ids].to(backend.device), log_p[y].to(backend.device), reg=0.2, reduction="none",
    ).cpu()  # fmt: skip
    one = problem.expected(xi, backend.device, reg=0.2).cpu()
    torch.testing.assert_close((rows * probability).sum(), one, rtol=1e-13, atol=0)


# ------------------------------------------------------------------------------------------------ D3: gradient, Hessian
def test_d3_gradient_and_hessian_of_the_expected_loss(backend):
    problem = Tabular()
    xi = torch.randn(POINTS, CLASSES, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def gradient(at):
        leaf = at.to(backend.device, copy=True).requires_grad_()
        return torch.autograd.grad(problem.expected(leaf, backend.device), leaf)[0].cpu()

    a2 = -problem.data * torch.sigmoid(-xi) + problem.noise * torch.sigmoid(xi)
    torch.testing.assert_close(gradient(xi), a2, rtol=0, atol=1e-14)
    step, flat = 1e-5, torch.eye(POINTS * CLASSES, dtype=torch.float64).view(-1, POINTS, CLASSES)
    loss = lambda at: problem.expected(at.to(backend.device), backend.device).cpu()  # noqa: E731
    by_loss = torch.stack([(loss(xi + step * e) - loss(xi - step * e)) / (2 * step) for e in flat])
    torch.testing.assert_close(by_loss.view_as(a2), a2, rtol=0, atol=1e-9)
    for at, wanted in (
        (xi, (problem.data + problem.noise) * torch.sigmoid(-xi) * torch.sigmoid(xi)),  # (A4)
        (problem.minimum(), alpha(problem)),  # (A6)
    ):
        hessian = torch.stack([(gradient(at + step * e) - gradient(at - step * e)) / (2 * step) for e in flat])
        torch.testing.assert_close(hessian.view(len(flat), -1), torch.diag(wanted.view(-1)), rtol=0, atol=1e-9)


# ------------------------------------------------------------------------------------------------ D4 - D7: Theorem 2
@pytest.mark.parametrize("noise", ["random", "uniform", "adversarial"])
def test_d4_d5_covariance_of_the_gradient_and_its_trace(backend, noise):
    problem = Tabular(points=1, noise=noise)
    g = problem.sample_gradients(problem.minimum(), backend.device)[:, 0]  # [n, C]
    mean = (problem.probability[:, None] * g).sum(0)
    assert mean.abs().max() < 1e-15  # the minimum
    covariance = torch.einsum("n,ni,nj->ij", problem.probability, g, g)
    a = alpha(problem)[0]
    torch.testing.assert_close(covariance, torch.diag(a) - 2 * torch.outer(a, a), rtol=0, atol=1e-15)  # Eq. 14
    torch.testing.assert_close(
        torch.trace(covariance @ torch.diag(1 / a)), CLASSES - 2 * a.sum(), rtol=1e-12, atol=0
    )  # Eq. 15
    if noise == "adversarial":
        assert covariance.sum(1).abs().max() < 1e-15  # C_x 1 = 0


def test_d6_the_signal_is_best_where_the_noise_is_the_data():
    best = inverse_snr(Tabular(points=1, noise="adversarial"))
    torch.testing.assert_close(best, torch.tensor(CLASSES - 1.0, dtype=torch.float64), rtol=0, atol=1e-12)
    # Any other distribution is worse: 1 / eta = C - 2 sum p_D p_n / (p_D + p_n), enumerated over many.
    data = Tabular(points=1).data
    g = torch.Generator().manual_seed(5)
    noise = torch.distributions.Dirichlet(torch.ones(CLASSES, dtype=torch.float64))
    torch.manual_seed(5)
    laws = noise.sample((20_000,))
    others = CLASSES - 2 * (data * laws / (data + laws)).sum(1)
    assert (others > CLASSES - 1).all()
    # Strictly, and second order around the minimum: a small step away costs its square.
    direction = torch.randn(1, CLASSES, generator=g, dtype=torch.float64)
    direction -= direction.mean()
    excess = []
    for step in (1e-3, 2e-3):
        law = data + step * direction * data.min()
        excess.append(CLASSES - 2 * (data * law / (data + law)).sum() - (CLASSES - 1))
    assert excess[0] > 0
    torch.testing.assert_close(excess[1] / excess[0], torch.tensor(4.0, dtype=torch.float64), rtol=1e-2, atol=0)


def test_d6_formula_of_the_enumeration_is_that_of_the_op(backend):
    problem = Tabular(points=1)
    g = problem.sample_gradients(problem.minimum(), backend.device)[:, 0]
    covariance = torch.einsum("n,ni,nj->ij", problem.probability, g, g)
    sums = CLASSES - 2 * (problem.data * problem.noise / (problem.data + problem.noise)).sum()
    torch.testing.assert_close(inverse_snr(problem, covariance=covariance), sums, rtol=1e-12, atol=0)
    assert sums > CLASSES - 1


def test_d7_the_signal_does_not_depend_on_the_parameters():
    problem = Tabular(points=1)
    a = alpha(problem)[0]
    hessian, covariance = torch.diag(a), torch.diag(a) - 2 * torch.outer(a, a)
    jacobian = torch.randn(CLASSES, CLASSES, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    moved = inverse_snr(problem, jacobian.T @ hessian @ jacobian, jacobian.T @ covariance @ jacobian)
    torch.testing.assert_close(moved, inverse_snr(problem), rtol=1e-9, atol=0)


# ------------------------------------------------------------------------------------------------ D8, D14
@pytest.mark.parametrize("score", [-12.0, -3.0, 0.0, 2.0])
def test_d8_an_easy_negative_has_an_exponentially_small_gradient(backend, score):
    # Eq. 4: |d log sigma(-xi')| = sigma(xi') |d xi'|, and about e^xi' where xi' << 0. d xi' / d w = h.
    h = torch.tensor([[0.6, -0.8, 2.0]], dtype=torch.float64, device=backend.device)
    weight = torch.zeros(2, 3, dtype=torch.float64)
    weight[1] = score * h.cpu()[0] / (h.cpu() ** 2).sum()
    weight = weight.to(backend.device, copy=True).requires_grad_()
    target, ids = torch.tensor([0], device=backend.device), torch.tensor([[1]], device=backend.device)
    functional.negative_sampling(h, weight, target, ids, torch.zeros_like(h[:, :1])).backward()
    norm = weight.grad.to_dense()[1].norm().cpu()
    wanted = torch.sigmoid(torch.tensor(score, dtype=torch.float64)) * h.norm().cpu()
    torch.testing.assert_close(norm, wanted, rtol=1e-12, atol=0)
    if score < -10:
        torch.testing.assert_close(norm / h.norm().cpu(), torch.tensor(score).double().exp(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("reg", [0.0, 1e-3, 0.5])
def test_d14_gradient_of_the_regularised_loss_by_finite_differences(backend, reg):
    problem = Tabular()
    xi = torch.randn(POINTS, CLASSES, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    leaf = xi.to(backend.device, copy=True).requires_grad_()
    ours = torch.autograd.grad(problem.expected(leaf, backend.device, reg=reg), leaf)[0].cpu()
    off = xi + problem.noise.log()
    formula = (
        -problem.data * torch.sigmoid(-xi)
        + problem.noise * torch.sigmoid(xi)
        + 2 * reg * (problem.data + problem.noise) * off
    )
    torch.testing.assert_close(ours, formula, rtol=0, atol=1e-13)
    step = 1e-5
    for k, e in enumerate(torch.eye(POINTS * CLASSES, dtype=torch.float64).view(-1, POINTS, CLASSES)):
        up, down = (problem.expected((xi + s * step * e).to(backend.device), backend.device, reg=reg) for s in (1, -1))
        assert abs(float((up - down) / (2 * step)) - float(ours.reshape(-1)[k])) < 1e-8


def test_the_regulariser_pulls_the_corrected_scores_to_zero(backend):
    problem = Tabular()
    spread = [minimise(problem, backend.device, reg=reg) + problem.noise.log() for reg in (0.0, 0.05, 5.0)]
    sizes = [float(s.square().mean()) for s in spread]
    assert sizes[0] > sizes[1] > sizes[2]
    assert spread[2].abs().max() < 0.2
