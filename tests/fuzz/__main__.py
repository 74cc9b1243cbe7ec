"""Random calls of every op and public function.

python tests/fuzz --calls 20000                 counts by function; exit status 1 if anything was found
python tests/fuzz --only 1:234                  one call: its arguments, result and verdict
python tests/fuzz --names "tree_*,samplers.*"   some functions only
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--calls", type=int, default=20_000, help="how many (default 20000)")
    parser.add_argument("--seed", type=int, default=1, help="another seed, other calls (default 1)")
    parser.add_argument("--first", type=int, default=0, help="number of the first call (default 0)")
    parser.add_argument("--jobs", type=int, default=2, help="child processes (default 2)")
    parser.add_argument("--only", metavar="SEED:NUMBER", help="run one call in this process and print everything")
    parser.add_argument("--names", help="comma-separated patterns of op and function names")
    parser.add_argument("--simd", choices=("scalar", "avx2", "avx512"), help="SIMD level of the kernels")
    parser.add_argument("--findings", type=Path, help="write every finding to this file, one JSON list per line")
    parser.add_argument("--plant", help=argparse.SUPPRESS)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


def _show(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return f"({', '.join(map(_show, value))})" if isinstance(value, tuple | list) else repr(value)
    head = f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    if value.is_meta or value.layout is not torch.strided:
        return f"{head} {value.device} {value.layout}"
    if max(value.shape, default=0) > 10_000:
        return head
    if not value.is_contiguous():
        head += f" strides {list(value.stride())}"
    return f"{head} {value.tolist()}"


def _one(text: str, names: list[str]) -> int:
    from samplex_fuzz.arena import Pool
    from samplex_fuzz.run import draw_call, run_call

    seed, _, number = text.partition(":")
    name, call, done, d = draw_call(int(seed), int(number), names)
    print(f"{name}, changed: {done or 'nothing'}")
    for key, value in call.args.items():
        print(f"  {key} = {_show(value)}")
    sys.stdout.flush()
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as noise:
        os.dup2(noise.fileno(), 2)
        try:
            verdict, said, _, out = run_call(call, done, d, Pool())
        finally:
            os.dup2(stderr, 2)
        noise.seek(0)
        printed = noise.read().decode(errors="replace")
    if printed and verdict in ("ok", "refused"):
        verdict, said = "bare", f"text on stderr: {printed}"
    print(f"result: {_show(out)}" if not isinstance(out, Exception) else f"raised {type(out).__name__}: {out}")
    print(f"{verdict}{': ' if said else ''}{said}")
    return verdict not in ("ok", "refused")


def _command(args: argparse.Namespace, number: int) -> str:
    text = f"python tests/fuzz --only {args.seed}:{number}"
    for name in ("names", "simd", "plant"):
        if getattr(args, name):
            text += f" --{name} '{getattr(args, name)}'"
    return text


def main() -> int:
    """Command line."""
    args = _arguments()
    from samplex_fuzz import pool, registry
    from samplex_fuzz.run import VERDICTS

    if args.child:
        pool.child(json.loads(args.child))
        return 0
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    patterns = args.names.split(",") if args.names else None
    registry.plant(args.plant)
    names = registry.select(patterns)
    if registry.missing():
        print(f"fuzz: ops without a generator in tests/fuzz: {', '.join(registry.missing())}", file=sys.stderr)
        return 1
    if not names:
        raise SystemExit(f"fuzz: --names must fit an op or function, got {args.names}")
    if args.only:
        registry.choose_kernels(args.simd)
        return _one(args.only, names)
    begin = time.monotonic()
    counts, findings = pool.fuzz(
        args.seed, args.calls, max(1, args.jobs), names, first=args.first, progress=sys.stderr.isatty(),
        only=patterns, plant=args.plant, simd=args.simd, limit_memory=not pool.SANITIZED,
    )  # fmt: skip
    seconds = time.monotonic() - begin
    if args.findings:
        args.findings.write_text("".join(json.dumps(finding) + "\n" for finding in findings))
    width = max(map(len, names))
    print(f"{'':{width}}" + "".join(f"{v:>9}" for v in VERDICTS))
    for name in names:
        print(f"{name:{width}}" + "".join(f"{counts[name][v]:>9}" for v in VERDICTS))
    total = [sum(counts[name][v] for name in names) for v in VERDICTS]
    print(f"{'sum':{width}}" + "".join(f"{n:>9}" for n in total))
    print(f"{sum(total)} calls in {seconds:.0f} s, seed {args.seed}")
    seen = set()
    for number, name, verdict, text in findings:
        if (name, verdict) not in seen:
            seen.add((name, verdict))
            line = " ".join(text.split())
            print(f"\n{verdict} in {name}: {line[:400]}\n  {_command(args, number)}")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
