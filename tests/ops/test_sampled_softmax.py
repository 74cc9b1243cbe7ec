"""Fused sampled softmax against its specification, on every backend: values, gradients, corners, sparse rows, bits.

Truth is `samplex_cuda.reference` in float64 on the same (rounded) inputs; the error budget is that of
`samplex_cuda.testing`. For half-precision storage torch's side of the budget computes in float32 and rounds the result
once, which is what the op promises.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from loss_cases import acc, dense, leaf, name_of, pairwise

from samplex_cuda import _native, functional
from samplex_cuda.reference.sampled_softmax import sampled_softmax as reference
from samplex_cuda.testing import assert_close

NAN, INF = float("nan"), float("inf")
OP = torch.ops.samplex.sampled_softmax.default
OP_BWD = torch.ops.samplex.sampled_softmax_bwd.default


@dataclasses.dataclass
class Case:
    """Inputs of one call. `ids` and `log_q` are [B, m] or [m]; `options` are keyword arguments."""

    h: torch.Tensor
    weight: torch.Tensor
    target: torch.Tensor
    ids: torch.Tensor
    log_q: torch.Tensor
    bias: torch.Tensor | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def to(self, device: torch.device) -> Case:
        def move(x):
            if isinstance(x, torch.Tensor):
                return x.to(device)
            return tuple(map(move, x)) if isinstance(x, tuple) else x

        tensors = [move(t) for t in (self.h, self.weight, self.target, self.ids, self.log_q, self.bias)]
        return Case(*tensors, {name: move(value) for name, value in self.options.items()})


def make_case(
    rows=5,
    samples=8,
    dim=16,
    *,
    classes=40,
    targets=1,
    shared=False,
    dtype=torch.float32,
    bias="none",
    scale=1.0,
    absolute=False,
    smoothing=0.0,
    class_weight=False,
    ignore="none",
    positives=False,
    seed=0,
) -> Case:
    """Few classes, so that draws repeat and hit targets. Logits have a spread of about 2."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g)

    def choose(*shape):
        return torch.randint(0, classes, shape, generator=g)

    h, weight = normal(rows, dim).to(dtype), (2 * dim**-0.5 * normal(classes, dim)).to(dtype)
    target = choose(rows, targets)
    options: dict[str, Any] = {"scale": scale, "absolute": absolute, "label_smoothing": smoothing}
    if targets > 1:
        target[:, 1:][torch.rand(rows, targets - 1, generator=g) < 0.4] = -100
    ignored = {"none": None, "padding": -100, "class": 7, "beyond": 1000}[ignore]
    if ignored is not None:
        options["ignore_index"] = ignored
        target[torch.rand(rows, targets, generator=g) < 0.3] = ignored
    shape = (samples,) if shared else (rows, samples)
    ids = choose(*shape)
    log_q = (-1.0 - 3.0 * torch.rand(shape, generator=g)).to(acc(dtype))
    b = None if bias == "none" else normal(classes).to(dtype if bias == "weight" else acc(dtype))
    if class_weight:
        options["class_weight"] = torch.rand(classes, generator=g).to(acc(dtype)) + 0.25
    if positives:
        counts = torch.randint(0, 6, (rows,), generator=g)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
        options["positives"] = (offsets, choose(int(counts.sum())))
    return Case(h, weight, target.squeeze(1) if targets == 1 else target, ids, log_q, b, options)


