"""sentence-transformers: losses over sampled classes, and over the batch corrected for the frequency of its texts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn

from samplex_cuda.heads import SampledClassifier
from samplex_cuda.integrations.sentence_in_batch import InBatchLoss, embed, processes
from samplex_cuda.optim import Combined, RowAdam, split_parameters

__all__ = ["InBatchLoss", "SampledSoftmaxLoss", "make_optimizer"]


class SampledSoftmaxLoss(nn.Module):
    """Classifies a text among C classes (products, labels, entities) by a sampled softmax over class vectors.

    The data set has one column of texts and "label", the class. Where both the text and the class vector are
    normalized, `scale` is an inverse temperature, as in `MultipleNegativesRankingLoss`. On several processes each keeps
    all class vectors, by `sx.distributed.replicate`, and all make the same update of them.

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
        embedded = embed(self.model, sentence_features)
        if len(embedded) != 1:
            raise ValueError(f"SampledSoftmaxLoss: the data must have one column of texts, got {len(embedded)}")
        if self.head._replica is None and self.head.training and processes() > 1:
            from samplex_cuda.distributed import replicate

            replicate(self.head, encoder="average", batch_capacity="grow")
        h = nn.functional.normalize(embedded[0], dim=1) if self.normalize else embedded[0]
        return self.head(h.to(self.head.weight.dtype), labels.reshape(-1))

    def get_config_dict(self) -> dict[str, Any]:
        """What a model card says of the loss."""
        return {
            "num_classes": self.head.num_classes,
            "num_samples": self.head.num_samples,
            "loss": repr(self.head.loss),
        }


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
