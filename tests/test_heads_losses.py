"""`SampledClassifier` with every loss: its draws, what prediction adds back, and the state of augment_reduce."""

from __future__ import annotations

import math
import re

import pytest
import torch
from head_cases import B, C, D, batch, make
from torch import nn

import samplex_cuda as sx

COUNTS = 1.0 / torch.arange(1.0, C + 1.0)
LOSSES = ("sampled_softmax", "negative_sampling", "nce", "one_vs_each", "augment_reduce")
NOISE = ("negative_sampling", "nce")
N = 50  # examples


def head_of(loss, **options):
    options = {"sampler": sx.samplers.Unigram(COUNTS), "num_samples": 5, "loss": loss} | options
    return make(**({"num_examples": N} if loss == "augment_reduce" else {}) | options)


def step(head, h, y, **options):
    index = torch.arange(y.shape[0]) if head.loss.needs.example_index else None
    return head(h, y, **{"index": index} | options)


@pytest.mark.parametrize("loss", LOSSES[1:])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("targets", [1, 3])
def test_the_loss_is_that_of_the_function_on_the_right_draws(loss, shared, targets):
    head = head_of(loss, shared=shared, reduction="none", scale=1.5, class_weight=torch.rand(C) + 0.5)
    h, _ = batch(rows=31)
    y = torch.randint(C, (31, targets)).squeeze(1)
    y.view(-1)[3] = -100
    value = step(head, h, y, key=sx.Key(7))
    exclude = None if shared or loss in NOISE else torch.where(y < 0, -1, y)
    draw = head.sampler.sample(h, 5, shared=shared, key=sx.Key(7), exclude=exclude)
    between = {
        "negative_sampling": (None,),
        "nce": (head.sampler.log_prob(h, y.clamp(min=0)),),
        "augment_reduce": (torch.full((31,), math.log(C)),),
    }.get(loss, ())
    wanted = getattr(sx.functional, loss)(
        h, head.weight, y, draw.ids, draw.log_q, *between, head.bias,
        scale=1.5, reduction="none", class_weight=head.class_weight,
    )  # fmt: skip
    assert torch.equal(value, wanted)
    value.sum().backward()
    assert head.weight.grad.is_sparse
    assert ((draw.ids[..., None] == y.reshape(31, 1, -1)).any() or shared) == (exclude is None)


@pytest.mark.parametrize("loss", LOSSES)
def test_only_negative_sampling_adds_log_p_n_back(loss):
    head = head_of(loss).eval()
    h, y = batch(rows=9)
    raw = head.linear()(h).detach()
    wanted = raw + (COUNTS / COUNTS.sum()).log() if loss == "negative_sampling" else raw
    torch.testing.assert_close(head.scores(h), wanted)
    torch.testing.assert_close(head.log_prob(h), wanted.log_softmax(1))
    torch.testing.assert_close(head(h, y), nn.functional.cross_entropy(wanted, y))  # no index needed
    assert torch.equal(head.topk(h, 4)[1], wanted.topk(4)[1])
    assert torch.equal(head.predict(h), wanted.argmax(1))


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_learns_the_class_frequencies(loss):
    # h = 0: the bias is all there is. p_D is far from q.
    torch.manual_seed(0)
    law = torch.tensor([0.5, 0.25, 0.15, 0.1])
    sampler = sx.samplers.Unigram(torch.tensor([0.1, 0.2, 0.3, 0.4]))
    of_head = sx.losses.AugmentReduce(1000) if loss == "augment_reduce" else loss
    # Six draws of the four classes: sampled_softmax has a bias of its own with fewer.
    head = sx.SampledClassifier(1, 4, sampler, 64 if loss == "sampled_softmax" else 6, loss=of_head)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.5 if loss == "one_vs_each" else 1.0)
    y = torch.repeat_interleave(torch.arange(4), (1000 * law).long())
    for number in range(80):
        optimizer.zero_grad()
        step(head, torch.zeros(1000, 1), y, key=sx.Key(number)).backward()
        optimizer.step()
    got = head.eval().log_prob(torch.zeros(1, 1)).exp()[0]
    torch.testing.assert_close(got, law, atol=0.03, rtol=0)
    if loss == "nce":  # self-normalized
        assert abs(float(head.scores(torch.zeros(1, 1)).logsumexp(1))) < 0.1


