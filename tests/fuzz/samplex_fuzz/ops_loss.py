"""Generators of the fused losses, their backward ops, the full softmax and attention pooling."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from samplex_cuda.ops.loss_types import ENTRY_KINDS as KINDS
from samplex_cuda.ops.static_sample import build_alias
from samplex_cuda.reference import attention_pool as pool
from samplex_cuda.reference.sampled_softmax import sampled_softmax
from samplex_cuda.reference.symmetric_softmax import symmetric_softmax as symmetric_reference
from samplex_fuzz.call import Args, Call, Dice, generator, op_call
from samplex_fuzz.ops_static import alias_counts
from samplex_fuzz.oracle import acc, all_ordinary, close, drawn, expect, has_form, is_meta, near, ordinary

WORDS = ("positives", "h", "rows", "draws", "offsets", "known_offsets", "known_ids", "targets", "reduction")
LOSSES = tuple(KINDS)


@dataclasses.dataclass
class Inputs:
    """The tensors of a loss."""

    h: Tensor
    weight: Tensor
    target: Tensor
    ids: Tensor
    log_q: Tensor
    bias: Tensor | None
    class_weight: Tensor | None
    positives: tuple[Tensor, Tensor] | None
    ignore_index: int


def make_inputs(d: Dice) -> Inputs:
    """Mostly ordinary, small; draws repeat and hit targets."""
    batch, m, dim, classes = d.size(), d.int(0, 7), d.width(), d.int(1, 12)
    dtype = d.float_dtype()
    wide = acc(dtype)
    targets = d.pick((1, 1, 1, 3))
    ignore = d.pick((-100, -100, 0, 1000))
    target = d.ids(classes, batch, targets)
    if targets > 1:
        target[d.uniform(batch, targets) < 0.3] = -100
    target[d.uniform(batch, targets) < 0.15] = ignore
    shape = (m,) if d.maybe(0.35) else (batch, m)
    positives = None
    if d.maybe(0.2):
        counts = torch.randint(0, 4, (batch,), generator=d.g)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
        positives = (offsets, d.ids(classes, int(counts.sum())))
    return Inputs(
        d.normal(batch, dim, dtype=dtype),
        d.normal(classes, dim, dtype=dtype, scale=dim**-0.5),
        target.squeeze(1) if targets == 1 else target,
        d.ids(classes, *shape),
        d.uniform(*shape, low=-4.0, high=-1.0, dtype=wide),
        None if d.maybe(0.5) else d.normal(classes, dtype=d.pick((dtype, wide))),
        None if d.maybe(0.7) else d.uniform(classes, low=0.25, high=1.25, dtype=wide),
        positives,
        ignore,
    )


def usual_rows(x: Inputs, *more: Tensor | None) -> Tensor:
    """Rows that meet ordinary numbers only; `more` are numbers of the rows, [B] or [B, ...]."""
    batch = x.h.shape[0]
    if batch == 0:
        return torch.ones(0, dtype=torch.bool)
    rows = ordinary(x.h).all(1) if x.h.numel() else torch.ones(batch, dtype=torch.bool)
    fine = ordinary(x.weight).all(1) if x.weight.numel() else torch.ones(x.weight.shape[0], dtype=torch.bool)
    for table in (x.bias, x.class_weight):
        if table is not None:
            fine = fine & ordinary(table)
    classes = x.weight.shape[0]
    for ids in (x.target, x.ids):
        if classes == 0 or ids.numel() == 0:
            continue
        met = fine[ids.clamp(0, classes - 1)]
        rows = rows & (met.all() if ids.dim() == 1 and ids is x.ids else met.reshape(batch, -1).all(1))
    good = ordinary(x.log_q)
    rows = rows & (good.all() if x.log_q.dim() == 1 else good.reshape(batch, -1).all(1))
    for t in more:
        if t is not None and t.numel():
            rows = rows & ordinary(t).reshape(batch, -1).all(1)
    return rows


def size_of(x: Inputs, scale: float, rows: Tensor) -> float:
    """The largest number a loss passes through."""
    if x.h.numel() == 0 or x.weight.numel() == 0:
        return 10.0
    usual = ordinary(x.weight).all(1)
    s = x.h[rows].double() @ x.weight[usual].double().T
    b = 0.0 if x.bias is None else float(x.bias[ordinary(x.bias)].double().abs().sum())
    return abs(scale) * ((float(s.abs().max()) if s.numel() else 0.0) + b) + 12.0


def widened(x: Inputs, dtype: torch.dtype) -> tuple[Any, ...]:
    tensors = (x.h, x.weight, x.log_q, x.bias, x.class_weight)
    return tuple(None if t is None else t.detach().to(dtype) for t in tensors)


def softmax_rows(x: Inputs, dtype: torch.dtype, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The reference in one dtype: loss, lse, denominators."""
    h, weight, log_q, bias, class_weight = widened(x, dtype)
    return sampled_softmax(
        h, weight, x.target, x.ids, log_q, bias, class_weight=class_weight, ignore_index=x.ignore_index,
        positives=x.positives, **options,
    )  # fmt: skip


