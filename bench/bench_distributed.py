"""A head on 1, 2 and 4 gloo ranks of this machine, by each route of a step: bytes, memory, balance, time.

C = 1,000,000, d = 128, m = 64 per row, log-uniform draws, B = 256 rows in total, RowAdagrad fused into backward.

Rows (--only takes any part of a name):
  bytes_ROUTE_2, bytes_ROUTE_4   bytes that a rank sends in a step / those of the model (docs/scale.md); ROUTE is
                       summed_logits, online_softmax, rows_to_queries, shared_rows or replicated
  memory_2, memory_4   memory of a rank above an idle one / shard + state + sampler + gathered queries
  balance_class, balance_spread   entries of the busiest of 4 ranks / mean, by the order of the classes
  ranks_2              step on 2 ranks of one thread / step of one process with 2 threads that is not sharded
  one_rank             the same with one rank of 2 threads: what the exchange costs by itself

shared_rows has 64 uniform draws for the batch (of a skewed distribution, copies are merged, and fewer rows travel).

The ranks share one machine, so ranks_2 says what sharding costs and not what it gains: the same work is done by the
same two cores.

Run it on an idle machine: python bench/bench_distributed.py
"""

from __future__ import annotations

import gc
import os
import resource
import socket
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from _harness import Report, Row, Timing, common_options, set_up, wanted

import samplex_cuda as sx
from samplex_cuda.distributed import Layout
from samplex_cuda.distributed.routes import ROUTES, Sizes, bytes_sent

CLASSES, DIM, BATCH, M = 1_000_000, 128, 256, 64
CONFIG = {"C": CLASSES, "d": DIM, "B": BATCH, "m": M}


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def step_times(step: Any, seconds: float) -> list[float]:
    """Milliseconds of each step."""
    for _ in range(5):
        step()
    times, end = [], time.perf_counter() + seconds
    while len(times) < 20 or (time.perf_counter() < end and len(times) < 2000):
        begin = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - begin))
    return times


def inputs(rows: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    g = torch.Generator().manual_seed(1)
    h = [torch.randn(rows, DIM, generator=g).requires_grad_() for _ in range(8)]
    return h, [torch.randint(CLASSES, (rows,), generator=g) for _ in range(8)]


def stepper(head: Any, rows: int, key: sx.Key) -> Any:
    h, y = inputs(rows)
    at = [0]

    def step() -> None:
        i = at[0] % 8
        at[0] += 1
        h[i].grad = None
        head(h[i], y[i], key=key).backward()

    return step


def make_head(route: str, rows: int, order: str) -> Any:
    shared = route == "shared_rows"
    sampler = sx.samplers.Uniform(CLASSES) if shared else sx.samplers.LogUniform(CLASSES)
    if route == "replicated":
        head = sx.SampledClassifier(DIM, CLASSES, sampler, M, bias=False)
        return sx.distributed.replicate(head, encoder="sum", batch_capacity=rows)
    return sx.SampledClassifier(DIM, CLASSES, sampler, M, bias=False, shared=shared, device="meta").shard(
        encoder="sum", batch_capacity=rows, order=order, key=sx.Key(3), route=route
    )


def warm_up() -> None:
    """A step of a tiny head: an idle rank has loaded the code that a step runs, about 80 MB of it."""
    head: Any = sx.SampledClassifier(8, 100, sx.samplers.LogUniform(100), 4, bias=False, device="meta")
    head = head.shard(encoder="sum", batch_capacity=2, key=sx.Key(3))
    head.fuse_optimizer(sx.optim.RowAdagrad(head.parameters(), lr=0.05))
    head(torch.randn(2, 8, requires_grad=True), torch.zeros(2, dtype=torch.int64)).backward()


def in_collectives(step: Any, count: int) -> tuple[float, int]:
    """Milliseconds of a step inside of torch.distributed, and how many calls it makes."""
    names, spent, calls = ("all_gather_single", "all_reduce", "all_to_all_single"), 0.0, 0
    real = {name: getattr(dist, name) for name in names}

    def timed(call: Any) -> Any:
        def run(*args: Any, **options: Any) -> Any:
            nonlocal spent, calls
            begin = time.perf_counter()
            made = call(*args, **options)
            spent, calls = spent + 1e3 * (time.perf_counter() - begin), calls + 1
            return made

        return run

    for name in names:
        setattr(dist, name, timed(real[name]))
    for _ in range(count):
        step()
    for name in names:
        setattr(dist, name, real[name])
    return spent / count, calls // count


def empty_call(count: int) -> float:
    """Milliseconds of an all-reduce of one number."""
    one = torch.zeros(1)
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(count):
        dist.all_reduce(one)
    return 1e3 * (time.perf_counter() - begin) / count


def on_rank(rank: int, world: int, port: int, threads: int, seconds: float, order: str, route: str, out: Any) -> None:
    torch.set_num_threads(threads)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    rows = BATCH // world
    warm_up()
    gc.collect()
    idle = resident()
    head = make_head(route, rows, order)
    head.fuse_optimizer(sx.optim.RowAdagrad(head.parameters(), lr=0.05))
    exchange = head._replica.exchange if route == "replicated" else head.exchange
    step = stepper(head, rows, sx.Key(9))
    for _ in range(30):
        step()
    used = resident() - idle
    dist.barrier()
    before = exchange.sent
    step()
    sent = exchange.sent - before
    count = torch.tensor([20 if seconds == 0 else 0])
    if rank == 0 and seconds:
        begin = time.perf_counter()
        for _ in range(5):
            step()
        count[0] = max(20, int(seconds / ((time.perf_counter() - begin) / 5)))
    elif seconds:
        for _ in range(5):
            step()
    dist.broadcast(count, 0)
    times = []
    for _ in range(int(count)):
        begin = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - begin))
    inside = (*in_collectives(step, 100), empty_call(300)) if seconds else (0.0, 0, 0.0)
    out.put((rank, sent, used, times, exchange.unique, inside))
    dist.barrier()
    dist.destroy_process_group()


