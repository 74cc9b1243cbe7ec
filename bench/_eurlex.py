"""EURLex-4K, where a person has it: files in the format of the Extreme Classification repository, packed or not."""

from __future__ import annotations

import gzip
import lzma
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch


def lines_of(path: Path) -> Iterator[str]:
    opener: Any = {".xz": lzma.open, ".gz": gzip.open}.get(path.suffix, open)
    with opener(path, "rt") as file:
        yield from file


def csr(offsets: torch.Tensor, columns: torch.Tensor, values: torch.Tensor, width: int) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
        return torch.sparse_csr_tensor(offsets, columns, values, (len(offsets) - 1, width), check_invariants=False)


def unit_rows(x: torch.Tensor) -> torch.Tensor:
    """Rows of a CSR matrix scaled to length 1."""
    offsets, values = x.crow_indices(), x.values()
    row = torch.repeat_interleave(torch.arange(x.shape[0]), torch.diff(offsets))
    square = torch.zeros(x.shape[0]).index_add_(0, row, values**2)
    return csr(offsets, x.col_indices(), values / square.sqrt()[row], x.shape[1])


def read_xc(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
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


def eurlex(folder: Path) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    found = []
    for part in ("train", "test"):
        paths = sorted(path for path in folder.iterdir() if part in path.name and path.is_file())
        if not paths:
            raise SystemExit(f"bench: --eurlex must name a folder with a {part} file, got {folder}")
        found += read_xc(paths[0])
    return found[0], found[1], found[2], found[3]