def reduced(loss: Tensor, denom: Tensor, reduction: int) -> Tensor:
    """As the ops reduce: 0 none, 1 mean, 2 sum."""
    if reduction == 0:
        return loss
    total = denom.sum()
    return loss.sum() if reduction == 2 else torch.where(total == 0, 0.0 * total, loss.sum() / total)


def compare_loss(got: Tensor, truth: Any, same: Any, reduction: int, size: float, rows: Tensor) -> None:
    """The loss, by row or reduced; a reduced one only if every row is usual."""
    if reduction == 0:
        close("loss", got, truth[0], same[0], size, rows)
    elif bool(rows.all()):
        both = [reduced(p[0], p[1], reduction) for p in (truth, same)]
        close("loss", got, *both, size * max(1, len(rows)))


def _positives(a: Args) -> tuple[Tensor, Tensor] | None:
    return None if a.known_offsets is None else (a.known_offsets, a.known_ids)


def inputs_of(a: Args) -> Inputs:
    return Inputs(a.hidden, a.weight, a.target, a.ids, a.log_q, a.bias, a.class_weight, _positives(a), a.ignore_index)


def _softmax_args(d: Dice) -> dict[str, Any]:
    x = make_inputs(d)
    offsets, known = x.positives or (None, None)
    return {
        "hidden": x.h, "weight": x.weight, "target": x.target, "ids": x.ids, "log_q": x.log_q, "bias": x.bias,
        "class_weight": x.class_weight, "known_offsets": offsets, "known_ids": known, "scale": d.pick((1.0, 2.0, -0.5)),
        "label_smoothing": d.pick((0.0, 0.0, 0.1)), "ignore_index": x.ignore_index, "reduction": d.int(0, 2),
        "absolute": d.maybe(0.2), "need_grad": d.maybe(0.6), "with_lse": d.maybe(0.4), "sparse": d.maybe(0.5),
        "need_hidden": d.maybe(0.8),
    }  # fmt: skip


@generator("sampled_softmax", 3.0)
def _sampled_softmax(d: Dice) -> Call:
    def check(a: Args, out: Any, after: Args, changed: set[str]) -> None:
        if is_meta(*a.values(), *out):
            return
        loss, lse, _ = out
        batch, wide = a.hidden.shape[0], acc(a.weight.dtype)
        has_form("loss", loss, () if a.reduction else (batch,), wide)
        if not all_ordinary(float(a.scale), a.label_smoothing):
            return
        x = inputs_of(a)
        rows = usual_rows(x)
        options = {"scale": a.scale, "absolute": a.absolute, "label_smoothing": a.label_smoothing}
        truth, same = (softmax_rows(x, dtype, **options) for dtype in (torch.float64, wide))
        size = size_of(x, a.scale, rows)
        compare_loss(loss, truth[::2], same[::2], a.reduction, size, rows)
        if a.with_lse:
            close("lse", lse, truth[1], same[1], size, rows)

    return op_call("sampled_softmax", _softmax_args(d), check, words=WORDS)


