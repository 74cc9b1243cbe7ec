"""Leak: what of the softmax m draws cannot push down, against the sum written out."""

from __future__ import annotations

import pytest
import torch
from diagnostics_cases import exact_logits, make

import samplex_cuda as sx
from samplex_cuda.heads import leak as module


def by_the_book(head, h, log_q, m, target=None, shared=False):
    p, q = exact_logits(head, h).softmax(1), log_q.double().exp()
    out = torch.zeros(len(h), dtype=torch.float64)
    for b in range(len(h)):
        own = set() if target is None else {int(t) for t in target[b].reshape(-1) if t >= 0}
        left = 1.0 if shared else 1.0 - sum(float(q[b, c]) for c in own)
        for c in range(head.num_classes):
            if c not in own:
                out[b] += max(0.0, float(p[b, c]) - m * float(q[b, c]) / left)
    return out


def laws(head, h):
    tree = sx.samplers.Tree(torch.randn(8, 3), torch.randn(8), torch.tensor([3, 1, -1, 0, 5, -1, 2, 4]))
    return [
        sx.samplers.Uniform(head.num_classes),
        sx.samplers.Unigram([1, 0, 3, 9, 2, 2]),
        tree,
        sx.samplers.Mixture([(tree, 0.5), (sx.samplers.Uniform(head.num_classes), 0.5)]),
        sx.samplers.Softmax(head.weight, head.bias),
    ]


@pytest.mark.parametrize("numbers", [1 << 22, 12, 4], ids=["whole", "some rows", "some classes"])
def test_leak_is_the_sum_over_all_classes(monkeypatch, numbers):
    monkeypatch.setattr(module, "_NUMBERS", numbers)
    head, h, y = make(spread=3.0)
    for sampler in laws(head, h):
        log_q = sampler.log_prob_all(h).expand(len(h), -1)
        for m in (1, 3):
            found = sx.diagnostics.leak(head, h, sampler=sampler, num_samples=m)
            torch.testing.assert_close(found, by_the_book(head, h, log_q, m), rtol=1e-5, atol=1e-6)
            found = sx.diagnostics.leak(head, h, y, sampler=sampler, num_samples=m)
            torch.testing.assert_close(found, by_the_book(head, h, log_q, m, y), rtol=1e-5, atol=1e-6)
        mean = log_q.double().exp().mean(0, keepdim=True).log().expand(len(h), -1)
        found = sx.diagnostics.leak(head, h, y, sampler=sampler, num_samples=2, shared=True)
        torch.testing.assert_close(found, by_the_book(head, h, mean, 2, y, True), rtol=1e-5, atol=1e-6)


def test_several_targets_and_shapes():
    head, h, _ = make(spread=3.0)
    y = torch.tensor([[1, 2], [0, -100], [-100, -100], [5, 5], [3, 4]])
    log_q = head.sampler.log_prob_all(h).expand(len(h), -1)
    found = head.leak(h[None], y[None])
    assert found.shape == (1, 5)
    want = by_the_book(head, h, log_q, head.num_samples, [row.unique() for row in y])
    torch.testing.assert_close(found[0], want, rtol=1e-5, atol=1e-6)


def test_the_softmax_does_not_leak_and_few_uniform_draws_do():
    head, h, y = make(classes=200, samples=2)
    exact = sx.samplers.Softmax(head.weight, head.bias)
    assert float(sx.diagnostics.leak(head, h, y, sampler=exact, num_samples=1).max()) < 1e-5
    assert float(head.leak(h).min()) > 0.2
    assert torch.equal(head.leak(h), sx.diagnostics.leak(head, h))


def test_diagnose_reports_and_warns():
    head, h, y = make(classes=200, samples=2, spread=3.0)
    found = sx.diagnostics.diagnose(head, h, y=y, candidates=[head.sampler], num_samples=(2, 4000), timed=False)
    few, many = found.samplers[0].points
    assert few.leak == pytest.approx(float(head.leak(h, y).mean()))
    assert few.leak > 0.2 > many.leak
    assert "leak %" in found.table()
    assert [text for text in found.warnings if text.startswith("Uniform: leaks at m = 2:")]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"h": torch.zeros(5, 4)}, "h must be"),
        ({"y": torch.zeros(4, dtype=torch.int64)}, "y must be"),
        ({"y": torch.full((5,), 6)}, "y must be in"),
        ({"num_samples": -1}, "num_samples"),
        ({"sampler": sx.samplers.Uniform(7)}, "num_classes = 6"),
        ({"features": torch.zeros(4, 3)}, "features must be"),
        ({"context": torch.zeros(4, dtype=torch.int64)}, "context must be"),
    ],
)
def test_what_is_refused(change, said):
    head, h, y = make()
    with pytest.raises((ValueError, IndexError), match=said):
        sx.diagnostics.leak(head, **{"h": h, "y": y, **change})
