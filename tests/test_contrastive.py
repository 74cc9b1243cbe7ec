"""`functional.contrastive` against plain torch: every way to negatives, gradients of both sides, corners, errors."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

import samplex_cuda as sx
from samplex_cuda.functional import contrastive

B, D, N, K = 6, 9, 20, 5


def plain(queries, keys, positives, negatives, log_q=None, scale=1.0, reduction="mean", masked=None):
    """The loss as a person would write it, with a [B, k, d] gather. masked: bool, [B, k], draws that take no part."""
    if negatives.dim() == 1:
        negatives = negatives.expand(queries.shape[0], -1)
        log_q = None if log_q is None else log_q.expand(queries.shape[0], -1)
    own = scale * (queries * keys[positives]).sum(1, keepdim=True)
    other = scale * torch.einsum("bd,bkd->bk", queries, keys[negatives])
    if log_q is not None:
        other = other - log_q - math.log(negatives.shape[1])
    out = negatives == positives[:, None]
    if masked is not None:
        out = out | masked
    other = other.masked_fill(out, -torch.inf)
    logits = torch.cat([own, other], 1)
    return F.cross_entropy(logits, torch.zeros(len(own), dtype=torch.int64, device=own.device), reduction=reduction)


def case(backend, dtype=torch.float64, n=N):
    generator = torch.Generator().manual_seed(5)
    queries = torch.randn(B, D, generator=generator, dtype=torch.float64)
    keys = torch.randn(n, D, generator=generator, dtype=torch.float64)
    positives = torch.randint(n, (B,), generator=generator)
    negatives = torch.randint(n, (B, K), generator=generator)
    negatives[0, 2] = positives[0]  # a hit takes no part
    log_q = -torch.rand(B, K, generator=generator, dtype=torch.float64) * 3
    moved = [t.to(backend.device) for t in (queries.to(dtype), keys.to(dtype), positives, negatives, log_q.to(dtype))]
    return moved[0].requires_grad_(), moved[1].requires_grad_(), *moved[2:]


def same(loss, wanted, inputs, rtol=1e-10):
    """Value and gradients."""
    torch.testing.assert_close(loss, wanted, rtol=rtol, atol=rtol)
    got = torch.autograd.grad(loss, inputs)
    want = torch.autograd.grad(wanted, inputs, retain_graph=True)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.to_dense() if a.is_sparse else a, b, rtol=rtol, atol=rtol)
    return got


# ------------------------------------------------------------------------------------------------ a bank
@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_given_negatives(backend, corrected, shared, reduction):
    queries, keys, positives, negatives, log_q = case(backend)
    if shared:
        negatives, log_q = negatives[0], log_q[0]
    log_q = log_q if corrected else None
    loss = contrastive(queries, keys, positives, negatives, log_q, scale=0.7, reduction=reduction)
    d_keys = same(loss, plain(queries, keys, positives, negatives, log_q, 0.7, reduction), (queries, keys))[1]
    assert d_keys.is_sparse
    assert d_keys.is_coalesced()


def test_no_reduction(backend):
    queries, keys, positives, negatives, log_q = case(backend)
    got = contrastive(queries, keys, positives, negatives, log_q, reduction="none")
    torch.testing.assert_close(got, plain(queries, keys, positives, negatives, log_q, reduction="none"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_dtypes(backend, dtype):
    queries, keys, positives, negatives, log_q = case(backend, dtype)
    log_q = log_q.float()
    loss = contrastive(queries, keys, positives, negatives, log_q)
    assert loss.dtype == torch.float32
    loss.backward()
    assert queries.grad.dtype == keys.grad.dtype == dtype
    exact_q, exact_k = queries.detach().double().requires_grad_(), keys.detach().double().requires_grad_()
    wanted = plain(exact_q, exact_k, positives, negatives, log_q.double())
    wanted.backward()
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-5, atol=1e-6)
    near = 1e-5 if dtype == torch.float32 else torch.finfo(dtype).eps
    torch.testing.assert_close(queries.grad.double(), exact_q.grad, rtol=near, atol=near)
    torch.testing.assert_close(keys.grad.to_dense().double(), exact_k.grad, rtol=near, atol=near)


@pytest.mark.parametrize("sparse", [None, True, False])
def test_gradcheck(backend, sparse):
    """Through encoders, so that nothing is a leaf (sparse gradients cannot continue from there)."""
    queries, keys, positives, negatives, log_q = case(backend)

    def loss(q, k):
        return contrastive(q, k, positives, negatives, log_q, scale=1.3, sparse=sparse)

    if sparse:
        same(loss(queries, keys), plain(queries, keys, positives, negatives, log_q, 1.3), (queries, keys))
    else:
        assert torch.autograd.gradcheck(lambda q, k: loss(q * 1.0, k.tanh()), (queries, keys))


def test_keys_of_an_encoder_get_a_dense_gradient(backend):
    """What an encoder made is not a leaf: its gradient goes on through the graph."""
    queries, _, positives, negatives, _ = case(backend)
    x = torch.randn(N, 4, dtype=torch.float64, device=backend.device)
    weight = torch.randn(4, D, dtype=torch.float64, device=backend.device, requires_grad=True)

    def keys():
        return (x @ weight).relu()

    same(
        contrastive(queries, keys(), positives, negatives),
        plain(queries, keys(), positives, negatives),
        (queries, weight),
    )


def test_a_bank_without_gradient(backend):
    """A queue of old keys: only the queries learn."""
    queries, keys, positives, negatives, _ = case(backend)
    bank = keys.detach()
    same(contrastive(queries, bank, positives, negatives), plain(queries, bank, positives, negatives), (queries,))
    with torch.no_grad():
        assert not contrastive(queries, keys, positives, negatives).requires_grad


def test_only_the_keys_learn(backend):
    queries, keys, positives, negatives, _ = case(backend)
    old = queries.detach()
    same(contrastive(old, keys, positives, negatives), plain(old, keys, positives, negatives), (keys,))


# ------------------------------------------------------------------------------------------------ drawn negatives
def test_a_subset_is_drawn_by_the_key(backend):
    queries, keys, positives, _, _ = case(backend)
    loss = contrastive(queries, keys, positives, num_negatives=K, key=sx.Key(3, 4))
    drawn = sx.samplers.Uniform(N).to(backend.device).subset(K, exclude=positives, key=sx.Key(3, 4))
    same(loss, plain(queries, keys, positives, drawn.ids), (queries, keys))
    again = contrastive(queries, keys, positives, num_negatives=K, key=sx.Key(3, 4))
    assert torch.equal(loss, again)
    assert not torch.equal(loss, contrastive(queries, keys, positives, num_negatives=K, key=sx.Key(3, 5)))
    torch.manual_seed(8)
    first = contrastive(queries, keys, positives, num_negatives=K)
    torch.manual_seed(8)
    assert torch.equal(first, contrastive(queries, keys, positives, num_negatives=K))


def test_a_sampler_brings_its_log_q(backend):
    queries, keys, positives, _, _ = case(backend)
    sampler = sx.samplers.Unigram(torch.arange(1, N + 1)).to(backend.device)
    loss = contrastive(queries, keys, positives, num_negatives=K, sampler=sampler, key=sx.Key(3, 4))
    draw = sampler.sample(queries, K, exclude=positives, key=sx.Key(3, 4))
    same(loss, plain(queries, keys, positives, draw.ids, draw.log_q.double()), (queries, keys))


def test_all_other_keys_are_the_full_softmax(backend):
    """C10: k = n - 1, sampled or enumerated."""
    queries, keys, positives, _, _ = case(backend)
    full = F.cross_entropy(1.5 * queries @ keys.T, positives)
    for exact in (False, True):
        loss = contrastive(queries, keys, positives, num_negatives=N - 1, exact=exact, scale=1.5)
        same(loss, full, (queries, keys))
    draw = sx.samplers.Uniform(N).to(backend.device).subset(N - 1, exclude=positives)
    same(contrastive(queries, keys, positives, draw.ids, draw.log_q, scale=1.5), full, (queries, keys), rtol=1e-6)


# ------------------------------------------------------------------------------------------------ the exact expectation
@pytest.mark.parametrize("k", [0, 1, 3, 6])
def test_exact_is_the_mean_over_all_subsets(backend, k):
    """Against a loop over subsets, each by the sampled loss: so the sampled gradient is unbiased for Eq. 3.2 (C10)."""
    queries, keys, _, _, _ = case(backend, n=7)
    positives = torch.tensor([0, 6, 3, 3, 1, 5], device=backend.device)
    losses = []
    for chosen in itertools.combinations(range(6), k):
        rank = torch.tensor(chosen, device=backend.device, dtype=torch.int64).expand(B, k)
        negatives = rank + (rank >= positives[:, None])
        losses.append(contrastive(queries, keys, positives, negatives, scale=0.9, sparse=False))
    assert len(losses) == math.comb(6, k)
    exact = contrastive(queries, keys, positives, num_negatives=k, exact=True, scale=0.9)
    same(exact, torch.stack(losses).mean(), (queries, keys))


def test_exact_reductions_and_gradcheck():
    queries, keys = torch.randn(3, 4).double().requires_grad_(), torch.randn(5, 4).double().requires_grad_()
    positives = torch.tensor([4, 0, 0])
    rows = contrastive(queries, keys, positives, num_negatives=2, exact=True, reduction="none")
    assert rows.shape == (3,)
    for reduction in ("mean", "sum"):
        reduced = contrastive(queries, keys, positives, num_negatives=2, exact=True, reduction=reduction)
        torch.testing.assert_close(reduced, getattr(rows, reduction)())
    assert torch.autograd.gradcheck(
        lambda q, k: contrastive(q, k, positives, num_negatives=2, exact=True), (queries, keys)
    )


def test_exact_is_safe_for_large_scores():
    queries, keys = torch.eye(3) * 1e4, torch.eye(3)
    assert float(contrastive(queries, keys, num_negatives=2, exact=True)) == 0.0
    torch.testing.assert_close(contrastive(queries, -keys, num_negatives=1, exact=True), torch.tensor(1e4))


@pytest.mark.stat
def test_drawn_subsets_have_the_expectation():
    """The mean over many keyed draws is the enumerated one, within five standard errors, for value and gradients."""
    queries, keys = torch.randn(4, 5).double().requires_grad_(), torch.randn(8, 5).double().requires_grad_()
    positives = torch.tensor([1, 7, 0, 4])
    rows = 4000
    many = queries[:, None].expand(4, rows, 5).reshape(-1, 5)
    loss = contrastive(
        many, keys, positives.repeat_interleave(rows), num_negatives=3, key=sx.Key(9), reduction="none", sparse=False
    ).view(4, rows)
    exact = contrastive(queries, keys, positives, num_negatives=3, exact=True, reduction="none")
    error = loss.std(1) / math.sqrt(rows)
    assert bool(((loss.mean(1) - exact).abs() < 5 * error).all())
    got = torch.autograd.grad(loss.mean(), (queries, keys))
    want = torch.autograd.grad(exact.mean(), (queries, keys))
    for a, b in zip(got, want, strict=True):
        assert float((a - b).norm() / b.norm()) < 0.05


# ------------------------------------------------------------------------------------------------ in-batch
@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_in_batch_is_cross_entropy_with_the_diagonal(backend, scale):
    queries, keys, _, _, _ = case(backend, n=B)
    d_keys = same(
        contrastive(queries, keys, scale=scale),
        F.cross_entropy(scale * queries @ keys.T, torch.arange(B, device=backend.device)),
        (queries, keys),
    )[1]
    assert not d_keys.is_sparse


def test_in_batch_with_log_q(backend):
    """The other B - 1 keys are draws of log_q; the positive is none and stays unchanged."""
    queries, keys, _, _, _ = case(backend, n=B)
    log_q = torch.log_softmax(torch.randn(B, device=backend.device).double(), 0)
    scores = queries @ keys.T
    corrected = scores - log_q - math.log(B - 1)
    own = torch.eye(B, dtype=torch.bool, device=backend.device)
    wanted = F.cross_entropy(torch.where(own, scores, corrected), torch.arange(B, device=backend.device))
    same(contrastive(queries, keys, log_q=log_q), wanted, (queries, keys))


@pytest.mark.parametrize("corrected", [False, True])
def test_in_batch_without_duplicates(backend, corrected):
    queries, keys, _, _, _ = case(backend, n=B)
    key_ids = torch.tensor([7, 3, 7, 7, 2, 3], device=backend.device)
    log_q = torch.log_softmax(torch.randn(B, device=backend.device).double(), 0)
    scores = queries @ keys.T
    other = scores - log_q - math.log(B - 1) if corrected else scores
    own = torch.eye(B, dtype=torch.bool, device=backend.device)
    logits = torch.where(own, scores, other.masked_fill(key_ids[:, None] == key_ids, -torch.inf))
    wanted = F.cross_entropy(logits, torch.arange(B, device=backend.device))
    same(contrastive(queries, keys, log_q=log_q if corrected else None, key_ids=key_ids), wanted, (queries, keys))


def test_symmetric(backend):
    queries, keys, _, _, _ = case(backend, n=B)
    diagonal = torch.arange(B, device=backend.device)
    scores = queries @ keys.T
    wanted = (F.cross_entropy(scores, diagonal) + F.cross_entropy(scores.T, diagonal)) / 2
    same(contrastive(queries, keys, symmetric=True), wanted, (queries, keys))


def test_in_batch_with_a_subset_of_the_batch(backend):
    queries, keys, _, _, _ = case(backend, n=B)
    loss = contrastive(queries, keys, num_negatives=2, key=sx.Key(1))
    rows = torch.arange(B, device=backend.device)
    drawn = sx.samplers.Uniform(B).to(backend.device).subset(2, exclude=rows, key=sx.Key(1))
    got = same(loss, plain(queries, keys, rows, drawn.ids), (queries, keys))
    assert not got[1].is_sparse


# ------------------------------------------------------------------------------------------------ corners
def test_nothing(backend):
    device = backend.device
    queries, keys = torch.zeros(0, D, device=device, requires_grad=True), torch.zeros(0, D, device=device)
    bank = torch.randn(N, D, device=device, requires_grad=True)
    none = torch.zeros(0, dtype=torch.int64, device=device)
    calls = [
        lambda: contrastive(queries, keys),
        lambda: contrastive(queries, keys, num_negatives=0),
        lambda: contrastive(queries, bank, none, num_negatives=3),
        lambda: contrastive(queries, bank, none, num_negatives=3, exact=True),
        lambda: contrastive(queries, bank, none, torch.zeros(0, 3, dtype=torch.int64, device=device)),
    ]
    for call in calls:
        loss = call()
        assert loss.item() == 0.0
        loss.backward()
    one = torch.randn(1, D, device=device)
    assert float(contrastive(one, one)) == 0.0  # no other key
    assert float(contrastive(one, one, log_q=torch.zeros(1, device=device))) == 0.0
    assert contrastive(one, bank, none.new_tensor([2]), num_negatives=0).item() == 0.0


def test_the_same_bits_twice():
    queries, keys = torch.randn(64, 32, requires_grad=True), torch.randn(500, 32, requires_grad=True)
    positives = torch.arange(64)
    runs = []
    for _ in range(2):
        loss = contrastive(queries, keys, positives, num_negatives=40, key=sx.Key(2))
        runs.append((loss, *torch.autograd.grad(loss, (queries, keys))))
    assert torch.equal(runs[0][0], runs[1][0])
    assert torch.equal(runs[0][1], runs[1][1])
    assert torch.equal(runs[0][2].to_dense(), runs[1][2].to_dense())


def test_row_optimizer_and_fused_update():
    """A bank is a class table: the row optimizers take its gradient, inside backward too."""
    banks = []
    for fused in (False, True):
        torch.manual_seed(1)
        head = sx.SampledClassifier(8, 50, sx.samplers.Uniform(50), num_samples=6, bias=False)
        optimizer = sx.optim.RowAdagrad(head.parameters(), lr=0.1)
        if fused:
            head.fuse_optimizer(optimizer)
        for step in range(3):
            contrastive(torch.randn(4, 8), head.weight, torch.arange(4), num_negatives=6, key=sx.Key(step)).backward()
            assert (head.weight.grad is None) == fused
            if not fused:
                optimizer.step()
                optimizer.zero_grad()
        banks.append(head.weight.detach())
    torch.testing.assert_close(banks[0], banks[1])


def test_autocast():
    queries, keys = torch.randn(4, 8).bfloat16(), torch.randn(30, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = contrastive(queries, keys, torch.arange(4), num_negatives=3, key=sx.Key(0))
        exact = contrastive(queries, keys, torch.arange(4), num_negatives=2, exact=True)
    assert loss.dtype == exact.dtype == torch.float32
    wanted = contrastive(queries.float(), keys, torch.arange(4), num_negatives=3, key=sx.Key(0))
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(exact, contrastive(queries.float(), keys, torch.arange(4), num_negatives=2, exact=True))


def test_no_gather_in_memory(monkeypatch):
    """No tensor of the step is as large as [B, k, d]."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            for t in result if isinstance(result, tuple | list) else [result]:
                if isinstance(t, torch.Tensor) and not t.is_sparse:
                    largest = max(largest, t.numel())
            return result

    queries = torch.randn(64, 32, requires_grad=True)
    weight = torch.randn(8, 32, requires_grad=True)
    x = torch.randn(300, 8)
    with Watch():
        contrastive(queries, x @ weight, torch.arange(64), num_negatives=100).backward()
    assert 300 * 32 <= largest <= 301 * 32 + 64 * (32 + 101) * 2 < 64 * 100 * 32


