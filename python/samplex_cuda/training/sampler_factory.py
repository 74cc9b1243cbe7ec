"""Samplers by name: made from a configuration, the training data and a head, and fitted to them."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import samplex_cuda.tree_fit as fitting
from samplex_cuda import samplers
from samplex_cuda.data import Dataset
from samplex_cuda.heads import SampledClassifier
from samplex_cuda.rng import Key
from samplex_cuda.training import checkpoint
from samplex_cuda.training.config import Config, ConfigError
from samplex_cuda.training.config.checks import MIXED, make_loss
from samplex_cuda.training.encoders import MLP, Encoder, InputMap, Linear, _csr, context_of

__all__ = ["make_sampler", "read_tree", "refit_epochs", "refit_tree"]

_COVARIANCE_WIDTH = 1024  # up to here PCA sums the covariance chunk by chunk and keeps no rows
_CHUNK_ROWS = 4096
_HELD_OUT = 4096  # examples that a fit of a tree with a base is judged by, at most
_FEWEST = 50  # and at least
_HELD_OUT_KEY = 0x7EE5


def _some_rows(dataset: Dataset, limit: int, seed: int) -> Tensor:
    """Ascending rows of a data set, at most `limit`."""
    total = len(dataset)
    if total <= limit:
        return torch.arange(total)
    if dataset.ordered:
        return torch.arange(limit)
    generator = torch.Generator().manual_seed(seed)
    if total < 1 << 24:
        return torch.randperm(total, generator=generator)[:limit].sort().values
    return torch.randint(total, (limit,), generator=generator).unique()


def _chunks(dataset: Dataset, rows: Tensor) -> Iterator[dict[str, Tensor]]:
    for part in rows.split(_CHUNK_ROWS):
        yield dataset.batch(part)


@torch.no_grad()
def _fit_map(target: InputMap, dataset: Dataset, config: Config, whiten: bool) -> None:
    """Principal components of the training data, in passes over it."""
    width, dim = target.projection.shape
    passes = 30 if dim <= 64 else 6  # many components settle late, and the last of them matter little
    rows = _some_rows(dataset, config.sampler.fit_rows, config.training.seed)
    if dataset.kind == "dense" and width <= _COVARIANCE_WIDTH:
        mean, projection = _streamed_pca(dataset, rows, dim, whiten)
    elif dataset.kind == "dense":
        x = torch.cat([batch["x"] for batch in _chunks(dataset, rows)])
        mean, projection = fitting.fit_pca(x, dim, whiten=whiten, seed=config.training.seed, passes=passes)
    else:
        parts = [_csr(batch) for batch in _chunks(dataset, rows)]
        lengths = torch.cat([offsets.diff() for _, offsets, _ in parts])
        csr = SimpleNamespace(  # what `fit_pca` needs of a scipy CSR matrix
            format="csr",
            indptr=np.concatenate([[0], np.cumsum(lengths.numpy())]),
            indices=torch.cat([ids for ids, _, _ in parts]).numpy(),
            data=torch.cat([values for _, _, values in parts]).numpy(),
            shape=(len(lengths), width),
            dtype=np.dtype(np.float32),
        )
        mean, projection = fitting.fit_pca(csr, dim, whiten=whiten, seed=config.training.seed, passes=passes)
    target.mean.copy_(mean)
    target.projection.copy_(projection)


def _streamed_pca(dataset: Dataset, rows: Tensor, dim: int, whiten: bool) -> tuple[Tensor, Tensor]:
    """As `fit_pca` for narrow data, but no row is kept: mean and covariance in two passes."""
    width = dataset.num_features
    total = torch.zeros(width, dtype=torch.float64)
    for batch in _chunks(dataset, rows):
        total += batch["x"].double().sum(0)
    mean = total / len(rows)
    covariance = torch.zeros(width, width, dtype=torch.float64)
    for batch in _chunks(dataset, rows):
        centred = batch["x"].double() - mean
        covariance += centred.T @ centred
    values, vectors = torch.linalg.eigh(covariance / len(rows))
    values, vectors = values.flip(0)[:dim], vectors.flip(1)[:, :dim]
    largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
    projection = vectors * torch.where(largest < 0, -1.0, 1.0)
    if whiten:
        spread = values.clamp(min=0).sqrt()
        projection = projection / torch.where(spread > 1e-6 * spread.max(), spread, torch.ones_like(spread))
    return mean.float(), projection.float()


def _given(module: nn.Module, call: Callable[[dict[str, Tensor]], Tensor], batch: dict[str, Tensor]) -> Tensor:
    """What a method of a module gives for a batch of the host: computed where the module is, back on the host."""
    device = next((t.device for t in (*module.parameters(), *module.buffers())), torch.device("cpu"))
    return call({name: t.to(device) for name, t in batch.items()}).cpu()


def _pairs(z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Features [n, k] and labels [n] of every target: z [B', k], y [B'] or [B', P]."""
    y = y.reshape(z.shape[0], -1)
    row, column = (y >= 0).nonzero(as_tuple=True)
    return z[row], y[row, column]


