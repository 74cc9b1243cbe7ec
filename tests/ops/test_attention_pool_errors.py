"""What attention pooling refuses."""

from __future__ import annotations

import re

import pytest
import torch

import samplex_cuda as sx

BWD = torch.ops.samplex.attention_pool_bwd.default
OP = torch.ops.samplex.attention_pool.default


IDS, E, P = torch.zeros(2, 3, dtype=torch.int64), torch.zeros(5, 4), torch.zeros(4)
BAD = {
    "ids": [
        ((IDS.int(), E, P, P), TypeError, "ids must be int64, got [2, 3] int32 on cpu"),
        ((torch.tensor(1), E, P, P), ValueError, "ids must be [*, T] on cpu like embedding, got [] int64 on cpu"),
        (([1, 2], E, P, P), TypeError, "ids must be a tensor [*, T] int64, got list"),
        ((IDS + 5, E, P, P), IndexError, "ids must be in [0, 5) or -1, -100 for padding, got 5 at flat position 0"),
        ((IDS - 2, E, P, P), IndexError, "ids must be in [0, 5) or -1, -100 for padding, got -2 at flat position 0"),
    ],
    "embedding": [
        ((IDS, P, P, P), ValueError, "embedding must be [S, d] float32, float64, float16 or bfloat16, got [4] float32"),
        ((IDS, E.long(), P, P), ValueError, "embedding must be [S, d] float32, float64, float16 or bfloat16, got"),
    ],
    "vectors": [
        ((IDS, E, P[:3], P), ValueError, "p must be [4] on cpu to fit embedding, got [3] float32 on cpu"),
        ((IDS, E, P, P[:3]), ValueError, "v must be [4] on cpu to fit embedding, got [3] float32 on cpu"),
        (
            (IDS, E, P.double(), P),
            TypeError,
            "p must be torch.float32 like embedding, or torch.float32, got [4] float64",
        ),
        ((IDS, E.bfloat16(), P, P.half()), TypeError, "v must be torch.bfloat16 like embedding, or torch.float32, got"),
    ],
}


@pytest.mark.parametrize(("args", "kind", "message"), [case for cases in BAD.values() for case in cases])
def test_errors_name_what_is_wrong(args, kind, message):
    with pytest.raises(kind, match="^attention_pool: " + re.escape(message)):
        sx.functional.attention_pool(*args)


@pytest.mark.parametrize(
    ("mask", "kind", "message"),
    [
        (torch.ones(2, 3), TypeError, "mask must be a bool tensor of the shape of ids, got [2, 3] float32 on cpu"),
        (torch.ones(2, 2, dtype=torch.bool), ValueError, "mask must be [2, 3] on cpu like ids, got [2, 2] bool on cpu"),
    ],
)
def test_errors_of_the_mask(mask, kind, message):
    with pytest.raises(kind, match="^attention_pool: " + re.escape(message)):
        sx.functional.attention_pool(IDS, E, P, P, mask=mask)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((IDS, P, P, P), "attention_pool: table must be [S, d] = [*, *] float32 contiguous on cpu, got [4] float32"),
        ((IDS[0], E, P, P), "attention_pool: ids must be [B, T] = [*, *] int64 contiguous on cpu, got [3] int64"),
        ((IDS, E, P[:2], P), "attention_pool: query must be [d] = [4] float32 contiguous on cpu, got [2] float32"),
        ((IDS, E, P, P.double()), "attention_pool: value must be [d] = [4] float32 contiguous on cpu, got [4] float64"),
        ((IDS + 9, E, P, P), "attention_pool: ids must be in [0, 5) or -1, -100 for padding, got 9 at flat position 0"),
    ],
)
def test_errors_of_the_op(args, message):
    with pytest.raises(RuntimeError, match=re.escape(message)):
        OP(*args, True, True, True)


def test_errors_of_the_backward():
    _, coefs, sums = OP(IDS, E, P, P, True, True, True)
    grad = torch.zeros(2)
    with pytest.raises(RuntimeError, match=re.escape("attention_pool_bwd: grad must be [B] = [2] float32")):
        BWD(grad[:1], IDS, P, P, coefs, sums, 5, True, True)
    with pytest.raises(RuntimeError, match=re.escape("attention_pool_bwd: coefs must be [B, T, 2] = [2, 3, 2]")):
        BWD(grad, IDS, P, P, coefs[:1], sums, 5, True, True)
    with pytest.raises(RuntimeError, match=re.escape("attention_pool_bwd: sums must be [B, 2, d] = [2, 2, 4]")):
        BWD(grad, IDS, P, P, coefs, sums[:1], 5, True, True)
    with pytest.raises(RuntimeError, match=re.escape("attention_pool_bwd: num_rows must be >= 0, got -1")):
        BWD(grad, IDS, P, P, coefs, sums, -1, False, True)
    with pytest.raises(RuntimeError, match=re.escape("attention_pool_bwd: ids must be in [0, 5)")):
        BWD(grad, IDS + 9, P, P, coefs, sums, 5, True, True)
