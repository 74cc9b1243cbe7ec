"""What the tests of the fused losses share: inputs of a call, both ways to run it, the error budget, a table of cases.

Truth is `samplex_cuda.reference` in float64 on the same (rounded) inputs; the error budget is that of
`samplex_cuda.testing`. For half-precision storage torch's side of the budget computes in float32 and rounds the result
once, which is what the ops promise.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from typing import Any

import torch

from samplex_cuda import _native
from samplex_cuda.testing import assert_close


def acc(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def leaf(t: torch.Tensor | None, dtype: torch.dtype | None = None) -> torch.Tensor | None:
    return None if t is None else t.detach().to(dtype or t.dtype, copy=True).requires_grad_()


def dense(grad: torch.Tensor | None) -> torch.Tensor | None:
    return None if grad is None else grad.to_dense().cpu() if grad.is_sparse else grad.cpu()


@dataclasses.dataclass
class Case:
    """Inputs of one call. `ids` and `log_q` are [B, m] or [m]; `options` are keyword arguments.

    A loss adds `call`, the op; `outputs` and `expected`, what is differentiated, by name; `bound`, the largest score.
    """

    h: torch.Tensor
    weight: torch.Tensor
    target: torch.Tensor
    ids: torch.Tensor
    log_q: torch.Tensor
    bias: torch.Tensor | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def map(self, change: Any) -> Case:
        """The same case with every tensor changed, those of the options too."""

        def apply(x):
            if isinstance(x, torch.Tensor):
                return change(x)
            if isinstance(x, dict):
                return {name: apply(value) for name, value in x.items()}
            return tuple(map(apply, x)) if isinstance(x, tuple) else x

        return type(self)(**{f.name: apply(getattr(self, f.name)) for f in dataclasses.fields(self)})

    def to(self, device: torch.device) -> Case:
        return self.map(lambda t: t.to(device))

    def in_dtype(self, dtype: torch.dtype) -> Case:
        return self.map(lambda t: t.to(dtype) if t.is_floating_point() else t)


def upstream(case: Case, count: int = 1) -> list[torch.Tensor]:
    """Random gradients [B] of the outputs."""
    g = torch.Generator().manual_seed(1)
    return [torch.randn(case.h.shape[0], generator=g).to(acc(case.weight.dtype)) for _ in range(count)]


def _differentiated(outputs: dict[str, torch.Tensor], leaves: Any, grads: list[torch.Tensor]) -> dict[str, Any]:
    inputs = [t for t in leaves if t is not None]
    like = [g.to(out) for g, out in zip(grads, outputs.values(), strict=True)]
    found = torch.autograd.grad(list(outputs.values()), inputs, like)
    values = {name: out.detach().cpu() for name, out in outputs.items()}
    return values | {name: dense(g) for name, g in zip(("d_h", "d_weight", "d_bias"), found, strict=False)}


def run_ours(case: Any, device="cpu", *, sparse=True) -> dict[str, torch.Tensor]:
    """Outputs and all gradients for the gradients of `upstream`, on the CPU."""
    c = case.to(torch.device(device))
    leaves = leaf(c.h), leaf(c.weight), leaf(c.bias)
    outputs = c.outputs(*leaves, sparse=sparse)
    return _differentiated(outputs, leaves, upstream(case, len(outputs)))


def run_reference(case: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    c = case.in_dtype(dtype)
    leaves = leaf(c.h), leaf(c.weight), leaf(c.bias)
    outputs = c.expected(*leaves)
    return _differentiated(outputs, leaves, upstream(case, len(outputs)))


def check_against(case: Any, ours: dict[str, torch.Tensor]) -> None:
    dtype = case.weight.dtype
    truth, torchs = run_reference(case, torch.float64), run_reference(case, acc(dtype))
    kinds = {"d_h": dtype, "d_weight": dtype, "d_bias": None if case.bias is None else case.bias.dtype}
    for name, value in ours.items():
        wanted, same = truth[name], torchs[name].to(kinds.get(name) or acc(dtype))
        ulps = 4.0 if name.startswith("d_") else score_ulps(case)
        assert_close(name, value, wanted, same, magnitude=magnitude(case, name, wanted), ulps=ulps)


def score_ulps(case: Any) -> float:
    """Units in the last place that a score may be off.

    Without SIMD it is one running sum of d products. Each addition rounds by up to half a unit of the sum so far, in a
    random direction: a standard deviation of sqrt(d / 12) units, of which three are allowed.
    """
    serial = _native.cpu_backend() == "cpu" and _native.simd_level() == "scalar"
    return max(4.0, 3.0 * math.sqrt(case.h.shape[-1] / 12)) if serial else 4.0


def magnitude(case: Any, name: str, values: torch.Tensor) -> float:
    """An error of eps |score| is the same relative error of a gradient."""
    if not name.startswith("d_"):
        return case.bound()
    return case.bound() * (float(values.abs().max()) if values.numel() else 0.0)


def check_case(case: Any, backend, *, sparse=True) -> None:
    check_against(case, run_ours(case, backend.device, sparse=sparse))


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
