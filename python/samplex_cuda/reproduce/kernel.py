"""Final loss against the number of samples, for samplers that follow the model more or less (Blanc & Rendle 2018)."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor

import samplex_cuda as sx
from samplex_cuda.reproduce.kernel_tasks import Task, items, markov_text, text, words
from samplex_cuda.reproduce.report import COLOURS, Run
from samplex_cuda.samplers import Sampler

__all__ = ["PAPER", "TITLE", "run"]

TITLE = "Kernel-based sampling: how many samples the softmax needs"
PAPER = "G. Blanc and S. Rendle, Adaptive Sampled Softmax with Kernel Based Sampling, ICML 2018"

COUNTS = [10, 20, 40, 80, 160, 320, 640]
SYMMETRIC = ("quadratic", "quartic")
NAMES = ("uniform", "unigram", "bigram", "quadratic", "quartic", "softmax")
COLOUR = dict(zip(NAMES, ("#6e7781", "#c2710c", "#a16207", "#0f766e", "#2563eb", "#1f2328"), strict=True))
Point = dict[str, float]


class Flat(Sampler):
    """The softmax or the quartic kernel of a small table that is in training: all masses, then torch.multinomial.

    `sx.samplers.Softmax` and `Quartic` have the same distributions for tables that do not fit into [B, C].
    """

    _op = "flat"

    def __init__(self, weight: Tensor, kind: str) -> None:
        super().__init__()
        self.num_classes, self.kind, self._weight = weight.shape[0], kind, weight

    @torch.no_grad()
    def sample(self, h: Tensor | None, num_samples: int, *, exclude: Any = None, **_: Any) -> sx.Draw:
        """Draws [B, m] with their log-probabilities, never the excluded class of a row."""
        assert h is not None
        logits = h @ self._weight.T
        mass = logits.square().square().add_(1.0).log_() if self.kind == "quartic" else logits
        if exclude is not None:
            mass.scatter_(1, exclude[:, None], -math.inf)
        log_q = mass.log_softmax(1)
        ids = torch.multinomial(log_q.exp(), num_samples, replacement=True)
        return sx.Draw(ids, log_q.gather(1, ids))


def head_of(task: Task, name: str, m: int) -> sx.SampledClassifier:
    """The head with its sampler; "full" and "full, absolute" draw nothing. No bias: o = <h, w>, as in the paper."""
    classes, width = task.num_classes, task.width
    if name.startswith("full"):
        return sx.SampledClassifier(width, classes, loss=sx.losses.FullSoftmax(absolute="absolute" in name), bias=False)
    made = sx.SampledClassifier(
        width,
        classes,
        sx.samplers.Uniform(classes),
        m,
        sx.losses.SampledSoftmax(absolute=name in SYMMETRIC),
        bias=False,
    )
    sampler: Any = made.sampler
    if name == "unigram":
        sampler = sx.samplers.Unigram(task.counts + 1)
    elif name == "bigram":
        assert task.stream is not None
        sampler = sx.samplers.Bigram.from_tokens(task.stream, classes)
    elif name == "quadratic":
        sampler = sx.samplers.Quadratic(made.weight.detach(), alpha=100.0)
        return _with(made, sampler, "step")
    elif name in ("quartic", "softmax"):
        sampler = Flat(made.weight, name)
    return _with(made, sampler, None)


def _with(head: sx.SampledClassifier, sampler: Any, update: str | None) -> sx.SampledClassifier:
    head.set_sampler(sampler, update=update)
    return head


@torch.no_grad()
def evaluate(task: Task, encoder: torch.nn.Module, head: sx.SampledClassifier) -> float:
    """Mean exact loss over all classes on the held-out part."""
    encoder.eval()
    head.eval()
    total, count = 0.0, 0
    for part in task.valid:
        total += float(head(encoder(part.inputs), part.y)) * len(part.y)
        count += len(part.y)
    encoder.train()
    head.train()
    return total / count


def train(task: Task, name: str, m: int, marks: list[int], rate: float, seed: int) -> list[Point]:
    """The held-out loss at each of `marks` steps; the rate falls to a tenth along a straight line."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        encoder = task.encoder()
        head = head_of(task, name, m)
        rows = sx.optim.RowAdagrad(head.parameters(), lr=rate, initial_accumulator_value=1e-6)
        dense = torch.optim.Adagrad(encoder.parameters(), lr=0.3 * rate)
        sampled = not name.startswith("full")
        if sampled:
            head.fuse_optimizer(rows)
        order, key = torch.Generator().manual_seed(seed), sx.Key(seed)
        curve = []
        for step in range(1, marks[-1] + 1):
            factor = 1.0 - 0.9 * step / marks[-1]
            rows.param_groups[0]["lr"], dense.param_groups[0]["lr"] = rate * factor, 0.3 * rate * factor
            batch = task.batch(order)
            head(encoder(batch.inputs), batch.y, context=batch.before, key=key).backward()
            dense.step()
            dense.zero_grad(set_to_none=True)
            if not sampled:
                rows.step()
                rows.zero_grad(set_to_none=True)
            if step in marks:
                curve.append({"step": step, "loss": evaluate(task, encoder, head)})
    return curve


