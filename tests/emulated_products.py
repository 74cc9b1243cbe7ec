"""Products of 16-bit factors with sums in float, under an emulated runtime that serves CUDA tensors by CPU kernels.

`aten::mm.dtype_out` has no CPU kernel: here the factors are float. `tests/conftest.py` imports this in a test run that
ptxtorch.py has started.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

ptxtorch: Any = sys.modules["ptxtorch"]


# Bytes from one row, or column, of a factor or result to the next, of each product.
steps: list[int] = []


def mm_dtype_out(a: Tensor, b: Tensor, out_dtype: torch.dtype, *, out: Tensor) -> Tensor:
    """out = a @ b, counted as one launch and as a part of a graph that is being captured."""
    ptxtorch.calls["mm.dtype_out"] += 1
    if ptxtorch._capturing():
        ptxtorch._in_capture("mm.dtype_out", "mm", (), {})
    steps.extend(max(x.stride()) * x.element_size() for x in (a, b, out))
    left, right = (ptxtorch.alias(x).to(out_dtype) for x in (a, b))
    ptxtorch.alias(out).copy_(left @ right)
    return out


LIBRARY = torch.library.Library("aten", "IMPL", "CUDA")
LIBRARY.impl("mm.dtype_out", mm_dtype_out, "CUDA")
