"""Negatives of two towers: known positives, ids of keys with every way to negatives, one normalizer for all kinds."""

from __future__ import annotations

import itertools
import math
import re

import pytest
import torch
from host_syncs import no_host_sync
from in_batch_cases import random_known
from test_in_batch import tower, wanted

import samplex_cuda as sx
from samplex_cuda.functional.contrastive import contrastive, is_known
from samplex_cuda.samplers import InBatch, KeyQueue, TowerKeys, Uniform, Unigram

B, D = 6, 5


def make(n, backend=None, b=B):
    g = torch.Generator().manual_seed(n)
    device = torch.device("cpu") if backend is None else backend.device
    queries = torch.randn(b, D, dtype=torch.float64, generator=g).to(device).requires_grad_()
    keys = torch.randn(n, D, dtype=torch.float64, generator=g).to(device).requires_grad_()
    return queries, keys, torch.randint(9, (n,), generator=g).to(device)


def hits(labels, own, known):
    """bool [B, k], by a loop: which negatives, whose labels are [B, k], a query must not have."""
    offsets, ids = (t.tolist() for t in known)
    out = [
        [x == mine or x in ids[offsets[b] : offsets[b + 1]] for x in row]
        for b, (row, mine) in enumerate(zip(labels.tolist(), own.tolist(), strict=True))
    ]
    return torch.tensor(out, dtype=torch.bool, device=labels.device).reshape(labels.shape)


def loss_of(queries, keys, positives, rows, out, log_q=None):
    """The loss by a [B, n] table of scores; rows [B, k] are the negatives, those in `out` take no part."""
    s = queries @ keys.T
    other = s.gather(1, rows)
    if log_q is not None:
        other = other - log_q - math.log(rows.shape[1])
    own = s.gather(1, positives[:, None])
    return (torch.cat([own, other.masked_fill(out, -torch.inf)], 1).logsumexp(1) - own[:, 0]).mean()


def same(loss, want, inputs):
    torch.testing.assert_close(loss, want)
    for a, b in zip(torch.autograd.grad(loss, inputs), torch.autograd.grad(want, inputs), strict=True):
        torch.testing.assert_close(a.to_dense() if a.is_sparse else a, b)


# ---------------------------------------------------------------------------------------------------- known positives
def test_known_ids_are_found_without_waiting():
    g = torch.Generator().manual_seed(2)
    for scale in (1, 1 << 60):  # ids of any size
        ids = torch.randint(-12, 12, (7, 40), generator=g) * scale
        offsets, known = random_known(7, 12, g)
        known = known * scale
        with no_host_sync():
            got = is_known(ids, (offsets, known))
        assert torch.equal(got, hits(ids, torch.full((7,), 99), (offsets, known)))
    assert not is_known(ids, (torch.zeros(8, dtype=torch.int64), known[:0])).any()


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("n", [B, 40])
def test_in_batch(backend, n, corrected):
    queries, keys, ids = make(n, backend)
    known = tuple(t.to(backend.device) for t in random_known(B, 9))
    log_q = -torch.rand(n, dtype=torch.float64).to(backend.device) if corrected else None
    rows = torch.arange(n, device=backend.device).expand(B, -1)
    out = hits(ids.expand(B, -1), ids[:B], known)
    assert bool((out.sum(1) > (ids.expand(B, -1) == ids[:B, None]).sum(1)).any())
    of_draws = None if log_q is None else log_q + math.log((n - 1) / n)  # the positive is no draw
    want = loss_of(queries, keys, rows[0, :B], rows, out, of_draws)
    got = contrastive(queries, keys, key_ids=ids, known_positives=known, log_q=log_q)
    same(got, want, (queries, keys))


