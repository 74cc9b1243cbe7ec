"""Sampled softmax over huge class sets: samplers, fused losses and heads for PyTorch."""

from samplex_cuda import data, diagnostics, functional, metrics, optim, rff, samplers, tables, training
from samplex_cuda._library import _native
from samplex_cuda.draw import Draw
from samplex_cuda.heads import SampledClassifier
from samplex_cuda.rng import Key

__version__: str = _native.build_info()["version"]

__all__ = [
    "Draw",
    "Key",
    "SampledClassifier",
    "__version__",
    "data",
    "diagnostics",
    "functional",
    "metrics",
    "optim",
    "release_memory",
    "rff",
    "samplers",
    "tables",
    "training",
]


def release_memory() -> int:
    """Give gradient buffers that the CPU kernels keep for the next step back to the system; returns their bytes.

    Example:
        >>> import samplex_cuda as sx
        >>> sx.release_memory() >= 0
        True
    """
    return _native.release_memory()
