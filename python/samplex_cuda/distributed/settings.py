"""The settings of a head that all ranks must have in common, compared when it is made and when one of them changes."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from samplex_cuda.distributed.health import agree

if TYPE_CHECKING:
    from samplex_cuda.heads.classifier import SampledClassifier

__all__ = ["agreed", "digest", "settings_of", "whole_settings"]

_OF_MODULE = vars(nn.Module()).keys()
_OF_HEAD = (
    "in_features", "num_classes", "num_samples", "shared", "stratified", "unique", "scale", "normalize", "ignore_index",
    "sparse", "reduction",
)  # fmt: skip


def _plain(value: Any) -> Any:
    """Numbers, words and lists of them as they are; of other things the name of their type."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, torch.dtype | torch.device):
        return str(value)
    if dataclasses.is_dataclass(value):  # the margin of a loss
        return _of_object(value)
    return list(value.shape) if isinstance(value, Tensor) else type(value).__name__


def _of_object(thing: Any) -> str:
    """A loss or a sampler by its type and its public attributes."""
    found = {"num_classes": thing.num_classes} if hasattr(thing, "num_classes") else {}
    for name, value in vars(thing).items():
        if not name.startswith("_") and name not in _OF_MODULE:
            found[name] = _plain(value)
    return f"{type(thing).__name__}({', '.join(f'{name}={found[name]!r}' for name in sorted(found))})"


def _of_sampler(sampler: Any) -> list[str]:
    """A sampler and its parts; sizes of tables where these do not depend on the rank."""
    if sampler is None:
        return []
    found = []
    for module in sampler.modules():
        sizes = "" if getattr(sampler, "collective", False) else " "
        if sizes:
            sizes += str({name: list(t.shape) for name, t in module.named_buffers(recurse=False)})
        found.append(_of_object(module) + sizes)
    return found


def settings_of(head: SampledClassifier) -> dict[str, Any]:
    """What decides how a step of a head draws and what it sends, as numbers and words.

    Example:
        >>> import samplex_cuda as sx
        >>> from samplex_cuda.distributed.settings import settings_of
        >>> head = sx.SampledClassifier(4, 50, sx.samplers.Uniform(50), num_samples=10, loss="nce")
        >>> found = settings_of(head)
        >>> found["num_samples"], found["loss"]
        (10, 'NCE()')
    """
    found = {name: _plain(getattr(head, name)) for name in _OF_HEAD}
    found["loss"] = _of_object(head.loss)
    found["sampler"] = _of_sampler(head.sampler)
    found["bias"], found["learn_scale"] = head.bias is not None, head.log_scale is not None
    found["dtype"] = str(head.weight.dtype)
    return found


def whole_settings(head: SampledClassifier) -> dict[str, Any]:
    """`settings_of` a head before it is sharded or replicated, with what is looked at only once."""
    weights, kept = head.class_weight, head.weight.device.type
    devices = {t.device.type for t in head.sampler.buffers()} if head.sampler is not None else set()
    return settings_of(head) | {
        "sampler_update": head.follower.policy,
        "class_weight": None if weights is None or weights.is_meta else _checksum(weights),
        "device of the rows": kept,
        "device of the sampler": sorted(devices),
        "fused": head.fused is not None,
    }


def _checksum(t: Tensor) -> str:
    return hashlib.blake2b(t.detach().cpu().contiguous().numpy().tobytes(), digest_size=8).hexdigest()


def digest(settings: dict[str, Any]) -> int:
    """A number of 63 bits, the same for the same settings in every process.

    Example:
        >>> from samplex_cuda.distributed.settings import digest
        >>> digest({"a": 1}) == digest({"a": 1}), digest({"a": 1}) == digest({"a": 2})
        (True, False)
    """
    text = json.dumps(settings, sort_keys=True).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


@contextlib.contextmanager
def agreed(op: str, group: Any, settings: dict[str, Any]) -> Iterator[None]:
    """Around the checks of a constructor: every rank raises if settings differ, or if one of them refuses its own.

    Args:
        op: name for the messages.
        group: the ranks; None: nobody is asked, and the checks raise by themselves.
        settings: of this rank.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as found:
        error = found
    if group is not None:
        settings = {name: _plain(value) for name, value in settings.items()}
        agree(settings, group, op=op, error=error)
    if error is not None:
        raise error
