"""Extreme classification: sparse features, several labels per example, from a file of the XC repository's format.

Without --data it writes a small made-up file first, so nothing is downloaded.

Run it: python examples/extreme_classification.py [--data train.txt --test test.txt] [--epochs 4]. Expected output:

    train: Sparse(3000 examples, num_classes=500, num_features=1200)
    epoch 1: precision@1 0.91, precision@3 0.49, psp@1 0.54
    epoch 2: precision@1 0.92, precision@3 0.51, psp@1 0.55
    epoch 3: precision@1 0.95, precision@3 0.52, psp@1 0.56
    epoch 4: precision@1 0.94, precision@3 0.53, psp@1 0.56
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

import samplex_cuda as sx

LABELS, WORDS = 500, 1_200


def write_file(path: Path, examples: int, seed: int) -> None:
    """A header `rows features labels`, then lines `label,label word:value word:value`: each label has two words."""
    rng = random.Random(seed)
    lines = [f"{examples} {WORDS} {LABELS}"]
    for _ in range(examples):
        labels = sorted({min(int(rng.paretovariate(0.6)), LABELS) - 1 for _ in range(rng.randint(1, 3))})
        words = {2 * label + rng.randint(0, 1) for label in labels} | {1_000 + rng.randrange(200) for _ in range(3)}
        lines.append(f"{','.join(map(str, labels))} " + " ".join(f"{word}:1" for word in sorted(words)))
    path.write_text("\n".join(lines) + "\n")


class Tagger(nn.Module):
    """Weighted sums of word vectors, and a head over all labels with 256 shared draws."""

    def __init__(self, train: sx.data.Sparse, dim: int = 32) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(train.num_features, dim, mode="sum", sparse=True, include_last_offset=True)
        sampler = sx.samplers.Unigram(train.class_counts() + 1)
        self.head = sx.SampledClassifier(dim, train.num_classes, sampler, num_samples=256, shared=True)

    def encode(self, batch: dict[str, Tensor]) -> Tensor:
        """h [B, d] of a batch of sparse rows."""
        return self.words(batch["ids"], batch["offsets"], per_sample_weights=batch["values"])


@torch.no_grad()
def score(model: Tagger, test: sx.data.Sparse, propensities: Tensor) -> str:
    """Exact metrics over all labels."""
    batch = test.batch(torch.arange(len(test)))
    _, ids = model.head.topk(model.encode(batch), 3)
    y, metrics = batch["y"], sx.metrics
    return (
        f"precision@1 {metrics.precision_at_k(ids, y, 1):.2f}, precision@3 {metrics.precision_at_k(ids, y, 3):.2f}, "
        f"psp@1 {metrics.psp_at_k(ids, y, 1, propensities):.2f}"
    )


def main() -> None:
    """Read, train, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path)
    parser.add_argument("--test", type=Path)
    parser.add_argument("--epochs", type=int, default=4)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        files = options.data or Path(folder, "train.txt"), options.test or Path(folder, "test.txt")
        if options.data is None:
            write_file(files[0], 3_000, seed=0)
            write_file(files[1], 400, seed=1)
        train, test = (sx.data.xc_file(path, cache_dir=folder) for path in files)
        print(f"train: {train!r}")
        torch.manual_seed(0)
        model = Tagger(train)
        model.head.fuse_optimizer(sx.optim.RowAdagrad(model.head.parameters(), lr=0.2))
        optimizer = sx.optim.RowAdagrad(model.words.parameters(), lr=0.2)
        propensities = sx.metrics.propensities(train.class_counts(), len(train))
        for epoch in range(options.epochs):
            for batch in sx.data.Batches(train, batch_size=100, seed=0, epoch=epoch):
                model.head(model.encode(batch), batch["y"]).backward()
                optimizer.step()
                optimizer.zero_grad()
            print(f"epoch {epoch + 1}: {score(model, test, propensities)}")


if __name__ == "__main__":
    main()
