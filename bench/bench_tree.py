"""Draws from the decision tree against two ways to write them in torch.

Rows (--only takes any part of a name), 256 x 64 draws with log_q, k = 16 projected features:
  multinomial    C = 2^17, vs the probability of every class (one matmul, log-sigmoids down the levels) and multinomial
  levels         C = 2^17, vs a vectorized loop over the levels: gather, bmm, sigmoid, rand
  exclude        C = 2^17, the cost of leaving out the target, exactly, vs drawing with it
  bfloat16       C = 2^17, nodes in bfloat16 vs in float32
  base           C = 2^20, half class frequencies in the same op, vs the tree alone
  depth          time at C = 2^20 / time at C = 2^10
and a whole training step, C = 200,000, K = 512 features, B = 256: draws, loss of Eq. 6, row gradients
  step_m1, step_m16   vs the same in eager torch (the loop over the levels, F.embedding(sparse=True), bmm, softplus)
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
    make_table,
    set_up,
    wanted,
    write_readme,
)

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


def by_levels(tree: sx.samplers.Tree, weights: torch.Tensor, bias: torch.Tensor, x: torch.Tensor, m: int = M) -> Draw:
    """All draws down one level at a time."""
    node = torch.ones(x.shape[0], m, dtype=torch.int64, device=x.device)
    log_q = torch.zeros(x.shape[0], m, device=x.device)
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


# ----------------------------------------------------------------------------------------------------- a training step
CLASSES, FEATURES, REG = 200_000, 512, 1e-3
Step = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # loss, d_hidden, row gradients (coalesced COO [C, K])


def fitted_tree(device: torch.device) -> sx.samplers.Tree:
    """A random tree over 200,000 classes (the rest is padding) behind a projection of 512 features to 16."""
    g = torch.Generator().manual_seed(0)
    leaves = 1 << (CLASSES - 1).bit_length()
    weights, bias = torch.randn(leaves, DIM, generator=g) * 0.5, torch.randn(leaves, generator=g) * 0.3
    leaf_class = torch.full((leaves,), -1)
    leaf_class[:CLASSES] = torch.randperm(CLASSES, generator=g)
    inhabited = torch.zeros(2 * leaves, dtype=torch.bool)
    inhabited[leaves:] = leaf_class >= 0
    first = leaves // 2
    while first >= 1:
        inhabited[first : 2 * first] = inhabited[2 * first : 4 * first].view(-1, 2).any(1)
        first //= 2
    right = inhabited[1::2][:leaves]  # of node i, the child 2i + 1
    weights[~right], bias[~right] = 0.0, -torch.inf
    projection = torch.randn(FEATURES, DIM, generator=g) * FEATURES**-0.5
    return sx.samplers.Tree(weights, bias, leaf_class, mean=torch.zeros(FEATURES), projection=projection).to(device)


def our_step(tree: sx.samplers.Tree, weight: torch.Tensor, m: int, x: torch.Tensor, y: torch.Tensor) -> Step:
    draw, log_p = tree.sample_and_score(x, m, y)
    loss = sx.functional.negative_sampling(x, weight, y, draw.ids, draw.log_q, log_p, reg=REG)
    d_x, d_w = torch.autograd.grad(loss, (x, weight))
    return loss.detach(), d_x, d_w


def eager_loss(
    x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, ids: torch.Tensor, log_q: torch.Tensor, log_p: torch.Tensor
) -> torch.Tensor:
    rows = nnf.embedding(torch.cat([y[:, None], ids], 1), weight, sparse=weight.dtype == torch.float32)
    xi = torch.bmm(rows, x.unsqueeze(2)).squeeze(2)
    positive = nnf.softplus(-xi[:, 0]) + REG * (xi[:, 0] + log_p) ** 2
    return (positive + (nnf.softplus(xi[:, 1:]) + REG * (xi[:, 1:] + log_q) ** 2).mean(1)).mean()


def eager_step(
    tree: sx.samplers.Tree, nodes: Any, weight: torch.Tensor, m: int, x: torch.Tensor, y: torch.Tensor
) -> Step:
    with torch.no_grad():
        z = tree.project(x)
        ids, log_q = by_levels(tree, *nodes, z, m)
        leaf = tree.class_leaf[y] + nodes[0].shape[0]
        levels = torch.arange(tree.depth, device=x.device)
        path, right = leaf[:, None] >> (tree.depth - levels), (leaf[:, None] >> (tree.depth - levels - 1)) & 1
        at = torch.bmm(nodes[0][path], z.unsqueeze(2)).squeeze(2) + nodes[1][path]
        log_p = nnf.logsigmoid(torch.where(right == 1, at, -at)).sum(1)
    loss = eager_loss(x, weight, y, ids, log_q, log_p)
    d_x, d_w = torch.autograd.grad(loss, (x, weight))
    return loss.detach(), d_x, d_w.coalesce()


def check_step(tree: sx.samplers.Tree, weight: torch.Tensor, m: int, x: torch.Tensor, y: torch.Tensor) -> str:
    """Our step against fp64 on the rows it drew: the same key gives the same draws."""
    torch.manual_seed(3)
    loss, d_x, d_w = our_step(tree, weight, m, x, y)
    torch.manual_seed(3)
    draw = tree.sample(x, m)
    touched, at = torch.unique(torch.cat([y, draw.ids.reshape(-1)]), return_inverse=True)
    h, rows = x.detach().double().requires_grad_(), weight.detach()[touched].double().requires_grad_()
    ids = at[y.numel() :].view(draw.ids.shape)
    want = eager_loss(h, rows, at[: y.numel()], ids, draw.log_q.double(), tree.log_prob(x, y).double())
    d_h, d_rows = torch.autograd.grad(want, (h, rows))
    if not torch.equal(d_w.indices()[0], touched):
        raise AssertionError("refcheck step: the weight gradient holds other rows than the step touched")
    worst = max(
        check_close("loss", loss, want.detach(), 1e-5),
        check_close("d_x", d_x, d_h, 1e-4),
        check_close("row gradients", d_w.values(), d_rows, 1e-4),
    )
    return f"loss, d_x, row ids and row gradients vs fp64: {worst:.1e}"


def main() -> int:
    options = common_options(__doc__).parse_args()
    device = set_up(options)
    on_cpu = device.type == "cpu"
    report = Report("tree" if on_cpu else f"tree_{device.type}", device, store=not (options.quick or options.no_store))
    time = functools.partial(interleave, device=device, seconds=options.seconds, min_rounds=2 if options.quick else 5)
    sets = [torch.randn(BATCH, DIM, device=device) for _ in range(SETS)]
    targets = [torch.randint(1 << 10, (BATCH,), device=device) for _ in range(SETS)]

    def side(name: str, step: Callable[..., Any], *more: list[Any]) -> Side:
        return Side(name, lambda i: step(sets[i % SETS], *(m[i % SETS] for m in more)))

    def add(row_id: str, what: str, sides: list[Side], checked: str, **about: Any) -> None:
        about["config"] = {"B": BATCH, "m": M, "k": DIM}
        report.add(comparison_row(row_id, what, sides, checked, time(sides), on_cpu, **about))

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
    if wanted(options, "base"):
        bare, mixed = make_tree(20, device), make_tree(20, device)
        mixed.set_base(sx.samplers.Unigram(1e6 / (torch.arange(1 << 20) + 1.0) + 1.0), 0.5)
        drawn = mixed.sample(sets[0], M, key=sx.Key(1))
        want = (0.5 * bare.log_prob(sets[0], drawn.ids).double().exp()).cpu()
        units = mixed.base_units.double().cpu()
        want = (want + 0.5 * (units / units.sum())[drawn.ids.cpu()]).log()
        error = check_close("log q", drawn.log_q.cpu(), want, 1e-5)
        sides = [side("with a base", functools.partial(ours, mixed)), side("bare", functools.partial(ours, bare))]
        what = "draws of half tree, half frequencies / of the bare tree, C = 2^20"
        add("base", what, sides, f"log q within {error:.0e}", inverse=True, unit="ratio", sense="<=", target=1.6)
    if any(wanted(options, f"step_m{m}") for m in (1, 16)):
        tree = fitted_tree(device)
        nodes = tree.parameters_of_nodes()
        weight = make_table(CLASSES, FEATURES, device=device).requires_grad_(True)
        sets = [torch.randn(BATCH, FEATURES, device=device).requires_grad_(True) for _ in range(SETS)]
        labels = [torch.randint(CLASSES, (BATCH,), device=device) for _ in range(SETS)]
        for m, target in ((1, 5.0), (16, 8.0)):
            if wanted(options, f"step_m{m}"):
                step = functools.partial(our_step, tree, weight, m)
                other = functools.partial(eager_step, tree, nodes, weight, m)
                sides = [side("ours", step, labels), side("eager torch", other, labels)]
                what = f"training step with the tree, C = 200,000, K = 512, B = 256, m = {m}, vs eager"
                add(f"step_m{m}", what, sides, check_step(tree, weight, m, sets[0], labels[0]), target=target)
    code = report.finish(fail=not options.no_fail)
    write_readme(report, options)
    return code


if __name__ == "__main__":
    sys.exit(main())
