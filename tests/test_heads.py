"""`SampledClassifier` and the chunked exact helpers behind it, against plain torch on the full softmax."""

from __future__ import annotations

import copy
import io
import math
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import samplex_cuda as sx
from samplex_cuda import demo, prediction

C, D, B = 97, 12, 7


def make(num_classes=C, dim=D, num_samples=20, sampler=None, **options):
    sampler = sx.samplers.LogUniform(num_classes) if sampler is None else sampler
    return sx.SampledClassifier(dim, num_classes, sampler, num_samples, **options)


def batch(rows=B, num_classes=C, dim=D, **options):
    return torch.randn(rows, dim, **options), torch.randint(num_classes, (rows,))


def dense_logits(head, h):
    s = head.scale * (h.double() @ head.weight.double().t() + (0.0 if head.bias is None else head.bias.double()))
    return s.abs() if head.absolute else s


# ------------------------------------------------------------------------------------------------ eval: exact NLL


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_eval_is_cross_entropy(reduction, weighted, bias):
    class_weight = torch.rand(C) if weighted else None
    head = make(bias=bias, reduction=reduction, class_weight=class_weight, scale=1.7).eval()
    h, y = batch(rows=31)
    y[4] = y[30] = -100
    expected = F.cross_entropy(1.7 * head.linear()(h), y, weight=class_weight, reduction=reduction)
    loss = head(h, y)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize("chunk_size", [1, 7, 32, 96, 97, 98, None])
def test_exact_nll_is_the_same_for_every_chunk_size(chunk_size):
    h, y = batch(dtype=torch.float64)
    weight, bias = torch.randn(C, D, dtype=torch.float64), torch.randn(C, dtype=torch.float64)
    nll = prediction.exact_nll(h, weight, y, bias, chunk_size=chunk_size)
    torch.testing.assert_close(nll, F.cross_entropy(h @ weight.t() + bias, y, reduction="none"))
    lse = prediction.exact_lse(h, weight, bias, chunk_size=chunk_size)
    torch.testing.assert_close(lse, (h @ weight.t() + bias).logsumexp(1))


def test_row_blocks_join(monkeypatch):
    monkeypatch.setattr(prediction, "_BLOCK_ROWS", 4)
    head = make().eval()
    h, y = batch(rows=11)
    torch.testing.assert_close(head(h, y), F.cross_entropy(head.linear()(h), y))
    torch.testing.assert_close(head.log_prob(h), head.linear()(h).log_softmax(1))
    assert torch.equal(head.topk(h, 5)[1], head.linear()(h).topk(5)[1])


def test_eval_handles_large_and_confident_logits():
    head = make(scale=200.0, reduction="none").eval()
    h, _ = batch(rows=50)
    y = head.predict(h)
    nll = head(h, y)
    assert torch.isfinite(nll).all()
    assert (nll >= 0).all()
    torch.testing.assert_close(
        nll.double(), F.cross_entropy(dense_logits(head, h), y, reduction="none"), atol=1e-4, rtol=1e-4
    )


def test_eval_with_several_targets_and_class_weights():
    class_weight = torch.rand(C) + 0.1
    head = make(class_weight=class_weight, reduction="none").eval()
    h, _ = batch(rows=3)
    y = torch.tensor([[3, 5, -100], [8, -100, -100], [-100, -100, -100]])
    log_p = dense_logits(head, h).log_softmax(1)
    w = class_weight.double()
    first = -(w[3] * log_p[0, 3] + w[5] * log_p[0, 5]) / 2
    second = -w[8] * log_p[1, 8]
    expected = torch.stack([first, second, torch.zeros_like(first)])
    torch.testing.assert_close(head(h, y).double(), expected, atol=1e-5, rtol=1e-5)
    head.reduction = "mean"
    total = (w[3] + w[5]) / 2 + w[8]
    torch.testing.assert_close(head(h, y).double(), (first + second) / total, atol=1e-5, rtol=1e-5)


def test_eval_absolute_logits():
    head = make(absolute=True).eval()
    h, y = batch()
    torch.testing.assert_close(head(h, y).double(), F.cross_entropy(dense_logits(head, h), y), atol=1e-5, rtol=1e-5)
    assert torch.equal(head.predict(h), dense_logits(head, h).argmax(1))


