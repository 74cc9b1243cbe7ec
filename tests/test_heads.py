"""`SampledClassifier` in training: the loss on its draws, gradients, reproducibility, memory."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from head_cases import B, C, D, batch, dense_logits, make
from torch import nn

import samplex_cuda as sx
from samplex_cuda import demo, prediction


# ------------------------------------------------------------------------------------------------ training
class Spy(sx.samplers.Uniform):
    """Records what the head asks for."""

    def sample(self, h, num_samples, **options):
        self.asked = {"h": h, "num_samples": num_samples, **options}
        self.draw = super().sample(h, num_samples, **options)
        return self.draw


@pytest.mark.parametrize("shared", [False, True])
def test_training_loss_is_the_functional_on_the_draw(backend, shared):
    sampler = Spy(C)
    class_weight = torch.rand(C)
    head = make(
        sampler=sampler, shared=shared, scale=1.3, label_smoothing=0.1, class_weight=class_weight, ignore_index=3
    ).to(backend.device)
    h, y = batch()
    y[1] = 3
    h, y = h.to(backend.device), y.to(backend.device)
    offsets, known = torch.arange(B + 1, device=backend.device), torch.arange(B, device=backend.device) + 10
    loss = head(h, y, positives=(offsets, known), key=sx.Key(1))
    expected = sx.functional.sampled_softmax(
        h, head.weight, y, sampler.draw.ids, sampler.draw.log_q, head.bias, scale=1.3, label_smoothing=0.1,
        class_weight=head.class_weight, ignore_index=3, positives=(offsets, known),
    )  # fmt: skip
    assert torch.equal(loss, expected)
    assert sampler.draw.ids.shape == ((20,) if shared else (B, 20))
    if shared:
        assert sampler.asked.get("exclude") is None
    else:
        assert sampler.asked["exclude"].tolist() == [-1 if i == 1 else int(t) for i, t in enumerate(y)]


def test_per_row_draws_leave_the_targets_out():
    sampler = Spy(4)
    head = make(4, sampler=sampler, num_samples=200)
    y = torch.tensor([[0, 2], [3, -100], [-100, -100]])
    head(torch.randn(3, D), y).backward()
    seen = [set(row.tolist()) for row in sampler.draw.ids]
    assert seen == [{1, 3}, {0, 1, 2}, {0, 1, 2, 3}]
    torch.testing.assert_close(sampler.draw.log_q[0].exp(), torch.full((200,), 0.5))


def test_features_and_context_reach_the_sampler():
    sampler = Spy(C)
    head = make(sampler=sampler)
    h, y = torch.randn(2, 3, D, requires_grad=True), torch.randint(C, (2, 3))
    features, context = torch.randn(2, 3, 5), torch.arange(6)
    head(h, y, features=features, context=context, index=torch.arange(6))
    assert torch.equal(sampler.asked["h"], features.view(6, 5))
    assert sampler.asked["context"] is context
    head(h, y)
    assert torch.equal(sampler.asked["h"], h.detach().view(6, D))
    assert not sampler.asked["h"].requires_grad


@pytest.mark.stat
@pytest.mark.parametrize("shared", [False, True])
def test_sampled_loss_tends_to_the_full_softmax(shared):
    sampler = sx.samplers.LogUniform(200)
    head = make(200, sampler=sampler, shared=shared, scale=3.0)
    h, y = batch(rows=64, num_classes=200)
    exact = head.eval()(h, y).item()
    head.train()

    # Delta method: log of a mean of m draws lies below log of its expectation by variance / (2 m), to first order.
    s = dense_logits(head, h)
    q = sampler.log_prob_all()[0].double().exp().repeat(64, 1)
    if not shared:
        q = q / (1 - q.gather(1, y.unsqueeze(1)))
    negative = torch.ones_like(s).scatter_(1, y.unsqueeze(1), 0.0)
    z = (s.exp() * negative).sum(1)
    variance = ((2 * s).exp() / q * negative).sum(1) - z.square()
    bias = -(variance / s.exp().sum(1).square()).mean().item() / 2

    gap, error = {}, {}
    for m in (4, 64, 4096):
        head.num_samples = m
        with torch.no_grad():
            losses = torch.stack([head(h, y, key=sx.Key(9, i)).double() for i in range(50)])
        gap[m] = losses.mean().item() - exact
        error[m] = losses.std().item() / math.sqrt(50)
    assert gap[4] < gap[64] < -4 * error[64]
    assert error[4096] < 0.01
    assert abs(gap[4096] - bias / 4096) < 3 * error[4096]


class Everything(sx.samplers.Uniform):
    """Draws each class it may draw once: the sampled normalizer is then the full one, exactly."""

    def sample(self, h, num_samples, *, shared=False, exclude=None, **options):
        ids = torch.arange(self.num_classes)
        if not shared:
            ids = torch.stack([ids[ids != y] for y in exclude])
        return sx.Draw(ids, torch.full(ids.shape, -math.log(ids.shape[-1])))


@pytest.mark.parametrize("shared", [False, True])
def test_drawing_everything_is_the_full_softmax(shared):
    head = make(30, sampler=Everything(30), shared=shared, sparse=False, scale=2.0, dtype=torch.float64)
    h, y = batch(rows=5, num_classes=30, requires_grad=True, dtype=torch.float64)
    loss = head(h, y)
    loss.backward()
    sampled = [loss, h.grad, head.weight.grad, head.bias.grad]
    h, linear = h.detach().clone().requires_grad_(), copy.deepcopy(head.linear())
    linear.zero_grad()
    full = F.cross_entropy(2.0 * linear(h), y)
    full.backward()
    # log_q is fp32: its rounding is what is left.
    for got, expected in zip(sampled, [full, h.grad, linear.weight.grad, linear.bias.grad], strict=True):
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-6)


def test_sparse_and_dense_gradients_agree():
    h, y = batch()
    grads = []
    for sparse in (True, False):
        torch.manual_seed(3)
        head = make(sparse=sparse)
        head(h, y, key=sx.Key(4)).backward()
        assert head.weight.grad.is_sparse == head.bias.grad.is_sparse == sparse
        grads.append([head.weight.grad, head.bias.grad])
    for got, expected in zip(*grads, strict=True):
        assert torch.equal(got.to_dense(), expected)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("class_weight", [None, torch.linspace(0.5, 2.0, C)])
def test_sample_weight(training, class_weight):
    head = make(class_weight=class_weight, reduction="none").train(training)
    h, y = batch()
    y[0] = -100
    w = torch.rand(B)
    rows = head(h, y, key=sx.Key(2))
    torch.testing.assert_close(head(h, y, sample_weight=w, key=sx.Key(2)), rows * w)
    head.reduction = "sum"
    torch.testing.assert_close(head(h, y, sample_weight=w, key=sx.Key(2)), (rows * w).sum())
    head.reduction = "mean"
    counted = w[1:] * (1.0 if class_weight is None else class_weight[y[1:]])
    torch.testing.assert_close(head(h, y, sample_weight=w, key=sx.Key(2)), (rows * w).sum() / counted.sum())
    ones = torch.ones(B)
    torch.testing.assert_close(head(h, y, sample_weight=ones, key=sx.Key(2)), head(h, y, key=sx.Key(2)))
    assert head(h, y, sample_weight=torch.zeros(B)).item() == 0.0


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("optimizer", ["SGD", "Adagrad", "SparseAdam"])
def test_training_lowers_the_exact_nll(shared, optimizer):
    head = make(sampler=sx.samplers.Unigram(torch.arange(1.0, C + 1)), shared=shared)
    h, y = batch(rows=64)
    before = head.eval()(h, y).item()
    head.train()
    step = getattr(torch.optim, optimizer)(
        head.parameters(), lr={"SGD": 2.0, "Adagrad": 0.3, "SparseAdam": 0.1}[optimizer]
    )
    with torch.sparse.check_sparse_tensor_invariants(enable=False):
        for i in range(80):
            step.zero_grad()
            head(h, y, key=sx.Key(0, i)).backward()
            step.step()
    assert head.eval()(h, y).item() < before - 2.0


def test_manual_seed_reproduces_a_loss_and_calls_differ():
    head = make()
    h, y = batch()
    torch.manual_seed(11)
    first, second = head(h, y), head(h, y)
    torch.manual_seed(11)
    assert torch.equal(head(h, y), first)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_autocast(dtype):
    head = make(dtype=dtype)
    body = nn.Linear(D, D)
    h, y = batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = head(body(h), y, key=sx.Key(0))
        exact = head.eval()(body(h), y)
    assert loss.dtype == exact.dtype == torch.float32
    loss.backward()
    assert head.weight.grad.dtype == dtype
    hidden = body(h).to(torch.bfloat16)
    torch.testing.assert_close(exact.double(), F.cross_entropy(dense_logits(head, hidden), y), atol=2e-2, rtol=0)


def test_double_precision_head_with_class_weights():
    head = make(class_weight=torch.rand(C), dtype=torch.float64)
    h, y = batch(dtype=torch.float64)
    loss = head(h, y)
    assert loss.dtype == torch.float64
    loss.backward()
    assert head.weight.grad.dtype == torch.float64


@pytest.mark.parametrize("shared", [False, True])
def test_compiles_in_one_graph(shared):
    torch._dynamo.reset()
    head = make(shared=shared)
    compiled = torch.compile(head, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (5, 9):
        h, y = batch(rows=rows, requires_grad=True)
        key = sx.Key(3, rows).reserve()
        loss = compiled(h, y, key=key)
        loss.backward()
        got = [h.grad, head.weight.grad.to_dense(), head.bias.grad.to_dense()]
        head.zero_grad()
        h.grad = None
        expected = head(h, y, key=key)
        expected.backward()
        torch.testing.assert_close(loss, expected)
        for mine, theirs in zip(got, [h.grad, head.weight.grad.to_dense(), head.bias.grad.to_dense()], strict=True):
            torch.testing.assert_close(mine, theirs)
        head.zero_grad()
    # Without a key the draw comes from torch's generator, inside the graph: two calls draw twice.
    h, y = batch()
    assert not torch.equal(compiled(h, y), compiled(h, y))


# ------------------------------------------------------------------------------------------------ memory
def largest_allocation(run):
    """Bytes of the largest single allocation torch makes while `run` runs."""
    from torch._C._profiler import _EventType

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    largest, stack = 0, list(profile.profiler.kineto_results.experimental_event_tree())
    while stack:
        event = stack.pop()
        stack.extend(event.children)
        if event.tag == _EventType.Allocation:
            largest = max(largest, event.extra_fields.alloc_size)
    return largest


@pytest.mark.parametrize("autocast", [False, True])
def test_no_step_allocates_the_table(autocast):
    num_classes, dim = 50_000, 32
    head = make(num_classes, dim=dim, num_samples=8)
    body = nn.Linear(dim, dim)
    optimizer = torch.optim.Adagrad([*body.parameters(), *head.parameters()], lr=0.1)
    h, y = batch(rows=4, num_classes=num_classes, dim=dim)

    def step():
        with torch.sparse.check_sparse_tensor_invariants(enable=False):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                loss = head(body(h), y)
            loss.backward()
            optimizer.step()

    step()
    # Not even C numbers of one byte.
    assert 0 < largest_allocation(step) < num_classes
    # The measure itself: a dense gradient is seen.
    head.sparse = False
    assert largest_allocation(lambda: head(h, y).backward()) >= 4 * num_classes * dim


def test_a_step_over_a_million_classes_stays_small():
    num_classes, dim = 1_000_000, 64
    head = make(num_classes, dim=dim, num_samples=32)
    h, y = batch(rows=32, num_classes=num_classes, dim=dim)
    head(h, y).backward()
    head.zero_grad()
    memory = demo._PeakMemory(torch.device("cpu"))
    memory.start()
    head(h, y).backward()
    memory.stop()
    if memory.peak is None:
        pytest.skip("this system does not tell the peak memory of a process")
    assert memory.peak < num_classes * dim  # a quarter of the table's bytes


def test_topk_holds_no_more_than_a_chunk():
    head = make(20_000, dim=8)
    h = torch.randn(64, 8)
    # The largest is an int64 for each element of a chunk; [B, C] would be 80 times the chunk.
    assert largest_allocation(lambda: head.topk(h, 5, chunk_size=256)) <= 64 * 256 * 8
    y = torch.randint(20_000, (64,))
    nll = lambda: prediction.exact_nll(h, head.weight, y, head.bias, chunk_size=256)  # noqa: E731
    assert largest_allocation(nll) <= 64 * 256 * 8