def _empty_tree(num_classes: int, num_features: int, dim: int) -> samplers.Tree:
    """A tree of the right sizes whose parameters a checkpoint will bring."""
    leaves = 1 << (num_classes - 1).bit_length()
    leaf_class = torch.cat([torch.arange(num_classes), torch.full((leaves - num_classes,), -1)])
    return samplers.Tree(
        torch.zeros(leaves, dim),
        torch.zeros(leaves),
        leaf_class,
        mean=torch.zeros(num_features),
        projection=torch.zeros(num_features, dim),
    )


def _beside(config: Config) -> str:
    """The first sampler of a mixture that must look at h, since all of them are given the same; empty: none."""
    return next((name for name in config.sampler.components if name in ("quadratic", "rff", "midx", "softmax")), "")


def _looks_at(config: Config, dataset: Dataset, encoder: Encoder) -> str:
    """ "hidden" (h itself), "input" (dense) or "map" (sparse input through principal components)."""
    asked = config.sampler.features
    if isinstance(encoder, Linear) and not isinstance(encoder, MLP):
        return "hidden"  # h is the input
    if asked == "hidden" or (asked == "auto" and (dataset.kind == "text" or _beside(config))):
        return "hidden"
    if _beside(config):
        raise ConfigError(
            f'config: [sampler] features must be "auto" or "hidden" in a mixture with {_beside(config)}, which looks '
            'at h, got "input"'
        )
    if dataset.kind == "text":
        raise ConfigError('config: [sampler] features must be "auto" or "hidden" for text, got "input"')
    return "input" if isinstance(encoder, MLP) else "map"


def read_tree(path: str | Path) -> samplers.Tree:
    """The tree of a file that `samplex fit-tree` wrote.

    Args:
        path: of the file.

    Example:
        >>> import tempfile, torch
        >>> from samplex_cuda.training import checkpoint, models
        >>> parts = {"weights": torch.zeros(4, 2), "bias": torch.zeros(4), "leaf_class": torch.tensor([2, 0, 1, -1])}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     checkpoint.write_tensors(f"{folder}/tree.safetensors", parts)
        ...     models.read_tree(f"{folder}/tree.safetensors").num_classes
        3
    """
    try:
        parts: dict[str, Any] = dict(checkpoint.read_tensors(path))
        return samplers.Tree(**parts)
    except (checkpoint.CheckpointError, TypeError, ValueError, RuntimeError, IndexError) as error:
        reason = str(error)
    raise ConfigError(f"config: [sampler] path must be a file of samplex fit-tree, got {str(path)!r}: {reason}")


