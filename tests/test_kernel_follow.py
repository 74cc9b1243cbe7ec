"""Kernel samplers that follow their table on a GPU: the same tree as on the CPU, and the host never waits."""

from __future__ import annotations

import contextlib
import copy
import pickle

import pytest
import torch
from host_syncs import no_host_sync

import samplex_cuda as sx
from samplex_cuda import _device
from samplex_cuda.samplers import Quadratic, RandomFourier, base
from samplex_cuda.samplers.kernel_follow import packed_ids

MAKE = {
    "quadratic": lambda w, **o: Quadratic(w, 4.0, **o),
    "orf": lambda w, **o: RandomFourier(w, 64, 0.5, "orf", key=sx.Key(3), **o),
    "positive": lambda w, **o: RandomFourier(w, 32, 0.5, "positive", key=sx.Key(3), **o),
    "normalized": lambda w, **o: RandomFourier(w, 64, 1.0, normalize=True, key=sx.Key(3), **o),
}
C, D = 300, 8


def rows_of(classes: int, seed: int = 0) -> torch.Tensor:
    return torch.nn.functional.normalize(torch.randn(classes, D, generator=torch.Generator().manual_seed(seed)), dim=1)


@pytest.fixture
def as_on_gpu(monkeypatch):
    """CPU tensors take the code of CUDA tensors."""
    monkeypatch.setattr(_device, "host_waits", lambda t: True)


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float = 1e-6) -> bool:
    return bool((a - b).abs().max() <= tolerance * b.abs().max())


# ------------------------------------------------------------------------------------------------ the guard itself
WAITS = {
    "item": lambda t: t[0].item(),
    "bool": lambda t: bool(t.any()),
    "nonzero": lambda t: t.nonzero(),
    "unique": lambda t: t.unique(),
    "unique_consecutive": lambda t: t.unique_consecutive(),
    "mask": lambda t: t[t > 1],
    "masked assignment": lambda t: t.index_put_((t > 1,), torch.tensor(0)),
    "masked_select": lambda t: t.masked_select(t > 1),
    "equal": lambda t: torch.equal(t, t),
    "repeat_interleave": lambda t: torch.repeat_interleave(t),
    "bincount": lambda t: t.bincount(),
}


@pytest.mark.parametrize("name", WAITS)
def test_the_guard_sees_what_waits(name):
    with pytest.raises(AssertionError, match="makes the host wait"), no_host_sync():
        WAITS[name](torch.arange(4))


def test_the_guard_lets_the_rest_through():
    t = torch.arange(4)
    with no_host_sync():
        t[torch.tensor([1, 2])].sort()
        torch.where(t > 1, t, -1).cumsum(0).clone().copy_(t)
        torch.repeat_interleave(t, output_size=6)
        float(t.numpy()[2])


# ------------------------------------------------------------------------------------------------ ids
@pytest.mark.parametrize("classes", [50, 1 << 40])
def test_packed_ids_are_the_distinct_ones(classes):
    g = torch.Generator().manual_seed(0)
    for size in (1, 7, 200):
        ids = torch.randint(-3, 60, (size,), generator=g)
        with no_host_sync():
            got = packed_ids(ids, classes)
        want = base.distinct_ids(ids, classes)
        assert got.shape == ids.shape
        assert torch.equal(got[got >= 0], want)
        assert (got[: size - len(want)] == -1).all()
    assert (packed_ids(torch.tensor([-1, -100, classes]), classes) == -1).all()


# ------------------------------------------------------------------------------------------------ the tree
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("count", [60, 250])
def test_follow_is_an_update(backend, as_on_gpu, name, bias, count):
    """60 ids are followed row by row, 250 of 300 by all sums again."""
    offset = {"bias": 0.1 * torch.randn(C)} if bias else {}
    weight, moved = rows_of(C), rows_of(C, 1)
    sampler = MAKE[name](weight, **offset).to(backend.device)
    ids = torch.cat([torch.randint(C, (count - 10,)), torch.tensor([0, 0, C - 1, -1, -100, C, C + 5, -1, 3, 3])])
    touched = base.distinct_ids(ids, C) if count == 60 else torch.arange(C)
    table = weight.clone()
    table[touched] = moved[touched]
    offsets = [offset["bias"] + 0.5] if bias else []
    given = [t.to(backend.device) for t in (ids, table, *offsets)]
    with no_host_sync():
        sampler.follow(*given)
    want = MAKE[name](weight, **offset)
    want.update(touched, table[touched], *(b[touched] for b in offsets))
    assert torch.equal(sampler.rows.cpu(), want.rows)
    assert close(sampler.sums.cpu(), want.sums)
    assert not sampler.sums[0].any()


