"""Files that are there as a whole or not at all, and tensors in them in the safetensors format.

The format (8 bytes length, a JSON header, raw little-endian data) is written here directly: tensors go to the file
without a copy of all of them in memory, and the checksum is computed on the way. Files read and write with the
`safetensors` package too.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import shutil
import struct
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

__all__ = [
    "CheckpointError",
    "check_inside",
    "read_tensors",
    "remove",
    "sync_directory",
    "write_file",
    "write_new",
    "write_tensors",
]

_CHUNK = 8 << 20
_MAX_HEADER = 100 << 20  # what the safetensors package allows
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written, or must not be read; the message says which and why.

    Example:
        >>> from samplex_cuda.training import checkpoint
        >>> try:
        ...     checkpoint.load("no/such/checkpoint-00000001")
        ... except checkpoint.CheckpointError as error:
        ...     print(error)
        checkpoint: no/such/checkpoint-00000001: does not exist
    """


def sync_directory(path: Path) -> None:
    """Waits until the entries of a folder are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:  # some network file systems cannot; the rename is in order there all the same
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


def check_inside(folder: str | Path, *names: str) -> None:
    """Refuses links that lead out of a folder: whoever made the folder would choose what is written or deleted there.

    Args:
        folder: whose; it may be a link itself.
        names: entries of it, which need not exist.

    Example:
        >>> import tempfile, pathlib
        >>> from samplex_cuda.training import checkpoint
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     pathlib.Path(folder, "checkpoints").symlink_to("/")
        ...     try:
        ...         checkpoint.check_inside(folder, "checkpoints")
        ...     except checkpoint.CheckpointError as error:
        ...         print(str(error).partition(": is ")[2])
        a link to /, outside of the folder; links out of a run folder are not followed: copy the files into it
    """
    root = Path(folder).resolve()
    for name in names:
        path = Path(folder) / name
        target = path.resolve()
        if target != root / name and not target.is_relative_to(root):
            raise CheckpointError(
                f"checkpoint: {path}: is a link to {target}, outside of the folder; links out of a run folder are not "
                "followed: copy the files into it"
            )


def remove(path: Path) -> None:
    """Removes a file, a folder with all that is in it, or a link, but never what a link points to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def write_new(path: Path, parts: Iterator[memoryview]) -> tuple[int, str]:
    """Writes a new file and syncs it; its bytes and sha256."""
    digest, count = hashlib.sha256(), 0
    path.unlink(missing_ok=True)  # the rest of a killed process with the same id, or a link
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        for part in parts:
            for begin in range(0, len(part), _CHUNK):
                piece = part[begin : begin + _CHUNK]
                digest.update(piece)
                count += len(piece)
                while len(piece):
                    piece = piece[os.write(handle, piece) :]
        os.fsync(handle)
    finally:
        os.close(handle)
    return count, digest.hexdigest()


def write_file(path: str | Path, data: bytes | str) -> None:
    """Puts a small file in place as a whole: written beside, synced, renamed.

    Args:
        path: where.
        data: its contents; text as UTF-8.

    Example:
        >>> import tempfile, pathlib
        >>> from samplex_cuda.training import checkpoint
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     checkpoint.write_file(f"{folder}/note.txt", "hello")
        ...     pathlib.Path(folder, "note.txt").read_text()
        'hello'
    """
    path = Path(path)
    temporary = path.with_name(f".tmp-{path.name}-{os.getpid()}")
    try:
        write_new(temporary, iter([memoryview(data.encode() if isinstance(data, str) else data)]))
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def write_tensors(path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """A safetensors file, written beside its place, synced and renamed.

    Args:
        path: where.
        tensors: dense tensors by name, on any device.
        metadata: strings for the header.

    Example:
        >>> import tempfile, torch
        >>> from samplex_cuda.training import checkpoint
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     checkpoint.write_tensors(f"{folder}/t.safetensors", {"x": torch.arange(3)})
        ...     checkpoint.read_tensors(f"{folder}/t.safetensors")
        {'x': tensor([0, 1, 2])}
    """
    path = Path(path)
    temporary = path.with_name(f".tmp-{path.name}-{os.getpid()}")
    try:
        write_new(temporary, tensor_parts(tensors, metadata))
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def tensor_parts(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None) -> Iterator[memoryview]:
    """The bytes of a safetensors file, in pieces."""
    if sys.byteorder != "little":
        raise CheckpointError("checkpoint: the machine must be little-endian, got a big-endian one")
    header: dict[str, Any] = {"__metadata__": {str(k): str(v) for k, v in metadata.items()}} if metadata else {}
    position = 0
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or tensor.dtype not in _CODES:
            got = f"{tensor.layout} {tensor.dtype}" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(f"checkpoint.save: tensors[{name!r}] must be a dense tensor of a real dtype, got {got}")
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, position + size],
        }
        position += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(struct.pack("<Q", len(text)) + text)
    for tensor in tensors.values():
        yield _bytes_of(tensor)


