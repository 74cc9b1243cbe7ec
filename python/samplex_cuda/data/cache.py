"""Converted files: a text or zip file is read once, and its arrays are memory-mapped from then on.

A cache is a directory of npy files and a `meta.json` with the size, time and SHA-256 of the source and the SHA-256 of
each array. It is written under another name, synced and renamed, so that it is there completely or not at all. A source
that changed, another version of the layout, and an array file that was cut or altered are noticed: the source is
converted again, and the log says why.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import shutil
import time
import tokenize
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np

from samplex_cuda.data.lines import BadLines

try:
    import fcntl
except ImportError:  # no such locks on this system: what killed conversions leave is judged by its age alone
    fcntl = None  # type: ignore[assignment]

__all__ = ["ArrayWriter", "Conversion", "Converted", "converted"]

VERSION = 1  # of the layout; a cache of another version is converted again
VERIFY = ("size", "cache", "all")

_HEADER = 128  # bytes of an npy header that has room for any length
_STALE = 3600.0  # seconds after which a directory without a lock is the rest of a killed conversion
_PIECE = 1 << 22

# What json and numpy raise for bytes that are not theirs.
_UNREADABLE = (
    ValueError,
    TypeError,
    SyntaxError,
    tokenize.TokenError,
    EOFError,
    OverflowError,
    RecursionError,
    MemoryError,
    IndexError,
)

logger = logging.getLogger("samplex_cuda.data")
_verified: set[tuple[str, int, int]] = set()  # array files whose checksum this process has seen to be right


class SourceChangedError(RuntimeError):
    """Somebody wrote to a file while it was converted."""


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _file_sha256(path: Path, begin: int = 0) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        file.seek(begin)
        while part := file.read(_PIECE):
            digest.update(part)
    return digest.hexdigest()


class ArrayWriter:
    """An npy file that grows by appending; its header is written when the length is known.

    Args:
        path: where.
        dtype: of the numbers.
        width: numbers per row; None for a one-dimensional array.

    Example:
        >>> import tempfile, numpy as np
        >>> from pathlib import Path
        >>> from samplex_cuda.data.cache import ArrayWriter
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     writer = ArrayWriter(Path(folder) / "a.npy", np.int32)
        ...     writer.append([1, 2])
        ...     writer.append([3])
        ...     writer.close()
        ...     np.load(Path(folder) / "a.npy").tolist()
        [1, 2, 3]
    """

    def __init__(self, path: Path, dtype: Any, width: int | None = None) -> None:
        self.path, self.dtype, self.width = path, np.dtype(dtype), width
        self.length = 0
        self._file = path.open("wb")
        self._file.write(bytes(_HEADER))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape so far."""
        return (self.length,) if self.width is None else (self.length, self.width)

    def append(self, values: Any) -> None:
        """Add numbers [n], or rows [n, width]."""
        part = np.ascontiguousarray(values, dtype=self.dtype)
        self._file.write(part.data if part.size else b"")
        self.length += len(part)

    def close(self) -> None:
        """Write the header and sync."""
        shape = repr(self.shape)
        header = f"{{'descr': {self.dtype.str!r}, 'fortran_order': False, 'shape': {shape}, }}"
        text = header.encode().ljust(_HEADER - 11) + b"\n"
        self._file.seek(0)
        self._file.write(b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def abandon(self) -> None:
        """Close without a header."""
        self._file.close()


class Conversion:
    """What a converter works with: arrays to append to, facts to state, bad lines to count."""

    def __init__(self, where: str, folder: Path, sources: list[Path], skip_bad: int) -> None:
        self.where, self.folder, self.sources = where, folder, sources
        self.source = sources[0]
        self.bad = BadLines(where, self.source, skip_bad)
        self.facts: dict[str, Any] = {}
        self.digests = [hashlib.sha256() for _ in sources]
        self.hashed = False  # whether the converter passed the sources through the digests
        self._writers: dict[str, ArrayWriter] = {}
        self.texts: dict[str, list[str]] = {}

    def writer(self, name: str, dtype: Any, width: int | None = None) -> ArrayWriter:
        """A new array of the cache."""
        self._writers[name] = ArrayWriter(self.folder / f"{name}.npy", dtype, width)
        return self._writers[name]

    def finished(self, name: str) -> np.ndarray:
        """An array that is complete, mapped for reading and writing: for a second pass."""
        writer = self._writers[name]
        writer.close()
        if not writer.length:
            return np.empty(writer.shape, writer.dtype)
        return np.load(writer.path, mmap_mode="r+", allow_pickle=False)

    def drop(self, name: str) -> None:
        """Take an array out again: it was only needed on the way."""
        writer = self._writers.pop(name)
        writer.abandon()
        writer.path.unlink()

    def finish(self) -> dict[str, Any]:
        """Close and checksum everything; the arrays of meta.json."""
        arrays = {}
        for name, writer in self._writers.items():
            if not writer._file.closed:
                writer.close()
            else:
                _sync(writer.path)  # a second pass wrote to it
            arrays[name] = {
                "dtype": writer.dtype.str,
                "shape": list(writer.shape),
                "bytes": writer.path.stat().st_size,
                "sha256": _file_sha256(writer.path, _HEADER),
            }
        return arrays

    def abandon(self) -> None:
        """Close all files."""
        for writer in self._writers.values():
            writer.abandon()


class Converted:
    """The arrays of a cache and what was stated about them.

    Attributes:
        arrays: by name, memory-mapped.
        digests: the SHA-256 of each.
        facts: what the converter stated.
        notes: what a user should know: skipped lines, a conversion that was needed again.
        folder: where they lie.
    """

    def __init__(self, folder: Path, meta: dict[str, Any]) -> None:
        self.folder, self.facts, self.notes = folder, meta["facts"], list[str]()
        self.arrays: dict[str, np.ndarray] = {}
        self.digests = {name: entry["sha256"] for name, entry in meta["arrays"].items()}
        for name, entry in meta["arrays"].items():
            shape, dtype = tuple(entry["shape"]), np.dtype(entry["dtype"])
            if 0 in shape:
                self.arrays[name] = np.empty(shape, dtype)
                continue
            self.arrays[name] = np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)
            if self.arrays[name].shape != shape or self.arrays[name].dtype != dtype:
                raise ValueError(f"the header of {name}.npy is altered")

    def words(self, name: str) -> list[str]:
        """A list of words of the cache."""
        return (self.folder / f"{name}.txt").read_text(encoding="utf-8").split("\n")[:-1]