def drawn_here(d: Dice, x: Inputs) -> dict[str, Any]:
    """Arguments of an op that draws from a static distribution by itself, as far as losses share them."""
    law = d.int(0, 2)
    table, prefix = build_alias(alias_counts(d, x.weight.shape[0])) if law == 2 else (None, None)
    target = x.target
    if target.dim() == 2:  # padding is a class out of range where a row has one target
        target = torch.where(target[:, 0] == -100, x.ignore_index, target[:, 0])
    return {
        "hidden": x.h, "weight": x.weight, "target": target, "key": d.key(), "law": law, "num_samples": d.int(0, 6),
        "table": table, "prefix": prefix, "bias": x.bias, "class_weight": x.class_weight,
        "ignore_index": x.ignore_index, "reduction": d.int(0, 2), "need_grad": d.maybe(0.6),
    }  # fmt: skip


def given_draws(a: Args, ids: Tensor, shared: bool, noise: bool = False) -> Inputs:
    """The inputs of the loss alone: the two ops, one after the other, are the specification of the one."""
    # Per-row draws exclude the target, unless they are noise.
    batch, valid = a.hidden.shape[0], (a.target != a.ignore_index) & (a.target >= 0)
    skip = None if shared or noise else torch.where(valid, a.target, -1).unsqueeze(1)
    of = (a.table, a.prefix) if a.law == 2 else (a.weight.shape[0],)
    name = ("uniform", "log_uniform", "alias")[a.law]
    draw = getattr(torch.ops.samplex, f"{name}_sample")(a.key, 1 if shared else batch, a.num_samples, *of, skip)
    same_ids, log_q = (t[0] if shared else t for t in draw)
    counted = slice(None) if shared else valid
    expect(torch.equal(ids[counted], same_ids[counted]), "ids must be those of the sampler's own op")
    log_q = log_q.to(acc(a.weight.dtype))
    return Inputs(a.hidden, a.weight, a.target, same_ids, log_q, a.bias, a.class_weight, None, a.ignore_index)


@generator("sampled_softmax_static", 1.5)
def _sampled_softmax_static(d: Dice) -> Call:
    made = drawn_here(d, make_inputs(d))
    args = {name: made[name] for name in ("hidden", "weight", "target", "key", "num_samples", "law")}
    args |= {"shared": d.maybe(0.5), "bias": made["bias"], "unit_hidden": d.maybe(0.5)}
    args |= {name: made[name] for name in ("table", "prefix", "class_weight")}
    args |= {
        "scale": d.pick((1.0, 2.0)), "label_smoothing": d.pick((0.0, 0.1)), "ignore_index": made["ignore_index"],
        "reduction": made["reduction"], "absolute": d.maybe(0.2), "normalize": False, "margin": [],
        "need_grad": made["need_grad"], "need_hidden": d.maybe(0.8),
    }  # fmt: skip

    def check(a: Args, out: Any, after: Args, changed: set[str]) -> None:
        if is_meta(*a.values(), *out):
            return
        loss, ids, *_ = out
        batch, wide = a.hidden.shape[0], acc(a.weight.dtype)
        has_form("loss", loss, () if a.reduction else (batch,), wide)
        drawn(ids, None, (a.num_samples,) if a.shared else (batch, a.num_samples), a.weight.shape[0])
        if changed & {"table", "prefix", "law"} or not all_ordinary(float(a.scale), a.label_smoothing):
            return
        x = given_draws(a, ids, a.shared)
        if a.normalize:  # the class rows count as they are on the sphere
            unit = torch.nn.functional.normalize(x.weight.double(), dim=1)
            if not all_ordinary(x.weight) or bool((unit.square().sum(1) < 0.5).any()):
                return
            x = dataclasses.replace(x, weight=unit)
        good = usual_rows(x)
        options = {"scale": a.scale, "absolute": a.absolute, "label_smoothing": a.label_smoothing}
        truth, same = (softmax_rows(x, dtype, **options) for dtype in (torch.float64, wide))
        compare_loss(loss, truth[::2], same[::2], a.reduction, size_of(x, a.scale, good), good)

    return op_call("sampled_softmax_static", args, check, words=(*WORDS, "key"))


