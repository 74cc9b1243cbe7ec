"""Fitting the adversarial tree: a projection of the features, then a balanced decision tree over the classes."""

from samplex_cuda.tree_fit.balance import balance
from samplex_cuda.tree_fit.fit import FittedTree, RegChoice, cross_validate_reg, fit_tree
from samplex_cuda.tree_fit.pca import fit_pca, project
from samplex_cuda.tree_fit.report import describe_fit

__all__ = ["FittedTree", "RegChoice", "balance", "cross_validate_reg", "describe_fit", "fit_pca", "fit_tree", "project"]
