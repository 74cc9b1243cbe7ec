"""The bias of sampled softmax, by exact enumeration (Blanc & Rendle 2018; Rawat et al. 2019, with two corrections).

e_k = exp o_k, S = sum of e over the negatives, Z = e_t + S, r_k = e_k / q_k - S; q is a distribution on the negatives.
V = e_t + (1/m) sum of e / q over m draws is the sampled normalizer, U the same sum with the gradients of the logits;
the gradient of the sampled loss is U / V - grad o_t. Only how often each class was drawn matters, so an expectation is
a sum over counts, weighted by the multinomial distribution, and m can be large.

Corrected here, against the printed text: the second moment in Lemma 3 carries (m - 1) / m^2, so that E[1/W] -> 1/Z^2;
and Theorem 1 holds as printed only for gradients without negative entries.
"""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest
import torch

import samplex_cuda as sx
from samplex_cuda import functional

pytestmark = pytest.mark.stat


@functools.cache
def compositions(m: int, k: int) -> np.ndarray:
    """All ways to draw m classes out of k, as counts [n, k]."""
    if k == 1:
        return np.full((1, 1), m)
    return np.concatenate(
        [np.c_[np.full(len(rest), i), rest] for i in range(m + 1) for rest in [compositions(m - i, k - 1)]]
    )


@functools.cache
def log_factorials(m: int) -> np.ndarray:
    return np.r_[0.0, np.cumsum(np.log(np.arange(1, m + 1)))]


def enumerate_draws(q: np.ndarray, m: int) -> tuple[np.ndarray, np.ndarray]:
    """Counts [n, k] of every outcome of m draws, and their probability [n]."""
    counts, table = compositions(m, len(q)), log_factorials(m)
    return counts, np.exp(table[m] - table[counts].sum(1) + counts @ np.log(q))


class Case:
    """Logits, a distribution q on the negatives, and gradients [n, d] of the logits; class 0 is the target."""

    def __init__(self, seed: int, negatives: int = 3, *, signed: bool = True, law: str = "random", dim: int = 2):
        g = np.random.default_rng(seed)
        o = g.normal(size=negatives + 1) * 1.2
        self.e_t, self.e = np.exp(o[0]), np.exp(o[1:])
        self.S, self.Z = self.e.sum(), self.e.sum() + self.e_t
        q = {"random": g.random(negatives) + 0.05, "uniform": np.ones(negatives), "softmax": self.e}[law]
        self.q = q / q.sum()
        grad = g.uniform(-1 if signed else 0, 1, size=(negatives + 1, dim))
        self.grad_t, self.grad = grad[0], grad[1:]
        self.M = np.abs(grad).max(0)
        self.ratio = self.e / self.q
        self.r = self.ratio - self.S
        self.var = (self.q * self.r**2).sum()
        self.g = self.e_t * self.grad_t + self.e @ self.grad

    def moments(self, m: int):
        """Probability [n], V [n], U [n, d] of every outcome."""
        counts, p = enumerate_draws(self.q, m)
        return (
            p,
            self.e_t + counts @ self.ratio / m,
            self.e_t * self.grad_t + counts @ (self.ratio[:, None] * self.grad) / m,
        )

    def bias(self, m: int) -> np.ndarray:
        """E[gradient of the sampled loss] - gradient of the full loss, [d]."""
        p, V, U = self.moments(m)
        return p @ (U / V[:, None]) - self.g / self.Z

    def leading(self) -> np.ndarray:
        """The limit of m * bias."""
        return -(self.e * self.r) @ self.grad / self.Z**2 + self.g * self.var / self.Z**3


# ------------------------------------------------------------------------------------------------ A1 - A4, samplers
C, D, TARGET = 5, 3, 2


def problem(absolute: bool):
    g = torch.Generator().manual_seed(7)
    h, weight = torch.randn(1, D, generator=g), 0.8 * torch.randn(C, D, generator=g)
    s = (h.double() @ weight.double().T)[0]
    return h, weight, (s.abs() if absolute else s).exp()


def samplers(weight: torch.Tensor, absolute: bool) -> dict[str, sx.samplers.Sampler]:
    found = {
        "uniform": sx.samplers.Uniform(C),
        "log_uniform": sx.samplers.LogUniform(C),
        "unigram": sx.samplers.Unigram([5, 1, 9, 2, 3]),
        "softmax": sx.samplers.Softmax(weight, absolute=absolute),
        "quartic": sx.samplers.Quartic(weight),
        "mixture": sx.samplers.Mixture([(sx.samplers.Softmax(weight), 0.6), (sx.samplers.Uniform(C), 0.4)]),
    }
    if hasattr(sx.samplers, "Quadratic"):
        found["quadratic"] = sx.samplers.Quadratic(weight)
    if hasattr(sx.samplers, "RandomFourier"):
        found["rff"] = sx.samplers.RandomFourier(weight, num_features=16, nu=0.4)
        found["positive"] = sx.samplers.RandomFourier(weight, num_features=16, nu=0.4, kind="positive")
    return found


