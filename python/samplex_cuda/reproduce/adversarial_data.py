"""Data of the adversarial study: built-in classes whose true p(y | x) is known, and EURLex-4K by the paper's rule."""

from __future__ import annotations

import dataclasses
import gzip
import lzma
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from samplex_cuda.data import HierarchicalZipf
from samplex_cuda.tree_fit import fit_pca, project

__all__ = ["Data", "Part", "built_in", "csr", "eurlex", "eurlex_features", "lines_of", "read_xc", "scaled", "unit_rows"]

Part = tuple[Tensor, Tensor]  # x fp32 [N, K], y int64 [N]


@dataclasses.dataclass
class Data:
    """Three parts that share no example: fitted on, chosen by, measured on."""

    train: Part
    valid: Part
    test: Part
    num_classes: int
    factor: float = 1.0  # of the features
    source: HierarchicalZipf | None = None

    def log_posterior(self, x: Tensor) -> Tensor:
        """log p(y | x) of the distribution that the built-in data come from: x [n, K] scaled as in the parts -> [n, C].

        Example:
            >>> from samplex_cuda.reproduce.adversarial_data import built_in
            >>> data = built_in(50, 200, 8, 0.7, held_out=20)
            >>> float(data.log_posterior(data.test[0]).exp().sum(1).mean().round(decimals=5))
            1.0
        """
        source = self.source
        if source is None:
            raise ValueError("log_posterior: data must be the built-in data set, got another one")
        centres = source.centres(torch.arange(source.num_classes))
        # |x - c|^2 up to what all classes share; centers have length 1.
        logits = (x / self.factor) @ centres.T * (source.dim / source.noise**2)
        return (logits + source.class_counts.log().float()).log_softmax(1)


def scaled(train: Part, valid: Part, test: Part, num_classes: int, source: HierarchicalZipf | None = None) -> Data:
    """Features of mean square 1 (one factor for all), so that one grid of learning rates serves every data set."""
    factor = float(train[0].square().mean().rsqrt())
    parts = [(x * factor, y) for x, y in (train, valid, test)]
    return Data(parts[0], parts[1], parts[2], num_classes, factor, source)


def built_in(classes: int, examples: int, width: int, noise: float, *, seed: int = 0, held_out: int = 8192) -> Data:
    """Hierarchical classes with Zipf frequencies; half of `held_out` to choose by, half to measure on."""
    data = HierarchicalZipf(
        num_classes=classes, dim=width, num_examples=examples, seed=seed, num_valid=held_out, noise=noise
    )
    x, y = data.split("valid")
    half = held_out // 2
    return scaled(data.split("train"), (x[:half], y[:half]), (x[half:], y[half:]), classes, data)


# ---------------------------------------------------------------------------------------------------- EURLex-4K
def lines_of(path: Path) -> Iterator[str]:
    """Lines of a text file, packed (.xz, .gz) or not."""
    opener: Any = {".xz": lzma.open, ".gz": gzip.open}.get(path.suffix, open)
    with opener(path, "rt") as file:
        yield from file


def csr(offsets: Tensor, columns: Tensor, values: Tensor, width: int) -> Tensor:
    """A CSR matrix [N, width] without torch's warning that they are new."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
        return torch.sparse_csr_tensor(offsets, columns, values, (len(offsets) - 1, width), check_invariants=False)


def unit_rows(x: Tensor) -> Tensor:
    """Rows of a CSR matrix scaled to length 1."""
    offsets, values = x.crow_indices(), x.values()
    row = torch.repeat_interleave(torch.arange(x.shape[0]), torch.diff(offsets))
    square = torch.zeros(x.shape[0]).index_add_(0, row, values**2)
    return csr(offsets, x.col_indices(), values / square.sqrt()[row], x.shape[1])


def read_xc(path: Path) -> tuple[Tensor, Tensor]:
    """(x fp32 [N, D] sparse CSR, y int64 [N]): the smallest label of each row, rows without a label dropped."""
    lines = lines_of(path)
    width = int(next(lines).split()[1])
    labels, counts, entries = [], [0], []
    for line in lines:
        head, _, rest = line.rstrip("\n").partition(" ")
        if not head:
            continue
        labels.append(min(int(label) for label in head.split(",")))
        counts.append(rest.count(":"))
        entries.append(rest.replace(":", " "))
    # All numbers at once: a Python loop over the entries takes most of a minute.
    pairs = torch.from_numpy(np.fromstring(" ".join(entries), sep=" ")).view(-1, 2)
    offsets = torch.tensor(counts).cumsum(0)
    return csr(offsets, pairs[:, 0].long(), pairs[:, 1].float(), width), torch.tensor(labels)


def eurlex(folder: Path) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(x, y, test x, test y) of the folder's files in the format of the Extreme Classification repository."""
    found: list[Tensor] = []
    for part in ("train", "test"):
        paths = sorted(path for path in folder.iterdir() if part in path.name and path.is_file())
        if not paths:
            raise ValueError(f"eurlex: folder must be one with a {part} file, got {folder}")
        found += read_xc(paths[0])
    return found[0], found[1], found[2], found[3]


def eurlex_features(directory: Path, width: int = 512, *, passes: int = 6) -> Data:
    """The paper's rule: the smallest label of each example, unlabelled ones dropped; a tenth of the training file to
    choose by. Unit rows; PCA fitted on the training file."""
    x, y, test_x, test_y = eurlex(directory)
    x, test_x = unit_rows(x), unit_rows(test_x)
    mean, projection = fit_pca(x, width, seed=0, passes=passes)
    dense, test = project(x, mean, projection), project(test_x, mean, projection)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    held, rest = order[: len(y) // 10], order[len(y) // 10 :]
    classes = int(max(y.max(), test_y.max())) + 1
    return scaled((dense[rest], y[rest]), (dense[held], y[held]), (test, test_y), classes)
