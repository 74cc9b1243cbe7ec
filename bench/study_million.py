"""An epoch of 200,000 examples over 1,000,000 classes: time, peak memory and what was learned, by sampler.

Built-in hierarchical Zipf data (64 features), a linear model, the trainer as it is used, with its checkpoint at the
end of the epoch. Each sampler runs in a separate process, whose peak resident memory is read at the end; it holds
the class table, the state of the optimizer, the sampler, the checkpoint being written, Python and torch. Accuracy and
NLL are exact, over all classes, on 2,000 examples that were not trained on.

  python bench/study_million.py            some minutes; bench/results/study_million.json, docs/images/study_million.png
  python bench/study_million.py --quick    C = 20,000, 20,000 examples; stores nothing
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from _harness import print_table
from _study import COLOURS, axes_of, parser, save_plot, settings, store, stored

from samplex_cuda import data
from samplex_cuda.training import Trainer, evaluate

NAME = "study_million"
LIMIT_GB = 8.0
METHODS: dict[str, list[str]] = {
    "uniform": ["sampler.name=uniform"],
    "frequency": ["sampler.name=unigram", "sampler.smoothing=1"],
    "tree": ["sampler.name=tree", "sampler.dim=16"],
}
COMMON = ["head.num_samples=64", "training.batch_size=256", "optimizer.lr=0.1", "training.epochs=1"]


def child(name: str, classes: int, examples: int, threads: int) -> dict[str, Any]:
    """One epoch, in this process."""
    torch.set_num_threads(threads)
    train = data.BuiltIn(classes, dim=64, num_examples=examples, seed=0)
    held = data.BuiltIn(classes, dim=64, num_examples=2000, seed=0, split="valid")
    begin, begin_cpu = time.perf_counter(), time.process_time()
    keys = [*METHODS[name], *COMMON, f"training.threads={threads}", "training.plot=false", "training.keep=1"]
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(settings(*keys), train, None, Path(folder) / "run")
        setup, setup_cpu = time.perf_counter() - begin, time.process_time() - begin_cpu
        result = trainer.fit()
        wall, cpu = time.perf_counter() - begin, time.process_time() - begin_cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9  # before evaluation, which is extra
    found = evaluate(trainer.encoder, trainer.head, held, batch_size=128)
    return {
        "steps": result.step,
        "wall_seconds": wall,
        "cpu_seconds": cpu,
        "setup_wall_seconds": setup,
        "setup_cpu_seconds": setup_cpu,
        "peak_gb": peak,
        "peak_gb_with_evaluation": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
        "accuracy": found["accuracy"],
        "nll": found["nll"],
        "settings": keys,
    }


def in_child(name: str, classes: int, examples: int, threads: int) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, __file__, "--child", name, str(classes), str(examples), str(threads)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env=os.environ,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def report(methods: dict[str, Any]) -> dict[str, bool]:
    lines = [
        [
            name,
            f"{m['cpu_seconds']:.1f} s",
            f"{m['setup_cpu_seconds']:.1f} s",
            f"{m['wall_seconds']:.1f} s",
            f"{m['peak_gb']:.2f} GB",
            f"{100 * m['accuracy']:.2f} %",
            f"{m['nll']:.3f}",
        ]
        for name, m in methods.items()
    ]
    print_table(["sampler", "processor time", "of it before step 1", "wall", "peak memory", "accuracy", "NLL"], lines)
    verdict = {f"{name}: within {LIMIT_GB:g} GB": m["peak_gb"] <= LIMIT_GB for name, m in methods.items()}
    for text, holds in verdict.items():
        print(f"{text}: {'yes' if holds else 'no'}")
    return verdict


def plot(methods: dict[str, Any]) -> None:
    figure, panels = axes_of(2)
    names = list(methods)
    for axes, key, text in zip(
        panels, ("cpu_seconds", "accuracy"), ("processor seconds of the epoch", "accuracy, %"), strict=True
    ):
        values = [methods[n][key] * (100 if key == "accuracy" else 1) for n in names]
        axes.barh(names, values, color=COLOURS[: len(names)])
        for i, value in enumerate(values):
            axes.text(value, i, f" {value:.1f}", va="center", fontsize=8)
        axes.set_xlabel(text)
        axes.invert_yaxis()
    panels[0].set_title("C = 1,000,000, 200,000 examples, one epoch, 2 threads", loc="left", fontsize=9)
    save_plot(figure, NAME)


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(child(sys.argv[2], *(int(v) for v in sys.argv[3:6]))))
        return 0
    options = parser(__doc__, None).parse_args()
    if options.again:
        found = stored(NAME)["methods"]
        store(NAME, {}, verdicts=report(found))
        plot(found)
        return 0
    classes, examples = (20_000, 20_000) if options.quick else (1_000_000, 200_000)
    threads = 2 if options.threads == 1 else options.threads
    torch.set_num_threads(threads)
    found: dict[str, Any] = {}
    for name in options.only or METHODS:
        found[name] = in_child(name, classes, examples, threads)
        print(name, found[name], flush=True)
        if not (options.quick or options.no_store):
            store(NAME, {name: found[name]}, classes=classes, examples=examples)
    if options.quick or options.no_store:
        report(found)
        return 0
    methods = {name: one for name in METHODS if (one := stored(NAME)["methods"].get(name))}
    verdict = report(methods)
    store(NAME, {}, verdicts=verdict)
    plot(methods)
    return 0 if all(verdict.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
