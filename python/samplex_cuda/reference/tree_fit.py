"""Plain specification of the tree fit, in fp64 torch: one node at a time, no blocks, no threads.

`fit_tree` takes the same steps in the same order as the compiled fit, so on data without near-ties the two give the
same tree. Everything else here is a part of it that a test needs by itself.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["Node", "dominant_direction", "fit_node", "fit_tree", "log_prob_all", "log_prob_leaves", "split"]

_NEWTON_STEPS = 100
_TOLERANCE = 0.5e-8


class Node(NamedTuple):
    """A fitted node: w [k] and b in fp64, right bool [m], the objective after each step, the length of the gradient."""

    w: Tensor
    b: float
    right: Tensor
    history: list[float]
    gradient: float


def split(delta: Tensor, ids: Tensor, least: int, most: int) -> Tensor:
    """The discrete step (Eq. 9): which classes go right.

    The sum of delta over the right ones minus that over the left ones is largest when every class of positive delta
    goes right, or, where the number of classes on the right is bounded, those of largest delta.

    Args:
        delta: fp64 [m], sum over the examples of a class of w·x + b.
        ids: int64 [m], class ids, which break ties: the lower id goes right.
        least: fewest classes on the right.
        most: most classes on the right.

    Returns:
        bool [m].

    Example:
        >>> import torch
        >>> from samplex_cuda.reference.tree_fit import split
        >>> split(torch.tensor([3.0, -1.0, 2.0, 1.0]), torch.arange(4), 2, 2)
        tensor([ True, False,  True, False])
    """
    m = len(delta)
    positive, zero = int((delta > 0).sum()), int((delta == 0).sum())
    count = min(max(m // 2, positive), positive + zero)  # classes of delta 0 are free: as near to half as they can
    count = min(max(count, least), most)
    order = sorted(range(m), key=lambda i: (-float(delta[i]), int(ids[i])))
    right = torch.zeros(m, dtype=torch.bool)
    right[order[:count]] = True
    return right


def dominant_direction(x: Tensor, label: Tensor, m: int) -> Tensor:
    """Dominant eigenvector v of sum over y of T_y T_y^T, T_y = sum over D_y of (x - mean); its largest entry positive.

    Args:
        x: fp64 [n, k].
        label: int64 [n] in [0, m).
        m: number of classes.

    Returns:
        fp64 [k]; zeros where all T_y are.

    Example:
        >>> import torch
        >>> from samplex_cuda.reference.tree_fit import dominant_direction
        >>> x = torch.tensor([[1.0, 0.0], [-1.0, 0.0]], dtype=torch.float64)
        >>> dominant_direction(x, torch.tensor([0, 1]), 2).tolist()
        [1.0, 0.0]
    """
    sums = x.new_zeros(m, x.shape[1]).index_add_(0, label, x - x.mean(0))
    covariance = sums.T @ sums
    # Nothing but rounding: one class has all the examples, or the features are constant.
    if float(covariance.diagonal().max()) <= (1e-13 * float(x.norm(dim=1).sum())) ** 2:
        return x.new_zeros(x.shape[1])
    v = torch.linalg.eigh(covariance).eigenvectors[:, -1]
    return v * torch.sign(v[v.abs().argmax()])


def _objective(x: Tensor, right: Tensor, w: Tensor, b: float, reg: float) -> float:
    z = x @ w + b
    likelihood = F.logsigmoid(torch.where(right, z, -z)).sum()
    return float(likelihood - reg * (w @ w + b * b))


def _gradient(x1: Tensor, right: Tensor, wb: Tensor, reg: float) -> Tensor:
    return x1.T @ (right.double() - torch.sigmoid(x1 @ wb)) - 2 * reg * wb


def _newton(x: Tensor, right: Tensor, w: Tensor, b: float, reg: float) -> tuple[Tensor, float]:
    """One damped Newton step on the objective; the same (w, b) where none was possible."""
    x1 = torch.cat([x, x.new_ones(len(x), 1)], 1)
    wb = torch.cat([w, w.new_tensor([b])])
    p = torch.sigmoid(x1 @ wb)
    hessian = (x1 * (p * (1 - p)).unsqueeze(1)).T @ x1 + 2 * reg * torch.eye(len(wb), dtype=x.dtype)
    step = torch.linalg.solve(hessian, _gradient(x1, right, wb, reg))
    before = _objective(x, right, w, b, reg)
    size = 1.0
    for _ in range(50):
        new = wb + size * step
        if _objective(x, right, new[:-1], float(new[-1]), reg) >= before - 1e-12 * (1 + abs(before)):
            return new[:-1], float(new[-1])
        size *= 0.5
    return w, b


def fit_node(
    x: Tensor,
    label: Tensor,
    ids: Tensor,
    half: int,
    *,
    reg: float = 0.1,
    max_rounds: int = 15,
    discrete: bool = True,
) -> Node:
    """Fits one node with at least two classes.

    Args:
        x: fp64 [n, k], the examples of the node.
        label: int64 [n], position in `ids` of each example's class.
        ids: int64 [m], the classes of the node.
        half: leaves below each child.
        reg: the penalty is reg (|w|^2 + b^2).
        max_rounds: discrete steps, at most.
        discrete: whether to take discrete steps at all.

    Returns:
        a `Node`; w = 0 and b = ±inf where all classes ended on one side.

    Example:
        >>> import torch
        >>> from samplex_cuda.reference.tree_fit import fit_node
        >>> x = torch.tensor([[1.0], [2.0], [-1.0], [-2.0]], dtype=torch.float64)
        >>> node = fit_node(x, torch.tensor([0, 0, 1, 1]), torch.tensor([7, 9]), 1)
        >>> node.right.tolist(), float(node.w[0]) > 0, node.gradient < 1e-7
        ([True, False], True, True)
    """
    m, k = len(ids), x.shape[1]
    least, most = max(0, m - half), min(half, m)
    w, b = x.new_zeros(k), 0.0
    history: list[float] = []
    v = dominant_direction(x, label, m) if len(x) else x.new_zeros(k)
    mean = x.mean(0) if len(x) else x.new_zeros(k)
    right = split(x.new_zeros(m).index_add_(0, label, (x - mean) @ v), ids, m // 2, m // 2)
    if len(x) == 0:
        return Node(w, b, right, history, 0.0)
    scale = max(1.0, float(x.norm(dim=1).sum()))
    x1 = torch.cat([x, x.new_ones(len(x), 1)], 1)
    length = math.inf

    def converge(w: Tensor, b: float, right: Tensor) -> tuple[Tensor, float, float]:
        for _ in range(_NEWTON_STEPS):
            gradient = _gradient(x1, right[label], torch.cat([w, w.new_tensor([b])]), reg).norm()
            if gradient <= _TOLERANCE * scale:
                break
            w, b = _newton(x, right[label], w, b, reg)
            history.append(_objective(x, right[label], w, b, reg))
        return w, b, float(_gradient(x1, right[label], torch.cat([w, w.new_tensor([b])]), reg).norm())

    tight, done = False, 0
    while True:
        last = not discrete or done >= max_rounds
        if tight or last:
            w, b, length = converge(w, b, right)
        else:
            w, b = _newton(x, right[label], w, b, reg)
            history.append(_objective(x, right[label], w, b, reg))
        if last:
            break
        delta = x.new_zeros(m).index_add_(0, label, x @ w + b)
        new = split(delta, ids, least, most)
        if int(new.sum()) in (0, m):
            return Node(x.new_zeros(k), math.inf if bool(new[0]) else -math.inf, new, [*history, 0.0], 0.0)
        done += 1
        if torch.equal(new, right):
            if tight:
                break
            tight = True
            continue
        right, tight = new, False
        history.append(_objective(x, right[label], w, b, reg))
    return Node(w, b, right, history, length)


def fit_tree(
    z: Tensor, y: Tensor, num_classes: int, *, reg: float = 0.1, max_rounds: int = 15, discrete: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Fits the whole tree, node after node.

    Args:
        z: [N, k].
        y: int64 [N] in [0, C).
        num_classes: C.
        reg: the penalty is reg (|w|^2 + b^2).
        max_rounds: discrete steps per node, at most.
        discrete: whether to take discrete steps at all.

    Returns:
        (weights fp64 [L, k], bias fp64 [L], leaf_class int64 [L]).

    Example:
        >>> import torch
        >>> from samplex_cuda.reference.tree_fit import fit_tree, log_prob_all
        >>> z, y = torch.tensor([[0.0], [1.0], [2.0]]), torch.tensor([0, 1, 2])
        >>> weights, bias, leaf_class = fit_tree(z, y, 3)
        >>> log_prob_all(weights, bias, leaf_class, z).exp().sum(1).tolist()
        [1.0, 1.0, 1.0]
    """
    depth = (num_classes - 1).bit_length()
    leaves = 2**depth
    z = z.double()
    weights, bias = z.new_zeros(leaves, z.shape[1]), z.new_zeros(leaves)
    leaf_class = torch.full((leaves,), -1, dtype=torch.int64)

    def grow(node: int, ids: Tensor, half: int) -> None:
        if half == 0:
            if len(ids):
                leaf_class[node - leaves] = ids[0]
            return
        if len(ids) == 0:
            grow(2 * node, ids, half // 2)
            grow(2 * node + 1, ids, half // 2)
            return
        if len(ids) == 1:
            right = torch.zeros(1, dtype=torch.bool)
            bias[node] = -math.inf
        else:
            position = torch.full((num_classes,), -1, dtype=torch.int64)
            position[ids] = torch.arange(len(ids))
            # By class, as the compiled fit sums them.
            rows = torch.nonzero(position[y] >= 0).squeeze(1)
            rows = rows[torch.argsort(position[y[rows]], stable=True)]
            fitted = fit_node(z[rows], position[y[rows]], ids, half, reg=reg, max_rounds=max_rounds, discrete=discrete)
            right, weights[node], bias[node] = fitted.right, fitted.w, fitted.b
        grow(2 * node, ids[~right], half // 2)
        grow(2 * node + 1, ids[right], half // 2)

    grow(1, torch.arange(num_classes), leaves // 2)
    return weights, bias, leaf_class


def log_prob_leaves(weights: Tensor, bias: Tensor, z: Tensor) -> Tensor:
    """log P(leaf | z) for every leaf, in fp64.

    Args:
        weights: [L, k], heap order.
        bias: [L], may be ±inf where the row of weights is 0.
        z: [N, k].

    Returns:
        fp64 [N, L]; -inf where a bias of ±inf bars the way.

    Example:
        >>> import torch
        >>> from samplex_cuda.reference.tree_fit import log_prob_leaves
        >>> log_prob_leaves(torch.zeros(2, 1), torch.zeros(2), torch.zeros(1, 1)).exp()
        tensor([[0.5000, 0.5000]], dtype=torch.float64)
    """
    leaves = len(bias)
    score = z.double() @ weights.double().T + bias.double()
    log_p = z.new_zeros(len(z), leaves, dtype=torch.float64)
    node = torch.arange(leaves, 2 * leaves)
    while int(node[0]) > 1:
        sign = torch.where(node % 2 == 1, 1.0, -1.0).double()
        node = node // 2
        log_p += F.logsigmoid(sign * score[:, node])
    return log_p


def log_prob_all(weights: Tensor, bias: Tensor, leaf_class: Tensor, z: Tensor) -> Tensor:
    """log p_n(y | z) for every class, in fp64.

    Args:
        weights: [L, k], heap order.
        bias: [L].
        leaf_class: int64 [L], -1 for padding.
        z: [N, k].

    Returns:
        fp64 [N, C].

    Example:
        >>> import torch
        >>> from samplex_cuda.reference.tree_fit import log_prob_all
        >>> log_prob_all(torch.zeros(2, 1), torch.zeros(2), torch.tensor([1, 0]), torch.zeros(1, 1)).exp()
        tensor([[0.5000, 0.5000]], dtype=torch.float64)
    """
    real = leaf_class >= 0
    log_p = log_prob_leaves(weights, bias, z)
    result = log_p.new_empty(len(z), int(real.sum()))
    result[:, leaf_class[real]] = log_p[:, real]
    return result
