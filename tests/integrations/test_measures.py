"""torchmetrics and Hugging Face datasets."""

from __future__ import annotations

import pickle

import pytest
import torch

import samplex_cuda as sx


# ------------------------------------------------------------------------------------------------ torchmetrics
def batches():
    g = torch.Generator().manual_seed(0)
    for n in (5, 1, 7):
        ids = torch.stack([torch.randperm(30, generator=g)[:6] for _ in range(n)])
        targets = torch.randint(30, (n, 2), generator=g)
        targets[0, 1] = -100
        yield ids, targets, torch.rand(n, generator=g)


@pytest.mark.parametrize("with_nll", [False, True])
def test_metric_is_the_evaluator(with_nll):
    pytest.importorskip("torchmetrics")
    propensities = torch.rand(30, generator=torch.Generator().manual_seed(1)) * 0.5 + 0.5
    metric = sx.integrations.torchmetrics.RankedClasses((1, 5), propensities)
    want = sx.metrics.Evaluator((1, 5), propensities)
    for ids, targets, nll in batches():
        given = (ids, targets, nll) if with_nll else (ids, targets)
        metric.update(*given)
        want.update(*given)
    found = {name: float(value) for name, value in metric.compute().items()}
    assert found == pytest.approx(want.compute())
    again = pickle.loads(pickle.dumps(metric))
    assert {name: float(value) for name, value in again.compute().items()} == pytest.approx(found)
    metric.reset()
    assert float(metric.sums.sum()) == 0.0


def test_metric_adds_ranks():
    """What synchronization does: states of the ranks are summed."""
    torchmetrics = pytest.importorskip("torchmetrics")
    whole, *parts = (sx.integrations.torchmetrics.RankedClasses((1, 5)) for _ in range(4))
    for part, batch in zip(parts, batches(), strict=True):
        part.update(*batch)
        whole.update(*batch)
    together = sx.integrations.torchmetrics.RankedClasses((1, 5))
    together.update(*next(batches()))
    assert together._reductions["sums"] is torchmetrics.utilities.dim_zero_sum
    together.sums = together._reductions["sums"](torch.stack([part.sums for part in parts]))
    assert together.compute()["nll"] == pytest.approx(whole.compute()["nll"])
    assert together.compute()["ndcg@5"] == pytest.approx(whole.compute()["ndcg@5"])


def test_metric_counts_exactly_inside_a_half_precision_model():
    """Lightning's bf16-true converts the metrics of a module; bfloat16 cannot count beyond 256."""
    pytest.importorskip("torchmetrics")
    model = torch.nn.Linear(2, 2)
    model.metric = sx.integrations.torchmetrics.RankedClasses((1,))
    model.to(torch.bfloat16)
    ids = torch.zeros(300, 1, dtype=torch.int64)
    for _ in range(2):
        for right in (300, 1, 1):
            model.metric.update(ids[:right], ids[:right, 0])
        model.metric.update(ids, ids[:, 0] + 1)
        assert float(model.metric.compute()["accuracy"]) == 302 / 602
        model.metric.reset()


def test_metrics_work_in_a_collection_and_per_batch():
    torchmetrics = pytest.importorskip("torchmetrics")
    kind = sx.integrations.torchmetrics.RankedClasses
    collection = torchmetrics.MetricCollection({"a": kind((1, 2)), "b": kind((1,))}, prefix="val_")
    ids = torch.tensor([[4, 1], [2, 0], [3, 5]])
    first, second = (collection(ids[part], torch.tensor(y)) for part, y in ((slice(2), [1, 2]), (slice(2, 3), [3])))
    assert [float(one["val_a_accuracy"]) for one in (first, second)] == [0.5, 1.0]
    found = {name: float(value) for name, value in collection.compute().items()}
    assert (found["val_a_accuracy"], found["val_a_recall@2"]) == pytest.approx((2 / 3, 1.0))
    assert found["val_b_accuracy"] == found["val_a_accuracy"]


