"""Arrays on disk: npy files are mapped unchanged; members of zip files (npz) are unpacked into the cache first."""

from __future__ import annotations

import lzma
import math
import struct
import tokenize
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any

import numpy as np

from samplex_cuda._checks import check_int
from samplex_cuda.data.array_sets import Dense, Sparse
from samplex_cuda.data.cache import Conversion, Converted, converted
from samplex_cuda.data.sparse_text import adopt

__all__ = ["csr_file", "memmap_file", "npy_file", "npz_file"]

_PIECE = 1 << 22
_MOST = (1 << 31) - 1  # rows, features and classes of a matrix

# What zipfile raises for a file that is cut or altered, and numpy for a header that is no header.
DAMAGED = (
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    struct.error,
    EOFError,
    OSError,
    NotImplementedError,
    RuntimeError,
)
UNREADABLE = (
    ValueError,
    TypeError,
    SyntaxError,
    tokenize.TokenError,
    OverflowError,
    MemoryError,
    IndexError,
    KeyError,
    AttributeError,
)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


def _load(where: str, path: Path) -> np.ndarray:
    """An npy file, mapped."""
    if not path.is_file():
        raise FileNotFoundError(f"{where}: {path}: there is no such file")
    with path.open("rb") as file:
        shape, _, dtype = _header(where, path, "it", file)
    if 0 in shape:  # an array without elements cannot be mapped
        return np.empty(shape, dtype)
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (*DAMAGED, *UNREADABLE) as error:
        raise ValueError(f"{where}: {path}: it is not an npy file that can be mapped ({_first_line(error)})") from error


def _partner(where: str, path: Path, y: Path | str | None) -> tuple[Path, Path]:
    """Paths of x and y: of a folder, or given, or by name."""
    if path.is_dir():
        return path / "x.npy", Path(y) if y is not None else path / "y.npy"
    if y is not None:
        return path, Path(y)
    stem = path.stem
    if stem[-1:] in ("x", "X"):
        return path, path.with_name(stem[:-1] + ("y" if stem[-1] == "x" else "Y") + path.suffix)
    raise ValueError(f"{where}: y must be given unless the name of x ends with x, got {path.name}")


def _observed(where: str, num_classes: int | str | None) -> int | None:
    if isinstance(num_classes, str):
        if num_classes != "observed":
            raise ValueError(f"{where}: num_classes must be an int, 'observed' or None, got {num_classes!r}")
        return None
    return num_classes


def _dense(where: str, path: Path, x: np.ndarray, y: np.ndarray, num_classes: int | str | None, labels: str) -> Dense:
    try:
        return Dense(x, y, _observed(where, num_classes), label_rule=labels)
    except ValueError as error:
        raise ValueError(f"{where}: {path}: {error}") from error


def npy_file(
    path: Path | str, y: Path | str | None = None, *, labels: str = "all", num_classes: int | str | None = None
) -> Dense:
    """Dense data in two npy files: x [N, K] and y [N] or [N, P] padded with -100. They are mapped, not read.

    Args:
        path: the file of x, or a folder that has x.npy and y.npy.
        y: the file of y; by default the name of x with a last x turned to y: `train_x.npy`, `train_y.npy`.
        labels: "all", "first" or "smallest"; see `Dense`.
        num_classes: C; by default the largest label + 1.

    Example:
        >>> import tempfile, numpy as np
        >>> from pathlib import Path
        >>> from samplex_cuda import data
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     np.save(Path(folder) / "x.npy", np.ones((3, 4), np.float16))
        ...     np.save(Path(folder) / "y.npy", np.array([2, 0, 1]))
        ...     data.npy_file(folder)
        Dense(3 examples, num_classes=3, num_features=4)
    """
    of_x, of_y = _partner("npy_file", Path(path), y)
    return _dense("npy_file", of_x, _load("npy_file", of_x), _load("npy_file", of_y), num_classes, labels)