def _write_json(path: Path, content: Any) -> None:
    with path.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _stat(path: Path) -> dict[str, int]:
    found = path.stat()
    return {"bytes": found.st_size, "mtime_ns": found.st_mtime_ns}


def _user_cache() -> Path:
    given = os.environ.get("SAMPLEX_CACHE_DIR")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "samplex-cuda"


def cache_folder(sources: list[Path], kind: str, options: dict[str, Any], cache_dir: Path | str | None) -> Path:
    """Where the cache of these sources lies: beside the first one, or in `cache_dir`, or in the user's cache.

    The user's cache ($SAMPLEX_CACHE_DIR, or samplex-cuda below $XDG_CACHE_HOME or ~/.cache) is for files in a folder
    that cannot be written to. What changes the arrays (the format and its options) is part of the name.
    """
    source = sources[0]
    beside = cache_dir is None and os.access(source.parent, os.W_OK)
    what: list[Any] = [kind, options, [s.name for s in sources]]
    if not beside:
        what.append([str(s.resolve()) for s in sources])  # files of one name in several folders share the place
    key = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:10]
    parent = source.parent if beside else Path(cache_dir) if cache_dir is not None else _user_cache()
    return parent / f"{source.name}.{kind}-{key}.sxcache"


def _reason_to_convert(folder: Path, sources: list[Path], verify: str) -> tuple[str | None, dict[str, Any] | None]:
    """(why the cache cannot be used, its meta): (None, meta) where it can be."""
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        if meta["version"] != VERSION:
            return f"it has layout version {meta['version']}, this is {VERSION}", None
        changed = False
        for source, entry in zip(sources, meta["sources"], strict=True):
            same = {name: entry[name] for name in ("bytes", "mtime_ns")} == _stat(source)
            if same and verify != "all":
                continue
            if entry["bytes"] != source.stat().st_size or entry["sha256"] != _file_sha256(source):
                return f"{source} has changed", None
            entry |= _stat(source)  # touched or copied, but the same
            changed = changed or not same
        for name, entry in (*meta["arrays"].items(), *meta["texts"].items()):
            is_array = name in meta["arrays"]
            path = folder / (f"{name}.npy" if is_array else f"{name}.txt")
            found = path.stat()
            if found.st_size != entry["bytes"]:
                return f"{path.name} has {found.st_size} bytes in place of {entry['bytes']}", None
            seen = (str(path.resolve()), found.st_mtime_ns, found.st_size)
            if verify == "size" or (verify == "cache" and seen in _verified):
                continue
            if _file_sha256(path, _HEADER if is_array else 0) != entry["sha256"]:
                return f"the checksum of {path.name} does not fit", None
            _verified.add(seen)
        Converted(folder, meta)
    except FileNotFoundError as error:
        return f"{Path(error.filename).name if error.filename else 'a file'} is missing", None
    except (*_UNREADABLE, OSError, KeyError, AttributeError) as error:
        return f"it cannot be read ({error})", None
    if changed:
        with contextlib.suppress(OSError):  # a cache that cannot be written to is checked again next time
            _replace_meta(folder, meta)
    return None, meta


