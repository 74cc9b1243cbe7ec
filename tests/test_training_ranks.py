"""`training.shard`: runs on several gloo ranks against each other and against one process."""

from __future__ import annotations

import pytest
import torch
from training_cases import case

from samplex_cuda.training import CheckpointError, RunError, Trainer, checkpoint, evaluate, load_model, read_metrics
from samplex_cuda.training.state import is_sharded, load_state

CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def records(folder):
    return [{k: v for k, v in record.items() if k != "seconds"} for record in read_metrics(folder)]


def last(folder):
    """Names and numbers of the newest checkpoint, whole."""
    return load_state(checkpoint.latest(folder))


def same(one, other, exact=False):
    (a, meta_a), (b, meta_b) = last(one), last(other)
    rng = {name for name in {*a, *b} if name.startswith("rng.")}  # one process keeps it, ranks make it from the step
    assert set(a) - rng == set(b) - rng
    for name in sorted(set(a) - rng):
        if exact:
            assert torch.equal(a[name], b[name]), name
        else:
            torch.testing.assert_close(a[name], b[name], msg=lambda text, name=name: f"{name}: {text}", **CLOSE)
    progress = [{k: v for k, v in meta["progress"].items() if k not in ("seconds", "loss_sum", "best")}
                for meta in (meta_a, meta_b)]  # fmt: skip
    assert progress[0] == progress[1]


def test_a_linear_model_has_the_same_bits_on_any_number_of_ranks(ranks, tmp_path):
    for world in (1, 2, 4):
        found = ranks.run(world, "run_trainer", str(tmp_path / f"{world}"), "linear", "unigram", [])
        assert [rank["status"] for rank in found] == ["finished"] * world
        assert len({tuple(rank["metrics"].items()) for rank in found}) == 1
        assert sum(rank["rows"] for rank in found) == 60
    trained = [[r for r in records(tmp_path / f"{world}") if r["kind"] == "train"] for world in (1, 2, 4)]
    assert trained[0] == trained[1] == trained[2]
    assert len(trained[0]) == 6  # one rank writes, and writes once
    same(tmp_path / "1", tmp_path / "2", exact=True)
    same(tmp_path / "1", tmp_path / "4", exact=True)


