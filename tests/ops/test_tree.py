"""The decision tree against its specification on every backend: distribution, bits, exclusion, padding, beam search, errors."""

# ruff: noqa: E501  (tables of messages)

from __future__ import annotations

import math

import pytest
import torch

import samplex_cuda as sx
from samplex_cuda import _native
from samplex_cuda._checks import op_error
from samplex_cuda.ops import tree as ops
from samplex_cuda.reference import tree as reference
from samplex_cuda.samplers import Tree

INF = math.inf


def make_parameters(classes: int, dim: int, *, seed: int = 0, spread: float = 1.0):
    """Random weights, bias and leaf_class of a tree with its padding somewhere in the middle."""
    g = torch.Generator().manual_seed(seed)
    depth = (classes - 1).bit_length()
    leaves = 1 << depth
    weights = torch.randn(leaves, dim, generator=g) * spread * dim**-0.5
    bias = torch.randn(leaves, generator=g) * 0.5
    leaf_class = torch.full((leaves,), -1)
    places = torch.randperm(leaves, generator=g)[:classes].sort().values
    leaf_class[places] = torch.randperm(classes, generator=g)
    inhabited = torch.zeros(2 * leaves, dtype=torch.bool)
    inhabited[leaves:] = leaf_class >= 0
    for node in range(leaves - 1, 0, -1):
        left, right = bool(inhabited[2 * node]), bool(inhabited[2 * node + 1])
        inhabited[node] = left or right
        if not (left and right):
            weights[node] = 0.0
            bias[node] = INF if right else -INF if left else 0.0
    return weights, bias, leaf_class


def make_tree(classes: int, dim: int, device="cpu", *, dtype=torch.float32, **options) -> Tree:
    return Tree(*make_parameters(classes, dim, **options), dtype=dtype).to(device)


def truth(tree: Tree, x: torch.Tensor) -> torch.Tensor:
    """log p of every class in float64, for the numbers the tree really stores."""
    weights, bias = tree.parameters_of_nodes()
    return reference.log_prob_all(x.cpu(), weights.cpu(), bias.cpu(), tree.leaf_class.cpu())


# ------------------------------------------------------------------------------------------------ the distribution
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [1, 5, 15, 16, 17, 32, 40])
@pytest.mark.parametrize("classes", [1, 2, 3, 37, 64])
def test_log_prob_is_the_law(backend, classes, dim, dtype):
    tree = make_tree(classes, dim, backend.device, dtype=dtype, seed=classes + dim, spread=3.0)
    x = torch.randn(4, dim)
    want = truth(tree, x)
    got = tree.log_prob_all(x.to(backend.device)).cpu()
    torch.testing.assert_close(got.double(), want, rtol=2e-6, atol=2e-6)
    assert torch.allclose(got.double().exp().sum(1), torch.ones(4, dtype=torch.float64), atol=1e-6)
    every = torch.arange(classes, device=backend.device).expand(4, -1)
    assert torch.equal(tree.log_prob(x.to(backend.device), every).cpu(), got)


def test_large_logits_keep_their_digits(backend):
    """log-sigmoid, never log(1 - sigmoid): p = e^-80 has a logarithm of -80, and the other child one of -e^-80."""
    weights, bias, leaf_class = torch.zeros(2, 1), torch.tensor([0.0, 80.0]), torch.tensor([0, 1])
    tree = Tree(weights, bias, leaf_class).to(backend.device)
    got = tree.log_prob_all(torch.zeros(1, 1, device=backend.device)).cpu()
    assert got[0, 0] == -80.0
    assert got[0, 1] == 0.0
    # Above 87 the rare child is never drawn, but its log-probability is still right.
    tree = Tree(weights, torch.tensor([0.0, 200.0]), leaf_class).to(backend.device)
    assert tree.log_prob_all(torch.zeros(1, 1, device=backend.device)).cpu().tolist() == [[-200.0, 0.0]]


