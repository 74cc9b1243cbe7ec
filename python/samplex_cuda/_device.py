"""What is to be known of a device before work is given to it."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["captured", "host_waits", "multiplies_narrow"]


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


def captured(device: torch.device) -> bool:
    """Whether work on this device goes into a CUDA graph now."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
