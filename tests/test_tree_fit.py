"""Fitting the adversarial tree: the discrete step, the alternation, odd inputs, PCA, errors.

The compiled fit is compared with `reference/tree_fit.py`, and both parts of the reference with brute force.
"""

from __future__ import annotations

import io
import itertools
import math
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from samplex_cuda import _native
from samplex_cuda.data import HierarchicalZipf
from samplex_cuda.reference import tree_fit as reference
from samplex_cuda.tree_fit import FittedTree, cross_validate_reg, describe_fit, fit_pca, fit_tree, project

sparse = pytest.importorskip("scipy.sparse")


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def clusters(n: int, classes: int, k: int, seed: int = 0, noise: float = 0.3) -> tuple[torch.Tensor, torch.Tensor]:
    """Gaussian clusters, class frequencies falling with the id."""
    generator = torch.Generator().manual_seed(seed)
    centre = torch.randn(classes, k, generator=generator)
    frequency = 1.0 / torch.arange(1, classes + 1)
    y = torch.multinomial(frequency, n, replacement=True, generator=generator)
    return centre[y] + noise * torch.randn(n, k, generator=generator), y


def native_fit(z, y, num_classes, *, reg=0.1, max_rounds=15, discrete=True):
    """(exact fp64 [L, k + 1], leaf_class, trace, levels), straight from the compiled part."""
    leaves = 2 ** (num_classes - 1).bit_length()
    weights, bias = np.empty((leaves, z.shape[1]), np.float32), np.empty(leaves, np.float32)
    leaf_class, exact = np.empty(leaves, np.int64), np.empty((leaves, z.shape[1] + 1))
    levels: list[dict] = []
    trace = _native.fit_tree(
        z.numpy(),
        y.numpy(),
        num_classes,
        reg,
        max_rounds,
        discrete,
        weights,
        bias,
        leaf_class,
        exact,
        levels.append,
        True,
    )
    np.testing.assert_array_equal(weights, exact[:, :-1].astype(np.float32))
    np.testing.assert_array_equal(bias, exact[:, -1].astype(np.float32))
    return torch.from_numpy(exact), torch.from_numpy(leaf_class), trace, levels


def classes_below(leaf_class: torch.Tensor, node: int) -> torch.Tensor:
    leaves = len(leaf_class)
    low, high = node, node + 1
    while low < leaves:
        low, high = 2 * low, 2 * high
    below = leaf_class[low - leaves : high - leaves]
    return below[below >= 0].sort().values


def check_tree(tree: FittedTree, z: torch.Tensor, num_classes: int) -> None:
    """The shape of a tree, and D11: the real classes share probability 1, padding has none."""
    leaves = 2 ** (num_classes - 1).bit_length()
    assert tree.weights.shape == (leaves, z.shape[1])
    assert tree.weights.dtype == tree.bias.dtype == torch.float32
    assert tree.bias.shape == tree.leaf_class.shape == (leaves,)
    assert tree.leaf_class.dtype == torch.int64
    assert sorted(tree.leaf_class.tolist()) == [-1] * (leaves - num_classes) + list(range(num_classes))
    assert torch.equal(tree.weights[0], torch.zeros(z.shape[1]))
    assert bool(torch.isfinite(tree.weights).all())
    assert not bool(torch.isnan(tree.bias).any())
    barred = torch.isinf(tree.bias)
    assert torch.equal(tree.weights[barred], torch.zeros(int(barred.sum()), z.shape[1]))
    log_p = reference.log_prob_leaves(tree.weights, tree.bias, z)
    assert bool((log_p[:, tree.leaf_class < 0] == -math.inf).all())
    total = reference.log_prob_all(tree.weights, tree.bias, tree.leaf_class, z).exp().sum(1)
    torch.testing.assert_close(total, torch.ones(len(z), dtype=torch.float64), rtol=0, atol=1e-6)
    for node in range(1, leaves):
        if len(classes_below(tree.leaf_class, node)) == 0:
            assert float(tree.bias[node]) == 0.0
            assert bool((tree.weights[node] == 0).all())