def _replace_meta(folder: Path, meta: dict[str, Any]) -> None:
    aside = folder / f"meta.{uuid.uuid4().hex}.tmp"
    _write_json(aside, meta)
    aside.replace(folder / "meta.json")
    _sync(folder)


def _lock_of(aside: Path) -> Path:
    return aside.with_name(aside.name.removesuffix(".tmp") + ".lock")


def _locked(path: Path, mode: str) -> IO[str] | None:
    """The file with its lock, which ends with the process; None if another process has it or there are no locks."""
    if fcntl is None:
        return None
    file = None
    try:
        file = path.open(mode)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        if file is not None:
            file.close()
        return None
    return file


def _clear_rests(folder: Path) -> None:
    """Removes what killed conversions have left: those whose lock is free, and those without one that are old."""
    for lock in folder.parent.glob(f".{folder.name}.*.lock"):
        file = _locked(lock, "r")
        if file is None:
            continue
        with file:
            shutil.rmtree(lock.with_suffix(".tmp"), ignore_errors=True)
            lock.unlink(missing_ok=True)
    for rest in folder.parent.glob(f".{folder.name}.*.tmp"):
        if _lock_of(rest).exists():
            continue
        try:
            newest = max([rest.stat().st_mtime, *(file.stat().st_mtime for file in rest.iterdir())])
        except OSError:
            continue
        if time.time() - newest > _STALE:
            shutil.rmtree(rest, ignore_errors=True)


def _aside(folder: Path) -> Path:
    return folder.parent / f".{folder.name}.{uuid.uuid4().hex}.tmp"


def _put_in_place(aside: Path, folder: Path, sources: list[Path], verify: str) -> dict[str, Any] | None:
    """Renames a new cache to its place; the meta of the one that is there where another process was faster."""
    while True:
        try:
            aside.rename(folder)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        else:
            _sync(folder.parent)
            return None
        _, theirs = _reason_to_convert(folder, sources, verify)
        if theirs is not None:  # somebody may be reading it, and it is as good
            shutil.rmtree(aside, ignore_errors=True)
            return theirs
        old = _aside(folder)
        with contextlib.suppress(FileNotFoundError):  # another process took it away
            folder.rename(old)
        shutil.rmtree(old, ignore_errors=True)


