"""Checkpoints: whole or not at all, checked on the way back, older ones safe whatever happens."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys

import pytest
import torch

from samplex_cuda.training import checkpoint
from samplex_cuda.training.checkpoint import CheckpointError

TENSORS = {
    "a.weight": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "double": torch.tensor(0.1, dtype=torch.float64),
    "ids": torch.tensor([[1], [-(2**62)]]),
    "none": torch.empty(0, 7),
    "flags": torch.tensor([True, False, True]),
    "bytes": torch.arange(256, dtype=torch.int64).to(torch.uint8),
}


def write(folder, step, scale=1.0, keep=None):
    tensors = {**TENSORS, "a.weight": TENSORS["a.weight"] * scale}
    return checkpoint.save(folder / checkpoint.directory_name(step), tensors, {"step": step, "x": 0.1}, keep=keep)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_round_trip_keeps_every_bit(tmp_path):
    tensors, meta = checkpoint.load(write(tmp_path, 7))
    assert list(tensors) == list(TENSORS)
    for name, t in TENSORS.items():
        assert tensors[name].dtype == t.dtype
        assert torch.equal(tensors[name], t)
    assert meta == {"step": 7, "x": 0.1}
    assert names(tmp_path) == ["checkpoint-00000007"]
    assert names(tmp_path / "checkpoint-00000007") == ["manifest.json", "meta.json", "tensors.safetensors"]


def test_files_are_those_of_the_safetensors_package(tmp_path):
    package = pytest.importorskip("safetensors.torch")
    path = write(tmp_path, 1)
    theirs = package.load_file(path / "tensors.safetensors")
    assert theirs.keys() == TENSORS.keys()
    assert all(torch.equal(theirs[name], t) for name, t in TENSORS.items())
    package.save_file(TENSORS, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    ours = checkpoint.read_tensors(tmp_path / "theirs.safetensors")
    assert ours.keys() == TENSORS.keys()
    assert all(torch.equal(ours[name], t) for name, t in TENSORS.items())


def test_a_tensor_that_is_a_view_is_saved_by_value(tmp_path):
    base = torch.arange(6.0).reshape(2, 3)
    path = checkpoint.save(tmp_path / "checkpoint-00000001", {"t": base.t(), "row": base[1]}, {})
    tensors, _ = checkpoint.load(path)
    assert torch.equal(tensors["t"], base.t())
    assert torch.equal(tensors["row"], base[1])


def test_the_last_k_are_kept(tmp_path):
    for step in (1, 2, 30, 4):
        write(tmp_path, step, keep=2)
    assert names(tmp_path) == ["checkpoint-00000004", "checkpoint-00000030"]


def test_the_same_step_again_replaces_it(tmp_path):
    write(tmp_path, 3)
    path = write(tmp_path, 3, scale=2.0)
    assert torch.equal(checkpoint.load(path)[0]["a.weight"], 2 * TENSORS["a.weight"])
    assert names(tmp_path) == ["checkpoint-00000003"]


def truncate(path):
    data = (path / "tensors.safetensors").read_bytes()
    (path / "tensors.safetensors").write_bytes(data[:-1])


def flip_a_bit(path):
    data = bytearray((path / "tensors.safetensors").read_bytes())
    data[-3] ^= 1
    (path / "tensors.safetensors").write_bytes(data)


def change_meta(path):
    text = (path / "meta.json").read_text()
    (path / "meta.json").write_text(text.replace("0.", "1."))


def lose_meta(path):
    (path / "meta.json").unlink()


def lose_manifest(path):
    (path / "manifest.json").unlink()


def cut_manifest(path):
    (path / "manifest.json").write_text((path / "manifest.json").read_text()[:-4])


def other_format(path):
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**manifest, "format": 99}))


DAMAGES = {
    truncate: "tensors.safetensors is truncated or altered, .* bytes where .* were written",
    flip_a_bit: "tensors.safetensors is altered: its sha256 differs from the recorded one",
    change_meta: "meta.json is altered",
    lose_meta: "meta.json cannot be read",
    lose_manifest: "manifest.json cannot be read",
    cut_manifest: "manifest.json is damaged",
    other_format: "format must be 1, got 99",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda f: f.__name__)
def test_a_damaged_checkpoint_is_refused_and_the_one_before_used(tmp_path, damage):
    (tmp_path / "checkpoints").mkdir()
    good, bad = (write(tmp_path / "checkpoints", step) for step in (10, 20))
    assert checkpoint.latest(tmp_path) == bad
    damage(bad)
    with pytest.raises(CheckpointError, match=DAMAGES[damage]):
        checkpoint.load(bad)
    refused = []
    assert checkpoint.latest(tmp_path, on_refused=lambda path, why: refused.append((path, why))) == good
    assert [path for path, _ in refused] == [bad]
    with pytest.warns(UserWarning, match="using the previous checkpoint"):
        assert checkpoint.latest(tmp_path) == good


def test_all_damaged_is_none(tmp_path):
    truncate(write(tmp_path, 1))
    assert checkpoint.latest(tmp_path, on_refused=lambda path, why: None) is None
    assert checkpoint.latest(tmp_path / "nowhere") is None


def test_left_overs_are_cleaned(tmp_path):
    path = write(tmp_path, 5)
    (tmp_path / ".tmp-checkpoint-00000006-123").mkdir()
    (tmp_path / ".tmp-checkpoint-00000006-123" / "tensors.safetensors").write_bytes(b"half")
    (tmp_path / ".tmp-metrics.jsonl-123").write_text("half")
    os.rename(path, tmp_path / ".old-checkpoint-00000005")  # killed between the two renames of a replacement
    checkpoint.clean(tmp_path)
    assert names(tmp_path) == ["checkpoint-00000005"]
    checkpoint.verify(path)


@pytest.mark.parametrize("call", ["write", "fsync", "rename"])
def test_a_full_disk_at_any_moment_keeps_the_older_one(tmp_path, monkeypatch, call):
    before = write(tmp_path, 1)
    real, calls = getattr(os, call), []
    for fail_at in range(1, 20):
        calls.clear()

        def full(*args, fail_at=fail_at):
            calls.append(1)
            if len(calls) == fail_at:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*args)

        monkeypatch.setattr(os, call, full)
        try:
            write(tmp_path, 2, keep=1)
        except CheckpointError as error:
            why = str(error)
        else:
            break  # no call was the one that fails
        finally:
            monkeypatch.undo()
        assert "checkpoint-00000002: could not be saved: no space for it (No space left on device" in why
        assert "Earlier checkpoints are untouched" in why
        checkpoint.verify(before)
        # A sync of the folder after the rename may fail with the new one in place; nothing half-written stays.
        assert set(names(tmp_path)) <= {"checkpoint-00000001", "checkpoint-00000002"}
        if (tmp_path / "checkpoint-00000002").exists():
            checkpoint.verify(tmp_path / "checkpoint-00000002")
    assert fail_at > 1
    checkpoint.verify(tmp_path / "checkpoint-00000002")
    # A rename that fails while the old one is removed is no error: it is tried again next time.
    assert names(tmp_path)[:-1] == (["checkpoint-00000001"] if call == "rename" else [])


LIMITED = """
import resource, sys, torch
from samplex_cuda.training import checkpoint
folder = sys.argv[1]
checkpoint.save(f"{folder}/checkpoint-00000001", {"t": torch.ones(1000)}, {})
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
try:
    checkpoint.save(f"{folder}/checkpoint-00000002", {"t": torch.ones(1_000_000)}, {}, keep=1)
