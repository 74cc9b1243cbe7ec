"""In-batch negatives: the streaming estimate of their log q, the mixture with other draws, and their distribution."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from head_cases import dense_logits, make
from host_syncs import no_host_sync
from training_cases import case

import samplex_cuda as sx
from samplex_cuda import _device
from samplex_cuda.samplers import InBatch, StreamingFrequency, Uniform, Unigram
from samplex_cuda.training import Config, ConfigError, Trainer, config

contrastive = sx.functional.contrastive


def zipf(n=200):
    p = 1.0 / torch.arange(1, n + 1, dtype=torch.float64)
    return p / p.sum()


# ---------------------------------------------------------------------------------------------------- the estimate
@pytest.mark.parametrize("options", [{"rate": 0.01}, {"kind": "sketch", "rate": 0.02}])
def test_the_estimate_comes_near_the_stream(options):
    p, g = zipf(), torch.Generator().manual_seed(0)
    frequency = StreamingFrequency(4096, **options)
    for _ in range(3000):
        frequency.update(torch.multinomial(p, 64, replacement=True, generator=g))
    error = frequency.log_q(torch.arange(200)).double() - p.log()
    # Ten classes come more than once per batch of 64: gaps in steps would stop at 1 / 64 for them, 2.4 nats too low.
    assert error[:10].abs().max() < 0.15
    assert error[:10].mean().abs() < 0.05
    assert error.abs().mean() < 0.25


def test_gaps_count_examples_and_copies_are_one_update():
    frequency = StreamingFrequency(10, rate=0.25)
    frequency.update(torch.tensor([3, 3, 5, 7]))  # clock 4: gaps 4 / 2, 4, 4
    frequency.update(torch.tensor([[5, 5], [5, -1]]))  # clock 7: gap (7 - 4) / 3 for 5
    assert frequency.clock == 7
    want = torch.tensor([2.0, 4.0 + (1 - 0.75**3) * (1.0 - 4.0), 4.0])  # with the weight of three
    torch.testing.assert_close(frequency.log_q(torch.tensor([3, 5, 7])), -want.log())
    assert frequency.log_q(torch.tensor([0]))[0] == -torch.tensor(8.0).log()  # never seen: the next one
    assert torch.equal(frequency.log_q(torch.tensor([13])), frequency.log_q(torch.tensor([3])))  # one bucket


def test_a_sketch_forgets():
    frequency = StreamingFrequency(64, kind="sketch", rate=1.0, depth=5)
    for _ in range(200):
        frequency.update(torch.zeros(64, dtype=torch.int64))
    for _ in range(10):
        frequency.update(torch.ones(64, dtype=torch.int64))
    q = frequency.log_q(torch.tensor([0, 1])).exp()
    torch.testing.assert_close(q, torch.tensor([math.exp(-10), 1 - math.exp(-10)]), rtol=1e-2, atol=1e-4)
    assert frequency.growth < 20.1  # scaled back on the way


@pytest.mark.parametrize("kind", ["gap", "sketch"])
def test_a_resumed_estimator_goes_on_with_the_same_numbers(kind):
    g = torch.Generator().manual_seed(1)
    batches = [torch.randint(300, (32,), generator=g) for _ in range(40)]
    whole, first = (StreamingFrequency(256, kind=kind) for _ in range(2))
    for ids in batches:
        whole.update(ids)
    for ids in batches[:20]:
        first.update(ids)
    second = StreamingFrequency(256, kind=kind)
    second.load_state_dict(first.state_dict())
    for ids in batches[20:]:
        second.update(ids)
    torch.testing.assert_close(second.log_q(torch.arange(300)), whole.log_q(torch.arange(300)), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["gap", "sketch"])
def test_nothing_waits_for_the_device(monkeypatch, kind):
    monkeypatch.setattr(_device, "host_waits", lambda t: True)
    frequency = StreamingFrequency(100, kind=kind)
    sampler, ids = InBatch(100, frequency, extra=Uniform(100)), torch.arange(50)
    with no_host_sync():
        sampler.sample(None, 5, targets=ids)
    assert frequency.clock == 50


def test_over_ranks_the_estimator_is_that_of_all_ids(ranks):
    found = ranks.run(3, "in_batch_cases:frequencies")
    g = torch.Generator().manual_seed(0)
    alone = StreamingFrequency(50)
    for _ in range(5):
        alone.update(torch.randint(50, (3, 8), generator=g)[:, :6].reshape(-1))
    for last, gap in found:
        assert torch.equal(last[:-1], alone.last[:-1])  # the last is of fill
        assert torch.equal(gap[:-1], alone.gap[:-1])


# ---------------------------------------------------------------------------------------------------- the distribution
@pytest.mark.parametrize("extra", [0, 1])
def test_the_expected_normalizer_is_that_of_all_other_classes(monkeypatch, extra):
    p, s = [0.5, 0.3, 0.2], torch.tensor([0.3, -1.0, 0.7], dtype=torch.float64)
    sampler = InBatch(3, Unigram(p), extra=Uniform(3) if extra else None)
    total = 0.0
    for others in itertools.product(range(3), repeat=3):  # the other rows of a batch of 4 whose own target is 1
        for drawn in range(3) if extra else [0]:
            chance = math.prod(p[c] for c in others) * (1 / 3 if extra else 1.0)
            sampler.extra and setattr(
                sampler.extra, "sample", lambda *a, d=drawn, **k: sx.Draw(torch.tensor([d]), None)
            )
            draw = sampler.sample(None, extra, targets=torch.tensor([1, *others]))
            keep = draw.ids != 1
            total += chance * float((s[draw.ids] - draw.log_q.double()).exp()[keep].sum()) / draw.ids.shape[0]
    torch.testing.assert_close(torch.tensor(total).double(), s[[0, 2]].exp().sum(), rtol=1e-6, atol=1e-6)


def test_a_head_trains_with_the_whole_batch_and_keeps_the_estimator():
    c = 40
    sampler = InBatch(c, extra=Uniform(c))
    head = make(c, 6, 8, sampler=sampler, shared=True, dtype=torch.float64)
    h, y = torch.randn(16, 6, dtype=torch.float64, requires_grad=True), torch.randint(c, (16,))
    y[3], y[5] = y[4], -100
    before = {name: t.clone() for name, t in head.state_dict().items()}
    loss = head(h, y, key=sx.Key(1))
    assert "sampler.frequency.gap" in before
    assert head.sampler.frequency.clock == 15  # one row has no target
    fresh = InBatch(c, extra=Uniform(c))
    draw = fresh.sample(h, 8, targets=y.clamp(min=-1), key=sx.Key(1))
    s, keep = dense_logits(head, h), y >= 0
    others = s[:, draw.ids] - draw.log_q.double() - math.log(24)
    others = others.masked_fill(draw.ids == y[:, None], -torch.inf)
    own = s.gather(1, y.clamp(min=0)[:, None])
    want = (torch.cat([own, others], 1).logsumexp(1) - own[:, 0])[keep].mean()
    torch.testing.assert_close(loss, want, rtol=1e-6, atol=1e-8)
    grads = torch.autograd.grad(loss, (h, head.weight))
    wants = torch.autograd.grad(want, (h, head.weight))
    torch.testing.assert_close(grads[0], wants[0], rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(grads[1].to_dense(), wants[1], rtol=1e-6, atol=1e-9)
    other = make(c, 6, 8, sampler=InBatch(c, extra=Uniform(c)), shared=True, dtype=torch.float64)
    other.load_state_dict(head.state_dict())
    assert torch.equal(other.sampler.frequency.gap, head.sampler.frequency.gap)


def test_in_batch_alone_needs_no_num_samples_and_a_static_frequency_stays():
    counts = torch.arange(1.0, 10.0)
    head = sx.SampledClassifier(4, 9, InBatch(9, Unigram(counts)), shared=True)
    h, y = torch.randn(5, 4), torch.arange(5)
    # The four other targets are the negatives of a row, each with the log q of its count.
    s = dense_logits(head, h)[:, y]
    corrected = (s - (counts / counts.sum()).log()[y] - math.log(4)).masked_fill(
        torch.eye(5, dtype=torch.bool), -torch.inf
    )
    own = s.diagonal()[:, None]
    want = (torch.cat([own, corrected], 1).logsumexp(1) - own[:, 0]).mean()
    for _ in range(3):
        torch.testing.assert_close(head(h, y), want.float())


def test_wrong_parts_are_refused():
    with pytest.raises(ValueError, match="num_classes = 9, got 8"):
        InBatch(9, extra=Uniform(8))
    with pytest.raises(TypeError, match="frequency must be"):
        InBatch(9, torch.ones(9))
    with pytest.raises(ValueError, match="shared=True"):
        make(9, 4, 3, sampler=InBatch(9))
    with pytest.raises(ValueError, match="masks targets"):
        make(9, 4, 3, sampler=InBatch(9), shared=True, loss="nce")
    with pytest.raises(ValueError, match=r"targets must be \[B\]"):
        InBatch(9).sample(None, 0, targets=torch.zeros(2, 2, dtype=torch.int64))
    frequency = StreamingFrequency(9)
    with pytest.raises(TypeError, match="ids must be int64"):
        frequency.update(torch.zeros(3))
    assert frequency.clock == 0
    with pytest.raises(ValueError, match="kind must be one of"):
        StreamingFrequency(9, kind="exact")


# ---------------------------------------------------------------------------------------------------- towers
def tower(n, b=6, d=5):
    g = torch.Generator().manual_seed(n)
    queries = torch.randn(b, d, dtype=torch.float64, generator=g).requires_grad_()
    keys = torch.randn(n, d, dtype=torch.float64, generator=g).requires_grad_()
    return queries, keys, torch.randint(4, (n,), generator=g), -1 - torch.rand(n, generator=g).double()


def wanted(queries, keys, ids, log_q, own):
    s = queries @ keys.T
    other = (s - log_q - math.log(len(keys) - 1)).masked_fill(ids[own][:, None] == ids, -torch.inf)
    positive = s[torch.arange(len(queries)), own]
    return (torch.cat([positive[:, None], other], 1).logsumexp(1) - positive).mean()


@pytest.mark.parametrize("n", [6, 15])
def test_keys_of_an_encoder_with_further_ones_behind(n):
    queries, keys, ids, log_q = tower(n)
    loss = contrastive(queries, keys, key_ids=ids, log_q=log_q)
    want = wanted(queries, keys, ids, log_q, torch.arange(6))
    torch.testing.assert_close(loss, want)
    for a, b in zip(
        torch.autograd.grad(loss, (queries, keys)), torch.autograd.grad(want, (queries, keys)), strict=True
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("shape", [(7,), (6, 7)])
def test_key_ids_with_a_bank_and_given_negatives(shape):
    queries, keys, ids, _ = tower(15)
    own, negatives = torch.arange(6) + 3, torch.randint(15, shape)
    loss = contrastive(queries, keys, own, negatives, key_ids=ids, sparse=False)
    rows = negatives.expand(6, -1) if negatives.dim() == 1 else negatives
    s = queries @ keys.T
    other = s.gather(1, rows).masked_fill(ids[rows] == ids[own][:, None], -torch.inf)
    positive = s[torch.arange(6), own]
    want = (torch.cat([positive[:, None], other], 1).logsumexp(1) - positive).mean()
    torch.testing.assert_close(loss, want)
    for a, b in zip(
        torch.autograd.grad(loss, (queries, keys)), torch.autograd.grad(want, (queries, keys)), strict=True
    ):
        torch.testing.assert_close(a, b)


def test_symmetric_with_a_correction_in_both_directions():
    queries, keys, ids, log_q = tower(6)
    loss = contrastive(queries, keys, key_ids=ids, log_q=log_q, query_log_q=log_q + 1, symmetric=True)
    own = torch.arange(6)
    want = (wanted(queries, keys, ids, log_q, own) + wanted(keys, queries, ids, log_q + 1, own)) / 2
    torch.testing.assert_close(loss, want)


def test_a_gather_over_ranks_is_one_batch(ranks):
    found = ranks.run(2, "in_batch_cases:gathered")
    queries, keys, ids, log_q = tower(12, b=12)
    want = wanted(queries, keys, ids, log_q, torch.arange(12))
    grads = torch.autograd.grad(want, (queries, keys))
    torch.testing.assert_close(sum(loss for loss, _, _ in found) / 2, want.detach())
    for rank, (_, d_queries, d_keys) in enumerate(found):  # averaged, as DistributedDataParallel does
        torch.testing.assert_close(d_queries / 2, grads[0][6 * rank : 6 * rank + 6])
        torch.testing.assert_close(d_keys / 2, grads[1][6 * rank : 6 * rank + 6])


# ---------------------------------------------------------------------------------------------------- the command
def test_a_run_with_in_batch_negatives_resumes_with_its_estimator(tmp_path):
    run, train, valid = case("mlp", "uniform", "sampler.name=in_batch", "training.epochs=1", "head.num_samples=20")
    assert run.check().resolved().sampler.base == "uniform"
    trainer = Trainer(run, train, valid, tmp_path / "run")
    assert isinstance(trainer.head.sampler, InBatch)
    assert trainer.fit().status == "finished"
    clock = int(trainer.head.sampler.frequency.clock)
    assert clock == len(train)
    again = Trainer.resume(tmp_path / "run", train, valid, settings=["training.epochs=2"])
    assert int(again.head.sampler.frequency.clock) == clock
    assert again.fit().status == "finished"
    assert int(again.head.sampler.frequency.clock) == 2 * clock
    with pytest.raises(ConfigError, match="shared must be true"):
        config.override(Config(), ["sampler.name=in_batch", "head.shared=false"]).check()


def test_a_refused_batch_teaches_the_estimator_nothing():
    sampler = sx.samplers.InBatch(10)
    before = sampler.frequency.state_dict()
    before = {name: value.clone() for name, value in before.items()}
    with pytest.raises(IndexError, match="in_batch: targets must be below 10, got 10"):
        sampler.sample(None, 0, targets=torch.tensor([1, 10]))
    assert all(torch.equal(value, before[name]) for name, value in sampler.frequency.state_dict().items())
