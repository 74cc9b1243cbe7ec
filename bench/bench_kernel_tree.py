"""Kernel trees: draws, updates and losses against ways to do without them, and how close they come to softmax.

Rows (--only takes any part of a name):
  softmax_*      draw + sampled-softmax loss, batch 10, m = 10, d = 64, n = 500,000, target excluded: RandomFourier with
                 D = 50, 200, 500, 1000 and Quadratic vs the exact, chunked `Softmax` sampler
  levels         n = 1,000,000, d = 128, D = 1024, 256 x 64 draws, vs a torch loop over the levels
  exclude        the same tree: the cost of leaving out the target, exactly
  update         the same tree: 16,384 changed rows vs a rebuild
  follow_*       following 8,600 rows, n = 1,000,000, d = 64, D = 1024 ("rff", "positive") and Quadratic, vs the byte
                 floor: a copy of as many bytes as the distinct nodes that change have (printed with the row)
  depth_1024     time at n = 2^20 / at n = 2^12, d = 128, 256 x 64 draws; depth_64 the same at D = 64
  tv_*           total-variation distance of q to softmax (tau = 11.1) on clustered classes: 100 centers on the sphere,
                 noise 0.5 or 1.0 (length of the noise vector), d = 64, n = 10,000; not timed

Rows are unit vectors, nu = 4 unless the row says otherwise. Trees of a million classes at D = 1024 take 2.7 GB.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from _harness import (
    Report,
    Row,
    Side,
    check_close,
    common_options,
    comparison_row,
    interleave,
    set_up,
    wanted,
    write_readme,
)
from torch.nn.functional import normalize

import samplex_cuda as sx
from samplex_cuda.samplers import KernelSampler, Quadratic, RandomFourier

BATCH, M, DIM, NU, TAU, SETS = 256, 64, 128, 4.0, 11.1, 8
MILLION = 1_000_000
Draw = tuple[torch.Tensor, torch.Tensor]


def unit_rows(count: int, dim: int, device: torch.device, seed: int = 0) -> torch.Tensor:
    return normalize(torch.randn(count, dim, generator=torch.Generator().manual_seed(seed)), dim=1).to(device)


def ours(sampler: KernelSampler, h: torch.Tensor, exclude: torch.Tensor | None = None) -> Draw:
    draw = sampler.sample(h, M, exclude=exclude)
    return draw.ids, draw.log_q


# ----------------------------------------------------------------------------------------------------- the peer
def by_levels(sampler: RandomFourier, h: torch.Tensor) -> Draw:
    """All draws down one level at a time: gather both children, bmm, clamp, rand; then the kernel in the leaf."""
    assert sampler.omega is not None
    z = h @ sampler.omega.T
    phi = torch.cat([z.cos(), z.sin()], 1) * sampler.num_features**-0.5
    batch, leaves, size = h.shape[0], sampler.sums.shape[0] // 2, sampler.leaf_size
    node = torch.ones(batch, M, dtype=torch.int64, device=h.device)
    log_q = torch.zeros(batch, M, device=h.device)
    for level in range(sampler.depth):
        children = torch.stack([2 * node, 2 * node + 1], 2)
        v = torch.bmm(sampler.sums[children.view(batch, -1)], phi.unsqueeze(2)).view(batch, M, 2).clamp_min(0.0)
        span = size << (sampler.depth - level - 1)
        begin = (children - (2 << level)) * span
        count = (sampler.num_classes - begin).clamp(0, span)
        v = torch.where(count == 0, 0.0, v)
        v = torch.where(v.sum(2, keepdim=True) == 0, count.to(v.dtype), v)
        p = v / v.sum(2, keepdim=True)
        right = (torch.rand_like(log_q) < p[..., 1]).long()
        log_q += p.gather(2, right.unsqueeze(2)).squeeze(2).log()
        node = 2 * node + right
    ids = (node - leaves).unsqueeze(2) * size + torch.arange(size, device=h.device)
    rows = sampler.rows[ids.clamp(max=sampler.num_classes - 1)]
    score = -0.5 * sampler.nu * (rows - h[:, None, None, :]).square().sum(3)
    inside = torch.log_softmax(torch.where(ids < sampler.num_classes, score, -torch.inf), 2)
    pick = torch.multinomial(inside.exp().view(batch * M, size), 1).view(batch, M, 1)
    return ids.gather(2, pick).squeeze(2), log_q + inside.gather(2, pick).squeeze(2)


def log_q_by_path(sampler: KernelSampler, h: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """log q [B, m] of classes in fp64: the product along their paths, the leaf, the uniform part."""
    query, _ = sampler._query(h)
    features = query[:, : sampler.dim + sampler.has_bias].double()
    omega = None if sampler.omega is None else sampler.omega.double()
    phi = sx.rff.features(features, omega, kind=sampler.kind, nu=sampler.scale, alpha=sampler.scale)
    depth, size, n = sampler.depth, sampler.leaf_size, sampler.num_classes
    leaf = ids // size
    log_q = torch.zeros(ids.shape, dtype=torch.float64, device=h.device)
    floor = 1.0 if sampler.kernel == "quadratic" else 0.0
    for level in range(depth):
        node = (leaf + (1 << depth)) >> (depth - level)
        children = torch.stack([2 * node, 2 * node + 1], 2)
        sums = sampler.sums[children][..., : phi.shape[1]].double()
        v = torch.einsum("bmcf,bf->bmc", sums, phi)
        span = size << (depth - level - 1)
        count = (n - (children - (2 << level)) * span).clamp(0, span).double()
        v = torch.where(count == 0, 0.0, torch.maximum(v, floor * count))
        v = torch.where(v.sum(2, keepdim=True) == 0, count, v)
        right = (leaf >> (depth - 1 - level)) & 1
        log_q += (v.gather(2, right.unsqueeze(2)).squeeze(2) / v.sum(2)).log()
    inside = leaf.unsqueeze(2) * size + torch.arange(size, device=h.device)
    rows = sampler.rows[inside.clamp(max=n - 1)].double()
    dots = torch.einsum("bmld,bd->bml", rows, query.double())
    if sampler.kernel == "gaussian":
        score = sampler.scale * (dots - 0.5 * rows.square().sum(3))
    else:
        score = sampler.scale * dots if sampler.kernel == "exponential" else torch.log(sampler.scale * dots**2 + 1.0)
    score = torch.log_softmax(torch.where(inside < n, score, -torch.inf), 2)
    log_q += score.gather(2, (ids - leaf * size).unsqueeze(2)).squeeze(2)
    return ((1.0 - sampler.epsilon) * log_q.exp() + sampler.epsilon / n).log()


def refcheck(sampler: KernelSampler, h: torch.Tensor, steps: dict[str, Callable[[torch.Tensor], Draw]]) -> str:
    """log_q of each side's own draws for four rows, at most 64 each, against the fp64 path."""
    worst = 0.0
    for name, step in steps.items():
        ids, log_q = step(h)
        for row in range(0, min(4, h.shape[0])):
            want = log_q_by_path(sampler, h[row : row + 1], ids[row : row + 1])
            worst = max(worst, check_close(f"{name} log_q", log_q[row : row + 1], want, 2e-4))
    return f"log_q of each side's draws vs fp64 along the path: {worst:.1e}"


