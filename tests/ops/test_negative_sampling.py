"""Fused negative sampling against its specification, on every backend: values, gradients, corners.

What it shares with the other fused loss is in test_fused_losses.py.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from loss_cases import check_case, dense, leaf, name_of, pairwise, run_ours
from noise_cases import make_case, op_args

from samplex_cuda import functional

NAN, INF = float("nan"), float("inf")
OP = torch.ops.samplex.negative_sampling.default
OP_BWD = torch.ops.samplex.negative_sampling_bwd.default


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


# ------------------------------------------------------------------------------------------------ corners
@pytest.mark.parametrize("shared", [False, True])
def test_no_samples_leaves_the_positive_term(backend, shared):
    case = make_case(4, 0, 8, shared=shared, bias="weight", reg=0.1)
    check_case(case, backend)
    assert (run_ours(case, backend.device)["loss"] > 0).all()


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
    case = make_case(3, 4, 5, classes=100, shared=shared, reg=0.1)
    case.ids, case.target = torch.arange(case.ids.numel()).reshape(case.ids.shape), torch.tensor([50, 60, 70])
    args = op_args(case.to(backend.device), reduction=reduction, requires_grad=False)
    loss, saved = OP(*args)
    torch.library.opcheck(
        OP_BWD, (torch.randn_like(loss), args[0], args[2], args[3], saved, 100, reduction, need_rows, with_bias)
    )