# ------------------------------------------------------------------------------------------------ backward
def _row_form(a: Args, out: Any, num_classes: int) -> None:
    """Row ids of a backward: distinct, ascending, in range; -1 behind the count."""
    d_hidden, row_ids, _, _, count = out
    has_form("d_hidden", d_hidden, a.hidden.shape, a.hidden.dtype)
    if not a.need_rows:
        return
    used = row_ids[: int(count)]
    expect(0 <= int(count) <= len(row_ids), f"count must be in [0, {len(row_ids)}], got {int(count)}")
    expect(
        bool(((used >= 0) & (used < num_classes)).all()), f"row_ids must be in [0, {num_classes}), got {used.tolist()}"
    )
    expect(bool((used[1:] > used[:-1]).all()), f"row_ids must ascend, got {used.tolist()}")


def backward_call(d: Dice, name: str, forward: dict[str, Any], loss_of: Any) -> Call:
    forward.update(need_grad=True)
    if "need_hidden" in forward:
        forward["need_hidden"] = True
    f = Args(forward)
    out = getattr(torch.ops.samplex, name)(*f.values())
    args: dict[str, Any] = {"grad_loss": d.normal(*out[0].shape, dtype=out[0].dtype)}
    with_lse = f.get("with_lse", False)
    if name == "sampled_softmax":
        args["grad_lse"] = d.normal(f.hidden.shape[0], dtype=out[0].dtype) if with_lse and d.maybe(0.7) else None
    args.update(hidden=f.hidden, target=f.target, ids=f.ids, saved=out[-1])
    if name == "entry_loss":
        args["kind"] = f.kind
    args.update(num_classes=f.weight.shape[0], reduction=f.reduction)
    if name == "sampled_softmax":
        args["with_lse"] = with_lse
    args.update(need_rows=d.maybe(0.8), with_bias=f.bias is not None)

    def check(a: Args, out: Any, after: Args, changed: set[str]) -> None:
        if is_meta(*a.values(), *out):
            return
        _row_form(a, out, a.num_classes)
        if changed - {"grad_loss", "grad_lse"} or not all_ordinary(a.grad_loss, a.get("grad_lse")):
            return
        x = inputs_of(f)
        if not bool(usual_rows(x).all()) or 0 in f.hidden.shape or 0 in f.weight.shape:
            return
        found = []
        for dtype in (torch.float64, acc(f.weight.dtype)):
            with torch.enable_grad():
                leaf = dataclasses.replace(
                    x, h=f.hidden.to(dtype).requires_grad_(), weight=f.weight.to(dtype).requires_grad_()
                )
                total = loss_of(leaf, dtype, a)
                both = torch.autograd.grad(total, [leaf.h, leaf.weight], allow_unused=True)
                found.append(
                    [torch.zeros_like(t) if g is None else g for g, t in zip(both, (leaf.h, leaf.weight), strict=True)]
                )
        largest = [
            max(float(g.abs().max()), float(a.grad_loss.abs().max()) if a.grad_loss.numel() else 0.0) for g in found[0]
        ]
        if max(largest) > 1e4:
            return
        size = size_of(x, f.scale, torch.ones(len(x.h), dtype=torch.bool))
        close("d_hidden", out[0], found[0][0], found[1][0].to(out[0].dtype), size * largest[0])
        if a.need_rows:
            made = torch.zeros(f.weight.shape, dtype=out[2].dtype)
            made[out[1][: int(out[4])]] = out[2][: int(out[4])]
            close("row_grads", made, found[0][1], found[1][1].to(made.dtype), size * largest[1])

    return op_call(f"{name}_bwd", args, check, words=(*WORDS, *LOSSES))


def keep_graph(x: Inputs, dtype: torch.dtype) -> tuple[Any, ...]:
    return tuple(None if t is None else t.to(dtype) for t in (x.log_q, x.bias, x.class_weight))


