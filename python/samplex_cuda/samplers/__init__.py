"""Samplers: where negatives come from, and with which probability.

    Uniform, LogUniform, Unigram    distributions that do not look at the query
    Bigram                          a distribution for each context id, with back-off
    Tree                            a decision tree fitted to data
    Quadratic, RandomFourier        kernels of query and class row, over a tree that follows the rows
    MIDX                            close to the softmax, by two codebooks of the class rows
    Softmax, Quartic                exact distributions of the model's own logits, O(C): oracles
    Mixture                         several of them, with the probability of the mixture
    InBatch                         targets of the other rows of a batch, with draws of another sampler
    KeyQueue                        no sampler: keys of past batches, as negatives of the next ones
    TowerKeys                       no sampler: the items that a tower encodes for a step of InBatch
    StreamingFrequency              no sampler: estimates how often ids come, for InBatch

Every sampler gives a `Draw` whose log_q is the log-probability under the distribution it really drew from.
"""

from samplex_cuda.samplers.base import Exclude, Sampler
from samplex_cuda.samplers.bigram import Bigram
from samplex_cuda.samplers.exact import ExactSampler, Quartic, Softmax
from samplex_cuda.samplers.frequency import StreamingFrequency
from samplex_cuda.samplers.in_batch import InBatch, TowerKeys
from samplex_cuda.samplers.kernel import KernelSampler, Quadratic, RandomFourier
from samplex_cuda.samplers.midx import MIDX
from samplex_cuda.samplers.mixture import Mixture
from samplex_cuda.samplers.queue import KeyQueue
from samplex_cuda.samplers.static import LogUniform, StaticSampler, Uniform, Unigram
from samplex_cuda.samplers.tree import Tree

__all__ = [
    "MIDX",
    "Bigram",
    "ExactSampler",
    "Exclude",
    "InBatch",
    "KernelSampler",
    "KeyQueue",
    "LogUniform",
    "Mixture",
    "Quadratic",
    "Quartic",
    "RandomFourier",
    "Sampler",
    "Softmax",
    "StaticSampler",
    "StreamingFrequency",
    "TowerKeys",
    "Tree",
    "Uniform",
    "Unigram",
]
