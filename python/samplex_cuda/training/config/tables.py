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
    negatives: str = _key(
        "", "negatives that the training data name, instead of the sampler's draws: a column of a parquet or npz file, "
        "or an npy file [N, m] padded with -100",
    )  # fmt: skip
    negatives_log_q: str = _key(
        "", "their log-probabilities under the distribution they were drawn from, in the same layout; empty: "
        "uncorrected",
    )  # fmt: skip
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
        "run: only with --trust-model",
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

    name: str = _key(
        "auto", "the distribution; auto: unigram, whose draws are shared by the batch", choices=("auto", *SAMPLERS)
    )
    choose_every: int = _key(
        0, "choose among `candidates` after so many steps, and again, by measured cost and error of the gradient; 0: "
        "never. See docs/auto.md", least=0,
    )  # fmt: skip
    candidates: list[str] = _key(
        ["unigram", "tree", "midx", "rff"], "`choose_every`: kinds of samplers to choose among; unigram must be one"
    )
    update: int | str = _key(
        "auto", 'quadratic, rff, midx: how often it follows the class table: "auto", "step", "epoch", or a number of '
        "steps", least=1, also=("auto", "step", "epoch"),
    )  # fmt: skip
    power: float = _key(1.0, "unigram, bigram: exponent on the counts", least=0.0)
    smoothing: float = _key(
        1.0, "unigram, bigram: added to the count of each class; 0: classes without an example are never drawn",
        least=0.0,
    )  # fmt: skip
    backoff: float = _key(0.1, "bigram: share of the unigram distribution", least=0.0, most=1.0)
    dim: int = _key(16, "tree: features a node looks at", least=1)
    reg: float = _key(0.1, "tree: strength of the regularizer of a node", above=0.0)
    unseen: bool = _key(
        True, "tree: false gives classes without an example probability 0, so that they are never drawn"
    )
    features: str = _key("auto", "tree: what it looks at, the input or the encoder's h; auto: the input if any",
                         choices=("auto", "input", "hidden"))  # fmt: skip
    fit_rows: int = _key(200_000, "tree, PCA: training examples that are used, at most", least=1)
    path: str = _key("", "tree: a file of `samplex fit-tree` to take instead of a fit; empty: fitted here")
    refit_every: int | str = _key(
        "auto", "tree, also in a mixture: fit again after so many epochs; 0: never; auto: 1 for a tree with a base "
        "that looks at h of an encoder that is trained (text, or features = hidden), else 0", least=0, also=("auto",),
    )  # fmt: skip
    refit_steps: int = _key(0, "the same, after so many steps; 0: never", least=0)
    base: str = _key(
        "auto", "tree, rff, quadratic: a fixed distribution that is mixed in, so that every class is drawn; auto: "
        "unigram (none with head.stratified, except for a tree); in_batch: where `head.num_samples` further draws come "
        "from; auto: uniform",
        choices=("auto", "none", "uniform", "log_uniform", "unigram"),
    )  # fmt: skip
    base_weight: float = _key(0.5, "share of `base`", above=0.0, below=1.0)
    frequency: str = _key(
        "gap", "in_batch: how frequencies are estimated: mean gaps between two occurrences, or a count-min sketch",
        choices=("gap", "sketch"),
    )  # fmt: skip
    frequency_rate: float = _key(0.02, "in_batch: weight of the newest observation", above=0.0, most=1.0)
    frequency_buckets: int = _key(0, "in_batch: size of the arrays; 0: one bucket per class, at most 2^26", least=0)
    alpha: float = _key(100.0, "quadratic: factor of the square", above=0.0)
    num_features: int = _key(1024, "rff: random features", least=1)
    nu: float | str = _key(
        "auto", "rff: sharpness of the kernel; auto: `head.scale`, that of the softmax", above=0.0, also=("auto",)
    )
    kind: str = _key("positive", "rff: of the features", choices=("rff", "orf", "positive"))
    num_codes: int = _key(256, "midx: codes of each of its two codebooks", least=1, most=2048)
    codes: str = _key(
        "residual", "midx: the second codebook is fitted to what the first leaves, or each to half of the columns",
        choices=("residual", "product"),
    )  # fmt: skip
    epsilon: float = _key(0.01, "rff, midx: share of the uniform distribution", least=0.0, below=1.0)
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

    loss: str = _key("sampled_softmax", "see docs/losses.md", choices=losses.names())
    num_samples: int | str = _key(
        "auto", "draws per row, or per batch with `shared`; auto: 64 per row, 1,024 per batch", least=1, also=("auto",)
    )
    shared: bool | str = _key(
        "auto", 'draw once for the whole batch; distributions that differ per row are averaged; auto: with the '
        'samplers "auto" and in_batch', also=("auto",),
    )  # fmt: skip
    stratified: bool = _key(
        False, "tree, midx with `shared`: stratified draws, which are less noisy than independent ones"
    )
    unique: bool | str = _key(
        False, "uniform, log_uniform, unigram, bigram: distinct draws, weighted by their inclusion probability; tf: as "
        "TensorFlow draws them", also=("tf",),
    )  # fmt: skip
    hard: int = _key(0, "hard negatives of each row besides the draws: classes that the model scores high", least=0)
    hard_source: str = _key(
        "pool", "what they are chosen from: `hard_pool` random classes, the beam of a tree sampler, all classes, or "
        "an index of the class rows (FAISS or USearch)",
        choices=("pool", "tree", "exact", "index"),
    )  # fmt: skip
    hard_pool: int = _key(4096, "random classes that a batch chooses from", least=1)
    hard_index: str = _key(
        "flat", 'kind of the index: "flat", "ivf", "hnsw", a string of `faiss.index_factory`, or "usearch"'
    )
    hard_refresh: int = _key(100, "steps that share an index; each checkpoint ends one, too", least=1)
    bias: bool = _key(True, "a bias per class; none with `normalize`")
    scale: float = _key(1.0, "inverse temperature: factor of the logits")
    learn_scale: bool = _key(
        False, "learn the scale, from `scale` on, with the optimizer of the encoder; there is no bias then"
    )
    normalize: bool = _key(False, "h and class rows on the unit sphere, see docs/faces.md (use with `scale`)")
    margin_m1: float = _key(1.0, "with `normalize`: factor of the target's angle (SphereFace)", least=1.0, most=4.0)
    margin_m2: float = _key(0.0, "with `normalize`: added to it (ArcFace)", least=0.0, most=1.5)
    margin_m3: float = _key(0.0, "with `normalize`: subtracted from its cosine (CosFace)", least=0.0, most=1.0)
    corrected: bool = _key(True, "sampled_softmax: correct draws by log q; false: as in Partial FC")
    absolute: bool = _key(False, "logits are absolute values")
    label_smoothing: float = _key(0.0, "as in cross_entropy", least=0.0, most=1.0)
    reg: float = _key(0.0, "negative_sampling: pulls scores to zero", least=0.0)
    eta_rate: float = _key(0.5, "augment_reduce: how fast eta moves", above=0.0, most=1.0)
    mask_known: bool = _key(
        False, "known positives of an example that are not its target are no negatives: its other labels, the other "
        "items of its user",
    )  # fmt: skip
    dtype: str = _key("float32", "of the class table", choices=("float32", "bfloat16"))
    table: str = _key(
        "device", "where the class table and its optimizer state are: with the encoder, or in memory of the host, from "
        "where touched rows cross", choices=("device", "host"),
    )  # fmt: skip


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
    stochastic_rounding: bool = _key(False, "bfloat16 class table: round up or down at random")
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
    batch_size: int = _key(256, "examples of a batch, of all ranks together; text: columns read side by side", least=1)
    accumulate: int = _key(1, "batches of one step", least=1)
    seed: int = _key(0, "of initial values, data order, draws, dropout", least=0)
    device: str = _key("cpu", 'where to train, e.g. "cuda"')
    shard: str = _key(
        "none", "classes: the class table is spread over the ranks of torchrun, and each batch too (docs/scale.md)",
        choices=("none", "classes"),
    )  # fmt: skip
    shard_encoder: str = _key(
        "ddp", "with `shard`, the encoder is in DistributedDataParallel, or in FSDP2, which spreads it, too",
        choices=("ddp", "fsdp"),
    )  # fmt: skip
    rank_timeout: float = _key(
        1800.0, "with `shard`, seconds that a rank waits for the others before it ends and names the silent ones",
        above=0.0,
    )  # fmt: skip
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
    propensity_a: float = _key(
        0.55, "psp@k: A of the propensities (Jain et al. 2016); 0.5 for Wikipedia, 0.6 for Amazon data"
    )
    propensity_b: float = _key(1.5, "psp@k: B of them; 0.4 for Wikipedia, 2.6 for Amazon data", above=0.0)
    exclude_history: bool = _key(
        False, "interactions: items that a user knows are no answers in evaluation and in `samplex predict`"
    )
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
