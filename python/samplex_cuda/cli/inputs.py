"""Data for commands that use a trained model: files of the kind that it was trained on, with or without labels."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from samplex_cuda import data
from samplex_cuda._checks import describe
from samplex_cuda.cli.common import UserError
from samplex_cuda.data import Dataset
from samplex_cuda.data.array_files import _load as load_npy
from samplex_cuda.data.array_files import matrix_shape, members, read_member
from samplex_cuda.data.lines import blocks
from samplex_cuda.data.opening import guess_format
from samplex_cuda.training import Config, open_data
from samplex_cuda.training.state import Described

__all__ = ["Inputs", "open_inputs", "open_labelled"]

_LABELS = ("label", "labels", "y", "target")


def _is_builtin(path: str, form: str | None) -> bool:
    return form == "builtin" or path == "builtin" or path.startswith("builtin:")


def open_labelled(config: Config, meta: dict[str, Any], path: str | None, form: str | None, part: str) -> Dataset:
    """Data to measure on: a file read as the training file was, or a part of the data of the run.

    Args:
        config: of the run.
        meta: of its checkpoint.
        path: the file; None: the data of the run.
        form: its format; None: as in the run, or by the name.
        part: "valid" or "train", where there is no path.

    Example:
        >>> from samplex_cuda.cli.inputs import open_labelled
        >>> from samplex_cuda.training import Config, config
        >>> run = config.override(Config(), ["data.path=builtin:classes=50,dim=4,examples=200"])
        >>> len(open_labelled(run, {}, None, None, "valid"))
        20
    """
    if path is None:
        train, valid = open_data(config)
        if part == "train":
            return train
        if valid is None:
            raise UserError("the run has no validation data; give --data")
        return valid
    about = Described(meta["data"])
    if about.kind in ("dense", "sparse") or _is_builtin(path, form):
        options = {} if _is_builtin(path, form) else config.data.options
        form = form or _same_format(config, path) or None
        found = data.open_like(path, about, format=form, default_columns=config.training.batch_size, **options)
    else:  # the words of a text, the histories of users: those of the training data
        config = copy.deepcopy(config)
        config.data.valid = path
        _, valid = open_data(config)
        assert valid is not None
        found = valid
    _check_fits(found, about, path)
    return found


def _same_format(config: Config, path: str) -> str:
    """The format of the run where it was given; a path of the built-in data says nothing about files."""
    return "" if _is_builtin(config.data.path, config.data.format) else config.data.format


def _check_fits(found: Dataset, about: Dataset, path: str) -> None:
    if found.kind != about.kind:
        raise UserError(f"{path}: the model was trained on {about.kind} data, got {found.kind} data")
    if found.num_features > about.num_features or (found.kind == "dense" and found.num_features != about.num_features):
        raise UserError(
            f"{path}: rows must have {about.num_features} features as in training, got {found.num_features}"
        )


class Inputs:
    """Rows without targets.

    Attributes:
        count: how many.
        batches: of a size -> batches in order: (row numbers int64 [B], batch, or list of batches of which each gives
            some of the rows).
        users: number of the user of each row, where there are users.
        words: the word of each class, where there are words.
        known: CSR (offsets, items) of the items that each row knows already, for interactions.

    Example:
        >>> import torch
        >>> from samplex_cuda.cli.inputs import Inputs
        >>> rows = Inputs(3, lambda size: iter([(torch.arange(3), {"x": torch.zeros(3, 2)})]))
        >>> rows.users is None
        True
    """

    def __init__(self, count: int, batches: Callable[[int], Iterator[tuple[Tensor, dict[str, Tensor]]]]) -> None:
        self.count, self.batches = count, batches
        self.users: np.ndarray | None = None
        self.words: list[str] | None = None
        self.known: tuple[np.ndarray, np.ndarray] | None = None
        self.notes: list[str] = []
        self.columns_said = ""


def _slices(count: int, make: Callable[[int, int], dict[str, Tensor]]) -> Inputs:
    def batches(size: int) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        for begin in range(0, count, size):
            end = min(begin + size, count)
            yield torch.arange(begin, end), make(begin, end)

    return Inputs(count, batches)


def open_inputs(config: Config, meta: dict[str, Any], path: str, form: str | None) -> Inputs:
    """The rows of a file; labels that it may have are not used.

    Args:
        config: of the run.
        meta: of its checkpoint.
        path: npy (x alone), npz (x, or a sparse matrix), parquet, any format of `samplex_cuda.data`, "builtin:..."; for
            a language model text, of which each line is a beginning; for interactions a history for each user.
        form: the format; None: as in the run, or by the name.

    Example:
        >>> import tempfile, numpy as np
        >>> from pathlib import Path
        >>> from samplex_cuda.cli.inputs import open_inputs
        >>> from samplex_cuda.training import Config
        >>> about = {"length": 9, "kind": "dense", "num_classes": 5, "num_features": 2, "ordered": False,
        ...          "multi_label": False}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     np.save(Path(folder, "rows.npy"), np.ones((7, 2)))
        ...     open_inputs(Config(), {"data": about}, f"{folder}/rows.npy", None).count
        7
    """
    about: Any = Described(meta["data"])
    file = Path(path)
    if about.kind == "text":
        return _lines(config, file)
    if about.kind == "interactions":
        return _histories(config, about, path, form)
    if not _is_builtin(path, form):
        if not file.exists():
            raise UserError(f"{path}: there is no such file")
        if form is None and file.suffix == ".npy":
            return _dense(path, load_npy("predict", file), about)
        if form is None and file.suffix == ".npz":
            return _npz(path, config, about)
        if form is None and file.suffix == ".parquet" and not (set(_LABELS) & set(_columns(file))):
            return _parquet(path, config, about)
        options = {k: v for k, v in config.data.options.items() if k not in ("labels", "num_classes", "y")}
        form = form or _same_format(config, path) or guess_format(file)
        if form == "svmlight":
            options["num_features"] = about.num_features
            if options.get("index_base") is None:
                options["index_base"] = getattr(about, "index_base", None)
        found = data.open(path, format=form, **options)
    else:
        found = data.open(path, format=form)
    _check_fits(found, about, path)
    rows = _slices(len(found), lambda begin, end: found.batch(torch.arange(begin, end)))
    rows.notes = found.notes
    return rows


def _dense(path: str, x: np.ndarray, about: Dataset) -> Inputs:
    if about.kind != "dense":
        raise UserError(f"{path}: the model was trained on {about.kind} data, got an array of dense rows")
    if x.ndim != 2 or x.dtype.kind not in "fiub" or x.shape[1] != about.num_features:
        raise UserError(f"{path}: x must be [N, {about.num_features}] numbers, got {describe(x)}")
    return _slices(
        len(x), lambda begin, end: {"x": torch.from_numpy(np.array(x[begin:end], dtype=np.float32, order="C"))}
    )


def _sparse(path: str, indptr: np.ndarray, indices: np.ndarray, values: np.ndarray | None, about: Dataset) -> Inputs:
    if about.kind != "sparse":
        raise UserError(f"{path}: the model was trained on {about.kind} data, got sparse rows")
    count = len(indptr) - 1
    found = data.Sparse(indptr, indices, values, None, np.zeros(count, np.int64), about.num_features, 1)
    return _slices(count, lambda begin, end: found.batch(torch.arange(begin, end)))


def _npz(path: str, config: Config, about: Dataset) -> Inputs:
    file = Path(path)
    have = members("predict", file)
    if "indptr" in have:
        width = matrix_shape("predict", file)[1] if "shape" in have else about.num_features
        if width > about.num_features:
            raise UserError(f"{path}: the matrix must have {about.num_features} columns as in training, got {width}")
        indptr, indices, values = (read_member("predict", file, name) for name in ("indptr", "indices", "data"))
        return _sparse(path, indptr, indices, values, about)
    name = config.data.options.get("x", "x")
    if name not in have:
        raise UserError(f"{path}: must have an array {name!r}, got {', '.join(have)}")
    return _dense(path, read_member("predict", file, name), about)


def _columns(file: Path) -> list[str]:
    return list(_pyarrow().read_schema(file).names)


def _pyarrow() -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise UserError("parquet needs pyarrow: pip install 'samplex-cuda[parquet]'") from None
    return pyarrow.parquet


def _parquet(path: str, config: Config, about: Dataset) -> Inputs:
    """A table without labels."""
    table, options = _pyarrow().read_table(path), config.data.options

    def flat(name: str) -> tuple[np.ndarray, np.ndarray]:
        lists = table.column(name).combine_chunks()
        return lists.flatten().to_numpy(zero_copy_only=False), lists.value_lengths().to_numpy(zero_copy_only=False)

    def need(names: list[str]) -> None:
        for name in names:
            if name not in table.column_names:
                raise UserError(f"{path}: must have the column {name!r}, got {', '.join(table.column_names)}")

    if about.kind == "sparse":
        ids, values = options.get("indices") or "indices", options.get("values") or "values"
        need([ids])
        indices, lengths = flat(ids)
        numbers = flat(values)[0] if values in table.column_names else None
        return _sparse(path, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64), indices, numbers, about)
    asked = options.get("x")
    names = [asked] if isinstance(asked, str) else list(asked or (["x"] if "x" in table.column_names else []))
    names = names or list(table.column_names)
    need(names)
    if len(names) == 1 and hasattr(table.column(names[0]).type, "value_type"):
        values_, lengths = flat(names[0])
        if (lengths != about.num_features).any():
            raise UserError(f"{path}: rows of {names[0]!r} must have {about.num_features} numbers as in training")
        return _dense(path, values_.reshape(-1, about.num_features), about)
    return _dense(path, np.stack([table.column(name).to_numpy() for name in names], 1), about)


def _lines(config: Config, file: Path) -> Inputs:
    """Beginnings of a text, one a line; the words are those of the training file."""
    if not file.is_file():
        raise UserError(f"{file}: there is no such file")
    train, _ = open_data(config)
    vocabulary = train.vocabulary  # type: ignore[attr-defined]
    if vocabulary is None:
        raise UserError(f"{config.data.path}: has no words, so {file} cannot be read")
    number = {word: i for i, word in enumerate(vocabulary)}
    unknown, lower = number.get("<unk>", 0), bool(config.data.options.get("lower", False))
    begin = [number["<eos>"]] if "<eos>" in number else []
    rows = []
    missing = 0
    for block, first in blocks("predict", file, hashlib.sha256()):  # lines as in training, compressed ones too
        for line_number, line in enumerate(block.split(b"\n")[:-1], first):
            try:
                text = line.decode("utf-8")
            except UnicodeDecodeError as error:
                reason = f"byte {error.start + 1} is not UTF-8 ({error.reason})"
                raise UserError(f"{file}:{line_number}: {reason}") from None
            words = (text.lower() if lower else text).split()
            missing += sum(word not in number for word in words)
            rows.append((begin + [number.get(word, unknown) for word in words]) or [unknown])

    def batches(size: int) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        # Rows of one length together: a recurrent layer takes them as a rectangle.
        lengths: dict[int, list[int]] = {}
        for index, row in enumerate(rows):
            lengths.setdefault(len(row), []).append(index)
        for length in sorted(lengths):
            for first in range(0, len(lengths[length]), size):
                chosen = lengths[length][first : first + size]
                yield torch.tensor(chosen), {"tokens": torch.tensor([rows[i] for i in chosen])}

    found = Inputs(len(rows), batches)
    found.words = list(vocabulary)
    if missing:
        found.notes = [f"{file}: {missing} words are outside of the vocabulary and count as <unk>"]
    return found


def _histories(config: Config, about: Any, path: str, form: str | None) -> Inputs:
    """A row for each user who has items; the model sees the last ones."""
    if not Path(path).exists():
        raise UserError(f"{path}: there is no such file")
    form = form or _same_format(config, path) or guess_format(Path(path))
    options = {k: v for k, v in config.data.options.items() if k not in ("known", "num_items", "num_classes")}
    found: Any = data.open(path, format=form, **options)
    if found.kind != "interactions":
        raise UserError(f"{path}: the model was trained on interactions, got {found.kind} data")
    if found.num_classes > about.num_classes:
        raise UserError(
            f"{path}: items must be in [0, {about.num_classes}) as in training, got {found.num_classes - 1}"
        )
    ends, starts = np.asarray(found.indptr[1:], np.int64), np.asarray(found.indptr[:-1], np.int64)
    users = np.flatnonzero(ends > starts)
    width = int(about.history or 50)

    def make(begin: int, end: int) -> dict[str, Tensor]:
        chosen = users[begin:end]
        history = torch.full((len(chosen), width), -1, dtype=torch.int64)
        for row, user in enumerate(chosen):
            items = np.asarray(found.items[max(starts[user], ends[user] - width) : ends[user]], np.int64)
            history[row, width - len(items) :] = torch.from_numpy(items)
        return {"history": history, "user": torch.from_numpy(chosen.astype(np.int64))}

    rows = _slices(len(users), make)
    rows.users, rows.known, rows.notes = users, (np.asarray(found.indptr), found.items), found.notes
    rows.columns_said = found.columns_said
    return rows
