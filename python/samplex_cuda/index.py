"""`ClassIndex`: top-k through a FAISS or USearch index over the class rows. Needs the extra `faiss` or `usearch`."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from samplex_cuda._checks import check_int
from samplex_cuda.ops.sphere import unit_rows

if TYPE_CHECKING:
    from samplex_cuda.heads.exact import ExactAnswers

__all__ = ["ClassIndex"]


def _library(name: str) -> Any:
    try:
        if name == "usearch":
            from usearch.index import Index

            return Index
        import faiss
    except ImportError as error:
        raise ImportError(
            f"ClassIndex: {name} must be installed for head.index(): pip install 'samplex-cuda[{name}]', or use "
            "head.topk(h, k, candidates='tree')"
        ) from error
    return faiss


class _Faiss:
    """An index of `faiss.index_factory` for the inner product."""

    library = "faiss"

    def __init__(self, kind: str, options: dict[str, Any]) -> None:
        self.faiss, self.kind, self.options = _library("faiss"), kind, options

    def build(self, table: Any) -> None:
        faiss, (classes, dim) = self.faiss, table.shape
        cells = max(1, min(4096, int(4 * classes**0.5), classes // 39))
        names = {"flat": "Flat", "ivf": f"IVF{cells},Flat", "hnsw": "HNSW32"}
        try:
            self.index = faiss.index_factory(dim, names.get(self.kind, self.kind), faiss.METRIC_INNER_PRODUCT)
        except RuntimeError as error:
            raise ValueError(
                "ClassIndex: kind must be flat, ivf, hnsw, usearch or a string of faiss.index_factory, got "
                f"{self.kind!r}"
            ) from error
        if not self.index.is_trained:
            self.index.train(table)
        self.index.add(table)
        options = dict(self.options)
        if self.kind == "ivf":
            options.setdefault("nprobe", max(1, cells // 16))
        for name, value in options.items():
            faiss.ParameterSpace().set_index_parameter(self.index, name, value)

    def update(self, ids: Any, rows: Any, table: Any) -> None:
        self.build(table)  # rows of most of its kinds cannot be replaced

    def search(self, query: Any, count: int) -> Any:
        return self.index.search(query, count)[1]

    def save(self, path: Path) -> None:
        self.faiss.write_index(self.index, str(path))

    def load(self, path: Path) -> tuple[int, int]:
        self.index = self.faiss.read_index(str(path))
        for name, value in self.options.items():
            self.faiss.ParameterSpace().set_index_parameter(self.index, name, value)
        return self.index.ntotal, self.index.d


class _USearch:
    """A graph of USearch for the inner product; rows can be replaced."""

    library = "usearch"

    def __init__(self, options: dict[str, Any]) -> None:
        self.make, self.options = _library("usearch"), options

    def build(self, table: Any) -> None:
        self.index = self.make(ndim=table.shape[1], metric="ip", **{"dtype": "f32", **self.options})
        self.index.add(torch.arange(len(table)).numpy(), table)

    def update(self, ids: Any, rows: Any, table: Any) -> None:
        self.index.remove(ids)
        self.index.add(ids, rows)

    def search(self, query: Any, count: int) -> Any:
        import numpy as np

        found = self.index.search(query, count)
        keys = np.atleast_2d(found.keys).astype(np.int64)
        if keys.shape[1] < count:
            keys = np.pad(keys, ((0, 0), (0, count - keys.shape[1])), constant_values=-1)
        counts = np.atleast_1d(getattr(found, "counts", np.full(len(keys), count)))
        return np.where(np.arange(count) < counts[:, None], keys, -1)

    def save(self, path: Path) -> None:
        self.index.save(str(path))

    def load(self, path: Path) -> tuple[int, int]:
        self.index = self.make.restore(str(path))
        if "expansion_search" in self.options:
            self.index.expansion_search = self.options["expansion_search"]
        return len(self.index), self.index.ndim


class ClassIndex:
    """Maximum inner product search over `[w, b]`, the candidates re-ranked by their exact logits.

    The logits of the answer are those of `head.topk`; which classes are considered is the index's choice. `report` says
    how often it is right, and how fast. The index keeps the rows as they were when it was made; `refresh` takes changed
    ones over.

    Args:
        head: where the rows, the bias and the scale come from. Its loss must need no prior (negative sampling does: its
            log p_n is not an inner product) and its logits must be signed (`absolute=False`).
        kind: "flat", "ivf", "hnsw", or a string for `faiss.index_factory`, which is made for the inner product;
            "usearch" for a graph of USearch.
        candidates: how many the index names for a row before re-ranking; 4 k by default.
        **options: FAISS: set on the index, e.g. nprobe=16 (ivf) or efSearch=64 (hnsw). USearch: arguments of its
            `Index`, e.g. connectivity, expansion_add, expansion_search, dtype="bf16".

    Example:
        >>> import torch, samplex_cuda as sx
        >>> head = sx.SampledClassifier(4, 50, sx.samplers.Uniform(50), num_samples=10)
        >>> index = head.index()  # doctest: +SKIP
        >>> index.recall(torch.randn(20, 4), 5)  # doctest: +SKIP
        1.0
    """

    def __init__(
        self, head: ExactAnswers, kind: str = "flat", *, candidates: int | None = None, **options: Any
    ) -> None:
        self._prepare(head, kind, candidates, options)
        self._index.build(self._table())

    def _prepare(self, head: ExactAnswers, kind: str, candidates: int | None, options: dict[str, Any]) -> None:
        if head.loss.needs.prior:
            raise ValueError(f"ClassIndex: head must have a loss without a prior, got {head.loss!r}")
        if head.loss.absolute:
            raise ValueError(f"ClassIndex: head must have a loss with absolute=False, got {head.loss!r}")
        if head.live is not None:
            raise ValueError("ClassIndex: head must have no retired classes, got some")
        if candidates is not None:
            check_int("ClassIndex", "candidates", candidates)
        self.head, self.kind, self.candidates = head, kind, candidates
        self._index: Any = _USearch(options) if kind == "usearch" else _Faiss(kind, options)

    def _table(self, ids: Tensor | None = None) -> Any:
        """numpy fp32 [C, d], or [C, d + 1] with a bias; the given rows alone."""
        head = self.head
        rows, bias = head.weight.detach(), None if head.bias is None else head.bias.detach()
        if ids is not None:
            rows, bias = rows[ids], None if bias is None else bias[ids]
        if head.normalize:
            rows = unit_rows(rows)
        table = rows if bias is None else torch.cat([rows, bias.to(rows.dtype).unsqueeze(1)], 1)
        return (-table if head.scale < 0 else table).float().cpu().contiguous().numpy()

    def refresh(self, ids: Tensor | None = None) -> None:
        """Takes the rows of the head over as they are now.

        Args:
            ids: int64 [n], the rows that changed; None: all of them. FAISS builds the index again in either case.
        """
        if ids is None:
            self._index.build(self._table())
            return
        ids = torch.as_tensor(ids).reshape(-1).unique()
        if ids.numel() and not (int(ids.min()) >= 0 and int(ids.max()) < self.head.num_classes):
            raise IndexError(f"ClassIndex.refresh: ids must be in [0, {self.head.num_classes}), got {ids.tolist()[-1]}")
        table = None if self._index.library == "usearch" else self._table()
        self._index.update(ids.cpu().numpy(), self._table(ids), table)

    def save(self, path: str | Path) -> None:
        """Writes the index to `path`, and what `load` needs beside it to `path` with ".json" appended.

        Args:
            path: a file.
        """
        path = Path(path)
        self._index.save(path)
        said = {"kind": self.kind, "candidates": self.candidates, "options": self._index.options}
        path.with_name(path.name + ".json").write_text(json.dumps(said))

    @classmethod
    def load(cls, head: ExactAnswers, path: str | Path) -> ClassIndex:
        """An index from a file of `save`; the head must have as many classes of the same width.

        Args:
            head: whose rows the index holds.
            path: as given to `save`.
        """
        path = Path(path)
        said = json.loads(path.with_name(path.name + ".json").read_text())
        made = cls.__new__(cls)
        made._prepare(head, said["kind"], said["candidates"], said["options"])
        found = made._index.load(path)
        wanted = (head.num_classes, head.in_features + (head.bias is not None))
        if found != wanted:
            raise ValueError(f"ClassIndex.load: the index must have {wanted} rows and columns like head, got {found}")
        return made

    def topk(self, h: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k best of the classes that the index names; as `head.topk`.

        Args:
            h: [*, d].
            k: how many.

        Returns:
            (logits [*, k], ids int64 [*, k]), largest first; -inf and -1 where the index named fewer.
        """
        head = self.head
        lead = head._check_h("topk", h)
        rows = h.detach().reshape(-1, head.in_features)
        check_int("ClassIndex.topk", "k", k, 1, head.num_classes)
        count = min(head.num_classes, max(k, 4 * k if self.candidates is None else self.candidates))
        query = head._query(rows).detach()
        if head.bias is not None:
            query = torch.cat([query, query.new_ones(query.shape[0], 1)], 1)
        if rows.shape[0] == 0:
            ids = torch.empty(0, count, dtype=torch.int64, device=h.device)
        else:
            ids = torch.from_numpy(self._index.search(query.float().cpu().contiguous().numpy(), count)).to(h.device)
        return head.topk(h.detach(), k, candidates=ids.reshape(*lead, count))

    def recall(self, h: Tensor, k: int) -> float:
        """Share of the exact top k that `topk` finds, over the rows of h [*, d]."""
        return self.report(h, k)["recall"]

    def report(self, h: Tensor, k: int) -> dict[str, float]:
        """How often the index is right and how long it takes, against the exact top k.

        Args:
            h: [*, d].
            k: how many.

        Returns:
            "recall": share of the exact top k that is found; "first": share of rows whose best class is found first;
            "seconds" and "exact_seconds" of one call each with all rows.
        """
        head = self.head
        rows = h.detach().reshape(-1, head.in_features)
        start = time.perf_counter()
        exact = head.topk(rows, k)[1]
        middle = time.perf_counter()
        found = self.topk(rows, k)[1]
        end = time.perf_counter()
        return {
            "recall": float((exact.unsqueeze(2) == found.unsqueeze(1)).any(2).float().mean()),
            "first": float((exact[:, 0] == found[:, 0]).float().mean()),
            "seconds": end - middle,
            "exact_seconds": middle - start,
        }

    def __repr__(self) -> str:
        """Kind and sizes."""
        width = self.head.in_features + (self.head.bias is not None)
        return f"ClassIndex(kind={self.kind!r}, classes={self.head.num_classes}, width={width})"
