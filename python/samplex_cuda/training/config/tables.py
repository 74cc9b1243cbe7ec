"""The tables of a configuration: their keys, defaults, meanings and ranges."""

# ruff: noqa: RUF009  (`_key` gives a dataclass field)
from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

from samplex_cuda import losses
from samplex_cuda.training.config.checks import MIXED, SAMPLERS, check_together, check_value, make_loss

__all__ = ["Config", "Data", "Head", "Model", "Optimizer", "Sampler", "Schedule", "Training"]


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
    rules = {"doc": doc, "choices": choices, "least": least, "most": most, "above": above, "below": below, "also": also}
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

    path: str = _key("", 'Training data: a file, a folder, or "builtin"')
    format: str = _key("", "Format of the data files; empty: recognized by the file name (see docs/data.md)")
    valid: str = _key("", "Validation data: a file or a folder; empty: a part of the training data (`valid_fraction`)")
    valid_fraction: float = _key(
        0.1,
        "Fraction of the training data that is used for validation if `valid` is empty; 0: no validation",
        least=0.0,
        below=1.0,
    )
    seed: int = _key(0, "Random seed of the split into training and validation data")
    negatives: str = _key(
        "",
        "Negatives from the training data, which replace the sampler's draws: the name of a column of a "
        "parquet or npz file, or an npy file [N, m] padded with -100",
    )
    negatives_log_q: str = _key(
        "",
        "Log-probabilities of `negatives` under the distribution that they were drawn from, in the same "
        "layout; empty: negatives are not corrected",
    )
    options: dict[str, Any] = _key(
        {}, "Further arguments for the reader of the data format (a table; see `samplex_cuda.data.open`)"
    )


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
        "Encoder: linear, mlp, embedding_bag, lstm, gru, two_tower or sequence; or "
        '"package.module:Class", which is imported and executed and therefore requires --trust-model',
    )
    dim: int = _key(
        64, "Width d of h and of the class rows; the linear encoder ignores it and uses the width of its input", least=1
    )
    hidden: int = _key(0, "Width of the hidden layers; 0: same as `dim`", least=0)
    layers: int = _key(
        1, "Number of hidden layers (mlp, two_tower, embedding_bag), or of LSTM, GRU or attention layers", least=0
    )
    dropout: float = _key(0.0, "Dropout probability", least=0.0, below=1.0)
    pca: int = _key(
        0,
        "Reduce the input to this number of principal components of the training data (linear, mlp); 0: no reduction",
        least=0,
    )
    whiten: bool = _key(False, "Scale the principal components to variance 1")
    tied: bool = _key(False, "Use the class table of the head as the input embedding (lstm, gru, sequence, two_tower)")
    sparse: bool = _key(True, "Use row gradients and a row optimizer for embedding tables; false: dense gradients")
    pooling: str = _key(
        "mean",
        "How the history of a user is combined into one vector (sequence encoder)",
        choices=("mean", "gru", "attention"),
    )
    heads: int = _key(2, "Number of attention heads (sequence encoder with attention)", least=1)
    normalize: bool = _key(False, "Scale h to length 1 (use together with `head.scale`)")
    options: dict[str, Any] = _key({}, 'Arguments for an encoder that is given as "package.module:Class" (a table)')


