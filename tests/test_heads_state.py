"""Parameters, state and bad input of `SampledClassifier`."""

from __future__ import annotations

import copy
import io
import math

import pytest
import torch
from head_cases import B, C, D, batch, make
from torch import nn

import samplex_cuda as sx


# ------------------------------------------------------------------------------------------------ parameters and state
@pytest.mark.parametrize("bias", [False, True])
def test_initial_values_are_those_of_linear(bias):
    torch.manual_seed(7)
    linear = nn.Linear(D, C, bias=bias)
    torch.manual_seed(7)
    head = make(bias=bias)
    assert torch.equal(head.weight, linear.weight)
    if bias:
        assert torch.equal(head.bias, linear.bias)
    else:
        assert head.bias is None
    bound = 1 / math.sqrt(D)
    assert head.weight.abs().max().item() <= bound


SAMPLERS = {
    "log_uniform": lambda: sx.samplers.LogUniform(C),
    "unigram": lambda: sx.samplers.Unigram(torch.arange(1.0, C + 1)),
}


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("nested", [False, True])
def test_state_of_linear_loads_strictly(sampler, nested):
    linear, head = nn.Linear(D, C), make(sampler=SAMPLERS[sampler](), class_weight=torch.rand(C))
    state = {name: t.clone() for name, t in head.sampler.state_dict().items()}
    if nested:
        source, model = nn.Sequential(nn.Linear(3, D), linear), nn.Sequential(nn.Linear(3, D), head)
        model.load_state_dict(source.state_dict())
    else:
        head.load_state_dict(linear.state_dict())
    assert torch.equal(head.weight, linear.weight)
    assert torch.equal(head.bias, linear.bias)
    assert head.sampler.state_dict().keys() == state.keys()
    assert all(torch.equal(t, state[name]) for name, t in head.sampler.state_dict().items())


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_state_loads_into_linear(sampler):
    head, linear = make(sampler=SAMPLERS[sampler]()), nn.Linear(D, C)
    linear.load_state_dict(head.linear().state_dict())
    assert torch.equal(head.weight, linear.weight)
    assert torch.equal(head.bias, linear.bias)
    other = nn.Linear(D, C)
    result = other.load_state_dict(head.state_dict(), strict=False)
    assert not result.missing_keys
    assert all(name.startswith("sampler.") for name in result.unexpected_keys)
    h, _ = batch()
    assert torch.equal(other(h), linear(h))


def test_linear_shares_the_parameters():
    head = make()
    linear = head.linear()
    assert linear.weight is head.weight
    assert linear.bias is head.bias
    assert make(bias=False).linear().bias is None


def test_own_state_round_trip_through_a_file():
    head = make(sampler=SAMPLERS["unigram"]())
    file = io.BytesIO()
    torch.save(head.state_dict(), file)
    file.seek(0)
    other = make(sampler=sx.samplers.Unigram(torch.ones(C)))
    other.load_state_dict(torch.load(file))
    h, y = batch()
    assert torch.equal(head(h, y, key=sx.Key(0)), other(h, y, key=sx.Key(0)))


def test_an_incomplete_state_is_still_an_error():
    head = make(sampler=SAMPLERS["unigram"]())
    state = head.state_dict()
    with pytest.raises(RuntimeError, match="Missing key"):
        head.load_state_dict({"weight": state["weight"]})
    some = {name: t for name, t in state.items() if name != "sampler.prefix"}
    assert len(some) < len(state)
    with pytest.raises(RuntimeError, match=r"sampler\.prefix"):
        head.load_state_dict(some)


def test_deepcopy_and_module_casts():
    head = make(class_weight=torch.rand(C))
    exact = head.class_weight.clone()
    other = copy.deepcopy(head).to(torch.bfloat16)
    assert other.weight.dtype == torch.bfloat16
    assert other.class_weight.dtype == torch.float32
    assert torch.equal(other.class_weight, exact)
    assert copy.deepcopy(head).double().class_weight.dtype == torch.float64
    assert head.weight.dtype == torch.float32
    h, y = batch()
    assert torch.isfinite(other(h.bfloat16(), y))


def test_repr():
    text = repr(make(scale=2.0, shared=True))
    assert f"in_features={D}, num_classes={C}, num_samples=20" in text
    assert "scale=2.0" in text
    assert "shared=True" in text
    assert "absolute" not in text
    assert "LogUniform" in text


