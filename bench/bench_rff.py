"""Feature maps against eager torch: mm, then cos, sin, cat and the scale (or exp), forward and forward + backward.

Rows: B x d -> D frequencies. A batch of queries (256), a large batch (4096), and a chunk of a tree's rebuild (16,384
rows), d = 128, D = 1024; a small one (10 x 64, D = 1000); positive features and the packed square beside them. Torch's
side is what a person would write. In the row "rebuild_out" torch has buffers that were made once: product, cos and sin
are written in place, and no memory is asked from the system.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from _harness import Report, Row, Side, check_close, common_options, interleave, set_up, wanted, write_readme

import samplex_cuda as sx
from samplex_cuda.reference.rff import rff as reference

NU, ALPHA, SETS = 4.0, 100.0, 4


@dataclasses.dataclass(frozen=True)
class Case:
    id: str
    kind: str
    batch: int
    dim: int
    num_features: int
    train: bool = False
    target: float | None = None
    reuse: bool = False  # torch writes into buffers made once


CASES = [
    Case("small", "rff", 10, 64, 1000),
    Case("batch", "rff", 256, 128, 1024),
    Case("large", "rff", 4096, 128, 1024),
    Case("rebuild", "rff", 16_384, 128, 1024, target=1.5),
    Case("rebuild_out", "rff", 16_384, 128, 1024, target=1.5, reuse=True),
    Case("batch_train", "rff", 256, 128, 1024, train=True),
    Case("large_train", "rff", 4096, 128, 1024, train=True),
    Case("positive", "positive", 4096, 128, 1024),
    Case("positive_train", "positive", 4096, 128, 1024, train=True),
    Case("quadratic", "quadratic", 4096, 64, 0),
    Case("quadratic_train", "quadratic", 4096, 64, 0, train=True),
]


def cat_features(x: torch.Tensor, omega: torch.Tensor) -> torch.Tensor:
    dots = x @ omega.T
    return torch.cat([dots.cos(), dots.sin()], 1).mul_(omega.shape[0] ** -0.5)


def reusing_features(case: Case, omega: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    size, scale = case.num_features, case.num_features**-0.5
    dots, both = omega.new_empty(case.batch, size), omega.new_empty(case.batch, 2 * size)

    def run(x: torch.Tensor) -> torch.Tensor:
        torch.mm(x, omega.T, out=dots)
        torch.cos(dots, out=both[:, :size])
        torch.sin(dots, out=both[:, size:])
        return both.mul_(scale)

    return run


def exp_features(x: torch.Tensor, omega: torch.Tensor) -> torch.Tensor:
    return (x @ omega.T - 0.5 * NU * x.square().sum(1, keepdim=True)).exp() * omega.shape[0] ** -0.5


def square_features(first: torch.Tensor, second: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    pairs = (2 * ALPHA) ** 0.5 * x[:, first] * x[:, second]
    return torch.cat([ALPHA**0.5 * x * x, pairs, torch.ones_like(x[:, :1])], 1)


def torch_map(case: Case, omega: torch.Tensor | None, device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
    if omega is None:
        first, second = torch.triu_indices(case.dim, case.dim, offset=1, device=device)
        return functools.partial(square_features, first, second)
    if case.reuse:
        return reusing_features(case, omega)
    one = cat_features if case.kind == "rff" else exp_features
    return lambda x: one(x, omega)


def step(phi: Callable[[torch.Tensor], torch.Tensor], xs: list[torch.Tensor], grad: torch.Tensor | None, i: int) -> Any:
    x = xs[i % len(xs)]
    if grad is None:
        with torch.no_grad():
            return phi(x)
    leaf = x.detach().requires_grad_()
    phi(leaf).backward(grad)
    return leaf.grad


def refcheck(case: Case, ours: Any, other: Any, x: torch.Tensor, omega: torch.Tensor | None, grad: Any) -> str:
    """Features (and the gradient of x) of both sides against fp64 on the first rows."""
    n = min(64, case.batch)
    leaf = x[:n].double().requires_grad_()
    want = reference(leaf, None if omega is None else omega.double(), case.kind, nu=NU, alpha=ALPHA)
    with torch.no_grad():
        worst = check_close("features", ours(x)[:n], want.detach(), 1e-4)
        check_close("torch", other(x)[:n], want.detach(), 1e-4)
    said = f"features vs fp64: {worst:.1e}"
    if grad is not None:
        want.backward(grad[:n].double())
        said += f", d_x: {check_close('d_x', step(ours, [x], grad, 0)[:n], leaf.grad, 1e-4):.1e}"
        check_close("torch d_x", step(other, [x], grad, 0)[:n], leaf.grad, 1e-4)
    return said


def measure(case: Case, options: Any, device: torch.device) -> Row:
    xs = [torch.randn(case.batch, case.dim, device=device) * case.dim**-0.5 for _ in range(SETS)]
    omega = None
    if case.kind != "quadratic":
        omega = sx.rff.frequencies(case.dim, case.num_features, nu=NU, kind=case.kind, key=sx.Key(0), device=device)
    width = sx.rff.num_numbers(case.kind, case.dim, case.num_features)
    grad = torch.randn(case.batch, width, device=device) if case.train else None

    def ours(x: torch.Tensor) -> torch.Tensor:
        return sx.rff.features(x, omega, kind=case.kind, nu=NU, alpha=ALPHA)

    other = torch_map(case, omega, device)
    checked = refcheck(case, ours, other, xs[0], omega, grad)
    sides = [
        Side("ours", functools.partial(step, ours, xs, grad)),
        Side("torch", functools.partial(step, other, xs, grad)),
    ]
    got = interleave(sides, device=device, seconds=options.seconds, min_rounds=2 if options.quick else 5, sets=SETS)
    value, low, high = got.ratio("torch", "ours")
    size = f"d = {case.dim}" + ("" if omega is None else f", D = {case.num_features}")
    return Row(
        case.id,
        f"{case.kind}, {case.batch:,} rows, {size}, {'forward + backward' if case.train else 'forward'}"
        + (", torch with its buffers" if case.reuse else ""),
        value,
        "x",
        checked,
        target=case.target if device.type == "cpu" else None,
        ours=got.times["ours"],
        other=got.times["torch"],
        other_name="torch",
        spread=(low, high),
        config={"kind": case.kind, "B": case.batch, "d": case.dim, "D": case.num_features, "train": case.train},
    )


def main() -> int:
    options = common_options(__doc__).parse_args()
    device = set_up(options)
    name = "rff" if device.type == "cpu" else f"rff_{device.type}"
    report = Report(name, device, store=not (options.quick or options.no_store))
    for case in CASES:
        if wanted(options, case.id):
            report.add(measure(case, options, device))
    code = report.finish(fail=not options.no_fail)
    write_readme(report, options)
    return code


if __name__ == "__main__":
    sys.exit(main())
