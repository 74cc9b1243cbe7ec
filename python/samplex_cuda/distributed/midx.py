"""`MIDX` over a sharded class table: codebooks and cells are on every rank, class rows are not.

A draw needs no exchange. New codes are made by the first rank from at most 256 K class rows, which the ranks that hold
them send; each rank then finds the cells of its rows and sends them to all others, 4 bytes per class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from samplex_cuda import _device
from samplex_cuda._checks import call
from samplex_cuda.distributed.collectives import Exchange
from samplex_cuda.distributed.layout import Layout
from samplex_cuda.ops import midx_sample as ops
from samplex_cuda.rng import key_tensor
from samplex_cuda.samplers.base import Sampler, distinct_ids
from samplex_cuda.samplers.kmeans import ROWS_PER_CODE
from samplex_cuda.samplers.midx import MIDX, REFRESH_AFTER, some_classes

__all__ = ["ShardedMIDX"]


class ShardedMIDX(MIDX):
    """A `MIDX` whose class rows are spread over ranks. Every rank must call what changes it; draws are local.

    Draws have the same bits on any number of ranks and as in one process, given the same codes and cells. A cell may
    differ where a class row is equally near to two codes, up to rounding.

    Args:
        sampler: with its options and codes, of which those of the first rank count; it may be on the meta device.
        layout: which rank holds which class.
        exchange: the collectives of the head.
        device: of the tables.
    """

    collective = True  # `log_prob_all` of a rank's own classes is asked for by `local_prior`
    whole_state = True  # its state is that of the unsharded sampler

    def __init__(self, sampler: MIDX, layout: Layout, exchange: Exchange, device: torch.device) -> None:
        Sampler.__init__(self)
        self.layout, self.exchange = layout, exchange
        self.num_classes, self.dim, self.num_codes = sampler.num_classes, sampler.dim, sampler.num_codes
        self.kind, self.scale, self.epsilon = sampler.kind, sampler.scale, sampler.epsilon
        self.has_bias, self.unfilled = sampler.has_bias, sampler.cell.is_meta
        counts = None if sampler.counts is None else self._of_first(sampler.counts.to(device))
        self._make_tables(device, counts, self._of_first(key_tensor(self._op, sampler.pair.to(device), device)))
        if not self.unfilled:
            for name in ("codes", "cell", "bias", "age"):
                if (own := getattr(self, name)) is not None:
                    own.copy_(self._of_first(sampler.get_buffer(name).to(device)))
            self._age = int(self.age)
            self._order()

    def _of_first(self, t: Tensor) -> Tensor:
        """The tensor of the first rank, on every rank: fits and keys may differ between ranks."""
        return self.exchange.sum_(t.clone() if self.exchange.rank == 0 else torch.zeros_like(t))

    def _by_class(self, mine: Tensor) -> Tensor:
        """Numbers [rows] of this rank's classes -> [C], of all classes."""
        padded = mine.new_zeros(self.layout.chunk)
        padded[: mine.shape[0]] = mine
        slots = torch.arange(self.num_classes, device=mine.device)
        out = mine.new_empty(self.num_classes)
        out[self.layout.class_at(slots)] = self.exchange.stack(padded).reshape(-1)[: self.num_classes]
        return out

    # -------------------------------------------------------------------------------------------- changes
    def _fit(self, weight: Tensor, bias: Tensor | None, start: Tensor | None) -> None:
        """New codes for the tables [rows, d] and [rows] of all ranks."""
        weight, bias = weight.detach(), None if bias is None or self.bias is None else bias.detach()
        self._refuse_unfit(weight, bias)
        rows = self._rows_to_fit(weight)
        fresh = self._codes_of(rows, start) if self.exchange.rank == 0 else torch.zeros_like(self.codes)
        fresh = self.exchange.sum_(fresh)
        self.codes.copy_(torch.where(fresh.isfinite().all(), fresh, self.codes))
        self.cell.copy_(self._by_class(self._cells_of(weight)))
        if bias is not None and self.bias is not None:
            found = self._by_class(bias.float())
            self.bias.copy_(torch.where(found.isfinite(), found, self.bias))
        self.unfilled = False
        self._grow_older(-self._age)
        self._order()

    def _refuse_unfit(self, weight: Tensor, bias: Tensor | None) -> None:
        """ValueError on every rank if one of them has rows that are not finite; on a GPU nobody looks."""
        if _device.host_waits(weight):
            return
        own = int((~weight.isfinite().all(1)).sum()) + (0 if bias is None else int((~bias.isfinite()).sum()))
        total = int(self.exchange.sum_(torch.tensor([own], device=weight.device)))
        if total:
            raise self._unfit(total, own)

    def _unfit(self, total: int, own: int) -> ValueError:
        where = f"{own} of them on this rank" if own else "none of them on this rank"
        return ValueError(
            f"{self._op}: class rows must be finite, got {total} that are not, {where}; the sampler keeps what it had"
        )

    def _rows_to_fit(self, weight: Tensor) -> Tensor:
        """The class rows [n, d] float32 that codes are fitted to, on every rank: those of one process."""
        chosen = some_classes(self.num_classes, ROWS_PER_CODE * self.num_codes, self.pair)
        if chosen is None:
            chosen = torch.arange(self.num_classes, device=weight.device)
        local = self.layout.local(chosen)
        rows = torch.zeros(chosen.shape[0], self.dim, device=weight.device)
        if self.layout.rows:
            rows = torch.where((local >= 0).unsqueeze(1), weight[local.clamp_min(0)].float(), 0.0)
        return self.exchange.sum_(rows)

    @torch.no_grad()
    def refresh(self, weight: Tensor | None = None, bias: Tensor | None = None) -> None:
        """Bring codes and cells up to date with the tables [rows, d] and [rows] of all ranks; see `MIDX.refresh`."""
        if weight is None:
            raise ValueError("midx: weight must be given for a sharded head, got None; call head.update_sampler()")
        self._fit(weight, bias, self.codes.clone())

    @torch.no_grad()
    def follow(self, ids: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
        """Classes [n] that may have changed, and this rank's tables; every rank must call it, with its own list.

        On a CPU ranks tell each other what has changed. On a GPU, where the host must not wait for these numbers, they
        send the cells of all their classes, and lists must be equally long on all ranks.
        """
        if _device.host_waits(self.cell):
            if self.wants_refresh(ids.numel()):
                self.refresh(weight, bias)
            else:
                self._follow_in_fixed_sizes(ids.reshape(-1), weight.detach(), bias)
            return
        touched = distinct_ids(ids, self.num_classes)
        local = self.layout.local(touched)
        local = local[local >= 0]
        counts = self.exchange.stack(torch.tensor([local.shape[0]], device=local.device)).reshape(-1).tolist()
        if self._age + sum(counts) >= REFRESH_AFTER * self.num_classes:
            self.refresh(weight, bias)
            return
        if not max(counts):
            return
        rows = weight[local]
        fine = rows.isfinite().all(1)
        told = torch.full((3, max(counts)), -1, dtype=torch.int64, device=local.device)
        told[0, : local.shape[0]] = self.layout.class_at(local + self.layout.start)
        told[1, : local.shape[0]] = torch.where(fine, self._cells_of(rows).long(), -1)
        if bias is not None and self.bias is not None:
            of_rows = bias[local].float()
            told[1, : local.shape[0]] = torch.where(of_rows.isfinite(), told[1, : local.shape[0]], -1)
            told[2, : local.shape[0]] = of_rows.view(torch.int32).long()
        classes, cells, numbers = self.exchange.stack(told).permute(1, 0, 2).reshape(3, -1)
        bad = (classes >= 0) & (cells < 0)
        if bool(bad.any()):
            raise self._unfit(int(bad.sum()), int((told[1, : local.shape[0]] < 0).sum()))
        there = classes >= 0
        self.cell[classes[there]] = cells[there].to(torch.int32)
        if bias is not None and self.bias is not None:
            self.bias[classes[there]] = numbers[there].to(torch.int32).view(torch.float32)
        self._grow_older(sum(counts))
        self._order()

    def _follow_in_fixed_sizes(self, ids: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        """Cells of the classes `ids` that are here, then those of all ranks; a row that is not finite keeps its own."""
        classes = self.layout.classes(weight.device)
        changes: list[tuple[Tensor, Tensor, Tensor | None]] = [(self.cell, self.cell[classes], None)]
        if bias is not None and self.bias is not None:
            changes.append((self.bias, self.bias[classes], bias.detach()))
        # What is not here counts as row 0, whose numbers are then fresh.
        at = self.layout.local(ids).clamp_min(0)
        for table, mine, source in changes:
            if self.layout.rows and ids.shape[0]:
                rows = weight[at] if source is None else source[at].unsqueeze(1)
                fresh = self._cells_of(rows) if source is None else rows[:, 0].float()
                mine.index_copy_(0, at, torch.where(rows.isfinite().all(1), fresh, mine[at]))
            table.copy_(self._by_class(mine))
        self._grow_older(ids.shape[0])
        self._order()

    # -------------------------------------------------------------------------------------------- for the head
    def local_prior(self, h: Tensor) -> Callable[[slice], Tensor]:
        """See `ShardedSampler.local_prior`."""
        classes = self.layout.classes(h.device)

        def of_rows(rows: slice) -> Tensor:
            flat = self._check_h(h[rows], None)
            return call(ops.midx_log_prob, classes.expand(flat.shape[0], -1).contiguous(), *self._law(flat))

        return of_rows

    def adopt(self, state_dict: dict[str, Any], prefix: str) -> None:
        """See `ShardedSampler.adopt`: the state is that of the unsharded sampler."""
