"""A whole training step as one CUDA graph: encoder, sampled head and fused update, replayed with new data.

Run it: python examples/cuda_graph.py [--steps 300]. Without a GPU the same steps run one by one, with the same result.
Expected output, on a CPU:

    before: exact loss 9.221
    after: exact loss 4.039
    1.43 ms per step on cpu, captured: False
"""

from __future__ import annotations

import argparse
import time

import torch

import samplex_cuda as sx

CLASSES, FEATURES, DIM, BATCH, NUM_SAMPLES = 10_000, 32, 32, 128, 64


def main() -> None:
    """Train on clusters of points, with a rate that falls; report exact loss and time per step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    torch.manual_seed(0)
    centers = torch.randn(CLASSES, FEATURES)
    encoder = torch.nn.Sequential(torch.nn.Linear(FEATURES, DIM), torch.nn.Tanh(), torch.nn.Linear(DIM, DIM)).to(device)
    head = sx.SampledClassifier(DIM, CLASSES, sx.samplers.LogUniform(CLASSES), NUM_SAMPLES, device=device)
    # Rate and step count are tensors: the graph reads the current ones in every replay.
    rows = sx.optim.RowAdam(head.parameters(), lr=0.05, capturable=True)
    head.fuse_optimizer(rows)
    outer = torch.optim.AdamW(encoder.parameters(), lr=0.005, capturable=device.type == "cuda")
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(rows, max(steps, 1))

    def train(x: torch.Tensor, y: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        loss = head(encoder(x), y, key=key)
        loss.backward()  # the class rows are updated here
        outer.step()
        outer.zero_grad()
        return loss.detach()

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        y = (torch.rand(BATCH) ** 4 * CLASSES).long()  # small classes are frequent
        return centers[y] + 0.3 * torch.randn(BATCH, FEATURES), y

    def report(when: str) -> None:
        x, y = (t.to(device) for t in test)
        with torch.no_grad():
            print(f"{when}: exact loss {float(head.eval()(encoder(x), y)):.3f}")
        head.train()

    test = batch()
    report("before")
    step = sx.graphs.capture_step(train, key=sx.Key(seed=1), device=device)
    started = time.perf_counter()
    for _ in range(steps):
        step(*batch())
        schedule.step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    each = (time.perf_counter() - started) / max(steps, 1)
    report("after")
    print(f"{1e3 * each:.2f} ms per step on {device}, captured: {step.captured}")


if __name__ == "__main__":
    main()
