"""Loads the compiled parts: `_native` (pybind11) and, beside it, the op library that registers `torch.ops.samplex`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

try:
    import samplex_cuda._native as _native
except ImportError as error:
    raise ImportError(
        "samplex_cuda: the compiled extension is missing or does not match this Python and torch "
        f"({error}). Build it with: pip install torch==2.13.0 && pip install --no-build-isolation ."
    ) from error

# Beside `_native`, not beside this file: an editable install keeps compiled files elsewhere than the sources.
torch.ops.load_library(str(Path(_native.__file__).parent / "libsamplex.so"))

__all__ = ["_native", "register_fake", "register_fakes"]

# One for all fakes: torch would make one each.
_namespace = torch.library.Library("samplex", "FRAGMENT")
_fakes: list[tuple[str, Callable[..., Any]]] = []
_loaded = False


def register_fake(op: str, func: Callable[..., Any] | None = None) -> Any:
    """`torch.library.register_fake`, put off until the package is loaded.

    torch looks for each caller in all loaded modules. One caller, after the last module is there, is found at once; a
    search per op would be half of the time that `import samplex_cuda` takes.

    Args:
        op: e.g. "samplex::rff".
        func: the fake; without it, this is a decorator.
    """
    if func is None:
        return lambda given: register_fake(op, given)
    if _loaded:  # a module that the package itself does not load
        torch.library.register_fake(op, func, lib=_namespace)
    else:
        _fakes.append((op, func))
    return func


def register_fakes() -> None:
    """Registers what `register_fake` has collected; later ones are registered at once."""
    global _loaded
    _loaded = True
    while _fakes:
        op, func = _fakes.pop()
        torch.library.register_fake(op, func, lib=_namespace)
