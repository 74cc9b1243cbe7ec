"""Softmax and Quartic: the distribution, exact exclusion, chunk sizes, what the loss promises with them, errors."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from host_syncs import no_host_sync
from torch.utils._python_dispatch import TorchDispatchMode

import samplex_cuda as sx
from samplex_cuda import _device, chunking

KINDS = ["softmax", "absolute", "quartic"]


def table(C=700, d=5, seed=0, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(C, d, generator=g, dtype=torch.float64)
    bias = 0.3 * torch.randn(C, generator=g, dtype=torch.float64)
    h = torch.randn(3, d, generator=g, dtype=torch.float64)
    return weight.to(dtype), bias.to(dtype), h.to(dtype)


def make(kind, weight, bias=None, **options):
    if kind == "quartic":
        return sx.samplers.Quartic(weight, bias, **options)
    return sx.samplers.Softmax(weight, bias, absolute=kind == "absolute", **options)


def law(kind, weight, bias, h, scale=1.0, excluded=None):
    """[B, C] float64, by definition."""
    s = scale * (h.double() @ weight.double().T + (0 if bias is None else bias.double()))
    log_w = {"softmax": lambda: s, "absolute": s.abs, "quartic": lambda: torch.log1p(s**4)}[kind]()
    log_w = log_w.clone()
    for row, ids in enumerate(excluded or []):
        log_w[row, [k for k in ids if k >= 0]] = -torch.inf
    return log_w.softmax(1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_million_classes(kind):
    """log_q of the draws is the distribution's, and they spread over the classes as it says: ten ranges by mass."""
    weight, bias, h = table(10**6, 4)
    draw = make(kind, weight, bias).sample(h, 4000, key=sx.Key(1))
    p = law(kind, weight, bias, h)
    torch.testing.assert_close(draw.log_q.double(), p.log().gather(1, draw.ids), rtol=1e-5, atol=1e-5)
    for row in range(3):
        edges = torch.searchsorted(p[row].cumsum(0), torch.linspace(0.1, 0.9, 9, dtype=torch.float64))
        count = torch.bincount(torch.bucketize(draw.ids[row], edges, right=True), minlength=10).double()
        mass = torch.stack([part.sum() for part in p[row].tensor_split(edges)])
        assert float(((count - 4000 * mass) ** 2 / (4000 * mass)).sum()) < 33.7  # chi-square, 9 degrees: 1e-4


EXCLUDES = {
    "target": (torch.tensor([0, 255, 699]), [[0], [255], [699]]),
    "padded": (
        torch.tensor([[5, -1, 3, 5], [-1, -1, -1, -1], [256, 257, 512, 698]]),
        [[5, 3], [], [256, 257, 512, 698]],
    ),
    "csr": ((torch.tensor([0, 3, 3, 4]), torch.tensor([600, -1, 2, 9])), [[600, 2], [], [9]]),
    "a_block": (torch.arange(256, 512).expand(3, -1), [list(range(256, 512))] * 3),
    "all_but_two": (torch.tensor([[k for k in range(700) if k not in (300, 690)]] * 3), None),
}
EXCLUDES["all_but_two"] = (EXCLUDES["all_but_two"][0], EXCLUDES["all_but_two"][0].tolist())


# ------------------------------------------------------------------------------------------------ the distribution
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("C", [1, 2, 255, 256, 257, 700, 1024])
@pytest.mark.parametrize("with_bias", [False, True])
def test_log_prob_all_is_the_law(kind, C, with_bias):
    weight, bias, h = table(C)
    bias = bias if with_bias else None
    sampler = make(kind, weight, bias, scale=0.7)
    wanted = law(kind, weight, bias, h, 0.7).log()
    got = sampler.log_prob_all(h)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sampler.log_prob(h, torch.arange(C).expand(3, -1)), got, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", EXCLUDES)
