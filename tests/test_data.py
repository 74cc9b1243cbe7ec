"""Data sets, splits and batches: what a batch holds, that it is a pure function, that orders are of (seed, epoch)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from samplex_cuda import data
from samplex_cuda.data import base, parts


def rows(*numbers):
    return torch.tensor(numbers, dtype=torch.int64)


def dense(n=100, k=4, c=7):
    generator = torch.Generator().manual_seed(1)
    return data.Dense(
        torch.randn(n, k, generator=generator), torch.randint(0, c, (n,), generator=generator), num_classes=c
    )


def sparse(**options):
    return data.Sparse(
        np.array([0, 2, 2, 3, 6]),
        np.array([0, 4, 1, 3, 3, 2]),
        np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]),
        np.array([0, 2, 3, 3, 6]),
        np.array([7, 5, 6, 8, 2, 4]),
        5,
        **options,
    )


# ---------------------------------------------------------------------------------------------------- dense
def test_dense_batch():
    x = np.arange(12, dtype=np.float64).reshape(4, 3)
    found = data.Dense(x, [2, 0, 1, 2]).batch(rows(3, 0))
    assert sorted(found) == ["index", "x", "y"]
    assert found["x"].dtype == torch.float32
    assert found["x"].tolist() == [[9, 10, 11], [0, 1, 2]]
    assert found["y"].tolist() == [2, 2]
    assert found["index"].tolist() == [3, 0]


def test_a_batch_is_a_copy():
    x = np.zeros((2, 2), np.float32)
    set_ = data.Dense(x, [0, 1])
    set_.batch(rows(0, 1))["x"].fill_(5)
    assert not x.any()


@pytest.mark.parametrize(
    ("rule", "kept", "y"),
    [("all", 4, [[4, 1], [-100, -100], [-100, 3], [2, 9]]), ("first", 3, [4, 3, 2]), ("smallest", 3, [1, 3, 2])],
)
def test_dense_label_rules(rule, kept, y):
    table = np.array([[4, 1], [-100, -100], [-100, 3], [2, 9]])
    set_ = data.Dense(np.arange(8.0).reshape(4, 2), table, label_rule=rule)
    assert len(set_) == kept
    assert set_.multi_label == (rule == "all")
    found = set_.batch(torch.arange(kept))
    assert found["y"].tolist() == y
    assert found["x"][-1].tolist() == [6, 7]
    assert set_.num_classes == {"all": 10, "first": 5, "smallest": 4}[rule]


def test_dense_of_a_label_csr():
    set_ = data.Dense(np.ones((3, 2)), (np.array([0, 2, 2, 3]), np.array([5, 1, 3])))
    assert set_.targets(torch.arange(3)).tolist() == [[5, 1], [-100, -100], [3, -100]]
    single = data.Dense(np.ones((2, 2)), (np.array([0, 1, 2]), np.array([5, 1])))
    assert single.targets(torch.arange(2)).tolist() == [5, 1]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: data.Dense(np.ones(3), [0]), r"Dense: x must be a 2-dimensional array of numbers, got \[3\] float64"),
        (lambda: data.Dense(np.ones((3, 2)), [0, 1]), r"Dense: y must be \[3\] or \[3, P\], got \[2\] int64"),
        (
            lambda: data.Dense(np.ones((2, 2)), [0.5, 1]),
            r"y must be a 1-dimensional or 2-dimensional array of integers",
        ),
        (lambda: data.Dense(np.ones((2, 2)), [0, 9], 5), r"Dense: labels must be in \[0, 5\), got 9 in row 1"),
        (lambda: data.Dense(np.ones((2, 2)), [0, -3]), r"Dense: labels must be in 0 and above, got -3 in row 1"),
        (lambda: data.Dense(np.ones((2, 2)), [0, 1], 0), r"Dense: num_classes must be an int of at least 1, got 0"),
        (lambda: data.Dense(np.ones((2, 2)), [0, 1], label_rule="last"), r"label_rule must be one of all, first"),
        (lambda: data.Dense(np.ones((1, 2)), [[-100]]), r"num_classes must be given if there is no label"),
        (lambda: sparse(num_classes=5), r"Sparse: labels must be in \[0, 5\), got 7 in row 0"),
        (
            lambda: data.Sparse([0, 2], [1], None, None, [0], 3),
            r"Sparse: indptr must begin with 0 and end with 1, got 0 ... 2",
        ),
        (
            lambda: data.Sparse([0, 2, 1, 3], [0, 1, 2], None, None, [0, 0, 0], 3),
            r"indptr must not decrease, got 2 then 1",
        ),
        (lambda: data.Sparse([0, 1], [1], [1.0, 2.0], None, [0], 3), r"Sparse: values must be \[1\] to fit indices"),
        (lambda: data.Sparse([0, 1], [1], None, [0, 1, 1], [0], 3), r"Sparse: label_indptr must be \[2\]"),
        (lambda: data.Tokens([1, 2], 5, columns=2), r"Tokens: tokens must be at least columns \+ 1 = 3, got 2"),
        (lambda: data.Tokens([1, 7, 2], 5, columns=1), r"Tokens: tokens must be in \[0, 5\), got 7"),
        (lambda: data.Interactions([0, 1], [9], 5), r"Interactions: items must be in \[0, 5\), got 9"),
        (lambda: data.Interactions([0, 1], [1], 5, order="up"), r"order must be 'time' or 'none', got 'up'"),
        (lambda: data.BuiltIn(10, 2, 5, split="all"), r"BuiltIn: split must be one of train, valid, test, got 'all'"),
        (lambda: data.split(dense(), (0.9, 0.2)), r"split: fractions must be above 0 with a sum of at most 1"),
        (lambda: data.Batches(dense(), 0), r"Batches: batch_size must be an int of at least 1, got 0"),
    ],
)
def test_bad_arguments(make, text):
    with pytest.raises(ValueError, match=text):
        make()


def test_bad_rows():
    with pytest.raises(IndexError, match=r"Dense.batch: rows must be in \[0, 100\), got 100"):
        dense().batch(rows(3, 100))
    with pytest.raises(IndexError, match="got -1"):
        dense().batch(rows(-1))
    with pytest.raises(ValueError, match=r"rows must be \[B\] int64, got \[2\] float32"):
        dense().batch(torch.zeros(2))
    with pytest.raises(IndexError, match=r"Sparse.batch: indices must be in \[0, 2\), got 4"):
        data.Sparse([0, 2], [1, 4], None, None, [0], 2).batch(rows(0))


# ---------------------------------------------------------------------------------------------------- sparse
def test_sparse_batch():
    found = sparse().batch(rows(3, 1, 0))
    assert found["ids"].tolist() == [3, 3, 2, 0, 4]
    assert found["offsets"].tolist() == [0, 3, 3, 5]
    assert found["values"].tolist() == [4, 5, 6, 1, 2]
    assert found["y"].tolist() == [[8, 2, 4], [6, -100, -100], [7, 5, -100]]
    assert sparse().num_classes == 9


def test_sparse_fits_embedding_bag():
    found = sparse().batch(torch.arange(4))
    weight = torch.randn(5, 3)
    bag = torch.nn.functional.embedding_bag(
        found["ids"], weight, found["offsets"], mode="sum", per_sample_weights=found["values"], include_last_offset=True
    )
    x = torch.zeros(4, 5)
    for row, (begin, end) in enumerate(zip([0, 2, 2, 3], [2, 2, 3, 6], strict=True)):
        for place in range(begin, end):
            x[row, [0, 4, 1, 3, 3, 2][place]] += place + 1
    torch.testing.assert_close(bag, x @ weight)


@pytest.mark.parametrize(("rule", "y"), [("first", [7, 6, 8]), ("smallest", [5, 6, 2])])
def test_sparse_single_label(rule, y):
    set_ = sparse(label_rule=rule)
    found = set_.batch(torch.arange(3))
    assert len(set_) == 3
    assert found["y"].tolist() == y
    assert found["offsets"].tolist() == [0, 2, 2, 5]  # the unlabelled row is gone


def test_sparse_without_values_and_with_no_entries():
    set_ = data.Sparse([0, 0, 1], [2], None, None, [3, 1], 4)
    found = set_.batch(rows(0, 1))
    assert found["y"].tolist() == [3, 1]
    assert found["values"].tolist() == [1.0]
    assert set_.batch(rows(0))["ids"].shape == (0,)
    assert set_.batch(rows())["offsets"].tolist() == [0]


# ---------------------------------------------------------------------------------------------------- text
@pytest.mark.parametrize(("n", "window", "columns"), [(9, 3, 2), (100, 7, 4), (101, 5, 1), (50, 100, 3), (7, 1, 6)])
def test_every_token_is_a_target_once(n, window, columns):
    stream = data.Tokens(np.arange(n), n, window, columns)
    batches = list(data.Batches(stream, columns))
    seen = []
    for batch in batches:
        assert batch["tokens"].shape == (columns, window)
        inside = batch["y"] != -100
        assert torch.equal(batch["y"][inside], batch["tokens"][inside] + 1)
        seen += batch["y"][inside].tolist()
    assert sorted(seen) == list(range(1, (n - 1) // columns * columns + 1))
    # Windows of a column continue each other.
    for column in range(columns):
        joined = torch.cat([b["tokens"][column][b["y"][column] != -100] for b in batches])
        assert torch.equal(joined, torch.arange(joined[0], joined[0] + len(joined)))


def test_text_is_not_shuffled():
    stream = data.Tokens(np.arange(50), 50, 5, 4)
    assert stream.ordered
    one, two = ([b["tokens"] for b in data.Batches(stream, 4, seed=s, epoch=s)] for s in (0, 3))
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    with pytest.raises(ValueError, match="batch_size must be the 4 columns of the text, got 8"):
        data.Batches(stream, 8)
    with pytest.raises(ValueError, match="shuffle must be off for text"):
        data.Batches(stream, 4, shuffle=True)


def test_split_of_text_is_contiguous():
    stream = data.Tokens(np.arange(401), 401, 10, 4)
    train, valid = data.split(stream, (0.8, 0.2), seed=5)
    assert train.ordered
    assert train.columns == 4
    tokens = torch.cat([b["tokens"] for b in data.Batches(train, 4)], 1)
    assert torch.equal(tokens[1], torch.arange(100, 180))
    assert torch.equal(torch.cat([b["tokens"] for b in data.Batches(valid, 4)], 1)[0], torch.arange(80, 100))


# ---------------------------------------------------------------------------------------------------- interactions
def test_interactions_by_time():
    set_ = data.Interactions([0, 3, 4, 4, 6], [4, 2, 7, 1, 3, 5], num_items=8, history=2)
    found = set_.batch(torch.arange(len(set_)))
    assert found["user"].tolist() == [0, 0, 3]
    assert found["y"].tolist() == [2, 7, 5]
    assert found["history"].tolist() == [[-1, 4], [4, 2], [-1, 3]]
    assert set_.num_users == 4
    assert set_.num_interactions == 6
    offsets, seen = set_.seen(rows(1, 2))
    assert offsets.tolist() == [0, 2, 3]
    assert seen.tolist() == [4, 2, 3]


def test_interactions_with_empty_histories():
    set_ = data.Interactions([0, 3, 4, 4, 6], [4, 2, 7, 1, 3, 5], num_items=8, history=2, min_history=0)
    found = set_.batch(torch.arange(len(set_)))
    assert found["y"].tolist() == [4, 2, 7, 1, 3, 5]
    assert found["user"].tolist() == [0, 0, 0, 1, 3, 3]
    assert found["history"][3].tolist() == [-1, -1]


def test_interactions_as_sets():
    set_ = data.Interactions([0, 4, 5, 7], [4, 2, 7, 6, 1, 3, 5], num_items=8, history=2, order="none")
    found = set_.batch(torch.arange(len(set_)))
    assert found["y"].tolist() == [4, 2, 7, 6, 3, 5]  # user 1 has nothing beside his item
    assert found["history"].tolist() == [[2, 7], [7, 6], [6, 4], [4, 2], [-1, 5], [-1, 3]]
    offsets, seen = set_.seen(rows(1, 4))
    assert offsets.tolist() == [0, 3, 4]
    assert seen.tolist() == [4, 7, 6, 5]


def test_interactions_with_targets():
    train = data.Interactions([0, 3, 4], [4, 2, 7, 1], num_items=9, history=2)
    test = data.Interactions([0, 2, 2, 3], [5, 8, 6], num_items=9)
    both = train.with_targets(test)
    assert both.multi_label
    assert both.num_users == 3
    found = both.batch(torch.arange(len(both)))
    assert found["user"].tolist() == [0, 2]
    assert found["history"].tolist() == [[2, 7], [-1, -1]]
    assert found["y"].tolist() == [[5, 8], [6, -100]]
    assert both.seen(rows(0, 1))[1].tolist() == [4, 2, 7]
    with pytest.raises(ValueError, match="test must have at most 9 items, got 10"):
        train.with_targets(data.Interactions([0, 1], [1], num_items=10))
    one = train.with_targets(data.Interactions([0, 1, 2], [5, 6], num_items=9))
    assert one.batch(rows(1))["y"].tolist() == [[6]]  # [B, P] also where P is 1


# ---------------------------------------------------------------------------------------------------- built-in
def test_builtin_rows_are_pure():
    one = data.BuiltIn(1000, 5, 300, seed=3)
    whole = one.batch(torch.arange(300))
    part = data.BuiltIn(1000, 5, 9999, seed=3).batch(rows(299, 0, 17))
    assert torch.equal(part["x"], whole["x"][[299, 0, 17]])
    assert torch.equal(part["y"], whole["y"][[299, 0, 17]])
    assert not torch.equal(whole["x"], data.BuiltIn(1000, 5, 300, seed=4).batch(torch.arange(300))["x"])
    valid = data.BuiltIn(1000, 5, 300, seed=3, split="valid").batch(torch.arange(300))
    assert not torch.equal(whole["y"], valid["y"])


@pytest.mark.stat
def test_builtin_law():
    from scipy.stats import chisquare, kstest

    set_ = data.BuiltIn(40, 6, 30_000, seed=1)
    expected = set_.law.class_counts
    assert chisquare(set_.class_counts().numpy(), expected.numpy()).pvalue > 1e-3
    found = set_.batch(torch.arange(5000))
    noise = (found["x"] - set_.law.centres(found["y"])) / (set_.law.noise / 6**0.5)
    assert kstest(noise.reshape(-1).numpy(), "norm").pvalue > 1e-3
    assert np.abs(np.corrcoef(noise.t().numpy()) - np.eye(6)).max() < 0.05


def test_builtin_holds_no_examples():
    set_ = data.BuiltIn(1_000_000, 32, 10**9)
    assert set_.batch(rows(0, 999_999_999))["x"].shape == (2, 32)
    held = sum(t.nbytes for t in vars(set_.law).values() if isinstance(t, torch.Tensor))
    assert held < 16 * 1_000_000


# ---------------------------------------------------------------------------------------------------- all of them
ALL = {
    "dense": dense,
    "sparse": sparse,
    "text": lambda: data.Tokens(np.arange(100) % 11, 11, 5, 4),
    "interactions": lambda: data.Interactions([0, 3, 4, 4, 6], [4, 2, 7, 1, 3, 5], num_items=8, history=2),
    "builtin": lambda: data.BuiltIn(50, 4, 70),
    "subset": lambda: data.split(dense(), (0.5, 0.5), seed=3)[1],
}


@pytest.mark.parametrize("name", ALL)
def test_counts_targets_and_fingerprints(name):
    set_, again = ALL[name](), ALL[name]()
    everything = set_.batch(torch.arange(len(set_)))
    assert torch.equal(everything["index"], torch.arange(len(set_)))
    assert torch.equal(set_.targets(torch.arange(len(set_))), everything["y"])
    y = everything["y"][everything["y"] >= 0]
    assert torch.equal(set_.class_counts(), torch.bincount(y.reshape(-1), minlength=set_.num_classes))
    assert set_.fingerprint() == again.fingerprint()
    assert len(set_.fingerprint()) == 64
    assert all(t.dtype in (torch.int64, torch.float32) for t in everything.values())
    assert set_.multi_label == (everything["y"].dim() == 2 and set_.kind != "text")
    assert len({ALL[other]().fingerprint() for other in ALL}) == len(ALL)


def test_fingerprint_sees_one_number():
    x = torch.zeros(50, 3)
    before = data.Dense(x, torch.arange(50)).fingerprint()
    x[49, 2] = 1e-30
    assert data.Dense(x, torch.arange(50)).fingerprint() != before


def test_fingerprint_of_a_large_array_reads_pieces(monkeypatch):
    monkeypatch.setattr(base, "_HASH_WHOLE", 1 << 12)
    monkeypatch.setattr(base, "_HASH_PIECE", 1 << 8)
    x = torch.zeros(5000, 3)
    before = data.Dense(x, torch.zeros(5000, dtype=torch.int64)).fingerprint()
    x[-1, -1] = 1.0  # the last piece reaches the end
    assert data.Dense(x, torch.zeros(5000, dtype=torch.int64)).fingerprint() != before


def test_counts_go_in_chunks(monkeypatch):
    expected = dense().class_counts()
    monkeypatch.setattr(base, "_CHUNK", 7)
    assert torch.equal(dense().class_counts(), expected)
    assert sparse(label_rule="smallest").class_counts().nonzero().reshape(-1).tolist() == [2, 5, 6]


# ---------------------------------------------------------------------------------------------------- splits
def test_split_is_a_partition_by_seed():
    whole = dense(101)
    parts = data.split(whole, (0.7, 0.2, 0.1), seed=4)
    assert [len(part) for part in parts] == [71, 20, 10]
    joined = torch.cat([part.rows for part in parts])
    assert torch.equal(joined.sort()[0], torch.arange(101))
    again = data.split(whole, (0.7, 0.2, 0.1), seed=4)
    assert all(torch.equal(a.rows, b.rows) for a, b in zip(parts, again, strict=True))
    assert not torch.equal(parts[1].rows, data.split(whole, (0.7, 0.2, 0.1), seed=5)[1].rows)
    assert len(data.split(whole, (0.5,))[0]) == 50


def test_subset_counts_its_own_rows():
    whole = dense(50)
    part = data.split(whole, (0.5, 0.5), seed=1)[1]
    found = part.batch(rows(0, 24))
    assert found["index"].tolist() == [0, 24]
    assert torch.equal(found["x"], whole.batch(part.rows[[0, 24]])["x"])
    assert part.base is whole
    with pytest.raises(IndexError, match=r"Subset.batch: rows must be in \[0, 25\), got 25"):
        part.batch(rows(25))
    with pytest.raises(AttributeError):
        part.nothing  # noqa: B018


# ---------------------------------------------------------------------------------------------------- batches
@pytest.mark.parametrize("limit", [parts._MAX_IN_MEMORY, 10])
def test_batches_are_a_function_of_seed_and_epoch(monkeypatch, limit):
    monkeypatch.setattr(parts, "_MAX_IN_MEMORY", limit)
    whole = dense(103)

    def order(**options):
        return torch.cat([b["index"] for b in data.Batches(whole, 10, **options)])

    first = order(seed=1, epoch=2)
    assert torch.equal(first.sort()[0], torch.arange(103))
    assert torch.equal(first, order(seed=1, epoch=2))
    for other in (order(seed=2, epoch=2), order(seed=1, epoch=3), order(seed=2, epoch=1)):
        assert (first == other).float().mean() < 0.2
    assert (first[1:] > first[:-1]).float().mean() < 0.7
    assert torch.equal(order(shuffle=False), torch.arange(103))


@pytest.mark.parametrize("limit", [parts._MAX_IN_MEMORY, 10])
def test_iterate_starts_anywhere_and_reads_nothing_before(monkeypatch, limit):
    monkeypatch.setattr(parts, "_MAX_IN_MEMORY", limit)
    whole = dense(103)
    batches = data.Batches(whole, 10, seed=5, epoch=1)
    everything = list(batches)
    assert len(everything) == len(batches) == 11
    read = []
    monkeypatch.setattr(whole, "batch", lambda rows, real=whole.batch: read.append(rows) or real(rows))
    for start in (0, 1, 7, 10, 11):
        read.clear()
        rest = list(data.Batches(whole, 10, seed=5, epoch=1).iterate(start))
        assert len(read) == len(rest) == 11 - start
        for a, b in zip(rest, everything[start:], strict=True):
            assert all(torch.equal(a[name], b[name]) for name in a)
    with pytest.raises(ValueError, match=r"start must be in \[0, 11\], got 12"):
        batches.iterate(12)


def test_drop_last_and_global_random_state():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    batches = data.Batches(dense(25), 10, drop_last=True)
    assert [len(b["y"]) for b in batches] == [10, 10]
    data.split(dense(25))
    assert len(batches) == 2
    assert torch.equal(torch.rand(2), expected)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 63, 64, 65, 1000, 4097])
def test_permutation_without_a_table(size):
    found = base._permute(np.arange(size), size, 7)
    assert np.array_equal(np.sort(found), np.arange(size))
    if size > 60:
        assert not np.array_equal(found, base._permute(np.arange(size), size, 8))


def test_permutation_is_even():
    """Over many seeds, each place of a small set gets each number about as often."""
    table = np.zeros((7, 7))
    for seed in range(2000):
        table[np.arange(7), base._permute(np.arange(7), 7, seed)] += 1
    assert np.abs(table / 2000 - 1 / 7).max() < 0.04
