"""Lightning: a module of encoder and sampled head with one optimizer; clipping, accumulation, exact resume.

A module of your own needs no adapter: return `sx.optim.Combined` from `configure_optimizers`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning import Callback, LightningModule
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

from samplex_cuda.heads import SampledClassifier
from samplex_cuda.integrations.lightning_random import RandomState
from samplex_cuda.metrics import recall_at_k
from samplex_cuda.optim import Combined, RowAdam, split_parameters

__all__ = ["RandomState", "SampledModule"]

_UNTIL_STEP = 2**31 - 1  # backwards of one update: the optimizer's step() makes it


class _OfModule(Combined):
    """`Combined` whose step also makes the update of fused rows that wait for it, however many backwards there were."""

    head: SampledClassifier

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.head.fused is not None:
            self.head.fused.flush()
        super().step()
        return loss


class SampledModule(LightningModule):
    """Encoder and head: trains on the sampled loss, validates by the exact one.

    Logs "train_loss", "val_nll" (exact, in chunks) and "val_recall@k". A batch is (x, y).
    `Trainer(gradient_clip_val=...)` clips dense and row gradients together, `accumulate_grad_batches` sums both, a
    checkpoint holds the state of both and of torch's generators: a resumed run has the bits of the uninterrupted one.

    With `fused=True` the class rows are updated inside backward, or at the last backward of
    `accumulate_grad_batches`, and no gradient of theirs is stored. Where the Trainer clips, where the table is tied to
    another layer, and in "16-mixed", whose GradScaler may leave a step out, the rows wait for `step()`: `waits` says
    why.

    On several processes (`strategy="ddp"`) every process keeps the whole class table, and all make the same update of
    it, by `sx.distributed.replicate`. The losses that are logged are then the means over all processes.

    Args:
        encoder: x to h [*, d].
        head: a `SampledClassifier` with sparse gradients, not fused.
        lr: of both optimizers.
        dense: makes the optimizer of the dense parameters from their list; AdamW by default.
        rows: makes the row optimizer from the list of class tables; `RowAdam` by default.
        scheduler: makes a scheduler from the `Combined` optimizer; stepped after every step.
        k: of the recall.
        fused: update the class rows inside backward where that is possible.

    Example:
        >>> import torch, samplex_cuda as sx
        >>> head = sx.SampledClassifier(8, 100, sx.samplers.Uniform(100), num_samples=5)
        >>> module = sx.integrations.lightning.SampledModule(torch.nn.Linear(4, 8), head, lr=0.01, fused=True)
        >>> isinstance(module.configure_optimizers(), sx.optim.Combined)
        True
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
        fused: bool = False,
    ) -> None:
        super().__init__()
        self.encoder, self.head, self.lr = encoder, head, lr
        self.make_dense, self.make_rows, self.make_scheduler = dense, rows, scheduler
        self.k = tuple(k)
        self.fused = fused
        self.waits: str | None = None
        self._fusion: Any = None

    def forward(self, x: Any) -> Tensor:
        """h [*, d]."""
        return self.encoder(x)

    def training_step(self, batch: Any, number: int) -> Tensor:
        """The sampled loss of a batch (x, y)."""
        x, y = batch
        loss = self.head(self(x), y)
        self.log("train_loss", loss, prog_bar=True)  # on several processes it is that of all their rows
        return loss

    def validation_step(self, batch: Any, number: int) -> None:
        """Exact loss and recall of a batch (x, y)."""
        x, y = batch
        h = self(x).to(self.head.weight.dtype)
        options: dict[str, Any] = {"batch_size": len(y), "sync_dist": self.trainer.world_size > 1}
        self.log("val_nll", self.head(h, y), prog_bar=True, **options)
        ids = self.head.topk(h, max(self.k))[1]
        self.log_dict({f"val_recall@{k}": recall_at_k(ids, y, k) for k in self.k}, **options)

    def setup(self, stage: str) -> None:
        """On several processes: replicates the class tables, before the strategy wraps the module."""
        if stage != "fit" or self.trainer.world_size == 1:
            return
        strategy = self.trainer.strategy
        if type(strategy) is not DDPStrategy:
            raise ValueError(
                f'SampledModule: strategy must be "ddp" on several processes, got {type(strategy).__name__}: '
                "for others see docs/scale.md"
            )
        from samplex_cuda.distributed import replicate

        replicate(self.to(strategy.root_device), encoder="average", batch_capacity="grow")

    def configure_callbacks(self) -> list[Callback]:
        """`RandomState`, unless the Trainer has one."""
        trainer: Any = self.trainer
        has = any(isinstance(one, RandomState) for one in trainer.callbacks)
        return [] if has else [RandomState()]

    def configure_optimizers(self) -> Any:
        """`Combined` of the two, and the scheduler if there is one."""
        if self.head.fused is not None:
            if self.head.fused is not self._fusion:
                raise ValueError(
                    "SampledModule: head must not be fused by the caller, got a head with a fused optimizer: call "
                    "head.fuse_optimizer(None), and pass fused=True here"
                )
            self.head.fuse_optimizer(None)  # of a fit that ended with an error
        dense, rows = split_parameters(self)
        optimizer = _OfModule(
            dense=torch.optim.AdamW(dense, lr=self.lr) if self.make_dense is None else self.make_dense(dense),
            rows=RowAdam(rows, lr=self.lr) if self.make_rows is None else self.make_rows(rows),
        )
        optimizer.head = self.head
        if self.make_scheduler is None:
            return optimizer
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": self.make_scheduler(optimizer), "interval": "step"},
        }

    # ---------------------------------------------------------------------------------------------- fused rows
    def _reason_to_wait(self) -> str | None:
        table, trainer = self.head.weight, self.trainer
        others = (m for m in self.modules() if m is not self.head)
        if any(p is table for m in others for p in m.parameters(recurse=False)):
            return "the class table is tied to another layer, whose gradient comes later"
        if trainer.gradient_clip_val:
            return f"gradient_clip_val={trainer.gradient_clip_val:g} needs all gradients first"
        if getattr(trainer.precision_plugin, "scaler", None) is not None:
            return "the GradScaler of 16-mixed may leave a step out"
        return None

    def on_train_start(self) -> None:
        """Decides whether the rows wait for `step()`."""
        self.waits = self._reason_to_wait() if self.fused else None

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Fuses the head for the current number of batches per step."""
        if not self.fused or self.waits is not None:
            return
        count = self.trainer.accumulate_grad_batches if self.automatic_optimization else _UNTIL_STEP
        if self.head.fused is None or self.head.fused.accumulate != count:
            optimizer: Any = self.trainer.optimizers[0]
            self.head.fuse_optimizer(optimizer, count)
            self._fusion = self.head.fused

    def on_train_end(self) -> None:
        """Leaves the head as it was."""
        if self.head.fused is not None:
            self.head.fuse_optimizer(None)

    def clip_gradients(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clips dense and row gradients together; raises for fused rows, whose gradients are gone."""
        if self.head.fused is not None and gradient_clip_val:
            raise ValueError(
                "SampledModule.clip_gradients: gradient_clip_val must be 0 with fused rows, got "
                f"{gradient_clip_val:g}: they were updated inside backward. Pass Trainer(gradient_clip_val=...), with "
                "which they wait for step(), or fused=False"
            )
        super().clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
