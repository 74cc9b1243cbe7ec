"""Steps on a GPU against the clock: beside eager torch, torch.compile, FBGEMM, and beside docs/gpu_model.md.

    python bench/gpu_steps.py [--json FILE] [--seconds 3]

For each step: our time as Python launches it and as a CUDA graph, the time of the others, and what gpu_model.py
computes for the GPU of its list that is nearest in bandwidth. Then a profile of one step: kernels by time, launches
per step. `scripts/gpu_report.py` (make gpu) runs this. It works on a CPU too, for tests: --device cpu --classes 1000.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_model
import torch
from _harness import Side, interleave
from _steps import SETS, Inputs, Ours, Sizes, make_inputs, refcheck, rivals, timed

import samplex_cuda as sx

SAMPLED = {
    "per row, m = 64": {"m": 64},
    "per row, m = 64, bf16": {"m": 64, "dtype": torch.bfloat16},
    "shared, m = 64": {"m": 64, "shared": True},
    "shared, m = 512": {"m": 512, "shared": True},
    "shared, m = 2048": {"m": 2048, "shared": True},
    "shared, m = 2048, bf16": {"m": 2048, "shared": True, "dtype": torch.bfloat16},
}


def nearest(bandwidth: float) -> gpu_model.Gpu:
    """The GPU of the model whose memory is nearest in speed."""
    return min([*gpu_model.GPUS, gpu_model.CONSUMER], key=lambda gpu: abs(gpu.bandwidth - bandwidth))


def copy_bandwidth(device: torch.device, size: int = 1 << 30) -> float:
    """Bytes per second of a copy on the device, read and written."""
    size = size if device.type == "cuda" else 1 << 20
    a = torch.empty(size, dtype=torch.uint8, device=device)
    b = torch.empty_like(a)
    times = interleave([Side("copy", lambda i: b.copy_(a))], device=device, seconds=0.2, min_rounds=2).times
    return 2 * size / (times["copy"].median * 1e-3)


def captured(side: Ours, inputs: Inputs) -> Side | str:
    """Our step as a CUDA graph; a note why not, otherwise."""
    graphs = getattr(sx, "graphs", None)
    if graphs is None or inputs.h[0].device.type != "cuda":
        return "no graph: " + ("this build has no sx.graphs" if graphs is None else "not on a CUDA device")
    h = inputs.h[0].detach().clone().requires_grad_(True)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            h.copy_(x)
        return side.step(h, y)

    replay = graphs.capture_step(step)
    return Side("ours, graph", lambda i: replay(inputs.h[i % SETS].detach(), inputs.y[i % SETS]))


def measure(name: str, sizes: Sizes, device: torch.device, gpu: gpu_model.Gpu, seconds: float) -> dict[str, Any]:
    """Times of one sampled step, in ms."""
    torch.manual_seed(0)
    ours = Ours(sizes, device)
    others, note = rivals(sizes, device)
    inputs = make_inputs(sizes, device)
    # In 16 bits eager torch rounds the logits: its loss is not close enough to be held against fp64.
    trusted = others if sizes.dtype is torch.float32 else []
    checked = refcheck([ours, *trusted], ours, inputs.h[0], inputs.y[0])
    sides, notes = [timed(ours, inputs)], [note] if note else []
    graph = captured(ours, inputs)
    if isinstance(graph, Side):
        sides.append(graph)
    else:
        notes.append(graph)
    sides += [timed(side, inputs) for side in others]
    got = interleave(sides, device=device, seconds=seconds, min_rounds=2)
    function = next((step for key, step, _ in gpu_model.STEPS if key == name), None)
    shape = gpu_model.Shape(sizes.batch, sizes.dim, sizes.classes, sizes.m, sizes.dtype.itemsize)
    return {
        "step": name,
        "sizes": {key: str(value) for key, value in dataclasses.asdict(sizes).items()},
        "milliseconds": {side: timing.median for side, timing in got.times.items()},
        "computed": None if function is None else gpu_model.seconds(function(shape), gpu) * 1e3,
        "refcheck": checked,
        "notes": notes,
    }


def guarded(what: str, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A side that fails says so and does not keep the others from being measured."""
    try:
        return run()
    except (RuntimeError, AssertionError, ValueError, TypeError, ImportError, SystemExit) as error:
        return {"step": what, "error": f"{type(error).__name__}: {error}"[:2000]}


def profile(sizes: Sizes, device: torch.device, steps: int = 10) -> dict[str, Any]:
    """Kernels of our step by time, and how many of them a step launches."""
    from torch.profiler import ProfilerActivity

    ours, inputs = Ours(sizes, device), make_inputs(sizes, device)
    for i in range(3):
        ours.step(inputs.h[i % SETS], inputs.y[i % SETS])
    cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with torch.profiler.profile(activities=activities) as found:
        for i in range(steps):
            ours.step(inputs.h[i % SETS], inputs.y[i % SETS])
        if cuda:
            torch.cuda.synchronize()
    key = "self_device_time_total" if cuda else "self_cpu_time_total"
    events = sorted(found.key_averages(), key=lambda event: -getattr(event, key))
    rows = [
        (event.key, event.count / steps, getattr(event, key) / steps) for event in events if getattr(event, key) > 0
    ]
    device_type = torch.autograd.DeviceType.CUDA
    launched = [event for event in found.events() if cuda and event.device_type == device_type]
    return {
        "launches": len(launched) / steps if cuda else None,
        "kernels": [{"name": name, "per_step": count, "microseconds": us} for name, count, us in rows[:20] if us > 0],
    }


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--classes", type=int, default=1_000_000)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=3.0, help="for each step")
    parser.add_argument("--only", nargs="+", default=[], help="steps whose name contains one of these")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("gpu_steps: torch sees no CUDA device; see python -m samplex_cuda.info", file=sys.stderr)
        return 2
    begin = time.monotonic()
    bandwidth = copy_bandwidth(device)
    gpu = nearest(bandwidth / gpu_model.OF_BANDWIDTH)
    results: dict[str, Any] = {"bandwidth": bandwidth, "model": gpu.name, "steps": []}
    base = {"classes": options.classes, "batch": options.batch, "dim": options.dim}
    for name, more in SAMPLED.items():
        if options.only and not any(part in name for part in options.only):
            continue
        sizes = Sizes(**base, **more)
        found = guarded(name, lambda n=name, s=sizes: measure(n, s, device, gpu, options.seconds))
        results["steps"].append(found)
        print(json.dumps(found), flush=True)
    results["profile"] = guarded("profile", lambda: profile(Sizes(**base, m=64), device))
    results["seconds"] = time.monotonic() - begin
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