def test_exclusion_is_exact(kind, form):
    weight, bias, h = table()
    exclude, rows = EXCLUDES[form]
    sampler = make(kind, weight, bias)
    wanted = law(kind, weight, bias, h, excluded=rows).log()
    got = sampler.log_prob(h, torch.arange(700).expand(3, -1), exclude=exclude)
    torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)
    draw = sampler.sample(h, 200, exclude=exclude, key=sx.Key(1))
    for row in range(3):
        assert not set(draw.ids[row].tolist()) & set(rows[row])
    assert draw.log_q.isfinite().all()
    assert torch.equal(sampler.log_prob(h, draw.ids, exclude=exclude), draw.log_q)


def test_exclusion_does_not_cancel():
    """The excluded class has all but 1e-35 of the mass: 1 - p would be 0."""
    weight = torch.linspace(-1, 1, 300)[:, None].clone()
    weight[7] = 80.0
    sampler = sx.samplers.Softmax(weight)
    h, exclude = torch.ones(1, 1), torch.tensor([7])
    got = sampler.log_prob(h, torch.arange(300)[None], exclude=exclude)
    wanted = law("softmax", weight, None, h, excluded=[[7]]).log()
    torch.testing.assert_close(got.double(), wanted, rtol=1e-6, atol=1e-5)
    assert sampler.sample(h, 100, exclude=exclude, key=sx.Key(0)).ids.ne(7).all()
    left = sampler._log_left(h, exclude, None, 1)
    rest = weight[torch.arange(300) != 7].double().logsumexp(0)
    torch.testing.assert_close(left, rest - torch.logaddexp(rest, torch.tensor(80.0).double()), rtol=1e-6, atol=0)


@pytest.mark.stat
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("excluding", [False, True])
def test_draws_follow_the_law(kind, excluding):
    """Chi-square with a fixed key, 3 rows of 15,000 draws."""
    weight, bias, h = table()
    exclude = torch.tensor([int(law(kind, weight, bias, h)[row].argmax()) for row in range(3)]) if excluding else None
    rows = exclude[:, None].tolist() if excluding else None
    n = 15_000
    ids = make(kind, weight, bias).sample(h, n, key=sx.Key(3), exclude=exclude).ids
    p = law(kind, weight, bias, h, excluded=rows).numpy()
    for row in range(3):
        seen = np.bincount(ids[row].numpy(), minlength=700)
        assert seen[p[row] == 0].sum() == 0
        order = np.argsort(p[row])
        expected, counts = n * p[row][order], seen[order]
        edges = np.unique(np.searchsorted(np.cumsum(expected), np.arange(50, n, 50)))  # at least 50 expected in a bin
        e, c = (np.add.reduceat(x, np.r_[0, edges + 1][: -1 if edges[-1] == 699 else None]) for x in (expected, counts))
        chi2 = ((c - e) ** 2 / e).sum()
        dof = len(e) - 1
        assert abs(chi2 - dof) < 5 * np.sqrt(2 * dof), (kind, row, chi2, dof)


# ------------------------------------------------------------------------------------------------ keys and chunks
@pytest.mark.parametrize("kind", KINDS)
def test_the_chunk_size_does_not_change_a_draw(kind):
    weight, bias, _ = table(5000, 16)
    h = torch.randn(7, 16)
    exclude = torch.randint(5000, (7, 4))
    draws = [
        make(kind, weight, bias, chunk_size=size).sample(h, 50, key=sx.Key(5), exclude=exclude)
        for size in (1, 256, 700, 2048, 10**6, None)
    ]
    for draw in draws[1:]:
        assert torch.equal(draw.ids, draws[0].ids)
        torch.testing.assert_close(draw.log_q, draws[0].log_q, rtol=1e-6, atol=1e-6)


