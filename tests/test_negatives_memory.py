"""No step with any kind of negatives makes a tensor of the size of the class table, or of all gathered rows."""

from __future__ import annotations

import os

import pytest
import torch
from head_cases import make
from in_batch_cases import random_known
from test_heads import largest_allocation

import samplex_cuda as sx
from samplex_cuda import _native
from samplex_cuda.samplers import InBatch, KeyQueue, LogUniform, Uniform

C, D, B, M = 20_000, 64, 64, 256
LIMIT = B * M * D  # bytes: a quarter of [B, m, d], a fifth of [C, d]


def head_step(negatives=None, *, targets=1, given=None, **options):
    """A training step with a fused update; `given(h, y)` makes further arguments of the call."""
    head = make(C, D, M, bias=False, **options)
    head.fuse_optimizer(sx.optim.RowAdagrad([head.weight], lr=0.01))
    h = torch.randn(B, D, requires_grad=True)
    y = torch.randint(C, (B,) if targets == 1 else (B, targets))

    def step():
        more = {} if given is None else given(head, h, y)
        head(h, y, **({} if negatives is None else {"negatives": negatives}), **more).backward()
        h.grad = None

    return step


def own(head, h, y):
    ids = torch.randint(C, (B, M))
    return {"negatives": sx.Negatives(ids, torch.full(ids.shape, -9.9))}


def ragged(head, h, y):
    lengths = torch.randint(M // 2, M, (B,))
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    return {"negatives": sx.Negatives((offsets, torch.randint(C, (int(offsets[-1]),))))}


def mined(head, h, y):
    return {"hard": sx.HardNegatives(head, 8, pool=1000).mine(h, y)}


def known(head, h, y):
    return {"positives": random_known(B, C)}


def weighted(head, h, y):
    return {"target_weight": torch.full((B, 3), 1 / 3)}


def towers(kind):
    """A step of queries and keys, whose [n, d] come from an encoder."""
    queries = torch.randn(B, D, requires_grad=True)
    bank = torch.randn(2 * M, D, requires_grad=True)
    ids = torch.randint(C, (2 * M,))
    queue = KeyQueue(2 * M, D)
    queue.push(torch.randn(2 * M, D), ids)
    sampler = InBatch(C, extra=Uniform(C))
    contrastive = sx.functional.contrastive
    calls = {
        "queue": lambda: contrastive(queries, bank[:B], key_ids=ids[:B], queue=queue),
        "symmetric": lambda: contrastive(queries, bank[:B], key_ids=ids[:B], symmetric=True),
        "known": lambda: contrastive(queries, bank, key_ids=ids, known_positives=random_known(B, C)),
        "bank, drawn": lambda: contrastive(
            queries, bank, torch.arange(B), num_negatives=M, sampler=Uniform(2 * M), key_ids=ids,
            known_positives=random_known(B, C),
        ),
        "all in one": lambda: contrastive(
            queries, bank[: B + M + 8], negatives=_tower(sampler, ids)
        ),
    }  # fmt: skip

    def step():
        calls[kind]().backward()
        queries.grad = bank.grad = None

    return step


def _tower(sampler, ids):
    return sampler.tower_keys(ids[:B], M, hard=torch.arange(8).expand(B, 8).contiguous())


STEPS = {
    "own": lambda: head_step(given=own),
    "ragged": lambda: head_step(given=ragged),
    "hard, per row": lambda: head_step(given=mined),
    "hard, shared": lambda: head_step(given=mined, shared=True),
    "known": lambda: head_step(given=known),
    "in-batch": lambda: head_step(sampler=InBatch(C), shared=True),
    "mixed": lambda: head_step(sampler=InBatch(C, extra=Uniform(C)), shared=True),
    "unique, per row": lambda: head_step(sampler=LogUniform(C), unique=True),
    "unique, shared": lambda: head_step(sampler=LogUniform(C), unique=True, shared=True),
    "weighted": lambda: head_step(given=weighted, targets=3),
    "sphere": lambda: head_step(normalize=True, loss=sx.losses.SampledSoftmax(margin=sx.losses.ArcFace(0.3))),
    **{kind: lambda kind=kind: towers(kind) for kind in ("queue", "symmetric", "bank, drawn", "all in one")},
    "towers, known": lambda: towers("known"),
}


@pytest.mark.skipif(os.environ.get("SAMPLEX_CPU_BACKEND", "cpu") != "cpu", reason="measures the CPU kernels")
@pytest.mark.parametrize("kind", STEPS)
def test_no_step_is_as_large_as_the_table_or_the_gathered_rows(kind):
    step = STEPS[kind]()
    step()
    sx.release_memory()
    assert 0 < largest_allocation(step) < LIMIT
    assert _native.cached_memory() < 4 * LIMIT  # what the kernels took besides: pages of 2 MiB, less than [B, m, d]


def test_the_measure_sees_gathered_rows():
    table, h = torch.randn(C, D, requires_grad=True), torch.randn(B, D)
    ids = torch.randint(C, (B, M))
    assert largest_allocation(lambda: torch.einsum("bmd,bd->bm", table[ids], h).sum().backward()) >= 4 * LIMIT
