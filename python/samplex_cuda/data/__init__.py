"""Data sets: files in, batches out; memory-mapped, so that they may be larger than memory. See docs/data.md."""

from samplex_cuda.data.base import (
    PAD,
    Batches,
    BuiltIn,
    Dataset,
    Dense,
    Interactions,
    Sparse,
    Subset,
    Tokens,
    split,
)

__all__ = [
    "PAD",
    "Batches",
    "BuiltIn",
    "Dataset",
    "Dense",
    "Interactions",
    "Sparse",
    "Subset",
    "Tokens",
    "split",
]
