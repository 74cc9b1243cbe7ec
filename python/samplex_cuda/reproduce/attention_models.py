"""The models of Wu et al. 2025, their data, and what is measured on trained ones."""

from __future__ import annotations

import dataclasses
import json
import lzma
import math
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from samplex_cuda import functional as sxf

__all__ = ["Corpus", "OneLayer", "TwoLayer", "imdb", "k_level", "k_level_law", "posterior_difference", "spearman",
           "train"]  # fmt: skip

LEVELS = (0.45, 0.35, 0.3, 0.25, 0.2, 0.1, 0.05, 0.02)  # delta_k
IRRELEVANT, MASS = 964, 0.05  # |S~|, delta~
STOP = frozenset(
    """
    a about after all also am an and any are as at be because been being but by can could did do does doing for from
    had has have having he her here hers him his how i if in into is it its itself just me more most my no nor not now
    of off on once only or other our out over own s same she should so some such t than that the their them then there
    these they this those through to too under until up very was we were what when where which while who whom why will
    with would you your br
    """.split()  # noqa: SIM905
)


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Sequences of token ids padded with -1, [n, T], and their labels -1 or 1, [n]."""

    ids: Tensor
    labels: Tensor
    num_tokens: int
    words: tuple[str, ...] = ()


# ---------------------------------------------------------------------------------------------------- models
class OneLayer(nn.Module):
    """Eq. 1: softmax(E_X p) . (E_X v), by the fused op.

    Example:
        >>> import torch
        >>> from samplex_cuda.reproduce.attention_models import OneLayer
        >>> OneLayer(10, 4, train_v=False)(torch.tensor([[1, 2, -1]])).shape
        torch.Size([1])
    """

    def __init__(self, num_tokens: int, dim: int, *, train_v: bool, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(num_tokens, dim, generator=generator) * dim**-0.5)
        self.p = nn.Parameter(torch.randn(dim, generator=generator) * dim**-0.5)
        v = torch.randn(dim, generator=generator)
        self.v = nn.Parameter(v / v.norm(), requires_grad=train_v)

    def forward(self, ids: Tensor) -> Tensor:
        """ids int64 [B, T], padded with -1 -> [B]."""
        return sxf.attention_pool(ids, self.embedding, self.p, self.v, sparse=False)

    def rows(self) -> Tensor:
        """The embedding of every token, [S, d]."""
        return self.embedding.detach()


class TwoLayer(OneLayer):
    """Eq. 17: self-attention without projections, skip connection, layer norm, then Eq. 1 on what comes out.

    Example:
        >>> import torch
        >>> from samplex_cuda.reproduce.attention_models import TwoLayer
        >>> TwoLayer(10, 4, train_v=True)(torch.tensor([[1, 2, -1]])).shape
        torch.Size([1])
    """

    def forward(self, ids: Tensor) -> Tensor:
        """ids int64 [B, T], padded with -1 -> [B]."""
        padding = ids < 0
        rows = nnf.embedding(ids.clamp_min(0), self.embedding)  # [B, T, d]
        scores = (rows @ rows.transpose(1, 2)).masked_fill(padding.unsqueeze(1), float("-inf"))
        mixed = nnf.layer_norm(scores.softmax(2) @ rows + rows, rows.shape[2:])
        q = (mixed @ self.p).masked_fill(padding, float("-inf")).softmax(1)
        return (q * (mixed @ self.v)).sum(1)


def train(
    model: OneLayer, corpus: Corpus, *, epochs: int, rate: float, decay: float, batch: int, milestones: list[int],
    generator: torch.Generator, step: Callable[[int], None] | None = None,
) -> list[float]:  # fmt: skip
    """AdamW on the logistic loss (2); returns the mean loss of every epoch."""
    parameters = [t for t in model.parameters() if t.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=decay)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones)
    losses = []
    for _ in range(epochs):
        total = 0.0
        for at in torch.randperm(len(corpus.labels), generator=generator).split(batch):
            optimizer.zero_grad()
            loss = nnf.softplus(-corpus.labels[at] * model(corpus.ids[at])).mean()
            loss.backward()
            optimizer.step()
            total += float(loss.detach()) * len(at)
        schedule.step()
        losses.append(total / len(corpus.labels))
        if step is not None:
            step(1)
    return losses


@torch.no_grad()
def accuracy(model: OneLayer, corpus: Corpus) -> float:
    """Share of sequences whose sign is right."""
    parts = [model(ids) for ids in corpus.ids.split(256)]
    return float(((torch.cat(parts) > 0) == (corpus.labels > 0)).float().mean())


# ---------------------------------------------------------------------------------------------------- statistics
def posterior_difference(corpus: Corpus) -> tuple[Tensor, Tensor]:
    """Eq. 18, and how often each token occurs: [S], [S].

    Example:
        >>> import torch
        >>> from samplex_cuda.reproduce.attention_models import Corpus, posterior_difference
        >>> corpus = Corpus(torch.tensor([[0, 1], [0, -1]]), torch.tensor([1.0, -1.0]), 2)
        >>> posterior_difference(corpus)[0].tolist()
        [0.0, 1.0]
    """
    part = corpus.ids >= 0
    flat = corpus.ids[part]
    signs = corpus.labels.unsqueeze(1).expand_as(corpus.ids)[part].double()
    counts = torch.zeros(corpus.num_tokens, dtype=torch.float64).index_add_(0, flat, torch.ones_like(signs))
    signed = torch.zeros(corpus.num_tokens, dtype=torch.float64).index_add_(0, flat, signs)
    return signed / counts.clamp_min(1), counts


def signed_frequency(corpus: Corpus) -> Tensor:
    """alpha_s of Eq. 3, [S]."""
    difference, counts = posterior_difference(corpus)
    return difference * counts / corpus.ids.numel()


def _ranks(x: Tensor) -> Tensor:
    """Ranks, those of equal numbers averaged."""
    _, inverse, counts = x.unique(return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    return (last - (counts.double() - 1) / 2)[inverse]


def spearman(x: Tensor, y: Tensor) -> float:
    """Rank correlation of two vectors.

    Example:
        >>> import torch
        >>> from samplex_cuda.reproduce.attention_models import spearman
        >>> round(spearman(torch.tensor([1.0, 2.0, 9.0]), torch.tensor([0.0, 5.0, 6.0])), 6)
        1.0
    """
    a, b = (_ranks(t.double()) for t in (x, y))
    a, b = a - a.mean(), b - b.mean()
    return float((a @ b) / (a.norm() * b.norm()).clamp_min(1e-300))


# ---------------------------------------------------------------------------------------------------- data
def k_level_law() -> tuple[Tensor, Tensor]:
    """Eq. 15 with the factor that it lacks: p(s | y = -1), p(s | y = 1) as [2, S], and Eq. 16's difference [S].

    |S_k| = 4 + 2^k, k = 1 ... 8, with which the sizes add up to the 2048 that the paper states (2^(k-1) gives 1538).

    Example:
        >>> from samplex_cuda.reproduce.attention_models import k_level_law
        >>> law, _ = k_level_law()
        >>> law.shape[1], [round(float(row.sum()), 9) for row in law]
        (2048, [1.0, 1.0])
    """
    sizes = [4 + 2**k for k in range(1, len(LEVELS) + 1)]
    half = sum(sizes)
    delta = torch.cat([torch.full((n,), d, dtype=torch.float64) for n, d in zip(sizes, LEVELS, strict=True)])
    plain = torch.full((IRRELEVANT,), (1 - MASS) / IRRELEVANT, dtype=torch.float64)
    own, other = MASS * (1 - delta) / half, MASS * delta / half  # printed without MASS in `other`
    law = torch.stack([torch.cat([plain, other, own]), torch.cat([plain, own, other])])  # S~, S+, S-
    difference = torch.cat([torch.zeros(IRRELEVANT, dtype=torch.float64), 1 - 2 * delta, 2 * delta - 1])
    return law, difference


def k_level(count: int, length: int, generator: torch.Generator) -> Corpus:
    """Sequences of the K-level model, half of them of either label.

    Example:
        >>> import torch
        >>> from samplex_cuda.reproduce.attention_models import k_level
        >>> k_level(4, 8, torch.Generator().manual_seed(0)).ids.shape
        torch.Size([4, 8])
    """
    law, _ = k_level_law()
    labels = torch.ones(count)
    labels[::2] = -1
    ids = torch.empty(count, length, dtype=torch.int64)
    for which, sign in enumerate((-1, 1)):
        rows = labels == sign
        n = int(rows.sum()) * length
        ids[rows] = torch.multinomial(law[which], n, replacement=True, generator=generator).reshape(-1, length)
    return Corpus(ids, labels, law.shape[1])


def stem(word: str) -> str:
    """A word without its commonest endings.

    Example:
        >>> from samplex_cuda.reproduce.attention_models import stem
        >>> [stem(w) for w in ("movies", "watching", "loved", "awful")]
        ['movi', 'watch', 'lov', 'awful']
    """
    for ending in ("ing", "ies", "ed", "es", "ly", "s"):
        if word.endswith(ending) and len(word) - len(ending) >= 3 and not word.endswith("ss"):
            return word[: -len(ending)] + ("i" if ending == "ies" else "")
    return word


def tokens_of(text: str) -> list[str]:
    """Lower-case words without markup, punctuation and stop words, stemmed."""
    words = re.findall(r"[a-z]+", re.sub(r"<[^>]*>", " ", text.lower()).replace("'", ""))
    return [stem(w) for w in words if w not in STOP]


def _reviews(path: Path, count: int, seed: int) -> list[tuple[list[str], int]]:
    """`count` reviews, as many of either label, drawn by the seed from the file."""
    with (lzma.open if path.suffix == ".xz" else open)(path, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines if line.strip()]
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).tolist()
    chosen: list[tuple[list[str], int]] = []
    left = {-1: count // 2, 1: count - count // 2}
    for i in order:
        label = 1 if rows[i]["label"] in (1, "1", "pos", "positive") else -1
        if left[label] > 0:
            left[label] -= 1
            chosen.append((tokens_of(rows[i]["text"]), label))
    return chosen


def imdb(folder: Path, count: int, test: int, length: int, fewest: int, seed: int) -> tuple[Corpus, Corpus]:
    """Training and test reviews: tokens with fewer than `fewest` occurrences dropped, cut to `length`."""

    def file(part: str) -> Path:
        for name in (f"imdb_{part}.jsonl", f"imdb_{part}.jsonl.xz"):
            if (folder / name).is_file():
                return folder / name
        raise FileNotFoundError(f"reproduce: {folder} must hold imdb_{part}.jsonl or .jsonl.xz")

    training, testing = _reviews(file("train"), count, seed), _reviews(file("test"), test, seed)
    counts = Counter(word for words, _ in training for word in words)
    words = tuple(sorted(w for w, n in counts.items() if n >= fewest))
    number = {w: i for i, w in enumerate(words)}

    def corpus(reviews: list[tuple[list[str], int]]) -> Corpus:
        ids = torch.full((len(reviews), length), -1)
        for row, (text, _) in zip(ids, reviews, strict=True):
            known = torch.tensor([number[w] for w in text if w in number][:length], dtype=torch.int64)
            row[: len(known)] = known
        return Corpus(ids, torch.tensor([float(y) for _, y in reviews]), len(words), words)

    return corpus(training), corpus(testing)


def slope(x: list[float], y: list[float]) -> float:
    """Slope of a line through (log x, log y)."""
    a = torch.tensor([math.log(v) for v in x], dtype=torch.float64)
    b = torch.tensor([math.log(v) for v in y], dtype=torch.float64)
    a, b = a - a.mean(), b - b.mean()
    return float((a @ b) / (a @ a))
