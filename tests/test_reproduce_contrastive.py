"""Wen 2020: what its facts and lemmas say of the loss, the encoders and Algorithm 1 (C1 to C10), and the command.

Theorem 4.2 wants m >= n^12 and T of order n^10: nothing can test its constants. What is tested are its identities,
exactly, and its trends.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import samplex_cuda as sx
from samplex_cuda.functional import contrastive
from samplex_cuda.reproduce import contrastive_model as model
from samplex_cuda.reproduce import contrastive_practice as practice
from samplex_cuda.reproduce import run_paper
from samplex_cuda.reproduce.contrastive_model import Encoder

N, INPUTS, OUTPUTS, DEPTH, K = 6, 8, 32, 2, 2


@pytest.fixture(autouse=True)
def _one_thread():
    """These matrices are small: threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def setup(width=64, depth=DEPTH, seed=0, n=N, outputs=OUTPUTS):
    generator = torch.Generator().manual_seed(seed)
    x = model.separated_points(n, INPUTS, 0.6, generator)
    return x, *(Encoder(INPUTS, width, outputs, depth, generator) for _ in range(2))


def close(a, b, tolerance=1e-12):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def flat(encoder):
    return torch.cat([w.detach().flatten() for w in encoder.weights])


# ------------------------------------------------------------------------------------------------ C1, C2, C3: gradients
@pytest.mark.parametrize(("n", "k"), [(6, 2), (5, 1), (6, 5), (7, 3)])
def test_c1_facts_1_and_2_are_n_times_the_gradient(n, k):
    """Set by set as the paper writes them, against autograd and against differences of L_S itself."""
    x, query, key = setup(n=n, outputs=5)
    q, keys = query(x).detach(), key(x).detach()
    of_queries, of_keys = model.loss_vectors(q, keys, k)
    for a, b in zip((of_queries, of_keys), model.unit_gradients(q, keys, k), strict=True):
        close(a, b)
    step = 1e-6
    for which, vectors in ((0, of_queries), (1, of_keys)):
        for i, c in ((0, 0), (n - 1, 3)):
            shift = torch.zeros_like(q)
            shift[i, c] = step
            up, down = ([q + s * shift, keys] if which == 0 else [q, keys + s * shift] for s in (1, -1))
            slope = (model.objective(*up, k) - model.objective(*down, k)) / (2 * step)
            close(n * slope, vectors[i, c], 1e-8)


def test_c2_the_loss_vectors_of_the_keys_sum_to_zero():
    x, query, key = setup()
    for k in range(1, N):
        of_keys = model.unit_gradients(query(x), key(x), k)[1]
        assert float(of_keys.norm()) > 0.1
        close(of_keys.sum(0), torch.zeros(OUTPUTS, dtype=torch.float64))


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_c3_back_propagation_by_the_back_matrices(depth):
    x, query, key = setup(depth=depth)
    loss = model.objective(query(x), key(x), K)
    of_queries, of_keys = model.loss_vectors(query(x).detach(), key(x).detach(), K)
    for encoder, vectors in ((query, of_queries), (key, of_keys)):
        wanted = torch.autograd.grad(loss, list(encoder.weights), retain_graph=True)
        found = model.formula_gradients(encoder, x, vectors)
        assert len(found) == depth + 1
        for a, b in zip(found, wanted, strict=True):
            close(a, b)


def test_c3_the_back_matrix_is_a_derivative():
    x, query, _ = setup(depth=3)
    for layer in range(3):
        hidden = query.layers(x[0])
        before = (query.weights[layer] @ hidden[layer]).detach()

        def rest(y, layer=layer):
            h = y.relu()
            for w in list(query.weights)[layer + 1 : -1]:
                h = (w @ h).relu()
            return query.weights[-1] @ h

        close(model.back_matrix(query, x[0], layer), torch.autograd.functional.jacobian(rest, before))


