"""The trainer: losses fall, records, evaluation, early stopping, averages, bad losses."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest
import torch
from torch import nn
from training_cases import C, case, dense

import samplex_cuda as sx
from samplex_cuda import data
from samplex_cuda.training import (
    Config,
    ConfigError,
    NonFiniteLossError,
    Trainer,
    build,
    checkpoint,
    config,
    evaluate,
    load_model,
    open_data,
    read_metrics,
)


@pytest.mark.parametrize(
    ("model", "sampler"),
    [("linear", "tree"), ("linear_pca", "unigram"), ("mlp", "quadratic"), ("mlp", "midx"), ("embedding_bag", "uniform"),
     ("lstm", "bigram"), ("gru", "rff"), ("two_tower", "uniform"), ("sequence_attention", "unigram")],
)  # fmt: skip
def test_a_run_learns_and_leaves_its_folder(tmp_path, model, sampler):
    epochs = 8 if "lstm" in model or "gru" in model else 15
    run, train, _ = case(model, sampler, f"training.epochs={epochs}", "training.checkpoint_every=0",
                         "training.metrics=[\"nll\", \"perplexity\", \"accuracy\"]")  # fmt: skip
    before = evaluate(*build(run, train), train)
    result = Trainer(run, train, train, tmp_path / "run").fit()
    assert result.status == "finished"
    assert result.metrics["nll"] < before["nll"] - 0.3
    assert result.metrics["perplexity"] == pytest.approx(math.exp(result.metrics["nll"]))
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"config.toml", "environment.json", "metrics.jsonl", "checkpoints", "best", "plots"} <= names
    assert len(checkpoint.list_checkpoints(tmp_path / "run")) == 3
    assert config.load(tmp_path / "run" / "config.toml") == run.resolved()
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert environment["data"]["fingerprint"] == train.fingerprint()
    assert environment["bits"]["torch"] == str(torch.__version__)
    # The model comes back without the data.
    # In batches of the run: a GEMM of another shape may add in another order.
    size = run.training.batch_size
    encoder, head, _, meta = load_model(tmp_path / "run", "latest")
    assert evaluate(encoder, head, train, batch_size=size)["nll"] == result.metrics["nll"]
    assert meta["progress"]["step"] == result.step
    encoder, head, _, meta = load_model(tmp_path / "run", "best")
    assert evaluate(encoder, head, train, batch_size=size)["nll"] == result.best
    assert meta["progress"]["step"] == result.best_step


def test_one_step_is_what_one_writes_by_hand(tmp_path):
    run, train, _ = case("mlp", "unigram", "training.steps=1", "model.dropout=0")
    trainer = Trainer(run, train, None, tmp_path / "run")
    encoder, head = build(run, train)
    rows = data.Batches(train, 16, seed=0, epoch=0).rows(0)
    batch = train.batch(rows)
    loss = head(encoder(batch), batch["y"], key=trainer.keys)
    loss.backward()
    sx.optim.RowAdagrad(head.parameters(), lr=0.1).step()
    torch.optim.Adam(encoder.parameters(), 0.01).step()
    trainer.fit()
    assert torch.equal(trainer.head.weight, head.weight)
    assert torch.equal(trainer.encoder.body[0].weight, encoder.body[0].weight)
    [record] = read_metrics(tmp_path / "run")
    assert record["loss"] == float(loss.detach())


def test_draws_are_new_in_each_step_and_each_micro_batch(tmp_path):
    run, train, _ = case("linear", "uniform", "training.accumulate=2", "training.steps=5")
    trainer = Trainer(run, train, None, tmp_path / "run")
    seen = []
    sample = trainer.head.sampler.sample

    def spy(*args, **options):
        draw = sample(*args, **options)
        seen.append((tuple(options["key"].tolist()), draw.ids))
        return draw

    trainer.head.sampler.sample = spy
    trainer.fit()
    assert len({key for key, _ in seen}) == len(seen) == 10
    assert [key[1] for key, _ in seen] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


def test_accumulated_batches_are_one_large_batch(tmp_path):
    outcome = []
    for settings in (["training.batch_size=32"], ["training.batch_size=8", "training.accumulate=4"]):
        run, train, _ = case("mlp", "uniform", "head.loss=full_softmax", "training.epochs=1", "model.dropout=0",
                             *settings)  # fmt: skip
        trainer = Trainer(run, train, None, tmp_path / str(len(outcome)))
        outcome.append((trainer.fit().step, trainer.head.weight))
    assert outcome[0][0] == outcome[1][0] == 4  # 120 rows: the last step has 24
    assert torch.allclose(outcome[0][1], outcome[1][1], atol=1e-4)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_fused_and_unfused_are_the_same(tmp_path, accumulate):
    outcome = []
    for fused in ("true", "false"):
        run, train, _ = case("linear", "quadratic", f"optimizer.fused={fused}", f"training.accumulate={accumulate}")
        trainer = Trainer(run, train, None, tmp_path / fused)
        trainer.fit()
        outcome.append(trainer)
    one, two = (trainer.head.weight for trainer in outcome)
    # Several batches are summed in another order.
    assert torch.equal(one, two) if accumulate == 1 else torch.allclose(one, two, atol=1e-4)
    # The sampler was told of every row that changed.
    for trainer in outcome:
        trainer.head.update_sampler()
        assert torch.equal(trainer.head.sampler.rows[:, :10], trainer.head.weight)


def test_a_tied_table_is_told_to_the_sampler(tmp_path):
    run, train, _ = case("lstm_tied", "quadratic")
    trainer = Trainer(run, train, None, tmp_path / "run")
    trainer.fit()
    trainer.head.update_sampler()
    assert torch.equal(trainer.head.sampler.rows[:, :8], trainer.head.weight)


def test_torchs_generator_is_left_alone(tmp_path):
    run, train, valid = case("mlp", "uniform")
    torch.manual_seed(3)
    before = torch.get_rng_state()
    Trainer(run, train, valid, tmp_path / "run").fit()
    assert torch.equal(torch.get_rng_state(), before)


def test_rates_follow_the_schedule(tmp_path):
    run, train, _ = case("mlp", "uniform", "schedule.name=linear", "schedule.warmup=4", "training.log_every=1",
                         "optimizer.lr=0.2")  # fmt: skip
    Trainer(run, train, None, tmp_path / "run").fit()
    rates = [r["lr"] for r in read_metrics(tmp_path / "run")]
    assert rates[:4] == pytest.approx([0.05, 0.1, 0.15, 0.2])
    assert rates == pytest.approx([0.2 * run.schedule.factor(s, 16) for s in range(16)])
    assert rates[-1] < 0.04


def test_early_stopping_and_best(tmp_path):
    run, train, valid = case("linear", "uniform", "training.epochs=50", "training.patience=2", "optimizer.lr=1",
                             "training.eval_every=4")  # fmt: skip
    # Other labels in validation: training makes it worse from some point on.
    other = data.Dense(valid.x, torch.randint(0, C, (len(valid),)), num_classes=C)
    result = Trainer(run, train, other, tmp_path / "run").fit()
    assert result.status == "early_stop"
    assert f"no better nll in 2 evaluations; the best was at step {result.best_step}" in result.message
    evals = [r for r in read_metrics(tmp_path / "run") if r["kind"] == "eval"]
    values = [r["nll"] for r in evals]
    assert result.best == min(values)
    assert len(evals) == values.index(min(values)) + 3
    assert [p.name for p in checkpoint.list_checkpoints(tmp_path / "run" / "best")] == [
        checkpoint.directory_name(result.best_step)
    ]
    again = Trainer.resume(tmp_path / "run", train, other).fit()
    assert (again.status, again.step) == ("early_stop", result.step)


@pytest.mark.parametrize("kind", ["ema", "swa"])
def test_averages(tmp_path, kind):
    run, train, valid = case("mlp", "uniform", f"training.average={kind}", "training.average_decay=0.8",
                             "training.average_head=true", "training.average_start=2", "training.average_every=2",
                             "training.steps=9")  # fmt: skip
    trainer = Trainer(run, train, valid, tmp_path / "run")
    history = []
    trainer.on_event = lambda e: (
        history.append(trainer.head.weight.detach().clone()) if e["event"] == "progress" else None
    )
    trainer.fit()
    kept = [history[step - 1] for step in (2, 4, 6, 8)]
    wanted = kept[0]
    for number, weight in enumerate(kept[1:], 2):
        part = 1 / number if kind == "swa" else 1 - 0.8**2
        wanted = wanted + (weight - wanted) * part
    assert torch.allclose(trainer.average["head.weight"], wanted, atol=1e-6)
    assert torch.equal(trainer.head.weight, history[-1])
    # Evaluation, `best` and `load_model` have the averaged weights.
    _, head, _, _ = load_model(tmp_path / "run", "latest")
    assert torch.equal(head.weight, trainer.average["head.weight"])
    plain = evaluate(trainer.encoder, trainer.head, valid, batch_size=run.training.batch_size)
    assert abs(trainer.metrics["nll"] - plain["nll"]) > 1e-4  # other weights, not another rounding


# ------------------------------------------------------------------------------------------------ losses that are nan
class Explodes(nn.Module):
    """Gives nan for a batch that holds example 77, and overflows the loss for one that holds 99."""

    def __init__(self, num_features, dim):
        super().__init__()
        self.out_features = dim
        self.layer = nn.Linear(num_features, dim)

    def forward(self, batch):
        h = self.layer(batch["x"])
        if (batch["index"] == 77).any():
            h = h * math.nan
        if (batch["index"] == 99).any():
            h = h * 1e38 * 100
        return h


EXPLODES = "test_training_trainer:Explodes"


@pytest.mark.parametrize("fused", ["true", "false"])
def test_a_nan_stops_and_leaves_the_batch(tmp_path, fused):
    run, train, valid = case("linear", "uniform", f"model.name={EXPLODES}",
                             f"optimizer.fused={fused}", "training.accumulate=2")  # fmt: skip
    events = []
    trainer = Trainer(run, train, valid, tmp_path / "run", trust_model=EXPLODES, on_event=events.append)
    with pytest.raises(
        NonFiniteLossError, match=r"trainer: step \d+: .* the batch is in .*step-\d+.safetensors"
    ) as info:
        trainer.fit()
    assert "training.on_nan=skip" in str(info.value)
    [event] = [e for e in events if e["event"] == "nan"]
    stem = tmp_path / "run" / "nan" / f"step-{event['step']:08d}"
    saved = checkpoint.read_tensors(stem.with_suffix(".safetensors"))
    about = json.loads(stem.with_suffix(".json").read_text())
    assert {77, 99} & set(saved["index"].tolist())
    assert torch.equal(saved["x"], train.batch(saved["index"])["x"])
    assert not torch.isfinite(saved["h"]).all()
    assert about["step"] == event["step"]
    assert all(torch.isfinite(p).all() for p in [*trainer.encoder.parameters(), *trainer.head.parameters()])


@pytest.mark.parametrize("fused", ["true", "false"])
def test_a_nan_is_skipped_by_choice(tmp_path, fused):
    run, train, _ = case("linear", "uniform", f"model.name={EXPLODES}",
                         f"optimizer.fused={fused}", "training.accumulate=2", "training.on_nan=skip")  # fmt: skip
    events = []
    trainer = Trainer(run, train, None, tmp_path / "run", trust_model=EXPLODES, on_event=events.append)
    before = {}

    def on_event(event):
        events.append(event)
        if event["event"] == "nan":
            before[event["step"]] = trainer.head.weight.detach().clone()
        elif event["event"] == "progress" and event["loss"] is None:
            assert torch.equal(trainer.head.weight, before[event["step"] - 1])

    trainer.on_event = on_event
    result = trainer.fit()
    assert (result.status, result.step) == ("finished", 8)
    skipped = len([e for e in events if e["event"] == "nan"])
    assert 2 <= skipped <= 4
    assert trainer.progress.skipped == skipped
    assert torch.isfinite(trainer.head.weight).all()
    assert read_metrics(tmp_path / "run")[-1]["skipped"] == skipped


def test_nothing_of_a_skipped_step_stays(tmp_path):
    outcome = []
    for fused in ("true", "false"):
        run, train, _ = case("linear", "uniform", f"model.name={EXPLODES}", "training.seed=3",
                             f"optimizer.fused={fused}", "training.accumulate=2", "training.on_nan=skip")  # fmt: skip
        trainer = Trainer(run, train, None, tmp_path / fused, trust_model=EXPLODES)
        trainer.fit()
        outcome.append(trainer)
    # One of them was the second batch of its step: the first one had been through backward.
    about = [json.loads(path.read_text()) for path in (tmp_path / "true" / "nan").glob("*.json")]
    assert any(a["batch"] % 2 for a in about)
    assert torch.allclose(outcome[0].head.weight, outcome[1].head.weight, atol=1e-5)
    assert torch.allclose(outcome[0].encoder.module.layer.weight, outcome[1].encoder.module.layer.weight, atol=1e-5)


def test_too_many_skips_end_it(tmp_path):
    run, train, _ = case("mlp", "uniform", "training.on_nan=skip", "training.max_skipped=3")
    trainer = Trainer(run, train, None, tmp_path / "run")
    with torch.no_grad():
        trainer.encoder.body[0].weight.fill_(math.nan)
    with pytest.raises(NonFiniteLossError, match="after 3 steps in succession were skipped"):
        trainer.fit()
    assert trainer.progress.step == 3


# ------------------------------------------------------------------------------------------------ the rest
def test_metrics_by_name(tmp_path):
    names = '["nll", "accuracy", "precision@3", "recall@20", "ndcg@5", "psp@3", "mrr"]'
    run, train, valid = case("embedding_bag", "uniform", f"training.metrics={names}", "training.monitor=recall@20")
    result = Trainer(run, train, valid, tmp_path / "run").fit()
    assert list(result.metrics) == json.loads(names)
    assert result.best == max(r["recall@20"] for r in read_metrics(tmp_path / "run") if r["kind"] == "eval")
    with pytest.raises(ConfigError, match=r"\[training\] metrics must be nll, .*, got 'auc'"):
        Trainer(config.override(run, ['training.metrics=["nll", "auc"]', "training.monitor=nll"]), train, valid,
                tmp_path / "other")  # fmt: skip
    with pytest.raises(ConfigError, match=r"\[training\] monitor must be one of metrics"):
        Trainer(config.override(run, ["training.monitor=recall@9"]), train, valid, tmp_path / "other")


def test_evaluation_is_exact_and_leaves_everything(tmp_path):
    run, train, _ = case("lstm", "quadratic", "model.dropout=0.5")
    encoder, head = build(run, train)
    encoder(train.batch(torch.arange(train.columns)))
    carried = encoder.carried()
    found = evaluate(encoder, head, train)
    assert encoder.training
    assert head.training
    assert all(torch.equal(encoder.carried()[n], carried[n]) for n in carried)
    encoder.eval()
    encoder.carry({})
    nll, hits, count = 0.0, 0, 0
    for batch in data.Batches(train, train.columns):
        valid = batch["y"] >= 0
        logits = head.linear()(encoder(batch))[valid].detach()
        nll += float(nn.functional.cross_entropy(logits, batch["y"][valid], reduction="sum"))
        hits += int((logits.argmax(1) == batch["y"][valid]).sum())
        count += int(valid.sum())
    assert found == pytest.approx({"nll": nll / count, "accuracy": hits / count}, rel=1e-5)


def test_files_from_the_configuration(tmp_path):
    text = "the cat sat on the mat\nthe dog sat on the log\n" * 40
    (tmp_path / "train.tokens").write_text(text)
    (tmp_path / "valid.tokens").write_text("the cat sat on the log\n" * 10)
    settings = [f"data.path={tmp_path / 'train.tokens'}", f"data.valid={tmp_path / 'valid.tokens'}", "model.name=lstm",
                "model.dim=8", "training.batch_size=4", "training.epochs=2", "data.options.window=6",
                "head.num_samples=3", "training.plot=false"]  # fmt: skip
    run = config.override(Config(), settings)
    train, valid = open_data(run)
    assert (train.columns, train.window, valid.num_classes) == (4, 6, train.num_classes)
    result = Trainer(run, run_dir=tmp_path / "run").fit()
    assert Trainer.resume(tmp_path / "run").progress.step == result.step


def test_interactions_from_files_without_what_is_known(tmp_path):
    lines = [" ".join(str((user * 3 + k) % 30) for k in range(6)) for user in range(20)]
    (tmp_path / "train.txt").write_text("".join(f"{user} {line}\n" for user, line in enumerate(lines)))
    (tmp_path / "test.txt").write_text(
        "".join(f"{user} {(user * 3 + 6) % 30} {(user * 3 + 7) % 30}\n" for user in range(20))
    )
    settings = [f"data.path={tmp_path / 'train.txt'}", f"data.valid={tmp_path / 'test.txt'}",
                "data.format=interactions", "model.name=two_tower", "model.dim=8", "training.batch_size=16",
                "training.epochs=2", "head.num_samples=3", "training.plot=false",
                'training.metrics=["recall@20", "ndcg@5"]',
                "training.monitor=recall@20"]  # fmt: skip
    found = []
    for known in ("true", "false"):
        run = config.override(Config(), [*settings, f"training.exclude_history={known}"])
        trainer = Trainer(run, run_dir=tmp_path / known)
        assert trainer.valid.batch(torch.tensor([0]))["y"].tolist() == [[6, 7]]
        found.append(trainer.fit().metrics)
    # A test item is never a known one here, so leaving the known ones out can only help.
    assert found[0]["recall@20"] > found[1]["recall@20"]


def test_learning_curves_and_tensorboard(tmp_path):
    pytest.importorskip("matplotlib")
    pytest.importorskip("tensorboard")
    run, train, valid = case("linear", "uniform", "training.plot=true", "training.tensorboard=true")
    Trainer(run, train, valid, tmp_path / "run").fit()
    assert (tmp_path / "run" / "plots" / "curves.png").read_bytes()[:4] == b"\x89PNG"
    assert list((tmp_path / "run" / "tensorboard").iterdir())


def test_missing_extras_are_named(tmp_path, monkeypatch):
    run, train, valid = case("linear", "uniform", "training.plot=true", "training.steps=1")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    events = []
    assert Trainer(run, train, valid, tmp_path / "a", on_event=events.append).fit().status == "finished"
    assert [e["message"] for e in events if e["event"] == "warning"][-1:] == [
        "no learning curves: plot_curves: needs matplotlib: pip install samplex-cuda[cli]"
    ]
    run.training.tensorboard = True
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match=r"tensorboard: pip install samplex-cuda\[tensorboard\]"):
        Trainer(run, train, valid, tmp_path / "b").fit()


def test_training_needs_no_extra():
    code = (
        "import sys\n"
        "for name in ('safetensors', 'matplotlib', 'rich', 'typer', 'tensorboard', 'scipy', 'sklearn', 'pyarrow'):\n"
        "    sys.modules[name] = None\n"
        "import samplex_cuda.training\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_bf16_trains(tmp_path):
    run, train, _ = case("mlp", "uniform", "training.precision=bfloat16", "head.dtype=bfloat16",
                         "optimizer.stochastic_rounding=true", "training.epochs=6")  # fmt: skip
    before = evaluate(*build(run, train), train)
    trainer = Trainer(run, train, train, tmp_path / "run")
    assert trainer.fit().metrics["nll"] < before["nll"]
    assert trainer.head.weight.dtype == torch.bfloat16


TIED = ["lstm_tied", "gru_tied", "two_tower_tied", "sequence_gru_tied", "sequence_attention"]
MODELS_16 = ["mlp", "embedding_bag", "lstm", "gru", "two_tower", "sequence_gru", *TIED]


@pytest.mark.parametrize(("precision", "dtype", "model"), [
    *(("bfloat16", "float32", model) for model in MODELS_16),
    *(("bfloat16", "bfloat16", model) for model in TIED),
    *(("float32", "bfloat16", model) for model in TIED),
])  # fmt: skip
def test_every_model_learns_in_bf16(tmp_path, precision, dtype, model):
    run, train, _ = case(model, "uniform", f"training.precision={precision}", f"head.dtype={dtype}",
                         "training.epochs=4")  # fmt: skip
    before = evaluate(*build(run, train), train)
    assert Trainer(run, train, train, tmp_path / "run").fit().metrics["nll"] < before["nll"]


def test_an_average_of_bf16_weights_moves(tmp_path):
    run, train, _ = case("mlp", "uniform", "head.dtype=bfloat16", "training.average=ema", "training.average_head=true",
                         "training.average_decay=0.999", "training.epochs=4")  # fmt: skip
    trainer = Trainer(run, train, None, tmp_path / "run")
    wanted = None

    def on_event(event):
        nonlocal wanted
        if event["event"] == "progress":
            now = trainer.head.weight.detach().double()
            wanted = now if wanted is None else wanted + (now - wanted) * (1 - 0.999)

    trainer.on_event = on_event
    trainer.fit()
    assert torch.allclose(trainer.average["head.weight"].double(), wanted, rtol=1e-6, atol=1e-7)
    assert trainer.head.weight.dtype == torch.bfloat16
    _, head, _, _ = load_model(tmp_path / "run", "latest")
    assert torch.equal(head.weight, wanted.to(torch.bfloat16))


def test_large_class_sets_do_not_make_steps_dear(tmp_path):
    train = data.BuiltIn(200_000, dim=8, num_examples=256, seed=0)
    run = config.override(Config(), ["model.name=linear", "training.epochs=1", "training.batch_size=64",
                                     "training.checkpoint_every=1000", "training.threads=1"])  # fmt: skip
    trainer = Trainer(run, train, None, tmp_path / "run")
    before = trainer.head.weight.detach().clone()
    trainer.fit()
    touched = (trainer.head.weight != before).any(1).sum()
    assert 0 < int(touched) <= 256 * 65


def test_what_is_asked_of_nothing(tmp_path):
    run, _, _ = case()
    with pytest.raises(ValueError, match="train must have at least 1 example"):
        Trainer(run, data.Subset(dense(), torch.arange(0)), None, tmp_path / "run")
    trainer = Trainer(run, dense(), None, tmp_path / "run")
    with pytest.raises(ValueError, match="dataset must be given if there are no validation data"):
        trainer.evaluate()
