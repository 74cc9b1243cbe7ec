"""Writes docs/benchmarks.md and the table of README.md from bench/results/*.json.

    python bench/update_readme.py [--check]

Every number comes from the stored results. docs/benchmarks.md is written whole: one section per stored bench, each with
the machine, SIMD level, torch version, commit and date of its own run. The table of README.md is between the lines
`<!-- bench:begin -->` and `<!-- bench:end -->` and has at most eight rows. With --check nothing is written; the exit
code says whether both files are up to date.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from _harness import IMAGES, RESULTS, ROOT, format_value

BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
README, PAGE = ROOT / "README.md", ROOT / "docs" / "benchmarks.md"

# Title and introduction of the sections that need one, in the order of the page. A stored bench that is not listed gets
# its file name as the title, after these.
SECTIONS: dict[str, tuple[str, str]] = {
    "step": (
        "Whole training step",
        "Draw, loss, backward and the Adagrad update of the class table; d = 128, B = 256.",
    ),
    "sampled_softmax": (
        "The sampled softmax loss",
        "Forward and backward to `d_hidden` and coalesced row gradients, on both sides; d = 128. The draws are given.",
    ),
    "full_softmax": (
        "Exact loss over all classes",
        "`full_softmax` against the fastest of eager torch, `torch.compile` and a chunked loss. Memory is the peak of "
        "the intermediates.",
    ),
    "predict": ("Prediction", "Exact top-k without the [B, C] logits, and top-k among candidates of a tree."),
    "overhead": ("Small steps and import", "C = 1,000, d = 16, B = 8, m = 8: time outside the kernels dominates."),
    "entry_loss": ("Other sampled losses", ""),
    "contrastive": ("Contrastive loss", ""),
    "negatives": (
        "Kinds of negatives",
        "A training step with negatives from other sources than a sampler: see [Negatives](negatives.md). d = 128.",
    ),
    "hf": ("Hugging Face", "A step of a small GPT-2 with a vocabulary of 250,000: 8 sequences of 64 tokens."),
    "sphere": (
        "Normalized heads and weighted targets",
        "`normalize=True` with a margin, and `target_weight=`; C = 1,000,000. See [Cosine heads](faces.md).",
    ),
    "attention_pool": ("Attention pooling", ""),
    "static_sample": ("Static samplers", "Draws [256, 64] with `log_q`."),
    "bigram_sample": ("Bigram sampler", ""),
    "subset_sample": ("Subsets without replacement", ""),
    "exact_sample": ("Exact samplers", ""),
    "tree": ("Decision tree: draws and steps", ""),
    "tree_shared": ("Decision tree: shared draws", ""),
    "tree_fit": ("Decision tree: fitting", ""),
    "kernel_tree": (
        "Kernel trees: `Quadratic` and `RandomFourier`",
        "TV is the total variation distance to the softmax.",
    ),
    "midx_sample": (
        "MIDX sampler",
        "Times relative to `Tree` and `LogUniform`: MIDX is faster if the result is below 1.",
    ),
    "rff": ("Random feature maps", ""),
    "row_reduce": ("Sums of duplicate rows", ""),
    "row_rules": ("Row optimizers", ""),
    "distributed": (
        "Several ranks",
        "gloo on one machine of two cores: bytes, memory and balance are meaningful, times of several ranks are not.",
    ),
    "busy": (
        "Running beside other processes",
        "A step while DataLoader workers or other busy processes use the same two cores.",
    ),
    "profile_cuda": (
        "CUDA kernels under emulation",
        "Counts of PTX instructions and memory sectors, made by an emulated CUDA runtime. They are the same on every "
        "machine and are no measure of time: these kernels have not been run on a GPU.",
    ),
}
# Plain names of rows whose stored name is not plain English or has a row id in it.
ROW_NAMES = {
    (
        "negatives",
        "own_ragged",
    ): "own negatives in lists of different lengths, 64 per row on average, C = 1,000,000, B = 1,024",
    ("negatives", "hard"): "64 draws and 8 hard negatives per row, C = 1,000,000, B = 1,024",
    ("negatives", "in_batch_head"): "in-batch negatives with a streaming estimate of log q, C = 1,000,000, B = 1,024",
    ("negatives", "in_batch_dup"): "two towers, in-batch with duplicates masked, B = 4,096",
    ("negatives", "queue"): "two towers, B = 1,024 and a queue of 4,096 keys",
    ("negatives", "unique"): "256 distinct shared draws, C = 1,000,000, B = 1,024",
    ("tree_shared", "by_rows"): "2048 draws for 256 rows, C = 2^17, vs a random row for each draw",
    ("sphere", "sphere_per_row"): "64 draws per row, `normalize=True`, ArcFace",
    ("sphere", "sphere_shared"): "4,096 shared draws, `normalize=True`, ArcFace",
}
PLOTS = {
    "step": ("bench_step.png", "Time of a training step against the number of classes"),
    "sampled_softmax": ("bench_sampled_softmax.png", "Time of the loss against the number of classes, and speedups"),
}
HEAD = """\
# Benchmarks