# ------------------------------------------------------------------------------------------------ C4, C9: smoothness
def test_c4_log_one_plus_sum_exp_is_one_smooth():
    """Lemma D.1: the Hessian's norm is at most 1 (in truth 1/2), and the quadratic upper bound holds."""
    generator = torch.Generator().manual_seed(1)

    def g(y):
        return F.pad(y, (1, 0)).logsumexp(-1)

    largest = 0.0
    for k in (1, 2, 5, 20):
        for spread in (0.1, 1.0, 5.0):
            y = torch.randn(k, generator=generator, dtype=torch.float64) * spread
            hessian = torch.autograd.functional.hessian(g, y)
            p = F.pad(y, (1, 0)).softmax(0)[1:]
            close(hessian, p.diag() - p[:, None] * p)
            eigenvalues = torch.linalg.eigvalsh(hessian)
            assert float(eigenvalues.min()) > -1e-12
            largest = max(largest, float(eigenvalues.max()))
            more = torch.randn(2000, k, generator=generator, dtype=torch.float64) * spread
            bound = g(y) + more @ p + more.square().sum(1) / 2
            assert bool((g(y + more) <= bound + 1e-12).all())
    assert 0.2 < largest <= 0.5


def test_c9_decomposition_and_its_expectation():
    """(D.1) term by term, and (D.2), (D.8): the expectations of its first two parts are the loss vectors' products."""
    x, query, key = setup()
    q, keys = query(x).detach(), key(x).detach()
    generator = torch.Generator().manual_seed(2)
    q2 = q + 0.1 * torch.randn(q.shape, generator=generator, dtype=torch.float64)
    k2 = keys + 0.1 * torch.randn(q.shape, generator=generator, dtype=torch.float64)
    first = second = third = square = 0.0
    for i in range(N):
        sets = list(itertools.combinations([j for j in range(N) if j != i], K))
        for chosen in sets:
            z, z2 = keys[list(chosen)] - keys[i], k2[list(chosen)] - k2[i]
            parts = (z @ (q2[i] - q[i]), (z2 - z) @ q[i], (z2 - z) @ (q2[i] - q[i]))
            change = z2 @ q2[i] - z @ q[i]
            close(parts[0] + parts[1] + parts[2], change)
            p = F.pad(z @ q[i], (1, 0)).softmax(0)[1:]
            weight = 1 / (N * len(sets))
            first, second, third = (a + weight * p @ b for a, b in zip((first, second, third), parts, strict=True))
            square = square + weight * change.square().sum() / 2
    of_queries, of_keys = model.unit_gradients(q, keys, K)
    close(first, (of_queries * (q2 - q)).sum() / N)
    close(second, (of_keys * (k2 - keys)).sum() / N)
    rise = model.objective(q2, k2, K) - model.objective(q, keys, K)
    assert 0 < float(rise - first - second - third) <= float(square)  # convex, and Lemma D.1


# ----------------------------------------------------------------------------------------------- C5, C6, C7: the start
def test_c5_what_the_initialisation_gives():
    """Lemma B.1: |h| near 1, closer the wider; Corollary B.9: |f| of order 1; so L_S(0) is near log(k + 1)."""
    off = {}
    for width in (128, 2048):
        x, query, key = setup(width)
        norms = torch.cat([h.norm(dim=1) for e in (query, key) for h in e.layers(x)[1:]])
        off[width] = (norms - 1).abs().max().item()
        assert query(x).norm(dim=1).min().item() > 0.3
        assert query(x).norm(dim=1).max().item() < 2.0
    assert off[2048] < 0.15
    assert off[2048] < off[128]
    for k in range(1, N):
        assert abs(model.objective(query(x), key(x), k).item() - math.log(k + 1)) < 0.12


