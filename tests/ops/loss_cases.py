"""What the tests of the fused losses share: leaves and dense gradients, and a table of cases that meets every pair."""

from __future__ import annotations

import itertools
import random
from typing import Any

import torch


def acc(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def leaf(t: torch.Tensor | None, dtype: torch.dtype | None = None) -> torch.Tensor | None:
    return None if t is None else t.detach().to(dtype or t.dtype, copy=True).requires_grad_()


def dense(grad: torch.Tensor | None) -> torch.Tensor | None:
    return None if grad is None else grad.to_dense().cpu() if grad.is_sparse else grad.cpu()


def pairwise(factors: dict[str, list[Any]]) -> list[dict[str, Any]]:
    """Rows of factor values such that every pair of values of two factors occurs in one; greedy, deterministic."""
    names = list(factors)
    order = random.Random(0)
    left = {
        (a, i, b, j)
        for a, b in itertools.combinations(range(len(names)), 2)
        for i in range(len(factors[names[a]]))
        for j in range(len(factors[names[b]]))
    }
    rows = []
    while left:
        a, i, b, j = min(left)
        row = {a: i, b: j}
        for c in order.sample(range(len(names)), len(names)):
            if c in row:
                continue

            def gain(k, c=c, row=row, left=left):
                return sum(((d, v, c, k) if d < c else (c, k, d, v)) in left for d, v in row.items())

            values = list(range(len(factors[names[c]])))
            order.shuffle(values)
            row[c] = max(values, key=gain)
        left -= {(d, row[d], c, row[c]) for d, c in itertools.combinations(range(len(names)), 2)}
        rows.append({names[c]: factors[names[c]][v] for c, v in sorted(row.items())})
    return rows


def name_of(row: dict[str, Any]) -> str:
    return "-".join(f"{k[:4]}{str(v).removeprefix('torch.')}" for k, v in row.items() if v not in (False, "none"))
