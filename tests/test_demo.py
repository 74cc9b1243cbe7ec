"""The demo, the examples and the examples inside docstrings all run."""

from __future__ import annotations

import doctest
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from samplex_cuda import demo
from samplex_cuda.data import HierarchicalZipf

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("module", ["heads.classifier", "heads.exact", "prediction", "data.synthetic", "demo"])
def test_docstring_examples(module):
    result = doctest.testmod(importlib.import_module(f"samplex_cuda.{module}"))
    assert result.attempted > 0
    assert result.failed == 0


def run_script(*arguments):
    done = subprocess.run(
        [sys.executable, "-W", "error", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_sharded_example(tmp_path):
    """Two ranks train and save, three continue with what they saved."""
    found = []
    for ranks, steps, more in ((2, 50, ()), (3, 10, ("--resume",))):
        text = run_script(
            "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", ranks,
            ROOT / "examples/train_sharded.py", "--steps", steps, "--folder", tmp_path / "run", *more,
        )  # fmt: skip
        assert f"{ranks} ranks, {-(-20_000 // ranks):,} of 20,000 classes on rank 0" in text
        found.append(tuple(map(float, re.search(r"exact NLL ([\d.]+), recall@10 ([\d.]+)", text).groups())))
    (loss, recall), (loss_after, _) = found
    assert loss < 5.0  # log of 20,000 classes is 9.9
    assert recall > 0.5
    assert loss_after < loss


# A small run of both losses; the rest of this file looks at its results.
@pytest.fixture(scope="module")
def results(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo") / "deep" / "run"
    text = run_script(
        "-m", "samplex_cuda.demo", "--quick", "--classes", 2000, "--dim", 16, "--batch-size", 64, "--num-samples", 32,
        "--seconds", 60, "--steps", 60, "--out", out,
    )  # fmt: skip
    return out, text, json.loads((out / "results.json").read_text())


def test_demo_writes_what_it_says(results):
    out, text, report = results
    assert sorted(path.name for path in out.iterdir()) == ["curves.png", "results.json"]
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "curves.png").stat().st_size > 10_000
    assert [run["name"] for run in report["runs"]] == [demo.FULL, demo.SAMPLED]
    assert report["settings"]["classes"] == 2000
    for heading in ("time per", "encoder", "time to", "peak", "accuracy"):
        assert heading in text
    assert re.search(r"Sampled softmax (reached|took)", text)


def test_both_runs_learn(results):
    _, _, report = results
    for run in report["runs"]:
        assert run["step"][-1] == 60
        assert run["seconds"] == sorted(run["seconds"])
        assert run["accuracy"][-1] > 0.2
        assert 0 < run["encoder_milliseconds"] < run["step_milliseconds"]
    full, sampled = report["runs"]
    # The same initial values: equal accuracy before the first step.
    assert full["accuracy"][0] == sampled["accuracy"][0]


def test_full_run_is_plain_torch():
    """The run called full softmax is nn.Linear + cross_entropy + Adagrad on the same stream, nothing else."""
    data = HierarchicalZipf(300, 8, 10_000, num_valid=300)
    run = demo.train(demo.FULL, data, width=8, batch_size=32, num_samples=4, seconds=60, steps=20, seed=5)
    torch.manual_seed(5)
    body = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.LayerNorm(8))
    head = nn.Linear(8, 300)
    optimizer = torch.optim.Adagrad([*body.parameters(), *head.parameters()], lr=0.1)
    for step, (x, y) in enumerate(data.batches("train", 32)):
        if step == 20:
            break
        optimizer.zero_grad()
        F.cross_entropy(head(body(x)), y).backward()
        optimizer.step()
    x, y = data.split("valid")
    accuracy = (head(body(x)).argmax(1) == y).double().mean().item()
    assert run.accuracy[-1] == pytest.approx(accuracy, abs=0.011)  # a near-tie may fall either way


def test_clock_stops_the_run():
    data = HierarchicalZipf(300, 8, 10_000, num_valid=50)
    seen = []
    run = demo.train(
        demo.SAMPLED,
        data,
        width=8,
        batch_size=32,
        num_samples=4,
        seconds=0.2,
        progress=lambda *state: seen.append(state),
    )
    assert 0.2 <= run.seconds[-1] == seen[-1][1]
    assert seen[-2][1] < 0.2
    assert run.step[-1] == len(seen)
    with pytest.raises(ValueError, match="name must be 'full softmax' or 'sampled softmax', got 'half'"):
        demo.train("half", data, width=8, batch_size=32, num_samples=4, seconds=1)


def test_compare():
    full = demo.Run(demo.FULL, seconds=[0.0, 10.0, 20.0], accuracy=[0.0, 0.3, 0.457])
    sampled = demo.Run(demo.SAMPLED, seconds=[0.0, 1.0, 2.0], accuracy=[0.0, 0.2, 0.6])
    result = demo.compare(full, sampled)
    assert result == {"accuracy": 0.45, "full_seconds": 20.0, "sampled_seconds": 2.0, "speedup": 10.0}
    assert demo._sentence(result) == "Sampled softmax reached 45 % accuracy in 2 s instead of 20 s."
    # Told as it is where it loses, and where there is nothing to tell.
    assert (
        demo._sentence(demo.compare(sampled, full))
        == "Sampled softmax took 20 s to reach 45 % accuracy, full softmax 2 s."
    )
    nothing = demo.Run(demo.FULL, seconds=[0.0], accuracy=[0.0])
    assert "Too short" in demo._sentence(demo.compare(nothing, sampled))


def test_missing_extra_gives_advice(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert demo.main(["--out", str(tmp_path / "x")]) == 1
    assert "pip install 'samplex-cuda[demo]'" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("arguments", [["--classes", "0"], ["--seconds", "-1"], ["--steps", "0"], ["--seconds", "nan"]])
def test_bad_arguments(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        demo.main(arguments)
    assert stopped.value.code == 2
    assert "must be" in capsys.readouterr().err


def test_half_written_files_are_never_seen(tmp_path):
    path = tmp_path / "results.json"
    path.write_text("old")

    def fail(temporary):
        temporary.write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        demo._replace(path, fail)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_negatives_example():
    text = run_script(ROOT / "examples/negatives.py", "--steps", 150)
    found = dict(re.findall(r"(\S+) +recall@20 ([\d.]+)%", text))
    assert len(found) == 6
    assert float(found["in-batch"]) > float(found["uncorrected"])  # the correction pays
