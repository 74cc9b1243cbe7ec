"""Keys of a run about negatives: a learned scale, mining from an index, the estimator of in-batch frequencies."""

from __future__ import annotations

import math

import pytest
import torch
from training_cases import case

import samplex_cuda.index
from samplex_cuda.samplers import InBatch
from samplex_cuda.training import Config, ConfigError, Trainer, config


class Exhaustive:
    """A stand-in for an index of FAISS: exact search over the rows of the moment."""

    made = 0

    def __init__(self, head, kind, **options):
        Exhaustive.made += 1
        assert kind == "hnsw"
        assert options == {}
        self.weight, self.bias = head.weight.detach().clone(), head.bias.detach().clone()

    def topk(self, h, k):
        return (h @ self.weight.T + self.bias).topk(k, dim=1)


def run_whole_and_in_two(tmp_path, *settings):
    """A run of two epochs, and one that is resumed after the first."""
    run, train, valid = case("mlp", "unigram", "training.epochs=2", *settings)
    whole = Trainer(run, train, valid, tmp_path / "whole")
    assert whole.fit().status == "finished"
    half, _, _ = case("mlp", "unigram", "training.epochs=1", *settings)
    first = Trainer(half, train, valid, tmp_path / "parts")
    assert first.fit().status == "finished"
    second = Trainer.resume(tmp_path / "parts", train, valid, settings=["training.epochs=2"])
    assert second.fit().status == "finished"
    return whole, first, second


def test_a_learned_scale_is_trained_and_resumed(tmp_path):
    whole, first, second = run_whole_and_in_two(
        tmp_path, "head.learn_scale=true", "head.scale=4", "optimizer.encoder_lr=0.01", "training.clip_norm=5"
    )
    head = whole.head
    assert head.bias is None
    assert abs(head.log_scale.item() - math.log(4)) > 1e-3
    assert torch.equal(head.log_scale, second.head.log_scale)
    assert not torch.equal(head.log_scale, first.head.log_scale)
    assert torch.equal(head.weight, second.head.weight)
    assert all(p is not head.log_scale for g in whole.optimizers["head"].param_groups for p in g["params"])
    (group,) = [g for g in whole.optimizers["encoder"].param_groups if any(p is head.log_scale for p in g["params"])]
    assert group["weight_decay"] == 0.0


def test_an_index_serves_so_many_steps_and_ends_at_a_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(samplex_cuda.index, "ClassIndex", Exhaustive)
    settings = ("head.hard=4", "head.hard_source=index", "head.hard_index=hnsw", "head.hard_refresh=3")
    for every, made in ((100, 3), (4, 4)):  # at the steps 0, 3 and 6; at 0, 3, 4 and 7
        Exhaustive.made = 0
        run, train, valid = case("mlp", "unigram", "training.epochs=1", f"training.checkpoint_every={every}", *settings)
        trainer = Trainer(run, train, valid, tmp_path / f"every_{every}")
        assert trainer.fit().status == "finished"
        assert trainer.progress.step == 8
        assert Exhaustive.made == made
    whole, _, second = run_whole_and_in_two(tmp_path, *settings, "training.checkpoint_every=5")
    assert torch.equal(whole.head.weight, second.head.weight)


@pytest.mark.parametrize("kind", ["gap", "sketch"])
def test_how_frequencies_are_estimated(tmp_path, kind):
    settings = ("sampler.name=in_batch", f"sampler.frequency={kind}", "sampler.frequency_rate=0.1",
                "sampler.frequency_buckets=17", "head.num_samples=20", "training.epochs=1")  # fmt: skip
    run, train, valid = case("mlp", "uniform", *settings)
    trainer = Trainer(run, train, valid, tmp_path / "run")
    sampler = trainer.head.sampler
    assert isinstance(sampler, InBatch)
    assert (sampler.frequency.kind, sampler.frequency.rate, sampler.frequency.num_buckets) == (kind, 0.1, 17)
    assert trainer.fit().status == "finished"
    again = Trainer.resume(tmp_path / "run", train, valid)
    assert torch.equal(again.head.sampler.frequency.log_q(torch.arange(60)), sampler.frequency.log_q(torch.arange(60)))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (["head.learn_scale=true", "head.scale=-1"], "learn_scale must be false with scale <= 0"),
        (["head.learn_scale=true", "training.shard=classes"], "learn_scale must be false with scale <= 0"),
        (["head.learn_scale=true", "sampler.choose_every=5"], "choose_every must be 0 unless"),
        (["head.hard=2", "head.hard_source=index", "training.shard=classes"], "hard_source must be pool or exact"),
        (["sampler.frequency=exact"], "frequency must be one of"),
        (["sampler.frequency_rate=0"], "frequency_rate must be a number above 0"),
        (["head.unique=true", "sampler.name=tree"], "unique must be false with the sampler tree"),
    ],
)
def test_what_is_refused(changes, match):
    with pytest.raises(ConfigError, match=match):
        config.override(Config(), changes).check()
