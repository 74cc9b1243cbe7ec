"""Evaluation of `SampledClassifier`, and the chunked exact helpers behind it, against plain torch on all classes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from head_cases import B, C, D, batch, dense_logits, make
from torch import nn

import samplex_cuda as sx
from samplex_cuda import chunking, prediction


# ------------------------------------------------------------------------------------------------ eval: exact NLL
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_eval_is_cross_entropy(reduction, weighted, bias):
    class_weight = torch.rand(C) if weighted else None
    head = make(bias=bias, reduction=reduction, class_weight=class_weight, scale=1.7).eval()
    h, y = batch(rows=31)
    y[4] = y[30] = -100
    expected = F.cross_entropy(1.7 * head.linear()(h), y, weight=class_weight, reduction=reduction)
    loss = head(h, y)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize("chunk_size", [1, 7, 32, 96, 97, 98, None])
def test_exact_nll_is_the_same_for_every_chunk_size(chunk_size):
    h, y = batch(dtype=torch.float64)
    weight, bias = torch.randn(C, D, dtype=torch.float64), torch.randn(C, dtype=torch.float64)
    nll = prediction.exact_nll(h, weight, y, bias, chunk_size=chunk_size)
    torch.testing.assert_close(nll, F.cross_entropy(h @ weight.t() + bias, y, reduction="none"))
    lse = prediction.exact_lse(h, weight, bias, chunk_size=chunk_size)
    torch.testing.assert_close(lse, (h @ weight.t() + bias).logsumexp(1))


def test_row_blocks_join(monkeypatch):
    monkeypatch.setattr(chunking, "_BLOCK_ROWS", 4)
    head = make().eval()
    h, y = batch(rows=11)
    torch.testing.assert_close(head(h, y), F.cross_entropy(head.linear()(h), y))
    torch.testing.assert_close(head.log_prob(h), head.linear()(h).log_softmax(1))
    assert torch.equal(head.topk(h, 5)[1], head.linear()(h).topk(5)[1])


def test_eval_handles_large_and_confident_logits():
    head = make(scale=200.0, reduction="none").eval()
    h, _ = batch(rows=50)
    y = head.predict(h)
    nll = head(h, y)
    assert torch.isfinite(nll).all()
    assert (nll >= 0).all()
    torch.testing.assert_close(
        nll.double(), F.cross_entropy(dense_logits(head, h), y, reduction="none"), atol=1e-4, rtol=1e-4
    )


def test_eval_with_several_targets_and_class_weights():
    class_weight = torch.rand(C) + 0.1
    head = make(class_weight=class_weight, reduction="none").eval()
    h, _ = batch(rows=3)
    y = torch.tensor([[3, 5, -100], [8, -100, -100], [-100, -100, -100]])
    log_p = dense_logits(head, h).log_softmax(1)
    w = class_weight.double()
    first = -(w[3] * log_p[0, 3] + w[5] * log_p[0, 5]) / 2
    second = -w[8] * log_p[1, 8]
    expected = torch.stack([first, second, torch.zeros_like(first)])
    torch.testing.assert_close(head(h, y).double(), expected, atol=1e-5, rtol=1e-5)
    head.reduction = "mean"
    total = (w[3] + w[5]) / 2 + w[8]
    torch.testing.assert_close(head(h, y).double(), (first + second) / total, atol=1e-5, rtol=1e-5)


def test_eval_absolute_logits():
    head = make(absolute=True).eval()
    h, y = batch()
    torch.testing.assert_close(head(h, y).double(), F.cross_entropy(dense_logits(head, h), y), atol=1e-5, rtol=1e-5)
    assert torch.equal(head.predict(h), dense_logits(head, h).argmax(1))


def test_nan_stays_in_its_row():
    head = make(reduction="none").eval()
    h, y = batch()
    h[2, 3] = torch.nan
    others = [i for i in range(B) if i != 2]
    assert head(h, y).isnan().nonzero().flatten().tolist() == [2]
    logits, ids = head.topk(h, 3)
    assert logits[2].isnan().all()
    assert ids[2].tolist() == [0, 1, 2]
    assert torch.equal(ids[others], head.linear()(h[others]).topk(3)[1])


@pytest.mark.parametrize("training", [True, False])
def test_all_rows_ignored_or_no_rows(training):
    head = make().train(training)
    h, _ = batch()
    assert head(h, torch.full((B,), -100)).item() == 0.0
    assert head(h[:0], torch.empty(0, dtype=torch.int64)).item() == 0.0
    assert head.predict(h[:0]).shape == (0,)
    assert head.log_prob(h[:0]).shape == (0, C)


# ------------------------------------------------------------------------------------------------ predict and topk
def stable_topk(logits, k):
    values, ids = logits.sort(dim=-1, descending=True, stable=True)
    return values[..., :k], ids[..., :k]


@pytest.mark.parametrize("chunk_size", [1, 2, 5, 31, 96, 97, None])
@pytest.mark.parametrize("k", [1, 2, 6, 50, C])
def test_topk_with_ties_over_chunk_borders(chunk_size, k):
    # Small whole numbers: products are exact, so equal logits are equal bits, and there are many of them.
    h = torch.randint(-2, 3, (9, 4)).float()
    weight = torch.randint(-2, 3, (C, 4)).float()
    bias = torch.randint(-1, 2, (C,)).float()
    logits, ids = prediction.exact_topk(h, weight, k, bias, chunk_size=chunk_size)
    expected_logits, expected_ids = stable_topk(h @ weight.t() + bias, k)
    assert torch.equal(ids, expected_ids)
    assert torch.equal(logits, expected_logits)


def test_all_logits_equal_gives_the_first_ids():
    head = make()
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    h, _ = batch()
    assert torch.equal(head.topk(h, 5, chunk_size=3)[1], torch.arange(5).expand(B, 5))
    assert torch.equal(head.predict(h, chunk_size=3), torch.zeros(B, dtype=torch.int64))


def test_topk_and_predict_against_dense():
    head = make(scale=0.3)
    h, _ = batch(rows=40)
    logits, ids = head.topk(h, 10, chunk_size=13)
    expected, expected_ids = (0.3 * head.linear()(h)).topk(10)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(logits, expected)
    assert torch.equal(head.predict(h, chunk_size=13), expected_ids[:, 0])
    # A negative scale turns the order round.
    head.scale = -1.0
    assert torch.equal(head.predict(h), head.linear()(h).argmin(1))


@pytest.mark.parametrize("chunk_size", [10, None])
def test_log_prob(chunk_size):
    head = make(scale=2.0)
    h = torch.randn(2, 3, D)
    log_p = head.log_prob(h, chunk_size=chunk_size)
    assert log_p.shape == (2, 3, C)
    torch.testing.assert_close(log_p, (2.0 * head.linear()(h)).log_softmax(-1))
    torch.testing.assert_close(log_p.exp().sum(-1), torch.ones(2, 3))


def test_leading_dimensions():
    head = make(reduction="none")
    h, y = torch.randn(2, 3, D), torch.randint(C, (2, 3))
    key = sx.Key(5)
    loss = head(h, y, key=key)
    assert loss.shape == (2, 3)
    assert torch.equal(loss.flatten(), head(h.view(6, D), y.flatten(), key=sx.Key(5)))
    assert head(h, y.unsqueeze(-1)).shape == (2, 3)
    one = head(h[0, 0], y[0, 0])
    assert one.shape == ()
    head.eval()
    assert torch.equal(head(h, y).flatten(), head(h.view(6, D), y.flatten()))
    assert head.predict(h).shape == (2, 3)
    assert head.predict(h[0, 0]).shape == ()
    logits, ids = head.topk(h, 4)
    assert logits.shape == ids.shape == (2, 3, 4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_evaluation_sums_in_wide_types(dtype):
    head = make(dtype=dtype).eval()
    h, y = torch.randn(B, D).to(dtype), torch.randint(C, (B,))
    loss = head(h, y)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    expected = F.cross_entropy(dense_logits(head, h), y)
    torch.testing.assert_close(loss.double(), expected, atol=1e-5, rtol=1e-5)
