"""`Softmax` and `Quartic` over a sharded class table: exact, O(C d / P) per row and rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from samplex_cuda import _device
from samplex_cuda._checks import describe
from samplex_cuda.chunking import row_blocks
from samplex_cuda.distributed.collectives import Exchange
from samplex_cuda.distributed.layout import Layout
from samplex_cuda.distributed.samplers import ShardedSampler
from samplex_cuda.ops.exact_sample import exact_blocks, exact_draw
from samplex_cuda.rng import fold_in
from samplex_cuda.samplers.exact import ExactSampler, Quartic, Softmax

__all__ = ["ShardedExact"]


class ShardedExact(ShardedSampler):
    """An exact sampler whose class rows are spread over the ranks: a draw chooses a rank, then a class of that rank.

    Ranks tell each other the log weight of their classes, 8 bytes per row. The distribution and log_q are those of all
    classes; draws of another number of ranks are other draws. Logits that overflow give log_q = nan.

    Args:
        sampler: of all classes; one that reads a table of its own choice (`copy=False`) reads that of the sharded head.
        layout: which rank holds which class.
        exchange: the collectives of the head.
        device: of the tables.
    """

    weight: Tensor | None
    bias: Tensor | None

    def __init__(self, sampler: ExactSampler, layout: Layout, exchange: Exchange, device: torch.device) -> None:
        super().__init__(layout, exchange)
        self._op, self.dim = sampler._op, sampler.dim
        self._options: dict[str, Any] = {"scale": sampler.scale, "chunk_size": sampler.chunk_size, "copy": False}
        self._make: Any = type(sampler)
        if isinstance(sampler, Softmax):
            self._options["absolute"] = sampler.absolute
        elif isinstance(sampler, Quartic):
            self._options["alpha"] = sampler.alpha
        self.follows_rows, self.has_bias = sampler.follows_rows, sampler.has_bias
        self._given: tuple[Tensor, Tensor | None] | None = None
        self._source: tuple[Tensor, Tensor | None] | None = None  # of the head, where nothing is copied
        for name, t in (("weight", sampler.weight), ("bias", sampler.bias)):
            mine = None
            if t is not None:
                mine = torch.zeros(layout.rows, *t.shape[1:], dtype=t.dtype, device=device)
                if not t.is_meta:
                    mine.copy_(t[layout.classes(t.device)])
            self.register_buffer(name, mine, persistent=False)
        self.unfilled = sampler.weight is not None and sampler.weight.is_meta
        if sampler._source is not None:
            self._given = sampler._source

    def attach(self, whole: tuple[Tensor, Tensor | None], weight: Tensor, bias: Tensor | None) -> None:
        """Reads this rank's tables of a head where the sampler read those of `whole`, the head that was sharded."""
        if self._given is None:
            return
        if self._given[0] is not whole[0]:
            raise ValueError(
                f"{self._op}: weight must be that of the head with copy=False, got another tensor; pass copy=True, or "
                "make the sampler from the head's own weight and bias"
            )
        self._source, self._given = (weight, bias if self._given[1] is not None else None), None

    def _place(self) -> torch.device:
        return self._tables()[0].device

    def _tables(self) -> tuple[Tensor, Tensor | None]:
        if self._source is not None:
            weight, bias = self._source
            return weight.detach(), None if bias is None else bias.detach()
        assert self.weight is not None
        return self.weight, self.bias

    def _own(self) -> ExactSampler | None:
        """The sampler of this rank's classes, None if it has none."""
        return self._make(*self._tables(), **self._options) if self.layout.rows else None

    # -------------------------------------------------------------------------------------------- draws and scores
    def _lists(self, excluded: Tensor | None) -> tuple[Tensor | None, None]:
        """Excluded slots [B, E] as rows of this rank, ascending, -1 for those of others."""
        if excluded is None:
            return None, None
        local = excluded - self.layout.start
        mine = (excluded >= 0) & (local >= 0) & (local < self.layout.rows)
        return torch.where(mine, local, -1).sort(1).values, None

    def _mass(self, h: Tensor, lists: tuple[Tensor | None, None], pair: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Log weight of this rank's classes, [B] fp64, and a draw among them, [B, m] rows."""
        lse = torch.full((h.shape[0],), -torch.inf, dtype=torch.float64, device=h.device)
        ids = torch.zeros(h.shape[0], count, dtype=torch.int64, device=h.device)
        own = self._own()
        if own is None:
            return lse, ids
        weight, bias = own._rows()
        for rows, part, _, mass in own._masses(h, lists):
            lse[rows], place = exact_blocks(mass, pair, rows.start, count)
            if count:
                ids[rows] = exact_draw(part, weight, bias, lse[rows], place, pair, *own._law(), *lists, rows.start)
        return lse, ids

    def _total(self, h: Tensor, lists: tuple[Tensor | None, None]) -> Tensor:
        """Log weight of all classes, [B] fp64."""
        nothing = torch.zeros(2, dtype=torch.int64, device=h.device)
        return self.exchange.stack(self._mass(h, lists, nothing, 0)[0]).logsumexp(0)

    def _log_q(self, h: Tensor, lse: Tensor, ids: Tensor, lists: tuple[Tensor | None, None]) -> Tensor:
        """log q [B, n] of rows [B, n] of this rank, given the log weight of all classes."""
        out = torch.zeros(ids.shape, device=h.device)
        own = self._own()
        if own is None or not ids.numel():
            return out
        for rows, _, _ in row_blocks(h, own._table()[0]):
            wide = h[rows].to(torch.float64 if h.dtype is torch.float64 else torch.float32).contiguous()
            out[rows] = own._log_q(wide, lse[rows].contiguous(), ids[rows].contiguous(), lists, rows.start)
        return out

    def _flat(self, h: Tensor | None) -> Tensor:
        if not isinstance(h, Tensor) or h.dim() < 1 or h.shape[-1] != self.dim or not h.is_floating_point():
            raise ValueError(f"{self._op}: h must be [*, {self.dim}] floating point, got {describe(h)}")
        return h.detach().reshape(-1, self.dim)

    @torch.no_grad()
    def _draw_slots(
        self, h: Tensor | None, batch: int, count: int, pair: Tensor, excluded: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        flat, lists = self._flat(h), self._lists(excluded)
        lse, ids = self._mass(flat, lists, pair, count)
        total, place = exact_blocks(self.exchange.stack(lse).t().contiguous(), fold_in(pair, 1), 0, count)
        chosen = (place // max(1, batch)).clamp(0, self.exchange.world - 1)
        log_q = self._log_q(flat, total, ids, lists)
        claimed = torch.where(chosen == self.exchange.rank, self.layout.start + ids, -1)
        if excluded is not None:
            nothing = (total == -torch.inf).unsqueeze(1)
            least = torch.where(excluded >= 0, excluded, self.num_classes).amin(1, keepdim=True)
            mine = (least >= self.layout.start) & (least < self.layout.stop)
            claimed = torch.where(nothing, torch.where(mine, least, -1), claimed)
            log_q = torch.where(nothing, 0.0, log_q)
        return self._from_owners(claimed, log_q)  # type: ignore[return-value]

    @torch.no_grad()
    def _score_slots(self, h: Tensor | None, slots: Tensor, excluded: Tensor | None) -> Tensor:
        flat, lists = self._flat(h), self._lists(excluded)
        total = self._total(flat, lists)
        local = slots - self.layout.start
        mine = (slots >= 0) & (local >= 0) & (local < self.layout.rows)
        (out,) = self.exchange.from_owners(mine, self._log_q(flat, total, torch.where(mine, local, 0), lists))
        if excluded is None:
            return out
        least = torch.where(excluded >= 0, excluded, self.num_classes).amin(1, keepdim=True)
        nothing = (total == -torch.inf).unsqueeze(1)
        return torch.where(nothing, torch.where(slots == least, 0.0, -torch.inf), out)

    def log_prob_local(self, h: Tensor) -> Tensor:
        """As in `ShardedSampler`, but every rank must call it: the log weight of all classes is a sum over ranks."""
        return self.local_prior(h)(slice(0, h.shape[0]))

    @torch.no_grad()
    def local_prior(self, h: Tensor) -> Callable[[slice], Tensor]:
        """See `ShardedSampler.local_prior`."""
        flat, own = self._flat(h), self._own()
        total = self._total(flat, (None, None))

        def of_rows(rows: slice) -> Tensor:
            some, lse = flat[rows], total[rows]
            out = torch.empty(some.shape[0], self.layout.rows, device=some.device)
            if own is None:
                return out
            for part, factor, _ in row_blocks(some, own._table()[0]):
                for chunk in own._chunks(factor):
                    values = own._log_weight(chunk.logits()) - lse[part, None]
                    out[part, chunk.first : chunk.first + values.shape[1]] = values.clamp_(max=0).float()
            return out

        return of_rows

    # -------------------------------------------------------------------------------------------- changes
    @torch.no_grad()
    def follow(self, ids: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
        """Rows of classes that may have changed; nothing is exchanged.

        Args:
            ids: int64 [n], classes in any order, repeats and those of other ranks among them.
            weight: [rows, d], this rank's table.
            bias: [rows].
        """
        if self.weight is None or not self.layout.rows or not ids.shape[0]:
            return
        local = self.layout.local(ids)
        # Of a fixed size on a device: what is not here counts as row 0, whose numbers are then fresh.
        at = local.clamp_min(0) if _device.host_waits(ids) else local[local >= 0].unique()
        self.weight[at] = weight[at].to(self.weight.dtype)
        if self.bias is not None and bias is not None:
            self.bias[at] = bias[at].to(self.bias.dtype)

    @torch.no_grad()
    def rebuild(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Rebuilds all rows from this rank's table [rows, d] (and bias [rows])."""
        if self.weight is not None:
            self.weight.copy_(weight)
            if self.bias is not None and bias is not None:
                self.bias.copy_(bias)

    # -------------------------------------------------------------------------------------------- state
    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, t in (("weight", self.weight), ("bias", self.bias)):
            if t is not None:
                destination[prefix + name] = self._dtensor(t)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        given = {name: state_dict.pop(prefix + name, None) for name in ("weight", "bias")}
        super()._load_from_state_dict(state_dict, prefix, *args)
        for name, value in given.items():
            own = self._buffers[name]
            if own is None:
                continue
            if not isinstance(value, Tensor):
                args[-3].append(prefix + name)  # missing
            elif value.shape != (self.num_classes, *own.shape[1:]):
                wanted = [self.num_classes, *own.shape[1:]]
                args[-1].append(f"{self._op}: {name} must be {wanted}, got {describe(value)}")
            else:
                own.copy_(self._local_rows(value))

    def extra_repr(self) -> str:
        """Sizes and what this rank holds."""
        return f"num_classes={self.num_classes}, dim={self.dim}, rows={self.layout.rows}, copy={self.follows_rows}"
