"""`diagnose`: candidate samplers on rows of a head."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from samplex_cuda import functional, samplers
from samplex_cuda._checks import check_int, describe
from samplex_cuda.diagnostics import advice, gradient_error, timing
from samplex_cuda.diagnostics.candidates import Candidate, Candidates, has_tree, in_strata, named
from samplex_cuda.diagnostics.report import Diagnosis, Point, SamplerResult
from samplex_cuda.heads.checks import refuse_sphere
from samplex_cuda.heads.leak import leaks
from samplex_cuda.prediction import valid_targets
from samplex_cuda.rng import Key, fold_in

__all__ = ["diagnose"]

ENUMERATE_UP_TO = 1 << 26  # rows x classes
MAX_CLASSES = 1 << 23  # one row of float64 numbers is 64 MB
MOST_SHARED = 1 << 14  # draws of a batch that are tried
LEAK_ROWS = 64  # at most, and as many as the limit above allows: their leak is exact
POOL = 1 << 19  # draws of a sampler that bias and variance are measured from
TRUSTED = 0.1  # relative variance of the normalizer up to which the leading term is taken
_TIMED_NUMBERS = 1 << 26  # gathered weights of a timed step
_TIMED_DRAWS = 1 << 12  # of an exact sampler
_COPIED_BYTES = 1 << 28  # of a sampler whose update is timed on a copy


def diagnose(
    head: Any,
    h: Tensor,
    *,
    candidates: Candidates | None = None,
    num_samples: Sequence[int] = (16, 64, 256, 1024),
    features: Tensor | None = None,
    y: Tensor | None = None,
    seed: int = 0,
    context: Tensor | None = None,
    timed: bool = True,
    class_counts: Tensor | None = None,
    exact: bool | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> Diagnosis:
    """How close each sampler is to the softmax of `head` on these rows, and what that means for its gradient.

    Nothing of the head changes: no parameter, no gradient, no sampler. All numbers but the times are functions of the
    arguments. Memory: beyond what the samplers need, some thirty tensors of 2^20 numbers; [B, C] never exists.

    Args:
        head: a `SampledClassifier`, trained or in training.
        h: [*, d], a few hundred rows.
        candidates: samplers (or `Candidate`s) by name, or a list of samplers; Uniform is added for comparison. By
            default `default_candidates(head, class_counts)` and `other_ways` of them.
        num_samples: the m to try; `head.num_samples` is added where the head's own sampler is among the candidates.
            Shared draws are tried with 16 times as many where the head draws per row, and vice versa.
        features: [*, f], what the head's sampler and trees look at where that is not h.
        y: int64 [*], or [*, P] padded with `head.ignore_index`, of which the first counts; rows without a target are
            left out. Without y, targets are drawn from the head's own softmax.
        seed: of the draws.
        context: int64 [*], for samplers that need one.
        timed: time a step of every sampler and m, and of the full softmax.
        class_counts: [C], for a `Unigram` among the default candidates.
        exact: look at every class of every row (True), or estimate from draws (False); by default the first up to
            2^26 rows x classes.
        on_progress: called with a line of text before each part.

    Example:
        >>> import torch, samplex_cuda as sx
        >>> head = sx.SampledClassifier(8, 500, sx.samplers.Uniform(500), num_samples=16)
        >>> found = sx.diagnostics.diagnose(head, torch.randn(64, 8), num_samples=(16, 64), timed=False)
        >>> [law.name for law in found.samplers]
        ['Uniform', 'Quadratic', 'RandomFourier', 'MIDX']
        >>> uniform = found.samplers[0]
        >>> uniform.points[0].bias > uniform.points[1].bias
        True
    """
    say = on_progress or (lambda text: None)
    refuse_sphere(head, "diagnose")
    sizes = _check_sizes(num_samples)
    flat, seen, given = _check_rows(head, h, features, context)
    target, keep = _targets(head, h, flat, y, seed)
    flat, target = flat[keep], target[keep]
    seen = None if seen is None else seen[keep]
    given = None if given is None else given[keep]
    if flat.shape[0] == 0:
        raise ValueError(f"diagnose: h must have at least one row with a target, got {describe(h)}")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        chosen = named(head, candidates, class_counts, seed)
        for name, one in chosen.items():
            if one.sampler._needs_context and given is None:
                raise ValueError(f"diagnose: context must be int64 [*] for {name}, got None")
        say(f"softmax of {flat.shape[0]} rows over {head.num_classes:,} classes")
        rows = gradient_error.Rows(head, flat, target, seen, given)
        if not bool(rows.lse.isfinite().all()):
            raise ValueError("diagnose: logits of the head must be finite, got nan or inf")
        out = Diagnosis(
            num_classes=head.num_classes,
            in_features=head.in_features,
            rows=rows.count,
            loss=head.loss.name,
            of_its_loss=head.loss.joins or not head.loss.needs.draws,
            shared=bool(head.shared),
            seed=seed,
            gradient_norm=0.0,
            head_samples=head.num_samples,
        )
        if exact is None:
            exact = rows.count * head.num_classes <= ENUMERATE_UP_TO and head.num_classes <= MAX_CLASSES
        gradient = None
        broken: list[str] = []
        by_row: list[list[Tensor]] = []
        looked: list[tuple[Any, Tensor]] = []
        looks = [_look(head, one.sampler, flat, seen) for one in chosen.values()]
        used: list[Any] = [
            gradient_error.SharedLaw(one.sampler, look, given)
            if one.shared and one.sampler.conditional
            else one.sampler
            for one, look in zip(chosen.values(), looks, strict=True)
        ]
        row_laws: list[gradient_error.RowLaw | None] = [None] * len(looks)
        if exact:
            say("distributions")
            for shared in (False, True):
                places = [place for place, one in enumerate(chosen.values()) if one.shared == shared]
                pairs = [(used[place], looks[place]) for place in places]
                if pairs:
                    made = gradient_error.enumerate_laws(pairs, rows, given, shared=shared)
                    for place, law_ in zip(places, made, strict=True):
                        row_laws[place] = law_
        jobs: list[timing.Job] = []
        for number, (name, one) in enumerate(chosen.items()):
            say(f"{name}: bias and variance")
            look, key = looks[number], fold_in(torch.tensor([seed, number]), number)
            law, squares, biases = _one(
                head, name, one, used[number], rows, look, given, _sizes(head, one, sizes), row_laws[number], key
            )
            if math.isnan(law.kl):
                broken.append(f"{name}: its distribution is not a number on these rows; it was left out.")
                continue
            if gradient is None or law.kind == "Uniform":  # estimated from draws, Uniform's is the steadiest
                gradient = float((squares + rows.rest[: squares.shape[0]].square()).mean().sqrt())
            if timed:
                jobs += _jobs(head, one, law, flat, look, given, target)
            out.samplers.append(law)
            looked.append((one.sampler, look))
            by_row.append(biases)
        _against_uniform(out.samplers, by_row)
        say("leak")
        _add_leaks(head, out.samplers, looked, flat, target, given)
        out.gradient_norm = gradient or 0.0
        if timed:
            say("times")
            jobs += _full_jobs(head, out, flat, target)
            out.lacking = timing.measure(jobs, flat.device)
    out.recommendation = advice.recommend(out)
    out.warnings = broken + advice.warn(out)
    for text in dict.fromkeys(str(one.message) for one in caught):
        out.warnings.append(text)
    return out


# ------------------------------------------------------------------------------------------------ arguments
def _check_sizes(num_samples: Sequence[int]) -> list[int]:
    sizes = [num_samples] if isinstance(num_samples, int) else list(num_samples)
    if not sizes:
        raise ValueError("diagnose: num_samples must be one or more ints, got none")
    return sorted({check_int("diagnose", "each num_samples", m) for m in sizes})


def _check_rows(
    head: Any, h: Tensor, features: Tensor | None, context: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """h [B, d], features [B, f], context [B]."""
    width = head.in_features
    if not isinstance(h, Tensor) or h.dim() < 1 or h.shape[-1] != width or not h.is_floating_point():
        raise ValueError(f"diagnose: h must be [*, {width}] floating point, got {describe(h)}")
    flat = h.detach().reshape(-1, width)
    if features is not None and (not isinstance(features, Tensor) or features.shape[:-1] != h.shape[:-1]):
        raise ValueError(f"diagnose: features must be {[*h.shape[:-1], 'f']} to fit h, got {describe(features)}")
    if context is not None and (not isinstance(context, Tensor) or context.shape != h.shape[:-1]):
        raise ValueError(f"diagnose: context must be {list(h.shape[:-1])} int64 to fit h, got {describe(context)}")
    seen = None if features is None else features.detach().reshape(flat.shape[0], features.shape[-1])
    return flat, seen, None if context is None else context.reshape(-1)


@torch.no_grad()
def _targets(head: Any, h: Tensor, flat: Tensor, y: Tensor | None, seed: int) -> tuple[Tensor, Tensor]:
    """The first target of each row, [B], and which rows have one, bool [B]."""
    if y is None:
        everything = torch.ones(flat.shape[0], dtype=torch.bool, device=flat.device)
        if flat.shape[0] == 0:
            return torch.zeros(0, dtype=torch.int64, device=flat.device), everything
        own = samplers.Softmax(head.weight, head.bias, scale=head.scale, absolute=head.loss.absolute, copy=False)
        return own.sample(flat, 1, key=Key(seed)).ids[:, 0], everything
    lead = h.shape[:-1]
    if not isinstance(y, Tensor) or y.dtype != torch.int64 or y.shape[: len(lead)] != lead or y.dim() > h.dim():
        raise ValueError(f"diagnose: y must be {list(lead)} or {[*lead, 'P']} int64 to fit h, got {describe(y)}")
    several = y.reshape(flat.shape[0], -1)
    valid = valid_targets(several, head.ignore_index)
    bad = several[valid]
    if bad.numel() and not (int(bad.min()) >= 0 and int(bad.max()) < head.num_classes):
        wrong = int(bad.min()) if int(bad.min()) < 0 else int(bad.max())
        raise IndexError(f"diagnose: y must be in [0, {head.num_classes}), got {wrong}")
    first = valid.to(torch.int64).argmax(1, keepdim=True)
    return several.gather(1, first)[:, 0], valid.any(1)


def _sizes(head: Any, one: Candidate, sizes: list[int]) -> list[int]:
    """The m to try: shared draws serve a whole batch, so there are more of them."""
    if one.shared == bool(head.shared):
        return sizes
    times = advice.SHARED_PER_ROW
    return sorted({min(m * times, MOST_SHARED) if one.shared else max(1, m // times) for m in sizes})


def _look(head: Any, sampler: Any, flat: Tensor, seen: Tensor | None) -> Tensor:
    """What this sampler looks at: the features where it is the head's own or a tree, else h."""
    if seen is None:
        return flat
    return seen if sampler is head.sampler or has_tree(sampler) else flat


