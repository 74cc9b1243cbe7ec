"""Attention pooling: forward and backward against plain torch in float64, at odd shapes, on every SIMD level and
backend; and at margins where the textbook gradient has no correct digit, against exact arithmetic.
"""

from __future__ import annotations

import decimal
import os
import subprocess
import sys
from decimal import Decimal

import pytest
import torch

import samplex_cuda as sx
from samplex_cuda.reference.attention_pool import attention_pool as reference
from samplex_cuda.reference.attention_pool import attention_pool_coefficients
from samplex_cuda.testing import assert_close

OP = torch.ops.samplex.attention_pool.default
BWD = torch.ops.samplex.attention_pool_bwd.default
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
NAMES = ("d_embedding", "d_p", "d_v")


def acc_of(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def make(batch=5, length=9, dim=7, rows=20, *, dtype=torch.float32, padding=0.2, spread=1.0, seed=0):
    """ids, embedding, p, v. Rows of a length near 1; p and v in the accumulation type."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, rows, (batch, length), generator=g)
    ids[torch.rand(batch, length, generator=g) < padding] = -1
    embedding = (torch.randn(rows, dim, generator=g) * max(dim, 1) ** -0.5).to(dtype)
    p, v = (torch.randn(dim, generator=g).to(acc_of(dtype)) for _ in range(2))
    return ids, embedding, p * spread, v


def upstream(batch: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(batch, generator=torch.Generator().manual_seed(1)).to(acc_of(dtype))


def dense(t: torch.Tensor) -> torch.Tensor:
    return (t.to_dense() if t.is_sparse else t).detach().cpu()


def run_ours(backend, ids, embedding, p, v, **options):
    leaves = [t.clone().to(backend.device).requires_grad_() for t in (embedding, p, v)]
    got = sx.functional.attention_pool(ids.to(backend.device), *leaves, **options)
    grads = torch.autograd.grad(got, leaves, upstream(ids.shape[0], embedding.dtype).to(got.device))
    return got.detach().cpu(), *map(dense, grads)


def run_reference(dtype, ids, embedding, p, v):
    leaves = [t.to(dtype).clone().requires_grad_() for t in (embedding, p, v)]
    got = reference(ids, *leaves)
    return got.detach(), *torch.autograd.grad(got, leaves, upstream(ids.shape[0], embedding.dtype).to(dtype))


def check(backend, ids, embedding, p, v, **options):
    """Value and all gradients against the reference in float64, with torch's own error as the measure."""
    got = run_ours(backend, ids, embedding, p, v, **options)
    wanted = run_reference(torch.float64, ids, embedding, p, v)
    torchs = run_reference(acc_of(embedding.dtype), ids, embedding, p, v)
    # A score of size s has an error of s eps, and so has everything that is proportional to its exponential.
    biggest = float((embedding.double().abs() @ p.double().abs()).max()) if embedding.numel() else 0.0
    assert got[0].dtype == acc_of(embedding.dtype)
    values = float((embedding.double() @ v.double()).abs().max()) if embedding.numel() else 0.0
    assert_close("pooled", got[0], wanted[0], torchs[0], magnitude=(1 + biggest) * values)
    for name, a, w, t, leaf in zip(NAMES, got[1:], wanted[1:], torchs[1:], (embedding, p, v), strict=True):
        size = (1 + biggest) * float(w.abs().max()) if w.numel() else 0.0
        assert a.dtype == leaf.dtype
        assert_close(name, a, w, t.to(leaf.dtype), magnitude=size if leaf.dtype == acc_of(leaf.dtype) else 0.0)


# ------------------------------------------------------------------------------------------------ against the reference
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("padding", [0.0, 0.3])
def test_matches_the_reference(backend, dtype, padding):
    check(backend, *make(11, 21, 33, 40, dtype=dtype, padding=padding))


WIDTHS = [1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 64, 130, 255, 256, 257, 300, 508, 512, 513, 600, 768]
WIDTHS += [772, 1024, 1030, 1536, 2049, 4095, 4096, 4100]


@pytest.mark.parametrize("dim", WIDTHS)
def test_any_width(backend, dim):
    check(backend, *make(2, 11, dim))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", [5, 8, 64, 256, 264, 300, 512, 640, 768, 776, 1024, 1536, 1540, 4096, 4099])
def test_any_width_of_half_storage(backend, dim, dtype):
    check(backend, *make(2, 11, dim, dtype=dtype))


# Above 768 columns, 256 where rows are not a multiple of 16 bytes, the warps of a block share a row on a GPU.
SHARED_ROW = 800


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 65, 130])
def test_any_length(backend, length):
    check(backend, *make(3, length, 12))


