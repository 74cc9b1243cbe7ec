"""What the tests of exact samplers and mixtures over sharded tables run on every rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from rank_cases import BATCH, DIM, batches, part_of
from rank_sampler_cases import excluded, queries, table
from torch import Tensor

import samplex_cuda as sx
from samplex_cuda.distributed import Layout
from samplex_cuda.distributed.collectives import Exchange
from samplex_cuda.distributed.follow import shard_sampler

CLASSES = 203


def make_sampler(kind: str, classes: int) -> Any:
    """The sampler of one process."""
    weight, bias = table(classes)
    if kind == "softmax":
        return sx.samplers.Softmax(weight, bias, scale=2.0)
    if kind == "absolute":
        return sx.samplers.Softmax(weight.double(), absolute=True)
    if kind == "quartic":
        return sx.samplers.Quartic(weight, alpha=3.0)
    counts = torch.arange(1.0, classes + 1)
    parts = [(sx.samplers.Quadratic(weight, alpha=5.0, bias=bias), 0.7), (sx.samplers.Unigram(counts), 0.3)]
    return sx.samplers.Mixture(parts)


DRAWS = [
    ("softmax", 1, "class", "one"),
    ("softmax", 5, "spread", "several"),
    ("softmax", 203, "class", "none"),
    ("softmax", 1203, "spread", "several"),
    ("absolute", 203, "class", "several"),
    ("quartic", 37, "spread", "one"),
    ("mixture", 5, "class", "several"),
    ("mixture", 203, "spread", "one"),
]


def draws(group: Any, count: int = 20) -> list[dict[str, Any]]:
    """A draw and scores of each case."""
    exchange, found = Exchange(group), []
    for kind, classes, order, without in DRAWS:
        layout = Layout(classes, exchange.world, exchange.rank, order)
        whole = make_sampler(kind, classes)
        sampler = shard_sampler(whole, "auto", layout, exchange, torch.device("cpu"))
        h, out = queries().to(torch.float64 if kind == "absolute" else torch.float32), excluded(without, classes, 10)
        draw = sampler.sample(h, count, key=torch.tensor([3, 4]), exclude=out)
        shared = sampler.sample(h, 7, shared=True, key=torch.tensor([5, 6]))
        given = torch.arange(classes).expand(10, -1)
        local = sampler.local_prior(h)(slice(2, 9))
        every = sampler.log_prob_all(h)
        torch.testing.assert_close(local, every[2:9, layout.classes()], rtol=1e-4, atol=1e-4)
        found.append({
            "ids": draw.ids, "log_q": draw.log_q, "all": every, "again": sampler.log_prob(h, draw.ids, exclude=out),
            "left": sampler.log_prob(h, given, exclude=out), "shared": shared.ids, "shared_q": shared.log_q,
        })  # fmt: skip
    return found


def _head(kind: str, meta: bool) -> sx.SampledClassifier:
    head = sx.SampledClassifier(DIM, CLASSES, sx.samplers.Uniform(CLASSES), 5, device="meta" if meta else None)
    if kind == "mixture":
        deferred = sx.samplers.Quadratic.deferred(CLASSES, DIM, bias=True, alpha=5.0)
        head.set_sampler(sx.samplers.Mixture([(deferred, 0.7), (sx.samplers.Unigram(torch.ones(CLASSES)), 0.3)]))
    else:
        head.set_sampler(sx.samplers.Softmax(head.weight, head.bias, copy=kind == "copied"))
    return head


def train(group: Any, kind: str, meta: bool) -> dict[str, Any]:
    """Steps of a head whose sampler reads or follows the sharded table: sampled and exact losses before each."""
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    torch.manual_seed(1)
    head: Any = _head(kind, meta).shard(group, encoder="sum", key=sx.Key(5), batch_capacity=BATCH, order="spread")
    head.fuse_optimizer(sx.optim.RowAdagrad(head.parameters(), lr=0.2))
    key, found = sx.Key(9), []
    for step, (h, y) in enumerate(batches(4)):
        rows = part_of(step, world, rank)
        head.eval()
        exact = float(head(h[rows], y[rows]))
        head.train()
        loss = head(h[rows], y[rows], key=key)
        found.append((float(loss.detach()), exact))
        loss.backward()
    return {"losses": found, "state": sorted(head.state_dict()), "log_q": head.sampler.log_prob_all(queries())}


def resumed(group: Any, kind: str, folder: str) -> tuple[Tensor, Tensor, int]:
    """A checkpoint and back: the distribution before and after, and what a plain head makes of the state."""
    torch.manual_seed(1)
    made: Any = _head(kind, True).shard(group, encoder="sum", key=sx.Key(5), order="spread")
    other: Any = _head(kind, True).shard(group, encoder="sum", key=sx.Key(6), order="spread")
    made.update_sampler()
    sx.distributed.save_checkpoint(folder, {"head": made}, {}, group=group)
    sx.distributed.load_checkpoint(folder, {"head": other}, {}, group=group)
    plain = _head("copied", False)
    plain.load_state_dict(made.full_state_dict())
    h = queries()
    return made.sampler.log_prob_all(h), other.sampler.log_prob_all(h), int(torch.equal(plain.weight, plain.weight))
