"""What `exact_mass`, `exact_blocks`, `exact_draw` and `exact_log_prob` compute, in plain torch and float64.

Excluded classes are lists here, one for each row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from samplex_cuda.reference.static_sample import philox_bits

__all__ = ["exact_blocks", "exact_draw", "exact_log_prob", "exact_mass", "invert", "log_weights", "uniforms"]

BLOCK = 256
SOFTMAX, ABSOLUTE, QUARTIC = 0, 1, 2


def log_weights(s: Tensor, kind: int, alpha: float = 0.0) -> Tensor:
    """Log of the weight of each logit, float64.

    Example:
        >>> import torch
        >>> from samplex_cuda.reference.exact_sample import QUARTIC, log_weights
        >>> log_weights(torch.tensor([0.0, -2.0]), QUARTIC, 0.5).exp().round()
        tensor([1., 9.], dtype=torch.float64)
    """
    s = s.double()
    if kind == QUARTIC:
        value = torch.log1p(alpha * s**4)
        return torch.where(value == torch.inf, torch.log(torch.tensor(alpha).double()) + 4 * s.abs().log(), value)
    return s.abs() if kind == ABSOLUTE else s


def uniforms(key: tuple[int, int], row: int, batch: int, count: int) -> Tensor:
    """The two uniform numbers of every draw, [B, m, 2]: the first chooses a block, the second a class in it.

    Example:
        >>> from samplex_cuda.reference.exact_sample import uniforms
        >>> uniforms((1, 2), 3, 1, 4).shape
        torch.Size([1, 4, 2])
    """
    made = torch.empty(batch, count, 2, dtype=torch.float64)
    for b in range(batch):
        for j in range(count):
            for which in range(2):
                made[b, j, which] = ((philox_bits(*key, row + b, 2 * j + which, 0)[0] >> 12) + 0.5) * 2.0**-52
    return made


def invert(log_mass: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """For each u [m] the index into log_mass [k] by inversion, and how far u is from a boundary between two indices.

    Example:
        >>> import torch
        >>> from samplex_cuda.reference.exact_sample import invert
        >>> invert(torch.tensor([0.5, 0.25, 0.25]).log(), torch.tensor([0.3, 0.7]))
        (tensor([0, 1]), tensor([0.2000, 0.0500]))
    """
    running = log_mass.softmax(0).cumsum(0)
    found = torch.searchsorted(running, u * running[-1], right=True).clamp_(max=len(log_mass) - 1)
    inner = running[:-1]
    near = (inner[None] - u[:, None]).abs().amin(1) if len(inner) else torch.ones_like(u)
    return found, near


def exact_mass(
    dots: Tensor,
    bias: Tensor | None,
    kind: int,
    scale: float,
    alpha: float,
    first: int,
    excluded: Sequence[Sequence[int]],
) -> Tensor:
    """Log weights [B, ceil(n / 256)] of the blocks of a chunk of classes [first, first + n).

    Example:
        >>> import torch
        >>> from samplex_cuda.reference.exact_sample import SOFTMAX, exact_mass
        >>> exact_mass(torch.zeros(1, 300), None, SOFTMAX, 1.0, 0.0, 512, [[513]]).exp().round()
        tensor([[255.,  44.]], dtype=torch.float64)
    """
    s = scale * (dots.double() + (0.0 if bias is None else bias.double()))
    log_w = log_weights(s, kind, alpha)
    for b, ids in enumerate(excluded):
        log_w[b, [k - first for k in ids if first <= k < first + dots.shape[1]]] = -torch.inf
    parts = [part.logsumexp(1) for part in log_w.split(BLOCK, 1)]
    mass = torch.stack(parts, 1) if parts else log_w.new_empty(log_w.shape[0], 0)
    return torch.where(mass == torch.inf, torch.nan, mass)


def exact_blocks(mass: Tensor, key: tuple[int, int], row: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """lse [B], place [B, m], and how far the uniform numbers are from a boundary between two blocks [B, m].

    Example:
        >>> import torch
        >>> from samplex_cuda.reference.exact_sample import exact_blocks
        >>> exact_blocks(torch.tensor([[-torch.inf, 0.0]]).double(), (0, 0), 0, 2)[1]
        tensor([[1, 1]])
    """
    batch = mass.shape[0]
    u = uniforms(key, row, batch, count)[..., 0]
    found = [invert(mass[b], u[b]) for b in range(batch)]
    place = torch.stack([f[0] * batch + b for b, f in enumerate(found)]) if batch else torch.empty(0, count).long()
    near = torch.stack([f[1] for f in found]) if batch else torch.empty(0, count)
    return mass.logsumexp(1), place, near


def exact_draw(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    place: Tensor,
    key: tuple[int, int],
    kind: int,
    scale: float,
    alpha: float,
    excluded: Sequence[Sequence[int]],
    row: int,
) -> tuple[Tensor, Tensor]:
    """ids [B, m], and how far the uniform numbers are from a boundary between two classes [B, m].

    Example:
        >>> import torch
        >>> from samplex_cuda.reference.exact_sample import SOFTMAX, exact_draw
        >>> h, weight, place = torch.ones(1, 1), torch.tensor([[0.0], [90.0]]), torch.zeros(1, 2, dtype=torch.int64)
        >>> exact_draw(h, weight, None, place, (0, 0), SOFTMAX, 1.0, 0.0, [[]], 0)[0]
        tensor([[1, 1]])
    """
    batch, count = place.shape
    u = uniforms(key, row, batch, count)[..., 1]
    s = hidden.double() @ weight.double().T
    log_w = log_weights(scale * (s if bias is None else s + bias.double()), kind, alpha)
    ids, near = torch.empty_like(place), torch.empty_like(place, dtype=torch.float64)
    for b in range(batch):
        if excluded[b]:
            log_w[b, list(excluded[b])] = -torch.inf
        for j in range(count):
            first = int(place[b, j]) // batch * BLOCK
            found, gap = invert(log_w[b, first : first + BLOCK], u[b, j : j + 1])
            ids[b, j], near[b, j] = first + int(found), float(gap)
        if excluded[b] and bool((log_w[b] == -torch.inf).all()):
            ids[b], near[b] = min(excluded[b]), 1.0
    return ids, near


def exact_log_prob(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lse: Tensor,
    ids: Tensor,
    kind: int,
    scale: float,
    alpha: float,
    excluded: Sequence[Sequence[int]],
) -> Tensor:
    """Log-probabilities [B, n] float64 of ids [B, n], at most 0.

    Example:
        >>> import torch
        >>> from samplex_cuda.reference.exact_sample import SOFTMAX, exact_log_prob
        >>> h, weight, lse = torch.ones(1, 1), torch.zeros(4, 1), torch.tensor([4.0]).log()
        >>> exact_log_prob(h, weight, None, lse, torch.tensor([[2]]), SOFTMAX, 1.0, 0.0, [[]]).exp()
        tensor([[0.2500]], dtype=torch.float64)
    """
    s = hidden.double() @ weight.double().T
    log_w = log_weights(scale * (s if bias is None else s + bias.double()), kind, alpha)
    out = (log_w.gather(1, ids) - lse.double()[:, None]).clamp(max=0.0)
    for b, some in enumerate(excluded):
        if not some:
            continue
        held = torch.isin(ids[b], torch.tensor(list(some)))
        out[b, held] = -torch.inf
        if float(lse[b]) == -torch.inf:
            out[b] = torch.where(ids[b] == min(some), 0.0, -torch.inf).double()
    return out
