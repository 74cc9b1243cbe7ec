"""Principal components of features that are dense or sparse, read in chunks of rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["fit_pca", "project"]

_CHUNK_NUMBERS = 2**22  # of a chunk of dense rows, in fp64: 32 MiB
_CHUNK_SPARSE_ROWS = 16384
_EXACT_WIDTH = 512  # up to here the whole covariance costs less than the passes of the randomized way
_OVERSAMPLE = 16
_SETTLED = 1e-5  # relative change of the variance of any component between two passes


class _Rows:
    """Rows of a dense or sparse matrix, chunk by chunk: dense fp64 [n, K], or sparse COO fp64 where x is sparse."""

    def __init__(self, op: str, x: Any, chunk_size: int | None) -> None:
        self.op, self.x = op, x
        if isinstance(x, Tensor) and x.layout == torch.sparse_csr:
            self.kind, self.device = "torch_csr", x.device
            self.offsets = x.crow_indices().cpu()
        elif isinstance(x, Tensor) and x.layout == torch.strided:
            self.kind, self.device = "dense", x.device
        elif isinstance(x, np.ndarray):
            self.kind, self.device = "numpy", torch.device("cpu")
        elif getattr(x, "format", None) == "csr" and all(hasattr(x, name) for name in ("indptr", "indices", "data")):
            self.kind, self.device = "scipy_csr", torch.device("cpu")
            self.offsets = torch.from_numpy(x.indptr.astype(np.int64))
        else:
            got = f"{type(x).__name__}" + (f" of layout {x.layout}" if isinstance(x, Tensor) else "")
            raise TypeError(
                f"{op}: x must be a dense tensor, an array, a torch sparse CSR or scipy CSR matrix, got {got}"
            )
        if len(x.shape) != 2:
            raise ValueError(f"{op}: x must be [N, K], got {list(x.shape)}")
        self.rows, self.width = int(x.shape[0]), int(x.shape[1])
        if self.rows == 0:
            raise ValueError(f"{op}: x must have at least 1 row, got {list(x.shape)}")
        if isinstance(x, Tensor):
            real = not (x.is_complex() or x.dtype == torch.bool)
        else:
            real = np.dtype(x.dtype).kind in "fiu"
        if not real:
            raise TypeError(f"{op}: x must hold real numbers, got {x.dtype}")
        if chunk_size is not None and chunk_size < 1:
            raise ValueError(f"{op}: chunk_size must be at least 1, got {chunk_size}")
        self.sparse = self.kind.endswith("csr")
        usual = _CHUNK_SPARSE_ROWS if self.sparse else max(1, _CHUNK_NUMBERS // max(1, self.width))
        self.chunk_size = chunk_size or usual

    def chunk(self, begin: int, end: int) -> Tensor:
        if self.kind == "dense":
            return self.x[begin:end].detach().to(torch.float64)
        if self.kind == "numpy":
            return torch.from_numpy(self.x[begin:end].astype(np.float64))
        first, last = int(self.offsets[begin]), int(self.offsets[end])
        row = torch.repeat_interleave(torch.arange(end - begin), torch.diff(self.offsets[begin : end + 1]))
        if self.kind == "torch_csr":
            column, value = self.x.col_indices()[first:last].to(torch.int64), self.x.values()[first:last].detach()
        else:
            column = torch.from_numpy(self.x.indices[first:last].astype(np.int64))
            value = torch.from_numpy(self.x.data[first:last].astype(np.float64))
        place = torch.stack([row.to(self.device), column])
        return torch.sparse_coo_tensor(
            place, value.to(torch.float64), (end - begin, self.width), check_invariants=False
        )

    def __iter__(self) -> Iterator[Tensor]:
        for begin in range(0, self.rows, self.chunk_size):
            yield self.chunk(begin, min(self.rows, begin + self.chunk_size))

    def check_finite(self, chunk: Tensor, index: int) -> None:
        values = chunk._values() if self.sparse else chunk
        bad = ~torch.isfinite(values)
        if bool(bad.any()):
            at = torch.nonzero(bad)[0]
            row = int(chunk._indices()[0, int(at[0])]) if self.sparse else int(at[0])
            got = float(values[tuple(at)])
            raise ValueError(f"{self.op}: x must be finite, got {got} in row {index * self.chunk_size + row}")


def _times(chunk: Tensor, q: Tensor) -> Tensor:
    return torch.sparse.mm(chunk, q) if chunk.layout != torch.strided else chunk @ q


def _transposed_times(chunk: Tensor, z: Tensor) -> Tensor:
    return torch.sparse.mm(chunk.t(), z) if chunk.layout != torch.strided else chunk.T @ z


def fit_pca(
    x: Tensor | NDArray[Any] | Any,
    dim: int,
    *,
    whiten: bool = False,
    seed: int = 0,
    passes: int = 30,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Mean and first principal components, read in chunks of rows, several times over.

    Up to 512 columns the covariance is formed whole. Beyond that a randomized subspace iteration finds the first
    components: each pass over the rows multiplies a [K, dim + 16] basis by the covariance. Sparse rows are never made
    dense beyond a chunk.

    Args:
        x: [N, K] dense tensor or array, torch sparse CSR tensor or scipy CSR matrix.
        dim: number of components, at most K.
        whiten: divide each component by its standard deviation, so that projected features have variance 1.
        seed: of the random start basis; the result is the same for the same seed.
        passes: the most of the randomized way, each two products with x. It ends earlier where the components have
            settled. Hundreds of components out of thousands of columns settle late; 6 passes are good enough there.
        chunk_size: rows at a time; by default 32 MiB of dense numbers, or 16,384 sparse rows.

    Returns:
        (mean fp32 [K], projection fp32 [K, dim]), on the device of x: `(x - mean) @ projection` are the features. Each
        component's largest entry is positive. Components of no variance are kept unchanged.

    Example:
        >>> import torch
        >>> from samplex_cuda.tree_fit import fit_pca, project
        >>> x = torch.randn(100, 8, generator=torch.Generator().manual_seed(0)) * torch.arange(1, 9)
        >>> mean, projection = fit_pca(x, 2, whiten=True)
        >>> project(x, mean, projection).var(0, correction=0).round(decimals=4)
        tensor([1., 1.])
    """
    rows = _Rows("fit_pca", x, chunk_size)
    width = rows.width
    if not 1 <= dim <= width:
        raise ValueError(f"fit_pca: dim must be in [1, {width}], the columns of x, got {dim}")
    if passes < 1:
        raise ValueError(f"fit_pca: passes must be at least 1, got {passes}")
    total = torch.zeros(width, 1, dtype=torch.float64, device=rows.device)
    for index, chunk in enumerate(rows):
        rows.check_finite(chunk, index)
        total += _transposed_times(chunk, torch.ones(chunk.shape[0], 1, dtype=torch.float64, device=rows.device))
    mean = (total / rows.rows).squeeze(1)  # [K]

    def covariance_times(q: Tensor) -> Tensor:
        result = torch.zeros_like(q)
        for chunk in rows:
            z = _times(chunk, q) - mean @ q
            result += _transposed_times(chunk, z) - torch.outer(mean, z.sum(0))
        return result / rows.rows

    if width <= _EXACT_WIDTH:
        covariance = torch.zeros(width, width, dtype=torch.float64, device=rows.device)
        for chunk in rows:
            centred = (chunk.to_dense() if rows.sparse else chunk) - mean
            covariance += centred.T @ centred
        values, vectors = torch.linalg.eigh(covariance / rows.rows)
    else:
        generator = torch.Generator().manual_seed(seed)
        start = torch.randn(width, min(width, dim + _OVERSAMPLE), generator=generator, dtype=torch.float64)
        basis = torch.linalg.qr(start.to(rows.device)).Q
        values = torch.zeros(0)
        for _ in range(passes):
            image = covariance_times(basis)
            # Rayleigh-Ritz: the best components inside the basis, and how much variance each has.
            new, turn = torch.linalg.eigh(basis.T @ image)
            vectors = basis @ turn
            settled = values.numel() > 0 and bool(((new - values).abs()[-dim:] <= _SETTLED * new.abs().max()).all())
            values = new
            if settled:
                break
            basis = torch.linalg.qr(image).Q
    values, vectors = values.flip(0)[:dim], vectors.flip(1)[:, :dim]
    largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
    projection = vectors * torch.where(largest < 0, -1.0, 1.0)
    if whiten:
        spread = values.clamp(min=0).sqrt()
        projection = projection / torch.where(spread > 1e-6 * spread.max(), spread, torch.ones_like(spread))
    return mean.float(), projection.float().contiguous()


