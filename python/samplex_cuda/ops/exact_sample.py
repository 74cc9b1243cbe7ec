"""Draws from distributions of the exact logits: `samplex::exact_mass`, `exact_blocks`, `exact_draw`, `exact_log_prob`.

The weight of a class depends on its logit `s = scale * (h . w + b)`: exp(s) for `SOFTMAX`, exp(|s|) for `ABSOLUTE`,
alpha * s^4 + 1 for `QUARTIC`. Classes are taken in blocks of `BLOCK`; of a row only the log weight of each block is
kept between the passes, never [B, C]. `samplex_cuda.samplers.exact` holds the loop over chunks.

`exclude` and `exclude_offsets` are what `sort_exclude` makes, for all rows of a batch; `row` says which of them is the
first row of a call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from samplex_cuda._library import register_fake

__all__ = [
    "ABSOLUTE",
    "BLOCK",
    "QUARTIC",
    "SOFTMAX",
    "exact_blocks",
    "exact_draw",
    "exact_log_prob",
    "exact_mass",
    "exact_product_mass",
]

BLOCK = 256
SOFTMAX, ABSOLUTE, QUARTIC = 0, 1, 2

_exact_mass = torch.ops.samplex.exact_mass.default  # there is one call per chunk, and a look-up costs as much


def exact_mass(
    dots: Tensor,
    bias: Tensor | None,
    first: int,
    num_classes: int,
    kind: int,
    scale: float,
    alpha: float,
    exclude: Tensor | None,
    exclude_offsets: Tensor | None,
    row: int,
    mass: Tensor,
) -> None:
    """Log weights of the blocks of a chunk of classes, without the excluded ones.

    Args:
        dots: [B, n] float32 or float64 products with the classes [first, first + n).
        bias: [n] like dots.
        first: a multiple of `BLOCK`; n is one too unless the chunk ends with the last class.
        num_classes: C.
        kind: `SOFTMAX`, `ABSOLUTE` or `QUARTIC`.
        scale: inverse temperature.
        alpha: of `QUARTIC`.
        exclude: int64 [R, P] or [nnz], ascending in each row, -1 ignored.
        exclude_offsets: int64 [R + 1].
        row: the row of `exclude` that is the first of `dots`.
        mass: [B, ceil(C / BLOCK)] float64; the columns of the chunk are written. -inf for a block without a class left,
            nan where a logit is nan or +inf.

    Example:
        >>> import torch
        >>> from samplex_cuda.ops.exact_sample import SOFTMAX, exact_mass
        >>> mass = torch.empty(1, 2, dtype=torch.float64)
        >>> exact_mass(torch.zeros(1, 300), None, 0, 300, SOFTMAX, 1.0, 0.0, torch.tensor([[7]]), None, 0, mass)
        >>> mass.exp().round().tolist()
        [[255.0, 44.0]]
    """
    _exact_mass(dots, bias, first, num_classes, kind, scale, alpha, exclude, exclude_offsets, row, mass)


def exact_product_mass(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    kind: int,
    scale: float,
    exclude: Tensor | None,
    exclude_offsets: Tensor | None,
    row: int,
    mass: Tensor,
) -> None:
    """`exact_mass` of all classes with the products inside it: on a GPU by tensor cores, and no logit is written.

    The CPU makes all logits at once: for tests.

    Args:
        hidden: [B, d] like weight, or [B, n d]: n parts whose sum is meant (`samplex_cuda.products`).
        weight: [C, d] bfloat16 or float16.
        bias: [C] of any floating dtype.
        kind: `SOFTMAX` or `ABSOLUTE`.
        scale: as in `exact_mass`.
        exclude: as in `exact_mass`.
        exclude_offsets: as in `exact_mass`.
        row: as in `exact_mass`.
        mass: as in `exact_mass`; all columns are written.

    Example:
        >>> import torch
        >>> from samplex_cuda.ops.exact_sample import SOFTMAX, exact_product_mass
        >>> h, weight = torch.zeros(1, 8, dtype=torch.bfloat16), torch.zeros(300, 8, dtype=torch.bfloat16)
        >>> mass = torch.empty(1, 2, dtype=torch.float64)
        >>> exact_product_mass(h, weight, None, SOFTMAX, 1.0, None, None, 0, mass)
        >>> mass.exp().round().tolist()
        [[256.0, 44.0]]
    """
    torch.ops.samplex.exact_product_mass(hidden, weight, bias, kind, scale, exclude, exclude_offsets, row, mass)


def exact_blocks(mass: Tensor, key: Tensor, row: int, num_samples: int) -> tuple[Tensor, Tensor]:
    """A block of classes for every draw, by inversion of the running sums of the weights of the blocks.

    Args:
        mass: [B, K] float64 from `exact_mass`.
        key: [2] int64 (seed, offset).
        row: of the random numbers: row b of `mass` takes those of row `row` + b.
        num_samples: m, at most 2^23.

    Returns:
        lse [B] float64, the log of the sum of all weights, and place [B, m] int64, the block times B plus the row.

    Example:
        >>> import torch
        >>> from samplex_cuda.ops.exact_sample import exact_blocks
        >>> mass = torch.tensor([[-torch.inf, 0.0, -torch.inf]], dtype=torch.float64)
        >>> exact_blocks(mass, torch.tensor([0, 0]), 0, 3)
        (tensor([0.], dtype=torch.float64), tensor([[1, 1, 1]]))
    """
    return torch.ops.samplex.exact_blocks(mass, key, row, num_samples)


def exact_draw(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lse: Tensor,
    place: Tensor,
    key: Tensor,
    kind: int,
    scale: float,
    alpha: float,
    exclude: Tensor | None,
    exclude_offsets: Tensor | None,
    row: int,
) -> Tensor:
    """A class of its block for every draw; draws of one row and block share its 256 products.

    Args:
        hidden: [B, d] float32 or float64, the dtype of the logits.
        weight: [C, d] of any floating dtype up to that of hidden.
        bias: [C] of any floating dtype.
        lse: [B] from `exact_blocks`; a row with -inf gets its first excluded class.
        place: int64 [B, m] from `exact_blocks`.
        key: as in `exact_blocks`.
        kind: as in `exact_mass`.
        scale: as in `exact_mass`.
        alpha: as in `exact_mass`.
        exclude: as in `exact_mass`.
        exclude_offsets: as in `exact_mass`.
        row: as in `exact_blocks`, and of `exclude`.

    Returns:
        ids [B, m] int64.

    Example:
        >>> import torch
        >>> from samplex_cuda.ops.exact_sample import SOFTMAX, exact_draw
        >>> h, weight, lse = torch.ones(1, 1), torch.tensor([[0.0], [100.0]]), torch.tensor([100.0]).double()
        >>> place, key = torch.tensor([[0, 0]]), torch.tensor([0, 0])
        >>> exact_draw(h, weight, None, lse, place, key, SOFTMAX, 1.0, 0.0, None, None, 0)
        tensor([[1, 1]])
    """
    return torch.ops.samplex.exact_draw(
        hidden, weight, bias, lse, place, key, kind, scale, alpha, exclude, exclude_offsets, row
    )


def exact_log_prob(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lse: Tensor,
    ids: Tensor,
    kind: int,
    scale: float,
    alpha: float,
    exclude: Tensor | None,
    exclude_offsets: Tensor | None,
    row: int,
) -> Tensor:
    """Log-probabilities of given ids; the products are summed in float64.

    Args:
        hidden: as in `exact_draw`.
        weight: as in `exact_draw`.
        bias: as in `exact_draw`.
        lse: [B] from `exact_blocks`.
        ids: int64 [B, n]. On CUDA an id that is not a class gets nan.
        kind: as in `exact_mass`.
        scale: as in `exact_mass`.
        alpha: as in `exact_mass`.
        exclude: as in `exact_mass`; an excluded id gets -inf.
        exclude_offsets: as in `exact_mass`.
        row: of `exclude`.

    Returns:
        [B, n] float32. In a row with nothing left the first excluded id has probability 1.

    Example:
        >>> import torch
        >>> from samplex_cuda.ops.exact_sample import SOFTMAX, exact_log_prob
        >>> h, weight, lse = torch.ones(1, 1), torch.tensor([[0.0], [0.0]]), torch.tensor([2.0]).double().log()
        >>> exact_log_prob(h, weight, None, lse, torch.tensor([[1]]), SOFTMAX, 1.0, 0.0, None, None, 0).exp()
        tensor([[0.5000]])
    """
    return torch.ops.samplex.exact_log_prob(
        hidden, weight, bias, lse, ids, kind, scale, alpha, exclude, exclude_offsets, row
    )


@register_fake("samplex::exact_mass")
def _(*arguments: Any) -> None:
    return None


@register_fake("samplex::exact_product_mass")
def _(*arguments: Any) -> None:
    return None


@register_fake("samplex::exact_blocks")
def _(mass: Tensor, key: Tensor, row: int, num_samples: int) -> tuple[Tensor, Tensor]:
    batch = mass.shape[0]
    return mass.new_empty((batch,)), mass.new_empty((batch, num_samples), dtype=torch.int64)


@register_fake("samplex::exact_draw")
def _(hidden: Tensor, weight: Tensor, bias: Tensor | None, lse: Tensor, place: Tensor, *rest: Any) -> Tensor:
    return place.new_empty(place.shape)


@register_fake("samplex::exact_log_prob")
def _(hidden: Tensor, weight: Tensor, bias: Tensor | None, lse: Tensor, ids: Tensor, *rest: Any) -> Tensor:
    return ids.new_empty(ids.shape, dtype=torch.float32)
