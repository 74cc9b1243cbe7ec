"""Products with tables of 16 bits as a GPU makes them: which factors are multiplied, and how many digits are kept."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import samplex_cuda as sx
from samplex_cuda import _device, chunking, prediction, products
from samplex_cuda.ops import predict as ops
from samplex_cuda.reference import predict as reference

BF16, HALF, FLOAT = torch.bfloat16, torch.float16, torch.float32
ROWS, CLASSES, DIM = 7, 61, 24


@pytest.fixture
def narrow(monkeypatch, backend):
    """CPU tensors go the way of GPU tensors, unless the CPU's kernels serve them: those keep the CPU's way."""
    if backend.name == "cpu":
        return False
    monkeypatch.setattr(_device, "multiplies_narrow", lambda t: True)
    monkeypatch.setattr(products, "_LEAST_ROWS", 1)
    return True


class Copies(TorchDispatchMode):
    """Copies of 20 class rows."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func._schema.name == "aten::copy_" and args[0].shape[0] == 20
        return func(*args, **(kwargs or {}))


def made(backend, h_dtype, dtype, rows=ROWS):
    g = torch.Generator().manual_seed(3)
    h, weight, bias = (torch.randn(*s, generator=g) for s in ((rows, DIM), (CLASSES, DIM), (CLASSES,)))
    h[0] *= torch.logspace(-6, 6, DIM)  # numbers of all sizes in one sum
    return h.to(h_dtype).to(backend.device), weight.to(dtype).to(backend.device), bias.to(dtype).to(backend.device)


def exact(h, weight, bias):
    """Logits in float64, and what a rounding error of their products is measured by."""
    h, weight, bias = (t.cpu().double() for t in (h, weight, bias))
    return F.linear(h, weight, bias), F.linear(h.abs(), weight.abs(), bias.abs())


PAIRS = [(BF16, BF16), (HALF, HALF), (FLOAT, BF16), (FLOAT, HALF), (BF16, HALF), (HALF, BF16), (BF16, FLOAT)]


@pytest.mark.parametrize(("h_dtype", "dtype"), PAIRS, ids=str)
def test_logits_have_the_digits_of_float32(backend, narrow, h_dtype, dtype):
    """Of every function over all classes: 3e-7 of the terms of a logit; h in two parts would be 3e-6 off."""
    h, weight, bias = made(backend, h_dtype, dtype)
    want, size = exact(h, weight, bias)
    scores = prediction.exact_scores(h, weight, bias, chunk_size=20).cpu()
    assert scores.dtype == FLOAT
    assert float(((scores.double() - want).abs() / size).max()) < 3e-7
    off = 3e-7 * size.amax(1)
    lse = prediction.exact_lse(h, weight, bias, chunk_size=20).cpu().double()
    assert bool(((lse - want.logsumexp(1)).abs() < off + 1e-6).all())
    values, ids = (t.cpu() for t in prediction.exact_topk(h, weight, 5, bias, chunk_size=20))
    best = want.topk(5, dim=1)
    assert bool(((values.double() - best.values).abs() < off[:, None] + 1e-6).all())
    assert torch.equal(ids[1:], best.indices[1:])


@pytest.mark.parametrize(("h_dtype", "dtype"), PAIRS, ids=str)
def test_factors_are_those_of_the_table(backend, narrow, monkeypatch, h_dtype, dtype):
    """And the class rows are copied only where they are not multiplied as they are."""
    factors = []

    def spied(a, b, out):
        factors.append((a.dtype, b.dtype, out.dtype))
        return products.product(a, b, out)

    monkeypatch.setattr(chunking, "product", spied)
    h, weight, bias = made(backend, h_dtype, dtype)
    same = h_dtype == dtype
    with Copies() as copies:
        prediction.exact_topk(h, weight, 5, bias, chunk_size=20)
    wanted = dtype if narrow and (same or dtype == BF16) else FLOAT
    assert factors == [(wanted, wanted, FLOAT)] * 4
    assert copies.count == (0 if dtype == FLOAT or (narrow and same) else 3)  # the fourth has one row


def test_infinite_and_nan_rows_stay_alone(backend, narrow):
    h, weight, bias = made(backend, FLOAT, BF16)
    plain = prediction.exact_scores(h, weight, bias)
    h[1, 0], h[2, 3], h[3, 1] = torch.inf, torch.nan, -torch.inf
    found = prediction.exact_scores(h, weight, bias).cpu()
    assert torch.equal(found[4:], plain[4:].cpu())
    assert found[2].isnan().all()
    infinite = weight[:, 0].cpu().float().sign() * torch.inf
    assert torch.equal(found[1], infinite)


def gradients(h, weight, bias, y, **options):
    leaves = [t.detach().requires_grad_() for t in (h, weight, bias)]
    loss = sx.functional.full_softmax(leaves[0], leaves[1], y, leaves[2], **options)
    return [loss.detach().cpu(), *(g.cpu() for g in torch.autograd.grad(loss, leaves))]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("dtype", [BF16, HALF])
