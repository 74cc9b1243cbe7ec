"""Top-k among candidates: of a tree, of one's own, of an index."""

from __future__ import annotations

import builtins
import re

import pytest
import torch
from head_cases import C, D, batch, make
from step_recorder import SyncGuard

import samplex_cuda as sx
from samplex_cuda import prediction
from samplex_cuda.prediction import rerank


def tree_of(classes=C, dim=D, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(40 * classes, dim, generator=g)
    y = torch.randint(classes, (len(x),), generator=g)
    return sx.samplers.Tree.fit(x, y, num_classes=classes, dim=4, progress=False)


# ------------------------------------------------------------------------------------------------ tree candidates
@pytest.mark.parametrize("base", [False, True])
@pytest.mark.parametrize("loss", ["sampled_softmax", "negative_sampling", "full_softmax"])
def test_a_wide_beam_is_exact(loss, base):
    # As wide as the tree: every class is a candidate, and the answer that of all classes, log p_n included.
    tree = tree_of()
    if base:
        tree.set_base(sx.samplers.Unigram(torch.arange(1.0, C + 1)), 0.7)
    head = make(sampler=tree, loss=loss, scale=1.3)
    h, _ = batch(rows=20)
    logits, ids = head.topk(h, 7, candidates="tree", beam=128)
    exact = head.topk(h, 7)
    assert torch.equal(ids, exact[1])
    torch.testing.assert_close(logits, exact[0], rtol=1e-4, atol=1e-4)


def test_a_narrow_beam_ranks_what_the_tree_found():
    tree = tree_of()
    head = make(loss="negative_sampling", sampler=sx.samplers.LogUniform(C))
    x, h = torch.randn(2, 5, D), torch.randn(2, 5, D)
    logits, ids = head.topk(h, 3, features=x, candidates="tree", tree=tree, beam=8)
    assert ids.shape == logits.shape == (2, 5, 3)
    found = tree.topk(x, 8, beam=8)[1].reshape(2, 5, 8)
    scores = head.scores(h, x).gather(-1, found)
    order = scores.sort(dim=-1, descending=True, stable=True)[1][..., :3]
    assert torch.equal(ids, found.gather(-1, order))
    torch.testing.assert_close(logits, scores.gather(-1, order))


def test_absolute_logits_and_no_rows():
    head = make(absolute=True, sampler=tree_of())
    h, _ = batch()
    assert torch.equal(head.topk(h, 3, candidates="tree", beam=128)[1], head.topk(h, 3)[1])
    assert head.topk(h[:0], 3, candidates="tree")[1].shape == (0, 3)


def test_nan_stays_in_its_row():
    head = make(sampler=tree_of())
    h, _ = batch()
    h[2] = torch.nan
    logits, ids = head.topk(h, 3, candidates="tree")
    assert ids[2].tolist() == [-1, -1, -1]
    assert (ids[[0, 1, 3]] >= 0).all()
    assert logits[2].eq(-torch.inf).all()


def test_balanced_data_find_rare_classes():
    # 300 classes around well separated means, most of them seen once or twice.
    g = torch.Generator().manual_seed(0)
    means = torch.randn(300, 8, generator=g)
    p = 1.0 / torch.arange(1.0, 301.0)
    y = torch.cat([torch.arange(300), torch.multinomial(p, 1500, replacement=True, generator=g)])
    x = means[y] + 0.3 * torch.randn(len(y), 8, generator=g)
    bx, by = sx.tree_fit.balance(x, y, 300, least=4, most=50)
    assert torch.equal(torch.bincount(by), torch.bincount(y).clamp(4, 50))
    seen_once = (torch.bincount(y) == 1).nonzero()[0]
    rows = bx[by == seen_once]
    assert torch.equal(rows[0], x[y == seen_once][0])
    spread = (bx - means[by]).square().mean().sqrt()
    assert 0.25 < spread < 0.45
    rest = torch.randint(300, (2000,), generator=g)
    queries = means[rest] + 0.3 * torch.randn(2000, 8, generator=g)
    found = []
    for data in ((x, y), (bx, by)):
        tree = sx.samplers.Tree.fit(*data, num_classes=300, dim=8, reg=1e-3, progress=False)
        found.append(float((tree.topk(queries, 8, beam=8)[1] == rest.unsqueeze(1)).any(1).float().mean()))
    assert found[1] > found[0]


def test_errors_of_balance():
    x, y = torch.randn(3, 2), torch.tensor([0, 1, 5])
    with pytest.raises(IndexError, match=re.escape("balance: y must be in [0, 5), got 5")):
        sx.tree_fit.balance(x, y, 5)
    with pytest.raises(ValueError, match=re.escape("balance: y must be [3] int64, got [2] int64")):
        sx.tree_fit.balance(x, y[:2], 6)
    with pytest.raises(ValueError, match="most must be an int of at least 5, got 4"):
        sx.tree_fit.balance(x, y, 6, least=5, most=4)
    with pytest.raises(ValueError, match="balance: x must be"):
        sx.tree_fit.balance(y, y, 6)


# ------------------------------------------------------------------------------------------------ own candidates
def test_own_candidates():
    head = make()
    h = torch.randn(2, 3, D)
    ids = torch.stack([torch.randperm(C)[:6] for _ in range(6)]).view(2, 3, 6)
    ids[0, 1, 2:] = -1
    logits, found = head.topk(h, 4, candidates=ids)
    assert found[0, 1].tolist()[2:] == [-1, -1]
    assert logits[0, 1, 2:].tolist() == [-torch.inf] * 2
    scores = head.scores(h)
    wanted = torch.where(ids >= 0, scores.gather(-1, ids.clamp(min=0)), -torch.inf).sort(dim=-1, descending=True)[0]
    torch.testing.assert_close(logits, wanted[..., :4])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_rerank_ties_and_types(dtype):
    weight = torch.tensor([[1.0], [3.0], [2.0], [3.0], [-torch.inf]])
    ids = torch.tensor([[3, 4, -1, 1, 0]])
    logits, found = rerank(torch.ones(1, 1, dtype=dtype), weight, ids, 5)
    assert found.tolist() == [[1, 3, 0, 4, -1]]
    assert logits.tolist() == [[3.0, 3.0, 1.0, -torch.inf, -torch.inf]]
    assert logits.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("normalize", [False, True])
def test_answers_of_a_device_without_waiting_for_it(monkeypatch, normalize):
    """The same numbers, by ops of fixed sizes."""
    h, weight, bias = torch.randn(6, D), torch.randn(3000, D), torch.randn(3000)
    ids = torch.stack([torch.randperm(3000)[:40] for _ in range(6)])
    ids[1, 3:30] = -1
    target = torch.tensor([1, 2, -100, 4, 5, 6])
    flat = torch.zeros(2000, D)  # all logits are equal: every row is crowded at the border

    def work():
        return [
            *rerank(h, weight, ids, 20, bias, normalize=normalize),
            *prediction.exact_topk(h, weight, 1500, bias, normalize=normalize),
            *prediction.exact_topk(h, flat, 1500),
            prediction.exact_nll(h, weight, target, bias, normalize=normalize),
        ]

    plain = work()
    monkeypatch.setattr("samplex_cuda._device.host_waits", lambda _: True)
    with SyncGuard() as guard:
        unseen = work()
    assert guard.found == []
    for mine, theirs in zip(unseen, plain, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"candidates": "tree"},
            TypeError,
            "SampledClassifier.topk: tree must be a samplers.Tree, because the sampler is not",
        ),
        ({"candidates": "lsh"}, ValueError, "candidates must be None, 'tree' or int64 ids, got 'lsh'"),
        ({"beam": 5}, ValueError, "candidates must be 'tree' if beam or tree is given, got None"),
        (
            {"candidates": torch.zeros(7, 2).long()},
            ValueError,
            "must be [*, n] int64 with n >= k = 3, got [7, 2] int64",
        ),
        ({"candidates": torch.full((7, 4), C)}, IndexError, f"rerank: ids must be -1 or in [0, {C}), got {C}"),
    ],
)
def test_errors(options, error, message):
    h, _ = batch()
    with pytest.raises(error, match=re.escape(message)):
        make().topk(h, 3, **options)


