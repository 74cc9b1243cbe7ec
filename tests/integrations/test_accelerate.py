"""Accelerate on one process and on two."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest
import torch
from torch import nn

import samplex_cuda as sx

accelerate = pytest.importorskip("accelerate")
C, D = 40, 8


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Linear(D, D)
        self.head = sx.SampledClassifier(D, C, sx.samplers.Uniform(C), num_samples=10)

    def forward(self, x, y, key=None):
        return self.head(self.encoder(x), y, key=key)


def run(accelerator, steps=range(6), rows=slice(None), folder=None, load=None):
    """Some steps with accumulation, clipping and a scheduler; returns model and optimizer as prepared."""
    model = Model()
    dense, tables = sx.optim.split_parameters(model)
    optimizer = sx.optim.Combined(dense=torch.optim.AdamW(dense, lr=0.05), rows=sx.optim.RowAdam(tables, lr=0.05))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    model, optimizer, scheduler = sx.integrations.accelerate.prepare(accelerator, model, optimizer, scheduler)
    if load:
        accelerator.load_state(load)
    for step in steps:
        g = torch.Generator().manual_seed(step)
        x, y = torch.randn(8, D, generator=g)[rows], torch.randint(C, (8,), generator=g)[rows]
        with accelerator.accumulate(model):
            accelerator.backward(model(x, y, sx.Key(7, step)))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    if folder:
        accelerator.save_state(folder)
    return model


def test_one_process_saves_and_resumes(tmp_path):
    made = [accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2) for _ in range(3)]
    whole = run(made[0])
    run(made[1], range(4), folder=str(tmp_path / "state"))
    resumed = run(made[2], range(4, 6), load=str(tmp_path / "state"))
    for (name, p), q in zip(whole.named_parameters(), resumed.named_parameters(), strict=True):
        assert torch.equal(p, q[1]), name
    assert not torch.equal(whole.head.weight, Model().head.weight)


def test_two_processes_train_as_one(tmp_path):
    """The two halves of each batch on two ranks: the class tables stay equal on both."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = []
    for rank in range(2):
        env = {
            **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        ranks.append(subprocess.Popen([sys.executable, __file__, str(tmp_path)], env=env))
    assert [p.wait(timeout=240) for p in ranks] == [0, 0]
    one, two = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    for name, value in one.items():
        assert torch.equal(value, two[name]), name
    assert not torch.equal(one["head.weight"], Model().head.weight)


def test_refused():
    accelerator = accelerate.Accelerator(cpu=True)
    model = Model()
    with pytest.raises(TypeError, match=r"prepare: optimizer must be an sx.optim.Combined, got AdamW"):
        sx.integrations.accelerate.prepare(accelerator, model, torch.optim.AdamW(model.parameters()))


if __name__ == "__main__":  # a rank
    accelerator = accelerate.Accelerator(cpu=True)
    rank = accelerator.process_index
    assert accelerator.num_processes == 2
    model = run(accelerator, range(3), slice(4 * rank, 4 * rank + 4))
    torch.save(accelerator.unwrap_model(model).state_dict(), f"{sys.argv[1]}/{rank}.pt")
    accelerator.end_training()
