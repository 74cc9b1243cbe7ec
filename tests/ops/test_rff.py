"""Feature maps: forward and backward against plain torch in float64, at odd shapes, on every SIMD level and backend."""

from __future__ import annotations

import re

import pytest
import torch

import samplex_cuda as sx
from samplex_cuda.ops.rff import KINDS, rff
from samplex_cuda.reference.rff import rff as reference
from samplex_cuda.testing import assert_close

OP = torch.ops.samplex.rff.default
BWD = torch.ops.samplex.rff_bwd.default
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
OPTIONS = {
    "rff": {},
    "positive": {"nu": 0.3, "shift": 0.25},
    "gaussian": {"nu": 0.3, "gaussian": True},
    "quadratic": {"alpha": 3.0},
}


def acc_of(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def make(case="rff", batch=5, dim=7, num_features=19, *, dtype=torch.float32, seed=0):
    """x, omega, kind and options of a case; rows of a length near 1."""
    g = torch.Generator().manual_seed(seed)
    kind = "positive" if case == "gaussian" else case
    x = (torch.randn(batch, dim, generator=g) * max(dim, 1) ** -0.5).to(dtype)
    omega = None
    if kind != "quadratic":
        omega = sx.rff.frequencies(dim, num_features, nu=0.3, key=sx.Key(seed), dtype=acc_of(dtype))
    return x, omega, kind, OPTIONS[case]


def check(backend, x, omega, kind, options):
    """Features and gradients against the reference in float64, with torch's own error as the measure."""
    device, acc = backend.device, acc_of(x.dtype)
    own = [None if t is None else t.clone().to(device).requires_grad_() for t in (x, omega)]
    got = sx.rff.features(own[0], own[1], kind=kind, **options)
    grad = torch.randn(got.shape, generator=torch.Generator().manual_seed(1), dtype=acc)
    got.backward(grad.to(device))
    results = []
    for t in (torch.float64, acc):
        leaves = [None if v is None else v.to(t).clone().requires_grad_() for v in (x, omega)]
        value = reference(leaves[0], leaves[1], kind, **options)
        value.backward(grad.to(t))
        results.append((value.detach(), *(None if v is None else v.grad for v in leaves)))
    wanted, torchs = results
    assert got.dtype == acc
    assert_close("features", got.detach().cpu(), wanted[0], torchs[0], ulps=16)
    assert own[0].grad.dtype == x.dtype
    assert_close("d_x", own[0].grad.cpu(), wanted[1], torchs[1].to(x.dtype), ulps=16)
    if omega is not None:
        assert_close("d_omega", own[1].grad.cpu(), wanted[2], torchs[2], ulps=16)


# ------------------------------------------------------------------------------------------------ against the reference
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", OPTIONS)
def test_matches_the_reference(backend, case, dtype):
    check(backend, *make(case, 13, 33, 40, dtype=dtype))


@pytest.mark.parametrize("case", OPTIONS)
@pytest.mark.parametrize("dim", [1, 2, 3, 7, 8, 9, 16, 17, 31, 32, 65, 130])
def test_any_width(backend, case, dim):
    check(backend, *make(case, 4, dim, 21))


@pytest.mark.parametrize("case", ["rff", "positive"])
@pytest.mark.parametrize("num_features", [1, 2, 15, 16, 17, 31, 32, 33, 127, 128, 129, 260, 515])
def test_any_number_of_features(backend, case, num_features):
    check(backend, *make(case, 3, 10, num_features))


@pytest.mark.parametrize("case", OPTIONS)
@pytest.mark.parametrize("batch", [1, 2, 3, 5, 6, 7, 11, 12, 13, 16, 17, 24, 25, 49, 65])
def test_any_batch(backend, case, batch):
    check(backend, *make(case, batch, 9, 20))


@pytest.mark.parametrize("case", OPTIONS)
def test_more_rows_than_a_block_keeps(case, backend):
    check(backend, *make(case, 70 if backend.emulated else 700, 5, 150))


@pytest.mark.parametrize("case", ["rff", "positive"])
def test_wide_tiles(backend, case):
    # The GPU takes them from 128 blocks on.
    check(backend, *make(case, 8192, 1, 3))


def test_wide_rows_use_few_rows_a_block(backend):
    check(backend, *make("rff", 30, 3 if backend.emulated else 2100, 20))


@pytest.mark.parametrize("case", OPTIONS)
def test_empty_batch(backend, case):
    x, omega, kind, options = make(case, 0, 6, 4)
    x, omega = (None if t is None else t.to(backend.device).requires_grad_() for t in (x, omega))
    got = sx.rff.features(x, omega, kind=kind, **options)
    assert got.shape == (0, sx.rff.num_numbers(kind, 6, 4))
    got.sum().backward()
    assert x.grad.shape == (0, 6)
    if omega is not None:
        assert torch.equal(omega.grad, torch.zeros_like(omega))


@pytest.mark.parametrize("case", OPTIONS)
@pytest.mark.parametrize("dim", [1, 7, 8, 16, 33])
@pytest.mark.parametrize("batch", [3, 70])
def test_simd_levels(simd_level, cpu, case, dim, batch):
    check(cpu, *make(case, batch, dim, 37))


def test_only_one_gradient(backend):
    x, omega, _, _ = make("rff", 9, 6, 20)
    x, omega = x.to(backend.device), omega.to(backend.device)
    both = [t.clone().requires_grad_() for t in (x, omega)]
    sx.rff.features(*both).cos().sum().backward()
    alone = x.clone().requires_grad_()
    sx.rff.features(alone, omega).cos().sum().backward()
    assert torch.equal(alone.grad, both[0].grad)
    table = omega.clone().requires_grad_()
    sx.rff.features(x, table).cos().sum().backward()
    assert torch.equal(table.grad, both[1].grad)


# ------------------------------------------------------------------------------------------------ arguments
@pytest.mark.parametrize("size", [1.0, 100.0, 1e4, 9.9e4, 1.1e5, 1e7])
def test_large_arguments(simd_level, size):
    # Around the border of the fast reduction; w = 1, so that the argument is exact.
    x = torch.linspace(-size, size, 4001).unsqueeze(1)
    got = sx.rff.features(x, torch.ones(16, 1))
    wanted = reference(x.double(), torch.ones(16, 1).double())
    assert float((got - wanted).abs().max()) <= 0.25 * 2e-7


def test_exact_at_the_turns(simd_level):
    x = (torch.arange(-4000, 4000) * (torch.pi / 4)).unsqueeze(1)
    got = sx.rff.features(x, torch.ones(16, 1))
    assert float((got - reference(x.double(), torch.ones(16, 1).double())).abs().max()) <= 0.25 * 2e-7


def test_positive_exponents_at_the_ends(backend):
    # exp(w . u - nu |u|^2 / 2): far below the smallest float, in the subnormals, and with a shift back in range.
    omega = torch.zeros(3, 1, device=backend.device)
    x = torch.tensor([[10.0], [20.0], [40.0]], device=backend.device)
    got = sx.rff.features(x, omega, kind="positive", nu=0.5)[:, 0].cpu() * 3**0.5
    assert got[0] == pytest.approx(torch.tensor(-25.0).exp().item(), rel=1e-5)
    assert 0 < got[1] < 1e-43
    assert got[2] == 0
    shifted = sx.rff.features(x, omega, kind="positive", nu=0.5, shift=400.0)[:, 0].cpu() * 3**0.5
    assert shifted[2] == pytest.approx(1.0, rel=1e-5)
    assert shifted[0] == float("inf")


def test_zero_rows(backend):
    x = torch.zeros(2, 5, device=backend.device)
    omega = sx.rff.frequencies(5, 4, nu=1.0, key=sx.Key(0), device=backend.device)
    half = torch.full((2, 4), 0.5)
    assert torch.equal(sx.rff.features(x, omega).cpu(), torch.cat([half, torch.zeros(2, 4)], 1))
    assert torch.equal(sx.rff.features(x, omega, kind="positive", nu=1.0).cpu(), half)
    quadratic = sx.rff.features(x, kind="quadratic").cpu()
    assert torch.equal(quadratic, torch.eye(16)[15].expand(2, 16))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("case", OPTIONS)
def test_a_bad_row_stays_alone(backend, case, bad):
    x, omega, kind, options = make(case, 20, 6, 20)
    omega = None if omega is None else omega.to(backend.device)
    clean = sx.rff.features(x.to(backend.device), omega, kind=kind, **options)
    x[7, 2] = bad
    got = sx.rff.features(x.to(backend.device), omega, kind=kind, **options)
    others = torch.arange(20) != 7
    assert torch.equal(got[others], clean[others])
    assert got[7].isfinite().logical_not().any()
    if bad != bad and kind != "quadratic":
        assert got[7].isnan().all()


def test_leading_dimensions_and_views(backend):
    x = torch.randn(4, 6, 10, device=backend.device)
    omega = sx.rff.frequencies(10, 8, nu=1.0, key=sx.Key(0), device=backend.device)
    flat = sx.rff.features(x.reshape(-1, 10), omega)
    assert torch.equal(sx.rff.features(x, omega), flat.view(4, 6, 16))
    assert torch.equal(sx.rff.features(x[1, 2], omega), flat[8])
    turned = x.transpose(0, 1)
    assert torch.equal(sx.rff.features(turned, omega), flat.view(4, 6, 16).transpose(0, 1))
    wide = omega.repeat(1, 2)[:, :10]
    assert torch.equal(sx.rff.features(x, wide), flat.view(4, 6, 16))
    assert sx.rff.features(x[:, :0], omega).shape == (4, 0, 16)


def test_frequencies_of_another_float_type_are_cast(backend):
    x, omega, _, _ = make(dtype=torch.float64)
    assert torch.equal(
        sx.rff.features(x.to(backend.device), omega.float().to(backend.device)),
        sx.rff.features(x.to(backend.device), omega.float().double().to(backend.device)),
    )


# ------------------------------------------------------------------------------------------------ bits
@pytest.mark.parametrize("case", OPTIONS)
def test_bits_do_not_depend_on_threads_or_batch(case):
    x, omega, kind, options = make(case, 300, 40, 150)
    grad = torch.randn(300, sx.rff.num_numbers(kind, 40, 150))

    def run(rows):
        leaf = x[rows].clone().requires_grad_()
        value = sx.rff.features(leaf, omega, kind=kind, **options)
        value.backward(grad[rows])
        return value.detach(), leaf.grad

    threads = torch.get_num_threads()
    whole = run(slice(None))
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert all(map(torch.equal, run(slice(None)), whole))
    finally:
        torch.set_num_threads(threads)
    for begin, end in ((0, 1), (5, 12), (100, 300), (299, 300)):
        assert all(torch.equal(part, all_[begin:end]) for part, all_ in zip(run(slice(begin, end)), whole, strict=True))


def test_streamed_features_are_the_same(simd_level):
    # Above 16 MiB features go past the cache; the rows are those of a small call.
    x, omega, _, _ = make("rff", 1100, 4, 2048)
    whole = sx.rff.features(x, omega)
    assert torch.equal(whole[500:520], sx.rff.features(x[500:520], omega))
    positive = sx.rff.features(x.repeat(2, 1), omega, kind="positive", nu=0.3)
    assert torch.equal(positive[1600:1620], sx.rff.features(x[500:520], omega, kind="positive", nu=0.3))


# ------------------------------------------------------------------------------------------------ autograd, compile
@pytest.mark.parametrize("case", OPTIONS)
def test_gradcheck(backend, case):
    x, omega, kind, options = make(case, 3, 4, 5, dtype=torch.float64)
    x = x.to(backend.device).requires_grad_()
    if omega is None:
        assert torch.autograd.gradcheck(lambda a: sx.rff.features(a, kind=kind, **options), (x,))
    else:
        omega = omega.to(backend.device).requires_grad_()
        assert torch.autograd.gradcheck(lambda a, w: sx.rff.features(a, w, kind=kind, **options), (x, omega))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("case", OPTIONS)
def test_opcheck(backend, case, dtype):
    x, omega, kind, options = make(case, 4, 6, 5, dtype=dtype)
    x, omega = (None if t is None else t.to(backend.device).requires_grad_() for t in (x, omega))
    args = (x, omega, KINDS[kind], options.get("nu", 1.0), options.get("alpha", 1.0), options.get("gaussian", False))
    torch.library.opcheck(OP, args)
    features = OP(*args).detach()
    tensors = (torch.randn_like(features), x.detach(), None if omega is None else omega.detach(), features)
    torch.library.opcheck(BWD, (*tensors, *args[2:], True, omega is not None))
    torch.library.opcheck(BWD, (*tensors, *args[2:], False, False))


def test_op_and_eager_path_agree(backend):
    x, omega, _, _ = make("rff", 6, 8, 10)
    x, omega = x.to(backend.device), omega.to(backend.device)
    a, b = (x.clone().requires_grad_() for _ in range(2))
    OP(a, omega, 0).sin().sum().backward()
    rff(b, omega, 0, 1.0, 1.0, False, 0.0).sin().sum().backward()
    assert torch.equal(a.grad, b.grad)


@pytest.mark.slow
def test_compile():
    x, omega, _, _ = make("rff", 6, 8, 10)
    compiled = torch.compile(lambda a: sx.rff.features(a, omega).square().mean(), backend="aot_eager", fullgraph=True)
    a, b = (x.clone().requires_grad_() for _ in range(2))
    compiled(a).backward()
    sx.rff.features(b, omega).square().mean().backward()
    assert torch.allclose(a.grad, b.grad, atol=1e-7)


def test_double_backward_is_refused(backend):
    x, omega, _, _ = make("rff")
    x = x.to(backend.device).requires_grad_()
    (grad,) = torch.autograd.grad(sx.rff.features(x, omega.to(backend.device)).sum(), x, create_graph=False)
    assert grad.shape == x.shape
    with pytest.raises(RuntimeError, match=r"rff: double backward \(create_graph=True\) is not supported"):
        torch.autograd.grad(sx.rff.features(x, omega.to(backend.device)).sum(), x, create_graph=True)


# ------------------------------------------------------------------------------------------------ errors
X, W = torch.zeros(3, 4), torch.zeros(5, 4)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((X.long(), W, 0), "x must be float32, float64, float16 or bfloat16, got [3, 4] int64"),
        ((X[0], W, 0), "x must be [B, d] with d >= 1, got [4] float32"),
        ((X[:, :0], W[:, :0], 0), "x must be [B, d] with d >= 1, got [3, 0] float32"),
        ((X.T, W[:, :3], 0), "x must be [B, d] = [*, *] float32 contiguous on cpu, got [4, 3] float32 on cpu (not"),
        ((X, None, 0), "omega must be [D, 4], got None"),
        ((X, W[:, :3], 0), "omega must be [D, d] = [*, 4] float32 contiguous on cpu, got [5, 3] float32"),
        ((X, W.double(), 0), "omega must be [D, d] = [*, 4] float32 contiguous on cpu, got [5, 4] float64"),
        ((X, W[:0], 1), "omega must be [D, d] with D >= 1, got [0, 4] float32"),
        ((X, W, 3), "kind must be 0 (fourier), 1 (positive) or 2 (quadratic), got 3"),
        ((X, W, 1, 0.0), "nu must be positive and finite, got 0"),
        ((X, W, 1, float("nan")), "nu must be positive and finite, got nan"),
        ((X, W, 1, 1.0, 1.0, False, float("inf")), "shift must be finite, got inf"),
        ((X, W, 2), "omega must be None for kind 2 (quadratic), got a tensor"),
        ((X, None, 2, 1.0, -1.0), "alpha must be positive and finite, got -1"),
        ((torch.zeros(1, 1025), None, 2), "x must be [B, d] with d <= 1024 for kind 2 (quadratic), got [1, 1025]"),
    ],
)
def test_op_errors(args, message):
    with pytest.raises(RuntimeError, match="rff: " + re.escape(message)):
        OP(*args)


