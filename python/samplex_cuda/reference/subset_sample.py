"""What `subset_sample` computes, in plain Python: Floyd's algorithm, one row after the other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from samplex_cuda.reference.static_sample import philox_bits

__all__ = ["subset_sample"]


def subset_sample(
    key: tuple[int, int], batch: int, num_samples: int, num_classes: int, exclude: Sequence[int] | None = None
) -> np.ndarray:
    """The draw itself: ids [B, k] int64.

    Args:
        key: (seed, offset).
        batch: B.
        num_samples: k.
        num_classes: n.
        exclude: B class ids, -1 for none.

    Example:
        >>> from samplex_cuda.reference.subset_sample import subset_sample
        >>> sorted(subset_sample((1, 2), 1, 3, 4, [2])[0].tolist())
        [0, 1, 3]
    """
    ids = np.zeros((batch, num_samples), dtype=np.int64)
    for b in range(batch):
        allowed = [c for c in range(num_classes) if exclude is None or c != exclude[b]]
        taken: list[int] = []
        for step in range(num_samples):
            last = len(allowed) - num_samples + step
            offer = philox_bits(*key, b, step // 2, 0)[step % 2] * (last + 1) >> 64
            taken.append(last if offer in taken else offer)
        ids[b] = [allowed[value] for value in taken]
    return ids
