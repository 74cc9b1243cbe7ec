"""Next-item recommendation: a bag of recent items predicts the next one, among 20,000 items.

Run it: python examples/recommender.py [--steps 300]. Expected output:

    before: recall@10 0.1%
    step 100: exact NLL 8.005
    step 200: exact NLL 7.601
    step 300: exact NLL 7.370
    after: recall@10 40.6%
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import samplex_cuda as sx

NUM_ITEMS, NUM_TOPICS, DIM, HISTORY = 20_000, 200, 32, 8


def sessions(batch_size: int, popularity: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Made-up sessions: the items of one topic, popular ones more often. Returns history [B, 8] and next item [B]."""
    topic = torch.randint(NUM_TOPICS, (batch_size,), generator=generator)
    rank = torch.multinomial(popularity, batch_size * (HISTORY + 1), replacement=True, generator=generator)
    items = rank.view(batch_size, HISTORY + 1) * NUM_TOPICS + topic.unsqueeze(1)  # ids run from popular to rare
    return items[:, :HISTORY], items[:, HISTORY]


class Recommender(nn.Module):
    """Mean of item vectors, a small network, and a head that trains on 100 sampled items per session."""

    def __init__(self, counts: Tensor) -> None:
        super().__init__()
        self.items = nn.EmbeddingBag(NUM_ITEMS, DIM, sparse=True)
        self.body = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh())
        sampler = sx.samplers.Unigram(counts, power=0.75)
        self.head = sx.SampledClassifier(DIM, NUM_ITEMS, sampler=sampler, num_samples=100)

    def forward(self, history: Tensor, target: Tensor) -> Tensor:
        """Loss: sampled in training mode, exact in eval mode."""
        return self.head(self.encode(history), target)

    def encode(self, history: Tensor) -> Tensor:
        """[B, 8] item ids -> [B, 32]."""
        return self.body(self.items(history))


@torch.no_grad()
def recall_at_10(model: Recommender, history: Tensor, target: Tensor) -> float:
    """How often the next item is among the ten best of all items."""
    _, ids = model.head.topk(model.encode(history), 10)
    return (ids == target.unsqueeze(1)).any(1).double().mean().item()


def main() -> None:
    """Train and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps

    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    popularity = 1.0 / torch.arange(1, NUM_ITEMS // NUM_TOPICS + 1, dtype=torch.float64)
    model = Recommender(popularity.repeat_interleave(NUM_TOPICS))
    history, target = sessions(1000, popularity, torch.Generator().manual_seed(1))
    # Only the rows of a batch are touched: class vectors inside backward, item vectors by a row optimizer.
    model.head.fuse_optimizer(sx.optim.RowAdagrad(model.head.parameters(), lr=0.3))
    items = sx.optim.RowAdagrad(model.items.parameters(), lr=0.3)
    body = torch.optim.Adagrad(model.body.parameters(), lr=0.3)

    print(f"before: recall@10 {recall_at_10(model, history, target):.1%}")
    for step in range(1, steps + 1):
        model(*sessions(256, popularity, generator)).backward()
        for optimizer in (items, body):
            optimizer.step()
            optimizer.zero_grad()
        if step % 100 == 0:
            model.eval()
            print(f"step {step}: exact NLL {model(history, target).item():.3f}")
            model.train()
    print(f"after: recall@10 {recall_at_10(model, history, target):.1%}")


if __name__ == "__main__":
    main()
