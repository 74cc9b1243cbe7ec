"""Data sets: files in, batches out; memory-mapped, so that they may be larger than memory. See docs/data.md."""

from samplex_cuda.data.array_files import csr_file, memmap_file, npy_file, npz_file
from samplex_cuda.data.array_sets import Dense, Sparse, Tokens
from samplex_cuda.data.base import PAD, Dataset
from samplex_cuda.data.interaction_files import interactions_file, sequences_file
from samplex_cuda.data.interactions import Interactions
from samplex_cuda.data.negatives import read_negatives
from samplex_cuda.data.opening import FORMATS, open, open_like
from samplex_cuda.data.parquet import parquet_file
from samplex_cuda.data.parts import Batches, Subset, split
from samplex_cuda.data.sparse_text import svmlight_file, xc_file
from samplex_cuda.data.synthetic import BuiltIn, HierarchicalZipf
from samplex_cuda.data.text import text_file

__all__ = [
    "FORMATS",
    "PAD",
    "Batches",
    "BuiltIn",
    "Dataset",
    "Dense",
    "HierarchicalZipf",
    "Interactions",
    "Sparse",
    "Subset",
    "Tokens",
    "csr_file",
    "interactions_file",
    "memmap_file",
    "npy_file",
    "npz_file",
    "open",
    "open_like",
    "parquet_file",
    "read_negatives",
    "sequences_file",
    "split",
    "svmlight_file",
    "text_file",
    "xc_file",
]
