"""Philox on Random123's known answers, the reproducible exp and log, and keys."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import samplex_cuda as sx
from samplex_cuda import _native
from samplex_cuda.reference import static_sample as reference
from samplex_cuda.rng import key_tensor

# counter, key, result: the philox4x32 10 lines of Random123's kat_vectors.
KNOWN_ANSWERS = [
    ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
def test_philox_known_answers(counter, key, words):
    assert _native.philox(counter, key) == words
    assert reference.philox4x32(counter, key) == words


def test_philox_known_answers_through_an_op(backend):
    # Counter (0, 0, 0, 0): key (0, 0), row 0, draw 0. With C = 2^52 the id is the top 52 bits of the first 64.
    words = KNOWN_ANSWERS[0][2]
    key = torch.zeros(2, dtype=torch.int64, device=backend.device)
    ids, _ = torch.ops.samplex.uniform_sample(key, 1, 1, 1 << 52)
    assert ids.item() == (words[1] << 32 | words[0]) >> 12


def test_philox_all_counter_words_reach_the_bits(backend):
    """Seed and offset of 64 bits, row and draw: each bit of the id agrees with the reference at C = 2^52."""
    seed, offset = -0x123456789ABCDEF, 0x7EDCBA9876543210
    key = torch.tensor([seed, offset], device=backend.device)
    ids, _ = torch.ops.samplex.uniform_sample(key, 3, 5, 1 << 52)
    wanted = [
        [reference.philox_bits(seed % 2**64, offset, row, draw, 0)[0] >> 12 for draw in range(5)] for row in range(3)
    ]
    assert ids.tolist() == wanted


def _relative_error(got, x, function):
    """Against 80-bit arithmetic."""
    wanted = function(x.astype(np.longdouble))
    return float(np.max(np.abs((got.astype(np.longdouble) - wanted) / wanted)))


def test_exact_exp_accuracy():
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.uniform(-700, 700, 100_000), rng.uniform(-1, 1, 100_000), rng.uniform(-50, 0, 100_000)])
    assert _relative_error(_native.exact_math("exp", x), x, np.exp) < 4e-16
    assert _native.exact_math("exp", [0.0, -0.0]).tolist() == [1.0, 1.0]


def test_exact_log_accuracy():
    rng = np.random.default_rng(1)
    x = np.concatenate(
        [
            np.exp(rng.uniform(-700, 700, 100_000)),
            rng.uniform(0.5, 2.0, 100_000),
            np.sqrt(2.0) * (1 + rng.uniform(-1e-9, 1e-9, 1000)),
            1.0 + rng.uniform(-1e-3, 1e-3, 100_000),
            np.arange(2, 100_000, dtype=np.float64),
        ]
    )
    x = x[x != 1.0]
    assert _relative_error(_native.exact_math("log", x), x, np.log) < 4e-16
    assert _native.exact_math("log", [1.0]).tolist() == [0.0]


def test_exact_log1p_accuracy():
    rng = np.random.default_rng(2)
    x = np.concatenate(
        [np.exp(rng.uniform(-40, 30, 200_000)), 1.0 / np.arange(1, 100_000), rng.uniform(0.41, 0.42, 10_000)]
    )
    assert _relative_error(_native.exact_math("log1p", x), x, np.log1p) < 4e-16


def test_exact_math_names_its_choices():
    with pytest.raises(ValueError, match="exact_math: name must be exp, log or log1p, got sin"):
        _native.exact_math("sin", [1.0])


class TestKey:
    def test_reservations_move_the_offset(self):
        key = sx.Key(5, 10)
        assert [key.reserve("cpu").tolist() for _ in range(3)] == [[5, 10], [5, 11], [5, 12]]
        assert key == sx.Key(5, 13)

    def test_state_dict_resumes(self):
        key = sx.Key(5)
        key.reserve("cpu")
        state = key.state_dict()
        wanted = key.reserve("cpu")
        other = sx.Key(0)
        other.load_state_dict(state)
        assert torch.equal(other.reserve("cpu"), wanted)

    def test_64_bits_wrap(self):
        assert sx.Key(2**64 - 1).reserve("cpu").tolist() == [-1, 0]
        key = sx.Key(0, 2**63 - 1)
        key.reserve("cpu")
        assert key.reserve("cpu").tolist() == [0, -(2**63)]

    @pytest.mark.parametrize("bad", ["1", 1.0, True, None])
    def test_bad_seed(self, bad):
        with pytest.raises(TypeError, match="Key: seed must be an int, got"):
            sx.Key(bad)

    def test_default_generator(self):
        cpu = torch.device("cpu")
        torch.manual_seed(3)
        first, second = key_tensor("x", None, cpu), key_tensor("x", None, cpu)
        torch.manual_seed(3)
        assert torch.equal(key_tensor("x", None, cpu), first)
        assert not torch.equal(first, second)

    @pytest.mark.parametrize(
        ("bad", "error", "text"),
        [
            (7, TypeError, r"x: key must be a Key, an int64 \[2\] tensor or None, got int"),
            (torch.zeros(4, dtype=torch.int64), ValueError, r"x: key must be \[2\] or \[3\] int64, got \[4\] int64"),
            (torch.zeros(2), ValueError, r"x: key must be \[2\] or \[3\] int64, got \[2\] float32"),
            (torch.zeros(2, dtype=torch.int64, device="meta"), ValueError, "x: key must be on cpu, got meta"),
        ],
    )
    def test_bad_key(self, bad, error, text):
        with pytest.raises(error, match=text):
            key_tensor("x", bad, torch.device("cpu"))
