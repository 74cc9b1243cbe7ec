"""Plain text for language models: words between spaces, a mark at each line end."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from samplex_cuda._checks import check_int
from samplex_cuda.data.array_sets import Tokens
from samplex_cuda.data.cache import Conversion, converted
from samplex_cuda.data.lines import blocks
from samplex_cuda.data.sparse_text import adopt

__all__ = ["text_file"]

EOS = "<eos>"
UNKNOWN = "<unk>"
_STEP = 1 << 20  # tokens renamed at once


def _decode(conversion: Conversion, block: bytes, first: int) -> str:
    """The text of a block; lines that are not UTF-8 are bad lines."""
    try:
        return block.decode("utf-8")
    except UnicodeDecodeError:
        lines = []
        for number, line in enumerate(block.split(b"\n")[:-1], first):
            try:
                lines.append(line.decode("utf-8") + "\n")
            except UnicodeDecodeError as error:
                conversion.bad.add(number, f"byte {error.start + 1} is not UTF-8 ({error.reason})")
        return "".join(lines)


def _convert(
    conversion: Conversion,
    words: list[str] | None,
    lower: bool,
    min_count: int,
    max_size: int | None,
    eos: bool,
    extend: bool,
) -> None:
    where, path = conversion.where, conversion.source
    conversion.hashed = True
    tokens = conversion.writer("tokens", np.int32)
    ids: dict[str, int] = defaultdict()
    unknown = 0
    if words is not None:
        ids.update((word, number) for number, word in enumerate(words))
        unknown = ids[UNKNOWN]
    fixed = words is not None and not extend
    if not fixed:
        ids.default_factory = ids.__len__  # type: ignore[attr-defined]  # a new word gets the next id
    counts = np.zeros(0, dtype=np.int64)
    missing = 0
    for block, first in blocks(where, path, conversion.digests[0]):
        text = _decode(conversion, block, first)
        if lower:
            text = text.lower()
        found = text.replace("\n", f" {EOS} " if eos else " ").split()
        if not fixed:
            part = np.fromiter(map(ids.__getitem__, found), dtype=np.int32, count=len(found))
            more = np.bincount(part, minlength=len(ids))
            more[: len(counts)] += counts
            counts = more
        else:
            # dict.get keeps the vocabulary as it is, where [] would add every unknown word.
            part = np.fromiter((ids.get(word, -1) for word in found), dtype=np.int32, count=len(found))
            lost = part < 0
            missing += int(lost.sum())
            part[lost] = unknown
        tokens.append(part)
    if not tokens.length:
        raise ValueError(f"{where}: {path}: the file has no words")
    if words is None:
        words, missing = _by_frequency(conversion, list(ids), counts, min_count, max_size)
    elif extend:
        words, missing = _extended(conversion, list(ids), len(words), unknown, counts, min_count, max_size)
    conversion.texts["vocabulary"] = words
    conversion.facts |= {"tokens": tokens.length, "unknown": missing}


def _by_frequency(
    conversion: Conversion, words: list[str], counts: np.ndarray, min_count: int, max_size: int | None
) -> tuple[list[str], int]:
    """Renames the tokens so that ids are frequency ranks; the vocabulary, and how many tokens are outside of it."""
    order = np.argsort(-counts, kind="stable")  # equal ones as they came
    keep = order[counts[order] >= min_count]
    special = {word: place for place, word in enumerate(words) if word in (EOS, UNKNOWN)}
    if max_size is not None and len(keep) > max_size:
        marks = [place for place in keep if words[place] in special]
        room = max_size - (0 if UNKNOWN in special else 1)  # <unk> will be there
        rest = [place for place in keep if words[place] not in special][: max(0, room - len(marks))]
        keep = np.array(sorted([*marks, *rest], key=lambda place: (-counts[place], place)), dtype=np.int64)
    kept = set(keep.tolist())
    forced = [place for place in special.values() if place not in kept]
    keep = np.concatenate([keep, np.array(forced, dtype=np.int64)]).astype(np.int64)
    cut = int(counts.sum() - counts[keep].sum())
    # <unk> gets what is cut, and its rank by that.
    total = {int(place): int(counts[place]) for place in keep}
    unknown = special.get(UNKNOWN, len(words))
    total[unknown] = total.get(unknown, 0) + cut
    ranked = sorted(total, key=lambda place: (-total[place], place))
    vocabulary = [words[place] if place < len(words) else UNKNOWN for place in ranked]
    rename = np.full(len(words), ranked.index(unknown), dtype=np.int32)
    inside = [(place, rank) for rank, place in enumerate(ranked) if place < len(words)]
    rename[[place for place, _ in inside]] = [rank for _, rank in inside]
    _renamed(conversion, rename)
    return vocabulary, cut


def _extended(
    conversion: Conversion,
    words: list[str],
    held: int,
    unknown: int,
    counts: np.ndarray,
    min_count: int,
    max_size: int | None,
) -> tuple[list[str], int]:
    """Renames the tokens so that words from number `held` on are in the order of their frequency, or cut."""
    fresh = counts[held:]
    order = np.argsort(-fresh, kind="stable")
    keep = order[fresh[order] >= min_count]
    if max_size is not None:
        keep = keep[: max(0, max_size - held)]
    rename = np.full(len(words), unknown, dtype=np.int32)
    rename[:held] = np.arange(held)
    rename[held + keep] = held + np.arange(len(keep))
    _renamed(conversion, rename)
    return [*words[:held], *(words[held + place] for place in keep)], int(fresh.sum() - fresh[keep].sum())


def _renamed(conversion: Conversion, rename: np.ndarray) -> None:
    tokens = conversion.finished("tokens")
    for begin in range(0, len(tokens), _STEP):
        tokens[begin : begin + _STEP] = rename[tokens[begin : begin + _STEP]]
    if isinstance(tokens, np.memmap):
        tokens.flush()


def text_file(
    path: Path | str,
    *,
    vocabulary: Tokens | Sequence[str] | Path | str | None = None,
    extend: bool = False,
    window: int = 35,
    columns: int = 20,
    lower: bool = False,
    min_count: int = 1,
    max_size: int | None = None,
    eos: bool = True,
    skip_bad: int = 0,
    cache_dir: Path | str | None = None,
    verify: str = "cache",
) -> Tokens:
    """A text as a stream of words, split at white space, with `<eos>` at the end of each line (empty ones too).

    The vocabulary of a training file has its words by decreasing frequency, as `samplers.LogUniform` assumes,
    equal ones in the order they come. `<unk>` is one of them: words outside of the vocabulary, cut by `min_count` or
    `max_size` or unknown to the vocabulary that is given, become `<unk>` and count for its rank; `notes` says how many.

    Args:
        path: UTF-8 text, plain or compressed.
        vocabulary: for validation and test files, that of the training file: its data set, a list of words, or a file
            with one word per line. It must have `<unk>`.
        extend: for a training file that has grown: words outside of `vocabulary` get the next ids, by falling
            frequency, within `min_count` and `max_size`; its words keep theirs.
        window: T of `Tokens`.
        columns: of `Tokens`.
        lower: write all words in lower case.
        min_count: words that are rarer become `<unk>`.
        max_size: only so many words, `<unk>` and `<eos>` among them.
        eos: whether lines end with `<eos>`.
        skip_bad: how many lines that are not UTF-8 may be left out.
        cache_dir: as in `xc_file`.
        verify: as in `xc_file`.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from samplex_cuda import data
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "train.tokens"
        ...     _ = path.write_text("a b a\\nc a\\n")
        ...     found = data.text_file(path, window=2, columns=1)
        >>> found.vocabulary, found.tokens.tolist()
        (['a', '<eos>', 'b', 'c', '<unk>'], [0, 2, 0, 1, 3, 0, 1])
    """
    where = "text_file"
    for name, value, least in (("min_count", min_count, 1), ("max_size", 2 if max_size is None else max_size, 2)):
        check_int(where, name, value, least)
    words: list[str] | None = None
    if isinstance(vocabulary, Tokens):
        words = vocabulary.vocabulary
        if words is None:
            raise ValueError(f"{where}: vocabulary must be a data set that has words, got {vocabulary!r}")
    elif isinstance(vocabulary, Path | str):
        words = Path(vocabulary).read_text(encoding="utf-8").split()
    elif vocabulary is not None:
        words = list(vocabulary)
    options = {"lower": lower, "min_count": min_count, "max_size": max_size, "eos": eos, "vocabulary": ""}
    if words is not None:
        if UNKNOWN not in words:
            raise ValueError(f"{where}: vocabulary must have {UNKNOWN}, got {len(words)} words without it")
        if len(set(words)) != len(words):
            raise ValueError(f"{where}: vocabulary must have no duplicates, got {len(words) - len(set(words))}")
        options["vocabulary"] = hashlib.sha256("\n".join(words).encode()).hexdigest()
        if extend:
            options["extend"] = True
        else:
            options["min_count"], options["max_size"] = 1, None  # the words are given
    elif extend:
        raise ValueError(f"{where}: extend must be False without a vocabulary to extend, got True")
    elif min_count > 1 or max_size is not None:
        options["unknown"] = "ranked"  # caches of before had <unk> last
    found = converted(
        where,
        [Path(path)],
        "text",
        options,
        lambda c: _convert(c, words, lower, min_count, max_size, eos, extend),
        skip_bad=skip_bad,
        cache_dir=cache_dir,
        verify=verify,
    )
    known = found.words("vocabulary")
    if found.facts["unknown"]:
        share = found.facts["unknown"] / found.facts["tokens"]
        count = f"{found.facts['unknown']} of {found.facts['tokens']} words ({share:.2%})"
        found.notes.append(f"{where}: {count} of {path} are outside of the vocabulary and count as {UNKNOWN}")
    return adopt(Tokens(found.arrays["tokens"], len(known), window, columns, vocabulary=known), found)
