"""The gradient of a class table: before it is summed by class, as rows summed by class, as a tensor for autograd."""

from __future__ import annotations

import threading
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from samplex_cuda._library import register_fake
from samplex_cuda.ops.loss_types import ENTRY_KINDS, Entries, LossGrad, Table, acc_dtype
from samplex_cuda.ops.saved_loss import fake_sizes
from samplex_cuda.ops.sphere import project_rows_

__all__ = [
    "RowGradients",
    "RowSink",
    "TableGradient",
    "entries",
    "loss_update_",
    "restore_coalesced",
    "row_gradients",
    "rows_to_coo",
]

_below_autograd = torch._C._AutoDispatchBelowAutograd
_rows_op = torch.ops.samplex.sampled_softmax_bwd.default
_rows_with_ratio_op = torch.ops.samplex.entry_loss_bwd.default
_entries_op = torch.ops.samplex.loss_entries.default._op  # eager only: past a call in Python
_RATIO_KIND = ENTRY_KINDS["augment_reduce"]


class RowGradients(NamedTuple):
    """Gradients summed by class, of a fixed size: no host synchronization until the rows are counted."""

    d_hidden: Tensor  # [B, d]
    row_ids: Tensor  # int64 [n], the first `number` ascending and distinct
    row_grads: Tensor  # [n, d]
    row_bias: Tensor  # [n] or [0]
    number: Tensor  # int64 [1], how many of the n rows are used


def row_gradients(g: LossGrad, need_rows: bool, with_bias: bool) -> RowGradients:
    """The gradients of a loss with its weight gradient summed by class."""
    p = g.plan
    tensors = (g.hidden, g.target, g.ids, g.saved)
    if p.with_ratio:
        found = _rows_with_ratio_op(
            g.grad_loss, *tensors, _RATIO_KIND, p.num_classes, p.reduction, need_rows, with_bias
        )
    else:
        found = _rows_op(
            g.grad_loss, g.grad_lse, *tensors, p.num_classes, p.reduction, p.with_lse, need_rows, with_bias
        )
    return RowGradients(*found)


def entries(
    g: LossGrad,
    with_bias: bool,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    with_keys: bool = False,
) -> tuple[Tensor, Entries]:
    """The gradient of hidden, and the weight gradient before it is summed by class.

    Args:
        g: of the loss.
        with_bias: whether there is a bias to update.
        grad_scale: fp32 [], divides the weight gradient; that of hidden stays scaled.
        found_inf: fp32 [], becomes 1 where the weight gradient holds an inf or nan, or numbers near it.
        with_keys: whether these entries make an update by themselves: a GPU then makes its sort keys here.
    """
    p = g.plan
    with _below_autograd():
        d_hidden, coef_a, coef_b, rows_b, bias_b, keys = _entries_op(
            g.grad_loss, g.grad_lse, g.hidden, g.target, g.ids, g.saved, p.reduction, p.with_lse, with_bias,
            p.with_ratio, grad_scale, found_inf, p.num_classes if with_keys else None,
        )  # fmt: skip
    keys = keys if keys.shape[0] > 0 else None  # none on a CPU
    if g.ids.dim() == 2:
        return d_hidden, Entries(g.target, coef_a, g.hidden, g.ids, coef_b, g.hidden, None, keys)
    ids_b = g.ids if rows_b.shape[0] == g.ids.shape[0] else g.ids[:0]  # no rows of an empty batch
    return d_hidden, Entries(g.target, coef_a, g.hidden, ids_b, coef_b, rows_b, bias_b if with_bias else None, keys)


@register_fake("samplex::loss_entries")
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
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    num_classes: int | None = None,
) -> tuple[Tensor, ...]:
    batch, dim = fake_sizes("loss_entries", hidden)
    shared, m = ids.dim() == 1, ids.shape[-1]
    targets = 1 if target.dim() == 1 else target.shape[1]
    summed = m if shared and batch > 0 else 0
    acc = acc_dtype(hidden.dtype)
    # Only the kernels know how long the keys are; without num_classes the tensor is empty.
    keys = 0 if num_classes is None else torch.library.get_ctx().new_dynamic_size()
    wide = num_classes is not None and num_classes > torch.iinfo(torch.int32).max
    return (
        torch.empty_like(hidden),
        hidden.new_empty((batch, targets), dtype=acc),
        hidden.new_empty((summed, 1) if shared else (batch, m), dtype=acc),
        hidden.new_empty((summed, dim), dtype=acc),
        hidden.new_empty((summed if with_bias else 0,), dtype=acc),
        hidden.new_empty((keys,), dtype=torch.int64 if wide else torch.int32),
    )


