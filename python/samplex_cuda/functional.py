"""Losses as functions. They take what a sampler drew, `Draw(ids, log_q)`, and never guess its probabilities."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from samplex_cuda._checks import op_error
from samplex_cuda.contrastive import contrastive
from samplex_cuda.ops.entry_loss import KINDS
from samplex_cuda.ops.entry_loss import entry_loss as _entry_loss_op
from samplex_cuda.ops.full_softmax import full_softmax as _full_softmax
from samplex_cuda.ops.fused_loss import REDUCTIONS, acc_dtype, keep_coalesced
from samplex_cuda.ops.sampled_softmax import sampled_softmax as _sampled_softmax
from samplex_cuda.pooling import attention_pool
from samplex_cuda.prediction import mean_weight, valid_targets

__all__ = [
    "attention_pool",
    "augment_reduce",
    "contrastive",
    "full_softmax",
    "nce",
    "negative_sampling",
    "one_vs_each",
    "sampled_softmax",
]

_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _shape(lead: tuple[int, ...], last: str) -> str:
    return "[" + ", ".join([*map(str, lead), last]) + "]"


def _got(t: object) -> str:
    if isinstance(t, Tensor):
        return f"{list(t.shape)} {_name(t.dtype)} on {t.device}"
    return f"{type(t).__name__}"


def _check_tensor(op: str, name: str, t: object, wanted: str) -> None:
    if not isinstance(t, Tensor):
        raise TypeError(f"{op}: {name} must be a tensor {wanted}, got {_got(t)}")


def _check_ids(op: str, name: str, t: Tensor, device: torch.device) -> None:
    if t.dtype != torch.int64:
        raise TypeError(f"{op}: {name} must be int64, got {_got(t)}")
    if t.device != device:
        raise ValueError(f"{op}: {name} must be on {device} like weight, got {_got(t)}")


def _flatten(op: str, h: Tensor, weight: Tensor, target: Tensor, ids: Tensor, log_q: Tensor) -> tuple[Tensor, ...]:
    """Leading dimensions [*, d] -> [B, d]; target [*] or [*, P] -> [B, P]; draws [*, m] -> [B, m], or [m]."""
    lead = h.shape[:-1]
    batch = math.prod(lead)  # not -1: ambiguous where the last dimension is 0
    if target.shape == lead:
        target = target.reshape(batch, 1)
    elif target.dim() == len(lead) + 1 and target.shape[:-1] == lead:
        target = target.reshape(batch, target.shape[-1])
    else:
        raise ValueError(
            f"{op}: target must be {list(lead)} or {_shape(lead, 'P')} to fit h {list(h.shape)}, got {_got(target)}"
        )
    if ids.shape != log_q.shape:
        raise ValueError(f"{op}: log_q must have the shape of ids {list(ids.shape)}, got {_got(log_q)}")
    if ids.dim() != 1 or (len(lead) == 0):
        if ids.shape[:-1] != lead or ids.dim() == 0:
            raise ValueError(
                f"{op}: ids must be {_shape(lead, 'm')} (per row) or [m] (shared) to fit h {list(h.shape)}, "
                f"got {_got(ids)}"
            )
        ids, log_q = ids.reshape(batch, ids.shape[-1]), log_q.reshape(batch, ids.shape[-1])
    return h.reshape(batch, h.shape[-1]), target, ids, log_q


def sampled_softmax(
    h: Tensor,
    weight: Tensor,
    target: Tensor,
    ids: Tensor,
    log_q: Tensor,
    bias: Tensor | None = None,
    *,
    scale: float = 1.0,
    reduction: str = "mean",
    absolute: bool = False,
    label_smoothing: float = 0.0,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    positives: tuple[Tensor, Tensor] | None = None,
    sparse: bool = True,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Cross-entropy over the target and a sample of the other classes, corrected for how they were drawn.

    With logits :math:`s_k = \text{scale}\,(h \cdot w_k + b_k)`, the target keeps :math:`s_y` and a draw enters as
    :math:`s_k - \log q_k - \log m` (Blanc & Rendle 2018), so that the sampled normaliser estimates the full one. A draw
    that equals a target of its row, or one of its known `positives`, takes no part.

    One pass over the gathered rows, forward and backward: no [B, m, d] and no [C, d] tensor is made. Gradients of
    `weight` and `bias` are coalesced sparse COO tensors, good for `torch.optim.SGD`, `Adagrad` and `SparseAdam`.

    Args:
        h: [*, d] hidden vectors. Under autocast they are cast to the dtype of `weight`, which keeps its own.
        weight: [C, d] in float32, float64, float16 or bfloat16; sums run in float32 (float64 for float64).
        target: int64 [*], or [*, P] for several targets a row, padded with -100. With several, the loss is lse over all
            of them and the draws, minus the mean target logit.
        ids: int64 [*, m] drawn classes of each row, or [m] shared by all rows.
        log_q: log-probability of each draw, shape of `ids`. A row with nan or inf here (or in h) has loss nan.
        bias: [C] or None, in the dtype of `weight` or float32.
        scale: multiplies the logit (1 / temperature), before the correction.
        reduction: "mean" (over the rows that count, weighted as in `F.cross_entropy`; 0 if none), "sum" or "none".
        absolute: use \|s\| as logit: the absolute softmax, for samplers with a symmetric kernel.
        label_smoothing: share of the target spread evenly over targets and unmasked draws, on the uncorrected logits.
        class_weight: [C] float32 weights of the classes, as `weight` of `F.cross_entropy`.
        ignore_index: a target of this value is skipped; a row without targets has loss 0 and is not in the mean.
        positives: known positives of each row as CSR (offsets int64 [B + 1], ids int64 [n]): masked where drawn.
        sparse: False gives dense gradients of `weight` and `bias`, which costs O(C d).
        return_lse: also return the log-normaliser of each row ([*], differentiable).

    Returns:
        The loss in float32 (float64 for float64): a scalar, or [*] for "none"; with `return_lse`, (loss, lse).
        A row whose draws are all masked (so also m = 0) has loss 0 and no gradient.

    Example:
        >>> import torch, samplex_cuda as sx
        >>> h, weight = torch.randn(4, 16), torch.randn(1000, 16, requires_grad=True)
        >>> target = torch.tensor([1, 2, 3, 4])
        >>> draw = sx.samplers.LogUniform(1000).sample(h, 20, exclude=target)
        >>> loss = sx.functional.sampled_softmax(h, weight, target, draw.ids, draw.log_q)
        >>> loss.backward()
        >>> weight.grad.is_coalesced(), weight.grad.shape
        (True, torch.Size([1000, 16]))
    """
    op = "sampled_softmax"
    lead = None
    offsets, known = None, None
    # What the op takes as it is goes straight to it: it checks everything once more, in C++. Python's checks are for
    # the rest, and for a better message; they cost as much as scoring a thousand classes.
    if not _plain(h, weight, target, ids, log_q, bias, class_weight, reduction, positives):
        if not 0.0 <= label_smoothing <= 1.0:
            raise ValueError(f"{op}: label_smoothing must be in [0, 1], got {label_smoothing}")
        lead, h, target, ids, log_q = _prepare(op, h, weight, target, ids, log_q, bias, class_weight, reduction)
        weight = weight.contiguous()
        bias = None if bias is None else bias.contiguous()
        class_weight = None if class_weight is None else class_weight.detach().contiguous()
        offsets, known = _csr(op, positives, h.shape[0], weight.device)
    needs_grad = _needs_grad(h, weight, bias, sparse)
    rest = (
        target,
        ids,
        log_q,
        class_weight,
        offsets,
        known,
        float(scale),
        float(label_smoothing),
        int(ignore_index),
        REDUCTIONS[reduction],
        bool(absolute),
        needs_grad,
        bool(return_lse),
        bool(sparse),
    )
    if torch.compiler.is_compiling():
        loss, lse = _sampled_softmax(h, weight, bias, rest, need_grad=needs_grad, with_lse=return_lse)
    else:
        try:
            loss, lse = _sampled_softmax(h, weight, bias, rest, need_grad=needs_grad, with_lse=return_lse)
        except RuntimeError as error:
            raise as_python(error) from None
    if lead is not None and reduction == "none":
        loss = loss.reshape(lead)
    if return_lse:
        assert lse is not None
        return loss, lse if lead is None else lse.reshape(lead)
    return loss


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

    The paper has one draw; more are averaged, which leaves the expected loss and its minimiser as they are. At the
    minimum :math:`\xi_y = \log p_D(y|x) - \log p_n(y|x)`: the scores are biased by the noise, and prediction adds
    :math:`\log p_n(y|x)` back (Eq. 5), which `SampledClassifier` does by itself.

    The draws come from the *unconditional* p_n: do not exclude the target when sampling. A draw that hits it counts
    like any other; without those the minimiser would be another one.

    One pass over the gathered rows, forward and backward: no [B, m, d] and no [C, d] tensor is made. Gradients of
    `weight` and `bias` are coalesced sparse COO tensors, good for `torch.optim.SGD`, `Adagrad` and `SparseAdam`.

    Args:
        h: [*, d] hidden vectors. Under autocast they are cast to the dtype of `weight`, which keeps its own.
        weight: [C, d] in float32, float64, float16 or bfloat16; sums run in float32 (float64 for float64).
        target: int64 [*], or [*, P] for several targets a row, padded with -100: their terms are averaged.
        ids: int64 [*, m] drawn classes of each row, or [m] shared by all rows. With m = 0 only the target's
            term is left.
        log_q: log p_n of each draw, shape of `ids`; read only where `reg` is not 0.
        target_log_q: shape of `target`, log p_n(y|x) of the targets; may be None where `reg` is 0. Not read where a
            target is padded.
        bias: [C] or None, in the dtype of `weight` or float32.
        scale: multiplies the score (1 / temperature).
        reg: lambda of Eq. 6, at least 0: pulls the corrected scores, xi + log p_n, to zero.
        reduction: "mean" (over the rows that count, weighted as in `F.cross_entropy`; 0 if none), "sum" or "none".
        class_weight: [C] float32 weights of the classes, as `weight` of `F.cross_entropy`: a target's term has the
            weight of its class, the draws' terms the mean weight of the targets.
        ignore_index: a target of this value is skipped; a row without targets has loss 0 and is not in the mean.
        positives: known positives of each row as CSR (offsets int64 [B + 1], ids int64 [n]), left out where drawn. This
            moves the minimiser (a class is then drawn less often than p_n says): leave it out unless that is wanted.
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
    return _entry_loss(
        "negative_sampling",
        h,
        weight,
        target,
        ids,
        log_q,
        bias,
        target_log_q=target_log_q,
        scale=scale,
        reg=reg,
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

    At the minimum :math:`s_y = \log p_D(y|x)`, whatever the noise: the scores normalise themselves, and prediction adds
    nothing. The draws come from the *unconditional* q: do not exclude the target when sampling, a draw that hits it
    counts like any other.

    One pass over the gathered rows, sparse gradients, dtypes and autocast as in `negative_sampling`.

    Args:
        h: [*, d] hidden vectors.
        weight: [C, d].
        target: int64 [*], or [*, P] for several targets a row, padded with -100: their terms are averaged.
        ids: int64 [*, m] drawn classes of each row, or [m] shared by all rows. With m = 0 only the target's term is
            left.
        log_q: log-probability of each draw, shape of `ids`. A row with nan or inf here (or in h) has loss nan.
        target_log_q: log-probability of the targets under the same law, shape of `target`.
        bias: [C] or None, in the dtype of `weight` or float32.
        scale: multiplies the score (1 / temperature), before the correction.
        reduction: "mean" (over the rows that count, weighted as in `F.cross_entropy`; 0 if none), "sum" or "none".
        class_weight: [C] float32 weights of the classes: a target's term has the weight of its class, the draws' terms
            the mean weight of the targets.
        ignore_index: a target of this value is skipped; a row without targets has loss 0 and is not in the mean.
        positives: known positives of each row as CSR (offsets int64 [B + 1], ids int64 [n]), left out where drawn. This
            moves the minimiser: leave it out unless that is wanted.
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
        "nce",
        h,
        weight,
        target,
        ids,
        log_q,
        bias,
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

    A draw that equals a target of its row, or one of its known `positives`, takes no part. The weights 1 / (m q) spread
    as q is far from softplus(s_k - s_y): a class of small q and large score comes seldom and then counts 1 / q times,
    so that the variance is that of the best of the classes over their q. The loss is about C log 2 where nothing is
    learned yet, not log C: choose the learning rate for it.

    One pass over the gathered rows, sparse gradients, dtypes and autocast as in `negative_sampling`.

    Args:
        h: [*, d] hidden vectors.
        weight: [C, d].
        target: int64 [*], or [*, P] for several targets a row, padded with -100: the mean of their bounds, each over
            the classes that are no target of the row.
        ids: int64 [*, m] drawn classes of each row, or [m] shared by all rows.
        log_q: log-probability of each draw, shape of `ids`. A row with nan or inf here (or in h) has loss nan.
        bias: [C] or None, in the dtype of `weight` or float32.
        scale: multiplies the score (1 / temperature).
        reduction: "mean" (over the rows that count, weighted as in `F.cross_entropy`; 0 if none), "sum" or "none".
        class_weight: [C] float32 weights of the targets' classes, as `weight` of `F.cross_entropy`.
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
        "one_vs_each",
        h,
        weight,
        target,
        ids,
        log_q,
        bias,
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
    constant here: who calls keeps one for every training example and moves it towards R, as `SampledClassifier` does.

    A draw that equals a target of its row, or one of its known `positives`, takes no part. The gradient is that of the
    softmax times R / eta: too small an eta makes it explode, too large a one makes it vanish.

    One pass over the gathered rows, sparse gradients, dtypes and autocast as in `negative_sampling`.

    Args:
        h: [*, d] hidden vectors.
        weight: [C, d].
        target: int64 [*], or [*, P] for several targets a row, padded with -100. With several the bound is on the loss
            of `sampled_softmax`, lse over all of them and the draws minus the mean target score: R is the sum of
            exp(s_k - mean target score) over targets and draws.
        ids: int64 [*, m] drawn classes of each row, or [m] shared by all rows.
        log_q: log-probability of each draw, shape of `ids`. A row with nan or inf here (or in h) has loss nan.
        log_eta: [*], log of eta of each row; no gradient. Best at log R, which is at least 0.
        bias: [C] or None, in the dtype of `weight` or float32.
        scale: multiplies the score (1 / temperature).
        reduction: "mean" (over the rows that count, weighted as in `F.cross_entropy`; 0 if none), "sum" or "none".
        class_weight: [C] float32 weights of the targets' classes, as `weight` of `F.cross_entropy`.
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
    loss, ratio, log_eta = _entry_loss(
        "augment_reduce",
        h,
        weight,
        target,
        ids,
        log_q,
        bias,
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
    log_sum = log_eta + ratio.log()
    return loss, log_sum.reshape(h.shape[:-1])


def _entry_loss(
    op: str,
    h: Tensor,
    weight: Tensor,
    target: Tensor,
    ids: Tensor,
    log_q: Tensor,
    bias: Tensor | None,
    *,
    target_log_q: Tensor | None = None,
    log_eta: Tensor | None = None,
    scale: float,
    reg: float = 0.0,
    reduction: str,
    class_weight: Tensor | None,
    ignore_index: int,
    positives: tuple[Tensor, Tensor] | None,
    sparse: bool,
) -> Any:
    """The loss, and for augment_reduce ratio and log_eta of each row, [B]."""
    lead = None
    offsets, known = None, None
    reads_target = op == "nce" or reg != 0.0
    with_eta = op == "augment_reduce"
    if not (
        _plain(h, weight, target, ids, log_q, bias, class_weight, reduction, positives)
        and (not reads_target if target_log_q is None else _plain_row_values(target_log_q, h))
        and (not with_eta if log_eta is None else _plain_row_values(log_eta, h))
        and 0.0 <= reg < math.inf
    ):
        if not 0.0 <= reg < math.inf:
            raise ValueError(f"{op}: reg must be finite and at least 0, got {reg}")
        of_target = getattr(target, "shape", None)
        lead, h, target, ids, log_q = _prepare(op, h, weight, target, ids, log_q, bias, class_weight, reduction)
        batch, several = target.shape
        shapes = [of_target, lead] if several == 1 else [of_target]
        why = " where reg is not 0" if reg != 0.0 else ""
        target_log_q = _row_values(op, "target_log_q", target_log_q, shapes, reads_target, why, weight)
        log_eta = _row_values(op, "log_eta", log_eta, [lead], with_eta, "", weight)
        if several == 1:
            target = target.squeeze(1)
            target_log_q = None if target_log_q is None else target_log_q.reshape(batch)
        elif target_log_q is not None:
            target_log_q = target_log_q.reshape(batch, several)
        log_eta = None if log_eta is None else log_eta.reshape(batch)
        weight = weight.contiguous()
        bias = None if bias is None else bias.contiguous()
        class_weight = None if class_weight is None else class_weight.detach().contiguous()
        offsets, known = _csr(op, positives, batch, weight.device)
    needs_grad = _needs_grad(h, weight, bias, sparse)
    rest = (
        target,
        ids,
        log_q,
        target_log_q,
        log_eta,
        class_weight,
        offsets,
        known,
        KINDS[op],
        float(scale),
        float(reg),
        int(ignore_index),
        REDUCTIONS[reduction],
        needs_grad,
        bool(sparse),
    )
    if torch.compiler.is_compiling():
        loss, ratio = _entry_loss_op(h, weight, bias, rest, need_grad=needs_grad)
    else:
        try:
            loss, ratio = _entry_loss_op(h, weight, bias, rest, need_grad=needs_grad)
        except RuntimeError as error:
            raise as_python(error) from None
    return loss.reshape(lead) if lead is not None and reduction == "none" else loss, ratio, log_eta


def full_softmax(
    h: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    scale: float = 1.0,
    reduction: str = "mean",
    absolute: bool = False,
    label_smoothing: float = 0.0,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    chunk_size: int | None = None,
) -> Tensor:
    r"""Cross-entropy over all classes, exact, in chunks of classes: no [B, C] tensor, forward or backward.

    The value and the gradients of `F.cross_entropy(scale * F.linear(h, weight, bias), target)`. It costs O(C) a row,
    with dense gradients: the honest baseline of the sampled losses, and what they estimate. Backward makes the logits
    once more instead of keeping them.

    Args:
        h: [*, d] hidden vectors. Under autocast they are cast to the dtype of `weight`, which keeps its own.
        weight: [C, d] in float32, float64, float16 or bfloat16; sums run in float32 (float64 for float64).
        target: int64 [*], or [*, P] for several targets a row, padded with -100. With several, the loss is lse over all
            classes minus the mean target logit.
        bias: [C] or None, in the dtype of `weight` or float32.
        scale: multiplies the logit (1 / temperature).
        reduction: "mean" (over the rows that count, weighted as in `F.cross_entropy`; 0 if none), "sum" or "none".
        absolute: use \|s\| as logit: the absolute softmax.
        label_smoothing: share of the target spread evenly over all classes, as in `F.cross_entropy`.
        class_weight: [C] float32 weights of the classes, as `weight` of `F.cross_entropy`.
        ignore_index: a target of this value is skipped; a row without targets has loss 0 and is not in the mean.
        chunk_size: classes per chunk; chosen from the shapes when not given.

    Returns:
        The loss in float32 (float64 for float64): a scalar, or [*] for "none". A nan in a row's h gives nan in that row
        only.

    Example:
        >>> import torch, samplex_cuda as sx
        >>> import torch.nn.functional as F
        >>> h, weight = torch.randn(4, 16), torch.randn(1000, 16, requires_grad=True)
        >>> target = torch.tensor([1, 2, 3, 999])
        >>> loss = sx.functional.full_softmax(h, weight, target)
        >>> torch.allclose(loss, F.cross_entropy(h @ weight.T, target))
        True
    """
    op = "full_softmax"
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"{op}: label_smoothing must be in [0, 1], got {label_smoothing}")
    if chunk_size is not None and (isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1):
        raise ValueError(f"{op}: chunk_size must be an int of at least 1, got {chunk_size!r}")
    _check_tensor(op, "weight", weight, "[C, d]")
    if weight.dim() == 2 and weight.shape[0] < 1:
        raise ValueError(f"{op}: weight must have at least one class, got {_got(weight)}")
    # The checks of a loss whose shared draw is empty.
    no_ids = torch.empty(0, dtype=torch.int64, device=weight.device)
    no_log_q = torch.empty(0, dtype=torch.float32, device=weight.device)
    lead, h, target, _, _ = _prepare(op, h, weight, target, no_ids, no_log_q, bias, class_weight, reduction)
    weight = weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    class_weight = None if class_weight is None else class_weight.detach().contiguous()
    loss = _full_softmax(
        h,
        weight,
        target,
        bias,
        class_weight,
        float(scale),
        float(label_smoothing),
        int(ignore_index),
        bool(absolute),
        chunk_size or 0,
    )
    if reduction == "none":
        return loss.reshape(lead)
    if reduction == "sum":
        return loss.sum()
    total = mean_weight(target, valid_targets(target, ignore_index), class_weight).sum().to(loss.dtype)
    return loss.sum() / torch.where(total == 0, 1.0, total)


def _row_values(
    op: str, name: str, t: Tensor | None, shapes: list[Any], needed: bool, why: str, weight: Tensor
) -> Tensor | None:
    """Numbers that go with the rows or their targets, in the dtype the op takes; the first of `shapes` is the usual."""
    wanted = list(shapes[0])
    if t is None:
        if needed:
            raise ValueError(f"{op}: {name} must be {wanted}{why}, got None")
        return None
    _check_tensor(op, name, t, f"{wanted} floating point")
    if t.shape not in shapes or not t.is_floating_point() or t.device != weight.device:
        raise ValueError(f"{op}: {name} must be {wanted} floating point on {weight.device}, got {_got(t)}")
    return t.detach().to(acc_dtype(weight.dtype)).contiguous()


def _plain_row_values(t: Tensor, h: Tensor) -> bool:
    try:
        return (
            t.dim() == 1
            and t.shape[0] == h.shape[0]
            and t.dtype is torch.float32
            and t.device == h.device
            and t.is_contiguous()
            and not t.requires_grad
        )
    except AttributeError:  # not a tensor
        return False


def _needs_grad(h: Tensor, weight: Tensor, bias: Tensor | None, sparse: bool) -> bool:
    """Whether a call needs gradients; sparse ones are then kept coalesced where autograd adds them up."""
    needs_grad = torch.is_grad_enabled() and (
        h.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    )
    if needs_grad and sparse and not torch.compiler.is_compiling():
        keep_coalesced(weight)
        if bias is not None:
            keep_coalesced(bias)
    return needs_grad


def _plain(
    h: Tensor,
    weight: Tensor,
    target: Tensor,
    ids: Tensor,
    log_q: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    reduction: str,
    positives: tuple[Tensor, Tensor] | None,
) -> bool:
    """Whether the arguments are [B, d], [C, d], [B], draws and fp32, all contiguous: the form the op itself takes."""
    try:
        return (
            bias is None
            and class_weight is None
            and positives is None
            and h.dim() == 2
            and target.dim() == 1
            and h.dtype is torch.float32
            and weight.dtype is torch.float32
            and log_q.dtype is torch.float32
            and ids.shape == log_q.shape
            and target.shape[0] == h.shape[0]
            and h.shape[1] == weight.shape[1]
            and target.dtype is ids.dtype is torch.int64
            and h.device == weight.device == target.device == ids.device == log_q.device
            and (ids.dim() == 1 or (ids.dim() == 2 and ids.shape[0] == h.shape[0]))
            and h.is_contiguous()
            and weight.is_contiguous()
            and target.is_contiguous()
            and ids.is_contiguous()
            and log_q.is_contiguous()
            and not log_q.requires_grad
            and reduction in REDUCTIONS
        )
    except (AttributeError, IndexError, TypeError):  # not tensors, or not of these ranks: `_prepare` says which
        return False


def _prepare(
    op: str,
    h: Tensor,
    weight: Tensor,
    target: Tensor,
    ids: Tensor,
    log_q: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    reduction: str,
) -> tuple[torch.Size, Tensor, Tensor, Tensor, Tensor]:
    """Checks every argument and brings them into the op's form: leading shape, h, target, ids, log_q."""
    for name, t, wanted in (
        ("h", h, "[*, d]"),
        ("weight", weight, "[C, d]"),
        ("target", target, "[*] int64"),
        ("ids", ids, "[*, m] or [m] int64"),
        ("log_q", log_q, "of the shape of ids"),
    ):
        _check_tensor(op, name, t, wanted)
    if weight.dim() != 2 or weight.dtype not in _FLOATS:
        raise ValueError(f"{op}: weight must be [C, d] float32, float64, float16 or bfloat16, got {_got(weight)}")
    if h.dim() == 0 or h.shape[-1] != weight.shape[1]:
        raise ValueError(f"{op}: h must be [*, {weight.shape[1]}] to fit weight {list(weight.shape)}, got {_got(h)}")
    if h.device != weight.device:
        raise ValueError(f"{op}: h must be on {weight.device} like weight, got {_got(h)}")
    if h.dtype != weight.dtype:
        if not (h.dtype in _FLOATS and torch.is_autocast_enabled(h.device.type)):
            raise TypeError(f"{op}: h must be {weight.dtype} like weight (or run under autocast), got {_got(h)}")
        h = h.to(weight.dtype)
    _check_ids(op, "target", target, weight.device)
    _check_ids(op, "ids", ids, weight.device)
    if not log_q.is_floating_point():
        raise TypeError(f"{op}: log_q must be floating point, got {_got(log_q)}")
    if log_q.device != weight.device:
        raise ValueError(f"{op}: log_q must be on {weight.device} like weight, got {_got(log_q)}")
    if reduction not in REDUCTIONS:
        raise ValueError(f"{op}: reduction must be one of {', '.join(REDUCTIONS)}, got {reduction!r}")
    acc = acc_dtype(weight.dtype)
    for name, table in (("bias", bias), ("class_weight", class_weight)):
        if table is None:
            continue
        _check_tensor(op, name, table, "[C]")
        wanted = " or ".join(sorted({_name(weight.dtype), _name(acc)}))
        if table.shape != weight.shape[:1] or table.dtype not in (weight.dtype, acc) or table.device != weight.device:
            raise ValueError(f"{op}: {name} must be [{weight.shape[0]}] {wanted} on {weight.device}, got {_got(table)}")
    lead = h.shape[:-1]
    h, target, ids, log_q = _flatten(op, h, weight, target, ids, log_q)
    log_q = log_q.detach().to(acc).contiguous()
    return lead, h.contiguous(), target.contiguous(), ids.contiguous(), log_q


def _csr(
    op: str, rows: tuple[Tensor, Tensor] | None, batch: int, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    if rows is None:
        return None, None
    if not (isinstance(rows, tuple) and len(rows) == 2):
        raise TypeError(f"{op}: positives must be a tuple (offsets [B + 1], ids [n]), got {_got(rows)}")
    offsets, ids = rows
    for name, t in (("positives offsets", offsets), ("positives ids", ids)):
        _check_tensor(op, name, t, "int64")
        _check_ids(op, name, t, device)
    if offsets.shape != (batch + 1,) or ids.dim() != 1:
        raise ValueError(
            f"{op}: positives must be (offsets [{batch + 1}], ids [n]), got offsets {_got(offsets)}, ids {_got(ids)}"
        )
    return offsets.contiguous(), ids.contiguous()


as_python = op_error
