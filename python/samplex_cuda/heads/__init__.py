"""Heads: modules that hold the class table."""

from samplex_cuda.heads.classifier import LossSpec, SampledClassifier
from samplex_cuda.heads.follow import Staleness, TableFollower
from samplex_cuda.heads.hard import HardNegatives

__all__ = ["HardNegatives", "LossSpec", "SampledClassifier", "Staleness", "TableFollower"]
