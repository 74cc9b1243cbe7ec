"""Draw and loss in one op: the same bits as the two ops, and what the head makes of it."""

from __future__ import annotations

import math

import pytest
import torch

import samplex_cuda as sx
from samplex_cuda._checks import op_error
from samplex_cuda.ops.loss_types import StaticLaw

OPS = torch.ops.samplex
CLASSES = 50


def samplers():
    counts = torch.arange(CLASSES, 0, -1.0)
    return {
        "uniform": sx.samplers.Uniform(CLASSES),
        "log_uniform": sx.samplers.LogUniform(CLASSES),
        "unigram": sx.samplers.Unigram(counts),
    }


def arguments(name, *, shared, dtype, bias=True, reduction=1, batch=6, m=9, dim=12, device="cpu", need_grad=True):
    gen = torch.Generator().manual_seed(3)
    hidden = torch.randn(batch, dim, generator=gen).to(device, dtype)
    weight = torch.randn(CLASSES, dim, generator=gen).to(device, dtype)
    target = torch.randint(CLASSES, (batch,), generator=gen).to(device)
    target[1:2] = -100
    law = samplers()[name].to(device).law()
    return {
        "hidden": hidden,
        "weight": weight,
        "target": target,
        "key": torch.tensor([5, 7], device=device),
        "law": law.number,
        "num_samples": m,
        "shared": shared,
        "table": law.table,
        "prefix": law.prefix,
        "bias": torch.randn(CLASSES, generator=gen).to(device, dtype) if bias else None,
        "class_weight": None,
        "scale": 1.5,
        "label_smoothing": 0.0,
        "ignore_index": -100,
        "reduction": reduction,
        "absolute": False,
        "need_grad": need_grad,
        "need_hidden": need_grad,
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", ["uniform", "log_uniform", "unigram"])
def test_it_gives_the_bits_of_the_draw_and_the_loss(backend, name, shared, dtype):
    check_bits(name, shared, arguments(name, shared=shared, dtype=dtype, device=backend.device))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("dim", "m", "shift"), [(5, 1, 0), (5, 64, 0), (6, 17, 0), (8, 17, 1), (0, 4, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_of_shared_draws_of_any_width(backend, dtype, dim, m, shift, bias):
    """The kernel that draws copies the class rows in words of 2, 4 or 16 bytes, for rows that begin anywhere."""
    a = arguments("log_uniform", shared=True, dtype=dtype, dim=dim, m=m, bias=bias, device=backend.device)
    memory = torch.empty(CLASSES * dim + shift, dtype=dtype, device=backend.device)
    a["weight"] = memory[shift:].view(CLASSES, dim).copy_(a["weight"])
    check_bits("log_uniform", True, a)


def check_bits(name, shared, a):
    """The op against the draw and the loss in two calls."""
    loss, ids, saved, _ = OPS.sampled_softmax_static(**a)
    dtype = a["weight"].dtype
    sampler = samplers()[name].to(ids.device)
    exclude = None if shared else a["target"].clamp_min(-1)
    draw = sampler.sample(a["hidden"], a["num_samples"], shared=shared, key=a["key"], exclude=exclude)
    assert torch.equal(ids, draw.ids)
    log_q = draw.log_q.double() if dtype is torch.float64 else draw.log_q
    wanted = OPS.sampled_softmax(
        a["hidden"], a["weight"], a["target"], draw.ids, log_q, a["bias"], None, None, None, 1.5, 0.0, -100, 1, False,
        True, False, True, True,
    )  # fmt: skip
    assert torch.equal(loss, wanted[0])
    # Everything but the coefficients of the ignored row, which are unspecified, must have the same bits.
    assert torch.equal(saved.nan_to_num(0.0), wanted[2].nan_to_num(0.0))


@pytest.mark.parametrize("shared", [False, True])
def test_opcheck(backend, shared):
    for reduction in (0, 1):
        a = arguments("unigram", shared=shared, dtype=torch.float32, reduction=reduction, device=backend.device)
        torch.library.opcheck(OPS.sampled_softmax_static.default, (), a, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_the_forward_gives_the_gradient_of_h_for_an_upstream_of_one(backend, dtype, shared):
    for reduction in (1, 2):
        a = arguments("uniform", shared=shared, dtype=dtype, reduction=reduction, device=backend.device)
        *made, d_hidden = OPS.sampled_softmax_static(**a, unit_hidden=True)
        loss, ids, saved = made
        assert all(torch.equal(x, y) for x, y in zip(made, OPS.sampled_softmax_static(**a), strict=False))
        if backend.name != "cpu":
            assert d_hidden.shape == (0,)
            continue
        call = (torch.ones_like(loss), None, a["hidden"], a["target"], ids, saved, reduction, False, True)
        assert torch.equal(d_hidden, OPS.loss_entries(*call)[0])
        assert bool((d_hidden != 0).any())
        torch.library.opcheck(
            OPS.sampled_softmax_static.default,
            (),
            {**a, "unit_hidden": True},
            test_utils=("test_schema", "test_faketensor"),
        )
    none = arguments("uniform", shared=shared, dtype=dtype, reduction=0, device=backend.device)
    assert OPS.sampled_softmax_static(**none, unit_hidden=True)[3].shape == (0,)


@pytest.mark.parametrize("shared", [False, True])
def test_the_op_alone_has_the_gradients_of_the_other(shared):
    a = arguments("uniform", shared=shared, dtype=torch.float32)
    grads = []
    for call in ("static", "given"):
        leaves = [a[name].clone().requires_grad_() for name in ("hidden", "weight", "bias")]
        b = {**a, **dict(zip(("hidden", "weight", "bias"), leaves, strict=True))}
        loss, ids, *_ = OPS.sampled_softmax_static(**b)
        if call == "given":
            log_q = torch.full(ids.shape, -math.log(CLASSES if shared else CLASSES - 1))
            log_q = log_q if shared else torch.where(a["target"][:, None] < 0, -math.log(CLASSES), log_q)
            loss = OPS.sampled_softmax(
                *leaves[:2], a["target"], ids, log_q, leaves[2], None, None, None, 1.5, 0.0, -100, 1, False, True,
                False, True, True,
            )[0]  # fmt: skip
        grads.append([g.to_dense() for g in torch.autograd.grad(loss, leaves)])
    for ours, wanted in zip(*grads, strict=True):
        torch.testing.assert_close(ours, wanted)


def test_an_empty_batch(backend):
    a = arguments("uniform", shared=False, dtype=torch.float32, batch=0, device=backend.device)
    loss, ids, *_ = OPS.sampled_softmax_static(**a)
    assert float(loss) == 0.0
    assert ids.shape == (0, 9)


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        ({"target": torch.tensor([0, 1, 2, 3, 4, CLASSES])}, IndexError, "or ignore_index, got 50"),
        ({"target": torch.tensor([0, 1, 2, 3, 4, -7])}, IndexError, "or ignore_index, got -7"),
        ({"target": torch.zeros(5, dtype=torch.int64)}, ValueError, "target must be [B]"),
        ({"ignore_index": 3}, ValueError, "ignore_index must be negative if the op draws, got 3"),
        ({"law": 3}, ValueError, "law must be in [0, 2], got 3"),
        ({"law": 2}, ValueError, "table and prefix must be given"),
        ({"num_samples": -1}, ValueError, "num_samples must be in [0, 2^24], got -1"),
        ({"num_samples": 1 << 25, "shared": True}, ValueError, "num_samples must be in [0, 2^24], got 33554432"),
        ({"key": torch.zeros(3, dtype=torch.int64)}, ValueError, "key must be [2]"),
        ({"hidden": torch.zeros(6)}, ValueError, "hidden must be [B, d]"),
        ({"weight": torch.zeros(6)}, ValueError, "weight must be [C, d]"),
        ({"weight": torch.zeros(0, 8)}, ValueError, "weight must have at least one class, got [0, 8]"),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else None,
)  # fmt: skip
def test_bad_arguments_are_named(change, kind, text):
    a = {**arguments("uniform", shared=False, dtype=torch.float32), **change}
    with pytest.raises(RuntimeError) as caught:
        OPS.sampled_softmax_static(**a)
    error = op_error(caught.value)
    assert type(error) is kind
    assert text in str(error)


class Spy(sx.samplers.Uniform):
    """A static sampler that overrides `sample`."""

    calls = 0

    def sample(self, *args, **options):
        Spy.calls += 1
        return super().sample(*args, **options)


@pytest.mark.parametrize("shared", [False, True])
def test_a_head_draws_the_same_either_way(shared):
    """A subclass with its own `sample` is asked; the result does not depend on which way it went."""
    found = []
    for kind in (sx.samplers.Uniform, Spy):
        torch.manual_seed(0)
        head = sx.SampledClassifier(12, CLASSES, kind(CLASSES), num_samples=7, shared=shared)
        head.fuse_optimizer(sx.optim.RowAdagrad(head.parameters(), lr=0.5))
        h, y = torch.randn(4, 12, requires_grad=True), torch.tensor([0, 3, -100, 3])
        before = Spy.calls
        loss = head(h, y)
        assert (Spy.calls > before) == (kind is Spy)
        assert head.spec().draws_static == (kind is not Spy)
        loss.backward()
        found.append((loss.detach(), h.grad, head.weight.detach().clone(), head.bias.detach().clone()))
    for ours, spied in zip(*found, strict=True):
        assert torch.equal(ours, spied)


def test_what_keeps_a_head_from_drawing_in_the_loss():
    def head(sampler, **options):
        return sx.SampledClassifier(4, CLASSES, sampler, num_samples=7, **options)

    uniform = sx.samplers.Uniform(CLASSES)
    assert head(uniform).spec().draws_static
    assert not head(uniform, ignore_index=0).spec().draws_static
    assert head(uniform, loss="nce").spec().draws_static
    assert not head(uniform, loss=sx.losses.SampledSoftmax(corrected=False)).spec().draws_static
    assert not head(sx.samplers.Unigram(torch.tensor([1e6] + [1.0] * 49)), shared=True).spec().draws_static
    assert head(sx.samplers.Unigram(torch.tensor([1e6] + [1.0] * 49))).spec().draws_static
    changed = head(uniform)
    changed.set_sampler(Spy(CLASSES))
    assert not changed.spec().draws_static


def test_laws_of_the_samplers():
    assert samplers()["uniform"].law() == StaticLaw(0)
    law = samplers()["unigram"].law()
    assert law.number == 2
    assert law.table.shape == (CLASSES, 4)
    assert law.prefix.shape == (CLASSES + 1,)