NAMES = list(samplers(problem(False)[1], False))


@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a1_to_a4_for_every_sampler(backend, name, absolute):
    """log_q of the sampler, loss and gradient of the op, over all outcomes of m draws: E[V] = Z for every sampler;
    exact in every sample and without bias for the softmax distribution alone; elsewhere the target is overrated."""
    h, weight, e = problem(absolute)
    sampler = samplers(weight, absolute)[name]
    log_q = sampler.log_prob(h, torch.arange(C)[None], exclude=torch.tensor([TARGET]))[0]
    assert log_q[TARGET] == -torch.inf
    negatives = [k for k in range(C) if k != TARGET]
    q = log_q[negatives].double().exp().numpy()
    assert q.sum() == pytest.approx(1, abs=1e-6)
    m = 3
    counts, p = enumerate_draws(q / q.sum(), m)
    ids = torch.tensor(np.array([np.repeat(negatives, row) for row in counts]))
    rows = len(ids)
    hidden = h.double().expand(rows, -1).to(backend.device, copy=True).requires_grad_()
    loss, lse = functional.sampled_softmax(
        hidden, weight.double().to(backend.device), torch.full((rows,), TARGET, device=backend.device),
        ids.to(backend.device), log_q.double()[ids].to(backend.device), reduction="none", return_lse=True,
        absolute=absolute,
    )  # fmt: skip
    V = lse.detach().cpu().exp().numpy()
    Z = float(e.sum())
    assert p @ V == pytest.approx(Z, rel=2e-6)
    loss.sum().backward()
    mean = p @ hidden.grad.cpu().numpy()
    full = h.double().clone().requires_grad_()
    s = full @ weight.double().T
    torch.nn.functional.cross_entropy(s.abs() if absolute else s, torch.tensor([TARGET])).backward()
    bias = np.abs(mean - full.grad.numpy()).max()
    p_t = float(e[TARGET]) / Z
    if name == "softmax":
        np.testing.assert_allclose(V, Z, rtol=3e-6)
        assert bias < 3e-6
    else:
        assert p @ (float(e[TARGET]) / V) > p_t + 1e-5
        assert bias > 1e-5


@pytest.mark.parametrize("law", ["random", "uniform", "softmax"])
def test_a1_a2_a6_moments_of_the_normaliser(law):
    for seed in range(20):
        case = Case(seed, law=law)
        for m in (1, 2, 5, 30):
            p, V, U = case.moments(m)
            assert p.sum() == pytest.approx(1, rel=1e-11)
            assert p @ V == pytest.approx(case.Z, rel=1e-11)
            np.testing.assert_allclose(p @ U, case.g, rtol=1e-10, atol=1e-12)
            variance = ((case.e**2 / case.q).sum() - case.S**2) / m
            assert p @ (V - case.Z) ** 2 == pytest.approx(variance, rel=1e-9, abs=1e-12)
            if law == "softmax":
                np.testing.assert_allclose(V, case.Z, rtol=1e-12)


def test_a3_unbiased_exactly_for_the_softmax_law():
    for seed in range(20):
        assert np.abs(Case(seed, law="softmax").bias(4)).max() < 1e-13
        case = Case(seed)
        p, V, _ = case.moments(4)
        assert p @ (1 / V) > 1 / case.Z  # E[p'_t] > p_t


# ------------------------------------------------------------------------------------------------ A5
def test_a5_accidental_hits_stay_biased():
    """Drawn over all classes and kept, the target counts twice: its share tends to 2 e_t / (Z + e_t), not e_t / Z.

    Masked, the share of the target tends to e_t / Z like 1/m.
    """
    case = Case(3)
    e = np.r_[case.e_t, case.e]
    q = np.full(4, 0.25)
    true, limit = case.e_t / case.Z, 2 * case.e_t / (case.Z + case.e_t)
    kept, masked = [], []
    for m in (5, 20, 60):
        counts, p = enumerate_draws(q, m)
        terms = counts * (e / q) / m
        kept.append(p @ ((case.e_t + terms[:, 0]) / (case.e_t + terms.sum(1))))
        masked.append(p @ (case.e_t / (case.e_t + terms[:, 1:].sum(1))))
    assert abs(kept[2] - limit) < 0.01 * limit
    assert min(k - true for k in kept) > 0.4 * (limit - true)
    assert [masked[i] > masked[i + 1] > true for i in range(2)] == [True, True]
    assert (masked[2] - true) < (masked[0] - true) / 8


