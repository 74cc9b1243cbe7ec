"""From data to predictions on a CUDA device: train, stop, resume with the same bits, evaluate, predict, diagnose."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from cli_cases import one_thread, samplex  # noqa: F401
from training_cases import case

import samplex_cuda as sx
from samplex_cuda import _native
from samplex_cuda.cli.predict import top
from samplex_cuda.diagnostics import run as diagnostics
from samplex_cuda.training import Trainer, checkpoint, evaluate, load_model, read_metrics

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (torch.cuda.is_available() and _native.build_info()["cuda"]),
        reason="needs a CUDA device and a build with CUDA kernels",
    ),
]


@pytest.fixture(autouse=True)
def few_draws(monkeypatch):
    """The numbers are tested on the CPU; these are for emulated devices, where a draw takes its time."""
    monkeypatch.setattr(diagnostics, "POOL", 1 << 11)


SHORT = ("training.epochs=1", "training.checkpoint_every=2", "training.batch_size=24", "data.valid_fraction=0")
CASES = [
    ("linear", "uniform", ()),
    ("linear", "tree", ()),
    ("linear", "tree", ("head.shared=true", "head.num_samples=40")),
    ("linear", "tree", ("head.shared=true", "head.num_samples=40", "head.stratified=true")),
    ("mlp", "quadratic", ()),  # dropout: torch's generator of the device is part of a checkpoint
    ("embedding_bag", "quadratic", ("sampler.update=epoch",)),
    ("linear", "mixture", ("training.average=ema", "training.average_head=true")),
    ("two_tower", "unigram", ("head.mask_known=true", "optimizer.name=adam")),
    ("linear_pca", "tree", ("sampler.refit_steps=2",)),  # a fit reads the host's data through maps of the device
    ("two_tower", "tree", ("sampler.refit_steps=2",)),
    ("mlp", "tree", ("model.pca=5", "sampler.refit_steps=2")),
    ("mlp", "tree", ("sampler.features=hidden", "sampler.refit_steps=2")),
    ("mlp", "uniform", ("training.precision=bfloat16",)),
    ("linear", "rff", ("optimizer.fused=false", "training.clip_norm=1.0")),
]


class StopError(Exception):
    """What a test throws out of a run, as a crash would."""


def crash(event):
    if event["event"] == "progress" and event["step"] == 3:
        raise StopError


def last(run_dir):
    return checkpoint.load(checkpoint.latest(run_dir))[0]


@pytest.mark.parametrize(
    ("model", "sampler", "settings"), CASES, ids=lambda v: v if isinstance(v, str) else "-".join(v)
)
def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(tmp_path, model, sampler, settings):
    run, train, valid = case(model, sampler, *SHORT, *settings, "training.device=cuda")
    whole = Trainer(run, train, valid, tmp_path / "whole")
    assert {p.device.type for p in [*whole.encoder.parameters(), *whole.head.parameters()]} == {"cuda"}
    assert {t.device.type for t in whole.head.sampler.state_dict().values()} <= {"cuda"}
    start = whole.head.weight.detach().clone()
    result = whole.fit()
    assert result.status == "finished"
    assert result.step >= 4
    assert not torch.equal(start, whole.head.weight)
    assert whole.head.weight.device.type == "cuda"

    with pytest.raises(StopError):
        Trainer(run, train, valid, tmp_path / "parts", on_event=crash).fit()
    torch.manual_seed(12345)  # of the device, too
    again = Trainer.resume(tmp_path / "parts", train, valid)
    assert again.progress.step == 2
    assert again.fit().metrics == result.metrics
    a, b = last(tmp_path / "whole"), last(tmp_path / "parts")
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []

    # A run of the device is read anywhere: the same metrics by the CPU's kernels.
    found = {}
    for device in ("cuda", "cpu"):
        encoder, head, _, _ = load_model(tmp_path / "parts", "latest", device=device)
        assert head.weight.device.type == device
        found[device] = evaluate(encoder, head, valid, batch_size=24, metrics=["nll", "accuracy", "precision@3"])
    for name, value in found["cpu"].items():
        assert found["cuda"][name] == pytest.approx(value, rel=1e-4, abs=1e-6)


def test_the_generators_of_the_caller_stay_as_they_were(tmp_path):
    torch.manual_seed(7)
    before = torch.get_rng_state(), torch.cuda.get_rng_state()
    run, train, valid = case("mlp", "uniform", *SHORT, "training.device=cuda")
    trainer = Trainer(run, train, valid, tmp_path / "run")
    assert torch.equal(torch.cuda.get_rng_state(), before[1])
    trainer.fit()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.equal(torch.cuda.get_rng_state(), before[1])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_the_second_device(tmp_path):
    """Everything is there, and the seed is of its generator (dropout)."""
    weights = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        run, train, valid = case("mlp", "quadratic", *SHORT, "training.device=cuda:1")
        trainer = Trainer(run, train, valid, tmp_path / str(seed))
        assert trainer.fit().status == "finished"
        assert trainer.head.weight.device == torch.device("cuda:1")
        weights.append(trainer.head.weight.detach().cpu())
    assert torch.equal(*weights)


@pytest.mark.parametrize("sampler", ["uniform", "unigram", "log_uniform"])
def test_the_device_trains_as_the_cpu_does(tmp_path, sampler):
    """Static draws are the same bits everywhere, so the runs differ by rounding alone."""
    nll = {}
    for device in ("cpu", "cuda"):
        run, train, valid = case("linear", sampler, *SHORT, f"training.device={device}", "training.log_every=1")
        Trainer(run, train, valid, tmp_path / device).fit()
        records = read_metrics(tmp_path / device)
        nll[device] = [r["loss"] for r in records if r["kind"] == "train"]
    assert len(nll["cpu"]) >= 4
    assert nll["cuda"] == pytest.approx(nll["cpu"], rel=1e-4)
    a, b = last(tmp_path / "cpu"), last(tmp_path / "cuda")
    torch.testing.assert_close(a["head.weight"], b["head.weight"], rtol=1e-3, atol=1e-5)


def test_known_items_are_no_answers(tmp_path):
    """Histories are on the host, scores on the device."""
    run, train, valid = case("two_tower", "uniform", *SHORT, "training.device=cuda")
    Trainer(run, train, valid, tmp_path / "run").fit()
    found, answers = {}, {}
    for device in ("cuda", "cpu"):
        encoder, head, _, _ = load_model(tmp_path / "run", "latest", device=device)
        names = ["recall@5", "ndcg@5", "mrr"]
        found[device] = evaluate(encoder, head, valid, batch_size=7, metrics=names, exclude_history=True)
        rows = torch.arange(6)
        h, features = encoder.encode({name: t.to(device) for name, t in valid.batch(rows).items()})
        answers[device] = top(head, h, features, 4, valid.seen(rows))
    assert found["cuda"] == pytest.approx(found["cpu"], rel=1e-5)
    torch.testing.assert_close(answers["cuda"][0], answers["cpu"][0])
    torch.testing.assert_close(answers["cuda"][1], answers["cpu"][1], rtol=1e-4, atol=1e-6)
    offsets, known = valid.seen(torch.arange(6))
    for row, ids in enumerate(answers["cuda"][0].tolist()):
        assert not set(ids) & set(known[offsets[row] : offsets[row + 1]].tolist())


@pytest.mark.parametrize("sampler", ["uniform", "tree", "quadratic"])
def test_the_commands_take_the_device(tmp_path, sampler):
    """train, evaluate, predict and diagnose of one run, by the command line."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 40, 96)
    x = (rng.normal(size=(40, 6))[y] + 0.3 * rng.normal(size=(96, 6))).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=x, y=y)
    np.save(tmp_path / "x.npy", x[:10])
    options = ["training.device=cuda", "training.epochs=2", "training.batch_size=32", "head.num_samples=8"]
    options += ["sampler.dim=4", 'training.metrics=["nll", "precision@1"]', "training.plot=false"]
    out = tmp_path / "run"
    words = ["train", "--data", tmp_path / "data.npz", "--model", "linear", "--sampler", sampler]
    words += [word for option in options for word in ("--set", option)]
    trained = json.loads(samplex(*words, "--out", out, "--json").stdout)
    assert trained["status"] == "finished"

    answers, metrics = {}, {}
    for device in ("cuda", "cpu"):
        text = samplex("evaluate", out, "--device", device, "--json").stdout
        metrics[device] = json.loads(text)["metrics"]
        target = tmp_path / f"{device}.npz"
        samplex("predict", out, tmp_path / "x.npy", "--out", target, "--device", device, "-k", 3)
        answers[device] = dict(np.load(target))
    assert metrics["cuda"] == pytest.approx(metrics["cpu"], rel=1e-4)
    for name, values in answers["cpu"].items():
        np.testing.assert_allclose(answers["cuda"][name], values, rtol=1e-4)

    words = ["diagnose", out, "--rows", 16, "--num-samples", 4, "--json"]
    there = json.loads(samplex(*words, "--device", "cuda").stdout)
    here = json.loads(samplex(*words, "--device", "cpu").stdout)
    assert [law["name"] for law in there["samplers"]] == [law["name"] for law in here["samplers"]]
    assert there["full_ms"] > 0
    for a, b in zip(there["samplers"], here["samplers"], strict=True):
        for name in ("kl", "tv", "ess_share", "log_q_min", "log_q_max", "log_ratio_max"):
            assert a[name] == pytest.approx(b[name], rel=2e-3, abs=1e-4), (a["name"], name)
        assert all(point["step_ms"] > 0 for point in a["points"])


