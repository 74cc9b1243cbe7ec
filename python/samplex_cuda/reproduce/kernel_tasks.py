"""The two tasks of the kernel study: words of a text, and items for users that are made up."""

from __future__ import annotations

import dataclasses
import lzma
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from samplex_cuda.data import HierarchicalZipf

__all__ = ["Batch", "Task", "items", "markov_text", "text", "words"]

CONTEXT = 3  # words that the small language model looks at


@dataclasses.dataclass
class Batch:
    """What a step sees: inputs of the encoder, classes [n], and the class before each [n] where there is one."""

    inputs: Tensor
    y: Tensor
    before: Tensor | None = None


@dataclasses.dataclass
class Task:
    """Data and encoder of one experiment."""

    name: str
    num_classes: int
    width: int
    encoder: Callable[[], nn.Module]  # inputs -> [n, width]
    batch: Callable[[torch.Generator], Batch]
    valid: list[Batch]
    counts: Tensor  # of the classes in training
    stream: Tensor | None  # the training tokens, for bigrams


class Window(nn.Module):
    """A word from the three before it: embeddings [n, L, d] -> tanh of a linear map of neighbors [n * (L - 2), d]."""

    def __init__(self, classes: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(classes, width)
        self.mix = nn.Linear(CONTEXT * width, width)

    def forward(self, ids: Tensor) -> Tensor:
        """ids int64 [n, L] -> [n * (L - 2), d]."""
        e = self.embed(ids)
        near = torch.cat([e[:, i : e.shape[1] - CONTEXT + 1 + i] for i in range(CONTEXT)], dim=2)
        return torch.tanh(self.mix(near)).flatten(0, 1)


class Recurrent(nn.Module):
    """An LSTM over each window, from a zero state: ids int64 [n, L] -> [n * (L - 2), d]."""

    def __init__(self, classes: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(classes, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, dropout=0.5, batch_first=True)
        self.drop = nn.Dropout(0.5)

    def forward(self, ids: Tensor) -> Tensor:
        """ids int64 [n, L] -> [n * (L - 2), d]."""
        found, _ = self.lstm(self.drop(self.embed(ids)))
        return self.drop(found[:, CONTEXT - 1 :]).flatten(0, 1)


def words(
    path: Path, classes: int, known: list[str] | None = None, most: int | None = None
) -> tuple[Tensor, list[str]]:
    """(ids int64 [n], words) of a text file (.xz or not): the most frequent words, all others are number 0.

    Args:
        path: of the file.
        classes: size of the vocabulary, with "<unk>".
        known: the vocabulary of another file, if that is to be used.
        most: tokens to read, at most.
    """
    raw = path.read_bytes()
    found = (lzma.decompress(raw) if path.suffix == ".xz" else raw).decode("utf-8").split()[:most]
    if known is None:
        common = [word for word, _ in Counter(found).most_common(classes) if word != "<unk>"]
        known = ["<unk>", *common[: classes - 1]]
    number = {word: i for i, word in enumerate(known)}
    return torch.tensor([number.get(word, 0) for word in found]), known


def markov_text(classes: int, tokens: int, seed: int) -> Tensor:
    """Synthetic words int64 [tokens]: each follows the last one by its sparse distribution, or is Zipf.

    Example:
        >>> from samplex_cuda.reproduce.kernel_tasks import markov_text
        >>> stream = markov_text(50, 1000, seed=0)
        >>> stream.shape, int(stream.max()) < 50
        (torch.Size([1000]), True)
    """
    rng = np.random.default_rng(seed)
    zipf = 1.0 / np.arange(1, classes + 1)
    zipf /= zipf.sum()
    follow = rng.choice(classes, size=(classes, 20), p=zipf)  # twenty words that often come after each
    weight = np.cumsum(1.0 / np.arange(1, 21))
    weight /= weight[-1]
    spread = rng.choice(classes, size=tokens, p=zipf)
    jump, place = rng.random(tokens) < 0.3, np.searchsorted(weight, rng.random(tokens))
    stream = np.empty(tokens, dtype=np.int64)
    now = 0
    for i in range(tokens):
        now = spread[i] if jump[i] else follow[now, place[i]]
        stream[i] = now
    return torch.from_numpy(stream)


def text(
    name: str, train: Tensor, valid: Tensor, classes: int, width: int, *, windows: int, length: int, recurrent: bool
) -> Task:
    """A language model over the tokens `train`; a batch has `windows` stretches of `length` words."""

    def cut(stream: Tensor, starts: Tensor) -> Batch:
        ids = stream[starts[:, None] + torch.arange(length + CONTEXT)]
        inputs = ids[:, :-1]
        return Batch(inputs, ids[:, CONTEXT:].flatten(), inputs[:, CONTEXT - 1 :].flatten())

    def batch(generator: torch.Generator) -> Batch:
        return cut(train, torch.randint(len(train) - length - CONTEXT, (windows,), generator=generator))

    starts = torch.arange(0, len(valid) - length - CONTEXT, length)
    return Task(
        name,
        classes,
        width,
        lambda: (Recurrent if recurrent else Window)(classes, width),
        batch,
        [cut(valid, part) for part in starts.split(64)],
        torch.bincount(train, minlength=classes),
        train,
    )


def items(classes: int, examples: int, width: int, noise: float, batch_size: int, seed: int) -> Task:
    """Which item a user takes: made-up user features around a tree of items with Zipf popularity."""
    data = HierarchicalZipf(
        num_classes=classes, dim=width, num_examples=examples, seed=seed, num_valid=4096, noise=noise
    )
    x, y = data.split("train")
    held_x, held_y = data.split("valid")
    scale = x.square().mean().rsqrt()

    def batch(generator: torch.Generator) -> Batch:
        rows = torch.randint(len(y), (batch_size,), generator=generator)
        return Batch(x[rows] * scale, y[rows])

    return Task(
        "recommender",
        classes,
        width,
        lambda: nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width)),
        batch,
        [Batch(a * scale, b) for a, b in zip(held_x.split(1024), held_y.split(1024), strict=True)],
        torch.bincount(y, minlength=classes),
        None,
    )
