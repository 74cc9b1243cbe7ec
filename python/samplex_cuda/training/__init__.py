"""Training from a configuration: models, checkpoints that survive a kill, a resume that gives the same bits."""

from samplex_cuda.training import checkpoint, config

__all__ = ["checkpoint", "config"]
