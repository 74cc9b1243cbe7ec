"""The symmetric softmax of a batch against eager torch: forward + backward to queries and keys, d = 128.

Rows:
  batch_256, batch_2048   no masks: two `cross_entropy` of one matrix of scores
  masked_2048             duplicates masked and both directions corrected

Run it on an idle machine: python bench/bench_symmetric_softmax.py
"""

from __future__ import annotations

import math
import sys

import torch
import torch.nn.functional as nnf
from _harness import Report, Row, Side, check_close, common_options, interleave, set_up, wanted, write_readme

from samplex_cuda.ops.symmetric_softmax import PairMasks, symmetric_softmax
from samplex_cuda.reference.symmetric_softmax import symmetric_softmax as reference

DIM, SCALE = 128, 0.1
Step = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # loss and the gradients of queries and keys


def main() -> int:
    options = common_options(__doc__).parse_args()
    device = set_up(options)
    name = "symmetric_softmax" if device.type == "cpu" else f"symmetric_softmax_{device.type}"
    report = Report(name, device, store=not (options.quick or options.no_store))
    for row_id, batch, masked in (("batch_256", 256, False), ("batch_2048", 2048, False), ("masked_2048", 2048, True)):
        if not wanted(options, row_id):
            continue
        q, k = (torch.randn(batch, DIM, device=device).requires_grad_() for _ in range(2))
        own = torch.arange(batch, device=device)
        eye = torch.eye(batch, dtype=torch.bool, device=device)
        labels = torch.randint(batch // 2, (batch,), device=device)
        shift = torch.rand(batch, device=device) - math.log(batch - 1)
        masks = PairMasks(labels, None, None, shift, shift) if masked else PairMasks()

        def ours(_: int, q: torch.Tensor = q, k: torch.Tensor = k, masks: PairMasks = masks) -> Step:
            loss = symmetric_softmax(q, k, masks, SCALE).mean()
            return (loss.detach(), *torch.autograd.grad(loss, (q, k)))

        def eager(
            _: int,
            q: torch.Tensor = q,
            k: torch.Tensor = k,
            own: torch.Tensor = own,
            eye: torch.Tensor = eye,
            masks: PairMasks = masks,
        ) -> Step:
            scores = SCALE * (q @ k.T)
            rows = columns = scores
            if masks.labels is not None:
                assert masks.key_shift is not None
                assert masks.query_shift is not None
                out = (masks.labels[:, None] == masks.labels) & ~eye
                rows = torch.where(eye, scores, scores + masks.key_shift).masked_fill(out, -math.inf)
                columns = torch.where(eye, scores, scores + masks.query_shift[:, None]).masked_fill(out, -math.inf)
            loss = (nnf.cross_entropy(rows, own) + nnf.cross_entropy(columns.T, own)) / 2
            return (loss.detach(), *torch.autograd.grad(loss, (q, k)))

        q64, k64 = (t.detach().double().requires_grad_() for t in (q, k))
        shift64 = shift.double() if masked else None
        truth = reference(q64 @ k64.T, masks.labels, None, shift64, shift64, SCALE).mean()
        want = (truth.detach(), *torch.autograd.grad(truth, (q64, k64)))
        worst = max(
            check_close(part, a, b, 1e-4)
            for step in (ours(0), eager(0))
            for part, a, b in zip(("loss", "d_queries", "d_keys"), step, want, strict=True)
        )
        got = interleave(
            [Side("ours", ours), Side("eager", eager)],
            device=device,
            seconds=options.seconds,
            min_rounds=2 if options.quick else 5,
        )
        value, low, high = got.ratio("eager", "ours")
        report.add(
            Row(
                row_id,
                f"step, both directions{', masked and corrected' if masked else ''}, B = {batch:,}, vs eager",
                value,
                "x",
                f"both sides vs fp64: {worst:.1e}",
                target=1.3 if device.type == "cpu" else None,
                ours=got.times["ours"],
                other=got.times["eager"],
                other_name="eager",
                spread=(low, high),
                config={"d": DIM, "B": batch},
            )
        )
    code = report.finish(fail=not options.no_fail)
    write_readme(report, options)
    return code


if __name__ == "__main__":
    sys.exit(main())
