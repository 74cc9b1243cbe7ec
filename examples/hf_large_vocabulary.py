"""A language model with a vocabulary of 250,000: step time and memory with all logits and with sampled ones.

    python examples/hf_large_vocabulary.py

The model is made from a configuration and trained on Zipf-distributed ids: no download, no tokenizer. Expected output
on two CPU cores:

    full         1674 ms a step,  2.22 GiB at most
    sampled        35 ms a step,  0.81 GiB at most
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time

import torch
import transformers

import samplex_cuda as sx


def measure(kind: str, vocabulary: int, steps: int, batch: int, length: int) -> tuple[list[float], float]:
    """Trains for some steps; milliseconds of each, and the most memory of this process in GiB."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=vocabulary, n_embd=128, n_layer=2, n_head=4, n_positions=length)
    model = transformers.GPT2LMHeadModel(config).train()
    optimizer: torch.optim.Optimizer
    if kind == "sampled":
        sx.integrations.hf.replace_lm_head(model, sx.samplers.LogUniform(vocabulary), 2048)
        optimizer = sx.integrations.hf.make_optimizer(model, lr=1e-3)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    times = []
    for _ in range(steps):
        ids = (vocabulary ** torch.rand(batch, length)).long().clamp(max=vocabulary - 1)  # p(id) ~ 1 / id
        start = time.perf_counter()
        model(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - start)
    return [1e3 * t for t in times], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", choices=["full", "sampled"])
    parser.add_argument("--vocabulary", type=int, default=250_000)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=64)
    args = parser.parse_args()
    if args.kind:
        times, peak = measure(args.kind, args.vocabulary, args.steps, args.batch, args.length)
        print(f"{args.kind:8s} {sorted(times)[len(times) // 2]:8.0f} ms a step, {peak:5.2f} GiB at most")
    else:  # a process each: peak memory is that of a process
        for kind in ("full", "sampled"):
            subprocess.run([sys.executable, *sys.argv, "--kind", kind], check=True)
