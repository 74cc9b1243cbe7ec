"""Counts what a step would ask of a GPU, from a run on CPU tensors under the emulated CUDA runtime."""

from __future__ import annotations

import collections
import dataclasses
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

# Inside an op: names that stand for others, and views, which launch nothing.
_WRAPPERS = {"to", "_to_copy", "contiguous", "reshape", "flatten", "clone", "result_type"}
_VIEWS = {"alias", "detach", "expand", "narrow", "permute", "select", "slice", "squeeze", "t", "transpose", "unsqueeze"}
_VIEWS |= {"view", "unbind", "chunk", "split"}
# torch's radix sort takes 8 bits of the key in one pass over it.
_SORT_PASSES = {"bool": 1, "float": 4, "int": 4, "double": 8, "long int": 8}


@dataclasses.dataclass
class StepCounts:
    """Launches by name, synchronizations by reason, and what the runtime saw."""

    launches: collections.Counter[str]
    syncs: collections.Counter[str]
    violations: list[str]
    allocations: int
    sort_passes: list[int]

    @property
    def total_launches(self) -> int:
        """A sort counts as one launch."""
        return sum(self.launches.values())


def _nested(event, free: set[str], found: list[str]) -> None:
    """Names of the aten ops that an op of ours calls, and that would launch a kernel."""
    for child in event.cpu_children:
        name = child.name.removeprefix("aten::")
        if name in _WRAPPERS:
            _nested(child, free, found)
            if name in ("_to_copy", "clone") and not child.cpu_children:
                found.append(name)
        elif child.name.startswith("aten::") and name not in _VIEWS and name not in free:
            found.append(name)
        elif not child.name.startswith("aten::"):
            _nested(child, free, found)


def _sorts(profile) -> list[int]:
    """Passes of each radix sort, by the type of its keys."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return [_SORT_PASSES[event["args"]["Input type"][0]] for event in events if event.get("name") == "aten::sort"]


def count_step(ptxshim, step: Callable[[], None]) -> StepCounts:
    """Counts of `step`, which is run four times: once to warm up, and once for each way of counting."""
    import opcount

    step()
    before = ptxshim.counters()
    with opcount.count_ops("cpu", ptxshim) as ops:
        step()
    runtime = ptxshim.diff(before, ptxshim.counters())
    with torch.profiler.profile(record_shapes=True) as profile:
        step()
    nested: list[str] = []
    for event in profile.events():
        if event.name.startswith("samplex::"):
            _nested(event, opcount.FREE, nested)
    launches = collections.Counter({f"kernel {k}": v["launches"] for k, v in runtime.get("kernels", {}).items()})
    launches.update({f"aten {name}": count for name, count in ops.launches.items()})
    launches.update(f"aten {name} inside an op" for name in nested)
    launches.update({f"copy {name}": count for name, count in ops.copies.items() if name.startswith("d2d")})
    syncs = collections.Counter(ops.syncs)
    syncs.update(name for name in nested if name in opcount.SYNC)
    syncs.update({f"runtime {name}": count for name, count in runtime.get("sync", {}).items()})
    with ptxshim.capture() as capture:
        step()
    return StepCounts(
        launches,
        syncs,
        [f"{found['kind']}: {found['api']} {found['detail']}" for found in capture.violations],
        runtime.get("cuda_mallocs", 0) + runtime.get("host_allocs", 0) + runtime.get("async_mallocs", 0),
        _sorts(profile),
    )