def needed(uniform: dict[int, float], loss: float) -> tuple[float, bool]:
    """(samples that uniform needs for this loss, whether it gets there): between its points along log m."""
    counts = sorted(uniform)
    # A loss that happens to rise with m does not make an earlier point worse.
    best = [min(uniform[k] for k in counts[: i + 1]) for i in range(len(counts))]
    if loss >= best[0]:
        return float(counts[0]), True
    for i in range(1, len(counts)):
        if best[i] <= loss:
            part = (best[i - 1] - loss) / (best[i - 1] - best[i])
            return math.exp(math.log(counts[i - 1]) + part * math.log(counts[i] / counts[i - 1])), True
    return float(counts[-1]), False


def sweep(
    r: Run, task: Task, names: list[str], counts: list[int], more: list[int], marks: list[int], rate: float
) -> Any:
    """Curves of every sampler and m, and of the two full softmaxes; uniform also at `more` m."""
    found: dict[str, Any] = {}
    jobs = [(name, m) for name in names for m in counts] + [("uniform", m) for m in more]
    with r.progress(f"{task.name}: {task.num_classes:,} classes", len(jobs) + 2) as step:
        for name in ("full", "full, absolute"):
            found[name] = train(task, name, 0, marks, rate, r.seed)
            step()
        for name, m in jobs:
            found.setdefault(name, {})[m] = train(task, name, m, marks, rate, r.seed)
            step()
    r.value(task.name, found)
    return found


def last(curve: list[Point]) -> float:
    return curve[-1]["loss"]


