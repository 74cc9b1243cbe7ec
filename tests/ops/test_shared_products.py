"""The three products of shared draws: how many digits they keep, on every backend and at every SIMD level.

A CPU with vectors makes them by csrc/common/panels.h, in panels of 32 columns, blocks of 128 terms
and tiles of 6 or 8 rows: sizes below, at and above each of these.
"""

from __future__ import annotations

import math

import pytest
import torch

BATCH, CLASSES, DIM = 5, 60, 24


def run(
    device,
    dtype,
    draws,
    targets=None,
    reduction=1,
    batch=BATCH,
    upstream=1.0,
    with_lse=False,
    dim=DIM,
    need_hidden=True,
):
    """Loss and gradients of one step with shared draws, and those of plain torch in float64, from the same numbers."""
    made = torch.Generator().manual_seed(draws)
    classes = max(CLASSES, 2 * draws)
    h = torch.randn(batch, dim, generator=made).to(dtype)
    weight = torch.randn(classes, dim, generator=made).to(dtype)
    bias = torch.randn(classes, generator=made).to(dtype)
    shape = (batch,) if targets is None else (batch, targets)
    y = torch.randint(classes // 2, shape, generator=made)
    ids = classes // 2 + torch.randperm(classes // 2, generator=made)[:draws]  # none of them is a target
    acc = torch.float64 if dtype is torch.float64 else torch.float32
    log_q = torch.log(torch.rand(draws, generator=made) + 0.1).to(acc)
    of_lse = torch.randn(batch, generator=made).to(acc)
    exact = plain_torch(h, weight, bias, y, ids, log_q, reduction, upstream, of_lse if with_lse else None)
    h, weight, bias, y, ids, log_q, of_lse = (t.to(device) for t in (h, weight, bias, y, ids, log_q, of_lse))
    loss, _, saved = torch.ops.samplex.sampled_softmax(
        h, weight, y, ids, log_q, bias, None, None, None, 1.0, 0.0, -100, reduction, False, True, with_lse, True,
        need_hidden,
    )  # fmt: skip
    got = torch.ops.samplex.sampled_softmax_bwd(
        torch.full_like(loss, upstream), of_lse if with_lse else None, h, y, ids, saved, classes, reduction, with_lse,
        True, True,
    )  # fmt: skip
    return [t.cpu() for t in (loss, *got)], exact


def plain_torch(h, weight, bias, y, ids, log_q, reduction, upstream, of_lse):
    """Loss, gradient of h, classes with a gradient, their rows and biases; float64, no kernel of ours."""
    h, weight, bias = (t.double().clone().requires_grad_() for t in (h, weight, bias))
    of_targets = (h[:, None] * weight[y.view(len(h), -1)]).sum(-1) + bias[y.view(len(h), -1)]
    of_draws = h @ weight[ids].T + bias[ids] - log_q.double() - math.log(len(ids))
    lse = torch.logsumexp(torch.cat([of_targets, of_draws], 1), 1)
    loss = lse - of_targets.mean(1)
    loss = [loss, loss.mean(), loss.sum()][reduction]
    total = (upstream * loss).sum() + (0.0 if of_lse is None else (of_lse.double() * lse).sum())
    d_hidden, d_weight, d_bias = torch.autograd.grad(total, (h, weight, bias))
    classes = torch.unique(torch.cat([y.flatten(), ids]))
    return loss.detach(), d_hidden, classes, d_weight[classes], d_bias[classes]


def relative(got, exact):
    return float((got.double() - exact.double()).abs().max() / exact.double().abs().max())


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("draws", [1, 7, 8, 29])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_of_a_table_cost_no_digits_of_its_gradient(backend, dtype, draws, reduction):
    """Products of bf16 numbers are exact in float; coefficients of 8 digits alone would be off by 2e-3."""
    (loss, _, row_ids, rows, bias, count), exact = run(backend.device, dtype, draws, reduction=reduction)
    torch.testing.assert_close(loss.double(), exact[0], rtol=2e-6, atol=2e-6)
    n = int(count)
    assert torch.equal(row_ids[:n], exact[2])
    assert relative(rows[:n], exact[3]) < 3e-5
    assert relative(bias[:n], exact[4]) < 3e-6


def test_the_gradient_of_h_is_rounded_once(backend):
    """It is stored in 16 bits: half a unit in the last place, and no more than a bit of it from the products."""
    (_, d_hidden, *_), exact = run(backend.device, torch.bfloat16, 29)
    nearest = exact[1].to(torch.bfloat16)
    off = (d_hidden.float() - exact[1].float()).abs() - (nearest.float() - exact[1].float()).abs()
    assert float((off / exact[1].abs().max()).max()) < 3e-5


@pytest.mark.parametrize("targets", [1, 3, 16, 17])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_number_of_targets_before_the_aligned_draws(backend, dtype, targets):
    (loss, _, _, rows, _, count), exact = run(backend.device, dtype, 11, targets=targets)
    torch.testing.assert_close(loss.double(), exact[0], rtol=2e-6, atol=2e-6)
    assert relative(rows[: int(count)], exact[3]) < 3e-5


@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize(("batch", "draws"), [(1, 3), (33, 8), (70, 21)])
def test_bias_gradients_are_sums_over_the_batch(backend, batch, draws, reduction, with_lse):
    """More rows than a block has threads for a column; columns that do not fill a block; a gradient from above."""
    got, exact = run(
        backend.device, torch.float32, draws, reduction=reduction, batch=batch, upstream=-0.75, with_lse=with_lse
    )
    loss, d_hidden, _, rows, bias, count = got
    n = int(count)
    torch.testing.assert_close(loss.double(), exact[0], rtol=2e-6, atol=2e-6)
    assert relative(d_hidden, exact[1]) < 3e-6
    assert relative(rows[:n], exact[3]) < 3e-6
    assert relative(bias[:n], exact[4]) < 3e-6


def test_a_zero_upstream_gradient_wins_over_nan(backend):
    """Shared draws: nobody asked for a gradient of this loss, whatever its coefficients are."""
    h, weight = torch.randn(4, 8), torch.randn(9, 8)
    weight[5] = float("nan")
    h, weight = h.to(backend.device), weight.to(backend.device)
    y, ids = torch.arange(4, device=backend.device), torch.tensor([5, 6, 7], device=backend.device)
    log_q, bias = torch.full((3,), -2.0, device=backend.device), torch.zeros(9, device=backend.device)
    loss, _, saved = torch.ops.samplex.sampled_softmax(
        h, weight, y, ids, log_q, bias, None, None, None, 1.0, 0.0, -100, 1, False, True, False, True, True
    )
    assert loss.isnan()
    zero = torch.zeros_like(loss)
    d_hidden, _, rows, row_bias, count = torch.ops.samplex.sampled_softmax_bwd(
        zero, None, h, y, ids, saved, 9, 1, False, True, True
    )
    assert not d_hidden.any()
    assert not rows[: int(count)].any()
    assert not row_bias[: int(count)].any()


# ------------------------------------------------------------------------------------------------ tiles of a CPU
SIZES = [
    # batch, draws, dim
    (1, 1, 1),
    (5, 31, 7),
    (6, 32, 8),
    (7, 33, 31),
    (8, 64, 32),
    (23, 65, 33),
    (49, 127, 130),
    (48, 128, 128),
    (97, 300, 129),
    (130, 17, 260),
]


@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(("batch", "draws", "dim"), SIZES)
def test_products_of_any_size(simd_level, batch, draws, dim, dtype, with_lse):
    got, exact = run("cpu", dtype, draws, batch=batch, dim=dim, with_lse=with_lse)
    loss, d_hidden, row_ids, rows, bias, count = got
    n = int(count)
    torch.testing.assert_close(loss.double(), exact[0], rtol=1e-5, atol=1e-5)
    assert torch.equal(row_ids[:n], exact[2])
    if dtype in (torch.float32, torch.float64):
        assert relative(d_hidden, exact[1]) < 1e-5
    else:
        assert relative(d_hidden, exact[1]) < 2.0**-8
    assert relative(rows[:n], exact[3]) < 3e-5
    assert relative(bias[:n], exact[4]) < 1e-5


def parts_of(got):
    loss, d_hidden, row_ids, rows, bias, count = got
    n = int(count)
    return loss, d_hidden, row_ids[:n], rows[:n], bias[:n]


@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize(("batch", "draws", "dim"), [(8, 2048, 128), (100, 300, 129), (260, 64, 33)])
def test_same_bits_of_products_for_any_number_of_threads(simd_level, batch, draws, dim, with_lse):
    """The first has too few rows to share out: threads then take columns. At the scalar level torch multiplies."""
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            found.append(parts_of(run("cpu", torch.float32, draws, batch=batch, dim=dim, with_lse=with_lse)[0]))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        if simd_level == "scalar":
            assert all(relative(a, b) < 1e-5 for a, b in zip(found[0], other, strict=True))
        else:
            assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("draws", [3, 200])
def test_rows_of_products_without_a_gradient_of_h(simd_level, draws):
    got, exact = run("cpu", torch.float32, draws, batch=50, dim=40, need_hidden=False)
    n = int(got[-1])
    assert relative(got[3][:n], exact[3]) < 1e-5


@pytest.mark.parametrize("draws", [3, 200])
def test_an_ignored_row_brings_no_nan_into_the_products(simd_level, draws):
    """0 * nan is nan: a row without a loss is taken out of the product over the batch."""
    h, weight = torch.randn(50, 40), torch.randn(500, 40)
    y, ids = torch.arange(50), torch.randint(100, 500, (draws,))
    log_q = torch.full((draws,), -2.0)
    y[7] = -100
    found = []
    for value in (0.0, float("nan")):
        h[7] = value
        loss, _, saved = torch.ops.samplex.sampled_softmax(
            h, weight, y, ids, log_q, None, None, None, None, 1.0, 0.0, -100, 1, False, True, False, True, True
        )
        d_hidden, _, rows, _, count = torch.ops.samplex.sampled_softmax_bwd(
            torch.ones(()), None, h, y, ids, saved, 500, 1, False, True, False
        )
        assert not d_hidden[7].any()
        found.append((loss, d_hidden, rows[: int(count)]))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert found[0][2].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_width_zero_have_products_of_zero(simd_level, dtype):
    """No number is summed, and none may be left from memory that was used before."""
    for _ in range(20):
        torch.ops.samplex.sampled_softmax(  # leaves numbers in the memory of products
            torch.randn(BATCH, 8), torch.randn(CLASSES, 8), torch.arange(BATCH), torch.arange(20), torch.zeros(20),
            None, None, None, None, 1.0, 0.0, -100, 1, False, True, False, True, True,
        )  # fmt: skip
        got, exact = run("cpu", dtype, 7, dim=0)
        torch.testing.assert_close(got[0].double(), exact[0].double(), rtol=1e-5, atol=1e-6)