@dataclasses.dataclass
class Sampler:
    """`[sampler]`: where negatives come from. Which keys count depends on `name`.

    Example:
        >>> from samplex_cuda.training.config import Sampler
        >>> Sampler(name="tree", dim=32).reg
        0.1
    """

    name: str = _key(
        "auto",
        "Distribution of the negatives; auto: unigram, with draws shared by the batch",
        choices=("auto", *SAMPLERS),
    )
    choose_every: int = _key(
        0,
        "Choose the sampler among `candidates` during training, every so many steps, by the measured cost"
        " and the error of the gradient; 0: never (see docs/auto.md)",
        least=0,
    )
    candidates: list[str] = _key(
        ["unigram", "tree", "midx", "rff"], "Kinds of samplers that `choose_every` chooses from; must include unigram"
    )
    update: int | str = _key(
        "auto",
        'How often a sampler that depends on the class table is updated (quadratic, rff, midx): "auto", '
        '"step", "epoch", or a number of steps',
        least=1,
        also=("auto", "step", "epoch"),
    )
    power: float = _key(1.0, "Exponent of the class counts (unigram, bigram)", least=0.0)
    smoothing: float = _key(
        1.0,
        "Number added to the count of each class (unigram, bigram); 0: classes without an example are never drawn",
        least=0.0,
    )
    backoff: float = _key(0.1, "Weight of the unigram distribution within the bigram sampler", least=0.0, most=1.0)
    dim: int = _key(16, "Number of features per node of the tree", least=1)
    reg: float = _key(0.1, "Regularization strength of the nodes of the tree", above=0.0)
    unseen: bool = _key(True, "Whether the tree can draw classes without a training example")
    features: str = _key(
        "auto",
        "Features of the tree: the input data or the encoder's output h; auto: the input data if possible",
        choices=("auto", "input", "hidden"),
    )
    fit_rows: int = _key(
        200_000, "Maximum number of training examples used to fit the tree and the principal components", least=1
    )
    path: str = _key("", "Use a tree from this file of `samplex fit-tree`; empty: fit one")
    refit_every: int | str = _key(
        "auto",
        "Fit the tree again after so many epochs; 0: never; auto: every epoch for a tree with a base that"
        " uses h of a trained encoder (text, or features = hidden), otherwise never",
        least=0,
        also=("auto",),
    )
    refit_steps: int = _key(0, "Fit the tree again after so many steps; 0: never", least=0)
    base: str = _key(
        "auto",
        "Fixed distribution mixed into tree, rff and quadratic, so that every class can be drawn (auto: "
        "unigram; none with head.stratified, except for a tree); for in_batch, the distribution of the "
        "`head.num_samples` additional draws (auto: uniform)",
        choices=("auto", "none", "uniform", "log_uniform", "unigram"),
    )
    base_weight: float = _key(0.5, "Weight of `base` in the mixture", above=0.0, below=1.0)
    frequency: str = _key(
        "gap",
        "Estimate of the frequencies (in_batch): mean gap between two occurrences, or a count-min sketch",
        choices=("gap", "sketch"),
    )
    frequency_rate: float = _key(0.02, "Weight of the newest observation (in_batch)", above=0.0, most=1.0)
    frequency_buckets: int = _key(
        0, "Number of buckets of the estimate (in_batch); 0: one per class, at most 2^26", least=0
    )
    alpha: float = _key(100.0, "Coefficient of the squared term of the quadratic kernel", above=0.0)
    num_features: int = _key(1024, "Number of random features (rff)", least=1)
    nu: float | str = _key(
        "auto",
        "Inverse temperature of the kernel (rff); auto: `head.scale`, that of the softmax",
        above=0.0,
        also=("auto",),
    )
    kind: str = _key("positive", "Kind of random features (rff)", choices=("rff", "orf", "positive"))
    num_codes: int = _key(256, "Number of codes in each of the two codebooks (midx)", least=1, most=2048)
    codes: str = _key(
        "residual",
        "How the second codebook is fitted (midx): to the residual of the first, or each codebook to half"
        " of the columns",
        choices=("residual", "product"),
    )
    epsilon: float = _key(0.01, "Weight of the uniform distribution (rff, midx)", least=0.0, below=1.0)
    normalize: bool = _key(False, "Scale class rows and h to length 1 in the sampler (rff)")
    components: list[str] = _key([], 'Names of the samplers in a mixture, for example ["tree", "uniform"]')
    weights: list[float] = _key([], "Weights of the samplers in a mixture")