@pytest.mark.parametrize("loss", LOSSES)
def test_ignored_and_empty_rows(loss):
    head = head_of(loss)
    h, _ = batch()
    assert step(head, h, torch.full((B,), -100)).item() == 0.0
    assert step(head, h[:0], torch.empty(0, dtype=torch.int64)).item() == 0.0
    assert step(head, h, torch.full((B, 3), -100)).item() == 0.0
    weighted = step(head, h, torch.arange(B), sample_weight=torch.rand(B))
    assert weighted.isfinite()


def test_one_vs_each_and_augment_reduce_mask_known_positives():
    h, y = batch()
    known = (torch.arange(B + 1) * C, torch.arange(C).repeat(B))  # every class
    for loss, wanted in (("one_vs_each", 0.0), ("augment_reduce", math.log(C) - 1 + 1 / C)):
        torch.testing.assert_close(step(head_of(loss), h, y, positives=known).item(), wanted)
    for loss in NOISE:
        with pytest.raises(ValueError, match=f"positives must be None with {sx.losses.by_name(loss).__name__}"):
            head_of(loss)(h, y, positives=known)


def test_nce_lets_its_sampler_follow_the_table():
    # Its minimum does not depend on q, which is known at every draw; that of negative sampling does.
    options = {"sampler": sx.samplers.Quadratic(torch.zeros(C, D)), "bias": False}
    assert head_of("nce", **options).sampler_update == "step"
    assert head_of("negative_sampling", **options).sampler_update is None


# ------------------------------------------------------------------------------------------------ eta
def test_eta_is_a_running_mean_of_the_estimated_sums():
    head = head_of("augment_reduce", rate=0.25, reduction="none")
    assert torch.equal(head.log_eta, torch.full((N,), math.log(C)))
    h, y = batch()
    index = torch.tensor([3, 40, 7, 9, 11, 0, 49])
    y[2] = -100
    with torch.no_grad():
        head.log_eta[:] = torch.linspace(0.5, 6.0, N)
    before = head.log_eta.clone()
    loss = head(h, y, index=index, key=sx.Key(1))
    # loss = log eta - 1 + R / eta, with the eta of before
    total = (loss.detach() + 1 - before[index]) * before[index].exp()
    wanted = before.clone()
    wanted[index] = (0.75 * before[index].exp() + 0.25 * total).log()
    wanted[7] = before[7]  # an ignored row tells nothing
    torch.testing.assert_close(head.log_eta, wanted)
    others = torch.ones(N, dtype=torch.bool).index_fill_(0, index, False)
    assert torch.equal(head.log_eta[others], before[others])
    loss.sum().backward()
    assert head.log_eta.grad is None
    frozen = head.log_eta.clone()
    head.eval()(h, y)  # exact: no example is looked up, none moves
    assert torch.equal(head.log_eta, frozen)


