"""The losses that are sums over entries against their specification, on every backend: values, gradients, corners.

What they share with the other fused losses is in test_fused_losses.py.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from entry_cases import LOSSES, make_case, op_args
from loss_cases import check_case, dense, leaf, name_of, pairwise, run_ours

from samplex_cuda import functional

NAN, INF = float("nan"), float("inf")
OP = torch.ops.samplex.entry_loss.default
OP_BWD = torch.ops.samplex.entry_loss_bwd.default
RELATIVE = ("one_vs_each", "augment_reduce")


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
    "loss": list(LOSSES),
    "targets": [1, 2, 4],
    "positives": [False, True],
})  # fmt: skip


# ------------------------------------------------------------------------------------------------ values, gradients
@pytest.mark.parametrize("row", GRID, ids=name_of)
def test_values_and_gradients_match_the_reference(backend, row):
    check_case(make_case(**row), backend)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("targets", [1, 3])
def test_everything_at_once(backend, loss, shared, targets):
    case = make_case(
        7, 40, 24, loss=loss, classes=15, shared=shared, bias="weight", scale=0.7, reg=0.2, class_weight=True,
        ignore="padding", targets=targets,
    )  # fmt: skip
    check_case(case, backend, sparse=shared)


@pytest.mark.parametrize("loss", LOSSES)
def test_many_targets_and_many_draws(backend, loss):
    # More targets than a tile of the CPU kernels or a warp holds, more shared draws than are worked on together.
    check_case(make_case(2, 5, 12, loss=loss, targets=37, classes=60, bias="weight"), backend)
    check_case(make_case(2, 300, 12, loss=loss, targets=2, classes=60, shared=True), backend)


def test_the_formula_by_hand(backend):
    case = make_case(1, 2, 4, classes=10, dtype=torch.float64, reg=0.25, scale=1.5, bias="weight")
    case.target, case.ids = torch.tensor([3]), torch.tensor([[5, 3]])  # the second draw hits the target and counts
    xi = 1.5 * (case.weight @ case.h[0] + case.bias)
    wanted = torch.log1p((-xi[3]).exp()) + 0.25 * (xi[3] + case.target_log_q[0]) ** 2
    for k, q in ((5, case.log_q[0, 0]), (3, case.log_q[0, 1])):
        wanted = wanted + 0.5 * (torch.log1p(xi[k].exp()) + 0.25 * (xi[k] + q) ** 2)
    torch.testing.assert_close(case.to(backend.device).call()[0].cpu(), wanted, rtol=1e-14, atol=1e-14)


def test_the_formulas_of_the_others_by_hand(backend):
    # Two targets 3 and 4, draws 5, 3 and 6; 6 is a known positive. Class weights 2 and 1 of the targets.
    options = {"loss": "", "targets": 2, "classes": 10, "dtype": torch.float64, "scale": 1.5, "bias": "weight"}
    known = (torch.tensor([0, 1]), torch.tensor([6]))
    found = {}
    for loss in LOSSES[1:]:
        case = make_case(1, 3, 4, **options | {"loss": loss})
        case.target, case.ids = torch.tensor([[3, 4]]), torch.tensor([[5, 3, 6]])
        case.options |= {
            "class_weight": torch.ones(10).double().index_fill(0, torch.tensor(3), 2.0),
            "positives": known,
        }
        found[loss] = (case, case.to(backend.device).call()[0].cpu())
    case = found["nce"][0]
    s = 1.5 * (case.weight @ case.h[0] + case.bias)
    z = lambda k, log_q: s[k] - math.log(3) - log_q  # noqa: E731
    nce = F.softplus(-z(3, case.target_log_q[0, 0])) + 0.5 * F.softplus(-z(4, case.target_log_q[0, 1]))
    # A draw of the target counts; the known positive was left out by its caller.
    nce = nce + 1.5 * (F.softplus(z(5, case.log_q[0, 0])) + F.softplus(z(3, case.log_q[0, 1])))
    torch.testing.assert_close(found["nce"][1], nce, rtol=1e-13, atol=0)

    case = found["one_vs_each"][0]
    s, v = 1.5 * (case.weight @ case.h[0] + case.bias), (-case.log_q[0]).exp() / 3
    one = v[0] * (F.softplus(s[5] - s[3]) + 0.5 * F.softplus(s[5] - s[4]))
    torch.testing.assert_close(found["one_vs_each"][1], one, rtol=1e-13, atol=0)

    case = found["augment_reduce"][0]
    s, v = 1.5 * (case.weight @ case.h[0] + case.bias), (-case.log_q[0]).exp() / 3
    total = s[3].exp() + s[4].exp() + v[0] * s[5].exp()
    ratio = total / (2 / 3 * s[3] + 1 / 3 * s[4] + case.log_eta[0]).exp()
    torch.testing.assert_close(found["augment_reduce"][1], 1.5 * (case.log_eta[0] - 1 + ratio), rtol=1e-13, atol=0)
    log_sum = case.to(backend.device).call(return_log_sum=True)[1].cpu()
    torch.testing.assert_close(log_sum[0], ratio.log() + case.log_eta[0], rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("targets", [1, 2])
def test_leading_dimensions_are_flattened(backend, loss, targets):
    case = make_case(6, 5, 8, loss=loss, reg=0.1, targets=targets).to(backend.device)
    flat = case.call()

    def nested(t):
        return t.reshape(2, 3, *t.shape[1:]) if t.shape[0] == 6 else t

    batch = case.map(nested)
    assert batch.call().shape == (2, 3)
    assert torch.equal(batch.call().reshape(-1), flat)
    one = case.map(lambda t: t[0] if t.shape[0] == 6 else t)
    assert one.call().shape == ()
    assert torch.equal(one.call(), flat[0])
    if targets == 1:  # a last dimension of one target is as good
        column = dataclasses.replace(case, target=case.target[:, None])
        assert torch.equal(column.call(), flat)


@pytest.mark.parametrize("shared", [False, True])
def test_a_shape_regression_of_nce(backend, shared):
    # (B, n) taken from (B, 1, n) broadcasts to (B, B, n): each row's draws must meet their own correction only.
    case = make_case(4, 3, 8, loss="nce", shared=shared).to(backend.device)
    together = case.call()
    assert together.shape == (4,)
    alone = [
        dataclasses.replace(
            case, h=case.h[b : b + 1], target=case.target[b : b + 1], target_log_q=case.target_log_q[b : b + 1],
            ids=case.ids if shared else case.ids[b : b + 1], log_q=case.log_q if shared else case.log_q[b : b + 1],
        ).call()
        for b in range(4)
    ]  # fmt: skip
    torch.testing.assert_close(together, torch.cat(alone))


# ------------------------------------------------------------------------------------------------ corners
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("shared", [False, True])
def test_no_samples_leaves_the_positive_term(backend, loss, shared):
    case = make_case(4, 0, 8, loss=loss, shared=shared, bias="weight", reg=0.1)
    check_case(case, backend)
    found = run_ours(case, backend.device)
    if loss in RELATIVE:
        assert not found["d_h"].any()
    else:
        assert (found["loss"] > 0).all()


@pytest.mark.parametrize("loss", RELATIVE)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("dim", [9, 64, 1030])
def test_masked_draws_have_no_part(backend, loss, shared, dim):
    # Hits of the target and known positives: their numbers do not matter, not even a nan.
    case = make_case(1, 6, dim, loss=loss, shared=shared, classes=30, bias="float32")
    case.target = torch.tensor([4])
    case.ids = torch.tensor([4, 7, 11, 4, 9, 7]).view_as(case.ids)
    case.options["positives"] = (torch.tensor([0, 1]), torch.tensor([7]))
    clean = run_ours(case, backend.device)
    case.log_q.view(-1)[[0, 1, 3, 5]] = NAN
    if not shared:  # shared draws are rows of a GEMM
        case.weight[7], case.bias[7] = NAN, NAN
    found = run_ours(case, backend.device)
    for name in ("loss", "d_h"):
        assert torch.equal(found[name], clean[name]), name
    assert not found["d_weight"][7].any()
    case.ids.fill_(4)
    found = run_ours(case, backend.device)
    assert not found["d_h"].any()
    wanted = 0.0 if loss == "one_vs_each" else float(case.log_eta[0] - 1 + (-case.log_eta[0]).exp())
    torch.testing.assert_close(found["loss"].item(), wanted)


def test_one_class_counts_its_hits(backend):
    # C = 1: every draw is the target. p_n = p_D = 1, so the minimum is xi = 0 with loss 2 log 2.
    zero = torch.zeros(3, dtype=torch.int64, device=backend.device)
    h = torch.zeros(3, 4, device=backend.device)
    weight = torch.randn(1, 4, device=backend.device, requires_grad=True)
    loss = functional.negative_sampling(h, weight, zero, zero[:, None], zero[:, None].float())
    loss.backward()
    torch.testing.assert_close(loss.item(), 2 * torch.tensor(2.0).log().item())
    assert not dense(weight.grad).any()


@pytest.mark.parametrize("bad", [NAN, -INF])
@pytest.mark.parametrize(
    ("loss", "where"),
    [
        *((loss, where) for loss in LOSSES for where in ("h", "log_q")),
        ("negative_sampling", "target_log_q"),
        ("nce", "target_log_q"),
        ("augment_reduce", "log_eta"),
    ],
)
@pytest.mark.parametrize(("samples", "dim"), [(1, 9), (8, 64), (40, 1030)])
def test_a_bad_number_spoils_its_own_row_only(backend, loss, bad, where, samples, dim):
    case = make_case(4, samples, dim, loss=loss, classes=1000, reg=0.1)
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
    if not (loss == "nce" and where == "h" and not math.isnan(bad)):  # a sigmoid has no slope above 1
        assert not found["d_h"][2].isfinite().all()
    touched = torch.cat([case.ids[2], case.target[2:3]])
    others = torch.ones(1000, dtype=torch.bool).index_fill_(0, touched, False)
    assert torch.equal(found["d_weight"][others], clean["d_weight"][others])
    assert not found["d_weight"][touched].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [24, 32, 40])
@pytest.mark.parametrize("loss", ["negative_sampling", "nce"])
def test_a_draw_of_score_minus_infinity_has_no_loss(backend, loss, dim, dtype):
    """An infinite weight in the first column: lanes behind the last one must not multiply it by their zeros."""
    case = make_case(4, 8, dim, loss=loss, classes=1000, dtype=dtype)
    case.ids = torch.arange(32).reshape(4, 8)
    case.target = torch.arange(900, 904)
    case.h[2, 0] = 1.0
    case.weight[case.ids[2, 5], 0] = -INF
    found = run_ours(case, backend.device)["loss"]
    case.weight[case.ids[2, 5], 0] = -1e5
    assert torch.equal(found, run_ours(case, backend.device)["loss"])  # exp(-1e5) is 0
    case.ids[2, 5] = 40
    assert not torch.equal(found, run_ours(case, backend.device)["loss"])


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
@pytest.mark.parametrize(
    ("loss", "reg"), [("negative_sampling", 0.0), ("negative_sampling", 0.1), ("nce", 0.0), ("one_vs_each", 0.0)]
)
def test_large_scores_do_not_overflow(backend, loss, scale, reg):
    case = make_case(4, 33, 8, loss=loss, scale=scale, reg=reg)
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


# ------------------------------------------------------------------------------------------------ sparse gradients
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


# ------------------------------------------------------------------------------------------------ torch's own checks
@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("need_rows", "with_bias"), [(True, True), (True, False), (False, False)])
def test_opcheck_backward(backend, shared, need_rows, with_bias, reduction):
    # Every id once: rows behind `count` are unspecified, and opcheck would compare them.
    loss = LOSSES[reduction + shared]
    case = make_case(3, 4, 5, loss=loss, classes=100, shared=shared, reg=0.1)
    case.ids, case.target = torch.arange(case.ids.numel()).reshape(case.ids.shape), torch.tensor([50, 60, 70])
    args = op_args(case.to(backend.device), reduction=reduction, requires_grad=False)
    value, saved = OP(*args)
    torch.library.opcheck(
        OP_BWD,
        (torch.randn_like(value), args[0], args[2], args[3], saved, args[11], 100, reduction, need_rows, with_bias),
    )
