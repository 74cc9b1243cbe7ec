"""Models by name: encoders, samplers, heads and optimizers, made from a configuration and a data set.

An encoder is a module that takes a batch (a dict of tensors, see `samplex_cuda.data`) and gives h [*, d]. `build` makes
the encoder and the head; `optimizers` makes what updates them.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import samplex_cuda.tree as fitting
from samplex_cuda import optim, samplers
from samplex_cuda.data import Dataset
from samplex_cuda.heads import SampledClassifier
from samplex_cuda.rng import Key
from samplex_cuda.training.config import Config, ConfigError

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
    "context_of",
    "index_of",
    "optimizers",
    "refit_tree",
    "row_tables",
]

_COVARIANCE_WIDTH = 1024  # up to here PCA sums the covariance chunk by chunk and keeps no rows
_CHUNK_ROWS = 4096
_KINDS = {
    "linear": ("dense", "sparse"),
    "mlp": ("dense", "sparse"),
    "embedding_bag": ("sparse",),
    "lstm": ("text",),
    "gru": ("text",),
    "two_tower": ("interactions",),
    "sequence": ("interactions",),
}


# ---------------------------------------------------------------------------------------------------- batches
def context_of(batch: dict[str, Tensor]) -> Tensor | None:
    """What a bigram sampler conditions on, int64 [B']: the token itself, the last item of a history; None elsewhere.

    Example:
        >>> import torch
        >>> from samplex_cuda.training.models import context_of
        >>> context_of({"history": torch.tensor([[-1, 4], [2, 3]])})
        tensor([4, 3])
    """
    if "tokens" in batch:
        return batch["tokens"].reshape(-1)
    return batch["history"][:, -1].contiguous() if "history" in batch else None


def index_of(batch: dict[str, Tensor]) -> Tensor:
    """A number for each target of a batch, for `augment_reduce`: the row, or row and place of a token.

    Example:
        >>> import torch
        >>> from samplex_cuda.training.models import index_of
        >>> index_of({"index": torch.tensor([2]), "tokens": torch.zeros(1, 3, dtype=torch.long)})
        tensor([[6, 7, 8]])
    """
    index = batch["index"]
    if "tokens" not in batch:
        return index
    width = batch["tokens"].shape[1]
    return index[:, None] * width + torch.arange(width, device=index.device)


def _csr(batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Input of a batch as sparse rows: ids [nnz], offsets [B + 1], values [nnz]. A history is a mean of its items."""
    if "ids" in batch:
        return batch["ids"], batch["offsets"], batch["values"]
    ids, offsets = _histories(batch["history"])
    lengths = offsets.diff()
    return ids, offsets, (1.0 / lengths.float()).repeat_interleave(lengths)


def _histories(history: Tensor) -> tuple[Tensor, Tensor]:
    """Items [nnz] and offsets [B + 1] of padded histories [B, T]."""
    there = history >= 0
    offsets = torch.zeros(history.shape[0] + 1, dtype=torch.int64, device=history.device)
    torch.cumsum(there.sum(1), 0, out=offsets[1:])
    return history[there], offsets


class InputMap(nn.Module):
    """Principal components of the input, fitted once and kept fixed: batch -> [B, k].

    Args:
        num_features: K, the width of the input.
        dim: k.

    Example:
        >>> import torch
        >>> from samplex_cuda.training.models import InputMap
        >>> InputMap(3, 2)({"x": torch.zeros(4, 3)}).shape
        torch.Size([4, 2])
    """

    mean: Tensor
    projection: Tensor

    def __init__(self, num_features: int, dim: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(num_features))
        self.register_buffer("projection", torch.zeros(num_features, dim))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """Components [B, k] of a batch with "x", with sparse rows, or with histories."""
        if "x" in batch:
            return (batch["x"] - self.mean) @ self.projection
        ids, offsets, values = _csr(batch)
        rows = F.embedding_bag(
            ids, self.projection, offsets, mode="sum", per_sample_weights=values, include_last_offset=True
        )
        return rows - self.mean @ self.projection


# ---------------------------------------------------------------------------------------------------- encoders
class Encoder(nn.Module):
    """What the encoders here share; a module of your own may have any of it.

    Attributes:
        out_features: d.
        tree_map: what gives a tree sampler its features where the input is sparse; None elsewhere.

    Example:
        >>> from samplex_cuda.training.models import Encoder, Linear
        >>> isinstance(Linear(8), Encoder)
        True
    """

    out_features: int
    normalize = False

    def __init__(self) -> None:
        super().__init__()
        self.tree_map: InputMap | None = None

    def encode(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """h [*, d], and what the sampler looks at [*, f] where that is not h."""
        h = self(batch)
        return h, None if self.tree_map is None else self.tree_map(batch)

    def tables(self) -> list[nn.Parameter]:
        """Embedding tables with row gradients."""
        return []

    def carried(self) -> dict[str, Tensor]:
        """State that goes from a batch to the next."""
        return {}

    def carry(self, state: dict[str, Tensor]) -> None:
        """Takes over what `carried` gave; an empty dict forgets."""

    def _out(self, h: Tensor) -> Tensor:
        return F.normalize(h, dim=-1) if self.normalize else h


class Linear(Encoder):
    """h is the input itself, or its principal components: with the head, a linear classifier.

    Args:
        num_features: width of the input.
        pca: reduce it to so many components; 0: no.

    Example:
        >>> import torch
        >>> from samplex_cuda.training.models import Linear
        >>> Linear(3)({"x": torch.ones(2, 3)}).shape
        torch.Size([2, 3])
    """

    def __init__(self, num_features: int, pca: int = 0) -> None:
        super().__init__()
        self.out_features = pca or num_features
        self.input = InputMap(num_features, pca) if pca else None

    def inputs(self, batch: dict[str, Tensor]) -> Tensor:
        """The dense input [B, K] as the model sees it."""
        return batch["x"] if self.input is None else self.input(batch)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """h [B, d]."""
        return self._out(self.inputs(batch))


class MLP(Linear):
    """Hidden layers with ReLU between the input and h. A tree sampler looks at the input.

    Args:
        num_features: width of the input.
        dim: d.
        hidden: width of the hidden layers.
        layers: how many of them.
        dropout: after each of them.
        pca: reduce the input first; 0: no.

    Example:
        >>> import torch
        >>> from samplex_cuda.training.models import MLP
        >>> MLP(3, dim=4, hidden=8)({"x": torch.ones(2, 3)}).shape
        torch.Size([2, 4])
    """

    def __init__(
        self, num_features: int, dim: int, hidden: int, layers: int = 1, dropout: float = 0.0, pca: int = 0
    ) -> None:
        super().__init__(num_features, pca)
        self.body = _body(self.out_features, hidden, dim, layers, dropout)
        self.out_features = dim
        self.sees_input = False  # whether the sampler looks at the input

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """h [B, d]."""
        return self._out(self.body(self.inputs(batch)))

    def encode(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """h [B, d], and the input where the sampler looks at it."""
        x = self.inputs(batch)
        return self._out(self.body(x)), x if self.sees_input else None


def _body(width: int, hidden: int, dim: int, layers: int, dropout: float) -> nn.Sequential:
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(width, hidden), nn.ReLU(), nn.Dropout(dropout)]
        width = hidden
    return nn.Sequential(*parts, nn.Linear(width, dim))


def _table(rows: int, width: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(rows, width) / math.sqrt(width))


class EmbeddingBag(Encoder):
    """Weighted sums of feature embeddings, then hidden layers: for sparse rows of any width.

    Args:
        num_features: rows of the table.
        dim: d.
        hidden: width of the table and of the hidden layers; not used with layers=0.
        layers: linear maps after the sum; 0: the sum is h.
        dropout: after the sum and after each hidden layer.
        sparse: row gradients of the table.

    Example:
        >>> import torch
        >>> from samplex_cuda.training.models import EmbeddingBag
        >>> batch = {"ids": torch.tensor([5, 1, 2]), "offsets": torch.tensor([0, 1, 3]), "values": torch.ones(3)}
        >>> EmbeddingBag(10, dim=4, hidden=8)(batch).shape
        torch.Size([2, 4])
    """

    def __init__(
        self,
        num_features: int,
        dim: int,
        hidden: int,
        layers: int = 1,
        dropout: float = 0.0,
        sparse: bool = True,
    ) -> None:
        super().__init__()
        self.out_features, self.sparse = dim, sparse
        width = hidden if layers else dim
        self.table = _table(num_features, width)
        self.shift = nn.Parameter(torch.zeros(width))
        self.body = None
        if layers:
            self.body = nn.Sequential(
                nn.ReLU(), nn.Dropout(dropout), *_body(width, hidden, dim, layers - 1, dropout)
            )  # fmt: skip

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """h [B, d]."""
        ids, offsets, values = _csr(batch)
        h = F.embedding_bag(
            ids,
            self.table,
            offsets,
            mode="sum",
            per_sample_weights=values.to(self.table.dtype),
            sparse=self.sparse,
            include_last_offset=True,
        )
        h = h + self.shift
        return self._out(h if self.body is None else self.body(h))

    def tables(self) -> list[nn.Parameter]:
        """The table, where its gradients are rows."""
        return [self.table] if self.sparse else []


class LanguageModel(Encoder):
    """Token embeddings and an LSTM or GRU whose state goes on from batch to batch, detached.

    Args:
        vocabulary_size: rows of the table.
        dim: d, and the width of the embeddings.
        hidden: width of the recurrent layers; where it is not `dim`, a linear map follows.
        layers: recurrent layers.
        dropout: on embeddings, between layers and on the output.
        kind: "lstm" or "gru".
        sparse: row gradients of the table.

    Example:
        >>> import torch
        >>> from samplex_cuda.training.models import LanguageModel
        >>> model = LanguageModel(50, dim=8, hidden=16)
        >>> model({"tokens": torch.zeros(2, 5, dtype=torch.long)}).shape, sorted(model.carried())
        (torch.Size([2, 5, 8]), ['c', 'h'])
    """

    def __init__(
        self,
        vocabulary_size: int,
        dim: int,
        hidden: int,
        layers: int = 1,
        dropout: float = 0.0,
        kind: str = "lstm",
        sparse: bool = True,
    ) -> None:
        super().__init__()
        if layers < 1:
            raise ValueError(f"LanguageModel: layers must be at least 1, got {layers}")
        self.out_features, self.sparse = dim, sparse
        self.table = _table(vocabulary_size, dim)
        make = nn.LSTM if kind == "lstm" else nn.GRU
        self.rnn = make(dim, hidden, layers, batch_first=True, dropout=dropout if layers > 1 else 0.0)
        self.dropout = nn.Dropout(dropout)
        self.body = nn.Linear(hidden, dim) if hidden != dim else None
        self._state: tuple[Tensor, ...] = ()

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """h [B, T, d]; the state after the last token is kept for the next batch of as many rows."""
        x = self.dropout(F.embedding(batch["tokens"], self.table, sparse=self.sparse and self.training))
        state: Any = None
        if self._state and self._state[0].shape[1] == x.shape[0]:
            state = self._state if len(self._state) == 2 else self._state[0]
        out, new = self.rnn(x, state)
        self._state = tuple(t.detach() for t in (new if isinstance(new, tuple) else (new,)))
        h = self.dropout(out)
        return self._out(h if self.body is None else self.body(h))

    def tables(self) -> list[nn.Parameter]:
        """The table, where its gradients are rows."""
        return [self.table] if self.sparse else []

    def carried(self) -> dict[str, Tensor]:
        """h (and c) of the recurrent layers, [layers, B, hidden]."""
        return dict(zip(("h", "c"), self._state, strict=False))

    def carry(self, state: dict[str, Tensor]) -> None:
        """Takes over a state; an empty one forgets."""
        self._state = tuple(state[name] for name in ("h", "c") if name in state)


class Sequence(Encoder):
    """A vector of a history of items: the query tower; the class rows of the head are the item tower.

    Args:
        num_items: rows of the table.
        dim: d, and the width of the embeddings.
        hidden: width inside.
        layers: hidden layers ("mean"), or layers of the GRU or of attention.
        dropout: share.
        pooling: "mean" of the embeddings, then hidden layers; "gru"; "attention" (the last place of a causal
            transformer, as in SASRec).
        heads: of attention.
        history: longest history, for the places of attention.
        sparse: row gradients of the table.

    Example:
        >>> import torch
        >>> from samplex_cuda.training.models import Sequence
        >>> batch = {"history": torch.tensor([[-1, 3, 4], [-1, -1, -1]])}
        >>> [Sequence(10, 8, 16, pooling=p, history=3)(batch).shape[1] for p in ("mean", "gru", "attention")]
        [8, 8, 8]
    """

    def __init__(
        self,
        num_items: int,
        dim: int,
        hidden: int,
        layers: int = 1,
        dropout: float = 0.0,
        pooling: str = "mean",
        heads: int = 2,
        history: int = 50,
        sparse: bool = True,
    ) -> None:
        super().__init__()
        self.out_features, self.sparse, self.pooling = dim, sparse, pooling
        self.table = _table(num_items, dim)
        self.dropout = nn.Dropout(dropout)
        if pooling == "mean":
            self.body: Any = _body(dim, hidden, dim, layers, dropout) if layers else None
            return
        if layers < 1:
            raise ValueError(f"Sequence: layers must be at least 1 with pooling={pooling!r}, got {layers}")
        if pooling == "gru":
            self.rnn = nn.GRU(dim, hidden, layers, batch_first=True, dropout=dropout if layers > 1 else 0.0)
            self.body = nn.Linear(hidden, dim) if hidden != dim else None
            return
        if dim % heads:
            raise ValueError(f"Sequence: dim must be a multiple of the {heads} heads, got {dim}")
        self.places = nn.Parameter(torch.randn(history, dim) / math.sqrt(dim))
        layer = nn.TransformerEncoderLayer(dim, heads, hidden, dropout, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """h [B, d]."""
        history = batch["history"]
        sparse = self.sparse and self.training
        if self.pooling == "mean":
            ids, offsets = _histories(history)
            h = F.embedding_bag(ids, self.table, offsets, mode="mean", sparse=sparse, include_last_offset=True)
            h = self.dropout(h)
            return self._out(h if self.body is None else self.body(h))
        there = history >= 0
        # Only items that are there: padding must not touch a row.
        found = F.embedding(history[there], self.table, sparse=sparse)
        x = found.new_zeros(*history.shape, found.shape[1])
        x[there] = found
        if self.pooling == "gru":
            out = self.rnn(self.dropout(x))[0][:, -1]
            return self._out(out if self.body is None else self.body(out))
        width = history.shape[1]
        x = self.dropout(x + self.places[-width:])
        later = torch.ones(width, width, dtype=torch.bool, device=x.device).triu(1)
        hidden = ~there
        hidden[:, -1] = False  # a row without history attends to its last place, or softmax has nothing
        # A place before the history has nothing to attend to but itself; it is hidden from all others.
        mask = (later | hidden[:, None, :]) & ~torch.eye(width, dtype=torch.bool, device=x.device)
        heads = self.body.layers[0].self_attn.num_heads
        return self._out(self.body(x, mask=mask.repeat_interleave(heads, 0))[:, -1])

    def tables(self) -> list[nn.Parameter]:
        """The table, where its gradients are rows."""
        return [self.table] if self.sparse else []


class Custom(Encoder):
    """A module of your own: `module(batch)` gives h [*, d]. It may have `carried` and `carry`, and `tables`.

    Args:
        module: any module; `out_features`, or else `dim` of the configuration, says d.
        dim: d where the module does not say it.

    Example:
        >>> import torch
        >>> from samplex_cuda.training.models import Custom
        >>> class Sums(torch.nn.Module):
        ...     def forward(self, batch):
        ...         return batch["x"].cumsum(1)
        >>> Custom(Sums(), dim=3)({"x": torch.ones(1, 3)})
        tensor([[1., 2., 3.]])
    """

    def __init__(self, module: nn.Module, dim: int) -> None:
        super().__init__()
        self.module = module
        found = getattr(module, "out_features", dim)
        self.out_features = int(found) if isinstance(found, int) else dim

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """h [*, d]."""
        return self._out(self.module(batch))

    def tables(self) -> list[nn.Parameter]:
        """What the module says; else the weights of its sparse `nn.Embedding` and `nn.EmbeddingBag`."""
        own = getattr(self.module, "tables", None)
        if callable(own):
            return list(own())
        found: list[Any] = []
        for part in self.module.modules():
            if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
                found.append(part.weight)
        return found

    def carried(self) -> dict[str, Tensor]:
        """What the module carries."""
        own = getattr(self.module, "carried", None)
        return own() if callable(own) else {}

    def carry(self, state: dict[str, Tensor]) -> None:
        """Passed on to the module."""
        own = getattr(self.module, "carry", None)
        if callable(own):
            own(state)


def _import(name: str) -> Any:
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f'config: [model] name must be an importable "package.module:Class", got {name!r}: {error}'
        ) from None
    if not callable(found):
        raise ConfigError(f"config: [model] name must name a class or function, got {name!r}")
    return found


def _encoder(config: Config, dataset: Dataset, fit: bool) -> Encoder:
    m = config.model
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
        module = make(**options)
        if not isinstance(module, nn.Module):
            raise ConfigError(f"config: [model] name must give an nn.Module, got {type(module).__name__} from {m.name}")
        encoder = module if isinstance(module, Encoder) else Custom(module, m.dim)
    encoder.normalize = m.normalize
    return encoder


# ---------------------------------------------------------------------------------------------------- samplers
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


def _looks_at(config: Config, dataset: Dataset, encoder: Encoder) -> str:
    """ "hidden" (h itself), "input" (dense) or "map" (sparse input through principal components)."""
    asked = config.sampler.features
    if isinstance(encoder, Linear) and not isinstance(encoder, MLP):
        return "hidden"  # h is the input
    if asked == "hidden" or (asked == "auto" and dataset.kind == "text"):
        return "hidden"
    if dataset.kind == "text":
        raise ConfigError('config: [sampler] features must be "auto" or "hidden" for text, got "input"')
    return "input" if isinstance(encoder, MLP) else "map"


def _tree(config: Config, dataset: Dataset, encoder: Encoder, fit: bool) -> samplers.Tree:
    s, classes = config.sampler, dataset.num_classes
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
            parts = [_pairs(get(batch), batch["y"]) for batch in _chunks(dataset, rows)]
        z, y = (torch.cat(part) for part in zip(*parts, strict=True))
    if look == "map":
        # Already components: a projection that changes nothing.
        fitted = fitting.fit_tree(z, y, classes, reg=s.reg)
        return samplers.Tree(
            fitted.weights, fitted.bias, fitted.leaf_class, mean=torch.zeros(dim), projection=torch.eye(dim)
        )
    return samplers.Tree.fit(z, y, num_classes=classes, dim=dim, reg=s.reg, seed=config.training.seed, progress=False)


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
        parts.append(_pairs((encoder.inputs(batch) - mean) @ projection, batch["y"]))
    z, y = (torch.cat(part) for part in zip(*parts, strict=True))
    fitted = fitting.fit_tree(z, y, dataset.num_classes, reg=config.sampler.reg)
    return samplers.Tree(fitted.weights, fitted.bias, fitted.leaf_class, mean=mean, projection=projection)


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
    """Fit the head's tree anew, to what the encoder gives now; the rest of the head is untouched.

    Example:
        >>> import torch
        >>> from samplex_cuda import data
        >>> from samplex_cuda.training import Config, config, models
        >>> train = data.Dense(torch.randn(200, 6), torch.randint(0, 9, (200,)))
        >>> run = config.override(Config(), ["model.name=mlp", "sampler.name=tree", "sampler.features=hidden"])
        >>> encoder, head = models.build(run, train)
        >>> models.refit_tree(run, train, encoder, head)
    """
    device = head.weight.device
    tree = _tree(config, dataset, encoder, fit=True)
    head.sampler = tree.to(device)


def _bigram(config: Config, dataset: Dataset, fit: bool) -> samplers.Bigram:
    s, classes = config.sampler, dataset.num_classes
    if dataset.kind not in ("text", "interactions"):
        raise ConfigError(f'config: [sampler] name must be another for {dataset.kind} data, got "bigram"')
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


def _sampler(
    name: str, config: Config, dataset: Dataset, encoder: Encoder, head: SampledClassifier, fit: bool
) -> samplers.Sampler:
    s, classes = config.sampler, dataset.num_classes
    weight, bias = head.weight.detach(), None if head.bias is None else head.bias.detach()
    if name == "uniform":
        return samplers.Uniform(classes)
    if name == "log_uniform":
        return samplers.LogUniform(classes)
    if name == "unigram":
        counts = dataset.class_counts().double() + s.smoothing if fit else torch.ones(classes)
        return samplers.Unigram(counts, power=s.power)
    if name == "bigram":
        return _bigram(config, dataset, fit)
    if name == "tree":
        return _tree(config, dataset, encoder, fit)
    if name == "quadratic":
        return samplers.Quadratic(weight, alpha=s.alpha, bias=bias)
    if name == "rff":
        return samplers.RandomFourier(
            weight,
            s.num_features,
            s.nu,
            s.kind,
            epsilon=s.epsilon,
            bias=bias,
            normalize=s.normalize,
            key=Key(config.training.seed),
        )
    if name == "softmax":
        return samplers.Softmax(head.weight, head.bias, scale=head.scale, absolute=head.absolute, copy=False)
    parts = [_sampler(part, config, dataset, encoder, head, fit) for part in s.components]
    return samplers.Mixture(list(zip(parts, s.weights, strict=True)))


# ---------------------------------------------------------------------------------------------------- all together
def build(config: Config, dataset: Dataset, *, fit: bool = True) -> tuple[Encoder, SampledClassifier]:
    """Encoder and head of a configuration, on its device.

    Initial values are a function of `training.seed`; torch's generators are left as they were.

    Args:
        config: what to make.
        dataset: the training data: it gives the sizes, class counts, and what PCA and trees are fitted to.
        fit: False leaves out what costs passes over the data: sizes are right, values come from a checkpoint.

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
    config.check()
    device = torch.device(config.training.device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.training.seed)
        encoder = _encoder(config, dataset, fit)
        c = config.head
        follows = {"quadratic", "rff"} & set(config.sampler.components or [config.sampler.name])
        update: str | int | None = config.sampler.update
        if c.loss in ("negative_sampling", "full_softmax") or not follows:
            update = None
        elif update == "auto":
            update = "step"
        examples = None
        if c.loss == "augment_reduce":
            examples = len(dataset) * (int(getattr(dataset, "window", 1)) if dataset.kind == "text" else 1)
        full = c.loss == "full_softmax"
        head = SampledClassifier(
            encoder.out_features,
            dataset.num_classes,
            None if full else samplers.Uniform(dataset.num_classes),
            None if full else c.num_samples,
            c.loss,
            c.bias,
            shared=c.shared,
            scale=c.scale,
            absolute=c.absolute,
            label_smoothing=c.label_smoothing,
            reg=c.reg,
            num_examples=examples,
            eta_rate=c.eta_rate,
            sampler_update=update,
            dtype=getattr(torch, c.dtype),
        )
        if config.model.tied:
            _tie(config, dataset, encoder, head)
        if not full:
            # After the head: the laws of some samplers are made from its rows.
            head.sampler = _sampler(config.sampler.name, config, dataset, encoder, head, fit)
            head._stale = False
    return encoder.to(device), head.to(device)


def _tie(config: Config, dataset: Dataset, encoder: Any, head: SampledClassifier) -> None:
    if encoder.table.shape != head.weight.shape:
        raise ConfigError(
            f"config: [model] tied must be false where the table {list(encoder.table.shape)} is not the class table's "
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

    found: dict[str, torch.optim.Optimizer] = {"head": rows(list(head.parameters()), o.lr, 0)}
    tables = row_tables(encoder, head)
    if tables:
        found["tables"] = rows(tables, o.table_lr or o.lr, 1)
    taken = {id(p) for p in [*head.parameters(), *tables]}
    rest = [p for p in encoder.parameters() if id(p) not in taken and p.requires_grad]
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
