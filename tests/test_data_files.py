"""Files of every format: what is read, what is refused and with which words, and the converted cache."""

from __future__ import annotations

import bz2
import gzip
import json
import logging
import lzma
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

from samplex_cuda import data
from samplex_cuda.data import cache, interaction_files, lines, sparse_text
from samplex_cuda.data import text as text_module

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture
def shared():
    if not SHARED.is_dir():
        pytest.skip("no real data beside the project")
    return SHARED


def write(path, text):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def csr(set_):
    """Rows of a sparse data set as Python lists: (labels, features, values)."""
    found = set_.batch(torch.arange(len(set_)))
    y = found["y"].reshape(len(set_), -1)
    ends = found["offsets"].tolist()
    return [
        (
            [v for v in y[i].tolist() if v != -100],
            found["ids"][ends[i] : ends[i + 1]].tolist(),
            [round(v, 4) for v in found["values"][ends[i] : ends[i + 1]].tolist()],
        )
        for i in range(len(set_))
    ]


XC = "4 6 9\n3,8 0:0.5 5:1\n 1:2 2:-3.5e-1\n7\n0 3:4 \n"
XC_ROWS = [([3, 8], [0, 5], [0.5, 1.0]), ([], [1, 2], [2.0, -0.35]), ([7], [], []), ([0], [3], [4.0])]


# ---------------------------------------------------------------------------------------------------- XC
@pytest.mark.parametrize("slow", [False, True])
def test_xc(tmp_path, monkeypatch, slow):
    if slow:
        monkeypatch.setattr(sparse_text, "fast_rows", lambda *a: None)
    found = data.xc_file(write(tmp_path / "a.txt", XC))
    assert csr(found) == XC_ROWS
    assert (found.num_features, found.num_classes) == (6, 9)
    assert found.notes == []


@pytest.mark.parametrize("size", [1, 7, 16, 1000])
def test_xc_in_blocks(tmp_path, monkeypatch, size):
    monkeypatch.setattr(lines, "BLOCK", size)
    assert csr(data.xc_file(write(tmp_path / "a.txt", XC))) == XC_ROWS
    assert csr(data.xc_file(write(tmp_path / "b.txt", XC.rstrip("\n ")))) == XC_ROWS  # no newline at the end


@pytest.mark.parametrize(
    "text",
    [
        XC.replace("\n", "\r\n"),
        "\ufeff" + XC,
        XC.replace(" 0:", "\t0:"),
        XC.replace(" 5:1", "   5:1"),
        XC + "\n\n",
    ],
)
def test_xc_of_other_hands(tmp_path, text):
    assert csr(data.xc_file(write(tmp_path / "a.txt", text))) == XC_ROWS


def test_xc_rows_with_nothing(tmp_path):
    assert csr(data.xc_file(write(tmp_path / "a.txt", "3 2 2\n\n1 0:1\n\n\n"), num_classes=2)) == [
        ([], [], []),
        ([1], [0], [1.0]),
        ([], [], []),
    ]


@pytest.mark.parametrize(("suffix", "module"), [(".gz", gzip), (".bz2", bz2), (".xz", lzma)])
def test_compressed(tmp_path, suffix, module):
    path = write(tmp_path / f"a.txt{suffix}", module.compress(XC.encode()))
    assert csr(data.open(path)) == XC_ROWS
    cut = write(tmp_path / f"b.txt{suffix}", module.compress((XC * 1).encode())[:-9])
    with pytest.raises(ValueError, match=rf"xc_file: .*b.txt{suffix}: the compressed file is damaged"):
        data.xc_file(cut)


