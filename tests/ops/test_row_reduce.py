"""Row reduction: weighted rows summed by id. Against plain torch, at the borders of its sort, and bit for bit."""

from __future__ import annotations

import pytest
import torch

from samplex_cuda.ops.row_reduce import row_reduce
from samplex_cuda.reference.row_reduce import row_reduce as reference
from samplex_cuda.testing import assert_close

OP = torch.ops.samplex.row_reduce.default


def make(rows=6, per_row=5, dim=7, num_rows=20, *, dtype=torch.float32, negatives=0.2, zeros=0.2, seed=0):
    g = torch.Generator().manual_seed(seed)
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    ids = torch.randint(0, num_rows, (rows, per_row), generator=g)
    ids[torch.rand(rows, per_row, generator=g) < negatives] = -100
    coef = torch.randn(rows, per_row, generator=g).to(acc)
    coef[torch.rand(rows, per_row, generator=g) < zeros] = 0
    return ids, coef, torch.randn(rows, dim, generator=g).to(dtype)


def check(backend, ids, coef, rows, num_rows, *, with_bias=True) -> None:
    """One source against the reference in float64."""
    place = [None if t is None else t.to(backend.device) for t in (ids, coef, rows)]
    row_ids, grads, bias, count = (t.cpu() for t in row_reduce(*place, num_rows, with_bias=with_bias))
    capacity = min(ids.numel(), num_rows)
    acc = torch.float64 if rows.dtype == torch.float64 else torch.float32
    assert row_ids.shape == (capacity,)
    assert grads.shape == (capacity, rows.shape[1])
    assert bias.shape == (capacity if with_bias else 0,)
    assert row_ids.dtype == count.dtype == torch.int64
    assert grads.dtype == bias.dtype == acc
    ones = torch.ones(ids.shape, dtype=acc) if coef is None else coef
    wanted = reference(ids, ones.double(), rows.double())
    torchs = reference(ids, ones, rows.to(acc))
    n = int(count)
    assert torch.equal(row_ids[:n], wanted[0])
    assert (row_ids[n:] == -1).all()
    assert_close("row_grads", grads[:n], wanted[1], torchs[1])
    if with_bias:
        assert_close("row_bias", bias[:n], wanted[2], torchs[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", [1, 7, 8, 16, 17, 33, 130])
def test_matches_the_reference(backend, dtype, dim):
    check(backend, *make(dim=dim, dtype=dtype), 20)


@pytest.mark.parametrize("dim", [1, 7, 8, 9, 15, 16, 17, 31, 33])
def test_simd_levels(simd_level, dim):
    ids, coef, rows = make(dim=dim)
    n = int(row_reduce(ids, coef, rows, 20)[3])
    wanted, torchs = reference(ids, coef.double(), rows.double()), reference(ids, coef, rows)
    assert_close("row_grads", row_reduce(ids, coef, rows, 20)[1][:n], wanted[1], torchs[1])


def test_without_coefficients_every_entry_counts_once(backend):
    ids, _, rows = make(zeros=0.0)
    check(backend, ids, None, rows, 20)


def test_without_bias(backend):
    check(backend, *make(), 20, with_bias=False)


def test_one_entry_per_row_needs_no_second_dimension(backend):
    ids, coef, rows = (t.to(backend.device) for t in make(per_row=1))
    rest = torch.zeros(0, dtype=torch.int64, device=backend.device), None, rows[:0], 20, True
    wanted = row_reduce(ids, coef, rows, 20, with_bias=True)
    n = int(wanted[3])
    assert n > 2
    for flat in (OP(ids[:, 0].contiguous(), coef, rows, *rest), OP(ids[:, 0].contiguous(), coef[:, 0], rows, *rest)):
        assert all(torch.equal(a[:n], b[:n]) for a, b in zip(flat, wanted, strict=True))


def test_bias_of_the_second_source(backend):
    """What the entries of b add to the bias may be given; those of a add their coefficients."""
    ids_a, coef, rows_a = (t.to(backend.device) for t in make(seed=1))
    ids_b, _, rows_b = (t.to(backend.device) for t in make(per_row=1, seed=2))
    given = torch.arange(1.0, 7.0, device=backend.device)
    row_ids, grads, bias, count = OP(ids_a, coef, rows_a, ids_b, None, rows_b, 20, True, given)
    plain = OP(ids_a, coef, rows_a, ids_b, None, rows_b, 20, True)
    n = int(count)
    assert torch.equal(row_ids[:n], plain[0][:n])
    assert torch.equal(grads[:n], plain[1][:n])
    wanted = torch.zeros(20)
    for ids, amounts in ((ids_a, coef), (ids_b, given[:, None])):
        kept = ids.cpu() >= 0
        wanted.index_add_(0, ids.cpu()[kept], amounts.cpu()[kept])
    torch.testing.assert_close(bias[:n].cpu(), wanted[row_ids[:n].cpu()])
    assert not torch.equal(bias[:n], plain[2][:n])


def test_ids_out_of_range_without_their_check_are_left_out(backend):
    ids, coef, rows = (t.to(backend.device) for t in make())
    empty = torch.zeros((0, 1), dtype=torch.int64, device=backend.device), None, rows[:0], 20, True, None
    far = torch.where(ids < 0, 10**9, ids)
    assert (far != ids).any()
    wanted, got = OP(ids, coef, rows, *empty, True), OP(far, coef, rows, *empty, False)
    n = int(wanted[3])
    assert all(torch.equal(a[:n], b[:n]) for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("shape", [(0, 5), (4, 0), (0, 0)])
def test_nothing_to_reduce(backend, shape):
    check(backend, torch.zeros(shape, dtype=torch.int64), torch.zeros(shape), torch.zeros(shape[0], 3), 20)


@pytest.mark.parametrize("why", ["negative ids", "zero coefficients"])
def test_all_entries_left_out(backend, why):
    ids, coef, rows = make(negatives=1.0 if why == "negative ids" else 0.0, zeros=float(why != "negative ids"))
    check(backend, ids, coef, rows, 20)


def test_an_entry_left_out_is_not_read(backend):
    ids, coef, rows = make()
    dead = torch.full((1, 5), -1)
    bad = torch.full((1, 7), float("nan"))
    check(backend, torch.cat([ids, dead]), torch.cat([coef, torch.ones(1, 5)]), torch.cat([rows, bad]), 20)


@pytest.mark.parametrize("num_rows", [1, 2, 3, 2**11 - 1, 2**11, 2**11 + 1, 2**22 + 1, 2**24 + 1, 2**33 + 3, 2**40])
def test_ids_of_any_width(backend, num_rows):
    # Around the digits of the sort, and beyond 32 bits; the largest ids are always there.
    ids, coef, rows = make(num_rows=num_rows, zeros=0.0)
    ids[0, 0] = ids[3, 2] = num_rows - 1
    ids[1, 1] = 0
    check(backend, ids, coef, rows, num_rows)


def test_more_entries_than_rows_fills_the_capacity(backend):
    ids = torch.arange(40).reshape(8, 5) % 10
    check(backend, ids, torch.ones(8, 5), torch.randn(8, 3), 10)


def test_one_id_many_times(backend):
    ids = torch.full((60, 20), 3)
    ids[0, 0] = 4
    check(backend, ids, torch.randn(60, 20), torch.randn(60, 9), 1000)


# Rows are cut into pieces of 8 entries on a GPU, and 16 pieces make one of the next level: rows that begin and end just
# before, at and behind such borders, several in one piece, and so long that three levels are needed.
CUT_ROWS = {
    "one piece": [7, 8, 9, 1, 15, 16, 17, 1],
    "two": [31, 1, 32, 33, 2],
    "borders": [16, 32, 48, 16, 17, 47, 1, 15],
    "same node": [5, 40, 60, 33, 35, 34, 3],
    "second level": [7, 120, 128, 129, 250, 256, 257, 300, 1, 512],
    "head in the last piece": [127, 700, 1, 255, 530],
    "third level": [3, 4200, 9, 9000, 1],
    "one row, not cut": [15],
    "one row, cut": [16],
    "one row, one node": [255],
    "one row, two nodes": [256],
    "one row from a border on": [7, 249],
}


@pytest.mark.parametrize("dim", [1, 8, 40])
@pytest.mark.parametrize("lengths", list(CUT_ROWS.values()), ids=list(CUT_ROWS))
def test_rows_of_any_number_of_entries(backend, lengths, dim):
    if dim > 8 and sum(lengths) > 2000:
        pytest.skip("the fibers of the harness take long")
    g = torch.Generator().manual_seed(4)
    ids = torch.repeat_interleave(torch.arange(len(lengths)) * 3, torch.tensor(lengths))
    ids = ids[torch.randperm(ids.numel(), generator=g)][:, None]
    check(backend, ids, torch.randn(ids.shape, generator=g), torch.randn(ids.numel(), dim, generator=g), 100)


def test_pieces_of_a_row_are_added_in_the_order_of_the_entries(backend):
    """Whole numbers: every order gives the same bits, so that a piece that is lost, or added twice, shows."""
    n = 3000
    ids = torch.zeros(n, 1, dtype=torch.int64, device=backend.device)
    ids[1::300] = 5
    coef = torch.arange(1.0, n + 1, device=backend.device)[:, None].remainder(97)
    found = row_reduce(ids, coef, torch.ones(n, 4, device=backend.device), 9, with_bias=True)
    for place, id in enumerate((0, 5)):
        wanted = coef[ids == id].sum()
        assert found[2][place] == wanted
        assert (found[1][place] == wanted).all()


def zipf(entries: int, num_rows: int, seed=0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    ranks = (torch.rand(entries, generator=g) * torch.tensor(num_rows + 1.0).log()).exp().long()
    return ranks.clamp_max(num_rows) - 1


def test_zipf(backend):
    rows = 40 if backend.emulated else 400
    check(backend, zipf(rows * 50, 100_000).reshape(rows, 50), torch.randn(rows, 50), torch.randn(rows, 5), 100_000)


def test_two_sources_of_different_dtype_and_width(backend):
    a_ids, a_coef, a_rows = make(4, 2, 6)
    b_ids, b_coef, b_rows = make(5, 3, 6, dtype=torch.bfloat16, seed=1)
    place = [t.to(backend.device) for t in (a_ids, a_coef, a_rows, b_ids, b_coef, b_rows)]
    row_ids, grads, bias, count = (t.cpu() for t in OP(*place, 20, True))
    n = int(count)

    def both(dtype):
        parts = [(a_ids, a_coef, a_rows), (b_ids, b_coef, b_rows)]
        ids = torch.cat([i.reshape(-1, 1) for i, _, _ in parts])
        coef = torch.cat([c.reshape(-1, 1) for _, c, _ in parts]).to(dtype)
        rows = torch.cat([r.to(dtype).repeat_interleave(i.shape[1], 0) for i, _, r in parts])
        return reference(ids, coef, rows)

    wanted, torchs = both(torch.float64), both(torch.float32)
    assert row_ids.shape == (20,)  # 8 + 15 entries, 20 rows
    assert torch.equal(row_ids[:n], wanted[0])
    assert_close("row_grads", grads[:n], wanted[1], torchs[1])
    assert_close("row_bias", bias[:n], wanted[2], torchs[2])


def test_terms_are_added_in_the_order_of_the_entries(backend):
    # 1e8 first swallows the ones; behind them it does not. Bits say in which order the sum ran.
    ids = torch.zeros(1, 5, dtype=torch.int64, device=backend.device)
    rows = torch.ones(1, 1, device=backend.device)
    for coef in ([1e8, 1.0, 1.0, -1e8, 1.0], [1.0, 1.0, 1.0, 1e8, -1e8], [1e8, -1e8, 1.0, 1.0, 1.0]):
        total = torch.zeros(())
        for c in coef:
            total = total + torch.tensor(c)
        found = row_reduce(ids, torch.tensor([coef], device=backend.device), rows, 4, with_bias=True)
        assert found[1][0, 0].item() == found[2][0].item() == total.item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_same_bits_for_any_number_of_threads(simd_level, dtype):
    # 20,000 entries of a Zipf distribution: chunks of the sort begin and end inside long rows.
    ids = zipf(20_000, 5000).reshape(400, 50)
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    coef, rows = torch.randn(400, 50, dtype=acc), torch.randn(400, 11).to(dtype)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            row_ids, grads, bias, count = row_reduce(ids, coef, rows, 5000, with_bias=True)
            n = int(count)
            found.append((row_ids, grads[:n], bias[:n], count))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(x, y) for x, y in zip(found[0], other, strict=True))


def test_same_bits_twice(backend):
    args = [t.to(backend.device) for t in make(20, 11, 13, zeros=0.0, negatives=0.0)]
    one, two = (row_reduce(*args, 20, with_bias=True) for _ in range(2))
    n = int(one[3])
    assert all(torch.equal(x[:n], y[:n]) for x, y in zip(one, two, strict=True))


# ------------------------------------------------------------------------------------------------ torch's own checks
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("num_rows", [6, 100])
def test_opcheck(backend, with_bias, num_rows):
    # Every id is there, so that no row is left unspecified.
    ids = torch.arange(6, device=backend.device).reshape(3, 2)
    coef, rows = torch.rand(3, 2, device=backend.device) + 0.5, torch.randn(3, 4, device=backend.device)
    none = ids.new_empty((0, 1))
    torch.library.opcheck(OP, (ids, coef, rows, none, None, rows[:0], num_rows, with_bias))


def test_opcheck_two_sources(backend):
    ids = torch.arange(6, device=backend.device).reshape(3, 2)
    rows = torch.randn(3, 4, device=backend.device)
    torch.library.opcheck(OP, (ids, None, rows, ids + 6, torch.ones(3, 2, device=backend.device), rows, 50, True))


# ------------------------------------------------------------------------------------------------ errors
@pytest.mark.parametrize(
    ("position", "value", "kind", "text"),
    [
        (0, torch.full((6, 5, 1), 1), ValueError, "ids_a must be [S] or [S, k], got [6, 5, 1] int64 on cpu"),
        (0, torch.zeros(6, 5), TypeError, "ids_a must be [S, k] = [6, 5] int64 contiguous on cpu, got [6, 5] float32"),
        (0, torch.full((6, 5), 20), IndexError, "ids must be below num_rows = 20, got 20"),
        (1, torch.zeros(6, 4), ValueError, "coef_a must be [S, k] = [6, 5] float32 contiguous on cpu, got "),
        (1, torch.zeros(6, 5).double(), TypeError, "coef_a must be [S, k] = [6, 5] float32"),
        (2, torch.zeros(7), ValueError, "rows_a must be [S, d], got [7] float32"),
        (2, torch.zeros(5, 7), ValueError, "rows_a must be [S, d] = [6, 7] float32 contiguous on cpu, got "),
        (2, torch.full((6, 7), 1), TypeError, "rows_a must be float32, float64, float16 or bfloat16, got [6, 7] int64"),
        (5, torch.zeros(0, 8), ValueError, "rows_b must be [S, d] = [0, 7] float32 contiguous on cpu, got "),
        (6, -1, ValueError, "num_rows must be >= 0, got -1"),
    ],
)  # fmt: skip
def test_bad_input(position, value, kind, text):
    ids, coef, rows = make()
    args = [ids, coef, rows, ids[:0, :1], None, rows[:0], 20, True]
    assert len(OP(*args)) == 4
    args[position] = value
    with pytest.raises(RuntimeError) as caught:
        OP(*args)
    assert str(caught.value).startswith(f"{kind.__name__}: row_reduce: {text}")