def report(r: Run, task: Task, found: Any, names: list[str], counts: list[int], fixed: int, stem: str) -> None:
    """Tables, figures and claims of one task."""
    shown = math.exp if task.stream is not None else float
    what = "perplexity" if task.stream is not None else "loss"
    rows: list[list[object]] = [[n, *(shown(last(found[n][m])) for m in counts)] for n in names]
    rows += [[n, *([shown(last(found[n]))] * len(counts))] for n in ("full", "full, absolute")]
    r.table(
        f"Final {what} on held-out data, {task.name}",
        ["sampler", *(f"m = {m}" for m in counts)],
        rows,
        "full: the full softmax; quadratic and quartic train and are judged with the absolute softmax.",
    )
    with r.figure(
        stem,
        f"Final {what} against samples, {task.name}, C = {task.num_classes:,}",
        "Exact over all classes, on held-out data. Dashed: the full softmax (black) and the full absolute softmax.",
        (7, 4.4),
    ) as figure:
        axes = figure.subplots()
        for name in names:
            m = sorted(found[name])
            axes.plot(m, [shown(last(found[name][k])) for k in m], color=COLOUR[name], marker="o", label=name)
        for name, colour in (("full", "#1f2328"), ("full, absolute", COLOUR["quadratic"])):
            axes.axhline(shown(last(found[name])), color=colour, lw=1, ls="--")
        axes.set_xscale("log")
        axes.set_xticks(sorted(found["uniform"]), [str(k) for k in sorted(found["uniform"])])
        axes.minorticks_off()
        if task.stream is not None:
            axes.set_yscale("log")
        axes.set_xlabel("samples m")
        axes.set_ylabel(what)
        axes.legend()
    with r.figure(
        f"{stem}_convergence",
        f"Convergence, {task.name}",
        f"Left: every sampler with m = {fixed}. Right: quadratic with every m.",
        (10, 3.8),
    ) as figure:
        left, right = figure.subplots(1, 2, sharey=True)
        for name in names:
            curve = found[name][fixed]
            left.plot([p["step"] for p in curve], [p["loss"] for p in curve], color=COLOUR[name], label=name)
        for count, colour in zip(counts, COLOURS, strict=False):
            curve = found["quadratic"][count]
            right.plot([p["step"] for p in curve], [p["loss"] for p in curve], color=colour, label=f"m = {count}")
        for name, axes in (("full", left), ("full, absolute", right)):
            axes.plot([p["step"] for p in found[name]], [p["loss"] for p in found[name]], "k--", lw=1, label=name)
            axes.set_xlabel("steps")
            axes.legend()
        left.set_ylabel("held-out loss")
    claims(r, task, found, counts)


def claims(r: Run, task: Task, found: Any, counts: list[int]) -> None:
    """What the paper says of this task."""
    full, absolute = last(found["full"]), last(found["full, absolute"])
    uniform = {m: last(curve) for m, curve in found["uniform"].items()}
    rows, ratios, open_end = [], {}, False
    for m in counts:
        loss = last(found["quadratic"][m])
        number, reached = needed(uniform, loss)
        ratios[m] = number / m
        open_end |= not reached
        rows.append(
            [
                m,
                loss,
                f"{'' if reached else 'more than '}{number:,.0f}",
                ("" if reached else "> ") + f"{number / m:.3g}",
            ]
        )
    r.table(
        f"Samples that uniform needs for the loss of quadratic, {task.name}",
        ["quadratic, m", "its loss", "uniform needs", "times"],
        rows,
        f"Uniform was run with up to {max(uniform):,} samples of {task.num_classes:,} classes.",
    )
    r.value(f"{task.name}_uniform_over_quadratic", ratios)
    quadratic = {m: last(found["quadratic"][m]) for m in counts}
    # Each against the full softmax of its own kind: the floor of the absolute softmax is another one.
    (wide, there), (few_draws, _) = needed(uniform, full + 0.1), needed(quadratic, absolute + 0.1)
    own = wide / few_draws
    r.value(f"{task.name}_within_0.1", {"uniform": wide, "reached": there, "quadratic": few_draws})
    r.claim(
        f"Fewer samples than uniform, {task.name}",
        "quadratic needs one to two orders of magnitude fewer samples",
        f"to come within 0.1 nats of one's own full softmax: quadratic {few_draws:.0f}, uniform "
        f"{'' if there else 'more than '}{wide:.0f}: {own:.0f} times; for the loss of quadratic at m = "
        + ", ".join(f"{m}: {ratios[m]:.2g}" for m in counts if m <= 80)
        + " times",
        holds=own >= 10,
        note="the absolute softmax, which quadratic trains, ends above the softmax here, so that the second numbers "
        "fall with m" + (f"; uniform was tried up to m = {max(uniform)}" if open_end else ""),
    )
    spread = [last(found["softmax"][m]) for m in counts]
    r.claim(
        f"Softmax sampling, {task.name}",
        "final quality does not depend on m: there is no bias",
        f"loss {min(spread):.3f} to {max(spread):.3f} over m = {counts[0]} to {counts[-1]}; full softmax {full:.3f}",
        holds=max(spread) - min(spread) < 0.25 * (uniform[counts[0]] - full),
        note="holds: the spread is below a quarter of the gap of uniform at the smallest m",
    )
    few = next((m for m in counts if last(found["quadratic"][m]) <= absolute + 0.05), None)
    r.claim(
        f"Tens to hundreds of samples are enough, {task.name}",
        "quadratic reaches the loss of the full softmax with tens to hundreds of samples",
        f"within 0.05 of the full absolute softmax ({absolute:.3f}) "
        + ("with no m tried" if few is None else f"from m = {few} on"),
        holds=few is not None,
    )
    r.claim(
        f"Absolute softmax, {task.name}",
        "the absolute softmax, unsampled, performs very similarly to the softmax",
        f"{absolute:.3f} against {full:.3f}",
        holds=abs(absolute - full) < 0.1,
        note="holds: closer than 0.1 nats",
    )
    if len(counts) > 3:
        a, b = found["quadratic"][counts[-2]], found["quadratic"][counts[-1]]
        apart = max(abs(p["loss"] - q["loss"]) for p, q in zip(a, b, strict=True))
        r.claim(
            f"Once the bias is gone, {task.name}",
            "more samples do not speed convergence",
            f"quadratic with m = {counts[-2]} and {counts[-1]}: at most {apart:.3f} apart along training",
            holds=apart < 0.1,
            note="holds: less than 0.1 nats",
        )


