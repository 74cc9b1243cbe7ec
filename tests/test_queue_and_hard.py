"""Keys of past batches as negatives, and hard negatives that join the draws of a sampler."""

from __future__ import annotations

import math

import pytest
import torch
from head_cases import dense_logits, make
from test_in_batch import wanted
from training_cases import case

import samplex_cuda as sx
from samplex_cuda.heads.hard import join_losses
from samplex_cuda.samplers import KeyQueue, Tree, Uniform
from samplex_cuda.training import Config, ConfigError, Trainer, config

C, D, B = 60, 8, 7


# ---------------------------------------------------------------------------------------------------- the queue
def test_the_oldest_leave_first():
    queue = KeyQueue(5, 2)
    queue.push(torch.arange(6.0).view(3, 2), torch.arange(3), torch.full((3,), -1.0))
    assert queue.held().ids.tolist() == [0, 1, 2]
    queue.push(torch.ones(4, 2), torch.arange(3, 7))
    assert sorted(queue.held().ids.tolist()) == [2, 3, 4, 5, 6]
    assert queue.held().log_q[queue.ids == 2].item() == -1.0
    queue.push(torch.arange(24.0).view(12, 2), torch.arange(12))  # longer than the queue
    held = queue.held()
    assert sorted(held.ids.tolist()) == [7, 8, 9, 10, 11]
    assert torch.equal(held.keys, torch.stack([2.0 * held.ids, 2.0 * held.ids + 1], 1))


def test_a_queue_survives_a_state_dict():
    queue, again = KeyQueue(5, 2), KeyQueue(5, 2)
    queue.push(torch.randn(7, 2), torch.arange(7))
    again.load_state_dict(queue.state_dict())
    for one in (queue, again):
        one.push(torch.ones(2, 2), torch.tensor([20, 21]))
    assert len(again) == 5
    assert torch.equal(queue.ids, again.ids)


@pytest.mark.parametrize("corrected", [True, False])
def test_its_keys_are_negatives_with_their_log_q(corrected):
    g = torch.Generator().manual_seed(0)
    queries, keys, old = (torch.randn(n, D, dtype=torch.float64, generator=g) for n in (6, 6, 9))
    queries.requires_grad_(), keys.requires_grad_()
    ids, old_ids = torch.randint(5, (6,), generator=g), torch.randint(5, (9,), generator=g)
    log_q, old_q = -torch.rand(6, generator=g), -torch.rand(9, generator=g)
    queue = KeyQueue(20, D, dtype=torch.float64)
    queue.push(old, old_ids, old_q)
    loss = sx.functional.contrastive(queries, keys, key_ids=ids, log_q=log_q if corrected else None, queue=queue)
    every = torch.cat([keys, old])
    q = torch.cat([log_q, old_q]).double() if corrected else torch.full((15,), -math.log(14)).double()
    want = wanted(queries, every, torch.cat([ids, old_ids]), q, torch.arange(6))
    torch.testing.assert_close(loss, want)
    inputs = (queries, keys)
    for a, b in zip(torch.autograd.grad(loss, inputs), torch.autograd.grad(want, inputs), strict=True):
        torch.testing.assert_close(a, b)


def test_a_queue_of_another_width_is_refused_and_stays():
    queue = KeyQueue(5, D + 1)
    q, ids = torch.randn(3, D), torch.arange(3)
    with pytest.raises(ValueError, match=r"contrastive: keys must be \[n, 9\], the width of the queue, got \[3, 8\]"):
        sx.functional.contrastive(q, q, key_ids=ids, queue=queue)
    with pytest.raises(ValueError, match=r"KeyQueue: keys must be \[n, 9\]"):
        queue.push(q, ids)
    with pytest.raises(ValueError, match=r"log_q must be \[3\]"):
        KeyQueue(5, D).push(q, ids, torch.zeros(2))
    with pytest.raises(ValueError, match="queue must be None unless in-batch, with key_ids"):
        sx.functional.contrastive(q, q, queue=KeyQueue(5, D))
    assert len(queue) == 0


