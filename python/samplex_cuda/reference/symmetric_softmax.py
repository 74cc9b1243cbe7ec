"""The symmetric softmax of a batch in plain torch: the readable specification, and the oracle of the tests."""

from __future__ import annotations

import torch
from torch import Tensor


def symmetric_softmax(
    dots: Tensor,
    labels: Tensor | None = None,
    known: tuple[Tensor, Tensor] | None = None,
    key_shift: Tensor | None = None,
    query_shift: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    """Each query against the keys and each key against the queries, half of each.

    Args:
        dots: [B, B] products of queries, in rows, and keys; key i belongs to query i.
        labels: int64 [B], what each key is: other pairs of the same label take no part.
        known: CSR pair (offsets [B + 1], ids [n]): labels that take no part in a row.
        key_shift: [B], added to the scores of a key as a negative.
        query_shift: [B], added to those of a query as a negative.
        scale: of the products.

    Returns:
        [B].

    Example:
        >>> import torch
        >>> from samplex_cuda.reference.symmetric_softmax import symmetric_softmax
        >>> symmetric_softmax(torch.zeros(2, 2)).exp()
        tensor([2., 2.])
    """
    scores = scale * dots
    own = torch.eye(dots.shape[0], dtype=torch.bool, device=dots.device)
    out = torch.zeros_like(own) if labels is None else labels[:, None] == labels
    if known is not None:
        assert labels is not None
        offsets, ids = known
        for b in range(dots.shape[0]):
            out[b] |= torch.isin(labels, ids[offsets[b] : offsets[b + 1]])
    rows = scores if key_shift is None else torch.where(own, scores, scores + key_shift)
    columns = scores if query_shift is None else torch.where(own, scores, scores + query_shift[:, None])
    by_row, by_column = (t.masked_fill(out & ~own, -torch.inf) for t in (rows, columns))
    return (by_row.logsumexp(1) + by_column.logsumexp(0)) / 2 - scores.diagonal()
