"""Stochastic rounding of the row rules: right on average, and the same bits everywhere."""

from __future__ import annotations

import math

import pytest
import torch
from row_rules_cases import LR, OPS, entries, ours, rule_numbers, summed

from samplex_cuda._library import _native
from samplex_cuda.reference.static_sample import philox_bits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("start", [1.0, -1.0, 2e-6])
def test_stochastic_rounding_is_right_on_average(backend, dtype, start):
    """Every result is a neighbor, and the mean moves by the step that rounding to nearest would drop."""
    if start == 2e-6 and dtype == torch.bfloat16:
        start = 1e-30
    classes, d = (64, 40) if backend.emulated else (512, 100)
    below = torch.tensor(start, dtype=dtype)
    gap = float((torch.nextafter(below, torch.tensor(9.0, dtype=dtype)) - below).abs())
    weight = torch.full((classes, d), float(below), dtype=dtype, device=backend.device)
    rows = torch.full((classes, d), -0.3 * gap / LR, dtype=torch.float32, device=backend.device)
    key = torch.tensor([7, 1], device=backend.device)
    ours("sgd", weight, [], None, rows, None, key, decay=0.0)
    up = (weight.cpu().double() - float(below)) / gap
    assert up.unique().numel() == 2
    assert sorted(round(float(x), 3) for x in up.unique()) == [0.0, 1.0]
    n = classes * d
    assert abs(float(up.mean()) - 0.3) < 4 * math.sqrt(0.3 * 0.7 / n) + 2**-12
    again = torch.full_like(weight, float(below))
    ours("sgd", again, [], None, rows, None, key, decay=0.0)
    assert torch.equal(weight, again)
    ours("sgd", again.fill_(float(below)), [], None, rows, None, key + 1, decay=0.0)
    assert not torch.equal(weight, again)
    nearest = torch.full_like(weight, float(below))
    ours("sgd", nearest, [], None, rows, None, None, decay=0.0)
    assert nearest.eq(float(below)).all()  # the step vanishes


def test_stochastic_rounding_has_the_same_bits_everywhere(backend):
    """In both forms of the update: the noise belongs to the place, not to the thread."""
    weight = torch.randn(20, 13).bfloat16()
    e = entries(20, 6, 4, 13, torch.bfloat16, backend.device)
    row_ids, rows, _ = summed(e, 20)
    key = torch.tensor([3, 9])
    given, moved = weight.to(backend.device, copy=True), weight.to(backend.device, copy=True)
    device = backend.device
    ours("sgd", given, [], row_ids.to(device), rows.float().to(device), None, key.to(device))
    OPS.row_update_(moved, None, None, None, None, None, *e, key.to(device), *[rule_numbers("sgd")] * 2)
    assert torch.equal(given, moved)


def test_stochastic_rounding_goes_by_the_row_of_the_whole_table(backend):
    """A part of a table, with its first row given, gets the bits that the whole table gets there."""
    device, key = backend.device, torch.tensor([3, 9]).to(backend.device)
    e = entries(20, 6, 4, 13, torch.bfloat16, device)
    weight, bias = torch.randn(20, 13).bfloat16().to(device), torch.randn(20).bfloat16().to(device)
    whole, whole_bias = weight.clone(), bias.clone()
    numbers = [rule_numbers("sgd")] * 2
    none = [None] * 2
    OPS.row_update_(whole, *none, whole_bias, *none, *e, key, *numbers)
    part, part_bias = weight[8:].clone(), bias[8:].clone()
    inside = [torch.where(ids >= 8, ids - 8, -1) for ids in (e[0], e[3])]
    local = (inside[0], *e[1:3], inside[1], *e[4:])
    OPS.row_update_(part, *none, part_bias, *none, *local, key, *numbers, first_row=8)
    assert torch.equal(part, whole[8:])
    assert torch.equal(part_bias, whole_bias[8:])
    other = weight[8:].clone()
    OPS.row_update_(other, *none, bias[8:].clone(), *none, *local, key, *numbers)
    assert not torch.equal(other, part)
    given, rows = weight.clone(), torch.randn(12, 13, device=device)
    OPS.row_apply_(given, None, None, torch.arange(8, 20, device=device), rows, None, key, rule_numbers("sgd"))
    some = weight[8:].clone()
    OPS.row_apply_(some, None, None, None, rows, None, key, rule_numbers("sgd"), first_row=8)
    assert torch.equal(some, given[8:])
    for wrong in (-1, 1 << 32):
        with pytest.raises(RuntimeError, match="first_row must be at"):
            OPS.row_apply_(some, None, None, None, rows, None, key, rule_numbers("sgd"), first_row=wrong)