@dataclasses.dataclass
class Head:
    """`[head]`: the classifier and its loss.

    Example:
        >>> from samplex_cuda.training.config import Head
        >>> Head().loss
        'sampled_softmax'
    """

    loss: str = _key("sampled_softmax", "Loss function (see docs/losses.md)", choices=losses.names())
    num_samples: int | str = _key(
        "auto",
        "Number of draws per row, or per batch if draws are shared; auto: 64 per row, 1,024 per batch",
        least=1,
        also=("auto",),
    )
    shared: bool | str = _key(
        "auto",
        "Draw once for the whole batch, from the mean of the rows' distributions; auto: true for the "
        'samplers "auto" and in_batch',
        also=("auto",),
    )
    stratified: bool = _key(
        False, "Stratified draws, which have less variance than independent ones (tree, midx; requires `shared`)"
    )
    unique: bool | str = _key(
        False,
        "Distinct draws, weighted by their inclusion probabilities (uniform, log_uniform, unigram, bigram); "
        "tf: drawn as in TensorFlow",
        also=("tf",),
    )
    hard: int = _key(
        0,
        "Number of hard negatives per row in addition to the draws: classes with a high score under the model",
        least=0,
    )
    hard_source: str = _key(
        "pool",
        "Classes that hard negatives are chosen from: `hard_pool` random classes, the candidates of a "
        "tree sampler, all classes, or an index of the class rows (FAISS or USearch)",
        choices=("pool", "tree", "exact", "index"),
    )
    hard_pool: int = _key(4096, "Number of random classes per batch that hard negatives are chosen from", least=1)
    hard_index: str = _key(
        "flat",
        'Index for hard_source = "index": "flat", "ivf", "hnsw", "usearch" or a string of `faiss.index_factory`',
    )
    hard_refresh: int = _key(
        100, "Number of steps between two builds of the index; it is also built after each checkpoint", least=1
    )
    bias: bool = _key(True, "Use a bias per class (always off with `normalize`)")
    scale: float = _key(1.0, "Factor of the logits (inverse temperature)")
    learn_scale: bool = _key(
        False, "Learn the scale, starting from `scale`, with the optimizer of the encoder (there is no bias then)"
    )
    normalize: bool = _key(False, "Scale h and class rows to length 1 (use together with `scale`; see docs/faces.md)")
    margin_m1: float = _key(
        1.0, "Margin: factor of the target's angle (SphereFace; requires `normalize`)", least=1.0, most=4.0
    )
    margin_m2: float = _key(
        0.0, "Margin: added to the target's angle (ArcFace; requires `normalize`)", least=0.0, most=1.5
    )
    margin_m3: float = _key(
        0.0, "Margin: subtracted from the target's cosine (CosFace; requires `normalize`)", least=0.0, most=1.0
    )
    corrected: bool = _key(True, "Correct draws by log q (sampled_softmax); false: no correction, as in Partial FC")
    absolute: bool = _key(False, "Use the absolute values of the logits")
    label_smoothing: float = _key(0.0, "Label smoothing, as in cross_entropy", least=0.0, most=1.0)
    reg: float = _key(0.0, "Strength of the penalty on scores (negative_sampling)", least=0.0)
    eta_rate: float = _key(0.5, "Update rate of eta (augment_reduce)", above=0.0, most=1.0)
    mask_known: bool = _key(
        False,
        "Do not use known positives of an example as negatives, such as its other labels or the other "
        "items of its user",
    )
    dtype: str = _key("float32", "Data type of the class table", choices=("float32", "bfloat16"))
    table: str = _key(
        "device",
        "Location of the class table and its optimizer state: on the device of the encoder, or in host "
        "memory, from which only touched rows are copied",
        choices=("device", "host"),
    )


