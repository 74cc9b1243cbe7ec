"""The kernel tree against its specification on every backend: draws, exclusion, clipping, sums, errors."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from kernel_tree_cases import SHAPES, Case, make
from torch import Tensor

from samplex_cuda import _native
from samplex_cuda.ops import kernel_tree as ops
from samplex_cuda.reference import kernel_tree as reference

KERNELS = ["gaussian", "exponential", "quadratic"]
# Rounding of a float product in any order, as a share of the sum of its terms' sizes (docs/kernel_tree.md).
BAND = 2.0**-20


# ------------------------------------------------------------------------------------------------ the distribution
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("classes", "leaf_size"), SHAPES)
def test_log_prob_is_the_law(backend, classes, leaf_size, kernel):
    for epsilon in (0.0, 0.05):
        case = make(classes, leaf_size, kernel=kernel, epsilon=epsilon)
        got = case.log_prob(backend.device).cpu().double()
        want = reference.conditional(case.log_tree, epsilon)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        assert torch.allclose(got.exp().sum(1), torch.ones(4, dtype=torch.float64), atol=1e-5)


@pytest.mark.parametrize(("dim", "width"), [(8, 16), (24, 32), (32, 48), (64, 208), (136, 512)])
def test_every_width(backend, dim, width):
    case = make(61, 3, dim=dim, width=width, scale=0.3, batch=3)
    torch.testing.assert_close(case.log_prob(backend.device).cpu().double(), case.log_tree, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("kernel", ["gaussian", "quadratic"])
def test_negative_estimates_follow_the_rule(backend, kernel):
    """v+ = max(v, floor); with both children at 0 the number of classes decides. log_q stays finite where drawn."""
    case = make(300, 3, kernel=kernel, mean=0.05, seed=1)
    want = reference.conditional(case.log_tree, 0.0)
    got = case.log_prob(backend.device).cpu().double()
    # A value next to its floor may be clipped on one side only; the specification has such values nowhere here.
    assert torch.equal(got.isinf(), want.isinf())
    assert want.isinf().any() == (kernel != "quadratic")
    near = want.isfinite()
    torch.testing.assert_close(got[near], want[near], rtol=1e-4, atol=1e-4)
    ids, log_q, clipped = case.sample(backend.device, 60)
    assert log_q.isfinite().all()
    assert torch.equal(log_q.cpu().double(), got.gather(1, ids.cpu()))
    assert ((clipped > 0) & (clipped < 1)).all()
    assert case.epsilon == 0.0
    mixed = dataclasses.replace(case, epsilon=0.1)
    assert mixed.log_prob(backend.device).exp().min() >= 0.1 / 300 * (1 - 1e-5)
    assert (make(300, 3, kernel=kernel).sample(backend.device, 5)[2] == 0).all()


def test_both_children_at_zero(backend):
    """No estimate above zero anywhere: the distribution is the number of classes, then the leaf's kernel."""
    case = make(11, 2)
    case.phi = -case.phi
    case.log_tree = reference.tree_law(case.h, case.phi, case.rows, case.sums, 2, "gaussian", 1.0)
    got = case.log_prob(backend.device).cpu().double()
    torch.testing.assert_close(got, case.log_tree, rtol=1e-5, atol=1e-5)
    assert got.isfinite().all()
    by_leaf = torch.nn.functional.pad(got.exp(), (0, 5)).view(4, 8, 2).sum(2)
    torch.testing.assert_close(by_leaf[:, :6], torch.tensor([2, 2, 2, 2, 2, 1]).expand(4, -1) / 11.0, check_dtype=False)


