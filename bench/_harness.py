"""What every bench shares: timing of interleaved sides, targets, the description of the machine, stored results.

A bench makes a `Report`, times its sides with `interleave`, and adds one `Row` per line. A row carries the result of
its refcheck; a row whose refcheck was not made cannot be added. `Report.finish` prints the table, writes
`bench/results/<name>.json` (the latest run) and appends one line per row to `bench/results/history.csv`. A run on
another processor moves what was stored to `<name>.<processor>.json`.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import dataclasses
import datetime
import gc
import json
import math
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from samplex_cuda.tables import empty_table

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
IMAGES = ROOT / "docs" / "images"
HISTORY_FIELDS = ["date", "commit", "bench", "row", "value", "unit", "target", "passed", "ours_ms", "other_ms", "cpu"]


# ----------------------------------------------------------------------------------------------------- timing
@dataclasses.dataclass(frozen=True)
class Timing:
    """Milliseconds per call: median, 20th and 80th percentile, and how many calls were timed."""

    median: float
    p20: float
    p80: float
    calls: int

    @classmethod
    def of(cls, milliseconds: Sequence[float]) -> Timing:
        x = torch.tensor(milliseconds, dtype=torch.float64)
        q = torch.quantile(x, torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)).tolist()
        return cls(median=q[1], p20=q[0], p80=q[2], calls=len(milliseconds))


@dataclasses.dataclass(frozen=True)
class Side:
    """One competitor: `step(i)` does the whole of what is timed with the i-th rotating set of inputs."""

    name: str
    step: Callable[[int], Any]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Timings by side name, and the medians of each round, from which the spread of a ratio is taken."""

    times: dict[str, Timing]
    rounds: dict[str, list[float]]

    def ratio(self, numerator: str, denominator: str) -> tuple[float, float, float]:
        """Ratio of the medians, and the 20th and 80th percentile of the ratio over the rounds."""
        value = self.times[numerator].median / self.times[denominator].median
        by_round = [a / b for a, b in zip(self.rounds[numerator], self.rounds[denominator], strict=True)]
        spread = Timing.of(by_round)
        return value, spread.p20, spread.p80


def _time_calls(step: Callable[[int], Any], first: int, calls: int, device: torch.device) -> list[float]:
    """Milliseconds of each call. The result of a call is dropped inside its own time: freeing is part of a step."""
    if device.type == "cuda":
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(calls)]
        torch.cuda.synchronize()
        for i, (begin, end) in enumerate(events):
            begin.record()
            step(first + i)
            end.record()
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) for begin, end in events]
    milliseconds = []
    for i in range(calls):
        begin_s = time.perf_counter()
        step(first + i)
        milliseconds.append((time.perf_counter() - begin_s) * 1e3)
    return milliseconds


def interleave(
    sides: Sequence[Side],
    *,
    device: torch.device,
    seconds: float = 6.0,
    min_rounds: int = 5,
    max_rounds: int = 60,
    block_seconds: float = 0.05,
    sets: int = 8,
) -> Comparison:
    """Times the sides alternately, A B A B ..., until `seconds` have passed (and at least `min_rounds` rounds).

    A turn is a block of calls, long enough for a steady state: a side neither finds the rows that the other side just
    loaded nor pays for the memory the other side just freed. The first call of a block is not timed (unless a call
    takes longer than the block). Slow drift of the machine hits every side alike.
    """
    warm: dict[str, float] = {}
    for side in sides:
        warm[side.name] = min(_time_calls(side.step, 0, 3, device))
    calls = {name: min(4 * sets, max(1, math.ceil(block_seconds * 1e3 / ms))) for name, ms in warm.items()}
    position = dict.fromkeys(warm, 0)
    times: dict[str, list[float]] = {name: [] for name in warm}
    rounds: dict[str, list[float]] = {name: [] for name in warm}
    gc.collect()
    gc.disable()
    try:
        begin = time.perf_counter()
        for done in range(max_rounds):
            if done >= min_rounds and time.perf_counter() - begin > seconds:
                break
            progress(f"round {done + 1}: " + ", ".join(side.name for side in sides))
            for side in sides:
                n = calls[side.name]
                lead = int(warm[side.name] < block_seconds * 1e3)
                got = _time_calls(side.step, position[side.name], n + lead, device)[lead:]
                position[side.name] += n + lead
                times[side.name] += got
                rounds[side.name].append(Timing.of(got).median)
    finally:
        gc.enable()
        progress("")
    return Comparison({name: Timing.of(got) for name, got in times.items()}, rounds)