def test_nan_stays_in_its_row():
    head = make(reduction="none").eval()
    h, y = batch()
    h[2, 3] = torch.nan
    others = [i for i in range(B) if i != 2]
    assert head(h, y).isnan().nonzero().flatten().tolist() == [2]
    logits, ids = head.topk(h, 3)
    assert logits[2].isnan().all()
    assert ids[2].tolist() == [0, 1, 2]
    assert torch.equal(ids[others], head.linear()(h[others]).topk(3)[1])


@pytest.mark.parametrize("training", [True, False])
def test_all_rows_ignored_or_no_rows(training):
    head = make().train(training)
    h, _ = batch()
    assert head(h, torch.full((B,), -100)).item() == 0.0
    assert head(h[:0], torch.empty(0, dtype=torch.int64)).item() == 0.0
    assert head.predict(h[:0]).shape == (0,)
    assert head.log_prob(h[:0]).shape == (0, C)


# ------------------------------------------------------------------------------------------------ predict and topk


def stable_topk(logits, k):
    values, ids = logits.sort(dim=-1, descending=True, stable=True)
    return values[..., :k], ids[..., :k]


@pytest.mark.parametrize("chunk_size", [1, 2, 5, 31, 96, 97, None])
@pytest.mark.parametrize("k", [1, 2, 6, 50, C])
def test_topk_with_ties_over_chunk_borders(chunk_size, k):
    # Small whole numbers: products are exact, so equal logits are equal bits, and there are many of them.
    h = torch.randint(-2, 3, (9, 4)).float()
    weight = torch.randint(-2, 3, (C, 4)).float()
    bias = torch.randint(-1, 2, (C,)).float()
    logits, ids = prediction.exact_topk(h, weight, k, bias, chunk_size=chunk_size)
    expected_logits, expected_ids = stable_topk(h @ weight.t() + bias, k)
    assert torch.equal(ids, expected_ids)
    assert torch.equal(logits, expected_logits)


def test_all_logits_equal_gives_the_first_ids():
    head = make()
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    h, _ = batch()
    assert torch.equal(head.topk(h, 5, chunk_size=3)[1], torch.arange(5).expand(B, 5))
    assert torch.equal(head.predict(h, chunk_size=3), torch.zeros(B, dtype=torch.int64))


def test_topk_and_predict_against_dense():
    head = make(scale=0.3)
    h, _ = batch(rows=40)
    logits, ids = head.topk(h, 10, chunk_size=13)
    expected, expected_ids = (0.3 * head.linear()(h)).topk(10)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(logits, expected)
    assert torch.equal(head.predict(h, chunk_size=13), expected_ids[:, 0])
    # A negative scale turns the order round.
    head.scale = -1.0
    assert torch.equal(head.predict(h), head.linear()(h).argmin(1))


@pytest.mark.parametrize("chunk_size", [10, None])
def test_log_prob(chunk_size):
    head = make(scale=2.0)
    h = torch.randn(2, 3, D)
    log_p = head.log_prob(h, chunk_size=chunk_size)
    assert log_p.shape == (2, 3, C)
    torch.testing.assert_close(log_p, (2.0 * head.linear()(h)).log_softmax(-1))
    torch.testing.assert_close(log_p.exp().sum(-1), torch.ones(2, 3))


