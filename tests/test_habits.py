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
    "quartic": lambda: sx.samplers.Quartic(torch.zeros(C, D)),
    "bigram": lambda: sx.samplers.Bigram.from_tokens(torch.arange(300) ** 2 % C, C, backoff=0.25),
    "midx": lambda: sx.samplers.MIDX(torch.zeros(C, D), num_codes=4, key=sx.Key(1)),
    "midx_counts": lambda: sx.samplers.MIDX(
        torch.zeros(C, D), num_codes=4, kind="product", key=sx.Key(1), counts=torch.arange(1.0, C + 1)
    ),
    "in_batch": lambda: sx.samplers.InBatch(C, extra=sx.samplers.Uniform(C)),
    "in_batch_sketch": lambda: sx.samplers.InBatch(C, sx.samplers.StreamingFrequency(C, kind="sketch")),
    "in_batch_counts": lambda: sx.samplers.InBatch(C, sx.samplers.Unigram(torch.arange(1.0, C + 1))),
}
# Beside the sampler.
OPTIONS = {name: {"shared": True} for name in SAMPLERS if name.startswith("in_batch")}
# Samplers with other options of the head.
HEADS = {
    **{name: (name, {}) for name in SAMPLERS},
    "learned_scale": ("uniform", {"learn_scale": True, "normalize": True, "scale": 5.0}),
    "learned_scale_follows": ("quadratic", {"learn_scale": True, "normalize": True, "scale": 5.0}),
}
HALVES = [torch.bfloat16, torch.float16, torch.float64]


def head(sampler="uniform", classes=C, **options):
    torch.manual_seed(0)
    sampler, more = HEADS[sampler]
    made = SAMPLERS[sampler]() if classes == C else sx.samplers.Uniform(classes)
    return sx.SampledClassifier(
        D, classes, made, num_samples=6, **{"bias": False, **OPTIONS.get(sampler, {}), **more, **options}
    )


def batch():
    g = torch.Generator().manual_seed(1)
    return torch.randn(5, D, generator=g), torch.randint(C, (5,), generator=g)


def step(made, key=3):
    """Loss and weight gradient of a step, with the gradient dense."""
    h, y = batch()
    made.zero_grad()
    given = {"context": torch.tensor([0, 3, 3, 20, -1])} if isinstance(made.sampler, sx.samplers.Bigram) else {}
    loss = made(h.to(made.weight.dtype), y, key=sx.Key(key, 0), **given)
    loss.backward()
    return loss.detach(), made.weight.grad.to_dense()


@pytest.mark.parametrize("sampler", HEADS)
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


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("sampler", HEADS)
def test_other_dtypes(sampler, dtype, used):
    """The head takes a step in the new dtype, from the same distribution up to rounding of the table."""
    made, plain = head(sampler), head(sampler)
    if used:  # a sampler that follows the table has read it
        for one in (made, plain):
            step(one)
    made = made.to(dtype)
    assert made.weight.dtype == dtype
    loss, grad = step(made)
    assert grad.dtype == dtype
    want, _ = step(plain)
    # Draws that depend on the table may be others where a uniform is near a boundary.
    close = 0.02 if not made.sampler.follows_rows else 0.3
    torch.testing.assert_close(loss.float(), want, rtol=close, atol=close)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_other_dtypes_leave_the_tables_of_a_sampler(sampler, dtype):
    """Probabilities are exact to float32 whatever the dtype of the model: `to` moves the class table alone."""
    made = head(sampler)
    step(made)
    before = {
        name: value.clone() for name, value in made.sampler.state_dict().items() if isinstance(value, torch.Tensor)
    }
    made.to(dtype)
    made.to(torch.float32)
    for name, value in made.sampler.state_dict().items():
        if isinstance(value, torch.Tensor) and not made.sampler.follows_rows:
            assert value.dtype == before[name].dtype, name
            assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("kind", ["gap", "sketch"])
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "dtype"])
def test_frequencies(kind, how):
    made = sx.samplers.StreamingFrequency(C, kind=kind)
    ids = torch.randint(C, (400,), generator=torch.Generator().manual_seed(1)) // 3
    made.update(ids)
    want = made.log_q(torch.arange(C))
    other = {"deepcopy": copy.deepcopy, "pickle": lambda m: pickle.loads(pickle.dumps(m))}.get(
        how, lambda m: copy.deepcopy(m).to(torch.bfloat16)
    )(made)
    assert torch.equal(other.log_q(torch.arange(C)), want)
    other.update(ids)
    assert torch.equal(made.log_q(torch.arange(C)), want)
    made.update(ids)
    assert torch.equal(other.log_q(torch.arange(C)), made.log_q(torch.arange(C)))


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "state_dict"])
def test_queues(how):
    made = sx.samplers.KeyQueue(10, D)
    made.push(torch.randn(7, D), torch.arange(7), torch.full((7,), -3.3))
    if how == "state_dict":
        other = sx.samplers.KeyQueue(10, D)
        other.load_state_dict(made.state_dict())
    else:
        other = copy.deepcopy(made) if how == "deepcopy" else pickle.loads(pickle.dumps(made))
    keys = torch.randn(5, D)
    for queue in (made, other):
        queue.push(keys, torch.arange(5))
    for a, b in zip(made.held(), other.held(), strict=True):
        assert torch.equal(a, b)
    other.push(torch.zeros(10, D), torch.arange(10))
    assert float(made.held().keys.abs().sum()) > 0


@pytest.mark.parametrize("dtype", HALVES)
def test_queues_in_other_dtypes(dtype):
    """Keys take the dtype of the model, log q stays float32."""
    made = sx.samplers.KeyQueue(10, D)
    made.push(torch.randn(7, D), torch.arange(7), torch.full((7,), -3.3))
    made.to(dtype)
    assert made.keys.dtype == dtype
    assert made.log_q.dtype == torch.float32
    assert torch.equal(made.held().log_q, torch.full((7,), -3.3))
    queries, keys = torch.randn(4, D).to(dtype), torch.randn(4, D).to(dtype)
    loss = sx.functional.contrastive(queries, keys, log_q=torch.zeros(4), key_ids=torch.arange(4), queue=made)
    assert torch.isfinite(loss)
    made.push(keys, torch.arange(4))


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
