"""Draws that do not depend on the query: `samplex::uniform_sample`, `log_uniform_sample`, `alias_sample`.

Each comes with a `*_log_prob` op for given ids under the same distribution. `exclude` is what `sort_exclude` returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from samplex_cuda._library import (
    _native,  # also registers the ops
    register_fake,
)

__all__ = [
    "alias_log_prob",
    "alias_sample",
    "build_alias",
    "log_uniform_log_prob",
    "log_uniform_sample",
    "sort_exclude",
    "uniform_log_prob",
    "uniform_sample",
]


def uniform_sample(
    key: Tensor,
    batch: int,
    num_samples: int,
    num_classes: int,
    exclude: Tensor | None = None,
    exclude_offsets: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Uniform draws over [0, C) without the excluded ids of each row.

    Args:
        key: [2] int64 (seed, offset); its device is the op's.
        batch: B.
        num_samples: m.
        num_classes: C.
        exclude: [B, P] int64, each row ascending, -1 first for "none"; or [nnz] with `exclude_offsets`.
        exclude_offsets: [B + 1] int64.

    Returns:
        ids [B, m] int64 and log_q [B, m] float32.

    Example:
        >>> import torch
        >>> from samplex_cuda.ops.static_sample import uniform_sample
        >>> ids, log_q = uniform_sample(torch.tensor([0, 0]), 2, 3, 2, torch.tensor([[0], [1]]))
        >>> ids, log_q[0]
        (tensor([[1, 1, 1],
                [0, 0, 0]]), tensor([0., 0., 0.]))
    """
    return torch.ops.samplex.uniform_sample(key, batch, num_samples, num_classes, exclude, exclude_offsets)


