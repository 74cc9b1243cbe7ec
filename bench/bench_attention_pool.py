"""Attention pooling against eager torch: E[x], softmax, weighted sum, and the backward of all of it.

Rows (--only takes any part of a name):
  step      forward + backward to coalesced row gradients of E, and the gradients of p and v, vs eager torch
  forward   the value alone, without gradients, vs eager torch
  memory    peak memory of a step above the start, without its results, / one [B, T, d] tensor

S = 30,000 rows of d = 512, B = 128 sequences of T = 256 tokens: 32,768 tokens hit about 20,000 rows, so 40 MB of row
gradients are the least that a step must write. The eager side is what a person would write, with sparse gradients.

Run it on an idle machine: python bench/bench_attention_pool.py
"""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path

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

from samplex_cuda import functional as sxf

ROWS, DIM, BATCH, LENGTH, SETS = 30_000, 512, 128, 256, 8
Step = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]  # f [B], d_E coalesced COO [S, d], d_p, d_v
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # E [S, d], p [d], v [d]


def make_inputs(device: torch.device) -> tuple[Inputs, list[torch.Tensor], torch.Tensor]:
    """E, p, v; eight sets of ids, so that a step does not find its rows in the cache; the upstream gradient [B]."""
    table = make_table(ROWS, DIM, device=device).requires_grad_(True)
    p, v = (torch.randn(DIM, device=device).requires_grad_(True) for _ in range(2))
    ids = [torch.randint(ROWS, (BATCH, LENGTH), device=device) for _ in range(SETS)]
    return (table, p, v), ids, torch.randn(BATCH, device=device)


def ours(inputs: Inputs, ids: torch.Tensor, grad: torch.Tensor) -> Step:
    f = sxf.attention_pool(ids, *inputs)
    return (f.detach(), *torch.autograd.grad(f, inputs, grad))


def pooled(table: torch.Tensor, p: torch.Tensor, v: torch.Tensor, ids: torch.Tensor, sparse: bool) -> torch.Tensor:
    rows = nnf.embedding(ids, table, sparse=sparse)  # [B, T, d]
    q = torch.softmax(torch.einsum("btd,d->bt", rows, p), 1)
    return torch.einsum("bt,bt->b", q, torch.einsum("btd,d->bt", rows, v))


def eager(inputs: Inputs, ids: torch.Tensor, grad: torch.Tensor) -> Step:
    f = pooled(*inputs, ids, True)
    d_table, d_p, d_v = torch.autograd.grad(f, inputs, grad)
    return f.detach(), d_table.coalesce(), d_p, d_v


@torch.no_grad()
def ours_forward(inputs: Inputs, ids: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    return sxf.attention_pool(ids, *inputs)


@torch.no_grad()
def eager_forward(inputs: Inputs, ids: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    return pooled(*inputs, ids, True)


def refcheck(inputs: Inputs, ids: torch.Tensor, grad: torch.Tensor) -> str:
    """Both sides against fp64 on the touched rows. Raises where one is off."""
    touched, at = torch.unique(ids, return_inverse=True)
    leaves = [t.detach().double().requires_grad_(True) for t in (inputs[0].detach()[touched], *inputs[1:])]
    want_f = pooled(*leaves, at, False)
    want = torch.autograd.grad(want_f, leaves, grad.double())
    worst = 0.0
    for step in (ours, eager):
        f, d_table, d_p, d_v = step(inputs, ids, grad)
        name = step.__name__
        if not (d_table.is_sparse and d_table.is_coalesced() and torch.equal(d_table.indices()[0], touched)):
            raise AssertionError(f"refcheck {name}: the gradient of E must be coalesced and hold the touched rows")
        worst = max(
            worst,
            check_close(f"{name} f", f, want_f.detach(), 1e-5),
            check_close(f"{name} row gradients", d_table.values(), want[0], 1e-4),
            check_close(f"{name} d_p", d_p, want[1], 1e-4),
            check_close(f"{name} d_v", d_v, want[2], 1e-4),
        )
    return f"f, row ids, row gradients, d_p and d_v of each side vs fp64: {worst:.1e}"


# ----------------------------------------------------------------------------------------------------- memory
def _status(name: str) -> int:
    """Bytes of a field of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"no {name} in /proc/self/status")


def memory_child(side: str, threads: int) -> None:
    """Prints the peak of one step above what was resident before it, less what the step returns."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    step = {"ours": ours, "eager": eager}[side]
    inputs, ids, grad = make_inputs(torch.device("cpu"))
    step(inputs, ids[0][:2, :2].contiguous(), grad[:2])
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is resident now
    before = _status("VmRSS")
    made = step(inputs, ids[0], grad)
    kept = sum(t.values().nbytes + t.indices().nbytes if t.is_sparse else t.nbytes for t in made)
    print(max(0, _status("VmHWM") - before - kept))


def memory(threads: int) -> dict[str, int]:
    found = {}
    for side in ("ours", "eager"):
        progress(f"memory: {side}")
        command = [sys.executable, __file__, "--memory-child", side, str(threads)]
        found[side] = int(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    progress("")
    return found


# ----------------------------------------------------------------------------------------------------- rows
def main() -> int:
    if "--memory-child" in sys.argv:
        side, threads = sys.argv[sys.argv.index("--memory-child") + 1 :]
        memory_child(side, int(threads))
        return 0
    options = common_options(__doc__).parse_args()
    device = set_up(options)
    on_cpu = device.type == "cpu"
    name = "attention_pool" if on_cpu else f"attention_pool_{device.type}"
    report = Report(name, device, store=not (options.quick or options.no_store))
    inputs, ids, grad = make_inputs(device)
    config = {"S": ROWS, "d": DIM, "B": BATCH, "T": LENGTH}
    where = f"S = {ROWS:,}, d = {DIM}, B = {BATCH}, T = {LENGTH}"
    checked = refcheck(inputs, ids[0], grad)
    cases = (
        ("step", "forward + backward", ours, eager, 5.0),
        ("forward", "forward", ours_forward, eager_forward, None),
    )
    for row_id, what, mine, theirs, target in cases:
        if not wanted(options, row_id):
            continue
        sides = [
            Side(side, functools.partial(lambda step, i: step(inputs, ids[i % SETS], grad), step))
            for side, step in (("ours", mine), ("eager", theirs))
        ]
        got = interleave(sides, device=device, seconds=options.seconds, min_rounds=2 if options.quick else 5, sets=SETS)
        value, low, high = got.ratio("eager", "ours")
        report.add(
            Row(
                row_id,
                f"{what}, {where}, vs eager torch",
                value,
                "x",
                checked,
                target=target if on_cpu else None,
                ours=got.times["ours"],
                other=got.times["eager"],
                other_name="eager torch",
                spread=(low, high),
                config=config,
            )
        )
    if wanted(options, "memory") and on_cpu and Path("/proc/self/clear_refs").exists():
        peak = memory(options.threads)
        whole = BATCH * LENGTH * DIM * 4
        report.add(
            Row(
                "memory",
                f"peak memory of a step, {where} / one [B, T, d] tensor",
                peak["ours"] / whole,
                "ratio",
                checked,
                sense="<=",
                target=0.5,
                config={**config, "bytes": peak, "bytes_of_B_T_d": whole},
                note=f"{peak['ours'] / 2**20:.0f} MiB; eager torch {peak['eager'] / 2**20:.0f} MiB",
            )
        )
    code = report.finish(fail=not options.no_fail)
    write_readme(report, options)
    return code


if __name__ == "__main__":
    sys.exit(main())
