"""Cases of fused negative sampling."""

from __future__ import annotations

import dataclasses
from typing import Any

import loss_cases
import torch
from loss_cases import acc, leaf

from samplex_cuda import functional
from samplex_cuda.reference.negative_sampling import negative_sampling as reference


@dataclasses.dataclass
class Case(loss_cases.Case):
    target_log_q: torch.Tensor | None = None

    def call(self, *, reduction="none", sparse=True, h=None, weight=None, bias=None) -> torch.Tensor:
        return functional.negative_sampling(
            self.h if h is None else h, self.weight if weight is None else weight, self.target, self.ids, self.log_q,
            self.target_log_q, self.bias if bias is None else bias, reduction=reduction, sparse=sparse, **self.options,
        )  # fmt: skip

    def outputs(self, h, weight, bias, *, sparse=True) -> dict[str, torch.Tensor]:
        return {"loss": self.call(sparse=sparse, h=h, weight=weight, bias=bias)}

    def expected(self, h, weight, bias) -> dict[str, torch.Tensor]:
        loss, _ = reference(h, weight, self.target, self.ids, self.log_q, self.target_log_q, bias, **self.options)
        return {"loss": loss}

    def denominators(self) -> torch.Tensor:
        return reference(self.h, self.weight, self.target, self.ids, self.log_q, self.target_log_q, **self.options)[1]

    def bound(self) -> float:
        if self.h.numel() == 0:
            return 1.0
        s = self.h.double() @ self.weight.double().T
        b = 0.0 if self.bias is None else float(self.bias.double().abs().max())
        return abs(self.options.get("scale", 1.0)) * (float(s.abs().max()) + b) + 4.0  # log_q of make_case


def make_case(
    rows=5,
    samples=8,
    dim=16,
    *,
    classes=40,
    shared=False,
    dtype=torch.float32,
    bias="none",
    scale=1.0,
    reg=0.0,
    class_weight=False,
    ignore="none",
    seed=0,
) -> Case:
    """Few classes, so that draws repeat and hit targets. Scores have a spread of about 2."""
    g = torch.Generator().manual_seed(seed)
    h = torch.randn(rows, dim, generator=g).to(dtype)
    weight = (2 * dim**-0.5 * torch.randn(classes, dim, generator=g)).to(dtype)
    target = torch.randint(0, classes, (rows,), generator=g)
    options: dict[str, Any] = {"scale": scale, "reg": reg}
    ignored = {"none": None, "padding": -100, "class": 7, "beyond": 1000}[ignore]
    if ignored is not None:
        options["ignore_index"] = ignored
        target[torch.rand(rows, generator=g) < 0.3] = ignored
    shape = (samples,) if shared else (rows, samples)
    ids = torch.randint(0, classes, shape, generator=g)
    log_q = (-1.0 - 3.0 * torch.rand(shape, generator=g)).to(acc(dtype))
    target_log_q = (-1.0 - 3.0 * torch.rand(rows, generator=g)).to(acc(dtype)) if reg else None
    b = None if bias == "none" else torch.randn(classes, generator=g).to(dtype if bias == "weight" else acc(dtype))
    if class_weight:
        options["class_weight"] = torch.rand(classes, generator=g).to(acc(dtype)) + 0.25
    return Case(h, weight, target, ids, log_q, b, options, target_log_q)


def op_args(case: Case, *, reduction=0, need_grad=True, sparse=False, requires_grad=True) -> tuple[Any, ...]:
    """The positional arguments of the raw op."""
    h, weight, bias = (leaf(t) if requires_grad else t for t in (case.h, case.weight, case.bias))
    return (
        h, weight, case.target, case.ids, case.log_q, case.target_log_q, bias, case.options.get("class_weight"),
        case.options["scale"], case.options["reg"], case.options.get("ignore_index", -100), reduction, need_grad,
        sparse,
    )  # fmt: skip