@pytest.mark.parametrize("size", [8, 1 << 20])
@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("9 0:1", r"label 9 is outside \[0, 9\)"),
        ("x 0:1", "label 'x' is no whole number"),
        ("3,,4 0:1", "label '' is no whole number"),
        ("-1 0:1", "label '-1' is no whole number"),
        ("2.0 0:1", "label '2.0' is no whole number"),
        ("0:1 1:2", "label '0:1' is no whole number; a row without labels starts with a space"),
        ("3 6:1", r"feature 6 is outside \[0, 6\)"),
        ("3 -1:1", "feature '-1' is no whole number"),
        ("3 1", "feature '1' must be index:value"),
        ("3 1:", "value of feature 1 '' is no finite number"),
        ("3 1:a", "value of feature 1 'a' is no finite number"),
        ("3 1:2:3", "value of feature 1 '2:3' is no finite number"),
        ("3 1:nan", "value of feature 1 'nan' is no finite number"),
        ("3 1:1e999", "value of feature 1 '1e999' is no finite number"),
        ("3 1:1e300", "value of feature 1 '1e300' does not fit a float32"),
        ("3 1:1.2.3", "value of feature 1 '1.2.3' is no finite number"),
        ("3 1:1-2", "value of feature 1 '1-2' is no finite number"),
        ("3 :2", "feature '' is no whole number"),
        ("3 1:2 \x00", "feature '\\\\x00' must be index:value"),
        ("3 " + "y" * 60, "feature 'y{37}...' must be index:value"),
    ],
)
def test_xc_bad_lines(tmp_path, monkeypatch, line, reason, size):
    monkeypatch.setattr(lines, "BLOCK", size)
    rows = XC.split("\n")
    path = write(tmp_path / "bad.txt", "\n".join(["5 6 9", *rows[1:3], line, *rows[3:]]))
    with pytest.raises(ValueError, match=rf"^xc_file: .*bad.txt:4: {reason}$"):
        data.xc_file(path)
    assert not list(tmp_path.glob("*.sxcache"))
    assert not list(tmp_path.glob(".*"))  # nothing is left behind
    found = data.xc_file(path, skip_bad=1)
    assert csr(found) == XC_ROWS
    assert len(found.notes) == 1
    assert "skipped 1 bad line of" in found.notes[0]
    assert "(line 4: " in found.notes[0]
    with pytest.raises(ValueError, match=rf"bad.txt:4: {reason}$"):  # the cache remembers
        data.xc_file(path)
    assert "skipped 1 bad line" in data.xc_file(path, skip_bad=3).notes[0]


def test_more_bad_lines_than_allowed(tmp_path, caplog):
    path = write(tmp_path / "bad.txt", "5 6 9\nx\n1 0:1\ny\nz\n2 1:1\n")
    with pytest.raises(ValueError, match=r"bad.txt:5: label 'z' is no whole number \(more than skip_bad=2 bad lines\)"):
        data.xc_file(path, skip_bad=2)
    with caplog.at_level(logging.WARNING, "samplex_cuda.data"):
        assert len(data.xc_file(path, skip_bad=5)) == 2
    assert "skipped 3 bad lines" in caplog.text
    with pytest.raises(ValueError, match="skip_bad must be an int of at least 0, got -1"):
        data.xc_file(path, skip_bad=-1)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "the file is empty"),
        ("5 6\n1 0:1\n", r":1: the header must be 'rows features labels', got '5 6'"),
        ("1 0:1 2\n", r":1: the header must be 'rows features labels'"),
        ("1 0 4\n1\n", r":1: the header must have 1 to 2147483647 features, got 0"),
        ("3 6 9\n1 0:1\n", "the header says 3 rows, the file has 1"),
        ("1 6 9\n1 0:1\n1 0:1\n", "the header says 1 rows, the file has 2"),
    ],
)
def test_xc_bad_files(tmp_path, text, reason):
    with pytest.raises(ValueError, match=f"^xc_file: .*a.txt:? ?{reason}"):
        data.xc_file(write(tmp_path / "a.txt", text))


def test_line_too_long(tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "MAX_LINE", 1 << 20)
    monkeypatch.setattr(lines, "BLOCK", 1 << 18)
    path = write(tmp_path / "a.txt", "1 2 2\n1 0:1" + " 1:1" * 400_000)
    with pytest.raises(ValueError, match=r"a.txt:2: the line is longer than 1 MiB"):
        data.xc_file(path)


def test_xc_labels_and_classes(tmp_path):
    path = write(tmp_path / "a.txt", XC)
    single = data.open(path, labels="smallest")
    assert single.targets(torch.arange(3)).tolist() == [3, 7, 0]
    assert single.num_classes == 9
    assert data.open(path, labels="smallest", num_classes="observed").num_classes == 8
    assert data.open(path, num_classes=20).num_classes == 20
    with pytest.raises(ValueError, match="num_classes must be an int, 'observed' or None, got 'all'"):
        data.open(path, num_classes="all")


@pytest.mark.parametrize("seed", range(5))
def test_fast_and_slow_parsers_agree(tmp_path, monkeypatch, seed):
    rng = np.random.default_rng(seed)
    text = []
    for _ in range(200):
        labels = ",".join(str(v) for v in rng.integers(0, 50, rng.integers(0, 5)))
        numbers = [repr(float(v)) for v in rng.standard_normal(9) * 10.0 ** rng.integers(-30, 30, 9)]
        features = [f"{j}:{v}" for j, v in zip(rng.integers(0, 99, rng.integers(0, 9)), numbers, strict=False)]
        text.append(f"{labels} " + " ".join(features))
    path = write(tmp_path / "a.txt", "200 99 50\n" + "\n".join(text) + "\n")
    fast = data.xc_file(path, cache_dir=tmp_path / "fast")
    real = sparse_text.fast_rows
    assert real(("\n".join(text) + "\n").encode(), 0, 99, 50) is not None
    monkeypatch.setattr(sparse_text, "fast_rows", lambda *a: None)
    slow = data.xc_file(path, cache_dir=tmp_path / "slow")
    for name in ("indptr", "indices", "values"):
        assert np.array_equal(getattr(fast, name), getattr(slow, name))
    assert fast.fingerprint() == slow.fingerprint()


