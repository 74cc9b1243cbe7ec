"""The converted cache, files that are larger than memory, and real files."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from data_file_cases import SHARED, XC, XC_ROWS, csr, write

from samplex_cuda import data
from samplex_cuda.data import cache, interaction_files, lines, sparse_text
from samplex_cuda.data import text as text_module


@pytest.fixture
def shared():
    if not SHARED.is_dir():
        pytest.skip("no real data beside the project")
    return SHARED


# ---------------------------------------------------------------------------------------------------- the cache
@pytest.fixture
def fresh(monkeypatch):
    """Forget which files this process has verified."""
    monkeypatch.setattr(cache, "_verified", set())


def folder_of(tmp_path):
    (found,) = tmp_path.glob("*.sxcache")
    return found


def no_conversion(monkeypatch):
    def fail(*args):
        raise AssertionError("converted again")

    monkeypatch.setattr(cache, "_convert", fail)


def test_cache_is_used(tmp_path, monkeypatch, fresh):
    path = write(tmp_path / "a.txt", XC)
    before = data.xc_file(path)
    assert isinstance(before.values, np.memmap)
    no_conversion(monkeypatch)
    after = data.xc_file(path)
    assert csr(after) == csr(before) == XC_ROWS
    assert after.fingerprint() == before.fingerprint()
    assert after.notes == []
    meta = json.loads((folder_of(tmp_path) / "meta.json").read_text())
    assert meta["sources"][0]["bytes"] == len(XC)
    assert set(meta["arrays"]) == {"indptr", "indices", "values", "label_indptr", "labels"}


def test_fingerprint_is_of_the_content(tmp_path):
    one = data.xc_file(write(tmp_path / "a.txt", XC))
    other = data.xc_file(write(tmp_path / "b.txt", XC.replace(" 0:0.5", "  0:0.5")), cache_dir=tmp_path / "c")
    assert one.fingerprint() == other.fingerprint()
    changed = data.xc_file(write(tmp_path / "d.txt", XC.replace("0:0.5", "0:0.6")))
    assert one.fingerprint() != changed.fingerprint()
    assert one.fingerprint() != data.xc_file(tmp_path / "a.txt", labels="first").fingerprint()


def test_changed_source(tmp_path, caplog):
    path = write(tmp_path / "a.txt", XC)
    held = data.xc_file(path)
    os.utime(write(path, XC.replace("0:0.5", "0:0.7")), ns=(1, 1))
    with caplog.at_level(logging.WARNING, "samplex_cuda.data"):
        found = data.xc_file(path)
    assert csr(found)[0][2] == [0.7, 1.0]
    assert "is converted again: cache a.txt.xc-" in found.notes[0]
    assert "a.txt has changed" in caplog.text
    assert csr(held)[0][2] == [0.5, 1.0]  # what is open stays as it was
    assert data.xc_file(path).notes == []


def test_touched_source(tmp_path, monkeypatch):
    path = write(tmp_path / "a.txt", XC)
    data.xc_file(path)
    os.utime(path, ns=(1, 1))
    no_conversion(monkeypatch)
    assert data.xc_file(path).notes == []
    assert json.loads((folder_of(tmp_path) / "meta.json").read_text())["sources"][0]["mtime_ns"] == 1


def test_a_source_changed_behind_its_time(tmp_path):
    path = write(tmp_path / "a.txt", XC)
    data.xc_file(path)
    stat = path.stat()
    os.utime(write(path, XC.replace("0.5", "0.7")), ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert csr(data.xc_file(path))[0][2] == [0.5, 1.0]  # size and time are the same: the stated limit
    assert csr(data.xc_file(path, verify="all"))[0][2] == [0.7, 1.0]


@pytest.mark.parametrize("harm", ["cut", "flip", "header", "missing", "meta", "version", "no_meta"])
def test_damaged_cache(tmp_path, fresh, harm):
    path = write(tmp_path / "a.txt", XC)
    data.xc_file(path)
    folder = folder_of(tmp_path)
    array, meta = folder / "values.npy", folder / "meta.json"
    reason = {
        "cut": "values.npy has [0-9]+ bytes in place of [0-9]+",
        "flip": "the checksum of values.npy does not fit",
        "header": "it cannot be read",
        "missing": "values.npy is missing",
        "meta": "it cannot be read",
        "version": "it has layout version 0, this is 1",
        "no_meta": "meta.json is missing",
    }[harm]
    raw = bytearray(array.read_bytes())
    if harm == "cut":
        write(array, bytes(raw[:-4]))
    elif harm == "flip":
        raw[-1] ^= 64
        write(array, bytes(raw))
    elif harm == "header":
        raw[20] ^= 64
        write(array, bytes(raw))
    elif harm == "missing":
        array.unlink()
    elif harm == "meta":
        write(meta, meta.read_bytes()[:-20])
    elif harm == "version":
        write(meta, json.dumps(json.loads(meta.read_text()) | {"version": 0}))
    else:
        meta.unlink()
    cache._verified.clear()
    found = data.xc_file(path)
    assert csr(found) == XC_ROWS
    assert len(found.notes) == 1
    assert re.search(reason, found.notes[0])
    assert data.xc_file(path).notes == []


def test_altered_word_list(tmp_path, fresh):
    path = write(tmp_path / "a.tokens", "a b\n")
    data.text_file(path, columns=1)
    words = folder_of(tmp_path) / "vocabulary.txt"
    write(words, words.read_text().replace("b", "c"))
    found = data.text_file(path, columns=1)
    assert "the checksum of vocabulary.txt does not fit" in found.notes[0]
    assert "b" in found.vocabulary


def test_checksums_are_read_once(tmp_path, monkeypatch, fresh):
    path = write(tmp_path / "a.txt", XC)
    data.xc_file(path)
    cache._verified.clear()
    read = []
    real = cache._file_sha256
    monkeypatch.setattr(cache, "_file_sha256", lambda *a: read.append(a[0].name) or real(*a))
    data.xc_file(path, verify="size")
    assert read == []
    data.xc_file(path)
    assert len(read) == 5
    data.xc_file(path)
    assert len(read) == 5
    data.xc_file(path, verify="all")
    assert len(read) == 11
    with pytest.raises(ValueError, match="verify must be one of size, cache, all, got 'none'"):
        data.xc_file(path, verify="none")


def test_cache_dir(tmp_path, monkeypatch):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "a.txt", XC.replace("0.5", "0.5" if name == "one" else "0.7"))
    where = tmp_path / "cache"
    assert [csr(data.xc_file(tmp_path / n / "a.txt", cache_dir=where))[0][2][0] for n in ("one", "two")] == [0.5, 0.7]
    assert len(list(where.iterdir())) == 2  # files of one name do not meet
    assert list((tmp_path / "one").iterdir()) == [tmp_path / "one" / "a.txt"]
    # A folder that cannot be written to: the user's cache.
    monkeypatch.setattr(cache.os, "access", lambda *a: False)
    monkeypatch.setenv("SAMPLEX_CACHE_DIR", str(tmp_path / "mine"))
    data.xc_file(tmp_path / "one" / "a.txt")
    assert len(list((tmp_path / "mine").iterdir())) == 1


def test_options_have_their_own_caches(tmp_path):
    path = write(tmp_path / "a.svm", "1 1:1\n")
    assert data.svmlight_file(path, index_base=0).num_features == 2
    assert data.svmlight_file(path, index_base=1).num_features == 1
    assert len(list(tmp_path.glob("*.sxcache"))) == 2


def test_a_cache_folder_that_cannot_be_written_to(tmp_path):
    path = write(tmp_path / "a.txt", XC)
    with pytest.raises(OSError, match=r"xc_file: the cache folder .*a.txt cannot be written to .*cache_dir or"):
        data.xc_file(path, cache_dir=path)  # a file is where the folder should be


def test_another_process_converts_at_the_same_time(tmp_path, monkeypatch):
    """Both are done; the second finds the place taken at the moment of its rename."""
    path = write(tmp_path / "a.txt", XC)
    real, inodes = Path.rename, []

    def rename(self, target):
        if self.name.endswith(".tmp") and not inodes:
            inodes.append(0)  # the other one, from here on without this detour
            data.xc_file(path)
            inodes[0] = folder_of(tmp_path).stat().st_ino
        return real(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    found = data.xc_file(path)
    assert csr(found) == XC_ROWS
    assert folder_of(tmp_path).stat().st_ino == inodes[0]  # the first one stays: it may be in use
    assert {p.name for p in tmp_path.iterdir()} == {"a.txt", folder_of(tmp_path).name}


def test_another_process_takes_a_bad_cache_away(tmp_path, monkeypatch, fresh):
    path = write(tmp_path / "a.txt", XC)
    data.xc_file(path)
    folder = folder_of(tmp_path)
    (folder / "values.npy").write_bytes(b"")
    real = Path.rename

    def rename(self, target):
        if self == folder:
            shutil.rmtree(folder)
        return real(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    found = data.xc_file(path)
    assert csr(found) == XC_ROWS
    assert "values.npy has 0 bytes" in found.notes[0]


def test_processes_that_start_together(tmp_path):
    path = tmp_path / "a.txt"
    with path.open("w") as file:
        file.write("3000 9 5\n")
        file.writelines(f"{i % 5} {i % 9}:{i}\n" for i in range(3000))
    code = (
        "import sys, pathlib, time; from samplex_cuda import data; pathlib.Path(sys.argv[2]).touch()\n"
        "while not pathlib.Path(sys.argv[1]).with_name('go').exists(): time.sleep(0.001)\n"
        "found = data.xc_file(sys.argv[1]); print(len(found), found.fingerprint(), found.notes)"
    )
    ready = [tmp_path / f"ready{i}" for i in range(3)]
    start = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    workers = [subprocess.Popen([sys.executable, "-c", code, path, name], **start) for name in ready]
    try:
        end = time.monotonic() + 240
        while not all(name.exists() for name in ready):
            assert time.monotonic() < end
            time.sleep(0.01)
        (tmp_path / "go").touch()
        answers = {worker.communicate(timeout=240)[0] for worker in workers}
    finally:
        for worker in workers:
            worker.kill()
    assert answers == {f"3000 {data.xc_file(path).fingerprint()} []\n"}


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    path = write(tmp_path / "a.txt", XC)

    def full(self, values):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache.ArrayWriter, "append", full)
    with pytest.raises(OSError, match="No space left on device"):
        data.xc_file(path)
    assert list(tmp_path.iterdir()) == [path]


def test_a_source_that_changes_while_it_is_read(tmp_path, monkeypatch):
    path = write(tmp_path / "a.txt", XC)
    real = sparse_text.fast_rows

    def meanwhile(*args):
        os.utime(path, ns=(1, 1))
        return real(*args)

    monkeypatch.setattr(sparse_text, "fast_rows", meanwhile)
    with pytest.raises(RuntimeError, match=r"a.txt changed while it was read"):
        data.xc_file(path)
    assert list(tmp_path.iterdir()) == [path]


def test_rests_of_killed_conversions_go(tmp_path):
    path = write(tmp_path / "a.txt", XC)
    data.xc_file(path)
    folder = folder_of(tmp_path)
    old, young = (tmp_path / f".{folder.name}.{name}.tmp" for name in ("old", "young"))
    for rest in (old, young):
        rest.mkdir()
        write(rest / "values.npy", "")
    past = time.time() - 2 * cache._STALE
    os.utime(old / "values.npy", (past, past))
    os.utime(old, (past, past))
    shutil.rmtree(folder)
    data.xc_file(path)
    assert not old.exists()
    assert young.exists()  # somebody may be writing it


# ---------------------------------------------------------------------------------------------------- large files
def test_a_text_file_is_not_held(tmp_path, monkeypatch):
    """A file far larger than a block: conversion holds a small multiple of the block."""
    monkeypatch.setattr(lines, "BLOCK", 1 << 18)
    line = "1,2,3 " + " ".join(f"{j}:0.25" for j in range(200)) + "\n"
    count = 16 * (1 << 20) // len(line)
    path = tmp_path / "a.txt"
    with path.open("w") as file:
        file.write(f"{count} 200 4\n")
        file.writelines([line] * count)
    tracemalloc.start()
    found = data.xc_file(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert path.stat().st_size > 15 * (1 << 20)
    assert peak < 12 * (1 << 20)
    assert len(found) == count


@pytest.mark.parametrize("kind", ["text", "interactions", "svmlight"])
def test_memory_of_conversion_does_not_grow_with_the_file(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(lines, "BLOCK", 1 << 16)
    monkeypatch.setattr(cache, "_PIECE", 1 << 16)
    monkeypatch.setattr(interaction_files, "_STEP", 1 << 12)
    monkeypatch.setattr(text_module, "_STEP", 1 << 12)
    line = {
        "text": lambda i: " ".join(f"w{(i + j) % 500}" for j in range(30)),
        "interactions": lambda i: f"{i % 300} " + " ".join(str((i * j) % 700) for j in range(30)),
        "svmlight": lambda i: f"{i % 9} " + " ".join(f"{j + 1}:0.5" for j in range(20)),
    }[kind]
    peaks, sizes = [], []
    for count in (2_500, 20_000):
        path = tmp_path / f"{count}.txt"
        with path.open("w") as file:
            file.writelines(f"{line(i)}\n" for i in range(count))
        tracemalloc.start()
        data.open(path, format=kind)
        peaks.append(tracemalloc.get_traced_memory()[1])
        sizes.append(path.stat().st_size)
        tracemalloc.stop()
    assert sizes[1] > 7.5 * sizes[0] > 7.5 * 4 * (1 << 16)
    assert peaks[1] < 1.25 * peaks[0]


def test_a_batch_reads_only_its_rows(tmp_path):
    """A sparse file of 64 GiB of zeros: mapped, a batch holds its own rows."""
    path = tmp_path / "x.dat"
    with path.open("wb") as file:
        file.truncate(1 << 36)
    rows = (1 << 36) // (4 * 65536)
    np.save(tmp_path / "y.npy", np.zeros(rows, np.uint8))
    found = data.open(path, y=tmp_path / "y.npy", num_features=65536, num_classes=3)
    assert len(found) == rows
    tracemalloc.start()
    batches = data.Batches(found, 4)
    for batch in batches.iterate(len(batches) - 3):
        assert batch["x"].shape == (4, 65536)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20  # its order and two batches


# ---------------------------------------------------------------------------------------------------- real files
def test_eurlex(shared, tmp_path):
    path = shared / "eurlex4k" / "eurlex_train.txt.xz"
    begin = time.process_time()
    train = data.open(path, cache_dir=tmp_path)
    assert time.process_time() - begin < 20
    assert (len(train), train.num_features, train.num_classes) == (15_539, 5_000, 3_993)
    assert int((train.targets(torch.arange(len(train))) != -100).any(1).sum()) == 15_511
    single = data.open(path, cache_dir=tmp_path, labels="smallest", num_classes="observed")
    assert (len(single), single.num_classes) == (15_511, 3_687)
    assert int((single.class_counts() > 0).sum()) == 895
    fit, valid = data.split(single, (0.9, 0.1), seed=0)
    assert (len(fit), len(valid)) == (13_960, 1_551)
    test = data.open(shared / "eurlex4k" / "eurlex_test.txt.xz", cache_dir=tmp_path)
    assert (len(test), int((test.targets(torch.arange(len(test))) == -100).all(1).sum())) == (3_809, 6)


def test_wikitext(shared, tmp_path):
    train = data.open(shared / "wikitext2" / "wiki.train.tokens.xz", cache_dir=tmp_path)
    assert (len(train.tokens), train.num_classes) == (2_088_628, 33_278)
    assert int(train.class_counts().argmax()) == 0
    for name, count in (("valid", 217_646), ("test", 245_569)):
        part = data.open(shared / "wikitext2" / f"wiki.{name}.tokens.xz", vocabulary=train, cache_dir=tmp_path)
        assert (len(part.tokens), part.num_classes, part.notes) == (count, 33_278, [])


def test_gowalla(shared, tmp_path):
    path = shared / "gowalla" / "gowalla_train.txt.xz"
    train = data.open(path, format="interactions", cache_dir=tmp_path)
    assert (train.num_users, train.num_classes, train.num_interactions) == (29_858, 40_981, 810_128)
    assert len(train) == 810_128 - 29_858
    path = shared / "gowalla" / "gowalla_test.txt.xz"
    test = data.open(path, format="interactions", known=train, cache_dir=tmp_path)
    assert len(test) == 29_858
    assert int((test.targets(torch.arange(len(test))) != -100).sum()) == 217_242
