"""The contract between samplers and losses: what was drawn, and with which probability."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Draw(NamedTuple):
    """Drawn classes with their log-probability under the distribution they were drawn from.

    Attributes:
        ids: int64, [B, m] per row or [m] shared by the batch.
        log_q: float32, the shape of `ids`. Finite for every id that was drawn.
        replacement: whether the draws of a row are independent.

    Example:
        >>> import samplex_cuda as sx
        >>> draw = sx.samplers.Uniform(1000).sample(None, 5, batch_size=2, key=sx.Key(0))
        >>> draw.ids.shape, draw.log_q[0].exp()
        (torch.Size([2, 5]), tensor([0.0010, 0.0010, 0.0010, 0.0010, 0.0010]))
    """

    ids: Tensor
    log_q: Tensor
    replacement: bool = True
