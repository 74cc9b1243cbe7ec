"""The symmetric softmax of a batch against its reference in float64: odd shapes, masks, shifts, every backend."""

from __future__ import annotations

import math

import pytest
import torch

import samplex_cuda as sx
from samplex_cuda.ops.symmetric_softmax import PairMasks, symmetric_softmax
from samplex_cuda.reference.symmetric_softmax import symmetric_softmax as reference
from samplex_cuda.testing import assert_close

OP = torch.ops.samplex.symmetric_softmax.default
BWD = torch.ops.samplex.symmetric_softmax_bwd.default
SIZES = [1, 2, 7, 16, 17, 33, 65]


def make(batch, masked=True, shifted=True, dtype=torch.float32, seed=0, spread=3.0):
    g = torch.Generator().manual_seed(seed)
    dots = (torch.randn(batch, batch, generator=g) * spread).to(dtype)
    labels = torch.randint(max(batch // 2, 1), (batch,), generator=g) * (1 << 40)
    lengths = torch.randint(4, (batch,), generator=g)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    known = torch.randint(max(batch // 2, 1), (int(offsets[-1]),), generator=g) * (1 << 40)
    key_shift, query_shift = (torch.randn(batch, generator=g).to(dtype) for _ in range(2))
    masks = (labels, offsets, known) if masked else (None, None, None)
    return dots, *masks, *((key_shift, query_shift) if shifted else (None, None))


def moved(backend, args):
    return [None if t is None else t.to(backend.device) for t in args]


def by_reference(dtype, dots, labels, offsets, known, key_shift, query_shift, scale, grad):
    leaf = dots.to(dtype).clone().requires_grad_()
    shifts = [None if t is None else t.to(dtype) for t in (key_shift, query_shift)]
    loss = reference(leaf, labels, None if offsets is None else (offsets, known), *shifts, scale)
    return loss.detach(), torch.autograd.grad(loss, leaf, grad.to(dtype))[0]


def check(backend, args, scale=1.3):
    grad = torch.randn(args[0].shape[0], generator=torch.Generator().manual_seed(9)).to(args[0].dtype)
    given = moved(backend, args)
    loss, row_lse, column_lse = OP(*given, scale)
    coefs = BWD(grad.to(backend.device), *given, row_lse, column_lse, scale)
    truth = by_reference(torch.float64, *args, scale, grad)
    same = by_reference(args[0].dtype, *args, scale, grad)
    size = float((scale * args[0]).abs().max()) + 1
    assert_close("loss", loss.cpu(), truth[0], same[0], magnitude=size)
    assert_close("coefs", coefs.cpu(), truth[1], same[1], magnitude=size * float(grad.abs().max()))
    return loss, coefs


@pytest.mark.parametrize("batch", SIZES)
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("shifted", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_against_the_reference(backend, batch, masked, shifted, dtype):
    check(backend, make(batch, masked, shifted, dtype))


@pytest.mark.parametrize("batch", [1, 15, 16, 31, 64, 129])
def test_every_simd_level(simd_level, batch):
    args = make(batch)
    loss, row_lse, column_lse = OP(*args, 0.7)
    grad = torch.ones(batch)
    coefs = BWD(grad, *args, row_lse, column_lse, 0.7)
    wanted = by_reference(torch.float64, *args, 0.7, grad)
    torch.testing.assert_close(loss.double(), wanted[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(coefs.double(), wanted[1], rtol=1e-5, atol=1e-5)


def test_more_blocks_of_rows_than_one_size():
    """Above 1,024 rows a block has more than 16 of them."""
    args = make(1100, dtype=torch.float64)
    loss, _, _ = OP(*args, 1.0)
    grad = torch.ones(1100, dtype=torch.float64)
    torch.testing.assert_close(loss, by_reference(torch.float64, *args, 1.0, grad)[0])


def test_the_same_bits_for_any_number_of_threads():
    args, before, found = make(200), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            loss, row_lse, column_lse = OP(*args, 1.0)
            found.append((loss, BWD(torch.ones(200), *args, row_lse, column_lse, 1.0)))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_corners(backend):
    loss, _, _ = OP(torch.zeros(0, 0, device=backend.device), None, None, None, None, None, 1.0)
    assert loss.shape == (0,)
    one = torch.full((1, 1), 3.0, device=backend.device)
    assert OP(one, None, None, None, None, None, 2.0)[0].item() == 0.0
    same = torch.zeros(5, dtype=torch.int64, device=backend.device)  # no pair is left
    loss, _, _ = OP(torch.randn(5, 5).to(same.device), same, None, None, None, None, 1.0)
    assert bool((loss == 0).all())
    large = (torch.eye(3) * 1e5 - 5e4).to(backend.device)
    assert bool((OP(large, None, None, None, None, None, 1.0)[0] == 0).all())
    bad = torch.randn(4, 4).to(backend.device)
    bad[1, 1] = torch.nan
    assert bool(OP(bad, None, None, None, None, None, 1.0)[0][1].isnan())


def test_gradcheck_and_opcheck(backend):
    args = moved(backend, make(6, dtype=torch.float64))
    dots = args[0].requires_grad_()
    assert torch.autograd.gradcheck(lambda d: OP(d, *args[1:], 1.3)[0], (dots,))
    torch.library.opcheck(OP, (dots, *args[1:], 1.3))
    loss, row_lse, column_lse = (t.detach() for t in OP(*args, 1.3))
    torch.library.opcheck(BWD, (torch.ones_like(loss), *(t.detach() for t in args), row_lse, column_lse, 1.3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_queries_and_keys(backend, dtype):
    g = torch.Generator().manual_seed(2)
    queries, keys = (torch.randn(40, 24, generator=g).to(dtype) for _ in range(2))
    _, *masks = make(40, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    q, k = (t.to(backend.device).requires_grad_() for t in (queries, keys))
    loss = symmetric_softmax(q, k, PairMasks(*moved(backend, masks)), 0.5)
    grads = torch.autograd.grad(loss.sum(), (q, k))
    q64, k64 = (t.double().requires_grad_() for t in (queries, keys))
    labels, offsets, known, *shifts = masks
    want = reference(q64 @ k64.T, labels, (offsets, known), *(t.double() for t in shifts), 0.5)
    wants = torch.autograd.grad(want.sum(), (q64, k64))
    torch.testing.assert_close(loss.detach().cpu().double(), want.detach(), rtol=1e-5, atol=1e-5)
    near = {torch.float64: 1e-10, torch.float32: 1e-4}.get(dtype, 2 * torch.finfo(dtype).eps)
    for a, b in zip(grads, wants, strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a.cpu().double(), b, rtol=near, atol=near)
    only = symmetric_softmax(q, k.detach(), PairMasks(*moved(backend, masks)), 0.5)
    torch.testing.assert_close(torch.autograd.grad(only.sum(), q)[0], grads[0])


def test_twice_differentiated_and_forward_mode_are_refused():
    q, k = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    loss = symmetric_softmax(q, k, PairMasks(), 1.0).sum()
    with pytest.raises(RuntimeError, match="symmetric_softmax: double backward"):
        torch.autograd.grad(loss, q, create_graph=True)
    with pytest.raises(RuntimeError, match="symmetric_softmax: forward-mode"):
        torch.func.jvp(lambda x: symmetric_softmax(x, k, PairMasks(), 1.0).sum(), (q,), (q,))


def test_under_func_grad_and_compile():
    q, k = torch.randn(8, 4), torch.randn(8, 4)

    def loss(x):
        return sx.functional.contrastive(x, k, symmetric=True)

    x = q.clone().requires_grad_()
    wanted = torch.autograd.grad(loss(x), x)[0]
    torch.testing.assert_close(torch.func.grad(loss)(q), wanted)
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(torch.autograd.grad(compiled(x), x)[0], wanted)


DOTS = torch.zeros(3, 3)
IDS = torch.zeros(3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("args", "kind", "error"),
    [
        ((DOTS[:2],), "ValueError", r"dots must be \[B, B\] with B <= 65535, got \[2, 3\]"),
        ((DOTS.half(),), "TypeError", "dots must be float32 or float64"),
        ((DOTS, IDS[:2]), "ValueError", r"labels must be \[B\]"),
        ((DOTS, None, torch.zeros(4, dtype=torch.int64), IDS), "ValueError", "labels must be given with known_offsets"),
        ((DOTS, IDS, torch.zeros(4, dtype=torch.int64)), "ValueError", "known_offsets and known_ids must be given"),
        ((DOTS, IDS, torch.zeros(4, dtype=torch.int64), IDS), "ValueError", "known offsets must ascend from 0 to 3"),
        ((DOTS, None, None, None, DOTS[:2, 0].clone()), "ValueError", r"key_shift must be \[B\]"),
        ((DOTS, None, None, None, None, DOTS[0].double()), "TypeError", r"query_shift must be \[B\]"),
    ],
)
def test_errors(args, kind, error):
    full = (*args, *[None] * (6 - len(args)), 1.0)
    with pytest.raises(RuntimeError, match=f"{kind}: symmetric_softmax: {error}"):
        OP(*full)


def test_shift_of_one_key_changes_its_column_only():
    """A key that counts twice as a negative: log 2 more in every other row."""
    dots = torch.zeros(3, 3, dtype=torch.float64)
    shift = torch.tensor([math.log(2.0), 0.0, 0.0], dtype=torch.float64)
    loss = OP(dots, None, None, None, shift, None, 1.0)[0]
    wanted = [(math.log(3) + math.log(3)) / 2, *[(math.log(4) + math.log(3)) / 2] * 2]
    torch.testing.assert_close(loss, torch.tensor(wanted, dtype=torch.float64))
