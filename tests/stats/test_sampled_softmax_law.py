"""What the correction promises, by exact enumeration: every sample of m draws is a row of a batch, with its weight.

e_k = exp s_k, S = sum of e over the negatives, Z = e_t + S; V = e_t + sum of e / (m q) over the draws is the sampled
normalizer, so that the op's lse is log V. (Blanc & Rendle 2018, Rawat et al. 2019.)
"""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from samplex_cuda import functional

pytestmark = pytest.mark.stat
CLASSES, DIM, TARGET = 6, 3, 2


class Problem:
    """One query, all classes, float64; `absolute` uses |s| as logit."""

    def __init__(self, *, classes=CLASSES, absolute=False):
        g = torch.Generator().manual_seed(4)
        self.h = torch.randn(DIM, generator=g, dtype=torch.float64)
        self.weight = 0.7 * torch.randn(classes, DIM, generator=g, dtype=torch.float64)
        self.bias = 0.3 * torch.randn(classes, generator=g, dtype=torch.float64)
        self.absolute, self.classes = absolute, classes
        self.random = torch.rand(classes, generator=g, dtype=torch.float64) + 0.2
        s = self.weight @ self.h + self.bias
        self.e = (s.abs() if absolute else s).exp()
        self.negatives = [k for k in range(classes) if k != TARGET]
        self.S = self.e[self.negatives].sum()
        self.Z = self.e.sum()

    def law(self, kind: str, *, hits: bool) -> torch.Tensor:
        """q [C]: over all classes where `hits` may occur, else over the negatives."""
        q = {"uniform": torch.ones_like(self.e), "random": self.random, "softmax": self.e}[kind].clone()
        if not hits:
            q[TARGET] = 0
        return q / q.sum()

    def enumerate(self, backend, q: torch.Tensor, m: int):
        """Every sample of m classes with q > 0: probability [n], loss [n], V [n], and d h, d weight of each row's loss.

        The rows of a batch share `weight`, so gradients are asked of the mean loss under the distribution.
        """
        support = [k for k in range(self.classes) if q[k] > 0]
        samples = torch.tensor(list(itertools.product(support, repeat=m)))
        probability = q[samples].prod(1)
        n = len(samples)
        h = self.h.expand(n, -1).to(backend.device, copy=True).requires_grad_()
        weight = self.weight.to(backend.device, copy=True).requires_grad_()
        loss, lse = functional.sampled_softmax(
            h, weight, torch.full((n,), TARGET, device=backend.device), samples.to(backend.device),
            q[samples].log().to(backend.device), self.bias.to(backend.device),
            reduction="none", return_lse=True, absolute=self.absolute,
        )  # fmt: skip
        (loss * probability.to(backend.device)).sum().backward()
        d_weight = weight.grad.to_dense().cpu()
        return probability, loss.detach().cpu(), lse.detach().cpu().exp(), h.grad.sum(0).cpu(), d_weight

    def full(self):
        """Loss and gradients of the full softmax."""
        h, weight = self.h.clone().requires_grad_(), self.weight.clone().requires_grad_()
        s = weight @ h + self.bias
        loss = F.cross_entropy((s.abs() if self.absolute else s)[None], torch.tensor([TARGET]))
        loss.backward()
        return loss.detach(), h.grad, weight.grad


def close(found, wanted, tolerance=1e-12):
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize("hits", [False, True], ids=["excluded", "masked"])
@pytest.mark.parametrize("kind", ["uniform", "random", "softmax"])
def test_the_sampled_normaliser_is_unbiased_for_every_law(backend, kind, hits, absolute):
    """E[sum exp o'] = S, whether the target is excluded from the distribution or drawn and masked."""
    problem = Problem(absolute=absolute)
    probability, _, V, _, _ = problem.enumerate(backend, problem.law(kind, hits=hits), 2)
    close(probability.sum(), torch.ones((), dtype=torch.float64))
    close((probability * (V - problem.e[TARGET])).sum(), problem.S)


@pytest.mark.parametrize("kind", ["uniform", "random"])
def test_variance_of_the_normaliser(backend, kind):
    """Var V = (sum e^2 / q - S^2) / m."""
    problem, m = Problem(), 2
    q = problem.law(kind, hits=False)
    probability, _, V, _, _ = problem.enumerate(backend, q, m)
    variance = (probability * (V - problem.Z) ** 2).sum()
    e, q = problem.e[problem.negatives], q[problem.negatives]
    close(variance, ((e**2 / q).sum() - problem.S**2) / m)


