"""Heads on the unit sphere with a margin, and weighted targets: forward, backward and update against eager torch.

C = 1,000,000, d = 128, B = 1,024, ArcFace with m = 0.5, SGD. Both sides start from the same draws and table:

  ours    SampledClassifier(normalize=True) with a fused RowSGD
  torch   nn.functional.embedding(sparse=True) of the rows, normalize, margin, cross_entropy, torch.optim.SGD

Rows (--only takes any part of a name):
  sphere_per_row    64 draws per row
  sphere_shared     4,096 draws for the batch
  weighted_per_row  without a sphere: 4 targets per row with weights, 64 draws per row
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

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
    set_up,
    wanted,
    write_readme,
)

import samplex_cuda as sx

CLASSES, DIM, BATCH, SETS = 1_000_000, 128, 1024, 8
SCALE, MARGIN, LR = 32.0, 0.5, 0.1
Batch = tuple[torch.Tensor, torch.Tensor, sx.Draw, torch.Tensor | None]


def make_batches(m: int, shared: bool, targets: int, device: torch.device) -> list[Batch]:
    sampler, made = sx.samplers.Uniform(CLASSES), []
    for i in range(SETS):
        h = torch.randn(BATCH, DIM, device=device).requires_grad_(True)
        y = torch.randint(CLASSES, (BATCH,) if targets == 1 else (BATCH, targets), device=device)
        exclude = None if shared else y
        draw = sampler.sample(None, m, batch_size=BATCH, shared=shared, exclude=exclude, key=sx.Key(1, i))
        share = None if targets == 1 else torch.rand(BATCH, targets, device=device).softmax(1)
        made.append((h, y, sx.Draw(draw.ids.to(device), draw.log_q.to(device)), share))
    return made


def margin_of(cosine: torch.Tensor) -> torch.Tensor:
    return torch.cos(torch.acos(cosine.clamp(-1 + 1e-6, 1 - 1e-6)) + MARGIN)


def eager_loss(weight: torch.Tensor, batch: Batch, *, sphere: bool, sparse: bool = True) -> torch.Tensor:
    """What a person writes: gather, normalize, one product, the margin on the target, cross_entropy."""
    h, y, draw, share = batch
    h = h.to(weight.dtype)
    y = y.unsqueeze(1) if y.dim() == 1 else y
    count, m, shared = y.shape[1], draw.ids.shape[-1], draw.ids.dim() == 1
    ids = torch.cat([y.reshape(-1), draw.ids]) if shared else torch.cat([y, draw.ids], 1)
    rows = nnf.embedding(ids, weight, sparse=sparse)
    if sphere:
        h, rows = nnf.normalize(h, dim=-1), nnf.normalize(rows, dim=-1)
    if shared:
        own = (h.unsqueeze(1) * rows[: y.numel()].view(*y.shape, DIM)).sum(2)
        drawn = h @ rows[y.numel() :].T
    else:
        both = torch.bmm(rows, h.unsqueeze(2)).squeeze(2)
        own, drawn = both[:, :count], both[:, count:]
    if sphere:
        own = margin_of(own)
    scale = SCALE if sphere else 1.0
    drawn = scale * drawn - (draw.log_q + math.log(m)).to(drawn.dtype)
    hits = (draw.ids.expand(BATCH, m).unsqueeze(2) == y.unsqueeze(1)).any(2)
    logits = torch.cat([scale * own, drawn.masked_fill(hits, -math.inf)], 1)
    if share is None:
        return nnf.cross_entropy(logits, torch.zeros_like(y[:, 0]))
    return (logits.logsumexp(1) * share.sum(1) - (share * scale * own).sum(1)).mean()


def ours_step(head: sx.SampledClassifier, batch: Batch) -> torch.Tensor:
    """The head's own step on given draws."""
    h, y, draw, share = batch
    loss: Any = sx.functional.sampled_softmax(
        h, head.weight, y, draw.ids, draw.log_q, scale=head.scale, normalize=head.normalize, margin=head.loss.margin,
        target_weight=share,
    )  # fmt: skip
    loss.backward()
    return loss.detach()


