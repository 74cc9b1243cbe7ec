"""Exact NLL and leak of every sampler in the trainer's default configuration: which are safe, and how close they come.

    python bench/study_leak.py                       # built-in data, C = 20,000, one epoch
    python bench/study_leak.py --classes 1000000
    python bench/study_leak.py --text train.txt --valid valid.txt    # text, an LSTM
    python bench/study_leak.py --wikitext            # the same of WikiText-2 in ../shared/data, its first lines

Every run has m = 64 draws per row, the same steps and one thread. "leak" is that of held-out rows at the end, the share
of the model's softmax that the draws cannot push down (sx.diagnostics.leak). Each run is stored when it ends, by task,
in bench/results/study_leak.json; runs that are there for the same sizes are not made again (--again: they are).
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from _harness import RESULTS, commit, machine
from _study import SHARED

import samplex_cuda as sx
from samplex_cuda.training import Config, Trainer, config
from samplex_cuda.training.watch import some_rows

LEAST, TEXT = 0.1, 5000  # share above Unigram's NLL that is worth a mark; words of the text that are kept
SAMPLERS = {
    "uniform": ["sampler.name=uniform"],
    "log_uniform": ["sampler.name=log_uniform"],
    "unigram": ["sampler.name=unigram"],
    "bigram": ["sampler.name=bigram"],
    "tree alone": ["sampler.name=tree", "sampler.base=none"],
    ".9 tree + .1 uniform": ["sampler.name=tree", "sampler.base=uniform", "sampler.base_weight=0.1"],
    "tree (default)": ["sampler.name=tree"],
    "midx": ["sampler.name=midx"],
    "rff (default)": ["sampler.name=rff"],
    "quadratic": ["sampler.name=quadratic"],
    "softmax": ["sampler.name=softmax"],
}
ONLY_TEXT = ("bigram",)


def wikitext(folder: str, lines: int) -> tuple[str, str]:
    """Paths of plain text: the first lines of the training part, and a tenth as many of the validation part."""
    found = []
    for part, count in (("train", lines), ("valid", lines // 10)):
        with lzma.open(SHARED / "wikitext2" / f"wiki.{part}.tokens.xz", "rt") as source:
            text = [line for line, _ in zip(source, range(count), strict=False)]
        path = Path(folder) / f"{part}.txt"
        path.write_text("".join(text))
        found.append(str(path))
    return found[0], found[1]


def data_of(args: argparse.Namespace) -> tuple[Any, Any, list[str]]:
    """Training data, held-out data, and the settings of the model."""
    if args.text:
        train = sx.data.open(args.text, format="text", max_size=args.vocabulary)
        valid = sx.data.open(args.valid, format="text", vocabulary=train)
        return train, valid, ["model.name=lstm", "model.dim=64", "optimizer.encoder_lr=0.01"]
    spec = f"builtin:classes={args.classes},examples={args.examples}"
    return sx.data.open(spec), sx.data.open(f"{spec},split=valid"), ["model.name=linear"]


def run(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """One sampler: exact NLL on held-out rows before and after, and the leak."""
    train, valid, model = data_of(args)
    settings = [*model, *SAMPLERS[name], "head.shared=false", "head.num_samples=64", f"training.epochs={args.epochs}",
                "training.plot=false", 'training.metrics=["nll"]', "training.threads=1",
                f"training.eval_rows={args.eval_rows}"]  # fmt: skip
    begin = time.process_time()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        chosen = config.override(Config(), settings)
        trainer = Trainer(chosen, train, valid, Path(folder) / "run", on_event=lambda event: None)
        start = trainer.evaluate()["nll"]
        trainer.fit()
        end = trainer.evaluate()["nll"]
        head = trainer.head
        h, y, seen, context = (
            None if t is None else t[: args.rows] for t in some_rows(trainer.encoder, head, valid, args.rows)
        )
        return {
            "start": round(start, 4),
            "nll": round(end, 4),
            "leak": round(float(head.leak(h, y, features=seen, context=context).mean()), 4),
            "base_share": round(float(getattr(head.sampler, "base_share", 0.0)), 4),
            "seconds": round(time.process_time() - begin, 1),
        }


def table(task: dict[str, Any]) -> None:
    """Prints the runs of a task."""
    rows, most = task["rows"], task["log_c"]
    best = rows.get("unigram", {}).get("nll", math.nan)
    print(f"{task['about']}: log C = {most:.3f}")
    print(f"{'sampler':24}{'start':>8}{'exact NLL':>10}{'leak':>8}{'/ unigram':>11}")
    for name, row in rows.items():
        bad = row["nll"] >= min(most, row["start"]) or row["nll"] > (1 + LEAST) * best
        mark = "  <-" if bad else ""
        print(f"{name:24}{row['start']:8.3f}{row['nll']:10.3f}{row['leak']:8.3f}{row['nll'] / best:11.3f}{mark}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--classes", type=int, default=20_000)
    parser.add_argument("--examples", type=int, default=200_000)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--eval-rows", type=int, default=4096)
    parser.add_argument("--text")
    parser.add_argument("--valid")
    parser.add_argument("--wikitext", action="store_true")
    parser.add_argument("--lines", type=int, default=8000, help="of WikiText-2")
    parser.add_argument("--vocabulary", type=int, default=TEXT, help="words of the text that are kept")
    parser.add_argument("--only", help="part of a sampler's name")
    parser.add_argument("--again", action="store_true", help="make runs that are stored again")
    parser.add_argument("--output", type=Path, default=RESULTS / "study_leak.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        if args.wikitext:
            args.text, args.valid = wikitext(folder, args.lines)
        kept = f"WikiText-2, {args.lines} lines" if args.wikitext else "text"
        about = (
            f"{kept}, {args.vocabulary} words, LSTM, {args.epochs} epochs"
            if args.text
            else f"built-in, {args.classes} classes, {args.examples} examples, {args.epochs} epochs"
        )
        stored = json.loads(args.output.read_text()) if args.output.is_file() else {"tasks": {}}
        task = stored["tasks"].setdefault(about, {"about": about, "rows": {}})
        task["log_c"] = round(math.log(args.vocabulary if args.text else args.classes), 4)
        for name in SAMPLERS:
            if (args.only and args.only not in name) or (name in ONLY_TEXT and not args.text):
                continue
            if name not in task["rows"] or args.again:
                task["rows"][name] = run(name, args)
                task["machine"], task["commit"] = machine(torch.device("cpu")), commit()
                args.output.write_text(json.dumps(stored, indent=1) + "\n")
                print(name, task["rows"][name], flush=True)
        task["rows"] = {name: task["rows"][name] for name in SAMPLERS if name in task["rows"]}
        args.output.write_text(json.dumps(stored, indent=1) + "\n")
        table(task)


if __name__ == "__main__":
    main()