<!-- Written by bench/update_readme.py from bench/results/*.json; do not edit by hand. -->

All times were measured on CPUs. **The code has not been run on a GPU yet**: [CUDA](cuda.md) describes how it was tested
instead, and [GPU model](gpu_model.md) has estimates from a cost model. [Quality](quality.md) has the accuracy on real
data and the time to reach it.

Each section names the machine, commit and date of its run. Figures of different sections come from different machines
and should not be compared. Both sides of a row are timed in turn, and the median is reported, so that changes of the
machine's speed affect both. A row is stored only if both sides agree with a float64 reference. *Result* is the speedup,
the time of the other side divided by the time of samplex, if it ends in "x"; otherwise the row states what it is. A
commit with a `+` had uncommitted changes. `make bench` repeats everything; `bench/README.md` describes the method.
"""


def _load(name: str) -> dict[str, Any] | None:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def _ms(timing: dict[str, Any] | None) -> str:
    if timing is None:
        return ""
    x = timing["median"]
    return (
        f"{x:,.0f} ms" if x >= 100 else f"{x:.1f} ms" if x >= 10 else f"{x:.2f} ms" if x >= 0.1 else f"{x * 1e3:.0f} µs"
    )


def _short(commit: str) -> str:
    return commit[:7] + ("+" if commit.endswith("+") else "")


SIMD = {"avx2": "AVX2", "avx512": "AVX-512", "scalar": "no SIMD"}


def _provenance(stored: dict[str, Any]) -> str:
    """Machine, SIMD level, torch, commit and date of one stored bench."""
    m = stored["machine"]
    commits = sorted({row["commit"] for row in stored["rows"]})
    dates = sorted({row["date"][:10] for row in stored["rows"]})
    chip = f"{m['gpu']}, " if "gpu" in m else ""
    return (
        f"{chip}{m['cpu']}, {m['cores']} cores, {SIMD.get(m['simd'], m['simd'])}, {m['threads']} "
        f"thread{'s' if m['threads'] > 1 else ''}, huge pages {m['huge_pages']}, torch {m['torch']}; "
        f"commit {', '.join(commits)}; {', '.join(dates)}"
    )


def _table(name: str, stored: dict[str, Any]) -> list[str]:
    """All rows. The columns with times are there if a row has times."""
    rows = stored["rows"]
    timed = any(row["ours"] or row["other"] for row in rows)
    lines = (
        ["| what | other | samplex | result |", "|---|--:|--:|--:|"] if timed else ["| what | result |", "|---|--:|"]
    )
    for row in rows:
        result = format_value(row["value"], row["unit"])
        what = ROW_NAMES.get((name, row["id"]), row["what"])
        if timed:
            other = f"{_ms(row['other'])} ({row['other_name']})" if row["other"] else row["note"]
            lines.append(f"| {what} | {other} | {_ms(row['ours'])} | {result} |")
        else:
            lines.append(f"| {what} | {result} |")
    return lines


def page() -> str:
    """The whole of docs/benchmarks.md."""
    parts = [HEAD]
    stored_names = {path.stem for path in RESULTS.glob("*.json") if not path.stem.startswith("study_")}
    stored_names = {name for name in stored_names if "." not in name} - {"compare"}
    for name in [*(name for name in SECTIONS if name in stored_names), *sorted(stored_names - SECTIONS.keys())]:
        stored = _load(name)
        if not stored or not stored.get("rows"):
            continue
        title, introduction = SECTIONS.get(name, (name.replace("_", " ").capitalize(), ""))
        parts += [f"## {title}", ""]
        if introduction:
            parts += [introduction, ""]
        parts += [f"*{_provenance(stored)}; `bench/results/{name}.json`*", ""]
        if name in PLOTS and (IMAGES / PLOTS[name][0]).exists():
            parts += [f"![{PLOTS[name][1]}](images/{PLOTS[name][0]})", ""]
        parts += [*_table(name, stored), ""]
        for path in sorted(RESULTS.glob(f"{name}.*.json")):  # of other processors
            other = json.loads(path.read_text())
            parts += [f"*{_provenance(other)}; `bench/results/{path.name}`*", "", *_table(name, other), ""]
    return "\n".join(parts)


# ------------------------------------------------------------------------------------------------------ README table
def _bench_row(name: str, row_id: str, what: str, caveat: str) -> list[str]:
    stored = _load(name)
    row = next((row for row in (stored or {"rows": []})["rows"] if row["id"] == row_id), None)
    if stored is None or row is None:
        return []
    where = f"{stored['machine']['cpu']}, {SIMD.get(stored['machine']['simd'], '')}, {_short(row['commit'])}"
    other, ours = f"{row['other_name']}: {_ms(row['other'])}", _ms(row["ours"])
    return [f"| {what} | {other} | {ours} | {format_value(row['value'], row['unit'])}{caveat} | {where} |"]


def _memory_row() -> list[str]:
    stored = _load("full_softmax")
    row = next((row for row in (stored or {"rows": []})["rows"] if row["id"] == "100k_memory"), None)
    if stored is None or row is None:
        return []
    mib = dict(part.rsplit(" ", 2)[:2] for part in row["note"].split(", "))
    where = f"{stored['machine']['cpu']}, {SIMD.get(stored['machine']['simd'], '')}, {_short(row['commit'])}"
    return [
        f"| Memory of that loss, intermediates | eager torch: {mib['eager']} MiB | {mib['ours']} MiB | "
        f"{1 / row['value']:.0f}x less | {where} |"
    ]


def _study_where(stored: dict[str, Any], *runs: dict[str, Any]) -> str:
    simd = runs[0].get("simd", stored["machine"]["simd"])
    commits = dict.fromkeys(_short(run["commit"]) for run in runs)
    return f"{stored['machine']['cpu']}, {SIMD[simd]}, {', '.join(commits)}"


def _study_rows() -> list[str]:
    lines = []
    if stored := _load("study_eurlex"):
        full, tree = stored["methods"]["full softmax"], stored["methods"]["tree"]
        a, b = full["measured"][0], tree["measured"][0]
        lines.append(
            f"| EURLex-4K, accuracy, `Tree` | full softmax: {a['accuracy']:.1%} in {a['seconds']:.1f} s | "
            f"{b['accuracy']:.1%} in {b['seconds']:.1f} s | {a['seconds'] / b['seconds']:.1f}x ¹ | "
            f"{_study_where(stored, full['run'], tree['run'])} |"
        )
    if stored := _load("study_wikitext"):
        full, bigram = stored["methods"]["full softmax"], stored["methods"]["bigram, m = 200"]
        a, b = full["curve"][-1], bigram["curve"][-1]
        lines.append(
            f"| WikiText-2, perplexity, `Bigram` | full softmax: {a['whole_perplexity']:.1f} in {a['seconds']:,.0f} s "
            f"| {b['whole_perplexity']:.1f} in {b['seconds']:,.0f} s | {a['seconds'] / b['seconds']:.1f}x ² | "
            f"{_study_where(stored, full['run'], bigram['run'])} |"
        )
    if stored := _load("study_gowalla"):
        full, drawn = stored["methods"]["full softmax"], stored["methods"]["unigram, with log Q"]
        a, b = full["curve"][-1], drawn["curve"][-1]
        lines.append(
            f"| Gowalla, recall@20, `Unigram` | full softmax: {a['recall@20']:.3f} in {a['seconds']:.0f} s | "
            f"{b['recall@20']:.3f} in {b['seconds']:.1f} s | {a['seconds'] / b['seconds']:.1f}x ² | "
            f"{_study_where(stored, full['run'], drawn['run'])} |"
        )
    return lines


def block() -> str:
    """The table of README.md, markers not included: at most eight rows."""
    lines = ["| what | baseline | samplex | result | machine, commit |", "|---|---|---|--:|---|"]
    lines += _bench_row("step", "per_row_1m", "Step, 10^6 classes, 64 draws per row", "")
    lines += _bench_row("step", "shared_512", "Step, 10^6 classes, 512 shared draws", "")
    lines += _bench_row("step", "full_softmax_100k", "Step, 10^5 classes, 64 draws per row", "")
    lines += _bench_row("full_softmax", "100k", "Exact loss over 10^5 classes", "")
    lines += _memory_row()
    lines += _study_rows()
    return "\n".join(lines) + "\n"


def _readme(text: str) -> str | None:
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        return None
    head, rest = text.split(BEGIN)
    return f"{head}{BEGIN}\n{block()}{END}{rest.split(END)[1]}"


def _replace(path: Path, text: str) -> None:
    scratch = path.with_suffix(".md.tmp")
    scratch.write_text(text, encoding="utf-8")
    os.replace(scratch, path)


def update(check: bool = False) -> int:
    """Writes what changed; 0 if both files are (now) up to date, else 1."""
    fresh = _readme(README.read_text(encoding="utf-8"))
    if fresh is None:
        print(f"update_readme: README.md must have the lines {BEGIN} and {END}, once each, in this order")
        return 1
    status = 0
    for path, text in ((README, fresh), (PAGE, page())):
        name = path.relative_to(ROOT).as_posix()
        if path.exists() and path.read_text(encoding="utf-8") == text:
            print(f"update_readme: {name} is up to date")
        elif check:
            print(f"update_readme: {name} differs from bench/results; run: python bench/update_readme.py")
            status = 1
        else:
            _replace(path, text)
            print(f"update_readme: {name} written")
    return status


if __name__ == "__main__":
    sys.exit(update(check="--check" in sys.argv[1:]))
