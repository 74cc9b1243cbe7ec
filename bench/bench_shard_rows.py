"""The products of a sharded head's step, forward and backward, on the shards of 1 and 4 ranks.

C = 1,000,000, d = 128, 256 rows of 1 target and 64 log-uniform draws, order="spread". Both sides start from class ids:

  ours    shard_logits, shard_hidden: rows of other ranks are not read
  torch   predict_dots and embedding_bag on row 0 where a row belongs to another rank, and zeros in their place

Rows: shard_1, shard_4.
"""

from __future__ import annotations

import functools
import sys
from typing import Any, NamedTuple

import torch
from _harness import Report, Row, Side, check_close, common_options, interleave, set_up, wanted, write_readme

import samplex_cuda as sx
from samplex_cuda.distributed import Layout
from samplex_cuda.losses.base import weighted_rows
from samplex_cuda.ops.predict import predict_dots
from samplex_cuda.ops.shard_rows import shard_hidden, shard_logits

CLASSES, DIM, BATCH, M, SETS = 1_000_000, 128, 256, 64, 8


class Shard(NamedTuple):
    layout: Layout
    weight: torch.Tensor
    h: list[torch.Tensor]
    target: list[torch.Tensor]
    ids: list[torch.Tensor]
    coef: torch.Tensor


def make_shard(world: int, device: torch.device) -> Shard:
    layout = Layout(CLASSES, world, 0, "spread")
    sampler = sx.samplers.LogUniform(CLASSES)
    draws = [sampler.sample(None, M, batch_size=BATCH, key=sx.Key(1, i)).ids.to(device) for i in range(SETS)]
    return Shard(
        layout,
        torch.randn(layout.rows, DIM, device=device),
        [torch.randn(BATCH, DIM, device=device) for _ in range(SETS)],
        [torch.randint(CLASSES, (BATCH, 1), device=device) for _ in range(SETS)],
        draws,
        torch.randn(BATCH, 1 + M, device=device),
    )


def ours(s: Shard, i: int) -> tuple[torch.Tensor, torch.Tensor]:
    i %= SETS
    logits, target, ids = shard_logits(
        s.h[i], s.weight, None, s.target[i], s.ids[i], CLASSES, s.layout.step, s.layout.start
    )
    return logits, shard_hidden(s.weight, s.coef[:, :1].contiguous(), s.coef[:, 1:].contiguous(), target, ids)


def plain(s: Shard, i: int) -> tuple[torch.Tensor, torch.Tensor]:
    i %= SETS
    rows = s.layout.local(torch.cat([s.target[i], s.ids[i]], 1))
    safe, local = rows.clamp_min(0), rows >= 0
    logits = torch.where(local, predict_dots(s.h[i], s.weight, safe), 0.0)
    return logits, weighted_rows(s.weight, safe, torch.where(local, s.coef, 0.0), s.coef.dtype)


def main() -> int:
    options = common_options(__doc__).parse_args()
    device = set_up(options)
    name = "shard_rows" if device.type == "cpu" else f"shard_rows_{device.type}"
    report = Report(name, device, store=not (options.quick or options.no_store))
    for world in (1, 4):
        if not wanted(options, f"shard_{world}"):
            continue
        shard = make_shard(world, device)
        worst = max(check_close(what, a, b.double(), 1e-4) for what, a, b in
                    zip(("logits", "hidden"), ours(shard, 0), plain(shard, 0), strict=True))  # fmt: skip
        sides = [Side("ours", functools.partial(ours, shard)), Side("torch", functools.partial(plain, shard))]
        got: Any = interleave(sides, device=device, seconds=options.seconds, min_rounds=2 if options.quick else 5)
        value, low, high = got.ratio("torch", "ours")
        report.add(
            Row(
                f"shard_{world}",
                f"{BATCH * (1 + M):,} entries, the shard of 1 of {world} ranks",
                value,
                "x",
                f"logits and gradient of h, both sides: {worst:.1e}",
                ours=got.times["ours"],
                other=got.times["torch"],
                other_name="every entry computed",
                spread=(low, high),
                config={"C": CLASSES, "d": DIM, "B": BATCH, "m": M, "ranks": world},
            )
        )
    code = report.finish(fail=not options.no_fail)
    write_readme(report, options)
    return code


if __name__ == "__main__":
    sys.exit(main())