def test_known_ids_of_a_large_batch_in_float():
    """The vectors of the CPU kernel, with rows that know nothing, one id and many."""
    g = torch.Generator().manual_seed(1)
    b = 150
    queries, keys = (torch.randn(b, 24, generator=g).requires_grad_() for _ in range(2))
    ids = torch.randint(60, (b,), generator=g)
    known = random_known(b, 60, g, most=20)
    rows = torch.arange(b).expand(b, -1)
    q, k = queries.detach().double().requires_grad_(), keys.detach().double().requires_grad_()
    want = loss_of(q, k, rows[0], rows, hits(ids.expand(b, -1), ids, known))
    loss = contrastive(queries, keys, key_ids=ids, known_positives=known)
    torch.testing.assert_close(loss.double(), want, rtol=1e-5, atol=1e-6)
    loss.backward(), want.backward()
    torch.testing.assert_close(queries.grad.double(), q.grad, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(keys.grad.double(), k.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("shape", [(7,), (B, 7)])
@pytest.mark.parametrize("named", [True, False])
def test_given_negatives_of_a_bank(backend, shape, named):
    queries, keys, ids = make(15, backend)
    known = tuple(t.to(backend.device) for t in random_known(B, 9 if named else 15))
    own = torch.arange(B, device=backend.device) + 3
    negatives = torch.randint(15, shape, generator=torch.Generator().manual_seed(4)).to(backend.device)
    rows = negatives.expand(B, -1).contiguous() if len(shape) == 1 else negatives
    names = ids if named else torch.arange(15, device=backend.device)
    want = loss_of(queries, keys, own, rows, hits(names[rows], names[own], known))
    got = contrastive(queries, keys, own, negatives, key_ids=ids if named else None, known_positives=known)
    same(got, want, (queries, keys))


def test_a_queue_is_masked_by_known_ids():
    queries, keys, ids = make(B + 9)
    known = random_known(B, 9)
    queue = KeyQueue(20, D, dtype=torch.float64)
    queue.push(keys[B:], ids[B:])
    rows = torch.arange(B + 9).expand(B, -1)
    want = loss_of(queries, keys, rows[0, :B], rows, hits(ids.expand(B, -1), ids[:B], known))
    got = contrastive(queries, keys[:B], key_ids=ids[:B], queue=queue, known_positives=known)
    torch.testing.assert_close(got, want)


def test_over_ranks_each_masks_what_its_queries_know(ranks):
    found = ranks.run(2, "in_batch_cases:gathered_known")
    queries, keys, ids = make(12, b=12)
    known = random_known(12, 9)
    rows = torch.arange(12).expand(12, -1)
    want = loss_of(queries, keys, rows[0], rows, hits(ids.expand(12, -1), ids, known))
    torch.testing.assert_close(sum(found) / 2, want.detach())


# ---------------------------------------------------------------------------------------------------- ids of drawn keys
@pytest.mark.parametrize("sampler", ["unigram", "mixture", "subset"])
@pytest.mark.parametrize("with_known", [False, True])
def test_drawn_keys_of_a_bank_are_masked_by_their_ids(backend, sampler, with_known):
    queries, keys, ids = make(15, backend)
    own = torch.arange(B, device=backend.device) + 3
    made = {
        "unigram": Unigram(torch.arange(1.0, 16.0)),
        "mixture": sx.samplers.Mixture([(Uniform(15), 0.5), (Unigram(torch.arange(1.0, 16.0)), 0.5)]),
        "subset": Uniform(15),
    }[sampler].to(backend.device)
    known = tuple(t.to(backend.device) for t in random_known(B, 9))
    options = {"known_positives": known} if with_known else {}
    if sampler == "subset":
        draw = made.subset(8, exclude=own, key=sx.Key(3))
        got = contrastive(queries, keys, own, num_negatives=8, key=sx.Key(3), key_ids=ids, **options)
    else:
        draw = made.sample(queries, 8, exclude=own, key=sx.Key(3))
        got = contrastive(queries, keys, own, num_negatives=8, sampler=made, key=sx.Key(3), key_ids=ids, **options)
    nothing = torch.zeros(B + 1, dtype=torch.int64, device=backend.device), own[:0]
    out = hits(ids[draw.ids], ids[own], known if with_known else nothing)
    assert bool(out.any())
    log_q = None if sampler == "subset" else draw.log_q.double()
    same(got, loss_of(queries, keys, own, draw.ids, out, log_q), (queries, keys))


def test_masked_draws_leave_an_unbiased_sum():
    """E[Σ exp(s - log q) / k] over draws of a sampler is the sum over keys of other ids, by enumeration."""
    p = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    ids, own = torch.tensor([7, 8, 7, 9]), torch.tensor([0])  # row 2 is a copy of row 0
    s = torch.tensor([0.3, -1.0, 0.7, 0.2], dtype=torch.float64)
    queries, keys = torch.ones(1, 1, dtype=torch.float64), s[:, None].clone()
    sampler, left = Unigram(p), p.clone()
    left[0] = 0
    left /= left.sum()
    total = 0.0
    for drawn in itertools.product(range(1, 4), repeat=2):
        draw = sx.Draw(torch.tensor([drawn]), left[torch.tensor([drawn])].log())
        sampler.sample = lambda *a, draw=draw, **k: draw
        loss = contrastive(queries, keys, own, num_negatives=2, sampler=sampler, key_ids=ids)
        total += float(left[list(drawn)].prod()) * math.expm1(float(loss))
    assert total == pytest.approx(float((s[[1, 3]] - s[0]).exp().sum()), rel=1e-6)


# ---------------------------------------------------------------------------------------------------- all in one
def brute_tower(queries, keys, tower, known=None, reduction="mean"):
    """In-batch, draws and mined keys in one normalizer."""
    n, b = tower.log_q.shape[0], queries.shape[0]
    s = queries @ keys.T
    out = tower.ids[None, :] == tower.ids[:b, None]
    if known is not None:
        out = out | hits(tower.ids.expand(b, -1), tower.ids[:b], known)
    s_out = s.masked_fill(out, -torch.inf)
    parts = [s.diagonal()[:, None], s_out[:, :n] - tower.log_q.double() - math.log(n)]
    if tower.hard is not None:
        parts.append(s_out.gather(1, tower.hard))
    loss = torch.cat(parts, 1).logsumexp(1) - s.diagonal()
    return loss if reduction == "none" else getattr(loss, reduction)()


@pytest.mark.parametrize("mined", [False, True])
@pytest.mark.parametrize("with_known", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_batch_draws_and_mined_keys_in_one_normalizer(backend, mined, with_known, reduction):
    c = 30
    g = torch.Generator().manual_seed(5)
    items = torch.randint(9, (B,), generator=g).to(backend.device)
    hard = torch.randint(c, (B, 4), generator=g).to(backend.device) if mined else None
    if mined:
        hard[0, 0] = items[0]  # takes no part
    sampler = InBatch(c, Unigram(torch.arange(1.0, c + 1)), extra=Uniform(c)).to(backend.device)
    tower = sampler.tower_keys(items, 12, hard=hard, key=sx.Key(1))
    assert torch.equal(tower.ids[:B], items)
    assert not mined or torch.equal(tower.ids[tower.hard], hard)
    table = torch.randn(c, D, dtype=torch.float64, generator=g).to(backend.device).requires_grad_()
    queries = torch.randn(B, D, dtype=torch.float64, generator=g).to(backend.device).requires_grad_()
    known = tuple(t.to(backend.device) for t in random_known(B, c)) if with_known else None
    got = contrastive(queries, table[tower.ids], negatives=tower, known_positives=known, reduction=reduction)
    want = brute_tower(queries, table[tower.ids], tower, known, reduction)
    assert got.shape == want.shape
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)
    ours = torch.autograd.grad(got.sum(), (queries, table))
    for a, b in zip(ours, torch.autograd.grad(want.sum(), (queries, table)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("mined", [False, True])
def test_the_expected_normalizer_is_that_of_all_other_items(mined):
    """Over every batch of 3 and every draw: the sum over all other classes, and the mined ones once more on top."""
    p, s = [0.5, 0.3, 0.2], torch.tensor([0.3, -1.0, 0.7], dtype=torch.float64)
    sampler = InBatch(3, Unigram(p), extra=Uniform(3))
    queries = torch.ones(3, 1, dtype=torch.float64)
    hard = torch.tensor([[0, 2]] * 3) if mined else None
    total = 0.0
    for others in itertools.product(range(3), repeat=2):
        for drawn in range(3):
            chance = math.prod(p[c] for c in others) / 3
            sampler.extra.sample = lambda *a, drawn=drawn, **k: sx.Draw(torch.tensor([drawn]), None)
            tower = sampler.tower_keys(torch.tensor([1, *others]), 1, hard=hard)
            loss = contrastive(queries, s[tower.ids][:, None], negatives=tower, reduction="none")
            total += chance * math.expm1(float(loss[0]))
    others = float((s[[0, 2]] - s[1]).exp().sum())
    assert total == pytest.approx(others * (2 if mined else 1), rel=1e-6)


def test_an_item_tower_learns_from_all_of_them():
    c, d = 200, 8
    g = torch.Generator().manual_seed(0)
    tower = torch.nn.Sequential(torch.nn.Embedding(c, d), torch.nn.Linear(d, d))
    torch.nn.init.normal_(tower[0].weight, generator=g)
    users = torch.nn.Embedding(c, d)
    sampler = InBatch(c, extra=Uniform(c))
    optimizer = torch.optim.Adam([*tower.parameters(), *users.parameters()], lr=0.03)
    losses = []
    for _ in range(80):
        items = torch.randint(c, (64,), generator=g)
        queries = users(items)
        with torch.no_grad():
            mined = (queries @ tower(torch.arange(c)).T).topk(4, dim=1).indices
        keys = sampler.tower_keys(items, 32, hard=mined)
        loss = contrastive(queries, tower(keys.ids), negatives=keys)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-10:]) < 0.6 * sum(losses[:10])
    assert int(sampler.frequency.clock) == 80 * 64


# ---------------------------------------------------------------------------------------------------- both directions
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("corrected", [True, False])
def test_symmetric_masks_known_pairs_in_both_directions(backend, reduction, corrected):
    queries, keys, ids = make(B, backend)
    known = tuple(t.to(backend.device) for t in random_known(B, 9))
    log_q, query_log_q = (-1 - torch.rand(2, B, dtype=torch.float64)).to(backend.device)
    options = {"log_q": log_q, "query_log_q": query_log_q} if corrected else {}
    got = contrastive(
        queries, keys, key_ids=ids, known_positives=known, symmetric=True, reduction=reduction, scale=0.7, **options
    )
    s = 0.7 * queries @ keys.T
    eye = torch.eye(B, dtype=torch.bool, device=backend.device)
    out = hits(ids.expand(B, -1), ids, known) & ~eye
    rows, columns = (s - log_q - math.log(B - 1), s - query_log_q[:, None] - math.log(B - 1)) if corrected else (s, s)
    by_row, by_column = (torch.where(eye, s, t).masked_fill(out, -torch.inf) for t in (rows, columns))
    want = (by_row.logsumexp(1) + by_column.logsumexp(0)) / 2 - s.diagonal()
    same(got.sum(), (want if reduction == "none" else want.mean()).sum(), (queries, keys))


def test_symmetric_with_a_queue_has_its_keys_in_one_direction():
    queries, keys, ids = make(B + 9)
    queue = KeyQueue(20, D, dtype=torch.float64)
    queue.push(keys[B:], ids[B:])
    own, keys = keys[:B], keys[:B].detach().requires_grad_()
    got = contrastive(queries, keys, key_ids=ids[:B], queue=queue, symmetric=True)
    to = contrastive(queries, keys, key_ids=ids[:B], queue=queue)
    back = contrastive(keys, queries, key_ids=ids[:B])
    torch.testing.assert_close(own, keys)
    same(got, (to + back) / 2, (queries, keys))


def test_symmetric_over_ranks_is_one_batch(ranks):
    found = ranks.run(2, "in_batch_cases:gathered_symmetric")
    queries, keys, ids, log_q = tower(12, b=12)
    own = torch.arange(12)
    want = (wanted(queries, keys, ids, log_q, own) + wanted(keys, queries, ids, log_q + 1, own)) / 2
    grads = torch.autograd.grad(want, (queries, keys))
    torch.testing.assert_close(sum(loss for loss, _, _ in found) / 2, want.detach())
    for rank, (_, d_queries, d_keys) in enumerate(found):  # averaged, as DistributedDataParallel does
        torch.testing.assert_close(d_queries / 2, grads[0][6 * rank : 6 * rank + 6])
        torch.testing.assert_close(d_keys / 2, grads[1][6 * rank : 6 * rank + 6])


# ---------------------------------------------------------------------------------------------------- errors
q, bank, own = torch.zeros(3, 4), torch.zeros(9, 4), torch.tensor([0, 1, 2])
none = torch.zeros(4, dtype=torch.int64), own[:0]
keys_of = TowerKeys(torch.arange(9), torch.zeros(7), torch.tensor([[7, 8]] * 3))


@pytest.mark.parametrize(
    ("call", "kind", "error"),
    [
        (lambda: contrastive(q, q, known_positives=none), ValueError, "known_positives must be None in-batch without"),
        (
            lambda: contrastive(q, bank, own, own, known_positives=own),
            TypeError,
            r"known_positives must be a tuple \(offsets \[B \+ 1\], ids \[n\]\)",
        ),
        (
            lambda: contrastive(q, bank, own, own, known_positives=(own, own)),
            ValueError,
            r"known_positives must be \(offsets \[4\], ids \[n\]\)",
        ),
        (
            lambda: contrastive(q, bank, own, own, known_positives=(none[0], own.float())),
            TypeError,
            "known_positives ids must be int64",
        ),
        (
            lambda: contrastive(q, bank, own, own, known_positives=(none[0] + 1, own)),
            ValueError,
            r"known_positives offsets must ascend from 0 to 3, the number of ids, got 1 ... 1",
        ),
        (
            lambda: contrastive(q, bank, own, num_negatives=2, exact=True, known_positives=none),
            ValueError,
            "known_positives cannot be combined with exact=True",
        ),
        (lambda: contrastive(q, bank, own, own + 7, key_ids=torch.arange(9)), IndexError, "negatives must be in"),
        (
            lambda: contrastive(q, bank, own, (own + 7)[:, None], key_ids=torch.arange(9)),
            IndexError,
            "negatives must be in",
        ),
        (
            lambda: contrastive(q, bank, negatives=keys_of, log_q=torch.zeros(9)),
            ValueError,
            "log_q cannot be combined with TowerKeys",
        ),
        (
            lambda: contrastive(q, bank, negatives=keys_of, symmetric=True),
            ValueError,
            "symmetric cannot be combined with TowerKeys",
        ),
        (lambda: contrastive(q, bank[:8], negatives=keys_of), ValueError, r"keys must be \[9, d\], one for each id"),
        (
            lambda: contrastive(q, q, key_ids=own, known_positives=none, symmetric=True, queue=KeyQueue(5, 4)),
            ValueError,
            "known_positives must be None with symmetric=True and a group, a queue",
        ),
        (
            lambda: contrastive(q, q, symmetric=True, log_q=q[:, 0], query_log_q=q[:2, 0]),
            ValueError,
            r"query_log_q must be \[B\] \[3\]",
        ),
        (lambda: contrastive(q[:2], bank, negatives=keys_of), ValueError, r"queries must be \[3, d\] like the mined"),
        (
            lambda: contrastive(bank, bank, negatives=TowerKeys(torch.arange(9), torch.zeros(7))),
            ValueError,
            "queries must be at most 7, one for each target",
        ),
        (lambda: InBatch(9).tower_keys(own, hard=own), ValueError, r"hard must be \[3, k\] to fit targets"),
        (lambda: InBatch(9).tower_keys(own, hard=own[:, None] + 7), IndexError, r"hard must be in \[0, 9\), got 9"),
        (lambda: InBatch(9).tower_keys(own - 1), IndexError, r"targets must be in \[0, 9\), got -1"),
        (lambda: InBatch(9).tower_keys(own, hard=q), TypeError, "hard must be int64"),
    ],
)
def test_errors(call, kind, error):
    with pytest.raises(kind, match=error):
        call()


def test_a_refused_call_teaches_the_estimator_nothing():
    sampler = InBatch(9)
    with pytest.raises(IndexError, match=re.escape("hard must be in [0, 9), got 9")):
        sampler.tower_keys(own, hard=own[:, None] + 7)
    assert int(sampler.frequency.clock) == 0
