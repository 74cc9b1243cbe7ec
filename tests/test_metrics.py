"""Metrics against cases counted by hand, against scikit-learn and torchmetrics, and over whole data sets."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import samplex_cuda as sx
from samplex_cuda import data, metrics, training

# Row 0: targets 3 and 4 at ranks 3 and 1. Row 1: target 9 nowhere. Row 2: no target. Row 3: targets 0, 1, 2, one hit.
IDS = torch.tensor([[4, 1, 3, 0], [5, 6, 7, 8], [0, 1, 2, 3], [9, 8, 2, 7]])
TARGETS = torch.tensor([[3, 4, -100], [-100, 9, -100], [-100, -100, -100], [0, 1, 2]])


def log2(x):
    return math.log2(x)


@pytest.mark.parametrize(
    ("found", "skip", "zero"),
    [
        (lambda e: metrics.precision_at_k(IDS, TARGETS, 1, empty=e), 1 / 3, 1 / 4),
        (lambda e: metrics.precision_at_k(IDS, TARGETS, 3, empty=e), (2 / 3 + 0 + 1 / 3) / 3, 1 / 4),
        (lambda e: metrics.recall_at_k(IDS, TARGETS, 1, empty=e), (1 / 2) / 3, (1 / 2) / 4),
        (lambda e: metrics.recall_at_k(IDS, TARGETS, 4, empty=e), (1 + 0 + 1 / 3) / 3, (1 + 1 / 3) / 4),
        (lambda e: metrics.mrr(IDS, TARGETS, empty=e), (1 + 0 + 1 / 3) / 3, (1 + 1 / 3) / 4),
        (lambda e: metrics.accuracy(IDS, TARGETS, empty=e), 1 / 3, 1 / 4),
        (
            lambda e: metrics.ndcg_at_k(IDS, TARGETS, 3, empty=e),
            ((1 + 1 / log2(4)) / (1 + 1 / log2(3)) + (1 / log2(4)) / (1 + 1 / log2(3) + 1 / log2(4))) / 3,
            ((1 + 1 / log2(4)) / (1 + 1 / log2(3)) + (1 / log2(4)) / (1 + 1 / log2(3) + 1 / log2(4))) / 4,
        ),
        (lambda e: metrics.ndcg_at_k(IDS, TARGETS, 1, empty=e), 1 / 3, 1 / 4),
    ],
)
def test_by_hand(found, skip, zero):
    assert found("skip") == pytest.approx(skip, abs=1e-12)
    assert found("zero") == pytest.approx(zero, abs=1e-12)


def test_propensities_by_hand():
    found = metrics.propensities(torch.tensor([10, 0]), 100, a=0.55, b=1.5)
    c = (math.log(100) - 1) * 2.5**0.55
    expected = [1 / (1 + c * math.exp(-0.55 * math.log(n + 1.5))) for n in (10, 0)]
    assert found.tolist() == pytest.approx(expected)
    assert metrics.propensities(torch.tensor([1]), 2).tolist() == [1.0]  # never above 1


def test_psp_by_hand():
    p = torch.tensor([0.5, 0.25, 0.2, 0.1, 1.0, 1.0, 1.0, 1.0, 1.0, 0.5])
    # 1 / p is 2, 4, 5, 10, 1, ..., 2. Row 0 hits 4 (worth 1) and 3 (10), best 10 + 1. Row 1 hits none, best 2. Row 3
    # hits 2 (5), best 5 + 4 + 2.
    assert metrics.psp_at_k(IDS, TARGETS, 1, p) == pytest.approx(1 / (10 + 2 + 5))
    assert metrics.psp_at_k(IDS, TARGETS, 3, p) == pytest.approx((11 + 5) / (11 + 2 + 11))
    assert metrics.psp_at_k(IDS, TARGETS, 3, p, normalised=False) == pytest.approx((11 + 5) / 3 / 3)
    perfect = torch.tensor([[3, 4], [9, 0], [0, 1], [2, 1]])
    assert metrics.psp_at_k(perfect, TARGETS, 2, p) == pytest.approx(1.0)
    # With equal propensities and one target a row it is precision, normalized or not.
    ids, y = torch.tensor([[1], [2], [3]]), torch.tensor([1, 0, 3])
    assert metrics.psp_at_k(ids, y, 1, torch.ones(5)) == metrics.precision_at_k(ids, y, 1)


def test_duplicates_count_once():
    ids = torch.tensor([[4, 4, 3]])
    targets = torch.tensor([[4, 3, 4, 3, -100]])
    assert metrics.precision_at_k(ids, targets, 3) == pytest.approx(2 / 3)
    assert metrics.precision_at_k(ids, targets, 2) == 0.5
    assert metrics.recall_at_k(ids, targets, 3) == 1.0
    assert metrics.ndcg_at_k(ids, targets, 3) == pytest.approx((1 + 1 / 2) / (1 + 1 / log2(3)))
    p = torch.tensor([1, 1, 1, 0.5, 0.25])
    assert metrics.psp_at_k(ids, targets, 2, p) == pytest.approx(4 / 6)
    none = torch.tensor([[-1, -1]])
    assert metrics.precision_at_k(none, torch.tensor([[-100, 3]]), 2) == 0.0
    assert metrics.precision_at_k(none, torch.tensor([3]), 2) == 0.0


def test_no_rows():
    ids, y = torch.zeros(0, 3, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
    assert math.isnan(metrics.precision_at_k(ids, y, 2))
    assert math.isnan(metrics.mrr(IDS[2:3], TARGETS[2:3]))
    assert metrics.mrr(IDS[2:3], TARGETS[2:3], empty="zero") == 0.0
    found = metrics.Evaluator().compute()
    assert all(math.isnan(value) for value in found.values())


def case(seed, n=200, c=30, several=6):
    """Scores without ties, and targets; every row has at least one."""
    rng = np.random.default_rng(seed)
    scores = torch.from_numpy(rng.permuted(np.tile(np.arange(c, dtype=np.float64), (n, 1)), axis=1))
    truth = np.zeros((n, c), dtype=int)
    for row in truth:
        row[rng.choice(c, rng.integers(1, several + 1), replace=False)] = 1
    targets = torch.full((n, several), -100)
    for i, row in enumerate(truth):
        found = np.flatnonzero(row)
        targets[i, : len(found)] = torch.from_numpy(found)
    return scores, scores.topk(c)[1], truth, targets


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("k", [1, 3, 10, 30])
def test_as_scikit_learn(seed, k):
    sk = pytest.importorskip("sklearn.metrics")
    scores, ids, truth, targets = case(seed)
    assert metrics.ndcg_at_k(ids, targets, k) == pytest.approx(sk.ndcg_score(truth, scores.numpy(), k=k))
    y = targets[:, 0]
    top = sk.top_k_accuracy_score(y.numpy(), scores.numpy(), k=k, labels=np.arange(30)) if k < 30 else 1.0
    assert metrics.recall_at_k(ids, y, k) == pytest.approx(top)
    one = np.eye(30, dtype=int)[y.numpy()]
    # With one target a row, average precision of a ranking is the reciprocal rank.
    assert metrics.mrr(ids, y) == pytest.approx(sk.label_ranking_average_precision_score(one, scores.numpy()))
    predicted = np.zeros_like(truth)
    np.put_along_axis(predicted, ids[:, :k].numpy(), 1, axis=1)
    assert metrics.precision_at_k(ids, targets, k) == pytest.approx(
        sk.precision_score(truth, predicted, average="samples", zero_division=0)
    )
    assert metrics.recall_at_k(ids, targets, k) == pytest.approx(sk.recall_score(truth, predicted, average="samples"))
    assert metrics.accuracy(ids, y) == pytest.approx(sk.accuracy_score(y.numpy(), ids[:, 0].numpy()))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("k", [1, 3, 10])
def test_as_torchmetrics(k):
    retrieval = pytest.importorskip("torchmetrics.retrieval")
    scores, ids, truth, targets = case(3, n=60)
    index = torch.arange(60)[:, None].expand(60, 30).reshape(-1)
    flat, true = scores.reshape(-1).float(), torch.from_numpy(truth).reshape(-1)
    for theirs, mine in (
        (retrieval.RetrievalPrecision(top_k=k), metrics.precision_at_k(ids, targets, k)),
        (retrieval.RetrievalRecall(top_k=k), metrics.recall_at_k(ids, targets, k)),
        (retrieval.RetrievalNormalizedDCG(top_k=k), metrics.ndcg_at_k(ids, targets, k)),
        (retrieval.RetrievalMRR(), metrics.mrr(ids, targets)),
    ):
        assert mine == pytest.approx(float(theirs(flat, true, indexes=index)), abs=1e-5)


def test_nll_and_perplexity_as_scikit_learn_and_torchmetrics():
    sk, text = pytest.importorskip("sklearn.metrics"), pytest.importorskip("torchmetrics.text")
    head, x, y = make_head(8, 40), torch.randn(90, 8), torch.randint(0, 40, (90,))
    found = metrics.evaluate(lambda batch: batch["x"], head, data.Dense(x, y, 40), 32, k=(1,))
    logits = head.linear()(x).detach()
    assert found["nll"] == pytest.approx(
        sk.log_loss(y.numpy(), logits.double().softmax(1).numpy(), labels=np.arange(40)), rel=1e-5
    )
    theirs = text.Perplexity()(logits.double()[None], y[None])
    assert found["perplexity"] == pytest.approx(float(theirs), rel=1e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("empty", "action"), [("skip", "skip"), ("zero", "neg")])
def test_rows_without_a_label_as_torchmetrics(empty, action):
    retrieval = pytest.importorskip("torchmetrics.retrieval")
    scores, ids, truth, targets = case(8, n=40)
    targets[::5], truth[::5] = -100, 0
    index = torch.arange(40)[:, None].expand(40, 30).reshape(-1)
    flat, true = scores.reshape(-1).float(), torch.from_numpy(truth).reshape(-1)
    for name, mine in (
        ("Precision", metrics.precision_at_k(ids, targets, 4, empty=empty)),
        ("Recall", metrics.recall_at_k(ids, targets, 4, empty=empty)),
        ("NormalizedDCG", metrics.ndcg_at_k(ids, targets, 4, empty=empty)),
    ):
        theirs = getattr(retrieval, f"Retrieval{name}")(top_k=4, empty_target_action=action)
        assert mine == pytest.approx(float(theirs(flat, true, indexes=index)), abs=1e-5)
    theirs = retrieval.RetrievalMRR(empty_target_action=action)
    assert metrics.mrr(ids, targets, empty=empty) == pytest.approx(float(theirs(flat, true, indexes=index)), abs=1e-5)


@pytest.mark.parametrize("size", [1, 7, 200])
def test_streaming_is_the_same(size):
    _, ids, _, targets = case(5)
    targets[::9] = -100
    p = metrics.propensities(torch.arange(30), 200)
    nll = torch.rand(200, dtype=torch.float64)
    evaluator = metrics.Evaluator(k=(5, 1, 3), propensities=p)
    for begin in range(0, 200, size):
        part = slice(begin, begin + size)
        evaluator.update(ids[part], targets[part], nll[part])
    found = evaluator.compute()
    for k in (1, 3, 5):
        assert found[f"precision@{k}"] == pytest.approx(metrics.precision_at_k(ids, targets, k))
        assert found[f"recall@{k}"] == pytest.approx(metrics.recall_at_k(ids, targets, k))
        assert found[f"ndcg@{k}"] == pytest.approx(metrics.ndcg_at_k(ids, targets, k))
        assert found[f"psp@{k}"] == pytest.approx(metrics.psp_at_k(ids, targets, k, p))
        assert found[f"psp_raw@{k}"] == pytest.approx(metrics.psp_at_k(ids, targets, k, p, normalised=False))
    assert found["mrr"] == pytest.approx(metrics.mrr(ids, targets))
    assert found["accuracy"] == pytest.approx(metrics.accuracy(ids, targets))
    valid = (targets != -100).any(1)
    assert found["nll"] == pytest.approx(float(nll[valid].mean()))
    assert found["perplexity"] == pytest.approx(math.exp(found["nll"]))
    assert (evaluator.rows, evaluator.counted) == (200, int(valid.sum()))
    evaluator.reset()
    assert evaluator.rows == 0


def test_hits_go_in_chunks(monkeypatch):
    _, ids, _, targets = case(6)
    whole = metrics.ndcg_at_k(ids, targets, 5)
    monkeypatch.setattr(metrics, "_CELLS", 100)
    assert metrics.ndcg_at_k(ids, targets, 5) == whole


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: metrics.mrr(IDS.float(), TARGETS), r"mrr: ids must be \[N, K\] int64, got \[4, 4\] float32"),
        (lambda: metrics.mrr(IDS, TARGETS[:2]), r"mrr: targets must be \[4\] or \[4, P\] int64, got \[2, 3\] int64"),
        (lambda: metrics.recall_at_k(IDS, TARGETS, 5), r"recall_at_k: k must be an int in \[1, 4\], got 5"),
        (lambda: metrics.recall_at_k(IDS, TARGETS, 0), r"recall_at_k: k must be an int in \[1, 4\]"),
        (lambda: metrics.mrr(IDS, TARGETS, empty="one"), r"mrr: empty must be 'skip' or 'zero', got 'one'"),
        (lambda: metrics.psp_at_k(IDS, TARGETS, 1, torch.zeros(10)), r"propensities must be above 0, got 0.0"),
        (lambda: metrics.propensities(torch.ones(3), 0), r"num_examples must be an int of at least 1, got 0"),
        (lambda: metrics.propensities(torch.ones(3), 5, b=0), r"b must be finite and above 0, got 0"),
        (lambda: metrics.Evaluator(k=()), "Evaluator: k must be one or more ints, got none"),
        (
            lambda: metrics.Evaluator(k=(9,)).update(IDS, TARGETS),
            r"ids must have at least 9 columns, got \[4, 4\] int64",
        ),
        (
            lambda: metrics.Evaluator(k=(1,)).update(IDS, TARGETS, torch.zeros(3)),
            r"nll must be \[4\] floating point, got \[3\] float32",
        ),
    ],
)
def test_bad_arguments(call, text):
    with pytest.raises(ValueError, match=text):
        call()


def test_nll_for_all_batches_or_none():
    evaluator = metrics.Evaluator(k=(1,))
    evaluator.update(IDS, TARGETS, torch.zeros(4))
    with pytest.raises(ValueError, match="nll must be given for all batches or for none"):
        evaluator.update(IDS, TARGETS)


def test_perplexity_overflows_to_inf():
    assert metrics.perplexity(1e4) == math.inf


# ---------------------------------------------------------------------------------------------------- over data sets
class Users(training.models.Encoder):
    def __init__(self, vectors):
        super().__init__()
        self.vectors = vectors

    def forward(self, batch):
        return self.vectors[batch["user"]]


def make_head(d, c):
    return sx.SampledClassifier(d, c, sx.samplers.Uniform(c), num_samples=5)


@torch.no_grad()
def test_evaluate_dense_against_the_full_matrix():
    x, y = torch.randn(90, 8), torch.randint(0, 40, (90,))
    head = make_head(8, 40)
    found = metrics.evaluate(lambda batch: batch["x"], head, data.Dense(x, y, 40), 32, k=(1, 5, 100))
    logits = head.linear()(x)
    order = logits.sort(descending=True)[1]
    assert found["nll"] == pytest.approx(float(torch.nn.functional.cross_entropy(logits, y)), rel=1e-5)
    assert found["accuracy"] == pytest.approx(float((logits.argmax(1) == y).float().mean()))
    assert found["recall@5"] == pytest.approx(metrics.recall_at_k(order, y, 5))
    assert found["mrr"] == pytest.approx(metrics.mrr(order, y))
    assert found["recall@40"] == 1.0  # k above C is C
    assert head.training
    assert head.reduction == "mean"
    part = metrics.evaluate(lambda batch: batch["x"], head, data.Dense(x, y, 40), 32, nll=False, max_rows=32)
    assert part["accuracy"] == pytest.approx(float((logits[:32].argmax(1) == y[:32]).float().mean()))
    assert "nll" not in part


@torch.no_grad()
def test_evaluate_sparse_with_unlabelled_rows():
    set_ = data.Sparse(
        np.array([0, 2, 3, 4]), np.array([0, 1, 2, 3]), None, np.array([0, 2, 2, 3]), np.array([1, 7, 4]), 5, 9
    )
    encoder = torch.nn.EmbeddingBag(5, 6, mode="sum", include_last_offset=True)

    def encode(batch):
        return encoder(batch["ids"], batch["offsets"], per_sample_weights=batch["values"])

    head = make_head(6, 9)
    found = metrics.evaluate(encode, head, set_, k=(2,), propensities=metrics.propensities(set_.class_counts(), 3))
    h = encode(set_.batch(torch.arange(3)))
    log_p = head.linear()(h).log_softmax(1)
    assert found["nll"] == pytest.approx(-float((log_p[0, 1] + log_p[0, 7]) / 2 + log_p[2, 4]) / 2, rel=1e-5)
    y = set_.targets(torch.arange(3))
    assert found["precision@2"] == metrics.precision_at_k(head.topk(h, 2)[1], y, 2)
    zero = metrics.evaluate(encode, head, set_, k=(2,), empty="zero")
    assert zero["precision@2"] == pytest.approx(found["precision@2"] * 2 / 3)
    assert zero["nll"] == found["nll"]
    assert {"psp@2", "psp_raw@2"} <= set(found)


@torch.no_grad()
def test_evaluate_text_counts_every_token_and_carries_state():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Embedding(11, 6)
            self.state = {"left": torch.ones(1)}
            self.calls = []

        def forward(self, batch):
            assert not self.training
            self.calls.append(len(self.state))
            self.state = {"carried": torch.ones(1)}
            return self.table(batch["tokens"])

        def carried(self):
            return self.state

        def carry(self, state):
            self.state = state

    tokens = torch.randint(0, 11, (54,))
    stream = data.Tokens(tokens, 11, window=7, columns=2)
    model, head = Model(), make_head(6, 11)
    found = metrics.evaluate(model, head, stream, 999, k=(1,))
    logits = head.linear()(model.table(tokens[:52]))
    expected = float(torch.nn.functional.cross_entropy(logits, tokens[1:53]))
    assert found["nll"] == pytest.approx(expected, rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(expected), rel=1e-5)
    assert model.calls == [0, 1, 1, 1]  # begins again, then goes on
    assert model.state == {"left": torch.ones(1)}
    assert model.training


def test_equal_scores_go_to_the_lower_id():
    y = torch.tensor([0, 3, 2, 9])
    head = make_head(4, 10)
    torch.nn.init.zeros_(head.weight)
    torch.nn.init.zeros_(head.bias)
    found = metrics.evaluate(lambda batch: batch["x"], head, data.Dense(torch.randn(4, 4), y, 10), k=(1, 4, 10))
    assert found["accuracy"] == 1 / 4
    assert found["recall@4"] == 3 / 4
    assert found["ndcg@4"] == pytest.approx((1 + 1 / log2(5) + 1 / log2(4)) / 4)
    assert found["mrr"] == pytest.approx((1 + 1 / 4 + 1 / 3 + 1 / 10) / 4)
    assert found["nll"] == pytest.approx(math.log(10))
    by_name = training.evaluate(training.models.Linear(4), head, data.Dense(torch.randn(4, 4), y, 10), metrics=["mrr"])
    assert by_name["mrr"] == pytest.approx(found["mrr"])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("others", [[], ["recall@1"], ["ndcg@5", "nll"]])
@pytest.mark.parametrize("cells", [1 << 24, 90])
def test_mrr_by_name_is_over_all_classes(monkeypatch, others, cells):
    retrieval = pytest.importorskip("torchmetrics.retrieval")
    rng = np.random.default_rng(0)
    labels = [rng.choice(30, rng.integers(0, 4), replace=False) for _ in range(50)]
    set_ = data.Sparse(np.arange(51), rng.integers(0, 7, 50), None, np.cumsum([0, *map(len, labels)]),
                       np.concatenate(labels), 7, 30)  # fmt: skip
    encoder, head = training.models.EmbeddingBag(7, 6, 6), make_head(6, 30)
    monkeypatch.setattr(head, "scores", lambda h, f, real=head.scores: (seen.append(len(h)), real(h, f))[1])
    monkeypatch.setattr(metrics, "_SCORES", cells)
    seen = []
    found = training.evaluate(encoder, head, set_, batch_size=20, metrics=["mrr", *others])
    assert max(seen) > 3 if cells > 90 else max(seen) == 3  # rows at a time
    with torch.no_grad():
        scores = head.linear()(encoder(set_.batch(torch.arange(50)))).softmax(1)  # theirs must be positive
    true = torch.zeros(50, 30, dtype=torch.int64)
    for i, found_labels in enumerate(labels):
        true[i, found_labels] = 1
    index = torch.arange(50)[:, None].expand(50, 30).reshape(-1)
    theirs = retrieval.RetrievalMRR(empty_target_action="skip")(scores.reshape(-1), true.reshape(-1), indexes=index)
    assert found["mrr"] == pytest.approx(float(theirs), abs=1e-6)


def test_evaluate_without_known_items():
    train = data.Interactions([0, 3, 5], [4, 2, 7, 1, 3], num_items=9, history=2)
    test = train.with_targets(data.Interactions([0, 1, 3], [5, 0, 8], num_items=9))
    head = make_head(4, 9)
    users = torch.randn(2, 4)
    found = metrics.evaluate(lambda b: users[b["user"]], head, test, 1, k=(1, 3), exclude_history=True)
    logits = head.linear()(users).detach()
    logits[0, [4, 2, 7]] = -math.inf
    logits[1, [1, 3]] = -math.inf
    order = logits.sort(descending=True)[1]
    assert found["recall@3"] == pytest.approx(metrics.recall_at_k(order, test.targets(torch.arange(2)), 3))
    by_name = training.evaluate(Users(users), head, test, batch_size=1, metrics=["mrr"], exclude_history=True)
    assert by_name["mrr"] == pytest.approx(metrics.mrr(order, test.targets(torch.arange(2))))
    # More places than there are new items: the rest is not a class.
    deep = metrics.evaluate(lambda b: users[b["user"]], head, test, k=(9,), exclude_history=True)
    assert deep["recall@9"] == 1.0
    with pytest.raises(ValueError, match="exclude_history needs interactions, got dense data"):
        metrics.evaluate(lambda b: b["x"], head, data.Dense(torch.ones(1, 4), [0]), exclude_history=True)


def test_evaluate_passes_features_and_restores_after_an_error():
    class Model(torch.nn.Module):
        def encode(self, batch):
            raise RuntimeError("stop")

    head, model = make_head(4, 9), Model()
    with pytest.raises(RuntimeError, match="stop"):
        metrics.evaluate(model, head, data.Dense(torch.ones(1, 4), [0], 9))
    assert head.training
    assert model.training
    assert head.reduction == "mean"
