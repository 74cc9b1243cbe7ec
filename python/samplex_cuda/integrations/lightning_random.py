"""torch's generators in Lightning's checkpoints."""

from __future__ import annotations

from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer

__all__ = ["RandomState"]


class RandomState(Callback):
    """Stores torch's generators in checkpoints, so that a resumed run draws what the uninterrupted one drew.

    Lightning does not store them. `SampledModule` brings this callback; a module of your own takes it in
    `Trainer(callbacks=[...])`. On several processes it does nothing.

    Example:
        >>> import lightning, samplex_cuda as sx
        >>> callbacks = [sx.integrations.lightning.RandomState()]
        >>> trainer = lightning.Trainer(callbacks=callbacks, accelerator="cpu", logger=False)
    """

    def __init__(self) -> None:
        self._one_process = True
        self._in_epoch: dict[str, Any] | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Reads the number of processes."""
        self._one_process = trainer.world_size == 1

    def state_dict(self) -> dict[str, Any]:
        """State of the generators."""
        return {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all()} if self._one_process else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes it over."""
        if state_dict and self._one_process:
            self._in_epoch = state_dict
            self._restore(state_dict)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """In the middle of an epoch: the new iterator over the data has drawn a number."""
        if self._in_epoch is not None:
            if batch_idx > 0:
                self._restore(self._in_epoch)
            self._in_epoch = None

    @staticmethod
    def _restore(state: dict[str, Any]) -> None:
        torch.set_rng_state(state["cpu"].cpu())
        if len(state["cuda"]) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all([one.cpu() for one in state["cuda"]])