def test_metric_refuses_a_mixture():
    pytest.importorskip("torchmetrics")
    metric = sx.integrations.torchmetrics.RankedClasses((1,))
    ids, targets, nll = next(batches())
    metric.update(ids, targets, nll)
    with pytest.raises(ValueError, match="nll must be given for all batches or for none"):
        metric.update(ids, targets)


# ------------------------------------------------------------------------------------------------ datasets
def source(multi: bool = False):
    datasets = pytest.importorskip("datasets")
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(120, 10, generator=g), torch.randint(60, (120,), generator=g)
    labels = [[int(a)] if i % 2 else [int(a), (int(a) + 1) % 60] for i, a in enumerate(y)] if multi else y.tolist()
    return x, y, datasets.Dataset.from_dict({"x": x.tolist(), "label": labels, "other": ["t"] * 120})


@pytest.mark.parametrize("multi", [False, True])
def test_columns(multi):
    x, y, made = source(multi)
    data = sx.integrations.datasets.Columns(made)
    assert (len(data), data.num_features, data.kind, data.multi_label) == (120, 10, "dense", multi)
    assert data.num_classes == (60 if multi else int(y.max()) + 1)
    rows = torch.tensor([5, 2, 5])
    batch = data.batch(rows)
    assert torch.equal(batch["x"], x[rows])
    assert torch.equal(batch["index"], rows)
    assert torch.equal(batch["y"][:, 0] if multi else batch["y"], y[rows])
    assert torch.equal(batch["y"], data.targets(rows))
    assert int(data.class_counts().sum()) == (180 if multi else 120)
    assert data.fingerprint() == sx.integrations.datasets.Columns(made).fingerprint()
    assert data.fingerprint() != sx.integrations.datasets.Columns(made.select(range(100))).fingerprint()
    with pytest.raises(IndexError, match=r"rows must be in \[0, 120\), got 120"):
        data.batch(torch.tensor([120]))


def test_trainer_takes_columns(tmp_path):
    _, _, made = source()
    data = sx.integrations.datasets.Columns(made, num_classes=60)
    from samplex_cuda.training import Config, Trainer, config

    settings = ["model.name=linear", "sampler.name=uniform", "head.num_samples=6", "training.batch_size=16"]
    run = config.override(Config(), [*settings, "training.epochs=2", "training.plot=false", "training.threads=1"])
    Trainer(run, data, data, tmp_path / "run").fit()
    assert (tmp_path / "run" / "config.toml").exists()


def test_columns_refused():
    _, _, made = source()
    with pytest.raises(ValueError, match="Columns: y must be one of x, label, other, got 'z'"):
        sx.integrations.datasets.Columns(made, y="z")
    with pytest.raises(ValueError, match="Columns: x must be a column of vectors"):
        sx.integrations.datasets.Columns(made, x="other")
    with pytest.raises(TypeError, match=r"Columns: source must be a datasets.Dataset, got IterableDataset"):
        sx.integrations.datasets.Columns(made.to_iterable_dataset())


def test_negatives_column(tmp_path):
    """Classes that the data name as negatives, with and without log q, as the trainer takes them."""
    _, _, made = source()
    named = [[i % 60, (i + 7) % 60][: 1 + i % 2] for i in range(120)]
    made = made.add_column("shown", named).add_column("shown_log_q", [[-1.5] * len(row) for row in named])
    data = sx.integrations.datasets.Columns(made, num_classes=60, negatives="shown", negatives_log_q="shown_log_q")
    offsets, ids = data.negatives(torch.tensor([3, 0]))
    assert (offsets.tolist(), ids.tolist()) == ([0, 2, 3], [*named[3], *named[0]])
    assert torch.equal(data.negatives_log_q(torch.tensor([3, 0])), torch.full((3,), -1.5))
    plain = sx.integrations.datasets.Columns(made, num_classes=60, negatives="shown")
    assert plain.negatives_log_q(torch.tensor([3])) is None
    assert plain.fingerprint() != data.fingerprint()
    from samplex_cuda.training import Config, Trainer, config

    settings = ["model.name=linear", "sampler.name=uniform", "head.num_samples=6", "training.batch_size=16"]
    settings += ["data.negatives=shown", "training.epochs=1", "training.plot=false", "training.threads=1"]
    Trainer(config.override(Config(), settings), data, data, tmp_path / "run").fit()
    with pytest.raises(ValueError, match=r"Columns: negatives must be one of x, label, .*, got 'z'"):
        sx.integrations.datasets.Columns(made, negatives="z")
    with pytest.raises(ValueError, match="Columns: negatives_log_q must be None without negatives"):
        sx.integrations.datasets.Columns(made, negatives_log_q="shown_log_q")
    with pytest.raises(ValueError, match="Columns: column other must hold integers or lists of integers"):
        sx.integrations.datasets.Columns(made, negatives="other")