# ------------------------------------------------------------------------------------------------ A7, A8
def test_a7_inverse_moments_of_a_positive_variable():
    """Lemma 5: 1/E V <= E 1/V <= 1/E V + Var/a^3, and <= 1/E V + Var/(E V)^3 + E|V - E V|^3 / a^4."""
    g = np.random.default_rng(0)
    for _ in range(500):
        a = g.uniform(0.1, 2)
        V = a + g.exponential(size=6) * g.uniform(0, 3)
        p = g.dirichlet(np.ones(6))
        mean, inverse = p @ V, p @ (1 / V)
        variance, third = p @ (V - mean) ** 2, p @ np.abs(V - mean) ** 3
        assert 1 / mean <= inverse * (1 + 1e-12)
        assert inverse <= 1 / mean + variance / a**3 + 1e-12
        assert inverse <= 1 / mean + variance / mean**3 + third / a**4 + 1e-12


def test_a8_inverse_normaliser_to_first_order():
    """Lemma 4 as an equality: m (E[1/V] - 1/Z - Var/Z^3) -> 0."""
    for seed in range(10):
        case = Case(seed)
        rest = []
        for m in (10, 40, 120):
            p, V, _ = case.moments(m)
            rest.append(abs(m * (p @ (1 / V) - 1 / case.Z) - case.var / case.Z**3))
        assert rest[0] > rest[1] > rest[2]
        assert rest[2] < rest[1] / 2  # it falls like 1/m


# ------------------------------------------------------------------------------------------------ A9, A10
def delta(case: Case, m: int) -> np.ndarray:
    """Delta_m of Lemma 1, [d]: over the first m - 1 draws and, apart, the last."""
    counts, p = enumerate_draws(case.q, m - 1) if m > 1 else (np.zeros((1, len(case.q))), np.ones(1))
    inverse = p @ (1 / (case.e_t + counts @ case.ratio / m) ** 2)
    spread = case.q @ np.abs(case.ratio[:, None] - case.ratio[None, :])  # E over the last draw, [k]
    return (case.e * spread) @ np.abs(case.grad) * inverse / m


def test_a9_bounds_hold_for_gradients_without_negative_entries():
    """Lemma 1 (both sides, with Delta_m itself) and the explicit lower bound of Theorem 1."""
    for seed in range(150):
        case = Case(seed, signed=False)
        for m in (1, 2, 3, 8):
            p, V, U = case.moments(m)
            ratio = p @ (U / V[:, None])
            near = case.e_t + (m - 1) / m * case.S
            lower = case.e_t * case.grad_t / case.Z + (case.e / (near + case.ratio / m)) @ case.grad
            assert (lower <= ratio + 1e-12).all()
            assert (ratio <= case.g * (p @ (1 / V)) + delta(case, m) + 1e-12).all()
            assert (case.bias(m) >= -case.M / m * (case.e * np.abs(case.r)).sum() / (near * case.Z) - 1e-12).all()


def bounds(case: Case) -> dict[str, np.ndarray]:
    """Leading terms of Theorem 1 (times m), as printed and as they must be for signed gradients."""
    spread = (case.ratio.max() - case.ratio.min()) * case.S
    second = case.Z**2 + (case.e**2 / case.q).sum()
    growth = case.g * case.var / case.Z**3
    absolute = (case.e * np.abs(case.r)).sum() / case.Z**2
    return {
        "printed lower": -case.M * absolute,
        "printed upper": growth + 2 * case.M * spread / second,
        "safe lower": -2 * case.M * absolute,
        "safe upper": growth + 2 * case.M * spread / case.Z**2,
    }


@pytest.mark.parametrize("signed", [False, True])
def test_a9_a10_theorem_1_to_leading_order(signed):
    """m * bias in the limit: the printed bounds hold without negative entries and often fail with them; the safe ones
    hold always (Var_1 = sum of e r <= sum of e |r|, and |r| is at most the spread of e / q)."""
    failures = dict.fromkeys(bounds(Case(0)), 0)
    for seed in range(1500):
        case = Case(seed, 4, signed=signed)
        if signed:  # the worst signs for either side
            worst = np.sign(case.r)
            case.grad, case.grad_t = np.c_[worst, -worst], -np.ones(2)
            case.M, case.g = np.ones(2), case.e_t * case.grad_t + case.e @ case.grad
        value = case.leading()
        for name, bound in bounds(case).items():
            wrong = value < bound - 1e-12 if "lower" in name else value > bound + 1e-12
            failures[name] += int(wrong.any())
    assert failures["safe lower"] == failures["safe upper"] == 0
    if signed:
        assert failures["printed lower"] > 300
        assert failures["printed upper"] > 100, failures
    else:
        assert failures["printed lower"] == failures["printed upper"] == 0


