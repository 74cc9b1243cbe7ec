"""Sampled softmax over huge class sets: samplers, fused losses and heads for PyTorch.

`import samplex_cuda` loads the core: heads, losses, samplers, optimizers. The toolkit around it (`data`, `training`,
`metrics`, `diagnostics`, `index`, `integrations`) and `distributed` are loaded on first use.
"""

from __future__ import annotations

import gc
import importlib
from typing import TYPE_CHECKING, Any

# The functions and classes made here are enough to start a full garbage collection: 80 ms over all that torch has
# loaded, more than the import itself.
_collects = gc.isenabled()
gc.disable()
try:
    from samplex_cuda import functional, graphs, losses, optim, rff, samplers, tables
    from samplex_cuda._library import _native, register_fakes
    from samplex_cuda.draw import Draw, Negatives
    from samplex_cuda.heads import HardNegatives, SampledClassifier
    from samplex_cuda.rng import Key

    register_fakes()
finally:
    if _collects:
        gc.enable()
    del _collects

if TYPE_CHECKING:
    from samplex_cuda import data, diagnostics, distributed, index, integrations, metrics, training

__version__: str = _native.build_info()["version"]

__all__ = [
    "Draw",
    "HardNegatives",
    "Key",
    "Negatives",
    "SampledClassifier",
    "__version__",
    "data",
    "diagnostics",
    "distributed",
    "functional",
    "graphs",
    "index",
    "integrations",
    "losses",
    "metrics",
    "optim",
    "release_memory",
    "rff",
    "samplers",
    "tables",
    "training",
]

_LAZY = (
    "data",
    "diagnostics",
    "distributed",
    "index",
    "integrations",
    "metrics",
    "training",
)  # loaded by their first use


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return importlib.import_module(f"samplex_cuda.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})


def release_memory() -> int:
    """Give gradient buffers that the CPU kernels keep for the next step back to the system; returns their bytes.

    Example:
        >>> import samplex_cuda as sx
        >>> sx.release_memory() >= 0
        True
    """
    return _native.release_memory()
