"""Shared draws and an entry loss in one op: the same bits as the two ops, and what the head makes of it."""

from __future__ import annotations

import pytest
import torch

import samplex_cuda as sx
from samplex_cuda._checks import op_error
from samplex_cuda.ops.entry_loss import KINDS

OPS = torch.ops.samplex
CLASSES = 50
LOSSES = ["negative_sampling", "one_vs_each"]


def sampler_of(name):
    counts = torch.arange(CLASSES, 0, -1.0)
    made = {"uniform": sx.samplers.Uniform, "log_uniform": sx.samplers.LogUniform}
    return made[name](CLASSES) if name in made else sx.samplers.Unigram(counts)


def arguments(loss, name="log_uniform", *, dtype=torch.float32, bias=True, reduction=1, batch=6, m=9, dim=12,
              device="cpu", need_grad=True):  # fmt: skip
    """Arguments of `entry_loss_static` by name; row 1 is ignored."""
    gen = torch.Generator().manual_seed(3)
    hidden, weight = (torch.randn(n, dim, generator=gen).to(device, dtype) for n in (batch, CLASSES))
    target = torch.randint(CLASSES, (batch,), generator=gen).to(device)
    target[1:2] = -100
    law = sampler_of(name).to(device).law()
    return {
        "hidden": hidden, "weight": weight, "target": target, "key": torch.tensor([5, 7], device=device),
        "law": law.number, "num_samples": m, "table": law.table, "prefix": law.prefix,
        "bias": torch.randn(CLASSES, generator=gen).to(device, dtype) if bias else None,
        "class_weight": (torch.rand(CLASSES, generator=gen) + 0.5).to(device, dtype), "kind": KINDS[loss],
        "scale": 1.5, "ignore_index": -100, "reduction": reduction, "need_grad": need_grad,
    }  # fmt: skip


def in_two_calls(a, ids, log_q):
    """The loss of given draws."""
    if a["weight"].dtype is torch.float64:
        log_q = log_q.double()
    return OPS.entry_loss(
        a["hidden"], a["weight"], a["target"], ids, log_q, None, None, a["bias"], a["class_weight"], None, None,
        a["kind"], a["scale"], 0.0, a["ignore_index"], a["reduction"], a["need_grad"], True,
    )  # fmt: skip


def check_bits(name, a):
    loss, ids, saved = OPS.entry_loss_static(**a)
    draw = sampler_of(name).to(ids.device).sample(a["hidden"], a["num_samples"], shared=True, key=a["key"])
    assert torch.equal(ids, draw.ids)
    wanted = in_two_calls(a, draw.ids, draw.log_q)
    assert torch.equal(loss, wanted[0])
    assert torch.equal(saved.nan_to_num(0.0), wanted[1].nan_to_num(0.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["uniform", "log_uniform", "unigram"])
@pytest.mark.parametrize("loss", LOSSES)
def test_it_gives_the_bits_of_the_draw_and_the_loss(backend, loss, name, dtype):
    for reduction in (0, 1, 2):
        check_bits(name, arguments(loss, name, dtype=dtype, reduction=reduction, device=backend.device))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("dim", "m", "shift"), [(5, 1, 0), (6, 17, 0), (8, 17, 1), (0, 4, 0), (8, 0, 0)])
@pytest.mark.parametrize("loss", LOSSES)
def test_draws_and_rows_of_any_width(backend, loss, dim, m, shift, bias):
    a = arguments(loss, dim=dim, m=m, bias=bias, device=backend.device)
    memory = torch.empty(CLASSES * dim + shift, device=backend.device)
    a["weight"] = memory[shift:].view(CLASSES, dim).copy_(a["weight"])
    check_bits("log_uniform", a)


