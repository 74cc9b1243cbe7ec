"""What a compiled caller leaves its graph for.

A separate module, imported by code that compiles: `torch.compiler.disable` loads torch's compiler, which takes longer
than the whole of this package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch._dynamo
import torch._guards
from torch import Tensor

if TYPE_CHECKING:
    from samplex_cuda.heads import SampledClassifier
    from samplex_cuda.losses.base import Loss
    from samplex_cuda.ops.loss_types import Form, Inputs

__all__ = ["captures_scalars", "eager_attention_pool", "eager_loss", "eager_replica_loss", "eager_run_loss"]

_UPDATES = (
    "SampledClassifier: a head with a fused optimizer, or with a sampler that follows the class table (Quadratic, "
    "RandomFourier, Softmax), updates tables inside the step and runs outside of the graph. With fullgraph=True, do "
    "not fuse and use sampler_update=None, or compile the encoder alone"
)
_SPARSE = (
    "samplex_cuda: a sparse gradient has as many rows as the step touched, which the graph must read from the device. "
    "fullgraph=True, torch._dynamo.config.capture_scalar_outputs=True or sparse=False keep the loss in the graph"
)


@torch._dynamo.assume_constant_result
def captures_scalars() -> bool:
    """Whether the graph under way may hold numbers that are read from a tensor."""
    context = torch._guards.TracingContext.try_get()
    mode = None if context is None else context.fake_mode
    shapes = None if mode is None else mode.shape_env
    return shapes is None or bool(shapes.allow_scalar_outputs)


@torch.compiler.disable(reason=_UPDATES)
def eager_loss(head: SampledClassifier, *args: Any) -> Tensor:
    """The sampled loss of a head, outside of any graph."""
    return head._sampled_loss(*args)


@torch.compiler.disable(reason="SampledClassifier: a replicated head exchanges its batch outside of the graph")
def eager_replica_loss(head: SampledClassifier, *args: Any) -> Tensor:
    """The loss of a replicated head, outside of any graph."""
    return head._replica.loss(head, *args)


@torch.compiler.disable(reason=_SPARSE)
def eager_run_loss(loss: Loss, x: Inputs, form: Form) -> tuple[Tensor, Tensor | None]:
    """`run_loss`, outside of any graph."""
    from samplex_cuda.ops.fused_loss import run_loss

    return run_loss(loss, x, form)


@torch.compiler.disable(reason=_SPARSE)
def eager_attention_pool(*args: Any) -> Tensor:
    """`attention_pool` with a sparse gradient, outside of any graph."""
    from samplex_cuda.ops.attention_pool import attention_pool

    return attention_pool(*args)