# ------------------------------------------------------------------------------------------------ errors
q, bank, own = torch.zeros(3, 4), torch.zeros(9, 4), torch.tensor([0, 1, 2])


@pytest.mark.parametrize(
    ("call", "kind", "error"),
    [
        (lambda: contrastive([1], bank, own, num_negatives=2), TypeError, r"queries must be a tensor \[B, d\]"),
        (lambda: contrastive(q, 3, own, num_negatives=2), TypeError, r"keys must be a tensor \[n, d\]"),
        (lambda: contrastive(q[0], bank, own, num_negatives=2), ValueError, r"queries must be \[B, 4\]"),
        (lambda: contrastive(q, bank[:, :3], own, num_negatives=2), ValueError, r"queries must be \[B, 3\]"),
        (lambda: contrastive(q, bank.long(), own, num_negatives=2), ValueError, r"keys must be \[n, d\] float32"),
        (lambda: contrastive(q.double(), bank, own, num_negatives=2), TypeError, "queries must be torch.float32 like"),
        (
            lambda: contrastive(q, bank, num_negatives=2),
            ValueError,
            r"positives must be \[3\] int64 unless there is one",
        ),
        (lambda: contrastive(q, bank, own[:2], num_negatives=2), ValueError, r"positives must be \[3\]"),
        (lambda: contrastive(q, bank, own.int(), num_negatives=2), TypeError, "positives must be an int64 tensor"),
        (lambda: contrastive(q, bank, own + 8, num_negatives=2), IndexError, r"positives must be in \[0, 9\), got 9"),
        (lambda: contrastive(q, bank, own - 1, own), IndexError, r"positives must be in \[0, 9\), got -1"),
        (lambda: contrastive(q, bank, own - 101, own), IndexError, r"positives must be in \[0, 9\), got -101"),
        (lambda: contrastive(q, bank, own, own + 7), IndexError, r"negatives must be in \[0, 9\), got 9"),
        (
            lambda: contrastive(q, bank, own + 8, num_negatives=2, exact=True),
            IndexError,
            r"positives must be in \[0, 9\), got 9",
        ),
        (lambda: contrastive(q, bank, own), ValueError, "negatives or num_negatives must be given with a bank"),
        (lambda: contrastive(q, bank, own, own, num_negatives=3), ValueError, "num_negatives must be None if"),
        (lambda: contrastive(q, bank, own, num_negatives=9), ValueError, "num_negatives must be at most 8"),
        (lambda: contrastive(q, bank, own, num_negatives=9, exact=True), ValueError, "num_negatives must be at most 8"),
        (
            lambda: contrastive(q, bank, own, num_negatives=-1),
            ValueError,
            r"num_negatives must be an int in \[0, 2\^24\], got -1",
        ),
        (lambda: contrastive(q, bank, own, num_negatives=2.0), TypeError, "num_negatives must be an int"),
        (lambda: contrastive(q, bank, own, num_negatives=True), TypeError, "num_negatives must be an int"),
        (lambda: contrastive(q, bank, own, own[:2][None]), ValueError, r"negatives must be \[3, k\] or \[k\]"),
        (lambda: contrastive(q, bank, own, own.float()), TypeError, "negatives must be an int64 tensor"),
        (lambda: contrastive(q, bank, own, own, q), ValueError, r"log_q must be the shape of negatives \[3\]"),
        (lambda: contrastive(q, bank, own, own, own), TypeError, "log_q must be floating point"),
        (lambda: contrastive(q, q, log_q=q[:, :1]), ValueError, r"log_q must be \[n\] \[3\]"),
        (lambda: contrastive(q, q, key_ids=own[:2]), ValueError, r"key_ids must be \[3\]"),
        (lambda: contrastive(q, bank, own, own, key_ids=own), ValueError, r"key_ids must be \[9\] to fit keys"),
        (
            lambda: contrastive(q, bank, own, num_negatives=2, exact=True, key_ids=torch.arange(9)),
            ValueError,
            "key_ids cannot be combined with exact=True",
        ),
        (lambda: contrastive(q, q, query_log_q=q[:, 0]), ValueError, "query_log_q must be None without symmetric"),
        (lambda: contrastive(q, bank, own, own, group=1), ValueError, "group cannot be combined with given negatives"),
        (lambda: contrastive(q, bank, own, own, symmetric=True), ValueError, "symmetric cannot be combined with given"),
        (
            lambda: contrastive(q, bank, own, own, exact=True),
            ValueError,
            "exact cannot be combined with given negatives",
        ),
        (
            lambda: contrastive(q, bank, own, own, key=sx.Key(0)),
            ValueError,
            "key cannot be combined with given negatives",
        ),
        (
            lambda: contrastive(q, bank, own, num_negatives=2, log_q=q[:, :2]),
            ValueError,
            "log_q cannot be combined with a uniform subset",
        ),
        (
            lambda: contrastive(q, bank, own, num_negatives=2, exact=True, sampler=sx.samplers.Uniform(9)),
            ValueError,
            "sampler cannot be combined with exact=True",
        ),
        (lambda: contrastive(q, q, log_q=q[:, 0], symmetric=True), ValueError, "symmetric must be False with log_q"),
        (lambda: contrastive(q, q, reduction="max"), ValueError, "reduction must be one of none, mean, sum"),
        (
            lambda: contrastive(q, torch.zeros(60, 4), own, num_negatives=20, exact=True),
            ValueError,
            r"exact=True must have at most 2\^26 terms",
        ),
    ],
)
def test_errors(call, kind, error):
    with pytest.raises(kind, match=f"^contrastive: {error}"):
        call()


