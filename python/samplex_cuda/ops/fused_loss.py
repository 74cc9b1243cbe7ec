"""What fused losses share in Python: how row gradients reach autograd as coalesced sparse (or dense) tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from samplex_cuda import _library  # noqa: F401  registers the op

__all__ = [
    "REDUCTIONS",
    "LossPlan",
    "acc_dtype",
    "deliver",
    "fake_gradients",
    "fusion_of",
    "keep_coalesced",
    "loss_entries",
    "loss_gradients",
    "rows_to_coo",
]

REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}

# Row ids of the last gradients made here. Holding them keeps their memory from being used again, so that a gradient
# whose indices lie at the same address is one of ours. A few, for weight and bias of a few heads.
_delivered: deque[Tensor] = deque(maxlen=8)


def _mark_coalesced(parameter: Tensor) -> None:
    grad = parameter.grad
    if grad is None or not grad.is_sparse or grad.is_coalesced():
        return
    address = grad._indices().data_ptr()
    if any(address == row_ids.data_ptr() and grad._nnz() <= row_ids.numel() for row_ids in _delivered):
        grad._coalesced_(True)


def keep_coalesced(parameter: Tensor) -> None:
    """Let `parameter.grad` say that it is coalesced when it is.

    Autograd's accumulation makes a shallow copy of a sparse gradient and forgets the flag on the way, so every
    optimizer would sort and sum the rows once more. A hook after the accumulation puts the flag back, where the
    gradient is one of ours alone; a sum of two gradients is left as it is. Registered once per parameter; what is not a
    leaf, or needs no gradient, is left alone.

    Example:
        >>> import torch
        >>> from samplex_cuda.ops.fused_loss import keep_coalesced
        >>> keep_coalesced(torch.zeros(3, 2, requires_grad=True))
    """
    if getattr(parameter, "_samplex_keeps_coalesced", False):
        return
    if parameter.is_leaf and parameter.requires_grad:
        parameter.register_post_accumulate_grad_hook(_mark_coalesced)
        parameter._samplex_keeps_coalesced = True  # type: ignore[attr-defined]


def acc_dtype(dtype: torch.dtype) -> torch.dtype:
    """Sums of this storage type run in float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@torch.library.register_fake("samplex::loss_entries")
def _(
    grad_loss: Tensor,
    grad_lse: Tensor | None,
    hidden: Tensor,
    target: Tensor,
    ids: Tensor,
    saved: Tensor,
    reduction: int,
    with_lse: bool,
    with_bias: bool,
    with_ratio: bool = False,
) -> tuple[Tensor, ...]:
    batch, dim = hidden.shape
    shared, m = ids.dim() == 1, ids.shape[-1]
    targets = 1 if target.dim() == 1 else target.shape[1]
    summed = m if shared and batch > 0 else 0
    acc = acc_dtype(hidden.dtype)
    return (
        torch.empty_like(hidden),
        hidden.new_empty((batch, targets), dtype=acc),
        hidden.new_empty((0 if shared else batch, m), dtype=acc),
        hidden.new_empty((summed, dim), dtype=acc),
        hidden.new_empty((summed if with_bias else 0,), dtype=acc),
    )


loss_entries = torch.ops.samplex.loss_entries.default


def rows_to_coo(
    row_ids: Tensor, rows: Tensor, count: Tensor, size: tuple[int, ...], dtype: torch.dtype | None
) -> Tensor:
    """Fixed-size row gradients as a coalesced sparse COO tensor. The only step of a backward that waits for the device.

    Args:
        row_ids: int64 [n], the first `count` ascending and distinct.
        rows: [n, ...], one gradient row each.
        count: int64 [1].
        size: shape of the whole (dense) gradient.
        dtype: of the result.

    Example:
        >>> import torch
        >>> from samplex_cuda.ops.fused_loss import rows_to_coo
        >>> ids, rows = torch.tensor([1, 4, -1]), torch.tensor([[1.0], [2.0], [0.0]])
        >>> rows_to_coo(ids, rows, torch.tensor([2]), (6, 1), torch.float32).to_dense().flatten().tolist()
        [0.0, 1.0, 0.0, 0.0, 2.0, 0.0]
    """
    n = count.item()
    if torch.compiler.is_compiling():
        torch._check(n >= 0)
        torch._check(n <= row_ids.shape[0])
    else:
        _delivered.append(row_ids)
    values = rows[:n]
    if dtype is not rows.dtype:
        values = values.to(dtype)
    return torch.sparse_coo_tensor(row_ids[:n].unsqueeze(0), values, size, check_invariants=False, is_coalesced=True)