def run_ranks(
    world: int, threads: int, seconds: float, route: str = "summed_logits", order: str = "spread"
) -> list[tuple[int, int, int, list[float], float, tuple[float, int, float]]]:
    """(rank, bytes of a step, memory above idle, times, share of unique classes, time in collectives) of each rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("spawn")
    results = context.Queue()
    os.environ["OMP_NUM_THREADS"] = str(threads)
    started = [
        context.Process(target=on_rank, args=(rank, world, port, threads, seconds, order, route, results))
        for rank in range(world)
    ]
    for process in started:
        process.start()
    found = [results.get(timeout=600) for _ in started]
    for process in started:
        process.join()
    del os.environ["OMP_NUM_THREADS"]
    return sorted(found)


def bytes_row(route: str, world: int, found: Any) -> Row:
    rows = BATCH // world
    if route == "replicated":
        model = float((world - 1) * rows * (4 * DIM + 12 * (M + 1)))
    else:
        model = statistics.mean(bytes_sent(route, Sizes(world, rows, M, DIM, f[4])) for f in found)
    sent = statistics.mean(f[1] for f in found)
    return Row(
        f"bytes_{route}_{world}", f"{route}: bytes sent by a rank of {world} in a step / model", sent / model, "ratio",
        "counted from the sizes given to the collectives, mean of the ranks", sense="<=", target=1.05,
        note=f"{sent:,.0f} bytes, model {model:,.0f}, unique {found[0][4]:.2f}", config={**CONFIG, "ranks": world},
    )  # fmt: skip


def memory_row(world: int, found: Any) -> Row:
    rows = -(-CLASSES // world)
    model = 2 * rows * DIM * 4 + BATCH * DIM * 4
    used = max(f[2] for f in found)
    return Row(
        f"memory_{world}", f"memory of a rank of {world} above an idle one / shard, state, sampler, queries",
        used / model, "ratio", "resident set of each rank after a step of a tiny head, and after 30 steps of this one",
        sense="<=", target=1.15,
        note=f"{used / 2**20:.0f} MiB, model {model / 2**20:.0f} MiB", config={**CONFIG, "ranks": world},
    )  # fmt: skip


def balance_row(order: str) -> Row:
    ids = sx.samplers.LogUniform(CLASSES).sample(None, M, batch_size=4 * BATCH, key=sx.Key(1)).ids
    loads = [int((Layout(CLASSES, 4, rank, order).local(ids) >= 0).sum()) for rank in range(4)]
    assert sum(loads) == ids.numel()
    return Row(
        f"balance_{order}", f'entries of the busiest of 4 ranks / mean, order="{order}"', 4 * max(loads) / sum(loads),
        "ratio", "every entry is local on one rank", sense="<=", target=1.3 if order == "spread" else None,
        config={**CONFIG, "ranks": 4},
    )  # fmt: skip


def alone(seconds: float) -> list[float]:
    """Times of one process that is not sharded."""
    head = sx.SampledClassifier(DIM, CLASSES, sx.samplers.LogUniform(CLASSES), M, bias=False)
    head.fuse_optimizer(sx.optim.RowAdagrad(head.parameters(), lr=0.05))
    return step_times(stepper(head, BATCH, sx.Key(9)), seconds)


def time_row(row_id: str, text: str, mine: list[float], other: list[float], note: str = "") -> Row:
    return Row(
        row_id, text, statistics.median(mine) / statistics.median(other), "ratio",
        "tests/test_distributed.py compares losses, gradients and tables with one process", ours=Timing.of(mine),
        other=Timing.of(other), other_name="one process, 2 threads, not sharded", note=note, config=CONFIG,
    )  # fmt: skip


def main() -> int:
    parser = common_options(__doc__)
    options = parser.parse_args()
    device = set_up(options)
    report = Report("distributed", device, store=not (options.quick or options.no_store))
    seconds = 1.0 if options.quick else 5.0
    ranks: dict[int, Any] = {}
    for world in (2, 4):
        if wanted(options, f"memory_{world}") or wanted(options, f"ranks_{world}"):
            ranks[world] = run_ranks(world, 1, seconds)
        if wanted(options, f"memory_{world}"):
            report.add(memory_row(world, ranks[world]))
        for route in (*ROUTES, "replicated"):
            if wanted(options, f"bytes_{route}_{world}"):
                report.add(bytes_row(route, world, run_ranks(world, 1, 0.0, route)))
    for order in ("class", "spread"):
        if wanted(options, f"balance_{order}"):
            report.add(balance_row(order))
    if wanted(options, "ranks_2"):
        mine = max((f[3] for f in ranks[2]), key=statistics.median)
        spent, calls, empty = (statistics.mean(f[5][i] for f in ranks[2]) for i in range(3))
        note = (
            f"{spent:.2f} ms of it in {calls:.0f} collectives, waits for the other rank among them; an all-reduce of "
        )
        note += f"4 bytes takes {empty:.2f} ms"
        text = "step on 2 ranks x 1 thread / one process x 2 threads"
        report.add(time_row("ranks_2", text, mine, alone(seconds), note))
    if wanted(options, "one_rank"):
        mine = run_ranks(1, 2, seconds)[0][3]
        report.add(time_row("one_rank", "step on 1 rank x 2 threads / the head not sharded", mine, alone(seconds)))
    return report.finish(fail=not options.no_fail)


if __name__ == "__main__":
    sys.exit(main())
