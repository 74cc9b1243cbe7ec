"""Sparse rows, arrays and text from files: what is read, what is refused and with which message."""

from __future__ import annotations

import bz2
import gzip
import logging
import lzma

import numpy as np
import pytest
import torch
from data_file_cases import XC, XC_ROWS, csr, write

from samplex_cuda import data
from samplex_cuda.data import lines, sparse_text


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
        ("x 0:1", "label 'x' is not a whole number"),
        ("3,,4 0:1", "label '' is not a whole number"),
        ("-1 0:1", "label '-1' is not a whole number"),
        ("2.0 0:1", "label '2.0' is not a whole number"),
        ("0:1 1:2", "label '0:1' is not a whole number; a row without labels starts with a space"),
        ("3 6:1", r"feature 6 is outside \[0, 6\)"),
        ("3 -1:1", "feature '-1' is not a whole number"),
        ("3 1", "feature '1' must be index:value"),
        ("3 1:", "value of feature 1 '' is not a finite number"),
        ("3 1:a", "value of feature 1 'a' is not a finite number"),
        ("3 1:2:3", "value of feature 1 '2:3' is not a finite number"),
        ("3 1:nan", "value of feature 1 'nan' is not a finite number"),
        ("3 1:1e999", "value of feature 1 '1e999' is not a finite number"),
        ("3 1:1e300", "value of feature 1 '1e300' does not fit a float32"),
        ("3 1:1.2.3", "value of feature 1 '1.2.3' is not a finite number"),
        ("3 1:1-2", "value of feature 1 '1-2' is not a finite number"),
        ("3 :2", "feature '' is not a whole number"),
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
    words = r"bad.txt:5: label 'z' is not a whole number \(more than skip_bad=2 bad lines\)"
    with pytest.raises(ValueError, match=words):
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
        ("1 1:1\n1.5 1:1\n", ":2: label '1.5' is not a whole number"),
        ("1 1:1\na 1:1\n", ":2: label 'a' is not a finite number"),
        ("1 1:1\n1 qid:x 1:1\n", ":2: qid 'x' is not a whole number"),
        ("1 1:1\n1 1:1 qid:3\n", ":2: feature 'qid' is not a whole number"),
        ("1 1:1\n1:2 2:1\n", ":2: label '1:2' is not a whole number"),
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
    with pytest.raises(ValueError, match=r"npy_file: .*y.npy: it holds Python objects, which are not supported"):
        data.open(tmp_path / "x.npy")
    write(tmp_path / "y.npy", (tmp_path / "x.npy").read_bytes()[:-10])
    with pytest.raises(ValueError, match=r"npy_file: .*y.npy: it is not an npy file that can be mapped"):
        data.open(tmp_path / "x.npy")
    np.save(tmp_path / "train.npy", np.ones((3, 2)))
    with pytest.raises(ValueError, match=r"y must be given unless the name of x ends with x, got train.npy"):
        data.open(tmp_path / "train.npy")


def test_memmap(tmp_path):
    np.arange(12, dtype=np.float32).tofile(tmp_path / "x.dat")
    np.array([1, 0, 2, 1], np.int32).tofile(tmp_path / "y.dat")
    found = data.open(tmp_path / "x.dat", y=tmp_path / "y.dat", num_features=3, y_dtype="int32")
    assert isinstance(found.x, np.memmap)
    assert found.batch(torch.tensor([1]))["x"].tolist() == [[3, 4, 5]]
    with pytest.raises(ValueError, match=r"x.dat: its size must be a multiple of 20 bytes \(5 float32\), got 48"):
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
    with pytest.raises(ValueError, match="x holds Python objects, which are not supported"):
        data.open(tmp_path / "b.npz")
    np.savez(tmp_path / "c.npz", x=np.asfortranarray(np.ones((2, 2))), y=np.ones(2, int))
    with pytest.raises(ValueError, match=r"x must be stored row by row \(C order\)"):
        data.open(tmp_path / "c.npz")
    with pytest.raises(ValueError, match="it is not an npz file"):
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
    assert small.vocabulary == ["<unk>", "a", "<eos>"]
    bare = data.text_file(path, eos=False, columns=1)
    assert "<eos>" not in bare.vocabulary
    assert len(bare.tokens) == 7
    no_unknown = write(tmp_path / "b.tokens", "x x y z\n")
    assert data.text_file(no_unknown, max_size=3, columns=1).vocabulary == ["x", "<unk>", "<eos>"]


def test_a_vocabulary_is_extended(tmp_path):
    held = ["b", "<unk>", "a", "<eos>"]
    path = write(tmp_path / "more.tokens", "c a d d\nc d b e\n<unk> f c\n")
    found = data.text_file(path, vocabulary=held, extend=True, columns=1)
    assert found.vocabulary == [*held, "c", "d", "e", "f"]  # by decreasing frequency, equal ones as they came
    assert found.tokens.tolist() == [4, 2, 5, 5, 3, 4, 5, 0, 6, 3, 1, 7, 4, 3]
    assert not found.notes
    again = data.text_file(path, vocabulary=found, columns=1)  # all its words are known now
    assert again.tokens.tolist() == found.tokens.tolist()
    assert again.fingerprint() == found.fingerprint()
    for options, words in (({"min_count": 2}, ["c", "d"]), ({"max_size": 5}, ["c"]), ({"max_size": 2}, [])):
        few = data.text_file(path, vocabulary=held, extend=True, columns=1, **options)
        assert few.vocabulary == held + words
        assert (few.tokens == 1).sum() == 1 + sum(found.vocabulary[t] not in held + words for t in found.tokens)
        assert "outside of the vocabulary" in few.notes[0]
    fixed = data.text_file(path, vocabulary=held, columns=1)
    assert fixed.vocabulary == held
    valid = data.open_like(path, found, extend=True, columns=1)  # of a run that grows: validation text adds no words
    assert valid.vocabulary == found.vocabulary
    with pytest.raises(ValueError, match="extend must be False without a vocabulary to extend, got True"):
        data.text_file(path, extend=True)


def test_text_bad(tmp_path):
    with pytest.raises(ValueError, match=r"a.tokens: the file has no words"):
        data.text_file(write(tmp_path / "a.tokens", ""))
    path = write(tmp_path / "b.tokens", b"good line\nbad \xff line\n")
    with pytest.raises(ValueError, match=r"b.tokens:2: byte 5 is not UTF-8 \(invalid start byte\)"):
        data.text_file(path, columns=1)
    assert len(data.text_file(path, columns=1, skip_bad=1).tokens) == 3
    with pytest.raises(ValueError, match="vocabulary must have <unk>, got 2 words without it"):
        data.text_file(path, vocabulary=["a", "b"])
    with pytest.raises(ValueError, match="vocabulary must have no duplicates, got 1"):
        data.text_file(path, vocabulary=["a", "a", "<unk>"])


def test_labels_of_a_wrong_type_are_said_to_be_integers(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.zeros((3, 2), np.float32), y=np.arange(3.0))
    with pytest.raises(ValueError, match=r"a.npz: y must be \[N\] or \[N, K\] integers, got \[3\] float64"):
        data.open(tmp_path / "a.npz")
