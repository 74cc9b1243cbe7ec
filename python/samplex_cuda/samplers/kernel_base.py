"""`KernelSampler`: draws by a kernel over a tree of feature sums (Blanc & Rendle 2018, Rawat et al. 2019).

The distribution and its rules are in docs/kernel_tree.md and, in plain torch, in `samplex_cuda.reference.kernel_tree`.
"""

from __future__ import annotations

import contextlib
import math
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from samplex_cuda import _device, chunking, rff
from samplex_cuda._checks import call, check_number, describe
from samplex_cuda.draw import Draw
from samplex_cuda.ops import kernel_tree as ops
from samplex_cuda.rng import Key, key_tensor
from samplex_cuda.samplers.base import Exclude, check_int64
from samplex_cuda.samplers.kernel_follow import LOST, DeviceFollowing
from samplex_cuda.samplers.kernel_rows import MOST_QUERY, MOST_SUM, longest_query
from samplex_cuda.samplers.progress import bar
from samplex_cuda.samplers.stored import finite_error, shape_error
from samplex_cuda.samplers.table_rows import taken_rows
from samplex_cuda.tables import empty_table

__all__ = ["KernelSampler"]

# What tables of a state dict may hold: more than this, and features of any row leave float32.
_LARGEST = {"omega": 1e8, "rows": 1e18}
_CLIPPED = 0.1  # share of negative estimates from which on a warning is due
_WATCHED = 8  # one call of so many on a CUDA device sends its share to the host