@dataclasses.dataclass
class Optimizer:
    """`[optimizer]`: a row optimizer for the head (and sparse embeddings), a torch optimizer for the rest.

    Example:
        >>> from samplex_cuda.training.config import Optimizer
        >>> Optimizer(name="adam", lr=0.001).encoder
        'adam'
    """

    name: str = _key("adagrad", "Optimizer of the head", choices=("sgd", "adagrad", "adam"))
    lr: float = _key(0.1, "Learning rate of the head", above=0.0)
    weight_decay: float = _key(0.0, "Weight decay of the touched class rows", least=0.0)
    momentum: float = _key(0.0, "Momentum of the head (SGD only)", least=0.0, below=1.0)
    beta1: float = _key(0.9, "Beta1 of the head (Adam only)", least=0.0, below=1.0)
    beta2: float = _key(0.999, "Beta2 of the head (Adam only)", least=0.0, below=1.0)
    initial_accumulator: float = _key(0.0, "Initial value of the sums of squares (Adagrad only)", least=0.0)
    rowwise: bool = _key(False, "Store one sum of squares per row instead of one per number (Adagrad only)")
    stochastic_rounding: bool = _key(False, "Round updates of a bfloat16 class table stochastically")
    fused: bool | str = _key(
        "auto",
        "Update the head inside backward; auto: if possible (not with full_softmax, tied embeddings or clip_head)",
        also=("auto",),
    )
    encoder: str = _key("adam", "Optimizer of the encoder", choices=("sgd", "adagrad", "adam", "adamw"))
    encoder_lr: float = _key(0.001, "Learning rate of the encoder", above=0.0)
    encoder_weight_decay: float = _key(0.0, "Weight decay of the encoder", least=0.0)
    encoder_momentum: float = _key(0.0, "Momentum of the encoder (SGD only)", least=0.0, below=1.0)
    table_lr: float = _key(
        0.0, "Learning rate of sparse embeddings, which use the optimizer of the head; 0: same as `lr`", least=0.0
    )


@dataclasses.dataclass
class Schedule:
    """`[schedule]`: a factor on all learning rates, a function of the step alone.

    Example:
        >>> from samplex_cuda.training.config import Schedule
        >>> schedule = Schedule(name="linear", warmup=10)
        >>> [round(schedule.factor(step, 100), 2) for step in (0, 4, 9, 55, 100)]
        [0.1, 0.5, 1.0, 0.5, 0.0]
    """

    name: str = _key(
        "constant",
        "Shape of the learning rate schedule after the warm-up",
        choices=("constant", "cosine", "linear", "step"),
    )
    warmup: int = _key(0, "Number of warm-up steps, in which learning rates increase from near 0", least=0)
    final: float = _key(0.0, "Factor of the learning rates at the end (cosine, linear)", least=0.0, most=1.0)
    step_size: int = _key(1000, "Number of steps between two reductions of the learning rates (step schedule)", least=1)
    gamma: float = _key(0.1, "Factor of each reduction of the learning rates (step schedule)", above=0.0, most=1.0)

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

    epochs: int = _key(10, "Number of passes over the training data", least=1)
    steps: int = _key(0, "Maximum number of steps; 0: no maximum", least=0)
    batch_size: int = _key(
        256,
        "Number of examples per batch, summed over all ranks; for text: number of columns that are read in parallel",
        least=1,
    )
    accumulate: int = _key(1, "Number of batches per step (gradient accumulation)", least=1)
    seed: int = _key(0, "Random seed of initial values, data order, draws and dropout", least=0)
    device: str = _key("cpu", 'Device to train on, for example "cuda"')
    shard: str = _key(
        "none",
        "classes: distribute the class table and each batch over the ranks of torchrun (see docs/scale.md)",
        choices=("none", "classes"),
    )
    shard_encoder: str = _key(
        "ddp",
        "How the encoder is parallelized if `shard` is on: by DistributedDataParallel, or by FSDP2, which"
        " also shards it",
        choices=("ddp", "fsdp"),
    )
    rank_timeout: float = _key(
        1800.0,
        "Seconds that a rank waits for the others before it stops and names those that do not respond (with `shard`)",
        above=0.0,
    )
    threads: int = _key(
        0, "Number of CPU threads of torch; 0: torch's default. Bit-identical results require the same number", least=0
    )
    precision: str = _key("float32", "Precision of the encoder; bfloat16: by autocast", choices=("float32", "bfloat16"))
    clip_norm: float = _key(0.0, "Maximum norm of the encoder's gradient; 0: no clipping", least=0.0)
    clip_head: bool = _key(False, "Include the head in the norm for gradient clipping; the head is then not fused")
    log_every: int = _key(50, "Number of steps between two records of the training loss", least=1)
    eval_every: int = _key(0, "Number of steps between two evaluations; 0: after each epoch", least=0)
    eval_batch_size: int = _key(0, "Number of examples per batch in evaluation; 0: same as `batch_size`", least=0)
    eval_rows: int = _key(0, "Maximum number of validation examples; 0: all", least=0)
    metrics: list[str] = _key(
        ["nll", "accuracy"], "Metrics to report: nll, perplexity, accuracy, mrr, precision@k, recall@k, ndcg@k, psp@k"
    )
    propensity_a: float = _key(
        0.55, "Parameter A of the propensities for psp@k (Jain et al. 2016); 0.5 for Wikipedia, 0.6 for Amazon data"
    )
    propensity_b: float = _key(
        1.5, "Parameter B of the propensities for psp@k; 0.4 for Wikipedia, 2.6 for Amazon data", above=0.0
    )
    exclude_history: bool = _key(
        False, "Leave out items that a user already knows, in evaluation and in `samplex predict` (interactions)"
    )
    monitor: str = _key("nll", "Metric for early stopping and for selecting the best weights")
    monitor_mode: str = _key(
        "auto",
        "Whether a lower (min) or higher (max) value of `monitor` is better; auto: min for nll, "
        "perplexity and loss, otherwise max",
        choices=("auto", "min", "max"),
    )
    patience: int = _key(0, "Stop after so many evaluations without improvement; 0: never", least=0)
    min_delta: float = _key(0.0, "Minimum change of `monitor` that counts as an improvement", least=0.0)
    checkpoint_every: int = _key(0, "Number of steps between two checkpoints; 0: after each epoch", least=0)
    keep: int = _key(3, "Number of latest checkpoints to keep", least=1)
    keep_best: bool = _key(True, "Keep the weights of the best evaluation in `best/`")
    on_save_error: str = _key(
        "stop",
        "If a checkpoint cannot be written: stop, or continue and try the next one",
        choices=("stop", "continue"),
    )
    on_nan: str = _key("stop", "If a loss is not finite: stop, or skip the step", choices=("stop", "skip"))
    max_skipped: int = _key(10, "Stop after so many skipped steps in succession", least=1)
    average: str = _key(
        "none",
        "Weight averaging: exponential moving average (ema), or the mean of all weights since `average_start` (swa)",
        choices=("none", "ema", "swa"),
    )
    average_decay: float = _key(0.999, "Decay of the exponential moving average, per step", least=0.0, below=1.0)
    average_start: int = _key(0, "Step at which weight averaging starts", least=0)
    average_every: int = _key(1, "Number of steps between two updates of the average", least=1)
    average_head: bool = _key(False, "Also average the class table, at a cost of O(C d) per update of the average")
    tensorboard: bool = _key(False, "Write TensorBoard files")
    plot: bool = _key(True, "Plot learning curves into plots/ if matplotlib is installed")


