"""Leak and exact NLL of samplers on the built-in task: why a decision tree alone is not safe, and what is.

    python bench/study_leak.py                       # C = 20,000, one epoch
    python bench/study_leak.py --classes 1000000
    python bench/study_leak.py --text train.txt --valid valid.txt    # text, an LSTM

Every run has m = 64 draws per row and the trainer's defaults. "leak" is that of held-out rows at the end, the share of
the model's softmax that the draws cannot push down (sx.diagnostics.leak). The result goes to
bench/results/study_leak.json.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

import samplex_cuda as sx
from samplex_cuda.training import Config, Trainer, config

SAMPLERS = {
    "uniform": ["sampler.name=uniform"],
    "unigram": ["sampler.name=unigram"],
    "tree": ["sampler.name=tree", "sampler.base=none"],
    ".9 tree + .1 uniform": ["sampler.name=tree", "sampler.base=uniform", "sampler.base_weight=0.1"],
    ".5 tree + .5 unigram": ["sampler.name=tree"],
}


def data_of(args: argparse.Namespace) -> tuple[Any, Any, list[str]]:
    """Training data, held-out data, and the settings of the model."""
    if args.text:
        train = sx.data.open(args.text, format="text", vocabulary=args.vocabulary)
        valid = sx.data.open(args.valid, format="text", vocabulary=train)
        return train, valid, ["model.name=lstm", "model.dim=64", "optimizer.encoder_lr=0.01"]
    spec = f"builtin:classes={args.classes},examples={args.examples}"
    return sx.data.open(spec), sx.data.open(f"{spec},split=valid"), ["model.name=linear"]


def run(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """One sampler: exact NLL and leak on held-out rows."""
    train, valid, model = data_of(args)
    settings = [*model, *SAMPLERS[name], "head.shared=false", "head.num_samples=64", f"training.epochs={args.epochs}",
                "training.plot=false", 'training.metrics=["nll"]', f"training.threads={torch.get_num_threads()}",
                f"training.eval_rows={args.eval_rows}"]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        chosen = config.override(Config(), settings)
        trainer = Trainer(chosen, train, valid, Path(folder) / "run", on_event=lambda event: None)
        found = trainer.fit()
        batch = valid.batch(torch.arange(min(args.rows, len(valid))))
        trainer.encoder.eval()
        with torch.no_grad():
            h, features = trainer.encoder.encode(batch)
        flat, y = h.reshape(-1, h.shape[-1])[: args.rows], batch["y"].reshape(h[..., 0].numel(), -1)[: args.rows]
        seen = None if features is None else features.reshape(-1, features.shape[-1])[: args.rows]
        head = trainer.head
        return {
            "sampler": name,
            "nll": round(found.metrics["nll"], 4),
            "leak": round(float(head.leak(flat, y, features=seen).mean()), 4),
            "leak_all": round(float(head.leak(flat, features=seen).mean()), 4),
            "base_share": round(float(getattr(head.sampler, "base_share", 0.0)), 4),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--classes", type=int, default=20_000)
    parser.add_argument("--examples", type=int, default=200_000)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--eval-rows", type=int, default=4096)
    parser.add_argument("--text")
    parser.add_argument("--valid")
    parser.add_argument("--vocabulary", type=int, default=5000, help="words of the text that are kept")
    parser.add_argument("--only", help="part of a sampler's name")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "study_leak.json")
    args = parser.parse_args()
    rows = [run(name, args) for name in SAMPLERS if not args.only or args.only in name]
    print(f"log C = {math.log(args.vocabulary if args.text else args.classes):.3f}")
    print(f"{'sampler':24}{'exact NLL':>10}{'leak':>8}{'with targets':>14}")
    for row in rows:
        print(f"{row['sampler']:24}{row['nll']:10.3f}{row['leak']:8.3f}{row['leak_all']:14.3f}")
    about = {
        "classes": args.classes, "examples": args.examples, "epochs": args.epochs, "m": 64, "text": bool(args.text),
        "machine": platform.processor() or platform.machine(), "torch": torch.__version__,
    }  # fmt: skip
    if not args.only:
        args.output.parent.mkdir(exist_ok=True)
        args.output.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
