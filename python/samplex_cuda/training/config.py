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

# ruff: noqa: RUF009  (`_key` gives a dataclass field)
from __future__ import annotations

import dataclasses
import difflib
import importlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

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

MODELS = ("linear", "mlp", "embedding_bag", "lstm", "gru", "two_tower", "sequence")
SAMPLERS = (
    "uniform",
    "log_uniform",
    "unigram",
    "bigram",
    "tree",
    "quadratic",
    "rff",
    "softmax",
    "mixture",
)
LOSSES = ("sampled_softmax", "negative_sampling", "nce", "one_vs_each", "augment_reduce", "full_softmax")


class ConfigError(ValueError):
    """A configuration that cannot be used; the message names file, table, key, what is wanted and what was found.

    Example:
        >>> from samplex_cuda.training import config
        >>> try:
        ...     config.from_dict({"optimizer": {"lr": "fast"}}, source="run.toml")
        ... except config.ConfigError as error:
        ...     print(error)
        config: run.toml: [optimizer] lr must be a number above 0, got "fast"
    """


def _key(
    default: Any,
    doc: str,
    *,
    choices: tuple[str, ...] | None = None,
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
    below: float | None = None,
    also: tuple[str, ...] = (),
) -> Any:
    """A field: its default, what it means, and which values are good. `also`: words a number or bool may be instead."""
    rules = {
        "doc": doc, "choices": choices, "least": least, "most": most, "above": above, "below": below, "also": also
    }  # fmt: skip
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=rules)
    return dataclasses.field(default=default, metadata=rules)


@dataclasses.dataclass
class Data:
    """`[data]`: which files, and how they are split.

    Example:
        >>> from samplex_cuda.training.config import Data
        >>> Data(path="train.txt").valid_fraction
        0.1
    """

    path: str = _key("", 'the training data: a file, a folder, or "builtin"')
    format: str = _key("", "of the files; empty: found from the name (see docs on data)")
    valid: str = _key("", "the validation data; empty: a part of the training data")
    valid_fraction: float = _key(0.1, "the part, where `valid` is empty; 0: no validation", least=0.0, below=1.0)
    seed: int = _key(0, "of the split")
    options: dict[str, Any] = _key({}, "a table of further arguments of `samplex_cuda.data.open`")


@dataclasses.dataclass
class Model:
    """`[model]`: the encoder, from a batch to h [*, d].

    Example:
        >>> from samplex_cuda.training.config import Model
        >>> Model(name="mlp", dim=128).layers
        1
    """

    name: str = _key(
        "linear",
        'linear, mlp, embedding_bag, lstm, gru, two_tower, sequence; or "package.module:Class", which is imported and '
        "run: only from configurations that you trust",
    )
    dim: int = _key(64, "d, the width of h and of the class rows; linear: the width of the input, whatever this says",
                    least=1)  # fmt: skip
    hidden: int = _key(0, "width of the hidden layers; 0: as `dim`", least=0)
    layers: int = _key(
        1, "hidden layers (mlp, two_tower, embedding_bag), or layers of the lstm, gru, attention", least=0
    )
    dropout: float = _key(0.0, "share of activations set to 0 in training", least=0.0, below=1.0)
    pca: int = _key(0, "linear, mlp: reduce the input to so many principal components of the training data; 0: no",
                    least=0)  # fmt: skip
    whiten: bool = _key(False, "scale the principal components to variance 1")
    tied: bool = _key(False, "lstm, gru, sequence, two_tower: the embedding is the class table of the head")
    sparse: bool = _key(True, "embeddings get row gradients and a row optimizer; false: dense ones")
    pooling: str = _key("mean", "sequence: how a history becomes one vector", choices=("mean", "gru", "attention"))
    heads: int = _key(2, "sequence with attention: heads", least=1)
    normalize: bool = _key(False, "scale h to length 1 (use with `head.scale`)")
    options: dict[str, Any] = _key({}, "a table of arguments for a class given by its import path")