# ---------------------------------------------------------------------------------------------------- svmlight
SVM = "# made by hand\n3 qid:7 1:0.5 4:1 # first\n\n0 2:2\n 1:1\n1,2 3:1\n"
SVM_ROWS = [([3], [0, 3], [0.5, 1.0]), ([0], [1], [2.0]), ([], [0], [1.0]), ([1, 2], [2], [1.0])]


@pytest.mark.parametrize("slow", [False, True])
def test_svmlight(tmp_path, monkeypatch, slow):
    if slow:
        monkeypatch.setattr(sparse_text, "fast_rows", lambda *a: None)
    found = data.open(write(tmp_path / "a.svm", SVM))
    assert csr(found) == SVM_ROWS
    assert (found.num_classes, found.num_features) == (4, 4)


def test_svmlight_bases(tmp_path):
    path = write(tmp_path / "a.svm", "1 1:1 3:1\n2 2:1\n")
    assert csr(data.svmlight_file(path)) == [([1], [0, 2], [1, 1]), ([2], [1], [1])]
    assert csr(data.svmlight_file(path, index_base=0)) == [([1], [1, 3], [1, 1]), ([2], [2], [1])]
    assert csr(data.svmlight_file(path, label_base=1)) == [([0], [0, 2], [1, 1]), ([1], [1], [1])]
    assert data.svmlight_file(path, num_features=10).num_features == 10
    zero = write(tmp_path / "b.svm", "1 0:1 3:1\n")
    assert csr(data.svmlight_file(zero)) == [([1], [0, 3], [1, 1])]
    with pytest.raises(ValueError, match=r"b.svm:1: feature 0 is outside \[1, "):
        data.svmlight_file(zero, index_base=1)
    with pytest.raises(ValueError, match="num_features must be at least 4, got 2"):
        data.svmlight_file(zero, num_features=2)


@pytest.mark.parametrize("name", ["+3", "3.0", "3"])
def test_svmlight_numbers_as_labels(tmp_path, name):
    assert data.svmlight_file(write(tmp_path / "a.svm", f"{name} 1:1\n")).targets(torch.tensor([0])).tolist() == [3]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("1 1:1\n-1 1:1\n", r":2: label -1 is outside \[0, 2147483647\]"),
        ("1 1:1\n1.5 1:1\n", ":2: label '1.5' is no whole number"),
        ("1 1:1\na 1:1\n", ":2: label 'a' is no finite number"),
        ("1 1:1\n1 qid:x 1:1\n", ":2: qid 'x' is no whole number"),
        ("1 1:1\n1 1:1 qid:3\n", ":2: feature 'qid' is no whole number"),
        ("1 1:1\n1:2 2:1\n", ":2: label '1:2' is no whole number"),
        ("# nothing\n\n", ": the file has no rows"),
    ],
)
def test_svmlight_bad(tmp_path, text, reason):
    path = write(tmp_path / "a.svm", text)
    with pytest.raises(ValueError, match=f"^svmlight_file: .*a.svm{reason}"):
        data.svmlight_file(path)
    if ":2" in reason:
        assert csr(data.svmlight_file(path, skip_bad=1)) == [([1], [0], [1.0])]


def test_svmlight_as_scikit_learn_reads_it(tmp_path):
    datasets = pytest.importorskip("sklearn.datasets")
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((50, 20)) * (rng.random((50, 20)) < 0.3), rng.integers(0, 9, 50)
    datasets.dump_svmlight_file(x, y, str(tmp_path / "a.svm"), zero_based=False, comment="by scikit-learn")
    found = data.svmlight_file(tmp_path / "a.svm", index_base=1, num_features=20)
    batch = found.batch(torch.arange(50))
    rows = np.repeat(np.arange(50), batch["offsets"].diff().numpy())
    mine = np.zeros((50, 20), np.float32)
    mine[rows, batch["ids"].numpy()] = batch["values"].numpy()
    np.testing.assert_allclose(mine, x, rtol=1e-6)
    assert batch["y"].tolist() == y.tolist()


