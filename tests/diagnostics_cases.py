"""Small heads for the tests of diagnostics."""

from __future__ import annotations

import torch

import samplex_cuda as sx

C, D, B = 6, 3, 5


def make(sampler=None, *, classes: int = C, samples: int = 4, seed: int = 3, spread: float = 1.2, **options):
    torch.manual_seed(seed)
    head = sx.SampledClassifier(D, classes, sampler or sx.samplers.Uniform(classes), num_samples=samples, **options)
    with torch.no_grad():
        head.weight.copy_(spread * torch.randn(classes, D))
        if head.bias is not None:
            head.bias.copy_(0.3 * torch.randn(classes))
    return head, torch.randn(B, D), torch.randint(classes, (B,))


def exact_logits(head, h):
    o = head.scale * (h.double() @ head.weight.detach().double().T)
    if head.bias is not None:
        o += head.scale * head.bias.detach().double()
    return o.abs() if head.loss.absolute else o
