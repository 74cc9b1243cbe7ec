"""Codebooks: k-means by Lloyd's iterations, in chunks, on the device of the rows, reproducible by a key."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from samplex_cuda import _device, chunking
from samplex_cuda.products import product
from samplex_cuda.rng import fold_in, uniform_at

__all__ = ["ROWS_PER_CODE", "assign", "kmeans"]

ROWS_PER_CODE = 256  # that are examined: more change the codes little
_SEED_ROWS = 64  # rows for each code among which the first codes are chosen
_STILL = 1e-4  # relative fall of the inertia from which on the CPU stops


def _blocks(count: int, codes: int, device: torch.device) -> list[slice]:
    size = max(256, chunking.chunk_bytes(device, "features") // 4 // max(1, codes))
    return [slice(at, min(at + size, count)) for at in range(0, count, size)]


def _nearest(rows: Tensor, codes: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Index of the nearest code of each row, and its |code|^2 - 2 row . code."""
    made = product(rows, codes.t(), torch.empty(rows.shape[0], codes.shape[0], device=rows.device))
    value, index = torch.add(sizes, made, alpha=-2.0, out=made).min(1)
    return index, value


@torch.no_grad()
def assign(rows: Tensor, codes: Tensor) -> Tensor:
    """Index of the nearest code of each row, int64 [n]. A row that is not finite gets any.

    Args:
        rows: [n, d] floating point.
        codes: [K, d] float32.

    Example:
        >>> import torch
        >>> from samplex_cuda.samplers.kmeans import assign
        >>> assign(torch.tensor([[0.1], [2.0]]), torch.tensor([[0.0], [3.0]]))
        tensor([0, 1])
    """
    sizes = codes.square().sum(1)
    out = torch.empty(rows.shape[0], dtype=torch.int64, device=rows.device)
    for part in _blocks(rows.shape[0], codes.shape[0], rows.device):
        out[part] = _nearest(rows[part].float(), codes, sizes)[0]
    return out


def _first_codes(rows: Tensor, count: int, pair: Tensor) -> Tensor:
    """k-means++ (Arthur & Vassilvitskii 2007): each code is a row, drawn by its squared distance to those before.

    Of several such rows the one that lowers the inertia most is taken.
    """
    trials = 2 + int(math.log(count))
    u = uniform_at(pair, torch.arange(count * trials, device=rows.device)).view(count, trials)
    sizes = rows.square().sum(1)
    nearest, codes = torch.full_like(sizes, torch.inf), rows.new_empty(count, rows.shape[1])
    for k in range(count):
        if k == 0:
            place = (u[0, :1] * rows.shape[0]).long()
        else:
            running = nearest.double().cumsum(0)
            place = torch.searchsorted(running, u[k] * running[-1:], right=True).clamp_max_(rows.shape[0] - 1)
        tried = rows[place]
        made = product(tried, rows.t(), torch.empty(place.shape[0], rows.shape[0], device=rows.device))
        far = made.mul_(-2.0).add_(sizes).add_(sizes[place, None]).clamp_min_(0.0).clamp_max_(nearest)
        best = far.sum(1).argmin(0, keepdim=True)
        nearest, codes[k] = far[best][0], tried[best][0]
    return codes


def _step(rows: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    """One iteration of Lloyd's: the new codes, and the inertia of the old ones. Deterministic on every device."""
    count, width = codes.shape
    sizes = codes.square().sum(1)
    sums = torch.zeros(count, width, device=rows.device)
    number = torch.zeros(count, device=rows.device)
    far = torch.empty(rows.shape[0], device=rows.device)
    for part in _blocks(rows.shape[0], count, rows.device):
        some = rows[part]
        index, value = _nearest(some, codes, sizes)
        far[part] = value.add_(some.square().sum(1)).clamp_min_(0.0)
        if _device.host_waits(rows):  # `index_add_` adds in an order that changes from run to run there
            hot = torch.zeros(some.shape[0], count, device=rows.device).scatter_(1, index[:, None], 1.0)
            sums += product(hot.t(), some, torch.empty_like(sums))
            number += hot.sum(0)
        else:
            sums.index_add_(0, index, some)
            number.index_add_(0, index, torch.ones_like(value))
    empty = number == 0
    # A code without rows moves to one of the rows that are farthest from theirs.
    worst = rows[far.topk(min(count, rows.shape[0])).indices]
    rank = (empty.cumsum(0) - 1).clamp_(0, worst.shape[0] - 1)
    return torch.where(empty[:, None], worst[rank], sums / number.clamp_min(1.0)[:, None]), far.double().sum()


@torch.no_grad()
def kmeans(rows: Tensor, num_codes: int, pair: Tensor, *, start: Tensor | None = None, iterations: int = 20) -> Tensor:
    """Codes [K, d] float32 with a small sum of squared distances from the rows to their nearest code.

    At most 256 K rows are examined, chosen by the key.

    Args:
        rows: [n, d] floating point, n >= 1, finite.
        num_codes: K.
        pair: int64 [2], a reserved key.
        start: [K, d] codes to begin with; None: chosen among the rows by k-means++.
        iterations: of Lloyd's, at most.

    Example:
        >>> import torch
        >>> from samplex_cuda.samplers.kmeans import kmeans
        >>> rows = torch.tensor([[0.0], [0.2], [5.0], [5.2]])
        >>> kmeans(rows, 2, torch.tensor([0, 0])).sort(0).values.flatten()
        tensor([0.1000, 5.1000])
    """
    most, count = ROWS_PER_CODE * num_codes, rows.shape[0]
    if count > most:
        chosen = uniform_at(fold_in(pair, 0), torch.arange(most, device=rows.device)) * count
        rows = rows[chosen.long().sort().values]
    rows = rows.float().contiguous()
    if start is None:
        some = rows[:: max(1, rows.shape[0] // (_SEED_ROWS * num_codes))]
        codes = _first_codes(some.contiguous(), num_codes, fold_in(pair, 1))
    else:
        codes = start.float()
    before = torch.inf
    for _ in range(iterations):
        codes, inertia = _step(rows, codes)
        if not _device.host_waits(rows):
            now = float(inertia)
            if not now < before * (1.0 - _STILL):
                break
            before = now
    return codes