except checkpoint.CheckpointError as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no such limit there")
def test_a_file_that_the_system_does_not_let_grow(tmp_path):
    done = subprocess.run([sys.executable, "-c", LIMITED, str(tmp_path)], capture_output=True, text=True, check=True)
    assert "checkpoint-00000002: could not be saved: no space for it" in done.stdout
    assert "4.0 MB needed" in done.stdout
    assert names(tmp_path) == ["checkpoint-00000001"]
    assert torch.equal(checkpoint.load(tmp_path / "checkpoint-00000001")[0]["t"], torch.ones(1000))


def test_a_missing_folder_and_an_unwritable_one(tmp_path, monkeypatch):
    with pytest.raises(CheckpointError, match=r"the folder .*nowhere does not exist"):
        write(tmp_path / "nowhere", 1)
    before = write(tmp_path, 1)

    def refuse(*args, **options):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    # As root a read-only folder is writable all the same, so the refusal is made here.
    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(CheckpointError, match=r"cannot be written to \(Permission denied\)"):
        write(tmp_path, 2, keep=1)
    monkeypatch.undo()
    checkpoint.verify(before)


def test_what_cannot_be_saved_is_named(tmp_path):
    with pytest.raises(TypeError, match=r"tensors\['s'\] must be a dense tensor of a real dtype, got torch.sparse_coo"):
        checkpoint.save(tmp_path / "checkpoint-00000001", {"s": torch.eye(2).to_sparse()}, {})
    with pytest.raises(TypeError, match="meta must be what JSON can hold"):
        checkpoint.save(tmp_path / "checkpoint-00000001", {}, {"t": torch.ones(1)})
    with pytest.raises(ValueError, match="keep must be an int of at least 1"):
        write(tmp_path, 1, keep=0)
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "is not a safetensors file"),
        (b"\xff" * 16, "is not a safetensors file"),
        (b"\x02\0\0\0\0\0\0\0[]", "damaged header"),
        (b'\x05\0\0\0\0\0\0\0{"a":', "damaged header"),
    ],
)
def test_a_file_that_is_no_safetensors(tmp_path, data, text):
    (tmp_path / "x.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=text):
        checkpoint.read_tensors(tmp_path / "x.safetensors")


def test_a_header_that_does_not_fit_the_file(tmp_path):
    path = tmp_path / "x.safetensors"
    checkpoint.write_tensors(path, {"t": torch.ones(4)})
    path.write_bytes(path.read_bytes().replace(b'"shape":[4]', b'"shape":[9]'))
    with pytest.raises(CheckpointError, match="the place of 't' does not fit the file"):
        checkpoint.read_tensors(path)
