"""`SampledClassifier` with negative sampling: draws, and log p_n added back."""

from __future__ import annotations

import math
import re

import pytest
import torch
import torch.nn.functional as F
from head_cases import B, C, D, batch, make
from torch import nn

import samplex_cuda as sx
from samplex_cuda import chunking

COUNTS = 1.0 / torch.arange(1.0, C + 1.0)


class Tilted(sx.samplers.Sampler):
    """p_n(y|x) = softmax(x @ table): a distribution that depends on the features, in plain torch."""

    def __init__(self, num_features, num_classes=C):
        super().__init__()
        self.num_classes = num_classes
        self.seen = []
        self.register_buffer(
            "table", torch.randn(num_features, num_classes, generator=torch.Generator().manual_seed(3))
        )

    def log_prob_all(self, h=None):
        self.seen.append(tuple(h.shape))
        return (h.float() @ self.table).log_softmax(1)

    def log_prob(self, h, ids, *, exclude=None, context=None):
        return self.log_prob_all(h).gather(1, ids.reshape(len(h), -1)).reshape(ids.shape)

    def sample(self, h, num_samples, *, shared=False, key=None, exclude=None, context=None, batch_size=None):
        assert exclude is None, "negative sampling draws from the unconditional distribution"
        log_p = self.log_prob_all(h)
        ids = torch.multinomial(log_p.exp(), num_samples, replacement=True)
        return sx.Draw(ids, log_p.gather(1, ids))


def negative_head(**options):
    options = {"sampler": sx.samplers.Unigram(COUNTS), "num_samples": 5, "loss": "negative_sampling"} | options
    return make(**options)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("reg", [0.0, 0.01])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_negative_sampling_trains_on_unconditional_draws(shared, reg, reduction):
    head = negative_head(shared=shared, reg=reg, reduction=reduction, scale=1.5, class_weight=torch.rand(C) + 0.5)
    h, y = batch(rows=31)
    y[3] = -100
    loss = head(h, y, key=sx.Key(7))
    draw = head.sampler.sample(h, 5, shared=shared, key=sx.Key(7))
    log_p = head.sampler.log_prob(h, y.clamp(min=0))
    wanted = sx.functional.negative_sampling(
        h, head.weight, y, draw.ids, draw.log_q, log_p, head.bias,
        scale=1.5, reg=reg, reduction=reduction, class_weight=head.class_weight,
    )  # fmt: skip
    assert torch.equal(loss, wanted)
    loss.sum().backward()
    assert head.weight.grad.is_sparse
    # Hits occur and count: the distribution is Zipf, the targets too.
    y = torch.zeros(31, dtype=torch.int64)
    ids = head.sampler.sample(h, 5, shared=shared, key=sx.Key(8)).ids
    assert (ids == 0).any()


def test_negative_sampling_adds_log_p_n_back():
    head = negative_head(scale=0.7).eval()
    h, y = batch(rows=9)
    log_p_n = (COUNTS / COUNTS.sum()).log()
    raw = 0.7 * head.linear()(h).detach()
    torch.testing.assert_close(head.scores(h, corrected=False), raw)
    torch.testing.assert_close(head.scores(h), raw + log_p_n)
    log_p = (raw + log_p_n).log_softmax(1)
    torch.testing.assert_close(head.log_prob(h), log_p)
    torch.testing.assert_close(head(h, y), F.nll_loss(log_p, y))
    values, ids = head.topk(h, 6)
    assert torch.equal(ids, (raw + log_p_n).topk(6)[1])
    torch.testing.assert_close(values, (raw + log_p_n).topk(6)[0])
    assert torch.equal(head.predict(h), log_p.argmax(1))
    assert (head.predict(h) != raw.argmax(1)).any(), "the correction must matter here"


def test_sampled_softmax_has_nothing_to_correct():
    head = make(sampler=sx.samplers.Unigram(COUNTS)).eval()
    h, _ = batch()
    assert torch.equal(head.scores(h), head.scores(h, corrected=False))
    torch.testing.assert_close(head.scores(h).log_softmax(1), head.log_prob(h))


