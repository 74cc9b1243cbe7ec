"""Checkpoints: a directory with tensors, a description and checksums, that is there as a whole or not at all.

    checkpoint-00001200/
        tensors.safetensors   every tensor, in the safetensors format
        meta.json             counters and what else is not a tensor
        manifest.json         bytes and sha256 of the two others

A checkpoint is written beside its place (`.tmp-...`), every file and the directory are synced to the disk, and a rename
puts it there. Older ones are removed after that, never before. What is read back is checked against the manifest, so
that a truncated or altered checkpoint is refused with the reason and the one before is used.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from samplex_cuda._checks import check_int
from samplex_cuda.training.safe_files import (
    CheckpointError,
    check_inside,
    read_tensors,
    remove,
    sync_directory,
    tensor_parts,
    write_file,
    write_new,
    write_tensors,
)

__all__ = [
    "CheckpointError",
    "check_inside",
    "clean",
    "directory_name",
    "latest",
    "list_checkpoints",
    "load",
    "prune",
    "put_back",
    "read_tensors",
    "save",
    "verify",
    "write_file",
    "write_tensors",
]

TENSORS, META, MANIFEST = "tensors.safetensors", "meta.json", "manifest.json"
FORMAT = 1
_PIECE = 8 << 20
_NAME = re.compile(r"checkpoint-(\d{8,})")


def directory_name(step: int) -> str:
    """The name of the checkpoint of a step.

    Example:
        >>> from samplex_cuda.training import checkpoint
        >>> checkpoint.directory_name(1200)
        'checkpoint-00001200'
    """
    return f"checkpoint-{check_int('checkpoint.directory_name', 'step', step, 0):08d}"


# ---------------------------------------------------------------------------------------------------- checkpoints
def save(
    directory: str | Path, tensors: Mapping[str, Tensor], meta: Mapping[str, Any], keep: int | None = None
) -> Path:
    """Writes a checkpoint: all of it, or nothing.

    Args:
        directory: its final place, e.g. `run/checkpoints/checkpoint-00001200`; the folder above it must exist.
        tensors: by name; dense, any device.
        meta: what JSON can hold.
        keep: how many checkpoints of the folder stay, this one included; others are removed once this one is on the
            disk. None: all.

    Returns:
        The directory.

    Raises:
        CheckpointError: no space, no permission, no folder. What was there before is untouched.

    Example:
        >>> import tempfile, torch
        >>> from samplex_cuda.training import checkpoint
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = checkpoint.save(f"{folder}/checkpoint-00000005", {"w": torch.ones(2)}, {"step": 5})
        ...     checkpoint.load(path)
        ({'w': tensor([1., 1.])}, {'step': 5})
    """
    directory = Path(directory)
    if keep is not None:
        check_int("checkpoint.save", "keep", keep)
    try:
        described = json.dumps(dict(meta), indent=1, allow_nan=True).encode()
    except (TypeError, ValueError) as error:
        raise TypeError(f"checkpoint.save: meta must be what JSON can hold, got {error}") from None
    temporary = directory.with_name(f".tmp-{directory.name}-{os.getpid()}")
    aside = directory.with_name(f".old-{directory.name}")
    try:
        check_inside(directory.parent, directory.name)
        remove(temporary)
        temporary.mkdir()
        files = {}
        for name, parts in ((TENSORS, tensor_parts(tensors, None)), (META, iter([memoryview(described)]))):
            count, digest = write_new(temporary / name, parts)
            files[name] = {"bytes": count, "sha256": digest}
        manifest = json.dumps({"format": FORMAT, "files": files}, indent=1).encode()
        write_new(temporary / MANIFEST, iter([memoryview(manifest)]))
        sync_directory(temporary)
        if directory.exists():
            # A directory cannot be replaced in one move; `clean` puts the old one back if we end between the two.
            remove(aside)
            os.rename(directory, aside)
        os.rename(temporary, directory)
        sync_directory(directory.parent)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if aside.exists() and not directory.exists():
            os.rename(aside, directory)
        raise CheckpointError(_why_not(directory, tensors, error)) from error
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    shutil.rmtree(aside, ignore_errors=True)
    if keep is not None:
        prune(directory.parent, keep, directory.name)
    return directory


def _why_not(directory: Path, tensors: Mapping[str, Tensor], error: OSError) -> str:
    needed = sum(t.numel() * t.element_size() for t in tensors.values())
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        try:
            free = f", {shutil.disk_usage(directory.parent).free / 1e6:,.1f} MB free"
        except OSError:
            free = ""
        reason = f"no space for it ({os.strerror(error.errno)}; {needed / 1e6:,.1f} MB needed{free})"
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        reason = f"the folder {directory.parent} cannot be written to ({os.strerror(error.errno)})"
    elif error.errno in (errno.ENOENT, errno.ENOTDIR):
        reason = f"the folder {directory.parent} does not exist"
    else:
        reason = str(error)
    return f"checkpoint: {directory}: could not be saved: {reason}. Earlier checkpoints are untouched."


def verify(directory: str | Path) -> None:
    """Reads a checkpoint through and compares it with its manifest.

    Raises:
        CheckpointError: with the reason, where something is missing, truncated or altered.

    Example:
        >>> import tempfile, torch, pathlib
        >>> from samplex_cuda.training import checkpoint
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = checkpoint.save(f"{folder}/checkpoint-00000005", {"w": torch.ones(2)}, {"step": 5})
        ...     checkpoint.verify(path)
        ...     _ = (path / "meta.json").write_text("{}")
        ...     try:
        ...         checkpoint.verify(path)
        ...     except checkpoint.CheckpointError as error:
        ...         print(str(error).split(": ")[-1])
        meta.json is truncated or altered, 2 bytes where 14 were written
    """
    directory = Path(directory)
    where = f"checkpoint: {directory}"
    check_inside(directory.parent, directory.name)
    if not directory.is_dir():
        raise CheckpointError(f"{where}: does not exist")
    check_inside(directory, MANIFEST, TENSORS, META)
    try:
        manifest = json.loads((directory / MANIFEST).read_bytes())
        if isinstance(manifest, dict) and "world" in manifest:
            _verify_shards(directory)
            return
        if manifest["format"] != FORMAT:
            raise CheckpointError(f"{where}: format must be {FORMAT}, got {manifest['format']!r}")
        files = {name: (int(entry["bytes"]), str(entry["sha256"])) for name, entry in manifest["files"].items()}
    except OSError as error:
        raise CheckpointError(f"{where}: {MANIFEST} cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        raise CheckpointError(f"{where}: {MANIFEST} is damaged") from None
    for name in (TENSORS, META):
        if name not in files:
            raise CheckpointError(f"{where}: {MANIFEST} does not name {name}")
        wanted, digest = files[name]
        try:
            size = (directory / name).stat().st_size
            if size != wanted:
                raise CheckpointError(
                    f"{where}: {name} is truncated or altered, {size:,} bytes where {wanted:,} were written"
                )
            found = hashlib.sha256()
            with (directory / name).open("rb") as file:
                while part := file.read(_PIECE):
                    found.update(part)
        except OSError as error:
            raise CheckpointError(f"{where}: {name} cannot be read ({error.strerror})") from None
        if found.hexdigest() != digest:
            raise CheckpointError(f"{where}: {name} is altered: its sha256 differs from the recorded one")


def _verify_shards(directory: Path) -> None:
    """The same for a checkpoint of ranks; see `samplex_cuda.distributed`."""
    from samplex_cuda.distributed import CheckpointError as ShardsError
    from samplex_cuda.distributed import verify_checkpoint

    try:
        verify_checkpoint(directory)
    except ShardsError as error:
        raise CheckpointError(f"checkpoint: {directory}: {error}") from None


def load(directory: str | Path, *, check: bool = True) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors (on the CPU) and meta of a checkpoint.

    Args:
        directory: of the checkpoint.
        check: compare with the checksums first; False where `latest` has just done so.

    Example:
        >>> import tempfile, torch
        >>> from samplex_cuda.training import checkpoint
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = checkpoint.save(f"{folder}/checkpoint-00000001", {"w": torch.ones(2)}, {"step": 1})
        ...     tensors, meta = checkpoint.load(path)
        >>> meta["step"]
        1
    """
    directory = Path(directory)
    if check:
        verify(directory)
    try:
        return read_tensors(directory / TENSORS), json.loads((directory / META).read_bytes())
    except OSError as error:
        raise CheckpointError(f"checkpoint: {directory}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"checkpoint: {directory}: {META} is damaged ({error})") from None


def _folder(run_dir: Path) -> Path:
    check_inside(run_dir, "checkpoints")
    return run_dir / "checkpoints" if (run_dir / "checkpoints").is_dir() else run_dir


def list_checkpoints(run_dir: str | Path) -> list[Path]:
    """The checkpoints of a run folder (or of its `checkpoints` folder), oldest first, unchecked.

    Example:
        >>> from samplex_cuda.training import checkpoint
        >>> checkpoint.list_checkpoints("no/such/run")
        []
    """
    folder = _folder(Path(run_dir))
    if not folder.is_dir():
        return []
    found = [(int(m.group(1)), path) for path in folder.iterdir() if (m := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def latest(run_dir: str | Path, on_refused: Callable[[Path, str], None] | None = None) -> Path | None:
    """The newest checkpoint of a run that is whole; None if there is none.

    Args:
        run_dir: a run folder, or a folder of checkpoints.
        on_refused: called with each newer checkpoint that was passed over, and the reason; by default a warning.

    Example:
        >>> import tempfile, torch
        >>> from samplex_cuda.training import checkpoint
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for step in (5, 10):
        ...         path = checkpoint.save(f"{folder}/{checkpoint.directory_name(step)}", {}, {"step": step})
        ...     (path / "tensors.safetensors").unlink()
        ...     found = checkpoint.latest(folder, on_refused=lambda path, reason: print(path.name, "refused"))
        ...     found.name
        checkpoint-00000010 refused
        'checkpoint-00000005'
    """
    for path in reversed(list_checkpoints(run_dir)):
        try:
            verify(path)
        except CheckpointError as error:
            if on_refused is not None:
                on_refused(path, str(error))
            else:
                import warnings

                warnings.warn(f"{error}; using the previous checkpoint", stacklevel=2)
            continue
        return path
    return None


def prune(folder: str | Path, keep: int, newest: str = "") -> list[Path]:
    """Removes all but the `keep` newest checkpoints of a folder; returns what was removed.

    Args:
        folder: of checkpoints.
        keep: how many stay.
        newest: name of the checkpoint that counts as the newest one, whatever its step.

    Example:
        >>> import tempfile
        >>> from samplex_cuda.training import checkpoint
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for step in (1, 2, 3):
        ...         _ = checkpoint.save(f"{folder}/{checkpoint.directory_name(step)}", {}, {}, keep=2)
        ...     [path.name for path in checkpoint.list_checkpoints(folder)]
        ['checkpoint-00000002', 'checkpoint-00000003']
    """
    old = sorted(list_checkpoints(folder), key=lambda path: path.name == newest)[:-keep]
    for path in old:
        # Out of sight first: a half-removed checkpoint would be refused with a warning.
        hidden = path.with_name(f".tmp-{path.name}-{os.getpid()}")
        try:
            os.rename(path, hidden)
        except OSError:
            continue
        remove(hidden)
    return old


def put_back(folder: str | Path) -> None:
    """Undoes a `save` that was killed between its two renames: the checkpoint of before gets its name again.

    Example:
        >>> import tempfile, pathlib
        >>> from samplex_cuda.training import checkpoint
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     pathlib.Path(folder, ".old-checkpoint-00000005").mkdir()
        ...     checkpoint.put_back(folder)
        ...     [path.name for path in checkpoint.list_checkpoints(folder)]
        ['checkpoint-00000005']
    """
    for path in Path(folder).glob(".old-*"):
        place = path.with_name(path.name.removeprefix(".old-"))
        if not place.exists() and not path.is_symlink():
            os.rename(path, place)


def clean(folder: str | Path) -> list[Path]:
    """Removes what a killed process left half-written; returns what was removed. Call it before writing, not while.

    Example:
        >>> import tempfile, pathlib
        >>> from samplex_cuda.training import checkpoint
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     pathlib.Path(folder, ".tmp-checkpoint-00000005-77").mkdir()
        ...     [path.name for path in checkpoint.clean(folder)]
        ['.tmp-checkpoint-00000005-77']
    """
    put_back(folder)
    folder = Path(folder)
    removed = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.name.startswith((".tmp-", ".old-")):
            removed.append(path)
            remove(path)
    return removed
