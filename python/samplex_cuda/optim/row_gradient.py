"""`RowGradient`: the gradient of a class table as its touched rows, in a form that torch's own tools can work with.

A sparse COO gradient stops `torch.nn.utils.clip_grad_norm_` and with it most trainers. A `RowGradient` has the shape of
the table and holds the touched rows alone. Norms, scaling, clamping and the checks of a `GradScaler` run on these rows,
which gives what they would give on the dense gradient, because every other row is zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from samplex_cuda._checks import describe
from samplex_cuda.ops.row_gradients import restore_coalesced
from samplex_cuda.ops.row_reduce import row_reduce

__all__ = ["RowGradient", "keep_rows"]

_aten = torch.ops.aten
# A zero stays a zero and counts nothing: on the touched rows they give what they give on the whole table.
_IN_PLACE = {
    _aten.mul_.Tensor,
    _aten.mul_.Scalar,
    _aten.div_.Tensor,
    _aten.div_.Scalar,
    _aten._foreach_mul_.Scalar,
    _aten._foreach_mul_.Tensor,
    _aten._foreach_div_.Scalar,
    _aten._foreach_div_.Tensor,
    _aten._foreach_clamp_min_.Scalar,
    _aten._foreach_clamp_max_.Scalar,
    _aten._amp_foreach_non_finite_check_and_unscale_.default,
}
_NEW = {_aten.mul.Tensor, _aten.mul.Scalar, _aten.div.Tensor, _aten.div.Scalar, _aten._to_copy.default}
_NORMS = {_aten.linalg_vector_norm.default, _aten._foreach_norm.Scalar}


class _Rows:
    """What a gradient and its views share: parts (ids int64 [n], rows [n, ...]) whose sum it is."""

    def __init__(self, parts: list[tuple[Tensor, Tensor]], distinct: bool) -> None:
        self.parts, self.distinct = parts, distinct


class RowGradient(Tensor):
    """The gradient of a table [C, d] or [C], as rows.

    `sx.optim.Combined` makes them of the sparse gradients of its row tables. `clip_grad_norm_` and `clip_grad_value_`
    of `torch.nn.utils` and `torch.amp.GradScaler` work with them; the row optimizers take them. Another operation
    raises, with the name of `to_dense`.

    Args:
        ids: int64 [n], the touched rows.
        rows: [n, d] or [n], their gradients.
        size: of the table.
        distinct: whether no id occurs twice and the ids ascend; otherwise rows of one id are summed when needed.

    Example:
        >>> import torch
        >>> from samplex_cuda.optim import RowGradient
        >>> grad = RowGradient(torch.tensor([2, 2]), torch.tensor([[3.0], [1.0]]), (5, 1))
        >>> grad.norm(), grad.touched()[0]
        (tensor(4.), tensor([2]))
    """

    _held: _Rows

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls, ids: Tensor, rows: Tensor, size: torch.Size | tuple[int, ...], *, distinct: bool = False
    ) -> RowGradient:
        """A tensor of this shape without storage."""
        size = torch.Size(size)
        if ids.dtype != torch.int64 or ids.dim() != 1:
            raise ValueError(f"RowGradient: ids must be [n] int64, got {describe(ids)}")
        if rows.shape != (*ids.shape, *size[1:]) or len(size) not in (1, 2):
            raise ValueError(f"RowGradient: rows must be {[ids.shape[0], *size[1:]]}, got {describe(rows)}")
        return _view(_Rows([(ids, rows)], distinct), size, rows)

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def touched(self) -> tuple[Tensor, Tensor]:
        """The rows that are not zero, summed: ids int64 [n], ascending, and rows [n, d] or [n].

        Waits for the device where rows have to be summed: their number is read.

        Example:
            >>> import torch
            >>> from samplex_cuda.optim import RowGradient
            >>> RowGradient(torch.tensor([4, 2]), torch.tensor([1.0, 2.0]), (5,)).touched()
            (tensor([2, 4]), tensor([2., 1.]))
        """
        held = self._held
        if not held.distinct or len(held.parts) > 1:
            ids = torch.cat([ids for ids, _ in held.parts])
            rows = torch.cat([rows for _, rows in held.parts])
            flat = rows.reshape(ids.shape[0], -1).contiguous()
            found, summed, _, count = row_reduce(ids.unsqueeze(1), None, flat, self.shape[0])
            n = int(count)
            held.parts = [(found[:n], summed[:n].to(rows.dtype).reshape(n, *self.shape[1:]))]
            held.distinct = True
        return held.parts[0]

    def coo(self) -> Tensor:
        """The same as a coalesced sparse COO tensor.

        Example:
            >>> import torch
            >>> from samplex_cuda.optim import RowGradient
            >>> RowGradient(torch.tensor([2]), torch.tensor([1.0]), (3,)).coo().to_dense()
            tensor([0., 0., 1.])
        """
        ids, rows = self.touched()
        return torch.sparse_coo_tensor(ids.unsqueeze(0), rows, self.shape, is_coalesced=True, check_invariants=False)

    def to_dense(self, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
        """The same as a dense tensor: C rows.

        Args:
            dtype: of the result; by default that of the gradient.
        """
        return self.coo().to_dense() if dtype is None else self.coo().to_dense().to(dtype)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """Shape and number of rows."""
        return f"RowGradient({list(self.shape)}, rows={sum(ids.shape[0] for ids, _ in self._held.parts)})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles hold the touched rows."""
        return _remade, (*self.touched(), tuple(self.shape))

    def __deepcopy__(self, memo: dict[int, Any]) -> RowGradient:
        """A copy with rows of its own."""
        return self.clone()  # type: ignore[return-value]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """What torch does with a gradient, on the touched rows."""
        kwargs, first = kwargs or {}, args[0]
        if func in _NORMS:
            kind = args[1] if len(args) > 1 else kwargs.get("ord", 2)
            if float(kind) > 0 and not any(args[2:3]) and not kwargs.get("dim"):
                return func(_rows_of(first, nonempty=True), *args[1:], **kwargs)
        elif func in _IN_PLACE or (func is _aten.clamp_.default and _keeps_zero(*args[1:], **kwargs)):
            if not any(_is_table(t) for t in args[1:2]):
                func(_rows_of(first), *args[1:], **kwargs)
                return first if isinstance(first, Tensor) else None  # lists return nothing
        elif func in _NEW and isinstance(first, RowGradient) and not any(_is_table(t) for t in args[1:2]):
            ids, rows = first.touched()
            rows = func(rows, *args[1:], **kwargs)
            return RowGradient(ids.to(rows.device), rows, first.shape, distinct=True)
        elif func in (_aten.detach.default, _aten.alias.default):
            return _view(first._held, first.shape, first)
        elif func is _aten.clone.default:
            ids, rows = first.touched()
            return RowGradient(ids.clone(), rows.clone(), first.shape, distinct=True)
        elif func is _aten.zero_.default:
            ids, rows = first._held.parts[0]
            first._held.parts, first._held.distinct = [(ids[:0], rows[:0])], True
            return first
        elif func in (_aten.add_.Tensor, _aten.add.Tensor) and kwargs.get("alpha", 1) == 1:
            return _sum(first, args[1], in_place=func is _aten.add_.Tensor)
        raise NotImplementedError(
            f"RowGradient: the operation must be one that row gradients support, got {func}; use grad.touched(), "
            "grad.coo() or grad.to_dense()"
        )


