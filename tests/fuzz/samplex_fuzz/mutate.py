"""Changes to the arguments of a call: shapes, strides, dtypes, devices, layouts, values, Python types."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from samplex_fuzz.call import Call, Dice

_FLOATS = (float("nan"), float("inf"), -float("inf"), 1e30, -1e30, 3e19, 1e10, 1e20, 1e-40, 65504.0, 0.0, -0.0, 1e5)
_INTS = (-1, -2, -100, 2**31 - 1, 2**31, 2**32, 2**40, -(2**40), 2**62, 2**63 - 1, -(2**63), 1 << 24)
_SCALARS = (float("nan"), float("inf"), -float("inf"), 0.0, -0.0, -1.0, 1e30, -1e30, 1e-40, 3e19, 2.0, 0.5, 1.0)
# Nothing between 2^13 and 2^25: valid sizes that only take long.
_SIZES = (0, 1, 2, 3, 7, -1, -2, -100, 2**25, 2**31 - 1, 2**31, 2**32 + 1, 2**40, 2**61, 2**62, 2**63 - 1, -(2**63))
_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.bool, torch.uint8,
    torch.complex64,
)  # fmt: skip


def _wrong_type(d: Dice) -> Any:
    return d.pick((None, "x", 5, 1.5, True, [], [1.0], (), {}, object(), -1, "mean", b"x", 2**70))


def _resize(t: Tensor, dim: int, size: int) -> Tensor:
    """`t` with another size of one dimension: cut, or its last entries repeated."""
    old = t.shape[dim]
    if size <= old:
        return t.narrow(dim, 0, size).clone()
    if old == 0:
        shape = list(t.shape)
        shape[dim] = size
        return torch.zeros(shape, dtype=t.dtype)
    return torch.cat(
        [t, t.narrow(dim, old - 1, 1).expand(*[size - old if i == dim else -1 for i in range(t.dim())])], dim
    )


def _shape(t: Tensor, d: Dice) -> Tensor:
    if t.dim() == 0 or d.maybe(0.2):
        return t.unsqueeze(d.int(0, t.dim()))
    dim = d.int(0, t.dim() - 1)
    kind = d.int(0, 6)
    if kind == 0:
        return _resize(t, dim, 0)
    if kind == 1:
        return _resize(t, dim, 1)
    if kind == 2:
        return _resize(t, dim, max(0, t.shape[dim] - 1))
    if kind == 3:
        return t.flatten()
    if kind == 4 and t.shape[dim]:
        return t.select(dim, 0).clone()
    if kind == 5:
        return _resize(t, dim, 2 * t.shape[dim])
    return _resize(t, dim, t.shape[dim] + 1)


def _strides(t: Tensor, d: Dice) -> Tensor:
    if t.dim() >= 2 and d.maybe(0.5):
        return t.transpose(0, -1).contiguous().transpose(0, -1)
    if t.dim() == 0:
        return t.unsqueeze(0).expand(2)[0]
    dim = d.int(0, t.dim() - 1)
    if t.shape[dim] and d.maybe(0.4):
        return t.narrow(dim, 0, 1).expand(t.shape)
    doubled = t.repeat_interleave(2, dim)
    index = [slice(None)] * t.dim()
    index[dim] = slice(None, None, 2)
    return doubled[tuple(index)]


@torch.no_grad()
def _values(t: Tensor, d: Dice) -> Tensor:
    # A leaf again: torch's own graph nodes do not take the sparse gradients that a leaf gets.
    t = t.detach().clone().requires_grad_(t.requires_grad)
    if t.numel() == 0 or t.dtype in (torch.bool, torch.uint8):
        return t
    value = d.pick(_FLOATS) if t.is_floating_point() else d.pick((*_INTS, *range(-2, 45)))
    if t.dtype == torch.int32:
        value = max(min(value, 2**31 - 1), -(2**31))
    if d.maybe(0.15):
        return t.fill_(value)
    flat = t.view(-1)
    for _ in range(d.int(1, 3)):
        flat[d.int(0, flat.numel() - 1)] = value
    return t


def tensor(t: Tensor, d: Dice) -> tuple[Any, str]:
    """A changed tensor, or something else in its place, and what was done."""
    kind = d.r.choices(
        ("values", "shape", "strides", "dtype", "meta", "sparse", "none", "type", "grad", "empty"),
        weights=(30, 22, 14, 10, 4, 3, 6, 5, 4, 2),
    )[0]
    if kind == "values":
        return _values(t, d), kind
    if kind == "shape":
        return _shape(t, d), kind
    if kind == "strides":
        return _strides(t, d), kind
    if kind == "dtype":
        return t.detach().to(d.pick(_DTYPES)), kind
    if kind == "meta":
        return t.to("meta"), kind
    if kind == "sparse":
        return t.detach().to_sparse(), kind
    if kind == "none":
        return None, kind
    if kind == "grad":
        return (t.detach().requires_grad_() if t.is_floating_point() else t), kind
    if kind == "empty":
        return torch.empty(0, dtype=t.dtype), kind
    return (t.tolist() if d.maybe(0.2) else t.numpy(force=True) if _to_numpy(t, d) else _wrong_type(d)), kind


def _to_numpy(t: Tensor, d: Dice) -> bool:
    return t.dtype is not torch.bfloat16 and d.maybe(0.2)


def value(x: Any, d: Dice) -> tuple[Any, str]:
    """A changed argument and what was done."""
    if isinstance(x, Tensor):
        return tensor(x, d)
    if isinstance(x, tuple) and x and isinstance(x[0], Tensor) and d.maybe(0.8):
        i = d.int(0, len(x) - 1)
        changed, what = value(x[i], d)
        return tuple(changed if j == i else y for j, y in enumerate(x)), f"[{i}] {what}"
    if isinstance(x, bool):
        return (not x, "flip") if d.maybe(0.7) else (_wrong_type(d), "type")
    if isinstance(x, int):
        if d.maybe(0.12):
            return _wrong_type(d), "type"
        return (x + d.pick((-1, 1)), "near") if d.maybe(0.3) else (d.pick(_SIZES), "int")
    if isinstance(x, float):
        return (_wrong_type(d), "type") if d.maybe(0.12) else (d.pick(_SCALARS), "float")
    if isinstance(x, list) and x and isinstance(x[0], float) and d.maybe(0.8):
        changed = list(x)
        changed[d.int(0, len(x) - 1)] = d.pick(_SCALARS)
        return (changed, "item") if d.maybe(0.7) else (changed[: d.int(0, len(x))], "cut")
    if isinstance(x, str) and d.maybe(0.5):
        return d.pick(("mean", "sum", "none", "x", "")), "string"
    if x is None:
        # Mostly kept: for an optional argument None is the ordinary value.
        return (_wrong_type(d), "type") if d.maybe(0.3) else (x, "kept")
    return _wrong_type(d), "type"


def mutate(call: Call, d: Dice) -> dict[str, str]:
    """Changes 0 to 3 arguments in place; what was done, by argument."""
    names = [name for name in call.args if name not in call.fixed]
    done: dict[str, str] = {}
    for _ in range(min(len(names), d.r.choices((0, 1, 2, 3), weights=(38, 38, 16, 8))[0])):
        name = d.pick(names)
        try:
            call.args[name], what = value(call.args[name], d)
        except (RuntimeError, TypeError, NotImplementedError):  # a second change that the first one rules out
            continue
        done[name] = f"{done[name]}, {what}" if name in done else what
    return done
