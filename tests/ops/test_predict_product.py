"""Products of matrices by our own kernels: against torch in float64, on every SIMD level, and where products go."""

from __future__ import annotations

import pytest
import torch

from samplex_cuda import _native, products
from samplex_cuda._checks import op_error
from samplex_cuda.ops.predict import predict_product

OPS = torch.ops.samplex
SIZES = [(1, 1, 1), (7, 3, 5), (8, 128, 32), (49, 129, 33), (100, 1, 70), (30, 300, 100), (31, 257, 8), (97, 64, 47)]


def matrix(rows, columns, transposed):
    return torch.randn(columns, rows).t() if transposed else torch.randn(rows, columns)


@pytest.mark.parametrize("transposed", [(False, False), (True, False), (False, True), (True, True)], ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_it_is_the_product(simd_level, sizes, transposed):
    torch.manual_seed(1)
    n, k, p = sizes
    a, b = matrix(n, k, transposed[0]), matrix(k, p, transposed[1])
    memory = torch.randn(n, p + 3)
    for add in (False, True):
        before = memory.clone()
        wanted = a.double() @ b.double() + (before[:, :p].double() if add else 0.0)
        predict_product(a, b, memory[:, :p], add)
        # Twice the error that torch makes in float32, and a rounding of the result.
        budget = 2 * ((a @ b).double() - a.double() @ b.double()).abs().max() + 1e-6 * wanted.abs().max()
        assert (memory[:, :p].double() - wanted).abs().max() <= budget
        assert torch.equal(memory[:, p:], before[:, p:])


def test_the_bits_do_not_depend_on_threads_or_on_the_other_rows():
    torch.manual_seed(2)
    a, b = torch.randn(300, 200), torch.randn(200, 90)
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            results.append(torch.empty(300, 90))
            predict_product(a, b, results[-1])
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*results)
    some = torch.empty(13, 90)
    predict_product(a[57:70], b, some)
    assert torch.equal(some, results[0][57:70])


def test_a_row_that_is_not_finite_stays_alone(simd_level):
    a, b = torch.randn(20, 40), torch.randn(40, 33)
    a[3, 5], a[4, 0] = float("nan"), float("inf")
    out = torch.full((20, 33), float("nan"))  # what out held is left out
    predict_product(a, b, out)
    assert bool(out[3].isnan().all())
    assert not bool(out[4].isfinite().any())
    assert bool(torch.cat((out[:3], out[5:])).isfinite().all())


def test_opcheck():
    arguments = (torch.randn(5, 4), torch.randn(4, 6), torch.zeros(5, 6))
    torch.library.opcheck(OPS.predict_product.default, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize(
    ("a", "b", "out", "kind", "text"),
    [
        (torch.ones(3), torch.ones(3, 2), torch.ones(3, 2), ValueError, "a must be [n, k], got [3]"),
        (torch.ones(3, 4), torch.ones(3, 2), torch.ones(3, 2), ValueError, "b must be [4, 2], got [3, 2]"),
        (torch.ones(3, 4), torch.ones(4, 2), torch.ones(2, 2), ValueError, "out must be [3, 2], got [2, 2]"),
        (torch.ones(3, 4), torch.ones(4, 2).double(), torch.ones(3, 2), TypeError, "b must be float32"),
        (torch.ones(3, 0), torch.ones(0, 2), torch.ones(3, 2), ValueError, "a must have at least one column"),
        (
            torch.ones(3, 4),
            torch.ones(8, 4)[::2, ::2],
            torch.ones(3, 2),
            ValueError,
            "b must have a dimension with stride 1",
        ),
        (torch.ones(3, 4), torch.ones(4, 2), torch.ones(2, 3).t(), ValueError, "out must have contiguous rows"),
    ],
    ids=lambda v: v if isinstance(v, str) else None,
)
def test_bad_arguments_are_named(a, b, out, kind, text):
    before = out.clone()
    with pytest.raises(RuntimeError) as caught:
        predict_product(a, b, out)
    error = op_error(caught.value)
    assert type(error) is kind
    assert text in str(error)
    assert torch.equal(out, before)


@pytest.mark.parametrize("which", ["a", "b"])
def test_a_result_that_shares_memory_with_a_factor_is_refused(which):
    memory, other = torch.randn(65, 64), torch.randn(64, 64)
    factor, out = memory[:64], memory[1:]  # they share all rows but one
    before = memory.clone()
    with pytest.raises(RuntimeError, match=f"out must not share memory with {which}"):
        predict_product(factor, other, out) if which == "a" else predict_product(other, factor, out)
    assert torch.equal(memory, before)
    predict_product(memory[:32], other, memory[32:64])  # side by side
    assert torch.allclose(memory[32:64], before[:32] @ other, atol=1e-4)


@pytest.mark.parametrize("ours", [False, True])
def test_products_go_where_they_are_faster(monkeypatch, ours):
    """What `products` answers is the same product, whichever kernel makes it."""
    calls = []
    monkeypatch.setattr(_native, "panels_beat_blas", lambda: ours)
    monkeypatch.setattr(products, "predict_product", lambda *args: (calls.append(1), predict_product(*args)))
    torch.manual_seed(3)
    a, b, out = torch.randn(64, 64), torch.randn(64, 64), torch.empty(64, 64)
    wanted = a.double() @ b.double()
    torch.testing.assert_close(products.product(a, b, out).double(), wanted, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(products.add_product(a, b, out, True).double(), 2 * wanted, rtol=1e-5, atol=2e-4)
    torch.testing.assert_close(products.add_product(a, b, out, False).double(), wanted, rtol=1e-5, atol=1e-4)
    assert len(calls) == (3 if ours else 0)
    small = products.product(a[:4], b, torch.empty(4, 64))  # of few rows
    other = products.product(a, b, torch.empty(64, 64).t())  # rows apart
    torch.testing.assert_close(small.double(), wanted[:4], rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(other.double(), wanted, rtol=1e-5, atol=1e-4)
    assert len(calls) == (3 if ours else 0)


def test_a_compiled_graph_holds_torchs_product():
    torch.manual_seed(4)
    a, b = torch.randn(64, 64), torch.randn(64, 64)

    @torch.compile(backend="eager", fullgraph=True, dynamic=True)
    def compiled(a, b):
        return products.product(a, b, torch.empty(a.shape[0], b.shape[1]))

    assert torch.equal(compiled(a, b), torch.mm(a, b))
    assert torch.equal(compiled(a[:50], b), torch.mm(a[:50], b))
