"""What the tests of replicated heads run on every rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from rank_cases import BATCH, CLASSES, DIM, batches, extras, make_head, part_of, rows_optimizer, tables_of
from torch import Tensor, nn

import samplex_cuda as sx

WIDTH = 5


class Model(nn.Module):
    """An encoder and a head whose numbers differ from rank to rank until they are replicated."""

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        super().__init__()
        self.head = make_head(name, **options.get("head", {}))
        self.encoder = nn.Linear(WIDTH, DIM).to(self.head.weight.dtype)

    def forward(self, x: Tensor, y: Tensor, **given: Any) -> Tensor:
        return self.head(self.encoder(x), y, **given)


def inputs(options: dict[str, Any], dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """Inputs of the encoder, and targets, of all ranks."""
    g = torch.Generator().manual_seed(6)
    of = batches(4, options.get("targets", 0), dtype)
    return [(torch.randn(BATCH, WIDTH, generator=g).to(dtype), y) for _, y in of]


def besides_rows(model: Model) -> list[Tensor]:
    """What an ordinary optimizer takes of a model."""
    scale = [] if model.head.log_scale is None else [model.head.log_scale]
    return [*model.encoder.parameters(), *scale]


def train(group: Any, name: str, options: dict[str, Any]) -> dict[str, Any]:
    """A few steps in DistributedDataParallel; where the parameters began and ended."""
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    model = sx.distributed.replicate(Model(name, options), group, encoder="average", batch_capacity=BATCH)
    ddp = nn.parallel.DistributedDataParallel(model, process_group=group)
    start = {key: value.detach().clone() for key, value in model.state_dict().items()}
    head: Any = model.head
    of_rows = rows_optimizer(options, tables_of(head))
    if options.get("fused", True):
        head.fuse_optimizer(of_rows)
    optimizer = torch.optim.SGD(besides_rows(model), lr=0.1)
    key, losses = sx.Key(9), []
    for step, (x, y) in enumerate(inputs(options, head.weight.dtype)):
        rows = part_of(step, world, rank)
        optimizer.zero_grad()
        loss = ddp(x[rows], y[rows], key=key, **extras(options, rows))
        loss.backward()
        optimizer.step()
        if not options.get("fused", True):
            assert head.weight.grad.is_sparse
            of_rows.step()
            of_rows.zero_grad()
        losses.append(loss.detach())
    end = {key: value.detach().clone() for key, value in model.state_dict().items()}
    before = head._replica.exchange.sent
    with torch.no_grad():
        ddp(x[rows], y[rows], key=key, **extras(options, rows))
    assert (head._replica.exchange.sent - before) < 4096  # without a gradient no row is sent
    return {"start": start, "end": end, "losses": losses}


def sent(group: Any, shared: bool) -> int:
    """Bytes that a rank sends in a step with a full batch."""
    head: Any = sx.SampledClassifier(64, 1000, sx.samplers.Uniform(1000), 40, shared=shared)
    sx.distributed.replicate(head, group, encoder="sum", batch_capacity=32)
    h, y = torch.randn(32, 64, requires_grad=True), torch.randint(1000, (32,))
    head(h, y).backward()
    head._replica.exchange.sent = 0
    head(h, y).backward()
    return head._replica.exchange.sent


def refuse(group: Any, what: str) -> str:
    """The message of a wrong call; where one rank is wrong, of each rank."""
    rank = dist.get_rank(group)
    model: Any = Model("plain", {})
    try:
        if what == "inside":  # DDP wraps another module than the one that was replicated
            sx.distributed.replicate(model.head, group, encoder="average")
            nn.parallel.DistributedDataParallel(model, process_group=group)(
                torch.randn(2, WIDTH), torch.zeros(2, dtype=torch.int64)
            )
        elif what == "batch":
            sx.distributed.replicate(model, group, encoder="average", batch_capacity=BATCH)
            y = torch.zeros(2, dtype=torch.int64) + (CLASSES if rank == 1 else 0)
            try:
                model(torch.randn(2, WIDTH), y)
            finally:  # the group is in step: the next batch works
                assert bool(model(torch.randn(2, WIDTH), y * 0).isfinite())
        elif what == "rounding":
            head = sx.SampledClassifier(DIM, CLASSES, sx.samplers.Uniform(CLASSES), 4, bias=False, dtype=torch.bfloat16)
            sx.distributed.replicate(head, group, encoder="average")
            head.fuse_optimizer(sx.optim.RowSGD(head.parameters(), lr=0.1, stochastic_rounding=True))
            head(torch.randn(2, DIM, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.int64))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def copied(group: Any) -> bool:
    """Whether a copy of a replicated head works alone, on one rank."""
    import copy

    head: Any = sx.distributed.replicate(make_head("plain"), group, encoder="sum")
    other = copy.deepcopy(head)
    if dist.get_rank(group) == 0:
        other(torch.randn(2, DIM), torch.zeros(2, dtype=torch.int64)).backward()
    return other._replica is None
