"""Shared draws of the tree against their specification on every backend: distribution, bits, rows without a distribution, errors."""

# ruff: noqa: E501  (tables of messages)

from __future__ import annotations

import math

import pytest
import torch

from samplex_cuda import _native
from samplex_cuda._checks import op_error
from samplex_cuda.ops.tree_shared import tree_log_prob_shared, tree_sample_shared
from samplex_cuda.reference import tree_shared as reference
from samplex_cuda.samplers import Tree

INF = math.inf
BATCHES = (1, 3, 64, 65, 130)  # rows are added up in 64 lanes


def make_tree(
    classes: int, dim: int, device="cpu", *, dtype=torch.float32, seed: int = 0, spread: float = 1.0, unseen=()
) -> Tree:
    """A random tree with padding somewhere in the middle; an infinite bias keeps draws from it and from `unseen`."""
    g = torch.Generator().manual_seed(seed)
    leaves = 1 << (classes - 1).bit_length()
    weights = torch.randn(leaves, dim, generator=g) * spread * dim**-0.5
    bias = torch.randn(leaves, generator=g) * 0.5
    leaf_class = torch.full((leaves,), -1)
    leaf_class[torch.randperm(leaves, generator=g)[:classes].sort().values] = torch.randperm(classes, generator=g)
    possible = torch.zeros(2 * leaves, dtype=torch.bool)
    possible[leaves:] = (leaf_class >= 0) & ~torch.isin(leaf_class, torch.tensor(unseen, dtype=torch.int64))
    for node in range(leaves - 1, 0, -1):
        left, right = bool(possible[2 * node]), bool(possible[2 * node + 1])
        possible[node] = left or right
        if left != right:
            weights[node], bias[node] = 0.0, INF if right else -INF
    return Tree(weights, bias, leaf_class, dtype=dtype).to(device)


def small_tree(bias: list[float], device="cpu") -> Tree:
    """Class i at leaf i, and logits that are the bias whatever the row."""
    return Tree(torch.zeros(len(bias), 1), torch.tensor(bias), torch.arange(len(bias))).to(device)


def tables(tree: Tree) -> tuple[torch.Tensor, ...]:
    return tree.nodes, tree.leaf_class, tree.class_leaf


def sample(tree: Tree, x: torch.Tensor, m: int, key=(11, 2**40), stratified: bool = False):
    """ids and log_q, on the CPU; x goes to where the tree is."""
    at = tree.nodes.device
    drawn = tree_sample_shared(torch.tensor(key, device=at), x.to(at), *tables(tree), m, stratified)
    return tuple(t.cpu() for t in drawn)


def log_prob(tree: Tree, x: torch.Tensor, ids: torch.Tensor | None = None) -> torch.Tensor:
    """Of all classes where no ids are given."""
    at = tree.nodes.device
    ids = torch.arange(tree.num_classes) if ids is None else ids
    return tree_log_prob_shared(x.to(at), ids.to(at), *tables(tree)).cpu()


def stored(tree: Tree) -> tuple[torch.Tensor, ...]:
    """The numbers the tree really has: weights, bias, leaf_class."""
    return tuple(t.cpu() for t in (*tree.parameters_of_nodes(), tree.leaf_class))


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """The same bits; nan is nan."""
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


def check_draws(tree: Tree, x: torch.Tensor, m: int, key=(11, 2**40), stratified: bool = False) -> int:
    """Against the reference with the same random numbers; returns how many draws that is sure of."""
    ids, log_q = sample(tree, x, m, key, stratified)
    want = (reference.sample_strata if stratified else reference.sample_shared)(*key, x, *stored(tree), m)
    sure = want >= 0
    assert torch.equal(ids[sure], want[sure])
    assert torch.equal(log_q, log_prob(tree, x, ids))  # the very bits
    return int(sure.sum())


def check_law(tree: Tree, x: torch.Tensor, most: int | None = None) -> None:
    """Of every class, or of the first `most` where the backend is slow."""
    ids = torch.arange(tree.num_classes)[:most]
    got = log_prob(tree, x, ids).double()
    want = reference.log_prob_shared(x, *stored(tree))
    torch.testing.assert_close(got, want[ids], rtol=3e-6, atol=3e-6)
    if len(ids) == tree.num_classes:
        assert abs(float(got.exp().sum()) - 1) < 1e-6


