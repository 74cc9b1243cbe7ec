"""Lightning runs encoder and head with one optimizer."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import samplex_cuda as sx

lightning = pytest.importorskip("lightning")
pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning recommends workers, loggers and names of folders
module_of = sx.integrations.lightning.SampledModule

C, D = 50, 8


def made(**options):
    torch.manual_seed(0)
    head = sx.SampledClassifier(D, C, sx.samplers.Uniform(C), num_samples=20)
    return module_of(nn.Linear(D, D), head, lr=0.05, **options)


def loader(n=64):
    g = torch.Generator().manual_seed(1)
    y = torch.randint(C, (n,), generator=g)
    x = torch.randn(C, D, generator=g)[y] + 0.1 * torch.randn(n, D, generator=g)
    return DataLoader(TensorDataset(x, y), batch_size=8)


def trainer(folder, epochs, **options):
    return lightning.Trainer(
        default_root_dir=folder, max_epochs=epochs, accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_model_summary=False, **options,
    )  # fmt: skip


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_fit_clips_and_accumulates(tmp_path, precision):
    module = made(scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.99))
    options = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2, "precision": precision}
    run = trainer(tmp_path, 8, enable_checkpointing=False, **options)
    [before] = run.validate(module, loader(), verbose=False)
    run.fit(module, loader(), loader())
    [after] = run.validate(module, loader(), verbose=False)
    assert after["val_nll"] < before["val_nll"] - 0.3
    assert after["val_recall@5"] > before["val_recall@5"]
    optimizer = run.optimizers[0]
    assert [group["lr"] for group in optimizer.param_groups] == [pytest.approx(0.05 * 0.99**32)] * 2


class Watched(module_of):
    """It keeps the largest entry of each gradient after clipping."""

    seen: list

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        super().configure_gradient_clipping(optimizer, gradient_clip_val, gradient_clip_algorithm)
        assert isinstance(self.head.weight.grad, sx.optim.RowGradient)
        self.seen += [float(p.grad.norm(float("inf"))) for p in self.parameters()]


def test_automatic_optimization_clips_by_value(tmp_path):
    module = Watched(nn.Linear(D, D), made().head)
    module.seen = []
    options = {"gradient_clip_val": 1e-4, "gradient_clip_algorithm": "value"}
    trainer(tmp_path, 1, enable_checkpointing=False, **options).fit(module, loader())
    assert len(module.seen) == 8 * 4
    assert max(module.seen) == pytest.approx(1e-4)


class Manual(module_of):
    """Its own loop; it keeps the norm after clipping."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.automatic_optimization = False
        self.norms = []

    def training_step(self, batch, number):
        x, y = batch
        optimizer = self.optimizers()
        self.manual_backward(self.head(self(x), y))
        self.clip_gradients(optimizer, gradient_clip_val=1e-3, gradient_clip_algorithm="norm")
        assert isinstance(self.head.weight.grad, sx.optim.RowGradient)
        self.norms.append(float(torch.stack([p.grad.norm() for p in self.parameters()]).norm()))
        optimizer.step()
        optimizer.zero_grad()


def test_manual_optimization(tmp_path):
    module = Manual(nn.Linear(D, D), made().head)
    before = module.head.weight.detach().clone()
    trainer(tmp_path, 1, enable_checkpointing=False).fit(module, loader())
    assert module.norms == [pytest.approx(1e-3, rel=1e-3)] * 8
    assert not torch.equal(before, module.head.weight)


def test_checkpoint_resumes(tmp_path):
    whole = made()
    trainer(tmp_path, 2).fit(whole, loader())
    [path] = tmp_path.rglob("*.ckpt")
    once = made()
    run = trainer(tmp_path / "more", 3)
    run.fit(once, loader(), ckpt_path=path, weights_only=False)
    state = run.optimizers[0].state
    assert state[once.head.weight]["step"] == state[once.encoder.weight]["step"] == 24
    stored = torch.load(path, weights_only=False)
    again = made()
    again.load_state_dict(stored["state_dict"])
    for p, q in zip(whole.parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q)
    optimizer = again.configure_optimizers()
    optimizer.load_state_dict(stored["optimizer_states"][0])
    assert int(optimizer.state[again.head.weight]["step"]) == 16


def test_a_fused_head_is_refused():
    module = made()
    module.head.fuse_optimizer(sx.optim.RowSGD(module.head.parameters()))
    with pytest.raises(ValueError, match="SampledModule: head must not have a fused optimizer"):
        module.configure_optimizers()
