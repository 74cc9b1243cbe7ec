"""Draws per second of k-subsets without replacement, [256, 64] with one class excluded in each row.

Rows: subset_1e5 subset_1e8. The other side is `torch.multinomial(..., replacement=False)` over equal weights, in which
the excluded class has weight 0; it is O(n) a row and takes at most 2^24 classes.
"""

from __future__ import annotations

import sys
from functools import partial

import torch
from _harness import Report, Row, Side, common_options, interleave, set_up, wanted, write_readme

from samplex_cuda.ops.subset_sample import subset_sample

BATCH, K = 256, 64
MULTINOMIAL_LIMIT = 2**24


def check_draw(classes: int, exclude: torch.Tensor) -> str:
    """Range, distinct ids, the excluded one absent, and the mean of the ids within 5 standard errors."""
    key = torch.tensor([1, 2], device=exclude.device)
    total, count = 0.0, 0
    for offset in range(8):
        key[1] = offset
        ids = subset_sample(key, BATCH, K, classes, exclude)
        ordered = ids.sort(1).values
        if int(ids.min()) < 0 or int(ids.max()) >= classes or bool((ordered[:, 1:] == ordered[:, :-1]).any()):
            raise AssertionError("refcheck: ids must be distinct and in range")
        if bool((ids == exclude[:, None]).any()):
            raise AssertionError("refcheck: an excluded id was drawn")
        total, count = total + float(ids.double().sum()), count + ids.numel()
    z = (total / count / classes - 0.5) * (12 * count) ** 0.5
    if not abs(z) <= 5:
        raise AssertionError(f"refcheck: mean of the ids is off by {z:.1f} standard errors")
    return f"distinct, excluded ids absent; mean id: z = {z:+.1f}"


def draw(classes: int, exclude: torch.Tensor, key: torch.Tensor, _: int) -> torch.Tensor:
    return subset_sample(key, BATCH, K, classes, exclude)


def multinomial(weights: torch.Tensor, _: int) -> torch.Tensor:
    return torch.multinomial(weights, K)


def main() -> int:
    options = common_options(__doc__).parse_args()
    device = set_up(options)
    name = "subset_sample" if device.type == "cpu" else f"subset_sample_{device.type}"
    report = Report(name, device, store=not (options.quick or options.no_store))
    for classes, tag in ((10**5, "1e5"), (10**8, "1e8")):
        if not wanted(options, f"subset_{tag}"):
            continue
        exclude = torch.randint(classes, (BATCH,), device=device)
        sides = [Side("ours", partial(draw, classes, exclude, torch.tensor([1, 2], device=device)))]
        other = None
        if classes <= MULTINOMIAL_LIMIT:
            other = "torch.multinomial"
            weights = torch.ones(BATCH, classes, device=device).scatter_(1, exclude[:, None], 0.0)
            sides.append(Side(other, partial(multinomial, weights)))
        checked = check_draw(classes, exclude)
        got = interleave(
            sides, device=device, seconds=options.seconds / 2, min_rounds=2 if options.quick else 5, block_seconds=0.02
        )
        ours = got.times["ours"]
        report.add(
            Row(
                f"subset_{tag}",
                f"subsets of 64, n = {classes:,}: draws per second",
                BATCH * K / ours.median * 1e3 / 1e6,
                "million/s",
                checked,
                ours=ours,
                other=got.times[other] if other else None,
                other_name=other or "",
                config={"n": classes, "B": BATCH, "k": K},
                note="" if other else "torch.multinomial takes at most 2^24 classes",
            )
        )
    code = report.finish(fail=not options.no_fail)
    write_readme(report, options)
    return code


if __name__ == "__main__":
    sys.exit(main())
