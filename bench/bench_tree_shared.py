"""Draws from the decision tree shared by a batch, from the mean of the rows' distributions, with its log_q.

Rows (--only takes any part of a name), B = 256 rows, m = 2048 draws, C = 2^17, k = 16 projected features:
  multinomial    vs every class of every row in torch (one matmul, sigmoids multiplied down the levels), the mean over
                 the rows and torch.multinomial
  by_rows        vs what any sampler with a distribution for each row can do: a random row and a class of that row for
  each
                 draw, then log q from the log-probabilities of all draws in all rows
  strata         stratified draws vs independent draws, copies merged on both sides
  bfloat16       nodes in bfloat16 vs in float32
  draws          time at m = 2048 / time at m = 256
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as nnf
from _harness import (
    Report,
    Side,
    check_close,
    common_options,
    comparison_row,
    interleave,
    set_up,
    wanted,
    write_readme,
)

import samplex_cuda as sx
from samplex_cuda.samplers import Sampler

BATCH, M, FEW, DEPTH, DIM, SETS = 256, 2048, 256, 17, 16, 8
Draw = tuple[torch.Tensor, torch.Tensor]


class ByRows(sx.samplers.Tree):
    """A tree that draws for a batch as a sampler does that has nothing but the distributions of its rows."""

    log_prob_shared = Sampler.log_prob_shared


def make_tree(
    kind: type[sx.samplers.Tree], device: torch.device, dtype: torch.dtype = torch.float32
) -> sx.samplers.Tree:
    """Weights and bias about as large as those of a fitted tree."""
    g = torch.Generator().manual_seed(DEPTH)
    leaves = 1 << DEPTH
    weights, bias = torch.randn(leaves, DIM, generator=g) * 0.5, torch.randn(leaves, generator=g) * 0.3
    return kind(weights, bias, torch.randperm(leaves, generator=g), dtype=dtype).to(device)


def ours(tree: sx.samplers.Tree, m: int, x: torch.Tensor) -> Draw:
    draw = tree.sample(x, m, shared=True)
    return draw.ids, draw.log_q


def merged(tree: sx.samplers.Tree, m: int, stratified: bool, x: torch.Tensor) -> sx.Draw:
    return tree.sample(x, m, shared=True, stratified=stratified).merged()


def by_rows(tree: sx.samplers.Tree, m: int, x: torch.Tensor) -> Draw:
    draw = Sampler._sample_shared(tree, x, m, None, None, None, None)
    return draw.ids, draw.log_q


def by_multinomial(tree: sx.samplers.Tree, weights: torch.Tensor, bias: torch.Tensor, m: int, x: torch.Tensor) -> Draw:
    """Every class: [B, 2^depth] sigmoids, multiplied level by level, their mean over the rows, torch.multinomial."""
    right = torch.sigmoid(torch.addmm(bias, x, weights.T))
    p = torch.ones(x.shape[0], 1, device=x.device)
    first = 1
    while first < weights.shape[0]:
        on_right = p * right[:, first : 2 * first]
        p = torch.stack([p - on_right, on_right], 2).flatten(1)
        first *= 2
    q = p.mean(0)
    leaves = torch.multinomial(q, m, replacement=True)
    return tree.leaf_class[leaves], q[leaves].log()


def refcheck(tree: sx.samplers.Tree, x: torch.Tensor, steps: dict[str, Callable[[torch.Tensor], Draw]]) -> str:
    """log_q of each side's own draws against fp64: log-sigmoids along their paths, the mean over the rows."""
    weights, bias = (t.double() for t in tree.parameters_of_nodes())
    worst = 0.0
    for name, step in steps.items():
        ids, log_q = step(x)
        leaf = tree.class_leaf[ids] + weights.shape[0]
        log_p = torch.zeros(x.shape[0], ids.shape[0], dtype=torch.float64, device=x.device)
        for level in range(tree.depth):
            node, right = leaf >> (tree.depth - level), (leaf >> (tree.depth - level - 1)) & 1
            z = torch.addmm(bias[node], x.double(), weights[node].T)
            log_p += nnf.logsigmoid(torch.where(right == 1, z, -z))
        want = log_p.logsumexp(0) - torch.tensor(float(x.shape[0]), dtype=torch.float64).log()
        worst = max(worst, check_close(f"{name} log_q", log_q, want, 1e-5))
    return f"log_q of each side's draws vs fp64: {worst:.1e}"


def main() -> int:
    options = common_options(__doc__).parse_args()
    device = set_up(options)
    on_cpu = device.type == "cpu"
    name = "tree_shared" if on_cpu else f"tree_shared_{device.type}"
    report = Report(name, device, store=not (options.quick or options.no_store))
    time = functools.partial(interleave, device=device, seconds=options.seconds, min_rounds=2 if options.quick else 5)
    sets = [torch.randn(BATCH, DIM, device=device) for _ in range(SETS)]

    def side(name: str, step: Callable[[torch.Tensor], Any]) -> Side:
        return Side(name, lambda i: step(sets[i % SETS]))

    def add(row_id: str, what: str, sides: list[Side], checked: str, **about: Any) -> None:
        about["config"] = {"B": BATCH, "m": M, "C": 1 << DEPTH, "k": DIM}
        report.add(comparison_row(row_id, what, sides, checked, time(sides), on_cpu, **about))

    tree = make_tree(sx.samplers.Tree, device)
    mine = functools.partial(ours, tree, M)
    if wanted(options, "multinomial"):
        other = functools.partial(by_multinomial, tree, *tree.parameters_of_nodes(), M)
        checked = refcheck(tree, sets[0], {"ours": mine, "multinomial": other})
        sides = [side("ours", mine), side("multinomial", other)]
        what = f"{M} draws for {BATCH} rows, C = 2^17, vs every class and torch.multinomial"
        add("multinomial", what, sides, checked, target=20.0)
    if wanted(options, "by_rows"):
        other = functools.partial(by_rows, make_tree(ByRows, device), M)
        checked = refcheck(tree, sets[0], {"ours": mine, "by rows": other})
        sides = [side("ours", mine), side("by rows", other)]
        add("by_rows", f"{M} draws for {BATCH} rows, C = 2^17, vs a random row for each draw", sides, checked)
    if wanted(options, "strata"):
        in_strata = functools.partial(tree.sample, num_samples=M, shared=True, stratified=True)
        checked = refcheck(tree, sets[0], {"strata": lambda x: in_strata(x)[:2]})
        sides = [side(n, functools.partial(merged, tree, M, n == "strata")) for n in ("strata", "independent")]
        add("strata", f"{M} shared draws and merging them, C = 2^17, strata vs independent", sides, checked)
    if wanted(options, "bfloat16"):
        half = make_tree(sx.samplers.Tree, device, torch.bfloat16)
        checked = refcheck(half, sets[0], {"ours": functools.partial(ours, half, M)})
        sides = [side("bfloat16", functools.partial(ours, half, M)), side("float32", mine)]
        add("bfloat16", "shared draws, nodes in bfloat16 vs float32, C = 2^17", sides, checked)
    if wanted(options, "draws"):
        few = functools.partial(ours, tree, FEW)
        checked = refcheck(tree, sets[0], {"many": mine, "few": few})
        sides = [side("many", mine), side("few", few)]
        what = f"shared draws, time at m = {M} / at m = {FEW}"
        add("draws", what, sides, checked, inverse=True, unit="ratio", sense="<=")
    code = report.finish(fail=not options.no_fail)
    write_readme(report, options)
    return code


if __name__ == "__main__":
    sys.exit(main())