def memmap_file(
    path: Path | str,
    y: Path | str,
    *,
    num_features: int,
    dtype: str = "float32",
    y_dtype: str = "int64",
    labels: str = "all",
    num_classes: int | str | None = None,
) -> Dense:
    """Dense data as bare numbers without a header, as `numpy.memmap` and `ndarray.tofile` write them.

    Args:
        path: the file of x: N * K numbers, row by row.
        y: the file of y: N numbers; or an npy file.
        num_features: K.
        dtype: of x.
        y_dtype: of y.
        labels: as in `npy_file`.
        num_classes: as in `npy_file`.

    Example:
        >>> import tempfile, numpy as np
        >>> from pathlib import Path
        >>> from samplex_cuda import data
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     np.ones((3, 4), np.float32).tofile(Path(folder) / "x.dat")
        ...     np.array([2, 0, 1]).tofile(Path(folder) / "y.dat")
        ...     data.memmap_file(Path(folder) / "x.dat", Path(folder) / "y.dat", num_features=4)
        Dense(3 examples, num_classes=3, num_features=4)
    """
    where = "memmap_file"
    check_int(where, "num_features", num_features)

    def bare(file: Path, kind: np.dtype, width: int) -> np.ndarray:
        if not file.is_file():
            raise FileNotFoundError(f"{where}: {file}: there is no such file")
        size = file.stat().st_size
        if not size or size % (kind.itemsize * width):
            row = kind.itemsize * width
            raise ValueError(
                f"{where}: {file}: its size must be a multiple of {row} bytes ({width} {kind}), got {size}"
            )
        return np.memmap(file, dtype=kind, mode="r").reshape(-1, width)

    x = bare(Path(path), np.dtype(dtype), num_features)
    of_y = Path(y)
    target = _load(where, of_y) if of_y.suffix == ".npy" else bare(of_y, np.dtype(y_dtype), 1)[:, 0]
    return _dense(where, Path(path), x, target, num_classes, labels)


