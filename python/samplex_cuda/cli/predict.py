"""`samplex evaluate` and `samplex predict`."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from torch import Tensor

from samplex_cuda.cli.common import OK, Output, UserError, beside, check_device, check_writable, checked, read_config
from samplex_cuda.cli.inputs import Inputs, _pyarrow, open_inputs, open_labelled
from samplex_cuda.heads import SampledClassifier
from samplex_cuda.prediction import exact_lse
from samplex_cuda.training import evaluate as measure
from samplex_cuda.training import load_model, open_data

__all__ = ["FORMATS", "evaluate", "predict", "top"]

FORMATS = (".jsonl", ".npy", ".npz", ".parquet")
_ROWS = 1 << 14  # rows that are ranked at a time are at most so many


def _load(
    out: Output, run_dir: Path, which: str, device: str, trust_model: str | None
) -> tuple[Any, SampledClassifier, Any, dict[str, Any]]:
    read_config(run_dir)
    check_device(device)
    with out.busy(f"loading {run_dir} ({which})"):
        return load_model(run_dir, which, device=device, trust_model=trust_model)


class _Bar:
    """Progress over batches, on a terminal only."""

    def __init__(self, out: Output, text: str) -> None:
        self._bar = None
        if out.live:
            columns = (TextColumn(text), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=out.console, transient=True)
            self._task = self._bar.add_task("", total=None)

    def __enter__(self) -> _Bar:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *what: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, done: int, count: int) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=count)


def evaluate(
    out: Output,
    run_dir: Path,
    *,
    path: str | None,
    form: str | None,
    part: str,
    metrics: str | None,
    which: str,
    rows: int,
    batch_size: int | None,
    exclude_history: bool | None,
    device: str,
    propensity: tuple[float | None, float | None] = (None, None),
    trust_model: str | None = None,
) -> tuple[dict[str, Any], int]:
    """Exact metrics of a trained model; returns the JSON object and the exit code.

    Example:
        >>> from samplex_cuda.cli.predict import evaluate
        >>> evaluate(out, Path("runs/mine"), path=None, form=None, part="valid", metrics="nll,recall@20",
        ...          which="best", rows=0, batch_size=None, exclude_history=None, device="cpu")  # doctest: +SKIP
    """
    with checked():
        encoder, head, config, meta = _load(out, run_dir, which, device, trust_model)
        with out.busy("reading the data"):
            dataset = open_labelled(config, meta, path, form, part)
        if dataset.columns_said:
            out.say(dataset.columns_said)
        for note in dataset.notes:
            out.warn(note)
    names = [n for n in re.split(r"[,\s]+", metrics) if n] if metrics else config.training.metrics
    propensities = None
    about_psp: dict[str, float] = {}
    if any(name.startswith("psp") for name in names):
        from samplex_cuda.metrics import propensities as of_counts

        a = config.training.propensity_a if propensity[0] is None else propensity[0]
        b = config.training.propensity_b if propensity[1] is None else propensity[1]
        if not (math.isfinite(a) and math.isfinite(b) and b > 0):
            raise UserError(f"--propensity-a must be finite and --propensity-b above 0, got {a} and {b}")
        train, _ = open_data(config)
        propensities = of_counts(train.class_counts(), len(train), a, b)
        about_psp = {"propensity_a": a, "propensity_b": b}
    size = batch_size or config.training.eval_batch_size or config.training.batch_size
    size = int(getattr(dataset, "columns", size)) if dataset.ordered else size  # text has its own
    exclude = config.training.exclude_history if exclude_history is None else exclude_history
    with _Bar(out, "evaluating") as bar:
        found = measure(
            encoder,
            head,
            dataset,
            batch_size=size,
            metrics=names,
            rows=rows,
            exclude_history=exclude and dataset.kind == "interactions",
            propensities=propensities,
            on_batch=bar,
        )
    count = len(dataset) if not rows else min(len(dataset), math.ceil(rows / size) * size)  # whole batches
    about = path or f"{part} part of {config.data.path}"
    step = meta["progress"]["step"]
    title = f"{run_dir} at step {step:,} on {about} ({count:,} examples)"
    out.say(title)
    if about_psp:
        out.say(f"psp: propensities with A = {about_psp['propensity_a']:g}, B = {about_psp['propensity_b']:g}")
    bad = [name for name, value in found.items() if not math.isfinite(value)]
    out.table([(name, f"{value:.6g}") for name, value in found.items()])
    payload = {"run_dir": str(run_dir), "step": step, "which": which, "data": about, "examples": count}
    if bad:
        raise UserError(f"evaluate: {', '.join(bad)} must be finite, got {found[bad[0]]}: {about} or the model has NaN")
    return {**payload, **about_psp, "metrics": found}, OK


@torch.no_grad()
def top(
    head: SampledClassifier, h: Tensor, features: Tensor | None, k: int, known: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """The k most probable classes of each row and their probabilities under the softmax over all classes.

    Args:
        head: the classifier.
        h: [B, d].
        features: [B, f] or None.
        k: how many.
        known: CSR (offsets int64 [B + 1], ids) of classes that are not answers.

    Returns:
        (ids int64 [B, k], probabilities float32 [B, k]); -1 and 0 where fewer classes are left.

    Example:
        >>> import torch, samplex_cuda as sx
        >>> from samplex_cuda.cli.predict import top
        >>> head = sx.SampledClassifier(4, 5, sx.samplers.Uniform(5), num_samples=2)
        >>> ids, probabilities = top(head, torch.randn(3, 4), None, 5)
        >>> torch.allclose(probabilities.sum(1), torch.ones(3))
        True
    """
    h = h.to(head.weight.dtype)
    lse = exact_lse(
        head._query(h),
        head.weight,
        head._live_bias(),
        scale=head.scale,
        absolute=head.loss.absolute,
        normalize=head.normalize,
        prior=head.prior(h, features),
    ).unsqueeze(1)
    if known is None:
        logits, ids = head.topk(h, k, features=features)
    else:
        from samplex_cuda.metrics import _topk_without

        ids = _topk_without(head, h, features, k, *known)
        logits, again = head.topk(h, k, features=features, candidates=ids)
        ids = again
    probabilities = (logits.to(lse.dtype) - lse).exp().float()
    return ids.cpu(), torch.where(ids < 0, 0.0, probabilities).cpu()


def _answers(
    encoder: Any, head: SampledClassifier, inputs: Inputs, k: int, size: int, exclude: bool, bar: _Bar
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(row numbers, ids, probabilities) of each batch."""
    done = 0
    for rows, batch in inputs.batches(size):
        encoder.carry({})
        h, features = encoder.encode({name: t.to(head.weight.device) for name, t in batch.items()})
        if "tokens" in batch:  # what follows the last word
            h, features = h[:, -1], None if features is None else features[:, -1]
        known = None
        if exclude and inputs.known is not None and inputs.users is not None:
            ends, items = inputs.known
            users = inputs.users[rows.numpy()]
            parts = [np.unique(items[ends[user] : ends[user + 1]]) for user in users]
            offsets = torch.tensor([0, *np.cumsum([len(part) for part in parts])])
            known = (offsets, torch.from_numpy(np.concatenate(parts).astype(np.int64)))
        ids, probabilities = top(head, h, features, k, known)
        yield rows.numpy(), ids.numpy(), probabilities.numpy()
        done += len(rows)
        bar(done, inputs.count)