@dataclasses.dataclass
class Sampler:
    """`[sampler]`: where negatives come from. Which keys count depends on `name`.

    Example:
        >>> from samplex_cuda.training.config import Sampler
        >>> Sampler(name="tree", dim=32).reg
        0.1
    """

    name: str = _key("log_uniform", "the law", choices=SAMPLERS)
    update: int | str = _key(
        "auto", 'quadratic, rff: how often it follows the class table: "auto", "step", "epoch", or a number of steps',
        least=1, also=("auto", "step", "epoch"),
    )  # fmt: skip
    power: float = _key(1.0, "unigram, bigram: exponent on the counts", least=0.0)
    smoothing: float = _key(0.0, "unigram, bigram: added to the count of each class", least=0.0)
    backoff: float = _key(0.1, "bigram: share of the unigram law", least=0.0, most=1.0)
    dim: int = _key(16, "tree: features a node looks at", least=1)
    reg: float = _key(0.1, "tree: strength of the regulariser of a node", above=0.0)
    unseen: bool = _key(
        True, "tree: false gives classes without an example probability 0, so that they are never drawn"
    )
    features: str = _key("auto", "tree: what it looks at, the input or the encoder's h; auto: the input if any",
                         choices=("auto", "input", "hidden"))  # fmt: skip
    fit_rows: int = _key(200_000, "tree, PCA: training examples that are used, at most", least=1)
    path: str = _key("", "tree: a file of `samplex fit-tree` to take instead of a fit; empty: fitted here")
    refit_every: int = _key(0, "tree, also in a mixture: fit anew after so many epochs; 0: never", least=0)
    refit_steps: int = _key(0, "the same, after so many steps; 0: never", least=0)
    alpha: float = _key(100.0, "quadratic: factor of the square", above=0.0)
    num_features: int = _key(1024, "rff: random features", least=1)
    nu: float = _key(4.0, "rff: sharpness of the kernel", above=0.0)
    kind: str = _key("rff", "rff: of the features", choices=("rff", "orf", "positive"))
    epsilon: float = _key(0.01, "rff: share of the uniform law", least=0.0, below=1.0)
    normalize: bool = _key(False, "rff: scale rows and queries to length 1")
    components: list[str] = _key([], 'mixture: names of other samplers, e.g. ["tree", "uniform"]')
    weights: list[float] = _key([], "mixture: their shares")


@dataclasses.dataclass
class Head:
    """`[head]`: the classifier and its loss.

    Example:
        >>> from samplex_cuda.training.config import Head
        >>> Head().loss
        'sampled_softmax'
    """

    loss: str = _key("sampled_softmax", "see docs/losses.md", choices=LOSSES)
    num_samples: int = _key(64, "draws per row, or per batch with `shared`", least=1)
    shared: bool = _key(False, "draw once for the whole batch; a law of each row counts as the mean of these laws")
    stratified: bool = _key(False, "tree with `shared`: draws in strata, which are less noisy than independent ones")
    bias: bool = _key(True, "a bias per class")
    scale: float = _key(1.0, "inverse temperature: factor of the logits")
    absolute: bool = _key(False, "logits are absolute values")
    label_smoothing: float = _key(0.0, "as in cross_entropy", least=0.0, most=1.0)
    reg: float = _key(0.0, "negative_sampling: pulls scores to zero", least=0.0)
    eta_rate: float = _key(0.5, "augment_reduce: how fast eta moves", above=0.0, most=1.0)
    mask_known: bool = _key(
        False, "known positives of an example that are not its target are no negatives: its other labels, the other "
        "items of its user",
    )  # fmt: skip
    dtype: str = _key("float32", "of the class table", choices=("float32", "bfloat16"))