def test_a10_lemma_3_corrected():
    """W = (e_t + S_{m-1} / m)^2: E[W] carries (m - 1) / m^2 on sum e^2 / q, and E[1/W] -> 1/Z^2."""
    for seed in range(10):
        case = Case(seed)
        second = (case.e**2 / case.q).sum()
        off = []
        for m in (5, 40, 160):
            counts, p = enumerate_draws(case.q, m - 1)
            W = (case.e_t + counts @ case.ratio / m) ** 2
            cross = 2 * case.e_t * case.S * (m - 1) / m
            expected = case.e_t**2 + cross + (m - 1) / m**2 * second + (m - 1) * (m - 2) / m**2 * case.S**2
            assert p @ W == pytest.approx(expected, rel=1e-10)
            off.append(p @ (1 / W) * case.Z**2 - 1)
        assert abs(off[2]) < abs(off[1]) / 2.5 < abs(off[0])  # to 1/Z^2 like 1/m
        printed = case.Z**2 / (case.Z**2 + second) - 1
        assert abs(off[2]) < 0.25 * abs(printed)


# ------------------------------------------------------------------------------------------------ A11
@pytest.mark.parametrize("law", ["random", "uniform"])
def test_a11_leading_bias(law):
    """m * bias -> -sum e r grad / Z^2 + g Var_1 / Z^3, the error itself falling like 1/m."""
    for seed in range(12):
        case = Case(seed, law=law)
        limit = case.leading()
        errors = [np.abs(m * case.bias(m) - limit).max() for m in (20, 80, 160)]
        assert errors[0] > errors[1] > errors[2]
        assert errors[2] < 0.7 * errors[1]
        assert errors[2] < 0.15 * np.abs(limit).max()


def test_a11_orders_the_samplers():
    """What the formula predicts for each sampler's distribution is what enumeration finds at m = 40."""
    predicted, found = {}, {}
    for law in ("uniform", "random", "softmax"):
        case = Case(5, law=law)
        predicted[law], found[law] = np.abs(case.leading()).max(), 40 * np.abs(case.bias(40)).max()
    assert sorted(predicted, key=predicted.get) == sorted(found, key=found.get)
    assert found["softmax"] < 1e-10
    assert found["uniform"] == pytest.approx(predicted["uniform"], rel=0.2)


def test_a11_the_op_has_the_predicted_bias(backend):
    """Gradients of the op over all outcomes of m draws, for growing m."""
    case = Case(8, law="uniform", dim=3)
    weight = torch.tensor(np.r_[case.grad_t[None], case.grad])  # o = w . h, so the gradient of o_k in h is w_k
    h = torch.tensor([0.4, -0.3, 0.6], dtype=torch.float64)
    o = (weight @ h).numpy()
    case.e_t, case.e = np.exp(o[0]), np.exp(o[1:])
    case.S, case.Z = case.e.sum(), np.exp(o).sum()
    case.ratio = case.e / case.q
    case.r = case.ratio - case.S
    case.var = (case.q * case.r**2).sum()
    case.g = np.exp(o) @ weight.numpy()
    errors = []
    for m in (4, 8) if backend.emulated else (4, 16, 48):
        counts, p = enumerate_draws(case.q, m)
        ids = torch.tensor(np.array([np.repeat([1, 2, 3], row) for row in counts]), device=backend.device)
        hidden = h.expand(len(ids), -1).to(backend.device, copy=True).requires_grad_()
        log_q = torch.tensor(np.log(case.q), device=backend.device)[ids - 1]
        target = torch.zeros(len(ids), dtype=torch.int64, device=backend.device)
        functional.sampled_softmax(hidden, weight.to(backend.device), target, ids, log_q, reduction="sum").backward()
        bias = p @ hidden.grad.cpu().numpy() - (case.g / case.Z - weight[0].numpy())
        np.testing.assert_allclose(bias, case.bias(m), rtol=1e-8, atol=1e-12)
        errors.append(np.abs(m * bias - case.leading()).max())
    assert all(a > b for a, b in itertools.pairwise(errors))
    assert errors[-1] < (0.35 if backend.emulated else 0.1) * np.abs(case.leading()).max()
