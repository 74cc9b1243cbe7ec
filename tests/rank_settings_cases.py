"""What the tests of ranks that differ run on every rank: settings, keys, and batches that one rank refuses."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from rank_cases import BATCH, CLASSES, DIM, _message, batches, make_head, part_of, tables_of
from torch import Tensor

import samplex_cuda as sx


def head_of(**options: Any) -> Any:
    """A head with numbers, or with other settings than usual."""
    settings = {"in_features": DIM, "num_classes": CLASSES, "num_samples": 6, **options}
    sampler = settings.pop("sampler", "log-uniform")
    classes = settings["num_classes"]
    made: dict[str, Any] = {
        "log-uniform": lambda: sx.samplers.LogUniform(classes),
        "uniform": lambda: sx.samplers.Uniform(classes),
        "codes": lambda: sx.samplers.MIDX(torch.randn(classes, DIM), num_codes=8),
        "more codes": lambda: sx.samplers.MIDX(torch.randn(classes, DIM), num_codes=9),
    }
    return sx.SampledClassifier(sampler=made[sampler](), **settings)


def differ(group: Any, where: str, usual: dict[str, Any], other: dict[str, Any]) -> str:
    """The message of each rank where the settings of rank 1 are `other`; where: "head" or an argument of the call."""
    given = other if dist.get_rank(group) == 1 else usual
    head = head_of(**given) if where == "head" else head_of()
    call = {"encoder": "sum"} | (given if where == "call" else {})
    message = _message(lambda: head.shard(group, **call))
    assert bool(head_of().shard(group, encoder="sum")(*batches(1)[0]).isfinite())  # the group is in step
    return message


def differ_replicated(group: Any, where: str, usual: dict[str, Any], other: dict[str, Any]) -> str:
    """The same with `replicate`."""
    given = other if dist.get_rank(group) == 1 else usual
    head = head_of(**given) if where == "head" else head_of()
    call = {"encoder": "sum"} | (given if where == "call" else {})
    message = _message(lambda: sx.distributed.replicate(head, group, **call))
    assert bool(sx.distributed.replicate(head_of(), group, encoder="sum")(*batches(1)[0]).isfinite())
    return message


def one_refuses(group: Any, how: str) -> str:
    """A class of the head of rank 1 is retired; the message of each rank."""
    head = head_of()
    if dist.get_rank(group) == 1:
        head.live = torch.arange(CLASSES) != 7
    if how == "shard":
        return _message(lambda: head.shard(group, encoder="sum"))
    return _message(lambda: sx.distributed.replicate(head, group, encoder="sum"))


def change(group: Any, how: str, name: str, value: Any, fixed: bool) -> tuple[str, str]:
    """Rank 1 changes a setting after a step, then all do: the messages of each rank."""
    rank = dist.get_rank(group)
    head = head_of().shard(group, encoder="sum") if how == "shard" else head_of()
    if how == "replicate":
        sx.distributed.replicate(head, group, encoder="sum")
    h, y = batches(1)[0]
    with mock.patch("samplex_cuda._device.host_waits", return_value=fixed):
        head(h, y)
        if fixed:  # all ranks change something, as they must on a GPU
            setattr(head, name, value if rank == 1 else getattr(head, name))
        elif rank == 1:
            setattr(head, name, value)
        first = _message(lambda: head(h, y))
        setattr(head, name, value)
        return first, _message(lambda: head(h, y))


# ------------------------------------------------------------------------------------------------ keys
def generators(group: Any, how: str) -> tuple[list[bool], Tensor]:
    """Whether torch's generator of this rank moves when a head is made and called with key=None, and a loss."""
    torch.manual_seed(100 + dist.get_rank(group))
    head, moved = make_head("plain", "meta" if how == "shard" else None), []

    def watched(call: Any) -> Any:
        before = torch.get_rng_state()
        made = call()
        moved.append(not torch.equal(before, torch.get_rng_state()))
        return made

    if how == "shard":
        head = watched(lambda: head.shard(group, encoder="sum"))
    else:
        head = watched(lambda: sx.distributed.replicate(head, group, encoder="sum"))
    h, y = batches(1)[0]
    loss = watched(lambda: head(h, y))
    watched(lambda: head(h, y, key=sx.Key(3)))
    return moved, loss.detach()


