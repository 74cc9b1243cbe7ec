"""Bigram: a distribution for each context id (the class before), with back-off to the unigram distribution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from samplex_cuda._checks import call, check_choice, check_int, check_number, describe
from samplex_cuda.draw import Draw
from samplex_cuda.ops import bigram_sample as ops
from samplex_cuda.ops.static_sample import build_alias
from samplex_cuda.rng import Key, key_tensor
from samplex_cuda.samplers.base import Exclude, Sampler, check_int64
from samplex_cuda.samplers.static import live_weights
from samplex_cuda.samplers.stored import bigram_error
from samplex_cuda.samplers.unique import DrawSource, UniqueDraw, draw_unique, excluded_of, log_inclusion

__all__ = ["Bigram"]

Array = Tensor | np.ndarray | Sequence[float]
# Below this a class of the unigram part could have a probability that a double no longer holds in full.
_LEAST_BACKOFF = 1e-12
_BUFFERS = ("table", "prefix", "offsets", "pair_ids", "pair_table", "pair_prefix", "backoff")


class Bigram(Sampler):
    """P(k | c) = (1 - b) count(c, k) / count(c) + b P(k): what follows context c, mixed with the unigram distribution.

    Both distributions are alias tables, so a draw takes a few memory accesses, whatever C and the number of pairs are;
    log_q is that of the mixture. A context without counts, or context -1, has the unigram distribution. Contexts are
    classes (the word before) or anything else with an id (the user's last item, a query cluster).

    48 bytes per pair and 40 per class. Weights are integers inside, as in `Unigram`: exclusion is exact, and draws have
    the same bits on every backend.

    Args:
        offsets: [N + 1] where the pairs of each context begin; with `ids` and `counts` a CSR matrix [N, C].
        ids: [nnz] classes, in any order; counts of equal pairs add up, counts of zero are dropped.
        counts: [nnz] non-negative numbers.
        unigram: [C] non-negative numbers: counts of the classes alone. They define C.
        backoff: b, the share of the unigram distribution, for all contexts or [N] for each: 0 or in [1e-12, 1]. With 0
            per class that never followed the context is never drawn.
        power: exponent on the counts of the pairs and of the classes.

    Example:
        >>> import torch, samplex_cuda as sx
        >>> offsets, ids, counts = [0, 2, 2], [1, 2], [3, 1]  # 0 was followed by 1, 1, 1, 2; 1 by nothing
        >>> sampler = sx.samplers.Bigram(offsets, ids, counts, unigram=[1, 1, 2], backoff=0.2)
        >>> sampler.log_prob_all(context=torch.tensor([0, 1])).exp()
        tensor([[0.0500, 0.6500, 0.3000],
                [0.2500, 0.2500, 0.5000]])
        >>> draw = sampler.sample(None, 4, context=torch.tensor([0, 1]), exclude=torch.tensor([1, 2]), key=sx.Key(0))
        >>> draw.ids.shape
        torch.Size([2, 4])
    """

    _op = "bigram"
    _needs_context = True
    table: Tensor
    prefix: Tensor
    offsets: Tensor
    pair_ids: Tensor
    pair_table: Tensor
    pair_prefix: Tensor
    backoff: Tensor

    def __init__(
        self,
        offsets: Array,
        ids: Array,
        counts: Array,
        unigram: Array,
        *,
        backoff: float | Array = 0.1,
        power: float = 1.0,
    ) -> None:
        super().__init__()
        check_number("bigram", "power", power, 0.0)
        alone = _numbers("unigram", unigram)
        if alone.shape[0] < 1 or not alone.any():
            raise ValueError(f"bigram: unigram must be [C] with a positive sum, got [{alone.shape[0]}]")
        starts, classes = _integers("offsets", offsets), _integers("ids", ids)
        values = _numbers("counts", counts)
        contexts, pairs = starts.shape[0] - 1, classes.shape[0]
        if values.shape != classes.shape:
            raise ValueError(f"bigram: counts must be [{pairs}] as ids, got [{values.shape[0]}]")
        if contexts < 0 or starts[0] != 0 or starts[-1] != pairs or (np.diff(starts) < 0).any():
            raise ValueError(f"bigram: offsets must be [N + 1] and ascend from 0 to {pairs}, got {_short(starts)}")
        if pairs and not (classes.min() >= 0 and classes.max() < alone.shape[0]):
            wrong = classes[(classes < 0) | (classes >= alone.shape[0])][0]
            raise IndexError(f"bigram: ids must be in [0, {alone.shape[0]}), got {wrong}")
        share = np.broadcast_to(_numbers("backoff", backoff, scalar=True), (contexts,)).copy() if contexts else None
        if share is not None and not ((share == 0) | ((share >= _LEAST_BACKOFF) & (share <= 1))).all():
            wrong = share[~((share == 0) | ((share >= _LEAST_BACKOFF) & (share <= 1)))][0]
            raise ValueError(f"bigram: backoff must be 0 or in [1e-12, 1], got {wrong}")

        self.num_classes = alone.shape[0]
        self.power = float(power)
        starts, classes, values = _merge(starts, classes, values, self.num_classes)
        if power != 1.0:
            alone, values = (np.where(x > 0, (x / x.max(initial=1.0)) ** power, 0.0) for x in (alone, values))
        table, prefix = build_alias(alone)
        begin = torch.from_numpy(starts)
        pair_table, pair_prefix = ops.build_alias_rows(values, begin)
        rest = torch.zeros(0, dtype=torch.float64, device="cpu") if share is None else torch.from_numpy(share)
        buffers = (table, prefix, begin, torch.from_numpy(classes), pair_table, pair_prefix, rest)
        device = unigram.device if isinstance(unigram, Tensor) else torch.device("cpu")
        for name, value in zip(_BUFFERS, buffers, strict=True):
            self.register_buffer(name, value.to(device, copy=True))  # torch's own memory: aligned

    @classmethod
    def from_tokens(
        cls,
        tokens: Array,
        num_classes: int,
        *,
        backoff: float = 0.1,
        power: float = 1.0,
        smoothing: float = 1.0,
    ) -> Bigram:
        """Counts of a stream of tokens: each one is the context of the next.

        Args:
            tokens: [n] class ids; -1 marks a break (end of a document): no pair goes across it.
            num_classes: C.
            backoff: as in the class.
            power: as in the class.
            smoothing: added to the unigram count of each class, so that a class that does not occur can be drawn.

        Example:
            >>> import torch, samplex_cuda as sx
            >>> sampler = sx.samplers.Bigram.from_tokens([0, 1, 0, 2, -1, 1], 3, backoff=0.0)
            >>> sampler.log_prob(None, torch.tensor([1, 2]), context=torch.tensor([0, 0])).exp()
            tensor([0.5000, 0.5000])
        """
        check_int("bigram", "num_classes", num_classes)
        if not 0.0 <= smoothing < float("inf"):
            raise ValueError(f"bigram: smoothing must be finite and at least 0, got {smoothing!r}")
        stream = _integers("tokens", tokens)
        if stream.size and not (stream.min() >= -1 and stream.max() < num_classes):
            wrong = stream[(stream < -1) | (stream >= num_classes)][0]
            raise IndexError(f"bigram: tokens must be -1 or in [0, {num_classes}), got {wrong}")
        unigram = np.bincount(stream[stream >= 0], minlength=num_classes) + float(smoothing)
        before, after = stream[:-1], stream[1:]
        within = (before >= 0) & (after >= 0)
        pairs, counts = np.unique(before[within] * num_classes + after[within], return_counts=True)
        offsets = np.searchsorted(pairs, np.arange(num_classes + 1) * num_classes)
        return cls(offsets, pairs % num_classes, counts, unigram, backoff=backoff, power=power)

    @property
    def num_contexts(self) -> int:
        """N."""
        return self.offsets.shape[0] - 1

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
        unique: bool | str = False,
    ) -> Draw:
        """Draw `num_samples` classes for each row of `context`, int64 [*]; see `Sampler.sample`.

        h may be None; it only says how many rows there are. `shared` draws come
        from the mean of the contexts' distributions. `unique=True` or "tf" draws distinct classes: `unique(...).draw`.
        """
        if unique is not False:
            mode = "inclusion" if unique is True else unique
            return self.unique(
                num_samples, h=h, shared=shared, key=key, exclude=exclude, context=context, batch_size=batch_size,
                mode=mode,
            ).draw  # fmt: skip
        count = self._check_count(num_samples)
        if shared:
            self._check_context(h, context, batch_size)
            return self._sample_shared(h, count, key, exclude, context, batch_size)
        rows = self._check_context(h, context, batch_size)
        excluded = self._excluded(exclude, rows)
        pair = key_tensor(self._op, key, rows.device)
        return Draw(*call(ops.bigram_sample, pair, rows, count, *self._tables(), *excluded))

    @torch.no_grad()
    def unique(
        self,
        num_samples: int,
        *,
        h: Tensor | None = None,
        shared: bool = False,
        key: Key | Tensor | None = None,
        exclude: Exclude | None = None,
        context: Tensor | None = None,
        batch_size: int | None = None,
        mode: str = "inclusion",
    ) -> UniqueDraw:
        """Draw `num_samples` *distinct* classes; see `StaticSampler.unique`.

        Every row needs that many classes of a positive probability: with `backoff=0` only what followed its context.
        `shared` draws are those of the mean of the contexts' distributions.

        Example:
            >>> import torch, samplex_cuda as sx
            >>> sampler = sx.samplers.Bigram([0, 2, 2], [1, 2], [3, 1], unigram=[1, 1, 2], backoff=0.2)
            >>> sampler.unique(3, context=torch.tensor([0, 1])).draw.ids.sort().values
            tensor([[0, 1, 2],
                    [0, 1, 2]])
        """
        count = self._check_count(num_samples)
        check_choice(self._op, "unique mode", mode, ("inclusion", "tf"))
        if count > self.num_classes:
            raise ValueError(f"{self._op}: num_samples must be at most {self.num_classes} with unique, got {count}")
        rows = self._check_context(h, context, batch_size)
        every = torch.arange(self.num_classes, device=rows.device)
        pair = key_tensor(self._op, key, rows.device)
        if shared:
            self._check_shared(exclude)
            if rows.shape[0] == 0:
                raise ValueError(f"{self._op}: context must have at least one id with shared=True and unique, got none")

            def draw(key: Tensor, count: int) -> tuple[Tensor, Tensor]:
                drawn = self._sample_shared(None, count, key, None, rows, None)
                return drawn.ids[None], drawn.log_q[None]

            def law(row: int) -> Tensor:
                return self.log_prob_shared(None, every, context=rows)

            found = draw_unique(DrawSource(self._op, self.num_classes, draw, law), pair, 1, count, mode)
            return UniqueDraw(Draw(found.draw.ids[0], found.draw.log_q[0], False), found.level[0])
        flat, offsets = self._excluded(exclude, rows)

        def draw_rows(key: Tensor, count: int) -> tuple[Tensor, Tensor]:
            drawn: tuple[Tensor, Tensor] = call(ops.bigram_sample, key, rows, count, *self._tables(), flat, offsets)
            return drawn

        def law_of(row: int) -> Tensor:
            excluded = excluded_of(flat, offsets, row)
            out: Tensor = call(ops.bigram_log_prob, every[None], rows[row : row + 1], *self._tables(), excluded, None)[
                0
            ]
            return out

        source = DrawSource(self._op, self.num_classes, draw_rows, law_of)
        return draw_unique(source, pair, rows.shape[0], count, mode)

    def log_inclusion(
        self, ids: Tensor, level: Tensor, mode: str = "inclusion", *, context: Tensor | None = None
    ) -> Tensor:
        """Log-probability that classes are among distinct draws, float64; see `StaticSampler.log_inclusion`.

        Args:
            ids: int64 [B, n].
            level: float64 [B], from `unique` without `shared`.
            mode: as in `unique`.
            context: int64 [B].
        """
        check_choice(self._op, "mode", mode, ("inclusion", "tf"))
        return log_inclusion(self.log_prob(None, ids, context=context), level, mode)

    def log_prob(
        self, h: Tensor | None, ids: Tensor, *, exclude: Exclude | None = None, context: Tensor | None = None
    ) -> Tensor:
        """Log-probability of given ids, the same numbers as the log_q of a draw; see `Sampler.log_prob`."""
        check_int64(self._op, "ids", ids)
        rows = self._check_context(h, context, None)
        wanted, single = self._wanted(ids, rows.shape[0])
        out = call(ops.bigram_log_prob, wanted, rows, *self._tables(), *self._excluded(exclude, rows))
        return out.squeeze(1) if single else out

    def log_prob_all(self, h: Tensor | None = None, *, context: Tensor | None = None) -> Tensor:
        """Log-probability of every class, [B, C] float32."""
        rows = self._check_context(h, context, None)
        ids = torch.arange(self.num_classes, device=rows.device).expand(rows.shape[0], -1).contiguous()
        return call(ops.bigram_log_prob, ids, rows, *self._tables())

    def update(self, ids: Tensor, rows: Tensor) -> None:
        """Nothing to do: the distribution does not depend on the class table."""

    def rebuild(self, weight: Tensor) -> None:
        """Nothing to do: the distribution does not depend on the class table."""

    def over(self, num_classes: int, live: Tensor | None = None) -> Bigram:
        """See `Sampler.over`. New classes have followed nothing; if contexts are classes, new ones have no counts."""
        self._check_size(num_classes, live)
        starts = self.offsets.cpu().numpy()
        contexts = np.repeat(np.arange(self.num_contexts), np.diff(starts))
        # The sums of context c begin at offsets[c] + c: between two rows there is one number more.
        counts = np.diff(self.pair_prefix.cpu().numpy())
        first = np.arange(contexts.shape[0]) + contexts
        counts, ids = counts[first].astype(np.float64), self.pair_ids.cpu().numpy()
        kept = ids < num_classes
        if live is not None:
            kept &= live.cpu().numpy()[np.minimum(ids, num_classes - 1)]
        number = num_classes if self.num_contexts == self.num_classes else self.num_contexts
        kept &= contexts < number
        offsets = np.searchsorted(contexts[kept], np.arange(number + 1)) if number else np.zeros(1, np.int64)
        backoff = np.ones(number)  # of a context without counts it does not matter
        same = min(number, self.num_contexts)
        backoff[:same] = self.backoff.cpu().numpy()[:same]
        unigram = live_weights(self.prefix.diff().double().cpu(), num_classes, live)
        made = Bigram(offsets, ids[kept], counts[kept], unigram, backoff=backoff).to(self.table.device)
        made.power = self.power
        return made

    def _tables(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        return (
            self.table, self.prefix, self.offsets, self.pair_ids, self.pair_table, self.pair_prefix, self.backoff,
        )  # fmt: skip

    def _check_context(self, h: Tensor | None, context: Tensor | None, batch_size: int | None) -> Tensor:
        """context as [B]."""
        if context is None:
            raise ValueError("bigram: context must be int64 [*], one id for each row of h, got None")
        rows = check_int64(self._op, "context", context).reshape(-1).contiguous()
        if rows.device != self.table.device:
            raise ValueError(f"bigram: context must be on {self.table.device}, where the tables are, got {rows.device}")
        if h is not None or batch_size is not None:
            batch = self._check_batch(h, batch_size, None)
            if batch != rows.shape[0]:
                raise ValueError(f"bigram: context must have {batch} ids, one for each row, got {describe(context)}")
        return rows

    def _stored_error(self, found: dict[str, Any]) -> str | None:
        return bigram_error(found, _LEAST_BACKOFF)

    def _stored_classes(self, found: dict[str, Any]) -> int | None:
        return found["table"].shape[0]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if self._refuses(state_dict, prefix, args[-1]):
            return
        # Tables of other sizes are as good: the buffers take the shapes of what is loaded.
        if all(prefix + name in state_dict for name in _BUFFERS):
            for name in _BUFFERS:
                own, value = self.get_buffer(name), state_dict[prefix + name]
                if own.shape != value.shape:
                    setattr(self, name, torch.empty_like(value, device=own.device))
            self.num_classes = self.table.shape[0]
        super(Sampler, self)._load_from_state_dict(state_dict, prefix, *args)

    def _apply(self, fn: Any, recurse: bool = True) -> Bigram:
        self._apply_keeping_dtypes(fn, recurse)
        return self

    def extra_repr(self) -> str:
        """Sizes."""
        return (
            f"num_classes={self.num_classes}, num_contexts={self.num_contexts}, pairs={self.pair_ids.shape[0]}, "
            f"power={self.power:g}"
        )


def _merge(
    starts: np.ndarray, classes: np.ndarray, values: np.ndarray, num_classes: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """CSR with the classes of each context ascending, equal pairs added up, counts of zero dropped."""
    contexts = starts.shape[0] - 1
    row = np.repeat(np.arange(contexts), np.diff(starts))
    order = np.lexsort((classes, row))
    row, classes, values = row[order], classes[order], values[order]
    kept = values > 0
    row, classes, values = row[kept], classes[kept], values[kept]
    if row.size:
        new = np.r_[True, (row[1:] != row[:-1]) | (classes[1:] != classes[:-1])]
        values = np.add.reduceat(values, np.flatnonzero(new))
        row, classes = row[new], classes[new]
    offsets = np.searchsorted(row, np.arange(contexts + 1)).astype(np.int64)
    return offsets, np.ascontiguousarray(classes, dtype=np.int64), np.ascontiguousarray(values, dtype=np.float64)


def _array(x: Any) -> np.ndarray:
    if isinstance(x, Tensor):
        x = x.detach().cpu()
        return (x.double() if x.is_floating_point() else x).numpy()
    return np.asarray(x)


def _integers(name: str, x: Any) -> np.ndarray:
    array = _array(x)
    if array.size == 0:
        array = array.astype(np.int64)
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise TypeError(f"bigram: {name} must be integers [n], got {describe(array)}")
    return array.astype(np.int64)


def _numbers(name: str, x: Any, scalar: bool = False) -> np.ndarray:
    array = _array(x)
    if array.size == 0:
        array = array.astype(np.float64)
    if array.dtype.kind not in "iufb" or not (array.ndim == 1 or (scalar and array.ndim == 0)):
        raise TypeError(f"bigram: {name} must be numbers [n], got {describe(array)}")
    values = array.astype(np.float64)
    bad = ~(np.isfinite(values) & (values >= 0))
    if bad.any():
        raise ValueError(f"bigram: {name} must be finite and not negative, got {values[bad].flat[0]}")
    return values


def _short(x: np.ndarray) -> str:
    return str(x.tolist()) if x.size <= 6 else f"{x[0]} … {x[-1]}"
