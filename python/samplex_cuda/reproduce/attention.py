"""Attention with trained embeddings selects important tokens (Wu et al. 2025): lemmas, flow, and the scatter plots."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from samplex_cuda.reproduce import attention_theory as theory
from samplex_cuda.reproduce.attention_models import (
    IRRELEVANT,
    Corpus,
    OneLayer,
    TwoLayer,
    accuracy,
    imdb,
    k_level,
    posterior_difference,
    signed_frequency,
    slope,
    spearman,
    train,
)
from samplex_cuda.reproduce.report import COLOURS, Run

__all__ = ["PAPER", "TITLE", "run"]

TITLE = "Attention with trained embeddings selects important tokens"
PAPER = (
    "D. Wu, A. Shevchenko, S. Oymak and M. Mondelli, Attention with Trained Embeddings Provably Selects Important "
    "Tokens, NeurIPS 2025"
)


def _generator(r: Run, part: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 * r.seed + part)


def _random_corpus(count: int, length: int, tokens: int, generator: torch.Generator) -> Corpus:
    labels = torch.ones(count)
    labels[::2] = -1
    return Corpus(torch.randint(tokens, (count, length), generator=generator), labels, tokens)


# ---------------------------------------------------------------------------------------------------- E1
def one_step(r: Run) -> None:
    """Lemma 4.1: what one gradient step does, over d."""
    dims = r.scale(quick=[256, 1024, 4096], default=[256, 1024, 4096, 16384], full=[256, 1024, 4096, 16384, 65536])
    corpus = _random_corpus(400, 32, 200, _generator(r, 1))
    found = []
    with r.progress("Lemma 4.1", len(dims)) as step:
        for dim in dims:
            found.append(theory.first_step(corpus, dim, 1.0, _generator(r, 2)))
            step()
    errors = [max(f.error_s, f.error_p) for f in found]
    bounds = [11 * d**-0.25 for d in dims]
    signal = found[0].signal
    rate = slope([float(d) for d in dims], [f.error_s for f in found])
    rows: list[list[object]] = [
        [d, f.error_s, f.error_p, b, signal] for d, f, b in zip(dims, found, bounds, strict=True)
    ]
    columns = ["d", "max err_s / rate", "err_p / rate", "bound 11 d^(-1/4)", "max alpha_s / 2"]
    r.table("Lemma 4.1: one gradient step, |S| = 200, T = 32, n = 400", columns, rows)
    largest = dims[-1]
    r.claim(
        "Lemma 4.1: E^1 = E^0 + (rate / 2) alpha v + err",
        "|err| <= 11 rate d^(-1/4)",
        f"largest err / bound {max(e / b for e, b in zip(errors, bounds, strict=True)):.1e}",
        holds=all(e <= b for e, b in zip(errors, bounds, strict=True)),
        note=f"at d = {largest:,} the bound is {bounds[-1] / found[-1].error_s:,.0f} times err_s",
    )
    r.claim(
        "its rate in d",
        "d^(-1/4), an upper bound",
        f"err_s falls like d^({rate:.2f})",
        holds=rate <= -0.25,
        note="close to -1/2",
    )
    r.claim(
        "the step shows the importance of tokens",
        "the alpha v term is what is left",
        f"max alpha / 2 = {signal:.2e}, max err_s = {found[-1].error_s:.1e} at d = {largest:,}",
        holds=found[-1].error_s < 0.1 * signal,
    )
    r.value("lemma_4_1", {"d": dims, "err_s": [f.error_s for f in found], "err_p": [f.error_p for f in found],
                          "slope": rate})  # fmt: skip
    with r.figure("lemma_4_1", "Lemma 4.1: the error of one step falls like d^(-1/2)") as fig:
        axes = fig.add_subplot()
        axes.loglog(dims, bounds, "--", color=COLOURS[6], label="the bound, 11 d^(-1/4)")
        axes.loglog(dims, [f.error_s for f in found], "o-", label="max err_s / rate")
        axes.loglog(dims, [f.error_p for f in found], "s-", label="err_p / rate")
        axes.axhline(signal, color=COLOURS[3], lw=1, label="max alpha / 2: what is to be seen")
        axes.set_xlabel("d")
        axes.legend()


# ---------------------------------------------------------------------------------------------------- E2, E4, E6
def gradients(r: Run) -> None:
    """Lemmas A.1, A.2, 4.4, A.4, B.1 and B.2 as numbers."""
    g = _generator(r, 3)
    corpus = _random_corpus(6, 5, 9, g)
    embedding, p, v = theory.start(9, 7, g)
    leaves = embedding.clone().requires_grad_(), p.clone().requires_grad_()
    d_embedding, d_p = torch.autograd.grad(theory.loss_of(corpus, *leaves, v), leaves)
    want_embedding, want_p = theory.lemma_a1(corpus, embedding, p, v)
    off = max(float((d_embedding - want_embedding).abs().max()), float((d_p - want_p).abs().max()))
    step = 1e-6
    unit = torch.randn(7, generator=g, dtype=torch.float64)
    around = [float(theory.loss_of(corpus, embedding, p + s * step * unit, v)) for s in (1, -1)]
    finite = abs((around[0] - around[1]) / (2 * step) - float(d_p @ unit))
    r.claim(
        "Lemmas A.1 and A.2: the gradients",
        "printed sums over pairs",
        f"the fused op against them {off:.1e}, against finite differences {finite:.1e}",
        holds=off < 1e-14 and finite < 1e-9,
    )
    # Lemma 4.4: a direction that scores all tokens of a sequence alike.
    wide, wide_p, wide_v = theory.start(9, 64, g)
    alike = torch.linalg.lstsq(wide, torch.ones(9, 1, dtype=torch.float64)).solution.squeeze(1)
    leaf = wide_p.clone().requires_grad_()
    (slope_p,) = torch.autograd.grad(theory.loss_of(corpus, wide, leaf, wide_v), leaf)
    along = abs(float(alike @ slope_p)) / float(alike.norm() * slope_p.norm())
    r.claim(
        "Lemma 4.4: a direction that selects every token",
        "zero gradient along it",
        f"|cos| with the gradient {along:.1e}",
        holds=along < 1e-12,
    )
    rows, length = embedding[corpus.ids] @ (8 * p), corpus.ids.shape[1]
    q = rows.softmax(1)
    top = rows.max(1, keepdim=True).values
    behind = top - rows
    lower, upper = 1 / (length * behind.exp()), 1 / (1 + behind.exp())
    others = behind > 0
    bounds = bool((q.max(1).values >= 1 / length).all() and (q[others] <= upper[others] + 1e-15).all())
    r.claim(
        "Lemma A.4: bounds on the attention",
        "1/T <= q_*, 1/(T e^tau) <= q_j <= 1/(1 + e^tau)",
        "all of them" if bounds else "one fails",
        holds=bounds and bool((q >= lower - 1e-15).all()),
    )
    r.deviation(
        "Lemma A.4 (3): its proof writes q of the selected token where it bounds q_j; the statement is checked."
    )
    rate, dim = 10.0, 1024
    data = theory.assumption_1(4, 4)
    after = theory.first_step(data, dim, rate, g)
    size, size_p = float(after.embedding.norm(dim=1).max()), float(after.p.norm())
    loss = float(theory.loss_of(data, after.embedding, after.p, after.v))
    alpha = signed_frequency(data)[data.ids].mean(1) * data.labels
    bound = float(torch.nn.functional.softplus(-rate / 2 * alpha + 1 / (22 * rate)).mean())
    bound_p = 2 + 11 * rate * dim**-0.25
    r.claim(
        "Lemmas B.1 and B.2: sizes and loss after the first step",
        f"|E_s| <= {2 * (1 + 2 * rate):g}, |p| <= {bound_p:.1f}, loss <= {bound:.4f}",
        f"{size:.2f}, {size_p:.2f}, {loss:.4f}",
        holds=size <= 2 * (1 + 2 * rate) and size_p <= bound_p and loss <= bound,
        note=f"rate {rate:g}, d = {dim:,}; B.2 asks for d >= (88 rate^2 + ...)^8, about 10^32",
    )


# ---------------------------------------------------------------------------------------------------- E3, E5
def max_margin_flow(r: Run) -> None:
    """Theorem 4.3: the flow on p against the solution of the quadratic program."""
    norm = r.scale(quick=60.0, default=400.0, full=1000.0)
    length = r.scale(quick=0.25, default=0.1, full=0.1)
    data = theory.assumption_1(4, 4)
    rates = [10.0, 100.0]
    found: dict[float, Any] = {}
    with r.progress("gradient flow", len(rates) + 1) as step:
        for rate in rates:
            start = theory.first_step(data, 1024, rate, _generator(r, 4))
            found[rate] = (start, theory.flow(data, start, norm, length))
            step()
        textbook = theory.flow(data, found[rates[0]][0], norm, length, fused=False, most=len(found[rates[0]][1].norms))
        step()
    marks = [m for m in (20.0, 100.0, 400.0, 1000.0) if m <= norm] or [20.0]
    rows: list[list[object]] = [[rate, *[f.cosine_at(m) for m in marks], f.selected] for rate, (_, f) in found.items()]
    rows.append(["10, q (g - f)", *[textbook.cosine_at(m) for m in marks], textbook.selected])
    ended = f"it ends at |p| = {textbook.norms[-1]:.0f} with cosine {textbook.cosines[-1]:.3f}"
    columns = ["rate of the first step", *[f"cosine at |p| = {m:g}" for m in marks], "important tokens selected"]
    r.table("Theorem 4.3: the direction of p, n = 8, T = 4, d = 1,024", columns, rows,
            "The last line takes the gradient as q (g - f), as eager torch does: from margins of about 36 on it is "
            f"rounding noise; in as many steps {ended}.")  # fmt: skip
    flows = [f for _, f in found.values()]
    last = [f.cosine_at(marks[-1]) for f in flows]
    falls = all(b <= a + 1e-12 for f in flows for a, b in zip(f.losses, f.losses[1:], strict=False))
    r.claim("Theorem 4.3: |p| grows without bound", "yes", f"to {min(f.norms[-1] for f in flows):.0f}, where it was "
            f"stopped; the loss never rises: {'yes' if falls else 'no'}",
            holds=all(f.norms[-1] >= norm for f in flows) and falls)  # fmt: skip
    r.claim("Theorem 4.3 (1): all important tokens are selected", "yes", "yes" if all(f.selected for f in flows)
            else "no", holds=all(f.selected for f in flows))  # fmt: skip
    r.claim(
        "Theorem 4.3 (2): the direction is the max-margin one",
        "in the limit",
        f"cosine {min(last):.6f} at |p| = {marks[-1]:g}",
        holds=min(last) > (0.98 if norm < 100 else 0.999),
        note=f"{textbook.cosines[-1]:.2f} at |p| = {textbook.norms[-1]:.0f} with the textbook gradient",
    )
    start = found[rates[0]][0]
    one, margins = theory.max_margin(data, start.embedding)
    other, _ = theory.max_margin(data, start.embedding, start_at=3.0)
    gap, tight, n = float((one - other).norm() / one.norm()), float(margins.min()), len(data.labels)
    r.claim(
        "Lemmas 4.2, C.7, C.8: the quadratic program",
        f"one solution, a tight constraint, |p-hat| <= 4 n = {4 * n}",
        f"two starts differ by {gap:.0e}, smallest margin {tight:.9f}, |p-hat| = {float(one.norm()):.2f}",
        holds=gap < 1e-8 and abs(tight - 1) < 1e-8 and float(one.norm()) <= 4 * n,
    )
    r.deviation("Theorem 4.3 asks for rate >= 4 n^2 T^2 and d >= (88 rate^2 + ...)^8, which no machine has; n = 8, "
                "T = 4, d = 1,024 and rates 10 and 100 instead.")  # fmt: skip
    r.deviation("Lemma 4.5: its inequality is reversed; text and proof need |p-hat| < (1 - mu) |p-hat'|.")
    r.value("flow", {str(rate): {"norms": f.norms[::20], "cosines": f.cosines[::20]} for rate, (_, f) in found.items()})
    with r.figure("flow", "The flow on p turns to the max-margin direction") as fig:
        axes = fig.add_subplot()
        for rate, (_, f) in found.items():
            axes.loglog(f.norms, [max(1 - c, 1e-12) for c in f.cosines], label=f"rate {rate:g}, stable gradient")
        axes.loglog(textbook.norms, [max(1 - c, 1e-12) for c in textbook.cosines], "--", color=COLOURS[3],
                    label="rate 10, gradient as q (g - f)")  # fmt: skip
        axes.set_xlabel("|p|")
        axes.set_ylabel("1 - cosine with the solution of the QP")
        axes.legend()


# ---------------------------------------------------------------------------------------------------- E7, E8, E9
def scatter(fig: Any, panels: list[tuple[str, Tensor, Tensor, Tensor]]) -> None:
    """Rows of <E_s, p> and <E_s, v> against the posterior difference."""
    grid = fig.subplots(len(panels), 2, squeeze=False)
    for row, (name, difference, on_p, on_v) in zip(grid, panels, strict=True):
        for axes, values, what in zip(row, (on_p, on_v), ("p", "v"), strict=True):
            points = axes.scatter(difference, values, s=5, c=difference, cmap="coolwarm", vmin=-1, vmax=1, lw=0)
            points.set_edgecolor("#6e777133")
            axes.set_title(f"{name}: E_s . {what}")
            axes.set_xlabel("difference of posteriors (18)")


def measure(model: OneLayer, corpus: Corpus, keep: Tensor) -> tuple[dict[str, float], tuple[Tensor, Tensor, Tensor]]:
    """Rank correlations of <E_s, p> with |(18)| and of <E_s, v> with (18), over the tokens of `keep`; the points."""
    difference, _ = posterior_difference(corpus)
    rows = model.rows()
    on_p, on_v = rows @ model.p.detach(), rows @ model.v.detach()
    difference, on_p, on_v = difference[keep], on_p[keep], on_v[keep]
    return {"p": spearman(on_p, difference.abs()), "v": spearman(on_v, difference)}, (difference, on_p, on_v)


def synthetic(r: Run) -> list[tuple[str, Tensor, Tensor, Tensor]]:
    """Figure 2: the K-level model, with v fixed and with v trained."""
    count = r.scale(quick=128, default=2000, full=10_000)
    length = r.scale(quick=64, default=256, full=256)
    dim = r.scale(quick=16, default=128, full=2048)
    epochs = r.scale(quick=4, default=60, full=196)
    rate = r.scale(quick=1e-2, default=1e-3, full=1e-4)
    corpus = k_level(count, length, _generator(r, 5))
    panels: list[tuple[str, Tensor, Tensor, Tensor]] = []
    rows: list[list[Any]] = []
    with r.progress("K-level data", 2 * epochs) as step:
        for train_v in (True, False):
            model = OneLayer(corpus.num_tokens, dim, train_v=train_v, generator=_generator(r, 6))
            losses = train(model, corpus, epochs=epochs, rate=rate, decay=1e-4, batch=128,
                           milestones=[epochs * 100 // 196], generator=_generator(r, 7), step=step)  # fmt: skip
            _, counts = posterior_difference(corpus)
            relevant = (torch.arange(corpus.num_tokens) >= IRRELEVANT) & (counts > 0)
            found, points = measure(model, corpus, counts > 0)
            only, _ = measure(model, corpus, relevant)
            name = "v trained" if train_v else "v fixed"
            rows.append([name, losses[-1], found["p"], only["p"], found["v"], only["v"]])
            if train_v:
                panels.append(("K-level data", *points))
    columns = ["model (1)", "loss", "rho of E.p and |(18)|", "of relevant tokens", "rho of E.v and (18)",
               "of relevant tokens"]  # fmt: skip
    r.table(f"Figure 2: n = {count:,}, T = {length}, d = {dim}, {epochs} epochs", columns, rows)
    ok = min(row[2] for row in rows) > 0.3 and min(row[5] for row in rows) > 0.7
    r.claim(
        "Figure 2: E.v follows the posterior difference, E.p its modulus",
        "a straight line, a V",
        f"rank correlation {rows[0][4]:.2f} and {rows[0][2]:.2f} (v trained), {rows[1][4]:.2f} and {rows[1][2]:.2f} "
        "(v fixed)",
        holds=None if r.quick else ok,
    )
    r.value("figure_2", {row[0]: row[1:] for row in rows})
    r.deviation("Eq. 15 lacks a factor delta~ in its third case (the masses add up to 1.07); with it they add up to 1 "
                "and Eq. 16 follows.")  # fmt: skip
    r.deviation("|S_k| = 4 + 2^(k-1) gives 1,538 tokens; 4 + 2^k gives the 2,048 that the paper states.")
    r.deviation("The paper says that all tokens of the synthetic data appear equally often; under Eq. 15 an irrelevant "
                "one appears about 20 times as often as a relevant one.")  # fmt: skip
    r.deviation("n, the betas of AdamW and whether v is trained are not given: both ways of v, torch's betas.")
    if not r.full:
        r.deviation(f"Figure 2 at a smaller size: d = {dim} (2,048), {epochs} epochs (196), rate {rate:g} (1e-4), "
                    f"n = {count:,}.")  # fmt: skip
    return panels


def reviews(r: Run) -> list[tuple[str, Tensor, Tensor, Tensor]]:
    """Figures 3 and 1: IMDB with one layer and with two."""
    folder = r.folder("imdb")
    r.deviation("Yelp is left out: it is not among the data of this project.")
    if folder is None:
        return []
    count = r.scale(quick=200, default=6000, full=25_000)
    fewest = r.scale(quick=5, default=20, full=50)
    length = r.scale(quick=32, default=128, full=256)
    sizes = {
        "one layer": (OneLayer, r.scale(quick=8, default=128, full=2048), r.scale(quick=2, default=15, full=500),
                      count),
        "two layers": (TwoLayer, r.scale(quick=8, default=48, full=2048), r.scale(quick=2, default=8, full=500),
                       r.scale(quick=100, default=2500, full=25_000)),
    }  # fmt: skip
    corpus, held_out = imdb(folder, count, r.scale(quick=100, default=2000, full=25_000), length, fewest, r.seed)
    panels: list[tuple[str, Tensor, Tensor, Tensor]] = []
    rows: list[list[Any]] = []
    found: dict[str, dict[str, float]] = {}
    with r.progress("IMDB", sum(epochs for _, _, epochs, _ in sizes.values())) as step:
        for name, (kind, dim, epochs, n) in sizes.items():
            part = Corpus(corpus.ids[:n], corpus.labels[:n], corpus.num_tokens, corpus.words)
            model = kind(corpus.num_tokens, dim, train_v=True, generator=_generator(r, 8))
            losses = train(model, part, epochs=epochs, rate=0.01, decay=1e-8, batch=128,
                           milestones=[max(1, epochs // 2), max(2, epochs * 3 // 4)], generator=_generator(r, 9),
                           step=step)  # fmt: skip
            _, counts = posterior_difference(part)
            keep = counts >= fewest
            found[name], points = measure(model, part, keep)
            right = accuracy(model, held_out)
            rows.append([name, n, dim, epochs, losses[-1], right, found[name]["p"], found[name]["v"]])
            panels.append((f"IMDB, {name}", *points))
            strongest = points[2].abs().topk(min(12, len(points[2]))).indices
            kept = keep.nonzero().squeeze(1)
            named = [f"{corpus.words[kept[i]]} ({float(points[0][i]):+.2f})" for i in strongest.tolist()]
            r.text(f"{name}, tokens with the largest |E.v|, and their difference of posteriors: {', '.join(named)}")
    columns = ["model", "reviews", "d", "epochs", "loss", "test accuracy", "rho of E.p and |(18)|",
               "rho of E.v and (18)"]  # fmt: skip
    r.table(f"Figures 3 and 1: IMDB, {corpus.num_tokens:,} tokens, T = {length}", columns, rows)
    one, two = found["one layer"], found["two layers"]
    r.claim("Figure 3: IMDB, one layer", "E.v follows (18), E.p its modulus", f"rank correlation {one['v']:.2f} and "
            f"{one['p']:.2f}", holds=None if r.quick else one["v"] > 0.5 and one["p"] > 0.2)  # fmt: skip
    r.claim("Figure 1: IMDB, two layers", "the same", f"rank correlation {two['v']:.2f} and {two['p']:.2f}",
            holds=None if r.quick else two["v"] > 0.5 and two["p"] > 0.2)  # fmt: skip
    r.claim("loss at the end", "1e-1 with one layer, 1e-5 with two", f"{rows[0][4]:.1e} and {rows[1][4]:.1e}",
            note="far fewer epochs here" if not r.full else "")  # fmt: skip
    r.value("imdb", {row[0]: row[1:] for row in rows})
    r.deviation(
        "IMDB: words of letters, a short list of stop words and a few endings cut off, in place of the paper's stemmer "
        "and BERT's word pieces; sequences cut and padded to one length (not given)."
    )
    if not r.full:
        r.deviation(
            f"IMDB at a smaller size: {count:,} reviews (50,000; {rows[1][1]:,} for two layers), tokens with at least "
            f"{fewest} occurrences (50), d = {rows[0][2]} and {rows[1][2]} (2,048), {rows[0][3]} and {rows[1][3]} "
            "epochs (500)."
        )
    return panels


def run(r: Run) -> None:
    """All experiments of the paper."""
    one_step(r)
    gradients(r)
    max_margin_flow(r)
    panels = synthetic(r) + reviews(r)
    caption = "Each point is a token; color is its difference of posteriors."
    with r.figure("headline", "Embeddings learn which tokens matter", caption, (8, 0.4 + 2.7 * len(panels))) as fig:
        scatter(fig, panels)
    assert all(math.isfinite(float(t.abs().max())) for _, *parts in panels for t in parts)
