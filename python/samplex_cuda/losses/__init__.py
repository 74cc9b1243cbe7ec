"""Losses as objects: `sx.losses.SampledSoftmax(label_smoothing=0.1)`; each also by a short name, `loss="nce"`.

docs/losses.md compares them.
"""

from __future__ import annotations

from typing import Any

from samplex_cuda.losses.base import ExampleState, Loss, Needs, ScoreLoss
from samplex_cuda.losses.entry import NCE, AugmentReduce, NegativeSampling, OneVsEach
from samplex_cuda.losses.full import FullSoftmax
from samplex_cuda.losses.margin import ArcFace, CosFace, Margin
from samplex_cuda.losses.sampled import SampledSoftmax

__all__ = [
    "NCE",
    "ArcFace",
    "AugmentReduce",
    "CosFace",
    "ExampleState",
    "FullSoftmax",
    "Loss",
    "Margin",
    "Needs",
    "NegativeSampling",
    "OneVsEach",
    "SampledSoftmax",
    "ScoreLoss",
    "by_name",
    "from_name",
    "names",
    "resolve",
]

_LOSSES: dict[str, type[Loss]] = {
    loss.name: loss for loss in (SampledSoftmax, NegativeSampling, NCE, OneVsEach, AugmentReduce, FullSoftmax)
}


def names() -> tuple[str, ...]:
    """The short names.

    Example:
        >>> import samplex_cuda as sx
        >>> "nce" in sx.losses.names()
        True
    """
    return tuple(_LOSSES)


def by_name(name: str) -> type[Loss]:
    """The class of a short name.

    Example:
        >>> import samplex_cuda as sx
        >>> sx.losses.by_name("nce").__name__
        'NCE'
    """
    if name not in _LOSSES:
        raise ValueError(f"losses: name must be one of {', '.join(_LOSSES)}, got {name!r}")
    return _LOSSES[name]


def from_name(name: str, **options: Any) -> Loss:
    """The loss of a short name.

    Args:
        name: one of `names()`.
        options: of its constructor. One that the loss does not have must be at its default, 0, False or None.

    Example:
        >>> import samplex_cuda as sx
        >>> sx.losses.from_name("negative_sampling", reg=0.1, label_smoothing=0.0)
        NegativeSampling(reg=0.1)
    """
    kind = by_name(name)
    own = kind.options()
    for option, value in options.items():
        if option not in own and value:
            raise ValueError(f"{kind.__name__}: {option} is not an option of this loss, got {value!r}")
    return kind(**{option: value for option, value in options.items() if option in own})


def resolve(loss: str | Loss, op: str = "losses") -> Loss:
    """A loss object from an object or a short name; `op` is for the error message.

    Example:
        >>> import samplex_cuda as sx
        >>> sx.losses.resolve("nce")
        NCE()
    """
    if isinstance(loss, Loss):
        return loss
    if isinstance(loss, type) and issubclass(loss, Loss):
        raise TypeError(f"{op}: loss must be an object, got the class {loss.__name__}; write {loss.__name__}(...)")
    if not isinstance(loss, str) or loss not in _LOSSES:
        raise ValueError(f"{op}: loss must be one of {', '.join(_LOSSES)} or an object of sx.losses, got {loss!r}")
    return from_name(loss)


def taking(option: str) -> list[str]:
    """Names of the classes whose constructor has this option."""
    return [kind.__name__ for kind in _LOSSES.values() if option in kind.options()]