def test_rows_beyond_a_batch_block_keep_their_excluded_classes(monkeypatch):
    weight, bias, _ = table(300, 4)
    h, exclude = torch.randn(11, 4), torch.randint(300, (11, 3))
    sampler = sx.samplers.Softmax(weight, bias)
    csr = (torch.arange(12) * 3, exclude.flatten())
    whole = sampler.sample(h, 40, key=sx.Key(5), exclude=exclude)
    monkeypatch.setattr(chunking, "_BLOCK_ROWS", 4)
    for form in (exclude, csr):
        parts = sampler.sample(h, 40, key=sx.Key(5), exclude=form)
        assert torch.equal(whole.ids, parts.ids)
        torch.testing.assert_close(whole.log_q, parts.log_q)
        torch.testing.assert_close(sampler.log_prob(h, whole.ids, exclude=form), whole.log_q)
        p = law("softmax", weight, bias, h)
        left = torch.stack([1 - p[b, sorted(set(row))].sum() for b, row in enumerate(exclude.tolist())]).log()
        torch.testing.assert_close(sampler._log_left(h, form, None, 11), left, rtol=1e-5, atol=1e-6)


def test_keys_and_positions():
    weight, _, h = table()
    sampler = sx.samplers.Softmax(weight)
    ids = sampler.sample(h, 30, key=sx.Key(1)).ids
    assert torch.equal(ids, sampler.sample(h, 30, key=sx.Key(1)).ids)
    assert not torch.equal(ids, sampler.sample(h, 30, key=sx.Key(2)).ids)
    assert torch.equal(ids[:2, :9], sampler.sample(h[:2], 9, key=sx.Key(1)).ids)
    torch.manual_seed(3)
    unkeyed = sampler.sample(h, 30).ids
    torch.manual_seed(3)
    assert torch.equal(unkeyed, sampler.sample(h, 30).ids)


class Seen(TorchDispatchMode):
    """Names of the ops that ran, and the elements of their largest result."""

    def __init__(self):
        super().__init__()
        self.names, self.largest = set(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.names.add(func.name())
        for t in out if isinstance(out, tuple | list) else (out,):
            if isinstance(t, torch.Tensor):
                self.largest = max(self.largest, t.numel())
        return out


@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_a_chunk_not_the_logits(kind):
    """No op makes a [B, C]: the largest result holds B x chunk logits, or the table's own rows."""
    weight, h = torch.randn(20_000, 4), torch.randn(64, 4)
    sampler = make(kind, weight, chunk_size=1024)
    with Seen() as seen:
        sampler.sample(h, 4, exclude=torch.randint(20_000, (64, 2)))
    assert "samplex::exact_mass" in seen.names
    assert seen.largest <= max(64 * 1024, weight.numel())
    assert 10 * seen.largest < 64 * 20_000


# What makes the host wait for a CUDA device, or gives a tensor whose size the host must know.
WAITS = ("_local_scalar_dense", "nonzero", "unique", "masked_select", "is_nonzero", "equal", "item", "bincount")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["none", "target", "padded", "csr"])
def test_nothing_waits_for_the_device(monkeypatch, kind, form):
    """As on CUDA, where the checks that look at numbers are left out."""
    monkeypatch.setattr(_device, "host_waits", lambda t: True)
    weight, bias, h = table()
    sampler = make(kind, weight, bias)
    exclude = None if form == "none" else EXCLUDES[form][0]
    key = torch.tensor([3, 4])
    with Seen() as seen:
        draw = sampler.sample(h, 20, key=key, exclude=exclude)
        sampler.log_prob(h, draw.ids, exclude=exclude)
    assert "samplex::exact_draw" in seen.names
    waits = {name for name in seen.names for word in WAITS if word in name}
    assert waits == set()
    monkeypatch.undo()
    with Seen() as seen:
        sampler.sample(h, 20, key=key, exclude=exclude)
    assert any("_local_scalar_dense" in name for name in seen.names)  # the test can see one


