"""Synthetic data with the two properties that make large class sets hard: a hierarchy and a long tail.

`HierarchicalZipf` is a stream of batches, `BuiltIn` a `Dataset` with the same classes.

Nothing is downloaded and nothing of size C * dim is stored: a class center is computed from its place in the tree when
a batch needs it, so 10^6 classes and more cost no more than a few small tables and the class probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from samplex_cuda._checks import check_int
from samplex_cuda.data.base import Array, Dataset, _hash64, _mix

__all__ = ["BuiltIn", "HierarchicalZipf"]

# Directions of tree nodes are sums of entries of a few code books of this size: C distinct directions from a small
# table.
_BOOKS = 4
_BOOK_SIZE = 4096
_SPLITS = {"train": 0, "valid": 1}


class HierarchicalZipf:
    """Seeded classification data: classes in a tree, Zipf class frequencies, Gaussian noise around class centers.

    Class ids are frequency ranks: class 0 is the most frequent, and p(c) is proportional to (c + 1)^-exponent. (So
    `samplers.LogUniform` fits the distribution.) Each class is a leaf of a tree of `depth` levels with `branching`
    children per inner node, placed there at random, so every super-class has frequent and rare members. The center of a
    class is the sum of a random direction for each of its ancestors and for itself, scaled to length 1; an example is
    `x = centre + noise * gaussian / sqrt(dim)`.

    Example i of a split is the same for any batch size: data come in blocks of `block_size` examples, each block
    from its own `torch.Generator`, and batches are cut from the stream of blocks.

    Args:
        num_classes: C.
        dim: width of x.
        num_examples: examples per epoch of the training split.
        seed: everything follows from it.
        num_valid: examples of the validation split.
        exponent: Zipf exponent.
        depth: levels of super-classes above the classes.
        branching: children of each inner node; by default the (depth + 1)-th root of C.
        noise: length of the noise vector relative to the center's.
        block_size: examples drawn at once.

    Example:
        >>> from samplex_cuda.data import HierarchicalZipf
        >>> data = HierarchicalZipf(num_classes=1000, dim=16, num_examples=512, seed=0)
        >>> x, y = next(data.batches("train", batch_size=32))
        >>> x.shape, y.shape, int(y.max()) < 1000
        (torch.Size([32, 16]), torch.Size([32]), True)
    """

    def __init__(
        self,
        num_classes: int,
        dim: int,
        num_examples: int,
        seed: int = 0,
        *,
        num_valid: int = 4096,
        exponent: float = 1.0,
        depth: int = 2,
        branching: int | None = None,
        noise: float = 0.6,
        block_size: int = 4096,
    ) -> None:
        for name, value, least in (
            ("num_classes", num_classes, 1),
            ("dim", dim, 1),
            ("num_examples", num_examples, 0),
            ("num_valid", num_valid, 0),
            ("depth", depth, 0),
            ("block_size", block_size, 1),
        ):
            check_int("HierarchicalZipf", name, value, least)
        if branching is not None and branching < 2:
            raise ValueError(f"HierarchicalZipf: branching must be at least 2, got {branching!r}")
        for name, number in (("exponent", exponent), ("noise", noise)):
            if not (math.isfinite(number) and number >= 0):
                raise ValueError(f"HierarchicalZipf: {name} must be finite and not negative, got {number!r}")
        self.num_classes = num_classes
        self.dim = dim
        self.num_examples = num_examples
        self.num_valid = num_valid
        self.seed = seed
        self.exponent = exponent
        self.depth = depth
        self.branching = branching or max(2, math.ceil(num_classes ** (1.0 / (depth + 1))))
        self.noise = noise
        self.block_size = block_size

        generator = self._generator(-1, 0)
        self._books = torch.randn(_BOOKS, _BOOK_SIZE, dim, generator=generator)
        # c -> (c * stride + shift) mod C visits every place of the tree once, as gcd(stride, C) = 1.
        self._stride = self._coprime(generator)
        self._shift = int(torch.randint(num_classes, (), generator=generator))
        weight = torch.arange(1, num_classes + 1, dtype=torch.float64).pow_(-exponent)
        self._cumulative = weight.cumsum(0).div_(weight.sum())

    def _coprime(self, generator: torch.Generator) -> int:
        if self.num_classes < 3:
            return 1
        while True:
            stride = int(torch.randint(1, self.num_classes, (), generator=generator))
            if math.gcd(stride, self.num_classes) == 1:
                return stride

    def _generator(self, split: int, block: int) -> torch.Generator:
        # Mixed by multiplication with odd 64-bit constants: neighboring blocks get unrelated seeds.
        mixed = (self.seed * 0x9E3779B97F4A7C15 + (split + 2) * 0xBF58476D1CE4E5B9 + block * 0x94D049BB133111EB) % 2**64
        mixed ^= mixed >> 31
        return torch.Generator().manual_seed(mixed % 2**63)

    @property
    def class_counts(self) -> Tensor:
        """Expected number of training examples of each class, fp64 [C]: what `samplers.Unigram` takes."""
        cumulative = self._cumulative
        return torch.diff(cumulative, prepend=cumulative.new_zeros(1)) * max(self.num_examples, 1)

    def super_class(self, classes: Tensor, level: int) -> Tensor:
        """The ancestor of each class at `level`: 1 is the level below the root, `depth` the one above the classes.

        Args:
            classes: int64, any shape.
            level: 1 to `depth`.

        Returns:
            int64 node numbers within the level, same shape.

        Example:
            >>> import torch
            >>> from samplex_cuda.data import HierarchicalZipf
            >>> data = HierarchicalZipf(num_classes=27, dim=4, num_examples=1, depth=2, branching=3)
            >>> torch.bincount(data.super_class(torch.arange(27), 1)).tolist()
            [9, 9, 9]
        """
        if not 1 <= level <= self.depth:
            raise ValueError(f"HierarchicalZipf.super_class: level must be in [1, {self.depth}], got {level}")
        return self._place(classes) // self.branching ** (self.depth + 1 - level)

    def _place(self, classes: Tensor) -> Tensor:
        return (classes * self._stride + self._shift) % self.num_classes

    def centres(self, classes: Tensor) -> Tensor:
        """Centres of the given classes, vectors of length 1.

        Args:
            classes: int64 [n].

        Returns:
            fp32 [n, dim].

        Example:
            >>> import torch
            >>> from samplex_cuda.data import HierarchicalZipf
            >>> data = HierarchicalZipf(num_classes=10**6, dim=8, num_examples=1)
            >>> data.centres(torch.tensor([0, 999_999])).shape
            torch.Size([2, 8])
        """
        place = self._place(classes)
        total = torch.zeros(classes.shape[0], self.dim)
        for level in range(1, self.depth + 2):
            node = place // self.branching ** (self.depth + 1 - level)
            for book in range(_BOOKS):
                # The high bits of a wrapping product with an odd constant; a different one for each level and book.
                odd = 2 * (0x1F0A2BE71D163FA1 // (1 + level * _BOOKS + book)) + 1
                entry = ((node + 1) * odd) >> (64 - 12) & (_BOOK_SIZE - 1)
                total += self._books[book].index_select(0, entry)
        return torch.nn.functional.normalize(total, dim=1)

    def _block(self, split: int, block: int, size: int) -> tuple[Tensor, Tensor]:
        generator = self._generator(split, block)
        uniform = torch.rand(self.block_size, dtype=torch.float64, generator=generator)
        y = torch.searchsorted(self._cumulative, uniform, right=True).clamp_(max=self.num_classes - 1)
        x = torch.randn(self.block_size, self.dim, generator=generator).mul_(self.noise / math.sqrt(self.dim))
        y = y[:size]
        return x[:size].add_(self.centres(y)), y

    def batches(
        self,
        split: str = "train",
        batch_size: int = 256,
        *,
        epochs: int | None = 1,
        drop_last: bool = False,
        device: torch.device | str | None = None,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Streams batches in a fixed order, holding one block at a time.

        Args:
            split: "train" or "valid"; they share classes and centers and no example.
            batch_size: rows per batch.
            epochs: how often to go through the split; None for ever. Each epoch repeats the same examples.
            drop_last: leave out a last, smaller batch.
            device: where the batches go.

        Yields:
            (x fp32 [B, dim], y int64 [B]).

        Example:
            >>> from samplex_cuda.data import HierarchicalZipf
            >>> data = HierarchicalZipf(num_classes=100, dim=4, num_examples=10)
            >>> [len(y) for x, y in data.batches("train", batch_size=4)]
            [4, 4, 2]
        """
        if split not in _SPLITS:
            raise ValueError(f"HierarchicalZipf.batches: split must be one of {sorted(_SPLITS)}, got {split!r}")
        if batch_size < 1:
            raise ValueError(f"HierarchicalZipf.batches: batch_size must be at least 1, got {batch_size}")
        return self._stream(_SPLITS[split], batch_size, epochs, drop_last, device)

    def _stream(
        self, split: int, batch_size: int, epochs: int | None, drop_last: bool, device: torch.device | str | None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        total = self.num_valid if split == _SPLITS["valid"] else self.num_examples
        epoch = 0
        while total > 0 and (epochs is None or epoch < epochs):
            xs, ys, held = [], [], 0
            for block, begin in enumerate(range(0, total, self.block_size)):
                x, y = self._block(split, block, min(self.block_size, total - begin))
                while held + len(y) >= batch_size:
                    cut = batch_size - held
                    xs.append(x[:cut])
                    ys.append(y[:cut])
                    yield torch.cat(xs).to(device), torch.cat(ys).to(device)
                    x, y, xs, ys, held = x[cut:], y[cut:], [], [], 0
                if len(y):
                    xs.append(x)
                    ys.append(y)
                    held += len(y)
            if held and not drop_last:
                yield torch.cat(xs).to(device), torch.cat(ys).to(device)
            epoch += 1

    def split(self, split: str) -> tuple[Tensor, Tensor]:
        """A whole split as two tensors.

        Args:
            split: "train" or "valid".

        Returns:
            (x fp32 [N, dim], y int64 [N]).

        Example:
            >>> from samplex_cuda.data import HierarchicalZipf
            >>> x, y = HierarchicalZipf(num_classes=100, dim=4, num_examples=10, num_valid=20).split("valid")
            >>> x.shape
            torch.Size([20, 4])
        """
        parts = list(self.batches(split, self.block_size))
        if not parts:
            return torch.empty(0, self.dim), torch.empty(0, dtype=torch.int64)
        return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])

    def __repr__(self) -> str:
        """Settings, enough to make the same data again."""
        return (
            f"HierarchicalZipf(num_classes={self.num_classes}, dim={self.dim}, num_examples={self.num_examples}, "
            f"seed={self.seed}, exponent={self.exponent}, depth={self.depth}, branching={self.branching}, "
            f"noise={self.noise}, block_size={self.block_size}, num_valid={self.num_valid})"
        )


