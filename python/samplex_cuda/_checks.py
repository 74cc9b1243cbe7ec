"""Errors of the ops as Python errors.

The op library can raise RuntimeError only. Each of its checks puts the Python error that is meant in front of the
message: `IndexError: sampled_softmax: target must be in [0, 10), got 12 at flat position 3`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

__all__ = ["call", "op_error"]

T = TypeVar("T")

_KINDS: dict[str, type[Exception]] = {"IndexError": IndexError, "TypeError": TypeError, "ValueError": ValueError}


def op_error(error: RuntimeError) -> Exception:
    """The Python error that an op's error stands for; any other error unchanged.

    Args:
        error: from a call of `torch.ops.samplex`.

    Example:
        >>> from samplex_cuda._checks import op_error
        >>> op_error(RuntimeError("ValueError: rff: nu must be positive and finite, got -1"))
        ValueError('rff: nu must be positive and finite, got -1')
        >>> op_error(RuntimeError("out of memory"))
        RuntimeError('out of memory')
    """
    kind, found, message = str(error).partition(": ")
    if not found or kind not in _KINDS:
        return error
    return _KINDS[kind](message.splitlines()[0])


def call(op: Callable[[], T]) -> T:
    """The result of `op`, whose errors are raised as `op_error` has them.

    Example:
        >>> import torch
        >>> from samplex_cuda._checks import call
        >>> call(lambda: torch.zeros(2).sum().item())
        0.0
    """
    if torch.compiler.is_compiling():
        return op()
    try:
        return op()
    except RuntimeError as error:
        raise op_error(error) from None
