"""Every generator, the check that no op is without one, and planted faults for the tests of the harness."""

from __future__ import annotations

import ctypes
import fnmatch
import os
from typing import Any

import torch

import samplex_cuda as sx
from samplex_cuda import _native
from samplex_fuzz import (  # noqa: F401
    more,
    negatives,
    ops_entry,
    ops_exact,
    ops_loss,
    ops_midx,
    ops_rows,
    ops_static,
    ops_tree,
    public,
)  # fmt: skip
from samplex_fuzz.call import GENERATORS, WEIGHTS, Args, Call, Dice
from samplex_fuzz.oracle import expect


def registered_ops() -> set[str]:
    """The ops of torch.ops.samplex."""
    prefix = "samplex::"
    return {s.name.removeprefix(prefix) for s in torch._C._jit_get_all_schemas() if s.name.startswith(prefix)}


def missing() -> list[str]:
    """Ops without a generator."""
    return sorted(registered_ops() - set(GENERATORS))


# Not called by the fuzzer: types, classes to derive from, and what needs a whole run or a file.
_NOT_CALLED = {
    "losses": {
        "ExampleState",
        "Loss",
        "Needs",
        "ScoreLoss",
        "NCE",
        "OneVsEach",
        "by_name",
        "from_name",
        "names",
        "resolve",
    },
    "metrics": {"Evaluator", "evaluate"},
    "optim": {"Combined", "RowGradient", "RowOptimizer", "split_parameters"},
    "rff": {"KINDS"},
    "samplers": {"Exclude", "ExactSampler", "KernelSampler", "Sampler", "StaticSampler"},
}


def missing_public() -> list[str]:
    """Public functions and classes of the core without a generator."""
    found = []
    for module in ("functional", "losses", "metrics", "optim", "rff", "samplers", "tables"):
        for name in getattr(sx, module).__all__:
            full = f"{module}.{name}"
            made = any(key == full or key.startswith(f"{full}.") for key in GENERATORS)
            if not made and name not in _NOT_CALLED.get(module, set()):
                found.append(full)
    return sorted(found)


def select(patterns: list[str] | None) -> list[str]:
    """The generators whose name fits one of the patterns."""
    names = list(GENERATORS)
    return names if not patterns else [n for n in names if any(fnmatch.fnmatch(n, p) for p in patterns)]


def choose_kernels(level: str | None) -> None:
    """Which SIMD level the kernels use; None: the best there is."""
    if level is not None:
        _native.set_simd_level(level)


def plant(fault: str | None) -> None:
    """Adds a function with a fault that the harness must notice."""
    if fault is None:
        return

    def run(a: Args) -> Any:
        if a.number != 7:
            return a.x.sum()
        if fault == "crash":
            return ctypes.string_at(a.x.data_ptr() + a.x.numel() * a.x.element_size(), 1)
        if fault == "hang":
            while True:
                pass
        if fault == "bare":
            raise ValueError("bad argument")
        if fault == "noise":
            os.write(2, b"frame #0: somewhere")
            return a.x.sum()
        if fault == "writes":
            a.x.add_(1.0)
            raise ValueError("planted: x must be something else, got this")
        return a.x.sum() + 1

    def check(a: Args, out: Any, after: Args, changed: set[str]) -> None:
        expect(abs(float(out) - float(a.x.sum())) < 1e-3, f"sum must be {float(a.x.sum())}, got {float(out)}")

    def make(d: Dice) -> Call:
        return Call(Args(x=d.normal(5, 3), number=d.int(1, 9)), run, check, fixed=frozenset({"x", "number"}))

    GENERATORS["planted"], WEIGHTS["planted"] = make, 1.0
