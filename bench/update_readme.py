"""Writes the benchmark block of README.md from bench/results/*.json: python bench/update_readme.py [--check]

The block lies between the lines `<!-- bench:begin -->` and `<!-- bench:end -->`. Every number in it comes from the
stored results. With --check nothing is written, and the exit code says whether README.md is up to date.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

from _harness import IMAGES, RESULTS, ROOT, format_target, format_value

BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
README = ROOT / "README.md"


def _load(name: str) -> dict[str, Any] | None:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def _ms(timing: dict[str, Any] | None) -> str:
    if timing is None:
        return ""
    x = timing["median"]
    return (
        f"{x:.0f} ms" if x >= 100 else f"{x:.1f} ms" if x >= 10 else f"{x:.2f} ms" if x >= 0.1 else f"{x * 1e3:.0f} µs"
    )


def _target(row: dict[str, Any]) -> str:
    if row["target"] is None:
        return ""
    text = format_target(row).replace(">=", "≥").replace("<=", "≤")
    return text + ("" if row["passed"] else " (missed)")


def _machine(stored: dict[str, Any]) -> str:
    m = stored["machine"]
    commits = sorted({row["commit"] for row in stored["rows"]})
    return (
        f"{m['cpu']}, {m['cores']} cores, {m['threads']} threads, {m['simd']}, huge pages: {m['huge_pages']}, "
        f"torch {m['torch']}, fp32, commit {', '.join(commits)}, {stored['date'][:10]}"
    )


def _speed(stored: dict[str, Any]) -> list[str]:
    lines = ["| step, d = 128 | torch | samplex | speed-up | target |", "|---|--:|--:|--:|--:|"]
    for row in stored["rows"]:
        if row["unit"] == "x":
            what = row["what"].removeprefix("step, ")
            speed_up = format_value(row["value"], "x")
            lines.append(f"| {what} | {_ms(row['other'])} | {_ms(row['ours'])} | **{speed_up}** | {_target(row)} |")
    return lines


def _limits(stored: dict[str, Any]) -> list[str]:
    lines = ["| what else | measured | target |", "|---|--:|--:|"]
    for row in stored["rows"]:
        if row["unit"] != "x":
            lines.append(f"| {row['what']} | {format_value(row['value'], row['unit'])} | {_target(row)} |")
    return lines


def _samplers(stored: dict[str, Any]) -> list[str]:
    lines = ["| sampler, draws [256, 64] with log_q | samplex | torch |", "|---|--:|--:|"]
    for row in stored["rows"]:
        other = f"{_ms(row['other'])} ({row['other_name']})" if row["other"] else row["note"]
        what = row["what"].split(":")[0]
        lines.append(f"| {what} | {_ms(row['ours'])} | {other} |")
    return lines


def _targets(title: str) -> Callable[[dict[str, Any]], list[str]]:
    """A table of the rows that have a target."""

    def lines_of(stored: dict[str, Any]) -> list[str]:
        lines = [f"| {title} | measured | target |", "|---|--:|--:|"]
        for row in stored["rows"]:
            if row["target"] is not None:
                lines.append(f"| {row['what']} | {format_value(row['value'], row['unit'])} | {_target(row)} |")
        return lines

    return lines_of


def block() -> str:
    """The text between the markers, markers not included."""
    parts: list[str] = []
    main_result = _load("sampled_softmax")
    if main_result is None:
        return "No results stored yet: run `make bench`.\n"
    image = IMAGES / "bench_sampled_softmax.png"
    if image.exists():
        parts += [
            f"![Time per step against the number of classes, and speed-ups]({image.relative_to(ROOT).as_posix()})",
            "",
        ]
    parts += [
        f"Measured by `bench/` on {_machine(main_result)}. Medians of interleaved runs; a step is forward + backward "
        "to `d_hidden` and coalesced row gradients, on both sides ([how](bench/README.md)).",
        "",
    ]
    parts += [*_speed(main_result), "", *_limits(main_result), ""]
    tables: list[tuple[str, Callable[[dict[str, Any]], list[str]]]] = [
        ("step", _targets("whole step: draw, loss, Adagrad update")),
        ("overhead", _targets("tiny step and import")),
        ("contrastive", _targets("contrastive loss")),
        ("attention_pool", _targets("attention pooling")),
        ("full_softmax", _targets("exact loss over all classes")),
        ("predict", _targets("prediction")),
        ("static_sample", _samplers),
        ("tree", _targets("adversarial tree")),
        ("tree_shared", _targets("shared draws of the tree")),
        ("tree_fit", _targets("fit of the tree")),
        ("kernel_tree", _targets("kernel trees: `Quadratic`, `RandomFourier`")),
        ("profile_cuda", _targets("CUDA kernel, profile under emulation")),
    ]
    for name, lines in tables:
        stored = _load(name)
        if stored is not None:
            parts += [*lines(stored), ""]
    return "\n".join(parts)


def update(check: bool = False) -> int:
    """Replaces the block; 0 if README.md is (now) up to date, else 1."""
    if not README.exists():
        print("update_readme: there is no README.md")
        return 1
    text = README.read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        print(f"update_readme: README.md must hold the lines {BEGIN} and {END}, once each, in this order")
        return 1
    head, rest = text.split(BEGIN)
    _old, tail = rest.split(END)
    fresh = f"{head}{BEGIN}\n{block()}{END}{tail}"
    if fresh == text:
        print("update_readme: README.md is up to date")
        return 0
    if check:
        print("update_readme: README.md differs from bench/results; run: python bench/update_readme.py")
        return 1
    scratch = README.with_suffix(".md.tmp")
    scratch.write_text(fresh, encoding="utf-8")
    os.replace(scratch, README)
    print("update_readme: README.md written")
    return 0


if __name__ == "__main__":
    sys.exit(update(check="--check" in sys.argv[1:]))
