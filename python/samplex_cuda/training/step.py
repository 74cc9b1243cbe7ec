"""One optimizer step of a run: its batches, losses and gradients, the update; nothing stays of a step that fails."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samplex_cuda import samplers
from samplex_cuda.data import Batches, Dataset
from samplex_cuda.draw import Negatives
from samplex_cuda.heads import HardNegatives, SampledClassifier
from samplex_cuda.rng import fold_in
from samplex_cuda.training import models
from samplex_cuda.training.config import Config
from samplex_cuda.training.ranks import Alone
from samplex_cuda.training.run_folder import keep_batch
from samplex_cuda.training.state import Progress

__all__ = ["Outcome", "Stepper"]

_MINED = 1 << 20  # number of the key of mined negatives; batches of a step have smaller ones


@dataclasses.dataclass
class Outcome:
    """What a step did.

    Attributes:
        batches: how many it used.
        loss: mean over the targets of its batches.
        problem: why it was dropped; empty: it was not.

    Example:
        >>> from samplex_cuda.training.step import Outcome
        >>> Outcome(1, 2.5).problem
        ''
    """

    batches: int
    loss: float
    problem: str = ""


class Stepper:
    """Takes the steps of a run: a function of the progress, the model and the optimizers.

    Args:
        config: of the run.
        train: the training data.
        batch_size: examples of a batch.
        key: int64 [2]: its first number is the seed of all draws, the second is replaced by the step.
        run_dir: where batches go whose loss is not finite.
        ranks: which process this is; None: the only one.

    Example:
        >>> import torch
        >>> from samplex_cuda import data
        >>> from samplex_cuda.training import Config, Progress, build, optimizers
        >>> from samplex_cuda.training.step import Stepper
        >>> train = data.Dense(torch.randn(64, 6), torch.randint(0, 9, (64,)))
        >>> encoder, head = build(Config(), train)
        >>> stepper = Stepper(Config(), train, 16, torch.tensor([0, 0]), "run")
        >>> stepper.take(Progress(), encoder, head, optimizers(Config(), encoder, head)).batches
        1
    """

    def __init__(
        self,
        config: Config,
        train: Dataset,
        batch_size: int,
        key: Tensor,
        run_dir: str | Path,
        ranks: Alone | None = None,
    ) -> None:
        self.ranks = Alone() if ranks is None else ranks
        self.config, self.train, self.batch_size, self.key = config, train, batch_size, key
        self.run_dir = Path(run_dir)
        self.device = torch.device(config.training.device)
        self.epoch_batches = len(Batches(train, batch_size))
        self._batches: tuple[int, Batches] | None = None
        self._step = 0
        self._miner: tuple[int, HardNegatives] | None = None  # with an index, and the step that made it

    def take(
        self,
        progress: Progress,
        encoder: models.Encoder,
        head: SampledClassifier,
        optimizers: dict[str, torch.optim.Optimizer],
    ) -> Outcome:
        """Does the step that comes next; the parameters are as before where the outcome has a problem."""
        carried = encoder.carried()
        self._step = progress.step
        self.ranks.doing(f"step {progress.step}: reading data")
        batches = self._next_batches(progress)
        self.ranks.doing(f"step {progress.step}")
        self.ranks.seed(self.config.training.seed, progress.step)
        counts = self.ranks.sums([_count_targets(batch["y"], "tokens" in batch) for batch in batches])
        total = max(1, sum(counts))
        if head.fused is not None:
            head.fused.accumulate = len(batches)  # the last step of an epoch may have fewer
        key = self.key.clone()
        key[1] = progress.step
        found = Outcome(len(batches), 0.0)
        for number, batch in enumerate(batches):
            pair = (key if number == 0 else fold_in(key, number - 1)).to(self.device)
            h, loss = self._forward(encoder, head, batch, pair)
            value = math.nan if loss is None else float(loss.detach())
            if loss is None or not math.isfinite(value):
                found.problem = self._keep_batch(progress, batch, h, number, value)
                break
            (loss * (counts[number] / total)).backward()
            found.loss += value * (counts[number] / total)
        if not found.problem:
            found.problem = self._update(encoder, head, optimizers)
        if found.problem:  # no gradient, no half-accumulated update, no state
            for optimizer in optimizers.values():
                optimizer.zero_grad(set_to_none=True)
            if head.fused is not None:  # a new fusion has accumulated nothing
                head.fuse_optimizer(head.fused.optimizer, head.fused.accumulate)
            encoder.carry(carried)
        return found

    def _forward(
        self, encoder: models.Encoder, head: SampledClassifier, batch: dict[str, Tensor], key: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """(h, loss) of a batch; no loss where h is not finite."""
        autocast = self.config.training.precision == "bfloat16"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=autocast):
            h, features = self.ranks.encode(encoder, batch)
        h = h.to(head.weight.dtype)
        if self.ranks.most(int(not h.detach().isfinite().all())):
            return h, None
        named: dict[str, Any] = {"negatives": self._named(batch)} if self.config.data.negatives else {}
        if self.config.head.hard:
            named["hard"] = self._hard(head, h, batch["y"], features, key)
        loss = head(
            h,
            batch["y"],
            features=features,
            index=models.index_of(batch) if head.loss.needs.example_index else None,
            context=models.context_of(batch),
            positives=self._known(batch),
            key=key,
            **named,
        )
        return h, loss

    def _next_batches(self, progress: Progress) -> list[dict[str, Tensor]]:
        p, t = progress, self.config.training
        if self._batches is None or self._batches[0] != p.epoch:
            self._batches = (p.epoch, Batches(self.train, self.batch_size, seed=t.seed, epoch=p.epoch))
        batches = self._batches[1]
        end = min(p.batch + t.accumulate, self.epoch_batches)
        rows = [self.ranks.part(batches.rows(number)) for number in range(p.batch, end)]
        found = [self.ranks.batch(self.train, part) for part in rows]
        return [{name: value.to(self.device) for name, value in batch.items()} for batch in found]

    def _named(self, batch: dict[str, Tensor]) -> Negatives:
        """The negatives that the data name for each row, with log q where the data have it."""
        rows = batch["index"].cpu()
        found, log_q = self.train.negatives(rows), self.train.negatives_log_q(rows)
        assert found is not None
        pair = found[0].to(self.device), found[1].to(self.device)
        return Negatives(pair, None if log_q is None else log_q.to(self.device))

    def _hard(self, head: SampledClassifier, h: Tensor, y: Tensor, features: Tensor | None, key: Tensor) -> Tensor:
        """Hard negatives of each row; other randomness than the draws."""
        c = self.config.head
        options: dict[str, Any] = {}
        if c.hard_source == "tree":
            tree: Any = head.sampler
            if not isinstance(tree, samplers.Tree):  # mixed with a base
                tree = next(part for part in tree.modules() if isinstance(part, samplers.Tree))
            options = {"tree": tree, "features": features, "beam": min(512, max(64, 4 * c.hard))}
        if c.hard_source == "index":
            miner = self._with_index(head)
        else:
            miner = HardNegatives(head, min(c.hard, head.num_classes), c.hard_source, pool=c.hard_pool, **options)
        flat = h.reshape(-1, h.shape[-1])
        found = miner.mine(flat, y.reshape(flat.shape[0], -1), key=fold_in(key, _MINED))
        return found.reshape(*h.shape[:-1], -1)

    def _with_index(self, head: SampledClassifier) -> HardNegatives:
        c = self.config.head
        if self._miner is None or self._step >= self._miner[0] + c.hard_refresh or self._miner[1].head is not head:
            made = HardNegatives(head, min(c.hard, head.num_classes), "index", refresh=1 << 40, kind=c.hard_index)
            self._miner = (self._step, made)
        return self._miner[1]

    def forget_index(self) -> None:
        """The next step builds a new index; so does a run that is resumed from here."""
        self._miner = None

    def _known(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor] | None:
        """Positives of each row besides its target, CSR, where the configuration asks for them."""
        if not self.config.head.mask_known:
            return None
        found = self.train.known(batch["index"].cpu())
        assert found is not None
        return found[0].to(self.device), found[1].to(self.device)

    def _update(
        self, encoder: models.Encoder, head: SampledClassifier, optimizers: dict[str, torch.optim.Optimizer]
    ) -> str:
        """Clips and updates; what is wrong with the gradient, if anything."""
        t = self.config.training
        self.ranks.join_rows(encoder.tables())
        if t.clip_norm:
            chosen = [p for p in encoder.parameters() if p is not head.weight]
            chosen += [] if head.log_scale is None else [head.log_scale]
            rows = [p for p in head.parameters() if p is not head.log_scale]
            of_head = rows if t.clip_head and not self.config.fused else []
            norm = self.ranks.clip(chosen, t.clip_norm, of_head)
            if not math.isfinite(norm):
                return f"the norm of the gradient is {norm}"
        # A table may change in rows that the last forward did not touch: by earlier batches of the step, or, where it
        # is tied, by the embedding. A sampler that follows the rows must know of them.
        follows = head.sampler_update is not None and (t.accumulate > 1 or self.config.model.tied)
        if follows and not self.config.fused and head.weight.grad is not None:
            if head.weight.grad.is_sparse:
                head.mark_rows([head.weight.grad.coalesce().indices()[0]])
            else:
                head.mark_changed()
        for name, optimizer in optimizers.items():
            if name != "head" or not self.config.fused:
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return ""

    def _keep_batch(self, p: Progress, batch: dict[str, Tensor], h: Tensor, number: int, value: float) -> str:
        """Stores a batch whose loss is not finite; what is wrong with it."""
        what = f"the loss is {value}" if bool(h.isfinite().all()) else "h, the output of the encoder, is not finite"
        for name, t in batch.items():
            if t.is_floating_point() and not bool(t.isfinite().all()):
                what = f"{name} of the batch has nan or infinity: clean the training data"
        about: dict[str, Any] = {"step": p.step, "epoch": p.epoch, "batch": p.batch + number, "problem": what}
        try:
            about["key"] = [int(self.key[0]), p.step]
            path = keep_batch(self.run_dir, {**batch, "h": h}, about, self.ranks.rank if self.ranks.world > 1 else None)
        except OSError as error:
            return f"{what} (and the batch could not be saved: {error.strerror})"
        return f"{what}; the batch is in {path}"


def _count_targets(y: Tensor, tokens: bool) -> int:
    valid = y >= 0
    return int(valid.sum() if tokens or y.dim() == 1 else valid.any(-1).sum())
