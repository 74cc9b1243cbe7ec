"""What the tests of `even_batches` and of the group's backend run on every rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from rank_cases import CLASSES, DIM, _message, make_head
from torch import Tensor

import samplex_cuda as sx

WIDTH, ROWS = 5, 4


def data(counts: list[int]) -> list[list[tuple[Tensor, Tensor]]]:
    """The batches of each rank."""
    made = []
    for rank, count in enumerate(counts):
        g = torch.Generator().manual_seed(20 + rank)
        sizes = [ROWS - step % 2 for step in range(count)]
        made.append([(torch.randn(n, WIDTH, generator=g), torch.randint(CLASSES, (n,), generator=g)) for n in sizes])
    return made


def joined(counts: list[int]) -> list[tuple[Tensor, Tensor]]:
    """The rows of all ranks as one rank would have them, step by step."""
    parts = data(counts)
    steps = [[mine[step] for mine in parts if step < len(mine)] for step in range(max(counts))]
    return [(torch.cat([x for x, _ in step]), torch.cat([y for _, y in step])) for step in steps]


def train(group: Any, counts: list[int], kind: str, unsized: list[int], one: bool) -> dict[str, Any]:
    """Losses and the encoder's parameters; `one`: this rank alone has the rows of all."""
    torch.manual_seed(3)
    encoder: Any = torch.nn.Sequential(torch.nn.Linear(WIDTH, 7), torch.nn.Tanh(), torch.nn.Linear(7, DIM))
    if kind == "ddp":
        encoder = torch.nn.parallel.DistributedDataParallel(encoder, process_group=group)
    else:
        torch.distributed.fsdp.fully_shard(encoder, mesh=dist.device_mesh.DeviceMesh.from_group(group, "cpu"))
    head: Any = make_head("plain", "meta").shard(group, encoder="average", key=sx.Key(5), batch_capacity=3 * ROWS)
    head.fuse_optimizer(sx.optim.RowAdagrad(head.parameters(), lr=0.2))
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.5)
    rank, key, losses, rows = dist.get_rank(group), sx.Key(9), [], []
    mine: Any = joined(counts) if one else data(counts)[rank]
    empty = torch.empty(0, WIDTH), torch.empty(0, dtype=torch.int64)
    for x, y in sx.distributed.even_batches(iter(mine) if rank in unsized else mine, empty, group):
        optimizer.zero_grad()
        loss = head(encoder(x), y, key=key)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        rows.append(len(y))
    end = [(p.full_tensor() if kind == "fsdp" else p).detach().clone() for p in encoder.parameters()]
    return {"losses": losses, "rows": rows, "end": end}


class _Longer(list):
    """One more item than `len` says."""

    def __iter__(self) -> Any:
        yield from [*super().__iter__(), "more"]


def walk(group: Any, counts: list[int], unsized: list[int], longer: int = -1) -> tuple[list[str], int, str]:
    """What a loop yields without a head, the number of all-reduces, and the error at its end."""
    rank, calls, real = dist.get_rank(group), 0, dist.all_reduce

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        return real(*args, **options)

    items = [f"{rank}.{step}" for step in range(counts[rank])]
    mine: Any = _Longer(items) if rank == longer else iter(items) if rank in unsized else items
    seen: list[str] = []
    dist.all_reduce = counted
    try:
        message = _message(lambda: seen.extend(sx.distributed.even_batches(mine, "empty", group)))
    finally:
        dist.all_reduce = real
    return seen, calls, message


def other_backend(group: Any, what: str, reported: str) -> str:
    """The message of a group that torch reports with other backends."""
    real = dist.get_backend_config
    dist.get_backend_config = lambda _=None: reported
    device = "cuda" if what == "cuda rows" else None
    try:
        if what == "replicate":
            return _message(lambda: sx.distributed.replicate(make_head("plain"), group, encoder="sum"))
        return _message(lambda: make_head("plain", "meta").shard(group, encoder="sum", key=sx.Key(5), device=device))
    finally:
        dist.get_backend_config = real
