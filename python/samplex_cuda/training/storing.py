"""The state of a run in a checkpoint, and back."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from samplex_cuda.training import checkpoint
from samplex_cuda.training.growing import check_growth, grown
from samplex_cuda.training.run_folder import RunError
from samplex_cuda.training.state import (
    UNFIT,
    Progress,
    about,
    check_meta,
    environment,
    load_state,
    put_model,
    put_optimizers,
    take_model,
    take_optimizers,
    upgrade,
)

if TYPE_CHECKING:
    from samplex_cuda.training.trainer import Trainer

__all__ = ["Whole", "unfit"]


class Whole:
    """Checkpoints of one process."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def meta(self, kind: str = "") -> dict[str, Any]:
        """What is not a tensor; `kind`: "best" has only the model."""
        t = self.trainer
        found: dict[str, Any] = {
            "progress": dataclasses.asdict(t.progress),
            "metrics": t.metrics,
            "config": (t.config if t.chooser is None else t.chooser.config_of(t.chooser.present)).as_dict(),
            "data": about(t.train),
        }
        if t.chooser is not None and not kind:
            found["chooser"] = t.chooser.state()
        return found | ({"kind": kind} if kind else {"environment": environment(t.device)})

    def save(self, path: Path) -> None:
        """Everything that the rest of the run depends on."""
        t = self.trainer
        tensors: dict[str, Tensor] = {}
        put_model(tensors, t.encoder, t.head)
        meta = self.meta() | {"optimizers": put_optimizers(tensors, t.optimizers)}
        tensors.update({f"average.{name}": value for name, value in t.average.items()})
        tensors.update({f"carried.{name}": value for name, value in t.encoder.carried().items()})
        rng = {"cpu": torch.get_rng_state()}
        if t.device.type == "cuda":
            rng["cuda"] = torch.cuda.get_rng_state(t.device)
        tensors.update({f"rng.{name}": value for name, value in rng.items()})
        checkpoint.save(path, tensors, meta, keep=t.config.training.keep)

    def save_best(self, path: Path) -> None:
        """The model alone, as it is."""
        tensors: dict[str, Tensor] = {}
        put_model(tensors, self.trainer.encoder, self.trainer.head)
        checkpoint.save(path, tensors, self.meta("best"), keep=1)

    def restore(self, path: Path) -> str:
        """Makes the model and takes over a checkpoint that is whole; what the last bits depend on and is another."""
        t = self.trainer
        tensors, meta = load_state(path)
        changed = check_meta(path, meta, t.config, t.train, t.device, t.grow)
        grow = meta["data"]["fingerprint"] != t.train.fingerprint()
        if grow:
            check_growth(t, path, meta["data"])
            if t.chooser is not None:
                raise RunError(
                    f"trainer: {t.run_dir}: sampler.choose_every must be 0 in a run that grows, got "
                    f"{t.config.sampler.choose_every}"
                )
        t.make(fit=grow)  # a sampler is that of the new data
        try:
            upgrade(tensors, meta)
            if grow:
                grown(t, tensors, meta)
            if t.chooser is not None:
                t.chooser.restore(meta["chooser"], t.encoder, t.head)
            self._take(tensors, meta)
            self._begin(meta)
        except RunError:
            raise
        except UNFIT as error:
            raise unfit(t.run_dir, path, error) from None
        if grow:
            t.head.mark_changed()  # a sampler that follows the table has not seen the rows
        return changed

    def _take(self, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
        """Whole tensors."""
        t = self.trainer
        take_model(tensors, t.encoder, t.head)
        take_optimizers(tensors, meta["optimizers"], t.optimizers)
        averaged = t.averages() if t.config.training.average != "none" else {}
        t.average = {name: tensors[f"average.{name}"].to(t.device) for name in averaged if f"average.{name}" in tensors}
        t.encoder.carry(
            {n.removeprefix("carried."): v.to(t.device) for n, v in tensors.items() if n.startswith("carried.")}
        )
        t.rng = {n.removeprefix("rng."): v for n, v in tensors.items() if n.startswith("rng.")} or t.first_rng()

    def _begin(self, meta: dict[str, Any]) -> None:
        t = self.trainer
        t.progress, t.metrics = Progress(**meta["progress"]), meta["metrics"]
        p, patience = t.progress, t.config.training.patience
        if p.batch >= t.epoch_batches:  # larger batches than before: fewer make an epoch
            p.epoch, p.batch = p.epoch + 1, 0
        out_of_patience = p.status == "early_stop" and 0 < patience <= p.bad
        if p.step < t.total_steps and not out_of_patience:
            p.status = "running"  # more epochs, or more patience, than before


def unfit(run_dir: Path, path: Path, error: BaseException) -> RunError:
    """What is raised for a checkpoint of another model."""
    return RunError(
        f"trainer: {run_dir}: {path.name} does not fit the configuration; another model, sampler or "
        f"optimizer needs a new run: {error}"
    )