def test_leading_dimensions():
    head = make(reduction="none")
    h, y = torch.randn(2, 3, D), torch.randint(C, (2, 3))
    key = sx.Key(5)
    loss = head(h, y, key=key)
    assert loss.shape == (2, 3)
    assert torch.equal(loss.flatten(), head(h.view(6, D), y.flatten(), key=sx.Key(5)))
    assert head(h, y.unsqueeze(-1)).shape == (2, 3)
    one = head(h[0, 0], y[0, 0])
    assert one.shape == ()
    head.eval()
    assert torch.equal(head(h, y).flatten(), head(h.view(6, D), y.flatten()))
    assert head.predict(h).shape == (2, 3)
    assert head.predict(h[0, 0]).shape == ()
    logits, ids = head.topk(h, 4)
    assert logits.shape == ids.shape == (2, 3, 4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_evaluation_sums_in_wide_types(dtype):
    head = make(dtype=dtype).eval()
    h, y = torch.randn(B, D).to(dtype), torch.randint(C, (B,))
    loss = head(h, y)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    expected = F.cross_entropy(dense_logits(head, h), y)
    torch.testing.assert_close(loss.double(), expected, atol=1e-5, rtol=1e-5)


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
        assert sampler.asked["exclude"] is None
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
    """Draws each class it may draw once: the sampled normaliser is then the full one, exactly."""

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


# ------------------------------------------------------------------------------------------------ parameters and state


@pytest.mark.parametrize("bias", [False, True])
def test_initial_values_are_those_of_linear(bias):
    torch.manual_seed(7)
    linear = nn.Linear(D, C, bias=bias)
    torch.manual_seed(7)
    head = make(bias=bias)
    assert torch.equal(head.weight, linear.weight)
    if bias:
        assert torch.equal(head.bias, linear.bias)
    else:
        assert head.bias is None
    bound = 1 / math.sqrt(D)
    assert head.weight.abs().max().item() <= bound


SAMPLERS = {
    "log_uniform": lambda: sx.samplers.LogUniform(C),
    "unigram": lambda: sx.samplers.Unigram(torch.arange(1.0, C + 1)),
}


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("nested", [False, True])
def test_state_of_linear_loads_strictly(sampler, nested):
    linear, head = nn.Linear(D, C), make(sampler=SAMPLERS[sampler](), class_weight=torch.rand(C))
    state = {name: t.clone() for name, t in head.sampler.state_dict().items()}
    if nested:
        source, model = nn.Sequential(nn.Linear(3, D), linear), nn.Sequential(nn.Linear(3, D), head)
        model.load_state_dict(source.state_dict())
    else:
        head.load_state_dict(linear.state_dict())
    assert torch.equal(head.weight, linear.weight)
    assert torch.equal(head.bias, linear.bias)
    assert head.sampler.state_dict().keys() == state.keys()
    assert all(torch.equal(t, state[name]) for name, t in head.sampler.state_dict().items())


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_state_loads_into_linear(sampler):
    head, linear = make(sampler=SAMPLERS[sampler]()), nn.Linear(D, C)
    linear.load_state_dict(head.linear().state_dict())
    assert torch.equal(head.weight, linear.weight)
    assert torch.equal(head.bias, linear.bias)
    other = nn.Linear(D, C)
    result = other.load_state_dict(head.state_dict(), strict=False)
    assert not result.missing_keys
    assert all(name.startswith("sampler.") for name in result.unexpected_keys)
    h, _ = batch()
    assert torch.equal(other(h), linear(h))


def test_linear_shares_the_parameters():
    head = make()
    linear = head.linear()
    assert linear.weight is head.weight
    assert linear.bias is head.bias
    assert make(bias=False).linear().bias is None


def test_own_state_round_trip_through_a_file():
    head = make(sampler=SAMPLERS["unigram"]())
    file = io.BytesIO()
    torch.save(head.state_dict(), file)
    file.seek(0)
    other = make(sampler=sx.samplers.Unigram(torch.ones(C)))
    other.load_state_dict(torch.load(file))
    h, y = batch()
    assert torch.equal(head(h, y, key=sx.Key(0)), other(h, y, key=sx.Key(0)))


def test_an_incomplete_state_is_still_an_error():
    head = make(sampler=SAMPLERS["unigram"]())
    state = head.state_dict()
    with pytest.raises(RuntimeError, match="Missing key"):
        head.load_state_dict({"weight": state["weight"]})
    some = {name: t for name, t in state.items() if name != "sampler.prefix"}
    assert len(some) < len(state)
    with pytest.raises(RuntimeError, match=r"sampler\.prefix"):
        head.load_state_dict(some)


def test_deepcopy_and_module_casts():
    head = make(class_weight=torch.rand(C))
    exact = head.class_weight.clone()
    other = copy.deepcopy(head).to(torch.bfloat16)
    assert other.weight.dtype == torch.bfloat16
    assert other.class_weight.dtype == torch.float32
    assert torch.equal(other.class_weight, exact)
    assert copy.deepcopy(head).double().class_weight.dtype == torch.float64
    assert head.weight.dtype == torch.float32
    h, y = batch()
    assert torch.isfinite(other(h.bfloat16(), y))


def test_repr():
    text = repr(make(scale=2.0, shared=True))
    assert f"in_features={D}, num_classes={C}, num_samples=20" in text
    assert "scale=2.0" in text
    assert "shared=True" in text
    assert "absolute" not in text
    assert "LogUniform" in text


# ------------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        (
            {"loss": "hinge"},
            ValueError,
            "SampledClassifier: loss must be one of sampled_softmax, negative_sampling, got 'hinge'",
        ),
        ({"reduction": "max"}, ValueError, "reduction must be one of mean, sum, none, got 'max'"),
        ({"num_samples": 0}, ValueError, "num_samples must be an int of at least 1, got 0"),
        ({"num_samples": 2.5}, ValueError, "num_samples must be an int of at least 1, got 2.5"),
        ({"num_classes": 0}, ValueError, "num_classes must be an int of at least 1, got 0"),
        ({"in_features": 0}, ValueError, "in_features must be an int of at least 1, got 0"),
        ({"sampler": sx.samplers.Uniform(C + 1)}, ValueError, f"sampler must have num_classes = {C}, got {C + 1}"),
        ({"sampler": "uniform"}, TypeError, "sampler must be a sampler of samplex_cuda.samplers, got 'uniform'"),
        ({"scale": math.nan}, ValueError, "scale must be finite, got nan"),
        ({"label_smoothing": 1.5}, ValueError, r"label_smoothing must be in \[0, 1\], got 1.5"),
        ({"class_weight": torch.ones(3)}, ValueError, rf"class_weight must be \[{C}\] float32, got \[3\] float32"),
        ({"dtype": torch.int64}, TypeError, "dtype must be floating point, got torch.int64"),
    ],
)
def test_bad_settings(options, error, text):
    settings = {
        "in_features": D, "num_classes": C, "sampler": sx.samplers.Uniform(C), "num_samples": 4, **options
    }  # fmt: skip
    with pytest.raises(error, match=text):
        sx.SampledClassifier(**settings)


