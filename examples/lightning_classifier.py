"""Lightning: an encoder and a sampled head over 10,000 classes in Lightning's loop, with clipping and accumulation.

Run it: python examples/lightning_classifier.py [--epochs 4] (pip install 'samplex-cuda[lightning]'). Expected output:

    before: exact NLL 9.215, recall@5 0.0%
    after: exact NLL 4.395, recall@5 71.0%
"""

from __future__ import annotations

import argparse
import logging
import warnings

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import samplex_cuda as sx

NUM_CLASSES, FEATURES, DIM, ROWS = 10_000, 32, 64, 8192


def make_loader(*, train: bool) -> DataLoader:
    """Noisy copies of one vector per class, frequent classes more often."""
    centers = torch.randn(NUM_CLASSES, FEATURES, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1 + train)
    rows = ROWS if train else ROWS // 8
    y = (NUM_CLASSES ** torch.rand(rows, generator=generator)).long() - 1  # class k with probability about 1 / k
    x = centers[y] + 0.5 * torch.randn(rows, FEATURES, generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=64, shuffle=train, drop_last=True)


def main() -> None:
    """Validate, train, validate."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=4)
    epochs = parser.parse_args().epochs
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")  # Lightning recommends workers and loggers

    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(FEATURES, 128), nn.ReLU(), nn.Linear(128, DIM))
    # Ids are sorted by decreasing frequency, which is what LogUniform expects.
    head = sx.SampledClassifier(DIM, NUM_CLASSES, sx.samplers.LogUniform(NUM_CLASSES), num_samples=128)
    module = sx.integrations.lightning.SampledModule(encoder, head, lr=3e-3)
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        gradient_clip_val=1.0,
        accumulate_grad_batches=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    train, valid = make_loader(train=True), make_loader(train=False)
    for name in ("before", "after"):
        if name == "after":
            trainer.fit(module, train)
        [found] = trainer.validate(module, valid, verbose=False)
        print(f"{name}: exact NLL {found['val_nll']:.3f}, recall@5 {100 * found['val_recall@5']:.1f}%", flush=True)


if __name__ == "__main__":
    main()