def test_backward_op_errors():
    phi = torch.zeros(3, 10)
    rest = (0, 1.0, 1.0, False, True, False)
    with pytest.raises(RuntimeError, match=re.escape("rff_bwd: grad must be [B, F] = [3, 10] float32")):
        BWD(phi[:, :9].contiguous(), X, W, phi, *rest)
    with pytest.raises(RuntimeError, match=re.escape("rff_bwd: features must be [B, F] = [3, 10] float32")):
        BWD(phi, X, W, phi.double(), *rest)
    quadratic = torch.zeros(3, 11)
    with pytest.raises(RuntimeError, match=re.escape("rff_bwd: need_omega must be False for kind 2 (quadratic)")):
        BWD(quadratic, X, None, quadratic, 2, 1.0, 1.0, False, True, True)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: sx.rff.features(X, W, kind="cos"), ValueError, "kind must be one of 'rff', 'orf', 'positive', 'quadr"),
        (lambda: sx.rff.features([1.0], W), TypeError, "x must be a tensor [*, d], got list"),
        (
            lambda: sx.rff.features(X.int(), W),
            ValueError,
            "x must be [*, d] float32, float64, float16 or bfloat16, got",
        ),
        (lambda: sx.rff.features(X), TypeError, "omega must be a tensor [D, 4], got NoneType"),
        (lambda: sx.rff.features(X, W[:, :2]), ValueError, "omega must be [D, 4] floating with D >= 1 on cpu, got [5,"),
        (lambda: sx.rff.features(X, W[:0]), ValueError, "omega must be [D, 4] floating with D >= 1 on cpu, got [0, 4]"),
        (lambda: sx.rff.features(X, W, kind="positive"), ValueError, "nu must be given for kind 'positive', got None"),
        (lambda: sx.rff.features(X, W, kind="positive", nu=0), ValueError, "nu must be in (0, 1e+30), got 0"),
        (lambda: sx.rff.features(X, W, nu=-1.0), ValueError, "nu must be in (0, 1e+30), got -1.0"),
        (
            lambda: sx.rff.features(X, W, kind="positive", nu=1.0, shift=float("nan")),
            ValueError,
            "shift must be finite, got nan",
        ),
        (lambda: sx.rff.features(X, W, kind="quadratic"), ValueError, "omega must be None for kind 'quadratic', got"),
        (lambda: sx.rff.features(X, kind="quadratic", alpha=0.0), ValueError, "alpha must be in (0, 1e+30)"),
        (lambda: sx.rff.frequencies(4, 0, nu=1.0), ValueError, "num_features must be an int in [1, 2147483647], got 0"),
        (lambda: sx.rff.frequencies(0, 4, nu=1.0), ValueError, "dim must be an int in [1, 2147483647], got 0"),
        (lambda: sx.rff.frequencies(4, 4.0, nu=1.0), TypeError, "num_features must be an int in [1, 2147483647]"),
        (lambda: sx.rff.frequencies(4, 4, nu=0.0), ValueError, "nu must be in (0, 1e+30), got 0.0"),
        (lambda: sx.rff.frequencies(4, 4, nu=1.0, kind="quadratic"), ValueError, "kind must be 'rff', 'orf' or 'posi"),
        (lambda: sx.rff.num_numbers("rff", 4), ValueError, "num_features must be an int in [1, 2147483647], got 0"),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=r"rff\.\w+: " + re.escape(message)):
        call()


