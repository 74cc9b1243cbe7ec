"""A batch that a head refuses leaves no trace: the next one works as if it had not been."""

from __future__ import annotations

import copy

import pytest
import torch
from head_cases import C, D, batch, make

import samplex_cuda as sx

FOLLOWERS = {
    "quadratic": lambda w: sx.samplers.Quadratic(w),
    "fourier": lambda w: sx.samplers.RandomFourier(w, 32, 0.5, kind="positive", key=sx.Key(1)),
    "softmax": lambda w: sx.samplers.Softmax(w),
    "mixture": lambda w: sx.samplers.Mixture([(sx.samplers.Softmax(w), 1.0), (sx.samplers.Uniform(C), 1.0)]),
}


def following(name: str, **options) -> sx.SampledClassifier:
    torch.manual_seed(1)
    return make(sampler=FOLLOWERS[name](torch.zeros(C, D)), bias=False, **options)


def step(head: sx.SampledClassifier, h: torch.Tensor, y: torch.Tensor, seed: int) -> torch.Tensor:
    loss = head(h, y, key=sx.Key(seed))
    head.weight.grad = None
    loss.backward()
    torch.optim.SGD([head.weight], lr=0.1).step()
    return loss.detach()


@pytest.mark.parametrize("bad", [-7, C, 1 << 40])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", FOLLOWERS)
def test_a_bad_target_leaves_no_trace(name, shared, bad):
    head = following(name, shared=shared)
    h, y = batch()
    step(head, h, y, 1)
    twin = copy.deepcopy(head)
    wrong = y.clone()
    wrong[3] = bad
    for _ in range(2):
        with pytest.raises(IndexError, match=rf"must be .*in \[0, {C}\).*got {bad}"):
            head(h, wrong, key=sx.Key(9))
    assert head.staleness() == (0, 0)  # brought up to date, then refused
    assert "sampler_lag" not in head.state_dict()
    assert torch.equal(step(head, h, y, 2), step(twin, h, y, 2))
    assert torch.equal(step(head, h, y, 3), step(twin, h, y, 3))
    head.update_sampler()
    twin.update_sampler()
    for (field, a), (_, b) in zip(head.sampler.state_dict().items(), twin.sampler.state_dict().items(), strict=True):
        assert torch.equal(a, b), field


@pytest.mark.parametrize("loss", ["sampled_softmax", "negative_sampling", "nce", "one_vs_each"])
def test_bad_positives_leave_no_trace(loss):
    head = make(loss=loss)
    h, y = batch()
    with pytest.raises((ValueError, IndexError), match="positives"):
        head(h, y, positives=(torch.zeros(3, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)))
    assert bool(head(h, y).isfinite())


def test_ids_out_of_range_in_the_record_are_dropped():
    """What a loss on a GPU lets through (its row is nan), or a damaged checkpoint brings."""
    head = following("quadratic")
    head.update_sampler()
    head.follower.touch(torch.tensor([3, -1, C, 1 << 50, 3]))
    assert head.staleness().rows == 1
    assert head.follower.lag().tolist() == [1, 0, 3]
    head.update_sampler()
    state = head.state_dict()
    state["sampler_lag"] = torch.tensor([2, 0, C + 5, 4])
    head.load_state_dict(state)
    assert head.staleness() == (2, 1)
    assert bool(head(*batch()).isfinite())


@pytest.mark.parametrize("lag", [torch.zeros(1, dtype=torch.int64), torch.zeros(3), torch.zeros(2, 2).long(), "x"])
def test_a_damaged_lag_is_refused(lag):
    head = following("quadratic")
    state = head.state_dict()
    state["sampler_lag"] = lag
    with pytest.raises(ValueError, match=r"sampler_lag must be int64 \[2 \+ n\], got"):
        head.load_state_dict(state)


# ------------------------------------------------------------------------------------ attributes that are set later
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("num_samples", 0, "num_samples must be an int of at least 1, got 0"),
        ("num_samples", 2.5, "num_samples must be an int of at least 1, got 2.5"),
        ("scale", float("nan"), "scale must be finite, got nan"),
        ("reduction", "average", "reduction must be one of none, mean, sum"),
        ("ignore_index", 1.5, "ignore_index must be an int .* got 1.5"),
        ("stratified", True, "stratified requires shared=True"),
        ("unique", "distinct", "unique must be False, True or 'tf'"),
        ("normalize", True, "bias must be False with normalize=True"),
        ("sampler", sx.samplers.Uniform(C - 1), f"sampler must have num_classes = {C}, got {C - 1}"),
        ("loss", sx.losses.AugmentReduce(9), "loss must be given to the constructor"),
    ],
)
def test_a_changed_attribute_is_checked_as_in_the_constructor(name, value, message):
    head = make()
    h, y = batch()
    setattr(head, name, value)
    with pytest.raises(ValueError, match=message):
        head(h, y)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("scale", -1.0),
        ("loss", sx.losses.SampledSoftmax(absolute=True)),
        ("loss", sx.losses.FullSoftmax(label_smoothing=0.1)),
    ],
)
def test_retired_classes_are_never_an_answer_of_a_changed_head(name, value):
    """At a score of -inf they would be the best class with a negative scale or absolute logits."""
    head = make()
    head.retire_classes(torch.tensor([3]))
    setattr(head, name, value)
    h, y = batch()
    for call in (lambda: head(h, torch.where(y == 3, 4, y)), lambda: head.topk(h, 2), lambda: head.log_prob(h)):
        with pytest.raises(ValueError, match="head must have signed logits, a scale above 0"):
            call()


def test_a_new_sampler_must_not_draw_retired_classes():
    head = make()
    head.retire_classes(torch.tensor([3]))
    old = head.sampler
    with pytest.raises(ValueError, match="set_sampler: sampler must not draw retired classes"):
        head.set_sampler(sx.samplers.Uniform(C))
    assert head.sampler is old
    head.sampler = sx.samplers.Uniform(C)
    h, y = batch()
    with pytest.raises(ValueError, match="sampler must not draw retired classes"):
        head(h, torch.where(y == 3, 4, y))


def test_a_new_sampler_must_draw_distinct_classes_if_the_head_does():
    head = make(unique=True)
    with pytest.raises(ValueError, match="unique must be False unless"):
        head.set_sampler(sx.samplers.Softmax(torch.zeros(C, D)))
