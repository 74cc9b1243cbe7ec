"""`torch.func` and forward-mode differentiation: the right derivative, or an error; never a silent 0."""

from __future__ import annotations

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from head_cases import make

import samplex_cuda as sx
from samplex_cuda import functional as F

C, D, B, M = 20, 4, 3, 5
Y, IDS = torch.tensor([1, 2, 3]), torch.arange(5, 20).reshape(B, M)
LOG_Q, TARGET_LOG_Q = torch.full((B, M), -3.0), torch.full((B,), -3.0)

LOSSES = {
    "sampled_softmax": lambda h, w: F.sampled_softmax(h, w, Y, IDS, LOG_Q),
    "shared": lambda h, w: F.sampled_softmax(h, w, Y, IDS[0], LOG_Q[0], torch.zeros(C)),
    "negative_sampling": lambda h, w: F.negative_sampling(h, w, Y, IDS, LOG_Q),
    "nce": lambda h, w: F.nce(h, w, Y, IDS, LOG_Q, TARGET_LOG_Q),
    "one_vs_each": lambda h, w: F.one_vs_each(h, w, Y, IDS, LOG_Q),
    "contrastive": lambda h, w: F.contrastive(h, w[:B]),
}
OTHERS = {
    "full_softmax": lambda h, w: F.full_softmax(h, w, Y),
    "attention_pool": lambda h, w: F.attention_pool(IDS, w, h[0], h[1]).sum(),
    "rff": lambda h, w: sx.rff.features(h, w, kind="positive", nu=1.0).sum(),
}
ALL = LOSSES | OTHERS


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    return torch.randn(B, D, generator=g), torch.randn(C, D, generator=g)


@pytest.mark.parametrize("name", ALL)
def test_forward_mode_raises(name):
    h, w = inputs()
    f = ALL[name]
    wanted = "forward-mode differentiation .* is not supported; use backward"
    with pytest.raises(RuntimeError, match=wanted):
        torch.func.jvp(lambda x: f(x, w), (h,), (torch.ones_like(h),))
    with pytest.raises(RuntimeError, match=wanted):
        torch.func.jvp(lambda x: f(h, x), (w,), (torch.ones_like(w),))
    for leaf in (h, h.clone().requires_grad_()):
        with forward_ad.dual_level(), pytest.raises(RuntimeError, match=wanted):
            f(forward_ad.make_dual(leaf, torch.ones_like(h)), w)
    with forward_ad.dual_level():
        assert bool(f(h, w).isfinite())  # nothing carries a tangent


@pytest.mark.parametrize("name", LOSSES)
def test_functional_gradients_of_losses(backend, name):
    h, w = inputs()
    f = LOSSES[name]
    a, b = h.clone().requires_grad_(), w.clone().requires_grad_()
    f(a, b).backward()
    found = torch.func.grad(f, argnums=(0, 1))(h, w)
    torch.testing.assert_close(found[0], a.grad)
    torch.testing.assert_close(found[1], b.grad.to_dense())
    value, pull = torch.func.vjp(lambda x: f(x, w), h)
    torch.testing.assert_close(value, f(h, w))
    torch.testing.assert_close(pull(torch.tensor(2.0))[0], 2.0 * a.grad)


@pytest.mark.parametrize("name", LOSSES)
def test_second_derivatives_raise(name):
    h, w = inputs()
    f = LOSSES[name]
    for twice in (
        lambda: torch.func.grad(lambda x: torch.func.grad(f)(x, w).square().sum())(h),
        lambda: torch.func.hessian(f)(h, w),
    ):
        with pytest.raises(RuntimeError, match="is not supported"):
            twice()


@pytest.mark.parametrize("name", OTHERS)
def test_functional_gradients_of_others_raise(name):
    h, w = inputs()
    with pytest.raises(RuntimeError, match=rf"{name}: torch.func.grad is not supported; use backward\(\)"):
        torch.func.grad(OTHERS[name])(h, w)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # jacrev loops over rows by torch's own fallback
def test_lse_and_rows_have_functional_gradients():
    h, w = inputs()

    def f(x):
        loss, lse = F.sampled_softmax(x, w, Y, IDS, LOG_Q, reduction="none", return_lse=True)
        return (loss * torch.arange(B)).sum() + lse.square().sum()

    leaf = h.clone().requires_grad_()
    f(leaf).backward()
    torch.testing.assert_close(torch.func.grad(f)(h), leaf.grad)
    rows = torch.func.jacrev(lambda x: F.sampled_softmax(x, w, Y, IDS, LOG_Q, reduction="none"))(h)
    for b in range(B):
        (one,) = torch.autograd.grad(F.sampled_softmax(leaf, w, Y, IDS, LOG_Q, reduction="none")[b], leaf)
        torch.testing.assert_close(rows[b], one)


@pytest.mark.parametrize("sampler", ["static", "quadratic"])
def test_a_head_under_functional_call(sampler):
    made = None if sampler == "static" else sx.samplers.Quadratic(torch.randn(97, 12))
    head = make(sampler=made, bias=False)
    head.update_sampler()
    h, y = torch.randn(7, 12), torch.arange(7)

    def f(parameters):
        return torch.func.functional_call(head, parameters, (h, y), {"key": sx.Key(1)})

    found = torch.func.grad(f)({"weight": head.weight.detach()})["weight"]
    head(h, y, key=sx.Key(1)).backward()
    torch.testing.assert_close(found, head.weight.grad.to_dense())