@pytest.mark.parametrize("classes", [1, 2, 37, 64])
def test_draws_follow_the_reference(backend, classes):
    tree = make_tree(classes, 6, backend.device, seed=classes)
    x = torch.randn(3, 6)
    weights, bias = (t.cpu() for t in tree.parameters_of_nodes())
    draw = tree.sample(x.to(backend.device), 40, key=sx.Key(11, 2**40))
    want = reference.sample(11, 2**40, x, weights, bias, tree.leaf_class.cpu(), 40)
    sure = want >= 0
    assert sure.float().mean() > 0.99
    assert torch.equal(draw.ids.cpu()[sure], want[sure])
    log_p = tree.log_prob_all(x.to(backend.device))
    assert torch.equal(draw.log_q, log_p.gather(1, draw.ids))  # the very bits


@pytest.mark.parametrize("width", [1, 3, 12])
def test_excluding_is_exact(backend, width):
    tree = make_tree(37, 6, backend.device, seed=3, spread=3.0)
    x = torch.randn(5, 6)
    exclude = torch.randint(-1, 37, (5, width), generator=torch.Generator().manual_seed(width))
    rows = [[i for i in row if i >= 0] for row in exclude.tolist()]
    weights, bias = (t.cpu() for t in tree.parameters_of_nodes())
    want = reference.conditional_log_prob(truth(tree, x), rows)
    every = torch.arange(37, device=backend.device).expand(5, -1)
    got = tree.log_prob(x.to(backend.device), every, exclude=exclude.to(backend.device)).cpu()
    torch.testing.assert_close(got.double(), want, rtol=3e-6, atol=3e-6)
    draw = tree.sample(x.to(backend.device), 50, key=sx.Key(5), exclude=exclude.to(backend.device))
    assert torch.equal(draw.log_q.cpu(), got.gather(1, draw.ids.cpu()))
    expected = reference.sample(5, 0, x, weights, bias, tree.leaf_class.cpu(), 50, rows)
    sure = expected >= 0
    assert sure.float().mean() > 0.99
    assert torch.equal(draw.ids.cpu()[sure], expected[sure])
    # The same rows as CSR.
    offsets = torch.tensor([0, *torch.tensor([len(r) for r in rows]).cumsum(0).tolist()])
    csr = offsets.to(backend.device), torch.tensor([i for r in rows for i in r], dtype=torch.int64).to(backend.device)
    again = tree.sample(x.to(backend.device), 50, key=sx.Key(5), exclude=csr)
    assert torch.equal(again.ids, draw.ids)
    assert torch.equal(again.log_q, draw.log_q)


def test_a_nearly_certain_target_leaves_the_rest_its_digits(backend):
    """p(y) = 1 - 4e-31: 1 - p would be 0 in any float, the sum over siblings is not."""
    weights, leaf_class = torch.zeros(4, 1), torch.tensor([0, 1, 2, 3])
    tree = Tree(weights, torch.tensor([0.0, -70.0, -70.0, 1.0]), leaf_class).to(backend.device)
    x = torch.zeros(1, 1, device=backend.device)
    want = reference.conditional_log_prob(truth(tree, x), [[0]])
    got = tree.log_prob(
        x,
        torch.arange(4, device=backend.device).unsqueeze(0),
        exclude=torch.zeros(1, 1, dtype=torch.int64, device=backend.device),
    )
    torch.testing.assert_close(got.cpu().double(), want, rtol=1e-6, atol=1e-6)
    draw = tree.sample(x, 400, key=sx.Key(0), exclude=torch.tensor([0], device=backend.device))
    assert set(draw.ids.flatten().tolist()) == {1, 2, 3}


@pytest.mark.parametrize("classes", [1, 3])
def test_nothing_left_is_the_first_excluded_class(backend, classes):
    tree = make_tree(classes, 2, backend.device)
    every = torch.arange(classes, device=backend.device).expand(2, -1)
    draw = tree.sample(torch.randn(2, 2, device=backend.device), 3, exclude=every)
    assert torch.equal(draw.log_q.cpu(), torch.zeros(2, 3))
    assert (draw.ids == draw.ids[0, 0]).all()