def _stored_tree(config: Config, dataset: Dataset, encoder: Encoder, fit: bool) -> samplers.Tree:
    """The tree of `sampler.path`. Where the encoder gives another thing than the raw input that the tree was fitted to,
    the input goes through the file's projection to the tree."""
    s, classes = config.sampler, dataset.num_classes
    if s.features == "hidden" or dataset.kind == "text":
        look, width = "h, the output of the encoder", encoder.out_features
    else:
        look, width = "the input", dataset.num_features
    raw = isinstance(encoder, Linear) and encoder.input is None and not encoder.normalize  # dense x as it is
    mapped = look == "the input" and not raw
    if _beside(config) and look == "the input" and not (raw and not isinstance(encoder, MLP)):
        raise ConfigError(
            f"config: [sampler] path must be empty in a mixture with {_beside(config)}, which uses h where the "
            f"tree uses the input, got {s.path!r}"
        )
    dim = min(s.dim, width)
    if mapped:
        encoder.tree_map = InputMap(width, dim)
    elif look == "the input" and isinstance(encoder, MLP):
        encoder.sees_input = True
    if not fit:
        return _empty_tree(classes, dim if mapped else width, dim)
    tree = read_tree(s.path)
    for what, wanted, got in (
        ("classes, as the data", classes, tree.num_classes),
        (f"features, as {look}", width, tree.num_features),
        ("components, as sampler.dim says", dim, tree.dim),
    ):
        if wanted != got:
            raise ConfigError(f"config: [sampler] path must be a tree over {wanted:,} {what}, got {got:,} in {s.path}")
    if not mapped:
        return tree
    assert encoder.tree_map is not None
    encoder.tree_map.mean.copy_(tree.mean)
    encoder.tree_map.projection.copy_(tree.projection)
    weights, bias = tree.parameters_of_nodes()
    return samplers.Tree(weights, bias, tree.leaf_class, mean=torch.zeros(dim), projection=torch.eye(dim))


def _tree(config: Config, dataset: Dataset, encoder: Encoder, fit: bool, again: bool = False) -> samplers.Tree:
    s, classes = config.sampler, dataset.num_classes
    if s.path and not again:
        return _stored_tree(config, dataset, encoder, fit)
    look = _looks_at(config, dataset, encoder)
    if look == "input":
        assert isinstance(encoder, MLP)
        encoder.sees_input = True
        width = encoder.input.projection.shape[1] if encoder.input is not None else dataset.num_features
    elif look == "map":
        width = dataset.num_features
    else:
        width = encoder.out_features
    dim = min(s.dim, width)
    if look == "map":
        encoder.tree_map = InputMap(width, dim)
        if fit:
            _fit_map(encoder.tree_map, dataset, config, False)
        width = dim
    if not fit:
        return _empty_tree(classes, width, dim)
    if look == "hidden" and (isinstance(encoder, MLP) or not isinstance(encoder, Linear)):
        z, y = _hidden(config, dataset, encoder)
    else:
        get: Any = encoder.tree_map if look == "map" else getattr(encoder, "inputs", None)
        if not isinstance(encoder, MLP) and look != "map":
            get = encoder  # h is the input, scaled or not
        rows = _some_rows(dataset, s.fit_rows, config.training.seed)
        if look != "map" and dataset.kind == "dense" and width <= _COVARIANCE_WIDTH and not encoder.normalize:
            return _streamed_tree(config, dataset, encoder, rows, dim)
        with torch.no_grad():
            module = get if look == "map" else encoder
            parts = [_pairs(_given(module, get, batch), batch["y"]) for batch in _chunks(dataset, rows)]
        z, y = (torch.cat(part) for part in zip(*parts, strict=True))
    kept, held = _split(config, y)
    if look == "map":
        # Already components: a projection that changes nothing.
        fitted = fitting.fit_tree(z[kept], y[kept], classes, reg=s.reg, unseen=s.unseen)
        tree = samplers.Tree(
            fitted.weights, fitted.bias, fitted.leaf_class, mean=torch.zeros(dim), projection=torch.eye(dim)
        )
    else:
        tree = samplers.Tree.fit(
            z[kept], y[kept], num_classes=classes, dim=dim, reg=s.reg, seed=config.training.seed, progress=False,
            unseen=s.unseen,
        )  # fmt: skip
    return _with_base(config, dataset, tree, z, y, kept, held)