@generator("sampled_softmax_bwd")
def _sampled_softmax_bwd(d: Dice) -> Call:
    forward = _softmax_args(d)

    def loss_of(x: Inputs, dtype: torch.dtype, a: Args) -> Tensor:
        log_q, bias, class_weight = keep_graph(x, dtype)
        loss, lse, denom = sampled_softmax(
            x.h, x.weight, x.target, x.ids, log_q, bias, class_weight=class_weight, ignore_index=x.ignore_index,
            positives=x.positives, scale=forward["scale"], absolute=forward["absolute"],
            label_smoothing=forward["label_smoothing"],
        )  # fmt: skip
        total = (reduced(loss, denom, a.reduction) * a.grad_loss.to(dtype)).sum()
        return total if a.grad_lse is None else total + (lse * a.grad_lse.to(dtype)).sum()

    return backward_call(d, "sampled_softmax", forward, loss_of)


@generator("loss_entries")
def _loss_entries(d: Dice) -> Call:
    f = Args(_softmax_args(d), need_grad=True, need_hidden=True)
    out = torch.ops.samplex.sampled_softmax(*f.values())
    args = {
        "grad_loss": d.normal(*out[0].shape, dtype=out[0].dtype), "grad_lse": None, "hidden": f.hidden,
        "target": f.target, "ids": f.ids, "saved": out[2], "reduction": f.reduction, "with_lse": f.with_lse,
        "with_bias": f.bias is not None, "with_ratio": False,
        "grad_scale": torch.tensor(64.0) if d.maybe(0.3) else None,
        "found_inf": torch.zeros(()) if d.maybe(0.3) else None,
    }  # fmt: skip

    def check(a: Args, out: Any, after: Args, changed: set[str]) -> None:
        if is_meta(*a.values(), *out):
            return
        has_form("d_hidden", out[0], a.hidden.shape, a.hidden.dtype)
        if not changed:
            same = torch.ops.samplex.sampled_softmax_bwd(
                a.grad_loss, a.grad_lse, a.hidden, a.target, a.ids, a.saved, f.weight.shape[0], a.reduction,
                a.with_lse, False, a.with_bias,
            )[0]  # fmt: skip
            expect(torch.equal(same.nan_to_num(), out[0].nan_to_num()), "d_hidden must be that of sampled_softmax_bwd")

    return op_call("loss_entries", args, check, mutable=("found_inf",), words=WORDS)


@generator("loss_update_")
def _loss_update(d: Dice) -> Call:
    f = Args(_softmax_args(d), need_grad=True, need_hidden=True, with_lse=False)
    out = torch.ops.samplex.sampled_softmax(*f.values())
    rule = (0.0, 0.0, 0.1, *(0.0,) * 6)  # plain SGD
    args = {
        "weight": f.weight, "grad_loss": d.normal(*out[0].shape, dtype=out[0].dtype), "hidden": f.hidden,
        "target": f.target, "ids": f.ids, "saved": out[2], "weight_rule": rule, "weight_state0": None,
        "weight_state1": None, "bias": f.bias, "bias_rule": rule, "bias_state0": None, "bias_state1": None,
        "reduction": f.reduction, "with_ratio": False, "key": None,
    }  # fmt: skip

    def check(a: Args, out: Any, after: Args, changed: set[str]) -> None:
        if changed or is_meta(*a.values()):
            return
        _, coef_a, coef_b, rows_b, bias_b, _ = torch.ops.samplex.loss_entries(
            a.grad_loss, None, a.hidden, a.target, a.ids, a.saved, a.reduction, False, a.bias is not None
        )
        tables = [None if t is None else t.clone() for t in (a.weight, a.bias)]
        draws = (a.ids, coef_b, a.hidden, None)
        if a.ids.dim() == 1:
            draws = (a.ids[: rows_b.shape[0]], coef_b, rows_b, None if a.bias is None else bias_b)
        torch.ops.samplex.row_update_(
            tables[0], None, None, tables[1], None, None, a.target, coef_a, a.hidden, *draws, None, rule, rule
        )
        for name, same, got in zip(("weight", "bias"), tables, (after.weight, after.bias), strict=True):
            if same is not None:
                expect(torch.equal(same.nan_to_num(), got.nan_to_num()), f"{name} must be that of row_update_")

    return op_call("loss_update_", args, check, mutable=("weight", "bias"), words=WORDS)


