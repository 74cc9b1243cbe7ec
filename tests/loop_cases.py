"""What the tests of plain loops and of torchmetrics run on every rank."""

from __future__ import annotations

import contextlib
import copy
import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import samplex_cuda as sx

PAGE = Path(__file__).resolve().parents[1] / "docs" / "integrations" / "loops.md"
CLASSES, DIM, BATCH = 60, 8, 12


def page(group: Any, number: int) -> list[Tensor]:
    """Runs the blocks of the page up to one of them; the parameters that it calls `whole`."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    imports = "import torch\nimport torch.distributed as dist\nimport samplex_cuda as sx\n"
    exec(compile(imports + blocks[number], str(PAGE), "exec"), names)
    return names["whole"]


def made(embedding: str = "none") -> tuple[Any, Any]:
    """Model and optimizer; embedding: "none", "own" or "tied", of the nearest class of x."""
    torch.manual_seed(0)
    model: Any = nn.Module()
    if embedding != "none":
        model.table = nn.Embedding(CLASSES, DIM, sparse=True)
    model.encoder = nn.Linear(DIM, DIM)
    model.head = sx.SampledClassifier(DIM, CLASSES, sx.samplers.Uniform(CLASSES), num_samples=6)
    if embedding == "tied":
        model.head.weight = model.table.weight

    def forward(x: Tensor, y: Tensor, key: Any) -> Tensor:
        if embedding != "none":
            x = x + model.table((x.abs().sum(1) * 7).long() % CLASSES)
        return model.head(model.encoder(x), y, key=key)

    model.forward = forward
    dense, rows = sx.optim.split_parameters(model)
    return model, sx.optim.Combined(dense=torch.optim.AdamW(dense, lr=0.05), rows=sx.optim.RowAdam(rows, lr=0.05))


def batch(step: int, world: int) -> list[tuple[Tensor, Tensor]]:
    """The parts of the ranks of a batch of all."""
    g = torch.Generator().manual_seed(step)
    x, y = torch.randn(BATCH, DIM, generator=g), torch.randint(CLASSES, (BATCH,), generator=g)
    return list(zip(x.tensor_split(world), y.tensor_split(world), strict=True))


def ddp_loop(group: Any, clip: float, accumulate: int, embedding: str = "none") -> dict[str, Tensor]:
    """A loop with torch's clipping and DDP's no_sync; norms and parameters."""
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    model, optimizer = made(embedding)
    if embedding != "none" and rank:
        nn.init.zeros_(model.table.weight)  # the first rank's numbers count
    sx.distributed.replicate(model, group, encoder="average", batch_capacity=BATCH)
    ddp = nn.parallel.DistributedDataParallel(model, process_group=group)
    norms = []
    for step in range(6):
        x, y = batch(step, world)[rank]
        last = (step + 1) % accumulate == 0
        with contextlib.nullcontext() if last else ddp.no_sync():
            ddp(x, y, sx.Key(7, step)).backward()
        if last:
            assert isinstance(model.head.weight.grad, sx.optim.RowGradient)
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip)))
            optimizer.step()
            optimizer.zero_grad()
    return {"norms": torch.tensor(norms), **{name: p.detach().clone() for name, p in model.named_parameters()}}


def one_process(world: int, clip: float, accumulate: int, embedding: str = "none") -> dict[str, Tensor]:
    """The same steps without ranks: each part with the draws of its rows among those of all ranks."""
    model, optimizer = made(embedding)
    norms = []
    for step in range(6):
        first = 0
        for x, y in batch(step, world):
            (model(x, y, torch.tensor([7, step, first])) * (len(y) / BATCH)).backward()
            first += len(y)
        if (step + 1) % accumulate == 0:
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip)))
            optimizer.step()
            optimizer.zero_grad()
    return {"norms": torch.tensor(norms), **{name: p.detach().clone() for name, p in model.named_parameters()}}


def copied(group: Any) -> bool:
    """A copy exchanges nothing: one rank alone can train it; replicating again does not exchange twice."""
    model, _ = made("own")
    del model.forward  # a closure
    for _ in range(2):
        sx.distributed.replicate(model, group, encoder="average")
    assert len(model.table._forward_hooks) == 1
    other = copy.deepcopy(model)
    if dist.get_rank(group) == 0:
        x, y = batch(0, 1)[0]
        other.head(other.encoder(x + other.table(y)), y).backward()
        assert other.table.weight.grad.is_sparse
    return other.head._replica is None


def shared_with_dense(group: Any) -> None:
    """A layer with dense gradients of the table."""
    model, _ = made()
    model.other = nn.Linear(DIM, CLASSES)
    model.other.weight = model.head.weight
    sx.distributed.replicate(model, group, encoder="average")


def ranked(rank: int, world: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Uneven batches: rank r brings r + 1 of them, of different sizes."""
    g, found = torch.Generator().manual_seed(0), []
    for owner in range(world):
        for n in range(owner + 1):
            rows = 3 + 2 * n + owner
            ids = torch.stack([torch.randperm(20, generator=g)[:5] for _ in range(rows)])
            found.append((owner, (ids, torch.randint(20, (rows,), generator=g), torch.rand(rows, generator=g))))
    return [batch for owner, batch in found if owner == rank]


def metric(group: Any, with_nll: bool) -> dict[str, float]:
    """The metric of all ranks."""
    made = sx.integrations.torchmetrics.RankedClasses((1, 5), process_group=group)
    for ids, targets, nll in ranked(dist.get_rank(group), dist.get_world_size(group)):
        made.update(ids, targets, nll if with_nll else None)
    found = {name: float(value) for name, value in made.compute().items()}
    assert not made._is_synced  # the sums of this rank are its own again
    return found