@dataclasses.dataclass
class Config:
    """A whole run.

    Example:
        >>> from samplex_cuda.training import config
        >>> run = config.Config(model=config.Model(name="mlp", dim=32))
        >>> run.resolved().head.num_samples
        1024
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
                check_value(source, table.name, field, getattr(part, field.name))
        check_together(source, self)
        return self

    def resolved(self) -> Config:
        """A copy in which sampler, draws and sharing are named instead of "auto": what `config.toml` of a run holds."""
        found = copy.deepcopy(self)
        s, h = found.sampler, found.head
        if h.shared == "auto":
            h.shared = s.name in ("auto", "in_batch")
        if s.name == "auto":
            s.name = "unigram"
        if h.num_samples == "auto":
            h.num_samples = 1024 if h.shared else 64
        if s.base == "auto":
            s.base = "unigram" if s.name == "tree" or (s.name in MIXED and not h.stratified) else "none"
            s.base = "uniform" if s.name == "in_batch" else s.base
        if s.nu == "auto":
            s.nu = h.scale if h.scale > 0 else 1.0
        return found

    @property
    def fused(self) -> bool:
        """Whether the head is updated inside backward."""
        draws = make_loss(self.head, num_examples=1).needs.draws
        possible = draws and not self.model.tied and not self.training.clip_head
        return possible if self.optimizer.fused == "auto" else bool(self.optimizer.fused)
