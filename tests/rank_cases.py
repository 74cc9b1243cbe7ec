"""What the tests of sharded heads run on every rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import samplex_cuda as sx

CLASSES, DIM, BATCH, DRAWS = 203, 8, 12, 6

HEADS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no bias": {"bias": False},
    "shared": {"shared": True},
    "smoothed": {"loss": sx.losses.SampledSoftmax(label_smoothing=0.2)},
    "absolute": {"loss": sx.losses.SampledSoftmax(absolute=True)},
    "scaled sum": {"scale": 0.5, "reduction": "sum"},
    "negative sampling": {"loss": sx.losses.NegativeSampling(reg=1e-2)},
    "nce": {"loss": "nce"},
    "one-vs-each": {"loss": "one_vs_each"},
    "augment and reduce": {"loss": sx.losses.AugmentReduce(num_examples=50)},
    "bf16": {"dtype": torch.bfloat16},
    "fp64": {"dtype": torch.float64},
    "tree": {},
    "sphere": {"normalize": True, "scale": 8.0},
    "sphere shared": {"normalize": True, "scale": 8.0, "shared": True},
    "arcface": {"normalize": True, "scale": 8.0, "loss": sx.losses.SampledSoftmax(margin=sx.losses.ArcFace(0.4))},
    "cosface uncorrected": {
        "normalize": True, "scale": 8.0, "shared": True,
        "loss": sx.losses.SampledSoftmax(margin=sx.losses.CosFace(0.2), corrected=False),
    },
    "sphere bf16": {"normalize": True, "scale": 8.0, "dtype": torch.bfloat16},
    "learned scale": {"learn_scale": True, "scale": 3.0},
    "learned sphere": {"normalize": True, "learn_scale": True, "scale": 8.0, "shared": True},
    "learned arcface": {
        "normalize": True, "learn_scale": True, "scale": 8.0,
        "loss": sx.losses.SampledSoftmax(margin=sx.losses.ArcFace(0.4)),
    },
    "unique": {"unique": True},
    "unique shared": {"unique": True, "shared": True},
    "unique as in tf": {"unique": "tf", "shared": True},
    "in batch": {"shared": True},
    "mixed negatives": {"shared": True},
    "midx": {"sampler_update": "step"},
    "midx stratified": {"sampler_update": 2, "shared": True, "stratified": True},
}  # fmt: skip


def make_sampler(name: str) -> torch.nn.Module:
    """The sampler of a head by its name; the same on every rank."""
    if name == "tree":
        g = torch.Generator().manual_seed(0)
        x, y = torch.randn(600, DIM, generator=g), torch.randint(CLASSES, (600,), generator=g)
        return sx.samplers.Tree.fit(x, y, num_classes=CLASSES, dim=4, seed=1)
    if name == "in batch":
        return sx.samplers.InBatch(CLASSES)
    if name == "mixed negatives":
        return sx.samplers.InBatch(CLASSES, extra=sx.samplers.LogUniform(CLASSES))
    if name.startswith("midx"):  # its rows come with the first step
        return sx.samplers.MIDX(torch.zeros(CLASSES, DIM), num_codes=8, bias=torch.zeros(CLASSES), key=sx.Key(3))
    return sx.samplers.LogUniform(CLASSES)


def make_head(name: str, device: str | None = None, **options: Any) -> sx.SampledClassifier:
    """The unsharded head; on the CPU with the rows that a sharded head from the meta device would have."""
    sampler = make_sampler(name)
    settings = {**HEADS[name], **options}
    return sx.SampledClassifier(DIM, CLASSES, sampler, DRAWS, device=device, **settings)


def batches(steps: int = 4, targets: int = 0, dtype: torch.dtype = torch.float32) -> list[tuple[Tensor, Tensor]]:
    """Queries and targets of all ranks, step by step."""
    g = torch.Generator().manual_seed(1)
    found = []
    for _ in range(steps):
        h = torch.randn(BATCH, DIM, generator=g).to(dtype)
        y = torch.randint(CLASSES, (BATCH, targets) if targets else (BATCH,), generator=g)
        y[3] = -100
        if targets:
            y[5, 1:] = -100
        found.append((h, y))
    return found


def rows_optimizer(options: dict[str, Any], parameters: Any) -> sx.optim.RowOptimizer:
    """Adagrad; or SGD, whose steps show the size of a gradient; or SGD with stochastic rounding."""
    if options.get("rule") == "sgd":
        return sx.optim.RowSGD(parameters, lr=0.5)
    if options.get("rule") == "rounded":
        return sx.optim.RowSGD(parameters, lr=0.01, stochastic_rounding=True, key=sx.Key(5))
    return sx.optim.RowAdagrad(parameters, lr=0.2)


def tables_of(head: Any) -> list[Tensor]:
    """What a row optimizer takes of a head."""
    return [p for p in (head.weight, head.bias) if p is not None]


def part_of(step: int, world: int, rank: int) -> Tensor:
    """The rows of a rank: even parts, then all on the last rank, then one each and the rest on the last."""
    rows = torch.arange(BATCH)
    if step % 3 == 0:
        return rows.tensor_split(world)[rank]
    if step % 3 == 1:
        return rows if rank == world - 1 else rows[:0]
    return rows[rank : rank + 1] if rank < world - 1 else rows[world - 1 :]


def extras(options: dict[str, Any], rows: Tensor) -> dict[str, Any]:
    """Further arguments of a call, for these rows of the batch."""
    g = torch.Generator().manual_seed(2)
    made: dict[str, Any] = {}
    weights, index = torch.rand(BATCH, generator=g), torch.randperm(50, generator=g)[:BATCH]
    if options.get("weights"):
        made["sample_weight"] = weights[rows]
    if options.get("index"):
        made["index"] = index[rows]
    if options.get("positives"):
        known = torch.arange(40).repeat(BATCH, 1)  # classes that are drawn often
        made["positives"] = (torch.arange(len(rows) + 1) * 40, known[rows].reshape(-1))
    if options.get("target_weight"):
        made["target_weight"] = torch.rand(
            BATCH, *([options["targets"]] if options.get("targets") else []), generator=g
        )
        made["target_weight"] = made["target_weight"][rows]
    if options.get("negatives"):
        made["negatives"] = own_negatives(options["negatives"], rows)
    if options.get("hard"):  # of which some are targets, and some are drawn, too
        made["hard"] = own_negatives("plain", rows).ids[:, : options["hard"]]
    return made


def own_negatives(kind: str, rows: Tensor) -> Any:
    """Negatives of the caller, for these rows of the batch; some of them are targets."""
    g = torch.Generator().manual_seed(6)
    ids, log_q = torch.randint(CLASSES, (BATCH, 5), generator=g), -torch.rand(BATCH, 5, generator=g)
    ids[:, 0] = batches(1)[0][1].reshape(BATCH, -1)[:, 0].clamp_min(0)
    if kind == "shared":
        return sx.Negatives(ids[0])
    if kind == "ragged":
        sizes = torch.arange(BATCH) % 5
        parts = [ids[row, : sizes[row]] for row in rows]
        of_parts = [log_q[row, : sizes[row]] for row in rows]
        flat = torch.cat([ids[0, :0], *parts])
        logs = torch.cat([log_q[0, :0], *of_parts])
        return sx.Negatives((torch.tensor([0, *sizes[rows].cumsum(0).tolist()]), flat), logs)
    return sx.Negatives(ids[rows], log_q[rows]) if kind == "draw" else sx.Negatives(ids[rows])


def whole(head: Any, group: Any) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of all ranks, by class."""
    parts: list[Any] = [None] * dist.get_world_size(group)
    bias = None if head.bias is None else head.bias.detach()
    dist.all_gather_object(parts, (head.layout.classes(), head.weight.detach(), bias), group=group)
    weight = torch.zeros(CLASSES, DIM, dtype=head.weight.dtype)
    full = None if bias is None else torch.zeros(CLASSES, dtype=bias.dtype)
    for classes, rows, some in parts:
        weight[classes] = rows
        if full is not None:
            full[classes] = some
    return weight, full


