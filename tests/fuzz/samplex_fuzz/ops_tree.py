"""Generators of the decision tree, the kernel tree and the feature maps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from samplex_cuda.ops.kernel_tree import KERNELS
from samplex_cuda.ops.tree import pack_nodes, unpack_nodes
from samplex_cuda.reference import kernel_tree as kernel
from samplex_cuda.reference import rff as plain_rff
from samplex_cuda.reference import tree as plain
from samplex_cuda.reference import tree_shared as shared
from samplex_fuzz.call import Args, Call, Dice, generator, op_call
from samplex_fuzz.ops_static import key_of, row_of
from samplex_fuzz.oracle import acc, all_ordinary, close, drawn, excluded, expect, has_form, is_meta, make_exclude, near

_TREE = {"nodes", "leaf_class", "class_leaf"}
_WORDS = ("exclude", "offsets", "tree", "features", "draws", "rows")


def make_tree(d: Dice, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Nodes, leaf_class and class_leaf of a random tree with padding leaves barred."""
    classes = d.int(1, 16)
    depth = (classes - 1).bit_length()
    leaves = 1 << depth
    leaf_class = torch.full((leaves,), -1)
    chosen = torch.randperm(classes, generator=d.g)
    leaf_class[:classes] = chosen  # padding is on the right: a bias of -inf bars it
    class_leaf = torch.empty(classes, dtype=torch.int64)
    class_leaf[chosen] = torch.arange(classes)
    weights, bias = d.normal(leaves, dim, scale=0.5), d.normal(leaves)
    for node in range(1, leaves):
        low = high = node
        while low < leaves:
            low, high = 2 * low, 2 * high + 1
        middle = (low + high + 1) // 2 - leaves
        if middle >= classes:
            weights[node], bias[node] = 0.0, -torch.inf
    return pack_nodes(weights, bias), leaf_class, class_leaf


def _parts(a: Args) -> tuple[Tensor, Tensor, Tensor]:
    return (*unpack_nodes(a.nodes, a.x.shape[1]), a.leaf_class)


def _plain(a: Args, changed: set[str]) -> bool:
    # The nodes are padded, so that the ops cannot tell a width of x that is off by a little; `Tree` can.
    return not changed & (_TREE | {"x"}) and bool(a.x.isfinite().all()) and bool((a.x.abs() < 30).all())


def _leaf_lists(a: Args, batch: int) -> list[list[int]] | None:
    """Excluded classes of each row, from its excluded leaves."""
    lists = excluded(a.exclude, a.exclude_offsets, batch)
    if lists is None:
        return None
    found = [[int(a.leaf_class[leaf]) for leaf in row] for row in lists]
    return [[c for c in row if c >= 0] for row in found]  # a padding leaf has no class


def _left(lists: list[list[int]], classes: int) -> bool:
    return all(len(row) < classes for row in lists)


def _log_p(a: Args, lists: list[list[int]]) -> Tensor:
    log_p = plain.log_prob_all(a.x, *_parts(a))
    return plain.conditional_log_prob(log_p, lists) if any(lists) else log_p


@generator("tree_sample")
def _tree_sample(d: Dice) -> Call:
    batch, dim = d.size(), d.int(1, 9)
    nodes, leaf_class, class_leaf = make_tree(d, dim)
    exclude, offsets = make_exclude(d, batch, len(class_leaf))
    exact = d.maybe(0.4)

    def check(a: Args, out: Any, after: Args, changed: set[str]) -> None:
        if is_meta(*a.values(), *out):
            return
        ids, log_q = out
        batch, classes = a.x.shape[0], a.class_leaf.shape[0]
        lists = _leaf_lists(a, batch)
        if not _plain(a, changed) or lists is None:
            drawn(ids, None, (batch, a.num_samples), classes)
            return
        drawn(ids, log_q, (batch, a.num_samples), classes)
        if not _left(lists, classes):
            return
        want = _log_p(a, lists).gather(1, ids)
        near("log_q", log_q.double(), want, 1e-4 * max(1.0, float(want.abs().max()) if want.numel() else 0.0))
        if exact:
            sure = plain.sample(*key_of(a), a.x, *_parts(a), a.num_samples, lists, row_of(a))
            expect(bool(((sure == ids) | (sure < 0)).all()), f"ids must be {sure.tolist()}, got {ids.tolist()}")

    args = {
        "key": d.key(), "x": d.normal(batch, dim), "nodes": nodes, "leaf_class": leaf_class, "class_leaf": class_leaf,
        "num_samples": d.int(0, 4), "exclude": exclude, "exclude_offsets": offsets,
    }  # fmt: skip
    return op_call("tree_sample", args, check, words=_WORDS)