# ------------------------------------------------------------------------------------------------ zip files
def _header(where: str, path: Path, name: str, file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Shape, order and dtype of the member; an array of objects (pickle) is refused."""
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(file)
    except DAMAGED as error:
        raise ValueError(f"{where}: {path}: {name} is damaged ({_first_line(error)})") from error
    except UNREADABLE as error:  # numpy evaluates the header as a literal and lets through what that raises
        raise ValueError(f"{where}: {path}: {name} is not an npy array ({_first_line(error)})") from error
    if dtype.hasobject:
        raise ValueError(f"{where}: {path}: {name} holds Python objects, which are not supported")
    if any(n < 0 for n in shape) or math.prod(shape) * max(1, dtype.itemsize) >= 1 << 62:
        raise ValueError(f"{where}: {path}: {name} must have a shape that fits into memory, got {list(shape)} {dtype}")
    return shape, fortran, dtype


def _zip(where: str, path: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(path)
    except FileNotFoundError:
        raise
    except (*DAMAGED, *UNREADABLE) as error:
        raise ValueError(f"{where}: {path}: it is not an npz file ({_first_line(error)})") from error


def members(where: str, path: Path) -> list[str]:
    """Names of the arrays of an npz file."""
    with _zip(where, path) as archive:
        return [name.removesuffix(".npy") for name in archive.namelist()]


def _small(where: str, path: Path, name: str) -> np.ndarray:
    """A small member, read at once."""
    return read_member(where, path, name, 64)


def read_member(where: str, path: Path, name: str, most: int | None = None) -> np.ndarray:
    """An array of an npz file, read at once; ValueError where it is damaged, or has more than `most` elements."""
    with _zip(where, path) as archive, _member(where, path, archive, name) as file:
        shape, fortran, dtype = _header(where, path, name, file)
        count = math.prod(shape)
        if most is not None and count > most:
            raise ValueError(f"{where}: {path}: {name} must be small, got {list(shape)}")
        try:
            raw = file.read() if most is None else file.read(count * dtype.itemsize)
        except (*DAMAGED, MemoryError) as error:
            raise ValueError(f"{where}: {path}: {name} is damaged ({_first_line(error)})") from error
        if len(raw) != count * dtype.itemsize:
            raise ValueError(
                f"{where}: {path}: {name} is truncated: it has {len(raw)} of {count * dtype.itemsize} bytes"
            )
        return np.frombuffer(raw, dtype=dtype).reshape(shape, order="F" if fortran else "C")


def _member(where: str, path: Path, archive: zipfile.ZipFile, name: str) -> IO[bytes]:
    try:
        return archive.open(f"{name}.npy")
    except KeyError:
        raise ValueError(f"{where}: {path}: it must have an array {name!r}, got {members(where, path)}") from None
    except (*DAMAGED, *UNREADABLE) as error:
        raise ValueError(f"{where}: {path}: {name} is damaged ({_first_line(error)})") from error


def _unpack(conversion: Conversion, path: Path, name: str, out: str, kinds: str) -> tuple[int, ...]:
    """Copies a member into the cache piece by piece; its shape."""
    where = conversion.where
    with _zip(where, path) as archive:
        if f"{name}.npy" not in archive.namelist():
            raise ValueError(f"{where}: {path}: it must have an array {name!r}, got {members(where, path)}")
        with _member(where, path, archive, name) as file:
            shape, fortran, dtype = _header(where, path, name, file)
            if dtype.kind not in kinds or len(shape) not in (1, 2):
                what = "integers" if kinds == "iu" else "numbers"
                raise ValueError(f"{where}: {path}: {name} must be [N] or [N, K] {what}, got {list(shape)} {dtype}")
            if len(shape) == 2 and fortran and shape[0] > 1 and shape[1] > 1:
                raise ValueError(f"{where}: {path}: {name} must be stored row by row (C order), got Fortran order")
            writer = conversion.writer(out, dtype, shape[1] if len(shape) == 2 else None)
            row = dtype.itemsize * (shape[1] if len(shape) == 2 else 1)
            left = shape[0]
            step = max(1, _PIECE // max(1, row))
            while left:
                count = min(step, left)
                try:
                    raw = file.read(count * row)
                except DAMAGED as error:
                    raise ValueError(f"{where}: {path}: {name} is damaged ({error})") from error
                if len(raw) != count * row:
                    raise ValueError(f"{where}: {path}: {name} is truncated: {left} of {shape[0]} rows are missing")
                writer.append(np.frombuffer(raw, dtype=dtype).reshape((count, *shape[1:])))
                left -= count
            try:
                more = file.read(1)  # reading to the end also checks the checksum of the zip file
            except DAMAGED as error:
                raise ValueError(f"{where}: {path}: {name} is damaged ({error})") from error
            if more:
                raise ValueError(f"{where}: {path}: {name} is longer than its header says")
            return shape


def npz_file(
    path: Path | str,
    *,
    x: str = "x",
    y: str = "y",
    labels: str = "all",
    num_classes: int | str | None = None,
    cache_dir: Path | str | None = None,
    verify: str = "cache",
) -> Dense:
    """Dense data in one npz file, compressed or not, with arrays x [N, K] and y [N] or [N, P].

    A zip file cannot be mapped: its arrays are unpacked once into the cache, piece by piece.

    Args:
        path: the file.
        x: name of the array of x.
        y: name of the array of y.
        labels: as in `npy_file`.
        num_classes: as in `npy_file`.
        cache_dir: as in `xc_file`.
        verify: as in `xc_file`.

    Example:
        >>> import tempfile, numpy as np
        >>> from pathlib import Path
        >>> from samplex_cuda import data
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     np.savez(Path(folder) / "train.npz", x=np.ones((3, 4)), y=np.array([2, 0, 1]))
        ...     data.npz_file(Path(folder) / "train.npz")
        Dense(3 examples, num_classes=3, num_features=4)
    """
    source = Path(path)

    def convert(conversion: Conversion) -> None:
        _unpack(conversion, source, x, "x", "fiub")
        _unpack(conversion, source, y, "y", "iu")

    found = converted("npz_file", [source], "npz", {"x": x, "y": y}, convert, cache_dir=cache_dir, verify=verify)
    return adopt(_dense("npz_file", source, found.arrays["x"], found.arrays["y"], num_classes, labels), found)


def matrix_shape(where: str, path: Path) -> tuple[int, int]:
    """Rows and columns that a file of `scipy.sparse.save_npz` states."""
    shape = _small(where, path, "shape")
    if shape.shape != (2,) or shape.dtype.kind not in "iu" or not all(0 <= int(n) <= _MOST for n in shape):
        raise ValueError(f"{where}: {path}: shape must be two whole numbers of at most {_MOST}, got {shape.tolist()}")
    return int(shape[0]), int(shape[1])


def _unpack_csr(conversion: Conversion, path: Path, names: tuple[str, str, str]) -> tuple[int, int]:
    """Unpacks a matrix that `scipy.sparse.save_npz` wrote; `names` of its three arrays here, "" for none. Its shape."""
    where = conversion.where
    have = members(where, path)
    if not {"indptr", "indices", "data", "shape", "format"} <= set(have):
        raise ValueError(f"{where}: {path}: it must be a sparse matrix as scipy.sparse.save_npz writes it, got {have}")
    form: Any = _small(where, path, "format")[()]
    form = form.decode("utf-8", "replace") if isinstance(form, bytes) else str(form)
    if form != "csr":
        raise ValueError(f"{where}: {path}: the matrix must be in format 'csr', got {form!r}")
    rows, width = matrix_shape(where, path)
    ends = _unpack(conversion, path, "indptr", names[0], "iu")
    entries = _unpack(conversion, path, "indices", names[1], "iu")
    if names[2]:
        values = _unpack(conversion, path, "data", names[2], "fiub")
        if values != entries:
            raise ValueError(f"{where}: {path}: data must be {list(entries)} as indices, got {list(values)}")
    if ends != (rows + 1,):
        raise ValueError(f"{where}: {path}: indptr must be [{rows + 1}] to fit the shape, got {list(ends)}")
    indices = conversion.finished(names[1])
    for begin in range(0, len(indices), _PIECE):
        part = indices[begin : begin + _PIECE]
        if part.min() < 0 or part.max() >= width:
            wrong = part[(part < 0) | (part >= width)][0]
            raise ValueError(f"{where}: {path}: indices must be in [0, {width}), got {wrong}")
    return rows, width


def csr_file(
    path: Path | str,
    y: Path | str | None = None,
    *,
    labels: str = "all",
    num_classes: int | str | None = None,
    cache_dir: Path | str | None = None,
    verify: str = "cache",
) -> Sparse:
    """Sparse data as `scipy.sparse.save_npz` writes it (CSR); read without scipy and without pickle.

    Args:
        path: the npz file of x, N x K.
        y: where the labels are: an npy file [N] or [N, P] padded with -100; or the npz file of a CSR matrix N x L (a
            stored entry is a label, whatever its value); by default an array `y` [N] in the file of x.
        labels: as in `xc_file`.
        num_classes: C; None: L of a label matrix, else the largest label + 1; "observed": the largest + 1.
        cache_dir: as in `xc_file`.
        verify: as in `xc_file`.

    Example:
        >>> import tempfile, numpy as np
        >>> from pathlib import Path
        >>> from samplex_cuda import data
        >>> with tempfile.TemporaryDirectory() as folder:  # as scipy.sparse.save_npz does
        ...     np.savez(Path(folder) / "x.npz", indptr=np.array([0, 2, 3]), indices=np.array([0, 4, 1]),
        ...              data=np.ones(3), shape=np.array([2, 5]), format=np.array("csr".encode()), y=np.array([7, 2]))
        ...     data.csr_file(Path(folder) / "x.npz")
        Sparse(2 examples, num_classes=8, num_features=5)
    """
    where, source = "csr_file", Path(path)
    of_y = None if y is None else Path(y)
    matrix = of_y is not None and of_y.suffix == ".npz"
    kind = "own" if of_y is None else "matrix" if matrix else "npy"

    def convert(conversion: Conversion) -> None:
        rows, width = _unpack_csr(conversion, source, ("indptr", "indices", "values"))
        conversion.facts |= {"rows": rows, "num_features": width}
        if matrix and of_y is not None:
            label_rows, classes = _unpack_csr(conversion, of_y, ("label_indptr", "labels", ""))
            if label_rows != rows:
                raise ValueError(f"{where}: {of_y}: the matrix must have {rows} rows as x, got {label_rows}")
            conversion.facts["num_classes"] = classes
        elif of_y is None:
            _unpack(conversion, source, "y", "labels", "iu")

    sources = [source, of_y] if matrix and of_y is not None else [source]
    found: Converted = converted(where, sources, "csr", {"y": kind}, convert, cache_dir=cache_dir, verify=verify)
    a = found.arrays
    ids: Any = a.get("labels")
    if of_y is not None and not matrix:
        ids = _load(where, of_y)
    classes = found.facts.get("num_classes") if num_classes is None else _observed(where, num_classes)
    try:
        data = Sparse(
            a["indptr"],
            a["indices"],
            a["values"],
            a.get("label_indptr"),
            ids,
            found.facts["num_features"],
            classes,
            label_rule=labels,
        )
    except ValueError as error:
        raise ValueError(f"{where}: {path}: {error}") from error
    adopt(data, found)
    if of_y is not None and not matrix:
        data._known.pop("labels", None)
    return data