def train(group: Any, name: str, options: dict[str, Any]) -> dict[str, Any]:
    """A few steps; what is the same on any number of ranks, and this rank's gradients of h."""
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    head: Any = make_head(name, "meta", **options.get("head", {}))
    head = head.shard(
        group, encoder="sum", key=sx.Key(5), batch_capacity=BATCH, order=options.get("order", "class"),
        route=options.get("route", "summed_logits"),
    )  # fmt: skip
    start = whole(head, group)
    optimizer = rows_optimizer(options, tables_of(head))
    of_scale = None if head.log_scale is None else torch.optim.SGD([head.log_scale], lr=0.3)
    if options.get("fused", True):
        head.fuse_optimizer(optimizer)
    key, losses, grads, scales = sx.Key(9), [], [], []
    for step, (h, y) in enumerate(batches(4, options.get("targets", 0), head.weight.dtype)):
        rows = part_of(step, world, rank)
        mine = h[rows].requires_grad_()
        loss = head(mine, y[rows], key=key, **extras(options, rows))
        loss.backward()
        if not options.get("fused", True):
            optimizer.step()
            optimizer.zero_grad()
        if of_scale is not None:
            of_scale.step()
            of_scale.zero_grad()
            scales.append(float(head.log_scale.detach()))
        losses.append(loss.detach())
        grads.append((rows, mine.grad))
    head.eval()
    h, y = batches(1, options.get("targets", 0), head.weight.dtype)[0]
    rows = part_of(0, world, rank)
    nll = head(h[rows], y[rows])
    logits, ids = head.topk(h[rows], 7)
    log_p = head.log_prob(h[rows], ids)
    state = head.full_state_dict().get("log_eta")
    return {
        "log_eta": state, "start": start, "losses": losses, "tables": whole(head, group), "grads": grads, "nll": nll,
        "rows": rows, "topk": (logits, ids), "log_prob": log_p, "sent": head.exchange.sent, "scales": scales,
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------ refusals
def refuse(group: Any, what: str, warm: bool = False) -> str:
    """One rank calls the head wrongly, first or after a step; the message of each rank's error."""
    rank = dist.get_rank(group)
    head: Any = make_head("plain", "meta").shard(group, encoder="sum", key=sx.Key(5), batch_capacity=BATCH)
    h, y = batches(1)[0]
    if warm:
        head(h, y), head(h[:rank], y[:rank])
    wrong = rank == 1
    if what == "target":
        y = y + (1000 if wrong else 0)
    elif what == "width":
        h = h[:, :3] if wrong else h
    elif what == "capacity":
        h, y = (h.repeat(3, 1), y.repeat(3)) if wrong else (h, y)
    elif what == "mode":
        head.train(not wrong)
    elif what == "gradients":
        with torch.set_grad_enabled(not wrong):
            return _message(lambda: head(h, y))
    elif what == "targets":
        y = y.unsqueeze(1).repeat(1, 2) if wrong else y
    given: dict[str, Any] = {}
    if what == "negatives":
        given["negatives"] = sx.Negatives(torch.full((BATCH, 2), CLASSES if wrong else 3))
    elif what == "no negatives" and not wrong:
        given["negatives"] = sx.Negatives(torch.full((BATCH, 2), 3))
    elif what in ("hard", "numbers of hard"):
        given["hard"] = torch.full((BATCH, 2), 3)
        if wrong:
            given["hard"] = given["hard"] + CLASSES if what == "hard" else given["hard"][:, :1]
    before = head.weight.detach().clone()
    message = _message(lambda: head(h, y, **given))
    assert torch.equal(head.weight, before)
    # The group is in step: the next batch works.
    h, y = batches(1)[0]
    head.train()
    assert bool(head(h, y).isfinite())
    return message


def few_classes(group: Any, head: dict[str, Any], options: dict[str, Any]) -> Any:
    """Steps with 5 classes, of which the last of four ranks has none: losses, gradients and the table by class."""
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    drawn = () if head.get("loss") == "full_softmax" else (sx.samplers.LogUniform(5), 3)
    if options.get("in_batch"):
        drawn = (sx.samplers.InBatch(5), None)
    made: Any = sx.SampledClassifier(DIM, 5, *drawn, device="meta", **head)
    made = made.shard(
        group, encoder="sum", key=sx.Key(5), batch_capacity=BATCH, order=options.get("order", "class"),
        route=options.get("route", "summed_logits"),
    )  # fmt: skip
    assert world < 4 or (rank < 3) == bool(made.layout.rows)
    optimizer = sx.optim.RowAdagrad(tables_of(made), lr=0.2)
    if options.get("fused", True):
        made.fuse_optimizer(optimizer)
    key, losses, grads = sx.Key(9), [], []
    for step, (h, y) in enumerate(batches(3)):
        rows = part_of(step, world, rank)
        mine, y = h[rows].requires_grad_(), torch.where(y < 0, y, y % 5)[rows]
        more = {"hard": (y.clamp_min(0).unsqueeze(1) + torch.tensor([1, 2])) % 5} if options.get("hard") else {}
        loss = made(mine, y, key=key, **more)
        loss.backward()
        if not options.get("fused", True):
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
        grads.append((rows, mine.grad))
    made.eval()
    top = made.topk(h[:3], 5)[1]
    return losses, grads, made.full_state_dict()["weight"], top, float(made(h[rows], y))


def collectives(group: Any) -> tuple[list[int], list[bool]]:
    """Collectives of steps in turn with answers, and whether each loss is that of a head that always gathers twice."""
    rank = dist.get_rank(group)
    heads: list[Any] = [
        make_head("plain", "meta").shard(group, encoder="sum", key=sx.Key(5), batch_capacity=BATCH) for _ in range(2)
    ]
    calls: list[int] = []
    names = ("all_gather_single", "all_reduce", "all_to_all_single")
    kinds = [getattr(dist, name) for name in names]

    def counted(kind: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            calls[-1] += 1
            return kind(*args, **options)

        return call

    h, y = batches(1)[0]
    same, weight = [], torch.ones(BATCH)
    # Two plain steps, answers, weighted steps, a step of few rows: those that are as the last one need no header.
    for step, given in enumerate([{}, {}, None, {}, {}, {"w": 1}, {"w": 1}, {}, {"rows": rank}, {}]):
        found = []
        for number, head in enumerate(heads):
            if number:
                head.exchange._last = None
            rows = slice(0, BATCH if given is None else given.get("rows", BATCH))
            calls.append(0)
            for name, kind in zip(names, kinds, strict=True):
                setattr(dist, name, counted(kind))
            try:
                if given is None:
                    found.append(head.topk(h, 3)[0])
                else:
                    more = {"sample_weight": weight[rows]} if "w" in given else {}
                    found.append(head(h[rows].requires_grad_(), y[rows], key=sx.Key(step), **more).detach())
            finally:
                for name, kind in zip(names, kinds, strict=True):
                    setattr(dist, name, kind)
        same.append(torch.equal(*found))
    return calls[::2], same


def uneven_negatives(group: Any) -> tuple[Tensor, Tensor]:
    """Rank r brings r + 1 negatives for each of its rows; the losses of all rows, and the rows of the table."""
    rank = dist.get_rank(group)
    head: Any = make_head("plain", "meta", reduction="none").shard(group, encoder="sum", key=sx.Key(5))
    h, y = batches(1)[0]
    ids = torch.arange(BATCH * 8).view(BATCH, 8) % CLASSES
    rows = torch.arange(BATCH).tensor_split(dist.get_world_size(group))[rank]
    log_q = None if rank % 2 else torch.full((len(rows), rank + 1), -2.0)
    start = whole(head, group)
    return head(h[rows], y[rows], negatives=sx.Negatives(ids[rows, : rank + 1], log_q)).detach(), *start


def wrong_device(group: Any) -> str:
    """The message of a sampler that is not where the rows are."""
    head = make_head("tree", "meta")
    head.sampler.to("meta")
    return _message(lambda: head.shard(group, encoder="sum", key=sx.Key(5)))


def _message(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


# ------------------------------------------------------------------------------------------------ with an encoder
def inside_ddp(group: Any) -> str:
    """The message of a sharded head that was wrapped together with its encoder."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = torch.nn.Linear(5, DIM)
            self.head = make_head("plain", "meta").shard(group, encoder="average", key=sx.Key(5))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.head(self.encoder(x), y)

    # As many rows on every rank, or DDP refuses by itself.
    model = torch.nn.parallel.DistributedDataParallel(Model(), process_group=group)
    return _message(lambda: model(torch.randn(2, 5), torch.zeros(2, dtype=torch.int64)))


def with_encoder(group: Any, kind: str) -> list[Tensor]:
    """A plain encoder, one in DDP or in FSDP2, a sharded head: parameters of the encoder after a few steps."""
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    torch.manual_seed(3)
    encoder: Any = torch.nn.Linear(5, DIM)
    if kind == "ddp":
        encoder = torch.nn.parallel.DistributedDataParallel(encoder, process_group=group)
    elif kind == "fsdp":
        torch.distributed.fsdp.fully_shard(encoder, mesh=dist.device_mesh.DeviceMesh.from_group(group, "cpu"))
    head: Any = make_head("plain", "meta").shard(group, encoder="average", key=sx.Key(5), batch_capacity=BATCH)
    head.fuse_optimizer(sx.optim.RowAdagrad(head.parameters(), lr=0.2))
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.5)
    g, key = torch.Generator().manual_seed(4), sx.Key(9)
    for _ in range(4):
        x, y = torch.randn(BATCH, 5, generator=g), torch.randint(CLASSES, (BATCH,), generator=g)
        rows = torch.arange(BATCH).tensor_split(world)[rank]
        optimizer.zero_grad()
        head(encoder(x[rows]), y[rows], key=key).backward()
        optimizer.step()
    return [(p.full_tensor() if kind == "fsdp" else p).detach().clone() for p in encoder.parameters()]


def accumulated(group: Any) -> Any:
    """Two backwards make one update; the tables after two updates."""
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    head: Any = make_head("plain", "meta").shard(group, encoder="sum", key=sx.Key(5), batch_capacity=BATCH)
    head.fuse_optimizer(sx.optim.RowAdagrad(head.parameters(), lr=0.2), accumulate=2)
    key, changed = sx.Key(9), []
    for step, (h, y) in enumerate(batches(4)):
        before, rows = head.weight.detach().clone(), part_of(step, world, rank)
        head(h[rows], y[rows], key=key).backward()
        changed.append(not torch.equal(before, head.weight))
    return changed, whole(head, group)


def loss_scaled(group: Any) -> Any:
    """Three steps under a GradScaler, of which the second overflows; the tables and the scale."""
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    head: Any = make_head("plain", "meta").shard(group, encoder="sum", key=sx.Key(5), batch_capacity=BATCH)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    head.fuse_optimizer(sx.optim.RowAdagrad(head.parameters(), lr=0.2), grad_scaler=scaler)
    encoder = torch.nn.Linear(DIM, DIM)
    torch.nn.init.eye_(encoder.weight), torch.nn.init.zeros_(encoder.bias)
    outer = torch.optim.SGD(encoder.parameters(), lr=0.0)
    key, tables = sx.Key(9), []
    for step, (h, y) in enumerate(batches(3)):
        rows = part_of(0, world, rank)
        loss = head(encoder(h[rows]), y[rows], key=key) * (torch.inf if step == 1 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(outer)
        scaler.update()
        outer.zero_grad()
        tables.append(whole(head, group))
    return tables, scaler.get_scale()


# ------------------------------------------------------------------------------------------------ checkpoints
def _training(group: Any, options: dict[str, Any]) -> tuple[Any, Any, Any, Any]:
    """Encoder, sharded head and their optimizers; another start for each number of ranks."""
    torch.manual_seed(dist.get_world_size(group))
    encoder: Any = torch.nn.Linear(5, DIM)
    head: Any = make_head(options.get("name", "plain"), "meta", **options.get("head", {})).shard(
        group, encoder="sum", key=sx.Key(dist.get_world_size(group)), batch_capacity=BATCH,
        order=options.get("order", "class"),
    )  # fmt: skip
    rule = {"adam": sx.optim.RowAdam}.get(options.get("rule"), sx.optim.RowAdagrad)
    rows = rule(tables_of(head), lr=0.2)
    head.fuse_optimizer(rows)
    scale = [] if head.log_scale is None else [head.log_scale]
    return encoder, head, torch.optim.Adam([*encoder.parameters(), *scale], lr=0.01), rows


def _steps(group: Any, encoder: Any, head: Any, optimizer: Any, key: sx.Key, first: int, last: int) -> list[float]:
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    losses = []
    for step in range(first, last):
        g = torch.Generator().manual_seed(step)
        x, y = torch.randn(BATCH, 5, generator=g), torch.randint(CLASSES, (BATCH,), generator=g)
        rows = torch.arange(BATCH).tensor_split(world)[rank]
        optimizer.zero_grad()
        index = {"index": torch.randperm(50, generator=g)[:BATCH][rows]} if head.loss.needs.example_index else {}
        loss = head(
            encoder(x)[rows], y[rows], key=key, **index
        )  # the encoder sees all rows: the same bits on every rank
        loss.backward()
        for p in encoder.parameters():
            dist.all_reduce(p.grad, group=group)
        optimizer.step()
        losses.append(float(loss))
    return losses


def save(group: Any, folder: str, options: dict[str, Any]) -> list[float]:
    """Three steps, a checkpoint, and the losses of three more."""
    encoder, head, optimizer, rows = _training(group, options)
    key = sx.Key(9)
    _steps(group, encoder, head, optimizer, key, 0, 3)
    sx.distributed.save_checkpoint(
        folder, {"encoder": encoder, "head": head}, {"encoder": optimizer, "head": rows},
        extra={"step": 3, "key": key.state_dict()}, group=group,
    )  # fmt: skip
    return _steps(group, encoder, head, optimizer, key, 3, 6)


def resume(group: Any, folder: str, options: dict[str, Any]) -> list[float]:
    """The losses after the checkpoint."""
    encoder, head, optimizer, rows = _training(group, options)
    extra = sx.distributed.load_checkpoint(
        folder, {"encoder": encoder, "head": head}, {"encoder": optimizer, "head": rows}, group=group
    )
    key = sx.Key(0)
    key.load_state_dict(extra["key"])
    return _steps(group, encoder, head, optimizer, key, extra["step"], extra["step"] + 3)


def load_message(group: Any, folder: str, options: dict[str, Any]) -> str:
    """What a refused load says; nothing may have changed."""
    encoder, head, optimizer, rows = _training(group, options)
    before = head.weight.detach().clone()
    message = _message(
        lambda: sx.distributed.load_checkpoint(
            folder, {"encoder": encoder, "head": head}, {"encoder": optimizer, "head": rows}, group=group
        )
    )
    assert torch.equal(before, head.weight)
    return message


def through_plain(group: Any, order: str) -> bool:
    """State dicts: of a sharded head as DTensors, whole for a plain head, and back."""
    head: Any = make_head("plain", "meta").shard(group, encoder="sum", key=sx.Key(5), order=order)
    state = head.state_dict()
    assert isinstance(state["weight"], torch.distributed.tensor.DTensor)
    by_class, bias = whole(head, group)
    full = state["weight"].full_tensor()
    slots = head.layout.slot(torch.arange(CLASSES))
    assert torch.equal(full[slots], by_class)
    plain = make_head("plain")
    plain.load_state_dict(head.full_state_dict())
    assert torch.equal(plain.weight, by_class)
    assert torch.equal(plain.bias, bias)
    other: Any = make_head("plain", "meta").shard(group, encoder="sum", key=sx.Key(6), order=order)
    other.load_state_dict(plain.state_dict())
    assert torch.equal(other.weight, head.weight)
    third: Any = make_head("plain", "meta").shard(group, encoder="sum", key=sx.Key(7), order=order)
    third.load_state_dict(head.state_dict())
    assert torch.equal(third.weight, head.weight)
    with torch.no_grad():
        plain.weight.add_(1.0)
    from_whole: Any = plain.shard(group, encoder="sum", order=order)
    assert torch.equal(whole(from_whole, group)[0], plain.weight)
    return True


# ------------------------------------------------------------------------------------------------ runs
def run_trainer(
    group: Any, folder: str, model: str, sampler: str, settings: list[str], resume: bool = False
) -> dict[str, Any]:
    """A run of `Trainer` on the ranks of the group: how it ended."""
    from training_cases import case

    from samplex_cuda.training import Trainer, sharded

    sharded._group = lambda: group
    run, data, valid = case(model, sampler, "training.shard=classes", *settings)
    go_on = Trainer.resume
    trainer = go_on(folder, data, valid, settings=settings) if resume else Trainer(run, data, valid, folder)
    result = trainer.fit()
    return {"status": result.status, "step": result.step, "metrics": result.metrics, "rows": len(trainer.head.weight)}


def trainer_message(group: Any, folder: str, model: str, sampler: str, settings: list[str], rank: int) -> str:
    """What each rank says where one of them has other settings."""
    mine = settings if dist.get_rank(group) == rank else []
    return _message(lambda: run_trainer(group, folder, model, sampler, mine))


# ------------------------------------------------------------------------------------------------ health
def disagree(group: Any) -> str:
    """Rank 2 has another rate."""
    rank = dist.get_rank(group)
    sx.distributed.agree({"classes": 10, "lr": 0.1}, group)
    return _message(lambda: sx.distributed.agree({"classes": 10, "lr": 0.2 if rank == 2 else 0.1}, group))


# ------------------------------------------------------------------------------------------------ mined negatives
def mined(group: Any, source: str, name: str) -> Any:
    """Hard negatives of this rank's rows, found by all ranks, with the tables; None: what `index` says."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    head: Any = make_head(name, "meta").shard(group, encoder="sum", key=sx.Key(5), order="spread")
    h, y = batches(1)[0]
    rows = torch.arange(BATCH).tensor_split(world)[rank]
    miner = sx.HardNegatives(head, 4, source, pool=50)
    found = miner.mine(h[rows], y[rows], key=sx.Key(7) if rank == 0 else None)
    loss = head(h[rows], y[rows], hard=found)
    return rows, found, whole(head, group), bool(loss.isfinite()), _message(head.index)