@register_fake("samplex::loss_update_")
def _(weight: Tensor, *rest: object) -> None:
    return None


loss_update_ = torch.ops.samplex.loss_update_.default._op  # eager only: past a call in Python


def rows_to_coo(
    row_ids: Tensor, rows: Tensor, count: Tensor, size: tuple[int, ...], dtype: torch.dtype | None
) -> Tensor:
    """Fixed-size row gradients as a coalesced sparse COO tensor. The only part of a backward that waits for the device.

    Args:
        row_ids: int64 [n], the first `count` ascending and distinct.
        rows: [n, ...], one gradient row each.
        count: int64 [1].
        size: shape of the whole (dense) gradient.
        dtype: of the result.

    Example:
        >>> import torch
        >>> from samplex_cuda.ops.row_gradients import rows_to_coo
        >>> ids, rows = torch.tensor([1, 4, -1]), torch.tensor([[1.0], [2.0], [0.0]])
        >>> rows_to_coo(ids, rows, torch.tensor([2]), (6, 1), torch.float32).to_dense().flatten().tolist()
        [0.0, 1.0, 0.0, 0.0, 2.0, 0.0]
    """
    n: Any = count.item()
    if torch.compiler.is_compiling():
        torch._check(n >= 0)
        torch._check(n <= row_ids.shape[0])
        indices = row_ids[:n].unsqueeze(0)
    else:
        indices = row_ids.as_strided((1, n), (n, 1))  # one call
    values = rows[:n] if dtype is rows.dtype else rows[:n].to(dtype)
    return torch.sparse_coo_tensor(indices, values, size, check_invariants=False, is_coalesced=True)


def _rows_to_dense(
    row_ids: Tensor, rows: Tensor, count: Tensor, size: tuple[int, ...], dtype: torch.dtype | None
) -> Tensor:
    # Rows past `count` have id -1 and unspecified values; all of them go to one extra row that is cut off.
    dense = rows.new_zeros((size[0] + 1, *size[1:]))
    dense.index_copy_(0, torch.where(row_ids < 0, size[0], row_ids), rows)
    return dense[: size[0]].to(dtype)