def eager_step(weight: torch.Tensor, optimizer: torch.optim.Optimizer, batch: Batch, sphere: bool) -> torch.Tensor:
    loss = eager_loss(weight, batch, sphere=sphere)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def refcheck(
    steps: dict[str, Callable[[int], torch.Tensor]], tables: list[torch.Tensor], batch: Batch, sphere: bool
) -> str:
    """Loss, and the rows after an update, of both sides against fp64 on the touched rows."""
    h, y, draw, share = batch
    touched, at = torch.unique(torch.cat([y.reshape(-1), draw.ids.reshape(-1)]), return_inverse=True)
    small = (
        h.detach(),
        at[: y.numel()].view(y.shape),
        sx.Draw(at[y.numel() :].view(draw.ids.shape), draw.log_q),
        share,
    )
    worst = 0.0
    for (name, step), table in zip(steps.items(), tables, strict=True):
        rows = table.detach()[touched].double().requires_grad_(True)
        want = eager_loss(rows, small, sphere=sphere, sparse=False)
        (grad,) = torch.autograd.grad(want, rows)
        loss = step(0)
        moved = (table.detach()[touched].double() - rows.detach()) / -LR
        worst = max(worst, check_close(f"{name} loss", loss, want.detach(), 1e-5))
        # A difference of rows near 1: rounded to 1e-7 / LR.
        worst = max(worst, float((moved - grad).abs().max()))
        if worst > 1e-4:
            raise AssertionError(f"refcheck {name}: rows moved otherwise than by their gradient, by {worst:.1e}")
    return f"loss and moved rows of each side vs fp64: {worst:.1e}"


def main() -> int:
    options = common_options(__doc__).parse_args()
    device = set_up(options)
    name = "sphere" if device.type == "cpu" else f"sphere_{device.type}"
    report = Report(name, device, store=not (options.quick or options.no_store))
    for row, text, m, shared, targets, target in (
        ("sphere_per_row", "64 draws per row on the sphere, ArcFace", 64, False, 1, 3.0),
        ("sphere_shared", "4,096 shared draws on the sphere, ArcFace", 4096, True, 1, 1.5),
        ("weighted_per_row", "4 weighted targets and 64 draws per row", 64, False, 4, 3.0),
    ):
        if not wanted(options, row):
            continue
        sphere = targets == 1
        progress("making two tables")
        tables = [make_table(CLASSES, DIM, device=device, huge=True) for _ in range(2)]
        tables[1].copy_(tables[0])
        loss = sx.losses.SampledSoftmax(margin=sx.losses.ArcFace(MARGIN) if sphere else None)
        with torch.device("meta"):
            head = sx.SampledClassifier(
                DIM, CLASSES, sx.samplers.Uniform(CLASSES), m, loss, False, shared=shared, normalize=sphere,
                scale=SCALE if sphere else 1.0,
            )  # fmt: skip
        head.weight = torch.nn.Parameter(tables[0])
        head.fuse_optimizer(sx.optim.RowSGD([head.weight], lr=LR))
        table = torch.nn.Parameter(tables[1])
        optimizer = torch.optim.SGD([table], lr=LR)
        batches = make_batches(m, shared, targets, device)
        progress("")
        steps: dict[str, Callable[[int], torch.Tensor]] = {
            "ours": lambda i, head=head, batches=batches: ours_step(head, batches[i % SETS]),
            "torch": lambda i, t=table, o=optimizer, b=batches, s=sphere: eager_step(t, o, b[i % SETS], s),
        }
        checked = refcheck(steps, [head.weight, table], batches[0], sphere)
        sides = [Side(side, step) for side, step in steps.items()]
        got: Any = interleave(sides, device=device, seconds=options.seconds, min_rounds=2 if options.quick else 5)
        value, low, high = got.ratio("torch", "ours")
        report.add(
            Row(
                row,
                text,
                value,
                "x",
                checked,
                ours=got.times["ours"],
                other=got.times["torch"],
                other_name="eager torch",
                spread=(low, high),
                target=target,
                config={"C": CLASSES, "d": DIM, "B": BATCH, "m": m, "targets": targets},
            )
        )
        del head, table, tables, steps, sides
    code = report.finish(fail=not options.no_fail)
    write_readme(report, options)
    return code


if __name__ == "__main__":
    sys.exit(main())