def awkward(d: int) -> torch.Tensor:
    """fp32 numbers [200, d] of every size: ties between numbers of 16 bits, subnormals, inf, nan, both zeros."""
    bits = torch.randint(-(2**31), 2**31, (200, d), dtype=torch.int64).to(torch.int32)
    bits[::3] &= ~0xFFFF  # numbers of bf16, and ties half way between two
    bits[1::6] |= 0x8000
    bits[::4] &= ~0x1FFF  # of fp16
    x = bits.view(torch.float32).clone()
    x[50:100] = torch.randn(50, d) * 2.0 ** -torch.randint(0, 30, (50, d))
    x[0, :6] = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-41])[: min(d, 6)]
    return x


@pytest.mark.parametrize("d", [1, 2, 3, 5, 8, 13, 32, 64, 130])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_has_the_same_bits_at_every_simd_level(simd_level, dtype, d):
    """To nearest as torch rounds; randomly as the scalar code does. The update is w - lr * g with w = 0, lr = -1."""
    x = awkward(d)
    as_bits = torch.int16
    nearest = torch.zeros(x.shape, dtype=dtype)
    ours("sgd", nearest, [], None, x, None, None, lr=-1.0, decay=0.0)
    want = x.to(dtype)
    nan = want.isnan()
    assert torch.equal(nearest.isnan(), nan)
    # 0 - -0 is 0: the sign of a zero is not the subject
    assert torch.equal((nearest + 0).view(as_bits)[~nan], (want + 0).view(as_bits)[~nan])
    chance, key = torch.zeros(x.shape, dtype=dtype), torch.tensor([5, 6])
    ours("sgd", chance, [], None, x, None, key, lr=-1.0, decay=0.0)
    _native.set_simd_level("scalar")
    scalar = torch.zeros(x.shape, dtype=dtype)
    ours("sgd", scalar, [], None, x, None, key, lr=-1.0, decay=0.0)
    assert torch.equal(chance.isnan(), nan)
    assert torch.equal(scalar.isnan(), nan)
    assert torch.equal(chance.view(as_bits)[~nan], scalar.view(as_bits)[~nan])
    assert d < 8 or not torch.equal(chance[~nan], nearest[~nan])


def test_random_bits_of_a_column_are_those_of_its_place(simd_level):
    """Eight columns share the four words at (row, column / 8), the low half of a word first."""
    rows, d, seed, offset = 6, 21, 5, 6
    low = torch.randint(2**16, (rows, d))
    x = (low + 0x3F800000).to(torch.int32).view(torch.float32)  # 1 and a part of the step to its neighbor
    got = torch.zeros(rows, d, dtype=torch.bfloat16)
    ours("sgd", got, [], None, x, None, torch.tensor([seed, offset]), lr=-1.0, decay=0.0)
    for row in range(rows):
        for column in range(d):
            half = philox_bits(seed, offset, row, column // 8, 0)[column % 8 // 4]
            noise = half >> (column % 4 * 16) & 0xFFFF
            up = int(low[row, column]) + noise >= 2**16
            assert float(got[row, column]) == (1.0078125 if up else 1.0)


def test_stochastic_rounding_leaves_inf_and_nan(backend):
    for dtype in (torch.bfloat16, torch.float16):
        weight = torch.tensor([[math.inf, -math.inf, math.nan, 1.0]], dtype=dtype, device=backend.device)
        key = torch.tensor([3, 9], device=backend.device)
        ours("sgd", weight, [], None, torch.zeros_like(weight), None, key, decay=0.0)
        assert weight[0, :2].tolist() == [math.inf, -math.inf]
        assert weight[0, 2].isnan()
        assert weight[0, 3] == 1