def theorem(r: Run) -> None:
    """Theorem 1.1 and equations 12 and 13 by enumeration of all samples: six classes, two draws."""
    n, m = 6, 2
    generator = torch.Generator().manual_seed(r.seed)
    o = torch.randn(n, generator=generator, dtype=torch.float64)
    e, target = o.exp(), 0
    p = e / e.sum()

    def bias(q: Tensor, classes: list[int], keep: bool = False) -> tuple[float, float, float]:
        """(largest error of E[sum p'], E[p'_t] - p_t, largest error of the sum of exp o')."""
        mean, worst = torch.zeros(n, dtype=torch.float64), 0.0
        for draw in itertools.product(classes, repeat=m):
            ids = torch.tensor(draw)
            weight = e[ids] / (m * q[ids])
            total = weight.sum() if keep else (weight * (ids != target)).sum()
            worst = max(worst, abs(float(total - (e.sum() - e[target]))))
            chance = q[ids].prod()
            mean[target] += chance * e[target] / (e[target] + total)
            mean.index_add_(0, ids, chance * weight / (e[target] + total))
        return float((mean - p).abs().max()), float(mean[target] - p[target]), worst

    others = list(range(1, n))
    soft, flat = e.clone(), torch.ones(n, dtype=torch.float64)
    soft[target] = flat[target] = 0.0
    exact, uniform = bias(soft / soft.sum(), others), bias(flat / flat.sum(), others)
    hits = bias(p, list(range(n)), keep=True)
    r.value("theorem_1_1", {"softmax": exact, "uniform": uniform, "softmax_with_hits": hits})
    r.claim(
        "Theorem 1.1, enumerated",
        "sampled softmax is unbiased if and only if q is the softmax",
        f"bias {exact[0]:.0e} for q = softmax, {uniform[0]:.3f} for uniform (p_t too high by {uniform[1]:.3f})",
        holds=exact[0] < 1e-12 and uniform[1] > 1e-3 and exact[2] < 1e-12,
        note=f"q lives on the negatives; where the target may be drawn again and is kept, even the softmax is off by "
        f"{hits[0]:.3f}",
    )