def test_far_rows_keep_their_logarithm(backend):
    """Kernels of e^-1000 in a leaf, and paths of probability below the smallest double."""
    case = make(40, 8, scale=200.0)
    got = case.log_prob(backend.device).cpu().double()
    assert got.min() < -700
    torch.testing.assert_close(got, case.log_tree, rtol=1e-4, atol=1e-5)
    steep = make(1 << 9, 1)
    leaves = steep.sums.shape[0] // 2
    steep.sums[leaves:] = 1e-37
    steep.sums[leaves] = 1.0  # class 0 has nearly all mass
    for node in range(leaves - 1, 0, -1):
        steep.sums[node] = steep.sums[2 * node] + steep.sums[2 * node + 1]
        if node & (node - 1):
            steep.sums[node] = 1e-37
    steep.phi = torch.ones_like(steep.phi)
    want = reference.tree_law(steep.h, steep.phi, steep.rows, steep.sums, 1, "gaussian", 1.0)
    got = steep.log_prob(backend.device).cpu().double()
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------------------------------ draws
@pytest.mark.parametrize(("classes", "leaf_size"), SHAPES)
def test_draws_follow_the_reference(backend, classes, leaf_size):
    kernel, epsilon = KERNELS[classes % 3], 0.2 * (leaf_size % 2)
    case = make(classes, leaf_size, kernel=kernel, epsilon=epsilon, batch=2)
    ids, log_q, _ = case.sample(backend.device, 70)
    want = reference.sample(3, 2**40, case.log_tree, leaf_size, epsilon, 70)
    sure = want >= 0
    assert sure.float().mean() > 0.98
    assert torch.equal(ids.cpu()[sure], want[sure])
    assert torch.equal(log_q.cpu(), case.log_prob(backend.device).cpu().gather(1, ids.cpu()))  # the very bits


@pytest.mark.parametrize("width", [1, 3, 12])
@pytest.mark.parametrize(("classes", "leaf_size"), [(37, 1), (37, 5), (300, 2)])
def test_excluding_is_exact(backend, classes, leaf_size, width):
    epsilon = 0.1 * (leaf_size % 2)
    case = make(classes, leaf_size, epsilon=epsilon, batch=5)
    exclude = torch.randint(-1, classes, (5, width), generator=torch.Generator().manual_seed(width))
    if width == 3:
        exclude[0], exclude[1] = torch.tensor([4, 4, 5]), torch.tensor([-1, -1, -1])
    rows = [[i for i in row if i >= 0] for row in exclude.tolist()]
    want = reference.conditional(case.log_tree, epsilon, rows)
    got = case.log_prob(backend.device, exclude=exclude).cpu()
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    ids, log_q, _ = case.sample(backend.device, 30, exclude)
    assert torch.equal(log_q.cpu(), got.gather(1, ids.cpu()))
    expected = reference.sample(3, 2**40, case.log_tree, leaf_size, epsilon, 30, rows)
    sure = expected >= 0
    assert sure.float().mean() > 0.98
    assert torch.equal(ids.cpu()[sure], expected[sure])
    # The same rows as CSR.
    offsets = torch.tensor([0, *torch.tensor([len(r) for r in rows]).cumsum(0).tolist()])
    csr = offsets, torch.tensor([i for r in rows for i in r], dtype=torch.int64)
    again = case.sample(backend.device, 30, csr)
    assert torch.equal(again[0], ids)
    assert torch.equal(again[1], log_q)


def test_a_nearly_certain_target_leaves_the_rest_its_digits(backend):
    """q(y) = 1 - 1e-19 on the path, and a leaf where the target is e^90 above its neighbors: 1 - q would be 0."""
    case = make(8, 2)
    leaves = 4
    case.sums[leaves:] = torch.tensor([1.0, 1e-19, 2e-19, 3e-19])[:, None]
    for node in range(leaves - 1, 0, -1):
        case.sums[node] = case.sums[2 * node] + case.sums[2 * node + 1]
    case.phi = torch.ones_like(case.phi)
    case.h = torch.ones(4, 8)
    case.rows[0], case.rows[1] = torch.ones(8), torch.ones(8) - math.sqrt(2 * 45.0 / 8)
    case.log_tree = reference.tree_law(case.h, case.phi, case.rows, case.sums, 2, "gaussian", 1.0)
    assert case.log_tree[0, 0] > -1e-15
    exclude = torch.zeros(4, 1, dtype=torch.int64)
    want = reference.conditional(case.log_tree, 0.0, [[0]] * 4)
    got = case.log_prob(backend.device, exclude=exclude).cpu().double()
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    ids = case.sample(backend.device, 100, exclude)[0]
    assert set(range(2, 8)) <= set(ids.flatten().tolist()) <= set(range(1, 8))


