"""exact_mass, exact_blocks, exact_draw, exact_log_prob against the reference, on every backend, and their corners."""

from __future__ import annotations

import pytest
import torch

import samplex_cuda as sx
from samplex_cuda import _native
from samplex_cuda.ops import exact_sample as ops
from samplex_cuda.ops.static_sample import sort_exclude
from samplex_cuda.reference import exact_sample as plain

KEY = (0x1234_5678_9ABC, 77)
KINDS = {"softmax": (ops.SOFTMAX, 0.0), "absolute": (ops.ABSOLUTE, 0.0), "quartic": (ops.QUARTIC, 1.5)}
BAND = 2.0**-20  # times 1 + the sum of the terms of a logit: how near to a boundary rounding may matter


def made(backend, B, C, d, dtype=torch.float32, logits=None, seed=0):
    """h [B, d] in the dtype of the logits, weight, bias."""
    g = torch.Generator().manual_seed(seed)
    wide = logits or (torch.float64 if dtype == torch.float64 else torch.float32)
    h = torch.randn(B, d, generator=g, dtype=torch.float64).to(wide)
    weight = torch.randn(C, d, generator=g, dtype=torch.float64).to(dtype)
    bias = (0.3 * torch.randn(C, generator=g, dtype=torch.float64)).to(dtype)
    return [t.to(backend.device) for t in (h, weight, bias)]


def key_on(device):
    return torch.tensor(KEY, dtype=torch.int64, device=device)


def lists_of(exclude, rows):
    """Excluded classes of each row as lists."""
    if exclude is None:
        return [[] for _ in rows]
    return [sorted({k for k in exclude[b].tolist() if k >= 0}) for b in rows]


def band_of(h, weight, bias, scale):
    terms = h.double().abs() @ weight.double().abs().T + (0.0 if bias is None else bias.double().abs())
    return BAND * (1.0 + abs(scale) * terms.amax(1, keepdim=True))


