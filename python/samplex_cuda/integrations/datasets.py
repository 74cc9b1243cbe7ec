"""Hugging Face `datasets` as data of the trainer: rows are read from its Arrow files when a batch asks for them."""

from __future__ import annotations

from typing import Any

import datasets
import numpy as np
import torch
from torch import Tensor

from samplex_cuda.data import PAD, Dataset

__all__ = ["Columns"]


class Columns(Dataset):
    """A column of vectors and a column of labels of a `datasets.Dataset`, for `sx.training.Trainer`.

    Args:
        source: with random access: not an `IterableDataset`.
        x: column of vectors of one width.
        y: column of labels: integers, or lists of integers (several per example).
        num_classes: C; by default the number of names of a `ClassLabel`, otherwise the largest label and one.

    Example:
        >>> import torch, datasets, samplex_cuda as sx
        >>> source = datasets.Dataset.from_dict({"x": [[1.0, 2.0], [3.0, 4.0]], "label": [1, 0]})
        >>> data = sx.integrations.datasets.Columns(source)
        >>> data.batch(torch.tensor([1]))
        {'index': tensor([1]), 'y': tensor([0]), 'x': tensor([[3., 4.]])}
    """

    kind = "dense"

    def __init__(
        self, source: datasets.Dataset, x: str = "x", y: str = "label", *, num_classes: int | None = None
    ) -> None:
        super().__init__()
        if not isinstance(source, datasets.Dataset):
            raise TypeError(f"Columns: source must be a datasets.Dataset, got {type(source).__name__}")
        for name, column in (("x", x), ("y", y)):
            if column not in source.column_names:
                raise ValueError(f"Columns: {name} must be one of {', '.join(source.column_names)}, got {column!r}")
        if len(source) == 0:
            raise ValueError("Columns: source must have at least one row, got 0")
        self.source, self.x, self.y = source.select_columns([x, y]).with_format("numpy"), x, y
        first = self.source[:1]
        width = np.asarray(first[x][0]).shape
        if len(width) != 1 or np.asarray(first[x][0]).dtype.kind not in "fiu":
            raise ValueError(f"Columns: x must be a column of vectors, got values of shape {list(width)}")
        self.num_features = width[0]
        self.multi_label = np.ndim(first[y][0]) > 0
        names = getattr(source.features[y], "names", None)
        self.num_classes = num_classes or (len(names) if names else 1 + self._largest())

    def _largest(self) -> int:
        return max(
            int(self.targets(torch.arange(b, min(b + 4096, len(self)))).max()) for b in range(0, len(self), 4096)
        )

    def __len__(self) -> int:
        """Number of examples."""
        return len(self.source)

    def _labels(self, values: Any) -> Tensor:
        if not self.multi_label:
            return torch.from_numpy(np.asarray(values, dtype=np.int64))
        rows = [np.asarray(row, dtype=np.int64) for row in values]
        table = np.full((len(rows), max((len(r) for r in rows), default=0) or 1), PAD, dtype=np.int64)
        for place, row in enumerate(rows):
            table[place, : len(row)] = row
        return torch.from_numpy(table)

    def targets(self, rows: Tensor) -> Tensor:
        """Labels int64 [B], or [B, P] padded with -100."""
        return self._labels(self.source.select_columns([self.y])[self._rows(rows)][self.y])

    def batch(self, rows: Tensor) -> dict[str, Tensor]:
        """Vectors "x" fp32 [B, d], labels "y" and "index" of the given rows."""
        found = self.source[self._rows(rows)]
        x = np.stack([np.asarray(v, dtype=np.float32) for v in found[self.x]]) if len(rows) else np.zeros((0,))
        x = x.reshape(len(rows), self.num_features).astype(np.float32)
        return {"index": rows, "y": self._labels(found[self.y]), "x": torch.from_numpy(x)}

    def _parts(self) -> dict[str, Any]:
        return {"source": self.source._fingerprint, "x": self.x, "y": self.y}
