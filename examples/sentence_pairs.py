"""Pairs of texts with Zipf-distributed positives: in-batch losses of sentence-transformers and ours on equal batches.

    python examples/sentence_pairs.py

Words are made up and the model is a table of word vectors: no download. A query names its product by one word of two
and has two words of noise. Expected output on two CPU cores:

    loss                                  recall@1  of rare products  ms, best step
    MultipleNegativesRankingLoss             0.873             0.672            1.2
    InBatchLoss                              0.873             0.672            0.9
    InBatchLoss, counts                      0.909             0.720            1.0
    InBatchLoss, StreamingFrequency          0.907             0.716            2.0
"""

from __future__ import annotations

import argparse
import time

import sentence_transformers
import tokenizers
import torch

import samplex_cuda as sx

adapter = sx.integrations.sentence_transformers
PRODUCTS, NOISE = 500, 100


def make_model() -> sentence_transformers.SentenceTransformer:
    """The mean of word vectors."""
    torch.manual_seed(0)
    words = [f"p{i}{part}" for i in range(PRODUCTS) for part in "ab"] + [f"n{i}" for i in range(NOISE)]
    vocabulary = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(["?", *words])}, "?"))
    vocabulary.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    static = sentence_transformers.sentence_transformer.modules.StaticEmbedding(vocabulary, embedding_dim=64)
    return sentence_transformers.SentenceTransformer(modules=[static], device="cpu")


def queries(products: torch.Tensor, seed: int) -> list[str]:
    """A word of each product and two of noise."""
    g = torch.Generator().manual_seed(seed)
    which, noise = torch.randint(2, products.shape, generator=g), torch.randint(NOISE, (len(products), 2), generator=g)
    return [f"p{p}{'ab'[w]} n{a} n{b}" for p, w, (a, b) in zip(products.tolist(), which, noise.tolist(), strict=True)]


def titles(products: torch.Tensor) -> list[str]:
    """The second word of each product."""
    return [f"p{p}b" for p in products.tolist()]


def run(name: str, make, share: torch.Tensor, steps: int, batch: int) -> None:
    """Trains and prints a line."""
    model = make_model()
    loss, g = make(model), torch.Generator().manual_seed(1)
    optimizer, taken = torch.optim.Adam(model.parameters(), lr=0.01), []
    for step in range(steps):
        products = torch.multinomial(share, batch, replacement=True, generator=g)
        features = [model.preprocess(texts) for texts in (queries(products, step), titles(products))]
        start = time.perf_counter()
        loss(features, products).backward()
        optimizer.step()
        optimizer.zero_grad()
        taken.append(time.perf_counter() - start)
    asked = torch.multinomial(share, 4000, replacement=True, generator=torch.Generator().manual_seed(2))
    options = {"convert_to_tensor": True, "normalize_embeddings": True, "show_progress_bar": False}
    h, table = model.encode(queries(asked, -1), **options), model.encode(titles(torch.arange(PRODUCTS)), **options)
    right = ((h @ table.T).argmax(1) == asked).float()
    ms = min(taken) * 1e3  # other work on the machine only adds to it
    print(f"{name:<36s} {right.mean():9.3f} {right[asked >= PRODUCTS // 10].mean():17.3f} {ms:14.1f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=64)
    args = parser.parse_args()
    share = 1.0 / torch.arange(1.0, PRODUCTS + 1)
    frequency = sx.samplers.StreamingFrequency(PRODUCTS)
    print(f"{'loss':<36s} {'recall@1':>9s} {'of rare products':>17s} {'ms, best step':>14s}")
    losses = {
        "MultipleNegativesRankingLoss": sentence_transformers.sentence_transformer.losses.MultipleNegativesRankingLoss,
        "InBatchLoss": adapter.InBatchLoss,
        "InBatchLoss, counts": lambda model: adapter.InBatchLoss(model, share),
        "InBatchLoss, StreamingFrequency": lambda model: adapter.InBatchLoss(model, frequency=frequency),
    }
    for name, make in losses.items():
        run(name, make, share, args.steps, args.batch)
