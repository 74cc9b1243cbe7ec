"""Draws from an inverted multi-index: `samplex::midx_sample` and `midx_log_prob`.

A class y in cell (k1, k2) has the weight w(y) = a[k1] b[k2] omega[k1, k2] units(y) / units(cell), and
q(y) = (1 - epsilon) w(y) / sum(w) + epsilon / C.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from samplex_cuda._library import register_fake

__all__ = ["MAX_CODES", "midx_log_prob", "midx_sample", "midx_tables"]

MAX_CODES = 2048


def midx_tables(cell: Tensor, num_codes: int) -> tuple[Tensor, Tensor, Tensor]:
    """The order of the classes by cell, without a host sync.

    Args:
        cell: [C] int32, k1 * K + k2 of each class.
        num_codes: K.

    Returns:
        place [C], members [C] and starts [K * K + 1], all int32: `members` has the classes ordered by cell, `place`
        says where a class is in it, `starts` where a cell begins.

    Example:
        >>> import torch
        >>> from samplex_cuda.ops.midx_sample import midx_tables
        >>> midx_tables(torch.tensor([3, 0, 3], dtype=torch.int32), 2)[1:]
        (tensor([1, 0, 2], dtype=torch.int32), tensor([0, 1, 1, 1, 3], dtype=torch.int32))
    """
    ordered, members = cell.sort(stable=True)
    place = torch.empty_like(cell)
    place[members] = torch.arange(cell.shape[0], dtype=torch.int32, device=cell.device)
    cells = torch.arange(num_codes * num_codes + 1, dtype=torch.int32, device=cell.device)
    return place, members.to(torch.int32), torch.searchsorted(ordered, cells, out_int32=True)


def midx_sample(
    key: Tensor,
    num_samples: int,
    weights: Tensor,
    mass: Tensor,
    omega: Tensor,
    cell: Tensor,
    place: Tensor,
    members: Tensor,
    starts: Tensor,
    prefix: Tensor | None,
    epsilon: float,
    stratified: bool = False,
    exclude: Tensor | None = None,
    exclude_offsets: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Draws of each row, without its excluded ids. The same bits on every backend, given the same tensors.

    Args:
        key: [2] int64 (seed, offset); its device is the op's.
        num_samples: m.
        weights: [B, 2, K] float32, a and b of each row; a row with nan gives class 0 with log_q = nan.
        mass: [B, K] float32, b times the rows of omega.
        omega: [K, K] float32, the weights of the cells; 0 for a cell without units.
        cell: [C] int32, k1 * K + k2 of each class.
        place: [C] int32, from `midx_tables`.
        members: [C] int32, from `midx_tables`.
        starts: [K * K + 1] int32, from `midx_tables`.
        prefix: [C + 1] int64, running sums of the units of `members`; None: one unit each.
        epsilon: share of the uniform distribution.
        stratified: draw j takes its uniform number from part j of m equal parts of [0, 1).
        exclude: [B, P] int64, each row ascending, -1 first for "none"; or [nnz] with `exclude_offsets`.
        exclude_offsets: [B + 1] int64.

    Returns:
        ids [B, m] int64 and log_q [B, m] float32.

    Example:
        >>> import torch
        >>> from samplex_cuda.ops.midx_sample import midx_sample, midx_tables
        >>> cell = torch.tensor([1, 1, 0], dtype=torch.int32)  # classes 0 and 1 share cell (0, 1)
        >>> omega = torch.tensor([[1.0, 2.0], [0.0, 0.0]])
        >>> weights = torch.tensor([[[1.0, 1.0], [0.0, 1.0]]])  # b leaves out the cells (., 0)
        >>> law = (weights, weights[:, 1] @ omega.T, omega, cell, *midx_tables(cell, 2), None, 0.0)
        >>> ids, log_q = midx_sample(torch.tensor([0, 0]), 4, *law, exclude=torch.tensor([[0]]))
        >>> ids, log_q
        (tensor([[1, 1, 1, 1]]), tensor([[0., 0., 0., 0.]]))
    """
    return torch.ops.samplex.midx_sample(
        key, num_samples, weights, mass, omega, cell, place, members, starts, prefix, epsilon, stratified, exclude,
        exclude_offsets,
    )  # fmt: skip


def midx_log_prob(
    ids: Tensor,
    weights: Tensor,
    mass: Tensor,
    omega: Tensor,
    cell: Tensor,
    place: Tensor,
    members: Tensor,
    starts: Tensor,
    prefix: Tensor | None,
    epsilon: float,
    exclude: Tensor | None = None,
    exclude_offsets: Tensor | None = None,
) -> Tensor:
    """Log-probability [B, n] float32 of ids [B, n] int64 under the distribution of `midx_sample`.

    -inf for an excluded id; in a row with nothing left the first excluded id has probability 1.

    Example:
        >>> import torch
        >>> from samplex_cuda.ops.midx_sample import midx_log_prob, midx_tables
        >>> cell, omega = torch.tensor([1, 1, 0], dtype=torch.int32), torch.tensor([[1.0, 2.0], [0.0, 0.0]])
        >>> weights = torch.ones(1, 2, 2)
        >>> law = (weights, weights[:, 1] @ omega.T, omega, cell, *midx_tables(cell, 2), None, 0.0)
        >>> midx_log_prob(torch.tensor([[0, 1, 2]]), *law).exp()
        tensor([[0.3333, 0.3333, 0.3333]])
    """
    return torch.ops.samplex.midx_log_prob(
        ids, weights, mass, omega, cell, place, members, starts, prefix, epsilon, exclude, exclude_offsets
    )


@register_fake("samplex::midx_sample")
def _(key: Tensor, num_samples: int, weights: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    shape = (weights.shape[0], num_samples)
    return key.new_empty(shape, dtype=torch.int64), key.new_empty(shape, dtype=torch.float32)


@register_fake("samplex::midx_log_prob")
def _(ids: Tensor, *rest: Any) -> Tensor:
    return ids.new_empty(ids.shape, dtype=torch.float32)