def test_diagnose_a_head_in_training():
    """Sampler that lags, shared draws, a tree on features of its own: all of it stays on the device."""
    head = sx.SampledClassifier(6, 50, sx.samplers.Quadratic(torch.randn(50, 6)), 5, bias=False, sampler_update=None)
    head = head.cuda()
    head.sampler.rebuild(head.weight)
    head.fuse_optimizer(sx.optim.RowAdagrad(head.parameters(), lr=0.5))
    h, y = torch.randn(40, 6, device="cuda"), torch.randint(50, (40,), device="cuda")
    for _ in range(2):
        head(h, y).backward()
    before = head.weight.detach().clone()
    found = sx.diagnostics.diagnose(head, h, y=y, num_samples=(4,), class_counts=torch.bincount(y, minlength=50))
    assert [law.name for law in found.samplers] == [
        "Uniform",
        "Quadratic",
        "Unigram",
        "RandomFourier",
        "Unigram, shared",
    ]
    assert any("Quadratic: stale" in text for text in found.warnings)
    assert torch.equal(before, head.weight)
    tree = sx.samplers.Tree.fit(torch.randn(90, 7), torch.randint(50, (90,)), num_classes=50, dim=3, progress=False)
    shared = sx.SampledClassifier(6, 50, tree, 5, shared=True).cuda()
    found = sx.diagnostics.diagnose(
        shared, h, y=y, features=torch.randn(40, 7, device="cuda"), num_samples=(4,), timed=False, exact=False
    )
    assert found.samplers[1].own
    assert found.samplers[1].points[0].bias > 0
