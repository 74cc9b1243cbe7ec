"""The command line: every command on small data, its files, exit codes, messages and JSON."""

from __future__ import annotations

import json
import lzma
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("rich")

from cli_cases import one_thread, samplex  # noqa: F401  the first is a fixture of every test

import samplex_cuda as sx
from samplex_cuda import cli
from samplex_cuda.cli import common
from samplex_cuda.cli import train as training
from samplex_cuda.training import checkpoint, load_model, read_metrics

COMMANDS = [
    "train",
    "evaluate",
    "predict",
    "export",
    "fit-tree",
    "diagnose",
    "bench",
    "reproduce",
    "info",
    "demo",
    "config",
]
DATA = "builtin:classes=200,dim=8,examples=1200"


def as_json(*words, code=0):
    found = json.loads(samplex(*words, "--json", code=code).stdout)
    assert found["exit_code"] == code
    return found


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("run") / "a"
    settings = ["training.epochs=2", "training.log_every=2", "training.plot=false"]
    found = as_json("train", "--data", DATA, "--out", folder, *(w for s in settings for w in ("--set", s)))
    assert found["status"] == "finished"
    return folder


# ------------------------------------------------------------------------------------------------ help, usage
@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(command):
    text = samplex(command, "--help").stdout
    assert f"Example: samplex {command}" in re.sub(r"\s+", " ", text)
    assert "--json" in text


def test_every_command_is_listed():
    text = samplex("--help").stdout
    for command in COMMANDS:
        assert re.search(rf"\b{command}\b", text)


@pytest.mark.parametrize(
    "words",
    [
        ["train"],
        ["train", "--no-such-option"],
        ["train", "--resume", "a", "--out", "b"],
        ["train", "--resume", "a", "--format", "xc"],
        ["train", "--resume", "a", "--skip-bad", "0"],
        ["predict", "a"],
        ["evaluate", "a", "--which", "worst"],
        ["no-such-command"],
    ],
)
def test_wrong_usage_ends_with_2(words):
    samplex(*words, code=2)


def test_usage_of_resume_names_every_option_it_takes():
    text = samplex("train", "--resume", "a", "--out", "b", code=2).stderr
    assert all(option in text for option in ("--set", "--data", "--valid", "--restart", "--grow", "--trust-model"))


def test_without_the_extra(monkeypatch, capsys):
    find = cli.importlib.util.find_spec
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None if name == "typer" else find(name))
    assert cli.main(["info"]) == 1
    assert "pip install 'samplex-cuda[cli]'" in capsys.readouterr().err


def test_main_returns_the_exit_code(capsys):
    assert cli.main(["train", "--data", "no/such/file.txt"]) == 1
    assert "no/such/file.txt: there is no such file" in capsys.readouterr().err
    assert cli.main(["config", "--json"]) == 0


# ------------------------------------------------------------------------------------------------ errors
def test_errors_of_the_user_have_no_traceback(tmp_path):
    bad = tmp_path / "bad.toml"
    bad.write_text("[model]\nnmae = 'mlp'\n")
    cases = {
        "did you mean": ["train", bad, "--data", DATA],
        "does not exist": ["train", tmp_path / "no.toml", "--data", DATA],
        "is not valid TOML": ["train", _write(tmp_path / "x.toml", "[model\n")],
        "path must be": ["train", _write(tmp_path / "y.toml", "[model]\ndim = 3\n")],
        "no such file": ["train", "--data", tmp_path / "no.txt"],
        "must be one of": ["train", "--data", DATA, "--sampler", "magic"],
        "no such run": ["evaluate", tmp_path / "no"],
        "no config.toml": ["evaluate", tmp_path],
        "no run to resume": ["train", "--resume", tmp_path / "no"],
        "table.key=value": ["train", "--data", DATA, "--set", "epochs"],
        "has no option": ["train", "--data", "builtin:colour=3"],
        "the device must be cpu or cuda, got 'abacus'": ["train", "--data", DATA, "--set", "training.device=abacus"],
        "CUDA devices of this machine, got 'cuda:99'": ["train", "--data", DATA, "--set", "training.device=cuda:99"],
        "the cache folder": ["train", "--data", _write(tmp_path / "x.svm", "1 1:1\n"), "--set",
                             f"data.options.cache_dir={bad}"],
    }  # fmt: skip
    for number, (text, words) in enumerate(cases.items()):
        out = ["--out", tmp_path / f"run-{number}"] if words[0] == "train" and "--resume" not in words else []
        result = samplex(*words, *out, code=1)
        assert text in result.stderr, (words, result.stderr)
        assert "Traceback" not in result.output
        assert text in as_json(*words, *out, code=1)["error"]


