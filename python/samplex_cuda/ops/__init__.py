"""Torch ops: thin wrappers, fake kernels and autograd, one module per op."""