@pytest.mark.parametrize("name", MAKE)
def test_nothing_recorded_changes_nothing(as_on_gpu, name):
    sampler = MAKE[name](rows_of(C))
    before = sampler.sums.clone(), sampler.rows.clone()
    for ids in (torch.tensor([-1, C, -100]), torch.empty(0, dtype=torch.int64)):
        sampler.follow(ids, rows_of(C, 1))
        assert torch.equal(sampler.sums, before[0])
        assert torch.equal(sampler.rows, before[1])


def test_a_leaf_that_shrank_is_summed_anew(as_on_gpu):
    """(others + large) - large has lost the digits of the others."""
    weight = rows_of(C)
    sampler, ids = Quadratic(weight, 4.0), torch.tensor([40])
    for size in (600.0, 1.0):
        table = weight.clone()
        table[40] *= size
        with no_host_sync():
            sampler.follow(ids, table)
    want = Quadratic(table, 4.0)
    assert close(sampler.sums, want.sums)
    leaves = want.sums.shape[0] // 2
    leaf = leaves + 40 // want.leaf_size
    assert close(sampler.sums[leaf], want.sums[leaf], 2e-6)


def test_more_leaves_than_a_step_mends_are_mended_later(as_on_gpu, monkeypatch):
    monkeypatch.setattr("samplex_cuda.samplers.kernel_follow._MENDED", 1)
    weight = rows_of(C)
    sampler, ids = Quadratic(weight, 4.0), torch.tensor([0, 40, 80, 120])
    large = weight.clone()
    large[ids] *= 600.0
    sampler.follow(ids, large)
    want, leaves = Quadratic(weight, 4.0).sums, sampler.sums.shape[0] // 2
    rows = leaves + ids // sampler.leaf_size
    sampler.follow(ids, weight)
    assert not close(sampler.sums[rows], want[rows])  # one of four
    for _ in range(3):
        sampler.follow(torch.tensor([7]), weight)
    assert close(sampler.sums[rows], want[rows])
    assert close(sampler.sums[1], want[1])


# ------------------------------------------------------------------------------------------------ refused rows
@pytest.mark.parametrize("count", [20, 250])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e20])
@pytest.mark.parametrize("name", ["quadratic", "orf", "positive"])
def test_a_bad_row_is_refused_and_reported(as_on_gpu, name, bad, count):
    weight = rows_of(C)
    sampler, ids = MAKE[name](weight), torch.arange(count)
    table = rows_of(C, 1)
    table[5, 2] = bad
    with no_host_sync():
        sampler.follow(ids, table)
        draw = sampler.sample(rows_of(4, 2), 20)
    assert torch.equal(sampler.rows[5], weight[5])
    assert torch.equal(sampler.rows[6], table[6])
    assert draw.log_q.isfinite().all()
    with pytest.raises(ValueError, match="weight must"):
        sampler.follow(ids, table)
    table[5] = weight[5]
    sampler.follow(ids, table)  # the row is fine again: the tree is built again, and nothing is left to report
    assert torch.equal(sampler.rows, table)
    assert close(sampler.sums, MAKE[name](table).sums)
    with no_host_sync():
        sampler.follow(ids, table)


@pytest.mark.parametrize("count", [20, 250])
def test_positive_features_out_of_range_ask_for_another_shift(as_on_gpu, count):
    """Long rows have a large shift; a short one among them would have features beyond float32."""
    weight = 12.0 * rows_of(C)
    sampler = RandomFourier(weight, 32, 1.0, "positive", key=sx.Key(3))
    assert sampler._shift == 64.0
    table = weight.clone()
    table[3] = 0.0
    with no_host_sync():
        sampler.follow(torch.arange(count), table)
    sampler.follow(torch.arange(count), table)  # has read the notice
    want = RandomFourier(table, 32, 1.0, "positive", key=sx.Key(3))
    assert sampler._shift == want._shift == 0.0
    assert torch.equal(sampler.rows, want.rows)
    assert torch.equal(sampler.sums, want.sums)


# ------------------------------------------------------------------------------------------------ a head
def head_of(name: str, policy="auto", **options) -> sx.SampledClassifier:
    bias = {"bias": torch.zeros(C)} if options.get("bias", True) else {}
    head = sx.SampledClassifier(
        D, C, MAKE[name](torch.zeros(C, D), **bias), num_samples=4, sampler_update=policy, **options
    )
    head.fuse_optimizer(sx.optim.RowAdagrad(head.parameters(), lr=0.1))
    return head


def step(head: sx.SampledClassifier, number: int, rows: int = 6) -> torch.Tensor:
    g = torch.Generator().manual_seed(number)
    h, y = torch.randn(rows, D, generator=g), torch.randint(C, (rows,), generator=g)
    y[0] = -100
    loss = head(h, y, key=torch.tensor([number, 5]))
    loss.backward()
    return loss.detach()


