"""Kinds of negatives against eager torch: forward + backward + update of the class table, or of queries and keys.

Rows (C = 1,000,000 classes, d = 128, B = 1,024, Adagrad on the touched rows):
  own_ragged      64 negatives per row on average, as CSR; eager pads, gathers [B, m, d] and masks
  in_batch_head   the targets of the batch, corrected by a streaming estimate
  hard            64 draws per row and 8 given hard negatives in one normalizer
  in_batch_dup    towers, B = 4,096: all keys of the batch, duplicates masked, corrected
  queue           towers, all keys of the batch and a queue of 4,096, duplicates masked, corrected
  unique          256 distinct draws for the batch with their inclusion probability; eager takes the smallest of C
                  exponential times

The eager side has sparse gradients and `torch.optim.Adagrad`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as nnf
from _harness import Report, Row, Side, check_close, common_options, interleave, make_table, set_up, wanted

import samplex_cuda as sx

CLASSES, DIM, BATCH, M, SETS = 1_000_000, 128, 1024, 64, 4


def main() -> int:
    options = common_options(__doc__).parse_args()
    device = set_up(options)
    name = "negatives" if device.type == "cpu" else f"negatives_{device.type}"
    report = Report(name, device, store=not (options.quick or options.no_store))

    def row(row_id: str, what: str, ours: Callable, eager: Callable, worst: float, target: float | None, config: dict):
        sides = [Side("ours", ours), Side("eager", eager)]
        got = interleave(sides, device=device, seconds=options.seconds, min_rounds=2 if options.quick else 5, sets=SETS)
        value, low, high = got.ratio("eager", "ours")
        checked = f"both sides: loss differs by {worst:.1e}"
        report.add(
            Row(
                row_id,
                what,
                value,
                "x",
                checked,
                target=target if device.type == "cpu" else None,
                ours=got.times["ours"],
                other=got.times["eager"],
                other_name="eager",
                spread=(low, high),
                config=config,
            )
        )

    p = 1.0 / torch.arange(1, CLASSES + 1, dtype=torch.float64)
    zipf = sx.samplers.Unigram(p)
    if any(wanted(options, row_id) for row_id in ("own_ragged", "in_batch_head", "hard")):
        head = sx.SampledClassifier(DIM, CLASSES, sx.samplers.Uniform(CLASSES), M, bias=False, device=device)
        head.fuse_optimizer(sx.optim.RowAdagrad(head.parameters(), lr=0.01))
        table = make_table(CLASSES, DIM, device=device)
        with torch.no_grad():
            table.copy_(head.weight)
        table.requires_grad_()
        adagrad = torch.optim.Adagrad([table], lr=0.01)
        hs = [torch.randn(BATCH, DIM, device=device).requires_grad_() for _ in range(SETS)]
        ys = [zipf.sample(None, 1, batch_size=BATCH).ids[:, 0].to(device) for _ in range(SETS)]
        lengths = [torch.randint(32, 97, (BATCH,)) for _ in range(SETS)]
        offsets = [torch.cat([n.new_zeros(1), n.cumsum(0)]).to(device) for n in lengths]
        flat = [torch.randint(CLASSES, (int(n.sum()),), device=device) for n in lengths]
        given = [torch.randint(CLASSES, (BATCH, M), device=device) for _ in range(SETS)]
        hard = [torch.randint(CLASSES, (BATCH, 8), device=device) for _ in range(SETS)]
        in_batch = sx.samplers.InBatch(CLASSES)
        for y in ys * 20:
            in_batch.frequency.update(y)
        config = {"C": CLASSES, "d": DIM, "B": BATCH, "m": M}

    def ours(i: int, **how) -> torch.Tensor:
        i %= SETS
        hs[i].grad = None
        loss = head(hs[i], ys[i], **{k: f(i) for k, f in how.items()})
        loss.backward()
        return loss.detach()

    def rows_loss(i: int, ids: torch.Tensor, shift: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        rows = nnf.embedding(torch.cat([ys[i][:, None], ids], 1), table, sparse=True)
        s = torch.bmm(rows, hs[i].unsqueeze(2)).squeeze(2)
        return nnf.cross_entropy(
            torch.cat([s[:, :1], (s[:, 1:] - shift).masked_fill(out, -math.inf)], 1), torch.zeros_like(ys[i])
        )

    def eager(i: int, loss_of: Callable[[int], torch.Tensor]) -> torch.Tensor:
        i %= SETS
        hs[i].grad = None
        loss = loss_of(i)
        loss.backward()
        adagrad.step()
        adagrad.zero_grad()
        return loss.detach()

    def ragged(i: int) -> torch.Tensor:
        parts = torch.nn.utils.rnn.pad_sequence(flat[i].split(lengths[i].tolist()), True, -1)
        return rows_loss(i, parts.clamp(min=0), torch.zeros(()), (parts < 0) | (parts == ys[i][:, None]))

    def with_hard(i: int) -> torch.Tensor:
        ids = torch.cat([given[i], hard[i]], 1)
        shift = torch.zeros(M + 8)
        shift[:M] = math.log(M / CLASSES)
        return rows_loss(i, ids, shift, ids == ys[i][:, None])

    def batch_loss(i: int) -> torch.Tensor:
        log_q = in_batch.frequency.log_q(ys[i]) + math.log(BATCH - 1)
        rows = nnf.embedding(ys[i], table, sparse=True)
        s = hs[i] @ rows.T
        own = torch.eye(BATCH, dtype=torch.bool, device=device)
        other = (s - log_q).masked_fill(ys[i][:, None] == ys[i], -math.inf)
        return nnf.cross_entropy(torch.where(own, s, other), torch.arange(BATCH, device=device))

    uniform = torch.full((BATCH, M), -math.log(CLASSES))
    cases = {
        "own_ragged": ({"negatives": lambda i: sx.Negatives((offsets[i], flat[i]))}, ragged, 3.0),
        "hard": ({"negatives": lambda i: sx.Negatives(given[i], uniform), "hard": lambda i: hard[i]}, with_hard, 3.0),
        "in_batch_head": (
            {"negatives": lambda i: in_batch.sample(None, 0, targets=ys[i], update=False)}, batch_loss, 1.5,
        ),
    }  # fmt: skip
    for row_id, (how, loss_of, target) in cases.items():
        if wanted(options, row_id):
            with torch.no_grad():
                table.copy_(head.weight)
                one = head(hs[0], ys[0], **{k: f(0) for k, f in how.items()})
                worst = check_close("loss", one, loss_of(0), 1e-4)
            kind = {"own_ragged": "own negatives in lists", "in_batch_head": "in-batch negatives"}.get(
                row_id, "hard negatives"
            )
            what = f"step, {kind}, C = {CLASSES:,}, B = {BATCH:,}, vs eager with Adagrad"
            row(
                row_id, what, lambda i, how=how: ours(i, **how), lambda i, f=loss_of: eager(i, f), worst, target, config
            )
    if wanted(options, "in_batch_dup"):
        batch = 4096
        q, k = (torch.randn(batch, DIM, device=device).requires_grad_() for _ in range(2))
        ids = zipf.sample(None, batch, shared=True).ids.to(device)
        log_q = zipf.log_prob_shared(None, ids.cpu()).to(device)

        def towers(_: int) -> tuple[torch.Tensor, ...]:
            loss = sx.functional.contrastive(q, k, key_ids=ids, log_q=log_q, scale=0.1)
            return loss.detach(), *torch.autograd.grad(loss, (q, k))

        def towers_eager(_: int) -> tuple[torch.Tensor, ...]:
            s = 0.1 * (q @ k.T)
            other = (s - log_q - math.log(batch - 1)).masked_fill(ids[:, None] == ids, -math.inf)
            own = torch.eye(batch, dtype=torch.bool, device=device)
            loss = nnf.cross_entropy(torch.where(own, s, other), torch.arange(batch, device=device))
            return loss.detach(), *torch.autograd.grad(loss, (q, k))

        pairs = zip(("loss", "d_queries", "d_keys"), towers(0), towers_eager(0), strict=True)
        worst = max(check_close(part, a, b, 1e-4) for part, a, b in pairs)
        what = f"step, towers, in-batch with duplicates, B = {batch:,}, vs eager"
        row("in_batch_dup", what, towers, towers_eager, worst, 2.0, {"d": DIM, "B": batch})
    if wanted(options, "queue"):
        size = 4096
        q, k = (torch.randn(BATCH, DIM, device=device).requires_grad_() for _ in range(2))
        ids, old = (zipf.sample(None, n, shared=True).ids.to(device) for n in (BATCH, size))
        log_q, old_log_q = (zipf.log_prob_shared(None, t.cpu()).to(device) for t in (ids, old))
        held = torch.randn(size, DIM, device=device)
        queue = sx.samplers.KeyQueue(size, DIM).to(device)
        queue.push(held, old, old_log_q)

        def queued(_: int) -> tuple[torch.Tensor, ...]:
            loss = sx.functional.contrastive(q, k, key_ids=ids, log_q=log_q, scale=0.1, queue=queue)
            return loss.detach(), *torch.autograd.grad(loss, (q, k))

        def queued_eager(_: int) -> tuple[torch.Tensor, ...]:
            every, labels = torch.cat([k, held]), torch.cat([ids, old])
            s = 0.1 * (q @ every.T)
            shift = torch.cat([log_q, old_log_q]) + math.log(BATCH + size - 1)
            other = (s - shift).masked_fill(ids[:, None] == labels, -math.inf)
            own = torch.eye(BATCH, BATCH + size, dtype=torch.bool, device=device)
            loss = nnf.cross_entropy(torch.where(own, s, other), torch.arange(BATCH, device=device))
            return loss.detach(), *torch.autograd.grad(loss, (q, k))

        pairs = zip(("loss", "d_queries", "d_keys"), queued(0), queued_eager(0), strict=True)
        worst = max(check_close(part, a, b, 1e-4) for part, a, b in pairs)
        what = f"step, towers, B = {BATCH:,} and a queue of {size:,} keys, vs eager"
        row("queue", what, queued, queued_eager, worst, 1.5, {"d": DIM, "B": BATCH, "queue": size})
    if wanted(options, "unique"):
        m, weights = 256, p.float().to(device)
        unique = sx.SampledClassifier(DIM, CLASSES, zipf, m, bias=False, shared=True, unique=True, device=device)
        unique.fuse_optimizer(sx.optim.RowAdagrad(unique.parameters(), lr=0.01))
        copy = make_table(CLASSES, DIM, device=device)
        with torch.no_grad():
            copy.copy_(unique.weight)
        copy.requires_grad_()
        rule = torch.optim.Adagrad([copy], lr=0.01)
        x = torch.randn(BATCH, DIM, device=device).requires_grad_()
        y = zipf.sample(None, 1, batch_size=BATCH).ids[:, 0].to(device)
        law = zipf.log_prob_all()[0].to(device)

        def unique_ours(_: int) -> torch.Tensor:
            x.grad = None
            loss = unique(x, y)
            loss.backward()
            return loss.detach()

        def drawn_loss(ids: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
            rows = nnf.embedding(ids, copy, sparse=True)
            own = (x * nnf.embedding(y, copy, sparse=True)).sum(1, keepdim=True)
            other = (x @ rows.T - log_q - math.log(m)).masked_fill(y[:, None] == ids, -math.inf)
            return nnf.cross_entropy(torch.cat([own, other], 1), torch.zeros_like(y))

        def unique_eager(_: int) -> torch.Tensor:
            # Distinct classes by exponential times: those of the m smallest; pi from the (m + 1)-th.
            times = torch.empty_like(weights).exponential_().div_(law.exp())
            first, ids = times.topk(m + 1, largest=False)
            ids = ids[:m]
            log_q = torch.log(-torch.expm1(-law[ids].exp() * first[m])) - math.log(m)
            x.grad = None
            loss = drawn_loss(ids, log_q)
            loss.backward()
            rule.step()
            rule.zero_grad()
            return loss.detach()

        draw = zipf.sample(None, m, shared=True, unique=True)
        worst = check_close("loss", unique(x, y, negatives=draw), drawn_loss(draw.ids, draw.log_q), 1e-4)
        what = f"step, {m} distinct draws for the batch, C = {CLASSES:,}, B = {BATCH:,}, vs eager with Adagrad"
        row("unique", what, unique_ours, unique_eager, worst, 1.5, {"C": CLASSES, "d": DIM, "B": BATCH, "m": m})
    return report.finish(fail=not options.no_fail)


if __name__ == "__main__":
    sys.exit(main())
