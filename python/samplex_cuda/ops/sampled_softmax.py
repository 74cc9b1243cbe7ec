"""Sampled softmax: fakes and autograd of `torch.ops.samplex.sampled_softmax` and its backward.

The ops take what the kernels need and check it; `samplex_cuda.functional.sampled_softmax` is the public function.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from samplex_cuda._library import register_fake
from samplex_cuda.ops.fused_loss import OpCall, differentiate, places
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


class _StaticArguments(NamedTuple):
    """The same of the op that draws by itself."""

    hidden: Tensor
    weight: Tensor
    target: Tensor
    key: Tensor
    law: int
    num_samples: int
    shared: bool
    table: Tensor | None
    prefix: Tensor | None
    bias: Tensor | None
    class_weight: Tensor | None
    scale: float
    label_smoothing: float
    ignore_index: int
    reduction: int
    absolute: bool
    need_grad: bool
    need_hidden: bool
    normalize: bool = False
    margin: tuple[float, ...] = ()
    unit_hidden: bool = False


@register_fake("samplex::sampled_softmax")
def _(*inputs: Any) -> tuple[Tensor, ...]:
    a = _Arguments(*inputs)
    batch, _ = fake_sizes(_NAME, a.hidden)
    shared = a.ids.dim() == 1
    saved = saved_numbers(a.hidden, a.target, a.ids.shape[-1], shared, a.reduction, a.need_grad, a.with_lse)
    shapes = [() if a.reduction else (batch,), (batch,), (saved,)]
    return tuple(a.hidden.new_empty(shape, dtype=acc_dtype(a.hidden.dtype)) for shape in shapes)


@register_fake("samplex::sampled_softmax_static")
def _(*inputs: Any) -> tuple[Tensor, ...]:
    a = _StaticArguments(*inputs)
    hidden, acc = a.hidden, acc_dtype(a.hidden.dtype)
    batch, _ = fake_sizes("sampled_softmax", hidden)
    saved = saved_numbers(hidden, a.target, a.num_samples, a.shared, a.reduction, a.need_grad)
    with_unit = a.unit_hidden and a.need_grad and a.need_hidden and a.reduction and hidden.device.type == "cpu"
    return (
        hidden.new_empty(() if a.reduction else (batch,), dtype=acc),
        hidden.new_empty((a.num_samples,) if a.shared else (batch, a.num_samples), dtype=torch.int64),
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
    _, _, saved = output
    return OpCall(plan, places(_Arguments), len(inputs), a.need_grad, a.sparse, a.hidden, a.target, a.ids, saved)


def _read_static(inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> OpCall:
    a = _StaticArguments(*inputs)
    bias_dtype = None if a.bias is None else a.bias.dtype
    plan = Plan(_NAME, a.weight.shape[0], a.weight.dtype, bias_dtype, a.reduction, normalize=a.normalize)
    _, ids, saved, _ = output
    return OpCall(plan, places(_StaticArguments), len(inputs), a.need_grad, True, a.hidden, a.target, ids, saved)


differentiate("samplex::sampled_softmax", _read)
differentiate("samplex::sampled_softmax_static", _read_static)