@torch.no_grad()
def _streamed_tree(config: Config, dataset: Dataset, encoder: Any, rows: Tensor, dim: int) -> samplers.Tree:
    """The tree of dense input, of which only `dim` components a row are held."""
    if encoder.input is None:
        mean, projection = _streamed_pca(dataset, rows, dim, False)
    else:  # principal components already: the first ones are theirs
        width = encoder.input.projection.shape[1]
        mean, projection = torch.zeros(width), torch.eye(width)[:, :dim]
    parts = []
    for batch in _chunks(dataset, rows):
        parts.append(_pairs((_given(encoder, encoder.inputs, batch) - mean) @ projection, batch["y"]))
    z, y = (torch.cat(part) for part in zip(*parts, strict=True))
    kept, held = _split(config, y)
    fitted = fitting.fit_tree(
        z[kept], y[kept], dataset.num_classes, reg=config.sampler.reg, unseen=config.sampler.unseen
    )
    bare = samplers.Tree(fitted.weights, fitted.bias, fitted.leaf_class)  # z are what its nodes see
    share = float(_with_base(config, dataset, bare, z, y, kept, held).base_share)
    tree = samplers.Tree(fitted.weights, fitted.bias, fitted.leaf_class, mean=mean, projection=projection)
    if _inside(config):
        tree.set_base(_base_of(config, dataset, fit=True), share)
    return tree


def refit_epochs(config: Config, dataset: Dataset, encoder: Encoder) -> int:
    """Epochs between two fits of the tree, 0 for never: `sampler.refit_every`, where "auto" is 1 for a tree with a base
    that looks at what a trained encoder gives.

    Example:
        >>> import torch
        >>> from samplex_cuda import data
        >>> from samplex_cuda.training import Config, config, models
        >>> from samplex_cuda.training.sampler_factory import refit_epochs
        >>> train = data.Dense(torch.randn(200, 6), torch.randint(0, 9, (200,)))
        >>> run = config.override(Config(), ["model.name=mlp", "sampler.name=tree", "sampler.features=hidden"])
        >>> encoder, head = models.build(run, train)
        >>> refit_epochs(run.resolved(), train, encoder)
        1
    """
    config, every = config.resolved(), config.sampler.refit_every
    if every != "auto":
        return int(every)
    fixed = isinstance(encoder, Linear) and not isinstance(encoder, MLP)  # h is the input
    prior = make_loss(config.head, 1).needs.prior  # its scores are relative to one distribution
    if not _inside(config) or config.sampler.path or fixed or prior:
        return 0
    return int(_looks_at(config, dataset, encoder) == "hidden")


def _inside(config: Config) -> bool:
    """Whether the sampler is a tree that takes its base itself: one draw, and not a mixture in Python."""
    return config.sampler.name == "tree" and config.sampler.base in ("unigram", "uniform")


def _base_of(config: Config, dataset: Dataset, fit: bool) -> samplers.Unigram:
    """The base of a tree; without `fit` a checkpoint brings its counts."""
    s, classes = config.sampler, dataset.num_classes
    if s.base == "uniform" or not fit:
        return samplers.Unigram(torch.ones(classes))
    # The base leaves out what the tree leaves out.
    return samplers.Unigram(dataset.class_counts().double() + (s.smoothing if s.unseen else 0.0), power=s.power)


def _split(config: Config, y: Tensor) -> tuple[Tensor | slice, Tensor]:
    """Examples to fit a tree with a base to, and a tenth of them, at most 4,096, to look at its fit; by the seed."""
    count = min(len(y) // 10, _HELD_OUT)
    if not _inside(config) or count < _FEWEST:
        return slice(None), torch.empty(0, dtype=torch.int64)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(config.training.seed ^ _HELD_OUT_KEY))
    return order[count:].sort().values, order[:count]


@torch.no_grad()
def _with_base(
    config: Config, dataset: Dataset, tree: samplers.Tree, z: Tensor, y: Tensor, kept: Tensor | slice, held: Tensor
) -> samplers.Tree:
    """The tree with its base; the base alone where it tells held-out examples better than the tree."""
    if not _inside(config):
        return tree
    share = config.sampler.base_weight
    if len(held):
        counts = torch.bincount(y[kept], minlength=dataset.num_classes).double() + 1.0
        of_counts = float((counts / counts.sum()).log()[y[held]].mean())
        of_tree = float(tree.log_prob(z[held], y[held]).double().clamp_min(-1e4).mean())
        if not of_tree >= of_counts:
            share = 1.0
            warnings.warn(
                f"tree: on {len(held):,} held-out examples its mean log-probability is {of_tree:.4g}, that of class "
                f"frequencies is {of_counts:.4g}; draws come from sampler.base ({config.sampler.base}) alone until a "
                "later fit is better",
                stacklevel=2,
            )
    tree.set_base(_base_of(config, dataset, fit=True), share)
    return tree


