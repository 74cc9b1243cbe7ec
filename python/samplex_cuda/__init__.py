"""Sampled softmax over huge class sets: samplers, fused losses and heads for PyTorch."""

from samplex_cuda import samplers
from samplex_cuda.draw import Draw
from samplex_cuda.heads import SampledClassifier
from samplex_cuda.rng import Key

__all__ = ["Draw", "Key", "SampledClassifier", "samplers"]
