"""exact_product_mass against the reference, on every backend, and what the exact samplers make of it."""

from __future__ import annotations

import pytest
import torch
from gpu_calls import Calls

import samplex_cuda as sx
from samplex_cuda import _device, products
from samplex_cuda.ops import exact_sample as ops
from samplex_cuda.ops.static_sample import sort_exclude
from samplex_cuda.reference import exact_sample as plain

BF16, HALF = torch.bfloat16, torch.float16
KINDS = {"softmax": ops.SOFTMAX, "absolute": ops.ABSOLUTE}


@pytest.fixture
def device(backend):
    """Where the kernel runs."""
    return backend.device


def made(device, batch, classes, dim, dtype, seed=0):
    g = torch.Generator().manual_seed(seed)
    h, weight, bias = (torch.randn(*s, generator=g) for s in ((batch, dim), (classes, dim), (classes,)))
    return h.to(dtype).to(device), weight.to(dtype).to(device), bias.to(device)


def mass_of(h, weight, bias, kind=ops.SOFTMAX, scale=1.0, lists=(None, None), row=0):
    mass = torch.full((h.shape[0], -(-weight.shape[0] // 256)), 7.0, dtype=torch.float64, device=h.device)
    ops.exact_product_mass(h, weight, bias, kind, scale, *lists, row, mass)
    return mass.cpu()


def wanted(h, weight, bias, kind, scale, lists):
    """From the very numbers, in float64, and how far rounding of a sum of float32 may move it."""
    h, weight = h.cpu().double(), weight.cpu().double()
    bias = None if bias is None else bias.cpu().double()
    terms = h.abs() @ weight.abs().T + (0.0 if bias is None else bias.abs())
    return plain.exact_mass(h @ weight.T, bias, kind, scale, 0.0, 0, lists), 1e-6 * (1.0 + abs(scale) * terms.max())


# (B, C, d, with bias, scale): fewer and more rows than a tile; below, at and above a block; odd widths, d over a step.
SHAPES = [(1, 1, 8, False, 1.0), (3, 255, 1, True, 1.0), (5, 256, 16, True, -0.7), (2, 257, 7, True, 1.3),
          (130, 300, 32, False, 0.8), (3, 700, 33, True, 1.0), (4, 513, 72, True, 0.5)]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [BF16, HALF])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_reference(device, shape, dtype, kind):
    batch, classes, dim, with_bias, scale = shape
    h, weight, bias = made(device, batch, classes, dim, dtype)
    bias = bias if with_bias else None
    got = mass_of(h, weight, bias, KINDS[kind], scale)
    want, off = wanted(h, weight, bias, KINDS[kind], scale, [[]] * batch)
    assert float((got - want).abs().max()) < off


@pytest.mark.parametrize("form", ["padded", "offsets"])
def test_excluded_classes_are_left_out(device, form):
    h, weight, bias = made(device, 5, 600, 16, BF16)
    g, row = torch.Generator().manual_seed(1), 2
    exclude = torch.randint(-1, 600, (row + 5, 6), generator=g)
    exclude[row + 1] = torch.arange(512, 518)
    exclude[row + 2] = -1
    lists = [sorted({k for k in ids if k >= 0}) for ids in exclude[row:].tolist()]
    given = exclude.to(device)
    if form == "offsets":
        given = (torch.arange(0, 6 * (row + 6), 6, device=device), given.flatten())
    got = mass_of(h, weight, bias, lists=sort_exclude(given), row=row)
    want, off = wanted(h, weight, bias, ops.SOFTMAX, 1.0, lists)
    assert float((got - want).abs().max()) < off


def test_a_block_without_a_class_has_no_mass(device):
    h, weight, bias = made(device, 2, 258, 8, BF16)
    exclude = torch.tensor([[256, 257], [-1, 257]], device=device)
    got = mass_of(h, weight, bias, lists=sort_exclude(exclude))
    assert got[0, 1] == -torch.inf
    assert got[1].isfinite().all()
    assert got[0, 0].isfinite()
    nothing = mass_of(h, weight, torch.full_like(bias, -torch.inf))
    assert nothing.eq(-torch.inf).all()


def test_nan_and_overflow_stay_in_their_rows(device):
    h, weight, bias = made(device, 4, 300, 8, BF16)
    before = mass_of(h, weight, bias)
    h[1, 0], h[2, 3] = torch.nan, torch.inf
    got = mass_of(h, weight, bias)
    assert got[1:3].isnan().all()
    assert torch.equal(got[[0, 3]], before[[0, 3]])
    large = mass_of(1e4 * h[:1].abs(), 1e4 * weight.abs(), bias)
    assert large.isfinite().all()


def test_parts_stand_for_their_sum(device, monkeypatch):
    monkeypatch.setattr(_device, "multiplies_narrow", lambda t: True)
    monkeypatch.setattr(products, "_LEAST_ROWS", 1)
    for dim in (16, 7):
        h, weight, bias = made(device, 3, 300, dim, torch.float32)
        weight = weight.to(BF16)
        factor = products.row_factor(h, weight)
        assert factor.shape == (3, 3 * dim)
        want, off = wanted(h, weight, bias, ops.SOFTMAX, 1.0, [[]] * 3)
        assert float((mass_of(factor, weight, bias) - want).abs().max()) < off


@pytest.mark.parametrize("bias_dtype", [BF16, torch.float64])
def test_any_alignment_and_type_of_bias(device, bias_dtype):
    h, weight, bias = made(device, 3, 300, 16, BF16)
    bias = bias.to(bias_dtype)
    want = mass_of(h, weight, bias)
    moved = [torch.empty(t.numel() + 1, dtype=t.dtype, device=device)[1:].view(t.shape).copy_(t) for t in (h, weight)]
    assert torch.equal(mass_of(*moved, bias), want)
    assert mass_of(h[:0], weight, bias).shape == (0, 2)


@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize("h_dtype", [BF16, torch.float32])
def test_samplers_draw_as_they_do_by_chunks(device, monkeypatch, h_dtype, absolute):
    monkeypatch.setattr(_device, "multiplies_narrow", lambda t: True)
    monkeypatch.setattr(products, "_LEAST_ROWS", 1)
    h, weight, bias = made(device, 6, 700, 16, h_dtype)
    sampler = sx.samplers.Softmax(weight.to(BF16), bias, absolute=absolute)
    exclude = torch.arange(6, device=device)

    def draw(fused):
        monkeypatch.setattr(_device, "fuses_products", lambda t: fused)
        with Calls() as calls:
            found = sampler.sample(h, 40, key=sx.Key(2), exclude=exclude)
        return found, calls.made

    (by_chunks, before), (fused, calls) = draw(False), draw(True)
    assert torch.equal(fused.ids, by_chunks.ids)
    torch.testing.assert_close(fused.log_q, by_chunks.log_q, rtol=1e-6, atol=2e-6)
    assert before["mm"] == before["exact_mass"] == 2
    assert calls["exact_product_mass"] == 1
    assert calls["mm"] == calls["exact_mass"] == 0
    left = sampler._log_left(h, exclude, None, 6)
    monkeypatch.setattr(_device, "fuses_products", lambda t: False)
    torch.testing.assert_close(left, sampler._log_left(h, exclude, None, 6), rtol=1e-5, atol=1e-6)


def test_quartic_keeps_its_chunks(device, monkeypatch):
    monkeypatch.setattr(_device, "multiplies_narrow", lambda t: True)
    monkeypatch.setattr(_device, "fuses_products", lambda t: True)
    h, weight, _ = made(device, 2, 300, 8, BF16)
    with Calls() as calls:
        sx.samplers.Quartic(weight).sample(h, 3)
    assert calls.made["exact_mass"] == 2


def test_parameters_are_taken_as_they_are(device):
    """A table that wants a gradient gives the same numbers, and none of its history."""
    h, weight, bias = made(device, 2, 300, 16, BF16)
    want = mass_of(h, weight, bias)
    got = mass_of(*(t.clone().requires_grad_() for t in (h, weight, bias)))
    assert torch.equal(got, want)
    assert not got.requires_grad


def test_errors(backend):
    h, weight, bias = made(backend.device, 2, 300, 8, BF16)
    mass = torch.empty(2, 2, dtype=torch.float64, device=backend.device)

    def call(h=h, weight=weight, bias=bias, kind=0, mass=mass, lists=(None, None)):
        ops.exact_product_mass(h, weight, bias, kind, 1.0, *lists, 0, mass)

    cases = [
        (lambda: call(weight=weight.float()), r"TypeError: exact_product_mass: weight must be \[C, d\] bfloat16 or"),
        (lambda: call(h=h.float()), "TypeError: exact_product_mass: hidden must be"),
        (lambda: call(h=h[:, :7].contiguous()), "ValueError: exact_product_mass: hidden must have d = 8 columns or"),
        (lambda: call(bias=bias[:3]), r"ValueError: exact_product_mass: bias must be \[C\]"),
        (lambda: call(kind=2), r"ValueError: exact_product_mass: kind must be 0 \(softmax\) or 1 \(absolute\), got 2"),
        (lambda: call(mass=mass[:, :1].contiguous()), r"ValueError: exact_product_mass: mass must be \[B, ceil"),
        (lambda: call(weight=weight[:0], bias=None), "ValueError: exact_product_mass: weight must have at least one"),
    ]
    for wrong, text in cases:
        with pytest.raises(RuntimeError, match=text):
            wrong()
