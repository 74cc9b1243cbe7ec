"""Static samplers by name."""

from __future__ import annotations

import torch

import samplex_cuda as sx

COUNTS = [5, 0, 1, 2, 0, 7, 100, 3, 0, 1, 1, 9, 0]
LAWS = ["uniform", "log_uniform", "alias"]
KEY = (0x1234_5678_9ABC, 77)


def make(law, C=None, device="cpu"):
    if law == "alias":
        counts = COUNTS if C is None else [1 + (k * 7919) % 13 for k in range(C)]
        return sx.samplers.Unigram(counts).to(device)
    return {"uniform": sx.samplers.Uniform, "log_uniform": sx.samplers.LogUniform}[law](C or 13).to(device)


def key_on(device, key=KEY):
    return torch.tensor(key, dtype=torch.int64, device=device)
