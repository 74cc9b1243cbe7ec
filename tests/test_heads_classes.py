"""Class tables that change in training: `resize`, `add_classes`, `retire_classes`, and samplers over live classes."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

import samplex_cuda as sx

CLASSES, DIM, BATCH, DRAWS = 40, 8, 6, 12
OPTIMIZERS = {
    "sgd": lambda p: sx.optim.RowSGD(p, lr=0.1, momentum=0.9),
    "adagrad": lambda p: sx.optim.RowAdagrad(p, lr=0.1, initial_accumulator_value=0.5),
    "rowwise": lambda p: sx.optim.RowAdagrad(p, lr=0.1, rowwise=True),
    "adam": lambda p: sx.optim.RowAdam(p, lr=0.1),
}


def make_head(sampler=None, classes=CLASSES, **options):
    torch.manual_seed(0)
    return sx.SampledClassifier(DIM, classes, sampler or sx.samplers.Uniform(classes), DRAWS, **options)


def batch(classes=CLASSES, step=0):
    g = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, DIM, generator=g), torch.randint(classes, (BATCH,), generator=g)


def step(head, optimizer=None, classes=CLASSES, number=0, key=None):
    h, y = batch(classes, number)
    head(h, y, key=key or sx.Key(number)).backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_larger_table_goes_on_as_if_it_had_always_been_so(name, fused):
    """Rows and state that were there stay: training on old classes continues as in a head that had the rows at once."""
    small, large = make_head(), make_head(classes=CLASSES + 10)
    with torch.no_grad():
        large.weight[:CLASSES], large.bias[:CLASSES] = small.weight, small.bias
    optimizers = [OPTIMIZERS[name](head.parameters()) for head in (small, large)]
    if fused:
        small.fuse_optimizer(optimizers[0])
        large.fuse_optimizer(optimizers[1])
    h, y = batch()
    draw = sx.samplers.Uniform(CLASSES).sample(h, DRAWS, exclude=y, key=sx.Key(1))

    def go(head, optimizer):
        loss = sx.functional.sampled_softmax(h, head.weight, y, draw.ids, draw.log_q, head.bias)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    weight = small.weight
    for head, optimizer in zip((small, large), optimizers, strict=True):
        go(head, optimizer)
    small.resize(CLASSES + 10, optimizer=None if fused else optimizers[0])
    assert small.weight is weight
    assert small.sampler.num_classes == CLASSES + 10
    for head, optimizer in zip((small, large), optimizers, strict=True):
        go(head, optimizer)
    torch.testing.assert_close(small.weight[:CLASSES], large.weight[:CLASSES], rtol=0, atol=0)
    torch.testing.assert_close(small.bias[:CLASSES], large.bias[:CLASSES], rtol=0, atol=0)
    for key, table in optimizers[0].state[small.weight].items():
        if isinstance(table, torch.Tensor) and table.dim():
            assert torch.equal(table, optimizers[1].state[large.weight][key])
    step(small, None if fused else optimizers[0], CLASSES + 10, 3)  # new classes train
    assert small.eval().log_prob(h).shape == (BATCH, CLASSES + 10)


def test_new_rows_start_as_those_of_a_linear_layer():
    head = make_head()
    before = head.weight.detach().clone()
    head.resize(4000)
    assert torch.equal(head.weight[:CLASSES], before)
    new = head.weight.detach()[CLASSES:]
    assert float(new.abs().max()) <= DIM**-0.5
    assert float(new.std()) == pytest.approx((DIM * 3) ** -0.5, rel=0.05)
    head.resize(10)
    assert head.weight.shape == (10, DIM)
    assert head.bias.shape == (10,)
    assert torch.equal(head.weight, before[:10])


SAMPLERS = {
    "uniform": lambda: sx.samplers.Uniform(CLASSES),
    "log_uniform": lambda: sx.samplers.LogUniform(CLASSES),
    "unigram": lambda: sx.samplers.Unigram(torch.arange(1.0, CLASSES + 1), power=0.5),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_samplers_over_live_classes_are_conditioned_on_them(name):
    sampler = SAMPLERS[name]()
    live = torch.ones(CLASSES, dtype=torch.bool)
    live[torch.tensor([0, 5, 39])] = False
    whole = sampler.log_prob_all()[0].double().exp() * live
    only = sampler.over(CLASSES, live)
    torch.testing.assert_close(only.log_prob_all()[0].double().exp(), whole / whole.sum(), rtol=1e-6, atol=0)
    drawn = only.sample(None, 20_000, shared=True, key=sx.Key(0)).ids
    assert bool(live[drawn].all())
    assert len(drawn.unique()) == int(live.sum())
    again = only.over(CLASSES)  # those that were out weigh as much as the rarest
    found = again.log_prob_all()[0]
    assert bool(found.isfinite().all())
    torch.testing.assert_close(found[0], found.min())


@pytest.mark.parametrize("name", SAMPLERS)
def test_samplers_are_resized_in_place(name):
    sampler = SAMPLERS[name]()
    before = sampler.log_prob_all()[0].double()
    sampler.collision()
    sampler.resize(CLASSES + 5)
    now = sampler.log_prob_all()[0].double()
    assert now.shape == (CLASSES + 5,)
    assert sampler.num_classes == CLASSES + 5
    torch.testing.assert_close(now.exp().sum(), torch.tensor(1.0, dtype=torch.float64), atol=1e-6, rtol=0)
    torch.testing.assert_close(now[:CLASSES].diff(), before.diff(), atol=1e-5, rtol=0)
    torch.testing.assert_close(sampler.collision(), float(now.exp().square().sum()), rtol=1e-4, atol=0)
    sampler.resize(7)
    assert sampler.log_prob_all().shape == (1, 7)
    for wrong in (0, -1, 1 << 60):
        with pytest.raises(ValueError, match="num_classes must be an int"):
            sampler.resize(wrong)
    assert sampler.num_classes == 7


def test_a_unigram_keeps_classes_of_count_zero_out():
    sampler = sx.samplers.Unigram([4.0, 0.0, 2.0])
    sampler.resize(4)
    torch.testing.assert_close(sampler.log_prob_all()[0].exp(), torch.tensor([0.5, 0.0, 0.25, 0.25]))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", SAMPLERS)
def test_retired_classes_are_nowhere(name, shared):
    head = make_head(SAMPLERS[name](), shared=shared)
    head.fuse_optimizer(sx.optim.RowAdagrad(head.parameters(), lr=0.1))
    step(head)
    out = torch.tensor([2, 11, 30])
    head.retire_classes(out)
    assert head.num_live == CLASSES - 3
    state = head.fused.optimizer.state[head.weight]["sum"]
    assert not bool(head.weight[out].any())
    assert not bool(state[out].any())
    live = torch.ones(CLASSES, dtype=torch.bool)
    live[out] = False
    ids = live.nonzero().squeeze(1)
    for number in range(5):
        h, y = batch(len(ids), number)
        head(h, ids[y]).backward()
    assert not bool(head.weight[out].any())
    head.eval()
    h, y = batch(len(ids))
    logits = F.linear(h, head.weight, head.bias)[:, live].detach()
    torch.testing.assert_close(head.log_prob(h)[:, live], logits.log_softmax(1))
    assert bool((head.log_prob(h)[:, ~live] == -torch.inf).all())
    torch.testing.assert_close(head(h, ids[y]), F.cross_entropy(logits, y))
    assert torch.equal(head.topk(h, len(ids))[1].sort(1).values, ids.expand(BATCH, -1))
    for mode in (True, False):
        head.train(mode)
        with pytest.raises(IndexError, match="y must not be a retired class, got 11"):
            head(h, torch.tensor([0, 1, 11, 3, 4, 5]))


def test_free_slots_are_used_first():
    head = make_head()
    optimizer = sx.optim.RowAdam(head.parameters(), lr=0.1)
    step(head, optimizer)
    head.retire_classes(torch.tensor([30, 4]), optimizer=optimizer)
    other = head.weight.detach().clone()
    assert torch.equal(head.add_classes(1, optimizer=optimizer), torch.tensor([4]))
    assert head.live is not None
    assert head.num_classes == CLASSES
    assert bool(head.weight[4].any())
    assert not bool(optimizer.state[head.weight]["exp_avg"][4].any())
    keep = torch.arange(CLASSES) != 4
    assert torch.equal(head.weight[keep], other[keep])
    assert torch.equal(head.add_classes(3, optimizer=optimizer), torch.tensor([30, CLASSES, CLASSES + 1]))
    assert head.live is None
    assert head.num_classes == CLASSES + 2
    assert bool(head.sampler.log_prob_all().isfinite().all())
    step(head, optimizer, CLASSES + 2, 2)


def test_retired_negatives_of_the_caller_are_refused():
    head = make_head()
    head.fuse_optimizer(sx.optim.RowAdagrad(head.parameters(), lr=0.1))
    head.retire_classes(torch.tensor([3]))
    h, y = batch()
    y = torch.where(y == 3, 4, y)
    before = {name: t.clone() for name, t in head.state_dict().items()}
    ragged = (torch.arange(BATCH + 1), torch.full((BATCH,), 3))
    for given in (torch.tensor([1, 3]), torch.full((BATCH, 2), 3), ragged):
        with pytest.raises(IndexError, match="negatives must not be retired classes, got 3"):
            head(h, y, negatives=sx.Negatives(given))
    with pytest.raises(IndexError, match="negatives must not be retired classes, got 3"):
        head(h, y, hard=torch.full((BATCH, 2), 3))
    assert all(torch.equal(t, before[name]) for name, t in head.state_dict().items())
    head(h, y, negatives=sx.Negatives(torch.tensor([1, 2]))).backward()
    assert not torch.equal(head.weight, before["weight"])


def test_retired_classes_are_in_the_state_dict():
    head = make_head()
    head.retire_classes(torch.tensor([5]))
    other = make_head(sx.samplers.Unigram(torch.ones(CLASSES)))
    other.load_state_dict(head.state_dict())
    assert other.live is not None
    assert not bool(other.live[5])
    h, _y = batch()
    torch.testing.assert_close(other.eval().log_prob(h), head.eval().log_prob(h))
    fresh = make_head()
    other.sampler = sx.samplers.Uniform(CLASSES)
    other.load_state_dict(fresh.state_dict())
    assert other.live is None
    assert copy.deepcopy(head).num_live == CLASSES - 1


def test_the_full_softmax_leaves_them_out():
    head = sx.SampledClassifier(DIM, CLASSES, loss="full_softmax", dtype=torch.float64)
    head.retire_classes(torch.tensor([7]))
    h, y = batch()
    h, y = h.double(), torch.where(y == 7, 8, y)
    loss = head(h, y)
    loss.backward()
    keep = torch.arange(CLASSES) != 7
    weight, bias = (p.detach()[keep].requires_grad_() for p in (head.weight, head.bias))
    want = F.cross_entropy(F.linear(h, weight, bias), y - (y > 7).long())
    want.backward()
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(head.weight.grad[keep], weight.grad)
    torch.testing.assert_close(head.bias.grad[keep], bias.grad)
    assert not bool(head.weight.grad[7].any())


def test_class_weights_grow():
    head = make_head(class_weight=torch.full((CLASSES,), 2.0))
    head.resize(CLASSES + 2)
    assert head.class_weight.tolist() == [2.0] * CLASSES + [1.0, 1.0]
    step(head, None, CLASSES + 2)


def test_what_is_refused_changes_nothing():
    head = make_head()
    before, uniform = head.weight.detach().clone(), sx.samplers.Uniform(CLASSES)
    bad = [
        (ValueError, "must be", lambda: head.resize(0)),
        (ValueError, "ids must be", lambda: head.retire_classes(torch.tensor([1.0]))),
        (IndexError, r"ids must be in \[0, 40\), got 40", lambda: head.retire_classes(torch.tensor([40]))),
        (ValueError, "leave at least one live class", lambda: head.retire_classes(torch.arange(CLASSES))),
        (ValueError, "num_classes = 50, got 45", lambda: head.resize(50, sampler=sx.samplers.Uniform(45))),
        (ValueError, "must not draw retired", lambda: head.retire_classes(torch.tensor([1]), sampler=uniform)),
        (TypeError, "optimizer must be a torch optimizer", lambda: head.resize(50, optimizer=["sgd"])),
    ]  # fmt: skip
    for kind, match, call in bad:
        with pytest.raises(kind, match=match):
            call()
        assert head.num_classes == CLASSES
        assert torch.equal(head.weight, before)
        assert head.live is None
    step(head)
    with pytest.raises(ValueError, match="gradients must be None"):
        head.resize(50)
    head.weight.grad = head.bias.grad = None
    head.retire_classes(torch.tensor([1]))
    with pytest.raises(ValueError, match="which is retired already"):
        head.retire_classes(torch.tensor([0, 1]))
    noise = make_head(loss="negative_sampling")
    with pytest.raises(ValueError, match="loss must have scores that do not depend"):
        noise.resize(50)
    fused = make_head()
    fused.fuse_optimizer(sx.optim.RowSGD(fused.parameters(), lr=0.1), accumulate=2)
    step(fused)
    with pytest.raises(RuntimeError, match="accumulated backward"):
        fused.resize(50)


def test_a_follower_starts_anew_with_a_new_sampler():
    head = make_head(sx.samplers.Quadratic(torch.zeros(CLASSES, DIM)), bias=False)
    step(head)
    head.weight.grad = None
    head.resize(50, sampler=sx.samplers.Quadratic(torch.zeros(50, DIM)))
    h, y = batch(50)
    head(h, y).backward()
    assert torch.equal(head.sampler.rows, head.weight)
