"""`open`: any data set by path or by name."""

from __future__ import annotations

import bz2
import gzip
import inspect
import lzma
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from samplex_cuda.data.array_files import csr_file, members, memmap_file, npy_file, npz_file
from samplex_cuda.data.base import Dataset
from samplex_cuda.data.interaction_files import interactions_file, sequences_file
from samplex_cuda.data.lines import logical_suffix
from samplex_cuda.data.parquet import parquet_file
from samplex_cuda.data.sparse_text import svmlight_file, xc_file
from samplex_cuda.data.synthetic import BuiltIn
from samplex_cuda.data.text import text_file

__all__ = ["FORMATS", "open", "open_like"]

_READERS: dict[str, Callable[..., Dataset]] = {
    "xc": xc_file,
    "svmlight": svmlight_file,
    "npy": npy_file,
    "npz": npz_file,
    "memmap": memmap_file,
    "csr": csr_file,
    "text": text_file,
    "interactions": interactions_file,
    "sequences": sequences_file,
    "parquet": parquet_file,
}
FORMATS = (*_READERS, "builtin")

_SUFFIXES = {
    ".svm": "svmlight",
    ".svmlight": "svmlight",
    ".libsvm": "svmlight",
    ".npy": "npy",
    ".dat": "memmap",
    ".memmap": "memmap",
    ".tokens": "text",
    ".csv": "interactions",
    ".tsv": "interactions",
    ".rating": "interactions",
    ".ratings": "interactions",
    ".inter": "interactions",
    ".parquet": "parquet",
}
_SHORT = {"classes": "num_classes", "examples": "num_examples"}


def _first_lines(path: Path) -> list[bytes]:
    opener: Any = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}.get(path.suffix.lower(), Path.open)
    try:
        with opener(path, "rb") as file:
            return [file.readline(1 << 16) for _ in range(3)]
    except (OSError, EOFError, lzma.LZMAError):
        return []


def guess_format(path: Path) -> str:
    """The format of a file by its name, or, for a name that says nothing, by its first lines; ValueError otherwise.

    Example:
        >>> from pathlib import Path
        >>> from samplex_cuda.data.opening import guess_format
        >>> guess_format(Path("train.svm.gz"))
        'svmlight'
    """
    if path.is_dir():
        if (path / "x.npy").is_file():
            return "npy"
        if any(path.glob("*.parquet")):
            return "parquet"
        raise ValueError(f"open: {path}: a folder must have x.npy and y.npy, or .parquet files")
    suffix = logical_suffix(path)
    if suffix == ".npz" and path.is_file():
        return "csr" if "indptr" in members("open", path) else "npz"
    if suffix in (".dat", ".data") and any(re.match(rb"\d+(::|\t)\d+(::|\t)\S+", line) for line in _first_lines(path)):
        return "interactions"  # ratings.dat and u.data of MovieLens, not bare numbers
    if suffix in _SUFFIXES:
        return _SUFFIXES[suffix]
    if not path.is_file():
        raise FileNotFoundError(f"open: {path}: there is no such file")
    lines = _first_lines(path)
    pairs = [bool(re.search(rb"(^|\s)\d+:[-+.\dnif]", line)) for line in lines]
    if len(pairs) == 3 and any(pairs):
        header = re.fullmatch(rb"\s*\d+\s+\d+\s+\d+\s*", lines[0]) is not None
        if header:  # the first rows may have no features
            return "xc"
        if pairs[0]:
            return "svmlight"
    raise ValueError(f"open: {path}: format must be given, one of {', '.join(FORMATS)}: the name does not show it")


def _builtin(spec: str, options: dict[str, Any]) -> BuiltIn:
    settings: dict[str, Any] = {}
    for part in filter(None, spec.split(",")):
        name, equals, text = part.partition("=")
        name = _SHORT.get(name.strip(), name.strip())
        if not equals:
            raise ValueError(f"open: a setting of builtin must be name=value, got {part!r}")
        try:
            settings[name] = int(text.replace("_", ""))
        except ValueError:
            try:
                settings[name] = float(text)
            except ValueError:
                settings[name] = text.strip()
    settings |= options
    settings = {"num_classes": 100_000, "dim": 64, "num_examples": 100_000, "seed": 0} | settings
    _check_options("builtin", BuiltIn, settings)
    return BuiltIn(**settings)