def test_a_model_that_does_not_fit_is_no_bug(tmp_path):
    words = ["train", "--data", DATA, "--model", "mlp", "--set", f"model.dim={2**38}", "--out", tmp_path / "a"]
    result = samplex(*words, code=1)
    assert "samplex train: there is not enough memory (" in result.stderr
    assert "Traceback" not in result.output


def test_a_bad_line_names_file_and_line_and_can_be_skipped(tmp_path):
    lines = [f"{i % 5} {i % 7}:1 {7 + i % 3}:0.5" for i in range(40)]
    lines[16] = "9 1:1"  # a label that the header does not know
    file = _write(tmp_path / "train.txt", "\n".join(["40 10 5", *lines]) + "\n")
    words = ["train", "--data", file, "--model", "embedding_bag", "--set", "model.dim=4", "--set", "training.epochs=1",
             "--set", "head.num_samples=3"]  # fmt: skip
    error = as_json(*words, "--out", tmp_path / "a", code=1)["error"]
    assert "train.txt:18:" in error
    found = as_json(*words, "--out", tmp_path / "b", "--skip-bad", "1")
    assert found["status"] == "finished"
    assert any("18" in warning for warning in found["warnings"])


def test_a_folder_with_a_run_is_refused(run_dir):
    error = as_json("train", "--data", DATA, "--out", run_dir, code=1)["error"]
    assert common.resume_command(run_dir) in error


