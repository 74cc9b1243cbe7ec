"""Hard negatives: classes that the model itself scores high, mined for each row."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from samplex_cuda._checks import check_int, describe
from samplex_cuda.functional._join import join_losses
from samplex_cuda.heads.host import crosses, to_side
from samplex_cuda.ops.sphere import unit_rows
from samplex_cuda.prediction import valid_targets
from samplex_cuda.rng import Key
from samplex_cuda.samplers.static import Uniform

if TYPE_CHECKING:
    from samplex_cuda.heads.classifier import SampledClassifier

__all__ = ["HardNegatives", "join_losses"]

_OP = "HardNegatives"
_SOURCES = ("pool", "tree", "exact", "index")


class HardNegatives:
    """The k classes besides the targets that a head scores highest for each row, among those that a search names.

    Pass them as `head(h, y, hard=miner.mine(h, y))`: they join the sampler's corrected draws in one normalizer, each
    with its plain score. The estimate is then biased by choice: the draws alone estimate the sum over all other
    classes, and the k hardest are counted once more on top of it. The loss is at least that of the draws, and its
    gradient gives more weight to what the model confuses. docs/negatives.md says when that helps.

    Args:
        head: whose scores count.
        k: hard negatives per row.
        source: what names the candidates. "pool": `pool` random classes, the same for the batch, O(pool) per row;
            "tree": the beam of the head's `Tree` sampler, O(beam log C); "exact": all classes, O(C); "index":
            `head.index(...)` (FAISS), made again every `refresh` calls; or a function that makes, from the head, an
            object with `topk(h, k) -> (logits, ids)`, such as one around another search library, called as often.
        pool: size of the pool.
        refresh: calls that share one index.
        **options: of `head.index` or of `head.topk(candidates="tree")`.

    Example:
        >>> import torch, samplex_cuda as sx
        >>> head = sx.SampledClassifier(8, 1000, sx.samplers.Uniform(1000), num_samples=20)
        >>> miner = sx.HardNegatives(head, 5, pool=200)
        >>> h, y = torch.randn(4, 8), torch.randint(1000, (4,))
        >>> hard = miner.mine(h, y)
        >>> hard.shape, head(h, y, hard=hard).shape
        (torch.Size([4, 5]), torch.Size([]))
    """

    def __init__(
        self,
        head: SampledClassifier,
        k: int,
        source: str | Callable[[Any], Any] = "pool",
        *,
        pool: int = 4096,
        refresh: int = 100,
        **options: Any,
    ) -> None:
        if not (callable(source) or source in _SOURCES):
            raise ValueError(
                f"{_OP}: source must be one of {', '.join(_SOURCES)} or a function, got {describe(source)}"
            )
        if hasattr(head, "exchange") and source in ("tree", "index"):
            raise ValueError(
                f'{_OP}: source must be "pool", "exact" or a function with a sharded head, since no rank has all '
                f"rows, got {source!r}"
            )
        self.head, self.source, self.options = head, source, options
        self.k = check_int(_OP, "k", k, 1, head.num_classes)
        self.pool = min(check_int(_OP, "pool", pool, 1, 1 << 24), head.num_classes)
        self.refresh = check_int(_OP, "refresh", refresh)
        self._index: Any = None
        self._calls = 0

    @torch.no_grad()
    def mine(self, h: Tensor, y: Tensor, *, key: Key | Tensor | None = None) -> Tensor:
        """Hard negatives of each row. Every rank of a sharded head must call it, with its own rows.

        Args:
            h: [B, d].
            y: int64 [B], or [B, P] padded with -100: never among them.
            key: of the pool; that of the first rank counts.

        Returns:
            int64 [B, k], the best first; a row with fewer candidates is filled up with its first target, which losses
            mask.
        """
        head = self.head
        if head.host is not None and isinstance(h, Tensor) and crosses(h, head.weight):
            here = head.weight.device
            found = self.mine(to_side(h, here), to_side(y, here), key=to_side(key, here))
            return cast(Tensor, to_side(found, h.device))
        batch = h.shape[0]
        targets = y.reshape(batch, -1)
        if h.dim() != 2 or y.dtype != torch.int64 or y.shape[0] != batch:
            raise ValueError(f"{_OP}: h must be [B, d] and y [B] or [B, P] int64, got {describe(h)} and {describe(y)}")
        rows = h.detach().to(head.weight.dtype)
        wanted = min(self.k + targets.shape[1], self.pool if self.source == "pool" else head.num_classes)
        ids = self._search(rows, wanted, key)
        hit = (ids[:, :, None] == targets[:, None, :]).any(2) | (ids < 0)
        order = hit.to(torch.int8).argsort(dim=1, stable=True)  # targets last, the rest as it was
        own = torch.where(valid_targets(y, head.ignore_index), y, -1).reshape(batch, -1).amax(1, keepdim=True)
        found = torch.where(hit, own.clamp(min=0), ids).gather(1, order)[:, : self.k]
        short = self.k - found.shape[1]
        return found if short <= 0 else torch.cat([found, own.clamp(min=0).expand(-1, short)], 1)

    def _search(self, h: Tensor, count: int, key: Key | Tensor | None) -> Tensor:
        head = self.head
        self._calls += 1
        if self.source == "pool":
            own = Uniform(head.num_classes).subset(self.pool, batch_size=1, key=key).ids[0].to(h.device)
            pool, table, bias = head._rows_of_pool(own)
            scores = h.to(table.dtype) @ (unit_rows(table) if head.normalize else table).T
            if bias is not None:
                scores = scores + bias
            scores = self._rank(scores)
            if head.live is not None:
                scores = scores.masked_fill(~head.live[pool], -torch.inf)
            best, at = scores.topk(count, dim=1)
            return torch.where(best == -torch.inf, -1, pool[at])
        if self.source == "exact":
            return head.topk(h, count)[1]
        if self.source == "tree":
            return head.topk(h, count, candidates="tree", **self.options)[1]
        if self._index is None or self._calls > self.refresh:
            self._index = self.source(head) if callable(self.source) else head.index(**self.options)
            self._calls = 1
        return self._index.topk(h, count)[1].to(h.device)

    def _rank(self, scores: Tensor) -> Tensor:
        if self.head.loss.absolute:
            return scores.abs()
        return scores if self.head.scale > 0 else -scores
