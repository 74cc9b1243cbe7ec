"""What the columns of a table of interactions mean: by the header, by the usual layouts of ratings, or not at all."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

from samplex_cuda.data.lines import blocks, logical_suffix

__all__ = ["Plan", "by_role", "find_plan"]

SEPARATORS = {".csv": ",", ".tsv": "\t"}
TABLES = (*SEPARATORS, ".rating", ".ratings", ".inter", ".data", ".dat")  # names of files that are tables
_ROWS = 2000  # examined
_SAMPLE = 1 << 18

_KEY = "(id|ids|idx|index|nr|no|number|key|hash|name|code)?"
_USER = {"uid", "u", "reviewerid", "reviewer", "customerid", "customer", "memberid", "member", "visitorid", "sessionid",
         "session", "profileid", "profile", "accountid", "account"}  # fmt: skip
_ITEM = {"iid", "i", "asin", "parentasin", "isbn", "poi", *(
    name + end for end in ("", "id")
    for name in ("movie", "book", "product", "business", "song", "track", "artist", "video", "news", "article", "place",
                 "location", "venue", "game", "anime", "joke", "recipe", "beer", "ad", "target"))}  # fmt: skip
_TIME = {"time", "timestamp", "timestamps", "ts", "t", "unixtime", "unixreviewtime", "reviewtime", "datetime", "date",
         "eventtime", "createdat", "created"}  # fmt: skip
_RATING = {"rating", "ratings", "score", "scores", "stars", "star", "overall", "rate", "preference", "weight", "count",
           "counts", "plays", "playcount", "value", "like", "likes"}  # fmt: skip


@dataclasses.dataclass
class Plan:
    """How to read a file of interactions.

    Attributes:
        table: lines are user, item and perhaps time; False: lines are a user and his items.
        separator: between the fields of a table.
        header: whether the first line holds names.
        places: columns of user, item and, if there is one, time.
        width: how many columns there are.
        said: what each column was taken for, in words.

    Example:
        >>> from samplex_cuda.data.columns import Plan
        >>> Plan(True, ",", True, [0, 1], 2, "").places
        [0, 1]
    """

    table: bool
    separator: str = " "
    header: bool = False
    places: list[int] = dataclasses.field(default_factory=list)
    width: int = 0
    said: str = "lines: a user and his items"


def _role(name: str) -> str:
    """ "user", "item", "time", "rating", or "" for a name that says nothing."""
    plain = re.sub(r"[^a-z0-9]", "", name.lower().partition(":")[0])  # RecBole writes user_id:token
    if plain in _USER or re.fullmatch(rf"users?{_KEY}", plain):
        return "user"
    if plain in _ITEM or re.fullmatch(rf"items?{_KEY}", plain):
        return "item"
    return "time" if plain in _TIME else "rating" if plain in _RATING else ""


def by_role(names: Sequence[str], role: str) -> list[str]:
    """The names that mean "user", "item" or "time".

    Example:
        >>> from samplex_cuda.data.columns import by_role
        >>> by_role(["userId", "movieId", "rating"], "item")
        ['movieId']
    """
    return [name for name in names if _role(name) == role]


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _is_rating(values: list[float | None]) -> bool:
    known = [v for v in values if v is not None and 0 <= v <= 10 and v * 2 == int(v * 2)]
    return bool(values) and len(known) == len(values)


def _is_time(values: list[float | None]) -> bool:
    """Dates as 20260131 and seconds since 1970 are above 10^7; so many items nobody has."""
    return bool(values) and all(v is not None and v >= 1e7 for v in values)


def _sample(where: str, path: Path) -> list[str]:
    """The first lines that are not blank."""
    for block, _ in blocks(where, path, hashlib.sha256(), _SAMPLE):
        lines = block.decode("utf-8", "replace").split("\n")[:-1]
        return [line for line in lines if line.strip()][:_ROWS]
    return []


def _separator(suffix: str, line: str) -> str:
    if suffix in SEPARATORS:
        return SEPARATORS[suffix]
    return next((mark for mark in ("::", "\t", ",", ";") if mark in line), " ")


def _cells(line: str, separator: str) -> list[str]:
    return [cell.strip().strip('"') for cell in (line.split() if separator == " " else line.split(separator))]


def _called(place: int, names: list[str] | None) -> str:
    return f"column {place}" if names is None else f'column {place} "{names[place]}"'


def _say(plan: Plan, names: list[str] | None, why: dict[int, str]) -> str:
    parts = [
        f"{_called(place, names)} = {role}{why.get(place, '')}"
        for place, role in zip(plan.places, ("user", "item", "time"), strict=False)
    ]
    rest = [_called(place, names) + why.get(place, "") for place in range(plan.width) if place not in plan.places]
    return "columns: " + ", ".join(parts) + (f"; not used: {', '.join(rest)}" if rest else "")


def _refuse(where: str, path: Path, line: str, why: str, width: int) -> ValueError:
    example = [0, 1, min(3, width - 1)]
    return ValueError(
        f"{where}: {path}: fields must say which columns are user, item and time: {why}, got {line[:80]!r}. "
        f"fields={example} takes columns {example[0]}, {example[1]} and {example[2]}, fields=[0, 1] has no time "
        f"(samplex: --set 'data.options.fields={example}')"
    )


def _by_name(where: str, path: Path, names: list[str]) -> list[int] | None:
    """Places by the names of a header; None if they say nothing."""
    roles = [_role(name) for name in names]
    if "user" not in roles and "item" not in roles:
        return None
    shown = ", ".join(names)
    for role in ("user", "item"):
        if role not in roles and roles.count("") == 1:
            roles[roles.index("")] = role  # the only one without a meaning
        if roles.count(role) != 1:
            count = "no" if role not in roles else "more than one"
            raise _refuse(where, path, shown, f"the header has {count} {role}", len(names))
    if roles.count("time") > 1:
        raise _refuse(where, path, shown, "the header has more than one time", len(names))
    return [roles.index(role) for role in ("user", "item", "time") if role in roles]


def _by_value(
    where: str, path: Path, rows: list[list[str]], width: int, first: str
) -> tuple[list[int], dict[int, str]]:
    """Places by the usual layouts, and why."""

    def values(place: int) -> list[float | None]:
        return [_number(row[place]) for row in rows if len(row) == width]

    if width == 2:
        return [0, 1], {}
    if width == 3 and not _is_rating(values(2)):
        return [0, 1, 2], {}
    if width == 3:
        raise _refuse(where, path, first, "without a header, the third of 3 columns could be a rating or a time", 3)
    if width == 4 and _is_rating(values(2)) and _is_time(values(3)):
        return [0, 1, 3], {2: " (looks like a rating)", 3: " (looks like one)"}
    raise _refuse(where, path, first, f"without a header, {width} columns could mean several things", width)


def _given(
    where: str, path: Path, header: list[str] | None, width: int, fields: Sequence[int | str]
) -> list[int]:  # fmt: skip
    places = []
    for field in fields:
        if isinstance(field, str):
            if header is None or field not in header:
                raise ValueError(f"{where}: {path}: fields must be names of the header, {header}, got {field!r}")
            places.append(header.index(field))
        elif isinstance(field, int) and not isinstance(field, bool) and 0 <= field < width:
            places.append(field)
        else:
            raise ValueError(f"{where}: {path}: fields must be in [0, {width}), got {field!r}")
    if len(set(places)) != len(places):
        raise ValueError(f"{where}: {path}: fields must be different columns, got {list(fields)}")
    return places


def _looks_like_table(lines: list[str]) -> bool:
    """Whether lists of items are really rows of user, item, rating and time, or user, item and time."""
    rows = [line.split() for line in lines]
    width = len(rows[0])
    if width not in (3, 4) or len(rows) < 2 or any(len(row) != width for row in rows):
        return False
    columns = [[_number(row[place]) for row in rows] for place in range(width)]
    return _is_time(columns[-1]) and not _is_time(columns[1]) and (width == 3 or _is_rating(columns[2]))


def find_plan(
    where: str,
    path: Path,
    *,
    layout: str | None,
    header: bool | None,
    fields: Sequence[int | str] | None,
    relabel: bool,
) -> Plan:
    """How a file of interactions is to be read; ValueError, with the option to use, where it could mean several things.

    Args:
        where: the reader, for messages.
        path: the file, plain or compressed.
        layout: "lists", "table", or None: by the name and the first lines.
        header: whether a table begins with names; None: where they are names that are known.
        fields: columns of user, item and perhaps time; None: by the header or the usual layouts.
        relabel: whether ids may be any text.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from samplex_cuda.data.columns import find_plan
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "ratings.csv")
        ...     _ = path.write_text("userId,movieId,rating,timestamp\\n1,31,2.5,1260759144\\n")
        ...     plan = find_plan("open", path, layout=None, header=None, fields=None, relabel=False)
        >>> plan.said
        'columns: column 0 "userId" = user, column 1 "movieId" = item, column 3 "timestamp" = time; not used: column 2 "rating"'
    """  # noqa: E501  (what it says is one line)
    lines = _sample(where, path)
    if not lines:
        raise ValueError(f"{where}: {path}: the file is empty")
    suffix, first = logical_suffix(path), lines[0]
    if layout == "lists" or (layout is None and suffix not in TABLES and "::" not in first):
        if layout is None and _looks_like_table(lines):
            raise ValueError(
                f"{where}: {path}: layout must be given: every line looks like user, item, (rating,) time, got "
                f"{first[:80]!r}. layout='table' reads them that way, layout='lists' as one user with items (samplex: "
                "--set data.options.layout=table)"
            )
        return Plan(False)
    separator = _separator(suffix, first)
    names = _cells(first, separator)
    width = len(names)
    if width < 2:
        raise ValueError(f"{where}: {path}:1: a line must be user{separator}item, got {first[:60]!r}")
    named = _by_name(where, path, names) if fields is None and header is not False else None
    texts = [_number(name) is None for name in names]
    known = any(_role(name) in ("user", "item") for name in names) and all(texts)
    has_header = known if header is None else header
    if header is None and not known and all(texts) and not relabel and fields is None:
        why_not = "the first line has names that are not known (header=True takes it for names)"
        raise _refuse(where, path, first, why_not, width)
    plan = Plan(True, separator, has_header, [], width)
    why: dict[int, str] = {}
    if fields is not None:
        plan.places = _given(where, path, names if has_header else None, width, fields)
    elif has_header and named is not None:
        plan.places = named
    else:
        rows = [_cells(line, separator) for line in lines[1 if has_header else 0 :]]
        plan.places, why = _by_value(where, path, rows, width, first)
    plan.said = _say(plan, names if has_header else None, why)
    return plan