def test_c6_gradients_are_between_multiples_of_the_loss_vectors():
    """Lemma 4.3: |grad|^2 over m/(nd) sum |loss_i|^2 is bounded on both sides, by numbers that do not depend on m."""
    ratios = {}
    for width in (128, 512, 2048):
        x, query, key = setup(width)
        trace = model.descend(x, query, key, K, eta=0, gamma=0, steps=0)
        ratios[width] = trace.query_ratio[0], trace.key_ratio[0]
    values = np.array(list(ratios.values()))
    assert values.min() > 0.1
    assert values.max() < 0.35
    assert abs(np.log(values[-1] / values[0])).max() < 0.4  # a factor of m would be 16


def test_c7_the_remainder_is_small_beside_the_step():
    """Lemma 4.4: what is left of the first order is at most omega^(1/3) |W'|, and quadratic terms: order above 4/3."""
    x, query, key = setup(1024)
    loss = model.objective(query(x), key(x), K)
    weights = [*query.weights, *key.weights]
    grads = torch.autograd.grad(loss, weights)
    start = [w.detach().clone() for w in weights]
    generator = torch.Generator().manual_seed(3)
    sizes = (0.1, 0.03, 0.01, 0.003)
    squares = np.zeros(len(sizes))  # over directions: a single remainder may happen to be zero
    for _ in range(4):
        directions = [torch.randn(w.shape, generator=generator, dtype=torch.float64) for w in weights]
        directions = [d / torch.linalg.matrix_norm(d, 2) for d in directions]
        slope = sum(float((g * d).sum()) for g, d in zip(grads, directions, strict=True))
        for at, size in enumerate(sizes):
            with torch.no_grad():
                for w, w0, d in zip(weights, start, directions, strict=True):
                    w.copy_(w0 + size * d)
                changed = model.objective(query(x), key(x), K)
            squares[at] += (changed.item() - loss.item() - size * slope) ** 2
    assert np.polyfit(np.log(sizes), np.log(squares) / 2, 1)[0] > 4 / 3
    assert math.sqrt(squares[0] / 4) < 0.01 * loss.item()


# ------------------------------------------------------------------------------------------------ C8: Algorithm 1
def test_c8_descent_is_monotone_and_the_loss_vectors_vanish():
    x, query, key = setup(256)
    trace = model.descend(x, query, key, K, eta=0.02, gamma=0.02, steps=300)
    assert all(b < a for a, b in itertools.pairwise(trace.loss))
    assert trace.rises == 0
    assert model.descend(*setup(64), K, eta=20.0, gamma=20.0, steps=5).rises > 0  # far too large a step
    assert trace.loss[0] > 1.0
    assert trace.loss[-1] < 0.05
    norms = trace.norm()
    assert norms[-1] < 0.25 * norms[0]
    means = np.cumsum(norms) / np.arange(1, len(norms) + 1)
    assert means[-1] < means[100] < means[20]  # (1/T) sum |loss| is what Theorem 4.2 bounds
    assert max(trace.moved) < 0.1
    ratios = np.array([trace.query_ratio, trace.key_ratio])
    assert ratios.min() > 0.08  # Lemma 4.3 along the way
    assert ratios.max() < 0.5


def test_c8_both_gradients_are_taken_at_the_same_point():
    """One step by hand. With theta's gradient at W_(t+1) it would be another point."""
    x, query, key = setup()
    loss = model.objective(query(x), key(x), K)
    d_w = torch.autograd.grad(loss, list(query.weights), retain_graph=True)
    d_theta = torch.autograd.grad(loss, list(key.weights))
    wanted_w = [w.detach() - 0.3 * g for w, g in zip(query.weights, d_w, strict=True)]
    wanted_theta = [w.detach() - 0.2 * g for w, g in zip(key.weights, d_theta, strict=True)]
    model.descend(x, query, key, K, eta=0.3, gamma=0.2, steps=1)
    for a, b in zip([*query.weights, *key.weights], [*wanted_w, *wanted_theta], strict=True):
        close(a.detach(), b, 1e-15)


