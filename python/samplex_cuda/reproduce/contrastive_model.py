"""Wen 2020 as code: the two ReLU encoders, the loss of Eq. 3.2, its loss vectors, Algorithm 1 and its stochastic form.

Where the paper prints something that cannot be meant, the corrected form is here; `CORRECTIONS` names each. Notation: n
points x_i on the unit sphere of dimension b, width m, L hidden layers, d outputs, k negatives.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from samplex_cuda.functional import contrastive
from samplex_cuda.rng import Key

__all__ = [
    "CORRECTIONS",
    "Encoder",
    "Trace",
    "back_matrix",
    "descend",
    "formula_gradients",
    "loss_vectors",
    "objective",
    "separated_points",
    "spectral_norm",
    "unit_gradients",
]

CORRECTIONS = (
    "Definition 4.1 calls dL/dq_i the loss vector, Facts 1 and 2 give n times that: the Facts' vectors are used.",
    "Fact 1 sums exp(q z_is) to s = j in the denominator; it must be k.",
    "The lower bound for theta in Lemma 4.3 prints the loss vector of the queries; that of the keys is meant.",
    "h^k of layer l is defined by h^q of layer l - 1; the keys' own layer is meant.",
    "Fact 2 writes loss(x_j, x_i) without its hat.",
    "Section 5.2 defines Back_l with W_l at its end; the gradient of layer l then needs Back_(l+1), which ends with "
    "W_(l+1), and the identity at l = L.",
    "Theorem 4.2 wants m >= n^15, Theorem A.2 m >= n^12; probabilities have omega^(3/2) in some places and omega^(2/3) "
    "in others. No finite run can tell.",
    "Lemma B.10 claims distance delta / 2 at every layer; its proof gives delta^2 / 4, and orthogonal inputs come "
    "closer with depth: it needs delta = O(1 / L), as Theorem 4.2 asks.",
)


# ------------------------------------------------------------------------------------------------ encoders and data
class Encoder(torch.nn.Module):
    """f(x) = W_L relu(... relu(W_1 relu(W_0 x))) without biases (Definition 3.1), initialized by Definition 3.2.

    Args:
        inputs: b.
        width: m.
        outputs: d.
        depth: L, the number of hidden layers; L + 1 matrices.
        generator: where the weights come from; None: torch's own.
        dtype: of the weights.

    Example:
        >>> import torch
        >>> from samplex_cuda.reproduce.contrastive_model import Encoder
        >>> encoder = Encoder(8, 64, 16, 2, torch.Generator().manual_seed(0))
        >>> [list(w.shape) for w in encoder.weights], encoder(torch.randn(5, 8, dtype=torch.float64)).shape
        ([[64, 8], [64, 64], [16, 64]], torch.Size([5, 16]))
    """

    def __init__(
        self,
        inputs: int,
        width: int,
        outputs: int,
        depth: int,
        generator: torch.Generator | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        super().__init__()
        if min(inputs, width, outputs, depth) < 1:
            raise ValueError(
                "Encoder: inputs, width, outputs and depth must be at least 1, "
                f"got {inputs}, {width}, {outputs}, {depth}"
            )
        sizes = [inputs] + [width] * depth
        shapes = [(b, a) for a, b in itertools.pairwise(sizes)]
        drawn = [torch.randn(shape, generator=generator, dtype=dtype) * math.sqrt(2 / width) for shape in shapes]
        drawn.append(torch.randn(outputs, width, generator=generator, dtype=dtype) * math.sqrt(1 / outputs))
        self.weights = torch.nn.ParameterList(drawn)

    @property
    def depth(self) -> int:
        """L."""
        return len(self.weights) - 1

    def layers(self, x: Tensor) -> list[Tensor]:
        """h_-1 = x, h_0, ..., h_(L-1): what goes into each of the L + 1 matrices."""
        hidden = [x]
        for w in list(self.weights)[:-1]:
            hidden.append((hidden[-1] @ w.T).relu())
        return hidden

    def forward(self, x: Tensor) -> Tensor:
        """[n, b] -> [n, d]."""
        return self.layers(x)[-1] @ self.weights[-1].T


def separated_points(n: int, dim: int, delta: float, generator: torch.Generator) -> Tensor:
    """n points of the unit sphere, float64, at least `delta` from each other (Assumptions 1 and 2), by rejection.

    Example:
        >>> import torch
        >>> from samplex_cuda.reproduce.contrastive_model import separated_points
        >>> x = separated_points(6, 8, 0.5, torch.Generator().manual_seed(0))
        >>> bool(torch.pdist(x).min() >= 0.5)
        True
    """
    points: list[Tensor] = []
    for _ in range(10_000):
        x = torch.nn.functional.normalize(torch.randn(dim, generator=generator, dtype=torch.float64), dim=0)
        if all(float((x - other).norm()) >= delta for other in points):
            points.append(x)
        if len(points) == n:
            return torch.stack(points)
    raise ValueError(f"separated_points: delta must leave room for {n} points in {dim} dimensions, got {delta}")


# ------------------------------------------------------------------------------------------------ the loss, Facts 1, 2
def objective(queries: Tensor, keys: Tensor, k: int) -> Tensor:
    """L_S of Eq. 3.2: the mean over i of the expectation over all k-subsets of the other points.

    Example:
        >>> import math, torch
        >>> from samplex_cuda.reproduce.contrastive_model import objective
        >>> math.isclose(objective(torch.zeros(5, 3), torch.zeros(5, 3), 2), math.log(3), rel_tol=1e-6)
        True
    """
    return contrastive(queries, keys, num_negatives=k, exact=True)


def _negatives(n: int, i: int, k: int) -> Iterator[tuple[int, ...]]:
    return itertools.combinations([j for j in range(n) if j != i], k)


def loss_vectors(queries: Tensor, keys: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The loss vectors of the queries and of the keys, [n, d] each, by the formulas of Facts 1 and 2, set by set.

    Slow by intent: it is what `unit_gradients` is checked with.

    Example:
        >>> import torch
        >>> from samplex_cuda.reproduce.contrastive_model import loss_vectors
        >>> of_queries, of_keys = loss_vectors(torch.randn(5, 3), torch.randn(5, 3), 2)
        >>> bool(of_keys.sum(0).abs().max() < 1e-5)
        True
    """
    n = len(queries)
    of_queries = torch.zeros_like(queries)
    pairs = torch.zeros(n, n, queries.shape[1], dtype=queries.dtype)  # loss^(x_i, x_j)
    for i in range(n):
        sets = list(_negatives(n, i, k))
        for chosen in sets:
            z = keys[list(chosen)] - keys[i]
            e = (z @ queries[i]).exp()
            share = e / (1 + e.sum()) / len(sets)
            of_queries[i] += share @ z
            pairs[i, list(chosen)] += share[:, None] * queries[i]
    return of_queries, pairs.sum(0) - pairs.sum(1)


