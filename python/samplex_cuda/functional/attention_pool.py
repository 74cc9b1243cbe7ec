"""Pooling of embedding rows by softmax attention with one query; public as `samplex_cuda.functional.attention_pool`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from samplex_cuda._checks import FLOATS, check_dense, check_tensor, describe, op_error
from samplex_cuda.ops.attention_pool import attention_pool as _attention_pool
from samplex_cuda.ops.loss_types import acc_dtype

__all__ = ["attention_pool"]

_OP = "attention_pool"


def _check(ids: Tensor, embedding: Tensor, p: Tensor, v: Tensor, mask: Tensor | None) -> None:
    for name, t in (("ids", ids), ("embedding", embedding), ("p", p), ("v", v)):
        check_tensor(_OP, name, t, {"ids": "[*, T] int64", "embedding": "[S, d]"}.get(name, "[d]"))
    if embedding.dim() != 2 or embedding.dtype not in FLOATS:
        raise ValueError(
            f"{_OP}: embedding must be [S, d] float32, float64, float16 or bfloat16, got {describe(embedding)}"
        )
    device, acc = embedding.device, acc_dtype(embedding.dtype)
    if ids.dtype != torch.int64:
        raise TypeError(f"{_OP}: ids must be int64, got {describe(ids)}")
    if ids.dim() == 0 or ids.device != device:
        raise ValueError(f"{_OP}: ids must be [*, T] on {device} like embedding, got {describe(ids)}")
    for name, t in (("p", p), ("v", v)):
        if t.shape != embedding.shape[1:] or t.device != device:
            raise ValueError(
                f"{_OP}: {name} must be [{embedding.shape[1]}] on {device} to fit embedding, got {describe(t)}"
            )
        if t.dtype not in (embedding.dtype, acc) and not (
            t.dtype in FLOATS and torch.is_autocast_enabled(device.type) and embedding.dtype != torch.float64
        ):
            raise TypeError(f"{_OP}: {name} must be {embedding.dtype} like embedding, or {acc}, got {describe(t)}")
    if mask is not None:
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            raise TypeError(f"{_OP}: mask must be a bool tensor of the shape of ids, got {describe(mask)}")
        check_dense(_OP, "mask", mask)
        if mask.shape != ids.shape or mask.device != device:
            raise ValueError(f"{_OP}: mask must be {list(ids.shape)} on {device} like ids, got {describe(mask)}")


def attention_pool(
    ids: Tensor, embedding: Tensor, p: Tensor, v: Tensor, *, mask: Tensor | None = None, sparse: bool = True
) -> Tensor:
    r"""One number from each sequence of tokens: attention with a learned query over their embedding rows.

    With scores :math:`a_i = E_{x_i} \cdot p` and values :math:`g_i = E_{x_i} \cdot v` of the tokens of a sequence,

    .. math::
        f = \sum_i q_i g_i, \qquad q = \text{softmax}(a)

    the one-layer model of Wu et al. 2025 (Eq. 1). One pass over the gathered rows: no [B, T, d] and no [S, d] tensor
    is made, forward or backward. The gradient of `embedding` is a coalesced sparse COO tensor of the touched rows.

    The gradient with respect to a score is taken as :math:`\sum_j q_i q_j (g_i - g_j)` in its stable form: it keeps its
    relative precision where one token has nearly all the mass. Eager torch computes :math:`q_i (g_i - f)`, which is
    rounding noise there: beyond score differences of 16 (float32) or 36 (float64) it has no correct digit.

    Args:
        ids: int64 [*, T] rows of `embedding`. An id of -1 or -100 is padding and is ignored.
        embedding: E, [S, d] in float32, float64, float16 or bfloat16; sums run in float32 (float64 for float64).
        p: query [d], in the dtype of `embedding` or float32.
        v: value vector [d], the same.
        mask: bool [*, T], True where a token is used; padding on top of that in `ids`.
        sparse: False gives a dense gradient of `embedding`, which costs O(S d).

    Returns:
        [*] in float32 (float64 for float64). A sequence of padding alone gives 0 and no gradient; one that meets nan or
        inf in a row gives nan, and no other sequence does.

    Example:
        >>> import torch, samplex_cuda as sx
        >>> embedding = torch.randn(1000, 16, requires_grad=True)
        >>> p, v = torch.randn(16, requires_grad=True), torch.randn(16)
        >>> ids = torch.tensor([[5, 7, 9], [5, 11, -1]])
        >>> sx.functional.attention_pool(ids, embedding, p, v).sum().backward()
        >>> embedding.grad.coalesce().indices().tolist(), p.grad.shape
        ([[5, 7, 9, 11]], torch.Size([16]))
    """
    _check(ids, embedding, p, v, mask)
    acc = acc_dtype(embedding.dtype)
    lead, length = ids.shape[:-1], ids.shape[-1]
    if mask is not None:
        ids = torch.where(mask, ids, -1)
    flat = ids.reshape(math.prod(lead), length).contiguous()
    table, query, value = embedding.contiguous(), p.to(acc).contiguous(), v.to(acc).contiguous()
    if torch.compiler.is_compiling():
        return _attention_pool(flat, table, query, value, sparse=sparse).reshape(lead)
    try:
        return _attention_pool(flat, table, query, value, sparse=sparse).reshape(lead)
    except RuntimeError as error:
        raise op_error(error) from None
