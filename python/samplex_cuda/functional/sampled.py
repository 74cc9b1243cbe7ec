"""Sampled softmax as a function."""

from __future__ import annotations

import math

from torch import Tensor

from samplex_cuda import losses
from samplex_cuda._checks import check_number, check_tensor, describe, shape_text
from samplex_cuda.draw import Negatives
from samplex_cuda.functional._inputs import form_of, prepare, target_weights
from samplex_cuda.functional._negatives import flat_negatives
from samplex_cuda.ops.fused_loss import run_loss
from samplex_cuda.ops.loss_types import acc_dtype
from samplex_cuda.ops.sphere import unit_rows
from samplex_cuda.optim.fusion import fusion_of

__all__ = ["sampled_softmax"]


def sampled_softmax(
    h: Tensor,
    weight: Tensor,
    target: Tensor,
    ids: Tensor | tuple[Tensor, Tensor],
    log_q: Tensor | None,
    bias: Tensor | None = None,
    *,
    scale: float = 1.0,
    reduction: str = "mean",
    absolute: bool = False,
    label_smoothing: float = 0.0,
    normalize: bool = False,
    margin: losses.Margin | None = None,
    target_weight: Tensor | None = None,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    positives: tuple[Tensor, Tensor] | None = None,
    sparse: bool = True,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Cross-entropy over the target and a sample of the other classes, corrected for how they were drawn.

    With logits :math:`s_k = \text{scale}\,(h \cdot w_k + b_k)`, the target keeps :math:`s_y` and a draw enters as
    :math:`s_k - \log q_k - \log m` (Blanc & Rendle 2018), so that the sampled normalizer estimates the full one. A draw
    that equals a target of its row, or one of its known `positives`, is ignored.

    One pass over the gathered rows, forward and backward: no [B, m, d] and no [C, d] tensor is made. Gradients of
    `weight` and `bias` are coalesced sparse COO tensors, good for `torch.optim.SGD`, `Adagrad` and `SparseAdam`.

    Args:
        h: [*, d] hidden vectors. Under autocast they are cast to the dtype of `weight`, which keeps its own.
        weight: [C, d] in float32, float64, float16 or bfloat16; sums run in float32 (float64 for float64).
        target: int64 [*], or [*, P] for several targets per row, padded with -100. With several, the loss is lse over
            all of them and the draws, minus the mean target logit.
        ids: int64 [*, m] drawn classes of each row, or [m] shared by all rows; or a CSR pair (offsets int64 [B + 1],
            ids int64 [n]) for rows with different numbers of draws (on a GPU that waits for the device).
        log_q: log-probability of each draw, shape of `ids` ([n] for a CSR pair). A row with nan or inf here (or in h)
            has loss nan. None: uncorrected, each draw enters with its plain logit; docs/negatives.md says what that
            does.
        bias: [C] or None, in the dtype of `weight` or float32.
        scale: multiplies the logit (1 / temperature), before the correction.
        reduction: "mean" (over the rows that count, weighted as in `F.cross_entropy`; 0 if none), "sum" or "none".
        absolute: use \|s\| as logit: the absolute softmax, for samplers with a symmetric kernel.
        label_smoothing: share of the target spread evenly over targets and unmasked draws, on the uncorrected logits.
        normalize: take h and the class rows on the unit sphere: the product is their cosine, and gradients go through
            the norms. A row of zeros has cosine 0 and no gradient. Takes no bias.
        margin: `sx.losses.ArcFace(0.5)`, `CosFace(0.35)` or `Margin(m1, m2, m3)` on the targets. Requires
            `normalize=True`.
        target_weight: floating point, shape of `target`: what each target weighs, as class probabilities in
            `F.cross_entropy`; "mean" then divides by the number of rows. By default 1 / P each.
        class_weight: [C], in float32 (float64 for float64): weights of the classes, as `weight` of `F.cross_entropy`.
        ignore_index: a target of this value is skipped; a row without targets has loss 0 and is not in the mean.
        positives: known positives of each row as CSR (offsets int64 [B + 1], ids int64 [n]): masked where drawn.
        sparse: False gives dense gradients of `weight` and `bias`, which costs O(C d).
        return_lse: also return the log-normalizer of each row ([*], differentiable).

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
    loss_of = _PLAIN
    check_number("sampled_softmax", "label_smoothing", label_smoothing, 0.0, 1.0)
    if label_smoothing or absolute or margin is not None:
        loss_of = losses.SampledSoftmax(label_smoothing, absolute, margin)
    if margin is not None and not normalize:
        raise ValueError(
            "sampled_softmax: normalize must be True with a margin, got False: margins are defined on angles"
        )
    if normalize and bias is not None:
        raise ValueError("sampled_softmax: bias must be None with normalize=True, got a tensor")
    if log_q is None or isinstance(ids, tuple):
        ids, log_q = _plain(h, weight, target, ids, log_q, ignore_index)
    lead, x = prepare("sampled_softmax", h, weight, target, ids, log_q, bias, class_weight, positives)
    form = form_of("sampled_softmax", scale, ignore_index, reduction, sparse, return_lse)
    if normalize:
        x, form = x._replace(hidden=unit_rows(x.hidden)), form._replace(normalize=True)
    if target_weight is not None:
        x = x._replace(target_weight=target_weights("sampled_softmax", target_weight, target, x.target, weight))
    loss, lse = run_loss(loss_of, x, form, fusion_of(weight))
    if lead is not None and reduction == "none":
        loss = loss.reshape(lead)
    if not return_lse:
        return loss
    assert lse is not None
    return loss, lse if lead is None else lse.reshape(lead)


def _plain(
    h: Tensor,
    weight: Tensor,
    target: Tensor,
    ids: Tensor | tuple[Tensor, Tensor],
    log_q: Tensor | None,
    ignore_index: int,
) -> tuple[Tensor, Tensor]:
    """Draws with rows of one length and a log_q, from ragged or uncorrected ones."""
    op = "sampled_softmax"
    for name, t in (("h", h), ("weight", weight), ("target", target)):
        check_tensor(op, name, t, "")
    lead = h.shape[:-1]
    several = target.dim() == h.dim()
    if target.shape[: len(lead)] != lead or target.dim() > h.dim():
        raise ValueError(
            f"{op}: target must be {list(lead)} or {shape_text(lead, 'P')} to fit h, got {describe(target)}"
        )
    flat = target.reshape(math.prod(lead), -1) if several else target.reshape(-1)
    draw = flat_negatives(op, Negatives(ids, log_q), flat, lead, ignore_index, acc_dtype(weight.dtype))
    if draw.ids.dim() == 1:
        return draw.ids, draw.log_q
    shape = (*lead, draw.ids.shape[-1])
    return draw.ids.reshape(shape), draw.log_q.reshape(shape)


_PLAIN = losses.SampledSoftmax()
