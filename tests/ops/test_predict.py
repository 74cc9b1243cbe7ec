"""Passes over a chunk of exact logits, against plain torch, on every backend and SIMD level."""

from __future__ import annotations

import re

import pytest
import torch

from samplex_cuda import prediction
from samplex_cuda.ops import predict as ops
from samplex_cuda.reference import predict as reference

INF, NAN = float("inf"), float("nan")
LSE = torch.ops.samplex.predict_lse.default
GRAD = torch.ops.samplex.predict_grad.default
TOPK = torch.ops.samplex.predict_topk.default


def make(batch=3, count=37, targets=2, first=10, dtype=torch.float32, bias=True, weighted=True):
    """Arguments of predict_lse up to `absolute`; targets lie before, in and behind the chunk, or are none."""
    target = torch.randint(-1, first + 2 * count, (batch, targets))
    if batch and targets:
        target[0, 0] = first + count - 1
    return (
        3 * torch.randn(batch, count, dtype=dtype),
        torch.randn(count, dtype=dtype) if bias else None,
        target,
        torch.rand(count, dtype=dtype) if weighted else None,
        first,
        1.3,
        False,
    )


def to(device, *values):
    return tuple(v.to(device) if isinstance(v, torch.Tensor) else v for v in values)


def wide(*values):
    return tuple(v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for v in values)


def check_lse(device, arguments, lse=None):
    dots, target = arguments[0], arguments[2]
    lse = torch.randn(dots.shape[0], dtype=torch.float64) if lse is None else lse
    positive = torch.full(target.shape, 7.0, dtype=dots.dtype)
    total = torch.randn(dots.shape[0], dtype=torch.float64)
    wanted = reference.predict_lse(*wide(*arguments, lse, positive, total))
    got = to(device, lse.clone(), positive, total)
    ops.predict_lse(*to(device, *arguments), *got)
    tolerance = 1e-12 if dots.dtype == torch.float64 else 3e-6
    for name, mine, theirs in zip(("lse", "positive", "total"), got, wanted, strict=True):
        size = theirs[theirs.isfinite()].abs().max() if theirs.isfinite().any() else 1.0
        torch.testing.assert_close(
            mine.cpu().double(), theirs, rtol=0, atol=float(tolerance * (1 + size)), equal_nan=True, msg=name
        )


def check_grad(device, arguments, smooth=True):
    dots, target = arguments[0], arguments[2]
    batch, dtype = dots.shape[0], dots.dtype
    s = reference._logits(dots.double(), arguments[1], *arguments[5:])
    lse = s.logsumexp(1) + 0.3
    coef, target_coef = torch.randn(batch, dtype=dtype), torch.randn(target.shape, dtype=dtype)
    if batch:
        coef[-1] = 0.0
    rest = (lse, coef, target_coef, torch.rand(batch, dtype=dtype) if smooth else None)
    wanted = reference.predict_grad(*wide(*arguments, *rest))
    mine = to(device, *arguments, *rest)
    ops.predict_grad(*mine)
    tolerance = 1e-12 if dtype == torch.float64 else 4e-6
    torch.testing.assert_close(mine[0].cpu().double(), wanted, rtol=tolerance, atol=tolerance, equal_nan=True)


def check_topk(device, dots, bias=None, chunks=(5,), k=4, scale=1.0, absolute=False):
    """All classes in chunks, to the very bits."""
    batch, classes = dots.shape
    values = torch.full((batch, k), NAN, dtype=dots.dtype)
    mine = to(device, values.clone(), torch.full((batch, k), -7))
    first, step = 0, 0
    while first < classes:
        count = min(chunks[step % len(chunks)], classes - first)
        part = slice(first, first + count)
        ops.predict_topk(
            dots[:, part].contiguous().to(device),
            None if bias is None else bias[part].to(device),
            first,
            scale,
            absolute,
            *mine,
        )
        first, step = first + count, step + 1
    wanted = reference.predict_topk(dots, bias, 0, scale, absolute, values, torch.empty(batch, k, dtype=torch.int64))
    held = min(k, classes)
    assert torch.equal(mine[1][:, :held].cpu(), wanted[1])
    torch.testing.assert_close(mine[0][:, :held].cpu(), wanted[0], rtol=0, atol=0, equal_nan=True)


