"""sentence-transformers: losses over sampled classes, and over the batch corrected for the frequency of its texts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn

from samplex_cuda.functional import contrastive
from samplex_cuda.heads import SampledClassifier
from samplex_cuda.optim import Combined, RowAdam, split_parameters

__all__ = ["InBatchLoss", "SampledSoftmaxLoss", "make_optimizer"]


def _embed(model: Any, features: Iterable[dict[str, Tensor]]) -> list[Tensor]:
    """Embeddings [B, d] of each column of texts."""
    return [model(feature)["sentence_embedding"] for feature in features]


class SampledSoftmaxLoss(nn.Module):
    """Classifies a text among C classes (products, labels, entities) by a sampled softmax over class vectors.

    The data set has one column of texts and "label", the class. Where both the text and the class vector are
    normalized, `scale` is an inverse temperature, as in `MultipleNegativesRankingLoss`.

    Args:
        model: whose embeddings are classified.
        num_classes: C.
        sampler: of `samplex_cuda.samplers`, for C classes.
        num_samples: draws per batch, or per text with `shared=False`.
        shared: whether the texts of a batch share the draws.
        normalize: normalize the embeddings of texts.
        options: further options of `SampledClassifier`, e.g. `scale`, `bias`, `loss`.

    Example:
        >>> import samplex_cuda as sx
        >>> sx.integrations.sentence_transformers.SampledSoftmaxLoss  # doctest: +ELLIPSIS
        <class '...SampledSoftmaxLoss'>
    """

    def __init__(
        self,
        model: SentenceTransformer,
        num_classes: int,
        sampler: nn.Module,
        num_samples: int,
        *,
        shared: bool = True,
        normalize: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        self.model, self.normalize = model, normalize
        dim: Any = model.get_embedding_dimension()
        self.head = SampledClassifier(dim, num_classes, sampler, num_samples, shared=shared, **options)
        self.head.to(model.device)

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor) -> Tensor:
        """The sampled loss in training, the exact one where this module or the model is in evaluation mode.

        Args:
            sentence_features: tokens of one column of texts.
            labels: int64 [B], the classes.
        """
        self.head.train(self.training and self.model.training)  # the library's trainer changes the model alone
        embedded = _embed(self.model, sentence_features)
        if len(embedded) != 1:
            raise ValueError(f"SampledSoftmaxLoss: the data must have one column of texts, got {len(embedded)}")
        h = nn.functional.normalize(embedded[0], dim=1) if self.normalize else embedded[0]
        return self.head(h.to(self.head.weight.dtype), labels.reshape(-1))

    def get_config_dict(self) -> dict[str, Any]:
        """What a model card says of the loss."""
        return {
            "num_classes": self.head.num_classes,
            "num_samples": self.head.num_samples,
            "loss": repr(self.head.loss),
        }


class InBatchLoss(nn.Module):
    """`MultipleNegativesRankingLoss` with the correction for frequent positives (log Q).

    A positive that occurs often is a negative of other rows as often: without a correction its score is pushed down.
    The log of its frequency is subtracted from its logit as a negative. Rows with the same positive are not negatives
    of each other. The data set has two columns of texts, anchor and positive, and "label", the number of the positive
    in `counts`; or a list of equal length in every row, the number of the positive and then those of all other
    positives that are known of this anchor, padded with -100: they are not negatives of it.

    Args:
        model: whose embeddings are compared, by cosine.
        counts: [C], how often each positive occurs in the data; None: no correction, and labels are not read.
        scale: inverse temperature.

    Example:
        >>> import samplex_cuda as sx
        >>> sx.integrations.sentence_transformers.InBatchLoss  # doctest: +ELLIPSIS
        <class '...InBatchLoss'>
    """

    log_q: Tensor | None

    def __init__(self, model: SentenceTransformer, counts: Tensor | None = None, scale: float = 20.0) -> None:
        super().__init__()
        self.model, self.scale = model, scale
        log_q = None
        if counts is not None:
            if counts.dim() != 1 or not bool((counts > 0).all()):
                raise ValueError(f"InBatchLoss: counts must be [C] and above 0, got {list(counts.shape)}")
            log_q = (counts.double() / counts.sum()).log().float().to(model.device)
        self.register_buffer("log_q", log_q, persistent=False)

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None) -> Tensor:
        """The loss of a batch.

        Args:
            sentence_features: tokens of anchors and of positives.
            labels: int64 [B], which positive each one is, or [B, 1 + K] with further known ones.
        """
        embedded = _embed(self.model, sentence_features)
        if len(embedded) != 2:
            raise ValueError(f"InBatchLoss: the data must have two columns of texts, got {len(embedded)}")
        anchor, positive = (nn.functional.normalize(e.float(), dim=1) for e in embedded)
        if self.log_q is None:
            return contrastive(anchor, positive, scale=self.scale)
        assert labels is not None
        rows = labels.reshape(anchor.shape[0], -1).long()
        ids, known = rows[:, 0].contiguous(), None
        if rows.shape[1] > 1:
            offsets = torch.arange(rows.shape[0] + 1, device=rows.device) * (rows.shape[1] - 1)
            known = offsets, rows[:, 1:].reshape(-1)
        return contrastive(
            anchor, positive, scale=self.scale, log_q=self.log_q[ids], key_ids=ids, known_positives=known
        )

    def get_config_dict(self) -> dict[str, Any]:
        """What a model card says of the loss."""
        return {"scale": self.scale, "log_q": self.log_q is not None}


class _WithHead(Combined):
    """`Combined` with the state of a head, for which a checkpoint of the library has no place: it stores the model."""

    head: SampledClassifier

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "head": self.head.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        rest = dict(state_dict)
        head = rest.pop("head", None)
        super().load_state_dict(rest)
        if head is not None:
            self.head.load_state_dict(head)


def make_optimizer(loss: SampledSoftmaxLoss, lr: float = 2e-5, row_lr: float = 1e-2) -> Combined:
    """AdamW for the model and `RowAdam` for the class vectors, for `SentenceTransformerTrainer(optimizers=...)`.

    Its state holds the class vectors and the sampler, too: `resume_from_checkpoint` brings them back.

    Args:
        loss: with the model inside.
        lr: of the model.
        row_lr: of the class vectors.
    """
    dense, rows = split_parameters(loss)
    optimizer = _WithHead(dense=torch.optim.AdamW(dense, lr=lr), rows=RowAdam(rows, lr=row_lr))
    optimizer.head = loss.head
    return optimizer
