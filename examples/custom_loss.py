"""Write a loss: an additive margin on the cosine of the target, as face recognition uses it.

A loss of the scores is one method of `sx.losses.ScoreLoss`; samplers, sparse gradients and row optimizers work as with
any other loss.

Run it: python examples/custom_loss.py [--steps 200]. Expected output:

    margin 0.0: cosine to the own class 0.687, to the nearest other 0.545
    margin 0.3: cosine to the own class 0.713, to the nearest other 0.545
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import Tensor
from torch.nn import functional as F

import samplex_cuda as sx

PEOPLE, DIM, BATCH, DRAWS, SCALE = 2_000, 32, 128, 128, 16.0


class CosineMargin(sx.losses.ScoreLoss):
    """Sampled softmax with the target's score lowered by scale * margin."""

    name = "cosine_margin"

    def __init__(self, margin: float) -> None:
        self.margin = margin

    def row_loss(self, target: Tensor, draws: Tensor, x) -> Tensor:
        """Loss [B] of target scores [B, 1] and scores of the draws [B, m]; a masked draw is -inf."""
        own = target[:, :1] - SCALE * self.margin
        others = draws - x.log_q - math.log(draws.shape[1])  # the logQ correction
        return torch.cat([own, others], 1).logsumexp(1) - own[:, 0]


def train(margin: float, steps: int) -> tuple[float, float]:
    """Mean cosine of new pictures to their own class and to the nearest other class."""
    torch.manual_seed(0)
    faces = F.normalize(torch.randn(PEOPLE, 64), dim=1)
    encoder = torch.nn.Linear(64, DIM)
    head = sx.SampledClassifier(
        DIM, PEOPLE, sx.samplers.Uniform(PEOPLE), DRAWS, loss=CosineMargin(margin), bias=False, scale=SCALE
    )
    rows = sx.optim.RowAdagrad(head.parameters(), lr=0.05)
    optimizer = torch.optim.Adam(encoder.parameters(), lr=5e-3)

    def pictures() -> tuple[Tensor, Tensor]:
        y = torch.randint(PEOPLE, (BATCH,))
        return F.normalize(encoder(faces[y] + 0.05 * torch.randn(BATCH, 64)), dim=1), y

    with torch.no_grad():
        head.weight.copy_(F.normalize(head.weight, dim=1))
    for step in range(steps):
        h, y = pictures()
        head(h, y, key=sx.Key(1, step)).backward()
        touched = head.weight.grad.coalesce().indices()[0]
        for each in (rows, optimizer):
            each.step()
            each.zero_grad()
        with torch.no_grad():  # class vectors stay on the sphere; only the touched rows changed
            head.weight[touched] = F.normalize(head.weight[touched], dim=1)
    with torch.no_grad():
        h, y = pictures()
        cosine = h @ head.weight.t()
        own = cosine.gather(1, y[:, None])
        return own.mean().item(), cosine.scatter(1, y[:, None], -1.0).amax(1).mean().item()


def main() -> None:
    """Without and with a margin."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps
    for margin in (0.0, 0.3):
        own, other = train(margin, steps)
        print(f"margin {margin}: cosine to the own class {own:.3f}, to the nearest other {other:.3f}")


if __name__ == "__main__":
    main()
