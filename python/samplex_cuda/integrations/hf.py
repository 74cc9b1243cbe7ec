"""Hugging Face transformers: a language model whose output layer trains on sampled tokens.

`replace_lm_head` changes a model in place. `make_optimizer` makes the one optimizer that its Trainer needs, and
`FusedRows` is a callback that owns one and fuses the row update into backward. With `labels` the model computes the
sampled loss in training and the exact loss, in chunks, in evaluation; without labels, and in `generate`, it is the
model it was. Checkpoints are those of the model as it was.
"""

from __future__ import annotations

from samplex_cuda.integrations.hf_head import LMHead, replace_lm_head
from samplex_cuda.integrations.hf_trainer import FusedRows, make_optimizer

__all__ = ["FusedRows", "LMHead", "make_optimizer", "replace_lm_head"]