def _convert(
    where: str, folder: Path, sources: list[Path], convert: Callable[[Conversion], None], skip_bad: int, verify: str
) -> dict[str, Any]:
    aside = _aside(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _clear_rests(folder)
        held = _locked(_lock_of(aside), "w")
        aside.mkdir()
    except OSError as error:
        with contextlib.suppress(OSError):
            _lock_of(aside).unlink()
        raise OSError(
            f"{where}: the cache folder {folder.parent} cannot be written to ({error.strerror}); cache_dir or the "
            "variable SAMPLEX_CACHE_DIR names another"
        ) from error
    conversion = Conversion(where, aside, sources, skip_bad)
    before = [_stat(source) for source in sources]
    try:
        convert(conversion)
        arrays = conversion.finish()
        texts = {}
        for name, words in conversion.texts.items():
            path = aside / f"{name}.txt"
            with path.open("w", encoding="utf-8", newline="\n") as file:
                file.writelines(f"{word}\n" for word in words)
                file.flush()
                os.fsync(file.fileno())
            texts[name] = {"bytes": path.stat().st_size, "sha256": _file_sha256(path)}
        if [_stat(source) for source in sources] != before:
            raise SourceChangedError(f"{where}: {sources[0]} changed while it was read")
        hashes = (
            [d.hexdigest() for d in conversion.digests] if conversion.hashed else [_file_sha256(s) for s in sources]
        )
        meta = {
            "version": VERSION,
            "sources": [
                {"name": source.name, **stat, "sha256": sha256}
                for source, stat, sha256 in zip(sources, before, hashes, strict=True)
            ],
            "arrays": arrays,
            "texts": texts,
            "facts": conversion.facts,
            "bad_lines": conversion.bad.found,
        }
        _write_json(aside / "meta.json", meta)
        _sync(aside)
        meta = _put_in_place(aside, folder, sources, verify) or meta
    except BaseException:
        conversion.abandon()
        shutil.rmtree(aside, ignore_errors=True)
        raise
    finally:
        if held is not None:
            _lock_of(aside).unlink(missing_ok=True)
            held.close()
    return meta


def converted(
    where: str,
    sources: list[Path],
    kind: str,
    options: dict[str, Any],
    convert: Callable[[Conversion], None],
    *,
    skip_bad: int = 0,
    cache_dir: Path | str | None = None,
    verify: str = "cache",
) -> Converted:
    """The arrays of a source, from its cache where that is good, else converted now.

    Args:
        where: the reader, for messages.
        sources: the files; the first gives the cache its name.
        kind: the format, part of the name.
        options: what changes the arrays, JSON.
        convert: fills a `Conversion`.
        skip_bad: how many malformed lines may be left out.
        cache_dir: where caches go; see `cache_folder`.
        verify: what is checked before a cache is used. "size": size and time of the source, sizes of the arrays.
            "cache": also the checksum of each array, once a process. "all": also that of the source.
    """
    if verify not in VERIFY:
        raise ValueError(f"{where}: verify must be one of {', '.join(VERIFY)}, got {verify!r}")
    for source in sources:
        if not source.is_file():
            raise FileNotFoundError(f"{where}: {source}: there is no such file")
    bad = BadLines(where, sources[0], skip_bad)
    folder = cache_folder(sources, kind, options, cache_dir)
    notes = []
    meta: dict[str, Any] | None = None
    if folder.exists():
        reason, meta = _reason_to_convert(folder, sources, verify)
        if reason is not None:
            notes.append(f"{where}: {sources[0]} is converted again: cache {folder.name}: {reason}")
            logger.warning(notes[-1])
    if meta is None:
        begin = time.perf_counter()
        meta = _convert(where, folder, sources, convert, skip_bad, verify)
        logger.info("%s: converted %s in %.1f s", where, sources[0], time.perf_counter() - begin)
        for name, entry in meta["arrays"].items():
            found = (folder / f"{name}.npy").stat()
            if entry["bytes"] == found.st_size:
                _verified.add((str((folder / f"{name}.npy").resolve()), found.st_mtime_ns, found.st_size))
    bad.replay(meta["bad_lines"])
    skipped = bad.note()
    if skipped is not None:
        notes.append(skipped)
        logger.warning(skipped)
    result = Converted(folder, meta)
    result.notes = notes
    return result
