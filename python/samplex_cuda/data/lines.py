"""Text files as blocks of whole lines, and the account of lines that cannot be read."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from samplex_cuda._checks import check_int

__all__ = ["BadLineError", "BadLines", "blocks", "logical_suffix"]

BLOCK = 4 << 20  # bytes that are parsed at once; what a reader holds is a small multiple of it
MAX_LINE = 1 << 28

_OPENERS: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}


class BadLineError(ValueError):
    """A line that cannot be read, with the reason."""


class BadLines:
    """Counts malformed lines; the first one above `allowed` is an error that names file, line and reason.

    Args:
        where: the reader, for messages.
        path: the file, for messages.
        allowed: how many lines may be left out.

    Example:
        >>> from samplex_cuda.data.lines import BadLines
        >>> bad = BadLines("xc_file", "train.txt", allowed=1)
        >>> bad.add(3, "feature 'x' is not a number")
        >>> bad.note()
        "xc_file: skipped 1 bad line of train.txt (line 3: feature 'x' is not a number)"
        >>> bad.add(7, "label -1 is below 0")
        Traceback (most recent call last):
        ...
        ValueError: xc_file: train.txt:7: label -1 is below 0 (more than skip_bad=1 bad lines)
    """

    def __init__(self, where: str, path: Path | str, allowed: int) -> None:
        self.where, self.path, self.allowed = where, str(path), check_int(where, "skip_bad", allowed, 0)
        self.found: list[tuple[int, str]] = []

    def add(self, line: int, reason: str) -> None:
        """One more; raises where that is one too many."""
        if len(self.found) >= self.allowed:
            more = f" (more than skip_bad={self.allowed} bad lines)" if self.allowed else ""
            raise ValueError(f"{self.where}: {self.path}:{line}: {reason}{more}")
        self.found.append((line, reason))

    def replay(self, found: list[Any]) -> None:
        """Add what an earlier conversion skipped: what it was allowed may be more than is allowed now."""
        for line, reason in found:
            self.add(int(line), str(reason))

    def note(self) -> str | None:
        """What was skipped, in words; None if nothing was."""
        if not self.found:
            return None
        count = f"{len(self.found)} bad line{'s' if len(self.found) > 1 else ''}"
        first = "; ".join(f"line {line}: {reason}" for line, reason in self.found[:3])
        more = "; ..." if len(self.found) > 3 else ""
        return f"{self.where}: skipped {count} of {self.path} ({first}{more})"


def logical_suffix(path: Path) -> str:
    """The extension in lower case, that of the inner name where the file is compressed.

    Example:
        >>> from pathlib import Path
        >>> from samplex_cuda.data.lines import logical_suffix
        >>> logical_suffix(Path("train.svm.xz"))
        '.svm'
    """
    return Path(path.stem if path.suffix.lower() in _OPENERS else path.name).suffix.lower()


class _Hashing(io.RawIOBase):
    """A raw file whose bytes pass through a digest as they are read."""

    def __init__(self, raw: IO[bytes], digest: Any) -> None:
        self.raw, self.digest = raw, digest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self.raw.readinto(buffer)  # type: ignore[attr-defined]
        self.digest.update(memoryview(buffer)[:count])
        return count


def blocks(where: str, path: Path, digest: Any, size: int | None = None) -> Iterator[tuple[bytes, int]]:
    """Blocks of whole lines of a file, plain or compressed (.gz, .bz2, .xz), and the number of the first line of each.

    Every line ends with a newline, the last one too. A byte-order mark and carriage returns before line ends are taken
    out. All bytes of the file as it lies on disk pass through `digest`.

    Args:
        where: the reader, for messages.
        path: the file.
        digest: a hashlib object.
        size: bytes per block; a line may be longer.

    Yields:
        (block, number of its first line, from 1).
    """
    size = BLOCK if size is None else size
    with path.open("rb", buffering=0) as raw:
        hashed: Any = io.BufferedReader(_Hashing(raw, digest), 1 << 20)
        opener = _OPENERS.get(path.suffix.lower())
        text = hashed if opener is None else opener(hashed, "rb")
        held: list[bytes] = []
        length, line, first = 0, 1, True
        while True:
            try:
                part = text.read(size)
            except (EOFError, OSError, lzma.LZMAError, zlib.error) as error:
                if opener is None:
                    raise
                raise ValueError(f"{where}: {path}: the compressed file is damaged: {error}") from error
            if first:
                part, first = part.removeprefix(b"\xef\xbb\xbf"), False
            cut = part.rfind(b"\n") + 1
            if not part:
                break
            if not cut:
                held.append(part)
                length += len(part)
                if length > MAX_LINE:
                    raise ValueError(f"{where}: {path}:{line}: the line is longer than {MAX_LINE >> 20} MiB")
                continue
            block = b"".join([*held, part[:cut]])
            held, length = [part[cut:]], len(part) - cut
            yield block.replace(b"\r\n", b"\n"), line
            line += block.count(b"\n")
        rest = b"".join(held)
        if rest:
            yield rest.removesuffix(b"\r") + b"\n", line
        while hashed.read(1 << 20):  # what follows the end of a compressed stream belongs to the file all the same
            pass