class KernelSampler(DeviceFollowing):
    """What `Quadratic` and `RandomFourier` share: q(c | h) about proportional to a kernel K(h, c) of the class rows.

    The sampler keeps a copy of the class rows (an update needs the old ones) and, for every node of a balanced tree
    over the classes, the sum of their features. `update` follows the rows that changed, `rebuild` starts again.

    Sums are in float32. A table whose sums would leave its range is refused, and the sampler stays as it was; a query
    with a number above 1e15 (less for long rows) is shortened to it. Threads may share a sampler: one call at a time
    reads or changes the tree. A `rebuild` or `update` that was interrupted (Ctrl-C) leaves a valid sampler: the next
    call sums the rows it finds again.

    Example:
        >>> import torch, samplex_cuda as sx
        >>> isinstance(sx.samplers.Quadratic(torch.randn(10, 4)), sx.samplers.KernelSampler)
        True
    """

    shift: Tensor

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        *,
        kind: str,
        kernel: str,
        scale: float,
        epsilon: float,
        normalize: bool,
        num_features: int,
        key: Key | Tensor | None,
        progress: bool,
    ) -> None:
        super().__init__()
        self._lock = threading.RLock()  # held while the tree is read or changed
        self._mixed = False  # whether a change is under way, or was interrupted: the sums are not those of the rows
        self._longest: float | Tensor = MOST_QUERY
        self._check_table("weight", weight)
        check_number(self._op, "epsilon", epsilon, 0.0, 1.0, open_high=True)
        self.num_classes, self.dim = weight.shape
        self.kind, self.kernel, self.scale = kind, kernel, float(scale)
        self.epsilon, self.normalize, self.has_bias = float(epsilon), bool(normalize), bias is not None
        self._check_bias(bias, self.num_classes)
        width = self.dim + self.has_bias
        numbers = rff.num_numbers(kind, width, num_features)
        self.leaf_size = min(self.num_classes, max(1, -(-(numbers if kind == "quadratic" else num_features) // width)))
        self.num_numbers = numbers
        omega = None
        if kind != "quadratic":
            place = "cpu" if weight.is_meta else weight.device
            omega = rff.frequencies(width, num_features, nu=self.scale, kind=kind, key=key, device=place)
        self._warned = False
        self._calls = 0
        self._shift = 0.0
        leaves = 1 << self.depth
        stride = ops.padded(numbers, ops.FEATURE_ALIGN)
        if not weight.is_meta:
            self._check_finite("weight", weight, bias)
        self.register_buffer("omega", omega)
        self.register_buffer("shift", torch.zeros((), dtype=torch.float64, device=weight.device))
        self.register_buffer(
            "rows", empty_table(self.num_classes, ops.padded(width, ops.ROW_ALIGN), device=weight.device).zero_()
        )
        self.register_buffer("sums", empty_table(2 * leaves, stride, device=weight.device).zero_())
        if not weight.is_meta:
            self._fill(weight, bias, progress)

    # -------------------------------------------------------------------------------------------- shape
    def memory(self) -> dict[str, int]:
        """Bytes of the sampler's own copy of the class rows, of the node sums, of the frequencies, and of all.

        Example:
            >>> import torch, samplex_cuda as sx
            >>> sx.samplers.RandomFourier(torch.randn(1000, 64), num_features=128).memory()["rows"]
            256000
        """
        parts = {"rows": self.rows.nbytes, "sums": self.sums.nbytes}
        parts["omega"] = 0 if self.omega is None else self.omega.nbytes
        parts["total"] = sum(parts.values())
        return parts

    # -------------------------------------------------------------------------------------------- draws
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
        """Draw `num_samples` classes for each query h [*, d]; see `Sampler.sample`.

        `exclude` is exact: the distribution conditioned on the other classes. `shared` draws: from the mean of the
        rows' distributions.

        Example:
            >>> import torch, samplex_cuda as sx
            >>> weight = torch.nn.functional.normalize(torch.randn(1000, 16), dim=1)
            >>> sampler = sx.samplers.RandomFourier(weight, num_features=256, nu=1.0)
            >>> draw = sampler.sample(weight[:4], 8, exclude=torch.arange(4))
            >>> draw.ids.shape, bool((draw.ids == torch.arange(4)[:, None]).any())
            (torch.Size([4, 8]), False)
        """
        count = self._check_count(num_samples)
        with self._in_order():
            if shared:
                return self._sample_shared(h, count, key, exclude, context, batch_size)
            return self._sample_rows(h, count, key, exclude, batch_size)

    def _sample_rows(
        self, h: Tensor | None, count: int, key: Key | Tensor | None, exclude: Exclude | None, batch_size: int | None
    ) -> Draw:
        query, phi = self._query(h)
        self._check_batch(query, batch_size, None)
        excluded = self._excluded(exclude, query)
        pair = key_tensor(self._op, key, query.device)
        ids, log_q, clipped = call(
            ops.kernel_tree_sample, pair, query, phi, self.rows, self.sums, *self._law(), count, *excluded
        )
        self._watch(clipped)
        return Draw(ids, log_q)

    def log_prob(
        self, h: Tensor | None, ids: Tensor, *, exclude: Exclude | None = None, context: Tensor | None = None
    ) -> Tensor:
        """Log-probability of given ids, the same numbers as the log_q of a draw; see `Sampler.log_prob`."""
        check_int64(self._op, "ids", ids)
        with self._in_order():
            return self._log_prob(h, ids, exclude)

    def _log_prob(self, h: Tensor | None, ids: Tensor, exclude: Exclude | None) -> Tensor:
        query, phi = self._query(h)
        if ids.device != query.device:
            raise ValueError(f"{self._op}: ids must be on {query.device}, got {ids.device}")
        wanted, single = self._wanted(ids, query.shape[0])
        excluded = self._excluded(exclude, query)
        out = call(ops.kernel_tree_log_prob, query, phi, wanted, self.rows, self.sums, *self._law(), *excluded)
        return out.squeeze(1) if single else out

    def log_prob_all(self, h: Tensor | None = None) -> Tensor:
        """Log-probability of every class, [B, C] float32, in chunks of classes."""
        with self._in_order():
            return self._log_prob_all(h)

    def sample_and_score(self, *args: Any, **options: Any) -> tuple[Draw, Tensor]:
        """See `Sampler.sample_and_score`; both are of one state of the tree."""
        with self._in_order():
            return super().sample_and_score(*args, **options)

    def _in_order(self) -> contextlib.AbstractContextManager[None]:
        """Nobody changes the tree inside, and its sums are those of its rows."""
        return contextlib.nullcontext() if torch.compiler.is_compiling() else self._held()

    @contextlib.contextmanager
    def _held(self) -> Iterator[None]:
        with self._lock:
            if self._mixed:
                self._sum_up(False)
            yield

    def _log_prob_all(self, h: Tensor | None) -> Tensor:
        query, phi = self._query(h)
        out = query.new_empty(query.shape[0], self.num_classes)
        chunk = max(1, chunking.chunk_bytes(query.device, "features") // 8 // max(1, query.shape[0]))
        for begin in range(0, self.num_classes, chunk):
            end = min(begin + chunk, self.num_classes)
            ids = torch.arange(begin, end, device=query.device).expand(query.shape[0], -1).contiguous()
            out[:, begin:end] = call(ops.kernel_tree_log_prob, query, phi, ids, self.rows, self.sums, *self._law())
        return out

    def _watch(self, clipped: Tensor) -> None:
        """Warn once where too much of the estimated mass is negative."""
        if self._warned or clipped.numel() == 0 or torch.compiler.is_compiling():
            return
        share = self._earlier_share(clipped) if _device.host_waits(clipped) else float(clipped.nanmean())
        if not share > _CLIPPED:
            return
        self._warned = True
        wanted = math.ceil(2.7 * math.exp(min(2.0 * self.scale, 60.0)))
        warnings.warn(
            f"{self._op}: {share:.0%} of the estimated kernel mass is negative and counts as 0, so q is far from the "
            f"kernel (log_q stays exact). For rows of length 1, num_features above about {wanted:,} is enough at nu = "
            f"{self.scale:g}; a smaller nu needs fewer, normalize=True shortens longer rows, and kind='positive' has "
            "no negative estimates.",
            stacklevel=3,
        )

    def _earlier_share(self, clipped: Tensor) -> float:
        """The share of an earlier call, so that no call waits for the device: 0 until the first one has arrived."""
        share = self._post()[0]
        if self._calls % _WATCHED == 0:
            self._post().send(0, clipped.nanmean())
        self._calls += 1
        return share

    # -------------------------------------------------------------------------------------------- changes
    def update(self, ids: Tensor, rows: Tensor, bias: Tensor | None = None) -> None:
        """These rows of the class table changed: O(D (d + log C)) for each, nothing else is touched.

        A row that is not finite is refused, and the tree stays as it was.

        Args:
            ids: [n] int64, each class at most once, any order.
            rows: [n, d] floating point, their new rows.
            bias: [n] their new biases, where the sampler has a bias.

        Example:
            >>> import torch, samplex_cuda as sx
            >>> weight = torch.nn.functional.normalize(torch.randn(1000, 16), dim=1)
            >>> sampler = sx.samplers.RandomFourier(weight, num_features=256, nu=1.0)
            >>> sampler.update(torch.tensor([3, 700]), weight[:2])
        """
        check_int64(self._op, "ids", ids)
        if ids.dim() != 1:
            raise ValueError(f"{self._op}: ids must be [n], got {describe(ids)}")
        self._check_table("rows", rows, ids.shape[0])
        self._check_bias(bias, ids.shape[0])
        for name, t in (("ids", ids), ("rows", rows)):
            if t.device != self.rows.device:
                raise ValueError(f"{self._op}: {name} must be on {self.rows.device}, where the tree is, got {t.device}")
        if ids.shape[0] == 0:
            return
        order = ids.argsort()
        ids = ids[order]
        low, high = int(ids[0]), int(ids[-1])
        if low < 0 or high >= self.num_classes:
            bad = low if low < 0 else high
            raise IndexError(f"{self._op}: ids must be in [0, {self.num_classes}), got {bad}")
        same = ids[1:] == ids[:-1]
        if bool(same.any()):
            raise ValueError(f"{self._op}: ids must be unique, got {int(ids[1:][same][0])} twice")
        self._check_finite("rows", rows, bias)
        with torch.no_grad(), self._held():
            self._change(ids, rows, bias, order)

    def _change(self, ids: Tensor, rows: Tensor, bias: Tensor | None, order: Tensor) -> None:
        """`update` of ids [n], ascending, by the rows at `order`."""
        width = self.dim + self.has_bias
        # From half of the rows on a rebuild is cheaper; rows much shorter than all others ask for another shift.
        shrunk = self.kind == "positive" and self._shift > 32.0 + self._decay(self._own(rows, bias, slice(None)))
        everything = 2 * ids.shape[0] >= self.num_classes or shrunk
        before = self.rows[ids, :width]
        self._mixed = True
        peaks = None if everything else self._leaf_peaks()
        for part in self._chunks(ids.shape[0], changed=True):
            some, new = ids[part], self._own(rows, bias, order[part])
            if not everything:
                old = self._features(before[part], self._shift)
                phi = self._features(new, self._shift)
                ops.kernel_tree_update(self.sums, phi, old, some, self.leaf_size, peaks=peaks)
            self.rows[some, :width] = new
        if everything:
            fine = self._sum_up(False)
        else:
            leaves = ids // self.leaf_size
            if peaks is not None:
                self._sum_lost_leaves(leaves.unique_consecutive(), peaks)
            ops.kernel_tree_parents(self.sums, leaves)
            fine = self._measure()
        if not fine:
            self.rows[ids, :width] = before
            self._sum_up(False)
            self._refuse_rows("rows", rows, bias)
        self._mixed = False

    def _sum_lost_leaves(self, touched: Tensor, peaks: Tensor) -> None:
        """Sums leaves again that were much larger before: (others + large) - large loses the digits of others."""
        lost = touched[peaks[1, touched] > LOST * peaks[0, touched]]
        for leaf in lost.tolist():
            own = self.rows[leaf * self.leaf_size : (leaf + 1) * self.leaf_size, : self.dim + self.has_bias]
            phi = self._features(own.contiguous(), self._shift)
            ops.kernel_tree_build(self.sums, phi, leaf * self.leaf_size, self.leaf_size)
            peaks[:, leaf] = self.sums[self.sums.shape[0] // 2 + leaf].abs().amax()

    def _measure(self) -> bool:
        """Whether the sums of all classes are in range; how long a query may be then."""
        most = float(self.sums[1].abs().amax())
        if not most <= MOST_SUM:  # nan too
            return False
        quadratic = self.kind == "quadratic"
        self._longest = longest_query(most, self.num_numbers, self.scale) if quadratic else MOST_QUERY
        return True

    def rebuild(self, weight: Tensor, bias: Tensor | None = None, *, progress: bool = False) -> None:
        """Build the tree again from the whole class table [C, d] (and bias [C]), in chunks, on all threads.

        Args:
            weight: [C, d].
            bias: [C], where the sampler has a bias.
            progress: show a progress bar on a terminal.

        Example:
            >>> import torch, samplex_cuda as sx
            >>> sampler = sx.samplers.Quadratic(torch.zeros(100, 8))
            >>> sampler.rebuild(torch.randn(100, 8))
        """
        self._check_table("weight", weight, self.num_classes)
        self._check_bias(bias, self.num_classes)
        if weight.device != self.rows.device:
            raise ValueError(
                f"{self._op}: weight must be on {self.rows.device}, where the tree is, got {weight.device}"
            )
        self._check_finite("weight", weight, bias)
        with self._held():
            self._fill(weight, bias, progress)

    @torch.no_grad()
    def _fill(self, weight: Tensor, bias: Tensor | None, progress: bool) -> None:
        width = self.dim + self.has_bias
        # The rows come last: until then an interrupted call can go back to the old ones.
        fine = self._sum_up(progress, lambda part: self._own(weight, bias, part))
        self._mixed = True
        if not fine:
            self._sum_up(False)
            self._refuse_rows("weight", weight, bias)
        for part in self._chunks(self.num_classes):
            self.rows[part, :width] = self._own(weight, bias, part)
        self._forget_notices()
        self._mixed = False

    @torch.no_grad()
    def _sum_up(self, progress: bool, own: Callable[[slice], Tensor] | None = None) -> bool:
        """All sums from the rows, or from those that `own` gives; whether they are in range."""
        width = self.dim + self.has_bias
        if own is None:

            def own(part: slice) -> Tensor:
                return self.rows[part, :width].contiguous()

        self._mixed, self._peaks = True, None
        shift = 0.0
        if self.kind == "positive":
            # A common factor of all features changes no probability. It keeps the exponents of long rows, about
            # -nu |c|^2 / 2, in range. In steps of 16, so that it is 0 for short rows and seldom another later.
            decay = min(self._decay(own(part)) for part in self._chunks(self.num_classes))
            if not decay < MOST_SUM:
                return False
            shift = 16.0 * math.floor(decay / 16.0)
        with bar(self.num_classes, progress) as show:
            for part in self._chunks(self.num_classes):
                phi = self._features(own(part), shift)
                ops.kernel_tree_build(self.sums, phi, part.start, self.leaf_size)
                show(part.stop)
        ops.kernel_tree_parents(self.sums)
        self._shift = shift
        self.shift.fill_(shift)
        fine = self._measure()
        self._mixed = False
        return fine

    def _over_rows(self, place: Tensor, **options: Any) -> Any:
        """A sampler of the same kind whose class i has the row of class place[i] of this one, -1: zeros."""
        with self._held():
            rows = taken_rows(self.rows, place)
            weight, bias = rows[:, : self.dim], rows[:, self.dim] if self.has_bias else None
            made = type(self)(weight, bias=bias, epsilon=self.epsilon, **options)
            if self.omega is not None and made.omega is not None:
                made.omega.copy_(self.omega)
                made.rebuild(weight, bias)
        return made

    def resize(self, num_classes: int) -> None:
        """See `Sampler.resize`."""
        with self._held():
            super().resize(num_classes)

    # -------------------------------------------------------------------------------------------- module
    def _stored_error(self, found: dict[str, Any]) -> str | None:
        for name, value in found.items():
            own = self.get_buffer(name)
            if wrong := shape_error(name, value, tuple(own.shape), own.dtype, str(list(own.shape))):
                return f"{wrong}; make the sampler with the class table and the options of the saved one"
            if wrong := finite_error(name, value, _LARGEST.get(name)):
                return wrong
        return None

    def complete(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Adds the node sums to the state of a sharded sampler, which keeps the class rows alone; see `head.shard`.

        The tables of this sampler become those of the state.

        Args:
            state_dict: with the entries `rows`, `shift` and `omega` under `prefix`; changed in place.
            prefix: of the names.

        Example:
            >>> import torch, samplex_cuda as sx
            >>> sampler = sx.samplers.Quadratic(torch.randn(10, 4))
            >>> state = {"rows": sampler.rows.clone(), "shift": sampler.shift}
            >>> sampler.complete(state, "")
            >>> torch.equal(state["sums"], sampler.sums)
            True
        """
        rows, omega = state_dict.get(f"{prefix}rows"), state_dict.get(f"{prefix}omega")
        if not isinstance(rows, Tensor) or f"{prefix}sums" in state_dict or rows.shape != self.rows.shape:
            return
        with self._lock:
            self.rows.copy_(rows)
            if self.omega is not None and isinstance(omega, Tensor) and omega.shape == self.omega.shape:
                self.omega.copy_(omega)
            self._sum_up(False)
            state_dict[f"{prefix}sums"] = self.sums.clone()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        with self._lock:
            super()._load_from_state_dict(state_dict, prefix, *args)
            self._peaks, self._mixed = None, False
            self._measure()
            if prefix + "shift" in state_dict:
                self._shift = float(self.shift)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        with self._held():
            super()._save_to_state_dict(destination, prefix, keep_vars)

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: a lock is never copied."""
        with self._held():
            return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """See `__getstate__`."""
        super().__setstate__(state)
        self._lock = threading.RLock()

    def _apply(self, fn: Any, recurse: bool = True) -> KernelSampler:
        self._apply_keeping_dtypes(fn, recurse)
        self._peaks = self._mail = self._notices = None
        self._longest = float(self._longest)
        return self

    def extra_repr(self) -> str:
        """Sizes, the kernel, and the memory it takes."""
        return (
            f"num_classes={self.num_classes}, dim={self.dim}, leaf_size={self.leaf_size}, depth={self.depth}, "
            f"epsilon={self.epsilon:g}, memory={self.memory()['total'] / 1e6:.1f} MB"
        )
