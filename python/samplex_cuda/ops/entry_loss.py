"""The entry losses: fakes and autograd of `torch.ops.samplex.entry_loss` and its backward.

One op serves negative sampling, NCE, one-vs-each and augment-and-reduce; its `kind` says which. The op takes what the
kernels need and checks it; the functions of `samplex_cuda.functional` are the public API.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from samplex_cuda._library import register_fake
from samplex_cuda.ops.fused_loss import OpCall, differentiate
from samplex_cuda.ops.loss_types import ENTRY_KINDS, Plan, acc_dtype
from samplex_cuda.ops.saved_loss import fake_gradients, fake_sizes, saved_numbers

__all__ = ["augment_reduce_static_", "entry_loss", "entry_loss_static", "ratio_of"]

_NAMES = tuple(ENTRY_KINDS)
_WITH_RATIO = ENTRY_KINDS["augment_reduce"]

entry_loss = torch.ops.samplex.entry_loss.default
entry_loss_static = torch.ops.samplex.entry_loss_static.default
augment_reduce_static_ = torch.ops.samplex.augment_reduce_static_.default


class _Arguments(NamedTuple):
    """The op's arguments, in the order of its schema."""

    hidden: Tensor
    weight: Tensor
    target: Tensor
    ids: Tensor
    log_q: Tensor
    target_log_q: Tensor | None
    log_eta: Tensor | None
    bias: Tensor | None
    class_weight: Tensor | None
    known_offsets: Tensor | None
    known_ids: Tensor | None
    kind: int
    scale: float
    reg: float
    ignore_index: int
    reduction: int
    need_grad: bool
    sparse: bool


@register_fake("samplex::entry_loss")
def _(*inputs: Any) -> tuple[Tensor, ...]:
    a = _Arguments(*inputs)
    batch, _ = fake_sizes("entry_loss", a.hidden)
    shared, with_ratio = a.ids.dim() == 1, a.kind == _WITH_RATIO
    saved = saved_numbers(a.hidden, a.target, a.ids.shape[-1], shared, a.reduction, a.need_grad, with_ratio=with_ratio)
    shapes = [() if a.reduction else (batch,), (saved,)]
    return tuple(a.hidden.new_empty(shape, dtype=acc_dtype(a.hidden.dtype)) for shape in shapes)


def _fake_static(
    op: str, hidden: Tensor, target: Tensor, num_samples: int, shared: bool, reduction: int, need_grad: bool,
    with_ratio: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    batch, _ = fake_sizes(op, hidden)
    saved = saved_numbers(hidden, target, num_samples, shared, reduction, need_grad, with_ratio=with_ratio)
    acc = acc_dtype(hidden.dtype)
    return (
        hidden.new_empty(() if reduction else (batch,), dtype=acc),
        hidden.new_empty((num_samples,) if shared else (batch, num_samples), dtype=torch.int64),
        hidden.new_empty((saved,), dtype=acc),
    )


class _StaticArguments(NamedTuple):
    """The arguments of `entry_loss_static`, in the order of its schema."""

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
    kind: int
    scale: float
    reg: float
    ignore_index: int
    reduction: int
    need_grad: bool


@register_fake("samplex::entry_loss_static")
def _(*inputs: Any) -> tuple[Tensor, ...]:
    a = _StaticArguments(*inputs)
    return _fake_static(
        "entry_loss_static", a.hidden, a.target, a.num_samples, a.shared, a.reduction, a.need_grad, False
    )


@register_fake("samplex::augment_reduce_static_")
def _(
    hidden: Tensor, weight: Tensor, target: Tensor, key: Tensor, law: int, num_samples: int, shared: bool,
    table: Tensor | None, prefix: Tensor | None, bias: Tensor | None, class_weight: Tensor | None, log_eta: Tensor,
    index: Tensor, rate: float, scale: float, ignore_index: int, reduction: int, need_grad: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    return _fake_static("augment_reduce_static_", hidden, target, num_samples, shared, reduction, need_grad, True)


@register_fake("samplex::entry_loss_bwd")
def _(
    grad_loss: Tensor,
    hidden: Tensor,
    target: Tensor,
    ids: Tensor,
    saved: Tensor,
    kind: int,
    num_classes: int,
    reduction: int,
    need_rows: bool,
    with_bias: bool,
) -> tuple[Tensor, ...]:
    return fake_gradients(hidden, target, ids, num_classes, need_rows, with_bias)


def _read(inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> OpCall:
    a = _Arguments(*inputs)
    bias_dtype = None if a.bias is None else a.bias.dtype
    name, with_ratio = _NAMES[a.kind], a.kind == _WITH_RATIO
    plan = Plan(name, a.weight.shape[0], a.weight.dtype, bias_dtype, a.reduction, False, with_ratio)
    return OpCall(plan, (0, 1, 7), len(_Arguments._fields), a.need_grad, a.sparse, a.hidden, a.target, a.ids, output[1])


def _read_static(inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> OpCall:
    a = _StaticArguments(*inputs)
    bias_dtype = None if a.bias is None else a.bias.dtype
    plan = Plan(_NAMES[a.kind], a.weight.shape[0], a.weight.dtype, bias_dtype, a.reduction)
    return OpCall(plan, (0, 1, 9), len(inputs), a.need_grad, True, a.hidden, a.target, output[1], output[2])


differentiate("samplex::entry_loss", _read)
differentiate("samplex::entry_loss_static", _read_static)


def ratio_of(saved: Tensor, hidden: Tensor) -> Tensor:
    """The ratios of augment_reduce, [B], from what its forward saved; a copy, so that gradients are not kept alive."""
    return saved[saved.shape[0] - hidden.shape[0] :].clone()
