"""The three products of shared draws: how many digits they keep with tables of 16 bits, on every backend."""

from __future__ import annotations

import pytest
import torch

BATCH, CLASSES, DIM = 5, 60, 24


def run(device, dtype, draws, targets=None, reduction=1, batch=BATCH, upstream=1.0, with_lse=False):
    """Loss and gradients of one step with shared draws, and the same in float64 from the very numbers it was given."""
    made = torch.Generator().manual_seed(draws)
    h = torch.randn(batch, DIM, generator=made).to(dtype)
    weight = torch.randn(CLASSES, DIM, generator=made).to(dtype)
    bias = torch.randn(CLASSES, generator=made).to(dtype)
    shape = (batch,) if targets is None else (batch, targets)
    y = torch.randint(CLASSES // 2, shape, generator=made)
    ids = CLASSES // 2 + torch.randperm(CLASSES // 2, generator=made)[:draws]
    log_q = torch.log(torch.rand(draws, generator=made) + 0.1)
    of_lse = torch.randn(batch, generator=made) if with_lse else None

    def step(h, weight, bias, log_q):
        arguments = (h, weight, y.to(h.device), ids.to(h.device), log_q, bias, None, None, None)
        loss, _, saved = torch.ops.samplex.sampled_softmax(
            *arguments, 1.0, 0.0, -100, reduction, False, True, with_lse, True, True
        )
        up = torch.full_like(loss, upstream)
        up_lse = None if of_lse is None else of_lse.to(h.device, loss.dtype)
        return loss, *torch.ops.samplex.sampled_softmax_bwd(
            up, up_lse, h, y.to(h.device), ids.to(h.device), saved, CLASSES, reduction, with_lse, True, True
        )

    given = (h, weight, bias, log_q)
    return [t.cpu() for t in step(*(t.to(device) for t in given))], step(*(t.double() for t in given))


def relative(got, exact):
    return float((got.double() - exact.double()).abs().max() / exact.double().abs().max())


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("draws", [1, 7, 8, 29])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_of_a_table_cost_no_digits_of_its_gradient(backend, dtype, draws, reduction):
    """Products of bf16 numbers are exact in float; coefficients of 8 digits alone would be off by 2e-3."""
    (loss, _, row_ids, rows, bias, count), exact = run(backend.device, dtype, draws, reduction=reduction)
    torch.testing.assert_close(loss.double(), exact[0], rtol=2e-6, atol=2e-6)
    assert torch.equal(row_ids, exact[2])
    n = int(count)
    assert relative(rows[:n], exact[3][:n]) < 3e-5
    assert relative(bias[:n], exact[4][:n]) < 3e-6


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
    assert relative(rows[: int(count)], exact[3][: int(count)]) < 3e-5


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
    assert relative(rows[:n], exact[3][:n]) < 3e-6
    assert relative(bias[:n], exact[4][:n]) < 3e-6


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
