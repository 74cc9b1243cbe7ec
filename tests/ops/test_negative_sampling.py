"""Fused negative sampling against its specification, on every backend: values, gradients, corners, sparse rows, bits.

Truth is `samplex_cuda.reference` in float64 on the same (rounded) inputs; the error budget is that of
`samplex_cuda.testing`, as in test_sampled_softmax.py.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from loss_cases import acc, dense, leaf, name_of, pairwise

from samplex_cuda import _native, functional
from samplex_cuda.reference.negative_sampling import negative_sampling as reference
from samplex_cuda.testing import assert_close

NAN, INF = float("nan"), float("inf")
OP = torch.ops.samplex.negative_sampling.default
OP_BWD = torch.ops.samplex.negative_sampling_bwd.default


@dataclasses.dataclass
class Case:
    """Inputs of one call. `ids` and `log_q` are [B, m] or [m]; `options` are keyword arguments."""

    h: torch.Tensor
    weight: torch.Tensor
    target: torch.Tensor
    ids: torch.Tensor
    log_q: torch.Tensor
    target_log_q: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        return (self.h, self.weight, self.target, self.ids, self.log_q, self.target_log_q, self.bias)

    def to(self, device: torch.device) -> Case:
        def move(x):
            return x.to(device) if isinstance(x, torch.Tensor) else x

        return Case(*map(move, self.tensors), {name: move(value) for name, value in self.options.items()})

    def call(self, *, reduction="none", sparse=True, h=None, weight=None, bias=None) -> torch.Tensor:
        return functional.negative_sampling(
            self.h if h is None else h, self.weight if weight is None else weight, self.target, self.ids, self.log_q,
            self.target_log_q, self.bias if bias is None else bias, reduction=reduction, sparse=sparse, **self.options,
        )  # fmt: skip


def make_case(
    rows=5,
    samples=8,
    dim=16,
    *,
    classes=40,
    shared=False,
    dtype=torch.float32,
    bias="none",
    scale=1.0,
    reg=0.0,
    class_weight=False,
    ignore="none",
    seed=0,
) -> Case:
    """Few classes, so that draws repeat and hit targets. Scores have a spread of about 2."""
    g = torch.Generator().manual_seed(seed)
    h = torch.randn(rows, dim, generator=g).to(dtype)
    weight = (2 * dim**-0.5 * torch.randn(classes, dim, generator=g)).to(dtype)
    target = torch.randint(0, classes, (rows,), generator=g)
    options: dict[str, Any] = {"scale": scale, "reg": reg}
    ignored = {"none": None, "padding": -100, "class": 7, "beyond": 1000}[ignore]
    if ignored is not None:
        options["ignore_index"] = ignored
        target[torch.rand(rows, generator=g) < 0.3] = ignored
    shape = (samples,) if shared else (rows, samples)
    ids = torch.randint(0, classes, shape, generator=g)
    log_q = (-1.0 - 3.0 * torch.rand(shape, generator=g)).to(acc(dtype))
    target_log_q = (-1.0 - 3.0 * torch.rand(rows, generator=g)).to(acc(dtype)) if reg else None
    b = None if bias == "none" else torch.randn(classes, generator=g).to(dtype if bias == "weight" else acc(dtype))
    if class_weight:
        options["class_weight"] = torch.rand(classes, generator=g).to(acc(dtype)) + 0.25
    return Case(h, weight, target, ids, log_q, target_log_q, b, options)


def upstream(case: Case) -> torch.Tensor:
    g = torch.Generator().manual_seed(1)
    return torch.randn(case.h.shape[0], generator=g).to(acc(case.weight.dtype))


def run_ours(case: Case, device="cpu", *, sparse=True) -> dict[str, torch.Tensor]:
    """Loss and all gradients for the random upstream gradient of `upstream`, on the CPU."""
    c = case.to(torch.device(device))
    h, weight, bias = leaf(c.h), leaf(c.weight), leaf(c.bias)
    loss = c.call(sparse=sparse, h=h, weight=weight, bias=bias)
    inputs = [t for t in (h, weight, bias) if t is not None]
    grads = torch.autograd.grad(loss, inputs, upstream(case).to(device))
    found = {"loss": loss.detach().cpu()}
    return found | {name: dense(g) for name, g in zip(("d_h", "d_weight", "d_bias"), grads, strict=False)}


def run_reference(case: Case, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    h, weight, bias = leaf(case.h, dtype), leaf(case.weight, dtype), leaf(case.bias, dtype)
    options = {k: v.to(dtype) if isinstance(v, torch.Tensor) else v for k, v in case.options.items()}
    target_log_q = None if case.target_log_q is None else case.target_log_q.to(dtype)
    loss, _ = reference(h, weight, case.target, case.ids, case.log_q.to(dtype), target_log_q, bias, **options)
    inputs = [t for t in (h, weight, bias) if t is not None]
    grads = torch.autograd.grad(loss, inputs, upstream(case).to(dtype))
    return {"loss": loss.detach()} | dict(zip(("d_h", "d_weight", "d_bias"), grads, strict=False))


def largest_score(case: Case) -> float:
    """Bound on |xi|: an error of eps |xi| in a score is at most the same relative error in its gradient."""
    if case.h.numel() == 0:
        return 1.0
    s = case.h.double() @ case.weight.double().T
    b = 0.0 if case.bias is None else float(case.bias.double().abs().max())
    return abs(case.options.get("scale", 1.0)) * (float(s.abs().max()) + b) + 4.0  # log_q of make_case


def check_against(case: Case, ours: dict[str, torch.Tensor]) -> None:
    dtype = case.weight.dtype
    truth, torchs = run_reference(case, torch.float64), run_reference(case, acc(dtype))
    kinds = {"d_h": dtype, "d_weight": dtype, "d_bias": None if case.bias is None else case.bias.dtype}
    score = largest_score(case)
    for name, value in ours.items():
        size = 1.0 if name == "loss" else float(truth[name].abs().max()) if truth[name].numel() else 0.0
        same = torchs[name].to(kinds.get(name) or acc(dtype))
        assert_close(name, value, truth[name], same, magnitude=score * size)


def check_case(case: Case, backend, *, sparse=True) -> None:
    check_against(case, run_ours(case, backend.device, sparse=sparse))


GRID = pairwise({
    "dim": [1, 3, 7, 8, 9, 15, 16, 17, 31, 33, 64, 72, 100, 128, 130, 250, 256, 300, 512, 768, 1024, 1025, 1032],
    "samples": [0, 1, 2, 7, 31, 32, 33, 65],
    "dtype": [torch.float32, torch.bfloat16, torch.float16, torch.float64],
    "ignore": ["none", "padding", "class", "beyond"],
    "rows": [0, 1, 5],
    "bias": ["none", "weight", "float32"],
    "shared": [False, True],
    "scale": [1.0, 2.5],
    "reg": [0.0, 0.01, 0.3],
    "class_weight": [False, True],
})  # fmt: skip


# ------------------------------------------------------------------------------------------------ values, gradients
@pytest.mark.parametrize("row", GRID, ids=name_of)
def test_values_and_gradients_match_the_reference(backend, row):
    check_case(make_case(**row), backend)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("sparse", [False, True])
def test_everything_at_once(backend, shared, sparse):
    case = make_case(7, 40, 24, shared=shared, bias="weight", scale=0.7, reg=0.2, class_weight=True, ignore="padding")
    check_case(case, backend, sparse=sparse)


def test_the_formula_by_hand(backend):
    case = make_case(1, 2, 4, classes=10, dtype=torch.float64, reg=0.25, scale=1.5, bias="weight")
    case.target, case.ids = torch.tensor([3]), torch.tensor([[5, 3]])  # the second draw hits the target and counts
    xi = 1.5 * (case.weight @ case.h[0] + case.bias)
    wanted = torch.log1p((-xi[3]).exp()) + 0.25 * (xi[3] + case.target_log_q[0]) ** 2
    for k, q in ((5, case.log_q[0, 0]), (3, case.log_q[0, 1])):
        wanted = wanted + 0.5 * (torch.log1p(xi[k].exp()) + 0.25 * (xi[k] + q) ** 2)
    torch.testing.assert_close(case.to(backend.device).call()[0].cpu(), wanted, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("needs", ["h", "weight", "bias", "h weight", "weight bias"])
@pytest.mark.parametrize("shared", [False, True])
def test_each_gradient_is_the_same_when_asked_for_alone(backend, needs, shared):
    case = make_case(shared=shared, bias="weight", reg=0.1)
    every = run_ours(case, backend.device)
    c = case.to(backend.device)
    tensors = {"h": c.h.clone(), "weight": c.weight.clone(), "bias": c.bias.clone()}
    for name in needs.split():
        tensors[name].requires_grad_()
    c.call(**tensors).backward(upstream(case).to(backend.device))
    for name, t in tensors.items():
        assert (t.grad is not None) == (name in needs.split())
        if t.grad is not None:
            assert torch.equal(dense(t.grad), every[f"d_{name}"])


def test_no_grad_gives_the_same_loss(backend):
    case = make_case(reg=0.1).to(backend.device)
    with torch.no_grad():
        loss = case.call(weight=leaf(case.weight))
    assert not loss.requires_grad
    assert torch.equal(loss, case.call(weight=leaf(case.weight)).detach())


@pytest.mark.parametrize("shared", [False, True])
def test_leading_dimensions_are_flattened(backend, shared):
    case = make_case(6, 5, 8, shared=shared, reg=0.1).to(backend.device)
    flat = case.call()
    shape = lambda t: t.reshape(2, 3, *t.shape[1:])  # noqa: E731
    nested = dataclasses.replace(
        case, h=shape(case.h), target=shape(case.target), target_log_q=shape(case.target_log_q),
        ids=case.ids if shared else shape(case.ids), log_q=case.log_q if shared else shape(case.log_q),
    )  # fmt: skip
    assert nested.call().shape == (2, 3)
    assert torch.equal(nested.call().reshape(-1), flat)
    if not shared:
        one = dataclasses.replace(
            case, h=case.h[0], target=case.target[0], target_log_q=case.target_log_q[0], ids=case.ids[0],
            log_q=case.log_q[0],
        )  # fmt: skip
        assert one.call().shape == ()
        assert torch.equal(one.call(), flat[0])


@pytest.mark.parametrize("weighted", [False, True])
def test_reductions(backend, weighted):
    case = make_case(6, ignore="padding", class_weight=weighted, seed=3)
    c = case.to(backend.device)
    rows = c.call()
    _, denom = reference(case.h, case.weight, case.target, case.ids, case.log_q, **case.options)
    torch.testing.assert_close(c.call(reduction="sum"), rows.sum())
    torch.testing.assert_close(c.call(reduction="mean").cpu(), rows.sum().cpu() / denom.sum())


def test_strided_tensors_are_as_good_as_packed_ones(backend):
    case = make_case(6, 8, 16, bias="weight", class_weight=True, reg=0.1)
    plain = run_ours(case, backend.device)

    def strided(t):
        wide = torch.stack([t, torch.zeros_like(t)], -1)[..., 0]
        return wide.transpose(0, 1).contiguous().transpose(0, 1) if wide.dim() > 1 else wide

    options = case.options | {"class_weight": strided(case.options["class_weight"])}
    other = Case(*map(strided, case.tensors), options)
    assert not other.weight.is_contiguous()
    assert not other.target_log_q.is_contiguous()
    for name, value in run_ours(other, backend.device).items():
        assert torch.equal(value, plain[name]), name


# ------------------------------------------------------------------------------------------------ corners
@pytest.mark.parametrize("shared", [False, True])
def test_no_samples_leaves_the_positive_term(backend, shared):
    case = make_case(4, 0, 8, shared=shared, bias="weight", reg=0.1)
    check_case(case, backend)
    assert (run_ours(case, backend.device)["loss"] > 0).all()


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_empty_batch(backend, shared, reduction):
    case = make_case(0, 8, 16, shared=shared, bias="weight", reg=0.1).to(backend.device)
    h, weight, bias = leaf(case.h), leaf(case.weight), leaf(case.bias)
    loss = case.call(reduction=reduction, h=h, weight=weight, bias=bias)
    loss.sum().backward()
    assert loss.shape == (() if reduction != "none" else (0,))
    assert loss.sum() == 0
    assert h.grad.shape == (0, 16)
    assert weight.grad._nnz() == bias.grad._nnz() == 0


@pytest.mark.parametrize("shared", [False, True])
def test_all_rows_ignored_is_zero(backend, shared):
    case = make_case(4, shared=shared, reg=0.1).to(backend.device)
    case.target.fill_(-100)
    h, weight = leaf(case.h), leaf(case.weight)
    loss = case.call(reduction="mean", h=h, weight=weight)
    loss.backward()
    assert loss == 0
    assert not h.grad.any()
    assert not dense(weight.grad).any()
    if not shared:  # shared draws are rows of a GEMM: listed, though zero
        assert weight.grad._nnz() == 0


def test_one_class_counts_its_hits(backend):
    # C = 1: every draw is the target. p_n = p_D = 1, so the minimum is xi = 0 with loss 2 log 2.
    zero = torch.zeros(3, dtype=torch.int64, device=backend.device)
    h = torch.zeros(3, 4, device=backend.device)
    weight = torch.randn(1, 4, device=backend.device, requires_grad=True)
    loss = functional.negative_sampling(h, weight, zero, zero[:, None], zero[:, None].float())
    loss.backward()
    torch.testing.assert_close(loss.item(), 2 * torch.tensor(2.0).log().item())
    assert not dense(weight.grad).any()


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("where", ["h", "log_q", "target_log_q"])
@pytest.mark.parametrize("samples", [1, 8, 40])
@pytest.mark.parametrize("dim", [9, 64, 1030])
def test_a_bad_number_spoils_its_own_row_only(backend, bad, where, samples, dim):
    case = make_case(4, samples, dim, classes=1000, reg=0.1)
    case.ids = torch.arange(4 * samples).reshape(4, samples)
    case.target = torch.arange(900, 904)
    clean = run_ours(case, backend.device)
    spoilt = getattr(case, where)
    if spoilt.dim() == 1:
        spoilt[2] = bad
    else:
        spoilt[2, -1] = bad
    found = run_ours(case, backend.device)
    good = torch.tensor([0, 1, 3])
    for name in ("loss", "d_h"):
        assert torch.equal(found[name][good], clean[name][good]), name
        assert found[name][good].isfinite().all()
    assert not found["loss"][2].isfinite()
    assert not found["d_h"][2].isfinite().all()
    touched = torch.cat([case.ids[2], case.target[2:3]])
    others = torch.ones(1000, dtype=torch.bool).index_fill_(0, touched, False)
    assert torch.equal(found["d_weight"][others], clean["d_weight"][others])
    assert not found["d_weight"][touched].isfinite().all()


@pytest.mark.parametrize("shared", [False, True])
def test_a_nan_h_without_a_regulariser(backend, shared):
    case = make_case(4, 3, 16, shared=shared)
    case.h[1] = NAN
    assert run_ours(case, backend.device)["loss"].isnan().tolist() == [False, True, False, False]


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("shared", [False, True])
def test_without_a_regulariser_log_q_is_not_read(backend, bad, shared):
    case = make_case(4, 3, 16, shared=shared)
    clean = run_ours(case, backend.device)
    case.log_q.fill_(bad)
    case.target_log_q = torch.full((4,), bad)
    found = run_ours(case, backend.device)
    assert all(torch.equal(found[name], clean[name]) for name in clean)


@pytest.mark.parametrize("shared", [False, True])
def test_a_bad_number_in_an_ignored_row_is_not_read(backend, shared):
    case = make_case(4, 8, 16, shared=shared)
    case.target[2] = -100
    clean = run_ours(case, backend.device)
    case.h[2] = NAN
    found = run_ours(case, backend.device)
    for name in ("loss", "d_h"):
        torch.testing.assert_close(found[name], clean[name])
    assert found["loss"][2] == 0
    if not shared:  # shared draws reduce over the batch by a GEMM, where 0 * nan is nan, as in F.linear's backward
        assert torch.equal(found["d_weight"], clean["d_weight"])


def test_a_bias_of_minus_infinity_removes_a_drawn_class(backend):
    case = make_case(4, 12, 8, bias="float32", classes=400, seed=2)
    dead = int(case.ids.reshape(-1)[3])
    case.bias[dead] = -INF
    found = run_ours(case, backend.device)
    assert found["loss"].isfinite().all()
    assert not found["d_weight"][dead].any()
    assert found["d_bias"][dead] == 0
    case.bias[dead] = -1e4
    assert torch.equal(run_ours(case, backend.device)["loss"], found["loss"])


@pytest.mark.parametrize("scale", [1e3, -1e3])
@pytest.mark.parametrize("reg", [0.0, 0.1])
def test_large_scores_do_not_overflow(backend, scale, reg):
    case = make_case(4, 33, 8, scale=scale, reg=reg)
    assert run_ours(case, backend.device)["loss"].isfinite().all()
    check_case(case, backend)


def test_small_terms_keep_their_digits(backend):
    # softplus(-20) = 2.06e-9: 1 + exp(-20) is 1 in float32.
    h = torch.ones(1, 1, device=backend.device)
    weight = torch.tensor([[20.0], [-20.0]], device=backend.device, requires_grad=True)
    zero, one = torch.tensor([0], device=backend.device), torch.tensor([[1]], device=backend.device)
    loss = functional.negative_sampling(h, weight, zero, one, torch.zeros(1, 1, device=backend.device))
    loss.backward()
    term = torch.tensor(-20.0, dtype=torch.float64).exp()
    torch.testing.assert_close(loss.item(), float(2 * term), rtol=1e-5, atol=0)
    wanted = torch.stack([-term, term]).float()
    torch.testing.assert_close(dense(weight.grad)[:, 0], wanted, rtol=1e-5, atol=0)


def test_an_infinite_upstream_gradient_touches_no_row_outside(backend):
    case = make_case(3, 4, 8).to(backend.device)
    case.target[1], case.options["ignore_index"] = 1000, 1000
    weight = leaf(case.weight)
    case.call(weight=weight).backward(torch.tensor([1.0, INF, 1.0], device=backend.device))
    assert int(weight.grad._indices().max()) < 40


# ------------------------------------------------------------------------------------------------ sparse gradients
@pytest.mark.parametrize("shared", [False, True])
def test_sparse_gradients_are_coalesced_and_equal_the_dense_ones(backend, shared):
    case = make_case(5, 12, 16, shared=shared, bias="weight", ignore="padding", reg=0.1).to(backend.device)
    grads = {}
    for sparse in (True, False):
        weight, bias = leaf(case.weight), leaf(case.bias)
        loss = case.call(reduction="mean", sparse=sparse, weight=weight, bias=bias)
        grads[sparse] = torch.autograd.grad(loss, (weight, bias))
    for ours, full in zip(grads[True], grads[False], strict=True):
        assert ours.is_sparse
        assert ours.is_coalesced()
        assert not full.is_sparse
        assert (ours._indices()[0].diff() > 0).all()
        assert torch.equal(ours.to_dense(), full)
    used, drawn = case.target[case.target >= 0], case.ids.expand(5, -1)[case.target >= 0]
    assert torch.equal(grads[True][0]._indices()[0], torch.cat([used, drawn.reshape(-1)]).unique())


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # of torch.optim itself
def test_the_gradient_of_a_parameter_stays_coalesced_and_adagrad_takes_it(backend):
    tables = []
    for sparse in (True, False):
        case = make_case(5, 12, 16, reg=0.1).to(backend.device)
        weight = leaf(case.weight)
        optimizer = torch.optim.Adagrad([weight], lr=0.05)
        for seed in range(4):
            case = make_case(5, 12, 16, reg=0.1, seed=seed).to(backend.device)
            optimizer.zero_grad()
            case.call(reduction="mean", sparse=sparse, weight=weight).backward()
            assert not sparse or weight.grad.is_coalesced()
            optimizer.step()
        tables.append(weight.detach())
    torch.testing.assert_close(*tables, rtol=1e-6, atol=1e-6)


def test_a_graph_can_be_walked_twice(backend):
    case = make_case().to(backend.device)
    weight = leaf(case.weight)
    loss = case.call(reduction="mean", weight=weight)
    loss.backward(retain_graph=True)
    first = weight.grad.to_dense()
    weight.grad = None
    loss.backward()
    assert torch.equal(weight.grad.to_dense(), first)


# ------------------------------------------------------------------------------------------------ determinism
@pytest.mark.parametrize("shared", [False, True])
def test_same_bits_twice(backend, shared):
    case = make_case(8, 33, 20, shared=shared, bias="weight", reg=0.1)
    one, two = run_ours(case, backend.device), run_ours(case, backend.device)
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_same_bits_for_any_number_of_threads(simd_level, dtype):
    # Enough rows for two shares of the forward and enough entries for two chunks of the row reduction.
    case = make_case(260, 33, 40, classes=500, bias="weight", dtype=dtype, reg=0.1)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(run_ours(case))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(found[0][name], other[name]) for name in other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 130])
@pytest.mark.parametrize("shared", [False, True])
def test_every_simd_level_meets_the_reference(simd_level, dtype, dim, shared):
    case = make_case(3, dim % 19, dim, dtype=dtype, bias="weight", reg=0.1, shared=shared)
    check_against(case, run_ours(case))
    ours = run_ours(case)
    _native.set_simd_level("scalar")
    scalar = run_ours(case)
    _native.set_simd_level(simd_level)
    for name, value in ours.items():
        size = 1.0 if name == "loss" else float(scalar[name].abs().max())
        assert_close(name, value, scalar[name].double(), scalar[name], magnitude=largest_score(case) * size)


@pytest.mark.parametrize("samples", range(14))
def test_simd_levels_around_the_tile(simd_level, samples):
    case = make_case(2, samples, 24, bias="weight", reg=0.1)
    check_against(case, run_ours(case))


# ------------------------------------------------------------------------------------------------ torch's own checks
GRADCHECK = {
    "per row": {},
    "shared": {"shared": True, "reg": 0.2},
    "regularised": {"reg": 0.3, "scale": 0.8, "class_weight": True},
    "ignored": {"ignore": "padding", "shared": True},
}


@pytest.mark.parametrize("options", GRADCHECK.values(), ids=GRADCHECK)
def test_gradcheck(backend, options):
    case = make_case(3, 5, 4, classes=9, dtype=torch.float64, bias="weight", **options).to(backend.device)

    def call(h, weight, bias):
        return case.call(sparse=False, h=h, weight=weight, bias=bias)

    assert torch.autograd.gradcheck(call, (leaf(case.h), leaf(case.weight), leaf(case.bias)))


def op_args(case: Case, *, reduction=0, need_grad=True, sparse=False, requires_grad=True) -> tuple[Any, ...]:
    """The positional arguments of the raw op."""
    h, weight, bias = (leaf(t) if requires_grad else t for t in (case.h, case.weight, case.bias))
    return (
        h, weight, case.target, case.ids, case.log_q, case.target_log_q, bias, case.options.get("class_weight"),
        case.options["scale"], case.options["reg"], case.options.get("ignore_index", -100), reduction, need_grad,
        sparse,
    )  # fmt: skip


OPCHECK = {
    "plain": ({}, {}),
    "no grad": ({"bias": "weight"}, {"need_grad": False, "requires_grad": False}),
    "shared": ({"shared": True, "bias": "weight", "reg": 0.1, "class_weight": True}, {}),
    "bfloat16": ({"dtype": torch.bfloat16, "bias": "float32"}, {"reduction": 1}),
    "empty": ({"rows": 0, "reg": 0.1}, {"reduction": 2}),
    "no samples": ({"samples": 0, "bias": "weight"}, {}),
}


@pytest.mark.parametrize(("options", "flags"), OPCHECK.values(), ids=OPCHECK)
def test_opcheck_forward(backend, options, flags):
    case = make_case(**({"rows": 3, "samples": 4, "dim": 5, "classes": 12} | options)).to(backend.device)
    torch.library.opcheck(OP, op_args(case, **flags))


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("need_rows", "with_bias"), [(True, True), (True, False), (False, False)])
def test_opcheck_backward(backend, shared, need_rows, with_bias, reduction):
    # Every id once: rows behind `count` are unspecified, and opcheck would compare them.
    case = make_case(3, 4, 5, classes=100, shared=shared, reg=0.1)
    case.ids, case.target = torch.arange(case.ids.numel()).reshape(case.ids.shape), torch.tensor([50, 60, 70])
    args = op_args(case.to(backend.device), reduction=reduction, requires_grad=False)
    loss, saved = OP(*args)
    torch.library.opcheck(
        OP_BWD, (torch.randn_like(loss), args[0], args[2], args[3], saved, 100, reduction, need_rows, with_bias)
    )


@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_compile_with_a_dynamic_batch(backend, compiler, sparse):
    if compiler == "inductor" and backend.emulated:
        pytest.skip("what inductor makes of the graph does not depend on who serves the op")
    torch._dynamo.reset()
    graphs: list[Any] = []
    compiles: list[int] = []

    def step(h, weight, bias, target, ids, log_q, target_log_q):
        return functional.negative_sampling(
            2 * h, weight, target, ids, log_q, target_log_q, bias, reg=0.1, sparse=sparse
        ).square()

    def count(graph, example_inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend(compiler)(graph, example_inputs)

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=count)
    for rows in (3, 5, 8):
        case = make_case(rows, 6, 8, bias="weight", seed=rows, reg=0.1).to(backend.device)
        results = []
        for function in (step, compiled):
            h, weight, bias = leaf(case.h), leaf(case.weight), leaf(case.bias)
            loss = function(h, weight, bias, case.target, case.ids, case.log_q, case.target_log_q)
            loss.backward()
            assert weight.grad.is_sparse == sparse
            results.append([loss.detach(), h.grad, weight.grad.to_dense(), bias.grad.to_dense()])
        compiles.append(len(graphs))
        for eager, ours in zip(*results, strict=True):
            torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-5)  # inductor fuses the products
    assert compiles[0] == compiles[-1] > 0, "a new batch size must not compile again"


def test_double_backward_is_a_clear_error(backend):
    case = make_case().to(backend.device)
    h = leaf(case.h)
    with pytest.raises(RuntimeError, match=r"negative_sampling: double backward .* is not supported"):
        torch.autograd.grad(case.call(reduction="mean", h=h), h, create_graph=True)


@pytest.mark.parametrize("shared", [False, True])
def test_autocast_casts_the_hidden_vectors_only(backend, shared):
    case = make_case(5, 8, 16, shared=shared, reg=0.1).to(backend.device)
    small = case.h.bfloat16()
    weight, h = leaf(case.weight), leaf(small)
    with torch.autocast(backend.device.type, torch.bfloat16):
        loss = case.call(reduction="mean", h=h, weight=weight)
        loss.backward()
    assert loss.dtype == weight.grad.dtype == torch.float32
    assert h.grad.dtype == torch.bfloat16
    plain = leaf(case.weight)
    wanted = case.call(reduction="mean", h=small.float(), weight=plain)
    wanted.backward()
    assert torch.equal(loss, wanted)
    assert torch.equal(weight.grad.to_dense(), plain.grad.to_dense())


@pytest.mark.parametrize("shared", [False, True])
def test_no_step_allocates_the_size_of_the_table(shared):
    classes, dim, rows, samples = 100_000, 64, 32, 16
    weight, bias = torch.zeros(classes, dim, requires_grad=True), torch.zeros(classes, requires_grad=True)
    h = torch.randn(rows, dim, requires_grad=True)
    target = torch.randint(0, classes, (rows,))
    ids = torch.randint(0, classes, (samples,) if shared else (rows, samples))

    def step():
        functional.negative_sampling(h, weight, target, ids, torch.zeros(ids.shape), torch.zeros(rows), bias).backward()

    step()
    weight.grad = bias.grad = None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    events = profile.profiler.kineto_results.events()
    allocated = [event.nbytes() for event in events if event.name() == "[memory]" and event.nbytes() > 0]
    assert len(allocated) > 8, "the profiler saw nothing"
    assert max(allocated) <= 4 * rows * (samples + 1) * dim + 4096