def test_full_softmax_keeps_the_digits_of_its_coefficients(backend, narrow, monkeypatch, dtype, blocks, smoothing):
    """Gradients of 16 bits are rounded once: coefficients of 8 digits would add 2e-3, two parts add less than 3e-5."""
    monkeypatch.setattr(chunking, "_BLOCK_ROWS", -(-ROWS // blocks))
    h, weight, bias = made(backend, dtype, dtype)
    h[0] = 0.1
    y = torch.tensor([5, 60, -100, 0, 19, 20, 21], device=backend.device)
    options = {"scale": 1.3, "label_smoothing": smoothing, "chunk_size": 20}
    found = gradients(h, weight, bias.float(), y, **options)
    leaves = [t.cpu().double().requires_grad_() for t in (h, weight, bias)]
    loss = F.cross_entropy(1.3 * F.linear(*leaves), y.cpu(), label_smoothing=smoothing)
    wanted = torch.autograd.grad(loss, leaves)
    torch.testing.assert_close(found[0].double(), loss.detach(), rtol=2e-6, atol=2e-6)
    for got, want in zip(found[1:3], wanted[:2], strict=True):
        assert got.dtype == dtype
        off = (got.double() - want).abs() - (want.to(dtype).double() - want).abs()
        assert float((off / want.abs().max()).max()) < 3e-5
    assert found[3].dtype == FLOAT
    assert float((found[3].double() - wanted[2]).abs().max() / wanted[2].abs().max()) < 3e-5


@pytest.mark.parametrize(("count", "width"), [(1, 8), (61, 64), (4096, 4096), (4099, 4101)])
def test_gradient_in_parts(backend, count, width):
    """Rows of rounded numbers over rows of the rest; columns beyond the chunk and the products are left alone."""
    if backend.name == "cpu":
        pytest.skip("a GPU's way to pass it on")
    g = torch.Generator().manual_seed(1)
    dots, bias = torch.randn(3, count, generator=g), torch.randn(count, generator=g)
    target = torch.tensor([[0], [count - 1], [-1]])
    lse = (dots + bias).double().logsumexp(1)
    coef, target_coef = torch.rand(3, generator=g), torch.rand(3, 1, generator=g)
    rest = (target, None, 0, 1.0, False, lse, coef, target_coef)
    dots, bias, *rest = (t.to(backend.device) if isinstance(t, torch.Tensor) else t for t in (dots, bias, *rest))
    parts, before = torch.full((6, width), 7.0, dtype=BF16, device=backend.device), dots.clone()
    ops.predict_grad(dots, bias, *rest, None, parts)
    assert torch.equal(dots, before)
    ops.predict_grad(dots, bias, *rest)
    assert torch.equal(parts[:3, :count], dots.to(BF16))
    assert torch.equal(parts[3:, :count], (dots - parts[:3, :count].float()).to(BF16))
    assert parts[:, count:].eq(7.0).all()
    want = reference.predict_grad(*(t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t
                                    for t in (before, bias, *rest)))  # fmt: skip
    assert float((parts[:3, :count].double() + parts[3:, :count].double() - want).abs().max()) < 2e-5


def test_parts_are_refused(backend):
    dots, lse, one = (t.to(backend.device) for t in (torch.zeros(2, 4), torch.zeros(2).double(), torch.ones(2)))
    rest = (None, torch.zeros(2, 1, dtype=torch.int64, device=dots.device), None, 0, 1.0, False, lse, one, one[:, None])
    bad = [((4, 3), BF16, "parts must have at least n = 4 columns"), ((3, 4), BF16, r"parts must be \[2 B, at least n"),
           ((4, 4), HALF, "parts must be")]  # fmt: skip
    if backend.name == "cpu":
        bad.append(((4, 4), BF16, "parts must be None on the CPU"))
    for shape, dtype, text in bad:
        with pytest.raises(RuntimeError, match=f"predict_grad: {text}"):
            ops.predict_grad(dots, *rest, None, torch.zeros(shape, dtype=dtype, device=dots.device))


@pytest.mark.parametrize(("h_dtype", "dtype"), PAIRS, ids=str)
def test_exact_samplers(backend, narrow, monkeypatch, h_dtype, dtype):
    """log q of every class, and the draws that the CPU makes of the same numbers."""
    h, weight, bias = made(backend, h_dtype, dtype)
    h[0] = 0.1
    logits, sizes = exact(h, weight, bias)
    want = logits.log_softmax(1)
    # A logit is within 3e-7 of its terms' sizes, and log q is the difference of two numbers that have this error.
    budget = 2e-6 + 6e-7 * sizes.amax(1, keepdim=True)
    sampler = sx.samplers.Softmax(weight, bias)
    assert ((sampler.log_prob_all(h).cpu().double() - want).abs() < budget).all()
    exclude = torch.arange(ROWS, device=backend.device)
    draw = sampler.sample(h, 30, key=sx.Key(4), exclude=exclude)
    kept = want.clone()
    kept[exclude.cpu(), exclude.cpu()] = -torch.inf
    found = draw.log_q.cpu().double() - kept.log_softmax(1).gather(1, draw.ids.cpu())
    assert (found.abs() < budget).all()
    monkeypatch.setattr(_device, "multiplies_narrow", lambda t: False)
    assert torch.equal(sampler.sample(h, 30, key=sx.Key(4), exclude=exclude).ids, draw.ids)
