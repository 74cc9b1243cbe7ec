"""Fused sampled softmax against eager torch and the full softmax: every CPU target of the project.

Rows (--only takes any part of a name):
  per_row_1m, per_row_100k    forward + backward to coalesced row gradients and d_hidden, draws [B, m], vs eager torch
  full_softmax_100k           the same step vs F.linear + cross_entropy over all classes
  shared_m64 ... shared_m4096 draws [m] for the whole batch, vs the eager shared-draw form
  scale_huge, scale_4k        time at C = 10^7 / time at C = 10^5, with and without huge pages behind the table
  forward_1m, forward_100k    no_grad: bytes of gathered rows / time, as a share of the copy bandwidth
  memory                      peak extra memory of a step / the bound of the design
  sweep                       time per step against C, for the plot

Every row is measured in a separate process, and checked after it was timed: what ran before decides from which size
on malloc asks the system for fresh (page-faulting) memory, and with it the time of a side that makes large temporaries.

Run it on an idle machine: python bench/bench_sampled_softmax.py
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import functools
import json
import math
import subprocess
import sys
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
    huge_share,
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
DIM = 128
Step = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # loss, d_hidden, row gradients (coalesced COO [C, d])


# ----------------------------------------------------------------------------------------------------- inputs
@dataclasses.dataclass(frozen=True)
class Batch:
    """What a step gets: hidden [B, d], target [B], ids [B, m] or [m] with their log_q."""

    h: torch.Tensor
    target: torch.Tensor
    ids: torch.Tensor
    log_q: torch.Tensor


def make_batches(
    classes: int, batch: int, m: int, *, shared: bool, device: torch.device, dim: int = DIM
) -> list[Batch]:
    """Eight sets of uniform draws, so that a step does not find its rows in the cache from the step before.

    One draw of each set is made to hit a target, so that the refcheck sees the mask at any number of classes.
    """
    shape = (m,) if shared else (batch, m)
    batches = []
    for _ in range(SETS):
        target = torch.randint(classes, (batch,), device=device)
        ids = torch.randint(classes, shape, device=device)
        ids.view(-1)[0] = target[0]
        h = torch.randn(batch, dim, device=device).requires_grad_(True)
        batches.append(Batch(h, target, ids, torch.full(shape, -math.log(classes), device=device)))
    return batches


# ----------------------------------------------------------------------------------------------------- the sides
def ours(weight: torch.Tensor, b: Batch) -> Step:
    loss = sxf.sampled_softmax(b.h, weight, b.target, b.ids, b.log_q)
    d_h, d_w = torch.autograd.grad(loss, (b.h, weight))
    return loss.detach(), d_h, d_w


def eager_per_row_loss(h: torch.Tensor, weight: torch.Tensor, b: Batch, sparse: bool = True) -> torch.Tensor:
    """Target in column 0, one gather, one bmm; corrected by log_q + log m; a draw that hits the target is masked."""
    m = b.ids.shape[1]
    rows = nnf.embedding(torch.cat([b.target[:, None], b.ids], 1), weight, sparse=sparse)  # [B, 1 + m, d]
    logits = torch.bmm(rows, h.unsqueeze(2)).squeeze(2)
    negatives = logits[:, 1:] - (b.log_q + math.log(m)).to(logits.dtype)
    negatives = negatives.masked_fill(b.ids == b.target[:, None], -math.inf)
    return nnf.cross_entropy(torch.cat([logits[:, :1], negatives], 1), torch.zeros_like(b.target))


def eager_shared_loss(h: torch.Tensor, weight: torch.Tensor, b: Batch, sparse: bool = True) -> torch.Tensor:
    """One gather of the B + m rows, one matmul for the negatives, a product per row for the positives."""
    batch, m = b.target.shape[0], b.ids.shape[0]
    rows = nnf.embedding(torch.cat([b.target, b.ids]), weight, sparse=sparse)  # [B + m, d]
    positives = (h * rows[:batch]).sum(1, keepdim=True)
    negatives = h @ rows[batch:].T - (b.log_q + math.log(m)).to(h.dtype)
    negatives = negatives.masked_fill(b.ids == b.target[:, None], -math.inf)
    return nnf.cross_entropy(torch.cat([positives, negatives], 1), torch.zeros_like(b.target))


def eager(weight: torch.Tensor, b: Batch) -> Step:
    form = eager_per_row_loss if b.ids.dim() == 2 else eager_shared_loss
    loss = form(b.h, weight, b)
    d_h, d_w = torch.autograd.grad(loss, (b.h, weight))
    return loss.detach(), d_h, d_w.coalesce()


def full(weight: torch.Tensor, b: Batch) -> Step:
    loss = nnf.cross_entropy(nnf.linear(b.h, weight), b.target)
    d_h, d_w = torch.autograd.grad(loss, (b.h, weight))
    return loss.detach(), d_h, d_w


def reference(weight: torch.Tensor, b: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """In fp64 on the touched rows alone: loss, d_hidden, touched row ids (sorted), their gradients."""
    touched, at = torch.unique(torch.cat([b.target, b.ids.reshape(-1)]), return_inverse=True)
    small = dataclasses.replace(b, target=at[: b.target.numel()], ids=at[b.target.numel() :].reshape(b.ids.shape))
    h = b.h.detach().double().requires_grad_(True)
    rows = weight.detach()[touched].double().requires_grad_(True)
    form = eager_per_row_loss if b.ids.dim() == 2 else eager_shared_loss
    loss = form(h, rows, small, sparse=False)
    d_h, d_rows = torch.autograd.grad(loss, (h, rows))
    return loss.detach(), d_h, touched, d_rows


def refcheck(weight: torch.Tensor, b: Batch, steps: list[Callable[[torch.Tensor, Batch], Step]]) -> str:
    """Every side against the fp64 reference: loss, d_hidden, which rows, row gradients. Raises where one is off."""
    loss, d_h, touched, d_rows = reference(weight, b)
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
            check_close(f"{name} loss", got_loss, loss, 1e-5),
            check_close(f"{name} d_hidden", got_h, d_h, 1e-4),
            check_close(f"{name} row gradients", got_w.values(), d_rows, 1e-4),
        )
    return f"loss, d_hidden, row ids and row gradients of each side vs fp64: {worst:.1e}"


def refcheck_full(weight: torch.Tensor, b: Batch) -> str:
    h, w = b.h.detach().double(), weight.detach().double()
    want = (torch.logsumexp(h @ w.T, 1) - (h * w[b.target]).sum(1)).mean()
    return f"full softmax loss vs fp64: {check_close('full softmax loss', full(weight, b)[0], want, 1e-5):.1e}"


def side(name: str, step: Callable[[torch.Tensor, Batch], Any], weight: torch.Tensor, batches: list[Batch]) -> Side:
    return Side(name, lambda i: step(weight, batches[i % len(batches)]))


# ----------------------------------------------------------------------------------------------------- rows
class Bench:
    """The rows. Each method measures one and returns it; it runs in a separate process (see `main`)."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device = set_up(options)
        self.time = functools.partial(
            interleave, device=self.device, seconds=options.seconds, min_rounds=2 if options.quick else 5, sets=SETS
        )

    def rows(self) -> dict[str, Callable[[], Row | None]]:
        """What to call for each row id, in the order of the table."""
        shared = {f"shared_m{m}": functools.partial(self.shared, m) for m in (64, 128, 256, 512, 4096)}
        return {
            "per_row_1m": self.per_row_1m,
            **shared,
            "forward_1m": functools.partial(self.forward, "forward_1m", 1_000_000, 256, 64),
            "per_row_100k": self.per_row_100k,
            "full_softmax_100k": self.full_softmax,
            "forward_100k": functools.partial(self.forward, "forward_100k", 100_000, 1024, 128),
            "scale_huge": functools.partial(self.scale, "scale_huge", True, 1.6),
            "scale_4k": functools.partial(self.scale, "scale_4k", False, 2.2),
            "memory": self.memory,
        }

    def table(self, classes: int, huge: bool = True, dim: int = DIM) -> torch.Tensor:
        progress(f"making a table of {classes:,} rows")
        table = make_table(classes, dim, device=self.device, huge=huge).requires_grad_(True)
        progress("")
        return table

    def versus(
        self, row_id: str, what: str, classes: int, batch: int, m: int, *, shared: bool = False, **target: Any
    ) -> Row:
        """One speed-up row against the eager form."""
        weight = self.table(classes)
        batches = make_batches(classes, batch, m, shared=shared, device=self.device)
        got = self.time([side("ours", ours, weight, batches), side("eager", eager, weight, batches)])
        checked = refcheck(weight, batches[0], [ours, eager])
        value, low, high = got.ratio("eager", "ours")
        return Row(
            row_id,
            what,
            value,
            "x",
            checked,
            ours=got.times["ours"],
            other=got.times["eager"],
            other_name="eager torch",
            spread=(low, high),
            config={"C": classes, "d": DIM, "B": batch, "m": m, "shared": shared},
            **target,
        )

    # ---- speed
    def per_row_1m(self) -> Row:
        what = "step, draws [256, 64], C = 1,000,000, vs eager"
        return self.versus("per_row_1m", what, 1_000_000, 256, 64, target=6.0, aim=10.0)

    def per_row_100k(self) -> Row:
        what = "step, draws [1024, 128], C = 100,000, vs eager"
        return self.versus("per_row_100k", what, 100_000, 1024, 128, target=12.0, aim=20.0)

    def shared(self, m: int) -> Row:
        what = f"step, shared draws [{m}], B = 256, C = 1,000,000, vs eager"
        return self.versus(f"shared_m{m}", what, 1_000_000, 256, m, shared=True, target=1.3 if m <= 512 else 1.0)

    def full_softmax(self) -> Row:
        weight = self.table(100_000)
        batches = make_batches(100_000, 256, 64, shared=False, device=self.device)
        got = self.time([side("ours", ours, weight, batches), side("full", full, weight, batches)])
        checked = refcheck(weight, batches[0], [ours]) + "; " + refcheck_full(weight, batches[0])
        value, low, high = got.ratio("full", "ours")
        return Row(
            "full_softmax_100k",
            "step, draws [256, 64], C = 100,000, vs full softmax",
            value,
            "x",
            checked,
            target=200.0,
            aim=400.0,
            ours=got.times["ours"],
            other=got.times["full"],
            other_name="full softmax",
            spread=(low, high),
            config={"C": 100_000, "d": DIM, "B": 256, "m": 64, "shared": False},
        )

    # ---- how much of the memory bandwidth the forward pass uses
    def forward(self, row_id: str, classes: int, batch: int, m: int) -> Row:
        weight = self.table(classes)
        batches = make_batches(classes, batch, m, shared=False, device=self.device)
        numel = 2**24 if self.options.quick else 2**27
        source = make_table(numel // DIM, DIM, device=self.device)
        sink = make_table(numel // DIM, DIM, device=self.device)

        @torch.no_grad()
        def forward_only(weight: torch.Tensor, b: Batch) -> torch.Tensor:
            return sxf.sampled_softmax(b.h, weight, b.target, b.ids, b.log_q)

        got = self.time([side("ours", forward_only, weight, batches), Side("copy", lambda _: sink.copy_(source))])
        error = check_close("forward", forward_only(weight, batches[0]), reference(weight, batches[0])[0], 1e-5)
        copied = 2 * numel * 4  # read + write
        gathered = batch * (m + 1) * DIM * 4
        bandwidth = copied / got.times["copy"].median * 1e3
        speed, low, high = got.ratio("copy", "ours")
        scale = 100 * gathered / copied
        return Row(
            row_id,
            f"forward only, draws [{batch}, {m}], C = {classes:,}: gathered bytes / copy bandwidth",
            speed * scale,
            "%",
            f"loss vs fp64: {error:.1e}",
            target=40.0,
            ours=got.times["ours"],
            other=got.times["copy"],
            other_name="copy_",
            spread=(low * scale, high * scale),
            config={
                "C": classes,
                "d": DIM,
                "B": batch,
                "m": m,
                "copy_bytes": copied,
                "copy_gb_per_s": bandwidth / 1e9,
                "gathered_gb_per_s": gathered / got.times["ours"].median * 1e3 / 1e9,
            },
        )

    # ---- the number of classes must not matter
    def scale(self, row_id: str, huge: bool, target: float) -> Row | None:
        if self.options.quick:
            return None
        large, small = self.table(10_000_000, huge), self.table(100_000, huge)
        large_batches = make_batches(10_000_000, 256, 64, shared=False, device=self.device)
        small_batches = make_batches(100_000, 256, 64, shared=False, device=self.device)
        got = self.time([side("large", ours, large, large_batches), side("small", ours, small, small_batches)])
        checked = (
            refcheck(large, large_batches[0], [ours]) + "; at C = 10^5: " + refcheck(small, small_batches[0], [ours])
        )
        value, low, high = got.ratio("large", "small")
        share = huge_share(large) if self.device.type == "cpu" else math.nan
        pages = "huge pages advised" if huge else "4 KB pages"
        return Row(
            row_id,
            f"time at C = 10,000,000 / at C = 100,000, draws [256, 64], {pages}",
            value,
            "ratio",
            checked,
            sense="<=",
            target=target,
            ours=got.times["large"],
            other=got.times["small"],
            other_name="ours, C = 100,000",
            spread=(low, high),
            config={"C": [10_000_000, 100_000], "d": DIM, "B": 256, "m": 64, "huge_share": share},
            note="" if not huge or not share < 0.9 else f"only {share:.0%} of the table got huge pages",
        )

    # ---- peak memory
    def memory(self) -> Row | None:
        if self.device.type != "cpu":
            return None
        if not Path("/proc/self/clear_refs").exists():
            print("memory: skipped: this system does not report a peak of resident memory", file=sys.stderr)
            return None
        classes, batch, m = 100_000 if self.options.quick else 1_000_000, 256, 64
        got = {name: memory_in_child(name, classes, batch, m, self.options.threads) for name in ("ours", "eager")}
        unique = got["ours"]["unique_rows"]
        bound = 4 * (batch * m + batch * DIM + unique * DIM) * 4
        return Row(
            "memory",
            f"peak extra memory of a step / bound, draws [256, 64], C = {classes:,}",
            got["ours"]["extra_bytes"] / bound,
            "ratio",
            got["ours"]["refcheck"],
            sense="<=",
            target=1.0,
            config={
                "C": classes,
                "d": DIM,
                "B": batch,
                "m": m,
                "unique_rows": unique,
                "bound_mib": bound / 2**20,
                "ours_mib": got["ours"]["extra_bytes"] / 2**20,
                "eager_mib": got["eager"]["extra_bytes"] / 2**20,
            },
        )

    # ---- time against the number of classes
    def sweep(self) -> dict[str, Any]:
        batch, m = 256, 64
        points: list[dict[str, Any]] = []
        for classes in (10_000, 100_000, 1_000_000, 10_000_000):
            if self.options.quick and classes > 1_000_000:
                continue
            weight = self.table(classes)
            batches = make_batches(classes, batch, m, shared=False, device=self.device)
            sides = [side("ours", ours, weight, batches), side("eager", eager, weight, batches)]
            # At 10^6 classes one step of the full softmax takes seconds, at 10^7 its logits alone 3 x 10 GB.
            if classes <= (100_000 if self.options.quick else 1_000_000):
                sides.append(side("full", full, weight, batches))
            got = self.time(sides, min_rounds=2)
            refcheck(weight, batches[0], [ours, eager])
            points.append({"C": classes, **{name: dataclasses.asdict(t) for name, t in got.times.items()}})
            del weight, sides
        return {"d": DIM, "B": batch, "m": m, "points": points}


# ----------------------------------------------------------------------------------------------------- peak memory
def memory_in_child(name: str, classes: int, batch: int, m: int, threads: int) -> dict[str, Any]:
    """Peak resident memory above the start of one step, in a separate process: no freed block of an earlier step can
    serve as a hiding place."""
    argv = [sys.executable, __file__, "--memory-child", name, str(classes), str(batch), str(m), str(threads)]
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"bench memory: the child process failed\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"bench memory: /proc/self/status has no {field}")


def memory_child(name: str, classes: int, batch: int, m: int, threads: int) -> None:
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    cpu = torch.device("cpu")
    step = {"ours": ours, "eager": eager, "full": full}[name]
    # Thread pools, lazily loaded code and autograd's own start: paid before, on a small problem of the same kind.
    small = make_table(1000, DIM, device=cpu).requires_grad_(True)
    for b in make_batches(1000, 16, 8, shared=False, device=cpu):
        step(small, b)
    weight = make_table(classes, DIM, device=cpu).requires_grad_(True)
    b = make_batches(classes, batch, m, shared=False, device=cpu)[0]
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is resident now
    before = _status("VmRSS")
    result = step(weight, b)
    extra = _status("VmHWM") - before
    unique = int(torch.unique(torch.cat([b.target, b.ids.reshape(-1)])).numel())
    checked = "" if name == "full" else refcheck(weight, b, [lambda _w, _b: result])
    print(json.dumps({"extra_bytes": extra, "unique_rows": unique, "refcheck": checked}))


# ----------------------------------------------------------------------------------------------------- plot
def plot() -> Path | None:
    """docs/images/bench_sampled_softmax.png from the stored results, never from numbers in memory."""
    from _plot import plot_sampled_softmax

    return plot_sampled_softmax(IMAGES / "bench_sampled_softmax.png")


def main() -> int:
    if "--memory-child" in sys.argv:
        at = sys.argv.index("--memory-child")
        memory_child(sys.argv[at + 1], *(int(x) for x in sys.argv[at + 2 : at + 6]))
        return 0
    parser = common_options(__doc__)
    parser.add_argument("--no-plot", action="store_true", help="do not draw docs/images/bench_sampled_softmax.png")
    parser.add_argument("--plot-only", action="store_true", help="draw the plot from the stored results and stop")
    parser.add_argument("--row", help="measure this row in this process and print it as JSON")
    options = parser.parse_args()
    if options.plot_only:
        return 0 if plot() else 1
    bench = Bench(options)
    if options.row:
        result = bench.sweep() if options.row == "sweep" else bench.rows()[options.row]()
        print(json.dumps(result.as_dict() if isinstance(result, Row) else result))
        return 0
    on_cpu = bench.device.type == "cpu"
    name = "sampled_softmax" if on_cpu else f"sampled_softmax_{bench.device.type}"
    report = Report(name, bench.device, store=not (options.quick or options.no_store))
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