def test_token_stream(tmp_path):
    datasets = pytest.importorskip("datasets")
    g = torch.Generator().manual_seed(0)
    rows = [torch.randint(1, 30, (int(n),), generator=g).tolist() for n in torch.randint(0, 9, (200,), generator=g)]
    rows[0] = [5, 6]
    made = datasets.Dataset.from_dict({"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]})
    stream = sx.integrations.datasets.token_stream(made, 30, window=5, columns=4, end=0)
    assert stream.tokens.tolist() == [token for row in rows for token in [*row, 0]]
    assert stream.tokens.dtype == "int32"
    plain = sx.integrations.datasets.token_stream(made, 30)
    assert plain.tokens.tolist() == [token for row in rows for token in row]
    want = sx.data.Tokens(stream.tokens, 30, 5, 4)
    assert torch.equal(stream.batch(torch.arange(3))["y"], want.batch(torch.arange(3))["y"])
    from samplex_cuda.training import Config, Trainer, config

    settings = ["model.name=lstm", "model.dim=8", "sampler.name=uniform", "head.num_samples=6"]
    settings += ["training.batch_size=4", "training.epochs=1", "training.plot=false", "training.threads=1"]
    Trainer(config.override(Config(), settings), stream, stream, tmp_path / "run").fit()
    with pytest.raises(ValueError, match=r"Tokens: tokens must be in \[0, 10\)"):
        sx.integrations.datasets.token_stream(made, 10)
    with pytest.raises(ValueError, match="token_stream: column must be one of input_ids, attention_mask, got 'z'"):
        sx.integrations.datasets.token_stream(made, 30, "z")
    with pytest.raises(TypeError, match=r"token_stream: source must be a datasets.Dataset, got list"):
        sx.integrations.datasets.token_stream(rows, 30)


@pytest.mark.parametrize("named", [False, True])
def test_interactions(named, tmp_path):
    datasets = pytest.importorskip("datasets")
    g = torch.Generator().manual_seed(0)
    users, items = torch.randint(15, (300,), generator=g).tolist(), torch.randint(40, (300,), generator=g).tolist()
    made = datasets.Dataset.from_dict({"who": [f"u{u:02}" for u in users] if named else users, "what": items})
    found = sx.integrations.datasets.interactions(made, "who", "what", num_items=40, history=3)
    assert (found.num_users, found.num_interactions, found.num_classes) == (15, 300, 40)
    for user in range(15):
        own = [item for u, item in zip(users, items, strict=True) if u == user]
        assert found.items[found.indptr[user] : found.indptr[user + 1]].tolist() == own
    from samplex_cuda.training import Config, Trainer, config

    settings = ["model.name=two_tower", "sampler.name=uniform", "head.num_samples=6", "training.batch_size=16"]
    settings += ["training.epochs=1", "training.plot=false", "training.threads=1"]
    Trainer(config.override(Config(), settings), found, found, tmp_path / "run").fit()
    lists = datasets.Dataset.from_dict({"user": [0, 1], "item": [[1, 2], [3]]})
    with pytest.raises(ValueError, match="interactions: item must be a column of integers, got lists in 'item'"):
        sx.integrations.datasets.interactions(lists)
    with pytest.raises(ValueError, match="interactions: user must be one of who, what, got 'user'"):
        sx.integrations.datasets.interactions(made)