def _check_options(name: str, reader: Callable[..., Any], options: dict[str, Any]) -> None:
    parameters = [p for p in inspect.signature(reader).parameters.values() if p.name not in ("path", "self")]
    known = [p.name for p in parameters]
    for option in options:
        if option not in known:
            raise ValueError(f"open: format {name!r} has no option {option!r}; it has {', '.join(known)}")
    missing = [p.name for p in parameters if p.default is p.empty and p.name not in options]
    if missing:
        got = ", ".join(options) or "none"
        raise ValueError(f"open: format {name!r} needs the options {' and '.join(missing)}, got {got}")


def open(path: Path | str, *, format: str | None = None, **options: Any) -> Dataset:
    """The data set of a file, a folder, or "builtin".

    Args:
        path: a file or folder; or "builtin", "builtin:classes=1000000,dim=64,examples=200000,seed=0,split=train":
            data that are made, see `BuiltIn`.
        format: "xc", "svmlight", "npy", "npz", "memmap", "csr", "text", "interactions", "sequences", "parquet" or
            "builtin". None: by the name; a file with another name is taken for "xc" or "svmlight" where its
            first lines are that.
        options: those of the reader, the function of that name with `_file`: `labels`, `num_classes`, `skip_bad`,
            `cache_dir`, `verify`, `y`, `vocabulary`, ...

    Example:
        >>> from samplex_cuda import data
        >>> data.open("builtin:classes=1_000_000,dim=8,examples=500")
        BuiltIn(500 examples, num_classes=1000000, num_features=8)
    """
    text = str(path)
    if format == "builtin" or (format is None and (text == "builtin" or text.startswith("builtin:"))):
        return _builtin(text.partition(":")[2], options)
    if format is not None and format not in _READERS:
        raise ValueError(f"open: format must be one of {', '.join(FORMATS)}, got {format!r}")
    name = guess_format(Path(path)) if format is None else format
    _check_options(name, _READERS[name], options)
    return _READERS[name](path, **options)


def open_like(
    path: Path | str,
    train: Dataset | None = None,
    /,
    *,
    format: str | None = None,
    default_columns: int | None = None,
    **options: Any,
) -> Dataset:
    """As `open`, but ids mean what they mean in the training data.

    The reader gets the vocabulary (text), the histories (interactions), or the number of classes and of features of
    `train`, and its index base.

    Args:
        path: as in `open`.
        train: the training data; None: nothing to follow.
        format: as in `open`.
        default_columns: text: columns read side by side, unless `options` has `columns`.
        options: as in `open`; what `train` says comes first.

    Example:
        >>> from samplex_cuda import data
        >>> data.open_like("builtin:classes=50,dim=8,examples=500", default_columns=4)
        BuiltIn(500 examples, num_classes=50, num_features=8)
    """
    text = str(path)
    if not (format == "builtin" or text == "builtin" or text.startswith("builtin:")):
        format = format or guess_format(Path(path))
        reader = _READERS.get(format)
        known = inspect.signature(reader).parameters if reader is not None else {}
        if "columns" in known and default_columns is not None:
            options.setdefault("columns", default_columns)
        if train is not None:
            given: dict[str, Any] = {"num_classes": train.num_classes, "num_features": train.num_features}
            if train.kind == "text":
                given = {"vocabulary": train, "extend": False}
            elif train.kind == "interactions":
                given = {"known": train}
            options.update({key: value for key, value in given.items() if key in known})
            base = getattr(train, "index_base", None)
            if "index_base" in known and base is not None and options.get("index_base") is None:
                options["index_base"] = base  # features count as in training, whichever of them this file has
    return open(path, format=format, **options)
