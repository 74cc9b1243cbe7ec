"""Exact answers of a head over all classes: scores, log-probabilities, top-k. O(C) per row, in chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from samplex_cuda._checks import check_int, describe, shape_text
from samplex_cuda.heads.checks import check_signed
from samplex_cuda.heads.host import HostTable, beside_table
from samplex_cuda.losses import Loss
from samplex_cuda.ops.sphere import unit_rows
from samplex_cuda.prediction import Prior, exact_log_prob, exact_nll, exact_scores, exact_topk, rerank
from samplex_cuda.samplers.tree import Tree

if TYPE_CHECKING:
    from samplex_cuda.index import ClassIndex

__all__ = ["ExactAnswers"]


class ExactAnswers(nn.Module):
    """What a linear classifier over C classes can say exactly; `SampledClassifier` adds training."""

    in_features: int
    num_classes: int
    scale: float
    normalize: bool
    log_scale: nn.Parameter | None
    ignore_index: int
    loss: Loss
    weight: nn.Parameter
    bias: nn.Parameter | None
    sampler: Any
    class_weight: Tensor | None
    live: Tensor | None
    host: HostTable | None = None

    @beside_table
    def exact_loss(
        self, h: Tensor, target: Tensor, features: Tensor | None = None, target_weight: Tensor | None = None
    ) -> Tensor:
        """Exact negative log-likelihood of each row, [B], without gradient.

        Args:
            h: [B, d].
            target: int64 [B], or [B, P] padded with -100.
            features: [B, f], what the sampler looks at if that is not `h`; used by losses with a prior.
            target_weight: the shape of target, what each target weighs; by default 1 over their number.

        Example:
            >>> import torch, samplex_cuda as sx
            >>> head = sx.SampledClassifier(4, 50, sx.samplers.Uniform(50), num_samples=10)
            >>> head.exact_loss(torch.randn(3, 4), torch.arange(3)).shape
            torch.Size([3])
        """
        return exact_nll(
            self._query(h),
            self.weight,
            target,
            self._live_bias(),
            scale=self.scale,
            absolute=self.loss.absolute,
            class_weight=self.class_weight,
            ignore_index=self.ignore_index,
            normalize=self.normalize,
            target_weight=target_weight,
            prior=self.prior(h, features),
        )

    def prior(self, h: Tensor, features: Tensor | None = None) -> Prior | None:
        """log p_n of a block of rows, [n, C], if the loss learns scores relative to the sampler (Eq. 5), else None.

        Args:
            h: [B, d].
            features: [B, f], what the sampler looks at if that is not `h`.

        Example:
            >>> import torch, samplex_cuda as sx
            >>> head = sx.SampledClassifier(4, 50, sx.samplers.Uniform(50), num_samples=10)
            >>> head.prior(torch.randn(3, 4)) is None
            True
        """
        if not self.loss.needs.prior:
            return None
        seen, sampler = self._seen(h, features), self.sampler
        return lambda rows: sampler.log_prob_all(seen[rows])

    @staticmethod
    def _seen(h: Tensor, features: Tensor | None) -> Tensor:
        """What the sampler looks at, [B, f]."""
        return (h if features is None else features.reshape(h.shape[0], features.shape[-1])).detach()

    def _live_bias(self) -> Tensor | None:
        """The bias [C], with -inf for retired classes."""
        if self.live is None:
            return self.bias
        check_signed("SampledClassifier", self.loss, self.scale)
        bias = self.weight.new_zeros(()) if self.bias is None else self.bias
        return torch.where(self.live, bias, -torch.inf).to(bias.dtype)

    def _query(self, h: Tensor) -> Tensor:
        """h [B, d] as products with class rows take it: on the sphere, times a learned scale."""
        if self.normalize:
            h = unit_rows(h)
        return h if self.log_scale is None else h * self.log_scale.exp().to(h.dtype)  # on a host, one number crosses

    def _check_h(self, method: str, h: Tensor) -> torch.Size:
        if not isinstance(h, Tensor) or h.dim() == 0 or h.shape[-1] != self.in_features or not h.is_floating_point():
            raise ValueError(f"{_where(method)}: h must be [*, {self.in_features}] floating point, got {describe(h)}")
        if h.layout is not torch.strided:
            raise TypeError(f"{_where(method)}: h must be a dense tensor, got {describe(h)}; use .to_dense()")
        return h.shape[:-1]

    def _check_features(self, method: str, features: Tensor | None, lead: torch.Size) -> None:
        if features is not None and features.shape[:-1] != lead:
            raise ValueError(
                f"{_where(method)}: features must be {shape_text(lead, 'f')} to fit h, got {describe(features)}"
            )

    @beside_table
    def scores(
        self, h: Tensor, features: Tensor | None = None, corrected: bool = True, *, chunk_size: int | None = None
    ) -> Tensor:
        """Scores of all classes, `scale * (h @ w + b)`; with negative sampling plus log p_n(y|x), Eq. 5.

        With `normalize=True` they are cosines times the scale.

        Args:
            h: [*, d].
            features: [*, f], what the sampler looks at where that is not `h`.
            corrected: False leaves log p_n out. Without negative sampling there is nothing to correct.
            chunk_size: classes per chunk; chosen from the shapes when not given.

        Returns:
            [*, C] fp32 (fp64 with fp64 parameters), without gradient. `log_prob` is their log_softmax.

        Example:
            >>> import torch, samplex_cuda as sx
            >>> sampler = sx.samplers.Unigram(torch.arange(1.0, 51.0))
            >>> head = sx.SampledClassifier(4, 50, sampler, num_samples=10, loss="negative_sampling")
            >>> h = torch.randn(3, 4)
            >>> added = head.scores(h) - head.scores(h, corrected=False)
            >>> torch.allclose(added, sampler.log_prob_all().expand(3, 50), atol=1e-5)
            True
        """
        lead = self._check_h("scores", h)
        self._check_features("scores", features, lead)
        rows = h.reshape(-1, self.in_features)
        out = exact_scores(
            self._query(rows),
            self.weight,
            self._live_bias(),
            scale=self.scale,
            normalize=self.normalize,
            absolute=self.loss.absolute,
            prior=self.prior(rows, features) if corrected else None,
            chunk_size=chunk_size,
        )
        return out.reshape(*lead, self.num_classes)

    @beside_table
    def log_prob(self, h: Tensor, *, features: Tensor | None = None, chunk_size: int | None = None) -> Tensor:
        """Exact log-probabilities of all classes; [*, C] by definition, beyond it only a chunk is held.

        Args:
            h: [*, d].
            features: [*, f], what the sampler looks at where that is not `h`; used with negative sampling.
            chunk_size: classes per chunk; chosen from the shapes when not given.

        Returns:
            [*, C] fp32 (fp64 with fp64 parameters), without gradient.

        Example:
            >>> import torch, samplex_cuda as sx
            >>> head = sx.SampledClassifier(4, 50, sx.samplers.Uniform(50), num_samples=10)
            >>> h = torch.randn(3, 4)
            >>> torch.allclose(head.log_prob(h), torch.log_softmax(head.linear()(h), -1), atol=1e-5)
            True
        """
        lead = self._check_h("log_prob", h)
        self._check_features("log_prob", features, lead)
        rows = h.reshape(-1, self.in_features)
        out = exact_log_prob(
            self._query(rows),
            self.weight,
            self._live_bias(),
            scale=self.scale,
            normalize=self.normalize,
            absolute=self.loss.absolute,
            prior=self.prior(rows, features),
            chunk_size=chunk_size,
        )
        return out.reshape(*lead, self.num_classes)

    def predict(self, h: Tensor, *, features: Tensor | None = None, chunk_size: int | None = None) -> Tensor:
        """The most probable class of each row; of equal ones the lowest id.

        Args:
            h: [*, d].
            features: [*, f], what the sampler looks at where that is not `h`; used with negative sampling.
            chunk_size: classes per chunk; chosen from the shapes when not given.

        Returns:
            int64 [*].

        Example:
            >>> import torch, samplex_cuda as sx
            >>> head = sx.SampledClassifier(4, 50, sx.samplers.Uniform(50), num_samples=10)
            >>> head.predict(torch.randn(3, 4)).shape
            torch.Size([3])
        """
        return self.topk(h, 1, features=features, chunk_size=chunk_size)[1].squeeze(-1)

    @beside_table
    def topk(
        self,
        h: Tensor,
        k: int,
        *,
        features: Tensor | None = None,
        candidates: str | Tensor | None = None,
        beam: int | None = None,
        tree: nn.Module | None = None,
        chunk_size: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The k most probable classes of each row: exactly, without a [*, C] tensor, or among candidates.

        With `candidates="tree"` a beam search of a fitted tree names `beam` classes per row in O(beam log C), and their
        exact logits decide: the answer is exact wherever the search found the right classes. See docs/prediction.md.

        Args:
            h: [*, d].
            k: how many, 1 to C; with candidates, up to as many as there are.
            features: [*, f], what the sampler (or the tree) looks at where that is not `h`.
            candidates: None, all classes; "tree"; or int64 [*, n], your own choice of classes for each row, no class
                twice, -1 for none.
            beam: nodes that the search keeps at each level, k to 512, and so candidates per row; 64 or 4 k by default.
            tree: the `Tree` that is searched; by default the head's sampler, if that is one.
            chunk_size: classes per chunk; chosen from the shapes when not given.

        Returns:
            (logits [*, k], ids int64 [*, k]), largest first, equal logits in ascending id order. The logits are those
            of `scores`. With candidates, -inf and -1 where a row has fewer than k.

        Example:
            >>> import torch, samplex_cuda as sx
            >>> head = sx.SampledClassifier(4, 50, sx.samplers.Uniform(50), num_samples=10)
            >>> logits, ids = head.topk(torch.randn(3, 4), 5)
            >>> logits.shape, ids.shape
            (torch.Size([3, 5]), torch.Size([3, 5]))
        """
        lead = self._check_h("topk", h)
        check_int("SampledClassifier.topk", "k", k, 1, self.num_classes)
        self._check_features("topk", features, lead)
        rows = h.reshape(-1, self.in_features)
        if candidates is not None:
            logits, ids = self._topk_among(rows, k, features, candidates, beam, tree)
            return logits.reshape(*lead, k), ids.reshape(*lead, k)
        if beam is not None or tree is not None:
            raise ValueError("SampledClassifier.topk: candidates must be 'tree' if beam or tree is given, got None")
        logits, ids = exact_topk(
            self._query(rows),
            self.weight,
            k,
            self._live_bias(),
            scale=self.scale,
            normalize=self.normalize,
            absolute=self.loss.absolute,
            prior=self.prior(rows, features),
            chunk_size=chunk_size,
        )
        return logits.reshape(*lead, k), ids.reshape(*lead, k)

    @torch.no_grad()
    def _topk_among(
        self, h: Tensor, k: int, features: Tensor | None, candidates: str | Tensor, beam: int | None, tree: Any
    ) -> tuple[Tensor, Tensor]:
        """`topk` among candidates, for h [B, d]."""
        where = "SampledClassifier.topk"
        seen = self._seen(h, features)
        sampler: Any = self.sampler
        added = None
        if isinstance(candidates, Tensor):
            ids = candidates.reshape(h.shape[0], candidates.shape[-1]) if candidates.dim() else candidates
            if ids.dim() != 2 or ids.dtype != torch.int64 or not k <= ids.shape[1]:
                raise ValueError(
                    f"{where}: candidates must be [*, n] int64 with n >= k = {k}, got {describe(candidates)}"
                )
        elif candidates == "tree":
            tree = sampler if tree is None else tree
            if not isinstance(tree, Tree):
                raise TypeError(
                    f"{where}: tree must be a samplers.Tree, because the sampler is not a Tree, got {tree!r}"
                )
            if tree.num_classes != self.num_classes:
                raise ValueError(f"{where}: tree must have num_classes = {self.num_classes}, got {tree.num_classes}")
            most = min(512, self.num_classes)
            beam = min(most, max(64, 4 * k)) if beam is None else beam
            check_int(where, "beam", beam, k, 512)
            log_p, ids = tree.topk(seen, min(beam, most), beam=beam)
            if tree is sampler and not tree.has_base:  # log_p is of the tree alone
                added = log_p
        else:
            raise ValueError(f"{where}: candidates must be None, 'tree' or int64 ids, got {candidates!r}")
        if self.prior(h, features) is None:
            added = None
        elif added is None:
            added = sampler.log_prob(seen, ids.clamp(min=0))
        return rerank(
            self._query(h),
            self.weight,
            ids,
            k,
            self._live_bias(),
            scale=self.scale,
            absolute=self.loss.absolute,
            normalize=self.normalize,
            added=added,
        )

    def _rows_of_pool(self, pool: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Classes [n] that are searched for hard negatives, with their rows [n, d] and biases [n]."""
        return pool, self.weight[pool], None if self.bias is None else self.bias[pool]

    def index(self, kind: str = "flat", **options: Any) -> ClassIndex:
        """An approximate nearest-neighbor index over the class rows (FAISS or USearch), for `index.topk(h, k)`.

        The index holds a copy of the rows as they are now. Needs the extra `faiss` or `usearch`.

        Args:
            kind: "flat" (exhaustive), "ivf", "hnsw" or any string that `faiss.index_factory` takes; or "usearch".
            options: passed on to `samplex_cuda.index.ClassIndex`.

        Example:
            >>> import torch, samplex_cuda as sx
            >>> head = sx.SampledClassifier(4, 50, sx.samplers.Uniform(50), num_samples=10)
            >>> index = head.index()  # doctest: +SKIP
            >>> logits, ids = index.topk(torch.randn(3, 4), 5)  # doctest: +SKIP
        """
        from samplex_cuda.index import ClassIndex

        return ClassIndex(self, kind, **options)


def _where(method: str) -> str:
    return "SampledClassifier" if method == "forward" else f"SampledClassifier.{method}"