# ---------------------------------------------------------------------------------------------------- arrays
def test_npy(tmp_path):
    x = np.arange(12, dtype=np.float16).reshape(4, 3)
    np.save(tmp_path / "train_x.npy", x)
    np.save(tmp_path / "train_y.npy", np.array([1, 0, 2, 1], np.int32))
    found = data.open(tmp_path / "train_x.npy")
    assert isinstance(found.x, np.memmap)
    assert found.batch(torch.tensor([2]))["x"].tolist() == [[6, 7, 8]]
    assert data.open(tmp_path / "train_x.npy", y=tmp_path / "train_y.npy").fingerprint() == found.fingerprint()
    folder = tmp_path / "folder"
    folder.mkdir()
    np.save(folder / "x.npy", x)
    np.save(folder / "y.npy", np.array([1, 0, 2, 1], np.int32))
    assert data.open(folder).fingerprint() == found.fingerprint()


def test_npy_bad(tmp_path):
    np.save(tmp_path / "x.npy", np.ones((3, 2)))
    with pytest.raises(FileNotFoundError, match=r"npy_file: .*y.npy: there is no such file"):
        data.open(tmp_path / "x.npy")
    np.save(tmp_path / "y.npy", np.arange(4))
    with pytest.raises(ValueError, match=r"npy_file: .*x.npy: Dense: y must be \[3\] or \[3, P\], got \[4\] int64"):
        data.open(tmp_path / "x.npy")
    np.save(tmp_path / "y.npy", np.array([0, 1, None]), allow_pickle=True)
    with pytest.raises(ValueError, match=r"npy_file: .*y.npy: it holds Python objects, which are not read"):
        data.open(tmp_path / "x.npy")
    write(tmp_path / "y.npy", (tmp_path / "x.npy").read_bytes()[:-10])
    with pytest.raises(ValueError, match=r"npy_file: .*y.npy: it is no npy file that can be mapped"):
        data.open(tmp_path / "x.npy")
    np.save(tmp_path / "train.npy", np.ones((3, 2)))
    with pytest.raises(ValueError, match=r"y must be given where the name of x does not end with x, got train.npy"):
        data.open(tmp_path / "train.npy")


def test_memmap(tmp_path):
    np.arange(12, dtype=np.float32).tofile(tmp_path / "x.dat")
    np.array([1, 0, 2, 1], np.int32).tofile(tmp_path / "y.dat")
    found = data.open(tmp_path / "x.dat", y=tmp_path / "y.dat", num_features=3, y_dtype="int32")
    assert isinstance(found.x, np.memmap)
    assert found.batch(torch.tensor([1]))["x"].tolist() == [[3, 4, 5]]
    with pytest.raises(ValueError, match=r"x.dat: it must have a multiple of 20 bytes \(5 float32\), got 48"):
        data.open(tmp_path / "x.dat", y=tmp_path / "y.dat", num_features=5)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz(tmp_path, save):
    x, y = np.random.default_rng(0).standard_normal((50, 6)), np.arange(50) % 7
    save(tmp_path / "a.npz", x=x, y=y)
    found = data.open(tmp_path / "a.npz")
    assert isinstance(found.x, np.memmap)
    np.testing.assert_allclose(found.batch(torch.arange(50))["x"].numpy(), x, rtol=1e-6)
    assert found.targets(torch.arange(50)).tolist() == y.tolist()


def test_npz_bad(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.ones((2, 2)), z=np.ones(2))
    with pytest.raises(ValueError, match=r"npz_file: .*a.npz: it must have an array 'y', got \['x', 'z'\]"):
        data.open(tmp_path / "a.npz")
    np.savez(tmp_path / "b.npz", x=np.array([[1], [None]]), y=np.ones(2, int))
    with pytest.raises(ValueError, match="x holds Python objects, which are not read"):
        data.open(tmp_path / "b.npz")
    np.savez(tmp_path / "c.npz", x=np.asfortranarray(np.ones((2, 2))), y=np.ones(2, int))
    with pytest.raises(ValueError, match=r"x must be stored row by row \(C order\)"):
        data.open(tmp_path / "c.npz")
    with pytest.raises(ValueError, match="it is no npz file"):
        data.npz_file(write(tmp_path / "d.npz", b"no zip"))
    raw = bytearray((tmp_path / "a.npz").read_bytes())
    np.savez(tmp_path / "e.npz", x=np.ones((200, 2)), y=np.ones(200, int))
    raw = bytearray((tmp_path / "e.npz").read_bytes())
    raw[1000] ^= 1
    with pytest.raises(ValueError, match="x is damaged"):
        data.npz_file(write(tmp_path / "f.npz", bytes(raw)))


