"""Exact samplers that look at every class: Softmax and Quartic.

A draw costs O(C d) per row: the logits of all classes, by a product over chunks of classes, or inside one kernel of a
GPU (`exact_product_mass`). Only the log weight of each block of 256 classes is kept. A draw chooses a block by those
weights, computes the logits of the block once more and chooses inside it (`samplex_cuda.ops.exact_sample`). Held at a
time: B x chunk_size logits, B x C / 256 block weights and B x num_samples draws. Nothing waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from copy import copy as copy_of
from typing import Any

import torch
from torch import Tensor

from samplex_cuda import _device
from samplex_cuda._checks import check_dense, check_int, check_number, describe
from samplex_cuda.chunking import Chunk, logit_chunks, row_blocks
from samplex_cuda.draw import Draw
from samplex_cuda.ops.exact_sample import (
    ABSOLUTE,
    BLOCK,
    QUARTIC,
    SOFTMAX,
    exact_blocks,
    exact_draw,
    exact_log_prob,
    exact_mass,
    exact_product_mass,
)
from samplex_cuda.ops.static_sample import sort_exclude
from samplex_cuda.products import wide_dtype
from samplex_cuda.rng import Key, key_tensor
from samplex_cuda.samplers.base import MAX_SAMPLES, Exclude, Excluded, Sampler, check_int64
from samplex_cuda.samplers.stored import finite_error, shape_error
from samplex_cuda.samplers.table_rows import check_changes, check_table, last_of_equal, replace_rows, taken_rows

__all__ = ["ExactSampler", "Quartic", "Softmax"]


class ExactSampler(Sampler):
    """What `Softmax` and `Quartic` share: q(k) proportional to a function of the logit s = scale * (h . w_k + b_k).

    Example:
        >>> import torch, samplex_cuda as sx
        >>> isinstance(sx.samplers.Softmax(torch.randn(10, 4)), sx.samplers.ExactSampler)
        True
    """

    weight: Tensor | None
    bias: Tensor | None

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        scale: float = 1.0,
        copy: bool = True,
        chunk_size: int | None = None,
    ) -> None:
        super().__init__()
        check_table(self._op, weight, bias)
        if chunk_size is not None:
            check_int(self._op, "chunk_size", chunk_size)
        self.num_classes, self.dim = weight.shape
        self.scale = check_number(self._op, "scale", scale, -math.inf)
        self.chunk_size = chunk_size
        # In a tuple: a parameter of a model must not become a parameter of the sampler too.
        self._source = None if copy else (weight, bias)
        self.follows_rows = copy
        self.has_bias = copy and bias is not None
        self._notices: _device.Notices | None = None  # ids and rows that were refused on a device
        self.register_buffer("weight", weight.detach().clone().contiguous() if copy else None)
        self.register_buffer("bias", bias.detach().clone() if copy and bias is not None else None)

    # -------------------------------------------------------------------------------------------- surface
    @torch.no_grad()
    def sample(
        self,
        h: Tensor | None,
        num_samples: int,
        *,
        shared: bool = False,
        key: Key | Tensor | None = None,
        exclude: Exclude | None = None,
        context: Tensor | None = None,
        batch_size: int | None = None,
    ) -> Draw:
        """Draw `num_samples` classes for each row of h [*, d]; see `Sampler.sample`.

        `exclude` is exact: the distribution conditioned on the other classes. `shared` draws come from the mean of the
        rows' distributions. A key draws the same classes for every `chunk_size` and on every backend, unless a uniform
        number is within rounding (2^-20 times 1 + the size of the terms of a logit) of a boundary between classes. A
        row of h with nan gives log_q = nan. On CUDA nothing waits for the device: an excluded id that is not a class is
        ignored, and logits that overflow give log_q = nan.
        """
        count = self._check_count(num_samples)
        if count > MAX_SAMPLES // 2:
            raise ValueError(f"{self._op}: num_samples must be in [0, 2^23], got {count}")
        if shared:
            return self._sample_shared(h, count, key, exclude, context, batch_size)
        flat = self._check_h(h, batch_size)
        excluded = self._excluded(exclude, flat)
        pair = key_tensor(self._op, key, flat.device)
        batch = flat.shape[0]
        ids = torch.empty((batch, count), dtype=torch.int64, device=flat.device)
        log_q = torch.empty((batch, count), dtype=torch.float32, device=flat.device)
        if ids.numel() == 0:
            return Draw(ids, log_q)
        weight, bias = self._rows()
        kind, scale, alpha = self._law()
        for rows, part, _, mass in self._masses(flat, excluded):
            lse, place = exact_blocks(mass, pair, rows.start, count)
            self._check_lse(lse, part, rows.start)
            found = exact_draw(part, weight, bias, lse, place, pair, kind, scale, alpha, *excluded, rows.start)
            ids[rows], log_q[rows] = found, self._log_q(part, lse, found, excluded, rows.start)
        return Draw(ids, log_q)

    @torch.no_grad()
    def log_prob(
        self, h: Tensor | None, ids: Tensor, *, exclude: Exclude | None = None, context: Tensor | None = None
    ) -> Tensor:
        """Log-probability of given ids, the same numbers as the log_q of a draw; see `Sampler.log_prob`."""
        check_int64(self._op, "ids", ids)
        flat = self._check_h(h, None)
        wanted, single = self._wanted(ids, flat.shape[0])
        if ids.device != flat.device:
            raise ValueError(f"{self._op}: ids must be on {flat.device}, got {ids.device}")
        if not _device.host_waits(wanted):
            self._check_range("ids", wanted, 0)
        excluded = self._excluded(exclude, flat)
        out = torch.empty(wanted.shape, dtype=torch.float32, device=flat.device)
        if out.numel():
            for rows, part, _, mass in self._masses(flat, excluded):
                lse = self._lse(mass, part, rows.start)
                out[rows] = self._log_q(part, lse, wanted[rows], excluded, rows.start)
        return out.squeeze(1) if single else out

    @torch.no_grad()
    def log_prob_all(self, h: Tensor | None = None) -> Tensor:
        """Log-probability of every class, [B, C] float32."""
        flat = self._check_h(h, None)
        out = torch.empty((flat.shape[0], self.num_classes), dtype=torch.float32, device=flat.device)
        for rows, part, factor, mass in self._masses(flat, (None, None)):
            lse = self._lse(mass, part, rows.start)
            for chunk in self._chunks(factor):
                values = self._log_weight(chunk.logits())
                out[rows, chunk.first : chunk.first + values.shape[1]] = (values - lse[:, None]).clamp_(max=0).float()
        return out

    @torch.no_grad()
    def update(self, ids: Tensor, rows: Tensor, bias: Tensor | None = None) -> None:
        """Take over changed rows of the class table; with `copy=False` there is nothing to do.

        On a GPU the host does not wait: an id that is not a class, or a row that is not finite, leaves the table as it
        is there, and a later `update` raises.

        Args:
            ids: int64 [n]; of equal ids the last counts.
            rows: [n, d].
            bias: [n], where the sampler has a bias; None leaves it.
        """
        check_int64(self._op, "ids", ids)
        table, table_bias = self._table()
        check_changes(self._op, ids, rows, bias, self.dim, table_bias is not None)
        if _device.host_waits(table):
            self._update_on_device(ids, rows, bias)
            return
        self._check_range("ids", ids, 0)
        for name, values in (("rows", rows), ("bias", bias)):
            if values is not None and not bool(values.isfinite().all()):
                raise ValueError(f"{self._op}: {name} must be finite, got nan or inf")
        if self._source is not None or ids.numel() == 0:
            return
        last = last_of_equal(ids)
        table[ids[last]] = rows.detach()[last].to(table)
        if bias is not None and table_bias is not None:
            table_bias[ids[last]] = bias.detach()[last].to(table_bias)

    def _update_on_device(self, ids: Tensor, rows: Tensor, bias: Tensor | None) -> None:
        if self._source is not None or ids.numel() == 0:
            return
        notices = self._noticed()
        if refused := notices.arrived:
            notices.clear()
            raise ValueError(
                f"{self._op}: ids must be in [0, {self.num_classes}) and rows finite, got {refused} invalid ones in "
                "earlier calls, which were skipped; call rebuild(weight) to read the whole table"
            )
        outside, unfit = self._replace(ids, rows, bias)
        notices.add(outside | unfit)

    def _replace(self, ids: Tensor, rows: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        table, table_bias = self._table()
        changes = [(table, rows.detach().to(table.device))]
        if bias is not None and table_bias is not None:
            changes.append((table_bias, bias.detach().to(table.device)))
        return replace_rows(ids.to(table.device), changes)

    def _noticed(self) -> _device.Notices:
        table, _ = self._table()
        if self._notices is None or self._notices.device != table.device:
            self._notices = _device.Notices(table.device)
        return self._notices

    @torch.no_grad()
    def follow(self, ids: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
        """These rows of the class table may have changed; see `Sampler.follow`.

        On a GPU the host does not wait. A row that is not finite is left out there; a later call then raises, if the
        table still has one, and takes over the whole table otherwise.
        """
        table, table_bias = self._table()
        if not _device.host_waits(table):
            super().follow(ids, weight, bias)
            return
        if self._source is not None or ids.numel() == 0:
            return
        notices = self._noticed()
        if notices.arrived:
            for name, values in (("weight", weight), ("bias", bias)):
                if values is not None and not bool(values.isfinite().all()):
                    raise ValueError(f"{self._op}: {name} must be finite, got nan or inf")
            self.rebuild(weight, bias if table_bias is not None else None)
            return
        some = ids.clamp(0, self.num_classes - 1)
        with_bias = bias is not None and table_bias is not None
        _, unfit = self._replace(ids, weight[some], bias[some] if with_bias and bias is not None else None)
        notices.add(unfit)

    def _taken(self, place: Tensor) -> ExactSampler:
        made = copy_of(self)
        made._buffers = dict(self._buffers)
        made.num_classes, made._notices = place.shape[0], None
        if self._source is None:
            table, bias = self._table()
            made.weight = taken_rows(table, place)
            made.bias = None if bias is None else taken_rows(bias, place)
        elif not torch.equal(place, torch.arange(place.shape[0], device=place.device).masked_fill_(place < 0, -1)):
            raise ValueError(
                f"{self._op}: copy must be True to leave out classes, got False, with which the sampler reads the "
                "class table itself"
            )
        return made

    @torch.no_grad()
    def rebuild(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Take over the whole class table [C, d] (and bias [C]); with `copy=False` there is nothing to do."""
        check_table(self._op, weight, bias)
        check_dense(self._op, "weight", weight)
        table, table_bias = self._table()
        if weight.shape != table.shape:
            raise ValueError(f"{self._op}: weight must be {list(table.shape)}, got {describe(weight)}")
        if bias is not None and table_bias is None:
            raise ValueError(f"{self._op}: bias must be None, got {describe(bias)}")
        if self._notices is not None:
            self._notices.clear()
        if self._source is None:
            table.copy_(weight.detach())
            if bias is not None and table_bias is not None:
                table_bias.copy_(bias.detach())

    def extra_repr(self) -> str:
        """Sizes and options."""
        table, bias = self._table()
        return (
            f"num_classes={self.num_classes}, dim={self.dim}, bias={bias is not None}, scale={self.scale:g}, "
            f"dtype={str(table.dtype).removeprefix('torch.')}, copy={self._source is None}"
        )

    # -------------------------------------------------------------------------------------------- parts of a draw
    def _table(self) -> tuple[Tensor, Tensor | None]:
        if self._source is not None:
            weight, bias = self._source
            return weight.detach(), None if bias is None else bias.detach()
        assert self.weight is not None
        return self.weight, self.bias

    def _rows(self) -> tuple[Tensor, Tensor | None]:
        """Class table and bias as the ops take them."""
        weight, bias = self._table()
        return weight.contiguous(), None if bias is None else bias.contiguous()

    def _law(self) -> tuple[int, float, float]:
        """kind, scale and alpha of the ops."""
        raise NotImplementedError

    def _log_weight(self, s: Tensor) -> Tensor:
        """Log of the weight of each logit, in the dtype of s."""
        raise NotImplementedError

    def _chunks(self, h: Tensor) -> Iterator[Chunk]:
        """The products of a block of `row_blocks` with all classes, whole blocks of classes at a time."""
        weight, bias = self._table()
        return logit_chunks(h, weight, bias, self.scale, False, chunk_size=self.chunk_size, multiple=BLOCK)

    def _mass(self, h: Tensor, *lists: Excluded, row: int = 0) -> list[Tensor]:
        """Log of the weight of each block of classes, [B, ceil(C / 256)] float64, without each of `lists`.

        `h` is a block of `row_blocks`.
        """
        blocks = -(-self.num_classes // BLOCK)
        masses = [torch.empty((h.shape[0], blocks), dtype=torch.float64, device=h.device) for _ in lists]
        kind, scale, _ = self._law()
        if kind != QUARTIC and h.element_size() == 2 and _device.fuses_products(h):
            weight, bias = self._rows()
            for excluded, mass in zip(lists, masses, strict=True):
                exact_product_mass(h.contiguous(), weight, bias, kind, scale, *excluded, row, mass)
            return masses
        for chunk in self._chunks(h):
            for excluded, mass in zip(lists, masses, strict=True):
                exact_mass(chunk.dots, chunk.bias, chunk.first, self.num_classes, *self._law(), *excluded, row, mass)
        return masses

    def _masses(self, h: Tensor, excluded: Excluded) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
        """(rows, h of these rows as the ops take it, h as a factor, masses of their blocks), some rows at a time."""
        weight, _ = self._table()
        wide = wide_dtype(h, weight)
        for rows, factor, _ in row_blocks(h, weight):
            part = factor if factor.dtype == wide else h[rows].to(wide)
            yield rows, part.contiguous(), factor, self._mass(factor, excluded, row=rows.start)[0]

    def _lse(self, mass: Tensor, h: Tensor, first: int) -> Tensor:
        """log of the weight of each row, [B] float64."""
        lse, _ = exact_blocks(mass, torch.zeros(2, dtype=torch.int64, device=h.device), 0, 0)
        self._check_lse(lse, h, first)
        return lse

    def _log_q(self, h: Tensor, lse: Tensor, ids: Tensor, excluded: Excluded, row: int) -> Tensor:
        """log q [B, n] float32 of ids [B, n]."""
        weight, bias = self._rows()
        kind, scale, alpha = self._law()
        return exact_log_prob(h, weight, bias, lse, ids, kind, scale, alpha, *excluded, row)

    def _log_left(self, h: Tensor | None, exclude: Exclude, context: Tensor | None, batch: int) -> Tensor:
        flat = self._check_h(h, batch)
        excluded = self._excluded(exclude, flat)
        out = torch.empty(batch, dtype=torch.float64, device=flat.device)
        weight, _ = self._table()
        with torch.no_grad():
            for rows, part, _ in row_blocks(flat, weight):
                left, everything = self._mass(part, excluded, (None, None), row=rows.start)
                out[rows] = left.logsumexp(1) - everything.logsumexp(1)
        return out

    def _check_lse(self, lse: Tensor, h: Tensor, first: int) -> None:
        """ValueError where lse [B] is not finite although h and the table are; on CUDA log_q is nan instead."""
        if _device.host_waits(lse):
            return
        bad = ~lse.isfinite() & (lse != -torch.inf)  # -inf: nothing is left of the row
        if bool(bad.any()):
            overflow = (bad & h.isfinite().all(1)).nonzero()
            weight, bias = self._table()
            if overflow.numel() and bool(weight.isfinite().all()) and (bias is None or bool(bias.isfinite().all())):
                raise ValueError(
                    f"{self._op}: logits must be finite, got inf or nan in row {int(overflow[0]) + first} from finite "
                    "h and weight. Scale them down, or use float64"
                )

    # -------------------------------------------------------------------------------------------- checks
    def _check_h(self, h: Tensor | None, batch_size: int | None) -> Tensor:
        """h as [B, d]."""
        return self._queries(h, self.dim, self._table()[0].device, "the class table", batch_size)

    def _check_range(self, name: str, ids: Tensor, least: int) -> None:
        """IndexError for an id that is not a class. The ops pass over one, so on CUDA a draw need not look."""
        wrong = (ids < least) | (ids >= self.num_classes)
        if bool(wrong.any()):
            also = "" if least == 0 else "-1 or "
            raise IndexError(
                f"{self._op}: {name} must be {also}in [0, {self.num_classes}), got {int(ids[wrong].flatten()[0])}"
            )

    def _check_offsets(self, offsets: Tensor, ids: Tensor) -> None:
        if int(offsets[0]) != 0 or int(offsets[-1]) != ids.shape[0] or bool((offsets.diff() < 0).any()):
            raise ValueError(
                f"{self._op}: exclude_offsets must go from 0 to {ids.shape[0]} without decreasing, got "
                f"{int(offsets[0])} to {int(offsets[-1])}"
            )

    def _stored_error(self, found: dict[str, Any]) -> str | None:
        for name, value in found.items():
            own = self.get_buffer(name)
            wanted = str(list(own.shape))
            if wrong := shape_error(name, value, tuple(own.shape), own.dtype, wanted) or finite_error(name, value):
                return wrong
        return None

    def _excluded(self, exclude: Exclude | None, rows: Tensor) -> Excluded:
        exclude = self._check_exclude(exclude, rows.device, rows.shape[0])
        if exclude is not None and not _device.host_waits(rows):
            if not isinstance(exclude, Tensor):
                self._check_offsets(*exclude)
            self._check_range("exclude", exclude if isinstance(exclude, Tensor) else exclude[1], -1)
        return sort_exclude(exclude)


class Softmax(ExactSampler):
    """q(k) = softmax of the model's own logits, exactly: with it sampled softmax is unbiased.

    With the sampler's `scale` and `absolute` equal to those of the loss, every single sample has the normalizer of the
    full softmax, for any `num_samples` (Blanc & Rendle 2018, Theorem 1). It costs O(C d) per row. It is the reference
    for the other samplers, and cheaper than a kernel tree that follows the weights up to about 10^5 classes on a CPU
    and, by the estimates of docs/samplers/exact.md, 3 x 10^5 to 4 x 10^6 on a GPU with a 16-bit table.

    Args:
        weight: [C, d] class table, float32, float64, bfloat16 or float16.
        bias: [C].
        scale: inverse temperature; the logit is `scale * (h @ w + b)`.
        absolute: the logit is its absolute value, for the absolute softmax.
        copy: keep a copy of the table, which `update` and `rebuild` change. False: read the given tensors themselves,
            so that the distribution follows a model in training; they are then not part of `state_dict()`.
        chunk_size: classes per chunk, rounded down to blocks of 256; by default chosen from B and the device.

    Example:
        >>> import torch, samplex_cuda as sx
        >>> weight, h = torch.randn(1000, 8), torch.randn(2, 8)
        >>> sampler = sx.samplers.Softmax(weight)
        >>> draw = sampler.sample(h, 5, exclude=torch.tensor([3, 7]), key=sx.Key(0))
        >>> draw.ids.shape
        torch.Size([2, 5])
        >>> torch.allclose(sampler.log_prob_all(h), (h @ weight.T).log_softmax(1), atol=1e-5)
        True

        The distribution of a head that is being trained:

        >>> head = sx.SampledClassifier(8, 1000, sx.samplers.Uniform(1000), num_samples=5)
        >>> head.sampler = sx.samplers.Softmax(head.weight, head.bias, copy=False)
        >>> loss = head(h, torch.tensor([3, 7]))
        >>> torch.allclose(loss, head.eval()(h, torch.tensor([3, 7])), atol=1e-5)
        True
    """

    _op = "softmax"

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        scale: float = 1.0,
        absolute: bool = False,
        copy: bool = True,
        chunk_size: int | None = None,
    ) -> None:
        super().__init__(weight, bias, scale=scale, copy=copy, chunk_size=chunk_size)
        self.absolute = bool(absolute)

    def _law(self) -> tuple[int, float, float]:
        return ABSOLUTE if self.absolute else SOFTMAX, self.scale, 0.0

    def _log_weight(self, s: Tensor) -> Tensor:
        return s.abs() if self.absolute else s

    def extra_repr(self) -> str:
        """Sizes and options."""
        return super().extra_repr() + (", absolute=True" if self.absolute else "")


