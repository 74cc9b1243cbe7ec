"""Sparse rows as text: the format of the Extreme Classification repository, and svmlight/libsvm.

A block of lines is parsed by numpy at once. Where anything about it is unusual (a byte that no number has, an empty
field, an id out of range) the block is read line by line instead: the slow parser is the definition of the format, and
what finds the line and the reason.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from samplex_cuda.data.array_sets import Sparse
from samplex_cuda.data.base import Dataset
from samplex_cuda.data.cache import Conversion, Converted, converted
from samplex_cuda.data.lines import BadLineError, blocks

__all__ = ["svmlight_file", "xc_file"]

_FLOAT32_MAX = float(np.finfo(np.float32).max)
_ID_MAX = 2**31 - 1  # ids are stored in 32 bits
_NAMES = {",": 1, ":": 2, " ": 3, "\n": 4}
_CLASS = np.full(256, 9, dtype=np.uint8)  # 0 digit, 1-4 delimiters, 5 other bytes of a number, 9 anything else
for _byte in b"0123456789":
    _CLASS[_byte] = 0
for _byte in b".eE+-":
    _CLASS[_byte] = 5
for _name, _code in _NAMES.items():
    _CLASS[ord(_name)] = _code
_COMMA, _COLON, _SPACE, _NEWLINE = 1, 2, 3, 4
_TO_SPACES = bytes.maketrans(b",:\n", b"   ")


class Rows(NamedTuple):
    """Some rows in CSR: how many labels and entries each has, and what they are."""

    label_counts: np.ndarray
    labels: np.ndarray
    counts: np.ndarray
    indices: np.ndarray
    values: np.ndarray


# ------------------------------------------------------------------------------------------------ one block by numpy
def fast_rows(block: bytes, first_index: int, num_features: int, num_labels: int) -> Rows | None:
    """The rows of a block of lines `l1,l2 j:v j:v ...`; None if it is not plainly that.

    Args:
        block: lines, each with its newline.
        first_index: smallest feature that may occur.
        num_features: feature ids end below this.
        num_labels: labels end below this.
    """
    if b"\t" in block:
        block = block.replace(b"\t", b" ")
    kind = _CLASS[np.frombuffer(block, dtype=np.uint8)]
    if (kind == 9).any():
        return None
    delimiter = (kind >= 1) & (kind <= 4)
    before = np.empty(len(kind), dtype=np.uint8)
    before[0], before[1:] = _NEWLINE, kind[:-1]
    after_delimiter = np.empty(len(kind), dtype=bool)
    after_delimiter[0], after_delimiter[1:] = True, delimiter[:-1]
    # Two delimiters in a row: only spaces and line ends may meet.
    meet = delimiter & after_delimiter
    if ((kind[meet] <= _COLON) | (before[meet] <= _COLON)).any():
        return None
    starts = np.flatnonzero(~delimiter & after_delimiter)
    ends = np.flatnonzero(delimiter & ~after_delimiter)  # as many: the block ends with a newline
    previous, following = before[starts], kind[ends]
    is_index = following == _COLON
    is_value = previous == _COLON
    is_label = ~(is_index | is_value)
    plain = (
        not (is_index & (previous != _SPACE)).any()
        and not (is_value & (following < _SPACE)).any()
        and not (is_label & (previous == _SPACE)).any()
        and np.array_equal(np.flatnonzero(is_index) + 1, np.flatnonzero(is_value))
    )
    if not plain:
        return None
    # Ids are digits and nothing else: no other byte lies within them.
    strange = np.flatnonzero(kind == 5)
    inside = np.searchsorted(strange, ends) - np.searchsorted(strange, starts)
    if inside[~is_value].any():
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # text that is not a number
        try:
            numbers = np.fromstring(block.translate(_TO_SPACES), dtype=np.float64, sep=" ")
        except (DeprecationWarning, ValueError):
            return None
    if len(numbers) != len(starts):
        return None
    labels, indices, values = numbers[is_label], numbers[is_index], numbers[is_value]
    if len(labels) and labels.max() >= num_labels:
        return None
    if len(indices) and (indices.max() >= num_features or indices.min() < first_index):
        return None
    if len(values) and not np.abs(values).max() <= _FLOAT32_MAX:
        return None
    line_ends = np.flatnonzero(kind == _NEWLINE)
    lines = len(line_ends)
    label_counts = np.bincount(np.searchsorted(line_ends, starts[is_label]), minlength=lines)
    counts = np.bincount(np.searchsorted(line_ends, starts[is_index]), minlength=lines)
    return Rows(label_counts, labels.astype(np.int32), counts, indices.astype(np.int32), values.astype(np.float32))


# ------------------------------------------------------------------------------------------------ one line
def _text(field: bytes) -> str:
    shown = field.decode("utf-8", "replace")
    return repr(shown if len(shown) <= 40 else shown[:37] + "...")


def _id(name: str, field: bytes) -> int:
    if not field.isdigit():
        raise BadLineError(f"{name} {_text(field)} is not a whole number")
    return int(field)


def _number(name: str, field: bytes) -> float:
    try:
        value = float(field) if b"_" not in field else math.nan
    except ValueError:
        value = math.nan
    if not abs(value) <= _FLOAT32_MAX:
        if math.isfinite(value):
            raise BadLineError(f"{name} {_text(field)} does not fit a float32")
        raise BadLineError(f"{name} {_text(field)} is not a finite number")
    return value


def _features(fields: list[bytes], first_index: int, num_features: int) -> tuple[list[int], list[float]]:
    indices, values = [], []
    for field in fields:
        index, colon, value = field.partition(b":")
        if not colon:
            raise BadLineError(f"feature {_text(field)} must be index:value")
        number = _id("feature", index)
        if not first_index <= number < num_features:
            raise BadLineError(f"feature {number} is outside [{first_index}, {num_features})")
        indices.append(number)
        values.append(_number(f"value of feature {number}", value))
    return indices, values


def xc_line(line: bytes, num_features: int, num_labels: int) -> tuple[list[int], list[int], list[float]]:
    """Labels, features and values of a line `l1,l2 j:v j:v ...`; raises BadLineError."""
    head, _, rest = line.replace(b"\t", b" ").partition(b" ")
    labels = []
    if head:
        if b":" in head:
            raise BadLineError(f"label {_text(head)} is not a whole number; a row without labels starts with a space")
        for field in head.split(b","):
            label = _id("label", field)
            if label >= num_labels:
                raise BadLineError(f"label {label} is outside [0, {num_labels})")
            labels.append(label)
    return labels, *_features(rest.split(), 0, num_features)


def svmlight_line(
    line: bytes, first_index: int, num_features: int, label_base: int
) -> tuple[list[int], list[int], list[float]] | None:
    """Labels, features and values of a line `label j:v ... # comment`; None for a line without content."""
    line = line.partition(b"#")[0]
    if not line.strip():
        return None
    fields = line.split()
    labels = []
    if line[:1] not in (b" ", b"\t"):  # a line that starts with a space has no label
        for field in fields.pop(0).split(b","):
            if b":" in field:
                raise BadLineError(
                    f"label {_text(field)} is not a whole number; a row without labels starts with a space"
                )
            number = _number("label", field)
            if number != int(number):
                raise BadLineError(f"label {_text(field)} is not a whole number")
            if not label_base <= number <= _ID_MAX:
                raise BadLineError(f"label {int(number)} is outside [{label_base}, {_ID_MAX}]")
            labels.append(int(number) - label_base)
    if fields and fields[0].startswith(b"qid:"):
        _id("qid", fields.pop(0)[4:])
    return labels, *_features(fields, first_index, num_features)


# ------------------------------------------------------------------------------------------------ a file
class _SparseWriter:
    """Appends rows to the five arrays of a sparse data set."""

    def __init__(self, conversion: Conversion) -> None:
        self.indptr = conversion.writer("indptr", np.int64)
        self.indices = conversion.writer("indices", np.int32)
        self.values = conversion.writer("values", np.float32)
        self.label_indptr = conversion.writer("label_indptr", np.int64)
        self.labels = conversion.writer("labels", np.int32)
        self.indptr.append([0])
        self.label_indptr.append([0])
        self.rows = 0
        self.least_index, self.most_index, self.most_label = _ID_MAX, -1, -1

    def append(self, rows: Rows) -> None:
        self.indptr.append(self.indices.length + np.cumsum(rows.counts))
        self.label_indptr.append(self.labels.length + np.cumsum(rows.label_counts))
        self.indices.append(rows.indices)
        self.values.append(rows.values)
        self.labels.append(rows.labels)
        self.rows += len(rows.counts)
        self.least_index = min(self.least_index, int(rows.indices.min(initial=_ID_MAX)))
        self.most_index = max(self.most_index, int(rows.indices.max(initial=-1)))
        self.most_label = max(self.most_label, int(rows.labels.max(initial=-1)))

    def append_lines(
        self,
        conversion: Conversion,
        block: bytes,
        first: int,
        parse: Callable[[bytes], tuple[list[int], list[int], list[float]] | None],
    ) -> None:
        """Line by line; bad ones are counted."""
        label_counts, labels, counts, indices, values = [], [], [], [], []
        for number, line in enumerate(block.split(b"\n")[:-1], first):
            try:
                found = parse(line)
            except BadLineError as reason:
                conversion.bad.add(number, str(reason))
                continue
            if found is None:
                continue
            label_counts.append(len(found[0]))
            labels += found[0]
            counts.append(len(found[1]))
            indices += found[1]
            values += found[2]
        self.append(
            Rows(
                np.array(label_counts, np.int64),
                np.array(labels, np.int32),
                np.array(counts, np.int64),
                np.array(indices, np.int32),
                np.array(values, np.float32),
            )
        )


def _xc_header(where: str, path: Path, line: bytes) -> tuple[int, int, int]:
    fields = line.split()
    if len(fields) != 3 or not all(field.isdigit() for field in fields):
        raise ValueError(f"{where}: {path}:1: the header must be 'rows features labels', got {_text(line)}")
    rows, features, labels = (int(field) for field in fields)
    for name, value in (("features", features), ("labels", labels)):
        if not 1 <= value <= _ID_MAX:
            raise ValueError(f"{where}: {path}:1: the header must have 1 to {_ID_MAX} {name}, got {value}")
    return rows, features, labels


def _convert_xc(conversion: Conversion) -> None:
    where, path = conversion.where, conversion.source
    conversion.hashed = True
    out = _SparseWriter(conversion)
    header: tuple[int, int, int] | None = None
    blanks = 0  # blank lines that may be the end of the file
    for block, first in blocks(where, path, conversion.digests[0]):
        if header is None:
            line, _, block = block.partition(b"\n")
            header, first = _xc_header(where, path, line), first + 1
        _, num_features, num_labels = header
        block, first = b"\n" * blanks + block, first - blanks
        body = block.rstrip(b"\n")
        blanks = len(block) - len(body) - bool(body)
        block = body + b"\n" if body else b""
        if not block:
            continue
        rows = fast_rows(block, 0, num_features, num_labels)
        if rows is not None:
            out.append(rows)
        else:
            parse = partial(xc_line, num_features=num_features, num_labels=num_labels)
            out.append_lines(conversion, block, first, parse)
    if header is None:
        raise ValueError(f"{where}: {path}: the file is empty")
    got = out.rows + len(conversion.bad.found)
    if got < header[0] <= got + blanks:  # rows at the end that have neither labels nor features
        none = np.zeros(header[0] - got, np.int64)
        out.append(Rows(none, none[:0], none, none[:0], none[:0].astype(np.float32)))
        got = header[0]
    if got != header[0]:
        raise ValueError(f"{where}: {path}: the header says {header[0]} rows, the file has {got}")
    conversion.facts |= {"rows": out.rows, "num_features": header[1], "num_classes": header[2]}


_COMMENT = re.compile(rb"[ \t]*#[^\n]*")
_QID = re.compile(rb"^([^\s:]*)[ ]+qid:\d+(?=\s)", re.MULTILINE)
_BLANK = re.compile(rb"^[ \t]*\n", re.MULTILINE)


def _convert_svmlight(conversion: Conversion, index_base: int | None, label_base: int) -> None:
    where, path = conversion.where, conversion.source
    conversion.hashed = True
    out = _SparseWriter(conversion)
    least = index_base or 0
    for block, first in blocks(where, path, conversion.digests[0]):
        plain = block
        if b"#" in plain:
            plain = _COMMENT.sub(b"", plain)
        if b"qid:" in plain:
            plain = _QID.sub(rb"\1", plain)
        plain = _BLANK.sub(b"", plain)
        rows = fast_rows(plain, least, _ID_MAX, _ID_MAX) if plain else None
        if rows is not None and rows.labels.min(initial=label_base) >= label_base:
            out.append(rows._replace(labels=rows.labels - np.int32(label_base)))
        elif plain:
            out.append_lines(conversion, block, first, lambda line: svmlight_line(line, least, _ID_MAX, label_base))
    if not out.rows:
        raise ValueError(f"{where}: {path}: the file has no rows")
    base = index_base
    if base is None:
        base = 1 if out.least_index >= 1 and out.most_index >= 0 else 0
    if base:
        indices = conversion.finished("indices")
        for begin in range(0, len(indices), 1 << 22):
            indices[begin : begin + (1 << 22)] -= base
        if isinstance(indices, np.memmap):
            indices.flush()
    conversion.facts |= {
        "rows": out.rows,
        "num_features": max(1, out.most_index + 1 - base),
        "num_classes": out.most_label + 1,
        "index_base": base,
    }


def sparse_from(
    where: str, found: Converted, num_features: int | None, num_classes: int | str | None, labels: str
) -> Sparse:
    """The data set of a cache that holds sparse rows."""
    classes: Any = found.facts["num_classes"] or None if num_classes is None else num_classes
    if isinstance(classes, str):
        if classes != "observed":
            raise ValueError(f"{where}: num_classes must be an int, 'observed' or None, got {num_classes!r}")
        classes = None
    features = found.facts["num_features"] if num_features is None else num_features
    if features < found.facts["num_features"]:
        raise ValueError(f"{where}: num_features must be at least {found.facts['num_features']}, got {num_features}")
    a = found.arrays
    data = Sparse(
        a["indptr"],
        a["indices"],
        a["values"],
        a["label_indptr"],
        a["labels"],
        features,
        classes,
        label_rule=labels,
    )
    return adopt(data, found)


def adopt(data: Any, found: Converted) -> Any:
    """Gives a data set the notes and checksums of the cache it stands on."""
    dataset: Dataset = data
    dataset.notes = found.notes
    dataset._known = dict(found.digests)
    return data


def xc_file(
    path: Path | str,
    *,
    labels: str = "all",
    num_classes: int | str | None = None,
    skip_bad: int = 0,
    cache_dir: Path | str | None = None,
    verify: str = "cache",
) -> Sparse:
    """A file of the Extreme Classification repository: header `rows features labels`, then `l1,l2,... j:v j:v ...`.

    Ids count from 0. A row without labels starts with a space. Compressed files (.gz, .bz2, .xz) are read as they are.

    Args:
        path: the file.
        labels: "all", "first" or "smallest"; see `Dense`.
        num_classes: C; None: what the header says; "observed": the largest label under the rule + 1.
        skip_bad: how many malformed lines may be left out; they are counted and stated in `notes`.
        cache_dir: where the converted file goes; by default beside the source.
        verify: "size", "cache" or "all"; see docs/data.md.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from samplex_cuda import data
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "train.txt"
        ...     _ = path.write_text("2 5 9\\n3,8 0:0.5 4:1\\n 1:2\\n")
        ...     data.xc_file(path)
        Sparse(2 examples, num_classes=9, num_features=5)
    """
    found = converted(
        "xc_file", [Path(path)], "xc", {}, _convert_xc, skip_bad=skip_bad, cache_dir=cache_dir, verify=verify
    )
    return sparse_from("xc_file", found, None, num_classes, labels)


def svmlight_file(
    path: Path | str,
    *,
    labels: str = "all",
    num_classes: int | str | None = None,
    num_features: int | None = None,
    index_base: int | None = None,
    label_base: int = 0,
    skip_bad: int = 0,
    cache_dir: Path | str | None = None,
    verify: str = "cache",
) -> Sparse:
    """An svmlight/libsvm file: `label j:v j:v ... # comment`, or `l1,l2,... j:v ...`.

    Labels are whole numbers (`3`, `+3` and `3.0` are the same). A line that starts with a space has none. A `qid:n`
    after the label is checked and ignored; comments and blank lines are ignored.

    Args:
        path: the file, plain or compressed.
        labels: as in `xc_file`.
        num_classes: C; None: the largest label of the file + 1; "observed": the largest under the rule + 1.
        num_features: width; by default the largest index + 1. Give it where a test file must fit a training file.
        index_base: what the first feature is called, 0 or 1. None: 1 where no feature 0 occurs, else 0. Give it where
            two files must agree.
        label_base: what the first class is called, 0 or 1.
        skip_bad: as in `xc_file`.
        cache_dir: as in `xc_file`.
        verify: as in `xc_file`.

    Example:
        >>> import tempfile, torch
        >>> from pathlib import Path
        >>> from samplex_cuda import data
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "train.svm"
        ...     _ = path.write_text("3 qid:1 1:0.5 4:1\\n0 2:2  # the second\\n")
        ...     found = data.svmlight_file(path)
        >>> found, found.batch(torch.tensor([0]))["ids"].tolist()
        (Sparse(2 examples, num_classes=4, num_features=4), [0, 3])
    """
    where = "svmlight_file"
    if index_base not in (None, 0, 1):
        raise ValueError(f"{where}: index_base must be 0, 1 or None, got {index_base!r}")
    if label_base not in (0, 1):
        raise ValueError(f"{where}: label_base must be 0 or 1, got {label_base!r}")
    options = {"index_base": index_base, "label_base": label_base}
    found = converted(
        where,
        [Path(path)],
        "svmlight",
        options,
        lambda c: _convert_svmlight(c, index_base, label_base),
        skip_bad=skip_bad,
        cache_dir=cache_dir,
        verify=verify,
    )
    data = sparse_from(where, found, num_features, num_classes, labels)
    data.index_base = found.facts["index_base"]
    return data