def unit_gradients(queries: Tensor, keys: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The same vectors as n dL/dq and n dL/dk, by autograd.

    Example:
        >>> import torch
        >>> from samplex_cuda.reproduce.contrastive_model import unit_gradients
        >>> [g.shape for g in unit_gradients(torch.randn(5, 3), torch.randn(5, 3), 2)]
        [torch.Size([5, 3]), torch.Size([5, 3])]
    """
    q, key = queries.detach().requires_grad_(), keys.detach().requires_grad_()
    d_q, d_k = torch.autograd.grad(objective(q, key, k), (q, key))
    return d_q * len(q), d_k * len(q)


def back_matrix(encoder: Encoder, x: Tensor, layer: int) -> Tensor:
    """W_L D_(L-1) W_(L-1) ... D_layer for one point x [b]: [d, m], the derivative of f by W_layer h_(layer-1).

    Example:
        >>> import torch
        >>> from samplex_cuda.reproduce.contrastive_model import Encoder, back_matrix
        >>> back_matrix(Encoder(4, 10, 3, 2), torch.randn(4, dtype=torch.float64), 0).shape
        torch.Size([3, 10])
    """
    weights = list(encoder.weights)
    active = [h > 0 for h in encoder.layers(x)[1:]]  # D_0 .. D_(L-1)
    back = weights[-1]
    for a in range(encoder.depth - 1, layer - 1, -1):
        back = back * active[a]
        if a > layer:
            back = back @ weights[a]
    return back


def formula_gradients(encoder: Encoder, x: Tensor, vectors: Tensor) -> list[Tensor]:
    """The gradients of L_S by each matrix from the loss vectors [n, d] of the encoder's side, as Section 5.2 has them.

    Example:
        >>> import torch
        >>> from samplex_cuda.reproduce.contrastive_model import Encoder, formula_gradients
        >>> encoder = Encoder(4, 10, 3, 2)
        >>> [g.shape[0] for g in formula_gradients(encoder, torch.randn(5, 4).double(), torch.randn(5, 3).double())]
        [10, 10, 3]
    """
    with torch.no_grad():
        n, hidden = len(x), encoder.layers(x)
        found = []
        for layer in range(encoder.depth):
            pulled = torch.stack([vectors[i] @ back_matrix(encoder, x[i], layer) for i in range(n)])  # [n, m]
            found.append(pulled.T @ hidden[layer] / n)
        return [*found, vectors.T @ hidden[-1] / n]


# ------------------------------------------------------------------------------------------------ Algorithm 1
@dataclasses.dataclass
class Trace:
    """What a run of `descend` recorded: one entry a recorded step.

    Attributes:
        step: t.
        loss: L_S at (W_t, theta_t), exact also in the stochastic form.
        query_norm, key_norm: norms of the loss vectors of queries and keys (all n together).
        query_ratio, key_ratio: squared norm of the gradient over m / (n d) times the squared norm of the loss vectors:
            what Lemma 4.3 bounds from both sides.
        distance: largest spectral norm of W_l - W_l^(0) over the layers and both encoders.
        moved: Frobenius norm of that change over that of the start, both encoders together.
        rises: at how many of all steps the loss that was descended on rose (not the recorded ones alone).

    Example:
        >>> from samplex_cuda.reproduce.contrastive_model import Trace
        >>> Trace().step
        []
    """

    step: list[int] = dataclasses.field(default_factory=list)
    loss: list[float] = dataclasses.field(default_factory=list)
    query_norm: list[float] = dataclasses.field(default_factory=list)
    key_norm: list[float] = dataclasses.field(default_factory=list)
    query_ratio: list[float] = dataclasses.field(default_factory=list)
    key_ratio: list[float] = dataclasses.field(default_factory=list)
    distance: list[float] = dataclasses.field(default_factory=list)
    moved: list[float] = dataclasses.field(default_factory=list)
    rises: int = 0

    def norm(self) -> list[float]:
        """Norm of both kinds of loss vectors together: the surrogate objective of the paper."""
        return [math.hypot(a, b) for a, b in zip(self.query_norm, self.key_norm, strict=True)]


def spectral_norm(matrix: Tensor, tolerance: float = 1e-6) -> float:
    """The largest singular value, by power iteration from a fixed start: a full decomposition would take most of a run.

    Example:
        >>> import torch
        >>> from samplex_cuda.reproduce.contrastive_model import spectral_norm
        >>> round(spectral_norm(torch.diag(torch.tensor([3.0, 1.0, 0.5]))), 4)
        3.0
    """
    v = torch.randn(matrix.shape[1], generator=torch.Generator().manual_seed(0), dtype=matrix.dtype)
    found = 0.0
    for _ in range(500):
        u = matrix @ (v / v.norm())
        v = matrix.T @ u
        before, found = found, float(u.norm())
        if found == 0.0 or abs(found - before) <= tolerance * found:
            break
    return found


def _record(trace: Trace, step: int, x: Tensor, query: Encoder, key: Encoder, k: int, start: list[Tensor]) -> None:
    q, keys = query(x), key(x)
    loss = objective(q, keys, k)
    weights = [*query.weights, *key.weights]
    grads = torch.autograd.grad(loss, [q, keys, *weights])
    n, d, m = len(x), q.shape[1], query.weights[0].shape[0]
    squares = [float((g * n).square().sum()) for g in grads[:2]]
    half = len(query.weights)
    slopes = [float(sum(g.square().sum() for g in part)) for part in (grads[2 : 2 + half], grads[2 + half :])]
    trace.step.append(step)
    trace.loss.append(loss.item())
    trace.query_norm.append(math.sqrt(squares[0]))
    trace.key_norm.append(math.sqrt(squares[1]))
    trace.query_ratio.append(slopes[0] / (m / (n * d) * squares[0]) if squares[0] > 0 else math.nan)
    trace.key_ratio.append(slopes[1] / (m / (n * d) * squares[1]) if squares[1] > 0 else math.nan)
    with torch.no_grad():
        change = [w - w0 for w, w0 in zip(weights, start, strict=True)]
        trace.distance.append(max(spectral_norm(c) for c in change))
        total = math.sqrt(sum(float(w.square().sum()) for w in start))
        trace.moved.append(math.sqrt(sum(float(c.square().sum()) for c in change)) / total)


def descend(
    x: Tensor,
    query: Encoder,
    key: Encoder,
    k: int,
    *,
    eta: float,
    gamma: float,
    steps: int,
    record: int = 1,
    batch: int | None = None,
    draws: Key | None = None,
    done: Callable[[int], None] | None = None,
) -> Trace:
    """Algorithm 1: gradient descent on both encoders at once, both gradients taken at (W_t, theta_t).

    Args:
        x: [n, b].
        query: f_W, changed in place.
        key: f_theta, likewise.
        k: negatives.
        eta: step size of W.
        gamma: step size of theta.
        steps: T.
        record: every how many steps to record; the last is recorded too.
        batch: None: all points and the exact expectation over negatives. Otherwise the doubly stochastic form: this
            many points a step, and for each a drawn subset of k of the other n - 1, by the fused loss.
        draws: where points and negatives come from; needed with `batch`.
        done: called with the number of steps since the last call.

    Example:
        >>> import torch, samplex_cuda as sx
        >>> from samplex_cuda.reproduce.contrastive_model import Encoder, descend, separated_points
        >>> g = torch.Generator().manual_seed(0)
        >>> x, query, key = separated_points(5, 4, 0.5, g), Encoder(4, 32, 8, 2, g), Encoder(4, 32, 8, 2, g)
        >>> trace = descend(x, query, key, 2, eta=0.05, gamma=0.05, steps=20)
        >>> trace.loss[-1] < trace.loss[0], len(trace.step)
        (True, 21)
    """
    if batch is not None and draws is None:
        raise ValueError("descend: draws must be a Key in the stochastic form, got None")
    weights = [*query.weights, *key.weights]
    rates = [eta] * len(query.weights) + [gamma] * len(key.weights)
    start = [w.detach().clone() for w in weights]
    trace, before = Trace(), math.inf
    for t in range(steps):
        if t % record == 0:
            _record(trace, t, x, query, key, k, start)
            if done is not None:
                done(min(record, steps - t))
        if batch is None:
            loss = objective(query(x), key(x), k)
        else:
            assert draws is not None
            chosen = torch.randint(len(x), (batch,), generator=_generator(draws))
            loss = contrastive(query(x[chosen]), key(x), chosen, num_negatives=k, key=draws)
        trace.rises += int(loss.item() >= before)
        before = loss.item()
        grads = torch.autograd.grad(loss, weights)
        with torch.no_grad():
            for w, g, rate in zip(weights, grads, rates, strict=True):
                w -= rate * g
    _record(trace, steps, x, query, key, k, start)
    trace.rises += int(batch is None and trace.loss[-1] >= before)
    return trace


def _generator(key: Key) -> torch.Generator:
    """A generator for one step's points, from the next number of the key."""
    seed, offset = key.reserve().tolist()
    return torch.Generator().manual_seed((seed * 1_000_003 + offset) % (1 << 63))