def test_csr(tmp_path):
    sparse = pytest.importorskip("scipy.sparse")
    rng = np.random.default_rng(0)
    x = sparse.random(30, 12, 0.3, format="csr", random_state=rng)
    tags = sparse.random(30, 8, 0.3, format="csr", random_state=rng)
    sparse.save_npz(tmp_path / "x.npz", x)
    sparse.save_npz(tmp_path / "tags.npz", tags, compressed=False)
    np.save(tmp_path / "one.npy", np.arange(30) % 5)
    several = data.open(tmp_path / "x.npz", y=tmp_path / "tags.npz")
    found = several.batch(torch.arange(30))
    assert several.num_classes == 8
    rows = np.repeat(np.arange(30), found["offsets"].diff().numpy())
    mine = np.zeros((30, 12), np.float32)
    mine[rows, found["ids"].numpy()] = found["values"].numpy()
    np.testing.assert_allclose(mine, x.toarray(), rtol=1e-6)
    for row, y in zip(tags.toarray(), found["y"].tolist(), strict=True):
        assert set(np.flatnonzero(row)) == set(y) - {-100}
    single = data.open(tmp_path / "x.npz", y=tmp_path / "one.npy")
    assert single.targets(torch.arange(30)).tolist() == (np.arange(30) % 5).tolist()
    assert single.fingerprint() != several.fingerprint()
    assert isinstance(single.values, np.memmap)


def test_csr_bad(tmp_path):
    sparse = pytest.importorskip("scipy.sparse")
    sparse.save_npz(tmp_path / "csc.npz", sparse.random(3, 4, 0.5, format="csc"))
    with pytest.raises(ValueError, match=r"csr_file: .*csc.npz: the matrix must be in format 'csr', got 'csc'"):
        data.open(tmp_path / "csc.npz")
    sparse.save_npz(tmp_path / "x.npz", sparse.random(3, 4, 0.5, format="csr"))
    with pytest.raises(ValueError, match=r"csr_file: .*x.npz: it must have an array 'y'"):
        data.open(tmp_path / "x.npz")
    sparse.save_npz(tmp_path / "y.npz", sparse.random(2, 4, 0.5, format="csr"))
    with pytest.raises(ValueError, match=r"csr_file: .*y.npz: the matrix must have 3 rows as x, got 2"):
        data.open(tmp_path / "x.npz", y=tmp_path / "y.npz")
    parts = {"indptr": np.array([0, 1]), "data": np.ones(1), "format": np.array(b"csr"), "y": np.array([0])}
    np.savez(tmp_path / "a.npz", indices=np.array([5]), shape=np.array([1, 4]), **parts)
    with pytest.raises(ValueError, match=r"a.npz: indices must be in \[0, 4\), got 5"):
        data.open(tmp_path / "a.npz")
    np.savez(tmp_path / "b.npz", indices=np.array([1]), shape=np.array([2, 4]), **parts)
    with pytest.raises(ValueError, match=r"b.npz: indptr must be \[3\] to fit the shape, got \[2\]"):
        data.open(tmp_path / "b.npz")


# ---------------------------------------------------------------------------------------------------- text
def test_text(tmp_path):
    train = data.open(write(tmp_path / "train.tokens", "the cat\n\n the  dog the\n"), window=3, columns=1)
    assert train.vocabulary == ["the", "<eos>", "cat", "dog", "<unk>"]
    assert train.tokens.tolist() == [0, 2, 1, 1, 0, 3, 0, 1]
    assert train.num_classes == 5
    valid = data.open(write(tmp_path / "valid.tokens", "the cow\n"), vocabulary=train, window=3, columns=1)
    assert valid.tokens.tolist() == [0, 4, 1]
    assert valid.num_classes == 5
    assert "1 of 3 words (33.33%)" in valid.notes[0]
    words = write(tmp_path / "words.txt", "\n".join(train.vocabulary))
    assert data.text_file(tmp_path / "valid.tokens", vocabulary=words, columns=1).tokens.tolist() == [0, 4, 1]


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_text_in_blocks(tmp_path, monkeypatch, size):
    monkeypatch.setattr(lines, "BLOCK", size)
    path = write(tmp_path / "a.tokens", "ä b\r\nc ä\n\nb ä")
    found = data.text_file(path, columns=1)
    assert " ".join(found.vocabulary[t] for t in found.tokens) == "ä b <eos> c ä <eos> <eos> b ä <eos>"


def test_text_options(tmp_path):
    path = write(tmp_path / "a.tokens", "A a a b B c <unk>\n")
    found = data.text_file(path, lower=True, min_count=2, columns=1)
    assert found.vocabulary == ["a", "b", "<unk>", "<eos>"]
    assert " ".join(found.vocabulary[t] for t in found.tokens) == "a a a b b <unk> <unk> <eos>"
    small = data.text_file(path, lower=True, max_size=3, columns=1)
    assert small.vocabulary == ["a", "<unk>", "<eos>"]
    bare = data.text_file(path, eos=False, columns=1)
    assert "<eos>" not in bare.vocabulary
    assert len(bare.tokens) == 7
    no_unknown = write(tmp_path / "b.tokens", "x x y z\n")
    assert data.text_file(no_unknown, max_size=3, columns=1).vocabulary == ["x", "<eos>", "<unk>"]


