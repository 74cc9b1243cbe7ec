"""Full softmax as a function."""

from __future__ import annotations

import torch
from torch import Tensor

from samplex_cuda._checks import check_int, check_number, check_tensor, describe
from samplex_cuda.functional._inputs import form_of, prepare, target_weights
from samplex_cuda.ops.full_softmax import full_softmax as _full_softmax

__all__ = ["full_softmax"]


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
    target_weight: Tensor | None = None,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    chunk_size: int | None = None,
) -> Tensor:
    r"""Cross-entropy over all classes, exact, in chunks of classes: no [B, C] tensor if C is large.

    It has the value and the gradients of `F.cross_entropy(scale * F.linear(h, weight, bias), target)`, at O(C) per row
    and with dense gradients: the exact loss that the sampled losses estimate. The first logits, up to
    `chunking.kept_bytes` (16 MB on the CPU), are kept for the backward pass, which computes the others again.

    Args:
        h: [*, d] hidden vectors. Under autocast they are cast to the dtype of `weight`, which keeps its own.
        weight: [C, d] in float32, float64, float16 or bfloat16; sums run in float32 (float64 for float64).
        target: int64 [*], or [*, P] for several targets per row, padded with -100. With several, the loss is lse over
            all classes minus the mean target logit.
        bias: [C] or None, in the dtype of `weight` or float32.
        scale: multiplies the logit (1 / temperature).
        reduction: "mean" (over the rows that count, weighted as in `F.cross_entropy`; 0 if none), "sum" or "none".
        absolute: use \|s\| as logit: the absolute softmax.
        label_smoothing: share of the target spread evenly over all classes, as in `F.cross_entropy`.
        target_weight: floating point, shape of `target`: what each target weighs, as class probabilities in
            `F.cross_entropy`; "mean" then divides by the number of rows. By default 1 / P each.
        class_weight: [C], in float32 (float64 for float64): weights of the classes, as `weight` of `F.cross_entropy`.
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
    check_number(op, "label_smoothing", label_smoothing, 0.0, 1.0)
    if chunk_size is not None:
        check_int(op, "chunk_size", chunk_size)
    form = form_of(op, scale, ignore_index, reduction, False)
    check_tensor(op, "weight", weight, "[C, d]")
    if weight.dim() == 2 and weight.shape[0] < 1:
        raise ValueError(f"{op}: weight must have at least one class, got {describe(weight)}")
    # The checks of a loss whose shared draw is empty.
    no_ids = torch.empty(0, dtype=torch.int64, device=weight.device)
    no_log_q = torch.empty(0, dtype=torch.float32, device=weight.device)
    lead, x = prepare(op, h, weight, target, no_ids, no_log_q, bias, class_weight)
    given = target_weights(op, target_weight, target, x.target, weight)
    target = x.target if x.target.dim() == 2 else x.target.unsqueeze(1)
    loss = _full_softmax(
        x.hidden,
        x.weight,
        target,
        x.bias,
        x.class_weight,
        form.scale,
        float(label_smoothing),
        form.ignore_index,
        bool(absolute),
        chunk_size or 0,
        reduction,
        None if given is None else given.reshape(target.shape),
    )
    return loss if lead is None or reduction != "none" else loss.reshape(lead)
