"""The samplers that `diagnose` compares, and the ways to draw from them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from samplex_cuda import samplers
from samplex_cuda._checks import describe
from samplex_cuda.rng import Key

__all__ = ["Candidate", "Candidates", "default_candidates", "has_tree", "in_strata", "named", "other_ways"]

KERNELS_UP_TO = 200_000  # classes for which the default candidates include kernel samplers: they copy the table


@dataclasses.dataclass
class Candidate:
    """A sampler and how the batch draws from it; None: as the head does.

    Attributes:
        sampler: where draws come from.
        shared: whether the batch shares its draws.
        stratified: whether shared draws are stratified.

    Example:
        >>> import samplex_cuda as sx
        >>> sx.diagnostics.Candidate(sx.samplers.Uniform(9), shared=True).stratified
        False
    """

    sampler: samplers.Sampler
    shared: bool | None = None
    stratified: bool = False


Candidates = Mapping[str, samplers.Sampler | Candidate] | Sequence[samplers.Sampler]


@torch.no_grad()
def default_candidates(
    head: Any, class_counts: Tensor | None = None, *, seed: int = 0, num_features: int | None = None
) -> dict[str, samplers.Sampler]:
    """Samplers that can be built from a head alone: Uniform, its own, Unigram of the counts, two kernels, MIDX.

    `Quadratic` and `RandomFourier` (positive features, nu = scale) copy the class table; above 200,000 classes they are
    left out, and where the batch shares its draws: theirs then cost as much as draws per row. For an absolute softmax
    the latter makes no sense and is left out too, and so is a kernel whose features of this table leave float32. `MIDX`
    has up to 256 codes.

    Args:
        head: a `SampledClassifier`.
        class_counts: [C], how often each class is a target; classes of count 0 count as 1, so that all can be drawn.
        seed: of the random features.
        num_features: D of the random features; 4 d between 64 and 1024 by default.

    Example:
        >>> import torch, samplex_cuda as sx
        >>> head = sx.SampledClassifier(8, 100, sx.samplers.LogUniform(100), num_samples=5)
        >>> list(sx.diagnostics.default_candidates(head, torch.arange(100)))
        ['Uniform', 'LogUniform', 'Unigram', 'Quadratic', 'RandomFourier', 'MIDX']
    """
    classes = head.num_classes
    own = head.sampler
    flat = own if isinstance(own, samplers.Uniform) else samplers.Uniform(classes)
    out: dict[str, samplers.Sampler] = {"Uniform": flat}
    if own is not None:
        out[type(own).__name__] = own
    if class_counts is not None:
        if not isinstance(class_counts, Tensor) or class_counts.shape != (classes,):
            raise ValueError(f"default_candidates: class_counts must be [{classes}], got {describe(class_counts)}")
        out.setdefault("Unigram", samplers.Unigram(class_counts.double().clamp_min(1.0).cpu()).to(head.weight.device))
    if head.shared or classes > KERNELS_UP_TO or not bool(head.weight.isfinite().all()):
        return out
    weight, bias = head.weight.detach(), None if head.bias is None else head.bias.detach()
    # A table whose features leave float32 is refused by a kernel sampler, which is then no candidate.
    if "Quadratic" not in out and head.scale != 0:
        with contextlib.suppress(ValueError):
            out["Quadratic"] = samplers.Quadratic(weight, min(1e29, 100.0 * head.scale**2), bias)
    if "RandomFourier" not in out and head.scale > 0 and not head.loss.absolute:
        count = num_features or min(1024, max(64, 4 * head.in_features))
        with contextlib.suppress(ValueError):
            out["RandomFourier"] = samplers.RandomFourier(
                weight, num_features=count, nu=head.scale, kind="positive", bias=bias, key=Key(seed)
            )
    if "MIDX" not in out and not head.loss.absolute:
        out["MIDX"] = samplers.MIDX(weight, scale=head.scale, bias=bias, key=Key(seed))
    return out


def other_ways(head: Any, found: Mapping[str, samplers.Sampler]) -> dict[str, Candidate]:
    """The same samplers drawn from in the ways that the head does not: shared, per row, stratified.

    Not Uniform, and not the kernel samplers, whose shared draws cost as much as those of each row.

    Args:
        head: a `SampledClassifier`.
        found: samplers by name, as of `default_candidates`.

    Example:
        >>> import torch, samplex_cuda as sx
        >>> head = sx.SampledClassifier(8, 100, sx.samplers.LogUniform(100), num_samples=5)
        >>> list(sx.diagnostics.other_ways(head, sx.diagnostics.default_candidates(head)))
        ['LogUniform, shared']
    """
    needs = head.loss.needs
    out: dict[str, Candidate] = {}
    for name, sampler in found.items():
        static = not sampler.conditional and not isinstance(sampler, samplers.Uniform)
        if static:
            out[f"{name}, {'per row' if head.shared else 'shared'}"] = Candidate(sampler, not head.shared)
        if not has_tree(sampler) or (needs.draws and needs.prior):
            continue
        if not head.shared:
            out[f"{name}, shared"] = Candidate(sampler, True)
        can = getattr(sampler, "stratifies", False) and (not needs.draws or needs.weighted_draws)
        if can and not (head.shared and head.stratified):
            out[f"{name}, stratified"] = Candidate(sampler, True, True)
    return out


def named(head: Any, candidates: Candidates | None, class_counts: Tensor | None, seed: int) -> dict[str, Candidate]:
    """The candidates by name, each with its way to draw, `Uniform` among them."""
    out: dict[str, samplers.Sampler | Candidate] = {}
    if candidates is None:
        found = default_candidates(head, class_counts, seed=seed)
        out.update({**found, **other_ways(head, found)})
    elif isinstance(candidates, Mapping):
        out.update(candidates)
    else:
        for sampler in candidates:
            name = type(sampler).__name__
            same = sum(one.split(" ")[0] == name for one in out)
            out[f"{name} {same + 1}" if same else name] = sampler
    chosen: dict[str, Candidate] = {}
    for name, given in out.items():
        one = given if isinstance(given, Candidate) else Candidate(given, stratified=in_strata(head, given))
        if not isinstance(one.sampler, samplers.Sampler):
            raise TypeError(f"diagnose: candidates must be samplers, got {type(one.sampler).__name__} for {name!r}")
        if one.sampler.num_classes != head.num_classes:
            raise ValueError(
                f"diagnose: candidates must have num_classes = {head.num_classes} as the head, got "
                f"{one.sampler.num_classes} for {name!r}"
            )
        shared = bool(head.shared) if one.shared is None else one.shared
        chosen[name] = dataclasses.replace(one, shared=shared)
    if not any(isinstance(one.sampler, samplers.Uniform) for one in chosen.values()):
        chosen = {"Uniform": Candidate(samplers.Uniform(head.num_classes), bool(head.shared)), **chosen}
    return chosen


def has_tree(sampler: Any) -> bool:
    """Whether the sampler is a tree, or a mixture with one."""
    return isinstance(sampler, samplers.Tree) or (
        isinstance(sampler, samplers.Mixture) and any(has_tree(part) for part in sampler.samplers)
    )


# ------------------------------------------------------------------------------------------------ numbers


def in_strata(head: Any, sampler: Any) -> bool:
    """Whether the head would make stratified draws from this sampler."""
    return bool(getattr(head, "stratified", False) and getattr(sampler, "stratifies", False))