# ------------------------------------------------------------------------------------------------ D9: the discrete step
@pytest.mark.parametrize("m", [2, 3, 6, 8, 10])
@pytest.mark.parametrize("room", [0, 1, 3])
def test_the_discrete_step_is_the_best_of_all_splits(m, room):
    half = (m + 1) // 2 + room
    least, most = max(0, m - half), min(half, m)
    for seed in range(6):
        z, y = clusters(60, m, 3, seed)
        w, b = rand(3, seed=seed + 100).double(), 0.3 * (seed - 2)
        # Eq. 9 from the likelihood itself: what a class gains when it goes right instead of left.
        score = z.double() @ w + b
        gain = F.logsigmoid(score) - F.logsigmoid(-score)
        delta = torch.zeros(m, dtype=torch.float64).index_add_(0, y, gain)
        likelihood = {}
        for bits in itertools.product([False, True], repeat=m):
            if least <= sum(bits) <= most:
                side = torch.tensor(bits)[y]
                likelihood[bits] = float(F.logsigmoid(torch.where(side, score, -score)).sum())
        best = max(likelihood.values())
        # The formula with the bias term: w·S_y + n_y b.
        sums = torch.zeros(m, 3, dtype=torch.float64).index_add_(0, y, z.double())
        formula = sums @ w + torch.bincount(y, minlength=m).double() * b
        torch.testing.assert_close(delta, formula, rtol=1e-9, atol=1e-9)
        ids = torch.randperm(m, generator=torch.Generator().manual_seed(seed))
        for right in (
            reference.split(formula, ids, least, most),
            torch.tensor(_native.tree_split(formula.tolist(), ids.tolist(), least, most)) == 1,
        ):
            assert likelihood[tuple(right.tolist())] == pytest.approx(best, abs=1e-9)


def test_ties_go_by_class_id_and_free_classes_fill_up():
    assert _native.tree_split([1.0, 1.0, 1.0, 1.0], [7, 3, 5, 1], 2, 2) == [0, 1, 0, 1]
    assert _native.tree_split([0.0] * 6, list(range(6)), 0, 4) == [1, 1, 1, 0, 0, 0]
    assert _native.tree_split([2.0, 0.0, 0.0, 0.0], list(range(4)), 0, 4) == [1, 1, 0, 0]
    assert _native.tree_split([2.0, 1.0, 3.0, -1.0], list(range(4)), 0, 4) == [1, 1, 1, 0]
    assert _native.tree_split([2.0, 1.0, 3.0, -1.0], list(range(4)), 2, 2) == [1, 0, 1, 0]
    assert _native.tree_split([-2.0, -1.0], [0, 1], 0, 2) == [0, 0]
    rng = np.random.default_rng(0)
    for _ in range(50):
        delta = rng.integers(-2, 3, 9).astype(float)
        ids = rng.permutation(9)
        least, most = sorted(rng.integers(0, 10, 2).tolist())
        want = reference.split(torch.from_numpy(delta), torch.from_numpy(ids), least, most)
        assert _native.tree_split(delta.tolist(), ids.tolist(), least, most) == want.int().tolist()