def test_c8_wider_networks_move_less():
    """omega of order 1/sqrt(m): step sizes of order 1/m, until the loss is the same for all."""
    widths, distances = (64, 256, 1024), []
    for width in widths:
        x, query, key = setup(width)
        trace = model.descend(x, query, key, K, eta=5 / width, gamma=5 / width, steps=80, record=5)
        at = next(i for i, loss in enumerate(trace.loss) if loss < 0.4)
        distances.append(trace.distance[at])
    slope = np.polyfit(np.log(widths), np.log(distances), 1)[0]
    assert -0.65 < slope < -0.35


def test_c8_the_stochastic_form_descends_too():
    x, query, key = setup(128)
    trace = model.descend(x, query, key, K, eta=0.03, gamma=0.03, steps=400, record=50, batch=3, draws=sx.Key(5))
    assert trace.loss[-1] < 0.1
    again = setup(128)
    model.descend(*again, K, eta=0.03, gamma=0.03, steps=400, record=400, batch=3, draws=sx.Key(5))
    assert torch.equal(flat(query), flat(again[1]))
    other = setup(128)
    model.descend(*other, K, eta=0.03, gamma=0.03, steps=400, record=400, batch=3, draws=sx.Key(6))
    assert not torch.equal(flat(query), flat(other[1]))
    with pytest.raises(ValueError, match="draws must be a Key"):
        model.descend(*setup(), K, eta=0.1, gamma=0.1, steps=1, batch=2)


# ------------------------------------------------------------------------------------------------ C10: negatives
def test_c10_all_negatives_are_the_full_softmax():
    x, query, key = setup()
    q, keys = query(x), key(x)
    close(model.objective(q, keys, N - 1), F.cross_entropy(q @ keys.T, torch.arange(N)))


def test_c10_the_stochastic_gradient_is_unbiased():
    """Enumerated, for the weights of both encoders: every point with every set of negatives, by the fused loss."""
    x, query, key = setup(16)
    weights = [*query.weights, *key.weights]
    total = [torch.zeros_like(w) for w in weights]
    sets = math.comb(N - 1, K)
    for i in range(N):
        for chosen in itertools.combinations([j for j in range(N) if j != i], K):
            loss = contrastive(query(x[i : i + 1]), key(x), torch.tensor([i]), torch.tensor([chosen]))
            for sum_, g in zip(total, torch.autograd.grad(loss, weights), strict=True):
                sum_ += g / (N * sets)
    for a, b in zip(total, torch.autograd.grad(model.objective(query(x), key(x), K), weights), strict=True):
        close(a, b)


# ----------------------------------------------------------------------------------------------- Lemma B.10
def test_depth_brings_points_closer():
    """Lemma B.10 as printed (distance at least delta / 2 at every layer) fails without delta = O(1/L)."""
    x = torch.eye(2, 8, dtype=torch.float64)
    encoders = [Encoder(8, 512, 4, 21, torch.Generator().manual_seed(seed)) for seed in range(6)]
    distance = np.array([[(h[0] - h[1]).norm().item() for h in e.layers(x)[1:]] for e in encoders]).mean(0)
    assert distance[1] > math.sqrt(2) / 2 > distance[20]
    assert abs(distance[0] - math.sqrt(2 - 2 / math.pi)) < 0.06


def test_the_spectral_norm():
    for shape in ((30, 20), (20, 30)):
        matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        assert abs(model.spectral_norm(matrix, 1e-9) / float(torch.linalg.matrix_norm(matrix, 2)) - 1) < 1e-5
    assert model.spectral_norm(torch.zeros(3, 4)) == 0.0


def test_errors():
    with pytest.raises(ValueError, match="delta must leave room for 3 points"):
        model.separated_points(3, 2, 3.0, torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match="must be at least 1"):
        Encoder(8, 0, 4, 1)