@dataclasses.dataclass
class Optimizer:
    """`[optimizer]`: a row optimizer for the head (and sparse embeddings), a torch optimizer for the rest.

    Example:
        >>> from samplex_cuda.training.config import Optimizer
        >>> Optimizer(name="adam", lr=0.001).encoder
        'adam'
    """

    name: str = _key("adagrad", "of the head", choices=("sgd", "adagrad", "adam"))
    lr: float = _key(0.1, "learning rate of the head", above=0.0)
    weight_decay: float = _key(0.0, "of touched rows", least=0.0)
    momentum: float = _key(0.0, "sgd", least=0.0, below=1.0)
    beta1: float = _key(0.9, "adam", least=0.0, below=1.0)
    beta2: float = _key(0.999, "adam", least=0.0, below=1.0)
    initial_accumulator: float = _key(0.0, "adagrad: first value of the sums of squares", least=0.0)
    rowwise: bool = _key(False, "adagrad: one sum a row")
    stochastic_rounding: bool = _key(False, "bfloat16 class table: round up or down by chance")
    fused: bool | str = _key(
        "auto", 'update the head inside backward; "auto": wherever that is possible (not with full_softmax, tied '
        "embeddings, or clip_head)", also=("auto",),
    )  # fmt: skip
    encoder: str = _key("adam", "of the encoder", choices=("sgd", "adagrad", "adam", "adamw"))
    encoder_lr: float = _key(0.001, "learning rate of the encoder", above=0.0)
    encoder_weight_decay: float = _key(0.0, "of the encoder", least=0.0)
    encoder_momentum: float = _key(0.0, "sgd", least=0.0, below=1.0)
    table_lr: float = _key(0.0, "of sparse embeddings, with the optimizer of the head; 0: as `lr`", least=0.0)


