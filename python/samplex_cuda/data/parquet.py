"""Parquet files, read batch by batch through pyarrow into the cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from samplex_cuda.data.array_files import _observed
from samplex_cuda.data.array_sets import Dense, Sparse
from samplex_cuda.data.base import Dataset
from samplex_cuda.data.cache import Conversion, converted
from samplex_cuda.data.columns import by_role
from samplex_cuda.data.interaction_files import interactions_from, write_pairs
from samplex_cuda.data.sparse_text import adopt

__all__ = ["parquet_file", "parquet_lists"]

_ROWS = 1 << 14  # read at once
_LABELS = ("label", "labels", "y", "target")


def _pyarrow() -> Any:
    try:
        import pyarrow.compute
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError("parquet_file needs pyarrow: pip install samplex-cuda[parquet]") from error
    return pyarrow


class _Table:
    """The parts of a parquet data set, one after the other."""

    def __init__(self, where: str, sources: list[Path]) -> None:
        arrow = _pyarrow()
        self.where, self.arrow, self.files = where, arrow, []
        for source in sources:
            try:
                self.files.append((source, arrow.parquet.ParquetFile(source)))
            except (arrow.ArrowException, OSError) as error:
                raise ValueError(f"{where}: {source}: it is not a parquet file ({error})") from error
        self.schema = self.files[0][1].schema_arrow
        for source, file in self.files[1:]:
            if not file.schema_arrow.equals(self.schema):
                raise ValueError(f"{where}: {source}: its columns must be those of {sources[0]}")

    def is_list(self, name: str) -> bool:
        types, kind = self.arrow.types, self.schema.field(name).type
        return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)

    def is_number(self, name: str, whole: bool = False) -> bool:
        types, kind = self.arrow.types, self.schema.field(name).type
        if self.is_list(name):
            kind = kind.value_type
        return types.is_integer(kind) or (not whole and (types.is_floating(kind) or types.is_boolean(kind)))

    def check(self, name: str, want: str, *, listed: bool | None, whole: bool) -> None:
        if name not in self.schema.names:
            raise ValueError(f"{self.where}: {self.files[0][0]}: there is no column {name!r} in {self.schema.names}")
        if not self.is_number(name, whole) or (listed is not None and self.is_list(name) != listed):
            got = self.schema.field(name).type
            raise ValueError(f"{self.where}: {self.files[0][0]}: column {name!r} must be {want}, got {got}")

    def parts(self, names: list[str]) -> Iterator[tuple[Path, int, list[tuple[np.ndarray, np.ndarray | None]]]]:
        """(file, first row, for each column its numbers and, for a list, the length of each row)."""
        for source, file in self.files:
            first = 0
            for batch in file.iter_batches(batch_size=_ROWS, columns=names):
                found = [self._column(source, first, name, batch.column(name)) for name in names]
                yield source, first, found
                first += batch.num_rows

    def _column(self, source: Path, first: int, name: str, column: Any) -> tuple[np.ndarray, np.ndarray | None]:
        lengths = None
        if column.null_count:
            row = first + int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))
            raise ValueError(f"{self.where}: {source}: row {row} of column {name!r} is empty")
        if self.is_list(name):
            lengths = np.asarray(self.arrow.compute.list_value_length(column).to_numpy(zero_copy_only=False))
            column = column.flatten()
            if column.null_count:
                place = int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))
                row = first + int(np.searchsorted(np.cumsum(lengths), place, side="right"))
                raise ValueError(f"{self.where}: {source}: row {row} of column {name!r} has an empty entry")
        return column.to_numpy(zero_copy_only=False), lengths


def _fail_at(where: str, source: Path, first: int, wrong: np.ndarray, text: str) -> None:
    if wrong.any():
        raise ValueError(f"{where}: {source}: row {first + int(np.argmax(wrong))}: {text}")


class _LabelWriter:
    def __init__(self, conversion: Conversion, listed: bool) -> None:
        self.where = conversion.where
        self.indptr = conversion.writer("label_indptr", np.int64) if listed else None
        self.ids = conversion.writer("labels" if listed else "y", np.int64)
        if self.indptr is not None:
            self.indptr.append([0])

    def append(self, source: Path, first: int, ids: np.ndarray, lengths: np.ndarray | None) -> None:
        if lengths is None:
            _fail_at(self.where, source, first, ids < 0, "its label is below 0")
        elif (ids < 0).any():
            row = first + int(np.searchsorted(np.cumsum(lengths), np.argmax(ids < 0), side="right"))
            raise ValueError(f"{self.where}: {source}: row {row}: its label is below 0")
        if self.indptr is not None and lengths is not None:
            self.indptr.append(self.ids.length + np.cumsum(lengths))
        self.ids.append(ids)


def _convert_dense(conversion: Conversion, table: _Table, x: list[str], y: str) -> None:
    where = conversion.where
    listed = len(x) == 1 and table.is_list(x[0])
    labels = _LabelWriter(conversion, table.is_list(y))
    width = None if listed else len(x)
    out = None
    for source, first, columns in table.parts([*x, y]):
        *features, (ids, lengths) = columns
        if listed:
            values, sizes = features[0]
            if sizes is None or not len(sizes):
                continue
            width = int(sizes[0]) if width is None else width
            _fail_at(where, source, first, sizes != width, f"its {x[0]!r} must have {width} numbers as the first row")
            part = values.reshape(-1, width)
        else:
            part = np.stack([values.astype(np.float32) for values, _ in features], 1)
        if out is None:
            out = conversion.writer("x", np.float32, width)
        _fail_at(where, source, first, ~np.isfinite(part).all(1), "it has a number that is not finite")
        out.append(part)
        labels.append(source, first, ids, lengths)
    if out is None:
        raise ValueError(f"{where}: {conversion.source}: the file has no rows")


def _convert_sparse(conversion: Conversion, table: _Table, indices: str, values: str | None, y: str) -> None:
    where = conversion.where
    labels = _LabelWriter(conversion, table.is_list(y))
    ends = conversion.writer("indptr", np.int64)
    ends.append([0])
    of_ids = conversion.writer("indices", np.int64)
    of_values = conversion.writer("values", np.float32)
    most = -1
    for source, first, columns in table.parts([indices, *([values] if values else []), y]):
        ids, lengths = columns[0]
        if lengths is None:
            continue
        if (ids < 0).any():
            row = first + int(np.searchsorted(np.cumsum(lengths), np.argmax(ids < 0), side="right"))
            raise ValueError(f"{where}: {source}: row {row}: an entry of {indices!r} is below 0")
        numbers = np.ones(len(ids), np.float32)
        if values:
            numbers, sizes = columns[1]
            differ = np.asarray(sizes) != lengths
            _fail_at(where, source, first, differ, f"{indices!r} and {values!r} must have the same length")
        ends.append(of_ids.length + np.cumsum(lengths))
        of_ids.append(ids)
        of_values.append(numbers)
        labels.append(source, first, *columns[-1])
        most = max(most, int(ids.max(initial=-1)))
    if ends.length == 1:
        raise ValueError(f"{where}: {conversion.source}: the file has no rows")
    conversion.facts["num_features"] = max(1, most + 1)


def _pairs(where: str, table: _Table, names: list[str]) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray | None]]:
    for source, first, columns in table.parts(names):
        arrays = [values for values, _ in columns]
        for name, values in zip(names[:2], arrays, strict=False):
            _fail_at(
                where, source, first, (values < 0) | (values > 2**31 - 2), f"its {name!r} is outside [0, 2^31 - 2]"
            )
        if len(arrays) == 3 and arrays[2].dtype.kind == "M":
            arrays[2] = arrays[2].astype("datetime64[us]").astype(np.int64)
        yield arrays[0], arrays[1], arrays[2].astype(np.float64) if len(arrays) == 3 else None


def _interaction_columns(
    where: str, path: Path, names: list[str], user: str, item: str, time: str
) -> tuple[str, str, str]:  # fmt: skip
    """Columns of user, item and time: those that are named, else those whose names mean that and nothing else does."""
    if any(name in names for name in (*_LABELS, "x", "indices")):
        return user, item, time
    found = []
    for role, name in (("user", user), ("item", item), ("time", time)):
        if name not in names:
            like = by_role(names, role)
            if len(like) > 1:
                raise ValueError(f"{where}: {path}: {role} must name the column of it, one of {like}, got {name!r}")
            name = like[0] if like else name
        found.append(name)
    return found[0], found[1], found[2]


def parquet_file(
    path: Path | str,
    *,
    x: str | list[str] | None = None,
    y: str | None = None,
    indices: str | None = None,
    values: str | None = None,
    user: str = "user",
    item: str = "item",
    time: str = "time",
    labels: str = "all",
    num_classes: int | str | None = None,
    num_features: int | None = None,
    history: int = 50,
    min_history: int = 1,
    order: str = "time",
    cache_dir: Path | str | None = None,
    verify: str = "cache",
) -> Dataset:
    """A parquet file, or a folder of them with the same columns (in the order of their names). Needs `pyarrow`.

    What the data are follows from the columns:

    - `user` and `item`, perhaps `time` (a number or a timestamp): `Interactions`;
    - `indices` (lists of whole numbers), perhaps `values` (lists of numbers): `Sparse`;
    - x: one column of lists of equal length, or several columns of numbers; by default a column `x`, else every column
      of numbers but y: `Dense`.

    y is a column of whole numbers or of lists of them. An empty cell is an error that names file, row and column.

    Args:
        path: the file or folder.
        x: column or columns of a dense x.
        y: column of labels; by default the first of label, labels, y, target that is there.
        indices: column of the features of sparse rows; by default `indices`.
        values: column of their values; by default `values`; without it they are 1.
        user: column of users.
        item: column of items.
        time: column of times; the items of a user are sorted by it. Where a column is not there, the only one whose
            name means the same (user_id, movieId, timestamp) is taken.
        labels: as in `xc_file`.
        num_classes: C, or the number of items; by default the largest + 1.
        num_features: width of sparse rows; by default the largest + 1.
        history: of `Interactions`.
        min_history: of `Interactions`.
        order: of `Interactions`.
        cache_dir: as in `xc_file`.
        verify: as in `xc_file`.

    Example:
        >>> import samplex_cuda.data as data
        >>> train = data.parquet_file("train.parquet", x="embedding", y="label")  # doctest: +SKIP
    """
    where, given = "parquet_file", Path(path)
    sources = sorted(given.glob("*.parquet")) if given.is_dir() else [given]
    if not sources or not all(source.is_file() for source in sources):
        raise FileNotFoundError(f"{where}: {path}: there is no such file, or no .parquet file in the folder")
    table = _Table(where, sources)
    names = table.schema.names
    keep: dict[str, Any] = {"cache_dir": cache_dir, "verify": verify}
    if x is None and indices is None and y is None:
        user, item, time = _interaction_columns(where, sources[0], names, user, item, time)
    if x is None and indices is None and user in names and item in names:
        wanted = [user, item, *([time] if time in names else [])]
        for name in wanted[:2]:
            table.check(name, "whole numbers", listed=False, whole=True)
        found = converted(
            where, sources, "parquet", {"pairs": wanted},
            lambda c: write_pairs(c, _pairs(where, table, wanted), len(wanted) == 3), **keep,
        )  # fmt: skip
        data_ = interactions_from(where, found, _observed(where, num_classes), history, min_history, order)
        rest = [name for name in names if name not in wanted]
        meaning = ", ".join(f'"{name}" = {role}' for name, role in zip(wanted, ("user", "item", "time"), strict=False))
        data_.columns_said = f"columns: {meaning}" + (f"; not used: {', '.join(rest)}" if rest else "")
        return data_
    if y is None:
        y = next((name for name in _LABELS if name in names), None)
        if y is None:
            raise ValueError(f"{where}: {sources[0]}: y must name the column of labels, one of {names}")
    target = y
    table.check(target, "whole numbers or lists of them", listed=None, whole=True)
    if indices is not None or (x is None and "indices" in names):
        of_ids = indices or "indices"
        of_values = values or ("values" if "values" in names else None)
        table.check(of_ids, "lists of whole numbers", listed=True, whole=True)
        if of_values is not None:
            table.check(of_values, "lists of numbers", listed=True, whole=False)
        options: dict[str, Any] = {"indices": of_ids, "values": of_values, "y": target}
        found = converted(
            where, sources, "parquet", options, lambda c: _convert_sparse(c, table, of_ids, of_values, target), **keep
        )
        a, width = found.arrays, found.facts["num_features"] if num_features is None else num_features
        data: Any = Sparse(
            a["indptr"], a["indices"], a["values"], a.get("label_indptr"), a["labels"] if "labels" in a else a["y"],
            width, _observed(where, num_classes), label_rule=labels,
        )  # fmt: skip
        return adopt(data, found)
    if x is None:
        x = ["x"] if "x" in names else [name for name in names if name != y and table.is_number(name)]
    features = [x] if isinstance(x, str) else list(x)
    if not features:
        raise ValueError(f"{where}: {sources[0]}: x must name columns of numbers, one of {names}")
    for name in features:
        table.check(name, "numbers or lists of them", listed=None if len(features) == 1 else False, whole=False)
    found = converted(
        where, sources, "parquet", {"x": features, "y": target},
        lambda c: _convert_dense(c, table, features, target), **keep,
    )  # fmt: skip
    a = found.arrays
    ids: Any = (a["label_indptr"], a["labels"]) if "labels" in a else a["y"]
    return adopt(Dense(a["x"], ids, _observed(where, num_classes), label_rule=labels), found)


def parquet_lists(where: str, path: Path, column: str, whole: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """A column of numbers or lists of them as CSR (offsets [N + 1], numbers), read into memory.

    Args:
        where: name for error messages.
        path: the file, or a folder of them.
        column: its name.
        whole: whether they must be whole numbers; otherwise they become float32.
    """
    table = _Table(where, sorted(path.glob("*.parquet")) if path.is_dir() else [path])
    table.check(column, f"{'whole ' if whole else ''}numbers or lists of them", listed=None, whole=whole)
    dtype: Any = np.int64 if whole else np.float32
    ends, parts, total = [np.zeros(1, dtype=np.int64)], [np.empty(0, dtype=dtype)], 0
    for _, _, columns in table.parts([column]):
        ids, lengths = columns[0]
        sizes = np.ones(len(ids), dtype=np.int64) if lengths is None else np.asarray(lengths, dtype=np.int64)
        ends.append(total + np.cumsum(sizes))
        parts.append(np.asarray(ids, dtype=dtype))
        total += len(ids)
    return np.concatenate(ends), np.concatenate(parts)
