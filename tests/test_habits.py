"""What people do with modules: copies, pickles, averages, functional calls, other dtypes, the meta device."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import samplex_cuda as sx

C, D = 40, 8
SAMPLERS = {
    "uniform": lambda: sx.samplers.Uniform(C),
    "unigram": lambda: sx.samplers.Unigram(torch.arange(1.0, C + 1)),
    "log_uniform": lambda: sx.samplers.LogUniform(C),
    "quadratic": lambda: sx.samplers.Quadratic(torch.zeros(C, D)),
    "rff": lambda: sx.samplers.RandomFourier(torch.zeros(C, D), 16, kind="positive"),
    "softmax": lambda: sx.samplers.Softmax(torch.zeros(C, D)),
    "tree": lambda: sx.samplers.Tree.fit(torch.randn(99, D), torch.randint(C, (99,)), num_classes=C, dim=4),
    "mixture": lambda: sx.samplers.Mixture([(sx.samplers.Uniform(C), 1.0), (sx.samplers.LogUniform(C), 2.0)]),
}


def head(sampler="uniform", classes=C, **options):
    torch.manual_seed(0)
    made = SAMPLERS[sampler]() if classes == C else sx.samplers.Uniform(classes)
    return sx.SampledClassifier(D, classes, made, num_samples=6, **{"bias": False, **options})


def batch():
    g = torch.Generator().manual_seed(1)
    return torch.randn(5, D, generator=g), torch.randint(C, (5,), generator=g)


def step(made, key=3):
    """Loss and weight gradient of a step, with the gradient dense."""
    h, y = batch()
    made.zero_grad()
    loss = made(h.to(made.weight.dtype), y, key=sx.Key(key, 0))
    loss.backward()
    return loss.detach(), made.weight.grad.to_dense()


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@pytest.mark.parametrize("used", [False, True])
def test_copies_are_independent_and_equal(sampler, how, used):
    made = head(sampler)
    if used:  # hooks and sinks exist after a step
        step(made)
    other = copy.deepcopy(made) if how == "deepcopy" else pickle.loads(pickle.dumps(made))
    for a, b in zip(step(made), step(other), strict=True):
        assert torch.equal(a, b)
    with torch.no_grad():
        other.weight.zero_()
    assert float(made.weight.detach().abs().sum()) > 0


def test_a_copy_of_a_fused_head_is_not_fused():
    made = head()
    made.fuse_optimizer(sx.optim.RowSGD(made.parameters(), lr=0.1))
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert other.fused is None
        step(other)
    assert made.fused is not None


def test_averaged_model():
    made = head("unigram")
    average = torch.optim.swa_utils.AveragedModel(made)
    optimizer = sx.optim.RowSGD(made.parameters(), lr=1.0)
    tables = []
    for key in range(3):
        step(made, key)
        optimizer.step()
        average.update_parameters(made)
        tables.append(made.weight.detach().clone())
    torch.testing.assert_close(average.module.weight.detach(), torch.stack(tables).mean(0))
    h, y = batch()
    assert torch.isfinite(average.eval()(h, y))


def test_functional_call():
    made = head()
    h, y = batch()
    weight = torch.randn(C, D, requires_grad=True)
    given = {"weight": weight}
    loss = torch.func.functional_call(made, given, (h, y), {"key": sx.Key(3, 0)})
    loss.backward()
    with torch.no_grad():
        made.weight.copy_(weight)
    want, grad = step(made)
    assert torch.equal(loss.detach(), want)
    assert torch.equal(weight.grad.to_dense(), grad)


def test_parametrization():
    """A weight that is computed has no rows of its own: gradients must be dense."""
    made = head(sparse=False)
    nn.utils.parametrizations.weight_norm(made, "weight")
    h, y = batch()
    made(h, y, key=sx.Key(3, 0)).backward()
    assert float(made.parametrizations.weight.original1.grad.abs().sum()) > 0
    assert torch.isfinite(made.eval()(h, y))
    other = head()
    nn.utils.parametrizations.weight_norm(other, "weight")
    with pytest.raises(ValueError, match="SampledClassifier: sparse must be False where weight is parametrized"):
        other(h, y)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("sampler", ["uniform", "unigram"])
def test_other_dtypes(sampler, dtype):
    made = head(sampler).to(dtype)
    assert made.weight.dtype == dtype
    loss, grad = step(made)
    assert grad.dtype == dtype
    want, _ = step(head(sampler))
    torch.testing.assert_close(loss.float(), want, rtol=0.02, atol=0.02)


def test_meta_device():
    with torch.device("meta"):
        made = head()
    assert made.weight.is_meta
    made = made.to_empty(device="cpu")
    made.reset_parameters()
    assert torch.isfinite(step(made)[0])


def test_state_dict_of_another_number_of_classes_is_refused_in_one_sentence():
    made = head(classes=C + 10)
    before = made.weight.detach().clone()
    with pytest.raises(RuntimeError, match=f"the state dict has {C} classes of width {D}, this head has {C + 10}"):
        made.load_state_dict(head().state_dict())
    assert torch.equal(made.weight, before)
