"""Models, samplers and optimizers by name."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn
from training_cases import MAKE, MODELS, SAMPLERS, C, case, dense, sparse

import samplex_cuda as sx
from samplex_cuda import data
from samplex_cuda.training import Config, ConfigError, build, config, models, optimizers
from samplex_cuda.tree_fit import fit_pca


def some(dataset, count=4):
    size = dataset.columns if dataset.ordered else count
    return dataset.batch(torch.arange(size))


@pytest.mark.parametrize("model", MODELS)
def test_every_model_gives_h_and_a_loss_with_gradients(model):
    run, train, _ = case(model, "unigram", "optimizer.fused=false")
    encoder, head = build(run, train)
    batch = some(train)
    h, features = encoder.encode(batch)
    lead = batch["tokens"].shape if "tokens" in batch else batch["y"].shape[:1]
    assert h.shape == (*lead, encoder.out_features)
    assert features is None
    head(h, batch["y"], context=models.context_of(batch), key=sx.Key(0)).backward()
    missing = [n for n, p in encoder.named_parameters() if p.grad is None]
    assert missing == []
    assert head.weight.grad is not None
    for table in models.row_tables(encoder, head):
        assert table.grad.is_sparse
    # Each parameter has one optimizer.
    owned = [id(p) for o in optimizers(run, encoder, head).values() for g in o.param_groups for p in g["params"]]
    both = {id(p) for p in [*encoder.parameters(), *head.parameters()]}
    assert len(owned) == len(set(owned))
    assert set(owned) == both


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("model", ["linear", "linear_pca", "mlp", "embedding_bag", "gru", "two_tower"])
def test_every_sampler_draws(model, sampler):
    if sampler == "bigram" and MODELS[model][0] not in ("text", "interactions"):
        run, train, _ = case(model, sampler)
        with pytest.raises(ConfigError, match=r"\[sampler\] name must not be .bigram. for (dense|sparse) data"):
            build(run, train)
        return
    run, train, _ = case(model, sampler)
    encoder, head = build(run, train)
    batch = some(train)
    h, features = encoder.encode(batch)
    assert torch.isfinite(head(h, batch["y"], features=features, context=models.context_of(batch), key=sx.Key(0)))
    # What a checkpoint brings fits what is built without the data.
    other_encoder, other_head = build(run, train, fit=False)
    other_encoder.load_state_dict(encoder.state_dict())
    other_head.load_state_dict(head.state_dict())
    h, features = other_encoder.eval().encode(batch)
    encoder.eval()
    encoder.carry({})
    mine = encoder.encode(batch)
    pair = torch.tensor([3, 4])
    again = other_head(h, batch["y"], features=features, context=models.context_of(batch), key=pair)
    assert torch.equal(again, head(mine[0], batch["y"], features=mine[1], context=models.context_of(batch), key=pair))


def test_initial_values_depend_on_the_seed_alone():
    run, train, _ = case("lstm", "rff")
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one = build(run, train)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    two = build(run, train)
    for a, b in zip(one, two, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))
    run.training.seed = 1
    assert not torch.equal(build(run, train)[1].weight, one[1].weight)


def test_kernel_samplers_are_built_from_the_head():
    for name in ("quadratic", "rff"):
        run, train, _ = case("linear", name)
        _, head = build(run, train)
        rows = head.sampler.rows[:, : head.in_features]
        wanted = torch.nn.functional.normalize(head.weight, dim=1) if name == "rff" else head.weight
        assert torch.allclose(rows, wanted)
        assert head.sampler_update == "step"


def test_a_kernel_has_half_of_the_frequencies_mixed_in():
    for name in ("quadratic", "rff"):
        run, train, _ = case("linear", name, "sampler.base=auto")
        kernel, base = build(run, train)[1].sampler.samplers
        assert type(kernel).__name__ == {"quadratic": "Quadratic", "rff": "RandomFourier"}[name]
        assert type(base).__name__ == "Unigram"
        assert run.sampler.base_weight == 0.5


def test_an_index_is_built_from_the_head_and_follows_it():
    run, train, _ = case("linear", "midx_default", "head.scale=2", "sampler.codes=product", "sampler.epsilon=0.05")
    _, head = build(run, train)
    sampler = head.sampler
    assert (sampler.scale, sampler.kind, sampler.epsilon, sampler.has_bias) == (2.0, "product", 0.05, True)
    assert torch.equal(sampler.cell, sampler._cells_of(head.weight.detach()))
    assert head.sampler_update == "step"
    assert head.follower.auto
    run, train, _ = case("linear", "midx")
    assert build(run, train)[1].sampler_update == 3


def test_principal_components_are_those_of_fit_pca():
    run, train, _ = case("linear", "uniform", "model.pca=3", "model.whiten=true")
    encoder, head = build(run, train)
    x = train.batch(torch.arange(len(train)))["x"]
    mean, projection = fit_pca(x, 3, whiten=True)
    h = encoder(train.batch(torch.arange(7)))
    assert torch.allclose(h, (x[:7] - mean) @ projection, atol=1e-5)
    assert head.in_features == 3


def test_sparse_input_is_projected_without_making_it_dense():
    train = sparse()
    batch = train.batch(torch.arange(9))
    x = torch.zeros(9, train.num_features)
    row = torch.repeat_interleave(torch.arange(9), batch["offsets"].diff())
    x[row, batch["ids"]] = batch["values"]
    projected = models.InputMap(train.num_features, 3)
    projected.mean.copy_(torch.randn(train.num_features))
    projected.projection.copy_(torch.randn(train.num_features, 3))
    assert torch.allclose(projected(batch), (x - projected.mean) @ projected.projection, atol=1e-5)


def test_a_tree_knows_the_data_better_than_chance():
    run, train, _ = case("mlp", "tree")
    encoder, head = build(run, train)
    batch = train.batch(torch.arange(len(train)))
    _, x = encoder.encode(batch)
    assert torch.equal(x, batch["x"])
    log_q = head.sampler.log_prob(x, batch["y"])
    assert log_q.mean() > -torch.tensor(float(C)).log() + 0.5
    run, train, _ = case("embedding_bag", "tree")
    encoder, head = build(run, train)
    batch = train.batch(torch.arange(len(train)))
    _, z = encoder.encode(batch)
    assert z.shape == (len(train), 4)
    y = batch["y"][:, 0]
    assert head.sampler.log_prob(z, y).mean() > -torch.tensor(float(C)).log()


def test_a_bigram_counts_what_follows():
    train = data.Tokens(torch.tensor([0, 1, 0, 2, 0, 1, 0]), 3, window=2, columns=1)
    run = config.override(
        Config(), ["model.name=gru", "model.dim=4", "sampler.name=bigram", "sampler.backoff=0", "training.batch_size=1"]
    )
    _, head = build(run, train)
    found = head.sampler.log_prob(None, torch.tensor([1, 2, 0]), context=torch.tensor([0, 0, 1])).exp()
    assert torch.allclose(found, torch.tensor([2 / 3, 1 / 3, 1.0]))


def test_the_state_of_a_language_model_goes_on():
    run, train, _ = case("lstm", "uniform", "model.dropout=0")
    encoder, _ = build(run, train)
    encoder.eval()
    columns = train.columns
    first, second = (train.batch(torch.arange(columns) + k * columns) for k in (0, 1))
    both = encoder({"tokens": torch.cat([first["tokens"], second["tokens"]], 1)})
    encoder.carry({})
    encoder(first)
    assert torch.allclose(encoder(second), both[:, train.window :], atol=1e-6)
    assert not encoder.carried()["h"].requires_grad


def test_padding_touches_no_item():
    run, train, _ = case("sequence_gru", "uniform", "optimizer.fused=false")
    encoder, head = build(run, train)
    history = torch.tensor([[-1, -1, 5, 7], [-1, -1, -1, -1]])
    batch = {"history": history, "y": torch.tensor([1, 2]), "index": torch.arange(2)}
    head(encoder(batch), batch["y"]).backward()
    assert encoder.table.grad.coalesce().indices()[0].tolist() == [5, 7]
    for pooling in ("mean", "gru", "attention"):
        model = models.Sequence(C, 8, 8, pooling=pooling, history=4).eval()
        alone, longer = model({"history": history[:1]}), model({"history": history})
        assert torch.allclose(alone, longer[:1], atol=1e-6)
        assert torch.isfinite(longer).all()


def test_attention_does_not_see_what_comes_before_the_history():
    torch.manual_seed(0)
    model = models.Sequence(C, 8, 8, pooling="attention", history=6).eval()
    short = model({"history": torch.tensor([[3, 4]])})
    padded = model({"history": torch.tensor([[-1, -1, -1, 3, 4]])})
    assert torch.allclose(short, padded, atol=1e-5)


class Doubler(nn.Module):
    """A model by import path."""

    def __init__(self, num_features, factor=2.0):
        super().__init__()
        self.out_features = num_features
        self.scale = nn.Parameter(torch.tensor(float(factor)))

    def forward(self, batch):
        return batch["x"] * self.scale


def test_a_model_by_import_path():
    run = config.override(Config(), ["model.name=test_training_models:Doubler", "model.options.factor=3"])
    train = dense()
    encoder, head = build(run, train, trust_model=run.model.name)
    batch = some(train)
    assert torch.equal(encoder(batch), 3 * batch["x"])
    assert head.in_features == train.num_features
    assert list(optimizers(run, encoder, head)) == ["head", "encoder"]


def test_a_model_in_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "a_net_of_my_own.py").write_text(
        "import torch\n"
        "class Net(torch.nn.Linear):\n"
        "    def forward(self, batch):\n"
        "        return super().forward(batch['x'])\n"
    )
    monkeypatch.chdir(tmp_path)
    # A console script has its own folder on the path, not the current one.
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    run = config.override(Config(), ["model.name=a_net_of_my_own:Net", "model.options.in_features=10",
                                     "model.options.out_features=4"])  # fmt: skip
    encoder, head = build(run, dense(width=10), trust_model=run.model.name)
    assert head.in_features == 4
    assert encoder(some(dense(width=10))).shape == (4, 4)


@pytest.mark.parametrize(
    ("settings", "kind", "text"),
    [
        (["model.name=nowhere.at:All"], "dense", r"\[model\] name must be a .* that can be imported, .*nowhere"),
        (["model.name=math:pi"], "dense", r"name must name a subclass of torch.nn.Module, got 'math:pi', a float"),
        (
            ["model.name=torch.nn:Linear"],
            "dense",
            r"options must be arguments of torch.nn:Linear, got \{\}: .*missing 2",
        ),
        (["model.name=lstm"], "dense", "must be a model for dense data, got 'lstm', which takes text"),
        (["model.name=linear"], "sparse", "pca must be above 0 for linear on sparse data"),
        (["model.name=linear", "model.pca=400"], "sparse", "pca must be at most 40, the width of the input, got 400"),
        (["model.name=gru", "sampler.name=tree", "sampler.features=input"], "text", "features must be"),
        (["model.name=lstm", "model.tied=true"], "text", None),
    ],
)
def test_what_does_not_fit_is_named(settings, kind, text):
    run = config.override(Config(), settings)
    if text is None:
        build(run, MAKE[kind]())
        return
    with pytest.raises(ConfigError, match=text):
        build(run, MAKE[kind](), trust_model=run.model.name)


@pytest.mark.parametrize("other", ["quadratic", "rff", "midx", "softmax"])
def test_a_tree_beside_a_sampler_that_looks_at_h_does_so_too(other):
    parts = [f'sampler.components=["tree", "{other}"]', "sampler.num_features=32", "sampler.dim=4", "model.dim=10"]
    # As wide as the input, so that a look at the wrong one would not be noticed by its shape.
    run, train, _ = case("mlp", "mixture", *parts)
    encoder, head = build(run, train)
    h, features = encoder.encode(some(train))
    assert features is None
    assert head.sampler.sample(h, 3).ids.shape == (4, 3)
    with pytest.raises(ConfigError, match=f'features must be "auto" or "hidden" in a mixture with {other}, which'):
        build(config.override(run, ["sampler.features=input"]), train)


def test_a_stored_tree_looks_at_the_input_and_cannot_stand_beside_one_that_does_not(tmp_path):
    run, train, _ = case("mlp", "mixture", 'sampler.components=["tree", "quadratic"]', "sampler.dim=4",
                         f"sampler.path={tmp_path / 'tree.safetensors'}")  # fmt: skip
    with pytest.raises(ConfigError, match="path must be empty in a mixture with quadratic, which uses h"):
        build(run, train)


@pytest.mark.parametrize("features", ["input", "hidden"])
@pytest.mark.parametrize("model", ["mlp", "embedding_bag"])
def test_unseen_classes_may_be_left_out_whatever_the_tree_looks_at(model, features):
    run, train, _ = case(model, "tree", f"sampler.features={features}", "sampler.unseen=false")
    few = data.Subset(train, torch.arange(30))
    encoder, head = build(run, few)
    h, seen = encoder.encode(some(few))
    law = head.sampler.log_prob_all(h if seen is None else seen).exp()
    absent = few.class_counts() == 0
    assert absent.any()
    assert (law[:, absent] == 0).all()
    assert (law[:, ~absent] > 0).all()


def test_tied_tables_are_one():
    run, train, _ = case("lstm_tied", "quadratic")
    encoder, head = build(run, train)
    assert encoder.table is head.weight
    assert models.row_tables(encoder, head) == []
    assert not run.fused