# ----------------------------------------------------------------------------------------------------- loss + draw
def loss_step(sampler: Any, weight: torch.Tensor, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        draw = sampler.sample(h, 10, exclude=y)
    return sx.functional.sampled_softmax(h, weight, y, draw.ids, draw.log_q, scale=TAU)


def softmax_rows(options: Any, device: torch.device, add: Callable[..., None]) -> None:
    try:
        exact_type = sx.samplers.Softmax
    except AttributeError:
        print("  softmax_*: skipped, this build has no exact Softmax sampler")
        return
    n, dim = 500_000, 64
    weight = unit_rows(n, dim, device)
    exact = exact_type(weight, scale=TAU)
    hidden = [unit_rows(10, dim, device, 1 + i) for i in range(SETS)]
    target = [torch.randint(n, (10,), device=device) for _ in range(SETS)]
    makers = {f"softmax_rff_{d}": functools.partial(RandomFourier, weight, d, NU) for d in (50, 200, 500, 1000)}
    makers["softmax_quadratic"] = functools.partial(Quadratic, weight)
    targets = {"softmax_rff_50": 25.0, "softmax_rff_1000": 12.0, "softmax_quadratic": 12.0}
    for row_id, make in makers.items():
        if not wanted(options, row_id):
            continue
        sampler = make()
        checked = refcheck(sampler, hidden[0], {"ours": functools.partial(ours, sampler)})
        sides = [
            Side(name, lambda i, s=s: loss_step(s, weight, hidden[i % SETS], target[i % SETS]))
            for name, s in (("ours", sampler), ("exact softmax", exact))
        ]
        what = (
            f"draw + loss, batch 10, m = 10, d = 64, n = 500,000, {row_id.removeprefix('softmax_')}, vs exact Softmax"
        )
        add(row_id, what, sides, checked, target=targets.get(row_id), config={"B": 10, "m": 10, "d": 64, "n": n})
        del sampler


# ----------------------------------------------------------------------------------------------------- following
def changed_nodes(sampler: KernelSampler, ids: torch.Tensor) -> int:
    """Distinct nodes above some classes, leaves and root included."""
    nodes, found = (ids // sampler.leaf_size + (sampler.sums.shape[0] // 2)).unique(), 0
    for _ in range(sampler.depth + 1):
        found, nodes = found + nodes.numel(), (nodes >> 1).unique()
    return found


def follow_rows(options: Any, device: torch.device, add: Callable[..., None]) -> None:
    n, dim, touched = MILLION, 64, 8_600
    makers: dict[str, Callable[[torch.Tensor], KernelSampler]] = {
        "follow_rff": lambda weight: RandomFourier(weight, 1024, NU),
        "follow_positive": lambda weight: RandomFourier(weight, 1024, NU, "positive"),
        "follow_quadratic": Quadratic,
    }
    targets = {"follow_rff": 1.5, "follow_positive": 1.5, "follow_quadratic": 2.0}
    for row_id, make in makers.items():
        if not wanted(options, row_id):
            continue
        weight = unit_rows(n, dim, device)
        tree = make(weight)
        some = [torch.randperm(n, device=device)[:touched] for _ in range(SETS)]
        rows = [unit_rows(touched, dim, device, 200 + i) for i in range(SETS)]
        tree.update(some[0], rows[0])
        weight[some[0]] = rows[0]
        changed = tree.sums[: 1 << 12].clone()
        tree.rebuild(weight)
        worst = check_close("upper sums after an update", changed, tree.sums[: 1 << 12], 1e-5)
        nodes = changed_nodes(tree, some[0])
        size = nodes * tree.sums.shape[1]
        source, copied = torch.randn(size, device=device), torch.empty(size, device=device)
        sides = [
            Side("follow", lambda i, t=tree, s=some, r=rows: t.update(s[i % SETS], r[i % SETS])),
            Side("byte floor", lambda i, a=copied, b=source: a.copy_(b)),
        ]
        floor = f"a copy of {4e-6 * size:.0f} MB ({nodes:,} nodes)"
        what = f"following {touched:,} rows, n = 1,000,000, {row_id[7:]}, / {floor}"
        about: dict[str, Any] = {"inverse": True, "unit": "ratio", "sense": "<=", "target": targets[row_id]}
        config = {"n": n, "d": dim, "rows": touched, "numbers a node": tree.sums.shape[1], "nodes": nodes}
        add(row_id, what, sides, f"upper sums vs a rebuild: {worst:.1e}", config=config, **about)
        del tree, weight, source, copied, sides, changed


# ----------------------------------------------------------------------------------------------------- distance
def distances(options: Any, device: torch.device, report: Report) -> None:
    """TV(q, softmax) on clustered classes; which sampler wins when."""
    n, dim = 10_000, 64
    g = torch.Generator().manual_seed(0)
    for noise in (0.5, 1.0):
        centres = normalize(torch.randn(100, dim, generator=g), dim=1)
        near = torch.randn(n + 50, dim, generator=g) * (noise * dim**-0.5)
        points = normalize(centres[torch.randint(100, (n + 50,), generator=g)] + near, dim=1).to(device)
        weight, h = points[:n], points[n:]
        target = torch.softmax(TAU * (h @ weight.T).double(), 1)
        makers: dict[str, Callable[[], Any]] = {
            "uniform": lambda: sx.samplers.Uniform(n),
            "quadratic": lambda weight=weight: Quadratic(weight),
        }
        for features in (1024, 4096):
            for kind, nu in (("rff", NU), ("rff", TAU), ("orf", NU), ("positive", NU), ("positive", TAU)):
                name = f"{kind}_{'nu4' if nu == NU else 'nutau'}_{features}"
                makers[name] = functools.partial(RandomFourier, weight, features, nu, kind, key=sx.Key(1))
        for name, make in makers.items():
            row_id = f"tv_{noise}_{name}"
            if not wanted(options, row_id):
                continue
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                q = make().log_prob_all(h).double().exp()
            mass = float((q.sum(1) - 1.0).abs().max())
            if not mass < 1e-4:
                raise AssertionError(f"refcheck {row_id}: q sums to 1 except for {mass:.1e}")
            value = float(0.5 * (q - target).abs().sum(1).mean())
            what = f"TV to softmax, tau = 11.1, clustered, noise {noise}: {name}"
            config = {"n": n, "d": dim, "noise": noise, "queries": 50}
            report.add(
                Row(row_id, what, value, "ratio", f"sum of q is 1 except for {mass:.1e}", sense="<=", config=config)
            )


def main() -> int:
    options = common_options(__doc__).parse_args()
    device = set_up(options)
    on_cpu = device.type == "cpu"
    name = "kernel_tree" if on_cpu else f"kernel_tree_{device.type}"
    report = Report(name, device, store=not (options.quick or options.no_store))
    time = functools.partial(interleave, device=device, seconds=options.seconds, min_rounds=2 if options.quick else 5)
    warnings.filterwarnings("ignore", message=".*of the estimated kernel mass is negative")

    def add(row_id: str, what: str, sides: list[Side], checked: str, **about: Any) -> None:
        report.add(comparison_row(row_id, what, sides, checked, time(sides), on_cpu, **about))

    softmax_rows(options, device, add)
    follow_rows(options, device, add)
    sets = [unit_rows(BATCH, DIM, device, 100 + i) for i in range(SETS)]
    config = {"B": BATCH, "m": M, "d": DIM, "nu": NU}

    def side(name: str, step: Callable[..., Any], *more: list[Any]) -> Side:
        return Side(name, lambda i: step(sets[i % SETS], *(m[i % SETS] for m in more)))

    if any(wanted(options, row_id) for row_id in ("levels", "exclude", "update")):
        weight = unit_rows(MILLION, DIM, device)
        tree = RandomFourier(weight, 1024, NU, epsilon=0.0)
        mine = functools.partial(ours, tree)
        at = config | {"n": MILLION, "D": 1024}
        if wanted(options, "levels"):
            other = functools.partial(by_levels, tree)
            checked = refcheck(tree, sets[0], {"ours": mine, "levels": other})
            what = f"{BATCH} x {M} draws, n = 1,000,000, D = 1024, vs a torch loop over the levels"
            add("levels", what, [side("ours", mine), side("levels", other)], checked, target=8.0, config=at)
        if wanted(options, "exclude"):
            targets = [torch.randint(MILLION, (BATCH,), device=device) for _ in range(SETS)]
            sides = [side("excluding", mine, targets), side("ours", mine)]
            what = "draws that exclude the target / draws that do not, n = 1,000,000, D = 1024"
            checked = refcheck(tree, sets[0], {"ours": mine})
            add("exclude", what, sides, checked, inverse=True, unit="ratio", sense="<=", config=at)
        if wanted(options, "update"):
            some = [torch.randperm(MILLION, device=device)[:16_384] for _ in range(SETS)]
            rows = [unit_rows(16_384, DIM, device, 200 + i) for i in range(SETS)]
            fresh = weight.clone()
            fresh[some[0]] = rows[0]
            tree.update(some[0], rows[0])
            changed = tree.sums.clone() if on_cpu else tree.sums
            tree.rebuild(fresh)
            worst = check_close("sums after an update", changed, tree.sums, 1e-5) if on_cpu else 0.0
            del changed, fresh
            sides = [
                Side("update", lambda i: tree.update(some[i % SETS], rows[i % SETS])),
                Side("rebuild", lambda i: tree.rebuild(weight)),
            ]
            what = "update of 16,384 rows, n = 1,000,000, D = 1024, vs a rebuild"
            add("update", what, sides, f"sums vs a rebuild: {worst:.1e}", target=12.0, config=at | {"rows": 16_384})
        del tree, weight, mine
    for features, target in ((1024, 15.0), (64, 3.0)):
        if wanted(options, f"depth_{features}"):
            big, small = (RandomFourier(unit_rows(n, DIM, device), features, NU) for n in (1 << 20, 1 << 12))
            checked = refcheck(big, sets[0], {"ours": functools.partial(ours, big)})
            sides = [side("2^20", functools.partial(ours, big)), side("2^12", functools.partial(ours, small))]
            what = f"time at n = 2^20 / at n = 2^12, D = {features}"
            about: dict[str, Any] = {"inverse": True, "unit": "ratio", "sense": "<=", "target": target}
            add(f"depth_{features}", what, sides, checked, config=config | {"D": features}, **about)
            del big, small, sides
    distances(options, device, report)
    code = report.finish(fail=not options.no_fail)
    write_readme(report, options)
    return code


if __name__ == "__main__":
    sys.exit(main())
