"""Memory for class tables: large [C, d] tensors whose rows are gathered at random."""

from __future__ import annotations

import errno
import mmap
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from samplex_cuda._checks import check_int, describe
from samplex_cuda._library import _native

__all__ = ["empty_table", "mapped_table", "share"]

_PAIR_OF_LINES = 128  # bytes
_LARGE = 4 << 20  # bytes; a smaller table has few pages, and a fork copies each at most once
_HEADER = 4096  # bytes before the rows of a mapped table: they begin on a page
_NPY = {torch.float32: "<f4", torch.float64: "<f8", torch.float16: "<f2", torch.bfloat16: "<V2", torch.int64: "<i8"}
_MAPPED = 32 << 20  # bytes; malloc may keep smaller blocks for the next call, where a mapping is always fresh
_files: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # parameter -> the file that it is mapped from


def _mapped(numel: int, dtype: torch.dtype, shared: bool) -> Tensor:
    shared = shared and os.environ.get("SAMPLEX_TABLES", "shared") != "private"
    return torch.frombuffer(_native.TableMemory(numel * dtype.itemsize, shared), dtype=dtype, count=numel)


def empty_table(
    rows: int,
    width: int,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    shared: bool = True,
) -> Tensor:
    """An uninitialized table laid out for rows that are gathered at random. `SampledClassifier` uses it for `weight`.

    On the CPU it asks for huge pages, so that the gather misses the TLB less, and starts on a pair of cache lines:
    processors fetch lines in pairs, and a row that begins with the second of one drags in a line of its neighbor at
    either end. A gather of 512-byte rows from memory is a quarter faster for it.

    A table of 32 MiB or more is in memory that a fork does not copy, if the system has such memory on huge pages: see
    `share`.

    Args:
        rows: number of classes.
        width: numbers per row.
        device: where; anywhere but on the CPU this is `torch.empty`.
        dtype: of the numbers.
        shared: whether the memory may be of that kind. The environment variable SAMPLEX_TABLES=private forbids it.

    Returns:
        [rows, width], contiguous.

    Example:
        >>> from samplex_cuda.tables import empty_table
        >>> table = empty_table(1000, 128)
        >>> table.shape, table.is_contiguous(), table.data_ptr() % 128
        (torch.Size([1000, 128]), True, 0)
    """
    check_int("empty_table", "rows", rows, 0, 1 << 52)
    check_int("empty_table", "width", width, 0, 1 << 32)
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"empty_table: dtype must be a torch.dtype, got {describe(dtype)}")
    probe = torch.empty(0, device=device, dtype=dtype)
    if probe.device.type != "cpu" or type(probe) is not Tensor:
        return torch.empty(rows, width, device=device, dtype=dtype)
    item = probe.element_size()
    if rows * width * item >= _MAPPED:
        try:
            return _mapped(rows * width, probe.dtype, shared).view(rows, width)
        except (MemoryError, TypeError):  # more than there is, or than 64 bits can say
            raise MemoryError(
                f"empty_table: can't allocate memory for rows = {rows} of width = {width}, {rows * width * item} bytes"
            ) from None
    size = rows * width * item
    if size == 0:
        return torch.empty(rows, width, device=device, dtype=dtype)
    flat = torch.empty(size + _PAIR_OF_LINES, dtype=torch.uint8, device="cpu")
    start = -flat.data_ptr() % _PAIR_OF_LINES
    # A storage of exactly these bytes: safetensors refuses a tensor that is a part of a larger one.
    aligned = torch.frombuffer(flat.numpy()[start : start + size], dtype=probe.dtype, count=rows * width)
    table = aligned.view(rows, width)
    _native.advise_huge_pages(table.data_ptr(), table.nbytes)
    return table


