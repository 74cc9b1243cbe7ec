"""A queue of past keys: negatives beyond the batch, for towers whose keys come from an encoder."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from samplex_cuda._checks import check_dense, check_int, check_tensor, describe
from samplex_cuda.samplers.base import check_int64, restore_dtypes

__all__ = ["KeyQueue", "QueuedKeys"]

_OP = "KeyQueue"


class QueuedKeys(NamedTuple):
    """What a queue holds: keys [n, d], ids int64 [n], and log_q [n] as they were when they were pushed."""

    keys: Tensor
    ids: Tensor
    log_q: Tensor


class KeyQueue(nn.Module):
    """The keys of the last batches with their ids and log q, as negatives of the next ones (cross-batch memory).

    `sx.functional.contrastive(..., queue=queue)` adds them to the keys of the batch: more negatives for the price of a
    larger matrix product, and no encoder runs for them. Their rows are as old as their batch, so that scores against
    them lag behind the encoder; gradients do not go through them. log_q is kept as it was pushed: an estimate of that
    time. Everything is in `state_dict()`.

    Args:
        size: keys that are kept; a new batch pushes out the oldest.
        dim: d, the width of a key.
        dtype: of the keys.
        device: where they are kept.

    Example:
        >>> import torch, samplex_cuda as sx
        >>> queue = sx.samplers.KeyQueue(1000, 16)
        >>> for _ in range(3):
        ...     queries, keys, items = torch.randn(8, 16), torch.randn(8, 16), torch.randint(50, (8,))
        ...     loss = sx.functional.contrastive(queries, keys, key_ids=items, queue=queue)
        ...     queue.push(keys, items)
        >>> len(queue), queue.held().keys.shape
        (24, torch.Size([24, 16]))
    """

    keys: Tensor
    ids: Tensor
    log_q: Tensor
    pushed: Tensor

    def __init__(
        self, size: int, dim: int, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        self.size = check_int(_OP, "size", size, 1, 1 << 40)
        self.dim = check_int(_OP, "dim", dim, 1, 1 << 32)
        self.register_buffer("keys", torch.zeros(size, dim, dtype=dtype, device=device))
        self.register_buffer("ids", torch.full((size,), -1, dtype=torch.int64, device=device))
        self.register_buffer("log_q", torch.zeros(size, device=device))
        self.register_buffer("pushed", torch.zeros((), dtype=torch.int64))
        self._pushed = 0  # the same as a number, so that nobody waits for it

    def __len__(self) -> int:
        """Keys that are held."""
        return min(self._pushed, self.size)

    def held(self) -> QueuedKeys:
        """The keys, ids and log_q that are held, as views."""
        n = len(self)
        return QueuedKeys(self.keys[:n], self.ids[:n], self.log_q[:n])

    @torch.no_grad()
    def push(self, keys: Tensor, ids: Tensor, log_q: Tensor | None = None) -> None:
        """Add the keys of a batch; the oldest leave.

        Args:
            keys: [n, d], of the dtype and device of the queue; detached.
            ids: int64 [n], what each key is.
            log_q: [n], log-probability of each as a draw; None: 0, for a loss without correction.
        """
        self.check(check_dense(_OP, "keys", check_tensor(_OP, "keys", keys, f"[n, {self.dim}]")))
        check_int64(_OP, "ids", ids)
        n = keys.shape[0]
        if log_q is None:
            log_q = self.log_q.new_zeros(n)
        for name, t in (("ids", ids), ("log_q", log_q)):
            if not isinstance(t, Tensor) or t.shape != (n,) or t.device != self.keys.device:
                raise ValueError(f"{_OP}: {name} must be [{n}] on {self.keys.device} like keys, got {describe(t)}")
        if not log_q.is_floating_point():
            raise TypeError(f"{_OP}: log_q must be floating point, got {describe(log_q)}")
        check_dense(_OP, "log_q", log_q)
        skip = max(0, n - self.size)  # a batch longer than the queue leaves its end
        begin = (self._pushed + skip) % self.size
        for held, new in ((self.keys, keys), (self.ids, ids), (self.log_q, log_q)):
            new = new.detach()[skip:].to(held.dtype)
            first = min(self.size - begin, new.shape[0])
            held[begin : begin + first] = new[:first]
            held[: new.shape[0] - first] = new[first:]
        self._pushed += n
        self.pushed.fill_(self._pushed)

    def check(self, keys: Tensor, op: str = _OP) -> None:
        """Raises if keys [n, d] do not fit those of the queue."""
        if keys.dim() != 2 or keys.shape[1] != self.dim:
            raise ValueError(f"{op}: keys must be [n, {self.dim}], the width of the queue, got {describe(keys)}")
        if keys.dtype != self.keys.dtype or keys.device != self.keys.device:
            raise ValueError(f"{op}: keys must be {describe(self.keys)} like the queue, got {describe(keys)}")

    def _apply(self, fn: Any, recurse: bool = True) -> KeyQueue:
        kept = {"log_q": self.log_q}
        super()._apply(fn, recurse)
        restore_dtypes(self, kept)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._pushed = int(self.pushed)

    def extra_repr(self) -> str:
        """Sizes."""
        return f"{self.size}, {self.dim}, held={len(self)}"
