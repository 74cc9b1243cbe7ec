"""Models by name: encoders, samplers, heads and optimizers, made from a configuration and a data set.

`build` makes the encoder and the head; `optimizers` makes what updates them. Encoders are in `encoders`, what makes and
fits samplers is in `sampler_factory`; both can be had from here.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from samplex_cuda import losses, optim, samplers
from samplex_cuda.data import Dataset
from samplex_cuda.heads import SampledClassifier
from samplex_cuda.rng import Key
from samplex_cuda.training.config import Config, ConfigError
from samplex_cuda.training.config.checks import MODELS, make_loss
from samplex_cuda.training.encoders import (
    MLP,
    Custom,
    EmbeddingBag,
    Encoder,
    InputMap,
    LanguageModel,
    Linear,
    Sequence,
    context_of,
    index_of,
)
from samplex_cuda.training.sampler_factory import _fit_map, make_sampler, read_tree, refit_tree

__all__ = [
    "MLP",
    "Custom",
    "EmbeddingBag",
    "Encoder",
    "InputMap",
    "LanguageModel",
    "Linear",
    "Sequence",
    "build",
    "check_trusted",
    "context_of",
    "index_of",
    "optimizers",
    "parts_of",
    "read_tree",
    "refit_tree",
    "row_tables",
]

_KINDS = {
    "linear": ("dense", "sparse"),
    "mlp": ("dense", "sparse"),
    "embedding_bag": ("sparse",),
    "lstm": ("text",),
    "gru": ("text",),
    "two_tower": ("interactions",),
    "sequence": ("interactions",),
}


def check_trusted(name: str, trust_model: str | None) -> None:
    """ConfigError unless the caller named the import path `name` himself: importing a module runs its code.

    Args:
        name: `model.name` of a configuration.
        trust_model: the import path that the caller allows; None: none.

    Example:
        >>> from samplex_cuda.training import ConfigError, models
        >>> models.check_trusted("linear", None)
        >>> try:
        ...     models.check_trusted("os:system", None)
        ... except ConfigError as error:
        ...     print(str(error).partition(";")[0])
        config: [model] name must be a built-in model unless you trust its code, got 'os:system'
    """
    if name in MODELS or name == trust_model:
        return
    if trust_model is not None:
        raise ConfigError(
            f"config: [model] name must be the trusted {trust_model!r}, got {name!r}; nothing was imported"
        )
    raise ConfigError(
        f"config: [model] name must be a built-in model unless you trust its code, got {name!r}; importing it runs "
        f"that code. If you know it: --trust-model {name} (in Python trust_model={name!r})"
    )


def _import(name: str) -> type[nn.Module]:
    module, _, attribute = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)  # a command does not look where it is started; last, so that it hides nothing
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            'config: [model] name must be a "package.module:Class" that can be imported, from an installed package, '
            f"the current folder or PYTHONPATH, got {name!r}: {error}"
        ) from None
    if not (isinstance(found, type) and issubclass(found, nn.Module)):  # before it is called: it may be any function
        raise ConfigError(
            f"config: [model] name must name a subclass of torch.nn.Module, got {name!r}, a {type(found).__name__}"
        )
    return found


def _encoder(config: Config, dataset: Dataset, fit: bool, trust_model: str | None) -> Encoder:
    m = config.model
    check_trusted(m.name, trust_model)
    wanted = _KINDS.get(m.name)
    if wanted is not None and dataset.kind not in wanted:
        raise ConfigError(
            f"config: [model] name must be a model for {dataset.kind} data, got {m.name!r}, which takes "
            f"{' or '.join(wanted)}"
        )
    hidden = m.hidden or m.dim
    encoder: Encoder
    if m.name in ("linear", "mlp"):
        if dataset.kind == "sparse" and not m.pca:
            raise ConfigError(
                f"config: [model] pca must be above 0 for {m.name} on sparse data (or take embedding_bag), got 0"
            )
        if m.pca > dataset.num_features:
            raise ConfigError(
                f"config: [model] pca must be at most {dataset.num_features}, the width of the input, got {m.pca}"
            )
        width = dataset.num_features
        encoder = Linear(width, m.pca) if m.name == "linear" else MLP(width, m.dim, hidden, m.layers, m.dropout, m.pca)
        if m.pca and fit:
            assert isinstance(encoder, Linear)
            assert encoder.input is not None
            _fit_map(encoder.input, dataset, config, m.whiten)
    elif m.name == "embedding_bag":
        encoder = EmbeddingBag(dataset.num_features, m.dim, hidden, m.layers, m.dropout, m.sparse)
    elif m.name in ("lstm", "gru"):
        encoder = LanguageModel(dataset.num_features, m.dim, hidden, m.layers, m.dropout, m.name, m.sparse)
    elif m.name in ("two_tower", "sequence"):
        pooling = "mean" if m.name == "two_tower" else m.pooling
        length = int(getattr(dataset, "history", 50))
        encoder = Sequence(dataset.num_features, m.dim, hidden, m.layers, m.dropout, pooling, m.heads, length, m.sparse)
    else:
        make = _import(m.name)
        known = {"num_features": dataset.num_features, "num_classes": dataset.num_classes, "dim": m.dim}
        try:
            names = inspect.signature(make).parameters
        except (TypeError, ValueError):
            names = {}  # type: ignore[assignment]
        options = {k: v for k, v in known.items() if k in names} | m.options
        try:
            module = make(**options)
        except TypeError as error:
            raise ConfigError(
                f"config: [model] options must be arguments of {m.name}, got {options}: {error}"
            ) from None  # fmt: skip
        encoder = module if isinstance(module, Encoder) else Custom(module, m.dim)
    encoder.normalize = m.normalize
    return encoder


def build(
    config: Config,
    dataset: Dataset,
    *,
    fit: bool = True,
    trust_model: str | None = None,
    head_device: str | None = None,
) -> tuple[Encoder, SampledClassifier]:
    """Encoder and head of a configuration, on its device.

    Initial values are a function of `training.seed`; torch's generators are left as they were.

    Args:
        config: what to make.
        dataset: the training data: it gives the sizes, class counts, and what PCA and trees are fitted to.
        fit: False leaves out what costs passes over the data: sizes are right, values come from a checkpoint.
        trust_model: `model.name` again, where it is an import path: its module is imported and its class called, so
            name only code that you know (docs/security.md).
        head_device: "meta" leaves the class table without numbers, for `head.shard`; None: that of the configuration.

    Returns:
        (encoder, head): `encoder.encode(batch)` gives h and the sampler's features, `head(h, y, features=...)` a loss.

    Example:
        >>> import torch
        >>> from samplex_cuda import data
        >>> from samplex_cuda.training import Config, build, config
        >>> train = data.Dense(torch.randn(200, 6), torch.randint(0, 9, (200,)))
        >>> encoder, head = build(config.override(Config(), ["sampler.name=tree"]), train)
        >>> batch = train.batch(torch.arange(4))
        >>> h, features = encoder.encode(batch)
        >>> head(h, batch["y"], features=features).dim()
        0
    """
    config = config.check().resolved()
    device = torch.device(config.training.device)
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        # Not torch.manual_seed: it seeds all CUDA devices, and the caller's generators there would not come back.
        torch.default_generator.manual_seed(config.training.seed)
        if cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(config.training.seed)
        encoder = _encoder(config, dataset, fit, trust_model)
        c, classes = config.head, dataset.num_classes
        examples = len(dataset) * (int(getattr(dataset, "window", 1)) if dataset.kind == "text" else 1)
        loss = make_loss(c, examples)
        draws = loss.needs.draws
        head = SampledClassifier(
            encoder.out_features,
            classes,
            samplers.Uniform(classes) if draws else None,  # until there are rows to make another from
            int(c.num_samples) if draws else None,
            loss,
            c.bias and not (c.normalize or c.learn_scale),
            shared=bool(c.shared),
            scale=c.scale,
            learn_scale=c.learn_scale,
            normalize=c.normalize,
            device=head_device,
            dtype=getattr(torch, c.dtype),
        )
        if config.model.tied:
            _tie(config, dataset, encoder, head)
        if draws:
            sampler = make_sampler(config, dataset, encoder, head, fit)
            head.set_sampler(sampler, update=_policy(config, loss))
            head.follower.reset()  # made from the rows as they are
            head.unique = c.unique
            head.stratified = c.stratified  # `config.check` knows that this sampler can
    if head_device is not None:
        for part in parts_of(head.sampler):
            part.to(device)
        return encoder.to(device), head
    if config.head.table == "host":
        head.host_table()
    return encoder.to(device), head.to(device)


def parts_of(sampler: Any) -> list[nn.Module]:
    """The samplers of a mixture, or the one that is none, without those whose numbers come from the class table.

    Example:
        >>> import samplex_cuda as sx
        >>> from samplex_cuda.training.models import parts_of
        >>> parts_of(sx.samplers.Mixture([(sx.samplers.Uniform(9), 1), (sx.samplers.Quadratic.deferred(9, 4), 1)]))
        [Uniform(9)]
    """
    parts = list(sampler.samplers) if isinstance(sampler, samplers.Mixture) else [sampler]
    return [part for part in parts if part is not None and not getattr(part, "collective", part.follows_rows)]


def _policy(config: Config, loss: losses.Loss) -> str | int | None:
    """How the sampler follows the class table; a scored table that moves (softmax) needs no telling."""
    names = set(config.sampler.components or [config.sampler.name])
    if loss.needs.prior or not names & {"quadratic", "rff", "midx"}:
        return None
    if config.sampler.update == "auto":  # an index chooses by the sizes of the first batch
        return "auto" if names & {"midx"} else "step"
    return config.sampler.update


def _tie(config: Config, dataset: Dataset, encoder: Any, head: SampledClassifier) -> None:
    if encoder.table.shape != head.weight.shape:
        raise ConfigError(
            f"config: [model] tied must be false if the table {list(encoder.table.shape)} is not the class table's "
            f"{list(head.weight.shape)}, got true"
        )
    encoder.table = head.weight


def row_tables(encoder: nn.Module, head: SampledClassifier) -> list[nn.Parameter]:
    """Embedding tables of an encoder that a row optimizer updates, without one tied to the head.

    Example:
        >>> import samplex_cuda as sx
        >>> from samplex_cuda.training.models import EmbeddingBag, row_tables
        >>> head = sx.SampledClassifier(4, 50, sx.samplers.Uniform(50), num_samples=5)
        >>> len(row_tables(EmbeddingBag(10, dim=4, hidden=4), head))
        1
    """
    found = encoder.tables() if isinstance(encoder, Encoder) else []
    return [p for p in found if p is not head.weight]


def optimizers(config: Config, encoder: nn.Module, head: SampledClassifier) -> dict[str, torch.optim.Optimizer]:
    """What updates a model: "head" (rows), "tables" (rows of sparse embeddings), "encoder" (the rest).

    Those without parameters are left out. With `optimizer.fused` the head's is not tied to it yet:
    `head.fuse_optimizer` does that.

    Example:
        >>> import torch
        >>> from samplex_cuda import data
        >>> from samplex_cuda.training import Config, build, optimizers
        >>> train = data.Dense(torch.randn(20, 6), torch.randint(0, 9, (20,)))
        >>> list(optimizers(Config(), *build(Config(), train)))
        ['head']
    """
    o = config.optimizer

    def rows(params: list[nn.Parameter], lr: float, number: int) -> optim.RowOptimizer:
        key = Key(config.training.seed ^ (0x5EED << 40), number << 48)
        common: dict[str, Any] = {
            "lr": lr, "weight_decay": o.weight_decay, "stochastic_rounding": o.stochastic_rounding, "key": key
        }  # fmt: skip
        if o.name == "sgd":
            return optim.RowSGD(params, momentum=o.momentum, **common)
        if o.name == "adagrad":
            return optim.RowAdagrad(
                params, initial_accumulator_value=o.initial_accumulator, rowwise=o.rowwise, **common
            )  # fmt: skip
        return optim.RowAdam(params, betas=(o.beta1, o.beta2), **common)

    of_head = [p for p in head.parameters() if p is not head.log_scale]
    found: dict[str, torch.optim.Optimizer] = {"head": rows(of_head, o.lr, 0)}
    tables = row_tables(encoder, head)
    if tables:
        found["tables"] = rows(tables, o.table_lr or o.lr, 1)
    taken = {id(p) for p in [*head.parameters(), *tables]}
    rest: list[Any] = [p for p in encoder.parameters() if id(p) not in taken and p.requires_grad]
    if head.log_scale is not None:  # a number, not rows; no decay pulls the scale to 1
        rest = [*([{"params": rest}] if rest else []), {"params": [head.log_scale], "weight_decay": 0.0}]
    if rest:
        lr, decay = o.encoder_lr, o.encoder_weight_decay
        if o.encoder == "sgd":
            found["encoder"] = torch.optim.SGD(rest, lr, momentum=o.encoder_momentum, weight_decay=decay)
        elif o.encoder == "adagrad":
            found["encoder"] = torch.optim.Adagrad(rest, lr, weight_decay=decay)
        elif o.encoder == "adam":
            found["encoder"] = torch.optim.Adam(rest, lr, weight_decay=decay)
        else:
            found["encoder"] = torch.optim.AdamW(rest, lr, weight_decay=decay)
    return found
