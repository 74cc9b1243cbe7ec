"""Writes to the class table that no optimizer made are noticed; those of optimizers are not mistaken for them."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from head_cases import C, D, batch, make

import samplex_cuda as sx

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "sparse_adam": lambda p: torch.optim.SparseAdam(list(p), lr=0.1),
    "row_sgd": lambda p: sx.optim.RowSGD(p, lr=0.1),
    "row_adam": lambda p: sx.optim.RowAdam(p, lr=0.1),
}


def following(**options) -> sx.SampledClassifier:
    head = make(sampler=sx.samplers.Quadratic(torch.zeros(C, D), bias=torch.zeros(C)), num_samples=5, **options)
    head.update_sampler()
    return head


def step(head: sx.SampledClassifier, optimizer: torch.optim.Optimizer | None = None) -> None:
    head(*batch()).backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_of_optimizers_are_accounted_for(name):
    head = following()
    optimizer = OPTIMIZERS[name](head.parameters())
    for _ in range(3):
        step(head, optimizer)
        stale = head.staleness()
        assert stale.steps == 1
        assert 0 < stale.rows < C
    head.update_sampler()
    rows = torch.cat([head.weight, head.bias[:, None]], 1)
    torch.testing.assert_close(head.sampler.rows[:, : D + 1], rows.detach())


@pytest.mark.parametrize("accumulate", [1, 2])
def test_fused_updates_are_accounted_for(accumulate):
    head = following()
    head.fuse_optimizer(sx.optim.RowAdagrad(head.parameters(), lr=0.1), accumulate=accumulate)
    for _ in range(4):
        step(head)
        assert 0 < head.staleness().rows < C


EDITS = {
    "multiply": lambda head: head.weight.mul_(2.0),
    "copy": lambda head: head.weight.copy_(torch.randn(C, D)),
    "one row": lambda head: head.weight[3].zero_(),
    "bias": lambda head: head.bias.add_(1.0),
    "replace": lambda head: setattr(head, "weight", torch.nn.Parameter(torch.randn(C, D))),
}


@pytest.mark.parametrize("when", ["before", "after forward", "after step"])
@pytest.mark.parametrize("edit", EDITS)
def test_other_writes_are_noticed(edit, when):
    head = following()
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    if when != "before":
        step(head, optimizer if when == "after step" else None)
    assert head.staleness().rows >= 0
    with torch.no_grad():
        EDITS[edit](head)
    assert head.staleness().rows == -1
    if when == "after forward" and edit != "replace":
        optimizer.step()  # the step that was still to come hides nothing
        assert head.staleness().rows == -1
    head(*batch())
    assert head.staleness().rows > 0
    torch.testing.assert_close(head.sampler.rows[:, :D], head.weight.detach())


def test_a_write_before_a_step_is_noticed_at_the_step():
    head = following()
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    head(*batch()).backward()
    with torch.no_grad():
        head.weight.mul_(2.0)
    optimizer.step()
    assert head.staleness().rows == -1


def test_whoever_says_which_rows_is_believed():
    head = following()
    with torch.no_grad():
        head.weight[[3, 4]] = 1.0
    head.mark_changed(torch.tensor([3, 4]))
    assert head.staleness() == (0, 2)
    head.update_sampler()
    torch.testing.assert_close(head.sampler.rows[:, :D], head.weight.detach())


def test_loading_a_checkpoint_is_no_foreign_write():
    head = following()
    step(head)
    state = copy.deepcopy(head.state_dict())
    lag = head.staleness()
    other = following()
    other.load_state_dict(state)
    assert other.staleness() == lag


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda head: pickle.loads(pickle.dumps(head))])
def test_copies_follow_their_own_table(copied):
    head = following()
    step(head)
    other = copied(head)
    assert other.staleness().steps == 1
    with torch.no_grad():
        other.weight.mul_(2.0)
    other(*batch())
    torch.testing.assert_close(other.sampler.rows[:, :D], other.weight.detach())
    assert head.staleness().rows > 0


def test_an_epoch_is_not_cut_short():
    head = following(sampler_update="epoch")
    step(head)
    with torch.no_grad():
        head.weight.mul_(2.0)
    assert not head.follower.due()
    assert head.staleness().rows == -1