class BuiltIn(Dataset):
    """The built-in data: hierarchical Zipf classes at any C, made when a batch asks for them.

    Classes, centers and class probabilities are those of `HierarchicalZipf` with the same settings. Row i is a function
    of (seed, split, i) alone, so rows come in any order at the same cost and N x K is never held.

    Args:
        num_classes: C.
        dim: width of x.
        num_examples: N of this split.
        seed: everything follows from it.
        split: "train", "valid" or "test": the same classes, other examples.
        exponent: Zipf exponent.
        depth: levels of super-classes above the classes.
        branching: children of each inner node.
        noise: length of the noise vector relative to the center's.

    Example:
        >>> import torch
        >>> from samplex_cuda import data
        >>> train = data.BuiltIn(1_000_000, dim=16, num_examples=1000, seed=0)
        >>> train.batch(torch.tensor([3, 999]))["x"].shape
        torch.Size([2, 16])
    """

    kind = "dense"
    _SPLITS = ("train", "valid", "test")

    def __init__(
        self,
        num_classes: int,
        dim: int,
        num_examples: int,
        seed: int = 0,
        *,
        split: str = "train",
        exponent: float = 1.0,
        depth: int = 2,
        branching: int | None = None,
        noise: float = 0.6,
    ) -> None:
        super().__init__()
        if split not in self._SPLITS:
            raise ValueError(f"BuiltIn: split must be one of {', '.join(self._SPLITS)}, got {split!r}")
        self.law = HierarchicalZipf(
            num_classes, dim, num_examples, seed, exponent=exponent, depth=depth, branching=branching, noise=noise
        )
        self.num_classes, self.num_features = num_classes, dim
        self.split = split
        self._base = np.uint64(_mix(seed, self._SPLITS.index(split), 0x5A1F))

    def __len__(self) -> int:
        """Number of examples of this split."""
        return self.law.num_examples

    def _bits(self, rows: Array, first: int, count: int) -> Array:
        """53 random bits for columns [first, first + count) of each row as numbers in (0, 1), float64 [B, count]."""
        row = _hash64(rows.astype(np.uint64) ^ self._base)
        columns = np.arange(first, first + count, dtype=np.uint64) * np.uint64(0xD1342543DE82EF95)
        bits = _hash64(row[:, None] + columns)
        return ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53

    def targets(self, rows: Tensor) -> Tensor:
        """See `Dataset.targets`."""
        uniform = torch.from_numpy(self._bits(self._rows(rows), 0, 1)[:, 0])
        return torch.searchsorted(self.law._cumulative, uniform, right=True).clamp_(max=self.num_classes - 1)

    def batch(self, rows: Tensor) -> dict[str, Tensor]:
        """See `Dataset.batch`."""
        y = self.targets(rows)
        half = (self.num_features + 1) // 2
        uniform = self._bits(self._rows(rows), 1, 2 * half)
        # Box and Muller: two normal numbers from two uniform ones.
        radius, angle = np.sqrt(-2.0 * np.log(uniform[:, :half])), 2.0 * np.pi * uniform[:, half:]
        normal = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)], 1)[:, : self.num_features]
        x = torch.from_numpy((normal * (self.law.noise / math.sqrt(self.num_features))).astype(np.float32))
        return {"index": rows, "y": y, "x": x.add_(self.law.centres(y))}

    def _parts(self) -> dict[str, Any]:
        law = self.law
        names = ("num_examples", "seed", "exponent", "depth", "branching", "noise")
        return {"split": self.split, "version": 1, **{name: getattr(law, name) for name in names}}