def test_errors_of_the_tree():
    h, _ = batch()
    head = make(sampler=tree_of())
    for beam in (2, 513):
        with pytest.raises(ValueError, match=re.escape(f"beam must be an int in [3, 512], got {beam}")):
            head.topk(h, 3, candidates="tree", beam=beam)
    with pytest.raises(ValueError, match=f"tree must have num_classes = {C}, got 50"):
        head.topk(h, 3, candidates="tree", tree=tree_of(50))


# ------------------------------------------------------------------------------------------------ FAISS
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", ["flat", "hnsw"])
def test_index(kind, bias):
    pytest.importorskip("faiss")
    head = make(bias=bias, scale=-0.7)
    index = head.index(kind)
    h = torch.randn(2, 5, D)
    logits, ids = index.topk(h, 4)
    exact = head.topk(h, 4)
    if kind == "flat":
        assert torch.equal(ids, exact[1])
        assert index.recall(h, 4) == 1.0
    assert index.recall(h, 4) > 0.9
    torch.testing.assert_close(logits, head.scores(h).gather(-1, ids))
    assert index.topk(h[:0], 4)[1].shape == (0, 5, 4)


def test_inverted_index():
    pytest.importorskip("faiss")
    head = make(2000, 16)
    h = torch.randn(30, 16)
    few, many = (head.index("ivf", candidates=40, nprobe=n).recall(h, 10) for n in (1, 40))
    assert few < many
    assert many > 0.99
    with pytest.raises(ValueError, match="kind must be flat, ivf, hnsw, usearch or a string"):
        head.index("tree of life")


def test_what_an_index_cannot_do():
    pytest.importorskip("faiss")
    with pytest.raises(ValueError, match="loss='negative_sampling'"):
        make(loss="negative_sampling").index()
    with pytest.raises(ValueError, match="absolute=False"):
        make(absolute=True).index()


def test_index_without_faiss(monkeypatch):
    original = builtins.__import__

    def without(name, *rest):
        if name == "faiss":
            raise ImportError(name)
        return original(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match="faiss must be installed"):
        make().index()
