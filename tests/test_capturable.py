"""Row optimizers whose rate and step count are tensors: the same steps, checkpoints, and what a capture refuses."""

from __future__ import annotations

import copy
import io

import pytest
import torch

import samplex_cuda as sx
from samplex_cuda.optim import base

CLASSES, DIM = 30, 8
OPTIMIZERS = {
    "sgd": lambda p, **o: sx.optim.RowSGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True, **o),
    "adagrad": lambda p, **o: sx.optim.RowAdagrad(p, lr=0.1, lr_decay=0.2, **o),
    "rowwise": lambda p, **o: sx.optim.RowAdagrad(p, lr=0.1, lr_decay=0.2, rowwise=True, **o),
    "adam": lambda p, **o: sx.optim.RowAdam(p, lr=0.1, weight_decay=0.01, **o),
    "adamw": lambda p, **o: sx.optim.RowAdam(p, lr=0.1, weight_decay=0.1, decoupled_weight_decay=True, **o),
}


def make_head(dtype=torch.float32):
    torch.manual_seed(0)
    return sx.SampledClassifier(DIM, CLASSES, sx.samplers.LogUniform(CLASSES), num_samples=5, dtype=dtype)


def batch(seed):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(6, DIM, generator=g), torch.randint(CLASSES, (6,), generator=g)


def train(head, optimizer, steps, *, fused, first=0, scheduler=None):
    if fused and head.fused is None:
        head.fuse_optimizer(optimizer)
    for number in range(first, first + steps):
        h, y = batch(number)
        head(h.to(head.weight.dtype), y, key=sx.Key(number)).backward()
        if not fused:
            optimizer.step()
            optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()


def same(a, b, first, second):
    for p, q in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(p, q)
        for name, value in a.state[p].items():
            assert torch.equal(torch.as_tensor(value).double(), torch.as_tensor(b.state[q][name]).double()), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_same_bits_with_a_scheduler(name, fused, dtype):
    """A schedule writes into the rate; the tensors of rate and count stay the ones a graph would read."""
    heads = make_head(dtype), make_head(dtype)
    made = [OPTIMIZERS[name](h.parameters(), capturable=c) for h, c in zip(heads, (False, True), strict=True)]
    lr, step = made[1].param_groups[0]["lr"], made[1].state[heads[1].weight]["step"]
    assert (lr.dtype, step.dtype) == (torch.float64, torch.float32)
    for head, optimizer in zip(heads, made, strict=True):
        train(head, optimizer, 5, fused=fused, scheduler=torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7))
    same(*made, *heads)
    assert made[1].param_groups[0]["lr"] is lr
    assert made[1].state[heads[1].weight]["step"] is step
    assert float(lr) == made[0].param_groups[0]["lr"]
    assert step == 5


def test_a_rate_given_as_a_tensor_is_the_one_that_is_read():
    head, other = make_head(), make_head()
    rate = torch.tensor(0.25)  # exact in fp32
    optimizer = sx.optim.RowAdam(head.parameters(), lr=rate, capturable=True)
    plain = sx.optim.RowAdam(other.parameters(), lr=0.25)
    assert all(group["lr"] is rate for group in optimizer.param_groups)
    train(head, optimizer, 2, fused=True)
    train(other, plain, 2, fused=True)
    rate.fill_(0.5)
    plain.param_groups[0]["lr"] = 0.5
    train(head, optimizer, 2, fused=True, first=2)
    train(other, plain, 2, fused=True, first=2)
    same(plain, optimizer, other, head)
    optimizer.param_groups[0]["lr"] = 0.125  # outside of a graph a number does as well
    plain.param_groups[0]["lr"] = 0.125
    train(head, optimizer, 1, fused=True, first=4)
    train(other, plain, 1, fused=True, first=4)
    same(plain, optimizer, other, head)


