"""The three products of shared draws: how many digits they keep with tables of 16 bits, on every backend."""

from __future__ import annotations

import pytest
import torch

BATCH, CLASSES, DIM = 5, 60, 24


def run(device, dtype, draws, targets=None, reduction=1):
    """Loss and gradients of one step with shared draws, and the same in float64 from the very numbers it was given."""
    made = torch.Generator().manual_seed(draws)
    h = torch.randn(BATCH, DIM, generator=made).to(dtype)
    weight = torch.randn(CLASSES, DIM, generator=made).to(dtype)
    shape = (BATCH,) if targets is None else (BATCH, targets)
    y = torch.randint(CLASSES // 2, shape, generator=made)
    ids = CLASSES // 2 + torch.randperm(CLASSES // 2, generator=made)[:draws]
    log_q = torch.log(torch.rand(draws, generator=made) + 0.1)

    def step(h, weight, log_q):
        arguments = (h, weight, y.to(h.device), ids.to(h.device), log_q, None, None, None, None)
        forward = torch.ops.samplex.sampled_softmax(
            *arguments, 1.0, 0.0, -100, reduction, False, True, False, True, True
        )
        loss, _, saved = forward
        up = torch.ones_like(loss)
        return loss, *torch.ops.samplex.sampled_softmax_bwd(
            up, None, h, y.to(h.device), ids.to(h.device), saved, CLASSES, reduction, False, True, True
        )

    got = step(h.to(device), weight.to(device), log_q.to(device))
    return [t.cpu() for t in got], step(h.double(), weight.double(), log_q.double())


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
