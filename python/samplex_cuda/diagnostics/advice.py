"""The recommendation and the warnings of a diagnosis, in words."""

from __future__ import annotations

import math

from samplex_cuda.diagnostics.report import Diagnosis, Point, SamplerResult
from samplex_cuda.heads.leak import LEAK

__all__ = ["recommend", "warn"]

NEGLIGIBLE = 0.01  # bias as a share of the gradient below which less is no gain
LARGE = 0.2  # from here on it is worth a word
STALE = 0.01  # |sampler's rows - head's| / |head's|
WORSE = 1.05  # times the bias of Uniform
SAME_COST = 1.2  # times the cost of the reference
FAR_LESS = 0.7  # times its bias
FEW_ROWS = 32
SHARED_PER_ROW = 16  # 64 draws per row, or 1,024 shared
_ORACLES = ("Softmax", "Quartic")  # O(C) a draw: never recommended without a time that says so
_FRACTIONS = {2: "half", 3: "a third", 4: "a quarter", 5: "a fifth", 6: "a sixth", 7: "a seventh", 8: "an eighth"}
_FRACTIONS |= {9: "a ninth", 10: "a tenth"}


def recommend(found: Diagnosis) -> str:
    """The cheapest sampler and m with the bias of what the head does now (or of Uniform with the largest m).

    Example:
        >>> from samplex_cuda.diagnostics import Diagnosis, SamplerResult, Point
        >>> from samplex_cuda.diagnostics.advice import recommend
        >>> one = lambda m, bias, ms: Point(m, ess=1.0, hit_rate=0.0, bias=bias, bias_leading=bias, std=1.0, step_ms=ms)
        >>> laws = [SamplerResult("Uniform", "Uniform", points=[one(32, 0.8, 1.0), one(2000, 0.04, 50.0)])]
        >>> laws += [SamplerResult("Tree", "Tree", points=[one(32, 0.04, 5.0)])]
        >>> recommend(Diagnosis(10**5, 64, 256, "sampled_softmax", False, 0, 1.0, 0, laws))[:66]
        'Tree with m = 32 gives the bias of Uniform with m = 2,000 (4 % of '
    """
    points = [(law, point) for law in found.samplers for point in law.points]
    if not points:
        return "Nothing was measured."
    reference = _reference(found)
    timed = all(point.step_ms is not None for _, point in points)
    if timed and found.busy:
        return (
            f"No recommendation: {found.lacking:.1f} cores were missing while steps were timed, because of other "
            "processes, so times cannot be compared. Run it again on a quiet machine, or without times (timed=False, "
            f"--no-timed). {_name(*reference)} has a bias of {_percent(found, reference[1])} of the gradient."
        )
    points = [pair for pair in points if _comparable(pair, reference, timed)]
    goal = max(reference[1].bias * 1.02, NEGLIGIBLE * found.gradient_norm)
    # A bias that was measured counts with its noise, except for the one that all are held against.
    good = [pair for pair in points if _upper(pair[1]) <= goal and (timed or pair[0].kind not in _ORACLES)]
    good = good if any(pair[1] is reference[1] for pair in good) else [*good, reference]
    law, best = _cheapest(good, timed)
    words = []
    if found.full_ms is not None and timed and found.full_ms + 2.0 * found.full_error <= _low(best, timed):
        words.append(
            f"The full softmax takes {_ms(found.full_ms)} ms per step here, no more than {_name(law, best)} "
            f"({_ms(best.step_ms)} ms), and has no bias: loss='full_softmax' is the better choice at this C."
        )
    if (law is reference[0] and best is reference[1]) or not _clearly_less(best, reference[1], timed):
        words.append(
            f"Keep {_name(*reference)}: bias {_percent(found, reference[1])} of the gradient; no other setting "
            f"measured here reaches this {'in clearly less time' if timed else 'with fewer samples'}."
        )
    else:
        words.append(_compare(found, law, best, reference, timed))
        words += _uniform_equivalent(found, law, best)
    words += _for_the_same(found, points, reference, best, timed)
    chosen = reference[1] if any(word.startswith("Keep") for word in words) else best
    if found.relative(chosen.bias) > LARGE:
        lowest = min(points, key=lambda pair: pair[1].bias)
        words.append(f"The bias is still large; the lowest measured is {_percent(found, lowest[1])}, {_name(*lowest)}.")
    return " ".join(words)


def _comparable(pair: tuple[SamplerResult, Point], reference: tuple[SamplerResult, Point], timed: bool) -> bool:
    """Whether a point may be held against the reference.

    Bias and std are of one row. Rows that share their draws also share their noise, which the mean over a batch does
    not reduce, so shared draws count as a sixteenth. Numbers of samples alone say nothing about their costs.
    """
    (law, point), (base, at) = pair, reference
    if law.shared == base.shared:
        return True
    if not timed:
        return False
    if law.shared:
        return point.num_samples >= SHARED_PER_ROW * at.num_samples
    return SHARED_PER_ROW * point.num_samples >= at.num_samples