def test_a_parameter_added_later_counts_on_the_device():
    a, b = torch.zeros(3, 2, requires_grad=True), torch.zeros(3, requires_grad=True)
    optimizer = sx.optim.RowAdam([a], capturable=True)
    optimizer.add_param_group({"params": [b], "lr": 0.5})
    assert isinstance(optimizer.state[b]["step"], torch.Tensor)
    assert float(optimizer.param_groups[1]["lr"]) == 0.5


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("loading", [False, True])
def test_checkpoints_of_either_kind_load_into_either(saved, loading):
    """Values are taken over; whether they are tensors is the optimizer's own, and the tensors stay the same objects."""
    heads = make_head(), make_head()
    source = OPTIMIZERS["adamw"](heads[0].parameters(), capturable=saved)
    train(heads[0], source, 3, fused=False, scheduler=torch.optim.lr_scheduler.ExponentialLR(source, 0.5))
    file = io.BytesIO()
    torch.save(source.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    if not saved:  # as the versions before wrote it
        for group in state["param_groups"]:
            del group["capturable"]
    optimizer = OPTIMIZERS["adamw"](heads[1].parameters(), capturable=loading)
    group, held = optimizer.param_groups[0], dict(optimizer.state[heads[1].weight])
    lr = group["lr"]
    heads[1].load_state_dict(heads[0].state_dict())
    optimizer.load_state_dict(state)
    group = optimizer.param_groups[0]
    assert group["capturable"] is loading
    assert isinstance(group["lr"], torch.Tensor) is loading
    assert float(group["lr"]) == float(source.param_groups[0]["lr"])
    if loading:
        assert group["lr"] is lr
        assert all(optimizer.state[heads[1].weight][name] is value for name, value in held.items())
    for head, o in zip(heads, (source, optimizer), strict=True):
        train(head, o, 2, fused=False, first=3)
    same(source, optimizer, *heads)


def test_torch_loads_the_checkpoint_and_gives_one():
    weight = torch.randn(4, 3, requires_grad=True)
    ours = sx.optim.RowAdam([weight], lr=0.1, capturable=True)
    theirs = torch.optim.Adam([weight], lr=0.1)
    weight.grad = torch.ones(4, 3)
    theirs.step()
    ours.load_state_dict(theirs.state_dict())
    assert ours.state[weight]["step"] == 1
    theirs.load_state_dict({**ours.state_dict(), "param_groups": theirs.state_dict()["param_groups"]})
    assert theirs.state[weight]["step"] == 1


def test_a_copy_has_tensors_of_its_own():
    optimizer = sx.optim.RowAdam([torch.zeros(3, 2, requires_grad=True)], capturable=True)
    other = copy.deepcopy(optimizer)
    other.param_groups[0]["lr"].fill_(7.0)
    assert float(optimizer.param_groups[0]["lr"]) == 1e-3


def test_host_numbers_are_refused_while_a_graph_is_captured(monkeypatch):
    head = make_head()
    frozen = sx.optim.RowAdam(head.parameters(), lr=0.1)
    optimizer = sx.optim.RowAdam(head.parameters(), lr=0.1, capturable=True)
    monkeypatch.setattr(base, "is_capturing", lambda device: True)
    monkeypatch.setattr(torch.nn.Parameter, "is_cuda", True)  # nothing else is asked about a capture
    with pytest.raises(
        RuntimeError, match="RowAdam: capturable must be True to capture a step in a CUDA graph, got Fal"
    ):
        frozen.begin(head.weight)
    optimizer.begin(head.weight)
    optimizer.param_groups[0]["lr"] = 0.1
    with pytest.raises(RuntimeError, match=r"RowAdam: lr must be a tensor to capture a step in a CUDA graph, got 0\.1"):
        optimizer.begin(head.weight)
    head.weight.grad = torch.zeros_like(head.weight)
    with pytest.raises(RuntimeError, match="lr must be a tensor"):
        optimizer.step()
