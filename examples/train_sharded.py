"""A class table on several ranks, an encoder in DistributedDataParallel, a checkpoint that any number of ranks resumes.

    torchrun --nproc_per_node 2 examples/train_sharded.py
    torchrun --nproc_per_node 3 examples/train_sharded.py --resume

Each rank reads its part of the batch; the loss is the mean over the rows of all ranks. Expected output of the first:

    step 50: sampled loss 3.733
    step 100: sampled loss 3.598
    step 150: sampled loss 2.108
    step 200: sampled loss 1.688
    2 ranks, 10,000 of 20,000 classes on rank 0
    exact NLL 2.762, recall@10 0.801; checkpoint in runs/sharded
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import samplex_cuda as sx
from samplex_cuda.distributed import load_checkpoint, save_checkpoint

CLASSES, FEATURES, DIM, BATCH, DRAWS = 20_000, 32, 64, 256, 64


def make_batch(step: int, centers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The batch of all ranks in this step: a noisy center of a class, and the class; frequent ids first."""
    g = torch.Generator().manual_seed(step)
    y = (CLASSES ** torch.rand(BATCH, generator=g)).long() - 1
    return centers[y] + 0.3 * torch.randn(BATCH, FEATURES, generator=g), y


def main() -> None:
    """Train, evaluate, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--folder", type=Path, default=Path("runs/sharded"))
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same encoder everywhere
    encoder = DistributedDataParallel(nn.Sequential(nn.Linear(FEATURES, 128), nn.ReLU(), nn.Linear(128, DIM)))
    centers = torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(7))

    # On the meta device: no rank ever holds the whole table. DDP averages gradients, so encoder="average".
    head = sx.SampledClassifier(DIM, CLASSES, sx.samplers.LogUniform(CLASSES), DRAWS, device="meta")
    head = head.shard(encoder="average", order="spread", batch_capacity=-(-BATCH // world), key=sx.Key(1))
    rows = sx.optim.RowAdagrad(head.parameters(), lr=0.3)
    head.fuse_optimizer(rows)
    optimizer = torch.optim.Adam(encoder.parameters(), lr=3e-3)

    modules, optimizers = {"encoder": encoder, "head": head}, {"encoder": optimizer, "head": rows}
    key, first = sx.Key(2), 0
    if options.resume:
        extra = load_checkpoint(options.folder, modules, optimizers)
        first = extra["step"]
        key.load_state_dict(extra["key"])
    for step in range(first, first + options.steps):
        x, y = make_batch(step, centers)
        mine = torch.arange(BATCH).tensor_split(world)[rank]
        loss = head(encoder(x[mine]), y[mine], key=key)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and (step + 1) % 50 == 0:
            print(f"step {step + 1}: sampled loss {loss.item():.3f}", flush=True)

    encoder.eval(), head.eval()
    x, y = make_batch(10**6, centers)
    mine = torch.arange(BATCH).tensor_split(world)[rank]
    with torch.no_grad():
        nll = head(encoder(x[mine]), y[mine])
        top = head.topk(encoder(x[mine]), 10)[1]
    hits = (top == y[mine].unsqueeze(1)).any(1).float().sum()
    dist.all_reduce(hits)
    save_checkpoint(options.folder, modules, optimizers, extra={"step": first + options.steps, "key": key.state_dict()})
    if rank == 0:
        print(f"{world} ranks, {head.layout.rows:,} of {CLASSES:,} classes on rank 0")
        print(f"exact NLL {nll.item():.3f}, recall@10 {hits.item() / BATCH:.3f}; checkpoint in {options.folder}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