# ------------------------------------------------------------------------------------------------ small batches
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("what", ["plain", "log_q", "key_ids", "both", "underflow"])
def test_small_batches_against_plain_torch(what, reduction):
    """In-batch losses and gradients against float64, also where the softmax of the own key underflows."""
    generator = torch.Generator().manual_seed(0)
    scale = 40.0 if what == "underflow" else 0.5
    options = {"scale": scale, "reduction": reduction}
    log_q, ids = torch.zeros(20), torch.arange(20)
    if what in ("log_q", "both"):
        options["log_q"] = log_q = -torch.rand(20, generator=generator) * 9
    if what in ("key_ids", "both"):
        options["key_ids"] = ids = torch.randint(0, 8, (20,), generator=generator)
    sides = [torch.randn(20, 6, generator=generator).requires_grad_() for _ in range(2)]
    loss = contrastive(*sides, **options)
    weights = torch.linspace(0.5, 2.0, max(loss.numel(), 1))
    once = torch.autograd.grad((loss.reshape(-1) * weights).sum(), sides, retain_graph=True)
    again = torch.autograd.grad((loss.reshape(-1) * weights).sum(), sides, retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(loss.sum(), sides, create_graph=True)

    q, k = (side.detach().double().requires_grad_() for side in sides)
    scores, own = scale * q @ k.T, torch.eye(20, dtype=torch.bool)
    shift = log_q.double() + math.log(19) if "log_q" in options else 0.0
    others = (scores - shift).masked_fill(ids[:, None] == ids, -math.inf)
    rows = torch.where(own, scores, others).logsumexp(1) - scores.diagonal()
    wanted = rows if reduction == "none" else rows.mean() if reduction == "mean" else rows.sum()
    if what == "underflow":
        assert rows.max() > 110  # where exp(-loss) is 0 in float32
    gradients = torch.autograd.grad((wanted.reshape(-1) * weights).sum(), (q, k))
    for found, exact in zip((loss.detach(), *once), (wanted.detach(), *gradients), strict=True):
        torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)


def test_what_is_kept_from_batch_to_batch_is_not_changed_by_a_step():
    """Row numbers and the zero correction of a small batch are made once; a step must leave them as they are."""
    found = []
    for _ in range(2):
        q, k = (torch.randn(7, 5, generator=torch.Generator().manual_seed(i)).requires_grad_() for i in (1, 2))
        loss = contrastive(q, k, scale=0.3)
        loss.backward()
        found.append((loss.detach(), q.grad, k.grad))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    with torch.inference_mode():
        contrastive(torch.randn(9, 5), torch.randn(9, 5))  # what is kept must not come from here
    q, k = (torch.randn(9, 5).requires_grad_() for _ in range(2))
    contrastive(q, k).backward()
