"""The whole training step of a class table: draw, loss, gradient of h, Adagrad update.

  ours     SampledClassifier with a RowAdagrad fused into backward
  unfused  the same head with its sparse gradient and RowAdagrad.step()
  eager    torch.randint, a sparse embedding of targets and draws, bmm (or matmul), cross_entropy, torch.optim.Adagrad
  full     F.linear + cross_entropy over all classes, a dense gradient, torch.optim.Adagrad

Rows (--only takes any part of a name), d = 128, B = 256, m = 64, no bias:
  per_row_1m, per_row_100k   draws [256, 64] vs eager, C = 1,000,000 and 100,000
  log_uniform_1m             the same of log-uniform draws, vs the eager step with its cheap uniform ones
  shared_1m                  draws [64] for the whole batch vs the eager shared form
  full_softmax_100k          vs full softmax with a dense update
  fused_1m                   fused vs unfused, both ours
  scale                      ours at C = 10,000,000 over ours at C = 100,000
  sweep                      step time against C for the plot docs/images/bench_step.png

Every row is measured in a process of its own. It is checked before it is timed: one step of each side with the same
draws, loss, d_hidden, weight rows and Adagrad sums against fp64.

Run it on an idle machine: python bench/bench_step.py
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as nnf
from _harness import (
    IMAGES,
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
from bench_sampled_softmax import Batch, eager_per_row_loss, eager_shared_loss

import samplex_cuda as sx

SETS, DIM, BATCH, M, RATE = 8, 128, 256, 64, 0.05


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Rotating batches: hidden [B, d] and targets [B]."""

    h: list[torch.Tensor]
    y: list[torch.Tensor]


def make_inputs(classes: int, device: torch.device) -> Inputs:
    h = [torch.randn(BATCH, DIM, device=device).requires_grad_(True) for _ in range(SETS)]
    return Inputs(h, [torch.randint(classes, (BATCH,), device=device) for _ in range(SETS)])


# ----------------------------------------------------------------------------------------------------- the sides
class Ours:
    """A head and its optimizer; `table` becomes the weight."""

    def __init__(self, table: torch.Tensor, sampler: torch.nn.Module, *, shared: bool, fused: bool) -> None:
        classes = table.shape[0]
        with torch.device("meta"):
            self.head = sx.SampledClassifier(DIM, classes, sampler, M, bias=False, shared=shared)
        self.head.weight = torch.nn.Parameter(table)
        self.optimizer = sx.optim.RowAdagrad([self.head.weight], lr=RATE)
        self.fused = fused
        if fused:
            self.head.fuse_optimizer(self.optimizer)

    def step(self, h: torch.Tensor, y: torch.Tensor, key: sx.Key | None = None) -> torch.Tensor:
        h.grad = None
        loss = self.head(h, y, key=key)
        loss.backward()
        if not self.fused:
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss.detach()

    def draw(self, h: torch.Tensor, y: torch.Tensor, key: sx.Key) -> Batch:
        """What `step` draws with this key."""
        draw = self.head.sampler.sample(
            h.detach(), M, shared=self.head.shared, key=key, exclude=None if self.head.shared else y
        )
        return Batch(h, y, draw.ids, draw.log_q)

    def sums(self) -> torch.Tensor:
        return self.optimizer.state[self.head.weight]["sum"]


