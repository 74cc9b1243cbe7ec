"""Lightning's strategy "ddp" on two processes, against a loop on one."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import samplex_cuda as sx

lightning = pytest.importorskip("lightning")
module_of = sx.integrations.lightning.SampledModule

C, D, BATCH, STEPS = 50, 8, 4, 4
CASES = {"clipped": (0.5, False), "fused": (None, True)}


class Keyed(module_of):
    """With a key for each step."""

    def training_step(self, batch, number):
        x, y = batch
        loss = self.head(self(x), y, key=sx.Key(7, number))
        self.log("train_loss", loss)
        return loss


def made(fused):
    torch.manual_seed(0)
    head = sx.SampledClassifier(D, C, sx.samplers.Uniform(C), num_samples=20)
    return Keyed(nn.Linear(D, D), head, lr=0.05, fused=fused)


def data(part=slice(None)):
    g = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(64, D, generator=g)[part], torch.randint(C, (64,), generator=g)[part])


def on_a_rank(folder: Path) -> None:
    warnings.simplefilter("ignore")
    found = {}
    for name, (clip, fused) in CASES.items():
        module = made(fused)
        run = lightning.Trainer(
            default_root_dir=folder, max_steps=STEPS, accelerator="cpu", devices=2, strategy="ddp", logger=False,
            enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=clip, enable_checkpointing=False,
            use_distributed_sampler=False,
        )  # fmt: skip
        if run.global_rank:  # the first rank's numbers count
            nn.init.zeros_(module.head.weight)
        own = DataLoader(data(slice(run.global_rank, None, 2)), batch_size=BATCH)
        run.fit(module, own)
        [measured] = run.validate(module, own, verbose=False)
        found[name] = {
            "parameters": {key: p.detach() for key, p in module.named_parameters()},
            "waits": module.waits,
            "val_nll": measured["val_nll"],
        }
    module = made(False)
    run = lightning.Trainer(
        default_root_dir=folder, max_steps=1, accelerator="cpu", devices=2, strategy="ddp_find_unused_parameters_true",
        logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    run.strategy.__class__ = type("OtherStrategy", (type(run.strategy),), {})
    try:
        run.fit(module, DataLoader(data(), batch_size=BATCH))
    except ValueError as error:
        found["refused"] = str(error)
    torch.save(found, folder / f"{run.global_rank}.pt")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    from rank_processes import run_ranks

    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(__file__, folder)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def by_hand(clip):
    """The same steps on one process, each part with the draws of its rows among those of both."""
    module, (x, y) = made(False), data().tensors
    dense, rows = sx.optim.split_parameters(module)
    optimizer = sx.optim.Combined(dense=torch.optim.AdamW(dense, lr=0.05), rows=sx.optim.RowAdam(rows, lr=0.05))
    for step in range(STEPS):
        for rank in range(2):
            part = torch.arange(rank, 64, 2)[BATCH * step : BATCH * (step + 1)]
            loss = module.head(module.encoder(x[part]), y[part], key=torch.tensor([7, step, BATCH * rank]))
            (loss / 2).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return module


@pytest.mark.parametrize("case", CASES)
def test_two_processes_train_as_one(case, ranks):
    clip, fused = CASES[case]
    one, two = (found[case] for found in ranks)
    assert (one["waits"] is None) == (not clip or not fused)
    module = by_hand(clip)
    for name, want in module.named_parameters():
        assert torch.equal(one["parameters"][name], two["parameters"][name]), name
        torch.testing.assert_close(
            one["parameters"][name], want.detach(), rtol=1e-3, atol=1e-5, msg=lambda said, name=name: f"{name}: {said}"
        )
    x, y = data().tensors
    with torch.no_grad():
        exact = float(module.head.eval()(module.encoder(x), y))
    assert one["val_nll"] == two["val_nll"] == pytest.approx(exact, abs=1e-3)


def test_other_strategies_are_refused(ranks):
    for found in ranks:
        assert 'SampledModule: strategy must be "ddp" on several processes, got OtherStrategy' in found["refused"]


if __name__ == "__main__":  # a rank
    on_a_rank(Path(sys.argv[1]))
