"""The whole training step of a class table: draw, loss, gradient of h, Adagrad update.

  ours      SampledClassifier with a RowAdagrad fused into backward
  unfused   the same head with its sparse gradient and RowAdagrad.step()
  eager     torch.randint, a sparse embedding of targets and draws, bmm (or matmul), cross_entropy, torch.optim.Adagrad
  compiled  eager with its loss under torch.compile
  FBGEMM    eager with FBGEMM's CPU table, which makes the Adagrad update in backward; with either loss
  full      F.linear + cross_entropy over all classes, a dense gradient, torch.optim.Adagrad

Rows (--only takes any part of a name), d = 128, B = 256, m = 64, no bias:
  per_row_1m, per_row_100k   draws [256, 64] vs eager, C = 1,000,000 and 100,000
  log_uniform_1m             the same of log-uniform draws, vs the eager step with its cheap uniform ones
  shared_1m                  draws [64] for the whole batch vs the eager shared form
  shared_64 ... shared_2048  draws [m] for the whole batch, C = 1,000,000, vs the fastest of eager, compiled and FBGEMM;
                             the note says how long torch's three GEMMs alone take
  full_softmax_100k          vs full softmax with a dense update
  fused_1m                   fused vs unfused, both ours
  fused_log_uniform_1m       the same with log-uniform draws
  bf16, bf16_rowwise         time with a bf16 table / with an fp32 table, C = 1,000,000; Adagrad and row-wise Adagrad
  bf16_stochastic            bf16 with stochastic rounding
  scale                      ours at C = 10,000,000 over ours at C = 100,000
  sweep                      step time against C for the plot docs/images/bench_step.png

Every row is measured in a separate process. It is checked before it is timed: one step of each side with the same
draws, loss, d_hidden, weight rows and Adagrad sums against fp64.

FBGEMM takes part where it is installed: pip install --no-deps fbgemm-gpu-cpu==1.8.0

Run it on an idle machine: python bench/bench_step.py
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _harness import (
    IMAGES,
    Report,
    Row,
    common_options,
    interleave,
    progress,
    row_from,
    row_in_child,
    set_up,
    wanted,
    write_readme,
)
from _steps import SETS, Eager, Full, Gemms, Ours, Sizes, Stepper, make_inputs, refcheck, rivals, timed

DIM, BATCH, M = 128, 256, 64


# ----------------------------------------------------------------------------------------------------- rows
class Bench:
    """The rows. Each method measures one and returns it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device = set_up(options)
        self.time = functools.partial(
            interleave, device=self.device, seconds=options.seconds, min_rounds=2 if options.quick else 5, sets=SETS
        )

    def rows(self) -> dict[str, Callable[[], Row | None]]:
        best = {64: 3.0, 512: 2.5, 2048: 2.2}
        return {
            "per_row_1m": functools.partial(self.versus, "per_row_1m", 1_000_000, target=7.0, aim=12.0),
            "per_row_100k": functools.partial(self.versus, "per_row_100k", 100_000, target=10.0),
            "log_uniform_1m": functools.partial(
                self.versus, "log_uniform_1m", 1_000_000, sampler="log-uniform", target=7.0
            ),
            "shared_1m": functools.partial(self.versus, "shared_1m", 1_000_000, shared=True, target=1.5),
            **{f"shared_{m}": functools.partial(self.shared, m, target) for m, target in best.items()},
            "full_softmax_100k": self.full_softmax,
            "fused_1m": functools.partial(self.fused, "fused_1m", "uniform"),
            "fused_log_uniform_1m": functools.partial(self.fused, "fused_log_uniform_1m", "log-uniform"),
            "bf16": functools.partial(self.bf16, "bf16", target=0.85),
            "bf16_rowwise": functools.partial(self.bf16, "bf16_rowwise", rowwise=True, target=0.75),
            "bf16_stochastic": functools.partial(self.bf16, "bf16_stochastic", stochastic=True),
            "scale": self.scale,
        }

    def make(self, kind: Callable[..., Any], sizes: Sizes, *args: Any, **options: Any) -> Any:
        """A side; its table takes a moment."""
        progress(f"making a table of {sizes.classes:,} rows")
        side = kind(sizes, self.device, *args, **options)
        progress("")
        return side

    def row(self, row_id: str, what: str, a: Stepper, b: Stepper, sizes: Sizes, checked: str, **more: Any) -> Row:
        """Time of `b` / time of `a`."""
        inputs = make_inputs(sizes, self.device)
        got = self.time([timed(a, inputs), timed(b, inputs)])
        value, low, high = got.ratio(b.name, a.name)
        return Row(
            row_id,
            what,
            value,
            "x",
            checked,
            ours=got.times[a.name],
            other=got.times[b.name],
            other_name=b.name,
            spread=(low, high),
            config=sizes.config,
            **more,
        )

    def check(self, sides: list[Ours | Eager]) -> str:
        """The sides against fp64, with the draws of the first."""
        first = sides[0]
        assert isinstance(first, Ours)
        inputs = make_inputs(first.sizes, self.device)
        return refcheck(sides, first, inputs.h[0], inputs.y[0])

    def versus(
        self, row_id: str, classes: int, *, shared: bool = False, sampler: str = "uniform", **target: float
    ) -> Row:
        sizes = Sizes(classes, DIM, BATCH, M, shared)
        mine, other = self.make(Ours, sizes, sampler), self.make(Eager, sizes)
        kind = "shared draws [64]" if shared else "draws [256, 64]"
        what = f"step, {sampler} {kind}, C = {classes:,}, vs eager torch"
        return self.row(row_id, what, mine, other, sizes, self.check([mine, other]), **target)

    def shared(self, m: int, target: float) -> Row:
        """Against the fastest of several."""
        sizes = Sizes(1_000_000, DIM, BATCH, m, shared=True)
        mine = self.make(Ours, sizes)
        others, missing = rivals(sizes, self.device)
        checked = self.check([mine, *others])
        inputs = make_inputs(sizes, self.device)
        floors = [Gemms(sizes, self.device, own) for own in (False, True)]
        got = self.time([timed(side, inputs) for side in (mine, *others, *floors)])
        best = min((side.name for side in others), key=lambda name: got.times[name].median)
        value, low, high = got.ratio(best, mine.name)
        floor = min(floors, key=lambda one: got.times[one.name].median)
        at_most = got.ratio(best, floor.name)[0]
        note = [
            f"fastest other: {best}",
            f"{floor.name} alone {got.times[floor.name].median:.2f} ms, which allow {at_most:.1f}x",
        ]
        return Row(
            f"shared_{m}",
            f"step, shared draws [{m}], C = 1,000,000, vs the best of eager, compiled loss, FBGEMM",
            value,
            "x",
            checked,
            target=target,
            ours=got.times[mine.name],
            other=got.times[best],
            other_name=best,
            spread=(low, high),
            config={**sizes.config, "median_ms": {name: timing.median for name, timing in got.times.items()}},
            note="; ".join([*note, missing] if missing else note),
        )

    def full_softmax(self) -> Row:
        sizes = Sizes(100_000, DIM, BATCH, M)
        mine, other = self.make(Ours, sizes), self.make(Full, sizes)
        inputs = make_inputs(sizes, self.device)
        checked = f"{self.check([mine])}; {other.refcheck(inputs.h[0], inputs.y[0])}"
        what = "step, draws [256, 64], C = 100,000, vs full softmax and dense Adagrad"
        return self.row("full_softmax_100k", what, mine, other, sizes, checked, target=150.0, aim=300.0)

    def fused(self, row_id: str, sampler: str) -> Row:
        sizes = Sizes(1_000_000, DIM, BATCH, M)
        mine, other = self.make(Ours, sizes, sampler), self.make(Ours, sizes, sampler, fused=False)
        kind = "" if sampler == "uniform" else f"{sampler} "
        what = f"step, {kind}draws [256, 64], C = 1,000,000, fused update vs unfused (both ours)"
        return self.row(row_id, what, mine, other, sizes, self.check([mine, other]), target=1.3)

    def bf16(self, row_id: str, *, rowwise: bool = False, stochastic: bool = False, target: float | None = None) -> Row:
        """Ours over ours."""
        wide = Sizes(1_000_000, DIM, BATCH, M)
        narrow = dataclasses.replace(wide, dtype=torch.bfloat16)
        small = self.make(Ours, narrow, rowwise=rowwise, stochastic_rounding=stochastic)
        large = self.make(Ours, wide, rowwise=rowwise)
        # Randomly rounded rows have no one right value: the same step, rounded to nearest, is what is checked.
        checked = self.check([self.make(Ours, narrow, rowwise=rowwise) if stochastic else small])
        checked += f"; fp32: {self.check([large])}"
        sides = [
            timed(small, make_inputs(narrow, self.device), "bf16"),
            timed(large, make_inputs(wide, self.device), "fp32"),
        ]
        got = self.time(sides)
        value, low, high = got.ratio("bf16", "fp32")
        kind = ("row-wise " if rowwise else "") + "Adagrad" + (", stochastic rounding" if stochastic else "")
        return Row(
            row_id,
            f"step with a bf16 table / with an fp32 table, draws [256, 64], C = 1,000,000, {kind}",
            value,
            "ratio",
            checked,
            sense="<=",
            target=target,
            ours=got.times["bf16"],
            other=got.times["fp32"],
            other_name="ours, fp32 table",
            spread=(low, high),
            config={**narrow.config, "rowwise": rowwise, "stochastic_rounding": stochastic},
        )

    def scale(self) -> Row | None:
        if self.options.quick:
            return None
        far, near = Sizes(10_000_000, DIM, BATCH, M), Sizes(100_000, DIM, BATCH, M)
        large, small = self.make(Ours, far), self.make(Ours, near)
        checked = f"{self.check([large])}; at C = 10^5: {self.check([small])}"
        sides = [
            timed(large, make_inputs(far, self.device), "large"),
            timed(small, make_inputs(near, self.device), "small"),
        ]
        got = self.time(sides)
        value, low, high = got.ratio("large", "small")
        return Row(
            "scale",
            "step at C = 10,000,000 / at C = 100,000, draws [256, 64]",
            value,
            "ratio",
            checked,
            sense="<=",
            target=1.6,
            ours=got.times["large"],
            other=got.times["small"],
            other_name="ours, C = 100,000",
            spread=(low, high),
            config={"C": [10_000_000, 100_000], "d": DIM, "B": BATCH, "m": M},
        )

    # ---- time against the number of classes
    def sweep(self) -> dict[str, Any]:
        points: list[dict[str, Any]] = []
        for classes in (10_000, 100_000, 1_000_000, 10_000_000):
            if self.options.quick and classes > 1_000_000:
                continue
            point: dict[str, Any] = {"C": classes}
            sizes = Sizes(classes, DIM, BATCH, M)
            inputs = make_inputs(sizes, self.device)
            # One side at a time: table and sums of two would be 20 GB at 10^7 classes.
            kinds: dict[str, Callable[..., Any]] = {"ours": Ours, "eager": Eager}
            # At 10^7 classes the logits of the full softmax alone are 3 x 10 GB.
            if classes <= (100_000 if self.options.quick else 1_000_000):
                kinds["full"] = Full
            for name, kind in kinds.items():
                side = self.make(kind, sizes)
                if isinstance(side, Ours):
                    self.check([side])
                got = self.time([timed(side, inputs, name)], min_rounds=2)
                point[name] = dataclasses.asdict(got.times[name])
                del side
            points.append(point)
        return {"d": DIM, "B": BATCH, "m": M, "points": points}