def upstream(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    kind = acc(case.weight.dtype)
    return torch.randn(case.h.shape[0], generator=g).to(kind), torch.randn(case.h.shape[0], generator=g).to(kind)


def run_ours(case: Case, device="cpu", *, sparse=True) -> dict[str, torch.Tensor]:
    """Loss, lse and all gradients for the random upstream gradients of `upstream`, on the CPU."""
    c = case.to(torch.device(device))
    h, weight, bias = leaf(c.h), leaf(c.weight), leaf(c.bias)
    loss, lse = functional.sampled_softmax(
        h, weight, c.target, c.ids, c.log_q, bias, reduction="none", return_lse=True, sparse=sparse, **c.options
    )
    inputs = [t for t in (h, weight, bias) if t is not None]
    grads = torch.autograd.grad([loss, lse], inputs, [g.to(device) for g in upstream(case)])
    found = {"loss": loss.detach().cpu(), "lse": lse.detach().cpu()}
    return found | {name: dense(g) for name, g in zip(("d_h", "d_weight", "d_bias"), grads, strict=False)}


def run_reference(case: Case, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    h, weight, bias = leaf(case.h, dtype), leaf(case.weight, dtype), leaf(case.bias, dtype)
    options = dict(case.options)
    if "class_weight" in options:
        options["class_weight"] = options["class_weight"].to(dtype)
    loss, lse, _ = reference(h, weight, case.target, case.ids, case.log_q.to(dtype), bias, **options)
    inputs = [t for t in (h, weight, bias) if t is not None]
    grads = torch.autograd.grad([loss, lse], inputs, [g.to(dtype) for g in upstream(case)])
    found = {"loss": loss.detach(), "lse": lse.detach()}
    return found | dict(zip(("d_h", "d_weight", "d_bias"), grads, strict=False))


def largest_logit(case: Case) -> float:
    """Bound on |o|: exp turns an error of eps |o| in a logit into the same relative error of a gradient."""
    if case.h.numel() == 0:
        return 1.0
    s = case.options.get("scale", 1.0) * (case.h.double() @ case.weight.double().T)
    b = 0.0 if case.bias is None else float(case.bias.double().abs().max())
    return float(s.abs().max()) + b + 8.0  # - log_q - log m of make_case


def check_case(case: Case, backend, *, sparse=True) -> None:
    dtype = case.weight.dtype
    ours = run_ours(case, backend.device, sparse=sparse)
    truth = run_reference(case, torch.float64)
    torchs = run_reference(case, acc(dtype))
    kinds = {"d_h": dtype, "d_weight": dtype, "d_bias": None if case.bias is None else case.bias.dtype}
    logit = largest_logit(case)
    for name, value in ours.items():
        wanted = truth[name]
        size = float(wanted.abs().max()) if wanted.numel() else 0.0
        magnitude = logit if name in ("loss", "lse") else logit * size
        same = torchs[name].to(kinds.get(name) or acc(dtype))
        assert_close(name, value, wanted, same, magnitude=magnitude)


GRID = pairwise({
    "dim": [1, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 64, 100, 128, 130, 256, 512, 1024, 1025, 1100],
    "samples": [0, 1, 2, 31, 33, 64, 65],
    "dtype": [torch.float32, torch.bfloat16, torch.float16, torch.float64],
    "ignore": ["none", "padding", "class", "beyond"],
    "rows": [0, 1, 5],
    "bias": ["none", "weight", "float32"],
    "targets": [1, 3],
    "shared": [False, True],
    "scale": [1.0, 2.5],
    "absolute": [False, True],
    "smoothing": [0.0, 0.1],
    "class_weight": [False, True],
    "positives": [False, True],
})  # fmt: skip


# ------------------------------------------------------------------------------------------------ values, gradients
@pytest.mark.parametrize("row", GRID, ids=name_of)
def test_values_and_gradients_match_the_reference(backend, row):
    check_case(make_case(**row), backend)


@pytest.mark.parametrize("targets", [1, 3])
@pytest.mark.parametrize("shared", [False, True])
def test_everything_at_once(backend, shared, targets):
    case = make_case(7, 40, 24, targets=targets, shared=shared, bias="weight", scale=0.7, smoothing=0.2,
                     class_weight=True, ignore="padding", positives=True)  # fmt: skip
    check_case(case, backend)


@pytest.mark.parametrize("targets", [2, 17, 40])
def test_many_targets_span_several_tiles(backend, targets):
    check_case(make_case(3, 20, 9, targets=targets, classes=200, bias="weight"), backend)


@pytest.mark.parametrize("needs", ["h", "weight", "bias", "h weight", "weight bias"])
@pytest.mark.parametrize("shared", [False, True])
def test_each_gradient_is_the_same_when_asked_for_alone(backend, needs, shared):
    case = make_case(shared=shared, bias="weight")
    every = run_ours(case, backend.device)
    c = case.to(backend.device)
    tensors = {"h": c.h.clone(), "weight": c.weight.clone(), "bias": c.bias.clone()}
    for name in needs.split():
        tensors[name].requires_grad_()
    loss, lse = functional.sampled_softmax(
        tensors["h"], tensors["weight"], c.target, c.ids, c.log_q, tensors["bias"], reduction="none", return_lse=True
    )
    torch.autograd.backward([loss, lse], [g.to(backend.device) for g in upstream(case)])
    for name, t in tensors.items():
        assert (t.grad is not None) == (name in needs.split())
        if t.grad is not None:
            assert torch.equal(dense(t.grad), every[f"d_{name}"])


def test_no_grad_gives_the_same_loss(backend):
    case = make_case(smoothing=0.1).to(backend.device)
    call = (case.target, case.ids, case.log_q)
    with torch.no_grad():
        loss = functional.sampled_softmax(case.h, leaf(case.weight), *call, **case.options)
    assert not loss.requires_grad
    assert torch.equal(loss, functional.sampled_softmax(case.h, leaf(case.weight), *call, **case.options).detach())


def test_lse_alone_has_a_gradient(backend):
    case = make_case(bias="weight")
    c = case.to(backend.device)
    h, weight = leaf(c.h), leaf(c.weight)
    _, lse = functional.sampled_softmax(h, weight, c.target, c.ids, c.log_q, c.bias, return_lse=True)
    lse.sum().backward()
    h64, w64 = leaf(case.h, torch.float64), leaf(case.weight, torch.float64)
    reference(h64, w64, case.target, case.ids, case.log_q.double(), case.bias.double())[1].sum().backward()
    torch.testing.assert_close(h.grad.cpu().double(), h64.grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dense(weight.grad).double(), w64.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("weighted", [False, True])
def test_every_class_drawn_once_is_the_full_softmax(backend, reduction, weighted):
    # C - 1 other classes, each once: m = C draws, the one that hits is masked; log_q = -log m cancels the correction.
    classes, dim, rows = 30, 12, 6
    case = make_case(rows, 0, dim, classes=classes, bias="weight", class_weight=weighted, dtype=torch.float64)
    case.target[2] = -100
    case.ids = torch.arange(classes)
    case.log_q = torch.full((classes,), -float(torch.tensor(classes, dtype=torch.float64).log()), dtype=torch.float64)
    full_h, full_w, full_b = leaf(case.h), leaf(case.weight), leaf(case.bias)
    cw = case.options.get("class_weight")
    wanted = F.cross_entropy(1.5 * F.linear(full_h, full_w, full_b), case.target, cw, reduction=reduction)
    wanted.sum().backward()
    c = case.to(backend.device)
    h, weight, bias = leaf(c.h), leaf(c.weight), leaf(c.bias)
    c.options["scale"] = 1.5
    for ids, log_q in ((c.ids, c.log_q), (c.ids.expand(rows, -1), c.log_q.expand(rows, -1))):
        h.grad = weight.grad = bias.grad = None
        loss = functional.sampled_softmax(h, weight, c.target, ids, log_q, bias, reduction=reduction, **c.options)
        loss.sum().backward()
        torch.testing.assert_close(loss.cpu(), wanted, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(h.grad.cpu(), full_h.grad, rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(dense(weight.grad), full_w.grad, rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(dense(bias.grad), full_b.grad, rtol=1e-11, atol=1e-12)


def test_label_smoothing_over_all_classes_is_that_of_cross_entropy(backend):
    classes, rows = 20, 4
    case = make_case(rows, 0, 8, classes=classes, dtype=torch.float64, smoothing=0.3).to(backend.device)
    ids = torch.arange(classes, device=backend.device)
    log_q = torch.full((classes,), 1.0 / classes, dtype=torch.float64, device=backend.device).log()
    ours = functional.sampled_softmax(case.h, case.weight, case.target, ids, log_q, **case.options)
    wanted = F.cross_entropy(F.linear(case.h, case.weight), case.target, label_smoothing=0.3)
    torch.testing.assert_close(ours, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shared", [False, True])
def test_leading_dimensions_are_flattened(backend, shared):
    case = make_case(6, 5, 8, shared=shared, targets=2).to(backend.device)
    flat, flat_lse = functional.sampled_softmax(
        case.h, case.weight, case.target, case.ids, case.log_q, reduction="none", return_lse=True
    )
    shape = lambda t: t.reshape(2, 3, *t.shape[1:])  # noqa: E731
    ids, log_q = (case.ids, case.log_q) if shared else (shape(case.ids), shape(case.log_q))
    nested, lse = functional.sampled_softmax(
        shape(case.h), case.weight, shape(case.target), ids, log_q, reduction="none", return_lse=True
    )
    assert nested.shape == lse.shape == (2, 3)
    assert torch.equal(nested.reshape(-1), flat)
    assert torch.equal(lse.reshape(-1), flat_lse)


def test_one_vector_without_a_batch(backend):
    case = make_case(1).to(backend.device)
    loss = functional.sampled_softmax(case.h, case.weight, case.target, case.ids, case.log_q, reduction="none")
    one = functional.sampled_softmax(
        case.h[0], case.weight, case.target[0], case.ids[0], case.log_q[0], reduction="none"
    )
    assert one.shape == ()
    assert torch.equal(one, loss[0])


@pytest.mark.parametrize("weighted", [False, True])
def test_reductions(backend, weighted):
    case = make_case(6, targets=2, ignore="padding", class_weight=weighted, seed=3)
    c = case.to(backend.device)
    call = (c.h, c.weight, c.target, c.ids, c.log_q)
    rows = functional.sampled_softmax(*call, reduction="none", **c.options)
    _, _, denom = reference(case.h, case.weight, case.target, case.ids, case.log_q, **case.options)
    torch.testing.assert_close(functional.sampled_softmax(*call, reduction="sum", **c.options), rows.sum())
    mean = functional.sampled_softmax(*call, **c.options)
    torch.testing.assert_close(mean.cpu(), rows.sum().cpu() / denom.sum())


def test_strided_tensors_are_as_good_as_packed_ones(backend):
    case = make_case(6, 8, 16, targets=2, bias="weight", class_weight=True, positives=True)
    plain = run_ours(case, backend.device)

    def strided(t):
        wide = torch.stack([t, torch.zeros_like(t)], -1)[..., 0]
        return wide.transpose(0, 1).contiguous().transpose(0, 1) if wide.dim() > 1 else wide

    options = case.options | {
        "class_weight": strided(case.options["class_weight"]),
        "positives": tuple(map(strided, case.options["positives"])),
    }
    tensors = (case.h, case.weight, case.target, case.ids, case.log_q, case.bias)
    other = Case(*map(strided, tensors), options)
    assert not other.weight.is_contiguous()
    assert not other.bias.is_contiguous()
    for name, value in run_ours(other, backend.device).items():
        assert torch.equal(value, plain[name]), name


# ------------------------------------------------------------------------------------------------ corners
@pytest.mark.parametrize("targets", [1, 3])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_all_draws_masked_is_loss_zero_and_no_gradient(backend, targets, shared, smoothing):
    case = make_case(3, 4, 8, targets=targets, shared=shared, bias="weight")
    case.target = torch.full_like(case.target, 5)
    if targets > 1:
        case.target[:, 1] = 6
    case.ids = torch.full_like(case.ids, 5)
    c = case.to(backend.device)
    h, weight, bias = leaf(c.h), leaf(c.weight), leaf(c.bias)
    loss = functional.sampled_softmax(
        h, weight, c.target, c.ids, c.log_q, bias, reduction="none", label_smoothing=smoothing
    )
    loss.sum().backward()
    assert loss.tolist() == [0.0] * 3
    assert not h.grad.any()
    assert not dense(weight.grad).any()
    assert not dense(bias.grad).any()
    if not shared:  # shared draws are rows of a GEMM: listed, though zero
        assert weight.grad._nnz() == bias.grad._nnz() == 0


def test_masked_row_beside_others(backend):
    case = make_case(3, 4, 8)
    case.ids[1] = case.target[1]
    check_case(case, backend)
    assert run_ours(case, backend.device)["loss"][1] == 0


@pytest.mark.parametrize("shared", [False, True])
def test_no_samples(backend, shared):
    case = make_case(4, 0, 8, shared=shared, bias="weight")
    check_case(case, backend)
    assert run_ours(case, backend.device)["loss"].tolist() == [0.0] * 4


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_empty_batch(backend, shared, reduction):
    case = make_case(0, 8, 16, shared=shared, bias="weight").to(backend.device)
    h, weight, bias = leaf(case.h), leaf(case.weight), leaf(case.bias)
    loss = functional.sampled_softmax(h, weight, case.target, case.ids, case.log_q, bias, reduction=reduction)
    loss.sum().backward()
    assert loss.shape == (() if reduction != "none" else (0,))
    assert loss.sum() == 0
    assert h.grad.shape == (0, 16)
    assert weight.grad._nnz() == bias.grad._nnz() == 0


@pytest.mark.parametrize("shared", [False, True])
def test_all_rows_ignored_is_zero(backend, shared):
    case = make_case(4, shared=shared).to(backend.device)
    h, weight = leaf(case.h), leaf(case.weight)
    loss = functional.sampled_softmax(h, weight, torch.full_like(case.target, -100), case.ids, case.log_q)
    loss.backward()
    assert loss == 0
    assert not h.grad.any()
    assert not dense(weight.grad).any()


def test_one_class(backend):
    # The sampler has nothing left to draw: it gives the target with log_q = 0, and the loss masks it.
    h = torch.randn(3, 4, device=backend.device, requires_grad=True)
    weight = torch.randn(1, 4, device=backend.device, requires_grad=True)
    zero = torch.zeros(3, dtype=torch.int64, device=backend.device)
    loss = functional.sampled_softmax(h, weight, zero, zero[:, None], zero[:, None].float())
    loss.backward()
    assert loss == 0
    assert not h.grad.any()
    assert weight.grad._nnz() == 0


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("where", ["h", "log_q"])
@pytest.mark.parametrize("samples", [1, 8, 40])
@pytest.mark.parametrize("absolute", [False, True])
def test_a_bad_number_spoils_its_own_row_only(backend, bad, where, samples, absolute):
    case = make_case(4, samples, 9, classes=1000, absolute=absolute)
    case.ids = torch.arange(4 * samples).reshape(4, samples)
    case.target = torch.arange(900, 904)
    clean = run_ours(case, backend.device)
    getattr(case, where)[2, -1] = bad
    found = run_ours(case, backend.device)
    good = torch.tensor([0, 1, 3])
    for name in ("loss", "lse", "d_h"):
        assert torch.equal(found[name][good], clean[name][good]), name
        assert found[name][good].isfinite().all()
    assert found["loss"][2].isnan()
    assert found["lse"][2].isnan()
    assert not found["d_h"][2].isfinite().all()
    touched = torch.cat([case.ids[2], case.target[2:3]])
    others = torch.ones(1000, dtype=torch.bool).index_fill_(0, touched, False)
    assert torch.equal(found["d_weight"][others], clean["d_weight"][others])
    assert not found["d_weight"][touched].isfinite().all()


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("dim", [1, 16])
def test_a_bad_hidden_row_with_shared_draws(backend, bad, dim):
    case = make_case(4, 8, dim, shared=True)
    clean = run_ours(case, backend.device)
    case.h[2] = bad
    found = run_ours(case, backend.device)
    good = torch.tensor([0, 1, 3])
    assert found["loss"].isnan().tolist() == [False, False, True, False]
    torch.testing.assert_close(found["loss"][good], clean["loss"][good])
    torch.testing.assert_close(found["d_h"][good], clean["d_h"][good])


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_bad_shared_log_q_spoils_the_rows_that_use_it(backend, bad):
    case = make_case(3, 8, 16, shared=True)
    case.ids[3] = 39
    case.ids[:3], case.ids[4:] = case.ids[:3] % 39, case.ids[4:] % 39
    case.target = torch.tensor([1, 39, 2])
    case.log_q[3] = bad
    assert run_ours(case, backend.device)["loss"].isnan().tolist() == [True, False, True]  # row 1 masks the draw


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_masked_draw_may_carry_any_log_q(backend, bad):
    case = make_case(3, 8, 16)
    case.ids[0, 5] = case.target[0]
    clean = run_ours(case, backend.device)
    case.log_q[0, 5] = bad
    found = run_ours(case, backend.device)
    assert all(torch.equal(found[name], clean[name]) for name in clean)


@pytest.mark.parametrize("shared", [False, True])
def test_a_bad_number_in_an_ignored_row_is_not_read(backend, shared):
    case = make_case(4, 8, 16, shared=shared)
    case.target[2] = -100
    clean = run_ours(case, backend.device)
    case.h[2] = NAN
    found = run_ours(case, backend.device)
    for name in ("loss", "lse", "d_h"):
        torch.testing.assert_close(found[name], clean[name])
    assert found["loss"][2] == 0
    if not shared:  # shared draws reduce over the batch by a GEMM, where 0 * nan is nan, as in F.linear's backward
        assert torch.equal(found["d_weight"], clean["d_weight"])


@pytest.mark.parametrize("shared", [False, True])
def test_a_bias_of_minus_infinity_removes_a_drawn_class(backend, shared):
    case = make_case(4, 12, 8, shared=shared, bias="float32", classes=400, seed=2)
    dead = int(case.ids.reshape(-1)[3])
    case.bias[dead] = -INF
    check_case(case, backend)
    found = run_ours(case, backend.device)
    assert not found["d_weight"][dead].any()
    assert found["d_bias"][dead] == 0


@pytest.mark.parametrize("shared", [False, True])
def test_a_target_of_bias_minus_infinity_has_infinite_loss(backend, shared):
    case = make_case(3, 6, 8, shared=shared, bias="float32")
    case.target, case.ids = torch.tensor([1, 2, 3]), case.ids % 30 + 5
    case.bias[2] = -INF
    found = run_ours(case, backend.device)
    assert found["loss"].tolist()[1] == INF
    assert found["loss"][[0, 2]].isfinite().all()
    assert found["lse"].isfinite().all()
    assert found["d_h"].isfinite().all()


def test_large_logits_do_not_overflow(backend):
    for scale in (1e3, -1e3):
        check_case(make_case(4, 33, 8, scale=scale), backend)


def test_ids_beyond_float32_keep_their_value(backend):
    classes = 2**24 + 10
    weight = torch.zeros(classes, 1)
    first = 2**24 + 1  # the first integer float32 cannot hold
    wanted = [first, first + 2, first + 4, classes - 1]
    weight[wanted, 0] = torch.tensor([0.5, -1.0, 2.0, 1.0])
    weight = weight.to(backend.device).requires_grad_()
    ids = torch.tensor([wanted[1:]], device=backend.device)
    target = torch.tensor(wanted[:1], device=backend.device)
    h = torch.ones(1, 1, device=backend.device)
    log_q = torch.full((1, 3), 1.0 / 3, device=backend.device).log()
    loss = functional.sampled_softmax(h, weight, target, ids, log_q)
    loss.backward()
    logits = torch.tensor([[0.5, -1.0, 2.0, 1.0]], requires_grad=True)
    truth = F.cross_entropy(logits, torch.tensor([0]))
    truth.backward()
    torch.testing.assert_close(loss.detach().cpu(), truth.detach())
    assert weight.grad._indices().tolist() == [wanted]
    torch.testing.assert_close(weight.grad._values().cpu()[:, 0], logits.grad[0])


def test_temperature_comes_before_the_correction(backend):
    # s / T - log q, not (s - log q) / T.
    case = make_case(1, 3, 4, classes=10, dtype=torch.float64, scale=4.0)
    case.target, case.ids = torch.tensor([0]), torch.tensor([[1, 2, 3]])
    ours = run_ours(case, backend.device)["loss"]
    s = 4.0 * (case.weight @ case.h[0])
    o = torch.cat([s[:1], s[1:4] - case.log_q[0] - torch.tensor(3.0, dtype=torch.float64).log()])
    torch.testing.assert_close(ours[0], o.logsumexp(0) - o[0], rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("shared", [False, True])
def test_a_masked_hit_adds_nothing_to_the_normaliser(backend, shared):
    # Two real negatives and one hit. log m stays that of all three draws; the hit contributes exactly 0, not exp(0).
    case = make_case(1, 3, 4, classes=10, dtype=torch.float64, shared=shared)
    case.target = torch.tensor([7])
    case.ids = torch.tensor([4, 7, 5]) if shared else torch.tensor([[4, 7, 5]])
    found = run_ours(case, backend.device)
    s = case.weight @ case.h[0]
    log_q = case.log_q.reshape(-1)
    kept = torch.stack([s[7], s[4] - log_q[0], s[5] - log_q[2]])
    kept[1:] -= torch.tensor(3.0, dtype=torch.float64).log()
    torch.testing.assert_close(found["lse"][0], kept.logsumexp(0), rtol=1e-13, atol=1e-13)
    check_case(case, backend)  # forward and backward agree about it


def test_known_positives_are_masked_like_the_target(backend):
    case = make_case(2, 4, 4, classes=20, dtype=torch.float64)
    case.target, case.ids = torch.tensor([0, 1]), torch.tensor([[2, 3, 4, 5], [2, 3, 4, 5]])
    case.options["positives"] = (torch.tensor([0, 2, 2]), torch.tensor([5, 3]))
    found = run_ours(case, backend.device)["lse"]
    s = case.h @ case.weight.T
    o = s[:, 2:6] - case.log_q - torch.tensor(4.0, dtype=torch.float64).log()
    wanted = [torch.stack([s[0, 0], o[0, 0], o[0, 2]]).logsumexp(0), torch.cat([s[1, 1:2], o[1]]).logsumexp(0)]
    torch.testing.assert_close(found, torch.stack(wanted), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("shared", [False, True])
def test_absolute_has_no_gradient_at_zero(backend, shared):
    case = make_case(2, 3, 4, shared=shared, absolute=True, bias="weight")
    case.weight[5:9], case.bias[5:9] = 0, 0
    case.target = torch.tensor([5, 1])
    case.ids = torch.tensor([6, 7, 2]) if shared else torch.tensor([[6, 7, 2], [8, 6, 3]])
    found = run_ours(case, backend.device)
    assert not found["d_weight"][5:9].any()
    assert not found["d_bias"][5:9].any()
    assert found["d_weight"][2].all()
    check_case(case, backend)


def test_an_infinite_upstream_gradient_touches_no_row_outside(backend):
    # Coefficients of an ignored row become inf * 0 = nan; its target is no class, and must not become a row.
    case = make_case(3, 4, 8).to(backend.device)
    weight = leaf(case.weight)
    case.target[1] = 1000
    loss = functional.sampled_softmax(
        case.h, weight, case.target, case.ids, case.log_q, ignore_index=1000, reduction="none"
    )
    loss.backward(torch.tensor([1.0, INF, 1.0], device=backend.device))
    assert int(weight.grad._indices().max()) < 40


# ------------------------------------------------------------------------------------------------ sparse gradients
@pytest.mark.parametrize("shared", [False, True])
def test_sparse_gradients_are_coalesced_and_equal_the_dense_ones(backend, shared):
    case = make_case(5, 12, 16, shared=shared, bias="weight", ignore="padding").to(backend.device)
    grads = {}
    for sparse in (True, False):
        weight, bias = leaf(case.weight), leaf(case.bias)
        loss = functional.sampled_softmax(
            case.h, weight, case.target, case.ids, case.log_q, bias, sparse=sparse, **case.options
        )
        grads[sparse] = torch.autograd.grad(loss, (weight, bias))
    for ours, full in zip(grads[True], grads[False], strict=True):
        assert ours.is_sparse
        assert ours.is_coalesced()
        assert not full.is_sparse
        ids = ours._indices()[0]
        assert ids.dtype == torch.int64
        assert (ids.diff() > 0).all()
        assert torch.equal(ours.to_dense(), full)
    used = case.target[case.target >= 0]
    drawn = case.ids.expand(5, -1)[case.target >= 0]
    wanted = torch.cat([used, drawn.reshape(-1)]).unique()
    assert torch.equal(grads[True][0]._indices()[0], wanted)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # of torch.optim itself
@pytest.mark.parametrize("optimizer", ["SGD", "Adagrad", "SparseAdam"])
def test_torchs_optimizers_take_the_sparse_gradient(backend, optimizer):
    make = getattr(torch.optim, optimizer)
    steps, tables = 5, {}
    cases = [make_case(5, 12, 16, bias="weight", seed=s).to(backend.device) for s in range(steps)]
    for sparse in (True, False):
        weight, bias = leaf(cases[0].weight), leaf(cases[0].bias)
        opt = make([weight, bias], lr=0.05)
        for case in cases:
            opt.zero_grad()
            loss = functional.sampled_softmax(case.h, weight, case.target, case.ids, case.log_q, bias, sparse=sparse)
            loss.backward()
            if optimizer == "SparseAdam" and not sparse:
                weight.grad, bias.grad = weight.grad.to_sparse(1), bias.grad.to_sparse(1)
            opt.step()
        tables[sparse] = weight.detach(), bias.detach()
    assert not torch.equal(tables[True][0], cases[0].weight)
    for ours, full in zip(tables[True], tables[False], strict=True):
        torch.testing.assert_close(ours, full, rtol=1e-6, atol=1e-6)


def test_gradients_accumulate_over_two_backwards(backend):
    a, b = (make_case(4, 6, 8, seed=s).to(backend.device) for s in (0, 1))
    weight = leaf(a.weight)
    separate = []
    for case in (a, b):
        weight.grad = None
        functional.sampled_softmax(case.h, weight, case.target, case.ids, case.log_q).backward()
        separate.append(weight.grad.to_dense())
    weight.grad = None
    for case in (a, b):
        functional.sampled_softmax(case.h, weight, case.target, case.ids, case.log_q).backward()
    torch.testing.assert_close(weight.grad.to_dense(), separate[0] + separate[1])


def test_grad_knows_that_it_is_coalesced_and_a_sum_of_two_is_right(backend):
    # Autograd's accumulation forgets the flag; an optimizer would sort again. It must not be set on a sum that is not.
    a, b = (make_case(4, 6, 8, seed=s).to(backend.device) for s in (0, 1))
    weight = leaf(a.weight)
    losses = [functional.sampled_softmax(c.h, weight, c.target, c.ids, c.log_q) for c in (a, b)]
    losses[0].backward(retain_graph=True)
    assert weight.grad.is_coalesced()
    first = dense(weight.grad)
    weight.grad = None
    losses[1].backward(retain_graph=True)
    second = dense(weight.grad)
    weight.grad = None
    sum(losses).backward()  # one graph that uses the table twice
    if weight.grad.is_coalesced():
        ids = weight.grad._indices()[0]
        assert (ids.diff() > 0).all()
    torch.testing.assert_close(dense(weight.grad), first + second)


def test_a_graph_can_be_walked_twice(backend):
    case = make_case().to(backend.device)
    weight = leaf(case.weight)
    loss = functional.sampled_softmax(case.h, weight, case.target, case.ids, case.log_q)
    loss.backward(retain_graph=True)
    first = weight.grad.to_dense()
    weight.grad = None
    loss.backward()
    assert torch.equal(weight.grad.to_dense(), first)


# ------------------------------------------------------------------------------------------------ determinism
@pytest.mark.parametrize("shared", [False, True])
def test_same_bits_twice(backend, shared):
    case = make_case(8, 33, 20, shared=shared, bias="weight", smoothing=0.1, targets=2)
    one, two = run_ours(case, backend.device), run_ours(case, backend.device)
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_same_bits_for_any_number_of_threads(simd_level, dtype):
    # Enough rows for two shares of the forward and enough entries for two chunks of the row reduction.
    case = make_case(260, 33, 40, classes=500, bias="weight", dtype=dtype, smoothing=0.1)
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
def test_simd_levels_agree_with_scalar(simd_level, dtype, dim, shared):
    case = make_case(3, dim % 19, dim, dtype=dtype, bias="weight", smoothing=0.1, shared=shared)
    ours = run_ours(case)
    _native.set_simd_level("scalar")
    scalar = run_ours(case)
    _native.set_simd_level(simd_level)
    logit = largest_logit(case)
    for name, value in ours.items():
        wanted = scalar[name]
        size = 1.0 if name in ("loss", "lse") else float(wanted.abs().max())
        assert_close(name, value, wanted.double(), wanted, magnitude=logit * size)


@pytest.mark.parametrize("samples", range(20))
def test_simd_levels_around_the_tile(simd_level, samples):
    case = make_case(2, samples, 24, bias="weight", targets=2)
    truth, torchs, ours = run_reference(case, torch.float64), run_reference(case, torch.float32), run_ours(case)
    for name, value in ours.items():
        size = 1.0 if name in ("loss", "lse") else float(truth[name].abs().max())
        assert_close(name, value, truth[name], torchs[name], magnitude=largest_logit(case) * size)


# ------------------------------------------------------------------------------------------------ torch's own checks
GRADCHECK = {
    "per row": {},
    "shared": {"shared": True},
    "targets": {"targets": 3, "smoothing": 0.2, "class_weight": True},
    "absolute": {"absolute": True, "scale": 0.8},
    "ignored": {"ignore": "padding", "positives": True, "shared": True, "smoothing": 0.1},
}


@pytest.mark.parametrize("options", GRADCHECK.values(), ids=GRADCHECK)
def test_gradcheck(backend, options):
    case = make_case(3, 5, 4, classes=9, dtype=torch.float64, bias="weight", **options).to(backend.device)

    def call(h, weight, bias):
        return functional.sampled_softmax(
            h, weight, case.target, case.ids, case.log_q, bias,
            reduction="none", return_lse=True, sparse=False, **case.options,
        )  # fmt: skip

    assert torch.autograd.gradcheck(call, (leaf(case.h), leaf(case.weight), leaf(case.bias)))


def op_args(
    case: Case, *, reduction=0, need_grad=True, with_lse=True, sparse=False, requires_grad=True
) -> tuple[Any, ...]:
    """The positional arguments of the raw op."""
    h, weight, bias = (leaf(t) if requires_grad else t for t in (case.h, case.weight, case.bias))
    offsets, known = case.options.get("positives", (None, None))
    return (
        h, weight, case.target, case.ids, case.log_q, bias, case.options.get("class_weight"), offsets, known,
        case.options["scale"], case.options["label_smoothing"], case.options.get("ignore_index", -100),
        reduction, case.options["absolute"], need_grad, with_lse, sparse,
    )  # fmt: skip


OPCHECK = {
    "plain": ({}, {}),
    "no grad": ({"bias": "weight"}, {"need_grad": False, "requires_grad": False}),
    "shared": ({"shared": True, "bias": "weight", "smoothing": 0.1, "class_weight": True}, {}),
    "targets": ({"targets": 3, "positives": True, "absolute": True, "scale": 2.0}, {}),
    "bfloat16": ({"dtype": torch.bfloat16, "bias": "float32"}, {}),
    "empty": ({"rows": 0}, {}),
    "no samples": ({"samples": 0, "bias": "weight"}, {}),
}


@pytest.mark.parametrize(("options", "flags"), OPCHECK.values(), ids=OPCHECK)
def test_opcheck_forward(backend, options, flags):
    case = make_case(**({"rows": 3, "samples": 4, "dim": 5, "classes": 12} | options)).to(backend.device)
    torch.library.opcheck(OP, op_args(case, **flags))


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    ("need_rows", "with_bias", "with_lse"), [(True, True, True), (True, False, False), (False, False, True)]
)
def test_opcheck_backward(backend, shared, need_rows, with_bias, with_lse, reduction):
    # Every id once: rows behind `count` are unspecified, and opcheck would compare them.
    case = make_case(3, 4, 5, classes=100, shared=shared, smoothing=0.1)
    case.ids, case.target = torch.arange(case.ids.numel()).reshape(case.ids.shape), torch.tensor([50, 60, 70])
    case = case.to(backend.device)
    args = op_args(case, reduction=reduction, with_lse=with_lse, requires_grad=False)
    loss, lse, saved = OP(*args)
    grads = torch.randn_like(loss), torch.randn_like(lse) if with_lse else None
    torch.library.opcheck(
        OP_BWD, (*grads, args[0], args[2], args[3], saved, 100, reduction, with_lse, need_rows, with_bias)
    )


@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_compile_with_a_dynamic_batch(backend, compiler, sparse):
    if compiler == "inductor" and backend.emulated:
        pytest.skip("what inductor makes of the graph does not depend on who serves the op")
    torch._dynamo.reset()
    graphs: list[Any] = []
    compiles: list[int] = []

    def step(h, weight, bias, target, ids, log_q):
        return functional.sampled_softmax(2 * h, weight, target, ids, log_q, bias, sparse=sparse).square()

    def count(graph, example_inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend(compiler)(graph, example_inputs)

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=count)
    for rows in (3, 5, 8):
        case = make_case(rows, 6, 8, bias="weight", seed=rows).to(backend.device)
        results = []
        for function in (step, compiled):
            h, weight, bias = leaf(case.h), leaf(case.weight), leaf(case.bias)
            loss = function(h, weight, bias, case.target, case.ids, case.log_q)
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
    loss = functional.sampled_softmax(h, case.weight, case.target, case.ids, case.log_q)
    with pytest.raises(RuntimeError, match=r"sampled_softmax: double backward .* is not supported"):
        torch.autograd.grad(loss, h, create_graph=True)


# ------------------------------------------------------------------------------------------------ autocast, memory
@pytest.mark.parametrize("shared", [False, True])
def test_autocast_casts_the_hidden_vectors_only(backend, shared):
    case = make_case(5, 8, 16, shared=shared, bias="weight").to(backend.device)
    small = case.h.bfloat16()
    weight, bias, h = leaf(case.weight), leaf(case.bias), leaf(small)
    with torch.autocast(backend.device.type, torch.bfloat16):
        loss = functional.sampled_softmax(h, weight, case.target, case.ids, case.log_q, bias)
        loss.backward()  # inside: the backward of an autocast region may run under it
    assert loss.dtype == weight.grad.dtype == bias.grad.dtype == torch.float32
    assert h.grad.dtype == torch.bfloat16
    plain_w, plain_b = leaf(case.weight), leaf(case.bias)
    plain = functional.sampled_softmax(small.float(), plain_w, case.target, case.ids, case.log_q, plain_b)
    plain.backward()
    assert torch.equal(loss, plain)
    assert torch.equal(weight.grad.to_dense(), plain_w.grad.to_dense())
    assert torch.equal(bias.grad.to_dense(), plain_b.grad.to_dense())


def test_autocast_with_a_half_table(backend):
    case = make_case(5, 8, 16, dtype=torch.bfloat16).to(backend.device)
    h = leaf(case.h.float())
    with torch.autocast(backend.device.type, torch.bfloat16):
        loss = functional.sampled_softmax(h, leaf(case.weight), case.target, case.ids, case.log_q)
    loss.backward()
    assert loss.dtype == h.grad.dtype == torch.float32


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_no_step_allocates_the_size_of_the_table(shared, autocast):
    classes, dim, rows, samples = 100_000, 64, 32, 16
    weight = torch.zeros(classes, dim, requires_grad=True)
    bias = torch.zeros(classes, requires_grad=True)
    h = torch.randn(rows, dim, dtype=torch.bfloat16 if autocast else torch.float32, requires_grad=True)
    target = torch.randint(0, classes, (rows,))
    ids = torch.randint(0, classes, (samples,) if shared else (rows, samples))
    log_q = torch.zeros(ids.shape)

    def step():
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            functional.sampled_softmax(h, weight, target, ids, log_q, bias).backward()

    step()
    weight.grad = bias.grad = None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    events = profile.profiler.kineto_results.events()
    allocated = [event.nbytes() for event in events if event.name() == "[memory]" and event.nbytes() > 0]
    assert len(allocated) > 8, "the profiler saw nothing"
    # A handful of [B, d], [B, m] and [rows, d] tensors; the smallest table, one byte a class, would be 100 kB.
    entries = rows * (samples + 1)
    assert max(allocated) <= 4 * entries * dim + 4096
    assert max(allocated) < classes * dim / 8