@pytest.mark.parametrize("training", [True, False])
def test_bad_inputs(training):
    head = make().train(training)
    h, y = batch()
    for bad_h, bad_y, text in [
        (
            torch.randn(B, D + 1),
            y,
            rf"SampledClassifier: h must be \[\*, {D}\] floating point, got \[{B}, {D + 1}\] float32",
        ),
        (h.long(), y, rf"h must be \[\*, {D}\] floating point, got \[{B}, {D}\] int64"),
        (torch.tensor(1.0), y, r"h must be .* got \[\] float32"),
        (h, y[:-1], rf"y must be \[{B}\] or \[{B}, P\] int64 to fit h, got \[{B - 1}\] int64"),
        (h, y.int(), rf"y must be .* got \[{B}\] int32"),
        (h, y.view(B, 1, 1), rf"y must be .* got \[{B}, 1, 1\] int64"),
    ]:
        with pytest.raises(ValueError, match=text):
            head(bad_h, bad_y)
    with pytest.raises(ValueError, match=rf"sample_weight must be \[{B}\] floating point, got \[2\] float32"):
        head(h, y, sample_weight=torch.ones(2))
    with pytest.raises(ValueError, match=rf"features must be \[{B}, f\] to fit h, got \[2, 3\] float32"):
        head(h, y, features=torch.ones(2, 3))
    for bad in (C, -1, -101, 2**40):
        y[3] = bad
        with pytest.raises(IndexError, match=f"got {bad}"):
            head(h, y)


def test_topk_wants_a_possible_k():
    head = make()
    h, _ = batch()
    for k in (0, C + 1, -1, 2.0, True):
        with pytest.raises(ValueError, match=rf"SampledClassifier.topk: k must be an int in \[1, {C}\], got"):
            head.topk(h, k)
    with pytest.raises(ValueError, match="chunk_size must be at least 1, got 0"):
        head.topk(h, 1, chunk_size=0)
    with pytest.raises(ValueError, match=r"SampledClassifier.log_prob: h must be \[\*, 12\]"):
        head.log_prob(h[:, 1:])


def test_one_class():
    head = make(1, sampler=sx.samplers.Uniform(1), num_samples=3)
    h, y = torch.randn(4, D), torch.zeros(4, dtype=torch.int64)
    loss = head(h, y)
    loss.backward()
    assert loss.item() == 0.0
    assert head.weight.grad.to_dense().abs().max().item() == 0.0
    assert head.eval()(h, y).item() == 0.0
    assert head.predict(h).tolist() == [0] * 4


# ------------------------------------------------------------------------------------------------ negative sampling
COUNTS = 1.0 / torch.arange(1.0, C + 1.0)


