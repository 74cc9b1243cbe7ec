"""Optimizers for class tables: `RowSGD`, `RowAdagrad`, `RowAdam` change the rows that have a gradient and no others.

They take the sparse gradients of the losses here (or any COO gradient over the first dimension) and dense ones, and do
on the touched rows what the optimizers of `torch.optim` do. Nothing happens to the other rows: no decay, no momentum,
no moment changes while a row is not touched ("lazy", as in `torch.optim.SparseAdam`); the step that bias correction and
`lr_decay` count is the parameter's, not the row's. docs/optim.md says what follows from that.
"""

from samplex_cuda.optim.base import RowOptimizer
from samplex_cuda.optim.clip import clip_grad_norm_
from samplex_cuda.optim.combined import Combined, split_parameters
from samplex_cuda.optim.row_gradient import RowGradient
from samplex_cuda.optim.row_optimizers import RowAdagrad, RowAdam, RowSGD

__all__ = [
    "Combined",
    "RowAdagrad",
    "RowAdam",
    "RowGradient",
    "RowOptimizer",
    "RowSGD",
    "clip_grad_norm_",
    "split_parameters",
]
