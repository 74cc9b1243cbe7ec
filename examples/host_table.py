"""A class table that stays on the host, mapped from a file, while the encoder is on the GPU if there is one.

Run it: python examples/host_table.py. It takes some seconds and prints how many rows cross, and the accuracy over
all classes before and after training. Expected output:

    at most 3.8% of the rows cross in a step
    accuracy 0.00 -> 0.99
"""

from __future__ import annotations

import tempfile

import torch
from torch import nn

import samplex_cuda as sx

C, D, B, STEPS = 20_000, 32, 256, 300


def main() -> None:
    """Trains a linear encoder and the table of a head in a file."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    classes = nn.functional.normalize(torch.randn(C, D), dim=1)  # what there is to learn
    with tempfile.TemporaryDirectory() as folder:
        sampler = sx.samplers.Uniform(C)
        head = sx.SampledClassifier(D, C, sampler, num_samples=512, shared=True, scale=8.0, device="meta")
        head.host_table(f"{folder}/rows.npy")
        head.fuse_optimizer(sx.optim.RowAdagrad(head.parameters(), lr=0.1, rowwise=True))
        encoder = nn.Linear(D, D).to(device)
        optimizer = torch.optim.Adam(encoder.parameters(), lr=1e-3)
        test = torch.randint(2000, (1000,))

        def accuracy() -> float:
            head.eval()
            found = head.predict(encoder(classes[test].to(device))).cpu()
            head.train()
            return float((found == test).double().mean())

        first = accuracy()
        for _ in range(STEPS):
            y = torch.randint(2000, (B,))
            h = encoder((classes[y] + 0.1 * torch.randn(B, D)).to(device))
            head(h, y.to(device)).backward()
            optimizer.step()
            optimizer.zero_grad()
        print(f"at most {(B + 512) / C:.1%} of the rows cross in a step")
        print(f"accuracy {first:.2f} -> {accuracy():.2f}")


if __name__ == "__main__":
    main()
