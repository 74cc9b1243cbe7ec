"""The contrastive loss against eager torch: forward + backward to queries and keys.

Rows:
  bank_100k          a bank of 100,000 keys, B = 256, k = 64 given negatives, gradients of queries and touched keys
  bank_100k_drawn    the same with the draw: ours a subset without replacement, torch `randint` (with replacement)
  bank_100k_dense    the same as the first with a dense gradient of the keys on both sides, as an encoder needs
  in_batch_256, in_batch_2048   all other keys of the batch
  in_batch_256_symmetric        both directions

The eager side gathers the keys, multiplies by `bmm` and calls `cross_entropy`; of its two forms, sparse rows with
`.coalesce()` and a dense gradient, the faster one counts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import torch.nn.functional as nnf
from _harness import (
    Report,
    Row,
    Side,
    check_close,
    common_options,
    interleave,
    make_table,
    set_up,
    wanted,
    write_readme,
)

from samplex_cuda import functional as sxf

KEYS, DIM, BATCH, K, SETS = 100_000, 128, 256, 64, 8
Set = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # queries [B, d], positives [B], negatives [B, k]
Step = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # loss and the gradients of queries and keys


def make_sets(device: torch.device) -> list[Set]:
    """Eight, so that a step does not find its keys in the cache from the step before."""
    sets = []
    for _ in range(SETS):
        positives = torch.randint(KEYS, (BATCH,), device=device)
        negatives = torch.randint(KEYS - 1, (BATCH, K), device=device)
        negatives += negatives >= positives[:, None]
        sets.append((torch.randn(BATCH, DIM, device=device).requires_grad_(), positives, negatives))
    return sets


def gradients(loss: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor) -> Step:
    d_queries, d_keys = torch.autograd.grad(loss, (queries, keys))
    return loss.detach(), d_queries, d_keys.coalesce() if d_keys.is_sparse else d_keys


def eager_loss(q: torch.Tensor, keys: torch.Tensor, own: torch.Tensor, other: torch.Tensor, sparse: bool):
    rows = nnf.embedding(torch.cat([own[:, None], other], 1), keys, sparse=sparse)  # [B, 1 + k, d]
    return nnf.cross_entropy(torch.bmm(rows, q.unsqueeze(2)).squeeze(2), torch.zeros_like(own))


def check_step(step: Step, keys: torch.Tensor, used: Set) -> float:
    """Loss and gradients against fp64 on the touched keys."""
    queries, positives, negatives = used
    touched, at = torch.unique(torch.cat([positives, negatives.flatten()]), return_inverse=True)
    q = queries.detach().double().requires_grad_()
    rows = keys.detach()[touched].double().requires_grad_()
    loss = eager_loss(q, rows, at[:BATCH], at[BATCH:].view(BATCH, K), sparse=False)
    d_q, d_rows = torch.autograd.grad(loss, (q, rows))
    d_keys = step[2]
    if d_keys.is_sparse:
        if not torch.equal(d_keys.indices()[0], touched):
            raise AssertionError("refcheck: other keys than those drawn have a gradient")
        got = d_keys.values()
    else:
        got = d_keys[touched]
        if int((d_keys != 0).any(1).sum()) > len(touched):
            raise AssertionError("refcheck: other keys than those drawn have a gradient")
    return max(
        check_close("loss", step[0], loss.detach(), 1e-5),
        check_close("d_queries", step[1], d_q, 1e-5),
        check_close("d_keys", got, d_rows, 1e-5),
    )


def main() -> int:
    options = common_options(__doc__).parse_args()
    device = set_up(options)
    name = "contrastive" if device.type == "cpu" else f"contrastive_{device.type}"
    report = Report(name, device, store=not (options.quick or options.no_store))
    bank = make_table(KEYS, DIM, device=device).requires_grad_()
    sets = make_sets(device)

    def row(
        row_id: str,
        what: str,
        ours: Callable[[int], Step],
        others: dict[str, Callable[[int], Step]],
        checked: str,
        target: float | None,
        config: dict[str, int],
    ) -> None:
        sides = [Side("ours", ours), *(Side(name, step) for name, step in others.items())]
        got = interleave(sides, device=device, seconds=options.seconds, min_rounds=2 if options.quick else 5, sets=SETS)
        other = min(others, key=lambda name: got.times[name].median)
        value, low, high = got.ratio(other, "ours")
        report.add(
            Row(
                row_id,
                what,
                value,
                "x",
                checked,
                target=target if device.type == "cpu" else None,
                ours=got.times["ours"],
                other=got.times[other],
                other_name=other,
                spread=(low, high),
                config=config,
                note=f"the faster eager form: {other}" if len(others) > 1 else "",
            )
        )

    def drawn_by_torch(i: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        queries, positives, _ = sets[i % SETS]
        negatives = torch.randint(KEYS - 1, (BATCH, K), device=device)
        return queries, positives, negatives + (negatives >= positives[:, None])

    def eager(i: int, sparse: bool, draw: bool) -> Step:
        queries, positives, negatives = drawn_by_torch(i) if draw else sets[i % SETS]
        return gradients(eager_loss(queries, bank, positives, negatives, sparse), queries, bank)

    def ours(i: int, sparse: bool, draw: bool) -> Step:
        queries, positives, negatives = sets[i % SETS]
        if draw:
            loss = sxf.contrastive(queries, bank, positives, num_negatives=K, sparse=sparse)
        else:
            loss = sxf.contrastive(queries, bank, positives, negatives, sparse=sparse)
        return gradients(loss, queries, bank)

    config = {"n": KEYS, "d": DIM, "B": BATCH, "k": K}
    for row_id, what, dense_only, draw, target in (
        ("bank_100k", "given negatives", False, False, 8.0),
        ("bank_100k_drawn", "draw included", False, True, 8.0),
        ("bank_100k_dense", "dense gradient of the keys", True, False, None),
    ):
        if not wanted(options, row_id):
            continue
        others = {"eager, dense": lambda i, draw=draw: eager(i, False, draw)}
        if not dense_only:
            others["eager, sparse rows"] = lambda i, draw=draw: eager(i, True, draw)
        worst = check_step(ours(0, not dense_only, False), bank, sets[0])
        worst = max(worst, check_step(eager(0, not dense_only, False), bank, sets[0]))
        row(
            row_id,
            f"step, bank of {KEYS:,} keys, draws [{BATCH}, {K}], {what}, vs eager",
            lambda i, dense_only=dense_only, draw=draw: ours(i, not dense_only, draw),
            others,
            f"both sides vs fp64: {worst:.1e}",
            target,
            config,
        )
    for batch, symmetric in ((256, False), (2048, False), (256, True)):
        row_id = f"in_batch_{batch}" + ("_symmetric" if symmetric else "")
        if not wanted(options, row_id):
            continue
        q, k = (torch.randn(batch, DIM, device=device).requires_grad_() for _ in range(2))
        own = torch.arange(batch, device=device)

        def in_batch(_: int, q: torch.Tensor = q, k: torch.Tensor = k, symmetric: bool = symmetric) -> Step:
            return gradients(sxf.contrastive(q, k, scale=0.1, symmetric=symmetric), q, k)

        def by_torch(q: torch.Tensor, k: torch.Tensor, own: torch.Tensor, symmetric: bool) -> Step:
            scores = 0.1 * (q @ k.T)
            loss = nnf.cross_entropy(scores, own)
            return gradients((loss + nnf.cross_entropy(scores.T, own)) / 2 if symmetric else loss, q, k)

        def in_batch_eager(
            _: int, q: torch.Tensor = q, k: torch.Tensor = k, own: torch.Tensor = own, symmetric: bool = symmetric
        ) -> Step:
            return by_torch(q, k, own, symmetric)

        q64, k64 = q.detach().double().requires_grad_(), k.detach().double().requires_grad_()
        want = by_torch(q64, k64, own, symmetric)
        worst = max(
            check_close(part, a, b, 1e-5)
            for step in (in_batch(0), in_batch_eager(0))
            for part, a, b in zip(("loss", "d_queries", "d_keys"), step, want, strict=True)
        )
        row(
            row_id,
            f"step, in-batch{', symmetric' if symmetric else ''}, B = {batch}, vs eager",
            in_batch,
            {"eager": in_batch_eager},
            f"both sides vs fp64: {worst:.1e}",
            1.3 if batch == 256 else None,
            {"d": DIM, "B": batch},
        )
    code = report.finish(fail=not options.no_fail)
    write_readme(report, options)
    return code


if __name__ == "__main__":
    sys.exit(main())
