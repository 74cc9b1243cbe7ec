"""Randomness as an argument: every draw is a function of a key (seed and offset) and its position."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from samplex_cuda._checks import check_int, describe

__all__ = [
    "Key",
    "below",
    "fold_in",
    "is_capturing",
    "key_tensor",
    "passing_key",
    "philox_bits",
    "uniform53",
    "uniform_at",
]

_INT64 = 1 << 63


def _as_int64(value: int) -> int:
    """The low 64 bits of `value`, read as a signed number."""
    return (value + _INT64) % (1 << 64) - _INT64


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream of a CUDA device is being captured in a graph: host numbers would be frozen in it."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


_modes = torch._C._len_torch_dispatch_stack
_of_thread = threading.local()
_zero_one: dict[torch.device, Tensor] = {}


def _pair_on_device(seed: int, offset: int, device: torch.device, out: Tensor | None = None) -> Tensor:
    """(seed, offset) without a copy from the host: seed + (0, 1) * (offset - seed), one launch that carries both."""
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    steps = _zero_one.get(device)
    if steps is None:
        steps = torch.arange(2, device=device)
        if type(steps) is Tensor:  # not a stand-in of a tracer
            _zero_one[device] = steps
    start = torch.tensor(seed, dtype=torch.int64, device="cpu")  # of no dimension: passed to the kernel by value
    return torch.add(start, steps, alpha=_as_int64(offset - seed), out=out)


class Key:
    """A seed and an offset; each reservation moves the offset by one.

    The same key gives the same draws on every device, thread count and backend. Draws of one reservation differ
    by row and position, draws of different reservations by the offset, runs by the seed.

    Inside `torch.compile`, or to capture a CUDA graph, call `reserve` outside and pass its tensor: the tensor is read
    when the kernel runs, so that `reserve(out=tensor)` makes a captured graph draw again. `sx.graphs.capture_step` does
    this. While a graph is captured, `reserve` raises.

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
            check_int("Key", name, value, None)
        self.seed = _as_int64(seed)
        self.offset = _as_int64(offset)

    def reserve(self, device: torch.device | str = "cpu", *, out: Tensor | None = None) -> Tensor:
        """An int64 [2] tensor (seed, offset) on `device`; the offset of this key moves by one.

        On a CUDA device this is one kernel launch: no copy from the host, and nothing to wait for.

        Args:
            device: where the tensor is made.
            out: an int64 [2] tensor to write into instead, on any device.
        """
        device = torch.device(device) if out is None else out.device
        if is_capturing(device):
            raise RuntimeError(
                "Key.reserve: a key must be reserved outside of a CUDA graph, got a stream that is being captured; "
                "every replay would draw the same ids: pass a reserved tensor, set by reserve(out=tensor) before a "
                "replay (sx.graphs.capture_step(step, key=key) does), or key=None for torch's generator"
            )
        if device.type == "cpu":
            pair = torch.tensor([self.seed, self.offset], dtype=torch.int64, device=device)
            pair = pair if out is None else out.copy_(pair)
        else:
            pair = _pair_on_device(self.seed, self.offset, device, out)
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
        key: a `Key` (reserves), an int64 [2] tensor (used unchanged), or None: a fresh pair from torch's default
            generator of the device, so that `torch.manual_seed` reproduces a run. An int64 [3] tensor holds the number
            of the first row, too: static samplers and trees then draw these rows of a larger batch.
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
    if key.shape not in ((2,), (3,)) or key.dtype != torch.int64 or key.layout is not torch.strided:
        raise ValueError(f"{op}: key must be [2] or [3] int64, got {describe(key)}")
    if key.device != device:
        raise ValueError(f"{op}: key must be on {device}, got {key.device}")
    return key.contiguous()


def passing_key(op: str, key: Key | Tensor | None, like: Tensor) -> Tensor:
    """`key_tensor` for an op that is called at once and keeps nothing: on a CPU the memory is used again.

    Args:
        op: name for error messages.
        key: see `key_tensor`.
        like: a tensor on the device where the op runs.

    Example:
        >>> import torch
        >>> from samplex_cuda.rng import key_tensor, passing_key
        >>> a = key_tensor("uniform", None, torch.device("cpu")) if torch.manual_seed(3) else None
        >>> b = passing_key("uniform", None, torch.zeros(1)) if torch.manual_seed(3) else None
        >>> torch.equal(a, b)
        True
    """
    if key is not None or not like.is_cpu or _modes() > 0:  # a mode may want tensors of its own kind
        return key_tensor(op, key, like.device)
    try:
        pair: Tensor = _of_thread.pair
    except AttributeError:
        pair = _of_thread.pair = torch.empty(2, dtype=torch.int64, device="cpu")
    return pair.random_(_INT64 - 1)  # the bits of torch.randint


