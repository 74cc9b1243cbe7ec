"""`no_host_sync()`: fails at the first op that would make the host wait for a GPU, on tensors of any device.

It sees ops, not devices: run CPU tensors through the code that CUDA tensors take, and what passes does not wait on a
GPU either. Reads of host memory without an op (a numpy view) pass, as they should.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Ops whose CUDA implementation reads a number of the device, for its result or for the size of its result.
WAITING = {
    "_local_scalar_dense": "reads a number",
    "equal": "reads a number",
    "histc": "reads a number",
    "_linalg_check_errors": "reads a number",
    "nonzero": "reads the size of its result",
    "masked_select": "reads the size of its result",
    "_unique": "reads the size of its result",
    "_unique2": "reads the size of its result",
    "unique_dim": "reads the size of its result",
    "unique_consecutive": "reads the size of its result",
    "bincount": "reads the size of its result",
    "_coalesce": "reads the size of its result",
    "_to_sparse": "reads the size of its result",
}
_INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put")


def why_it_waits(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Why the aten op `name`, without overload, makes the host wait; None if it does not."""
    if name in WAITING:
        return WAITING[name]
    if name == "repeat_interleave" and kwargs.get("output_size") is None:
        return "reads the size of its result"
    if name in _INDEXING and any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1]):
        return "indexes with a boolean mask"
    if name in ("_to_copy", "copy_"):
        blocking = not (kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))
        devices = {t.device.type for t in args[:2] if isinstance(t, torch.Tensor)}
        devices |= {torch.device(kwargs["device"]).type} if kwargs.get("device") is not None else set()
        return "copies between devices" if len(devices) > 1 and blocking else None
    return None


class _NoHostSync(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, name = func._schema.name.split("::")
        why = why_it_waits(name, args, kwargs or {}) if space == "aten" else None
        if why is not None:
            raise AssertionError(f"{func} makes the host wait for the device: it {why}")
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def no_host_sync() -> Iterator[None]:
    """AssertionError at the first op inside that would make the host wait for a GPU; backward passes included."""
    with _NoHostSync():
        yield
