"""One data set, six kinds of negatives: recall@20 of a two-tower model after the same number of steps.

Run it: python examples/negatives.py [--steps 100]. Expected output:

    uncorrected  recall@20 22.2%
    in-batch     recall@20 39.5%
    mixed        recall@20 40.2%
    own          recall@20 41.6%
    distinct     recall@20 41.3%
    hard         recall@20 40.5%
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

import samplex_cuda as sx

ITEMS, USERS, DIM, BATCH = 3000, 2000, 16, 256


def make_data() -> tuple[Tensor, Tensor]:
    """Pairs (user, item): a user likes items near a taste, and popular items are bought more often."""
    torch.manual_seed(0)
    taste, item = torch.randn(USERS, 8), torch.randn(ITEMS, 8)
    popularity = -1.0 * torch.arange(1, ITEMS + 1).log()[torch.randperm(ITEMS)]
    chance = (taste @ item.T + popularity).softmax(1)
    return torch.arange(USERS).repeat_interleave(12), torch.multinomial(chance, 12, replacement=True).reshape(-1)


def train(kind: str, user: Tensor, item: Tensor, steps: int) -> float:
    """Recall@20 on held-out pairs after training with one kind of negatives."""
    torch.manual_seed(1)
    held = torch.rand(len(user)) < 0.1
    counts = torch.bincount(item[~held], minlength=ITEMS) + 1
    users = torch.nn.Embedding(USERS, DIM)
    sampler: sx.samplers.Sampler = sx.samplers.Unigram(counts)
    options: dict[str, object] = {"num_samples": 64}
    if kind in ("in-batch", "mixed"):
        extra = sx.samplers.Uniform(ITEMS) if kind == "mixed" else None
        sampler = sx.samplers.InBatch(ITEMS, sx.samplers.StreamingFrequency(ITEMS), extra=extra)
        options = {"num_samples": 64, "shared": True}
    if kind == "distinct":
        options["unique"] = True
    head = sx.SampledClassifier(DIM, ITEMS, sampler, **options)
    head.fuse_optimizer(sx.optim.RowAdagrad(head.parameters(), lr=0.3))
    optimizer = torch.optim.Adagrad(users.parameters(), lr=0.3)
    miner = sx.HardNegatives(head, 4, pool=512)
    rows = torch.nonzero(~held)[:, 0]
    for _ in range(steps):
        batch = rows[torch.randint(len(rows), (BATCH,))]
        h, y = users(user[batch]), item[batch]
        if kind == "uncorrected":
            loss = head(h, y, negatives=sx.Negatives(y))  # in-batch without log q
        elif kind == "own":
            ids = torch.randint(ITEMS, (BATCH, 64))  # from a log, say; here uniform, and said to be
            loss = head(h, y, negatives=sx.Negatives(ids, torch.full(ids.shape, 1 / ITEMS).log()))
        elif kind == "hard":
            loss = head(h, y, hard=miner.mine(h, y))
        else:
            loss = head(h, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    head.eval()
    with torch.no_grad():
        top = head.topk(users(user[held]), 20)[1]
    return float((top == item[held][:, None]).any(1).float().mean())


def main() -> None:
    """Train with each kind and print its recall."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args().steps
    user, item = make_data()
    for kind in ("uncorrected", "in-batch", "mixed", "own", "distinct", "hard"):
        print(f"{kind:12s} recall@20 {100 * train(kind, user, item, steps):.1f}%", flush=True)


if __name__ == "__main__":
    main()
