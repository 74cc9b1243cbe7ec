"""Heads whose class table is spread over the ranks of a process group: `head.shard(mesh_or_group)`. See docs/scale.md.

Nothing here replaces `torch.distributed`: groups, launchers, checkpoints and the encoder's DDP or FSDP2 stay torch's.
"""

from __future__ import annotations

from samplex_cuda.distributed.batches import even_batches
from samplex_cuda.distributed.checkpoint import (
    CheckpointError,
    load_checkpoint,
    read_checkpoint,
    save_checkpoint,
    verify_checkpoint,
)
from samplex_cuda.distributed.head import ShardedClassifier
from samplex_cuda.distributed.health import Heartbeat, agree, attempt_store
from samplex_cuda.distributed.layout import Layout
from samplex_cuda.distributed.replica import replicate

__all__ = [
    "CheckpointError",
    "Heartbeat",
    "Layout",
    "ShardedClassifier",
    "agree",
    "attempt_store",
    "even_batches",
    "load_checkpoint",
    "read_checkpoint",
    "replicate",
    "save_checkpoint",
    "verify_checkpoint",
]