# model, sampler, settings
CASES = {
    "ddp": ("mlp", "tree", ["model.dropout=0", "training.accumulate=2", "training.clip_norm=0.5"]),
    "fsdp": ("mlp", "log_uniform", ["model.dropout=0", "training.shard_encoder=fsdp", "training.clip_norm=0.5"]),
    "average": ("mlp", "uniform", ["model.dropout=0", "training.average=swa", "training.average_head=true"]),
    "tree refitted": ("mlp", "tree_default", ["model.dropout=0", "sampler.refit_steps=5", "sampler.features=hidden"]),
    "unfused": ("mlp", "uniform", ["model.dropout=0", "optimizer.fused=false", "optimizer.name=adam"]),
    "augment_reduce": ("linear", "uniform", ["head.loss=augment_reduce"]),
    "sparse rows, several targets": ("embedding_bag", "unigram", ["model.sparse=false"]),
    "text": ("lstm", "bigram", ["model.dropout=0", "model.sparse=false"]),
    "interactions": ("two_tower", "unigram", ["model.dropout=0", "head.mask_known=true",
                                              "training.exclude_history=true",
                                              'training.metrics=["nll","recall@5","ndcg@5","mrr"]']),
    "row gradients, fsdp": ("lstm", "uniform", ["model.dropout=0", "training.shard_encoder=fsdp",
                                                "training.clip_norm=0.5", "training.accumulate=2"]),
    "average, fsdp": ("mlp", "uniform", ["model.dropout=0", "training.shard_encoder=fsdp", "training.average=ema",
                                         "training.average_decay=0.9", "training.average_head=true"]),
    "clipped head": ("mlp", "uniform", ["model.dropout=0", "training.clip_norm=0.05", "training.clip_head=true"]),
    "clipped head, fsdp": ("mlp", "uniform", ["model.dropout=0", "training.clip_norm=0.05", "training.clip_head=true",
                                              "training.shard_encoder=fsdp"]),
    "negatives of the data": ("mlp", "uniform", ["model.dropout=0", "data.negatives=named"]),
    "sphere": ("mlp", "uniform", ["model.dropout=0", "head.normalize=true", "head.scale=8", "head.margin_m2=0.2"]),
    "in batch": ("mlp", "uniform", ["model.dropout=0", "sampler.name=in_batch", "head.shared=true"]),
    "unique and hard": ("mlp", "unigram", ["model.dropout=0", "head.unique=true", "head.shared=true", "head.hard=3",
                                           "head.hard_pool=20"]),
    "hard, exact": ("mlp", "uniform", ["model.dropout=0", "head.hard=3", "head.hard_source=exact",
                                       "training.accumulate=2"]),
    "codes": ("mlp", "midx", ["model.dropout=0", "sampler.num_codes=8", "sampler.update=2"]),
    "full softmax": ("mlp", "uniform", ["model.dropout=0", "head.loss=full_softmax", 'training.metrics=["nll","mrr"]']),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_ranks_go_on_as_one_process(ranks, tmp_path, name):
    """A run of one process, taken over by 3 ranks at step 4 and by 2 at step 8; and one process to the end."""
    model, sampler, settings = CASES[name]
    settings = [*settings, "training.epochs=9", "training.eval_every=4"]
    run, data, valid = case(model, sampler, *settings, "training.steps=4")
    folders = {which: tmp_path / which for which in ("whole", "parts")}
    for folder in folders.values():
        Trainer(run, data, valid, folder).fit()
    Trainer.resume(folders["whole"], data, valid, settings=["training.steps=12"]).fit()
    for world, steps in ((3, 8), (2, 12)):
        more = [*settings, "training.shard=classes", f"training.steps={steps}"]
        found = ranks.run(world, "run_trainer", str(folders["parts"]), model, sampler, more, True)
        assert {rank["step"] for rank in found} == {steps}
        assert is_sharded(checkpoint.latest(folders["parts"]))
    same(folders["whole"], folders["parts"])
    one, several = ([r for r in records(folder) if r.pop("kind") == "eval"] for folder in folders.values())
    assert [record["step"] for record in one] == [4, 8, 12]
    for a, b in zip(one, several, strict=True):
        a.pop("leak", None)  # ranks do not compute it: it looks at all classes
        b.pop("leak", None)
        assert a == pytest.approx(b, rel=1e-4, abs=1e-5)
    # What one process makes of the folder: the metrics that the ranks had.
    encoder, head, config, _ = load_model(folders["parts"], "latest")
    t = config.training
    alone = evaluate(encoder, head, valid, batch_size=16, metrics=t.metrics, exclude_history=t.exclude_history)
    assert alone == pytest.approx(found[0]["metrics"], rel=1e-4)


# Their trees are over slots, in another order than in one process: other draws of the same kind.
FOLLOWING = {
    "quadratic": ("quadratic", []),
    "random features and a base": ("rff_default", ["optimizer.fused=false", "training.accumulate=2"]),
    "softmax": ("softmax", []),
}


@pytest.mark.filterwarnings("ignore:random_fourier")
@pytest.mark.parametrize("name", FOLLOWING)
def test_samplers_that_follow_the_class_table(ranks, tmp_path, name):
    sampler, settings = FOLLOWING[name]
    settings = ["model.dropout=0", "training.epochs=9", *settings]
    for world in (1, 3):
        args = (str(tmp_path / f"{world}"), "mlp", sampler, [*settings, "training.steps=6"])
        found = ranks.run(world, "run_trainer", *args)
        assert {rank["status"] for rank in found} == {"finished"}
    if sampler != "softmax":  # of which another number of ranks makes other draws
        same(tmp_path / "1", tmp_path / "3")
    # One process continues with it, and two ranks with what that has left.
    run, data, valid = case("mlp", sampler, *settings)
    encoder, head, _, _ = load_model(tmp_path / "3", "latest")
    assert evaluate(encoder, head, valid, metrics=["nll"]) == pytest.approx(
        {"nll": found[0]["metrics"]["nll"]}, rel=1e-4
    )
    more = ["training.shard=none", "training.steps=8"]
    assert Trainer.resume(tmp_path / "3", data, valid, settings=more).fit().step == 8
    more = [*settings, "training.shard=classes", "training.steps=10"]
    (step,) = {rank["step"] for rank in ranks.run(2, "run_trainer", str(tmp_path / "3"), "mlp", sampler, more, True)}
    assert step == 10
    assert run.sampler.name in ("quadratic", "rff", "softmax")


def test_bfloat16(ranks, tmp_path):
    settings = ["training.precision=bfloat16", "head.dtype=bfloat16"]
    for world in (1, 3):
        ranks.run(world, "run_trainer", str(tmp_path / f"{world}"), "linear", "uniform", settings)
    same(tmp_path / "1", tmp_path / "3", exact=True)


def test_dropout_goes_on_where_it_was(ranks, tmp_path):
    """Torch's generator is a function of seed, step and rank: a resumed run has the same bits."""
    settings = ["training.shard_encoder=fsdp", "training.epochs=9"]
    ranks.run(2, "run_trainer", str(tmp_path / "whole"), "mlp", "uniform", [*settings, "training.steps=11"])
    ranks.run(2, "run_trainer", str(tmp_path / "parts"), "mlp", "uniform", [*settings, "training.steps=8"])
    more = [*settings, "training.shard=classes", "training.steps=11"]
    ranks.run(2, "run_trainer", str(tmp_path / "parts"), "mlp", "uniform", more, True)
    same(tmp_path / "whole", tmp_path / "parts", exact=True)


# ------------------------------------------------------------------------------------------------ refusals
def test_ranks_with_other_settings_stop_before_anything_is_written(ranks, tmp_path):
    folder = tmp_path / "run"
    args = (str(folder), "linear", "uniform", ["optimizer.lr=0.3"], 2)
    for message in ranks.run(3, "trainer_message", *args):
        assert message.startswith("RanksError: agree: all ranks must have the same configuration")
        assert message.endswith("got optimizer.lr = 0.1 on ranks 0, 1 and 0.3 on rank 2")
    assert not folder.exists()


def test_one_rank_refuses_for_all(ranks, tmp_path):
    ranks.run(2, "run_trainer", str(tmp_path), "linear", "uniform", ["training.steps=2"])
    found = ranks.outcomes(2, "run_trainer", str(tmp_path), "linear", "uniform", [])
    assert "already contains a run" in found[0][0]
    assert found[1][0].startswith("RanksError: ")
    assert "already contains a run" in found[1][0]
    found = ranks.outcomes(4, "run_trainer", str(tmp_path / "b"), "linear", "uniform", ["training.batch_size=3"])
    assert all("batch_size, the total of all ranks, must be at least 4" in error for error, _ in found)


def test_a_loss_that_is_not_finite_stops_every_rank(ranks, tmp_path):
    found = ranks.outcomes(2, "run_trainer", str(tmp_path), "mlp", "uniform", ["optimizer.encoder_lr=1e30"])
    assert all(error.startswith("NonFiniteLossError: trainer: step ") for error, _ in found)
    assert len(list((tmp_path / "nan").glob("*-rank-*.safetensors"))) == 2


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("model.tied=true", "[model] tied must be false"),
        ("head.hard=2,head.hard_source=tree,sampler.name=tree", "[head] hard_source must be pool or exact"),
    ],
)
def test_settings_that_cannot_be_sharded(setting, words):
    settings = ["training.shard=classes", "training.clip_norm=1", "head.num_samples=6", *setting.split(",")]
    with pytest.raises(ValueError, match=r"with training\.shard") as caught:
        case("gru", "uniform", *settings)
    assert words in str(caught.value)


def test_damage_is_found_and_set_aside(ranks, tmp_path):
    ranks.run(2, "run_trainer", str(tmp_path), "linear", "uniform", ["training.steps=9"])
    newest = checkpoint.latest(tmp_path)
    shard = sorted(newest.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="is damaged"):
        checkpoint.verify(newest)
    more = ["training.shard=classes", "training.steps=10"]
    found = ranks.run(2, "run_trainer", str(tmp_path), "linear", "uniform", more, True)
    assert found[0]["step"] == 10
    assert [path.name for path in (tmp_path / "damaged").iterdir()] == [newest.name]


def test_a_run_of_ranks_needs_no_torchrun_with_one_rank(tmp_path):
    run, data, valid = case("mlp", "uniform", "training.shard=classes", "training.steps=5")
    trainer = Trainer(run, data, valid, tmp_path)
    try:
        assert trainer.ranks.world == 1
        assert trainer.fit().status == "finished"
        with pytest.raises(RunError, match="already contains a run"):
            Trainer(run, data, valid, tmp_path)
    finally:
        trainer.ranks.close()
    assert not torch.distributed.is_initialized()
