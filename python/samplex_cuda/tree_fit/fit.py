"""Fitting the adversarial decision tree to projected features (Bamler & Mandt 2020, section 3)."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from samplex_cuda._checks import check_int, describe
from samplex_cuda._library import _native

__all__ = ["FittedTree", "RegChoice", "cross_validate_reg", "fit_tree"]

_CHUNK_ROWS = 65536


@dataclass(frozen=True, eq=False)
class FittedTree:
    """A balanced binary tree over C classes: P(right | node, x) = sigmoid(w·x + b). What `fit_tree` returns.

    Nodes are in heap order: root 1, children 2i and 2i + 1; leaf j is node L + j, with L = 2^ceil(log2 C) leaves.

    Attributes:
        weights: fp32 [L, k]; row 0 is not used.
        bias: fp32 [L]; +inf: always right, -inf: always left (the other side holds padding only, or with
            `unseen=False` no class that has an example).
        leaf_class: int64 [L], the class of each leaf, -1 for padding.
        num_classes: C.
        class_counts: int64 [C], training examples of each class.
        levels: for each level a dict: `level`, `nodes` (with examples and both sides taken), `log_likelihood` and
            `objective` (sums over the training examples), `rounds` and `newton_steps` (sums over nodes),
            `most_rounds`, `gradient_ratio` (largest |gradient| / max(1, sum of |x|)), `unfinished` (nodes stopped by
            `max_rounds`).
        train_log_prob: mean log p_n(y | x) of the training examples.
        reg: the regularizer it was fitted with.

    Example:
        >>> import torch
        >>> from samplex_cuda.tree_fit import fit_tree
        >>> tree = fit_tree(torch.tensor([[-1.0], [0.0], [1.0]]), torch.tensor([0, 1, 2]), 3)
        >>> tree.weights.shape, sorted(tree.leaf_class.tolist())
        (torch.Size([4, 1]), [-1, 0, 1, 2])
    """

    weights: Tensor
    bias: Tensor
    leaf_class: Tensor
    num_classes: int
    class_counts: Tensor
    levels: list[dict[str, Any]] = field(default_factory=list)
    train_log_prob: float = 0.0
    reg: float = 0.1

    @property
    def depth(self) -> int:
        """Number of levels above the leaves."""
        return len(self.bias).bit_length() - 1

    def log_prob_by_level(self, z: Tensor | NDArray[Any], y: Tensor | NDArray[Any]) -> Tensor:
        """Mean over the examples of what each level adds to log p_n(y | z).

        Args:
            z: [N, k] projected features.
            y: int64 [N].

        Returns:
            fp64 [depth], from the root down; the sum is the mean log p_n.

        Example:
            >>> import torch
            >>> from samplex_cuda.tree_fit import fit_tree
            >>> z, y = torch.tensor([[-1.0], [0.0], [1.0]]), torch.tensor([0, 1, 2])
            >>> tree = fit_tree(z, y, 3)
            >>> abs(float(tree.log_prob_by_level(z, y).sum()) - tree.train_log_prob) < 1e-6
            True
        """
        features, labels = _inputs("log_prob_by_level", z, y, self.num_classes)
        if features.shape[1] != self.weights.shape[1]:
            wanted = f"[N, {self.weights.shape[1]}]"
            raise ValueError(f"log_prob_by_level: z must be {wanted}, got {list(features.shape)}")
        leaves = len(self.bias)
        place = torch.empty(self.num_classes, dtype=torch.int64)
        real = torch.nonzero(self.leaf_class >= 0).squeeze(1)
        place[self.leaf_class[real]] = real + leaves
        total = torch.zeros(self.depth, dtype=torch.float64)
        for begin in range(0, len(labels), _CHUNK_ROWS):
            part = features[begin : begin + _CHUNK_ROWS].double()
            node = place[labels[begin : begin + _CHUNK_ROWS]]
            for level in range(self.depth - 1, -1, -1):
                right, node = node % 2 == 1, node // 2
                score = (part * self.weights[node]).sum(1) + self.bias[node]
                total[level] += F.logsigmoid(torch.where(right, score, -score)).sum()
        return total / len(labels)

    def mean_log_prob(self, z: Tensor | NDArray[Any], y: Tensor | NDArray[Any]) -> float:
        """Mean log p_n(y | z) of examples z [N, k], y [N].

        Example:
            >>> import torch
            >>> from samplex_cuda.tree_fit import fit_tree
            >>> z, y = torch.tensor([[-1.0], [1.0]]), torch.tensor([0, 1])
            >>> fit_tree(z, y, 2).mean_log_prob(z, y) > -0.6931
            True
        """
        return float(self.log_prob_by_level(z, y).sum())

    def __str__(self) -> str:
        """The report of `describe_fit` on the training examples."""
        from samplex_cuda.tree_fit.report import describe_fit

        return describe_fit(self)


class RegChoice(NamedTuple):
    """What `cross_validate_reg` found: the best regularizer, and the held-out mean log p_n of each one tried.

    Example:
        >>> from samplex_cuda.tree_fit import RegChoice
        >>> reg, scores = RegChoice(reg=0.1, scores={0.1: -0.5, 1.0: -0.7})
        >>> scores[reg] == max(scores.values())
        True
    """

    reg: float
    scores: dict[float, float]


def _inputs(op: str, z: Any, y: Any, num_classes: int) -> tuple[Tensor, Tensor]:
    """z as fp32 [N, k] and y as int64 [N], contiguous, on the CPU."""
    for name, value in (("z", z), ("y", y)):
        if not isinstance(value, (Tensor, np.ndarray)):
            raise TypeError(f"{op}: {name} must be a tensor or an array, got {type(value).__name__}")
    features = torch.as_tensor(z).detach()
    labels = torch.as_tensor(y).detach()
    if features.dim() != 2 or not features.is_floating_point():
        raise ValueError(f"{op}: z must be [N, k] floating point, got {describe(features)}")
    if labels.dim() != 1 or labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise ValueError(f"{op}: y must be [N] integers, got {describe(labels)}")
    if len(features) != len(labels):
        raise ValueError(f"{op}: z and y must have the same length, got {len(features)} and {len(labels)}")
    if len(labels) == 0:
        raise ValueError(f"{op}: z must have at least 1 row, got 0")
    check_int(op, "num_classes", num_classes)
    labels = labels.to("cpu", torch.int64).contiguous()
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= num_classes:
        got = low if low < 0 else high
        row = int(torch.nonzero(labels == got)[0])
        raise IndexError(f"{op}: y must be in [0, {num_classes}), got {got} in row {row}")
    return features.to("cpu", torch.float32).contiguous(), labels


@contextlib.contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """Runs with `count` threads of torch's pool."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if count is not None:
            torch.set_num_threads(before)