# ------------------------------------------------------------------------------------------------ bits
def everything(tree: Tree, x: torch.Tensor) -> list[torch.Tensor]:
    one = torch.arange(x.shape[0], device=x.device) % 30
    three = torch.randint(0, 30, (x.shape[0], 3)).to(x.device)  # a device has random numbers of its own
    return [
        *tree.sample(x, 70, key=sx.Key(1, 2))[:2],
        *tree.sample(x, 70, key=sx.Key(1, 2), exclude=one)[:2],
        *tree.sample(x, 3, key=sx.Key(1, 2), exclude=three)[:2],
        tree.log_prob(x, one),
        tree.log_prob_all(x),
        *tree.topk(x, 4, beam=8),
        *tree.topk(x, 40, beam=50),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [3, 16, 20])
def test_same_bits_on_every_simd_level_and_thread_count(simd_level, dim, dtype):
    tree, x = make_tree(100, dim, dtype=dtype), torch.randn(33, dim)
    torch.manual_seed(5)
    got = everything(tree, x)
    before = torch.get_num_threads()
    try:
        _native.set_simd_level("scalar")
        torch.set_num_threads(1)
        torch.manual_seed(5)
        want = everything(tree, x)
    finally:
        torch.set_num_threads(before)
        _native.set_simd_level(simd_level)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [3, 16, 20])
def test_same_bits_on_every_backend(backend, dim, dtype):
    tree, x = make_tree(100, dim, dtype=dtype), torch.randn(5, dim)
    torch.manual_seed(5)
    got = everything(tree.to(backend.device), x.to(backend.device))
    if backend.device.type == "cpu":
        _native.set_cpu_backend("cpu")
    torch.manual_seed(5)
    want = everything(tree.to("cpu"), x)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(got, want, strict=True))


def test_a_prefix_of_more_draws_and_a_part_of_the_batch(backend):
    """A draw depends on its row and number only, not on how many there are."""
    tree, x = make_tree(50, 4, backend.device), torch.randn(6, 4, device=backend.device)
    many = tree.sample(x, 130, key=sx.Key(9))
    few = tree.sample(x[:2], 7, key=sx.Key(9))
    assert torch.equal(many.ids[:2, :7], few.ids)
    assert torch.equal(many.log_q[:2, :7], few.log_q)


# ------------------------------------------------------------------------------------------------ beam search
@pytest.mark.parametrize("classes", [1, 2, 37, 64])
def test_topk_is_exact_where_the_beam_covers_the_tree(backend, classes):
    tree = make_tree(classes, 5, backend.device, seed=7, spread=2.0)
    x = torch.randn(6, 5)
    k = min(classes, 9)
    log_p, ids = tree.topk(x.to(backend.device), k, beam=64)
    every = tree.log_prob_all(x.to(backend.device)).cpu()
    want, order = reference.topk(every, k)
    assert torch.equal(ids.cpu(), order)
    assert torch.equal(log_p.cpu(), want)


def test_topk_breaks_ties_by_class(backend):
    leaf_class = torch.tensor([5, 2, 7, 0, 1, 4, 3, 6])
    tree = Tree(torch.zeros(8, 2), torch.zeros(8), leaf_class).to(backend.device)
    _, ids = tree.topk(torch.randn(1, 2, device=backend.device), 8, beam=8)
    assert ids.cpu().tolist() == [list(range(8))]


@pytest.mark.parametrize("beam", [1, 3, 4, 9])
def test_a_narrow_beam_keeps_the_lower_of_nodes_that_tie(backend, beam):
    # The lower the leaf, the higher its class: a beam that kept too many would give other classes.
    tree = Tree(torch.zeros(16, 2), torch.zeros(16), torch.arange(16).flip(0)).to(backend.device)
    log_p, ids = tree.topk(torch.randn(2, 2, device=backend.device), beam, beam=beam)
    assert ids.cpu().tolist() == [list(range(16 - beam, 16))] * 2
    assert torch.equal(log_p.cpu(), torch.full((2, beam), math.log(1 / 16)))


