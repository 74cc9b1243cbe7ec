"""In-batch contrastive loss of a small batch on a CPU: three products with [B, B] scores, and little else.

Where the scores fit in a cache nothing is gained by computing them in blocks, and a step is as long as its products
and the calls around them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["MOST_SCORES", "small_batch_loss"]

MOST_SCORES = 1 << 17  # [B, B] of a batch that counts as small: half a megabyte


_LARGE = 60.0  # loss of a row up to which the softmax itself has its digits in float32


class _SmallBatch(torch.autograd.Function):
    """`queries` [B, d] against `keys` [B, d]; row i is the key of query i."""

    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        keys: Tensor,
        shift: Tensor | None,
        labels: Tensor | None,
        scale: float,
        reduction: str,
    ) -> Tensor:
        scores = queries.new_empty((queries.shape[0], queries.shape[0]))
        torch.addmm(scores, queries, keys.t(), beta=0, alpha=scale, out=scores)
        own = scores.diagonal()
        if shift is not None or labels is not None:
            kept = own.clone()
            if shift is not None:
                scores.sub_(shift)
            if labels is not None:
                scores.masked_fill_(labels[:, None] == labels, -torch.inf)
            own.copy_(kept)
        p = scores.softmax(1)
        rows = p.diagonal().log().neg_()
        if not float(rows.max()) < _LARGE:  # a probability that underflows, or nan
            rows = scores.log_softmax(1).diagonal().neg()
        p.diagonal().sub_(1.0)
        ctx.save_for_backward(queries, keys, p)
        ctx.scale, ctx.reduction = scale, reduction
        return rows if reduction == "none" else rows.mean() if reduction == "mean" else rows.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError("contrastive: double backward (create_graph=True) is not supported")
        queries, keys, p = ctx.saved_tensors
        factor = ctx.scale
        if ctx.reduction == "none":
            p = p * grad[:, None]
        else:
            factor *= float(grad) / (p.shape[0] if ctx.reduction == "mean" else 1)
        d_queries = d_keys = None
        if ctx.needs_input_grad[0]:
            d_queries = torch.empty_like(queries)
            torch.addmm(d_queries, p, keys, beta=0, alpha=factor, out=d_queries)
        if ctx.needs_input_grad[1]:
            d_keys = torch.empty_like(keys)
            torch.addmm(d_keys, p.t(), queries, beta=0, alpha=factor, out=d_keys)
        return d_queries, d_keys, None, None, None, None


def small_batch_loss(
    queries: Tensor,
    keys: Tensor,
    shift: Tensor | None,
    labels: Tensor | None,
    scale: float,
    reduction: str,
) -> Tensor:
    """The loss of each query against its own key and all others of the batch.

    Args:
        queries: [B, d] float32 or float64 on a CPU.
        keys: [B, d].
        shift: [B], taken from the scores of negatives; None: nothing.
        labels: int64 [B]; a key with the label of the query's own is not a negative.
        scale: multiplies the scores.
        reduction: "mean", "sum" or "none".
    """
    found: Tensor = _SmallBatch.apply(queries, keys, shift, labels, scale, reduction)
    return found
