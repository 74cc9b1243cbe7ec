"""The built-in data set: its distribution, its tree, its stream."""

from __future__ import annotations

import pytest
import torch

from samplex_cuda.data import HierarchicalZipf


def make(**options):
    settings = {"num_classes": 1000, "dim": 16, "num_examples": 5000, "seed": 3, "block_size": 512, **options}
    return HierarchicalZipf(**settings)


def test_same_seed_same_data_whatever_the_batch_size():
    whole = make().split("train")
    for batch_size in (1, 100, 512, 700, 5000, 6000):
        if batch_size == 1:
            parts = [next(make().batches("train", 1))]
        else:
            parts = list(make().batches("train", batch_size))
            assert sum(len(y) for _, y in parts) == 5000
            assert {len(y) for _, y in parts[:-1]} <= {batch_size}
        x, y = torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])
        assert torch.equal(x, whole[0][: len(y)])
        assert torch.equal(y, whole[1][: len(y)])


def test_longer_runs_begin_with_the_shorter_ones():
    x, y = make(num_examples=700).split("train")
    longer, labels = make(num_examples=5000).split("train")
    assert torch.equal(x, longer[:700])
    assert torch.equal(y, labels[:700])


def test_other_seeds_splits_and_blocks_differ():
    x, _ = make().split("train")
    assert not torch.equal(x, make(seed=4).split("train")[0])
    assert not torch.equal(x[:512], make(num_valid=512).split("valid")[0])
    assert not torch.equal(x[:512], x[512:1024])


def test_global_random_state_is_left_alone():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    make().split("train")
    assert torch.equal(torch.rand(3), expected)


def test_epochs_and_last_batch():
    data = make(num_examples=10)
    assert [len(y) for _, y in data.batches("train", 4, epochs=2)] == [4, 4, 2, 4, 4, 2]
    assert [len(y) for _, y in data.batches("train", 4, drop_last=True)] == [4, 4]
    endless = data.batches("train", 10, epochs=None)
    first, second = next(endless), next(endless)
    assert torch.equal(first[0], second[0])
    assert list(make(num_examples=0).batches("train")) == []
    assert make(num_examples=0).split("train")[0].shape == (0, 16)


@pytest.mark.stat
@pytest.mark.parametrize("exponent", [0.0, 1.0, 1.3])
def test_frequencies_follow_zipf(exponent):
    from scipy.stats import chisquare

    data = make(num_classes=50, exponent=exponent, num_examples=40_000, block_size=4096)
    expected = torch.arange(1, 51, dtype=torch.float64) ** -exponent
    expected *= 40_000 / expected.sum()
    torch.testing.assert_close(data.class_counts, expected)
    _, y = data.split("train")
    assert chisquare(torch.bincount(y, minlength=50).numpy(), expected.numpy()).pvalue > 1e-3


def test_tree_is_balanced_and_consistent():
    data = make(num_classes=6**3, depth=2, branching=6)
    classes = torch.arange(6**3)
    fine, coarse = data.super_class(classes, 2), data.super_class(classes, 1)
    assert torch.bincount(fine).tolist() == [6] * 36
    assert torch.bincount(coarse).tolist() == [36] * 6
    assert torch.equal(fine // 6, coarse)
    # Frequent and rare classes are mixed: no super-class holds only the head.
    assert data.super_class(torch.arange(36), 1).unique().numel() > 1


def test_siblings_are_closer_than_strangers():
    data = make(num_classes=8**3, depth=2, branching=8, dim=64)
    classes = torch.arange(8**3)
    centres = data.centres(classes)
    torch.testing.assert_close(centres.norm(dim=1), torch.ones(8**3))
    likeness = centres @ centres.t()
    fine, coarse = data.super_class(classes, 2), data.super_class(classes, 1)
    same_fine = (fine[:, None] == fine) & ~torch.eye(8**3, dtype=torch.bool)
    same_coarse = (coarse[:, None] == coarse) & (fine[:, None] != fine)
    apart = coarse[:, None] != coarse
    near, middle, far = (likeness[mask].mean().item() for mask in (same_fine, same_coarse, apart))
    # Ancestors in common: two directions of three, one of three, none.
    assert near == pytest.approx(2 / 3, abs=0.1)
    assert middle == pytest.approx(1 / 3, abs=0.1)
    assert far == pytest.approx(0.0, abs=0.05)


def test_classes_can_be_told_apart():
    data = make(num_classes=5000, dim=64, num_valid=500)
    x, y = data.split("valid")
    centres = data.centres(torch.arange(5000))
    prior = data.class_counts.log().float()
    posterior = x @ centres.t() / (data.noise**2 / data.dim) + prior
    assert (posterior.argmax(1) == y).float().mean().item() > 0.95
    assert torch.unique(centres, dim=0).shape[0] == 5000


def test_a_million_classes_cost_little():
    data = HierarchicalZipf(1_000_000, 32, num_examples=10**9)
    x, _ = next(data.batches("train", 256))
    assert x.shape == (256, 32)
    assert torch.isfinite(x).all()
    held = sum(t.nbytes for t in vars(data).values() if isinstance(t, torch.Tensor))
    assert held < 16 * 1_000_000


@pytest.mark.parametrize("num_classes", [1, 2, 3])
def test_few_classes(num_classes):
    _, y = make(num_classes=num_classes).split("train")
    assert y.unique().tolist() == list(range(num_classes))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_classes": 0}, "num_classes must be an int of at least 1, got 0"),
        ({"dim": 0}, "dim must be an int of at least 1, got 0"),
        ({"num_examples": -1}, "num_examples must be an int of at least 0, got -1"),
        ({"block_size": 0}, "block_size must be an int of at least 1, got 0"),
        ({"branching": 1}, "branching must be at least 2, got 1"),
        ({"noise": -0.5}, "noise must be finite and not negative, got -0.5"),
        ({"exponent": float("nan")}, "exponent must be finite and not negative, got nan"),
    ],
)
def test_bad_settings(options, text):
    with pytest.raises(ValueError, match=f"HierarchicalZipf: {text}"):
        make(**options)


def test_bad_requests():
    data = make()
    with pytest.raises(ValueError, match=r"split must be one of \['train', 'valid'\], got 'test'"):
        data.batches("test")
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        data.batches("train", 0)
    with pytest.raises(ValueError, match=r"level must be in \[1, 2\], got 3"):
        data.super_class(torch.arange(3), 3)