# ------------------------------------------------------------------------------------------------ full softmax
def full_rows(x: Inputs, dtype: torch.dtype, scale: float, smoothing: float, absolute: bool) -> Tensor:
    """The full softmax in plain torch, [B]."""
    h, weight, _, bias, class_weight = widened(x, dtype)
    s = scale * (h @ weight.T + (0.0 if bias is None else bias))
    log_p = (s.abs() if absolute else s).log_softmax(1)
    target = x.target if x.target.dim() == 2 else x.target.unsqueeze(1)
    valid = target != x.ignore_index
    if target.shape[1] > 1:
        valid &= target != -100
    count = valid.sum(1, keepdim=True)
    each = torch.ones(weight.shape[0], dtype=dtype) if class_weight is None else class_weight
    safe = torch.where(valid, target, 0)
    hit = torch.where(valid, each[safe] * log_p.gather(1, safe), 0.0).sum(1) / count.squeeze(1).clamp(min=1)
    loss = -(1 - smoothing) * hit - smoothing / weight.shape[0] * (each * log_p).sum(1)
    return torch.where(count.squeeze(1) > 0, loss, 0.0)


def _full_args(d: Dice) -> dict[str, Any]:
    x = make_inputs(d)
    return {
        "hidden": x.h, "weight": x.weight,
        "target": x.target if x.target.dim() == 2 else x.target.unsqueeze(1), "bias": x.bias,
        "class_weight": x.class_weight, "scale": d.pick((1.0, 2.0)), "label_smoothing": d.pick((0.0, 0.1)),
        "ignore_index": x.ignore_index, "absolute": d.maybe(0.2), "chunk_size": d.pick((0, 0, 1, 3, 100)),
    }  # fmt: skip


@generator("full_softmax", 1.5)
def _full_softmax(d: Dice) -> Call:
    def check(a: Args, out: Any, after: Args, changed: set[str]) -> None:
        if is_meta(*a.values(), *out):
            return
        loss, lse = out
        has_form("loss", loss, (a.hidden.shape[0],), acc(a.weight.dtype))
        has_form("lse", lse, (a.hidden.shape[0],), torch.float64)
        if all_ordinary(*a.values()):
            x = Inputs(
                a.hidden, a.weight, a.target, a.target[:0].flatten(), torch.zeros(0), a.bias, a.class_weight, None,
                a.ignore_index,
            )  # fmt: skip
            rows = torch.ones(a.hidden.shape[0], dtype=torch.bool)
            wide = acc(a.weight.dtype)
            both = [full_rows(x, t, a.scale, a.label_smoothing, a.absolute) for t in (torch.float64, wide)]
            close("loss", loss, *both, size_of(x, a.scale, rows))

    return op_call("full_softmax", _full_args(d), check, words=WORDS)


@generator("full_softmax_bwd")
def _full_softmax_bwd(d: Dice) -> Call:
    f = Args(_full_args(d))
    loss, lse = torch.ops.samplex.full_softmax(*f.values())
    args = {
        "grad": d.normal(len(loss), dtype=loss.dtype), "hidden": f.hidden, "weight": f.weight, "target": f.target,
        "bias": f.bias, "class_weight": f.class_weight, "lse": lse, "scale": f.scale,
        "label_smoothing": f.label_smoothing, "ignore_index": f.ignore_index, "absolute": f.absolute,
        "chunk_size": f.chunk_size, "need_hidden": d.maybe(0.8), "need_weight": d.maybe(0.8),
        "need_bias": f.bias is not None and d.maybe(0.8),
    }  # fmt: skip

    def check(a: Args, out: Any, after: Args, changed: set[str]) -> None:
        if is_meta(*a.values(), *out):
            return
        has_form("d_hidden", out[0], (a.hidden.shape[0] if a.need_hidden else 0, a.hidden.shape[1]), a.hidden.dtype)
        has_form("d_weight", out[1], (a.weight.shape[0] if a.need_weight else 0, a.weight.shape[1]), a.weight.dtype)
        if changed - {"grad"} or not all_ordinary(*a.values()) or a.absolute or 0 in a.hidden.shape:
            return
        with torch.enable_grad():
            h, w = a.hidden.double().requires_grad_(), a.weight.double().requires_grad_()
            s = a.scale * (h @ w.T + (0.0 if a.bias is None else a.bias.double()))
            log_p = s.log_softmax(1)
            target = a.target if a.target.dim() == 2 else a.target.unsqueeze(1)
            valid = (target != a.ignore_index) & ((target != -100) | (target.shape[1] == 1))
            each = torch.ones(len(w), dtype=torch.float64) if a.class_weight is None else a.class_weight.double()
            safe = torch.where(valid, target, 0)
            hit = torch.where(valid, each[safe] * log_p.gather(1, safe), 0.0).sum(1) / valid.sum(1).clamp(min=1)
            rows = -(1 - a.label_smoothing) * hit - a.label_smoothing / len(w) * (each * log_p).sum(1)
            total = (torch.where(valid.any(1), rows, 0.0) * a.grad.double()).sum()
            d_h, d_w = torch.autograd.grad(total, [h, w])
        tolerance = {torch.float64: 1e-9, torch.float32: 2e-4}.get(a.weight.dtype, 0.1)
        for name, got, want in (("d_hidden", out[0], d_h), ("d_weight", out[1], d_w)):
            if got.numel():
                near(name, got, want, tolerance * max(1.0, float(want.abs().max())))

    return op_call("full_softmax_bwd", args, check, words=WORDS)


