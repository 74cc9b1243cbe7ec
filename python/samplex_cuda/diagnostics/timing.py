"""Times that can be compared: medians of interleaved runs, their spread, and what other processes took meanwhile."""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

__all__ = ["Job", "Load", "measure", "spread"]

_ROUNDS = (3, 15)  # at least, at most
_SECONDS = 0.35  # for each job, from the least number of rounds on
_STAT = Path("/proc/stat")


@dataclasses.dataclass
class Job:
    """Something to time.

    Attributes:
        run: does it once.
        done: gets the median and its uncertainty, both in ms.
        scale: factor of the times: where a part of the rows stands for all.

    Example:
        >>> from samplex_cuda.diagnostics.timing import Job
        >>> Job(lambda: None, print).scale
        1.0
    """

    run: Callable[[], Any]
    done: Callable[[float, float], None]
    scale: float = 1.0


def spread(times: list[float]) -> tuple[float, float]:
    """The median of some times, and half the distance between their quartiles.

    Example:
        >>> from samplex_cuda.diagnostics.timing import spread
        >>> spread([1.0, 2.0, 3.0, 4.0, 100.0])
        (3.0, 1.0)
    """
    ordered = sorted(times)
    quarter = (len(ordered) - 1) // 4
    return statistics.median(ordered), (ordered[len(ordered) - 1 - quarter] - ordered[quarter]) / 2


def _used() -> tuple[float, float] | None:
    """Processor seconds of the machine and of this process; None if the system does not say."""
    try:
        fields = [int(field) for field in _STAT.read_text().split("\n", 1)[0].split()[1:9]]
        tick = os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, AttributeError):
        return None
    own = os.times()
    return (sum(fields) - fields[3] - fields[4]) / tick, own.user + own.system  # without idle and waiting


class Load:
    """How many cores other processes took between two moments.

    Example:
        >>> from samplex_cuda.diagnostics.timing import Load
        >>> load = Load()
        >>> lacking = load.lacking()
        >>> lacking is None or lacking >= 0
        True
    """

    def __init__(self) -> None:
        self._begin, self._before = time.perf_counter(), _used()

    def lacking(self) -> float | None:
        """Cores that were missing: those of other processes and of our threads together, less those there are."""
        now, wall = _used(), time.perf_counter() - self._begin
        if now is None or self._before is None or wall < 0.05:  # the system counts in hundredths of a second
            return None
        others = (now[0] - self._before[0] - (now[1] - self._before[1])) / wall
        return max(0.0, others + torch.get_num_threads() - (os.cpu_count() or 1))


def measure(jobs: list[Job], device: torch.device) -> float | None:
    """Times jobs alternately, round by round, so that what else the machine does meets all of them alike.

    The first round is left out: it finds cold caches, and in a new process torch imports seconds' worth of modules in
    it.

    Args:
        jobs: what to time; `done` of each is called at the end.
        device: which is waited for around each run.

    Returns:
        The cores that were missing because of other processes; None: not known.

    Example:
        >>> import torch
        >>> from samplex_cuda.diagnostics.timing import Job, measure
        >>> found = []
        >>> lacking = measure([Job(lambda: sum(range(1000)), lambda median, error: found.append(median))],
        ...                   torch.device("cpu"))
        >>> found[0] > 0
        True
    """
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    times: list[list[float]] = [[] for _ in jobs]
    for job in jobs:
        job.run()
    wait()
    load, begin = Load(), time.perf_counter()
    for number in range(_ROUNDS[1]):
        for job, taken in zip(jobs, times, strict=True):
            wait()
            start = time.perf_counter()
            job.run()
            wait()
            taken.append(1e3 * job.scale * (time.perf_counter() - start))
        if number + 1 >= _ROUNDS[0] and time.perf_counter() - begin > _SECONDS * len(jobs):
            break
    lacking = load.lacking()
    for job, taken in zip(jobs, times, strict=True):
        job.done(*spread(taken))
    return lacking