def _low(point: Point, timed: bool) -> float:
    return (point.step_ms or 0.0) - 2.0 * point.step_error if timed else float(point.num_samples)


def _high(point: Point, timed: bool) -> float:
    return (point.step_ms or 0.0) + 2.0 * point.step_error if timed else float(point.num_samples)


def _clearly_less(point: Point, base: Point, timed: bool) -> bool:
    """Whether it is cheaper by more than the noise of both times."""
    return _high(point, timed) < _low(base, timed)


def _cheapest(pairs: list[tuple[SamplerResult, Point]], timed: bool) -> tuple[SamplerResult, Point]:
    """The cheapest; of those that the times do not tell apart, the one with the least bias, which does not vary."""
    first = min(pairs, key=lambda pair: _cost(pair[1], timed))
    near = [pair for pair in pairs if not _clearly_less(first[1], pair[1], timed)] if timed else [first]
    return min(near, key=lambda pair: (pair[1].bias, _cost(pair[1], timed)))


def warn(found: Diagnosis) -> list[str]:
    """The warnings, one sentence each.

    Example:
        >>> from samplex_cuda.diagnostics import Diagnosis, SamplerResult
        >>> from samplex_cuda.diagnostics.advice import warn
        >>> laws = [SamplerResult("Unigram", "Unigram", missing=0.25)]
        >>> warn(Diagnosis(100, 8, 64, "sampled_softmax", False, 0, 1.0, 0, laws))[0][:46]
        'Unigram: it never draws classes that hold 25 %'
    """
    out = []
    uniform = next((law for law in found.samplers if law.kind == "Uniform"), None)
    for law in found.samplers:
        if law.missing > 0:
            share = _share(law.missing) if law.missing >= 1e-4 else "less than 0.01 %"
            out.append(
                f"{law.name}: it never draws classes that hold {share} of the softmax, a bias that no m removes; mix "
                "it with Uniform."
            )
        out += _leaks(law)
        if uniform is not None and law is not uniform:
            out += _worse(found, law, uniform)
        if law.drift is not None and law.drift > STALE:
            lag = f", {law.stale_steps} training steps behind" if law.stale_steps else ""
            out.append(
                f"{law.name}: stale{lag}: {_share(law.stale_rows or 0.0)} of its class rows differ from the head's, "
                f"by {_share(law.drift)} of their norm; "
                f"{'head.update_sampler()' if law.own else 'rebuild(head.weight)'} brings it up to date."
            )
    if any(not law.exact for law in found.samplers):
        names = ", ".join(law.name for law in found.samplers if not law.exact)
        out.append(f"{names}: estimated from draws, which miss classes that are never drawn; the bias may be larger.")
    if found.busy:
        out.append(f"{found.lacking:.1f} cores were missing because of other processes: times are too long and uneven.")
    strata = [law.name for law in found.samplers if law.stratified]
    if strata:
        out.append(f"{', '.join(strata)}: draws are stratified; bias and std are those of independent draws.")
    if not found.of_its_loss:
        out.append(
            f"The head trains with {found.loss}: bias and std are those of sampled_softmax without smoothing, with "
            "these samplers."
        )
    if found.rows < FEW_ROWS:
        out.append(f"Only {found.rows} rows were examined; use a few hundred for reliable results.")
    return out


def _leaks(law: SamplerResult) -> list[str]:
    """The largest m with which too much of the softmax leaks; a sampler that never draws is reported separately."""
    bad = [point for point in law.points if point.leak - law.missing > LEAK]
    if not bad:
        return []
    where = "at every m" if len(bad) == len(law.points) else "at m = " + ", ".join(f"{p.num_samples:,}" for p in bad)
    return [
        f"{law.name}: leaks {where}: {_share(bad[-1].leak)} of the softmax at m = {bad[-1].num_samples:,} is on "
        "classes drawn too rarely to be pushed down; mix it with class frequencies in equal parts, or increase m."
    ]


def _worse(found: Diagnosis, law: SamplerResult, uniform: SamplerResult) -> list[str]:
    flat = {point.num_samples: point for point in uniform.points}
    floor = NEGLIGIBLE * found.gradient_norm
    pairs = [(point, flat[point.num_samples]) for point in law.points if point.num_samples in flat]
    bad = [(a, b) for a, b in pairs if _exceeds(a, b) and a.bias > floor]
    if not bad:
        return []
    last, base = bad[-1]
    where = "at every m" if len(bad) == len(pairs) else "at m = " + ", ".join(f"{a.num_samples:,}" for a, _ in bad)
    return [
        f"{law.name}: worse than Uniform {where} (bias {_percent(found, last)} of the gradient against "
        f"{_percent(found, base)} at m = {last.num_samples:,})."
    ]