def _view(held: _Rows, size: torch.Size, like: Tensor) -> RowGradient:
    made = Tensor._make_wrapper_subclass(RowGradient, size, dtype=like.dtype, device=like.device)
    made._held = held
    return made


def _remade(ids: Tensor, rows: Tensor, size: tuple[int, ...]) -> RowGradient:
    return RowGradient(ids, rows, size, distinct=True)


def _is_table(t: Any) -> bool:
    return isinstance(t, Tensor) and t.numel() != 1


def _keeps_zero(low: Any = None, high: Any = None, **named: Any) -> bool:
    low, high = named.get("min", low), named.get("max", high)
    return (low is None or low <= 0) and (high is None or high >= 0)


def _rows_of(given: Any, nonempty: bool = False) -> Any:
    """The touched rows in place of each gradient of rows; a zero where there are none and a norm is wanted."""
    if not isinstance(given, RowGradient):
        return [_rows_of(t, nonempty) for t in given] if isinstance(given, list | tuple) else given
    rows = given.touched()[1]
    return rows.new_zeros(1) if nonempty and rows.numel() == 0 else rows


def _sum(first: Tensor, second: Any, in_place: bool) -> RowGradient:
    parts: list[tuple[Tensor, Tensor]] = []
    for t in (first, second):
        if isinstance(t, RowGradient):
            parts += t._held.parts
        elif isinstance(t, Tensor) and t.is_sparse and t.sparse_dim() == 1:
            parts.append((t._indices().reshape(-1), t._values()))
        else:
            raise TypeError(
                f"RowGradient: an added gradient must be a row gradient or sparse, got {describe(t)}; pass "
                "sparse=True to an embedding that is tied to the class table"
            )
    if in_place and isinstance(first, RowGradient):
        first._held.parts, first._held.distinct = parts, False
        return first
    return _view(_Rows(parts, False), first.shape, first)


def keep_rows(p: Tensor, wanted: Callable[[], bool]) -> Any:
    """Has backward leave the sparse gradient of a parameter as a `RowGradient`.

    Args:
        p: a leaf [C, d] or [C].
        wanted: asked in every backward; False leaves the sparse gradient unchanged.

    Returns:
        A handle; `handle.remove()` undoes it.

    Example:
        >>> import torch
        >>> from samplex_cuda.optim.row_gradient import keep_rows
        >>> table = torch.zeros(5, 2, requires_grad=True)
        >>> handle = keep_rows(table, lambda: True)
        >>> torch.nn.functional.embedding(torch.tensor([3]), table, sparse=True).sum().backward()
        >>> table.grad
        RowGradient([5, 2], rows=1)
    """

    def convert(parameter: Tensor) -> None:
        grad = parameter.grad
        if grad is None or not grad.is_sparse or grad.sparse_dim() != 1 or not wanted():
            return
        restore_coalesced(parameter)
        ids, distinct = grad._indices().reshape(-1), grad.is_coalesced()
        parameter.grad = RowGradient(ids, grad._values(), grad.shape, distinct=distinct)

    return p.register_post_accumulate_grad_hook(convert)
