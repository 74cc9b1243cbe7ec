"""Products with the class rows of one shard: `samplex::shard_logits` and `samplex::shard_hidden`.

Both take the entries of a whole batch and skip those whose rows another shard holds: no row is read for them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from samplex_cuda._library import register_fake
from samplex_cuda.ops.loss_types import acc_dtype

__all__ = ["shard_hidden", "shard_logits"]

_shard_hidden = torch.ops.samplex.shard_hidden.default
_shard_logits = torch.ops.samplex.shard_logits.default


def shard_logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ids: Tensor,
    num_classes: int,
    step: int = 1,
    start: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Products `h . w + b` of the classes that this shard holds, 0 for others.

    Class c is in slot (step * c) mod C; the shard holds the slots [start, start + n).

    Args:
        hidden: [B, d] like weight.
        weight: [n, d] float32, float64, float16 or bfloat16; the rows of the shard.
        bias: [n] or None.
        target: int64 [B, P] classes; outside [0, C): none.
        ids: int64 [B, m] classes.
        num_classes: C.
        step: coprime to C.
        start: first slot of the shard.

    Returns:
        The logits [B, P + m] float32 (float64 for float64), targets first, and the rows of the shard that targets
        [B, P] and draws [B, m] have, -1 where another shard has them.

    Example:
        >>> import torch
        >>> from samplex_cuda.ops.shard_rows import shard_logits
        >>> h, rows = torch.ones(1, 2), torch.tensor([[1.0, 2.0], [3.0, 4.0]])  # classes 2 and 3 of 6
        >>> shard_logits(h, rows, None, torch.tensor([[3]]), torch.tensor([[0, 2]]), 6, start=2)
        (tensor([[7., 0., 3.]]), tensor([[1]]), tensor([[-1,  0]]))
    """
    return _shard_logits(hidden, weight, bias, target, ids, num_classes, step, start)


def shard_hidden(weight: Tensor, target_coef: Tensor, id_coef: Tensor, target_rows: Tensor, id_rows: Tensor) -> Tensor:
    """What the rows of this shard add to the gradient of h: the sum over a row's entries of coefficient * row.

    Args:
        weight: [n, d]; the rows of the shard.
        target_coef: [B, P] float32 (float64 for float64).
        id_coef: [B, m] like target_coef.
        target_rows: int64 [B, P], from `shard_logits`; outside [0, n): skipped.
        id_rows: int64 [B, m].

    Returns:
        [B, d] like target_coef. An entry whose coefficient is 0 is skipped, too.

    Example:
        >>> import torch
        >>> from samplex_cuda.ops.shard_rows import shard_hidden
        >>> rows = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> one = torch.ones(1, 1)
        >>> shard_hidden(rows, -one, one.repeat(1, 2), torch.tensor([[1]]), torch.tensor([[-1, 0]]))
        tensor([[-2., -2.]])
    """
    return _shard_hidden(weight, target_coef, id_coef, target_rows, id_rows)


@register_fake("samplex::shard_logits")
def _(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ids: Tensor,
    num_classes: int,
    step: int,
    start: int,
) -> tuple[Tensor, Tensor, Tensor]:
    made = weight.new_empty((hidden.shape[0], target.shape[1] + ids.shape[1]), dtype=acc_dtype(weight.dtype))
    return made, torch.empty_like(target), torch.empty_like(ids)


@register_fake("samplex::shard_hidden")
def _(weight: Tensor, target_coef: Tensor, id_coef: Tensor, target_rows: Tensor, id_rows: Tensor) -> Tensor:
    return weight.new_empty((target_rows.shape[0], weight.shape[1]), dtype=acc_dtype(weight.dtype))
