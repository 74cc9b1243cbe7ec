"""The contract between samplers and losses: what was drawn, and with what probability."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from samplex_cuda import _device

__all__ = ["COPIES", "Draw", "Negatives"]

COPIES = 0.5  # expected further copies of a draw from which it pays to look for them


class Draw(NamedTuple):
    """Drawn classes with their log-probability under the distribution they were drawn from.

    Attributes:
        ids: int64, [B, m] per row or [m] shared by the batch.
        log_q: float32, the shape of `ids`. Finite for every id that was drawn.
        independent: whether the draws of a row are independent. If they are not (stratified or merged draws), a class y
            still weighs 1 in expectation: E[copies of y] = m q(y), so sums of exp(o - log_q) / m are right.

    Example:
        >>> import samplex_cuda as sx
        >>> draw = sx.samplers.Uniform(1000).sample(None, 5, batch_size=2, key=sx.Key(0))
        >>> draw.ids.shape, draw.log_q[0].exp()
        (torch.Size([2, 5]), tensor([0.0010, 0.0010, 0.0010, 0.0010, 0.0010]))
    """

    ids: Tensor
    log_q: Tensor
    independent: bool = True

    def repeats(self) -> bool:
        """Whether `merged` pays: shared draws with many copies, if the answer needs no wait for a device.

        Example:
            >>> import samplex_cuda as sx
            >>> short, long = sx.samplers.Unigram([8, 1, 1]), sx.samplers.Uniform(1_000_000)
            >>> [sampler.sample(None, 64, shared=True).repeats() for sampler in (short, long)]
            [True, False]
        """
        if torch.compiler.is_compiling() or _device.host_waits(self.ids) or self.ids.dim() != 1:
            return False
        return self.ids.shape[0] > 1 and float(self.log_q.exp().mean()) * self.ids.shape[0] > COPIES

    def merged(self) -> Draw:
        """Shared draws with each class once, for losses that weigh a draw by 1 / (m q): the same loss for less work.

        A class that came n times in m draws weighs n / (m q); among u distinct classes it does so with
        log_q + log(m / (n u)). Shared draws from a skewed distribution shrink to a fraction of their rows.

        Returns:
            ids [u], ascending (stratified draws keep their order), and their log_q; `independent` is False. On a GPU
            this waits for the device.

        Example:
            >>> import torch
            >>> from samplex_cuda.draw import Draw
            >>> ids, log_q, _ = Draw(torch.tensor([5, 2, 5, 5]), torch.tensor([0.6, 0.1, 0.6, 0.6]).log()).merged()
            >>> ids, (log_q.exp() * 2)  # 1 / the weights 1 / (4 x 0.1) and 3 / (4 x 0.6)
            (tensor([2, 5]), tensor([0.4000, 0.8000]))
        """
        if self.ids.dim() != 1:
            raise ValueError(f"Draw.merged: ids must be [m], shared by the batch, got {list(self.ids.shape)}")
        find = torch.unique if self.independent else torch.unique_consecutive  # stratified: copies are adjacent
        ids, place, times = find(self.ids, return_inverse=True, return_counts=True)
        if ids.shape == self.ids.shape:
            return self
        once = self.log_q.new_empty(ids.shape).scatter_(0, place, self.log_q)  # copies of a class have one log_q
        log_q = once.double() - times.double().log() + math.log(self.ids.shape[0] / ids.shape[0])
        return Draw(ids, log_q.to(once.dtype), False)


class Negatives(NamedTuple):
    """Negatives of the caller: from a log of impressions, a search, or another program.

    A `Draw` of a sampler does as well wherever these are taken.

    Attributes:
        ids: int64 [B, m] per row, [m] shared by the batch, or a CSR pair (offsets int64 [B + 1], ids int64 [n]) where
            rows have different numbers of negatives.
        log_q: floating point, log-probability of each negative under the distribution it was drawn from: the shape of
            `ids`, [n] for a CSR pair. None: uncorrected. Each negative then enters with its plain score, the loss is
            relative to these negatives only, and scores of classes that are often negatives come out too low.

    Example:
        >>> import torch, samplex_cuda as sx
        >>> head = sx.SampledClassifier(8, 100, sx.samplers.Uniform(100), num_samples=5)
        >>> h, y = torch.randn(2, 8), torch.tensor([3, 4])
        >>> clicked_not = torch.tensor([0, 3, 4]), torch.tensor([10, 11, 12, 20])  # three of row 0, one of row 1
        >>> head(h, y, negatives=sx.Negatives(clicked_not)).shape
        torch.Size([])
    """

    ids: Tensor | tuple[Tensor, Tensor]
    log_q: Tensor | None = None
