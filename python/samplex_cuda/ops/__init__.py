"""Torch ops: thin wrappers, fake kernels and autograd, one module per op."""

from samplex_cuda.ops import row_reduce as row_reduce