@pytest.mark.parametrize("epsilon", [0.0, 0.1])
@pytest.mark.parametrize(("classes", "leaf_size"), [(1, 1), (3, 1), (3, 3)])
def test_nothing_left_is_the_first_excluded_class(backend, classes, leaf_size, epsilon):
    case = make(classes, leaf_size, epsilon=epsilon)
    every = torch.arange(classes).expand(4, -1)
    ids, log_q, _ = case.sample(backend.device, 3, every)
    assert (ids == 0).all()
    assert (log_q == 0).all()
    got = case.log_prob(backend.device, exclude=every).cpu()
    assert (got[:, 0] == 0).all()
    assert (got[:, 1:] == -math.inf).all()


def test_where_the_tree_has_nothing_left_the_uniform_law_has(backend):
    """All mass of the tree on an excluded class: with epsilon the others are drawn uniformly."""
    case = make(4, 1, epsilon=0.01)
    case.sums.zero_()
    case.sums[1] = case.sums[2] = case.sums[4] = 1.0
    case.phi = torch.ones_like(case.phi)
    exclude = torch.zeros(4, 1, dtype=torch.int64)
    got = case.log_prob(backend.device, exclude=exclude).cpu()
    torch.testing.assert_close(got[:, 1:].exp(), torch.full((4, 3), 1 / 3))
    ids = case.sample(backend.device, 60, exclude)[0]
    assert set(ids.flatten().tolist()) == {1, 2, 3}
    none = dataclasses.replace(case, epsilon=0.0).sample(backend.device, 2, exclude)
    assert (none[0] == 0).all()
    assert (none[1] == 0).all()


def test_padding_is_never_drawn(backend):
    """33 classes in 64 leaves; values of empty subtrees are not even examined."""
    case = make(33, 1)
    leaves = case.sums.shape[0] // 2
    case.sums[leaves + 33 :] = 1e6
    ids, log_q, _ = case.sample(backend.device, 200)
    assert (ids < 33).all()
    assert torch.allclose(case.log_prob(backend.device).exp().sum(1), torch.ones(4, device=backend.device), atol=1e-5)
    assert log_q.isfinite().all()


def test_a_prefix_of_more_draws(backend):
    """A draw depends on its row and number only, not on how many there are."""
    case = make(300, 2, epsilon=0.1)
    many, few = case.sample(backend.device, 130), case.sample(backend.device, 7)
    assert torch.equal(many[0][:, :7], few[0])
    assert torch.equal(many[1][:, :7], few[1])


# ------------------------------------------------------------------------------------------------ bits
def everything(case: Case, device) -> list[Tensor]:
    three = excluded_of(case)
    return [
        *case.sample(device, 70),
        *case.sample(device, 9, three),
        case.log_prob(device),
        case.log_prob(device, exclude=three),
    ]