@pytest.mark.parametrize("length", [1, 2, 3, 4, 29, 30, 31, 32, 33, 64, 65])
@pytest.mark.parametrize(
    ("dim", "dtype"), [(SHARED_ROW, torch.float32), (SHARED_ROW, torch.bfloat16), (301, torch.half)]
)
def test_any_length_of_rows_that_warps_share(backend, dim, dtype, length):
    check(backend, *make(3, length, dim, dtype=dtype, spread=3.0))


@pytest.mark.parametrize("dim", [5, 16, 33, 64, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_simd_levels(simd_level, dim, dtype):
    class Cpu:
        device = torch.device("cpu")

    check(Cpu, *make(7, 19, dim, dtype=dtype))


def test_a_large_batch(backend):
    # More entries than one thread sorts, rows that are streamed past the cache.
    shape = (6, 20, 32, 50) if backend.emulated else (64, 300, 96, 20_000)
    check(backend, *make(*shape, padding=0.1))


def test_the_gradient_has_the_touched_rows_in_order(backend):
    ids, embedding, p, v = make(6, 5, 8, 100)
    leaf = embedding.to(backend.device).requires_grad_()
    sx.functional.attention_pool(ids.to(backend.device), leaf, p.to(leaf.device), v.to(leaf.device)).sum().backward()
    assert leaf.grad.is_sparse
    assert leaf.grad.is_coalesced()
    assert torch.equal(leaf.grad.indices()[0].cpu(), ids[ids >= 0].unique())


def test_dense_gradient(backend):
    check(backend, *make(), sparse=False)


@pytest.mark.parametrize("dim", [7, SHARED_ROW])
@pytest.mark.parametrize("which", [(0,), (1,), (2,), (0, 2), (1, 2)])
def test_gradients_of_some_inputs_only(backend, which, dim):
    ids, *inputs = make(dim=dim)
    leaves = [t.to(backend.device).requires_grad_(i in which) for i, t in enumerate(inputs)]
    got = sx.functional.attention_pool(ids.to(backend.device), *leaves)
    grads = torch.autograd.grad(got.sum(), [leaves[i] for i in which])
    truth = [t.double().requires_grad_(i in which) for i, t in enumerate(inputs)]
    wanted = torch.autograd.grad(reference(ids, *truth).sum(), [truth[i] for i in which])
    for a, w in zip(grads, wanted, strict=True):
        torch.testing.assert_close(dense(a).double(), w, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dim", [40, SHARED_ROW])
def test_without_gradient_the_same_value(backend, dim):
    ids, *inputs = make(6, 30, dim)
    place = [t.to(backend.device) for t in inputs]
    with torch.no_grad():
        plain = sx.functional.attention_pool(ids.to(backend.device), *place)
    grad = sx.functional.attention_pool(ids.to(backend.device), place[0].requires_grad_(), *place[1:])
    assert torch.equal(plain, grad.detach())
    assert not plain.requires_grad


# ------------------------------------------------------------------------------------------------ padding, shapes
@pytest.mark.parametrize("dim", [16, SHARED_ROW])
def test_padding_is_not_read(backend, dim):
    ids, embedding, p, v = make(4, 6, dim, padding=0.5)
    used = torch.zeros(20, dtype=torch.bool)
    used[ids[ids >= 0]] = True
    assert not used.all()
    embedding[~used] = float("nan")
    got = run_ours(backend, ids, embedding, p, v)
    assert got[0].isfinite().all()
    check(backend, ids, embedding.masked_fill(~used[:, None], 0.0), p, v)


@pytest.mark.parametrize("sign", [-1, -100])
def test_both_padding_ids(backend, sign):
    ids, embedding, p, v = make(padding=0.0)
    with_padding = torch.cat([ids[:, :3], torch.full((5, 2), sign), ids[:, 3:]], 1)
    a, b = run_ours(backend, ids, embedding, p, v), run_ours(backend, with_padding, embedding, p, v)
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dim", [7, SHARED_ROW])
def test_a_sequence_of_padding_alone(backend, dim):
    ids, embedding, p, v = make(dim=dim)
    ids[1] = -1
    ids[4] = -100
    got = run_ours(backend, ids, embedding, p, v)
    assert got[0][1] == 0
    assert got[0][4] == 0
    check(backend, ids, embedding, p, v)
    nothing = run_ours(backend, torch.full((3, 4), -1), embedding, p, v)
    assert all((x == 0).all() for x in nothing)


def test_mask_is_padding(backend):
    ids, embedding, p, v = make(padding=0.1)
    mask = torch.rand(ids.shape, generator=torch.Generator().manual_seed(3)) < 0.6
    a = run_ours(backend, ids, embedding, p, v, mask=mask.to(backend.device))
    b = run_ours(backend, torch.where(mask, ids, -1), embedding, p, v)
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert not torch.equal(a[0], run_ours(backend, ids, embedding, p, v)[0])


@pytest.mark.parametrize(("batch", "length", "rows"), [(0, 5, 20), (4, 0, 20), (0, 0, 20), (0, 3, 0), (3, 0, 0)])
def test_empty(backend, batch, length, rows):
    ids, embedding = torch.zeros(batch, length, dtype=torch.int64), torch.randn(rows, 6)
    got = run_ours(backend, ids, embedding, torch.randn(6), torch.randn(6))
    assert got[0].shape == (batch,)
    assert got[1].shape == (rows, 6)
    assert all((x == 0).all() for x in got)


def test_rows_without_columns(backend):
    got = run_ours(backend, torch.zeros(2, 3, dtype=torch.int64), torch.zeros(4, 0), torch.zeros(0), torch.zeros(0))
    assert torch.equal(got[0], torch.zeros(2))
    assert got[1].shape == (4, 0)


def test_one_row_in_the_table(backend):
    check(backend, *make(3, 4, 5, rows=1))


def test_leading_dimensions(backend):
    ids, embedding, p, v = (t.to(backend.device) for t in make(6, 5, 4))
    flat = sx.functional.attention_pool(ids, embedding, p, v)
    assert torch.equal(sx.functional.attention_pool(ids.reshape(2, 3, 5), embedding, p, v), flat.reshape(2, 3))
    assert sx.functional.attention_pool(ids[0], embedding, p, v).shape == ()


def test_not_contiguous_inputs(backend):
    ids, embedding, p, v = make(8, 6, 8)
    strided = ids.to(backend.device).T.contiguous().T, embedding.to(backend.device).T.contiguous().T
    got = sx.functional.attention_pool(*strided, p.to(backend.device), v.to(backend.device))
    assert torch.equal(got.cpu(), run_ours(backend, ids, embedding, p, v)[0])


def test_half_storage_takes_p_and_v_of_either_type(backend):
    ids, embedding, p, v = make(dtype=torch.bfloat16)
    p, v = p.bfloat16(), v.bfloat16()
    same = run_ours(backend, ids, embedding, p, v)
    wide = run_ours(backend, ids, embedding, p.float(), v.float())
    assert same[2].dtype == torch.bfloat16
    assert torch.equal(same[0], wide[0])
    assert torch.equal(same[2], wide[2].bfloat16())


def test_autocast_keeps_the_table(backend):
    ids, embedding, p, v = (t.to(backend.device) for t in make())
    with torch.autocast(backend.device.type, torch.bfloat16):
        got = sx.functional.attention_pool(ids, embedding, p.bfloat16(), v.bfloat16())
    assert got.dtype == torch.float32
    assert torch.equal(got, sx.functional.attention_pool(ids, embedding, p.bfloat16().float(), v.bfloat16().float()))


# ------------------------------------------------------------------------------------------------ bad numbers
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("dim", [16, SHARED_ROW])
def test_a_bad_row_shows_in_its_sequences_only(backend, bad, dim):
    ids, embedding, p, v = make(6, 4, dim, 40, padding=0.0)
    embedding[ids[2, 1], 3] = bad
    hit = (ids == ids[2, 1]).any(1)
    assert hit.sum() < 6
    pooled, d_embedding, _, _ = run_ours(backend, ids, embedding, p, v)
    assert (~pooled[hit].isfinite()).all()
    assert pooled[~hit].isfinite().all()
    touched = torch.zeros(40, dtype=torch.bool)
    touched[ids[hit].flatten()] = True
    assert d_embedding[~touched].isfinite().all()


def test_a_zero_gradient_wins_over_nan(backend):
    ids, embedding, p, v = make(6, 4, 16, 40, padding=0.0)
    embedding[ids[2, 1], 3] = float("nan")
    leaves = [t.to(backend.device).requires_grad_() for t in (embedding, p, v)]
    pooled = sx.functional.attention_pool(ids.to(backend.device), *leaves)
    hit = (ids == ids[2, 1]).any(1).to(backend.device)
    grads = torch.autograd.grad(pooled, leaves, (~hit).float())
    alone = sx.functional.attention_pool(ids.to(backend.device)[~hit], *leaves)
    assert alone.numel() > 0
    for found, wanted in zip(grads, torch.autograd.grad(alone.sum(), leaves), strict=True):
        torch.testing.assert_close(dense(found), dense(wanted))


def test_scores_that_are_all_minus_infinity(backend):
    embedding = torch.zeros(3, 4)
    embedding[:, 0] = -1
    p = torch.tensor([float("inf"), 0, 0, 0])
    got = run_ours(backend, torch.tensor([[0, 1, 2]]), embedding, p, torch.ones(4))
    assert got[0].isnan().all()


# ------------------------------------------------------------------------------------------------ large margins
def exact_gradients(embedding, p, v):
    """q, c and d_p of one sequence of all rows, in 400 digits (exp(-600) is 10^-260): as lists of Decimal."""
    with decimal.localcontext() as context:
        context.prec = 400
        rows = [[Decimal(x) for x in row] for row in embedding.double().tolist()]
        p, v = ([Decimal(x) for x in t.double().tolist()] for t in (p, v))

        def dot(x, y):
            return sum((a * b for a, b in zip(x, y, strict=True)), Decimal(0))

        scores, values = [dot(row, p) for row in rows], [dot(row, v) for row in rows]
        most = max(scores)
        mass = [(s - most).exp() for s in scores]
        q = [m / sum(mass) for m in mass]
        f = sum(x * g for x, g in zip(q, values, strict=True))
        c = [x * (g - f) for x, g in zip(q, values, strict=True)]
        d_p = [sum(ci * row[k] for ci, row in zip(c, rows, strict=True)) for k in range(len(p))]
        return tuple([float(x) for x in xs] for xs in (q, c, d_p))


MARGINS = [(torch.float64, m) for m in (40, 100, 200, 400, 600)] + [(torch.float32, m) for m in (20, 40, 60, 80)]


@pytest.mark.parametrize(("dtype", "margin"), MARGINS)
@pytest.mark.parametrize("order", ["first", "last", "middle"])
def test_gradients_at_large_margins(backend, dtype, margin, order):
    """One token leads by `margin`: the gradient is of size exp(-margin), and each of its numbers is right."""
    g = torch.Generator().manual_seed(margin)
    embedding, p, v = (torch.randn(*shape, generator=g, dtype=torch.float64) for shape in ((9, 6), (6,), (6,)))
    p /= p.norm()
    leader = {"first": 0, "last": 8, "middle": 4}[order]
    scores = embedding @ p
    second = max(float(s) for i, s in enumerate(scores) if i != leader)
    embedding[leader] += p * (second + margin / 10 - scores[leader])
    embedding, p, v = embedding.to(dtype), (10 * p).to(dtype), v.to(dtype)
    q, c, d_p = (torch.tensor(x, dtype=torch.float64) for x in exact_gradients(embedding, p, v))
    assert abs(float(q.sort().values[-2].log()) + margin) < 0.1 * margin

    ids = torch.arange(9).unsqueeze(0)
    place = [t.to(backend.device) for t in (ids, embedding, p, v)]
    _, coefs, _ = OP(*place, True, True, True)
    leaf = place[2].clone().requires_grad_()
    sx.functional.attention_pool(place[0], place[1], leaf, place[3]).sum().backward()
    eps = torch.finfo(dtype).eps
    tolerance = 8 * eps * (float(scores.abs().max()) * 10 + margin)  # an error of a score is one of its exponential
    coefs = coefs[0].double().cpu()
    smallest = 4 * eps * torch.finfo(dtype).tiny
    assert ((coefs[:, 0] - q).abs() <= tolerance * q + smallest).all()
    # Differences of values carry eps of the values, against their own size.
    spread = float((c / q).abs().max())
    rounding = 16 * eps * float((embedding.double() @ v.double()).abs().max()) / spread
    biggest = c.abs().max()
    assert ((coefs[:, 1] - c).abs() <= (tolerance + rounding) * biggest).all()
    size = d_p.abs().max()  # not a norm: squares of these numbers underflow
    assert (leaf.grad.double().cpu() - d_p).abs().max() <= 4 * (tolerance + rounding) * size

    # Eager torch does not get one digit right, so the test above says something.
    eager = p.clone().requires_grad_()
    reference(ids, embedding, eager, v).sum().backward()
    assert (eager.grad.double() - d_p).abs().max() > 0.1 * size


def test_beyond_the_smallest_number_the_gradient_is_zero(backend):
    embedding = torch.tensor([[400.0, 1.0], [0.0, -1.0]])
    got = run_ours(backend, torch.tensor([[0, 1]]), embedding, torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]))
    assert got[0].tolist() == [1.0]
    assert (got[2] == 0).all()


def test_the_same_leading_token_twice(backend):
    """Two copies of the leader share the mass; their gradients stay exact and equal."""
    embedding = torch.tensor([[50.0, 1.0], [0.0, -1.0]], dtype=torch.float64)
    p, v = torch.tensor([1.0, 0.0], dtype=torch.float64), torch.tensor([0.0, 1.0], dtype=torch.float64)
    place = [t.to(backend.device) for t in (torch.tensor([[0, 1, 0]]), embedding, p, v)]
    c = OP(*place, True, True, True)[1][0, :, 1].cpu()
    e = torch.tensor(-50.0, dtype=torch.float64).exp() / 2
    wanted = torch.stack([e, -2 * e, e])
    torch.testing.assert_close(c, wanted, rtol=1e-14, atol=0)


def test_coefficients_are_the_sum_over_pairs(backend):
    ids, embedding, p, v = make(4, 7, 8, dtype=torch.float64, padding=0.0)
    place = [t.to(backend.device) for t in (ids, embedding, p, v)]
    coefs = OP(*place, True, False, True)[1].cpu()
    q, c = attention_pool_coefficients(ids, embedding, p, v)
    torch.testing.assert_close(coefs, torch.stack([q, c], 2), rtol=1e-11, atol=1e-15)


# ------------------------------------------------------------------------------------------------ autograd, dispatcher
@pytest.mark.parametrize("sparse", [True, False])
def test_gradcheck(backend, sparse):
    ids, *inputs = make(3, 5, 4, 6, dtype=torch.float64)
    leaves = [t.to(backend.device).requires_grad_() for t in inputs]

    def f(embedding, p, v):
        return sx.functional.attention_pool(ids.to(backend.device), embedding, p, v, sparse=sparse)

    def to_dense(embedding, p, v):  # gradcheck wants a dense gradient where the input is dense
        return f(embedding * 1.0 if not sparse else _DenseGrad.apply(embedding), p, v)

    assert torch.autograd.gradcheck(to_dense, leaves)


class _DenseGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad.to_dense()


@pytest.mark.parametrize("given", [(True, True), (True, False), (False, False)])
def test_opcheck_forward(backend, given):
    ids, *inputs = (t.to(backend.device) for t in make(3, 4, 5))
    leaves = [t.clone().requires_grad_(given[0] if i == 0 else given[1]) for i, t in enumerate(inputs)]
    # Sparse gradients are beyond opcheck: its autograd test compares them as dense ones.
    torch.library.opcheck(OP, (ids, *leaves, *given, False))


@pytest.mark.parametrize("need", [(True, True), (True, False), (False, True)])
def test_opcheck_backward(backend, need):
    ids, embedding, p, v = (t.to(backend.device) for t in make(3, 4, 5))
    _, coefs, sums = OP(ids, embedding, p, v, True, True, True)
    grad = torch.ones(3, device=backend.device)
    tests = ("test_schema", "test_faketensor")  # rows behind the count are unspecified: not comparable
    torch.library.opcheck(BWD, (grad, ids, p, v, coefs, sums, 20, *need), test_utils=tests)


@pytest.mark.parametrize("sparse", [True, False])
def test_compile_with_a_dynamic_batch(sparse):
    _, embedding, p, v = make(dim=8)
    leaves = [t.clone().requires_grad_() for t in (embedding, p, v)]

    def step(ids):
        return sx.functional.attention_pool(ids, *leaves, sparse=sparse).sum()

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for batch in (4, 6, 9):
        ids = make(batch, 9)[0]
        found = []
        for function in (step, compiled):
            found.append([dense(g) for g in torch.autograd.grad(function(ids), leaves)])
        assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


def test_double_backward_is_an_error(backend):
    ids, *inputs = make()
    leaves = [t.to(backend.device).requires_grad_() for t in inputs]
    got = sx.functional.attention_pool(ids.to(backend.device), *leaves)
    with pytest.raises(RuntimeError, match="attention_pool: double backward"):
        torch.autograd.grad(got.sum(), leaves, create_graph=True)


def test_backward_needs_what_the_forward_kept(backend):
    ids, *inputs = make()
    leaves = [t.to(backend.device).requires_grad_() for t in inputs]
    with pytest.raises(RuntimeError, match="need_grad=True"):
        OP(ids.to(backend.device), *leaves, False, False, True)[0].sum().backward()
    with pytest.raises(RuntimeError, match="need_vectors=True"):
        OP(ids.to(backend.device), *leaves, True, False, True)[0].sum().backward()


@pytest.mark.parametrize("optimizer", ["SparseAdam", "RowAdagrad", "SGD"])
def test_optimizers_take_the_gradient(optimizer):
    ids, embedding, p, v = make(8, 6, 16, 200)
    leaf = embedding.clone().requires_grad_()
    module = sx.optim if optimizer.startswith("Row") else torch.optim
    step = getattr(module, optimizer)([leaf], lr=0.1)
    sx.functional.attention_pool(ids, leaf, p, v).sum().backward()
    step.step()
    touched = torch.zeros(200, dtype=torch.bool)
    touched[ids[ids >= 0]] = True
    moved = (leaf.detach() != embedding).any(1)
    assert torch.equal(moved, touched)


# ------------------------------------------------------------------------------------------------ determinism
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_same_bits_for_any_number_of_threads(simd_level, dtype):
    case = make(40, 120, 48, 3000, dtype=dtype)

    class Cpu:
        device = torch.device("cpu")

    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(run_ours(Cpu, *case))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_same_bits_twice(backend):
    case = make(4, 30, 40)
    a, b = run_ours(backend, *case), run_ours(backend, *case)
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_a_row_does_not_depend_on_its_batch(backend):
    ids, embedding, p, v = make(5, 30, 40)
    whole = run_ours(backend, ids, embedding, p, v)[0]
    for b in range(5):
        assert torch.equal(run_ours(backend, ids[b : b + 1], embedding, p, v)[0], whole[b : b + 1])


# ------------------------------------------------------------------------------------------------ memory
def test_no_tensor_of_batch_length_and_dim():
    """Peak memory of a step stays far below one [B, T, d] tensor; a separate process, for its own peak."""
    script = """
import resource, torch, samplex_cuda as sx
B, T, d, S = 256, 512, 256, 2000
embedding = torch.randn(S, d).requires_grad_()
p, v = torch.randn(d, requires_grad=True), torch.randn(d, requires_grad=True)
ids = torch.randint(S, (B, T))
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
sx.functional.attention_pool(ids[:2, :2], embedding, p, v).sum().backward()
embedding.grad = None
before = peak()
sx.functional.attention_pool(ids, embedding, p, v).sum().backward()
print((peak() - before) / (B * T * d * 4))
"""
    run = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "SAMPLEX_CPU_BACKEND": "cpu"},
    )
    # [B, T, 2], [B, 2, d], the sort of B T entries and 2,000 gradient rows, against 128 MiB.
    assert float(run.stdout) < 0.25


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("batch", [1, 32, 33, 300, 8300])
def test_gradients_of_vectors_are_summed_in_parts(backend, batch, dtype):
    """The GPU sums 32 rows and more at a time, then the parts; a row with a zero gradient has no part, nan or not."""
    dim = 3
    grad, sums = torch.randn(batch, dtype=dtype), torch.randn(batch, 2, dim, dtype=dtype)
    grad[batch // 2] = 0.0
    want = torch.einsum("b,bvd->vd", grad.double(), sums.double())
    sums[batch // 2] = torch.nan
    ids, coefs, vector = (
        torch.zeros(batch, 1, dtype=torch.int64),
        torch.zeros(batch, 1, 2, dtype=dtype),
        torch.zeros(dim),
    )
    given = [t.to(backend.device) for t in (grad, ids, vector.to(dtype), vector.to(dtype), coefs, sums)]
    first, second = (torch.ops.samplex.attention_pool_bwd(*given, 1, False, True)[3:] for _ in range(2))
    for got, again, expected in zip(first, second, (want[1], want[0]), strict=True):
        assert torch.equal(got, again)
        torch.testing.assert_close(got.cpu().double(), expected, rtol=1e-6, atol=1e-6 * batch**0.5)
