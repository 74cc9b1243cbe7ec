"""Products with the rows of one shard, against plain torch, on every backend and SIMD level."""

from __future__ import annotations

import re

import pytest
import torch

from samplex_cuda.ops import shard_rows as ops
from samplex_cuda.reference import shard_rows as reference

LOGITS = torch.ops.samplex.shard_logits.default
HIDDEN = torch.ops.samplex.shard_hidden.default


def make(dtype=torch.float32, batch=3, targets=2, draws=7, dim=33, classes=20, rows=8, step=7, start=6, bias=None):
    """Arguments of `shard_logits`; some ids are no class."""
    return (
        torch.randn(batch, dim).to(dtype),
        torch.randn(rows, dim).to(dtype),
        None if bias is None else torch.randn(rows).to(bias),
        torch.randint(-1, classes + 1, (batch, targets)),
        torch.randint(-1, classes + 1, (batch, draws)),
        classes,
        step,
        start,
    )


def to(device, values):
    return tuple(v.to(device) if isinstance(v, torch.Tensor) else v for v in values)


def wide(values):
    return tuple(v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for v in values)


def check(device, arguments):
    got = ops.shard_logits(*to(device, arguments))
    want = reference.shard_logits(*wide(arguments))
    acc = torch.float64 if arguments[1].dtype == torch.float64 else torch.float32
    assert got[0].dtype == acc
    torch.testing.assert_close(got[0].cpu().double(), want[0], rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(got[1:], want[1:], strict=True):
        assert torch.equal(mine.cpu(), theirs)
    weight, target_rows, id_rows = arguments[1], want[1], want[2]
    coefs = torch.randn(target_rows.shape, dtype=acc), torch.randn(id_rows.shape, dtype=acc)
    coefs[1][:, ::3] = 0
    hidden = (weight, *coefs, target_rows.contiguous(), id_rows.contiguous())
    found, want = ops.shard_hidden(*to(device, hidden)), reference.shard_hidden(*wide(hidden))
    torch.testing.assert_close(found.cpu().double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dim", [33, 64, 264, 1100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_products(backend, dtype, dim):
    check(backend.device, make(dtype, dim=dim, bias=dtype))
    check(backend.device, make(dtype, dim=dim, bias=None if dtype == torch.float64 else torch.float32))


SHAPES = [(1, 1, 1, 1), (5, 1, 4, 16), (2, 3, 13, 129), (0, 1, 3, 4), (3, 1, 0, 4), (3, 0, 2, 8)]


@pytest.mark.parametrize("shape", SHAPES)
def test_any_shape(backend, shape):
    check(backend.device, make(torch.float32, *shape))


def test_a_shard_without_rows(backend):
    check(backend.device, make(rows=0, start=20))


def test_one_shard_with_every_class(backend):
    check(backend.device, make(rows=20, start=0, step=1))


def test_on_every_simd_level(simd_level):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        check(torch.device("cpu"), make(dtype, 6, 1, 30, 70, bias=dtype))


def test_large_class_numbers_meet_their_row():
    """The product step * c is near 2^62: the quotient by way of a double may be off by one, the row not."""
    classes = 2**31 - 1
    step = 1327217885
    ids = torch.cat([torch.randint(classes, (1, 500)), torch.tensor([[0, 1, classes - 1, classes]])], 1)
    h, weight = torch.ones(1, 1), torch.ones(1000, 1)
    for start in (0, classes - 1000, 12345678):
        hit = (torch.arange(start, start + 1000) * pow(step, -1, classes) % classes).unsqueeze(0)
        both = torch.cat([ids, hit], 1)
        got = ops.shard_logits(h, weight, None, both[:, :0], both, classes, step, start)[2]
        want = both * step % classes - start
        want = torch.where((both < classes) & (want >= 0) & (want < 1000), want, -1)
        assert torch.equal(got, want)
        assert torch.equal(got[:, 504:], torch.arange(1000).unsqueeze(0))


def test_rows_of_others_are_not_read(backend):
    """Row 0 is nan: an entry that is skipped must not read it in place of its own row."""
    arguments = list(make(bias=torch.float32))
    arguments[1][0], arguments[2][0] = torch.nan, torch.nan
    logits, target_rows, id_rows = (t.cpu() for t in ops.shard_logits(*to(backend.device, arguments)))
    rows = torch.cat([target_rows, id_rows], 1)
    assert torch.equal(logits.isnan(), rows == 0)
    assert (logits[rows < 0] == 0).all()
    none = torch.full_like(id_rows, -1)
    coefs = torch.ones(target_rows.shape), torch.ones(none.shape)
    target_rows = torch.where(target_rows == 0, -1, target_rows)
    hidden = ops.shard_hidden(*to(backend.device, (arguments[1], *coefs, target_rows, none)))
    assert hidden.isfinite().all()
    coefs = torch.zeros(id_rows.shape)
    zero = ops.shard_hidden(*to(backend.device, (arguments[1], coefs[:, :0], coefs, none[:, :0], none * 0)))
    assert (zero == 0).all()


def test_same_bits_whatever_else_is_local():
    """An entry's product is the same on any number of shards, so that their sum is, too."""
    whole = make(batch=9, draws=41, dim=70, classes=50, rows=50, start=0, step=1, bias=torch.float32)
    full = ops.shard_logits(*whole)[0]
    for shards in (2, 3, 4):
        total = torch.zeros_like(full)
        for part in torch.arange(50).chunk(shards):
            begin, end = int(part[0]), int(part[-1]) + 1
            total += ops.shard_logits(whole[0], whole[1][begin:end], whole[2][begin:end], *whole[3:6], 1, begin)[0]
        assert torch.equal(total, full)


def test_opcheck():
    arguments = make(bias=torch.float32)
    torch.library.opcheck(LOGITS, arguments)
    _, target_rows, id_rows = ops.shard_logits(*arguments)
    torch.library.opcheck(HIDDEN, (arguments[1], torch.randn(3, 2), torch.randn(3, 7), target_rows, id_rows))


WRONG = {
    "shard_logits: hidden must be [B, d]": {0: torch.randn(3, 5)},
    "shard_logits: bias must be [n]": {2: torch.randn(3)},
    "shard_logits: target must be [B, P]": {3: torch.zeros(4, 1, dtype=torch.int64)},
    "shard_logits: ids must be [B, m]": {4: torch.zeros(3, 1)},
    "shard_logits: num_classes must be in [1, 2^52], got 0": {5: 0},
    "shard_logits: step must be 1, or below num_classes": {6: 20},
    "shard_logits: start must be at least 0 and leave room for the 8 rows": {7: 13},
}


@pytest.mark.parametrize("message", WRONG)
def test_refused(message):
    arguments = list(make())
    for place, value in WRONG[message].items():
        arguments[place] = value
    with pytest.raises(RuntimeError, match=re.escape(message)):
        ops.shard_logits(*arguments)


def test_refused_coefficients():
    rows = torch.zeros(3, 2, dtype=torch.int64)
    with pytest.raises(RuntimeError, match=re.escape("shard_hidden: id_coef must be [B, m]")):
        ops.shard_hidden(torch.randn(4, 5), torch.randn(3, 2), torch.randn(3, 1), rows, rows)
