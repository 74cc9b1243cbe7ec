"""Test files one by one in several settings, each in a separate process; a sweep continues where it stopped.

Results are kept in results.json of the sweep's folder, beside a log of every run and the table (summary.md): for each
file and setting how many tests passed. A file that passed is not run again unless what it was run on has changed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

PASSED, NO_TESTS = 0, 5  # exit status of pytest
_COUNTS = re.compile(r"(\d+) (passed|failed|error|errors|skipped|xfailed|deselected)\b")
_FINDING = re.compile(r"(?:WARNING: |ERROR: |RACE \()")  # ptxrun's, also behind pytest's dots


@dataclasses.dataclass
class Result:
    """One file in one setting."""

    source: str  # digest of what was run
    status: int  # of pytest
    passed: int
    failed: int
    findings: int
    seconds: float
    log: str

    @property
    def good(self) -> bool:
        """Whether every test passed and nothing was found."""
        return self.status in (PASSED, NO_TESTS) and self.findings == 0

    def cell(self) -> str:
        """As the table shows it."""
        text = f"{self.passed} passed" if self.status != NO_TESTS else "no tests"
        if self.failed:
            text += f", {self.failed} failed"
        elif self.status not in (PASSED, NO_TESTS):
            text += f", exit status {self.status}"
        if self.findings:
            text += f", {self.findings} findings"
        return f"{text} ({self.seconds:.0f} s)"


def digest(paths: Iterable[Path]) -> str:
    """Of the contents of files."""
    found = hashlib.sha256()
    for path in paths:
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


def read_log(text: str) -> tuple[int, int, int]:
    """Tests passed, tests failed, findings of the emulated runtime, from what pytest and the runtime wrote."""
    last = text.rstrip().splitlines()[-1:] or [""]
    counts = {name.rstrip("s") if name == "errors" else name: int(n) for n, name in _COUNTS.findall(last[0])}
    return counts.get("passed", 0), counts.get("failed", 0) + counts.get("error", 0), len(_FINDING.findall(text))


def run_logged(command: Sequence[str], root: Path, environment: dict[str, str], source: str, log: Path) -> Result:
    """Run pytest on one file, its output into `log`."""
    started = time.monotonic()
    with log.open("w") as out:
        status = subprocess.run(
            command, cwd=root, env=environment, stdout=out, stderr=subprocess.STDOUT, check=False
        ).returncode
    counts = read_log(log.read_text(errors="replace"))
    return Result(source, status, *counts, round(time.monotonic() - started, 1), str(log.relative_to(root)))


def summary(results: dict[str, Result], files: Sequence[str], settings: Sequence[str]) -> str:
    """The table in Markdown."""
    lines = ["| file | " + " | ".join(settings) + " |", "|---|" + "---|" * len(settings)]
    for file in files:
        keys = [f"{file} {setting}" for setting in settings]
        cells = [results[key].cell() if key in results else "not run" for key in keys]
        lines.append(f"| {file} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def sweep(
    folder: Path,
    files: Sequence[str],
    settings: Sequence[str],
    source_of: Callable[[str], str],
    run_file: Callable[[str, str, str, Path], Result],
    size_of: Callable[[str], float],
) -> bool:
    """Run what is not done yet, one setting after another, short files first; True if all that was asked for is good.

    `source_of(file)` is the digest that decides whether a stored result is still valid, `run_file(file, setting,
    source, log)` runs one file, and `size_of(file)` estimates the seconds of files that have not run yet.
    """
    folder.mkdir(parents=True, exist_ok=True)
    store = folder / "results.json"
    kept = json.loads(store.read_text()) if store.exists() else {}
    results = {key: Result(**value) for key, value in kept.items()}

    def seconds(file: str) -> float:
        return min((results[key].seconds for s in settings if (key := f"{file} {s}") in results), default=size_of(file))

    for setting in settings:
        for file in sorted(files, key=seconds):
            source, key = source_of(file), f"{file} {setting}"
            if key in results and results[key].source == source and results[key].good:
                continue
            name = file.removeprefix("tests/").removesuffix(".py").replace("/", "-")
            log = folder / f"{name}-{setting.replace(' ', '-')}.log"
            results[key] = run_file(file, setting, source, log)
            print(f"{setting} {file}: {results[key].cell()}", flush=True)
            store.write_text(json.dumps({k: dataclasses.asdict(v) for k, v in results.items()}, indent=1) + "\n")
            (folder / "summary.md").write_text(summary(results, files, settings))
    table = summary(results, files, settings)
    (folder / "summary.md").write_text(table)
    print(table)
    return all(results[f"{file} {setting}"].good for file in files for setting in settings)