def test_text_bad(tmp_path):
    with pytest.raises(ValueError, match=r"a.tokens: the file has no words"):
        data.text_file(write(tmp_path / "a.tokens", ""))
    path = write(tmp_path / "b.tokens", b"good line\nbad \xff line\n")
    with pytest.raises(ValueError, match=r"b.tokens:2: byte 5 is no UTF-8 \(invalid start byte\)"):
        data.text_file(path, columns=1)
    assert len(data.text_file(path, columns=1, skip_bad=1).tokens) == 3
    with pytest.raises(ValueError, match="vocabulary must have <unk>, got 2 words without it"):
        data.text_file(path, vocabulary=["a", "b"])
    with pytest.raises(ValueError, match="vocabulary must have every word once, got 1 twice"):
        data.text_file(path, vocabulary=["a", "a", "<unk>"])


# ---------------------------------------------------------------------------------------------------- interactions
@pytest.mark.parametrize("size", [4, 1000])
@pytest.mark.parametrize("relabel", [False, True])
def test_interaction_lists(tmp_path, monkeypatch, size, relabel):
    monkeypatch.setattr(lines, "BLOCK", size)
    path = write(tmp_path / "a.txt", "0 0 1 2\n1 3\n2\n\n4 1 0\n")
    found = data.open(path, format="interactions", relabel=relabel)
    assert found.items.tolist() == [0, 1, 2, 3, 1, 0]
    assert found.indptr.tolist() == ([0, 3, 4, 4, 6] if relabel else [0, 3, 4, 4, 4, 6])
    assert found.num_classes == 4
    if relabel:
        assert found.user_names == ["0", "1", "2", "4"]


def test_users_in_any_order(tmp_path, monkeypatch):
    monkeypatch.setattr(interaction_files, "_STEP", 3)
    path = write(tmp_path / "a.txt", "2 5 6\n0 1\n2 7\n1 2 3 4\n0 0\n")
    found = data.interactions_file(path)
    assert found.indptr.tolist() == [0, 2, 5, 8]
    assert found.items.tolist() == [1, 0, 2, 3, 4, 5, 6, 7]
    left = sorted(path.name for path in next(tmp_path.glob("*.sxcache")).iterdir())
    assert left == ["indptr.npy", "items.npy", "meta.json"]


@pytest.mark.parametrize("step", [2, 1000])
@pytest.mark.parametrize(
    ("name", "text", "options"),
    [
        ("a.csv", "user,item,time\n1,5,30\n0,4,20\n1,6,10\n0,3,20\n1,7,20.5\n", {}),
        ("a.csv", "1,5,30\n0,4,20\n1,6,10\n0,3,20\n1,7,20.5\n", {}),
        ("a.tsv", "1\t5\t30\n0\t4\t20\n1\t6\t10\n0\t3\t20\n1\t7\t2.05e1\n", {}),
        ("a.csv", "uid,item,stars,when\n1,5,2,30\n0,4,1,20\n1,6,1,10\n0,3,1,20\n1,7,5,21\n", {"fields": (0, 1, 3)}),
        (
            "a.csv",
            "when,item,uid\n30,5,1\n20,4,0\n10,6,1\n20,3,0\n21,7,1\n",
            {"fields": ("uid", "item", "when"), "header": True},
        ),
    ],
)
def test_interaction_tables(tmp_path, monkeypatch, name, text, options, step):
    monkeypatch.setattr(interaction_files, "_STEP", step)
    found = data.open(write(tmp_path / name, text), **options)
    assert found.indptr.tolist() == [0, 2, 5]
    assert found.items.tolist() == [4, 3, 6, 7, 5]


def test_interaction_table_without_time_and_with_names(tmp_path):
    path = write(tmp_path / "a.csv", "user,item\nann,tea\nbob,milk\nann,milk\n")
    found = data.open(path, relabel=True)
    assert found.items.tolist() == [0, 1, 1]
    assert found.user_names == ["ann", "bob"]
    assert found.item_names == ["tea", "milk"]
    with pytest.raises(ValueError, match=r"a.csv:2: user 'ann' is no whole number"):
        data.open(path)


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("a.csv", "0,1,2\n0,x,2\n", ":2: item 'x' is no whole number"),
        ("a.csv", "0,1,2\n0,7.0,2\n", ":2: item '7.0' is no whole number"),
        ("a.csv", "0,1,2\n0,,2\n", ":2: item '' is no whole number"),
        ("a.csv", "0,1,2\n0,1\n", ":2: the line must have 3 fields, got 2"),
        ("a.csv", "0,1,2\n0,1,monday\n", ":2: time 'monday' is no finite number"),
        ("a.csv", "0,1,2\n0,9999999999,2\n", r":2: item 9999999999 is outside \[0, 2147483646\]"),
        ("a.txt", "0 1 2\n1 -2\n", ":2: item '-2' is no whole number"),
        ("a.txt", "0 1 2\nu 2\n", ":2: user 'u' is no whole number"),
    ],
)
def test_interactions_bad_lines(tmp_path, name, text, reason):
    path = write(tmp_path / name, text)
    with pytest.raises(ValueError, match=f"^interactions_file: .*{name}{reason}"):
        data.open(path, format="interactions")
    found = data.open(path, format="interactions", skip_bad=1)
    assert found.num_users == 1
    assert "skipped 1 bad line" in found.notes[0]