# ------------------------------------------------------------------------------------------------ attention pooling
@generator("attention_pool")
def _attention_pool(d: Dice) -> Call:
    size, dim, dtype = d.int(1, 9), d.width(), d.float_dtype()
    ids = d.ids(size, d.size(), d.int(0, 5))
    ids[d.uniform(*ids.shape) < 0.2] = d.pick((-1, -100))
    wide = acc(dtype)
    args = {
        "ids": ids, "table": d.normal(size, dim, dtype=dtype), "query": d.normal(dim, dtype=wide, scale=dim**-0.5),
        "value": d.normal(dim, dtype=wide), "need_grad": d.maybe(0.5), "need_vectors": d.maybe(0.5),
        "sparse": d.maybe(0.5),
    }  # fmt: skip

    def check(a: Args, out: Any, after: Args, changed: set[str]) -> None:
        if is_meta(*a.values(), *out):
            return
        wide = acc(a.table.dtype)
        has_form("pooled", out[0], (a.ids.shape[0],), wide)
        if all_ordinary(a.table, a.query, a.value):
            both = [
                pool.attention_pool(a.ids, *(t.to(x) for t in (a.table, a.query, a.value)))
                for x in (torch.float64, wide)
            ]
            size = float((a.table.double().abs() @ a.value.double().abs()).max()) if a.table.numel() else 0.0
            score = float((a.table.double().abs() @ a.query.double().abs()).max()) if a.table.numel() else 0.0
            if score < 1e3:
                close("pooled", out[0], *both, 8 * size * (1 + score))

    return op_call("attention_pool", args, check, words=WORDS)


@generator("attention_pool_bwd")
def _attention_pool_bwd(d: Dice) -> Call:
    size, dim = d.int(1, 9), d.width()
    dtype = d.pick((torch.float32, torch.float64))
    ids = d.ids(size, d.size(), d.int(0, 5))
    table, query, value = d.normal(size, dim, dtype=dtype), d.normal(dim, dtype=dtype), d.normal(dim, dtype=dtype)
    pooled, coefs, sums = torch.ops.samplex.attention_pool(ids, table, query, value, True, True, False)
    args = {
        "grad": d.normal(len(pooled), dtype=dtype), "ids": ids, "query": query, "value": value, "coefs": coefs,
        "sums": sums, "num_rows": size, "need_rows": d.maybe(0.8), "need_vectors": d.maybe(0.8),
    }  # fmt: skip

    def check(a: Args, out: Any, after: Args, changed: set[str]) -> None:
        if is_meta(*a.values(), *out):
            return
        row_ids, rows, count, d_query, d_value = out
        if a.need_rows:
            used = row_ids[: int(count)]
            expect(
                bool(((used >= 0) & (used < a.num_rows)).all()),
                f"row_ids must be in [0, {a.num_rows}), got {used.tolist()}",
            )
        if changed - {"grad"} or not all_ordinary(a.grad):
            return
        with torch.enable_grad():
            leaves = [t.double().requires_grad_() for t in (table, query, value)]
            total = (pool.attention_pool(a.ids, *leaves) * a.grad.double()).sum()
            want = torch.autograd.grad(total, leaves, allow_unused=True)
        tolerance = 1e-9 if dtype == torch.float64 else 2e-3
        if a.need_rows and want[0] is not None:
            made = torch.zeros(table.shape, dtype=rows.dtype)
            made[row_ids[: int(count)]] = rows[: int(count)]
            near("row_grads", made, want[0], tolerance * (1 + float(want[0].abs().max())))
        if a.need_vectors and want[1] is not None and want[2] is not None:
            near("d_query", d_query, want[1], tolerance * (1 + float(want[1].abs().max())))
            near("d_value", d_value, want[2], tolerance * (1 + float(want[2].abs().max())))

    return op_call("attention_pool_bwd", args, check, words=WORDS)