# ------------------------------------------------------------------------------------------------ against the reference
@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [1, 15, 64, 131])
def test_lse_and_gradient(backend, count, dtype, absolute):
    arguments = (*make(count=count, dtype=dtype)[:-1], absolute)
    check_lse(backend.device, arguments)
    check_grad(backend.device, arguments)


@pytest.mark.parametrize("options", [{"bias": False, "weighted": False}, {"targets": 0}, {"targets": 11}])
def test_optional_arguments(backend, options):
    check_lse(backend.device, make(**options))
    check_grad(backend.device, make(**options), smooth=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [5003, 33000])
def test_long_rows(backend, count, dtype):
    # Several segments a row on the CPU, several warps and several blocks per row on the GPU.
    check_lse(backend.device, make(batch=2, count=count, dtype=dtype))
    check_grad(backend.device, make(batch=2, count=count, dtype=dtype))


def run_lse(device, dots):
    lse = torch.full(dots.shape[:1], -INF, dtype=torch.float64, device=device)
    total, target = torch.zeros_like(lse), torch.zeros(len(lse), 0, dtype=torch.int64, device=device)
    ops.predict_lse(dots.to(device), None, target, None, 0, 1.0, False, lse, dots.new_empty(len(lse), 0), total)
    return lse.cpu(), total.cpu()


def test_lse_does_not_depend_on_the_blocks_of_a_row(backend):
    # 1,024 rows give a row one block, one row gives it two: the same bits.
    if backend.name == "cuda" and backend.emulated:
        pytest.skip("16 million logits take minutes there")
    row = torch.randn(1, 16400)
    for one, many in zip(run_lse(backend.device, row), run_lse(backend.device, row.repeat(1024, 1)), strict=True):
        assert torch.equal(one.expand(1024), many)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_of_any_alignment(backend, dtype):
    # An odd number of columns: rows start at every offset; and the buffer itself is not aligned.
    rows = torch.randn(1, 4099, dtype=dtype).repeat(5, 1)
    shifted = torch.empty(rows.numel() + 1, dtype=dtype, device=backend.device)[1:].view_as(rows).copy_(rows)
    assert shifted.data_ptr() % 16 != 0
    for result in run_lse(backend.device, shifted):
        assert (result == result[0]).all()
    check_topk(backend.device, rows, chunks=(4099,), k=20)
    values, ids = to(backend.device, torch.empty(5, 20, dtype=dtype), torch.empty(5, 20, dtype=torch.int64))
    bias = torch.randn(4100, dtype=dtype, device=backend.device)[1:]
    ops.predict_topk(shifted, bias, 0, 1.0, False, values, ids)
    assert torch.equal(values, (shifted + bias).sort(dim=1, descending=True)[0][:, :20])


@pytest.mark.parametrize("count", [1, 17, 40, 133])
def test_simd_levels(simd_level, count):
    cpu = torch.device("cpu")
    for absolute in (False, True):
        check_lse(cpu, (*make(count=count)[:-1], absolute))
        check_grad(cpu, (*make(count=count)[:-1], absolute))
    for k in (1, 4, 60):
        check_topk(cpu, torch.randint(-9, 9, (3, 300)).float(), chunks=(count,), k=k)


def test_special_values_in_lse(backend):
    dots = torch.randn(6, 40)
    dots[0] = -INF
    dots[1, 3] = -INF
    dots[2, [5, 39]] = INF
    dots[3, 39] = NAN
    dots[4, 0], dots[4, 39] = INF, NAN
    start = torch.tensor([-INF, -INF, 0.0, 0.0, 0.0, NAN], dtype=torch.float64)
    check_lse(backend.device, (dots, None, *make(6, 40)[2:]), start)
    check_lse(backend.device, (dots, None, *make(6, 40)[2:]), torch.full((6,), -INF, dtype=torch.float64))