@pytest.mark.parametrize("chunk_size", [1, 30, None])
def test_negative_sampling_looks_at_the_features_in_blocks_of_rows(monkeypatch, chunk_size):
    monkeypatch.setattr(chunking, "_PRIOR_ELEMENTS", 4 * C)
    sampler = Tilted(3)
    head = negative_head(sampler=sampler, reg=0.1)
    h, y = torch.randn(2, 5, D), torch.randint(C, (2, 5))
    x = torch.randn(2, 5, 3)
    head(h, y, features=x).backward()
    assert head.weight.grad._nnz() > 1
    assert set(sampler.seen) == {(10, 3)}
    sampler.seen.clear()
    head.eval()
    wanted = (head.linear()(h) + (x @ sampler.table).log_softmax(-1)).detach()
    torch.testing.assert_close(head.scores(h, x, chunk_size=chunk_size), wanted)
    torch.testing.assert_close(head.log_prob(h, features=x, chunk_size=chunk_size), wanted.log_softmax(-1))
    assert torch.equal(head.topk(h, 3, features=x, chunk_size=chunk_size)[1], wanted.topk(3)[1])
    assert torch.equal(head.predict(h, features=x, chunk_size=chunk_size), wanted.argmax(-1))
    nll = head(h, y, features=x)
    torch.testing.assert_close(nll, F.cross_entropy(wanted.view(10, C), y.view(10)))
    assert set(sampler.seen) == {(4, 3), (2, 3)}  # never more than four rows of C at once


def test_negative_sampling_of_a_row_that_is_ignored_or_empty():
    head = negative_head(reg=0.1)
    h, _ = batch()
    assert head(h, torch.full((B,), -100)).item() == 0.0
    assert head(h[:0], torch.empty(0, dtype=torch.int64)).item() == 0.0
    assert head.log_prob(h[:0]).shape == (0, C)
    assert head(h, torch.randint(C, (B, 1))).isfinite()


def test_a_class_the_noise_never_draws_is_never_predicted():
    counts = torch.ones(C)
    counts[5] = 0
    head = negative_head(sampler=sx.samplers.Unigram(counts)).eval()
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    with torch.no_grad():
        head.bias[5] = 100.0
    h, _ = batch()
    assert (head.log_prob(h)[:, 5] == -math.inf).all()
    assert (head.predict(h) != 5).all()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"absolute": True}, "NegativeSampling: absolute is not an option of this loss, got True"),
        ({"label_smoothing": 0.1}, "NegativeSampling: label_smoothing is not an option of this loss, got 0.1"),
        ({"reg": -1.0}, "NegativeSampling: reg must be finite and at least 0, got -1.0"),
        ({"reg": math.inf}, "NegativeSampling: reg must be finite and at least 0, got inf"),
        ({"reg": 0.1, "loss": "sampled_softmax"}, "SampledSoftmax: reg is not an option of this loss, got 0.1"),
    ],
)
def test_negative_sampling_options_are_checked(options, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        negative_head(**options)


def test_negative_sampling_calls_are_checked():
    head = negative_head()
    h, y = batch()
    with pytest.raises(ValueError, match=r"positives must be None with NegativeSampling\(\)"):
        head(h, y, positives=(torch.zeros(B + 1, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)))
    for method in (head.scores, head.log_prob, head.predict):
        with pytest.raises(
            ValueError, match=r"SampledClassifier\.\w+: features must be \[7, f\] to fit h, got \[2, 3\]"
        ):
            method(h, features=torch.zeros(2, 3))


def test_negative_sampling_shows_its_options():
    assert "loss=NegativeSampling()" in repr(negative_head())
    assert "reg=0.1" in repr(negative_head(reg=0.1))


def test_negative_sampling_learns_the_class_frequencies_only_once_corrected():
    # h = 0: the bias is all there is. p_D is far from p_n; at the minimum bias = log p_D - log p_n.
    torch.manual_seed(0)
    law = torch.tensor([0.5, 0.25, 0.15, 0.1])
    sampler = sx.samplers.Unigram(torch.tensor([0.1, 0.2, 0.3, 0.4]))
    head = sx.SampledClassifier(1, 4, sampler, 8, loss="negative_sampling")
    optimizer = torch.optim.SGD(head.parameters(), lr=1.0)
    h = torch.zeros(4000, 1)
    for step in range(60):
        optimizer.zero_grad()
        head(h, torch.multinomial(law, 4000, replacement=True), key=sx.Key(step)).backward()
        optimizer.step()
    got = head.eval().log_prob(torch.zeros(1, 1)).exp()[0]
    torch.testing.assert_close(got, law, atol=0.03, rtol=0)
    assert (head.scores(torch.zeros(1, 1), corrected=False).softmax(1)[0] - law).abs().max() > 0.1
