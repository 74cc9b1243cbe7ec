"""torchmetrics: the metrics of `samplex_cuda.metrics` as a `Metric`, summed over ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from samplex_cuda.metrics import Evaluator

__all__ = ["RankedClasses"]


class RankedClasses(Metric):
    """Precision, recall and nDCG at k, MRR, accuracy and, with `nll`, exact NLL and perplexity.

    Holds one sum per metric; `compute` adds the sums of all ranks.

    Args:
        k: the k's.
        propensities: [C]; propensity-scored precision is left out without them.
        empty: "skip" or "zero": rows without a target.
        options: of `torchmetrics.Metric`.

    Example:
        >>> import torch, samplex_cuda as sx
        >>> metric = sx.integrations.torchmetrics.RankedClasses(k=(1, 2))
        >>> metric.update(torch.tensor([[4, 1], [2, 0]]), torch.tensor([1, 2]))
        >>> found = metric.compute()
        >>> float(found["accuracy"]), float(found["recall@2"])
        (0.5, 1.0)
    """

    full_state_update = False
    sums: Tensor
    make_evaluator: Callable[[], Evaluator]

    def __init__(
        self, k: Sequence[int] = (1, 3, 5), propensities: Tensor | None = None, *, empty: str = "skip", **options: Any
    ) -> None:
        super().__init__(**options)
        self.make_evaluator = functools.partial(Evaluator, tuple(k), propensities, empty=empty)
        self.with_nll = False
        one = self.make_evaluator()
        row = torch.zeros(1, max(one.k), dtype=torch.int64)
        one.update(row, row[:, :1], torch.zeros(1))
        self.names = sorted(one.totals())
        self.add_state("sums", torch.zeros(len(self.names), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, ids: Tensor, targets: Tensor, nll: Tensor | None = None) -> None:
        """Add a batch.

        Args:
            ids: int64 [N, K], best first, e.g. of `head.topk`.
            targets: int64 [N], or [N, P] padded with -100.
            nll: [N], the loss of each row.
        """
        if self.update_count > 1 and self.with_nll != (nll is not None):
            raise ValueError("RankedClasses.update: nll must be given for all batches or for none")
        self.with_nll = nll is not None
        batch = self.make_evaluator()
        batch.update(ids, targets, nll)
        totals = batch.totals()
        more = torch.tensor([totals[name] for name in self.names], dtype=torch.float64).to(self.sums.device)
        self.sums = self.sums.double() + more  # a model in half precision takes its metrics along

    def compute(self) -> dict[str, Tensor]:
        """The metrics of all batches of all ranks."""
        found = self.make_evaluator()
        found.merge([dict(zip(self.names, self.sums.tolist(), strict=True))])
        return {name: torch.tensor(value, dtype=torch.float64) for name, value in found.compute().items()}
