"""A model whose whole step a CUDA graph can hold, for tests on every backend; and graphs on a CPU."""

from __future__ import annotations

import pytest
import torch
from step_recorder import RecordedGraph, recording

import samplex_cuda as sx
from samplex_cuda import graphs
from samplex_cuda.graphs import CapturedStep

CLASSES, DIM, BATCH, STEPS = 50, 8, 6, 8
OPTIMIZERS = {
    "sgd": lambda p, **o: sx.optim.RowSGD(p, lr=0.25, momentum=0.9, **o),
    "adagrad": lambda p, **o: sx.optim.RowAdagrad(p, lr=0.25, lr_decay=0.1, **o),
    "adam": lambda p, **o: sx.optim.RowAdam(p, lr=0.25, weight_decay=0.1, decoupled_weight_decay=True, **o),
}


FOLLOWING = ("kernel", "midx", "softmax")  # samplers that follow the class table


def _sampler(name):
    if name == "log-uniform":
        return sx.samplers.LogUniform(CLASSES)
    weight = torch.nn.functional.normalize(torch.randn(CLASSES, DIM), dim=1)
    if name == "kernel":
        return sx.samplers.RandomFourier(weight, 16, 1.0, key=sx.Key(1), normalize=True)
    if name == "midx":
        return sx.samplers.MIDX(weight, 4, bias=torch.zeros(CLASSES), key=sx.Key(1))
    return sx.samplers.Softmax(weight, torch.zeros(CLASSES), copy=True)


class Model:
    """An encoder with an update of its own, a head with a fused row optimizer, a schedule for both."""

    def __init__(
        self, name="adam", *, capturable, shared=False, scaler=False, bias=True, sampler="log-uniform", **options
    ):
        torch.manual_seed(3)
        self.encoder = torch.nn.Linear(DIM, DIM)
        self.head = sx.SampledClassifier(
            DIM, CLASSES, _sampler(sampler), num_samples=5, shared=shared, bias=bias,
            sampler_update="step" if sampler in FOLLOWING else None,
        )  # fmt: skip
        self.optimizer = OPTIMIZERS[name](self.head.parameters(), capturable=capturable, **options)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2) if scaler else None
        self.head.fuse_optimizer(self.optimizer, grad_scaler=self.scaler)
        # The step of a GPU, which these tests look at on a CPU: only a CPU has the gradient of h from its forward.
        if self.head.weight.device.type == "cpu":
            self.head.fused.at_once = False
        self.rate = torch.tensor(0.5)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.8)

    def step(self, x, y, key=None):
        loss = self.head(self.encoder(x), y, key=key)
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        with torch.no_grad():
            for p in self.encoder.parameters():
                p.sub_(self.rate * (p.grad if self.scaler is None else torch.where(p.grad.isfinite(), p.grad / 256, 0)))
                p.grad = None
        if self.scaler is not None:
            self.scaler.update()
        return loss.detach()

    def end(self):
        """What the host does between two steps."""
        self.schedule.step()
        self.rate.mul_(0.9)

    def tensors(self):
        found = [*self.encoder.parameters(), *self.head.parameters()]
        for p in self.head.parameters():
            found += [torch.as_tensor(v, dtype=torch.float64) for v in self.optimizer.state[p].values()]
        return found + ([] if self.scaler is None else [self.scaler._scale, self.scaler._growth_tracker])


def batch(number, overflow=False):
    g = torch.Generator().manual_seed(number)
    x, y = torch.randn(BATCH, DIM, generator=g), torch.randint(CLASSES, (BATCH,), generator=g)
    if overflow:
        x[2, 1] = torch.inf
    return x, y


@pytest.fixture
def graphs_on_cpu(monkeypatch):
    """`capture_step` takes CPU tensors for those of a GPU; a graph repeats the ops of the recording."""
    monkeypatch.setattr(graphs, "_on_gpu", lambda inputs: True)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", RecordedGraph)
    monkeypatch.setattr(torch.cuda, "graph", recording)
    monkeypatch.setattr(CapturedStep, "_on_side_stream", CapturedStep._run)


def run(model, step, steps=STEPS, bad=None):
    losses = []
    for number in range(steps):
        losses.append(step(*batch(number, overflow=number == bad)).clone())
        model.end()
    return losses
