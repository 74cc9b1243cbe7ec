"""Interactions, Parquet, and which reader `open` takes."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from data_file_cases import XC, csr, write

from samplex_cuda import data
from samplex_cuda.data import interaction_files, lines


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
    with pytest.raises(ValueError, match=r"a.csv:2: user 'ann' is not a whole number"):
        data.open(path)


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("a.csv", "0,1,20\n0,x,2\n", ":2: item 'x' is not a whole number"),
        ("a.csv", "0,1,20\n0,7.0,2\n", ":2: item '7.0' is not a whole number"),
        ("a.csv", "0,1,20\n0,,2\n", ":2: item '' is not a whole number"),
        ("a.csv", "0,1,20\n0,1\n", ":2: the line must have 3 fields, got 2"),
        ("a.csv", "0,1,20\n0,1,monday\n", ":2: time 'monday' is not a finite number"),
        ("a.csv", "0,1,20\n0,9999999999,2\n", r":2: item 9999999999 is outside \[0, 2147483646\]"),
        ("a.txt", "0 1 2\n1 -2\n", ":2: item '-2' is not a whole number"),
        ("a.txt", "0 1 2\nu 2\n", ":2: user 'u' is not a whole number"),
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
    with pytest.raises(
        ValueError, match=r"a.txt: user ids must be .* got user 2000000000 in 4 interactions; pass relabel"
    ):
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
    with pytest.raises(ValueError, match=r"a.parquet: it is not a parquet file"):
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
