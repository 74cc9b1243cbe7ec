"""Adapters for libraries that train, measure and search: one small module each, loaded on first use.

`sx.integrations.hf` needs the libraries of the extra `hf`, and so on; docs/integrations has a page for each.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["accelerate", "datasets", "hf", "lightning", "sentence_transformers", "torchmetrics"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return importlib.import_module(f"samplex_cuda.integrations.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
