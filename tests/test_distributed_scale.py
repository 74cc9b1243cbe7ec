"""A step on 64 ranks and 10^8 classes: a fake process group and fake tensors, so shapes and sizes but no numbers."""

from __future__ import annotations

import contextlib
import weakref

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import samplex_cuda as sx
from samplex_cuda.distributed import ShardedClassifier
from samplex_cuda.distributed.fetch import pair_capacity
from samplex_cuda.distributed.routes import Sizes, bytes_sent

CLASSES, DIM, BATCH, DRAWS, WORLD = 10**8, 128, 256, 64, 64


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that ops have made and that are still held; `peak` is the most at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for t in tree_leaves(made):
            if isinstance(t, torch.Tensor):
                storage = t.untyped_storage()
                if storage._cdata not in self.seen:
                    self.seen.add(storage._cdata)
                    self.now += storage.nbytes()
                    self.peak = max(self.peak, self.now)
                    weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        return made

    def _gone(self, which: int, size: int) -> None:
        self.seen.discard(which)
        self.now -= size


@pytest.fixture
def fake_ranks(monkeypatch):
    """A group of 64 ranks in which nobody answers, and CPU tensors that take the way of a GPU."""
    monkeypatch.setattr("samplex_cuda._device.host_waits", lambda _: True)
    fill = ShardedClassifier._fill  # of all rows it takes thousands of blocks, each of them alike
    few = lambda head, pair: fill(head, pair) if head.num_classes < 10**6 else None  # noqa: E731
    monkeypatch.setattr(ShardedClassifier, "_fill", few)
    monkeypatch.setattr("samplex_cuda.distributed.settings.agree", lambda *_, **__: None)  # nobody answers
    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=WORLD)
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield
    dist.destroy_process_group()


ROUTES_OF = [
    (False, "summed_logits"), (True, "summed_logits"), (False, "online_softmax"), (True, "online_softmax"),
    (False, "rows_to_queries"), (True, "shared_rows"),
]  # fmt: skip


