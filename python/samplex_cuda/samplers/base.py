"""The surface every sampler has."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import torch
from torch import Tensor

from samplex_cuda import chunking
from samplex_cuda._checks import check_dense, check_int, check_tensor, describe
from samplex_cuda.draw import Draw
from samplex_cuda.ops.static_sample import sort_exclude, uniform_sample
from samplex_cuda.rng import Key, fold_in, key_tensor

__all__ = ["Exclude", "Sampler", "check_live", "distinct_ids", "mark_ids", "restore_dtypes"]

# int64 [B] | [B, P] padded with -1 | CSR pair (offsets [B + 1], ids [nnz])
Exclude: TypeAlias = Tensor | tuple[Tensor, Tensor]
# The same as the ops take it: (exclude, exclude_offsets).
Excluded: TypeAlias = tuple[Tensor | None, Tensor | None]

MAX_BATCH = 1 << 32
MAX_SAMPLES = 1 << 24
_UNIFORM_BITS = 52


# What belongs to a module whatever it computes.
_OF_MODULE = (vars(torch.nn.Module()).keys() | {"_lock"}) - {"_buffers", "_modules"}


def distinct_ids(ids: Tensor, num_classes: int | None) -> Tensor:
    """The distinct ids of [0, num_classes), ascending; None: of all that are not negative.

    Example:
        >>> import torch
        >>> from samplex_cuda.samplers.base import distinct_ids
        >>> distinct_ids(torch.tensor([7, 3, -1, 3, 90]), 10)
        tensor([3, 7])
    """
    if num_classes is not None and ids.device.type == "cpu" and ids.numel() >= num_classes:
        # A mark for each class costs less than a sort of the ids.
        return mark_ids(torch.zeros(num_classes, dtype=torch.bool), ids).nonzero().view(-1)
    found = ids.unique()
    inside = found >= 0
    return found[inside if num_classes is None else inside & (found < num_classes)]


def mark_ids(seen: Tensor, ids: Tensor) -> Tensor:
    """Sets seen [C] bool at these ids; those that are not classes are skipped. On the CPU.

    Example:
        >>> import torch
        >>> from samplex_cuda.samplers.base import mark_ids
        >>> mark_ids(torch.zeros(3, dtype=torch.bool), torch.tensor([2, 7, 2]))
        tensor([False, False,  True])
    """
    flat, classes = ids.reshape(-1), seen.shape[0]
    if flat.numel() == 0:
        return seen
    low, high = flat.aminmax()
    if int(low) < 0 or int(high) >= classes:
        flat = flat[(flat >= 0) & (flat < classes)]
    return seen.index_fill_(0, flat, True)


def check_int64(op: str, name: str, t: object) -> Tensor:
    """`t` if it is an int64 tensor; TypeError otherwise."""
    if not isinstance(t, Tensor):
        raise TypeError(f"{op}: {name} must be an int64 tensor, got {type(t).__name__}")
    if t.dtype != torch.int64:
        raise TypeError(f"{op}: {name} must be int64, got {describe(t)}")
    return check_dense(op, name, t)


def check_live(op: str, num_classes: int, live: Tensor | None) -> None:
    """ValueError unless `live` is None or bool [C] with a class that is drawn.

    Args:
        op: name for the message.
        num_classes: C.
        live: which classes are drawn.

    Example:
        >>> import torch
        >>> from samplex_cuda.samplers.base import check_live
        >>> check_live("tree", 2, torch.tensor([True, False]))
    """
    if live is None:
        return
    if not isinstance(live, Tensor) or live.dtype != torch.bool or live.shape != (num_classes,):
        raise ValueError(f"{op}: live must be [{num_classes}] bool, got {describe(live)}")
    if not bool(live.any()):
        raise ValueError(f"{op}: live must contain at least one class that can be drawn, got none")


def refuse_classes(
    owner: torch.nn.Module, num_classes: int, state_dict: dict[str, Any], prefix: str, errors: list[str]
) -> bool:
    """Whether a state dict brings a sampler inside `owner` another number of classes; `errors` then says which."""
    for name, part in owner.named_modules():
        if not isinstance(part, Sampler):
            continue
        found = part._stored(state_dict, f"{prefix}{name}." if name else prefix)
        try:
            classes = None if found is None else part._stored_classes(found)
        except (AttributeError, IndexError):
            continue  # not a table: the sampler itself refuses it
        if classes is not None and classes != num_classes:
            errors.append(
                f"{part._op}: the state dict has a sampler of {classes} classes, this {type(owner).__name__} has "
                f"{num_classes}: make it with {classes} classes, or load the weights alone "
                f"({{name: t for name, t in state.items() if not name.startswith('{prefix}')}}, strict=False)"
            )
            for own, t in owner.state_dict(prefix=prefix).items():  # what the parts load now leaves them unchanged
                state_dict[own] = t
            return True
    return False


def restore_dtypes(module: torch.nn.Module, kept: dict[str, Tensor]) -> None:
    """Gives buffers back the numbers that a change of dtype has rounded, on the device they are on now.

    Args:
        module: with the buffers.
        kept: what they were, by name.
    """
    for name, t in kept.items():
        now = module.get_buffer(name)
        if now.dtype != t.dtype:
            setattr(module, name, t.to(now.device))


class Sampler(torch.nn.Module):
    """A distribution over classes, which may differ per query.

    Subclasses give `_op` (their name in error messages), `num_classes`, `sample` and `log_prob`.

    Example:
        >>> import samplex_cuda as sx
        >>> isinstance(sx.samplers.Uniform(10), sx.samplers.Sampler)
        True
    """

    _op = "sampler"
    _needs_context = False
    num_classes: int
    follows_rows = (
        False  # whether the distribution depends on the class table, so that `update` and `rebuild` do something
    )
    has_bias = False  # whether they also take the bias of the class table
    conditional = True  # whether each row has its own distribution
    stratifies = False  # whether `sample` takes `stratified`

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
        """Draw `num_samples` classes, for each query or for the whole batch.

        Args:
            h: [*, d] queries; the leading dimensions are flattened to B.
            num_samples: m.
            shared: one set of draws [m] for the whole batch instead of [B, m]. Where each row has its own distribution
                they come from the mean of these distributions, and log_q is of that mean.
            key: where the randomness comes from; see `samplex_cuda.Key`. None: torch's default generator.
            exclude: classes that are not drawn, int64: [B] | [B, P] padded with -1 | CSR (offsets [B + 1], ids). The
                draws follow the distribution conditioned on the other classes, and log_q is of that distribution. A
                row with no class left gets its first excluded id with log_q = 0. Not with `shared`: losses mask shared
                draws.
            context: what some samplers condition on besides h.
            batch_size: B, for samplers that do not look at h and get None.
        """
        raise NotImplementedError

    def log_prob(
        self, h: Tensor | None, ids: Tensor, *, exclude: Exclude | None = None, context: Tensor | None = None
    ) -> Tensor:
        """Log-probability of given ids, float32.

        Args:
            h: [*, d] queries, flattened to B rows.
            ids: int64 [B] | [B, n] | [n] (n other than B: the same ids for every row).
            exclude: as in `sample`; an excluded id has log-probability -inf.
            context: as in `sample`.

        Returns:
            [B] | [B, n] | [B, n].
        """
        raise NotImplementedError

    @torch.no_grad()
    def log_prob_shared(self, h: Tensor | None, ids: Tensor, *, context: Tensor | None = None) -> Tensor:
        """Log-probability of given ids under the distribution of shared draws: the mean of the rows' distributions.

        Args:
            h: [*, d] queries, flattened to B rows; one with NaN or inf is left out of the distribution.
            ids: int64 of any shape.
            context: as in `sample`.

        Returns:
            float32, the shape of `ids`.

        Example:
            >>> import torch, samplex_cuda as sx
            >>> tree = sx.samplers.Tree(torch.ones(2, 1), torch.zeros(2), torch.tensor([0, 1]))
            >>> tree.log_prob_shared(torch.tensor([[3.0], [-3.0]]), torch.tensor([0, 1])).exp()
            tensor([0.5000, 0.5000])
        """
        check_int64(self._op, "ids", ids)
        rows, there = self._lawful(h, context)
        flat = ids.reshape(1, -1)
        out = torch.empty(flat.shape[1], dtype=torch.float32, device=ids.device)
        some = max(1, chunking.probabilities_at_once(ids.device) // max(1, rows))
        for begin in range(0, flat.shape[1], some):
            part = flat[:, begin : begin + some].expand(rows, -1)
            log_p = self.log_prob(h, part, context=context).double()
            log_p = log_p.masked_fill(~there[:, None], -torch.inf)
            out[begin : begin + some] = (log_p.logsumexp(0) - there.sum().double().log()).float()
        return out.reshape(ids.shape)

    def _sample_shared(
        self,
        h: Tensor | None,
        count: int,
        key: Key | Tensor | None,
        exclude: Exclude | None,
        context: Tensor | None,
        batch_size: int | None,
    ) -> Draw:
        """Draws [m] from the mean of the rows' distributions: a random row, then a class of that row."""
        self._check_shared(exclude)
        rows, there = self._lawful(h, context)
        if h is not None:
            self._check_batch(h, batch_size, None)
        device = there.device
        pair = key_tensor(self._op, key, device)
        if rows == 0 or count == 0:
            return Draw(*_no_law(count, device))
        bits = uniform_sample(fold_in(pair, 0), 1, count, 1 << _UNIFORM_BITS)[0][0]
        place = (bits.double().mul_(2.0**-_UNIFORM_BITS) * there.sum()).long()
        which = torch.argsort(there.logical_not(), stable=True)[place]  # rows with a distribution first
        queries = None if h is None else h.reshape(rows, h.shape[-1])[which]
        given = None
        if context is not None:
            given = check_dense(self._op, "context", check_tensor(self._op, "context", context, "[B]")).reshape(-1)[
                which
            ]
        number = None if h is not None else count
        ids = self.sample(queries, 1, key=fold_in(pair, 1), context=given, batch_size=number).ids[:, 0]
        return Draw(ids, self.log_prob_shared(h, ids, context=context))

    def _check_shared(self, exclude: Exclude | None) -> None:
        if exclude is not None:
            raise ValueError(
                f"{self._op}: exclude must be None with shared=True (shared draws are masked by the loss instead), "
                f"got {type(exclude).__name__}"
            )

    def _lawful(self, h: Tensor | None, context: Tensor | None) -> tuple[int, Tensor]:
        """B, and which rows have a distribution: those without nan and inf."""
        if h is not None:
            rows = self._rows_of(h)
            return rows, check_dense(self._op, "h", h).reshape(rows, h.shape[-1]).isfinite().all(1)
        if not isinstance(context, Tensor):
            raise ValueError(f"{self._op}: h must be a tensor [*, d] with shared=True, got None")
        rows = context.numel()
        return rows, torch.ones(rows, dtype=torch.bool, device=context.device)

    def sample_and_score(
        self,
        h: Tensor | None,
        num_samples: int,
        ids: Tensor,
        *,
        shared: bool = False,
        key: Key | Tensor | None = None,
        context: Tensor | None = None,
    ) -> tuple[Draw, Tensor]:
        """`sample` and the `log_prob` of given ids in one call, which shares what both need of h.

        What a step of `negative_sampling` takes: draws from the unconditional distribution, and log p_n of the targets.

        Args:
            h: [*, d] queries, flattened to B rows.
            num_samples: m.
            ids: int64 [B] | [B, n], as in `log_prob`.
            shared: as in `sample`; the log-probabilities are then also of the distribution that the batch shares.
            key: as in `sample`.
            context: as in `sample`.

        Returns:
            The draw, and the log-probabilities in the shape of `ids`, float32.

        Example:
            >>> import torch, samplex_cuda as sx
            >>> h, target = torch.randn(4, 16), torch.tensor([1, 2, 3, 4])
            >>> draw, target_log_q = sx.samplers.LogUniform(1000).sample_and_score(h, 5, target)
            >>> draw.ids.shape, target_log_q.shape
            (torch.Size([4, 5]), torch.Size([4]))
        """
        draw = self.sample(h, num_samples, shared=shared, key=key, context=context)
        if shared and self.conditional:
            return draw, self.log_prob_shared(h, ids, context=context)
        return draw, self.log_prob(h, ids, context=context)

    def collision(self) -> float | None:
        """The probability that two shared draws are of one class; None if that depends on the batch."""
        return None

    def log_prob_all(self, h: Tensor | None = None) -> Tensor:
        """Log-probability of every class, [B, C] float32: for tests and small C. h = None: one row."""
        raise NotImplementedError

    def update(self, ids: Tensor, rows: Tensor) -> None:
        """Tell the sampler that these rows [n, d] of the class table changed (ids [n])."""
        raise NotImplementedError

    def rebuild(self, weight: Tensor) -> None:
        """Build the sampler again from the whole class table [C, d]."""
        raise NotImplementedError

    @torch.no_grad()
    def follow(self, ids: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
        """Update from the class table the rows that may have changed, as a training step records them.

        Args:
            ids: int64 [n], in any order; repeats and ids that are not classes are skipped.
            weight: [C, d], the whole table; only the rows of `ids` are read.
            bias: [C], where the sampler has a bias.
        """
        some = distinct_ids(ids, self.num_classes)
        update: Any = self.update
        update(some, weight[some], bias[some]) if self.has_bias and bias is not None else update(some, weight[some])

    def follow_interval(self, batch: int, num_samples: int, shared: bool) -> int:
        """Training steps that share one `follow`, where the user leaves that open (`sampler_update="auto"`)."""
        return 1

    # -------------------------------------------------------------------------------------------- other classes
    def over(self, num_classes: int, live: Tensor | None = None) -> Sampler:
        """A sampler of the same kind over another number of classes, of which only some are drawn.

        This one stays as it is. A sampler that follows the class table has rows of zeros for new classes until
        `update` or `rebuild` tells it theirs; a head does that before the next draw.

        Args:
            num_classes: the new C.
            live: bool [C], the classes that are drawn; None: all.

        Example:
            >>> import torch, samplex_cuda as sx
            >>> sampler = sx.samplers.Quadratic(torch.eye(3), alpha=1.0)
            >>> sampler.over(4, torch.tensor([True, False, True, True])).log_prob_all(torch.ones(1, 3)).exp()
            tensor([[0.4000, 0.0000, 0.4000, 0.2000]])
        """
        from samplex_cuda.samplers.live import over_rows

        self._check_size(num_classes, live)
        place = torch.arange(num_classes, device=next(self.buffers(), torch.empty(0)).device)
        return over_rows(self, torch.where(place < self.num_classes, place, -1), live)

    def _check_size(self, num_classes: int, live: Tensor | None) -> None:
        check_int(self._op, "num_classes", num_classes, 1, 1 << 52)
        check_live(self._op, num_classes, live)

    def _taken(self, place: Tensor) -> Sampler:
        """A sampler of the same kind over classes that were `place` [n] in this one; -1: new ones."""
        raise NotImplementedError(f"{self._op}: a {type(self).__name__} cannot be resized; create a new one")

    def resize(self, num_classes: int) -> None:
        """The same kind of distribution over another number of classes, in place; see `over`.

        Args:
            num_classes: the new C.

        Example:
            >>> import torch, samplex_cuda as sx
            >>> sampler = sx.samplers.Mixture([(sx.samplers.Uniform(10), 1), (sx.samplers.LogUniform(10), 1)])
            >>> sampler.resize(12)
            >>> sampler.log_prob_all().shape
            torch.Size([1, 12])
        """
        made = vars(self.over(num_classes))
        self.__dict__.update({name: value for name, value in made.items() if name not in _OF_MODULE})

    def _log_left(self, h: Tensor | None, exclude: Exclude, context: Tensor | None, batch: int) -> Tensor:
        """log of the probability that none of the excluded ids comes, [B] float64; -inf where nothing is left.

        For any z that is not excluded q(z | rest) = q(z) / P(rest), so that P(rest) = q(z) / q(z | rest): no digit is
        lost however small it is, as 1 - q(excluded) would. z is any draw; a fixed key makes the answer repeatable.
        """
        rows = batch if h is None else None
        device = exclude.device if isinstance(exclude, Tensor) else exclude[1].device
        pair = torch.zeros(2, dtype=torch.int64, device=device)
        drawn = self.sample(h, 1, key=pair, exclude=exclude, context=context, batch_size=rows)
        left = self.log_prob(h, drawn.ids, context=context).double() - drawn.log_q.double()
        # The stand-in of a row with nothing left is one of its excluded ids.
        return torch.where(_holds(exclude, drawn.ids[:, 0]), -torch.inf, left[:, 0])

    # -------------------------------------------------------------------------------------------- state dicts
    def _stored_error(self, found: dict[str, Any]) -> str | None:
        """What is wrong with tables from a state dict, by buffer name, all of them there; None if nothing is."""
        return None

    def _stored_classes(self, found: dict[str, Any]) -> int | None:
        """C of tables from a state dict that may have another one than this sampler; None: C cannot change."""
        return None

    def _stored(self, state_dict: dict[str, Any], prefix: str) -> dict[str, Any] | None:
        """The entries of a state dict for this sampler's own buffers; None if one is not there."""
        names = [name for name in self._buffers if name not in self._non_persistent_buffers_set]
        names = [name for name in names if self._buffers[name] is not None]
        found = {name: state_dict[prefix + name] for name in names if prefix + name in state_dict}
        return found if found and len(found) == len(names) else None

    def _refuses(self, state_dict: dict[str, Any], prefix: str, errors: list[str]) -> bool:
        """Whether the tables of a state dict cannot be loaded; `errors` then says why, and nothing has changed."""
        found = self._stored(state_dict, prefix)
        wrong = None
        if found is not None:
            try:
                wrong = self._stored_error(found)
            except (RuntimeError, TypeError, ValueError, IndexError) as error:
                wrong = f"the tables do not fit each other ({error})"
        if wrong is not None:
            errors.append(
                f"{self._op}: {wrong}. The file is damaged or its sampler is not a {type(self).__name__} of these "
                f"options; the sampler is unchanged"
            )
        return wrong is not None

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        metadata: dict[str, Any],
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        if not self._refuses(state_dict, prefix, errors):
            super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, unexpected, errors)

    # -------------------------------------------------------------------------------------------- checks
    def _check_count(self, num_samples: int) -> int:
        if type(num_samples) is int and 0 <= num_samples <= MAX_SAMPLES:
            return num_samples
        return check_int(self._op, "num_samples", num_samples, 0, MAX_SAMPLES)

    def _rows_of(self, h: Tensor) -> int:
        if not isinstance(h, Tensor):
            raise TypeError(f"{self._op}: h must be a tensor [*, d] or None, got {type(h).__name__}")
        check_dense(self._op, "h", h)
        if h.dim() < 1:
            raise ValueError(f"{self._op}: h must be [*, d], got {describe(h)}")
        return math.prod(h.shape[:-1])

    def _check_batch(self, h: Tensor | None, batch_size: int | None, exclude: Exclude | None) -> int:
        """B, from whichever of the arguments say it; they must agree."""
        if batch_size is not None and not isinstance(batch_size, torch.SymInt):  # that of a compiled graph
            check_int(self._op, "batch_size", batch_size, 0)
        if h is not None:
            rows = self._rows_of(h)
            if batch_size is not None and batch_size != rows:
                raise ValueError(f"{self._op}: batch_size must be {rows} as h {describe(h)} says, got {batch_size}")
            batch_size = rows
        if batch_size is None and exclude is not None:
            pair = isinstance(exclude, tuple | list) and len(exclude) == 2 and isinstance(exclude[0], Tensor)
            if not isinstance(exclude, Tensor) and not pair:
                raise TypeError(f"{self._op}: exclude must be a tensor or a pair (offsets, ids), got {exclude!r}")
            first = exclude if isinstance(exclude, Tensor) else exclude[0]
            if first.dim() == 0 or (first is not exclude and first.shape[0] == 0):
                raise ValueError(
                    f"{self._op}: exclude must be [B], [B, P] or (offsets [B + 1], ids [n]), got {describe(first)}"
                )
            batch_size = first.shape[0] - (first is not exclude)
        if batch_size is None:
            raise ValueError(f"{self._op}: batch_size must be given if h is None, got None")
        if batch_size > MAX_BATCH:
            raise ValueError(f"{self._op}: batch_size must be at most 2^32, got {batch_size}")
        return batch_size

    def _queries(self, h: Tensor | None, dim: int, device: torch.device, place: str, batch_size: int | None) -> Tensor:
        """h [*, dim] as [B, dim], on the device where `place` says what is."""
        if h is None or not isinstance(h, Tensor) or h.dim() < 1 or h.shape[-1] != dim:
            raise ValueError(f"{self._op}: h must be [*, {dim}], got {describe(h)}")
        if not h.is_floating_point():
            raise TypeError(f"{self._op}: h must be floating point, got {describe(h)}")
        if h.device != device:
            raise ValueError(f"{self._op}: h must be on {device}, where {place} is, got {h.device}")
        self._check_batch(h, batch_size, None)
        return h.detach().reshape(-1, dim)

    def _wanted(self, ids: Tensor, batch: int) -> tuple[Tensor, bool]:
        """Ids given to `log_prob` as [B, n], and whether the answer is to be [B]."""
        if ids.dim() == 2 and ids.shape[0] == batch:
            return ids.contiguous(), False
        if ids.dim() != 1:
            raise ValueError(f"{self._op}: ids must be [B], [B, n] or [n] with B = {batch}, got {describe(ids)}")
        if ids.shape[0] == batch:
            return ids.unsqueeze(1).contiguous(), True
        return ids.expand(batch, -1).contiguous(), False

    def _apply_keeping_dtypes(self, fn: Any, recurse: bool) -> None:
        """`nn.Module._apply` without a change of dtype: `.half()` of a model is not about the distribution."""
        kept = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)
        restore_dtypes(self, kept)

    def _check_stratified(self, stratified: bool, shared: bool) -> None:
        if stratified and not shared:
            raise ValueError(f"{self._op}: stratified must be False without shared=True, got True")

    def _excluded(self, exclude: Exclude | None, rows: Tensor) -> Excluded:
        """Classes that `rows` [B, ...] must not draw as the ops take them, after the checks."""
        return sort_exclude(self._check_exclude(exclude, rows.device, rows.shape[0]))

    def _check_exclude(self, exclude: Exclude | None, device: torch.device, batch: int) -> Exclude | None:
        if exclude is None:
            return None
        if isinstance(exclude, Tensor):
            check_int64(self._op, "exclude", exclude)
            if exclude.dim() not in (1, 2) or exclude.shape[0] != batch:
                raise ValueError(f"{self._op}: exclude must be [B] or [B, P] with B = {batch}, got {describe(exclude)}")
            parts = [exclude]
        else:
            if not isinstance(exclude, tuple | list) or len(exclude) != 2:
                raise TypeError(
                    f"{self._op}: exclude must be a tensor or a pair (offsets, ids), got {type(exclude).__name__}"
                )
            offsets = check_int64(self._op, "exclude offsets", exclude[0])
            ids = check_int64(self._op, "exclude ids", exclude[1])
            if offsets.shape != (batch + 1,):
                raise ValueError(
                    f"{self._op}: exclude offsets must be [B + 1] with B = {batch}, got {describe(offsets)}"
                )
            if ids.dim() != 1:
                raise ValueError(f"{self._op}: exclude ids must be [nnz], got {describe(ids)}")
            parts = [offsets, ids]
            exclude = (offsets, ids)
        for part in parts:
            if part.device != device:
                raise ValueError(f"{self._op}: exclude must be on {device}, got {part.device}")
        return exclude


def _no_law(count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Shared draws of a batch without rows, which no loss looks at."""
    return torch.zeros(count, dtype=torch.int64, device=device), torch.full((count,), torch.nan, device=device)


def _holds(exclude: Exclude, ids: Tensor) -> Tensor:
    """Whether id b of ids [B] is among the excluded ones of row b."""
    if isinstance(exclude, Tensor):
        return ((exclude[:, None] if exclude.dim() == 1 else exclude) == ids[:, None]).any(1)
    offsets, excluded = exclude
    rows = torch.searchsorted(offsets, torch.arange(excluded.shape[0], device=ids.device), right=True) - 1
    hits = torch.zeros_like(ids)
    return hits.index_add_(0, rows, (excluded == ids[rows]).to(ids.dtype)) > 0
