"""Memory for class tables: large [C, d] tensors whose rows are gathered at random."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from samplex_cuda._library import _native

__all__ = ["empty_table", "share"]

_PAIR_OF_LINES = 128  # bytes
_LARGE = 4 << 20  # bytes; a smaller table has few pages, and a fork copies each at most once
_MAPPED = 32 << 20  # bytes; malloc may keep smaller blocks for the next call, where a mapping is always fresh


def _large_table(numel: int, dtype: torch.dtype) -> Tensor:
    memory = _native.TableMemory(numel * dtype.itemsize)
    return torch.frombuffer(memory, dtype=dtype, count=numel)


def empty_table(
    rows: int, width: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """An uninitialised table laid out for rows that are gathered at random. `SampledClassifier` uses it for `weight`.

    On the CPU it asks for huge pages, so that the gather misses the TLB less, and starts on a pair of cache lines:
    processors fetch lines in pairs, and a row that begins with the second of one drags in a line of its neighbour at
    either end. A gather of 512-byte rows from memory is a quarter faster for it.

    Args:
        rows: number of classes.
        width: numbers per row.
        device: where; anywhere but on the CPU this is `torch.empty`.
        dtype: of the numbers.

    Returns:
        [rows, width], contiguous.

    Example:
        >>> from samplex_cuda.tables import empty_table
        >>> table = empty_table(1000, 128)
        >>> table.shape, table.is_contiguous(), table.data_ptr() % 128
        (torch.Size([1000, 128]), True, 0)
    """
    probe = torch.empty(0, device=device, dtype=dtype)
    if probe.device.type != "cpu" or type(probe) is not Tensor:
        return torch.empty(rows, width, device=device, dtype=dtype)
    item = probe.element_size()
    if rows * width * item >= _MAPPED:
        return _large_table(rows * width, probe.dtype).view(rows, width)
    flat = torch.empty(rows * width + _PAIR_OF_LINES // item, device=device, dtype=dtype)
    start = -flat.data_ptr() % _PAIR_OF_LINES // item
    table = flat[start : start + rows * width].view(rows, width)
    _native.advise_huge_pages(table.data_ptr(), table.nbytes)
    return table


def _tensors(owner: nn.Module | torch.optim.Optimizer | Tensor) -> Iterator[Tensor]:
    if isinstance(owner, Tensor):
        yield owner
    elif isinstance(owner, nn.Module):
        yield from owner.parameters()
        yield from owner.buffers()
    elif isinstance(owner, torch.optim.Optimizer):
        for group in owner.param_groups:
            yield from group["params"]
        for state in owner.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))
    else:
        raise TypeError(f"share: an owner must be a module, an optimizer or a tensor, got {type(owner).__name__}")


@torch.no_grad()
def share(*owners: nn.Module | torch.optim.Optimizer | Tensor) -> int:
    """Keeps training fast beside forked processes, such as the workers of a `DataLoader`.

    A fork marks every page of the parent's memory copy-on-write, so that each row a step updates costs a page fault
    and, in the end, the whole table is there twice. This call moves large CPU tensors (4 MiB and more) to memory that a
    fork does not copy. Call it once, after the optimizer is made and before the processes start.

    A forked child sees the table's current values, also those that the parent writes later. What the child writes stays
    in the child. Parameters, optimizer state and views keep their identity; `state_dict`, `copy.deepcopy` and pickling
    work as before. Nothing may write to the tensors during the call. Where the system has no such memory, this does
    nothing.

    Not needed with workers that are started by "spawn" or "forkserver". See docs/busy.md.

    Args:
        owners: modules (parameters and buffers), optimizers (parameters and state) and tensors.

    Returns:
        How many bytes are in such memory now.

    Example:
        >>> import samplex_cuda as sx
        >>> head = sx.SampledClassifier(64, 50_000, sx.samplers.Uniform(50_000), num_samples=20)
        >>> optimizer = sx.optim.RowAdagrad(head.parameters(), lr=0.1)
        >>> head.fuse_optimizer(optimizer)
        >>> moved = sx.tables.share(head, optimizer)  # then: DataLoader(..., num_workers=2)
    """
    tensors = [t for owner in owners for t in _tensors(owner)]
    moved: dict[int, Tensor] = {}  # by the old storage; the bytes of the new one
    done: dict[int, int] = {}  # shared bytes by storage
    for t in tensors:
        if t.device.type != "cpu" or t.layout is not torch.strided or t.is_shared():
            continue
        storage = t.untyped_storage()
        place = storage.data_ptr()
        if storage.nbytes() < _LARGE or place in done:
            continue
        if place not in moved:
            shared = _native.share_table(place)
            if shared >= 0:
                done[place] = shared
                continue
            fresh = _large_table(storage.nbytes(), torch.uint8)
            fresh.copy_(torch.empty(0, dtype=torch.uint8).set_(storage))
            if _native.share_table(fresh.data_ptr()) == 0:
                continue
            moved[place] = fresh
        # Tensors of one storage stay together.
        new = moved[place].untyped_storage()
        t.data = torch.empty(0, dtype=t.dtype).set_(new, t.storage_offset(), t.size(), t.stride())
        done[new.data_ptr()] = _native.table_shared_bytes(new.data_ptr())
    return sum(done.values())