def plot() -> Path | None:
    """docs/images/bench_step.png from the stored results."""
    from _plot import plot_step

    return plot_step(IMAGES / "bench_step.png")


def main() -> int:
    parser = common_options(__doc__)
    parser.add_argument("--no-plot", action="store_true", help="do not draw docs/images/bench_step.png")
    parser.add_argument("--plot-only", action="store_true", help="draw the plot from the stored results and stop")
    parser.add_argument("--row", help="measure this row in this process and print it as JSON")
    options = parser.parse_args()
    # torch.optim.Adagrad builds its sparse updates so that torch warns once.
    warnings.filterwarnings("ignore", message="Sparse invariant checks")
    if options.plot_only:
        return 0 if plot() else 1
    bench = Bench(options)
    if options.row:
        result = bench.sweep() if options.row == "sweep" else bench.rows()[options.row]()
        print(json.dumps(result.as_dict() if isinstance(result, Row) else result))
        return 0
    on_cpu = bench.device.type == "cpu"
    report = Report(
        "step" if on_cpu else f"step_{bench.device.type}", bench.device, store=not (options.quick or options.no_store)
    )
    for row_id in bench.rows():
        if wanted(options, row_id) and (got := row_in_child(__file__, row_id, sys.argv[1:])) is not None:
            report.add(row_from(got, on_cpu))
    if wanted(options, "sweep"):
        report.extra["sweep"] = row_in_child(__file__, "sweep", sys.argv[1:])
    code = report.finish(fail=not options.no_fail)
    if report.store and on_cpu and not options.no_plot:
        plot()
    write_readme(report, options)
    return code


if __name__ == "__main__":
    sys.exit(main())
