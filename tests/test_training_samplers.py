"""Samplers of a run: a tree from a file, a tree of a mixture that is fitted again, known positives out of the draws."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from training_cases import C, case, interactions, sparse

from samplex_cuda import data, samplers
from samplex_cuda.training import Config, ConfigError, Trainer, build, checkpoint, config, load_model, models


def rows(*numbers):
    return torch.tensor(numbers, dtype=torch.int64)


# ---------------------------------------------------------------------------------------------------- trees of files
def dense_rows(dataset):
    """Raw input [N, K], dense."""
    batch = dataset.batch(torch.arange(len(dataset)))
    if "x" in batch:
        return batch["x"]
    x = torch.zeros(len(dataset), dataset.num_features)
    row = torch.repeat_interleave(torch.arange(len(dataset)), batch["offsets"].diff())
    return x.index_put_((row, batch["ids"]), batch["values"], accumulate=True)


@pytest.fixture
def write_tree(tmp_path):
    def write(dataset, dim=4, x=None):
        x = dense_rows(dataset) if x is None else x
        y = dataset.targets(torch.arange(len(dataset))).reshape(len(dataset), -1)[:, 0]
        tree = samplers.Tree.fit(x, y, num_classes=C, dim=dim, progress=False)
        weights, bias = tree.parameters_of_nodes()
        parts = {"weights": weights, "bias": bias, "leaf_class": tree.leaf_class}
        path = tmp_path / "tree.safetensors"
        checkpoint.write_tensors(path, {**parts, "mean": tree.mean, "projection": tree.projection})
        return path, tree

    return write


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ("linear", []),
        ("linear", ["model.normalize=true"]),
        ("linear", ["model.pca=6"]),
        ("linear_pca", []),
        ("mlp", []),
        ("mlp", ["model.pca=6"]),
        ("embedding_bag", []),
    ],
)
def test_a_tree_from_a_file_draws_by_the_law_of_the_file(tmp_path, write_tree, model, settings):
    run, train, valid = case(model, "tree", *settings)
    path, tree = write_tree(train)
    run.sampler.path = str(path)
    trainer = Trainer(run, train, valid, tmp_path / "run")
    batch = train.batch(rows(3, 0, 7))
    with torch.no_grad():
        h, features = trainer.encoder.encode(batch)
    law = trainer.head.sampler.log_prob_all(h if features is None else features)
    torch.testing.assert_close(law, tree.log_prob_all(dense_rows(train)[[3, 0, 7]]), atol=2e-4, rtol=2e-4)
    assert trainer.fit().status == "finished"
    path.unlink()  # the run has the tree now
    encoder, head, _, _ = load_model(tmp_path / "run", "latest")
    with torch.no_grad():
        h, features = encoder.encode(batch)
    again = head.sampler.log_prob_all(h if features is None else features)
    torch.testing.assert_close(again, law, atol=1e-5, rtol=1e-5)
    assert Trainer.resume(tmp_path / "run", train, valid, settings=["training.epochs=3"]).fit().status == "finished"


def test_a_tree_of_hidden_states_from_a_file_is_fitted_anew(tmp_path, write_tree):
    settings = ["sampler.features=hidden", "sampler.refit_steps=5", "training.steps=5"]
    run, train, valid = case("mlp", "tree", *settings)
    path, tree = write_tree(train, x=torch.randn(len(train), 8, generator=torch.Generator().manual_seed(0)))
    run.sampler.path = str(path)
    trainer = Trainer(run, train, valid, tmp_path / "run")
    assert torch.equal(trainer.head.sampler.nodes, tree.nodes)
    trainer.fit()
    assert torch.equal(trainer.head.sampler.nodes, tree.nodes)
    trainer = Trainer.resume(tmp_path / "run", train, valid, settings=["training.steps=6"])
    trainer.fit()
    assert not torch.equal(trainer.head.sampler.nodes, tree.nodes)


def test_files_that_hold_no_fitting_tree(tmp_path, write_tree):
    run, train, _ = case("linear", "tree")
    other = tmp_path / "other.safetensors"

    def fails(path, match, *settings):
        changed = config.override(run, [f"sampler.path={path}", *settings])
        with pytest.raises(ConfigError, match=match):
            build(changed, train)

    fails(tmp_path / "none", r"\[sampler\] path must be a file of samplex fit-tree, got .*none.: .*No such file")
    other.write_text("nothing")
    fails(other, "is not a safetensors file")
    checkpoint.write_tensors(other, {"x": torch.zeros(2)})
    fails(other, "path must be a file of samplex fit-tree")
    path, _ = write_tree(train)
    fails(path, "a tree over 6 components, as sampler.dim says, got 4", "sampler.dim=6")
    path, _ = write_tree(train, x=torch.randn(len(train), 5))
    fails(path, "a tree over 10 features, as the input, got 5")
    with pytest.raises(ConfigError, match="path must be empty unless the sampler is a tree"):
        config.override(Config(), ["sampler.path=a"])
    with pytest.raises(ConfigError, match="refit_every must be 0 with a tree from a file"):
        config.override(Config(), ["sampler.name=tree", "sampler.path=a", "sampler.refit_every=1"])


# ---------------------------------------------------------------------------------------------------- refits
def test_the_tree_of_a_mixture_is_fitted_anew_and_nothing_else():
    components = 'sampler.components=["unigram", "tree", "uniform"]'
    settings = [components, "sampler.weights=[1, 2, 1]", "sampler.features=hidden", "sampler.dim=4"]
    run, train, _ = case("mlp", "mixture", *settings)
    encoder, head = build(run, train)
    before = {name: t.clone() for name, t in head.state_dict().items()}
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.add_(0.3)
    models.refit_tree(run, train, encoder, head)
    changed = {name for name, t in head.state_dict().items() if not torch.equal(t, before[name])}
    assert "sampler.samplers.1.nodes" in changed
    assert all(name.startswith("sampler.samplers.1.") for name in changed)
    assert list(head.state_dict()) == list(before)


def test_refits_come_when_they_are_due(tmp_path):
    run, train, valid = case("lstm", "tree", "sampler.refit_steps=4", "sampler.dim=4", "training.steps=9")
    seen = []
    trainer = Trainer(
        run, train, valid, tmp_path / "run", on_event=lambda e: seen.append(e.get("step")) if e["event"] == "fit" else 0
    )
    trainer.fit()
    assert seen == [None, 4, 8]
    with pytest.raises(ConfigError, match="refit_steps must be 0 unless the sampler is a tree"):
        config.override(Config(), ["sampler.refit_steps=2"])


# ---------------------------------------------------------------------------------------------------- known positives
def csr_lists(pair):
    offsets, ids = pair
    return [sorted(ids[a:b].tolist()) for a, b in itertools.pairwise(offsets)]


def test_known_positives_of_labelled_rows():
    whole = sparse()
    every = torch.arange(len(whole))
    labels = [[int(v) for v in row if v >= 0] for row in whole.targets(every)]
    assert whole.known(every) is None
    for rule, pick in (("smallest", min), ("first", lambda v: v[0])):
        one = data.Sparse(
            whole.indptr, whole.indices, whole.values, whole._labels.indptr, whole._labels.ids, 40, C, label_rule=rule
        )
        assert one.targets(every).tolist() == [pick(row) for row in labels]
        assert csr_lists(one.known(every)) == [sorted(set(row) - {pick(row)}) for row in labels]
    part = data.Subset(one, rows(5, 2))
    assert csr_lists(part.known(rows(0, 1))) == csr_lists(one.known(rows(5, 2)))
    assert data.Dense(torch.eye(2), rows(0, 1)).known(rows(0)) is None
    assert case("lstm")[1].known(rows(0)) is None


@pytest.mark.parametrize("order", ["time", "none"])
def test_known_items_of_a_user_without_those_of_the_validation_part(order):
    made = interactions()
    whole = data.Interactions(made.indptr, made.items, C, history=4, min_history=2, order=order)
    every = torch.arange(len(whole))
    users, y = whole.users(every).tolist(), whole.targets(every).tolist()
    items = [made.items[a:b].tolist() for a, b in zip(made.indptr[:-1], made.indptr[1:], strict=True)]
    for row, found in enumerate(csr_lists(whole.known(every))):
        wanted = list(items[users[row]])
        wanted.remove(y[row])
        assert found == sorted(wanted)
    train, valid = data.split(whole, (0.6, 0.4), seed=3)
    hidden = {user: [] for user in users}
    for row in valid.rows.tolist():
        hidden[users[row]].append(y[row])
    left = 0
    for row, found in zip(train.rows.tolist(), csr_lists(train.known(torch.arange(len(train)))), strict=True):
        wanted = list(items[users[row]])
        for item in [y[row], *hidden[users[row]]]:
            wanted.remove(item)
        assert found == sorted(wanted)
        left += len(hidden[users[row]])
    assert left > 0  # the parts do share users
    # A part of a part hides what the outer one hides, too.
    inner = data.Subset(train, torch.arange(len(train) // 2))
    used = set(train.rows[inner.rows].tolist())
    for row, found in zip(
        train.rows[inner.rows].tolist(), csr_lists(inner.known(torch.arange(len(inner)))), strict=True
    ):
        others = [y[r] for r in range(len(whole)) if users[r] == users[row] and r not in used]
        wanted = list(items[users[row]])
        for item in [y[row], *others]:
            wanted.remove(item)
        assert found == sorted(wanted)


def test_a_masked_run_is_the_loss_with_positives(tmp_path):
    # All but one class are known: what is drawn can only be masked, or the one that is left.
    items = np.arange(C - 1)
    train = data.Interactions(np.array([0, C - 1]), items, C, history=4, order="none")
    losses = {}
    for mask in ("false", "true"):
        run, _, _ = case("two_tower", "uniform", f"head.mask_known={mask}", "training.steps=1", "training.log_every=1")
        trainer = Trainer(run, train, None, tmp_path / mask)
        before = trainer.head.weight.detach().clone()
        trainer.fit()
        batch = data.Batches(train, 16, seed=0, epoch=0).rows(0)
        moved = (trainer.head.weight.detach() != before).any(1).nonzero()[:, 0].tolist()
        losses[mask] = set(moved) - set(train.targets(batch).tolist())
    assert losses["true"] <= {C - 1}
    assert len(losses["false"]) > 10
    for settings, match in (
        (["head.loss=nce"], "mask_known must be false with loss"),
        (["head.loss=full_softmax"], "mask_known must be false with loss"),
    ):
        with pytest.raises(ConfigError, match=match):
            config.override(Config(), ["head.mask_known=true", *settings])
    run, train, valid = case("lstm", "unigram", "head.mask_known=true")
    with pytest.raises(ConfigError, match="mask_known must be false for these text data"):
        Trainer(run, train, valid, tmp_path / "text")
