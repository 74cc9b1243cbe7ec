"""What the tests of the full softmax and of losses by row run on every rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from rank_cases import BATCH, CLASSES, DIM, DRAWS, _message, batches, extras, part_of, tables_of, whole
from torch import Tensor

import samplex_cuda as sx

FULL = sx.losses.FullSoftmax
# name -> (settings of the head, how it is called)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "full": ({"loss": "full_softmax"}, {}),
    "full spread": ({"loss": "full_softmax", "bias": False}, {"order": "spread"}),
    "full smoothed": ({"loss": FULL(label_smoothing=0.2), "scale": 0.5}, {"targets": 3}),
    "full weighted": (
        {"loss": FULL(label_smoothing=0.1), "class_weight": torch.linspace(0.1, 2.0, CLASSES)},
        {"weights": True},
    ),
    "full absolute": ({"loss": FULL(absolute=True), "reduction": "sum"}, {}),
    "full none": ({"loss": "full_softmax", "reduction": "none"}, {"targets": 3, "weights": True}),
    "full fp64": ({"loss": "full_softmax", "dtype": torch.float64, "reduction": "none"}, {}),
    "full sphere": ({"loss": "full_softmax", "normalize": True, "scale": 6.0}, {"order": "spread"}),
    "full target weights": (
        {"loss": FULL(label_smoothing=0.1), "class_weight": torch.linspace(0.1, 2.0, CLASSES)},
        {"target_weight": True, "targets": 3, "weights": True},
    ),
    "none": ({"reduction": "none"}, {"order": "spread"}),
    "none shared": ({"reduction": "none", "shared": True}, {}),
    "none weighted": ({"reduction": "none", "loss": "nce"}, {"weights": True, "targets": 3}),
    "none fused": ({"reduction": "none", "loss": "one_vs_each"}, {"fused": True}),
    "none sphere": (
        {
            "reduction": "none",
            "normalize": True,
            "scale": 6.0,
            "loss": sx.losses.SampledSoftmax(margin=sx.losses.ArcFace()),
        },
        {"weights": True, "target_weight": True, "targets": 3},
    ),
    "none negatives": ({"reduction": "none", "loss": "one_vs_each"}, {"negatives": "plain", "fused": True}),
    "full learned scale": ({"loss": "full_softmax", "learn_scale": True, "scale": 3.0}, {"targets": 3}),
    "full learned sphere": (
        {"loss": "full_softmax", "learn_scale": True, "scale": 6.0, "normalize": True, "reduction": "none"},
        {"order": "spread", "weights": True},
    ),
    "none learned": ({"reduction": "none", "learn_scale": True, "scale": 2.0, "normalize": True}, {"weights": True}),
    "none hard": ({"reduction": "none", "shared": True}, {"hard": 3, "fused": True}),
    "none online": ({"reduction": "none", "shared": True}, {"route": "online_softmax", "weights": True}),
}


def make(name: str, device: str | None = None) -> sx.SampledClassifier:
    """The head that is not sharded."""
    settings = CASES[name][0]
    full = isinstance(settings.get("loss"), FULL) or settings.get("loss") == "full_softmax"
    drawn = () if full else (sx.samplers.LogUniform(CLASSES), DRAWS)
    return sx.SampledClassifier(DIM, CLASSES, *drawn, device=device, **settings)


def objective(loss: Tensor) -> Tensor:
    """A number of losses by row, which every rank has in the same order."""
    if not loss.dim():
        return loss
    return (loss * torch.linspace(0.2, 1.0, BATCH, dtype=loss.dtype)).sum()


def steps(head: Any, name: str, world: int, rank: int) -> list[dict[str, Any]]:
    """Three steps: losses, gradients of h and of the tables."""
    options, key, found = CASES[name][1], sx.Key(9), []
    optimizer = sx.optim.RowSGD(tables_of(head), lr=0.1)
    of_scale = None if head.log_scale is None else torch.optim.SGD([head.log_scale], lr=0.3)
    if options.get("fused"):
        head.fuse_optimizer(optimizer)
    for step, (h, y) in enumerate(batches(3, options.get("targets", 0), head.weight.dtype)):
        rows = part_of(step, world, rank)
        mine = h[rows].requires_grad_()
        loss = head(mine, y[rows], key=key, **extras(options, rows))
        objective(loss).backward()
        if not options.get("fused"):
            optimizer.step()
            optimizer.zero_grad()
        if of_scale is not None:
            of_scale.step()
            of_scale.zero_grad()
        scale = None if of_scale is None else head.log_scale.detach().clone()
        found.append({"loss": loss.detach(), "rows": rows, "grad": mine.grad, "scale": scale})
    head.eval()
    rows = part_of(0, world, rank)
    h, y = batches(1, options.get("targets", 0), head.weight.dtype)[0]
    found.append({"loss": head(h[rows], y[rows]), "rows": rows[:0], "grad": None, "scale": None})
    return found


def run(group: Any) -> dict[str, Any]:
    """All cases: the first rows, what the steps gave, and the last rows."""
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    made = {}
    for name, (_, options) in CASES.items():
        head: Any = make(name, "meta").shard(
            group, encoder="sum", key=sx.Key(5), batch_capacity=BATCH, order=options.get("order", "class"),
            route=options.get("route", "summed_logits"),
        )  # fmt: skip
        start = whole(head, group)
        found = steps(head, name, world, rank)
        made[name] = {"start": start, "steps": found, "tables": whole(head, group)}
    return made


def averaged(group: Any, reduction: str) -> Tensor:
    """The gradient of an encoder in DDP, before a full softmax."""
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    torch.manual_seed(3)
    encoder: Any = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(5, DIM), process_group=group)
    head: Any = sx.SampledClassifier(DIM, CLASSES, loss="full_softmax", reduction=reduction, device="meta")
    head = head.shard(group, encoder="average", key=sx.Key(5), batch_capacity=BATCH)
    g = torch.Generator().manual_seed(4)
    x, y = torch.randn(BATCH, 5, generator=g), torch.randint(CLASSES, (BATCH,), generator=g)
    rows = torch.arange(BATCH).tensor_split(world)[rank]
    objective(head(encoder(x[rows]), y[rows])).backward()
    return encoder.module.weight.grad


def refusals(group: Any) -> list[str]:
    """Messages of routes that the full softmax and losses by row cannot take."""
    full = sx.SampledClassifier(DIM, CLASSES, loss="full_softmax", device="meta")
    rows = sx.SampledClassifier(DIM, CLASSES, sx.samplers.Uniform(CLASSES), 4, reduction="none", device="meta")
    return [
        _message(lambda: full.shard(group, encoder="sum", route="online_softmax")),
        _message(lambda: rows.shard(group, encoder="sum", route="rows_to_queries")),
    ]