@pytest.mark.parametrize("batch", [1, 31, 33, 2048, 2049])
@pytest.mark.parametrize("ignored", [False, True])
def test_the_mean_over_the_batch(backend, batch, ignored):
    """On a GPU the last block of the loss makes it up to 2048 rows, a separate kernel for more."""
    found = {}
    for reduction in (0, 1, 2):
        a = arguments("one_vs_each", reduction=reduction, batch=batch, m=3, dim=4, device=backend.device)
        a["class_weight"] = None
        if ignored:
            a["target"].fill_(-100)
        found[reduction] = OPS.entry_loss_static(**a)[0].cpu().double()
    counted = 0 if ignored else batch - (batch > 1)
    torch.testing.assert_close(found[2], found[0].sum(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[1], found[0].sum() / max(counted, 1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("loss", LOSSES)
def test_opcheck(backend, loss):
    for reduction in (0, 1):
        a = arguments(loss, "unigram", reduction=reduction, device=backend.device)
        torch.library.opcheck(OPS.entry_loss_static.default, (), a, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("loss", LOSSES)
def test_the_op_alone_has_the_gradients_of_the_other(loss):
    a, grads = arguments(loss), []
    for call in ("static", "given"):
        leaves = [a[name].clone().requires_grad_() for name in ("hidden", "weight", "bias")]
        b = {**a, **dict(zip(("hidden", "weight", "bias"), leaves, strict=True))}
        value, ids, _ = OPS.entry_loss_static(**b)
        if call == "given":
            value = in_two_calls(b, ids, sampler_of("log_uniform").log_prob(None, ids))[0]
        grads.append([g.to_dense() for g in torch.autograd.grad(value, leaves)])
    for ours, wanted in zip(*grads, strict=True):
        torch.testing.assert_close(ours, wanted)


def test_an_empty_batch(backend):
    value, ids, _ = OPS.entry_loss_static(**arguments("one_vs_each", batch=0, device=backend.device))
    assert float(value) == 0.0
    assert ids.shape == (9,)


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        ({"target": torch.tensor([0, 1, 2, 3, 4, CLASSES])}, IndexError, "or ignore_index, got 50"),
        ({"target": torch.zeros(5, dtype=torch.int64)}, ValueError, "target must be [B]"),
        ({"law": 3}, ValueError, "law must be in [0, 2], got 3"),
        ({"law": 2}, ValueError, "table and prefix must be given"),
        ({"num_samples": -1}, ValueError, "num_samples must be in [0, 2^24], got -1"),
        ({"key": torch.zeros(3, dtype=torch.int64)}, ValueError, "key must be [2]"),
        ({"hidden": torch.zeros(6)}, ValueError, "hidden must be [B, d]"),
        ({"weight": torch.zeros(6)}, ValueError, "weight must be [C, d]"),
        ({"weight": torch.zeros(0, 8)}, ValueError, "weight must have a class to draw, got [0, 8]"),
        ({"kind": 1}, ValueError, "kind must be 0 (negative_sampling) or 2 (one_vs_each), got 1"),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else None,
)  # fmt: skip
def test_bad_arguments_are_named(change, kind, text):
    a = {**arguments("one_vs_each"), **change}
    with pytest.raises(RuntimeError) as caught:
        OPS.entry_loss_static(**a)
    error = op_error(caught.value)
    assert type(error) is kind
    assert text in str(error)


class Spy(sx.samplers.Uniform):
    """A static sampler that overrides `sample`, which a head then calls."""

    def sample(self, *args, **options):
        return super().sample(*args, **options)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_head_draws_the_same_either_way(backend, loss):
    found = []
    for kind in (sx.samplers.Uniform, Spy):
        torch.manual_seed(0)
        head = sx.SampledClassifier(12, CLASSES, kind(CLASSES), num_samples=7, shared=True, loss=loss)
        head.to(backend.device).fuse_optimizer(sx.optim.RowAdagrad(head.parameters(), lr=0.5))
        assert head.spec().draws_static == (kind is not Spy)
        h = torch.randn(4, 12).to(backend.device).requires_grad_()
        value = head(h, torch.tensor([0, 3, -100, 3], device=backend.device))
        value.backward()
        found.append((value.detach(), h.grad, head.weight.detach().clone(), head.bias.detach().clone()))
    for ours, spied in zip(*found, strict=True):
        assert torch.equal(ours, spied)


def test_losses_that_read_a_number_per_target_draw_apart():
    def static(loss, **options):
        head = sx.SampledClassifier(4, CLASSES, sx.samplers.Uniform(CLASSES), 7, loss=loss, **options)
        return head.spec().draws_static

    assert static(sx.losses.NegativeSampling(), shared=True)
    assert not static(sx.losses.NegativeSampling())
    assert not static(sx.losses.NegativeSampling(reg=0.1), shared=True)
    assert not static(sx.losses.NCE(), shared=True)
    assert not static(sx.losses.AugmentReduce(num_examples=3), shared=True)
