"""A run that continues with more classes: existing ids and rows are kept, new rows and their state are initialized."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cli_cases import one_thread, samplex  # noqa: F401

import samplex_cuda as sx
from samplex_cuda import data
from samplex_cuda.training import Config, RunError, Trainer, checkpoint, config

C, MORE, D = 40, 55, 10


def dense(classes: int, rows: int = 240) -> data.Dense:
    """The first rows are the same, whatever the classes are."""
    g = torch.Generator().manual_seed(0)
    centres = torch.randn(MORE, D, generator=g)
    y = torch.arange(rows) % C
    x = centres[y] + 0.1 * torch.randn(rows, D, generator=g)
    if classes > C:
        new = C + torch.arange(240) % (classes - C)
        x, y = torch.cat([x, centres[new] + 0.1 * torch.randn(240, D, generator=g)]), torch.cat([y, new])
    return data.Dense(x, y, num_classes=classes)


def interactions(items: int) -> data.Interactions:
    g = np.random.default_rng(0)
    ends = np.arange(0, 30 * 6 + 1, 6)
    return data.Interactions(ends, g.permuted(np.tile(np.arange(items), (30, 1)), axis=1)[:, :6].ravel(), items)


def made(*settings: str) -> Config:
    keys = ["training.batch_size=24", "training.epochs=2", "head.num_samples=8", "training.plot=false"]
    return config.override(Config(), [*keys, *settings])


RUNS = {
    "unigram, adam": ("dense", ["sampler.name=unigram", "optimizer.name=adam", "model.name=mlp"]),
    "uniform, momentum": ("dense", ["sampler.name=uniform", "optimizer.name=sgd", "optimizer.momentum=0.9"]),
    "in-batch, average": ("dense", ["sampler.name=in_batch", "training.average=ema"]),
    "quadratic": ("dense", ["sampler.name=quadratic", "head.bias=false"]),
    "items in both tables": ("items", ["model.name=two_tower", "model.dim=8", "sampler.name=unigram"]),
    "tree": ("dense", ["sampler.name=tree", "model.name=linear"]),
    "tree of hidden states": ("dense", ["sampler.name=tree", "model.name=mlp", "sampler.base=none"]),
    "not fused": ("dense", ["sampler.name=unigram", "optimizer.fused=false"]),
}


@pytest.mark.parametrize("name", RUNS)
def test_rows_of_before_stay_and_new_ones_begin_anew(tmp_path, name):
    kind, settings = RUNS[name]
    make = dense if kind == "dense" else interactions
    run = made(*settings)
    Trainer(run, make(C), make(C), tmp_path).fit()
    old, meta = checkpoint.load(checkpoint.latest(tmp_path))
    more = make(MORE)
    trainer = Trainer.resume(tmp_path, more, more, settings=["training.epochs=4"], grow=True)
    head, state = trainer.head, trainer.optimizers["head"].state
    assert head.num_classes == MORE
    assert torch.equal(head.weight[:C], old["head.weight"])
    assert head.weight[C:].std() > 0
    tables = 0
    for index, p in enumerate(trainer.optimizers["head"].param_groups[0]["params"]):
        for key, table in state[p].items():
            if isinstance(table, torch.Tensor) and table.dim():
                tables += 1
                assert table.shape[0] == MORE
                assert torch.equal(table[:C], old[f"optimizer.head.{index}.{key}"]), key
                assert not table[C:].any(), key
            elif key == "step":
                assert float(table) == meta["optimizers"]["head"]["state"][str(index)]["step"]
    assert tables > 0
    if kind == "items":
        assert trainer.encoder.table.shape[0] == MORE
        assert torch.equal(trainer.encoder.table[:C], old["encoder.table"])
    if isinstance(head.sampler, sx.samplers.Unigram):
        counts = more.class_counts().double()
        wanted = Trainer(run, more, more, tmp_path / "fresh").head.sampler.log_prob_all()
        assert torch.equal(head.sampler.log_prob_all(), wanted)
        assert counts[C:].any()
    assert trainer.progress.batch == 0
    result = trainer.fit()
    assert result.status == "finished"
    again = Trainer.resume(tmp_path, more, more, settings=["training.epochs=5"])  # the data are those of the run now
    assert again.fit().status == "finished"


def test_new_classes_are_learned(tmp_path):
    run = made("sampler.name=unigram")
    Trainer(run, dense(C), dense(C), tmp_path).fit()
    trainer = Trainer.resume(tmp_path, dense(MORE), dense(MORE), settings=["training.epochs=12"], grow=True)
    trainer.fit()
    new = dense(MORE).batch(torch.arange(240, 480))
    found = trainer.head.eval().predict(trainer.encoder.encode(new)[0])
    assert (found == new["y"]).double().mean() > 0.8


def test_from_the_command_line(tmp_path):
    for name, classes in (("few", C), ("more", MORE)):
        part = dense(classes)
        np.savez(tmp_path / f"{name}.npz", x=part.x, y=part.targets(torch.arange(len(part))).numpy())
    run = tmp_path / "run"
    samplex("train", "--data", tmp_path / "few.npz", "--out", run, "--set", "training.epochs=1")
    refused = samplex("train", "--resume", run, "--data", tmp_path / "more.npz", code=None)
    assert refused.exit_code != 0
    assert "--grow" in refused.output
    words = ("train", "--resume", run, "--data", tmp_path / "more.npz", "--grow", "--set", "training.epochs=2")
    samplex(*words)
    tensors, meta = checkpoint.load(checkpoint.latest(run))
    assert tensors["head.weight"].shape[0] == meta["data"]["num_classes"] == MORE
    assert samplex("train", "--data", "builtin", "--grow", code=None).exit_code != 0  # works with --resume only


def test_what_cannot_grow_is_refused_and_nothing_changes(tmp_path):
    run = made("sampler.name=unigram", "head.loss=negative_sampling")
    Trainer(run, dense(MORE), dense(MORE), tmp_path / "prior").fit()
    Trainer(made("sampler.name=unigram"), dense(MORE), dense(MORE), tmp_path / "fewer").fit()

    def files(folder):
        return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}

    before = files(tmp_path)
    for folder, train, words in (
        ("fewer", dense(C), "num_classes must be at least 55, got 40"),
        ("fewer", interactions(MORE), "grow needs dense data as before"),
    ):
        with pytest.raises(RunError, match=words):
            Trainer.resume(tmp_path / folder, train, train, grow=True)
    other = data.Dense(dense(MORE).x, (dense(MORE).targets(torch.arange(480)) + 1) % MORE, num_classes=MORE)
    with pytest.raises(RunError, match="a loss whose scores do not depend on its sampler"):
        Trainer.resume(tmp_path / "prior", other, other, grow=True)
    with pytest.raises(RunError, match="pass --grow"):
        Trainer.resume(tmp_path / "fewer", other, other)
    assert files(tmp_path) == before


# ------------------------------------------------------------------------------------------------ text
FEW = "a b a c\nb a d a\n" * 30
MORE_TEXT = FEW + "e f a e\ng e b d\n" * 30


def text_run(tmp_path, *settings):
    (tmp_path / "few.tokens").write_text(FEW)
    (tmp_path / "more.tokens").write_text(MORE_TEXT)
    run = tmp_path / "run"
    keys = ["training.batch_size=4", "training.epochs=1", "head.num_samples=4", "model.name=lstm", "model.dim=8"]
    keys.append("data.valid_fraction=0")
    words = [word for key in (*keys, *settings) for word in ("--set", key)]
    samplex("train", "--data", tmp_path / "few.tokens", "--out", run, *words, "--set", "data.options.window=5")
    return run


@pytest.mark.parametrize("name", ["unigram", "bigram", "quadratic"])
def test_words_of_before_keep_their_numbers(tmp_path, name):
    extra = ["head.bias=false"] if name == "quadratic" else []
    run = text_run(tmp_path, f"sampler.name={name}", *extra)
    held = (run / "vocabulary.txt").read_text().split()
    old, _ = checkpoint.load(checkpoint.latest(run))
    data_words = ("--data", tmp_path / "more.tokens", "--grow", "--set", "training.epochs=1")
    samplex("train", "--resume", run, *data_words)  # nothing left to train: the rows of before, and new ones
    now = (run / "vocabulary.txt").read_text().split()
    assert now[: len(held)] == held
    assert now[len(held) :] == ["e", "f", "g"]
    rest = ("train", "--resume", run, "--set", "training.epochs=3")
    samplex(*rest)  # the data are those of the run now, without --grow
    new, meta = checkpoint.load(checkpoint.latest(run))
    assert new["head.weight"].shape[0] == new["encoder.table"].shape[0] == meta["data"]["num_classes"] == len(now)
    assert old["head.weight"].shape[0] == len(held)
    options = config.load(run / "config.toml", of_run=True).data.options
    assert options["vocabulary"] == str((run / "vocabulary.txt").absolute())
    assert "extend" not in options


def test_text_rows_of_before_stay(tmp_path):
    run = text_run(tmp_path, "sampler.name=unigram")
    old, _ = checkpoint.load(checkpoint.latest(run))
    grown = Trainer.resume(run, settings=[f"data.path={tmp_path / 'more.tokens'}", "training.epochs=2"], grow=True)
    size = old["head.weight"].shape[0]
    assert torch.equal(grown.head.weight[:size], old["head.weight"])
    assert torch.equal(grown.encoder.table[:size], old["encoder.table"])
    assert grown.train.vocabulary[:size] == (run / "vocabulary.txt").read_text().split()[:size]
    assert grown.fit().status == "finished"


def test_text_whose_words_would_change_is_refused(tmp_path):
    run = text_run(tmp_path, "sampler.name=unigram")
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file() and p.name != ".lock"}
    other = data.text_file(tmp_path / "more.tokens", window=5, columns=4)
    with pytest.raises(RunError, match="the vocabulary must begin with the 6 words"):
        Trainer.resume(run, other, other, grow=True)
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file() and p.name != ".lock"} == before
    right = data.text_file(
        tmp_path / "more.tokens", vocabulary=run / "vocabulary.txt", extend=True, window=5, columns=4
    )
    assert Trainer.resume(run, right, right, grow=True).head.num_classes == 9
    (tmp_path / "old").mkdir()
    old = text_run(tmp_path / "old", "sampler.name=unigram")
    (old / "vocabulary.txt").unlink()
    with pytest.raises(RunError, match="which runs of earlier versions do not have"):
        Trainer.resume(old, right, right, grow=True)
