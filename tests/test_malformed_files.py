"""Altered and hostile files end with a message of ours, never with an error from inside a parser."""

from __future__ import annotations

import contextlib
import io
import json
import struct
import zipfile

import numpy as np
import pytest
import torch
from cli_cases import one_thread, samplex

from samplex_cuda import data
from samplex_cuda.training import CheckpointError, ConfigError, checkpoint, config, models, read_metrics

__all__ = ["one_thread"]


# ---------------------------------------------------------------------------------------------------- nesting
@pytest.mark.parametrize(
    "text", ["x = " + "[" * 100_000, "x = " + "{a = " * 100_000, "[data]\npath = " + "[" * 5000 + "]" * 5000]
)
def test_toml_that_is_nested_too_deeply(tmp_path, text):
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"run.toml: (is not valid TOML|must not be nested so deeply)"):
        config.load(path)
    assert "run.toml: " in samplex("train", path, "--out", tmp_path / "run", code=1).stderr


def test_json_that_is_nested_too_deeply(tmp_path):
    deep = "[" * 200_000
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1}}\n{{"step": {deep}\n')
    assert read_metrics(tmp_path) == [{"step": 1}]
    path = checkpoint.save(tmp_path / "checkpoint-00000001", {"w": torch.ones(2)}, {"step": 1})
    (path / "meta.json").write_text(deep)
    with pytest.raises(CheckpointError, match=r"meta\.json is damaged"):
        checkpoint.load(path, check=False)
    (path / "manifest.json").write_text(deep)
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged"):
        checkpoint.verify(path)
    assert config.override(config.Config(), [f"data.path={deep}"]).data.path == deep


# ---------------------------------------------------------------------------------------------------- safetensors
def tensors_file(header, body=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
HOSTILE = {
    "nothing": b"",
    "a list": tensors_file([]),
    "deep": tensors_file(b"[" * 100_000),
    "no entry": tensors_file({"w": 3}),
    "negative": tensors_file({"w": {**ENTRY, "shape": [-2]}}, bytes(8)),
    "two negatives": tensors_file({"w": {**ENTRY, "shape": [-1, -2]}}, bytes(8)),
    "floats": tensors_file({"w": {**ENTRY, "shape": [2.0]}}, bytes(8)),
    "text": tensors_file({"w": {**ENTRY, "shape": "ab"}}, bytes(8)),
    "bools": tensors_file({"w": {**ENTRY, "shape": [True, 2]}}, bytes(8)),
    "huge and empty": tensors_file({"w": {**ENTRY, "shape": [2**62, 2**62, 0], "data_offsets": [0, 0]}}),
    "beyond int64": tensors_file({"w": {**ENTRY, "shape": [2**70, 0], "data_offsets": [0, 0]}}),
    "three offsets": tensors_file({"w": {**ENTRY, "data_offsets": [0, 4, 8]}}, bytes(8)),
    "huge": tensors_file({"w": {**ENTRY, "shape": [2**60], "data_offsets": [0, 2**62]}}, bytes(8)),
    "dtype is a list": tensors_file({"w": {**ENTRY, "dtype": ["F32"]}}, bytes(8)),
    "no utf-8": tensors_file(b'{"\xff\xfe": 1}'),
    "a length of 2^63": struct.pack("<Q", 2**63) + b"{}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_read_tensors_raises_only_checkpoint_errors(tmp_path, name):
    path = tmp_path / "t.safetensors"
    path.write_bytes(HOSTILE[name])
    with pytest.raises(CheckpointError, match=r"t\.safetensors"):
        checkpoint.read_tensors(path)
    with pytest.raises(ConfigError, match="must be a file of samplex fit-tree"):
        models.read_tree(path)


def test_a_missing_file_or_a_folder_is_a_checkpoint_error_too(tmp_path):
    for path in (tmp_path, tmp_path / "none", tmp_path / "none" / "t"):
        with pytest.raises(CheckpointError, match="cannot be read"):
            checkpoint.read_tensors(path)


def mutations(good, count, seed):
    """Altered copies: bytes changed, cut, doubled, digits made large."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        raw = bytearray(good)
        for _ in range(int(rng.integers(1, 4))):
            place = (
                int(rng.integers(0, max(1, len(raw))))
                if rng.random() < 0.5
                else int(rng.integers(0, max(1, min(200, len(raw)))))
            )
            kind = rng.integers(0, 5)
            if kind == 0 and raw:
                raw[place] = int(rng.integers(0, 256))
            elif kind == 1:
                del raw[place : place + int(rng.integers(1, 20))]
            elif kind == 2:
                raw[place:place] = bytes(rng.integers(32, 127, int(rng.integers(1, 9)), dtype=np.uint8))
            elif kind == 3:
                raw[place:place] = b"9" * int(rng.integers(1, 25))
            else:
                raw[place:place] = rng.choice([b"(", b"[", b"{", b"-", b"'", b"nan", b"\0", b"L", b"e99", b","])
        yield bytes(raw)


def test_altered_safetensors(tmp_path):
    path = tmp_path / "t.safetensors"
    checkpoint.write_tensors(path, {"w": torch.ones(3, 2), "i": torch.arange(4)}, {"a": "b"})
    read = 0
    for raw in mutations(path.read_bytes(), 1500, 0):
        path.write_bytes(raw)
        with contextlib.suppress(CheckpointError):
            tensors = checkpoint.read_tensors(path)
            read += 1
            assert all(isinstance(t, torch.Tensor) for t in tensors.values())
    assert 0 < read < 500  # a changed number is no damage of the file; most other changes are


# ---------------------------------------------------------------------------------------------------- numpy
def npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def npz(path, members, compress=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", compress) as archive:
        for name, raw in members.items():
            archive.writestr(f"{name}.npy", raw)
    return path


def with_header(text, body=b""):
    raw = text.encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(raw)) + raw + body


HEADERS = [
    "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), ",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (-2, 3), }",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (2.5, 3), }",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (1152921504606846976, 1152921504606846976), }",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (" + "9" * 400 + ",), }",
    "{'descr': '<f4', 'fortran_order': False, 'shape': " + "(" * 3000 + ")" * 3000 + ", }",
    "{'descr': 'O', 'fortran_order': False, 'shape': (2,), }",
    "{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (2,), }",
    "{'descr': '<f4\0', 'fortran_order': False, 'shape': (2,), }",
    "{'descr': ('<f4', (1 << 30)), 'fortran_order': False, 'shape': (2,), }",
    "__import__('os').system('true')",
    "\0\0\0", "{", "", "'" * 9, "\\x", "ab\ncd", "  {1: 2}", "0x", "1_", "f''", "é",
]  # fmt: skip


@pytest.mark.parametrize("header", HEADERS, ids=range(len(HEADERS)))
def test_garbled_npy_headers(tmp_path, header):
    bad = with_header(header, bytes(24))
    np.save(tmp_path / "x.npy", np.ones((2, 3), np.float32))
    np.save(tmp_path / "y.npy", np.zeros(2, np.int64))
    (tmp_path / "x.npy").write_bytes(bad)
    with pytest.raises(ValueError, match=r"^npy_file: .*x.npy: "):
        data.open(tmp_path)
    path = npz(tmp_path / "a.npz", {"x": bad, "y": npy(np.zeros(2, np.int64))})
    with pytest.raises(ValueError, match=r"^npz_file: .*a.npz: "):
        data.open(path)


def csr_members(**changes):
    good = {
        "indptr": npy(np.array([0, 2, 3])), "indices": npy(np.array([0, 4, 1])), "data": npy(np.ones(3)),
        "shape": npy(np.array([2, 5])), "format": npy(np.array(b"csr")), "y": npy(np.array([7, 2])),
    }  # fmt: skip
    return {name: raw for name, raw in (good | changes).items() if raw is not None}


CSR = {
    "columns": {"shape": npy(np.array([2, 2**60]))},
    "rows": {"shape": npy(np.array([2**60, 5]))},
    "rows that wrap": {"shape": npy(np.array([2**63 - 1, 5]))},
    "unsigned": {"shape": npy(np.array([2**64 - 1, 5], np.uint64))},
    "negative": {"shape": npy(np.array([-1, 5]))},
    "one number": {"shape": npy(np.array([2]))},
    "no numbers": {"shape": npy(np.array(["a", "b"]))},
    "nan": {"shape": npy(np.array([np.nan, 5]))},
    "nothing": {"shape": npy(np.array([], np.int64))},
    "format": {"format": npy(np.array(b"\xff\xfe"))},
    "a long format": {"format": npy(np.zeros(100, np.int64))},
    "indptr": {"indptr": npy(np.array([0, 2**60, 3]))},
    "falling indptr": {"indptr": npy(np.array([0, 4, 3]))},
    "negative indices": {"indices": npy(np.array([0, -4, 1]))},
    "missing": {"data": None},
    "no labels": {"y": None},
}


@pytest.mark.parametrize("name", CSR)
def test_csr_files_that_are_none(tmp_path, name):
    path = npz(tmp_path / "a.npz", csr_members(**CSR[name]))
    with pytest.raises(ValueError, match=r"^csr_file: .*a.npz"):
        data.open(path)


@pytest.mark.parametrize("kind", ["npy", "npz", "csr"])
def test_altered_arrays(tmp_path, kind, monkeypatch):
    monkeypatch.setenv("SAMPLEX_CACHE_DIR", str(tmp_path / "cache"))
    np.save(tmp_path / "y.npy", np.zeros(4, np.int64))
    if kind == "npy":
        good, path = npy(np.ones((4, 3), np.float32)), tmp_path / "x.npy"
    elif kind == "npz":
        path = npz(
            tmp_path / "a.npz", {"x": npy(np.ones((4, 3))), "y": npy(np.zeros(4, np.int64))}, zipfile.ZIP_DEFLATED
        )
        good = path.read_bytes()
    else:
        path = npz(tmp_path / "a.npz", csr_members())
        good = path.read_bytes()
    messages = 0
    for raw in mutations(good, 300, 1):
        path.write_bytes(raw)
        said = ""
        try:
            data.open(path, format=kind)
        except ValueError as error:
            said = str(error)
        assert not said or "_file: " in said or "open: " in said
        messages += bool(said)
    assert messages > 30


def test_predict_reads_no_garbled_file(tmp_path):
    run = tmp_path / "run"
    samplex("train", "--data", "builtin:classes=20,dim=3,examples=60", "--out", run, "--set", "training.epochs=1",
            "--set", "training.plot=false")  # fmt: skip
    words = ["predict", run, tmp_path / "rows.npy", "--out", tmp_path / "top.jsonl"]
    for header in HEADERS[:8]:
        (tmp_path / "rows.npy").write_bytes(with_header(header, bytes(24)))
        assert "rows.npy: " in samplex(*words, code=1).stderr
    npz(tmp_path / "rows.npz", {"x": with_header(HEADERS[3])})
    words[2] = tmp_path / "rows.npz"
    assert "rows.npz: x" in samplex(*words, code=1).stderr
    huge = npz(
        tmp_path / "huge.npz", csr_members(shape=npy(np.array([2, 2**60])), indices=npy(np.array([0, 2**31, 1])))
    )
    assert "at most" in samplex("predict", run, huge, "--out", tmp_path / "top.jsonl", code=1).stderr
