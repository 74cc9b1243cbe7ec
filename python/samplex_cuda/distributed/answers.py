"""Exact answers of a sharded head, over the classes of all ranks: loss, top-k, log-probabilities, places of targets."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from samplex_cuda._checks import check_int
from samplex_cuda.chunking import logit_chunks, row_blocks
from samplex_cuda.distributed.collectives import Everyone, Exchange
from samplex_cuda.distributed.layout import Layout
from samplex_cuda.distributed.settings import settings_of
from samplex_cuda.heads.classifier import SampledClassifier
from samplex_cuda.prediction import exact_topk, mean_weight, softmax_sums

__all__ = ["ShardedAnswers"]

_NAME = "SampledClassifier.shard"


class ShardedAnswers(SampledClassifier):
    """What a sharded head can say exactly. Every method must be called by every rank, with its own rows."""

    exchange: Exchange
    layout: Layout

    def _digest(self) -> int:
        """The digest of the settings that all ranks must have in common."""
        raise NotImplementedError

    @torch.no_grad()
    def _sums(self, h: Tensor, target: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        """lse [R] fp64 and target logits [R, P] over all classes, of the rows of everyone."""
        local = self.layout.local(target)
        prior = self._local_prior(seen)
        if self.layout.rows:
            lse, positive, _ = softmax_sums(
                self._query(h), self.weight, local, self.bias, self.scale, self.loss.absolute, prior=prior,
                normalize=self.normalize,
            )  # fmt: skip
        else:
            lse = torch.full((h.shape[0],), -torch.inf, dtype=torch.float64, device=h.device)
            positive = torch.zeros(target.shape, dtype=self._wide(), device=h.device)
        positive = self.exchange.sum_(torch.where(local >= 0, positive, 0.0))
        return self.exchange.stack(lse).logsumexp(0), positive

    def _local_prior(self, seen: Tensor) -> Any:
        if not self.loss.needs.prior:
            return None
        sampler: Any = self.sampler
        if getattr(sampler, "collective", False):
            return sampler.local_prior(seen)
        classes = self.layout.classes(seen.device)
        return lambda rows: sampler.log_prob_all(seen[rows])[..., classes].expand(seen[rows].shape[0], -1)

    @torch.no_grad()
    def _exact(self, batch: dict[str, Tensor]) -> Tensor:
        h, target = batch["h"], batch["y"]
        flat = target.squeeze(1) if target.shape[1] == 1 else target
        valid = self._valid(flat).reshape(target.shape)
        self._refuse_targets(flat)
        lse, positive = self._sums(h, torch.where(valid, target, -1), batch.get("features", h))
        terms = torch.where(valid, lse.unsqueeze(1) - positive, 0.0)
        if self.class_weight is not None:
            terms *= self.class_weight[target.clamp(min=0)]
        shares = batch.get("target_weight")
        if shares is None:
            loss = (terms.sum(1) / valid.sum(1).clamp(min=1)).to(positive.dtype)
        else:
            loss = torch.where(valid, terms * shares, 0.0).sum(1).to(positive.dtype)
        weights = batch.get("sample_weight")
        row_weight = self._row_weight(target, shares is not None)
        if weights is not None:
            loss, row_weight = loss * weights, row_weight * weights
        if self.reduction != "mean":
            return loss.sum() if self.reduction == "sum" else loss
        total = row_weight.sum().to(loss.dtype)
        return loss.sum() / torch.where(total == 0, 1.0, total)

    def _row_weight(self, target: Tensor, by_target: bool = False) -> Tensor:
        """What each row counts in a mean; where its targets have weights of their own, 1."""
        target = target.squeeze(1) if target.shape[1] == 1 else target
        return mean_weight(target, self._valid(target), None if by_target else self.class_weight)

    @torch.no_grad()
    def topk(  # type: ignore[override]
        self, h: Tensor, k: int, *, features: Tensor | None = None, chunk_size: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """The k most probable classes of each of this rank's rows, over all shards. Every rank must call it.

        Args:
            h: [*, d], this rank's rows.
            k: how many, 1 to C.
            features: as in `SampledClassifier.topk`.
            chunk_size: classes per chunk.

        Returns:
            (logits [*, k], ids int64 [*, k]), largest first, equal logits in ascending id order.
        """
        lead = self._check_h("topk", h)
        check_int("SampledClassifier.topk", "k", k, 1, self.num_classes)
        rows = h.reshape(-1, self.in_features).to(self.weight.dtype)
        everyone, found = self._gather_queries(rows, features)
        seen = found.get("features", found["h"])
        wide = self._wide()
        logits = torch.full((found["h"].shape[0], k), -torch.inf, dtype=wide, device=h.device)
        ids = torch.full(logits.shape, self.num_classes, dtype=torch.int64, device=h.device)
        here, prior = min(k, self.layout.rows), self._local_prior(seen)
        if here:
            best, at = exact_topk(
                self._query(found["h"]), self.weight, here, self.bias, scale=self.scale,
                absolute=self.loss.absolute, prior=prior, chunk_size=chunk_size, normalize=self.normalize,
            )  # fmt: skip
            logits[:, :here], ids[:, :here] = best, self.layout.classes(h.device)[at]
        all_logits = self.exchange.stack(logits).permute(1, 0, 2).reshape(logits.shape[0], -1)
        all_ids = self.exchange.stack(ids).permute(1, 0, 2).reshape(logits.shape[0], -1)
        by_id = all_ids.argsort(dim=1, stable=True)
        order = all_logits.gather(1, by_id).argsort(dim=1, descending=True, stable=True)[:, :k]
        pick = by_id.gather(1, order)
        logits = self.exchange.own(all_logits.gather(1, pick), everyone.place, everyone.rows)
        ids = self.exchange.own(all_ids.gather(1, pick), everyone.place, everyone.rows)
        return logits.reshape(*lead, k), ids.reshape(*lead, k)

    @torch.no_grad()
    def first_ranks(
        self, h: Tensor, y: Tensor, *, features: Tensor | None = None, known: Tensor | None = None
    ) -> Tensor:
        """The place of the best target of each of this rank's rows among all classes. Every rank must call it.

        Args:
            h: [n, d], this rank's rows.
            y: int64 [n, P], numbers below 0 for none.
            features: as in `SampledClassifier.topk`.
            known: int64 [n, K], classes that are not answers, -1 for none.

        Returns:
            int64 [n], 1 for the best class, ties to the lower id; 0 for a row without a target.
        """
        everyone, found = self._gather_queries(h.to(self.weight.dtype), features, y, known)
        queries, target, out = found["h"], found["ids"], found.get("known")
        prior = self._local_prior(found.get("features", queries))
        if out is not None:
            hidden = (target.unsqueeze(2) == out.unsqueeze(1)).any(2)
            target = torch.where(hidden, -1, target)
        local, wide = self.layout.local(target), self._wide()
        own = torch.zeros(target.shape, dtype=wide, device=h.device)
        for rows, first, logits in self._logits(queries, prior):
            column = local[rows] - first
            here = (local[rows] >= 0) & (column >= 0) & (column < logits.shape[1])
            own[rows] = torch.where(here, logits.gather(1, column.clamp(0, logits.shape[1] - 1)), own[rows])
        own = torch.where(target >= 0, self.exchange.sum_(own), -torch.inf)
        best = own.amax(1, keepdim=True)
        of_best = torch.where(own == best, target, self.num_classes).amin(1, keepdim=True)
        before = torch.zeros(len(queries), dtype=torch.int64, device=h.device)
        classes = self.layout.classes(h.device)
        for rows, first, logits in self._logits(queries, prior):
            some = classes[first : first + logits.shape[1]]
            ahead = (logits > best[rows]) | ((logits == best[rows]) & (some < of_best[rows]))
            for known_one in () if out is None else out[rows].unbind(1):
                ahead &= some != known_one.unsqueeze(1)
            before[rows] += ahead.sum(1)
        places = torch.where(best[:, 0] > -torch.inf, self.exchange.sum_(before) + 1, 0)
        return self.exchange.own(places, everyone.place, everyone.rows)

    def _logits(self, h: Tensor, prior: Any) -> Iterator[tuple[slice, int, Tensor]]:
        """(rows, first local class, logits) of all rows and this rank's classes; the same bits in each pass."""
        if not self.layout.rows:
            return
        absolute, normalize = self.loss.absolute, self.normalize
        for rows, block, added in row_blocks(self._query(h), self.weight, prior):
            for chunk in logit_chunks(block, self.weight, self.bias, self.scale, absolute, added, normalize=normalize):
                yield rows, chunk.first, chunk.logits()

    @torch.no_grad()
    def log_prob(  # type: ignore[override]
        self, h: Tensor, ids: Tensor, *, features: Tensor | None = None
    ) -> Tensor:
        """Exact log-probabilities of some classes of each of this rank's rows. Every rank must call it.

        Args:
            h: [*, d], this rank's rows.
            ids: int64 [*, n].
            features: as in `SampledClassifier.log_prob`.

        Returns:
            [*, n] fp32 (fp64 with fp64 parameters).
        """
        lead = self._check_h("log_prob", h)
        rows = h.reshape(-1, self.in_features).to(self.weight.dtype)
        wanted = ids.reshape(rows.shape[0], ids.shape[-1])
        everyone, found = self._gather_queries(rows, features, wanted)
        lse, positive = self._sums(found["h"], found["ids"], found.get("features", found["h"]))
        log_p = (positive - lse.unsqueeze(1)).to(positive.dtype)
        return self.exchange.own(log_p, everyone.place, everyone.rows).reshape(*lead, ids.shape[-1])

    def predict(self, h: Tensor, *, features: Tensor | None = None, chunk_size: int | None = None) -> Tensor:
        """The most probable class of each of this rank's rows, int64 [*]. Every rank must call it."""
        return self.topk(h, 1, features=features, chunk_size=chunk_size)[1].squeeze(-1)

    def _rows_of_pool(self, pool: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """The pool of the first rank, with rows and biases that the ranks which hold them send to all."""
        ids = self.exchange.stack(pool)[0].clone()
        local, width = self.layout.local(ids), self.in_features
        found = torch.zeros(ids.shape[0], width + 1, dtype=self._wide(), device=ids.device)
        if self.layout.rows:
            here, at = (local >= 0).unsqueeze(1), local.clamp_min(0)
            found[:, :width] = torch.where(here, self.weight[at], 0.0)
            if self.bias is not None:
                found[:, width:] = torch.where(here, self.bias[at].unsqueeze(1), 0.0)
        self.exchange.sum_(found)
        return ids, found[:, :width].contiguous(), None if self.bias is None else found[:, width]

    def index(self, *_: Any, **__: Any) -> Any:
        """Not for a sharded head: no rank has all rows; see `topk`."""
        raise NotImplementedError(f"{_NAME}: a rank holds a part of the rows; topk(h, k) searches all of them")

    def scores(self, *_: Any, **__: Any) -> Tensor:
        """Not for a sharded head: no rank has the scores of all classes; see `topk` and `log_prob`."""
        raise NotImplementedError(f"{_NAME}: a rank holds a part of the classes; use topk or log_prob(h, ids)")

    def linear(self) -> nn.Linear:
        """Not for a sharded head: no rank has all rows; see `full_state_dict`."""
        raise NotImplementedError(f"{_NAME}: a rank holds a part of the rows; full_state_dict() has all of them")

    def _gather_queries(
        self, rows: Tensor, features: Tensor | None, ids: Tensor | None = None, known: Tensor | None = None
    ) -> tuple[Everyone, dict[str, Tensor]]:
        fields = {"h": rows.detach()}
        if features is not None:
            fields["features"] = self._seen(rows, features)
        if ids is not None:
            fields["ids"] = ids
        if known is not None:
            fields["known"] = known
        widths = [0 if t is None else t.shape[1] for t in (ids, known)]
        # As many numbers as a step has.
        form = [self._digest(), 2, 0, *widths, int(features is not None), 0, 0, 0, 0, 0, 0]
        key = torch.zeros(2, dtype=torch.int64, device=rows.device)
        everyone = self.exchange.meet(rows.shape[0], form, key, settings=partial(settings_of, self))
        found = self.exchange.gather(everyone, list(fields.values()), [0] * len(fields))
        return everyone, dict(zip(fields, found, strict=True))