@pytest.mark.filterwarnings("ignore:.*estimated kernel mass")
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("rows", [6, 64])
@pytest.mark.parametrize("name", MAKE)
def test_a_fused_step_does_not_wait(as_on_gpu, name, rows, shared):
    """The whole step, the update of the tree included: with 6 rows by ids, with 64 by all sums again."""
    head = head_of(name, "step", shared=shared)
    step(head, 0, rows)  # builds the tree
    before = head.sampler.rows.clone()
    with no_host_sync():
        for number in range(1, 4):
            step(head, number, rows)
    assert not torch.equal(head.sampler.rows, before)
    head.update_sampler()
    want = torch.cat([head.weight, head.bias[:, None]], 1).detach()
    if name != "normalized":
        assert torch.equal(head.sampler.rows[:, : D + 1], want)
    fresh = copy.deepcopy(head.sampler)
    fresh.rebuild(head.weight, head.bias)
    assert close(head.sampler.sums, fresh.sums)


@pytest.mark.filterwarnings("ignore:.*estimated kernel mass")
@pytest.mark.parametrize("name", MAKE)
def test_training_is_that_of_the_cpu(name, monkeypatch):
    """The draws follow the same tree: the losses agree to rounding."""
    losses = []
    for gpu in (False, True):
        monkeypatch.setattr(_device, "host_waits", lambda t, gpu=gpu: gpu)
        torch.manual_seed(0)
        head = head_of(name, "step")
        losses.append(torch.stack([step(head, number) for number in range(8)]))
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-4, atol=1e-4)


def test_the_ids_of_a_step_stay_in_one_place(as_on_gpu):
    """A CUDA graph of a step reads the ids that the step before has left, at the same address."""
    head = head_of("quadratic", "step")
    places = set()
    for number in range(4):
        step(head, number)
        (touched,) = head.follower.touched
        places.add(touched.data_ptr())
    assert len(places) == 1
    head = head_of("quadratic", 3)
    for number in range(3):
        step(head, number)
    assert len({t.data_ptr() for t in head.follower.touched}) == 3


def test_a_captured_step_always_follows(as_on_gpu, monkeypatch):
    head = head_of("quadratic", 3)
    step(head, 0)
    assert not head.follower.due()
    monkeypatch.setattr(_device, "captured", lambda device: True)
    assert head.follower.due()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t))])
def test_copies_have_a_mailbox_of_their_own(as_on_gpu, copied):
    sampler = Quadratic(rows_of(C))
    table = rows_of(C, 1)
    table[5] = torch.nan
    sampler.follow(torch.arange(20), table)
    other = copied(sampler)
    assert other._mail[1] == 0.0
    other.follow(torch.arange(20), table)  # would raise with the mail of the original
    with contextlib.suppress(ValueError):
        sampler.follow(torch.arange(20), table)


# ------------------------------------------------------------------------------------------------ how often
@pytest.mark.filterwarnings("ignore:.*estimated kernel mass")
def test_the_default_on_the_cpu_is_every_step():
    head = head_of("orf")
    step(head, 0)
    assert head.sampler_update == "step"


def test_the_default_on_a_gpu_is_chosen_by_cost(as_on_gpu):
    sampler = RandomFourier(torch.zeros(1 << 16, 64), 512, 1.0)
    # Many draws cost more than following them; a few draws of a small batch cost less than the launches of an update.
    assert sampler.follow_interval(1024, 64, False) == 1
    few = sampler.follow_interval(32, 4, False)
    assert 1 < few <= 16
    assert sampler.follow_interval(64, 16, False) <= few
    small = head_of("orf")
    assert small.sampler_update == "step"  # until it sees a batch
    step(small, 0)
    assert small.sampler_update == small.sampler.follow_interval(6, 4, False) > 1
    asked = head_of("orf", "step")
    step(asked, 0)
    assert asked.sampler_update == "step"
    mixed = sx.samplers.Mixture([(sampler, 1.0), (sx.samplers.Uniform(1 << 16), 1.0)])
    assert mixed.follow_interval(32, 4, False) == few


def test_a_mixture_follows(as_on_gpu):
    mixed = sx.samplers.Mixture([(Quadratic(torch.zeros(C, D)), 1.0), (sx.samplers.Uniform(C), 1.0)])
    table = rows_of(C)
    with no_host_sync():
        mixed.follow(torch.tensor([3, -1, 3, 9]), table)
    rows = mixed.samplers[0].rows
    assert torch.equal(rows[[3, 9]], table[[3, 9]])
    assert not rows[4].any()
