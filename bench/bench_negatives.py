"""Kinds of negatives against eager torch: forward + backward + update of the class table, or of queries and keys.

Rows (C = 1,000,000 classes, d = 128, B = 1,024, Adagrad on the touched rows):
  own_ragged      64 negatives per row on average, as CSR; eager pads, gathers [B, m, d] and masks
  in_batch_head   the targets of the batch, corrected by a streaming estimate
  hard            64 draws per row and 8 given hard negatives in one normalizer
  in_batch_dup    towers, B = 4,096: all keys of the batch, duplicates masked, corrected
  queue           towers, all keys of the batch and a queue of 4,096, duplicates masked, corrected
  unique          256 distinct draws for the batch with their inclusion probability; eager takes the smallest of C
                  exponential times
  in_batch_update the shipped InBatch head, B = 4,096, with the update of its estimator in each step; eager has the same
                  moving average of gaps in torch
  mixed           the same with 1,024 uniform draws in one normalizer, under the log q of the mixture
  mined           64 draws per row and 8 mined from a pool of 4,096 random classes, mining included
  unique_rows     64 distinct log-uniform draws per row; eager draws 2 m + 18, sorts, and keeps the first of each class
  host_table      1,024 uniform draws for the batch, a table and its state mapped from files

The eager side has sparse gradients and `torch.optim.Adagrad`.
"""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

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
    for row_id, (make_pair, what, target) in PAIRS.items():
        if wanted(options, row_id):
            with tempfile.TemporaryDirectory() as folder:
                pair = make_pair(device, Path(folder))
                title = f"step, {what}, C = {CLASSES:,}, vs eager with Adagrad"
                row(row_id, title, pair.ours, pair.eager, pair.check(), target, pair.config)
                del pair
    return report.finish(fail=not options.no_fail)


