"""Generators of the inverted multi-index."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from samplex_cuda.ops.midx_sample import midx_tables
from samplex_cuda.reference import midx_sample as plain
from samplex_fuzz.call import Args, Call, Dice, generator, op_call
from samplex_fuzz.oracle import drawn, excluded, has_form, is_meta, make_exclude, near

_WORDS = ("exclude", "offsets", "draws", "rows", "codes", "classes")
_TABLES = {"weights", "mass", "omega", "cell", "place", "members", "starts", "prefix"}


def _tables(d: Dice, batch: int) -> dict[str, Any]:
    classes, codes = d.int(1, 20), d.pick((1, 2, 5, 33))
    cell = d.ids(codes * codes, classes).to(torch.int32)
    place, members, starts = midx_tables(cell, codes)
    units, prefix = torch.ones(classes, dtype=torch.int64), None
    if d.maybe(0.5):
        units = d.ids(5, classes)
        units[d.int(0, classes - 1)] = d.pick((1, 10**12))
        prefix = torch.cat([torch.zeros(1, dtype=torch.int64), units[members.long()].cumsum(0)])
    sums = torch.zeros(codes * codes, dtype=torch.float64).index_add_(0, cell.long(), units.double())
    omega = (sums / float(units.max())).float().view(codes, codes)
    weights = d.normal(batch, 2, codes).exp()
    mass = (weights[:, 1].double() @ omega.T.double()).float()
    return {
        "weights": weights, "mass": mass, "omega": omega, "cell": cell, "place": place, "members": members,
        "starts": starts, "prefix": prefix, "epsilon": d.pick((0.0, 0.1, 1.0)),
    }  # fmt: skip


def _laws(a: Args, lists: list[list[int]]) -> Tensor:
    units = np.ones(a.cell.shape[0], np.int64)
    if a.prefix is not None:
        units[a.members.long().numpy()] = np.diff(a.prefix.numpy())
    weights = a.weights.numpy()
    rows = [
        plain.law(w[0], w[1], a.omega.numpy(), a.cell.numpy(), units, a.epsilon, row)
        for w, row in zip(weights, lists, strict=True)
    ]
    with np.errstate(divide="ignore"):
        return torch.from_numpy(np.log(np.stack(rows))) if rows else torch.zeros(0, a.cell.shape[0])


@generator("midx_sample")
def _midx_sample(d: Dice) -> Call:
    batch = d.size()
    tables = _tables(d, batch)
    exclude, offsets = make_exclude(d, batch, tables["cell"].shape[0])

    def check(a: Args, out: Any, after: Args, changed: set[str]) -> None:
        if is_meta(*a.values(), *out):
            return
        ids, log_q = out
        shape, classes = (a.weights.shape[0], a.num_samples), a.cell.shape[0]
        lists = excluded(a.exclude, a.exclude_offsets, shape[0])
        if changed & _TABLES or lists is None:
            drawn(ids, None, shape, classes)
            return
        drawn(ids, log_q, shape, classes)
        near("log_q", log_q.double(), _laws(a, lists).gather(1, ids), 2e-4)

    args = {
        "key": d.key(), "num_samples": d.int(0, 5), **tables, "stratified": d.maybe(0.3), "exclude": exclude,
        "exclude_offsets": offsets,
    }  # fmt: skip
    return op_call("midx_sample", args, check, words=_WORDS)


@generator("midx_log_prob")
def _midx_log_prob(d: Dice) -> Call:
    batch = d.size()
    tables = _tables(d, batch)
    classes = tables["cell"].shape[0]
    exclude, offsets = make_exclude(d, batch, classes)

    def check(a: Args, out: Any, after: Args, changed: set[str]) -> None:
        if is_meta(*a.values(), out):
            return
        has_form("log_q", out, a.ids.shape, torch.float32)
        lists = excluded(a.exclude, a.exclude_offsets, a.ids.shape[0])
        if changed & _TABLES or lists is None:
            return
        want = _laws(a, lists).gather(1, a.ids)
        assert bool(((want == -torch.inf) == (out == -torch.inf)).all())
        near("log_q", out.double().clamp_min(-1e3), want.clamp_min(-1e3), 2e-4)

    args = {"ids": d.ids(classes, batch, d.int(0, 4)), **tables, "exclude": exclude, "exclude_offsets": offsets}
    return op_call("midx_log_prob", args, check, words=_WORDS)