def test_eta_finds_the_softmax_and_the_loss_its_nll():
    # Draws that know the sum exactly: q = softmax without the target. Then eta -> R, loss -> NLL.
    torch.manual_seed(1)
    weight, h, y = torch.randn(30, 4), torch.randn(6, 4), torch.arange(6)
    sampler = sx.samplers.Softmax(weight)
    head = sx.SampledClassifier(4, 30, sampler, 8, loss=sx.losses.AugmentReduce(6), bias=False, reduction="none")
    with torch.no_grad():
        head.weight.copy_(weight)
    for number in range(30):
        loss = head(h, y, index=torch.arange(6), key=sx.Key(number))
    nll = -(h @ weight.T).log_softmax(1)[torch.arange(6), y]
    torch.testing.assert_close(head.log_eta, nll, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(loss, nll, atol=1e-4, rtol=1e-4)


def test_eta_of_an_example_that_stands_twice_and_of_bad_numbers():
    h, y = batch(rows=3)
    y[:] = y[0]
    alone = []
    for row in range(2):
        head = head_of("augment_reduce", shared=True)
        torch.manual_seed(0)
        head.reset_parameters()
        head(h[row : row + 1], y[:1], index=torch.tensor([4]), key=sx.Key(2))
        alone.append(head.log_eta[4].item())
    head = head_of("augment_reduce", shared=True)
    torch.manual_seed(0)
    head.reset_parameters()
    h[2] = math.nan
    head(h, y, index=torch.tensor([4, 4, 5]), key=sx.Key(2))
    assert head.log_eta[4].item() == pytest.approx(max(alone))
    assert head.log_eta[5].item() == pytest.approx(math.log(C))  # a nan is no news
    # R / eta above float32: eta goes up, so that the example comes back.
    head = head_of("augment_reduce", bias=False, scale=100.0)
    with torch.no_grad():
        head.weight.copy_(-torch.ones(C, D)).index_fill_(0, y[:1], -2.0)
    for _ in range(30):
        loss = head(torch.ones(1, D), y[:1], index=torch.tensor([4]))
    assert loss.isfinite()


def test_eta_is_part_of_the_state():
    head = head_of("augment_reduce")
    h, y = batch()
    step(head, h, y)
    assert (head.log_eta[:B] != math.log(C)).all()
    other = head_of("augment_reduce")
    other.load_state_dict(head.state_dict())
    assert torch.equal(other.log_eta, head.log_eta)
    # A checkpoint of nn.Linear knows no eta; one of another number of examples does not fit.
    fresh = head_of("augment_reduce")
    fresh.load_state_dict(head.linear().state_dict())
    assert torch.equal(fresh.weight, head.weight)
    assert torch.equal(fresh.log_eta, torch.full((N,), math.log(C)))
    with pytest.raises(RuntimeError, match="size mismatch for log_eta"):
        head_of("augment_reduce", num_examples=N + 1).load_state_dict(head.state_dict())
    exact = head.log_eta.clone()
    assert torch.equal(head.to(torch.bfloat16).log_eta, exact)
    assert head.double().log_eta.dtype == torch.float64
    assert "num_examples=50" in repr(head)
    assert "log_eta" not in head_of("nce").state_dict()


def test_a_compiled_step_moves_eta_as_an_eager_one():
    torch._dynamo.reset()
    heads = [head_of("augment_reduce"), head_of("augment_reduce")]
    heads[1].load_state_dict(heads[0].state_dict())
    compiled = torch.compile(heads[1], fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (5, 9):
        h, y = batch(rows=rows)
        key, index = sx.Key(3, rows).reserve(), torch.randperm(N)[:rows]
        losses = [step(h, y, index=index, key=key) for step in (heads[0], compiled)]
        losses[1].backward()
        torch.testing.assert_close(*losses)
        torch.testing.assert_close(heads[1].log_eta, heads[0].log_eta)
    assert (heads[0].log_eta != math.log(C)).any()


# ------------------------------------------------------------------------------------------------ bad input
@pytest.mark.parametrize(
    ("loss", "options", "text"),
    [
        ("hinge", {}, f"name must be one of {', '.join(LOSSES)}"),
        ("nce", {"absolute": True}, "NCE: absolute is not an option of this loss, got True"),
        ("one_vs_each", {"label_smoothing": 0.1}, "OneVsEach: label_smoothing is not an option of this loss, got 0.1"),
        ("nce", {"reg": 0.1}, "NCE: reg is not an option of this loss, got 0.1"),
        ("augment_reduce", {"num_examples": None}, "num_examples must be an int of at least 1, got None"),
        ("augment_reduce", {"num_examples": 0}, "num_examples must be an int of at least 1"),
        ("augment_reduce", {"rate": 0.0}, "rate must be in (0, 1], got 0.0"),
        ("augment_reduce", {"rate": math.nan}, "rate must be in (0, 1], got nan"),
        ("one_vs_each", {"num_examples": 5}, "OneVsEach: num_examples is not an option of this loss, got 5"),
    ],
)  # fmt: skip
def test_options_are_checked(loss, options, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        head_of(loss, **options)


def test_calls_are_checked_and_leave_the_state_alone():
    head = head_of("augment_reduce", shared=True)
    h, y = batch()
    before = head.log_eta.clone()
    for index, kind, text in (
        (None, ValueError, "index must be [7] int64 with AugmentReduce(num_examples=50), got None"),
        (torch.zeros(B), ValueError, "index must be [7] int64 with AugmentReduce(num_examples=50), got [7] float32"),
        (torch.zeros(B - 1, dtype=torch.int64), ValueError, "index must be [7] int64 with AugmentReduce"),
        (torch.full((B,), N), IndexError, "index must be in [0, 50), got 50"),
        (torch.full((B,), -1), IndexError, "index must be in [0, 50), got -1"),
    ):  # fmt: skip
        with pytest.raises(kind, match=re.escape(f"SampledClassifier: {text}")):
            head(h, y, index=index)
    with pytest.raises(IndexError, match=re.escape(f"augment_reduce: target must be in [0, {C}) or ignore_index")):
        head(h, torch.full((B,), C), index=torch.arange(B))
    with pytest.raises(ValueError, match=re.escape("y must have at least one target per row, got [7, 0] int64")):
        head(h, torch.empty(B, 0, dtype=torch.int64), index=torch.arange(B))
    assert torch.equal(head.log_eta, before)
