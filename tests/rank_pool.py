"""Ranks that stay alive for a whole test run: four processes, gloo, a group of the first 1, 2, 3 and 4 of them."""

from __future__ import annotations

import importlib
import socket
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

MOST = 4


def _serve(rank: int, port: int, tasks: Any, results: Any) -> None:
    import sys

    import torch
    import torch.distributed as dist

    sys.path.insert(0, str(Path(__file__).parent))
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=MOST, timeout=timedelta(seconds=60)
    )
    groups = {world: dist.new_group(range(world)) for world in range(1, MOST + 1)}
    results.put((rank, None, "ready"))
    while (task := tasks.get()) is not None:
        world, module, name, args = task
        try:
            torch.manual_seed(rank)
            made = getattr(importlib.import_module(module), name)(groups[world], *args)
            results.put((rank, None, made))
        except BaseException as error:  # of any kind: the test hears of it
            results.put((rank, f"{type(error).__name__}: {error}", traceback.format_exc()))
    dist.destroy_process_group()


class RankError(AssertionError):
    """A case failed on a rank."""


class RankPool:
    """`run(world, name, ...)` calls a function on the first `world` ranks with their group.

    The name is that of a function in rank_cases, or "module.function" for another module of this folder.
    """

    def __init__(self) -> None:
        import torch.multiprocessing as mp

        context = mp.get_context("spawn")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.results = context.Queue()
        self.tasks = [context.Queue() for _ in range(MOST)]
        self.ranks = [
            context.Process(target=_serve, args=(rank, port, self.tasks[rank], self.results), daemon=True)
            for rank in range(MOST)
        ]
        for process in self.ranks:
            process.start()
        self._collect(MOST, seconds=180)

    def _collect(self, count: int, seconds: float = 90) -> list[tuple[str | None, Any]]:
        found: dict[int, tuple[str | None, Any]] = {}
        while len(found) < count:
            rank, error, made = self.results.get(timeout=seconds)
            found[rank] = (error, made)
        return [found[rank] for rank in range(count)]

    def outcomes(self, world: int, name: str, *args: Any) -> list[tuple[str | None, Any]]:
        """(error or None, result) of each rank; `name` is "function" of rank_cases, or "module:function"."""
        module, _, function = name.rpartition(":")
        for tasks in self.tasks[:world]:
            tasks.put((world, module or "rank_cases", function, args))
        return self._collect(world)

    def run(self, world: int, name: str, *args: Any) -> list[Any]:
        """The results of the ranks; `RankError` with the first traceback if one failed."""
        found = self.outcomes(world, name, *args)
        for rank, (error, made) in enumerate(found):
            if error is not None:
                raise RankError(f"rank {rank} of {world}: {made}")
        return [made for _, made in found]

    def close(self) -> None:
        """Ends the ranks."""
        for tasks in self.tasks:
            tasks.put(None)
        for process in self.ranks:
            process.join(20)
            if process.is_alive():
                process.kill()