@contextlib.contextmanager
def _bar(levels: int, examples: int, wanted: bool) -> Iterator[Callable[[dict[str, Any]], None]]:
    """What to call after each level: a bar on a terminal where rich is there, else nothing."""
    if not (wanted and levels and sys.stderr.isatty()):
        yield lambda level: None
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:
        yield lambda level: None
        return
    total = 0.0
    columns = (
        TextColumn("fitting the tree"),
        BarColumn(bar_width=32),
        TextColumn("level {task.completed}/{task.total}  {task.fields[nodes]:>7,} nodes"),
        TextColumn("log p_n so far {task.fields[log_p]:8.4f}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("fit", total=levels, nodes=1, log_p=0.0)

        def show(level: dict[str, Any]) -> None:
            nonlocal total
            total += level["log_likelihood"]
            bars.update(task, completed=level["level"] + 1, nodes=level["nodes"], log_p=total / examples)

        yield show


def fit_tree(
    z: Tensor | NDArray[Any],
    y: Tensor | NDArray[Any],
    num_classes: int,
    *,
    reg: float = 0.1,
    max_rounds: int = 15,
    discrete: bool = True,
    seed: int = 0,
    unseen: bool = True,
    progress: bool = True,
    threads: int | None = None,
) -> FittedTree:
    """Fits the tree, greedily from the root down.

    In each node two steps alternate until the split is stable: a Newton step for (w, b), the maximum of the penalised
    log-likelihood at the given split; and the discrete step, which sends to the right those classes whose summed score
    is largest, the exact maximum at the given (w, b). Neither lowers the objective. The start is the median split along
    the dominant eigenvector of the covariance of class sums. (w, b) is then converged to a gradient of at most 1e-8
    times max(1, sum of |x|) in fp64.

    Nothing is drawn at random: the result has the same bits for any number of threads.

    Args:
        z: fp32 [N, k], projected features (`project`); taken without a copy if it is fp32 and contiguous on the CPU.
        y: int64 [N] in [0, C).
        num_classes: C. Classes without examples get a leaf, too.
        reg: positive; the penalty in each node is reg (|w|^2 + b^2).
        max_rounds: discrete steps per node, at most.
        discrete: False leaves the median splits unchanged.
        seed: accepted for symmetry with `fit_pca`; the fit draws nothing.
        unseen: False gives classes without an example probability exactly 0: they are never drawn, and what they had
            goes to their neighbors in the tree.
        progress: a bar with level and log-likelihood, where stderr is a terminal and `rich` is installed.
        threads: of torch's pool; by default those torch uses.

    Returns:
        a `FittedTree`, on the CPU.

    Example:
        >>> import torch
        >>> from samplex_cuda.tree_fit import fit_tree
        >>> y = torch.arange(400) % 4
        >>> z = torch.stack([(y % 2).float(), (y // 2).float()], 1) - 0.5
        >>> tree = fit_tree(z, y, 4)
        >>> tree.depth, tree.train_log_prob > -0.2
        (2, True)
    """
    features, labels = _inputs("fit_tree", z, y, num_classes)
    if features.shape[1] < 1:
        raise ValueError(f"fit_tree: z must have at least 1 column, got {list(features.shape)}")
    if not (math.isfinite(reg) and reg > 0):
        raise ValueError(f"fit_tree: reg must be positive and finite, got {reg}")
    check_int("fit_tree", "max_rounds", max_rounds, 0)
    if threads is not None:
        check_int("fit_tree", "threads", threads)
    depth = (num_classes - 1).bit_length()
    leaves = 2**depth
    weights = torch.empty(leaves, features.shape[1])
    bias = torch.empty(leaves)
    leaf_class = torch.empty(leaves, dtype=torch.int64)
    levels: list[dict[str, Any]] = []
    with _threads(threads), _bar(depth, len(labels), progress) as show:

        def after_level(level: dict[str, Any]) -> None:
            levels.append(level)
            show(level)

        _native.fit_tree(
            features.numpy(),
            labels.numpy(),
            num_classes,
            float(reg),
            max_rounds,
            discrete,
            weights.numpy(),
            bias.numpy(),
            leaf_class.numpy(),
            np.empty(0),
            after_level,
            False,
        )
    counts = torch.bincount(labels, minlength=num_classes)
    tree = FittedTree(
        weights=weights,
        bias=bias,
        leaf_class=leaf_class,
        num_classes=num_classes,
        class_counts=counts,
        levels=levels,
        train_log_prob=sum(level["log_likelihood"] for level in levels) / len(labels),
        reg=float(reg),
    )
    if not unseen and bool((counts == 0).any()):
        _close_unseen(tree)
        tree = replace(tree, train_log_prob=tree.mean_log_prob(features, labels))
    return tree


def _close_unseen(tree: FittedTree) -> None:
    """Nodes with examples on one side only send every row there, so that the other side has probability 0."""
    seen = torch.zeros(len(tree.bias), dtype=torch.bool)
    real = tree.leaf_class >= 0
    seen[real] = tree.class_counts[tree.leaf_class[real]] > 0
    first = len(tree.bias) // 2  # of the level above
    while first:
        on_left, on_right = seen.view(-1, 2).unbind(1)
        for side, bias in ((on_right & ~on_left, math.inf), (on_left & ~on_right, -math.inf)):
            nodes = first + torch.nonzero(side).squeeze(1)
            tree.weights[nodes] = 0.0
            tree.bias[nodes] = bias
        seen = on_left | on_right
        first //= 2


def cross_validate_reg(
    z: Tensor | NDArray[Any],
    y: Tensor | NDArray[Any],
    num_classes: int,
    *,
    regs: Sequence[float] = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0),
    folds: int = 3,
    seed: int = 0,
    **options: Any,
) -> RegChoice:
    """Chooses `reg` by held-out mean log p_n: each value is fitted `folds` times, each time without a part of the rows.

    Args:
        z: fp32 [N, k], N >= folds.
        y: int64 [N].
        num_classes: C.
        regs: the values to try.
        folds: parts of the rows, at least 2.
        seed: of the random partition.
        options: passed to `fit_tree`.

    Returns:
        a `RegChoice`: the best value (the larger of two equal ones) and the score of each.

    Example:
        >>> import torch
        >>> from samplex_cuda.tree_fit import cross_validate_reg
        >>> z = torch.randn(60, 2, generator=torch.Generator().manual_seed(0))
        >>> choice = cross_validate_reg(z, (z[:, 0] > 0).long(), 2, regs=(0.01, 1000.0))
        >>> choice.reg
        0.01
    """
    features, labels = _inputs("cross_validate_reg", z, y, num_classes)
    if not 2 <= folds <= len(labels):
        raise ValueError(f"cross_validate_reg: folds must be in [2, {len(labels)}], the rows of z, got {folds}")
    if not regs:
        raise ValueError("cross_validate_reg: regs must not be empty")
    fold = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed)) % folds
    scores: dict[float, float] = {}
    for reg in regs:
        total = 0.0
        for index in range(folds):
            held = fold == index
            tree = fit_tree(features[~held], labels[~held], num_classes, reg=reg, seed=seed, **options)
            total += tree.mean_log_prob(features[held], labels[held]) * int(held.sum())
        scores[float(reg)] = total / len(labels)
    return RegChoice(max(scores, key=lambda reg: (scores[reg], reg)), scores)
