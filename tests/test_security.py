"""What a folder or file of a stranger must not be able to do: run code, write or delete outside of itself."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys

import pytest
import torch
from cli_cases import one_thread, samplex
from torch import nn

from samplex_cuda.training import CheckpointError, ConfigError, RunError, Trainer, checkpoint, load_model

__all__ = ["one_thread"]

RAN: list[str] = []


class Net(nn.Module):
    """A model by import path."""

    def __init__(self, num_features, mark="built"):
        super().__init__()
        RAN.append(mark)
        self.out_features = num_features
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, batch):
        return batch["x"] * self.scale


def factory(**options):
    """Not a module: it must not even be called."""
    RAN.append("called")
    return Net(8)


DATA = "builtin:classes=40,dim=8,examples=300"


def train(folder, *words, code=0):
    return samplex("train", "--data", DATA, "--out", folder, "--set", "training.epochs=1",
                   "--set", "training.batch_size=64", "--set", "training.plot=false", *words, code=code)  # fmt: skip


@pytest.fixture
def run_dir(tmp_path):
    train(tmp_path / "run")
    return tmp_path / "run"


def forge(run_dir, change):
    """Alters meta.json of every checkpoint, with a manifest that fits: what an attacker would do."""
    for path in [*checkpoint.list_checkpoints(run_dir), *checkpoint.list_checkpoints(run_dir / "best")]:
        meta = json.loads((path / "meta.json").read_text())
        text = json.dumps(change(meta)).encode()
        (path / "meta.json").write_bytes(text)
        manifest = json.loads((path / "manifest.json").read_text())
        manifest["files"]["meta.json"] = {"bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()}
        (path / "manifest.json").write_text(json.dumps(manifest))


def named(name, **options):
    def change(meta):
        meta["config"]["model"] |= {"name": name, "options": options}
        return meta

    return change


@pytest.fixture
def trap(tmp_path, monkeypatch):
    """A module whose import leaves a trace; nothing may import it."""
    trace = tmp_path / "trace"
    (tmp_path / "a_trap.py").write_text(
        f"open({str(trace)!r}, 'w').close()\nimport torch\nclass Net(torch.nn.Identity):\n    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield trace
    sys.modules.pop("a_trap", None)


@pytest.mark.parametrize("command", ["evaluate", "predict", "diagnose", "export", "resume"])
@pytest.mark.parametrize("where", ["meta.json", "both"])
def test_opening_a_run_folder_runs_no_code(run_dir, tmp_path, trap, command, where):
    forge(run_dir, named("a_trap:Net"))
    if where == "both" or command == "resume":
        text = (run_dir / "config.toml").read_text()
        (run_dir / "config.toml").write_text(text.replace('name = "linear"', 'name = "a_trap:Net"'))
    words = {
        "evaluate": ["evaluate", run_dir],
        "predict": ["predict", run_dir, DATA, "--out", tmp_path / "top.jsonl"],
        "diagnose": ["diagnose", run_dir],
        "export": ["export", run_dir, "--out", tmp_path / "served.pt2"],
        "resume": ["train", "--resume", run_dir],
    }[command]
    result = samplex(*words, code=1)
    assert "--trust-model a_trap:Net" in result.stderr
    assert not trap.exists()
    result = samplex(*words, "--trust-model", "some.other:Net", code=1)
    assert "must be the trusted 'some.other:Net', got 'a_trap:Net'" in result.stderr
    assert not trap.exists()


def test_the_checkpoint_must_name_the_model_of_the_configuration(run_dir, trap):
    forge(run_dir, named("a_trap:Net"))
    result = samplex("evaluate", run_dir, "--trust-model", "a_trap:Net", code=1)
    assert "must be that of config.toml, 'linear'" in result.stderr
    assert not trap.exists()


def test_a_configuration_file_runs_no_code_either(tmp_path, trap):
    (tmp_path / "run.toml").write_text(f'[data]\npath = "{DATA}"\n[model]\nname = "a_trap:Net"\n')
    result = samplex("train", tmp_path / "run.toml", "--out", tmp_path / "run", code=1)
    assert "--trust-model a_trap:Net" in result.stderr
    assert not trap.exists()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["os:system", "test_security:factory", "torch.nn:Parameter", "test_security:RAN"])
def test_what_is_no_module_is_not_called(tmp_path, name):
    RAN.clear()
    result = train(tmp_path / "run", "--model", name, code=1)
    assert "must name a subclass of torch.nn.Module" in result.stderr
    assert RAN == []


def test_the_own_word_of_the_user_counts_for_one_command(tmp_path):
    name, folder = "test_security:Net", tmp_path / "run"
    RAN.clear()
    train(folder, "--model", name)  # said on this command line
    assert RAN == ["built"]
    samplex("evaluate", folder, code=1)  # and remembered nowhere
    assert RAN == ["built"]
    samplex("evaluate", folder, "--trust-model", name)
    samplex("train", "--resume", folder, "--set", "training.epochs=2", "--trust-model", name)
    assert RAN == ["built"] * 3
    forge(folder, named(name, mark="of a stranger"))
    result = samplex("evaluate", folder, "--trust-model", name, code=1)
    assert "of a stranger" in result.stderr
    assert RAN == ["built"] * 3
    with pytest.raises(ConfigError, match="trust_model='test_security:Net'"):
        load_model(folder)
    with pytest.raises(ConfigError, match="trust_model='test_security:Net'"):
        Trainer.resume(folder)


# ---------------------------------------------------------------------------------------------------- links
@pytest.fixture
def elsewhere(tmp_path):
    folder = tmp_path / "elsewhere"
    for name in ("checkpoint-00000001", "checkpoint-00000002", ".tmp-mine", ".old-mine"):
        (folder / name).mkdir(parents=True)
        (folder / name / "precious").write_text("mine")
    (folder / "file").write_text("mine")
    return folder


def content(folder):
    return {str(p.relative_to(folder)): p.read_text() if p.is_file() else "" for p in sorted(folder.rglob("*"))}


@pytest.mark.parametrize("name", ["checkpoints", "best", "plots", "nan", "tensorboard", "damaged"])
def test_a_folder_that_is_a_link_is_not_followed(run_dir, elsewhere, name):
    before = content(elsewhere)
    shutil.rmtree(run_dir / name, ignore_errors=True)
    (run_dir / name).symlink_to(elsewhere)
    result = samplex("train", "--resume", run_dir, "--restart", "--set", "training.epochs=3", code=1)
    assert f"{run_dir / name}: is a link to {elsewhere}, outside of the folder" in result.stderr
    assert content(elsewhere) == before
    with pytest.raises(CheckpointError, match="is a link to"):
        load_model(run_dir)


@pytest.mark.parametrize("name", [".lock", "metrics.jsonl"])
def test_a_file_that_is_a_link_is_not_written_to(run_dir, elsewhere, name):
    (run_dir / name).unlink(missing_ok=True)
    (run_dir / name).symlink_to(elsewhere / "file")
    samplex("train", "--resume", run_dir, "--set", "training.epochs=2", code=1)
    assert (elsewhere / "file").read_text() == "mine"


def test_a_new_run_does_not_begin_in_a_linked_folder(tmp_path, elsewhere):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(elsewhere)
    before = content(elsewhere)
    assert "is a link to" in train(tmp_path / "run", code=1).stderr
    assert content(elsewhere) == before


def test_links_among_the_checkpoints_are_refused_and_never_emptied(run_dir, elsewhere):
    before = content(elsewhere)
    whole = checkpoint.list_checkpoints(run_dir)[-1]
    for name in ("checkpoint-99999999", ".tmp-link", ".old-checkpoint-00000007"):
        (run_dir / "checkpoints" / name).symlink_to(elsewhere / "checkpoint-00000001")
    with pytest.warns(UserWarning, match="is a link to"):
        trainer = Trainer.resume(run_dir, settings=["training.epochs=3", "training.keep=1"])
    trainer.fit()
    assert content(elsewhere) == before
    assert whole.name not in [path.name for path in (run_dir / "checkpoints").iterdir()]
    # Files of a checkpoint that are links: what they point to is not read.
    last = checkpoint.list_checkpoints(run_dir)[-1]
    shutil.copytree(last, elsewhere / "copy")
    (last / "meta.json").unlink()
    (last / "meta.json").symlink_to(elsewhere / "copy" / "meta.json")
    with pytest.raises(RunError, match=r"meta.json: is a link to .*copy"):
        Trainer.resume(run_dir)


def test_links_inside_of_the_folder_and_to_it_are_fine(run_dir, tmp_path):
    (run_dir / "checkpoints").rename(run_dir / "kept")
    (run_dir / "checkpoints").symlink_to("kept")
    (tmp_path / "name").symlink_to(run_dir)
    samplex("train", "--resume", tmp_path / "name", "--set", "training.epochs=2")
    assert not (run_dir / "checkpoints" / "checkpoint-00000005").is_symlink()


def test_what_a_kill_left_is_cleaned_everywhere(run_dir):
    left = [run_dir / folder / ".tmp-77.png" for folder in ("", "plots", "best", "checkpoints", "nan")]
    for path in left:
        path.parent.mkdir(exist_ok=True)
        path.write_text("half")
    samplex("train", "--resume", run_dir)
    assert [path for path in left if path.exists()] == []


@pytest.mark.parametrize("change", [
    lambda meta: {}, lambda meta: [], lambda meta: None,
    lambda meta: {k: v for k, v in meta.items() if k != "data"},
    lambda meta: {k: v for k, v in meta.items() if k != "config"},
    lambda meta: {k: v for k, v in meta.items() if k != "progress"},
    lambda meta: {**meta, "progress": {"step": "many"}},
    lambda meta: {**meta, "progress": {"step": -1}},
    lambda meta: {**meta, "data": {"kind": "dense"}},
    lambda meta: {**meta, "data": {**meta["data"], "kind": ["dense"]}},
    lambda meta: {**meta, "data": {**meta["data"], "num_classes": "40"}},
    lambda meta: {**meta, "data": {**meta["data"], "num_classes": 2**60}},
    lambda meta: {**meta, "data": {**meta["data"], "num_classes": 41}},
    lambda meta: {**meta, "data": {**meta["data"], "length": 2**70}},
    lambda meta: {**meta, "config": {"model": 3}},
])  # fmt: skip
def test_a_meta_json_without_its_parts_is_said(run_dir, change):
    forge(run_dir, change)
    result = samplex("evaluate", run_dir, code=1)
    assert result.stderr.startswith(("samplex evaluate: checkpoint: ", "samplex evaluate: config: "))
    # Resume makes sizes from its own data; it may only not end with a traceback.
    assert samplex("train", "--resume", run_dir, "--set", "training.epochs=2", code=None).exit_code in (0, 1)