# ------------------------------------------------------------------------------------------------ with the loss
@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize("m", [1, 3, 50])
def test_sampled_softmax_is_the_full_softmax_with_its_own_law(absolute, m):
    """q proportional to exp(s) makes every sample exact, for any m; scale and absolute as in the loss."""
    weight, bias, _ = table(900, 8)
    h = 0.5 * torch.randn(32, 8)
    y = torch.randint(900, (32,))
    sampler = sx.samplers.Softmax(weight, bias, scale=1.7, absolute=absolute)
    draw = sampler.sample(h, m, exclude=y)
    loss = sx.functional.sampled_softmax(
        h, weight, y, draw.ids, draw.log_q, bias, scale=1.7, absolute=absolute, reduction="none"
    )
    s = 1.7 * (h @ weight.T + bias)
    torch.testing.assert_close(
        loss, F.cross_entropy(s.abs() if absolute else s, y, reduction="none"), rtol=2e-5, atol=2e-5
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_storage_dtypes(dtype):
    weight, bias, h = table(500, 8, dtype=dtype)
    sampler = sx.samplers.Softmax(weight, bias)
    wanted = law("softmax", weight, bias, h).log()
    tolerance = 1e-6 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(sampler.log_prob_all(h).double(), wanted, rtol=tolerance, atol=tolerance)
    draw = sampler.sample(h, 20, key=sx.Key(0))
    torch.testing.assert_close(draw.log_q.double(), wanted.gather(1, draw.ids), rtol=tolerance, atol=tolerance)


# ------------------------------------------------------------------------------------------------ corner cases
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_left(kind):
    sampler = make(kind, torch.randn(3, 2))
    exclude = torch.tensor([[2, 1, 0], [2, 1, -1]])
    draw = sampler.sample(torch.randn(2, 2), 4, exclude=exclude)
    assert draw.ids.tolist() == [[0] * 4, [0] * 4]
    torch.testing.assert_close(draw.log_q, torch.zeros(2, 4), atol=1e-6, rtol=0)
    got = sampler.log_prob(torch.randn(2, 2), torch.arange(3).expand(2, -1), exclude=exclude).exp()
    torch.testing.assert_close(got, torch.tensor([[1.0, 0, 0]] * 2))
    one = make(kind, torch.randn(1, 2)).sample(torch.randn(2, 2), 3, exclude=torch.tensor([0, 0]))
    assert one.ids.eq(0).all()
    assert one.log_q.eq(0).all()


@pytest.mark.parametrize(("B", "m"), [(0, 5), (4, 0), (0, 0)])
def test_empty(B, m):
    sampler = sx.samplers.Softmax(torch.randn(10, 3))
    exclude = torch.zeros(B, dtype=torch.int64)
    draw = sampler.sample(torch.randn(B, 3), m, exclude=exclude)
    assert draw.ids.shape == draw.log_q.shape == (B, m)
    assert sampler.log_prob(torch.randn(B, 3), draw.ids).shape == (B, m)
    assert sampler.log_prob_all(torch.randn(B, 3)).shape == (B, 10)


def test_nan_stays_in_its_row():
    weight, _, h = table()
    clean = sx.samplers.Softmax(weight).sample(h, 10, key=sx.Key(0), exclude=torch.tensor([1, 2, 3]))
    h[1, 0] = torch.nan
    draw = sx.samplers.Softmax(weight).sample(h, 10, key=sx.Key(0), exclude=torch.tensor([1, 2, 3]))
    assert draw.log_q[1].isnan().all()
    assert ((draw.ids >= 0) & (draw.ids < 700)).all()
    assert torch.equal(draw.ids[[0, 2]], clean.ids[[0, 2]])
    assert torch.equal(draw.log_q[[0, 2]], clean.log_q[[0, 2]])


def test_large_logits_do_not_overflow():
    weight = torch.randn(600, 4)
    h = 1e4 * torch.randn(2, 4)
    draw = sx.samplers.Softmax(weight).sample(h, 10, key=sx.Key(0))
    assert torch.equal(draw.ids, (h @ weight.T).argmax(1)[:, None].expand(2, 10))
    assert draw.log_q.isfinite().all()


def test_a_class_of_weight_zero_is_never_drawn():
    bias = torch.zeros(400)
    bias[::2] = -torch.inf
    sampler = sx.samplers.Softmax(torch.zeros(400, 2), bias)
    draw = sampler.sample(torch.zeros(1, 2), 5000, key=sx.Key(0))
    assert (draw.ids % 2 == 1).all()
    torch.testing.assert_close(draw.log_q.exp(), torch.full((1, 5000), 1 / 200))


def test_leading_dimensions_and_shapes_of_ids():
    weight, _, _ = table()
    sampler, h = sx.samplers.Softmax(weight), torch.randn(2, 3, 5)
    assert sampler.sample(h, 4).ids.shape == (6, 4)
    every = sampler.log_prob_all(h)
    ids = torch.tensor([0, 3, 6, 9])
    torch.testing.assert_close(sampler.log_prob(h, ids), every[:, ids], rtol=1e-5, atol=1e-5)
    six = torch.arange(6)
    torch.testing.assert_close(sampler.log_prob(h, six), every[six, six], rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------------------------------ table
def test_update_and_rebuild():
    weight, bias, h = table()
    sampler = sx.samplers.Softmax(weight, bias)
    ids = torch.tensor([5, 699, 5])
    rows, new_bias = torch.randn(3, 5), torch.randn(3)
    sampler.update(ids, rows, new_bias)
    changed, changed_bias = weight.clone(), bias.clone()
    changed[5], changed[699], changed_bias[5], changed_bias[699] = rows[2], rows[1], new_bias[2], new_bias[1]
    wanted = sx.samplers.Softmax(changed, changed_bias).log_prob_all(h)
    assert torch.equal(sampler.log_prob_all(h), wanted)
    assert not torch.equal(weight, changed)  # a separate copy
    sampler.rebuild(weight, bias)
    assert torch.equal(sampler.log_prob_all(h), sx.samplers.Softmax(weight, bias).log_prob_all(h))


@pytest.fixture
def as_on_gpu(monkeypatch):
    """CPU tensors take the code of CUDA tensors."""
    monkeypatch.setattr(_device, "host_waits", lambda t: True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_device_nothing_waits_for_the_table(as_on_gpu, kind, dtype):
    """update, follow, rebuild and a training step: the table is what the CPU makes of it."""
    weight, bias, h = table(dtype=dtype)
    sampler = make(kind, weight, bias)
    want, want_bias = weight.clone(), bias.clone()
    g = torch.Generator().manual_seed(2)
    for size in (1, 3, 900):
        ids = torch.randint(700, (size,), generator=g)
        rows, shifts = torch.randn(size, 5, generator=g).to(dtype), torch.randn(size, generator=g).to(dtype)
        with no_host_sync():
            sampler.update(ids, rows, shifts)
            sampler.log_prob_all(h)
        for k, i in enumerate(ids.tolist()):
            want[i], want_bias[i] = rows[k], shifts[k]
        assert torch.equal(sampler.weight, want)
        assert torch.equal(sampler.bias, want_bias)
    changed, changed_bias = torch.randn(700, 5, generator=g).to(dtype), torch.randn(700, generator=g).to(dtype)
    touched = torch.tensor([4, -100, 4, 699, 700, 0])
    with no_host_sync():
        sampler.follow(touched, changed, changed_bias)
        sampler.follow(torch.tensor([-1, 700]), changed * torch.nan)
        sampler.update(touched[:0], changed[:0])
    for i in (4, 699, 0):
        want[i], want_bias[i] = changed[i], changed_bias[i]
    assert torch.equal(sampler.weight, want)
    assert torch.equal(sampler.bias, want_bias)
    with no_host_sync():
        sampler.rebuild(weight, bias)
    assert torch.equal(sampler.weight, weight)


def test_on_a_device_bad_rows_are_left_out_and_reported(as_on_gpu):
    weight, bias, _ = table()
    sampler = sx.samplers.Softmax(weight, bias)
    ids, rows, shifts = torch.tensor([3, 700, -1, 8, 9]), torch.ones(5, 5), torch.ones(5)
    rows[3, 2], shifts[4] = torch.nan, torch.inf
    with no_host_sync():
        sampler.update(ids, rows, shifts)
    want, want_bias = weight.clone(), bias.clone()
    want[3], want_bias[3] = 1.0, 1.0
    assert torch.equal(sampler.weight, want)
    assert torch.equal(sampler.bias, want_bias)
    with pytest.raises(ValueError, match=r"softmax: ids must be in \[0, 700\) and rows finite, got 4 invalid ones"):
        sampler.update(ids[:1], rows[:1], shifts[:1])
    sampler.update(ids[:1], 2 * rows[:1], shifts[:1])  # said once
    assert sampler.weight[3].eq(2).all()
    # A step of training records it, and raises as the CPU does, or repairs.
    bad = weight.clone()
    bad[5] = torch.nan
    sampler.follow(torch.tensor([5, 6]), bad, bias)
    assert torch.equal(sampler.weight[5], weight[5])
    with pytest.raises(ValueError, match="softmax: weight must be finite, got nan or inf"):
        sampler.follow(torch.tensor([6]), bad, bias)
    sampler.follow(torch.tensor([6]), weight, bias)
    assert torch.equal(sampler.weight, weight)
    sampler.follow(torch.tensor([6]), bad, bias)  # the notice is gone
    copied = copy.deepcopy(sampler)
    copied.update(torch.tensor([1]), torch.zeros(1, 5))
    assert copied.weight[1].eq(0).all()


def test_on_a_device_a_head_follows_without_waiting(as_on_gpu):
    torch.manual_seed(1)
    head = sx.SampledClassifier(5, 300, sx.samplers.Softmax(torch.zeros(300, 5)), num_samples=7, bias=False)
    head.fuse_optimizer(sx.optim.RowAdagrad(head.parameters(), lr=0.1))
    h, y = torch.randn(4, 5), torch.randint(300, (4,))
    head(h, y).backward()
    for _ in range(3):
        loss = head(h, y)
        with no_host_sync():
            loss.backward()
    with no_host_sync():
        head(h, y)
    assert torch.equal(head.sampler.weight, head.weight)


def test_without_a_copy_the_law_follows_the_model():
    head = sx.SampledClassifier(5, 300, sx.samplers.Uniform(300), num_samples=7)
    head.sampler = sx.samplers.Softmax(head.weight, head.bias, copy=False)
    assert [name for name, _ in head.named_parameters()] == ["weight", "bias"]
    assert sorted(head.state_dict()) == ["bias", "weight"]
    h, y = torch.randn(4, 5), torch.randint(300, (4,))
    optimizer = torch.optim.SGD(head.parameters(), lr=1.0)
    for _ in range(3):
        loss = head.train()(h, y)
        torch.testing.assert_close(loss, head.eval()(h, y), rtol=1e-5, atol=1e-5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    head.sampler.update(torch.tensor([0]), torch.full((1, 5), 9.0))
    assert not head.weight[0].eq(9).any()


def test_state_dict_and_to():
    weight, bias, h = table()
    sampler = sx.samplers.Softmax(weight, bias)
    other = sx.samplers.Softmax(torch.zeros_like(weight), torch.zeros_like(bias))
    other.load_state_dict(sampler.state_dict())
    assert torch.equal(sampler.log_prob_all(h), other.log_prob_all(h))
    moved = sampler.to("meta")
    assert moved.weight.device.type == "meta"


# ------------------------------------------------------------------------------------------------ errors
def test_errors():
    weight, bias, h = table()
    softmax = sx.samplers.Softmax(weight, bias)
    plain = sx.samplers.Quartic(weight)
    ids = torch.tensor([0])
    for call, error, text in [
        (lambda: sx.samplers.Softmax(weight[0]), ValueError, r"softmax: weight must be \[C, d\] floating point, got"),
        (lambda: sx.samplers.Softmax(weight.long()), ValueError, "softmax: weight must be"),
        (lambda: sx.samplers.Softmax([1.0]), ValueError, "softmax: weight must be .* got list"),
        (lambda: sx.samplers.Softmax(weight[:0]), ValueError, "softmax: weight must have at least one class"),
        (lambda: sx.samplers.Softmax(weight, bias[:3]), ValueError, r"softmax: bias must be \[700\] floating point"),
        (lambda: sx.samplers.Softmax(weight, scale=float("nan")), ValueError, "softmax: scale must be finite, got nan"),
        (lambda: sx.samplers.Softmax(weight, chunk_size=0), ValueError, "softmax: chunk_size must be an int of at"),
        (lambda: sx.samplers.Quartic(weight, alpha=-1), ValueError, "quartic: alpha must be finite and at least 0"),
        (lambda: softmax.sample(None, 3), ValueError, r"softmax: h must be \[\*, 5\], got None"),
        (lambda: softmax.sample(h[:, :4], 3), ValueError, r"softmax: h must be \[\*, 5\], got \[3, 4\] float32"),
        (lambda: softmax.sample(h.long(), 3), TypeError, "softmax: h must be floating point"),
        (lambda: softmax.sample(h.to("meta"), 3), ValueError, "softmax: h must be on cpu, where the class table is"),
        (lambda: softmax.sample(h[:, :4], 3, shared=True), ValueError, r"softmax: h must be \[\*, 5\], got \[3, 4\]"),
        (lambda: softmax.sample(h, -1), ValueError, "softmax: num_samples must be an int in"),
        (lambda: softmax.sample(h, 2**23 + 1), ValueError, r"softmax: num_samples must be in \[0, 2\^23\]"),
        (lambda: softmax.sample(h, 3, batch_size=4), ValueError, "softmax: batch_size must be 3"),
        (
            lambda: softmax.sample(h, 3, exclude=torch.tensor([0, 1, 700])),
            IndexError,
            r"softmax: exclude must be -1 or in \[0, 700\), got 700",
        ),
        (
            lambda: softmax.sample(h, 3, exclude=(torch.tensor([0, 2, 1, 1]), ids)),
            ValueError,
            "softmax: exclude_offsets must go from 0 to 1 without decreasing, got 0 to 1",
        ),
        (lambda: softmax.log_prob(h, ids - 1), IndexError, r"softmax: ids must be in \[0, 700\), got -1"),
        (lambda: softmax.log_prob(h, ids.float()), TypeError, "softmax: ids must be int64"),
        (lambda: softmax.log_prob(h, ids.expand(2, 1)), ValueError, r"softmax: ids must be \[B\], \[B, n\] or \[n\]"),
        (lambda: softmax.update(ids, h[:1, :4]), ValueError, r"softmax: rows must be \[1, 5\] floating point"),
        (lambda: softmax.update(ids + 700, h[:1]), IndexError, r"softmax: ids must be in \[0, 700\), got 700"),
        (lambda: softmax.update(ids, h[:1] * torch.nan), ValueError, "softmax: rows must be finite, got nan or inf"),
        (lambda: plain.update(ids, h[:1], bias[:1]), ValueError, "quartic: bias must be None"),
        (lambda: softmax.rebuild(weight[:5]), ValueError, r"softmax: weight must be \[700, 5\], got \[5, 5\] float32"),
        (lambda: plain.rebuild(weight, bias), ValueError, "quartic: bias must be None, got"),
    ]:
        with pytest.raises(error, match=text):
            call()
    assert torch.equal(softmax.weight, weight)


def test_repr():
    assert repr(sx.samplers.Softmax(torch.zeros(4, 2), absolute=True)) == (
        "Softmax(num_classes=4, dim=2, bias=False, scale=1, dtype=float32, copy=True, absolute=True)"
    )
    assert "alpha=2" in repr(sx.samplers.Quartic(torch.zeros(4, 2), alpha=2))
