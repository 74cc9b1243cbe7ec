"""What a sampler's distribution means for the gradient of sampled softmax, row by row, in float64.

For a row with logits o and target t: p = softmax(o), s = 1 - p_t, pi = p / s on the other classes (the negatives), q
the distribution that negatives come from, rho = p / q. The sampled normalizer over the true one is V = p_t + mean of
rho over the m draws, and the gradient in the logits is G = (mean of rho_c unit_c over the draws + p_t unit_t) / V -
unit_t.

    v        m Var[V] = sum q (rho - s)^2
    bias     m (E[G] - full) -> p_k (v - (rho_k - s)) at a negative k, p_t v at the target
    spread   m Var[G] -> E |rho_c (unit_c - p)|^2 - |its mean|^2

The target is either excluded (q is the distribution of the other classes: draws per row) or masked (q is the whole
distribution, a draw of the target counts as rho = 0: shared draws). Where q is 0 on a share of the softmax, G tends to
the gradient of the softmax over the other classes: a bias that no m removes, kept apart as the term of order 0.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from samplex_cuda.draw import Draw

__all__ = [
    "Draws",
    "Measured",
    "RowLaw",
    "Rows",
    "SharedLaw",
    "enumerate_law",
    "enumerate_laws",
    "estimate_law",
    "measure",
]

# Numbers held at a time in float64: 8 MB for each of the tensors a pass works on, some thirty.
ELEMENTS = 1 << 20
LOGITS = 8  # times as many logits at a time: making them reads the whole class table


class Rows:
    """Rows of h with their targets, and the softmax of a head over them.

    Only `lse` [B], `lse_others` [B] and `target_logit` [B] are kept; logits are made again, [rows, classes] at a time.

    Args:
        head: a `SampledClassifier`.
        h: [B, d].
        target: int64 [B].
        seen: what the head's own sampler looks at, [B, f]; h by default.
        context: what it conditions on besides, [B].

    Example:
        >>> import torch, samplex_cuda as sx
        >>> from samplex_cuda.diagnostics.gradient_error import Rows
        >>> head = sx.SampledClassifier(4, 50, sx.samplers.Uniform(50), num_samples=5)
        >>> rows = Rows(head, torch.randn(3, 4), torch.tensor([1, 2, 3]))
        >>> rows.p_target.shape, rows.logits(slice(0, 2)).shape
        (torch.Size([3]), torch.Size([2, 50]))
    """

    @torch.no_grad()
    def __init__(
        self, head: Any, h: Tensor, target: Tensor, seen: Tensor | None = None, context: Tensor | None = None
    ) -> None:
        self.head, self.h, self.target, self.context = head, h.detach(), target, context
        self.seen = self.h if seen is None else seen
        self.count, self.num_classes = h.shape[0], head.num_classes
        self.target_logit = self.logits_of(target[:, None])[:, 0]
        others = torch.full_like(self.target_logit, -math.inf)
        step = max(1, ELEMENTS // max(1, self.count))
        for begin in range(0, self.num_classes, step):
            part = self.logits(slice(None), begin, begin + step)
            inside = (target >= begin) & (target < begin + step)
            part[inside, target[inside] - begin] = -math.inf
            others = torch.logaddexp(others, part.logsumexp(1))
        self.lse_others = others
        self.lse = torch.logaddexp(others, self.target_logit)

    @property
    def p_target(self) -> Tensor:
        """Probability of the target, [B]."""
        return (self.target_logit - self.lse).exp()

    @property
    def rest(self) -> Tensor:
        """s, probability of all other classes, [B]: no digit is lost where the target has nearly all."""
        return (self.lse_others - self.lse).exp()

    def logits(self, rows: slice, begin: int = 0, end: int | None = None) -> Tensor:
        """Logits of classes [begin, end), [b, n] float64."""
        head, h = self.head, self.h[rows].double()
        end = self.num_classes if end is None else min(end, self.num_classes)
        out = h.new_empty(h.shape[0], end - begin)
        step = max(1, ELEMENTS // max(1, h.shape[1]))  # class rows in float64 at a time
        for first in range(begin, end, step):
            part = slice(first, min(first + step, end))
            torch.matmul(h, head.weight.detach()[part].double().T, out=out[:, first - begin : part.stop - begin])
        if head.bias is not None:
            out += head.bias.detach()[begin:end].double()
        return self._finish(out, rows, torch.arange(begin, end, device=out.device))

    def logits_of(self, ids: Tensor) -> Tensor:
        """Logits of given classes, int64 [B, n], as [B, n] float64."""
        head, rows = self.head, ids.shape[0]
        out = torch.empty(ids.shape, dtype=torch.float64, device=ids.device)
        step = max(1, ELEMENTS // max(1, rows * self.h.shape[1]))
        for begin in range(0, ids.shape[1], step):
            part = ids[:, begin : begin + step]
            dots = torch.bmm(head.weight.detach()[part].double(), self.h[:rows].double()[:, :, None])[:, :, 0]
            if head.bias is not None:
                dots += head.bias.detach()[part].double()
            out[:, begin : begin + step] = self._finish(dots, slice(0, rows), part)
        return out

    def _finish(self, out: Tensor, rows: slice, ids: Tensor) -> Tensor:
        out = out.mul_(self.head.scale)
        if self.head.loss.absolute:
            out = out.abs_()
        if self.head.loss.needs.prior:  # its scores are relative to the sampler's distribution
            some = self.seen[rows]
            wanted = ids.expand(some.shape[0], -1) if ids.dim() == 1 else ids
            given = None if self.context is None else self.context[rows]
            out = out + self.head.sampler.log_prob(some, wanted.contiguous(), context=given).double()
        return out


@dataclasses.dataclass
class RowLaw:
    """Statistics of a distribution for each row, all [B] float64; `exact` says whether every class was examined."""

    exact: bool
    kl: Tensor  # KL(pi || q given the negatives)
    tv: Tensor  # total variation between them
    second: Tensor  # sum of pi^2 / q: m / second is the effective sample size
    missing: Tensor  # share of pi on classes that are never drawn
    target_q: Tensor  # probability of the target under the whole distribution
    log_q_min: Tensor  # over classes that can be drawn, as they are drawn
    log_q_max: Tensor
    log_ratio: Tensor  # largest log(e^o / q)
    v: Tensor  # m Var[V]
    leading: Tensor  # |m bias|^2, terms of order 1/m
    constant: Tensor  # |bias|^2 of order 0
    cross: Tensor  # <the two>
    spread: Tensor  # m Var[G]
    squares: Tensor  # sum of p^2 over the negatives

    def bias_squared(self, m: int) -> Tensor:
        """|bias|^2 up to order 1/m, [B]."""
        return (self.constant + 2.0 * self.cross / m + self.leading / m**2).clamp_min(0.0)


def _law_of(sampler: Any, seen: Tensor, context: Tensor | None) -> Tensor:
    """log q of every class, [b, C] float64."""
    if sampler._needs_context:
        return sampler.log_prob_all(seen, context=context).double()
    return sampler.log_prob_all(seen).double().expand(seen.shape[0], -1)


class SharedLaw:
    """The distribution of draws that all rows share, where the sampler has another one for each row: the mean of these.

    Args:
        sampler: any sampler.
        seen: [B, f], what it looks at; these rows count as the batch.
        context: [B] or None.

    Example:
        >>> import torch, samplex_cuda as sx
        >>> from samplex_cuda.diagnostics.gradient_error import SharedLaw
        >>> tree = sx.samplers.Tree(torch.ones(2, 1), torch.zeros(2), torch.tensor([0, 1]))
        >>> SharedLaw(tree, torch.tensor([[3.0], [-3.0]]), None).log_prob_all(torch.zeros(4, 1)).exp()
        tensor([[0.5000, 0.5000]])
    """

    _needs_context = False

    def __init__(self, sampler: Any, seen: Tensor, context: Tensor | None) -> None:
        self.sampler, self.seen, self.context = sampler, seen, context
        self.num_classes = sampler.num_classes
        self._all: Tensor | None = None

    def sample(self, h: Tensor, num_samples: int, *, key: Tensor, exclude: None, context: Tensor | None) -> Draw:
        """[B, m] independent draws; whose rows they are does not matter."""
        shape = (h.shape[0], num_samples)
        drawn = self.sampler.sample(self.seen, shape[0] * shape[1], shared=True, key=key, context=self.context)
        return Draw(drawn.ids.reshape(shape), drawn.log_q.reshape(shape))

    def log_prob(self, h: Tensor, ids: Tensor, *, context: Tensor | None = None) -> Tensor:
        """As `Sampler.log_prob`."""
        return self.sampler.log_prob_shared(self.seen, ids, context=self.context)

    def log_prob_all(self, h: Tensor) -> Tensor:
        """log q of every class, [1, C] float32."""
        if self._all is None:
            every = torch.arange(self.num_classes, device=self.seen.device)
            self._all = self.sampler.log_prob_shared(self.seen, every, context=self.context)[None]
        return self._all


@torch.no_grad()
def enumerate_law(sampler: Any, rows: Rows, seen: Tensor, context: Tensor | None, *, shared: bool) -> RowLaw:
    """Everything from the distribution itself, class by class; a few rows at a time, so that [rows, C] stays small.

    Args:
        sampler: any sampler.
        rows: the softmax.
        seen: [B, f], what the sampler looks at.
        context: [B] or None.
        shared: whether targets are masked instead of excluded.

    Example:
        >>> import torch, samplex_cuda as sx
        >>> from samplex_cuda.diagnostics.gradient_error import Rows, enumerate_law
        >>> head = sx.SampledClassifier(4, 50, sx.samplers.Uniform(50), num_samples=5)
        >>> rows = Rows(head, torch.randn(3, 4), torch.tensor([1, 2, 3]))
        >>> law = enumerate_law(sx.samplers.Softmax(head.weight, head.bias), rows, rows.h, None, shared=False)
        >>> bool((law.tv < 1e-5).all()), bool((law.leading.sqrt() < 1e-5).all())
        (True, True)
    """
    return enumerate_laws([(sampler, seen)], rows, context, shared=shared)[0]


@torch.no_grad()
def enumerate_laws(
    candidates: list[tuple[Any, Tensor]], rows: Rows, context: Tensor | None, *, shared: bool
) -> list[RowLaw]:
    """`enumerate_law` of several samplers, each with what it looks at; logits are made once for all."""
    # One place for all results: small tensors kept between the large ones would leave holes in the heap.
    found = rows.lse.new_empty(len(candidates), len(dataclasses.fields(RowLaw)) - 1, rows.count)
    step = max(1, ELEMENTS // rows.num_classes)
    most = step * LOGITS
    for begin in range(0, rows.count, most):
        end = min(begin + most, rows.count)
        logits = rows.logits(slice(begin, end))
        for first in range(begin, end, step):
            part = slice(first, min(first + step, end))
            some = logits[first - begin : part.stop - begin]
            for number, (sampler, seen) in enumerate(candidates):
                log_q = _law_of(sampler, seen[part], None if context is None else context[part])
                found[number, :, part] = torch.stack(_of_block(some, log_q, rows, part, shared))
    return [RowLaw(True, *columns.unbind(0)) for columns in found]


def _of_block(logits: Tensor, log_q: Tensor, rows: Rows, part: slice, shared: bool) -> list[Tensor]:
    target = rows.target[part, None]
    top = logits.scatter(1, target, -math.inf)
    log_pi = torch.where(top == -math.inf, top, top - rows.lse_others[part, None])
    target_q = log_q.gather(1, target)[:, 0].exp()
    log_q = log_q.scatter(1, target, -math.inf)
    log_left = log_q.logsumexp(1, keepdim=True)  # of what can be drawn besides the target
    alone = torch.where(log_left == -math.inf, log_q, log_q - log_left)
    used = log_q if shared else alone
    support = used > -math.inf
    pi = log_pi.exp()
    missing = torch.where(support, 0.0, pi).sum(1)
    kl = torch.where(pi > 0, pi * (log_pi - alone), 0.0).sum(1)
    tv = 0.5 * (pi - alone.exp()).abs().sum(1)
    u = torch.where(support, (log_pi - used).exp(), 0.0)
    low = torch.where(support, used, math.inf).amin(1)
    high = torch.where(support, used, -math.inf).amax(1)
    ratio = torch.where(support, top - used, -math.inf).amax(1)
    q = used.exp()
    s, p_t = rows.rest[part], rows.p_target[part]
    # The softmax over what can be drawn and the target: what the gradient tends to.
    grow = 1.0 / (1.0 - s * missing).clamp_min(1e-300)
    kept = s * (1.0 - missing)
    rho = s[:, None] * u
    off = grow[:, None] * (rho - kept[:, None])
    hit = (1.0 - q.sum(1)).clamp_min(0.0) if shared else torch.zeros_like(s)
    v = (q * off.square()).sum(1) + hit * (grow * kept).square()
    p = s[:, None] * pi
    p_new = torch.where(support, grow[:, None] * p, 0.0)
    lead = p_new * (v[:, None] - off)
    lead_t, const_t = grow * p_t * v, (grow - 1.0) * p_t
    const = p_new - p
    leading = lead.square().sum(1) + lead_t.square()
    constant = const.square().sum(1) + const_t.square()
    cross = (lead * const).sum(1) + lead_t * const_t
    own = p_new.square().sum(1) + (grow * p_t).square()  # |p|^2
    scaled = grow[:, None] * rho
    spread = (q * scaled.square() * (1.0 - 2.0 * p_new + own[:, None])).sum(1)
    spread -= (grow * p_t).square() * (p_new.square().sum(1) + (grow * kept).square())
    second = (q * u.square()).sum(1) / (1.0 - missing).square().clamp_min(1e-300)
    return [
        kl, tv, second, missing, target_q, low, high, ratio, v, leading, constant, cross, spread.clamp_min(0.0),
        p.square().sum(1),
    ]  # fmt: skip


@torch.no_grad()
def estimate_law(sampler: Any, rows: Rows, seen: Tensor, context: Tensor | None, draws: Draws) -> RowLaw:
    """The same from draws alone, for class sets that are too large to look at: means over the draws of each row.

    What was never drawn is not seen: `missing` is 0, the largest ratio is that of the draws, and a distribution that
    misses likely classes looks better than it is.
    """
    pi, w, s, p_t = draws.pi, draws.log_rho.exp(), rows.rest[: draws.count], rows.p_target[: draws.count]
    target_q = sampler.log_prob(seen[: draws.count], rows.target[: draws.count, None], context=draws.context)
    target_q = target_q[:, 0].double().exp()
    u = w / s[:, None].clamp_min(1e-300)
    left = (1.0 - target_q).clamp_min(1e-300) if draws.shared else torch.ones_like(s)
    alone = u * left[:, None]  # pi / q where both are distributions of the negatives
    mean = (lambda x: x.sum(1) / (~draws.hit).sum(1).clamp_min(1)) if draws.shared else (lambda x: x.mean(1))
    kl = mean(torch.where(alone > 0, alone * alone.clamp_min(1e-300).log(), 0.0)).clamp_min(0.0)
    tv = 0.5 * mean(torch.where(draws.hit, 0.0, (alone - 1.0).abs()))
    off = w - s[:, None]
    v = off.square().mean(1)
    p = s[:, None] * pi
    a0, a1, a2 = ((w * p * off**k).mean(1) for k in range(3))
    leading = (v.square() * a0 - 2.0 * v * a1 + a2).clamp_min(0.0) + (p_t * v).square()
    own = a0 + p_t.square()
    spread = (w.square() * (1.0 - 2.0 * p + own[:, None])).mean(1) - p_t.square() * (a0 + s.square())
    nothing = torch.zeros_like(s)
    low = torch.where(draws.hit, math.inf, draws.log_q).amin(1)
    high = torch.where(draws.hit, -math.inf, draws.log_q).amax(1)
    ratio = torch.where(draws.hit, -math.inf, draws.logits - draws.log_q).amax(1)
    return RowLaw(
        False, kl, tv, u.square().mean(1), nothing, target_q, low, high, ratio, v, leading, nothing, nothing,
        spread.clamp_min(0.0), a0,
    )  # fmt: skip


class Draws:
    """A pool of independent draws of some rows, [b, n], with what they weigh."""

    @torch.no_grad()
    def __init__(
        self,
        sampler: Any,
        rows: Rows,
        seen: Tensor,
        context: Tensor | None,
        *,
        count: int,
        each: int,
        shared: bool,
        key: Tensor,
    ) -> None:
        self.count, self.each, self.shared = count, each, shared
        self.context = None if context is None else context[:count]
        target = rows.target[:count]
        exclude = None if shared else target
        # For a single row, shared draws are distributed as draws per row are.
        drawn = sampler.sample(seen[:count], each, key=key, exclude=exclude, context=self.context)
        self.ids, self.log_q = drawn.ids, drawn.log_q.double()
        self.hit = self.ids == target[:, None]
        self.logits = rows.logits_of(self.ids)
        log_pi = self.logits - rows.lse_others[:count, None]
        self.pi = torch.where(self.hit, 0.0, log_pi.exp())
        log_s = rows.lse_others[:count] - rows.lse[:count]
        # Logarithms: with logits of several hundred the target and all draws of a row may be 0 as numbers.
        self.log_rho = torch.where(self.hit, -torch.inf, log_pi + log_s[:, None] - self.log_q)


@dataclasses.dataclass
class Measured:
    """From repeated gradients of the draws, each [b] float64: |bias|^2 without its noise, and the variance."""

    bias_squared: Tensor
    variance: Tensor


@torch.no_grad()
def measure(draws: Draws, rows: Rows, squares: Tensor, m: int) -> Measured | None:
    """Bias and variance of the gradient in the logits at m, from the pool cut into samples of m; None below two.

    |bias|^2 is the mean of <G_i - full, G_j - full> over pairs i != j: without bias itself, so it may be negative.

    Args:
        draws: the pool, [b, n].
        rows: the softmax.
        squares: sum of p^2 over the negatives, [b].
        m: samples.
    """
    repeats = draws.each // m
    if repeats < 2:
        return None
    some, n = draws.count, repeats * m
    log_t = (rows.target_logit - rows.lse)[:some, None]
    ids, each = draws.ids[:, :n], draws.log_rho[:, :n].view(some, repeats, m) - math.log(m)
    total = torch.logaddexp(log_t, each.logsumexp(2))  # log V
    share = (each - total[:, :, None]).exp().view(some, n)
    at_target = (log_t - total).exp() - log_t.exp()
    p = rows.rest[:some, None] * draws.pi[:, :n]
    summed = _square_norm(ids, share)  # |sum of G_i|^2 on the negatives
    single = _square_norm(ids.reshape(-1, m), share.reshape(-1, m)).view(some, repeats).sum(1)
    along = (share * p).sum(1)
    pairs = repeats * (repeats - 1)
    bias = (summed - single - 2.0 * (repeats - 1) * along) / pairs + squares
    bias += (at_target.sum(1).square() - at_target.square().sum(1)) / pairs
    variance = (single - summed / repeats) / (repeats - 1) + at_target.var(1)
    return Measured(bias, variance.clamp_min(0.0))


def _square_norm(ids: Tensor, values: Tensor) -> Tensor:
    """|sum of values_j unit_{ids_j}|^2 of each row of [N, n]: equal ids are added first."""
    order = ids.argsort(1)
    ids, values = ids.gather(1, order), values.gather(1, order)
    segment = torch.zeros_like(ids)
    segment[:, 1:] = (ids[:, 1:] != ids[:, :-1]).cumsum(1)
    return torch.zeros_like(values).scatter_add_(1, segment, values).square().sum(1)
