"""A run says so when its model is useless, and its defaults do not make one."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
from cli_cases import one_thread, samplex
from training_cases import case, text

from samplex_cuda import data, samplers
from samplex_cuda.training import Config, NonFiniteLossError, Trainer, build, config, load_model
from samplex_cuda.training.watch import check_model

__all__ = ["one_thread"]


def zipf_text(path, words=400, tokens=12_000, seed=0):
    """Lines of words by Zipf's law, each of which says something about the next; many occur once."""
    rng = np.random.default_rng(seed)
    chances = 1 / np.arange(1, words + 1)
    ids = rng.choice(words, tokens, p=chances / chances.sum())
    ids[1::2] = (ids[::2][: len(ids[1::2])] * 7 + 3) % words
    rare = [f"once{i}" for i in range(tokens // 20)]
    found = [f"w{i}" for i in ids]
    for place, word in zip(rng.choice(tokens, len(rare), replace=False), rare, strict=True):
        found[place] = word
    path.write_text("\n".join(" ".join(found[i : i + 20]) for i in range(0, tokens, 20)) + "\n")
    return path


# ---------------------------------------------------------------------------------------------------- ids by count
@pytest.mark.parametrize("options", [{"min_count": 2}, {"max_size": 50}, {"min_count": 3, "max_size": 100}, {}])
def test_ids_are_ranks_with_what_counts_as_unknown(tmp_path, options):
    found = data.text_file(zipf_text(tmp_path / "a.txt"), columns=1, **options)
    counts = np.bincount(found.tokens, minlength=found.num_classes)
    assert (np.diff(counts) <= 0).all()
    plain = data.text_file(tmp_path / "a.txt", columns=1)
    words = [plain.vocabulary[t] for t in plain.tokens]
    kept = set(found.vocabulary) - {"<unk>"}
    assert [found.vocabulary[t] for t in found.tokens] == [w if w in kept else "<unk>" for w in words]
    unknown = found.vocabulary.index("<unk>")
    assert unknown < 5 if options else unknown == found.num_classes - 1


def test_log_uniform_warns_where_counts_are_not_sorted():
    tokens = np.sort(np.random.default_rng(0).integers(0, 60, 600) ** 2 // 60)  # small ids are frequent
    run = config.override(Config(), ["model.name=gru", "model.dim=4", "sampler.name=log_uniform"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build(run, data.Tokens(tokens, 60, window=5, columns=4))
        build(run, data.Tokens(np.arange(600) % 60, 60, window=5, columns=4))  # equal counts are sorted
    last = np.where(np.arange(600) % 3 == 0, 59, tokens)  # as <unk> was: frequent, and the last id
    with pytest.warns(UserWarning, match=r"class 59 of 60 has 3\d.\d+% of the targets .* use sampler unigram"):
        build(run, data.Tokens(last, 60, window=5, columns=4))


def test_the_default_draws_by_frequency_and_shares():
    run = Config().resolved()
    assert (run.sampler.name, run.head.shared, run.head.num_samples) == ("unigram", True, 1024)
    _, head = build(config.override(Config(), ["model.name=gru", "model.dim=4"]), text())
    assert isinstance(head.sampler, samplers.Unigram)
    assert head.shared
    assert (head.sampler.log_prob_all(torch.zeros(1, 4)) > -math.inf).all()  # classes without an example too
    named = config.override(Config(), ["sampler.name=uniform"]).resolved()
    assert (named.head.shared, named.head.num_samples) == (False, 64)
    assert config.override(Config(), ["head.shared=true"]).resolved().head.num_samples == 1024


def test_tree_and_rff_are_mixed_with_frequencies_unless_asked():
    run, train, _ = case("linear", "tree_default")
    _, head = build(run, train)
    assert type(head.sampler) is samplers.Tree
    base = samplers.Unigram(train.class_counts() + 1)
    torch.testing.assert_close(head.sampler.base_units, base.prefix.diff(), rtol=1e-12, atol=0)
    assert float(head.sampler.base_share) in (0.5, 1.0)
    _, head = build(config.override(run, ["sampler.base=none"]), train)
    assert not head.sampler.has_base
    _, head = build(config.override(run, ["sampler.base=log_uniform"]), train)
    assert [type(part) for part in head.sampler.samplers] == [samplers.Tree, samplers.LogUniform]
    run, train, _ = case("linear", "rff_default")
    _, head = build(run, train)
    assert isinstance(head.sampler, samplers.Mixture)
    assert [type(part) for part in head.sampler.samplers] == [samplers.RandomFourier, samplers.Unigram]
    assert head.sampler_update == "step"
    _, head = build(config.override(run, ["sampler.base=none"]), train)
    assert type(head.sampler) is samplers.RandomFourier
    assert head.sampler.kind == "positive"
    assert head.sampler.nu == 1.0
    stratified = config.override(Config(), ["sampler.name=tree", "head.shared=true", "head.stratified=true"])
    assert stratified.resolved().sampler.base == "unigram"
    stratified = config.override(Config(), ["sampler.name=rff", "head.shared=true"])
    assert stratified.resolved().sampler.base == "unigram"


def test_runs_from_before_the_base_keep_their_tree_alone(tmp_path):
    run, train, valid = case("linear", "tree")
    Trainer(run, train, valid, tmp_path / "run", on_event=lambda event: None).fit()  # it warns: a tree alone leaks
    path = tmp_path / "run" / "config.toml"
    path.write_text("".join(line for line in path.read_text().splitlines(True) if not line.startswith("base")))
    assert type(Trainer.resume(tmp_path / "run", train, valid).head.sampler) is samplers.Tree
    meta = config.files.stored({"sampler": {"name": "tree"}}, "meta.json")
    assert meta.resolved().sampler.base == "none"
    assert type(load_model(tmp_path / "run")[1].sampler) is samplers.Tree


# ---------------------------------------------------------------------------------------------------- warnings
@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    return zipf_text(tmp_path_factory.mktemp("text") / "train.txt")


def words(lines, folder, *more):
    settings = ["data.options.min_count=2", "training.epochs=3", "training.batch_size=4", "training.plot=false",
                "optimizer.encoder_lr=0.02", "optimizer.lr=0.5", "training.threads=1"]  # fmt: skip
    chosen = [word for setting in settings for word in ("--set", setting)]
    return ["train", "--data", lines, "--format", "text", "--model", "lstm", "--out", folder, *chosen, *more]


def test_a_tree_alone_is_useless_on_text_and_the_run_says_so(lines, tmp_path):
    result = samplex(*words(lines, tmp_path / "alone", "--sampler", "tree", "--set", "sampler.base=none"))
    found = result.output
    assert "(worse than equal probabilities)" in found
    assert "(best so far)" not in found
    last = found[found.rindex("status") :]  # the summary
    for said in ("is above", "where the sampled loss is", "never draws what the model", "of the softmax leaks"):
        assert said in " ".join(found.split())
        assert said.split()[0] in last
    assert last.count("│ warning") == 4


def test_a_leak_above_a_fifth_is_always_said():
    torch.manual_seed(0)
    run, train, _ = case("linear", "uniform", "head.num_samples=1")
    encoder, head = build(run, train)
    torch.nn.init.normal_(head.weight, std=3.0)
    numbers = {}
    said = [text for text in check_model(encoder, head, train, 16, numbers=numbers) if "of the softmax leaks" in text]
    assert numbers["leak"] > 0.2
    assert len(said) == 1
    # One draw by class frequency leaks as much, so another distribution is no remedy.
    assert "draws by class frequency: " in said[0]
    assert "Draw more (head.num_samples)" in said[0]
    head.num_samples = 4096
    assert [text for text in check_model(encoder, head, train, 16, numbers=numbers) if "leaks" in text] == []
    assert numbers["leak"] < 0.2


def test_the_default_tree_is_safe(lines, tmp_path):
    found = samplex(*words(lines, tmp_path / "mixed", "--sampler", "tree")).output
    assert "sampler 0.5 tree + 0.5 unigram, 64 draws per row" in found
    assert "worse than" not in found
    assert "rates high" not in found
    assert "│ warning" not in found


def test_what_the_watch_sees_is_true():
    run, train, _ = case("linear", "uniform")
    encoder, head = build(run, train)
    assert check_model(encoder, head, train, 16, sampled=math.log(60), nll=math.log(60)) == []
    state = {name: t.clone() for name, t in head.state_dict().items()}
    [above] = check_model(encoder, head, train, 16, nll=math.log(60) + 0.01)
    assert "is above log C = 4.094" in above
    [far] = check_model(encoder, head, train, 16, sampled=1.0)
    exact = float(head.eval()(train.batch(torch.arange(16))["x"], train.batch(torch.arange(16))["y"]))
    assert f"training data is {exact:.4g} where the sampled loss is 1" in far
    head.train()
    # A sampler without mass where the model has its best class.
    with torch.no_grad():
        head.get_parameter("bias")[7] = 50.0
    counts = torch.ones(60)
    counts[7] = 0
    head.set_sampler(samplers.Unigram(counts))
    assert any("log q of its first class is -inf" in one for one in check_model(encoder, head, train, 16))
    assert head.training
    assert encoder.training
    assert all(torch.equal(t, state[name]) for name, t in head.state_dict().items() if name == "weight")


def test_python_users_are_warned_too(tmp_path):
    run, train, valid = case("linear", "uniform", "optimizer.lr=50")
    with pytest.warns(UserWarning, match=r"trainer: step 8: the exact NLL on validation data, .* is above log C"):
        result = Trainer(run, train, valid, tmp_path / "run").fit()
    assert "is above log C" in result.warnings[0]


# ---------------------------------------------------------------------------------------- data that do not fit
@pytest.mark.parametrize(
    ("valid", "message"),
    [
        (data.Dense(torch.zeros(4, 9), torch.arange(4), num_classes=60), "valid must have 10 features .* got 9"),
        (data.Dense(torch.zeros(4, 10), torch.tensor([0, 1, 63, 2])), r"labels in \[0, 60\) .* got 63; if"),
        (text(), "valid must be dense data .* got text"),
    ],
)
def test_validation_data_that_do_not_fit_are_refused_before_the_first_step(valid, message, tmp_path):
    run, train, _ = case()
    with pytest.raises(config.ConfigError, match=message):
        Trainer(run, train, valid, tmp_path / "run")


def test_validation_data_may_claim_classes_that_they_do_not_use(tmp_path):
    run, train, _ = case("linear", "uniform", "training.epochs=1")
    valid = data.Dense(torch.zeros(4, 10), torch.arange(4), num_classes=99)
    assert Trainer(run, train, valid, tmp_path / "run").fit().status == "finished"


def test_a_nan_in_the_data_is_told_from_one_of_the_model(tmp_path):
    run, train, valid = case()
    x = torch.from_numpy(train.x).clone()
    x[7, 3] = math.nan
    broken = data.Dense(x, train.targets(torch.arange(len(train))), num_classes=60)
    with pytest.raises(NonFiniteLossError, match="x of the batch has nan or infinity: clean the training data"):
        Trainer(run, broken, valid, tmp_path / "run").fit()