class Tilted(sx.samplers.Sampler):
    """p_n(y|x) = softmax(x @ table): a law that depends on the features, in plain torch."""

    def __init__(self, num_features, num_classes=C):
        super().__init__()
        self.num_classes = num_classes
        self.seen = []
        self.register_buffer(
            "table", torch.randn(num_features, num_classes, generator=torch.Generator().manual_seed(3))
        )

    def log_prob_all(self, h=None):
        self.seen.append(tuple(h.shape))
        return (h.float() @ self.table).log_softmax(1)

    def log_prob(self, h, ids, *, exclude=None, context=None):
        return self.log_prob_all(h).gather(1, ids.reshape(len(h), -1)).reshape(ids.shape)

    def sample(self, h, num_samples, *, shared=False, key=None, exclude=None, context=None, batch_size=None):
        assert exclude is None, "negative sampling draws from the unconditional law"
        log_p = self.log_prob_all(h)
        ids = torch.multinomial(log_p.exp(), num_samples, replacement=True)
        return sx.Draw(ids, log_p.gather(1, ids))


def negative_head(**options):
    options = {"sampler": sx.samplers.Unigram(COUNTS), "num_samples": 5, "loss": "negative_sampling"} | options
    return make(**options)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("reg", [0.0, 0.01])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_negative_sampling_trains_on_unconditional_draws(shared, reg, reduction):
    head = negative_head(shared=shared, reg=reg, reduction=reduction, scale=1.5, class_weight=torch.rand(C) + 0.5)
    h, y = batch(rows=31)
    y[3] = -100
    loss = head(h, y, key=sx.Key(7))
    draw = head.sampler.sample(h, 5, shared=shared, key=sx.Key(7))
    log_p = head.sampler.log_prob(h, y.clamp(min=0))
    wanted = sx.functional.negative_sampling(
        h, head.weight, y, draw.ids, draw.log_q, log_p, head.bias,
        scale=1.5, reg=reg, reduction=reduction, class_weight=head.class_weight,
    )  # fmt: skip
    assert torch.equal(loss, wanted)
    loss.sum().backward()
    assert head.weight.grad.is_sparse
    # Hits occur and count: the law is Zipf, the targets too.
    y = torch.zeros(31, dtype=torch.int64)
    ids = head.sampler.sample(h, 5, shared=shared, key=sx.Key(8)).ids
    assert (ids == 0).any()


def test_negative_sampling_adds_log_p_n_back():
    head = negative_head(scale=0.7).eval()
    h, y = batch(rows=9)
    log_p_n = (COUNTS / COUNTS.sum()).log()
    raw = 0.7 * head.linear()(h).detach()
    torch.testing.assert_close(head.scores(h, corrected=False), raw)
    torch.testing.assert_close(head.scores(h), raw + log_p_n)
    log_p = (raw + log_p_n).log_softmax(1)
    torch.testing.assert_close(head.log_prob(h), log_p)
    torch.testing.assert_close(head(h, y), F.nll_loss(log_p, y))
    values, ids = head.topk(h, 6)
    assert torch.equal(ids, (raw + log_p_n).topk(6)[1])
    torch.testing.assert_close(values, (raw + log_p_n).topk(6)[0])
    assert torch.equal(head.predict(h), log_p.argmax(1))
    assert (head.predict(h) != raw.argmax(1)).any(), "the correction must matter here"


def test_sampled_softmax_has_nothing_to_correct():
    head = make(sampler=sx.samplers.Unigram(COUNTS)).eval()
    h, _ = batch()
    assert torch.equal(head.scores(h), head.scores(h, corrected=False))
    torch.testing.assert_close(head.scores(h).log_softmax(1), head.log_prob(h))


