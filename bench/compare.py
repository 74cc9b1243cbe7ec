"""Every row of the benches in two checkouts, in turns: has anything become slower?

    python bench/compare.py OLD NEW [--benches step tree ...] [--rounds 3] [--seconds 1]

OLD and NEW are checkouts that have been built (`make build`), each with its own .venv; their bench/results are
overwritten, so take clones. A bench that one of them lacks is left out, and so is a row. What is compared is the time
of our own side, the median over the rounds. The result goes to bench/results/compare.json of this tree; rows that have
become more than 5 % slower are listed last. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
from pathlib import Path
from typing import Any

import torch
from _harness import RESULTS, machine

LIMIT = 1.05


def run(tree: Path, bench: str, seconds: float) -> dict[str, float]:
    """Milliseconds of our side of each row."""
    store = tree / "bench" / "results" / f"{bench}.json"
    store.unlink(missing_ok=True)
    command = [
        str(tree / ".venv" / "bin" / "python"),
        f"bench/bench_{bench}.py",
        "--no-fail",
        "--seconds",
        str(seconds),
    ]
    with open(os.devnull, "w") as null:
        subprocess.run(command, cwd=tree, stdout=null, stderr=null, check=False)
    if not store.exists():
        return {}
    rows = json.loads(store.read_text())["rows"]
    return {row["id"]: row["ours"]["median"] for row in rows if row.get("ours")}


def commit(tree: Path) -> str:
    """Of a checkout."""
    found = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"], cwd=tree, capture_output=True, text=True, check=True
    )
    return found.stdout.strip()


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--benches", nargs="+", help="default: all that both have")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0, help="for each comparison of a bench")
    args = parser.parse_args()
    trees = {"old": args.old.resolve(), "new": args.new.resolve()}
    names = [
        {path.stem.removeprefix("bench_") for path in (tree / "bench").glob("bench_*.py")} for tree in trees.values()
    ]
    times: dict[tuple[str, str], dict[str, list[float]]] = {}
    for bench in sorted(args.benches or names[0] & names[1]):
        for number in range(args.rounds):
            for which in ("old", "new") if number % 2 == 0 else ("new", "old"):
                for row, milliseconds in run(trees[which], bench, args.seconds).items():
                    times.setdefault((bench, row), {"old": [], "new": []})[which].append(milliseconds)
        for (of, row), both in times.items():
            if of == bench and both["old"] and both["new"]:
                before, after = (statistics.median(both[which]) for which in ("old", "new"))
                print(f"{bench:16} {row:28} {before:9.4g} ms -> {after:9.4g} ms  {after / before:.2f}", flush=True)
    rows: list[dict[str, Any]] = []
    for (bench, row), both in times.items():
        if both["old"] and both["new"]:
            ratios = [b / a for a, b in zip(both["old"], both["new"], strict=False)]
            rows.append(
                {"bench": bench, "row": row, "old_ms": statistics.median(both["old"]),
                 "new_ms": statistics.median(both["new"]), "spread": [min(ratios), max(ratios)]}
            )  # fmt: skip
    slower = [r for r in rows if r["new_ms"] > LIMIT * r["old_ms"]]
    found = {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "old": commit(trees["old"]), "new": commit(trees["new"]), "machine": machine(torch.device("cpu")),
        "rounds": args.rounds, "seconds": args.seconds, "rows": rows,
    }  # fmt: skip
    (RESULTS / "compare.json").write_text(json.dumps(found, indent=1) + "\n")
    print(f"\n{len(rows)} rows; slower by more than 5 %: {len(slower)}")
    for r in slower:
        print(
            f"  {r['bench']} {r['row']}: {r['new_ms'] / r['old_ms']:.2f} ({r['spread'][0]:.2f} to {r['spread'][1]:.2f})"
        )
    return 1 if slower else 0


if __name__ == "__main__":
    raise SystemExit(main())
