"""`backward()` in several threads at once: no error, no lost flag, no lost update."""

from __future__ import annotations

import sys
import threading
import time

import pytest
import torch
from head_cases import C, D, batch, make

import samplex_cuda as sx
from samplex_cuda.ops import row_gradients
from samplex_cuda.optim import fusion

THREADS = 4


@pytest.fixture(autouse=True)
def _switch_often():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def in_threads(work, count: int = THREADS) -> None:
    """Runs work(number) in threads that start together; raises what one of them raised."""
    start, errors = threading.Barrier(count), []

    def run(number: int) -> None:
        try:
            start.wait(60)
            work(number)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)
    if errors:
        raise errors[0]


def loss_of(weight: torch.Tensor, seed: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    h, y = torch.randn(4, D, generator=g), torch.randint(C, (4,), generator=g)
    draw = sx.samplers.Uniform(C).sample(h, 5, exclude=y, key=sx.Key(seed))
    return sx.functional.sampled_softmax(h, weight, y, draw.ids, draw.log_q)


def test_gradients_that_meet_at_the_weight_keep_their_flag():
    """The second loss delivers before the first accumulates: the flag belongs to each one's own gradient."""
    weight = torch.randn(C, D, requires_grad=True)
    delivered, accumulated = [threading.Event(), threading.Event()], threading.Event()
    number_of = threading.local()

    def meet(grad):
        delivered[number_of.value].set()
        assert (delivered[1] if number_of.value == 0 else accumulated).wait(60)

    def work(number: int) -> None:
        number_of.value = number
        if number == 1:
            assert delivered[0].wait(60)
        loss_of(weight, number).backward()
        if number == 0:
            assert weight.grad.is_coalesced()
        accumulated.set()

    hook = weight.register_hook(meet)
    in_threads(work, 2)
    hook.remove()
    assert weight.grad.is_coalesced()
    alone = weight.detach().clone().requires_grad_()
    (loss_of(alone, 0) + loss_of(alone, 1)).backward()
    torch.testing.assert_close(weight.grad.to_dense(), alone.grad.to_dense())


def test_one_hook_for_each_parameter(monkeypatch):
    """A second one, registered while the first runs, breaks the running backward."""

    class Slow(type(row_gradients._flags)):
        def get(self, key, default=None):
            found = super().get(key, default)
            time.sleep(0.01 if found is None else 0)
            return found

    monkeypatch.setattr(row_gradients, "_flags", Slow())
    weight = torch.randn(C, D, requires_grad=True)
    in_threads(lambda number: loss_of(weight, number).backward())
    assert len(weight._post_accumulate_grad_hooks) == 1


def test_backwards_that_never_accumulate_leave_little_behind():
    weight = torch.randn(C, D, requires_grad=True)
    for seed in range(100):
        torch.autograd.grad(loss_of(weight, seed), weight)
    (hook,) = weight._post_accumulate_grad_hooks.values()
    assert len(hook.indices) <= 16
    loss_of(weight, 1).backward()
    assert weight.grad.is_coalesced()


@pytest.mark.parametrize("shared", [False, True])
def test_heads_of_their_own_train_side_by_side(shared):
    def trained(number: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(number)
        head = make(shared=shared)
        with torch.no_grad():
            head.weight.copy_(torch.randn(C, D, generator=generator))
        head.bias.data.zero_()
        head.fuse_optimizer(sx.optim.RowAdagrad(head.parameters(), lr=0.1))
        for step in range(10):
            h, y = torch.randn(6, D, generator=generator), torch.randint(C, (6,), generator=generator)
            head(h, y, key=sx.Key(number, step)).backward()
        return head.weight.detach()

    found = {}
    in_threads(lambda number: found.__setitem__(number, trained(number)))
    for number in range(THREADS):
        assert torch.equal(found[number], trained(number))


def test_a_fused_head_makes_each_update_once_or_refuses_it(monkeypatch):
    """Two backwards meet at the weight: the first one updates, the second has a gradient of other weights."""
    together = threading.Barrier(2)
    on_weight = fusion.Fusion._on_weight

    def late(self, grad):
        together.wait(60)  # both losses have delivered
        return on_weight(self, grad)

    monkeypatch.setattr(fusion.Fusion, "_on_weight", late)
    head = make(bias=False)
    head.fuse_optimizer(sx.optim.RowSGD(head.parameters(), lr=0.1))
    start, data, done, refused = head.weight.detach().clone(), [batch(), batch()], [], []

    def work(number: int) -> None:
        try:
            head(*data[number], key=sx.Key(number)).backward()
            done.append(number)
        except RuntimeError as error:
            refused.append(str(error))

    in_threads(work, 2)
    assert len(done) == 1
    assert "out of date" in refused[0]
    twin = make(bias=False)
    with torch.no_grad():
        twin.weight.copy_(start)
    twin(*data[done[0]], key=sx.Key(done[0])).backward()
    torch.testing.assert_close(head.weight.detach(), start - 0.1 * twin.weight.grad.to_dense())


def test_a_fused_head_recovers_from_a_backward_that_never_came_to_the_weight():
    head = make()
    head.fuse_optimizer(sx.optim.RowAdagrad(head.parameters(), lr=0.1))
    for step in range(5):
        h, y = batch()
        h.requires_grad_()
        torch.autograd.grad(head(h, y), h)
        before = head.weight.detach().clone()
        head(h, y).backward()
        assert not torch.equal(before, head.weight), step
    assert len(head.fused._arrived) <= 1
