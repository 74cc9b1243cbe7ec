"""Samplers: where negatives come from, and with which probability.

    Uniform, LogUniform, Unigram    laws that do not look at the query
    Tree                            a decision tree fitted to data
    Quadratic, RandomFourier        kernels of query and class row, over a tree that follows the rows

Every sampler gives a `Draw` whose log_q is the log-probability under the law it really drew from.
"""

from samplex_cuda.samplers.base import Exclude, Sampler
from samplex_cuda.samplers.kernel import KernelSampler, Quadratic, RandomFourier
from samplex_cuda.samplers.static import LogUniform, StaticSampler, Uniform, Unigram
from samplex_cuda.samplers.tree import Tree

__all__ = [
    "Exclude",
    "KernelSampler",
    "LogUniform",
    "Quadratic",
    "RandomFourier",
    "Sampler",
    "StaticSampler",
    "Tree",
    "Uniform",
    "Unigram",
]
