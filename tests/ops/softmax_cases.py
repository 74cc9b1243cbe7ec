"""Cases of the fused sampled softmax."""

from __future__ import annotations

from typing import Any

import loss_cases
import torch
from loss_cases import acc, leaf

from samplex_cuda import functional
from samplex_cuda.reference.sampled_softmax import sampled_softmax as reference


class Case(loss_cases.Case):
    def call(self, *, reduction="mean", sparse=True, h=None, weight=None, bias=None, **more: Any) -> Any:
        return functional.sampled_softmax(
            self.h if h is None else h, self.weight if weight is None else weight, self.target, self.ids, self.log_q,
            self.bias if bias is None else bias, reduction=reduction, sparse=sparse, **self.options, **more,
        )  # fmt: skip

    def outputs(self, h, weight, bias, *, sparse=True) -> dict[str, torch.Tensor]:
        made = self.call(reduction="none", sparse=sparse, h=h, weight=weight, bias=bias, return_lse=True)
        return dict(zip(("loss", "lse"), made, strict=True))

    def expected(self, h, weight, bias) -> dict[str, torch.Tensor]:
        loss, lse, _ = reference(h, weight, self.target, self.ids, self.log_q, bias, **self.options)
        return {"loss": loss, "lse": lse}

    def denominators(self) -> torch.Tensor:
        return reference(self.h, self.weight, self.target, self.ids, self.log_q, **self.options)[2]

    def bound(self) -> float:
        if self.h.numel() == 0:
            return 1.0
        s = self.options.get("scale", 1.0) * (self.h.double() @ self.weight.double().T)
        b = 0.0 if self.bias is None else float(self.bias.double().abs().max())
        return float(s.abs().max()) + b + 8.0  # - log_q - log m of make_case


class LossAlone(Case):
    """A case without the second output: the usual form has code of its own on the CPU."""

    def outputs(self, h, weight, bias, *, sparse=True) -> dict[str, torch.Tensor]:
        return {"loss": self.call(reduction="none", sparse=sparse, h=h, weight=weight, bias=bias)}

    def expected(self, h, weight, bias) -> dict[str, torch.Tensor]:
        return {"loss": super().expected(h, weight, bias)["loss"]}


def make_case(
    rows=5,
    samples=8,
    dim=16,
    *,
    classes=40,
    targets=1,
    shared=False,
    dtype=torch.float32,
    bias="none",
    scale=1.0,
    absolute=False,
    smoothing=0.0,
    class_weight=False,
    ignore="none",
    positives=False,
    seed=0,
    form=Case,
) -> Case:
    """Few classes, so that draws repeat and hit targets. Logits have a spread of about 2."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g)

    def choose(*shape):
        return torch.randint(0, classes, shape, generator=g)

    h, weight = normal(rows, dim).to(dtype), (2 * dim**-0.5 * normal(classes, dim)).to(dtype)
    target = choose(rows, targets)
    options: dict[str, Any] = {"scale": scale, "absolute": absolute, "label_smoothing": smoothing}
    if targets > 1:
        target[:, 1:][torch.rand(rows, targets - 1, generator=g) < 0.4] = -100
    ignored = {"none": None, "padding": -100, "class": 7, "beyond": 1000}[ignore]
    if ignored is not None:
        options["ignore_index"] = ignored
        target[torch.rand(rows, targets, generator=g) < 0.3] = ignored
    shape = (samples,) if shared else (rows, samples)
    ids = choose(*shape)
    log_q = (-1.0 - 3.0 * torch.rand(shape, generator=g)).to(acc(dtype))
    b = None if bias == "none" else normal(classes).to(dtype if bias == "weight" else acc(dtype))
    if class_weight:
        options["class_weight"] = torch.rand(classes, generator=g).to(acc(dtype)) + 0.25
    if positives:
        counts = torch.randint(0, 6, (rows,), generator=g)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
        options["positives"] = (offsets, choose(int(counts.sum())))
    return form(h, weight, target.squeeze(1) if targets == 1 else target, ids, log_q, b, options)


def op_args(
    case: Case, *, reduction=0, need_grad=True, with_lse=True, sparse=False, requires_grad=True
) -> tuple[Any, ...]:
    """The positional arguments of the raw op."""
    h, weight, bias = (leaf(t) if requires_grad else t for t in (case.h, case.weight, case.bias))
    offsets, known = case.options.get("positives", (None, None))
    return (
        h, weight, case.target, case.ids, case.log_q, bias, case.options.get("class_weight"), offsets, known,
        case.options["scale"], case.options["label_smoothing"], case.options.get("ignore_index", -100),
        reduction, case.options["absolute"], need_grad, with_lse, sparse,
    )  # fmt: skip
