"""What is to be known of a device before work is given to it, and what it can tell without being waited for."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from samplex_cuda._driver import kernels_for
from samplex_cuda._library import _native

__all__ = [
    "Mailbox",
    "Notices",
    "aligns_rows",
    "captured",
    "fuses_products",
    "host_waits",
    "multiplies_narrow",
    "passes_by_class",
]


def host_waits(t: Tensor) -> bool:
    """Whether looking at the numbers of `t` would make the host wait for a device.

    Chooses between code that looks and raises, and code of fixed sizes that leaves everything to the device; tests
    replace it to run the latter on CPU tensors.
    """
    return t.device.type != "cpu"


def multiplies_narrow(t: Tensor) -> bool:
    """Whether 16-bit factors on the device of `t` multiply as they are stored, with sums in float32.

    torch has such a product for GPUs alone; tests replace this function to go the way of a GPU with CPU tensors.
    """
    return t.device.type != "cpu"


def passes_by_class(t: Tensor) -> bool:
    """Whether the passes over a chunk of logits take it as [n, B]: the CPU kernels do, and are quick if vectorized."""
    return t.device.type == "cpu" and _native.cpu_backend() == "cpu" and _native.simd_level() != "scalar"


def aligns_rows(t: Tensor) -> bool:
    """Whether rows of logits of the device of `t` have space behind them, so that all of them are aligned.

    The kernels of a GPU take such rows; tests replace this function to go the way of a GPU with CPU tensors.
    """
    return t.device.type != "cpu"


def fuses_products(t: Tensor) -> bool:
    """Whether kernels of this build use the tensor cores of the device of `t` themselves; tests replace it.

    They need code for compute capability 8.0 or later; PTX of 7.5, which a newer GPU runs too, has none.
    """
    return t.device.type == "cuda" and _kernels_arch(t.device) >= 80


@functools.cache
def _kernels_arch(device: torch.device) -> int:
    """90 for a GPU that runs code made for 9.0; 0 if that is not known."""
    capability = "{}.{}".format(*torch.cuda.get_device_capability(device))
    _, arch = kernels_for(capability, [arch for arch in _native.build_info()["cuda_archs"].split(",") if arch])
    return 0 if arch is None else int(arch.rpartition("_")[2])


def captured(device: torch.device) -> bool:
    """Whether work on this device goes into a CUDA graph now."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class Mailbox:
    """Numbers that a device sends to the host, which reads whatever has arrived and never waits.

    Args:
        size: how many.
        device: who sends them.

    Example:
        >>> import torch
        >>> from samplex_cuda._device import Mailbox
        >>> box = Mailbox(2, torch.device("cpu"))
        >>> box.send(1, torch.tensor(3.0))
        >>> box[0], box[1]
        (0.0, 3.0)
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self._made = size, device
        self._sent = torch.zeros(size, pin_memory=device.type == "cuda")
        self._seen = self._sent.numpy()  # the same memory, read without an op

    def send(self, which: int, value: Tensor) -> None:
        """Sends a number; not while a CUDA graph is captured, which would repeat it."""
        if not captured(value.device):
            self._sent[which].copy_(value, non_blocking=True)

    def clear(self, which: int) -> None:
        """Forgets a number that has arrived."""
        self._seen[which] = 0.0

    def __getitem__(self, which: int) -> float:
        """The number that arrived last; 0 before the first."""
        return float(self._seen[which])

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy is empty."""
        return Mailbox, self._made


class Notices:
    """How many things a device had to refuse: counted there and sent to the host, which never waits.

    Args:
        device: who counts.

    Example:
        >>> import torch
        >>> from samplex_cuda._device import Notices
        >>> notices = Notices(torch.device("cpu"))
        >>> notices.add(torch.tensor([True, False, True]))
        >>> notices.arrived
        2
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._count = torch.zeros((), device=device)
        self._mail = Mailbox(1, device)

    def add(self, refused: Tensor) -> None:
        """Counts the entries of a boolean tensor that are true."""
        self._count += refused.sum()
        self._mail.send(0, self._count)

    @property
    def arrived(self) -> int:
        """The count, as far as the host knows it."""
        return int(self._mail[0])

    def clear(self) -> None:
        """Counts from 0 again."""
        self._count.zero_()
        self._mail.clear(0)