# ------------------------------------------------------------------------------------------------ frequencies
def test_frequencies_follow_the_key():
    draw = [sx.rff.frequencies(5, 7, nu=2.0, kind="orf", key=sx.Key(3, 1)) for _ in range(2)]
    assert torch.equal(*draw)
    key = sx.Key(3, 1)
    first, second = (sx.rff.frequencies(5, 7, nu=2.0, kind="orf", key=key) for _ in range(2))
    assert torch.equal(first, draw[0])
    assert not torch.equal(first, second)
    assert not torch.equal(first, sx.rff.frequencies(5, 7, nu=2.0, kind="orf", key=sx.Key(4, 1)))
    assert torch.equal(first, sx.rff.frequencies(5, 7, nu=2.0, kind="orf", key=torch.tensor([3, 1])))
    torch.manual_seed(5)
    a = sx.rff.frequencies(5, 7, nu=2.0)
    torch.manual_seed(5)
    assert torch.equal(a, sx.rff.frequencies(5, 7, nu=2.0))


@pytest.mark.parametrize("kind", ["orf", "positive"])
@pytest.mark.parametrize(("dim", "num_features"), [(1, 1), (1, 5), (6, 3), (6, 6), (6, 15)])
def test_blocks_are_orthogonal(kind, dim, num_features):
    w = sx.rff.frequencies(dim, num_features, nu=1.5, kind=kind, key=sx.Key(0), dtype=torch.float64)
    assert w.shape == (num_features, dim)
    for block in w.split(dim):
        product = block @ block.T
        assert float((product - torch.diag(product.diagonal())).abs().max()) < 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_num_numbers_is_the_width(kind):
    omega = None if kind == "quadratic" else torch.zeros(5, 4)
    assert sx.rff.features(X, omega, kind=kind, nu=1.0).shape[1] == sx.rff.num_numbers(kind, 4, 5)