def mapped_table(
    file: str | Path, rows: int, width: int | None = None, *, dtype: torch.dtype | None = None, overwrite: bool = False
) -> Tensor:
    """A table of zeros in a new file that is mapped into memory: it may be larger than memory is.

    The system reads a page when it is touched, and writes changed ones back when it needs their memory, and within half
    a minute or so. The file is an npy array (bfloat16 as 2-byte items), so `np.load(file, mmap_mode="r")` reads it.

    The file is working memory and no checkpoint: it is written in place. A process that is killed leaves every row
    that it wrote, maybe some rows of an update and not the others; a machine that stops leaves less. Save checkpoints
    (`torch.save` of the state dicts writes from the mapping, `torch.load(..., mmap=True)` reads without a copy in
    memory), and begin with a new file when going on from one. See docs/host_tables.md.

    Args:
        file: the new file. Its folder must be on a disk with room for all of it; the room is reserved now.
        rows: number of classes.
        width: numbers per row; None: a table of one dimension.
        dtype: float32 (the default), float64, float16, bfloat16 or int64.
        overwrite: whether the file may be there already; it is replaced.

    Returns:
        [rows, width] or [rows], contiguous, on the CPU.

    Example:
        >>> import tempfile, samplex_cuda as sx
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     table = sx.tables.mapped_table(f"{folder}/rows.npy", 1000, 8)
        ...     table[3] = 1.0
        ...     table.shape, float(table.sum())
        (torch.Size([1000, 8]), 8.0)
    """
    op = "mapped_table"
    check_int(op, "rows", rows, 1, 1 << 52)
    if width is not None:
        check_int(op, "width", width, 1, 1 << 32)
    dtype = torch.float32 if dtype is None else dtype
    if not isinstance(dtype, torch.dtype) or dtype not in _NPY:
        raise TypeError(f"{op}: dtype must be one of {', '.join(str(d)[6:] for d in _NPY)}, got {describe(dtype)}")
    path = Path(file)
    shape = (rows,) if width is None else (rows, width)
    count = rows * (1 if width is None else width)
    size = _HEADER + count * dtype.itemsize
    flags = os.O_RDWR | os.O_CREAT | (0 if overwrite else os.O_EXCL)
    try:
        if overwrite and path.is_file():
            path.unlink()  # others may have the old one mapped
        handle = os.open(path, flags, 0o644)
    except FileExistsError:
        raise FileExistsError(
            f"{op}: file must be new, got {path}, which exists; remove it, or pass overwrite=True to replace it"
        ) from None
    except OSError as error:
        raise OSError(error.errno, f"{op}: file must be one that can be made, got {path}: {error.strerror}") from None
    try:
        _reserve(handle, size)
        header = f"{{'descr': '{_NPY[dtype]}', 'fortran_order': False, 'shape': {shape}, }}"
        os.pwrite(handle, b"\x93NUMPY\x01\x00" + struct.pack("<H", _HEADER - 10) + header.encode(), 0)
        os.pwrite(handle, b" " * (_HEADER - 11 - len(header)) + b"\n", 10 + len(header))
        memory = mmap.mmap(handle, size)
    except (OSError, ValueError, OverflowError) as error:
        path.unlink(missing_ok=True)
        words = getattr(error, "strerror", None) or str(error)
        raise OSError(getattr(error, "errno", None) or errno.ENOMEM, f"{op}: {path}: {size} bytes: {words}") from None
    finally:
        os.close(handle)
    if hasattr(mmap, "MADV_RANDOM"):
        memory.madvise(mmap.MADV_RANDOM)  # no read-ahead: the next row of a file is rarely the next that is touched
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=_HEADER).view(shape)


def set_table_file(p: Tensor, file: Path) -> None:
    """Says that a parameter is mapped from a file: row optimizers put its state into files beside that.

    Copies of the parameter, by pickle too, are in memory and in no file.

    Args:
        p: a parameter.
        file: see `mapped_table`.

    Example:
        >>> import torch
        >>> from pathlib import Path
        >>> from samplex_cuda.tables import set_table_file, table_file
        >>> weight = torch.nn.Parameter(torch.zeros(3, 2))
        >>> set_table_file(weight, Path("rows.npy"))
        >>> table_file(weight), table_file(torch.zeros(3, 2))
        (PosixPath('rows.npy'), None)
    """
    _files[p] = file


def table_file(p: Tensor) -> Path | None:
    """What `set_table_file` was told of `p`, otherwise None."""
    return _files.get(p)


def _reserve(handle: int, size: int) -> None:
    """Room for a file: a write to a mapping that finds none would end the process."""
    try:
        os.posix_fallocate(handle, 0, size)
    except (AttributeError, OSError) as error:
        if getattr(error, "errno", errno.EOPNOTSUPP) not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
        os.ftruncate(handle, size)


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
    """Moves large CPU tensors to memory that a fork does not copy: training stays fast beside forked processes.

    A fork, such as the start of a `DataLoader` worker, marks every private page copy-on-write, so that each row a step
    updates costs a page fault and, in the end, the whole table is in memory twice. Large tables of this library need
    no call, unless the system has shared memory on small pages only (Linux before 6.1). The call is for those systems,
    and for other tensors: an `nn.Embedding`, the state of an optimizer of torch. It takes tensors of 4 MiB and more.
    Call it once, after the optimizer is made and before the processes start. Nothing may write to the tensors during
    the call.

    A forked child sees the current values, also those that the parent writes later. What the child writes stays in the
    child. Parameters and state tensors keep their identity; `state_dict`, `copy.deepcopy` and pickling work as before.
    Other tensors that view the same memory must be among the owners' tensors too, or they keep the old memory. Without
    such memory (not on Linux, no file descriptor left) this does nothing. docs/busy.md says more.

    Args:
        owners: modules (parameters and buffers), optimizers (parameters and state) and tensors.

    Returns:
        How many bytes of them are in such memory now.

    Example:
        >>> import torch, samplex_cuda as sx
        >>> embedding = torch.nn.Embedding(20_000, 64)
        >>> optimizer = torch.optim.Adagrad(embedding.parameters())
        >>> moved = sx.tables.share(embedding, optimizer)  # then: DataLoader(..., num_workers=2)
    """
    moved: dict[int, Tensor] = {}  # the bytes of the new storage, by the address of the old one
    done: dict[int, int] = {}  # shared bytes, by the address of a storage
    for t in (t for owner in owners for t in _tensors(owner)):
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
            fresh = _mapped(storage.nbytes(), torch.uint8, shared=True)
            if _native.share_table(fresh.data_ptr()) == 0:
                continue
            moved[place] = fresh.copy_(torch.empty(0, dtype=torch.uint8).set_(storage))
        new = moved[place].untyped_storage()
        done[new.data_ptr()] = _native.table_shared_bytes(new.data_ptr())
        t.data = torch.empty(0, dtype=t.dtype).set_(new, t.storage_offset(), t.size(), t.stride())
    return sum(done.values())