@dataclasses.dataclass
class Schedule:
    """`[schedule]`: a factor on all learning rates, a function of the step alone.

    Example:
        >>> from samplex_cuda.training.config import Schedule
        >>> schedule = Schedule(name="linear", warmup=10)
        >>> [round(schedule.factor(step, 100), 2) for step in (0, 4, 9, 55, 100)]
        [0.1, 0.5, 1.0, 0.5, 0.0]
    """

    name: str = _key("constant", "shape after the warm-up", choices=("constant", "cosine", "linear", "step"))
    warmup: int = _key(0, "steps over which the rates rise from near 0", least=0)
    final: float = _key(0.0, "cosine, linear: the factor at the end", least=0.0, most=1.0)
    step_size: int = _key(1000, "step: steps between two drops", least=1)
    gamma: float = _key(0.1, "step: factor of each drop", above=0.0, most=1.0)

    def factor(self, step: int, total: int) -> float:
        """The factor of step number `step` (from 0) of `total`."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        done = step - self.warmup
        if self.name == "constant":
            return 1.0
        if self.name == "step":
            return self.gamma ** (done // self.step_size)
        part = min(1.0, done / max(1, total - self.warmup))
        fall = 0.5 * (1.0 + math.cos(math.pi * part)) if self.name == "cosine" else 1.0 - part
        return self.final + (1.0 - self.final) * fall


@dataclasses.dataclass
class Training:
    """`[training]`: epochs, batches, evaluation, checkpoints.

    Example:
        >>> from samplex_cuda.training.config import Training
        >>> Training(epochs=3).keep
        3
    """

    epochs: int = _key(10, "passes over the training data", least=1)
    steps: int = _key(0, "end after so many steps, if that comes first; 0: no such end", least=0)
    batch_size: int = _key(256, "examples of a batch; text: columns read side by side", least=1)
    accumulate: int = _key(1, "batches of one step", least=1)
    seed: int = _key(0, "of initial values, data order, draws, dropout", least=0)
    device: str = _key("cpu", 'where to train, e.g. "cuda"')
    threads: int = _key(0, "of torch; 0: as it is. The same number is needed for the same bits", least=0)
    precision: str = _key("float32", "bfloat16: autocast of the encoder", choices=("float32", "bfloat16"))
    clip_norm: float = _key(0.0, "largest norm of the encoder's gradient; 0: no clipping", least=0.0)
    clip_head: bool = _key(False, "the norm is of the encoder and the head together; the head is not fused then")
    log_every: int = _key(50, "steps between two records of the training loss", least=1)
    eval_every: int = _key(0, "steps between two evaluations; 0: after each epoch", least=0)
    eval_batch_size: int = _key(0, "examples of a batch in evaluation; 0: as `batch_size`", least=0)
    eval_rows: int = _key(0, "validation examples that are used; 0: all", least=0)
    metrics: list[str] = _key(
        ["nll", "accuracy"], "nll, perplexity, accuracy, mrr, precision@k, recall@k, ndcg@k, psp@k"
    )
    exclude_history: bool = _key(False, "interactions: items that a user knows are no answers in evaluation")
    monitor: str = _key("nll", "the metric of early stopping and of `best`")
    monitor_mode: str = _key("auto", "auto: min for nll, perplexity and loss, else max", choices=("auto", "min", "max"))
    patience: int = _key(0, "evaluations without a better value after which training ends; 0: never", least=0)
    min_delta: float = _key(0.0, "how much better is better", least=0.0)
    checkpoint_every: int = _key(0, "steps between two checkpoints; 0: after each epoch", least=0)
    keep: int = _key(3, "checkpoints that stay", least=1)
    keep_best: bool = _key(True, "keep the weights of the best evaluation in `best/`")
    on_save_error: str = _key("stop", "a checkpoint that cannot be written: end, or go on and try the next one",
                              choices=("stop", "continue"))  # fmt: skip
    on_nan: str = _key("stop", "a loss that is not finite: end, or leave the step out", choices=("stop", "skip"))
    max_skipped: int = _key(10, "steps left out in a row after which training ends all the same", least=1)
    average: str = _key("none", "weight averaging: exponential, or the mean of all from `average_start` on",
                        choices=("none", "ema", "swa"))  # fmt: skip
    average_decay: float = _key(0.999, "ema: per step", least=0.0, below=1.0)
    average_start: int = _key(0, "step from which on weights are averaged", least=0)
    average_every: int = _key(1, "steps between two updates of the average", least=1)
    average_head: bool = _key(False, "average the class table too: O(C d) for each update of the average")
    tensorboard: bool = _key(False, "write TensorBoard files")
    plot: bool = _key(True, "draw learning curves into plots/ where matplotlib is there")


@dataclasses.dataclass
class Config:
    """A whole run.

    Example:
        >>> from samplex_cuda.training import config
        >>> run = config.Config(model=config.Model(name="mlp", dim=32))
        >>> run.head.num_samples
        64
    """

    data: Data = dataclasses.field(default_factory=Data)
    model: Model = dataclasses.field(default_factory=Model)
    sampler: Sampler = dataclasses.field(default_factory=Sampler)
    head: Head = dataclasses.field(default_factory=Head)
    optimizer: Optimizer = dataclasses.field(default_factory=Optimizer)
    schedule: Schedule = dataclasses.field(default_factory=Schedule)
    training: Training = dataclasses.field(default_factory=Training)

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Tables of keys."""
        return dataclasses.asdict(self)

    def check(self, source: str = "config") -> Config:
        """Raises `ConfigError` for values that are bad alone or together; returns itself."""
        for table in dataclasses.fields(self):
            part = getattr(self, table.name)
            for field in dataclasses.fields(part):
                _check_value(source, table.name, field, getattr(part, field.name))
        _check_together(source, self)
        return self

    @property
    def fused(self) -> bool:
        """Whether the head is updated inside backward."""
        possible = self.head.loss != "full_softmax" and not self.model.tied and not self.training.clip_head
        return possible if self.optimizer.fused == "auto" else bool(self.optimizer.fused)


