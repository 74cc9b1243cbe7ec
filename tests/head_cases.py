"""What the tests of `SampledClassifier` share: a small head, a batch, and its logits in float64."""

from __future__ import annotations

import torch

import samplex_cuda as sx

C, D, B = 97, 12, 7


LOSS_OPTIONS = ("label_smoothing", "absolute", "reg", "num_examples", "rate")


def make(num_classes=C, dim=D, num_samples=20, sampler=None, loss="sampled_softmax", **options):
    """A head; options of the loss go to the loss."""
    of_loss = {name: options.pop(name) for name in LOSS_OPTIONS if name in options}
    options["loss"] = sx.losses.from_name(loss, **of_loss) if isinstance(loss, str) else loss
    sampler = sx.samplers.LogUniform(num_classes) if sampler is None else sampler
    return sx.SampledClassifier(dim, num_classes, sampler, num_samples, **options)


def batch(rows=B, num_classes=C, dim=D, **options):
    return torch.randn(rows, dim, **options), torch.randint(num_classes, (rows,))


def dense_logits(head, h):
    s = head.scale * (h.double() @ head.weight.double().t() + (0.0 if head.bias is None else head.bias.double()))
    return s.abs() if head.loss.absolute else s
