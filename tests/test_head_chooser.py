"""`HeadChooser`: a head outside of a run that chooses how it draws, and makes the same choices after a resume."""

from __future__ import annotations

import copy

import pytest
import torch

import samplex_cuda as sx
from samplex_cuda.training import HeadChooser, Way, chooser

C, D, B = 60, 6, 16
WAYS = {
    "static, shared, 40": Way("static", 40, True),
    "midx, stratified, 40": Way("midx", 40, True, True),
    "midx, per row, 8": Way("midx", 8),
    "rff, per row, 8": Way("rff", 8),
}


def make_head(**options):
    torch.manual_seed(0)
    head = sx.SampledClassifier(D, C, sx.samplers.Unigram(torch.arange(1, C + 1)), **{"num_samples": 5, **options})
    head.fuse_optimizer(sx.optim.RowSGD(head.parameters(), lr=0.1))  # without state
    return head


def batch(step):
    g = torch.Generator().manual_seed(step)
    return torch.randn(B, D, generator=g), torch.randint(C, (B,), generator=g)


def train(head, by, begin, end):
    told = []
    for step in range(begin, end):
        h, y = batch(step)
        told.append(by.step(h, y))
        head(h, y, key=sx.Key(step)).backward()
    return told


def make(way):
    """A head and its chooser, with costs that make one way the best on every machine."""
    head = make_head()
    by = HeadChooser(head, every=4, ways=WAYS, seed=3)
    by.costs, by.look_ms, by.batch = {name: 0.001 if name == way else 5.0 for name in by.ways}, 1e-6, B
    return head, by


@pytest.fixture
def anything_leaks(monkeypatch):
    monkeypatch.setattr(chooser, "LEAKY", 2.0)


@pytest.mark.parametrize("way", list(WAYS))
def test_a_head_takes_the_cheapest_way_and_a_resume_has_the_same_bits(way, anything_leaks, monkeypatch):
    head, by = make(way)
    told = train(head, by, 0, 6)
    assert [bool(one) for one in told] == [False] * 4 + [True, False]
    assert told[4].startswith(f"{way} (ms of a step x squared noise")
    assert (head.num_samples, head.shared, head.stratified) == WAYS[way][1:]
    stored = copy.deepcopy([by.state_dict(), head.state_dict()])
    train(head, by, 6, 13)
    assert [one["step"] for one in by.history] == [4, 8, 12]
    assert len(stored[0]["history"]) == 1

    monkeypatch.setattr(chooser.timing, "measure", lambda *_: pytest.fail("measured after a resume"))
    other = make_head()
    again = HeadChooser(other, every=4, ways=WAYS, seed=3)
    again.load_state_dict(stored[0])
    other.load_state_dict(stored[1])
    assert (again.present, type(other.sampler)) == (way, type(head.sampler))
    train(other, again, 6, 13)
    assert again.history == by.history
    for (name, one), (_, two) in zip(head.state_dict().items(), other.state_dict().items(), strict=True):
        assert torch.equal(one, two), name


def test_costs_are_measured_at_the_first_step_and_bound_how_often_it_looks():
    head = make_head()
    by = HeadChooser(head, every=1, ways=WAYS)
    assert by.step(*batch(0)) == ""
    assert set(by.costs) == {"as given", *WAYS}
    assert min(by.costs.values()) > 0
    assert by.interval * min(by.costs.values()) * 0.02 >= by.look_ms > 0
    assert (head.num_samples, head.shared) == (5, False)


def test_a_way_that_leaks_is_barred():
    head, by = make("static, shared, 40")
    with torch.no_grad():  # the softmax is on classes that the first sampler seldom draws
        head.weight.zero_()
        head.bias.copy_(torch.where(torch.arange(C) < 3, 9.0, 0.0))
    told = [by.step(*batch(step)) for step in range(5)][-1]
    assert "barred for leak: as given" in told
    assert by.history[0]["looks"]["as given"]["leak"] > chooser.LEAKY


def test_rows_without_a_target_are_left_out():
    by = make("midx, per row, 8")[1]
    h, y = batch(0)
    for _ in range(4):
        assert by.step(h, y) == ""
    assert by.step(h, torch.full_like(y, -100)) == ""
    assert by.steps == 4  # the choice waits
    y[: B // 2] = -100
    several = torch.stack([torch.full_like(y, -100), y], 1)
    assert by.step(h.view(2, B // 2, D), several.view(2, B // 2, 2))
    assert by.steps == 5


def test_errors():
    head = make_head()
    with pytest.raises(ValueError, match=r"HeadChooser: every must be .*, got 0"):
        HeadChooser(head, every=0)
    with pytest.raises(TypeError, match="HeadChooser: head must be a SampledClassifier, got Linear"):
        HeadChooser(torch.nn.Linear(2, 3))
    with pytest.raises(ValueError, match=r"HeadChooser: head must have a static sampler at first, .*, got MIDX"):
        HeadChooser(sx.SampledClassifier(D, C, sx.samplers.MIDX(torch.zeros(C, D), 4), num_samples=5))
    with pytest.raises(ValueError, match="HeadChooser: head must have a plain sampled_softmax loss"):
        HeadChooser(sx.SampledClassifier(D, C, sx.samplers.Uniform(C), num_samples=5, loss="nce"))
    with pytest.raises(ValueError, match='HeadChooser: ways must be of kind "static", "midx" or "rff"'):
        HeadChooser(head, ways={"a": Way("static", 5, True, True)})
    with pytest.raises(TypeError, match=r'got "auto"; make the head with a static one, .* sx\.training\.HeadChooser'):
        sx.SampledClassifier(D, C, "auto", num_samples=5)
    by = HeadChooser(head)
    with pytest.raises(ValueError, match=r"HeadChooser: h must be \[\*, 6\], got \[2, 5\]"):
        by.step(torch.zeros(2, 5), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match="HeadChooser: y must be int64 of the shape of h"):
        by.step(torch.zeros(2, 6), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="chooser: present must be one of"):
        by.load_state_dict(by.state_dict() | {"present": "other"})