# ---------------------------------------------------------------------------------------------------- checks
def _shown(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        return repr(value)


def _wanted(field: dataclasses.Field[Any]) -> str:
    rules, kind = field.metadata, _kind(field)
    if rules["choices"]:
        return "one of " + ", ".join(f'"{c}"' for c in rules["choices"])
    word = {"int": "an int", "float": "a number", "bool": "true or false", "str": "a string"}.get(kind, "")
    if kind == "list[str]":
        return "a list of strings"
    if kind == "list[float]":
        return "a list of numbers"
    if kind == "dict":
        return "a table"
    bounds = [
        f"{text} {rules[name]:g}"
        for name, text in (("above", "above"), ("least", "at least"), ("below", "below"), ("most", "at most"))
        if rules[name] is not None
    ]
    return " or ".join([" ".join([word, " and ".join(bounds)]).strip(), *(f'"{w}"' for w in rules["also"])])


def _kind(field: dataclasses.Field[Any]) -> str:
    return str(field.type).split(" | ")[0].replace("dict[str, Any]", "dict")


def _check_value(source: str, table: str, field: dataclasses.Field[Any], value: Any) -> Any:
    """The value, in the type of the key; `ConfigError` where it is none."""
    rules, kind = field.metadata, _kind(field)
    good = False
    if isinstance(value, str) and value in rules["also"]:
        return value
    if kind == "bool":
        good = isinstance(value, bool)
    elif kind == "int":
        good = isinstance(value, int) and not isinstance(value, bool)
    elif kind == "float":
        good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        value = float(value) if good else value
    elif kind == "str":
        good = isinstance(value, str) and (rules["choices"] is None or value in rules["choices"])
    elif kind == "list[str]":
        good = isinstance(value, list | tuple) and all(isinstance(v, str) for v in value)
    elif kind == "list[float]":
        good = isinstance(value, list | tuple) and all(
            isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v) for v in value
        )
    elif kind == "dict":
        good = isinstance(value, dict)
    if good and kind in ("int", "float"):
        good = (
            (rules["least"] is None or value >= rules["least"])
            and (rules["above"] is None or value > rules["above"])
            and (rules["most"] is None or value <= rules["most"])
            and (rules["below"] is None or value < rules["below"])
        )
    if not good:
        raise ConfigError(f"config: {source}: [{table}] {field.name} must be {_wanted(field)}, got {_shown(value)}")
    return list(value) if isinstance(value, tuple) else value


def _check_together(source: str, c: Config) -> None:
    def fail(table: str, name: str, wanted: str, got: Any) -> None:
        raise ConfigError(f"config: {source}: [{table}] {name} must be {wanted}, got {_shown(got)}")

    if c.model.name not in MODELS and not re.fullmatch(r"[\w.]+:\w+", c.model.name):
        fail("model", "name", "one of " + ", ".join(MODELS) + ', or "package.module:Class"', c.model.name)
    if c.model.options and c.model.name in MODELS:
        fail("model", "options", "empty where the model has no import path", c.model.options)
    if c.model.tied and c.model.name not in ("lstm", "gru", "sequence", "two_tower"):
        fail("model", "tied", f"false with the model {c.model.name}", True)
    if c.model.pca and c.model.name not in ("linear", "mlp"):
        fail("model", "pca", f"0 with the model {c.model.name}", c.model.pca)
    if c.optimizer.fused is True:
        for bad, why in (
            (c.head.loss == "full_softmax", 'head.loss = "full_softmax"'),
            (c.model.tied, "model.tied = true"),
            (c.training.clip_head, "training.clip_head = true"),
        ):
            if bad:
                fail("optimizer", "fused", f'false or "auto" with {why}', True)
    if c.training.clip_head and not c.training.clip_norm:
        fail("training", "clip_norm", "above 0 with clip_head", c.training.clip_norm)
    if c.sampler.name == "mixture":
        if len(c.sampler.components) < 2 or any(n not in SAMPLERS or n == "mixture" for n in c.sampler.components):
            wanted = "two or more of " + ", ".join(n for n in SAMPLERS if n != "mixture")
            fail("sampler", "components", f"{wanted} for a mixture", c.sampler.components)
        if len(c.sampler.weights) != len(c.sampler.components) or any(w <= 0 for w in c.sampler.weights):
            wanted = f"{len(c.sampler.components)} numbers above 0, one for each component"
            fail("sampler", "weights", wanted, c.sampler.weights)
    elif c.sampler.components or c.sampler.weights:
        fail("sampler", "components", "empty but for a mixture", c.sampler.components or c.sampler.weights)
    names = c.sampler.components or [c.sampler.name]
    for key in ("refit_every", "refit_steps"):
        value = getattr(c.sampler, key)
        if value and ("tree" not in names or c.head.loss == "negative_sampling"):
            fail("sampler", key, "0 but for a tree, and with negative_sampling", value)
        if value and c.sampler.path and c.sampler.features != "hidden":
            fail("sampler", key, '0 with a tree from a file, unless features = "hidden"', value)
    if c.sampler.path and "tree" not in names:
        fail("sampler", "path", "empty but for a tree", c.sampler.path)
    own_law = [n for n in names if n in ("bigram", "tree", "quadratic", "rff", "softmax")]
    if c.head.shared and own_law and c.head.loss == "negative_sampling":
        fail("head", "shared", f"false with negative_sampling and the sampler {own_law[0]}, whose law is another for "
             "each row", True)  # fmt: skip
    weighted = ("sampled_softmax", "one_vs_each", "augment_reduce")
    if c.head.stratified and not (c.head.shared and c.sampler.name == "tree" and c.head.loss in weighted):
        fail("head", "stratified", f"false but with shared draws of a tree and one of {', '.join(weighted)}", True)
    if c.head.reg and c.head.loss != "negative_sampling":
        fail("head", "reg", f'0 with loss = "{c.head.loss}"', c.head.reg)
    if c.head.mask_known and c.head.loss in ("full_softmax", "negative_sampling", "nce"):
        fail("head", "mask_known", f'false with loss = "{c.head.loss}"', True)
    if c.head.loss not in ("sampled_softmax", "full_softmax"):
        for name in ("absolute", "label_smoothing"):
            if getattr(c.head, name):
                fail("head", name, f'off with loss = "{c.head.loss}"', getattr(c.head, name))
    if c.head.loss == "negative_sampling" and c.sampler.update != "auto":
        fail("sampler", "update", '"auto" with loss = "negative_sampling", whose sampler rests', c.sampler.update)
    if c.head.loss == "negative_sampling" and "bigram" in names:
        fail("head", "loss", "another with the sampler bigram, whose law prediction would need for every context",
             c.head.loss)  # fmt: skip
    if c.optimizer.momentum and c.optimizer.name != "sgd":
        fail("optimizer", "momentum", f"0 with {c.optimizer.name}", c.optimizer.momentum)
    if c.optimizer.rowwise and c.optimizer.name != "adagrad":
        fail("optimizer", "rowwise", f"false with {c.optimizer.name}", True)
    if c.training.average_head and c.training.average == "none":
        fail("training", "average_head", 'false with average = "none"', True)