@pytest.mark.parametrize(("shared", "route"), ROUTES_OF)
def test_a_step_on_64_ranks(fake_ranks, shared, route):
    """Fake tensors raise where a number is asked for: `.item()`, `nonzero`, a boolean mask."""
    held = LiveBytes()
    with contextlib.ExitStack() as stack:
        head = sx.SampledClassifier(
            DIM, CLASSES, sx.samplers.LogUniform(CLASSES), DRAWS, shared=shared, device="meta"
        ).shard(encoder="average", batch_capacity=BATCH, order="spread", key=torch.tensor([1, 2]), route=route)
        head.fuse_optimizer(sx.optim.RowAdagrad(head.parameters(), lr=0.1))
        assert head.weight.shape == (CLASSES // WORLD, DIM)
        h, y = torch.randn(BATCH, DIM, requires_grad=True), torch.randint(CLASSES, (BATCH,))
        head(h, y, key=torch.tensor([1, 2])).backward()  # makes the optimizer's state
        h.grad, head.exchange.sent = None, 0
        held.seen |= {p.untyped_storage()._cdata for p in head.parameters()}  # a view of them is not new
        stack.enter_context(held)
        loss = head(h, y, key=torch.tensor([1, 2]))
        loss.backward()
    assert loss.shape == ()
    assert h.grad.shape == h.shape
    room = pair_capacity(BATCH if shared else BATCH * (DRAWS + 1), WORLD, CLASSES // WORLD)
    filled = WORLD * room / (BATCH if shared else BATCH * (DRAWS + 1))  # rows that travel, for each that is named
    assert head.exchange.sent == pytest.approx(bytes_sent(route, Sizes(WORLD, BATCH, DRAWS, DIM, filled)), rel=0.05)
    queries, logits = WORLD * BATCH * DIM * 4, WORLD * BATCH * (DRAWS + 1) * 4
    rows = 2 * WORLD * room * DIM * 4
    table = CLASSES // WORLD * (DIM + 1) * 4
    print(f"{route}: {held.peak / 1e6:.0f} MB beside {2 * table / 1e6:.0f} MB of table and state")
    assert held.peak < (5 * queries + 20 * logits if route in ("summed_logits", "online_softmax") else 4 * rows)
    assert held.peak < 0.1 * 2 * table


def test_first_rows_ask_for_no_number(fake_ranks):
    head = sx.SampledClassifier(DIM, 10**5 + 1, sx.samplers.LogUniform(10**5 + 1), DRAWS, device="meta")
    head = head.shard(encoder="average", order="spread", key=torch.tensor([1, 2]))
    assert head.weight.shape == (-(-(10**5 + 1) // WORLD), DIM)


@pytest.mark.parametrize("negatives", ["drawn", "drawn once", "own"])
def test_a_step_on_the_sphere_on_64_ranks(fake_ranks, negatives):
    """Lengths of rows, margins, weights of targets and the caller's negatives ask for no number either."""
    loss = sx.losses.SampledSoftmax(margin=sx.losses.ArcFace())
    head = sx.SampledClassifier(
        DIM, CLASSES, sx.samplers.LogUniform(CLASSES), DRAWS, loss, normalize=True, scale=8.0,
        shared=negatives == "drawn once", device="meta",
    ).shard(encoder="average", batch_capacity=BATCH, order="spread", key=torch.tensor([1, 2]))  # fmt: skip
    head.fuse_optimizer(sx.optim.RowAdagrad(head.parameters(), lr=0.1))
    h, y = torch.randn(BATCH, DIM, requires_grad=True), torch.randint(CLASSES, (BATCH, 2))
    given = {"negatives": sx.Negatives(torch.randint(CLASSES, (BATCH, DRAWS)))} if negatives == "own" else {}
    for _ in range(2):
        head.exchange.sent, h.grad = 0, None
        loss = head(h, y, key=torch.tensor([1, 2]), target_weight=torch.rand(BATCH, 2), **given)
        loss.backward()
    assert loss.shape == ()
    assert h.grad.shape == h.shape
    assert head.weight.grad is None
    # Two targets in place of one, with their weights; ids and log q of the caller's negatives.
    more = (WORLD - 1) * BATCH * (8 + 8 + 8 + 12 * DRAWS * (negatives == "own"))
    wanted = bytes_sent("summed_logits", Sizes(WORLD, BATCH, DRAWS, DIM)) + more
    assert head.exchange.sent == pytest.approx(wanted, rel=0.02)


@pytest.mark.parametrize("kind", ["quadratic", "rff"])
def test_a_step_that_follows_the_table_on_64_ranks(fake_ranks, kind):
    """Draws and updates of a kernel tree ask for no number; what it sends and holds is that of docs/scale.md."""
    classes, dim, draws, rows = 10**8, 32, 16, 64
    if kind == "quadratic":
        sampler, numbers = sx.samplers.Quadratic.deferred(classes, dim), dim * (dim + 1) // 2 + 1
    else:
        with unset_fake_temporarily():  # the frequencies are numbers
            sampler, numbers = sx.samplers.RandomFourier.deferred(classes, dim, num_features=256), 512
    head = sx.SampledClassifier(dim, classes, sampler, draws, bias=False, device="meta").shard(
        encoder="average", batch_capacity=rows, key=torch.tensor([1, 2])
    )
    head.fuse_optimizer(sx.optim.RowAdagrad(head.parameters(), lr=0.1))
    h, y = torch.randn(rows, dim, requires_grad=True), torch.randint(classes, (rows,))
    head(h, y, key=torch.tensor([1, 2])).backward()
    head.exchange.sent = 0
    head(h, y, key=torch.tensor([1, 2])).backward()
    step = (WORLD - 1) * rows * (8 * dim + 8 + 8 * (draws + 1))
    drawn = 2 * (WORLD - 1) * rows * (12 * draws + 8)
    depth, shared = head.sampler.heap.depth, 2 * 4 * numbers * (WORLD - 1)
    assert step + drawn < head.exchange.sent < step + drawn + 1.1 * shared * (depth + 2) + 8 * 63 * 64 * 128
    per_rank, leaf = classes / WORLD, head.sampler.leaf_size
    most = 4 * (dim + 1) * per_rank + 8 * numbers * per_rank / leaf + 8 * numbers * (WORLD - 1) * (depth + 1)
    assert head.sampler.memory()["total"] < 1.1 * most


def tree_of(classes, base=False):
    """A fitted tree."""
    x, y = torch.randn(400, DIM), torch.arange(400) % classes
    base = sx.samplers.Unigram(torch.ones(classes)) if base else None
    return sx.samplers.Tree.fit(x, y, num_classes=classes, dim=4, progress=False, base=base)


FEW = 2000  # classes of samplers whose tables hold numbers, made before the step
STEPS = {
    "tree": (lambda: tree_of(FEW), {}, {}),
    "tree shared": (lambda: tree_of(FEW), {"shared": True}, {}),
    "tree nce": (lambda: tree_of(FEW), {"loss": "nce"}, {}),
    "tree with base": (lambda: tree_of(FEW, True), {}, {}),
    "unigram": (lambda: sx.samplers.Unigram(torch.arange(FEW) + 1), {}, {}),
    "unigram shared": (lambda: sx.samplers.Unigram(torch.arange(FEW) + 1), {"shared": True}, {}),
    "midx": (lambda: sx.samplers.MIDX(torch.randn(FEW, DIM), num_codes=8), {"sampler_update": "step"}, {}),
    "hard": (lambda: sx.samplers.LogUniform(FEW), {}, {"hard": 3}),
    "hard shared": (lambda: sx.samplers.LogUniform(FEW), {"shared": True}, {"hard": 3}),
    "in batch": (lambda: sx.samplers.InBatch(FEW), {"shared": True}, {}),
    "in batch and more": (lambda: sx.samplers.InBatch(FEW, sx.samplers.Uniform(FEW)), {"shared": True}, {}),
    "full softmax": (lambda: None, {"loss": "full_softmax"}, {}),
    "full softmax, rows": (lambda: None, {"loss": "full_softmax", "reduction": "none"}, {}),
}


@pytest.mark.parametrize("case", STEPS)
def test_a_step_of_each_kind_asks_for_no_number_on_64_ranks(fake_ranks, case):
    """Two steps, the second with a sampler that follows the first; unique draws wait for the device by design."""
    make, options, more = STEPS[case]
    with unset_fake_temporarily():
        sampler, place = make(), {"sampler": "shard"} if case.startswith(("tree", "unigram")) else {}
        head = sx.SampledClassifier(DIM, FEW, sampler, None if sampler is None else DRAWS, **options)
        head = head.shard(encoder="average", batch_capacity=BATCH, **place)
    if sampler is not None:
        head.fuse_optimizer(sx.optim.RowAdagrad(head.parameters(), lr=0.1))
    h, y = torch.randn(BATCH, DIM, requires_grad=True), torch.randint(FEW, (BATCH,))
    given = {"hard": torch.randint(FEW, (BATCH, more["hard"]))} if "hard" in more else {}
    for _ in range(2):
        h.grad = None
        loss = head(h, y, key=torch.tensor([1, 2]), **given)
        loss.sum().backward()
    assert loss.shape == ((WORLD * BATCH,) if options.get("reduction") == "none" else ())
    assert h.grad.shape == h.shape
    if not case.startswith("full"):
        assert head.weight.grad is None
