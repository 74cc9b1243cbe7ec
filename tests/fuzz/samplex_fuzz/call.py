"""What a generator makes: one call with its arguments, its oracle, and the registry of generators."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class PoisonedError(Exception):
    """A refused call that left an object unusable."""


class Args(dict[str, Any]):
    """Arguments by name, also as attributes."""

    def __getattr__(self, name: str) -> Any:
        """The argument of this name."""
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Dice:
    """All randomness of one call, from (seed, number) alone."""

    def __init__(self, seed: int, number: int) -> None:
        self.r = random.Random(seed << 40 | number)
        self.g = torch.Generator().manual_seed(self.r.getrandbits(60))

    def int(self, low: int, high: int) -> int:
        """Uniform in [low, high]."""
        return self.r.randint(low, high)

    def maybe(self, p: float) -> bool:
        """True with probability p."""
        return self.r.random() < p

    def pick(self, choices: Any) -> Any:
        """One of `choices`."""
        return self.r.choice(choices)

    def size(self, most: int = 5) -> int:
        """A number of rows: rarely 0, often 1 to `most`."""
        return 0 if self.maybe(0.05) else self.r.randint(1, most)

    def width(self) -> int:
        """A row width: odd ones, vector lengths and their neighbors."""
        return self.r.choice((1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33))

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
        """Normal numbers."""
        x = torch.randn(shape, generator=self.g)
        return (x * scale if scale != 1.0 else x).to(dtype)

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
        """Numbers in [low, high)."""
        return (torch.rand(shape, generator=self.g) * (high - low) + low).to(dtype)

    def ids(self, classes: int, *shape: int) -> Tensor:
        """int64 in [0, classes); zeros for no classes."""
        return torch.randint(0, max(classes, 1), shape, generator=self.g)

    def key(self) -> Tensor:
        """A random key."""
        return torch.tensor([self.r.getrandbits(62), self.r.getrandbits(40)])

    def float_dtype(self) -> torch.dtype:
        """Mostly float32."""
        return self.r.choices((torch.float32, torch.float64, torch.bfloat16, torch.float16), weights=(5, 2, 1, 1))[0]


@dataclasses.dataclass
class Call:
    """One call.

    Attributes:
        args: the arguments by name, in the order of the signature.
        run: makes the call.
        check: the oracle; raises AssertionError. Gets the arguments as they were before the call, the result, the
            arguments after it (in-place ops), and which of them the mutator changed.
        mutable: arguments the call may write to.
        words: names other than those of `args` by which a message may speak of an argument.
        fixed: arguments the mutator leaves alone.
    """

    args: Args
    run: Callable[[Args], Any]
    check: Callable[[Args, Any, Args, set[str]], None]
    mutable: frozenset[str] = frozenset()
    words: tuple[str, ...] = ()
    fixed: frozenset[str] = frozenset()


Generator = Callable[[Dice], Call]
GENERATORS: dict[str, Generator] = {}
WEIGHTS: dict[str, float] = {}


def generator(name: str, weight: float = 1.0) -> Callable[[Generator], Generator]:
    """Registers a generator: of an op under its name in torch.ops.samplex, of anything else under its public name."""

    def add(make: Generator) -> Generator:
        if name in GENERATORS:
            raise ValueError(f"generator: {name} must be registered once")
        GENERATORS[name], WEIGHTS[name] = make, weight
        return make

    return add


def op_call(
    name: str,
    args: dict[str, Any],
    check: Callable[[Args, Any, Args, set[str]], None],
    mutable: tuple[str, ...] = (),
    words: tuple[str, ...] = (),
    fixed: tuple[str, ...] = (),
) -> Call:
    """A call of a raw op; `args` in the order of its schema."""
    op = getattr(torch.ops.samplex, name).default
    return Call(Args(args), lambda a: op(*a.values()), check, frozenset(mutable), words, frozenset(fixed))
