"""The training step on a machine that does other things: beside forked workers and beside other busy processes.

  ours     SampledClassifier with a RowAdagrad fused into backward; C = 1,000,000, d = 128, B = 256, m = 64 per row;
           its tables are in memory that a fork does not copy (sx.tables.share)
  private  the same with SAMPLEX_TABLES=private
  eager    torch.randint, a sparse embedding, bmm, cross_entropy, torch.optim.Adagrad

Rows (--only takes any part of a name); each is a time over that of the same step on the quiet machine, alternately:
  workers          ours beside 2 forked, persistent DataLoader workers, over private without workers; the first steps
                   after the fork, which copy small buffers, are in the note
  workers_faults   page faults per step of it
  workers_limit    a torch.mm about as long as a step, beside the same workers: what any code on two threads loses to
                   them
  workers_private  private beside the same workers: what sharing is for; its page faults are in the note
  share_cost       ours over private, both without workers
  workers_eager    eager beside 2 workers
  busy_1, busy_2   ours beside 1 and 2 processes that spin
  openmp_1, openmp_2   the same with SAMPLEX_THREADS=openmp: every loop on torch's OpenMP team
  eager_1, eager_2     eager beside the same
  quiet            ours over SAMPLEX_THREADS=openmp, quiet
  encoder          the same with a stack of torch.mm before the step, after which torch's own threads spin

A time is the mean of a block of steps, not a median: a step that waits for a scheduler slice counts. The value is the
median of these means. Nobody else may use the machine; the spinning processes are started and ended here.

Run it on an idle machine: python bench/bench_busy.py
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
import os
import resource
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from _harness import Report, Row, Timing, common_options, progress, row_from, set_up, wanted
from _steps import SETS, Eager, Inputs, Ours, Sizes, make_inputs, refcheck
from torch.utils.data import DataLoader, Dataset

import samplex_cuda as sx
from samplex_cuda import _native

CLASSES = 1_000_000
SIZES = Sizes(CLASSES)
BATCH, DIM, M = SIZES.batch, SIZES.dim, SIZES.m
CONFIG = {"classes": CLASSES, "dim": DIM, "batch": BATCH, "num_samples": M}
Step = Callable[[int], Any]


# ----------------------------------------------------------------------------------------------------- company
class Trivial(Dataset[int]):
    """Numbers: the workers are there, and hardly compute."""

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> int:
        return index


def processor_ms(processes: Sequence[Any]) -> float:
    """Milliseconds that all threads of processes have had a processor: a worker sends its batches from a second one."""
    threads = [path for p in processes for path in Path(f"/proc/{p.pid}/task").glob("*/schedstat")]
    return sum(int(path.read_text().split()[0]) for path in threads) / 1e6


@contextlib.contextmanager
def workers(count: int, used: list[float] | None = None) -> Iterator[Callable[[], Any]]:
    """Forked workers; gives what fetches the next batch. `used` gets their processor time per batch, in ms."""
    loader = DataLoader(
        Trivial(), batch_size=BATCH, num_workers=count, persistent_workers=True, multiprocessing_context="fork"
    )
    batches = iter(loader)
    next(batches)
    processes = batches._workers  # type: ignore[attr-defined]
    before, fetched = processor_ms(processes), 0

    def fetch() -> Any:
        nonlocal fetched
        fetched += 1
        return next(batches)

    try:
        yield fetch
        if used is not None:
            used.append((processor_ms(processes) - before) / max(fetched, 1))
    finally:
        batches._shutdown_workers()  # type: ignore[attr-defined]
        gc.collect()


class Spinners:
    """Processes that spin, stopped until they are wanted; they end with this process."""

    CODE = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    for _ in range(1000000): pass"

    def __init__(self, count: int) -> None:
        self.all = [subprocess.Popen([sys.executable, "-c", self.CODE]) for _ in range(count)]
        time.sleep(0.3)
        self.run(0)

    def run(self, count: int) -> None:
        for number, process in enumerate(self.all):
            process.send_signal(signal.SIGCONT if number < count else signal.SIGSTOP)
        time.sleep(0.05)

    def end(self) -> None:
        for process in self.all:
            process.kill()
            process.wait()


# ----------------------------------------------------------------------------------------------------- timing
def block(step: Step, calls: int, between: Callable[[], Any] | None = None) -> tuple[float, float]:
    """Mean milliseconds and page faults per step of one block; what runs `between` is not timed."""
    total, faults = 0.0, 0
    for i in range(-2, calls):
        if between is not None:
            between()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        begin = time.perf_counter()
        step(i % SETS)
        if i >= 0:
            total += time.perf_counter() - begin
            faults += resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    return total / calls * 1e3, faults / calls


def ratio_row(
    row_id: str, what: str, times: Sequence[float], base: Sequence[float], base_name: str, check: str, **more: Any
) -> Row:
    by_round = Timing.of([a / b for a, b in zip(times, base, strict=True)])
    ours, other = Timing.of(times), Timing.of(base)
    more.setdefault("sense", "<=")
    return Row(
        id=row_id,
        what=what,
        value=ours.median / other.median,
        unit="ratio",
        refcheck=check,
        ours=ours,
        other=other,
        other_name=base_name,
        spread=(by_round.p20, by_round.p80),
        config=CONFIG,
        **more,
    )


class Bench:
    """The rows, in groups that share a process: each method measures one group."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device = set_up(options)
        self.inputs = make_inputs(SIZES, self.device)
        self.rounds = 3 if options.quick else 12
        self.calls = 10 if options.quick else 40

    def groups(self) -> dict[str, tuple[list[str], Callable[[], list[Row]]]]:
        return {
            "workers": (
                ["workers", "workers_faults", "workers_limit", "workers_private", "share_cost"],
                self.beside_workers,
            ),
            "workers_eager": (["workers_eager"], self.eager_beside_workers),
            "busy": (["busy_1", "busy_2", "openmp_1", "openmp_2", "quiet", "encoder"], self.beside_busy),
            "eager": (["eager_1", "eager_2"], self.eager_beside_busy),
        }

    def ours(self) -> Ours:
        progress("making a table")
        found = Ours(SIZES, self.device)
        progress("")
        return found

    def eager(self) -> tuple[Eager, str]:
        of_draw = self.ours()
        side = Eager(SIZES, self.device)
        return side, self.check([side], of_draw)

    def check(self, sides: list[Any], of_draw: Ours) -> str:
        return refcheck(sides, of_draw, self.inputs.h[0], self.inputs.y[0])

    @staticmethod
    def step_of(side: Any, inputs: Inputs) -> Step:
        return lambda i: side.step(inputs.h[i], inputs.y[i])

    # ------------------------------------------------------------------------------------------------- workers
    def beside_workers(self) -> list[Row]:
        os.environ["SAMPLEX_TABLES"] = "private"
        private = self.ours()
        del os.environ["SAMPLEX_TABLES"]
        ours = self.ours()
        sx.tables.share(ours.head, ours.optimizer)  # for systems where it is not the default
        check = self.check([private, ours], private)
        one, two = self.step_of(private, self.inputs), self.step_of(ours, self.inputs)
        left, right, out = torch.randn(BATCH, 1024), torch.randn(1024, 512), torch.empty(BATCH, 512)

        def limit(_: int) -> Any:
            return torch.mm(left, right, out=out)

        alone, alone_ours, first, beside, faults = [], [], [], [], []
        limits: tuple[list[float], list[float]] = ([], [])
        used: list[float] = []
        for number in range(self.rounds):
            progress(f"round {number + 1}: workers")
            alone.append(block(one, self.calls)[0])
            alone_ours.append(block(two, self.calls)[0])
            limits[0].append(block(limit, self.calls)[0])
            with workers(2, used) as fetch:
                first.append(block(two, self.calls, fetch)[0])  # small buffers of the process are copied once
                milliseconds, count = block(two, self.calls, fetch)
                limits[1].append(block(limit, self.calls, fetch)[0])
            beside.append(milliseconds)
            faults.append(count)
        with workers(2) as fetch:  # last: it leaves the private table in small pages
            split = [block(one, self.calls, fetch) for _ in range(self.rounds)]
        progress("")
        note = f"{Timing.of([count for _, count in split]).median:.0f} page faults per step"
        quiet, of_workers = Timing.of(alone).median, Timing.of(used).median
        bound = 1 + of_workers / (quiet * torch.get_num_threads())
        beside_note = (
            f"the first {self.calls} steps after the fork {Timing.of(first).median / quiet:.2f}x; the workers use "
            f"{of_workers:.2f} ms of a processor for each batch: a step that shares the cores with all of it takes "
            f"at least {bound:.2f}x"
        )
        faults_row = Row(
            id="workers_faults",
            what="page faults per step beside 2 forked workers",
            value=Timing.of(faults).median,
            unit="faults",
            sense="<=",
            target=20,
            refcheck=check,
            config=CONFIG,
        )
        return [
            ratio_row("workers", "step beside 2 forked workers, over private without", beside, alone,
                      "private, without workers", check, target=1.2, note=beside_note),
            faults_row,
            ratio_row("workers_limit", "torch.mm on the same threads beside 2 forked workers, over without", limits[1],
                      limits[0], "without workers", check),
            ratio_row("workers_private", "private beside 2 forked workers, over without", [t for t, _ in split], alone,
                      "private, without workers", check, note=note),
            ratio_row("share_cost", "step over private, without workers", alone_ours, alone,
                      "private, without workers", check, target=1.05),
        ]  # fmt: skip

    def eager_beside_workers(self) -> list[Row]:
        side, check = self.eager()
        step = self.step_of(side, self.inputs)
        alone, beside = [], []
        for number in range(self.rounds):
            progress(f"round {number + 1}: eager, workers")
            alone.append(block(step, self.calls // 2)[0])
            with workers(2) as fetch:
                beside.append(block(step, self.calls // 2, fetch)[0])
        progress("")
        return [ratio_row("workers_eager", "eager beside 2 forked workers, over without", beside, alone,
                          "without workers", check)]  # fmt: skip

    # ------------------------------------------------------------------------------------------------- busy processes
    def beside_busy(self) -> list[Row]:
        side = self.ours()
        check = self.check([side], side)
        step = self.step_of(side, self.inputs)
        layers = [torch.randn(1024, 1024) * 1024**-0.5 for _ in range(3)]
        start = torch.randn(BATCH, 1024)

        def with_encoder(i: int) -> None:
            x = start
            for layer in layers:
                x = torch.relu(x @ layer)
            step(i)

        times: dict[tuple[str, str], list[float]] = {}
        spinners = Spinners(2)
        try:
            for number in range(self.rounds):
                for count in (0, 1, 2):
                    progress(f"round {number + 1}: {count} busy processes")
                    spinners.run(count)
                    for mode in ("auto", "openmp") if number % 2 else ("openmp", "auto"):
                        _native.set_thread_mode(mode)
                        calls = self.calls * 2 if count == 0 or mode == "auto" else self.calls // 2
                        times.setdefault((mode, str(count)), []).append(block(step, calls)[0])
                        if count == 0:
                            times.setdefault((mode, "encoder"), []).append(block(with_encoder, self.calls)[0])
        finally:
            spinners.end()
            _native.set_thread_mode("auto")
            progress("")
        quiet = times["openmp", "0"]
        rows = []
        for name, mode, targets in (("busy", "auto", (1.8, 3.0)), ("openmp", "openmp", (None, None))):
            for count, target in zip((1, 2), targets, strict=True):
                what = f"step beside {count} busy process{'es' if count > 1 else ''}, over quiet"
                what += "" if mode == "auto" else ", OpenMP only"
                rows.append(
                    ratio_row(f"{name}_{count}", what, times[mode, str(count)], times[mode, "0"], "quiet", check,
                              target=target)
                )  # fmt: skip
        rows.append(
            ratio_row("quiet", "quiet step over OpenMP only", times["auto", "0"], quiet, "OpenMP only", check,
                      target=1.05)
        )  # fmt: skip
        rows.append(
            ratio_row("encoder", "quiet torch.mm and step over OpenMP only", times["auto", "encoder"],
                      times["openmp", "encoder"], "OpenMP only", check, target=1.05)
        )  # fmt: skip
        return rows

    def eager_beside_busy(self) -> list[Row]:
        side, check = self.eager()
        step = self.step_of(side, self.inputs)
        times: dict[int, list[float]] = {0: [], 1: [], 2: []}
        spinners = Spinners(2)
        try:
            for number in range(self.rounds):
                for count, found in times.items():
                    progress(f"round {number + 1}: eager, {count} busy processes")
                    spinners.run(count)
                    found.append(block(step, self.calls // 2)[0])
        finally:
            spinners.end()
            progress("")
        return [
            ratio_row(f"eager_{count}", f"eager beside {count} busy process{'es' if count > 1 else ''}, over quiet",
                      times[count], times[0], "quiet", check)
            for count in (1, 2)
        ]  # fmt: skip


def main() -> int:
    warnings.filterwarnings("ignore", message="Sparse invariant checks")
    warnings.filterwarnings("ignore", message=".*not writable.*")
    parser = common_options(__doc__ or "")
    parser.add_argument("--group", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.device != "cpu":
        raise SystemExit("bench_busy: --device must be cpu")
    bench = functools.cache(lambda: Bench(options))
    if options.group:
        rows = bench().groups()[options.group][1]()
        print(json.dumps([row.as_dict() for row in rows]))
        return 0
    report = Report("busy", set_up(options), store=not (options.quick or options.no_store))
    argv = [a for a in sys.argv[1:] if a != "--readme"]
    for group, (ids, _) in Bench(options).groups().items():
        if not any(wanted(options, row_id) for row_id in ids):
            continue
        progress(group)
        done = subprocess.run(
            [sys.executable, str(Path(__file__)), *argv, "--group", group], stdout=subprocess.PIPE, text=True
        )
        progress("")
        if done.returncode != 0:
            raise SystemExit(f"bench: group {group} failed")
        for values in json.loads(done.stdout.splitlines()[-1]):
            if wanted(options, values["id"]):
                report.add(row_from(values, True))
    return report.finish(fail=not options.no_fail)


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    raise SystemExit(main())