class Path:
    """The float64 path of a row's draws, with the band of every choice: how far BAND can move its probability."""

    def __init__(self, case: Case, row: int, excluded: list[int]):
        self.classes, self.size, self.row, self.epsilon = len(case.rows), case.leaf_size, row, case.epsilon
        self.depth, self.leaves = reference.tree_shape(self.classes, self.size)
        phi, sums = case.phi[row].double(), case.sums.double()
        values, terms = (sums @ phi).tolist(), (sums.abs() @ phi.abs()).tolist()
        h, rows = case.h[row].double(), case.rows.double()
        dots, sizes = rows @ h, rows.abs() @ h.abs()
        self.score = reference.leaf_scores(case.h[row : row + 1], case.rows, case.kernel, case.scale)[0]
        if case.kernel == "gaussian":
            moved = self.score.abs()
        elif case.kernel == "exponential":
            moved = case.scale * sizes
        else:
            moved = 2 * case.scale * dots.abs() * sizes / self.score.exp()
        self.moved, self.out = moved, set(excluded)
        self.right, self.band = [0.0] * self.leaves, [0.0] * self.leaves  # P(right | node, nothing excluded)
        kept, unsure = [1.0] * (2 * self.leaves), [0.0] * (2 * self.leaves)  # P(nothing excluded | node)
        for leaf in {i // self.size for i in self.out}:
            *_, kept[self.leaves + leaf], unsure[self.leaves + leaf] = self.leaf(leaf)
        for node in range(self.leaves - 1, 0, -1):
            span = self.size << (self.depth - node.bit_length())
            begin = 2 * (node - (1 << node.bit_length() - 1)) * span
            counts = [min(max(self.classes - begin - side * span, 0), span) for side in (0, 1)]
            if counts[1] == 0:
                kept[node], unsure[node] = kept[2 * node], unsure[2 * node]
                continue
            floor = 1.0 if case.kernel == "quadratic" else 0.0
            left, right = (max(values[2 * node + side], floor * counts[side]) for side in (0, 1))
            error = BAND * (terms[2 * node] + terms[2 * node + 1])
            if left + right > 0:
                p, off = right / (left + right), min(1.0, error / (left + right))
            else:  # the classes decide, unless rounding lifts a value above zero
                p, off = counts[1] / sum(counts), float(max(values[2 * node : 2 * node + 2]) > -error)
            ends = [kept[2 * node], kept[2 * node + 1]]
            slack = [unsure[2 * node], unsure[2 * node + 1]]
            mass = [(1 - p) * ends[0], p * ends[1]]
            slip = [off * ends[0] + (1 - p) * slack[0], off * ends[1] + p * slack[1]]
            kept[node] = total = sum(mass)
            unsure[node] = off * abs(ends[0] - ends[1]) + (1 - p) * slack[0] + p * slack[1]
            self.right[node] = mass[1] / total
            # Where nothing is excluded both masses move together, and this is `off`.
            both = (mass[0] * slip[1] + mass[1] * slip[0]) / total**2
            self.band[node] = off if ends == [1.0, 1.0] else both
        tree, uniform = (1 - self.epsilon) * kept[1], self.epsilon * (self.classes - len(self.out)) / self.classes
        self.share = uniform / (tree + uniform)
        self.share_band = self.share * (1 - self.epsilon) * unsure[1] / (tree + uniform)

    def leaf(self, leaf: int) -> tuple[list[float], float, float, float]:
        """Ends of the classes' parts of [0, 1), their band; P(nothing excluded | leaf) and its band."""
        first, last = leaf * self.size, min((leaf + 1) * self.size, self.classes)
        weight = torch.softmax(self.score[first:last], 0)
        left = weight * torch.tensor([float(i not in self.out) for i in range(first, last)])
        off, share = BAND * (1.0 + float(self.moved[first:last].max())), float(left.sum())
        return (left.cumsum(0) / left.sum()).tolist(), off, share, off * share

    def check(self, draw: int, a: int, b: int, key=(3, 2**40)) -> str:
        """Where a draw of two classes has parted; raises unless the number drawn lies within the band there."""
        numbers = [reference.philox_bits(*key, self.row, draw, block) for block in range(self.depth // 2 + 1)]
        tiny = 2.0**-50  # of double arithmetic
        coin = (reference.philox_bits(*key, self.row, draw, 255)[0] >> 11) * 2.0**-53
        if self.epsilon > 0 and abs(coin - self.share) <= self.share_band + tiny:
            return "component"
        assert coin >= self.share, f"draw {draw} is uniform, and {a} is not {b}"
        for level in range(self.depth + 1):
            u = (numbers[level // 2][level % 2] >> 11) * 2.0**-53
            if level == self.depth:
                break
            one, two = ((self.leaves + i // self.size) >> (self.depth - level - 1) for i in (a, b))
            node = one // 2
            gap, band = abs(u - self.right[node]), self.band[node] + tiny
            wrong = [side for side in (one, two) if (side & 1) != (u < self.right[node])]
            assert not wrong or gap <= band, f"draw {draw}, node {node}: {a} or {b}, {gap:.2e} off, band {band:.2e}"
            if one != two:
                return f"level {level}"
        ends, band, *_ = self.leaf(a // self.size)
        low, high = sorted((a % self.size, b % self.size))
        gap = max(abs(u - end) for end in ends[low:high])
        assert gap <= band + tiny, f"draw {draw}, leaf of {a} and {b}: {gap:.2e} off, band {band:.2e}"
        return "leaf"


def check_ids(case: Case, a: Tensor, b: Tensor, excluded: Tensor | None = None) -> list[str]:
    """Where the draws parted whose classes differ; each must lie within the band there."""
    found, paths = [], {}
    for row, draw in (a != b).nonzero().tolist():
        if row not in paths:
            paths[row] = Path(case, row, [] if excluded is None else excluded[row].tolist())
        found.append(paths[row].check(draw, int(a[row, draw]), int(b[row, draw])))
    return found


@pytest.fixture
def on_cpu():
    """The CPU kernels, whatever serves the run; the old backend afterwards."""
    before = _native.cpu_backend()
    _native.set_cpu_backend("cpu")
    yield torch.device("cpu")
    _native.set_cpu_backend(before)


def excluded_of(case: Case) -> Tensor:
    return torch.randint(0, len(case.rows), (len(case.h), 3), generator=torch.Generator().manual_seed(1))


def same_draws(case: Case, got: list[Tensor], want: list[Tensor]) -> None:
    check_ids(case, got[0].cpu(), want[0].cpu())
    check_ids(case, got[3].cpu(), want[3].cpu(), excluded_of(case))
    for a, b in zip(got[6:], want[6:], strict=True):
        torch.testing.assert_close(a.cpu(), b.cpu(), rtol=1e-5, atol=1e-5)


def test_two_runs_and_every_thread_count_have_the_same_bits(simd_level):
    case = make(700, 2, width=144, batch=33, epsilon=0.05)
    cpu = torch.device("cpu")
    got = everything(case, cpu)
    before = torch.get_num_threads()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        again = everything(case, cpu)
        torch.set_num_threads(before)
        # The GEMM of the top levels may have an order of its own for each thread count: then only the distribution is
        # the same.
        if threads == before:
            assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
        same_draws(case, again, got)


def test_backends_draw_the_same(backend):
    case = make(700, 2, width=144, batch=5, epsilon=0.05)
    got = everything(case, backend.device)
    _native.set_cpu_backend("cpu")
    level = _native.simd_level()
    _native.set_simd_level("scalar")
    want = everything(case, torch.device("cpu"))
    _native.set_simd_level(level)
    same_draws(case, got, want)


def test_simd_levels_draw_the_same(simd_level, on_cpu):
    """So many draws through so many levels below the GEMM that some part where features cancel (mean 0.02)."""
    case = make(20_000, 2, width=256, batch=2, dim=64, scale=0.1, epsilon=0.05, mean=0.02)
    out = excluded_of(case)
    got = case.sample(on_cpu, 300_000)[0], case.sample(on_cpu, 100_000, out)[0]
    _native.set_simd_level("scalar")
    want = case.sample(on_cpu, 300_000)[0], case.sample(on_cpu, 100_000, out)[0]
    _native.set_simd_level(simd_level)
    parted = check_ids(case, got[0], want[0]) + check_ids(case, got[1], want[1], out)
    assert len(parted) < 100


@pytest.mark.parametrize("excluding", [False, True])
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_band_is_that_of_rounding(on_cpu, kernel, excluding):
    """Sums moved by half the band part some draws, all within it; moved 100 times as far, not all."""
    case = make(700, 2, width=144, batch=1, epsilon=0.05, kernel=kernel, mean=0.02)
    out = excluded_of(case) if excluding else None
    want = case.sample(on_cpu, 300_000, out)[0]
    noise = torch.sign(
        case.phi * case.sums
    ).double()  # the worst there is: every term up on the right, down on the left
    noise[::2] *= -1
    parted = []
    for size in (0.5, 50.0):
        moved = dataclasses.replace(case, sums=(case.sums.double() * (1 + size * BAND * noise)).float())
        got = moved.sample(on_cpu, 300_000, out)[0]
        if size < 1:
            parted = check_ids(case, got, want, out)
        else:
            with pytest.raises(AssertionError, match="band"):
                check_ids(case, got, want, out)
    assert len(parted) < 1000
    assert parted or kernel == "quadratic"  # whose floor hides what moves small values


@pytest.mark.parametrize("excluding", [False, True])
def test_the_band_refuses_a_wrong_draw(excluding):
    """Draws with another class put in their place: of the next leaf, of the same leaf, of another half."""
    case = make(700, 2, width=144, batch=2, epsilon=0.05)
    out = excluded_of(case) if excluding else None
    ids = case.sample(torch.device("cpu"), 40, out)[0]
    for other in (ids ^ 1, (ids + 2) % 700, (ids + 350) % 700):
        for row in range(2):
            path = Path(case, row, out[row].tolist() if excluding else [])
            for draw in range(40):
                with pytest.raises(AssertionError, match=f"draw {draw}"):
                    path.check(draw, int(ids[row, draw]), int(other[row, draw]))


def test_many_rows_at_one_node(backend):
    """One class holds nearly all mass: every draw of every row goes the same way, and the work is cut by rows."""
    case = make(300, 1, batch=40)
    leaves = case.sums.shape[0] // 2
    case.sums[leaves + 17] *= 1e5
    for node in range(leaves - 1, 0, -1):
        case.sums[node] = case.sums[2 * node] + case.sums[2 * node + 1]
    case.log_tree = reference.tree_law(case.h, case.phi, case.rows, case.sums, 1, "gaussian", 1.0)
    ids, log_q, _ = case.sample(backend.device, 20)
    assert (ids == 17).float().mean() > 0.98
    torch.testing.assert_close(log_q.cpu().double(), case.log_tree.gather(1, ids.cpu()), rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------------------------------ corners
def test_empty_batch_and_no_draws(backend):
    case = make(10, 2)
    none = dataclasses.replace(case, h=case.h[:0], phi=case.phi[:0])
    assert none.sample(backend.device, 5)[0].shape == (0, 5)
    assert case.sample(backend.device, 0)[1].shape == (4, 0)
    assert case.sample(backend.device, 0)[2].tolist() == [0.0] * 4
    assert none.log_prob(backend.device).shape == (0, 10)
    assert case.log_prob(backend.device, torch.empty(4, 0, dtype=torch.int64)).shape == (4, 0)
    empty = torch.empty(4, 0, dtype=torch.int64)
    assert torch.equal(case.sample(backend.device, 5, empty)[0], case.sample(backend.device, 5)[0])
    sums = torch.zeros(4, 16, device=backend.device)
    nothing = torch.empty(0, 16, device=backend.device)
    ids = torch.empty(0, dtype=torch.int64, device=backend.device)
    ops.kernel_tree_build(sums, nothing, 0, 2)
    ops.kernel_tree_update(sums, nothing, nothing, ids, 2)
    ops.kernel_tree_parents(sums, ids)
    assert (sums == 0).all()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("exclude", [False, True])
def test_a_nan_row_is_nan_and_no_other(backend, kernel, exclude):
    case = make(300, 3, kernel=kernel, epsilon=0.01)
    out = torch.tensor([[1], [2], [3], [-1]]) if exclude else None
    clean = case.sample(backend.device, 20, out)
    case.h[1, 2] = math.nan
    case.phi[1] = math.nan
    ids, log_q, _ = case.sample(backend.device, 20, out)
    assert ((ids >= 0) & (ids < 300)).all()
    assert log_q[1].isnan().all()
    for row in (0, 2, 3):
        assert torch.equal(ids[row], clean[0][row])
        assert torch.equal(log_q[row], clean[1][row])
    assert case.log_prob(backend.device, exclude=out)[1, 3:].isnan().all()


def test_opcheck(backend):
    case = make(11, 2)
    device = backend.device
    h, phi, rows, sums = (t.to(device) for t in (case.h, case.phi, case.rows, case.sums))
    key, exclude = torch.tensor([1, 2], device=device), torch.tensor([[0], [-1], [3], [10]], device=device)
    ids = torch.randint(0, 11, (4, 3), device=device)
    calls = torch.ops.samplex
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    law = (2, 0, 1.0, 0.1)
    torch.library.opcheck(calls.kernel_tree_sample.default, (key, h, phi, rows, sums, *law, 6, exclude, None))
    torch.library.opcheck(calls.kernel_tree_log_prob.default, (h, phi, ids, rows, sums, *law, exclude, None))
    torch.library.opcheck(
        calls.kernel_tree_build.default, (sums, torch.randn(3, 16, device=device), 2, 2), test_utils=checks
    )
    few = torch.tensor([1, 4], device=device)
    delta = torch.randn(2, 16, device=device)
    torch.library.opcheck(calls.kernel_tree_update.default, (sums, delta, delta + 1, few, 2), test_utils=checks)
    taken, peaks = torch.tensor([True, False], device=device), torch.ones(2, sums.shape[0] // 2 + 1, device=device)
    more = (taken, rows, rows[:2].clone(), peaks)
    torch.library.opcheck(calls.kernel_tree_update.default, (sums, delta, delta + 1, few, 2, *more), test_utils=checks)
    torch.library.opcheck(calls.kernel_tree_parents.default, (sums, few), test_utils=checks)
