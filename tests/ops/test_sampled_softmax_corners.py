"""Fused sampled softmax at its corners: nothing to sum, masks, bad numbers, infinities, huge ids."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from loss_cases import check_case, dense, leaf, run_ours
from softmax_cases import make_case

from samplex_cuda import functional

NAN, INF = float("nan"), float("inf")


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


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("m", [0, 5])
@pytest.mark.parametrize("scale", [0.0, -0.0])
def test_a_loss_scale_of_zero(backend, shared, m, scale):
    """A GradScaler that has halved its scale to nothing: the update is left out, and no gradient of lse is read."""
    g = torch.Generator().manual_seed(3)
    h, weight = torch.randn(2, 16, generator=g).to(backend.device), torch.randn(9, 16, generator=g).to(backend.device)
    target = torch.tensor([0, 4], device=backend.device)
    ids = torch.randint(9, (m,) if shared else (2, m), generator=g).to(backend.device)
    _, _, saved = torch.ops.samplex.sampled_softmax(
        h, weight, target, ids, torch.full(ids.shape, -2.0, device=backend.device), None, None, None, None, 1.0, 0.0,
        -100, 1, False, True, False, True, True,
    )  # fmt: skip
    one, found_inf = torch.ones((), device=backend.device), torch.zeros((), device=backend.device)
    grad_scale = torch.tensor(scale, device=backend.device)
    coefs = torch.ops.samplex.loss_entries(
        one, None, h, target, ids, saved, 1, False, False, False, grad_scale, found_inf
    )[1]
    assert float(found_inf) == 1.0
    assert not bool(coefs.isfinite().any())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("bias", [False, True])
def test_rows_without_columns(backend, dtype, bias):
    """d = 0: the logits are the biases, and no row is read, which may be a null pointer."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    h, weight = (torch.empty(n, 0, dtype=dtype, device=backend.device).requires_grad_() for n in (3, 9))
    b = torch.arange(9.0, device=backend.device).to(wide) if bias else None
    ids, target = torch.tensor([[1, 2], [3, 4], [5, 6]]), torch.tensor([0, 8, 7])
    log_q = torch.full((3, 2), -1.0, dtype=wide)
    given = [t.to(backend.device) for t in (target, ids, log_q)]
    loss = functional.sampled_softmax(h, weight, *given, b, reduction="none")
    s = torch.arange(9.0, dtype=torch.float64) * bias
    entries = torch.cat([s[target, None], s[ids] + 1.0 - torch.tensor(2.0).double().log()], 1)
    torch.testing.assert_close(loss.detach().cpu().double(), entries.logsumexp(1) - s[target], atol=1e-2, rtol=1e-2)
    loss.sum().backward()
    assert h.grad.shape == (3, 0)
