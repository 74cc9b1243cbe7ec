"""The lemmas of Wu et al. 2025 as computations: one gradient step, the gradients, and the flow on p."""

from __future__ import annotations

import dataclasses
import math

import torch
import torch.nn.functional as nnf
from torch import Tensor

from samplex_cuda import functional as sxf
from samplex_cuda.reference.attention_pool import attention_pool as eager_pool
from samplex_cuda.reproduce.attention_models import Corpus, signed_frequency

__all__ = ["Flow", "assumption_1", "first_step", "flow", "lemma_a1", "loss_of", "max_margin"]

DOUBLE = torch.float64


def loss_of(corpus: Corpus, embedding: Tensor, p: Tensor, v: Tensor, *, fused: bool = True) -> Tensor:
    """Eq. 2; `fused=False` by eager torch."""
    f = (
        sxf.attention_pool(corpus.ids, embedding, p, v, sparse=False)
        if fused
        else eager_pool(corpus.ids, embedding, p, v)
    )
    return nnf.softplus(-corpus.labels.to(f.dtype) * f).mean()


def start(num_tokens: int, dim: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """E, p of N(0, I/d), and a unit vector v, in float64."""
    embedding, p, v = (
        torch.randn(*shape, generator=generator, dtype=DOUBLE) for shape in ((num_tokens, dim), (dim,), (dim,))
    )
    return embedding * dim**-0.5, p * dim**-0.5, v / v.norm()


@dataclasses.dataclass(frozen=True)
class FirstStep:
    """E^1, p^1 after one step from E^0, p^0; errors of Lemma 4.1 divided by the rate, and max |alpha_s| / 2."""

    embedding: Tensor
    p: Tensor
    v: Tensor
    error_s: float
    error_p: float
    signal: float


def first_step(corpus: Corpus, dim: int, rate: float, generator: torch.Generator) -> FirstStep:
    """Eq. 4 and what Lemma 4.1 says about it."""
    embedding, p, v = start(corpus.num_tokens, dim, generator)
    leaves = embedding.clone().requires_grad_(), p.clone().requires_grad_()
    d_embedding, d_p = torch.autograd.grad(loss_of(corpus, *leaves, v), leaves)
    alpha = signed_frequency(corpus)
    error = -d_embedding - 0.5 * alpha[:, None] * v
    return FirstStep(
        embedding - rate * d_embedding,
        p - rate * d_p,
        v,
        float(error.norm(dim=1).max()),
        float(d_p.norm()),
        float(alpha.abs().max()) / 2,
    )


def lemma_a1(corpus: Corpus, embedding: Tensor, p: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of Lemma A.1 by their printed sums over pairs: [S, d], [d]."""
    d_embedding, d_p = torch.zeros_like(embedding), torch.zeros_like(p)
    n = len(corpus.labels)
    for ids, y in zip(corpus.ids, corpus.labels.tolist(), strict=True):
        rows = embedding[ids]
        q, values = (rows @ p).softmax(0), rows @ v
        up = y / (1 + math.exp(y * float(q @ values))) / n  # y g(X, y) / n
        for i, s in enumerate(ids.tolist()):
            for j, t in enumerate(ids.tolist()):
                if i == j:
                    continue
                weight = up * q[i] * q[j] * values[i]
                d_embedding[s] -= weight * p
                d_embedding[t] += weight * p
                d_p -= weight * (rows[i] - rows[j])
            d_embedding[s] -= up * q[i] * v
    return d_embedding, d_p


def assumption_1(pairs: int, length: int) -> Corpus:
    """2 pairs sequences: in each one token that no other has, the rest shared with one sequence of the other label.

    Example:
        >>> from samplex_cuda.reproduce.attention_theory import assumption_1
        >>> assumption_1(1, 3).ids.tolist()
        [[0, 2, 3], [1, 2, 3]]
    """
    shared = torch.arange(pairs * (length - 1)).reshape(pairs, length - 1) + 2 * pairs
    important = torch.arange(2 * pairs)
    ids = torch.cat([important[:, None], shared.repeat(2, 1)], 1)
    labels = torch.cat([torch.ones(pairs), -torch.ones(pairs)])
    return Corpus(ids, labels, 2 * pairs + shared.numel())


def max_margin(corpus: Corpus, embedding: Tensor, sweeps: int = 4000, start_at: float = 0.0) -> tuple[Tensor, Tensor]:
    """(12) for the selection of the first token of every sequence: p-hat [d], and its margins [constraints].

    The dual, min |A' x|^2 / 2 - sum x over x >= 0, by coordinate descent. `start_at`: of every x.
    """
    rows = embedding[corpus.ids]
    differences = (rows[:, :1] - rows[:, 1:]).reshape(-1, embedding.shape[1])
    gram = differences @ differences.T
    x = torch.full((len(gram),), start_at, dtype=DOUBLE)
    product = gram @ x
    for _ in range(sweeps):
        moved = 0.0
        for i in range(len(x)):
            new = max(0.0, float(x[i] + (1 - product[i]) / gram[i, i]))
            change = new - float(x[i])
            if change:
                product += change * gram[i]
                x[i] = new
                moved = max(moved, abs(change))
        if moved < 1e-13:
            break
    p = differences.T @ x
    return p, differences @ p


@dataclasses.dataclass
class Flow:
    """Points along the flow on p: its norm, loss, cosine with p-hat, and whether every important token is selected."""

    norms: list[float] = dataclasses.field(default_factory=list)
    losses: list[float] = dataclasses.field(default_factory=list)
    cosines: list[float] = dataclasses.field(default_factory=list)
    selected: bool = False

    def cosine_at(self, norm: float) -> float:
        """The cosine where |p| first reaches `norm`."""
        return next((c for n, c in zip(self.norms, self.cosines, strict=True) if n >= norm), float("nan"))


def flow(
    corpus: Corpus, step: FirstStep, norm: float, length: float, *, fused: bool = True, most: int = 100_000
) -> Flow:
    """Gradient flow (9) on p from p^1 with E^1 fixed, until |p| >= norm, by Euler steps of a fixed length.

    The path does not depend on the speed, and the true speed falls like exp(-margin). Everything happens in the span of
    E^1 and p^1, in whose coordinates the flow is the same.
    """
    basis, _ = torch.linalg.qr(torch.cat([step.embedding, step.p[None], step.v[None]]).T)
    embedding, p, v = step.embedding @ basis, step.p @ basis, step.v @ basis
    target, _ = max_margin(corpus, embedding)
    target = target / target.norm()
    found = Flow()
    for _ in range(most):
        leaf = p.clone().requires_grad_()
        loss = loss_of(corpus, embedding, leaf, v, fused=fused)
        (gradient,) = torch.autograd.grad(loss, leaf)
        found.norms.append(float(p.norm()))
        found.losses.append(float(loss.detach()))
        found.cosines.append(float(p @ target / p.norm()))
        size = float(gradient.abs().max())
        if found.norms[-1] >= norm or size == 0:
            break
        direction = gradient / size  # squares of the gradient may underflow
        p = p - length * direction / direction.norm()
    scores = (embedding @ p)[corpus.ids]
    found.selected = bool((scores.argmax(1) == 0).all())
    return found
