"""Samplers whose distribution does not depend on the query: Uniform, LogUniform, Unigram."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from samplex_cuda._checks import call, check_choice, check_data, check_int, check_number, describe
from samplex_cuda.draw import Draw
from samplex_cuda.ops import static_sample as ops
from samplex_cuda.ops.loss_types import StaticLaw
from samplex_cuda.ops.subset_sample import subset_sample
from samplex_cuda.rng import Key, key_tensor
from samplex_cuda.samplers.base import Exclude, Sampler, check_int64, check_live
from samplex_cuda.samplers.stored import alias_error, shape_error
from samplex_cuda.samplers.unique import DrawSource, UniqueDraw, draw_unique, excluded_of, log_inclusion

__all__ = ["DeferredUnigram", "LogUniform", "StaticSampler", "Uniform", "Unigram"]

MAX_CLASSES = 1 << 52

_uniform_sample = torch.ops.samplex.uniform_sample.default
_log_uniform_sample = torch.ops.samplex.log_uniform_sample.default
_alias_sample = torch.ops.samplex.alias_sample.default


_UNIFORM, _LOG_UNIFORM = StaticLaw(0), StaticLaw(1)


class StaticSampler(Sampler):
    """What the static samplers share. `h` only says how many rows there are; `context` is not used.

    Example:
        >>> import samplex_cuda as sx
        >>> isinstance(sx.samplers.LogUniform(10), sx.samplers.StaticSampler)
        True
    """

    conditional = False

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self._check_classes(num_classes)
        self.num_classes = num_classes
        self._collision: float | None = None
        # Follows .to(device), so that the sampler knows where to draw when there is no h.
        self.register_buffer("_anchor", torch.empty(0), persistent=False)

    def _check_classes(self, num_classes: int) -> None:
        check_int(self._op, "num_classes", num_classes, 1, MAX_CLASSES)

    def _sample_op(
        self, key: Tensor, batch: int, count: int, exclude: Tensor | None, offsets: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def _log_prob_op(self, ids: Tensor, exclude: Tensor | None, offsets: Tensor | None) -> Tensor:
        raise NotImplementedError

    def law(self) -> StaticLaw:
        """The distribution as a loss takes it that draws by itself (`Loss.forward_static`)."""
        raise NotImplementedError

    def _device(self, *tensors: object) -> torch.device:
        for t in tensors:
            if isinstance(t, Tensor):
                return t.device
        return self.get_buffer("_anchor").device

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
        """Draw `num_samples` classes for each row, or once for the batch; see `Sampler.sample`.

        Only the number of rows of `h` matters: it may be None, with `batch_size` (needless where `shared`).
        `unique=True` or "tf" draws distinct classes: `unique(...).draw`.

        Example:
            >>> import torch, samplex_cuda as sx
            >>> sampler = sx.samplers.Uniform(4)
            >>> target = torch.tensor([0, 3])
            >>> draw = sampler.sample(None, 100, exclude=target, key=sx.Key(1))
            >>> bool((draw.ids == target[:, None]).any()), draw.log_q[0].exp()[:3]
            (False, tensor([0.3333, 0.3333, 0.3333]))
            >>> sampler.sample(None, 6, shared=True).ids.shape
            torch.Size([6])
        """
        if unique is not False:
            mode = "inclusion" if unique is True else unique
            return self.unique(
                num_samples, h=h, shared=shared, key=key, exclude=exclude, batch_size=batch_size, mode=mode
            ).draw
        count = self._check_count(num_samples)
        if shared:
            self._check_shared(exclude)
            if h is not None or batch_size is not None:
                self._check_batch(h, batch_size, None)
            pair = key_tensor(self._op, key, self._device(h, key))
            ids, log_q = call(self._sample_op, pair, 1, count, None, None)
            return Draw(ids[0], log_q[0])
        if exclude is not None and not isinstance(exclude, Tensor | tuple | list):
            raise TypeError(
                f"{self._op}: exclude must be a tensor or a pair (offsets, ids), got {type(exclude).__name__}"
            )
        batch = self._check_batch(h, batch_size, exclude)
        device = self._device(h, exclude, *(exclude if isinstance(exclude, tuple | list) else ()), key)
        flat, offsets = ops.sort_exclude(self._check_exclude(exclude, device, batch))
        pair = key_tensor(self._op, key, device)
        return Draw(*call(self._sample_op, pair, batch, count, flat, offsets))

    @torch.no_grad()
    def unique(
        self,
        num_samples: int,
        *,
        h: Tensor | None = None,
        shared: bool = False,
        key: Key | Tensor | None = None,
        exclude: Exclude | None = None,
        batch_size: int | None = None,
        mode: str = "inclusion",
    ) -> UniqueDraw:
        """Draw `num_samples` *distinct* classes, with the probability that each is among them.

        Mode "inclusion" draws until m + 1 distinct classes have come, each try after a random time of mean 1. The first
        m are the draw; given the time tau of the last, class c is among them with probability 1 - exp(-p_c tau), and
        sums weighted by one over that are unbiased. Mode "tf" is what TensorFlow's candidate samplers do by default:
        draw until m distinct classes have come after T tries, and take 1 - (1 - p)^T for their expected counts. That is
        biased, since T depends on the draw.

        Args:
            num_samples: m, at most the number of classes with a positive probability (and not excluded).
            h: as in `sample`; only its number of rows matters.
            shared: as in `sample`.
            key: as in `sample`.
            exclude: as in `sample`.
            batch_size: as in `sample`.
            mode: "inclusion" or "tf".

        Returns:
            The draw, its log_q being log(inclusion) - log m, and tau or T. On a GPU the host waits for the device.

        Example:
            >>> import torch, samplex_cuda as sx
            >>> ids = sx.samplers.LogUniform(50).unique(8, exclude=torch.tensor([0, 1])).draw.ids
            >>> ids.shape, [row.unique().shape[0] for row in ids]
            (torch.Size([2, 8]), [8, 8])
        """
        count = self._check_count(num_samples)
        check_choice(self._op, "unique mode", mode, ("inclusion", "tf"))
        if count > self.num_classes:
            raise ValueError(f"{self._op}: num_samples must be at most {self.num_classes} with unique, got {count}")
        if shared:
            self._check_shared(exclude)
            pair = key_tensor(self._op, key, self._device(h, key))
            found = draw_unique(self._source(pair.device, 1, None, None), pair, 1, count, mode)
            return UniqueDraw(Draw(found.draw.ids[0], found.draw.log_q[0], False), found.level[0])
        batch = self._check_batch(h, batch_size, exclude)
        device = self._device(h, exclude, *(exclude if isinstance(exclude, tuple | list) else ()), key)
        flat, offsets = ops.sort_exclude(self._check_exclude(exclude, device, batch))
        pair = key_tensor(self._op, key, device)
        return draw_unique(self._source(device, batch, flat, offsets), pair, batch, count, mode)

    def _source(self, device: torch.device, batch: int, flat: Tensor | None, offsets: Tensor | None) -> DrawSource:
        def draw(key: Tensor, count: int) -> tuple[Tensor, Tensor]:
            drawn: tuple[Tensor, Tensor] = call(self._sample_op, key, batch, count, flat, offsets)
            return drawn

        def law(row: int) -> Tensor:
            every = torch.arange(self.num_classes, device=device)
            out: Tensor = call(self._log_prob_op, every[None], excluded_of(flat, offsets, row), None)[0]
            return out

        return DrawSource(self._op, self.num_classes, draw, law)

    def log_inclusion(self, ids: Tensor, level: Tensor, mode: str = "inclusion") -> Tensor:
        """Log-probability that classes are among distinct draws, float64: of a target, for TensorFlow's correction.

        Args:
            ids: int64 [..., n].
            level: float64 of the leading shape, from `unique`.
            mode: as in `unique`.
        """
        check_choice(self._op, "mode", mode, ("inclusion", "tf"))
        return log_inclusion(self.log_prob_shared(None, ids), level, mode)

    def log_prob(
        self, h: Tensor | None, ids: Tensor, *, exclude: Exclude | None = None, context: Tensor | None = None
    ) -> Tensor:
        """Log-probability of given ids; see `Sampler.log_prob`. The same numbers as the log_q of a draw.

        Without h and exclude, 1-D ids count as one per row: [B] -> [B].

        Example:
            >>> import torch, samplex_cuda as sx
            >>> sx.samplers.LogUniform(3).log_prob(None, torch.tensor([0, 1, 2])).exp()
            tensor([0.5000, 0.2925, 0.2075])
        """
        check_int64(self._op, "ids", ids)
        if ids.dim() not in (1, 2):
            raise ValueError(f"{self._op}: ids must be [B], [B, n] or [n], got {describe(ids)}")
        for name, t in (("h", h), ("ids", ids)):
            if isinstance(t, Tensor) and t.device != self._device(h, ids):
                raise ValueError(f"{self._op}: {name} must be on {self._device(h, ids)}, got {t.device}")
        batch = ids.shape[0] if h is None and exclude is None else self._check_batch(h, None, exclude)
        flat, offsets = ops.sort_exclude(self._check_exclude(exclude, ids.device, batch))
        if ids.dim() == 2:
            if ids.shape[0] != batch:
                raise ValueError(f"{self._op}: ids must be [B, n] with B = {batch}, got {describe(ids)}")
            return call(self._log_prob_op, ids.contiguous(), flat, offsets)
        if ids.shape[0] == batch:
            return call(self._log_prob_op, ids.unsqueeze(1).contiguous(), flat, offsets).squeeze(1)
        if exclude is None:  # the same for every row: once
            return call(self._log_prob_op, ids.unsqueeze(0).contiguous(), None, None).expand(batch, -1)
        return call(self._log_prob_op, ids.expand(batch, -1).contiguous(), flat, offsets)

    def log_prob_shared(self, h: Tensor | None, ids: Tensor, *, context: Tensor | None = None) -> Tensor:
        """Log-probability of given ids of any shape under the distribution of shared draws: that of every row."""
        check_int64(self._op, "ids", ids)
        return call(self._log_prob_op, ids.reshape(1, -1).contiguous(), None, None).reshape(ids.shape)

    def log_prob_all(self, h: Tensor | None = None) -> Tensor:
        """Log-probability of every class: [B, C], a view of one row of C numbers.

        Example:
            >>> import samplex_cuda as sx
            >>> sx.samplers.Unigram([1, 0, 3]).log_prob_all().exp()
            tensor([[0.2500, 0.0000, 0.7500]])
        """
        batch = 1 if h is None else self._check_batch(h, None, None)
        ids = torch.arange(self.num_classes, device=self._device(h))
        return call(self._log_prob_op, ids.unsqueeze(0), None, None).expand(batch, -1)

    def resize(self, num_classes: int) -> None:
        """The same kind of distribution over another number of classes, in place.

        Args:
            num_classes: the new C. New classes of a `Unigram` weigh as much as the rarest one it can draw.

        Example:
            >>> import samplex_cuda as sx
            >>> sampler = sx.samplers.Uniform(10)
            >>> sampler.resize(12)
            >>> sampler.num_classes
            12
        """
        self._check_classes(num_classes)
        self.num_classes, self._collision = num_classes, None

    def over(self, num_classes: int, live: Tensor | None = None) -> StaticSampler:
        """A sampler of the same kind over another number of classes, of which only some are drawn.

        Args:
            num_classes: the new C.
            live: bool [C], the classes that are drawn; None: all.

        Returns:
            `Uniform` and `LogUniform` stay what they are while all classes are live; else a `Unigram` of the same
            probabilities over the live ones. A live class that this sampler does not draw gets the weight of the
            rarest one that it does.

        Example:
            >>> import torch, samplex_cuda as sx
            >>> sampler = sx.samplers.Uniform(4).over(5, torch.tensor([True, False, True, True, True]))
            >>> sampler.log_prob_all().exp()
            tensor([[0.2500, 0.0000, 0.2500, 0.2500, 0.2500]])
        """
        self._check_classes(num_classes)
        device = self._device()
        if live is None:
            return type(self)(num_classes).to(device)
        check_live(self._op, num_classes, live)
        whole = self if num_classes == self.num_classes else type(self)(num_classes)
        return Unigram(live_weights(whole.log_prob_all()[0].double().exp().cpu(), num_classes, live, False)).to(device)

    def collision(self) -> float:
        """The probability that two draws are of one class, sum of q squared."""
        if self._collision is None:
            self._collision = self._sum_of_squares()
        return self._collision

    def _sum_of_squares(self) -> float:
        raise NotImplementedError

    def update(self, ids: Tensor, rows: Tensor) -> None:
        """Nothing to do: a static distribution does not depend on the class table."""

    def rebuild(self, weight: Tensor) -> None:
        """Nothing to do: a static distribution does not depend on the class table."""

    def extra_repr(self) -> str:
        """The number of classes."""
        return f"{self.num_classes}"


def live_weights(weights: Tensor, num_classes: int, live: Tensor | None = None, revive: bool = True) -> Tensor:
    """Weights of classes over another number of them: new ones weigh as much as the rarest, others than `live` 0.

    Args:
        weights: float64 [n] on the CPU, not all 0.
        num_classes: the new C.
        live: bool [C]; None: all.
        revive: whether live classes of weight 0 get the weight of the rarest one, too.

    Example:
        >>> import torch
        >>> from samplex_cuda.samplers.static import live_weights
        >>> live_weights(torch.tensor([4.0, 0.0, 2.0]), 4, torch.tensor([True, True, False, True]))
        tensor([4., 2., 0., 2.])
    """
    rarest = float(weights[weights > 0].min())
    weights = torch.cat([weights, weights.new_full((max(0, num_classes - len(weights)),), rarest)])[:num_classes]
    if revive:
        weights = torch.where(weights > 0, weights, rarest)
    return weights if live is None else torch.where(live.cpu(), weights, 0.0)


class Uniform(StaticSampler):
    """Every class with probability 1 / C.

    Args:
        num_classes: C, up to 2^52.

    Example:
        >>> import torch, samplex_cuda as sx
        >>> draw = sx.samplers.Uniform(1_000_000).sample(torch.randn(8, 16), 64)
        >>> draw.ids.shape, draw.ids.dtype
        (torch.Size([8, 64]), torch.int64)
    """

    _op = "uniform"

    def _sample_op(
        self, key: Tensor, batch: int, count: int, exclude: Tensor | None, offsets: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return _uniform_sample(key, batch, count, self.num_classes, exclude, offsets)

    def law(self) -> StaticLaw:
        """See `StaticSampler.law`."""
        return _UNIFORM

    def _log_prob_op(self, ids: Tensor, exclude: Tensor | None, offsets: Tensor | None) -> Tensor:
        return ops.uniform_log_prob(ids, self.num_classes, exclude, offsets)

    def _sum_of_squares(self) -> float:
        return 1.0 / self.num_classes

    def subset(
        self,
        num_samples: int,
        *,
        exclude: Tensor | None = None,
        key: Key | Tensor | None = None,
        batch_size: int | None = None,
    ) -> Draw:
        """Draw `num_samples` *distinct* classes for each row: every such subset is equally likely.

        log_q is that of one draw, -log(classes left): with it a loss corrects by log(classes left / m), the inverse of
        the share of the classes that is in the subset, and is exact where that is all of them.

        Args:
            num_samples: m, at most the number of classes left.
            exclude: int64 [B], the class a row must not draw; -1 for none.
            key: as in `sample`.
            batch_size: B, where `exclude` does not say it.

        Example:
            >>> import torch, samplex_cuda as sx
            >>> draw = sx.samplers.Uniform(4).subset(3, exclude=torch.tensor([0, 2]), key=sx.Key(1))
            >>> draw.ids.sort(1).values, draw.independent
            (tensor([[1, 2, 3],
                    [0, 1, 3]]), False)
        """
        count = self._check_count(num_samples)
        batch = self._check_batch(None, batch_size, exclude)
        device = self._device(exclude, key)
        if exclude is not None:
            check_int64(self._op, "exclude", exclude)
            if exclude.dim() != 1 or exclude.shape[0] != batch:
                raise ValueError(f"{self._op}: exclude must be [B] with B = {batch}, got {describe(exclude)}")
        most = self.num_classes - (exclude is not None)
        if count > most:
            raise ValueError(f"{self._op}: num_samples must be at most {most} for distinct draws, got {count}")
        pair = key_tensor(self._op, key, device)
        if exclude is not None:
            exclude = exclude.contiguous()
        ids = call(subset_sample, pair, batch, count, self.num_classes, exclude)
        left = torch.full((batch, 1), self.num_classes, dtype=torch.float64, device=device)
        if exclude is not None:
            left -= (exclude >= 0).double()[:, None]
        return Draw(ids, (-left.log()).float().expand(batch, count).contiguous(), independent=False)


class LogUniform(StaticSampler):
    """P(k) = log((k+2)/(k+1)) / log(C+1): about Zipf's law, for classes numbered by decreasing frequency.

    Closed form, no table: memory and time do not depend on C. Class probabilities are right to a relative C * 5e-16.

    Args:
        num_classes: C, up to 2^52.

    Example:
        >>> import samplex_cuda as sx
        >>> draw = sx.samplers.LogUniform(10**9).sample(None, 3, batch_size=2, key=sx.Key(0))
        >>> draw.ids.shape, bool(draw.log_q.isfinite().all())
        (torch.Size([2, 3]), True)
    """

    _op = "log_uniform"

    def _sample_op(
        self, key: Tensor, batch: int, count: int, exclude: Tensor | None, offsets: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return _log_uniform_sample(key, batch, count, self.num_classes, exclude, offsets)

    def law(self) -> StaticLaw:
        """See `StaticSampler.law`."""
        return _LOG_UNIFORM

    def _log_prob_op(self, ids: Tensor, exclude: Tensor | None, offsets: Tensor | None) -> Tensor:
        return ops.log_uniform_log_prob(ids, self.num_classes, exclude, offsets)

    def _sum_of_squares(self) -> float:
        k = np.arange(min(self.num_classes, 1 << 16), dtype=np.float64)  # the rest adds less than 1 / 2^16
        return float(np.square(np.log1p(1.0 / (k + 1.0))).sum()) / float(np.log1p(float(self.num_classes))) ** 2


class Unigram(StaticSampler):
    """P(k) proportional to counts[k] ** power, by an alias table: one memory access per draw for any C.

    The weights are turned into integers whose sum is just below 2^61, so that the table, the distribution after an
    exclusion and log_q agree exactly; counts with a sum below 2^53 and power 1 keep their exact ratios. A class of
    count 0 is never drawn; a positive weight below 2^-61 of the sum counts as that much. 40 bytes per class.

    Args:
        counts: [C] non-negative numbers: a tensor, an array or a list.
        power: exponent on the counts; 0 makes every class with a positive count equally likely.

    Example:
        >>> import torch, samplex_cuda as sx
        >>> sampler = sx.samplers.Unigram([8, 0, 1, 1], power=1.0)
        >>> sampler.log_prob_all().exp()
        tensor([[0.8000, 0.0000, 0.1000, 0.1000]])
        >>> sampler.sample(None, 4, exclude=torch.tensor([0]), key=sx.Key(0)).log_q.exp()
        tensor([[0.5000, 0.5000, 0.5000, 0.5000]])
    """

    _op = "unigram"
    table: Tensor
    prefix: Tensor

    def __init__(self, counts: Tensor | np.ndarray | Sequence[float], power: float = 1.0) -> None:
        device = counts.device if isinstance(counts, Tensor) else torch.device("cpu")
        values = self._check_counts(counts)
        power = check_number("unigram", "power", power, 0.0)
        super().__init__(values.shape[0])
        self.power = power
        weights = values if power == 1.0 else self._raise_to_power(values, self.power)
        table, prefix = ops.build_alias(weights)
        self.register_buffer("table", table.to(device))
        self.register_buffer("prefix", prefix.to(device))

    @staticmethod
    def deferred(num_classes: int, counts: Callable[[Tensor], Tensor]) -> DeferredUnigram:
        """A `Unigram` for `head.shard` that no rank ever holds as a whole.

        Args:
            num_classes: C.
            counts: gives the counts [n] of some classes, int64 [n]. A rank asks for those that it holds; a class must
                have the same count whoever asks.

        Example:
            >>> import samplex_cuda as sx
            >>> sampler = sx.samplers.Unigram.deferred(10**8, lambda ids: 1.0 / (ids + 1.0))
            >>> sampler
            DeferredUnigram(100000000)
        """
        return DeferredUnigram(num_classes, counts)

    def resize(self, num_classes: int) -> None:
        """See `StaticSampler.resize`."""
        self._check_classes(num_classes)
        other = self.over(num_classes, revive=False)
        self.table, self.prefix = other.table, other.prefix
        self.num_classes, self._collision = num_classes, None

    def over(self, num_classes: int, live: Tensor | None = None, revive: bool = True) -> Unigram:
        """See `StaticSampler.over`.

        Args:
            num_classes: the new C.
            live: bool [C], the classes that are drawn; None: all.
            revive: whether live classes of count 0 get the weight of the rarest one; new ones always do.
        """
        self._check_classes(num_classes)
        check_live(self._op, num_classes, live)
        made = Unigram(live_weights(self.prefix.diff().double().cpu(), num_classes, live, revive)).to(self.table.device)
        made.power = self.power
        return made

    @staticmethod
    def _check_counts(counts: Tensor | np.ndarray | Sequence[float]) -> np.ndarray:
        """Counts as float64 [C]."""
        if isinstance(counts, Tensor):
            counts = check_data("unigram", "counts", counts).detach().cpu().double().numpy()
        array = np.asarray(counts)
        if array.dtype.kind not in "iufb":
            raise TypeError(f"unigram: counts must be numbers, got {array.dtype}")
        if array.ndim != 1 or array.shape[0] < 1:
            raise ValueError(f"unigram: counts must be [C] with C >= 1, got {list(array.shape)}")
        values = array.astype(np.float64)
        bad = ~(np.isfinite(values) & (values >= 0))
        if bad.any():
            first = int(bad.argmax())
            raise ValueError(f"unigram: counts must be finite and not negative, got {values[first]} for class {first}")
        if not values.any():
            raise ValueError("unigram: counts must have a positive sum, got all zero")
        return values

    @staticmethod
    def _raise_to_power(values: np.ndarray, power: float) -> np.ndarray:
        # Relative to the largest, so that nothing overflows; what then underflows was below 2^-1000 of it. 0 ** 0 is 0.
        weights = (values / values.max()) ** power
        weights[values == 0] = 0.0
        return weights

    def _device(self, *tensors: object) -> torch.device:
        for t in tensors:
            if isinstance(t, Tensor) and t.device != self.table.device:
                raise ValueError(
                    f"unigram: h, exclude and key must be on {self.table.device}, where the table is, got {t.device}; "
                    "move the sampler with .to(device)"
                )
        return self.table.device

    def _sample_op(
        self, key: Tensor, batch: int, count: int, exclude: Tensor | None, offsets: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return _alias_sample(key, batch, count, self.table, self.prefix, exclude, offsets)

    def law(self) -> StaticLaw:
        """See `StaticSampler.law`."""
        return StaticLaw(2, self.table, self.prefix)

    def _log_prob_op(self, ids: Tensor, exclude: Tensor | None, offsets: Tensor | None) -> Tensor:
        return ops.alias_log_prob(ids, self.table, self.prefix, exclude, offsets)

    def _sum_of_squares(self) -> float:
        share = self.prefix.diff().double() / float(self.prefix[-1])
        return float(share.square().sum())

    def _stored_error(self, found: dict[str, Any]) -> str | None:
        size = (self.num_classes, 4)
        if wrong := shape_error("table", found["table"], size, torch.int64, str(list(size))):
            return f"{wrong}; make the sampler with counts of as many classes"
        return alias_error(("table", "prefix"), found["table"], found["prefix"])

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        self._collision = None
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        """The number of classes and the power."""
        return f"{self.num_classes}, power={self.power}"


class DeferredUnigram(Sampler):
    """What `Unigram.deferred` makes: counts by a function, for a head that is sharded before it draws.

    Args:
        num_classes: C.
        counts: as in `Unigram.deferred`.
    """

    _op = "unigram"
    conditional = False

    def __init__(self, num_classes: int, counts: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        check_int("unigram", "num_classes", num_classes, 1, 1 << 52)
        if not callable(counts):
            raise TypeError(f"unigram: counts must be a function of class ids, got {type(counts).__name__}")
        self.num_classes, self.counts_of = num_classes, counts

    def counts(self, classes: Tensor) -> Tensor:
        """The counts [n] of classes, int64 [n]; checked except for their values."""
        found = self.counts_of(classes)
        if not isinstance(found, Tensor) or found.shape != classes.shape or found.is_complex():
            raise ValueError(f"unigram: counts must give {list(classes.shape)} numbers, got {describe(found)}")
        return found.to(classes.device)

    def sample(self, *_: Any, **__: Any) -> Draw:
        """Not before the head is sharded."""
        raise RuntimeError(
            "unigram: a deferred sampler must be sharded with its head before it draws, got a draw; call head.shard(), "
            "or make Unigram(counts)"
        )

    def extra_repr(self) -> str:
        """The number of classes."""
        return f"{self.num_classes}"
