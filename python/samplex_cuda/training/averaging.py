"""Averages of the weights over the steps of a run: exponential (ema) or the mean of all (swa)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from samplex_cuda.heads import SampledClassifier
from samplex_cuda.training.config import Training

__all__ = ["averaged_parameters", "swapped", "update_average"]


def averaged_parameters(encoder: nn.Module, head: SampledClassifier, settings: Training) -> dict[str, nn.Parameter]:
    """What is averaged, by name: the encoder, and the head where `average_head` asks for it."""
    found = {f"encoder.{n}": p for n, p in encoder.named_parameters() if p is not head.weight}
    if settings.average_head:
        found.update({f"head.{n}": p for n, p in head.named_parameters()})
    return found


@torch.no_grad()
def update_average(
    average: dict[str, Tensor], parameters: dict[str, nn.Parameter], settings: Training, averaged: int
) -> None:
    """Takes the weights of a step into the average; `averaged` is the number of steps that it has already."""
    for name, parameter in parameters.items():
        if averaged == 0 or name not in average:  # a resume may have asked for more
            # Of bfloat16 weights in float32: a thousandth of a difference would round to nothing.
            wide = torch.promote_types(parameter.dtype, torch.float32)
            average[name] = parameter.detach().to(wide, copy=True)
        else:
            ema = 1.0 - settings.average_decay**settings.average_every
            weight = 1.0 / (averaged + 1) if settings.average == "swa" else ema
            mean, now = _local(average[name]), _local(parameter)
            mean.lerp_(now.to(mean.dtype), weight)


@contextlib.contextmanager
def swapped(average: dict[str, Tensor], parameters: dict[str, nn.Parameter]) -> Iterator[None]:
    """The averaged weights in place of the current ones; nothing is copied where both have the same dtype.

    FSDP2 keeps the memory of a parameter's part, so the numbers of such a part are exchanged, not the tensors.
    """
    spread = {name for name in average if _is_spread(parameters[name])}
    current = {name: parameters[name].data for name in average if name not in spread}
    kept = {name: _local(parameters[name]).detach().clone() for name in spread}
    try:
        for name, mean in average.items():
            if name in spread:
                _local(parameters[name]).detach().copy_(_local(mean))
            else:
                parameters[name].data = mean.to(parameters[name].dtype)
        yield
    finally:
        for name, data in current.items():
            parameters[name].data = data
        for name, part in kept.items():
            _local(parameters[name]).detach().copy_(part)


def _is_spread(t: Tensor) -> bool:
    """Whether a tensor is a DTensor: then torch.distributed is loaded already, which takes half a second."""
    return hasattr(t, "to_local")


def _local(t: Tensor) -> Tensor:
    """What this rank holds of a tensor, in its memory."""
    spread: Any = t
    return spread.to_local() if _is_spread(t) else t
