"""The tree of a run with its base: judged on held-out examples, fitted again, read from old checkpoints, watched."""

from __future__ import annotations

import json
import warnings

import numpy as np
import pytest
import torch

import samplex_cuda as sx
from samplex_cuda import data, samplers
from samplex_cuda.training import Config, Trainer, build, config
from samplex_cuda.training.models import refit_tree
from samplex_cuda.training.sampler_factory import refit_epochs

C = 60


def rows(noise: float, count: int = 1200):
    """Zipf classes whose centers are as far apart as `noise` leaves of them."""
    rng = np.random.default_rng(0)
    chances = 1 / np.arange(1, C + 1) ** 1.5
    y = rng.choice(C, count, p=chances / chances.sum())
    x = np.random.default_rng(1).standard_normal((C, 6))[y] / noise + rng.standard_normal((count, 6))
    return data.Dense(torch.from_numpy(x).float(), torch.from_numpy(y), num_classes=C)


def settings(*more: str) -> Config:
    return config.override(Config(), ["model.name=linear", "sampler.name=tree", "sampler.dim=6", *more])


def test_a_good_tree_has_half_of_the_draws():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, head = build(settings(), rows(0.2))
    assert float(head.sampler.base_share) == 0.5
    again = build(settings(), rows(0.2))[1]
    assert torch.equal(again.sampler.nodes, head.sampler.nodes)  # the split follows from the seed
    other = build(settings("training.seed=5"), rows(0.2))[1]
    assert not torch.equal(other.sampler.nodes, head.sampler.nodes)


@pytest.mark.parametrize("model", ["linear", "mlp"])
def test_a_tree_worse_than_frequencies_falls_back_to_the_base(model):
    train = rows(1e9)  # x says nothing of y
    run = settings("sampler.reg=1e-6", f"model.name={model}")
    with pytest.warns(
        UserWarning, match=r"tree: on 120 held-out examples its mean log-probability is .* alone until a later fit"
    ):
        encoder, head = build(run, train)
    assert float(head.sampler.base_share) == 1.0
    base = samplers.Unigram(train.class_counts() + 1)
    x = torch.randn(3, head.sampler.num_features)
    torch.testing.assert_close(head.sampler.log_prob_all(x), base.log_prob_all().expand(3, -1))
    if model == "linear":
        refit_tree(settings(), rows(0.2), encoder, head)
        assert float(head.sampler.base_share) == 0.5


def test_a_tree_of_hidden_states_is_fitted_anew_every_epoch():
    train = rows(0.2)
    for more, want in (
        (["model.name=mlp", "sampler.features=hidden"], 1),
        (["model.name=mlp"], 0),
        ([], 0),
        (["model.name=mlp", "sampler.features=hidden", "sampler.base=none"], 0),
        (["model.name=mlp", "sampler.features=hidden", "sampler.refit_every=3"], 3),
    ):
        run = settings(*more)
        encoder, _ = build(run, train)
        assert refit_epochs(run, train, encoder) == want


def test_checkpoints_with_a_mixture_in_python_are_read():
    train = rows(0.2)
    _, head = build(settings(), train)
    _, old = build(settings("sampler.base=none"), train)
    old.set_sampler(samplers.Mixture([(old.sampler, 0.5), (samplers.Unigram(train.class_counts() + 1), 0.5)]))
    with torch.no_grad():
        old.weight.normal_()
    head.load_state_dict(old.state_dict())
    x = torch.randn(4, 6)
    torch.testing.assert_close(head.sampler.log_prob_all(x), old.sampler.log_prob_all(x))
    assert torch.equal(head.weight, old.weight)


def test_the_log_has_the_leak_and_a_resumed_run_its_tree(tmp_path):
    run = settings("training.epochs=1", "training.batch_size=64", "head.shared=false", "head.num_samples=8",
                   "training.plot=false")  # fmt: skip
    trainer = Trainer(run, rows(0.2), rows(0.2, 200), tmp_path / "run", on_event=lambda event: None)
    trainer.fit()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    leaks = [line["leak"] for line in lines if line.get("kind") == "eval"]
    assert leaks
    assert all(0.0 <= leak <= 0.2 for leak in leaks)
    assert leaks[-1] == pytest.approx(trainer.leak, abs=1e-6)
    again = Trainer.resume(tmp_path / "run", rows(0.2), rows(0.2, 200))
    x = torch.randn(5, 6)
    for kind in (False, True):
        a, b = (t.head.sampler.sample(x, 9, key=sx.Key(1), shared=kind) for t in (again, trainer))
        assert torch.equal(a.ids, b.ids)
        assert torch.equal(a.log_q, b.log_q)
