"""`samplex reproduce contrastive`: Wen 2020, which has theorems and no experiments; these are ours.

Three parts: the identities of the paper, exactly; Algorithm 1 and what its lemmas say of width, gradients and distance;
and, beyond the paper, what negatives with the log-Q correction are worth on held-out data.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from samplex_cuda.functional import contrastive
from samplex_cuda.reproduce import contrastive_model as model
from samplex_cuda.reproduce.contrastive_model import Encoder, Trace
from samplex_cuda.reproduce.contrastive_practice import METHODS, GowallaTask, Outcome, Task, TwoViewTask, compare
from samplex_cuda.reproduce.report import COLOURS, Run
from samplex_cuda.rng import Key

__all__ = ["PAPER", "TITLE", "run"]

TITLE = "Convergence of end-to-end contrastive learning"
PAPER = "Zixin Wen, Convergence of End-to-End Training in Deep Unsupervised Contrastive Learning, 2020."

N, INPUTS, OUTPUTS, DEPTH, K, DELTA = 6, 8, 32, 2, 2, 0.6
LEVEL = 0.5  # of the loss, at which widths are compared
WITHOUT, WITH = "in-batch, without log Q", "sampled by frequency, with log Q"


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _setup(width: int, seed: int, depth: int = DEPTH) -> tuple[Tensor, Encoder, Encoder]:
    generator = torch.Generator().manual_seed(seed)
    x = model.separated_points(N, INPUTS, DELTA, generator)
    return x, *(Encoder(INPUTS, width, OUTPUTS, depth, generator) for _ in range(2))  # type: ignore[return-value]


def _largest(pairs: Iterator[tuple[Tensor, Tensor]]) -> float:
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


# ------------------------------------------------------------------------------------------------ identities
def _identities(r: Run) -> None:
    x, query, key = _setup(64, r.seed)
    q, keys = query(x), key(x)
    facts = model.loss_vectors(q.detach(), keys.detach(), K)
    error = _largest(zip(facts, model.unit_gradients(q, keys, K), strict=True))
    r.claim(
        "Facts 1 and 2: the loss vectors",
        "formulas for dL/dq and dL/dk",
        f"as n dL/dq, n dL/dk, with the sum to k: off by {error:.0e}",
        holds=error < 1e-12,
    )
    total = float(facts[1].sum(0).abs().max())
    r.claim(
        "the loss vectors of the keys sum to 0",
        "follows from Fact 2",
        f"largest entry {total:.0e}",
        holds=total < 1e-12,
    )
    loss = model.objective(q, keys, K)
    error = 0.0
    for encoder, vectors in ((query, facts[0]), (key, facts[1])):
        wanted = torch.autograd.grad(loss, list(encoder.weights), retain_graph=True)
        error = max(error, _largest(zip(model.formula_gradients(encoder, x, vectors), wanted, strict=True)))
    r.claim(
        "gradients of the weights by Back and D (Section 5.2)",
        "the printed formula",
        f"off by {error:.0e} in every layer of both encoders",
        holds=error < 1e-12,
    )
    full = torch.nn.functional.cross_entropy(q @ keys.T, torch.arange(N))
    error = abs(float((contrastive(q, keys, num_negatives=N - 1, key=Key(r.seed)) - full).detach()))
    r.claim("k = n - 1", "all other points are negatives", f"the full softmax, off by {error:.0e}", holds=error < 1e-12)
    mean, count = torch.zeros((), dtype=torch.float64), 0
    for i in range(N):
        for chosen in itertools.combinations([j for j in range(N) if j != i], K):
            mean = mean + contrastive(q[i : i + 1], keys, torch.tensor([i]), torch.tensor([chosen]))
            count += 1
    weights = [*query.weights, *key.weights]
    error = _largest(
        zip(
            torch.autograd.grad(mean / count, weights, retain_graph=True),
            torch.autograd.grad(loss, weights),
            strict=True,
        )
    )
    r.claim(
        "the stochastic form",
        "not analysed (remark after Algorithm 1)",
        f"its gradient is unbiased: mean over all {count} draws off by {error:.0e}",
        holds=error < 1e-12,
    )


# ------------------------------------------------------------------------------------------------ Algorithm 1
def _reached(trace: Trace, values: list[float], level: float) -> float:
    """`values` where the loss falls to `level`, by interpolation; nan where it does not."""
    for i in range(1, len(trace.loss)):
        if trace.loss[i] <= level < trace.loss[i - 1]:
            share = (trace.loss[i - 1] - level) / (trace.loss[i - 1] - trace.loss[i])
            return values[i - 1] + share * (values[i] - values[i - 1])
    return math.nan


def _training(r: Run) -> tuple[Trace, Trace]:
    width, rate = 256, 0.02
    steps = r.scale(quick=150, default=2000, full=20_000)
    every = max(1, steps // 500)
    with r.progress("Algorithm 1", 2 * steps) as step:
        x, query, key = _setup(width, r.seed)
        delta = float(torch.pdist(x).min())
        trace = model.descend(x, query, key, K, eta=rate, gamma=rate, steps=steps, record=every, done=step)
        x, query, key = _setup(width, r.seed)
        noisy = model.descend(
            x,
            query,
            key,
            K,
            eta=rate,
            gamma=rate,
            steps=steps,
            record=every,
            batch=3,
            draws=Key(r.seed, 1),
            done=step,
        )
    norms = trace.norm()
    start = math.log(K + 1)
    r.claim(
        "L_S at the start",
        f"outputs of order 1 (Corollary B.9), so about log(k + 1) = {start:.3f}",
        f"{trace.loss[0]:.3f}",
        holds=abs(trace.loss[0] - start) < 0.15,
    )
    r.claim(
        "L_S falls at every step (Section 5.3)",
        "for small step sizes",
        f"{trace.loss[0]:.3f} to {trace.loss[-1]:.2g} in {steps:,} steps; it rose at {trace.rises} of them",
        holds=trace.rises == 0,
    )
    mean = np.cumsum(norms) / np.arange(1, len(norms) + 1)
    half = len(mean) // 2
    r.claim(
        "the mean norm of the loss vectors goes to 0 (Theorem 4.2)",
        "at most epsilon after T ~ n^10 L^2 k / (delta^3 epsilon^4) steps",
        f"norm {norms[0]:.2f} to {norms[-1]:.2g}; mean over t {mean[half]:.2g} at T/2, {mean[-1]:.2g} at T = {steps:,}",
        holds=bool(norms[-1] < 0.5 * norms[0] and mean[-1] < mean[half]),
        note="the theorem's T for these sizes is above 10^8 already at epsilon = 1",
    )
    r.claim(
        "the stochastic form descends too",
        "not analysed",
        f"{noisy.loss[0]:.3f} to {noisy.loss[-1]:.2g} with 3 of 6 points and a drawn subset a step",
        holds=noisy.loss[-1] < 0.5 * noisy.loss[0],
    )
    r.value("algorithm_1", {"delta": delta, **vars(trace)})
    r.value("stochastic", vars(noisy))
    with r.figure(
        "descent",
        f"Algorithm 1: n = {N}, L = {DEPTH}, m = {width}, d = {OUTPUTS}, k = {K}, step sizes {rate:g}",
        "Left: the exact loss of Eq. 3.2. Right: norms of the loss vectors (n dL/dq and n dL/dk, all points together).",
        (9, 3.6),
    ) as fig:
        left, right = fig.subplots(1, 2)
        for one, name in ((trace, "full batch, exact expectation"), (noisy, "stochastic")):
            left.plot(np.array(one.step) + 1, one.loss, label=name)
        right.plot(np.array(trace.step) + 1, trace.query_norm, label="queries")
        right.plot(np.array(trace.step) + 1, trace.key_norm, label="keys")
        right.plot(np.array(trace.step) + 1, mean, label="both, mean up to t", ls="--")
        for axes, label in ((left, "L_S"), (right, "norm of the loss vectors")):
            axes.set(xscale="log", yscale="log", xlabel="step t + 1", ylabel=label)
            axes.legend()
    return trace, noisy


def _widths(r: Run) -> dict[int, Trace]:
    """Step sizes of order 1/m, as Theorem 4.2 has them, until the loss is below LEVEL."""
    widths = r.scale(quick=(64, 128), default=(64, 128, 256, 512, 1024), full=(64, 128, 256, 512, 1024, 2048, 4096))
    steps = 120
    traces = {}
    with r.progress("widths", steps * len(widths)) as step:
        for width in widths:
            x, query, key = _setup(width, r.seed)
            with _threads(1 if width < 512 else torch.get_num_threads()):
                traces[width] = model.descend(
                    x, query, key, K, eta=5 / width, gamma=5 / width, steps=steps, record=4, done=step
                )
    distance = {m: _reached(t, t.distance, LEVEL) for m, t in traces.items()}
    rows: list[list[object]] = []
    for m, t in traces.items():
        ratios = [*t.query_ratio, *t.key_ratio]
        rows.append([m, t.loss[0], t.loss[-1], min(ratios), max(ratios), distance[m], _reached(t, t.moved, LEVEL)])
    r.table(
        f"Width: step sizes 5 / m, {steps} steps",
        [
            "m",
            "L_S(0)",
            "L_S(T)",
            "least ratio",
            "largest ratio",
            f"distance from the start at L_S = {LEVEL:g}",
            "relative to the start",
        ],
        rows,
        "Ratio: squared norm of a gradient over m / (n d) times that of its loss vectors (Lemma 4.3), over both "
        "encoders and all recorded steps. Distance: largest spectral norm of the change of a matrix; relative: "
        "Frobenius norms of all matrices together.",
    )
    first, last = rows[0], rows[-1]
    lows, highs = [float(row[3]) for row in rows], [float(row[4]) for row in rows]  # type: ignore[arg-type]
    r.claim(
        "gradient bounds (Lemma 4.3)",
        "Omega(delta / n^2) <= ratio <= O(L), for every m",
        f"ratio between {min(lows):.2f} and {max(highs):.2f} for m = {first[0]} to {last[0]}, along training",
        holds=min(lows) > 0.05 and max(highs) < DEPTH and highs[-1] / highs[0] < 2 and lows[0] / lows[-1] < 3,
        note="the lower bound is of order 1 / n^2 = 0.03, the upper of order L = 2, constants unknown",
    )
    slope = float(np.polyfit(np.log(list(distance)), np.log(list(distance.values())), 1)[0])
    r.claim(
        "wide networks stay near their start",
        "omega of order 1 / sqrt(m): slope -0.5",
        f"{distance[widths[0]]:.3f} at m = {widths[0]} to {distance[widths[-1]]:.3f} at m = {widths[-1]}: "
        f"slope {slope:.2f}",
        holds=abs(slope + 0.5) < 0.15,
    )
    r.value("widths", {m: vars(t) for m, t in traces.items()})
    r.value("distance_slope", slope)
    return traces


def _starts(r: Run) -> None:
    """What the initialization gives, and the lemma that depth breaks."""
    rows: list[list[object]] = []
    for width in r.scale(quick=(128, 512), default=(128, 512, 2048), full=(128, 512, 2048, 8192)):
        x, query, key = _setup(width, r.seed)
        with torch.no_grad():
            norms = torch.cat([h.norm(dim=1) for e in (query, key) for h in e.layers(x)[1:]])
            outputs = torch.cat([query(x).norm(dim=1), key(x).norm(dim=1)])
        rows.append([width, norms.min().item(), norms.max().item(), outputs.min().item(), outputs.max().item()])
    r.table(
        "At the start",
        ["m", "least norm of h", "largest norm of h", "least norm of f", "largest norm of f"],
        rows,
        "Over all points, layers and both encoders.",
    )
    r.claim(
        "norms of hidden layers (Lemma B.1)",
        "in [1 - epsilon, 1 + epsilon]",
        f"{rows[-1][1]:.2f} to {rows[-1][2]:.2f} at m = {rows[-1][0]:,}",
        holds=max(abs(float(rows[-1][i]) - 1) for i in (1, 2)) < 0.2,  # type: ignore[arg-type]
    )
    x, depth = torch.eye(2, INPUTS, dtype=torch.float64), 21
    generator = torch.Generator().manual_seed(r.seed)
    with torch.no_grad():
        apart = np.mean(
            [
                [(h[0] - h[1]).norm().item() for h in Encoder(INPUTS, 512, 4, depth, generator).layers(x)[1:]]
                for _ in range(r.scale(quick=2, default=6, full=20))
            ],
            axis=0,
        )
    r.claim(
        "points stay apart (Lemma B.10)",
        "distance at least delta / 2 at every layer",
        "orthogonal points: "
        + ", ".join(f"{apart[i]:.2f} at layer {i}" for i in (0, 1, 5, 10, 20))
        + "; delta / 2 = 0.71",
        holds=bool(apart[-1] >= math.sqrt(2) / 2),
        note="true only for delta = O(1 / L), as Theorem 4.2 asks",
        at_any_size=True,
    )


# ------------------------------------------------------------------------------------------------ in practice
def _judge(r: Run, name: str, task: Task, *, tune: int, steps: list[int], what: str) -> dict[str, Outcome]:
    total = len(METHODS) * (len(task.rates) * tune + steps[-1])
    with r.progress(name, total) as step:
        found = compare(task, list(METHODS), tune=tune, steps=steps, seed=r.seed, done=step)
    rows: list[list[object]] = [
        [method, o.rate, o.tried[o.rate], o.recall[-1], o.seconds[-1]] for method, o in found.items()
    ]
    r.table(
        f"{name}: recall@20 on held-out pairs",
        ["negatives", "rate", "validation", "test", "seconds of training"],
        rows,
        what,
    )
    gap = found[WITH].recall[-1] - found[WITHOUT].recall[-1]
    r.claim(
        f"{name}: sampled negatives with log Q against in-batch without",
        "no experiment",
        f"recall@20 {found[WITH].recall[-1]:.4f} against {found[WITHOUT].recall[-1]:.4f}",
        holds=gap > 0,
        note=f"in-batch with log Q: {found['in-batch, with log Q'].recall[-1]:.4f}",
    )
    r.value(name, {method: vars(o) for method, o in found.items()})
    return found


def _practice(r: Run) -> dict[str, dict[str, Outcome]]:
    r.text(
        "## Beyond the paper: negatives with and without the log-Q correction\n\n"
        "In-batch negatives are other queries' positives, so they come by popularity; without the correction a model "
        "learns log p(key | query) - log p(key) and ranks popular keys too low. Each method has the same model and "
        "the same number of steps, and its learning rate is chosen on validation pairs."
    )
    steps = r.scale(quick=12, default=1200, full=6000)
    views = TwoViewTask(
        items=r.scale(quick=200, default=10_000, full=100_000),
        examples=r.scale(quick=4_000, default=400_000, full=4_000_000),
        held_out=r.scale(quick=200, default=5_000, full=10_000),
        seed=r.seed,
        batch=r.scale(quick=64, default=256, full=256),
        samples=r.scale(quick=63, default=255, full=255),
    )
    found = {
        "two views": _judge(
            r,
            "two views",
            views,
            tune=steps // 4,
            steps=[steps // 4, steps // 2, steps],
            what=f"{views.num_items:,} items with Zipf frequencies; batches of {views.batch}, {views.samples} sampled "
            "negatives shared by a batch, the paper's encoders with one hidden layer, Adam.",
        )
    }
    folder = r.folder("gowalla")
    if folder is not None:
        task = GowallaTask(
            folder, users=r.scale(quick=200, default=4000, full=None), samples=r.scale(quick=8, default=64, full=256)
        )
        epoch = len(task.pairs[False][0]) // task.batch
        total = r.scale(quick=6, default=2 * epoch, full=6 * epoch)
        found["Gowalla"] = _judge(
            r,
            "Gowalla",
            task,
            tune=total if r.full else total // 2,
            steps=[max(1, total // 4), total // 2, total],
            what=f"{task.num_users:,} users, {task.num_items:,} places, LightGCN's split; d = {task.dim}, batches of "
            f"{task.batch:,}, {task.samples} sampled negatives per query, row-wise Adagrad; recall over "
            f"{len(task.asked['test'][0]):,} test users.",
        )
    return found


def run(r: Run) -> None:
    """Runs everything and tells `r`.

    Example:
        >>> from pathlib import Path
        >>> from samplex_cuda.reproduce import Run, contrastive
        >>> contrastive.run(Run("contrastive", Path("runs"), quick=True))  # doctest: +SKIP
    """
    r.deviation(
        "The paper has no experiments. Its width (m >= n^12), step sizes and T are out of reach of any machine; what "
        "is measured are identities, exactly, and trends, at n = 6."
    )
    for text in model.CORRECTIONS:
        r.deviation(f"Corrected or noted: {text}")
    r.text(
        f"Sizes of the theory part: n = {N} points on the sphere of dimension {INPUTS}, at least {DELTA:g} apart; "
        f"encoders with L = {DEPTH} hidden layers and d = {OUTPUTS} outputs, Definition 3.2's initialization, float64; "
        f"k = {K} negatives, the exact expectation over all {math.comb(N - 1, K)} subsets."
    )
    with _threads(1):
        _identities(r)
        _starts(r)
        trace, _ = _training(r)
    traces = _widths(r)
    found = _practice(r)
    _headline(r, trace, traces, found)


def _headline(r: Run, trace: Trace, traces: dict[int, Trace], found: dict[str, dict[str, Outcome]]) -> None:
    panels = 2 + len(found)
    with r.figure(
        "headline",
        "Contrastive learning: Algorithm 1, distance from the start, and negatives with and without log Q",
        "Loss and loss vectors of Algorithm 1; how far the weights are from their start when the loss has halved; "
        "recall on held-out pairs by where negatives come from.",
        (3.4 * panels, 3.6),
    ) as fig:
        axes = fig.subplots(1, panels)
        t = np.array(trace.step) + 1
        axes[0].plot(t, trace.loss, label="L_S")
        axes[0].plot(t, trace.norm(), label="norm of the loss vectors")
        axes[0].set(xscale="log", yscale="log", xlabel="step t + 1", title="Algorithm 1, m = 256")
        axes[0].legend(loc="lower left")
        widths = np.array(list(traces))
        distance = np.array([_reached(one, one.distance, LEVEL) for one in traces.values()])
        axes[1].plot(widths, distance, "o-", label="measured")
        axes[1].plot(widths, distance[0] * (widths / widths[0]) ** -0.5, ls="--", color=COLOURS[6], label="1 / sqrt(m)")
        axes[1].set(xscale="log", yscale="log", xlabel="width m", title=f"distance from the start at L_S = {LEVEL:g}")
        axes[1].set_xticks(widths, [str(m) for m in widths])
        axes[1].minorticks_off()
        axes[1].legend()
        for place, (name, outcomes) in zip(axes[2:], found.items(), strict=True):
            for colour, (method, one) in zip(COLOURS[3::-1] + COLOURS[4:], outcomes.items(), strict=False):
                place.plot(one.steps, one.recall, "o-", color=colour, label=method)
            place.set(xlabel="steps", title=f"{name}: test recall@20")
            place.set_ylim(0, None)
            if name == next(iter(found)):
                place.legend(fontsize=6.5, loc="lower right")
