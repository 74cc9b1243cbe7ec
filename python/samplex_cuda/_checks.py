"""The checks and error messages that every layer shares: what was wanted, what came, and the exception's type.

Ops raise RuntimeError, because torch's stable ABI has no other exception. Their messages start with a code, the name of
the Python exception they stand for; `op_error` is the only translator.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

__all__ = [
    "FLOATS",
    "WrongTypeError",
    "call",
    "check_choice",
    "check_data",
    "check_dense",
    "check_int",
    "check_number",
    "check_tensor",
    "describe",
    "dtype_name",
    "op_error",
    "shape_text",
]

T = TypeVar("T")

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)

_CODES: dict[str, type[Exception]] = {
    "IndexError": IndexError,
    "MemoryError": MemoryError,
    "TypeError": TypeError,
    "ValueError": ValueError,
}


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def describe(value: object) -> str:
    """What an error says it got: `[3, 32] float16 on cpu` for a tensor, `[3, 32] float64` for an array, the type or the
    value of anything else.
    """
    if isinstance(value, Tensor):
        layout = "" if value.layout is torch.strided else f" {str(value.layout).removeprefix('torch.')}"
        return f"{list(value.shape)} {dtype_name(value.dtype)}{layout} on {value.device}"
    if isinstance(value, np.ndarray):
        return f"{list(value.shape)} {value.dtype}"
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    return type(value).__name__


def shape_text(lead: tuple[int, ...] | torch.Size, *last: str) -> str:
    """`[2, 3, m]` for a leading shape (2, 3) and the name of a last dimension."""
    return "[" + ", ".join([*map(str, lead), *last]) + "]"


class WrongTypeError(TypeError, ValueError):
    """A TypeError, as Python's own functions raise; also a ValueError, so that one `except` takes all bad numbers."""


def check_int(op: str, name: str, value: Any, least: int | None = 1, most: int | None = None) -> int:
    """`value` as an int within [least, most]; a bool is not an int."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is not None and (least is None or least <= number) and (most is None or number <= most):
        return number
    if least is None:
        limits = "" if most is None else f" of at most {most}"
    elif most is None or (most >= 1 << 31 and (number is None or number < least)):
        limits = f" of at least {least}"
    else:
        power = most >= 1 << 20 and most & (most - 1) == 0
        limits = f" in [{least}, {f'2^{most.bit_length() - 1}' if power else most}]"
    kind = WrongTypeError if number is None else ValueError
    raise kind(f"{op}: {name} must be an int{limits}, got {describe(value)}")


def check_number(
    op: str,
    name: str,
    value: Any,
    low: float,
    high: float = math.inf,
    *,
    open_low: bool = False,
    open_high: bool = False,
    infinite: bool = False,
) -> float:
    """`value` as a float within the limits, finite unless `infinite`."""
    try:
        number = None if isinstance(value, bool | str) else float(value)
    except (TypeError, ValueError):
        number = None
    kind = WrongTypeError if number is None else ValueError
    number = math.nan if number is None else number
    inside = (number > low if open_low else number >= low) and (number < high if open_high else number <= high)
    if not (inside and (infinite or -math.inf < number < math.inf)):
        if infinite:
            wanted = f"a number of at least {low:g}"
        elif high == math.inf:
            wanted = f"finite and {'above' if open_low else 'at least'} {low:g}" if low > -math.inf else "finite"
        else:
            wanted = f"in {'(' if open_low else '['}{low:g}, {high:g}{')' if open_high else ']'}"
        raise kind(f"{op}: {name} must be {wanted}, got {describe(value)}")
    return number


def check_choice(op: str, name: str, value: Any, choices: Any) -> None:
    """ValueError unless `value` is one of `choices`."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{op}: {name} must be one of {', '.join(map(str, choices))}, got {value!r}")


def check_tensor(op: str, name: str, value: object, wanted: str) -> Tensor:
    """`value` if it is a dense tensor; TypeError otherwise."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{op}: {name} must be a tensor {wanted}, got {type(value).__name__}")
    if value.layout is not torch.strided:
        raise TypeError(f"{op}: {name} must be a dense tensor {wanted}, got {describe(value)}; use .to_dense()")
    return value


def check_data(op: str, name: str, t: Tensor) -> Tensor:
    """`t` if it holds numbers; ValueError on the meta device, which has none to build tables from."""
    if t.is_meta:
        raise ValueError(f"{op}: {name} must have values, got {describe(t)}; create it outside of torch.device('meta')")
    return check_dense(op, name, t)


def check_dense(op: str, name: str, value: Tensor) -> Tensor:
    """`value` if it is a dense tensor; TypeError for sparse and other layouts."""
    if value.layout is not torch.strided:
        raise TypeError(f"{op}: {name} must be a dense tensor, got {describe(value)} {value.layout}; use .to_dense()")
    return value


def call(op: Callable[..., T], *args: Any) -> T:
    """The op, with its error as the Python exception it stands for."""
    if torch.compiler.is_compiling():
        return op(*args)
    try:
        return op(*args)
    except RuntimeError as error:
        raise op_error(error) from None


def op_error(error: RuntimeError) -> Exception:
    """The Python exception an op's RuntimeError stands for, by the code at the start of its message.

    Example:
        >>> from samplex_cuda._checks import op_error
        >>> op_error(RuntimeError("IndexError: nce: ids must be in [0, 5), got 9"))
        IndexError('nce: ids must be in [0, 5), got 9')
        >>> op_error(RuntimeError("out of memory"))
        RuntimeError('out of memory')
    """
    code, found, text = str(error).partition(": ")
    kind = _CODES.get(code) if found else None
    return error if kind is None else kind(text.splitlines()[0])
