"""Draws from an inverted multi-index, and a whole training step with it. C = 1,000,000, d = 64, B = 256, m = 64.

Rows (--only takes any part of a name); all are times of `MIDX` / times of another sampler of ours, both products and
the exclusion of the targets included:
  draw_256     [256, 64] draws with K = 256 codes, against `Tree` (k = 16)
  draw_1024    the same with K = 1,024
  shared_256   1,024 shared draws with K = 256, against `Tree`
  step_256     draw, loss, gradient and fused Adagrad update with K = 256, against `LogUniform` draws per row. What it
               takes to follow the table (all classes are re-assigned; every fourth time there are new codes) is spread
               over the steps in between (`MIDX.follow_interval`)
  step_1024    the same with K = 1,024
"""

from __future__ import annotations

import functools
import sys
import time
from typing import Any

import torch
from _harness import Report, Row, Side, check_close, common_options, interleave, set_up, wanted, write_readme

import samplex_cuda as sx

CLASSES, DIM, BATCH, M, SHARED, SETS, NODE = 1_000_000, 64, 256, 64, 1024, 8, 16
Inputs = list[tuple[torch.Tensor, torch.Tensor]]


def make_tree(device: torch.device, classes: int) -> sx.samplers.Tree:
    """Weights and bias about as large as those of a fitted tree."""
    g = torch.Generator().manual_seed(1)
    leaves = 1 << (classes - 1).bit_length()
    leaf_class = torch.full((leaves,), -1)
    leaf_class[torch.randperm(leaves, generator=g)[:classes].sort().values] = torch.randperm(classes, generator=g)
    weights, bias = torch.randn(leaves, NODE, generator=g) * 0.5, torch.randn(leaves, generator=g) * 0.3
    projection = torch.randn(DIM, NODE, generator=g) * DIM**-0.5
    return sx.samplers.Tree(weights, bias, leaf_class, mean=torch.zeros(DIM), projection=projection).to(device)


