"""Loads the compiled parts: `_native` (pybind11) and, beside it, the op library that registers `torch.ops.samplex`."""

from __future__ import annotations

from pathlib import Path

import torch

try:
    import samplex_cuda._native as _native
except ImportError as error:
    raise ImportError(
        "samplex_cuda: the compiled part is missing or does not fit this Python and torch "
        f"({error}). Build it with: pip install torch==2.13.0 && pip install --no-build-isolation ."
    ) from error

# Beside `_native`, not beside this file: an editable install keeps compiled files elsewhere than the sources.
torch.ops.load_library(str(Path(_native.__file__).parent / "libsamplex.so"))

__all__ = ["_native"]