@generator("tree_log_prob")
def _tree_log_prob(d: Dice) -> Call:
    batch, dim = d.size(), d.int(1, 9)
    nodes, leaf_class, class_leaf = make_tree(d, dim)
    exclude, offsets = make_exclude(d, batch, len(class_leaf))

    def check(a: Args, out: Any, after: Args, changed: set[str]) -> None:
        if is_meta(*a.values(), out):
            return
        has_form("log_prob", out, a.ids.shape, torch.float32)
        lists = _leaf_lists(a, a.x.shape[0])
        if not _plain(a, changed) or lists is None or not _left(lists, a.class_leaf.shape[0]):
            return
        near("log_prob", out, _log_p(a, lists).gather(1, a.ids), 2e-3)

    args = {
        "x": d.normal(batch, dim), "ids": d.ids(len(class_leaf), batch, d.int(0, 5)), "nodes": nodes,
        "leaf_class": leaf_class, "class_leaf": class_leaf, "exclude": exclude, "exclude_offsets": offsets,
    }  # fmt: skip
    return op_call("tree_log_prob", args, check, words=_WORDS)


@generator("tree_log_prob_all")
def _tree_log_prob_all(d: Dice) -> Call:
    nodes, leaf_class, class_leaf = make_tree(d, dim := d.int(1, 9))

    def check(a: Args, out: Any, after: Args, changed: set[str]) -> None:
        if is_meta(*a.values(), out):
            return
        has_form("log_prob_all", out, (a.x.shape[0], a.class_leaf.shape[0]), torch.float32)
        if _plain(a, changed):
            near("log_prob_all", out, plain.log_prob_all(a.x, *_parts(a)), 2e-3)

    args = {"x": d.normal(d.size(), dim), "nodes": nodes, "leaf_class": leaf_class, "class_leaf": class_leaf}
    return op_call("tree_log_prob_all", args, check, words=_WORDS)


@generator("tree_topk")
def _tree_topk(d: Dice) -> Call:
    nodes, leaf_class, class_leaf = make_tree(d, dim := d.int(1, 9))
    beam = d.int(1, 20)

    def check(a: Args, out: Any, after: Args, changed: set[str]) -> None:
        if is_meta(*a.values(), *out):
            return
        log_p, ids = out
        has_form("log_p", log_p, (a.x.shape[0], a.k), torch.float32)
        has_form("ids", ids, (a.x.shape[0], a.k), torch.int64)
        classes = a.class_leaf.shape[0]
        expect(bool(((ids >= -1) & (ids < classes)).all()), f"ids must be in [-1, {classes}), got {ids.tolist()}")
        if not _plain(a, changed):
            return
        law = plain.log_prob_all(a.x, *_parts(a))
        found = ids >= 0
        near("log_p", log_p[found], law.gather(1, ids.clamp(min=0))[found], 2e-3)
        if a.beam >= a.nodes.shape[0]:
            best = plain.topk(law, min(a.k, classes))[0]
            near("log_p of the best", log_p[:, : best.shape[1]], best, 2e-3)

    args = {
        "x": d.normal(d.size(), dim), "nodes": nodes, "leaf_class": leaf_class, "class_leaf": class_leaf,
        "k": d.int(1, beam), "beam": beam,
    }  # fmt: skip
    return op_call("tree_topk", args, check, words=_WORDS)


