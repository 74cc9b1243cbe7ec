"""What `profile_cuda.py` runs in a child process: the ops under an emulated CUDA runtime, their launches counted."""

from __future__ import annotations

import ctypes
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import torch

from samplex_cuda.optim import rules

BATCH, M, CLASSES = 32, 64, 20_000
LIMITS = {128: 6.0, 512: 4.0}  # thread instructions per gathered element
DEPTH, FEATURES = 17, 16
TREE_SECTORS = {"float32": 3.3, "bfloat16": 2.2}  # sectors loaded per draw and level
# B, d, D: whole tiles in every direction; D = 0 is the quadratic map.
RFF_CASES = {"rff_narrow": (64, 128, 512), "rff_wide": (256, 32, 4096), "rff_quadratic": (32, 64, 0)}
RFF_TILE_COLUMNS = 128
KERNEL_TREE_CLASSES, KERNEL_TREE_DIM, KERNEL_TREE_FEATURES, KERNEL_TREE_CHANGED = 1 << 15, 64, 128, 512
# Draws by the source that makes them: what `run_draw` runs, and how much of it is fp64.
DRAWS = {
    "uniform": "static_sample",
    "log_uniform": "static_sample",
    "unigram": "static_sample",
    "bigram": "bigram_sample",
    "subset": "subset_sample",
    "tree": "tree",
    "tree_base": "tree",
    "tree_shared": "tree_shared",
    "tree_stratified_shared": "tree_shared",
    "kernel_tree": "kernel_tree",
    "kernel_tree_shared": "kernel_tree",
    "midx": "midx_sample",
    "softmax": "exact_sample",
}
# Instructions of the fp64 unit that a PTX instruction becomes; moves, loads and selects do not use it.
FP64_COST = {"div": 10, "rcp": 8, "sqrt": 10}
FP64_COST |= dict.fromkeys(("add", "sub", "mul", "fma", "mad", "setp", "set", "min", "max", "cvt"), 1)
KERNEL_TREE_KERNELS = {"draw": "sample", "update": "leaves", "parents": "parents"}


def child(ptxrun_dir: str, ptx: str, case: str) -> None:
    """Runs an op under the hook and prints the counters of each launch as JSON. `case`: see the functions."""
    sys.path.insert(0, ptxrun_dir)
    import ptxrun

    import samplex_cuda  # noqa: F401  loads the library before the hook is asked for

    module = ptxrun.Module(Path(ptx).read_text())
    unsupported = module.unsupported()
    if unsupported:
        raise SystemExit(f"profile_cuda: the emulator cannot execute:\n{unsupported[:2000]}")
    # Large tables are mapped by the library itself: the emulator does not know their bounds.
    ptxrun.option(profile=1, random=0, race=0, threads=1, bounds=0)
    launches: list[dict[str, Any]] = []

    callback_type = ctypes.CFUNCTYPE(
        ctypes.c_int,
        ctypes.c_char_p,
        ctypes.POINTER(ctypes.c_uint),
        ctypes.POINTER(ctypes.c_uint),
        ctypes.c_uint,
        ctypes.c_void_p,
    )

    @callback_type
    def on_launch(name: bytes, grid: Any, block: Any, smem: int, args: int) -> int:
        index = ptxrun.lib().ptxrun_find(module.h, name)
        if index < 0:
            return 1
        module.counters(reset=True)
        code = ptxrun.lib().ptxrun_launch(module.h, index, grid, block, smem, args)
        if code != 0:
            # The library asks the runtime for errors, which does not know of this launch.
            print(ptxrun.lib().ptxrun_log().decode(), file=sys.stderr, flush=True)
            os._exit(1)
        rows = [r for r in module.counters(reset=True) if r["exec"]]
        loads = [r for r in rows if r["kind"] == 1 and r["sectors"]]
        launches.append(
            {
                "kernel": demangled(module, name.decode()),
                "grid": list(grid[:3]),
                "block": list(block[:3]),
                "smem": smem,
                "sectors": sum(r["sectors"] for r in loads),
                "thread_instructions": sum(r["lanes"] for r in rows),
                "warp_instructions": sum(r["exec"] for r in rows),
                "bank_extra": sum(r["ways"] - r["groups"] for r in rows if r["groups"] > 0),
                "hot": hot_lines(rows),
                "opcodes": opcodes(rows),
                "fp64": fp64_instructions(rows),
            }
        )
        return 0

    ctypes.CDLL(None).samplex_hook(on_launch)
    torch.manual_seed(0)
    if case.startswith("draw:"):
        result = run_draw(case.removeprefix("draw:"), launches)
    elif case == "kernel_tree":
        result = run_kernel_tree(launches)
    elif case == "row_rules":
        result = run_optim(launches)
    elif case in RFF_CASES:
        result = run_rff(case, launches)
    else:
        result = run_tree(case, launches) if case in TREE_SECTORS else run_sampled_softmax(case, launches)
    print("RESULT " + json.dumps(result))


