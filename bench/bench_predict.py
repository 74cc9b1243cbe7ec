"""Exact top-k and top-k among candidates.

topk                 top-10 of C = 1,000,000, d = 128, B = 64: time / (h @ W.T).topk(10)
topk_memory          peak memory above the start / that of the other
tree                 top-10 among tree candidates on the built-in data, C = 200,000: exact time / time
tree_precision       its precision@1 as a share of that of the exact top-10
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _harness import (
    Report,
    Row,
    Side,
    check_close,
    common_options,
    interleave,
    make_table,
    set_up,
    wanted,
    write_readme,
)

import samplex_cuda as sx
from samplex_cuda.data import HierarchicalZipf
from samplex_cuda.prediction import exact_topk
from samplex_cuda.tree_fit import balance

DIM = 128
# The candidates: features as in bench_tree.py.
WIDTH = 512
NOISE = 0.6
BEAM = 64
TREE_DIM = 32


# ----------------------------------------------------------------------------------------------------- top-k
class Topk:
    def __init__(self, classes: int, batch: int, device: torch.device) -> None:
        self.weight = make_table(classes, DIM, device=device)
        # Copies of one block of rows would be ties in every block.
        for begin in range(0, classes, 1 << 16):
            self.weight[begin : begin + (1 << 16)] += 0.1 * torch.randn(1, DIM, device=device)
        self.h = torch.randn(batch, DIM, device=device)

    def ours(self, _: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        return exact_topk(self.h, self.weight, 10)

    def other(self, _: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        return (self.h @ self.weight.t()).topk(10)

    def refcheck(self) -> str:
        """Values of both against fp64, and each id's logit against its value."""
        want = torch.cat([(row @ self.weight.double().t()).topk(10).values for row in self.h.double().split(8)])
        worst = 0.0
        for values, ids in (self.ours(), self.other()):
            worst = max(worst, check_close("values", values, want, 1e-5))
            exact = torch.einsum("bd,bnd->bn", self.h.double(), self.weight[ids].double())
            check_close("logits of the ids", values, exact, 1e-5)
        return f"values and ids of both vs fp64: {worst:.1e}"


