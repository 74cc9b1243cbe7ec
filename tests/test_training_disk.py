"""The trainer on bad disks and in folders that it cannot use: what stays of a run, and what it says."""

from __future__ import annotations

import errno
import json
import os
import re

import pytest
import torch
from training_cases import case

from samplex_cuda.training import (
    CheckpointError,
    Config,
    RunError,
    Trainer,
    checkpoint,
    config,
    load_model,
    read_metrics,
    run_folder,
)


def fail_writes(monkeypatch, after):
    real, count = os.write, 0

    def full(*args):
        nonlocal count
        count += 1
        if count > after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*args)

    monkeypatch.setattr(os, "write", full)


def test_a_full_disk_stops_the_run_and_keeps_the_checkpoint_before(tmp_path, monkeypatch):
    run, train, valid = case("linear", "quadratic")
    Trainer(run, train, valid, tmp_path / "whole").fit()
    trainer = Trainer(run, train, valid, tmp_path / "run")
    seen = []

    def on_event(event):
        seen.append(event)
        if event["event"] == "checkpoint":
            fail_writes(monkeypatch, after=3)

    trainer.on_event = on_event
    with pytest.raises(CheckpointError, match=r"checkpoint-00000008: could not be saved: no space for it"):
        trainer.fit()
    monkeypatch.undo()
    assert seen[-1]["event"] == "checkpoint_failed"
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["checkpoint-00000004"]
    Trainer.resume(tmp_path / "run", train, valid).fit()
    (a, _), (b, _) = (checkpoint.load(checkpoint.latest(tmp_path / name)) for name in ("whole", "run"))
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_full_disk_may_be_lived_with(tmp_path, monkeypatch):
    run, train, _ = case("linear", "uniform", "training.on_save_error=continue")
    failures = []
    trainer = Trainer(run, train, None, tmp_path / "run")

    def on_event(event):
        if event["event"] == "progress" and event["step"] == 6:
            fail_writes(monkeypatch, after=0)
        if event["event"] == "progress" and event["step"] == 9:
            monkeypatch.undo()
        if event["event"] == "checkpoint_failed":
            failures.append(event["step"])

    trainer.on_event = on_event
    assert trainer.fit().status == "finished"
    assert failures == [8]
    assert [int(p.name[-8:]) for p in checkpoint.list_checkpoints(tmp_path / "run")] == [4, 12, 16]


@pytest.mark.parametrize("choice", ["stop", "continue"])
def test_a_full_disk_leaves_no_half_record(tmp_path, monkeypatch, choice):
    run, train, valid = case("linear", "uniform", f"training.on_save_error={choice}", "training.checkpoint_every=100")
    trainer = Trainer(run, train, valid, tmp_path / "run")
    warnings, real = [], os.write

    def full(handle, piece):  # room for ten bytes, then none
        if len(piece) > 10:
            return real(handle, bytes(piece)[:10])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def on_event(event):
        if event["event"] == "progress" and event["step"] in (5, 7):
            monkeypatch.setattr(os, "write", full if event["step"] == 5 else real)
        if event["event"] == "warning":
            warnings.append(event["message"])

    trainer.on_event = on_event
    reason = r"run/metrics\.jsonl: cannot be written to \(No space left on device\)"
    if choice == "stop":
        with pytest.raises(RunError, match=reason):
            trainer.fit()
        monkeypatch.undo()
        assert [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()] == [
            3
        ]
        return
    assert trainer.fit().status == "finished"
    [warning] = [text for text in warnings if "the exact NLL" not in text]
    assert re.search(reason + "; the record of step 6 is lost", warning)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in lines if r["kind"] == "train"] == [3, 9, 12, 15, 16]


def test_a_failed_sync_of_the_metrics_is_a_failed_checkpoint(tmp_path, monkeypatch):
    run, train, valid = case("linear", "uniform", "training.on_save_error=continue", "training.epochs=1")
    failed = []
    trainer = Trainer(run, train, valid, tmp_path / "run")
    trainer.on_event = lambda event: failed.append(event) if event["event"] == "checkpoint_failed" else None

    def broken(handle):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", broken)
    assert trainer.fit().status == "finished"
    assert [event["step"] for event in failed] == [4, 8, 8]  # two checkpoints, and the best weights
    assert all("could not be saved: " in event["reason"] for event in failed)
    assert "Input/output error" in failed[0]["reason"]


def test_a_run_folder_that_became_unwritable(tmp_path, monkeypatch):
    run, train, valid = case()
    trainer = Trainer(run, train, valid, tmp_path / "run")
    # As root a read-only folder is writable all the same: a folder in the way of a file serves as well.
    (tmp_path / "run" / ".lock").mkdir()
    for use in (trainer.fit, lambda: Trainer.resume(tmp_path / "run", train, valid)):
        with pytest.raises(RunError, match=r"run: cannot be written to \(Is a directory\)"):
            use()
    (tmp_path / "run" / ".lock").rmdir()
    (tmp_path / "run" / "plots").rmdir()
    (tmp_path / "run" / "plots").write_text("")
    with pytest.raises(RunError, match=r"run: cannot be written to \(File exists\)"):
        Trainer.resume(tmp_path / "run", train, valid)


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    fcntl = pytest.importorskip("fcntl")

    def none(*args):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", none)
    run, train, valid = case()
    assert Trainer(run, train, valid, tmp_path / "run").fit().status == "finished"


def test_metrics_with_garbage_in_them(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"kind": "train", "step": 3}\n\xff\xfe\0\0\n[1]\n{"kind": "eval", "st')
    assert read_metrics(tmp_path) == [{"kind": "train", "step": 3}]


def test_folders_that_cannot_be_used(tmp_path):
    run, train, valid = case()
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"file/run: cannot be written to \(Not a directory\)"):
        Trainer(run, train, valid, tmp_path / "file" / "run")
    Trainer(run, train, valid, tmp_path / "run")
    with pytest.raises(RunError, match=r"already contains a run; resume it with Trainer.resume"):
        Trainer(run, train, valid, tmp_path / "run")
    with pytest.raises(RunError, match=r"none: has no config.toml"):
        Trainer.resume(tmp_path / "none")
    with pytest.raises(RunError, match="has no checkpoint"):
        load_model(tmp_path / "run")


def test_one_process_a_run(tmp_path):
    run, train, valid = case()
    trainer = Trainer(run, train, valid, tmp_path / "run")
    with run_folder.lock(trainer.run_dir), pytest.raises(RunError, match="another process is training in it"):
        Trainer.resume(tmp_path / "run", train, valid)


def test_data_that_are_gone(tmp_path):
    run = config.override(Config(), [f"data.path={tmp_path / 'gone.svm'}"])
    with pytest.raises(FileNotFoundError, match=r"gone\.svm"):
        Trainer(run, run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()