# ---------------------------------------------------------------------------------------------------- in and out
def _tables() -> dict[str, Any]:
    return {field.name: field.default_factory for field in dataclasses.fields(Config)}


def _near(name: str, known: Iterable[str]) -> str:
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1)
    return f' (did you mean "{close[0]}"?)' if close else f"; there are {', '.join(known)}"


def from_dict(tables: Mapping[str, Any], source: str = "config") -> Config:
    """A `Config` of tables of keys; what is not given has its default.

    Args:
        tables: as TOML gives them.
        source: what errors call it, e.g. the name of the file.

    Example:
        >>> from samplex_cuda.training import config
        >>> config.from_dict({"training": {"epochs": 3}}).training.epochs
        3
    """
    result = Config()
    for table, keys in tables.items():
        if table not in _tables():
            raise ConfigError(f"config: {source}: has no table [{table}]{_near(table, _tables())}")
        if not isinstance(keys, Mapping):
            raise ConfigError(f"config: {source}: [{table}] must be a table, got {_shown(keys)}")
        part = getattr(result, table)
        fields = {field.name: field for field in dataclasses.fields(part)}
        for name, value in keys.items():
            if name not in fields:
                raise ConfigError(f"config: {source}: [{table}] has no key {name}{_near(name, fields)}")
            setattr(part, name, _check_value(source, table, fields[name], value))
    _check_together(source, result)
    return result


