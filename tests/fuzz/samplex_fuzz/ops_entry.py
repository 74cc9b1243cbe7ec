"""Generators of the entry losses: with given draws, with draws of their own, and their backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from samplex_cuda.reference import entry_loss as entries
from samplex_fuzz.call import Args, Call, Dice, generator, op_call
from samplex_fuzz.ops_loss import (
    LOSSES,
    WORDS,
    Inputs,
    backward_call,
    compare_loss,
    drawn_here,
    given_draws,
    inputs_of,
    keep_graph,
    make_inputs,
    reduced,
    size_of,
    usual_rows,
    widened,
)  # fmt: skip
from samplex_fuzz.oracle import acc, all_ordinary, drawn, expect, has_form, is_meta


def _entry_rows(kind: int, x: Inputs, dtype: torch.dtype, a: Args) -> tuple[Tensor, ...]:
    h, weight, log_q, bias, class_weight = widened(x, dtype)
    options: dict[str, Any] = {
        "scale": a.scale, "class_weight": class_weight, "ignore_index": x.ignore_index, "positives": x.positives,
    }  # fmt: skip
    name = LOSSES[kind]
    between: tuple[Any, ...] = ()
    if name in ("negative_sampling", "nce"):
        between = (None if a.target_log_q is None else a.target_log_q.to(dtype),)
    if name == "negative_sampling":
        options["reg"] = a.reg
    if name == "augment_reduce":
        between = (a.log_eta.to(dtype),)
    return getattr(entries, name)(h, weight, x.target, x.ids, log_q, *between, bias, **options)[:2]


def _entry_args(d: Dice) -> dict[str, Any]:
    x = make_inputs(d)
    kind = d.int(0, 3)
    wide = acc(x.h.dtype)
    reg = d.pick((0.0, 0.1)) if kind == 0 else 0.0
    noise = d.uniform(*x.target.shape, low=-4.0, high=-1.0, dtype=wide) if kind == 1 or reg else None
    log_eta = None
    if kind == 3:  # near its best value, so that exp stays small
        s = x.h.double() @ x.weight.double().T
        log_eta = (s.logsumexp(1) + 4.0 if s.numel() else torch.full((x.h.shape[0],), 4.0)).to(wide)
    offsets, known = x.positives or (None, None)
    return {
        "hidden": x.h, "weight": x.weight, "target": x.target, "ids": x.ids, "log_q": x.log_q, "target_log_q": noise,
        "log_eta": log_eta, "bias": x.bias, "class_weight": x.class_weight, "known_offsets": offsets,
        "known_ids": known, "kind": kind, "scale": d.pick((1.0, 0.5)), "reg": reg, "ignore_index": x.ignore_index,
        "reduction": d.int(0, 2), "need_grad": d.maybe(0.6), "sparse": d.maybe(0.5),
    }  # fmt: skip


def _check_entry_loss(a: Args, x: Inputs, loss: Tensor) -> None:
    rows = usual_rows(x, a.target_log_q if a.kind < 2 else None, a.log_eta if a.kind == 3 else None)
    truth, same = (_entry_rows(a.kind, x, dtype, a) for dtype in (torch.float64, acc(a.weight.dtype)))
    rows = rows & (truth[0].abs() < 1e4)
    size = size_of(x, a.scale, rows)
    if a.kind >= 2 or a.reg:  # weighted by 1 / q, or squared
        biggest = float(truth[0][rows].abs().max()) if rows.any() else 0.0
        size *= max(1.0, biggest)
    compare_loss(loss, truth, same, a.reduction, size, rows)


def _check_static(a: Args, out: Any, changed: set[str], log_eta: Tensor | None) -> None:
    """What an op that draws gives, beside the two ops; `log_eta`: of each row."""
    loss, ids, _ = out
    batch, wide = a.hidden.shape[0], acc(a.weight.dtype)
    has_form("loss", loss, () if a.reduction else (batch,), wide)
    drawn(ids, None, (a.num_samples,) if a.shared else (batch, a.num_samples), a.weight.shape[0])
    if changed & {"table", "prefix", "law"} or not all_ordinary(float(a.scale), a.reg):
        return
    x = given_draws(a, ids, a.shared, noise=a.kind < 2)
    scored = None
    if a.kind == 1 or a.reg:
        of = (a.table, a.prefix) if a.law == 2 else (a.weight.shape[0],)
        inside = a.target.clamp(0, a.weight.shape[0] - 1).reshape(1, -1)
        name = ("uniform", "log_uniform", "alias")[a.law]
        scored = getattr(torch.ops.samplex, f"{name}_log_prob")(inside, *of)[0].to(wide)
    _check_entry_loss(Args({**a, "target_log_q": scored, "log_eta": log_eta}), x, loss)


@generator("entry_loss_static", 1.5)
def _entry_loss_static(d: Dice) -> Call:
    made = drawn_here(d, make_inputs(d))
    kind = d.int(0, 2)
    args = {name: made[name] for name in ("hidden", "weight", "target", "key", "law", "num_samples")}
    args["shared"] = d.maybe(0.5)
    args |= {name: made[name] for name in ("table", "prefix", "bias", "class_weight")}
    args |= {"kind": kind, "scale": d.pick((1.0, 0.5)), "reg": d.pick((0.0, 0.1)) if kind == 0 else 0.0}
    args |= {name: made[name] for name in ("ignore_index", "reduction", "need_grad")}

    def check(a: Args, out: Any, after: Args, changed: set[str]) -> None:
        if not is_meta(*a.values(), *out):
            _check_static(a, out, changed, None)

    return op_call("entry_loss_static", args, check, words=(*WORDS, *LOSSES, "key"))


@generator("augment_reduce_static_", 1.0)
def _augment_reduce_static(d: Dice) -> Call:
    made = drawn_here(d, make_inputs(d))
    batch, wide = made["hidden"].shape[0], acc(made["hidden"].dtype)
    args = {name: made[name] for name in ("hidden", "weight", "target", "key", "law", "num_samples")}
    args["shared"] = d.maybe(0.5)
    args |= {name: made[name] for name in ("table", "prefix", "bias", "class_weight")}
    examples = d.int(1, 9)
    args |= {
        "log_eta": d.uniform(examples, low=6.0, high=9.0, dtype=wide), "index": d.ids(examples, batch),
        "rate": d.pick((0.1, 0.5, 1.0)), "scale": d.pick((1.0, 0.5)),
    }  # fmt: skip
    args |= {name: made[name] for name in ("ignore_index", "reduction", "need_grad")}

    def check(a: Args, out: Any, after: Args, changed: set[str]) -> None:
        if is_meta(*a.values(), *out):
            return
        _check_static(Args({**a, "kind": 3, "reg": 0.0}), out, changed, a.log_eta[a.index])
        others = torch.ones_like(a.log_eta, dtype=torch.bool).index_fill(0, a.index, False)
        expect(torch.equal(after.log_eta[others], a.log_eta[others]), "numbers of other examples must stay")
        expect(not bool((after.log_eta < 0).any()), f"log_eta must not be negative, got {after.log_eta.tolist()}")

    words = (*WORDS, "augment_reduce", "key", "log_eta", "index", "rate")
    return op_call("augment_reduce_static_", args, check, words=words, mutable=("log_eta",))


@generator("entry_loss", 3.0)
def _entry_loss(d: Dice) -> Call:
    def check(a: Args, out: Any, after: Args, changed: set[str]) -> None:
        if is_meta(*a.values(), *out):
            return
        has_form("loss", out[0], () if a.reduction else (a.hidden.shape[0],), acc(a.weight.dtype))
        if all_ordinary(float(a.scale), a.reg):
            _check_entry_loss(a, inputs_of(a), out[0])

    return op_call("entry_loss", _entry_args(d), check, words=(*WORDS, "log_eta"))


@generator("entry_loss_bwd")
def _entry_loss_bwd(d: Dice) -> Call:
    forward = _entry_args(d)
    f = Args(forward)

    def loss_of(x: Inputs, dtype: torch.dtype, a: Args) -> Tensor:
        log_q, bias, class_weight = keep_graph(x, dtype)
        options: dict[str, Any] = {
            "scale": f.scale, "class_weight": class_weight, "ignore_index": x.ignore_index, "positives": x.positives,
        }  # fmt: skip
        name = LOSSES[f.kind]
        between: tuple[Any, ...] = ()
        if name in ("negative_sampling", "nce"):
            between = (None if f.target_log_q is None else f.target_log_q.to(dtype),)
        if name == "negative_sampling":
            options["reg"] = f.reg
        if name == "augment_reduce":
            between = (f.log_eta.to(dtype),)
        loss, denom, *_ = getattr(entries, name)(x.h, x.weight, x.target, x.ids, log_q, *between, bias, **options)
        return (reduced(loss, denom, a.reduction) * a.grad_loss.to(dtype)).sum()

    return backward_call(d, "entry_loss", forward, loss_of)
