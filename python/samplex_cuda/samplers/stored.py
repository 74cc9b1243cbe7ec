"""Checks the tables of a state dict once, when they are loaded: the ops rely on them.

Each function returns what is wrong, or None. The ops check every index they read and stay inside their buffers whatever
a table says, but a damaged table would give draws of another distribution without an error.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from samplex_cuda._checks import describe

__all__ = ["alias_error", "bigram_error", "closed_bias", "finite_error", "shape_error", "tree_error", "units_error"]

_CHUNK = 1 << 22  # columns at a time
_ROUNDING = 1e-9  # of masses that are sums of many float64
_MOST = 1 << 62  # integer weights sum to less


def shape_error(name: str, t: Any, shape: tuple[int, ...], dtype: torch.dtype, wanted: str) -> str | None:
    """Whether a tensor has this shape (-1: any size) and dtype."""
    good = isinstance(t, Tensor) and t.dtype == dtype and t.dim() == len(shape)
    if good and all(want in (-1, size) for want, size in zip(shape, t.shape, strict=True)):
        return None
    return f"{name} must be {wanted} {str(dtype).removeprefix('torch.')}, got {describe(t)}"


def finite_error(name: str, t: Tensor, largest: float | None = None) -> str | None:
    """Whether every number is finite, and at most `largest` in size."""
    flat = t.detach().reshape(-1)
    for part in flat.split(_CHUNK):
        if not bool(part.isfinite().all()):
            return f"{name} must be finite, got nan or inf"
        if largest is not None and part.numel() and float(part.abs().max()) > largest:
            return f"{name} must have numbers up to {largest:g}, got {float(part.abs().max()):g}"
    return None


def _fractions(threshold: Tensor) -> Tensor:
    """Thresholds, unsigned 64-bit numbers in int64, as shares of 2^64."""
    return (threshold.double() + (threshold < 0).double() * 2.0**64) * 2.0**-64


def _ascending_error(name: str, t: Tensor, last: int | None = None) -> str | None:
    """Whether numbers ascend from 0 (to `last`) and stay below 2^62."""
    low, high = int(t[0]), int(t[-1])
    if low != 0 or (last is not None and high != last) or high >= _MOST or bool((t[1:] < t[:-1]).any()):
        return f"{name} must ascend from 0{'' if last is None else f' to {last}'}, got {low} … {high} or a fall between"
    return None


def alias_error(
    names: tuple[str, str], table: Any, prefix: Any, first: Tensor | None = None, rows: Tensor | None = None
) -> str | None:
    """Whether alias tables belong to their running sums: each class comes with the probability that log_q says.

    Args:
        names: of the two, for messages.
        table: [n, 4] int64.
        prefix: [n + N] int64: one running sum more than columns in each of the N tables.
        first: [N] where each table begins; None: one table.
        rows: [n] the number of the table of each column; None with `first` None.
    """
    if wrong := shape_error(names[0], table, (-1, 4), torch.int64, "[C, 4]"):
        return wrong
    count = table.shape[0]
    if first is None or rows is None:
        first, rows = torch.zeros(1, dtype=torch.int64), torch.zeros(count, dtype=torch.int64)
        if count < 1:
            return f"{names[0]} must have at least one class, got {describe(table)}"
    tables = first.shape[0]
    if wrong := shape_error(names[1], prefix, (count + tables,), torch.int64, f"[{count + tables}]"):
        return wrong
    table, prefix = table.detach().cpu(), prefix.detach().cpu()
    begin = first + torch.arange(tables)  # of each table's running sums
    size = torch.zeros(tables, dtype=torch.int64).index_add_(0, rows, torch.ones_like(rows))
    total = prefix[begin + size]
    if bool((prefix[begin] != 0).any()) or bool((((total <= 0) | (total >= _MOST)) & (size > 0)).any()):
        return f"{names[1]} must begin with 0 and have a positive sum below 2^62"
    mass = torch.zeros(count, dtype=torch.float64)
    for at in range(0, count, _CHUNK):
        some = slice(at, min(at + _CHUNK, count))
        row = rows[some]
        place = torch.arange(some.start, some.stop) + row
        weight = prefix[place + 1] - prefix[place]
        if bool((weight < 0).any()):
            return f"{names[1]} must not decrease, got {int(prefix[place + 1][weight < 0][0])} after a larger sum"
        alias = table[some, 1]
        outside = (alias < 0) | (alias >= size[row])
        if bool(outside.any()):
            return f"{names[0]} must hold classes in [0, {int(size[row][outside][0])}), got {int(alias[outside][0])}"
        share = _fractions(table[some, 0])
        other = first[row] + alias
        if bool(((weight == 0) & (table[some, 0] != 0)).any()):
            return f"{names[0]} must never draw a class of weight 0"
        log_weight = table[some, 2].view(torch.float64)
        wanted = weight.double().log()
        close = (log_weight == wanted) | ((log_weight - wanted).abs() < _ROUNDING)
        same = table[some, 3] == table[other, 2]
        if not bool((close & same).all()):
            return f"{names[0]} must hold the logarithms of the weights in {names[1]}"
        mass[some] += share
        mass.index_add_(0, other, 1.0 - share)
    for at in range(0, count, _CHUNK):
        some = slice(at, min(at + _CHUNK, count))
        row = rows[some]
        place = torch.arange(some.start, some.stop) + row
        weight = prefix[place + 1] - prefix[place]
        wanted = weight.double() * (size[row].double() / total[row].double())
        if bool(((mass[some] - wanted).abs() > _ROUNDING * wanted.clamp_min(1.0)).any()):
            return f"{names[0]} must draw each class with its weight in {names[1]}"
        if bool(((weight == 0) & (mass[some] != 0)).any()):
            return f"{names[0]} must never draw a class of weight 0"
    return None


def bigram_error(t: dict[str, Any], least_backoff: float) -> str | None:
    """Whether the tables of a `Bigram` fit each other; keys as in its state dict."""
    if wrong := alias_error(("table", "prefix"), t["table"], t["prefix"]):
        return wrong
    for name, wanted, dtype in (
        ("offsets", "[N + 1]", torch.int64),
        ("pair_ids", "[nnz]", torch.int64),
        ("backoff", "[N]", torch.float64),
    ):
        if wrong := shape_error(name, t[name], (-1,), dtype, wanted):
            return wrong
    offsets, ids = t["offsets"].detach().cpu(), t["pair_ids"].detach().cpu()
    backoff = t["backoff"].detach().cpu()
    classes, pairs, contexts = t["table"].shape[0], ids.shape[0], offsets.shape[0] - 1
    if contexts < 0 or backoff.shape[0] != contexts:
        return f"backoff must be [N] for offsets [N + 1], got {describe(t['backoff'])} and {describe(t['offsets'])}"
    if wrong := _ascending_error("offsets", offsets, pairs):
        return wrong
    if not bool(((backoff == 0) | ((backoff >= least_backoff) & (backoff <= 1))).all()):
        return f"backoff must be 0 or in [{least_backoff:g}, 1]"
    if pairs and not (int(ids.min()) >= 0 and int(ids.max()) < classes):
        return f"pair_ids must be in [0, {classes}), got {int(ids.min())} … {int(ids.max())}"
    rows = torch.repeat_interleave(torch.arange(contexts), offsets.diff())
    if bool(((ids[1:] <= ids[:-1]) & (rows[1:] == rows[:-1])).any()):
        return "pair_ids must ascend in each context"
    return alias_error(("pair_table", "pair_prefix"), t["pair_table"], t["pair_prefix"], offsets[:-1], rows)


def tree_error(t: dict[str, Any]) -> str | None:
    """Whether the tables of a `Tree` fit each other; keys as in its state dict."""
    nodes, mean, projection = t["nodes"], t["mean"], t["projection"]
    if not isinstance(nodes, Tensor) or nodes.dtype not in (torch.float32, torch.bfloat16) or nodes.dim() != 2:
        return f"nodes must be [2^depth, stride] float32 or bfloat16, got {describe(nodes)}"
    leaves = nodes.shape[0]
    if leaves < 1 or leaves & (leaves - 1):
        return f"nodes must have 2^depth rows, got {describe(nodes)}"
    if wrong := shape_error("projection", projection, (-1, -1), torch.float32, "[K, k]"):
        return wrong
    if wrong := shape_error("mean", mean, (projection.shape[0],), torch.float32, "[K]"):
        return wrong
    dim, item = projection.shape[1], nodes.element_size()
    if dim < 1 or nodes.shape[1] != ((dim + 1) * item + 31) // 32 * 32 // item:
        return f"nodes must be [2^depth, stride] for projection {describe(projection)}, got {describe(nodes)}"
    if wrong := shape_error("leaf_class", t["leaf_class"], (leaves,), torch.int64, f"[{leaves}]"):
        return wrong
    if wrong := shape_error("class_leaf", t["class_leaf"], (-1,), torch.int64, "[C]"):
        return wrong
    leaf_class, class_leaf = t["leaf_class"].detach().cpu(), t["class_leaf"].detach().cpu()
    classes = class_leaf.shape[0]
    if not 1 <= classes <= leaves or bool(((class_leaf < 0) | (class_leaf >= leaves)).any()):
        return f"class_leaf must be [C] with C in [1, {leaves}] and hold leaves, got {describe(t['class_leaf'])}"
    if not torch.equal(leaf_class[class_leaf], torch.arange(classes)) or int((leaf_class != -1).sum()) != classes:
        return "leaf_class must hold every class of [0, C) once, where class_leaf says, and -1 elsewhere"
    for name, values in (("nodes", nodes[1:, :dim]), ("mean", mean), ("projection", projection)):
        if wrong := finite_error(name, values):
            return wrong
    bias = nodes[:, dim].detach().cpu().float()
    if bool(bias[1:].isnan().any()):
        return "nodes must have biases that are not nan"
    if not torch.equal(closed_bias(leaf_class, bias)[1:], bias[1:]):
        return "nodes must have the bias +inf or -inf where one side of a node has no class"
    return None


def units_error(t: dict[str, Any]) -> str | None:
    """Whether the base of a `Tree` is one, or none; the other tables are right."""
    units, share, classes = t["base_units"], t["base_share"], t["class_leaf"].shape[0]
    if wrong := shape_error("base_share", share, (), torch.float64, "[]"):
        return wrong
    size = 0 if isinstance(units, Tensor) and units.shape == (0,) else classes
    if wrong := shape_error("base_units", units, (size,), torch.int64, f"[{classes}] or [0]"):
        return wrong
    if size == 0:
        return None if float(share) == 0.0 else f"base_share must be 0 without base_units, got {float(share)}"
    if not 0.0 < float(share) <= 1.0:
        return f"base_share must be in (0, 1], got {float(share)}"
    if int(units.min()) < 0 or not 0.0 < float(units.double().sum()) < 2.0**62:
        return "base_units must not be negative and have a positive sum below 2^62"
    return None


def closed_bias(leaf_class: Tensor, bias: Tensor) -> Tensor:
    """The biases [2^depth] of a tree with +inf or -inf where one side of a node has no class: no row comes there."""
    closed, empty = bias.clone(), leaf_class < 0
    while empty.shape[0] > 1:
        half = empty.shape[0] // 2
        left, right = empty[0::2], empty[1::2]
        own = closed[half : 2 * half]
        own.masked_fill_(left & ~right, torch.inf).masked_fill_(right & ~left, -torch.inf)
        empty = left & right
    return closed
