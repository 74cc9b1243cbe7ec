"""How a sharded step brings queries and class rows together, what each way sends, and which one a head takes.

`summed_logits` serves every loss and is the reference: its losses and tables have the same bits on any number of ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from samplex_cuda._checks import check_choice
from samplex_cuda.losses import Loss

if TYPE_CHECKING:
    from samplex_cuda.heads.classifier import SampledClassifier

__all__ = ["ROUTES", "Sizes", "bytes_by_route", "bytes_sent", "crossover", "refuse_unfit", "resolve_route"]

_NAME = "SampledClassifier.shard"


class Sizes(NamedTuple):
    """The sizes of a step that decide its route."""

    world: int  # P, ranks
    batch: int  # B, rows of a rank
    draws: int  # m
    dim: int  # d
    unique: float = 1.0  # share of the entries of a rank that name a class for the first time


def _summed_logits(s: Sizes) -> float:
    return (s.world - 1) * s.batch * (8 * s.dim + 8 + 8 * (s.draws + 1))


def _online_softmax(s: Sizes) -> float:
    return (s.world - 1) * s.batch * (8 * s.dim + 24)


def _rows_to_queries(s: Sizes) -> float:
    return s.unique * s.batch * (s.draws + 1) * (8 * s.dim + 8) * (s.world - 1) / s.world


def _shared_rows(s: Sizes) -> float:
    summed = 16 * s.draws * s.dim * (s.world - 1) / s.world
    return summed + s.unique * s.batch * (8 * s.dim + 8) * (s.world - 1) / s.world


def _replicate(s: Sizes) -> float:
    return (s.world - 1) * s.batch * (4 * s.dim + 12 * (s.draws + 1))


ROUTES = {
    "summed_logits": _summed_logits,
    "online_softmax": _online_softmax,
    "rows_to_queries": _rows_to_queries,
    "shared_rows": _shared_rows,
}
_MODELS = ROUTES | {"replicate": _replicate}  # the last one keeps whole tables, so that no sharded head can take it


def bytes_sent(route: str, sizes: Sizes) -> float:
    """Bytes that a rank sends in a training step, fp32, one target per row: the model of docs/scale.md.

    Args:
        route: one of `ROUTES`, or "replicate" for `sx.distributed.replicate`.
        sizes: of the step.

    Example:
        >>> from samplex_cuda.distributed.routes import Sizes, bytes_sent
        >>> bytes_sent("online_softmax", Sizes(world=4, batch=64, draws=1000, dim=128))
        201216
    """
    check_choice("bytes_sent", "route", route, _MODELS)
    return _MODELS[route](sizes)


def bytes_by_route(sizes: Sizes) -> dict[str, float]:
    """Bytes of each route and of "replicate", fewest first: what to compare before a head is sharded at all.

    Args:
        sizes: of the step.

    Example:
        >>> from samplex_cuda.distributed.routes import Sizes, bytes_by_route
        >>> list(bytes_by_route(Sizes(world=4, batch=64, draws=20, dim=128)))
        ['shared_rows', 'replicate', 'online_softmax', 'summed_logits', 'rows_to_queries']
    """
    found = {name: model(sizes) for name, model in _MODELS.items()}
    return dict(sorted(found.items(), key=lambda pair: pair[1]))


def crossover(route: str, other: str, sizes: Sizes, field: str, most: int = 1 << 20) -> int | None:
    """The least value of a size from which a route sends fewer bytes than another; None if none up to `most`.

    Args:
        route: as in `bytes_sent`.
        other: as in `bytes_sent`.
        sizes: the other sizes.
        field: "world", "batch", "draws" or "dim".
        most: where the search ends.

    Example:
        >>> from samplex_cuda.distributed.routes import Sizes, crossover
        >>> crossover("rows_to_queries", "summed_logits", Sizes(world=2, batch=64, draws=4, dim=128), "world")
        5
    """
    check_choice("crossover", "field", field, ("world", "batch", "draws", "dim"))

    def wins(value: int) -> bool:
        at = sizes._replace(**{field: value})
        return bytes_sent(route, at) < bytes_sent(other, at)

    low, high = 0, most  # the models are such that a route that wins keeps winning
    if not wins(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if wins(middle) else (middle, high)
    return high


def unfit(route: str, head: SampledClassifier, balanced: bool, sampler: Any) -> str | None:
    """Why a head cannot take a route; None if it can."""
    loss: Loss = head.loss
    if route != "summed_logits" and not loss.needs.draws:
        return f"loss must sample classes, got {loss!r}"
    if route != "summed_logits" and (head.normalize or not getattr(loss, "corrected", True)):
        return f"head must have normalize=False and a corrected loss, got normalize={head.normalize} and {loss!r}"
    if route != "summed_logits" and head.log_scale is not None:
        return "learn_scale must be False, got True"
    if route == "online_softmax" and not loss.joins:
        return f"loss must be SampledSoftmax without label smoothing, got {loss!r}"
    if route in ("rows_to_queries", "shared_rows"):
        if loss.needs.example_index:
            return f"loss must not keep a number per example, got {loss!r}"
        if head.reduction == "none":  # row gradients are summed before they travel
            return 'reduction must be "mean" or "sum", got "none"'
        if getattr(sampler, "takes_targets", False):  # those of all ranks
            return f"sampler must draw without the targets of the batch, got {type(sampler).__name__}"
        if getattr(sampler, "collective", False):  # its draws take all ranks, for the rows of all ranks
            return f"sampler must be replicated, got {type(sampler).__name__}"
        if head.shared != (route == "shared_rows"):
            return f"shared must be {not head.shared}, got {head.shared}"
        if not balanced:
            return 'order must be "spread" on a GPU, where a rank has room for about its share of the rows, got "class"'
    if route == "shared_rows" and getattr(sampler, "conditional", True):
        return f"sampler must have one distribution for all rows, got {type(sampler).__name__}"
    return None


def refuse_unfit(route: str, head: SampledClassifier, balanced: bool = True, sampler: Any = None) -> None:
    """ValueError if a head cannot take a route; arguments as in `resolve_route`."""
    reason = unfit(route, head, balanced, head.sampler if sampler is None else sampler)
    if reason is not None:
        raise ValueError(f'{_NAME}: with route="{route}" {reason}; route="summed_logits" supports every head')


def resolve_route(
    route: str, head: SampledClassifier, world: int, batch: int | None, balanced: bool = True, sampler: Any = None
) -> str:
    """The name of the route that a head takes: the given one, or with "auto" that which sends least.

    Args:
        route: a name, or "auto".
        head: with its loss, draws and width.
        world: ranks.
        batch: `batch_capacity`, where it is given.
        balanced: whether the classes of a step are spread over the ranks, or sizes need not be fixed.
        sampler: of the sharded head, where it is not that of `head`.

    Example:
        >>> import samplex_cuda as sx
        >>> from samplex_cuda.distributed.routes import resolve_route
        >>> head = sx.SampledClassifier(8, 100, sx.samplers.Uniform(100), num_samples=50)
        >>> resolve_route("auto", head, 4, None), resolve_route("auto", head, 1, None)
        ('online_softmax', 'summed_logits')
    """
    check_choice(_NAME, "route", route, ("auto", *ROUTES))
    if route != "auto":
        refuse_unfit(route, head, balanced, sampler)
        return route
    sampler = head.sampler if sampler is None else sampler
    sizes = Sizes(world, batch or 1, head.num_samples, head.in_features)
    fit = [name for name in ROUTES if unfit(name, head, balanced, sampler) is None]
    if batch is None and "shared_rows" in fit:
        fit.remove("shared_rows")  # it pays from some batch size on
    if head.num_samples <= head.in_features and "online_softmax" in fit:
        fit.remove("online_softmax")  # logits are then less than half of what travels: the reference costs little more
    return min(fit, key=lambda name: ROUTES[name](sizes))  # the first of equals: the reference
