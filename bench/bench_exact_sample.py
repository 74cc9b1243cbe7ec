"""Time of exact draws from the softmax, [B, 64] with one class excluded in each row, d = 128.

Rows: softmax_1e4 softmax_1e5. The other side makes all logits [B, C], masks the excluded class, and draws by
`torch.multinomial` from their softmax; log q is gathered from log_softmax.
"""

from __future__ import annotations

import sys
from functools import partial

import torch
from _harness import Report, Row, Side, common_options, interleave, set_up, wanted, write_readme

import samplex_cuda as sx

BATCH, M, DIM = 256, 64, 128


def ours(sampler: sx.samplers.Softmax, h: torch.Tensor, exclude: torch.Tensor, number: int) -> torch.Tensor:
    return sampler.sample(h, M, key=sx.Key(1, number), exclude=exclude).log_q


def dense(weight: torch.Tensor, h: torch.Tensor, exclude: torch.Tensor, _: int) -> torch.Tensor:
    s = (h @ weight.T).scatter_(1, exclude[:, None], -torch.inf)
    return s.log_softmax(1).gather(1, torch.multinomial(s.softmax(1), M, replacement=True))


def check_draw(sampler: sx.samplers.Softmax, weight: torch.Tensor, h: torch.Tensor, exclude: torch.Tensor) -> str:
    """log q against log_softmax, the excluded class absent, and the mean log q within 5 standard errors of -entropy."""
    draw = sampler.sample(h, M, key=sx.Key(3), exclude=exclude)
    log_p = (h @ weight.T).scatter_(1, exclude[:, None], -torch.inf).log_softmax(1)
    error = float((draw.log_q - log_p.gather(1, draw.ids)).abs().max())
    if not error <= 1e-4 or bool((draw.ids == exclude[:, None]).any()):
        raise AssertionError(f"refcheck: log q is off by {error:.2g}, or an excluded id was drawn")
    p = log_p.double().exp()
    mean = torch.where(p > 0, p * log_p, 0.0).sum(1)
    var = torch.where(p > 0, p * log_p.double() ** 2, 0.0).sum(1) - mean**2
    z = float((draw.log_q.double().mean(1) - mean).sum() / (var / M).sum().sqrt())
    if not abs(z) <= 5:
        raise AssertionError(f"refcheck: the mean of log q is off by {z:.1f} standard errors")
    return f"log q within {error:.1e}; mean log q: z = {z:+.1f}"


def main() -> int:
    options = common_options(__doc__).parse_args()
    device = set_up(options)
    name = "exact_sample" if device.type == "cpu" else f"exact_sample_{device.type}"
    report = Report(name, device, store=not (options.quick or options.no_store))
    for classes, tag in ((10**4, "1e4"), (10**5, "1e5")):
        if not wanted(options, f"softmax_{tag}"):
            continue
        weight, h = torch.randn(classes, DIM, device=device) * 0.3, torch.randn(BATCH, DIM, device=device)
        exclude = torch.randint(classes, (BATCH,), device=device)
        sampler = sx.samplers.Softmax(weight, copy=False)
        checked = check_draw(sampler, weight, h, exclude)
        other = "[B, C], torch.multinomial"
        sides = [Side("ours", partial(ours, sampler, h, exclude)), Side(other, partial(dense, weight, h, exclude))]
        got = interleave(sides, device=device, seconds=options.seconds, min_rounds=2 if options.quick else 5)
        report.add(
            Row(
                f"softmax_{tag}",
                f"exact softmax draws, C = {classes:,}: time of torch.multinomial over [B, C] / our time",
                got.times[other].median / got.times["ours"].median,
                "x",
                checked,
                ours=got.times["ours"],
                other=got.times[other],
                other_name=other,
                config={"C": classes, "B": BATCH, "m": M, "d": DIM},
            )
        )
    code = report.finish(fail=not options.no_fail)
    write_readme(report, options)
    return code


if __name__ == "__main__":
    sys.exit(main())