@generator("tree_project")
def _tree_project(d: Dice) -> Call:
    width = d.width()

    def check(a: Args, out: Any, after: Args, changed: set[str]) -> None:
        if is_meta(*a.values(), out):
            return
        has_form("x", out, (a.features.shape[0], a.projection.shape[1]), torch.float32)
        rows = a.features.isfinite().all(1) & (a.features.abs() < 1e3).all(1)
        if all_ordinary(a.mean, a.projection):
            want = plain.project(a.features, a.mean, a.projection)
            same = (a.features - a.mean) @ a.projection
            size = (
                float(((a.features[rows] - a.mean).abs() @ a.projection.abs()).max())
                if rows.any() and out.numel()
                else 0.0
            )
            close("x", out, want, same, size, rows)

    args = {
        "features": d.normal(d.size(), width), "mean": d.normal(width), "projection": d.normal(width, d.int(1, 9))
    }  # fmt: skip
    return op_call("tree_project", args, check, words=_WORDS)


@generator("tree_sample_and_score")
def _tree_sample_and_score(d: Dice) -> Call:
    batch, width, dim = d.size(), d.width(), d.int(1, 9)
    nodes, leaf_class, class_leaf = make_tree(d, dim)
    shape = (batch,) if d.maybe(0.5) else (batch, d.int(0, 4))

    def check(a: Args, out: Any, after: Args, changed: set[str]) -> None:
        if is_meta(*a.values(), *out):
            return
        draws, log_q, scores = out
        classes = a.class_leaf.shape[0]
        has_form("scores", scores, a.ids.shape, torch.float32)
        fine = not changed & (_TREE | {"features", "projection"}) and all_ordinary(a.features, a.mean, a.projection)
        drawn(draws, log_q if fine else None, (a.features.shape[0], a.num_samples), classes)
        if fine:
            x = torch.ops.samplex.tree_project(a.features, a.mean, a.projection)
            log_p = plain.log_prob_all(x, *unpack_nodes(a.nodes, x.shape[1]), a.leaf_class)
            near("log_q", log_q, log_p.gather(1, draws), 2e-2)
            batch = a.features.shape[0]
            if batch:
                near("scores", scores.reshape(batch, -1), log_p.gather(1, a.ids.reshape(batch, -1)), 2e-2)

    args = {
        "key": d.key(), "features": d.normal(batch, width), "mean": d.normal(width),
        "projection": d.normal(width, dim, scale=0.3), "nodes": nodes, "leaf_class": leaf_class,
        "class_leaf": class_leaf, "num_samples": d.int(0, 4), "ids": d.ids(len(class_leaf), *shape),
    }  # fmt: skip
    return op_call("tree_sample_and_score", args, check, words=_WORDS)


@generator("tree_sample_shared")
def _tree_sample_shared(d: Dice) -> Call:
    nodes, leaf_class, class_leaf = make_tree(d, dim := d.int(1, 9))
    exact = d.maybe(0.4)

    def check(a: Args, out: Any, after: Args, changed: set[str]) -> None:
        if is_meta(*a.values(), *out):
            return
        ids, log_q = out
        classes = a.class_leaf.shape[0]
        if not _plain(a, changed) or a.x.shape[0] == 0:
            drawn(ids, None, (a.num_samples,), classes)
            return
        drawn(ids, log_q, (a.num_samples,), classes)
        near("log_q", log_q, shared.log_prob_shared(a.x, *_parts(a))[ids], 2e-3)
        if exact:
            make = shared.sample_strata if a.stratified else shared.sample_shared
            sure = make(*key_of(a), a.x, *_parts(a), a.num_samples)
            expect(bool(((sure == ids) | (sure < 0)).all()), f"ids must be {sure.tolist()}, got {ids.tolist()}")

    args = {
        "key": d.key(), "x": d.normal(d.size(), dim), "nodes": nodes, "leaf_class": leaf_class,
        "class_leaf": class_leaf, "num_samples": d.int(0, 5), "stratified": d.maybe(0.5),
    }  # fmt: skip
    return op_call("tree_sample_shared", args, check, words=_WORDS)


