"""Kernel samplers at the limits of float32, interrupted, and shared by threads."""

from __future__ import annotations

import copy
import pickle
import sys
import threading
import warnings

import pytest
import torch

import samplex_cuda as sx
from samplex_cuda.ops import kernel_tree as ops
from samplex_cuda.samplers import Quadratic, Quartic, RandomFourier, Softmax

C, D = 700, 6
KINDS = ["quadratic", "rff", "positive"]


def make(kind: str, weight: torch.Tensor | None = None, **options) -> sx.samplers.KernelSampler:
    weight = table() if weight is None else weight
    if kind == "quadratic":
        return Quadratic(weight, **options)
    return RandomFourier(weight, 48, 0.5, kind=kind, key=sx.Key(1), **options)


def table(seed: int = 0) -> torch.Tensor:
    return torch.randn(C, D, generator=torch.Generator().manual_seed(seed)) * 0.5


def queries(scale: float = 1.0) -> torch.Tensor:
    return torch.randn(5, D, generator=torch.Generator().manual_seed(9)) * scale


def check_law(sampler, h: torch.Tensor) -> None:
    """The contract of a draw: finite log_q, the same as log_prob, and probabilities that sum to one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        draw = sampler.sample(h, 40, key=sx.Key(3))
    assert bool(draw.log_q.isfinite().all())
    assert bool(((draw.ids >= 0) & (draw.ids < sampler.num_classes)).all())
    torch.testing.assert_close(sampler.log_prob(h, draw.ids), draw.log_q)
    torch.testing.assert_close(
        sampler.log_prob_all(h).double().exp().sum(1), torch.ones(len(h)).double(), rtol=0, atol=1e-4
    )


def same_law(a, b, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(a.log_prob_all(queries()), b.log_prob_all(queries()), rtol=0, atol=tolerance)


# ------------------------------------------------------------------------------------------------ large numbers
@pytest.mark.parametrize("scale", [1e3, 1e8, 1e15, 1e20, 1e30, 3e37])
@pytest.mark.parametrize("kind", KINDS)
def test_long_queries_keep_the_contract(kind, scale):
    check_law(make(kind), queries(scale))


@pytest.mark.parametrize("kind", KINDS)
def test_usual_queries_are_not_touched(kind):
    sampler, twin = make(kind), make(kind)
    twin._longest = float("inf")
    h = queries(100.0)
    assert torch.equal(sampler.log_prob_all(h), twin.log_prob_all(h))


@pytest.mark.parametrize("large", [1e3, 1e6, 1e10, 1e14, 3e19, 1e38])
@pytest.mark.parametrize("kind", KINDS)
def test_a_large_row_is_followed_or_refused_and_forgotten(kind, large):
    """A sum that has held a large row has lost the digits of the others: it is made again when the row is back."""
    weight = table()
    sampler, fresh = make(kind, weight), make(kind, weight)
    ids = torch.tensor([3, 400])
    before = {k: t.clone() for k, t in sampler.state_dict().items()}
    try:
        sampler.update(ids, weight[ids].sign() * large)
    except ValueError as error:
        for part in ("must", f"got {large:g}" if large >= 1e15 else "got", "Scale the rows down", "as it was before"):
            assert part in str(error)  # noqa: PT017
        assert all(torch.equal(t, before[k]) for k, t in sampler.state_dict().items())
    else:
        check_law(sampler, queries())
    sampler.update(ids, weight[ids])
    check_law(sampler, queries())
    same_law(sampler, fresh)


def test_a_row_that_shrinks_step_by_step_is_forgotten_too():
    weight = table()
    sampler, fresh = make("quadratic", weight), make("quadratic", weight)
    ids, size = torch.tensor([11]), 1e13
    while size > 1:
        sampler.update(ids, weight[ids].sign() * size)
        size /= 5.0
    sampler.update(ids, weight[ids])
    same_law(sampler, fresh)


@pytest.mark.parametrize("large", [1e3, 1e10, 1e19, 1e20, 1e38])
@pytest.mark.parametrize("kind", KINDS)
def test_a_large_table_is_followed_or_refused(kind, large):
    weight = table()
    sampler, fresh = make(kind, weight), make(kind, weight)
    try:
        sampler.rebuild(weight * large)
        check_law(sampler, queries())
    except ValueError as error:
        assert "Scale the rows down" in str(error)  # noqa: PT017
        assert torch.equal(sampler.log_prob_all(queries()), fresh.log_prob_all(queries()))
        with pytest.raises(ValueError, match="Scale the rows down"):
            make(kind, weight * large)


def test_most_rows_at_once_are_refused_too():
    weight = table()
    sampler, fresh = make("positive", weight), make("positive", weight)
    ids = torch.arange(C)
    with pytest.raises(ValueError, match=r"sums of the features of rows must fit in float32.*nu smaller than 0\.5"):
        sampler.update(ids, weight[ids].sign() * 1e9)
    same_law(sampler, fresh, 1e-5)


@pytest.mark.parametrize("scale", [1.0, 1e5, 1e10, 1e20, 1e30])
@pytest.mark.parametrize("where", ["rows", "h"])
def test_quartic_is_exact_at_any_size(where, scale):
    weight, h = table().double(), queries().double()
    logits = (h @ weight.t()) * scale
    wanted = torch.logaddexp(torch.zeros(()).double(), 4.0 * logits.abs().log()).log_softmax(1)
    sampler = Quartic((weight * (scale if where == "rows" else 1.0)).float())
    h = (h * (scale if where == "h" else 1.0)).float()
    found = sampler.log_prob_all(h)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-3)
    draw = sampler.sample(h, 50, exclude=torch.arange(5), key=sx.Key(3))
    assert bool(draw.log_q.isfinite().all())
    torch.testing.assert_close(sampler.log_prob(h, draw.ids, exclude=torch.arange(5)), draw.log_q)


@pytest.mark.parametrize("kind", [Softmax, Quartic])
def test_logits_beyond_float32_are_refused(kind):
    sampler = kind(torch.full((10, D), 1e38))
    for call in (lambda h: sampler.sample(h, 3), lambda h: sampler.log_prob(h, torch.arange(10)), sampler.log_prob_all):
        with pytest.raises(ValueError, match=r"logits must be finite, got inf or nan in row 1.*float64"):
            call(torch.tensor([[0.0] * D, [9.0] * D]))
    assert bool(sampler.log_prob_all(torch.full((1, D), torch.nan)).isnan().all())  # a bad row answers for itself


# ------------------------------------------------------------------------------------------------ interrupted
class Interrupt(KeyboardInterrupt):
    """Ctrl-C at a chosen place."""


def interrupted(monkeypatch, sampler, op: str, at: int, work) -> None:
    """Runs `work`, which Ctrl-C stops before call number `at` of an op."""
    real, seen = getattr(ops, op), []

    def stop(*args, **options):
        seen.append(1)
        if len(seen) == at:
            raise Interrupt
        return real(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(ops, op, stop)
        with pytest.raises(Interrupt):
            work()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("op", "at"), [("kernel_tree_build", 1), ("kernel_tree_build", 2), ("kernel_tree_parents", 1)])
def test_an_interrupted_rebuild_changes_nothing(monkeypatch, kind, op, at):
    sampler, fresh = make(kind), make(kind)
    monkeypatch.setattr("samplex_cuda.chunking.chunk_bytes", lambda *_: 1)  # one leaf at a time
    interrupted(monkeypatch, sampler, op, at, lambda: sampler.rebuild(table(5)))
    assert torch.equal(sampler.log_prob_all(queries()), fresh.log_prob_all(queries()))
    sampler.rebuild(table(5))
    fresh.rebuild(table(5))
    assert torch.equal(sampler.log_prob_all(queries()), fresh.log_prob_all(queries()))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("op", "at"), [("kernel_tree_update", 2), ("kernel_tree_parents", 1)])
def test_an_interrupted_update_leaves_a_valid_sampler(monkeypatch, kind, op, at):
    """Some rows are new, some are not; the sums are those of the rows in any case."""
    sampler, new = make(kind), table(5)
    monkeypatch.setattr("samplex_cuda.chunking.chunk_bytes", lambda *_: 1)
    ids = torch.arange(0, C, 9)
    interrupted(monkeypatch, sampler, op, at, lambda: sampler.update(ids, new[ids]))
    check_law(sampler, queries())
    same_law(sampler, make(kind, sampler.rows[:, :D].clone()), 1e-5)
    sampler.update(ids, new[ids])
    weight = table()
    weight[ids] = new[ids]
    same_law(sampler, make(kind, weight))


def test_a_checkpoint_after_an_interrupt_is_whole(monkeypatch):
    sampler = make("quadratic")
    interrupted(monkeypatch, sampler, "kernel_tree_parents", 1, lambda: sampler.update(torch.tensor([5]), table(5)[:1]))
    other = make("quadratic")
    other.load_state_dict(sampler.state_dict())
    same_law(other, make("quadratic", sampler.rows[:, :D].clone()), 1e-5)


# ------------------------------------------------------------------------------------------------ threads
@pytest.mark.parametrize("kind", KINDS)
def test_threads_share_a_sampler(kind):
    """Each draw is of one state of the tree: its log_q are those of the table before a change, or after it."""
    sampler, h = make(kind), queries()
    states = [table(), table(5)]
    laws = [make(kind, weight).log_prob_all(h) for weight in states]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    errors, stop = [], threading.Event()

    def draw() -> None:
        try:
            while not stop.is_set():
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    ids, log_q, _ = sampler.sample(h, 30)
                assert any(torch.allclose(log_q, law.gather(1, ids), atol=1e-5) for law in laws)
        except AssertionError as error:
            errors.append(error)

    def change() -> None:
        for step in range(12):
            sampler.rebuild(states[(step + 1) % 2])
        stop.set()

    threads = [threading.Thread(target=work, daemon=True) for work in (draw, draw, change)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    sys.setswitchinterval(before)
    assert not any(thread.is_alive() for thread in threads)
    assert not errors
    assert torch.equal(sampler.log_prob_all(h), laws[0])


@pytest.mark.parametrize("kind", KINDS)
def test_copies_have_locks_of_their_own(kind):
    sampler = make(kind)
    for other in (copy.deepcopy(sampler), pickle.loads(pickle.dumps(sampler))):
        assert torch.equal(other.log_prob_all(queries()), sampler.log_prob_all(queries()))
        with sampler._lock:
            other.update(torch.tensor([1]), table(5)[:1])
        assert not torch.equal(other.log_prob_all(queries()), sampler.log_prob_all(queries()))