def test_interactions_bad_files(tmp_path):
    with pytest.raises(ValueError, match=r"a.csv: the file is empty"):
        data.open(write(tmp_path / "a.csv", ""))
    with pytest.raises(ValueError, match=r"b.csv: the file has no interactions"):
        data.open(write(tmp_path / "b.csv", "user,item\n"))
    with pytest.raises(ValueError, match=r"c.csv:1: a line must be user,item, got '1'"):
        data.open(write(tmp_path / "c.csv", "1\n"))
    with pytest.raises(ValueError, match=r"fields must be in \[0, 2\), got 4"):
        data.open(write(tmp_path / "d.csv", "1,2\n"), fields=(0, 4))
    with pytest.raises(ValueError, match="num_items must be at least 10, got 3"):
        data.open(write(tmp_path / "e.txt", "0 9\n"), format="interactions", num_items=3)


def test_a_stray_user_does_not_take_all_memory(tmp_path):
    """Tables have a place for each number below the largest: 2 * 10^9 of them for one wrong id."""
    path = write(tmp_path / "a.txt", "0 4 3\n2000000000 1 2\n")
    with pytest.raises(ValueError, match=r"a.txt: users must be .* got user 2000000000 in 4 interactions; relabel"):
        data.interactions_file(path)
    found = data.interactions_file(path, relabel=True)
    assert (found.num_users, found.user_names) == (2, ["0", "2000000000"])


def test_sequences_and_known(tmp_path):
    sessions = data.open(write(tmp_path / "a.txt", "4 3 9\n\n1 2\n"), format="sequences")
    assert sessions.indptr.tolist() == [0, 3, 5]
    train = data.open(write(tmp_path / "train.txt", "0 1 2\n1 3 9\n"), format="interactions")
    test = data.open(write(tmp_path / "test.txt", "1 4 5\n"), format="interactions", known=train)
    assert test.batch(torch.tensor([0]))["y"].tolist() == [[4, 5]]
    assert test.batch(torch.tensor([0]))["history"][0, -2:].tolist() == [3, 9]
    with pytest.raises(ValueError, match="num_items must be at least 31, got 10"):
        data.open(write(tmp_path / "more.txt", "1 30\n"), format="interactions", known=train)