# ------------------------------------------------------------------------------------------------ D10: the alternation
@pytest.mark.parametrize("discrete", [True, False])
@pytest.mark.parametrize(("n", "classes", "k"), [(400, 13, 5), (3000, 64, 16), (50, 40, 3)])
def test_the_alternation_never_lowers_the_objective(n, classes, k, discrete):
    z, y = clusters(n, classes, k, seed=n)
    exact, leaf_class, trace, levels = native_fit(z, y, classes, discrete=discrete)
    by_node: dict[int, list[float]] = {}
    for node, _, objective in trace:
        by_node.setdefault(node, []).append(objective)
    steps = 0
    for history in by_node.values():
        for before, after in itertools.pairwise(history):
            assert after >= before - 1e-10 * (1 + abs(before))
            steps += 1
    assert steps > classes  # several steps per node, or the check above says little
    if discrete:
        assert any(number % 2 == 0 and number > 0 for _, number, _ in trace)
        assert sum(level["rounds"] for level in levels) > 0
    else:
        assert sum(level["rounds"] for level in levels) == 0
    assert max(level["gradient_ratio"] for level in levels) <= 1e-8
    # The gradient once more, by autograd, from the tree alone.
    for node in by_node:
        b = exact[node, -1]
        if torch.isinf(b):
            continue
        right = classes_below(leaf_class, 2 * node + 1)
        both = torch.cat([classes_below(leaf_class, 2 * node), right])
        rows = torch.isin(y, both)
        x = z[rows].double()
        side = torch.isin(y[rows], right)
        wb = exact[node].clone().requires_grad_()
        score = x @ wb[:-1] + wb[-1]
        objective = F.logsigmoid(torch.where(side, score, -score)).sum() - 0.1 * (wb @ wb)
        (gradient,) = torch.autograd.grad(objective, wb)
        assert float(gradient.norm()) <= 1e-8 * max(1.0, float(x.norm(dim=1).sum()))


def test_the_split_is_stable_at_the_end():
    """At the final (w, b) the discrete step changes nothing: a fixed point of both steps."""
    z, y = clusters(2000, 32, 6, seed=3)
    exact, leaf_class, _, levels = native_fit(z, y, 32, max_rounds=100)
    assert sum(level["unfinished"] for level in levels) == 0
    for node in range(1, 32):
        left, right = classes_below(leaf_class, 2 * node), classes_below(leaf_class, 2 * node + 1)
        ids = torch.cat([left, right])
        position = torch.full((32,), -1)
        position[ids] = torch.arange(len(ids))
        rows = torch.isin(y, ids)
        delta = torch.zeros(len(ids), dtype=torch.float64)
        delta.index_add_(0, position[y[rows]], z[rows].double() @ exact[node, :-1] + exact[node, -1])
        assert torch.equal(reference.split(delta, ids, len(right), len(right)), torch.isin(ids, right))


