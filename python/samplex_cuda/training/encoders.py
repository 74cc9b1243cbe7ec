"""Encoders: modules that take a batch (a dict of tensors, see `samplex_cuda.data`) and give h [*, d]."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = [
    "MLP",
    "Custom",
    "EmbeddingBag",
    "Encoder",
    "InputMap",
    "LanguageModel",
    "Linear",
    "Sequence",
    "context_of",
    "index_of",
]


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


class Encoder(nn.Module):
    """What the built-in encoders share; your own module may have any of it.

    Attributes:
        out_features: d.
        tree_map: what gives a tree sampler its features where the input is sparse or the tree is one of another
            projection than the model's; None elsewhere.

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
        h = self._out(self.body(x))
        if self.tree_map is not None:
            return h, self.tree_map(batch)
        return h, x if self.sees_input else None


def _body(width: int, hidden: int, dim: int, layers: int, dropout: float) -> nn.Sequential:
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(width, hidden), nn.ReLU(), nn.Dropout(dropout)]
        width = hidden
    return nn.Sequential(*parts, nn.Linear(width, dim))


def _fit_dtype(x: Tensor, module: nn.Module) -> Tensor:
    """x in the dtype that `module` computes in: that of autocast where it is on, else that of its weights.

    Rows of a tied table may be bfloat16 where the module is not; and torch's LSTM takes float32 under autocast only on
    processors with bfloat16 instructions.
    """
    kind = x.device.type
    wanted = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else next(module.parameters()).dtype
    return x.to(wanted)


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
    """Token embeddings and an LSTM or GRU whose state continues from batch to batch, detached.

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
        x = _fit_dtype(x, self.rnn)
        state: Any = None
        if self._state and self._state[0].shape[1] == x.shape[0]:
            kept = tuple(t.to(x.dtype) for t in self._state)
            state = kept if len(kept) == 2 else kept[0]
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
        if torch.compiler.is_exporting():  # a program must not depend on how many items there are
            x = F.embedding(history.clamp(min=0), self.table).masked_fill(~(history >= 0).unsqueeze(-1), 0.0)
        if self.pooling == "mean":
            if torch.compiler.is_exporting():
                h = x.sum(1) / (history >= 0).sum(1, keepdim=True).clamp(min=1)
            else:
                ids, offsets = _histories(history)
                h = F.embedding_bag(ids, self.table, offsets, mode="mean", sparse=sparse, include_last_offset=True)
            h = self.dropout(h)
            return self._out(h if self.body is None else self.body(_fit_dtype(h, self.body)))
        there = history >= 0
        if not torch.compiler.is_exporting():
            # Only items that are there: padding must not touch a row.
            found = F.embedding(history[there], self.table, sparse=sparse)
            x = found.new_zeros(*history.shape, found.shape[1])
            x[there] = found
        if self.pooling == "gru":
            out = self.rnn(_fit_dtype(self.dropout(x), self.rnn))[0][:, -1]
            return self._out(out if self.body is None else self.body(out))
        width = history.shape[1]
        x = self.dropout(x + self.places[-width:])
        later = torch.ones(width, width, dtype=torch.bool, device=x.device).triu(1)
        hidden = ~there
        hidden[:, -1] = False  # a row without history attends to its last place, or softmax has nothing
        # A place before the history has nothing to attend to but itself; it is hidden from all others.
        mask = (later | hidden[:, None, :]) & ~torch.eye(width, dtype=torch.bool, device=x.device)
        heads = self.body.layers[0].self_attn.num_heads
        return self._out(self.body(x, mask=mask.repeat_interleave(heads, 0), is_causal=False)[:, -1])

    def tables(self) -> list[nn.Parameter]:
        """The table, where its gradients are rows."""
        return [self.table] if self.sparse else []


class Custom(Encoder):
    """Your own module: `module(batch)` gives h [*, d]. It may have `carried` and `carry`, and `tables`.

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