# ------------------------------------------------------------------------------------------------ errors
@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        (
            {"loss": "hinge"},
            ValueError,
            "SampledClassifier: loss must be one of sampled_softmax, negative_sampling, nce, .*, got 'hinge'",
        ),
        ({"reduction": "max"}, ValueError, "reduction must be one of none, mean, sum, got 'max'"),
        ({"num_samples": 0}, ValueError, "num_samples must be an int of at least 1, got 0"),
        ({"num_samples": 2.5}, ValueError, "num_samples must be an int of at least 1, got 2.5"),
        ({"num_classes": 0}, ValueError, "num_classes must be an int of at least 1, got 0"),
        ({"in_features": 0}, ValueError, "in_features must be an int of at least 1, got 0"),
        ({"sampler": sx.samplers.Uniform(C + 1)}, ValueError, f"sampler must have num_classes = {C}, got {C + 1}"),
        ({"sampler": "uniform"}, TypeError, "sampler must be a sampler of samplex_cuda.samplers, got 'uniform'"),
        ({"scale": math.nan}, ValueError, "scale must be finite, got nan"),
        ({"class_weight": torch.ones(3)}, ValueError, rf"class_weight must be \[{C}\] float32, got \[3\] float32"),
        ({"dtype": torch.int64}, TypeError, "dtype must be floating point, got torch.int64"),
    ],
)
def test_bad_settings(options, error, text):
    settings = {
        "in_features": D, "num_classes": C, "sampler": sx.samplers.Uniform(C), "num_samples": 4, **options
    }  # fmt: skip
    with pytest.raises(error, match=text):
        sx.SampledClassifier(**settings)


@pytest.mark.parametrize("training", [True, False])
def test_bad_inputs(training):
    head = make().train(training)
    h, y = batch()
    for bad_h, bad_y, text in [
        (
            torch.randn(B, D + 1),
            y,
            rf"SampledClassifier: h must be \[\*, {D}\] floating point, got \[{B}, {D + 1}\] float32",
        ),
        (h.long(), y, rf"h must be \[\*, {D}\] floating point, got \[{B}, {D}\] int64"),
        (torch.tensor(1.0), y, r"h must be .* got \[\] float32"),
        (h, y[:-1], rf"y must be \[{B}\] or \[{B}, P\] int64 to fit h, got \[{B - 1}\] int64"),
        (h, y.int(), rf"y must be .* got \[{B}\] int32"),
        (h, y.view(B, 1, 1), rf"y must be .* got \[{B}, 1, 1\] int64"),
    ]:
        with pytest.raises(ValueError, match=text):
            head(bad_h, bad_y)
    with pytest.raises(ValueError, match=rf"sample_weight must be \[{B}\] floating point, got \[2\] float32"):
        head(h, y, sample_weight=torch.ones(2))
    with pytest.raises(ValueError, match=rf"features must be \[{B}, f\] to fit h, got \[2, 3\] float32"):
        head(h, y, features=torch.ones(2, 3))
    for bad in (C, -1, -101, 2**40):
        y[3] = bad
        with pytest.raises(IndexError, match=f"got {bad}"):
            head(h, y)


def test_topk_wants_a_possible_k():
    head = make()
    h, _ = batch()
    for k in (0, C + 1, -1, 2.0, True):
        with pytest.raises(ValueError, match=rf"SampledClassifier.topk: k must be an int in \[1, {C}\], got"):
            head.topk(h, k)
    with pytest.raises(ValueError, match="chunk_size must be an int of at least 1, got 0"):
        head.topk(h, 1, chunk_size=0)
    with pytest.raises(ValueError, match=r"SampledClassifier.log_prob: h must be \[\*, 12\]"):
        head.log_prob(h[:, 1:])


def test_one_class():
    head = make(1, sampler=sx.samplers.Uniform(1), num_samples=3)
    h, y = torch.randn(4, D), torch.zeros(4, dtype=torch.int64)
    loss = head(h, y)
    loss.backward()
    assert loss.item() == 0.0
    assert head.weight.grad.to_dense().abs().max().item() == 0.0
    assert head.eval()(h, y).item() == 0.0
    assert head.predict(h).tolist() == [0] * 4


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_complex_numbers_are_refused(name):
    head = sx.SampledClassifier(5, 9, sx.samplers.Uniform(9), 3)
    before = {k: v.clone() for k, v in head.state_dict().items()}
    state = {**before, name: before[name].to(torch.complex64) + 1}
    with pytest.raises(RuntimeError, match=f"{name} of the state dict must be real, got .* complex64"):
        head.load_state_dict(state)
    assert all(torch.equal(v, before[k]) for k, v in head.state_dict().items())


def test_a_sparse_lag_is_refused():
    head = sx.SampledClassifier(5, 9, sx.samplers.Quadratic(torch.zeros(9, 5)), 3, bias=False)
    state = {**head.state_dict(), "sampler_lag": torch.tensor([1, 0, 4]).to_sparse()}
    with pytest.raises(ValueError, match=r"sampler_lag must be int64 \[2 \+ n\], got "):
        head.load_state_dict(state)
