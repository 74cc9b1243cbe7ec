"""Two towers with in-batch negatives and a log Q correction that is estimated from the stream, among 5,000 items.

The targets of a batch are the negatives of its other rows, so popular items are drawn often. Without a correction the
model pushes them down. `StreamingFrequency` estimates how often each item occurs, from the batches themselves.

Run it: python examples/two_tower.py [--steps 300]. Expected output:

    uncorrected      recall@20 19.1%
    streaming log Q  recall@20 38.7%
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import samplex_cuda as sx

ITEMS, USERS, DIM, BATCH = 5000, 2000, 24, 256


def make_log() -> tuple[Tensor, Tensor]:
    """A log of (user, item): users like items near their taste, and popular items occur more often."""
    generator = torch.Generator().manual_seed(0)
    taste = torch.randn(USERS, 8, generator=generator)
    item = torch.randn(ITEMS, 8, generator=generator)
    popularity = -torch.arange(1.0, ITEMS + 1).log()[torch.randperm(ITEMS, generator=generator)]
    p = (taste @ item.T + popularity).softmax(1)
    items = torch.multinomial(p, 20, replacement=True, generator=generator)
    return torch.arange(USERS).repeat_interleave(20), items.reshape(-1)


class TwoTower(nn.Module):
    """A tower of users and a table of items; the batch's own targets are the negatives."""

    def __init__(self, *, corrected: bool) -> None:
        super().__init__()
        self.corrected = corrected
        self.users = nn.Sequential(nn.Embedding(USERS, DIM), nn.Linear(DIM, DIM))
        sampler = sx.samplers.InBatch(ITEMS, sx.samplers.StreamingFrequency(ITEMS))
        self.items = sx.SampledClassifier(DIM, ITEMS, sampler, num_samples=BATCH, shared=True)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        """Loss of a batch."""
        h = self.users(user)
        # The sampler counts the targets of each batch. Without log_q, draws are used uncorrected.
        return self.items(h, item) if self.corrected else self.items(h, item, negatives=sx.Negatives(item))


def train(log: tuple[Tensor, Tensor], steps: int, *, corrected: bool) -> float:
    """Recall@20 on held-out pairs after a number of steps."""
    torch.manual_seed(1)
    user, item = log
    held = torch.rand(len(user)) < 0.1
    rows = torch.nonzero(~held)[:, 0]
    model = TwoTower(corrected=corrected)
    model.items.fuse_optimizer(sx.optim.RowAdagrad(model.items.parameters(), lr=0.3))
    optimizer = torch.optim.Adagrad(model.users.parameters(), lr=0.1)
    for _ in range(steps):
        batch = rows[torch.randint(len(rows), (BATCH,))]
        loss = model(user[batch], item[batch])
        optimizer.zero_grad()
        loss.backward()  # the touched rows of the item table are updated here
        optimizer.step()
    model.eval()
    with torch.no_grad():
        top = model.items.topk(model.users(user[held]), 20)[1]
    return float((top == item[held][:, None]).any(1).float().mean())


def main() -> None:
    """Train without and with the correction and print the recall."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps
    log = make_log()
    for name, corrected in (("uncorrected", False), ("streaming log Q", True)):
        print(f"{name:16s} recall@20 {100 * train(log, steps, corrected=corrected):.1f}%", flush=True)


if __name__ == "__main__":
    main()