@pytest.mark.parametrize("beam", [7, 64])
def test_the_beam_is_that_of_the_total_order(backend, beam):
    """Level by level the `beam` likeliest nodes: the walk written out, with path probabilities of the op itself."""
    tree, x = make_tree(200, 4, backend.device, seed=2, spread=3.0), torch.randn(3, 4, device=backend.device)
    weights, bias = (t.cpu().double() for t in tree.parameters_of_nodes())
    leaves = weights.shape[0]
    for row, got in zip(x.cpu().double(), tree.topk(x, beam, beam=beam)[1].cpu(), strict=True):
        kept = {1: 0.0}
        while min(kept) < leaves:
            z = {node: float(weights[node] @ row + bias[node]) for node in kept}
            children = {
                2 * n + side: kept[n] - math.log1p(math.exp(z[n] * (1 - 2 * side)))
                for n in kept
                for side in (0, 1)
                if (1 - 2 * side) * z[n] < 700
            }
            kept = dict(sorted(children.items(), key=lambda item: -item[1])[:beam])
        want = sorted(kept, key=lambda node: -kept[node])
        assert got[: len(want)].tolist() == tree.leaf_class.cpu()[torch.tensor(want) - leaves].tolist()


def test_a_narrow_beam_gives_true_probabilities(backend):
    tree, x = make_tree(200, 4, backend.device, spread=3.0), torch.randn(5, 4, device=backend.device)
    log_p, ids = tree.topk(x, 2, beam=2)
    assert torch.equal(log_p, tree.log_prob(x, ids))
    assert (log_p[:, 0] >= log_p[:, 1]).all()


# ------------------------------------------------------------------------------------------------ corners
def test_empty_batch_and_no_draws(backend):
    tree = make_tree(10, 4, backend.device)
    none = torch.empty(0, 4, device=backend.device)
    assert tree.sample(none, 5).ids.shape == (0, 5)
    assert tree.sample(torch.randn(3, 4, device=backend.device), 0).log_q.shape == (3, 0)
    assert tree.log_prob_all(none).shape == (0, 10)
    assert tree.topk(none, 3)[0].shape == (0, 3)
    assert tree.log_prob(none, torch.empty(0, 2, dtype=torch.int64, device=backend.device)).shape == (0, 2)


def test_a_nan_row_is_nan_and_no_other(backend):
    tree, x = make_tree(37, 4, backend.device), torch.randn(3, 4)
    clean = tree.sample(x.to(backend.device), 20, key=sx.Key(1))
    x[1, 2] = math.nan
    draw = tree.sample(
        x.to(backend.device), 20, key=sx.Key(1), exclude=torch.tensor([-1, -1, -1], device=backend.device)
    )
    assert ((draw.ids >= 0) & (draw.ids < 37)).all()
    assert draw.log_q[1].isnan().all()
    for row in (0, 2):
        assert torch.equal(draw.ids[row], clean.ids[row])
        assert torch.equal(draw.log_q[row], clean.log_q[row])
    assert tree.topk(x.to(backend.device), 2)[1][1].tolist() == [-1, -1]


def test_opcheck(backend):
    tree, x = make_tree(11, 5, backend.device), torch.randn(3, 5, device=backend.device)
    tables = tree.nodes, tree.leaf_class, tree.class_leaf
    key, leaves = torch.tensor([1, 2], device=backend.device), torch.tensor([[0], [-1], [3]], device=backend.device)
    ids = torch.randint(0, 11, (3, 4), device=backend.device)
    torch.library.opcheck(torch.ops.samplex.tree_sample.default, (key, x, *tables, 6, leaves, None))
    more = (torch.randn(3, 9, device=backend.device), *(torch.randn(s, device=backend.device) for s in ((9,), (9, 5))))
    torch.library.opcheck(torch.ops.samplex.tree_project.default, more)
    for given in (ids, ids[:, 0].contiguous()):
        torch.library.opcheck(torch.ops.samplex.tree_sample_and_score.default, (key, *more, *tables, 6, given))
    torch.library.opcheck(torch.ops.samplex.tree_log_prob.default, (x, ids, *tables, leaves, None))
    torch.library.opcheck(torch.ops.samplex.tree_log_prob_all.default, (x, *tables))
    torch.library.opcheck(torch.ops.samplex.tree_topk.default, (x, *tables, 3, 4))