def log_uniform_sample(
    key: Tensor,
    batch: int,
    num_samples: int,
    num_classes: int,
    exclude: Tensor | None = None,
    exclude_offsets: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Draws with P(k) = log((k+2)/(k+1)) / log(C+1); arguments and result as `uniform_sample`.

    Example:
        >>> import torch
        >>> from samplex_cuda.ops.static_sample import log_uniform_sample
        >>> ids, log_q = log_uniform_sample(torch.tensor([0, 0]), 2, 3, 10**9)
        >>> ids.shape, bool((log_q < 0).all())
        (torch.Size([2, 3]), True)
    """
    return torch.ops.samplex.log_uniform_sample(key, batch, num_samples, num_classes, exclude, exclude_offsets)


def alias_sample(
    key: Tensor,
    batch: int,
    num_samples: int,
    table: Tensor,
    prefix: Tensor,
    exclude: Tensor | None = None,
    exclude_offsets: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Draws by an alias table; other arguments and result as `uniform_sample`.

    Args:
        key: [2] int64.
        batch: B.
        num_samples: m.
        table: [C, 4] int64, from `build_alias`.
        prefix: [C + 1] int64, from `build_alias`.
        exclude: as in `uniform_sample`.
        exclude_offsets: as in `uniform_sample`.

    Example:
        >>> import torch
        >>> from samplex_cuda.ops.static_sample import alias_sample, build_alias
        >>> table, prefix = build_alias([0.0, 3.0, 0.0])
        >>> ids, log_q = alias_sample(torch.tensor([0, 0]), 1, 3, table, prefix)
        >>> ids, log_q
        (tensor([[1, 1, 1]]), tensor([[0., 0., 0.]]))
    """
    return torch.ops.samplex.alias_sample(key, batch, num_samples, table, prefix, exclude, exclude_offsets)


def uniform_log_prob(
    ids: Tensor, num_classes: int, exclude: Tensor | None = None, exclude_offsets: Tensor | None = None
) -> Tensor:
    """Log-probability [B, n] float32 of ids [B, n] int64 as drawn by `uniform_sample`; -inf for an excluded id.

    Example:
        >>> import torch
        >>> from samplex_cuda.ops.static_sample import uniform_log_prob
        >>> uniform_log_prob(torch.tensor([[0, 1]]), 3, torch.tensor([[0]])).exp()
        tensor([[0.0000, 0.5000]])
    """
    return torch.ops.samplex.uniform_log_prob(ids, num_classes, exclude, exclude_offsets)


def log_uniform_log_prob(
    ids: Tensor, num_classes: int, exclude: Tensor | None = None, exclude_offsets: Tensor | None = None
) -> Tensor:
    """Log-probability [B, n] float32 of ids [B, n] int64 under the distribution of `log_uniform_sample`.

    Example:
        >>> import torch
        >>> from samplex_cuda.ops.static_sample import log_uniform_log_prob
        >>> log_uniform_log_prob(torch.tensor([[0, 1, 2]]), 3).exp()
        tensor([[0.5000, 0.2925, 0.2075]])
    """
    return torch.ops.samplex.log_uniform_log_prob(ids, num_classes, exclude, exclude_offsets)


def alias_log_prob(
    ids: Tensor, table: Tensor, prefix: Tensor, exclude: Tensor | None = None, exclude_offsets: Tensor | None = None
) -> Tensor:
    """Log-probability [B, n] float32 of ids [B, n] int64 as drawn by `alias_sample`; -inf for weight zero.

    Example:
        >>> import torch
        >>> from samplex_cuda.ops.static_sample import alias_log_prob, build_alias
        >>> table, prefix = build_alias([1.0, 3.0])
        >>> alias_log_prob(torch.tensor([[0, 1]]), table, prefix).exp()
        tensor([[0.2500, 0.7500]])
    """
    return torch.ops.samplex.alias_log_prob(ids, table, prefix, exclude, exclude_offsets)


def build_alias(weights: np.ndarray | Sequence[float]) -> tuple[Tensor, Tensor]:
    """An alias table for `alias_sample`: O(C), without randomness, on the CPU.

    The weights are turned into integers whose sum is just below 2^61. From there all is integer arithmetic, so that the
    table, the prefix sums and the mass left after an exclusion agree exactly.

    Args:
        weights: [C] finite, not negative, not all zero.

    Returns:
        table [C, 4] int64 and prefix [C + 1] int64, the running sums of the integer weights.

    Example:
        >>> from samplex_cuda.ops.static_sample import build_alias
        >>> table, prefix = build_alias([1.0, 0.0, 3.0])
        >>> table.shape, (prefix / prefix[-1]).tolist()
        (torch.Size([3, 4]), [0.0, 0.25, 0.25, 1.0])
    """
    array = np.ascontiguousarray(weights, dtype=np.float64)
    # torch's own memory: aligned, so that a 32-byte column never lies in two cache lines.
    table = torch.empty((array.shape[0], 4), dtype=torch.int64, device="cpu")
    prefix = torch.empty(array.shape[0] + 1, dtype=torch.int64, device="cpu")
    _native.build_alias(array, table.numpy(), prefix.numpy())
    return table, prefix


def sort_exclude(exclude: Tensor | tuple[Tensor, Tensor] | None) -> tuple[Tensor | None, Tensor | None]:
    """The (exclude, exclude_offsets) arguments of the ops from any of the accepted forms, without a host sync.

    Args:
        exclude: [B] | [B, P] padded with -1, any order | CSR pair (offsets [B + 1], ids [nnz]) | None. int64.

    Example:
        >>> import torch
        >>> from samplex_cuda.ops.static_sample import sort_exclude
        >>> sort_exclude(torch.tensor([[5, -1, 2]]))
        (tensor([[-1,  2,  5]]), None)
        >>> sort_exclude((torch.tensor([0, 2, 3]), torch.tensor([9, 4, 1])))
        (tensor([4, 9, 1]), tensor([0, 2, 3]))
    """
    if exclude is None:
        return None, None
    if isinstance(exclude, Tensor):
        if exclude.dim() == 1:
            return exclude.unsqueeze(1).contiguous(), None
        return (exclude if exclude.shape[1] == 1 else exclude.sort(dim=1).values).contiguous(), None
    offsets, ids = exclude
    # By id, then stably by row: one combined key could overflow.
    rows = torch.searchsorted(offsets, torch.arange(ids.shape[0], device=ids.device), right=True)
    by_id = ids.argsort(stable=True)
    by_row = rows[by_id].argsort(stable=True)
    return ids[by_id[by_row]], offsets.contiguous()


def _fake_sample(key: Tensor, batch: int, num_samples: int, *law: Any) -> tuple[Tensor, Tensor]:
    shape = (batch, num_samples)
    return key.new_empty(shape, dtype=torch.int64), key.new_empty(shape, dtype=torch.float32)


def _fake_log_prob(ids: Tensor, *law: Any) -> Tensor:
    return ids.new_empty(ids.shape, dtype=torch.float32)


for _law in ("uniform", "log_uniform", "alias"):
    register_fake(f"samplex::{_law}_sample", _fake_sample)
    register_fake(f"samplex::{_law}_log_prob", _fake_log_prob)