def project(
    x: Tensor | NDArray[Any] | Any, mean: Tensor, projection: Tensor, *, chunk_size: int | None = None
) -> Tensor:
    """Projected features `(x - mean) @ projection`, in chunks of rows, with fp64 sums.

    Args:
        x: [N, K] dense tensor or array, torch sparse CSR tensor or scipy CSR matrix.
        mean: [K].
        projection: [K, dim].
        chunk_size: rows at a time.

    Returns:
        fp32 [N, dim].

    Example:
        >>> import torch
        >>> from samplex_cuda.tree_fit import project
        >>> project(torch.ones(2, 3), torch.zeros(3), torch.eye(3)[:, :2])
        tensor([[1., 1.],
                [1., 1.]])
    """
    rows = _Rows("project", x, chunk_size)
    if projection.dim() != 2 or mean.shape != (rows.width,) or projection.shape[0] != rows.width:
        raise ValueError(
            f"project: mean and projection must be [{rows.width}] and [{rows.width}, dim] for x {list(x.shape)}, "
            f"got {list(mean.shape)} and {list(projection.shape)}"
        )
    matrix = projection.to(rows.device, torch.float64)
    shift = mean.to(rows.device, torch.float64)
    result = torch.empty(rows.rows, projection.shape[1], dtype=torch.float32, device=rows.device)
    begin = 0
    for chunk in rows:
        # Sparse rows are not centred first: that would make them dense.
        part = _times(chunk, matrix) - shift @ matrix if rows.sparse else (chunk - shift) @ matrix
        result[begin : begin + chunk.shape[0]] = part
        begin += chunk.shape[0]
    return result
