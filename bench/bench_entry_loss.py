"""The losses that are sums over entries against eager torch: the loss part of a training step.

Rows (--only takes any part of a name):
  step_m1, step_m16   negative sampling, forward + backward to coalesced row gradients and d_hidden, draws [B, m], vs
                      eager torch
  step_m1_reg         the same with the regularizer of Eq. 6
  shared_m256         draws [m] for the whole batch, vs the eager shared-draw form
  nce, one_vs_each, augment_reduce   the same step of the other losses with 64 draws per row

The project's target is for a whole training step, the draw included. This is the loss alone, so its rows carry none.

Every row is measured in a separate process, and checked after it was timed, as in bench_sampled_softmax.py.

Run it on an idle machine: python bench/bench_entry_loss.py
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as nnf
from _harness import (
    Report,
    Row,
    Side,
    check_close,
    common_options,
    interleave,
    make_table,
    progress,
    row_from,
    row_in_child,
    set_up,
    wanted,
    write_readme,
)

from samplex_cuda import functional as sxf

SETS = 8
CLASSES, DIM, BATCH = 200_000, 512, 256
Step = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # loss, d_hidden, row gradients (coalesced COO [C, d])


@dataclasses.dataclass(frozen=True)
class Batch:
    """What a step gets: hidden [B, d], target [B] and ids [B, m] or [m] with their log-probabilities, lambda."""

    h: torch.Tensor
    target: torch.Tensor
    ids: torch.Tensor
    log_q: torch.Tensor
    target_log_q: torch.Tensor
    reg: float
    loss: str
    log_eta: torch.Tensor


def make_batches(m: int, *, shared: bool, reg: float, loss: str, device: torch.device) -> list[Batch]:
    """Eight sets of uniform draws, so that a step does not find its rows in the cache from the step before.

    One draw of each set is made to hit a target: it counts, or is masked.
    """
    shape = (m,) if shared else (BATCH, m)
    batches = []
    for _ in range(SETS):
        target = torch.randint(CLASSES, (BATCH,), device=device)
        ids = torch.randint(CLASSES, shape, device=device)
        ids.view(-1)[0] = target[0]
        h = torch.randn(BATCH, DIM, device=device).requires_grad_(True)
        log_q = torch.full(shape, -math.log(CLASSES), device=device)
        target_log_q = torch.full((BATCH,), -math.log(CLASSES), device=device)
        batches.append(Batch(h, target, ids, log_q, target_log_q, reg, loss, -target_log_q))
    return batches


# ----------------------------------------------------------------------------------------------------- the sides
def ours(weight: torch.Tensor, b: Batch) -> Step:
    common = (b.h, weight, b.target, b.ids, b.log_q)
    if b.loss == "negative_sampling":
        loss = sxf.negative_sampling(*common, b.target_log_q, reg=b.reg)
    elif b.loss == "nce":
        loss = sxf.nce(*common, b.target_log_q)
    elif b.loss == "one_vs_each":
        loss = sxf.one_vs_each(*common)
    else:
        made = sxf.augment_reduce(*common, b.log_eta)
        assert isinstance(made, torch.Tensor)  # a pair only with return_log_sum
        loss = made
    d_h, d_w = torch.autograd.grad(loss, (b.h, weight))
    return loss.detach(), d_h, d_w


def eager_loss(h: torch.Tensor, weight: torch.Tensor, b: Batch, sparse: bool = True) -> torch.Tensor:
    """One gather and one bmm for draws of each row; one gather, one matmul and a product per row for shared ones."""
    if b.ids.dim() == 2:
        rows = nnf.embedding(torch.cat([b.target[:, None], b.ids], 1), weight, sparse=sparse)  # [B, 1 + m, d]
        xi = torch.bmm(rows, h.unsqueeze(2)).squeeze(2)
        positive, negative = xi[:, 0], xi[:, 1:]
    else:
        rows = nnf.embedding(torch.cat([b.target, b.ids]), weight, sparse=sparse)  # [B + m, d]
        positive, negative = (h * rows[: len(h)]).sum(1), h @ rows[len(h) :].T
    log_v = -b.log_q - math.log(b.ids.shape[-1])
    if b.loss == "nce":
        corrected = positive - b.target_log_q - math.log(b.ids.shape[-1])
        return (nnf.softplus(-corrected) + nnf.softplus(negative + log_v).sum(1)).mean()
    if b.loss != "negative_sampling":
        above = (negative - positive[:, None]).masked_fill(b.ids == b.target[:, None], -math.inf)
        if b.loss == "one_vs_each":
            return (log_v.exp() * nnf.softplus(above)).sum(1).mean()
        return (b.log_eta - 1 + (-b.log_eta).exp() + (above + log_v - b.log_eta[:, None]).exp().sum(1)).mean()
    loss = nnf.softplus(-positive) + nnf.softplus(negative).mean(1)
    if b.reg:
        loss = loss + b.reg * ((positive + b.target_log_q) ** 2 + ((negative + b.log_q) ** 2).mean(1))
    return loss.mean()


def eager(weight: torch.Tensor, b: Batch) -> Step:
    loss = eager_loss(b.h, weight, b)
    d_h, d_w = torch.autograd.grad(loss, (b.h, weight))
    return loss.detach(), d_h, d_w.coalesce()


def refcheck(weight: torch.Tensor, b: Batch, steps: list[Callable[[torch.Tensor, Batch], Step]]) -> str:
    """Every side against fp64 on the touched rows: loss, d_hidden, row ids, row gradients. Raises where one is off."""
    touched, at = torch.unique(torch.cat([b.target, b.ids.reshape(-1)]), return_inverse=True)
    small = dataclasses.replace(b, target=at[:BATCH], ids=at[BATCH:].reshape(b.ids.shape))
    h = b.h.detach().double().requires_grad_(True)
    rows = weight.detach()[touched].double().requires_grad_(True)
    loss = eager_loss(h, rows, small, sparse=False)
    d_h, d_rows = torch.autograd.grad(loss, (h, rows))
    worst = 0.0
    for step in steps:
        got_loss, got_h, got_w = step(weight, b)
        name = step.__name__
        if not (got_w.is_sparse and got_w.is_coalesced()):
            raise AssertionError(f"refcheck {name}: the weight gradient must be a coalesced sparse tensor")
        if not torch.equal(got_w.indices()[0], touched):
            raise AssertionError(f"refcheck {name}: the weight gradient holds other rows than the batch touched")
        worst = max(
            worst,
            check_close(f"{name} loss", got_loss, loss.detach(), 1e-5),
            check_close(f"{name} d_hidden", got_h, d_h, 1e-4),
            check_close(f"{name} row gradients", got_w.values(), d_rows, 1e-4),
        )
    return f"loss, d_hidden, row ids and row gradients of each side vs fp64: {worst:.1e}"


# ----------------------------------------------------------------------------------------------------- rows
def measure(options: argparse.Namespace, row_id: str, m: int, shared: bool, reg: float, loss: str) -> Row:
    """One speed-up row against the eager form."""
    device = set_up(options)
    progress(f"making a table of {CLASSES:,} rows")
    weight = make_table(CLASSES, DIM, device=device).requires_grad_(True)
    progress("")
    batches = make_batches(m, shared=shared, reg=reg, loss=loss, device=device)
    sides = [
        Side(step.__name__, functools.partial(lambda step, i: step(weight, batches[i % SETS]), step))
        for step in (ours, eager)
    ]
    got = interleave(sides, device=device, seconds=options.seconds, min_rounds=2 if options.quick else 5, sets=SETS)
    checked = refcheck(weight, batches[0], [ours, eager])
    value, low, high = got.ratio("eager", "ours")
    draws = f"shared draws [{m}]" if shared else f"draws [{BATCH}, {m}]"
    return Row(
        row_id,
        f"{loss}, step, {draws}, d = {DIM}, C = {CLASSES:,}{', reg' if reg else ''}, vs eager",
        value,
        "x",
        checked,
        ours=got.times["ours"],
        other=got.times["eager"],
        other_name="eager torch",
        spread=(low, high),
        config={"C": CLASSES, "d": DIM, "B": BATCH, "m": m, "shared": shared, "reg": reg, "loss": loss},
    )


ROWS = {
    "step_m1": (1, False, 0.0, "negative_sampling"),
    "step_m16": (16, False, 0.0, "negative_sampling"),
    "step_m1_reg": (1, False, 1e-3, "negative_sampling"),
    "shared_m256": (256, True, 0.0, "negative_sampling"),
    "nce": (64, False, 0.0, "nce"),
    "one_vs_each": (64, False, 0.0, "one_vs_each"),
    "augment_reduce": (64, False, 0.0, "augment_reduce"),
}


def main() -> int:
    parser = common_options(__doc__)
    parser.add_argument("--row", help="measure this row in this process and print it as JSON")
    options = parser.parse_args()
    if options.row:
        print(json.dumps(measure(options, options.row, *ROWS[options.row]).as_dict()))
        return 0
    device = set_up(options)
    on_cpu = device.type == "cpu"
    name = "entry_loss" if on_cpu else f"entry_loss_{device.type}"
    report = Report(name, device, store=not (options.quick or options.no_store))
    for row_id in ROWS:
        if wanted(options, row_id):
            report.add(row_from(row_in_child(__file__, row_id, sys.argv[1:]), on_cpu))
    code = report.finish(fail=not options.no_fail)
    write_readme(report, options)
    return code


if __name__ == "__main__":
    sys.exit(main())