class _CoalescedFlag:
    """Restores the coalesced flag of a parameter's gradient.

    Autograd's accumulation makes a shallow copy of a sparse gradient and drops the flag, so every optimizer would sort
    and sum the rows again. This hook runs after the accumulation and sets the flag again, if the gradient still has the
    very indices that the sink delivered: a sum of two gradients has others, and is left alone. Backwards may run in
    several threads, so what was delivered is kept by the number of the backward.
    """

    def __init__(self) -> None:
        self.indices: dict[int, Tensor] = {}

    def deliver(self, indices: Tensor) -> None:
        """Remembers the indices of a gradient until autograd has accumulated it."""
        if len(self.indices) >= _MOST_BACKWARDS:  # those of backwards that never accumulate (torch.autograd.grad)
            for task in list(self.indices)[: -_MOST_BACKWARDS // 2]:
                self.indices.pop(task, None)
        self.indices[_task_id()] = indices

    def __call__(self, parameter: Tensor) -> None:
        given = self.indices.pop(_task_id(), None)
        grad = parameter.grad
        if given is None or grad is None or not grad.is_sparse or grad.is_coalesced():
            return
        if grad._indices().is_set_to(given):
            grad._coalesced_(True)


_MOST_BACKWARDS = 16  # at a time that keep the flag
_task_id = torch._C._current_graph_task_id
_flags: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # parameter -> its _CoalescedFlag
_flags_lock = threading.Lock()


def restore_coalesced(parameter: Tensor) -> None:
    """Restores the coalesced flag of a gradient now, for a hook that may run before the one that does it."""
    flag = _flags.get(parameter) if _flags.data else None
    if flag is not None:
        flag(parameter)


class TableGradient:
    """The gradient of one table from its row gradients: a coalesced COO tensor, or a dense one at O(C d).

    Args:
        sparse: which of the two.
        parameter: the leaf whose gradient keeps its coalesced flag; None if autograd is traced.
    """

    def __init__(self, sparse: bool, parameter: Tensor | None = None) -> None:
        self.sparse = sparse
        self.flag: _CoalescedFlag | None = None
        if sparse and parameter is not None and parameter.requires_grad and parameter.is_leaf:
            self.flag = _flags.get(parameter)
            if self.flag is None:
                with _flags_lock:  # a second hook, registered while the first runs, would break another's backward
                    self.flag = _flags.get(parameter)
                    if self.flag is None:
                        self.flag = _CoalescedFlag()
                        parameter.register_post_accumulate_grad_hook(self.flag)
                        _flags[parameter] = self.flag

    def __call__(
        self, row_ids: Tensor, rows: Tensor, count: Tensor, size: tuple[int, ...], dtype: torch.dtype | None
    ) -> Tensor:
        """Arguments as in `rows_to_coo`."""
        if not self.sparse:
            return _rows_to_dense(row_ids, rows, count, size, dtype)
        made = rows_to_coo(row_ids, rows, count, size, dtype)
        if self.flag is not None:
            self.flag.deliver(made._indices())
        return made


class RowSink:
    """Gives autograd the weight gradient as a coalesced COO tensor (`sparse`), or as a dense one at O(C d).

    Args:
        sparse: which of the two.
        weight: whose gradient keeps its coalesced flag; None if autograd is traced.
        bias: the same.
    """

    at_once = False

    def __init__(self, sparse: bool, weight: Tensor | None = None, bias: Tensor | None = None) -> None:
        self.sparse = sparse
        self.weight, self.bias = TableGradient(sparse, weight), TableGradient(sparse, bias)
        self._of = tuple(None if t is None else weakref.ref(t) for t in (weight, bias))

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy belongs to other parameters: it is made again."""
        return type(None), ()

    def serves(self, weight: Tensor, bias: Tensor | None) -> bool:
        """Whether the sink was made for these tensors, with the gradients they need now."""
        of_weight, of_bias = self._of
        if of_weight is None or of_weight() is not weight or (bias is None) != (of_bias is None):
            return False
        return of_bias is None or of_bias() is bias

    def deliver(
        self, grad: LossGrad, need: tuple[bool, bool, bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """See `Sink.deliver`."""
        need_hidden, need_weight, need_bias = need
        p = grad.plan
        rows = row_gradients(grad, need_weight or need_bias, need_bias)
        if p.normalize and need_weight:
            assert grad.weight is not None
            project_rows_(rows.row_grads, rows.row_ids, grad.weight)
        table = Table((p.num_classes, grad.hidden.shape[1]), p.weight_dtype, p.bias_dtype, grad.version)
        made = self._tables(rows.row_ids, rows.row_grads, rows.row_bias, rows.number, table, (need_weight, need_bias))
        return (rows.d_hidden if need_hidden else None, *made)

    def deliver_entries(
        self, found: Entries, table: Table, need: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        """See `TableSink.deliver_entries`."""
        row_ids, row_grads, row_bias, number = torch.ops.samplex.row_reduce(
            found.ids_a, found.coef_a, found.rows_a, found.ids_b, found.coef_b, found.rows_b, table.size[0], need[1],
            found.bias_b,
        )  # fmt: skip
        if table.on_sphere is not None:
            project_rows_(row_grads, row_ids, table.on_sphere)
        return self._tables(row_ids, row_grads, row_bias, number, table, need)

    def deliver_rows(
        self, ids: Tensor, rows: Tensor, of_bias: Tensor, table: Table, need: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        """See `TableSink.deliver_rows`."""
        return self._tables(ids, rows, of_bias, torch.tensor([ids.shape[0]]), table, need)

    def _tables(
        self,
        row_ids: Tensor,
        row_grads: Tensor,
        row_bias: Tensor,
        number: Tensor,
        table: Table,
        need: tuple[bool, bool],
    ) -> tuple[Tensor | None, Tensor | None]:
        """Gradients of weight and bias from rows summed by class, see `RowGradients`."""
        d_weight = d_bias = None
        if need[0]:
            d_weight = self.weight(row_ids, row_grads, number, table.size, table.weight_dtype)
        if need[1]:
            d_bias = self.bias(row_ids, row_bias, number, table.size[:1], table.bias_dtype)
        return d_weight, d_bias
