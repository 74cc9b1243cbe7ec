"""Write a sampler: draw a cluster by its similarity to the query, then a class of that cluster uniformly.

A sampler needs `num_classes`, `sample` and `log_prob`; a head takes it like any other. What matters is that log_q is
the exact log-probability of each draw, here also with the target excluded.

Run it: python examples/custom_sampler.py [--steps 300]. Expected output:

    probabilities sum to 1: True
    uniform:    exact NLL 3.87
    by cluster: exact NLL 3.48
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

import samplex_cuda as sx

CLASSES, CLUSTERS, DIM, BATCH, DRAWS = 4_000, 40, 16, 128, 16
SIZE = CLASSES // CLUSTERS  # class c is in cluster c // SIZE


class ByCluster(sx.samplers.Sampler):
    """q(c | h) = softmax(sharpness * h . centers)[cluster of c] / SIZE."""

    _op = "ByCluster"

    def __init__(self, centers: Tensor, sharpness: float = 0.1) -> None:
        super().__init__()
        self.num_classes, self.sharpness = CLASSES, sharpness
        self.register_buffer("centers", centers)  # [K, d]

    def _left(self, h: Tensor, exclude: Tensor | None) -> tuple[Tensor, Tensor]:
        """Probability of each cluster [B, K] and its number of classes, without the excluded one."""
        q = (self.sharpness * h @ self.centers.t()).softmax(1)
        sizes = torch.full_like(q, SIZE)
        if exclude is not None:
            sizes.scatter_add_(1, exclude[:, None] // SIZE, torch.full_like(q[:, :1], -1.0))
        left = q * sizes / SIZE
        return left / left.sum(1, keepdim=True), sizes

    @torch.no_grad()
    def sample(self, h, num_samples, *, shared=False, key=None, exclude=None, context=None, batch_size=None):
        """Draw(ids [B, m], log_q [B, m]); `exclude` is [B] or None."""
        if shared:
            raise NotImplementedError("ByCluster: shared draws are not implemented; use shared=False")
        q, sizes = self._left(h, exclude)
        # Numbers in [0, 1) from the library's generator: the same key gives the same draws on every machine.
        bits = sx.samplers.Uniform(2**24).sample(None, 2 * num_samples, batch_size=len(h), key=key).ids
        first, second = (bits.float() / 2**24).split(num_samples, 1)
        cluster = torch.searchsorted(q.cumsum(1), first.contiguous()).clamp(max=CLUSTERS - 1)
        size = sizes.gather(1, cluster)
        place = (second * size).long().clamp(max=SIZE - 1)
        ids = cluster * SIZE + place
        if exclude is not None:  # within the target's cluster, places from the target on move up by one
            ids += (cluster == exclude[:, None] // SIZE) & (ids >= exclude[:, None])
        return sx.Draw(ids, q.gather(1, cluster).log() - size.log())

    @torch.no_grad()
    def log_prob(self, h, ids, *, exclude=None, context=None):
        """Log-probability of ids [B, n], float32 [B, n]."""
        q, sizes = self._left(h, exclude)
        log_q = q.gather(1, ids // SIZE).log() - sizes.gather(1, ids // SIZE).log()
        return log_q if exclude is None else log_q.masked_fill(ids == exclude[:, None], -torch.inf)


def exact_nll(sampler: sx.samplers.Sampler, steps: int, centers: Tensor) -> float:
    """The exact loss on new rows after training with `sampler`."""
    g = torch.Generator().manual_seed(0)
    vectors = centers.repeat_interleave(SIZE, 0) + 0.5 * torch.randn(CLASSES, DIM, generator=g)
    head = sx.SampledClassifier(DIM, CLASSES, sampler, DRAWS, bias=False)
    torch.nn.init.zeros_(head.weight)
    head.fuse_optimizer(sx.optim.RowAdagrad(head.parameters(), lr=0.3))
    for step in range(steps + 1):
        y = torch.randint(CLASSES, (BATCH,), generator=g)
        h = vectors[y] + 0.2 * torch.randn(BATCH, DIM, generator=g)
        if step < steps:
            head(h, y, key=sx.Key(1, step)).backward()
    return head.eval()(h, y).item()


def main() -> None:
    """Check the probabilities, then compare with uniform draws."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps
    centers = torch.randn(CLUSTERS, DIM, generator=torch.Generator().manual_seed(7))

    sampler = ByCluster(centers)
    h, y = torch.randn(3, DIM), torch.tensor([0, 5, 3_999])
    total = sampler.log_prob(h, torch.arange(CLASSES).expand(3, -1), exclude=y).exp().sum(1)
    print(f"probabilities sum to 1: {torch.allclose(total, torch.ones(3), atol=1e-4)}")
    print(f"uniform:    exact NLL {exact_nll(sx.samplers.Uniform(CLASSES), steps, centers):.2f}")
    print(f"by cluster: exact NLL {exact_nll(sampler, steps, centers):.2f}")


if __name__ == "__main__":
    main()