@pytest.mark.parametrize("absolute", [False, True])
def test_softmax_law_makes_every_sample_exact(backend, absolute):
    """q proportional to e: every single sample has the full normalizer."""
    problem = Problem(absolute=absolute)
    _, loss, V, _, _ = problem.enumerate(backend, problem.law("softmax", hits=False), 2)
    close(V, problem.Z.expand_as(V))
    close(loss, problem.full()[0].expand_as(loss))


@pytest.mark.parametrize("absolute", [False, True])
def test_softmax_law_has_no_gradient_bias(backend, absolute):
    problem = Problem(absolute=absolute)
    _, _, _, d_h, d_weight = problem.enumerate(backend, problem.law("softmax", hits=False), 2)
    _, full_h, full_weight = problem.full()
    close(d_h, full_h)
    close(d_weight, full_weight)


@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize("kind", ["uniform", "random"])
def test_any_other_law_overrates_the_target(backend, kind, absolute):
    """E[p'_t] > p_t strictly (Jensen), and so the gradient is biased."""
    problem = Problem(absolute=absolute)
    probability, _, V, d_h, _ = problem.enumerate(backend, problem.law(kind, hits=False), 2)
    sampled = (probability * problem.e[TARGET] / V).sum()
    assert sampled > problem.e[TARGET] / problem.Z + 1e-4
    assert (d_h - problem.full()[1]).abs().max() > 1e-4


def test_hits_that_were_kept_would_be_biased_and_masked_ones_are_not(backend):
    """Drawn with the rest, a kept target adds e_t to the expected normalizer for any m; masked it adds nothing."""
    problem, m = Problem(), 2
    q = problem.law("uniform", hits=True)
    probability, _, V, _, _ = problem.enumerate(backend, q, m)
    samples = torch.tensor(list(itertools.product(range(CLASSES), repeat=m)))
    kept = problem.e[TARGET] + (problem.e[samples] / (m * q[samples])).sum(1)
    close((probability * kept).sum(), problem.Z + problem.e[TARGET])
    close((probability * V).sum(), problem.Z)


@pytest.mark.parametrize("kind", ["uniform", "random"])
def test_mean_loss_rises_to_the_full_one_like_one_over_m(backend, kind):
    """E log V <= log Z, with m (log Z - E log V) -> Var_1 / (2 Z^2)."""
    problem = Problem(classes=4)
    q = problem.law(kind, hits=False)
    full = problem.full()[0]
    gaps = []
    for m in range(1, 5 if backend.emulated else 8):
        probability, loss, _, _, _ = problem.enumerate(backend, q, m)
        gaps.append(float(full - (probability * loss).sum()))
    assert all(a > b > 0 for a, b in itertools.pairwise(gaps))
    e, q = problem.e[problem.negatives], q[problem.negatives]
    limit = float(((e**2 / q).sum() - problem.S**2) / (2 * problem.Z**2))
    assert all(abs(m * gap / limit - 1) < 0.6 / m for m, gap in enumerate(gaps, 1))  # the next term is O(1/m)


@pytest.mark.parametrize("shared", [False, True])
def test_many_draws_give_the_full_loss(backend, shared):
    """One draw of many classes, hits included and masked: within five standard errors of the full softmax loss."""
    g = torch.Generator().manual_seed(0)
    classes, rows, m = 50, 4, 1000 if backend.emulated else 20_000
    h = torch.randn(rows, 8, generator=g, dtype=torch.float64)
    weight = 0.3 * torch.randn(classes, 8, generator=g, dtype=torch.float64)
    target = (h @ weight.T).argmax(1)  # likely targets, where a kept hit would show
    q = torch.rand(classes, generator=g, dtype=torch.float64) + 0.1
    q /= q.sum()
    shape = (m,) if shared else (rows, m)
    ids = torch.multinomial(q, m if shared else rows * m, replacement=True, generator=g).reshape(shape)
    loss = functional.sampled_softmax(
        *(t.to(backend.device) for t in (h, weight, target, ids, q[ids].log())), reduction="none"
    ).cpu()
    logits = h @ weight.T
    full = F.cross_entropy(logits, target, reduction="none")
    e = logits.exp().scatter(1, target[:, None], 0.0)
    error = ((e**2 / q).sum(1) - e.sum(1) ** 2).div(m).sqrt() / logits.exp().sum(1)
    assert ((loss - full).abs() < 5 * error).all()
    # Hits that were kept would move the loss by log(1 + p_t): outside the band, so the band is narrow enough to tell.
    p = logits.softmax(1).gather(1, target[:, None])[:, 0]
    assert (p.log1p() > 5 * error).any() or backend.emulated
