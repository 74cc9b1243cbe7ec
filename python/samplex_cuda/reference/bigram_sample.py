"""What `bigram_sample` computes, in plain Python over all C classes.

Slow and O(C) by intent: the readable specification, and the oracle the kernels are compared with bit for bit (ids) on
small cases.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from samplex_cuda.reference.static_sample import REJECTIONS, conditional, philox_bits

__all__ = ["law", "sample"]


def law(
    unigram: np.ndarray,
    offsets: np.ndarray,
    pair_ids: np.ndarray,
    weights: np.ndarray,
    backoff: np.ndarray,
    context: int,
) -> np.ndarray:
    """P(k | context) of every class, [C] float64.

    Args:
        unigram: [C] integer weights.
        offsets: [N + 1].
        pair_ids: [nnz] classes.
        weights: [nnz] integer weights of the pairs.
        backoff: [N].
        context: -1, or a context without pairs: the unigram distribution.

    Example:
        >>> import numpy as np
        >>> from samplex_cuda.reference.bigram_sample import law
        >>> law(np.array([1, 1]), np.array([0, 1]), np.array([1]), np.array([7]), np.array([0.5]), 0)
        array([0.25, 0.75])
    """
    alone = np.asarray(unigram, dtype=np.float64) / np.sum(unigram, dtype=np.float64)
    begin, end = (0, 0) if context < 0 else (offsets[context], offsets[context + 1])
    if begin == end:
        return alone
    after = np.zeros(len(unigram))
    after[pair_ids[begin:end]] = weights[begin:end] / np.sum(weights[begin:end], dtype=np.float64)
    return (1 - backoff[context]) * after + backoff[context] * alone


def sample(
    unigram: np.ndarray,
    table: np.ndarray,
    offsets: np.ndarray,
    pair_ids: np.ndarray,
    weights: np.ndarray,
    pair_table: np.ndarray,
    backoff: np.ndarray,
    key: tuple[int, int],
    context: Sequence[int],
    num_samples: int,
    exclude: Sequence[Sequence[int]] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """The draw itself.

    Args:
        unigram: [C] integer weights.
        table: [C, 4] int64, their alias table.
        offsets: [N + 1].
        pair_ids: [nnz] classes.
        weights: [nnz] integer weights of the pairs.
        pair_table: [nnz, 4] int64, the alias table of each context.
        backoff: [N].
        key: (seed, offset).
        context: B context ids.
        num_samples: m.
        exclude: B lists of class ids; -1 is ignored.

    Returns:
        ids [B, m] int64, log_q [B, m] float64.
    """
    ids = np.zeros((len(context), num_samples), dtype=np.int64)
    log_q = np.zeros((len(context), num_samples))

    def column_of(entries: np.ndarray, bits0: int, bits1: int) -> int:
        column = bits0 * len(entries) >> 64
        return column if bits1 < int(entries[column, 0]) % 2**64 else int(entries[column, 1])

    def invert(left: np.ndarray, bits: int) -> int:
        """The class of weight unit `bits * sum >> 64` of integer weights, in Python's integers."""
        point = bits * sum(int(w) for w in left) >> 64
        for k, weight in enumerate(left):
            if point < int(weight):
                return k
            point -= int(weight)
        raise AssertionError("the point lies below the sum")

    for b, c in enumerate(context):
        excluded = {k for k in (exclude[b] if exclude is not None else ()) if k >= 0}
        q = law(unigram, offsets, pair_ids, weights, backoff, c)
        probability = conditional(q, sorted(excluded))
        begin, end = (0, 0) if c < 0 else (int(offsets[c]), int(offsets[c + 1]))
        share = 1.0 if begin == end else float(backoff[c])
        kept = np.array([k not in excluded for k in range(len(unigram))])
        pairs, own = pair_ids[begin:end], weights[begin:end] * kept[pair_ids[begin:end]]
        others = unigram * kept
        left = (1 - share) * own.sum() / max(1, weights[begin:end].sum()), share * others.sum() / unigram.sum()
        for draw in range(num_samples):
            if sum(left) == 0:
                chosen = min(excluded)
            else:
                for attempt in range(REJECTIONS):
                    choice = philox_bits(*key, b, draw, 2 * attempt)[0]
                    bits = philox_bits(*key, b, draw, 2 * attempt + 1)
                    if (choice >> 11) * 2.0**-53 < share:
                        chosen = column_of(table, *bits)
                    else:
                        chosen = int(pairs[column_of(pair_table[begin:end], *bits)])
                    if chosen not in excluded:
                        break
                else:  # every attempt was excluded: a part by the mass left in it, then its distribution function
                    choice, bits1 = philox_bits(*key, b, draw, 2 * REJECTIONS)
                    if left[1] == 0 or (choice >> 11) * 2.0**-53 * sum(left) < left[0]:
                        chosen = int(pairs[invert(own, bits1)])
                    else:
                        chosen = invert(others, bits1)
            ids[b, draw] = chosen
            log_q[b, draw] = np.log(probability[chosen])
    return ids, log_q