# ---------------------------------------------------------------------------------------------------- hard negatives
def test_joined_losses_are_those_of_one_normalizer():
    a = torch.tensor([0.0, 1e-9, 1e-4, 0.9, 1.1, 30.0, 200.0, 0.0, 150.0]).double().requires_grad_()
    b = torch.tensor([0.0, 1e-7, 2e-4, 0.8, 0.0, 31.0, 10.0, 90.0, 150.0]).double().requires_grad_()
    joined = join_losses(a, b)
    want = torch.stack([a, b, torch.zeros_like(a)]).detach()
    sign = torch.tensor([1.0, 1.0, -1.0])[:, None]
    top = want.amax(0)
    exact = top + ((want - top).exp() * sign).sum(0).log()
    torch.testing.assert_close(joined[3:], exact[3:])
    torch.testing.assert_close(joined[:3], (a + b)[:3].detach(), rtol=1e-3, atol=1e-12)
    joined.sum().backward()
    torch.testing.assert_close(a.grad, (a - joined).exp().detach(), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(b.grad, (b - joined).exp().detach(), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_they_join_the_draws_in_one_normalizer(shared, fused):
    head = make(C, D, 12, sampler=Uniform(C), shared=shared, dtype=torch.float64)
    if fused:
        head.fuse_optimizer(sx.optim.RowSGD(head.parameters(), lr=1.0))
    h, y = torch.randn(B, D, dtype=torch.float64, requires_grad=True), torch.randint(C, (B,))
    hard = torch.randint(C, (B, 4))
    hard[0, 0] = y[0]  # takes no part
    before = head.weight.detach().clone()
    loss = head(h, y, hard=hard, key=sx.Key(1))
    draw = head._draw(head.spec(), h, y, None, None, sx.Key(1))[0]
    weight = before.clone().requires_grad_()
    s = h @ weight.T + head.bias.detach()
    ids = draw.ids.expand(B, -1) if shared else draw.ids
    log_q = draw.log_q.double().expand(B, -1) if shared else draw.log_q.double()
    others = torch.cat([s.gather(1, ids) - log_q - math.log(ids.shape[1]), s.gather(1, hard)], 1)
    others = others.masked_fill(torch.cat([ids, hard], 1) == y[:, None], -torch.inf)
    own = s.gather(1, y[:, None])
    want = (torch.cat([own, others], 1).logsumexp(1) - own[:, 0]).mean()
    torch.testing.assert_close(loss, want, rtol=1e-6, atol=1e-8)
    loss.backward()
    got, h.grad = h.grad, None
    want.backward()
    torch.testing.assert_close(got, h.grad, rtol=1e-5, atol=1e-8)
    moved = before - head.weight.detach() if fused else head.weight.grad.to_dense()
    torch.testing.assert_close(moved, weight.grad, rtol=1e-5, atol=1e-8)


class Flat:
    """A stand-in for an index: exact search over the rows of the moment."""

    made = 0

    def __init__(self, head):
        Flat.made += 1
        self.weight, self.bias = head.weight.detach().clone(), head.bias.detach().clone()

    def topk(self, h, k):
        return (h @ self.weight.T + self.bias).topk(k, dim=1)


@pytest.mark.parametrize("source", ["exact", "pool", "tree", "function"])
def test_mined_ones_are_the_best_besides_the_targets(source):
    sampler = Uniform(C)
    if source == "tree":
        sampler = Tree.fit(torch.randn(300, D), torch.randint(C, (300,)), num_classes=C, dim=4, progress=False)
    head = make(C, D, 5, sampler=sampler)
    options = {"pool": {"pool": C}, "tree": {"beam": C}}.get(source, {})
    miner = sx.HardNegatives(head, 6, Flat if source == "function" else source, **options)
    h, y = torch.randn(B, D), torch.randint(C, (B, 2))
    y[0, 1] = -100
    hard = miner.mine(h, y)
    s = dense_logits(head, h).masked_fill(torch.zeros(B, C).scatter(1, y.clamp(min=0), 1.0).bool(), -torch.inf)
    s[0, 0] = dense_logits(head, h)[0, 0] if 0 not in y[0].tolist() else -torch.inf
    assert torch.equal(hard, s.topk(6, dim=1).indices)


def test_an_index_is_made_anew_every_so_many_calls():
    head = make(C, D, 5)
    Flat.made = 0
    miner = sx.HardNegatives(head, 3, Flat, refresh=4)
    h, y = torch.randn(B, D), torch.randint(C, (B,))
    for _ in range(9):
        miner.mine(h, y)
    assert Flat.made == 3


def test_rows_with_few_candidates_are_filled_with_their_target():
    head = make(3, D, 2, sampler=Uniform(3), reduction="none")
    h, y = torch.randn(B, D), torch.randint(3, (B,))
    hard = sx.HardNegatives(head, 3, "exact").mine(h, y)
    assert bool((hard == y[:, None]).any(1).all())
    assert bool(head(h, y, hard=hard).isfinite().all())


def test_what_does_not_fit_is_refused():
    head, (h, y) = make(C, D, 5), (torch.randn(B, D), torch.randint(C, (B,)))
    with pytest.raises(ValueError, match="source must be one of"):
        sx.HardNegatives(head, 3, "nearest")
    with pytest.raises(ValueError, match=r"hard must be \[7, k\]"):
        head(h, y, hard=y)
    with pytest.raises(TypeError, match="must be int64"):
        head(h, y, hard=torch.zeros(B, 3))
    smoothed = make(C, D, 5, label_smoothing=0.1)
    with pytest.raises(ValueError, match="hard must be None unless"):
        smoothed(h, y, hard=y[:, None])
    with pytest.raises(ValueError, match="hard must be None unless"):
        head(h, y[:, None].expand(B, 2), hard=y[:, None])


def test_a_run_with_hard_negatives(tmp_path):
    run, train, valid = case("mlp", "unigram", "head.hard=4", "head.hard_pool=30", "training.epochs=1")
    trainer = Trainer(run, train, valid, tmp_path / "run")
    assert trainer.fit().status == "finished"
    with pytest.raises(ConfigError, match="hard must be 0 with"):
        config.override(Config(), ["head.hard=4", "head.loss=nce"]).check()
    with pytest.raises(ConfigError, match="hard_source must be"):
        config.override(Config(), ["head.hard=4", "head.hard_source=tree"]).check()