# ------------------------------------------------------------------------------------------------ both directions
def _pairs(d: Dice) -> dict[str, Any]:
    batch, dtype = d.size(), d.pick((torch.float32, torch.float64))
    labelled, shifted = d.maybe(0.6), d.maybe(0.5)
    lengths = torch.tensor([0, *(d.int(0, 3) for _ in range(batch))])
    known = labelled and d.maybe(0.5)
    return {
        "dots": d.normal(batch, batch, dtype=dtype), "labels": d.ids(4, batch) if labelled else None,
        "known_offsets": lengths.cumsum(0) if known else None,
        "known_ids": d.ids(4, int(lengths.sum())) if known else None,
        "key_shift": d.normal(batch, dtype=dtype) if shifted else None,
        "query_shift": d.normal(batch, dtype=dtype) if shifted else None, "scale": d.pick((1.0, 3.0, -0.5)),
    }  # fmt: skip


def _by_pairs(a: Args, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Products and losses in this type."""
    dots = a.dots.detach().to(dtype, copy=True).requires_grad_()
    known = None if a.known_offsets is None else (a.known_offsets, a.known_ids)
    shifts = (None if t is None else t.to(dtype) for t in (a.key_shift, a.query_shift))
    return dots, symmetric_reference(dots, a.labels, known, *shifts, a.scale)


_PAIR_WORDS = (*WORDS, "known", "B")


@generator("symmetric_softmax")
def _symmetric_softmax(d: Dice) -> Call:
    def check(a: Args, out: Any, after: Args, changed: set[str]) -> None:
        if is_meta(*a.values(), *out):
            return
        has_form("loss", out[0], (len(a.dots),), a.dots.dtype)
        if len(a.dots) and all_ordinary(a.dots, a.key_shift, a.query_shift, float(a.scale)):
            size = 8 * (1 + float((a.scale * a.dots).abs().max()))
            close("loss", out[0], _by_pairs(a, torch.float64)[1], _by_pairs(a, a.dots.dtype)[1], size)

    return op_call("symmetric_softmax", _pairs(d), check, words=_PAIR_WORDS)


@generator("symmetric_softmax_bwd")
def _symmetric_softmax_bwd(d: Dice) -> Call:
    given = _pairs(d)
    _, row_lse, column_lse = torch.ops.samplex.symmetric_softmax(*given.values())
    scale = given.pop("scale")
    grad = d.normal(len(given["dots"]), dtype=given["dots"].dtype)
    args = {"grad": grad, **given, "row_lse": row_lse, "column_lse": column_lse, "scale": scale}

    def check(a: Args, out: Any, after: Args, changed: set[str]) -> None:
        if is_meta(*a.values(), out):
            return
        has_form("coefs", out, a.dots.shape, a.dots.dtype)
        if changed - {"grad"} or not all_ordinary(a.grad):
            return
        with torch.enable_grad():
            dots, loss = _by_pairs(a, torch.float64)
            (want,) = torch.autograd.grad(loss, dots, a.grad.double())
        size = 1 + (float(want.abs().max()) if want.numel() else 0.0)
        near("coefs", out, want, (1e-9 if a.dots.dtype == torch.float64 else 1e-3) * size)

    return op_call("symmetric_softmax_bwd", args, check, words=_PAIR_WORDS)
