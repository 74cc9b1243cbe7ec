"""Class tables that change in training: more classes, retired ones, free slots that are used again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from samplex_cuda._checks import check_int, describe
from samplex_cuda.heads.checks import check_retired, check_sampler, check_signed
from samplex_cuda.heads.follow import TableFollower
from samplex_cuda.heads.module import HeadModule
from samplex_cuda.samplers.base import Sampler
from samplex_cuda.tables import empty_table

if TYPE_CHECKING:
    from samplex_cuda.optim.fusion import Fusion

__all__ = ["ClassesOfHead"]

_NAME = "SampledClassifier"
_Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


class ClassesOfHead(HeadModule):
    """What `SampledClassifier` does when classes come and go. Ids are stable: no class ever gets another id."""

    live: Tensor | None
    _fusion: Fusion | None
    _replica: Any

    @property
    def num_live(self) -> int:
        """How many classes are not retired.

        Example:
            >>> import torch, samplex_cuda as sx
            >>> head = sx.SampledClassifier(4, 50, sx.samplers.Uniform(50), num_samples=10)
            >>> head.retire_classes(torch.tensor([3, 7]))
            >>> head.num_live
            48
        """
        return self.num_classes if self.live is None else int(self.live.sum())

    def resize(self, num_classes: int, *, optimizer: _Optimizers = None, sampler: nn.Module | None = None) -> None:
        """Give the table another number of rows: new classes at the end, or those at the end dropped.

        New rows have the initial values of `nn.Linear`, and optimizer state as at the start; all others keep theirs.
        `weight` and `bias` stay the same parameters. It costs a copy of the table. Nothing changes if it is refused.

        Args:
            num_classes: the new C.
            optimizer: whose state goes with the rows, one or several; a fused optimizer is known already.
            sampler: for the new C; by default that of the head over the new classes (`Sampler.over`).

        Example:
            >>> import torch, samplex_cuda as sx
            >>> head = sx.SampledClassifier(4, 50, sx.samplers.Uniform(50), num_samples=10)
            >>> head.fuse_optimizer(sx.optim.RowAdagrad(head.parameters(), lr=0.1))
            >>> head.resize(60)
            >>> head.weight.shape, head.sampler.num_classes
            (torch.Size([60, 4]), 60)
        """
        where = f"{_NAME}.resize"
        check_int(where, "num_classes", num_classes, 1, 1 << 52)
        live = None
        if self.live is not None:
            live = self.live.new_ones(num_classes)
            kept = min(num_classes, self.num_classes)
            live[:kept] = self.live[:kept]
            if not bool(live.any()):
                raise ValueError(f"{where}: num_classes must keep at least one live class, got {num_classes}")
        fresh = torch.arange(min(num_classes, self.num_classes), num_classes, device=self.weight.device)
        self._change(where, num_classes, live, fresh, optimizer, sampler)

    def add_classes(self, count: int, *, optimizer: _Optimizers = None, sampler: nn.Module | None = None) -> Tensor:
        """Ids of `count` new classes: free slots of retired ones first, then new rows at the end.

        Args:
            count: how many.
            optimizer: as in `resize`; the state of reused slots is reset.
            sampler: as in `resize`. By default a new class is drawn as often as the rarest one of the head's sampler.

        Returns:
            int64 [count], ascending.

        Example:
            >>> import torch, samplex_cuda as sx
            >>> head = sx.SampledClassifier(4, 50, sx.samplers.Uniform(50), num_samples=10)
            >>> head.retire_classes(torch.tensor([3, 7]))
            >>> head.add_classes(3)
            tensor([ 3,  7, 50])
        """
        where = f"{_NAME}.add_classes"
        check_int(where, "count", count)
        free = torch.empty(0, dtype=torch.int64) if self.live is None else (~self.live).nonzero().squeeze(1)[:count]
        free = free.to(self.weight.device)
        total = self.num_classes + count - len(free)
        ids = torch.cat([free, torch.arange(self.num_classes, total, device=free.device)])
        live = None
        if self.live is not None:
            live = self.live.new_ones(total)
            live[: self.num_classes] = self.live
            live[ids] = True
            live = None if bool(live.all()) else live
        self._change(where, total, live, ids, optimizer, sampler)
        return ids

    def retire_classes(self, ids: Tensor, *, optimizer: _Optimizers = None, sampler: nn.Module | None = None) -> None:
        """Take classes out: never drawn, refused as targets, of probability 0 in exact answers. Their slots are free.

        The rows become 0, and so does their optimizer state, until `add_classes` uses the slots again.

        Args:
            ids: int64 [n], live classes.
            optimizer: as in `resize`.
            sampler: without these classes; by default that of the head over the live classes (`Sampler.over`).

        Example:
            >>> import torch, samplex_cuda as sx
            >>> head = sx.SampledClassifier(4, 50, sx.samplers.Uniform(50), num_samples=10)
            >>> head.retire_classes(torch.tensor([3]))
            >>> head(torch.randn(1, 4), torch.tensor([3]))
            Traceback (most recent call last):
            IndexError: SampledClassifier: y must not be a retired class, got 3
        """
        where = f"{_NAME}.retire_classes"
        if not isinstance(ids, Tensor) or ids.dtype != torch.int64 or ids.dim() != 1:
            raise ValueError(f"{where}: ids must be [n] int64, got {describe(ids)}")
        if ids.numel() == 0:
            return
        ids = ids.to(self.weight.device)
        low, high = (int(bound) for bound in ids.aminmax())
        if low < 0 or high >= self.num_classes:
            raise IndexError(f"{where}: ids must be in [0, {self.num_classes}), got {low if low < 0 else high}")
        live = self.weight.new_ones(self.num_classes, dtype=torch.bool) if self.live is None else self.live.clone()
        if not bool(live[ids].all()):
            raise ValueError(f"{where}: ids must be live, got {int(ids[~live[ids]][0])}, which is retired already")
        live[ids] = False
        if not bool(live.any()):
            raise ValueError(f"{where}: ids must leave at least one live class, got all {self.num_live} of them")
        check_signed(where, self.loss, self.scale)
        self._change(where, self.num_classes, live, ids, optimizer, sampler, zero=True)

    # ------------------------------------------------------------------------------------------------ how
    def _change(
        self,
        where: str,
        num_classes: int,
        live: Tensor | None,
        fresh: Tensor,
        optimizer: _Optimizers,
        sampler: nn.Module | None,
        zero: bool = False,
    ) -> None:
        """Checks all, then changes all; `fresh` are the rows that are initialized again."""
        own = dict(self.named_parameters(recurse=False))
        if "weight" not in own or self._replica is not None or hasattr(self, "layout"):
            raise ValueError(f"{where}: head must have its own table, got one that is shared, sharded or computed")
        if self.host is not None and self.host.file is not None:
            raise ValueError(
                f"{where}: head.weight must not be mapped from a file, got {self.host.file}; load its rows into a head "
                "of the new size"
            )
        if self.loss.needs.prior or self._state_name is not None:
            raise ValueError(
                f"{where}: loss must have scores that do not depend on its sampler, and no values per example, got "
                f"{self.loss!r}"
            )
        optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer or ())
        if self._fusion is not None:
            if self._fusion.pending:
                raise RuntimeError(
                    f"{where}: no accumulated backward may be pending, got {self._fusion.pending}; call "
                    "head.fused.flush() first"
                )
            optimizers.append(self._fusion.optimizer)
        tables = [own[name] for name in ("weight", "bias") if name in own]
        for p in tables:
            if p.grad is not None:
                raise ValueError(f"{where}: gradients must be None, got one; call zero_grad() first")
        for each in optimizers:
            if not isinstance(each, torch.optim.Optimizer):
                raise TypeError(f"{where}: optimizer must be a torch optimizer, got {type(each).__name__}")
        policy = self.follower.policy
        law: Any = sampler
        if self.loss.needs.draws:
            law = self._resized_sampler(where, num_classes, live) if law is None else law
            check_sampler(
                law, self.loss, num_classes, self.bias is not None, self.shared, self.stratified, policy or "auto"
            )
            if live is not None:
                check_retired(where, law, live)
        class_weight = self.class_weight
        if class_weight is not None and num_classes != self.num_classes:
            class_weight = _rows_moved(class_weight, num_classes, 1.0)
        states = [_moved_state(each, p, num_classes, fresh) for each in optimizers for p in tables if p in each.state]
        values = [_new_rows(p, num_classes, fresh, self.in_features, zero) for p in tables]
        # Nothing below can fail.
        for p, value in zip(tables, values, strict=True):
            p.data = value
            torch._C._increment_version([p])
        for state, moved in states:
            state.update(moved)
        self.num_classes, self.live = num_classes, live
        self.class_weight = class_weight
        if self.loss.needs.draws:
            self.sampler = law
            self.follower = TableFollower(policy, num_classes, self.follower.auto)

    def _resized_sampler(self, where: str, num_classes: int, live: Tensor | None) -> nn.Module:
        sampler: Any = self.sampler
        try:
            return sampler.over(num_classes, live)
        except (AttributeError, NotImplementedError):  # not one of ours
            if hasattr(sampler, "over") and type(sampler).over is not Sampler.over:
                raise
            raise ValueError(
                f"{where}: sampler must be given if that of the head cannot be resized, got None with "
                f"{type(sampler).__name__}"
            ) from None

    def _refuse_retired(self, target: Tensor) -> Tensor:
        """Targets, where one of a retired class is an IndexError; on a GPU it becomes one out of range, loss NaN."""
        live = self.live
        assert live is not None
        known = (target >= 0) & (target < self.num_classes) & (target != self.ignore_index)
        wrong = known & ~live[target.clamp(0, self.num_classes - 1)]
        if target.is_cpu and not torch.compiler.is_compiling():
            if bool(wrong.any()):
                raise IndexError(f"{_NAME}: y must not be a retired class, got {int(target[wrong][0])}")
            return target
        return torch.where(wrong, self.num_classes, target)


def _rows_moved(table: Tensor, rows: int, value: float) -> Tensor:
    """A copy of the table with `rows` rows; new ones hold `value`."""
    if table.dim() == 2:
        made = empty_table(rows, table.shape[1], device=table.device, dtype=table.dtype)
    else:
        made = table.new_empty((rows, *table.shape[1:]))
    kept = min(rows, table.shape[0])
    made[:kept] = table[:kept]
    made[kept:] = value
    return made


def _new_rows(p: Tensor, rows: int, fresh: Tensor, width: int, zero: bool) -> Tensor:
    """The values of a parameter with `rows` rows; those of `fresh` are initialized, as in nn.Linear, or at zero."""
    made = p.detach().clone() if rows == p.shape[0] else _rows_moved(p.detach(), rows, 0.0)
    bound = 0.0 if zero else width**-0.5
    made[fresh] = torch.empty(len(fresh), *p.shape[1:], device=p.device).uniform_(-bound, bound).to(p.dtype)
    return made


def _moved_state(
    optimizer: torch.optim.Optimizer, p: Tensor, rows: int, fresh: Tensor
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The optimizer's state of a parameter, and its tables for `rows` rows; those of `fresh` are initialized."""
    group = next(g for g in optimizer.param_groups if any(q is p for q in g["params"]))
    state, moved = optimizer.state[p], {}
    for name, table in state.items():
        if isinstance(table, Tensor) and table.dim() > 0 and table.shape[0] == p.shape[0]:
            start = float(group.get("initial_accumulator_value", 0.0)) if name == "sum" else 0.0
            moved[name] = made = table.clone() if rows == p.shape[0] else _rows_moved(table, rows, start)
            made[fresh] = start
    return state, moved
