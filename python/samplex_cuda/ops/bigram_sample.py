"""Draws that depend on a context id: `samplex::bigram_sample` and `bigram_log_prob`.

P(k | c) = (1 - b_c) P(k after c) + b_c P(k): both distributions are alias tables, that of the contexts in CSR.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from samplex_cuda._library import _native, register_fake

__all__ = ["bigram_log_prob", "bigram_sample", "build_alias_rows"]


def bigram_sample(
    key: Tensor,
    context: Tensor,
    num_samples: int,
    table: Tensor,
    prefix: Tensor,
    offsets: Tensor,
    pair_ids: Tensor,
    pair_table: Tensor,
    pair_prefix: Tensor,
    backoff: Tensor,
    exclude: Tensor | None = None,
    exclude_offsets: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Draws from the distribution of each row's context, excluded ids left out; the same bits on every backend.

    Args:
        key: [2] int64 (seed, offset); its device is the op's.
        context: [B] int64; -1, or a context without pairs, stands for the unigram distribution.
        num_samples: m.
        table: [C, 4] int64, the unigram distribution, from `build_alias`.
        prefix: [C + 1] int64, from `build_alias`.
        offsets: [N + 1] int64, where the pairs of each context begin.
        pair_ids: [nnz] int64 classes, ascending in each context.
        pair_table: [nnz, 4] int64, from `build_alias_rows`.
        pair_prefix: [nnz + N] int64, from `build_alias_rows`.
        backoff: [N] float64 in [0, 1], the share of the unigram distribution.
        exclude: [B, P] int64, each row ascending, -1 first for "none"; or [nnz] with `exclude_offsets`.
        exclude_offsets: [B + 1] int64.

    Returns:
        ids [B, m] int64 and log_q [B, m] float32.

    Example:
        >>> import torch
        >>> from samplex_cuda.ops.bigram_sample import bigram_sample, build_alias_rows
        >>> from samplex_cuda.ops.static_sample import build_alias
        >>> offsets, pair_ids = torch.tensor([0, 1]), torch.tensor([2])  # context 0 is always followed by class 2
        >>> law = (*build_alias([1.0, 1.0, 1.0]), offsets, pair_ids, *build_alias_rows([5.0], offsets))
        >>> context, backoff = torch.tensor([0]), torch.zeros(1, dtype=torch.float64)
        >>> bigram_sample(torch.tensor([0, 0]), context, 3, *law, backoff)
        (tensor([[2, 2, 2]]), tensor([[0., 0., 0.]]))
    """
    return torch.ops.samplex.bigram_sample(
        key, context, num_samples, table, prefix, offsets, pair_ids, pair_table, pair_prefix, backoff, exclude,
        exclude_offsets,
    )  # fmt: skip


def bigram_log_prob(
    ids: Tensor,
    context: Tensor,
    table: Tensor,
    prefix: Tensor,
    offsets: Tensor,
    pair_ids: Tensor,
    pair_table: Tensor,
    pair_prefix: Tensor,
    backoff: Tensor,
    exclude: Tensor | None = None,
    exclude_offsets: Tensor | None = None,
) -> Tensor:
    """Log-probability [B, n] float32 of ids [B, n] int64 as drawn by `bigram_sample`; -inf for an excluded id.

    Example:
        >>> import torch
        >>> from samplex_cuda.ops.bigram_sample import bigram_log_prob, build_alias_rows
        >>> from samplex_cuda.ops.static_sample import build_alias
        >>> offsets, pair_ids = torch.tensor([0, 1]), torch.tensor([1])
        >>> law = (*build_alias([1.0, 1.0]), offsets, pair_ids, *build_alias_rows([5.0], offsets))
        >>> backoff = torch.tensor([0.5], dtype=torch.float64)
        >>> bigram_log_prob(torch.tensor([[0, 1]]), torch.tensor([0]), *law, backoff).exp()
        tensor([[0.2500, 0.7500]])
    """
    return torch.ops.samplex.bigram_log_prob(
        ids, context, table, prefix, offsets, pair_ids, pair_table, pair_prefix, backoff, exclude, exclude_offsets
    )


def build_alias_rows(weights: np.ndarray | list[float], offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Alias tables for each row of a CSR of weights, as `build_alias` makes one; on the CPU.

    Args:
        weights: [nnz] finite, not negative; those of a row that is not empty not all zero.
        offsets: [N + 1] int64.

    Returns:
        table [nnz, 4] int64 and prefix [nnz + N] int64, where the prefix sums of row c begin at offsets[c] + c.

    Example:
        >>> import torch
        >>> from samplex_cuda.ops.bigram_sample import build_alias_rows
        >>> table, prefix = build_alias_rows([1.0, 3.0, 2.0], torch.tensor([0, 2, 2, 3]))
        >>> table.shape, (prefix[:3] / prefix[2]).tolist(), int(prefix[3])
        (torch.Size([3, 4]), [0.0, 0.25, 1.0], 0)
    """
    array = np.ascontiguousarray(weights, dtype=np.float64)
    table = torch.empty((array.shape[0], 4), dtype=torch.int64, device="cpu")
    prefix = torch.empty(array.shape[0] + offsets.shape[0] - 1, dtype=torch.int64, device="cpu")
    _native.build_alias_rows(array, offsets.contiguous().numpy(), table.numpy(), prefix.numpy())
    return table, prefix


@register_fake("samplex::bigram_sample")
def _(
    key: Tensor,
    context: Tensor,
    num_samples: int,
    table: Tensor,
    prefix: Tensor,
    offsets: Tensor,
    pair_ids: Tensor,
    pair_table: Tensor,
    pair_prefix: Tensor,
    backoff: Tensor,
    exclude: Tensor | None = None,
    exclude_offsets: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    shape = (context.shape[0], num_samples)
    return key.new_empty(shape, dtype=torch.int64), key.new_empty(shape, dtype=torch.float32)


@register_fake("samplex::bigram_log_prob")
def _(
    ids: Tensor,
    context: Tensor,
    table: Tensor,
    prefix: Tensor,
    offsets: Tensor,
    pair_ids: Tensor,
    pair_table: Tensor,
    pair_prefix: Tensor,
    backoff: Tensor,
    exclude: Tensor | None = None,
    exclude_offsets: Tensor | None = None,
) -> Tensor:
    return ids.new_empty(ids.shape, dtype=torch.float32)