class Quartic(ExactSampler):
    """q(k) proportional to alpha * s^4 + 1, the quartic kernel of Blanc & Rendle (2018), exactly and in O(C d) a row.

    The distribution is symmetric in the sign of the logit, so the loss it serves is the absolute softmax
    (`absolute=True`).

    Args:
        weight: [C, d] class table.
        bias: [C].
        alpha: the weight of the fourth power.
        scale: as that of the loss; the logit is `scale * (h @ w + b)`.
        copy: as in `Softmax`.
        chunk_size: as in `Softmax`.

    Example:
        >>> import torch, samplex_cuda as sx
        >>> sampler = sx.samplers.Quartic(torch.tensor([[0.0], [1.0], [-1.0], [2.0]]))
        >>> sampler.log_prob_all(torch.ones(1, 1)).exp() * 22
        tensor([[ 1.0000,  2.0000,  2.0000, 17.0000]])
    """

    _op = "quartic"

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        alpha: float = 1.0,
        scale: float = 1.0,
        copy: bool = True,
        chunk_size: int | None = None,
    ) -> None:
        super().__init__(weight, bias, scale=scale, copy=copy, chunk_size=chunk_size)
        self.alpha = check_number("quartic", "alpha", alpha, 0.0)

    def _law(self) -> tuple[int, float, float]:
        return QUARTIC, self.scale, self.alpha

    def _log_weight(self, s: Tensor) -> Tensor:
        value = s.square().square_().mul_(self.alpha).log1p_()
        if self.alpha > 0.0 and (_device.host_waits(value) or bool(value.isinf().any())):
            value = torch.where(value.isinf(), 4.0 * s.abs().log() + math.log(self.alpha), value)
        return value

    def extra_repr(self) -> str:
        """Sizes and options."""
        return super().extra_repr() + f", alpha={self.alpha:g}"