class Eager:
    """What a person writes with torch alone."""

    def __init__(self, table: torch.Tensor, *, shared: bool) -> None:
        self.weight = torch.nn.Parameter(table)
        self.optimizer = torch.optim.Adagrad([self.weight], lr=RATE)
        self.shared = shared
        self.log_q = torch.full((M,) if shared else (BATCH, M), -math.log(table.shape[0]), device=table.device)

    def step(self, h: torch.Tensor, y: torch.Tensor, batch: Batch | None = None) -> torch.Tensor:
        h.grad = None
        if batch is None:
            shape = (M,) if self.shared else (BATCH, M)
            ids = torch.randint(self.weight.shape[0], shape, device=y.device)
            batch = Batch(h, y, ids, self.log_q)
        form = eager_shared_loss if self.shared else eager_per_row_loss
        loss = form(h, self.weight, batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def sums(self) -> torch.Tensor:
        return self.optimizer.state[self.weight]["sum"]


class Full:
    """All classes, dense."""

    def __init__(self, table: torch.Tensor) -> None:
        self.weight = torch.nn.Parameter(table)
        self.optimizer = torch.optim.Adagrad([self.weight], lr=RATE)

    def step(self, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h.grad = None
        loss = nnf.cross_entropy(nnf.linear(h, self.weight), y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


# ----------------------------------------------------------------------------------------------------- checks
def refcheck(sides: list[Ours | Eager], of_draw: Ours, h: torch.Tensor, y: torch.Tensor) -> str:
    """One step of each side with the draws of one key: loss, d_hidden, weight rows and sums against fp64."""
    batch = of_draw.draw(h, y, sx.Key(11))
    touched, at = torch.unique(torch.cat([y, batch.ids.reshape(-1)]), return_inverse=True)
    small = dataclasses.replace(batch, target=at[:BATCH], ids=at[BATCH:].reshape(batch.ids.shape))
    form = eager_shared_loss if batch.ids.dim() == 1 else eager_per_row_loss
    worst = 0.0
    for side in sides:
        weight = side.head.weight if isinstance(side, Ours) else side.weight
        exact_h = h.detach().double().requires_grad_(True)
        rows = weight.detach()[touched].double().requires_grad_(True)
        before = rows.detach().clone()
        want = form(exact_h, rows, small, sparse=False)
        want.backward()
        assert rows.grad is not None
        assert exact_h.grad is not None
        total = side.sums()[touched].double() + rows.grad**2
        moved = -RATE * rows.grad / (total.sqrt() + 1e-10)
        got = side.step(h, y, sx.Key(11)) if isinstance(side, Ours) else side.step(h, y, batch)
        name = type(side).__name__
        assert h.grad is not None
        worst = max(
            worst,
            check_close(f"{name} loss", got, want.detach(), 1e-5),
            check_close(f"{name} d_hidden", h.grad, exact_h.grad, 1e-4),
            check_close(f"{name} sums", side.sums()[touched], total, 1e-4),
        )
        # Adagrad's first step is the sign of the gradient: near 0 it hangs on the last bit. Those are left out.
        clear = rows.grad.abs() > 1e-5 * rows.grad.abs().max()
        change = (weight.detach()[touched].double() - before)[clear]
        worst = max(worst, check_close(f"{name} change of the rows", change, moved[clear], 1e-2))
    return f"loss, d_hidden, weight rows and sums of each side vs fp64: {worst:.1e}"


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
        return {
            "per_row_1m": functools.partial(self.versus, "per_row_1m", 1_000_000, target=7.0, aim=12.0),
            "per_row_100k": functools.partial(self.versus, "per_row_100k", 100_000, target=10.0),
            "log_uniform_1m": functools.partial(
                self.versus, "log_uniform_1m", 1_000_000, law="log-uniform", target=7.0
            ),
            "shared_1m": functools.partial(self.versus, "shared_1m", 1_000_000, shared=True, target=1.5),
            "full_softmax_100k": self.full_softmax,
            "fused_1m": self.fused,
            "scale": self.scale,
        }

    def table(self, classes: int) -> torch.Tensor:
        progress(f"making a table of {classes:,} rows")
        table = make_table(classes, DIM, device=self.device)
        progress("")
        return table

    def ours(self, classes: int, *, shared: bool = False, fused: bool = True, law: str = "uniform") -> Ours:
        kind = sx.samplers.Uniform if law == "uniform" else sx.samplers.LogUniform
        return Ours(self.table(classes), kind(classes).to(self.device), shared=shared, fused=fused)

    @staticmethod
    def side(name: str, what: Any, inputs: Inputs) -> Side:
        return Side(name, lambda i: what.step(inputs.h[i % SETS], inputs.y[i % SETS]))

    def row(self, row_id: str, what: str, sides: dict[str, Any], inputs: Inputs, checked: str, **more: Any) -> Row:
        """Ratio of the second side to the first."""
        (first, a), (second, b) = sides.items()
        got = self.time([self.side(first, a, inputs), self.side(second, b, inputs)])
        value, low, high = got.ratio(second, first)
        more = {"unit": "x", "spread": (low, high), "config": {"d": DIM, "B": BATCH, "m": M}, **more}
        return Row(
            row_id,
            what,
            value,
            refcheck=checked,
            ours=got.times[first],
            other=got.times[second],
            other_name=second,
            **more,
        )

    def versus(self, row_id: str, classes: int, *, shared: bool = False, law: str = "uniform", **target: float) -> Row:
        inputs = make_inputs(classes, self.device)
        mine, other = self.ours(classes, shared=shared, law=law), Eager(self.table(classes), shared=shared)
        checked = refcheck([mine, other], mine, inputs.h[0], inputs.y[0])
        kind = "shared draws [64]" if shared else "draws [256, 64]"
        what = f"step, {law} {kind}, C = {classes:,}, vs eager torch"
        return self.row(row_id, what, {"ours": mine, "eager torch": other}, inputs, checked, **target)

    def full_softmax(self) -> Row:
        inputs = make_inputs(100_000, self.device)
        mine, other = self.ours(100_000), Full(self.table(100_000))
        checked = refcheck([mine], mine, inputs.h[0], inputs.y[0])
        w, h = other.weight.detach().double(), inputs.h[0].detach().double()
        want = (torch.logsumexp(h @ w.T, 1) - (h * w[inputs.y[0]]).sum(1)).mean()
        error = check_close("full softmax loss", other.step(inputs.h[0], inputs.y[0]), want, 1e-5)
        checked += f"; full softmax loss: {error:.1e}"
        what = "step, draws [256, 64], C = 100,000, vs full softmax and dense Adagrad"
        sides = {"ours": mine, "full softmax": other}
        return self.row("full_softmax_100k", what, sides, inputs, checked, target=150.0, aim=300.0)

    def fused(self) -> Row:
        inputs = make_inputs(1_000_000, self.device)
        mine, other = self.ours(1_000_000), self.ours(1_000_000, fused=False)
        checked = refcheck([mine, other], mine, inputs.h[0], inputs.y[0])
        what = "step, draws [256, 64], C = 1,000,000, fused update vs unfused (both ours)"
        return self.row("fused_1m", what, {"ours": mine, "unfused": other}, inputs, checked, target=1.3)

    def scale(self) -> Row | None:
        if self.options.quick:
            return None
        large, small = self.ours(10_000_000), self.ours(100_000)
        far, near = make_inputs(10_000_000, self.device), make_inputs(100_000, self.device)
        checked = refcheck([large], large, far.h[0], far.y[0]) + "; at C = 10^5: "
        checked += refcheck([small], small, near.h[0], near.y[0])
        got = self.time([self.side("large", large, far), self.side("small", small, near)])
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
            inputs = make_inputs(classes, self.device)
            # One side at a time: table and sums of two would be 20 GB at 10^7 classes.
            makers: dict[str, Callable[[], Any]] = {
                "ours": functools.partial(self.ours, classes),
                "eager": lambda classes=classes: Eager(self.table(classes), shared=False),
            }
            # At 10^7 classes the logits of the full softmax alone are 3 x 10 GB.
            if classes <= (100_000 if self.options.quick else 1_000_000):
                makers["full"] = lambda classes=classes: Full(self.table(classes))
            for name, make in makers.items():
                what = make()
                if isinstance(what, Ours):
                    refcheck([what], what, inputs.h[0], inputs.y[0])
                got = self.time([self.side(name, what, inputs)], min_rounds=2)
                point[name] = dataclasses.asdict(got.times[name])
                del what
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
