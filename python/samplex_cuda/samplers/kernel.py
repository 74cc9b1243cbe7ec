"""`Quadratic` and `RandomFourier`: kernels over a tree of feature sums (Blanc & Rendle 2018, Rawat et al. 2019).

The law and its rules are in docs/kernel_tree.md and, in plain torch, in `samplex_cuda.reference.kernel_tree`.
"""

from __future__ import annotations

import contextlib
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from samplex_cuda import rff
from samplex_cuda._checks import call, check_int, describe
from samplex_cuda.draw import Draw
from samplex_cuda.ops import kernel_tree as ops
from samplex_cuda.ops.static_sample import sort_exclude
from samplex_cuda.rng import Key, key_tensor
from samplex_cuda.samplers.base import Exclude, Sampler, check_int64
from samplex_cuda.samplers.stored import finite_error, shape_error
from samplex_cuda.tables import empty_table

__all__ = ["KernelSampler", "Quadratic", "RandomFourier"]

_KINDS = ("rff", "orf", "positive")
_CHUNK_BYTES = 8 << 20  # of features at a time: they stay in the cache until they are summed
_CLIPPED = 0.1  # share of negative estimates from which on a warning is due
_WATCHED = 8  # one call of so many on a CUDA device sends its share to the host


class KernelSampler(Sampler):
    """What `Quadratic` and `RandomFourier` share: q(c | h) about proportional to a kernel K(h, c) of the class rows.

    The sampler keeps a copy of the class rows (an update needs the old ones) and, for every node of a balanced tree
    over the classes, the sum of their features. `update` follows the rows that changed, `rebuild` starts anew.

    Example:
        >>> import torch, samplex_cuda as sx
        >>> isinstance(sx.samplers.Quadratic(torch.randn(10, 4)), sx.samplers.KernelSampler)
        True
    """

    follows_rows = True
    rows: Tensor
    sums: Tensor
    omega: Tensor | None
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
        self._check_table("weight", weight)
        if isinstance(epsilon, bool) or not isinstance(epsilon, int | float) or not 0.0 <= epsilon < 1.0:
            raise ValueError(f"{self._op}: epsilon must be a number in [0, 1), got {epsilon!r}")
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
            omega = rff.frequencies(width, num_features, nu=self.scale, kind=kind, key=key, device=weight.device)
        self._warned = False
        self._share: Tensor | None = None  # on the host, on its way from a CUDA device
        self._calls = 0
        self._shift = 0.0
        leaves = 1 << self.depth
        stride = ops.padded(numbers, ops.FEATURE_ALIGN)
        self._check_finite("weight", weight, bias)
        self.register_buffer("omega", omega)
        self.register_buffer("shift", torch.zeros((), dtype=torch.float64, device=weight.device))
        self.register_buffer(
            "rows", empty_table(self.num_classes, ops.padded(width, ops.ROW_ALIGN), device=weight.device).zero_()
        )
        self.register_buffer("sums", empty_table(2 * leaves, stride, device=weight.device).zero_())
        self._fill(weight, bias, progress)

    # -------------------------------------------------------------------------------------------- shape
    @property
    def depth(self) -> int:
        """Levels of the tree; 0 where all classes fit into one leaf."""
        return (-(-self.num_classes // self.leaf_size) - 1).bit_length()

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

        `exclude` is exact: the law conditioned on the other classes. `shared` draws: from the mean of the rows' laws.

        Example:
            >>> import torch, samplex_cuda as sx
            >>> weight = torch.nn.functional.normalize(torch.randn(1000, 16), dim=1)
            >>> sampler = sx.samplers.RandomFourier(weight, num_features=256, nu=1.0)
            >>> draw = sampler.sample(weight[:4], 8, exclude=torch.arange(4))
            >>> draw.ids.shape, bool((draw.ids == torch.arange(4)[:, None]).any())
            (torch.Size([4, 8]), False)
        """
        count = self._check_count(num_samples)
        if shared:
            return self._sample_shared(h, count, key, exclude, context, batch_size)
        query, phi = self._query(h)
        self._check_batch(query, batch_size, None)
        flat, offsets = sort_exclude(self._check_exclude(exclude, query.device, query.shape[0]))
        pair = key_tensor(self._op, key, query.device)
        ids, log_q, clipped = call(
            ops.kernel_tree_sample, pair, query, phi, self.rows, self.sums, *self._law(), count, flat, offsets
        )
        self._watch(clipped)
        return Draw(ids, log_q)

    def log_prob(
        self, h: Tensor | None, ids: Tensor, *, exclude: Exclude | None = None, context: Tensor | None = None
    ) -> Tensor:
        """Log-probability of given ids, the same numbers as the log_q of a draw; see `Sampler.log_prob`."""
        check_int64(self._op, "ids", ids)
        query, phi = self._query(h)
        batch = query.shape[0]
        if ids.device != query.device:
            raise ValueError(f"{self._op}: ids must be on {query.device}, got {ids.device}")
        if ids.dim() == 2 and ids.shape[0] == batch:
            wanted = ids
        elif ids.dim() == 1:
            wanted = ids.unsqueeze(1) if ids.shape[0] == batch else ids.expand(batch, -1)
        else:
            raise ValueError(f"{self._op}: ids must be [B], [B, n] or [n] with B = {batch}, got {describe(ids)}")
        flat, offsets = sort_exclude(self._check_exclude(exclude, query.device, batch))
        out = call(
            ops.kernel_tree_log_prob, query, phi, wanted.contiguous(), self.rows, self.sums, *self._law(), flat, offsets
        )
        return out.squeeze(1) if ids.dim() == 1 and ids.shape[0] == batch else out

    def log_prob_all(self, h: Tensor | None = None) -> Tensor:
        """Log-probability of every class, [B, C] float32, in chunks of classes."""
        query, phi = self._query(h)
        out = query.new_empty(query.shape[0], self.num_classes)
        chunk = max(1, (1 << 20) // max(1, query.shape[0]))
        for begin in range(0, self.num_classes, chunk):
            end = min(begin + chunk, self.num_classes)
            ids = torch.arange(begin, end, device=query.device).expand(query.shape[0], -1).contiguous()
            out[:, begin:end] = call(ops.kernel_tree_log_prob, query, phi, ids, self.rows, self.sums, *self._law())
        return out

    def _law(self) -> tuple[int, str, float, float]:
        return self.leaf_size, self.kernel, self.scale, self.epsilon

    def _query(self, h: Tensor | None) -> tuple[Tensor, Tensor]:
        """Queries [B, dim] as the leaves see them, and their features."""
        if not isinstance(h, Tensor) or h.dim() < 1 or not h.is_floating_point() or h.shape[-1] != self.dim:
            got = describe(h) if isinstance(h, Tensor) else type(h).__name__
            raise ValueError(f"{self._op}: h must be [*, {self.dim}] floating point, got {got}")
        if h.device != self.rows.device:
            raise ValueError(f"{self._op}: h must be on {self.rows.device}, where the tree is, got {h.device}")
        flat = h.detach().reshape(-1, self.dim).to(torch.float32)
        if self.normalize:
            flat = torch.nn.functional.normalize(flat, dim=1)
        if self.has_bias:
            flat = torch.nn.functional.pad(flat, (0, 1), value=1.0)
        return ops.pad_columns(flat, ops.ROW_ALIGN), self._features(flat, 0.0)

    def _features(self, x: Tensor, shift: float) -> Tensor:
        """phi of rows [n, width] times e^shift ("positive"), zero columns up to the stride of the sums."""
        if self.kind == "quadratic":
            phi = rff.features(x, kind="quadratic", alpha=self.scale)
        else:
            phi = rff.features(x, self.omega, kind=self.kind, nu=self.scale, shift=shift)
        return ops.pad_columns(phi, ops.FEATURE_ALIGN)

    def _watch(self, clipped: Tensor) -> None:
        """Warn once where too much of the estimated mass is negative."""
        if self._warned or clipped.numel() == 0 or torch.compiler.is_compiling():
            return
        share = self._earlier_share(clipped) if clipped.is_cuda else float(clipped.nanmean())
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
        if torch.cuda.is_current_stream_capturing():
            return 0.0
        if self._share is None:
            self._share = torch.zeros((), pin_memory=True)
        share = float(self._share)
        if self._calls % _WATCHED == 0:
            self._share.copy_(clipped.nanmean(), non_blocking=True)
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
            raise ValueError(f"{self._op}: ids must be different, got {int(ids[1:][same][0])} twice")
        self._check_finite("rows", rows, bias)
        # From half of the rows on a rebuild is cheaper; rows much shorter than all others ask for another shift.
        shrunk = self.kind == "positive" and self._shift > 32.0 + self._decay(self._own(rows, bias, slice(None)))
        if 2 * ids.shape[0] >= self.num_classes or shrunk:
            for part in self._chunks(ids.shape[0]):
                self.rows[ids[part], : self.dim + self.has_bias] = self._own(rows, bias, order[part])
            return self._sum_up(False)
        width = self.dim + self.has_bias
        for part in self._chunks(ids.shape[0]):
            some, new = ids[part], self._own(rows, bias, order[part])
            old = self.rows[some, :width]
            ops.kernel_tree_update(
                self.sums, self._features(new, self._shift), self._features(old, self._shift), some, self.leaf_size
            )
            self.rows[some, :width] = new
        ops.kernel_tree_parents(self.sums, ids // self.leaf_size)

    def rebuild(self, weight: Tensor, bias: Tensor | None = None, *, progress: bool = False) -> None:
        """Build the tree anew from the whole class table [C, d] (and bias [C]), in chunks, on all threads.

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
        self._fill(weight, bias, progress)

    def _chunks(self, count: int) -> Iterator[slice]:
        """Rows whose features are made at once: whole leaves."""
        leaf = max(1, _CHUNK_BYTES // (self.sums.shape[1] * 4) // self.leaf_size) * self.leaf_size
        return (slice(begin, min(begin + leaf, count)) for begin in range(0, count, leaf))

    def _own(self, weight: Tensor, bias: Tensor | None, which: slice | Tensor) -> Tensor:
        """Rows as the tree keeps them, [n, width] float32."""
        rows = weight.detach()[which].to(torch.float32)
        if self.normalize:
            rows = torch.nn.functional.normalize(rows, dim=1)
        if bias is not None:
            rows = torch.cat([rows, bias.detach()[which].to(torch.float32).unsqueeze(1)], 1)
        return rows.contiguous()

    @torch.no_grad()
    def _fill(self, weight: Tensor, bias: Tensor | None, progress: bool) -> None:
        width = self.dim + self.has_bias
        for part in self._chunks(self.num_classes):
            self.rows[part, :width] = self._own(weight, bias, part)
        self._sum_up(progress)

    @torch.no_grad()
    def _sum_up(self, progress: bool) -> None:
        """All sums from the rows."""
        width = self.dim + self.has_bias
        if self.kind == "positive":
            # A common factor of all features changes no probability. It keeps the exponents of long rows, about
            # -nu |c|^2 / 2, in range. In steps of 16, so that it is 0 for short rows and seldom another later.
            decay = min(self._decay(self.rows[part]) for part in self._chunks(self.num_classes))
            self._shift = 16.0 * math.floor(decay / 16.0)
            self.shift.fill_(self._shift)
        with _bar(self.num_classes, progress) as show:
            for part in self._chunks(self.num_classes):
                phi = self._features(self.rows[part, :width].contiguous(), self._shift)
                ops.kernel_tree_build(self.sums, phi, part.start, self.leaf_size)
                show(part.stop)
        ops.kernel_tree_parents(self.sums)

    def _decay(self, rows: Tensor) -> float:
        """nu |c|^2 / 2 of the shortest row."""
        return 0.5 * self.scale * float(rows.square().sum(1).min())

    # -------------------------------------------------------------------------------------------- checks
    def _check_table(self, name: str, table: Tensor, rows: int | None = None) -> None:
        wanted = "C" if rows is None else str(rows)
        width = "d" if rows is None else str(self.dim)
        if not isinstance(table, Tensor):
            raise TypeError(f"{self._op}: {name} must be a [{wanted}, {width}] tensor, got {type(table).__name__}")
        good = table.dim() == 2 and table.is_floating_point() and table.shape[0] >= (rows is None)
        good = good and table.shape[1] >= 1 and (rows is None or table.shape == (rows, self.dim))
        if not good:
            raise ValueError(f"{self._op}: {name} must be [{wanted}, {width}] floating point, got {describe(table)}")

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
                part = table.detach()[begin : begin + 65536]
                if not bool(part.isfinite().all()):
                    bad = int((~part.isfinite()).reshape(part.shape[0], -1).any(1).nonzero()[0, 0]) + begin
                    raise ValueError(f"{self._op}: {what} must be finite, got nan or inf in row {bad}")

    # -------------------------------------------------------------------------------------------- module
    def _stored_error(self, found: dict[str, Any]) -> str | None:
        for name, value in found.items():
            own = self.get_buffer(name)
            if wrong := shape_error(name, value, tuple(own.shape), own.dtype, str(list(own.shape))):
                return f"{wrong}; make the sampler with the class table and the options of the saved one"
            if wrong := finite_error(name, value):
                return wrong
        return None

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        if prefix + "shift" in state_dict:
            self._shift = float(self.shift)

    def _apply(self, fn: Any, recurse: bool = True) -> KernelSampler:
        kept = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)
        # `.to(bfloat16)` or `.half()` of a model is not about the sampler: its law, and with it log_q, would change.
        for name, t in kept.items():
            now = self.get_buffer(name)
            if now.dtype != t.dtype:
                setattr(self, name, t.to(now.device))
        return self

    def extra_repr(self) -> str:
        """Sizes, the kernel, and the memory it takes."""
        return (
            f"num_classes={self.num_classes}, dim={self.dim}, leaf_size={self.leaf_size}, depth={self.depth}, "
            f"epsilon={self.epsilon:g}, memory={self.memory()['total'] / 1e6:.1f} MB"
        )


class Quadratic(KernelSampler):
    """q(c | h) proportional to alpha <h, c>^2 + 1 (Blanc & Rendle 2018): many draws where |<h, c>| is large.

    Exact: all features of the kernel are kept, d (d + 1) / 2 + 1 numbers a node, so a draw costs O(d^2 log C). Nothing
    is clipped and every class has a positive probability. The kernel is even, so it suits `absolute=True` best.

    Args:
        weight: [C, d] class rows, floating point; copied.
        alpha: factor of the square.
        bias: [C]; the rows are then [c, b] and the queries [h, 1].
        epsilon: share of the uniform law; 0, for the + 1 is one already.
        progress: show a progress bar on a terminal while building.

    Example:
        >>> import torch, samplex_cuda as sx
        >>> sampler = sx.samplers.Quadratic(torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]]), alpha=8.0)
        >>> sampler.log_prob_all(torch.tensor([[0.0, 0.5]])).exp()  # 1 : 3 : 2.28
        tensor([[0.1592, 0.4777, 0.3631]])
    """

    _op = "quadratic"

    def __init__(
        self,
        weight: Tensor,
        alpha: float = 100.0,
        bias: Tensor | None = None,
        *,
        epsilon: float = 0.0,
        progress: bool = False,
    ) -> None:
        if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0.0 < alpha < 1e30:
            raise ValueError(f"quadratic: alpha must be a positive number, got {alpha!r}")
        super().__init__(
            weight,
            bias,
            kind="quadratic",
            kernel="quadratic",
            scale=alpha,
            epsilon=epsilon,
            normalize=False,
            num_features=1,
            key=None,
            progress=progress,
        )
        self.alpha = float(alpha)

    def extra_repr(self) -> str:
        """The kernel, sizes and memory."""
        return f"alpha={self.alpha:g}, {super().extra_repr()}"


class RandomFourier(KernelSampler):
    """q(c | h) about proportional to a Gaussian or exponential kernel, by random features (Rawat et al. 2019).

    "rff" and "orf" estimate exp(-nu |c - h|^2 / 2), which on rows of length 1 is proportional to exp(nu c . h);
    "positive" estimates exp(nu c . h) itself, for rows of any length. Softmax over logits tau c . h is best matched by
    nu = tau, if num_features allows: the estimates of "rff" and "orf" scatter around their mean, and where they fall
    below zero they count as 0. `epsilon` keeps every class possible. log_q is that of the law that was really drawn
    from, whatever the estimates are.

    Args:
        weight: [C, d] class rows, floating point; copied.
        num_features: D, the number of frequencies ("rff" and "orf" keep 2 D numbers a node, "positive" D).
        nu: sharpness of the kernel.
        kind: "rff", "orf" (orthogonal frequencies: less scatter) or "positive".
        epsilon: share of the uniform law: bounds exp(logit) / q.
        bias: [C]; the rows are then [c, b] and the queries [h, 1].
        normalize: scale rows and queries (not the bias) to length 1; zero rows stay zero.
        key: where the frequencies come from; None: torch's default generator.
        progress: show a progress bar on a terminal while building.

    Example:
        >>> import torch, samplex_cuda as sx
        >>> weight = torch.randn(1000, 16)
        >>> sampler = sx.samplers.RandomFourier(weight, num_features=512, nu=1.0, normalize=True)
        >>> draw = sampler.sample(torch.randn(4, 16), 20)
        >>> torch.equal(draw.log_q, sampler.log_prob(torch.randn(4, 16), draw.ids))  # another query, another law
        False
    """

    _op = "random_fourier"

    def __init__(
        self,
        weight: Tensor,
        num_features: int = 1024,
        nu: float = 4.0,
        kind: str = "rff",
        *,
        epsilon: float = 0.01,
        bias: Tensor | None = None,
        normalize: bool = False,
        key: Key | Tensor | None = None,
        progress: bool = False,
    ) -> None:
        if kind not in _KINDS:
            raise ValueError(f"random_fourier: kind must be one of {', '.join(_KINDS)}, got {kind!r}")
        check_int("random_fourier", "num_features", num_features)
        if isinstance(nu, bool) or not isinstance(nu, int | float) or not 0.0 < nu < 1e30:
            raise ValueError(f"random_fourier: nu must be a positive number, got {nu!r}")
        super().__init__(
            weight,
            bias,
            kind=kind,
            kernel="exponential" if kind == "positive" else "gaussian",
            scale=nu,
            epsilon=epsilon,
            normalize=normalize,
            num_features=num_features,
            key=key,
            progress=progress,
        )
        self.num_features, self.nu = num_features, float(nu)

    def extra_repr(self) -> str:
        """The kernel, sizes and memory."""
        return f"kind={self.kind}, num_features={self.num_features}, nu={self.nu:g}, {super().extra_repr()}"


@contextlib.contextmanager
def _bar(classes: int, wanted: bool) -> Iterator[Callable[[int], None]]:
    """What to call with the number of classes done: a bar on a terminal where rich is there, else nothing."""
    if not (wanted and sys.stderr.isatty()):
        yield lambda done: None
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    except ImportError:
        yield lambda done: None
        return
    columns = (
        TextColumn("summing features"),
        BarColumn(bar_width=32),
        TextColumn("{task.completed:,}/{task.total:,} classes"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("build", total=classes)
        yield lambda done: bars.update(task, completed=done)
