"""The exact loss over all classes, forward and backward, against what torch has for it; B = 256 and d = 128.

1k, 10k, 100k         C = 1,000, 10,000, 100,000: time of the fastest of the others / our time
1k_floor, ...         our time / the time of the GEMMs alone, by torch or by this library's own products, whichever are
                      faster: three where the logits are kept, four where not
1k_memory, ...        peak memory above the start without the gradients / that of eager

The others: `eager` is F.linear + F.cross_entropy, `compiled` the same under torch.compile, `chunked` is
F.linear_cross_entropy with its default chunks (where torch has it), `Liger` its fused linear cross entropy (on a GPU,
where it is installed). The note of a row has the time or memory of each.
--batch and --dim measure other shapes; such a run is not stored.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from _harness import (
    Report,
    Row,
    Side,
    Timing,
    check_close,
    common_options,
    interleave,
    make_table,
    set_up,
    wanted,
    write_readme,
)

import samplex_cuda as sx
from samplex_cuda.chunking import kept_bytes
from samplex_cuda.products import product

CASES = {"1k": 1_000, "10k": 10_000, "100k": 100_000}
GEMMS = {"torch's GEMMs alone": lambda a, b, out: torch.mm(a, b, out=out), "our GEMMs alone": product}
TARGETS = {"1k": 1.0, "10k": 1.0, "100k": 1.4}
# Of eager's. At 100,000 classes no [B, C] may exist.
MEMORY_TARGETS = {"1k": None, "10k": None, "100k": 1 / 8}


def _cross_entropy(h: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.linear(h, weight, bias), y)


def _chunked(h: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    options = torch.nn.LinearCrossEntropyOptions()
    return F.linear_cross_entropy(h, weight, y, linear_bias=bias, options=options)


class Softmax:
    """Forward and backward of the full softmax; gradients are made again each time, as a training step does."""

    def __init__(self, classes: int, batch: int, dim: int, device: torch.device) -> None:
        self.weight = make_table(classes, dim, device=device).requires_grad_(True)
        self.bias = torch.zeros(classes, device=device, requires_grad=True)
        self.h = torch.randn(batch, dim, device=device, requires_grad=True)
        self.y = torch.randint(classes, (batch,), device=device)
        self.leaves = (self.h, self.weight, self.bias)
        self.losses: dict[str, Callable[..., torch.Tensor]] = {
            "ours": lambda h, weight, bias, y: sx.functional.full_softmax(h, weight, y, bias),
            "eager": _cross_entropy,
            "compiled": torch.compile(_cross_entropy, dynamic=False),
        }
        if hasattr(torch.nn, "LinearCrossEntropyOptions"):
            self.losses["chunked"] = _chunked
        if device.type == "cuda" and importlib.util.find_spec("liger_kernel") is not None:
            from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

            liger = LigerFusedLinearCrossEntropyLoss()
            self.losses["Liger"] = lambda h, weight, bias, y: liger(weight, h, y, bias)

    def step(self, side: str, _: int = 0) -> tuple[torch.Tensor, ...]:
        loss = self.losses[side](*self.leaves, self.y)
        return loss, *torch.autograd.grad(loss, self.leaves)

    def floor(self, multiply: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]) -> Callable[[int], None]:
        """The GEMMs of a step alone, into memory that is there, by multiply(a, b, out).

        One for the logits (two, where they are not kept), and one for either gradient.
        """
        h, weight = self.h.detach(), self.weight.detach()
        d_h, d_weight = torch.empty_like(h), torch.empty_like(weight)
        batch, classes = h.shape[0], weight.shape[0]
        products = 1 if 4 * batch * classes <= kept_bytes(h.device) else 2
        # Where all logits do not fit the cache, the floor works on parts that do.
        size = min(classes, max(256, (1 << 19) // batch))
        logits = torch.zeros(batch * size, device=h.device)

        def run(_: int = 0) -> None:
            for first in range(0, classes, size):
                part = weight[first : first + size]
                out = logits[: batch * len(part)].view(batch, len(part))
                for _ in range(products):
                    multiply(h, part.t(), out)
                multiply(out, part, d_h)
                multiply(out.t(), h, d_weight[first : first + size])

        return run

    def refcheck(self) -> str:
        """Loss and gradients of every side against fp64."""
        exact = [leaf.detach().double().requires_grad_() for leaf in self.leaves]
        loss = _cross_entropy(*exact, self.y)
        want = (loss, *torch.autograd.grad(loss, exact))
        worst = 0.0
        for side in self.losses:
            for name, got, expected in zip(("loss", "h", "weight", "bias"), self.step(side), want, strict=True):
                worst = max(worst, check_close(f"{side}: {name}", got.detach(), expected.detach(), 1e-4))
        return f"loss and gradients of {', '.join(self.losses)} vs fp64: {worst:.1e}"


# ----------------------------------------------------------------------------------------------------- memory
def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    return 0


def memory_child(side: str, classes: int, batch: int, dim: int, threads: int) -> None:
    torch.set_num_threads(threads)
    cpu = torch.device("cpu")
    Softmax(1000, 16, dim, cpu).step(side)  # thread pools and lazily loaded code come before
    problem = Softmax(classes, batch, dim, cpu)
    if side == "compiled":
        problem.step(side)  # so does the compiler
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is resident now
    result = problem.step(side)
    extra = _status("VmHWM") - before - sum(t.nbytes for t in result)
    print(json.dumps({"extra_bytes": max(0, extra)}))


def memory(sides: list[str], classes: int, batch: int, dim: int, threads: int) -> dict[str, float]:
    """MiB of each side, measured in a separate process."""
    got = {}
    for side in sides:
        sizes = map(str, (classes, batch, dim, threads))
        command = [sys.executable, __file__, "--memory-child", side, *sizes]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        got[side] = json.loads(done.stdout.splitlines()[-1])["extra_bytes"] / 2**20
    return got


# ----------------------------------------------------------------------------------------------------- rows
def listed(values: dict[str, Timing]) -> str:
    return ", ".join(f"{name} {t.median:.3g} ms" for name, t in values.items())


def main() -> int:
    if "--memory-child" in sys.argv:
        memory_child(sys.argv[2], *map(int, sys.argv[3:]))
        return 0
    parser = common_options(__doc__)
    parser.add_argument("--batch", type=int, default=256, help="rows (default 256)")
    parser.add_argument("--dim", type=int, default=128, help="width of a row (default 128)")
    options = parser.parse_args()
    device = set_up(options)
    usual = (options.batch, options.dim) == (256, 128)
    name = "full_softmax" if device.type == "cpu" else f"full_softmax_{device.type}"
    report = Report(name, device, store=usual and not (options.quick or options.no_store))
    for row_id, classes in CASES.items():
        if options.quick and classes > 10_000:
            continue
        if not any(wanted(options, row_id + part) for part in ("", "_floor", "_memory")):
            continue
        problem = Softmax(classes, options.batch, options.dim, device)
        checked = problem.refcheck()
        others = [side for side in problem.losses if side != "ours"]
        sides = [Side(side, functools.partial(problem.step, side)) for side in problem.losses]
        sides += [Side(name, problem.floor(multiply)) for name, multiply in GEMMS.items()]
        got = interleave(sides, device=device, seconds=options.seconds, min_rounds=2 if options.quick else 5)
        best = min(others, key=lambda side: got.times[side].median)
        gemms = min(GEMMS, key=lambda side: got.times[side].median)
        where = f"C = {classes:,}, d = {options.dim}, B = {options.batch}"
        times = {f"{side}_ms": timing.median for side, timing in got.times.items()}
        config: dict[str, Any] = {"C": classes, "d": options.dim, "B": options.batch}
        common: dict[str, Any] = {"refcheck": checked, "ours": got.times["ours"], "config": {**config, **times}}
        if wanted(options, row_id):
            value, low, high = got.ratio(best, "ours")
            report.add(
                Row(
                    row_id,
                    f"full softmax, forward and backward, {where}: vs the fastest of {', '.join(others)}",
                    value,
                    "x",
                    target=TARGETS[row_id] if usual and device.type == "cpu" else None,
                    other=got.times[best],
                    other_name=best,
                    spread=(low, high),
                    note=listed(got.times),
                    **common,
                )
            )
        if wanted(options, f"{row_id}_floor"):
            value, low, high = got.ratio("ours", gemms)
            report.add(
                Row(
                    f"{row_id}_floor",
                    f"full softmax, forward and backward, {where}: time / its GEMMs alone",
                    value,
                    "ratio",
                    sense="<=",
                    other=got.times[gemms],
                    other_name=gemms,
                    spread=(low, high),
                    **common,
                )
            )
        if wanted(options, f"{row_id}_memory") and Path("/proc/self/clear_refs").exists() and device.type == "cpu":
            mib = memory(list(problem.losses), classes, options.batch, options.dim, options.threads)
            report.add(
                Row(
                    f"{row_id}_memory",
                    f"full softmax, forward and backward, {where}: peak memory of intermediates / eager",
                    mib["ours"] / max(mib["eager"], 1e-9),
                    "ratio",
                    checked,
                    sense="<=",
                    target=MEMORY_TARGETS[row_id] if usual else None,
                    config={**config, **{f"{side}_mib": value for side, value in mib.items()}},
                    note=", ".join(f"{side} {value:.0f} MiB" for side, value in mib.items()),
                )
            )
        del problem
    code = report.finish(fail=not options.no_fail)
    write_readme(report, options)
    return code


if __name__ == "__main__":
    sys.exit(main())
