"""The training steps whose cost on a GPU is counted, by a name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import samplex_cuda as sx

CLASSES, DIM, BATCH, DRAWS = 1_000_000, 32, 64, 64
FEW = 4096  # classes of a sampler that is made from the class table
EXAMPLES = 1000  # of augment_reduce, which keeps a number for each

# The names: what draws ("shared ..." once for the batch), then what is special; the last word may be a loss.
PLAIN = ["per row", "shared", "shared bf16", "adam", "grad scaler"]
ENTRY_LOSSES = ("negative_sampling", "nce", "one_vs_each", "augment_reduce")
ENTRY = [f"{draws} {loss}" for draws in ("per row", "shared") for loss in ENTRY_LOSSES]
# Samplers that follow the class table in every step.
FOLLOWING = [f"{draws} {name}" for draws in ("per row", "shared") for name in ("kernel sampler", "midx")]
FOLLOWING += ["per row mixture", "shared softmax sampler"]
SPHERE = [f"{draws} {name}" for draws in ("per row", "shared") for name in ("sphere", "arcface")]
SPHERE += ["shared learned scale"]
BATCHED = ["shared in-batch", "shared in-batch mixed"]
# A number per example with draws that are made outside of the op.
EXAMPLE = ["per row kernel sampler augment_reduce"]
FULL = ["full softmax", "full softmax weighted"]  # no draws, no row optimizer


def _sampler(kind: str) -> sx.samplers.Sampler:
    if "in-batch" in kind:
        frequency = sx.samplers.StreamingFrequency(FEW)
        extra = sx.samplers.Uniform(CLASSES) if kind.endswith("mixed") else None
        return sx.samplers.InBatch(CLASSES, frequency, extra=extra)
    if kind not in FOLLOWING + EXAMPLE:
        return sx.samplers.LogUniform(CLASSES)
    weight = torch.nn.functional.normalize(torch.randn(FEW, DIM), dim=1)
    if kind.endswith("midx"):
        return sx.samplers.MIDX(weight, 32, bias=torch.zeros(FEW), key=sx.Key(1))
    if kind.endswith("softmax sampler"):
        return sx.samplers.Softmax(weight, copy=True)
    features = sx.samplers.RandomFourier(weight, 64, 1.0, key=sx.Key(1), normalize=True)
    if kind.endswith("mixture"):
        return sx.samplers.Mixture([(features, 1.0), (sx.samplers.LogUniform(FEW), 1.0)])
    return features


def _head_options(kind: str) -> dict[str, Any]:
    loss = next((name for name in sx.losses.names() if kind.endswith(name)), "sampled_softmax")
    if kind.endswith("arcface"):
        return {"loss": sx.losses.SampledSoftmax(margin=sx.losses.ArcFace(0.5)), "normalize": True, "scale": 16.0}
    if kind in SPHERE:
        return {"normalize": True, "scale": 16.0, "learn_scale": kind.endswith("learned scale")}
    if loss == "augment_reduce":
        return {"loss": sx.losses.AugmentReduce(num_examples=EXAMPLES)}
    return {"loss": loss, "sampler_update": "step"} if kind in FOLLOWING else {"loss": loss}


def make_step(kind: str, *, device: str = "cpu", capturable: bool = False) -> Callable[[], None]:
    """Forward, backward and update in one call."""
    if kind in FULL:
        return _full_step(kind, device)
    dtype = torch.bfloat16 if kind.endswith("bf16") else torch.float32
    sampler, options = _sampler(kind), _head_options(kind)
    draws = None if kind.endswith("in-batch") else DRAWS
    head = sx.SampledClassifier(DIM, sampler.num_classes, sampler, draws, shared=kind.startswith("shared"), **options)
    head.to(device, dtype)
    rows = [head.weight] if head.bias is None else [head.weight, head.bias]
    rule = sx.optim.RowAdam if kind == "adam" else sx.optim.RowAdagrad
    scaler = torch.amp.GradScaler(device, init_scale=1024.0) if kind == "grad scaler" else None
    head.fuse_optimizer(rule(rows, lr=0.1, capturable=capturable), grad_scaler=scaler)
    if device == "cpu":
        head.fused.at_once = False  # a GPU has no such step; here it would look at the upstream gradient
    h = torch.randn(BATCH, DIM).to(device, dtype).requires_grad_(True)
    y = torch.randint(sampler.num_classes, (BATCH,)).to(device)
    index = torch.randint(EXAMPLES, (BATCH,)).to(device) if head.loss.needs.example_index else None

    def step() -> None:
        h.grad = None
        loss = head(h, y, index=index)
        (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is not None and device != "cpu":
            scaler.update()

    return step


def _full_step(kind: str, device: str) -> Callable[[], None]:
    """Forward and backward over all classes."""
    loss = sx.losses.FullSoftmax(label_smoothing=0.1) if kind.endswith("weighted") else "full_softmax"
    weight = torch.rand(FEW) if kind.endswith("weighted") else None
    head = sx.SampledClassifier(DIM, FEW, loss=loss, class_weight=weight).to(device)
    h = torch.randn(BATCH, DIM).to(device).requires_grad_(True)
    y = torch.randint(FEW, (BATCH,)).to(device)

    def step() -> None:
        h.grad = head.weight.grad = head.bias.grad = None
        head(h, y).backward()

    return step