def sample_by_ops(h, weight, bias, kind, scale, alpha, exclude, row, m, chunk=512):
    """The passes as the sampler makes them: mass, lse, place, ids, log_q."""
    lists = sort_exclude(exclude)
    C = weight.shape[0]
    mass = torch.full((h.shape[0], -(-C // 256)), 7.0, dtype=torch.float64, device=h.device)
    for first in range(0, C, chunk):
        rows = weight[first : first + chunk].to(h.dtype)
        some = None if bias is None else bias[first : first + chunk].to(h.dtype)
        ops.exact_mass((h @ rows.T).contiguous(), some, first, C, kind, scale, alpha, *lists, row, mass)
    key = key_on(h.device)
    lse, place = ops.exact_blocks(mass, key, row, m)
    ids = ops.exact_draw(h, weight, bias, lse, place, key, kind, scale, alpha, *lists, row)
    log_q = ops.exact_log_prob(h, weight, bias, lse, ids, kind, scale, alpha, *lists, row)
    return mass, lse, place, ids, log_q


# (C, d, with bias, scale): one class; below, at and above a block; not a multiple of the chunk; odd widths.
SHAPES = [(1, 3, True, 1.0), (255, 1, False, 1.0), (256, 4, True, -0.7), (257, 8, True, 1.3), (700, 33, False, 0.8),
          (1024, 16, True, 1.0), (1300, 64, True, 0.5)]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("excluding", [False, True])
def test_equals_reference(backend, kind, shape, excluding):
    C, d, with_bias, scale = shape
    code, alpha = KINDS[kind]
    B, m, row = 3, 6, 2
    h, weight, bias = made(backend, B, C, d)
    bias = bias if with_bias else None
    exclude = None
    if excluding:
        g = torch.Generator().manual_seed(1)
        exclude = torch.randint(C, (row + B, 4), generator=g)
        exclude[torch.rand(row + B, 4, generator=g) < 0.3] = -1
        exclude = exclude.to(backend.device)
    mass, lse, place, ids, log_q = sample_by_ops(h, weight, bias, code, scale, alpha, exclude, row, m)
    h, weight, mass, lse, place, ids, log_q = (t.cpu() for t in (h, weight, mass, lse, place, ids, log_q))
    bias = None if bias is None else bias.cpu()
    lists = lists_of(exclude if exclude is None else exclude.cpu(), range(row, row + B))
    dots = h.double() @ weight.double().T
    band = band_of(h, weight, bias, scale)
    want = plain.exact_mass(dots, bias, code, scale, alpha, 0, lists)
    none = want == -torch.inf
    assert torch.equal(mass == -torch.inf, none)
    assert float(torch.where(none, 0.0, mass - want).abs().amax()) < float(band.max()) * 4
    # Each pass against the reference on what it was given; a draw may differ only where rounding decides.
    want_lse, want_place, near = plain.exact_blocks(mass, KEY, row, m)
    torch.testing.assert_close(lse, want_lse, rtol=1e-12, atol=1e-12)
    left = lse > -torch.inf
    assert bool(((place == want_place) | (near < 1e-12))[left].all())
    want_ids, near = plain.exact_draw(h, weight, bias, place, KEY, code, scale, alpha, lists, row)
    assert bool(((ids == want_ids) | (near < band)).all())
    assert float((ids == want_ids).double().mean()) > 0.9
    want_q = plain.exact_log_prob(h, weight, bias, lse, ids, code, scale, alpha, lists)
    torch.testing.assert_close(log_q.double(), want_q, rtol=2e-7, atol=2e-7)
    assert log_q.isfinite().all()
    for b in range(B):
        assert not set(ids[b].tolist()) & set(lists[b]) or not left[b]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("C", [200, 1500])
def test_rows_that_share_a_block_of_classes(backend, C, dtype):
    """Thousands of draws: a thread block has several runs, of one block of classes and of more."""
    B, m = 700, 3
    h, weight, bias = made(backend, B, C, 8, dtype)
    g = torch.Generator().manual_seed(5)
    place = torch.randint(-(-C // 256), (B, m), generator=g) * B + torch.arange(B)[:, None]
    exclude = torch.randint(C, (B, 2), generator=g).sort(1).values
    lse = torch.zeros(B, dtype=torch.float64, device=backend.device)
    ids = ops.exact_draw(h, weight, bias, lse, place.to(backend.device), key_on(backend.device), ops.SOFTMAX, 0.8, 0.0,
                         exclude.to(backend.device), None, 0).cpu()  # fmt: skip
    h, weight, bias = (t.cpu() for t in (h, weight, bias))
    lists = lists_of(exclude, range(B))
    want, near = plain.exact_draw(h, weight, bias, place, KEY, ops.SOFTMAX, 0.8, 0.0, lists, 0)
    assert bool(((ids == want) | (near < band_of(h, weight, bias, 0.8))).all())
    assert float((ids == want).double().mean()) > 0.99


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("d", [16, 7])
@pytest.mark.parametrize("logits", [None, torch.float64])
def test_dtypes(backend, dtype, d, logits):
    h, weight, bias = made(backend, 2, 600, d, dtype, logits)
    exclude = torch.tensor([[3], [599]], device=backend.device)
    _, lse, place, ids, log_q = sample_by_ops(h, weight, bias, ops.SOFTMAX, 1.0, 0.0, exclude, 0, 5)
    h, weight, bias, lse, place, ids, log_q = (t.cpu() for t in (h, weight, bias, lse, place, ids, log_q))
    s = h.double() @ weight.double().T + bias.double()
    s[0, 3] = s[1, 599] = -torch.inf
    torch.testing.assert_close(lse, s.logsumexp(1), rtol=0, atol=1e-6 if h.dtype == torch.float32 else 1e-12)
    torch.testing.assert_close(log_q.double(), s.log_softmax(1).gather(1, ids), rtol=1e-6, atol=2e-6)
    want, near = plain.exact_draw(h, weight, bias, place, KEY, ops.SOFTMAX, 1.0, 0.0, [[3], [599]], 0)
    band = band_of(h, weight, bias, 1.0) if h.dtype == torch.float32 else torch.full((2, 1), 1e-12)
    assert bool(((ids == want) | (near < band)).all())


def test_simd_levels(simd_level):
    backend = type("Cpu", (), {"device": torch.device("cpu")})
    for C, d, dtype in ((700, 19, torch.float32), (513, 32, torch.bfloat16), (300, 8, torch.float16)):
        h, weight, bias = made(backend, 5, C, d, dtype)
        for code, alpha in KINDS.values():
            mass, _, place, ids, _ = sample_by_ops(h, weight, bias, code, 1.0, alpha, None, 0, 20)
            want = plain.exact_mass(h.double() @ weight.double().T, bias, code, 1.0, alpha, 0, [[]] * 5)
            torch.testing.assert_close(mass, want, rtol=0, atol=5e-6)
            want, near = plain.exact_draw(h, weight, bias, place, KEY, code, 1.0, alpha, [[]] * 5, 0)
            assert bool(((ids == want) | (near < band_of(h, weight, bias, 1.0))).all())


def test_backends_agree():
    """Between backends an id may differ only where its uniform number is near a boundary; log_q to rounding."""
    if not _native.build_info()["test_backends"]:
        pytest.skip("needs the SIMT backend")
    h, weight, bias = made(type("Cpu", (), {"device": torch.device("cpu")}), 6, 900, 24)
    exclude = torch.randint(900, (6, 2))
    found = {}
    before = _native.cpu_backend()
    for name in ("cpu", "simt"):
        _native.set_cpu_backend(name)
        found[name] = sample_by_ops(h, weight, bias, ops.SOFTMAX, 1.0, 0.0, exclude, 0, 40)
    _native.set_cpu_backend(before)
    (mass, lse, place, ids, log_q), other = found["cpu"], found["simt"]
    torch.testing.assert_close(mass, other[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(lse, other[1], rtol=0, atol=1e-6)
    same = (place == other[2]) & (ids == other[3])
    assert float(same.double().mean()) > 0.99
    torch.testing.assert_close(log_q[same], other[4][same], rtol=1e-6, atol=1e-6)


def test_same_bits_for_every_thread_count():
    h, weight, bias = made(type("Cpu", (), {"device": torch.device("cpu")}), 40, 3000, 16)
    threads, found = torch.get_num_threads(), []
    for count in (1, 2):
        torch.set_num_threads(count)
        mass = torch.empty(40, 12, dtype=torch.float64)
        ops.exact_mass(torch.randn(40, 3000, generator=torch.Generator().manual_seed(2)), None, 0, 3000, 0, 1.0, 0.0,
                       None, None, 0, mass)  # fmt: skip
        lse, place = ops.exact_blocks(mass, key_on("cpu"), 0, 30)
        found.append((mass, lse, place, ops.exact_draw(h, weight, bias, lse, place, key_on("cpu"), 0, 1.0, 0.0,
                                                       None, None, 0)))  # fmt: skip
    torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


# ------------------------------------------------------------------------------------------------ the distribution
def test_law_by_enumeration(backend):
    """Eight classes: the share of each among many draws is its probability, within 5 standard errors."""
    weight = torch.linspace(-2, 2, 8)[:, None].to(backend.device)
    h, m = torch.ones(1, 1, device=backend.device), 2**15
    if backend.emulated:
        m = 2**12
    *_, ids, log_q = sample_by_ops(h, weight, None, ops.SOFTMAX, 1.0, 0.0, None, 0, m)
    p = weight.cpu().double().T.softmax(1)[0]
    count = torch.bincount(ids[0].cpu(), minlength=8).double()
    assert bool(((count / m - p).abs() < 5 * (p * (1 - p) / m).sqrt()).all())
    torch.testing.assert_close(log_q[0].cpu().double(), p.log()[ids[0].cpu()], rtol=1e-6, atol=1e-6)


def test_blocks_and_classes_are_chosen_independently(backend):
    """600 classes in three blocks of unlike mass: both uniform numbers of a draw matter, and are not the same one."""
    C, m = 600, 4096
    s = torch.linspace(0, 2, C, dtype=torch.float64)
    h, weight = torch.ones(1, 1, device=backend.device), s.float()[:, None].to(backend.device)
    *_, ids, _ = sample_by_ops(h, weight, None, ops.SOFTMAX, 1.0, 0.0, None, 0, m)
    p = s.softmax(0)
    edges = torch.searchsorted(p.cumsum(0), torch.linspace(0.05, 0.95, 19, dtype=torch.float64))
    count = torch.bincount(torch.bucketize(ids[0].cpu(), edges, right=True), minlength=20).double()
    mass = torch.stack([part.sum() for part in p.tensor_split(edges)])
    assert float(((count - m * mass) ** 2 / (m * mass)).sum()) < 50.0  # chi-square, 19 degrees: 1e-4


def test_a_tail_of_tiny_weights_is_drawn_as_often_as_it_should(backend):
    """One class has most of the mass; all others together must still come as often as they should."""
    C, m = 4 * 256, 4096
    s = torch.full((C,), -6.0)
    s[0], s[-1] = 0.0, -2.0
    h, weight = torch.ones(1, 1, device=backend.device), s[:, None].to(backend.device)
    *_, ids, _ = sample_by_ops(h, weight, None, ops.SOFTMAX, 1.0, 0.0, None, 0, m)
    p = s.double().softmax(0)
    for some in (torch.arange(1, 256), torch.arange(256, C - 1), torch.tensor([C - 1]), torch.tensor([0])):
        q = float(p[some].sum())
        seen = float(torch.isin(ids.cpu(), some).sum()) / m
        assert abs(seen - q) < 5 * (q * (1 - q) / m) ** 0.5


# ------------------------------------------------------------------------------------------------ corners
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nothing_left(backend, kind, dtype):
    code, alpha = KINDS[kind]
    h, weight, bias = made(backend, 3, 300, 4, dtype)
    exclude = torch.stack([torch.arange(300), torch.arange(300), torch.full((300,), -1)]).to(backend.device)
    exclude[1, 7] = -1
    mass, _, _, ids, log_q = sample_by_ops(h, weight, bias, code, 1.0, alpha, exclude, 0, 4)
    assert mass[0].eq(-torch.inf).all()
    assert mass[1, 1].eq(-torch.inf)
    assert ids[0].eq(0).all()  # the first excluded class stands in
    assert log_q[0].eq(0).all()
    assert ids[1].eq(7).all()
    torch.testing.assert_close(log_q[1].cpu(), torch.zeros(4), rtol=0, atol=1e-6)
    assert log_q[2].isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_extreme_logits(backend, kind):
    """1e4 and beyond float32's fourth power, -inf, and nan: that row alone has no distribution."""
    code, alpha = KINDS[kind]
    dots = torch.zeros(6, 300)
    dots[0, 5] = 1e4
    dots[1] = -1e4
    dots[2, 100] = torch.nan
    dots[3, ::2] = -torch.inf if kind == "softmax" else 3e30
    dots[4] = torch.inf
    dots[5] = -torch.inf if kind == "softmax" else 0.0
    mass = torch.empty(6, 2, dtype=torch.float64, device=backend.device)
    ops.exact_mass(dots.to(backend.device), None, 0, 300, code, 1.0, alpha, None, None, 0, mass)
    want = plain.exact_mass(dots, None, code, 1.0, alpha, 0, [[]] * 6)
    torch.testing.assert_close(mass.cpu(), want, rtol=1e-6, atol=1e-6, equal_nan=True)
    lse, place = ops.exact_blocks(mass, key_on(backend.device), 0, 3)
    torch.testing.assert_close(lse.cpu(), want.logsumexp(1), rtol=1e-6, atol=1e-6, equal_nan=True)
    assert ((place >= 0) & (place < 12)).all()
    assert (place.cpu() % 6 == torch.arange(6)[:, None]).all()


def test_zero_weight_is_never_drawn(backend):
    bias = torch.full((600,), -torch.inf)
    bias[[3, 258, 599]] = 0.0
    h, weight = torch.zeros(1, 2, device=backend.device), torch.zeros(600, 2, device=backend.device)
    *_, ids, log_q = sample_by_ops(h, weight, bias.to(backend.device), ops.SOFTMAX, 1.0, 0.0, None, 0, 500)
    assert sorted(set(ids[0].tolist())) == [3, 258, 599]
    torch.testing.assert_close(log_q.exp().cpu(), torch.full((1, 500), 1 / 3))


@pytest.mark.parametrize(("B", "m"), [(0, 3), (2, 0), (0, 0)])
def test_empty(backend, B, m):
    h, weight, bias = made(backend, B, 300, 4)
    mass, lse, place, ids, log_q = sample_by_ops(h, weight, bias, ops.SOFTMAX, 1.0, 0.0, None, 0, m)
    assert mass.shape == (B, 2)
    assert lse.shape == (B,)
    assert place.shape == ids.shape == log_q.shape == (B, m)


def test_rows_that_are_not_16_byte_aligned(backend):
    """A contiguous view at an odd offset takes the loads of single numbers, with the same draws."""
    h, weight, bias = made(backend, 3, 512, 8)
    moved = [torch.empty(t.numel() + 1, device=backend.device)[1:].view(t.shape).copy_(t) for t in (h, weight, bias)]
    wanted = sample_by_ops(h, weight, bias, ops.SOFTMAX, 1.0, 0.0, None, 0, 20)
    got = sample_by_ops(*moved, ops.SOFTMAX, 1.0, 0.0, None, 0, 20)
    assert float((wanted[3] == got[3]).double().mean()) > 0.95
    dots = torch.randn(3, 512, device=backend.device)
    shifted = torch.empty(3 * 512 + 1, device=backend.device)[1:].view(3, 512).copy_(dots)
    masses = [torch.empty(3, 2, dtype=torch.float64, device=backend.device) for _ in range(2)]
    for some, mass in zip((dots, shifted), masses, strict=True):
        ops.exact_mass(some, None, 0, 512, 0, 1.0, 0.0, None, None, 0, mass)
    torch.testing.assert_close(masses[0], masses[1], rtol=0, atol=1e-6)


def test_bad_values_on_a_device_are_passed_over(backend):
    """What the host cannot look at there: places and ids that are none. Checked on the host by test_errors."""
    if backend.device.type == "cpu":
        pytest.skip("the host checks CPU tensors")
    h, weight, bias = made(backend, 2, 300, 4)
    lse, key = torch.zeros(2, dtype=torch.float64, device=backend.device), key_on(backend.device)
    place = torch.tensor([[-5, 10**12], [3, 0]], device=backend.device)
    ids = ops.exact_draw(h, weight, bias, lse, place, key, 0, 1.0, 0.0, None, None, 0)
    assert ((ids >= 0) & (ids < 300)).all()
    asked = torch.tensor([[-1, 5], [300, 7]], device=backend.device)
    got = ops.exact_log_prob(h, weight, bias, lse, asked, 0, 1.0, 0.0, None, None, 0)
    assert got[:, 0].isnan().all()
    assert got[:, 1].isfinite().all()


def errors():
    dots, mass = torch.zeros(2, 300), torch.zeros(2, 2, dtype=torch.float64)
    h, weight, lse = torch.zeros(2, 4), torch.zeros(300, 4), torch.zeros(2, dtype=torch.float64)
    place, key = torch.zeros(2, 3, dtype=torch.int64), torch.tensor(KEY)
    exclude = torch.tensor([[1], [2]])
    many = torch.zeros(2, 512), torch.zeros(2, 512)

    def mass_of(dots=dots, bias=None, first=0, C=300, kind=0, scale=1.0, alpha=0.0, lists=(None, None), row=0, m=mass):
        return ops.exact_mass(dots, bias, first, C, kind, scale, alpha, *lists, row, m)

    def draw(h=h, weight=weight, bias=None, lse=lse, place=place, key=key, lists=(None, None), row=0):
        return ops.exact_draw(h, weight, bias, lse, place, key, 0, 1.0, 0.0, *lists, row)

    def log_prob(ids, lists=(None, None), row=0):
        return ops.exact_log_prob(h, weight, None, lse, ids, 0, 1.0, 0.0, *lists, row)

    return [
        (lambda: mass_of(dots.half()), r"TypeError: exact_mass: dots must be \[B, n\] float32 or float64"),
        (lambda: mass_of(bias=torch.zeros(3)), r"ValueError: exact_mass: bias must be \[n\]"),
        (lambda: mass_of(first=5), "ValueError: exact_mass: first must be a multiple of 256, got 5"),
        (lambda: mass_of(many[0], C=600), r"ValueError: exact_mass: mass must be \[B, ceil\(C / 256\)\]"),
        (lambda: mass_of(C=600), "ValueError: exact_mass: dots must have whole blocks of 256 classes"),
        (lambda: mass_of(many[0]), "ValueError: exact_mass: dots must have whole blocks"),
        (lambda: mass_of(kind=3), r"ValueError: exact_mass: kind must be 0 \(softmax\), 1 \(absolute\) or 2"),
        (lambda: mass_of(scale=float("inf")), "ValueError: exact_mass: scale must be finite, got inf"),
        (lambda: mass_of(alpha=-1.0), "ValueError: exact_mass: alpha must be finite and at least 0, got -1"),
        (lambda: mass_of(row=-1), "ValueError: exact_mass: row must be at least 0"),
        (lambda: mass_of(lists=(exclude, None), row=1), "ValueError: exact_mass: exclude must have at least row"),
        (lambda: mass_of(lists=(None, key)), "ValueError: exact_mass: exclude_offsets needs exclude, got None"),
        (lambda: mass_of(lists=(exclude + 299, None)), r"IndexError: exact_mass: exclude must be -1 or in \[0, 300\)"),
        (lambda: mass_of(lists=(torch.tensor([[3, 1], [0, 0]]), None)), "ValueError: exact_mass: exclude must ascend"),
        (lambda: mass_of(lists=(exclude[0], torch.tensor([0, 2, 1]))), "ValueError: exact_mass: exclude_offsets must"),
        (lambda: ops.exact_blocks(mass.float(), key, 0, 3), r"TypeError: exact_blocks: mass must be \[B, K\]"),
        (lambda: ops.exact_blocks(mass[:, :0], key, 0, 3), "ValueError: exact_blocks: mass must have at least one"),
        (lambda: ops.exact_blocks(mass, key, 0, 2**23 + 1), r"ValueError: exact_blocks: num_samples must be in \[0, 2"),
        (lambda: ops.exact_blocks(mass, key, 2**32, 1), "ValueError: exact_blocks: row must be at least 0"),
        (lambda: draw(h.half()), r"TypeError: exact_draw: hidden must be \[B, d\] float32 or float64"),
        (lambda: draw(weight=weight.double()), "TypeError: exact_draw: hidden must be float64 if weight is"),
        (lambda: draw(weight=weight[:0]), "ValueError: exact_draw: weight must have at least one class"),
        (lambda: draw(h[:, :3]), r"ValueError: exact_draw: hidden must be \[B, d\] = \[\*, 4\]"),
        (lambda: draw(lse=lse.float()), r"TypeError: exact_draw: lse must be \[B\]"),
        (lambda: draw(place=place + 4), r"IndexError: exact_draw: place must be in \[0, 4\), got 4"),
        (lambda: draw(place=place[:1]), r"ValueError: exact_draw: place must be \[B, m\]"),
        (lambda: log_prob(place - 1), r"IndexError: exact_log_prob: ids must be in \[0, 300\), got -1"),
        (lambda: log_prob(place[0]), r"ValueError: exact_log_prob: ids must be \[B, n\]"),
    ]


@pytest.mark.parametrize("case", range(len(errors())))
def test_errors(case):
    call, text = errors()[case]
    with pytest.raises(RuntimeError, match=f"^{text}"):
        call()


def test_opcheck(backend):
    h, weight, bias = made(backend, 2, 300, 4)
    exclude, key = torch.tensor([[1], [2]], device=backend.device), key_on(backend.device)
    mass = torch.zeros(2, 2, dtype=torch.float64, device=backend.device)
    check = torch.library.opcheck
    check(torch.ops.samplex.exact_mass.default, (h @ weight.T, bias, 0, 300, 0, 1.0, 0.0, exclude, None, 0, mass))
    check(torch.ops.samplex.exact_blocks.default, (mass, key, 0, 3))
    lse, place = ops.exact_blocks(mass, key, 0, 3)
    check(torch.ops.samplex.exact_draw.default, (h, weight, bias, lse, place, key, 0, 1.0, 0.0, exclude, None, 0))
    check(torch.ops.samplex.exact_log_prob.default, (h, weight, bias, lse, place, 0, 1.0, 0.0, exclude, None, 0))


def test_the_sampler_on_every_backend(backend):
    """Per row and shared draws, with and without excluded classes; log_prob gives the bits of log_q."""
    h, weight, bias = made(backend, 4, 520, 12)
    sampler = sx.samplers.Softmax(weight, bias, scale=0.9)
    p = (0.9 * (h.double() @ weight.double().T + bias.double())).softmax(1)
    exclude = p.argmax(1)
    for excluded in (None, exclude):
        draw = sampler.sample(h, 30, key=sx.Key(1), exclude=excluded)
        q = p.clone()
        if excluded is not None:
            q.scatter_(1, exclude[:, None], 0.0)
            assert not bool((draw.ids == exclude[:, None]).any())
        q /= q.sum(1, keepdim=True)
        torch.testing.assert_close(draw.log_q.double(), q.log().gather(1, draw.ids), rtol=1e-5, atol=1e-5)
        assert torch.equal(sampler.log_prob(h, draw.ids, exclude=excluded), draw.log_q)
    pool = sampler.sample(h, 50, shared=True, key=sx.Key(1))
    torch.testing.assert_close(pool.log_q.double(), p.mean(0).log()[pool.ids], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("count", [256, 257, 769, 1023])
@pytest.mark.parametrize("biased", [False, True])
def test_space_behind_the_rows_changes_no_bit(backend, count, biased):
    """Rows of a GPU begin at multiples of 64 bytes; the bias has no space behind it."""
    if backend.name == "cpu":
        pytest.skip("rows of the CPU are contiguous")
    g = torch.Generator().manual_seed(0)
    dots = torch.randn(5, count, generator=g).to(backend.device)
    bias = torch.randn(count, generator=g).to(backend.device) if biased else None
    spaced = torch.full((5, -(-count // 16) * 16), torch.nan, device=backend.device)[:, :count].copy_(dots)
    found = []
    for rows in (dots, spaced):
        mass = torch.zeros(5, -(-count // 256), dtype=torch.float64, device=backend.device)
        ops.exact_mass(rows, bias, 0, count, ops.SOFTMAX, 1.0, 0.0, None, None, 0, mass)
        found.append(mass)
    assert torch.equal(*found)
