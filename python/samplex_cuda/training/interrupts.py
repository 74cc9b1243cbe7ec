"""What a run takes from its process while it lasts, and gives back: signals and torch's generators."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor

__all__ = ["Interrupts", "own_generators"]


class Interrupts:
    """Notes SIGINT and SIGTERM, so that a run can end at a step boundary; the second one ends it at once.

    Signals are handled only where this is the main thread.

    Attributes:
        number: of the signal that came; 0: none.

    Example:
        >>> from samplex_cuda.training.interrupts import Interrupts
        >>> interrupts = Interrupts()
        >>> with interrupts.handled():
        ...     interrupts.number
        0
    """

    def __init__(self) -> None:
        self.number = 0

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """Signals are noted inside; the handlers of before come back afterwards."""
        self.number = 0
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def note(number: int, frame: FrameType | None) -> None:
            if self.number:  # the second time: at once
                signal.signal(number, before[number])
                raise KeyboardInterrupt
            self.number = number

        before: dict[int, Any] = {n: signal.signal(n, note) for n in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@contextlib.contextmanager
def own_generators(state: dict[str, Tensor], device: torch.device, seed: int) -> Iterator[None]:
    """torch's generators in the state of a run, which is updated; those of the caller come back afterwards.

    Args:
        state: "cpu" and, on CUDA, "cuda": states of the generators; empty: they begin as they are.
        device: where the run is.
        seed: of the CUDA generator, where the state has none.

    Example:
        >>> import torch
        >>> from samplex_cuda.training.interrupts import own_generators
        >>> state = {"cpu": torch.Generator().manual_seed(3).get_state()}
        >>> with own_generators(state, torch.device("cpu"), 0):
        ...     value = torch.rand(())
        >>> bool(value == torch.rand((), generator=torch.Generator().manual_seed(3)))
        True
    """
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        if "cpu" in state:
            torch.set_rng_state(state["cpu"])
            if "cuda" in state:
                torch.cuda.set_rng_state(state["cuda"], device)
            elif cuda:
                with torch.cuda.device(device):
                    torch.cuda.manual_seed(seed)
        try:
            yield
        finally:
            state["cpu"] = torch.get_rng_state()
            if cuda:
                state["cuda"] = torch.cuda.get_rng_state(device)
