"""The row reduction (weighted rows summed by class id) against torch's two ways to do it.

  coalesce    the [N, d] products as values of a sparse COO tensor, then .coalesce()
  index_add   the products added into a dense [C, d] gradient that is zeroed first, as a dense backward must

Rows: small (256 rows of 65 entries) and large (1024 rows of 129 entries), C = 100,000 and 1,000,000, d = 128.
Both of torch's ways start from (ids, coefficients, source rows) too, so both must form the [N, d] products.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from _harness import Report, Row, Side, check_close, common_options, interleave, set_up, wanted, write_readme

import samplex_cuda  # noqa: F401  (registers torch.ops.samplex)

DIM, SETS = 128, 8


@dataclasses.dataclass(frozen=True)
class Entries:
    """Targets (A) and draws (B) of a batch: ids and coefficients [B, 1] and [B, m]; the rows of both are h [B, d]."""

    ids_a: torch.Tensor
    coef_a: torch.Tensor
    ids_b: torch.Tensor
    coef_b: torch.Tensor
    h: torch.Tensor
    classes: int


def make_entries(classes: int, batch: int, m: int, device: torch.device) -> list[Entries]:
    return [
        Entries(
            ids_a=torch.randint(classes, (batch, 1), device=device),
            coef_a=torch.randn(batch, 1, device=device),
            ids_b=torch.randint(classes, (batch, m), device=device),
            coef_b=torch.randn(batch, m, device=device),
            h=torch.randn(batch, DIM, device=device),
            classes=classes,
        )
        for _ in range(SETS)
    ]


def ours(e: Entries) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.ops.samplex.row_reduce(e.ids_a, e.coef_a, e.h, e.ids_b, e.coef_b, e.h, e.classes, True)


def products(e: Entries) -> tuple[torch.Tensor, torch.Tensor]:
    ids, coef = torch.cat([e.ids_a, e.ids_b], 1), torch.cat([e.coef_a, e.coef_b], 1)  # [B, 1 + m]
    return ids.view(-1), (coef.unsqueeze(2) * e.h.unsqueeze(1)).view(-1, DIM)


def coalesce(e: Entries) -> torch.Tensor:
    ids, values = products(e)
    return torch.sparse_coo_tensor(ids[None], values, (e.classes, DIM), check_invariants=False).coalesce()


def index_add(dense: torch.Tensor, e: Entries) -> torch.Tensor:
    ids, values = products(e)
    return dense.zero_().index_add_(0, ids, values)


def rotating(step: Callable[[Entries], Any], sets: list[Entries], i: int) -> Any:
    return step(sets[i % len(sets)])


def refcheck(e: Entries) -> str:
    """Against an fp64 index_add over the touched rows: ids, count, row gradients, sums of coefficients."""
    row_ids, row_grads, row_bias, count = ours(e)
    n = int(count)
    ids, values = products(dataclasses.replace(e, h=e.h.double(), coef_a=e.coef_a.double(), coef_b=e.coef_b.double()))
    touched, at = torch.unique(ids, return_inverse=True)
    if n != touched.numel() or not torch.equal(row_ids[:n], touched):
        raise AssertionError("refcheck row_reduce: other rows than the entries touch")
    want = torch.zeros(n, DIM, dtype=torch.float64, device=ids.device).index_add_(0, at, values)
    coef = torch.cat([e.coef_a, e.coef_b], 1).double().view(-1)
    want_bias = torch.zeros(n, dtype=torch.float64, device=ids.device).index_add_(0, at, coef)
    worst = check_close("row_grads", row_grads[:n], want, 1e-5)
    worst = max(worst, check_close("row_bias", row_bias[:n], want_bias, 1e-5))
    check_close("coalesce", coalesce(e).values(), want, 1e-5)
    return f"row ids equal; row gradients and bias sums vs fp64: {worst:.1e}"


def main() -> int:
    options = common_options(__doc__).parse_args()
    device = set_up(options)
    name = "row_reduce" if device.type == "cpu" else f"row_reduce_{device.type}"
    report = Report(name, device, store=not (options.quick or options.no_store))
    for size, batch, m in (("small", 256, 64), ("large", 1024, 128)):
        for classes, tag in ((100_000, "100k"), (1_000_000, "1m")):
            row_ids = {kind: f"{size}_{tag}_{kind}" for kind in ("coalesce", "index_add")}
            if not any(wanted(options, r) for r in row_ids.values()):
                continue
            sets = make_entries(classes, batch, m, device)
            checked = refcheck(sets[0])
            dense = torch.zeros(classes, DIM, device=device)
            sides = [
                Side("ours", functools.partial(rotating, ours, sets)),
                Side("coalesce", functools.partial(rotating, coalesce, sets)),
                Side("index_add", functools.partial(rotating, functools.partial(index_add, dense), sets)),
            ]
            got = interleave(sides, device=device, seconds=options.seconds, min_rounds=2 if options.quick else 5)
            for kind, row_id in row_ids.items():
                value, low, high = got.ratio(kind, "ours")
                report.add(
                    Row(
                        row_id,
                        f"{batch * (m + 1):,} entries, C = {classes:,}, vs {kind}",
                        value,
                        "x",
                        checked,
                        ours=got.times["ours"],
                        other=got.times[kind],
                        other_name=f"torch {kind}",
                        spread=(low, high),
                        config={"C": classes, "d": DIM, "B": batch, "m": m},
                    )
                )
    code = report.finish(fail=not options.no_fail)
    write_readme(report, options)
    return code


if __name__ == "__main__":
    sys.exit(main())