def _one(
    head: Any,
    name: str,
    one: Candidate,
    used: Any,
    rows: gradient_error.Rows,
    look: Tensor,
    context: Tensor | None,
    sizes: list[int],
    row_law: gradient_error.RowLaw | None,
    key: Tensor,
) -> tuple[SamplerResult, Tensor, list[Tensor]]:
    """Numbers of a sampler, by the distribution that is used of it.

    Also the sum of p^2 over the negatives of the rows, and for each m |bias|^2 of the rows it was found for.
    """
    sampler, shared = one.sampler, bool(one.shared)
    own = sampler is head.sampler and shared == bool(head.shared) and one.stratified == in_strata(head, sampler)
    if own and head.num_samples:
        sizes = sorted({*sizes, head.num_samples})
    draws = None
    if row_law is None or bool((row_law.v / sizes[0] > TRUSTED).any()):
        each = max(2 * sizes[-1], min(1 << 14, POOL // rows.count))
        draws = gradient_error.Draws(
            used, rows, look, context, count=min(rows.count, max(1, POOL // each)), each=each, shared=shared,
            key=key.to(look.device),
        )  # fmt: skip
    if row_law is None:
        assert draws is not None
        row_law = gradient_error.estimate_law(used, rows, look, context, draws)
    stale_rows, drift = _lag(head, sampler)
    law = SamplerResult(
        name=name,
        kind=type(sampler).__name__,
        own=own,
        exact=row_law.exact,
        kl=float(row_law.kl.mean()),
        tv=float(row_law.tv.mean()),
        ess_share=float((1.0 / row_law.second.clamp_min(1e-300)).mean()),
        log_q_min=_finite(row_law.log_q_min.min()),
        log_q_max=_finite(row_law.log_q_max.max()),
        log_ratio_max=_finite(row_law.log_ratio.max()),
        missing=float(row_law.missing.mean()),
        follows=bool(sampler.follows_rows),
        stale_rows=stale_rows,
        drift=drift,
        stale_steps=head.staleness().steps if own else 0,
        stratified=one.stratified,
        shared=shared,
    )
    found = [_point(row_law, draws, rows, m) for m in sizes]
    law.points = [point for point, _ in found]
    return law, row_law.squares, [squared for _, squared in found]


def _against_uniform(found: list[SamplerResult], by_row: list[list[Tensor]]) -> None:
    """`excess` of every point for which Uniform was tried with the same m.

    Row by row: rows differ far more than samplers do, and a mean of some rows says nothing beside one of others.
    """
    place = next((k for k, law in enumerate(found) if law.kind == "Uniform"), None)
    if place is None:
        return
    flat = {point.num_samples: (point, row) for point, row in zip(found[place].points, by_row[place], strict=True)}
    for number, law in enumerate(found):
        for point, row in zip(law.points, by_row[number], strict=True):
            if number == place or point.num_samples not in flat:
                continue
            base, other = flat[point.num_samples]
            common = min(row.shape[0], other.shape[0])
            gap = row[:common] - other[:common]
            point.excess = float(gap.mean())
            noisy = common > 1 and bool(point.measured or base.measured)
            point.excess_error = float(gap.std()) / math.sqrt(common) if noisy else 0.0


def _add_leaks(
    head: Any,
    found: list[SamplerResult],
    looked: list[tuple[Any, Tensor]],
    h: Tensor,
    target: Tensor,
    context: Tensor | None,
) -> None:
    """`leak` of every point, from every class of the first rows."""
    count = min(h.shape[0], LEAK_ROWS, max(4, ENUMERATE_UP_TO // head.num_classes))
    laws = []
    for law, (sampler, look) in zip(found, looked, strict=True):
        laws.append((sampler, look[:count], law.shared, [point.num_samples for point in law.points]))
    given = None if context is None else context[:count]
    for law, every in zip(found, leaks(head, h[:count], target[:count, None], laws, given), strict=True):
        for point, value in zip(law.points, every.mean(0).tolist(), strict=True):
            point.leak = value


def _finite(value: Tensor) -> float:
    """0 where there is nothing to draw besides the target."""
    return float(value) if math.isfinite(float(value)) else 0.0


def _point(
    row_law: gradient_error.RowLaw, draws: gradient_error.Draws | None, rows: gradient_error.Rows, m: int
) -> tuple[Point, Tensor]:
    """A point, and |bias|^2 of the rows it is from."""
    leading, variance = row_law.bias_squared(m), row_law.spread / m
    point = Point(
        num_samples=m,
        ess=float((m / row_law.second.clamp_min(1e-300)).mean()),
        hit_rate=float(-torch.expm1(m * torch.log1p(-row_law.target_q.clamp(max=1.0))).mean()),
        bias=float(leading.mean().sqrt()),
        bias_leading=float(leading.mean().sqrt()),
        std=float(variance.mean().sqrt()),
    )
    unsure = row_law.v / m > TRUSTED
    if draws is None or not bool(unsure.any()):
        return point, leading
    some = draws.count
    seen = gradient_error.measure(draws, rows, row_law.squares[:some], m)
    if seen is None or not bool(unsure[:some].any()):
        return point, leading
    unsure = unsure[:some]
    squared = torch.where(unsure, seen.bias_squared, leading[:some])
    point.bias = math.sqrt(max(0.0, float(squared.mean())))
    noisy = torch.where(unsure, seen.bias_squared, 0.0)
    point.bias_error = float(noisy.std() / math.sqrt(some)) if some > 1 else 0.0
    point.std = float(torch.where(unsure, seen.variance, variance[:some]).mean().sqrt())
    point.measured = float(unsure.double().mean())
    return point, squared


@torch.no_grad()
def _lag(head: Any, sampler: Any) -> tuple[float | None, float | None]:
    """Share of the class rows that a sampler keeps and that differ from the head's, and by how much; None: it has none.

    Of a mixture the part that lags most counts.
    """
    if isinstance(sampler, samplers.Mixture):
        parts = [_lag(head, part) for part in sampler.samplers]
        known = [(share, drift) for share, drift in parts if share is not None and drift is not None]
        return max(known, key=lambda pair: pair[1]) if known else (None, None)
    if not sampler.follows_rows:
        return None, None
    width = head.in_features + int(sampler.has_bias)
    changed, square, whole = 0, 0.0, 0.0
    for begin in range(0, head.num_classes, step := max(1, gradient_error.ELEMENTS // max(1, width))):
        part = slice(begin, begin + step)
        now = head.weight.detach()[part].float()
        if getattr(sampler, "normalize", False):
            now = nn.functional.normalize(now, dim=1)
        if sampler.has_bias and head.bias is not None:
            now = torch.cat([now, head.bias.detach()[part].float()[:, None]], 1)
        if isinstance(sampler, samplers.KernelSampler):
            kept = sampler.rows[part, :width]
        elif isinstance(sampler, samplers.MIDX):
            # Rows by their codes: what counts is whether a class would get other codes now.
            kept, fresh = (
                sampler.approximate(sampler.cell[part]),
                sampler.approximate(sampler._cells_of(now[:, : head.in_features])),
            )
            if sampler.bias is not None:
                kept, fresh = torch.cat([kept, sampler.bias[part, None]], 1), torch.cat([fresh, now[:, -1:]], 1)
            now = fresh
        elif isinstance(sampler, samplers.ExactSampler):
            weight, bias = sampler._table()
            kept = weight[part].float()
            kept = kept if bias is None or not sampler.has_bias else torch.cat([kept, bias[part].float()[:, None]], 1)
        else:
            return None, None
        if kept.shape != now.shape:
            return None, None
        off = kept - now
        changed += int((off != 0).any(1).sum())
        square += float(off.double().square().sum())
        whole += float(now.double().square().sum())
    drift = math.sqrt(square / whole) if whole > 0 else float(square > 0)
    return changed / head.num_classes, drift


# ------------------------------------------------------------------------------------------------ times
def _leaves(head: Any, h: Tensor) -> list[Tensor]:
    """h, weight and bias with a gradient, sharing memory with the head's but none of its hooks and gradients."""
    found = [h.detach(), head.weight.detach()] + ([] if head.bias is None else [head.bias.detach()])
    return [t.requires_grad_() for t in found]


def _jobs(
    head: Any, one: Candidate, law: SamplerResult, h: Tensor, look: Tensor, context: Tensor | None, target: Tensor
) -> list[timing.Job]:
    """What is timed of a candidate: the draw, the step and the update of each point."""
    sampler = one.sampler
    shared = bool(one.shared) and _can_share(sampler, look, context)
    strata: dict[str, Any] = {"stratified": True} if one.stratified else {}
    spare, smoothed = _spare(sampler), getattr(head.loss, "label_smoothing", 0.0) != 0
    jobs: list[timing.Job] = []
    for point in law.points:
        m = point.num_samples
        most = _TIMED_NUMBERS // (m * head.in_features)
        if isinstance(sampler, samplers.ExactSampler):  # O(C) a row, and more for every draw
            most = min(most, max(8, _TIMED_DRAWS // m))
        some = h.shape[0] if shared else max(1, min(h.shape[0], most))
        scale = h.shape[0] / some  # a step of more rows than fit is extrapolated from fewer
        now, given = look[:some], None if context is None else context[:some]
        leaves, y = _leaves(head, h[:some]), target[:some]
        key = Key(0)

        def draw(m: int = m, now: Tensor = now, given: Tensor | None = given, y: Tensor = y, key: Key = key) -> Any:
            if shared:
                drawn = sampler.sample(now, m, shared=True, key=key, context=given, **strata)
                return drawn.merged() if drawn.repeats() and not smoothed else drawn
            return sampler.sample(now, m, key=key, exclude=y, context=given)

        def step(draw: Callable[[], Any] = draw, leaves: list[Tensor] = leaves, y: Tensor = y) -> Any:
            drawn = draw()
            loss = functional.sampled_softmax(
                leaves[0],
                leaves[1],
                y,
                drawn.ids,
                drawn.log_q,
                *leaves[2:],
                scale=head.scale,
                absolute=head.loss.absolute,
                sparse=head.sparse,
            )
            return torch.autograd.grad(loss, leaves)

        def drawn_in(median: float, error: float, point: Point = point) -> None:
            point.draw_ms = median

        def stepped_in(median: float, error: float, point: Point = point) -> None:
            point.step_ms = (point.step_ms or 0.0) + median
            point.step_error += error

        def updated_in(median: float, error: float, point: Point = point) -> None:
            point.update_ms = median
            stepped_in(median, error, point)

        jobs += [timing.Job(draw, drawn_in, scale), timing.Job(step, stepped_in, scale)]
        if spare is not None:
            ids = torch.cat([draw().ids.reshape(-1), y]).unique()
            rows, bias = head.weight.detach()[ids], None if head.bias is None else head.bias.detach()[ids]
            extra = (bias,) if spare.has_bias else ()

            every = spare.follow_interval(some, m, shared)  # steps that share an update
            share = 1.0 if every == 1 else min(1.0, head.num_classes / (every * max(1, ids.shape[0])))

            def update(ids: Tensor = ids, rows: Tensor = rows, extra: tuple[Any, ...] = extra) -> None:
                spare.update(ids, rows, *extra)

            jobs.append(timing.Job(update, updated_in, share))
    return jobs


def _can_share(sampler: Any, look: Tensor, context: Tensor | None) -> bool:
    try:
        sampler.sample(look, 1, shared=True, key=Key(0), context=context)
    except (ValueError, TypeError):
        return False
    return True


def _spare(sampler: Any) -> Any:
    """A copy of a sampler that follows the weights, for updates that must not touch the original."""
    if not sampler.follows_rows or sum(t.nbytes for t in sampler.state_dict().values()) > _COPIED_BYTES:
        return None
    return copy.deepcopy(sampler)


def _full_jobs(head: Any, out: Diagnosis, h: Tensor, target: Tensor) -> list[timing.Job]:
    if head.weight.numel() > _TIMED_NUMBERS:  # its gradient is as large as the table
        return []
    leaves = _leaves(head, h)

    def step() -> Any:
        loss = functional.full_softmax(
            leaves[0], leaves[1], target, *leaves[2:], scale=head.scale, absolute=head.loss.absolute
        )
        return torch.autograd.grad(loss, leaves)

    def done(median: float, error: float) -> None:
        out.full_ms, out.full_error = median, error

    return [timing.Job(step, done)]
