"""Draws per second of the static samplers for a [256, 64] draw, against what torch offers.

Rows: uniform_1e6 uniform_1e8 log_uniform_1e6 log_uniform_1e8 unigram_1e6 unigram_1e7, each with log_q included.
The other side is torch.randint (uniform) or torch.multinomial with replacement (log-uniform, unigram), which takes at
most 2^24 classes and returns no log-probabilities; it is given its weights ready made. Rows above that limit stand
alone.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

import torch
from _harness import Report, Row, Side, common_options, interleave, set_up, wanted, write_readme

from samplex_cuda import samplers

BATCH, M = 256, 64
MULTINOMIAL_LIMIT = 2**24
Probability = Callable[[torch.Tensor], torch.Tensor]  # ids -> fp64 probability of each


def check_draw(sampler: samplers.Sampler, classes: int, probability: Probability, calls: int) -> str:
    """Range, exact log_q, and the share of the lower half of the classes, within 5 standard errors."""
    worst, below, total = 0.0, 0, 0
    for _ in range(calls):
        draw = sampler.sample(None, M, batch_size=BATCH)
        if draw.ids.shape != (BATCH, M) or int(draw.ids.min()) < 0 or int(draw.ids.max()) >= classes:
            raise AssertionError(f"refcheck: ids must be [{BATCH}, {M}] in [0, {classes})")
        want = probability(draw.ids).log()
        worst = max(worst, float((draw.log_q.double() - want).abs().max()))
        below += int((draw.ids < classes // 2).sum())
        total += draw.ids.numel()
    if not worst <= 1e-5:
        raise AssertionError(f"refcheck: log_q is off by {worst:.1e}")
    p = _mass_below_half(classes, probability)
    z = (below / total - p) / math.sqrt(p * (1 - p) / total)
    if not abs(z) <= 5:
        raise AssertionError(
            f"refcheck: {below / total:.4f} of the draws in the lower half, wanted {p:.4f} (z = {z:.1f})"
        )
    return f"log_q vs fp64: {worst:.1e}; lower half of the classes: z = {z:+.1f}"


def _mass_below_half(classes: int, probability: Probability) -> float:
    step, total = 2**22, 0.0
    for begin in range(0, classes // 2, step):
        total += float(probability(torch.arange(begin, min(begin + step, classes // 2))).sum())
    return total


def flat(classes: int) -> Probability:
    return lambda ids: torch.full(ids.shape, 1 / classes, dtype=torch.float64)


def log_uniform(classes: int) -> Probability:
    return lambda ids: torch.log1p(1 / (ids.double() + 1)) / math.log1p(classes)


def randint(classes: int, device: torch.device) -> Side:
    return Side("torch.randint", lambda _: torch.randint(classes, (BATCH, M), device=device))


def multinomial(weights: torch.Tensor) -> Side:
    return Side("torch.multinomial", lambda _: torch.multinomial(weights, BATCH * M, replacement=True).view(BATCH, M))


def main() -> int:
    options = common_options(__doc__).parse_args()
    device = set_up(options)
    name = "static_sample" if device.type == "cpu" else f"static_sample_{device.type}"
    report = Report(name, device, store=not (options.quick or options.no_store))

    def row(
        row_id: str, what: str, sampler: samplers.Sampler, classes: int, p: Probability, other: Side | None
    ) -> None:
        sampler = sampler.to(device)
        checked = check_draw(sampler, classes, lambda ids: p(ids.cpu()).to(ids.device), calls=8)
        sides = [Side("ours", lambda _: sampler.sample(None, M, batch_size=BATCH))] + ([other] if other else [])
        got = interleave(
            sides, device=device, seconds=options.seconds / 2, min_rounds=2 if options.quick else 5, block_seconds=0.02
        )
        ours = got.times["ours"]
        report.add(
            Row(
                row_id,
                f"{what}, C = {classes:,}: draws per second",
                BATCH * M / ours.median * 1e3 / 1e6,
                "million/s",
                checked,
                ours=ours,
                other=got.times[other.name] if other else None,
                other_name=other.name if other else "",
                config={"C": classes, "B": BATCH, "m": M},
                note="" if other or classes <= MULTINOMIAL_LIMIT else "torch.multinomial takes at most 2^24 classes",
            )
        )

    for classes, tag in ((10**6, "1e6"), (10**8, "1e8")):
        if wanted(options, f"uniform_{tag}"):
            row(
                f"uniform_{tag}", "Uniform", samplers.Uniform(classes), classes, flat(classes), randint(classes, device)
            )
        if wanted(options, f"log_uniform_{tag}"):
            law, other = log_uniform(classes), None
            if classes <= MULTINOMIAL_LIMIT:
                other = multinomial(law(torch.arange(classes)).float().to(device))
            row(f"log_uniform_{tag}", "LogUniform", samplers.LogUniform(classes), classes, law, other)
    for classes, tag in ((10**6, "1e6"), (10**7, "1e7")):
        if not wanted(options, f"unigram_{tag}") or (options.quick and classes > 10**6):
            continue
        counts = (1e9 / (torch.arange(classes, dtype=torch.float64) + 10)).round().clamp_min(1)
        p_all = counts**0.75 / (counts**0.75).sum()
        sampler = samplers.Unigram(counts, power=0.75)
        row(f"unigram_{tag}", "Unigram", sampler, classes, p_all.__getitem__, multinomial(p_all.float().to(device)))

    code = report.finish(fail=not options.no_fail)
    write_readme(report, options)
    return code


if __name__ == "__main__":
    sys.exit(main())
