"""Draws from the decision tree against two ways to write them in torch.

Rows (--only takes any part of a name), 256 x 64 draws with log_q, k = 16 projected features:
  multinomial    C = 2^17, vs the probability of every class (one matmul, log-sigmoids down the levels) and multinomial
  levels         C = 2^17, vs a vectorised loop over the levels: gather, bmm, sigmoid, rand
  exclude        C = 2^17, the cost of leaving out the target, exactly, vs drawing with it
  bfloat16       C = 2^17, nodes in bfloat16 vs in float32
  depth          time at C = 2^20 / time at C = 2^10
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as nnf
from _harness import Report, Row, Side, check_close, common_options, interleave, set_up, wanted, write_readme

import samplex_cuda as sx

BATCH, M, DIM, SETS = 256, 64, 16, 8
Draw = tuple[torch.Tensor, torch.Tensor]


def make_tree(depth: int, device: torch.device, dtype: torch.dtype = torch.float32) -> sx.samplers.Tree:
    g = torch.Generator().manual_seed(depth)
    leaves = 1 << depth
    weights, bias = torch.randn(leaves, DIM, generator=g) * 0.5, torch.randn(leaves, generator=g) * 0.3
    return sx.samplers.Tree(weights, bias, torch.randperm(leaves, generator=g), dtype=dtype).to(device)


def ours(tree: sx.samplers.Tree, x: torch.Tensor, exclude: torch.Tensor | None = None) -> Draw:
    draw = tree.sample(x, M, exclude=exclude)
    return draw.ids, draw.log_q


def by_multinomial(tree: sx.samplers.Tree, weights: torch.Tensor, bias: torch.Tensor, x: torch.Tensor) -> Draw:
    """Every class: [B, 2^depth] scores, log-sigmoids summed level by level, then torch.multinomial."""
    z = x @ weights.T + bias
    log_p = torch.zeros(x.shape[0], 1, device=x.device)
    first = 1
    while first < weights.shape[0]:
        here = z[:, first : 2 * first]
        log_p = (log_p.unsqueeze(2) + torch.stack([nnf.logsigmoid(-here), nnf.logsigmoid(here)], 2)).flatten(1)
        first *= 2
    leaves = torch.multinomial(log_p.exp(), M, replacement=True)
    return tree.leaf_class[leaves], log_p.gather(1, leaves)


def by_levels(tree: sx.samplers.Tree, weights: torch.Tensor, bias: torch.Tensor, x: torch.Tensor) -> Draw:
    """All draws down one level at a time."""
    node = torch.ones(x.shape[0], M, dtype=torch.int64, device=x.device)
    log_q = torch.zeros(x.shape[0], M, device=x.device)
    for _ in range(tree.depth):
        z = torch.bmm(weights[node], x.unsqueeze(2)).squeeze(2) + bias[node]
        right = torch.rand_like(z) < torch.sigmoid(z)
        log_q += nnf.logsigmoid(torch.where(right, z, -z))
        node = 2 * node + right
    return tree.leaf_class[node - weights.shape[0]], log_q


def refcheck(tree: sx.samplers.Tree, x: torch.Tensor, steps: dict[str, Callable[[torch.Tensor], Draw]]) -> str:
    """log_q of each side's own draws against log-sigmoids in fp64 along their paths."""
    weights, bias = (t.double() for t in tree.parameters_of_nodes())
    worst = 0.0
    for name, step in steps.items():
        ids, log_q = step(x)
        leaf = tree.class_leaf[ids] + weights.shape[0]
        want = torch.zeros(ids.shape, dtype=torch.float64, device=x.device)
        for level in range(tree.depth):
            node, right = leaf >> (tree.depth - level), (leaf >> (tree.depth - level - 1)) & 1
            z = torch.bmm(weights[node], x.double().unsqueeze(2)).squeeze(2) + bias[node]
            want += nnf.logsigmoid(torch.where(right == 1, z, -z))
        worst = max(worst, check_close(f"{name} log_q", log_q, want, 1e-5))
    return f"log_q of each side's draws vs fp64: {worst:.1e}"


def main() -> int:
    options = common_options(__doc__).parse_args()
    device = set_up(options)
    on_cpu = device.type == "cpu"
    report = Report("tree" if on_cpu else f"tree_{device.type}", device, store=not (options.quick or options.no_store))
    time = functools.partial(interleave, device=device, seconds=options.seconds, min_rounds=2 if options.quick else 5)
    sets = [torch.randn(BATCH, DIM, device=device) for _ in range(SETS)]
    targets = [torch.randint(1 << 10, (BATCH,), device=device) for _ in range(SETS)]

    def side(name: str, step: Callable[..., Draw], *more: list[Any]) -> Side:
        return Side(name, lambda i: step(sets[i % SETS], *(m[i % SETS] for m in more)))

    def add(row_id: str, what: str, sides: list[Side], checked: str, **about: Any) -> None:
        got = time(sides)
        value, low, high = got.ratio(sides[1].name, sides[0].name)
        if about.pop("inverse", False):
            value, low, high = 1 / value, 1 / high, 1 / low
        if not on_cpu:
            about.pop("target", None)
        report.add(
            Row(
                row_id,
                what,
                value,
                about.pop("unit", "x"),
                checked,
                ours=got.times[sides[0].name],
                other=got.times[sides[1].name],
                other_name=sides[1].name,
                spread=(low, high),
                config={"B": BATCH, "m": M, "k": DIM},
                **about,
            )
        )

    tree = make_tree(17, device)
    weights, bias = tree.parameters_of_nodes()
    mine = functools.partial(ours, tree)
    for row_id, peer, target, what in (
        ("multinomial", by_multinomial, 100.0, "every class and torch.multinomial"),
        ("levels", by_levels, 8.0, "a torch loop over the levels"),
    ):
        if wanted(options, row_id):
            other = functools.partial(peer, tree, weights, bias)
            checked = refcheck(tree, sets[0], {"ours": mine, row_id: other})
            sides = [side("ours", mine), side(row_id, other)]
            add(row_id, f"{BATCH} x {M} draws, C = 2^17, vs {what}", sides, checked, target=target)
    if wanted(options, "exclude"):
        checked = refcheck(tree, sets[0], {"ours": mine})
        excluded = [side("excluding", functools.partial(ours, tree), targets), side("ours", mine)]
        what = "draws that exclude the target / draws that do not, C = 2^17"
        add("exclude", what, excluded, checked, inverse=True, unit="ratio", sense="<=")
    if wanted(options, "bfloat16"):
        half = make_tree(17, device, torch.bfloat16)
        checked = refcheck(half, sets[0], {"ours": functools.partial(ours, half)})
        sides = [side("bfloat16", functools.partial(ours, half)), side("float32", mine)]
        add("bfloat16", "nodes in bfloat16 vs float32, C = 2^17", sides, checked)
    if wanted(options, "depth"):
        deep, shallow = make_tree(20, device), make_tree(10, device)
        checked = refcheck(deep, sets[0], {"ours": functools.partial(ours, deep)})
        sides = [side("2^20", functools.partial(ours, deep)), side("2^10", functools.partial(ours, shallow))]
        what = "time at C = 2^20 / at C = 2^10"
        add("depth", what, sides, checked, inverse=True, unit="ratio", sense="<=", target=4.0)
    code = report.finish(fail=not options.no_fail)
    write_readme(report, options)
    return code


if __name__ == "__main__":
    sys.exit(main())
