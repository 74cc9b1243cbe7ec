"""A row with an ignored target has no part in a step, whatever numbers its hidden vector holds."""

from __future__ import annotations

import math

import pytest
import torch
from head_cases import C, D, make

import samplex_cuda as sx
from samplex_cuda import functional as F

ROWS, BAD, DRAWS = 6, (1, 4), 9
LOSSES = ["sampled_softmax", "negative_sampling", "nce", "one_vs_each", "augment_reduce", "full_softmax", "torch"]


class Logistic(sx.losses.ScoreLoss):
    """A loss written in torch."""

    name = "logistic"

    def row_loss(self, target, draws, x):
        return torch.nn.functional.softplus(-target).nan_to_num(0.0).sum(1) + torch.nn.functional.softplus(draws).sum(1)


def head_of(loss: str, **options) -> sx.SampledClassifier:
    torch.manual_seed(3)
    if loss == "augment_reduce":
        options["num_examples"] = ROWS
    return make(loss=Logistic() if loss == "torch" else loss, num_samples=DRAWS, **options)


def data(value: float) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch whose ignored rows hold `value`."""
    g = torch.Generator().manual_seed(5)
    h, y = torch.randn(ROWS, D, generator=g), torch.randint(C, (ROWS,), generator=g)
    h[BAD, 0], h[BAD, 3] = value, -value
    y[list(BAD)] = -100
    return h.requires_grad_(), y


def run(head: sx.SampledClassifier, value: float, factor: float = 1.0) -> list[torch.Tensor]:
    h, y = data(value)
    more = {"index": torch.arange(ROWS)} if head.loss.name == "augment_reduce" else {}
    loss = head(h, y, key=sx.Key(4), **more)
    (loss.sum() * factor).backward()
    grads = [p.grad.to_dense() for p in (head.weight, head.bias) if p.grad is not None]
    return [loss.detach(), h.grad, head.weight.detach().clone(), head.bias.detach().clone(), *grads]


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("form", ["shared", "rows", "shared fused", "rows fused"])
@pytest.mark.parametrize("loss", LOSSES)
def test_bad_numbers_of_an_ignored_row_reach_nothing(backend, loss, form, reduction, value):
    if backend.emulated and (loss == "torch" or value == math.inf):
        pytest.skip("the CPU has shown it")
    if loss == "full_softmax" and "fused" in form:
        pytest.skip("its gradients are dense")
    found = []
    for number in (0.5, value):
        head = head_of(loss, shared="shared" in form, reduction=reduction)
        if "fused" in form:
            head.fuse_optimizer(sx.optim.RowAdagrad(head.parameters(), lr=0.1))
        found.append(run(head, number))
    for good, bad in zip(*found, strict=True):
        assert bool(bad.isfinite().all())
        torch.testing.assert_close(bad, good, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("shared", [False, True])
def test_an_infinite_class_row_leaves_ignored_rows_alone(backend, shared):
    h, y = data(0.5)
    weight = torch.randn(C, D)
    weight[7] = math.inf
    ids = torch.tensor([7, 8, 9]) if shared else torch.tensor([7, 8, 9]).expand(ROWS, -1).contiguous()
    loss = F.sampled_softmax(h, weight, y, ids, torch.full(ids.shape, -3.0), reduction="sum")
    (grad,) = torch.autograd.grad(loss, h)
    assert torch.equal(grad[list(BAD)], torch.zeros(len(BAD), D))


@pytest.mark.parametrize("value", [math.nan, 0.5])
def test_lse_of_rows_with_class_weight_zero_keeps_its_gradient(backend, value):
    """Such rows have no loss either, but `return_lse` gives them a gradient."""
    h, y = data(value)
    class_weight = torch.ones(C)
    class_weight[y[0]] = 0.0
    weight = torch.randn(C, D, requires_grad=True)
    ids = torch.arange(20, 25)
    log_q = torch.full((5,), -2.0)
    _, lse = F.sampled_softmax(h, weight, y, ids, log_q, class_weight=class_weight, return_lse=True)
    upstream = torch.zeros(ROWS)
    upstream[0], upstream[BAD[0]] = 1.0, 2.0
    (lse * upstream).sum().backward()
    logits = torch.cat([h[0] @ weight[y[0]][:, None], h[0] @ weight[ids].t() + 2.0 - math.log(5)])
    wanted = torch.autograd.grad(logits.logsumexp(0), weight)[0]
    torch.testing.assert_close(weight.grad.to_dense(), wanted, rtol=1e-5, atol=1e-6)
    assert torch.equal(h.grad[list(BAD)], torch.zeros(len(BAD), D))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("loss", LOSSES[:-2])
def test_a_batch_of_ignored_rows_has_no_gradient_under_any_scale(backend, loss, shared):
    head = head_of(loss, shared=shared)
    h, y = torch.randn(ROWS, D, requires_grad=True), torch.full((ROWS,), -100)
    more = {"index": torch.arange(ROWS)} if loss == "augment_reduce" else {}
    value = head(h, y, key=sx.Key(4), **more)
    (value * 65536.0).backward()  # as a GradScaler does
    assert float(value.detach()) == 0.0
    assert not bool(h.grad.any())
    for p in (head.weight, head.bias):
        dense = p.grad.to_dense()
        assert torch.equal(dense, torch.zeros_like(dense))


@pytest.mark.parametrize("shared", [False, True])
def test_a_grad_scaler_makes_the_update_all_the_same(shared):
    """The scaler leaves out an update with nan in it; a nan that takes no part is no reason."""
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    found = []
    for number in (0.5, math.nan):
        head = head_of("sampled_softmax", shared=shared)
        before = head.weight.detach().clone()
        head.fuse_optimizer(sx.optim.RowAdagrad(head.parameters(), lr=0.1), grad_scaler=scaler)
        h, y = data(number)
        scaler.scale(head(h, y, key=sx.Key(4))).backward()
        assert not torch.equal(head.weight, before)
        found.append(head.weight.detach().clone())
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-7)
