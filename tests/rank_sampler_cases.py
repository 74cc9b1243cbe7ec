"""What the tests of sharded samplers run on every rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from rank_cases import BATCH, DIM, _message, batches, part_of
from torch import Tensor

import samplex_cuda as sx
from samplex_cuda.distributed import Layout
from samplex_cuda.distributed.collectives import Exchange
from samplex_cuda.distributed.follow import shard_sampler

KERNELS: dict[str, Any] = {
    "quadratic": lambda w, b: sx.samplers.Quadratic(w, alpha=5.0),
    "quadratic mixed": lambda w, b: sx.samplers.Quadratic(w, alpha=5.0, epsilon=0.2),
    "quadratic bias": lambda w, b: sx.samplers.Quadratic(w, alpha=5.0, bias=b),
    "rff": lambda w, b: sx.samplers.RandomFourier(w, num_features=64, nu=1.0, key=sx.Key(3)),
    "orf normalized": lambda w, b: sx.samplers.RandomFourier(w, 64, 2.0, "orf", normalize=True, key=sx.Key(3)),
    "positive": lambda w, b: sx.samplers.RandomFourier(w, 64, 1.0, "positive", epsilon=0.0, key=sx.Key(3)),
}


def table(classes: int) -> tuple[Tensor, Tensor]:
    """Class rows and biases, the same on every rank."""
    g = torch.Generator().manual_seed(7)
    return 0.5 * torch.randn(classes, DIM, generator=g), 0.3 * torch.randn(classes, generator=g)


DEFERRED: dict[str, Any] = {
    "quadratic": lambda classes: sx.samplers.Quadratic.deferred(classes, DIM, alpha=5.0),
    "rff": lambda classes: sx.samplers.RandomFourier.deferred(classes, DIM, num_features=64, nu=1.0, key=sx.Key(3)),
    "midx": lambda classes: sx.samplers.MIDX(torch.empty(classes, DIM, device="meta"), num_codes=8, key=sx.Key(3)),
}

CODED: dict[str, Any] = {
    "midx": lambda w, b: sx.samplers.MIDX(w, num_codes=8, key=sx.Key(3)),
    "midx product": lambda w, b: sx.samplers.MIDX(
        w, num_codes=4, kind="product", bias=b, counts=torch.arange(len(w)) + 0.5, scale=0.7, key=sx.Key(3)
    ),
}


def make_sampler(kind: str, classes: int) -> Any:
    """The unsharded sampler, the same on every rank."""
    if kind in KERNELS or kind in CODED:
        return (KERNELS | CODED)[kind](*table(classes))
    if kind == "in batch":
        return sx.samplers.InBatch(classes, extra=make_sampler("quadratic", classes))
    g = torch.Generator().manual_seed(8)
    if kind == "unigram":
        counts = torch.randint(0, 1000, (classes,), generator=g).double() ** 2
        counts[classes // 2] = 5e6
        counts[classes // 3 : classes // 3 + 2] = 0.0 if classes > 4 else 1.0
        return sx.samplers.Unigram(counts)
    x, y = torch.randn(600, DIM, generator=g), torch.randint(classes, (600,), generator=g)
    base = sx.samplers.Unigram(torch.bincount(y, minlength=classes) + 1) if kind == "tree with base" else None
    return sx.samplers.Tree.fit(x, y, num_classes=classes, dim=4, seed=1, progress=False, base=base, base_weight=0.3)


def excluded(kind: str, classes: int, rows: int) -> Tensor | None:
    """What rows must not draw: nothing, one class, or several with copies and gaps."""
    g = torch.Generator().manual_seed(9)
    if kind == "none":
        return None
    some = torch.randint(classes, (rows, 3), generator=g)
    some[::3] = classes // 2  # a class of much mass for `unigram`
    if kind == "one":
        some[1, 0] = -1
        return some[:, 0].contiguous()
    some[::2, 1] = some[::2, 0]
    some[1::4, 2] = -1
    some[2] = -1
    return some


def queries(rows: int = 10) -> Tensor:
    """Queries of all ranks."""
    return torch.randn(rows, DIM, generator=torch.Generator().manual_seed(10))


def draws(group: Any, kind: str, classes: int, order: str, without: str, count: int = 20) -> dict[str, Any]:
    """A draw and scores of a sampler that is spread over the ranks."""
    exchange = Exchange(group)
    layout = Layout(classes, exchange.world, exchange.rank, order)
    sampler = shard_sampler(make_sampler(kind, classes), "shard", layout, exchange, torch.device("cpu"))
    h = queries()
    out = excluded(without, classes, h.shape[0])
    draw = sampler.sample(h, count, key=torch.tensor([3, 4]), exclude=out)
    given = torch.arange(classes).expand(h.shape[0], -1)
    shared = sampler.sample(h, count, shared=True, key=torch.tensor([5, 6]))
    assert sampler.collective
    local = sampler.log_prob_local(h) if not kind.startswith("tree") else None
    every = sampler.log_prob_all(h)
    if local is not None:
        assert torch.equal(local, every[:, layout.classes()])
    both = sampler.sample_and_score(h, 3, torch.arange(h.shape[0]) % classes, key=torch.tensor([7, 8]))
    return {
        "ids": draw.ids, "log_q": draw.log_q, "all": every, "again": sampler.log_prob(h, draw.ids, exclude=out),
        "left": sampler.log_prob(h, given, exclude=out), "shared": (shared.ids, shared.log_q),
        "shared again": sampler.log_prob_shared(h, shared.ids), "scored": (both[0].ids, both[0].log_q, both[1]),
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------ heads
def make_head(kind: str, classes: int, meta: bool, **options: Any) -> sx.SampledClassifier:
    """An unsharded head whose sampler has its class rows, or no numbers at all."""
    weight, bias = table(classes)
    sampler = DEFERRED[kind](classes) if meta else make_sampler(kind, classes)
    head = sx.SampledClassifier(DIM, classes, sampler, 6, device="meta" if meta else None, **options)
    if not meta:
        with torch.no_grad():
            head.weight.copy_(weight)
            head.bias.copy_(bias)
    return head


def follow(group: Any, kind: str, classes: int, options: dict[str, Any]) -> dict[str, Any]:
    """Training steps with a sampler that follows the table; what it then knows."""
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    head: Any = make_head(kind, classes, options.get("meta", False), **options.get("head", {}))
    head = head.shard(
        group, encoder="sum", key=sx.Key(5), batch_capacity=-(-BATCH // world) if options.get("even") else BATCH,
        order=options.get("order", "class"), sampler=options.get("sampler", "auto"),
    )  # fmt: skip
    optimizer = sx.optim.RowAdagrad(head.parameters(), lr=0.2)
    head.fuse_optimizer(optimizer, accumulate=options.get("accumulate", 1))
    key, losses, lag = sx.Key(9), [], []
    for step, (h, y) in enumerate(batches(options.get("steps", 5))):
        rows = part_of(0 if options.get("even") else step, world, rank)
        y = torch.where(y < 0, y, y % classes)
        loss = head(h[rows], y[rows], key=key)
        loss.backward()
        losses.append(float(loss.detach()))
        lag.append(head.staleness().rows)
    before = head.sampler.log_prob_all(queries())
    head.update_sampler()
    rows = head.sampler.own_rows()[:, :DIM] if hasattr(head.sampler, "own_rows") else None
    if rows is not None and "normalized" not in kind:
        assert torch.equal(rows, head.weight)
    head.eval()
    h, y = batches(1)[0]
    y = torch.where(y < 0, y, y % classes)
    mine = part_of(0, world, rank)
    nll = head(h[mine], y[mine])
    after = head.sampler.log_prob_all(queries())
    found = {"losses": losses, "lag": lag, "before": before, "after": after, "nll": nll, "every": head.follower.policy}
    if kind in CODED:
        found["codes"], found["cell"] = head.sampler.codes.clone(), head.sampler.cell.clone()
    return found


def coded_draws(group: Any, kind: str, order: str) -> dict[str, Any]:
    """Draws of a MIDX that was fitted on rank 0; the others have other codes of their own until it is spread."""
    exchange = Exchange(group)
    layout = Layout(203, exchange.world, exchange.rank, order)
    whole = make_sampler(kind, 203)
    if exchange.rank:
        whole.rebuild(torch.randn(203, DIM), None if whole.bias is None else torch.randn(203))
    sampler = shard_sampler(whole, "auto", layout, exchange, torch.device("cpu"))
    h, out = queries(), excluded("several", 203, 10)
    draw = sampler.sample(h, 20, key=torch.tensor([3, 4]), exclude=out)
    shared = sampler.sample(h, 20, shared=True, key=torch.tensor([5, 6]), stratified=True)
    assert torch.equal(sampler.local_prior(h)(slice(2, 9)), sampler.log_prob_all(h)[2:9, layout.classes()])
    return {"ids": draw.ids, "log_q": draw.log_q, "shared": shared.ids, "shared_q": shared.log_q}


def refuse(group: Any, what: str, kind: str = "quadratic") -> tuple[str, bool]:
    """One rank breaks its table; the message of each rank, and whether the head works when it is repaired."""
    rank = dist.get_rank(group)
    head: Any = make_head(kind, 203, False, sampler_update="step").shard(group, encoder="sum", batch_capacity=BATCH)
    h, y = batches(1)[0]
    head(h, y)
    old = head.weight[3].detach().clone()
    if what == "nan":
        with torch.no_grad():
            if rank == 1:
                head.weight[3] = torch.nan
            else:
                head.weight[3] = 0.0
        head.mark_changed()
    elif what == "nan row":  # each rank tells of one row that it has
        with torch.no_grad():
            head.weight[3] = torch.nan if rank == 1 else 0.0
        head.mark_changed(head.layout.classes()[3:4])
    elif what == "alone" and rank == 1:
        head.mark_changed()
    message = _message(lambda: head(h, y))
    with torch.no_grad():
        head.weight[3] = old
    head.mark_changed()
    return message, bool(head(h, y).isfinite())


def deferred(group: Any, kind: str, order: str) -> dict[str, Any]:
    """Draws of a `Unigram` that no rank held as a whole, in a head on the meta device; which classes were asked for."""
    counts, asked = make_sampler("unigram", 203).prefix.diff(), []
    counts = (counts >> 12) if kind == "integers" else counts.double() * 2.0**-60

    def of(ids: Tensor) -> Tensor:
        asked.append(ids.clone())
        return counts[ids]

    head: Any = sx.SampledClassifier(DIM, 203, sx.samplers.Unigram.deferred(203, of), 6, device="meta")
    head = head.shard(group, encoder="sum", key=sx.Key(5), batch_capacity=BATCH, order=order)
    assert torch.equal(torch.cat(asked), head.layout.classes())
    h, y = batches(1)[0]
    loss = head(h[part_of(0, dist.get_world_size(group), dist.get_rank(group))].requires_grad_(),
                y[part_of(0, dist.get_world_size(group), dist.get_rank(group))], key=sx.Key(3))  # fmt: skip
    loss.backward()
    draw = head.sampler.sample(None, 20, batch_size=10, key=torch.tensor([3, 4]))
    return {"ids": draw.ids, "log_q": draw.log_q, "loss": float(loss.detach()), "all": head.sampler.log_prob_all()}


def wrong_counts(group: Any, what: str) -> str:
    """The message of each rank where the counts of rank 1 cannot be."""
    wrong = dist.get_rank(group) == 1

    def of(ids: Tensor) -> Tensor:
        if what == "shape":
            return torch.ones(len(ids) + 1)
        made = torch.ones(len(ids)) * (what != "zero")
        if what == "negative" and wrong:
            made[2] = -1
        return made

    head: Any = sx.SampledClassifier(DIM, 203, sx.samplers.Unigram.deferred(203, of), 6, device="meta")
    how = "replicate" if what == "replicate" else "auto"
    return _message(lambda: head.shard(group, encoder="sum", sampler=how))


def kinds_of_parts(group: Any) -> dict[str, list[str]]:
    """What a head holds whose sampler has parts, with `sampler="shard"`: names of types, the whole one first."""
    unigram = sx.samplers.Unigram(torch.arange(203) + 1)
    samplers: dict[str, tuple[Any, bool]] = {
        "tree with base": (make_sampler("tree with base", 203), False),
        "mixture": (sx.samplers.Mixture([(sx.samplers.Uniform(203), 1), (unigram, 2)]), False),
        "in batch with frequencies": (sx.samplers.InBatch(203, extra=unigram), True),
    }
    found = {}
    for name, (sampler, shared) in samplers.items():
        head: Any = sx.SampledClassifier(DIM, 203, sampler, 6, shared=shared, device="meta")
        head = head.shard(group, encoder="sum", key=sx.Key(5), sampler="shard")
        parts = [type(part).__name__ for part in head.sampler.modules() if isinstance(part, torch.nn.Module)]
        found[name] = [parts[0], *sorted(part for part in parts[1:] if part != "ModuleList")]
    return found


def another_sampler(group: Any) -> Tensor:
    """A head that gets a kernel tree later; its distribution after a step."""
    head: Any = make_head("unigram", 203, False).shard(group, encoder="sum", batch_capacity=BATCH)
    h, y = batches(1)[0]
    head(h, y, key=sx.Key(1))
    head.set_sampler(DEFERRED["quadratic"](203))
    head(h, y, key=sx.Key(2))
    return head.sampler.log_prob_all(queries())


# ------------------------------------------------------------------------------------------------ checkpoints
def _training(group: Any, kind: str, options: dict[str, Any]) -> tuple[Any, Any]:
    head: Any = make_head(kind, 203, False, **options.get("head", {})).shard(
        group, encoder="sum", batch_capacity=BATCH, order=options.get("order", "class"), sampler="shard"
    )
    rows = sx.optim.RowAdagrad(head.parameters(), lr=0.2)
    head.fuse_optimizer(rows)
    return head, rows


def _steps(group: Any, head: Any, key: sx.Key, first: int, last: int) -> list[float]:
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    losses = []
    for h, y in batches(last)[first:]:
        mine = part_of(0, world, rank)
        loss = head(h[mine], y[mine], key=key)
        loss.backward()
        losses.append(float(loss.detach()))
    return losses


def save(group: Any, kind: str, folder: str, options: dict[str, Any]) -> Any:
    """Three steps, a checkpoint, and the losses of three more."""
    head, rows = _training(group, kind, options)
    key = sx.Key(9)
    _steps(group, head, key, 0, 3)
    extra = {"key": key.state_dict()}
    sx.distributed.save_checkpoint(folder, {"head": head}, {"head": rows}, extra=extra, group=group)
    return head.sampler.log_prob_all(queries()), _steps(group, head, key, 3, 6)


def resume(group: Any, kind: str, folder: str, options: dict[str, Any]) -> Any:
    """The sampler of the checkpoint, and the losses after it."""
    head, rows = _training(group, kind, options)
    extra = sx.distributed.load_checkpoint(folder, {"head": head}, {"head": rows}, group=group)
    key = sx.Key(0)
    key.load_state_dict(extra["key"])
    return head.sampler.log_prob_all(queries()), _steps(group, head, key, 3, 6)


def through_plain(group: Any, kind: str, order: str) -> bool:
    """The state of a plain head loads into a sharded one, and back."""
    plain = make_head(kind, 203, False)
    plain.update_sampler()
    head: Any = make_head(kind, 203, False)
    with torch.no_grad():
        head.weight.zero_()
    head = head.shard(group, encoder="sum", order=order, sampler="shard")
    head.load_state_dict(plain.state_dict())
    torch.testing.assert_close(
        head.sampler.log_prob_all(queries()), plain.sampler.log_prob_all(queries()), rtol=1e-4, atol=1e-4
    )
    other = make_head(kind, 203, False)
    with torch.no_grad():
        other.weight.zero_()
    other.load_state_dict(head.full_state_dict())
    assert torch.equal(other.weight, plain.weight)
    if kind in KERNELS:
        assert other.staleness().rows == -1
    third: Any = make_head(kind, 203, False).shard(group, encoder="sum", order=order, sampler="shard")
    third.load_state_dict(head.state_dict())
    assert torch.equal(third.sampler.log_prob_all(queries()), head.sampler.log_prob_all(queries()))
    return True
