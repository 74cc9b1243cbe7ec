"""Who took what: lists of items a user, tables of user, item and time, and sequences.

Pairs are written as they come and then brought together by user with a counting sort over the mapped file, so that
memory holds a few numbers per user and a block of pairs, for any size of the file.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from samplex_cuda.data.cache import Conversion, Converted, converted
from samplex_cuda.data.columns import Plan, find_plan
from samplex_cuda.data.interactions import Interactions
from samplex_cuda.data.lines import BadLineError, blocks
from samplex_cuda.data.sparse_text import _id, _text, adopt

__all__ = ["interactions_file", "sequences_file"]

_ID_MAX = 2**31 - 2
_STEP = 1 << 20  # pairs handled at once
# Tables have a place for each number below the largest user's: one stray id of 2 * 10^9 would take all memory.
_FEW_USERS, _USERS_PER_PAIR = 1 << 27, 16
_FEW_ITEMS = 1 << 24

_DIGIT_OR_SPACE = np.zeros(256, dtype=bool)
for _byte in b"0123456789 \n":
    _DIGIT_OR_SPACE[_byte] = True


class _Names:
    """Numbers for ids that are any text, in the order they come."""

    def __init__(self) -> None:
        self.found: dict[str, int] = {}

    def __call__(self, name: str, field: bytes) -> int:
        try:
            return self.found.setdefault(field.strip().decode("utf-8"), len(self.found))
        except UnicodeDecodeError:
            raise BadLineError(f"{name} {_text(field)} is not UTF-8") from None


def _small_id(name: str, field: bytes) -> int:
    number = _id(name, field.strip())
    if number > _ID_MAX:
        raise BadLineError(f"{name} {number} is outside [0, {_ID_MAX}]; relabel=True assigns new ids")
    return number


class _PairWriter:
    """Appends (user, item[, time]); `group` brings them together by user."""

    def __init__(self, conversion: Conversion, timed: bool) -> None:
        self.conversion, self.timed = conversion, timed
        self.users = conversion.writer("pair_user", np.int32)
        self.items = conversion.writer("pair_item", np.int32)
        self.times = conversion.writer("pair_time", np.float64) if timed else None
        self.num_users = 0  # users without items count too
        self.most_item = -1

    def know(self, most_user: int) -> None:
        self.num_users = max(self.num_users, most_user + 1)

    def append(self, users: np.ndarray, items: np.ndarray, times: np.ndarray | None = None) -> None:
        if not len(users):
            return
        self.know(int(users.max()))
        self.most_item = max(self.most_item, int(items.max()))
        self.users.append(users)
        self.items.append(items)
        if self.times is not None:
            self.times.append(times)

    def group(self) -> None:
        """Writes "indptr" and "items"; the pairs of a user in the order of time, or of the file."""
        conversion = self.conversion
        total = self.users.length
        if self.num_users > max(_FEW_USERS, _USERS_PER_PAIR * total):  # before anything of that length is made
            raise ValueError(
                f"{conversion.where}: {conversion.source}: user ids must be without large gaps, got user "
                f"{self.num_users - 1} in {total} interactions; pass relabel=True to renumber them"
            )
        if self.most_item >= max(_FEW_ITEMS, _USERS_PER_PAIR * total):
            raise ValueError(
                f"{conversion.where}: {conversion.source}: item ids must be without large gaps, got item "
                f"{self.most_item} in {total} interactions; pass relabel=True to renumber them. If the column is a "
                "time or a rating, pass layout and fields to select the columns of user and item"
            )
        users, items = conversion.finished("pair_user"), conversion.finished("pair_item")
        times = conversion.finished("pair_time") if self.timed else None
        starts = np.zeros(self.num_users + 1, dtype=np.int64)
        for begin in range(0, total, _STEP):
            found, sizes = np.unique(users[begin : begin + _STEP], return_counts=True)
            starts[found + 1] += sizes
        np.cumsum(starts, out=starts)
        conversion.writer("indptr", np.int64).append(starts)
        out = conversion.writer("items", np.int32)
        for begin in range(0, total, _STEP):  # room first, then pairs at their places
            out.append(np.zeros(min(_STEP, total - begin), np.int32))
        grouped = conversion.finished("items")
        when = None
        if times is not None:
            writer = conversion.writer("grouped_time", np.float64)
            for begin in range(0, total, _STEP):
                writer.append(np.zeros(min(_STEP, total - begin)))
            when = conversion.finished("grouped_time")
        free = starts[:-1].copy()
        for begin in range(0, total, _STEP):
            user = np.asarray(users[begin : begin + _STEP])
            order = np.argsort(user, kind="stable")
            ranked = user[order]
            first = np.concatenate([[True], ranked[1:] != ranked[:-1]])
            which = np.flatnonzero(first)
            sizes = np.diff(np.append(which, len(ranked)))
            place = np.repeat(free[ranked[which]] - which, sizes) + np.arange(len(ranked))
            free[ranked[which]] += sizes
            grouped[place] = items[begin : begin + _STEP][order]
            if times is not None and when is not None:
                when[place] = times[begin : begin + _STEP][order]
        if when is not None:
            self._by_time(starts, grouped, when)
            del when
            conversion.drop("grouped_time")
            conversion.drop("pair_time")
        if isinstance(grouped, np.memmap):
            grouped.flush()
        del users, items, times, grouped
        conversion.drop("pair_user")
        conversion.drop("pair_item")
        conversion.facts |= {"num_users": self.num_users, "num_items": self.most_item + 1, "interactions": total}

    @staticmethod
    def _by_time(starts: np.ndarray, items: np.ndarray, when: np.ndarray) -> None:
        user = 0
        while user < len(starts) - 1:
            # As many users as fit a block, one at least.
            last = max(user + 1, int(np.searchsorted(starts, starts[user] + _STEP, side="right")) - 1)
            begin, end = starts[user], starts[last]
            owner = np.repeat(np.arange(user, last), np.diff(starts[user : last + 1]))
            order = np.lexsort((when[begin:end], owner))  # stable: equal times as in the file
            items[begin:end] = items[begin:end][order]
            user = last


# ------------------------------------------------------------------------------------------------ user item item ...
def _fast_lists(block: bytes) -> tuple[np.ndarray, np.ndarray] | None:
    """(numbers of all lines, how many each line has); None if anything but digits and spaces occurs."""
    raw = np.frombuffer(block, dtype=np.uint8)
    if not _DIGIT_OR_SPACE[raw].all():
        return None
    digit = raw > 32
    begins = np.flatnonzero(digit & ~np.concatenate([[False], digit[:-1]]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            numbers = np.fromstring(block.replace(b"\n", b" "), dtype=np.float64, sep=" ")
        except (DeprecationWarning, ValueError):
            return None
    if len(numbers) != len(begins) or numbers.max(initial=0) > _ID_MAX:
        return None
    line_ends = np.flatnonzero(raw == 10)
    counts = np.bincount(np.searchsorted(line_ends, begins), minlength=len(line_ends))
    return numbers.astype(np.int32), counts


def _convert_lists(conversion: Conversion, with_user: bool, relabel: bool) -> None:
    where = conversion.where
    conversion.hashed = True
    pairs = _PairWriter(conversion, timed=False)
    user_id: Callable[[str, bytes], int] = _Names() if relabel else _small_id
    item_id: Callable[[str, bytes], int] = _Names() if relabel else _small_id
    sequences = 0
    for block, first in blocks(where, conversion.source, conversion.digests[0]):
        block = block.replace(b"\t", b" ")
        found = None if relabel else _fast_lists(block)
        if found is None:
            numbers: list[int] = []
            sizes: list[int] = []
            for number, line in enumerate(block.split(b"\n")[:-1], first):
                fields = line.split()
                try:
                    row = [user_id("user", fields[0])] if with_user and fields else []
                    row += [item_id("item", field) for field in fields[len(row) :]]
                except BadLineError as reason:
                    conversion.bad.add(number, str(reason))
                    continue
                numbers += row
                sizes.append(len(row))
            values, counts = np.array(numbers, np.int32), np.array(sizes, np.int64)
        else:
            values, counts = found
        counts = counts[counts > 0]  # blank lines
        if not len(counts):
            continue
        if with_user:
            starts = np.cumsum(counts) - counts
            users = values[starts]
            pairs.know(int(users.max()))
            pairs.append(np.repeat(users, counts - 1), np.delete(values, starts))
        else:
            pairs.append(np.repeat(np.arange(sequences, sequences + len(counts), dtype=np.int32), counts), values)
            sequences += len(counts)
    _finish(conversion, pairs, user_id, item_id)


# ------------------------------------------------------------------------------------------------ user,item[,time]
def _convert_table(conversion: Conversion, plan: Plan, relabel: bool) -> None:
    where, path = conversion.where, conversion.source
    conversion.hashed = True
    user_id: Callable[[str, bytes], int] = _Names() if relabel else _small_id
    item_id: Callable[[str, bytes], int] = _Names() if relabel else _small_id
    pairs = _PairWriter(conversion, timed=len(plan.places) == 3)
    places, width = plan.places, plan.width
    mark = plan.separator.encode()
    sep = b"\t" if plan.separator in ("::", " ") else mark
    begun = False
    for block, first in blocks(where, path, conversion.digests[0]):
        if not begun and plan.header:
            block, first = block.partition(b"\n")[2], first + 1
        begun = True
        if plan.separator == "::":
            block = block.replace(mark, sep)
        elif plan.separator == " ":
            block = b"\n".join(sep.join(line.split()) for line in block.split(b"\n"))
        table = None if relabel else _fast_table(block, sep, width, places)
        if table is None:
            rows = []
            for number, line in enumerate(block.split(b"\n")[:-1], first):
                if not line.strip():
                    continue
                cells = line.split(sep)
                try:
                    if len(cells) != width:
                        raise BadLineError(f"the line must have {width} fields, got {len(cells)}")
                    row = [user_id("user", cells[places[0]]), item_id("item", cells[places[1]])]
                    rows.append([*row, *(_time(cells[place]) for place in places[2:])])
                except BadLineError as reason:
                    conversion.bad.add(number, str(reason))
            table = np.array(rows, dtype=np.float64).reshape(len(rows), len(places))
        times = table[:, 2] if len(places) == 3 else None
        pairs.append(table[:, 0].astype(np.int32), table[:, 1].astype(np.int32), times)
    _finish(conversion, pairs, user_id, item_id)


def _time(field: bytes) -> float:
    try:
        value = float(field)
    except ValueError:
        value = np.nan
    if not np.isfinite(value):
        raise BadLineError(f"time {_text(field.strip())} is not a finite number")
    return value


def _fast_table(block: bytes, sep: bytes, width: int, places: list[int]) -> np.ndarray | None:
    """The wanted columns, float64 [n, 2 or 3]; None if a line is not plainly `width` numbers."""
    raw = np.frombuffer(block, dtype=np.uint8)
    is_sep, is_end = raw == ord(sep), raw == 10
    edge = is_sep | is_end
    lines = int(is_end.sum())
    if not lines or (edge[1:] & edge[:-1]).any() or edge[0] or int(is_sep.sum()) != lines * (width - 1):
        return None
    if (np.diff(np.searchsorted(np.flatnonzero(is_sep), np.flatnonzero(is_end)), prepend=0) != width - 1).any():
        return None
    if (~edge & ((raw < 48) | (raw > 57)) & (raw != 46)).any():  # digits and points
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            numbers = np.fromstring(block.replace(sep, b" ").replace(b"\n", b" "), dtype=np.float64, sep=" ")
        except (DeprecationWarning, ValueError):
            return None
    if len(numbers) != lines * width:
        return None
    table = numbers.reshape(lines, width)[:, places]
    ids = table[:, :2]
    # "7." and "7.0" are no ids: only the line by line reader says so.
    if ids.max() > _ID_MAX or (b"." in block and not _points_outside(raw, edge, width, places)):
        return None
    return table


def _points_outside(raw: np.ndarray, edge: np.ndarray, width: int, places: list[int]) -> bool:
    cell = np.searchsorted(np.flatnonzero(edge), np.flatnonzero(raw == 46)) % width
    return not np.isin(cell, places[:2]).any()


def _finish(
    conversion: Conversion, pairs: _PairWriter, user_id: Callable[..., int], item_id: Callable[..., int]
) -> None:
    if not pairs.items.length:
        raise ValueError(f"{conversion.where}: {conversion.source}: the file has no interactions")
    pairs.group()
    for name, ids in (("users", user_id), ("items", item_id)):
        if isinstance(ids, _Names) and ids.found:
            conversion.texts[f"{name}_names"] = [word.replace("\n", " ") for word in ids.found]


def interactions_from(
    where: str, found: Converted, num_items: int | None, history: int, min_history: int, order: str
) -> Interactions:
    """The data set of a cache that holds interactions."""
    items = found.facts["num_items"] if num_items is None else num_items
    if items < found.facts["num_items"]:
        raise ValueError(f"{where}: num_items must be at least {found.facts['num_items']}, got {num_items}")
    a = found.arrays
    data = Interactions(a["indptr"], a["items"], items, history, min_history=min_history, order=order)
    for name in ("users", "items"):
        if (found.folder / f"{name}_names.txt").exists():
            setattr(data, f"{name[:-1]}_names", found.words(f"{name}_names"))
    return adopt(data, found)


def write_pairs(
    conversion: Conversion, parts: Iterable[tuple[np.ndarray, np.ndarray, np.ndarray | None]], timed: bool
) -> None:
    """Group pairs that come as arrays."""
    pairs = _PairWriter(conversion, timed)
    for users, items, times in parts:
        pairs.append(users, items, times)
    _finish(conversion, pairs, _small_id, _small_id)


def interactions_file(
    path: Path | str,
    *,
    known: Interactions | None = None,
    layout: str | None = None,
    header: bool | None = None,
    fields: Sequence[int | str] | None = None,
    relabel: bool = False,
    num_items: int | None = None,
    history: int = 50,
    min_history: int = 1,
    order: str = "time",
    skip_bad: int = 0,
    cache_dir: Path | str | None = None,
    verify: str = "cache",
) -> Interactions:
    """User-item interactions: lines `user item item ...`, or a table `user,item[,time]`.

    Ids are whole numbers from 0. A user may have several lines; his items follow in the order of the file, in a table
    with times in the order of time (equal times as in the file). Blank lines are ignored.

    Args:
        path: the file, plain or compressed.
        known: the training data, where this file holds what is to be predicted: see `Interactions.with_targets`.
        layout: "lists" or "table"; by default "table" for .csv (commas), .tsv (tabs), .rating, .inter, .data and .dat
            (tabs, commas, or "::"), else "lists".
        header: whether a table begins with names; None: where they are known ones, such as user_id or movieId.
        fields: which columns are user, item and time, by number from 0 or by name of the header. Give two to ignore the
            time. By default those that the header names, whatever their order; without a header the usual layouts:
            user, item; user, item, time; user, item, rating, time. Where a column could be a rating or a time, it is an
            error.
        relabel: ids are any text: they are numbered as they come, and their names are kept as `user_names` and
            `item_names`. Not for a file that must agree with another one.
        num_items: C; by default the largest id + 1.
        history: T of `Interactions`.
        min_history: of `Interactions`.
        order: "time" or "none", of `Interactions`.
        skip_bad: as in `xc_file`.
        cache_dir: as in `xc_file`.
        verify: as in `xc_file`.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from samplex_cuda import data
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "train.csv"
        ...     _ = path.write_text("user,item,time\\n0,4,100\\n1,2,50\\n0,3,20\\n")
        ...     found = data.interactions_file(path)
        >>> found.items.tolist(), found.indptr.tolist(), found.num_classes
        ([3, 4, 2], [0, 2, 3], 5)
    """
    where, source = "interactions_file", Path(path)
    if layout not in (None, "lists", "table"):
        raise ValueError(f"{where}: layout must be 'lists', 'table' or None, got {layout!r}")
    if fields is not None and len(fields) not in (2, 3):
        raise ValueError(f"{where}: fields must be user, item and perhaps time, got {list(fields)}")
    if not source.is_file():
        raise FileNotFoundError(f"{where}: {source}: there is no such file")
    plan = find_plan(where, source, layout=layout, header=header, fields=fields, relabel=relabel)
    options: dict[str, object] = {"table": plan.table, "relabel": relabel}
    if plan.table:
        options |= {"header": plan.header, "places": plan.places, "separator": plan.separator}
    found = converted(
        where,
        [source],
        "interactions",
        options,
        lambda c: _convert_table(c, plan, relabel) if plan.table else _convert_lists(c, True, relabel),
        skip_bad=skip_bad,
        cache_dir=cache_dir,
        verify=verify,
    )
    if known is not None and num_items is None:
        num_items = known.num_classes
    data = interactions_from(where, found, num_items, history, min_history, order)
    data.columns_said = plan.said
    return data if known is None else known.with_targets(data)


def sequences_file(
    path: Path | str,
    *,
    relabel: bool = False,
    num_items: int | None = None,
    history: int = 50,
    min_history: int = 1,
    order: str = "time",
    skip_bad: int = 0,
    cache_dir: Path | str | None = None,
    verify: str = "cache",
) -> Interactions:
    """Sequences of items, one a line: `item item item ...`. Line i is user i; blank lines do not count.

    Args:
        path: the file, plain or compressed.
        relabel: as in `interactions_file`.
        num_items: as in `interactions_file`.
        history: as in `interactions_file`.
        min_history: as in `interactions_file`.
        order: as in `interactions_file`.
        skip_bad: as in `xc_file`.
        cache_dir: as in `xc_file`.
        verify: as in `xc_file`.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from samplex_cuda import data
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "sessions.txt"
        ...     _ = path.write_text("4 3 9\\n1 2\\n")
        ...     data.sequences_file(path)
        Interactions(3 examples, num_classes=10, num_features=10)
    """
    found = converted(
        "sequences_file",
        [Path(path)],
        "sequences",
        {"relabel": relabel},
        lambda c: _convert_lists(c, False, relabel),
        skip_bad=skip_bad,
        cache_dir=cache_dir,
        verify=verify,
    )
    return interactions_from("sequences_file", found, num_items, history, min_history, order)