# ------------------------------------------------------------------------------------------------ the distribution
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [1, 5, 16, 17, 40])
@pytest.mark.parametrize("classes", [1, 2, 3, 37, 64])
def test_draws_follow_the_reference(backend, classes, dim, dtype):
    tree = make_tree(classes, dim, backend.device, dtype=dtype, seed=classes + dim, spread=3.0)
    m = 5 if backend.emulated else 20
    for stratified in (False, True):
        sure = sum(check_draws(tree, torch.randn(batch, dim), m, stratified=stratified) for batch in BATCHES)
        assert sure >= 0.95 * m * len(BATCHES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [1, 5, 16, 17, 40])
@pytest.mark.parametrize("classes", [1, 2, 3, 37, 64])
def test_log_prob_is_that_of_the_mean_law(backend, classes, dim, dtype):
    tree = make_tree(classes, dim, backend.device, dtype=dtype, seed=classes + dim, spread=3.0)
    for batch in BATCHES:
        check_law(tree, torch.randn(batch, dim), 10 if backend.emulated and batch != 3 else None)


def test_one_row_has_its_own_law(backend):
    tree, x = make_tree(37, 6, backend.device, spread=3.0), torch.randn(1, 6)
    want = tree.log_prob_all(x.to(backend.device))[0].cpu()
    torch.testing.assert_close(log_prob(tree, x), want, rtol=2e-6, atol=2e-6)


