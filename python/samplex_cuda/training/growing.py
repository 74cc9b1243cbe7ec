"""A run that continues with more classes: a checkpoint of fewer rows in tables of more."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from samplex_cuda.training import checkpoint
from samplex_cuda.training.config import Config
from samplex_cuda.training.run_folder import VOCABULARY, RunError
from samplex_cuda.training.state import put_model, put_optimizers

if TYPE_CHECKING:
    from samplex_cuda.training.trainer import Trainer

__all__ = ["check_growth", "extending", "grown", "write_vocabulary"]

_KINDS = ("dense", "sparse", "interactions", "text")  # text: by the words that the run has kept
_SIZES = ("num_classes", "num_features", "index_base")


def write_vocabulary(run_dir: Path, train: Any) -> None:
    """Keeps the words of text data in the run folder, so that more data can give them the same ids.

    Args:
        run_dir: the run folder.
        train: the training data.
    """
    words = getattr(train, "vocabulary", None)
    if words is not None:
        checkpoint.write_file(run_dir / VOCABULARY, "\n".join(words) + "\n")


def extending(config: Config, run_dir: Path) -> Config:
    """The configuration by which grown text is read: words of the run keep their ids, new ones get the next.

    Args:
        config: of the run; it is not changed.
        run_dir: the run folder.
    """
    config = copy.deepcopy(config)
    words = str((run_dir / VOCABULARY).absolute())
    config.data.options = {**config.data.options, "vocabulary": words, "extend": True}
    return config


def check_growth(trainer: Trainer, path: Path, old: dict[str, Any]) -> None:
    """Refuses data that a run cannot grow into.

    Args:
        trainer: with the new data.
        path: of the checkpoint.
        old: what it says of its data.
    """
    train, where = trainer.train, f"trainer: {trainer.run_dir}"
    if trainer.ranks.world > 1 or trainer.config.training.shard != "none":
        raise RunError(f"{where}: grow must be False with several ranks or training.shard, got True")
    if train.kind not in _KINDS or train.kind != old["kind"]:
        raise RunError(
            f"{where}: grow needs {old['kind']} data as before, of a kind with stable class ids "
            f"({', '.join(_KINDS)}), got {train.kind}"
        )
    if train.kind == "text":
        _check_words(trainer, where)
    for name in _SIZES:
        before, now = old.get(name), getattr(train, name, None)
        if isinstance(before, int) and not (now == before or (name != "index_base" and now and now > before)):
            raise RunError(
                f"{where}: grow must keep every id, so {name} must be at least {before}, got {now}; classes that no "
                "longer occur stay (num_classes in data.options)"
                if name != "index_base"
                else f"{where}: grow must keep every id, so index_base must be {before}, got {now}"
            )


def _check_words(trainer: Trainer, where: str) -> None:
    words = getattr(trainer.train, "vocabulary", None)
    path = trainer.run_dir / VOCABULARY
    if words is None and not path.exists():
        return  # ids are those of the file
    if not path.exists():
        raise RunError(
            f"{where}: grow needs the words of the run in {VOCABULARY}, which runs of earlier versions do not have, "
            "got none; begin a new run"
        )
    held = path.read_text(encoding="utf-8").split()
    if words is None or words[: len(held)] != held:
        raise RunError(
            f"{where}: grow must keep every id, so the vocabulary must begin with the {len(held)} words of "
            f"{VOCABULARY}, got other words; open the text with vocabulary={str(path)!r}, extend=True"
        )


def grown(trainer: Trainer, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
    """Rows of a checkpoint put before the new rows of the trainer's model, which was made from the new data.

    New rows and their optimizer state are as at the start of a run. A sampler that is made from the data (counts, a
    fitted tree) is that of the new data; one that follows the class table is built again from it.

    Args:
        trainer: with a model of the new size.
        tensors: of the checkpoint; changed in place.
        meta: of the checkpoint; changed in place.
    """
    head: Any = trainer.head
    if head.loss.needs.prior:
        raise RunError(
            f"trainer: {trainer.run_dir}: grow needs a loss whose scores do not depend on its sampler, which changes "
            f"with the classes, got {trainer.config.head.loss}; begin a new run"
        )
    fresh: dict[str, Tensor] = {}
    put_model(fresh, trainer.encoder, head)
    put_optimizers(fresh, trainer.optimizers)
    for name in list(tensors):
        old = tensors[name]
        if name.startswith(("head.sampler.", "carried.")) or name == "head.sampler_lag":
            del tensors[name]
            continue
        made = fresh.get(name.removeprefix("average.") if name.startswith("average.") else name)
        if made is None or made.shape == old.shape or made.dim() != old.dim() or made.dim() == 0:
            continue
        if made.shape[1:] == old.shape[1:] and made.shape[0] > old.shape[0]:
            made = made.detach().cpu().to(old.dtype, copy=True)
            made[: old.shape[0]] = old
            tensors[name] = made
    tensors.update({name: t for name, t in fresh.items() if name.startswith("head.sampler.")})
    progress = dict(meta["progress"])
    # Another epoch begins: the place in that of before means nothing in other data, nor does the best value.
    progress |= {"epoch": progress["epoch"] + (progress["batch"] > 0), "batch": 0, "best": None, "bad": 0}
    meta["progress"] = progress