@generator("tree_log_prob_shared")
def _tree_log_prob_shared(d: Dice) -> Call:
    nodes, leaf_class, class_leaf = make_tree(d, dim := d.int(1, 9))

    def check(a: Args, out: Any, after: Args, changed: set[str]) -> None:
        if is_meta(*a.values(), out):
            return
        has_form("log_prob", out, a.ids.shape, torch.float32)
        if _plain(a, changed) and a.x.shape[0]:
            near("log_prob", out, shared.log_prob_shared(a.x, *_parts(a))[a.ids], 2e-3)

    args = {
        "x": d.normal(d.size(), dim), "ids": d.ids(len(class_leaf), d.int(0, 5)), "nodes": nodes,
        "leaf_class": leaf_class, "class_leaf": class_leaf,
    }  # fmt: skip
    return op_call("tree_log_prob_shared", args, check, words=_WORDS)


# ------------------------------------------------------------------------------------------------ kernel tree
_NAMES = {number: name for name, number in KERNELS.items()}
_SUMS = {"phi", "rows", "sums", "leaf_size", "kernel", "scale", "epsilon", "h"}


def _kernel_case(d: Dice) -> dict[str, Any]:
    classes, leaf_size = d.int(1, 20), d.int(1, 4)
    batch, dim, width = d.size(4), d.pick((8, 16)), d.pick((16, 32))
    mean = d.pick((1.0, 1.0, 0.1))
    phi_rows = mean + 0.3 * d.normal(classes, width)
    return {
        "h": d.normal(batch, dim), "phi": mean + 0.3 * d.normal(batch, width),
        "rows": d.normal(classes, dim, scale=0.7), "sums": kernel.node_sums(phi_rows, leaf_size).float(),
        "leaf_size": leaf_size, "kernel": d.int(0, 2), "scale": d.pick((1.0, 0.5)), "epsilon": d.pick((0.0, 0.05, 0.5)),
    }  # fmt: skip


def _kernel_law(a: Args, lists: list[list[int]]) -> Tensor:
    tree = kernel.tree_law(a.h, a.phi, a.rows, a.sums, a.leaf_size, _NAMES[a.kernel], a.scale)
    return kernel.conditional(tree, a.epsilon, lists)


def _kernel_compare(name: str, got: Tensor, want: Tensor) -> None:
    """Where the distribution is not next to a value that one side clips and the other does not."""
    sure = want.isfinite() & (want > -12.0)
    error = (got.double() - want).abs()[sure]
    worst = float(error.max()) if error.numel() else 0.0
    expect(worst <= 5e-3, f"{name}: error {worst:.3g} against the reference is over 0.005")


@generator("kernel_tree_sample")
def _kernel_sample(d: Dice) -> Call:
    case = _kernel_case(d)
    exclude, offsets = make_exclude(d, case["h"].shape[0], case["rows"].shape[0])

    def check(a: Args, out: Any, after: Args, changed: set[str]) -> None:
        if is_meta(*a.values(), *out):
            return
        ids, log_q, clipped = out
        batch, classes = a.h.shape[0], a.rows.shape[0]
        has_form("clipped", clipped, (batch,), torch.float32)
        lists = excluded(a.exclude, a.exclude_offsets, batch)
        if changed & _SUMS or lists is None:
            drawn(ids, None, (batch, a.num_samples), classes)
            return
        drawn(ids, log_q, (batch, a.num_samples), classes)
        if batch and all(len(row) < classes for row in lists):
            law = _kernel_law(a, lists)
            if bool(law.logsumexp(1).isfinite().all()):
                _kernel_compare("log_q", log_q, law.gather(1, ids))

    args = {"key": d.key(), **case, "num_samples": d.int(0, 4), "exclude": exclude, "exclude_offsets": offsets}
    return op_call("kernel_tree_sample", args, check, words=_WORDS)


