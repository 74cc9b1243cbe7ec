"""Heads: modules that hold the class table."""

from samplex_cuda.heads.classifier import LossSpec, SampledClassifier
from samplex_cuda.heads.follow import Staleness, TableFollower

__all__ = ["LossSpec", "SampledClassifier", "Staleness", "TableFollower"]
