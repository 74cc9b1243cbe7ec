"""Training from a configuration: models, checkpoints that survive a kill, a resume that gives the same bits.

Where things are:

    config            the keys of a run and their checks
    opening           the data of a configuration
    models            encoder, head and optimizers by name
    encoders          the encoders
    sampler_factory   samplers by name, made from data
    trainer           a run, from start to end
    step              one optimizer step
    result            how a run ends
    interrupts        signals and torch's generators
    evaluation        exact metrics on a data set
    chooser           a run that chooses its sampler; head_chooser: a head in a loop of your own
    averaging         averages of the weights
    run_folder        metrics, curves, bad batches, the lock
    state             what a checkpoint holds; `load_model`
    checkpoint        how it gets onto the disk and back
"""

from samplex_cuda.training import checkpoint, config, models
from samplex_cuda.training.checkpoint import CheckpointError
from samplex_cuda.training.config import Config, ConfigError
from samplex_cuda.training.evaluation import evaluate
from samplex_cuda.training.head_chooser import HeadChooser, Way
from samplex_cuda.training.models import build, optimizers
from samplex_cuda.training.opening import open_data
from samplex_cuda.training.result import NonFiniteLossError, Result
from samplex_cuda.training.run_folder import RunError, plot_curves, read_metrics
from samplex_cuda.training.state import Progress, load_model
from samplex_cuda.training.trainer import Trainer

__all__ = [
    "CheckpointError",
    "Config",
    "ConfigError",
    "HeadChooser",
    "NonFiniteLossError",
    "Progress",
    "Result",
    "RunError",
    "Trainer",
    "Way",
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