def fold_in(pair: Tensor, number: int) -> Tensor:
    """Another key for part `number` of an op that draws several times, like `pair` and on its device, no sync.

    The seed goes through the mixing step of SplitMix64 (Steele et al. 2014), so that keys folded twice do not meet
    those folded once; the offset stays.

    Example:
        >>> import torch
        >>> from samplex_cuda.rng import fold_in
        >>> pair = torch.tensor([3, 4])
        >>> int(fold_in(pair, 0)[1]), bool(fold_in(pair, 0)[0] == fold_in(pair, 1)[0])
        (4, False)
    """
    mixed = pair[:1] + _as_int64((number + 1) * 0x9E3779B97F4A7C15)
    return torch.cat([_mixed(mixed), pair[1:]])


def uniform_at(pair: Tensor, position: Tensor) -> Tensor:
    """A uniform number in [0, 1) for each position, fp64 with 53 random bits, whatever is asked for besides.

    What a table is filled with row by row, so that its numbers do not depend on how many ranks share it.

    Args:
        pair: int64 [2], a reserved key.
        position: int64 of any shape.

    Example:
        >>> import torch
        >>> from samplex_cuda.rng import uniform_at
        >>> pair = torch.tensor([3, 4])
        >>> torch.equal(uniform_at(pair, torch.arange(9))[4:], uniform_at(pair, torch.arange(4, 9)))
        True
    """
    start = _mixed(_mixed(pair[0] + _as_int64(0x9E3779B97F4A7C15)) ^ pair[1])
    bits = _mixed(start + position * _as_int64(0x9E3779B97F4A7C15))
    return _shift_right(bits, 11).double() * 2.0**-53


def _mixed(x: Tensor) -> Tensor:
    """The mixing step of SplitMix64."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ _shift_right(x, shift)) * _as_int64(factor)
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, count: int) -> Tensor:
    """Logical shift of the 64 bits; torch's is arithmetic."""
    return (x >> count) & ((1 << (64 - count)) - 1)


def philox_bits(pair: Tensor, rows: int, draws: int, block: int | Tensor, first: int = 0) -> tuple[Tensor, Tensor]:
    """The two 64-bit numbers that draw j of row b takes from Philox block `block`, as the kernels do: int64 [B, m].

    Args:
        pair: int64 [2], a reserved key.
        rows: B.
        draws: m.
        block: level or attempt, below 256; or several, int64 [L, 1, 1], for numbers [L, B, m].
        first: number of the first row.

    Example:
        >>> import torch
        >>> from samplex_cuda.rng import philox_bits
        >>> [hex(int(bits) & (1 << 64) - 1) for bits in philox_bits(torch.tensor([0, 0]), 1, 1, 0)]
        ['0xe169c58d6627e8d5', '0x9b00dbd8bc57ac4c']
    """
    word = 0xFFFFFFFF
    device = pair.device
    k0, k1 = pair[0] & word, _shift_right(pair[0], 32)
    c0, c1 = (pair[1] & word).expand(rows, draws), _shift_right(pair[1], 32).expand(rows, draws)
    c2 = ((torch.arange(rows, device=device) + first) & word).unsqueeze(1).expand(rows, draws)
    c3 = (torch.arange(draws, device=device) << 8 | block) & word
    c3 = c3.expand(*c3.shape[:-2], rows, draws)
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # they wrap around: the low 64 bits are right
        c0, c1, c2, c3 = _shift_right(p1, 32) ^ c1 ^ k0, p1 & word, _shift_right(p0, 32) ^ c3 ^ k1, p0 & word
        k0, k1 = (k0 + 0x9E3779B9) & word, (k1 + 0xBB67AE85) & word
    return c1 << 32 | c0, c3 << 32 | c2


def uniform53(bits: Tensor) -> Tensor:
    """Uniform numbers in [0, 1) of 53 random bits, fp64, from numbers of 64 random bits.

    Example:
        >>> import torch
        >>> from samplex_cuda.rng import uniform53
        >>> uniform53(torch.tensor([0, 1 << 62, -1 << 63]))
        tensor([0.0000, 0.2500, 0.5000], dtype=torch.float64)
    """
    return _shift_right(bits, 11).double() * 2.0**-53


def below(bits: Tensor, count: Tensor | int) -> Tensor:
    """A number in [0, count) from 64 random bits, by multiply-high.

    Args:
        bits: int64 of any shape.
        count: below 2^62; a number, or int64 that broadcasts against `bits`.

    Example:
        >>> import torch
        >>> from samplex_cuda.rng import below
        >>> below(torch.tensor([0, 1 << 62, -1]), 1000)
        tensor([  0, 250, 999])
    """
    word = 0xFFFFFFFF
    a_low, a_high = bits & word, _shift_right(bits, 32)
    b_low, b_high = count & word, count >> 32
    middle = a_high * b_low + _shift_right(a_low * b_low, 32)
    other = a_low * b_high + (middle & word)
    return a_high * b_high + _shift_right(middle, 32) + _shift_right(other, 32)
