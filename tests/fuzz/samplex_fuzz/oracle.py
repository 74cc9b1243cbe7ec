"""What the oracles share: shapes, ordinary values, comparisons against float64, the contract of a draw."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from samplex_cuda.testing import assert_close, max_error
from samplex_fuzz.call import Dice

LARGEST = 300.0  # an ordinary value is at most this; beyond, a comparison says nothing in half precision
MANY = 4096  # classes up to which the reference, O(C), is asked


def acc(dtype: torch.dtype) -> torch.dtype:
    """The dtype sums run in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def expect(ok: bool, text: str) -> None:
    """AssertionError with `text` unless ok."""
    if not ok:
        raise AssertionError(text)


def has_form(name: str, t: Any, shape: Any, dtype: torch.dtype) -> None:
    """`t` is a tensor of this shape and dtype."""
    expect(isinstance(t, Tensor), f"{name} must be a tensor, got {type(t).__name__}")
    expect(tuple(t.shape) == tuple(shape), f"{name} must have shape {list(shape)}, got {list(t.shape)}")
    expect(t.dtype == dtype, f"{name} must be {dtype}, got {t.dtype}")


def is_meta(*values: Any) -> bool:
    """Whether one of the values is a meta tensor."""
    return any(isinstance(v, Tensor) and v.is_meta for v in values)


def ordinary(t: Tensor | None) -> Tensor:
    """Which elements are finite and of usual size."""
    if t is None:
        return torch.ones(())
    x = t.detach()
    return x.isfinite() & (x.abs() <= LARGEST) & ((x == 0) | (x.abs() >= 1e-20))


def all_ordinary(*values: Any) -> bool:
    """Whether every float tensor and float among the values is ordinary."""
    for v in values:
        if isinstance(v, Tensor) and v.is_floating_point() and not bool(ordinary(v).all()):
            return False
        if isinstance(v, float) and not (abs(v) <= 10.0 and (v == 0 or abs(v) > 1e-3)):
            return False
        if isinstance(v, int) and abs(v) >= 2**53:  # torch takes it for a float argument
            return False
    return True


def close(
    name: str, got: Tensor, want: Tensor, same: Tensor, magnitude: float = 0.0, rows: Tensor | None = None
) -> None:
    """`got` within the error budget of the float64 `want`; `rows` says which rows count."""
    if rows is not None:
        got, want, same = got[rows], want[rows], same[rows]
    assert_close(name, got.detach(), want.detach(), same.detach().to(got.dtype), magnitude=magnitude, ulps=8.0)


def near(name: str, got: Tensor, want: Tensor, tolerance: float) -> None:
    """Absolute error; nan meets nan, inf the same inf."""
    error = max_error(got, want.to(got.device))
    expect(error <= tolerance, f"{name}: error {error:.3g} against the reference is over {tolerance:.3g}")


def drawn(ids: Tensor, log_q: Tensor | None, shape: Any, classes: int) -> None:
    """The contract of a draw: form, range, a finite log_q."""
    has_form("ids", ids, shape, torch.int64)
    expect(bool(((ids >= 0) & (ids < classes)).all()), f"ids must be in [0, {classes}), got {ids.tolist()}")
    if log_q is not None:
        has_form("log_q", log_q, shape, torch.float32)
        expect(bool(log_q.isfinite().all()), f"log_q of a drawn id must be finite, got {log_q.tolist()}")
        expect(bool((log_q <= 1e-4).all()), f"log_q must be at most 0, got {log_q.tolist()}")


def make_exclude(d: Dice, batch: int, classes: int) -> tuple[Tensor | None, Tensor | None]:
    """(exclude, exclude_offsets) as the ops take them: sorted."""
    kind = d.int(0, 4)
    if kind <= 1:
        return None, None
    if kind <= 3:
        width = 1 if kind == 2 else d.int(1, 4)
        made = d.ids(classes, batch, width)
        made[d.uniform(batch, width) < 0.3] = -1
        return made.sort(1).values, None
    rows = [sorted({d.int(0, classes - 1) for _ in range(d.int(0, 3))}) for _ in range(batch)]
    flat = [k for row in rows for k in row]
    offsets = [0]
    for row in rows:
        offsets.append(offsets[-1] + len(row))
    return torch.tensor(flat, dtype=torch.int64), torch.tensor(offsets)


def excluded(exclude: Any, offsets: Any, batch: int) -> list[list[int]] | None:
    """The lists of each row, -1 left out; None if a row is not ascending, which the ops need not notice."""
    if exclude is None:
        return [[] for _ in range(batch)]
    if offsets is None:
        rows = exclude.reshape(batch, -1).tolist() if batch else []
    else:
        at, flat = offsets.tolist(), exclude.tolist()
        rows = [flat[a:b] for a, b in itertools.pairwise(at)]
    if any(a > b for row in rows for a, b in itertools.pairwise(row)):
        return None
    return [sorted({k for k in row if k >= 0}) for row in rows]
