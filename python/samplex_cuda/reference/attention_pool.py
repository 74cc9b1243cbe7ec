"""Attention pooling in plain torch: the readable specification, and the oracle of the tests. Materialises [B, T, d]."""

from __future__ import annotations

import torch
from torch import Tensor


def attention_pool(ids: Tensor, table: Tensor, query: Tensor, value: Tensor) -> Tensor:
    """f_b = sum_i q_i (E_i . v) with q = softmax(E p) over the tokens of row b that are not padding.

    Args:
        ids: int64 [B, T]; a negative id is padding.
        table: [S, d].
        query: p [d].
        value: v [d].

    Returns:
        [B]; 0 for a row of padding alone.

    Example:
        >>> import torch
        >>> from samplex_cuda.reference.attention_pool import attention_pool
        >>> table = torch.tensor([[0.0, 2.0], [0.0, 4.0]])
        >>> attention_pool(torch.tensor([[0, 1], [1, -1]]), table, torch.zeros(2), torch.tensor([0.0, 1.0])).tolist()
        [3.0, 4.0]
    """
    padding = ids < 0
    # Padding must not meet a row: 0 * nan would be nan.
    rows = table.new_zeros((*ids.shape, table.shape[1])).masked_scatter(
        ~padding.unsqueeze(2).expand(*ids.shape, table.shape[1]), table[ids[~padding]]
    )
    scores, values = rows @ query, rows @ value
    empty = padding.all(1)
    scores = scores.masked_fill(padding, float("-inf")).masked_fill(empty.unsqueeze(1), 0.0)
    pooled = (scores.softmax(1) * values).sum(1) if ids.shape[1] else scores.sum(1)
    return torch.where(empty, 0.0, pooled)


def attention_pool_coefficients(ids: Tensor, table: Tensor, query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """d f / d (E_i . v) and d f / d (E_i . p) of every token, the second as the sum over pairs of Lemma A.2.

    Args:
        ids: int64 [B, T] without padding.
        table: [S, d].
        query: p [d].
        value: v [d].

    Returns:
        q [B, T], and sum_j q_i q_j (g_i - g_j) [B, T].

    Example:
        >>> import torch
        >>> from samplex_cuda.reference.attention_pool import attention_pool_coefficients
        >>> q, c = attention_pool_coefficients(torch.tensor([[0, 1]]), torch.eye(2), torch.zeros(2), torch.ones(2))
        >>> q.tolist(), c.tolist()
        ([[0.5, 0.5]], [[0.0, 0.0]])
    """
    rows = table[ids]
    q, g = (rows @ query).softmax(1), rows @ value
    pairs = q.unsqueeze(2) * q.unsqueeze(1) * (g.unsqueeze(2) - g.unsqueeze(1))
    return q, pairs.sum(2)
