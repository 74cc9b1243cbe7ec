"""`ClassIndex`: top-k through a FAISS index over the class rows. Needs the extra `faiss` (`pip install faiss-cpu`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from samplex_cuda._checks import check_int
from samplex_cuda.ops.sphere import unit_rows

if TYPE_CHECKING:
    from samplex_cuda.heads.exact import ExactAnswers

__all__ = ["ClassIndex"]


def _faiss() -> Any:
    try:
        import faiss
    except ImportError as error:
        raise ImportError(
            "ClassIndex: faiss must be installed for head.index(): pip install 'samplex-cuda[faiss]', or use "
            "head.topk(h, k, candidates='tree')"
        ) from error
    return faiss


class ClassIndex:
    """Maximum inner product search over `[w, b]`, the candidates re-ranked by their exact logits.

    The logits of the answer are those of `head.topk`; which classes are considered is the index's choice. `recall` says
    how often it is right. The index keeps the rows as they were when it was made: after training, make a new one.

    Args:
        head: where the rows, the bias and the scale come from. Its loss must need no prior (negative sampling does: its
            log p_n is no inner product) and its logits must be signed (`absolute=False`).
        kind: "flat", "ivf", "hnsw", or a string for `faiss.index_factory`, which is made for the inner product.
        candidates: how many the index names for a row before re-ranking; 4 k by default.
        **options: set on the index, e.g. nprobe=16 (ivf) or efSearch=64 (hnsw), through `faiss.ParameterSpace`.

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
        faiss = _faiss()
        if head.loss.needs.prior:
            raise ValueError(f"ClassIndex: head must have a loss without a prior, got {head.loss!r}")
        if head.loss.absolute:
            raise ValueError(f"ClassIndex: head must have a loss with absolute=False, got {head.loss!r}")
        if head.live is not None:
            raise ValueError("ClassIndex: head must have no retired classes, got some")
        if candidates is not None:
            check_int("ClassIndex", "candidates", candidates)
        self.head, self.kind, self.candidates = head, kind, candidates
        weight = head.weight.detach()
        rows = self._with_bias(unit_rows(weight) if head.normalize else weight, head.bias)
        if head.scale < 0:
            rows = -rows
        table = rows.float().cpu().contiguous().numpy()
        classes, dim = table.shape
        cells = max(1, min(4096, int(4 * classes**0.5), classes // 39))
        names = {"flat": "Flat", "ivf": f"IVF{cells},Flat", "hnsw": "HNSW32"}
        try:
            self._index = faiss.index_factory(dim, names.get(kind, kind), faiss.METRIC_INNER_PRODUCT)
        except RuntimeError as error:
            raise ValueError(
                f"ClassIndex: kind must be flat, ivf, hnsw or a string of faiss.index_factory, got {kind!r}"
            ) from error
        if not self._index.is_trained:
            self._index.train(table)
        self._index.add(table)
        if kind == "ivf":
            options.setdefault("nprobe", max(1, cells // 16))
        for name, value in options.items():
            faiss.ParameterSpace().set_index_parameter(self._index, name, value)

    @staticmethod
    def _with_bias(rows: Tensor, bias: Tensor | None) -> Tensor:
        """[n, d] or, with a bias, [n, d + 1]."""
        return rows if bias is None else torch.cat([rows, bias.detach().to(rows.dtype).unsqueeze(1)], 1)

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
            ids = torch.from_numpy(self._index.search(query.float().cpu().contiguous().numpy(), count)[1]).to(h.device)
        return head.topk(h.detach(), k, candidates=ids.reshape(*lead, count))

    def recall(self, h: Tensor, k: int) -> float:
        """Share of the exact top k that `topk` finds, over the rows of h [*, d]."""
        head = self.head
        rows = h.detach().reshape(-1, head.in_features)
        exact = head.topk(rows, k)[1]
        found = self.topk(rows, k)[1]
        return float((exact.unsqueeze(2) == found.unsqueeze(1)).any(2).float().mean())

    def __repr__(self) -> str:
        """Kind and sizes."""
        return f"ClassIndex(kind={self.kind!r}, classes={self._index.ntotal}, width={self._index.d})"
