"""sentence-transformers: the in-batch loss, corrected for the frequency of its texts."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn

from samplex_cuda._checks import describe
from samplex_cuda.functional import contrastive
from samplex_cuda.samplers import StreamingFrequency

__all__ = ["InBatchLoss", "embed", "processes"]


def embed(model: Any, features: Iterable[dict[str, Tensor]]) -> list[Tensor]:
    """Embeddings [B, d] of each column of texts.

    Args:
        model: of sentence-transformers.
        features: tokens of each column.
    """
    return [model(feature)["sentence_embedding"] for feature in features]


def processes() -> int:
    """How many processes train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


class InBatchLoss(nn.Module):
    """`MultipleNegativesRankingLoss` with the correction for frequent positives (log Q).

    A positive that occurs often is a negative of other rows as often: without a correction its score is pushed down.
    The log of its frequency is subtracted from its logit as a negative. Rows with the same positive are not negatives
    of each other.

    The data set has columns of texts, anchor, positive and any number of negatives, which are negatives of all rows
    and are not corrected. With `counts` or `frequency` it also has "label": the number of the positive, or a list with
    those of the positive and of each negative, which are masked in the rows whose positive they are. Further numbers in
    the list, padded with -100, are known positives of the anchor: masked in its row.

    Args:
        model: whose embeddings are compared, by cosine.
        counts: [C], how often each positive occurs in the data.
        scale: inverse temperature.
        frequency: estimates that instead, from the batches of the training. With neither there is no correction, and
            labels are not read.
        symmetric: the mean of this loss and that of the positives against the anchors, which is not corrected: the
            frequency of anchors is not known.
        gather_across_devices: the batch is that of all processes, as in `MultipleNegativesRankingLoss`.

    Example:
        >>> import samplex_cuda as sx
        >>> sx.integrations.sentence_transformers.InBatchLoss  # doctest: +ELLIPSIS
        <class '...InBatchLoss'>
    """

    log_q: Tensor | None

    def __init__(
        self,
        model: SentenceTransformer,
        counts: Tensor | None = None,
        scale: float = 20.0,
        *,
        frequency: StreamingFrequency | None = None,
        symmetric: bool = False,
        gather_across_devices: bool = False,
    ) -> None:
        super().__init__()
        if not (frequency is None or isinstance(frequency, StreamingFrequency)):
            raise TypeError(f"InBatchLoss: frequency must be a StreamingFrequency or None, got {describe(frequency)}")
        if counts is not None and frequency is not None:
            raise ValueError("InBatchLoss: frequency must be None with counts, got both")
        self.model, self.scale, self.symmetric = model, scale, symmetric
        self.gather_across_devices = gather_across_devices
        self.frequency = None if frequency is None else frequency.to(model.device)
        log_q = None
        if counts is not None:
            if counts.dim() != 1 or not bool((counts > 0).all()):
                raise ValueError(f"InBatchLoss: counts must be [C] and above 0, got {list(counts.shape)}")
            log_q = (counts.double() / counts.sum()).log().float().to(model.device)
        self.register_buffer("log_q", log_q, persistent=False)

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None) -> Tensor:
        """The loss of a batch.

        Args:
            sentence_features: tokens of anchors, of positives, and of each column of negatives.
            labels: int64 [B], which positive each one is; [B, columns] with the numbers of the negatives; more columns
                for known positives.
        """
        embedded = embed(self.model, sentence_features)
        if len(embedded) < 2:
            raise ValueError(f"InBatchLoss: the data must have at least two columns of texts, got {len(embedded)}")
        anchor, *columns = (nn.functional.normalize(e.float(), dim=1) for e in embedded)
        group = dist.group.WORLD if self.gather_across_devices and processes() > 1 else None
        ids = self._ids(labels, anchor.shape[0], len(columns), anchor.device, group)
        log_q = self._log_q(ids, anchor.shape[0], group)
        known = None
        if log_q is not None and labels is not None and labels.dim() == 2 and labels.shape[1] > len(columns):
            further = labels[:, len(columns) :].long()
            known = torch.arange(len(further) + 1, device=ids.device) * further.shape[1], further.reshape(-1)
        loss = contrastive(
            anchor, torch.cat(columns), scale=self.scale, log_q=log_q, key_ids=ids, known_positives=known, group=group
        )
        if not self.symmetric:
            return loss
        own = None if log_q is None else ids[: anchor.shape[0]]
        return (loss + contrastive(columns[0], anchor, scale=self.scale, key_ids=own, group=group)) / 2

    def _ids(self, labels: Tensor | None, rows: int, columns: int, device: torch.device, group: Any) -> Tensor:
        """What each key is, int64 [columns * rows]; one that is not known has a distinct negative number."""
        first = rows * columns * (0 if group is None else dist.get_rank(group))
        ids = -2 - torch.arange(first, first + rows * columns, device=device)
        if self.log_q is None and self.frequency is None:
            return ids
        wide = labels is not None and labels.dim() == 2 and labels.shape[0] == rows and labels.shape[1] >= columns
        if labels is None or not (wide or labels.shape in ((rows,), (rows, 1))):
            got = "None" if labels is None else describe(labels)
            raise ValueError(
                f"InBatchLoss: labels must be [{rows}] or [{rows}, {columns}] with counts or frequency, a column "
                f'"label" with the numbers of the texts, got {got}'
            )
        known = labels.reshape(rows, -1)[:, :columns].T.reshape(-1).long()
        most = len(self.log_q) if self.log_q is not None else 1 << 52
        if known.is_cpu and len(known) and not (int(known.min()) >= 0 and int(known.max()) < most):
            wrong = int(known[(known < 0) | (known >= most)][0])
            raise IndexError(f"InBatchLoss: labels must be in [0, {most}), got {wrong}")
        return torch.cat([known, ids[len(known) :]])

    def _log_q(self, ids: Tensor, rows: int, group: Any) -> Tensor | None:
        """log q of the positives, and what makes each further key count once; None without a correction."""
        own, world = ids[:rows], 1 if group is None else dist.get_world_size(group)
        if self.log_q is not None:
            log_q = self.log_q[own]
        elif self.frequency is not None:
            if self.training and torch.is_grad_enabled():
                self.frequency.update(own, group=group)
            log_q = self.frequency.log_q(own)
        else:
            return None
        # The loss divides by the number of all keys but one; draws are those of the other rows.
        others, total = math.log(max(world * rows - 1, 1)), math.log(max(world * len(ids) - 1, 1))
        return torch.cat([log_q + (others - total), log_q.new_full((len(ids) - rows,), -total)])

    def get_config_dict(self) -> dict[str, Any]:
        """What a model card says of the loss."""
        return {
            "scale": self.scale,
            "log_q": "frequency" if self.frequency is not None else self.log_q is not None,
            "symmetric": self.symmetric,
            "gather_across_devices": self.gather_across_devices,
        }
