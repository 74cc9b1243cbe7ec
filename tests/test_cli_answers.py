"""Answers of `samplex predict` and `samplex evaluate` that must not be wrong with exit code 0."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from cli_cases import one_thread, samplex

from samplex_cuda import data, metrics
from samplex_cuda.training import evaluate, load_model

__all__ = ["one_thread"]


def as_json(*words, code=0):
    return json.loads(samplex(*words, "--json", code=code).stdout.splitlines()[-1])


def strict(text):
    """JSON without NaN."""
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def settings(*given):
    return [word for setting in given for word in ("--set", setting)]


@pytest.fixture(scope="module")
def ratings(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ratings")
    rng = np.random.default_rng(0)
    rows = [f"{u},{i},{rng.integers(1, 6)},{978300000 + t}" for u in range(40)
            for t, i in enumerate(rng.choice(20, 8, replace=False))]  # fmt: skip
    path = folder / "ratings.csv"
    path.write_text("userId,movieId,rating,timestamp\n" + "\n".join(rows) + "\n")
    common = settings("training.epochs=2", "model.dim=4", "training.plot=false", "training.batch_size=32")
    for name, exclude in (("without", "true"), ("with", "false")):
        samplex("train", "--data", path, "--model", "two_tower", "--out", folder / name, *common,
                *settings(f"training.exclude_history={exclude}"))  # fmt: skip
    return folder, path


@pytest.mark.parametrize(("run", "option", "left_out"), [
    ("without", [], True), ("with", [], False), ("without", ["--no-exclude-history"], False),
    ("with", ["--exclude-history"], True),
])  # fmt: skip
def test_predict_leaves_known_items_out_as_the_run_does(ratings, tmp_path, run, option, left_out):
    folder, path = ratings
    found = as_json("predict", folder / run, path, "--out", tmp_path / "top.jsonl", "-k", 10, *option)
    assert found["exclude_history"] == left_out
    train = data.open(path)
    known = 0
    for line in (tmp_path / "top.jsonl").read_text().splitlines():
        record = strict(line)
        mine = train.items[train.indptr[record["user"]] : train.indptr[record["user"] + 1]]
        known += len(set(record["ids"]) & set(mine.tolist()))
    assert (known == 0) == left_out


@pytest.fixture(scope="module")
def dense_run(tmp_path_factory):
    run = tmp_path_factory.mktemp("dense") / "run"
    samplex("train", "--data", "builtin:classes=30,dim=6,examples=200", "--out", run,
            *settings("training.epochs=1", "training.plot=false"))  # fmt: skip
    return run


@pytest.mark.parametrize("suffix", [".jsonl", ".npz", ".npy"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_row_that_is_not_finite_has_no_answer(dense_run, tmp_path, suffix, bad):
    x = np.ones((300, 6), np.float32)
    x[[270, 290], 2] = bad
    np.save(tmp_path / "rows.npy", x)
    result = samplex("predict", dense_run, tmp_path / "rows.npy", "--out", tmp_path / f"top{suffix}", code=1)
    assert "rows.npy: row 270 must have finite values" in result.stderr
    assert "(2 such rows in this batch); nothing was written" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["rows.npy"]


def test_evaluate_does_not_count_arbitrary_classes_as_right(dense_run, tmp_path):
    x, y = np.ones((8, 6), np.float32), np.zeros(8, np.int64)
    x[3:] = np.nan
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", y)
    encoder, head, _, _ = load_model(dense_run)
    names = ["accuracy", "recall@1", "mrr"]
    nan = data.Dense(torch.from_numpy(x[3:]), torch.from_numpy(y[3:]), num_classes=30)
    assert evaluate(encoder, head, nan, metrics=names) == dict.fromkeys(names, 0.0)
    result = samplex("evaluate", dense_run, "--data", tmp_path, "--metrics", "nll,accuracy", code=1)
    assert "nll must be finite, got nan" in result.stderr


def test_propensities_have_constants(tmp_path):
    path = tmp_path / "train.txt"
    rng = np.random.default_rng(0)
    labels = [",".join(map(str, np.unique(rng.integers(0, 12, 3) ** 2 // 12))) for _ in range(120)]
    lines = [f"{some} {i % 7}:1 {i % 5 + 7}:0.5" for i, some in enumerate(labels)]
    path.write_text("120 12 12\n" + "\n".join(lines) + "\n")
    run = tmp_path / "run"
    samplex("train", "--data", path, "--format", "xc", "--model", "embedding_bag", "--out", run,
            *settings("training.epochs=2", "model.dim=4", "training.plot=false", "training.propensity_a=0.6",
                      "training.propensity_b=2.6", 'training.metrics=["nll", "psp@3"]'))  # fmt: skip
    encoder, head, config, _ = load_model(run)
    assert (config.training.propensity_a, config.training.propensity_b) == (0.6, 2.6)
    stored = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    from samplex_cuda.training import open_data

    train, valid = open_data(config)

    def wanted(a, b):
        p = metrics.propensities(train.class_counts(), len(train), a, b)
        return evaluate(encoder, head, valid, metrics=["psp@3"], propensities=p)["psp@3"]

    found = as_json("evaluate", run, "--metrics", "psp@3")
    assert (found["propensity_a"], found["propensity_b"]) == (0.6, 2.6)
    assert found["metrics"]["psp@3"] == pytest.approx(wanted(0.6, 2.6))
    best = next(r for r in stored if r["kind"] == "eval" and r["step"] == found["step"])
    assert best["psp@3"] == pytest.approx(wanted(0.6, 2.6))
    other = as_json("evaluate", run, "--metrics", "psp@3", "--propensity-a", 0.5, "--propensity-b", 0.4)
    assert other["metrics"]["psp@3"] == pytest.approx(wanted(0.5, 0.4))
    assert other["metrics"]["psp@3"] != pytest.approx(found["metrics"]["psp@3"])
    said = samplex("evaluate", run, "--metrics", "psp@3").output
    assert "propensities with A = 0.6, B = 2.6" in said
    assert (
        "--propensity-b above 0" in samplex("evaluate", run, "--metrics", "psp@3", "--propensity-b", 0, code=1).stderr
    )


def test_precision_divides_by_k_also_with_fewer_classes(tmp_path):
    """A ranking of all classes has its one hit among the first 30 and among the first 500."""
    words = ["--data", "builtin:classes=30,dim=4,examples=200", *settings("training.epochs=1", "training.plot=false")]
    samplex("train", *words, "--out", tmp_path / "run")
    found = as_json("evaluate", tmp_path / "run", "--metrics", "precision@30,precision@500,recall@500,ndcg@500,mrr")
    found = found["metrics"]
    assert found["precision@30"] == pytest.approx(1 / 30)
    assert found["precision@500"] == pytest.approx(1 / 500)
    assert found["recall@500"] == 1.0
    ranked = as_json("evaluate", tmp_path / "run", "--metrics", "ndcg@30")["metrics"]
    assert found["ndcg@500"] == ranked["ndcg@30"]
