"""What a run is: a tree of dataclasses, read from and written to TOML.

    [data]       which files, how they are split
    [model]      the encoder
    [sampler]    where negatives come from
    [head]       the classifier and its loss
    [optimizer]  of the head, and of the encoder
    [schedule]   of the learning rates
    [training]   epochs, batches, evaluation, checkpoints

Every key has a default but `data.path`. An unknown key, a value of the wrong kind or out of range, and two keys that
contradict each other are errors that name the file, the table, the key, what is wanted and what was found.
docs/training.md lists the keys; `describe()` makes that list.
"""

from samplex_cuda.training.config.checks import ConfigError
from samplex_cuda.training.config.files import describe, dumps, from_dict, load, override
from samplex_cuda.training.config.tables import Config, Data, Head, Model, Optimizer, Sampler, Schedule, Training

__all__ = [
    "Config",
    "ConfigError",
    "Data",
    "Head",
    "Model",
    "Optimizer",
    "Sampler",
    "Schedule",
    "Training",
    "describe",
    "dumps",
    "from_dict",
    "load",
    "override",
]