# ------------------------------------------------------------------------------------------------ refusals
def refuse(group: Any, name: str, options: dict[str, Any], what: str) -> dict[str, Any]:
    """A step with the sizes of a GPU that rank 1 refuses, between two that all take.

    Returns:
        Losses; the message of the second step, and which tables it left as they were; the gradient of its rows; the
        tables at the end.
    """
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    replicated = options.get("replicate", False)
    head: Any = make_head(name, None if replicated else "meta", **options.get("head", {}))
    if replicated:
        sx.distributed.replicate(head, group, encoder="sum", batch_capacity=BATCH)
    else:
        head = head.shard(group, encoder="sum", key=sx.Key(5), batch_capacity=BATCH, order="spread",
                          route=options.get("route", "summed_logits"))  # fmt: skip
    optimizer = sx.optim.RowAdam(tables_of(head), lr=0.1)
    if options.get("fused", True):
        head.fuse_optimizer(optimizer)
    key, losses, lost, grad = sx.Key(9), [], None, None
    with mock.patch("samplex_cuda._device.host_waits", return_value=True):
        for step, (h, y) in enumerate(batches(3)):
            rows = part_of(0, world, rank)
            mine, target = h[rows].requires_grad_(), y[rows]
            more = _more(options, rows)
            if step == 1 and rank == 1 and what != "none":
                if what == "capacity":
                    mine, target = mine.repeat(9, 1), target.repeat(9)
                    more = _more(options, torch.zeros(len(target), dtype=torch.int64))
                elif what == "width":
                    mine = mine[:, :3]
                else:
                    target = target.float()
            before = [t.detach().clone() for t in _state(head)]

            def run(h: Tensor = mine, y: Tensor = target, given: dict[str, Any] = more) -> None:
                loss = head(h, y, key=key, **given)
                loss.backward()
                losses.append(float(loss.detach()))
                if not options.get("fused", True):
                    optimizer.step()
                    optimizer.zero_grad()

            message = _message(run)
            if step == 1:
                lost = message, [torch.equal(a, b) for a, b in zip(before, _state(head), strict=True)]
                grad = mine.grad
    return {"losses": losses, "lost": lost, "grad": grad, "end": [t.detach().clone() for t in _state(head)]}


def _more(options: dict[str, Any], rows: Tensor) -> dict[str, Any]:
    made: dict[str, Any] = {}
    if options.get("weights"):
        made["sample_weight"] = torch.linspace(0.5, 1.5, BATCH)[rows]
    if options.get("index"):
        made["index"] = rows.clone()
    if options.get("hard"):
        made["hard"] = torch.stack([rows, rows + 20], 1)
    if options.get("negatives"):
        made["negatives"] = sx.Negatives(torch.stack([rows + 3, rows + 30, rows + 60], 1))
    return made


def _state(head: Any) -> list[Tensor]:
    found = [head.weight, *([] if head.bias is None else [head.bias])]
    if head._state_name is None:
        return found
    kept = head.get_buffer(head._state_name)
    return [*found, kept if len(kept) == 50 else kept[:-1]]  # the last number of a rank is of no example


def skipped(group: Any, route: str, name: str) -> tuple[list[float], list[bool]]:
    """Rank 1 skips the second of four backwards: the losses, and after which steps its table has changed."""
    rank, losses, changed = dist.get_rank(group), [], []
    head: Any = make_head(name, "meta").shard(
        group, encoder="sum", key=sx.Key(5), batch_capacity=BATCH, order="spread", route=route
    )
    head.fuse_optimizer(sx.optim.RowAdagrad(head.parameters(), lr=0.2))
    key = sx.Key(9)
    for step, (h, y) in enumerate(batches(4)):
        rows, before = part_of(0, dist.get_world_size(group), rank), head.weight.detach().clone()
        loss = head(h[rows].requires_grad_(), y[rows], key=key)
        if rank != 1 or step != 1:
            loss.backward()
        losses.append(float(loss.detach()))
        changed.append(not torch.equal(before, head.weight))
    return losses, changed
