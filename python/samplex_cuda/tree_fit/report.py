"""A short text on how well a tree fits."""

from __future__ import annotations

import math
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from samplex_cuda.tree_fit.fit import FittedTree

__all__ = ["describe_fit"]


def describe_fit(
    tree: FittedTree, held_out_z: Tensor | NDArray[Any] | None = None, held_out_y: Tensor | NDArray[Any] | None = None
) -> str:
    """Mean log p_n of a tree, in total and by level, beside those of class frequencies and of uniform draws.

    The frequencies are those of the training examples plus one a class, so that a class that only the held-out examples
    have does not make the mean infinite.

    Args:
        tree: what `fit_tree` returned.
        held_out_z: [M, k] projected features of held-out examples.
        held_out_y: int64 [M].

    Returns:
        a few lines of text.

    Example:
        >>> import torch
        >>> from samplex_cuda.tree_fit import describe_fit, fit_tree
        >>> y = torch.arange(8) % 4
        >>> z = torch.stack([(y % 2).float(), (y // 2).float()], 1)
        >>> print(describe_fit(fit_tree(z, y, 4), z, y).splitlines()[0])
        tree of depth 2 over 4 classes, 2 features, reg 0.1, fitted to 8 examples
    """
    if (held_out_z is None) != (held_out_y is None):
        raise ValueError("describe_fit: held_out_z and held_out_y must be given together")
    counts = tree.class_counts
    examples = int(counts.sum())
    lines = [
        f"tree of depth {tree.depth} over {tree.num_classes:,} classes, {tree.weights.shape[1]} features, "
        f"reg {tree.reg:g}, fitted to {examples:,} examples"
    ]
    log_frequency = torch.log((counts.double() + 1) / (examples + tree.num_classes))
    uniform = -math.log(tree.num_classes)
    rows = {
        "tree": [tree.train_log_prob],
        "class frequency": [float((counts.double() * log_frequency).sum() / examples)],
        "uniform": [uniform],
    }
    by_level: Tensor | None = None
    if held_out_z is not None and held_out_y is not None:
        by_level = tree.log_prob_by_level(held_out_z, held_out_y)
        rows["tree"].append(float(by_level.sum()))
        rows["class frequency"].append(float(log_frequency[torch.as_tensor(held_out_y).cpu().long()].mean()))
        rows["uniform"].append(uniform)
    head = ["train"] + (["held out"] if by_level is not None else [])
    lines.append(f"{'mean log p_n':<18}" + "".join(f"{name:>10}" for name in head))
    lines += [f"  {name:<16}" + "".join(f"{value:>10.4f}" for value in values) for name, values in rows.items()]
    lines.append(f"{'level':>6}{'nodes':>10}{'rounds':>8}" + "".join(f"{name:>10}" for name in head))
    for index, level in enumerate(tree.levels):
        values = [level["log_likelihood"] / examples] + ([float(by_level[index])] if by_level is not None else [])
        rounds = level["rounds"] / max(1, level["nodes"])
        lines.append(
            f"{level['level']:>6}{level['nodes']:>10,}{rounds:>8.1f}" + "".join(f"{value:>10.4f}" for value in values)
        )
    return "\n".join(lines)