def _exceeds(point: Point, base: Point) -> bool:
    """Whether the bias is larger than that of `base` by more than the noise of what was measured."""
    excess, error = point.excess, point.excess_error
    if excess is None:
        excess, error = point.bias**2 - base.bias**2, math.hypot(point.bias_error, base.bias_error)
    return point.bias > WORSE * base.bias and excess > (WORSE**2 - 1.0) * base.bias**2 + 2.0 * error


def _reference(found: Diagnosis) -> tuple[SamplerResult, Point]:
    for law in found.samplers:
        for point in law.points:
            if law.own and point.num_samples == found.head_samples:
                return law, point
    some = [law for law in found.samplers if law.points]
    law = next((law for law in some if law.kind == "Uniform"), some[0])
    return law, max(law.points, key=lambda point: point.num_samples)


def _compare(
    found: Diagnosis, law: SamplerResult, best: Point, reference: tuple[SamplerResult, Point], timed: bool
) -> str:
    base = reference[1]
    ratio = best.bias / base.bias if base.bias > 0 else 1.0
    small = found.relative(best.bias) <= NEGLIGIBLE and found.relative(base.bias) <= NEGLIGIBLE
    if small:
        lead = f"{_name(law, best)} has almost no bias ({_percent(found, best)} of the gradient), like"
        tail = ""
    elif ratio >= 0.75:
        lead, tail = f"{_name(law, best)} gives the bias of", f" ({_percent(found, best)} of the gradient)"
    else:
        lead = f"{_name(law, best)} has {_fraction(ratio)} the bias of" if ratio < 0.45 else f"{_name(law, best)} beats"
        tail = f" ({_percent(found, best)} of the gradient against {_percent(found, base)})"
    text = f"{lead} {_name(*reference)}{tail}"
    if timed:
        assert best.step_ms is not None
        assert base.step_ms is not None
        return (
            f"{text} at {_fraction(best.step_ms / base.step_ms)} the time ({_ms(best.step_ms)} against "
            f"{_ms(base.step_ms)} ms per step)."
        )
    return f"{text} with {_fraction(best.num_samples / base.num_samples)} the samples."


def _for_the_same(
    found: Diagnosis,
    points: list[tuple[SamplerResult, Point]],
    reference: tuple[SamplerResult, Point],
    best: Point,
    timed: bool,
) -> list[str]:
    """What has far less bias and costs about what the reference does."""
    limit = SAME_COST * _cost(reference[1], timed)[0]
    near = [pair for pair in points if _high(pair[1], timed) <= limit and (timed or pair[0].kind not in _ORACLES)]
    if not near:
        return []
    law, point = min(near, key=lambda pair: _upper(pair[1]))
    gain = _upper(point) < FAR_LESS * best.bias and found.relative(best.bias) > NEGLIGIBLE
    if point is best or not gain:
        return []
    cost = f" ({_ms(point.step_ms)} ms)" if timed else ""
    return [
        f"At about the same cost as {_name(*reference)}, {_name(law, point)}{cost} has a bias of "
        f"{_percent(found, point)}."
    ]


def _uniform_equivalent(found: Diagnosis, law: SamplerResult, best: Point) -> list[str]:
    """How many samples Uniform would take, since its bias falls as 1/m, where that is more than was tried."""
    uniform = next((one for one in found.samplers if one.kind == "Uniform" and one.points), None)
    if uniform is None or law is uniform or best.bias <= 0:
        return []
    last = max(uniform.points, key=lambda point: point.num_samples)
    need = last.bias_leading * last.num_samples / best.bias
    if last.measured or need <= 1.5 * last.num_samples:
        return []
    digits = 10 ** max(0, math.floor(math.log10(need)) - 1)
    return [f"Uniform would need about m = {round(need / digits) * digits:,.0f} for the same bias."]


def _upper(point: Point) -> float:
    return math.sqrt(point.bias**2 + 2.0 * point.bias_error)


def _cost(point: Point, timed: bool) -> tuple[float, int]:
    return (point.step_ms or 0.0 if timed else float(point.num_samples), point.num_samples)


def _name(law: SamplerResult, point: Point) -> str:
    return f"{law.name} with m = {point.num_samples:,}"


def _fraction(ratio: float) -> str:
    """ "a tenth of", "0.62 of", "1/40 of", "1.5 times"."""
    if ratio > 1.0:
        return f"{ratio:.2g} times"
    whole = round(1.0 / ratio) if ratio > 0 else 10**9
    if abs(whole * ratio - 1.0) <= 0.1 and whole in _FRACTIONS:
        return f"{_FRACTIONS[whole]} of" if whole != 2 else "half"
    return f"1/{whole} of" if whole > 10 else f"{ratio:.2f} of"


def _share(share: float) -> str:
    value = 100.0 * share
    return f"{value:.0f} %" if value >= 99.5 else f"{value:.2g} %"


def _percent(found: Diagnosis, point: Point) -> str:
    share = found.relative(point.bias)
    return _share(share) if share >= 1e-6 else "0 %"


def _ms(value: float | None) -> str:
    value = value or 0.0
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