@pytest.mark.parametrize(
    ("n", "classes", "k", "max_rounds", "discrete"),
    [
        (500, 16, 4, 30, True),
        (500, 16, 4, 30, False),
        (800, 21, 7, 0, True),
        (800, 21, 7, 1, True),
        (800, 21, 7, 2, True),
        (800, 21, 7, 30, True),
        (40, 30, 2, 30, True),
        (300, 9, 1, 30, True),
        (600, 8, 37, 30, True),
    ],
)
def test_the_compiled_fit_takes_the_steps_of_the_reference(n, classes, k, max_rounds, discrete):
    z, y = clusters(n, classes, k, seed=classes)
    options = {"reg": 0.2, "max_rounds": max_rounds, "discrete": discrete}
    exact, leaf_class, _, _ = native_fit(z, y, classes, **options)
    weights, bias, want_class = reference.fit_tree(z, y, classes, **options)
    assert torch.equal(leaf_class, want_class)
    torch.testing.assert_close(exact[:, :-1], weights, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(exact[:, -1], bias, rtol=1e-5, atol=1e-6)


def test_one_node_against_a_general_optimiser():
    optimize = pytest.importorskip("scipy.optimize")
    z, y = clusters(300, 2, 4, seed=9, noise=1.5)
    exact, leaf_class, _, _ = native_fit(z, y, 2, reg=0.3)
    x1 = np.concatenate([z.double().numpy(), np.ones((300, 1))], 1)
    zeta = np.where(y.numpy() == int(leaf_class[1]), 1.0, -1.0)

    def loss(wb):
        return np.logaddexp(0, -zeta * (x1 @ wb)).sum() + 0.3 * wb @ wb

    best = optimize.minimize(loss, np.zeros(5), method="BFGS", options={"gtol": 1e-9})
    assert loss(exact[1].numpy()) <= best.fun + 1e-9
    np.testing.assert_allclose(exact[1].numpy(), best.x, atol=1e-5)


# ------------------------------------------------------------------------------------------------ D11, odd inputs
@pytest.mark.parametrize("classes", [1, 2, 3, 5, 64, 100])
@pytest.mark.parametrize("discrete", [True, False])
def test_any_number_of_classes(classes, discrete):
    z, y = clusters(700, classes, 6, seed=classes)
    tree = fit_tree(z, y, classes, discrete=discrete)
    check_tree(tree, z, classes)
    log_p = reference.log_prob_all(tree.weights, tree.bias, tree.leaf_class, z)
    mean = float(log_p[torch.arange(len(y)), y].mean())
    assert tree.mean_log_prob(z, y) == pytest.approx(mean, abs=1e-9)
    assert tree.train_log_prob == pytest.approx(mean, abs=1e-5)
    assert bool(torch.isfinite(log_p).all())  # no real class is barred
    if classes > 1:
        frequency = torch.bincount(y, minlength=classes).double() / len(y)
        assert mean > float(torch.log(frequency[y]).mean())  # x says more than the frequencies do


def test_one_class_needs_no_node():
    tree = fit_tree(rand(5, 2), torch.zeros(5, dtype=torch.int64), 1)
    assert (tree.depth, tree.levels, tree.train_log_prob, tree.leaf_class.tolist()) == (0, [], 0.0, [0])
    assert describe_fit(tree)


def test_classes_without_examples():
    z, y = clusters(300, 12, 4, seed=1)
    tree = fit_tree(z, 5 * y, 70)
    check_tree(tree, z, 70)
    p = reference.log_prob_all(tree.weights, tree.bias, tree.leaf_class, z).exp()
    empty = torch.ones(70, dtype=torch.bool)
    empty[5 * y] = False
    assert bool((p[:, empty] > 0).all())
    assert tree.train_log_prob > -math.log(70)
    want = reference.fit_tree(z, 5 * y, 70)[2]
    assert torch.equal(tree.leaf_class, want)


@pytest.mark.parametrize(
    "case", ["duplicates", "constant", "one column constant", "all zero", "one row", "huge", "tiny", "one label"]
)
def test_degenerate_features(case):
    z, y = clusters(200, 10, 4, seed=2)
    if case == "duplicates":
        z = z[:3].repeat(67, 1)[:200].contiguous()
    elif case == "constant":
        z = torch.full_like(z, 3.0)
    elif case == "one column constant":
        z[:, 1] = -7.0
    elif case == "all zero":
        z = torch.zeros_like(z)
    elif case == "one row":
        z, y = z[:1], y[:1]
    elif case == "huge":
        z = z * 1e6
    elif case == "tiny":
        z = z * 1e-6
    elif case == "one label":
        y = torch.full_like(y, 4)
    tree = fit_tree(z, y, 10)
    check_tree(tree, z[:5], 10)
    assert max(level["gradient_ratio"] for level in tree.levels) <= 1e-8
    if case in ("constant", "all zero"):
        # Only the frequencies are left to learn.
        frequency = torch.bincount(y, minlength=10).double() / len(y)
        best = float((frequency * frequency.clamp(min=1e-30).log()).sum())
        assert best - 0.1 < tree.train_log_prob <= best + 1e-9


def test_fewer_examples_than_classes():
    z, y = clusters(20, 90, 5, seed=4)
    tree = fit_tree(z, y, 100)
    check_tree(tree, z, 100)
    assert tree.train_log_prob > -math.log(100)


def test_same_bits_on_any_number_of_threads():
    # More than 32,768 examples: the root and its large children are shared between threads.
    z, y = clusters(70_000, 50, 8, seed=5)
    trees = [fit_tree(z, y, 50, threads=count, max_rounds=6) for count in (1, 2, 3)]
    for tree in trees[1:]:
        assert torch.equal(tree.weights, trees[0].weights)
        assert torch.equal(tree.bias, trees[0].bias)
        assert torch.equal(tree.leaf_class, trees[0].leaf_class)
        assert tree.levels == trees[0].levels
    # The serial walk (with a trace) makes the same sums.
    exact, leaf_class, _, _ = native_fit(z, y, 50, max_rounds=6)
    assert torch.equal(exact[:, :-1].float(), trees[0].weights)
    assert torch.equal(leaf_class, trees[0].leaf_class)


def test_threads_are_given_back():
    before = torch.get_num_threads()
    fit_tree(rand(10, 2), torch.arange(10) % 3, 3, threads=before + 1)
    assert torch.get_num_threads() == before
    with pytest.raises(ValueError, match="z must be finite"):
        fit_tree(torch.full((3, 2), math.nan), torch.tensor([0, 1, 2]), 3, threads=before + 1)
    assert torch.get_num_threads() == before


def test_inputs_are_left_alone_and_may_be_arrays():
    z, y = clusters(100, 7, 3, seed=6)
    z_before, y_before = z.clone(), y.clone()
    tree = fit_tree(z, y, 7)
    assert torch.equal(z, z_before)
    assert torch.equal(y, y_before)
    wide = torch.empty(100, 6)
    wide[:, ::2] = z
    for other in (
        fit_tree(z.numpy(), y.numpy(), 7),
        fit_tree(z.double(), y.int(), 7),
        fit_tree(wide[:, ::2], y, 7),
        fit_tree(z, y, 7, seed=5),
    ):
        assert torch.equal(other.weights, tree.weights)
        assert torch.equal(other.leaf_class, tree.leaf_class)


def test_the_order_of_the_examples_hardly_matters():
    z, y = clusters(900, 16, 5, seed=7)
    order = torch.randperm(900, generator=torch.Generator().manual_seed(1))
    a, b = fit_tree(z, y, 16), fit_tree(z[order], y[order], 16)
    assert torch.equal(a.leaf_class, b.leaf_class)
    torch.testing.assert_close(a.weights, b.weights, rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------------------------ quality
@pytest.mark.parametrize("seed", [0, 1])
def test_the_discrete_step_pays_off_on_held_out_examples(seed):
    data = HierarchicalZipf(500, 32, 12_000, seed=seed, num_valid=4000)
    (x, y), (held_x, held_y) = data.split("train"), data.split("valid")
    mean, projection = fit_pca(x, 12)
    z, held_z = project(x, mean, projection), project(held_x, mean, projection)
    ours = fit_tree(z, y, 500)
    median = fit_tree(z, y, 500, discrete=False)
    frequency = torch.log((torch.bincount(y, minlength=500) + 1.0) / (len(y) + 500))[held_y].mean()
    scores = [ours.mean_log_prob(held_z, held_y), median.mean_log_prob(held_z, held_y), float(frequency)]
    assert scores[0] > scores[1] + 0.05
    assert scores[1] > scores[2]
    assert ours.train_log_prob > median.train_log_prob


def test_cross_validation_finds_the_strength_that_fits():
    z, y = clusters(400, 8, 6, seed=8, noise=2.0)
    choice = cross_validate_reg(z, y, 8, regs=(1e-4, 3.0, 1e5), folds=4, seed=1)
    assert choice.reg == 3.0
    assert list(choice.scores) == [1e-4, 3.0, 1e5]
    assert choice == cross_validate_reg(z, y, 8, regs=(1e-4, 3.0, 1e5), folds=4, seed=1)
    # By hand, for one value.
    fold = torch.randperm(400, generator=torch.Generator().manual_seed(1)) % 4
    total = 0.0
    for index in range(4):
        tree = fit_tree(z[fold != index], y[fold != index], 8, reg=3.0)
        log_p = reference.log_prob_all(tree.weights, tree.bias, tree.leaf_class, z[fold == index])
        total += float(log_p.gather(1, y[fold == index].unsqueeze(1)).sum())
    assert choice.scores[3.0] == pytest.approx(total / 400, abs=1e-9)


def test_the_report_gives_the_figures():
    z, y = clusters(600, 20, 5, seed=10)
    held_z, held_y = z[500:], y[500:]
    tree = fit_tree(z[:500], y[:500], 20)
    text = describe_fit(tree, held_z, held_y)
    lines = {line[:18].strip(): line[18:].split() for line in text.splitlines()}
    assert [float(v) for v in lines["tree"]] == pytest.approx(
        [tree.train_log_prob, tree.mean_log_prob(held_z, held_y)], abs=6e-5
    )
    assert [float(v) for v in lines["uniform"]] == pytest.approx([-math.log(20)] * 2, abs=6e-5)
    log_frequency = torch.log((torch.bincount(y[:500], minlength=20) + 1) / 520)
    want = [float(log_frequency[y[:500]].mean()), float(log_frequency[held_y].mean())]
    assert [float(v) for v in lines["class frequency"]] == pytest.approx(want, abs=6e-5)
    rows = [line.split() for line in text.splitlines()[6:]]
    assert [int(row[0]) for row in rows] == list(range(5))
    assert sum(float(row[-2]) for row in rows) == pytest.approx(tree.train_log_prob, abs=1e-3)
    assert sum(float(row[-1]) for row in rows) == pytest.approx(tree.mean_log_prob(held_z, held_y), abs=1e-3)
    assert str(tree) == describe_fit(tree)


def test_the_callback_hears_every_level_and_may_stop_the_fit():
    z, y = clusters(100, 16, 3, seed=11)
    seen: list[dict] = []

    def stop(level):
        seen.append(level)
        if level["level"] == 2:
            raise KeyboardInterrupt

    buffers = (np.empty((16, 3), np.float32), np.empty(16, np.float32), np.empty(16, np.int64), np.empty(0))
    with pytest.raises(KeyboardInterrupt):
        _native.fit_tree(z.numpy(), y.numpy(), 16, 0.1, 15, True, *buffers, stop, False)
    assert [level["level"] for level in seen] == [0, 1, 2]
    assert fit_tree(z, y, 16).levels[:3] == seen


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_on_a_terminal_and_nothing_elsewhere(monkeypatch, capsys):
    pytest.importorskip("rich")
    z, y = clusters(100, 16, 3, seed=11)
    quiet = fit_tree(z, y, 16)
    assert capsys.readouterr() == ("", "")
    for wanted, rich_is_there in ((True, True), (False, True), (True, False)):
        terminal = Terminal()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", terminal)
            if not rich_is_there:
                patch.setitem(sys.modules, "rich.progress", None)
            tree = fit_tree(z, y, 16, progress=wanted)
        assert torch.equal(tree.weights, quiet.weights)
        if wanted and rich_is_there:
            assert "level 4/4" in terminal.getvalue()
            assert f"log p_n so far {tree.train_log_prob:8.4f}" in terminal.getvalue()
        else:
            assert terminal.getvalue() == ""


# ------------------------------------------------------------------------------------------------ PCA
def offset_features(n: int, width: int, seed: int = 0) -> torch.Tensor:
    """Falling variances along random directions, a mean far from 0, and a constant column."""
    turn = torch.linalg.qr(rand(width, width, seed=seed + 1)).Q
    x = (rand(n, width, seed=seed) * 0.8 ** torch.arange(width)) @ turn + 5.0
    x[:, 3] = 2.0
    return x


@pytest.mark.parametrize("width", [20, 700])
@pytest.mark.parametrize("chunk_size", [None, 64])
def test_pca_against_svd(width, chunk_size):
    x = offset_features(300, width)
    mean, projection = fit_pca(x, 5, chunk_size=chunk_size)
    assert mean.dtype == projection.dtype == torch.float32
    assert projection.shape == (width, 5)
    torch.testing.assert_close(mean, x.mean(0), rtol=1e-5, atol=1e-5)
    _, values, vectors = torch.linalg.svd((x - x.mean(0)).double(), full_matrices=False)
    agreement = (projection.double() * vectors[:5].T).sum(0).abs()
    torch.testing.assert_close(agreement, torch.ones(5, dtype=torch.float64), rtol=0, atol=1e-4)
    z = project(x, mean, projection, chunk_size=chunk_size)
    torch.testing.assert_close(z, (x - mean) @ projection, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(z.double().var(0, correction=0) * 300, values[:5] ** 2, rtol=1e-3, atol=1e-6)
    assert bool((projection.gather(0, projection.abs().argmax(0, keepdim=True)) > 0).all())


@pytest.mark.parametrize("width", [20, 700])
def test_whitening(width):
    x = offset_features(300, width)
    z = project(x, *fit_pca(x, 4, whiten=True))
    torch.testing.assert_close(z.T @ z / 300, torch.eye(4), rtol=0, atol=1e-3)
    # Components without variance are kept, not blown up.
    flat = torch.zeros(50, 6)
    flat[:, 0] = rand(50)
    mean, projection = fit_pca(flat, 3, whiten=True)
    assert bool(torch.isfinite(projection).all())
    assert float(project(flat, mean, projection)[:, 1:].abs().max()) < 1e-6


def test_pca_repeats_for_a_seed():
    x = offset_features(200, 600)
    a, b = fit_pca(x, 4, seed=3)[1], fit_pca(x, 4, seed=3)[1]
    assert torch.equal(a, b)
    torch.testing.assert_close(a, fit_pca(x, 4, seed=4)[1], rtol=0, atol=1e-3)


@pytest.mark.parametrize("width", [30, 600])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_sparse_equals_dense(width):
    x = rand(150, width) * (rand(150, width, seed=1) > 1.0)
    x[7] = 0.0
    x[-1] = 0.0
    csr = sparse.csr_matrix(x.numpy())
    want_mean, want_projection = fit_pca(x, 3)
    want = project(x, want_mean, want_projection)
    for other in (csr, sparse.csr_array(csr), x.to_sparse_csr(), x.numpy(), x.double()):
        mean, projection = fit_pca(other, 3, chunk_size=40)
        torch.testing.assert_close(mean, want_mean, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(projection, want_projection, rtol=0, atol=1e-3 if width > 512 else 1e-5)
        torch.testing.assert_close(project(other, want_mean, want_projection, chunk_size=40), want, rtol=0, atol=1e-5)


# ------------------------------------------------------------------------------------------------ errors
Z, Y = rand(6, 3), torch.tensor([0, 1, 2, 0, 1, 2])


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (
            lambda: fit_tree(Z, torch.tensor([0, 1, 3, 0, 1, 2]), 3),
            IndexError,
            r"y must be in \[0, 3\), got 3 in row 2",
        ),
        (lambda: fit_tree(Z, Y - 1, 3), IndexError, r"y must be in \[0, 3\), got -1 in row 0"),
        (lambda: fit_tree(Z, Y[:5], 3), ValueError, "z and y must have the same length, got 6 and 5"),
        (lambda: fit_tree(Z[:0], Y[:0], 3), ValueError, "z must have at least 1 row, got 0"),
        (lambda: fit_tree(Z[:, :0], Y, 3), ValueError, r"z must have at least 1 column, got \[6, 0\]"),
        (lambda: fit_tree(Z[0], Y, 3), ValueError, r"z must be \[N, k\] floating point, got \[3\] float32"),
        (lambda: fit_tree(Z.long(), Y, 3), ValueError, "floating point, got .* int64"),
        (lambda: fit_tree(Z, Y.float(), 3), ValueError, r"y must be \[N\] integers, got \[6\] float32"),
        (lambda: fit_tree(Z.tolist(), Y, 3), TypeError, "z must be a tensor or an array, got list"),
        (lambda: fit_tree(Z, Y, 0), ValueError, "num_classes must be an int of at least 1, got 0"),
        (lambda: fit_tree(Z, Y, 3, reg=0.0), ValueError, "reg must be positive and finite, got 0.0"),
        (lambda: fit_tree(Z, Y, 3, reg=math.nan), ValueError, "reg must be positive and finite, got nan"),
        (lambda: fit_tree(Z, Y, 3, max_rounds=-1), ValueError, "max_rounds must be an int of at least 0, got -1"),
        (lambda: fit_tree(Z, Y, 3, threads=0), ValueError, "threads must be an int of at least 1, got 0"),
        (lambda: cross_validate_reg(Z, Y, 3, folds=1), ValueError, r"folds must be in \[2, 6\], .*, got 1"),
        (lambda: cross_validate_reg(Z, Y, 3, regs=()), ValueError, "regs must not be empty"),
        (lambda: describe_fit(fit_tree(Z, Y, 3), Z), ValueError, "must be given together"),
        (lambda: fit_tree(Z, Y, 3).mean_log_prob(Z[:, :2], Y), ValueError, r"z must be \[N, 3\], got \[6, 2\]"),
        (lambda: fit_pca(Z, 2, passes=0), ValueError, "fit_pca: passes must be at least 1, got 0"),
        (lambda: fit_pca(Z, 4), ValueError, r"fit_pca: dim must be in \[1, 3\], the columns of x, got 4"),
        (lambda: fit_pca(Z, 0), ValueError, "got 0"),
        (lambda: fit_pca(Z[:0], 1), ValueError, r"x must have at least 1 row, got \[0, 3\]"),
        (lambda: fit_pca(Z[0], 1), ValueError, r"x must be \[N, K\], got \[3\]"),
        (lambda: fit_pca(Z, 1, chunk_size=0), ValueError, "chunk_size must be at least 1, got 0"),
        (lambda: fit_pca(Z.tolist(), 1), TypeError, "x must be a dense tensor, .*, got list"),
        (lambda: fit_pca(Z.to_sparse_coo(), 1), TypeError, "got Tensor of layout torch.sparse_coo"),
        (lambda: fit_pca(Z.to(torch.complex64), 1), TypeError, "x must hold real numbers, got torch.complex64"),
        (lambda: project(Z, torch.zeros(2), torch.zeros(3, 1)), ValueError, r"got \[2\] and \[3, 1\]"),
    ],
)
def test_bad_input(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_features_that_are_not_finite(value):
    z = Z.clone()
    z[4, 1] = value
    with pytest.raises(ValueError, match=r"fit_tree: z must be finite, got -?(nan|inf).* in row 4"):
        fit_tree(z, Y, 3)
    with pytest.raises(ValueError, match=r"fit_pca: x must be finite, got -?(nan|inf) in row 4"):
        fit_pca(z, 2, chunk_size=3)
    with pytest.raises(ValueError, match=r"fit_pca: x must be finite, got -?(nan|inf) in row 4"):
        fit_pca(sparse.csr_matrix(z.numpy()), 2, chunk_size=3)


def test_nothing_is_written_before_a_native_error():
    weights, bias, leaf_class = np.ones((4, 3), np.float32), np.ones(4, np.float32), np.ones(4, np.int64)
    for z, y in ((Z * math.nan, Y), (Z, Y + 5)):
        with pytest.raises(ValueError, match="fit_tree: "):
            _native.fit_tree(
                z.numpy(), y.numpy(), 3, 0.1, 15, True, weights, bias, leaf_class, np.empty(0), None, False
            )
        assert bool((weights == 1).all() and (bias == 1).all() and (leaf_class == 1).all())
