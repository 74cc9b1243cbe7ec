"""Sampled softmax: fakes and autograd of `torch.ops.samplex.sampled_softmax` and its backward.

The ops take what the kernels need and check it; `samplex_cuda.functional.sampled_softmax` is the public function.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from samplex_cuda._library import register_fake
from samplex_cuda.ops.fused_loss import OpCall, differentiate
from samplex_cuda.ops.loss_types import Plan, acc_dtype
from samplex_cuda.ops.saved_loss import fake_gradients, fake_sizes, saved_numbers

__all__ = ["sampled_softmax", "sampled_softmax_static"]

_NAME = "sampled_softmax"

sampled_softmax = torch.ops.samplex.sampled_softmax.default
sampled_softmax_static = torch.ops.samplex.sampled_softmax_static.default._op  # eager only: past a call in Python


class _Arguments(NamedTuple):
    """The op's arguments, in the order of its schema."""

    hidden: Tensor
    weight: Tensor
    target: Tensor
    ids: Tensor
    log_q: Tensor
    bias: Tensor | None
    class_weight: Tensor | None
    known_offsets: Tensor | None
    known_ids: Tensor | None
    scale: float
    label_smoothing: float
    ignore_index: int
    reduction: int
    absolute: bool
    need_grad: bool
    with_lse: bool
    sparse: bool
    need_hidden: bool = True
    draw_labels: Tensor | None = None
    row_labels: Tensor | None = None
    target_weight: Tensor | None = None
    normalize: bool = False
    margin: tuple[float, ...] = ()


@register_fake("samplex::sampled_softmax")
def _(*inputs: Any) -> tuple[Tensor, ...]:
    a = _Arguments(*inputs)
    batch, _ = fake_sizes(_NAME, a.hidden)
    shared = a.ids.dim() == 1
    saved = saved_numbers(a.hidden, a.target, a.ids.shape[-1], shared, a.reduction, a.need_grad, a.with_lse)
    shapes = [() if a.reduction else (batch,), (batch,), (saved,)]
    return tuple(a.hidden.new_empty(shape, dtype=acc_dtype(a.hidden.dtype)) for shape in shapes)


@register_fake("samplex::sampled_softmax_static")
def _(
    hidden: Tensor, weight: Tensor, target: Tensor, key: Tensor, law: int, num_samples: int, shared: bool,
    table: Tensor | None, prefix: Tensor | None, bias: Tensor | None, class_weight: Tensor | None, scale: float,
    label_smoothing: float, ignore_index: int, reduction: int, absolute: bool, need_grad: bool, need_hidden: bool,
    normalize: bool = False, margin: tuple[float, ...] = (), unit_hidden: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    batch, _ = fake_sizes("sampled_softmax", hidden)
    saved = saved_numbers(hidden, target, num_samples, shared, reduction, need_grad)
    acc = acc_dtype(hidden.dtype)
    with_unit = unit_hidden and need_grad and need_hidden and reduction and hidden.device.type == "cpu"
    return (
        hidden.new_empty(() if reduction else (batch,), dtype=acc),
        hidden.new_empty((num_samples,) if shared else (batch, num_samples), dtype=torch.int64),
        hidden.new_empty((saved,), dtype=acc),
        hidden.new_empty(hidden.shape if with_unit else (0,)),
    )


@register_fake("samplex::sampled_softmax_bwd")
def _(
    grad_loss: Tensor,
    grad_lse: Tensor | None,
    hidden: Tensor,
    target: Tensor,
    ids: Tensor,
    saved: Tensor,
    num_classes: int,
    reduction: int,
    with_lse: bool,
    need_rows: bool,
    with_bias: bool,
) -> tuple[Tensor, ...]:
    return fake_gradients(hidden, target, ids, num_classes, need_rows, with_bias)


def _read(inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> OpCall:
    a = _Arguments(*inputs)
    bias_dtype = None if a.bias is None else a.bias.dtype
    plan = Plan(_NAME, a.weight.shape[0], a.weight.dtype, bias_dtype, a.reduction, a.with_lse, False, a.normalize)
    return OpCall(plan, (0, 1, 5), len(inputs), a.need_grad, a.sparse, a.hidden, a.target, a.ids, output[2])


def _read_static(inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> OpCall:
    hidden, weight, target, bias, reduction, need_grad = (inputs[at] for at in (0, 1, 2, 9, 14, 16))
    bias_dtype, normalize = None if bias is None else bias.dtype, len(inputs) > 18 and inputs[18]
    plan = Plan(_NAME, weight.shape[0], weight.dtype, bias_dtype, reduction, normalize=normalize)
    return OpCall(plan, (0, 1, 9), len(inputs), need_grad, True, hidden, target, output[1], output[2])


differentiate("samplex::sampled_softmax", _read)
differentiate("samplex::sampled_softmax_static", _read_static)
