"""A run that was stopped and resumed ends with the bits of one that was not."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal

import pytest
import torch
from torch import nn
from training_cases import case

from samplex_cuda.training import RunError, Trainer, checkpoint, evaluate, read_metrics


class StopError(Exception):
    """What a test throws out of a run, as a crash would."""


def crash_at(step):
    def on_event(event):
        if event["event"] == "progress" and event["step"] == step:
            raise StopError

    return on_event


def signal_at(step, number=signal.SIGTERM):
    def on_event(event):
        if event["event"] == "progress" and event["step"] == step:
            os.kill(os.getpid(), number)

    return on_event


def final(run_dir):
    return checkpoint.load(checkpoint.latest(run_dir))


def differing(a, b):
    """Names of tensors that are not the same, bit by bit."""
    assert a.keys() == b.keys()
    return [name for name in a if not torch.equal(a[name], b[name]) or a[name].dtype != b[name].dtype]


def records(run_dir):
    return [{k: v for k, v in r.items() if k != "seconds"} for r in read_metrics(run_dir)]


def check(tmp_path, run, train, valid, stops, minimum_steps=8):
    """Train once through, and once with the given stops; compare everything."""
    whole = Trainer(run, train, valid, tmp_path / "whole", trust_model=run.model.name)
    result = whole.fit()
    assert result.status == "finished"
    assert result.step >= minimum_steps
    trainer = Trainer(run, train, valid, tmp_path / "parts", trust_model=run.model.name)
    for stop in stops:
        trainer.on_event = stop
        with contextlib.suppress(StopError):
            assert trainer.fit().status == "interrupted"
        torch.manual_seed(12345)  # what else a process does with torch's generator must not matter
        trainer = Trainer.resume(tmp_path / "parts", train, valid, trust_model=run.model.name)
    trainer.on_event = None
    other = trainer.fit()
    assert other.status == "finished"
    (a, meta_a), (b, meta_b) = final(tmp_path / "whole"), final(tmp_path / "parts")
    assert differing(a, b) == []
    for meta in (meta_a, meta_b):
        meta["progress"].pop("seconds")
    assert meta_a == meta_b
    assert records(tmp_path / "whole") == records(tmp_path / "parts")
    assert other.metrics == result.metrics
    # The model did train.
    start = Trainer(run, train, valid, tmp_path / "start", trust_model=run.model.name)
    assert not torch.equal(start.head.weight, whole.head.weight)
    return whole


CASES = [
    ("linear", "uniform"),
    ("linear", "unigram"),
    ("linear", "tree"),
    ("linear", "quadratic"),
    ("linear", "rff"),
    ("linear", "softmax"),
    ("linear", "mixture"),
    ("linear", "tree_default"),
    ("linear", "rff_default"),
    ("lstm", "auto"),
    ("mlp", "tree"),
    ("mlp", "quadratic"),
    ("embedding_bag", "uniform"),
    ("embedding_bag", "tree"),
    ("embedding_bag", "rff"),
    ("lstm", "unigram"),
    ("lstm", "quadratic"),
    ("lstm", "bigram"),
    ("lstm", "tree"),
    ("gru", "uniform"),
    ("two_tower", "tree"),
]


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "unfused"])
@pytest.mark.parametrize(("model", "sampler"), CASES)
def test_resumed_bits(tmp_path, model, sampler, fused):
    run, train, valid = case(model, sampler, f"optimizer.fused={str(fused).lower()}")
    # A crash loses the steps since step 4; a signal saves step 7, between two checkpoints.
    check(tmp_path, run, train, valid, [crash_at(6), signal_at(7)])


class Own(nn.Module):
    """A module by import path with buffers that training changes, random numbers, a sparse table and carried state."""

    def __init__(self, num_features, dim):
        super().__init__()
        self.out_features = dim
        self.norm, self.drop = nn.BatchNorm1d(num_features), nn.Dropout(0.3)
        self.layer = nn.Linear(num_features, dim)
        self.table = nn.Embedding(7, dim, sparse=True)
        self.last = torch.zeros(dim)

    def forward(self, batch):
        h = self.layer(self.drop(self.norm(batch["x"]))) + self.table(batch["index"] % 7) + 0.1 * self.last
        self.last = h.detach().mean(0)
        return h

    def carried(self):
        return {"last": self.last}

    def carry(self, state):
        self.last = state.get("last", torch.zeros(self.out_features))


SPECIAL = {
    "import_path": ("linear", "quadratic", ["model.name=test_training_resume:Own", "training.average=swa"]),
    "update_every_3": ("linear", "quadratic", ["sampler.update=3"]),
    "midx": ("linear", "midx", []),
    "midx_default": ("mlp", "midx_default", ["training.epochs=4"]),
    "update_epoch": ("linear", "rff", ["sampler.update=epoch", "training.eval_every=3"]),
    "accumulate": ("lstm", "quadratic", ["training.accumulate=3", "training.epochs=4"]),
    "accumulate_unfused": ("linear", "rff", ["training.accumulate=3", "training.epochs=4", "optimizer.fused=false"]),
    "tied": ("lstm_tied", "quadratic", []),
    "attention": ("sequence_attention", "unigram", []),
    "sequence_gru": ("sequence_gru", "bigram", ["optimizer.name=adam", "optimizer.lr=0.01"]),
    "pca": ("linear_pca", "tree", ["model.whiten=true"]),
    "ema": ("mlp", "uniform", ["training.average=ema", "training.average_decay=0.9", "training.average_head=true"]),
    "swa": ("embedding_bag", "uniform", ["training.average=swa", "training.average_start=3",
                                         "training.average_every=2"]),
    "schedule": ("mlp", "unigram", ["schedule.name=cosine", "schedule.warmup=3", "optimizer.encoder=adamw"]),
    "lr_ends_at_0": ("linear", "unigram", ["schedule.name=linear", "optimizer.name=adam"]),
    "sgd": ("mlp", "uniform", ["optimizer.name=sgd", "optimizer.momentum=0.9", "optimizer.encoder=sgd",
                               "optimizer.encoder_momentum=0.9", "optimizer.weight_decay=0.01"]),
    "clip": ("lstm", "uniform", ["training.clip_norm=0.1", "training.clip_head=true"]),
    "bf16": ("mlp", "uniform", ["training.precision=bfloat16", "head.dtype=bfloat16",
                                "optimizer.stochastic_rounding=true", "optimizer.encoder=adagrad"]),
    "bf16_lstm": ("lstm", "tree", ["training.precision=bfloat16", "head.dtype=bfloat16", "sampler.refit_every=1"]),
    "bf16_tied": ("gru_tied", "rff", ["head.dtype=bfloat16", "training.average=ema", "training.average_head=true"]),
    "augment_reduce": ("lstm", "unigram", ["head.loss=augment_reduce", "optimizer.lr=0.01"]),
    "negative_sampling": ("mlp", "tree", ["head.loss=negative_sampling", "head.reg=0.001"]),
    "nce": ("embedding_bag", "unigram", ["head.loss=nce", "head.shared=true"]),
    "one_vs_each": ("linear", "mixture", ["head.loss=one_vs_each", "optimizer.lr=0.01"]),
    "full_softmax": ("lstm_tied", "uniform", ["head.loss=full_softmax"]),
    "refit": ("mlp", "tree", ["sampler.features=hidden", "sampler.refit_every=1"]),
    "refit_in_a_mixture": ("lstm", "mixture", ['sampler.components=["tree", "bigram"]', "sampler.smoothing=1",
                                               "sampler.dim=4", "sampler.refit_steps=3"]),
    "mixture_with_a_tree": ("mlp", "mixture", ['sampler.components=["tree", "quadratic"]', "sampler.dim=4",
                                               "sampler.refit_every=1", "head.shared=true"]),
    "shared_in_strata": ("mlp", "tree", ["head.shared=true", "head.stratified=true"]),
    "step_schedule": ("gru", "softmax", ["schedule.name=step", "schedule.step_size=3", "optimizer.rowwise=true"]),
    "mask_known": ("two_tower", "unigram", ["head.mask_known=true"]),
    "dense_embedding": ("embedding_bag", "uniform", ["model.sparse=false"]),
}  # fmt: skip


@pytest.mark.parametrize("name", SPECIAL)
def test_resumed_bits_of_everything_else(tmp_path, name):
    model, sampler, settings = SPECIAL[name]
    run, train, valid = case(model, sampler, *settings)
    check(tmp_path, run, train, valid, [signal_at(3), crash_at(7)])


@pytest.mark.parametrize("stop", [5, 9, 13])
def test_early_stopping_is_resumed_with_its_count(tmp_path, stop):
    settings = ["training.patience=6", "training.eval_every=2", "training.min_delta=0.05", "training.epochs=9",
                "training.checkpoint_every=3", "optimizer.lr=0.01"]  # fmt: skip
    run, train, valid = case("mlp", "uniform", *settings)
    whole = Trainer(run, train, valid, tmp_path / "whole").fit()
    assert whole.status == "early_stop"
    assert whole.step > 13
    with pytest.raises(StopError):
        Trainer(run, train, valid, tmp_path / "parts", on_event=crash_at(stop)).fit()
    parts = Trainer.resume(tmp_path / "parts", train, valid).fit()
    assert parts == whole
    assert differing(final(tmp_path / "whole")[0], final(tmp_path / "parts")[0]) == []
    assert records(tmp_path / "whole") == records(tmp_path / "parts")


def test_checkpoints_do_not_change_the_run(tmp_path):
    # A checkpoint holds how far the sampler lags; if it brought it up to date, every=1 would train otherwise.
    outcome = []
    for every in (1, 100):
        run, train, valid = case("linear", "quadratic", "sampler.update=3", f"training.checkpoint_every={every}")
        trainer = Trainer(run, train, valid, tmp_path / str(every))
        trainer.fit()
        outcome.append(trainer.head.state_dict())
    assert differing(*outcome) == []


def test_evaluation_does_not_change_the_run(tmp_path):
    outcome = []
    for every in (2, 100):
        run, train, valid = case("lstm", "quadratic", f"training.eval_every={every}", "sampler.update=epoch")
        trainer = Trainer(run, train, valid, tmp_path / str(every))
        trainer.fit()
        outcome.append({**trainer.head.state_dict(), **trainer.encoder.state_dict()})
    assert differing(*outcome) == []


def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path):
    run, train, valid = case()
    trainer = Trainer(run, train, valid, tmp_path / "run", on_event=signal_at(2, signal.SIGINT))
    before = signal.getsignal(signal.SIGINT)
    result = trainer.fit()
    assert signal.getsignal(signal.SIGINT) is before
    assert (result.status, result.step, result.signal) == ("interrupted", 2, signal.SIGINT)
    assert f"Trainer.resume({str(tmp_path / 'run')!r})" in result.message
    assert checkpoint.latest(tmp_path / "run").name == "checkpoint-00000002"


def test_a_second_signal_ends_at_once(tmp_path):
    run, train, valid = case()

    def on_event(event):
        if event["event"] == "progress" and event["step"] == 5:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        Trainer(run, train, valid, tmp_path / "run", on_event=on_event).fit()
    assert checkpoint.latest(tmp_path / "run").name == "checkpoint-00000004"


def test_a_signal_during_evaluation_does_it_again_later(tmp_path):
    run, train, valid = case("lstm", "unigram", "training.eval_every=5")

    def on_event(event):
        if event["event"] == "eval_progress" and event["done"] == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    trainer = Trainer(run, train, valid, tmp_path / "parts", on_event=on_event)
    result = trainer.fit()
    assert (result.status, result.step) == ("interrupted", 5)
    assert [r for r in records(tmp_path / "parts") if r["kind"] == "eval"] == []
    Trainer.resume(tmp_path / "parts", train, valid).fit()
    Trainer(run, train, valid, tmp_path / "whole").fit()
    assert records(tmp_path / "parts") == records(tmp_path / "whole")
    assert differing(final(tmp_path / "parts")[0], final(tmp_path / "whole")[0]) == []


def test_a_damaged_checkpoint_costs_only_the_steps_since_the_one_before(tmp_path):
    run, train, valid = case("linear", "rff")
    Trainer(run, train, valid, tmp_path / "whole").fit()
    trainer = Trainer(run, train, valid, tmp_path / "parts", on_event=crash_at(10))
    with pytest.raises(StopError):
        trainer.fit()
    path = tmp_path / "parts" / "checkpoints" / "checkpoint-00000008" / "tensors.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    (tmp_path / "parts" / "checkpoints" / ".tmp-checkpoint-00000012-1").mkdir()
    with (tmp_path / "parts" / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 12, "lo')
    events = []
    trainer = Trainer.resume(tmp_path / "parts", train, valid, on_event=events.append)
    assert trainer.progress.step == 4
    [refused] = [e for e in events if e["event"] == "refused"]
    assert "tensors.safetensors is truncated" in refused["reason"]
    assert refused["instead"] == "checkpoint-00000004 is used"
    assert (tmp_path / "parts" / "damaged" / "checkpoint-00000008" / "meta.json").exists()  # nothing is deleted
    assert [e["path"].rsplit("/", 1)[1] for e in events if e["event"] == "cleaned"] == [".tmp-checkpoint-00000012-1"]
    trainer.fit()
    assert differing(final(tmp_path / "whole")[0], final(tmp_path / "parts")[0]) == []
    assert records(tmp_path / "whole") == records(tmp_path / "parts")


def files(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_when_every_checkpoint_is_damaged_it_stops_and_deletes_nothing(tmp_path):
    run, train, valid = case("linear", "uniform", "training.keep=2")
    Trainer(run, train, valid, tmp_path / "whole").fit()
    Trainer(run, train, valid, tmp_path / "run").fit()
    for path in checkpoint.list_checkpoints(tmp_path / "run"):
        (path / "meta.json").write_text("{}")
    (tmp_path / "run" / "checkpoints" / ".tmp-checkpoint-00000012-1").mkdir()
    before = files(tmp_path / "run")
    with pytest.raises(RunError) as info:
        Trainer.resume(tmp_path / "run", train, valid)
    for path in checkpoint.list_checkpoints(tmp_path / "run"):
        assert f"{path}: meta.json is truncated or altered" in str(info.value)
    assert "--restart" in str(info.value)
    assert files(tmp_path / "run") == before
    assert (tmp_path / "run" / "checkpoints" / ".tmp-checkpoint-00000012-1").exists()
    with pytest.warns(UserWarning, match="training begins at step 0"):
        trainer = Trainer.resume(tmp_path / "run", train, valid, restart=True)
    assert trainer.progress.step == 0
    assert len(list((tmp_path / "run" / "damaged").iterdir())) == 2
    trainer.fit()
    assert differing(final(tmp_path / "whole")[0], final(tmp_path / "run")[0]) == []
    assert records(tmp_path / "whole") == records(tmp_path / "run")


def test_the_best_weights_after_a_restart_are_those_of_the_new_run(tmp_path):
    run, train, _ = case("linear", "uniform", "training.eval_every=2", "training.epochs=3")
    valid = train
    Trainer(run, train, valid, tmp_path / "run").fit()
    assert checkpoint.list_checkpoints(tmp_path / "run" / "best")[-1].name > "checkpoint-00000002"
    for path in checkpoint.list_checkpoints(tmp_path / "run"):
        (path / "meta.json").unlink()
    with pytest.warns(UserWarning, match="training begins at step 0"):
        trainer = Trainer.resume(tmp_path / "run", train, valid, settings=["training.steps=2"], restart=True)
    trainer.fit()
    assert [path.name for path in checkpoint.list_checkpoints(tmp_path / "run" / "best")] == ["checkpoint-00000002"]


def test_without_a_checkpoint_it_begins_anew(tmp_path):
    run, train, valid = case("mlp", "tree")
    Trainer(run, train, valid, tmp_path / "whole").fit()
    with pytest.raises(StopError):
        Trainer(run, train, valid, tmp_path / "parts", on_event=crash_at(3)).fit()
    assert checkpoint.list_checkpoints(tmp_path / "parts") == []
    Trainer.resume(tmp_path / "parts", train, valid).fit()
    assert differing(final(tmp_path / "whole")[0], final(tmp_path / "parts")[0]) == []


def test_a_finished_run_is_left_alone_and_can_be_made_longer(tmp_path):
    run, train, valid = case()
    Trainer(run, train, valid, tmp_path / "run").fit()
    before = final(tmp_path / "run")[0]
    again = Trainer.resume(tmp_path / "run", train, valid).fit()
    assert again.status == "finished"
    assert differing(before, final(tmp_path / "run")[0]) == []
    longer = Trainer.resume(tmp_path / "run", train, valid, settings=["training.epochs=3"]).fit()
    assert longer.step == 24
    assert (tmp_path / "run" / "config.before-00000016.toml").exists()
    run.training.epochs = 3
    Trainer(run, train, valid, tmp_path / "whole").fit()
    assert differing(final(tmp_path / "whole")[0], final(tmp_path / "run")[0]) == []


@pytest.mark.parametrize("update", ["3", "epoch"])
def test_an_older_checkpoint_goes_on_with_the_same_bits(tmp_path, update):
    """How far the sampler lags was beside the model once: `sampler.touched` and `meta["sampler"]`."""
    run, train, valid = case("linear", "quadratic", f"sampler.update={update}", "training.checkpoint_every=4")
    Trainer(run, train, valid, tmp_path / "whole").fit()
    with pytest.raises(StopError):
        Trainer(run, train, valid, tmp_path / "parts", on_event=crash_at(6)).fit()
    path = checkpoint.latest(tmp_path / "parts")
    tensors, meta = checkpoint.load(path)
    lag = tensors.pop("head.sampler_lag")
    meta["sampler"] = {"steps": int(lag[0]), "stale": bool(lag[1])}
    assert meta["sampler"]["steps"] > 0
    if update == "3":
        tensors["sampler.touched"] = lag[2:]
    shutil.rmtree(path)
    checkpoint.save(path, tensors, meta, keep=3)
    Trainer.resume(tmp_path / "parts", train, valid).fit()
    assert differing(final(tmp_path / "whole")[0], final(tmp_path / "parts")[0]) == []


def crashed(tmp_path, *settings, model="mlp", sampler="unigram"):
    """(train, valid) of a run in tmp_path / "run" that has a checkpoint of step 4 and crashed at step 6."""
    run, train, valid = case(model, sampler, *settings)
    with pytest.raises(StopError):
        Trainer(run, train, valid, tmp_path / "run", on_event=crash_at(6)).fit()
    return train, valid


REFUSED = {
    "model.dim=16": "checkpoint-00000004 does not fit the configuration; another model, .*: .*size mismatch",
    "sampler.name=quadratic": "checkpoint-00000004 does not fit the configuration; another model, sampler",
    "optimizer.rowwise=true": r"does not fit the configuration; .*sum of parameter 0 must be \[60\], got \[60, 8\]",
    "optimizer.name=adam": "optimizer.name must be that of the run, adagrad, whose state is in .*, got adam",
    "optimizer.encoder=adagrad": "optimizer.encoder must be that of the run, adam, whose state is in .*, got adagrad",
}


@pytest.mark.parametrize("setting", REFUSED)
def test_a_resume_that_is_refused_leaves_the_run_as_it_was(tmp_path, setting):
    train, valid = crashed(tmp_path)
    files = [tmp_path / "run" / name for name in ("config.toml", "metrics.jsonl")]
    before = [path.read_bytes() for path in files]
    with pytest.raises(RunError, match=f"(?s){REFUSED[setting]}"):
        Trainer.resume(tmp_path / "run", train, valid, settings=[setting])
    assert [path.read_bytes() for path in files] == before
    assert not list((tmp_path / "run").glob("config.before-*"))
    assert Trainer.resume(tmp_path / "run", train, valid).fit().status == "finished"


def test_larger_batches_from_the_middle_of_an_epoch(tmp_path):
    train, valid = crashed(tmp_path)
    trainer = Trainer.resume(tmp_path / "run", train, valid, settings=["training.batch_size=60", "training.epochs=3"])
    assert (trainer.progress.epoch, trainer.progress.batch) == (1, 0)  # 4 batches were done, and 2 make an epoch now
    seen = []
    trainer.on_event = lambda event: seen.append(event["loss"]) if event["event"] == "progress" else None
    assert trainer.fit().step == 6
    assert len(seen) == 2
    assert all(loss > 0 for loss in seen)


@pytest.mark.parametrize(
    ("before", "after"),
    [("training.average_head=false", "training.average_head=true"),
     ("training.average_head=true", "training.average_head=false")],
)  # fmt: skip
def test_a_resume_may_average_more_or_less(tmp_path, before, after):
    train, valid = crashed(tmp_path, "training.average=ema", "training.average_decay=0.9", before)
    trainer = Trainer.resume(tmp_path / "run", train, valid, settings=[after])
    trainer.fit()
    assert ("head.weight" in trainer.average) == after.endswith("true")
    assert "encoder.body.0.weight" in trainer.average


def test_a_resume_may_give_averages_up(tmp_path):
    train, valid = crashed(tmp_path, "training.average=ema", "training.average_decay=0.9")
    trainer = Trainer.resume(tmp_path / "run", train, valid, settings=["training.average=none"])
    found = trainer.fit().metrics
    assert found == evaluate(trainer.encoder, trainer.head, valid, batch_size=trainer.batch_size)


def test_a_resume_with_more_patience_goes_on(tmp_path):
    run, train, valid = case("linear", "uniform", "training.patience=1", "training.min_delta=100")
    first = Trainer(run, train, valid, tmp_path / "run").fit()
    assert (first.status, first.step) == ("early_stop", 16)
    longer = ["training.epochs=4"]
    assert Trainer.resume(tmp_path / "run", train, valid, settings=longer).fit().step == 16
    again = Trainer.resume(tmp_path / "run", train, valid, settings=["training.patience=0"]).fit()
    assert (again.status, again.step) == ("finished", 32)


def test_an_evaluation_that_came_after_the_checkpoint_is_recorded_once(tmp_path):
    # The signal leaves a checkpoint of step 4 from before its evaluation; the resumed run does that, and crashes.
    run, train, valid = case("linear", "uniform", "training.eval_every=2")
    check(tmp_path, run, train, valid, [signal_at(4), crash_at(6)])


def test_full_softmax_has_no_sampler_to_refit(tmp_path):
    run, train, valid = case("mlp", "tree", "head.loss=full_softmax", "sampler.refit_steps=3")
    check(tmp_path, run, train, valid, [crash_at(6)])


def test_other_data_are_refused(tmp_path):
    run, train, valid = case()
    Trainer(run, train, valid, tmp_path / "run").fit()
    with pytest.raises(RunError, match="training data must be those of the run"):
        Trainer.resume(tmp_path / "run", valid, train)


def test_another_machine_is_warned_of(tmp_path):
    run, train, valid = case()
    Trainer(run, train, valid, tmp_path / "run").fit()
    tensors, meta = final(tmp_path / "run")
    meta["environment"]["torch"] = "0.1"
    checkpoint.save(checkpoint.latest(tmp_path / "run"), tensors, meta)
    events = []
    Trainer.resume(tmp_path / "run", train, valid, on_event=events.append)
    [warning] = [e["message"] for e in events if e["event"] == "warning"]
    assert "may differ in the last bits: torch 0.1 is" in warning


def test_metrics_are_json_lines_with_each_step_once(tmp_path):
    run, train, valid = case("linear", "quadratic")
    check(tmp_path, run, train, valid, [crash_at(11)])
    lines = [json.loads(line) for line in (tmp_path / "parts" / "metrics.jsonl").read_text().splitlines()]
    keys = [(line["kind"], line["step"]) for line in lines]
    assert len(set(keys)) == len(keys)
    assert [step for kind, step in keys if kind == "train"] == [3, 6, 9, 12, 15, 16]
    assert [step for kind, step in keys if kind == "eval"] == [8, 16]
    assert {"loss", "lr", "seconds", "stale_steps"} <= lines[0].keys()
