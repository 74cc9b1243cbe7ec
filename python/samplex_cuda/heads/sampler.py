"""A head's sampler: another one in its place, and how far it lags behind the class table."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from samplex_cuda._checks import check_int
from samplex_cuda.heads.checks import check_retired, check_sampler, check_unique
from samplex_cuda.heads.exact import ExactAnswers
from samplex_cuda.heads.follow import Staleness, TableFollower
from samplex_cuda.heads.leak import leak

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["SamplerOfHead"]

_NAME = "SampledClassifier"


class SamplerOfHead(ExactAnswers):
    """What `SampledClassifier` says of its sampler and tells it."""

    num_samples: int
    shared: bool
    stratified: bool
    unique: bool | str
    follower: TableFollower

    def set_sampler(
        self, sampler: nn.Module, *, num_samples: int | None = None, update: str | int | None = "auto"
    ) -> None:
        """Give the head another sampler, checked as in the constructor; nothing changes if it is refused.

        Args:
            sampler: for the same number of classes.
            num_samples: the new number of draws; by default as before.
            update: as `sampler_update` of the constructor.

        Example:
            >>> import torch, samplex_cuda as sx
            >>> head = sx.SampledClassifier(8, 100, sx.samplers.Uniform(100), num_samples=5)
            >>> head.set_sampler(sx.samplers.LogUniform(100), num_samples=10)
            >>> head.num_samples
            10
        """
        if num_samples is not None:
            check_int(f"{_NAME}.set_sampler", "num_samples", num_samples)
        policy = check_sampler(
            sampler, self.loss, self.num_classes, self.bias is not None, self.shared, self.stratified, update
        )
        check_unique(sampler, self.loss, self.unique)
        if self.live is not None:
            check_retired(f"{_NAME}.set_sampler", sampler, self.live)
        self.sampler = sampler
        self.follower = TableFollower(policy, self.num_classes, update == "auto")
        if num_samples is not None:
            self.num_samples = num_samples

    @property
    def sampler_update(self) -> str | int | None:
        """The policy by which the sampler follows the class table; `set_sampler` changes it."""
        return self.follower.policy

    def staleness(self) -> Staleness:
        """How many training forwards, and how many class rows, the sampler lags behind `weight`.

        Zero for samplers that do not depend on the table. With `sampler_update=None` nothing is counted. A write in
        place to the table that no `torch.optim.Optimizer` made (found by the tensor's version counter; writes through
        `.data` have none) makes `rows` -1, unless `mark_changed(ids)` says which rows it was.

        Example:
            >>> import torch, samplex_cuda as sx
            >>> sampler = sx.samplers.Quadratic(torch.zeros(100, 8))
            >>> head = sx.SampledClassifier(8, 100, sampler, num_samples=5, bias=False)
            >>> _ = head(torch.randn(4, 8), torch.arange(4))
            >>> stale = head.staleness()
            >>> stale.steps, 4 <= stale.rows <= 24
            (1, True)
        """
        if self.follower.active:
            self.follower.look(self.weight, self.bias if getattr(self.sampler, "has_bias", False) else None)
        return self.follower.staleness()

    def leak(
        self, h: Tensor, y: Tensor | None = None, *, features: Tensor | None = None, context: Tensor | None = None
    ) -> Tensor:
        """The share of the softmax that `num_samples` draws cannot push down, of each row: `sx.diagnostics.leak`.

        Above 0.2 the sampled loss says little of the exact one. O(C d) a row: for a few dozen rows now and then.

        Args:
            h: [*, d].
            y: int64 [*] or [*, P], the targets, which do not count; None: every class counts.
            features: [*, f], what the sampler looks at where that is not h.
            context: int64 [*], for samplers that need one.

        Returns:
            [*] float64.

        Example:
            >>> import torch, samplex_cuda as sx
            >>> head = sx.SampledClassifier(8, 1000, sx.samplers.Uniform(1000), num_samples=5, bias=False)
            >>> with torch.no_grad():
            ...     head.weight.zero_()[7] = 1.0
            >>> head.leak(torch.ones(1, 8))  # 3/4 of the softmax is on class 7, which is drawn with q = 0.001
            tensor([0.7440], dtype=torch.float64)
        """
        return leak(self, h, y, features=features, context=context)

    def update_sampler(self) -> None:
        """Bring the sampler up to date with `weight` and `bias` now: the rows touched since, or all of them.

        Example:
            >>> import torch, samplex_cuda as sx
            >>> sampler = sx.samplers.Quadratic(torch.zeros(100, 8))
            >>> head = sx.SampledClassifier(8, 100, sampler, num_samples=5, bias=False)
            >>> head.update_sampler()
            >>> torch.equal(sampler.rows, head.weight)
            True
        """
        self.follower.flush(self.sampler, self.weight, self.bias)

    def mark_changed(self, ids: list[Tensor] | Tensor | None = None) -> None:
        """Tell the head that class rows changed outside of its own training step.

        Args:
            ids: int64 of any shape, or a list of them; ids out of range are skipped. None: any row may have changed,
                and the sampler is rebuilt before the next training forward.

        Example:
            >>> import torch, samplex_cuda as sx
            >>> head = sx.SampledClassifier(8, 100, sx.samplers.Quadratic(torch.zeros(100, 8)), 5, bias=False)
            >>> head.update_sampler()
            >>> head.mark_changed(torch.tensor([3, 4]))
            >>> head.staleness().rows
            2
        """
        if not self.follower.active:
            return
        if ids is not None:
            several = [ids] if isinstance(ids, Tensor) else ids
            ids = [torch.where((i >= 0) & (i < self.num_classes), i, -1).reshape(-1) for i in several]
        self.follower.mark(ids)

    def mark_rows(self, ids: list[Tensor]) -> None:
        """`mark_changed` by rows of `weight`: those of a sharded head are numbered on each rank, from its first class.

        Args:
            ids: lists of rows, int64; negative ones are skipped.

        Example:
            >>> import torch, samplex_cuda as sx
            >>> head = sx.SampledClassifier(8, 100, sx.samplers.Quadratic(torch.zeros(100, 8)), 5, bias=False)
            >>> head.update_sampler()
            >>> head.mark_rows([torch.tensor([3, -1])])
            >>> head.staleness().rows
            1
        """
        self.mark_changed(ids)

    def train(self, mode: bool = True) -> Self:
        """As in `nn.Module`; with `sampler_update="epoch"` going from eval to training marks the sampler for a rebuild.

        Example:
            >>> import samplex_cuda as sx
            >>> sx.SampledClassifier(4, 50, sx.samplers.Uniform(50), num_samples=10).train().training
            True
        """
        if mode and not self.training:
            self.follower.end_epoch()
        return super().train(mode)