# ---------------------------------------------------------------------------------------------------- parquet
@pytest.fixture
def parquet(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")

    def write_table(name, **columns):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        arrow.parquet.write_table(arrow.table(columns), tmp_path / name, row_group_size=3)
        return tmp_path / name

    return write_table


def test_parquet_dense(tmp_path, parquet):
    x = np.arange(15.0).reshape(5, 3)
    path = parquet("a.parquet", x=x.tolist(), label=[3, 1, 0, 2, 2])
    found = data.open(path)
    assert isinstance(found.x, np.memmap)
    np.testing.assert_array_equal(found.batch(torch.arange(5))["x"], x)
    assert found.targets(torch.arange(5)).tolist() == [3, 1, 0, 2, 2]
    columns = parquet("b.parquet", a=x[:, 0], b=x[:, 1].astype(int), c=x[:, 2], y=[[1], [2, 3], [], [4], [0]])
    found = data.open(columns)
    np.testing.assert_array_equal(found.batch(torch.arange(5))["x"], x)
    assert found.targets(torch.arange(3)).tolist() == [[1, -100], [2, 3], [-100, -100]]
    assert data.open(columns, x=["c", "a"], y="b").batch(torch.tensor([1]))["x"].tolist() == [[5.0, 3.0]]
    for part in range(2):
        parquet(f"folder/{part}.parquet", x=(x + part).tolist(), label=[part] * 5)
    both = data.open(tmp_path / "folder")
    assert both.targets(torch.arange(10)).tolist() == [0] * 5 + [1] * 5


def test_parquet_sparse_and_interactions(parquet):
    path = parquet("a.parquet", indices=[[0, 4], [], [1]], values=[[1.0, 2.0], [], [3.0]], y=[[7], [5, 6], []])
    assert csr(data.open(path)) == [([7], [0, 4], [1.0, 2.0]), ([5, 6], [], []), ([], [1], [3.0])]
    when = np.array([3, 1, 2], "datetime64[s]")
    found = data.open(parquet("b.parquet", user=[1, 1, 0], item=[5, 6, 7], time=when))
    assert (found.indptr.tolist(), found.items.tolist()) == ([0, 1, 3], [7, 6, 5])


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"x": [[1.0], [1.0, 2.0]], "y": [0, 1]}, "row 1: its 'x' must have 1 numbers as the first row"),
        ({"x": [[1.0], None], "y": [0, 1]}, "row 1 of column 'x' is empty"),
        ({"x": [[1.0], [None]], "y": [0, 1]}, "row 1 of column 'x' has an empty entry"),
        ({"x": [[1.0], [float("nan")]], "y": [0, 1]}, "row 1: it has a number that is not finite"),
        ({"x": [[1.0], [2.0]], "y": [0, -1]}, "row 1: its label is below 0"),
        ({"x": [[1.0], [2.0]], "y": [0.5, 1]}, "column 'y' must be whole numbers or lists of them, got double"),
        ({"x": [[1.0], [2.0]], "z": [0, 1]}, r"y must name the column of labels, one of \['x', 'z'\]"),
        (
            {"indices": [[1], [2]], "values": [[1.0], []], "y": [0, 1]},
            "row 1: 'indices' and 'values' must have the same",
        ),
        ({"indices": [[1], [-2]], "y": [0, 1]}, "row 1: an entry of 'indices' is below 0"),
        ({"user": [0, -1], "item": [0, 1]}, "row 1: its 'user' is outside"),
    ],
)
def test_parquet_bad(parquet, columns, reason):
    path = parquet("a.parquet", **columns)
    with pytest.raises(ValueError, match=f"^parquet_file: .*a.parquet: {reason}"):
        data.open(path)


def test_parquet_without_pyarrow(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ImportError, match=r"parquet_file needs pyarrow: pip install samplex-cuda\[parquet\]"):
        data.open(write(tmp_path / "a.parquet", b""))


def test_no_parquet_file(tmp_path):
    pytest.importorskip("pyarrow")
    with pytest.raises(ValueError, match=r"a.parquet: it is no parquet file"):
        data.open(write(tmp_path / "a.parquet", b"nothing of the kind"))


# ---------------------------------------------------------------------------------------------------- open
def test_open_guesses(tmp_path):
    assert data.open(write(tmp_path / "a.txt", XC)).num_classes == 9
    assert data.open(write(tmp_path / "b.txt", "3 1:1 2:2\n1 2:3\n0 1:1\n")).num_classes == 4
    with pytest.raises(ValueError, match=r"open: .*c.txt: format must be given, one of xc, svmlight"):
        data.open(write(tmp_path / "c.txt", "0 1 2\n1 2 3\n"))
    with pytest.raises(FileNotFoundError, match=r"open: .*none.txt: there is no such file"):
        data.open(tmp_path / "none.txt")
    with pytest.raises(FileNotFoundError, match=r"xc_file: .*none.txt: there is no such file"):
        data.open(tmp_path / "none.txt", format="xc")
    with pytest.raises(ValueError, match=r"format must be one of xc, .*builtin, got 'arff'"):
        data.open(tmp_path / "a.txt", format="arff")
    with pytest.raises(ValueError, match="open: format 'xc' has no option 'window'; it has labels, num_classes"):
        data.open(tmp_path / "a.txt", window=3)
    with pytest.raises(ValueError, match=r"a folder must have x.npy and y.npy, or .parquet files"):
        data.open(tmp_path)
    with pytest.raises(ValueError, match="open: format 'memmap' needs the options num_features, got y"):
        data.open(write(tmp_path / "a.dat", ""), y="y.npy")
    # The first row of an XC file may have no features.
    assert len(data.open(write(tmp_path / "none.txt", "2 5 9\n3\n4 1:1\n"))) == 2


def test_open_builtin():
    found = data.open("builtin:classes=2000,dim=8,examples=1_000,noise=0.5,split=valid", seed=4)
    assert (len(found), found.num_classes, found.law.noise, found.law.seed) == (1000, 2000, 0.5, 4)
    assert data.open("builtin").num_classes == 100_000
    assert data.open("x", format="builtin", num_classes=50).num_classes == 50
    with pytest.raises(ValueError, match="a setting of builtin must be name=value, got 'many'"):
        data.open("builtin:many")
    with pytest.raises(ValueError, match="format 'builtin' has no option 'size'"):
        data.open("builtin:size=3")


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