@torch.no_grad()
def _hidden(config: Config, dataset: Dataset, encoder: Encoder) -> tuple[Tensor, Tensor]:
    """h and y of the training data as the encoder is now, on the CPU."""
    training, carried = encoder.training, encoder.carried()
    device = next((p.device for p in encoder.parameters()), torch.device("cpu"))
    encoder.eval()
    encoder.carry({})
    limit, found, parts = config.sampler.fit_rows, 0, []
    size = dataset.columns if dataset.ordered else _CHUNK_ROWS  # type: ignore[attr-defined]
    for rows in _some_rows(dataset, limit, config.training.seed).split(size):
        batch = dataset.batch(rows)
        h = encoder({name: t.to(device) for name, t in batch.items()})
        z, y = _pairs(h.reshape(-1, h.shape[-1]).float().cpu(), batch["y"].reshape(h[..., 0].numel(), -1))
        parts.append((z, y))
        found += y.shape[0]
        if found >= limit:
            break
    encoder.train(training)
    encoder.carry(carried)
    z, y = (torch.cat(part)[:limit] for part in zip(*parts, strict=True))
    return z, y


def refit_tree(config: Config, dataset: Dataset, encoder: Encoder, head: SampledClassifier) -> None:
    """Fit the head's tree (or that of its mixture) again, to what the encoder gives now; the rest is untouched.

    Example:
        >>> import torch
        >>> from samplex_cuda import data
        >>> from samplex_cuda.training import Config, config, models
        >>> train = data.Dense(torch.randn(200, 6), torch.randint(0, 9, (200,)))
        >>> run = config.override(Config(), ["model.name=mlp", "sampler.name=tree", "sampler.features=hidden"])
        >>> encoder, head = models.build(run, train)
        >>> models.refit_tree(run, train, encoder, head)
    """
    config = config.resolved()
    tree = _tree(config, dataset, encoder, fit=True, again=True).to(head.weight.device)
    if encoder.tree_map is not None:  # fitted again, on the host
        encoder.tree_map.to(head.weight.device)
    if _inside(config) and not tree.has_base:
        tree.set_base(_base_of(config, dataset, fit=True), config.sampler.base_weight)
    if not isinstance(head.sampler, samplers.Mixture):
        head.set_sampler(tree, update=head.sampler_update)
        return
    parts = head.sampler.samplers
    for number, part in enumerate(parts):
        if isinstance(part, samplers.Tree):
            parts[number] = tree


def _bigram(config: Config, dataset: Dataset, fit: bool) -> samplers.Bigram:
    s, classes = config.sampler, dataset.num_classes
    if dataset.kind not in ("text", "interactions"):
        raise ConfigError(f'config: [sampler] name must not be "bigram" for {dataset.kind} data')
    if not fit:
        return samplers.Bigram([0], [], [], torch.ones(classes), backoff=s.backoff, power=s.power)
    pairs, counts = np.empty(0, np.int64), np.empty(0, np.int64)
    for batch in _chunks(dataset, torch.arange(len(dataset))):
        context = context_of(batch)
        assert context is not None
        before, after = _pairs(context[:, None], batch["y"].reshape(context.shape[0], -1))
        before = before[:, 0]
        kept = before >= 0
        new, times = np.unique((before[kept] * classes + after[kept]).numpy(), return_counts=True)
        joined, place = np.unique(np.concatenate([pairs, new]), return_inverse=True)
        counts = np.bincount(place, weights=np.concatenate([counts, times]), minlength=len(joined)).astype(np.int64)
        pairs = joined
    offsets = np.searchsorted(pairs, np.arange(dataset.num_features + 1) * classes)
    unigram = dataset.class_counts().double() + s.smoothing
    return samplers.Bigram(offsets, pairs % classes, counts, unigram, backoff=s.backoff, power=s.power)


