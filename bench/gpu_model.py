"""Writes docs/gpu_model.md: time of the usual steps on A100, H100 and B200, from bytes, flops and launches.

    python bench/gpu_model.py            writes the page
    python bench/gpu_model.py --check    exits with 1 if the page is not what this would write

Arithmetic, not measurement: nothing here has run on a GPU. All formulas are in this file, one function per step, so
that whoever has a clock can see which term is wrong.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs" / "gpu_model.md"


# ----------------------------------------------------------------------------------------------------- machines
@dataclasses.dataclass(frozen=True)
class Gpu:
    """Data sheet figures: bytes and flops per second, multiprocessors, clock, fp64 lanes of a multiprocessor."""

    name: str
    bandwidth: float
    fp32: float
    tensor: float  # bf16 products, fp32 sums, dense
    sms: int
    clock: float
    fp64_lanes: int


GPUS = [
    Gpu("A100 SXM 80 GB", 2.04e12, 19.5e12, 312e12, 108, 1.41e9, 32),
    Gpu("H100 SXM", 3.35e12, 67e12, 989e12, 132, 1.98e9, 64),
    Gpu("B200", 8.0e12, 75e12, 2250e12, 148, 1.97e9, 64),
]
CONSUMER = Gpu("RTX 4090", 1.01e12, 82.6e12, 165e12, 128, 2.52e9, 2)

# What kernels usually reach of the data sheet, and what a launch costs.
OF_BANDWIDTH, OF_FP32, OF_TENSOR = 0.85, 0.75, 0.60
OF_TENSOR_OWN = (
    0.35  # of the tensor cores, by a kernel of this project: no pipeline of asynchronous copies as cuBLAS has
)
L2 = 1.65  # bandwidth of the L2 cache, times that of the memory
GRAPH_LAUNCH = 1.5e-6  # start and end of a kernel inside a CUDA graph
HOST_LAUNCH = 5e-6  # an op launched from Python, which the host needs whether or not the GPU has work
CHUNK = 272 << 20  # bytes of logits at a time (chunking.py)


# ----------------------------------------------------------------------------------------------------- a step
@dataclasses.dataclass(frozen=True)
class Work:
    """One kernel or one family of equal ones: bytes of device memory, flops, launches."""

    what: str
    bytes: float
    flops: float = 0.0
    launches: int = 1
    tensor: bool = False  # whether the flops are those of tensor cores
    cached: float = 0.0  # bytes from the L2 cache
    own: bool = False  # whether tensor cores are used by a kernel of this project, not by cuBLAS

    def memory_seconds(self, gpu: Gpu) -> float:
        """The slower of device memory and L2 cache."""
        return max(self.bytes, self.cached / L2) / (gpu.bandwidth * OF_BANDWIDTH)

    def seconds(self, gpu: Gpu) -> float:
        """The slower of memory and arithmetic."""
        share = OF_TENSOR_OWN if self.own else OF_TENSOR
        peak = gpu.tensor * share if self.tensor else gpu.fp32 * OF_FP32
        return max(self.memory_seconds(gpu), self.flops / peak)


@dataclasses.dataclass(frozen=True)
class Shape:
    """B rows of width d, C classes, m draws, bytes of a number in tables and activations."""

    batch: int = 1024
    dim: int = 128
    classes: int = 1_000_000
    samples: int = 64
    size: int = 4

    @property
    def tensor(self) -> bool:
        return self.size == 2


@functools.cache
def distinct_log_uniform(classes: int, draws: int) -> float:
    """Expected number of different classes among draws from the log-uniform distribution."""
    norm = math.log(classes + 1)
    return sum(-math.expm1(draws * math.log1p(-math.log1p(1 / (k + 1)) / norm)) for k in range(classes))


def update(s: Shape, entries: int, rows: float) -> list[Work]:
    """A sort of four passes over 4-byte keys and 8-byte places; Adagrad reads and writes weight and state."""
    return [
        Work("sort", 4 * 2 * 12 * entries),
        Work("update", 12 * entries + rows * s.dim * 2 * (s.size + 4), 4 * entries * s.dim),
    ]


def per_row(s: Shape) -> list[Work]:
    """Each row has its own m draws: rows are gathered once, the gradient of h comes from the same pass."""
    entries = s.batch * (s.samples + 1)
    rows = distinct_log_uniform(s.classes, s.batch * s.samples) + s.batch
    return [
        Work("key, seed of backward", 0, launches=2),
        Work("draw", 12 * s.batch * s.samples, launches=2),
        Work("forward", entries * s.dim * s.size + 3 * s.batch * s.dim * s.size + 16 * entries, 6 * entries * s.dim),
        Work("mean", 4 * s.batch),
        Work("coefficients, keys", 20 * entries + 2 * s.batch * s.dim * s.size),
        *update(s, entries, rows),
    ]


def shared(s: Shape) -> list[Work]:
    """One set of m draws for the batch: three products of [B, m] with d; bf16 coefficients are two numbers each.

    The coefficients of the forward go into both products, except those of bf16, which backward scales and splits again;
    bias gradients read them once more. The upstream gradient of fp32 goes onto the rows in the update.
    """
    rows, logits = s.samples + s.batch, s.batch * s.samples
    product, parts = 2 * logits * s.dim, 2 if s.tensor else 1
    forward, backward = (12, 12) if s.tensor else (8, 4)  # bytes of a coefficient, read and written
    return [
        Work("key, seed of backward", 0, launches=2),
        Work("draw, class rows", 12 * s.samples + (1 + parts) * s.samples * s.dim * s.size),
        Work("logits", (rows + s.batch) * s.dim * s.size + 4 * logits, product, tensor=s.tensor),
        Work("softmax, mean", forward * logits + 2 * s.batch * s.dim * s.size),
        Work("gradient of h", 4 * logits + (rows + s.batch) * s.dim * s.size, parts * product, tensor=s.tensor),
        Work("scaling, biases, keys", backward * logits + (3 + parts) * s.batch * s.dim * s.size + 12 * rows),
        Work("gradient of rows", 4 * logits + rows * s.dim * (s.size + 4), parts * product, tensor=s.tensor),
        *update(s, rows, rows),
    ]


def chunks(s: Shape) -> int:
    return max(1, math.ceil(s.batch * s.classes * 4 / CHUNK))


def full_softmax(s: Shape) -> list[Work]:
    """All classes by chunks of logits, formed again in backward; dense Adagrad over the table.

    With a bf16 table the gradient of a logit is two bf16 numbers; the gradient of rows is summed in fp32, then rounded.
    """
    n, logits, table = chunks(s), s.batch * s.classes, s.classes * s.dim
    product, parts = 2 * logits * s.dim, 2 if s.tensor else 1
    rounded = [Work("rounding of that", 6 * table, launches=n)] if s.tensor else []
    return [
        Work("logits", table * s.size + 4 * logits, product, n, s.tensor),
        Work("log-sum-exp", 4 * logits, 4 * logits, n),
        Work("logits again", table * s.size + 4 * logits, product, n, s.tensor),
        Work("softmax", 8 * logits, 4 * logits, n),
        Work("gradient of h", table * s.size + 4 * logits, parts * product, parts * n, s.tensor),
        Work("gradient of rows", 4 * table + 4 * logits, parts * product, n, s.tensor),
        *rounded,
        Work("Adagrad", table * (2 * s.size + 2 * 4 + 4)),
    ]


def eager_softmax(s: Shape) -> list[Work]:
    """nn.Linear, cross_entropy and Adagrad as torch runs them: [B, C] is stored."""
    logits, table = s.batch * s.classes, s.classes * s.dim
    product = 2 * logits * s.dim
    return [
        Work("linear", table * s.size + s.size * logits, product, tensor=s.tensor),
        Work("log_softmax", 2 * s.size * logits),
        Work("its backward", 3 * s.size * logits, launches=2),
        Work("gradient of h", (table + logits) * s.size, product, tensor=s.tensor),
        Work("gradient of the table", (table + logits) * s.size, product, tensor=s.tensor),
        Work("Adagrad", table * (8 * s.size), launches=4),
    ]


TREE_FEATURES = 16


def with_draws(draws: Callable[[Shape], list[Work]], s: Shape) -> list[Work]:
    """The per-row step with other draws."""
    return [w for w in per_row(s) if w.what != "draw"] + draws(s)


def tree_draws(s: Shape) -> list[Work]:
    """Draws from a decision tree of 16 features: a node per draw and level, none shared."""
    levels = math.ceil(math.log2(s.classes))
    return [Work("tree draw", s.batch * s.samples * levels * (TREE_FEATURES + 1) * 4, launches=2)]


LEAF = 16
# Of small ops around an update of the sums: what COUNTED has for a tree of 11 levels, less the parts of `kernel_draws`.
FOLLOW_LAUNCHES = 26


def kernel_draws(s: Shape, features: int = 128) -> list[Work]:
    """Draws from a kernel tree of D features (2 D sums per node), and following the updated rows."""
    levels = math.ceil(math.log2(s.classes / LEAF))
    pairs = sum(min(1 << level, s.samples) for level in range(levels))
    sums = 2 * features * 4
    leaves = s.samples * LEAF * s.dim * 4
    entries = s.batch * (s.samples + 1)  # at most: every updated row
    return [
        Work("features of h", s.batch * sums, 2 * s.batch * s.dim * features),
        Work("kernel tree draw", s.batch * (pairs * 2 * sums + leaves), s.batch * (pairs * 2 * sums + leaves) / 2),
        Work("features of rows, old and new", 2 * entries * (s.dim * 4 + sums), 4 * entries * s.dim * features, 2),
        Work("sums of leaves", entries * 2 * sums),
        Work("sums above", 3 * sums * entries * 2, launches=levels),
        Work("ids, checks and gathers of the update", 0, launches=FOLLOW_LAUNCHES),
    ]


def top_k(s: Shape) -> list[Work]:
    """Exact top 10: products by chunks, a queue per row."""
    n, logits = chunks(s), s.batch * s.classes
    return [
        Work("logits", s.classes * s.dim * s.size + 4 * logits, 2 * logits * s.dim, n, s.tensor),
        Work("top-k", 4 * logits, logits, n),
    ]


BLOCK, TILE = 256, 128  # classes of a block, rows of a tile of its product
# Instructions that a logit costs after the product, counted on nvcc's code (26 with it); each in the place of an fma.
PER_LOGIT = 22
TOGETHER = {2: 3, 4: 4}  # rows that share the reads of a block, by bytes of a number


def softmax_draws(s: Shape) -> list[Work]:
    """Exact draws from the softmax.

    16 bits: one kernel multiplies and weighs blocks of classes; tiles of 128 rows read the table from the L2 cache.
    fp32: logits by chunks, then a pass over them. A draw computes the logits of its block once more; there are at most
    B m pairs of row and block, and rows of one block share the reads of its class rows where there are several.
    """
    n, logits, blocks = chunks(s), s.batch * s.classes, math.ceil(s.classes / BLOCK)
    table, product, draws = s.classes * s.dim * s.size, 2 * s.batch * s.classes * s.dim, s.batch * s.samples
    if s.tensor:
        tiles = math.ceil(s.batch / TILE) * blocks
        read = tiles * (TILE + BLOCK) * s.dim * s.size
        weigh = [
            Work("products", table + 8 * s.batch * blocks, product, tensor=True, cached=read, own=True),
            Work("exponentials of them", 0, 2 * PER_LOGIT * logits, launches=0),
        ]
    else:
        weigh = [
            Work("logits", table + 4 * logits, product, n),
            Work("weights of blocks", 4 * logits + 8 * s.batch * blocks, 4 * logits, n),
        ]
    together = min(TOGETHER[s.size], max(1.0, draws / blocks))
    return [
        *weigh,
        Work("block of each draw", 40 * s.batch * blocks + 8 * draws),
        Work("sort by block", 8 * 2 * 16 * draws),
        Work("classes in their blocks", 24 * draws, 2 * draws * BLOCK * s.dim,
             cached=draws * BLOCK * s.dim * s.size / together),
        Work("log q", draws * s.dim * s.size, 2 * draws * s.dim),
    ]  # fmt: skip


STEPS: list[tuple[str, Callable[[Shape], list[Work]], Shape]] = [
    ("per row, m = 64", per_row, Shape()),
    ("per row, m = 64, bf16", per_row, Shape(size=2)),
    ("shared, m = 64", shared, Shape()),
    ("shared, m = 512", shared, Shape(samples=512)),
    ("shared, m = 2048", shared, Shape(samples=2048)),
    ("shared, m = 2048, bf16", shared, Shape(samples=2048, size=2)),
    ("tree, m = 64", functools.partial(with_draws, tree_draws), Shape()),
    ("kernel tree, m = 64", functools.partial(with_draws, kernel_draws), Shape()),
    ("kernel tree, D = 1024", functools.partial(with_draws, functools.partial(kernel_draws, features=1024)), Shape()),
    ("exact softmax draws, m = 64", functools.partial(with_draws, softmax_draws), Shape()),
    ("exact softmax draws, m = 64, bf16", functools.partial(with_draws, softmax_draws), Shape(size=2)),
    ("full softmax", full_softmax, Shape()),
    ("full softmax, bf16", full_softmax, Shape(size=2)),
    ("eager torch, full softmax", eager_softmax, Shape()),
    ("eager torch, full softmax, bf16", eager_softmax, Shape(size=2)),
    ("top 10, B = 64", top_k, Shape(batch=64)),
    ("top 10, B = 1024", top_k, Shape()),
    ("top 10, B = 1024, bf16", top_k, Shape(size=2)),
]


def seconds(step: list[Work], gpu: Gpu) -> float:
    """Of a captured step."""
    return sum(work.seconds(gpu) + work.launches * GRAPH_LAUNCH for work in step)


def even_classes(other: Callable[[Shape], list[Work]], size: int) -> int:
    """Up to how many classes exact softmax draws on an H100 take no longer than those of another sampler; one digit."""

    def earlier(count: int) -> bool:
        mine, theirs = softmax_draws(Shape(classes=count, size=size)), other(Shape(classes=count))
        return seconds(mine, GPUS[1]) <= seconds(theirs, GPUS[1])

    return max(filter(earlier, (digit * 10**power for power in range(3, 9) for digit in range(1, 10))), default=0)


# ----------------------------------------------------------------------------------------------------- fp64 in draws
# Warp instructions per draw and those of the fp64 unit, counted on nvcc's code (C = 2^15, B = 32, m = 64, target
# excluded; a division counts as ten). tests/emulated/test_fp64.py holds them against the present build.
DRAWS = {
    "uniform": (7.71, 0.12),
    "log_uniform": (12.14, 4.08),
    "unigram": (10.65, 1.52),
    "bigram": (15.66, 1.83),
    "subset": (23.14, 0.00),
    "tree": (160.72, 12.80),
    "tree_base": (242.92, 18.88),
    "tree_shared": (7979.00, 885.00),
    "tree_stratified_shared": (6596.00, 1233.00),
    "kernel_tree": (1961.08, 175.42),
    "kernel_tree_shared": (65521.16, 5899.08),
    "midx": (597.82, 147.94),
    "softmax": (11369.25, 140.96),
}
SHARED_ROWS = 32  # rows that a shared draw was counted with: its work grows with them


def draw_seconds(name: str, gpu: Gpu, batch: int = 1024, samples: int = 64) -> tuple[float, float]:
    """Time of the draws of a step: by the instructions issued, and by those of the fp64 unit."""
    warps, fp64 = DRAWS[name]
    count = batch * samples if not name.endswith("_shared") else samples * batch / SHARED_ROWS
    cycles = gpu.sms * gpu.clock
    return count * warps / 4 / cycles, count * fp64 * 32 / gpu.fp64_lanes / cycles


# ----------------------------------------------------------------------------------------------------- counted steps
# Launches of the steps of tests/emulated/step_kinds.py (B = 64, m = 64, d = 32), with the key drawn by torch and the
# seed of backward, by the counters of tests/emulated, which hold them against the present build.
COUNTED = {
    "per row": 9,
    "shared": 10,
    "adam": 9,
    "grad scaler": 13,
    "per row negative_sampling": 8,
    "per row augment_reduce": 10,
    "per row sphere": 23,
    "per row arcface": 23,
    "shared sphere": 25,
    "per row kernel sampler": 49,
    "per row midx": 122,
    "shared midx": 150,
    "shared softmax sampler": 124,
    "full softmax": 65,
}
KIND_NAMES = {
    "adam": "per row, RowAdam",
    "grad scaler": "per row, GradScaler with its update",
    "per row kernel sampler": "per row, kernel tree of 11 levels that follows its rows",
    "per row midx": "per row, MIDX that follows its rows",
    "shared midx": "shared, MIDX that follows its rows",
    "shared softmax sampler": "shared, exact softmax draws that follow the rows",
    "per row negative_sampling": "per row, negative sampling",
    "per row augment_reduce": "per row, augment and reduce",
    "per row sphere": "per row, class rows on the sphere",
    "per row arcface": "per row, ArcFace",
    "shared sphere": "shared, class rows on the sphere",
    "full softmax": "full softmax of one chunk, without an update",
}


def counted_table() -> list[str]:
    lines = ["| step | launches | in a graph | host without a graph |", "|---|---|---|---|"]
    for kind, launches in COUNTED.items():
        graph, host = micro(launches * GRAPH_LAUNCH), micro(launches * HOST_LAUNCH)
        lines.append(f"| {KIND_NAMES.get(kind, kind)} | {launches} | {graph} | {host} |")
    return lines


# ----------------------------------------------------------------------------------------------------- the page
def micro(value: float) -> str:
    """Three digits, in µs or ms."""
    text = f"{value * 1e6:.0f} µs" if value < 0.9995e-3 else f"{value * 1e3:.3g} ms"
    return text if value >= 9.5e-6 else f"{value * 1e6:.1f} µs"


def wrapped(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), 118)


def bullet(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), 118, initial_indent="- ", subsequent_indent="  ")


def step_table() -> list[str]:
    names = " | ".join(gpu.name for gpu in GPUS)
    lines = [
        f"| step | bytes | flops | launches | {names} | host without a graph |",
        "|---|" + "---|" * (len(GPUS) + 4),
    ]
    for name, function, shape in STEPS:
        step = function(shape)
        traffic, flops, launches = (sum(getattr(work, key) for work in step) for key in ("bytes", "flops", "launches"))
        times = " | ".join(micro(seconds(step, gpu)) for gpu in GPUS)
        size = f"{traffic / 1e6:,.0f} MB" if traffic >= 1e6 else f"{traffic / 1e6:.1f} MB"
        lines.append(
            f"| {name} | {size} | {flops / 1e9:,.1f} G | {launches} | {times} | {micro(launches * HOST_LAUNCH)} |"
        )
    return lines


def work_table(name: str, step: list[Work]) -> list[str]:
    lines = [f"### {name}", "", "| part | bytes | flops | launches | H100 | bound by |", "|---|---|---|---|---|---|"]
    gpu = GPUS[1]
    for work in step:
        memory, time = work.memory_seconds(gpu), work.seconds(gpu)
        bound = "launch" if time < work.launches * GRAPH_LAUNCH else "memory" if time <= memory else "arithmetic"
        lines.append(
            f"| {work.what} | {work.bytes / 1e6:,.1f} MB | {work.flops / 1e9:,.2f} G | {work.launches} | "
            f"{micro(time + work.launches * GRAPH_LAUNCH)} | {bound} |"
        )
    return [*lines, ""]


def fp64_table() -> list[str]:
    lines = [
        f"| draw | warp instructions | of them fp64 | share | {GPUS[1].name} | {CONSUMER.name} | without fp64 |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, (warps, fp64) in DRAWS.items():
        issue, unit = draw_seconds(name, CONSUMER)
        data_center = max(draw_seconds(name, GPUS[1]))
        lines.append(
            f"| {name.replace('_', ' ')} | {warps:,.1f} | {fp64:,.2f} | {fp64 / warps:.0%} | {micro(data_center)} | "
            f"{micro(max(issue, unit))} | {micro(issue)} |"
        )
    return lines


def page() -> str:
    """The whole page."""
    machines = [
        f"| {gpu.name} | {gpu.bandwidth / 1e12:.2f} TB/s | {gpu.fp32 / 1e12:.1f} TF | {gpu.tensor / 1e12:.0f} TF | "
        f"{gpu.sms} | {gpu.clock / 1e9:.2f} GHz | {gpu.fp64_lanes} |"
        for gpu in [*GPUS, CONSUMER]
    ]
    details = [
        line
        for name, function, shape in STEPS[:1] + STEPS[3:4] + STEPS[7:8] + STEPS[10:11]
        for line in work_table(name, function(shape))
    ]
    return "\n".join(
        [
            "# Estimated times on a GPU",
            "",
            wrapped(
                """**Estimated, not measured.** The authors have not run this project on a GPU. The times on this page
                assume that each kernel is limited only by memory bandwidth or by arithmetic. If you have a GPU, `make
                gpu` writes a report that compares them with measured times. The page is written by `python
                bench/gpu_model.py`, which contains all formulas."""
            ),
            "",
            "## Steps",
            "",
            wrapped(
                """B = 1024, d = 128, C = 1,000,000, log-uniform draws, Adagrad, fp32 unless the row says otherwise.
                Training steps consist of forward, backward and update of the head, with the numbers of launches that
                `tests/emulated` checks. *Bytes* is the traffic of device memory, without caches; *host without a
                graph* is the time that Python and torch need to launch the step, a lower bound for its time unless it
                is captured in a CUDA graph."""
            ),
            "",
            *step_table(),
            "",
            "Conclusions:",
            "",
            bullet(
                "A sampled step takes tens of microseconds, less than the host needs to launch it: use a CUDA graph."
            ),
            bullet(
                "Shared draws cost a few matrix products; several hundred of them are cheaper than 64 draws per row."
            ),
            bullet(
                f"""The time of exact draws from the softmax grows with C, that of draws from trees with log C. On an
                H100 with a bf16 table, exact draws are cheaper than a kernel tree that follows its rows up to about
                {even_classes(kernel_draws, 2):,} classes with D = 128 features and up to about
                {even_classes(functools.partial(kernel_draws, features=1024), 2):,} with D = 1024, the default of
                `RandomFourier`; with an fp32 table, whose logits pass through device memory, up to about
                {even_classes(kernel_draws, 4):,} and
                {even_classes(functools.partial(kernel_draws, features=1024), 4):,}. A decision tree does not
                follow the rows, and its draws are cheaper at any C."""
            ),
            bullet(
                """The full softmax in chunks takes about as long as eager torch in fp32 and up to twice as long in
                bf16, where its logits stay fp32; it never stores [B, C]."""
            ),
            "",
            "## Parts",
            "",
            *details,
            "## Launches, counted",
            "",
            wrapped(
                """What the emulated runtime counts in a whole step of the head; a sort is one launch. `capturable=True`
                adds one. Where launches take longer than the work of a step, as with samplers that follow the class
                table, a CUDA graph gains most."""
            ),
            "",
            *counted_table(),
            "",
            "## fp64 in draws",
            "",
            wrapped(
                f"""A draw has the same bits on every backend, so its arithmetic is IEEE fp64 where fp32 would not
                be enough. Data-center GPUs (A100, H100, B200) do fp64 at half the rate of fp32. Consumer GPUs do it
                at 1:64, two lanes per multiprocessor. Counts are per draw, at C = 2^15; times are for B = 1024, m =
                64. *Without fp64* is what the {CONSUMER.name} would take if fp64 were as fast as the rest."""
            ),
            "",
            *fp64_table(),
            "",
            wrapped(
                """Only the kernel tree and MIDX per row are slowed down considerably. Cheaper arithmetic would change
                their draws. On a consumer GPU, use another sampler if that time matters. A draw of `Mixture` costs the
                sum of the draws of its samplers, each with the log-probabilities of the others."""
            ),
            "",
            "## Assumptions",
            "",
            "| GPU | bandwidth | fp32 | bf16, dense | multiprocessors | clock | fp64 lanes |",
            "|---|---|---|---|---|---|---|",
            *machines,
            "",
            wrapped(
                f"""Kernels reach {OF_BANDWIDTH:.0%} of the bandwidth, {OF_FP32:.0%} of fp32 and {OF_TENSOR:.0%} of
                the tensor cores. A launch costs {micro(GRAPH_LAUNCH)} in a graph and {micro(HOST_LAUNCH)} from
                Python. Logits are cut into chunks of {CHUNK >> 20} MiB. A kernel takes the longer of its memory and
                arithmetic time; kernels do not overlap. Data sheet figures are the vendor's; fp32 products do not
                use TF32. The L2 cache has {L2:g} times the bandwidth of the memory, and the product kernel of exact
                draws, which is not cuBLAS, reaches {OF_TENSOR_OWN:.0%} of the tensor cores: both are guesses."""
            ),
            "",
        ]
    )


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the page differs")
    text = page()
    if parser.parse_args().check:
        same = PAGE.exists() and PAGE.read_text(encoding="utf-8") == text
        print(f"gpu_model: {PAGE.name} is {'up to date' if same else 'not what this script writes: run it'}")
        return 0 if same else 1
    PAGE.write_text(text, encoding="utf-8")
    print(f"gpu_model: wrote {PAGE.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
