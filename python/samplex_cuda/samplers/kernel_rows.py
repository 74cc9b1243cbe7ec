"""What a kernel sampler is made of besides its tree: rows and queries as the kernel sees them, and their features.

`KernelSampler` keeps one tree over all classes; in a sharded head each rank keeps the part above its own classes.
"""

from __future__ import annotations

import math
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from samplex_cuda import chunking, rff
from samplex_cuda._checks import check_data, check_dense, describe
from samplex_cuda.ops import kernel_tree as ops
from samplex_cuda.samplers.base import Sampler

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["KernelRows", "longest_query"]

MOST_SUM = 1e30  # of features over all classes: a product with the features of a query must stay in float32
MOST_ROW = 1e15  # of the numbers of a row: its distance from a query must stay in float32
MOST_QUERY = 1e15  # a longer query is shortened to this


_deferring: ContextVar[bool] = ContextVar("deferring", default=False)  # whether a table without numbers is meant


class KernelRows(Sampler):
    """A kernel over class rows and queries: its options, its features, and what numbers it takes."""

    follows_rows = True
    rows: Tensor
    sums: Tensor
    omega: Tensor | None
    kind: str
    kernel: str
    scale: float
    epsilon: float
    normalize: bool
    dim: int
    leaf_size: int
    num_numbers: int
    _shift: float
    _longest: float | Tensor

    @classmethod
    def deferred(cls, num_classes: int, dim: int, *, bias: bool = False, **options: Any) -> Self:
        """A sampler without numbers, for a head on the meta device: `head.shard` makes its tree from the class rows.

        Args:
            num_classes: C.
            dim: d, the width of the class rows.
            bias: whether it takes the bias of the head, too.
            options: the others of the constructor.

        Example:
            >>> import samplex_cuda as sx
            >>> sampler = sx.samplers.Quadratic.deferred(10**8, 128, alpha=10.0)
            >>> head = sx.SampledClassifier(128, 10**8, sampler, num_samples=64, device="meta")
        """
        make: Any = cls
        token = _deferring.set(True)
        try:
            weight = torch.empty(num_classes, dim, device="meta")
            return make(weight, bias=torch.empty(num_classes, device="meta") if bias else None, **options)
        finally:
            _deferring.reset(token)

    @property
    def depth(self) -> int:
        """Levels of the tree; 0 where all classes fit into one leaf."""
        return (-(-self.num_classes // self.leaf_size) - 1).bit_length()

    def _law(self) -> tuple[int, str, float, float]:
        return self.leaf_size, self.kernel, self.scale, self.epsilon

    def _query(self, h: Tensor | None) -> tuple[Tensor, Tensor]:
        """Queries [B, dim] as the leaves see them, and their features."""
        if not isinstance(h, Tensor) or h.dim() < 1 or not h.is_floating_point() or h.shape[-1] != self.dim:
            got = describe(h) if isinstance(h, Tensor) else type(h).__name__
            raise ValueError(f"{self._op}: h must be [*, {self.dim}] floating point, got {got}")
        if h.device != self.rows.device:
            raise ValueError(f"{self._op}: h must be on {self.rows.device}, where the tree is, got {h.device}")
        flat = check_dense(self._op, "h", h).detach().reshape(-1, self.dim).to(torch.float32)
        if self.normalize:
            flat = torch.nn.functional.normalize(flat, dim=1)
        if self.has_bias:
            flat = torch.nn.functional.pad(flat, (0, 1), value=1.0)
        # Exactly 1 for all but absurd queries, whose features would overflow: no bit of the others changes.
        flat = flat * (self._longest / torch.linalg.vector_norm(flat, math.inf, 1, keepdim=True)).clamp(max=1.0)
        return ops.pad_columns(flat, ops.ROW_ALIGN), self._features(flat, 0.0)

    def _features(self, x: Tensor, shift: float) -> Tensor:
        """phi of rows [n, width] times e^shift ("positive"), zero columns up to the stride of the sums."""
        if self.kind == "quadratic":
            phi = rff.features(x, kind="quadratic", alpha=self.scale)
        else:
            phi = rff.features(x, self.omega, kind=self.kind, nu=self.scale, shift=shift)
        return ops.pad_columns(phi, ops.FEATURE_ALIGN)

    def _own(self, weight: Tensor, bias: Tensor | None, which: slice | Tensor) -> Tensor:
        """Rows as the tree keeps them, [n, width] float32."""
        rows = weight.detach()[which].to(torch.float32)
        if self.normalize:
            rows = torch.nn.functional.normalize(rows, dim=1)
        if bias is not None:
            rows = torch.cat([rows, bias.detach()[which].to(torch.float32).unsqueeze(1)], 1)
        return rows.contiguous()

    def _rows_at_a_time(self, changed: bool = False) -> int:
        """Rows of features that are held at once; of `changed` rows, old and new ones."""
        size = chunking.chunk_bytes(self.sums.device, "changed features" if changed else "features")
        return max(1, size // (self.sums.shape[1] * 4))

    def _fits(self, rows: Tensor, phi: Tensor | None) -> Tensor:
        """[n] bool: whether the sums of all classes stay in range with such rows [n, width] and their features."""
        most = MOST_ROW
        if self.kind == "quadratic":
            most = min(most, math.sqrt(MOST_SUM / self.num_classes / math.sqrt(2.0 * self.scale)))
        fits = rows.abs().amax(1) <= most  # false for nan; several times as fast as torch's norm
        if self.kind == "positive" and phi is not None:
            fits &= phi.abs().amax(1) <= MOST_SUM / self.num_classes
        return fits

    def _decays(self, rows: Tensor) -> Tensor:
        """nu |c|^2 / 2 of each row."""
        return 0.5 * self.scale * rows.square().sum(1)

    def _decay(self, rows: Tensor) -> float:
        """nu |c|^2 / 2 of the shortest row."""
        return 0.5 * self.scale * float(rows.square().sum(1).min())

    def _check_table(self, name: str, table: Tensor, rows: int | None = None) -> None:
        wanted = "C" if rows is None else str(rows)
        width = "d" if rows is None else str(self.dim)
        if not isinstance(table, Tensor):
            raise TypeError(f"{self._op}: {name} must be a [{wanted}, {width}] tensor, got {type(table).__name__}")
        good = table.dim() == 2 and table.is_floating_point() and table.shape[0] >= (rows is None)
        good = good and table.shape[1] >= 1 and (rows is None or table.shape == (rows, self.dim))
        if not good:
            raise ValueError(f"{self._op}: {name} must be [{wanted}, {width}] floating point, got {describe(table)}")
        if not (table.is_meta and _deferring.get()):
            check_data(self._op, name, table)

    def _check_bias(self, bias: Tensor | None, rows: int) -> None:
        if bias is None and not self.has_bias:
            return
        if bias is None or not self.has_bias:
            wanted = f"[{rows}], the sampler has a bias" if self.has_bias else "None, the sampler has no bias"
            raise ValueError(f"{self._op}: bias must be {wanted}, got {'None' if bias is None else describe(bias)}")
        if not isinstance(bias, Tensor) or bias.shape != (rows,) or not bias.is_floating_point():
            got = describe(bias) if isinstance(bias, Tensor) else type(bias).__name__
            raise ValueError(f"{self._op}: bias must be [{rows}] floating point, got {got}")

    def _check_finite(self, name: str, rows: Tensor, bias: Tensor | None) -> None:
        for what, table in ((name, rows), ("bias", bias)):
            if table is None:
                continue
            for begin in range(0, table.shape[0], 65536):
                part = table.detach()[begin : begin + 65536].reshape(-1, 1 if table.dim() == 1 else table.shape[1])
                if float(torch.linalg.vector_norm(part, math.inf)) <= MOST_ROW:  # false for nan
                    continue
                fine = part.double().abs() <= MOST_ROW  # which fp16 would round to inf
                bad = int((~fine).any(1).nonzero()[0, 0])
                if not bool(part[bad].isfinite().all()):
                    raise ValueError(f"{self._op}: {what} must be finite, got nan or inf in row {bad + begin}")
                most = float(part[bad].abs().amax())
                raise ValueError(
                    f"{self._op}: {what} must have values up to {MOST_ROW:g}, got {most:g} in row {bad + begin}. "
                    f"{self._way_out()}"
                )

    def _refuse_rows(self, name: str, rows: Tensor, bias: Tensor | None) -> None:
        most = max(float(t.detach().abs().amax()) for t in (rows, bias) if t is not None and t.numel())
        raise ValueError(
            f"{self._op}: sums of the features of {name} must fit in float32, got features up to {most:g}. "
            f"{self._way_out()}"
        )

    def _way_out(self) -> str:
        smaller = f", use normalize=True or a nu smaller than {self.scale:g}" if self.kind == "positive" else ""
        return f"Scale the rows down{smaller}; the sampler is as it was before"


def longest_query(most: Any, num_numbers: int, scale: float) -> Any:
    """The longest query a quadratic tree with sums up to `most` takes, of a number or of a tensor on a device."""
    factor = num_numbers * math.sqrt(2.0 * scale)
    if isinstance(most, Tensor):
        return (1e37 / (factor * most.clamp_min(1.0))).sqrt().clamp_max(MOST_QUERY)
    return min(MOST_QUERY, math.sqrt(1e37 / (factor * max(most, 1.0))))
