"""Randomness as an argument: every draw is a function of a key (seed and offset) and its position."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["Key", "key_tensor"]

_INT64 = 1 << 63


def _as_int64(value: int) -> int:
    """The low 64 bits of `value`, read as a signed number."""
    return (value + _INT64) % (1 << 64) - _INT64


class Key:
    """A seed and an offset; each reservation moves the offset by one.

    The same key gives the same draws on every device, thread count and backend. Draws of one reservation are told apart
    by row and position, draws of different reservations by the offset, runs by the seed.

    Inside `torch.compile`, or to capture a CUDA graph, call `reserve` outside and pass its tensor: the tensor is read
    when the kernel runs, so writing a new offset into it makes a captured graph draw anew.

    Args:
        seed: any integer of 64 bits.
        offset: the number of the next reservation.

    Example:
        >>> import samplex_cuda as sx
        >>> key = sx.Key(7)
        >>> key.reserve("cpu"), key.reserve("cpu")
        (tensor([7, 0]), tensor([7, 1]))
        >>> key
        Key(seed=7, offset=2)
    """

    def __init__(self, seed: int, offset: int = 0) -> None:
        for name, value in (("seed", seed), ("offset", offset)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"Key: {name} must be an int, got {type(value).__name__}")
        self.seed = _as_int64(seed)
        self.offset = _as_int64(offset)

    def reserve(self, device: torch.device | str = "cpu") -> Tensor:
        """An int64 [2] tensor (seed, offset) on `device`; the offset of this key moves by one."""
        pair = torch.tensor([self.seed, self.offset], dtype=torch.int64, device=device)
        self.offset = _as_int64(self.offset + 1)
        return pair

    def state_dict(self) -> dict[str, int]:
        """Seed and next offset, to resume a run at the same draw."""
        return {"seed": self.seed, "offset": self.offset}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take over seed and offset from `state_dict`."""
        restored = Key(state["seed"], state["offset"])
        self.seed, self.offset = restored.seed, restored.offset

    def __eq__(self, other: object) -> bool:
        """Same seed and same next offset."""
        return isinstance(other, Key) and (self.seed, self.offset) == (other.seed, other.offset)

    __hash__ = None  # type: ignore[assignment]  # mutable

    def __repr__(self) -> str:
        """Seed and next offset."""
        return f"Key(seed={self.seed}, offset={self.offset})"


def key_tensor(op: str, key: Key | Tensor | None, device: torch.device) -> Tensor:
    """The int64 [2] tensor (seed, offset) an op takes, on `device`, without a host sync.

    Args:
        op: name for error messages.
        key: a `Key` (reserves), an int64 [2] tensor (used as it is), or None: a fresh pair from torch's default
            generator of the device, so that `torch.manual_seed` reproduces a run.
        device: where the op runs.

    Example:
        >>> import torch
        >>> from samplex_cuda.rng import Key, key_tensor
        >>> key_tensor("uniform", Key(3, 4), torch.device("cpu"))
        tensor([3, 4])
    """
    if key is None:
        return torch.randint(_INT64 - 1, (2,), dtype=torch.int64, device=device)
    if isinstance(key, Key):
        return key.reserve(device)
    if not isinstance(key, Tensor):
        raise TypeError(f"{op}: key must be a Key, an int64 [2] tensor or None, got {type(key).__name__}")
    if key.shape != (2,) or key.dtype != torch.int64:
        raise ValueError(f"{op}: key must be [2] int64, got {list(key.shape)} {str(key.dtype).removeprefix('torch.')}")
    if key.device != device:
        raise ValueError(f"{op}: key must be on {device}, got {key.device}")
    return key.contiguous()
