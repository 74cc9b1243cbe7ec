"""Generators of the passes over exact logits, the row reduction and the row updates."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from samplex_cuda.optim import rules
from samplex_cuda.reference import predict as plain
from samplex_cuda.reference import row_rules
from samplex_cuda.reference import shard_rows as shards
from samplex_cuda.reference.row_reduce import row_reduce
from samplex_fuzz.call import Args, Call, Dice, generator, op_call
from samplex_fuzz.oracle import acc, all_ordinary, close, expect, has_form, is_meta, near, ordinary

_WORDS = ("chunk", "rows", "ids", "classes", "k")


def _tolerance(dtype: torch.dtype, size: float) -> float:
    return (1e-11 if dtype == torch.float64 else 1e-5) * (10.0 + size)


def _chunk(d: Dice) -> dict[str, Any]:
    dtype = d.pick((torch.float32, torch.float32, torch.float64))
    batch, n = d.size(), d.int(1, 20)
    return {
        "dots": d.normal(batch, n, dtype=dtype, scale=2.0), "bias": None if d.maybe(0.5) else d.normal(n, dtype=dtype),
        "first": d.pick((0, 0, 3)), "scale": d.pick((1.0, 2.0)), "absolute": d.maybe(0.3),
    }  # fmt: skip


@generator("predict_lse")
def _predict_lse(d: Dice) -> Call:
    c = _chunk(d)
    dots = c["dots"]
    batch, n = dots.shape
    targets, total = d.int(1, 3), d.maybe(0.5)
    args = {
        "dots": dots, "bias": c["bias"], "target": d.ids(n + 6, batch, targets) - 2,
        "class_weight": d.uniform(n, dtype=dots.dtype) if d.maybe(0.4) else None, "first": c["first"],
        "scale": c["scale"], "absolute": c["absolute"],
        "lse": d.normal(batch, dtype=torch.float64) if d.maybe(0.5) else torch.full((batch,), -torch.inf).double(),
        "positive": d.normal(batch, targets, dtype=dots.dtype),
        "total": d.normal(batch, dtype=torch.float64) if total else None,
    }  # fmt: skip

    def check(a: Args, out: Any, after: Args, changed: set[str]) -> None:
        if (
            is_meta(*a.values())
            or not all_ordinary(a.dots, a.bias, a.class_weight, float(a.scale))
            or 0 in a.dots.shape
        ):
            return
        wide = [None if t is None else t.double() for t in (a.dots, a.bias, a.class_weight, a.positive, a.total)]
        lse, positive, total = plain.predict_lse(
            wide[0], wide[1], a.target, wide[2], a.first, a.scale, a.absolute, a.lse, wide[3], wide[4]
        )
        tolerance = _tolerance(a.dots.dtype, float(a.dots.abs().max()) * a.dots.shape[1])
        rows = a.lse.isfinite() | (a.lse == -torch.inf)
        near("lse", after.lse[rows], lse[rows], tolerance)
        good = ordinary(a.positive)
        near("positive", after.positive[good], positive[good], tolerance)
        if a.total is not None and all_ordinary(a.total):
            near("total", after.total, total, 10 * tolerance)

    return op_call("predict_lse", args, check, mutable=("lse", "positive", "total"), words=_WORDS)


@generator("predict_grad")
def _predict_grad(d: Dice) -> Call:
    c = _chunk(d)
    dots = c["dots"]
    (batch, n), dtype, targets = dots.shape, dots.dtype, d.int(1, 3)
    args = {
        "dots": dots, "bias": c["bias"], "target": d.ids(n + 6, batch, targets) - 2,
        "class_weight": d.uniform(n, dtype=dtype) if d.maybe(0.4) else None, "first": c["first"], "scale": c["scale"],
        "absolute": c["absolute"], "lse": dots.double().logsumexp(1) * c["scale"] + 2,
        "coef": d.normal(batch, dtype=dtype), "target_coef": d.normal(batch, targets, dtype=dtype),
        "smooth": d.uniform(batch, dtype=dtype) if d.maybe(0.4) else None,
    }  # fmt: skip

    def check(a: Args, out: Any, after: Args, changed: set[str]) -> None:
        values = [x for x in a.values() if not isinstance(x, float)]
        if is_meta(*a.values()) or not all_ordinary(*values, float(a.scale)) or 0 in a.dots.shape or "lse" in changed:
            return
        wide = {name: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in a.items()}
        want = plain.predict_grad(**wide)
        if float(want.abs().max()) < 1e6:
            near("dots", after.dots, want, 30 * _tolerance(a.dots.dtype, float(want.abs().max())))

    return op_call("predict_grad", args, check, mutable=("dots",), words=_WORDS)


@generator("predict_product")
def _predict_product(d: Dice) -> Call:
    rows, depth, columns = d.size(), d.int(1, 9), d.size()
    a, b = d.normal(rows, depth), d.normal(depth, columns)
    if d.maybe(0.3):
        a = a.t().contiguous().t()
    args = {"a": a, "b": b, "out": d.normal(rows, columns), "add": d.maybe(0.5)}

    def check(a: Args, out: Any, after: Args, changed: set[str]) -> None:
        if is_meta(*a.values()) or not all_ordinary(a.a, a.b, a.out) or 0 in a.out.shape:
            return
        want = a.a.double() @ a.b.double() + (a.out.double() if a.add else 0.0)
        near("out", after.out, want, 30 * _tolerance(torch.float32, float(want.abs().max())))

    return op_call("predict_product", args, check, mutable=("out",), words=("a", "b", "out"))


@generator("predict_topk")
def _predict_topk(d: Dice) -> Call:
    c = _chunk(d)
    dots, k = c["dots"], d.int(1, 6)
    batch = dots.shape[0]
    values = d.normal(batch, k, dtype=dots.dtype).sort(1, descending=True).values
    ids = torch.arange(k).expand(batch, -1).clone()
    args = {**c, "first": d.pick((0, k, k + 3)), "values": values, "ids": ids}
    order = ("dots", "bias", "first", "scale", "absolute", "values", "ids")

    def check(a: Args, out: Any, after: Args, changed: set[str]) -> None:
        if is_meta(*a.values()) or changed & {"values", "ids"} or not all_ordinary(a.dots, a.bias, float(a.scale)):
            return
        if a.first < 0:
            raise AssertionError(f"first must not be negative, got {a.first}")
        want, which = plain.predict_topk(a.dots, a.bias, a.first, a.scale, a.absolute, a["values"], a.ids)
        held = want.shape[1]
        near("values", after["values"][:, :held], want, _tolerance(a.dots.dtype, 10.0))
        # Ids only where the values are apart: rounding decides between near ties.
        wrong = after.ids[:, :held] != which
        if held > 1 and wrong.any():
            gap = torch.diff(want, dim=1).abs()
            apart = torch.ones_like(wrong)
            apart[:, 1:] &= gap > 1e-5
            apart[:, :-1] &= gap > 1e-5
            apart[:, -1] = False
            expect(not bool((wrong & apart).any()), f"ids must be {which.tolist()}, got {after.ids.tolist()}")

    mutable = ("values", "ids")
    return op_call("predict_topk", {name: args[name] for name in order}, check, mutable=mutable, words=_WORDS)


@generator("predict_dots")
def _predict_dots(d: Dice) -> Call:
    dtype, dim, classes, batch = d.float_dtype(), d.width(), d.int(1, 9), d.size()
    args = {
        "hidden": d.normal(batch, dim, dtype=dtype), "weight": d.normal(classes, dim, dtype=dtype),
        "ids": d.ids(classes + 3, batch, d.int(0, 6)) - 1,
    }  # fmt: skip

    def check(a: Args, out: Any, after: Args, changed: set[str]) -> None:
        if is_meta(*a.values(), out):
            return
        wide = acc(a.weight.dtype)
        has_form("dots", out, a.ids.shape, wide)
        if a.weight.shape[0] == 0:
            expect(bool((out == -torch.inf).all()), "dots must be -inf without a class")
        elif all_ordinary(a.hidden, a.weight):
            both = [plain.predict_dots(a.hidden.to(t), a.weight.to(t), a.ids) for t in (torch.float64, wide)]
            size = float((a.hidden.double().abs() @ a.weight.double().abs().T).max()) if a.hidden.numel() else 0.0
            close("dots", out, *both, size)

    return op_call("predict_dots", args, check, words=_WORDS)


@generator("shard_logits")
def _shard_logits(d: Dice) -> Call:
    dtype, dim, classes, batch = d.float_dtype(), d.width(), d.int(2, 30), d.size()
    rows = d.int(0, classes)
    args = {
        "hidden": d.normal(batch, dim, dtype=dtype), "weight": d.normal(rows, dim, dtype=dtype),
        "bias": d.normal(rows, dtype=d.pick((dtype, torch.float32))) if d.maybe(0.5) else None,
        "target": d.ids(classes + 3, batch, d.int(0, 3)) - 1, "ids": d.ids(classes + 3, batch, d.int(0, 6)) - 1,
        "num_classes": classes, "step": d.pick((1, classes - 1)), "start": d.int(0, classes - rows),
    }  # fmt: skip

    def check(a: Args, out: Any, after: Args, changed: set[str]) -> None:
        if is_meta(*a.values(), *out):
            return
        wide = acc(a.weight.dtype)
        has_form("logits", out[0], (a.hidden.shape[0], a.target.shape[1] + a.ids.shape[1]), wide)
        rest = (a.target, a.ids, a.num_classes, a.step, a.start)
        both = [
            shards.shard_logits(a.hidden.to(t), a.weight.to(t), None if a.bias is None else a.bias.to(t), *rest)
            for t in (torch.float64, wide)
        ]
        for name, mine, theirs in zip(("target_rows", "id_rows"), out[1:], both[0][1:], strict=True):
            expect(torch.equal(mine, theirs), f"{name} must be {theirs.tolist()}, got {mine.tolist()}")
        if all_ordinary(a.hidden, a.weight, a.bias):
            size = float((a.hidden.double().abs() @ a.weight.double().abs().T).sum(1).max()) if out[0].numel() else 0.0
            close("logits", out[0], both[0][0], both[1][0], 1.0 + size)

    return op_call("shard_logits", args, check, words=(*_WORDS, "slot"))


@generator("shard_hidden")
def _shard_hidden(d: Dice) -> Call:
    dtype, dim, rows, batch = d.float_dtype(), d.width(), d.int(0, 9), d.size()
    wide, targets, draws = acc(dtype), d.int(0, 3), d.int(0, 6)
    args = {
        "weight": d.normal(rows, dim, dtype=dtype), "target_coef": d.normal(batch, targets, dtype=wide),
        "id_coef": d.normal(batch, draws, dtype=wide), "target_rows": d.ids(rows + 3, batch, targets) - 1,
        "id_rows": d.ids(rows + 3, batch, draws) - 1,
    }  # fmt: skip

    def check(a: Args, out: Any, after: Args, changed: set[str]) -> None:
        if is_meta(*a.values(), out):
            return
        has_form("hidden", out, (a.target_rows.shape[0], a.weight.shape[1]), acc(a.weight.dtype))
        if all_ordinary(a.weight, a.target_coef, a.id_coef):
            both = [
                shards.shard_hidden(a.weight.to(t), a.target_coef.to(t), a.id_coef.to(t), a.target_rows, a.id_rows)
                for t in (torch.float64, acc(a.weight.dtype))
            ]
            coefs = torch.cat([a.target_coef, a.id_coef], 1).double().abs().sum(1)
            size = (
                float(coefs.max()) * float(a.weight.double().abs().max()) if out.numel() and a.weight.numel() else 0.0
            )
            close("hidden", out, both[0], both[1], size)

    return op_call("shard_hidden", args, check, words=_WORDS)


@generator("predict_buffer", 0.4)
def _predict_buffer(d: Dice) -> Call:
    def check(a: Args, out: Any, after: Args, changed: set[str]) -> None:
        has_form("buffer", out, (a.rows, a.columns), a.like.dtype)
        expect(out.device == a.like.device, f"device must be {a.like.device}, got {out.device}")

    args = {"like": d.normal(1, dtype=d.float_dtype()), "rows": d.int(0, 9), "columns": d.int(0, 9)}
    return op_call("predict_buffer", args, check, words=_WORDS)


# ------------------------------------------------------------------------------------------------ updates
def _source(d: Dice, classes: int, dim: int, dtype: torch.dtype, rows: int) -> tuple[Tensor, Tensor | None, Tensor]:
    k = d.int(1, 3)
    ids = d.ids(classes, rows, k)
    ids[d.uniform(rows, k) < 0.1] = -1
    coef = None if d.maybe(0.2) else d.normal(rows, k, dtype=acc(dtype))
    return ids, coef, d.normal(rows, dim, dtype=dtype)


def _entries(a: Args) -> tuple[Tensor, Tensor, Tensor]:
    """All entries of both sources as [S * k, 1] ids and coefficients and [S * k, d] rows, in float64."""
    ids, coefs, rows = [], [], []
    for which in "ab":
        i, c, r = a[f"ids_{which}"], a[f"coef_{which}"], a[f"rows_{which}"]
        i = i.unsqueeze(1) if i.dim() == 1 else i
        c = torch.ones(i.shape, dtype=torch.float64) if c is None else c.reshape(i.shape).double()
        ids.append(i.reshape(-1))
        coefs.append(c.reshape(-1))
        rows.append(r.double().repeat_interleave(i.shape[1], 0))
    return torch.cat(ids).unsqueeze(1), torch.cat(coefs).unsqueeze(1), torch.cat(rows)


@generator("row_reduce")
def _row_reduce(d: Dice) -> Call:
    classes, dim, dtype = d.int(1, 9), d.width(), d.float_dtype()
    first = _source(d, classes, dim, dtype, d.size())
    second = _source(d, classes, dim, dtype, d.size()) if d.maybe(0.5) else _source(d, classes, dim, dtype, 0)
    args = dict(zip(("ids_a", "coef_a", "rows_a", "ids_b", "coef_b", "rows_b"), (*first, *second), strict=True))
    args.update(num_rows=classes, with_bias=d.maybe(0.5), bias_b=None, check_ids=True)

    def check(a: Args, out: Any, after: Args, changed: set[str]) -> None:
        if is_meta(*a.values(), *out):
            return
        row_ids, grads, bias, count = out
        n = int(count)
        used = row_ids[:n]
        expect(0 <= n <= len(row_ids), f"count must be in [0, {len(row_ids)}], got {n}")
        expect(bool((used[1:] > used[:-1]).all()), f"row_ids must ascend, got {used.tolist()}")
        if a.bias_b is not None or not a.check_ids or not all_ordinary(a.coef_a, a.coef_b, a.rows_a, a.rows_b):
            return
        want, sums, by_id = row_reduce(*_entries(a))
        expect(used.tolist() == want.tolist(), f"row_ids must be {want.tolist()}, got {used.tolist()}")
        size = float(sums.abs().max()) if sums.numel() else 0.0
        near("row_grads", grads[:n], sums, 1e-3 * (1 + size) if a.rows_a.dtype != torch.float64 else 1e-10 * (1 + size))
        if a.with_bias:
            near("row_bias", bias[:n], by_id, 1e-4 * (1 + float(by_id.abs().max()) if by_id.numel() else 1.0))

    return op_call("row_reduce", args, check, words=_WORDS)


_RULES = ("sgd", "momentum", "nesterov", "adagrad", "row_adagrad", "adam", "adamw")


def _rule(d: Dice, name: str) -> list[float]:
    if name in ("sgd", "momentum", "nesterov"):
        return [float(x) for x in rules.sgd(0.05, 0.0 if name == "sgd" else 0.8, 0.01, name == "nesterov")]
    if name in ("adagrad", "row_adagrad"):
        return [float(x) for x in rules.adagrad(0.05, 1e-6, 0.01, name == "row_adagrad")]
    return [float(x) for x in rules.adam(0.05, (0.8, 0.95), 1e-6, 0.01, name == "adamw", 3)]


def _live(d: Dice, name: str, live: bool, of: str = "") -> dict[str, Any]:
    """A rule with its step on the host, or constants with rate and count in tensors: the same step 3 of rate 0.05."""
    if not live:
        return {f"{of}rule": _rule(d, name), f"{of}lr": None, f"{of}step": None}
    with_rate = d.maybe(0.7)
    made = rules.Rule(*_rule(d, name))._replace(lr=9.9 if with_rate else 0.05)
    return {
        f"{of}rule": list(rules.constants(made, 0.01 if name == "adamw" else 0.0)),
        f"{of}lr": torch.tensor(0.05, dtype=d.pick((torch.float32, torch.float64))) if with_rate else None,
        f"{of}step": torch.tensor(2.0),
    }


def _states(d: Dice, name: str, weight: Tensor) -> list[Tensor | None]:
    count = {"sgd": 0, "adam": 2, "adamw": 2}.get(name, 1)
    shape = weight.shape[:1] if name == "row_adagrad" else weight.shape
    made: list[Tensor | None] = [d.uniform(*shape, low=0.1, high=1.0, dtype=acc(weight.dtype)) for _ in range(count)]
    return [*made, None, None][:2]


def _apply(name: str, weight: Tensor, states: list[Tensor | None], ids: Tensor, rows: Tensor) -> None:
    if name in ("sgd", "momentum", "nesterov"):
        momentum = 0.0 if name == "sgd" else 0.8
        row_rules.row_sgd(
            weight, states[0], ids, rows, lr=0.05, momentum=momentum, weight_decay=0.01, nesterov=name == "nesterov"
        )
    elif name in ("adagrad", "row_adagrad"):
        assert states[0] is not None
        row_rules.row_adagrad(weight, states[0], ids, rows, lr=0.05, eps=1e-6, weight_decay=0.01)
    else:
        assert states[0] is not None
        assert states[1] is not None
        row_rules.row_adam(
            weight, states[0], states[1], ids, rows, lr=0.05, step=3, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.01,
            decoupled_weight_decay=name == "adamw",
        )  # fmt: skip


def _loose(dtype: torch.dtype) -> float:
    return {torch.float64: 1e-8, torch.float32: 2e-3, torch.float16: 0.02, torch.bfloat16: 0.15}[dtype]


@generator("row_apply_")
def _row_apply(d: Dice) -> Call:
    name, dtype, classes, dim = d.pick(_RULES), d.float_dtype(), d.int(1, 9), d.width()
    weight = d.normal(classes, dim, dtype=dtype)
    ids = torch.tensor(sorted({d.int(0, classes - 1) for _ in range(d.int(0, 5))}), dtype=torch.int64)
    states = _states(d, name, weight)
    args = {
        "weight": weight, "state0": states[0], "state1": states[1], "row_ids": ids,
        "rows": d.normal(len(ids), dim, dtype=acc(dtype)),
        "count": torch.tensor([d.int(0, len(ids))]) if d.maybe(0.3) else None, "key": None,
        **_live(d, name, live := d.maybe(0.4)), "found_inf": torch.zeros(()) if live and d.maybe(0.5) else None,
    }  # fmt: skip

    def check(a: Args, out: Any, after: Args, changed: set[str]) -> None:
        if is_meta(*a.values()) or {"rule", "lr", "step", "found_inf"} & changed:
            return
        if not all_ordinary(a.weight, a.state0, a.state1, a.rows):
            return
        if any(s is not None and bool((s <= 0).any()) for s in (a.state0, a.state1)) or a.weight.dim() != 2:
            return
        if a.row_ids is None or a.key is not None or len(set(a.row_ids.tolist())) != len(a.row_ids):
            return
        n = len(a.row_ids) if a.count is None else max(0, min(len(a.row_ids), int(a.count)))
        wide = a.weight.double()
        held = [None if s is None else s.double() for s in (a.state0, a.state1)]
        _apply(name, wide, held, a.row_ids[:n], a.rows[:n].double())
        near(
            "weight",
            after.weight,
            wide,
            _loose(a.weight.dtype) * (1 + float(wide.abs().max())) if wide.numel() else 0.0,
        )

    return op_call("row_apply_", args, check, mutable=("weight", "state0", "state1", "step"), words=_WORDS)


@generator("row_update_")
def _row_update(d: Dice) -> Call:
    name, dtype, classes, dim = d.pick(_RULES), d.float_dtype(), d.int(1, 9), d.width()
    weight = d.normal(classes, dim, dtype=dtype)
    states = _states(d, name, weight)
    bias = d.normal(classes, dtype=dtype) if d.maybe(0.4) else None
    of_bias = "adagrad" if name == "row_adagrad" else name
    bias_states = [None, None] if bias is None else _states(d, of_bias, bias)
    first = _source(d, classes, dim, dtype, d.size())
    second = _source(d, classes, dim, dtype, d.int(0, 3))
    args = {
        "weight": weight, "weight_state0": states[0], "weight_state1": states[1], "bias": bias,
        "bias_state0": bias_states[0], "bias_state1": bias_states[1], "ids_a": first[0], "coef_a": first[1],
        "rows_a": first[2], "ids_b": second[0], "coef_b": second[1], "rows_b": second[2], "bias_b": None, "key": None,
    }  # fmt: skip
    live = d.maybe(0.4)
    numbers = _live(d, name, live, "weight_") | _live(d, of_bias, live and bias is not None, "bias_")
    order = ("weight_rule", "bias_rule", "weight_lr", "weight_step", "bias_lr", "bias_step")
    args |= {key: numbers[key] for key in order}
    args["found_inf"] = torch.zeros(()) if live and d.maybe(0.5) else None
    mutable = ("weight", "weight_state0", "weight_state1", "bias", "bias_state0", "bias_state1", *order[3::2])

    def check(a: Args, out: Any, after: Args, changed: set[str]) -> None:
        values = (a.weight, a.weight_state0, a.weight_state1, a.rows_a, a.rows_b, a.coef_a, a.coef_b)
        if is_meta(*a.values()) or {*order, "found_inf"} & changed or a.key is not None or not all_ordinary(*values):
            return
        if any(s is not None and bool((s <= 0).any()) for s in (a.weight_state0, a.weight_state1)):
            return
        ids, coefs, rows = _entries(a)
        ids = torch.where(ids < len(a.weight), ids, -1)  # an ignore_index may be beyond the table
        ids, sums, _ = row_reduce(ids, coefs, rows)
        wide = a.weight.double()
        held = [None if s is None else s.double() for s in (a.weight_state0, a.weight_state1)]
        _apply(name, wide, held, ids, sums)
        size = float(wide.abs().max()) if wide.numel() else 0.0
        near("weight", after.weight, wide, 5 * _loose(a.weight.dtype) * (1 + size))

    return op_call("row_update_", args, check, mutable=mutable, words=_WORDS)
