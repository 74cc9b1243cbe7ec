"""Feature maps: fakes and autograd of `torch.ops.samplex.rff`; `samplex_cuda.rff` is the public function."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from samplex_cuda._library import register_fake
from samplex_cuda.ops.loss_types import acc_dtype
from samplex_cuda.ops.transforms import refuse_forward_mode, refuse_functional

__all__ = ["KINDS", "num_numbers", "rff"]

KINDS = {"rff": 0, "orf": 0, "positive": 1, "quadratic": 2}


def num_numbers(kind: int, dim: int, num_features: int) -> int:
    """Numbers in phi(x) of the op's kind; see `samplex_cuda.rff.num_numbers`."""
    if kind == KINDS["quadratic"]:
        return dim * (dim + 1) // 2 + 1
    return num_features * (2 if kind == KINDS["rff"] else 1)


@register_fake("samplex::rff")
def _(
    x: Tensor,
    omega: Tensor | None,
    kind: int,
    nu: float = 1.0,
    alpha: float = 1.0,
    gaussian: bool = False,
    shift: float = 0.0,
) -> Tensor:
    width = num_numbers(kind, x.shape[1], 0 if omega is None else omega.shape[0])
    return x.new_empty((x.shape[0], width), dtype=acc_dtype(x.dtype))


@register_fake("samplex::rff_bwd")
def _(
    grad: Tensor,
    x: Tensor,
    omega: Tensor | None,
    features: Tensor,
    kind: int,
    nu: float,
    alpha: float,
    gaussian: bool,
    need_x: bool,
    need_omega: bool,
) -> tuple[Tensor, Tensor]:
    rows = 0 if omega is None or not need_omega else omega.shape[0]
    return (
        x.new_empty((x.shape[0] if need_x else 0, x.shape[1])),
        x.new_empty((rows, x.shape[1]), dtype=acc_dtype(x.dtype)),
    )


_op = torch.ops.samplex.rff.default
_bwd_op = torch.ops.samplex.rff_bwd.default


class _Settings(NamedTuple):
    """The arguments of the op that its backward takes too, without the tensors."""

    kind: int
    nu: float
    alpha: float
    gaussian: bool


def _gradients(
    need: tuple[bool, bool], tensors: tuple[Any, ...], settings: _Settings, grad: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of x and omega, as far as `need` says."""
    if grad is None:
        return None, None
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError("rff: double backward (create_graph=True) is not supported")
    d_x, d_omega = _bwd_op(grad.contiguous(), *tensors, *settings, *need)
    return d_x if need[0] else None, d_omega if need[1] else None


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, omega, kind, nu, alpha, gaussian, _ = inputs
    ctx.settings = _Settings(kind, nu, alpha, gaussian)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, omega, output)


def _backward(ctx: Any, grad: Tensor | None) -> Any:
    need = ctx.needs_input_grad
    return (*_gradients((need[0], need[1]), ctx.saved_tensors, ctx.settings, grad),) + (None,) * 5


torch.library.register_autograd("samplex::rff", _backward, setup_context=_setup_context)


class _Eager(torch.autograd.Function):
    """The same formula for eager mode, by the fast path: see `sampled_softmax`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, omega: Tensor | None, settings: _Settings, shift: float) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            features = _op(x, omega, *settings, shift)
        ctx.settings = settings
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, omega, features)
        return features

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        need = ctx.needs_input_grad
        return (*_gradients((need[0], need[1]), ctx.saved_tensors, ctx.settings, grad), None, None)


def rff(x: Tensor, omega: Tensor | None, kind: int, nu: float, alpha: float, gaussian: bool, shift: float) -> Tensor:
    """`torch.ops.samplex.rff` by the fast path: the op itself under compile, a plain Function else.

    Args:
        x: [B, d] contiguous.
        omega: [D, d] contiguous, float32 (float64 for float64 x), or None.
        kind: a value of `KINDS`.
        nu: of "positive".
        alpha: of "quadratic".
        gaussian: of "positive".
        shift: of "positive".

    Returns:
        [B, F].
    """
    settings = _Settings(kind, nu, alpha, gaussian)
    if torch.compiler.is_compiling():
        return torch.ops.samplex.rff(x, omega, *settings, shift)
    refuse_forward_mode("rff", x, omega)
    if torch.is_grad_enabled() and (x.requires_grad or (omega is not None and omega.requires_grad)):
        refuse_functional("rff")
        return _Eager.apply(x, omega, settings, shift)
    with torch._C._AutoDispatchBelowAutograd():
        return _op(x, omega, *settings, shift)
