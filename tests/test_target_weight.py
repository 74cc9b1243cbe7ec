"""Targets with weights, as class probabilities in `F.cross_entropy`: exact, sampled, in a head."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import samplex_cuda as sx

CLASSES, DIM, BATCH, TARGETS = 30, 8, 6, 3


def case(dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    h = torch.randn(BATCH, DIM, generator=g).to(dtype).requires_grad_()
    weight = torch.randn(CLASSES, DIM, generator=g).to(dtype).requires_grad_()
    bias = torch.randn(CLASSES, generator=g).to(dtype).requires_grad_()
    target = torch.stack([torch.randperm(CLASSES, generator=g)[:TARGETS] for _ in range(BATCH)])
    share = torch.rand(BATCH, TARGETS, generator=g).to(dtype)
    return h, weight, bias, target, share / share.sum(1, keepdim=True)


def probabilities(target, share):
    return torch.zeros(BATCH, CLASSES, dtype=share.dtype).scatter_add(1, target, share)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_full_softmax_is_cross_entropy_of_probabilities(reduction, smoothing, weighted):
    h, weight, bias, target, share = case()
    class_weight = torch.rand(CLASSES, dtype=torch.float64) + 0.5 if weighted else None
    ours = sx.functional.full_softmax(
        h, weight, target, bias, scale=1.5, reduction=reduction, label_smoothing=smoothing, target_weight=share,
        class_weight=class_weight,
    )  # fmt: skip
    theirs = F.cross_entropy(
        1.5 * F.linear(h, weight, bias), probabilities(target, share), class_weight, reduction=reduction,
        label_smoothing=smoothing,
    )  # fmt: skip
    torch.testing.assert_close(ours, theirs)
    for a, b in zip(*(torch.autograd.grad(x.sum(), (h, weight, bias)) for x in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b)


def test_weights_of_one_target_and_padding():
    h, weight, bias, target, share = case()
    share = share * 2.5  # need not sum to 1
    padded, none = target.clone(), share.clone()
    padded[:, 2], none[:, 2] = -100, 7.0
    want = F.cross_entropy(F.linear(h, weight, bias), probabilities(target[:, :2], share[:, :2]))
    torch.testing.assert_close(sx.functional.full_softmax(h, weight, padded, bias, target_weight=none), want)
    one = sx.functional.full_softmax(h, weight, target[:, 0], bias, target_weight=share[:, 0], reduction="none")
    plain = sx.functional.full_softmax(h, weight, target[:, 0], bias, reduction="none")
    torch.testing.assert_close(one, plain * share[:, 0])


@pytest.mark.parametrize("shared", [False, True])
def test_sampling_every_class_once_is_exact(shared):
    """All other classes drawn with q = 1 / m: the sampled normalizer is the full one."""
    h, weight, bias, target, share = case()
    ids = torch.arange(CLASSES).expand(BATCH, -1)
    log_q = torch.full((BATCH, CLASSES), -math.log(CLASSES), dtype=torch.float64)
    if shared:
        ids, log_q = ids[0], log_q[0]
    ours = sx.functional.sampled_softmax(h, weight, target, ids, log_q, bias, target_weight=share)
    theirs = F.cross_entropy(F.linear(h, weight, bias), probabilities(target, share))
    torch.testing.assert_close(ours, theirs)
    for a, b in zip(*(torch.autograd.grad(x, (h, weight, bias)) for x in (ours, theirs)), strict=True):
        torch.testing.assert_close(a.to_dense(), b)


@pytest.mark.parametrize("loss", ["sampled_softmax", "full_softmax"])
def test_a_head_takes_them_in_training_and_evaluation(loss):
    h, weight, bias, target, share = case()
    head = sx.SampledClassifier(
        DIM, CLASSES, sx.samplers.Uniform(CLASSES), 200_000, loss, shared=True, dtype=torch.float64
    )
    head.load_state_dict({"weight": weight.detach(), "bias": bias.detach()})
    want = F.cross_entropy(head.linear()(h), probabilities(target, share)).detach()
    close = 0.01 if loss == "sampled_softmax" else 1e-9
    torch.testing.assert_close(head(h, target, target_weight=share).detach(), want, atol=close, rtol=0)
    rows = torch.rand(BATCH, dtype=torch.float64)
    by_row = F.cross_entropy(head.linear()(h), probabilities(target, share), reduction="none")
    wanted = ((by_row * rows).sum() / rows.sum()).detach()
    found = head(h, target, target_weight=share, sample_weight=rows).detach()
    torch.testing.assert_close(found, wanted, atol=close, rtol=0)
    head.eval()
    torch.testing.assert_close(head(h, target, target_weight=share), want)
    lead = head(h.view(2, 3, DIM), target.view(2, 3, TARGETS), target_weight=share.view(2, 3, TARGETS))
    torch.testing.assert_close(lead, want)


def test_a_fused_head_takes_them():
    h, _, _, target, share = case(torch.float32)
    heads = []
    for fused in (False, True):
        torch.manual_seed(0)
        head = sx.SampledClassifier(DIM, CLASSES, sx.samplers.Uniform(CLASSES), 5)
        optimizer = sx.optim.RowAdagrad(head.parameters(), lr=0.1)
        if fused:
            head.fuse_optimizer(optimizer)
        head(h, target, target_weight=share, key=sx.Key(0)).backward()
        optimizer.step()
        heads.append(head)
    torch.testing.assert_close(heads[0].weight, heads[1].weight)


def test_compiled():
    h, weight, _, target, share = case(torch.float32)
    compiled = torch.compile(
        lambda h, w: sx.functional.full_softmax(h, w, target, target_weight=share), backend="aot_eager", fullgraph=True
    )
    found, want = compiled(h, weight), sx.functional.full_softmax(h, weight, target, target_weight=share)
    torch.testing.assert_close(found, want)
    for a, b in zip(*(torch.autograd.grad(x, (h, weight)) for x in (found, want)), strict=True):
        torch.testing.assert_close(a, b)


def test_wrong_ones_are_refused():
    h, weight, _, target, share = case()
    ids, log_q = torch.arange(4), torch.zeros(4, dtype=torch.float64)
    for bad in (share[:, :2], target, share[0]):
        with pytest.raises(ValueError, match=r"sampled_softmax: target_weight must be \[6, 3\] floating point"):
            sx.functional.sampled_softmax(h, weight, target, ids, log_q, target_weight=bad)
        with pytest.raises(ValueError, match=r"full_softmax: target_weight must be \[6, 3\] floating point"):
            sx.functional.full_softmax(h, weight, target, target_weight=bad)
    head = sx.SampledClassifier(DIM, CLASSES, sx.samplers.Uniform(CLASSES), 5, "nce", dtype=torch.float64)
    with pytest.raises(ValueError, match="target_weight must be None with NCE"):
        head(h, target, target_weight=share)