def test_a_bug_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr("samplex_cuda.info.gather_info", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        samplex("info")


def _write(path, text):
    path.write_text(text)
    return path


# ------------------------------------------------------------------------------------------------ train
def test_train_keeps_a_run_folder(run_dir):
    for name in ("config.toml", "environment.json", "metrics.jsonl", "checkpoints"):
        assert (run_dir / name).exists()
    records = read_metrics(run_dir)
    assert [r["step"] for r in records if r["kind"] == "train"] == [2, 4, 6, 8, 10]


def test_train_prints_progress_and_where_things_are(tmp_path):
    text = samplex(
        "train", "--data", DATA, "--out", tmp_path / "a", "--sampler", "quadratic", "--set", "training.epochs=1",
        "--set", "training.log_every=1", "--set", "training.threads=2",
    ).stdout  # fmt: skip
    assert re.search(r"step 2/5  epoch 1/1  loss [\d.]+  [\d.,]+ steps/s  ETA [\d:]+  sampler \d+ steps? old", text)
    assert "valid: nll" in text
    for name in ("metrics.jsonl", "curves.png", "checkpoints", "best"):
        assert str(tmp_path / "a") in text
        assert name in text


def test_configuration_file_and_settings(tmp_path):
    file = _write(tmp_path / "run.toml", f'[data]\npath = "{DATA}"\n[training]\nepochs = 7\nsteps = 3\nplot = false\n')
    found = as_json("train", file, "--loss", "full_softmax", "--set", "training.steps=2", "--out", tmp_path / "a")
    assert (found["step"], found["status"]) == (2, "finished")
    text = (tmp_path / "a" / "config.toml").read_text()
    assert 'loss = "full_softmax"' in text
    assert "epochs = 7" in text


def test_resume_goes_on_to_the_same_weights(run_dir, tmp_path):
    same = ["--data", DATA, "--set", "training.log_every=2", "--set", "training.plot=false"]
    first = as_json("train", *same, "--set", "training.epochs=2", "--set", "training.steps=3", "--out", tmp_path / "a")
    assert first["step"] == 3
    second = as_json("train", "--resume", tmp_path / "a", "--set", "training.steps=0")
    assert (second["started_at"], second["step"]) == (3, 10)
    _, whole, _, _ = load_model(run_dir, "latest")
    _, resumed, _, _ = load_model(tmp_path / "a", "latest")
    assert torch.equal(whole.weight, resumed.weight)
    again = samplex("train", "--resume", tmp_path / "a")
    assert "nothing left to do" in again.stdout


def test_a_loss_that_is_not_finite_ends_with_3(tmp_path):
    x = np.ones((40, 3), np.float32)
    x[:, 1] = 3e38
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", np.arange(40) % 9)
    words = ["train", "--data", tmp_path / "x.npy", "--out", tmp_path / "a", "--set", "optimizer.lr=1e30",
             "--set", "optimizer.name=sgd", "--set", "head.num_samples=3"]  # fmt: skip
    result = samplex(*words, code=3)
    assert f"{common.resume_command(tmp_path / 'a')} --set" in result.stdout
    assert list((tmp_path / "a" / "nan").glob("*.safetensors"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_says_how_to_go_on(tmp_path, number):
    words = [sys.executable, "-m", "samplex_cuda.cli", "train", "--data", DATA, "--out", "a run", "--json",
             "--set", "training.epochs=99999", "--set", "training.log_every=5",
             "--set", "training.plot=false"]  # fmt: skip
    path = os.pathsep.join([str(Path(sx.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        words,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    try:
        end = time.monotonic() + 240
        while not read_metrics(tmp_path / "a run"):
            assert time.monotonic() < end
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.05)
        process.send_signal(number)
        out, err = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == 128 + number, err
    found = json.loads(out)
    assert found["status"] == "interrupted"
    assert found["resume"] == "samplex train --resume 'a run'"
    assert found["resume"] in err
    assert checkpoint.latest(tmp_path / "a run").name == checkpoint.directory_name(found["step"])
    more = found["step"] + 2
    resumed = as_json("train", "--resume", tmp_path / "a run", "--set", f"training.steps={more}")
    assert (resumed["started_at"], resumed["step"]) == (found["step"], more)


def test_live_line_on_a_terminal():
    import io

    from rich.console import Console

    out = common.Output(False)
    out.console, out.live = Console(file=io.StringIO(), force_terminal=True, width=160), True
    with training.Display(out) as display:
        display.name, display.follows = "rff", True
        display({"event": "start", "step": 0, "steps": 40, "epochs": 2, "run_dir": "a", "fused": True})
        for step in (1, 21):
            time.sleep(training._REDRAW)
            display({"event": "progress", "step": step, "steps": 40, "epoch": step // 20, "loss": 2.5, "stale": 3})
        display({"event": "eval", "step": 20, "nll": 1.5, "seconds": 1.0, "best": False})
        display({"event": "no such event"})
    text = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", out.console.file.getvalue())
    assert "epoch 2/2" in text
    assert "step 21/40" in text
    assert "loss 2.5" in text
    assert re.search(r"[\d.,]+ steps/s ETA 0:0\d", text)
    assert "rff 3 steps old" in text
    assert "valid: nll 1.5" in text


# ------------------------------------------------------------------------------------------------ evaluate
def test_evaluate_gives_the_metrics_of_training(run_dir):
    last = [r for r in read_metrics(run_dir) if r["kind"] == "eval"][-1]
    found = as_json("evaluate", run_dir, "--which", "latest", "--metrics", "nll,accuracy, precision@3,mrr,psp@2")
    assert found["metrics"]["nll"] == pytest.approx(last["nll"], rel=1e-5)
    assert found["metrics"]["accuracy"] == last["accuracy"]
    assert set(found["metrics"]) == {"nll", "accuracy", "precision@3", "mrr", "psp@2"}
    other = as_json("evaluate", run_dir, "--data", DATA + ",split=test", "--rows", "300")
    assert other["metrics"]["nll"] != found["metrics"]["nll"]
    assert (found["examples"], other["examples"]) == (120, 512)  # whole batches
    assert "accuracy" in samplex("evaluate", run_dir, "--part", "train").stdout
    assert "must be" in as_json("evaluate", run_dir, "--metrics", "precision@0", code=1)["error"]
    assert "8 features" in as_json("evaluate", run_dir, "--data", "builtin:classes=200,dim=9", code=1)["error"]


# ------------------------------------------------------------------------------------------------ predict
@pytest.fixture(scope="module")
def rows(run_dir):
    """x [25, 8] and what the model says of it, computed plainly."""
    x = torch.randn(25, 8, generator=torch.Generator().manual_seed(3))
    _, head, _, _ = load_model(run_dir)
    p, ids = torch.softmax(x @ head.weight.T + head.bias, 1).detach().topk(4)
    return x.numpy(), ids.numpy(), p.numpy()


def _arrays(path):
    found = np.load(path, allow_pickle=False)
    ids, p = found["ids"], found["probabilities"]
    if path.suffix == ".npz":
        found.close()
    return ids, p


def _check(ids, p, rows):
    np.testing.assert_array_equal(ids, rows[1])
    np.testing.assert_allclose(p, rows[2], rtol=1e-4, atol=2e-7)


@pytest.mark.parametrize("suffix", [".jsonl", ".npz", ".npy", ".parquet"])
def test_predict_writes_ids_and_probabilities(run_dir, rows, tmp_path, suffix):
    np.save(tmp_path / "rows.npy", rows[0])
    target = tmp_path / f"top{suffix}"
    if suffix == ".parquet":
        parquet = pytest.importorskip("pyarrow.parquet")
    found = as_json("predict", run_dir, tmp_path / "rows.npy", "--out", target, "-k", 4, "--batch-size", 7)
    assert (found["rows"], found["k"]) == (25, 4)
    if suffix == ".jsonl":
        records = [json.loads(line) for line in target.read_text().splitlines()]
        assert [r["row"] for r in records] == list(range(25))
        _check([r["ids"] for r in records], [r["probabilities"] for r in records], rows)
    elif suffix == ".parquet":
        table = parquet.read_table(target).to_pydict()
        assert table["row"] == list(range(25))
        _check(table["ids"], table["probabilities"], rows)
    else:
        _check(*_arrays(target), rows)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["rows.npy", target.name]  # nothing half-written


def test_predict_reads_files_without_labels(run_dir, rows, tmp_path):
    np.savez(tmp_path / "rows.npz", x=rows[0].astype(np.float64))
    samplex("predict", run_dir, tmp_path / "rows.npz", "--out", tmp_path / "a.npz", "-k", 4)
    _check(*_arrays(tmp_path / "a.npz"), rows)
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pa.table({"x": list(rows[0])}), tmp_path / "rows.parquet")
    samplex("predict", run_dir, tmp_path / "rows.parquet", "--out", tmp_path / "b.npz", "-k", 4)
    _check(*_arrays(tmp_path / "b.npz"), rows)


def test_predict_says_what_does_not_fit(run_dir, tmp_path):
    np.save(tmp_path / "narrow.npy", np.ones((3, 5)))
    np.save(tmp_path / "good.npy", np.ones((3, 8)))
    (tmp_path / "folder.npy").mkdir()
    out = tmp_path / "a.jsonl"
    cases = {
        "must be [N, 8]": [tmp_path / "narrow.npy", "--out", out],
        "no such file": [tmp_path / "no.npy", "--out", out],
        "must end with": [tmp_path / "good.npy", "--out", tmp_path / "a.csv"],
        "there is no folder": [tmp_path / "good.npy", "--out", tmp_path / "no" / "a.jsonl"],
        "is a folder, not a file": [tmp_path / "good.npy", "--out", tmp_path / "folder.npy"],
        "the device must be cpu or cuda, got 'tpu'": [tmp_path / "good.npy", "--out", out, "--device", "tpu"],
        "at most the 200": [tmp_path / "good.npy", "--out", out, "-k", 201],
        "needs a model of interactions": [tmp_path / "good.npy", "--out", out, "--exclude-history"],
    }
    for text, words in cases.items():
        assert text in as_json("predict", run_dir, *words, code=1)["error"]
    assert not out.exists()
    for command in ("evaluate", "diagnose"):
        assert "CUDA devices of this machine" in as_json(command, run_dir, "--device", "cuda:99", code=1)["error"]


def test_an_unwritable_folder_is_said_before_the_work(run_dir, tmp_path, monkeypatch):
    np.save(tmp_path / "good.npy", np.ones((3, 8)))
    monkeypatch.setattr(common.os, "access", lambda path, mode: mode != os.W_OK)
    words = ["predict", run_dir, tmp_path / "good.npy", "--out", tmp_path / "a.npz"]
    assert "cannot be written to" in as_json(*words, code=1)["error"]
    words = ["fit-tree", "--data", DATA, "--out", tmp_path / "tree.safetensors"]
    result = samplex(*words, code=1)
    assert f"the folder {tmp_path} cannot be written to" in result.stderr
    assert "fitting" not in result.output


def test_sparse_files(tmp_path):
    generator = np.random.default_rng(0)
    lines = [
        f"{c} " + " ".join(f"{j}:1" for j in sorted({c, 10 + c, int(generator.integers(20, 30))}))
        for c in generator.integers(0, 10, 200)
    ]
    file = _write(tmp_path / "train.txt", "\n".join(["200 30 10", *lines]) + "\n")
    run = tmp_path / "a"
    words = ["--model", "embedding_bag", "--sampler", "uniform", "--set", "model.dim=8", "--set", "training.epochs=10"]
    as_json("train", "--data", file, *words, "--set", "training.batch_size=20", "--set", "head.num_samples=5",
            "--set", "training.plot=false", "--out", run)  # fmt: skip
    unlabelled = _write(tmp_path / "new.txt", "2 30 10\n 3:1 13:1\n 7:1 17:1\n")
    samplex("predict", run, unlabelled, "--out", tmp_path / "p.jsonl", "-k", 1)
    assert [json.loads(line)["ids"] for line in (tmp_path / "p.jsonl").read_text().splitlines()] == [[3], [7]]
    arrays = {"indptr": [0, 2, 4], "indices": [3, 13, 7, 17], "data": [1.0] * 4, "shape": [2, 30]}
    np.savez(tmp_path / "new.npz", **{name: np.array(value) for name, value in arrays.items()}, format=b"csr")
    samplex("predict", run, tmp_path / "new.npz", "--out", tmp_path / "q.npy", "-k", 1)
    assert np.load(tmp_path / "q.npy")["ids"].tolist() == [[3], [7]]
    assert as_json("evaluate", run, "--data", file)["metrics"]["accuracy"] > 0.9
    assert "dense" in as_json("evaluate", run, "--data", "builtin:classes=10", code=1)["error"]
    found = as_json("fit-tree", "--data", file, "--out", tmp_path / "tree", "--dim", 4, "--option", "labels=first")
    assert found["num_classes"] == 10


def test_features_of_svmlight_count_as_in_training(tmp_path):
    """Without feature 0 a file seems to count from 1; what it is read beside knows better."""
    lines = [f"{i % 4} {i % 4}:1 {4 + i % 3}:0.5" for i in range(80)]
    some = [line for line in lines if " 0:" not in line]
    train, rest = _write(tmp_path / "a.svm", "\n".join(lines)), _write(tmp_path / "b.svm", "\n".join(some))
    run = tmp_path / "run"
    trained = as_json("train", "--data", train, "--valid", rest, "--model", "embedding_bag", "--out", run,
                      "--set", "model.dim=4", "--set", "model.layers=0", "--set", "training.epochs=40",
                      "--set", "head.num_samples=3", "--set", "optimizer.lr=0.5")  # fmt: skip
    assert trained["metrics"]["accuracy"] == 1.0
    assert as_json("evaluate", run, "--data", rest, "--which", "latest")["metrics"] == trained["metrics"]
    for name in (train, rest):
        as_json("predict", run, name, "--out", f"{name}.jsonl", "-k", 1)
    whole, part = ([json.loads(x) for x in Path(f"{n}.jsonl").read_text().splitlines()] for n in (train, rest))
    want = [r["probabilities"] for r, line in zip(whole, lines, strict=True) if " 0:" not in line]
    assert [r["probabilities"] for r in part] == want


def test_a_language_model_goes_on_with_lines(tmp_path):
    _write(tmp_path / "train.tokens", "a b c d\n" * 120)
    run = tmp_path / "a"
    as_json("train", "--data", tmp_path / "train.tokens", "--model", "gru", "--loss", "full_softmax", "--out", run,
            "--set", "model.dim=12", "--set", "training.batch_size=4", "--set", "data.options.window=5",
            "--set", "training.epochs=10", "--set", "optimizer.encoder_lr=0.05",
            "--set", "training.plot=false")  # fmt: skip
    _write(tmp_path / "begin.txt", "a b\n\na b c d\na\nzz a\n")
    found = as_json("predict", run, tmp_path / "begin.txt", "--out", tmp_path / "next.jsonl", "-k", 2)
    assert any("vocabulary" in warning for warning in found["warnings"])
    records = [json.loads(line) for line in (tmp_path / "next.jsonl").read_text().splitlines()]
    assert [r["words"][0] for r in records[:4]] == ["c", "a", "<eos>", "b"]
    assert [r["row"] for r in records] == [0, 1, 2, 3, 4]
    # Compressed, with the line ends of Windows and a mark that is white space but no line end.
    (tmp_path / "begin.txt.xz").write_bytes(lzma.compress("a b\r\n\r\na b\u2028c d\r\na\r\nzz a".encode()))
    as_json("predict", run, tmp_path / "begin.txt.xz", "--out", tmp_path / "again.jsonl", "-k", 2)
    assert (tmp_path / "again.jsonl").read_text() == (tmp_path / "next.jsonl").read_text()
    (tmp_path / "bad.txt").write_bytes(b"a b\nc \xff d\n")
    error = as_json("predict", run, tmp_path / "bad.txt", "--out", tmp_path / "bad.jsonl", code=1)["error"]
    assert "bad.txt:2: byte 3 is not UTF-8" in error
    assert as_json("diagnose", run, "--rows", 20, "--num-samples", 2, "--no-timed", code=0)["rows"] == 20


def test_interactions_leave_known_items_out(tmp_path):
    users = [f"{u} " + " ".join(str((u + i) % 12) for i in range(6)) for u in range(30)]
    file = _write(tmp_path / "train.txt", "\n".join(users) + "\n")
    run = tmp_path / "a"
    as_json("train", "--data", file, "--format", "interactions", "--model", "sequence", "--sampler", "uniform",
            "--out", run, "--set", "model.dim=8", "--set", "head.num_samples=4", "--set", "training.epochs=2",
            "--set", "training.plot=false", "--set", "data.options.history=4")  # fmt: skip
    new = _write(tmp_path / "new.txt", "0 1 2 3\n4 5\n")
    for extra, k in (([], 12), (["--exclude-history"], 10)):
        samplex("predict", run, new, "--out", tmp_path / "p.jsonl", "-k", k, *extra)
        records = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()]
        assert [r["user"] for r in records] == [0, 4]
        assert (1 in records[0]["ids"]) == (not extra)
        known = [3, 1]
        for record, count in zip(records, known, strict=True):
            left = 12 - (count if extra else 0)
            assert len({i for i in record["ids"] if i >= 0}) == min(k, left)
            if not extra:
                assert sum(record["probabilities"]) == pytest.approx(1.0, abs=1e-4)
            assert all(p == 0 for i, p in zip(record["ids"], record["probabilities"], strict=True) if i < 0)


# ------------------------------------------------------------------------------------------------ the others
def test_fit_tree_saves_a_sampler(tmp_path):
    file = tmp_path / "tree.safetensors"
    found = as_json("fit-tree", "--data", DATA, "--out", file, "--dim", 4, "--rows", 800)
    tree = sx.samplers.Tree(**checkpoint.read_tensors(file))
    assert tree.num_classes == 200
    assert tree.num_features == 8
    held = sx.data.split(sx.data.open(DATA), (0.9, 0.1))[1]
    batch = held.batch(torch.arange(len(held)))
    assert float(tree.log_prob(batch["x"], batch["y"][:, None]).mean()) == pytest.approx(
        found["held_out_log_prob"], abs=1e-3
    )
    closed = as_json("fit-tree", "--data", DATA, "--out", tmp_path / "closed.safetensors", "--rows", 60, "--no-unseen")
    assert math.isfinite(closed["held_out_log_prob"])  # examples of classes that training lacks are left out
    tree = sx.samplers.Tree(**checkpoint.read_tensors(tmp_path / "closed.safetensors"))
    assert bool((tree.log_prob_all(torch.zeros(1, tree.num_features)) == -math.inf).any())
    text = samplex("fit-tree", "--data", DATA, "--out", tmp_path / "folder", "--held-out", 0).stdout
    stored = tmp_path / "folder" / "tree.safetensors"
    assert f"--sampler tree --set sampler.path={stored} --set sampler.dim=8" in text
    assert stored.exists()
    settings = [part for name in (f"path={file}", "dim=4") for part in ("--set", f"sampler.{name}")]
    done = as_json("train", "--data", DATA, "--sampler", "tree", *settings, "--out", tmp_path / "run")
    assert done["status"] == "finished"


def test_diagnose_writes_table_plot_and_json(run_dir):
    found = as_json("diagnose", run_dir, "--rows", 32, "--num-samples", 4, "--num-samples", 16)
    assert found["recommendation"]
    saved = json.loads((run_dir / "diagnosis.json").read_text())
    assert [law["name"] for law in saved["samplers"]] == [law["name"] for law in found["samplers"]]
    assert {"Uniform", "Unigram", "Tree + Uniform"} <= {law["name"] for law in found["samplers"]}
    few = as_json("diagnose", run_dir, "--rows", 16, "--num-samples", 4, "--no-timed", "--tree-rows", 0)
    assert "Tree + Uniform" not in {law["name"] for law in few["samplers"]}
    pytest.importorskip("matplotlib")
    assert (run_dir / "plots" / "diagnosis.png").stat().st_size > 1000
    assert "Uniform" in samplex("diagnose", run_dir, "--rows", 16, "--num-samples", 4, "--no-timed").stdout


def test_bench_checks_and_times():
    found = as_json("bench", "--classes", 50, "--classes", 100, "--dim", 4, "--batch-size", 3, "--num-samples", 5,
                    "--seconds", 0)  # fmt: skip
    assert [r["classes"] for r in found["results"]] == [50, 100]
    assert all(r["ours_ms"] > 0 and r["torch_full_ms"] > 0 for r in found["results"])


def test_info_and_config():
    assert as_json("info")["build"]["version"] == sx.__version__
    assert "samplex-cuda" in samplex("info").stdout
    text = samplex("config", "--set", "training.epochs=3").stdout
    assert "epochs = 3" in text
    assert "# " in text
    from samplex_cuda.training import config

    assert config.from_dict(config.files.parse_toml(text, "printed")).training.epochs == 3


def test_demo(tmp_path):
    pytest.importorskip("matplotlib")
    found = as_json("demo", "--out", tmp_path, "--classes", 100, "--dim", 8, "--steps", 3, "--seconds", 0.1)
    assert found["settings"]["classes"] == 100
    assert (tmp_path / "curves.png").exists()