def _finite(
    path: str, answers: Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """The answers as they come; UserError at the first row that has none, whose ids would be arbitrary."""
    for rows, ids, probabilities in answers:
        bad = ~np.isfinite(probabilities).all(1)
        if bad.any():
            raise UserError(
                f"{path}: row {rows[bad][0]} must have finite values, got NaN or infinity in the row or in its "
                f"prediction ({int(bad.sum())} such rows in this batch); nothing was written. Remove these rows"
            )
        yield rows, ids, probabilities


def _in_order(
    answers: Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]], count: int, k: int
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Answers of a text come by length of the line: here they are put back in the order of the file."""
    ids, probabilities = np.zeros((count, k), np.int64), np.zeros((count, k), np.float32)
    for rows, some, p in answers:
        ids[rows], probabilities[rows] = some, p
    for begin in range(0, count, _ROWS):
        end = min(begin + _ROWS, count)
        yield np.arange(begin, end), ids[begin:end], probabilities[begin:end]


def _write(path: Path, inputs: Inputs, answers: Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]], k: int) -> None:
    suffix = path.name[path.name.rindex(".") :]
    if suffix == ".jsonl":
        with path.open("w", encoding="utf-8") as file:
            for rows, ids, probabilities in answers:
                for row, some, p in zip(rows.tolist(), ids.tolist(), probabilities.tolist(), strict=True):
                    record: dict[str, Any] = {"row": row}
                    if inputs.users is not None:
                        record["user"] = int(inputs.users[row])
                    record |= {"ids": some, "probabilities": [round(v, 7) for v in p]}
                    if inputs.words is not None:
                        record["words"] = [inputs.words[i] for i in some]
                    file.write(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n")
    elif suffix == ".npy":
        kind = np.dtype([("ids", np.int64, (k,)), ("probabilities", np.float32, (k,))])
        table = np.lib.format.open_memmap(path, mode="w+", dtype=kind, shape=(inputs.count,))
        for rows, ids, probabilities in answers:
            table["ids"][rows], table["probabilities"][rows] = ids, probabilities
        table.flush()
    elif suffix == ".npz":
        parts = list(answers)
        arrays = {
            "ids": np.concatenate([ids for _, ids, _ in parts]) if parts else np.zeros((0, k), np.int64),
            "probabilities": np.concatenate([p for *_, p in parts]) if parts else np.zeros((0, k), np.float32),
        }
        if inputs.users is not None:
            arrays["users"] = np.asarray(inputs.users)
        np.savez(path, **arrays)  # type: ignore[arg-type]
    else:
        parquet = _pyarrow()
        import pyarrow as pa

        fields = [("row", pa.int64()), ("ids", pa.list_(pa.int64())), ("probabilities", pa.list_(pa.float32()))]
        if inputs.users is not None:
            fields.insert(1, ("user", pa.int64()))
        schema = pa.schema(fields)
        with parquet.ParquetWriter(path, schema) as writer:
            for rows, ids, probabilities in answers:
                columns: dict[str, Any] = {"row": rows, "ids": list(ids), "probabilities": list(probabilities)}
                if inputs.users is not None:
                    columns["user"] = inputs.users[rows]
                writer.write_table(pa.table(columns, schema=schema))


def predict(
    out: Output,
    run_dir: Path,
    path: str,
    *,
    form: str | None,
    target: Path,
    k: int,
    which: str,
    batch_size: int,
    exclude_history: bool | None,
    device: str,
    trust_model: str | None = None,
) -> tuple[dict[str, Any], int]:
    """The k most probable classes of each row of a file; returns the JSON object and the exit code.

    Example:
        >>> from samplex_cuda.cli.predict import predict
        >>> predict(out, Path("runs/mine"), "rows.npy", form=None, target=Path("top.jsonl"), k=5, which="best",
        ...         batch_size=256, exclude_history=False, device="cpu")  # doctest: +SKIP
    """
    if target.suffix not in FORMATS:
        raise UserError(f"{target}: --out must end with {', '.join(FORMATS)}, got {target.suffix or 'nothing'}")
    check_writable(target)
    if target.suffix == ".parquet":
        _pyarrow()
    with checked():
        encoder, head, config, meta = _load(out, run_dir, which, device, trust_model)
        if k > head.num_classes:
            raise UserError(f"-k must be at most the {head.num_classes} classes of the model, got {k}")
        with out.busy(f"reading {path}"):
            inputs = open_inputs(config, meta, path, form)
        if inputs.columns_said:
            out.say(inputs.columns_said)
        for note in inputs.notes:
            out.warn(note)
        if exclude_history and inputs.known is None:
            raise UserError("--exclude-history needs a model of interactions")
        exclude = config.training.exclude_history if exclude_history is None else exclude_history
    with _Bar(out, "predicting") as bar, torch.no_grad():
        answers = _finite(path, _answers(encoder, head, inputs, k, batch_size, exclude, bar))
        if inputs.words is not None:
            answers = _in_order(answers, inputs.count, k)
        beside(target, lambda new: _write(new, inputs, answers, k))
    without = " (items of INPUT are left out)" if exclude and inputs.known is not None else ""
    out.say(f"{inputs.count:,} rows, {k} classes each{without}: {target}")
    payload: dict[str, Any] = {"run_dir": str(run_dir), "input": path, "out": str(target)}
    if inputs.known is not None:
        payload["exclude_history"] = exclude
    return {**payload, "rows": inputs.count, "k": k}, OK