def read_tensors(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, on the CPU.

    Args:
        path: of the file. Nothing in it is executed; a header that does not fit the file is an error.

    Raises:
        CheckpointError: the only error, for any content of the file.

    Example:
        >>> import tempfile, torch
        >>> from samplex_cuda.training import checkpoint
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     checkpoint.write_tensors(f"{folder}/t.safetensors", {"x": torch.ones(1, dtype=torch.bfloat16)})
        ...     checkpoint.read_tensors(f"{folder}/t.safetensors")["x"].dtype
        torch.bfloat16
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            return _read_tensors(path, file, os.fstat(file.fileno()).st_size)
    except OSError as error:
        raise CheckpointError(f"checkpoint: {path}: cannot be read ({error.strerror})") from None


def _read_tensors(path: Path, file: IO[bytes], size: int) -> dict[str, Tensor]:
    start = file.read(8)
    length = struct.unpack("<Q", start)[0] if len(start) == 8 else _MAX_HEADER + 1
    if length > min(_MAX_HEADER, size - 8):
        raise CheckpointError(f"checkpoint: {path}: is not a safetensors file")
    try:
        header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        entries = sorted(_entry(name, entry) for name, entry in header.items())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"checkpoint: {path}: has a damaged header ({error})") from None
    found: dict[str, Tensor] = {}
    position = 0
    for begin, end, name, code, shape in entries:
        dtype = _DTYPES.get(code)
        if dtype is None:
            raise CheckpointError(f"checkpoint: {path}: {name!r} has the dtype {code}, which is not supported")
        nbytes = math.prod(shape) * dtype.itemsize
        if begin != position or end - begin != nbytes or end > size - 8 - length:
            raise CheckpointError(f"checkpoint: {path}: the place of {name!r} does not fit the file")
        try:
            tensor = torch.empty(shape, dtype=dtype)
        except (RuntimeError, TypeError, ValueError, OverflowError, MemoryError) as error:
            reason = str(error).partition("\n")[0]
            raise CheckpointError(f"checkpoint: {path}: {name!r} cannot be made ({reason})") from None
        if nbytes:
            view = tensor.reshape(-1).view(torch.uint8).numpy().data
            while len(view):
                got = file.readinto(view)  # type: ignore[attr-defined]
                if not got:
                    raise CheckpointError(f"checkpoint: {path}: ends inside {name!r}")
                view = view[got:]
        found[name] = tensor
        position = end
    return {name: found[name] for name in header}


def _entry(name: str, entry: dict[str, Any]) -> tuple[int, int, str, str, tuple[int, ...]]:
    """(begin, end, name, dtype, shape) of a header entry; ValueError, KeyError or TypeError if it is malformed."""
    begin, end = entry["data_offsets"]
    numbers = [begin, end, *entry["shape"]]
    if any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in numbers):
        raise ValueError(f"{name!r}: offsets and shape must be ints of at least 0")
    return begin, end, name, str(entry["dtype"]), tuple(entry["shape"])