@pytest.mark.parametrize("chunk_size", [1, 30, None])
def test_negative_sampling_looks_at_the_features_in_blocks_of_rows(monkeypatch, chunk_size):
    monkeypatch.setattr(prediction, "_PRIOR_ELEMENTS", 4 * C)
    sampler = Tilted(3)
    head = negative_head(sampler=sampler, reg=0.1)
    h, y = torch.randn(2, 5, D), torch.randint(C, (2, 5))
    x = torch.randn(2, 5, 3)
    head(h, y, features=x).backward()
    assert head.weight.grad._nnz() > 1
    assert set(sampler.seen) == {(10, 3)}
    sampler.seen.clear()
    head.eval()
    wanted = (head.linear()(h) + (x @ sampler.table).log_softmax(-1)).detach()
    torch.testing.assert_close(head.scores(h, x, chunk_size=chunk_size), wanted)
    torch.testing.assert_close(head.log_prob(h, features=x, chunk_size=chunk_size), wanted.log_softmax(-1))
    assert torch.equal(head.topk(h, 3, features=x, chunk_size=chunk_size)[1], wanted.topk(3)[1])
    assert torch.equal(head.predict(h, features=x, chunk_size=chunk_size), wanted.argmax(-1))
    nll = head(h, y, features=x)
    torch.testing.assert_close(nll, F.cross_entropy(wanted.view(10, C), y.view(10)))
    assert set(sampler.seen) == {(4, 3), (2, 3)}  # never more than four rows of C at once


def test_negative_sampling_of_a_row_that_is_ignored_or_empty():
    head = negative_head(reg=0.1)
    h, _ = batch()
    assert head(h, torch.full((B,), -100)).item() == 0.0
    assert head(h[:0], torch.empty(0, dtype=torch.int64)).item() == 0.0
    assert head.log_prob(h[:0]).shape == (0, C)
    assert head(h, torch.randint(C, (B, 1))).isfinite()


def test_a_class_the_noise_never_draws_is_never_predicted():
    counts = torch.ones(C)
    counts[5] = 0
    head = negative_head(sampler=sx.samplers.Unigram(counts)).eval()
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    with torch.no_grad():
        head.bias[5] = 100.0
    h, _ = batch()
    assert (head.log_prob(h)[:, 5] == -math.inf).all()
    assert (head.predict(h) != 5).all()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"absolute": True}, "absolute must be off with loss='negative_sampling', got True"),
        ({"label_smoothing": 0.1}, "label_smoothing must be off with loss='negative_sampling', got 0.1"),
        ({"reg": -1.0}, "reg must be finite and at least 0, got -1.0"),
        ({"reg": math.inf}, "reg must be finite and at least 0, got inf"),
        ({"reg": 0.1, "loss": "sampled_softmax"}, "reg must be 0 with loss='sampled_softmax', got 0.1"),
        ({"loss": "nce?"}, "loss must be one of sampled_softmax, negative_sampling, got 'nce?'"),
    ],
)
def test_negative_sampling_options_are_checked(options, text):
    with pytest.raises(ValueError, match=re.escape(f"SampledClassifier: {text}")):
        negative_head(**options)


def test_negative_sampling_calls_are_checked():
    head = negative_head()
    h, y = batch()
    with pytest.raises(ValueError, match="positives must be None with loss='negative_sampling'"):
        head(h, y, positives=(torch.zeros(B + 1, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)))
    with pytest.raises(ValueError, match=r"negative_sampling: target must be \[7\] to fit h, got \[7, 2\] int64"):
        head(h, torch.randint(C, (B, 2)))
    for method in (head.scores, head.log_prob, head.predict):
        with pytest.raises(
            ValueError, match=r"SampledClassifier\.\w+: features must be \[7, f\] to fit h, got \[2, 3\]"
        ):
            method(h, features=torch.zeros(2, 3))


def test_negative_sampling_shows_its_options():
    assert "loss=negative_sampling" in repr(negative_head())
    assert "reg=0.1" in repr(negative_head(reg=0.1))


def test_negative_sampling_learns_the_class_frequencies_only_once_corrected():
    # h = 0: the bias is all there is. p_D is far from p_n; at the minimum bias = log p_D - log p_n.
    torch.manual_seed(0)
    law = torch.tensor([0.5, 0.25, 0.15, 0.1])
    sampler = sx.samplers.Unigram(torch.tensor([0.1, 0.2, 0.3, 0.4]))
    head = sx.SampledClassifier(1, 4, sampler, 8, loss="negative_sampling")
    optimizer = torch.optim.SGD(head.parameters(), lr=1.0)
    h = torch.zeros(4000, 1)
    for step in range(60):
        optimizer.zero_grad()
        head(h, torch.multinomial(law, 4000, replacement=True), key=sx.Key(step)).backward()
        optimizer.step()
    got = head.eval().log_prob(torch.zeros(1, 1)).exp()[0]
    torch.testing.assert_close(got, law, atol=0.03, rtol=0)
    assert (head.scores(torch.zeros(1, 1), corrected=False).softmax(1)[0] - law).abs().max() > 0.1