# ------------------------------------------------------------------------------------------------ practice, the command
def test_rows_of_users():
    users, items = torch.tensor([3, 1, 3, 0, 3]), torch.tensor([7, 8, 9, 5, 6])
    assert practice._rows_of(users, items, torch.tensor([1, 3]), -100).tolist() == [[8, -100, -100], [7, 9, 6]]


def write_gowalla(folder, users=40, items=30, seed=0):
    """Users of two tastes: even users take even items; the lower the id, the more popular."""
    folder.mkdir(parents=True)
    draw = np.random.default_rng(seed)
    lines = {"train": [], "test": []}
    for user in range(users):
        liked = np.arange(user % 2, items, 2)
        weight = 1 / (1 + np.arange(len(liked)))
        taken = draw.choice(liked, 10, replace=False, p=weight / weight.sum())
        lines["train"].append(f"{user} {' '.join(map(str, taken[:7]))}")
        lines["test"].append(f"{user} {' '.join(map(str, taken[7:]))}")
    for part, text in lines.items():
        (folder / f"{part}.txt").write_text("\n".join(text) + "\n")


@pytest.mark.parametrize("method", practice.METHODS)
def test_towers_learn_the_tastes(tmp_path, method):
    write_gowalla(tmp_path / "gowalla")
    task = practice.GowallaTask(tmp_path / "gowalla", dim=8, batch=32, samples=5)
    assert (task.num_users, task.num_items) == (40, 30)
    users, known, asked = task.asked["test"]
    assert len(users) == 40
    assert not bool((known[:, :, None] == asked[:, None]).any())
    task.start(method, 0.3, 0, final=True)
    bank = task.tables[1].detach().clone()
    for _ in range(60):
        task.step()
    assert not torch.equal(bank, task.tables[1])
    scores = (task.tables[0] @ task.tables[1].T).detach()
    same = scores[0::2, 0::2].mean() + scores[1::2, 1::2].mean()
    other = scores[0::2, 1::2].mean() + scores[1::2, 0::2].mean()
    assert float(same) > float(other)
    assert task.recall("test") > 0.9  # of 23 items that a user does not have, 20 are shown
    task.start(method, 0.3, 0, final=False)
    assert len(task.users) < 280


def test_the_correction_wins_on_built_in_data():
    """Long-tailed items seen through much noise: the prior matters, and in-batch negatives take it out."""
    task = practice.TwoViewTask(items=1000, dim=16, batch=64, examples=20_000, held_out=1000, width=64, samples=63)
    names = ["in-batch, without log Q", "in-batch, with log Q", "sampled by frequency, with log Q"]
    found = practice.compare(task, names, tune=60, steps=[300], seed=0, done=lambda n: None)
    without, batch, sampled = (found[name].recall[-1] for name in names)
    assert sampled > without + 0.03
    assert batch > without + 0.03


def test_the_command(tmp_path):
    write_gowalla(tmp_path / "data" / "gowalla")
    result = run_paper("contrastive", tmp_path / "out", quick=True, data=tmp_path / "data")
    claims = {claim["name"]: claim["holds"] for claim in result.claims}
    assert claims["Facts 1 and 2: the loss vectors"]
    assert claims["k = n - 1"]
    assert claims["L_S falls at every step (Section 5.3)"]
    assert claims["points stay apart (Lemma B.10)"] is False
    assert "Gowalla: sampled negatives with log Q against in-batch without" in claims
    for name in ("results.json", "report.md", "headline.png", "descent.png"):
        assert (result.folder / name).stat().st_size > 1000
    assert any("sums exp(q z_is) to s = j" in text for text in result.found["deviations"])


def test_the_command_without_data(tmp_path):
    result = run_paper("contrastive", tmp_path, quick=True)
    assert any("gowalla was left out" in text for text in result.found["deviations"])
    assert not any(claim["name"].startswith("Gowalla") for claim in result.claims)