def make_sampler(
    config: Config, dataset: Dataset, encoder: Encoder, head: SampledClassifier, fit: bool
) -> samplers.Sampler:
    """The sampler of a resolved configuration, with the fixed distribution that is mixed into some.

    A tree or a kernel alone may give next to nothing to a class that the model rates high. Such a class is never drawn,
    so the sampled loss does not see it and training drives it up: the loss falls while the exact one rises.
    """
    s = config.sampler
    if s.name == "in_batch":
        extra = None if s.base == "none" else _sampler(s.base, config, dataset, encoder, head, fit)
        buckets = s.frequency_buckets or min(dataset.num_classes, 1 << 26)
        frequency = samplers.StreamingFrequency(buckets, kind=s.frequency, rate=s.frequency_rate)
        return samplers.InBatch(dataset.num_classes, frequency, extra=extra)
    found = _sampler(s.name, config, dataset, encoder, head, fit)
    if _inside(config):
        if isinstance(found, samplers.Tree) and not found.has_base:  # of a file, or of a checkpoint to come
            found.set_base(_base_of(config, dataset, fit), s.base_weight)
        return found
    if s.name not in MIXED or s.base == "none":
        return found
    if not s.unseen:  # the base leaves out what the tree leaves out
        config = copy.deepcopy(config)
        config.sampler.smoothing = 0.0
    base = _sampler(s.base, config, dataset, encoder, head, fit)
    return samplers.Mixture([(found, 1.0 - s.base_weight), (base, s.base_weight)])


def _check_order(counts: Tensor) -> None:
    """Warns where ids are not sorted by decreasing frequency, as log-uniform draws assume.

    Of sorted ids, the k-th class has a share of at most 1 / (k + 1), so at most about 1.45 log(C + 1) times its
    probability.
    """
    total, classes = float(counts.sum()), len(counts)
    if total <= 0:
        return
    rank = torch.arange(classes, dtype=torch.float64)
    over = counts.double() / total * math.log(classes + 1) / torch.log1p(1.0 / (rank + 1.0))
    worst = int(over.argmax())
    if float(over[worst]) > 3 * 1.45 * math.log(classes + 1):
        warnings.warn(
            f"log_uniform: class ids must be sorted by decreasing frequency, but class {worst:,} of {classes:,} has "
            f"{float(counts[worst]) / total:.2%} of the targets and is drawn {float(over[worst]):,.0f} times too "
            "rarely; use sampler unigram",
            stacklevel=2,
        )


def _sampler(
    name: str, config: Config, dataset: Dataset, encoder: Encoder, head: SampledClassifier, fit: bool
) -> samplers.Sampler:
    s, classes = config.sampler, dataset.num_classes
    weight, bias = head.weight.detach(), None if head.bias is None else head.bias.detach()
    if name == "uniform":
        return samplers.Uniform(classes)
    if name == "log_uniform":
        if fit:
            _check_order(dataset.class_counts())
        return samplers.LogUniform(classes)
    if name == "unigram":
        counts = dataset.class_counts().double() + s.smoothing if fit else torch.ones(classes)
        return samplers.Unigram(counts, power=s.power)
    if name == "bigram":
        return _bigram(config, dataset, fit)
    if name == "tree":
        return _tree(config, dataset, encoder, fit)
    kernel: Any = {"quadratic": samplers.Quadratic, "rff": samplers.RandomFourier}.get(name)
    if kernel is not None:
        options: dict[str, Any] = {"alpha": s.alpha}
        if name == "rff":
            options = {"num_features": s.num_features, "nu": float(s.nu), "kind": s.kind, "epsilon": s.epsilon}
            options |= {"normalize": s.normalize, "key": Key(config.training.seed)}
        if weight.is_meta:  # its numbers come when the head is sharded
            return kernel.deferred(classes, weight.shape[1], bias=bias is not None, **options)
        return kernel(weight, bias=bias, **options)
    if name == "midx":
        return samplers.MIDX(
            weight,
            s.num_codes,
            kind=s.codes,
            scale=head.scale,
            bias=bias,
            epsilon=s.epsilon,
            key=Key(config.training.seed),
        )
    if name == "softmax":
        return samplers.Softmax(head.weight, head.bias, scale=head.scale, absolute=head.loss.absolute, copy=False)
    parts = [_sampler(part, config, dataset, encoder, head, fit) for part in s.components]
    return samplers.Mixture(list(zip(parts, s.weights, strict=True)))
