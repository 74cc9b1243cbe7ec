"""Mixture: draws from several samplers, with the probability under the mixture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from samplex_cuda import _device
from samplex_cuda._checks import check_number, describe
from samplex_cuda.draw import Draw
from samplex_cuda.ops.static_sample import uniform_sample
from samplex_cuda.rng import Key, fold_in, key_tensor
from samplex_cuda.samplers.base import Exclude, Sampler, check_int64, refuse_classes
from samplex_cuda.samplers.stored import shape_error

__all__ = ["Mixture"]

_UNIFORM_BITS = 52


class Mixture(Sampler):
    """q(k) = sum over components of weight * q_c(k): each draw comes from one of them, log_q is that of the mixture.

    A mixture with a little `Uniform` bounds exp(s) / q, and with it the variance of the loss; one with `Unigram` adds
    frequent negatives to hard ones. Components draw as often as the row with most draws from them needs.

    With `exclude` the components are re-weighted by 1 - q_c(excluded), so that the distribution is the conditional one
    exactly; that number is never computed as a difference.

    Args:
        components: pairs (sampler, weight), the weights positive; they are divided by their sum.

    Example:
        >>> import torch, samplex_cuda as sx
        >>> sampler = sx.samplers.Mixture([(sx.samplers.Uniform(4), 1), (sx.samplers.Unigram([1, 0, 0, 3]), 3)])
        >>> sampler.log_prob_all().exp()
        tensor([[0.2500, 0.0625, 0.0625, 0.6250]])
        >>> sampler.log_prob(None, torch.tensor([[0, 1, 2, 3]]), exclude=torch.tensor([3])).exp()
        tensor([[0.6667, 0.1667, 0.1667, 0.0000]])
        >>> sampler.sample(None, 5, shared=True).ids.shape
        torch.Size([5])
    """

    _op = "mixture"
    weights: Tensor

    def __init__(self, components: Sequence[tuple[Sampler, float]]) -> None:
        super().__init__()
        pairs = list(components)
        if not pairs:
            raise ValueError("mixture: components must have at least one pair (sampler, weight), got none")
        for pair in pairs:
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise TypeError(f"mixture: components must be pairs (sampler, weight), got {type(pair).__name__}")
            sampler, weight = pair
            if not isinstance(sampler, Sampler):
                raise TypeError(f"mixture: components must hold samplers, got {type(sampler).__name__}")
            check_number("mixture", "weight", weight, 0.0, open_low=True)
            if sampler.num_classes != pairs[0][0].num_classes:
                raise ValueError(
                    f"mixture: samplers must have num_classes = {pairs[0][0].num_classes}, got {sampler.num_classes}"
                )
        self.num_classes = pairs[0][0].num_classes
        self.samplers = nn.ModuleList(sampler for sampler, _ in pairs)
        weights = torch.tensor([float(weight) for _, weight in pairs], dtype=torch.float64, device="cpu")
        if (default := torch.get_default_device()).type != "meta":
            weights = weights.to(default)
        self.register_buffer("weights", weights / weights.sum())

    @property
    def _needs_context(self) -> bool:  # type: ignore[override]
        return any(sampler._needs_context for sampler in self._parts())

    @property
    def conditional(self) -> bool:  # type: ignore[override]
        """Whether a component has another distribution for each row."""
        return any(sampler.conditional for sampler in self._parts())

    @property
    def follows_rows(self) -> bool:  # type: ignore[override]
        """Whether a component depends on the class table."""
        return any(sampler.follows_rows for sampler in self._parts())

    @property
    def has_bias(self) -> bool:  # type: ignore[override]
        """Whether a component takes the bias of the class table."""
        return any(sampler.has_bias for sampler in self._parts())

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
        """Draw `num_samples` classes for each row, or once for the batch; see `Sampler.sample`."""
        count = self._check_count(num_samples)
        if shared:
            self._check_shared(exclude)
            pair = key_tensor(self._op, key, self._device(h, context, key))
            which = self._choose(pair, self.weights.log()[None], 1, count)[0]
            ids = torch.zeros(count, dtype=torch.int64, device=pair.device)
            for number, sampler in enumerate(self._parts()):
                mine = which == number
                drawn = sampler.sample(
                    h, count, shared=True, key=fold_in(pair, number), context=context, batch_size=batch_size
                ).ids
                ids = torch.where(mine, drawn[(mine.cumsum(0) - 1).clamp_(min=0)] if count else drawn, ids)
            return Draw(ids, self.log_prob_shared(h, ids, context=context))
        batch, device = self._rows(h, context, batch_size, exclude)
        exclude = self._check_exclude(exclude, device, batch)
        pair = key_tensor(self._op, key, device)
        log_weights = self._log_weights(h, exclude, context, batch)
        which = self._choose(pair, log_weights, batch, count)
        ids = torch.zeros((batch, count), dtype=torch.int64, device=device)
        rows = batch if h is None else None
        for number, sampler in enumerate(self._parts()):
            mine = which == number
            order = mine.cumsum(1) - 1  # a component's draws in turn
            most = self._most(mine)
            part = sampler.sample(
                h, most, key=fold_in(pair, number), exclude=exclude, context=context, batch_size=rows
            ).ids
            if most:
                ids = torch.where(mine, part.gather(1, order.clamp_(0, most - 1)), ids)
        return Draw(ids, self._log_q(h, ids, log_weights, exclude, context))

    @torch.no_grad()
    def log_prob(
        self, h: Tensor | None, ids: Tensor, *, exclude: Exclude | None = None, context: Tensor | None = None
    ) -> Tensor:
        """Log-probability of given ids under the mixture, the same numbers as the log_q of a draw."""
        check_int64(self._op, "ids", ids)
        if ids.dim() not in (1, 2):
            raise ValueError(f"mixture: ids must be [B], [B, n] or [n], got {describe(ids)}")
        alone = h is None and exclude is None and context is None
        batch = ids.shape[0] if alone else self._rows(h, context, None, exclude)[0]
        wanted, single = self._wanted(ids, batch)
        exclude = self._check_exclude(exclude, ids.device, batch)
        out = self._log_q(h, wanted, self._log_weights(h, exclude, context, batch), exclude, context)
        return out.squeeze(1) if single else out

    @torch.no_grad()
    def log_prob_shared(self, h: Tensor | None, ids: Tensor, *, context: Tensor | None = None) -> Tensor:
        """Log-probability of given ids of any shape under the mixture of the components' shared distributions."""
        check_int64(self._op, "ids", ids)
        terms = [sampler.log_prob_shared(h, ids, context=context).double() for sampler in self._parts()]
        return (torch.stack(terms, -1) + self.weights.log()).logsumexp(-1).float()

    @torch.no_grad()
    def log_prob_all(self, h: Tensor | None = None, *, context: Tensor | None = None) -> Tensor:
        """Log-probability of every class, [B, C] float32."""
        total: Tensor | None = None
        for sampler, log_weight in zip(self._parts(), self.weights.log(), strict=True):
            every = sampler.log_prob_all(h, context=context) if sampler._needs_context else sampler.log_prob_all(h)
            term = every.double() + log_weight
            total = term if total is None else torch.logaddexp(total, term)
        assert total is not None
        return total.float()

    def update(self, ids: Tensor, rows: Tensor, bias: Tensor | None = None) -> None:
        """Hands the changed rows (and bias) to every component that follows them."""
        for sampler in self._parts():
            sampler.update(ids, rows, bias) if sampler.has_bias else sampler.update(ids, rows)

    def follow(self, ids: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
        """Hands the recorded ids to every component that follows the class table."""
        for sampler in self._parts():
            if sampler.follows_rows:
                sampler.follow(ids, weight, bias if sampler.has_bias else None)

    def follow_interval(self, batch: int, num_samples: int, shared: bool) -> int:
        """The longest of the components that follow the class table."""
        parts = [sampler for sampler in self._parts() if sampler.follows_rows]
        return max((sampler.follow_interval(batch, num_samples, shared) for sampler in parts), default=1)

    def rebuild(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Hands the class table (and bias) to every component that follows it."""
        for sampler in self._parts():
            sampler.rebuild(weight, bias) if sampler.has_bias else sampler.rebuild(weight)

    def over(self, num_classes: int, live: Tensor | None = None) -> Mixture:
        """See `Sampler.over`: each component over these classes, with the weight of before."""
        self._check_size(num_classes, live)
        shares = zip(self._parts(), self.weights.tolist(), strict=True)
        return Mixture([(part.over(num_classes, live), share) for part, share in shares]).to(self.weights.device)

    def _stored_error(self, found: dict[str, Any]) -> str | None:
        weights, count = found["weights"], len(self._parts())
        if wrong := shape_error("weights", weights, (count,), torch.float64, f"[{count}]"):
            return f"{wrong}; make the mixture with the components of the saved one"
        if not bool(((weights > 0) & (weights <= 1)).all()) or abs(float(weights.sum()) - 1.0) > 1e-9:
            return f"weights must be positive with sum 1, got {weights.tolist()}"
        return None

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if not refuse_classes(self, self.num_classes, state_dict, prefix, args[-1]):
            super()._load_from_state_dict(state_dict, prefix, *args)

    def _apply(self, fn: Any, recurse: bool = True) -> Mixture:
        self._apply_keeping_dtypes(fn, recurse)
        return self

    def extra_repr(self) -> str:
        """The weights."""
        return "weights=[" + ", ".join(f"{weight:.4g}" for weight in self.weights.tolist()) + "]"

    # -------------------------------------------------------------------------------------------- parts
    def _parts(self) -> list[Any]:
        return list(self.samplers)

    def _device(self, *tensors: object) -> torch.device:
        for t in tensors:
            if isinstance(t, Tensor):
                return t.device
        return self.weights.device

    def _rows(
        self, h: Tensor | None, context: Tensor | None, batch_size: int | None, exclude: Exclude | None
    ) -> tuple[int, torch.device]:
        """B, from whichever of the arguments say it, and the device."""
        if exclude is not None and not isinstance(exclude, Tensor | tuple | list):
            raise TypeError(f"mixture: exclude must be a tensor or a pair (offsets, ids), got {type(exclude).__name__}")
        if h is None and batch_size is None and self._needs_context and isinstance(context, Tensor):
            batch_size = context.numel()
        if isinstance(exclude, tuple | list) and len(exclude) != 2:
            raise TypeError(f"mixture: exclude must be a tensor or a pair (offsets, ids), got {len(exclude)} parts")
        first = exclude[0] if isinstance(exclude, tuple | list) else exclude
        return self._check_batch(h, batch_size, exclude), self._device(h, context, first)

    def _log_weights(self, h: Tensor | None, exclude: Exclude | None, context: Tensor | None, batch: int) -> Tensor:
        """log weight of each component in each row, [B, K] float64, summing to one; -inf in a row with nothing left."""
        own = self.weights.log()
        if exclude is None:
            return own.expand(batch, -1)
        left = [sampler._log_left(h, exclude, context, batch) for sampler in self._parts()]
        joint = torch.stack(left, 1) + own
        total = joint.logsumexp(1, keepdim=True)
        return torch.where(total == -torch.inf, -torch.inf, joint - total)

    @staticmethod
    def _choose(pair: Tensor, log_weights: Tensor, batch: int, count: int) -> Tensor:
        """Component of each draw, [B, m]; never one of weight zero, unless all are."""
        running = log_weights.exp().cumsum(1)
        running = running / running[:, -1:]  # exactly 1 from the last positive weight on
        bits = uniform_sample(pair, batch, count, 1 << _UNIFORM_BITS)[0]
        uniforms = bits.double().add_(0.5).mul_(2.0**-_UNIFORM_BITS)
        return (uniforms[:, :, None] >= running[:, None, :-1]).sum(2)

    @staticmethod
    def _most(mine: Tensor) -> int:
        """Draws a component must give: as many as the row with most, where asking does not make the host wait."""
        if torch.compiler.is_compiling() or _device.host_waits(mine) or mine.numel() == 0:
            return mine.shape[1]
        return int(mine.sum(1).max())

    def _log_q(
        self, h: Tensor | None, ids: Tensor, log_weights: Tensor, exclude: Exclude | None, context: Tensor | None
    ) -> Tensor:
        """log q [B, n] float32; the first excluded id has probability one in a row with nothing left."""
        terms = [sampler.log_prob(h, ids, exclude=exclude, context=context).double() for sampler in self._parts()]
        out = (torch.stack(terms, 2) + log_weights[:, None, :]).logsumexp(2)
        if exclude is not None:
            # Every component says 0 for the stand-in and -inf for the rest.
            out = torch.where((log_weights == -torch.inf).all(1)[:, None], terms[0], out)
        return out.float()
