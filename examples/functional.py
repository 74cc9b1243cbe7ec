"""The loss without the head: draw, score, step by hand, with several targets per row and known positives masked.

Run it: python examples/functional.py [--steps 200]. Expected output:

    before: exact loss 9.210
    after: exact loss 0.946
"""

from __future__ import annotations

import argparse

import torch

import samplex_cuda as sx

NUM_TAGS, DIM, BATCH, NUM_SAMPLES = 10_000, 16, 128, 64


def main() -> None:
    """Learn tag vectors for fixed documents and report the exact loss before and after."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps

    torch.manual_seed(0)
    documents = torch.nn.functional.normalize(torch.randn(BATCH, DIM), dim=1)
    # Each document has five tags: up to three are training targets, padded with -100, and all five are known.
    tags = torch.randint(NUM_TAGS, (BATCH, 5))
    target = tags[:, :3].clone()
    target[::2, 2] = -100
    known = (torch.arange(0, 5 * BATCH + 1, 5), tags.reshape(-1))  # CSR: row b knows ids[offsets[b]:offsets[b + 1]]

    weight = torch.zeros(NUM_TAGS, DIM, requires_grad=True)
    bias = torch.zeros(NUM_TAGS, requires_grad=True)
    sampler = sx.samplers.Uniform(NUM_TAGS)
    key = sx.Key(seed=0)  # the same draws on every machine
    temperature = 0.1

    def report(when: str) -> None:
        nll = sx.prediction.exact_nll(documents, weight, target, bias, scale=1 / temperature)
        print(f"{when}: exact loss {nll.mean().item():.3f}")

    report("before")
    for _ in range(steps):
        # Targets are left out of the draw, padding is -1 there; what the sampler then does is in log_q.
        draw = sampler.sample(documents, NUM_SAMPLES, exclude=target.clamp(min=-1), key=key)
        loss = sx.functional.sampled_softmax(
            documents, weight, target, draw.ids, draw.log_q, bias, scale=1 / temperature, positives=known
        )
        loss.backward()
        with torch.no_grad():  # plain SGD on the touched rows
            for table in (weight, bias):
                grad = table.grad.coalesce()
                table.index_add_(0, grad.indices()[0], grad.values(), alpha=-2.0)
                table.grad = None
    report("after")


if __name__ == "__main__":
    main()