def test_the_smallest_target_is_no_target(backend):
    """Its distance to the chunk does not fit 64 bits: undefined behavior, which `make sanitize` reports."""
    dots, bias, target, *rest = make()
    target[:] = torch.iinfo(torch.int64).min
    check_lse(backend.device, (dots, bias, target, *rest))
    check_grad(backend.device, (dots, bias, target, *rest))


def test_a_nan_stays_in_its_row_and_an_ignored_row_has_none(backend):
    dots = torch.randn(3, 20)
    dots[:2, 7] = NAN
    lse = dots.double().logsumexp(1)
    coef = torch.tensor([1.0, 0.0, 1.0])
    rest = (None, torch.full((3, 1), -1), None, 0, 1.0, False, lse, coef, torch.zeros(3, 1))
    mine = to(backend.device, dots.clone(), *rest)
    ops.predict_grad(*mine)
    got = mine[0].cpu()
    assert got[0].isnan().all()
    assert torch.equal(got[1], torch.zeros(20))
    torch.testing.assert_close(got[2], dots[2].softmax(0))


# ------------------------------------------------------------------------------------------------ dots [n, B]
def by_class_sides(arguments, rest, smooth):
    """lse, positive, total and gradient of the same products, as [B, n] and as [n, B]."""
    dots, target = arguments[0], arguments[2]
    found = []
    for by_class in (False, True):
        given = dots.t().contiguous() if by_class else dots.clone()
        lse, coef, target_coef = rest
        out = lse.clone(), torch.full(target.shape, 7.0, dtype=dots.dtype), torch.zeros_like(lse)
        ops.predict_lse(given, *arguments[1:], *out, by_class)
        ops.predict_grad(given, *arguments[1:], lse, coef, target_coef, smooth, None, by_class)
        found.append((*out, given.t() if by_class else given))
    return found


@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("batch", [1, 15, 16, 70, 131])
@pytest.mark.parametrize("count", [1, 65, 4500])
def test_by_class_is_the_same(simd_level, batch, count, dtype, absolute):
    for options in ({}, {"bias": False, "weighted": False}, {"targets": 11}):
        arguments = (*make(batch, count, dtype=dtype, **options)[:-1], absolute)
        lse = torch.randn(batch, dtype=torch.float64) + 5.0
        coef, target_coef = torch.randn(batch, dtype=dtype), torch.randn(arguments[2].shape, dtype=dtype)
        coef[batch // 2] = 0.0
        smooth = torch.rand(batch, dtype=dtype) if options else None
        one, two = by_class_sides(arguments, (lse, coef, target_coef), smooth)
        tolerance = 1e-12 if dtype == torch.float64 else 3e-6
        for mine, theirs in zip(two, one, strict=True):
            size = float(theirs.abs().max()) if theirs.numel() else 0.0
            torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance * (1 + size))


def test_by_class_with_numbers_that_are_not_finite(simd_level):
    dots = torch.randn(37, 3000)
    dots[0, 7], dots[1, 2100], dots[2] = NAN, INF, -INF
    dots[3, :100], dots[4, 5], dots[4, 6], dots[35, 7], dots[36] = -INF, INF, NAN, NAN, -3.4e38
    dots[5] = NAN
    target = torch.full((37, 1), 8)
    for lse in (torch.full((37,), -INF, dtype=torch.float64), torch.zeros(37, dtype=torch.float64)):
        coef = torch.ones(37)
        coef[35] = 0.0
        one, two = by_class_sides((dots, None, target, None, 0, 1.0, False), (lse, coef, coef.view(-1, 1)), None)
        for mine, theirs in zip(two[:2], one[:2], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=3e-6, atol=3e-6, equal_nan=True)
        if bool((lse == 0).all()):
            torch.testing.assert_close(two[3], one[3], rtol=3e-6, atol=3e-6, equal_nan=True)
            assert torch.equal(two[3][35, 9:], torch.zeros(2991))