@generator("kernel_tree_log_prob")
def _kernel_log_prob(d: Dice) -> Call:
    case = _kernel_case(d)
    batch, classes = case["h"].shape[0], case["rows"].shape[0]
    exclude, offsets = make_exclude(d, batch, classes)

    def check(a: Args, out: Any, after: Args, changed: set[str]) -> None:
        if is_meta(*a.values(), out):
            return
        has_form("log_prob", out, a.ids.shape, torch.float32)
        lists = excluded(a.exclude, a.exclude_offsets, a.h.shape[0])
        if changed & _SUMS or not lists or any(len(row) >= a.rows.shape[0] for row in lists):
            return
        _kernel_compare("log_prob", out, _kernel_law(a, lists).gather(1, a.ids))

    args = {"h": case.pop("h"), "phi": case.pop("phi"), "ids": d.ids(classes, batch, d.int(0, 5)), **case}
    return op_call(
        "kernel_tree_log_prob", {**args, "exclude": exclude, "exclude_offsets": offsets}, check, words=_WORDS
    )


def _leaves(sums: Tensor) -> int:
    return sums.shape[0] // 2


@generator("kernel_tree_build")
def _kernel_build(d: Dice) -> Call:
    leaf_size, leaves, width = d.int(1, 4), 1 << d.int(0, 3), d.pick((16, 32))
    first = leaf_size * d.int(0, leaves - 1)
    phi = d.normal(d.int(0, leaves * leaf_size - first), width)

    def check(a: Args, out: Any, after: Args, changed: set[str]) -> None:
        if is_meta(*a.values()) or not all_ordinary(a.phi, a.sums):
            return
        want = a.sums.double()
        base = _leaves(a.sums)
        for begin in range(0, a.phi.shape[0], a.leaf_size):
            want[base + (a.first + begin) // a.leaf_size] = a.phi[begin : begin + a.leaf_size].double().sum(0)
        near("sums", after.sums, want, 1e-2)

    args = {"sums": d.normal(2 * leaves, width), "phi": phi, "first": first, "leaf_size": leaf_size}
    return op_call("kernel_tree_build", args, check, mutable=("sums",), words=_WORDS)


@generator("kernel_tree_update")
def _kernel_update(d: Dice) -> Call:
    leaf_size, leaves, width = d.int(1, 4), 1 << d.int(0, 3), d.pick((16, 32))
    ids = torch.tensor(sorted({d.int(0, leaves * leaf_size - 1) for _ in range(d.int(0, 4))}), dtype=torch.int64)

    def check(a: Args, out: Any, after: Args, changed: set[str]) -> None:
        if is_meta(*a.values()) or not all_ordinary(a.phi, a.old, a.sums):
            return
        if bool((a.ids[1:] <= a.ids[:-1]).any()):
            return
        used = a.ids >= 0
        want = a.sums.double()
        want.index_add_(0, _leaves(a.sums) + a.ids[used] // a.leaf_size, (a.phi.double() - a.old.double())[used])
        near("sums", after.sums, want, 1e-2)

    args = {
        "sums": d.normal(2 * leaves, width), "phi": d.normal(len(ids), width), "old": d.normal(len(ids), width),
        "ids": ids, "leaf_size": leaf_size,
    }  # fmt: skip
    return op_call("kernel_tree_update", args, check, mutable=("sums",), words=_WORDS)


@generator("kernel_tree_parents")
def _kernel_parents(d: Dice) -> Call:
    leaves, width = 1 << d.int(0, 3), d.pick((16, 32))
    some = torch.tensor(sorted({d.int(0, leaves - 1) for _ in range(d.int(0, 4))}), dtype=torch.int64)

    def check(a: Args, out: Any, after: Args, changed: set[str]) -> None:
        if is_meta(*a.values()) or not all_ordinary(a.sums):
            return
        if a.leaves is not None and bool((a.leaves[1:] <= a.leaves[:-1]).any()):
            return
        want, base = a.sums.double(), _leaves(a.sums)
        nodes = set(range(1, base)) if a.leaves is None else set()
        for leaf in [] if a.leaves is None else [leaf for leaf in a.leaves.tolist() if leaf >= 0]:
            node = (base + leaf) // 2
            while node:
                nodes.add(node)
                node //= 2
        for node in sorted(nodes, reverse=True):
            want[node] = want[2 * node] + want[2 * node + 1]
        near("sums", after.sums, want, 1e-2)

    args = {"sums": d.normal(2 * leaves, width), "leaves": None if d.maybe(0.4) else some}
    return op_call("kernel_tree_parents", args, check, mutable=("sums",), words=_WORDS)


# ------------------------------------------------------------------------------------------------ features
_KINDS = ("rff", "positive", "quadratic")


def _features(a: Args, x: Tensor, omega: Tensor | None, shift: float = 0.0) -> Tensor:
    return plain_rff.rff(x, omega, _KINDS[a.kind], nu=a.nu, alpha=a.alpha, gaussian=bool(a.gaussian), shift=shift)


def _rff_case(d: Dice) -> dict[str, Any]:
    kind, dtype, dim = d.int(0, 2), d.float_dtype(), d.width()
    omega = None if kind == 2 else d.normal(d.int(1, 9), dim, dtype=acc(dtype), scale=0.3)
    return {
        "x": d.normal(d.size(), dim, dtype=dtype, scale=0.4), "omega": omega, "kind": kind, "nu": d.pick((1.0, 0.5)),
        "alpha": d.pick((1.0, 2.0)), "gaussian": d.maybe(0.5),
    }  # fmt: skip


def _usual(a: Args) -> bool:
    return (
        all_ordinary(a.x, a.omega, a.nu, float(a.alpha)) and bool((a.x.abs() < 20).all()) and a.alpha > 0 and a.nu > 0
    )


@generator("rff")
def _rff(d: Dice) -> Call:
    def check(a: Args, out: Any, after: Args, changed: set[str]) -> None:
        if is_meta(*a.values(), out):
            return
        want = _features(a, a.x.double(), None if a.omega is None else a.omega.double(), a.shift)
        wide = acc(a.x.dtype)
        has_form("features", out, want.shape, wide)
        if _usual(a) and all_ordinary(a.shift):
            same = _features(a, a.x.to(wide), a.omega, a.shift)
            close("features", out, want, same, 40.0 * float(want.abs().max()) if want.numel() else 0.0)

    return op_call("rff", {**_rff_case(d), "shift": d.pick((0.0, 0.5))}, check, words=_WORDS)


@generator("rff_bwd")
def _rff_bwd(d: Dice) -> Call:
    case = _rff_case(d)
    features = torch.ops.samplex.rff(*case.values())
    x, omega = case.pop("x"), case.pop("omega")
    args = {
        "grad": d.normal(*features.shape, dtype=features.dtype), "x": x, "omega": omega, "features": features, **case,
        "need_x": d.maybe(0.8), "need_omega": omega is not None and d.maybe(0.7),
    }  # fmt: skip

    def check(a: Args, out: Any, after: Args, changed: set[str]) -> None:
        if is_meta(*a.values(), *out):
            return
        d_x, d_omega = out
        has_form("d_x", d_x, (a.x.shape[0] if a.need_x else 0, a.x.shape[1]), a.x.dtype)
        if changed - {"grad"} or not _usual(a) or not all_ordinary(a.grad):
            return
        for name, got, which in (("d_x", d_x, 0), ("d_omega", d_omega, 1)):
            if got.numel() == 0 or not (a.need_x, a.need_omega)[which]:
                continue
            found = []
            for dtype in (torch.float64, acc(a.x.dtype)):
                with torch.enable_grad():
                    leaves = [None if t is None else t.to(dtype).requires_grad_() for t in (a.x, a.omega)]
                    made = (_features(a, *leaves) * a.grad.to(dtype)).sum()
                    found.append(torch.autograd.grad(made, leaves[which])[0])
            close(name, got, found[0], found[1].to(got.dtype), 40.0 * float(found[0].abs().max()))

    return op_call("rff_bwd", args, check, words=_WORDS)
