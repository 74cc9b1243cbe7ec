"""Identities on a sphere: an ArcFace head over 2,000 identities that trains on 128 of them a step.

Run it: python examples/faces.py [--steps 150]. It prints how often the identity of a new picture is the nearest one of
all. Expected output:

    before: identified 0.0%
    step 50: loss 5.489
    step 100: loss 2.429
    step 150: loss 1.127
    after: identified 96.6%
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import samplex_cuda as sx

IDENTITIES, PIXELS, DIM = 2_000, 64, 32


def pictures(faces: Tensor, who: Tensor, generator: torch.Generator) -> Tensor:
    """Made-up pictures of identities `who` [B]: a face, light of random strength, noise. Returns [B, 64]."""
    light = 0.5 + torch.rand(len(who), 1, generator=generator)
    return light * (faces[who] + 0.4 * torch.randn(len(who), PIXELS, generator=generator))


class Recognizer(nn.Module):
    """A small network, and a head that compares angles with a margin."""

    def __init__(self, margin: float) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(PIXELS, 128), nn.ReLU(), nn.Linear(128, DIM))
        self.head = sx.SampledClassifier(
            DIM,
            IDENTITIES,
            sampler=sx.samplers.Uniform(IDENTITIES),
            num_samples=128,
            shared=True,
            loss=sx.losses.SampledSoftmax(margin=sx.losses.ArcFace(margin)),
            normalize=True,
            scale=24.0,
        )

    def forward(self, x: Tensor, who: Tensor) -> Tensor:
        """Loss: sampled, with the margin, in training mode; exact and without it in eval mode."""
        return self.head(self.body(x), who)


@torch.no_grad()
def found(model: Recognizer, x: Tensor, who: Tensor) -> float:
    """How often the identity is the nearest of all."""
    return float((model.head.predict(model.body(x)) == who).double().mean())


def main() -> None:
    """Train and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--margin", type=float, default=0.2)
    options = parser.parse_args()

    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    # Identities share traits, so that some of them look alike.
    faces = torch.randn(IDENTITIES, 16, generator=generator) @ torch.randn(16, PIXELS, generator=generator) / 4
    model = Recognizer(options.margin)
    model.head.fuse_optimizer(sx.optim.RowAdagrad([model.head.weight], lr=0.05))
    optimizer = torch.optim.Adam(model.body.parameters(), lr=0.002)

    some = torch.arange(0, IDENTITIES, 2)
    test = pictures(faces, some, generator)
    print(f"before: identified {100 * found(model, test, some):.1f}%")
    for step in range(options.steps):
        who = torch.randint(IDENTITIES, (256,), generator=generator)
        loss = model(pictures(faces, who, generator), who)
        optimizer.zero_grad()
        loss.backward()  # class rows are updated here
        optimizer.step()
        if (step + 1) % 50 == 0:
            print(f"step {step + 1}: loss {loss.item():.3f}")
    print(f"after: identified {100 * found(model, test, some):.1f}%")


if __name__ == "__main__":
    main()
