"""Runs calls in child processes: a crash ends one child, names its call, and the next child goes on behind it."""

from __future__ import annotations

import collections
import contextlib
import json
import mmap
import os
import resource
import signal
import struct
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

from samplex_fuzz.run import VERDICTS

SANITIZED = "asan" in os.environ.get("LD_PRELOAD", "")  # maps terabytes itself, and is several times slower
HANG = 300.0 if SANITIZED else 120.0  # seconds; legal calls of some GB take many on a busy machine
_HEAD = 24  # bytes: number of the call, its name, calls done
_SLOT = 8 * len(VERDICTS)
_ADDRESS_SPACE = 12 << 30  # bytes; sizes of 2^31 and more fail at once instead of filling the machine


class Board:
    """What a child writes for its parent: the call it is in, and counts by name and verdict. A small shared file."""

    def __init__(self, path: Path, names: list[str]) -> None:
        self.names = names
        size = _HEAD + _SLOT * len(names)
        if not path.exists():
            path.write_bytes(bytes(size))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), size)

    def start(self, number: int, name: int) -> None:
        """A call begins; name is -1 while it is being made."""
        struct.pack_into("<qq", self._map, 0, number, name)

    def count(self, name: int, verdict: int) -> None:
        """A call ended."""
        at = _HEAD + _SLOT * name + 8 * verdict
        struct.pack_into("<q", self._map, at, struct.unpack_from("<q", self._map, at)[0] + 1)
        struct.pack_into("<q", self._map, 16, struct.unpack_from("<q", self._map, 16)[0] + 1)

    def current(self) -> tuple[int, int, int]:
        """Number and name of the call, and how many calls are done."""
        return struct.unpack_from("<qqq", self._map, 0)

    def counts(self) -> dict[str, list[int]]:
        """Counts by name, in the order of VERDICTS."""
        n = len(VERDICTS)
        return {
            name: list(struct.unpack_from(f"<{n}q", self._map, _HEAD + _SLOT * i)) for i, name in enumerate(self.names)
        }


def child(settings: dict[str, Any]) -> None:
    """The body of a child process."""
    import torch

    from samplex_fuzz import registry
    from samplex_fuzz.run import Runner

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if settings["limit_memory"]:
        resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_SPACE, _ADDRESS_SPACE))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    registry.plant(settings["plant"])
    registry.choose_kernels(settings["simd"])
    names = registry.select(settings["only"])
    board = Board(Path(settings["board"]), names)
    index = {name: i for i, name in enumerate(names)}
    runner = Runner(settings["seed"], names)
    with open(settings["findings"], "a", buffering=1) as findings:
        for number in range(settings["first"], settings["last"], settings["step"]):
            board.start(number, -1)
            outcome = runner(number, lambda name, number=number: board.start(number, index[name]))
            board.count(index[outcome.name], VERDICTS.index(outcome.verdict))
            if outcome.verdict not in ("ok", "refused"):
                findings.write(json.dumps([number, outcome.name, outcome.verdict, outcome.text[:2000]]) + "\n")
    board.start(settings["last"], -1)


class Worker:
    """A share of the calls: one child after another, until all are done."""

    def __init__(self, directory: Path, which: int, settings: dict[str, Any], names: list[str]) -> None:
        self.path = directory / f"{which}"
        self.board = Board(Path(f"{self.path}.board"), names)
        self.settings = dict(
            settings, board=f"{self.path}.board", findings=f"{self.path}.findings", first=which + settings["first"]
        )
        self.crashes: list[tuple[int, str, str, str]] = []
        self.names = names
        self.process: subprocess.Popen[bytes] | None = None
        self._seen, self._since = -1, 0.0
        self._start()

    def _start(self) -> None:
        self.board.start(-1, -1)
        self._seen, self._since = -1, time.monotonic()
        with open(f"{self.path}.stderr", "ab") as stderr:
            command = [sys.executable, str(Path(__file__).parents[1]), "--child", json.dumps(self.settings)]
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=stderr, stderr=stderr)

    def done(self) -> int:
        """Calls that ended, crashes included."""
        return self.board.current()[2]

    def poll(self) -> bool:
        """Look after the child; False when the share is done."""
        if self.process is None:
            return False
        status = self.process.poll()
        number, _, _ = self.board.current()
        if status is None:
            if number != self._seen:
                self._seen, self._since = number, time.monotonic()
            elif time.monotonic() - self._since > (HANG if number >= 0 else 10 * HANG):
                self.process.kill()
                self.process.wait()
                self._crashed(f"no answer in {HANG:g} s")
            return True
        if status == 0:
            self.process = None
            return False
        if number < 0 or number >= self.settings["last"]:
            text = Path(f"{self.path}.stderr").read_text(errors="replace")[-4000:]
            raise RuntimeError(f"fuzz: a child ended with status {status} outside of a call:\n{text}")
        with contextlib.suppress(ValueError):
            self._crashed(signal.Signals(-status).name if status < 0 else f"exit status {status}")
            return True
        self._crashed(f"signal {-status}")
        return True

    def _crashed(self, what: str) -> None:
        number, name, _ = self.board.current()
        self.crashes.append((number, self.names[name] if name >= 0 else "while the call was made", "crash", what))
        if name >= 0:
            self.board.count(name, VERDICTS.index("crash"))
        self.settings["first"] = number + self.settings["step"]
        self._start()

    def stop(self) -> None:
        """End the child."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def findings(self) -> list[tuple[int, str, str, str]]:
        """(number, name, verdict, text), crashes included."""
        path = Path(self.settings["findings"])
        lines = path.read_text().splitlines() if path.exists() else []
        return [*(tuple(json.loads(line)) for line in lines), *self.crashes]


def fuzz(
    seed: int, calls: int, jobs: int, names: list[str], *, first: int = 0, progress: bool = False, **settings: Any
) -> tuple[dict[str, collections.Counter[str]], list[tuple[int, str, str, str]]]:
    """Runs calls `first` to `first + calls`; counts by name, and the findings in the order of their numbers."""
    settings = {"seed": seed, "first": first, "last": first + calls, "step": jobs, **settings}
    with tempfile.TemporaryDirectory(prefix="samplex-fuzz-") as directory:
        workers = [Worker(Path(directory), which, settings, names) for which in range(jobs)]
        bar = _bar(calls) if progress else None
        try:
            while True:
                busy = [worker.poll() for worker in workers]
                if not any(busy):
                    break
                time.sleep(0.02)
                if bar is not None:
                    bar.update(sum(worker.done() for worker in workers) - bar.n)
        finally:
            for worker in workers:
                worker.stop()
            if bar is not None:
                bar.close()
        totals = {name: collections.Counter[str]() for name in names}
        for worker in workers:
            for name, row in worker.board.counts().items():
                totals[name].update(dict(zip(VERDICTS, row, strict=True)))
        return totals, sorted(f for worker in workers for f in worker.findings())


def _bar(calls: int) -> Any:
    from tqdm import tqdm

    return tqdm(total=calls, unit="call", unit_scale=True, disable=not os.isatty(2))