# ------------------------------------------------------------------------------------------------ the module
def test_state_dict_round_trip(backend):
    tree = make_tree(100, 6, backend.device, dtype=torch.bfloat16, seed=1)
    other = make_tree(5, 3, backend.device)
    other.load_state_dict(tree.state_dict())
    x = torch.randn(4, 6, device=backend.device)
    a, b = tree.sample(x, 9, key=sx.Key(4)), other.sample(x, 9, key=sx.Key(4))
    assert torch.equal(a.ids, b.ids)
    assert torch.equal(a.log_q, b.log_q)
    assert other.num_classes == 100
    assert "bfloat16" in repr(other)


# ------------------------------------------------------------------------------------------------ projection
@pytest.mark.parametrize(
    ("rows", "features", "dim"), [(1, 1, 1), (4, 8, 3), (9, 33, 16), (5, 64, 17), (3, 100, 40), (0, 5, 2)]
)
def test_projection_is_right_and_has_the_same_bits_everywhere(backend, rows, features, dim):
    x, mean, projection = torch.randn(rows, features), torch.randn(features), torch.randn(features, dim)
    got = ops.tree_project(*(t.to(backend.device) for t in (x, mean, projection))).cpu()
    torch.testing.assert_close(got.double(), reference.project(x, mean, projection), rtol=1e-5, atol=1e-5)
    # In order, 32 features at a time: the specification of the bits.
    centred, want = x - mean, torch.zeros(rows, dim)
    for first in range(0, features, 32):
        part = torch.zeros(rows, dim)
        for i in range(first, min(first + 32, features)):
            part = part + centred[:, i : i + 1] * projection[i]
        want = want + part
    assert torch.equal(got, want)


def test_projection_has_the_same_bits_at_every_level_and_thread_count(simd_level):
    x, mean, projection = torch.randn(301, 70), torch.randn(70), torch.randn(70, 21)
    want = torch.cat([ops.tree_project(row, mean, projection) for row in x.split(1)])
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(ops.tree_project(x, mean, projection), want)
    finally:
        torch.set_num_threads(before)


def test_a_nan_feature_stays_in_its_row(backend):
    x = torch.randn(6, 40)
    x[2, 33] = torch.nan
    got = ops.tree_project(*(t.to(backend.device) for t in (x, torch.zeros(40), torch.randn(40, 3)))).cpu()
    assert got[2].isnan().all()
    assert got[[0, 1, 3, 4, 5]].isfinite().all()


def test_features_are_projected(backend):
    weights, bias, leaf_class = make_parameters(20, 3)
    mean, projection = torch.randn(8), torch.randn(8, 3)
    tree = Tree(weights, bias, leaf_class, mean=mean, projection=projection).to(backend.device)
    x = torch.randn(4, 8, device=backend.device)
    plain = Tree(weights, bias, leaf_class).to(backend.device)
    assert torch.equal(tree.log_prob_all(x), plain.log_prob_all(tree.project(x)))
    assert tree.num_features == 8
    assert tree.sample(x.reshape(2, 2, 8), 3).ids.shape == (4, 3)


@pytest.mark.parametrize("num_samples", [0, 1, 5, 64, 70])
@pytest.mark.parametrize("wanted", [(), (3,)])
def test_one_call_draws_and_scores_as_two_do(backend, num_samples, wanted):
    weights, bias, leaf_class = make_parameters(37, 5)
    mean, projection = torch.randn(9), torch.randn(9, 5)
    tree = Tree(weights, bias, leaf_class, mean=mean, projection=projection).to(backend.device)
    x, ids = torch.randn(7, 9, device=backend.device), torch.randint(37, (7, *wanted), device=backend.device)
    draw, scores = tree.sample_and_score(x, num_samples, ids, key=sx.Key(3))
    alone = tree.sample(x, num_samples, key=sx.Key(3))
    assert torch.equal(draw.ids, alone.ids)
    assert torch.equal(draw.log_q, alone.log_q)
    assert torch.equal(scores, tree.log_prob(x, ids))
    assert scores.shape == ids.shape