def refcheck(sampler: sx.samplers.MIDX, h: torch.Tensor, y: torch.Tensor) -> str:
    """log_q of some rows' draws against fp64 over all classes."""
    some = h[:4].detach()
    draw = sampler.sample(some, M, exclude=y[:4])
    s = sampler.scale * some.double() @ sampler.codes.double().reshape(-1, DIM).T
    cell, codes = sampler.cell.long(), sampler.num_codes
    log_w = s[:, :codes][:, cell // codes] + s[:, codes:][:, cell % codes]
    q = (1 - sampler.epsilon) * log_w.softmax(1) + sampler.epsilon / sampler.num_classes
    q = q.scatter(1, y[:4, None], 0.0)
    want = (q / q.sum(1, keepdim=True)).log().gather(1, draw.ids)
    return f"log_q vs fp64 over all classes: {check_close('log_q', draw.log_q, want, 2e-5):.1e}"


def make_head(sampler: sx.samplers.Sampler, weight: torch.Tensor) -> sx.SampledClassifier:
    with torch.device("meta"):
        # Touched rows are recorded, as in training; the sampler follows outside of the timed steps.
        policy = 1 << 40 if isinstance(sampler, sx.samplers.MIDX) else None
        head = sx.SampledClassifier(DIM, weight.shape[0], sampler, M, bias=False, sampler_update=policy)
    head.weight = torch.nn.Parameter(weight.clone())
    head.follower.look(head.weight, None)
    head.follower.reset()
    head.fuse_optimizer(sx.optim.RowAdagrad(head.parameters(), lr=0.05))
    return head


def step(head: sx.SampledClassifier, inputs: Inputs, i: int) -> None:
    h, y = inputs[i % SETS]
    h.grad = None
    head(h, y).backward()


def follow_ms(sampler: sx.samplers.MIDX, weight: torch.Tensor) -> float:
    """A `follow` of all classes: the mean of four in a row, one of which makes new codes."""
    ids = torch.arange(weight.shape[0], device=weight.device)
    while (before := sampler._age) < ids.numel():  # at the same place of the round whatever came before
        sampler.follow(ids, weight)
        if sampler._age < before:
            break
    begin, made = time.perf_counter(), 0
    for _ in range(4):
        before = sampler._age
        sampler.follow(ids, weight)
        made += sampler._age < before
    if weight.is_cuda:
        torch.cuda.synchronize()
    assert made == 1, made
    return (time.perf_counter() - begin) * 1e3 / 4


def main() -> int:
    options = common_options(__doc__).parse_args()
    device = set_up(options)
    on_cpu = device.type == "cpu"
    name = "midx_sample" if on_cpu else f"midx_sample_{device.type}"
    report = Report(name, device, store=not (options.quick or options.no_store))
    timed = functools.partial(interleave, device=device, seconds=options.seconds, min_rounds=2 if options.quick else 5)
    classes = 20_000 if options.quick else CLASSES
    weight = torch.randn(classes, DIM, device=device) * DIM**-0.5
    inputs = [
        (torch.randn(BATCH, DIM, device=device).requires_grad_(), torch.randint(classes, (BATCH,), device=device))
        for _ in range(SETS)
    ]

    def add(row_id: str, what: str, sides: list[Side], checked: str, more: float = 0.0, **about: Any) -> None:
        got = timed(sides)
        ours, other = (got.times[side.name] for side in sides)
        value, low, high = got.ratio(*(side.name for side in sides))
        extra = more / other.median
        if not on_cpu:
            about.pop("target", None)
        report.add(
            Row(
                row_id,
                what,
                value + extra,
                "ratio",
                checked,
                sense="<=",
                ours=ours,
                other=other,
                other_name=sides[1].name,
                spread=(low + extra, high + extra),
                **about,
            )
        )

    config = {"C": classes, "d": DIM, "B": BATCH, "m": M}
    rows = ("draw_256", "draw_1024", "shared_256", "step_256", "step_1024")
    for codes in (256, 1024):
        if not any(wanted(options, row) for row in rows if row.endswith(f"_{codes}")) or (
            options.quick and codes > 256
        ):
            continue
        sampler = sx.samplers.MIDX(weight, codes, key=sx.Key(0))
        checked = refcheck(sampler, *inputs[0])
        tree = make_tree(device, classes)

        def draw(i: int, source: Any) -> Any:
            h, y = inputs[i % SETS]
            return source.sample(h, M, exclude=y)

        def shared(i: int, source: Any) -> Any:
            return source.sample(inputs[i % SETS][0], SHARED, shared=True)

        about: dict[str, Any] = {"config": {**config, "K": codes}}
        if wanted(options, f"draw_{codes}"):
            sides = [
                Side("MIDX", functools.partial(draw, source=sampler)),
                Side("Tree", functools.partial(draw, source=tree)),
            ]
            what = f"draws [{BATCH}, {M}], MIDX with K = {codes} / Tree, C = {classes:,}"
            add(f"draw_{codes}", what, sides, checked, **about, **({"target": 2.0} if codes == 256 else {}))
        if codes == 256 and wanted(options, "shared_256"):
            sides = [
                Side("MIDX", functools.partial(shared, source=sampler)),
                Side("Tree", functools.partial(shared, source=tree)),
            ]
            what = f"shared draws [{SHARED}] of {BATCH} rows, MIDX with K = {codes} / Tree, C = {classes:,}"
            add("shared_256", what, sides, checked, **about)
        if wanted(options, f"step_{codes}"):
            spent, every = follow_ms(sampler, weight), sampler.follow_interval(BATCH, M, False)
            heads = [make_head(sampler, weight), make_head(sx.samplers.LogUniform(classes), weight)]
            sides = [
                Side(label, lambda i, head=head: step(head, inputs, i))
                for label, head in zip(("MIDX", "LogUniform"), heads, strict=True)
            ]
            note = (
                f"to follow all classes takes {spent:,.0f} ms, every {every:,} steps: {spent / every:.2f} ms per step"
            )
            what = f"step, draws [{BATCH}, {M}], MIDX with K = {codes} / LogUniform, C = {classes:,}"
            about |= {"target": 2.5} if codes == 256 else {}
            add(f"step_{codes}", what, sides, checked, more=spent / every, note=note, **about)
    code = report.finish(fail=not options.no_fail)
    write_readme(report, options)
    return code


if __name__ == "__main__":
    sys.exit(main())
