"""Lightning: a module of encoder and sampled head with one optimizer; automatic optimization, clipping, checkpoints.

A module of your own needs no adapter: return `sx.optim.Combined` from `configure_optimizers`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning import LightningModule
from torch import Tensor, nn

from samplex_cuda.heads import SampledClassifier
from samplex_cuda.metrics import recall_at_k
from samplex_cuda.optim import Combined, RowAdam, split_parameters

__all__ = ["SampledModule"]


class SampledModule(LightningModule):
    """Encoder and head: trains on the sampled loss, validates by the exact one.

    Logs "train_loss", "val_nll" (exact, in chunks) and "val_recall@k". A batch is (x, y).
    `Trainer(gradient_clip_val=...)` clips dense and row gradients together, `accumulate_grad_batches` sums both, a
    checkpoint holds the state of both.

    Args:
        encoder: x to h [*, d].
        head: a `SampledClassifier` with sparse gradients, not fused.
        lr: of both optimizers.
        dense: makes the optimizer of the dense parameters from their list; AdamW by default.
        rows: makes the row optimizer from the list of class tables; `RowAdam` by default.
        scheduler: makes a scheduler from the `Combined` optimizer; stepped after every step.
        k: of the recall.

    Example:
        >>> import torch, samplex_cuda as sx
        >>> head = sx.SampledClassifier(8, 100, sx.samplers.Uniform(100), num_samples=5)
        >>> module = sx.integrations.lightning.SampledModule(torch.nn.Linear(4, 8), head, lr=0.01)
        >>> type(module.configure_optimizers()).__name__
        'Combined'
    """

    def __init__(
        self,
        encoder: nn.Module,
        head: SampledClassifier,
        lr: float = 1e-3,
        *,
        dense: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None,
        rows: Callable[[list[nn.Parameter]], Any] | None = None,
        scheduler: Callable[[Combined], Any] | None = None,
        k: Sequence[int] = (1, 5),
    ) -> None:
        super().__init__()
        self.encoder, self.head, self.lr = encoder, head, lr
        self.make_dense, self.make_rows, self.make_scheduler = dense, rows, scheduler
        self.k = tuple(k)

    def forward(self, x: Any) -> Tensor:
        """h [*, d]."""
        return self.encoder(x)

    def training_step(self, batch: Any, number: int) -> Tensor:
        """The sampled loss of a batch (x, y)."""
        x, y = batch
        loss = self.head(self(x), y)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, number: int) -> None:
        """Exact loss and recall of a batch (x, y)."""
        x, y = batch
        h = self(x).to(self.head.weight.dtype)
        self.log("val_nll", self.head(h, y), prog_bar=True, batch_size=len(y))
        ids = self.head.topk(h, max(self.k))[1]
        self.log_dict({f"val_recall@{k}": recall_at_k(ids, y, k) for k in self.k}, batch_size=len(y))

    def configure_optimizers(self) -> Any:
        """`Combined` of the two, and the scheduler if there is one."""
        if self.head.fused is not None:
            raise ValueError("SampledModule: head must not have a fused optimizer, got one: call fuse_optimizer(None)")
        dense, rows = split_parameters(self)
        optimizer = Combined(
            dense=torch.optim.AdamW(dense, lr=self.lr) if self.make_dense is None else self.make_dense(dense),
            rows=RowAdam(rows, lr=self.lr) if self.make_rows is None else self.make_rows(rows),
        )
        if self.make_scheduler is None:
            return optimizer
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": self.make_scheduler(optimizer), "interval": "step"},
        }
