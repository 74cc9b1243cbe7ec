"""Exact samplers that look at every class: Softmax and Quartic. The oracles that the fast samplers are compared with.

A draw costs O(C d) a row: the logits of all classes, as a batched product over blocks of classes. Only the mass of each
block is kept. A draw chooses a block by those masses, computes the block's logits once more and chooses inside it. What
is held at a time is B x chunk_size logits and B x C / 256 block masses.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from samplex_cuda import chunking
from samplex_cuda._checks import check_dense, check_int, describe
from samplex_cuda.draw import Draw
from samplex_cuda.ops.static_sample import uniform_sample
from samplex_cuda.rng import Key, key_tensor
from samplex_cuda.samplers.base import MAX_SAMPLES, Exclude, Sampler, check_int64
from samplex_cuda.samplers.stored import finite_error, shape_error

__all__ = ["ExactSampler", "Quartic", "Softmax"]

# Classes whose mass is kept as one number. Also the shape of the products, so that how many blocks are done at a time
# hardly shows in their bits.
BLOCK = 256
# Rows of h at a time; beyond it a product gains nothing from more rows.
_BATCH_ROWS = 1024
_UNIFORM_BITS = 52


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
        self._check_table(weight, bias)
        if not isinstance(scale, int | float) or isinstance(scale, bool) or not -float("inf") < scale < float("inf"):
            raise ValueError(f"{self._op}: scale must be a finite number, got {scale!r}")
        if chunk_size is not None:
            check_int(self._op, "chunk_size", chunk_size)
        self.num_classes, self.dim = weight.shape
        self.scale = float(scale)
        self.chunk_size = chunk_size
        # In a tuple: a parameter of a model must not become a parameter of the sampler too.
        self._source = None if copy else (weight, bias)
        self.follows_rows = copy
        self.has_bias = copy and bias is not None
        self.register_buffer("weight", weight.detach().clone().contiguous() if copy else None)
        self.register_buffer("bias", bias.detach().clone() if copy and bias is not None else None)

    # -------------------------------------------------------------------------------------------- the law
    def _mass_(self, s: Tensor) -> Tensor:
        """Log of the summed weights of logits s [n, B, k] over k, [n, B] float64. May overwrite s."""
        raise NotImplementedError

    def _log_weight(self, s: Tensor) -> Tensor:
        """Log of the weight of each logit, in the dtype of s."""
        raise NotImplementedError

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

        `exclude` is exact: the law conditioned on the other classes. `shared` draws: from the mean of the rows' laws.
        A key draws the same for every `chunk_size`, but where a uniform comes within rounding (1e-7) of a border
        between classes. A row of h with nan gives log_q = nan.
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
        # Two numbers a draw: which block, which class in it.
        bits = uniform_sample(pair, batch, 2 * count, 1 << _UNIFORM_BITS)[0]
        uniforms = bits.double().add_(0.5).mul_(2.0**-_UNIFORM_BITS).view(batch, count, 2)
        with torch.autocast(flat.device.type, enabled=False):
            for rows in _row_blocks(batch):
                part = excluded.of(rows)
                mass = self._left(flat[rows], self._block_mass(flat[rows]), part)
                lse = self._checked_lse(mass, flat[rows], rows.start)
                found = self._invert(flat[rows], mass, uniforms[rows], part)
                if part.ids.numel():  # nothing left: the first excluded id stands in
                    found = torch.where(lse[:, None] == -torch.inf, part.first()[:, None], found)
                ids[rows], log_q[rows] = found, self._log_q(flat[rows], found, lse, part)
        return Draw(ids, log_q)

    @torch.no_grad()
    def log_prob(
        self, h: Tensor | None, ids: Tensor, *, exclude: Exclude | None = None, context: Tensor | None = None
    ) -> Tensor:
        """Log-probability of given ids, the same numbers as the log_q of a draw; see `Sampler.log_prob`."""
        check_int64(self._op, "ids", ids)
        flat = self._check_h(h, None)
        batch = flat.shape[0]
        if ids.dim() == 2 and ids.shape[0] == batch:
            wanted = ids
        elif ids.dim() == 1:
            wanted = ids.unsqueeze(1) if ids.shape[0] == batch else ids.expand(batch, -1)
        else:
            raise ValueError(f"{self._op}: ids must be [B], [B, n] or [n] with B = {batch}, got {describe(ids)}")
        if ids.device != flat.device:
            raise ValueError(f"{self._op}: ids must be on {flat.device}, got {ids.device}")
        self._check_range("ids", wanted, wanted >= 0)
        excluded = self._excluded(exclude, flat)
        out = torch.empty(wanted.shape, dtype=torch.float32, device=flat.device)
        if out.numel():
            with torch.autocast(flat.device.type, enabled=False):
                for rows in _row_blocks(batch):
                    part = excluded.of(rows)
                    mass = self._left(flat[rows], self._block_mass(flat[rows]), part)
                    lse = self._checked_lse(mass, flat[rows], rows.start)
                    out[rows] = self._log_q(flat[rows], wanted[rows], lse, part)
        return out.squeeze(1) if ids.dim() == 1 and ids.shape[0] == batch else out

    @torch.no_grad()
    def log_prob_all(self, h: Tensor | None = None) -> Tensor:
        """Log-probability of every class, [B, C] float32."""
        flat = self._check_h(h, None)
        out = torch.empty((flat.shape[0], self.num_classes), dtype=torch.float32, device=flat.device)
        with torch.autocast(flat.device.type, enabled=False):
            for rows in _row_blocks(flat.shape[0]):
                lse = self._checked_lse(self._block_mass(flat[rows]), flat[rows], rows.start)
                for begin, s in self._logits(flat[rows]):
                    values = self._log_weight(s).permute(1, 0, 2).flatten(1)
                    out[rows, begin : begin + values.shape[1]] = (values - lse[:, None]).clamp_(max=0).float()
        return out

    @torch.no_grad()
    def update(self, ids: Tensor, rows: Tensor, bias: Tensor | None = None) -> None:
        """Take over changed rows of the class table; with `copy=False` there is nothing to do.

        Args:
            ids: int64 [n]; of equal ids the last counts.
            rows: [n, d].
            bias: [n], where the sampler has a bias; None leaves it.
        """
        check_int64(self._op, "ids", ids)
        table, table_bias = self._table()
        if ids.dim() != 1:
            raise ValueError(f"{self._op}: ids must be [n], got {describe(ids)}")
        if not isinstance(rows, Tensor) or rows.shape != (ids.shape[0], self.dim) or not rows.is_floating_point():
            raise ValueError(
                f"{self._op}: rows must be [{ids.shape[0]}, {self.dim}] floating point, got {describe(rows)}"
            )
        check_dense(self._op, "rows", rows)
        if bias is not None and (table_bias is None or bias.shape != ids.shape):
            wanted = "None" if table_bias is None else f"[{ids.shape[0]}]"
            raise ValueError(f"{self._op}: bias must be {wanted}, got {describe(bias)}")
        self._check_range("ids", ids, ids >= 0)
        for name, values in (("rows", rows), ("bias", bias)):
            if values is not None and not bool(values.isfinite().all()):
                raise ValueError(f"{self._op}: {name} must be finite, got nan or inf")
        if self._source is not None or ids.numel() == 0:
            return
        last = _last_of_equal(ids)
        table[ids[last]] = rows.detach()[last].to(table)
        if bias is not None and table_bias is not None:
            table_bias[ids[last]] = bias.detach()[last].to(table_bias)

    @torch.no_grad()
    def rebuild(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Take over the whole class table [C, d] (and bias [C]); with `copy=False` there is nothing to do."""
        self._check_table(weight, bias)
        check_dense(self._op, "weight", weight)
        table, table_bias = self._table()
        if weight.shape != table.shape:
            raise ValueError(f"{self._op}: weight must be {list(table.shape)}, got {describe(weight)}")
        if bias is not None and table_bias is None:
            raise ValueError(f"{self._op}: bias must be None, got {describe(bias)}")
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

    def _logits(self, h: Tensor) -> Iterator[tuple[int, Tensor]]:
        """(first class, logits [n, B, k]) for n blocks of k = 256 classes at a time; the last block is shorter."""
        weight, bias = self._table()
        whole = self.num_classes // BLOCK
        chunk = self.chunk_size or chunking.chunk_bytes(h.device, "draw") // 4 // max(1, h.shape[0])
        step = max(1, chunk // BLOCK)
        ranges = [(first, min(first + step, whole), BLOCK) for first in range(0, whole, step)]
        if whole * BLOCK < self.num_classes:
            ranges.append((whole, whole + 1, self.num_classes - whole * BLOCK))
        for first, end, size in ranges:
            classes = slice(first * BLOCK, (end - 1) * BLOCK + size)
            table = weight[classes].to(h.dtype).reshape(end - first, size, self.dim)
            s = torch.bmm(h.expand(end - first, -1, -1), table.transpose(1, 2))
            yield first * BLOCK, self._scaled(s, None if bias is None else bias[classes].reshape(-1, 1, size))

    def _scaled(self, s: Tensor, bias: Tensor | None) -> Tensor:
        if bias is not None:
            s += bias.to(s.dtype)
        if self.scale != 1.0:
            s *= self.scale
        return s

    def _block_mass(self, h: Tensor) -> Tensor:
        """Log of the weight of each block of classes, [B, ceil(C / 256)] float64."""
        blocks = -(-self.num_classes // BLOCK)
        mass = torch.empty((blocks, h.shape[0]), dtype=torch.float64, device=h.device)
        for begin, s in self._logits(h):
            first = begin // BLOCK
            mass[first : first + s.shape[0]] = self._mass_(s)
        return mass.t().contiguous()

    def _pairs(self, h: Tensor, keys: Tensor, excluded: _Excluded) -> Tensor:
        """Log-weights [n, 256] of blocks for (block, row) = divmod(keys [n], B), keys ascending without duplicates.

        -inf for an excluded class, and beyond the last one.
        """
        weight, bias = self._table()
        batch, whole = h.shape[0], self.num_classes // BLOCK
        block, row = keys // batch, keys % batch
        s = torch.full((keys.shape[0], 1, BLOCK), -torch.inf, dtype=h.dtype, device=h.device)
        complete = int((block < whole).sum())
        if complete:
            at = block[:complete]
            table = weight[: whole * BLOCK].reshape(whole, BLOCK, self.dim)[at].to(h.dtype)
            part = torch.bmm(h[row[:complete], None], table.transpose(1, 2))
            own = None if bias is None else bias[: whole * BLOCK].reshape(whole, 1, BLOCK)[at]
            s[:complete] = self._log_weight(self._scaled(part, own))
        if complete < keys.shape[0]:
            rest = self.num_classes - whole * BLOCK
            part = h[row[complete:], None] @ weight[whole * BLOCK :].to(h.dtype).t()
            s[complete:, :, :rest] = self._log_weight(self._scaled(part, None if bias is None else bias[-rest:]))
        s = s.squeeze(1)
        if excluded.ids.numel():
            at = torch.searchsorted(keys, excluded.keys).clamp_(max=keys.shape[0] - 1)
            here = keys[at] == excluded.keys
            s[at[here], excluded.ids[here] % BLOCK] = -torch.inf
        return s

    def _left(self, h: Tensor, mass: Tensor, excluded: _Excluded) -> Tensor:
        """Masses of the blocks without the excluded classes: summed anew over what is left, never a difference."""
        if excluded.ids.numel():
            keys = excluded.keys.unique_consecutive()
            for part in keys.split(self._pairs_at_a_time()):
                values = self._pairs(h, part, excluded).double().logsumexp(1)
                mass[part % h.shape[0], part // h.shape[0]] = values
        return mass

    def _invert(self, h: Tensor, mass: Tensor, uniforms: Tensor, excluded: _Excluded) -> Tensor:
        """The ids [B, m] of uniforms [B, m, 2] under block masses [B, n]."""
        batch, count, _ = uniforms.shape
        block = _locate(_running(mass), uniforms[..., 0].contiguous())
        keys, order = (block * batch + torch.arange(batch, device=h.device)[:, None]).flatten().sort(stable=True)
        second = uniforms[..., 1].flatten()[order, None]
        column = torch.empty_like(keys)
        for begin in range(0, keys.shape[0], self._pairs_at_a_time()):
            some = slice(begin, begin + self._pairs_at_a_time())
            distinct, which = keys[some].unique_consecutive(return_inverse=True)
            running = _running(self._pairs(h, distinct, excluded).double())
            column[some] = _locate(running[which], second[some]).squeeze(1)
        found = torch.empty_like(keys)
        found[order] = keys // batch * BLOCK + column
        return found.view(batch, count).clamp_(max=self.num_classes - 1)  # nan may point beyond the last class

    def _log_q(self, h: Tensor, ids: Tensor, lse: Tensor, excluded: _Excluded) -> Tensor:
        """log q [B, n] float32 of ids. Where nothing is left, the first excluded id has probability one."""
        weight, bias = self._table()
        out = torch.empty(ids.shape, dtype=torch.float64, device=h.device)
        step = max(1, chunking.chunk_bytes(h.device, "rows") // 4 // max(1, self.dim * h.shape[0]))
        for begin in range(0, ids.shape[1], step):
            some = ids[:, begin : begin + step]
            s = torch.bmm(weight[some].double(), h.double().unsqueeze(2)).squeeze(2)
            out[:, begin : begin + step] = self._log_weight(self._scaled(s, None if bias is None else bias[some]))
        out = (out - lse[:, None]).clamp_(max=0)
        if excluded.ids.numel():
            out[excluded.holds(ids)] = -torch.inf
            alone = lse == -torch.inf
            out[alone] = torch.where(ids[alone] == excluded.first()[alone, None], 0.0, -torch.inf).double()
        return out.float()

    def _log_left(self, h: Tensor | None, exclude: Exclude, context: Tensor | None, batch: int) -> Tensor:
        flat = self._check_h(h, batch)
        excluded = self._excluded(exclude, flat)
        out = torch.empty(batch, dtype=torch.float64, device=flat.device)
        with torch.no_grad(), torch.autocast(flat.device.type, enabled=False):
            for rows in _row_blocks(batch):
                mass = self._block_mass(flat[rows])
                everything = mass.logsumexp(1)
                out[rows] = self._left(flat[rows], mass, excluded.of(rows)).logsumexp(1) - everything
        return out

    def _checked_lse(self, mass: Tensor, h: Tensor, first: int) -> Tensor:
        """log of the mass of each row, [B]; ValueError where it is not finite although h and the table are."""
        lse = mass.logsumexp(1)
        bad = ~lse.isfinite() & (lse != -torch.inf)  # -inf: nothing is left of the row
        if bool(bad.any()):
            overflow = (bad & h.isfinite().all(1)).nonzero()
            weight, bias = self._table()
            if overflow.numel() and bool(weight.isfinite().all()) and (bias is None or bool(bias.isfinite().all())):
                raise ValueError(
                    f"{self._op}: logits must be finite, got inf or nan in row {int(overflow[0]) + first} from finite "
                    "h and weight. Scale them down, or use float64"
                )
        return lse

    def _pairs_at_a_time(self) -> int:
        return max(1, chunking.chunk_bytes(self._table()[0].device, "rows") // 4 // (BLOCK * max(1, self.dim)))

    # -------------------------------------------------------------------------------------------- checks
    def _check_table(self, weight: Tensor, bias: Tensor | None) -> None:
        if not isinstance(weight, Tensor) or weight.dim() != 2 or not weight.is_floating_point():
            raise ValueError(f"{self._op}: weight must be [C, d] floating point, got {describe(weight)}")
        if weight.shape[0] < 1:
            raise ValueError(f"{self._op}: weight must have at least one class, got {describe(weight)}")
        if bias is not None and (
            not isinstance(bias, Tensor) or bias.shape != weight.shape[:1] or not bias.is_floating_point()
        ):
            raise ValueError(f"{self._op}: bias must be [{weight.shape[0]}] floating point, got {describe(bias)}")

    def _check_h(self, h: Tensor | None, batch_size: int | None) -> Tensor:
        """h as [B, d], in float32 or, where h or the table is, float64."""
        weight, _ = self._table()
        if h is None or not isinstance(h, Tensor) or h.dim() < 1 or h.shape[-1] != self.dim:
            raise ValueError(f"{self._op}: h must be [*, {self.dim}], got {describe(h)}")
        if not h.is_floating_point():
            raise TypeError(f"{self._op}: h must be floating point, got {describe(h)}")
        if h.device != weight.device:
            raise ValueError(f"{self._op}: h must be on {weight.device}, where the class table is, got {h.device}")
        self._check_batch(h, batch_size, None)
        wide = torch.promote_types(torch.promote_types(h.dtype, weight.dtype), torch.float32)
        return h.detach().reshape(-1, self.dim).to(wide)

    def _check_range(self, name: str, ids: Tensor, fine: Tensor) -> None:
        wrong = ~(fine & (ids < self.num_classes))
        if bool(wrong.any()):
            also = "" if name == "ids" else "-1 or "
            raise IndexError(
                f"{self._op}: {name} must be {also}in [0, {self.num_classes}), got {int(ids[wrong].flatten()[0])}"
            )

    def _stored_error(self, found: dict[str, Any]) -> str | None:
        for name, value in found.items():
            own = self.get_buffer(name)
            wanted = str(list(own.shape))
            if wrong := shape_error(name, value, tuple(own.shape), own.dtype, wanted) or finite_error(name, value):
                return wrong
        return None

    def _excluded(self, exclude: Exclude | None, h: Tensor) -> _Excluded:
        exclude = self._check_exclude(exclude, h.device, h.shape[0])
        rows, ids = _flat_exclude(self._op, exclude, h.shape[0], h.device)
        self._check_range("exclude", ids, ids >= -1)
        return _Excluded(rows[ids >= 0], ids[ids >= 0], h.shape[0])


class Softmax(ExactSampler):
    """q(k) = softmax of the model's own logits, exactly: the law with which sampled softmax has no bias at all.

    With the sampler's `scale` and `absolute` equal to those of the loss, every single sample has the normaliser of the
    full softmax, whatever `num_samples` is (Blanc & Rendle 2018, Theorem 1). It costs O(C d) a row, so it is the
    yardstick for the other samplers, not a way to train on many classes.

    Args:
        weight: [C, d] class table, float32, float64, bfloat16 or float16.
        bias: [C].
        scale: inverse temperature; the logit is `scale * (h @ w + b)`.
        absolute: the logit is its absolute value, for the absolute softmax.
        copy: keep a copy of the table, which `update` and `rebuild` change. False: read the given tensors themselves,
            so that the law follows a model in training; they are then not part of `state_dict()`.
        chunk_size: classes per chunk, rounded to blocks of 256; by default chosen from B so that a chunk of logits
            stays in the cache.

    Example:
        >>> import torch, samplex_cuda as sx
        >>> weight, h = torch.randn(1000, 8), torch.randn(2, 8)
        >>> sampler = sx.samplers.Softmax(weight)
        >>> draw = sampler.sample(h, 5, exclude=torch.tensor([3, 7]), key=sx.Key(0))
        >>> draw.ids.shape
        torch.Size([2, 5])
        >>> torch.allclose(sampler.log_prob_all(h), (h @ weight.T).log_softmax(1), atol=1e-5)
        True

        The law of a head that is being trained:

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

    def _mass_(self, s: Tensor) -> Tensor:
        if self.absolute:
            s.abs_()
        # Of each block: a shift that depended on the chunk would let the chunk size into the bits.
        top = s.amax(2, keepdim=True).clamp_(min=torch.finfo(s.dtype).min)
        total = s.sub_(top).exp_().sum(2)
        return top.squeeze(2).double() + total.double().log()

    def _log_weight(self, s: Tensor) -> Tensor:
        return s.abs() if self.absolute else s

    def extra_repr(self) -> str:
        """Sizes and options."""
        return super().extra_repr() + (", absolute=True" if self.absolute else "")


class Quartic(ExactSampler):
    """q(k) proportional to alpha * s^4 + 1, the quartic kernel of Blanc & Rendle (2018), exactly and in O(C d) a row.

    The law is symmetric in the sign of the logit, so the loss it serves is the absolute softmax (`absolute=True`).

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
        if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0.0 <= alpha < float("inf"):
            raise ValueError(f"quartic: alpha must be a finite number of at least 0, got {alpha!r}")
        self.alpha = float(alpha)

    def _mass_(self, s: Tensor) -> Tensor:
        most = torch.finfo(s.dtype).max / (2.0 * s.shape[2] * max(self.alpha, 1.0))
        if s.numel() and float(torch.linalg.vector_norm(s, math.inf)) > most**0.25:  # the fourth power would overflow
            return self._log_weight(s).double().logsumexp(2)
        return s.square_().square_().mul_(self.alpha).add_(1).sum(2).double().log()

    def _log_weight(self, s: Tensor) -> Tensor:
        value = s.square().square_().mul_(self.alpha).log1p_()
        if self.alpha > 0.0 and bool(value.isinf().any()):
            value = torch.where(value.isinf(), 4.0 * s.abs().log() + math.log(self.alpha), value)
        return value

    def extra_repr(self) -> str:
        """Sizes and options."""
        return super().extra_repr() + f", alpha={self.alpha:g}"


# ---------------------------------------------------------------------------------------------------- helpers
class _Excluded:
    """Excluded (row, id) pairs, sorted by block of classes, row and id."""

    def __init__(self, rows: Tensor, ids: Tensor, batch: int) -> None:
        order = (ids * max(1, batch) + rows).argsort()
        rows, ids = rows[order], ids[order]
        order = (ids // BLOCK * max(1, batch) + rows).argsort(stable=True)
        self.rows, self.ids, self.batch = rows[order], ids[order], batch
        self.keys = self.ids // BLOCK * max(1, batch) + self.rows  # ascending; divmod gives (block, row)

    def of(self, rows: slice) -> _Excluded:
        """Those of some rows, counted from the first of them."""
        if rows.start == 0 and rows.stop == self.batch:
            return self
        here = (self.rows >= rows.start) & (self.rows < rows.stop)
        return _Excluded(self.rows[here] - rows.start, self.ids[here], rows.stop - rows.start)

    def holds(self, ids: Tensor) -> Tensor:
        """Which of ids [B, n] are excluded in their row."""
        known = (self.ids * self.batch + self.rows).sort().values
        asked = ids * self.batch + torch.arange(self.batch, device=ids.device)[:, None]
        return known[torch.searchsorted(known, asked).clamp_(max=known.shape[0] - 1)] == asked

    def first(self) -> Tensor:
        """The smallest excluded id of each row, [B]."""
        largest = torch.iinfo(torch.int64).max
        out = torch.full((self.batch,), largest, dtype=torch.int64, device=self.ids.device)
        return out.scatter_reduce_(0, self.rows, self.ids, "amin")


def _flat_exclude(op: str, exclude: Exclude | None, batch: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(rows [n], ids [n]) of any form of `exclude`."""
    if exclude is None:
        none = torch.empty(0, dtype=torch.int64, device=device)
        return none, none
    if isinstance(exclude, Tensor):
        width = 1 if exclude.dim() == 1 else exclude.shape[1]
        return torch.arange(batch, device=device).repeat_interleave(width), exclude.reshape(-1)
    offsets, ids = exclude
    counts = offsets.diff()
    if int(offsets[0]) != 0 or int(offsets[-1]) != ids.shape[0] or bool((counts < 0).any()):
        raise ValueError(
            f"{op}: exclude_offsets must go from 0 to {ids.shape[0]} and not fall, got {int(offsets[0])} to "
            f"{int(offsets[-1])}"
        )
    return torch.arange(batch, device=device).repeat_interleave(counts), ids


def _row_blocks(batch: int) -> Iterator[slice]:
    for begin in range(0, batch, _BATCH_ROWS):
        yield slice(begin, min(begin + _BATCH_ROWS, batch))


def _running(log_mass: Tensor) -> Tensor:
    """Running sums of the masses of each row of log_mass [n, k], relative to the largest."""
    top = log_mass.amax(1, keepdim=True).clamp_(min=torch.finfo(log_mass.dtype).min)
    return (log_mass - top).exp_().cumsum_(1)


def _locate(running: Tensor, uniforms: Tensor) -> Tensor:
    """For each uniform [n, m] an index into its row of running sums [n, k], by inversion; never one of mass zero."""
    total = running[:, -1:]
    # Below the total also where the product rounds up to it: the first sum above the point then exists.
    point = torch.minimum(uniforms * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(running, point, right=True).clamp_(max=running.shape[1] - 1)


def _last_of_equal(ids: Tensor) -> Tensor:
    """Positions that keep of equal ids the last: assignment by index leaves their order open."""
    order = ids.argsort(stable=True)
    ordered = ids[order]
    last = torch.ones_like(ordered, dtype=torch.bool)
    last[:-1] = ordered[1:] != ordered[:-1]
    return order[last]