class Pair:
    """A head with a fused Adagrad and what a person would write: forward, backward and update of the same table.

    Args:
        device: of everything.
        batch: B.
        config: what the row says of its sizes.
        options: of the head.
    """

    def __init__(
        self, device: torch.device, batch: int, config: dict[str, int], *, file: Path | None = None, **options
    ):
        self.head = sx.SampledClassifier(DIM, CLASSES, bias=False, device=device, **options)
        if file is not None:
            self.head.host_table(file / "ours.npy")
        self.head.fuse_optimizer(sx.optim.RowAdagrad([self.head.weight], lr=0.01))
        if file is None:
            self.table = make_table(CLASSES, DIM, device=device)
            state = None
        else:
            self.table, state = (
                torch.from_file(str(file / name), shared=True, size=CLASSES * DIM).view(CLASSES, DIM)
                for name in ("eager.rows", "eager.state")
            )
        with torch.no_grad():
            self.table.copy_(self.head.weight)
        self.table.requires_grad_()
        self.rule = torch.optim.Adagrad([self.table], lr=0.01)
        if state is not None:
            self.rule.state[self.table]["sum"] = state.zero_()
        p = 1.0 / torch.arange(1, CLASSES + 1, dtype=torch.float64)
        zipf = sx.samplers.Unigram(p)
        self.hs = [torch.randn(batch, DIM, device=device).requires_grad_() for _ in range(SETS)]
        self.ys = [zipf.sample(None, 1, batch_size=batch).ids[:, 0].to(device) for _ in range(SETS)]
        self.config = {"C": CLASSES, "d": DIM, "B": batch, **config}

    def arguments(self, i: int) -> dict:
        """Further arguments of the head's call."""
        return {}

    def loss(self, i: int) -> torch.Tensor:
        """The eager loss."""
        raise NotImplementedError

    def check(self) -> float:
        """How far the losses are apart on the same draws."""
        raise NotImplementedError

    def ours(self, i: int) -> torch.Tensor:
        i %= SETS
        self.hs[i].grad = None
        loss = self.head(self.hs[i], self.ys[i], **self.arguments(i))
        loss.backward()
        return loss.detach()

    def eager(self, i: int) -> torch.Tensor:
        i %= SETS
        self.hs[i].grad = None
        loss = self.loss(i)
        loss.backward()
        self.rule.step()
        self.rule.zero_grad()
        return loss.detach()

    def of_shared(self, i: int, ids: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        """Cross-entropy over the target and draws of the batch."""
        own = (self.hs[i] * nnf.embedding(self.ys[i], self.table, sparse=True)).sum(1, keepdim=True)
        other = self.hs[i] @ nnf.embedding(ids, self.table, sparse=True).T - shift
        other = other.masked_fill(self.ys[i][:, None] == ids, -math.inf)
        return nnf.cross_entropy(torch.cat([own, other], 1), torch.zeros_like(self.ys[i]))

    def of_rows(self, i: int, ids: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        """The same over draws of each row."""
        rows = nnf.embedding(torch.cat([self.ys[i][:, None], ids], 1), self.table, sparse=True)
        s = torch.bmm(rows, self.hs[i].unsqueeze(2)).squeeze(2)
        other = (s[:, 1:] - shift).masked_fill(ids == self.ys[i][:, None], -math.inf)
        return nnf.cross_entropy(torch.cat([s[:, :1], other], 1), torch.zeros_like(self.ys[i]))

    @torch.no_grad()
    def same(self, ours: torch.Tensor, eager: torch.Tensor) -> float:
        return check_close("loss", ours, eager, 1e-4)


class InBatchPair(Pair):
    """The batch, with `extra` uniform draws or none, and a moving average of gaps between two occurrences."""

    def __init__(self, device: torch.device, extra: int) -> None:
        more = sx.samplers.Uniform(CLASSES) if extra else None
        super().__init__(
            device,
            4096,
            {"m": extra},
            sampler=sx.samplers.InBatch(CLASSES, extra=more).to(device),
            num_samples=extra or None,
            shared=True,
        )
        self.extra, self.rate = extra, 0.02
        self.last = torch.zeros(CLASSES, dtype=torch.int64, device=device)
        self.gap, self.clock = torch.zeros(CLASSES, device=device), 0

    def learned(self, i: int) -> torch.Tensor:
        """log q of the targets after they were counted."""
        ids, place, copies = self.ys[i].unique(return_inverse=True, return_counts=True)
        self.clock += self.ys[i].shape[0]
        passed = (self.clock - self.last[ids]) / copies
        weight = 1 - (1 - self.rate) ** copies
        gap = torch.where(self.last[ids] == 0, passed, self.gap[ids] + weight * (passed - self.gap[ids]))
        self.gap[ids], self.last[ids] = gap, self.clock
        return -gap.clamp(min=1.0).log()[place]

    def loss(self, i: int, drawn: torch.Tensor | None = None) -> torch.Tensor:
        y, log_q = self.ys[i], self.learned(i)
        others = log_q + math.log(len(y) - 1)
        if not self.extra:
            return self.of_shared(i, y, others)
        drawn = torch.randint(CLASSES, (self.extra,), device=y.device) if drawn is None else drawn
        seen = self.gap[drawn]
        of_draws = -torch.where(seen > 0, seen, self.clock + 1.0).clamp(min=1.0).log() + math.log(len(y) - 1)
        uniform = torch.full((), math.log(self.extra / CLASSES), device=y.device)
        return self.of_shared(i, torch.cat([y, drawn]), torch.logaddexp(torch.cat([others, of_draws]), uniform))

    def check(self) -> float:
        worst = 0.0
        for i in range(SETS):  # both estimators go the same way
            draw = self.head.sampler.sample(self.hs[i], self.extra, targets=self.ys[i])
            drawn = draw.ids[len(self.ys[i]) :]
            with torch.no_grad():
                ours = self.head(self.hs[i], self.ys[i], negatives=draw)
                worst = max(worst, self.same(ours, self.loss(i, drawn if self.extra else None)))
        return worst


class MinedPair(Pair):
    """Uniform draws of each row, and the best of a random pool."""

    K, POOL = 8, 4096

    def __init__(self, device: torch.device) -> None:
        uniform = sx.samplers.Uniform(CLASSES)
        super().__init__(device, BATCH, {"m": M, "k": self.K, "pool": self.POOL}, sampler=uniform, num_samples=M)
        self.miner = sx.HardNegatives(self.head, self.K, pool=self.POOL)

    def arguments(self, i: int) -> dict:
        return {"hard": self.miner.mine(self.hs[i], self.ys[i])}

    def mined(self, i: int, pool: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scores = self.hs[i] @ self.table[pool].T
            return pool[scores.masked_fill(pool == self.ys[i][:, None], -math.inf).topk(self.K, dim=1).indices]

    def loss(self, i: int, ids: torch.Tensor | None = None, hard: torch.Tensor | None = None) -> torch.Tensor:
        device = self.hs[i].device
        if hard is None:
            hard = self.mined(i, torch.randint(CLASSES, (self.POOL,), device=device))
        ids = torch.randint(CLASSES, (BATCH, M), device=device) if ids is None else ids
        shift = torch.zeros(M + self.K, device=device)
        shift[:M] = math.log(M / CLASSES)
        return self.of_rows(i, torch.cat([ids, hard], 1), shift)

    def check(self) -> float:
        pool = sx.samplers.Uniform(CLASSES).subset(self.POOL, batch_size=1, key=sx.Key(1)).ids[0].to(self.hs[0].device)
        hard, want = self.miner.mine(self.hs[0], self.ys[0], key=sx.Key(1)), self.mined(0, pool)
        if float((hard == want).float().mean()) < 0.999:  # scores that differ by a rounding may change places
            raise AssertionError("refcheck: other classes were mined")
        ids = torch.randint(CLASSES, (BATCH, M), device=hard.device)
        with torch.no_grad():
            given = sx.Negatives(ids, torch.full(ids.shape, -math.log(CLASSES), device=ids.device))
            return self.same(self.head(self.hs[0], self.ys[0], negatives=given, hard=hard), self.loss(0, ids, hard))


class UniquePair(Pair):
    """Distinct log-uniform draws of each row."""

    def __init__(self, device: torch.device) -> None:
        sampler = sx.samplers.LogUniform(CLASSES).to(device)
        super().__init__(device, BATCH, {"m": M}, sampler=sampler, num_samples=M, unique=True)

    def loss(self, i: int, ids: torch.Tensor | None = None, log_q: torch.Tensor | None = None) -> torch.Tensor:
        device, tries = self.hs[i].device, 2 * M + 18
        if ids is None or log_q is None:
            drawn = ((torch.rand(BATCH, tries, device=device) * math.log(CLASSES + 1)).exp() - 1).long()
            drawn = drawn.clamp(0, CLASSES - 1)
            order, place = drawn.sort(dim=1, stable=True)
            fresh = torch.ones_like(order, dtype=torch.bool)
            fresh[:, 1:] = order[:, 1:] != order[:, :-1]
            first = torch.empty_like(fresh).scatter_(1, place, fresh)
            count = first.cumsum(1)
            times = torch.empty(BATCH, tries, device=device).exponential_().cumsum(1)
            tau = times.gather(1, (count <= M).sum(1).clamp(max=tries - 1)[:, None])
            column = torch.where(first & (count <= M), count - 1, M)
            ids = torch.zeros(BATCH, M + 1, dtype=torch.int64, device=device).scatter_(1, column, drawn)[:, :M]
            chance = ((ids + 2.0) / (ids + 1.0)).log() / math.log(CLASSES + 1)
            log_q = torch.log(-torch.expm1(-chance * tau)) - math.log(M)
        return self.of_rows(i, ids, log_q + math.log(M))

    def check(self) -> float:
        draw = self.head.sampler.sample(self.hs[0], M, exclude=self.ys[0], unique=True)
        with torch.no_grad():
            return self.same(self.head(self.hs[0], self.ys[0], negatives=draw), self.loss(0, draw.ids, draw.log_q))


class HostPair(Pair):
    """A table and its state in files."""

    SHARED = 1024

    def __init__(self, device: torch.device, folder: Path) -> None:
        options = {"sampler": sx.samplers.Uniform(CLASSES), "num_samples": self.SHARED, "shared": True}
        super().__init__(device, BATCH, {"m": self.SHARED}, file=folder, **options)

    def loss(self, i: int, ids: torch.Tensor | None = None) -> torch.Tensor:
        ids = torch.randint(CLASSES, (self.SHARED,), device=self.hs[i].device) if ids is None else ids
        return self.of_shared(i, ids, torch.tensor(math.log(self.SHARED / CLASSES)))

    def check(self) -> float:
        draw = sx.samplers.Uniform(CLASSES).sample(None, self.SHARED, shared=True)
        with torch.no_grad():
            return self.same(self.head(self.hs[0], self.ys[0], negatives=draw), self.loss(0, draw.ids))


# Row: what makes its two sides, what it measures, its target on a CPU.
PAIRS: dict[str, tuple[Callable[[torch.device, Path], Pair], str, float | None]] = {
    "in_batch_update": (lambda d, _: InBatchPair(d, 0), "InBatch head with its estimator, B = 4,096", 1.5),
    "mixed": (lambda d, _: InBatchPair(d, 1024), "in-batch and 1,024 uniform draws, B = 4,096", 1.5),
    "mined": (lambda d, _: MinedPair(d), f"64 draws per row and 8 mined of 4,096, B = {BATCH:,}", 1.5),
    "unique_rows": (lambda d, _: UniquePair(d), f"64 distinct draws per row, B = {BATCH:,}", 3.0),
    "host_table": (HostPair, f"mapped table, 1,024 draws for the batch, B = {BATCH:,}", 1.5),
}


if __name__ == "__main__":
    sys.exit(main())
