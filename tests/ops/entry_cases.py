"""Cases of the losses that are sums over entries."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import loss_cases
import torch
from loss_cases import acc, leaf

from samplex_cuda import functional
from samplex_cuda.ops.loss_types import ENTRY_KINDS as KINDS
from samplex_cuda.reference import entry_loss as reference

LOSSES = tuple(KINDS)


@dataclasses.dataclass
class Case(loss_cases.Case):
    target_log_q: torch.Tensor | None = None
    log_eta: torch.Tensor | None = None
    loss: str = "negative_sampling"

    def between(self) -> tuple[Any, ...]:
        """What the function takes between log_q and bias."""
        return {"one_vs_each": (), "augment_reduce": (self.log_eta,)}.get(self.loss, (self.target_log_q,))

    def call(self, *, reduction="none", sparse=True, h=None, weight=None, bias=None, **more: Any) -> Any:
        return getattr(functional, self.loss)(
            self.h if h is None else h, self.weight if weight is None else weight, self.target, self.ids, self.log_q,
            *self.between(), self.bias if bias is None else bias, reduction=reduction, sparse=sparse, **self.options,
            **more,
        )  # fmt: skip

    def outputs(self, h, weight, bias, *, sparse=True) -> dict[str, torch.Tensor]:
        return {"loss": self.call(sparse=sparse, h=h, weight=weight, bias=bias)}

    def reference(self, h=None, weight=None, bias=None) -> tuple[torch.Tensor, ...]:
        return getattr(reference, self.loss)(
            self.h if h is None else h, self.weight if weight is None else weight, self.target, self.ids, self.log_q,
            *self.between(), bias, **self.options,
        )  # fmt: skip

    def expected(self, h, weight, bias) -> dict[str, torch.Tensor]:
        return {"loss": self.reference(h, weight, bias)[0]}

    def denominators(self) -> torch.Tensor:
        return self.reference(bias=self.bias)[1]

    def bound(self) -> float:
        """The largest score; what a row sums up is far larger for the losses that weigh draws by 1 / q."""
        if self.h.numel() == 0:
            return 1.0
        s = self.h.double() @ self.weight.double().T
        b = 0.0 if self.bias is None else float(self.bias.double().abs().max())
        score = abs(self.options.get("scale", 1.0)) * (float(s.abs().max()) + b) + 4.0  # log_q of make_case
        if self.loss in ("negative_sampling", "nce"):
            return score
        rows = self.reference(bias=self.bias)[0].double()
        return score * max(1.0, float(rows.abs().max()) if rows.numel() else 0.0)


def make_case(
    rows=5,
    samples=8,
    dim=16,
    *,
    loss="negative_sampling",
    classes=40,
    targets=1,
    shared=False,
    dtype=torch.float32,
    bias="none",
    scale=1.0,
    reg=0.0,
    class_weight=False,
    ignore="none",
    positives=False,
    seed=0,
) -> Case:
    """Few classes, so that draws repeat and hit targets. Scores have a spread of about 2."""
    g = torch.Generator().manual_seed(seed)
    h = torch.randn(rows, dim, generator=g).to(dtype)
    weight = (2 * dim**-0.5 * torch.randn(classes, dim, generator=g)).to(dtype)
    target = torch.randint(0, classes, (rows, targets), generator=g)
    options: dict[str, Any] = {"scale": scale}
    if loss == "negative_sampling":
        options["reg"] = reg
    if targets > 1:
        target[:, 1:][torch.rand(rows, targets - 1, generator=g) < 0.4] = -100
    ignored = {"none": None, "padding": -100, "class": 7, "beyond": 1000}[ignore]
    if ignored is not None:
        options["ignore_index"] = ignored
        target[torch.rand(rows, targets, generator=g) < 0.3] = ignored
    target = target.squeeze(1) if targets == 1 else target
    shape = (samples,) if shared else (rows, samples)
    ids = torch.randint(0, classes, shape, generator=g)

    def noise(*shape):
        return (-1.0 - 3.0 * torch.rand(shape, generator=g)).to(acc(dtype))

    log_q = noise(*shape)
    target_log_q = noise(*target.shape) if loss == "nce" or reg else None
    log_eta = None
    if loss == "augment_reduce":  # about its best value, so that nothing overflows in half precision
        s = scale * (h.double() @ weight.double().T)
        several = target[:, None] if targets == 1 else target
        inside = (several >= 0) & (several < classes)
        level = (s.gather(1, several.clamp(0, classes - 1)) * inside).sum(1) / inside.sum(1).clamp_min(1)
        log_eta = (s.logsumexp(1) - level + noise(rows) + 2.5).to(acc(dtype))
    b = None if bias == "none" else torch.randn(classes, generator=g).to(dtype if bias == "weight" else acc(dtype))
    if class_weight:
        options["class_weight"] = torch.rand(classes, generator=g).to(acc(dtype)) + 0.25
    if positives:
        counts = torch.randint(0, 6, (rows,), generator=g)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
        options["positives"] = (offsets, torch.randint(0, classes, (int(counts.sum()),), generator=g))
    return Case(h, weight, target, ids, log_q, b, options, target_log_q, log_eta, loss)


def maker(loss: str) -> Any:
    """`make_case` of one loss."""
    return functools.partial(make_case, loss=loss)


def op_args(case: Case, *, reduction=0, need_grad=True, sparse=False, requires_grad=True) -> tuple[Any, ...]:
    """The positional arguments of the raw op."""
    h, weight, bias = (leaf(t) if requires_grad else t for t in (case.h, case.weight, case.bias))
    return (
        h, weight, case.target, case.ids, case.log_q, case.target_log_q, case.log_eta, bias,
        case.options.get("class_weight"), *case.options.get("positives", (None, None)), KINDS[case.loss],
        case.options["scale"], case.options.get("reg", 0.0), case.options.get("ignore_index", -100), reduction,
        need_grad, sparse,
    )  # fmt: skip
