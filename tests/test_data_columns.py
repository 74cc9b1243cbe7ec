"""Columns of interactions mean what their header says; what could mean several things is refused."""

from __future__ import annotations

import numpy as np
import pytest
from cli_cases import one_thread, samplex

from samplex_cuda import data

__all__ = ["one_thread"]

# user 1 took 10, 11, 12 in this order of time; the file has another. Ratings would sort them 12, 10, 11.
ROWS = [(1, 11, 5, 978300100), (1, 10, 3, 978300050), (2, 7, 4, 978300000), (1, 12, 1, 978300200)]
ITEMS = {1: [10, 11, 12], 2: [7]}


def write(path, order, separator=",", header=None):
    lines = [] if header is None else [header]
    lines += [separator.join(str(row[place]) for place in order) for row in ROWS]
    path.write_text("\n".join(lines) + "\n")
    return path


def items(found):
    return {user: found.items[found.indptr[user] : found.indptr[user + 1]].tolist() for user in (1, 2)}


HEADERS = {
    "userId,movieId,rating,timestamp": [0, 1, 2, 3],
    "user,item,rating,time": [0, 1, 2, 3],
    "user_id,item_id,timestamp,rating": [0, 1, 3, 2],
    "timestamp,rating,item_id,user_id": [3, 2, 1, 0],
    '"asin","reviewerID","overall","unixReviewTime"': [1, 0, 2, 3],
    "user_id:token,item_id:token,rating:float,timestamp:float": [0, 1, 2, 3],
    "UserId,ProductId,Score,Time": [0, 1, 2, 3],
    "user,thing,timestamp": [0, 1, 3],
}


@pytest.mark.parametrize("header", HEADERS)
def test_the_header_says_what_a_column_is(tmp_path, header):
    found = data.open(write(tmp_path / "a.csv", HEADERS[header], header=header))
    assert items(found) == ITEMS
    assert "= user" in found.columns_said
    assert "= time" in found.columns_said
    if "rating" in header:
        assert "rating" in found.columns_said.partition("not used: ")[2]


@pytest.mark.parametrize(("name", "separator"), [
    ("ml.train.rating", "\t"), ("a.inter", "\t"), ("u.data", "\t"), ("ratings.dat", "::"), ("a.csv", ","),
    ("a.tsv", "\t"), ("a.rating", " "), ("a.ratings", ","),
])  # fmt: skip
def test_the_usual_layout_of_ratings(tmp_path, name, separator):
    found = data.open(write(tmp_path / name, [0, 1, 2, 3], separator))
    assert items(found) == ITEMS
    assert found.num_classes == 13
    said = (
        "column 0 = user, column 1 = item, column 3 = time (looks like one); not used: column 2 (looks like a rating)"
    )
    assert found.columns_said == f"columns: {said}"


def test_without_a_time_the_order_of_the_file_stays(tmp_path):
    found = data.open(write(tmp_path / "a.csv", [0, 1, 2], header="user,item,rating"))
    assert items(found) == {1: [11, 10, 12], 2: [7]}
    assert "time" not in found.columns_said
    found = data.open(write(tmp_path / "b.csv", [0, 1]))
    assert items(found) == {1: [11, 10, 12], 2: [7]}


REFUSED = {
    "third": ("a.csv", [0, 1, 2], None, r"the third of 3 columns could be a rating or a time.*fields=\[0, 1, 2\]"),
    "four": ("a.csv", [0, 1, 3, 2], None, r"4 columns could mean several things.*data.options.fields=\[0, 1, 3\]"),
    "five": ("a.csv", [0, 1, 2, 3, 3], None, "5 columns could mean several things"),
    "two users": ("a.csv", [0, 1, 2], "user,user_id,item", "the header has more than one user"),
    "no item": ("a.csv", [0, 1, 2, 3], "user,foo,bar,time", "the header has no item"),
    "two times": ("a.csv", [0, 1, 3, 3], "user,item,date,timestamp", "the header has more than one time"),
    "unknown": ("a.csv", [0, 1], "foo,bar", "the first line has names that are not known"),
    "list": ("a.txt", [0, 1, 2, 3], None, r"every line looks like user, item, \(rating,\) time.*layout=table"),
    "list of times": ("a.txt", [0, 1, 3], None, "every line looks like user, item"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_could_mean_several_things_is_refused(tmp_path, case):
    name, order, header, message = REFUSED[case]
    path = write(tmp_path / name, order, " " if name == "a.txt" else ",", header)
    with pytest.raises(ValueError, match=message):
        data.open(path, format="interactions")
    options = {"layout": "table"} if name == "a.txt" else {"fields": [0, 1]}
    if case == "unknown":
        options["header"] = True
    assert len(data.open(path, format="interactions", **options).items) == 4


def test_the_option_settles_it(tmp_path):
    path = write(tmp_path / "a.csv", [0, 1, 2])
    assert items(data.open(path, fields=[0, 1, 2])) == {1: [12, 10, 11], 2: [7]}
    assert items(data.open(path, fields=[0, 1])) == {1: [11, 10, 12], 2: [7]}
    with pytest.raises(ValueError, match="fields must be different columns"):
        data.open(path, fields=[0, 0])


def test_ids_with_text_are_no_header(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("user1,itemA\nuser1,itemB\n")
    assert data.open(path, relabel=True).user_names == ["user1"]
    assert data.open(path, relabel=True).item_names == ["itemA", "itemB"]


def test_times_as_items_are_said_before_memory_runs_out(tmp_path):
    path = write(tmp_path / "a.txt", [0, 1, 2, 3], " ")
    with pytest.raises(ValueError, match=r"got item 978300200 .*; pass relabel=True .* layout and fields"):
        data.open(path, format="interactions", layout="lists")


def test_parquet_knows_the_same_names(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = {"movieId": 1, "rating": 2, "timestamp": 3, "userId": 0}
    table = arrow.table({name: np.array([row[place] for row in ROWS]) for name, place in columns.items()})
    parquet.write_table(table, tmp_path / "a.parquet")
    found = data.open(tmp_path / "a.parquet")
    assert items(found) == ITEMS
    assert found.columns_said == 'columns: "userId" = user, "movieId" = item, "timestamp" = time; not used: rating'


def test_the_command_says_it_first(tmp_path):
    path = write(tmp_path / "a.csv", [0, 1, 2, 3], header="userId,movieId,rating,timestamp")
    words = ["--model", "two_tower", "--set", "data.valid_fraction=0.5", "--set", "training.epochs=1", "--set",
             "model.dim=4", "--set", "training.plot=false", "--out", tmp_path / "run"]  # fmt: skip
    said = samplex("train", "--data", path, *words).output.splitlines()
    assert said[1].startswith(
        'columns: column 0 "userId" = user, column 1 "movieId" = item, column 3 "timestamp" = time'
    )
    plain = write(tmp_path / "b.csv", [0, 1, 2])
    result = samplex("train", "--data", plain, "--model", "two_tower", "--out", tmp_path / "other", code=1)
    assert "--set 'data.options.fields=[0, 1, 2]'" in result.stderr
