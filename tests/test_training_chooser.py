"""`sampler.choose_every`: choices from stored costs and keyed draws, the same after a resume."""

from __future__ import annotations

import json

import pytest
import torch
from training_cases import dense

from samplex_cuda.training import Config, ConfigError, Trainer, chooser, config

WAYS = list(chooser.WAYS)
PLAIN = {"error": 1.0, "batch": 1.0, "leak": 0.0}
# What makes each family the cheapest, so that runs switch whatever this machine's times are.
CHEAP = {name: {way: 0.01 if way == name else 5.0 for way in WAYS} for name in WAYS}


def settings(**more):
    given = {
        "sampler.choose_every": 4, "sampler.num_codes": 4, "sampler.num_features": 32, "training.batch_size": 16,
        "training.steps": 12, "training.epochs": 5, "training.plot": "false", "training.eval_every": 100, **more
    }  # fmt: skip
    return config.override(Config(), [f"{key}={value}" for key, value in given.items()])


def run(folder, costs, steps=12, **more):
    folder.mkdir()
    trainer = Trainer(settings(**more, **{"training.steps": steps}), dense(), None, folder)
    (folder / "costs.json").write_text(json.dumps({"costs": costs, "look_ms": 1e-4}))
    trainer.fit()
    return trainer


@pytest.mark.parametrize("way", WAYS[1::3])
def test_a_run_takes_the_cheapest_way(tmp_path, way, monkeypatch):
    monkeypatch.setattr(chooser, "LEAKY", 2.0)
    trainer = run(tmp_path / "a", CHEAP[way], steps=6)
    head, c = trainer.head, trainer.chooser.config_of(way)
    assert trainer.chooser.present == way
    assert (head.num_samples, head.shared, head.stratified) == (c.head.num_samples, c.head.shared, c.head.stratified)
    told = json.loads((tmp_path / "a" / "choices.json").read_text())
    assert [(one["step"], one["way"]) for one in told] == [(4, way)]
    assert "ms of a step" in told[0]["reason"]


@pytest.mark.parametrize("way", ["tree, per row, 64", "midx, stratified, 1024"])
def test_a_resumed_run_has_the_same_bits(tmp_path, way, monkeypatch):
    monkeypatch.setattr(chooser, "LEAKY", 2.0)
    whole = run(tmp_path / "a", CHEAP[way])
    run(tmp_path / "b", CHEAP[way], steps=6)
    (tmp_path / "b" / "costs.json").unlink()  # costs are in the checkpoint too: nothing is measured again
    monkeypatch.setattr(chooser.timing, "measure", lambda *_: pytest.fail("measured after a resume"))
    again = Trainer.resume(tmp_path / "b", dense(), settings=["training.steps=12"])
    assert again.chooser.present == way
    again.fit()
    for (name, one), (_, other) in zip(whole.head.state_dict().items(), again.head.state_dict().items(), strict=True):
        assert torch.equal(one, other), name
    assert again.chooser.history == whole.chooser.history


def test_the_same_costs_give_the_same_choices(tmp_path):
    costs = {way: 1.0 + 0.1 * place for place, way in enumerate(WAYS)}
    one, other = run(tmp_path / "a", costs), run(tmp_path / "b", costs)
    assert one.chooser.history == other.chooser.history
    assert [entry["step"] for entry in one.chooser.history] == [4, 8]


def test_costs_are_measured_once_and_bound_how_often_it_looks(tmp_path):
    folder = tmp_path / "a"
    trainer = Trainer(settings(), dense(), None, folder)
    trainer.fit()
    stored = json.loads((folder / "costs.json").read_text())
    assert set(stored["costs"]) == set(WAYS)
    assert min(stored["costs"].values()) > 0
    assert stored["look_ms"] > 0
    assert trainer.chooser.interval * min(stored["costs"].values()) * 0.02 >= stored["look_ms"]


# ------------------------------------------------------------------------------------------------ the choice
def test_the_least_time_for_equal_noise_wins():
    looks = {"a": PLAIN | {"error": 3.0}, "b": PLAIN | {"error": 0.5}}
    assert chooser.best_way(looks, {"a": 1.0, "b": 2.0}, "a")[0] == "b"
    assert chooser.best_way(looks, {"a": 1.0, "b": 4.0}, "b")[0] == "a"
    assert chooser.best_way(looks, {"a": 1.0, "b": 2.5}, "a")[0] == "a"  # not clearly better


def test_what_leaks_is_barred():
    looks = {"a": PLAIN, "b": PLAIN | {"leak": 0.11}}
    way, reason = chooser.best_way(looks, {"a": 100.0, "b": 1.0}, "b")
    assert way == "a"
    assert reason.endswith("barred for leak: b")
    assert (
        chooser.best_way({"a": PLAIN | {"leak": 0.4}, "b": PLAIN | {"leak": 0.3}}, {"a": 1.0, "b": 9.0}, "a")[0] == "b"
    )


def test_the_error_is_that_of_the_gradient():
    """Against the gradients of the library, over many draws."""
    import samplex_cuda as sx

    torch.manual_seed(0)
    h, y, m = torch.randn(12, 6), torch.randint(40, (12,)), 10
    sampler = sx.samplers.LogUniform(40)
    head = sx.SampledClassifier(6, 40, sampler, num_samples=m, bias=False)
    with torch.no_grad():
        head.weight.copy_(torch.randn(40, 6))
    weight = head.weight.detach().clone().requires_grad_()
    (full,) = torch.autograd.grad(sx.functional.full_softmax(h, weight, y), weight)
    full = full.to_dense()
    for shared in (False, True):
        total = estimate = 0.0
        for number in range(160):
            key = torch.tensor([5, number])

            def draw(key, shared=shared):
                if shared:
                    return sampler.sample(h, m, shared=True, key=key)
                return sampler.sample(h, m, exclude=y, key=key)

            drawn = draw(key)
            loss = sx.functional.sampled_softmax(h, weight, y, drawn.ids, drawn.log_q)
            (some,) = torch.autograd.grad(loss, weight)
            total += float((some.to_dense() - full).square().sum()) / 160
            if number < 20:
                estimate += chooser.gradient_noise(head, h, y, draw, m, 12, torch.tensor([9, number]))[0] / 20
        assert abs(estimate / total - 1.0) < 0.2


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"head.loss": "nce"}, "choose_every must be 0 unless the loss is a plain sampled_softmax"),
        ({"head.num_samples": 7}, 'name must be "auto" with sampler.choose_every'),
        ({"sampler.candidates": '["tree"]'}, "candidates must be unigram and others of"),
    ],
)
def test_what_cannot_be_is_refused(bad, words):
    with pytest.raises(ConfigError, match=words):
        settings(**bad)
