"""Which process of a run does what: one process, or the ranks of `torch.distributed` with a sharded class table.

`Trainer` asks these objects wherever ranks differ from one process: which rows of a batch are its own, who writes
files, what all ranks must decide together. `Alone` answers for one process, `sharded.Ranks` for several.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from samplex_cuda import optim
from samplex_cuda.data import Dataset
from samplex_cuda.heads import SampledClassifier
from samplex_cuda.training import models, run_folder
from samplex_cuda.training.config import Config, ConfigError
from samplex_cuda.training.run_folder import RunError
from samplex_cuda.training.storing import Whole

if TYPE_CHECKING:
    from samplex_cuda.training.trainer import Trainer

__all__ = ["Alone", "RanksError", "join", "launched"]

T = TypeVar("T")


class RanksError(RunError):
    """What stops every rank at the same time, with the same message; one of them prints it."""


class Alone:
    """One process: nothing to share, nobody to wait for.

    Example:
        >>> import torch
        >>> from samplex_cuda.training.ranks import Alone
        >>> Alone().part(torch.arange(4)).tolist(), Alone().most(3)
        ([0, 1, 2, 3], 3)
    """

    rank, world, sharded = 0, 1, False

    @property
    def leads(self) -> bool:
        """Whether this process writes logs, metrics and the summary."""
        return self.rank == 0

    def lead(self, work: Callable[[], T]) -> T:
        """Something that one process does for all; every rank gets what it returns, or its error."""
        return work()

    def in_turn(self, work: Callable[[], T]) -> T:
        """Something that every rank does, the first one before the others: it may fill a cache for them."""
        return work()

    def agree(self, what: dict[str, Any]) -> None:
        """Stops every rank where they differ."""

    def part(self, rows: Tensor) -> Tensor:
        """The rows of a batch of all ranks that are this one's, [n]."""
        return rows

    def batch(self, dataset: Dataset, rows: Tensor) -> dict[str, Tensor]:
        """The batch of these rows, of a form that all ranks have."""
        return dataset.batch(rows)

    def most(self, number: int) -> int:
        """The largest of the numbers that the ranks bring."""
        return number

    def sums(self, numbers: list[int]) -> list[int]:
        """Sums over the ranks."""
        return numbers

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in their order."""
        return [value]

    @contextlib.contextmanager
    def lock(self, run_dir: Path) -> Iterator[None]:
        """The run folder belongs to this run."""
        with contextlib.ExitStack() as stack:
            self.lead(lambda: stack.enter_context(run_folder.lock(run_dir)))
            yield

    @contextlib.contextmanager
    def alive(self, stopped: Callable[[], bool]) -> Iterator[None]:
        """Lets other ranks see that this one lives; `stopped` says whether it should end and not wait for them."""
        yield

    def watch(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Around what needs the other ranks: an error of the transport names those that are silent."""
        return contextlib.nullcontext()

    def seed(self, seed: int, step: int) -> None:
        """Torch's generator for this step, where its state is not in the checkpoint."""

    def build(
        self, config: Config, train: Dataset, batch_size: int, fit: bool, trust_model: str | None
    ) -> tuple[models.Encoder, SampledClassifier]:
        """Encoder and head."""
        return models.build(config, train, fit=fit, trust_model=trust_model)

    def refit(self, config: Config, train: Dataset, encoder: models.Encoder, head: SampledClassifier) -> None:
        """Fits the tree of the sampler again."""
        models.refit_tree(config, train, encoder, head)

    def encode(self, encoder: models.Encoder, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """h and features of a training batch."""
        return encoder.encode(batch)

    def row_losses(self, head: SampledClassifier, h: Tensor, y: Tensor, features: Tensor | None) -> Tensor:
        """Exact NLL of each row, [n]; the head is in evaluation and does not reduce."""
        return head(h, y, features=features)

    def best_without(
        self, head: SampledClassifier, h: Tensor, features: Tensor | None, k: int, offsets: Tensor, known: Tensor
    ) -> Tensor:
        """The k best classes of each row that are not among its known ones, CSR; -1 where fewer are left."""
        from samplex_cuda.metrics import _topk_without

        return _topk_without(head, h, features, k, offsets, known)

    def log_q(self, head: SampledClassifier, seen: Tensor, ids: Tensor, context: Tensor | None) -> Tensor:
        """Log-probability of ids [n, k] under the head's sampler, which looks at `seen` [n, f]."""
        sampler: Any = head.sampler
        return sampler.log_prob(seen, ids, context=context)

    def first_ranks(
        self,
        head: SampledClassifier,
        h: Tensor,
        y: Tensor,
        features: Tensor | None,
        known: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        """The place of the first target of each row among all classes, without its known ones, CSR; [n], 0 for none."""
        from samplex_cuda.metrics import _first_ranks

        return _first_ranks(head, h, y, features, known)

    def part_weights(self, encoder: models.Encoder) -> None:
        """Leaves each rank its part of the weights of an encoder that FSDP2 has put together for a forward."""

    def join_rows(self, tables: list[nn.Parameter]) -> None:
        """Makes the row gradients of embedding tables those of all ranks."""

    def clip(self, parameters: list[nn.Parameter], norm: float, head: Sequence[nn.Parameter] = ()) -> float:
        """Clips gradients, of those of the encoder and of the head together; their norm before that."""
        return float(optim.clip_grad_norm_([*parameters, *head], norm))

    def doing(self, what: str) -> None:
        """What this rank does now, for the messages of others."""

    def store(self, trainer: Trainer) -> Whole:
        """What saves and restores the state of a trainer."""
        return Whole(trainer)

    def close(self) -> None:
        """Ends what `join` began."""


def join(config: Config) -> Alone:
    """The ranks of a run: those of torchrun (or of a process group that is there already) with `training.shard`.

    Without torchrun a sharded run has one rank. The ranks must have been started with the same configuration.

    Example:
        >>> from samplex_cuda.training import Config
        >>> from samplex_cuda.training.ranks import join
        >>> join(Config()).world
        1
    """
    if config.training.shard == "none":
        return Alone()
    if not torch.distributed.is_available():
        raise ConfigError('config: [training] shard must be "none": this torch is built without torch.distributed')
    from samplex_cuda.training.sharded import join_ranks  # torch.distributed takes half a second to load

    return join_ranks(config)


def launched() -> tuple[int, int]:
    """(rank, world) that torchrun has told this process; (0, 1) without it."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
