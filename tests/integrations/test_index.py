"""Indexes over class rows: FAISS and USearch, stored, loaded, refreshed."""

from __future__ import annotations

import pytest
import torch

import samplex_cuda as sx
from samplex_cuda.index import ClassIndex

C, D = 400, 12
KINDS = {"flat": {}, "ivf": {"nprobe": 8}, "hnsw": {"efSearch": 128}, "usearch": {"expansion_search": 256}}


def head(bias=True, scale=1.0):
    torch.manual_seed(0)
    return sx.SampledClassifier(D, C, sx.samplers.Uniform(C), num_samples=5, bias=bias, scale=scale).eval()


def need(kind):
    pytest.importorskip("usearch.index" if kind == "usearch" else "faiss")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bias", [False, True])
def test_save_load_refresh(kind, bias, tmp_path):
    need(kind)
    made, h = head(bias), torch.randn(30, D)
    index = made.index(kind, **KINDS[kind])
    report = index.report(h, 5)
    assert report["recall"] > 0.9, report
    assert report["first"] > 0.9
    assert report["seconds"] > 0
    assert report["exact_seconds"] > 0
    index.save(tmp_path / "index")
    again = ClassIndex.load(made, tmp_path / "index")
    assert repr(again) == repr(index)
    for a, b in zip(again.topk(h, 5), index.topk(h, 5), strict=True):
        assert torch.equal(a, b)
    # Rows that changed are found after a refresh, and not before.
    with torch.no_grad():
        made.weight[[3, 77]] = 50 * h[:2]
    assert not torch.equal(index.topk(h[:2], 1)[1].flatten(), torch.tensor([3, 77]))
    for which in (torch.tensor([77, 3, 3]), None):
        again.refresh(which)
        assert again.topk(h[:2], 1)[1].flatten().tolist() == [3, 77]
        assert again.recall(h, 5) > 0.9
    assert len(again.topk(h[:0], 5)[1]) == 0


@pytest.mark.parametrize("kind", ["flat", "usearch"])
def test_refused(kind, tmp_path):
    need(kind)
    index = head().index(kind)
    with pytest.raises(IndexError, match=r"ClassIndex.refresh: ids must be in \[0, 400\), got 400"):
        index.refresh(torch.tensor([1, 400]))
    index.save(tmp_path / "index")
    other = sx.SampledClassifier(D, C + 1, sx.samplers.Uniform(C + 1), num_samples=5)
    with pytest.raises(ValueError, match=r"ClassIndex.load: the index must have \(401, 13\) rows and columns"):
        ClassIndex.load(other, tmp_path / "index")


def test_negative_scale():
    need("usearch")
    made, h = head(scale=-2.0), torch.randn(20, D)
    assert made.index("usearch").recall(h, 3) > 0.9
