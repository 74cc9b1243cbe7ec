"""Random features: no bias, error falling as D^(-1/2), orthogonal frequencies below independent ones, and
how often an estimate of a kernel is negative (Rawat et al. 2019). Fixed keys: the outcome is fixed too.
"""

from __future__ import annotations

import math

import pytest
import torch

import samplex_cuda as sx
from samplex_cuda.reference.rff import kernel


def sphere(n: int, dim: int, seed: int = 0) -> torch.Tensor:
    x = torch.randn(n, dim, generator=torch.Generator().manual_seed(seed))
    return x / x.norm(dim=1, keepdim=True)


def estimates(c, h, *, kind, nu, num_features, draws, seed=0, gaussian=False, frequencies_of=None):
    """phi(c) . phi(h) of every pair for `draws` independent sets of frequencies: [draws, n, B] float64."""
    # One long set of frequencies, cut up: blocks of d are independent of each other, so D must be a multiple of d.
    assert (frequencies_of or kind) == "rff" or num_features % c.shape[1] == 0
    total = num_features * draws
    omega = sx.rff.frequencies(c.shape[1], total, nu=nu, kind=frequencies_of or kind, key=sx.Key(seed))
    phi = [sx.rff.features(x, omega, kind=kind, nu=nu, gaussian=gaussian).double() for x in (c, h)]
    parts = [p.unflatten(1, (-1, draws, num_features)).permute(2, 0, 1, 3).flatten(2) for p in phi]
    return draws * parts[0] @ parts[1].mT


CASES = {
    "rff": {"kind": "rff", "nu": 1.5},
    "orf": {"kind": "orf", "nu": 1.5},
    "positive": {"kind": "positive", "nu": 1.5},
    "gaussian": {"kind": "positive", "nu": 1.5, "gaussian": True},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("normalised", [True, False], ids=["sphere", "any length"])
def test_estimates_have_no_bias(case, normalised):
    # B1, with 1/D under the sum: the mean over frequencies is the kernel, for every pair, within 4.5 standard errors.
    lengths = torch.ones(6, 1) if normalised else torch.tensor([0.0, 0.3, 0.7, 1.0, 1.3, 1.6]).unsqueeze(1)
    c, h = sphere(6, 8, 1) * lengths, sphere(5, 8, 2) * (1.0 if normalised else 0.8)
    got = estimates(c, h, **CASES[case], num_features=24, draws=3000)
    exact = CASES[case]["kind"] if not CASES[case].get("gaussian") else "rff"
    wanted = kernel(c.double(), h.double(), exact, nu=1.5)
    error = got.std(0) / math.sqrt(len(got))
    worst = ((got.mean(0) - wanted).abs() / (error + 1e-7)).max()
    assert float(worst) < 4.5
    # And the errors are small enough to see a wrong scale: 1/sqrt(D) instead of 1/D, or nu instead of nu / 2.
    assert float((error / wanted).median()) < 0.02


def test_quadratic_is_exact():
    c, h = sphere(50, 20, 1) * 3, sphere(9, 20, 2) * 2
    got = (
        sx.rff.features(c.double(), kind="quadratic", alpha=100.0)
        @ sx.rff.features(h.double(), kind="quadratic", alpha=100.0).T
    )
    wanted = kernel(c.double(), h.double(), "quadratic", alpha=100.0)
    assert float(((got - wanted) / wanted).abs().max()) < 1e-12


def test_variance_of_independent_frequencies():
    # Var cos(w . z) = (1 - exp(-nu |z|^2))^2 / 2 for w ~ N(0, nu I); D of them are averaged.
    c, h = sphere(4, 8, 1), sphere(4, 8, 2)
    got = estimates(c, h, kind="rff", nu=1.5, num_features=16, draws=4000).var(0)
    wanted = (1 - torch.exp(-1.5 * torch.cdist(c, h).double().square())).square() / 2 / 16
    assert float((got / wanted - 1).abs().max()) < 0.12  # 16 pairs, relative standard error about 0.022


@pytest.mark.parametrize("kind", ["rff", "orf", "positive"])
def test_error_falls_as_the_root_of_the_features(kind):
    # B2: the largest error over pairs, averaged over frequencies, against D; slope -1/2 in logarithms.
    c, h = sphere(40, 16, 1), sphere(10, 16, 2)
    wanted = kernel(c.double(), h.double(), kind, nu=1.0)
    sizes = [64, 256, 1024, 4096]
    errors = [
        float((estimates(c, h, kind=kind, nu=1.0, num_features=D, draws=40) - wanted).abs().amax((1, 2)).mean())
        for D in sizes
    ]
    x, y = (torch.tensor(v, dtype=torch.float64).log() for v in (sizes, errors))
    slope = float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum())
    assert abs(slope + 0.5) < 0.05


@pytest.mark.parametrize("kind", ["rff", "positive"])
@pytest.mark.parametrize("num_features", [16, 32])
def test_orthogonal_frequencies_have_less_variance(kind, num_features):
    c, h = sphere(12, 16, 1), sphere(12, 16, 2)
    options = {"kind": kind, "nu": 0.5, "num_features": num_features, "draws": 1500}
    independent = estimates(c, h, **options, frequencies_of="rff").var(0)
    orthogonal = estimates(c, h, **options, frequencies_of="orf").var(0)
    assert float((orthogonal < independent).double().mean()) > 0.95
    assert float(orthogonal.mean() / independent.mean()) < 0.9


def test_positive_features_are_never_negative():
    phi = sx.rff.features(sphere(50, 16), sx.rff.frequencies(16, 64, nu=11.1, kind="positive", key=sx.Key(0)),
                          kind="positive", nu=11.1)  # fmt: skip
    assert float(phi.min()) >= 0


@pytest.mark.parametrize(
    ("nu", "num_features", "share"),
    [
        (1.0, 500, 0.0),
        (4.0, 50, 0.41),
        (4.0, 200, 0.34),
        (4.0, 500, 0.28),
        (4.0, 1000, 0.19),
        (4.0, 4096, 0.07),
        (11.1, 50, 0.5),
        (11.1, 1000, 0.5),
    ],
)
def test_share_of_negative_estimates(nu, num_features, share):
    # B6, d = 64, random classes: near Phi(-sqrt(2 D) e^(-nu (1 - c . h))) on average over the pairs.
    c, h = sphere(1000, 64, 1), sphere(16, 64, 2)
    got = estimates(c, h, kind="rff", nu=nu, num_features=num_features, draws=4 if num_features < 4096 else 2)
    measured = float((got < 0).double().mean())
    cosine = c.double() @ h.double().T
    predicted = torch.special.ndtr(-math.sqrt(2 * num_features) * torch.exp(-nu * (1 - cosine)))
    assert abs(measured - share) < 0.03
    assert abs(measured - float(predicted.mean())) < 0.02