def test_by_class_has_the_same_bits_for_every_thread_count(cpu):
    arguments, results = make(batch=100, count=5000), []
    given = arguments[0].t().contiguous()
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            lse, positive = torch.zeros(100, dtype=torch.float64), torch.zeros(100, 2)
            ops.predict_lse(given, *arguments[1:], lse, positive, None, True)
            dots = given.clone()
            ones = torch.ones(100)
            ops.predict_grad(dots, *arguments[1:], lse, ones, torch.ones(100, 2), None, None, True)
            results.append((lse, dots))
    finally:
        torch.set_num_threads(before)
    for lse, dots in results[1:]:
        assert torch.equal(lse, results[0][0])
        assert torch.equal(dots, results[0][1])


# ------------------------------------------------------------------------------------------------ top-k
@pytest.mark.parametrize("k", [1, 7, 64, 256, 390])
@pytest.mark.parametrize("chunks", [(1000,), (3, 50, 7), (256,)])
def test_topk_with_ties(backend, k, chunks):
    # Whole numbers: many ties, within chunks and over their borders.
    dots = torch.randint(-20, 20, (3, 400)).float()
    check_topk(backend.device, dots, torch.randint(-3, 4, (400,)).float(), chunks, k)


def test_topk_of_rising_and_falling_rows(backend):
    # Every column of a rising row enters: more than a block of the GPU has room for before it must sort.
    up = torch.arange(1800.0)
    check_topk(backend.device, torch.stack([up, -up, up % 7]), chunks=(1799,), k=10)


@pytest.mark.parametrize("k", [1, 10, 300])
def test_topk_of_several_blocks(backend, k):
    # 20,000 columns are two blocks or three, 3,000 are one; ties within blocks and over their borders.
    dots = torch.randint(-300, 300, (2, 23000)).float()
    dots[1] += torch.rand(23000)
    check_topk(backend.device, dots, torch.randint(-3, 4, (23000,)).float(), (20000, 3000), k)
    check_topk(backend.device, dots.double(), None, (3000, 20000), k, scale=-0.5, absolute=True)


def test_topk_of_1024(backend):
    # Two blocks per row. The first row rises: every column is among the largest so far, and the pool of a block is cut
    # again and again. The second is one tie.
    dots = torch.stack([torch.arange(36000.0), torch.zeros(36000), torch.randn(36000)])
    check_topk(backend.device, dots, chunks=(35000, 1000), k=ops.MOST_K)
    check_topk(backend.device, dots[:, :700], chunks=(300,), k=ops.MOST_K)


def test_topk_of_several_blocks_with_special_values(backend):
    dots = torch.full((5, 20000), -INF)
    dots[1] = NAN
    dots[2, 19990:] = NAN
    dots[2, :8000] = 1.0
    dots[3] = torch.where(torch.arange(20000) % 2 == 0, 0.0, -0.0)
    dots[4, [0, 19999]] = torch.tensor([INF, NAN])
    for k in (1, 15):
        check_topk(backend.device, dots, chunks=(20000,), k=k)
        check_topk(backend.device, dots, chunks=(9000, 11000), k=k)


def test_topk_special_values(backend):
    dots = torch.randn(7, 30)
    dots[0] = -INF
    dots[1] = NAN
    dots[2, [4, 20]] = NAN
    dots[3, [4, 20]] = INF
    dots[4, 3:] = -INF
    dots[5] = torch.where(torch.arange(30) % 2 == 0, 0.0, -0.0)
    for k in (1, 3, 30):
        check_topk(backend.device, dots, chunks=(11,), k=k)
        check_topk(backend.device, dots.double(), chunks=(30,), k=k, scale=-2.0, absolute=True)


def test_fewer_classes_than_k(backend):
    check_topk(backend.device, torch.randn(2, 5), chunks=(2,), k=9)


@pytest.mark.parametrize("k", [256, 257, ops.MOST_K + 1])
def test_more_than_the_op_holds_goes_another_way(k):
    h, weight = torch.randn(4, 3), torch.randn(1700, 3)
    logits, ids = prediction.exact_topk(h, weight, k, chunk_size=333)
    wanted = (h @ weight.t()).sort(dim=1, descending=True, stable=True)
    assert torch.equal(ids, wanted[1][:, :k])
    torch.testing.assert_close(logits, wanted[0][:, :k])


