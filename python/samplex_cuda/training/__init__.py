"""Training from a configuration: models, checkpoints that survive a kill, a resume that gives the same bits."""

from samplex_cuda.training import checkpoint, config, models
from samplex_cuda.training.checkpoint import CheckpointError
from samplex_cuda.training.config import Config, ConfigError
from samplex_cuda.training.data import open_data
from samplex_cuda.training.models import build, optimizers
from samplex_cuda.training.trainer import (
    NonFiniteLossError,
    Progress,
    Result,
    RunError,
    Trainer,
    evaluate,
    load_model,
    plot_curves,
    read_metrics,
)

__all__ = [
    "CheckpointError",
    "Config",
    "ConfigError",
    "NonFiniteLossError",
    "Progress",
    "Result",
    "RunError",
    "Trainer",
    "build",
    "checkpoint",
    "config",
    "evaluate",
    "load_model",
    "models",
    "open_data",
    "optimizers",
    "plot_curves",
    "read_metrics",
]