def override(config: Config, settings: Iterable[str], source: str = "command line") -> Config:
    """A copy with some keys set, as on a command line: `optimizer.lr=0.1`.

    Args:
        config: what to change.
        settings: `table.key=value`. Numbers, true, false, "text" and [lists] are read as such, anything else is text.
        source: what errors call it.

    Example:
        >>> from samplex_cuda.training import config
        >>> run = config.override(config.Config(), ["optimizer.lr=1", "sampler.name=uniform", "data.options.window=20"])
        >>> run.optimizer.lr, run.sampler.name, run.data.options
        (1.0, 'uniform', {'window': 20})
    """
    tables = config.as_dict()
    for setting in settings:
        path, equals, text = setting.partition("=")
        parts = path.strip().split(".")
        if not equals or len(parts) < 2 or not all(parts):
            raise ConfigError(f"config: {source}: a setting must be table.key=value, got {_shown(setting)}")
        try:
            value = json.loads(text)
        except ValueError:
            value = text.strip()
        where = f"{source}: {setting}"
        part = tables.get(parts[0])
        if part is None:
            raise ConfigError(f"config: {where}: has no table [{parts[0]}]{_near(parts[0], tables)}")
        if len(parts) > 2:
            if parts[1] != "options" or len(parts) > 3 or "options" not in part:
                raise ConfigError(f"config: {where}: [{parts[0]}] has no key {'.'.join(parts[1:])}")
            part["options"] = {**part["options"], parts[2]: value}
        else:
            fields = {f.name: f for f in dataclasses.fields(getattr(config, parts[0]))}
            if parts[1] not in fields:
                raise ConfigError(f"config: {where}: [{parts[0]}] has no key {parts[1]}{_near(parts[1], fields)}")
            if _kind(fields[parts[1]]) == "str" and not isinstance(value, str):
                value = text.strip()  # a file may be called 2024
            part[parts[1]] = _check_value(where, parts[0], fields[parts[1]], value)
    return from_dict(tables, source)


def load(path: str | Path, settings: Iterable[str] = ()) -> Config:
    """Reads a TOML file.

    Args:
        path: of the file.
        settings: as in `override`.

    Example:
        >>> import tempfile, pathlib
        >>> from samplex_cuda.training import config
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "run.toml")
        ...     _ = path.write_text('[model]\\nname = "mlp"\\n')
        ...     config.load(path, ["model.dim=32"]).model.dim
        32
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"config: {path}: is not there") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config: {path}: cannot be read ({error})") from None
    return override(from_dict(_parse(text, str(path)), str(path)), settings)


def _parse(text: str, source: str) -> dict[str, Any]:
    for name in ("tomllib", "tomli"):
        try:
            toml = importlib.import_module(name)
            break
        except ImportError:
            continue
    else:
        raise ImportError(
            "config.load: Python below 3.11 needs the package tomli to read TOML: pip install samplex-cuda[cli]"
        )
    try:
        return toml.loads(text)
    except toml.TOMLDecodeError as error:
        raise ConfigError(f"config: {source}: is no TOML: {error}") from None


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        if not math.isfinite(value):
            return "nan" if value != value else ("inf" if value > 0 else "-inf")
        text = repr(value)
        return text if any(c in text for c in ".e") else text + ".0"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, str):
        # A TOML basic string takes JSON's escapes; DEL is the one character JSON leaves and TOML does not.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_name(k)} = {_toml(v)}" for k, v in value.items()) + "}"
    raise ConfigError(f"config: a value must be a bool, number, string, list or table, got {type(value).__name__}")


def _name(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key)


def dumps(config: Config) -> str:
    """The configuration as TOML, every key written out; `load` gives the same configuration back.

    Example:
        >>> from samplex_cuda.training import config
        >>> config.dumps(config.Config()).splitlines()[:3]
        ['[data]', 'path = ""', 'format = ""']
    """
    parts = []
    for table, keys in config.as_dict().items():
        parts.append("\n".join([f"[{table}]", *(f"{name} = {_toml(value)}" for name, value in keys.items())]))
    return "\n\n".join(parts) + "\n"


def describe() -> str:
    """Every key with its default and meaning, as Markdown tables.

    Example:
        >>> from samplex_cuda.training import config
        >>> config.describe().splitlines()[0]
        '### `[data]`'
    """
    lines = []
    for table, make in _tables().items():
        part = make()
        lines += [f"### `[{table}]`", "", "| key | default | values | meaning |", "|---|---|---|---|"]
        for field in dataclasses.fields(part):
            wanted = _wanted(field).replace("|", "\\|")
            lines.append(
                f"| `{field.name}` | `{_toml(getattr(part, field.name))}` | {wanted} | {field.metadata['doc']} |"
            )
        lines.append("")
    return "\n".join(lines)
