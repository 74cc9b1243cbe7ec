"""Loops over batches that have the same number of steps on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from samplex_cuda.distributed.collectives import backends_of, group_of

__all__ = ["even_batches"]

T = TypeVar("T")

_NAME = "sx.distributed.even_batches"
_END: Any = object()


def even_batches(batches: Iterable[T], empty: T, group: Any = None) -> Iterator[T]:
    """This rank's batches, then `empty` until the batches of every rank are used up.

    A sharded or replicated head and an encoder in DistributedDataParallel or FSDP2 need every rank in every step. In a
    loop over `even_batches` all ranks make the same number of steps, whatever the number of their batches. The loss
    stays the mean over the rows of all ranks. The encoder must accept a batch without rows; `BatchNorm` in training
    mode does not.

    If `len(batches)` is known on all ranks, they agree once, by one all-reduce of two numbers. Otherwise there is one
    such all-reduce per step, and the host waits for it. A rank that leaves the loop early must do so together with the
    others.

    Args:
        batches: of this rank; there may be none.
        empty: a batch without rows, e.g. `(x[:0], y[:0])`.
        group: a `DeviceMesh` of one dimension or a process group; None: all ranks.

    Returns:
        An iterator with the same number of batches on every rank.

    Raises:
        RuntimeError: after the last step, if `batches` holds more than `len(batches)`.

    Example:
        >>> import torch, torch.distributed as dist, samplex_cuda as sx
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> head = sx.SampledClassifier(8, 100, sx.samplers.Uniform(100), num_samples=5)
        >>> head = head.shard(encoder="average", batch_capacity=4)
        >>> x, y = torch.randn(10, 8), torch.arange(10)
        >>> batches = list(zip(x.split(4), y.split(4)))
        >>> for rows, targets in sx.distributed.even_batches(batches, (x[:0], y[:0])):
        ...     head(rows, targets).backward()
        >>> dist.destroy_process_group()
    """
    ranks = group_of(group, _NAME)
    if not isinstance(batches, Iterable):
        raise TypeError(f"{_NAME}: batches must be iterable, got {type(batches).__name__}")
    return _even(batches, empty, ranks)


def _even(batches: Iterable[T], empty: T, group: dist.ProcessGroup) -> Iterator[T]:
    length = _length(batches)
    unknown, most = _most(group, int(length is None), length or 0)
    own: Iterator[Any] = iter(batches)
    if unknown:
        while True:
            batch = next(own, _END)
            if not _most(group, int(batch is not _END))[0]:
                return
            yield empty if batch is _END else batch
    for _ in range(most):
        batch = next(own, _END)
        yield empty if batch is _END else batch
    if next(own, _END) is not _END:
        raise RuntimeError(
            f"{_NAME}: batches must yield at most len(batches) = {length} batches, got more; pass iter(batches) if "
            "the number is not known in advance"
        )


def _length(batches: Iterable[Any]) -> int | None:
    if not isinstance(batches, Sized):
        return None
    try:
        return len(batches)
    except TypeError:  # e.g. a DataLoader over an IterableDataset has the method, but no length
        return None


def _most(group: dist.ProcessGroup, *numbers: int) -> list[int]:
    """The maximum of each number over the ranks."""
    device = torch.device("cpu" if "cpu" in backends_of(group) else "cuda")
    found = torch.tensor(numbers, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    return [int(n) for n in found.tolist()]
