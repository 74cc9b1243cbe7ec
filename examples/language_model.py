"""A language model with a sampled head: the bigram sampler follows the previous word, the unigram sampler does not.

Run it: python examples/language_model.py [--steps 150]. Expected output:

    vocabulary 2,000, 20 draws per token
    Unigram: exact perplexity 197.2
    Bigram:  exact perplexity 71.3
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import samplex_cuda as sx

VOCABULARY, DIM, BATCH, LENGTH, DRAWS = 2_000, 48, 16, 32, 20


def text(tokens: int) -> Tensor:
    """Made-up text: each word has 20 possible successors, the first ones more often."""
    g = torch.Generator().manual_seed(0)
    successors = (VOCABULARY ** torch.rand(VOCABULARY, 20, generator=g)).long() - 1
    choice = (20 * torch.rand(tokens, generator=g) ** 2).long()
    found = [0]
    for c in choice.tolist():
        found.append(int(successors[found[-1], c]))
    return torch.tensor(found)


class Model(nn.Module):
    """Embedding, GRU, sampled head."""

    def __init__(self, sampler: sx.samplers.Sampler) -> None:
        super().__init__()
        self.embed, self.rnn = nn.Embedding(VOCABULARY, DIM), nn.GRU(DIM, DIM, batch_first=True)
        self.head = sx.SampledClassifier(DIM, VOCABULARY, sampler, DRAWS)

    def forward(self, x: Tensor, y: Tensor, **draws: Tensor | sx.Key) -> Tensor:
        """Loss of the next words y [B, T] after x [B, T]: sampled in training mode, exact in eval mode."""
        return self.head(self.rnn(self.embed(x))[0], y, **draws)


def perplexity(sampler: sx.samplers.Sampler, tokens: Tensor, steps: int, context: bool) -> float:
    """Train, then the exact perplexity on the end of the text."""
    torch.manual_seed(0)
    model = Model(sampler)
    body = [p for name, p in model.named_parameters() if not name.startswith("head.")]
    optimizer = torch.optim.Adam(body, lr=1e-2)
    model.head.fuse_optimizer(sx.optim.RowAdagrad(model.head.parameters(), lr=0.2))
    train, valid = tokens[:-2_000], tokens[-2_000:]
    for step in range(steps):
        start = torch.randint(len(train) - LENGTH, (BATCH,))
        window = train[start[:, None] + torch.arange(LENGTH + 1)]
        x, y = window[:, :-1], window[:, 1:]
        given = {"context": x} if context else {}  # the word before each target
        model(x, y, key=sx.Key(1, step), **given).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return model.eval()(valid[None, :-1], valid[None, 1:]).exp().item()


def main() -> None:
    """Two samplers at the same number of draws."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=150)
    steps = parser.parse_args().steps
    tokens = text(30_000)
    print(f"vocabulary {VOCABULARY:,}, {DRAWS} draws per token")
    unigram = sx.samplers.Unigram(torch.bincount(tokens, minlength=VOCABULARY) + 1)
    print(f"Unigram: exact perplexity {perplexity(unigram, tokens, steps, context=False):.1f}")
    bigram = sx.samplers.Bigram.from_tokens(tokens, VOCABULARY)
    print(f"Bigram:  exact perplexity {perplexity(bigram, tokens, steps, context=True):.1f}")


if __name__ == "__main__":
    main()
