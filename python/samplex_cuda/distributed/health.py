"""Whether all ranks run the same thing, and which of them no longer runs.

A collective that waits for a rank that hangs ends with a time-out that names nobody. A `Heartbeat` writes to the store
of the process group every few seconds, from a background thread; a rank that waits too long reads which one is silent.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from samplex_cuda._checks import check_number

__all__ = ["Heartbeat", "agree", "attempt_store"]

_LAST_RELEASE = 0.1  # seconds


def _let_threads_finish() -> None:
    """Gives the threads of gloo time to drop the tensors of the last collective before Python ends.

    A thread of gloo needs the GIL to drop a tensor that Python has seen. If the interpreter ends first, the thread is
    torn out of a destructor and the process aborts with exit code -6 after all its work is done ("terminate called
    without an active exception"). `destroy_process_group` waits for these threads only when it drops the last
    reference to the group, and DistributedDataParallel and sharded heads keep one.
    """
    time.sleep(_LAST_RELEASE)  # without the GIL


atexit.register(_let_threads_finish)


def agree(what: dict[str, Any], group: Any = None, *, op: str = "agree", error: Exception | None = None) -> None:
    """ValueError on every rank unless all ranks bring the same configuration.

    Args:
        what: names and values that JSON can hold, e.g. of the command line.
        group: the ranks; None: all.
        op: name for the message.
        error: why this rank cannot go on, whatever the others bring. If the configurations are equal, it is raised
            here and a RuntimeError that quotes it elsewhere.

    Example:
        >>> from samplex_cuda.distributed import agree
        >>> agree({"classes": 1000, "lr": 0.1})  # doctest: +SKIP
    """
    found: list[Any] = [None] * dist.get_world_size(group)
    mine = json.loads(json.dumps(what))
    refused = None if error is None else f"{type(error).__name__}: {error}"
    dist.all_gather_object(found, (mine, refused), group=group)
    configurations = [configuration for configuration, _ in found]
    for name in sorted(set().union(*configurations)):
        values = [(name in one, one.get(name)) for one in configurations]
        other = next((value for value in values if value != values[0]), values[0])
        if other != values[0]:
            first, second = (
                [rank for rank, value in enumerate(values) if value == which] for which in (values[0], other)
            )
            raise ValueError(
                f"{op}: all ranks must have the same configuration, got {name} = {values[0][1]!r} on {_ranks(first)} "
                f"and {other[1]!r} on {_ranks(second)}"
            )
    if error is not None:
        raise error
    for rank, (_, text) in enumerate(found):
        if text is not None:
            raise RuntimeError(f"{op}: rank {rank} of the group must not refuse its configuration, got {text}")


def _ranks(numbers: list[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def attempt_store(store: dist.Store, attempt: int) -> dist.Store:
    """A part of the store for this attempt of `torchrun --max-restarts`.

    The store of torchrun's agent outlives a restart: without a separate prefix, a new attempt finds the addresses of
    the processes that died.

    Args:
        store: what `torch.distributed` would use.
        attempt: TORCHELASTIC_RESTART_COUNT.

    Example:
        >>> import torch.distributed as dist
        >>> from samplex_cuda.distributed import attempt_store
        >>> store = dist.HashStore()
        >>> attempt_store(store, 0).set("address", "a")
        >>> attempt_store(store, 1).check(["address"])
        False
    """
    return dist.PrefixStore(f"attempt_{attempt}", store)


class Heartbeat:
    """Says every `interval` seconds that this rank runs, and what it is doing.

    Args:
        store: shared by the ranks, e.g. a `TCPStore`; None: that of the default process group.
        rank: this one.
        world: how many there are.
        interval: seconds between two signs of life.
        patience: seconds of silence after which a rank counts as silent.

    Example:
        >>> import torch.distributed as dist
        >>> from samplex_cuda.distributed import Heartbeat
        >>> store = dist.HashStore()
        >>> with Heartbeat(store, rank=0, world=2, interval=0.05, patience=0.2) as beat:
        ...     beat.doing("step 7")
        ...     beat.silent()  # rank 1 has never been heard of
        [(1, 'has not started')]
    """

    def __init__(
        self,
        store: dist.Store | None = None,
        rank: int | None = None,
        world: int | None = None,
        *,
        interval: float = 5.0,
        patience: float = 30.0,
    ) -> None:
        check_number("Heartbeat", "interval", interval, 0.0, open_low=True)
        check_number("Heartbeat", "patience", patience, 2 * interval)
        if store is None:
            store = dist.distributed_c10d._get_default_store()
        self.store = dist.PrefixStore("heartbeat", store)
        self.rank = dist.get_rank() if rank is None else rank
        self.world = dist.get_world_size() if world is None else world
        self.interval, self.patience = interval, patience
        self._doing = "starting"
        self._count, self._lock = 0, threading.Lock()
        self._stop = threading.Event()
        self._seen: dict[int, tuple[str, float]] = {}
        self._thread = threading.Thread(target=self._run, name="samplex-heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        """Starts the signs of life."""
        self._write()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Ends them."""
        self._stop.set()
        self._thread.join(2 * self.interval)
        with contextlib.suppress(RuntimeError):  # the store may be gone
            self.store.set(str(self.rank), json.dumps([-1, self._doing]))

    def doing(self, what: str) -> None:
        """What this rank does now, for the others' messages; one write to the store, some 0.1 ms."""
        self._doing = what
        self._write()

    def _write(self) -> None:
        with self._lock:
            self._count += 1
            self.store.set(str(self.rank), json.dumps([self._count, self._doing]))

    def _run(self) -> None:
        while not self._stop.wait(self.interval):
            try:
                self._write()
            except RuntimeError:  # the store is gone: so is the run
                return

    def silent(self, stop: Callable[[], bool] | None = None) -> list[tuple[int, str]]:
        """(rank, what it last did) of the ranks that gave no sign for `patience` seconds; it takes that long to know.

        A process that is stopped or dead gives none. One whose main thread hangs still does: `behind` finds it.

        Args:
            stop: asked now and then whether to give up, e.g. because a signal came; then the answer is empty.
        """
        end = time.monotonic() + self.patience
        waiting = {rank for rank in range(self.world) if rank != self.rank}
        first = {rank: self._read(rank) for rank in waiting}
        while waiting and time.monotonic() < end:
            time.sleep(min(self.interval, max(0.01, end - time.monotonic())))
            waiting = {rank for rank in waiting if self._read(rank) == first[rank]}
            if stop is not None and stop():
                return []
        return [(rank, _words(first[rank])) for rank in sorted(waiting)]

    def _read(self, rank: int) -> str:
        try:
            return self.store.get(str(rank)).decode() if self.store.check([str(rank)]) else ""
        except RuntimeError:
            return ""

    @contextlib.contextmanager
    def watch(self, what: str, stop: Callable[[], bool] | None = None) -> Iterator[None]:
        """Around collectives: an error of the transport becomes one that names the ranks that have fallen silent.

        If every rank gives signs of life, those are named that do something else than this one: they hang there.

        Args:
            what: what this rank does meanwhile, e.g. "step 100".
            stop: as in `silent`.
        """
        self.doing(what)
        try:
            yield
        except (RuntimeError, dist.DistError) as error:
            if not _of_transport(error):
                raise
            waits = any(word in str(error) for word in ("timeout", "Timed out", "timed out"))
            elsewhere = self.behind() if waits else []
            found = self.silent(stop)
            if found:
                names = "; ".join(f"rank {rank}, which last said {text!r}" for rank, text in found)
                raise RuntimeError(f"Heartbeat: no sign of life for {self.patience:g} s from {names}") from error
            if elsewhere:
                names = "; ".join(f"rank {rank} says {text!r}" for rank, text in elsewhere)
                raise RuntimeError(
                    f"Heartbeat: every rank is alive, but in {self._doing!r} this one waited for {names}"
                ) from error
            raise

    def behind(self) -> list[tuple[int, str]]:
        """(rank, what it does) of the ranks that do something else than this one."""
        told = ((rank, self._read(rank)) for rank in range(self.world) if rank != self.rank)
        return [(rank, _words(text)) for rank, text in told if _words(text) != self._doing]


def _of_transport(error: BaseException) -> bool:
    text = str(error)
    return isinstance(error, dist.DistError) or any(
        word in text for word in ("gloo", "Gloo", "NCCL", "timeout", "Timed out")
    )


def _words(text: str) -> str:
    return str(json.loads(text)[1]) if text else "has not started"