# ------------------------------------------------------------------------------------------------ candidates
def check_dots(device, dtype=torch.float32, batch=3, count=7, dim=33, classes=20):
    h, weight = torch.randn(batch, dim).to(dtype), torch.randn(classes, dim).to(dtype)
    ids = torch.randint(-1, classes + 1, (batch, count))
    got = ops.predict_dots(*to(device, h, weight, ids)).cpu()
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(
        got.double(), reference.predict_dots(h.double(), weight.double(), ids), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("dim", [33, 264, 1100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_dots(backend, dtype, dim):
    check_dots(backend.device, dtype, dim=dim)


@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 4, 16), (2, 13, 129), (0, 3, 4), (3, 0, 4)])
def test_dots_of_any_shape(backend, shape):
    check_dots(backend.device, torch.float32, *shape)


def test_dots_on_every_simd_level(simd_level):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        check_dots(torch.device("cpu"), dtype, 6, 30, 70)


# ------------------------------------------------------------------------------------------------ empty, bits, errors
def test_nothing_to_do(backend):
    for batch, count in ((0, 5), (3, 0)):
        arguments = to(backend.device, *make(batch, count))
        lse = torch.zeros(batch, dtype=torch.float64, device=backend.device)
        positive = torch.ones(batch, 2, device=backend.device)
        ops.predict_lse(*arguments, lse, positive, None)
        assert torch.equal(lse, torch.zeros_like(lse))
        ids = torch.zeros(batch, 2, dtype=torch.int64, device=backend.device)
        ops.predict_topk(*arguments[:2], 10, 1.0, False, positive, ids)
        assert torch.equal(positive, torch.ones_like(positive))


def test_opcheck(cpu):
    rows, lse = torch.randn(3), torch.zeros(3, dtype=torch.float64)
    arguments = make()
    torch.library.opcheck(LSE, (*arguments, lse, torch.zeros(3, 2), lse.clone()))
    torch.library.opcheck(GRAD, (*arguments, lse, rows, torch.randn(3, 2), rows.clone()))
    turned = (arguments[0].t().contiguous(), *arguments[1:])
    torch.library.opcheck(LSE, (*turned, lse, torch.zeros(3, 2), lse.clone(), True))
    torch.library.opcheck(GRAD, (*turned, lse, rows, torch.randn(3, 2), rows.clone(), None, True))
    torch.library.opcheck(
        torch.ops.samplex.predict_dots.default, (torch.randn(3, 5), torch.randn(9, 5), torch.randint(9, (3, 2)))
    )
    torch.library.opcheck(TOPK, (*arguments[:2], 0, 1.0, False, torch.zeros(3, 4), torch.zeros(3, 4).long()))


def test_the_same_bits_in_two_runs_and_for_every_thread_count():
    arguments, results = make(batch=9, count=5000), []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 2, 3):
            torch.set_num_threads(threads)
            lse, positive = torch.zeros(9, dtype=torch.float64), torch.zeros(9, 2)
            ops.predict_lse(*arguments, lse, positive)
            results.append(lse)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(results[0], other) for other in results)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda d, i: TOPK(d.half(), None, 0, 1.0, False, d, i),
            "predict_topk: dots must be [B, n] float32 or float64, got [2, 3] float16",
        ),
        (
            lambda d, i: TOPK(d, d[0, :2].clone(), 0, 1.0, False, d, i),
            "predict_topk: bias must be [n] = [3] float32 contiguous on cpu, got [2]",
        ),
        (
            lambda d, i: TOPK(d, None, -1, 1.0, False, d, i),
            "predict_topk: first must be in [0, 2^52], got -1",
        ),
        (
            lambda d, i: TOPK(d, None, 0, 1.0, False, torch.zeros(2, 1025), i),
            "predict_topk: values must be [B, k] with k in [1, 1024], got [2, 1025]",
        ),
        (
            lambda d, i: TOPK(d, None, 0, 1.0, False, d.clone(), i.int()),
            "predict_topk: ids must be [B, k] = [2, 3] int64 contiguous on cpu, got [2, 3] int32",
        ),
        (
            lambda d, i: LSE(d, None, i, None, 0, 1.0, False, d[:, 0].clone(), d, None),
            "predict_lse: lse must be [B] = [2] float64 contiguous on cpu, got [2] float32",
        ),
        (
            lambda d, i: GRAD(d, None, i[:1], None, 0, 1.0, False, d[:, 0].double(), d[:, 0], d, None),
            "predict_grad: target must be [B, P] = [2, *] int64 contiguous on cpu, got [1, 3] int64",
        ),
        (
            lambda d, i: LSE(d, None, i, None, 0, 1.0, False, d[:, 0].double(), d, None, True),
            "predict_lse: target must be [B, P] = [3, *] int64 contiguous on cpu, got [2, 3] int64",
        ),
    ],
)
def test_errors(cpu, call, message):
    with pytest.raises(RuntimeError, match=re.escape(message)):
        call(torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.int64))