def language(r: Run) -> Task:
    """The language model: WikiText-2 where it is, otherwise a made-up text."""
    classes = r.scale(quick=200, default=2000, full=10_000)
    width = r.scale(quick=8, default=32, full=200)
    tokens = r.scale(quick=5_000, default=400_000, full=10**9)
    size: dict[str, Any] = {
        "windows": r.scale(quick=4, default=8, full=20),
        "length": r.scale(quick=8, default=16, full=35),
    }
    folder = r.folder("wikitext2")
    if folder is not None:
        files = {part: next(iter(sorted(folder.glob(f"*{part}*"))), None) for part in ("train", "valid")}
        if files["train"] is None or files["valid"] is None:
            raise ValueError(f"reproduce kernel: {folder} must have a train and a valid file, got neither or one")
        stream, known = words(files["train"], classes, most=tokens)
        valid, _ = words(files["valid"], classes, known, most=r.scale(quick=1000, default=12_000, full=10**9))
        r.deviation(
            "The Penn Tree Bank is replaced by WikiText-2, its vocabulary cut to the "
            f"{classes:,} most frequent words ({len(stream):,} training tokens)."
        )
        return text("WikiText-2", stream, valid, classes, width, recurrent=r.full, **size)
    stream = markov_text(classes, min(tokens, 1_000_000), r.seed)
    valid = stream[-r.scale(quick=1000, default=12_000, full=50_000) :]
    r.deviation(f"The Penn Tree Bank is replaced by a made-up Markov text of {classes:,} words.")
    return text("made-up text", stream[: -len(valid)], valid, classes, width, recurrent=r.full, **size)


def run(r: Run) -> None:
    """All parts."""
    theorem(r)
    counts = r.scale(quick=[10, 40], default=COUNTS, full=COUNTS)
    marks = r.scale(quick=[10, 20], default=[30, 60, 125, 250, 375, 500], full=[500 * k for k in range(1, 41)])
    more = r.scale(quick=[80], default=[1280], full=[1280, 2560, 5120])
    fixed = r.scale(quick=10, default=40, full=40)
    task = language(r)
    r.text(f"## Language model\n\nNext word among {task.num_classes:,}, d = {task.width}.")
    found = sweep(r, task, list(NAMES), counts, more, marks, rate=r.scale(quick=0.3, default=0.3, full=0.1))
    report(r, task, found, list(NAMES), counts, fixed, "headline")
    task = items(
        r.scale(quick=200, default=5000, full=100_000), r.scale(quick=2000, default=200_000, full=5_000_000),
        r.scale(quick=8, default=32, full=64), 1.0, 128, r.seed,
    )  # fmt: skip
    names = ["uniform", "quadratic", "softmax"]
    r.text(f"## Recommender\n\nAn item of {task.num_classes:,} from made-up user features, d = {task.width}.")
    found = sweep(r, task, names, counts, more, marks, rate=r.scale(quick=0.3, default=0.3, full=0.1))
    report(r, task, found, names, counts, fixed, "recommender")
    r.deviation(
        "YouTube10k and YouTube100k are Google's own data: a synthetic recommender stands for them, user features and "
        "no previous videos, with the paper's three samplers."
    )
    if not r.full:
        r.deviation(
            "The language model is a feed-forward one over three words with 32 units, not an LSTM with 200; training "
            "is short and the same for all (500 steps of 128 words). --full takes a two-layer LSTM with 200 units."
        )
    r.deviation(
        "One learning rate for all samplers (Adagrad); the LSTM of --full starts every window of 35 words from zero."
    )
    r.deviation(
        "The paper's proof (Theorem 1.1) has q on the negatives only; every sampler here excludes the target exactly, "
        "by the distribution of the others, and the positive's logit stays uncorrected."
    )
    r.deviation(
        "Quadratic is the tree of this library with leaves of D/d classes, drawn and updated after every step; "
        "quartic and softmax, of which the paper gives no sublinear form, are drawn from all masses."
    )
    r.deviation("The paper's figures could not be read in numbers: its claims are taken from the text.")
