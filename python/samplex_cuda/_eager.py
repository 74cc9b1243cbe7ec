"""The one function that a compiled caller leaves its graph for.

A module of its own, imported by whoever compiles: `torch.compiler.disable` loads torch's compiler, which takes longer
than the whole of this package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from samplex_cuda.heads import SampledClassifier


@torch.compiler.disable
def eager_loss(head: SampledClassifier, *args: Any) -> Tensor:
    """The sampled loss of a head, outside of any graph."""
    return head._sampled_loss(*args)