def width_and_dtype(case: str) -> tuple[int, str]:
    """`128` or `4096:bfloat16`."""
    dim, _, dtype = case.partition(":")
    return int(dim), dtype or "float32"


def run_sampled_softmax(case: str, launches: list[dict[str, Any]]) -> dict[str, Any]:
    """Forward, training and no_grad, of rows of a width and dtype; `sphere:128`: of unit rows with a margin."""
    import samplex_cuda as sx
    from samplex_cuda import functional as sxf
    from samplex_cuda.ops.sphere import unit_rows

    # All ids different: then no row is shared and the fewest possible sectors are known exactly.
    unit, case = case.startswith("sphere:"), case.removeprefix("sphere:")
    dim, dtype = width_and_dtype(case)
    options: dict[str, Any] = {"normalize": True, "margin": sx.losses.CosFace(0.25)} if unit else {}
    classes = min(CLASSES, (1 << 24) // dim)
    perm = torch.randperm(classes)[: BATCH * (M + 1)]
    target, ids = perm[:BATCH].clone(), perm[BATCH:].view(BATCH, M).clone()
    h = torch.randn(BATCH, dim).to(getattr(torch, dtype))
    weight = (torch.randn(classes, dim) * dim**-0.5).to(h.dtype)
    log_q = torch.full((BATCH, M), -math.log(classes))
    exact = weight.double()
    exact = exact / exact.norm(dim=1, keepdim=True) if unit else exact
    query = (unit_rows(h) if unit else h).double()
    logits = torch.einsum("bmd,bd->bm", exact[ids], query) + math.log(classes) - math.log(M)
    positive = (exact[target] * query).sum(1) - (0.25 * query.norm(dim=1) if unit else 0.0)
    want = (torch.logsumexp(torch.cat([positive[:, None], logits], 1), 1) - positive).mean()
    result: dict[str, Any] = {}
    for mode in ("training", "no_grad"):
        launches.clear()
        trains = mode == "training"
        with torch.set_grad_enabled(trains):
            loss = sxf.sampled_softmax(
                h.clone().requires_grad_(trains), weight.clone().requires_grad_(trains), target, ids, log_q, **options
            )
        error = float((loss.detach().double() - want).abs() / want.abs())
        if not error <= max(1e-5, torch.finfo(loss.dtype).eps):  # a 16-bit loss is rounded
            raise SystemExit(f"profile_cuda: refcheck: the loss is off by {error:.1e} ({mode}, d = {dim}, {dtype})")
        result[mode] = {"launches": list(launches), "error": error}
    return result


def run_tree(dtype: str, launches: list[dict[str, Any]]) -> dict[str, Any]:
    """Draws without exclusion."""
    import samplex_cuda as sx

    leaves = 1 << DEPTH
    tree = sx.samplers.Tree(
        torch.randn(leaves, FEATURES) * 0.5,
        torch.randn(leaves) * 0.3,
        torch.randperm(leaves),
        dtype=getattr(torch, dtype),
    )
    x = torch.randn(BATCH, FEATURES)
    draw = tree.sample(x, M, key=sx.Key(1))
    weights, bias = (t.double() for t in tree.parameters_of_nodes())
    leaf, want = tree.class_leaf[draw.ids] + leaves, torch.zeros(BATCH, M, dtype=torch.float64)
    for level in range(DEPTH):
        node, right = leaf >> (DEPTH - level), (leaf >> (DEPTH - level - 1)) & 1
        z = torch.einsum("bmk,bk->bm", weights[node], x.double()) + bias[node]
        want += torch.nn.functional.logsigmoid(torch.where(right == 1, z, -z))
    error = float(((draw.log_q.double() - want).abs() / want.abs()).max())
    if not error <= 1e-5:
        raise SystemExit(f"profile_cuda: refcheck: log_q is off by {error:.1e} ({dtype})")
    return {"draw": {"launches": list(launches), "error": error}}


def run_draw(name: str, launches: list[dict[str, Any]]) -> dict[str, Any]:
    """Draws of one kind, the target excluded where the sampler can."""
    import samplex_cuda as sx
    from samplex_cuda import _native
    from samplex_cuda.ops.subset_sample import subset_sample

    classes, dim, shared = 1 << 15, KERNEL_TREE_DIM, name.endswith("_shared")
    h, target = torch.nn.functional.normalize(torch.randn(BATCH, dim), dim=1), torch.randint(classes, (BATCH,))
    options: dict[str, Any] = {"key": sx.Key(1), "shared": shared, "exclude": None if shared else target}
    if name == "subset":
        subset_sample(sx.Key(1).reserve(), BATCH, M, classes, target)
        return {"draw": {"launches": list(launches), "draws": BATCH * M}}
    if name.startswith(("kernel_tree", "midx", "softmax")):
        weight = torch.nn.functional.normalize(torch.randn(classes, dim), dim=1)
        _native.set_cpu_backend("cpu")
        if name.startswith("kernel_tree"):
            sampler: Any = sx.samplers.RandomFourier(weight, KERNEL_TREE_FEATURES, 1.0, key=sx.Key(1))
        elif name.startswith("midx"):
            sampler = sx.samplers.MIDX(weight, 32, key=sx.Key(1))
        else:
            sampler = sx.samplers.Softmax(weight, copy=True)
        _native.set_cpu_backend("cuda")
    elif name.startswith("tree"):
        h = torch.randn(BATCH, FEATURES)
        nodes, bias, order = torch.randn(classes, FEATURES) * 0.5, torch.randn(classes) * 0.3, torch.randperm(classes)
        base = sx.samplers.Unigram(torch.randint(1, 99, (classes,))) if name.endswith("base") else None
        sampler = sx.samplers.Tree(nodes, bias, order, base=base)
        if "stratified" in name:
            options["stratified"] = True
    elif name == "bigram":
        pairs = torch.randint(classes, (classes, 2), dtype=torch.int64).sort(dim=1).values
        pairs[:, 1] += (pairs[:, 0] == pairs[:, 1]) & (pairs[:, 1] < classes - 1)
        counts = torch.randint(1, 9, (classes * 2,))
        offsets = torch.arange(0, 2 * classes + 1, 2)
        sampler = sx.samplers.Bigram(offsets, pairs.reshape(-1), counts, torch.randint(1, 99, (classes,)))
        options["context"] = target
    elif name == "unigram":
        sampler = sx.samplers.Unigram(torch.randint(1, 99, (classes,)))
    else:
        sampler = {"uniform": sx.samplers.Uniform, "log_uniform": sx.samplers.LogUniform}[name](classes)
    launches.clear()
    sampler.sample(h, M, **options)
    return {"draw": {"launches": list(launches), "draws": M if shared else BATCH * M}}


def run_rff(case: str, launches: list[dict[str, Any]]) -> dict[str, Any]:
    """Features of unit rows, and the gradient of the rows."""
    import samplex_cuda as sx
    from samplex_cuda.reference.rff import rff as reference

    batch, dim, num_features = RFF_CASES[case]
    x = torch.nn.functional.normalize(torch.randn(batch, dim), dim=1).requires_grad_()
    omega = sx.rff.frequencies(dim, num_features, nu=4.0, key=sx.Key(1)) if num_features else None
    kind = "rff" if num_features else "quadratic"
    exact = x.detach().double().requires_grad_()
    want = reference(exact, None if omega is None else omega.double(), kind, alpha=100.0)
    grad = torch.randn(want.shape)
    want.backward(grad.double())
    features = sx.rff.features(x, omega, kind=kind, alpha=100.0)
    result = {"forward": {"launches": list(launches), "error": relative(features, want)}}
    launches.clear()
    features.backward(grad)
    result["backward"] = {"launches": list(launches), "error": relative(x.grad, exact.grad)}
    for mode, got in result.items():
        if not got["error"] <= 1e-5:
            raise SystemExit(f"profile_cuda: refcheck: the {mode} is off by {got['error']:.1e} ({case})")
    return result


def run_kernel_tree(launches: list[dict[str, Any]]) -> dict[str, Any]:
    """Draws, then an update: leaves and the nodes above them. The fewest sectors go with each."""
    from bench_kernel_tree import log_q_by_path, unit_rows

    import samplex_cuda as sx
    from samplex_cuda import _native

    cpu = torch.device("cpu")
    weight, h = unit_rows(KERNEL_TREE_CLASSES, KERNEL_TREE_DIM, cpu), unit_rows(BATCH, KERNEL_TREE_DIM, cpu, 1)
    _native.set_cpu_backend("cpu")
    tree = sx.samplers.RandomFourier(weight, KERNEL_TREE_FEATURES, 1.0, key=sx.Key(1))
    _native.set_cpu_backend("cuda")
    draw = tree.sample(h, M, key=sx.Key(1))
    error = relative(draw.log_q, log_q_by_path(tree, h, draw.ids))
    leaf, depth, stride = draw.ids // tree.leaf_size, tree.depth, tree.sums.shape[1]
    pairs = sum(len(set(row)) for level in range(7, depth) for row in (leaf >> (depth - level)).tolist())
    leaves = sum(len(set(row)) for row in leaf.tolist())
    numbers = pairs * 2 * stride + leaves * tree.leaf_size * tree.dim + BATCH * (stride + tree.dim)
    result = {"draw": {"launches": list(launches), "error": error, "fewest": numbers / 8}}
    launches.clear()
    ids = torch.randperm(KERNEL_TREE_CLASSES)[:KERNEL_TREE_CHANGED].sort().values
    weight[ids] = unit_rows(KERNEL_TREE_CHANGED, KERNEL_TREE_DIM, cpu, 2)
    tree.update(ids, weight[ids])
    changed = tree.sums.clone()
    found = list(launches)
    _native.set_cpu_backend("cpu")
    tree.rebuild(weight)
    error = relative(changed, tree.sums)
    touched = torch.unique(ids // tree.leaf_size)
    above = torch.unique(touched // 2).numel()
    numbers = (2 * KERNEL_TREE_CHANGED + touched.numel()) * stride + 2 * KERNEL_TREE_CHANGED
    result["update"] = {"launches": found, "error": error, "fewest": numbers / 8}
    result["parents"] = {
        "launches": found,
        "error": error,
        "fewest": (2 * above * stride + 2 * KERNEL_TREE_CHANGED) / 8,
    }
    for mode, got in result.items():
        if not got["error"] <= 2e-4:
            raise SystemExit(f"profile_cuda: refcheck: kernel tree, {mode}: off by {got['error']:.1e}")
    return result


def run_optim(launches: list[dict[str, Any]]) -> dict[str, Any]:
    """Adagrad on given rows, and on a loss's entries, each on a different row: the case with the fewest sectors."""
    from samplex_cuda.ops.row_rules import row_update_
    from samplex_cuda.reference.row_rules import row_adagrad

    dim, n = 128, BATCH * (M + 1)
    ids = torch.randperm(CLASSES)[:n]
    h, coef = torch.randn(BATCH, dim), torch.randn(BATCH, M + 1)
    weight, total = torch.randn(CLASSES, dim), torch.rand(CLASSES, dim)
    rows = (coef.unsqueeze(2) * h.unsqueeze(1)).reshape(n, dim)
    exact, sums = weight.double(), total.double()
    row_adagrad(exact, sums, ids, rows.double(), lr=0.1)
    rule = rules.adagrad(0.1, 1e-10, 0.0, False)
    by_row = ids.view(BATCH, M + 1)
    parts = [t.contiguous() for t in (by_row[:, :1], coef[:, :1], h, by_row[:, 1:], coef[:, 1:], h)]
    result = {}
    for mode in ("rows", "entries"):
        launches.clear()
        w, s = weight.clone(), total.clone()
        if mode == "rows":
            torch.ops.samplex.row_apply_(w, s, None, ids, rows, None, None, rules.adagrad(0.1, 1e-10, 0.0, False))
        else:
            row_update_(w, s, None, None, None, None, *parts, None, None, rule, rule)
        error = max(relative(w, exact), relative(s, sums))
        # Weight, sum and gradient (or h) of every row, and its id; of an entry also its place and its coefficient.
        fewest = n * (3 * dim / 8 + (8 if mode == "rows" else 20) / 32)
        result[mode] = {"launches": list(launches), "error": error, "fewest": fewest}
        if not error <= 1e-5:
            raise SystemExit(f"profile_cuda: refcheck: row update, {mode}: off by {error:.1e}")
    return result


def relative(got: Any, want: Any) -> float:
    return float((got.detach().double() - want.detach()).abs().max() / want.detach().abs().max())


def demangled(module: Any, name: str) -> str:
    mangled = module.kernels(demangle=False)
    text = module.kernels()[mangled.index(name)] if name in mangled else name
    return text.split("(")[0].removeprefix("void ")


def hot_lines(rows: list[dict[str, Any]], most: int = 20) -> list[list[Any]]:
    """Source lines with the most thread instructions: [file:line, thread instructions, sectors loaded]."""
    by_line: dict[str, list[int]] = {}
    for r in rows:
        place, _, line = r["src"].rpartition(":")
        entry = by_line.setdefault(f"{Path(place).name}:{line}", [0, 0])
        entry[0] += r["lanes"]
        entry[1] += r["sectors"] if r["kind"] == 1 else 0
    ranked = sorted(by_line.items(), key=lambda item: -item[1][0])[:most]
    return [[place, *counts] for place, counts in ranked]


def opcode(row: dict[str, Any]) -> str:
    """`add.f64`, without predicate and operands."""
    words = row["text"].split()
    if words and words[0].startswith("@"):  # a predicate
        words = words[1:]
    return words[0].rstrip(";") if words else "?"


def fp64_instructions(rows: list[dict[str, Any]]) -> int:
    """Warp instructions of the fp64 unit; a division counts as the ten that it becomes."""
    found = 0
    for r in rows:
        name, *types = opcode(r).split(".")
        if "f64" in types:
            found += FP64_COST.get(name, 0) * r["exec"]
    return found


def opcodes(rows: list[dict[str, Any]], most: int = 16) -> dict[str, int]:
    """Thread instructions by PTX opcode, the most frequent first."""
    counts: dict[str, int] = {}
    for r in rows:
        name = opcode(r)
        counts[name] = counts.get(name, 0) + r["lanes"]
    return dict(sorted(counts.items(), key=lambda item: -item[1])[:most])