# ----------------------------------------------------------------------------------------------------- candidates
class Candidates:
    """The built-in data, a head from it in closed form, and a tree fitted to it."""

    def __init__(self, classes: int, examples: int, device: torch.device) -> None:
        data = HierarchicalZipf(classes, WIDTH, examples, seed=1, num_valid=8192, noise=NOISE)
        x, y = data.split("train")
        self.x, self.y = (t.to(device) for t in data.split("valid"))
        # Linear discriminants: class means, drawn to 0 where there are few examples, and log-frequencies.
        count = torch.bincount(y, minlength=classes).float()
        mean = torch.zeros(classes, WIDTH).index_add_(0, y, x) / (count + NOISE**2).unsqueeze(1)
        precision = WIDTH / NOISE**2
        few = balance(x, y, classes)
        self.tree = sx.samplers.Tree.fit(*few, num_classes=classes, dim=TREE_DIM, reg=1e-3).to(device)
        self.head = sx.SampledClassifier(WIDTH, classes, loss="full_softmax", device=device).eval()
        with torch.no_grad():
            self.head.weight.copy_(precision * mean)
            prior = torch.where(count > 0, count.clamp(min=1).log(), -100.0)
            self.head.bias.copy_(prior - 0.5 * precision * mean.square().sum(1))

    def exact(self, batch: int, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.head.topk(self._rows(batch, i), 10)

    def ours(self, batch: int, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.head.topk(self._rows(batch, i), 10, candidates="tree", tree=self.tree, beam=BEAM)

    def _rows(self, batch: int, i: int) -> torch.Tensor:
        begin = i * batch % len(self.x)
        return self.x[begin : begin + batch]

    def precision(self) -> tuple[float, float, str]:
        """precision@1 of the candidates and of the exact answer on the validation split, and a check of the logits."""
        right = {"ours": 0, "exact": 0}
        worst = 0.0
        for i in range(len(self.x) // 256):
            exact, ours = self.exact(256, i), self.ours(256, i)
            target = self._rows(256, i).shape[0] * i
            y = self.y[target : target + 256]
            right["exact"] += int((exact[1][:, 0] == y).sum())
            right["ours"] += int((ours[1][:, 0] == y).sum())
            same = exact[1] == ours[1]
            worst = max(worst, check_close("logits of equal ids", ours[0][same], exact[0][same].double(), 1e-4))
            if bool((ours[0][:, 0] > exact[0][:, 0] + 1e-2).any()):
                raise AssertionError("refcheck tree: a candidate above the exact maximum")
        n = len(self.x) // 256 * 256
        return right["ours"] / n, right["exact"] / n, f"logits of equal ids vs exact: {worst:.1e}"


# ----------------------------------------------------------------------------------------------------- memory
def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    return 0


PROBLEMS: dict[str, Callable[[int, int, torch.device], Any]] = {"topk": Topk}


def memory_child(name: str, side: str, classes: int, batch: int, threads: int) -> None:
    torch.set_num_threads(threads)
    cpu = torch.device("cpu")
    getattr(PROBLEMS[name](1000, 16, cpu), side)()  # thread pools and lazily loaded code come before
    step = getattr(PROBLEMS[name](classes, batch, cpu), side)
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is resident now
    result = step()
    extra = _status("VmHWM") - before - sum(t.nbytes for t in result)
    print(json.dumps({"extra_bytes": max(0, extra)}))


def memory(name: str, classes: int, batch: int, threads: int) -> dict[str, int]:
    got = {}
    for side in ("ours", "other"):
        command = [sys.executable, __file__, "--memory-child", name, side, str(classes), str(batch), str(threads)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        got[side] = json.loads(done.stdout.splitlines()[-1])["extra_bytes"]
    return got


# ----------------------------------------------------------------------------------------------------- rows
def main() -> int:
    if "--memory-child" in sys.argv:
        name, side, *sizes = sys.argv[2:]
        memory_child(name, side, *map(int, sizes))
        return 0
    options = common_options(__doc__).parse_args()
    device = set_up(options)
    name = "predict" if device.type == "cpu" else f"predict_{device.type}"
    report = Report(name, device, store=not (options.quick or options.no_store))
    rounds = 2 if options.quick else 5

    def compare(sides: list[Side]) -> Any:
        return interleave(sides, device=device, seconds=options.seconds, min_rounds=rounds)

    cases = (("topk", 1_000_000, 64, "(h @ W.T).topk(10)", "exact top-10", 1.0, 1 / 20),)
    for row_id, classes, batch, peer, what, time_target, memory_target in cases:
        if options.quick:
            classes //= 10
        config = {"C": classes, "d": DIM, "B": batch}
        where = f"C = {classes:,}, d = {DIM}, B = {batch}"
        checked = ""
        if wanted(options, row_id) or wanted(options, f"{row_id}_memory"):
            checked = PROBLEMS[row_id](classes // 10, batch, device).refcheck()
        if wanted(options, row_id):
            problem = PROBLEMS[row_id](classes, batch, device)
            got = compare([Side("ours", problem.ours), Side("other", problem.other)])
            value, low, high = got.ratio("ours", "other")
            report.add(
                Row(
                    row_id,
                    f"{what}, {where}: time / {peer}",
                    value,
                    "ratio",
                    checked,
                    sense="<=",
                    target=time_target,
                    ours=got.times["ours"],
                    other=got.times["other"],
                    other_name=peer,
                    spread=(low, high),
                    config=config,
                )
            )
            del problem
        if wanted(options, f"{row_id}_memory") and Path("/proc/self/clear_refs").exists() and device.type == "cpu":
            bytes_of = memory(row_id, classes, batch, options.threads)
            mib = {f"{side}_mib": value / 2**20 for side, value in bytes_of.items()}
            report.add(
                Row(
                    f"{row_id}_memory",
                    f"{what}, {where}: peak memory of intermediates / {peer}",
                    bytes_of["ours"] / bytes_of["other"],
                    "ratio",
                    checked,
                    sense="<=",
                    target=memory_target,
                    config={**config, **mib},
                    note=f"{mib['ours_mib']:.0f} MiB against {mib['other_mib']:.0f}",
                )
            )
    if wanted(options, "tree") or wanted(options, "tree_precision"):
        classes, examples = (20_000, 100_000) if options.quick else (200_000, 1_000_000)
        problem = Candidates(classes, examples, device)
        ours, exact, checked = problem.precision()
        config = {"C": classes, "d": WIDTH, "B": 256, "examples": examples, "beam": BEAM, "tree_dim": TREE_DIM}
        where = f"C = {classes:,}, d = {WIDTH}, beam {BEAM}"
        sides = [
            Side("ours", functools.partial(problem.ours, 256)),
            Side("exact", functools.partial(problem.exact, 256)),
        ]
        got = compare(sides)
        value, low, high = got.ratio("exact", "ours")
        report.add(
            Row(
                "tree",
                f"top-10 among tree candidates, {where}: vs exact",
                value,
                "x",
                checked,
                target=20.0,
                ours=got.times["ours"],
                other=got.times["exact"],
                other_name="exact top-10 of ours",
                spread=(low, high),
                config=config,
            )
        )
        report.add(
            Row(
                "tree_precision",
                f"top-10 among tree candidates, {where}: precision@1 / exact",
                100 * ours / exact,
                "%",
                checked,
                target=95.0,
                config={**config, "precision": ours, "exact_precision": exact},
                note=f"{ours:.3f} against {exact:.3f}",
            )
        )
    code = report.finish(fail=not options.no_fail)
    write_readme(report, options)
    return code


if __name__ == "__main__":
    sys.exit(main())
