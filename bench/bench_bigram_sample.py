"""Draws per second of Bigram for a [256, 64] draw, against the same distribution by searchsorted in eager torch.

Rows: bigram_50k (C = 50,000 classes, 2 million pairs, as a language model's vocabulary) and bigram_1m (C = 1,000,000,
10 million pairs), each with log_q. The eager side inverts cumulative sums: one searchsorted over all pairs, one
over the classes, one to look a class of the unigram part up among the pairs.
"""

from __future__ import annotations

import sys

import torch
from _harness import Report, Row, Side, common_options, interleave, set_up, wanted, write_readme

from samplex_cuda import samplers

BATCH, M, SETS, BACKOFF = 256, 64, 8, 0.1


def make_counts(classes: int, pairs: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """CSR of counts, ids ascending: frequent contexts have more pairs, frequent classes follow more often."""
    g = torch.Generator().manual_seed(0)
    context = (classes ** torch.rand(pairs, generator=g, dtype=torch.float64)).long() - 1
    follower = (classes ** torch.rand(pairs, generator=g, dtype=torch.float64)).long() - 1
    keys, counts = (context * classes + follower).unique(return_counts=True)
    offsets = torch.searchsorted(keys, torch.arange(classes + 1) * classes)
    unigram = torch.bincount(keys % classes, weights=counts.double(), minlength=classes) + 1
    return offsets, keys % classes, counts, unigram


class Eager:
    """What a careful person would write: ids [B, m] and log_q [B, m]."""

    def __init__(self, offsets: torch.Tensor, ids: torch.Tensor, counts: torch.Tensor, unigram: torch.Tensor) -> None:
        self.classes = unigram.shape[0]
        self.offsets, self.ids = offsets, ids
        self.sums = torch.cat([torch.zeros(1, dtype=torch.float64), counts.double().cumsum(0)])
        self.counts, self.unigram = counts.double(), unigram
        self.alone = unigram.cumsum(0)
        self.keys = torch.repeat_interleave(torch.arange(self.classes), offsets.diff()) * self.classes + ids

    def __call__(self, context: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        begin, end = self.sums[self.offsets[context]], self.sums[self.offsets[context + 1]]
        total = (end - begin)[:, None]
        share = torch.where(total > 0, BACKOFF, 1.0)
        u = torch.rand(3, context.shape[0], M, dtype=torch.float64)
        pair = torch.searchsorted(self.sums, begin[:, None] + u[0] * total, right=True) - 1
        single = torch.searchsorted(self.alone, u[1] * self.alone[-1], right=True)
        ids = torch.where(u[2] < share, single, self.ids[pair.clamp(max=self.ids.shape[0] - 1)])
        asked = context[:, None] * self.classes + ids
        at = torch.searchsorted(self.keys, asked).clamp_(max=self.keys.shape[0] - 1)
        after = torch.where(self.keys[at] == asked, self.counts[at] / total, 0.0)
        return ids, ((1 - share) * after + share * self.unigram[ids] / self.alone[-1]).log().float()


def check(sampler: samplers.Bigram, eager: Eager, context: torch.Tensor) -> str:
    """log_q against fp64, and the share of draws below each context's median class, within 5 standard errors."""
    draw = sampler.sample(None, 64 * M, context=context)
    asked = context[:, None] * eager.classes + draw.ids
    at = torch.searchsorted(eager.keys, asked).clamp_(max=eager.keys.shape[0] - 1)
    total = (eager.sums[eager.offsets[context + 1]] - eager.sums[eager.offsets[context]])[:, None]
    after = torch.where(eager.keys[at] == asked, eager.counts[at] / total, 0.0)
    share = torch.where(total > 0, BACKOFF, 1.0)
    want = ((1 - share) * after + share * eager.unigram[draw.ids] / eager.alone[-1]).log()
    worst = float((draw.log_q.double() - want).abs().max())
    if not worst <= 1e-5:
        raise AssertionError(f"refcheck: log_q is off by {worst:.1e}")
    p = sampler.log_prob_all(context=context[:8]).double().exp()
    half = eager.classes // 100
    mass, seen = p[:, :half].sum(1), (draw.ids[:8] < half).double().mean(1)
    z = ((seen - mass) / (mass * (1 - mass) / draw.ids.shape[1]).sqrt()).abs().max()
    if not z <= 5:
        raise AssertionError(f"refcheck: the mass of the first classes is off by {float(z):.1f} standard errors")
    return f"log_q vs fp64: {worst:.1e}; mass of the first classes: |z| <= {float(z):.1f}"


def main() -> int:
    options = common_options(__doc__).parse_args()
    device = set_up(options)
    name = "bigram_sample" if device.type == "cpu" else f"bigram_sample_{device.type}"
    report = Report(name, device, store=not (options.quick or options.no_store))
    for row_id, classes, pairs in (("bigram_50k", 50_000, 2_000_000), ("bigram_1m", 1_000_000, 10_000_000)):
        if not wanted(options, row_id) or (options.quick and classes > 10**5):
            continue
        counts = make_counts(classes, pairs)
        sampler, eager = samplers.Bigram(*counts, backoff=BACKOFF), Eager(*counts)
        g = torch.Generator().manual_seed(1)
        log_uniform = torch.rand(SETS, BATCH, generator=g, dtype=torch.float64)
        contexts = (classes**log_uniform).long() - 1
        checked = check(sampler, eager, contexts[0])
        sampler = sampler.to(device)
        moved = contexts.to(device)
        sides = [
            Side("ours", lambda i, s=sampler, c=moved: s.sample(None, M, context=c[i % SETS])),
            Side("eager", lambda i, e=eager, c=contexts: e(c[i % SETS])),
        ]
        got = interleave(
            sides, device=device, seconds=options.seconds / 2, min_rounds=2 if options.quick else 5, block_seconds=0.02
        )
        value, low, high = got.ratio("eager", "ours")
        report.add(
            Row(
                row_id,
                f"Bigram, C = {classes:,}, {counts[1].shape[0]:,} pairs: eager time / our time",
                value,
                "x",
                checked,
                ours=got.times["ours"],
                other=got.times["eager"],
                other_name="eager",
                spread=(low, high),
                config={"C": classes, "pairs": counts[1].shape[0], "B": BATCH, "m": M},
            )
        )
    code = report.finish(fail=not options.no_fail)
    write_readme(report, options)
    return code


if __name__ == "__main__":
    sys.exit(main())
