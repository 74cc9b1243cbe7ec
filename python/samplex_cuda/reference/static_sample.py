"""What `uniform_sample`, `log_uniform_sample` and `alias_sample` compute, in plain Python over all C classes.

Slow and O(C) by intent: the readable specification, and the oracle the kernels are compared with bit for bit (ids) on
small cases.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

__all__ = ["alias_weights", "conditional", "log_uniform_weights", "philox4x32", "philox_bits", "sample"]

_MASK = 0xFFFFFFFF
REJECTIONS = 8


def philox4x32(counter: Sequence[int], key: Sequence[int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 (Salmon et al. 2011): 4 counter words and 2 key words of 32 bits to 4 random words.

    Example:
        >>> from samplex_cuda.reference.static_sample import philox4x32
        >>> [hex(word) for word in philox4x32((0, 0, 0, 0), (0, 0))]
        ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _MASK, (p0 >> 32) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


def philox_bits(seed: int, offset: int, row: int, draw: int, attempt: int) -> tuple[int, int]:
    """The two 64-bit numbers of one draw: counter = offset (64 bits), row (32), draw (24), attempt (8)."""
    counter = (offset & _MASK, (offset >> 32) & _MASK, row & _MASK, (draw << 8 | attempt) & _MASK)
    words = philox4x32(counter, (seed & _MASK, (seed >> 32) & _MASK))
    return words[1] << 32 | words[0], words[3] << 32 | words[2]


def log_uniform_weights(num_classes: int) -> np.ndarray:
    """log((k+2)/(k+1)) for each class, [C] float64; their sum is log(C+1)."""
    return np.log1p(1.0 / np.arange(1, num_classes + 1, dtype=np.float64))


def alias_weights(prefix: np.ndarray) -> np.ndarray:
    """The integer weights [C] of an alias table, from its prefix sums [C + 1]."""
    return np.diff(prefix)


def conditional(weights: np.ndarray, excluded: Sequence[int] = ()) -> np.ndarray:
    """Class probabilities [C] float64 given that no excluded class comes; the first excluded id where none is left.

    Example:
        >>> import numpy as np
        >>> from samplex_cuda.reference.static_sample import conditional
        >>> conditional(np.array([6.0, 1.0, 3.0]), [0])
        array([0.  , 0.25, 0.75])
        >>> conditional(np.array([6.0, 0.0, 0.0]), [0])
        array([1., 0., 0.])
    """
    known = sorted(k for k in excluded if k >= 0)
    left = np.array(weights, dtype=np.float64)
    left[known] = 0.0
    if left.sum() > 0:
        return left / left.sum()
    alone = np.zeros(len(left))
    alone[known[0]] = 1.0
    return alone


def sample(
    law: str,
    weights: np.ndarray,
    key: tuple[int, int],
    batch: int,
    num_samples: int,
    exclude: Sequence[Sequence[int]] | None = None,
    table: np.ndarray | None = None,
    first: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """The draw itself.

    Args:
        law: "uniform", "log_uniform" or "alias".
        weights: [C], what the distribution is proportional to; integers for "alias".
        key: (seed, offset).
        batch: B.
        num_samples: m.
        exclude: B lists of class ids; -1 is ignored.
        table: [C, 4] int64, for "alias".
        first: number of the first row, the third number of a key.

    Returns:
        ids [B, m] int64, log_q [B, m] float64.
    """
    C = len(weights)
    ids = np.zeros((batch, num_samples), dtype=np.int64)
    log_q = np.zeros((batch, num_samples))

    def first_choice(bits0: int, bits1: int) -> int:
        if law == "log_uniform":
            w = float(bits0 >> 1) * 2.0**-63
            n = int((C + 1.0) * np.exp(-(w * np.log1p(C))))
            return min(max(n, 1), C) - 1
        assert table is not None
        column = bits0 * C >> 64
        threshold, alias = int(table[column, 0]) % 2**64, int(table[column, 1])
        return column if bits1 < threshold else alias

    for b in range(batch):
        row = first + b
        excluded = {k for k in (exclude[b] if exclude is not None else ()) if k >= 0}
        probability = conditional(weights, sorted(excluded))
        left = np.array([k not in excluded for k in range(C)]) * weights
        for draw in range(num_samples):
            if left.sum() == 0:  # nothing to draw from
                chosen = min(excluded)
            elif law == "uniform":
                allowed = np.flatnonzero(left)
                chosen = int(allowed[philox_bits(*key, row, draw, 0)[0] * len(allowed) >> 64])
            else:
                for attempt in range(REJECTIONS):
                    chosen = first_choice(*philox_bits(*key, row, draw, attempt))
                    if chosen not in excluded:
                        break
                else:  # every attempt was excluded: invert the distribution function of what is left
                    bits = philox_bits(*key, row, draw, REJECTIONS)[0]
                    total = left.sum()
                    point = bits * int(total) >> 64 if law == "alias" else (bits >> 11) * 2.0**-53 * total
                    chosen = int(np.searchsorted(np.cumsum(left), point, side="right"))
            ids[b, draw] = chosen
            log_q[b, draw] = np.log(probability[chosen])
    return ids, log_q