def _rows_to_dense(
    row_ids: Tensor, rows: Tensor, count: Tensor, size: tuple[int, ...], dtype: torch.dtype | None
) -> Tensor:
    # Rows behind `count` carry id -1 and unspecified numbers; they all go to one row that is cut off.
    dense = rows.new_zeros((size[0] + 1, *size[1:]))
    dense.index_copy_(0, torch.where(row_ids < 0, size[0], row_ids), rows)
    return dense[: size[0]].to(dtype)


class LossPlan(NamedTuple):
    """What a backward needs to know besides tensors."""

    op: str
    weight_shape: torch.Size
    weight_dtype: torch.dtype
    bias_dtype: torch.dtype | None
    reduction: int
    need_grad: bool
    sparse: bool
    fusion: Any = None  # `samplex_cuda.fusion.Fusion` of the weight, which updates it inside backward
    version: int = 0  # of the weight in the forward, with `fusion`

    def check(self) -> None:
        """Stops a backward that cannot be had."""
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(f"{self.op}: double backward (create_graph=True) is not supported")
        if not self.need_grad:
            raise RuntimeError(f"{self.op}: backward needs need_grad=True in the forward call, got False")


def fusion_of(weight: Tensor) -> tuple[Any, int]:
    """The last two fields of a `LossPlan`: the optimizer fused to this weight, or None, and the weight's version."""
    return getattr(weight, "_samplex_fusion", None), weight._version


def loss_gradients(
    plan: LossPlan,
    need: tuple[bool, bool, bool],
    tensors: tuple[Tensor, ...],
    grad_loss: Tensor,
    run: Callable[[bool, bool], tuple[Tensor, ...]],
    *,
    with_lse: bool = False,
    grad_lse: Tensor | None = None,
    with_ratio: bool = False,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of hidden, weight and bias, as far as `need` says: the backward of every fused loss.

    Args:
        plan: what the forward was.
        need: whether hidden, weight and bias need a gradient.
        tensors: hidden, target, ids and saved.
        grad_loss: upstream gradient, contiguous.
        run: the loss's own backward op, called with (need_rows, with_bias).
        with_lse: whether the forward kept the parts of a second output.
        grad_lse: its upstream gradient, contiguous.
        with_ratio: whether the forward kept the ratio of each row.
    """
    plan.check()
    if plan.fusion is not None and need[1]:
        d_hidden = plan.fusion.take(plan.version, plan.reduction, tensors, with_lse, grad_loss, grad_lse, with_ratio)
        return d_hidden if need[0] else None, None, None
    return deliver(plan, need, run(need[1] or need[2], need[2]))


def deliver(
    plan: LossPlan, need: tuple[bool, bool, bool], gradients: tuple[Tensor, ...]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of hidden, weight and bias, as far as `need` says, from the outputs of a loss's backward op.

    Args:
        plan: shapes, dtypes and the form asked for.
        need: whether hidden, weight and bias need a gradient.
        gradients: d_hidden [B, d], row_ids [n], row_grads [n, d], row_bias [n] or [0], count [1].
    """
    d_hidden, row_ids, row_grads, row_bias, count = gradients
    need_hidden, need_weight, need_bias = need
    form = rows_to_coo if plan.sparse else _rows_to_dense
    return (
        d_hidden if need_hidden else None,
        form(row_ids, row_grads, count, plan.weight_shape, plan.weight_dtype) if need_weight else None,
        form(row_ids, row_bias, count, plan.weight_shape[:1], plan.bias_dtype) if need_bias else None,
    )


def fake_gradients(
    hidden: Tensor, target: Tensor, ids: Tensor, num_classes: int, need_rows: bool, with_bias: bool
) -> tuple[Tensor, ...]:
    """Empty tensors of the shapes a loss's backward op gives."""
    acc = acc_dtype(hidden.dtype)
    entries = target.numel() + ids.numel()
    capacity = torch.sym_min(entries, num_classes) if need_rows else 0
    return (
        torch.empty_like(hidden),
        hidden.new_empty((capacity,), dtype=torch.int64),
        hidden.new_empty((capacity, hidden.shape[1]), dtype=acc),
        hidden.new_empty((capacity if with_bias else 0,), dtype=acc),
        hidden.new_empty((1,), dtype=torch.int64),
    )
