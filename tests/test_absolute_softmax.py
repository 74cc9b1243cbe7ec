"""`absolute=True` from end to end: p proportional to exp |s| in training, evaluation and prediction, with the samplers
whose distribution is symmetric in the sign of the logit."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import samplex_cuda as sx

C, D, B = 200, 6, 16


def make(kind: str, head: sx.SampledClassifier) -> sx.samplers.Sampler:
    weight, bias = head.weight, head.bias
    if kind == "softmax":
        return sx.samplers.Softmax(weight, bias, scale=head.scale, absolute=True, copy=False)
    if kind == "quartic":
        return sx.samplers.Quartic(weight, bias, scale=head.scale, copy=False)
    return sx.samplers.Quadratic(weight.detach(), bias=bias.detach())


KINDS = ["softmax", "quartic", *(["quadratic"] if hasattr(sx.samplers, "Quadratic") else [])]


def problem(kind: str, m: int, reduction: str = "mean"):
    torch.manual_seed(0)
    head = sx.SampledClassifier(
        D,
        C,
        sx.samplers.Uniform(C),
        num_samples=m,
        loss=sx.losses.SampledSoftmax(absolute=True),
        scale=1.5,
        reduction=reduction,
        sparse=False,
    )
    torch.nn.init.normal_(head.weight)
    head.sampler = make(kind, head)
    h, y = torch.randn(B, D), torch.randint(C, (B,))
    logits = (1.5 * (h @ head.weight.T + head.bias)).abs().detach()
    return head, h, y, logits


def test_evaluation_and_prediction():
    head, h, y, logits = problem("softmax", 5)
    head.eval()
    torch.testing.assert_close(head(h, y), F.cross_entropy(logits, y), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(head.log_prob(h), logits.log_softmax(1), rtol=1e-5, atol=1e-5)
    assert torch.equal(head.predict(h), logits.argmax(1))
    values, ids = head.topk(h, 7)
    torch.testing.assert_close(values, logits.topk(7)[0], rtol=1e-5, atol=1e-5)
    assert torch.equal(ids, logits.topk(7)[1])
    torch.testing.assert_close(head.scores(h), logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("m", [1, 10])
def test_the_absolute_softmax_law_gives_the_full_loss_and_gradient(m):
    head, h, y, _ = problem("softmax", m)
    full = head.eval()(h, y)
    loss = head.train()(h, y)
    torch.testing.assert_close(loss, full, rtol=1e-5, atol=1e-5)
    # One draw's gradient is not the full one; its mean is.
    weight = head.weight.detach().double().requires_grad_()
    F.cross_entropy((1.5 * (h.double() @ weight.T + head.bias.detach().double())).abs(), y).backward()
    n = 100
    head(h.repeat(n, 1), y.repeat(n), key=sx.Key(0)).backward()
    error = (head.weight.grad.double() - weight.grad).norm() / weight.grad.norm()
    assert error < 3 / (n * m) ** 0.5


@pytest.mark.parametrize("kind", KINDS)
def test_many_draws_give_the_full_loss(kind):
    head, h, y, logits = problem(kind, 4000, "none")
    loss = head(h, y, key=sx.Key(1))
    full = F.cross_entropy(logits, y, reduction="none")
    q = head.sampler.log_prob(h, torch.arange(C).expand(B, -1), exclude=y).double().exp()
    e = logits.double().exp().scatter(1, y[:, None], 0.0)
    second = torch.where(q > 0, e**2 / q.clamp_min(1e-300), 0.0).sum(1)
    error = ((second - e.sum(1) ** 2).clamp_min(0) / 4000).sqrt() / logits.double().exp().sum(1)
    assert ((loss - full).abs() < 5 * error + 2e-5).all()


@pytest.mark.parametrize("kind", KINDS)
def test_training_lowers_the_exact_loss(kind):
    head, h, y, _ = problem(kind, 20)
    optimizer = torch.optim.SGD(head.parameters(), lr=1.0)
    before = float(head.eval()(h, y))
    for step in range(30):
        optimizer.zero_grad()
        head.train()(h, y, key=sx.Key(step)).backward()
        optimizer.step()
        if kind == "quadratic":
            head.sampler.rebuild(head.weight.detach(), head.bias.detach())
    assert float(head.eval()(h, y)) < before - 0.5
