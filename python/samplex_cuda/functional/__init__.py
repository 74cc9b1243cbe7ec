"""Losses as functions. They take what a sampler drew, `Draw(ids, log_q)`, and never guess its probabilities."""

from samplex_cuda.functional.attention_pool import attention_pool
from samplex_cuda.functional.contrastive import contrastive
from samplex_cuda.functional.entry import augment_reduce, nce, negative_sampling, one_vs_each
from samplex_cuda.functional.full import full_softmax
from samplex_cuda.functional.sampled import sampled_softmax

__all__ = [
    "attention_pool",
    "augment_reduce",
    "contrastive",
    "full_softmax",
    "nce",
    "negative_sampling",
    "one_vs_each",
    "sampled_softmax",
]