def test_casting_a_model_does_not_change_the_law():
    tree = make_tree(20, 3)
    before = {name: value.clone() for name, value in tree.state_dict().items()}
    tree.to(torch.bfloat16)
    for name, value in tree.state_dict().items():
        assert value.dtype == before[name].dtype, name
        assert torch.equal(value, before[name]), name


ERRORS = {
    "other features": (lambda t, x: t.sample(torch.randn(3, 5), 2), ValueError, "h must be [*, 4], the features it was fitted on, got [3, 5] float32"),
    "not floating": (lambda t, x: t.sample(torch.zeros(3, 4, dtype=torch.int64), 2), ValueError, "h must be [*, 4] floating point, got [3, 4] int64"),
    "no h": (lambda t, x: t.sample(None, 2), ValueError, "h must be [*, 4], got None"),
    "shared": (lambda t, x: t.sample(x, 2, shared=True, exclude=torch.arange(3)), ValueError, "exclude must be None with shared=True"),
    "samples": (lambda t, x: t.sample(x, -1), ValueError, "num_samples must be an int in [0, 2^24], got -1"),
    "exclude range": (lambda t, x: t.sample(x, 2, exclude=torch.tensor([1, 2, 10])), IndexError, "exclude must be -1 or in [0, 10), got 10"),
    "exclude rows": (lambda t, x: t.sample(x, 2, exclude=torch.tensor([1])), ValueError, "exclude must be [B] or [B, P] with B = 3"),
    "ids range": (lambda t, x: t.log_prob(x, torch.tensor([0, 1, 99])), IndexError, "ids must be in [0, 10), got 99"),
    "ids shape": (lambda t, x: t.log_prob(x, torch.zeros(2, 2, dtype=torch.int64)), ValueError, "ids must be [B], [B, n] or [n] with B = 3"),
    "ids type": (lambda t, x: t.log_prob(x, torch.zeros(3)), TypeError, "ids must be int64"),
    "k": (lambda t, x: t.topk(x, 11), ValueError, "k must be an int in [1, 10], got 11"),
    "beam": (lambda t, x: t.topk(x, 5, beam=4), ValueError, "beam must be in [k, 512] = [5, 512], got 4"),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_bad_input(name):
    call, kind, text = ERRORS[name]
    with pytest.raises(kind) as caught:
        call(make_tree(10, 4), torch.randn(3, 4))
    assert text in str(caught.value)


PARAMETERS = {
    "rows": (lambda w, b, c: Tree(w[:3], b[:3], c[:3]), "weights must be [2^depth, k] with k >= 1, got [3, 2] float32"),
    "bias": (lambda w, b, c: Tree(w, b[:2], c), "bias must be [4] floating point, got [2] float32"),
    "leaves": (lambda w, b, c: Tree(w, b, c[:2]), "leaf_class must be [4] int64, got [2] int64"),
    "twice": (lambda w, b, c: Tree(w, b, torch.tensor([0, 1, 1, -1])), "leaf_class must hold every class of [0, C) once"),
    "nobody": (lambda w, b, c: Tree(w, b, torch.full((4,), -1)), "leaf_class must hold every class of [0, C) once"),
    "nan": (lambda w, b, c: Tree(w, b * math.nan, c), "weights must be finite and bias not nan"),
    "half a projection": (lambda w, b, c: Tree(w, b, c, mean=torch.zeros(5)), "mean and projection must be given"),
    "projection": (lambda w, b, c: Tree(w, b, c, mean=torch.zeros(5), projection=torch.zeros(5, 3)), "mean must be [K] and projection [K, 2]"),
}  # fmt: skip


@pytest.mark.parametrize("name", PARAMETERS)
def test_bad_parameters(name):
    call, text = PARAMETERS[name]
    with pytest.raises(ValueError) as caught:  # noqa: PT011  the text is compared below
        call(torch.ones(4, 2), torch.ones(4), torch.arange(4))
    assert text in str(caught.value)


RAW = {
    "x": (lambda a: a | {"x": torch.zeros(3, 9)}, "nodes must be [2^depth, 16] for x [B, 9], got [16, 8] float32 on cpu"),
    "nodes": (lambda a: a | {"nodes": torch.zeros(12, 8)}, "nodes must have 2^depth rows, got [12, 8] float32 on cpu"),
    "dtype": (lambda a: a | {"nodes": torch.zeros(16, 8).double()}, "nodes must be float32 or bfloat16, got [16, 8] float64"),
    "leaf_class": (lambda a: a | {"leaf_class": torch.zeros(3, dtype=torch.int64)}, "leaf_class must be [2^depth] = [16] int64"),
    "exclude": (lambda a: a | {"exclude": torch.tensor([[3, 1]] * 3)}, "ascending in each row, got 1 in row 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", RAW)
def test_raw_op_checks(name):
    change, text = RAW[name]
    tree = make_tree(10, 4)
    args = change({
        "key": torch.tensor([0, 0]), "x": torch.zeros(3, 4), "nodes": tree.nodes, "leaf_class": tree.leaf_class,
        "class_leaf": tree.class_leaf, "num_samples": 2, "exclude": None, "exclude_offsets": None,
    })  # fmt: skip
    with pytest.raises(RuntimeError) as caught:
        torch.ops.samplex.tree_sample(*args.values())
    assert str(op_error(caught.value)).startswith("tree_sample: ")
    assert text in str(caught.value)


FUSED = {
    "features": (lambda a: a | {"features": torch.zeros(3, 8)}, "features must be [B, K] = [*, 6] float32 contiguous on cpu, got [3, 8] float32"),
    "flat": (lambda a: a | {"features": torch.zeros(6)}, "features must be [B, K] float32, got [6] float32"),
    "mean": (lambda a: a | {"mean": torch.zeros(5)}, "mean must be [K] = [6] float32 contiguous on cpu, got [5] float32"),
    "projection": (lambda a: a | {"projection": torch.zeros(6, 9)}, "nodes must be [2^depth, 16] for projection [B, 9], got [16, 8]"),
    "rows": (lambda a: a | {"ids": torch.zeros(2, dtype=torch.int64)}, "ids must be [B] or [B, n]"),
    "ids": (lambda a: a | {"ids": torch.tensor([0, 10, 1])}, "ids must be in [0, 10), got 10"),
    "count": (lambda a: a | {"num_samples": -1}, "num_samples must be in [0, 2^24], got -1"),
}  # fmt: skip


@pytest.mark.parametrize("name", FUSED)
def test_raw_checks_of_the_fused_call(name):
    change, text = FUSED[name]
    tree = make_tree(10, 4)
    args = change({
        "key": torch.tensor([0, 0]), "features": torch.zeros(3, 6), "mean": torch.zeros(6),
        "projection": torch.zeros(6, 4), "nodes": tree.nodes, "leaf_class": tree.leaf_class,
        "class_leaf": tree.class_leaf, "num_samples": 2, "ids": torch.tensor([0, 9, 1]),
    })  # fmt: skip
    with pytest.raises(RuntimeError) as caught:
        torch.ops.samplex.tree_sample_and_score(*args.values())
    assert str(op_error(caught.value)).startswith("tree_sample_and_score: ")
    assert text in str(caught.value)


def test_packing():
    for dtype, dim, stride in ((torch.float32, 16, 24), (torch.bfloat16, 16, 32), (torch.float32, 7, 8)):
        nodes = ops.pack_nodes(torch.ones(4, dim), torch.full((4,), INF), dtype)
        assert nodes.shape == (4, stride)
        weights, bias = ops.unpack_nodes(nodes, dim)
        assert (weights == 1).all()
        assert (bias == INF).all()