# ------------------------------------------------------------------------------------------------ aligned rows
def padded(dots, device, spare=16):
    """The same numbers in rows with nan behind them."""
    rows = torch.full((dots.shape[0], -(-dots.shape[1] // spare) * spare), NAN, dtype=dots.dtype, device=device)
    rows[:, : dots.shape[1]] = dots.to(device)
    return rows[:, : dots.shape[1]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [1, 37, 1025, 20_001])
def test_space_behind_the_rows_changes_no_bit(backend, count, dtype):
    if backend.name == "cpu":
        pytest.skip("rows of the CPU are contiguous")
    dots, bias, target, weight, *law = to(backend.device, *make(count=count, dtype=dtype))
    state = [torch.randn(3, dtype=torch.float64), torch.full(target.shape, 7.0, dtype=dtype), torch.zeros(3).double()]
    coef, per_target = torch.randn(3, dtype=dtype), torch.randn(target.shape, dtype=dtype)
    coef, per_target, lse = to(backend.device, coef, per_target, state[0])
    found = []
    for rows in (dots.clone(), padded(dots, backend.device)):
        made = [t.clone() for t in to(backend.device, *state)]
        ops.predict_lse(rows, bias, target, weight, *law, *made)
        values, ids = torch.zeros(3, 8, dtype=dtype), torch.zeros(3, 8, dtype=torch.int64)
        values, ids = to(backend.device, values, ids)
        ops.predict_topk(rows, bias, 0, *law[1:], values, ids)
        ops.predict_grad(rows, bias, target, weight, *law, lse, coef, per_target, coef)
        held = [values[:, : min(8, count)], ids[:, : min(8, count)]]
        found.append([t.clone() for t in (*made, *held, rows)])
        behind = rows.as_strided((3, rows.stride(0) - count), (rows.stride(0), 1), count)
        assert behind.isnan().all()
    for plain, spaced in zip(*found, strict=True):
        assert torch.equal(plain, spaced)


def test_rows_apart_are_refused_on_the_cpu():
    rows = torch.zeros(2, 16)[:, :5]
    with pytest.raises(RuntimeError, match=r"ValueError: predict_topk: dots must be \[B, n\] = .* contiguous"):
        ops.predict_topk(rows, None, 0, 1.0, False, torch.zeros(2, 1), torch.zeros(2, 1, dtype=torch.int64))


def test_rows_that_overlap_are_refused(backend):
    for rows in (torch.zeros(64).as_strided((2, 5), (3, 1)), torch.zeros(64).as_strided((2, 5), (10, 2))):
        with pytest.raises(RuntimeError, match="ValueError: predict_topk: dots must be"):
            ops.predict_topk(
                rows.to(backend.device) if not backend.emulated else rows, None, 0, 1.0, False,
                torch.zeros(2, 1, device=backend.device), torch.zeros(2, 1, dtype=torch.int64, device=backend.device),
            )  # fmt: skip
