"""Generators of the passes of an exact draw."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from samplex_cuda.reference import exact_sample as plain
from samplex_fuzz.call import Args, Call, Dice, generator, op_call
from samplex_fuzz.ops_static import key_of
from samplex_fuzz.oracle import all_ordinary, drawn, excluded, expect, has_form, is_meta, make_exclude, near

_WORDS = ("exclude", "offsets", "classes", "rows", "entries", "blocks")


def _law(d: Dice) -> dict[str, Any]:
    return {"kind": d.int(0, 2), "scale": d.pick((1.0, 1.0, -0.5, 2.0)), "alpha": d.pick((0.0, 1.0, 100.0))}


def _lists(a: Args, batch: int) -> list[list[int]] | None:
    """Excluded classes of the rows of the call; None if the ops need not make sense of them."""
    total = batch + a.row if a.exclude_offsets is None else a.exclude_offsets.shape[0] - 1
    if a.exclude is None:
        return [[] for _ in range(batch)]
    total = a.exclude.shape[0] if a.exclude_offsets is None else total
    lists = excluded(a.exclude, a.exclude_offsets, total)
    return None if lists is None else lists[a.row : a.row + batch]


def _table(d: Dice) -> dict[str, Any]:
    dtype, dim, classes, batch = d.float_dtype(), d.width(), d.pick((1, 2, 9, 255, 256, 257, 600)), d.size()
    wide = torch.float64 if dtype == torch.float64 or d.maybe(0.2) else torch.float32
    bias = None if d.maybe(0.5) else d.normal(classes, dtype=d.float_dtype())
    return {
        "hidden": d.normal(batch, dim, dtype=wide), "weight": d.normal(classes, dim, dtype=dtype), "bias": bias,
        "lse": d.normal(batch, dtype=torch.float64),
    }  # fmt: skip


def _size(a: Args) -> Tensor:
    """The sum of the terms of the largest logit of each row, [B, 1]."""
    terms = a.hidden.double().abs() @ a.weight.double().abs().T + (0 if a.bias is None else a.bias.double().abs())
    return 1.0 + abs(a.scale) * terms.amax(1, keepdim=True)


@generator("exact_mass")
def _mass(d: Dice) -> Call:
    dtype = d.pick((torch.float32, torch.float32, torch.float64))
    first, row, batch = d.pick((0, 0, 256)), d.pick((0, 0, 2)), d.size()
    n = d.pick((1, 30, 255, 256, 257, 512, 700))
    classes = first + n if n % 256 or d.maybe(0.5) else first + n + 300
    exclude, offsets = make_exclude(d, row + batch, classes)
    args = {
        "dots": d.normal(batch, n, dtype=dtype, scale=2.0), "bias": None if d.maybe(0.5) else d.normal(n, dtype=dtype),
        "first": first, "num_classes": classes, **_law(d), "exclude": exclude, "exclude_offsets": offsets, "row": row,
        "mass": torch.full((batch, -(-classes // 256)), 5.0, dtype=torch.float64),
    }  # fmt: skip

    def check(a: Args, out: Any, after: Args, changed: set[str]) -> None:
        if is_meta(*a.values()) or not all_ordinary(a.dots, a.bias, float(a.scale), float(a.alpha)):
            return
        batch, n = a.dots.shape
        lists = _lists(a, batch)
        if lists is None or n == 0:
            return
        here = slice(a.first // 256, a.first // 256 + -(-n // 256))
        want = plain.exact_mass(a.dots, a.bias, a.kind, a.scale, a.alpha, a.first, lists)
        near("mass", after.mass[:, here], want, 1e-5 * (10.0 + float(a.dots.abs().max()) if batch else 1.0))
        rest = torch.ones(a.mass.shape[1], dtype=torch.bool)
        rest[here] = False
        expect(
            bool((after.mass[:, rest].nan_to_num() == a.mass[:, rest].nan_to_num()).all()),
            "mass of other blocks must not change",
        )

    return op_call("exact_mass", args, check, mutable=("mass",), words=_WORDS)


@generator("exact_product_mass")
def _product_mass(d: Dice) -> Call:
    dtype = d.pick((torch.bfloat16, torch.float16))
    row, batch, dim, parts = d.pick((0, 0, 2)), d.size(), d.pick((1, 7, 8, 16, 33)), d.pick((1, 1, 3))
    classes = d.pick((1, 30, 256, 257, 600))
    exclude, offsets = make_exclude(d, row + batch, classes)
    args = {
        "hidden": d.normal(batch, parts * dim, dtype=dtype), "weight": d.normal(classes, dim, dtype=dtype),
        "bias": None if d.maybe(0.5) else d.normal(classes, dtype=d.pick((torch.float32, dtype))),
        "kind": d.pick((0, 1)), "scale": d.pick((1.0, 0.5, -2.0)), "exclude": exclude, "exclude_offsets": offsets,
        "row": row, "mass": torch.full((batch, -(-classes // 256)), 5.0, dtype=torch.float64),
    }  # fmt: skip

    def check(a: Args, out: Any, after: Args, changed: set[str]) -> None:
        if is_meta(*a.values()) or not all_ordinary(a.hidden, a.weight, a.bias, float(a.scale)):
            return
        batch, dim = a.hidden.shape[0], a.weight.shape[1]
        lists = _lists(a, batch)
        if lists is None or batch == 0 or dim == 0:
            return
        h, weight = a.hidden.double().view(batch, -1, dim), a.weight.double()
        bias = None if a.bias is None else a.bias.double()
        want = plain.exact_mass(h.sum(1) @ weight.T, bias, a.kind, a.scale, 0.0, 0, lists)
        terms = float((h.abs().sum(1) @ weight.abs().T).max())
        near("mass", after.mass, want, 1e-5 * (10.0 + abs(a.scale) * terms))

    return op_call("exact_product_mass", args, check, mutable=("mass",), words=_WORDS)


@generator("exact_blocks")
def _blocks(d: Dice) -> Call:
    mass = d.normal(d.size(), d.pick((1, 2, 5, 256, 300)), dtype=torch.float64, scale=3.0)
    mass[d.uniform(*mass.shape) < 0.2] = -torch.inf
    args = {"mass": mass, "key": d.key(), "row": d.pick((0, 0, 7)), "num_samples": d.int(0, 6)}

    def check(a: Args, out: Any, after: Args, changed: set[str]) -> None:
        if is_meta(*a.values(), *out):
            return
        lse, place = out
        (batch, blocks), m = a.mass.shape, a.num_samples
        has_form("lse", lse, (batch,), torch.float64)
        has_form("place", place, (batch, m), torch.int64)
        expect(bool(((place >= 0) & (place < batch * blocks)).all()), f"place must be a block, got {place.tolist()}")
        good = ~(a.mass.isnan() | (a.mass == torch.inf)).any(1) & (a.mass > -torch.inf).any(1)
        if m > 100 or not bool(good.all()):
            return
        want_lse, want, gap = plain.exact_blocks(a.mass, key_of(a), a.row, m)
        near("lse", lse, want_lse, 1e-10 * (1.0 + float(want_lse.abs().max()) if batch else 1.0))
        expect(bool(((place == want) | (gap < 1e-10)).all()), f"place must be {want.tolist()}, got {place.tolist()}")

    return op_call("exact_blocks", args, check, words=_WORDS)


@generator("exact_draw")
def _draw(d: Dice) -> Call:
    args = _table(d)
    (batch, _), classes, row = args["hidden"].shape, args["weight"].shape[0], d.pick((0, 0, 2))
    exclude, offsets = make_exclude(d, row + batch, classes)
    blocks = -(-classes // 256)
    place = d.ids(blocks, batch, d.int(0, 5)) * batch + torch.arange(batch)[:, None]
    args |= {"place": place, "key": d.key(), **_law(d), "exclude": exclude, "exclude_offsets": offsets, "row": row}

    def check(a: Args, out: Any, after: Args, changed: set[str]) -> None:
        if is_meta(*a.values(), out):
            return
        (batch, m), classes = a.place.shape, a.weight.shape[0]
        drawn(out, None, (batch, m), classes)
        lists = _lists(a, batch)
        if (
            lists is None
            or changed & {"place", "lse"}
            or not all_ordinary(a.hidden, a.weight, a.bias, float(a.scale), float(a.alpha))
        ):
            return
        want, gap = plain.exact_draw(
            a.hidden, a.weight, a.bias, a.place, key_of(a), a.kind, a.scale, a.alpha, lists, a.row
        )
        # A block with nothing left in it would not have been chosen.
        for b in range(batch):
            for j in range(m):
                first = int(a.place[b, j]) // batch * 256
                if set(range(first, min(first + 256, classes))) <= set(lists[b]):
                    gap[b, j] = 0.0
        band = 2.0**-20 * (_size(a) if batch else torch.ones(0, 1))
        expect(bool(((out == want) | (gap < band)).all()), f"ids must be {want.tolist()}, got {out.tolist()}")

    return op_call("exact_draw", args, check, words=_WORDS)


@generator("exact_log_prob")
def _log_prob(d: Dice) -> Call:
    args = _table(d)
    (batch, _), classes, row = args["hidden"].shape, args["weight"].shape[0], d.pick((0, 0, 2))
    exclude, offsets = make_exclude(d, row + batch, classes)
    args |= {"ids": d.ids(classes, batch, d.int(0, 5)), **_law(d)}
    args |= {"exclude": exclude, "exclude_offsets": offsets, "row": row}

    def check(a: Args, out: Any, after: Args, changed: set[str]) -> None:
        if is_meta(*a.values(), out):
            return
        has_form("log_q", out, a.ids.shape, torch.float32)
        lists = _lists(a, a.ids.shape[0])
        values = (a.hidden, a.weight, a.bias, a.lse, a.scale, a.alpha)
        if lists is None or not all_ordinary(*values) or not a.ids.numel():
            return
        want = plain.exact_log_prob(a.hidden, a.weight, a.bias, a.lse, a.ids, a.kind, a.scale, a.alpha, lists)
        near("log_q", out, want, 1e-6 * float(_size(a).max() + a.lse.abs().max()))

    return op_call("exact_log_prob", args, check, words=_WORDS)
