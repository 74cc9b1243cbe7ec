"""`MIDX`: draws close to the softmax from an inverted multi-index over the class rows (Chen et al. 2021)."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor

from samplex_cuda import _device, chunking
from samplex_cuda._checks import call, check_choice, check_dense, check_int, check_number, describe
from samplex_cuda.draw import Draw
from samplex_cuda.ops import midx_sample as ops
from samplex_cuda.products import product
from samplex_cuda.rng import Key, fold_in, key_tensor, uniform_at
from samplex_cuda.samplers.base import Exclude, Sampler, _no_law, check_int64, distinct_ids, restore_dtypes
from samplex_cuda.samplers.kmeans import ROWS_PER_CODE, assign, kmeans
from samplex_cuda.samplers.stored import finite_error, shape_error
from samplex_cuda.samplers.table_rows import check_changes, check_table, last_of_equal, replace_rows, taken_rows

__all__ = ["MIDX"]

_KINDS = ("residual", "product")
_WINDOW = 40.0  # scores of a codebook more than this below its best count as this: products stay in float32
_LIGHTEST = 30.0  # the same for log omega of the classes
_REFRESH_STEPS = 2  # iterations of a refresh, which begins with the old codes
REFRESH_AFTER = 4  # `follow` makes new codes once so many rows per class have been touched
# Time of one core pair, or of a GPU: ns per class of a sort, operations per ns, ns of a call, visits to a touched row.
_CPU_COST, _GPU_COST = (10.0, 120.0, 1e5, 1.25), (1.0, 2e4, 2e5, 3.0)
_FOLLOW_SHARE = 0.125  # of a step that following may take
_MOST_STEPS = 4096
_ROWS_AT_ONCE = 1 << 16  # of the class table that are copied to be re-assigned


class MIDX(Sampler):
    """q(y | h) close to softmax(scale * (h . w_y + b_y)): class rows are replaced by sums of two codes each.

    Two codebooks of K codes are fitted to the class rows by k-means, and every class row w_y is near c1[k1] + c2[k2].
    With s1 = scale * c1 h, s2 = scale * c2 h and omega_y = counts_y * exp(scale * bias_y),

        q(y | h) = (1 - epsilon) exp(s1[k1] + s2[k2]) omega_y / Z + epsilon / C,

    where Z sums over the K x K cells, not over the classes: O(K d + K^2) per query and O(K) per draw for any C.
    log_q is exact for the codes as they are. Codes that lag behind the class table cost variance, never a bias:
    `update` re-assigns rows to the codes there are, `refresh` makes new codes. A head does both by itself.

    Args:
        weight: [C, d] class rows, floating point. Not copied.
        num_codes: K, at most 2048; at most C are made.
        kind: "residual": the second codebook is fitted to what the first leaves; "product": each codebook has half of
            the columns.
        scale: that of the head.
        bias: [C], that of the head.
        counts: [C], a factor of the probability of each class, such as its frequency; 0: only by `epsilon`.
        epsilon: share of the uniform distribution: bounds exp(logit) / q.
        key: which rows k-means begins with; None: torch's default generator.

    Example:
        >>> import torch, samplex_cuda as sx
        >>> weight, h = torch.randn(1000, 16), torch.randn(4, 16)
        >>> sampler = sx.samplers.MIDX(weight, num_codes=32, key=sx.Key(0))
        >>> draw = sampler.sample(h, 8, exclude=torch.arange(4))
        >>> draw.ids.shape, bool((draw.ids == torch.arange(4)[:, None]).any())
        (torch.Size([4, 8]), False)
        >>> torch.allclose(sampler.log_prob_all(h).exp().sum(1), torch.ones(4), atol=1e-5)
        True
    """

    _op = "midx"
    follows_rows = True
    stratifies = True
    codes: Tensor
    cell: Tensor
    pair: Tensor
    age: Tensor
    omega: Tensor
    place: Tensor
    members: Tensor
    starts: Tensor
    bias: Tensor | None
    counts: Tensor | None
    prefix: Tensor | None

    def __init__(
        self,
        weight: Tensor,
        num_codes: int = 256,
        *,
        kind: str = "residual",
        scale: float = 1.0,
        bias: Tensor | None = None,
        counts: Tensor | None = None,
        epsilon: float = 0.01,
        key: Key | Tensor | None = None,
    ) -> None:
        super().__init__()
        check_table(self._op, weight, bias)
        self.num_classes, self.dim = weight.shape
        if not 1 <= self.num_classes < 1 << 31 or self.dim < 1:
            raise ValueError(f"midx: weight must be [C, d] with C in [1, 2^31) and d >= 1, got {describe(weight)}")
        check_int(self._op, "num_codes", num_codes, 1, ops.MAX_CODES)
        check_choice(self._op, "kind", kind, _KINDS)
        if kind == "product" and self.dim < 2:
            raise ValueError(f"midx: weight must have at least 2 columns with kind='product', got {describe(weight)}")
        check_number(self._op, "scale", scale, -math.inf)
        check_number(self._op, "epsilon", epsilon, 0.0, 1.0, open_high=True)
        self._most_codes, self.num_codes = num_codes, min(num_codes, self.num_classes)
        self.kind, self.scale, self.epsilon = kind, float(scale), float(epsilon)
        self.has_bias = bias is not None
        check_dense(self._op, "weight", weight)
        if counts is not None:  # numbers are not lost on the meta device
            counts = self._check_counts(counts, torch.device("cpu") if weight.is_meta else weight.device)
        place = key.device if isinstance(key, Tensor) else torch.device("cpu")
        pair = key_tensor(self._op, key, place).clone()
        self._make_tables(weight.device, counts, pair if weight.is_meta else pair.to(weight.device))
        if bias is not None and self.bias is not None:
            self.bias.copy_(bias.detach())
        if not weight.is_meta:
            self.rebuild(weight, bias)

    def _make_tables(self, device: torch.device, counts: Tensor | None, pair: Tensor) -> None:
        self._table: tuple[Tensor, Tensor | None] | None = None  # for `refresh`
        self._age = 0
        size, classes = self.num_codes, self.num_classes
        self.register_buffer("codes", torch.zeros(2, size, self.dim, device=device))
        self.register_buffer("cell", torch.zeros(classes, dtype=torch.int32, device=device))
        self.register_buffer("bias", torch.zeros(classes, device=device) if self.has_bias else None)
        self.register_buffer("counts", counts)
        self.register_buffer("pair", pair)
        self.register_buffer("age", torch.zeros(1, dtype=torch.int64, device=device))
        # Made from the others.
        self.register_buffer("omega", torch.zeros(size, size, device=device), persistent=False)
        for name, count in (("place", classes), ("members", classes), ("starts", size * size + 1)):
            self.register_buffer(name, torch.zeros(count, dtype=torch.int32, device=device), persistent=False)
        weighted = self.has_bias or counts is not None
        prefix = torch.zeros(classes + 1, dtype=torch.int64, device=device) if weighted else None
        self.register_buffer("prefix", prefix, persistent=False)

    # -------------------------------------------------------------------------------------------- draws
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
        stratified: bool = False,
    ) -> Draw:
        """Draw `num_samples` classes for each query h [*, d]; see `Sampler.sample`.

        `exclude` is exact: the distribution conditioned on the other classes. `shared` draws come from the mean of the
        rows' distributions, by one product over the cells. With `stratified` one shared draw comes from each of m equal
        parts of that mean, in the order of the cells: they are not independent and vary less.
        """
        count = self._check_count(num_samples)
        self._check_stratified(stratified, shared)
        flat = self._check_h(h, batch_size)
        if shared:
            self._check_shared(exclude)
            pair = key_tensor(self._op, key, flat.device)
            if flat.shape[0] == 0 or count == 0:
                return Draw(*_no_law(count, flat.device), not stratified)
            ids, log_q = call(ops.midx_sample, pair, count, *self._mean_law(flat), stratified)
            return Draw(ids[0], log_q[0], not stratified)
        lists = self._excluded(exclude, flat)
        pair = key_tensor(self._op, key, flat.device)
        return Draw(*call(ops.midx_sample, pair, count, *self._law(flat), False, *lists))

    @torch.no_grad()
    def log_prob(
        self, h: Tensor | None, ids: Tensor, *, exclude: Exclude | None = None, context: Tensor | None = None
    ) -> Tensor:
        """Log-probability of given ids, the same numbers as the log_q of a draw; see `Sampler.log_prob`."""
        check_int64(self._op, "ids", ids)
        flat = self._check_h(h, None)
        wanted, single = self._wanted(ids, flat.shape[0])
        out = call(ops.midx_log_prob, wanted, *self._law(flat), *self._excluded(exclude, flat))
        return out.squeeze(1) if single else out

    @torch.no_grad()
    def log_prob_shared(self, h: Tensor | None, ids: Tensor, *, context: Tensor | None = None) -> Tensor:
        """Log-probability of given ids of any shape under the distribution of shared draws."""
        check_int64(self._op, "ids", ids)
        flat = self._check_h(h, None)
        if flat.shape[0] == 0:
            return torch.full(ids.shape, torch.nan, device=ids.device)
        wanted = ids.reshape(1, -1).contiguous()
        return call(ops.midx_log_prob, wanted, *self._mean_law(flat)).reshape(ids.shape)

    @torch.no_grad()
    def log_prob_all(self, h: Tensor | None = None) -> Tensor:
        """Log-probability of every class, [B, C] float32."""
        flat = self._check_h(h, None)
        ids = torch.arange(self.num_classes, device=flat.device).expand(flat.shape[0], -1).contiguous()
        return call(ops.midx_log_prob, ids, *self._law(flat))

    def _weights(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """a and b of each row, [B, 2, K], and the masses of the first codes [B, K], float32."""
        size = self.num_codes
        made = torch.empty(flat.shape[0], 2 * size, device=flat.device)
        weights = product(flat, self.codes.view(2 * size, self.dim).t(), made).view(-1, 2, size)
        if self.scale != 1.0:
            weights.mul_(self.scale)
        weights.sub_(weights.amax(2, keepdim=True)).clamp_min_(-_WINDOW).exp_()
        return weights, self._mass(weights[:, 1])

    def _mass(self, b: Tensor) -> Tensor:
        if b.is_cuda and torch.get_float32_matmul_precision() != "highest":
            # Draws would follow products of 10 binary digits, and log_q would not.
            return torch.mm(b.double(), self.omega.t().double()).float()
        return product(b, self.omega.t(), torch.empty(b.shape, device=b.device))

    def _law(self, flat: Tensor) -> tuple[Any, ...]:
        """What the ops take, for the distribution of each row."""
        weights, mass = self._weights(flat)
        return weights, mass, self.omega, *self._tables()

    def _tables(self) -> tuple[Any, ...]:
        return self.cell, self.place, self.members, self.starts, self.prefix, self.epsilon

    def _mean_law(self, flat: Tensor) -> tuple[Any, ...]:
        """What the ops take, for the mean of the rows' distributions: a row of ones and other weights of the cells."""
        weights, mass = self._weights(flat)
        there = flat.isfinite().all(1)
        number = there.sum()
        total = (weights[:, 0].double() * mass.double()).sum(1) * number
        weights = torch.where(there[:, None, None], weights, 0.0)
        first = weights[:, 0] * torch.where(there, 1.0 / total, 0.0).float()[:, None]
        cells = product(first.t(), weights[:, 1], torch.empty_like(self.omega)).mul_(self.omega)
        ones = torch.ones(1, 2, self.num_codes, device=flat.device)
        mass = cells.sum(1, keepdim=True).t() * (number / number)  # nan without a row that has a distribution
        return ones, mass.contiguous(), cells, *self._tables()

    # -------------------------------------------------------------------------------------------- changes
    @torch.no_grad()
    def update(self, ids: Tensor, rows: Tensor, bias: Tensor | None = None) -> None:
        """Re-assign these rows of the class table to the codes there are: O(n K d) plus a sort of the C cells.

        On a GPU the host does not wait: an id that is not a class, or a row that is not finite, keeps its cell there.

        Args:
            ids: int64 [n]; of equal ids the last counts.
            rows: [n, d], their new rows.
            bias: [n], their new biases, where the sampler has a bias; None leaves them.

        Example:
            >>> import torch, samplex_cuda as sx
            >>> weight = torch.randn(1000, 16)
            >>> sampler = sx.samplers.MIDX(weight, num_codes=32)
            >>> sampler.update(torch.tensor([3, 700]), weight[:2])
            >>> bool(sampler.cell[3] == sampler.cell[0])
            True
        """
        check_int64(self._op, "ids", ids)
        check_changes(self._op, ids, rows, bias, self.dim, self.bias is not None)
        for name, t in (("ids", ids), ("rows", rows)):
            if t.device != self.cell.device:
                raise ValueError(f"midx: {name} must be on {self.cell.device}, where the index is, got {t.device}")
        if ids.shape[0] == 0:
            return
        if _device.host_waits(self.cell):
            fine = rows.isfinite().all(1)
            some = ids.clamp(0, self.num_classes - 1)
            changes = [(self.cell, torch.where(fine, self._cells_of(rows), self.cell[some]))]
            if bias is not None and self.bias is not None:
                fine = bias.isfinite()
                changes.append((self.bias, torch.where(fine, bias.float(), self.bias[some])))
            replace_rows(ids, changes)
        else:
            low, high = int(ids.min()), int(ids.max())
            if low < 0 or high >= self.num_classes:
                bad = low if low < 0 else high
                raise IndexError(f"midx: ids must be in [0, {self.num_classes}), got {bad}")
            self._check_finite("rows", rows, bias)
            last = last_of_equal(ids)
            self.cell[ids[last]] = self._cells_of(rows[last])
            if bias is not None and self.bias is not None:
                self.bias[ids[last]] = bias.detach()[last].float()
        self._grow_older(ids.shape[0])
        self._order()

    @torch.no_grad()
    def follow(self, ids: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
        """These rows of the class table may have changed; see `Sampler.follow`.

        Re-assigns them; once each class has been touched 4 times on average since the last time, makes new codes.
        """
        # On a CPU distinct ids count: a checkpoint holds these alone, and a resumed run must refresh at the same step.
        waits = _device.host_waits(self.cell)
        some = ids.reshape(-1) if waits else distinct_ids(ids, self.num_classes)
        if self.wants_refresh(some.numel()):
            self.refresh(weight, bias)
            return
        if waits:
            safe = some.clamp(0, self.num_classes - 1)
            self.update(some, weight[safe], None if bias is None or self.bias is None else bias[safe])
        else:
            self._assign_again(some, weight, bias)

    def _assign_again(self, ids: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        """`update` of distinct classes by their rows of the whole table, which are not all copied. The CPU's way."""
        self._check_table(weight, bias)
        if ids.shape[0] == 0:
            return
        cells = torch.empty(ids.shape[0], dtype=torch.int32)
        for part in (slice(at, at + _ROWS_AT_ONCE) for at in range(0, ids.shape[0], _ROWS_AT_ONCE)):
            own = weight.detach()[ids[part]]
            self._check_finite("rows", own, None if bias is None else bias[ids[part]])
            cells[part] = self._cells_of(own)
        self.cell[ids] = cells
        if bias is not None and self.bias is not None:
            self.bias[ids] = bias.detach()[ids].float()
        self._grow_older(ids.shape[0])
        self._order()

    @torch.no_grad()
    def rebuild(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Fit new codes to the whole class table [C, d] (and take over bias [C]), from scratch.

        Example:
            >>> import torch, samplex_cuda as sx
            >>> sampler = sx.samplers.MIDX(torch.zeros(100, 8), num_codes=16)
            >>> sampler.rebuild(torch.randn(100, 8))
        """
        self._fit(weight, bias, None)

    @torch.no_grad()
    def refresh(self, weight: Tensor | None = None, bias: Tensor | None = None) -> None:
        """Bring codes and cells up to date with the class table, beginning with the codes there are.

        Two iterations of k-means over at most 256 K rows, then all classes are assigned: O(C K d). A head does this by
        itself (`sampler_update`), as often as it costs an eighth of a step on average.

        Args:
            weight: [C, d]; None: the table this sampler was last given, as it is now.
            bias: [C], where the sampler has a bias; None with weight None: that of the same time.

        Example:
            >>> import torch, samplex_cuda as sx
            >>> weight = torch.randn(100, 8)
            >>> sampler = sx.samplers.MIDX(weight, num_codes=16)
            >>> _ = weight.mul_(2.0)
            >>> sampler.refresh()
        """
        if weight is None:
            if self._table is None:
                raise ValueError("midx: weight must be given after the sampler was copied, moved or loaded, got None")
            weight, own = self._table
            bias = own if bias is None else bias
        self._fit(weight, bias, self.codes.clone())

    def wants_refresh(self, rows: int) -> bool:
        """Whether so many rows more are enough for new codes."""
        return self._age + rows >= REFRESH_AFTER * self.num_classes and not _device.captured(self.cell.device)

    def forget_table(self) -> None:
        """`refresh` must be given the class table from now on."""
        self._table = None

    def _taken(self, place: Tensor) -> MIDX:
        made = copy.copy(self)
        made._buffers, made._table = dict(self._buffers), None
        made.num_classes, classes, device = place.shape[0], place.shape[0], place.device
        made.num_codes = size = min(self._most_codes, classes)
        kept = min(size, self.num_codes)
        made.codes = self.codes.new_zeros(2, size, self.dim)
        made.codes[:, :kept] = self.codes[:, :kept]
        # A new class, or one whose code is gone, has the nearest codes to a row of zeros: any cell is right for log_q.
        first, second = (
            taken_rows(code, place, -1) for code in (self.cell // self.num_codes, self.cell % self.num_codes)
        )
        nearest = made._cells_of(torch.zeros(1, self.dim, device=device))
        known = (first >= 0) & (first < kept) & (second < kept)
        made.cell = torch.where(known, first * size + second, nearest).to(torch.int32)
        if self.bias is not None:
            made.bias = taken_rows(self.bias, place)
        if self.counts is not None:
            made.counts = taken_rows(self.counts, place, float(self.counts[self.counts > 0].min()))
        made.pair, made.age = self.pair.clone(), self.age.clone()
        made.omega = torch.zeros(size, size, device=device)
        for name, count in (("place", classes), ("members", classes), ("starts", size * size + 1)):
            setattr(made, name, torch.zeros(count, dtype=torch.int32, device=device))
        if self.prefix is not None:
            made.prefix = torch.zeros(classes + 1, dtype=torch.int64, device=device)
        made._order()
        return made

    def _fit(self, weight: Tensor, bias: Tensor | None, start: Tensor | None) -> None:
        self._check_table(weight, bias)
        if weight.shape != (self.num_classes, self.dim):
            raise ValueError(f"midx: weight must be [{self.num_classes}, {self.dim}], got {describe(weight)}")
        if weight.device != self.cell.device:
            raise ValueError(f"midx: weight must be on {self.cell.device}, where the index is, got {weight.device}")
        weight, bias = weight.detach(), None if bias is None else bias.detach()
        if not _device.host_waits(weight):
            self._check_finite("weight", weight, bias)
        fresh = self._codes_of(_some_rows(weight, ROWS_PER_CODE * self.num_codes, self.pair), start)
        fine = fresh.isfinite().all()  # not on the CPU, which has looked before
        self.codes.copy_(torch.where(fine, fresh, self.codes))
        self.cell.copy_(self._cells_of(weight))
        if bias is not None and self.bias is not None:
            self.bias.copy_(torch.where(bias.isfinite(), bias.float(), self.bias))
        self._table = weight, bias
        self._age = 0
        self.age.zero_()
        self._order()

    def _codes_of(self, rows: Tensor, start: Tensor | None) -> Tensor:
        """Codebooks [2, K, d] of some class rows [n, d], from scratch or from the codes `start`."""
        steps = {} if start is None else {"iterations": _REFRESH_STEPS}
        half = self.dim // 2
        fresh = torch.zeros_like(self.codes)
        for number in range(2):
            pair = fold_in(self.pair, number)
            if self.kind == "product":
                part = slice(0, half) if number == 0 else slice(half, None)
                begin = None if start is None else start[number, :, part]
                fresh[number, :, part] = kmeans(rows[:, part], self.num_codes, pair, start=begin, **steps)
            else:
                begin = None if start is None else start[number]
                fresh[number] = kmeans(rows, self.num_codes, pair, start=begin, **steps)
                rows = rows - fresh[number][assign(rows, fresh[number])]
        return fresh

    def _grow_older(self, rows: int) -> None:
        if rows:
            self._age += rows
            self.age.add_(rows)  # on the device: a replay of a CUDA graph counts too

    def _cells_of(self, rows: Tensor) -> Tensor:
        """Cells [n] int32 of class rows [n, d], by the codes as they are."""
        out = torch.empty(rows.shape[0], dtype=torch.int32, device=rows.device)
        some = max(256, chunking.chunk_bytes(rows.device, "features") // 4 // self.num_codes)
        for part in (slice(at, at + some) for at in range(0, rows.shape[0], some)):
            own = rows[part].detach().float()
            first = assign(own, self.codes[0]) if self.kind == "residual" else self._half(own, 0)
            second = (
                assign(own - self.codes[0][first], self.codes[1]) if self.kind == "residual" else self._half(own, 1)
            )
            out[part] = (first * self.num_codes + second).to(torch.int32)
        return out

    @torch.no_grad()
    def approximate(self, cell: Tensor) -> Tensor:
        """The vectors that represent the class rows of these cells: the sum of their two codes.

        Args:
            cell: [n] of any integer dtype, as in `cell`.

        Returns:
            [n, d] float32.

        Example:
            >>> import torch, samplex_cuda as sx
            >>> weight = torch.randn(100, 8)
            >>> sampler = sx.samplers.MIDX(weight, num_codes=100)
            >>> torch.allclose(sampler.approximate(sampler.cell), weight, atol=1e-5)
            True
        """
        place = cell.long()
        return self.codes[0][place // self.num_codes] + self.codes[1][place % self.num_codes]

    def _half(self, rows: Tensor, number: int) -> Tensor:
        part = slice(0, self.dim // 2) if number == 0 else slice(self.dim // 2, None)
        return assign(rows[:, part].contiguous(), self.codes[number, :, part].contiguous())

    def _order(self) -> None:
        """The tables that follow from cells, counts and biases."""
        place, members, starts = ops.midx_tables(self.cell, self.num_codes)
        for own, made in ((self.place, place), (self.members, members), (self.starts, starts)):
            own.copy_(made)
        if self.prefix is None:
            self.omega.copy_(self.starts.diff().view_as(self.omega))
            return
        # Integer units: what is left of a cell without an excluded class is then exact.
        bits = 60 - self.num_classes.bit_length()
        log_weight = torch.zeros(self.num_classes, dtype=torch.float64, device=self.cell.device)
        if self.bias is not None:
            log_weight.add_(self.bias, alpha=self.scale)
        if self.counts is not None:
            log_weight.add_(self.counts.log())
        log_weight.sub_(log_weight.amax())
        units = log_weight.clamp_min(-_LIGHTEST).exp_().mul_(2.0**bits).round_().to(torch.int64).clamp_min_(1)
        if self.counts is not None:
            units = torch.where(self.counts > 0, units, 0)
        torch.cumsum(units[self.members], 0, out=self.prefix[1:])
        sums = self.prefix[self.starts].diff().view_as(self.omega)
        self.omega.copy_(sums.double().mul_(2.0**-bits))

    # -------------------------------------------------------------------------------------------- how often
    def follow_interval(self, batch: int, num_samples: int, shared: bool) -> int:
        """Steps that share one `follow` by default: until it takes about an eighth of the time of a step.

        log_q is that of the codes as they are, so that an index some steps old costs variance, never a bias.
        """
        sort, flops, launch, visits = _GPU_COST if _device.host_waits(self.cell) else _CPU_COST
        touched = batch + num_samples if shared else batch * (num_samples + 1)
        query = 2.0 * batch * self.num_codes * (2 * self.dim + self.num_codes) / flops
        step = 4 * launch + touched * visits * (sort + self.dim / 2) + query
        steps = 1
        while steps < _MOST_STEPS:
            rows = min(self.num_classes, steps * touched)
            cost = launch + sort * self.num_classes + 4.0 * rows * self.num_codes * self.dim / flops
            if cost <= _FOLLOW_SHARE * steps * step:
                break
            steps *= 2
        return steps

    # -------------------------------------------------------------------------------------------- checks
    def _check_table(self, weight: Tensor, bias: Tensor | None) -> None:
        check_table(self._op, weight, bias)
        check_dense(self._op, "weight", weight)
        if bias is not None and not self.has_bias:
            raise ValueError(f"midx: bias must be None, got {describe(bias)}")

    def _check_counts(self, counts: Tensor, device: torch.device) -> Tensor:
        counts = torch.as_tensor(counts, dtype=torch.float64, device=device)
        if counts.shape != (self.num_classes,):
            raise ValueError(f"midx: counts must be [{self.num_classes}], got {describe(counts)}")
        if not counts.is_meta and not (bool((counts >= 0).all()) and 0.0 < float(counts.sum()) < math.inf):
            raise ValueError("midx: counts must be finite, not negative and not all 0")
        return counts.clone()

    def _check_finite(self, name: str, rows: Tensor, bias: Tensor | None) -> None:
        for what, t in ((name, rows), ("bias", bias)):
            if t is not None and not bool(t.isfinite().all()):
                raise ValueError(f"midx: {what} must be finite, got nan or inf")

    def _check_h(self, h: Tensor | None, batch_size: int | None) -> Tensor:
        """h as [B, d] float32."""
        flat = self._queries(h, self.dim, self.cell.device, "the index", batch_size)
        return check_dense(self._op, "h", flat).float()

    # -------------------------------------------------------------------------------------------- module
    def _stored_error(self, found: dict[str, Any]) -> str | None:
        for name, value in found.items():
            own = self.get_buffer(name)
            if wrong := shape_error(name, value, tuple(own.shape), own.dtype, str(list(own.shape))):
                return f"{wrong}; make the sampler with the class table and the options of the saved one"
        for name in ("codes", "bias", "counts"):
            if name in found and (wrong := finite_error(name, found[name])):
                return wrong
        low, high = int(found["cell"].min()), int(found["cell"].max())
        if low < 0 or high >= self.num_codes**2:
            return f"cell must be in [0, {self.num_codes**2}), got {low} … {high}"
        if "counts" in found and not (bool((found["counts"] >= 0).all()) and float(found["counts"].sum()) > 0):
            return "counts must not be negative and not all 0"
        return None

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        if not self.cell.is_meta:
            self._age, self._table = int(self.age), None
            self._order()

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: the class table stays where it is."""
        return {name: None if name == "_table" else value for name, value in self.__dict__.items()}

    def _apply(self, fn: Any, recurse: bool = True) -> MIDX:
        kept = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)
        # `.half()` of a model is not about the sampler: its distribution, and with it log_q, would change.
        restore_dtypes(self, kept)
        if self._table is not None and self._table[0].device != self.cell.device:
            self._table = None
        return self

    def memory(self) -> dict[str, int]:
        """Bytes of each table, and of all.

        Example:
            >>> import torch, samplex_cuda as sx
            >>> sx.samplers.MIDX(torch.randn(1000, 16), num_codes=32).memory()["codes"]
            4096
        """
        parts = {name: t.nbytes for name, t in self.named_buffers(recurse=False)}
        parts["total"] = sum(parts.values())
        return parts

    def extra_repr(self) -> str:
        """Sizes and options."""
        return (
            f"num_classes={self.num_classes}, dim={self.dim}, num_codes={self.num_codes}, kind={self.kind}, "
            f"scale={self.scale:g}, bias={self.has_bias}, counts={self.counts is not None}, epsilon={self.epsilon:g}"
        )


def some_classes(classes: int, most: int, pair: Tensor) -> Tensor | None:
    """The classes whose rows both codebooks are fitted to, ascending: `most` of them by the key; None for all.

    Args:
        classes: C.
        most: how many.
        pair: int64 [2], a reserved key.
    """
    if classes <= most:
        return None
    chosen = uniform_at(fold_in(pair, 2), torch.arange(most, device=pair.device)) * classes
    return chosen.long().sort().values


def _some_rows(weight: Tensor, most: int, pair: Tensor) -> Tensor:
    chosen = some_classes(weight.shape[0], most, pair)
    return (weight if chosen is None else weight[chosen]).float()
