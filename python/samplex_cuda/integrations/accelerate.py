"""Accelerate: `prepare` for a model with sampled heads, on one process or several.

On one process `accelerator.prepare` itself is enough; on several the class tables have to be kept equal.
"""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn

from samplex_cuda.optim import Combined

__all__ = ["prepare"]

_PLAIN = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


def prepare(accelerator: Accelerator, model: nn.Module, optimizer: Combined, *others: Any) -> tuple[Any, ...]:
    """`accelerator.prepare(model, optimizer, *others)` for a model with sampled heads.

    On several processes it calls `sx.distributed.replicate` before DistributedDataParallel wraps the model: every
    process keeps the whole class table, and all make the same update of it. `accelerator.clip_grad_norm_`,
    `accumulate`, `save_state` and `load_state` then work as usual.

    Args:
        accelerator: for one process, or for several with DistributedDataParallel.
        model: with at least one `SampledClassifier` that has sparse gradients.
        optimizer: of all its parameters.
        others: data loaders and schedulers.

    Returns:
        What `accelerator.prepare` returns.

    Example:
        >>> import torch, accelerate, samplex_cuda as sx
        >>> model = torch.nn.Linear(4, 8)
        >>> model.head = sx.SampledClassifier(8, 100, sx.samplers.Uniform(100), num_samples=5)
        >>> dense, rows = sx.optim.split_parameters(model)
        >>> optimizer = sx.optim.Combined(dense=torch.optim.AdamW(dense), rows=sx.optim.RowAdam(rows))
        >>> accelerator = accelerate.Accelerator(cpu=True)
        >>> model, optimizer = sx.integrations.accelerate.prepare(accelerator, model, optimizer)
        >>> accelerator.backward(model.head(model(torch.randn(3, 4)), torch.arange(3)))
        >>> optimizer.step()
    """
    if not isinstance(optimizer, Combined):
        raise TypeError(f"prepare: optimizer must be an sx.optim.Combined, got {type(optimizer).__name__}")
    kind = accelerator.distributed_type
    if kind not in _PLAIN:
        raise ValueError(
            f"prepare: accelerator must use one process or DistributedDataParallel, got {kind}: for FSDP2 wrap the "
            'encoder alone and call head.shard(encoder="average"), see docs/scale.md'
        )
    if accelerator.num_processes > 1:
        from samplex_cuda.distributed import replicate

        model = replicate(model.to(accelerator.device), encoder="average", batch_capacity="grow")
    return tuple(accelerator.prepare(model, optimizer, *others))
