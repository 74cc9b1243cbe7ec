"""Rules of row optimizers by op and by specification."""

from __future__ import annotations

import math

import torch

from samplex_cuda.optim import rules

OPS = torch.ops.samplex
LR, DECAY, EPS, BETA1, BETA2, STEP = 0.05, 0.01, 1e-6, 0.8, 0.95, 3


def acc(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def numbers_of(rule: str, *, lr=LR, decay=DECAY) -> rules.Rule:
    if rule in ("sgd", "momentum", "nesterov"):
        return rules.sgd(lr, 0.0 if rule == "sgd" else BETA1, decay, rule == "nesterov")
    if rule in ("adagrad", "row_adagrad"):
        return rules.adagrad(lr, EPS, decay, rule == "row_adagrad")
    return rules.adam(lr, (BETA1, BETA2), EPS, decay, rule == "adamw", STEP)


def ours(rule, weight, states, row_ids, rows, count=None, key=None, **options) -> None:
    # One number per row and one per class are the same for a vector of classes.
    kind = "adagrad" if rule == "row_adagrad" and weight.dim() == 1 else rule
    padded = [*states, None, None][:2]
    OPS.row_apply_(weight, *padded, row_ids, rows, count, key, numbers_of(kind, **options))


def rule_numbers(rule: str, decay: float = DECAY) -> list[float]:
    """The numbers `row_update_` takes."""
    kind = {"nesterov": "momentum", "adamw": "adam"}.get(rule, rule)
    adam = kind == "adam"
    return [
        float(["sgd", "momentum", "adagrad", "row_adagrad", "adam"].index(kind)),
        float(rule == "nesterov"),
        LR / (1 - BETA1**STEP) if adam else LR,
        0.0 if rule == "adamw" else decay,
        1 - LR * decay if rule == "adamw" else 1.0,
        EPS,
        BETA1,
        BETA2,
        1 / math.sqrt(1 - BETA2**STEP) if adam else 0.0,
    ]


def entries(classes, batch, k, d, dtype, device, *, shared=False):
    g = torch.Generator().manual_seed(2)
    ids_a = torch.randint(classes, (batch, 1), generator=g)
    ids_b = torch.randint(classes, (k, 1) if shared else (batch, k), generator=g)
    coef_a = torch.randn(batch, 1, generator=g).to(acc(dtype))
    h = torch.randn(batch, d, generator=g).to(dtype)
    ids_a[0, 0] = -100  # an ignored target
    if shared:
        coef_b, rows_b = None, torch.randn(k, d, generator=g).to(acc(dtype))
        bias_b = torch.randn(k, generator=g).to(acc(dtype))
    else:
        coef_b, rows_b, bias_b = torch.randn(batch, k, generator=g).to(acc(dtype)), h, None
        coef_b[-1, 0] = 0.0  # a masked draw
    made = (ids_a, coef_a, h, ids_b, coef_b, rows_b, bias_b)
    return [None if t is None else t.to(device) for t in made]


def summed(e, classes):
    """Row ids, row gradients and bias gradients in fp64."""
    ids_a, coef_a, h, ids_b, coef_b, rows_b, bias_b = [None if t is None else t.cpu() for t in e]
    wide = [t.double() for t in (coef_a, h, rows_b)]
    coefs = torch.ones(ids_b.shape, dtype=torch.float64) if coef_b is None else coef_b.double()
    dense = torch.zeros(classes, h.shape[1], dtype=torch.float64)
    bias, hit = torch.zeros(classes, dtype=torch.float64), torch.zeros(classes, dtype=torch.bool)
    own = coefs if bias_b is None else bias_b.double().view(-1, 1)
    for ids, coef, rows, terms in ((ids_a, wide[0], wide[1], wide[0]), (ids_b, coefs, wide[2], own)):
        keep = (ids >= 0) & (coef != 0)
        dense.index_add_(0, ids[keep], (coef.unsqueeze(2) * rows.unsqueeze(1))[keep])
        bias.index_add_(0, ids[keep], terms[keep])
        hit[ids[keep]] = True
    row_ids = hit.nonzero().flatten()
    return row_ids, dense[row_ids], bias[row_ids]