def progress(text: str) -> None:
    """One line on stderr that the next one overwrites; silent where stderr is not a terminal."""
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K" + text[:110])
        sys.stderr.flush()


# ----------------------------------------------------------------------------------------------------- memory
MADV_NOHUGEPAGE = 15


def forbid_huge_pages(tensor: torch.Tensor) -> None:
    """No transparent huge pages behind an untouched CPU tensor, also on a system that gives them unasked."""
    if platform.system() != "Linux":
        return
    page = os.sysconf("SC_PAGESIZE")
    begin = -(-tensor.data_ptr() // page) * page
    end = (tensor.data_ptr() + tensor.nbytes) // page * page
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    if end > begin and libc.madvise(begin, end - begin, MADV_NOHUGEPAGE) != 0:
        raise OSError(ctypes.get_errno(), "madvise(MADV_NOHUGEPAGE) failed")


def huge_share(tensor: torch.Tensor) -> float:
    """Share of a CPU tensor's memory that the system really put on huge pages; nan where it does not say."""
    try:
        lines = Path("/proc/self/smaps").read_text().splitlines()
    except OSError:
        return math.nan
    begin, nbytes = tensor.data_ptr(), tensor.numel() * tensor.element_size()
    inside, found = False, 0
    for line in lines:
        head = line.split(" ", 1)[0]
        if "-" in head and not head.endswith(":"):
            low, high = (int(x, 16) for x in head.split("-"))
            inside = low < begin + nbytes and high > begin
        elif inside and line.startswith(("AnonHugePages:", "ShmemPmdMapped:")):
            found += int(line.split()[1]) * 1024
    return min(1.0, found / nbytes)


def make_table(
    rows: int, dim: int, *, device: torch.device, huge: bool = True, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """A [rows, dim] table with entries of size dim**-0.5: the head's own kind, or one on plain 4 KB pages.

    Filled by copies of one random block: the values do not matter to the time, and ten million rows of fresh normal
    numbers would take longer than the bench.
    """
    if huge:
        table = empty_table(rows, dim, device=device, dtype=dtype)
    else:
        table = torch.empty(rows, dim, device=device, dtype=dtype)
        forbid_huge_pages(table)
    block = torch.randn(min(rows, 8191), dim, device=device) * dim**-0.5
    for begin in range(0, rows, block.shape[0]):
        part = table[begin : begin + block.shape[0]]
        part.copy_(block[: part.shape[0]])
    return table


# ----------------------------------------------------------------------------------------------------- machine
def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _huge_page_setting() -> str:
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return "unknown"
    return text[text.index("[") + 1 : text.index("]")]


def _memory_gib() -> int:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)
    except (ValueError, OSError):
        return 0


def processor(described: dict[str, Any]) -> str:
    """Maker and SIMD level of a machine, for the name of a file: figures of another processor are kept beside."""
    return "-".join(re.findall(r"[a-z0-9]+", f"{described['cpu']} {described['simd']}".lower()))


def machine(device: torch.device) -> dict[str, Any]:
    """What the numbers depend on. Nothing that names the host."""
    from samplex_cuda import _native

    info = _native.build_info()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    described: dict[str, Any] = {
        "cpu": _cpu_name(),
        "cores": cores,
        "memory_gib": _memory_gib(),
        "simd": info["simd_level"],
        "threads": torch.get_num_threads(),
        "huge_pages": _huge_page_setting(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "compiler": info["compiler"],
        "version": info["version"],
    }
    if device.type == "cuda":
        described["gpu"] = torch.cuda.get_device_name(device)
        described["cuda"] = torch.version.cuda
    return described


def commit() -> str:
    """Commit of the source tree, with `+` where tracked files outside the stored results differ from it."""
    try:
        head = subprocess.run(
            ["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        changed = subprocess.run(
            ["git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    made_here = ("bench/results/", "docs/images/", "docs/benchmarks.md", "README.md")
    dirty = [line for line in changed.splitlines() if not line[3:].startswith(made_here)]
    return head + ("+" if dirty else "")


def other_load(seconds: float = 0.5) -> float:
    """Cores that other processes keep busy just now; 0 where the system does not say."""

    def busy() -> tuple[float, float]:
        fields = [float(x) for x in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        return sum(fields) - fields[3] - fields[4], sum(fields)

    try:
        busy_0, all_0 = busy()
        time.sleep(seconds)
        busy_1, all_1 = busy()
    except (OSError, IndexError, ValueError):
        return 0.0
    return (busy_1 - busy_0) / max(1.0, all_1 - all_0) * (os.cpu_count() or 1)


# ----------------------------------------------------------------------------------------------------- rows
@dataclasses.dataclass
class Row:
    """One line of a bench: a value against a target, where there is one."""

    id: str
    what: str
    value: float
    unit: str  # "x" speed-up | "ratio" | "%" | free text
    refcheck: str  # what was compared and how far off it was; never empty
    sense: str = ">="
    target: float | None = None
    aim: float | None = None
    ours: Timing | None = None
    other: Timing | None = None
    other_name: str = ""
    spread: tuple[float, float] | None = None  # p20, p80 of the value over the rounds
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    note: str = ""

    @property
    def passed(self) -> bool | None:
        if self.target is None:
            return None
        return self.value >= self.target if self.sense == ">=" else self.value <= self.target

    def as_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "passed": self.passed}


def format_value(value: float, unit: str) -> str:
    if unit == "x":
        return f"{value:.0f}x" if value >= 100 else f"{value:.1f}x" if value >= 10 else f"{value:.2f}x"
    if unit == "%":
        return f"{value:.0f} %"
    text = f"{value:.3g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return text if unit == "ratio" else f"{text} {unit}"


def format_target(row: dict[str, Any]) -> str:
    """The target without digits that say nothing: >= 6x."""
    unit = {"x": "x", "%": " %", "ratio": ""}.get(row["unit"], " " + row["unit"])
    return f"{row['sense']} {row['target']:g}{unit}"


def format_ms(timing: Timing | None) -> str:
    if timing is None:
        return ""
    digits = 0 if timing.median >= 100 else 1 if timing.median >= 10 else 2 if timing.median >= 0.1 else 4
    return f"{timing.median:.{digits}f} [{timing.p20:.{digits}f}, {timing.p80:.{digits}f}]"


def print_table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> None:
    """Plain text, columns padded, first column to the left."""
    rows = [list(header), *[list(line) for line in lines]]
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    for n, row in enumerate(rows):
        print("  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))))
        if n == 0:
            print("  ".join("-" * w for w in widths))


class Report:
    """The rows of one bench, printed as they come and stored at the end."""

    def __init__(self, name: str, device: torch.device, *, store: bool = True, timed: bool = True) -> None:
        self.name, self.device, self.store = name, device, store
        self.rows: list[Row] = []
        self.extra: dict[str, Any] = {}
        self.date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        self.commit = commit()
        self.load = other_load() if timed else 0.0
        self.machine = machine(device)
        m = self.machine
        print(
            f"{name} · {m['cpu']}, {m['cores']} cores, {m['simd']}, {m['threads']} threads, huge pages: "
            f"{m['huge_pages']} · torch {m['torch']} · commit {self.commit} · {self.date}"
        )
        if self.load > 0.3:
            print(f"warning: other processes keep {self.load:.1f} cores busy; these numbers are noise", file=sys.stderr)

    def add(self, row: Row) -> Row:
        if not row.refcheck:
            raise ValueError(f"bench {self.name}: row {row.id} has no refcheck")
        self.rows.append(row)
        verdict = {None: "", True: " · pass", False: " · MISSED"}[row.passed]
        target = "" if row.target is None else f" (target {format_target(row.as_dict())})"
        note = f" ({row.note})" if row.note else ""
        print(f"  {row.what}: {format_value(row.value, row.unit)}{target}{verdict}{note}", flush=True)
        return row

    def finish(self, *, fail: bool = True) -> int:
        """Prints the table, stores the rows; 1 if a target was missed (and `fail`), else 0."""
        print()
        lines = []
        for r in self.rows:
            spread = (
                ""
                if r.spread is None
                else f"[{format_value(r.spread[0], r.unit)}, {format_value(r.spread[1], r.unit)}]"
            )
            lines.append(
                [
                    r.what,
                    format_ms(r.ours),
                    format_ms(r.other),
                    format_value(r.value, r.unit),
                    spread,
                    "" if r.target is None else format_target(r.as_dict()),
                    "" if r.aim is None else format_value(r.aim, r.unit),
                    {None: "", True: "pass", False: "MISSED"}[r.passed],
                ]
            )
        print_table(["what", "ours, ms", "other, ms", "value", "p20, p80", "target", "aim", ""], lines)
        missed = [r.id for r in self.rows if r.passed is False]
        if missed:
            print(f"\nmissed: {', '.join(missed)}")
        if self.store and self.rows:
            self._write()
        return 1 if missed and fail else 0

    def _write(self) -> None:
        RESULTS.mkdir(parents=True, exist_ok=True)
        path = RESULTS / f"{self.name}.json"
        stamp = {"date": self.date, "commit": self.commit}
        rows = {row.id: {**row.as_dict(), **stamp} for row in self.rows}
        extra = {key: {**stamp, "data": data} for key, data in self.extra.items()}
        if path.exists():
            # A run of some rows (--only) replaces those rows and leaves the others, each with its own date and commit;
            # never across machines.
            old = json.loads(path.read_text())
            if old.get("machine") == self.machine:
                rows = {**{r["id"]: r for r in old["rows"]}, **rows}
                extra = {**old.get("extra", {}), **extra}
            elif processor(old["machine"]) != processor(self.machine):
                os.replace(path, RESULTS / f"{self.name}.{processor(old['machine'])}.json")
        (RESULTS / f"{self.name}.{processor(self.machine)}.json").unlink(missing_ok=True)
        stored = {
            "bench": self.name,
            **stamp,
            "machine": self.machine,
            "other_load_cores": round(self.load, 2),
            "rows": list(rows.values()),
            "extra": extra,
        }
        scratch = path.with_suffix(".json.tmp")
        scratch.write_text(json.dumps(_rounded(stored), indent=1, ensure_ascii=False) + "\n")
        os.replace(scratch, path)
        history = RESULTS / "history.csv"
        fresh = not history.exists()
        with history.open("a", newline="") as file:
            writer = csv.DictWriter(file, HISTORY_FIELDS, lineterminator="\n")
            if fresh:
                writer.writeheader()
            for r in self.rows:
                writer.writerow(
                    {
                        **stamp,
                        "bench": self.name,
                        "row": r.id,
                        "value": f"{r.value:.5g}",
                        "unit": r.unit,
                        "target": "" if r.target is None else f"{r.sense} {r.target:g}",
                        "passed": "" if r.passed is None else int(r.passed),
                        "ours_ms": "" if r.ours is None else f"{r.ours.median:.5g}",
                        "other_ms": "" if r.other is None else f"{r.other.median:.5g}",
                        "cpu": self.machine["cpu"],
                    }
                )
        print(f"\nstored: bench/results/{path.name}, bench/results/history.csv")


def _rounded(x: Any) -> Any:
    """Five significant digits: more would only make differences between runs harder to read."""
    if isinstance(x, float):
        return float(f"{x:.5g}") if math.isfinite(x) else None
    if isinstance(x, dict):
        return {k: _rounded(v) for k, v in x.items()}
    if isinstance(x, list | tuple):
        return [_rounded(v) for v in x]
    return x


# ----------------------------------------------------------------------------------------------------- checks, options
def check_close(what: str, got: torch.Tensor, want: torch.Tensor, tolerance: float) -> float:
    """Largest error relative to the largest entry of `want` (fp64); raises where it is above `tolerance`."""
    if got.shape != want.shape:
        raise AssertionError(f"refcheck {what}: shape {tuple(got.shape)}, wanted {tuple(want.shape)}")
    if want.numel() == 0:
        return 0.0
    error = float((got.double() - want.double()).abs().max() / want.double().abs().max().clamp_min(1e-300))
    if not error <= tolerance:
        raise AssertionError(f"refcheck {what}: relative error {error:.2e}, allowed {tolerance:.0e}")
    return error


def common_options(doc: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="short timings, no table above 10^6 rows, nothing stored")
    parser.add_argument("--only", nargs="+", default=[], metavar="ROW", help="only rows whose id contains one of these")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads for both sides (default 2)")
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--seconds", type=float, help="time for each comparison (default 6, quick 0.5)")
    parser.add_argument("--no-fail", action="store_true", help="exit with 0 even where a target is missed")
    parser.add_argument("--no-store", action="store_true", help="print only, leave bench/results alone")
    parser.add_argument(
        "--readme", action="store_true", help="then write README.md and docs/benchmarks.md from the stored results"
    )
    return parser


def set_up(options: argparse.Namespace) -> torch.device:
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    if options.seconds is None:
        options.seconds = 0.5 if options.quick else 6.0
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("bench: --device cuda, but torch sees no CUDA device")
    return device


def wanted(options: argparse.Namespace, row_id: str) -> bool:
    return not options.only or any(part in row_id for part in options.only)


def write_readme(report: Report, options: argparse.Namespace) -> None:
    """README.md and docs/benchmarks.md, if --readme asks for them and this run was stored."""
    if options.readme and report.store:
        from update_readme import update

        update()


# ---------------------------------------------------------------------------------------------------- one process a row
def row_in_child(script: str, row_id: str, argv: list[str]) -> Any:
    """One row of a bench, measured by `script --row` in a fresh process; None if it does not apply here."""
    progress(row_id)
    done = subprocess.run([sys.executable, script, *argv, "--row", row_id], stdout=subprocess.PIPE, text=True)
    progress("")
    if done.returncode != 0:
        raise SystemExit(f"bench: row {row_id} failed")
    return json.loads(done.stdout.splitlines()[-1])


def comparison_row(
    row_id: str, what: str, sides: list[Side], checked: str, got: Comparison, has_targets: bool, **about: Any
) -> Row:
    """The row of two sides: how many times as fast the first is, or with `inverse` how many times as long it takes."""
    ours, other = (side.name for side in sides)
    value, low, high = got.ratio(other, ours)
    if about.pop("inverse", False):
        value, low, high = 1 / value, 1 / high, 1 / low
    if not has_targets:
        about.pop("target", None)
    times = {"ours": got.times[ours], "other": got.times[other], "other_name": other, "spread": (low, high)}
    return Row(row_id, what, value, about.pop("unit", "x"), checked, **times, **about)


def row_from(values: dict[str, Any], has_targets: bool) -> Row:
    values = {name: value for name, value in values.items() if name != "passed"}
    for name in ("ours", "other"):
        values[name] = None if values[name] is None else Timing(**values[name])
    row = Row(**values)
    # The targets are CPU targets; on CUDA the rows are printed without a verdict.
    return row if has_targets else dataclasses.replace(row, target=None, aim=None)
