"""Row optimizers against torch's on the same COO gradients, and the update of a loss's entries in one go.

Rows (--only takes any part of a name), C = 1,000,000, d = 128, 16,640 entries, nearly all of separate rows:
  adagrad, adam, sgd   RowAdagrad, RowAdam, RowSGD .step() vs torch.optim.Adagrad, SparseAdam, SGD
  rowwise              RowAdagrad(rowwise=True) vs torch.optim.Adagrad
  fused                summing and updating rows in one go vs row_reduce, then the update (both ours)

Both sides are checked against each other on one step before they are timed.
"""

from __future__ import annotations

import argparse
import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from _harness import (
    Report,
    Row,
    Side,
    check_close,
    common_options,
    interleave,
    make_table,
    set_up,
    wanted,
    write_readme,
)

import samplex_cuda as sx
from samplex_cuda.ops.row_rules import row_update_
from samplex_cuda.optim import rules

CLASSES, DIM, BATCH, M, SETS, RATE = 1_000_000, 128, 256, 64, 8, 0.05
RULE = rules.adagrad(RATE, 1e-10, 0.0, False)
SIDES: dict[str, tuple[Callable[..., Any], Callable[..., Any], dict[str, Any]]] = {
    "adagrad": (sx.optim.RowAdagrad, torch.optim.Adagrad, {}),
    "adam": (sx.optim.RowAdam, torch.optim.SparseAdam, {}),
    "sgd": (sx.optim.RowSGD, torch.optim.SGD, {}),
    "rowwise": (functools.partial(sx.optim.RowAdagrad, rowwise=True), torch.optim.Adagrad, {}),
}


def gradients(device: torch.device) -> list[torch.Tensor]:
    made = []
    for _ in range(SETS):
        ids = torch.unique(torch.randint(CLASSES, (BATCH * (M + 1),), device=device))
        values = torch.randn(ids.numel(), DIM, device=device)
        made.append(
            torch.sparse_coo_tensor(ids[None], values, (CLASSES, DIM), is_coalesced=True, check_invariants=False)
        )
    return made


def step(optimizer: torch.optim.Optimizer, weight: torch.Tensor, grads: list[torch.Tensor], i: int) -> None:
    weight.grad = grads[i % len(grads)]
    optimizer.step()


def versus(name: str, options: argparse.Namespace, device: torch.device) -> Row:
    ours, theirs, more = SIDES[name]
    grads = gradients(device)
    mine, other = (torch.nn.Parameter(make_table(CLASSES, DIM, device=device)) for _ in range(2))
    with torch.no_grad():
        other.copy_(mine)
    optimizers = ours([mine], lr=RATE, **more), theirs([other], lr=RATE, **more)
    ids = grads[0].indices()[0]
    before = mine.detach()[ids]
    for optimizer, weight in zip(optimizers, (mine, other), strict=True):
        step(optimizer, weight, grads, 0)
    g = grads[0].values()
    if name == "rowwise":
        want = before - RATE * g / (g.square().mean(1, keepdim=True).sqrt() + 1e-10)
    elif name == "adam":
        # torch.optim.Adam's first step; SparseAdam adds eps before the bias correction, which shows where g is tiny.
        want = before - RATE * g / (g.abs() + 1e-8)
    else:
        want = other.detach()[ids]
    error = check_close("updated rows", mine.detach()[ids] - before, want - before, 1e-5)
    got = interleave(
        [
            Side("ours", functools.partial(step, optimizers[0], mine, grads)),
            Side("torch", functools.partial(step, optimizers[1], other, grads)),
        ],
        device=device,
        seconds=options.seconds,
        min_rounds=2 if options.quick else 5,
    )
    value, low, high = got.ratio("torch", "ours")
    return Row(
        name,
        f"step on {ids.numel():,} rows, {name}, vs torch.optim.{theirs.__name__}",
        value,
        "x",
        f"updated rows vs torch's rule: {error:.1e}",
        ours=got.times["ours"],
        other=got.times["torch"],
        other_name=f"torch.optim.{theirs.__name__}",
        spread=(low, high),
        config={"C": CLASSES, "d": DIM},
    )


def fused(options: argparse.Namespace, device: torch.device) -> Row:
    sets = [
        (
            torch.randint(CLASSES, (BATCH, 1), device=device),
            torch.randn(BATCH, 1, device=device),
            torch.randint(CLASSES, (BATCH, M), device=device),
            torch.randn(BATCH, M, device=device),
            torch.randn(BATCH, DIM, device=device),
        )
        for _ in range(SETS)
    ]
    tables = [make_table(CLASSES, DIM, device=device) for _ in range(4)]
    for total in tables[1::2]:
        total.fill_(1.0)
    tables[2].copy_(tables[0])
    rule = RULE

    def at_once(i: int) -> None:
        a, coef_a, b, coef_b, h = sets[i % SETS]
        row_update_(
            *tables[:2], None, None, None, None, a, coef_a, h, b, coef_b, h, None, None, rule, rule
        )  # fmt: skip

    def in_turn(i: int) -> None:
        a, coef_a, b, coef_b, h = sets[i % SETS]
        ids, rows, _, count = torch.ops.samplex.row_reduce(a, coef_a, h, b, coef_b, h, CLASSES, False)
        torch.ops.samplex.row_apply_(*tables[2:], None, ids, rows, count, None, RULE)

    at_once(0)
    in_turn(0)
    error = max(check_close("tables", tables[i], tables[i + 2], 1e-6) for i in range(2))
    got = interleave(
        [Side("ours", at_once), Side("in turn", in_turn)],
        device=device,
        seconds=options.seconds,
        min_rounds=2 if options.quick else 5,
    )
    value, low, high = got.ratio("in turn", "ours")
    return Row(
        "fused",
        f"{BATCH * (M + 1):,} entries summed and updated at once vs row_reduce, then row_apply_ (both ours)",
        value,
        "x",
        f"weight and sums of both ways: {error:.1e}",
        ours=got.times["ours"],
        other=got.times["in turn"],
        other_name="row_reduce, row_apply_",
        spread=(low, high),
        config={"C": CLASSES, "d": DIM, "B": BATCH, "m": M},
    )


def main() -> int:
    options = common_options(__doc__).parse_args()
    device = set_up(options)
    # torch.optim.Adagrad makes sparse tensors without saying whether they are to be checked.
    warnings.filterwarnings("ignore", message="Sparse invariant checks")
    name = "row_rules" if device.type == "cpu" else f"row_rules_{device.type}"
    report = Report(name, device, store=not (options.quick or options.no_store))
    for row_id in SIDES:
        if wanted(options, row_id):
            report.add(versus(row_id, options, device))
    if wanted(options, "fused"):
        report.add(fused(options, device))
    code = report.finish(fail=not options.no_fail)
    write_readme(report, options)
    return code


if __name__ == "__main__":
    sys.exit(main())
