"""Negative sampling, NCE, one-vs-each and augment-and-reduce as functions."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from samplex_cuda import losses
from samplex_cuda._checks import check_number
from samplex_cuda.functional._inputs import form_of, prepare, row_values
from samplex_cuda.ops.fused_loss import run_loss
from samplex_cuda.optim.fusion import fusion_of

__all__ = ["augment_reduce", "nce", "negative_sampling", "one_vs_each"]


def negative_sampling(
    h: Tensor,
    weight: Tensor,
    target: Tensor,
    ids: Tensor,
    log_q: Tensor,
    target_log_q: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    scale: float = 1.0,
    reg: float = 0.0,
    reduction: str = "mean",
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    positives: tuple[Tensor, Tensor] | None = None,
    sparse: bool = True,
) -> Tensor:
    r"""Logistic regression of the target against draws from a noise distribution (Bamler & Mandt 2020, Eq. 2 and 6).

    With scores :math:`\xi_k = \text{scale}\,(h \cdot w_k + b_k)` and m draws :math:`y'_j \sim p_n(\cdot|x)` the loss of
    a row is

    .. math::
        \text{softplus}(-\xi_y) + \lambda (\xi_y + \log p_n(y|x))^2
        + \frac{1}{m} \sum_j [\text{softplus}(\xi_{y'_j}) + \lambda (\xi_{y'_j} + \log p_n(y'_j|x))^2].

    The paper has one draw; more are averaged, which leaves the expected loss and its minimizer as they are. At the
    minimum :math:`\xi_y = \log p_D(y|x) - \log p_n(y|x)`: the scores are biased by the noise, and prediction adds
    :math:`\log p_n(y|x)` back (Eq. 5), which `SampledClassifier` does by itself.

    The draws come from the *unconditional* p_n: do not exclude the target when sampling. A draw that hits it counts
    like any other; without those the minimizer would be another one.

    One pass over the gathered rows, forward and backward: no [B, m, d] and no [C, d] tensor is made. Gradients of
    `weight` and `bias` are coalesced sparse COO tensors, good for `torch.optim.SGD`, `Adagrad` and `SparseAdam`.

    Args:
        h: [*, d] hidden vectors. Under autocast they are cast to the dtype of `weight`, which keeps its own.
        weight: [C, d] in float32, float64, float16 or bfloat16; sums run in float32 (float64 for float64).
        target: int64 [*], or [*, P] for several targets per row, padded with -100: their terms are averaged.
        ids: int64 [*, m] drawn classes of each row, or [m] shared by all rows. With m = 0 only the target's
            term is left.
        log_q: log p_n of each draw, shape of `ids`; read only where `reg` is not 0.
        target_log_q: shape of `target`, log p_n(y|x) of the targets; may be None if `reg` is 0. Not read where a
            target is padded.
        bias: [C] or None, in the dtype of `weight` or float32.
        scale: multiplies the score (1 / temperature).
        reg: lambda of Eq. 6, at least 0: pulls the corrected scores, xi + log p_n, to zero.
        reduction: "mean" (over the rows that count, weighted as in `F.cross_entropy`; 0 if none), "sum" or "none".
        class_weight: [C], in float32 (float64 for float64): weights of the classes, as `weight` of `F.cross_entropy`: a
            target's term has the weight of its class, the draws' terms the mean weight of the targets.
        ignore_index: a target of this value is skipped; a row without targets has loss 0 and is not in the mean.
        positives: known positives of each row as CSR (offsets int64 [B + 1], ids int64 [n]), left out where drawn. This
            moves the minimizer (a class is then drawn less often than p_n says): leave it out unless that is wanted.
        sparse: False gives dense gradients of `weight` and `bias`, which costs O(C d).

    Returns:
        The loss in float32 (float64 for float64): a scalar, or [*] for "none". A nan in a row's h gives nan in that row
        only.

    Example:
        >>> import torch, samplex_cuda as sx
        >>> h, weight = torch.randn(4, 16), torch.randn(1000, 16, requires_grad=True)
        >>> target = torch.tensor([1, 2, 3, 4])
        >>> sampler = sx.samplers.LogUniform(1000)
        >>> draw = sampler.sample(h, 5)
        >>> log_p = sampler.log_prob(h, target)
        >>> loss = sx.functional.negative_sampling(h, weight, target, draw.ids, draw.log_q, log_p, reg=1e-3)
        >>> loss.backward()
        >>> weight.grad.is_coalesced(), weight.grad.shape
        (True, torch.Size([1000, 16]))
    """
    check_number("negative_sampling", "reg", reg, 0.0)
    return _entry_loss(
        losses.NegativeSampling(reg),
        (h, weight, target, ids, log_q, bias),
        target_log_q=target_log_q,
        scale=scale,
        reduction=reduction,
        class_weight=class_weight,
        ignore_index=ignore_index,
        positives=positives,
        sparse=sparse,
    )[0]


def nce(
    h: Tensor,
    weight: Tensor,
    target: Tensor,
    ids: Tensor,
    log_q: Tensor,
    target_log_q: Tensor,
    bias: Tensor | None = None,
    *,
    scale: float = 1.0,
    reduction: str = "mean",
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    positives: tuple[Tensor, Tensor] | None = None,
    sparse: bool = True,
) -> Tensor:
    r"""Noise contrastive estimation (Gutmann & Hyvarinen 2010): is a class the target, or one of m draws of noise?

    With scores :math:`s_k = \text{scale}\,(h \cdot w_k + b_k)` the loss of a row is

    .. math::
        \text{softplus}(-(s_y - \log m - \log q_y)) + \sum_{k=1}^m \text{softplus}(s_k - \log m - \log q_k).

    At the minimum :math:`s_y = \log p_D(y|x)`, whatever the noise: the scores normalize themselves, and prediction adds
    nothing. The draws come from the *unconditional* q: do not exclude the target when sampling, a draw that hits it
    counts like any other.

    One pass over the gathered rows, sparse gradients, dtypes and autocast as in `negative_sampling`.

    Args:
        h: [*, d] hidden vectors.
        weight: [C, d].
        target: int64 [*], or [*, P] for several targets per row, padded with -100: their terms are averaged.
        ids: int64 [*, m] drawn classes of each row, or [m] shared by all rows. With m = 0 only the target's term is
            left.
        log_q: log-probability of each draw, shape of `ids`. A row with nan or inf here (or in h) has loss nan.
        target_log_q: log-probability of the targets under the same distribution, shape of `target`.
        bias: [C] or None, in the dtype of `weight` or float32.
        scale: multiplies the score (1 / temperature), before the correction.
        reduction: "mean" (over the rows that count, weighted as in `F.cross_entropy`; 0 if none), "sum" or "none".
        class_weight: [C], in float32 (float64 for float64): weights of the classes: a target's term has the weight of
            its class, the draws' terms the mean weight of the targets.
        ignore_index: a target of this value is skipped; a row without targets has loss 0 and is not in the mean.
        positives: known positives of each row as CSR (offsets int64 [B + 1], ids int64 [n]), left out where drawn. This
            moves the minimizer: leave it out unless that is wanted.
        sparse: False gives dense gradients of `weight` and `bias`, which costs O(C d).

    Returns:
        The loss in float32 (float64 for float64): a scalar, or [*] for "none".

    Example:
        >>> import torch, samplex_cuda as sx
        >>> h, weight = torch.randn(4, 16), torch.randn(1000, 16, requires_grad=True)
        >>> target = torch.tensor([1, 2, 3, 4])
        >>> draw, log_q_target = sx.samplers.LogUniform(1000).sample_and_score(h, 20, target)
        >>> sx.functional.nce(h, weight, target, draw.ids, draw.log_q, log_q_target).backward()
        >>> weight.grad.is_coalesced(), weight.grad.shape
        (True, torch.Size([1000, 16]))
    """
    return _entry_loss(
        losses.NCE(),
        (h, weight, target, ids, log_q, bias),
        target_log_q=target_log_q,
        scale=scale,
        reduction=reduction,
        class_weight=class_weight,
        ignore_index=ignore_index,
        positives=positives,
        sparse=sparse,
    )[0]


def one_vs_each(
    h: Tensor,
    weight: Tensor,
    target: Tensor,
    ids: Tensor,
    log_q: Tensor,
    bias: Tensor | None = None,
    *,
    scale: float = 1.0,
    reduction: str = "mean",
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    positives: tuple[Tensor, Tensor] | None = None,
    sparse: bool = True,
) -> Tensor:
    r"""The one-vs-each bound of the softmax (Titsias 2016), its sum over the other classes estimated by the draws.

    The bound :math:`-\log p(y|x) \le \sum_{k \ne y} \text{softplus}(s_k - s_y)` with
    :math:`s_k = \text{scale}\,(h \cdot w_k + b_k)` is a sum, so a sample of it is unbiased, and so is its gradient:

    .. math::
        \frac{1}{m} \sum_{k=1}^m \frac{1}{q_k} \text{softplus}(s_k - s_y).

    A draw that equals a target of its row, or one of its known `positives`, is ignored. The variance is small if q
    is about proportional to softplus(s_k - s_y): a class with a large score and a small q is rarely drawn and then
    counts 1 / (m q) times. The loss of an untrained model is about C log 2, not log C: choose the learning rate for it.

    One pass over the gathered rows, sparse gradients, dtypes and autocast as in `negative_sampling`.

    Args:
        h: [*, d] hidden vectors.
        weight: [C, d].
        target: int64 [*], or [*, P] for several targets per row, padded with -100: the mean of their bounds, each over
            the classes that are no target of the row.
        ids: int64 [*, m] drawn classes of each row, or [m] shared by all rows.
        log_q: log-probability of each draw, shape of `ids`. A row with nan or inf here (or in h) has loss nan.
        bias: [C] or None, in the dtype of `weight` or float32.
        scale: multiplies the score (1 / temperature).
        reduction: "mean" (over the rows that count, weighted as in `F.cross_entropy`; 0 if none), "sum" or "none".
        class_weight: [C], in float32 (float64 for float64): weights of the targets' classes, as `weight` of
            `F.cross_entropy`.
        ignore_index: a target of this value is skipped; a row without targets has loss 0 and is not in the mean.
        positives: known positives of each row as CSR (offsets int64 [B + 1], ids int64 [n]): masked where drawn.
        sparse: False gives dense gradients of `weight` and `bias`, which costs O(C d).

    Returns:
        The loss in float32 (float64 for float64): a scalar, or [*] for "none". A row whose draws are all masked (so
        also m = 0) has loss 0 and no gradient.

    Example:
        >>> import torch, samplex_cuda as sx
        >>> h, weight = torch.randn(4, 16), torch.randn(1000, 16, requires_grad=True)
        >>> target = torch.tensor([1, 2, 3, 4])
        >>> draw = sx.samplers.LogUniform(1000).sample(h, 20, exclude=target)
        >>> sx.functional.one_vs_each(h, weight, target, draw.ids, draw.log_q).backward()
        >>> weight.grad.is_coalesced(), weight.grad.shape
        (True, torch.Size([1000, 16]))
    """
    return _entry_loss(
        losses.OneVsEach(),
        (h, weight, target, ids, log_q, bias),
        scale=scale,
        reduction=reduction,
        class_weight=class_weight,
        ignore_index=ignore_index,
        positives=positives,
        sparse=sparse,
    )[0]


def augment_reduce(
    h: Tensor,
    weight: Tensor,
    target: Tensor,
    ids: Tensor,
    log_q: Tensor,
    log_eta: Tensor,
    bias: Tensor | None = None,
    *,
    scale: float = 1.0,
    reduction: str = "mean",
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    positives: tuple[Tensor, Tensor] | None = None,
    sparse: bool = True,
    return_log_sum: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""The bound of augment and reduce (Ruiz et al. 2018) for the softmax, its sum estimated by the draws.

    With :math:`s_k = \text{scale}\,(h \cdot w_k + b_k)` and :math:`R = 1 + \sum_{k \ne y} e^{s_k - s_y}` the softmax
    has :math:`-\log p(y|x) = \log R \le \log\eta - 1 + R / \eta` for any :math:`\eta > 0`, with equality at
    :math:`\eta = R`. The bound is linear in the sum, so with :math:`R` estimated as
    :math:`1 + \frac{1}{m} \sum_k \frac{1}{q_k} e^{s_k - s_y}` loss and gradient are unbiased for it. :math:`\eta` is a
    constant here: the caller keeps one per training example and moves it towards R, as `SampledClassifier` does.

    A draw that equals a target of its row, or one of its known `positives`, is ignored. The gradient is that of the
    softmax times R / eta: too small an eta makes it explode, too large a one makes it vanish.

    One pass over the gathered rows, sparse gradients, dtypes and autocast as in `negative_sampling`.

    Args:
        h: [*, d] hidden vectors.
        weight: [C, d].
        target: int64 [*], or [*, P] for several targets per row, padded with -100. With several the bound is on the
            loss of `sampled_softmax`, lse over all of them and the draws minus the mean target score: R is the sum of
            exp(s_k - mean target score) over targets and draws.
        ids: int64 [*, m] drawn classes of each row, or [m] shared by all rows.
        log_q: log-probability of each draw, shape of `ids`. A row with nan or inf here (or in h) has loss nan.
        log_eta: [*], log of eta of each row; no gradient. Best at log R, which is at least 0.
        bias: [C] or None, in the dtype of `weight` or float32.
        scale: multiplies the score (1 / temperature).
        reduction: "mean" (over the rows that count, weighted as in `F.cross_entropy`; 0 if none), "sum" or "none".
        class_weight: [C], in float32 (float64 for float64): weights of the targets' classes, as `weight` of
            `F.cross_entropy`.
        ignore_index: a target of this value is skipped; a row without targets has loss 0 and is not in the mean.
        positives: known positives of each row as CSR (offsets int64 [B + 1], ids int64 [n]): masked where drawn.
        sparse: False gives dense gradients of `weight` and `bias`, which costs O(C d).
        return_log_sum: also return the log of the estimated R of each row ([*], no gradient); log_eta for a row without
            targets.

    Returns:
        The loss in float32 (float64 for float64): a scalar, or [*] for "none"; with `return_log_sum`, (loss, log_sum).

    Example:
        >>> import torch, samplex_cuda as sx
        >>> h, weight = torch.randn(4, 16), torch.randn(1000, 16, requires_grad=True)
        >>> target = torch.tensor([1, 2, 3, 4])
        >>> draw = sx.samplers.LogUniform(1000).sample(h, 20, exclude=target)
        >>> log_eta = torch.full((4,), 1000.0).log()
        >>> loss, log_sum = sx.functional.augment_reduce(
        ...     h, weight, target, draw.ids, draw.log_q, log_eta, return_log_sum=True
        ... )
        >>> loss.backward()
        >>> log_sum.shape, weight.grad.is_coalesced()
        (torch.Size([4]), True)
    """
    rows = h.shape[:-1] if isinstance(h, Tensor) else ()
    loss, ratio, log_eta = _entry_loss(
        _AUGMENT_REDUCE,
        (h, weight, target, ids, log_q, bias),
        log_eta=log_eta,
        scale=scale,
        reduction=reduction,
        class_weight=class_weight,
        ignore_index=ignore_index,
        positives=positives,
        sparse=sparse,
    )
    if not return_log_sum:
        return loss
    return loss, (log_eta + ratio.log()).reshape(rows)


_AUGMENT_REDUCE = losses.AugmentReduce(1)  # the caller keeps eta, so that the number of examples does not matter


def _entry_loss(
    loss: losses.Loss,
    tensors: tuple[Any, ...],
    *,
    target_log_q: Tensor | None = None,
    log_eta: Tensor | None = None,
    scale: float,
    reduction: str,
    class_weight: Tensor | None,
    ignore_index: int,
    positives: tuple[Tensor, Tensor] | None,
    sparse: bool,
) -> Any:
    """The loss, and for augment_reduce ratio and log_eta of each row, [B]."""
    op, needs = loss.name, loss.needs
    h, weight, target, ids, log_q, bias = tensors
    lead, x = prepare(op, h, weight, target, ids, log_q, bias, class_weight, positives)
    why = " if reg is not 0" if needs.prior else ""
    one_target = x.target.dim() == 1 or x.target.shape[1] == 1
    of_target = [target.shape, h.shape[:-1]] if one_target else [target.shape]
    target_log_q = row_values(op, "target_log_q", target_log_q, of_target, needs.target_log_q, why, weight)
    if target_log_q is not None and target_log_q.shape != x.target.shape:
        target_log_q = target_log_q.reshape(x.target.shape)
    log_eta = row_values(op, "log_eta", log_eta, [h.shape[:-1]], needs.example_index, "", weight)
    log_eta = log_eta if log_eta is None or log_eta.dim() == 1 else log_eta.reshape(-1)
    form = form_of(op, scale, ignore_index, reduction, sparse)
    made, extra = run_loss(loss, x._replace(target_log_q=target_log_q, row_value=log_eta), form, fusion_of(weight))
    return made.reshape(lead) if lead is not None and reduction == "none" else made, extra, log_eta
