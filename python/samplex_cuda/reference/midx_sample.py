"""What `midx_sample` and `midx_log_prob` compute, in plain numpy and float64 over all C classes.

A draw takes one uniform number u through four inversions: the first part of [0, 1) is the uniform distribution, the
rest goes to k1, then k2, then the classes of the cell. Codes come in the order of the lanes: 0, 32, 64, …, 1, 33, ….
Excluded classes are lists here, one for each row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from samplex_cuda.reference.static_sample import conditional, philox_bits

__all__ = ["law", "sample"]

LANES = 32


def law(
    a: np.ndarray,
    b: np.ndarray,
    omega: np.ndarray,
    cell: np.ndarray,
    units: np.ndarray,
    epsilon: float,
    excluded: Sequence[int] = (),
) -> np.ndarray:
    """Class probabilities [C] float64 of one row.

    Args:
        a: [K] weights of the first codes.
        b: [K] weights of the second codes.
        omega: [K, K] weights of the cells.
        cell: [C] k1 * K + k2.
        units: [C] integer units of the classes.
        epsilon: share of the uniform distribution.
        excluded: class ids.

    Example:
        >>> import numpy as np
        >>> from samplex_cuda.reference.midx_sample import law
        >>> law(np.ones(1), np.ones(1), np.ones((1, 1)), np.zeros(3, int), np.array([1, 1, 2]), 0.0)
        array([0.25, 0.25, 0.5 ])
    """
    codes = len(a)
    cell_units = np.bincount(cell, weights=units.astype(np.float64), minlength=codes * codes)
    share = np.divide(units, cell_units[cell], out=np.zeros(len(cell)), where=cell_units[cell] > 0)
    w = a.astype(np.float64)[cell // codes] * b.astype(np.float64)[cell % codes] * omega.reshape(-1)[cell] * share
    q = np.full(len(cell), epsilon / len(cell))
    if w.sum() > 0:
        q += (1.0 - epsilon) * w / w.sum()
    return conditional(q, excluded) if len(excluded) else q


def sample(
    a: np.ndarray,
    b: np.ndarray,
    omega: np.ndarray,
    cell: np.ndarray,
    units: np.ndarray,
    epsilon: float,
    key: tuple[int, int],
    row: int,
    num_samples: int,
    excluded: Sequence[int] = (),
    stratified: bool = False,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The draws of one row: ids [m], log_q [m], and how far u is from a boundary between two classes [m].

    Example:
        >>> import numpy as np
        >>> from samplex_cuda.reference.midx_sample import sample
        >>> one = np.ones(1), np.ones(1), np.ones((1, 1)), np.zeros(3, int), np.array([0, 5, 0])
        >>> sample(*one, 0.0, (1, 2), 0, 4)[0]
        array([1, 1, 1, 1])
    """
    classes, codes = len(cell), len(a)
    known = sorted({k for k in excluded if k >= 0})
    q = law(a, b, omega, cell, units, epsilon, known)
    if len(known) == classes:
        return np.full(num_samples, known[0]), np.zeros(num_samples), np.ones(num_samples)
    index = law(a, b, omega, cell, units, 0.0)
    index[known], flat = 0.0, np.full(classes, 1.0)
    flat[known] = 0.0
    flat, index = epsilon * flat / classes, (1.0 - epsilon) * index
    if flat.sum() + index.sum() == 0.0:
        return np.full(num_samples, known[0]), np.zeros(num_samples), np.ones(num_samples)
    k1, k2 = cell // codes, cell % codes
    order = np.lexsort((np.arange(classes), k2 // LANES, k2 % LANES, k1 // LANES, k1 % LANES))
    ends = np.concatenate([flat, index[order]]).cumsum() / (flat.sum() + index.sum())
    names = np.concatenate([np.arange(classes), order])
    u = np.array([(philox_bits(*key, row, j, 0)[0] >> 11) * 2.0**-53 for j in range(num_samples)])
    if stratified:
        u = (np.arange(num_samples) + u) / num_samples
    at = np.minimum(np.searchsorted(ends, u, side="right"), len(ends) - 1)
    near = np.minimum(np.abs(ends[at] - u), np.abs(np.where(at > 0, ends[at - 1], 0.0) - u))
    return names[at], np.log(q[names[at]]), near
