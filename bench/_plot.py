"""Draws the images of README.md and docs/benchmarks.md from bench/results/*.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from _harness import RESULTS, format_value

INK, MUTED, GRID = "#1f2328", "#6e7781", "#e6e8eb"
COLOURS = {"ours": "#0f766e", "eager": "#c2710c", "full": "#7c3aed"}
NAMES = {"ours": "samplex", "eager": "eager torch,\nsampled", "full": "full softmax"}
BARS = [
    ("per_row_1m", "[256, 64] draws, C = 10⁶", "eager"),
    ("per_row_100k", "[1024, 128] draws, C = 10⁵", "eager"),
    ("shared_m64", "64 shared draws, C = 10⁶", "eager"),
    ("shared_m512", "512 shared draws, C = 10⁶", "eager"),
    ("full_softmax_100k", "[256, 64] draws, C = 10⁵", "full"),
]


def plot_sampled_softmax(path: Path) -> Path | None:
    """Left: time per step against the number of classes. Right: speedups. None if it could not be drawn."""
    stored_at = RESULTS / "sampled_softmax.json"
    if not stored_at.exists():
        print("plot: no stored results yet; run bench/bench_sampled_softmax.py first")
        return None
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        print("plot: matplotlib is not installed (pip install matplotlib); skipped")
        return None
    stored: dict[str, Any] = json.loads(stored_at.read_text())
    rows = {row["id"]: row for row in stored["rows"]}
    sweep = stored["extra"].get("sweep", {}).get("data")
    if sweep is None:
        print("plot: the stored results have no sweep; run bench/bench_sampled_softmax.py --only sweep")
        return None
    plt.rcParams.update({"font.family": "DejaVu Sans", "font.size": 10, "text.color": INK, "axes.edgecolor": MUTED})
    figure, (left, right) = plt.subplots(1, 2, figsize=(11.5, 4.4), dpi=160, gridspec_kw={"width_ratios": [1.15, 1]})
    _lines(left, sweep)
    _bars(right, [(rows[key], label, kind) for key, label, kind in BARS if key in rows])
    m = stored["machine"]
    figure.text(
        0.012,
        0.012,
        f"{m['cpu']}, {m['threads']} threads, {m['simd']}, torch {m['torch']}, fp32 · median of interleaved runs · "
        f"commit {stored['commit']}, {stored['date'][:10]}",
        fontsize=7.5,
        color=MUTED,
    )
    figure.tight_layout(rect=(0, 0.035, 1, 1), w_pad=3)
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(path.stem + ".tmp.png")
    figure.savefig(scratch, metadata={"Software": None})
    plt.close(figure)
    scratch.replace(path)
    print(f"plot: docs/images/{path.name}")
    return path


def plot_step(path: Path) -> Path | None:
    """Time of a whole training step against the number of classes. None if it could not be drawn."""
    stored_at = RESULTS / "step.json"
    if not stored_at.exists():
        print("plot: no stored results yet; run bench/bench_step.py first")
        return None
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        print("plot: matplotlib is not installed (pip install matplotlib); skipped")
        return None
    stored: dict[str, Any] = json.loads(stored_at.read_text())
    sweep = stored["extra"].get("sweep", {}).get("data")
    if sweep is None:
        print("plot: the stored results have no sweep; run bench/bench_step.py --only sweep")
        return None
    plt.rcParams.update({"font.family": "DejaVu Sans", "font.size": 10, "text.color": INK, "axes.edgecolor": MUTED})
    figure, axis = plt.subplots(figsize=(6.8, 4.4), dpi=160)
    _lines(axis, sweep, "Draw + loss + Adagrad update")
    m = stored["machine"]
    figure.text(
        0.012,
        0.012,
        f"{m['cpu']}, {m['threads']} threads, {m['simd']}, torch {m['torch']}, fp32 · commit {stored['commit']}, "
        f"{stored['date'][:10]}",
        fontsize=7.5,
        color=MUTED,
    )
    figure.tight_layout(rect=(0, 0.035, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(path.stem + ".tmp.png")
    figure.savefig(scratch, metadata={"Software": None})
    plt.close(figure)
    scratch.replace(path)
    print(f"plot: docs/images/{path.name}")
    return path


def _lines(axis: Any, sweep: dict[str, Any], what: str = "Forward + backward") -> None:
    points = sweep["points"]
    right_edge = max(p["C"] for p in points)
    for name, colour in COLOURS.items():
        known = [p for p in points if name in p]
        if not known:
            continue
        x = [p["C"] for p in known]
        y = [p[name]["median"] for p in known]
        axis.fill_between(
            x, [p[name]["p20"] for p in known], [p[name]["p80"] for p in known], color=colour, alpha=0.15, lw=0
        )
        axis.plot(x, y, color=colour, lw=2.2, marker="o", ms=5.5)
        axis.annotate(
            NAMES[name],
            (x[-1], y[-1]),
            xytext=(9, 0),
            textcoords="offset points",
            color=colour,
            va="center",
            weight="bold",
        )
        if x[-1] < right_edge:
            gib = 3 * sweep["B"] * right_edge * 4 / 2**30
            axis.annotate(
                f"C = 10⁷: {gib:.0f} GiB of logits, not run",
                (x[-1], y[-1]),
                xytext=(9, -14),
                textcoords="offset points",
                color=MUTED,
                fontsize=8,
                va="center",
            )
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlim(min(p["C"] for p in points) * 0.7, right_edge * 14)
    axis.set_xticks([p["C"] for p in points])
    axis.minorticks_off()
    axis.set_xlabel("classes C")
    axis.set_ylabel("milliseconds per step")
    axis.set_title(
        f"{what}, B = {sweep['B']}, m = {sweep['m']}, d = {sweep['d']}",
        loc="left",
        fontsize=11,
        weight="bold",
    )
    axis.grid(True, color=GRID, lw=0.8)
    axis.set_axisbelow(True)
    for edge in ("top", "right"):
        axis.spines[edge].set_visible(False)


def _bars(axis: Any, rows: list[tuple[dict[str, Any], str, str]]) -> None:
    # A log axis: 1.3x and 400x share it, and equal factors are equal lengths.
    places = list(range(len(rows)))[::-1]
    for place, (row, _label, kind) in zip(places, rows, strict=True):
        axis.barh(place, row["value"] - 1, left=1, height=0.56, color=COLOURS[kind], alpha=0.9)
        against = "full softmax" if kind == "full" else "eager"
        axis.annotate(
            f"{format_value(row['value'], 'x')}  vs {against}",
            (max(1.0, row["value"]), place),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            weight="bold",
        )
    axis.set_yticks(places, [label for _row, label, _kind in rows])
    axis.set_xscale("log")
    top = max(row["value"] for row, _label, _kind in rows)
    axis.set_xlim(1, top * 60)  # room for the labels
    ticks = [10**k for k in range(5) if 10**k <= top * 3]
    axis.set_xticks(ticks, [f"{tick}x" for tick in ticks])
    axis.set_xlabel("speedup of one step")
    axis.set_title("Speedup", loc="left", fontsize=11, weight="bold")
    axis.grid(True, axis="x", color=GRID, lw=0.8)
    axis.set_axisbelow(True)
    axis.minorticks_off()
    axis.tick_params(axis="y", length=0)
    for edge in ("top", "right", "left"):
        axis.spines[edge].set_visible(False)