def test_rows_that_differ_are_a_mixture_and_not_their_mean(backend):
    """One row always left, one always right: both children alike, and below them each row's own distribution."""
    weights = torch.tensor([[0.0, 0.0], [100.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    tree = Tree(weights, torch.zeros(4), torch.arange(4)).to(backend.device)
    x = torch.tensor([[-1.0, 3.0], [1.0, -1.0]])  # the first row goes left, then right with sigmoid(3)
    want = [math.log(0.5 / (1 + math.exp(z))) for z in (3.0, -3.0, -1.0, 1.0)]
    torch.testing.assert_close(log_prob(tree, x).double(), torch.tensor(want).double(), rtol=1e-6, atol=1e-6)


def test_draws_are_those_of_row_0_of_the_tree(backend):
    """The random numbers are those of tree_sample for row 0: one row gives the same classes."""
    tree, x = make_tree(64, 6, backend.device), torch.randn(1, 6)
    pair = torch.tensor([3, 4], device=backend.device)
    ids, _ = torch.ops.samplex.tree_sample(pair, x.to(backend.device), *tables(tree), 50, None, None)
    assert torch.equal(sample(tree, x, 50, (3, 4))[0], ids[0].cpu())


# ------------------------------------------------------------------------------------------------ bits
def everything(tree: Tree, x: torch.Tensor, m: int) -> list[torch.Tensor]:
    return [*sample(tree, x, m), *sample(tree, x, m, stratified=True), log_prob(tree, x)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [3, 16, 20, 33])
def test_same_bits_on_every_simd_level_and_thread_count(simd_level, dim, dtype):
    tree = make_tree(300, dim, dtype=dtype, spread=2.0, unseen=(7, 250))
    before = torch.get_num_threads(), _native.cpu_backend()
    _native.set_cpu_backend("cpu")
    try:
        for batch in (0, 1, 63, 64, 65, 200):
            x = torch.randn(batch, dim)
            x[5:9] = torch.nan
            _native.set_simd_level("scalar")
            torch.set_num_threads(1)
            want = everything(tree, x, 333)
            _native.set_simd_level(simd_level)
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                assert all(map(same, everything(tree, x, 333), want))
    finally:
        torch.set_num_threads(before[0])
        _native.set_cpu_backend(before[1])


def check_backend(backend, tree: Tree, x: torch.Tensor, m: int) -> None:
    """The bits of the CPU kernels."""
    got = everything(tree.to(backend.device), x, m)
    if backend.device.type == "cpu":
        _native.set_cpu_backend("cpu")
    assert all(map(same, got, everything(tree.to("cpu"), x, m)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [3, 16, 20, 33])
@pytest.mark.parametrize("batch", [0, 1, 64, 131])
def test_same_bits_on_every_backend(backend, batch, dim, dtype):
    x = torch.randn(batch, dim)
    x[7:9] = INF
    check_backend(backend, make_tree(50, dim, dtype=dtype, spread=2.0, unseen=(7, 30)), x, 20)


def turning_point(tree: Tree, x: torch.Tensor, key: tuple[int, int]) -> list[float]:
    """Where draw 0 turns from class 2 to class 3 at node 3: a shift of all rows, then of rows of ever less mass there.

    The last of them moves the threshold by less than the last bit of the sum over the rows. No log q shows that bit.
    """
    x, found = x.clone(), []
    for rows in (slice(None), slice(70, 71), slice(3, 4)):
        start, low, high = x[rows, 1].clone(), -8.0, 8.0
        for _ in range(26):
            middle = (low + high) / 2
            x[rows, 1] = start + middle
            id_ = int(sample(tree, x, 1, key)[0])
            assert id_ >= 2
            low, high = (low, middle) if id_ == 3 else (middle, high)
        assert low > -8.0  # it did turn
        assert high < 8.0
        found.append(low)
    return found


@pytest.mark.parametrize("batch", [130, 200, 2100])
def test_the_rows_are_added_up_in_the_same_order(backend, batch):
    weights = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 0.0], [0.0, 1.0]])
    tree, x = Tree(weights, torch.zeros(4), torch.arange(4)), torch.randn(batch, 2) + torch.tensor([1.0, 0.0])
    x[70, 0], x[3, 0] = -8.0, -22.0  # e^-8 and e^-22 of them come to node 3
    x[[70, 3], 1] = 0.0
    keys = [(1, offset) for offset in range(12) if int(sample(tree, x, 1, (1, offset))[0]) >= 2][:4]
    tree = tree.to(backend.device)
    got = [turning_point(tree, x, key) for key in keys]
    if backend.device.type == "cpu":
        _native.set_cpu_backend("cpu")
    tree = tree.to("cpu")
    assert got == [turning_point(tree, x, key) for key in keys]


@pytest.mark.parametrize("batch", [2048, 2049, 2200, 5000])
def test_more_rows_than_shared_memory_holds(backend, batch):
    """Above 2048 rows the GPU keeps their masses in global memory, and 256 threads share a draw."""
    tree, x = make_tree(5, 4, spread=2.0), torch.randn(batch, 4)
    x[[0, 70, batch - 1]] = torch.nan
    check_law(tree.to(backend.device), x)
    check_backend(backend, tree, x, 4)


def test_more_draws_than_blocks(backend):
    """Above 1024 draws a block of the GPU has several, one after another; of many rows, above 320."""
    check_backend(backend, make_tree(4, 2), torch.randn(3, 2), 1500)
    check_backend(backend, make_tree(2, 1), torch.randn(2049, 1), 330)


def test_a_prefix_of_more_draws(backend):
    """A draw depends on its number only, not on how many there are."""
    tree, x = make_tree(50, 4, backend.device), torch.randn(6, 4)
    many, few = sample(tree, x, 130), sample(tree, x, 7)
    assert torch.equal(many[0][:7], few[0])
    assert torch.equal(many[1][:7], few[1])
    assert not torch.equal(sample(tree, x, 130, (11, 0))[0], many[0])
    assert not torch.equal(sample(tree, x, 130, (12, 2**40))[0], many[0])


# ------------------------------------------------------------------------------------------------ strata
def check_strata(tree: Tree, x: torch.Tensor, ids: torch.Tensor) -> None:
    """In the order of the leaves, and each class as often as m q says, except for the two strata at its ends."""
    leaves = tree.class_leaf.cpu()[ids]
    assert bool((leaves[1:] >= leaves[:-1]).all())
    expected = log_prob(tree, x).double().exp() * len(ids)
    # 1e-3: log_q is float32. A copy on either side that is there or not is less than 2 away.
    assert bool(((ids.bincount(minlength=tree.num_classes) - expected).abs() < 2 + 1e-3).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("classes", "m"), [(1, 3), (2, 1), (37, 20), (37, 400), (64, 130)])
def test_strata_hold_every_class_to_its_share(backend, classes, m, dtype):
    tree = make_tree(
        classes, 5, backend.device, dtype=dtype, seed=classes, spread=2.0, unseen=(3,) if classes > 3 else ()
    )
    for batch in (1, 7) if backend.emulated else (1, 7, 70):
        x = torch.randn(batch, 5)
        ids, log_q = sample(tree, x, m, stratified=True)
        check_strata(tree, x, ids)
        assert torch.equal(log_q, log_prob(tree, x, ids))
        assert log_q.isfinite().all()


def test_strata_of_many_draws():
    """As many draws as a step may have at C above 2^16: places stay in order, and no class loses its share."""
    tree, x, before = make_tree(70_000, 3, seed=1), torch.randn(6, 3), _native.cpu_backend()
    _native.set_cpu_backend("cpu")  # an emulator would take an hour
    try:
        ids, log_q = sample(tree, x, 300_000, stratified=True)
        check_strata(tree, x, ids)
    finally:
        _native.set_cpu_backend(before)
    assert log_q.isfinite().all()


def test_strata_change_with_the_key_and_repeat_with_it():
    tree, x = make_tree(500, 4), torch.randn(6, 4)
    one, again, other = (sample(tree, x, 64, (seed, 5), True)[0] for seed in (1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


@pytest.mark.parametrize("bias", [200.0, -200.0, INF, -INF])
def test_strata_never_meet_probability_zero(backend, bias):
    """The other side has probability 0 exactly: no rounding of an interval's end may send a draw there."""
    tree = small_tree([0.0, bias, 0.3, 0.1, bias, -bias, 1.0, 0.2], backend.device)
    for m in (1, 7, 100):
        ids, log_q = sample(tree, torch.zeros(3, 1), m, stratified=True)
        assert log_q.isfinite().all()
        check_strata(tree, torch.zeros(3, 1), ids)


# ------------------------------------------------------------------------------------------------ rows without a
# distribution
@pytest.mark.parametrize("value", [math.nan, INF, -INF])
def test_rows_with_a_nan_or_inf_are_left_out(backend, value):
    tree, x = make_tree(13, 17, backend.device, spread=2.0), torch.randn(70, 17)
    bad = [0, 2, 63, 64, 69]
    x[bad, torch.tensor([0, 4, 15, 16, 1])] = value
    check_law(tree, x)
    assert check_draws(tree, x, 10) >= 9
    clean = everything(tree, x, 10)
    # Nothing of such a row matters, and a bad row counts for nothing: behind the others it is as if it were not there.
    other = x.clone()
    other[bad] = math.nan
    assert all(map(same, everything(tree, other, 10), clean))
    more = torch.cat([x, torch.randn(3, 17).fill_diagonal_(value)])
    assert all(map(same, everything(tree, more, 10), clean))


@pytest.mark.parametrize("unseen", [(), (0, 1, 2, 3, 9)])
@pytest.mark.parametrize("batch", [0, 1, 66])
def test_without_a_row_that_has_a_law_log_q_is_nan(backend, batch, unseen):
    tree, x = make_tree(11, 3, backend.device, unseen=unseen), torch.full((batch, 3), math.nan)
    for stratified in (False, True):
        ids, log_q = sample(tree, x, 30, stratified=stratified)
        assert ids.dtype == torch.int64
        assert ((ids >= 0) & (ids < 11)).all()
        assert log_q.shape == (30,)
        assert log_q.isnan().all()
    assert log_prob(tree, x).isnan().all()


@pytest.mark.parametrize("batch", [0, 4])
def test_no_draws(backend, batch):
    tree, x = make_tree(10, 4, backend.device), torch.randn(batch, 4)
    ids, log_q = sample(tree, x, 0)
    assert ids.shape == log_q.shape == (0,)
    assert ids.dtype == torch.int64
    assert log_q.dtype == torch.float32
    assert log_prob(tree, x, torch.empty(0, dtype=torch.int64)).shape == (0,)


def test_one_class_is_certain(backend):
    tree = make_tree(1, 2, backend.device)
    for x in (torch.randn(3, 2), torch.full((3, 2), math.nan), torch.empty(0, 2)):
        ids, log_q = sample(tree, x, 5)
        assert ids.tolist() == [0] * 5
        assert log_q.tolist() == [0.0] * 5


# ------------------------------------------------------------------------------------------------ probability 0
@pytest.mark.parametrize("classes", [5, 33, 37])
def test_padding_is_never_drawn(backend, classes):
    tree, x = make_tree(classes, 3, backend.device, seed=classes), torch.randn(4, 3)
    ids, log_q = sample(tree, x, 300)
    assert ((ids >= 0) & (ids < classes)).all()
    assert log_q.isfinite().all()
    assert log_prob(tree, x).isfinite().all()


@pytest.mark.parametrize("unseen", [(5,), (0, 1, 2, 3, 30), tuple(range(1, 37)), tuple(range(20))])
def test_unseen_classes_are_never_drawn(backend, unseen):
    tree, x = make_tree(37, 3, backend.device, seed=2, unseen=unseen), torch.randn(5, 3)
    ids, log_q = sample(tree, x, 300)
    assert not torch.isin(ids, torch.tensor(unseen)).any()
    assert log_q.isfinite().all()
    got = log_prob(tree, x)
    assert (got.isneginf().nonzero().flatten() == torch.tensor(unseen)).all()
    check_law(tree, x)


def test_whole_subtrees_without_probability(backend):
    """Below an impossible child every mass is 0: still -inf, not 0 / 0. The impossible part has distributions of its own."""
    x = torch.zeros(3, 1)
    got = log_prob(small_tree([0.0, INF, 0.3, 0.1, 0.5, INF, -INF, 2.0], backend.device), x)
    assert got[:4].isneginf().all()
    want = reference.log_prob_shared(x, *stored(small_tree([0.0, INF, 0.3, 0.1, 0.5, INF, -INF, 2.0])))
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("sign", [1, -1])
def test_large_logits(backend, sign):
    """exp(-|z|) is 0 from 87 on: such a child has probability 0 in the shared distribution, and so has all below it."""
    tree = small_tree([0.0, sign * 200.0, 0.3, 0.1], backend.device)
    got = log_prob(tree, torch.zeros(2, 1))
    dead, alive = ([0, 1], [2, 3]) if sign > 0 else ([2, 3], [0, 1])
    assert got[dead].isneginf().all()
    assert abs(float(got[alive].double().exp().sum()) - 1) < 1e-6
    ids, log_q = sample(tree, torch.zeros(2, 1), 100)
    assert set(ids.tolist()) == set(alive)
    assert log_q.isfinite().all()


def test_a_rare_child_has_the_digits_of_its_likeliest_row(backend):
    tree = Tree(torch.tensor([[0.0], [1.0]]), torch.zeros(2), torch.arange(2)).to(backend.device)
    for rows in ([-200.0, -80.0], [-80.0, -300.0, -1000.0], [80.0, 5.0, -100.0], [-3e38, 3e38]):
        x = torch.tensor(rows)[:, None]
        want = reference.log_prob_shared(x, *stored(tree))
        torch.testing.assert_close(log_prob(tree, x).double(), want, rtol=3e-6, atol=3e-6)


def test_long_ways_of_rare_children(backend):
    """The product is a double: e^-600 has a logarithm; from 1e-290 on there is none."""
    x = torch.zeros(2, 1)
    got = log_prob(small_tree([60.0] * 1024, backend.device), x, torch.tensor([0, 1, 1023]))
    torch.testing.assert_close(got, torch.tensor([-600.0, -540.0, 0.0]), rtol=1e-6, atol=1e-6)
    got = log_prob(small_tree([80.0] * 1024, backend.device), x, torch.tensor([0, 1, 3, 7, 1023]))
    assert got[:2].isneginf().all()
    torch.testing.assert_close(got[2:], torch.tensor([-640.0, -560.0, 0.0]), rtol=1e-6, atol=1e-6)


# ------------------------------------------------------------------------------------------------ torch
def test_opcheck(backend):
    tree, x = make_tree(11, 5, backend.device), torch.randn(3, 5, device=backend.device)
    key, ids = (torch.tensor(t, device=backend.device) for t in ([1, 2], [0, 10, 3, 3]))
    for stratified in (False, True):
        torch.library.opcheck(torch.ops.samplex.tree_sample_shared.default, (key, x, *tables(tree), 6, stratified))
    torch.library.opcheck(torch.ops.samplex.tree_log_prob_shared.default, (x, ids, *tables(tree)))


TREE = {
    "features": (lambda a: a | {"x": torch.zeros(3, 9)}, "nodes must be [2^depth, 16] for x [B, 9], got [16, 8] float32 on cpu"),
    "flat": (lambda a: a | {"x": torch.zeros(4)}, "x must be [B, k] float32, got [4] float32"),
    "no features": (lambda a: a | {"x": torch.zeros(3, 0)}, "x must be [B, k] with k in [1, "),
    "x type": (lambda a: a | {"x": torch.zeros(3, 4).double()}, "x must be [B, k] = [*, 4] float32 contiguous on cpu, got [3, 4] float64"),
    "nodes": (lambda a: a | {"nodes": torch.zeros(12, 8)}, "nodes must have 2^depth rows, got [12, 8] float32 on cpu"),
    "nodes type": (lambda a: a | {"nodes": torch.zeros(16, 8).double()}, "nodes must be float32 or bfloat16, got [16, 8] float64"),
    "leaf_class": (lambda a: a | {"leaf_class": torch.zeros(3, dtype=torch.int64)}, "leaf_class must be [2^depth] = [16] int64"),
    "leaf_class type": (lambda a: a | {"leaf_class": torch.zeros(16)}, "leaf_class must be [2^depth] = [16] int64 contiguous on cpu, got [16] float32"),
    "class_leaf": (lambda a: a | {"class_leaf": torch.zeros(17, dtype=torch.int64)}, "class_leaf must be [C] with C in [1, 16], got [17] int64"),
}  # fmt: skip

SAMPLE = TREE | {
    "key": (lambda a: a | {"key": torch.tensor([1, 2, 3])}, "key must be [2] = [2] int64 contiguous on cpu, got [3] int64"),
    "key type": (lambda a: a | {"key": torch.zeros(2)}, "key must be [2] = [2] int64 contiguous on cpu, got [2] float32"),
    "fewer": (lambda a: a | {"num_samples": -1}, "num_samples must be in [0, 2^24], got -1"),
    "more": (lambda a: a | {"num_samples": 2**24 + 1}, "num_samples must be in [0, 2^24], got 16777217"),
}  # fmt: skip

LOG_PROB = TREE | {
    "ids": (lambda a: a | {"ids": torch.zeros(3, 1, dtype=torch.int64)}, "ids must be [n] = [*] int64 contiguous on cpu, got [3, 1] int64"),
    "ids type": (lambda a: a | {"ids": torch.zeros(3)}, "ids must be [n] = [*] int64 contiguous on cpu, got [3] float32"),
    "ids range": (lambda a: a | {"ids": torch.tensor([0, 10, 1])}, "ids must be in [0, 10), got 10"),
    "negative": (lambda a: a | {"ids": torch.tensor([0, 2, -1])}, "ids must be in [0, 10), got -1"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("op", "name"), [("tree_sample_shared", n) for n in SAMPLE] + [("tree_log_prob_shared", n) for n in LOG_PROB]
)
def test_bad_input(op, name):
    tree, x = make_tree(10, 4), torch.zeros(3, 4)
    named = dict(zip(("nodes", "leaf_class", "class_leaf"), tables(tree), strict=True))
    if op == "tree_sample_shared":
        change, text = SAMPLE[name]
        args = {"key": torch.tensor([0, 0]), "x": x, **named, "num_samples": 2}
    else:
        change, text = LOG_PROB[name]
        args = {"x": x, "ids": torch.tensor([0, 9, 1]), **named}
    with pytest.raises(RuntimeError) as caught:
        getattr(torch.ops.samplex, op)(*change(args).values())
    assert str(op_error(caught.value)).startswith(f"{op}: ")
    assert text in str(caught.value)
